"""Fill missing pixels of images: draws given all known pixels, at any depth.

Fillings begin as draws in the order of the model, coarse to fine, each number given those before it
alone. Sweeps of Metropolis then shift single missing pixels, and the missing pixels of squares, by
symmetric random steps. A step is accepted by the ratio of the probabilities of the image, of which
only the numbers that see a changed one differ. So sweeps converge to the distribution of the
missing pixels given all known ones, which is exact in the limit of many.

A mixture of whole thumbnails couples all steps of a filling that change its thumbnail. Those that
the differences accept are then accepted or not by the ratio of the thumbnails' probabilities, one
after the other. Both tests together leave the same distribution (Christen and Fox, 2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.pictures import Pictures, Values, split_blocks
from factormix.training.scans import (
    SCORE_ROWS,
    Positions,
    Stage,
    blank_plane,
    draw_level,
    scan,
    split_levels,
)
from factormix.training.thumbnails import Thumbnails

Mask = NDArray[np.bool_]
LEAST_STEP, LARGEST_STEP = 1 / 32, 2.0
"""Deviations of steps, relative to the error of a linear prediction: from the narrowest widths of a
mixture to beyond the widest."""


class Fillings:
    """Several fillings of one image, and its planes at every level."""

    def __init__(
        self,
        stages: Sequence[Sequence[Stage]],
        image: Values,
        missing: Mask,
        n: int,
        random: torch.Generator,
        thumbnails: Thumbnails | None = None,
    ) -> None:
        """Draw n fillings of an image (h, w, c) where it is missing (h, w)."""
        self.stages, self.missing, self.n, self.random = stages, missing, n, random
        self._thumbnails = thumbnails
        depth, levels = len(stages) - 1, stages[-1][0].levels
        known = blank_plane(n, missing.shape, image.shape[2], levels)
        _stack(known)[:] = image
        below = split_levels(known, depth)
        masks = [missing]
        for _ in range(depth):
            masks.insert(0, _find_blocks(masks[0]))
        drawn = below[0][0]
        if thumbnails is not None:
            thumbnails.draw_(drawn, random, _repeat(masks[0], n))
        else:
            scan(stages[0][0], [drawn], random, _repeat(masks[0], n))
        finer = [*(planes[0] for planes in below[2:]), known][:depth]
        for several, planes, blocks, inside, truth in zip(
            stages[1:], below[1:], masks[:-1], masks[1:], finer, strict=True
        ):
            h, w = inside.shape
            drawn = draw_level(several, drawn, (h, w), random, planes, _repeat(blocks, n))
            _stack(drawn)[:, ~inside] = _stack(truth)[:, ~inside]
        # Each filling stands beside its proposal.
        self._images = blank_plane(2 * n, missing.shape, image.shape[2], levels)
        _stack(self._images)[:] = np.tile(_stack(drawn), (2, 1, 1, 1))
        self._levels = split_levels(self._images, depth)
        if thumbnails is not None:
            self._scores = _score_each(thumbnails, _stack(self._levels[0][0])[:n])

    @property
    def images(self) -> Values:
        """The fillings (n, h, w, c)."""
        return _stack(self._images)[: self.n]

    def sweep(self) -> float:
        """Shift missing pixels, alone and in squares; return the share of accepted steps."""
        accepted = tried = 0
        for i in range(max(len(self.stages), 2)):
            row, column = self.missing.nonzero()
            # Squares of one colour are so far apart that no number sees two of them.
            tall, wide = (-(-length // 2**i) + (i > 0) for length in self._measure_sight())
            y, x = row >> i, column >> i
            colours = (y % tall) * wide + x % wide
            for colour in np.unique(colours):
                chosen = colours == colour
                _, square = np.unique(np.stack([y[chosen], x[chosen]]), axis=1, return_inverse=True)
                found = self._shift(row[chosen], column[chosen], square.reshape(-1))
                accepted, tried = accepted + int(found.sum()), tried + len(found)
        return accepted / max(tried, 1)

    def _measure_sight(self) -> tuple[int, int]:
        """Return the rows and columns at which no number of any level sees two pixels."""
        tall = wide = 1
        for i, several in enumerate(self.stages):
            factor = 2 ** min(len(self.stages) - i, len(self.stages) - 1)
            for stage in several:
                spans = np.ptp(_list_seen(stage), axis=0) + 1
                tall, wide = max(tall, factor * int(spans[0])), max(wide, factor * int(spans[1]))
        return tall, wide

    def _shift(
        self, row: NDArray[np.int64], column: NDArray[np.int64], square: NDArray[np.intp]
    ) -> NDArray[np.bool_]:
        """Propose one step for each filling and square of pixels; return which are accepted."""
        n, count, c = self.n, int(square.max()) + 1, self._images.n_channels
        steps = self._draw_steps(n * count).reshape(n, count, c)
        image = np.repeat(np.arange(n), len(row))
        place = image, np.tile(row, n), np.tile(column, n)
        owner = image * count + np.tile(square, n)
        stack = _stack(self._images)
        old = stack[place]
        new = old + steps[image, np.tile(square, n)].astype(old.dtype)
        beyond = np.zeros(n * count, bool)
        if self._images.levels is not None:
            outside = ((new < 0) | (new >= self._images.levels)).any(axis=1)
            beyond[owner[outside]] = True
            new = new.clip(0, self._images.levels - 1)
        proposed = (image + n, *place[1:])
        stack[proposed] = new
        self._split_again(proposed)
        owners = np.concatenate([owner, owner + n * count])
        both = tuple(np.concatenate(pair) for pair in zip(place, proposed, strict=True))
        scores = self._score_seers(owners, both, 2 * n * count)
        uniform = torch.rand(n * count, generator=self.random, device=self.random.device)
        gain = scores[n * count :] - scores[: n * count]
        accepted = ~beyond & (uniform.cpu().log().numpy() < gain)
        if self._thumbnails is not None:
            self._compare_thumbnails_(self._thumbnails, accepted, owner, place)
        stack[place] = np.where(accepted[owner][:, None], new, old)
        stack[proposed] = stack[place]
        self._split_again(both)
        return accepted

    def _compare_thumbnails_(
        self,
        thumbnails: Thumbnails,
        accepted: Mask,
        owner: NDArray[np.int64],
        place: Positions,
    ) -> None:
        """Refuse accepted steps (n count,) by the probabilities of thumbnails, filling by filling.

        Steps that do not change the thumbnail stay accepted.
        """
        shift, plane = len(self.stages) - 1, _stack(self._levels[0][0])
        owner, image, y, x = _unique(owner, place[0], place[1] >> shift, place[2] >> shift)
        changed = accepted[owner] & (plane[image, y, x] != plane[image + self.n, y, x]).any(axis=1)
        owner, image, y, x = (number[changed] for number in (owner, image, y, x))
        current, proposed = plane[: self.n].copy(), plane[self.n :]
        every, first = np.unique(owner, return_index=True)
        # The first steps of all fillings at once, then the second ones, and so on.
        fillings, (_, starts) = image[first], np.unique(image[first], return_index=True)
        turn = np.arange(len(every)) - np.repeat(starts, np.diff([*starts, len(every)]))
        for i in range(int(turn.max(initial=-1)) + 1):
            now, some = every[turn == i], fillings[turn == i]
            pixels = np.isin(owner, now)
            where = image[pixels], y[pixels], x[pixels]
            candidates = current.copy()
            candidates[where] = proposed[where]
            found = _score_each(thumbnails, candidates[some])
            uniform = torch.rand(len(some), generator=self.random, device=self.random.device)
            kept = uniform.cpu().log().numpy() < found - self._scores[some]
            accepted[now], some = kept, some[kept]
            current[some], self._scores[some] = candidates[some], found[kept]

    def _draw_steps(self, n: int) -> Values:
        """Draw steps (n, c): all channels together, and each on its own."""
        errors = np.array([float(one.error) for one in self.stages[-1][-1].mixtures])
        device, c = self.random.device, len(errors)
        uniform = torch.rand(2, n, 1, generator=self.random, device=device).cpu().numpy()
        scales = LEAST_STEP * (LARGEST_STEP / LEAST_STEP) ** uniform
        normal = torch.randn(n, 1 + c, generator=self.random, device=device).cpu().numpy()
        steps: Values = errors[0] * scales[0] * normal[:, :1] + errors * scales[1] * normal[:, 1:]
        if self._images.levels is None:
            return steps
        whole: Values = np.rint(steps)
        return np.where(np.any(whole, axis=1)[:, None], whole, np.sign(normal[:, 1:]))

    def _split_again(self, place: Positions) -> None:
        """Bring the planes of all levels up to date where pixels have changed."""
        finer = self._images
        for planes in reversed(self._levels[1:]):
            image, row, column = _unique(place[0], place[1] // 2, place[2] // 2)
            h, w = int(finer.heights[0]), int(finer.widths[0])
            tall, wide = np.minimum(2, h - 2 * row), np.minimum(2, w - 2 * column)
            for a, b in {(2, 2), (h % 2 or 2, 2), (2, w % 2 or 2), (h % 2 or 2, w % 2 or 2)}:
                some = (tall == a) & (wide == b)
                i, y, x = image[some], row[some], column[some]
                rows, columns = 2 * y + np.arange(a)[:, None, None], 2 * x + np.arange(b)[:, None]
                parts = split_blocks(_stack(finer)[i, rows, columns], finer.levels is not None)
                for plane, part in zip(planes, parts, strict=True):
                    if part.size:
                        _stack(plane)[i, y, x] = part[0, 0]
            finer, place = planes[0], (image, row, column)

    def _score_seers(
        self, owner: NDArray[np.int64], place: Positions, n: int
    ) -> NDArray[np.float64]:
        """Return the log-probabilities (n,) of all numbers that see pixels of each owner."""
        total = np.zeros(n)
        for planes, several in zip(reversed(self._levels), reversed(self.stages), strict=True):
            if planes is not self._levels[0]:
                halved = _unique(owner, place[0], place[1] // 2, place[2] // 2)
                owner, place = halved[0], halved[1:]
            for stage in several:
                total += self._score_stage(stage, planes, owner, place, n)
        return total

    def _score_stage(
        self,
        stage: Stage,
        planes: Sequence[Pictures],
        owner: NDArray[np.int64],
        place: Positions,
        n: int,
    ) -> NDArray[np.float64]:
        plane, seen = planes[stage.shape.target], _list_seen(stage)
        y = (place[1][:, None] - seen[:, 0]).reshape(-1)
        x = (place[2][:, None] - seen[:, 1]).reshape(-1)
        inside = (y >= 0) & (y < plane.heights[0]) & (x >= 0) & (x < plane.widths[0])
        every = (np.repeat(number, len(seen))[inside] for number in (owner, place[0]))
        owners, *where = _unique(*every, y[inside], x[inside])
        total = np.zeros(n)
        for start in range(0, len(owners), SCORE_ROWS):
            part = slice(start, start + SCORE_ROWS)
            rows = stage.read(planes, tuple(number[part] for number in where))
            scores = stage.score(rows).double().sum(1).cpu().numpy()
            total += np.bincount(owners[part], scores, minlength=n)
        return total


def _score_each(thumbnails: Thumbnails, stack: Values) -> NDArray[np.float64]:
    """Return the log-probabilities (n,) of thumbnails (n, h, w, c)."""
    total: NDArray[np.float64] = thumbnails.score(stack.reshape(len(stack), -1)).sum(axis=1)
    return total


def _list_seen(stage: Stage) -> NDArray[np.int64]:
    """Return the offsets (m, 2) at which a number of a stage sees planes, with its own place."""
    every = [offsets for _, offsets in stage.shape.context]
    return np.unique(np.concatenate([*every, np.zeros((1, 2), np.int64)]), axis=0)


def _stack(plane: Pictures) -> Values:
    """Return a view (n, h, w, c) of images of one size."""
    h, w = int(plane.heights[0]), int(plane.widths[0])
    return plane.values.reshape(len(plane), h, w, plane.n_channels)


def _find_blocks(missing: Mask) -> Mask:
    """Return the 2 x 2 blocks in which any pixel is missing."""
    h, w = missing.shape
    padded = np.pad(missing, ((0, h % 2), (0, w % 2)))
    return np.asarray(padded.reshape((h + 1) // 2, 2, (w + 1) // 2, 2).any(axis=(1, 3)))


def _repeat(mask: Mask, n: int) -> Mask:
    return np.broadcast_to(mask, (n, *mask.shape))


def _unique(*numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return the distinct columns of several rows of numbers from 0, in order."""
    sizes = tuple(int(one.max(initial=0)) + 1 for one in numbers)
    codes = np.unique(np.ravel_multi_index(numbers, sizes))
    return tuple(np.unravel_index(codes, sizes))
