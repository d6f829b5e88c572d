"""``factormix impute``: fill in missing values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import print_line
from factormix.cli.options import (
    Data,
    Device,
    MaxEpochs,
    Quiet,
    Reading,
    check_output,
    require_mixture,
    with_shared_options,
    write_frames,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.readers.base import Records, TableRows
    from factormix.data.sources.base import Rows


@with_shared_options
def impute(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A model of factormix train or an imputer; --fit writes it."
        ),
    ],
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="A .csv, .npy or .parquet file for the rows."
        ),
    ],
    fit: Annotated[
        bool, typer.Option("--fit", help="Train an imputer on DATA first, and write it to MODEL.")
    ] = False,
    max_epochs: MaxEpochs = None,
    n_draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draw this many completions instead of filling in the mean."),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Add intervals that hold the value with this probability, such as 0.9."),
    ] = None,
    random_state: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the draws and of --fit.", show_default="the model's"),
    ] = None,
    *,
    reading: Reading,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Fill in the missing values of DATA from the others in their row, and write the rows to OUT.

    Empty cells of a table, NA and ? in it, nulls of a .parquet file and NaN are missing. OUT has
    all columns of DATA, in their order; columns that the model does not have stay as they are. A
    .npy file has the columns of the model alone.

    With --n-draws each row comes several times, numbered by the columns row and draw; .npy has the
    shape (draws, rows, columns). With --interval the columns NAME_lower and NAME_upper follow; .npy
    has the shape (3, rows, columns): values, lower and upper ends.
    """
    kind = output.suffix.lower()
    check_output(output, (".csv", ".npy", ".parquet"), data, *(() if fit else (model,)))
    if fit:
        check_output(model, (".safetensors",), data, output)
    elif max_epochs is not None:
        raise InputError("--max-epochs is for training: add --fit, or leave it out.")

    from factormix.estimators import MFAImputer, load
    from factormix.estimators.imputation import check_imputation
    from factormix.estimators.validation import check_device, check_rows

    check_device(device)
    check_imputation(n_draws, interval)
    fitted: Any
    if fit:
        given = reading.read(data)
        options: Any = {"max_epochs": max_epochs, "random_state": random_state, "device": device}
        fitted = MFAImputer(**options, verbose=int(not quiet)).fit(given)
        fitted.save(model)
    else:
        fitted = load(model, device=device)
        if not isinstance(fitted, MFAImputer):
            fitted = require_mixture(fitted, model)
        if random_state is not None:
            fitted.set_params(random_state=random_state)
        given = reading.read(data, model=fitted)
    rows = check_rows(fitted, given)
    completions = _Completions(fitted, given, rows, n_draws, interval)
    if kind == ".npy":
        _write_npy(completions, output)
    else:
        completions.write(output)
    filled, total = completions.n_filled, rows.n_rows * rows.n_features
    if not quiet:
        print_line(f"{output} has {rows.n_rows:,} rows, {filled:,} of {total:,} values filled in")


class _Completions:
    """Completed rows in blocks, with a progress bar and a count of the values filled in."""

    def __init__(
        self, model: Any, given: TableRows, rows: Rows, n_draws: int | None, interval: float | None
    ) -> None:
        self.rows, self.n_draws, self.interval = rows, n_draws, interval
        self._model, self.n_filled = model, 0
        self.n_copies = n_draws or (1 if interval is None else 3)
        names = getattr(rows, "feature_names", None)
        # Rows without names have the columns of the model, and so their names.
        names = getattr(model, "feature_names_in_", None) if names is None else names
        self._has_names = names is not None
        self._features = [
            str(name) for name in (range(rows.n_features) if names is None else names)
        ]
        records = given.records
        # A folder of images and a table of lists have other columns than features.
        has_features = records is not None and len(records.features) == given.n_features
        self._records: Records | None = records if has_features else None
        self._columns = self._features
        if self._records is not None:
            own = self._records.features if given.feature_names is None else ()
            self._features = self._features if names is not None else list(own)
            new = dict(zip(own, self._features, strict=False))
            self._columns = [new.get(name, name) for name in self._records.columns]

    def blocks(self) -> Iterator[list[Any]]:
        """Yield arrays (B, d) for each block: the draws, or the values and ends of intervals."""
        from tqdm import tqdm

        from factormix.estimators.imputation import impute_blocks

        asked: dict[str, Any] = {"n_draws": self.n_draws, "interval": self.interval}
        with tqdm(total=self.rows.n_rows, unit="row", disable=None, leave=False) as bar:
            for n_filled, parts in impute_blocks(self._model, self.rows, **asked):
                arrays = [part.cpu().numpy() for part in parts]
                if self.interval is not None:
                    # The second is the deviations, which a table of values has no place for.
                    del arrays[1]
                self.n_filled += n_filled
                bar.update(len(arrays[0]))
                yield arrays

    def write(self, output: Path) -> None:
        """Write a .csv or .parquet file."""
        ends = [] if self.interval is None else ["lower", "upper"]
        added = [f"{name}_{end}" for end in ends for name in self._features]
        first = [] if self.n_draws is None else ["row", "draw"]
        there = set(self._columns)
        taken = next((name for name in (*first, *added) if name in there), None)
        if taken is not None:
            raise InputError(
                f"the data already has a column named {taken}, which impute would add: rename it,"
                " or write an .npy file, which has no names."
            )
        records, is_csv, options = self._records, output.suffix.lower() == ".csv", dict[str, Any]()
        decimal = None if records is None or not is_csv else records.decimal
        if records is not None and decimal is not None:
            options = {"sep": records.delimiter, "decimal": decimal}
        elif records is not None and records.schema is not None and not is_csv:
            options = {"schema": self._extend_schema(records.schema, first, added)}
        header = self._has_names or bool(first or added)
        write_frames(self._frames(first, added, decimal), output, header, **options)

    def _frames(self, first: list[str], added: list[str], decimal: str | None) -> Iterator[Any]:
        """Yield a data frame of each block with all columns of the file.

        The cells of a text table stay as they are, and its gaps get numbers with its ``decimal``.
        """
        import numpy as np
        import pandas as pd

        records, row = self._records, 0
        take = None if records is None else records.open(records.columns)
        for arrays in self.blocks():
            n, draws = len(arrays[0]), self.n_draws or 1
            values = np.stack(arrays[:draws], axis=1).reshape(n * draws, -1)
            filled = pd.DataFrame(values, columns=self._features)
            frame = filled
            if take is not None:
                frame = take(n).set_axis(self._columns, axis=1)
                frame = frame.loc[frame.index.repeat(draws)].reset_index(drop=True)
                for name in self._features:
                    column = filled[name]
                    frame[name] = (
                        column if decimal is None else _fill_cells(frame[name], column, decimal)
                    )
            if first:
                frame.insert(0, "row", np.repeat(np.arange(row, row + n), draws))
                frame.insert(1, "draw", np.tile(np.arange(draws), n))
            if added:
                frame = pd.concat(
                    [frame, pd.DataFrame(np.hstack(arrays[1:]), columns=added)], axis=1
                )
            yield frame
            row += n

    def _extend_schema(self, schema: Any, first: list[str], added: list[str]) -> Any:
        """Return the Arrow types of OUT: floats for features, and DATA's types for the rest."""
        import pyarrow as pa

        own = [pa.field(f.name, pa.float64()) if f.name in self._features else f for f in schema]
        whole = [pa.field(name, pa.int64()) for name in first]
        return pa.schema([*whole, *own, *(pa.field(name, pa.float64()) for name in added)])


def _fill_cells(cells: Any, values: Any, decimal: str) -> Any:
    """Return the cells of a text table with values in its gaps, written as the others are."""
    from factormix.data.readers.tables import is_missing

    missing = cells.map(is_missing)
    sign = "%" if cells.str.rstrip().str.endswith("%").any() else ""
    texts = [repr(value).replace(".", decimal) + sign for value in values[missing].tolist()]
    filled = cells.copy()
    filled[missing] = texts
    return filled


def _write_npy(completions: _Completions, output: Path) -> None:
    import numpy as np

    from factormix.files import replacing

    n, d = completions.rows.n_rows, completions.rows.n_features
    several = completions.n_draws is not None or completions.interval is not None
    single = str(completions.rows.dtype) in ("float32", "torch.float32")
    with replacing(output) as temporary:
        whole = np.lib.format.open_memmap(
            temporary,
            mode="w+",
            dtype=np.float32 if single else np.float64,
            shape=(completions.n_copies, n, d) if several else (n, d),
        )
        copies = whole if several else whole[None]
        row = 0
        for arrays in completions.blocks():
            for copy, array in zip(copies, arrays, strict=True):
                copy[row : row + len(array)] = array
            row += len(arrays[0])
        whole.flush()
