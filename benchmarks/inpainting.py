"""Impute the lower half of test images of MNIST and FashionMNIST, and draw some of them.

    python benchmarks/inpainting.py                      # prints errors, draws docs/images/*.png
    python benchmarks/inpainting.py --train 5000 -o DIR  # fewer images, drawn elsewhere

The squared error per pixel of the conditional mean is compared with two others: the lower half of
the training image with the nearest upper half, and the mean training image.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import DOCS
from numpy.typing import NDArray

from factormix import MFA, datasets

SIDE, LOWER = 28, 14
COMPONENTS, FACTORS, EPOCHS, MAX_PRECISION = 100, 8, 3, 100.0
SHOWN, DRAWS = 10, 2

Array = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=20000, help="training images (20000)")
    parser.add_argument("--test", type=int, default=1000, help="test images (1000)")
    parser.add_argument("-o", "--output", type=Path, default=DOCS / "images")
    options = parser.parse_args()
    for name in ("mnist", "fashion-mnist"):
        train, test = images(name, "train", options.train), images(name, "test", options.test)
        model = MFA(
            COMPONENTS, FACTORS, max_epochs=EPOCHS, max_precision=MAX_PRECISION, random_state=0
        ).fit(train)
        given = test.copy()
        given[:, LOWER * SIDE :] = np.nan
        filled = model.impute(given)
        errors = {
            "conditional mean": error(filled, test),
            "nearest training image": error(nearest(train, given), test),
            "mean image": error(np.broadcast_to(train.mean(axis=0), test.shape), test),
        }
        print(f"{name}, {len(train):,} training and {len(test):,} test images:", flush=True)
        for what, value in errors.items():
            print(f"  {what}: {value:.4f}", flush=True)
        drawn = model.impute(given[:SHOWN], n_draws=DRAWS)
        rows = [test[:SHOWN], given[:SHOWN], filled[:SHOWN], *drawn]
        draw(rows, options.output / f"inpainting-{name}.png")


def images(name: str, split: Any, count: int) -> Array:
    """Return the first images of a set, (n, 784), in [0, 1]."""
    return np.asarray(datasets.load(name, split=split).data, dtype=np.float32)[:count]


def nearest(train: Array, given: Array) -> Array:
    """Return for each row the training image with the nearest observed entries, (n, 784)."""
    seen = ~np.isnan(given[0])
    half, known = train[:, seen], given[:, seen]
    distances = (half**2).sum(axis=1) - 2 * known @ half.T
    return train[distances.argmin(axis=1)]


def error(found: Array, test: Array) -> float:
    """Return the mean squared error per pixel of the lower half."""
    lower = slice(LOWER * SIDE, None)
    return float(np.mean((found[:, lower] - test[:, lower]) ** 2))


def draw(rows: list[Array], path: Path) -> None:
    """Draw each list of images in a row: true image, given part, conditional mean, and draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = ["image", "given", "filled in", *["drawn"] * DRAWS]
    figure, axes = plt.subplots(
        len(rows), SHOWN, figsize=(SHOWN * 0.75, len(rows) * 0.78), squeeze=False
    )
    for line, some, label in zip(axes, rows, labels, strict=True):
        for axis, image in zip(line, some, strict=True):
            shown = np.ma.masked_invalid(np.clip(image, 0, 1).reshape(SIDE, SIDE))
            axis.set_facecolor("#d6dce8")
            axis.imshow(shown, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, fontsize=8)
    figure.tight_layout(pad=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
