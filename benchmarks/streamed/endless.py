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


def run_endless(settings: Settings, data_folder: str | None) -> Outcome:
    """Take many steps of partial_fit on a stream that stays as it is."""
    draw = np.random.default_rng(0)
    centres = 4 * draw.normal(size=(settings["components"], settings["features"]))

    def rows(n: int) -> NDArray[np.float64]:
        chosen = draw.integers(len(centres), size=n)
        return centres[chosen] + draw.normal(size=(n, settings["features"]))

    held_out = rows(2000)
    model = MFA(
        settings["components"],
        settings["factors"],
        batch_size=settings["batch_size"],
        solver=NaturalGradient(forgetting=settings["forgetting"]),
        random_state=0,
    ).partial_fit(rows(1000))
    every = settings["batches"] // LOOKS
    looks = list[list[float]]()
    batches = [rows(settings["batch_size"]) for _ in range(1000)]
    begun = time.perf_counter()
    for i in range(1, settings["batches"] + 1):
        model.partial_fit(batches[draw.integers(1000)])
        if i % every == 0:
            seconds = (time.perf_counter() - begun) / every
            looks.append([i, seconds, _resident(), model.score(held_out), _broken(model)])
            begun = time.perf_counter()
    table = np.array(looks)
    return Outcome({"steps": model.n_steps_, "broken": float(table[:, 4].sum())}, {"looks": table})


def _broken(model: MFA) -> float:
    """Count the invariants that do not hold: finite, positive, weights, M diagonal and floored."""
    E, Gamma, weights = model.precision_diag_, model.precision_factors_, model.weights_
    M = np.eye(Gamma.shape[2]) - np.swapaxes(Gamma, 1, 2) @ (Gamma / E[:, :, None])
    diagonal = np.diagonal(M, axis1=1, axis2=2)
    off = M - diagonal[:, :, None] * np.eye(Gamma.shape[2])
    holds = [
        all(np.isfinite(a).all() for a in (E, Gamma, weights, model.means_)),
        bool((E > 0).all()),
        math.isclose(float(weights.sum()), 1.0, rel_tol=1e-5),
        bool(np.abs(off).max() < 1e-4),
        bool((diagonal > 0).all()),
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
