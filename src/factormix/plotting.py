"""Pictures of a fitted mixture: see ``factormix.views.plotting``."""

from factormix.views.plotting import (
    Model,
    figure_png,
    plot_all_loadings,
    plot_history,
    plot_loadings,
    plot_means,
    plot_precisions,
    plot_roc,
    plot_samples,
    plot_scores,
    plot_selection,
    plot_weights,
    save_figure,
    save_image_grid,
)

__all__ = [
    "Model",
    "figure_png",
    "plot_all_loadings",
    "plot_history",
    "plot_loadings",
    "plot_means",
    "plot_precisions",
    "plot_roc",
    "plot_samples",
    "plot_scores",
    "plot_selection",
    "plot_weights",
    "save_figure",
    "save_image_grid",
]
