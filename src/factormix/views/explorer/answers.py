"""How answers travel to the page: JSON facts and arrays of numbers in one message.

A message is the length of its header (four bytes, little-endian), the header as JSON, and the bytes
of the arrays, each from a multiple of eight on. The header has the ``facts``, and of each array
its name, dtype, shape and first byte after the header.

What a model says about one row: likelihood, components, latent code, reasons; what is missing.

The parameters stay as they are, so that what rows are multiplied by is gathered once per model.

What the page asks for, each as one message.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix import __version__
from factormix.core import attribution, density
from factormix.core.attribution import observed_conditionals
from factormix.core.conditionals import Imputer
from factormix.core.missing import observed_posterior
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters
from factormix.errors import InputError
from factormix.views.explorer.exhibition import Exhibition
from factormix.views.explorer.subject import Subject

__all__ = [
    "analyse",
    "analysis",
    "component",
    "component_map",
    "data",
    "extremes",
    "message",
    "model",
    "nearest",
    "plain",
    "row",
    "samples",
    "snapshot",
    "training",
]

DTYPES = {"float32", "uint8", "int32", "float64"}


def message(facts: Mapping[str, Any], **arrays: NDArray[Any]) -> bytes:
    """Write facts, which JSON knows, and arrays of the dtypes that the page knows."""
    described, pieces, at = [], [], 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"the page does not read arrays of {array.dtype.name}")
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        dtype, shape = array.dtype.name, list(array.shape)
        described.append({"name": name, "dtype": dtype, "shape": shape, "at": at})
        padding = -len(raw) % 8
        pieces += [raw, b"\0" * padding]
        at += len(raw) + padding
    header = json.dumps({"facts": plain(facts), "arrays": described}, allow_nan=False).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return struct.pack("<I", len(header)) + header + b"".join(pieces)


def plain(value: Any) -> Any:
    """Turn numbers of NumPy into those of JSON, which has no NaN: that becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


SHARES = 6
"""Components of a row that are listed, at most."""
LEAST_SHARE = 0.0005
"""Responsibility from which a component is listed."""
FILLING = 16
"""Components by which a row with values missing is filled in and judged value by value: those that
its observed values speak for."""
OWN_SAMPLES = 500
"""Samples by which a model says what is usual for rows with the same values missing."""

Answer = tuple[dict[str, Any], dict[str, NDArray[Any]]]


@torch.no_grad()
def analyse(subject: Subject, values: NDArray[np.float64]) -> Answer:
    """Describe a row (d,), in which NaN stands for what is missing, as facts and arrays (d,)."""
    if values.shape != (subject.d,):
        raise InputError(f"a row of this model has {subject.d} values, not {values.size}.")
    if np.isinf(values).any():
        raise InputError("every value of a row must be a finite number, or missing.")
    missing = np.isnan(values)
    if missing.all():
        raise InputError("all values of the row are missing: give at least one.")
    return _incomplete(subject, values, missing) if missing.any() else _complete(subject, values)


def _complete(subject: Subject, values: NDArray[np.float64]) -> Answer:
    x = torch.tensor(values[None]).to(subject.mixture.means)
    ops, display = subject.operands, subject.display
    log_p, Y = density.project(x, ops)
    log_likelihood, shares = _judged(log_p + ops.log_weights)
    k = int(shares.argmax())
    z = Y[0, k] * ops.latent_variances[k].sqrt()
    rebuilt = _decoded(subject.mixture.component(k).precision_form, z)
    given_others = attribution.conditionals(x, ops)
    facts = _facts(float(log_likelihood), shares[0], k, z, ops.latent_variances[k])
    return facts, {
        "row": display.row(values),
        "centroid": subject.means[k],
        "rebuilt": display.row(rebuilt),
        "expected": display.row(given_others.expected[0].numpy()),
        "z_scores": given_others.z_score[0].float().numpy(),
    }


def _incomplete(
    subject: Subject, values: NDArray[np.float64], missing: NDArray[np.bool_]
) -> Answer:
    """Describe a row by its observed values, and fill in the others.

    The marginal of the observed values costs little for all components; the few that it speaks for
    fill in the rest.
    """
    display, whole = subject.display, subject.parameters
    there = torch.from_numpy(np.flatnonzero(~missing))
    marginal = subject.mixture.marginal(there)
    x = torch.tensor(values[None]).to(whole.means)
    joint = marginal.component_log_prob(x[:, there]) + whole.log_weights
    log_likelihood, shares = _judged(joint)
    chosen = shares[0].topk(min(FILLING, subject.K)).indices
    few = Parameters(*(t[chosen] for t in whole))
    gaps = torch.from_numpy(missing[None])
    filler = Imputer(few)
    _, codes, variances = observed_posterior(x, gaps, filler.ops)
    z = codes[0, 0]
    own = marginal.log_prob(_drawn(marginal))
    given_others = observed_conditionals(x, gaps, filler.ops)
    k = int(chosen[0])
    facts = _facts(float(log_likelihood), shares[0], k, z, variances[0, 0])
    facts |= {
        "missing": int(missing.sum()),
        "percentile": float((own < log_likelihood).double().mean()),
        "among": "samples",
    }
    return facts, {
        "row": display.row(values),
        "centroid": subject.means[k],
        "rebuilt": display.row(_decoded(Parameters(*(t[:1] for t in few)), z)),
        "filled": display.row(filler.mean(x, gaps)[0].numpy()),
        "doubt": display.spread(filler.deviation(x, gaps)[0].numpy()),
        "expected": display.row(given_others.expected[0].numpy()),
        "z_scores": given_others.z_score[0].float().numpy(),
    }


def _judged(joint: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-likelihood (1,) and responsibilities (1, K) of a row; say if there are none."""
    log_likelihood, shares = density.log_normaliser(joint)
    if not bool(torch.isfinite(log_likelihood)):
        raise InputError("the values are too large to compute with: give smaller ones.")
    return log_likelihood, shares


def _facts(score: float, shares: Tensor, k: int, z: Tensor, variances: Tensor) -> dict[str, Any]:
    largest = shares.topk(min(SHARES, len(shares)))
    listed = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    return {
        "log_likelihood": score,
        "component": k,
        "shares": [[j, share] for j, share in listed if share >= LEAST_SHARE],
        "code": z.tolist(),
        "code_deviation": variances.sqrt().tolist(),
    }


def _decoded(component: Parameters, z: Tensor) -> NDArray[Any]:
    """Compute ``mu + Lambda z``, (d,), for the code z (l,) of a mixture of one component."""
    row = density.decode(component, z[None].to(component.means), torch.zeros(1, dtype=torch.long))
    return row[0].numpy()


def _drawn(mixture: PrecisionMixture) -> Tensor:
    return mixture.sample(OWN_SAMPLES, generator=torch.Generator().manual_seed(0))


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
