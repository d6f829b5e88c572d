"""Rows that come once and may never end: partial_fit learns from them, checking on the way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from factormix import MFA, InputError
from factormix.data.batches import Batch
from factormix.data.sources.base import Rows, Source
from factormix.data.sources.streams import Stream

X = np.random.default_rng(0).normal(size=(600, 4)) * [1, 2, 3, 4] + np.arange(600)[:, None] % 2


def model(**options: Any) -> MFA:
    defaults = {"n_components": 2, "n_factors": 1, "batch_size": 50, "random_state": 0}
    return MFA(**defaults | options)


def chunks(table: Any, size: int = 70) -> Iterator[Any]:
    for first in range(0, len(table), size):
        yield table[first : first + size]


def same(a: MFA, b: MFA) -> None:
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        np.testing.assert_array_equal(np.asarray(getattr(a, name)), np.asarray(getattr(b, name)))
    assert (a.n_steps_, a.n_samples_seen_) == (b.n_steps_, b.n_samples_seen_)


@pytest.mark.parametrize("size", [1, 70, 600])
@pytest.mark.parametrize("solver", ["natural", "sgd"])
def test_a_generator_is_learned_as_the_table_it_serves(size, solver):
    expected = model(solver=solver).partial_fit(X)
    streamed = model(solver=solver).partial_fit(chunks(X, size))
    same(streamed, expected)
    same(streamed.partial_fit(chunks(X, size)), expected.partial_fit(X))
    tensors = torch.from_numpy(X)
    same(
        model(solver=solver).partial_fit(chunks(tensors, size)), model(solver=solver).partial_fit(X)
    )


def test_a_stream_is_a_source_without_a_length():
    stream = Stream(chunks(X))
    assert isinstance(stream, Source)
    assert not isinstance(stream, Rows)
    blocks = [batch.rows for batch in stream.blocks(64)]
    assert {len(block) for block in blocks[:-1]} == {64}
    np.testing.assert_array_equal(np.concatenate(blocks), X)
    assert list(stream.blocks(64)) == []


def test_a_stream_of_another_class_is_learned():
    class Sensor:
        n_features, dtype = 4, X.dtype

        def blocks(self, size: int) -> Iterator[Batch]:
            return (Batch(part) for part in chunks(X, size))

    same(model().partial_fit(Sensor()), model().partial_fit(X))


def test_a_stream_that_never_ends_is_learned_until_it_is_stopped():
    class Enough(Exception):
        pass

    def endless() -> Iterator[np.ndarray]:
        draw = np.random.default_rng(1)
        for i in count():
            if i == 300:
                raise Enough
            yield draw.normal(size=(20, 4)) + 5

    fitted = model(n_components=1)
    with pytest.raises(Enough):
        fitted.partial_fit(endless())
    assert fitted.n_samples_seen_ == 6000
    np.testing.assert_allclose(fitted.means_[0], 5, atol=0.3)


def test_values_are_checked_on_the_way():
    def broken() -> Iterator[np.ndarray]:
        for i, part in enumerate(chunks(X, 100)):
            bad = part.copy()
            if i == 4:
                bad[20, 2] = np.inf
            yield bad

    with pytest.raises(InputError, match="X has an infinite value in row 420, column 2"):
        model().partial_fit(broken())
    fitted = model().partial_fit(X)
    steps = fitted.n_steps_
    with pytest.raises(InputError, match="X has an infinite value in row 420, column 2"):
        fitted.partial_fit(broken())
    # What came before it is learned, and the model is whole.
    assert fitted.n_steps_ == steps + 8
    assert np.isfinite(fitted.score(X))


def test_weights_travel_in_batches():
    weights = np.arange(600) % 4 / 2.0
    batches = (Batch(X[i : i + 70], weights[i : i + 70]) for i in range(0, 600, 70))
    same(model().partial_fit(batches), model().partial_fit(X, sample_weight=weights))


def test_frames_of_a_stream_are_put_in_order():
    frame = pd.DataFrame(X, columns=list("abcd"))

    def mixed() -> Iterator[pd.DataFrame]:
        for i, part in enumerate(chunks(frame)):
            yield part[list("dbca")] if i % 2 else part

    fitted = model().partial_fit(mixed())
    same(fitted, model().partial_fit(X))
    assert fitted.feature_names_in_.tolist() == list("abcd")
    turned = chunks(frame[list("cadb")])
    same(fitted.partial_fit(turned), model().partial_fit(frame).partial_fit(frame))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "ends before its first row"),
        ([X, X[:, :3]], "X has 3 features, but the stream is expecting 4 features"),
        ([X, torch.from_numpy(X)], "differ in kind"),
        ([X, Batch(X, np.ones(600))], "differ in kind"),
        ([Batch(X, np.zeros(600))], "no row of the stream X has a positive weight"),
        ([Batch(X, np.ones(5))], "a batch of the stream X has wrong weights"),
        ([Batch(X, np.full(600, -1.0))], "wrong weights: give one for each row, finite"),
        ([X[:5]], "n_samples=5, too few for the first call of partial_fit"),
        ([X[0]], "must have the shape"),
    ],
)
def test_bad_streams_get_one_sentence(tables, words):
    with pytest.raises(InputError, match=words) as error:
        model().partial_fit(iter(tables))
    assert "\n" not in str(error.value)


def test_only_partial_fit_takes_a_stream():
    fitted = model().partial_fit(X)
    for method in (fitted.fit, fitted.score, fitted.score_samples, fitted.resume):
        for stream in (chunks(X), Stream(chunks(X))):
            with pytest.raises(InputError, match="only partial_fit learns from a stream"):
                method(stream)
    with pytest.raises(InputError, match="sample_weight needs rows of known number"):
        fitted.partial_fit(chunks(X), sample_weight=np.ones(600))


def test_a_solver_that_needs_passes_is_refused_before_any_row_is_read():
    def unread() -> Iterator[Any]:
        pytest.fail("a row was read")
        yield X

    with pytest.raises(InputError, match="'em' needs passes over data of known length: use fit"):
        model(solver="em").partial_fit(unread())
