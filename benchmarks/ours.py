"""The solvers of factormix as methods of the benchmark."""

from __future__ import annotations

from typing import Any

import torch
from curves import Recorder
from models import LowRankMixture
from problems import Problem
from settings import EM_ITERATIONS, FLOOR, Unit

from factormix import MFA, training
from factormix.estimators import Progress

__all__ = ["train_em", "train_natural", "train_one_pass", "train_sgd"]


def train_natural(problem: Problem, unit: Unit, recorder: Recorder) -> None:
    """Train by natural-gradient steps from random values, with the defaults of the library."""
    _train(problem, unit, recorder, solver="natural", max_epochs=unit.setting.passes)


def train_one_pass(problem: Problem, unit: Unit, recorder: Recorder) -> None:
    """Train as ``train_natural`` does, for a single pass that is known to be the only one."""
    _train(problem, unit, recorder, solver="natural", max_epochs=1)


def train_em(problem: Problem, unit: Unit, recorder: Recorder) -> None:
    """Train by batch EM from k-means."""
    _train(problem, unit, recorder, solver="em", max_epochs=EM_ITERATIONS)


def train_sgd(problem: Problem, unit: Unit, recorder: Recorder) -> None:
    """Train as the paper does: on the data as it is."""
    _train(problem, unit, recorder, solver="sgd", scaling=None, max_epochs=unit.setting.sgd_passes)


def _train(problem: Problem, unit: Unit, recorder: Recorder, **options: Any) -> None:
    n = len(problem.train)

    def watch(progress: Progress) -> None:
        # Counted in rows that were read, so that passes of a start such as k-means count too.
        passes = progress.record["samples"] / n
        step = (progress.record["samples"] / max(1.0, progress.record["step"])) / n
        recorder.checkpoint(passes, lambda: described(progress.model), step=step)

    # A report after every step, not twice a second: checkpoints are due at given passes.
    training.TICK_SECONDS = 0.0
    model = MFA(
        unit.setting.components,
        unit.setting.factors,
        max_precision=1 / FLOOR,
        random_state=unit.seed,
        callbacks=[watch],
        **options,
    )
    recorder.clock.start()
    model.fit(problem.train)
    recorder.checkpoint(model.n_samples_seen_ / n, lambda: described(model), last=True)


def described(model: MFA) -> LowRankMixture:
    """Copy the model so far."""
    with torch.no_grad():
        return LowRankMixture.from_generative(
            *(
                torch.as_tensor(t)
                for t in (model.weights_, model.means_, model.loadings_, model.noise_variances_)
            )
        )
