"""The mixtures of the demo: what is trained, on which rows, and how well it does."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture

from factormix.estimators import MFA
from factormix.studies.demo.digits import Digits

__all__ = ["Fitted", "Outliers", "Plan", "compare", "fit_gmm", "fit_mfa", "leave_out", "winner"]

Say = Callable[[str], object]
Scores = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Plan:
    """Say what the demo does; the defaults take less than two minutes on two cores."""

    n_components: int = 25
    n_factors: int = 4
    max_precision: float = 20.0
    """The paper's bound for images in [0, 1]; its inverse is scikit-learn's variance floor."""
    train_rows: int = 10_000
    test_rows: int = 5_000
    rows_to_learn: int = 150_000
    """Rows that one training sees, every pass counted."""
    data: str | None = None
    """A data set by name; None takes the best one on this machine."""
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """Hold a trained model, what it is and how long it took."""

    name: str
    model: Any
    seconds: float
    score: float = float("nan")
    """Mean held-out log-likelihood."""


@dataclass(frozen=True)
class Outliers:
    """Hold the held-out scores of models that never saw one class."""

    label: int
    is_outlier: NDArray[np.bool_]
    mfa: Scores
    gmm: Scores

    @property
    def auc(self) -> tuple[float, float]:
        """How often an inlier scores higher than an outlier: the MFA's and the GMM's share."""
        inlier = ~self.is_outlier
        return float(roc_auc_score(inlier, self.mfa)), float(roc_auc_score(inlier, self.gmm))


def fit_mfa(data: NDArray[np.float32], n_factors: int, plan: Plan) -> Fitted:
    """Train our mixture on images (n, d) from random values."""
    begun = time.monotonic()
    model = MFA(
        plan.n_components,
        n_factors,
        max_precision=plan.max_precision,
        max_epochs=max(1, round(plan.rows_to_learn / len(data))),
        random_state=plan.seed,
        verbose=int(sys.stderr.isatty()),
    ).fit(data)
    name = f"MFA, {plan.n_components} components, {n_factors} factors"
    return Fitted(name, model, time.monotonic() - begun)


def fit_gmm(data: NDArray[np.float32], plan: Plan) -> Fitted:
    """Train scikit-learn's diagonal mixture with the variance floor that the MFA has."""
    begun = time.monotonic()
    model = GaussianMixture(
        plan.n_components,
        covariance_type="diag",
        reg_covar=1 / plan.max_precision,
        random_state=plan.seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(data)
    name = f"scikit-learn GaussianMixture, {plan.n_components} components, diagonal"
    return Fitted(name, model, time.monotonic() - begun)


def compare(digits: Digits, plan: Plan, say: Say) -> list[Fitted]:
    """Train an MFA, the MFA without factors and scikit-learn's mixture on all classes."""
    say(
        f"Training three mixtures of {plan.n_components} components on all classes, with"
        f" variances of at least 1/{plan.max_precision:g} ..."
    )
    data = digits.train.data
    fits = [
        fit_mfa(data, plan.n_factors, plan),
        fit_mfa(data, 0, plan),
        fit_gmm(data, plan),
    ]
    return [replace(fit, score=float(fit.model.score(digits.test.data))) for fit in fits]


def leave_out(digits: Digits, label: int, plan: Plan, say: Say) -> Outliers:
    """Train without one class and score held-out images of all classes."""
    say(f"Training without class {label} ...")
    data, test = digits.without(label), digits.test
    mfa = fit_mfa(data, plan.n_factors, plan).model.score_samples(test.data)
    gmm = fit_gmm(data, plan).model.score_samples(test.data)
    return Outliers(label, test.labels == label, mfa, gmm)


def winner(fits: list[Fitted]) -> str:
    """Say who wins, whoever it is."""
    lead = fits[0].score - fits[-1].score
    ahead = "The MFA is" if lead > 0 else "scikit-learn's mixture is"
    return f"{ahead} ahead by {abs(lead):.1f} nats per image."
