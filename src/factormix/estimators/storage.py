"""Save estimators to files and load them.

A file names the class of its estimator. Every subclass of ``StoredModel`` is registered under its
name when it is defined, so that a new estimator, in this package or elsewhere, loads without any
further step once its module is imported.
"""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.data.features import Features
from factormix.data.sources.base import Rows
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.validation import Array, check_device, check_rows, set_features_
from factormix.training.checkpoints import checkpoints_in
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.serialization import read_file, write_file
from factormix.training.solvers import Solver, resolve, to_settings

Tensors = Mapping[str, Tensor]
Settings = dict[str, Any]
M = TypeVar("M", bound="StoredModel")

_classes: dict[str, type[StoredModel]] = {}


class StoredModel(BaseEstimator):
    """An estimator that remembers the columns of its rows, and can be saved and loaded.

    A subclass returns in ``_pack`` the named tensors and JSON-ready settings of what it has
    learned, and restores that in ``_unpack_``. Options and columns are stored here.
    """

    n_features_in_: int
    image_shape_: tuple[int, ...] | None
    _unsaved: tuple[str, ...] = ("device",)
    """Options that are not in the file."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Register the class for ``load``."""
        super().__init_subclass__(**options)
        _classes[_stored_name(cls)] = cls

    def save(self, path: str | os.PathLike[str], *, training_state: bool = True) -> None:
        """Write the model to a safetensors file, atomically.

        ``training_state=False`` leaves out the state that ``partial_fit`` and ``resume`` need to
        continue.
        """
        check_is_fitted(self)
        tensors, settings = pack_model(self, training_state=training_state)
        settings = {"estimator": _stored_name(type(self)), **settings}
        write_file(path, tensors, settings, self._communicator)

    @property
    def _communicator(self) -> Communicator:
        """The processes that hold the model together."""
        return SINGLE

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        raise NotImplementedError(f"{type(self).__name__} must define _pack to be saved")

    def _unpack_(self, tensors: Tensors, settings: Settings) -> int:
        """Restore what ``_pack`` returned, and return the number of features."""
        raise NotImplementedError(f"{type(self).__name__} must define _unpack_ to be loaded")

    def _check_rows(self, X: Array | Rows, sample_weight: Array | None = None) -> Rows:
        check_is_fitted(self)
        return check_rows(self, X, sample_weight)

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether there is a model."""
        return hasattr(self, "n_features_in_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> Any:
    """Read a model that ``save`` wrote; nothing in the file is executed.

    The model is of the class that was saved. A class from outside this package must have been
    imported before. From a folder of checkpoints, the newest intact one is read; a damaged one is
    skipped with a ``TrainingWarning``.
    """
    check_device(device)
    if os.path.isdir(path):
        return _load_newest(path, device)
    tensors, settings = read_file(path)
    try:
        name = settings["estimator"]
        if name not in _classes:
            module = name.rpartition(".")[0]
            what = f"import {module}" if module else "upgrade factormix"
            raise InputError(
                f"{path} holds a model of the class {name}, which is not known here: {what} before"
                " loading it."
            )
        return unpack_model(_classes[name], tensors, settings, device)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} lacks a part of the model ({error}): it is damaged or of another kind."
        ) from error


def _load_newest(folder: str | os.PathLike[str], device: str | torch.device | None) -> Any:
    """Read the newest intact checkpoint of a folder."""
    found = checkpoints_in(folder)
    if not found:
        raise InputError(
            f"{folder} is not a file and holds no checkpoints: give the path of a model file, or of"
            " a folder of checkpoints."
        )
    damaged = list[str]()
    for path in reversed(found):
        try:
            model = load(path, device=device)
        except InputError as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(
                f"{len(damaged)} of the {len(found)} checkpoints in {folder} cannot be used, so"
                f" {path.name} with {model.n_steps_:,} steps is loaded instead: {damaged[0]}",
                TrainingWarning,
                stacklevel=3,
            )
        return model
    raise InputError(f"none of the {len(found)} checkpoints in {folder} is whole: {damaged[0]}")


def pack_model(model: StoredModel, *, training_state: bool) -> tuple[Tensors, Settings]:
    """Return the tensors and JSON-ready settings of a model."""
    tensors, learned = model._pack(training_state=training_state)
    options = model.get_params(deep=False)
    if not isinstance(options["random_state"], numbers.Integral):
        options["random_state"] = None
    names = getattr(model, "feature_names_in_", None)
    return tensors, {
        "options": {n: _plain(value) for n, value in options.items() if n not in model._unsaved},
        "feature_names": None if names is None else [str(name) for name in names],
        "image_shape": model.image_shape_,
        **learned,
    }


def unpack_model(
    cls: type[M], tensors: Tensors, settings: Settings, device: str | torch.device | None
) -> M:
    """Build a model of a class from what ``pack_model`` returned."""
    model = cls(**settings["options"], device=device)
    n_features = model._unpack_(tensors, settings)
    names, shape = settings["feature_names"], settings["image_shape"]
    set_features_(model, Features(n_features, names and tuple(names), shape and tuple(shape)))
    return model


def name_solver(solver: Solver[Any]) -> str | Solver[Any]:
    """Return the name of a solver with default options, or the solver itself."""
    return solver.name if resolve(solver.name) == solver else solver


def _stored_name(cls: type[StoredModel]) -> str:
    """Return the name of a class in files: with its module, unless it is in this package."""
    inside = cls.__module__.partition(".")[0] == "factormix"
    return cls.__name__ if inside else f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    """Turn the value of an option into what JSON knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | list | tuple | range):
        return [_plain(one) for one in value]
    if isinstance(value, torch.dtype | np.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Solver):
        return to_settings(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value
