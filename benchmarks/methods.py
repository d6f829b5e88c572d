"""The methods that are compared, by name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import ours
import peers
from adam import train_adam

from factormix.solvers import SOLVERS

__all__ = ["DEFAULT_METHODS", "METHODS", "Method", "why_missing"]


@dataclass(frozen=True)
class Method:
    """A way to train a mixture, and how it is shown."""

    label: str
    train: peers.Train
    colour: str
    solver: str | None = None
    """The solver of factormix that it needs."""
    package: str | None = None
    """The optional package that it needs."""
    why_ahead: str = ""
    """Why it may end above us, for the note beside a target that is not met."""


_FULL = (
    "it is a richer model: a full covariance has d(d+1)/2 free numbers for a component,"
    " a factor analyzer about d(l+1)"
)

METHODS: dict[str, Method] = {
    "natural": Method("factormix natural", ours.train_natural, "#c23b4b", solver="natural"),
    "natural-1": Method(
        "factormix natural, one pass", ours.train_one_pass, "#f0562d", solver="natural"
    ),
    "em": Method("factormix EM", ours.train_em, "#2f6db3", solver="em"),
    "sgd": Method("factormix SGD", ours.train_sgd, "#7fb0e0", solver="sgd"),
    "adam": Method("Adam, covariance form", train_adam, "#9659b0"),
    "sklearn-diag": Method("scikit-learn GMM diagonal", peers.train_sklearn("diag"), "#3a9d6e"),
    "sklearn-full": Method(
        "scikit-learn GMM full", peers.train_sklearn("full"), "#1d5c3f", why_ahead=_FULL
    ),
    "tgmm": Method("tgmm diagonal", peers.train_tgmm("diag"), "#d9a521", package="tgmm"),
    "tgmm-full": Method(
        "tgmm full", peers.train_tgmm("full"), "#8a6508", package="tgmm", why_ahead=_FULL
    ),
    "torchgmm": Method(
        "torchgmm diagonal", peers.train_torchgmm("diag"), "#7a7a7a", package="torchgmm"
    ),
    "torchgmm-full": Method(
        "torchgmm full",
        peers.train_torchgmm("full"),
        "#3c3c3c",
        package="torchgmm",
        why_ahead=_FULL,
    ),
}

# Full covariances are one model whoever trains it: by default scikit-learn stands for them.
DEFAULT_METHODS = tuple(name for name in METHODS if name not in ("tgmm-full", "torchgmm-full"))


def why_missing(name: str) -> str | None:
    """Say why a method cannot run here, or return None."""
    method = METHODS[name]
    if method.solver is not None and method.solver not in SOLVERS:
        return f"factormix has no solver {method.solver!r} here"
    if method.package is not None and importlib.util.find_spec(method.package) is None:
        return f"{method.package} is not installed: pip install -r benchmarks/requirements.txt"
    return None
