"""The benchmark of activations: its peers against oracles, and a small run of every part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from activations_data import collect_small, make_small_network
from activations_trials import (
    Windows,
    average_contexts,
    covariance_log_prob,
    fit_clusters,
    judge,
    run_kmeans,
)
from harness import Result
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.decomposition import FactorAnalysis

import activations
from factormix.activations import open_store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    collect_small(folder)
    return folder


def test_a_small_run_of_every_part_writes_the_page(made: Path, tmp_path: Path) -> None:
    parts = ["--parts", "likelihood", "reading", "steering"]
    options = activations.parse(["--quick", "-o", str(tmp_path), "--layers", "3", *parts])
    results = [
        Result(trial, trial.run(trial.settings, str(made)).values)
        for trial in activations.plan(options)
        if trial.settings["K"] == 10
    ]
    assert len(results) == 6
    for result in results[:4]:
        seconds, held_out = zip(*result["curve"], strict=True)
        assert list(seconds) == sorted(seconds)
        assert np.isfinite(held_out).all()
    page = activations.write_page(results, ["likelihood/layer3-20-em"])
    text = page.write(tmp_path / "page.md", "pictures").read_text(encoding="utf-8")
    for words in (
        "Held-out likelihood",
        "## Reading",
        "## Steering",
        "| 3 | 10 | 5,000 | Adam |",
        "-20-em.",
    ):
        assert words in text


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for wrong in (["--parts", "speed"], [], ["--quick", "--write-docs"]):
        with pytest.raises(SystemExit):
            activations.main([*wrong, "-o", str(tmp_path)])


def test_the_density_of_the_peers_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    K, d, l = 3, 5, 2
    means, loadings = (torch.randn(size, generator=generator) for size in ((K, d), (K, d, l)))
    noise = torch.rand(K, d, generator=generator) + 0.5
    log_weights = torch.log_softmax(torch.randn(K, generator=generator), dim=0)
    x = torch.randn(20, d, generator=generator)
    found = covariance_log_prob(x, log_weights, means, loadings, noise)
    joint = [
        log_weights[k].item()
        + multivariate_normal(means[k], loadings[k] @ loadings[k].T + noise[k].diag()).logpdf(x)
        for k in range(K)
    ]
    assert np.allclose(found, logsumexp(joint, axis=0), atol=1e-4)


def test_the_factor_analyzer_of_a_cluster_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    d, l = 60, 10
    z = torch.randn(4000, l, generator=generator)
    x = z @ torch.randn(l, d, generator=generator) + torch.randn(4000, d, generator=generator)
    centres, labels = run_kmeans(x, 1, 0)
    assert torch.allclose(centres[0], x.mean(dim=0), atol=1e-5)
    ours = covariance_log_prob(x, *fit_clusters(x, labels, 1)).mean().item()
    theirs = FactorAnalysis(l, svd_method="lapack").fit(x.numpy()).score(x.numpy())
    assert ours == pytest.approx(theirs, abs=0.1)


def test_regions_of_one_token_and_context_are_judged_as_such() -> None:
    assigned = np.repeat([0, 1, 2], 20)
    tokens = np.r_[np.full(20, 7), np.tile([3, 4], 10), np.arange(20)]
    contexts = torch.tensor([[0.0], [5.0], [10.0]]).repeat_interleave(20, dim=0)
    found = judge(assigned, tokens, contexts + torch.randn(60, 1) * 1e-3, seed=0)
    assert found["regions"] == 3
    assert found["three"] == pytest.approx(2 / 3)
    assert found["purity"] == pytest.approx((1 + 0.5 + 0.05) / 3)
    assert found["silhouette"] > 0.99
    x = torch.arange(6.0).view(6, 1)
    means = average_contexts(x, np.array([0, 0, 0, 1, 1, 2]), reach=1)
    assert means[:, 0].tolist() == [1.0, 1.0, 1.0, 4.0, 3.0, 0.0]


def test_windows_are_the_tokens_around_rows(made: Path) -> None:
    store = open_store(made / "layer-3")
    labels = store.labels_at(0, 200)
    windows = Windows(torch.tensor([25, 19]), labels, reach=2)
    assert windows.ids[0].tolist() == labels.tokens[23:28].tolist()
    assert windows.ids[1, :3].tolist() == labels.tokens[17:20].tolist()
    assert windows.mask.sum(dim=1).tolist() == [5, 3]
    assert windows.run(make_small_network()).shape == (2, 16)
