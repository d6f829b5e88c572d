"""Pictures of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from curves import median_curve
from methods import METHODS
from results import Group
from settings import Setting

from factormix.files import make_folder
from factormix.views.plotting import save_figure
from factormix.views.plotting.drawing import COLOURS, INK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_lines", "draw_setting"]

FAR = 0.4
"""A method that ends further below the best, as a share of it, is left out of the picture."""
AXES = {"seconds": "seconds of training", "passes": "passes over the data"}


def draw_setting(setting: Setting, groups: Mapping[str, Group], path: Path) -> None:
    """Draw held-out log-likelihood against seconds and against passes."""
    save(_setting_figure(setting, {m: g for m, g in groups.items() if g.trained}), path)


@styled
def _setting_figure(setting: Setting, groups: Mapping[str, Group]) -> Figure:
    from matplotlib.ticker import NullFormatter

    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    floor = lowest([g.log_likelihood for g in groups.values()])
    true = next((r.true_log_likelihood for g in groups.values() for r in g.results), None)
    for panel, axis in zip(panels, AXES, strict=True):
        for name, group in groups.items():
            _draw_method(panel, name, group, axis, floor)
        if true is not None:
            panel.axhline(true, color=INK, linewidth=0.8, linestyle=":", label="true model")
        panel.set(xscale="log", xlabel=AXES[axis])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(True)
    panels[0].set(ylabel="held-out mean log-likelihood", title=setting.title)
    if np.isfinite(floor):
        best = max(g.log_likelihood for g in groups.values())
        panels[0].set_ylim(floor, best + 0.08 * (best - floor))
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    return figure


def _draw_method(panel: Any, name: str, group: Group, axis: str, floor: float) -> None:
    method = METHODS[name]
    for result in group.trained:
        at = [getattr(p, axis) for p in result.points]
        values = [p.log_likelihood for p in result.points]
        panel.plot(at, values, color=method.colour, linewidth=0.6, alpha=0.3)
    x, y = median_curve([r.points for r in group.trained], axis)
    below = " (below)" if len(y) and y.max() < floor else ""
    width = 2.2 if name == "natural" else 1.4
    panel.plot(x, y, ".-", color=method.colour, linewidth=width, label=method.label + below)


def lowest(finals: Sequence[float]) -> float:
    """Choose the lower end of the axis: methods far below the others must not flatten them."""
    finals = [value for value in finals if np.isfinite(value)]
    if not finals:
        return float("nan")
    best = max(finals)
    shown = min(value for value in finals if value >= best - FAR * abs(best))
    return shown - max(0.25 * (best - shown), 0.02 * abs(best), 1e-3)


def draw_lines(
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    log: bool = True,
) -> None:
    """Draw lines of y against x, one for each name."""
    save(_lines_figure(title, labels, lines, log), path)


@styled
def _lines_figure(
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    log: bool,
) -> Figure:
    from matplotlib.ticker import NullFormatter

    figure = new_figure(5.6, 3.8)
    panel = figure.subplots()
    for colour, (name, (x, y)) in zip(COLOURS, lines.items(), strict=False):
        panel.plot(x, y, "o-", color=colour, label=name)
    if log:
        panel.set(xscale="log", yscale="log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_minor_formatter(NullFormatter())
        at = sorted({value for x, _ in lines.values() for value in x if value > 0})
        panel.set_xticks(at, [f"{value:g}" for value in at])
    else:
        panel.set_ylim(0, 1.3 * max(value for _, y in lines.values() for value in y))
    panel.set(title=title, xlabel=labels[0], ylabel=labels[1])
    panel.grid(True)
    panel.legend()
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file, all of it or nothing."""
    make_folder(path.parent)
    save_figure(figure, path, dpi=130)
