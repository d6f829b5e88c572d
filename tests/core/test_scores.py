"""Scores by name against dense float64 Gaussians, and their compression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factormix.core import attribution, density
from oracles import LargestTensor, assert_close, cases, random_case


@given(cases(dtypes=(torch.float64,)))
def test_every_score_is_what_its_name_says(case):
    ops, x, dense = density.operands(case.mixture.precision_form), case.points, case.dense
    joint = dense.joint_log_prob(x)
    xt = x - dense.means[joint.argmax(axis=1)]
    P, E = dense.P[joint.argmax(axis=1)], dense.E[joint.argmax(axis=1)]
    Gamma = dense.Gamma[joint.argmax(axis=1)]
    inside = np.stack(
        [
            # Least squares in the metric E, on the span of E^-1 Gamma: where the loadings point.
            span @ np.linalg.lstsq(np.sqrt(e)[:, None] * span, np.sqrt(e) * row, rcond=1e-9)[0]
            for row, e, span in zip(xt, E, Gamma / E[:, :, None], strict=True)
        ]
    )
    expected = {
        "log_likelihood": dense.log_prob(x),
        "best_component": joint.max(axis=1),
        "mahalanobis": -np.einsum("bi,bij,bj->b", xt, P, xt),
        "reconstruction": -(E * (xt - inside) ** 2).sum(axis=1),
    }
    assert set(expected) == set(attribution.SCORES)
    for name, values in expected.items():
        assert_close(attribution.score(name, case.x, ops), values, 1e-9)


@given(st.floats(-1e6, 1e6, allow_subnormal=False))
def test_compression_keeps_order_and_sign(value):
    u = torch.tensor([value, value + 1e-3], dtype=torch.float64)
    low, high = attribution.compressed(u).tolist()
    assert low < high
    assert attribution.compressed(u)[0].sign() == u[0].sign()
    assert_close(attribution.compression_slope(u) * u, attribution.compressed(u), 1e-9)


def test_compression_has_slope_one_at_zero():
    assert attribution.compression_slope(torch.zeros(1)).item() == 1.0
    assert attribution.compressed(torch.tensor([np.e - 1])).item() == pytest.approx(1.0)


def test_no_score_forms_rows_times_components_times_features():
    case = random_case(20, 30, 2, n=40)
    ops = density.operands(case.mixture.precision_form)
    with LargestTensor() as largest, torch.no_grad():
        for name in attribution.SCORES:
            attribution.score(name, case.x, ops)
    assert largest.numel < 40 * 20 * 30, largest.operation
