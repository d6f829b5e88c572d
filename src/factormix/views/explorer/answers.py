"""What the page asks for, each as one message."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix import __version__
from factormix.errors import InputError
from factormix.views.explorer.analysis import analyse
from factormix.views.explorer.exhibition import Exhibition
from factormix.views.explorer.subject import Subject
from factormix.views.explorer.wire import message

__all__ = [
    "analysis",
    "component",
    "component_map",
    "data",
    "extremes",
    "model",
    "nearest",
    "row",
    "samples",
    "snapshot",
    "training",
]

MOST_ROWS = 60
"""Rows that are sent at once."""
LISTED = 12
"""Rows in a list of the nearest, the most or the least likely ones."""


def model(exhibition: Exhibition) -> bytes:
    """Describe the model: sizes, features, and how rows are drawn."""
    subject = exhibition.subject
    display = subject.display
    facts = {
        **exhibition.state(),
        "factormix": __version__,
        "estimator": type(subject.model).__name__,
        "components": subject.K,
        "features": subject.d,
        "factors": subject.l,
        "in_use": int(subject.in_use.sum()),
        "heaviest": int(subject.weights.argmax()),
        "kind": display.kind,
        "shape": display.shape,
        "low": display.low,
        "high": display.high,
        "feature_names": subject.feature_names,
        "solver": subject.model.solver_.name,
        "steps": subject.model.n_steps_,
        "samples_seen": subject.model.n_samples_seen_,
    }
    return message(facts, centre=display.centre, scale=display.scale)


def component_map(exhibition: Exhibition, share: float) -> bytes:
    """Send all components as pictures, where each lies, and what they are coloured by."""
    subject = exhibition.subject
    rows, cols = subject.grid
    arrays: dict[str, NDArray[Any]] = {
        "order": subject.order,
        "tiles": subject.tiles,
        "weights": subject.weights.astype(np.float32),
        "used": subject.in_use.astype(np.uint8),
    }
    try:
        by_component = exhibition.complete_scores.by_component(subject.K, share)
        arrays |= {name: values.astype(np.float32) for name, values in by_component.items()}
    except InputError:
        # Without data, or before it is scored, weights are all there is to colour by.
        pass
    return message({"version": exhibition.version, "rows": rows, "cols": cols}, **arrays)


def component(exhibition: Exhibition, k: int) -> bytes:
    """Describe one component, with the rows of the data that lie nearest to it."""
    subject = exhibition.subject
    facts, arrays = subject.component(k)
    return message(facts, **arrays)


def nearest(exhibition: Exhibition, k: int) -> bytes:
    """Send the rows of the data that lie nearest to a component."""
    exhibition.subject.check_component(k)
    scores = exhibition.complete_scores
    return _rows(exhibition, scores.nearest(k, LISTED))


def samples(exhibition: Exhibition, k: int | None, n: int, noise: bool, seed: int) -> bytes:
    """Draw new rows of a component or of the whole model."""
    drawn = exhibition.subject.samples(k, max(1, min(n, MOST_ROWS)), noise, seed)
    return message({}, samples=drawn)


def data(exhibition: Exhibition, share: float) -> bytes:
    """Describe the scores of the data."""
    scores = exhibition.complete_scores
    facts = {
        "rows": scores.rows.n_rows,
        "incomplete": scores.incomplete,
        "histogram": scores.histogram(),
        "threshold": scores.threshold(share),
    }
    return message(facts)


def extremes(exhibition: Exhibition, least: bool, n: int) -> bytes:
    """Send the most or the least likely rows of the data."""
    scores = exhibition.complete_scores
    return _rows(exhibition, scores.extremes(max(1, min(n, MOST_ROWS)), least=least))


def _rows(exhibition: Exhibition, numbers: NDArray[np.int64]) -> bytes:
    values = exhibition.subject.display.row(exhibition.values(numbers.tolist()))
    scores, components = exhibition.scores.of(numbers)
    facts = {"numbers": numbers, "scores": scores, "components": components}
    return message(facts, rows=values)


def row(exhibition: Exhibition, number: int) -> bytes:
    """Analyse one row of the data."""
    # However large the number is, the rows say what they have.
    values = exhibition.values([min(number, exhibition.scores.rows.n_rows)])[0]
    facts, arrays = _analysed(exhibition, values)
    # As they are: what is shown has fewer digits.
    return message({"number": number, **facts}, values=values, **arrays)


def analysis(exhibition: Exhibition, values: NDArray[np.float64]) -> bytes:
    """Analyse a row (d,) that the page sends, in which NaN stands for what is missing."""
    facts, arrays = _analysed(exhibition, values)
    return message(facts, **arrays)


def _analysed(
    exhibition: Exhibition, values: NDArray[np.float64]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    subject = exhibition.subject
    facts, arrays = analyse(subject, values)
    # Rows with values missing are compared with their like, not with the data.
    verdict = {} if "missing" in facts else _verdict(exhibition, subject, facts["log_likelihood"])
    return {**facts, **verdict}, arrays


def _verdict(exhibition: Exhibition, subject: Subject, score: float) -> dict[str, Any]:
    """Compare a score with those of the data, or of the model's own samples."""
    try:
        return {"percentile": exhibition.complete_scores.percentile(score), "among": "data"}
    except InputError:
        own = subject.own_scores
        return {"percentile": float(np.searchsorted(own, score)) / len(own), "among": "samples"}


def training(exhibition: Exhibition) -> bytes:
    """Describe the training so far: its curves and the moments that were saved."""
    snapshots = exhibition.snapshots
    facts = {**exhibition.state(), "curves": snapshots.curves(), "snapshots": snapshots.listed()}
    return message(facts)


def snapshot(exhibition: Exhibition, version: int) -> bytes:
    """Send the pictures of one moment of the training."""
    taken = exhibition.snapshots.get(version)
    return message(taken.facts, tiles=taken.tiles, weights=taken.weights)
