"""Figures with axes: training curves, histograms of scores, ROC curves, selected sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import roc_auc_score, roc_curve

from factormix.errors import InputError
from factormix.estimators import Selection
from factormix.views.plotting.drawing import (
    COLOURS,
    INK,
    MARK,
    Array,
    check_vector,
    new_figure,
    styled,
    to_array,
    widen_limits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL_CURVES = {
    "components_in_use": "components\nin use",
    "sigma": "sigma",
    "learning_rate": "learning\nrate",
}
_CRITERIA = {
    "held_out": "held-out log-likelihood",
    "bic": "BIC",
    "aic": "AIC",
    "icl": "ICL",
}
_DARKEST = 0.25
"""Quantile of the sizes below which all have the darkest colour of the heat map."""


@styled
def plot_history(model_or_history: Any) -> Figure:
    """Draw the log-likelihood of a training run, and its other recorded quantities below.

    Give a fitted model with ``history_``, or the history: a list of dicts, one per record.
    """
    records = list(getattr(model_or_history, "history_", model_or_history))
    curve = _series(records, "log_likelihood")
    if not np.isfinite(curve).any():
        raise InputError("the history holds no log-likelihood: fit the model first, then plot it")
    found = {name: _series(records, key) for key, name in _SMALL_CURVES.items()}
    small = {name: values for name, values in found.items() if np.isfinite(values).any()}
    fig = new_figure(7.0, 3.2 + 0.85 * len(small))
    heights = [3.0] + [1.0] * len(small)
    first, *others = fig.subplots(
        len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    x, x_label = _time_axis(records)
    _draw_curve(first, x, curve, COLOURS[0], "mean log-likelihood")
    held_out = _series(records, "held_out")
    seen = np.isfinite(held_out)
    if seen.any():
        first.plot(x[seen], held_out[seen], ".-", color=COLOURS[1], label="held-out rows")
        first.legend(loc="best")
    first.set_ylim(*_curve_limits(np.concatenate([curve, held_out[seen]])))
    first.set_title("Training")
    for axes, colour, (name, values) in zip(others, COLOURS[1:], small.items(), strict=False):
        _draw_curve(axes, x, values, colour, name)
        seen = values[np.isfinite(values)]
        if 0 < 20 * seen.min() < seen.max():
            axes.set_yscale("log")
    fig.align_ylabels([first, *others])
    fig.axes[-1].set_xlabel(x_label)
    return fig


@styled
def plot_scores(groups: Mapping[str, ArrayLike]) -> Figure:
    """Draw histograms of log-likelihoods, one per named group.

    With two groups the title gives the AUC: the probability that a row of the first group scores
    higher than a row of the second. The first bin includes the lowest half per cent of all scores.
    """
    scores = {
        name: check_vector(values, f"the scores of {name!r}") for name, values in groups.items()
    }
    if not scores:
        raise InputError("there are no scores to draw: give at least one named group")
    pooled = np.concatenate(list(scores.values()))
    low, high = widen_limits(float(np.quantile(pooled, 0.005)), float(pooled.max()))
    bins = np.linspace(low, high, 61)
    fig = new_figure(6.6, 3.3)
    axes = fig.add_subplot(xlabel="log-likelihood", ylabel="rows in the bin, %")
    for index, (name, values) in enumerate(scores.items()):
        shares = np.histogram(np.clip(values, low, high), bins)[0] * (100 / len(values))
        colour, label = COLOURS[index % len(COLOURS)], f"{name} (n = {len(values):,})"
        axes.stairs(shares, bins, fill=True, alpha=0.3, color=colour)
        axes.stairs(shares, bins, color=colour, linewidth=1.4, label=label)
    title = "Log-likelihoods"
    if len(scores) == 2:
        first, second = scores
        truth = np.repeat([1, 0], [len(scores[first]), len(scores[second])])
        title += f": {first} against {second}, AUC {roc_auc_score(truth, pooled):.3f}"
    axes.set(xlim=(low, high), ylim=(0, None), title=title)
    axes.legend(loc="best")
    return fig


@styled
def plot_roc(curves: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Draw ROC curves from ``{name: (labels, scores)}``.

    Labels (n,) are true for inliers, the rows whose score, a log-likelihood, should be high.
    """
    if not curves:
        raise InputError("there are no curves to draw: give at least one (labels, scores) pair")
    fig = new_figure(4.6, 4.4)
    axes = fig.add_subplot(aspect="equal", title="ROC")
    axes.plot([0, 1], [0, 1], color="#b5b5b5", linewidth=1.0, linestyle=(0, (4, 3)))
    for index, (name, (labels, scores)) in enumerate(curves.items()):
        truth = to_array(labels).astype(bool)
        if truth.ndim != 1 or truth.all() or not truth.any():
            raise InputError(
                f"the labels of {name!r} need both inliers (1) and outliers (0), shape (n,)"
            )
        values = check_vector(scores, f"the scores of {name!r}")
        if truth.shape != values.shape:
            raise InputError(
                f"curve {name!r} has {len(truth)} labels and {len(values)} scores: give one each"
            )
        false_rate, true_rate, _ = roc_curve(truth, values)
        label = f"{name} (AUC {roc_auc_score(truth, values):.3f})"
        axes.plot(false_rate, true_rate, color=COLOURS[index % len(COLOURS)], label=label)
    axes.grid(True)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.set(xlabel="share of outliers accepted", ylabel="share of inliers accepted")
    axes.legend(loc="lower right")
    return fig


@styled
def plot_selection(selection: Selection) -> Figure:
    """Draw how far each size lies behind the best, by number of components and of factors.

    The best size is framed and shows the value of the criterion. Sizes whose training was stopped
    early are in brackets, and sizes that were not tried are white.
    """
    from matplotlib.patches import Rectangle

    tried = [size for size in selection.sizes if math.isfinite(size.difference)]
    if not tried:
        raise InputError("the selection has no size to draw: select among some first")
    components = sorted({size.n_components for size in tried})
    factors = sorted({size.n_factors for size in tried})
    fig = new_figure(1.9 + 0.85 * len(components), 1.5 + 0.55 * len(factors))
    axes = fig.add_subplot(xlabel="components", ylabel="factors")
    differences = np.full((len(factors), len(components)), np.nan)
    low = float(np.quantile([size.difference for size in tried], _DARKEST))
    low = low if low < 0 else -1.0
    for size in tried:
        row, column = factors.index(size.n_factors), components.index(size.n_components)
        differences[row, column] = size.difference
        is_best = size is selection.best
        text = f"{size.value:.5g}" if is_best else f"{size.difference:.3g}"
        text = text.replace("-", "−")
        text = f"({text})" if size.status == "stopped" else text
        colour = "white" if size.difference < 0.45 * low else INK
        weight = "bold" if is_best else "normal"
        axes.text(column, row, text, ha="center", va="center", size=8, color=colour, weight=weight)
        if is_best:
            frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, clip_on=False)
            frame.set(edgecolor=MARK, linewidth=2.4)
            axes.add_patch(frame)
    image = axes.imshow(
        differences, cmap="viridis", vmin=low, vmax=0, aspect="auto", origin="lower"
    )
    axes.set_xticks(range(len(components)), [f"{K:,}" for K in components])
    axes.set_yticks(range(len(factors)), [str(l) for l in factors])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"Sizes by {_CRITERIA.get(selection.criterion, selection.criterion)}")
    extend = "min" if float(np.nanmin(differences)) < low else "neither"
    fig.colorbar(image, ax=axes, extend=extend, label="difference from the best")
    return fig


def _series(records: Sequence[Mapping[str, Any]], key: str) -> Array:
    """Return one quantity of a history (n,), NaN where a record lacks it."""
    found = [record.get(key) for record in records]
    return np.array([math.nan if value is None else float(value) for value in found])


def _time_axis(records: Sequence[Mapping[str, Any]]) -> tuple[Array, str]:
    """Return epochs if every record has its own, else steps, else record numbers."""
    for key in ("epoch", "step"):
        x = _series(records, key)
        if np.isfinite(x).all() and (np.diff(x) > 0).all():
            return x, key
    return np.arange(1.0, len(records) + 1), "record"


def _draw_curve(axes: Axes, x: Array, values: Array, colour: str, name: str) -> None:
    """Draw the finite part of one training curve."""
    finite = np.isfinite(values)
    marker = "o" if finite.sum() <= 40 else None
    axes.plot(x[finite], values[finite], color=colour, marker=marker, markersize=2.5)
    axes.grid(True)
    axes.set_ylabel(name)


def _curve_limits(curve: Array) -> tuple[float, float]:
    """Return limits that a very low first value cannot stretch."""
    values = curve[np.isfinite(curve)]
    top, low = float(values.max()), float(values.min())
    if len(values) >= 10:
        low = max(low, top - 2.5 * (top - float(np.quantile(values, 0.1))))
    low, top = widen_limits(low, top)
    return low - 0.05 * (top - low), top + 0.05 * (top - low)
