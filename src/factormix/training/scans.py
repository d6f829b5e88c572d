"""Scans of images: the number at each position of a plane, given its neighbours.

An image is a sequence of planes, and a stage is the conditional mixture of one plane given earlier
planes and the positions before it in raster order. Depth 0 has one plane, the image itself. With
depth 1 or more the thumbnail comes first, by a raster scan of its own, and then, level by level,
the differences of ``data.pictures.Blocks``. The colours of a pixel follow each other: each is given
those before it.

The context of a stage is whitened neighbours (``core.neighbourhoods``), then the errors of the
linear prediction of earlier channels. A plane of whole numbers has bounds, so that the masses of
all possible images sum to one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core.conditional_mixture import (
    ConditionalMixture,
    bin_log_masses,
    draw_random_mixture,
    draw_targets,
    log_densities,
)
from factormix.core.neighbourhoods import (
    N_SIDES,
    Neighbourhood,
    Offsets,
    estimate_moments,
    list_offsets,
    share_sides,
)
from factormix.data.pictures import (
    Blocks,
    Pictures,
    bound_differences,
    join_blocks,
    join_rows,
    size_blocks,
    split_all,
)

Positions = tuple[NDArray[np.int64], ...]
"""Image, row and column (B,)."""
MOMENT_ROWS, MOMENT_BLOCK = 200_000, 20_000
"""Positions whose neighbours give the means and covariances: relative errors of 1/450."""
WHOLE_FLOOR = 1.0
"""Variance that is added to each eigenvalue for 8-bit images, in squared levels: rounding and the
noise of cameras."""
REAL_FLOOR = 1e-5
"""The same for real-valued images, relative to the mean variance."""
LEAST_FLOOR = 1e-12
"""The same for real-valued images that do not vary: chosen, not measured."""
LEAST_WIDTH = 0.05
"""Least width of a whole number: with the nearest bin at 0.5, 0.9999 of the mass is in one bin."""
LEAST_REAL_WIDTH = 1e-3
"""The same for real numbers, relative to the error of a linear prediction."""
SCORE_ROWS = 8192
"""Positions that are scored at a time: some ten megabytes of gates."""


@dataclass(frozen=True, eq=False)
class Shape:
    """Which planes a stage reads and writes, by their numbers in the level."""

    target: int
    context: tuple[tuple[int, Offsets], ...]
    mean: int | None
    """The plane whose numbers bound the target; None for 0 to the highest level."""

    @property
    def reach(self) -> int:
        """Columns to the right that a position looks ahead in the rows before it."""
        own = [offsets for plane, offsets in self.context if plane == self.target]
        return max((int(offsets[:, 1].max(initial=0)) for offsets in own), default=0)


def plan_level(n_neighbours: int, *, coarsest: bool) -> list[Shape]:
    """Return the stages of a level; the neighbours are shared equally by the planes they are in."""
    if coarsest:
        return [Shape(0, ((0, list_offsets(n_neighbours, causal=True)),), None)]
    names = Blocks._fields
    recipes = {
        "between": ("coarse", ["coarse"]),
        "upper": ("upper_means", ["upper_means", "lower_means"]),
        "lower": ("lower_means", ["upper_means", "lower_means", "upper"]),
    }
    shapes = list[Shape]()
    for target, (mean, known) in recipes.items():
        n = max(1, n_neighbours // (len(known) + 1))
        around = [(names.index(name), list_offsets(n, causal=False)) for name in known]
        own = names.index(target), list_offsets(n, causal=True)
        shapes.append(Shape(own[0], (*around, own), names.index(mean)))
    return shapes


def split_levels(pictures: Pictures, depth: int) -> list[list[Pictures]]:
    """Return the planes of each level, the thumbnail first."""
    levels = list[list[Pictures]]()
    for _ in range(depth):
        planes = split_all(pictures)
        levels.insert(0, planes)
        pictures = planes[0]
    return [[pictures], *levels]


class Rows(NamedTuple):
    """Positions of a stage as rows of numbers."""

    x: Tensor
    """(B, d + c), contexts: channel j has the first d + j columns."""
    y: Tensor
    """(B, c), targets."""
    low: Tensor
    """(B, c), least number of each target."""
    high: Tensor
    """(B, c), greatest number."""


@dataclass(eq=False)
class Stage:
    """A shape with what was learned: the neighbourhood, and a mixture for each channel."""

    shape: Shape
    neighbourhood: Neighbourhood
    mixtures: list[ConditionalMixture]
    levels: int | None

    def read(self, planes: Sequence[Pictures], where: Positions, *, targets: bool = True) -> Rows:
        """Read the contexts of positions, and their targets unless these are to be drawn."""
        like = self.mixtures[0].weights
        values, known = gather(self.shape, planes, where)
        x = self.neighbourhood.whiten(torch.from_numpy(values).to(like), known)
        c = len(self.mixtures)
        low, high = self._bound(planes, where, c, like)
        y = x.new_zeros(len(x), c)
        rows = Rows(torch.cat([x, y], dim=1), y, low, high)
        if targets:
            image, row, column = where
            plane = planes[self.shape.target]
            pixel = plane.starts[image] + row * plane.widths[image] + column
            rows.y[:] = torch.from_numpy(np.asarray(plane.values[pixel], np.float32)).to(like)
            for j in range(c - 1):
                self.append_error_(rows, j)
        return rows

    def append_error_(self, rows: Rows, j: int) -> None:
        """Add the error of the linear prediction of channel j to the contexts of later ones."""
        d, mixture = self.neighbourhood.width + j, self.mixtures[j]
        predicted = rows.x[:, :d] @ mixture.regression + mixture.intercept
        rows.x[:, d] = (rows.y[:, j] - predicted) / mixture.error

    def score(self, rows: Rows, mixtures: Sequence[ConditionalMixture] | None = None) -> Tensor:
        """Return the log-masses or log-densities (B, c) of the targets."""
        found = list[Tensor]()
        for j, mixture in enumerate(self.mixtures if mixtures is None else mixtures):
            x, y = rows.x[:, : self.neighbourhood.width + j], rows.y[:, j]
            if self.levels is None:
                found.append(log_densities(mixture, x, y))
            else:
                found.append(bin_log_masses(mixture, x, y, rows.low[:, j], rows.high[:, j]))
        return torch.stack(found, dim=1)

    def draw(self, planes: Sequence[Pictures], where: Positions, random: torch.Generator) -> Rows:
        """Draw the targets of positions, channel by channel."""
        rows = self.read(planes, where, targets=False)
        for j, mixture in enumerate(self.mixtures):
            y = draw_targets(mixture, rows.x[:, : self.neighbourhood.width + j], random)
            if self.levels is not None:
                y = torch.minimum(torch.maximum(y.round(), rows.low[:, j]), rows.high[:, j])
            rows.y[:, j] = y
            self.append_error_(rows, j)
        return rows

    def _bound(
        self, planes: Sequence[Pictures], where: Positions, c: int, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the least and greatest numbers (B, c) of targets."""
        shape = (len(where[0]), c)
        if self.levels is None or self.shape.mean is None:
            top = math.inf if self.levels is None else self.levels - 1
            return like.new_zeros(shape), like.new_full(shape, top)
        image, row, column = where
        plane = planes[self.shape.mean]
        pixel = plane.starts[image] + row * plane.widths[image] + column
        low, high = bound_differences(plane.values[pixel], self.levels)
        return torch.from_numpy(low).to(like), torch.from_numpy(high).to(like)


def gather(
    shape: Shape, planes: Sequence[Pictures], where: Positions
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the neighbours (B, n c) of positions, 0 outside, and which exist (B, n)."""
    values, known = list[NDArray[np.float32]](), list[NDArray[np.bool_]]()
    for plane, pixel, inside in find_neighbours(shape, planes, where):
        some = planes[plane].values
        some = some if len(some) else np.zeros((1, some.shape[1]))
        found = some[pixel].astype(np.float32) * inside[:, :, None]
        values.append(found.reshape(len(found), -1))
        known.append(inside)
    return np.concatenate(values, axis=1), np.concatenate(known, axis=1)


def find_neighbours(
    shape: Shape, planes: Sequence[Pictures], where: Positions
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield planes, the pixels (B, n) in them that positions see, 0 outside, and which exist."""
    image, row, column = (number[:, None] for number in where)
    for index, offsets in shape.context:
        plane = planes[index]
        y, x = row + offsets[:, 0], column + offsets[:, 1]
        width = plane.widths[image]
        inside = (y >= 0) & (x >= 0) & (y < plane.heights[image]) & (x < width)
        yield index, np.where(inside, plane.starts[image] + y * width + x, 0), inside


def begin_stage(
    shape: Shape,
    planes: Sequence[Pictures],
    *,
    n_kinds: int,
    n_scales: int,
    n_features: int,
    seed: int,
    device: torch.device,
) -> Stage:
    """Estimate the neighbourhood and the linear predictions, and draw random mixtures."""
    plane = planes[shape.target]
    c, total = plane.n_channels, int(plane.starts[-1])
    random = np.random.default_rng(seed)
    pixels = random.integers(0, max(total, 1), min(MOMENT_ROWS, 100 * total))
    n = sum(len(offsets) for _, offsets in shape.context)

    def read_blocks() -> Iterator[tuple[Tensor, NDArray[np.bool_]]]:
        for start in range(0, len(pixels), MOMENT_BLOCK):
            block = pixels[start : start + MOMENT_BLOCK]
            values, known = gather(shape, planes, plane.locate(block))
            own = np.asarray(plane.values[block], np.float32)
            known = np.concatenate([np.repeat(known, c, axis=1), np.ones(own.shape, bool)], axis=1)
            yield torch.from_numpy(np.concatenate([values, own], axis=1)), known

    whole = plane.levels is not None
    if total:
        floors = (WHOLE_FLOOR, 0.0) if whole else (LEAST_FLOOR, REAL_FLOOR)
        mean, covariance, floor = estimate_moments(read_blocks(), *floors)
    else:
        # Images of one row have no lower rows.
        mean, covariance = torch.zeros(n * c + c).double(), torch.eye(n * c + c).double()
        floor = WHOLE_FLOOR
    neighbourhood = Neighbourhood.build(
        mean[: n * c],
        covariance[: n * c, : n * c],
        share_sides([offsets for _, offsets in shape.context]),
        floor,
    )
    # Covariances of the whitened context, to which the errors of earlier channels are added.
    inner = neighbourhood.rotation.T @ covariance[: n * c, n * c :]
    remaining = covariance[n * c :, n * c :] - inner.T @ inner
    generator = torch.Generator().manual_seed(seed)
    mixtures = list[ConditionalMixture]()
    for j in range(c):
        error = remaining[j, j].clamp(min=floor).sqrt()
        regression = torch.cat([torch.zeros(N_SIDES).double(), inner[:, j]])
        least = torch.tensor(LEAST_WIDTH) if whole else LEAST_REAL_WIDTH * error
        fixed = [t.to(device, torch.float32) for t in (regression, mean[n * c + j], error, least)]
        mixtures.append(
            draw_random_mixture(
                *fixed,
                n_kinds=n_kinds,
                n_scales=n_scales,
                n_features=n_features,
                generator=generator,
            )
        )
        inner = torch.cat([inner, (remaining[j] / error)[None]])
        remaining = remaining - torch.outer(remaining[j], remaining[j]) / error.square()
    return Stage(shape, neighbourhood, mixtures, plane.levels)


def scan(
    stage: Stage,
    planes: Sequence[Pictures],
    random: torch.Generator,
    missing: NDArray[np.bool_] | None = None,
) -> None:
    """Draw the target plane of several images of one size, in place, or where it is ``missing``.

    Positions (y, x) with equal x + (reach + 1) y do not see each other and are drawn at once.
    """
    plane = planes[stage.shape.target]
    n, h, w = len(plane), int(plane.heights[0]), int(plane.widths[0])
    step = stage.shape.reach + 1
    rows, images = np.arange(h), np.arange(n)
    for front in range(w + step * (h - 1)):
        y = rows[(front - step * rows >= 0) & (front - step * rows < w)]
        image, row = np.repeat(images, len(y)), np.tile(y, n)
        column = front - step * row
        if missing is not None:
            chosen = missing[image, row, column]
            image, row, column = image[chosen], row[chosen], column[chosen]
        if len(image):
            drawn = stage.draw(planes, (image, row, column), random).y
            pixel = plane.starts[image] + row * plane.widths[image] + column
            plane.values[pixel] = drawn.cpu().numpy().astype(plane.values.dtype)


def blank_plane(n: int, size: tuple[int, int], c: int, levels: int | None) -> Pictures:
    """Return a plane of zeros for n images of one size."""
    dtype = np.float32 if levels is None else np.int16
    values = np.zeros((n * size[0] * size[1], c), dtype)
    return Pictures.build(values, np.full(n, size[0]), np.full(n, size[1]), levels)


def draw_level(
    stages: Sequence[Stage],
    coarse: Pictures,
    size: tuple[int, int],
    random: torch.Generator,
    known: Sequence[Pictures] | None = None,
    missing: NDArray[np.bool_] | None = None,
) -> Pictures:
    """Draw images of a size (h, w) given their block means.

    With ``known`` planes, only the differences within ``missing`` blocks (n, ...) are drawn, in
    place.
    """
    n, c, levels = len(coarse), coarse.n_channels, coarse.levels
    planes = known or [blank_plane(n, plane, c, levels) for plane in size_blocks(*size)]
    planes = [coarse, *planes[1:]]
    for stage in stages:
        plane = planes[stage.shape.target]
        inside = np.s_[:, : int(plane.heights[0]), : int(plane.widths[0])]
        scan(stage, planes, random, None if missing is None else missing[inside])
        for i in range(n if stage is stages[0] else 0):
            planes[2].image(i)[:], planes[3].image(i)[:] = join_rows(
                coarse.image(i), planes[1].image(i)
            )
    fine = blank_plane(n, size, c, levels)
    for i in range(n):
        fine.image(i)[:] = join_blocks(Blocks(*(plane.image(i) for plane in planes)))
    return fine
