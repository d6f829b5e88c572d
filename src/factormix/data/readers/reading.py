"""The one function that reads any kind of file, and what may be asked of which kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from factormix.data.readers.columns import Column
from factormix.data.readers.csv import read_csv
from factormix.data.readers.images import read_images
from factormix.data.readers.npz import read_npy, read_npz
from factormix.data.readers.parquet import read_parquet
from factormix.data.sources import FileRows
from factormix.errors import InputError

__all__ = ["read_rows"]

SUFFIXES = (".npy", ".npz", ".csv", ".parquet")


def read_rows(
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    image_size: tuple[int, int] | None = None,
    header: bool | None = None,
    columns: Sequence[Column] | None = None,
) -> FileRows:
    """Make rows, shape (n, d), of a file or folder, and check all of it on the way.

    .npy: a table in any real dtype. A uint8 stack of images, (n, height, width) or (n, height,
        width, 1 or 3), is flattened, with its shape in `image_shape`; its values stay 0 to 255.
    .npz: the array called `key`; without one, its only array or the one called X, x or data.
    .csv: numbers split by commas, semicolons or tabs; float64. `header` says whether the first
        line has the names of the columns. Without it, a first line with words does. One of
        numbers does if they are different whole numbers without a sign and either some column
        has no such number below it, or they count 16 columns or more from 0 or 1. In
        doubt, as with whole numbers that count the columns above other whole numbers, the line
        is taken as a row, with a warning.
    .parquet: numeric columns without the index of a data frame, in the smallest dtype that holds
        them all.
    A folder: its images by name, each a row of height * width values, times 3 in colour, scaled to
        [0, 1]; float32. `image_size`, (height, width), resizes them; without it all need one size.
        If any image is in colour, all are read as RGB; transparency is dropped.

    `columns` chooses columns of a table, in the order given, by name or by number from 0.

    Empty cells of a .csv file, or NA, NaN and null in them, nulls of a .parquet file and NaN in any
    are missing values, NaN in the rows; whole numbers with gaps become floats.

    Raises `InputError` with one sentence on whatever is wrong, such as an infinity and where it is.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; check the path.")
    suffix = "" if path.is_dir() else path.suffix.lower()
    if not path.is_dir() and suffix not in SUFFIXES:
        raise InputError(
            f"{path} is of an unknown kind; give a {', '.join(SUFFIXES)} file "
            "or a folder of images."
        )
    if key is not None and suffix != ".npz":
        raise InputError(f"A key was given, but {path} is not an .npz file; leave the key out.")
    if header is not None and suffix != ".csv":
        raise InputError(
            f"The option header was given, but {path} is not a .csv file; leave it out."
        )
    if image_size is not None and not path.is_dir():
        raise InputError(
            f"An image size was given, but {path} is not a folder of images; leave it out."
        )
    if columns is not None and path.is_dir():
        raise InputError(f"Columns were chosen, but {path} is a folder of images; leave them out.")
    try:
        if path.is_dir():
            return read_images(path, image_size)
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty; write it again.")
        if suffix == ".npz":
            return read_npz(path, columns, key)
        if suffix == ".csv":
            return read_csv(path, columns, header)
        return (read_npy if suffix == ".npy" else read_parquet)(path, columns)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
