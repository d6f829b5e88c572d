"""Names of columns and shapes of images: one home, read from every kind of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from factormix import MFA, InputError, load
from factormix.callbacks import EarlyStopping
from factormix.data.batches import Batch
from factormix.data.readers import read_rows
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.files import FileRows

X = np.random.default_rng(0).normal(size=(120, 4)) * [1, 10, 100, 1000]
FRAME = pd.DataFrame(X, columns=list("abcd"))
TURNED = FRAME[list("cadb")]


def model(**options: Any) -> MFA:
    return MFA(**{"n_components": 2, "n_factors": 1, "max_epochs": 2, "random_state": 0} | options)


class Foreign:
    """Rows of another class, with names."""

    n_rows, n_features, dtype = 120, 4, X.dtype
    feature_names = ("c", "a", "d", "b")

    def blocks(self, size: int) -> Iterator[Batch]:
        return ArrayRows(TURNED.to_numpy()).blocks(size)

    def shuffled(self, batch_size: int, **order: int) -> Iterator[Batch]:
        return ArrayRows(TURNED.to_numpy()).shuffled(batch_size, **order)


def turned(kind: str, folder: Path) -> Any:
    if kind == "frame":
        return TURNED
    if kind == "csv":
        TURNED.to_csv(folder / "x.csv", index=False)
        return read_rows(folder / "x.csv")
    if kind == "parquet":
        TURNED.to_parquet(folder / "x.parquet")
        return read_rows(folder / "x.parquet")
    if kind == "npy":
        np.save(folder / "x.npy", TURNED.to_numpy())
        return FileRows(folder / "x.npy", feature_names=list("cadb"))
    if kind == "tensor":
        return ArrayRows(torch.tensor(TURNED.to_numpy()), feature_names=list("cadb"))
    return Foreign()


@pytest.mark.parametrize("kind", ["frame", "csv", "parquet", "npy", "tensor", "foreign"])
def test_the_same_names_in_another_order_are_put_in_order(kind, tmp_path):
    rows, weights = turned(kind, tmp_path), np.arange(120.0)
    fitted = model().fit(FRAME)
    expected = fitted.score_samples(FRAME)
    np.testing.assert_array_equal(np.asarray(fitted.score_samples(rows)), expected)
    np.testing.assert_array_equal(np.asarray(fitted.predict(rows)), fitted.predict(FRAME))
    np.testing.assert_array_equal(np.asarray(fitted.transform(rows)), fitted.transform(FRAME))
    assert fitted.bic(rows) == fitted.bic(FRAME)
    assert fitted.score(rows, sample_weight=weights) == fitted.score(FRAME, None, weights)
    # A resumed fit, and a stream.
    if kind not in ("npy", "csv", "parquet"):
        np.testing.assert_array_equal(fitted.resume(rows).means_, model().fit(FRAME).means_)
    one, other = (model().fit(FRAME).partial_fit(given) for given in (rows, FRAME))
    np.testing.assert_array_equal(one.means_, other.means_)
    # And the reverse: a model of these rows has their names.
    learned = model().fit(rows)
    assert learned.feature_names_in_.tolist() == list("cadb")
    scores = learned.score_samples(rows)
    np.testing.assert_array_equal(learned.score_samples(FRAME), np.asarray(scores))


def test_held_out_rows_are_put_in_order():
    levels = []
    for held_out in (FRAME, TURNED):
        watch = EarlyStopping(held_out)
        fitted = model(callbacks=[watch], max_epochs=20).fit(FRAME)
        levels.append([record.get("held_out") for record in fitted.history_])
    assert levels[0] == levels[1]
    assert any(level is not None for level in levels[0])
    with pytest.raises(InputError, match="held_out lacks 'a' and has 'e', unseen at fit time"):
        model(callbacks=[EarlyStopping(FRAME.rename(columns={"a": "e"}))]).fit(FRAME)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (FRAME.rename(columns={"a": "e"}), "X lacks 'a' and has 'e', unseen at fit time; give"),
        (FRAME[list("abc")], "X lacks 'd'; give the same columns"),
        (FRAME.set_axis(list("abcc"), axis=1), "X lacks 'd'; give"),
        (FRAME.set_axis(["a", "b", 2, 3], axis=1), "only supported if all .* string names"),
    ],
)
def test_other_names_raise_one_sentence(frame, words):
    fitted = model().fit(FRAME)
    for method in (fitted.score_samples, fitted.predict, fitted.partial_fit, fitted.resume):
        with pytest.raises(InputError, match=words) as error:
            method(frame)
        assert "\n" not in str(error.value)


def test_columns_that_a_model_does_not_know_are_ignored():
    fitted = model().fit(FRAME)
    wider = TURNED.assign(e=0.0, f=1.0)
    np.testing.assert_array_equal(fitted.score_samples(wider), fitted.score_samples(FRAME))
    rows = ArrayRows(wider.to_numpy(), feature_names=list(wider.columns))
    np.testing.assert_array_equal(fitted.score_samples(rows), fitted.score_samples(FRAME))


def test_a_frame_with_text_gets_one_sentence_that_names_the_columns():
    people = FRAME.assign(
        name="Ann", day=pd.Timestamp("2024-01-01"), town=pd.Categorical(["x"] * 120)
    )
    with pytest.raises(InputError) as caught:
        model().fit(people)
    assert str(caught.value) == (
        "X has columns that are not numeric: 'name', 'day', 'town'; leave them out by"
        " X.select_dtypes(['number', 'bool']), or encode categories by pandas.get_dummies(X)."
    )
    # A fitted model knows its columns.
    fitted = model().fit(people.drop(columns=["name", "day", "town"]))
    np.testing.assert_array_equal(fitted.score_samples(people), fitted.score_samples(FRAME))
    fitted.partial_fit(people)
    dates = FRAME[["a"]].assign(day=pd.Timestamp("2024-01-01"))
    with pytest.raises(InputError, match="columns that are not numeric: 'day'; leave them out by"):
        model().fit(dates)


def test_names_that_come_twice_must_be_in_order():
    twice = FRAME.set_axis(["a", "a", "b", "c"], axis=1)
    fitted = model().fit(twice)
    assert np.isfinite(fitted.score(twice))
    with pytest.raises(InputError, match="several columns of the same name"):
        fitted.score(twice.iloc[:, [2, 0, 1, 3]])


def test_rows_without_names_go_by_position():
    fitted = model().fit(FRAME)
    expected = fitted.score_samples(FRAME)
    np.testing.assert_array_equal(fitted.score_samples(ArrayRows(X)), expected)
    np.testing.assert_array_equal(fitted.score_samples(torch.from_numpy(X)), expected)
    with pytest.warns(UserWarning, match="X does not have valid feature names, but MFA was fitted"):
        np.testing.assert_array_equal(fitted.score_samples(X), expected)
    plain = model().fit(X)
    with pytest.warns(UserWarning, match="X has feature names, but MFA was fitted without"):
        np.testing.assert_array_equal(plain.score_samples(FRAME), expected)


def test_numbers_are_names_too():
    years = FRAME.set_axis([2018, 2019, 2020, 2021], axis=1)
    fitted = model().fit(years)
    assert fitted.feature_names_in_.tolist() == ["2018", "2019", "2020", "2021"]
    expected = fitted.score_samples(years)
    np.testing.assert_array_equal(fitted.score_samples(years[years.columns[::-1]]), expected)
    # The labels that a frame has without being asked are no names, but say where a column belongs.
    plain = model().fit(pd.DataFrame(X))
    assert not hasattr(plain, "feature_names_in_")
    with pytest.warns(UserWarning, match="X has feature names"):
        scores = plain.score_samples(pd.DataFrame(X)[[3, 1, 0, 2]])
    np.testing.assert_array_equal(scores, expected)


def test_the_shape_of_images_is_remembered(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, size=(60, 4, 3), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "turned.npz", images.transpose(0, 2, 1))
    fitted = model().fit(read_rows(tmp_path / "x.npy"))
    assert fitted.image_shape_ == (4, 3)
    with pytest.raises(InputError, match="images of 3 x 4, but MFA is expecting images of 4 x 3"):
        fitted.score(read_rows(tmp_path / "turned.npz"))
    fitted.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    assert copy.image_shape_ == (4, 3)
    # Rows that are not known to be images pass.
    flat = images.reshape(60, -1)
    np.testing.assert_array_equal(copy.score_samples(flat), fitted.score_samples(flat))
    assert model().fit(X).image_shape_ is None
    assert fitted.fit(X).image_shape_ is None


def test_scores_and_components_come_from_one_evaluation():
    fitted = model().fit(FRAME)
    scores, components = fitted.score_and_predict(TURNED)
    np.testing.assert_array_equal(scores, fitted.score_samples(FRAME))
    np.testing.assert_array_equal(components, fitted.predict(FRAME))
