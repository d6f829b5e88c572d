"""Files and folders as rows: .npy, .npz, .csv, .parquet and folders of images.

A .npy file is read where it lies. All else is converted block by block into a temporary file, which
goes when its rows are closed or forgotten, so that memory does not grow with the source.
"""

from __future__ import annotations

import csv
import errno
import math
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.layouts import Layout, npy_layout
from factormix.data.sources import CHUNK_BYTES, FileRows, check_finite
from factormix.errors import InputError

__all__ = ["read_rows"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
# The array taken from an .npz file that has several.
USUAL_KEYS = ("X", "x", "data")
# A first row that counts 0, 1, 2, ... to this many columns was written by a data frame as names.
COUNTING_HEADER = 16


def read_rows(
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> FileRows:
    """Make rows, shape (n, d), of a file or folder, and check all of it on the way.

    .npy: a table in any real dtype. A uint8 stack of images, (n, height, width) or (n, height,
        width, 1 or 3), is flattened, with its shape in `image_shape`; its values stay 0 to 255.
    .npz: the array called `key`; without one, its only array or the one called X, x or data.
    .csv: numbers split by commas, semicolons or tabs, with or without a line of names; float64.
    .parquet: numeric columns, in the smallest dtype that holds them all.
    A folder: its images by name, each a row of height * width values, times 3 in colour, scaled to
        [0, 1]; float32. `image_size`, (height, width), resizes them; without it all need one size.
        If any image is in colour, all are read as RGB; transparency is dropped.

    Raises `InputError` with one sentence on whatever is wrong, such as a NaN and where it is.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; check the path.")
    suffix = path.suffix.lower()
    if not path.is_dir() and suffix not in _READERS:
        raise InputError(
            f"{path} is of an unknown kind; give a {', '.join(_READERS)} file "
            "or a folder of images."
        )
    if key is not None and (suffix != ".npz" or path.is_dir()):
        raise InputError(f"A key was given, but {path} is not an .npz file; leave the key out.")
    if image_size is not None and not path.is_dir():
        raise InputError(
            f"An image size was given, but {path} is not a folder of images; leave it out."
        )
    try:
        if path.is_dir():
            return _read_images(path, image_size)
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty; write it again.")
        return _read_npz(path, key) if suffix == ".npz" else _READERS[suffix](path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read_npy(path: Path) -> FileRows:
    source = FileRows(path, name=str(path))
    check_finite(source, str(path))
    source.name = path.name
    return source


def _read_npz(path: Path, key: str | None = None) -> FileRows:
    try:
        with zipfile.ZipFile(path) as archive:
            member = _npz_member(path, archive.namelist(), key)
            with archive.open(member) as stream:
                layout = npy_layout(stream, f"{path} [{member.removesuffix('.npy')}]")
            with _spool() as spool, archive.open(member) as stream:
                shutil.copyfileobj(stream, spool, CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a readable .npz file; write it again with numpy.savez."
        ) from error
    source = _spooled(spool, layout, path)
    try:
        check_finite(source, str(path))
    except InputError:
        source.close()
        raise
    return source


def _npz_member(path: Path, members: Sequence[str], key: str | None) -> str:
    names = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
    if not names:
        raise InputError(f"{path} has no arrays in it; write it again with numpy.savez.")
    if key is None:
        key = names[0] if len(names) == 1 else next((k for k in USUAL_KEYS if k in names), None)
    if key is None:
        raise InputError(f"{path} has several arrays ({', '.join(names)}); say which with a key.")
    if key not in names:
        raise InputError(f"{path} has no array called {key!r}; it has {', '.join(names)}.")
    return f"{key}.npy"


@dataclass(frozen=True)
class _Table:
    """Say how the lines of a .csv file are to be read."""

    path: Path
    delimiter: str
    width: int
    names: tuple[str, ...] | None

    def cells(self, line: str) -> list[str]:
        return _split(line, self.delimiter)

    def block(self, lines: Sequence[tuple[int, str]]) -> NDArray[np.float64]:
        """Turn numbered lines into a block, (len(lines), width)."""
        try:
            block = np.loadtxt(
                [line for _, line in lines],
                delimiter=self.delimiter,
                comments=None,
                quotechar='"',
                ndmin=2,
            )
        except ValueError:
            block = np.empty((0, 0))
        if block.shape != (len(lines), self.width) or not np.isfinite(block).all():
            raise self.complaint(lines)
        return block

    def complaint(self, lines: Sequence[tuple[int, str]]) -> InputError:
        """Find what is wrong with lines that could not be read."""
        for number, line in lines:
            cells = self.cells(line)
            if len(cells) != self.width:
                return InputError(
                    f"{self.path} has {len(cells)} columns in line {number}, "
                    f"where {self.width} are expected; give every line as many."
                )
            for j, cell in enumerate(cells):
                wrong = _wrong_with(cell)
                if wrong:
                    name = f" ({self.names[j]})" if self.names else ""
                    return InputError(
                        f"{self.path} has {wrong} in line {number}, column {j + 1}{name}; "
                        "every cell must be a finite number with a decimal point."
                    )
        return InputError(f"{self.path} cannot be read as numbers near line {lines[0][0]}.")


def _read_csv(path: Path) -> FileRows:
    n = 0
    try:
        with open(path, encoding="utf-8-sig") as text, _spool() as spool:
            chunks = _numbered_chunks(text)
            lines = next(chunks, [])
            table = _csv_table(path, [line for _, line in lines[:2]])
            if table.names:
                lines = lines[1:] or next(chunks, [])
            while lines:
                spool.write(table.block(lines).data)
                n += len(lines)
                lines = next(chunks, [])
            if not n:
                raise InputError(f"{path} has names but no rows; give at least one row.")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file in UTF-8; save it as one.") from error
    layout = Layout.contiguous((n, table.width), np.dtype(np.float64))
    return _spooled(spool, layout, path, table.names)


def _numbered_chunks(text: IO[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield lists of (line number, line) without the blank lines, a few megabytes at a time."""
    number = 1
    while lines := text.readlines(CHUNK_BYTES):
        numbered = [(i, line) for i, line in enumerate(lines, number) if line.strip()]
        number += len(lines)
        if numbered:
            yield numbered


def _csv_table(path: Path, lines: Sequence[str]) -> _Table:
    """Find delimiter and header from the first two lines."""
    if not lines:
        raise InputError(f"{path} has only blank lines; write it again.")
    # Numbers have no tabs or semicolons, but may have commas; names may have all of them.
    delimiter = next((mark for mark in "\t;," if mark in lines[-1]), ",")
    cells = _split(lines[0], delimiter)
    if not _is_header(cells):
        return _Table(path, delimiter, len(cells), None)
    cells[0] = cells[0].removeprefix("#").strip()
    if not cells[0] and len(cells) > 1:
        raise InputError(
            f"{path} has a first column without a name, as row numbers have; "
            "name it or write the file without row numbers."
        )
    return _Table(path, delimiter, len(cells), tuple(cells))


def _is_header(cells: Sequence[str]) -> bool:
    numbers = [cell for cell in cells if _number(cell) is not None]
    # Data frames name columns 0, 1, 2 and so on; other numbers in the first line are data.
    counting = numbers in ([str(i + k) for i in range(len(numbers))] for k in (0, 1))
    return counting and (len(numbers) < len(cells) or len(cells) >= COUNTING_HEADER)


def _split(line: str, delimiter: str) -> list[str]:
    try:
        cells = next(csv.reader([line.strip("\r\n")], delimiter=delimiter))
    except csv.Error:
        return [line]
    return [cell.strip() for cell in cells]


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _wrong_with(cell: str) -> str | None:
    value = _number(cell)
    if not cell:
        return "an empty cell"
    if value is None:
        return f"{cell[:40]!r}, which is not a number,"
    if math.isnan(value):
        return "NaN"
    return None if math.isfinite(value) else f"an infinite value ({cell})"


def _read_parquet(path: Path) -> FileRows:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise _missing("pyarrow", "Parquet files") from error
    n = 0
    try:
        # Column chunks are read through small buffers, so a large row group is not held whole.
        with (
            pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16) as file,
            _spool() as spool,
        ):
            columns, dtype = _parquet_columns(path, file.schema_arrow)
            for batch in file.iter_batches(max(1, CHUNK_BYTES // (8 * len(columns)))):
                spool.write(_parquet_block(path, batch.select(columns), dtype, n).data)
                n += batch.num_rows
            if not n:
                raise InputError(f"{path} has columns but no rows; give at least one row.")
            names = tuple(file.schema_arrow.names[j] for j in columns)
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable Parquet file; write it again.") from error
    return _spooled(spool, Layout.contiguous((n, len(names)), dtype), path, names)


def _parquet_columns(path: Path, schema: Any) -> tuple[list[int], np.dtype[Any]]:
    """Choose the columns, all but a data frame's index, and the dtype that holds them all."""
    import pyarrow.types as types

    columns, dtypes = [], []
    for j, field in enumerate(schema):
        kind = field.type
        if field.name.startswith("__index_level_"):
            continue
        columns.append(j)
        if types.is_decimal(kind):
            dtypes.append(np.dtype(np.float64))
        elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            dtypes.append(np.dtype(kind.to_pandas_dtype()))
        else:
            raise InputError(
                f"{path} has a column {field.name!r} of type {kind}; "
                "only numbers can be used, so drop or convert it."
            )
    if not columns:
        raise InputError(f"{path} has no columns; write it again.")
    return columns, np.result_type(*dtypes)


def _parquet_block(path: Path, batch: Any, dtype: np.dtype[Any], first: int) -> NDArray[Any]:
    """Turn a record batch that begins at row `first` into a block, (m, d)."""
    import pyarrow as pa

    block = np.zeros((batch.num_rows, batch.num_columns), dtype)
    empty = np.zeros(block.shape, bool)
    for j, column in enumerate(batch.columns):
        if column.null_count:
            empty[:, j] = np.asarray(column.is_null())
            continue
        number = column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column
        block[:, j] = number.to_numpy(zero_copy_only=False)
    bad = np.argwhere(empty | ~np.isfinite(block))
    if len(bad):
        row, j = bad[0].tolist()
        value = "NaN" if np.isnan(block[row, j]) else "an infinite value"
        raise InputError(
            f"{path} has {'an empty cell' if empty[row, j] else value} in row {first + row} "
            f"(counting from 0), column {batch.schema.names[j]!r}; "
            "remove the row or fill the value in."
        )
    return block


def _read_images(path: Path, image_size: tuple[int, int] | None) -> FileRows:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise _missing("pillow", "images") from error
    files = sorted(
        file
        for file in path.iterdir()
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise InputError(
            f"{path} has no images in it; give a folder with {', '.join(IMAGE_SUFFIXES)} files."
        )
    size, colour = _image_kind(files, image_size)
    shape = (len(files), *size, 3) if colour else (len(files), *size)
    with _spool() as spool:
        for file in files:
            spool.write(_image(file, size, colour).data)
    return _spooled(spool, Layout.contiguous(shape, np.dtype(np.float32)), path)


def _image_kind(
    files: Sequence[Path], image_size: tuple[int, int] | None
) -> tuple[tuple[int, int], bool]:
    """Find (height, width) and whether any image is in colour, from the headers alone."""
    if image_size is not None and min(image_size) < 1:
        raise InputError(f"The image size is {image_size}; give a height and width of at least 1.")
    size, colour = image_size, False
    for file in files:
        with _opened(file) as image:
            found = (image.height, image.width)
            colour = colour or image.mode not in _GREY_MODES
        size = size or found
        if image_size is None and found != size:
            raise InputError(
                f"{file} is {found[1]} x {found[0]} pixels where {files[0].name} is "
                f"{size[1]} x {size[0]}; give images of one size, or an image size for all."
            )
    assert size is not None
    return size, colour


# The value that stands for white; a 16-bit image is opened as integers of 16 or 32 bits.
_GREY_MODES = {"1": 255, "L": 255, "LA": 255, "La": 255, "I;16": 65535, "I;16B": 65535, "I": 65535}


def _image(file: Path, size: tuple[int, int], colour: bool) -> NDArray[np.float32]:
    """Read one image as (height, width) or (height, width, 3) in [0, 1]."""
    from PIL import Image

    with _opened(file) as image:
        white = _GREY_MODES.get(image.mode, 255)
        if white != 255:
            # Pillow would clip 16 bits to 8; as floats they keep their steps.
            deep = np.asarray(image, np.float32) * np.float32(255 / white)
            image = Image.fromarray(deep)
        else:
            image = image.convert("RGB" if colour else "L")
        if (image.height, image.width) != size:
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        pixels = np.asarray(image, np.float32) / np.float32(255)
    if colour and pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    return np.ascontiguousarray(pixels.clip(0, 1))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an image, and say which one it is if it cannot be read."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.mode == "F":
                raise InputError(f"{file} has floating-point pixels; save it with 8 or 16 bits.")
            yield image
    except InputError:
        raise
    except Image.DecompressionBombError as error:
        raise InputError(f"{file} is too large an image; scale it down.") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        raise InputError(f"{file} is not a readable image; replace or remove it.") from error


_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def _spool() -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which stays unless something goes wrong."""
    with tempfile.NamedTemporaryFile(prefix="factormix-", delete=False) as file:
        try:
            yield file
            file.flush()
        except BaseException as error:
            # What is still in the buffer cannot be written either.
            with suppress(OSError):
                file.close()
            Path(file.name).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise InputError(
                    f"There is no room for a temporary copy in {tempfile.gettempdir()}; "
                    "set TMPDIR to a folder that has it."
                ) from error
            raise


def _spooled(
    spool: IO[bytes], layout: Layout, path: Path, names: tuple[str, ...] | None = None
) -> FileRows:
    """Hand the temporary file over to the rows that read it and delete it in the end."""
    return FileRows(spool.name, layout=layout, name=path.name, feature_names=names, delete=True)


def _missing(package: str, what: str) -> InputError:
    return InputError(f'Reading {what} needs {package}: run pip install "factormix[data]".')


_READERS: dict[str, Callable[[Path], FileRows]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
