"""``factormix info``: what a model file holds.

``factormix compare``: two models of the same features, side by side.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import (
    Columns,
    Header,
    Key,
    Model,
    load_mixture,
    parse_columns,
    read,
    say,
    shape_text,
    table,
)

if TYPE_CHECKING:
    from factormix.estimators import MFA, MFAClassifier, MFAImputer, MFAOutlierDetector
if TYPE_CHECKING:
    from factormix.estimators import MFA
    from factormix.estimators.inspection import Comparison

__all__ = ["compare", "describe", "describe_detector", "describe_imputer", "info"]


def info(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show the size of MODEL, how it was trained and how far."""
    from factormix.estimators import MFAClassifier, MFAImputer, MFAOutlierDetector, load

    loaded: Any = load(model)
    if isinstance(loaded, MFAClassifier):
        facts = _describe_classes(loaded)
        lines = _readable_classes(facts)
    elif isinstance(loaded, MFAOutlierDetector):
        facts = describe_detector(loaded)
        lines = {name.replace("_", " "): str(value) for name, value in facts.items()}
    elif isinstance(loaded, MFAImputer):
        facts = describe_imputer(loaded)
        lines = {name.replace("_", " "): str(value) for name, value in facts.items()}
    else:
        facts = describe(loaded)
        lines = _readable(facts)
    say(json.dumps(facts, indent=2) if as_json else table(lines))


def describe_detector(detector: MFAOutlierDetector) -> dict[str, Any]:
    """Collect what is worth knowing about an outlier detector in JSON-ready values."""
    names, shape = getattr(detector, "feature_names_in_", None), detector.image_shape_
    return {
        "kind": "outlier detector",
        "novelty": bool(detector.novelty),
        "contamination": detector.contamination,
        "scoring": detector.scoring,
        "threshold": detector.offset_,
        "mixtures": len(detector.mixtures_),
        "components": sum(mixture.n_components for mixture in detector.mixtures_),
        "held_out_rows": len(detector.held_out_scores_),
        "n_features": int(detector.n_features_in_),
        "image_shape": None if shape is None else list(shape),
        "feature_names": None if names is None else names.tolist(),
    }


def describe_imputer(imputer: MFAImputer) -> dict[str, Any]:
    """Collect what is worth knowing about an imputer in JSON-ready values."""
    names = getattr(imputer, "feature_names_in_", None)
    return {
        "kind": "imputer",
        "components": [mixture.n_components for mixture in imputer.mixtures_],
        "noise": float(imputer.noise),
        "n_features": int(imputer.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
    }


def describe(model: MFA) -> dict[str, Any]:
    """Collect what is worth knowing about a model in JSON-ready values."""
    import numpy as np

    from factormix.core.inspection import components_in_use

    weights = np.asarray(model.weights_, dtype=np.float64)
    deviations = np.sqrt(np.asarray(model.noise_variances_, dtype=np.float64))
    options = model.get_params(deep=False)
    names = getattr(model, "feature_names_in_", None)
    last = model.history_[-1] if model.history_ else {}
    return {
        "n_components": len(weights),
        "n_factors": model.n_factors_,
        "n_features": int(model.n_features_in_),
        "image_shape": None if model.image_shape_ is None else list(model.image_shape_),
        "feature_names": None if names is None else names.tolist(),
        "components_in_use": components_in_use(weights),
        "effective_factors": np.asarray(model.effective_factors_, dtype=np.float64).tolist(),
        "n_parameters": model.n_parameters_,
        "variance": _variance(model),
        "weights": weights.tolist(),
        "noise_deviations": [float(np.quantile(deviations, q)) for q in (0, 0.5, 1)],
        "log_likelihood": last.get("log_likelihood"),
        "candidates": last.get("candidates"),
        "screening_loss": last.get("screening_loss"),
        "solver": model.solver_.name,
        "settings": {
            name: options[name] for name in ("max_precision", "scaling", "dtype", "random_state")
        }
        | {"batch_size": model.batch_size_},
        "epochs": model.n_iter_,
        "planned_epochs": model.planned_epochs_,
        "finished": model.finished_,
        "converged": model.converged_,
        "steps": model.n_steps_,
        "samples_seen": model.n_samples_seen_,
        "seconds": round(model.seconds_, 3),
    }


def _readable(facts: dict[str, Any]) -> dict[str, str]:
    """Turn the facts into lines for people."""
    weights = facts["weights"]
    least, median, most = facts["noise_deviations"]
    shape, planned = facts["image_shape"], facts["planned_epochs"]
    level, variance = facts["log_likelihood"], facts["variance"]
    images = f" ({shape_text(shape)} images)" if shape else ""
    state = "finished" if facts["finished"] else "not finished: train --resume goes on"
    passes = f"{facts['epochs']} of {planned}, {state}" if planned else "a stream"
    return {
        "components": f"{facts['n_components']}, {facts['components_in_use']} in use",
        "factors": _factors(facts),
        "parameters": f"{facts['n_parameters']:,}",
        "variance": ", ".join(f"{100 * share:.0f}% {name}" for name, share in variance.items()),
        "features": f"{facts['n_features']:,}{images}",
        "weights": f"{min(weights):.3g} to {max(weights):.3g}",
        "noise deviations": f"{least:.3g} to {most:.3g}, median {median:.3g}",
        "log-likelihood": "none yet" if level is None else f"{level:.6g}, mean of the last batches",
        **_screening(facts),
        "solver": facts["solver"],
        "settings": ", ".join(f"{name} {value}" for name, value in facts["settings"].items()),
        "epochs": passes,
        "steps": f"{facts['steps']:,}, {facts['samples_seen']:,} rows in {facts['seconds']:.1f} s",
    }


def _variance(model: MFA) -> dict[str, float]:
    """Say where the variance lies, in units of the data."""
    from factormix.estimators.inspection import variance_explained

    found = variance_explained(model)
    names = ("between components", "in their factors", "noise")
    return dict(zip(names, found[:3], strict=True))


def _factors(facts: dict[str, Any]) -> str:
    """Say how many factors there are, and how many of them components make use of."""
    text, effective = f"{facts['n_factors']} per component", facts["effective_factors"]
    if not facts["n_factors"]:
        return text
    mean = sum(w * e for w, e in zip(facts["weights"], effective, strict=True))
    return f"{text}, {min(effective):.2g} to {max(effective):.2g} effective, mean {mean:.2g}"


def _describe_classes(model: MFAClassifier) -> dict[str, Any]:
    """Collect what is worth knowing about a classifier in JSON-ready values."""
    labels, priors = model.classes_.tolist(), model.class_prior_.tolist()
    members = [None if one is None else describe(one) for one in model.estimators_]
    return {
        "n_features": int(model.n_features_in_),
        "reject": float(model.reject),
        "reject_by": model.reject_by,
        "classes": [
            {"label": label, "prior": prior, "mixture": member}
            for label, prior, member in zip(labels, priors, members, strict=True)
        ],
    }


def _readable_classes(facts: dict[str, Any]) -> dict[str, str]:
    """Turn the facts about a classifier into lines for people."""
    share = f"{facts['reject']:.3g} of the training rows, by {facts['reject_by']}"
    lines = {
        "classes": f"{len(facts['classes'])}",
        "features": f"{facts['n_features']:,}",
        "rejects": share if facts["reject"] else "none",
    }
    for one in facts["classes"]:
        own = one["mixture"]
        size = "no rows yet" if own is None else f"{own['n_components']} components"
        factors = "" if own is None else f", factors: {_factors(own)}"
        lines[f"class {one['label']}"] = f"{size}, prior {one['prior']:.3g}{factors}"
    return lines


def _screening(facts: dict[str, Any]) -> dict[str, str]:
    """Tell how many of very many components each row is evaluated against, if not all."""
    few = facts["candidates"]
    if few is None or few >= facts["n_components"]:
        return {}
    lost = f"{facts['screening_loss']:.3g} nats a row lost, as estimated in training"
    return {"candidates": f"{few:.0f} components for each row, {lost}"}


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
    from factormix.estimators.inspection import compare as compare_models

    models = load_mixture(first), load_mixture(second)
    shape = models[0].image_shape_
    size = (shape[0], shape[1]) if shape and data is not None and data.is_dir() else None
    chosen = parse_columns(columns)
    rows = None
    if data is not None:
        rows = read(data, key=key, image_size=size, header=header, columns=chosen)
    found = compare_models(*models, rows, n_samples=n_samples, random_state=random_state)
    facts = _facts(models, found)
    say(json.dumps(facts, indent=2) if as_json else table(_readable_comparison(models, found)))


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


def _readable_comparison(models: tuple[MFA, MFA], found: Comparison) -> dict[str, str]:
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
