"""The option ``candidates``: scores of few of many components, exact scores, files, the command."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch

from densities import exact_scores
from factormix import MFA, InputError, load
from factormix.cli import run
from mixtures import draw_rows, make_mixture

K = 80
X = (draw_rows(make_mixture(K=K, d=24, spread=1.5), 4000) / 3).numpy()
TRAIN, NEW = X[:3000], X[3000:]


def model(**options: Any) -> MFA:
    defaults = {"max_epochs": 3, "batch_size": 500, "random_state": 0, "candidates": 24}
    return MFA(K, 2, **defaults | options).fit(TRAIN)


@pytest.fixture(scope="module")
def screened() -> MFA:
    return model()


def test_scores_lose_little_and_exact_ones_nothing(screened):
    exact = exact_scores(screened, NEW)
    np.testing.assert_allclose(screened.score_samples(NEW, exact=True), exact, rtol=1e-4, atol=0.02)
    lost = exact - screened.score_samples(NEW)
    assert lost.min() > -0.02
    assert 0 < lost.mean() < 0.3
    assert screened.score(NEW) == pytest.approx(np.mean(screened.score_samples(NEW)), abs=0.05)


def test_components_and_codes_agree_with_the_full_evaluation(screened):
    scores, components = screened.score_and_predict(NEW)
    np.testing.assert_allclose(scores, screened.score_samples(NEW))
    assert np.array_equal(components, screened.predict(NEW))
    shares = screened.predict_proba(NEW)
    same = components == shares.argmax(axis=1)
    assert same.mean() > 0.9
    codes = screened.posterior(NEW).means[np.arange(len(NEW)), components]
    np.testing.assert_allclose(screened.transform(NEW), codes, rtol=1e-3, atol=1e-4)


def test_none_evaluates_all(screened):
    every = copy.deepcopy(screened)
    every.candidates = None
    np.testing.assert_allclose(
        every.score_samples(NEW), screened.score_samples(NEW, exact=True), rtol=1e-6
    )
    assert np.array_equal(every.predict(NEW), every.predict_proba(NEW).argmax(axis=1))


def test_training_is_as_good_as_with_all(screened):
    whole = model(candidates=None)
    assert screened.score_samples(NEW, exact=True).mean() > whole.score(NEW) - 0.3
    assert "candidates" not in whole.history_[-1]
    last = screened.history_[-1]
    assert last["candidates"] == 24
    assert 0 < last["screening_loss"] < 1
    # The reported loss is the loss of the rows.
    lost = screened.score_samples(TRAIN, exact=True) - screened.score_samples(TRAIN)
    assert last["screening_loss"] == pytest.approx(lost.mean(), abs=0.2)


def test_a_file_keeps_the_screen_and_goes_on_exactly(tmp_path, screened, capsys):
    path = tmp_path / "model.safetensors"
    stopped = MFA(
        K, 2, max_epochs=3, batch_size=500, random_state=0, candidates=24, callbacks=[after(9)]
    )
    stopped.fit(TRAIN)
    stopped.save(path)
    again = load(path)
    assert again.candidates == 24
    again.resume(TRAIN)
    np.testing.assert_array_equal(again.means_, screened.means_)
    np.testing.assert_array_equal(again.score_samples(NEW), screened.score_samples(NEW))
    screened.save(path, training_state=False)
    bare = load(path)
    # Its screen is built from the parameters alone.
    lost = screened.score_samples(NEW, exact=True) - bare.score_samples(NEW)
    assert 0 < lost.mean() < 0.3
    assert run(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "24 components for each row" in shown
    assert "nats a row lost" in shown
    assert run(["info", "--json", str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["candidates"] == 24
    assert 0 < facts["screening_loss"] < 1


def after(steps: int) -> Any:
    return lambda progress: progress.record["step"] >= steps


def test_a_stream_is_followed_through_a_screen():
    streamed = MFA(K, 2, batch_size=500, random_state=0, candidates=24)
    for _ in range(6):
        streamed.partial_fit(TRAIN)
    assert streamed.history_[-1]["candidates"] == 24
    whole = MFA(K, 2, batch_size=500, random_state=0, candidates=None)
    for _ in range(6):
        whole.partial_fit(TRAIN)
    assert streamed.score_samples(NEW, exact=True).mean() > whole.score(NEW) - 0.5


def test_rows_with_weights_are_learned_through_a_screen():
    times = np.arange(len(TRAIN)) % 2
    weighted = model().fit(TRAIN, sample_weight=times)
    half = model().fit(TRAIN[times == 1])
    assert weighted.score(NEW) == pytest.approx(half.score(NEW), abs=1.0)


def test_scores_are_of_all_components_unless_a_number_of_candidates_is_given():
    """A screen of training may lose many nats of other rows."""
    automatic = model(candidates="auto")
    exact = automatic.score_samples(NEW, exact=True)
    np.testing.assert_array_equal(automatic.score_samples(NEW), exact)
    automatic.candidates = 2
    assert (exact - automatic.score_samples(NEW)).mean() > 0


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_few_rows_are_scored_too(screened, rows):
    lost = screened.score_samples(NEW[:rows], exact=True) - screened.score_samples(NEW[:rows])
    assert lost.shape == (rows,)
    assert lost.max() < 1


def test_tensors_come_back_as_tensors(screened):
    scores = screened.score_samples(torch.from_numpy(NEW))
    assert isinstance(scores, torch.Tensor)
    assert isinstance(screened.transform(torch.from_numpy(NEW)), torch.Tensor)


@pytest.mark.parametrize(
    ("value", "message"),
    [("all", "must be a whole number, 'auto' or None, not 'all'"), (1, "candidates"),
     (0, "candidates"), (2.5, "candidates"), (True, "candidates")],
)  # fmt: skip
def test_invalid_candidates_are_refused_in_one_sentence(value, message):
    with pytest.raises(InputError, match=message):
        MFA(K, 2, candidates=value).fit(TRAIN)
