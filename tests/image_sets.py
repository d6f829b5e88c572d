"""Small image sets in their original formats, for the tests of `factormix.datasets`."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import io as scipy_io

from factormix.data.datasets import registry
from factormix.data.datasets.registry import REGISTRY, Entry, Form, PublishedFile

SIZES = {"train": 40, "test": 20}
STEMS = {"train": "train", "test": "t10k"}


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    """Write an array in idx format, independently of the reader."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


def images_and_labels(n: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    return pixels, ((np.arange(n) + seed) % 10).astype(np.uint8)


def small_idx_entry(name: str, seed: int, address: str = "") -> tuple[Entry, dict[str, bytes]]:
    """Make a registry entry of few images in MNIST's form, and its gzipped files."""
    contents = {}
    for split, n in SIZES.items():
        pixels, labels = images_and_labels(n, seed + len(split))
        contents[f"{STEMS[split]}-images-idx3-ubyte.gz"] = idx_bytes(pixels)
        contents[f"{STEMS[split]}-labels-idx1-ubyte.gz"] = idx_bytes(labels)
    files = {key: gzip.compress(content, mtime=0) for key, content in contents.items()}

    def published(key: str) -> PublishedFile:
        addresses = (f"{address}/{key}",) if address else ()
        return PublishedFile(key, f"md5:{md5(files[key])}", md5(contents[key]), addresses)

    form = Form(
        {
            split: (
                published(f"{stem}-images-idx3-ubyte.gz"),
                published(f"{stem}-labels-idx1-ubyte.gz"),
            )
            for split, stem in STEMS.items()
        },
        registry.unpack_gzip,
        registry.decode_idx,
    )
    return replace(REGISTRY[name], form=form, sizes=SIZES, package=None), files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


def svhn_mat(pixels: NDArray[np.uint8], labels: NDArray[np.uint8], compress: bool = True) -> bytes:
    """Write images (n, 32, 32, 3) and labels 0-9 as SVHN's files have them."""
    buffer = io.BytesIO()
    y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    scipy_io.savemat(buffer, {"X": np.moveaxis(pixels, 0, 3), "y": y}, do_compression=compress)
    return buffer.getvalue()


def colour_images(n: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    pixels = np.random.default_rng(1).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return pixels, (np.arange(n) % 10).astype(np.uint8)
