"""Rates, bounds and numbers of components over a run of natural-gradient steps.

Time is counted in ticks. A tick is the number of rows of a full batch, so a short batch does not
change a schedule. Every number of the solver is a field of ``Schedule`` or of the records that it
contains. ``benchmarks/schedule.py`` halves and doubles the numbers of rates, growth, pruning,
replacement and seeding. Its figures below are gains in held-out nats per row, over two to six
seeds, on digits (K = 25, l = 4), breast cancer (K = 5, l = 4, one batch) and clusters (K = 600,
l = 1, in passes and as a stream). "No difference" means that neither half nor twice the number is
better or worse there by two standard errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from factormix.training.screens import Screening


@dataclass(frozen=True)
class Batches:
    """Rows of a batch and passes over the data, where the caller leaves them open."""

    most_rows: int = 1000
    """Up to this many rows are one batch. Ten batches of 1,000 rows (K = 10, l = 4, three seeds)
    take three to five times the CPU seconds; held out, they gain 1.06 +- 0.32 nats on pendigits and
    0.16 +- 0.05 on magic.gamma (l = 3), lose 0.10 +- 0.03 on vowels, and change satellite,
    optdigits and cardio by less than two errors."""
    least_rows: int = 100
    """At 1,300 rows, batches of this size gain 0.04 to 0.12 nats over two batches (three
    tables)."""
    enough: int = 75
    """Batches in a pass up to which they have fewer than ``most_rows`` rows: chosen, not
    measured."""
    further_rows: int = 25
    """Rows beyond ``most_rows`` that add a batch, until batches have ``least_rows`` at 1,300 rows.
    So 1,001 rows instead of 1,000 gain 0.6 nats on pendigits and 0.3 on satellite (K = 10, l = 4,
    three seeds), for about the same CPU seconds; with ten batches they would gain 1.1 and 0.4, for
    five times as many."""
    least_epochs: int = 20
    """Planned passes, from 20 batches in a pass on, where they are ``least_ticks`` or more: chosen,
    not measured."""
    least_ticks: int = 400
    """Planned ticks. On five tables of 450 to 3,500 rows (three seeds), 200 lose at most 0.01 nats,
    and 800 gain 0.02 on pendigits for 1.3 times the CPU seconds."""

    def choose_rows(self, n_rows: int | None) -> int:
        """Choose the rows of a batch; None for a stream."""
        if n_rows is None:
            return self.most_rows
        usual = min(self.most_rows, max(self.least_rows, n_rows // self.enough))
        further = (n_rows - self.most_rows) // self.further_rows
        return max(usual, math.ceil(n_rows / max(1, 1 + further)))

    def choose_epochs(self, batches_per_epoch: int) -> int:
        """Choose the largest number of passes; most runs converge earlier."""
        return max(self.least_epochs, math.ceil(self.least_ticks / batches_per_epoch))


@dataclass(frozen=True)
class Rates:
    """The share that a tick of rows gets in the running averages."""

    exponent: float | None = None
    """The rate of tick t is ``(t + offset) ** -exponent``; None takes ``choose_exponent``."""
    least_exponent: float = 0.55
    """Exponent where every component meets many rows before the end, and where it meets few. Half
    of the former loses 0.8 on digits, half of the latter 2.7 on clusters, and 0.95 loses 0.5 and
    1.1."""
    most_exponent: float = 0.7
    stream_exponent: float = 0.6
    """Least exponent on a stream, which has no last passes in which a fast rate cools."""
    few_rows: float = 150.0
    """Rows of a component in the whole run at which the exponent is midway. One pass over
    FashionMNIST (54,000 rows, l = 4) prefers 0.7 to 0.6 by 4.9 nats at 34 rows (K = 1,600) and
    neither of them at 135 rows (K = 400); tables prefer 0.55 to 0.7 at 440 rows and more."""
    stream_ticks: float = 30.0
    """Ticks in which the rows of a component are counted on a stream. At K = 400 and 1,000 rows in
    a tick, 0.7 is better than 0.6 by 2.7 nats; at K = 49 and 100, 0.65 is as good as 0.6."""
    offset: float = 5.0
    """Ticks added to t, so that the first ticks do not replace the seeds. Halved or doubled, it is
    within the error of 0.5 on digits, and loses 0.03 and 0.09 on clusters."""
    cooling: float = 0.25
    """Factor by which the rate falls in addition towards the end of the planned ticks. In one pass
    over FashionMNIST, it is 0.8 nats better than 0.5 at K = 1,600 and as good at K = 400."""
    cooling_from: float = 0.6
    """Share of the planned ticks after which the rate cools. 0.3 loses 0.09 on clusters, 0.95 loses
    0.11; digits stop before it matters."""
    forgetting: float = 0.0
    """Least rate, for streams that drift."""
    passes: float = 2.0
    """Averages over two passes contain all of the data; a slower rate would only lag behind. No
    difference: at most 0.01 +- 0.04 on digits."""

    def choose_exponent(self, rows: float, *, stream: bool) -> float:
        """Choose the exponent by the rows of a component: the fewer, the longer the averages."""
        if self.exponent is not None:
            return self.exponent
        least = self.stream_exponent if stream else self.least_exponent
        return least + (self.most_exponent - least) / (1 + (rows / self.few_rows) ** 2)


@dataclass(frozen=True)
class Growth:
    """How a mixture of very many components grows by splitting."""

    share: float = 0.8
    """Share of the first pass in which a mixture grows to K components. No clear difference on
    clusters: 0.4 changes -0.02 +- 0.01, 0.95 -0.01 +- 0.02."""
    least_ticks: float = 10.0
    """Ticks that growth takes at least, so that halves learn before they are split again: this
    matters only in a pass of twelve batches or fewer."""
    stream_ticks: float = 12.0
    """Ticks in which a mixture grows on a stream. The sooner all components are there, the less
    they remember of what they were part of. Half of them lose 0.36 on clusters, twice as many
    0.10. Small ticks need no more of them: at K = 4,000 and 50 rows in a tick (30,000 images of
    FashionMNIST in 7 x 7, two seeds), 120 lose 0.9."""
    narrowing: float = 1.0
    """Factor on the loading along which a component is split. 0.5 gains 0.2 on clusters."""
    stream_narrowing: float = 0.6
    """The same on a stream. A Gaussian that is cut in two keeps ``sqrt(1 - 2 / pi)``, 0.6, of its
    deviation across the cut; 0.3 and 0.95 lose 0.04 and 0.13. In passes over data, halves have time
    to learn this."""
    widening: float = 1.0
    """Factor on the deviations of one half; the option of the solver."""


@dataclass(frozen=True)
class Pruning:
    """How components in excess leave a mixture."""

    excess: float = 5 / 3
    """Multiple of K that a mixture begins with: enough to choose from, and few enough that the
    components that stay have rows of their own early. A small mixture begins with 2 K. At K = 60
    (three seeds), 4/3 loses 0.2 +- 0.2 on pendigits and 0.8 +- 0.4 on optdigits, 2 gains 0.0 +- 0.4
    and 0.5 +- 0.3."""
    rows_to_choose: int = 36
    """Rows of the whole run, for each loading and mean of a feature, from which this excess pays.
    In one pass, 5/3 K is better than 5/4 K by 2.2 nats at 116 rows (FashionMNIST, K = 100, l = 4)
    and by 1.5 at 100 (clusters, K = 100, l = 1). With this number, means of three to five seeds
    gain 1.8 nats at 45 rows (activations, K = 200, l = 10), lose 1.1 at 30 (FashionMNIST, K = 200)
    and 0.2 at 29 (K = 400), and 5/4 K gains 5.3 at 20 (K = 200): errors are 1 to 2 nats, and the
    CPU time is 8% to 25% less."""
    least_excess: int = 32
    """Least excess, which leads without a jump from 2 K at K = 32 to 5/3 of K at K = 48."""
    most_seeded: int = 500
    """Maximum number of components that are seeded one by one, with 20 of ``Seeding.most_rows``
    each. A larger mixture grows by splitting."""
    rows_per_loading: int = 10
    """Rows for each loading and mean of a feature. Components in excess must not leave fewer:
    factors would be fitted to chance. No difference: half of them lose 0.4 +- 0.3 on digits and
    gain 0.5 +- 1.0 on breast cancer."""
    first_share: float = 0.5
    """Share of the time of pruning before the first component goes, at most: chosen, not measured.
    It matters where all of this time is less than ten ticks."""
    first_tick: float = 5.0
    """Ticks before the first component goes: the cost of its removal must be known. No difference:
    half of them gain 0.3 +- 0.2 on digits, twice as many gain 0.6 +- 0.8 on breast cancer."""
    halving_ticks: float = 35.0
    """Ticks in which the number of components is halved. Half of them lose 0.5 on breast cancer,
    twice as many gain 0.2; both are within two errors."""
    whole_pass_speed: float = 3.0
    """Factor on the speed of pruning where a tick is all of the data, whose statistics are exact;
    it falls with the number of batches in a pass. On breast cancer, half of it gains 0.7 with an
    error of 0.5, and twice as much loses 0.5."""
    watch_ticks: float = 2.0
    """Ticks for which components in excess are watched before some of them go. Twice as many gain
    0.4 +- 0.2 on digits and 0.1 +- 1.0 on breast cancer; half of them make no difference."""
    memory: float = 0.6
    """Weight of earlier watches in the known losses of components in excess. No difference between
    0.3 and 0.95: at most 0.1 +- 0.1 on digits."""


@dataclass(frozen=True)
class Replacement:
    """When a component of little use is replaced by half of a heavy one."""

    look_ticks: float = 3.0
    """Ticks between two looks for unused components. No difference: half or twice as many change
    clusters by at most 0.01; digits and breast cancer have no unused component."""
    unused_weight: float = 0.1
    """Share of the average weight below which a component is unused; the option of the solver. On
    clusters (two seeds), half of it loses 0.02 and twice as much 0.01."""
    watched: float = 2.0
    """Factor on the weight of an unused component below which one is watched, so that its use is
    known by the time that it is unused. On clusters (two seeds), a factor of one loses 0.01, and
    four make no difference."""
    own_rows: float = 10.0
    """Rows of its own that a component is expected to have met before they alone judge it. The
    chance that none of ten expected rows came is exp(-10). No difference on clusters."""
    little: float = 0.1
    """Share of the median component's loss below which a component is worth no more than a new
    one: chosen. No difference on clusters."""
    healing: float = 0.15
    """Share of the planned ticks at the end in which no component is replaced, so that a new one
    can find its place. In one and three passes over digits (K = 50) and clusters (K = 300, three
    seeds), replacing to the end gives the same mixtures."""


@dataclass(frozen=True)
class Seeding:
    """How the first mixture is made."""

    rows: int | None = None
    """Rows kept for seeding; None takes ``rows_per_component`` within the limits below."""
    rows_per_component: int = 40
    """No difference: half of them gain 0.2 +- 0.2 on digits, twice as many lose 0.1 +- 0.4."""
    least_rows: int = 500
    """With 5 components (four seeds), twice as many change pendigits by 0.7 +- 1.0, satellite by
    -0.1 +- 0.1 and magic.gamma by 0.06 +- 0.02; half of them satellite by -0.2 +- 0.2."""
    most_rows: int = 10_000
    """No difference on clusters: half of them lose 0.1 +- 0.1, twice as many 0.0 +- 0.1."""
    steps: int = 500
    """Number of the convex steps that spread the centroids. Half of them lose 1.5 on clusters,
    twice as many gain 0.2."""
    step_rows: int = 100
    """Half of them lose 1.6 on clusters, twice as many gain 0.2."""
    step_rate: float = 0.05
    """Half of it loses 2.0 on clusters, twice as much gains 0.2."""
    sweeps: int = 20
    """Passes over all rows that spread the centroids where they look at no more rows than the
    convex steps (``sweeping_pays``). No difference: twice as many gain 0.3 +- 0.2 on digits and 1.3
    +- 0.8 on breast cancer, half of them 0.2 +- 0.2 and 0.9 +- 0.8."""
    last_sigma: float = 0.2
    """Width of the kernel at the end. Below 0.3 only the nearest centroid moves. No difference
    between 0.1 and 0.4: at most 0.2 +- 0.5 on digits and 1.4 +- 0.8 on breast cancer."""
    pooled_rows: float = 5.0
    """Rows by which the variance around all centroids counts in the variance around each one. No
    difference: at most 0.2 +- 0.2 on digits and 0.5 +- 0.5 on breast cancer."""
    first_variance: float = 0.3
    """Share of the variance around the centroids at which the bound on variances begins. No
    difference: at most 0.02 +- 0.3 on digits and 0.1 +- 0.2 on breast cancer."""
    bound_ticks: float = 30.0
    """Ticks until the bound on E reaches its value. Half of them gain 0.4 +- 0.3 on breast cancer
    and 0.1 +- 0.2 on digits, twice as many 0.0 +- 0.2 and 0.0 +- 0.1 (six seeds); 20 lose 10 nats
    on FashionMNIST (20,000 rows, K = 600, two seeds)."""
    bound_share: float = 0.75
    """Share of the planned ticks that this takes at most, so that a short run spends a quarter of
    its time at the full bound: chosen, not measured."""
    loading: float = 0.3
    """Size of the first random loadings, in standard deviations. No difference: at most 0.3 +- 0.2
    on digits and 0.3 +- 0.7 on breast cancer."""
    trial_ticks: int = 10
    """Ticks for which each of several random starts is trained before the best is chosen. With four
    starts, half of them lose 0.4 +- 0.1 on digits, twice as many 0.3 +- 0.6, and on breast cancer
    they change -0.1 +- 0.1 and 0.5 +- 0.3."""

    def sweeping_pays(self, n_rows: int) -> bool:
        """Return whether sweeps over n rows look at no more rows than the convex steps.

        That is so up to 2,500 rows. With 1,200 to 2,500 rows of eight tables (K = 15 to 30, six
        seeds), sweeps gain 0.16 +- 0.11 nats over steps.
        """
        return self.sweeps * n_rows <= self.steps * self.step_rows


@dataclass(frozen=True)
class Schedule:
    """Rates, bounds and numbers of components as functions of the ticks since seeding."""

    n_components: int
    """K, the components at the end."""
    first_components: int
    """Components to begin with."""
    tick_rows: int
    batches_per_epoch: int
    """0 for a stream."""
    planned: float
    """Ticks of all passes; infinite for a stream."""
    rates: Rates = field(default_factory=Rates)
    growth: Growth = field(default_factory=Growth)
    pruning: Pruning = field(default_factory=Pruning)
    replacement: Replacement = field(default_factory=Replacement)
    seeding: Seeding = field(default_factory=Seeding)
    screening: Screening = field(default_factory=Screening)
    batches: ClassVar[Batches] = Batches()
    """Like all class variables, chosen before there is a schedule, which depends on them."""
    resizing_share: float = 0.5
    """Share of the planned ticks in which the number of components changes at most, so that the
    components that stay have half of a short run: chosen, not measured."""
    hasten_variances: bool = False
    """Whether noise variances move farther than in EM (``hastening_pays``)."""
    least_factor_share: ClassVar[float] = 0.5
    """Factors per feature from which variances are hastened (``hastening_pays``)."""
    predict_variances: bool = True
    """Whether noise variances predict new rows, by Akaike's ``(n + p) / (n - p)``, which tends to
    one where a component has many rows (``core.averages.prediction_widths``)."""
    one_batch_tol: ClassVar[float] = 1e-4
    """``tol`` of a pass of one batch, which is one step and gains less than a pass of many; it is
    divided by the number of batches. Chosen, not measured."""
    tol: float = 2e-5
    """Least gain of a pass in mean log-likelihood per feature. No difference (breast cancer,
    digits, pendigits and wine): half of it takes 1.08 of the CPU seconds, twice as much 0.89."""
    patience: int = 3
    """Passes without this gain after which a run stops. No difference on the same four tables: one
    takes 0.77 of the CPU seconds, six 1.11."""

    @property
    def resizing(self) -> float:
        """Ticks after which there are K components."""
        K, first = self.n_components, self.first_components
        if first >= K:
            pruning = self.pruning
            ticks = pruning.first_tick + pruning.halving_ticks / self._speed * math.log2(first / K)
        elif self.batches_per_epoch:
            ticks = max(self.growth.least_ticks, self.growth.share * self.batches_per_epoch)
        else:
            ticks = self.growth.stream_ticks
        return min(ticks, self.resizing_share * self.planned)

    @property
    def bound_ticks(self) -> float:
        """Ticks after which the bound on E has its final value."""
        seeding = self.seeding
        ticks = seeding.bound_ticks / math.sqrt(self._speed)
        return min(ticks, seeding.bound_share * self.planned)

    @property
    def _speed(self) -> float:
        # The more batches there are in a pass, the less exact the statistics of one are.
        n = self.batches_per_epoch
        return max(1.0, self.pruning.whole_pass_speed / n) if n else 1.0

    @property
    def pass_rows(self) -> float:
        """Rows of a pass over the data; infinite for a stream."""
        return float(self.tick_rows * self.batches_per_epoch) or math.inf

    @property
    def seed_rows(self) -> int:
        """Rows that are kept for seeding."""
        seeding = self.seeding
        if seeding.rows is not None:
            return seeding.rows
        wanted = seeding.rows_per_component * self.first_components
        return min(seeding.most_rows, max(seeding.least_rows, wanted))

    @property
    def exponent(self) -> float:
        """Exponent of the rate, by the rows that a component meets in the run."""
        stream = not self.batches_per_epoch
        ticks = self.rates.stream_ticks if stream else self.planned
        rows = ticks * self.tick_rows / self.n_components
        return self.rates.choose_exponent(rows, stream=stream)

    def rate(self, ticks: float) -> float:
        """Return the share of a tick of rows in the running averages."""
        rates = self.rates
        rate: float = (ticks + rates.offset) ** -self.exponent
        late = (ticks / self.planned - rates.cooling_from) / (1 - rates.cooling_from)
        cooled: float = rate * rates.cooling ** max(0.0, late)
        n = self.batches_per_epoch
        # A pass of one batch has no other rows to remember.
        least = 1 / (1 + rates.passes * (n - 1)) if n else 0.0
        return max(min(1.0, cooled), least, rates.forgetting)

    def looseness(self, ticks: float) -> float:
        """Return the distance of the bound on E from its value, between 1 and 0."""
        return 1 - min(1.0, ticks / max(self.bound_ticks, 1e-9))

    def components(self, ticks: float) -> int:
        """Return the number of components that there should be."""
        K, first = self.n_components, self.first_components
        if first < K:
            done = min(1.0, ticks / max(self.resizing, 1e-9))
            more: float = first * (K / first) ** done
            return math.floor(more + 1e-9)
        start = min(self.pruning.first_tick, self.pruning.first_share * self.resizing)
        done = (ticks - start) / max(self.resizing - start, 1e-9)
        left: float = first * (K / first) ** min(1.0, max(0.0, done))
        return max(K, round(left))

    def is_settled(self, ticks: float) -> bool:
        """Return whether the bound and the number of components have reached their final values."""
        return ticks >= max(self.bound_ticks, self.resizing)

    def may_replace(self, ticks: float) -> bool:
        """Return whether there is time left for a new component to find its place."""
        return ticks <= self.planned * (1 - self.replacement.healing)


def hastening_pays(n_features: int, n_factors: int) -> bool:
    """Return whether to hasten noise variances (``core.averages.hasten_variances``).

    Variances move up to 1 / Q times as far as in EM, where Q is the share of the noise that the
    data determines, at least ``1 - l / d`` on average. A step costs 1.01 to 1.05 times as much.
    With l from d / 2 on (16 fits of tables and synthetic data, four seeds), seven of eight fits in
    one batch take 0.54 to 0.83 of the CPU seconds and one 1.14, and those in many batches 0.94 to
    1.09. Held-out likelihoods rise beyond two errors in three fits, by 0.74 +- 0.01 for synthetic
    Gaussians of full covariances (3,000 rows, d = 12, l = 10), and fall in one, by 0.05 +- 0.02
    (satellite, l = 24). With 2 to 4 factors (40 fits of eight tables, four seeds), the ratio of
    seconds has the median 1.00, and with many components on few rows likelihoods fall, by 0.02 +-
    0.02 per feature on iris and Ionosphere (K = 25).
    """
    return n_factors >= Schedule.least_factor_share * n_features


def choose_first(
    n_components: int,
    n_factors: int,
    n_rows: int,
    pruning: Pruning | None = None,
    *,
    n_passes: int = 1,
) -> int:
    """Choose the number of components to begin with.

    ``n_rows`` are the rows of a pass, 0 for a stream. A stream has no rows to spare for components
    in excess.
    """
    K, pruning = n_components, pruning or Pruning()
    if not n_rows or pruning.most_seeded <= K or K == 1:
        return min(K, pruning.most_seeded)
    choice = n_passes * n_rows // (pruning.rows_to_choose * (n_factors + 1))
    enough = max(K + pruning.least_excess, min(int(pruning.excess * K), choice))
    first = min(2 * K, enough, pruning.most_seeded)
    # Neighbours lie on a grid, which should be nearly square.
    side = round(math.sqrt(first))
    affordable = n_rows // (pruning.rows_per_loading * (n_factors + 1))
    return max(K, min(side * math.ceil(first / side), affordable))
