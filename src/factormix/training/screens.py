"""The screen of a mixture: when there is one, how it follows training, how many candidates it has.

A screen ranks all components by a small table, and each row is evaluated exactly against a few
candidates. Training and scoring both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from factormix.core.parameters import Parameters
from factormix.core.screening import (
    Screen,
    make_screen,
    table_size,
    update_screen_,
)

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Screening:
    """The numbers of screening. Costs are in units of one component evaluated among all others."""

    counts: tuple[int, ...] = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    """Numbers of candidates to choose from where the caller leaves their number open: each
    is at most half as many again as the one before."""
    first_count: int = 32
    """Candidates until the loss is known: enough for images (``core.screening.N_DIRECTIONS``)."""
    tolerance: float = 2e-3
    """Share of what the mixture gains over one Gaussian that rows may lose on average. A limit of
    1e-3 gains nothing in held-out likelihood on images (``benchmarks/many.py``)."""
    pair_cost: float = 6.0
    """Cost of one row and one candidate, by a sampled product (784 features, K = 1,600)."""
    table_cost: float = 1.0
    """Cost of a number of the table, in units of a number of a component's parameters: both are
    multiplied once for each row."""
    row_cost: float = 30.0
    """Cost of a screen for each row beside ranks and candidates: sorting pairs. Chosen: a
    screen then pays in scoring from 230 components on (d = 784, l = 4)."""
    training_cost: float = 250.0
    """Further cost for each row in training: the upkeep of the table, and probes. At K = 1,600 on
    FashionMNIST, they take 20 of the 130 microseconds of a row by all components.
    A screen then pays in training from 488 components on."""
    probes: int = 32
    """Rows of a batch, or of a part of it, that are evaluated against all components: with
    ``probe_steps`` 0.6% of the rows in batches of 1,000."""
    probe_steps: int = 5
    """Steps between two batches with such rows."""
    enough_probes: float = 30.0
    """Such rows before their loss is believed: the error of a mean is then 18% of the deviation."""
    memory: float = 0.9
    """Weight of earlier rows in the estimated loss, whose error is as for ``(1 + 0.9) / (1 -
    0.9)``, 19, batches of probes: 4% of the deviation of a row."""
    renewal: float = 2.0
    """Factor by which components or rows become more before directions are chosen anew: all choices
    together grow with the logarithm of the rows."""

    def pays(self, n_candidates: int, shape: Shape, *, training: bool) -> bool:
        """Return whether a screen costs less than all components, for a mixture (K, d, l)."""
        K, d, l = shape
        ranks = self.table_cost * K * table_size(d) / (d * (l + 2))
        cost = ranks + self.pair_cost * n_candidates + self.row_cost
        return cost + (self.training_cost if training else 0.0) <= K

    def list_counts(self, wanted: int | str | None, n_components: int) -> tuple[int, ...]:
        """Return the numbers of candidates to choose from: none, the wanted one, or several."""
        if wanted is None:
            return ()
        some = self.counts if wanted == "auto" else (int(wanted),)
        return tuple(min(n, n_components) for n in some)

    def choose_first(self, wanted: int | str | None, shape: Shape, *, training: bool = True) -> int:
        """Return the number of candidates while their loss is not known, 0 for all components."""
        if wanted == "auto":
            pays = self.pays(self.first_count, shape, training=training)
            return self.first_count if pays else 0
        return 0 if wanted is None else min(int(wanted), shape[0])

    def choose_count(
        self, wanted: int | str, shape: Shape, losses: Sequence[float], gain: float
    ) -> int:
        """Return the fewest candidates that lose little, or 0 where all components cost less.

        ``losses`` has the loss at each of ``list_counts``, and ``gain`` is the gain over one
        Gaussian.
        """
        counts = self.list_counts(wanted, shape[0])
        if wanted != "auto":
            return counts[0]
        good = [n for n, lost in zip(counts, losses, strict=True) if lost <= self.tolerance * gain]
        return good[0] if good and self.pays(good[0], shape, training=False) else 0

    def count_probes(self, steps: int) -> int:
        """Return how many rows of the batch after these steps are evaluated in full."""
        return self.probes if steps % self.probe_steps == 0 else 0


@dataclass
class Search:
    """The state of the search for candidates in a run."""

    candidates: int = 0
    """Components that each row is evaluated against; 0 for all of them."""
    loss: float = 0.0
    """Estimated nats that a row loses on average by the components left out."""
    components: int = 0
    """Components there were when directions were last chosen."""
    samples: float = 0.0
    """Rows learned from when directions were last chosen."""

    def add_probes(
        self, missed: Tensor, probed: Tensor, wanted: int | str, shape: Shape, screening: Screening
    ) -> Tensor:
        """Update the estimated loss and, where it was left open, the number of candidates.

        ``probed`` (G+2,) are the sums of `Statistics.screening`; ``missed`` is their decaying sum,
        which is returned with the new rows.
        """
        if len(missed) == len(probed):
            probed = screening.memory * missed + probed
        *lost, gain, rows = probed.tolist()
        if rows > 0:
            losses = [one / rows for one in lost]
            counts = screening.list_counts(wanted, shape[0])
            if rows >= screening.enough_probes:
                self.candidates = screening.choose_count(wanted, shape, losses, gain / rows)
            if self.candidates in counts:
                self.loss = losses[counts.index(self.candidates)]
        return probed

    def update_screen(
        self,
        wanted: int | str,
        screen: Screen,
        parameters: Parameters,
        changed: Tensor | None,
        samples: float,
        shape: Shape,
        screening: Screening,
    ) -> Screen:
        """Return the screen of a changed mixture, or an empty one without candidates.

        ``changed`` (n,) are the numbers of the components that changed; None for all. ``shape`` is
        the shape of the mixture in all processes.
        """
        k, before, renewal = len(parameters.means), len(screen.table), screening.renewal
        grew = shape[0] >= renewal * self.components
        if wanted != "auto" or (grew and not self.candidates):
            self.candidates = screening.choose_first(wanted, shape)
        if not self.candidates:
            self.loss = 0.0
            return Screen.empty(parameters.means)
        if not screen.active or grew or samples >= renewal * self.samples:
            self.components, self.samples = shape[0], samples
            # Directions change little: the old ones are a good start.
            return make_screen(parameters, *((screen.directions, 2) if screen.active else ()))
        if k != before:
            screen = screen.resize(k)
        update_screen_(screen, parameters, None if k < before else changed)
        return screen
