"""Pictures of a fitted mixture: component grids, samples, training curves, scores.

Every ``plot_*`` function returns a matplotlib ``Figure`` that belongs to the caller alone: nothing
is registered with pyplot and the backend stays as it is. Component ``k`` is drawn at row
``k // cols`` and column ``k % cols``: neighbours on the grid are neighbours in the picture.

The ``image_shape`` of a row is ``(h, w)``, ``(h, w, 3)`` or, for a row that is no image, ``(d,)``,
which draws it as a line. Left out, it is guessed: a square of side 8 or more, else a line.
"""

from factormix.views.plotting.components import (
    plot_loadings,
    plot_means,
    plot_precisions,
    plot_samples,
    plot_weights,
)
from factormix.views.plotting.curves import plot_history, plot_roc, plot_scores, plot_selection
from factormix.views.plotting.drawing import Model, figure_png, save_figure
from factormix.views.plotting.inspection import plot_bins, plot_nearest, plot_overlaps, plot_reasons
from factormix.views.plotting.tiles import save_image_grid

__all__ = [
    "Model",
    "figure_png",
    "plot_bins",
    "plot_history",
    "plot_loadings",
    "plot_means",
    "plot_nearest",
    "plot_overlaps",
    "plot_precisions",
    "plot_reasons",
    "plot_roc",
    "plot_samples",
    "plot_scores",
    "plot_selection",
    "plot_weights",
    "save_figure",
    "save_image_grid",
]
