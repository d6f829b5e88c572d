"""The figure of reasons: what it draws for images and for tables, and what it turns down."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from clusters import X, fitted
from factormix import MFA, InputError
from factormix.plotting import figure_png, plot_reasons


def test_images_are_drawn_with_what_was_expected_and_contributions():
    digits = load_digits().data
    model = MFA(4, 2, max_epochs=3, random_state=0).fit(digits)
    told = model.explain(digits[:5])
    figure = plot_reasons(told, image_shape=(8, 8))
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) == 3
    values, expected, split = (axes.images[0].get_array().compressed() for axes in shown)
    np.testing.assert_allclose(np.sort(values), np.sort(told.values.ravel()), atol=1e-6)
    np.testing.assert_allclose(np.sort(expected), np.sort(told.expected.ravel()), atol=1e-6)
    centred = told.contributions - np.median(told.contributions)
    np.testing.assert_allclose(np.sort(split), np.sort(centred.ravel()), atol=1e-6)
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_colour_images_have_one_contribution_for_each_pixel():
    rng = np.random.default_rng(0)
    model = MFA(2, 1, max_epochs=2, random_state=0).fit(rng.random((100, 8 * 8 * 3)))
    figure = plot_reasons(model.explain(rng.random((2, 192))), image_shape=(8, 8, 3))
    assert figure.axes[2].images[0].get_array().compressed().size == 2 * 64


def test_columns_are_bars_with_values_and_expectations():
    told = fitted(X).explain(X[:9])
    figure = plot_reasons(told, top=3)
    assert len(figure.axes) == 4
    axes = figure.axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, np.sort(told.contributions[0])[:3])
    first = told.ranking()[0, 0]
    label = axes.get_yticklabels()[0].get_text()
    assert label.startswith(f"x{first} = {told.values[0, first]:.4g}")
    assert f"{told.expected[0, first]:.4g} ±" in label


def test_no_rows_and_a_wrong_shape_are_told():
    told = fitted(X).explain(X[:2])
    with pytest.raises(InputError, match="no rows"):
        plot_reasons(told[:0])
    with pytest.raises(InputError, match="image_shape"):
        plot_reasons(told, image_shape=(2, 2))
