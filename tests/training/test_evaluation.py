"""Scores in units of the data, held against densities from differences ``x - mu`` in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from densities import assert_honest
from factormix import MFA
from factormix.core.density import component_log_prob, correct_components, log_prob, operands
from factormix.core.missing import RowBlock
from factormix.core.parameters import Parameters
from factormix.data.sources.convert import as_rows
from factormix.data.units import Units
from factormix.training.evaluation import evaluate, mean_log_likelihood, to_score_dtype
from factormix.training.threads import use_threads
from oracles import Case, Dense, numpy, random_case


def far_case(far: float, *, K: int = 3, d: int = 4, l: int = 2, dtype=torch.float64) -> Case:
    """Draw a mixture whose means stand ``far`` deviations from the origin, on all sides."""
    case = random_case(K, d, l, seed=3, dtype=dtype, n=40)
    rng = np.random.default_rng(0)
    weights, _, E, Gamma = case.arguments
    means = torch.tensor(far * rng.choice([-1, 1], size=(K, d)) + rng.normal(size=(K, d))).to(dtype)
    near = numpy(means)[rng.integers(K, size=40)] + rng.normal(size=(40, d))
    arguments = (weights, means, E, Gamma)
    return Case(Dense(*map(numpy, arguments)), torch.tensor(near), arguments)


def parameters(case: Case) -> Parameters:
    return Parameters(*(t.detach() for t in case.mixture.precision_form))


def direct(case: Case) -> np.ndarray:
    """Compute log-densities (n,) densely; SciPy subtracts means before anything else."""
    return case.dense.log_prob(numpy(case.x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [0.0, 1e3, 1e6, 1e8])
def test_the_score_of_far_means_is_the_direct_one(far, dtype):
    case = far_case(far, dtype=dtype)
    score = mean_log_likelihood(parameters(case), Units.identity(4), as_rows(case.x.numpy()))
    assert score == pytest.approx(direct(case).mean(), abs=4e-3)


@pytest.mark.parametrize("far", [0.0, 1e6, 1e8])
def test_the_score_of_a_large_mixture_is_the_direct_one(far):
    """Above 50,000 parameters, float32 is left only where it would cost digits."""
    case = far_case(far, K=20, d=60, l=45, dtype=torch.float32)
    values = parameters(case)
    assert to_score_dtype(values).means.dtype == (torch.float32 if far == 0 else torch.float64)
    score = mean_log_likelihood(values, Units.identity(60), as_rows(case.x.numpy()))
    assert score == pytest.approx(direct(case).mean(), abs=1e-3 * 60)


def test_blocks_have_rows_enough_where_components_are_very_many():
    """Products of a few rows with all components would read the components again and again."""
    case = far_case(0.0, K=12_000, d=40, l=2, dtype=torch.float32)
    sizes = []

    def function(block: RowBlock) -> torch.Tensor:
        sizes.append(len(block.x))
        return log_prob(block.x, block.ops, block.work)

    values = parameters(case)
    with use_threads() as threads:
        found = evaluate(threads, values, Units.identity(40), as_rows(case.x.numpy()), function)
        scores = torch.cat([part for _, part in found])
    assert sizes == [40], "as many as there are features"
    expected = log_prob(case.x.float(), operands(values))
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-3)


def test_scores_are_in_units_of_the_data():
    case = far_case(1e6)
    units = Units(
        torch.tensor([1.0, 0.0, -5.0, 100.0]).double(), torch.tensor([1e3, 1, 2, 0.1]).double()
    )
    X = (case.x * units.scale + units.offset).numpy()
    score = mean_log_likelihood(parameters(case), units, as_rows(X))
    assert score == pytest.approx(direct(case).mean() - np.log(units.scale.numpy()).sum(), abs=4e-3)


def test_the_mean_goes_by_the_weights_of_the_rows():
    case = far_case(10.0)
    weights = np.arange(40) % 3 + 0.5
    rows = as_rows(case.x.numpy(), weights)
    score = mean_log_likelihood(parameters(case), Units.identity(4), rows)
    assert score == pytest.approx(np.average(direct(case), weights=weights), rel=1e-9)


def test_a_row_beyond_all_numbers_still_has_a_score():
    case = far_case(0.0)
    X = np.full((3, 4), 1e200)
    assert np.isfinite(mean_log_likelihood(parameters(case), Units.identity(4), as_rows(X)))


@pytest.mark.parametrize("far", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("l", [0, 2])
def test_the_exact_joint_density_is_that_of_scipy(far, l):
    case = far_case(far, l=l)
    values, expected = parameters(case), case.dense.joint_log_prob(numpy(case.x))
    ops, all_components = operands(values, centre=False), torch.arange(len(values.means))
    log_p = correct_components(component_log_prob(case.x, ops), case.x, values, all_components)
    np.testing.assert_allclose(log_p + ops.log_weights, expected, rtol=1e-9, atol=1e-6)


def test_scores_of_strong_factors_are_those_of_the_parameters():
    """Rounded factors leave an M that is not quite diagonal, beside elements near its floor."""
    rng = np.random.default_rng(0)
    W = rng.normal(size=(14, 100))
    X = 3 * rng.normal(size=(400, 14)) @ W + 0.003 * rng.normal(size=(400, 100))
    model = MFA(2, 14, random_state=0, max_epochs=30).fit(X)
    assert_honest(model, X)
    module = model.mixture_.log_prob(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(module, model.score_samples(X), rtol=1e-6, atol=1e-3)


def test_a_row_at_the_edge_of_what_squares_allow_keeps_its_score():
    X = np.random.default_rng(0).normal(size=(300, 4))
    X[5, 1] = 1e15
    model = MFA(3, 1, solver="em", dtype="float64", random_state=0).fit(X)
    assert_honest(model, X)
