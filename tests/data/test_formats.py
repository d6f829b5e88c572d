"""Readers of the original formats, on small files made here."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import io as scipy_io

from factormix.data.datasets import registry
from factormix.errors import InputError
from image_sets import (
    colour_images,
    idx_bytes,
    images_and_labels,
    svhn_mat,
)

pytest.importorskip("pooch")
pytest.importorskip("platformdirs")


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_are_read_gzipped_or_not(compressed: bool, tmp_path: Path) -> None:
    pixels, labels = images_and_labels(12, 3)
    contents = [idx_bytes(pixels), idx_bytes(labels)]
    raws = [gzip.compress(content) if compressed else content for content in contents]
    paths = [tmp_path / "images", tmp_path / "labels"]
    unpacked = [registry.unpack_gzip(raw, path) for raw, path in zip(raws, paths, strict=True)]
    images = registry.decode_idx(unpacked, paths)
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    assert images.labels.dtype == np.int64


@given(cut=st.integers(0, 16 + 2 * 784 - 1), where=st.sampled_from(["shorter", "longer"]))
def test_an_idx_file_of_another_length_is_refused(cut: int, where: str) -> None:
    pixels, labels = images_and_labels(2, 0)
    good = idx_bytes(pixels)
    bad = good[:cut] if where == "shorter" else good + bytes(cut + 1)
    with pytest.raises(InputError, match="images is truncated or altered"):
        registry.decode_idx([bad, idx_bytes(labels)], [Path("images"), Path("labels")])


@given(position=st.integers(0, 15), bit=st.integers(0, 7))
def test_any_altered_bit_of_an_idx_header_is_noticed(position: int, bit: int) -> None:
    pixels, labels = images_and_labels(2, 0)
    bad = bytearray(idx_bytes(pixels))
    bad[position] ^= 1 << bit
    with pytest.raises(InputError):
        registry.decode_idx([bytes(bad), idx_bytes(labels)], [Path("images"), Path("labels")])


def test_images_and_labels_must_be_equally_many() -> None:
    pixels, _ = images_and_labels(3, 0)
    _, labels = images_and_labels(2, 0)
    with pytest.raises(InputError, match=r"holds 3 images but .* holds 2 labels"):
        registry.decode_idx([idx_bytes(pixels), idx_bytes(labels)], [Path("a"), Path("b")])


def test_a_truncated_gzip_stream_is_refused() -> None:
    raw = gzip.compress(idx_bytes(images_and_labels(2, 0)[0]))
    for cut in (2, 10, len(raw) // 2, len(raw) - 1):
        with pytest.raises(InputError, match="gzip stream"):
            registry.unpack_gzip(raw[:cut], Path("images.gz"))


@pytest.mark.parametrize("compress", [True, False])
def test_svhn_mat_is_read_with_ten_as_zero(compress: bool) -> None:
    pixels, labels = colour_images(11)
    raw = svhn_mat(pixels, labels, compress)
    images = registry.decode_svhn([raw], [Path("train_32x32.mat")])
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    for cut in (0, 50, 128, 1000, len(raw) // 2, len(raw) - 16):
        with pytest.raises(InputError, match=r"train_32x32\.mat is truncated or altered"):
            registry.decode_svhn([raw[:cut]], [Path("train_32x32.mat")])


def test_svhn_mat_of_another_shape_is_refused() -> None:
    pixels, labels = colour_images(4)
    with pytest.raises(InputError, match="truncated or altered: X"):
        registry.decode_svhn([svhn_mat(pixels, labels[:3])], [Path("train_32x32.mat")])
    buffer = io.BytesIO()
    scipy_io.savemat(buffer, {"Z": pixels})
    with pytest.raises(InputError, match="has no variable X"):
        registry.decode_svhn([buffer.getvalue()], [Path("train_32x32.mat")])


def test_csv_of_labels_and_pixels_is_read_and_checked() -> None:
    pixels, labels = images_and_labels(5, 4)
    rows = [[int(label), *image.reshape(-1)] for label, image in zip(labels, pixels, strict=True)]
    header = "label," + ",".join(f"{i}x{j}" for i in range(28) for j in range(28))
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    images = registry.decode_csv(["\n".join(lines).encode()], [Path("mnist.csv")])
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    cut = lines[-1].rpartition(",")[0]
    too_bright = lines[-1].rpartition(",")[0] + ",256"
    for bad in ([*lines[:-1], cut], [*lines[:-1], too_bright], [header, "1,2,3"], ["a", "b"]):
        with pytest.raises(InputError, match=r"mnist\.csv is truncated or altered"):
            registry.decode_csv(["\n".join(bad).encode()], [Path("mnist.csv")])
