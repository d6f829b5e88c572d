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
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.data.features import Features
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.validation import check_device, check_dtype, set_features_
from factormix.training.checkpoints import checkpoints_in
from factormix.training.serialization import read_file, write_file
from factormix.training.solvers import Solver, resolve

Tensors = Mapping[str, Tensor]
Settings = dict[str, Any]

_classes: dict[str, type[StoredModel]] = {}


class StoredModel:
    """An estimator that can be saved to a file and loaded from it.

    A subclass returns in ``_pack`` the named tensors and JSON-ready settings of its file, and
    builds an estimator from these in ``_unpack``.
    """

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
        tensors, settings = self._pack(training_state=training_state)
        self._write(path, tensors, {"estimator": _stored_name(type(self)), **settings})

    def _write(self, path: str | os.PathLike[str], tensors: Tensors, settings: Settings) -> None:
        write_file(path, tensors, settings)

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        raise NotImplementedError(f"{type(self).__name__} must define _pack to be saved")

    @classmethod
    def _unpack(
        cls, tensors: Tensors, settings: Settings, device: str | torch.device | None
    ) -> Self:
        raise NotImplementedError(f"{cls.__name__} must define _unpack to be loaded")


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
        return _classes[name]._unpack(tensors, settings, device)
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


def pack_options(estimator: Any, *leave_out: str) -> Settings:
    """Return the options of an estimator, ready for JSON, without its device and some others."""
    options: Settings = estimator.get_params(deep=False)
    for name in ("device", *leave_out):
        options.pop(name, None)
    if not isinstance(options["random_state"], numbers.Integral):
        options["random_state"] = None
    if "dtype" in options:
        options["dtype"] = str(check_dtype(options["dtype"])).removeprefix("torch.")
    return {name: _plain(value) for name, value in options.items()}


def pack_features(estimator: Any) -> Settings:
    """Return the names of the columns and the shape of images, ready for JSON."""
    names = getattr(estimator, "feature_names_in_", None)
    return {
        "feature_names": None if names is None else [str(name) for name in names],
        "image_shape": estimator.image_shape_,
    }


def unpack_features_(estimator: Any, n_features: int, settings: Settings) -> None:
    """Set the attributes of an estimator that ``pack_features`` returned."""
    names, shape = settings["feature_names"], settings["image_shape"]
    set_features_(estimator, Features(n_features, names and tuple(names), shape and tuple(shape)))


def name_solver(solver: Solver[Any]) -> str | Solver[Any]:
    """Return the name of a solver with default options, or the solver itself."""
    return solver.name if resolve(solver.name) == solver else solver


def _stored_name(cls: type[StoredModel]) -> str:
    """Return the name of a class in files: with its module, unless it is in this package."""
    inside = cls.__module__.partition(".")[0] == "factormix"
    return cls.__name__ if inside else f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    """Turn NumPy numbers, and sequences of them, into what JSON knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | list | tuple | range):
        return [_plain(one) for one in value]
    return value
