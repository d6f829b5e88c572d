"""The density of a fitted model, computed in float64 from differences ``x - mu``."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from factormix import MFA


def exact_scores(model: MFA, X: np.ndarray) -> np.ndarray:
    """Compute log-densities (n,) of rows (n, d) from the parameters that a model shows."""
    mixture = model.mixture_.double()
    pi, mu, E, Gamma = (
        t.detach().numpy()
        for t in (mixture.weights, mixture.means, mixture.precision_diag, mixture.precision_factors)
    )
    K, d, l = Gamma.shape
    joint = np.empty((len(X), K))
    for k in range(K):
        M = np.eye(l) - Gamma[k].T @ (Gamma[k] / E[k][:, None])
        xt = X - mu[k]
        squares = (E[k] * xt**2).sum(axis=1) - ((xt @ Gamma[k]) ** 2).sum(axis=1)
        volume = np.log(E[k]).sum() + np.linalg.slogdet(M)[1] - d * np.log(2 * np.pi)
        joint[:, k] = np.log(pi[k]) + 0.5 * (volume - squares)
    return logsumexp(joint, axis=1)


def assert_honest(model: MFA, X: np.ndarray) -> None:
    """Check that scores are those of the parameters: to 0.002 a feature, and six digits."""
    scores, exact = np.asarray(model.score_samples(X), dtype=np.float64), exact_scores(model, X)
    assert np.isfinite(scores).all()
    error = np.abs(scores - exact) - 1e-6 * np.abs(exact)
    assert error.max() < 2e-3 * X.shape[1], (error.max(), scores[error.argmax()])
