"""An outlier detector as named tensors and settings, and back."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, latent_variances
from factormix.data.sources import Features
from factormix.data.units import Units
from factormix.estimators.members import Level, Member
from factormix.estimators.recipes import Recipe
from factormix.estimators.validation import check_device, check_dtype, remember_features

if TYPE_CHECKING:
    from factormix.estimators.outliers import MFAOutlierDetector

__all__ = ["pack_detector", "unpack_detector"]

D = TypeVar("D", bound="MFAOutlierDetector")


def pack_detector(detector: MFAOutlierDetector) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all that a detector is, as named tensors and JSON-ready settings."""
    tensors = {
        "units.offset": detector._units.offset,
        "units.scale": detector._units.scale,
        "held_out_scores": torch.from_numpy(detector.held_out_scores_),
    }
    for number, member in enumerate(detector._members):
        for name, tensor in member.mixture.state_dict().items():
            tensors[f"member{number}.{name}"] = tensor
        for name, tensor in member.level._asdict().items():
            tensors[f"member{number}.level.{name}"] = tensor
    names = getattr(detector, "feature_names_in_", None)
    return tensors, {
        "options": _options(detector),
        "feature_names": None if names is None else [str(name) for name in names],
        "image_shape": detector.image_shape_,
        "members": len(detector._members),
        "reader": detector._reader,
        "offset": detector.offset_,
    }


def _options(detector: MFAOutlierDetector) -> dict[str, Any]:
    seed: Any = detector.random_state
    share, recipe = detector.contamination, detector.recipe
    return {
        "novelty": bool(detector.novelty),
        "contamination": share if isinstance(share, str) else float(share),
        "scoring": detector.scoring,
        "recipe": None if recipe is None else recipe.packed(),
        "random_state": int(seed) if isinstance(seed, numbers.Integral) else None,
        "dtype": str(check_dtype(detector.dtype)).removeprefix("torch."),
        "verbose": int(detector.verbose),
    }


def unpack_detector(
    cls: type[D], tensors: Any, settings: dict[str, Any], device: str | torch.device | None
) -> D:
    """Make a detector of what ``pack_detector`` returned."""
    options, place = dict(settings["options"]), check_device(device)
    if options["recipe"] is not None:
        options["recipe"] = Recipe.unpacked(options["recipe"])
    detector = cls(**options, device=device)
    detector._units = Units(tensors["units.offset"], tensors["units.scale"])
    detector._members = [_member(tensors, i, place) for i in range(settings["members"])]
    detector._reader = int(settings["reader"])
    detector.held_out_scores_ = tensors["held_out_scores"].numpy()
    detector.offset_ = float(settings["offset"])
    names, shape = settings["feature_names"], settings["image_shape"]
    count = len(tensors["units.offset"])
    features = Features(count, names and tuple(names), shape and tuple(shape))
    remember_features(detector, features)
    return detector


def _member(tensors: Any, number: int, device: torch.device) -> Member:
    def part(name: str) -> Tensor:
        tensor: Tensor = tensors[f"member{number}.{name}"]
        return tensor.to(device)

    E, Gamma = part("precision_diag"), part("precision_factors")
    parameters = Parameters(part("logits"), part("means"), E, Gamma, latent_variances(E, Gamma))
    mixture = PrecisionMixture.from_parameters(parameters)
    return Member(mixture, Level(part("level.median"), part("level.spread")))
