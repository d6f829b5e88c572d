"""Rows judged block by block by a detector or by a plain mixture: what a command writes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.sources import ArrayRows, Rows
from factormix.errors import InputError
from factormix.estimators.explanation import Explanation
from factormix.estimators.mfa import MFA
from factormix.estimators.outliers import MFAOutlierDetector
from factormix.estimators.validation import check_rows

__all__ = ["Block", "Judge", "judge_of"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """Some rows, what is to be written of each, and which of them are to be explained."""

    model: Any
    rows: Rows
    values: list[list[str]]
    """For each row, its cells after the row's number."""
    chosen: NDArray[np.intp]
    """Numbers of the outliers within the block; of all rows where there is no threshold."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    def explained(self) -> Explanation | None:
        """Explain the chosen rows, None if there are none."""
        if not len(self.chosen):
            return None
        (block,) = self.rows.blocks(len(self))
        explained: Explanation = self.model.explain(ArrayRows(block.rows[self.chosen]))
        return explained


class Judge:
    """Tell of each row how unusual it is, and whether that makes it an outlier."""

    columns: tuple[str, ...] = ("row", "score", "tail_probability", "outlier")
    has_threshold = True

    def __init__(self, model: MFAOutlierDetector, share: float | None) -> None:
        self._model, self._share = model, share
        self.image_shape = model.image_shape_

    def prepared(self, rows: Rows) -> Rows:
        """Return rows with their columns in the order of the training."""
        return check_rows(self._model, rows)

    def blocks(self, rows: Rows, size: int) -> Iterator[Block]:
        """Judge rows, ``size`` at a time."""
        for batch in rows.blocks(size):
            block = ArrayRows(batch.rows)
            scores, tail = (
                np.asarray(values, dtype=np.float64)
                for values in (
                    self._model.score_samples(block),
                    self._model.tail_probability(block),
                )
            )
            unusual = scores < self._model.offset_ if self._share is None else tail < self._share
            cells = [
                [f"{s:.9g}", f"{t:.6g}", str(int(u))]
                for s, t, u in zip(scores, tail, unusual, strict=True)
            ]
            yield Block(self._model, block, cells, np.flatnonzero(unusual))


class MixtureJudge(Judge):
    """Judge by the log-likelihood of a plain mixture, which has no threshold of its own."""

    def __init__(self, model: MFA, share: float | None) -> None:
        self._mixture, self._share = model, share
        self.image_shape = model.image_shape_
        self.has_threshold = share is not None
        self.columns = ("row", "score", "outlier") if self.has_threshold else ("row", "score")

    def prepared(self, rows: Rows) -> Rows:
        """Return rows with their columns in the order of the training."""
        return check_rows(self._mixture, rows)

    def blocks(self, rows: Rows, size: int) -> Iterator[Block]:
        """Judge rows, ``size`` at a time; with a share, by the lowest scores of all of them."""
        level = -np.inf
        if self._share is not None:
            level = float(np.quantile(self._mixture.score_samples(rows), self._share))
        for batch in rows.blocks(size):
            block = ArrayRows(batch.rows)
            scores = np.asarray(self._mixture.score_samples(block), dtype=np.float64)
            cells, chosen = [[f"{s:.9g}"] for s in scores], np.arange(len(scores))
            if self._share is not None:
                unusual = scores < level
                chosen = np.flatnonzero(unusual)
                cells = [[*cell, str(int(u))] for cell, u in zip(cells, unusual, strict=True)]
            yield Block(self._mixture, block, cells, chosen)


def judge_of(model: Any, share: float | None = None) -> Judge:
    """Make a judge of a loaded model; ``share`` replaces a detector's own threshold."""
    if isinstance(model, MFAOutlierDetector):
        return Judge(model, share)
    if isinstance(model, MFA):
        return MixtureJudge(model, share)
    raise InputError(
        f"a {type(model).__name__} does not tell outliers: give a detector or a mixture."
    )
