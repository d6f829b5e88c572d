"""Rows of files and folders: ``read_rows`` reads any kind that has a reader here.

.npy, .safetensors, .pt, Parquet and Arrow files, and folders of them, are read in place. .npz
files, text tables and images are converted block by block into a temporary file, which is deleted
when its rows are garbage-collected. Memory does not grow with the source.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from factormix.data.readers.arrow import ARROW_SUFFIXES, IN_MEMORY_BYTES, read_arrow
from factormix.data.readers.base import Choice, Column, TableRows
from factormix.data.readers.images import IMAGE_SUFFIXES, read_images
from factormix.data.readers.numpy import SHARD_SUFFIXES, read_npy, read_npz, read_shards
from factormix.data.readers.tables import COMPRESSED_SUFFIXES, TABLE_SUFFIXES, read_table
from factormix.data.sources.streams import OnBad
from factormix.errors import InputError, input_error

__all__ = ["OPTIONS", "find_kind", "read_rows"]

SUFFIXES = (".npy", ".npz", *TABLE_SUFFIXES, ".safetensors", ".pt", *ARROW_SUFFIXES)
OPTIONS = {
    "key": (("npz", "shards", "sheet"), "an .npz, .safetensors, .pt or .xlsx file"),
    "header": (("table", "sheet"), "a .csv file or another table"),
    "image_size": (("images",), "a folder of images"),
}
"""The kinds of data that an option is for, as ``find_kind`` returns them, and their description."""


def read_rows(
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    image_size: tuple[int, int] | None = None,
    header: bool | None = None,
    columns: Sequence[Column] | None = None,
    exclude: Sequence[Column] = (),
    ids: Sequence[Column] | None = None,
    known: Sequence[str] | None = None,
    on_bad: OnBad = "stop",
    in_memory_bytes: int = IN_MEMORY_BYTES,
) -> TableRows:
    """Make rows, shape (n, d), of a file or folder, and check all of it on the way.

    .npy: a table in any real dtype. A uint8 stack of images, (n, height, width) or (n, height,
        width, 1 or 3), is flattened, with its shape in `image_shape`; its values stay 0 to 255.
    .npz: the array called `key`; without one, its only array or the one called X, x, data,
        activations or embeddings.
    .csv, .tsv: a text table, also with .gz, .bz2, .xz or .zst behind its name, read by pandas;
        float64. Cells are split by commas, semicolons, tabs or bars. Numbers may have a decimal
        comma, groups of thousands or a percent sign, which stays a unit; true is 1 and false is 0.
        The text is UTF-8, UTF-16 with a mark, or else cp1252. `header` says whether the first line
        has the names of the columns. Without it, a first line with words is a header, and so is one
        of whole numbers if the columns below have decimals or if it counts 16 columns or more. In
        doubt the line is a row, with a warning.
    .jsonl: one object in each line. .xlsx: a sheet, the first or the one called `key`.
    .parquet, .arrow, .feather: columns of numbers, or of lists of numbers of one length, without
        the index of a data frame, in the smallest dtype that holds them all. A table of up to
        `in_memory_bytes`, 64 MB by default, is held in memory. A larger one is read in shards as
        they are needed, and its values are checked then.
    .safetensors, .pt: the tensor called `key`, found as in an .npz file. Of a .pt file, nothing but
        tensors is loaded.
    A folder of files of Parquet or Arrow, or of .npy, .safetensors or .pt shards: one table, in the
        order of their names. An address such as s3://bucket/folder is read through pyarrow.
    A folder of images: by name, each a row of height * width values, times 3 in colour, scaled to
        [0, 1]; float32. `image_size`, (height, width), resizes them; without it all need one size.
        If any image is in colour, all are read as RGB; transparency is dropped. Photographs that a
        camera has marked as turned are turned upright.

    The path - is standard input, with CSV or JSON lines.

    `columns` chooses columns of a table, in the order given, by name or by number from 0. Without
    it, all columns of numbers are read, except those in `exclude` and `ids`. If `known`, the
    columns of a model, are all there, they are read instead. Columns of text or dates are left out,
    with a warning. The `ids` identify rows. Without them, rows are identified by the first column
    that is left out and whose values are all different. The `records` of the rows have all columns
    as they are in the file.

    With `on_bad="skip"`, files of Parquet or Arrow in a folder that cannot be read are left out,
    with a warning.

    Missing values are NaN in the rows: empty cells of a text table, or NA, NaN, null and ? in them,
    nulls of a .parquet file, and NaN in any file. Whole numbers with gaps become floats.

    Raises `InputError` with one sentence about the fault, such as an infinity and where it is.
    """
    kind, files = find_kind(path)
    given = {"key": key, "header": header, "image_size": image_size}
    for name, (kinds, what) in OPTIONS.items():
        if given[name] is not None and kind not in kinds:
            raise InputError(
                f"The option {name} was given, but {path} is not {what}; leave it out."
            )
    if columns is not None and kind == "images":
        raise InputError(f"Columns were chosen, but {path} is a folder of images; leave them out.")
    choice, local = Choice(columns, exclude, ids, known), Path(path)
    with input_error(f"{path} cannot be read: {{reason}}.", OSError):
        if local.is_file() and local.stat().st_size == 0:
            raise InputError(f"{path} is empty; write it again.")
        if kind == "images":
            return read_images(local, image_size)
        if kind == "arrow":
            return read_arrow(str(path), choice, on_bad, in_memory_bytes)
        if files:
            return read_shards(files, local.name, choice, key)
        if kind == "npz":
            return read_npz(local, choice, key)
        return read_npy(local, choice) if kind == "npy" else read_table(local, choice, header, key)


def find_kind(path: str | os.PathLike[str]) -> tuple[str, list[Path]]:
    """Find the kind of a file or folder, and the files that are the shards of a table."""
    if "://" in str(path):
        return "arrow", []
    path = Path(path)
    if str(path) == "-":
        return "table", []
    if not path.exists():
        raise InputError(f"{path} does not exist; check the path.")
    if path.is_dir():
        return _find_kind_of_folder(path)
    suffix = path.suffix.lower()
    inner = path.with_suffix("").suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix
    if inner in TABLE_SUFFIXES:
        return "sheet" if suffix == ".xlsx" else "table", []
    if suffix in ARROW_SUFFIXES:
        return "arrow", []
    if suffix in (".safetensors", ".pt"):
        return "shards", [path]
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path} is of an unknown kind; give a {', '.join(SUFFIXES)} file, or a folder of"
            " images, of Parquet or Arrow files, or of .npy, .safetensors or .pt shards."
        )
    return suffix[1:], []


def _find_kind_of_folder(path: Path) -> tuple[str, list[Path]]:
    """Find the kind of a folder from the suffixes of its files; without any, expect images."""
    visible = [file for file in sorted(path.iterdir()) if file.name[0] not in "._"]
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in visible):
        # Labels or notes may lie beside images.
        return "images", []
    found = {
        suffix: [file for file in visible if file.suffix.lower() == suffix and file.is_file()]
        for suffix in (*ARROW_SUFFIXES, *SHARD_SUFFIXES)
    }
    here = [suffix for suffix, files in found.items() if files]
    if not here:
        # Partitions of a Parquet table are folders of their own.
        partitions = (one for one in visible if one.is_dir() and any(one.rglob("*.parquet")))
        return ("arrow" if any(partitions) else "images"), []
    if len(here) > 1:
        raise InputError(f"{path} has {' and '.join(here)} files in it; give a folder of one kind.")
    if here[0] in ARROW_SUFFIXES:
        return "arrow", []
    return "npy" if here[0] == ".npy" else "shards", found[here[0]]
