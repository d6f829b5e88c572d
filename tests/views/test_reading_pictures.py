"""Pictures for reading a model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from clusters import X, fitted
from factormix import InputError, reading
from factormix.plotting import (
    figure_png,
    plot_all_loadings,
    plot_bins,
    plot_nearest,
    plot_overlaps,
)


def test_nearest_rows_beside_their_component():
    model = fitted(solver="natural")
    found = reading.nearest_rows(model, X, 4)
    axes = plot_nearest(model, X, found).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert [label.split()[0] for label in labels] == ["0", "1", "2"]
    assert len(plot_nearest(model, X, found, components=[1]).axes[0].get_yticklabels()) == 1
    with pytest.raises(InputError, match="not the rows that nearest was found in"):
        plot_nearest(model, X[:3], found)


def test_images_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    images = rng.random((60, 64))
    model = fitted(images, n_components=2, n_factors=1, solver="natural", max_epochs=2)
    found = reading.nearest_rows(model, images, 3)
    figure = plot_nearest(model, images, found, image_shape=(8, 8))
    assert figure_png(figure).startswith(b"\x89PNG")


def test_overlaps_and_distances_have_their_own_scale():
    model = fitted(solver="natural")
    close = plot_overlaps(reading.overlaps(model)).axes[0]
    assert close.get_title(loc="left") == "Overlap of components"
    assert close.images[0].get_clim() == (0, 1)
    far = plot_overlaps(reading.distances(model)).axes[0]
    assert far.get_title(loc="left") == "Distance of components"
    assert far.images[0].get_clim()[1] == pytest.approx(reading.distances(model).max())
    with pytest.raises(InputError, match=r"shape \(K, J\)"):
        plot_overlaps([1.0, 2.0])


def test_bins_that_differ_are_marked():
    found = reading.ndb(X, X[:300], 9)
    axes = plot_bins(found).axes[0]
    assert f"{found.n_different} of 9 bins differ" in axes.get_title(loc="left")
    marked = next(line for line in axes.lines if line.get_label() == "different")
    assert marked.get_xdata().tolist() == np.flatnonzero(found.different).tolist()


def test_rotated_loadings_can_be_drawn():
    view = reading.varimax(fitted(solver="natural"))
    assert len(plot_all_loadings(view, kind="loadings").axes) >= 2
