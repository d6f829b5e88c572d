"""Rows of the images in a folder."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.readers.base import Records, create_spool, open_spool
from factormix.data.sources.files import FileRows, Layout
from factormix.errors import InputError, input_error, require_package

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")

GREY_MODES = {"1": 255, "L": 255, "LA": 255, "La": 255, "I;16": 65535, "I;16B": 65535, "I": 65535}
"""Modes of Pillow without colour, and their white; it opens 16 bits as integers of 16 or 32."""


def read_images(path: Path, image_size: tuple[int, int] | None) -> FileRows:
    """Make rows of the images in a folder, in the order of their names."""
    require_package("PIL", "data", "pillow")
    files = list_image_files(path, ", or with files of Parquet, Arrow, .npy or .safetensors")
    size, colour = _find_size_and_colour(files, image_size)
    shape = (len(files), *size, 3) if colour else (len(files), *size)
    with create_spool() as copy:
        for file in files:
            copy.write(_read_image(file, size, colour).data)
    layout = Layout.contiguous(shape, np.dtype(np.float32))
    rows = open_spool(copy, layout, path).mark_finite(complete=True)
    rows.records = _name_files(files)
    return rows


def list_image_files(path: Path, or_else: str = "") -> list[Path]:
    """Return the image files of a folder in the order of their names; at least one.

    ``or_else`` is what the reader of the folder accepts besides, for the error without images.
    """
    files = sorted(
        file
        for file in path.iterdir()
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise InputError(
            f"{path} has no images in it; give a folder with {', '.join(IMAGE_SUFFIXES)}"
            f" files{or_else}."
        )
    return files


def _name_files(files: Sequence[Path]) -> Records:
    """Return the names of files as the column that identifies the rows."""

    def open_frames(columns: Sequence[str]) -> Iterator[Any]:
        import pandas as pd

        yield pd.DataFrame({name: [file.name for file in files] for name in columns})

    return Records(("file",), (), ("file",), open_frames)


def _find_size_and_colour(
    files: Sequence[Path], image_size: tuple[int, int] | None
) -> tuple[tuple[int, int], bool]:
    """Find (height, width) and whether any image is in colour, from the headers alone."""
    if image_size is not None and min(image_size) < 1:
        raise InputError(f"The image size is {image_size}; give a height and width of at least 1.")
    size, colour = image_size, False
    for file in files:
        with open_image(file) as image:
            colour = colour or image.mode not in GREY_MODES
            found = image_size or measure_upright(image)
        size = size or found
        if found != size:
            raise InputError(
                f"{file} is {found[1]} x {found[0]} pixels where {files[0].name} is "
                f"{size[1]} x {size[0]}; give images of one size, or an image size for all."
            )
    assert size is not None
    return size, colour


def measure_upright(image: Any) -> tuple[int, int]:
    """Return (height, width) of an image once it is turned upright."""
    from PIL import ExifTags, ImageOps

    # Only marked images need to be decoded for it.
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return image.height, image.width


def _read_image(file: Path, size: tuple[int, int], colour: bool) -> NDArray[np.float32]:
    """Read one image as (height, width) or (height, width, 3) in [0, 1]."""
    from PIL import Image

    image = load_upright(file)
    white = GREY_MODES.get(image.mode, 255)
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


def load_upright(file: Path) -> Any:
    """Load an image, turned upright if its camera has marked it as turned."""
    from PIL import ImageOps

    with open_image(file) as image:
        return ImageOps.exif_transpose(image)


@contextmanager
def open_image(file: Path) -> Iterator[Any]:
    """Open an image, or name it in an error if it cannot be read; its pixels are not read yet."""
    from PIL import Image

    kinds = (OSError, SyntaxError, ValueError, EOFError, struct.error)
    with (
        input_error(f"{file} is too large an image; scale it down.", Image.DecompressionBombError),
        input_error(f"{file} is not a readable image; replace or remove it.", *kinds),
        # By its name, Pillow 13 maps a TIFF without compression, and mixes up one that is turned.
        file.open("rb") as stream,
        Image.open(stream) as image,
    ):
        if image.mode == "F":
            raise InputError(f"{file} has floating-point pixels; save it with 8 or 16 bits.")
        # Many cameras store a preview behind the photograph, in the format MPO.
        n = getattr(image, "n_frames", 1)
        if n > 1 and image.format != "MPO":
            raise InputError(f"{file} has {n} images; save each as a file of its own.")
        # Pillow reads colours of 16 bits, packed as in "RGB;16B", with 8 bits.
        if GREY_MODES.get(image.mode, 255) == 255 and re.search(";16[BLN]", str(image.tile)):
            raise InputError(
                f"{file} has 16 bits in colour or with an alpha channel, which cannot be read; save"
                " it with 8 bits, or in grey."
            )
        yield image
