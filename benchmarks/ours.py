"""The solvers of factormix as methods of the benchmark."""

from __future__ import annotations

from typing import Any

import torch
from curves import Recorder
from models import LowRankMixture
from problems import Problem
from settings import EM_ITERATIONS, FLOOR, Setting

from factormix import MFA
from factormix.estimators import Progress
from factormix.solvers import SOLVERS
from factormix.training import loop

__all__ = ["train_em", "train_natural", "train_one_pass", "train_sgd"]


def train_natural(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train by natural-gradient steps from random values, with the defaults of the library."""
    _train(problem, setting, seed, recorder, solver="natural", max_epochs=setting.passes)


def train_one_pass(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train as ``train_natural`` does, for a single pass that is known to be the only one."""
    _train(problem, setting, seed, recorder, solver="natural", max_epochs=1)


def train_em(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train by batch EM from k-means, all iterations of the targets; k-means comes on top."""
    solver = SOLVERS["em"](iterations=EM_ITERATIONS, tol=0)
    _train(problem, setting, seed, recorder, whole=True, solver=solver)


def train_sgd(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train as the paper does: on the data as it is."""
    options: dict[str, Any] = {"scaling": None, "max_epochs": setting.sgd_passes}
    # Its steps are so short that a report after each would slow it down.
    _train(problem, setting, seed, recorder, tick=0.05, solver="sgd", **options)


def _train(
    problem: Problem,
    setting: Setting,
    seed: int,
    recorder: Recorder,
    *,
    tick: float = 0.0,
    whole: bool = False,
    **options: Any,
) -> None:
    """Train with a report after every step, or every ``tick`` seconds: checkpoints are due at
    given passes, and the twice a second of the library would miss them. ``whole`` is for a solver
    that moves only at the end of a pass: there is a checkpoint after each.
    """
    n = len(problem.train)

    def watch(progress: Progress) -> None:
        # Counted in rows that were read, so that passes of a start such as k-means count too.
        passes = progress.record["samples"] / n
        step = (progress.record["samples"] / max(1.0, progress.record["step"])) / n
        if not whole or passes == round(passes):
            recorder.checkpoint(passes, lambda: described(progress.model), step=step, now=whole)

    loop.TICK_SECONDS = tick
    model = MFA(
        setting.components,
        setting.factors,
        max_precision=1 / FLOOR,
        random_state=seed,
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
