"""Collect the activations of a layer into a folder of shards."""

from __future__ import annotations

import difflib
import hashlib
import json
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from factormix.activations.store import (
    HEADER_NAME,
    LABELS,
    PROGRESS_KEY,
    ROWS_KEY,
    Header,
    Store,
    find_shards,
    name_shard,
    open_store,
    read_progress,
    write_pieces,
)
from factormix.errors import InputError, input_error
from factormix.estimators.validation import check_count
from factormix.files import make_folder, replacing
from factormix.training.callbacks import draw_bar

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS_PER_SHARD = 1 << 16
"""Default number of rows of a shard: 96 MB for the 768 features of a small model in 16 bits."""
UNLIMITED = 1 << 24
"""Tokenizers mean no limit by a length of this or more; ``transformers`` uses 1e30."""
WEIGHTS_PER_DIGEST = 64
"""Values of a parameter that enter its digest: training and seeds change nearly all values."""
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of a forward pass by inputs of another dtype, shape, vocabulary or form."""


def collect(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    layer: str,
    to: str | os.PathLike[str],
    tokenizer: Callable[..., Any] | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    long: Literal["stop", "cut", "split"] = "stop",
    dtype: Literal["float16", "bfloat16"] | None = None,
    exclude: Collection[int] = (),
    rows_per_shard: int = ROWS_PER_SHARD,
    verbose: bool = True,
) -> Store:
    """Run a network over inputs, and write the outputs of a layer into a folder of shards.

    The forward pass ends at the layer, and memory holds one shard. Shards appear when they are
    complete. The same call continues after an interruption, and gives the same shards: inputs must
    come in the same order again, and those that have been collected are skipped.

    Parameters
    ----------
    model
        Any module. It is run in evaluation mode and without gradients, on its own device.
    inputs
        Texts, if there is a tokenizer; or batches, each a dictionary of arguments of the network or
        a tensor, such as token ids (B, T). A dictionary may have an ``attention_mask`` (B, T):
        padding gives no rows. From a tuple, the first element is taken. Every text or sequence is a
        document.
    layer
        Name of a module within the network, as in ``model.named_modules()``. If it is called
        several times in a pass, the first call counts; if it has several outputs, the first counts.
        Outputs (B, T, d) give a row for each token, and (B, d) for each sequence.
    to
        Folder, which is created.
    tokenizer
        Called as tokenizers of ``transformers`` are. Sequences are padded on the right, even by
        tokenizers without a padding token.
    batch_size
        Number of texts in a batch.
    max_length
        Largest number of tokens of a sequence. By default, the tokenizer and the configuration of
        the network limit it, if they do.
    long
        Whether a longer text ends the collection with an error, is cut, or is split into windows,
        which the network sees one by one. Windows belong to the same document, and positions go
        on from one to the next.
    dtype
        Format of the shards; by default bfloat16 for activations in bfloat16, and float16 for
        others.
    exclude
        Ids of tokens without rows, such as ``tokenizer.all_special_ids``.
    rows_per_shard
        A shard ends after the batch that reaches this number.
    verbose
        Whether to show a progress bar, in tokens.

    Examples
    --------
    >>> import tempfile, torch
    >>> network = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4))
    >>> ids = torch.arange(40).view(4, 10)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = collect(network, [ids[:2], ids[2:]], layer="1", to=folder, verbose=False)
    ...     store.n_rows, store.n_features, next(store.labels()).documents[:12].tolist()
    (40, 4, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1])
    """
    module = find_layer(model, layer)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype must be 'float16' or 'bfloat16', not {dtype!r}.")
    if long not in ("stop", "cut", "split"):
        raise InputError(f"long must be 'stop', 'cut' or 'split', not {long!r}.")
    if tokenizer is not None and not callable(tokenizer):
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__}: give a tokenizer of transformers, or"
            " another function of texts."
        )
    folder: Any = to
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"to is a {type(folder).__name__}: give the path of a folder.")
    check_count(batch_size, "batch_size", 1)
    check_count(rows_per_shard, "rows_per_shard", 1)
    ids: Any = exclude
    if not isinstance(ids, Collection) or not all(isinstance(i, numbers.Integral) for i in ids):
        raise InputError("exclude must be ids of tokens, such as tokenizer.all_special_ids.")
    limit = _find_limit(model, tokenizer, max_length)
    prepare = _Preparation(tokenizer, limit, long, batch_size)
    header = Header(
        layer=layer,
        model=type(model).__name__,
        model_dtype=_name_dtype(model),
        dtype=dtype or "",
        n_features=0,
        rows_per_shard=rows_per_shard,
        batch_size=batch_size,
        exclude=tuple(sorted(map(int, exclude))),
        weights=_digest_weights(model, layer),
        long=long,
        max_length=limit,
        tokenizer=_digest_tokenizer(tokenizer),
    )
    if tokenizer is None and isinstance(inputs, (list, tuple)):
        prepare.check_lengths(inputs)
    writer = _Writer(Path(to), header)
    batches = _group_inputs(inputs, tokenizer is not None, batch_size)
    writer.skip_collected(batches)
    with (
        _in_evaluation(model),
        torch.inference_mode(),
        draw_bar(shown=verbose, unit=" tokens", unit_scale=True, initial=writer.n_rows) as bar,
    ):
        for batch in batches:
            writer.check_open()
            for ready in prepare(batch, writer.n_documents):
                refusal = (
                    f"the network cannot be run on batch {writer.n_batches} of the inputs"
                    " ({reason}): give what its forward takes, in its own dtype."
                )
                with input_error(refusal, *FORWARD_ERRORS):
                    output = _run_to_layer(model, module, layer, ready)
                bar.update(writer.add(ready, output))
            writer.end_batch(batch)
    writer.finish(tokenizer)
    return open_store(to)


def find_layer(model: nn.Module, layer: str) -> nn.Module:
    """Return a module within a network by its name."""
    given: Any = model
    if not isinstance(given, nn.Module):
        raise InputError(f"the network is a {type(given).__name__}: give a torch.nn.Module.")
    modules: dict[str, nn.Module] = dict(model.named_modules())
    name: Any = layer
    if name and isinstance(name, str) and name in modules:
        # A container such as a ModuleList is indexed, not called: its hooks never run.
        if getattr(modules[name].forward, "__func__", None) is nn.Module.forward:
            raise InputError(
                f"the layer {name!r} is a {type(modules[name]).__name__}, which is not called:"
                " choose a module within it."
            )
        return modules[name]
    names = [name for name in modules if name]
    if not names:
        raise InputError(
            f"the network is a {type(model).__name__} without modules within it: put it into a"
            " torch.nn.Sequential, in which it is the layer '0'."
        )
    near = difflib.get_close_matches(str(layer), names, n=3, cutoff=0.5) or names[:3]
    close = ", ".join(map(repr, sorted(near)))
    raise InputError(
        f"the network has no layer {layer!r}: choose a name of model.named_modules(), such as"
        f" {close}."
    )


class Ready(NamedTuple):
    """Sequences as the network takes them: a batch, or some windows of its texts."""

    arguments: Tensor | dict[str, Any]
    tokens: Tensor | None
    """Token ids (B, T), or None if the inputs have none."""
    mask: Tensor | None
    """Whether each token counts, (B, T), or None if all do."""
    documents: Tensor | None = None
    """Number of each sequence's text within the batch, (B,); None for a text each."""
    starts: Tensor | None = None
    """Position of each sequence's first token in its text, (B,), or None for 0."""


@dataclass(frozen=True)
class _Preparation:
    """Turn texts or a batch of the caller into arguments of the network."""

    tokenizer: Callable[..., Any] | None
    limit: int | None
    long: str
    batch_size: int

    def __call__(self, batch: Any, first_document: int) -> Iterator[Ready]:
        """Yield the sequences of a batch, at most ``batch_size`` of them at once for texts."""
        if self.tokenizer is not None:
            yield from self._tokenize(batch, first_document)
            return
        ready = _read_batch(batch)
        self._check_length(ready, first_document)
        ids = ready.arguments
        if ready.tokens is None or self.limit is None or ready.tokens.shape[1] <= self.limit:
            yield ready
            return
        assert isinstance(ids, Tensor)
        windows = torch.split(ids, self.limit, dim=1)
        for i, some in enumerate(windows[: 1 if self.long == "cut" else None]):
            documents = torch.arange(len(some))
            starts = torch.full_like(documents, i * self.limit)
            yield Ready(some, some, None, documents, starts)

    def check_lengths(self, batches: Iterable[Any]) -> None:
        """Check the lengths of all batches; those of texts are known after tokenization only."""
        first_document = 0
        for batch in batches:
            ready = _read_batch(batch)
            if ready.tokens is None:
                return
            self._check_length(ready, first_document)
            first_document += len(ready.tokens)

    def _check_length(self, ready: Ready, first_document: int) -> None:
        """Refuse sequences that are too long, unless they are cut or split."""
        if ready.tokens is None or self.limit is None or ready.tokens.shape[1] <= self.limit:
            return
        if self.long != "stop" and isinstance(ready.arguments, Tensor):
            return
        B, T = ready.tokens.shape
        lengths = torch.full((B,), T) if ready.mask is None else ready.mask.sum(dim=1)
        if lengths.max() <= self.limit:
            raise InputError(
                f"a batch has {T} tokens with its padding, and the model allows {self.limit}:"
                " pad to fewer."
            )
        raise self._too_long(lengths.tolist(), first_document)

    def _tokenize(self, texts: Sequence[str], first_document: int) -> Iterator[Ready]:
        assert self.tokenizer is not None
        options: dict[str, Any] = {}
        if self.long != "stop" and self.limit is not None:
            options = {"truncation": True, "max_length": self.limit}
            options["return_overflowing_tokens"] = self.long == "split"
        encoded = dict(self.tokenizer(list(texts), **options))
        owners = encoded.pop("overflow_to_sample_mapping", None)
        if self.long == "split" and options and owners is None:
            raise InputError(
                "the tokenizer cannot split texts: use a fast one of transformers, or long='cut'."
            )
        ids: list[list[int]] = [list(one) for one in encoded["input_ids"]]
        lengths = [len(one) for one in ids]
        if self.limit is not None and max(lengths, default=0) > self.limit:
            if options:
                raise InputError(
                    f"windows of {self.limit} tokens have no room for the tokenizer's special"
                    " tokens: give a larger max_length."
                )
            raise self._too_long(lengths, first_document)
        encoded.setdefault("attention_mask", [[1] * n for n in lengths])
        documents = torch.as_tensor(range(len(ids)) if owners is None else owners)
        begins = torch.tensor(lengths).cumsum(dim=0) - torch.tensor(lengths)
        # The windows of a text are neighbours: its first one begins at position 0.
        starts = begins - begins[torch.searchsorted(documents, documents)]
        # Empty texts are documents without rows.
        filled = [i for i, n in enumerate(lengths) if n]
        for at in range(0, len(filled), self.batch_size):
            some = filled[at : at + self.batch_size]
            arguments = dict[str, Any]()
            for name, values in encoded.items():
                one = values[some[0]] if len(values) == len(ids) else None
                # One value for each token.
                if isinstance(one, (list, tuple)) and len(one) == lengths[some[0]]:
                    rows = [torch.tensor(values[i]) for i in some]
                    arguments[name] = pad_sequence(rows, batch_first=True)
            tokens, mask = arguments["input_ids"], arguments["attention_mask"].bool()
            yield Ready(arguments, tokens, mask, documents[some], starts[some])

    def _too_long(self, lengths: list[int], first_document: int) -> InputError:
        which = max(range(len(lengths)), key=lambda i: lengths[i])
        return InputError(
            f"document {first_document + which} has {lengths[which]} tokens, and the model allows"
            f" {self.limit}: give texts or tensors with long='split' or long='cut'."
        )


def _read_batch(batch: Any) -> Ready:
    """Read a batch of the caller: its arguments for the network, token ids and mask."""
    if isinstance(batch, (tuple, list)) and len(batch):
        batch = batch[0]
    if isinstance(batch, Tensor):
        arguments: Tensor | dict[str, Any] = batch
        tokens: Tensor | None = batch
        mask: Tensor | None = None
    elif isinstance(batch, Mapping):
        arguments = dict(batch)
        tokens, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        for name, value in (("input_ids", tokens), ("attention_mask", mask)):
            if value is not None and not isinstance(value, Tensor):
                raise InputError(
                    f"{name} is a {type(value).__name__}: call the tokenizer with"
                    " return_tensors='pt', or give it to collect with the texts."
                )
        if tokens is not None and mask is not None and mask.shape != tokens.shape:
            raise InputError(
                f"attention_mask has the shape {tuple(mask.shape)} and input_ids"
                f" {tuple(tokens.shape)}: give both with (sequences, tokens)."
            )
    else:
        hint = ": give a tokenizer for texts" if isinstance(batch, str) else ""
        raise InputError(
            f"inputs has a {type(batch).__name__}, and a batch must be a tensor or a"
            f" dictionary of tensors{hint}."
        )
    if tokens is not None and (tokens.is_floating_point() or tokens.ndim != 2):
        tokens = None
    return Ready(arguments, tokens, None if mask is None else mask.bool())


def _find_limit(model: nn.Module, tokenizer: Any, max_length: int | None) -> int | None:
    """Return the largest number of tokens that tokenizer and network allow; None without limit."""
    if max_length is not None:
        check_count(max_length, "max_length", 1)
    config = getattr(model, "config", None)
    known = (
        max_length,
        getattr(tokenizer, "model_max_length", None),
        getattr(config, "max_position_embeddings", None),
    )
    limits = [one for one in known if isinstance(one, int) and 0 < one < UNLIMITED]
    return min(limits, default=None)


def _group_inputs(inputs: Iterable[Any], texts: bool, batch_size: int) -> Iterator[Any]:
    """Yield batches: of texts, tuples of them; others as they are."""
    if isinstance(inputs, (str, Mapping, Tensor)):
        raise InputError(
            f"inputs is a single {type(inputs).__name__}: give a list of texts or batches."
        )
    given: Any = inputs
    if not isinstance(given, Iterable):
        raise InputError(f"inputs is a {type(given).__name__}: give a list of texts or batches.")
    if not texts:
        yield from inputs
        return
    remaining = iter(inputs)
    while group := tuple(islice(remaining, batch_size)):
        for text in group:
            if not isinstance(text, str):
                raise InputError(
                    f"inputs has a {type(text).__name__} among its texts: give strings, or leave"
                    " the tokenizer out."
                )
        yield group


class _LayerReached(Exception):
    """Ends a forward pass at the layer."""


def _run_to_layer(model: nn.Module, module: nn.Module, layer: str, ready: Ready) -> Tensor:
    """Return the output of a layer, (B, T, d) or (B, d)."""
    outputs = list[Any]()

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append(output)
        raise _LayerReached

    hook = module.register_forward_hook(keep)
    tensors = chain(model.parameters(), model.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type == "meta":
        raise InputError("the network is on the device meta, without weights: load them first.")
    try:
        if isinstance(ready.arguments, Tensor):
            model(ready.arguments.to(device))
        else:
            model(
                **{
                    name: value.to(device) if isinstance(value, Tensor) else value
                    for name, value in ready.arguments.items()
                }
            )
    except _LayerReached:
        pass
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            "the device has too little memory for a batch: give smaller batches, or a smaller"
            " batch_size for texts."
        ) from error
    finally:
        hook.remove()
    if not outputs:
        raise InputError(f"a forward pass does not call the layer {layer!r}: choose another.")
    return _check_output(first_tensor(outputs[0]), layer, ready)


def first_tensor(output: Any) -> Any:
    """Return the first tensor of a layer's output, which may be a tuple or a dictionary."""
    while isinstance(output, (tuple, list, Mapping)) and len(output):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output


def _check_output(output: Any, layer: str, ready: Ready) -> Tensor:
    """Check that a layer's output has rows of numbers, one for each token or sequence."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"the layer {layer!r} gives {kind}, not real numbers: choose another.")
    shape = tuple(output.shape)
    expected = None if ready.tokens is None else tuple(ready.tokens.shape)
    if output.ndim not in (2, 3) or (
        expected and shape[: output.ndim - 1] != expected[: output.ndim - 1]
    ):
        of = f" for inputs of shape {expected}" if expected else ""
        raise InputError(
            f"the layer {layer!r} gives an output of shape {shape}{of}, and (sequences, tokens,"
            " features) or (sequences, features) is needed: choose another layer."
        )
    return output


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and back where it was in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Writer:
    """Gather rows and their labels, write shards, and keep count of the inputs collected."""

    def __init__(self, folder: Path, wanted: Header) -> None:
        # The first output of the layer decides what the wanted header lacks.
        self.folder, self.wanted = folder, wanted
        self.n_batches = self.n_documents = self.n_shards = self.n_rows = 0
        self.header: Header | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self._parts = list[dict[str, Tensor]]()
        self._waiting = self._n_sequences = 0

    def skip_collected(self, batches: Iterator[Any]) -> None:
        """Skip the batches of complete shards, after a check that they are the same."""
        make_folder(self.folder)
        if not (self.folder / HEADER_NAME).exists():
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise InputError(
                    f"{self.folder} has other files in it: collect into an empty folder."
                )
            return
        header = Header.read(self.folder)
        # A killed process leaves the file that it was writing.
        for unfinished in self.folder.glob(".activations*"):
            unfinished.unlink(missing_ok=True)
        paths = find_shards(self.folder)
        if not paths:
            # Nothing is kept of such a folder, so other options may begin it again.
            return
        self._check_same(header)
        self.header = header
        self.n_rows = Store(self.folder).n_rows
        known = self.header.collected or read_progress(paths[-1])
        for _ in range(known["n_batches"]):
            batch = next(batches, None)
            if batch is None:
                raise self._differs("are fewer than")
            self._count(batch)
        if self._digest.hexdigest() != known["digest"]:
            raise self._differs("differ from")
        self.n_documents, self.n_shards = known["n_documents"], len(paths)
        if not header.complete:
            # A collection that stopped at a long text may continue in another way.
            now = self.wanted
            self.header = replace(
                header,
                weights=now.weights,
                long=now.long,
                max_length=now.max_length,
                tokenizer=now.tokenizer,
            )
            self.header.write(self.folder)

    def check_open(self) -> None:
        """Refuse another batch where the folder is complete."""
        if self.header is not None and self.header.complete:
            raise self._differs("are more than")

    def add(self, ready: Ready, output: Tensor) -> int:
        """Add the rows of some sequences; return their number."""
        self._open(output)
        self._n_sequences = len(output)
        rows, labels = self._flatten(ready, output)
        self._parts.append({ROWS_KEY: self._convert(rows), **labels})
        self._waiting += len(rows)
        self.n_rows += len(rows)
        return len(rows)

    def end_batch(self, batch: Any) -> None:
        """Count a batch that has been added, and write a shard if it is full."""
        self._count(batch)
        self.n_documents += len(batch) if _are_texts(batch) else self._n_sequences
        if self._waiting >= self.wanted.rows_per_shard:
            self._write_shard()

    def finish(self, tokenizer: Any) -> None:
        """Write the last shard and the texts of tokens, and mark the folder as complete."""
        if self._waiting:
            self._write_shard()
        if self.header is None or not self.n_rows:
            raise InputError("inputs has no tokens: give at least one text or batch.")
        if not self.header.complete:
            if tokenizer is not None:
                sign = write_pieces(self.folder, tokenizer)
                self.header = replace(self.header, word_sign=sign)
            self.header = replace(self.header, collected=self._progress())
            self.header.write(self.folder)

    def _open(self, output: Tensor) -> None:
        """Write the header before the first shard."""
        if self.header is not None:
            return
        kept = "bfloat16" if output.dtype == torch.bfloat16 else "float16"
        dtype = self.wanted.dtype or kept
        self.header = replace(self.wanted, dtype=dtype, n_features=output.shape[-1])
        self.header.write(self.folder)

    def _check_same(self, header: Header) -> None:
        """Check that a folder was begun with the same network and options."""
        words = {
            "model": "class of the network",
            "model_dtype": "dtype of the network",
            "dtype": "dtype of the shards",
        }
        for name in ("layer", *words, "rows_per_shard", "batch_size", "exclude"):
            before, now = getattr(header, name), getattr(self.wanted, name)
            if before != now and not (name == "dtype" and not now):
                raise InputError(
                    f"{self.folder} was begun with another {words.get(name, name)}, {before} and"
                    f" not {now}: give the same, or collect into another folder."
                )

        for one, name in (
            ("weights", "other weights of the network"),
            ("tokenizer", "another tokenizer"),
        ):
            if getattr(header, one) not in ("", getattr(self.wanted, one)):
                raise InputError(
                    f"{self.folder} was begun with {name}: give the same, or collect into another"
                    " folder."
                )
        if not _same_lengths(header, self.wanted):
            raise InputError(
                f"{self.folder} was begun with long={header.long!r} and at most"
                f" {header.max_length} tokens, not long={self.wanted.long!r} and"
                f" {self.wanted.max_length}: give the same, or collect into another folder."
            )

    def _differs(self, how: str) -> InputError:
        return InputError(
            f"the inputs {how} those that {self.folder} was collected from: give the same ones in"
            " the same order, or collect into another folder."
        )

    def _count(self, batch: Any) -> None:
        """Count a batch, and add it to the digest of all inputs."""
        self.n_batches += 1
        if _are_texts(batch):
            for text in batch:
                self._digest.update(hashlib.blake2b(text.encode("utf-8", "replace")).digest())
            return
        batch = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
        tensors = batch if isinstance(batch, Mapping) else {"": batch}
        for name, value in tensors.items():
            self._digest.update(str(name).encode())
            if isinstance(value, Tensor):
                self._digest.update(str((tuple(value.shape), value.dtype)).encode())
                flat = value.detach().cpu().contiguous().reshape(-1)
                self._digest.update(flat.view(torch.uint8).numpy().tobytes())

    def _flatten(self, ready: Ready, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows that count, (n, d), and their labels (n,) each."""
        B = len(output)
        per_token = output.ndim == 3
        T = output.shape[1] if per_token else 1
        mask = torch.ones(B, T, dtype=torch.bool)
        if per_token and ready.mask is not None:
            mask = ready.mask.cpu()
        positions = mask.long().cumsum(dim=1) - 1
        tokens = torch.full((B, T), -1)
        if per_token and ready.tokens is not None:
            tokens = ready.tokens.cpu().long()
            mask = mask & ~torch.isin(tokens, torch.tensor(self.wanted.exclude, dtype=torch.long))
        if per_token and ready.starts is not None:
            positions = positions + ready.starts.unsqueeze(1)
        own = torch.arange(B) if ready.documents is None else ready.documents
        documents = (self.n_documents + own).unsqueeze(1).expand(B, T)
        values = (tokens, documents, positions)
        labels = {name: value[mask] for name, value in zip(LABELS, values, strict=True)}
        return output.reshape(B, T, output.shape[-1])[mask.to(output.device)], labels

    def _convert(self, rows: Tensor) -> Tensor:
        """Convert rows to the format of the shards, which must hold their values."""
        assert self.header is not None
        if rows.shape[1] != self.header.n_features:
            raise InputError(
                f"the layer {self.wanted.layer!r} gives {rows.shape[1]} features, and"
                f" {self.header.n_features} before: choose a layer of one width."
            )
        kept = rows.to(DTYPES[self.header.dtype]).cpu()
        if not kept.isfinite().all():
            if not rows.isfinite().all():
                raise InputError(
                    f"the layer {self.wanted.layer!r} gives values that are not finite: load the"
                    " network in float32."
                )
            raise InputError(
                f"the layer {self.wanted.layer!r} gives values up to"
                f" {rows.abs().max().item():.3g}, more than float16 holds: collect with"
                " dtype='bfloat16'."
            )
        return kept

    def _progress(self) -> dict[str, Any]:
        """Describe the inputs up to now."""
        return {
            "n_batches": self.n_batches,
            "n_documents": self.n_documents,
            "digest": self._digest.hexdigest(),
        }

    def _write_shard(self) -> None:
        tensors = {
            name: torch.cat([part[name] for part in self._parts]).contiguous()
            for name in (ROWS_KEY, *LABELS)
        }
        # A single entry, because the order of several is random in the file.
        about = {PROGRESS_KEY: json.dumps(self._progress())}
        path = self.folder / name_shard(self.n_shards)
        try:
            with replacing(path) as temporary:
                save_file(tensors, temporary, about)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write {path}: {error}") from error
        self.n_shards += 1
        self._parts, self._waiting = [], 0


def _same_lengths(before: Header, now: Header) -> bool:
    """Return whether both limits of the length give the same rows of what has been collected."""
    if not before.long or (before.long, before.max_length) == (now.long, now.max_length):
        return True
    # No text so far was longer than the limit before.
    longer = now.max_length is None or now.max_length >= (before.max_length or UNLIMITED)
    return before.long == "stop" and longer


def _digest_weights(model: nn.Module, layer: str) -> str:
    """Return a digest of some values of each parameter of a network up to a layer.

    Modules count in the order of their registration. Modules after the layer are left out, because
    a head that a checkpoint lacks is random in every process.
    """
    digest, reached = hashlib.blake2b(digest_size=8), False
    for name, module in model.named_modules():
        reached = reached or name == layer
        if reached and name != layer and not name.startswith(f"{layer}."):
            break
        for own, tensor in module.named_parameters(recurse=False):
            digest.update(f"{name}.{own} {tuple(tensor.shape)}".encode())
            if not tensor.is_meta:
                flat = tensor.detach().flatten()
                some = flat[:: max(1, len(flat) // WEIGHTS_PER_DIGEST)]
                digest.update(some.cpu().double().numpy().tobytes())
    return digest.hexdigest()


def _digest_tokenizer(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary, or of its name; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    if hasattr(tokenizer, "get_vocab"):
        for item in sorted(tokenizer.get_vocab().items()):
            digest.update(repr(item).encode())
    else:
        digest.update(getattr(tokenizer, "__qualname__", type(tokenizer).__qualname__).encode())
    return digest.hexdigest()


def _are_texts(batch: Any) -> bool:
    return isinstance(batch, tuple) and all(isinstance(one, str) for one in batch)


def _name_dtype(model: nn.Module) -> str:
    """Return the dtype of the parameters of a network, or of most of them."""
    sizes = dict[str, int]()
    for tensor in model.parameters():
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.numel()
    return max(sizes, key=lambda name: sizes[name], default="none")
