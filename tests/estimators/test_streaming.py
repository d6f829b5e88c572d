"""Evaluate, then train: every batch is scored by the model that has not learned it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import pytest

import factormix
from factormix import MFA, InputError, load, stream
from factormix.callbacks import Checkpoints
from factormix.data.readers import read_rows
from factormix.solvers import NaturalGradient

X = np.random.default_rng(0).normal(size=(1000, 3)) @ np.diag([1, 2, 3])
X[::2] += 4


def model(**options: Any) -> MFA:
    defaults = {"n_components": 2, "n_factors": 1, "batch_size": 100, "random_state": 0}
    return MFA(**defaults | options)


def chunks(table: Any, size: int = 70) -> Iterator[Any]:
    for first in range(0, len(table), size):
        yield table[first : first + size]


def test_scores_come_from_the_model_before_the_batch():
    watched, by_hand = model(), model()
    parts = list(stream(watched, chunks(X), callback_seconds=0))
    assert [len(part.scores) for part in parts] == [100] * 10
    for i, part in enumerate(parts):
        batch = X[100 * i : 100 * i + 100]
        np.testing.assert_array_equal(part.rows, batch)
        assert part.first == 100 * i
        if i == 0:
            assert np.isnan(part.scores).all()
            assert (part.components == -1).all()
        else:
            np.testing.assert_array_equal(part.scores, by_hand.score_samples(batch))
            np.testing.assert_array_equal(part.components, by_hand.predict(batch))
        by_hand.partial_fit(batch)
    np.testing.assert_array_equal(watched.means_, by_hand.means_)
    assert watched.n_steps_ == by_hand.n_steps_ == 10
    assert watched.position_ == 1000


def test_a_batch_is_learned_when_the_next_is_asked_for():
    fitted = model().partial_fit(X)
    steps = fitted.n_steps_
    parts = stream(fitted, chunks(X))
    next(parts)
    assert fitted.n_steps_ == steps
    next(parts)
    assert fitted.n_steps_ == steps + 1
    assert fitted.position_ == 100
    parts.close()
    assert fitted.n_steps_ == steps + 1


def test_single_rows_begin_a_model_when_there_are_enough():
    watched = model(batch_size=1)
    parts = list(stream(watched, (row[None] for row in X[:150])))
    assert len(parts) == 150
    assert np.isnan([part.scores[0] for part in parts[:100]]).all()
    assert np.isfinite([part.scores[0] for part in parts[100:]]).all()
    with pytest.raises(InputError, match="too few for the first call of partial_fit"):
        list(stream(model(), X[:5]))


def test_a_stream_that_never_ends():
    draw = np.random.default_rng(1)
    parts = stream(model(), (draw.normal(size=(50, 3)) for _ in count()))
    for _ in range(30):
        part = next(parts)
    assert part.scores.mean() > -6


@pytest.mark.parametrize("solver", ["natural", "sgd"])
def test_a_run_that_was_cut_off_goes_on_where_it_stood(tmp_path, solver):
    whole = model(solver=solver)
    list(stream(whole, chunks(X)))
    first = model(solver=solver)
    for part in stream(first, chunks(X)):
        if part.first == 400:
            first.save(tmp_path / "m.safetensors")
            break
    again = load(tmp_path / "m.safetensors")
    assert again.position_ == 400
    parts = list(stream(again, chunks(X), start=again.position_))
    assert parts[0].first == 400
    np.testing.assert_array_equal(again.means_, whole.means_)
    assert again.position_ == 1000


def test_callbacks_are_called_and_checkpoints_saved(tmp_path):
    seen: list[tuple[int, bool]] = []

    def look(progress: Any) -> bool:
        seen.append((progress.model.position_, progress.last))
        return progress.model.position_ >= 700

    watched = model(callbacks=[look, Checkpoints(tmp_path, 0)])
    list(stream(watched, chunks(X), callback_seconds=0))
    assert seen == [(n, False) for n in range(100, 800, 100)] + [(700, True)]
    again = load(tmp_path)
    assert again.position_ == 700
    list(stream(again, chunks(X), start=700))
    whole = model()
    list(stream(whole, chunks(X)))
    np.testing.assert_array_equal(again.means_, whole.means_)


@pytest.mark.parametrize("n", [250, 300])
def test_bad_rows_stop_with_their_place_or_are_skipped(n):
    wrong = X.copy()
    wrong[n, 1] = np.inf
    for serve in (lambda: wrong, lambda: chunks(wrong), lambda: pd.DataFrame(wrong)):
        watched = model()
        with pytest.raises(InputError, match=f"infinite value in row {n}, column 1"):
            list(stream(watched, serve()))
        assert watched.n_samples_seen_ == n // 100 * 100, "all before it that was whole"
        assert np.isfinite(watched.score(X))
        watched = model()
        parts = list(stream(watched, serve(), on_bad="skip"))
        assert parts[-1].skipped == 1
        assert watched.n_samples_seen_ == watched.position_ == 999
        good = model()
        list(stream(good, np.delete(X, n, axis=0)))
        np.testing.assert_array_equal(watched.means_, good.means_)


def test_a_damaged_file_of_a_folder_is_skipped_and_counted(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for i in range(4):
        part = X[250 * i : 250 * i + 250]
        table = pa.table({f"c{j}": part[:, j] for j in range(3)})
        pq.write_table(table, tmp_path / f"{i}.parquet", compression="none", use_dictionary=False)
    path = tmp_path / "2.parquet"
    content = bytearray(path.read_bytes())
    content[:2000] = bytes(2000)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"2\.parquet cannot be read from row 0 on"):
        list(stream(model(), read_rows(tmp_path, in_memory_bytes=0)))
    watched = model()
    parts = list(stream(watched, read_rows(tmp_path, in_memory_bytes=0), on_bad="skip"))
    assert parts[-1].skipped == 250
    assert watched.n_samples_seen_ == 750
    path.write_bytes(content[:3000])
    with pytest.raises(InputError, match=r"2\.parquet is not a readable Parquet file"):
        read_rows(tmp_path)
    with pytest.warns(UserWarning, match=r"2\.parquet is left out"):
        rows = read_rows(tmp_path, on_bad="skip")
    assert rows.n_rows == 750


def test_a_generator_that_fails_is_not_taken_for_one_that_ends():
    def failing() -> Iterator[np.ndarray]:
        yield X[:300]
        raise ConnectionError("no answer")

    for on_bad in ("stop", "skip"):
        watched = model()
        with pytest.raises(ConnectionError, match="no answer") as caught:
            list(stream(watched, failing(), on_bad=on_bad))
        assert "after 300 rows" in caught.value.__notes__[0]
        assert watched.n_samples_seen_ == 300


def test_a_model_of_fit_follows_the_stream_that_comes_after():
    """Units of a fit stay as they are until a stream shows other ones."""
    draw = np.random.default_rng(2)
    fitted = model(max_epochs=5, solver=NaturalGradient(forgetting=0.05)).fit(X)
    later = (1e4 + 1e3 * draw.normal(size=(200, 3)) for _ in range(100))
    last = [part.scores.mean() for part in stream(fitted, later)][-1]
    best = -3 * (0.5 * np.log(2 * np.pi * np.e) + np.log(1e3))
    assert last > best - 1


@pytest.mark.parametrize(
    "first",
    [
        np.hstack([np.random.default_rng(5).normal(size=(300, 2)), np.full((300, 1), 7.0)]),
        np.random.default_rng(6).normal(size=(100, 3)),
    ],
    ids=["a column is constant", "a hundred rows of N(0, 1)"],
)
def test_uninformative_first_rows_are_overcome(first):
    draw = np.random.default_rng(3)
    rest = 1e3 * draw.normal(size=(12_000, 3))
    parts = list(stream(MFA(3, 1, random_state=0), np.concatenate([first, rest]), batch_size=100))
    best = -3 * (0.5 * np.log(2 * np.pi * np.e) + np.log(1e3))
    assert np.mean([part.scores.mean() for part in parts[-20:]]) > best - 0.5


def test_invalid_arguments_are_refused():
    with pytest.raises(InputError, match="stream trains an MFA, not a list"):
        stream([], X)
    for options in ({"batch_size": 0}, {"start": -1}, {"on_bad": "drop"}):
        with pytest.raises(InputError, match=next(iter(options))):
            list(stream(model(), chunks(X), **options))
    with pytest.raises(InputError, match="2 features, but MFA is expecting 3"):
        stream(model().partial_fit(X), X[:, :2])
    with pytest.raises(InputError, match="needs passes"):
        list(stream(model(solver="em", batch_size=None), X))


def test_the_door_is_open():
    assert factormix.stream is stream
    assert "stream" in dir(factormix)
