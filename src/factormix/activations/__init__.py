"""Activations of networks: collect, read, encode and move them, in the extra ``activations``.

Any ``torch.nn.Module`` has layers to collect from; models and tokenizers of ``transformers`` need
no preparation.
"""

from __future__ import annotations

from factormix.activations.atlas import Atlas, Context, FactorEnds, Region, atlas
from factormix.activations.coder import Encoding, MixtureCoder
from factormix.activations.collecting import collect
from factormix.activations.steering import Steering, steer
from factormix.activations.store import Labels, Store, open_store

__all__ = [
    "Atlas",
    "Context",
    "Encoding",
    "FactorEnds",
    "Labels",
    "MixtureCoder",
    "Region",
    "Steering",
    "Store",
    "atlas",
    "collect",
    "open_store",
    "steer",
]
