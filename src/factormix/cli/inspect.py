"""``factormix info`` and ``compare``: describe one model, or two side by side."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import format_shape, format_table, print_line
from factormix.cli.options import AsJson, Model, Reading, load_mixture, with_shared_options

if TYPE_CHECKING:
    from factormix.estimators import MFA, ConvMFA, MFAClassifier, MFAImputer, MFAOutlierDetector
    from factormix.estimators.inspection import Comparison

CLOSE = 0.5
"""Overlap above which two components count as alike: more shared than not."""


def info(model: Model, as_json: AsJson = False) -> None:
    """Show the size of MODEL and how it was trained."""
    from factormix.estimators import ConvMFA, MFAClassifier, MFAImputer, MFAOutlierDetector, load

    loaded: Any = load(model)
    if isinstance(loaded, MFAClassifier):
        facts = _describe_classifier(loaded)
        lines = _format_classifier(facts)
    elif isinstance(loaded, ConvMFA | MFAOutlierDetector | MFAImputer):
        if isinstance(loaded, ConvMFA):
            facts = _describe_conv(loaded)
        else:
            detector = isinstance(loaded, MFAOutlierDetector)
            facts = _describe_detector(loaded) if detector else _describe_imputer(loaded)
        lines = {name.replace("_", " "): str(value) for name, value in facts.items()}
    else:
        facts = _describe_mixture(loaded)
        lines = _format_mixture(facts)
    print_line(json.dumps(facts, indent=2) if as_json else format_table(lines))


def _describe_detector(detector: MFAOutlierDetector) -> dict[str, Any]:
    shape = detector.image_shape_
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
        "feature_names": _feature_names(detector),
    }


def _describe_imputer(imputer: MFAImputer) -> dict[str, Any]:
    return {
        "kind": "imputer",
        "components": [mixture.n_components for mixture in imputer.mixtures_],
        "noise_floor": float(imputer.noise_floor),
        "n_features": int(imputer.n_features_in_),
        "feature_names": _feature_names(imputer),
    }


def _describe_conv(model: ConvMFA) -> dict[str, Any]:
    last = model.history_[-1] if model.history_ else {}
    names = ("n_kinds", "n_scales", "n_features", "n_neighbours", "depth")
    return {
        "kind": "density of images",
        "channels": int(model.n_features_in_),
        **{name: getattr(model, name) for name in names},
        "bits_per_dim": last.get("bits_per_dim"),
        "steps": model.n_steps_,
        "seconds": last.get("seconds"),
        "finished": model.finished_,
    }


def _describe_mixture(model: MFA) -> dict[str, Any]:
    import numpy as np

    from factormix.core.inspection import components_in_use
    from factormix.estimators.inspection import variance_explained

    weights = np.asarray(model.weights_, dtype=np.float64)
    deviations = np.sqrt(np.asarray(model.noise_variances_, dtype=np.float64))
    options = model.get_params(deep=False)
    last = model.history_[-1] if model.history_ else {}
    between, factors, noise = variance_explained(model)[:3]
    names = ("max_precision", "scaling", "noise", "dtype", "random_state")
    settings = {name: options[name] for name in names}
    return {
        "n_components": len(weights),
        "n_factors": model.n_factors_,
        "n_features": int(model.n_features_in_),
        "image_shape": None if model.image_shape_ is None else list(model.image_shape_),
        "feature_names": _feature_names(model),
        "components_in_use": components_in_use(weights),
        "ranks": np.asarray(model.ranks_).tolist() if options["n_factors"] == "auto" else None,
        "effective_factors": np.asarray(model.effective_factors_, dtype=np.float64).tolist(),
        "n_parameters": model.n_parameters_,
        "variance": {"between components": between, "in their factors": factors, "noise": noise},
        "weights": weights.tolist(),
        "noise_deviations": [float(np.quantile(deviations, q)) for q in (0, 0.5, 1)],
        "log_likelihood": last.get("log_likelihood"),
        "candidates": last.get("candidates"),
        "screening_loss": last.get("screening_loss"),
        "solver": model.solver_.name,
        "settings": settings | {"batch_size": model.batch_size_},
        "epochs": model.n_iter_,
        "planned_epochs": model.planned_epochs_,
        "finished": model.finished_,
        "converged": model.converged_,
        "steps": model.n_steps_,
        "samples_seen": model.n_samples_seen_,
        "seconds": round(model.seconds_, 3),
    }


def _format_mixture(facts: dict[str, Any]) -> dict[str, str]:
    weights = facts["weights"]
    least, median, most = facts["noise_deviations"]
    shape, planned = facts["image_shape"], facts["planned_epochs"]
    level, variance = facts["log_likelihood"], facts["variance"]
    images = f" ({format_shape(shape)} images)" if shape else ""
    state = "finished" if facts["finished"] else "not finished: train --resume continues"
    passes = f"{facts['epochs']} of {planned}, {state}" if planned else "a stream"
    return {
        "components": f"{facts['n_components']}, {facts['components_in_use']} in use",
        "factors": _format_factors(facts),
        "parameters": f"{facts['n_parameters']:,}",
        "variance": ", ".join(f"{100 * share:.0f}% {name}" for name, share in variance.items()),
        "features": f"{facts['n_features']:,}{images}",
        "weights": f"{min(weights):.3g} to {max(weights):.3g}",
        "noise deviations": f"{least:.3g} to {most:.3g}, median {median:.3g}",
        "log-likelihood": "none yet" if level is None else f"{level:.6g}, mean of the last batches",
        **_format_screening(facts),
        "solver": facts["solver"],
        "settings": ", ".join(f"{name} {value}" for name, value in facts["settings"].items()),
        "epochs": passes,
        "steps": f"{facts['steps']:,}, {facts['samples_seen']:,} rows in {facts['seconds']:.1f} s",
    }


def _format_factors(facts: dict[str, Any]) -> str:
    """Write the number of factors and how many of them the components use."""
    text, effective = f"{facts['n_factors']} per component", facts["effective_factors"]
    if not facts["n_factors"]:
        return text
    if facts["ranks"] is not None:
        text = f"{min(facts['ranks'])} to {max(facts['ranks'])} per component"
    mean = sum(w * e for w, e in zip(facts["weights"], effective, strict=True))
    return f"{text}, {min(effective):.2g} to {max(effective):.2g} effective, mean {mean:.2g}"


def _format_screening(facts: dict[str, Any]) -> dict[str, str]:
    """Write the number of components that each row is evaluated against, unless it is all."""
    n_candidates = facts["candidates"]
    if n_candidates is None or n_candidates >= facts["n_components"]:
        return {}
    loss = f"{facts['screening_loss']:.3g} nats a row lost, as estimated in training"
    return {"candidates": f"{n_candidates:.0f} components for each row, {loss}"}


def _describe_classifier(model: MFAClassifier) -> dict[str, Any]:
    labels, priors = model.classes_.tolist(), model.class_prior_.tolist()
    mixtures = [None if one is None else _describe_mixture(one) for one in model.estimators_]
    return {
        "n_features": int(model.n_features_in_),
        "reject": float(model.reject),
        "reject_by": model.reject_by,
        "classes": [
            {"label": label, "prior": prior, "mixture": mixture}
            for label, prior, mixture in zip(labels, priors, mixtures, strict=True)
        ],
    }


def _format_classifier(facts: dict[str, Any]) -> dict[str, str]:
    share = f"{facts['reject']:.3g} of the training rows, by {facts['reject_by']}"
    lines = {
        "classes": f"{len(facts['classes'])}",
        "features": f"{facts['n_features']:,}",
        "rejects": share if facts["reject"] else "none",
    }
    for one in facts["classes"]:
        mixture = one["mixture"]
        size, factors = "no rows yet", ""
        if mixture is not None:
            size = f"{mixture['n_components']} components"
            factors = f", factors: {_format_factors(mixture)}"
        lines[f"class {one['label']}"] = f"{size}, prior {one['prior']:.3g}{factors}"
    return lines


def _feature_names(model: object) -> list[str] | None:
    names = getattr(model, "feature_names_in_", None)
    return None if names is None else [str(name) for name in names]


@with_shared_options
def compare(
    first: Annotated[
        Path, typer.Argument(metavar="FIRST", help="A model file of factormix train.")
    ],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DATA", help="Rows that are new to both models."),
    ] = None,
    n_samples: Annotated[
        int, typer.Option("--n-samples", "-n", min=2, help="Number of samples of each model.")
    ] = 10_000,
    random_state: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    *,
    reading: Reading,
    as_json: AsJson = False,
) -> None:
    """Compare two models: on new rows, by samples of each, and component by component.

    The log-likelihood is a mean over rows, with the standard error of the difference. The
    divergences are Kullback-Leibler, in nats, estimated from samples.
    """
    from factormix.estimators.inspection import compare as compare_models

    models = load_mixture(first), load_mixture(second)
    rows = None if data is None else reading.read(data, model=models[0])
    comparison = compare_models(*models, rows, n_samples=n_samples, random_state=random_state)
    if as_json:
        print_line(json.dumps(_describe_comparison(models, comparison), indent=2))
    else:
        print_line(format_table(_format_comparison(models, comparison)))


def _describe_comparison(models: tuple[MFA, MFA], comparison: Comparison) -> dict[str, Any]:
    levels, difference = comparison.log_likelihoods, comparison.difference
    return {
        "n_components": [model.n_components_ for model in models],
        "n_factors": [model.n_factors_ for model in models],
        "n_parameters": [model.n_parameters_ for model in models],
        "log_likelihoods": None if levels is None else list(levels),
        "difference": None if difference is None else vars(difference),
        "divergence": vars(comparison.divergence),
        "reverse_divergence": vars(comparison.reverse),
        "matches": [
            {"first": m.first, "second": m.second, "distance": m.distance, "overlap": m.overlap}
            for m in comparison.matches
        ],
    }


def _format_comparison(models: tuple[MFA, MFA], comparison: Comparison) -> dict[str, str]:
    sizes = [
        f"{m.n_components_} components, {m.n_factors_} factors, {m.n_parameters_:,} parameters"
        for m in models
    ]
    lines = {"first": sizes[0], "second": sizes[1]}
    if comparison.log_likelihoods is not None:
        lines["log-likelihood"] = "first {:.6g}, second {:.6g}".format(*comparison.log_likelihoods)
        lines["difference"] = str(comparison.difference)
    lines["KL(first || second)"] = f"{comparison.divergence} nats"
    lines["KL(second || first)"] = f"{comparison.reverse} nats"
    n_close = sum(match.overlap > CLOSE for match in comparison.matches)
    median = statistics.median(match.distance for match in comparison.matches)
    lines["components"] = (
        f"{len(comparison.matches)} pairs, median distance {median:.3g}, {n_close} overlap by more"
        f" than {CLOSE:g}"
    )
    return lines
