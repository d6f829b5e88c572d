"""Every description of a mixture against dense float64 computation, SciPy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy, norm
from sklearn.datasets import load_iris, load_wine
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import scale

from factormix.core import density, inspection
from factormix.core.inspection import (
    bhattacharyya,
    communalities,
    components_in_use,
    feature_variances,
    in_use,
    jensen_shannon,
    p_values,
    variance_shares,
    varimax,
    varimax_criterion,
)
from factormix.core.parameters import loadings
from factormix.views.plotting.drawing import used_components
from oracles import Case, LargestTensor, assert_close, cases, numpy, random_case

DOUBLE = (torch.float64,)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 9), st.integers(0, 4))
@example(seed=267512, K=1, d=2, l=3)
def test_varimax_is_a_rotation_that_only_gains(seed, K, d, l):
    Lambda = torch.from_numpy(np.random.default_rng(seed).normal(size=(K, d, l)))
    turned, R = varimax(Lambda)
    assert_close(R.mT @ R, np.broadcast_to(np.eye(l), (K, l, l)), 1e-10)
    assert_close(turned, Lambda @ R, 1e-10)
    assert_close(turned @ turned.mT, Lambda @ Lambda.mT, 1e-9)
    assert (varimax_criterion(turned) >= varimax_criterion(Lambda) - 1e-9).all()
    strength = turned.square().sum(dim=1)
    assert (strength.diff(dim=1) <= 1e-9).all(), "the strongest first"
    if l:
        assert (turned.amax(dim=1) >= turned.neg().amax(dim=1) - 1e-12).all(), "largest is positive"


@pytest.mark.parametrize(("load", "l"), [(load_iris, 2), (load_wine, 3)])
def test_varimax_is_that_of_scikit_learn(load, l):
    X = scale(load().data)
    plain, peer = (
        FactorAnalysis(l, rotation=rotation, random_state=0).fit(X).components_.T
        for rotation in (None, "varimax")
    )
    turned = varimax(torch.from_numpy(plain)[None]).loadings[0].numpy()
    peer = peer[:, np.argsort(-(peer**2).sum(axis=0))]
    peer = peer * np.sign(peer[np.abs(peer).argmax(axis=0), np.arange(l)])
    np.testing.assert_allclose(turned, peer, atol=1e-3)


def test_varimax_finds_simple_structure_again():
    rng = np.random.default_rng(0)
    simple = np.zeros((9, 3))
    simple[np.arange(9), np.arange(9) // 3] = rng.uniform(1, 2, size=9) * [
        3,
        3,
        3,
        2,
        2,
        2,
        1,
        1,
        1,
    ]
    turn = np.linalg.qr(rng.normal(size=(3, 3))).Q
    found = varimax(torch.from_numpy(simple @ turn)[None]).loadings[0]
    assert_close(found, simple, 1e-4)


@given(cases(dtypes=DOUBLE))
def test_shares_of_variance(case: Case):
    pi = case.dense.weights / case.dense.weights.sum()
    mu, Sigma = case.dense.means, case.dense.Sigma
    parameters = case.mixture.precision_form
    noise = (1 / case.dense.E).sum(axis=1)
    own = np.trace(Sigma, axis1=1, axis2=2)
    centre = pi @ mu
    whole = np.einsum("k,kij->ij", pi, Sigma + mu[:, :, None] * mu[:, None, :])
    whole -= np.outer(centre, centre)
    found = variance_shares(parameters)
    assert_close(found.noise.detach(), noise / own, 1e-8)
    assert_close(found.factors.sum(dim=1).detach() + found.noise.detach(), np.ones(len(pi)), 1e-8)
    assert_close(found.within_noise.detach(), np.asarray(pi @ noise / np.trace(whole)), 1e-8)
    total = found.between + found.within_factors + found.within_noise
    assert_close(total.detach(), np.asarray(1.0), 1e-10)
    assert_close(feature_variances(parameters).detach(), np.diag(whole), 1e-8)
    diagonal = np.diagonal(Sigma, axis1=1, axis2=2)
    assert_close(communalities(parameters).detach(), 1 - 1 / case.dense.E / diagonal, 1e-8)


def dense_distance(mean: np.ndarray, S: np.ndarray, other: np.ndarray, T: np.ndarray) -> float:
    middle, x = (S + T) / 2, mean - other
    volumes = [np.linalg.slogdet(A)[1] for A in (middle, S, T)]
    return x @ np.linalg.solve(middle, x) / 8 + (volumes[0] - (volumes[1] + volumes[2]) / 2) / 2


@given(cases(dtypes=DOUBLE), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_overlap_against_dense_gaussians(case: Case, seed: int, l: int):
    K, d, _ = case.mixture.precision_form.shape
    other = random_case(3, d, l, seed=seed)
    found = bhattacharyya(case.mixture.precision_form, other.mixture.precision_form).detach()
    expected = [
        [
            dense_distance(case.dense.means[k], case.dense.Sigma[k], other.dense.means[j], T)
            for j, T in enumerate(other.dense.Sigma)
        ]
        for k in range(K)
    ]
    assert_close(found, np.asarray(expected), 1e-8)


def test_overlap_is_an_integral():
    one, two = random_case(1, 1, 1, seed=3), random_case(1, 1, 0, seed=4)
    p, q = (norm(c.dense.means[0, 0], np.sqrt(c.dense.Sigma[0, 0, 0])).pdf for c in (one, two))
    integral = quad(lambda x: np.sqrt(p(x) * q(x)), -60, 60, limit=200)[0]
    found = bhattacharyya(one.mixture.precision_form, two.mixture.precision_form)
    assert found.detach().neg().exp().item() == pytest.approx(integral, rel=1e-6)


def test_overlap_forms_no_matrix_of_features():
    d = 300
    case = random_case(4, d, 2)
    values = case.mixture.precision_form
    with LargestTensor() as largest, torch.no_grad():
        found = bhattacharyya(values, values)
    assert largest.numel < d * d / 4
    assert found.diagonal().abs().max() < 1e-9
    assert_close(found, numpy(found.mT), 1e-9)


def test_loadings_of_a_rotation_keep_the_density():
    case = random_case(2, 6, 3)
    Lambda = loadings(case.mixture.precision_form).detach()
    turned = varimax(Lambda).loadings
    D = 1 / torch.from_numpy(case.dense.E)
    Sigma = turned @ turned.mT + torch.diag_embed(D)
    assert_close(Sigma, case.dense.Sigma, 1e-9)


def test_p_values_are_those_of_two_proportions():
    first, second = torch.tensor([30.0, 50, 0, 20]), torch.tensor([10.0, 70, 0, 120])
    n, m = 100.0, 200.0
    for i, p in enumerate(p_values(first, second).tolist()):
        pooled = float(first[i] + second[i]) / (n + m)
        if pooled == 0:
            assert p == 1
            continue
        error = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
        z = (float(first[i]) / n - float(second[i]) / m) / error
        assert p == pytest.approx(2 * norm.sf(abs(z)), rel=1e-6)


def test_p_values_are_uniform_where_nothing_differs():
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(400, 5.0))
    counts = [torch.from_numpy(rng.multinomial(40_000, shares).astype(float)) for _ in range(2)]
    assert 0.02 < (p_values(*counts) < 0.05).double().mean() < 0.09


def test_jensen_shannon_is_that_of_scipy():
    first, second = torch.tensor([30.0, 50, 0, 20]), torch.tensor([10.0, 0, 5, 120])
    expected = jensenshannon(first.numpy(), second.numpy()) ** 2
    assert jensen_shannon(first, second).item() == pytest.approx(expected)
    assert jensen_shannon(first, 3 * first).item() == pytest.approx(0)


@pytest.mark.parametrize(("K", "d"), [(1, 3), (4, 2), (5, 7)])
def test_a_diagonal_mixture_has_as_many_parameters_as_that_of_scikit_learn(K, d):
    X = np.random.default_rng(0).normal(size=(60, d))
    peer = GaussianMixture(K, covariance_type="diag", max_iter=1, random_state=0)
    with pytest.warns(match="converge"):
        peer.fit(X)
    n = inspection.n_free_parameters(K, d, 0)
    total = 60 * peer.score(X)
    assert inspection.bic(total, n, 60) == pytest.approx(peer.bic(X))
    assert inspection.aic(total, n) == pytest.approx(peer.aic(X))


@pytest.mark.parametrize(("d", "l"), [(4, 1), (5, 2), (6, 3)])
def test_parameters_of_a_component_are_the_dimension_of_its_densities(d, l):
    """The Jacobian of the covariance by loadings and noise has as many directions as counted."""

    def covariance(flat):
        Lambda, D = flat[: d * l].reshape(d, l), flat[d * l :].exp()
        return (Lambda @ Lambda.T + D.diag())[torch.tril_indices(d, d).unbind()]

    flat = torch.randn(d * l + d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rank = torch.linalg.matrix_rank(torch.autograd.functional.jacobian(covariance, flat))
    assert int(rank) + d == inspection.n_free_parameters(1, d, l)


@given(cases(dtypes=(torch.float64,)))
def test_entropy_of_assignments(case):
    joint = density.joint_log_prob(case.x, density.operands(case.mixture.precision_form))
    expected = entropy(case.dense.responsibilities(case.points), axis=1)
    assert_close(inspection.assignment_entropy(joint).detach(), expected, 1e-9)


def test_entropy_of_a_sure_assignment_is_zero():
    joint = torch.tensor([[0.0, -1e6], [-3e38, 0.0]])
    assert inspection.assignment_entropy(joint).tolist() == [0.0, 0.0]


# A tenth of the average of eight is exactly 1 / 80.
WEIGHTS = [0.5, 0.3, 0.1, 0.06, 1 / 80, 0.0124, 0.0125, 0.0026]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_tenth_of_the_average_is_in_use(make):
    weights = make(WEIGHTS, dtype=torch.float64 if make is torch.tensor else np.float64)
    assert in_use(weights).tolist() == [True] * 5 + [False, True, False]
    assert components_in_use(weights) == 6
    assert components_in_use(make([0.5, 0.46, 0.026, 0.014])) == 3


def test_pictures_see_the_same():
    class Model:
        weights_ = np.array(WEIGHTS)

    assert used_components(Model()).tolist() == in_use(np.array(WEIGHTS)).tolist()
