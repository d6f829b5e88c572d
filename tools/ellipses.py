"""Draw the picture of components on a plane: docs/images/ellipses.png.

    python tools/ellipses.py

Two half moons, and a mixture of eight components with one factor each: the mean of each component,
its factor from -2 to +2 standard deviations, and the ellipse of two deviations around it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from sklearn.datasets import make_moons

from factormix import MFA
from factormix.plotting import save_figure

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "ellipses.png"


def draw(model: MFA, X: np.ndarray) -> Figure:
    """Draw the rows, and the components over them."""
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    axes = figure.add_subplot(aspect="equal")
    axes.scatter(*X.T, s=4, color="#b9c0c7", linewidths=0)
    for mean, loadings, noise in zip(
        model.means_, model.loadings_, model.noise_variances_, strict=True
    ):
        covariance = loadings @ loadings.T + np.diag(noise)
        variances, axes_of_it = np.linalg.eigh(covariance)
        angle = np.degrees(np.arctan2(axes_of_it[1, 1], axes_of_it[0, 1]))
        width, height = 4 * np.sqrt(variances[1]), 4 * np.sqrt(variances[0])
        axes.add_patch(
            Ellipse(mean, width, height, angle=angle, fill=False, color="#2f6db3", linewidth=1.2)
        )
        ends = np.array([mean - 2 * loadings[:, 0], mean + 2 * loadings[:, 0]])
        axes.plot(*ends.T, color="#b3372f", linewidth=2)
        axes.plot(*mean, "o", color="#1d2126", markersize=5)
    axes.axis("off")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    given = parser.parse_args()
    X, _ = make_moons(1500, noise=0.07, random_state=0)
    save_figure(draw(MFA(8, 1, random_state=0).fit(X), X), given.output)
    print(given.output)


if __name__ == "__main__":
    main()
