"""Data sets and loaders of other packages, and iterables, in fit and in partial_fit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from factormix import MFA, InputError
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows, as_source
from factormix.data.sources.streams import Stream

X = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
X[:, 0] = np.arange(600) / 100
LABELS = np.arange(600) % 3


def model(**options: Any) -> MFA:
    defaults = {"n_components": 2, "n_factors": 1, "batch_size": 50, "random_state": 0}
    return MFA(**defaults | {"max_epochs": 3} | options)


class Images(Dataset):
    """Samples (1, 2, 2) with labels."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X[i].reshape(1, 2, 2)), int(LABELS[i])


class Sensor(IterableDataset):
    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(X)


class Tables:
    """An iterable that can be begun again."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return (X[i : i + 70] for i in range(0, 600, 70))


class Labelled(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.from_numpy(x), 0) for x in X)


def hugging(**options: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({f"c{j}": X[:, j] for j in range(4)}, **options)


def vectors() -> Any:
    datasets = pytest.importorskip("datasets")
    kind = datasets.Features({"vector": datasets.List(datasets.Value("float32"))})
    return datasets.Dataset.from_dict({"vector": X.tolist()}, features=kind)


SOURCES: dict[str, Any] = {
    "torch data set": lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS)),
    "torch images": Images,
    "torch iterable": Sensor,
    "torch iterable with labels": Labelled,
    "torch loader": lambda: DataLoader(Images(), batch_size=64),
    "torch loader of tensors": lambda: DataLoader(TensorDataset(torch.from_numpy(X)), 50),
    "torch loader without batches": lambda: DataLoader(Images(), batch_size=None),
    "iterable": Tables,
    "list of tables": lambda: [X[:200], X[200:450], X[450:]],
    "list of frames": lambda: [pd.DataFrame(X[:200]), pd.DataFrame(X[200:])],
    "hugging face": hugging,
    "hugging face lists": vectors,
    "hugging face stream": lambda: hugging().to_iterable_dataset(),
}


@pytest.mark.parametrize("name", SOURCES)
def test_all_are_rows_that_can_be_read_again(name):
    rows = as_rows(SOURCES[name]())
    assert isinstance(rows, Rows)
    assert (rows.n_rows, rows.n_features) == (600, 4)
    assert "float32" in str(rows.dtype)
    for _ in range(2):
        got = np.concatenate([np.asarray(batch.rows) for batch in rows.blocks(70)])
        np.testing.assert_array_equal(got, X)

    def order(epoch: int, start: int = 0) -> np.ndarray:
        batches = rows.shuffled(50, seed=0, epoch=epoch, start=start)
        return np.concatenate([np.asarray(batch.rows)[:, 0] for batch in batches])

    np.testing.assert_array_equal(order(0), order(0))
    np.testing.assert_array_equal(order(0)[350:], order(0, start=7))
    np.testing.assert_array_equal(np.sort(order(1)), X[:, 0])
    assert (order(0) != order(1)).mean() > 0.9
    assert (np.abs(np.diff(order(0))) > 0.1).mean() > 0.8, "mixed well"


@pytest.mark.parametrize("name", SOURCES)
def test_partial_fit_learns_them_in_their_order(name):
    expected = model().partial_fit(X)
    np.testing.assert_allclose(
        np.asarray(model().partial_fit(SOURCES[name]()).means_), expected.means_, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["torch images", "torch loader", "iterable", "hugging face"])
def test_a_stopped_fit_resumes(name):
    whole = model().fit(SOURCES[name]())
    assert whole.n_steps_ == 36
    stopped = model(callbacks=[lambda progress: progress.record["step"] >= 17]).fit(SOURCES[name]())
    stopped.set_params(callbacks=()).resume(SOURCES[name]())
    np.testing.assert_array_equal(np.asarray(stopped.means_), np.asarray(whole.means_))
    assert whole.score(SOURCES[name]()) == pytest.approx(whole.score(as_rows(X)), rel=1e-5)


def test_weights_follow_the_rows_of_a_data_set():
    weights = np.where(np.arange(600) < 300, 0.0, 2.0)
    for name in ("torch images", "iterable", "hugging face"):
        rows: Any = as_rows(SOURCES[name](), weights)
        seen = np.concatenate(
            [np.asarray(batch.rows)[:, 0] for batch in rows.shuffled(50, seed=0, epoch=0)]
        )
        np.testing.assert_array_equal(np.sort(seen), X[300:, 0])


def test_rows_of_a_data_set_can_be_pickled():
    """A callback keeps its held-out rows, and a model may be pickled with its callbacks."""
    rows = as_rows(TensorDataset(torch.from_numpy(X)))
    again = pickle.loads(pickle.dumps(rows))
    np.testing.assert_array_equal(next(again.blocks(600)).rows, X)


def test_names_of_columns_come_along():
    fitted = model().fit(hugging())
    assert fitted.feature_names_in_.tolist() == ["c0", "c1", "c2", "c3"]
    turned = hugging().select_columns(["c3", "c1", "c0", "c2"])
    np.testing.assert_allclose(
        fitted.score_samples(as_rows(turned)), fitted.score_samples(as_rows(hugging()))
    )


def test_bytes_stay_bytes_until_the_batch():
    images = torch.arange(60, dtype=torch.uint8).reshape(20, 3)
    rows = as_rows(TensorDataset(images))
    assert rows.dtype == torch.uint8
    assert {batch.rows.dtype for batch in rows.shuffled(7, seed=0, epoch=0)} == {torch.uint8}
    halves = as_rows([X[:200].astype(np.float16), X[200:].astype(np.float16)])
    assert {batch.rows.dtype for batch in halves.shuffled(70, seed=0, epoch=0)} == {
        np.dtype(np.float16)
    }


def test_unusable_data_raises_one_sentence():
    datasets = pytest.importorskip("datasets")
    words = datasets.Dataset.from_dict({"text": ["a", "b"]})
    with pytest.raises(InputError, match="has a column 'text' of type string"):
        as_rows(words)
    with pytest.raises(InputError, match="no rows"):
        as_rows(hugging().select([]))

    class Ragged(Dataset):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.zeros(3 if i == 7 else 4)

    with pytest.raises(InputError, match="give samples of one shape"):
        model().fit(Ragged())
    wrong = X.copy()
    wrong[400, 1] = np.inf
    with pytest.raises(InputError, match="infinite value"):
        model().fit(TensorDataset(torch.from_numpy(wrong)))
    with pytest.raises(InputError, match="infinite value in row 400"):
        model().fit([wrong[:300], wrong[300:]])


def broken(kind: str) -> Iterator[Any]:
    """Serve 600 rows with one thing that is wrong at row 200."""
    yield X[:200]
    if kind == "infinite":
        wrong = X[200:300].copy()
        wrong[[3, 70], 1] = np.inf
        yield wrong
    elif kind == "width":
        yield X[200:300, :3]
    elif kind == "words":
        yield np.full((100, 4), "x")
    yield X[300:]


class Failing:
    """An iterator that raises several times and then continues."""

    def __init__(self, times: int) -> None:
        self._tables, self._times = iter([X[:200], X[200:]]), times
        self._served = 0

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> np.ndarray:
        self._served += 1
        if 2 <= self._served < 2 + self._times:
            raise ConnectionError("no answer")
        return next(self._tables)


@pytest.mark.parametrize(
    ("kind", "message", "skipped"),
    [
        ("infinite", "X has an infinite value in row 203, column 1", 2),
        (
            "width",
            "after 200 rows of the stream: X has 3 features, but the stream is expecting",
            100,
        ),
        ("words", "after 200 rows of the stream: X must hold numbers only", 100),
    ],
)
def test_a_bad_row_stops_with_its_place_or_is_skipped_and_counted(kind, message, skipped):
    learning = model()
    learning.partial_fit(X[:150])
    before = learning.n_samples_seen_
    with pytest.raises(InputError, match=message):
        learning.partial_fit(broken(kind))
    # Rows before the fault are learned, and nothing of it.
    assert learning.n_samples_seen_ == before + 200
    assert np.isfinite(learning.score(X))
    stream = Stream(broken(kind), on_bad="skip")
    learning = model().partial_fit(stream)
    assert (stream.skipped, stream.position) == (skipped, 600)
    assert learning.n_samples_seen_ == 600 - skipped
    gone = [203, 270] if kind == "infinite" else range(200, 300)
    good = np.delete(X, list(gone), axis=0)
    np.testing.assert_array_equal(learning.means_, model().partial_fit(good).means_)


def test_an_iterator_that_raises_stops_with_its_place_or_continues():
    learning = model()
    learning.partial_fit(X[:150])
    with pytest.raises(ConnectionError, match="no answer") as caught:
        learning.partial_fit(Failing(1))
    assert caught.value.__notes__ == ["after 200 rows of the stream X"]
    assert learning.n_samples_seen_ == 350
    stream = Stream(Failing(3), on_bad="skip")
    learning = model().partial_fit(stream)
    assert stream.skipped == 3
    np.testing.assert_array_equal(learning.means_, model().partial_fit(X).means_)
    with pytest.raises(ConnectionError):
        model().partial_fit(Stream(Failing(50), on_bad="skip"))
    with pytest.raises(InputError, match="on_bad must be 'stop' or 'skip'"):
        Stream(iter([X]), on_bad="drop")


def test_a_sequence_of_rows_is_still_a_table():
    assert as_source(X.tolist()).n_features == 4
    assert as_rows([[1, 2], [3, 4]]).n_rows == 2
