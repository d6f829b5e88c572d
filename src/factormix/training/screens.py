"""The screen of a mixture in training: when there is one, how it follows, how many candidates.

Few of many components in scoring: the screen of a trained mixture, and what it lets through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from factormix.core.density import cancellation, log_prob, operands, sample
from factormix.core.parameters import Parameters
from factormix.core.screening import (
    CandidateSearch,
    Screen,
    make_screen,
    table_size,
    update_screen_,
)

if TYPE_CHECKING:
    from factormix.training.run import Run

__all__ = [
    "Remembered",
    "Search",
    "candidates_for",
    "few_of",
    "kept_up",
    "learned",
    "n_probes",
    "pays",
]

FIRST, SHARE = 224, 0.24
"""Components that each row is evaluated against to begin with, if that is left to us, and the share
of all components that this is at most."""
FEWEST = 96
"""Candidates below which the rows of a block, each with its own, would hardly find them."""
WORTHWHILE = 2.5
"""Times the number of candidates from which so many components make a screen pay."""
SMALLEST = 700
"""Components from which a screen pays in training: batches are smaller than what is scored at a
time, and statistics that sum over the pairs which matter cost half already."""
CHEAP = 8
"""How many times smaller than a component what the screen has of it must be."""
LIMIT = 2.5e-4
"""Nats per feature that rows may lose on average by what is left out."""
MORE = 1.5
"""Factor by which there are more candidates once rows lose more than that, and fewer again once
they lose next to nothing."""
NOTHING = 0.05
"""Share of the limit that is next to nothing, so that fewer candidates are tried again."""
PROBES = 32
"""Rows of a batch, or of a part of it, that are evaluated in full now and then."""
PROBE_STEPS = 5
"""Steps between two such batches."""
ENOUGH = 100.0
"""Rows in full before what they lose is believed; twice as many before fewer are tried."""
MEMORY = 0.9
"""Share of what is known of the loss that stays when more rows tell of it."""
GROWN = 2.0
"""Factor by which components or rows become more before directions are chosen anew."""


@dataclass
class Search:
    """How few of many components are looked for."""

    candidates: int = 0
    """Components that each row is evaluated against; 0 while all are."""
    raised: int = 0
    """What that number has been raised to, if it is ours to choose."""
    failed: int = 0
    """Candidates by which too much was lost since directions were last chosen, at most."""
    loss: float = 0.0
    """Nats that a row loses on average by what is left out, as estimated."""
    components: int = 0
    """Components there were when directions were last chosen."""
    samples: float = 0.0
    """Rows learned from by then."""


def pays(n_candidates: int, shape: tuple[int, int, int]) -> bool:
    """Tell whether a screen for so many candidates pays for a mixture of shape (K, d, l)."""
    K, d, l = shape
    return WORTHWHILE * n_candidates <= K and CHEAP * table_size(d) <= d * (l + 2)


def candidates_for(
    wanted: int | str | None,
    shape: tuple[int, int, int],
    raised: int = 0,
    *,
    training: bool = False,
) -> int:
    """Return the components each row is evaluated against, 0 for all, for shape (K, d, l).

    ``wanted`` is what the caller said: a number, "auto" or None; ``raised`` is what "auto" stood
    for before, if it has been raised.
    """
    if wanted is None:
        return 0
    if wanted == "auto":
        if training and shape[0] < SMALLEST:
            return 0
        few = max(FEWEST, min(FIRST, int(SHARE * shape[0])), raised)
        return few if pays(few, shape) else 0
    return min(int(wanted), shape[0])


def n_probes(steps: int) -> int:
    """Return how many rows a part of the next batch evaluates in full, after so many steps."""
    return PROBES if steps % PROBE_STEPS == 0 else 0


def learned(search: Search, missed: Tensor, told: Tensor, n_features: int, auto: bool) -> Tensor:
    """Take in what rows in full told, (2,), and look for more candidates if too much is lost.

    Where more have been looked for and next to nothing is lost, fewer are tried again, though not
    so few as have failed since directions were last chosen.
    ``missed`` (2,) is what earlier ones told, decaying; it is returned as it is now.
    """
    missed = MEMORY * missed + told
    lost, rows = missed.tolist()
    if rows <= 0:
        return missed
    search.loss = lost / rows
    limit, before, fewer = LIMIT * n_features, search.raised, int(search.candidates / MORE)
    if auto and rows >= ENOUGH and search.loss > limit:
        search.raised, search.failed = int(MORE * search.candidates), search.candidates
    elif (
        # What is lost may be much by few rows: what has failed is not tried again too soon.
        auto
        and search.failed < fewer < search.candidates <= before
        and rows >= 2 * ENOUGH
        and search.loss < NOTHING * limit
    ):
        search.raised = fewer
    # What some candidates lost says nothing about more or fewer.
    return missed if search.raised == before else torch.zeros_like(missed)


def kept_up(
    search: Search,
    screen: Screen,
    parameters: Parameters,
    wanted: int | str | None,
    samples: float,
    changed: Tensor | None,
    n_components: int,
) -> Screen:
    """Return the screen of a mixture after a step, or none where it would not pay.

    ``changed`` (n,) are the numbers of the components that are not what they were; None for all.
    ``n_components`` are those of the whole mixture, of which these may be some.
    """
    k = len(parameters.means)
    search.candidates = candidates_for(wanted, (n_components, *parameters.shape[1:]), search.raised)
    if not search.candidates:
        search.loss = 0.0
        return Screen.empty(parameters.means)
    old = k >= GROWN * search.components or samples >= GROWN * search.samples
    if not screen.active or old:
        search.components, search.samples, search.failed = k, samples, 0
        # Directions change little: what they were is a good start.
        return make_screen(parameters, *((screen.directions, 2) if screen.active else ()))
    before = len(screen.table)
    if k != before:
        screen = screen.resize(k)
    if k < before:
        changed = None
    update_screen_(screen, parameters, changed)
    return screen


SAMPLES = 512
"""Rows drawn from a mixture to find how many candidates its screen must let through."""
SCORE_TOLERANCE = 1e-3
"""What rounding may cost a log-density, per feature."""


@dataclass
class Remembered:
    """The screen that was made for a mixture, as long as the mixture stays the same."""

    few: CandidateSearch | None = None
    steps: int = -1
    wanted: int | str | None = None


def few_of(run: Run, wanted: int | str | None) -> CandidateSearch | None:
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
        return CandidateSearch(screen, count)
    remembered = run.remembered
    if (remembered.steps, remembered.wanted) != (run.steps, wanted):
        few = CandidateSearch(make_screen(parameters), count)
        run.remembered = remembered = Remembered(
            _wide_enough(few, parameters) if wanted == "auto" else few, run.steps, wanted
        )
    return remembered.few


def _is_exact_enough(parameters: Parameters) -> bool:
    """Tell whether products in the precision of training keep the digits that a score needs."""
    eps = torch.finfo(parameters.means.dtype).eps
    return bool(eps * cancellation(parameters).max() < SCORE_TOLERANCE)


def _wide_enough(few: CandidateSearch, parameters: Parameters) -> CandidateSearch | None:
    """Let more components through until rows drawn from the mixture lose little; None for all."""
    generator = torch.Generator(parameters.means.device).manual_seed(0)
    rows, _ = sample(parameters, SAMPLES, generator=generator)
    full = log_prob(rows, operands(parameters, centre=False, diagonal=True))
    while candidates_for("auto", parameters.shape, few.n_candidates):
        lost = (full - few.find_best(rows, parameters).log_prob).clamp(min=0).mean()
        if lost <= LIMIT * rows.shape[1]:
            return few
        few = few._replace(n_candidates=int(MORE * few.n_candidates))
    return None
