"""The settings that the defaults of the detector were chosen among: sets of kinds of mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from factormix import MFAOutlierDetector
from factormix.estimators.ensemble import CONTAMINATED, NOVELTY, Kind, Recipe

__all__ = ["CANDIDATES", "candidate_scores", "everything", "shipped"]

SHARP, MIDDLE = Kind(0.01, 10, 8, 8), Kind(0.03, 10, 32, 8)
SMOOTH, FINE = Kind(0.1, 20, 100, 4), Kind(0.03, 20, 100, 4)
NEAR = Kind(0.03, 1, 2000)

LOOSE, PLAIN = Kind(0.2, 10, 100, 4), Kind(0.2, 20, 100, 0)
LOOSER, TIGHTER = Kind(1 / 3, 20, 100, 4), Kind(0.1, 20, 100, 4)

CANDIDATES: Mapping[str, Mapping[str, tuple[Kind, ...]]] = {
    "novelty": {
        "sharp": (SHARP,),
        "near": (NEAR,),
        "smooth + fine": (SMOOTH, FINE),
        "sharp + near": (SHARP, NEAR),
        "sharp + middle + near": (SHARP, MIDDLE, NEAR),
        "sharp + smooth + near": (SHARP, SMOOTH, NEAR),
        "middle + smooth + near": (MIDDLE, SMOOTH, NEAR),
        "sharp + middle + smooth + near": (SHARP, MIDDLE, SMOOTH, NEAR),
        "all": (SHARP, MIDDLE, SMOOTH, FINE, NEAR),
    },
    "contaminated": {
        "loose": (LOOSE,),
        "plain": (PLAIN,),
        "loose + plain": (LOOSE, PLAIN),
        "looser + tighter": (LOOSER, TIGHTER),
        "loose + looser": (LOOSE, LOOSER),
        "all": (LOOSE, PLAIN, LOOSER, TIGHTER),
    },
}


def base(mode: str) -> Recipe:
    """Return the default of a mode."""
    return NOVELTY if mode == "novelty" else CONTAMINATED


def everything(mode: str) -> Recipe:
    """Return a recipe with every kind of a mode: a candidate's mixtures are among its mixtures."""
    kinds = dict.fromkeys(kind for kinds in CANDIDATES[mode].values() for kind in kinds)
    return replace(base(mode), kinds=tuple(kinds))


def shipped(mode: str) -> str | None:
    """Return the name of the candidate that is the default, None if it is none of them."""
    chosen = set(base(mode).kinds)
    return next((name for name, kinds in CANDIDATES[mode].items() if set(kinds) == chosen), None)


def candidate_scores(
    mode: str, detector: MFAOutlierDetector, rows: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Compute the scores (n,) of all candidates from those of the mixtures that they share."""
    kinds = everything(mode).kinds
    by_member = detector.member_scores(rows)
    number = np.arange(by_member.shape[1]) % len(kinds)
    return {
        name: by_member[:, np.isin(number, [kinds.index(kind) for kind in chosen])].mean(axis=1)
        for name, chosen in CANDIDATES[mode].items()
    }
