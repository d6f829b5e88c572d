"""Every invalid input is refused in one sentence that names the fault and a remedy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from clusters import X, fitted
from factormix import MFA, InputError
from factormix.data.sources.arrays import ArrayRows


@pytest.fixture(scope="module")
def model() -> MFA:
    return fitted(max_epochs=1)


def sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 300
    assert re.fullmatch(r".*\w.*\.", text)
    return text


def bad(value: float) -> np.ndarray:
    rows = X.copy()
    rows[7, 3] = value
    return rows


BAD_ROWS: list[tuple[Any, str]] = [
    (bad(np.inf), "infinite value in row 7, column 3"),
    (bad(-np.inf), "infinite value in row 7, column 3"),
    (bad(np.inf).astype(np.float32), "infinite value in row 7"),
    (torch.from_numpy(bad(np.inf)), "infinite value in row 7, column 3"),
    (pd.DataFrame(bad(np.inf)), "infinite value in row 7, column 3"),
    (ArrayRows(bad(np.inf)), "infinite value in row 7, column 3"),
    (X[0], r"shape \(n_samples, n_features\), not \(6,\).*X.reshape\(1, -1\)"),
    (torch.from_numpy(X[0]), r"not \(6,\).*reshape\(1, -1\)"),
    (X.reshape(-1, 2, 3), r"not \(450, 2, 3\).*X.reshape\(len\(X\), -1\)"),
    (torch.zeros(4, 2, 3), r"not \(4, 2, 3\)"),
    (np.float64(3), r"not \(\): give a table"),
    (3, "give a table"),
    (np.full((50, 6), "a"), "numbers only, not strings"),
    (np.full((50, 6), "1.5"), "numbers only, not strings"),
    ([["a", "b"], ["c", "d"]], "numbers only, not strings"),
    ("rows.npy", "is the path .*read_rows"),
    (pd.DataFrame({"a": ["x", "y"] * 25, "b": 1.0}), "not numeric: 'a'"),
    (np.full((50, 6), np.datetime64("2020-01-01")), "not values of the type datetime64"),
    (X + 1j, "Complex data not supported.*X"),
    (torch.from_numpy(X + 1j), "Complex data not supported.*X"),
    (scipy.sparse.csr_array(X), "X is sparse"),
    (torch.from_numpy(X).to_sparse(), "X is sparse"),
    (X[:0], r"0 sample\(s\) \(shape=\(0, 6\)\)"),
    (X[:, :0], r"0 feature\(s\) \(shape=\(450, 0\)\)"),
    (torch.zeros(0, 6), r"0 sample\(s\)"),
    ([[1.0, 2.0], [3.0]], "rows of the same length"),
    (None, "give a table"),
    ([[{}, 1.0]] * 50, "numbers only"),
]


@pytest.mark.parametrize(("rows", "words"), BAD_ROWS, ids=[w[:28] for _, w in BAD_ROWS])
def test_invalid_rows_are_refused_in_one_sentence(rows, words, model):
    for method in (MFA(2, 1).fit, MFA(2, 1).partial_fit, model.score_samples):
        with pytest.raises((InputError, TypeError)) as error:
            method(rows)
        assert re.search(words, sentence(error))


@pytest.mark.parametrize("thing", [{"a": 1}, object()])
def test_objects_that_are_no_numbers_are_a_type_error(thing):
    rows = X.astype(object)
    rows[3, 2] = thing
    with pytest.raises(TypeError, match="X must hold numbers only") as error:
        MFA(2, 1).fit(rows)
    sentence(error)


def test_too_few_rows_or_features():
    with pytest.raises(InputError, match=r"n_samples=9.*n_components=10.*lower n_components"):
        MFA(10, 1).fit(X[:9])
    with pytest.raises(InputError, match=r"n_samples=1, fewer than the 2 rows"):
        MFA(1, 1).fit(X[:1])
    for method in ("fit", "partial_fit"):
        for l in (6, 7):
            with pytest.raises(
                InputError, match=rf"n_factors={l} must be smaller than n_features=6"
            ) as error:
                getattr(MFA(2, l), method)(X)
            sentence(error)
    assert MFA(1, 0, max_epochs=1).fit(X[:, :1]).score(X[:, :1]) < 0
    with pytest.raises(InputError, match="n_factors=1 must be smaller than n_features=1"):
        MFA(1, 1).fit(X[:, :1])


@pytest.mark.parametrize("other", [X[:, :5], torch.zeros(3, 7), ArrayRows(X[:, :2])])
def test_rows_of_another_width(other, model):
    methods = ("score_samples", "score", "predict", "predict_proba", "transform", "posterior")
    for method in (*methods, "bic", "aic", "partial_fit", "resume"):
        with pytest.raises(ValueError, match="expecting 6 features") as error:
            getattr(model, method)(other)
        sentence(error)


BAD_OPTIONS: list[tuple[str, Any, str]] = [
    *[("n_components", v, "whole number of at least 1") for v in (0, -3, 2.5, "3", True)],
    *[("n_factors", v, "whole number of at least 0") for v in (-1, 1.0, "1", False)],
    *[("batch_size", v, "whole number of at least 1") for v in (0, -1, 10.5, "10", [10])],
    *[("max_epochs", v, "whole number of at least 1") for v in (0, -1, 1.5, "10")],
    *[
        ("max_precision", v, "positive number or None")
        for v in (0, -1.0, np.nan, np.inf, "20", True, [20.0])
    ],
    *[("dtype", v, "'float32' or 'float64'") for v in ("float16", "double", int, None, 32)],
    *[("scaling", v, "'global', 'feature' or None") for v in ("none", "minmax", 1, True)],
    *[("solver", v, "solver") for v in ("adam", "", 3, None, object())],
    *[("device", v, "this machine has") for v in ("nonsense", "cuda:99", "cpu:x", 3.5, "meta")],
    *[("random_state", v, "random_state must be") for v in (-1, "seed", 1.5, 2**32)],
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_OPTIONS)
def test_invalid_options_are_refused_in_one_sentence(name, value, words):
    for method in ("fit", "partial_fit"):
        with pytest.raises(InputError) as error:
            getattr(MFA(**{"n_components": 2, "n_factors": 1} | {name: value}), method)(X)
        text = sentence(error)
        assert name in text
        assert words in text


def test_invalid_codes_are_refused_in_one_sentence(model):
    codes, components = model.transform(X), model.predict(X)
    cases: list[tuple[Any, Any, str]] = [
        (codes, None, "needs components"),
        (codes[:, :1], components, r"Z must have the shape \(n, 2\)"),
        (codes[0], components[:1], "Z must have the shape"),
        (codes, components[:-1], "components must be 450 whole numbers between 0 and 2"),
        (codes, components + 1, "between 0 and 2"),
        (codes, components - 1, "between 0 and 2"),
        (codes, components + 0.5, "whole numbers"),
        (codes, ["a"] * len(X), "components must hold numbers only"),
        (np.full_like(codes, np.nan), components, "Z holds NaN"),
        (codes.astype(str), components, "Z must hold numbers only"),
    ]
    for Z, k, words in cases:
        with pytest.raises(InputError, match=words) as error:
            model.inverse_transform(Z, k)
        sentence(error)
    np.testing.assert_array_equal(
        model.inverse_transform(pd.DataFrame(codes), pd.Series(components)),
        model.inverse_transform(codes, components.tolist()),
    )


@pytest.mark.parametrize("n", [0, -1, 2.5, "3", None])
def test_bad_numbers_of_samples(n, model):
    with pytest.raises(InputError, match="n_samples must be a whole number") as error:
        model.sample(n)
    sentence(error)


@pytest.mark.parametrize("component", [-1, 3, 1.5, "a", True])
def test_bad_components_to_sample(component, model):
    with pytest.raises(InputError, match="component must") as error:
        model.sample(2, component=component)
    sentence(error)


def test_masked_arrays_are_refused():
    X = np.ma.masked_greater(np.random.default_rng(0).normal(size=(50, 3)), 1)
    with pytest.raises(InputError, match="masked, which is not supported"):
        MFA(2, 1).fit(X)
