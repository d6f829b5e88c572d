"""An atlas of activations: what belongs to each component and to the ends of its factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.activations.coder import MixtureCoder
from factormix.activations.store import Store
from factormix.core.mixture import PrecisionMixture
from factormix.errors import InputError
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import check_count
from factormix.training.callbacks import draw_bar

BLOCK_ROWS = 4096
"""Rows that are read at once."""
COVERED = 0.9
"""Share of the rows that ``n_tokens_90`` tokens cover."""


class Context(NamedTuple):
    """A row with its neighbouring tokens in the same document."""

    row: int
    value: float
    """The log-density of the row in its component, or the entry of its code."""
    document: int
    position: int
    before: tuple[int, ...]
    token: int
    after: tuple[int, ...]

    def text(self, tokenizer: Any) -> str:
        """Return the context in words, with the token itself in brackets."""
        before, token, after = (
            tokenizer.decode(list(ids)) if ids else ""
            for ids in (self.before, (self.token,), self.after)
        )
        return f"{before} [{token}] {after}".strip()


class FactorEnds(NamedTuple):
    """The rows of a component with the smallest and the largest entry of a factor."""

    low: tuple[Context, ...]
    high: tuple[Context, ...]


@dataclass(frozen=True)
class Region:
    """What belongs to a component: the rows for which it is the most probable one."""

    component: int
    n_rows: int
    share: float
    """Share of all rows."""
    tokens: tuple[tuple[int, float], ...]
    """The most frequent tokens with their shares of the component's rows."""
    purity: float
    """Share of the most frequent token; NaN without rows, or if the inputs have no tokens."""
    n_tokens_90: int
    """Number of different tokens that 90% of the rows have, the most frequent first."""
    contexts: tuple[Context, ...]
    """The rows of the highest density."""
    factors: tuple[FactorEnds, ...]


class Atlas(tuple[Region, ...]):
    """The regions of all components, in the order of the components."""

    tokenizer: Any = None
    pieces: Mapping[int, str] = {}
    """The pieces of text of tokens, as the store has them; a tokenizer takes precedence."""
    names: Mapping[int, str] = {}
    """The names of tokens, as the store has them."""

    def table(self) -> Any:
        """Return a data frame with a row for each component."""
        import pandas as pd

        records = [
            {
                "component": region.component,
                "n_rows": region.n_rows,
                "share": region.share,
                "purity": region.purity,
                "n_tokens_90": region.n_tokens_90,
                "tokens": ", ".join(self._name(token) for token, _ in region.tokens),
                "context": self._describe(region.contexts),
            }
            for region in self
        ]
        return pd.DataFrame(records)

    def factor_table(self) -> Any:
        """Return a data frame with a row for each factor of each component."""
        import pandas as pd

        records = [
            {
                "component": region.component,
                "factor": j,
                "low_value": ends.low[0].value,
                "low": self._describe(ends.low),
                "high_value": ends.high[0].value,
                "high": self._describe(ends.high),
            }
            for region in self
            if region.n_rows
            for j, ends in enumerate(region.factors)
        ]
        columns = ["component", "factor", "low_value", "low", "high_value", "high"]
        return pd.DataFrame(records, columns=columns)

    def _name(self, token: int) -> str:
        if self.tokenizer is not None:
            return str(self.tokenizer.decode([token]))
        return self.names.get(token, str(token))

    def _describe(self, contexts: tuple[Context, ...]) -> str:
        """Return the first context as a text, or its tokens as numbers."""
        if not contexts:
            return ""
        first = contexts[0]
        if first.token < 0:
            return f"document {first.document}, position {first.position}"
        if self.tokenizer is not None:
            return first.text(self.tokenizer)
        before, after = (join_pieces(some, self.pieces) for some in (first.before, first.after))
        piece = self.pieces.get(first.token, f" {first.token}")
        blank = " " if piece.startswith(" ") else ""
        return f"{before}{blank}[{piece.strip()}]{after}".strip()


def join_pieces(tokens: Iterable[int], pieces: Mapping[int, str]) -> str:
    """Return the text of neighbouring tokens; one without a piece is shown as a number."""
    return "".join(pieces.get(token, f" {token}") for token in tokens)


def atlas(
    model: MFA | PrecisionMixture | MixtureCoder,
    store: Store,
    *,
    n_contexts: int = 5,
    n_tokens: int = 5,
    window: int = 8,
    tokenizer: Any = None,
    verbose: bool = True,
) -> Atlas:
    """Find the contexts of every component and of both ends of each of its factors.

    A pass over the rows keeps the best few of each list, so memory does not grow with their number.
    A second pass reads the tokens around them.

    Parameters
    ----------
    model
        Trained on the rows of the store, or on others of the same layer. A ``MixtureCoder``
        computes on its own device and in its own format, others in float64.
    store
        As ``collect`` and ``open_store`` return it.
    n_contexts
        Number of rows for a component and for each end of a factor.
    n_tokens
        Number of frequent tokens for a component.
    window
        Number of neighbouring tokens on each side.
    tokenizer
        With a method ``decode``, for the words of tables; by default, the store gives them.
    verbose
        Whether to show a progress bar, in tokens.
    """
    check_count(n_contexts, "n_contexts", 1)
    check_count(n_tokens, "n_tokens", 1)
    check_count(window, "window", 0)
    if not isinstance(store, Store):
        raise InputError(
            f"store is a {type(store).__name__}: give what collect or open_store returns."
        )
    given: Any = model
    # In float64, because float32 may lose digits of densities of narrow components.
    own = isinstance(given, MixtureCoder)
    coder: MixtureCoder = given if own else MixtureCoder(given, torch.float64)
    if coder.n_features != store.n_features:
        raise InputError(
            f"the model has {coder.n_features} features and the store {store.n_features}: give"
            " activations of the layer that it was trained on."
        )
    best = _Best(coder.n_components, n_contexts, 1 + 2 * coder.n_factors)
    counts = [Counter[int]() for _ in range(coder.n_components)]
    with draw_bar(shown=verbose, total=store.n_rows, unit=" tokens", unit_scale=True) as bar:
        for first, rows, tokens in _read_blocks(store):
            components, scores = _score(coder, rows)
            best.merge_(components, scores, first)
            _count_(counts, components.numpy(), tokens)
            bar.update(len(rows))
    contexts = _read_contexts(store, best, window)
    found = Atlas(_make_regions(best, counts, contexts, n_tokens, coder.ranks))
    found.tokenizer, found.pieces, found.names = tokenizer, store.pieces, store.names
    return found


def _read_blocks(store: Store) -> Iterator[tuple[int, Tensor, NDArray[np.int64]]]:
    """Yield the number of the first row, rows (B, d) and tokens (B,) of each block."""
    first = 0
    for block in store.blocks(BLOCK_ROWS):
        end = first + len(block)
        rows = torch.as_tensor(block.rows).float()
        missing = rows.isnan().any(dim=1).nonzero()
        if len(missing):
            raise InputError(
                f"row {first + int(missing[0])} of {store.folder} has NaN: collect the activations"
                " again."
            )
        yield first, rows, store.labels_at(first, end).tokens
        first = end


@torch.no_grad()
def _score(coder: MixtureCoder, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the component of each row, (B,), and its log-density, z and -z in it, (B, 1 + 2l)."""
    found = coder.encode_best(rows.to(coder.means))
    parts = [found.log_density.unsqueeze(1), found.codes, -found.codes]
    return found.components.cpu(), torch.cat(parts, dim=1).cpu()


class _Best:
    """The rows with the largest scores of each component, for each of C scores."""

    def __init__(self, n_components: int, n_kept: int, n_scores: int) -> None:
        self.values = torch.full((n_components, n_kept, n_scores), -torch.inf)
        self.rows = torch.full((n_components, n_kept, n_scores), -1)

    def merge_(self, components: Tensor, scores: Tensor, first: int) -> None:
        """Merge the scores (B, C) of rows from number ``first`` on."""
        n_kept = self.values.shape[1]
        numbers = torch.arange(first, first + len(scores))
        for k in torch.unique(components).tolist():
            own = components == k
            values = torch.cat([self.values[k], scores[own].to(self.values.dtype)])
            added = numbers[own].unsqueeze(1).expand(-1, values.shape[1])
            rows = torch.cat([self.rows[k], added])
            # Stable: among equal scores, the first row stays.
            order = values.argsort(dim=0, descending=True, stable=True)[:n_kept]
            self.values[k], self.rows[k] = values.gather(0, order), rows.gather(0, order)


def _count_(counts: list[Counter[int]], components: Any, tokens: NDArray[np.int64]) -> None:
    """Count the tokens of each component."""
    pairs, times = np.unique(np.stack([components, tokens]), axis=1, return_counts=True)
    for k, token, n in zip(*pairs.tolist(), times.tolist(), strict=True):
        counts[k][token] += n


def _read_contexts(store: Store, best: _Best, window: int) -> dict[int, Context]:
    """Read the neighbours of all rows in ``best``, shard by shard: no document is in two."""
    wanted = torch.unique(best.rows)
    numbers, first = wanted[wanted >= 0].numpy(), 0
    found = dict[int, Context]()
    for labels in store.labels():
        tokens, documents, positions = labels
        end = first + len(tokens)
        for row in numbers[(numbers >= first) & (numbers < end)].tolist():
            at = row - first
            around = range(max(0, at - window), min(len(tokens), at + window + 1))
            same = [i for i in around if documents[i] == documents[at]]
            found[row] = Context(
                row=row,
                value=0.0,
                document=int(documents[at]),
                position=int(positions[at]),
                before=tuple(int(tokens[i]) for i in same if i < at),
                token=int(tokens[at]),
                after=tuple(int(tokens[i]) for i in same if i > at),
            )
        first = end
    return found


def _make_regions(
    best: _Best,
    counts: list[Counter[int]],
    contexts: dict[int, Context],
    n_tokens: int,
    ranks: list[int],
) -> Iterator[Region]:
    total = sum(sum(count.values()) for count in counts)
    l = (best.values.shape[2] - 1) // 2

    def list_contexts(k: int, score: int, sign: float = 1.0) -> tuple[Context, ...]:
        rows, values = best.rows[k, :, score].tolist(), best.values[k, :, score].tolist()
        pairs = zip(rows, values, strict=True)
        return tuple(contexts[row]._replace(value=sign * v) for row, v in pairs if row >= 0)

    for k, count in enumerate(counts):
        n = sum(count.values())
        # By number, then by token, so that the order of the rows does not matter.
        known = ((token, times) for token, times in count.items() if token >= 0)
        frequent = sorted(known, key=lambda pair: (-pair[1], pair[0]))
        covered = np.cumsum([times for _, times in frequent])
        yield Region(
            component=k,
            n_rows=n,
            share=n / total,
            tokens=tuple((token, times / n) for token, times in frequent[:n_tokens]),
            purity=frequent[0][1] / n if frequent else float("nan"),
            n_tokens_90=int(np.searchsorted(covered, COVERED * n)) + 1 if frequent else 0,
            contexts=list_contexts(k, 0),
            factors=tuple(
                FactorEnds(list_contexts(k, 1 + l + j, -1.0), list_contexts(k, 1 + j))
                for j in range(ranks[k])
            ),
        )
