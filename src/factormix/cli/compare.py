"""``factormix compare``: two models of the same features, side by side."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import load_mixture, parse_columns, read, say, table
from factormix.cli.options import Columns, Header, Key

if TYPE_CHECKING:
    from factormix.estimators import MFA
    from factormix.estimators.comparison import Comparison

__all__ = ["compare"]

CLOSE = 0.5
"""Overlap from which two components are counted as much alike."""


def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A file of train.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DATA", help="Rows that are new to both models."),
    ] = None,
    n_samples: Annotated[
        int, typer.Option("--n-samples", "-n", min=2, help="Samples of each model.")
    ] = 10_000,
    random_state: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compare two models: on new rows, by samples of each, and component by component.

    The log-likelihood is a mean over rows, with the standard error of the difference. The
    divergences are Kullback-Leibler, in nats, estimated from samples.
    """
    from factormix.estimators.comparison import compare as compare_models

    models = load_mixture(first), load_mixture(second)
    shape = models[0].image_shape_
    size = (shape[0], shape[1]) if shape and data is not None and data.is_dir() else None
    chosen = parse_columns(columns)
    rows = None
    if data is not None:
        rows = read(data, key=key, image_size=size, header=header, columns=chosen)
    found = compare_models(*models, rows, n_samples=n_samples, random_state=random_state)
    facts = _facts(models, found)
    say(json.dumps(facts, indent=2) if as_json else table(_readable(models, found)))


def _facts(models: tuple[MFA, MFA], found: Comparison) -> dict[str, Any]:
    """Collect what was found in JSON-ready values."""
    levels, difference = found.log_likelihoods, found.difference
    return {
        "n_components": [model.n_components for model in models],
        "n_factors": [model.n_factors_ for model in models],
        "n_parameters": [model.n_parameters_ for model in models],
        "log_likelihoods": None if levels is None else list(levels),
        "difference": None if difference is None else vars(difference),
        "divergence": vars(found.divergence),
        "reverse_divergence": vars(found.reverse),
        "matches": [
            {"first": m.first, "second": m.second, "distance": m.distance, "overlap": m.overlap}
            for m in found.matches
        ],
    }


def _readable(models: tuple[MFA, MFA], found: Comparison) -> dict[str, str]:
    """Turn what was found into lines for people."""
    sizes = [
        f"{m.n_components} components, {m.n_factors_} factors, {m.n_parameters_:,} parameters"
        for m in models
    ]
    lines = {"first": sizes[0], "second": sizes[1]}
    if found.log_likelihoods is not None:
        lines["log-likelihood"] = "first {:.6g}, second {:.6g}".format(*found.log_likelihoods)
        lines["difference"] = str(found.difference)
    lines["KL(first || second)"] = f"{found.divergence} nats"
    lines["KL(second || first)"] = f"{found.reverse} nats"
    close = sum(match.overlap > CLOSE for match in found.matches)
    middle = statistics.median(match.distance for match in found.matches)
    lines["components"] = (
        f"{len(found.matches)} pairs, median distance {middle:.3g}, {close} overlap by more than"
        f" {CLOSE:g}"
    )
    return lines
