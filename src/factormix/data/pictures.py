"""Whole images of any size: from arrays, lists and folders to one flat array of pixels.

Rows of a table are in ``data/sources``; here the position of a pixel matters. A set of images is
one array of pixels, row after row and image after image, which may be a memory map, so that images
that are larger than memory and images of different sizes are read in the same way.

Coarse to fine, an image becomes its block means and three planes of differences. For a pair of
values (Calderbank et al., 1998, the S-transform) ::

    m = floor((a + b) / 2), v = a - b      a = m + floor((v + 1) / 2), b = a - v

is one to one on whole numbers, and without the floors on real ones, with a Jacobian of one. A block
of 2 x 2 is transformed by rows, then by columns. A last row or column without a partner is its own
mean.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.readers.base import create_spool
from factormix.data.readers.images import GREY_MODES, list_image_files, load_upright, open_image
from factormix.errors import InputError, input_error, require_package

LEVELS = 256
"""Levels of 8 bits."""
LARGEST = 1e36
"""Largest absolute value of an image: sums over neighbours and images stay below the 3e38 of
float32."""
BLOCK_PIXELS = 1 << 20
"""Pixels that are checked or transformed at a time: a few megabytes."""
Values = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images with equally many channels, or a plane of numbers for each of several images."""

    values: Values
    """(total, c), the pixels of all images."""
    heights: NDArray[np.int64]
    """(n,)."""
    widths: NDArray[np.int64]
    """(n,)."""
    levels: int | None
    """256 for 8 bits, None for real numbers."""
    starts: NDArray[np.int64]
    """(n + 1,), the first pixel of each image, and the end of the last."""

    @classmethod
    def build(cls, values: Values, heights: Any, widths: Any, levels: int | None) -> Pictures:
        """Describe a flat array of pixels."""
        heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
        return cls(values, heights, widths, levels, np.append(0, np.cumsum(heights * widths)))

    def __len__(self) -> int:
        return len(self.heights)

    @property
    def n_channels(self) -> int:
        """Numbers of a pixel."""
        return int(self.values.shape[1])

    def image(self, i: int) -> Values:
        """Return one image, (h, w, c)."""
        pixels = self.values[self.starts[i] : self.starts[i + 1]]
        return pixels.reshape(int(self.heights[i]), int(self.widths[i]), self.n_channels)

    def take(self, start: int, stop: int) -> Pictures:
        """Return some successive images."""
        values = self.values[self.starts[start] : self.starts[stop]]
        part = slice(start, stop)
        return Pictures.build(values, self.heights[part], self.widths[part], self.levels)

    def locate(self, pixels: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return image, row and column (B,) of pixels, which are numbered over all images."""
        image = np.searchsorted(self.starts, pixels, side="right") - 1
        row, column = np.divmod(pixels - self.starts[image], self.widths[image])
        return image, row, column

    def fingerprint(self) -> str:
        """Return a text that identifies the images by their sizes and a thousand pixels."""
        total = int(self.starts[-1])
        some = self.values[np.linspace(0, total - 1, min(total, 1000)).astype(np.int64)]
        digest = hashlib.sha256(np.ascontiguousarray(some).tobytes())
        digest.update(self.heights.tobytes() + self.widths.tobytes())
        return f"{len(self)} {self.n_channels} {self.levels} {digest.hexdigest()[:16]}"


def as_pictures(images: Any, n_channels: int | None = None) -> Pictures:
    """Make pictures of an array (n, h, w[, c]), a list of images (h, w[, c]), or a path.

    The path is one of a folder of images, of an image, or of a .npy file. Images of files are in
    colour if one of them is, or if a model has three channels.
    """
    if isinstance(images, Pictures):
        return images
    if isinstance(images, str | os.PathLike):
        if Path(images).suffix.lower() != ".npy" or not Path(images).is_file():
            return _read_files(Path(images), n_channels)
        images = map_array(Path(images))
    if isinstance(images, torch.Tensor):
        images = as_array(images)
    if isinstance(images, np.ndarray) and images.dtype != object:
        if images.ndim not in (3, 4):
            raise InputError(
                f"images have the shape {images.shape}: give an array of (n, height, width) or"
                " (n, height, width, channels), or a list of images."
            )
        array = images if images.ndim == 4 else images[..., None]
        levels = _check_type(array)
        n, h, w, c = array.shape
        _check_sizes(n, [h] * min(n, 1), [w] * min(n, 1), c)
        return _check_values(
            Pictures.build(array.reshape(-1, c), np.full(n, h), np.full(n, w), levels)
        )
    if not isinstance(images, Sequence | np.ndarray):
        raise InputError(
            f"images must be an array, a list of arrays or a folder, not {type(images).__name__}."
        )
    return _join([as_image(image, n_channels) for image in images])


def as_image(image: Any, n_channels: int | None = None) -> Values:
    """Return one image as an array (h, w, c) of 8 bits or real numbers.

    A path is one of an image, or of a .npy file with an array (h, w[, c]).
    """
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if path.is_dir():
            raise InputError(f"{path} is a folder: give the path of one image.")
        if path.suffix.lower() != ".npy" or not path.is_file():
            return _read_files(path, n_channels).image(0)
        image = map_array(path)
    array = as_array(image)
    if array.ndim not in (2, 3):
        raise InputError(
            f"an image has the shape {array.shape}: give (height, width) or (height, width,"
            " channels)."
        )
    array = array if array.ndim == 3 else array[..., None]
    levels = _check_type(array)
    h, w, c = array.shape
    _check_sizes(1, [h], [w], c)
    return _check_values(Pictures.build(array.reshape(-1, c), [h], [w], levels)).image(0)


def as_array(image: Any) -> Values:
    """Return an image, or several of one size, as a NumPy array."""
    with input_error(
        "an image is not an array of numbers ({reason}): give an array, or lists of equal lengths.",
        *(ValueError, TypeError, RuntimeError),
    ):
        if isinstance(image, torch.Tensor):
            found: Values = image.detach().cpu().numpy()
            return found
        return np.asarray(image)


def _join(arrays: list[Values]) -> Pictures:
    """Make pictures of images of different sizes."""
    _check_sizes(len(arrays), [], [], 1)
    types = {(array.shape[2], array.dtype == np.uint8) for array in arrays}
    if len(types) > 1:
        raise InputError(
            "images differ in their number of channels, or some have 8 bits and others real"
            " numbers: convert them to one kind."
        )
    flat = np.concatenate([array.reshape(-1, array.shape[2]) for array in arrays])
    levels = LEVELS if flat.dtype == np.uint8 else None
    heights, widths = zip(*(array.shape[:2] for array in arrays), strict=True)
    return Pictures.build(flat, heights, widths, levels)


def _check_type(array: Values) -> int | None:
    """Return the number of levels of an array: 256 for 8 bits, None for real numbers."""
    if array.dtype == np.uint8:
        return LEVELS
    if array.dtype.kind == "f":
        return None
    raise InputError(
        f"images have numbers of type {array.dtype}: give uint8 for 8-bit images, or float32 for"
        " real values."
    )


def _check_sizes(n: int, heights: Sequence[int], widths: Sequence[int], c: int) -> None:
    if n == 0 or min([*heights, *widths, c]) == 0:
        raise InputError("there is no image, or one without pixels: give at least one pixel each.")


def _check_values(pictures: Pictures) -> Pictures:
    """Refuse values that are not finite, or too large for float32."""
    if pictures.levels is None:
        largest = min(LARGEST, float(np.finfo(pictures.values.dtype).max))
        for start in range(0, len(pictures.values), BLOCK_PIXELS):
            block = pictures.values[start : start + BLOCK_PIXELS]
            wrong = ~(np.abs(block) <= largest).all(axis=1)
            if wrong.any():
                first = int(wrong.argmax())
                i, y, x = (int(one[0]) for one in pictures.locate(np.array([start + first])))
                finite = np.isfinite(block[first]).all()
                what = f"beyond {LARGEST:g}" if finite else "that is not finite"
                remedy = "divide all images by a constant" if finite else "repair it"
                raise InputError(
                    f"image {i} has a value {what}, in row {y} and column {x} (counting from 0):"
                    f" {remedy} or leave the image out."
                )
    return pictures


def _read_files(path: Path, n_channels: int | None) -> Pictures:
    """Read the images of a folder, or one image file, into a temporary file of 8 bits."""
    require_package("PIL", "data", "pillow")
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; check the path of the images.")
    files = list_image_files(path) if path.is_dir() else [path]
    colour = n_channels == 3
    for file in files:
        with open_image(file) as image:
            if GREY_MODES.get(image.mode, 255) != 255:
                raise InputError(f"{file} has 16 bits; save it with 8 bits.")
            colour = colour or image.mode not in GREY_MODES
            if colour and n_channels == 1:
                raise InputError(
                    f"{file} is in colour, and the model is of grey images: save it in grey."
                )
    sizes = list[tuple[int, int]]()
    with create_spool() as copy:
        for file in files:
            pixels = np.asarray(load_upright(file).convert("RGB" if colour else "L"))
            sizes.append(pixels.shape[:2])
            copy.write(np.ascontiguousarray(pixels).data)
    heights, widths = zip(*sizes, strict=True)
    total = sum(h * w for h, w in sizes)
    flat = _map_temporary(copy.name, np.dtype(np.uint8), (total, 3 if colour else 1))
    return Pictures.build(flat, heights, widths, LEVELS)


def map_array(path: Path) -> Values:
    """Map the array of a .npy file."""
    try:
        array: Any = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path} is not a readable .npy file; write it again.") from error
    # NumPy reads files of several arrays, .npz, by any name.
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise InputError(f"{path} is not an array of numbers; write one array by numpy.save.")
    return array


def _map_temporary(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Values:
    """Map a temporary file, which is deleted with the array."""
    array = np.memmap(name, dtype, "r+", shape=shape)
    weakref.finalize(array, _remove, name)
    return array


def _remove(name: str) -> None:
    Path(name).unlink(missing_ok=True)


class Blocks(NamedTuple):
    """An image (h, w, ...) as means and differences of 2 x 2 blocks, in the order of drawing."""

    coarse: Any
    """((h + 1) // 2, (w + 1) // 2, ...), means of the blocks."""
    between: Any
    """(h // 2, (w + 1) // 2, ...), differences of the means of a block's two rows."""
    upper_means: Any
    """((h + 1) // 2, (w + 1) // 2, ...), means of upper rows: they follow from the two before."""
    lower_means: Any
    """(h // 2, (w + 1) // 2, ...), means of lower rows."""
    upper: Any
    """((h + 1) // 2, w // 2, ...), differences within upper rows."""
    lower: Any
    """(h // 2, w // 2, ...), differences within lower rows."""


def size_blocks(h: Any, w: Any) -> Blocks:
    """Return heights and widths of the planes of an image, or of several images."""
    tall, wide = (h + 1) // 2, (w + 1) // 2
    rows = (tall, wide), (h // 2, wide)
    return Blocks(rows[0], rows[1], rows[0], rows[1], (tall, w // 2), (h // 2, w // 2))


def split_blocks(image: Values, whole: bool) -> Blocks:
    """Split an image (h, w, ...) of whole or real numbers."""
    wide = image.astype(np.int16 if whole else image.dtype)
    means, within = _split_pairs(wide.swapaxes(0, 1), whole)
    upper, lower = within[:, ::2].swapaxes(0, 1), within[:, 1::2].swapaxes(0, 1)
    means = means.swapaxes(0, 1)
    coarse, between = _split_pairs(means, whole)
    return Blocks(coarse, between, means[::2], means[1::2], upper, lower)


def join_rows(coarse: Values, between: Values) -> tuple[Values, Values]:
    """Return the means of upper and lower rows of blocks."""
    rows = _join_pairs(coarse, between)
    return rows[::2], rows[1::2]


def join_blocks(blocks: Blocks) -> Values:
    """Return the image that ``split_blocks`` has split."""
    rows = _join_pairs(blocks.coarse, blocks.between)
    within = np.empty((blocks.upper.shape[1], rows.shape[0], rows.shape[2]), rows.dtype)
    within[:, ::2], within[:, 1::2] = blocks.upper.swapaxes(0, 1), blocks.lower.swapaxes(0, 1)
    return _join_pairs(rows.swapaxes(0, 1), within).swapaxes(0, 1)


def bound_differences(means: Values, levels: int) -> tuple[Values, Values]:
    """Return the least and greatest differences of pairs of levels with these means."""
    m, top = means, levels - 1
    return np.maximum(-2 * m - 1, 2 * (m - top)), np.minimum(2 * m + 1, 2 * (top - m))


def _split_pairs(values: Values, whole: bool) -> tuple[Values, Values]:
    """Split along the first axis; a last value without a partner is its own mean."""
    n = len(values) // 2
    first, second = values[: 2 * n : 2], values[1 : 2 * n : 2]
    total = first + second
    means = total >> 1 if whole else total / 2
    return np.concatenate([means, values[2 * n :]]), first - second


def _join_pairs(means: Values, differences: Values) -> Values:
    n = len(differences)
    values = np.empty((len(means) + n, *means.shape[1:]), means.dtype)
    half = differences / 2 if means.dtype.kind == "f" else (differences + 1) >> 1
    values[: 2 * n : 2] = means[:n] + half
    values[1 : 2 * n : 2] = values[: 2 * n : 2] - differences
    values[2 * n :] = means[n:]
    return values


def split_all(pictures: Pictures) -> list[Pictures]:
    """Return the planes of ``Blocks`` of all images, in temporary files if these are in a file."""
    whole = pictures.levels is not None
    dtype = np.dtype(np.int16) if whole else pictures.values.dtype
    planes = list[Pictures]()
    for heights, widths in size_blocks(pictures.heights, pictures.widths):
        shape = (int((heights * widths).sum()), pictures.n_channels)
        if isinstance(pictures.values, np.memmap) and shape[0]:
            with create_spool() as copy:
                copy.truncate(shape[0] * shape[1] * dtype.itemsize)
            values = _map_temporary(copy.name, dtype, shape)
        else:
            values = np.empty(shape, dtype)
        planes.append(Pictures.build(values, heights, widths, pictures.levels))
    for same in _group_sizes(pictures):
        for plane, part in zip(planes, split_blocks(_stack(pictures, same), whole), strict=True):
            _stack(plane, same)[:] = part
    return planes


def _group_sizes(pictures: Pictures) -> Iterator[slice]:
    """Yield runs of images of one size, of few pixels at a time."""
    start = 0
    while start < len(pictures):
        h, w = int(pictures.heights[start]), int(pictures.widths[start])
        most = slice(start, start + max(1, BLOCK_PIXELS // (h * w)))
        same = (pictures.heights[most] == h) & (pictures.widths[most] == w)
        n = len(same) if same.all() else int(same.argmin())
        yield slice(start, start + n)
        start += n


def _stack(pictures: Pictures, same: slice) -> Values:
    """Return a view (h, w, n, c) of n images of one size."""
    h, w = int(pictures.heights[same.start]), int(pictures.widths[same.start])
    flat = pictures.values[pictures.starts[same.start] : pictures.starts[same.stop]]
    return flat.reshape(same.stop - same.start, h, w, pictures.n_channels).transpose(1, 2, 0, 3)
