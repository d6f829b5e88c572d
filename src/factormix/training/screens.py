"""The screen of a mixture: when there is one, how it follows training, how many candidates it has.

A screen ranks all components by a small table, and each row is evaluated exactly against a few
candidates. Training and scoring both use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from factormix.core.density import log_prob, operands, sample
from factormix.core.parameters import Parameters
from factormix.core.screening import (
    CandidateSearch,
    Screen,
    make_screen,
    table_size,
    update_screen_,
)

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Screening:
    """The numbers of screening. Costs are in units of one component evaluated among all others."""

    candidates: int = 224
    """Candidates to begin with where the caller leaves their number open, and the share of all
    components that they are at most."""
    share: float = 0.24
    least_candidates: int = 96
    """Candidates below which the rows of a block, each with its own, would hardly find them."""
    pair_cost: float = 2.5
    """Cost of one row and one candidate, which are gathered before they are multiplied."""
    training_cost: float = 280.0
    """Cost of a screen for each row of a batch in training, beside its candidates. With a share of
    0.24, both kinds of steps then cost the same at 700 components."""
    table_ratio: float = 8.0
    """Least ratio of the size of a component to its part of the table."""
    loss_limit: float = 2.5e-4
    """Nats per feature that rows may lose on average by the components left out."""
    step: float = 1.5
    """Factor by which candidates become more above this limit, and fewer when next to nothing is
    lost."""
    negligible: float = 0.05
    """Share of the limit that is next to nothing."""
    probes: int = 32
    """Rows of a batch, or of a part of it, that are evaluated against all components."""
    probe_steps: int = 5
    """Steps between two batches with such rows."""
    enough_probes: float = 100.0
    """Such rows before their loss is believed; twice as many before fewer candidates are tried."""
    memory: float = 0.9
    """Weight of earlier rows in the estimated loss."""
    renewal: float = 2.0
    """Factor by which components or rows become more before directions are chosen anew."""
    samples: int = 512
    """Rows drawn from a trained mixture to find how many candidates its screen needs."""

    def pays(self, n_candidates: int, shape: Shape, *, training: bool = False) -> bool:
        """Return whether a screen costs less than all components, for a mixture (K, d, l)."""
        K, d, l = shape
        cost = self.pair_cost * n_candidates + (self.training_cost if training else 0.0)
        return cost <= K and self.table_ratio * table_size(d) <= d * (l + 2)

    def count_candidates(
        self, wanted: int | str | None, shape: Shape, raised: int = 0, *, training: bool = False
    ) -> int:
        """Return the components that each row is evaluated against, 0 for all of them.

        ``wanted`` is the caller's number, "auto" or None. ``raised`` is the number to which "auto"
        has been raised.
        """
        if wanted is None:
            return 0
        if wanted == "auto":
            few = min(self.candidates, int(self.share * shape[0]))
            few = max(self.least_candidates, few, raised)
            return few if self.pays(few, shape, training=training) else 0
        return min(int(wanted), shape[0])

    def count_probes(self, steps: int) -> int:
        """Return how many rows of the batch after these steps are evaluated in full."""
        return self.probes if steps % self.probe_steps == 0 else 0


@dataclass
class Search:
    """The state of the search for candidates in a run."""

    candidates: int = 0
    """Components that each row is evaluated against; 0 for all of them."""
    raised: int = 0
    """Number to which the candidates have been raised, where it was left open."""
    failed: int = 0
    """Largest number of candidates that lost too much since directions were last chosen."""
    loss: float = 0.0
    """Estimated nats that a row loses on average by the components left out."""
    components: int = 0
    """Components there were when directions were last chosen."""
    samples: float = 0.0
    """Rows learned from when directions were last chosen."""

    def add_probes(
        self, missed: Tensor, probed: Tensor, n_features: int, screening: Screening, *, auto: bool
    ) -> Tensor:
        """Update the estimated loss and, with ``auto``, the number of candidates.

        ``probed`` (2,) is the loss of rows that were evaluated in full, and their number;
        ``missed`` (2,) is its decaying sum, which is returned with the new rows. Candidates that
        were raised fall again when next to nothing is lost, but not to a number that has failed
        since directions were last chosen.
        """
        missed = screening.memory * missed + probed
        lost, rows = missed.tolist()
        if rows <= 0:
            return missed
        self.loss = lost / rows
        limit, before = screening.loss_limit * n_features, self.raised
        fewer, enough = int(self.candidates / screening.step), screening.enough_probes
        if auto and rows >= enough and self.loss > limit:
            self.raised = int(screening.step * self.candidates)
            self.failed = self.candidates
        elif (
            auto
            and self.failed < fewer < self.candidates <= before
            and rows >= 2 * enough
            and self.loss < screening.negligible * limit
        ):
            self.raised = fewer
        # The loss of one number of candidates says nothing about another number.
        return missed if self.raised == before else torch.zeros_like(missed)

    def update_screen(
        self,
        candidates: int,
        screen: Screen,
        parameters: Parameters,
        changed: Tensor | None,
        samples: float,
        renewal: float,
    ) -> Screen:
        """Return the screen of a mixture after a step, or an empty one without candidates.

        ``changed`` (n,) are the numbers of the components that changed; None for all.
        """
        self.candidates, k, before = candidates, len(parameters.means), len(screen.table)
        if not candidates:
            self.loss = 0.0
            return Screen.empty(parameters.means)
        grew = k >= renewal * self.components
        if not screen.active or grew or samples >= renewal * self.samples:
            self.components, self.samples, self.failed = k, samples, 0
            # Directions change little: the old ones are a good start.
            return make_screen(parameters, *((screen.directions, 2) if screen.active else ()))
        if k != before:
            screen = screen.resize(k)
        update_screen_(screen, parameters, None if k < before else changed)
        return screen


def search_trained(
    parameters: Parameters, wanted: int | str | None, screening: Screening, count: int
) -> CandidateSearch | None:
    """Make the search of a trained mixture without a screen; None to evaluate all components.

    With "auto", it has enough candidates for rows drawn from the mixture to lose no more than the
    limit.
    """
    search = CandidateSearch(make_screen(parameters), count)
    if wanted != "auto":
        return search
    generator = torch.Generator(parameters.means.device).manual_seed(0)
    rows, _ = sample(parameters, screening.samples, generator=generator)
    full = log_prob(rows, operands(parameters, centre=False, diagonal=True))
    while screening.count_candidates("auto", parameters.shape, search.n_candidates):
        lost = (full - search.find_best(rows, parameters).log_prob).clamp(min=0).mean()
        if lost <= screening.loss_limit * rows.shape[1]:
            return search
        search = search._replace(n_candidates=int(screening.step * search.n_candidates))
    return None
