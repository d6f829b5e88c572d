"""Criteria against their definitions, computed densely, and against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.stats import entropy
from sklearn.mixture import GaussianMixture

from factormix.core import density, inspection
from factormix.core.parameters import effective_factors
from oracles import TOLERANCE, assert_close, cases


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


@given(cases())
def test_effective_factors_are_a_trace(case):
    """The sum of ``1 - M_jj`` is the trace of ``Sigma^-1 Lambda Lambda'``."""
    E, Sigma = case.dense.E, case.dense.Sigma
    explained = Sigma - np.eye(E.shape[1]) / E[:, :, None]
    expected = np.trace(case.dense.P @ explained, axis1=1, axis2=2)
    found = effective_factors(case.mixture.precision_form).detach()
    assert_close(found, expected, 10 * TOLERANCE[case.dtype])
    assert (found <= case.mixture.n_factors + 1e-6).all()
