"""Train from random values with the paper's settings, once per seed, and print the results.

For every seed the script prints the share of components with a weight of at least 0.1/K, the
smallest angle between two loading columns of a component, and the share of columns that have grown
to at least a tenth of the noise's standard deviation. All components should be in use, and all
columns should point in different directions. A column that the data does not need stays short.

    python benchmarks/random_start.py --seeds 10
    python benchmarks/random_start.py --dataset fashion-mnist --classes 0 1 2 --seeds 3 --epochs 20
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from factormix import MFA, datasets
from factormix.core.inspection import in_use

ENOUGH = 0.95
"""The share of components in use that a random start must reach."""


class Outcome(NamedTuple):
    """The results of one seed."""

    seed: int
    in_use: float
    angle: float
    grown: float
    log_likelihood: float
    seconds: float


def main() -> None:
    options = parse()
    images = datasets.load(options.dataset, classes=options.classes, split="train")
    print(f"{options.dataset}, classes {options.classes}: {len(images)} images, {images.source}")
    print(f"{'seed':>4} {'in use':>7} {'angle':>7} {'grown':>6} {'log-lik.':>9} {'seconds':>8}")
    run = partial(
        train, name=options.dataset, classes=tuple(options.classes), epochs=options.epochs
    )
    context = multiprocessing.get_context("spawn")
    outcomes = []
    with context.Pool(min(options.processes, options.seeds)) as pool:
        for outcome in pool.imap_unordered(run, range(options.seeds)):
            outcomes.append(outcome)
            print(
                f"{outcome.seed:>4} {outcome.in_use:>7.0%} {outcome.angle:>6.1f}° "
                f"{outcome.grown:>6.0%} {outcome.log_likelihood:>9.1f} {outcome.seconds:>8.1f}",
                flush=True,
            )
    worst = min(outcome.in_use for outcome in outcomes)
    angle = min(outcome.angle for outcome in outcomes)
    verdict = "as it should be" if worst >= ENOUGH and angle > 0 else "TOO FEW"
    print(f"at least {worst:.0%} of components in use, {verdict}; smallest angle {angle:.1f}°")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0 (10)")
    parser.add_argument("--epochs", type=int, default=65, help="passes, 15 of 65 of phase I (65)")
    parser.add_argument("--dataset", default="mnist", help="a name of factormix.datasets (mnist)")
    parser.add_argument("--classes", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (2)")
    return parser.parse_args()


def train(seed: int, *, name: str, classes: tuple[int, ...], epochs: int) -> Outcome:
    """Train once in one thread."""
    torch.set_num_threads(1)
    X = datasets.load(name, classes=classes, split="train").data
    start = time.perf_counter()
    model = MFA(
        25,
        4,
        solver="sgd",
        max_precision=20,
        scaling=None,
        max_epochs=epochs,
        random_state=seed,
    ).fit(X)
    seconds = time.perf_counter() - start
    weights, loadings = np.asarray(model.weights_), np.asarray(model.loadings_)
    noise = np.sqrt(np.asarray(model.noise_variances_).mean(axis=1, keepdims=True))
    grown = np.linalg.norm(loadings, axis=1) >= 0.1 * noise
    return Outcome(
        seed,
        float(in_use(weights).mean()),
        smallest_angle(loadings),
        float(grown.mean()),
        float(model.score(X)),
        seconds,
    )


def smallest_angle(loadings: np.ndarray) -> float:
    """Return the smallest angle between two columns of one component of (K, d, l), in degrees."""
    columns = loadings / np.maximum(np.linalg.norm(loadings, axis=1, keepdims=True), 1e-300)
    cosines = np.abs(np.swapaxes(columns, 1, 2) @ columns)
    pairs = np.triu_indices(loadings.shape[2], k=1)
    return math.degrees(math.acos(min(1.0, float(cosines[:, pairs[0], pairs[1]].max(initial=0)))))


if __name__ == "__main__":
    main()
