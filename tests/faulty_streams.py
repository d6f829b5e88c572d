"""Six sensors with two states and known faults, and the rows that are faulty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NAMES = [f"sensor{j}" for j in range(6)]
LOADINGS = np.random.default_rng(9).normal(size=(6, 2))
NOISE = 0.3
CENTRES = np.array([[0.0] * 6, [6.0, 2.0, -4.0, 3.0, 0.0, 5.0]])
DEVIATIONS = np.diag(np.linalg.inv(LOADINGS @ LOADINGS.T + NOISE**2 * np.eye(6))) ** -0.5
"""(6,), standard deviation of each sensor given all others."""


class FaultyStream(NamedTuple):
    """A stream, its faults, and its rows without any fault."""

    rows: NDArray[np.float64]
    """(n, 6)."""
    faults: NDArray[np.bool_]
    """(n,)."""
    ordinary: NDArray[np.bool_]
    """(n,); a drift is neither ordinary nor a fault while it is small."""


def draw_ordinary(n: int, seed: int) -> NDArray[np.float64]:
    """Draw rows (n, 6) without faults."""
    rng = np.random.default_rng(seed)
    state, latent = rng.integers(2, size=n), rng.normal(size=(n, 2))
    return CENTRES[state] + latent @ LOADINGS.T + NOISE * rng.normal(size=(n, 6))


def draw_spikes(n: int, seed: int = 1) -> FaultyStream:
    """Draw a stream in which two rows of a hundred have one sensor 10 to 1,000 deviations off.

    The first two rows are faults, and the first two of the second half.
    """
    rng, rows = np.random.default_rng(seed), draw_ordinary(n, seed + 100)
    faults = rng.random(n) < 0.02
    faults[[0, 1, n // 2, n // 2 + 1]] = True
    sensor = rng.integers(6, size=n)
    sizes = rng.choice([-1, 1], size=n) * 10 ** rng.uniform(1, 3, size=n) * DEVIATIONS[sensor]
    rows[faults, sensor[faults]] += sizes[faults]
    return FaultyStream(rows, faults, ~faults)


def draw_stuck(n: int, seed: int = 1) -> FaultyStream:
    """Draw a stream in which a sensor is stuck for 60 rows, four times, at first in row 0."""
    rows, faults = draw_ordinary(n, seed + 200), np.zeros(n, dtype=bool)
    for start in range(0, n, n // 4):
        faults[start : start + 60] = True
    rows[faults, 3] = 12.5
    return FaultyStream(rows, faults, ~faults)


def draw_drift(n: int, seed: int = 1, largest: float = 30.0) -> FaultyStream:
    """Draw a stream in which a sensor drifts over half of the rows, from a fifth of them on.

    A drift is a fault from eight deviations on.
    """
    rows = draw_ordinary(n, seed + 300)
    sizes = largest * np.clip((np.arange(n) - n // 5) / (n // 2), 0, 1)
    rows[:, 2] += sizes * DEVIATIONS[2]
    return FaultyStream(rows, sizes >= 8, sizes == 0)


FAULTS = {"spikes": draw_spikes, "a stuck sensor": draw_stuck, "slow drift": draw_drift}
