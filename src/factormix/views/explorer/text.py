"""The texts of activations: their atlas, search by token, and every token of a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.activations.atlas import Atlas, Context, Region, atlas, join_pieces
from factormix.activations.coder import MixtureCoder
from factormix.activations.store import Store
from factormix.data.sources.base import take_rows
from factormix.errors import InputError
from factormix.views.explorer.analysis import MAX_SHARES
from factormix.views.explorer.model_view import ModelView
from factormix.views.explorer.scores import BackgroundWork

N_CONTEXTS = 6
"""Contexts of a component and of each end of a factor: 6 (1 + 2 l) lines for a component."""
WINDOW = 10
"""Tokens on each side of a context: with its own, about a line of text."""
MANY_TOKENS = 1 << 30
"""More tokens than there are: a search must find rare ones too."""
SHOWN_TOKENS = 8
"""Tokens that name a component, in one line; its own page lists twice as many."""
N_FOUND = 60
"""Components listed for a token: few enough to look through."""
MAX_TOKENS = 2000
"""Tokens of a document that are shown: with 8 codes each, 64 kB in float32."""


NO_TOKEN = " \u2022"
"""Shown for each row of a layer whose inputs have no tokens."""


class Stopped(Exception):
    """Ends the reading of a store for a model that is not shown any more."""


class TextView(BackgroundWork):
    """The texts of a store under one model; the atlas is made in a background thread."""

    def __init__(self, view: ModelView, store: Store) -> None:
        super().__init__()
        self.store, self.K = store, view.K
        self.coder = MixtureCoder(view.mixture)
        self._check_component = view.check_component
        self._atlas: Atlas | None = None

    def _run(self) -> None:
        try:
            rows = _CountedRows(self.store, self)
            options = {"n_contexts": N_CONTEXTS, "n_tokens": MANY_TOKENS, "window": WINDOW}
            self._atlas = atlas(self.coder, rows, verbose=False, **options)
        except Stopped:
            pass
        except InputError as error:
            self.problem = str(error)

    @property
    def regions(self) -> Atlas | None:
        """The atlas, once it is complete."""
        self.start()
        return self._atlas

    def name(self, token: int) -> str:
        """Return the name of a token, which has the sign of its vocabulary, as in ##ing."""
        return self.store.names.get(token, self._piece(token).strip())

    def describe(self, regions: Atlas) -> dict[str, Any]:
        """Describe all components, those with most rows first."""
        listed = sorted(regions, key=lambda region: -region.n_rows)
        return {
            "documents": self.store.n_documents,
            "rows": self.store.n_rows,
            "layer": self.store.header.layer,
            "regions": [self._summarise(region) for region in listed],
        }

    def search(self, regions: Atlas, text: str) -> dict[str, Any]:
        """Find tokens by their text, else by its beginning, and the components of their rows.

        A text with the sign of the vocabulary, as in ##ing, finds the token of this name alone.
        """
        wanted = text.strip().lower()
        if not wanted:
            raise InputError("give a token to search for.")
        names = {token for region in regions for token, _ in region.tokens}
        texts = {t: {self.name(t).lower(), self._piece(t).strip().lower()} for t in names}
        exact = {token for token, known in texts.items() if wanted in known}
        chosen = exact or {
            token
            for token, known in texts.items()
            if any(text.startswith(wanted) for text in known)
        }
        found = []
        for region in regions:
            share = sum(part for token, part in region.tokens if token in chosen)
            if share:
                found.append({**self._summarise(region), "found": round(share * region.n_rows)})
        found.sort(key=lambda one: -one["found"])
        return {
            "tokens": sorted(self.name(token) for token in chosen),
            "exact": bool(exact),
            "rows": sum(one["found"] for one in found),
            "n_components": len(found),
            "components": found[:N_FOUND],
        }

    def describe_component(self, regions: Atlas, k: int) -> dict[str, Any]:
        """Describe one component: tokens, contexts, and both ends of its factors."""
        self._check_component(k)
        region = regions[k]
        return {
            **self._summarise(region),
            "shares": [[self.name(t), share] for t, share in region.tokens[: 2 * SHOWN_TOKENS]],
            "contexts": [self._show(context) for context in region.contexts],
            "factors": [
                {"low": [*map(self._show, ends.low)], "high": [*map(self._show, ends.high)]}
                for ends in region.factors
            ],
        }

    @torch.no_grad()
    def read_document(
        self, document: int, k: int | None
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the tokens of a document (T,), their components and codes, or those in ``k``."""
        rows = self.store.rows_of(document)[:MAX_TOKENS]
        if not len(rows):
            raise InputError(f"document {document} has no tokens: choose another.")
        labels = self.store.labels_at(int(rows.min()), int(rows.max()) + 1)
        tokens = labels.tokens[rows - rows.min()]
        x = torch.as_tensor(np.asarray(take_rows(self.store, rows).rows)).float()
        found = self.coder.encode(x)
        best = found.responsibilities.topk(min(MAX_SHARES, self.K), dim=1)
        codes, own = found.codes, found.components
        if k is not None:
            self._check_component(k)
            codes, own = self.coder.encode_in(x, k), torch.full_like(own, k)
        facts = {
            "document": document,
            "documents": self.store.n_documents,
            "pieces": [self._piece(token) for token in tokens.tolist()],
            "names": [self.name(token) for token in tokens.tolist()],
            "positions": labels.positions[rows - rows.min()].tolist(),
            "rows": rows.tolist(),
        }
        return facts, {
            "components": best.indices.int().numpy(),
            "shares": best.values.numpy(),
            "codes": codes.numpy(),
            "own": found.responsibilities.gather(1, own.unsqueeze(1))[:, 0].numpy(),
        }

    def _piece(self, token: int) -> str:
        """Return the text of a token, with a blank where a word begins."""
        return self.store.pieces.get(token, f" {token}" if token >= 0 else NO_TOKEN)

    def _summarise(self, region: Region) -> dict[str, Any]:
        return {
            "component": region.component,
            "rows": region.n_rows,
            "share": region.share,
            "purity": region.purity,
            "tokens_90": region.n_tokens_90,
            "tokens": [self.name(token) for token, _ in region.tokens[:SHOWN_TOKENS]],
        }

    def _show(self, context: Context) -> dict[str, Any]:
        pieces = self.store.pieces
        return {
            "document": context.document,
            "position": context.position,
            "value": context.value,
            "before": join_pieces(context.before, pieces),
            "token": self._piece(context.token),
            "after": join_pieces(context.after, pieces),
        }


class _CountedRows(Store):
    """A store whose reading is counted, and may be stopped."""

    def __init__(self, store: Store, text: TextView) -> None:
        super().__init__(store.folder)
        self._text = text

    def blocks(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Yield blocks of rows."""
        for block in super().blocks(*arguments, **options):
            if self._text._stopped.is_set():
                raise Stopped
            yield block
            self._text.done += len(block)
