"""Neighbourhoods of pixels as whitened contexts, with missing neighbours integrated out.

At a border some neighbours do not exist. Their part of the context is its expectation given the
neighbours that do, under one normal distribution of all neighbours; and the context says how many
are missing on each side, so that a mixture learns how much less it knows there. The context of a
pixel with neighbours z (n c numbers) is ::

    x = (shares of missing neighbours on four sides,  (V / sqrt(w + floor))' (E[z | known] - mean))

with V, w the eigenvectors and eigenvalues of the covariance of z.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Offsets = NDArray[np.int64]
"""(n, 2), rows and columns from a pixel to its neighbours."""
N_SIDES = 4
EM_STEPS = 20
"""Of the normal distribution of neighbours: most positions of an image know nearly all of them, and
the share that is unknown is the rate at which EM converges."""


def list_offsets(n: int, *, causal: bool) -> Offsets:
    """Return the n nearest offsets; causal ones come before the pixel in a raster scan."""
    # Half a circle of this radius has room for more than n.
    most = math.isqrt(n) + 2
    reach = range(-most, most + 1)
    everywhere = [(y, x) for y in reach for x in reach if not causal or (y, x) < (0, 0)]
    # Ties are broken towards the pixel's own row, then symmetrically.
    everywhere.sort(key=lambda o: (o[0] ** 2 + o[1] ** 2, -o[0], abs(o[1]), o[1]))
    return np.array(everywhere[:n], np.int64).reshape(-1, 2)


class Neighbourhood:
    """A normal distribution of the c numbers of n neighbours each, and the contexts it gives."""

    def __init__(self, mean: Tensor, covariance: Tensor, rotation: Tensor, sides: Tensor) -> None:
        """Take mean (n c,), covariance and rotation (n c, n c) in float64, and sides (n, 4)."""
        self.mean, self.covariance, self.rotation, self.sides = mean, covariance, rotation, sides
        self._c = len(mean) // max(len(sides), 1)
        self._maps = dict[bytes, Tensor]()

    @classmethod
    def build(cls, mean: Tensor, covariance: Tensor, sides: Tensor, floor: float) -> Neighbourhood:
        """Whiten by the eigenvalues of a covariance; ``floor``, a variance, is added to each."""
        w, V = torch.linalg.eigh(covariance)
        w = w.clamp(min=0) + floor
        return cls(mean, (V * w) @ V.T, V * w.rsqrt(), sides)

    @property
    def width(self) -> int:
        """Length of a context."""
        return N_SIDES + len(self.mean)

    def whiten(self, values: Tensor, known: NDArray[np.bool_]) -> Tensor:
        """Return contexts (B, 4 + n c) of neighbours (B, n c), of which some are known (B, n).

        Values of unknown neighbours do not matter.
        """
        found = values.new_empty(len(values), self.width)
        centred = values - self.mean.to(values)
        complete = known.all(axis=1)
        found[:, :N_SIDES] = torch.from_numpy(~known).to(values) @ self.sides.to(values)
        if complete.all():
            found[:, N_SIDES:] = centred @ self._map(known[0], values)
            return found
        for rows in _group_equal(known):
            chosen = torch.from_numpy(rows).to(values.device)
            found[chosen, N_SIDES:] = centred[chosen] @ self._map(known[rows[0]], values)
        return found

    # A map that scoring made in inference mode could not be differentiated through later.
    @torch.inference_mode(False)
    def _map(self, known: NDArray[np.bool_], like: Tensor) -> Tensor:
        """Return the linear map (n c, n c) to contexts; rows of unknown neighbours are 0."""
        key = known.tobytes() + str((like.dtype, like.device)).encode()
        if key not in self._maps:
            o = torch.from_numpy(np.repeat(known, self._c))
            expect = torch.zeros_like(self.covariance)
            expect[o.nonzero()[:, 0], o.nonzero()[:, 0]] = 1
            if o.any() and not o.all():
                C = self.covariance
                expectation = torch.linalg.solve(C[o][:, o], C[o][:, ~o])
                expect[o.nonzero(), (~o).nonzero()[:, 0]] = expectation
            self._maps[key] = (expect @ self.rotation).to(like)
        return self._maps[key]


def _group_equal(known: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Return the rows of each pattern."""
    packed = np.ascontiguousarray(np.packbits(known, axis=1))
    keys = packed.view(np.dtype((np.void, packed.shape[1])))[:, 0]
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    return np.split(order, np.cumsum(counts)[:-1])


def share_sides(offsets: Sequence[Offsets]) -> Tensor:
    """Return for each offset (n,) its share of those above, left, right and below (n, 4)."""
    y, x = np.concatenate(list(offsets)).T
    sides = np.stack([y < 0, x < 0, x > 0, y > 0], axis=1).astype(np.float64)
    return torch.from_numpy(sides / sides.sum(axis=0).clip(min=1))


class _Pattern(NamedTuple):
    """Sums over the rows that know the same numbers."""

    known: Tensor
    """(D,)."""
    n_rows: int
    total: Tensor
    """(D,), from a common origin; 0 where unknown."""
    products: Tensor
    """(D, D)."""


def estimate_moments(
    blocks: Iterable[tuple[Tensor, NDArray[np.bool_]]], floor: float, relative_floor: float
) -> tuple[Tensor, Tensor, float]:
    """Return mean (D,), covariance (D, D) and a floor of variances, of rows with unknown numbers.

    The blocks have rows (B, D) and which of their numbers are known. The normal distribution of
    highest likelihood is found by EM. The floor keeps covariances among known numbers invertible:
    ``relative_floor`` times the mean variance, or ``floor`` where that is not larger than rounding
    makes it.
    """
    patterns, origin = dict[bytes, _Pattern](), torch.zeros(())
    for values, known in blocks:
        if not patterns:
            # Near the mean, so that the products keep their digits.
            k = torch.from_numpy(known).double()
            origin = (values.double() * k).sum(0) / k.sum(0).clamp(min=1)
        for rows in _group_equal(known):
            key, mask = known[rows[0]].tobytes(), torch.from_numpy(known[rows[0]])
            part = (values[torch.from_numpy(rows)].double() - origin) * mask
            n, total, products = len(rows), part.sum(0), part.T @ part
            if key in patterns:
                _, before, first, second = patterns[key]
                n, total, products = before + n, first + total, second + products
            patterns[key] = _Pattern(mask, n, total, products)
    every = list(patterns.values())
    counts = torch.stack([one.n_rows * one.known for one in every]).sum(0).clamp(min=1)
    mean = torch.stack([one.total for one in every]).sum(0) / counts
    squares = torch.stack([one.products.diagonal() for one in every]).sum(0)
    variances = squares / counts - mean.square()
    rounding = torch.finfo(torch.float32).eps * float(origin.abs().max())
    if relative_floor and variances.mean() > rounding**2:
        floor = relative_floor * float(variances.mean())
    covariance = variances.clamp(min=0).diag()
    for _ in range(EM_STEPS):
        mean, covariance = _step_em(every, mean, covariance, floor)
    return origin + mean, covariance, floor


def _step_em(
    patterns: Sequence[_Pattern], mean: Tensor, covariance: Tensor, floor: float
) -> tuple[Tensor, Tensor]:
    """Return the moments of the rows, with unknown numbers expected under the given ones."""
    n = sum(one.n_rows for one in patterns)
    total, products = torch.zeros_like(mean), torch.zeros_like(covariance)
    C = covariance + floor * torch.eye(len(mean), dtype=mean.dtype)
    for one in patterns:
        o, m = one.known.nonzero()[:, 0], (~one.known).nonzero()[:, 0]
        expect = torch.zeros_like(C)
        expect[o, o] = 1
        expected = torch.linalg.solve(C[o][:, o], C[o][:, m])
        expect[o[:, None], m] = expected
        about, at = one.total - one.n_rows * mean * one.known, mean * one.known
        centred = one.products - torch.outer(at, one.total) - torch.outer(about, at)
        total += expect.T @ about
        products += expect.T @ centred @ expect
        products[m[:, None], m] += one.n_rows * (covariance[m][:, m] - C[m][:, o] @ expected)
    shift = total / n
    return mean + shift, products / n - torch.outer(shift, shift)
