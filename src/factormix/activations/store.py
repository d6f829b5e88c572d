"""A folder of activations: shards of rows with their tokens, documents and positions.

A shard is a safetensors file with the tensors ``activations`` (n, d), in float16 or bfloat16, and
``tokens``, ``documents`` and ``positions`` (n,). The header ``activations.json`` describes what the
rows are, and ``tokens.json`` has the texts of token ids, if there was a tokenizer. Readers of
``factormix.data`` serve the same folder to all commands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from factormix.data.readers.numpy import open_shard
from factormix.data.sources.shards import ShardedRows
from factormix.errors import InputError, input_error
from factormix.files import write_whole

ROWS_KEY = "activations"
"""Name of the tensor of rows; it is also one of the usual names of ``read_rows``."""
LABELS = ("tokens", "documents", "positions")
PROGRESS_KEY = "collected"
HEADER_NAME = "activations.json"
PIECES_NAME = "tokens.json"
KIND = "factormix activations"
CONTINUES, BEGINS = "##", ("\u0120", "\u2581")
"""Signs of tokens that continue a word (WordPiece) and that begin one (BPE, SentencePiece)."""
VERSION = 1


class Labels(NamedTuple):
    """What belongs to each of n rows."""

    tokens: NDArray[np.int64]
    """Token ids, (n,); -1 where the inputs have none."""
    documents: NDArray[np.int64]
    """Numbers of the texts or sequences, (n,), in the order of the inputs."""
    positions: NDArray[np.int64]
    """Positions in the document, (n,), counted without padding."""


@dataclass(frozen=True)
class Header:
    """What the rows of a folder are, and whether all inputs have been collected."""

    layer: str
    model: str
    """The class of the network."""
    model_dtype: str
    dtype: str
    n_features: int
    rows_per_shard: int
    batch_size: int
    exclude: tuple[int, ...] = ()
    weights: str = ""
    """Digest of the network's weights up to the layer; empty if it is not known."""
    long: str = ""
    """What was done with longer texts; empty if it is not known."""
    max_length: int | None = None
    """Largest number of tokens of a sequence; None without a limit."""
    tokenizer: str = ""
    """Digest of the tokenizer's vocabulary; empty if it is not known, or without a tokenizer."""
    word_sign: str = ""
    """The vocabulary's sign of tokens that continue a word, ``##``, or of those that begin one;
    empty if it is not known."""
    collected: dict[str, Any] | None = None
    """Number of batches and documents and digest of all inputs; None until all are collected."""

    @property
    def complete(self) -> bool:
        """Whether all inputs have been collected."""
        return self.collected is not None

    def write(self, folder: Path) -> None:
        """Write the header into a folder."""
        content = {"kind": KIND, "version": VERSION, **asdict(self)}
        write_whole(folder / HEADER_NAME, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read the header of a folder."""
        path = folder / HEADER_NAME
        try:
            content = json.loads(path.read_bytes())
            kind, version = content.pop("kind"), content.pop("version")
            header = cls(**content)
        except FileNotFoundError:
            raise InputError(
                f"{folder} has no {HEADER_NAME}: give a folder that collect has written."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be read: collect the activations again.") from error
        if kind != KIND or version != VERSION:
            raise InputError(f"{path} is of another version: collect the activations again.")
        return cls(**{**asdict(header), "exclude": tuple(header.exclude)})


class Store(ShardedRows):
    """The activations of a folder, (n, d), as rows for ``fit``, ``partial_fit`` and ``stream``.

    Only the rows that are needed are read, and bfloat16 is served as float32.

    Attributes
    ----------
    folder : Path
    header : Header
        Layer, class and dtype of the network, and the dtype of the shards.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self.header = Header.read(self.folder)
        self.paths = find_shards(self.folder)
        if not self.paths:
            raise InputError(f"{folder} has no shards yet: call collect again to continue.")
        shards = [open_shard(path, ROWS_KEY) for path in self.paths]
        for path, shard in zip(self.paths, shards, strict=True):
            _check_labels(path, shard.n_rows)
        layout = shards[0].layout
        super().__init__(shards, layout.n_features, layout.dtype, name=self.folder.name)

    def labels(self) -> Iterator[Labels]:
        """Yield the labels of the rows, shard by shard."""
        for path in self.paths:
            yield read_labels(path)

    def labels_at(self, first: int, end: int) -> Labels:
        """Read the labels of the rows from ``first`` to before ``end``."""
        parts = list[Labels]()
        for path, start, stop in zip(self.paths, self._firsts[:-1], self._firsts[1:], strict=True):
            if start < end and first < stop:
                within = slice(max(first - start, 0), min(end, stop) - start)
                parts.append(read_labels(path, within))
        return Labels(*(np.concatenate(values) for values in zip(*parts, strict=True)))

    def rows_of(self, document: int) -> NDArray[np.int64]:
        """Return the numbers of the rows of a document, (T,), by position."""
        # The rows of a document lie in one shard, and documents ascend from shard to shard.
        for first, labels in zip(self._firsts[:-1], self.labels(), strict=True):
            if document <= labels.documents.max():
                found = np.flatnonzero(labels.documents == document)
                order = np.argsort(labels.positions[found], kind="stable")
                return np.asarray(found[order] + first, np.int64)
        return np.empty(0, np.int64)

    @cached_property
    def n_documents(self) -> int:
        """Number of documents up to the last one with rows."""
        return 1 + int(read_labels(self.paths[-1]).documents.max())

    @cached_property
    def pieces(self) -> dict[int, str]:
        """The piece of text of each token id; joined, the pieces of a document are its text.

        Empty if the inputs were not texts, or until all are collected.
        """
        path = self.folder / PIECES_NAME
        try:
            return {
                int(token): str(piece) for token, piece in json.loads(path.read_bytes()).items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path} cannot be read: remove it to see numbers only.") from error

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each token id: its piece, with the sign that the vocabulary gives it.

        So a word, ``my``, differs from the end of another, ``##my``; in other vocabularies,
        the word has a sign, as in ``\u2581my``.
        """
        sign = self.header.word_sign

        def name(piece: str) -> str:
            marked = sign and piece.startswith(" ") != (sign == CONTINUES)
            # A line break has a name too.
            return (sign if marked else "") + (piece.strip() or repr(piece)[1:-1])

        return {token: name(piece) for token, piece in self.pieces.items()}

    def __repr__(self) -> str:
        """Describe the rows."""
        return (
            f"Store({self.folder.name!r}: {self.n_rows:,} rows of {self.n_features} features,"
            f" layer {self.header.layer!r}, {self.header.dtype})"
        )


def open_store(folder: str | os.PathLike[str]) -> Store:
    """Open a folder that ``collect`` has written, whether complete or not."""
    return Store(folder)


def write_pieces(folder: Path, tokenizer: Any) -> str:
    """Write the piece of text of every token in a folder, and return the sign of words."""
    ids = np.unique(np.concatenate([np.unique(labels.tokens) for labels in Store(folder).labels()]))
    tokens = [token for token in ids.tolist() if token >= 0]
    known = hasattr(tokenizer, "convert_ids_to_tokens")
    raw = tokenizer.convert_ids_to_tokens(tokens) if known else [f" {i}" for i in tokens]
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else raw
    sign = _find_word_sign(vocabulary)
    pieces = dict(zip(tokens, _decode_pieces(tokens, raw, sign, tokenizer), strict=True))
    write_whole(folder / PIECES_NAME, (json.dumps(pieces, ensure_ascii=False) + "\n").encode())
    return sign


def _find_word_sign(vocabulary: Collection[str]) -> str:
    """Return the sign by which most tokens continue or begin a word; empty without one."""

    def count(sign: str) -> int:
        return sum(token.startswith(sign) for token in vocabulary)

    # Vocabularies with another sign have ## too, as in text that marks headings by it.
    most = max((CONTINUES, *BEGINS), key=count)
    return most if count(most) else ""


def _decode_pieces(
    tokens: list[int], raw: list[str], word_sign: str, tokenizer: Any
) -> Iterator[str]:
    """Yield the piece of text of each token: a blank comes first where a word begins."""
    continued = word_sign == CONTINUES
    for token, written in zip(tokens, raw, strict=True):
        piece = str(tokenizer.decode([token]))
        if continued and written.startswith(CONTINUES):
            yield piece.removeprefix(CONTINUES)
        elif (continued or written.startswith((*BEGINS, " "))) and not piece.startswith(" "):
            yield f" {piece}"
        else:
            yield piece


def name_shard(number: int) -> str:
    """Return the file name of a shard."""
    return f"activations-{number:05d}.safetensors"


def find_shards(folder: Path) -> list[Path]:
    """Return the shards of a folder in order."""
    found = sorted(folder.glob("activations-*.safetensors"))
    if [path.name for path in found] != [name_shard(i) for i in range(len(found))]:
        raise InputError(
            f"{folder} lacks one of its shards: copy it again, or collect into an empty folder."
        )
    return found


def read_labels(path: Path, within: slice = slice(None)) -> Labels:
    """Read the labels of some rows of a shard."""
    with _open_labels(path) as file:
        values = (file.get_slice(name)[within] for name in LABELS)
        return Labels(*(value.to(torch.int64).numpy() for value in values))


def _check_labels(path: Path, n_rows: int) -> None:
    """Check that a shard has each label once for each of its rows."""
    with _open_labels(path) as file:
        for name in LABELS:
            shape = file.get_slice(name).get_shape()
            if shape != [n_rows]:
                raise InputError(
                    f"{path} has {n_rows} rows and {name} of shape {tuple(shape)}: collect the"
                    " activations again."
                )


@contextmanager
def _open_labels(path: Path) -> Iterator[Any]:
    refusal = f"{path} is truncated or has no labels of its rows: collect the activations again."
    with input_error(refusal, OSError, SafetensorError), safe_open(path, "pt") as file:
        yield file


def read_progress(path: Path) -> dict[str, Any]:
    """Read the number of batches and documents, and the digest of inputs, up to a shard's end."""
    try:
        with safe_open(path, "pt") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {})[PROGRESS_KEY])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(
            f"{path} is truncated or was not written by collect: remove it, and collect again."
        ) from error
    return found
