"""Streams that go on and on: memory, time and invariants; and streams that drift."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from factormix import MFA, stream
from factormix.solvers import NaturalGradient
from factormix.studies.harness import Outcome, Settings

__all__ = ["run_drift", "run_endless"]

LOOKS = 100
"""Points of a curve."""
DRAWN = 1000
"""Batches that are drawn at once."""
MAX_PRECISION = 20.0
"""Bound on E, which the first column, of less noise than all others, runs into."""


def run_endless(settings: Settings, data_folder: str | None) -> Outcome:
    """Take many steps of partial_fit, one call for each, on a stream that stays as it is."""
    draw, d = np.random.default_rng(0), settings["features"]
    centres = 4 * draw.normal(size=(settings["components"], d))
    loadings = draw.normal(size=(settings["factors"], d))
    noise = np.r_[0.05, np.ones(d - 1)]

    def rows(*n: int) -> NDArray[np.float64]:
        chosen = draw.integers(len(centres), size=n)
        latent = draw.normal(size=(*n, len(loadings)))
        return centres[chosen] + latent @ loadings + noise * draw.normal(size=(*n, d))

    held_out = rows(2000)
    model = MFA(
        settings["components"],
        settings["factors"],
        batch_size=settings["batch_size"],
        max_precision=MAX_PRECISION,
        solver=NaturalGradient(forgetting=settings["forgetting"]),
        random_state=0,
    ).partial_fit(rows(1000))
    every = max(1, settings["batches"] // LOOKS)
    looks, begun = list[list[float]](), time.process_time()
    for i in range(settings["batches"]):
        if i % DRAWN == 0:
            batches = rows(DRAWN, settings["batch_size"])
        model.partial_fit(batches[i % DRAWN])
        if (i + 1) % every == 0:
            seconds = (time.process_time() - begun) / every
            looks.append([i + 1, seconds, _resident(), model.score(held_out), _broken(model)])
            begun = time.process_time()
    table = np.array(looks)
    return Outcome({"steps": model.n_steps_, "broken": float(table[:, 4].sum())}, {"looks": table})


def _broken(model: MFA) -> float:
    """Count what does not hold: finite, bounded, weights, M diagonal and floored, history."""
    E, Gamma, weights = model.precision_diag_, model.precision_factors_, model.weights_
    scaled = np.asarray(Gamma / E[:, :, None], dtype=np.float64)
    M = np.eye(Gamma.shape[2]) - np.swapaxes(Gamma, 1, 2) @ scaled
    diagonal = np.diagonal(M, axis1=1, axis2=2)
    off = M - diagonal[:, :, None] * np.eye(Gamma.shape[2])
    holds = [
        all(np.isfinite(a).all() for a in (E, Gamma, weights, model.means_)),
        bool((E > 0).all() and (E <= MAX_PRECISION * (1 + 1e-5)).all()),
        bool((weights > 0).all()) and math.isclose(float(weights.sum()), 1.0, rel_tol=1e-5),
        bool(np.abs(off).max() < 1e-4),
        bool((diagonal > 0).all() and (diagonal <= 1 + 1e-5).all()),
        len(model.history_) <= 2000,
    ]
    return float(len(holds) - sum(holds))


def run_drift(settings: Settings, data_folder: str | None) -> Outcome:
    """Score a stream before learning it whose clusters wander, with one rate of forgetting."""
    d, size, n = settings["features"], settings["batch_size"], settings["batches"]
    own = np.random.default_rng(1)
    centres = 4 * own.normal(size=(settings["components"], d))
    wander = own.normal(size=centres.shape)

    def batches() -> Iterator[NDArray[np.float64]]:
        draw = np.random.default_rng(2)
        for i in range(n):
            # Still for a fifth of the stream, then away from there.
            moved = centres + settings["reach"] * max(0.0, i / n - 0.2) * wander
            yield moved[draw.integers(len(moved), size=size)] + draw.normal(size=(size, d))

    model = MFA(
        settings["components"],
        settings["factors"],
        batch_size=size,
        solver=NaturalGradient(forgetting=settings["forgetting"]),
        random_state=0,
    )
    scores = np.array([part.scores.mean() for part in stream(model, batches())])
    per = max(1, n // LOOKS)
    curve = scores[: n // per * per].reshape(-1, per)
    curve = np.nanmean(np.where(np.isnan(curve), np.nanmin(curve), curve), axis=1)
    # What the true density would have: clusters that lie apart.
    best = -d / 2 * math.log(2 * math.pi * math.e) - math.log(settings["components"])
    values = {"best": best, "last": float(curve[-LOOKS // 5 :].mean())}
    return Outcome(values, {"curve": curve})


def _resident() -> float:
    return float(Path("/proc/self/statm").read_text().split()[1]) * 4096
