"""Answer the questions of the page, each with one binary message of facts and arrays.

A message starts with the length of its header (four bytes, little-endian). Then come the header as
JSON and the bytes of the arrays, each at a multiple of eight. The header holds the ``facts``, and
the name, dtype, shape and offset of each array; offsets count from the end of the header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError
from factormix.views.explorer.analysis import Analysis, analyse_row
from factormix.views.explorer.image_view import ImageView, ImageWork
from factormix.views.explorer.layout import USUAL_RATIO
from factormix.views.explorer.session import NotReady, Session

DTYPES = {"float32", "uint8", "int32", "float64"}
"""Dtypes that the page reads."""
MAX_ROWS = 60
"""Maximum number of rows sent at once; the page asks for 12."""
OUTLIER_SHARE = 0.01
"""Share of the least likely rows that count as outliers, unless the page asks for another: few
enough to look through."""
N_NEAREST = 12
"""Rows listed for a component, as many as the page lists of all rows."""
SURPRISE_RANGE = (0.005, 0.995)
"""Quantiles of the bits of pixels between which they are coloured: a few extreme pixels would leave
one colour for all others."""


def pack_message(facts: Mapping[str, Any], **arrays: NDArray[Any]) -> bytes:
    """Pack facts, which JSON can express, and arrays of the known dtypes."""
    described, pieces, offset = [], [], 0
    for name, array in arrays.items():
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise TypeError(f"the page does not read arrays of {dtype}")
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        described.append(
            {"name": name, "dtype": dtype, "shape": list(array.shape), "offset": offset}
        )
        padding = -len(raw) % 8
        pieces += [raw, b"\0" * padding]
        offset += len(raw) + padding
    content = {"facts": to_json(facts), "arrays": described}
    header = json.dumps(content, allow_nan=False).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return struct.pack("<I", len(header)) + header + b"".join(pieces)


def to_json(value: Any) -> Any:
    """Convert NumPy numbers and arrays for JSON; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def describe_model(session: Session) -> bytes:
    """Send sizes, feature names, and how rows are drawn."""
    if isinstance(session.newest, ImageView):
        return pack_message({**session.state(), **session.newest.describe()})
    view = session.view
    display = view.display
    facts = {
        **session.state(),
        "components": view.K,
        "features": view.d,
        "factors": view.l,
        "heaviest": int(view.weights.argmax()),
        "kind": display.kind,
        "shape": display.shape,
        "low": display.low,
        "high": display.high,
        "feature_names": view.feature_names,
        "text": session.store is not None,
    }
    return pack_message(facts, centre=display.centre, scale=display.scale)


def send_map(session: Session, share: float = OUTLIER_SHARE, ratio: float = USUAL_RATIO) -> bytes:
    """Send the pictures of all components, their cells, and the values of their frames."""
    view, share = session.view, _check_share(share)
    if not 0 < ratio < math.inf:
        raise InputError("the ratio of width and height must be a positive number.")
    (rows, cols), order = view.arrange(ratio)
    arrays: dict[str, NDArray[Any]] = {
        "order": order,
        "tiles": view.tiles,
        "weights": view.weights.astype(np.float32),
        "used": view.in_use.astype(np.uint8),
    }
    try:
        by_component = session.complete_scores.by_component(view.K, share)
        arrays |= {name: values.astype(np.float32) for name, values in by_component.items()}
    except InputError:
        # Without scored data, frames can show weights only.
        pass
    return pack_message({"version": session.version, "rows": rows, "cols": cols}, **arrays)


def describe_component(session: Session, k: int) -> bytes:
    """Send one component: weight, variance shares, mean, precision, spread and loadings."""
    facts, arrays = session.view.describe_component(k)
    return pack_message(facts, **arrays)


def send_nearest(session: Session, k: int) -> bytes:
    """Send the rows of the data that are nearest to a centroid."""
    session.view.check_component(k)
    return _send_rows(session, session.complete_scores.nearest(k, N_NEAREST))


def send_samples(
    session: Session, k: int | None = None, n: int = 12, noise: int = 0, seed: int = 0
) -> bytes:
    """Send samples of component ``k``, or of the whole model."""
    samples = session.view.draw_samples(k, max(1, min(n, MAX_ROWS)), noise > 0, seed)
    return pack_message({}, samples=samples)


def describe_data(session: Session, share: float = OUTLIER_SHARE) -> bytes:
    """Send the histogram of scores, and the threshold of a given share of outliers."""
    scores = session.complete_scores
    facts = {
        "rows": scores.rows.n_rows,
        "incomplete": scores.incomplete,
        "left_out": scores.left_out,
        "histogram": scores.histogram(),
        "threshold": scores.threshold(_check_share(share)),
    }
    return pack_message(facts)


def send_extremes(session: Session, least: int = 0, n: int = 12) -> bytes:
    """Send the most or the least likely rows of the data."""
    scores = session.complete_scores
    return _send_rows(session, scores.extremes(max(1, min(n, MAX_ROWS)), least=least > 0))


def send_row(session: Session, number: int) -> bytes:
    """Send one row of the data with its analysis."""
    # Numbers too large for an index still get the error of the reader, which names the range.
    values = session.read_rows([min(number, session.scores.rows.n_rows)])[0]
    facts, arrays = _analyse(session, values, number)
    # The shown row has fewer digits than the values.
    names = session.name_rows([number])
    return pack_message({**facts, "name": names and names[0]}, values=values, **arrays)


def send_analysis(session: Session, body: bytes) -> bytes:
    """Send the analysis of a row (d,) of float64 from the page; NaN is a missing value."""
    if len(body) % 8:
        raise InputError("the row is cut off in the middle of a value: send it again.")
    facts, arrays = _analyse(session, np.frombuffer(body, "<f8"))
    return pack_message(facts, **arrays)


def describe_text(session: Session) -> bytes:
    """Send the components with their tokens."""
    return pack_message(session.text.describe(session.atlas))


def search_token(session: Session, q: str = "") -> bytes:
    """Send the components of the rows of a token."""
    return pack_message(session.text.search(session.atlas, q))


def describe_text_component(session: Session, k: int) -> bytes:
    """Send the contexts of a component and of the ends of its factors."""
    return pack_message(session.text.describe_component(session.atlas, k))


def send_document(session: Session, d: int, component: int | None = None) -> bytes:
    """Send the tokens of a document with their components and codes, or codes in a component."""
    facts, arrays = session.text.read_document(min(d, 1 << 62), component)
    return pack_message(facts, **arrays)


def send_image_samples(session: Session, height: int = 32, width: int = 32, seed: int = 0) -> bytes:
    """Send samples of a model of whole images at every depth."""
    view = session.images
    found = _finish(view.sample(height, width, seed), "images are drawn")
    tiles = {f"depth{i}": view.draw_tiles(images) for i, images in enumerate(found)}
    return pack_message({}, **tiles)


def send_surprise(session: Session, body: bytes, height: int = 0, width: int = 0) -> bytes:
    """Send the bits of each pixel of an image from the page."""
    images = session.images
    bits = _finish(images.surprise(body, height, width), "images are scored")[0][0]
    low, high = np.quantile(bits, SURPRISE_RANGE)
    total = float(bits.sum(dtype=np.float64))
    facts = {
        "bits": total,
        "bits_per_dim": total / (bits.size * images.n_channels),
        # A few extreme pixels must not turn all others into one colour.
        "low": low,
        "high": high if high > low else low + 1,
        "most": bits.max(),
    }
    return pack_message(facts, bits=bits)


def send_fillings(
    session: Session, body: bytes, height: int = 0, width: int = 0, seed: int = 0
) -> bytes:
    """Send the part of an image around its erased pixels with these filled: draws, their mean."""
    (draws,) = _finish(session.images.fill(body, height, width, seed), "fillings are drawn")
    return pack_message({}, mean=draws.mean(axis=0, dtype=np.float32), draws=draws)


def describe_training(session: Session) -> bytes:
    """Send the training curves and the list of snapshots."""
    snapshots = session.snapshots
    facts = {"curves": snapshots.curves(), "snapshots": snapshots.describe()}
    return pack_message({**session.state(), **facts})


def send_snapshot(session: Session, version: int) -> bytes:
    """Send the pictures of one snapshot."""
    facts, tiles = session.snapshots.get(version)
    return pack_message(facts, tiles=tiles)


ANSWERS: dict[str, Callable[..., bytes]] = {
    "/api/model": describe_model,
    "/api/map": send_map,
    "/api/component/{k:int}": describe_component,
    "/api/component/{k:int}/nearest": send_nearest,
    "/api/component/{k:int}/samples": send_samples,
    "/api/samples": send_samples,
    "/api/data": describe_data,
    "/api/data/extremes": send_extremes,
    "/api/row/{number:int}": send_row,
    "/api/analyse": send_analysis,
    "/api/text": describe_text,
    "/api/text/token": search_token,
    "/api/text/component/{k:int}": describe_text_component,
    "/api/text/document/{d:int}": send_document,
    "/api/images/samples": send_image_samples,
    "/api/images/surprise": send_surprise,
    "/api/images/fill": send_fillings,
    "/api/training": describe_training,
    "/api/training/{version:int}": send_snapshot,
}
"""The function that answers each path; its arguments with defaults come from the query."""


def _finish(work: ImageWork, progress: str) -> list[NDArray[Any]]:
    """Return the images of a work, or raise an error that says how far it is."""
    if work.problem is not None:
        raise InputError(work.problem)
    images = work.images
    if images is None:
        raise NotReady(f"{work.done} of {work.n} {progress} so far.")
    return images


def _check_share(share: float) -> float:
    if not 0 <= share <= 0.5:
        raise InputError("the share of outliers must lie between 0 and 0.5.")
    return share


def _send_rows(session: Session, numbers: NDArray[np.int64]) -> bytes:
    rows = session.view.display.convert_rows(session.read_rows(numbers.tolist()))
    names = session.name_rows(numbers.tolist())
    facts = {"numbers": numbers, "names": names, "scores": session.scores.at(numbers)}
    return pack_message(facts, rows=rows)


def _analyse(session: Session, values: NDArray[np.float64], number: int | None = None) -> Analysis:
    """Analyse a row, and compare its score with the data or with samples of the model.

    A row of the data, by its number, has the score that it was listed with.
    """
    view = session.view
    facts, arrays = analyse_row(view, values)
    if number is not None and session.scores.complete:
        facts["log_likelihood"] = float(session.scores.at(np.array([number]))[0])
    # An incomplete row has been compared with samples that miss the same values.
    if "missing" not in facts:
        score = facts["log_likelihood"]
        try:
            facts |= {"percentile": session.complete_scores.percentile(score), "among": "data"}
        except InputError:
            below = float(np.searchsorted(view.sample_scores, score))
            facts |= {"percentile": below / len(view.sample_scores), "among": "samples"}
    return facts, arrays
