"""Summaries of rows that ranks exchange, against the responsibilities of all components."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp, softmax
from torch import Tensor

from factormix.core.exchange import Exchange, Normaliser, RowSummary, summarise_
from factormix.core.parameters import Parameters
from mixtures import make_mixture
from oracles import numpy

RANKS = (slice(0, 5), slice(5, 12))


def exchange_summaries(
    joint: Tensor, parameters: Parameters
) -> list[tuple[Normaliser, RowSummary, Tensor]]:
    """Let two ranks exchange summaries.

    Return the normaliser and the summary of each rank, and its ``exp(joint - largest)``.
    """
    relative = [joint[:, rank].clone() for rank in RANKS]
    summaries = [summarise_(part) for part in relative]
    some = [Parameters(*(t[rank] for t in parameters)) for rank in RANKS]
    messages = [
        torch.cat([one.logits.logsumexp(dim=0, keepdim=True), summary.values.reshape(-1)])
        for one, summary in zip(some, summaries, strict=True)
    ]
    normalisers = []
    for rank, (one, summary) in enumerate(zip(some, summaries, strict=True)):

        def gather(message: Tensor, rank: int = rank) -> Tensor:
            assert torch.equal(message, messages[rank])
            return torch.stack(messages)

        normalisers += Exchange(gather, rank, 7).normalisers([summary], one)
    return list(zip(normalisers, summaries, relative, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_rank_gets_its_part_of_the_responsibilities(dtype: torch.dtype):
    parameters = Parameters(*(t.to(dtype) for t in make_mixture(K=12)))
    generator = torch.Generator().manual_seed(0)
    joint = 20 * torch.randn(40, 12, generator=generator, dtype=dtype)
    # Rows far from all components of a rank have nearly no share there, but no denormal one.
    joint[:8, RANKS[0]] -= torch.linspace(20, 2000, 8, dtype=dtype).unsqueeze(1)
    exact = numpy(joint.double())
    total = logsumexp(exact, axis=1)
    logits = numpy(parameters.logits.double())
    exchanged = exchange_summaries(joint, parameters)
    for rank, (normaliser, summary, relative) in zip(RANKS, exchanged, strict=True):
        np.testing.assert_allclose(summary.largest, exact[:, rank].max(axis=1), rtol=1e-6)
        np.testing.assert_allclose(normaliser.log_prob, total - logsumexp(logits), rtol=1e-5)
        R = normaliser.normalise_(relative, summary.largest)
        assert (R >= 0.99e-30).all()
        np.testing.assert_allclose(R, softmax(exact, axis=1)[:, rank], rtol=1e-4, atol=1.01e-30)


def test_a_summary_has_the_second_best_component_and_the_best_that_is_no_candidate():
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(40, 5, generator=generator)
    candidates = torch.tensor([True, False, True, False, False])
    expected = np.sort(numpy(joint), axis=1)
    others = numpy(joint[:, ~candidates]).max(axis=1)
    weights = np.exp(log_softmax(numpy(joint.double()), axis=1))
    best = numpy(joint).argmax(axis=1)
    summary = summarise_(joint, candidates)
    np.testing.assert_array_equal(summary.best, best)
    np.testing.assert_array_equal(summary.values[:, 2], expected[:, -2])
    np.testing.assert_array_equal(summary.values[:, 3], others)
    np.testing.assert_allclose(joint / summary.values[:, 1:2], weights, rtol=1e-5)
    all_candidates = summarise_(torch.zeros(3, 2), torch.tensor([True, True]))
    assert (all_candidates.values[:, 3] == -torch.inf).all()
