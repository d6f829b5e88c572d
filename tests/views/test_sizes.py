"""The heat map of a choice of sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from factormix import MFA, InputError, select

pytest.importorskip("matplotlib")

from factormix.plotting import plot_selection


class TestSelection:
    def selection(self, **changes: Any) -> Any:
        rng = np.random.default_rng(0)
        X = np.concatenate([rng.normal(size=(100, 3)), 9 + rng.normal(size=(100, 3))])
        options = {"estimator": MFA(random_state=0, max_epochs=20), "refit": False}
        return select(X, [1, 2, 4], [0, 1], **options | changes)

    @pytest.mark.parametrize("criterion", ["held_out", "bic"])
    def test_the_best_is_framed_and_all_sizes_have_a_cell(self, criterion: str) -> None:
        found = self.selection(criterion=criterion)
        axes = plot_selection(found).axes[0]
        values = axes.images[0].get_array()
        assert values.shape == (2, 3)
        for one in found.sizes:
            cell = values[[0, 1].index(one.n_factors), [1, 2, 4].index(one.n_components)]
            assert cell == pytest.approx(one.difference)
        (frame,) = axes.patches
        place = [1, 2, 4].index(found.best.n_components), [0, 1].index(found.best.n_factors)
        assert frame.get_xy() == (place[0] - 0.5, place[1] - 0.5)
        assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "4"]
        assert len(axes.texts) == 6

    def test_what_was_stopped_is_in_brackets(self) -> None:
        found = self.selection()
        stopped = dataclasses.replace(found.sizes[0], status="stopped")
        found = dataclasses.replace(found, sizes=[stopped, *found.sizes[1:]])
        texts = [t.get_text() for t in plot_selection(found).axes[0].texts]
        assert texts[0].startswith("(−")

    def test_nothing_to_draw(self) -> None:
        with pytest.raises(InputError, match="no size to draw"):
            plot_selection(dataclasses.replace(self.selection(), sizes=[]))
