"""Few of many components in scoring: the screen of a trained mixture, and what it lets through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from factormix.core.density import cancelling, log_prob, operands
from factormix.core.parameters import Parameters
from factormix.core.sampling import sample
from factormix.core.screened import Few
from factormix.core.screening import screen_of
from factormix.training.solvers.screens import LIMIT, MORE, candidates_for

if TYPE_CHECKING:
    from factormix.training.loop import Run

__all__ = ["Remembered", "few_of"]

SAMPLES = 512
"""Rows drawn from a mixture to find how many candidates its screen must let through."""
TOLERANCE = 1e-3
"""What rounding may cost a log-density, per feature."""


@dataclass
class Remembered:
    """The screen that was made for a mixture, as long as the mixture stays the same."""

    few: Few | None = None
    steps: int = -1
    wanted: int | str | None = None


def few_of(run: Run, wanted: int | str | None) -> Few | None:
    """Return what lets few components of a trained mixture through; None where all are evaluated.

    ``wanted`` is the number of candidates, "auto" or None. The screen is that of the training, if
    it had one; else it is made of the parameters, and, with "auto", lets so many through that rows
    drawn from the mixture lose no more than rows may.
    """
    parameters = run.parameters
    search = getattr(run.state, "search", None)
    raised = 0 if search is None else search.raised
    count = candidates_for(wanted, parameters.shape, raised)
    if not count or not _is_exact_enough(parameters):
        return None
    screen = getattr(run.state, "screen", None)
    if screen is not None and screen.active:
        return Few(screen, count)
    remembered = run.remembered
    if (remembered.steps, remembered.wanted) != (run.steps, wanted):
        few = Few(screen_of(parameters), count)
        run.remembered = remembered = Remembered(
            _wide_enough(few, parameters) if wanted == "auto" else few, run.steps, wanted
        )
    return remembered.few


def _is_exact_enough(parameters: Parameters) -> bool:
    """Tell whether products in the precision of training keep the digits that a score needs."""
    eps = torch.finfo(parameters.means.dtype).eps
    return bool(eps * cancelling(parameters).max() < TOLERANCE)


def _wide_enough(few: Few, parameters: Parameters) -> Few | None:
    """Let more components through until rows drawn from the mixture lose little; None for all."""
    generator = torch.Generator(parameters.means.device).manual_seed(0)
    rows, _ = sample(parameters, SAMPLES, generator=generator)
    full = log_prob(rows, operands(parameters, centre=False, diagonal=True))
    while candidates_for("auto", parameters.shape, few.n_candidates):
        lost = (full - few.best(rows, parameters).log_prob).clamp(min=0).mean()
        if lost <= LIMIT * rows.shape[1]:
            return few
        few = few._replace(n_candidates=int(MORE * few.n_candidates))
    return None
