"""Code that the readers share: the choice of columns, the other columns, and temporary copies."""

from __future__ import annotations

import errno
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from factormix.data.features import list_names
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.files import FileRows, Layout
from factormix.data.sources.shards import ShardedRows
from factormix.errors import InputError

TableRows: TypeAlias = ArrayRows | ShardedRows
"""Rows that a reader makes of files."""
Column: TypeAlias = str | int
"""A name, or a number from 0; a string that is not the name of a column may be such a number."""

_ID_NAME = re.compile(r"(?:^|[ _.-])(?:id|ID|Id)$|[a-z](?:Id|ID)$")
"""Names such as id, customer_id and orderId."""
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@dataclass(frozen=True)
class Choice:
    """Which columns of a table are features, and which identify its rows.

    columns: the features, in their order; None for all columns of numbers.
    exclude: columns that are no features.
    ids: columns that identify rows and are no features; None for the first column that is left out
        and whose values are all different.
    known: the features of a model, which are taken if the table has them all.
    """

    columns: Sequence[Column] | None = None
    exclude: Sequence[Column] = ()
    ids: Sequence[Column] | None = None
    known: Sequence[str] | None = None


def find_columns(
    choice: Choice,
    names: Sequence[str] | None,
    width: int,
    name: str | Path,
    numeric: Sequence[bool] | None = None,
) -> NDArray[np.intp]:
    """Find the positions of the features among ``width`` columns, which may have names.

    ``numeric`` says which columns hold numbers; without it, all do.
    """

    def find(columns: Sequence[Column]) -> list[int]:
        return [find_column(column, names, width, name) for column in columns]

    if choice.columns is not None:
        places = find(choice.columns)
    elif choice.known and names is not None and set(choice.known) <= set(names):
        numbers = {label: j for j, label in enumerate(names)}
        places = [numbers[label] for label in choice.known]
    else:
        places = [j for j in range(width) if numeric is None or numeric[j]]
    others = {*find(choice.exclude), *find(choice.ids or ())}
    places = [j for j in places if j not in others]
    if not places:
        what = "columns of numbers" if choice.columns is None else "columns left"
        raise InputError(
            f"{name} has no {what}; choose columns, or convert some to numbers first, categories by"
            " pandas.get_dummies."
        )
    if len(set(places)) < len(places):
        raise InputError(f"A column of {name} was chosen twice; name each one once.")
    return np.array(places, dtype=np.intp)


def find_column(column: Column, names: Sequence[str] | None, width: int, name: str | Path) -> int:
    """Find the position of a column by its name or number."""
    if isinstance(column, str) and names is not None and column in names:
        if list(names).count(column) > 1:
            raise InputError(f"{name} has several columns called {column!r}; choose by number.")
        return list(names).index(column)
    number = str(column)
    if number.isascii() and number.isdigit() and int(number) < width:
        return int(number)
    known = f"it has {', '.join(names[:10])}" if names else "it has no names"
    more = " and others" if names and len(names) > 10 else ""
    raise InputError(
        f"{name} has no column {column!r}; {known}{more}, and numbers count from 0 to {width - 1}."
    )


@dataclass(frozen=True)
class Records:
    """The rows of a file as they are written, beside the numbers that were read from them.

    columns: the names of all columns, in the order of the file.
    features: the columns that were read as numbers.
    ids: the columns that identify rows.
    open_frames: opens the file again, and yields data frames of some columns.
    decimal, delimiter: how a text file writes numbers and separates them; None for other files.
    schema: the Arrow types of the columns, if they have any.
    """

    columns: tuple[str, ...]
    features: tuple[str, ...]
    ids: tuple[str, ...]
    open_frames: Callable[[Sequence[str]], Iterator[Any]]
    decimal: str | None = None
    delimiter: str = ","
    schema: Any = None

    def open(self, columns: Sequence[str]) -> Callable[[int], Any]:
        """Return a function that reads the next n rows of some columns, as a data frame."""
        import pandas as pd

        frames, held = self.open_frames(columns), pd.DataFrame(columns=list(columns))

        def take(n: int) -> Any:
            nonlocal held
            parts = [held]
            while sum(map(len, parts)) < n:
                parts.append(next(frames))
            whole = pd.concat([part for part in parts if len(part)], ignore_index=True)
            held = whole.iloc[n:]
            return whole.iloc[:n]

        return take


def find_ids(
    choice: Choice,
    names: Sequence[str],
    left_out: Sequence[int],
    read_head: Callable[[str], Sequence[object]],
    name: str | Path,
    index: Sequence[int] = (),
) -> tuple[str, ...]:
    """Find the columns that identify rows, and warn of the columns that are ``left_out``.

    ``read_head`` returns the first values of a column. The ``index`` of a data frame goes first. A
    warning also names a column that is used as a feature but looks like a numbering of the rows.
    """
    given, excluded = (
        {names[find_column(column, names, len(names), name)]: None for column in columns}
        for columns in (choice.ids or (), choice.exclude)
    )
    ids = list(given)
    if choice.ids is None:
        # Only as many columns are read as it takes to find one.
        heads = ((names[j], list(map(str, read_head(names[j])))) for j in (*index, *left_out))
        unique = (one for one, values in heads if values and len(set(values)) == len(values))
        ids = list(islice(unique, 1))
    shown = [names[j] for j in left_out if names[j] not in given and names[j] not in excluded]
    if choice.columns is not None or choice.known is not None:
        return tuple(ids)
    if shown:
        identify = f" {list_names(ids)} identifies rows;" if ids and not given else ""
        encode = " pandas.get_dummies encodes categories;" if set(shown).difference(ids) else ""
        warnings.warn(
            f"{name}: left out as not numeric: {list_names(shown)};{identify}{encode} --columns,"
            " --exclude and --id decide.",
            stacklevel=2,
        )
    features = [one for j, one in enumerate(names) if j not in (*index, *left_out)]
    for one in features:
        is_named = _ID_NAME.search(one) and one not in given and one not in excluded
        if is_named and _are_row_numbers(read_head(one)):
            warnings.warn(
                f"{name}: {one!r} is used as a feature: if it identifies rows, add --id {one}.",
                stacklevel=2,
            )
    return tuple(ids)


def _are_row_numbers(values: Sequence[object]) -> bool:
    """Return whether values are whole numbers and all different."""
    texts = list(map(str, values))
    return len(set(texts)) == len(texts) > 1 and all(text.strip().isdigit() for text in texts)


@contextmanager
def create_spool() -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which is deleted only if an error occurs."""
    with tempfile.NamedTemporaryFile(prefix="factormix-", delete=False) as file:
        try:
            yield file
            file.flush()
        except BaseException as error:
            # The rest of the buffer cannot be written either.
            with suppress(OSError):
                file.close()
            Path(file.name).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise InputError(
                    f"There is no room for a temporary copy in {tempfile.gettempdir()}; "
                    "set TMPDIR to a folder that has it."
                ) from error
            raise


def open_spool(
    file: IO[bytes], layout: Layout, path: str | Path, names: tuple[str, ...] | None = None
) -> FileRows:
    """Make rows of a temporary file, which they delete in the end."""
    return FileRows(file.name, layout=layout, name=str(path), feature_names=names, delete=True)
