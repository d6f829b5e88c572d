"""Numbers in order: dense conditionals, masses that sum to one, and draws that follow them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp

from factormix.core.parameters import Parameters, covariances
from factormix.core.sequential import (
    SequentialMixture,
    bin_log_masses_of_normals,
    draw_sequences_,
    score_sequences,
)
from mixtures import make_mixture

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def list_conditionals(
    parameters: Parameters, x: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return log-weights, means and deviations (K,) of each number of a row, by dense matrices."""
    log_weights, means = parameters.log_weights.numpy(), parameters.means.numpy()
    Sigma, found = covariances(parameters).numpy(), []
    for j in range(len(x)):
        past, log_p, m, s = slice(j), log_weights.copy(), means[:, j].copy(), Sigma[:, j, j].copy()
        for k in range(len(means)) if j else ():
            slope = np.linalg.solve(Sigma[k, past, past], Sigma[k, past, j])
            error = x[past] - means[k, past]
            m[k], s[k] = m[k] + slope @ error, s[k] - slope @ Sigma[k, past, j]
            log_p[k] += stats.multivariate_normal(cov=Sigma[k, past, past]).logpdf(error)
        found.append((log_p - logsumexp(log_p), m, np.sqrt(s)))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("d", "l"), [(6, 0), (1, 0), (6, 1), (6, 3), (16, 2), (35, 3)])
def test_conditionals_are_those_of_dense_gaussians(d, l, dtype):
    parameters = make_mixture(K=4, d=d, l=l, spread=2)
    mixture = SequentialMixture.prepare(parameters).to(dtype)
    rows = 3 * torch.randn(5, d, generator=torch.Generator().manual_seed(1)).double()
    densities = score_sequences(mixture, rows.to(dtype), None).double().numpy()
    levels = rows.round().clamp(0, 4)
    masses = score_sequences(mixture, levels.to(dtype), 5).double().numpy()
    for i in range(len(rows)):
        for j, (log_w, m, s) in enumerate(list_conditionals(parameters, rows[i].numpy())):
            expected = logsumexp(log_w + stats.norm(m, s).logpdf(float(rows[i, j])))
            assert densities[i, j] == pytest.approx(expected, abs=10 * TOLERANCE[dtype])
        for j, (log_w, m, s) in enumerate(list_conditionals(parameters, levels[i].numpy())):
            y = float(levels[i, j])
            low, high = y - 0.5 if y else -np.inf, y + 0.5 if y < 4 else np.inf
            # Each tail keeps its digits in one of the two.
            normal = stats.norm(m, s)
            left, right = normal.cdf(high) - normal.cdf(low), normal.sf(low) - normal.sf(high)
            mass = np.where(m > y, left, right)
            expected = np.log((np.exp(log_w) * mass).sum())
            assert masses[i, j] == pytest.approx(expected, rel=1e-5, abs=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("deviation", [0.05, 1.0, 300.0])
def test_the_masses_of_all_levels_sum_to_one_and_tails_keep_their_digits(deviation):
    levels = torch.arange(256.0)
    for mean in (-3.0, 0.4, 127.5, 200.0, 260.0):
        error, s = (levels - mean)[:, None], torch.tensor([deviation])
        outer = levels == 0, levels == 255
        log_p = bin_log_masses_of_normals(torch.zeros(256, 1), error, s, *outer).double()
        assert torch.isfinite(log_p).all()
        assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-4)
        # Where the bin is in the tail, its nearer edge has almost all of its mass.
        far = (error[1:-1, 0].abs() - 0.5) / deviation
        nearer = torch.special.log_ndtr(-far[far > 9].double())
        torch.testing.assert_close(log_p[1:-1][far > 9], nearer, rtol=1e-3, atol=1e-2)


def test_the_probabilities_of_all_rows_sum_to_one_and_draws_follow_them():
    levels, n = 3, 20_000
    mixture = SequentialMixture.prepare(make_mixture(K=3, d=4, l=2, spread=1))
    every = torch.tensor(list(product(range(levels), repeat=4))).double()
    p = score_sequences(mixture, every, levels).sum(1).exp().numpy()
    assert p.sum() == pytest.approx(1, abs=1e-9)
    random, places = torch.Generator().manual_seed(0), levels ** np.arange(3, -1, -1)
    drawn = torch.zeros(n, 4).double()
    draw_sequences_(mixture, drawn, levels, random)
    counts = np.bincount((drawn.numpy() @ places).astype(int), minlength=levels**4)
    assert stats.chisquare(counts, n * p).pvalue > 0.001
    # A known number stays, and later ones are given it.
    known = torch.tensor([0.0, 2.0, 0.0, 1.0]).double().repeat(n, 1)
    missing = torch.tensor([True, False, True, False]).expand(n, 4)
    draw_sequences_(mixture, known, levels, random, missing)
    assert (known[:, 1] == 2).all()
    assert (known[:, 3] == 1).all()
    nats = score_sequences(mixture, every, levels).exp().numpy()
    kept = (every[:, 1] == 2).numpy() & (every[:, 3] == 1).numpy()
    expected = nats[kept][:, 0] * nats[kept][:, 2]
    counts = np.bincount((known.numpy() @ places).astype(int), minlength=levels**4)[kept]
    assert stats.chisquare(counts, n * expected).pvalue > 0.001


def test_strong_factors_leave_finite_variances():
    parameters = make_mixture(K=2, d=30, l=4)
    strong = parameters._replace(
        precision_diag=1e8 * parameters.precision_diag,
        precision_factors=1e4 * 0.9999 * parameters.precision_factors,
    )
    mixture = SequentialMixture.prepare(strong).to(torch.float32)
    assert all(torch.isfinite(tensor).all() for tensor in mixture)
    assert (mixture.deviations > 0).all()
