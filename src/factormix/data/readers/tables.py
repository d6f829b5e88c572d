"""Rows of text tables, JSON lines and Excel sheets, which pandas reads in chunks.

Numbers may have a decimal comma, groups of thousands or a percent sign. JSON lines, sheets and
standard input are copied to a temporary text table first.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import re
import shutil
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, dropwhile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.readers.base import (
    Choice,
    Records,
    create_spool,
    find_columns,
    find_ids,
    open_spool,
)
from factormix.data.sources.files import FileRows, Layout
from factormix.errors import InputError, input_error, require_package

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".xlsx")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
MISSING = ("", "nan", "-nan", "na", "n/a", "#n/a", "#na", "<na>", "null", "none", "?")
"""Contents of a cell without a value, in upper or lower case: pandas's own, and a question mark."""
_MISSING_CELLS = [cell for m in MISSING for cell in (m, m.upper(), m.capitalize())]
HEAD_CHARACTERS = 1 << 20
"""Characters at the beginning of a file that decide its form, far more than a page of rows."""
HEAD_CELLS = 200_000
"""Cells of the head that are parsed, in about 0.1 s; wide tables show their kinds in few rows."""
READ_BYTES = 16 << 20
"""Bytes of numbers to read at once: pandas takes some microseconds for each column of a chunk."""
JSON_LINES = 10_000
"""JSON lines that are converted at once: some megabytes."""
COUNTING_COLUMNS = 16
"""From this many columns on, a first line that counts 0, 1, 2, ... is the header of a frame."""

_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_BOOLEANS = {"true": 1.0, "false": 0.0}
_GROUPS = {
    ".": re.compile(r"[+-]?[1-9]\d{0,2}(?:[,'\u00a0\u202f]\d{3})+(?:\.\d+)?"),
    ",": re.compile(r"[+-]?[1-9]\d{0,2}(?:[.'\u00a0\u202f]\d{3})+(?:,\d+)?"),
}
"""Numbers with groups of thousands, by their decimal sign."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d[\d.'\u00a0\u202f]*,\d+\s*%?")


def read_table(
    path: Path,
    choice: Choice = Choice(),  # noqa: B008 - it is frozen
    header: bool | None = None,
    key: str | None = None,
    *,
    chunk_bytes: int = READ_BYTES,
) -> FileRows:
    """Make rows of the numbers in a table; its first line gives the names if it is a header.

    ``key`` is the name of a sheet. The path - is standard input.
    """
    try:
        source = _open_source(path, key)
        try:
            return _read(_Table(source, header), choice, chunk_bytes)
        except UnicodeDecodeError:
            # Text of Windows; the other common encodings have marks.
            return _read(_Table(source, header, "cp1252"), choice, chunk_bytes)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{path} cannot be unpacked ({error}); write it again.") from error


def _read(table: _Table, choice: Choice, chunk_bytes: int) -> FileRows:
    places, records = table.choose(choice)
    n, complete = 0, True
    with create_spool() as copy:
        for block in table.read_blocks(places, max(1, chunk_bytes // (8 * table.width))):
            complete &= not np.isnan(block).any()
            copy.write(block.data)
            n += len(block)
        if not n:
            raise InputError(f"{table.name} has names but no rows; give at least one row.")
    layout = Layout.contiguous((n, len(places)), np.dtype(np.float64))
    names = records.features if table.names else None
    rows = open_spool(copy, layout, table.name, names).mark_finite(complete=complete)
    rows.records = records
    return rows


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value: it is empty, or a mark such as NA, ? or null."""
    return cell.strip().lower() in MISSING


def parse_number(cell: str, decimal: str = ".") -> float | None:
    """Return the number in a cell, or None; a percent sign stays a unit, and true is 1."""
    text = cell.strip().removesuffix("%").rstrip()
    if _GROUPS[decimal].fullmatch(text):
        text = re.sub(r"[^\d+-]" if decimal not in text else rf"[^\d+\-{decimal}]", "", text)
    if decimal == ",":
        text = text.replace(",", ".")
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return _BOOLEANS.get(text.lower())


@dataclass
class _Source:
    """A text table, or a temporary copy of something else in this form.

    records_before: None for a text table, whose lines are counted; else the number of records in
        the copy before record 1 of the original.
    """

    path: Path
    name: str
    records_before: int | None = None

    def delete_with_this(self) -> _Source:
        """Return this source, whose file is deleted when it is garbage-collected."""
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        return self


def _open_source(path: Path, key: str | None) -> _Source:
    """Copy standard input, JSON lines or a sheet to a temporary text table."""
    source = _Source(path, str(path))
    kind = (path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path).suffix
    if source.name == "-":
        with create_spool() as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        source = _Source(Path(copy.name), "standard input").delete_with_this()
        with _open_text(source.path, "latin-1") as text:
            kind = ".jsonl" if text.read(1) == "{" else ".csv"
    if kind.lower() not in (".jsonl", ".xlsx"):
        return source
    with create_spool() as copy:
        if kind.lower() == ".jsonl":
            _copy_json_lines(source, copy)
        else:
            _copy_sheet(source, key, copy)
    return _Source(Path(copy.name), source.name, int(kind.lower() == ".jsonl")).delete_with_this()


def _copy_json_lines(source: _Source, copy: IO[bytes]) -> None:
    """Copy objects as rows; the first ones give the columns."""
    import pandas as pd

    names: list[str] | None = None
    objects = list[Any]()
    with _open_text(source.path, "utf-8-sig") as text:
        for number, line in enumerate(chain(text, [""]), 1):
            refusal = f"{source.name} has no JSON in line {number}; write an object in each line."
            with input_error(refusal, ValueError):
                objects += [json.loads(line)] if line.strip() else []
            if len(objects) == JSON_LINES or (objects and not line):
                frame = pd.DataFrame(objects)
                frame.reindex(columns=names or frame.columns).to_csv(
                    copy, index=False, header=names is None
                )
                names, objects = names or list(frame.columns), []


def _copy_sheet(source: _Source, key: str | None, copy: IO[bytes]) -> None:
    import zipfile

    import pandas as pd

    require_package("openpyxl", "excel")
    sheet = 0 if key is None else key
    refusal = f"{source.name} cannot be read as a sheet of Excel ({{reason}}); save it again."
    with input_error(refusal, ValueError, KeyError, zipfile.BadZipFile):
        frame = pd.read_excel(source.path, sheet, header=None, dtype=object, engine="openpyxl")
    frame.dropna(how="all").to_csv(copy, index=False, header=False)


@contextmanager
def _open_text(path: Path, encoding: str) -> Iterator[Any]:
    """Open a text file that may be compressed, by its first bytes."""
    with open(path, "rb") as file:
        magic = file.read(6)
    openers: dict[bytes, Callable[..., Any]] = {
        b"\x1f\x8b": gzip.open,
        b"BZh": bz2.open,
        b"\xfd7zXZ\x00": lzma.open,
        b"\x28\xb5\x2f\xfd": _open_zstandard,
    }
    opener = next((one for mark, one in openers.items() if magic.startswith(mark)), open)
    with (
        opener(path, "rb") as file,
        io.TextIOWrapper(
            file, encoding, "replace" if encoding == "cp1252" else None, newline=""
        ) as text,
    ):
        yield text


def _open_zstandard(path: Path, mode: str) -> Any:
    return require_package("pyarrow", "data").input_stream(str(path), compression="zstd")


class _Table:
    """A text table: its form, found from the first lines, and its rows."""

    def __init__(self, source: _Source, header: bool | None, encoding: str | None = None) -> None:
        self._source, self.name = source, source.name
        with _open_text(source.path, "latin-1") as text:
            start = text.read(3).encode("latin-1")
        marked = (name for mark, name in _MARKS.items() if start.startswith(mark))
        self._encoding = encoding or next(marked, "utf-8")
        with _open_text(source.path, self._encoding) as text:
            lines = text.readlines(HEAD_CHARACTERS)
            cut = bool(text.read(1))
        if any("\0" in line for line in lines[:10]):
            raise InputError(f"{self.name} is not a text file; save it as one.")
        if not any(line.strip() for line in lines):
            raise InputError(f"{self.name} has only blank lines; write it again.")
        self._n_comments = count_comments(lines)
        lines = lines[self._n_comments :]
        self.delimiter = find_delimiter(lines)
        records = list(self._split(lines))
        first, *below = records[:-1] if cut and len(records) > 1 else records
        self.width = len(first)
        below = [cells[: self.width] for cells in below if self._is_whole(cells)]
        all_below, below = below, below[: max(20, HEAD_CELLS // self.width)]
        self._all_seen = not cut and len(below) == len(all_below) > 0
        cells = (cell for row in (first, *below) for cell in row if "," in cell)
        numbers = [cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell.strip())]
        grouped = _GROUPS["."]
        self.decimal = "," if any(not grouped.fullmatch(n.rstrip("% ")) for n in numbers) else "."
        if source.records_before:
            header = True
        if header is None:
            header = _is_header(self.name, first, below, self._parse)
        self._unnamed = [j for j, cell in enumerate(first) if header and not cell.strip()]
        self.names = name_columns(first) if header else None
        self._head = list(zip(*(below if header else [first, *below]), strict=True))

    def choose(self, choice: Choice) -> tuple[list[int], Records]:
        """Choose the columns to read, and describe all of them."""
        names = self.names or tuple(map(str, range(self.width)))
        heads = self._head or [()] * self.width
        numeric = [self._is_numeric(cells) for cells in heads]
        for j in range(self.width) if self.names and self._all_seen else self._unnamed:
            # An empty column, or a delimiter at the end of each line.
            numeric[j] = numeric[j] and not all(map(is_missing, heads[j]))
        if self._unnamed[:1] == [0]:
            numeric[0] = False  # row numbers
        places = find_columns(choice, self.names, self.width, self.name, numeric).tolist()
        left_out = sorted({j for j in range(self.width) if not numeric[j]}.difference(places))
        heads_by_name = dict(zip(names, heads, strict=True))
        ids = find_ids(choice, names, left_out, heads_by_name.__getitem__, self.name)
        features = tuple(names[j] for j in places)
        records = Records(names, features, ids, self.read_texts, self.decimal, self.delimiter)
        return places, records

    def read_blocks(self, places: Sequence[int], size: int) -> Iterator[NDArray[np.float64]]:
        """Yield blocks of numbers, (m, len(places)), with NaN for missing values."""
        # The last column shows lines that are too short, the one after it those that are too long.
        last, checked, first = self.width - 1, False, 0
        # Without a type, pandas would try to read numbers.
        others = dict.fromkeys(set(range(self.width)).difference(places), str)
        for frame in self._read_frames(size, dtype=others or None, na_values=_MISSING_CELLS):
            if frame[last + 1].notna().any() or (not checked and frame[last].isna().any()):
                self._find_fault()
                checked = True
            kinds = [dtype.kind for dtype in frame.dtypes]
            for j in places:
                if kinds[j] not in "iuf":
                    frame[j] = self._convert(frame[j], j, first)
            block = frame[list(places)].to_numpy(np.float64)
            wrong = np.argwhere(np.isinf(block))
            if len(wrong):
                self._find_fault(first + int(wrong[0, 0]), places[int(wrong[0, 1])])
            yield np.ascontiguousarray(block)
            first += len(block)

    def read_texts(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield data frames of some columns as text."""
        names = self.names or tuple(map(str, range(self.width)))
        numbers = {name: j for j, name in enumerate(names)}
        places = [numbers[column] for column in columns]
        size = max(1, READ_BYTES // (8 * self.width))
        for frame in self._read_frames(size, dtype=str, na_filter=False):
            yield frame[places].set_axis(list(columns), axis=1)

    def _read_frames(self, size: int, **options: Any) -> Iterator[Any]:
        """Yield data frames of ``size`` rows, with numbers for the names of columns."""
        import pandas as pd

        with self._open_below_comments() as text:
            if self.names is not None:
                next(self._split(text))
            try:
                yield from pd.read_csv(
                    text,
                    sep=self.delimiter,
                    header=None,
                    names=range(self.width + 1),
                    index_col=False,
                    skipinitialspace=True,
                    decimal=self.decimal,
                    chunksize=size,
                    **options,
                )
            except pd.errors.EmptyDataError:
                return
            except pd.errors.ParserError as error:
                self._find_fault()
                reason = str(error).strip().rpartition("C error: ")[2]
                raise InputError(f"{self.name} cannot be read ({reason}).") from error

    @contextmanager
    def _open_below_comments(self) -> Iterator[Any]:
        with _open_text(self._source.path, self._encoding) as text:
            for _ in range(self._n_comments):
                text.readline()
            yield text

    def _convert(self, cells: Any, place: int, first: int) -> Any:
        """Parse the cells of a column that pandas does not take for numbers."""
        import pandas as pd

        codes, values = pd.factorize(cells)
        texts = list(map(str, values))
        parsed = [math.nan if is_missing(text) else self._parse(text) for text in texts]
        if None in parsed:
            row = int(np.flatnonzero(codes == parsed.index(None))[0])
            self._find_fault(first + row, place)
        # The code -1 is a missing value.
        return np.array([*parsed, math.nan], np.float64)[codes]

    def _parse(self, cell: str) -> float | None:
        return parse_number(cell, self.decimal)

    def _is_numeric(self, cells: Sequence[str]) -> bool:
        """Return whether a column holds numbers, with fewer other cells than numbers."""
        present = [cell for cell in cells if not is_missing(cell)]
        others = sum(self._parse(cell) is None for cell in present)
        return 2 * others <= len(present)

    def _split(self, lines: Any) -> Iterator[list[str]]:
        """Yield the cells of each line that is not blank."""
        reader = csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True)
        return (cells for cells in reader if len(cells) > 1 or "".join(cells).strip())

    def _is_whole(self, cells: Sequence[str]) -> bool:
        """Return whether a line has all cells; a delimiter may follow the last one."""
        return len(cells) == self.width or (len(cells) == self.width + 1 and not cells[-1].strip())

    def _find_fault(self, row: int | None = None, place: int = -1) -> None:
        """Raise the error about a cell, or about a line before it that has not all cells."""
        with self._open_below_comments() as text:
            reader = csv.reader(text, delimiter=self.delimiter, skipinitialspace=True)
            number = -1 if self.names is not None else 0
            before = self._source.records_before
            for cells in reader:
                if len(cells) <= 1 and not "".join(cells).strip():
                    continue
                at = reader.line_num + self._n_comments
                if before is not None:
                    at = number + (self.names is not None) + 1 - before
                if not self._is_whole(cells):
                    raise InputError(
                        f"{self.name} has {len(cells)} columns in line {at}, and {self.width} in"
                        " the first line; give every line the same number."
                    )
                if number == row:
                    cell = cells[place].strip()
                    fault = f"{cell[:40]!r}, which is not a number,"
                    fault = fault if self._parse(cell) is None else f"an infinite value ({cell})"
                    name = f" ({self.names[place]})" if self.names else ""
                    words = all(self._parse(one) is None for one in cells)
                    second = number == 0 and self.names and words
                    remedy = (
                        f"delete line {at} if it is a second header, or leave the column out"
                        if second
                        else "write a finite number or leave the cell empty, or leave the column"
                        " out"
                    )
                    raise InputError(
                        f"{self.name} has {fault} in line {at}, column {place + 1}{name}; {remedy}"
                        " by --exclude."
                    )
                number += 1


def count_comments(lines: Sequence[str]) -> int:
    """Count the lines with a # above a table; the last is no comment if it may be the header."""
    below = list(dropwhile(lambda line: line.lstrip().startswith("#"), lines))
    n = len(lines) - len(below)
    if not n or not below:
        return 0
    delimiter = find_delimiter(below)
    last, first = csv.reader([lines[n - 1], below[0]], delimiter=delimiter)
    return n - 1 if len(last) == len(first) else n


def find_delimiter(lines: Sequence[str]) -> str:
    """Find the sign that splits most of the first lines into as many cells as the first one.

    Tabs and semicolons go before commas, which may be decimal signs.
    """

    def rate(delimiter: str) -> float:
        rows = [row for row in csv.reader(lines[:100], delimiter=delimiter) if row]
        width = len(rows[0])
        return sum(len(row) == width for row in rows) / len(rows) if width > 1 else 0.0

    return max(("\t", ";", "|", ",") if any(map(rate, "\t;|")) else ",", key=rate)


def name_columns(cells: Sequence[str]) -> tuple[str, ...]:
    """Name columns as pandas does: each name once, and "Unnamed: 2" for none."""
    names = dict[str, None]()
    for j, cell in enumerate(cells):
        name = first = (cell.strip().removeprefix("#") if j == 0 else cell).strip()
        name = first = first or f"Unnamed: {j}"
        copies = 0
        while name in names:
            copies += 1
            name = f"{first}.{copies}"
        names[name] = None
    return tuple(names)


def _is_header(
    name: str,
    first: Sequence[str],
    below: Sequence[Sequence[str]],
    parse: Callable[[str], float | None],
) -> bool:
    """Return whether the cells of a first line (d,) are names, given the lines below, each (d,).

    Words are names. Different whole numbers beside them, such as years, are names too if something
    shows that they are no values: a word stands above numbers, a number without decimals stands
    above numbers with decimals, or all numbers lie beyond the values below them. In a line without
    words, only the decimals or a count of many columns show it. In doubt the line is a row, with a
    warning if it looks like names.
    """
    first = [cell.strip() for cell in first]
    columns = list(zip(*below, strict=True)) or [()] * len(first)
    kinds = [cell.lower() not in _BOOLEANS and parse(cell) is not None for cell in first]
    labels = [j for j, is_number in enumerate(kinds) if is_number]
    words = [j for j, cell in enumerate(first) if not kinds[j] and not is_missing(cell)]
    numbers = [first[j] for j in labels]
    if not all(map(_is_plain, numbers)) or len(set(numbers)) < len(numbers):
        return False
    if words and (not numbers or not below):
        return True
    values = [[parse(cell) for cell in cells if not is_missing(cell)] for cells in columns]
    if any(values[j] and None not in values[j] for j in words):
        return True
    counts = list(map(int, numbers))
    counting = bool(counts) and counts == list(range(counts[0], counts[0] + len(counts)))
    if not words and len(numbers) < len(first):
        # The index of a data frame has no name above it.
        return counting and not first[0] and len(numbers) == len(first) - 1
    if not words and counting and counts[0] in (0, 1) and len(counts) >= COUNTING_COLUMNS:
        return True
    if any(_is_fractional(columns[j], values[j]) for j in labels):
        return True
    outside = len(below) > 2 and all(_is_outside(int(first[j]), values[j]) for j in labels)
    if words:
        return outside
    if outside or (counting and len(counts) > 2 and below):
        warnings.warn(
            f"the first line of {name} is taken as a row of numbers, though it may have names"
            f" ({', '.join(first[:3])}, ...): say which it is, by --header or --no-header, or by"
            " header=True or False in Python.",
            stacklevel=2,
        )
    return False


def _is_plain(cell: str) -> bool:
    """Return whether a cell is a whole number written like a name: digits and nothing else."""
    return cell.isascii() and cell.isdigit() and (cell == "0" or cell[0] != "0")


def _is_fractional(cells: Sequence[str], values: Sequence[float | None]) -> bool:
    """Return whether all values of a column are finite numbers with a decimal sign or exponent."""
    whole = (cell.strip().lstrip("+-").isdigit() for cell in cells)
    finite = all(value is not None and math.isfinite(value) for value in values)
    return bool(values) and finite and not any(whole)


def _is_outside(label: int, values: Sequence[float | None]) -> bool:
    """Return whether a number lies beyond all others of its column."""
    known = [value for value in values if value is not None and value == value]
    return bool(known) and not min(known) <= label <= max(known)
