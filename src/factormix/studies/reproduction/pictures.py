"""The pictures of the experiments that do not show a single model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from factormix.studies.harness import Result
from factormix.views.plotting.style import COLOURS, MARK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_convergence", "plot_stream"]


@styled
def plot_convergence(runs: Sequence[Result]) -> Figure:
    """Draw the likelihood and the components in use of every random start over the epochs."""
    fig = new_figure(7.0, 4.2)
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    tail: list[float] = []
    for run in runs:
        epochs, likelihoods, used = zip(*run["history"], strict=True)
        upper.plot(epochs, likelihoods, color=COLOURS[0], alpha=0.6, linewidth=1.0)
        lower.plot(epochs, used, color=COLOURS[1], alpha=0.6, linewidth=1.0)
        tail += likelihoods[len(likelihoods) // 20 :]
    if tail:
        margin = 0.05 * (max(tail) - min(tail)) or 1.0
        upper.set_ylim(min(tail) - margin, max(tail) + margin)
    upper.set(
        title=f"{runs[0]['dataset']}: {len(runs)} random start{'s' * (len(runs) > 1)}",
        ylabel="log-likelihood",
    )
    lower.set(xlabel="epoch", ylabel="components\nin use")
    for axes in (upper, lower):
        axes.grid(True)
    return fig


@styled
def plot_stream(run: Result) -> Figure:
    """Draw likelihood and detection over a stream in which a class appears half-way."""
    fig = new_figure(7.0, 4.4)
    upper, lower = fig.subplots(2, 1, sharex=True)
    windows = run["windows"]
    for axes, keys in (
        (upper, {"known": "known classes", "new": "new class"}),
        (lower, {"auc": "in the stream", "probe_auc": "held-out images"}),
    ):
        for colour, (key, name) in zip(COLOURS, keys.items(), strict=False):
            points = [(w["batch"], w[key]) for w in windows if w[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.axvline(run["change"], color=MARK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.grid(True)
        axes.legend(loc="best")
    late = [w["known"] for w in windows[len(windows) // 10 :] if w["known"] is not None]
    late += [w["new"] for w in windows if w["new"] is not None]
    if late and max(late) > min(late):
        margin = 0.05 * (max(late) - min(late))
        upper.set_ylim(min(late) - margin, max(late) + margin)
    name = f"{run['dataset']}, {run['solver']}: class {run['new_class']} appears"
    upper.set(title=name, ylabel="log-likelihood\nbefore learning")
    lower.set(xlabel="batch", ylabel="AUC of the new class")
    return fig
