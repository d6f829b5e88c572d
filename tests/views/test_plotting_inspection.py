"""Figures that inspect a model: nearest rows, overlaps, bins of samples, and reasons."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

pytest.importorskip("matplotlib")

from clusters import X, fitted
from factormix import MFA, InputError, inspection
from factormix.plotting import (
    figure_png,
    plot_bins,
    plot_loadings,
    plot_nearest,
    plot_overlaps,
    plot_reasons,
)


@pytest.fixture(scope="module")
def model() -> MFA:
    """A mixture of three components for the rows X (450, 6)."""
    return fitted(solver="natural")


def test_nearest_rows_lie_beside_their_component(model):
    found = inspection.nearest_rows(model, X, 4)
    axes = plot_nearest(model, X, found).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert [label.split()[0] for label in labels] == ["0", "1", "2"]
    assert len(plot_nearest(model, X, found, components=[1]).axes[0].get_yticklabels()) == 1
    with pytest.raises(InputError, match="not the rows that nearest was found in"):
        plot_nearest(model, X[:3], found)


def test_nearest_rows_can_be_images():
    images = np.random.default_rng(0).random((60, 64))
    model = MFA(2, 1, random_state=0, max_epochs=2).fit(images)
    found = inspection.nearest_rows(model, images, 3)
    figure = plot_nearest(model, images, found, image_shape=(8, 8))
    mosaic = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(mosaic[:8, -8:].ravel(), images[found.rows[0, -1]])
    assert figure_png(figure).startswith(b"\x89PNG")


def test_overlaps_and_distances_have_different_scales(model):
    close = plot_overlaps(inspection.overlaps(model)).axes[0]
    assert close.get_title(loc="left") == "Overlap of components"
    assert close.images[0].get_clim() == (0, 1)
    far = plot_overlaps(inspection.distances(model)).axes[0]
    assert far.get_title(loc="left") == "Distance of components"
    assert far.images[0].get_clim()[1] == pytest.approx(inspection.distances(model).max())
    with pytest.raises(InputError, match=r"shape \(K, J\)"):
        plot_overlaps([1.0, 2.0])


def test_bins_that_differ_are_marked():
    found = inspection.ndb(X, X[:300], 9)
    axes = plot_bins(found).axes[0]
    assert f"{found.n_different} of 9 bins differ" in axes.get_title(loc="left")
    marked = next(line for line in axes.lines if line.get_label() == "different")
    assert marked.get_xdata().tolist() == np.flatnonzero(found.different).tolist()


def test_rotated_loadings_can_be_drawn(model):
    assert len(plot_loadings(inspection.varimax(model), kind="loadings").axes) >= 2


def test_reasons_of_images_show_expected_images_and_contributions():
    digits = load_digits().data
    explanation = MFA(4, 2, max_epochs=1, random_state=0).fit(digits).explain(digits[:5])
    figure = plot_reasons(explanation, image_shape=(8, 8))
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 3
    values, expected, parts = (axes.images[0].get_array().compressed() for axes in panels)
    np.testing.assert_allclose(np.sort(values), np.sort(explanation.values.ravel()), atol=1e-6)
    np.testing.assert_allclose(np.sort(expected), np.sort(explanation.expected.ravel()), atol=1e-6)
    centred = explanation.contributions - np.median(explanation.contributions)
    np.testing.assert_allclose(np.sort(parts), np.sort(centred.ravel()), atol=1e-6)
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_colour_images_have_one_contribution_per_pixel():
    rng = np.random.default_rng(0)
    model = MFA(2, 1, max_epochs=2, random_state=0).fit(rng.random((100, 8 * 8 * 3)))
    figure = plot_reasons(model.explain(rng.random((2, 192))), image_shape=(8, 8, 3))
    assert figure.axes[2].images[0].get_array().compressed().size == 2 * 64


def test_reasons_of_columns_are_bars_with_values_and_expected_values(model):
    explanation = model.explain(X[:9])
    figure = plot_reasons(explanation, top=3)
    assert len(figure.axes) == 4
    axes = figure.axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, np.sort(explanation.contributions[0])[:3])
    first = explanation.ranking()[0, 0]
    label = axes.get_yticklabels()[0].get_text()
    assert label.startswith(f"x{first} = {explanation.values[0, first]:.4g}")
    assert f"{explanation.expected[0, first]:.4g} ±" in label


def test_reasons_need_rows_and_a_shape_that_fits(model):
    explanation = model.explain(X[:2])
    with pytest.raises(InputError, match="no rows"):
        plot_reasons(explanation[:0])
    with pytest.raises(InputError, match="image_shape"):
        plot_reasons(explanation, image_shape=(2, 2))
