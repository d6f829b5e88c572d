"""Alerts: which rows are too unlikely for a model, and which rows it should learn.

The threshold belongs to the model. It comes from the scores of rows that the model has not learned,
which are saved with it. The scores of the training rows are too high for that, so ``fit`` predicts
what they would be if each row had been held out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.core.inspection import n_loadings
from factormix.data.columns import to_float64
from factormix.errors import InputError
from factormix.estimators.fitting import count_training_rows
from factormix.training.run import Run
from factormix.training.solvers.base import is_number

Numbers = NDArray[np.float64]

HELD_OUT_ROWS = 2048
"""Scores that a model keeps: 41 of them lie below the lowest quantile in use, 2%, whose position
then varies by a sixth, and a file grows by about 20 kB."""
KEPT_BYTES = 16 << 20
"""Bytes of training rows that a model keeps until their scores are needed, enough for 1,024
features in float64. Larger rows are scored at the end of the training."""
LEAST_SCORES = 100
"""Scores that a model from a stream needs for a threshold: two lie below the 2% quantile."""
BODY, SHOULDER, TAIL = 0.5, 0.1, 0.02
"""Shares of scores below the quantiles that give the tail. Each is a fifth of the one before, so
that the quantiles of an exponential distribution are equally far apart."""
LEAST_WIDTH = 1.0
"""Nats by which an alert rate falls by a factor of e. Half of a squared distance in any number of
dimensions has this tail far out, so no Gaussian has a narrower one."""
MOST_WIDENING = 2.0
"""Maximum width of the tail in widths of the body, where a Gaussian has at most one. Training rows
with up to a tenth of faults, however large, then leave the threshold near the ordinary rows."""
MOST_LEVERAGE = 0.9
"""Maximum influence of a row on its own score: at an influence of one, its prediction has no
bound."""
MOST_LONE_ROWS = 1.5
"""Rows of a component, half-way between one and two, below which its rows raise alerts: a single
training row does not show that rows like it are ordinary."""
MEMORY_ROWS = 256
"""Rows over which the level of ordinary scores is averaged: its error is a sixteenth of their
deviation."""
LOWEST_LEVEL = -0.5
"""Level, in deviations of a score, from which rows are no longer learned: eight times its error."""


def predict_held_out(
    scores: Numbers,
    squared_distances: Numbers,
    components: NDArray[np.int64],
    weights: Numbers,
    n_rows: float,
    n_features: int,
    n_factors: int | NDArray[np.int64],
) -> Numbers:
    """Predict the scores (m,) that training rows would have if each had been held out.

    Without one of its N rows, a Gaussian with a free covariance has the squared distance
    ``D^2 / (1 - h)`` to that row, with h about ``D^2 / N``. A component has fewer free parameters,
    P, so h is scaled to make the mean loss Akaike's, P / N nats: the mean of ``D^4`` is
    ``d (d + 2)``. The loss counts twice, because a row that is left out also changes which rows its
    component has: this keeps the rate of false alarms on new rows below the given one
    (``tests/estimators/test_alerts.py``).

    ``core.density.leave_one_out`` cannot take its place. It is exact for one Gaussian with fixed
    responsibilities, but a refit also moves the responsibilities. On the nine problems of that
    test, with its thresholds for 0.1% of new rows, 0.02% to 0.5% of them raise an alert, or 0% to
    0.4% with its loss counted twice. With this prediction, 0% to 0.2% do.

    Parameters
    ----------
    scores, squared_distances, components : arrays (m,)
        Log-likelihoods, and the squared distance to the most probable component.
    weights : array (K,)
        Weights of the components.
    n_rows : float
        Number of training rows, less the share of missing entries.
    n_features : int
    n_factors : int or array (m,)
        Factors of the components of these rows.
    """
    d = n_features
    counts = np.maximum(weights[components] * n_rows, 1.0)
    ratio = (2 * d + n_loadings(d, n_factors)) / (d * (d + 2) / 2)
    h = np.minimum(ratio * squared_distances / counts, MOST_LEVERAGE)
    predicted: Numbers = scores - squared_distances * h / (1 - h)
    return predicted


def find_threshold(held_out: Numbers, rate: float) -> float:
    """Return the score below which a share ``rate`` of ordinary rows lies.

    Rates below a tenth are extrapolated from the quantiles at 50%, 10% and 2% by an exponential
    tail, so that the few lowest scores, which may be faults, have no influence.
    """
    if rate >= SHOULDER:
        return float(np.quantile(held_out, rate))
    body, shoulder, tail = np.quantile(held_out, [BODY, SHOULDER, TAIL])
    steps = math.log(BODY / SHOULDER)
    width = min(shoulder - tail, MOST_WIDENING * (body - shoulder)) / steps
    return float(shoulder - max(width, LEAST_WIDTH) * math.log(SHOULDER / rate))


def complete_scores(run: Run, rows: Any, scores: Any, components: Any) -> Numbers:
    """Add to log-likelihoods (B,) what is expected of the missing entries of rows (B, d).

    A missing entry counts as its expected log-density given all others. Without that, rows with
    different missing entries could not be compared.
    """
    missing = to_float64(rows).isnan().cpu()
    # A copy: a score that is written beside the row stays as it is.
    completed = torch.as_tensor(scores).cpu().to(torch.float64, copy=True)
    some = missing.any(dim=1)
    if some.any():
        _, _, E, Gamma, M = (t.cpu().double() for t in run.parameters)
        # P_jj, the precision of a feature given all others. Its rounding error may exceed it, and
        # it is at least E_j min(M).
        P = E - Gamma.square().sum(dim=2)
        P = torch.maximum(P, E * M.amin(dim=1, keepdim=True)) if M.shape[1] else P
        levels = 0.5 * (P.log() - math.log(2 * math.pi * math.e)) - run.units.scale.log()
        of_rows = levels[torch.as_tensor(components).cpu()[some]]
        completed[some] += (of_rows * missing[some]).sum(dim=1)
    return completed.numpy()


def keep_scores(run: Run, scores: Numbers) -> None:
    """Keep the last of some held-out scores with a model, to a ten-thousandth of a nat."""
    run.held_out_scores = np.round(scores[-HELD_OUT_ROWS:], 4).tolist()
    run.unscored = None


def check_rate(rate: float, name: str) -> float:
    """Check that a rate of alerts lies between 0 and 1."""
    if not is_number(rate) or not 0 < rate < 1:
        raise InputError(
            f"{name} is the share of ordinary rows that may raise an alert, between 0 and 1, as in"
            f" 0.001, not {rate!r}."
        )
    return float(rate)


class Alerts:
    """Mark the unlikely rows of a stream, and decide which rows are learned.

    The threshold stays as it is while a model of ``fit`` learns, so that a fault that grows slowly
    must raise an alert in the end. Ordinary rows are no longer learned when the level of their
    scores has fallen: this limits what the model can learn of such a fault. With a solver that
    forgets, drift is ordinary: all rows without an alert are learned, and held-out scores follow
    the stream. They also follow it where the model began on a stream.

    Parameters
    ----------
    run : Run
    rate : float
        Share of ordinary rows that may raise an alert.
    learn : bool
        Whether the model learns; else ``settle`` is never called.
    learn_alerts : bool
        Whether rows that raise an alert are learned as well.
    """

    def __init__(
        self, run: Run, rate: float, *, learn: bool = True, learn_alerts: bool = False
    ) -> None:
        self._run, self._rate, self._learn, self._learn_alerts = run, rate, learn, learn_alerts
        self._begins = not run.held_out_scores
        self._forgets = bool(getattr(run.plan.solver, "forgetting", None))
        self._marked = list[tuple[Numbers, NDArray[np.bool_]]]()
        """Completed scores and alerts since the last ``settle``."""
        self._false_alerts = 0.0
        """Alerts that are expected of ordinary rows and have not come yet."""
        self._level = 0.0
        """Mean of ordinary scores, in deviations from the mean of held-out scores."""
        self._measure()

    def mark(self, rows: Any, scores: Any, components: Any) -> NDArray[np.bool_]:
        """Return which rows (B, d) raise an alert, (B,), by their scores and components (B,)."""
        completed = complete_scores(self._run, rows, scores, components)
        alerts: NDArray[np.bool_] = completed < self.threshold
        alerts |= self._find_lone()[np.asarray(components)] & (self.threshold > -math.inf)
        if self._learn:
            self._marked.append((completed, alerts))
        return alerts

    def _find_lone(self) -> NDArray[np.bool_]:
        """Return which components hold a single training row, (K,): it may have been a fault."""
        weights = torch.softmax(self._run.state.logits.double(), dim=0).cpu().numpy()
        lone: NDArray[np.bool_] = weights * count_training_rows(self._run) < MOST_LONE_ROWS
        return lone

    def settle(self) -> bool:
        """Take note of the rows since the last call, and return whether they may be learned."""
        scores, alerts = (np.concatenate(parts) for parts in zip(*self._marked, strict=True))
        self._marked = []
        ordinary = scores if self._learn_alerts else scores[~alerts]
        if not self._forgets and not self._learn_alerts and not self._is_level(ordinary):
            return False
        if self._forgets or self._run.problem.epochs is None:
            self._follow(ordinary, int(alerts.sum()))
        return True

    def _is_level(self, ordinary: Numbers) -> bool:
        """Return whether ordinary scores are about as high as held-out scores."""
        if len(ordinary) and self.threshold > -math.inf:
            found = (float(ordinary.mean()) - self._mean) / self._deviation
            self._level += (found - self._level) * min(1.0, len(ordinary) / MEMORY_ROWS)
        return self._level > LOWEST_LEVEL

    def _follow(self, ordinary: Numbers, n_alerts: int) -> None:
        """Replace the oldest held-out scores by scores of ordinary rows.

        The lowest scores of ordinary rows raise alerts, and without them the threshold would rise
        and rise. So alerts count with the threshold as their score, but only as many as are
        expected of ordinary rows: the others are faults.
        """
        self._false_alerts += self._rate * (len(ordinary) + n_alerts)
        count = 0 if self._learn_alerts else min(n_alerts, int(self._false_alerts))
        self._false_alerts -= count
        lowest = np.full(count, self.threshold)
        keep_scores(self._run, np.concatenate([self._run.held_out_scores, ordinary, lowest]))
        self._measure()

    def _measure(self) -> None:
        held_out = np.array(self._run.held_out_scores)
        self.threshold = -math.inf
        if self._begins and len(held_out) < LEAST_SCORES:
            return
        self.threshold = find_threshold(held_out, self._rate)
        ordinary = np.maximum(held_out, self.threshold)
        self._mean = float(ordinary.mean())
        self._deviation = max(float(ordinary.std()), LEAST_WIDTH)
