"""Estimators as model files: which there are, and how each is saved and loaded.

A file names the class of its estimator. Every subclass of ``StoredModel`` is known under its name
from its definition on, so that a new estimator, of this package or of a user, loads without any
further step once its module is imported.
"""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.data.features import Features
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.validation import check_device, check_dtype, remember_features
from factormix.training.checkpoints import checkpoints_in
from factormix.training.distributed.storage import write_slices
from factormix.training.run import Run
from factormix.training.serialization import pack_run, read_file, unpack_run, write_file
from factormix.training.solvers import resolve

if TYPE_CHECKING:
    from factormix.estimators.mfa import MFA

__all__ = ["StoredMixture", "StoredModel", "load"]

Tensors = Mapping[str, Tensor]
Settings = dict[str, Any]

_known: dict[str, type[StoredModel]] = {}


def _stored_name(cls: type[StoredModel]) -> str:
    """Return the name of a class in files: with its module, unless it is of this package."""
    inside = cls.__module__.partition(".")[0] == "factormix"
    return cls.__name__ if inside else f"{cls.__module__}.{cls.__qualname__}"


class StoredModel:
    """What can be saved to a file and loaded from it.

    A subclass tells in ``_pack`` what goes into its file, as named tensors and JSON-ready settings,
    and is made from these again in ``_unpack``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the class known to ``load``."""
        super().__init_subclass__(**options)
        _known[_stored_name(cls)] = cls

    def save(self, path: str | os.PathLike[str], *, training_state: bool = True) -> None:
        """Write the model to a safetensors file, atomically.

        The file holds what ``partial_fit`` and ``resume`` need to go on; ``training_state=False``
        leaves that out.
        """
        check_is_fitted(self)
        tensors, settings = self._pack(training_state=training_state)
        self._write(path, tensors, {"estimator": _stored_name(type(self)), **settings})

    def _write(self, path: str | os.PathLike[str], tensors: Tensors, settings: Settings) -> None:
        write_file(path, tensors, settings)

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        raise NotImplementedError(f"{type(self).__name__} does not say what is in its file")

    @classmethod
    def _unpack(
        cls, tensors: Tensors, settings: Settings, device: str | torch.device | None
    ) -> Self:
        raise NotImplementedError(f"{cls.__name__} does not say how it is read from its file")


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> Any:
    """Read a model that ``save`` wrote; nothing in the file is executed.

    The model is of the class that was saved, so that only the file knows its type; a class that is
    not of this package must have been imported. Of a folder of checkpoints, the newest whole one is
    read; one that is damaged is a ``TrainingWarning``, and the one before it is used.
    """
    check_device(device)
    if os.path.isdir(path):
        return _newest(path, device)
    tensors, settings = read_file(path)
    try:
        name = settings["estimator"]
        if name not in _known:
            module = name.rpartition(".")[0]
            what = f"import {module}" if module else "upgrade factormix"
            raise InputError(
                f"{path} holds a model of the class {name}, which is not known here: {what} before"
                " loading it."
            )
        return _known[name]._unpack(tensors, settings, device)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} lacks a part of the model ({error}): it is damaged or of another kind."
        ) from error


def _newest(folder: str | os.PathLike[str], device: str | torch.device | None) -> Any:
    """Read the newest checkpoint of a folder that is whole."""
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
                f"{len(damaged)} of the {len(found)} checkpoints in {folder} cannot be used, and"
                f" {path.name} before that is taken, with {model.n_steps_:,} steps: {damaged[0]}",
                TrainingWarning,
                stacklevel=3,
            )
        return model
    raise InputError(f"none of the {len(found)} checkpoints in {folder} is whole: {damaged[0]}")


class StoredMixture(StoredModel):
    """A trained mixture as a file: its options, its run, and what it knows about its features."""

    _run: Run
    _returns: str

    def _write(self, path: str | os.PathLike[str], tensors: Tensors, settings: Settings) -> None:
        """Write what was packed; processes that have some of the components each do so together."""
        processes = self._run.problem.processes
        if processes.divided:
            write_slices(path, tensors, settings, processes)
        else:
            write_file(path, tensors, settings)

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        tensors, run = pack_run(self._run, training_state=training_state)
        estimator = cast("MFA", self)
        options = estimator.get_params(deep=False)
        for name in ("solver", "callbacks", "device", "mesh"):
            options.pop(name, None)
        if not isinstance(estimator.random_state, numbers.Integral):
            options["random_state"] = None
        options["dtype"] = str(check_dtype(estimator.dtype)).removeprefix("torch.")
        names = getattr(self, "feature_names_in_", None)
        return tensors, {
            "options": {name: _plain(value) for name, value in options.items()},
            "returns": self._returns,
            "feature_names": None if names is None else [str(name) for name in names],
            "image_shape": estimator.image_shape_,
            "notes": getattr(self, "notes_", {}),
            "run": run,
        }

    @classmethod
    def _unpack(
        cls, tensors: Tensors, settings: Settings, device: str | torch.device | None
    ) -> Self:
        run = unpack_run(tensors, settings["run"], check_device(device))
        used = run.plan.solver
        solver = used.name if resolve(used.name) == used else used
        model = cast(Any, cls)(**settings["options"], solver=solver, device=device)
        model._run, model._returns = run, settings["returns"]
        model.notes_ = dict(settings["notes"])
        names, shape = settings["feature_names"], settings["image_shape"]
        features = Features(run.parameters.shape[1], names and tuple(names), shape and tuple(shape))
        remember_features(model, features)
        return cast(Self, model)


def _plain(value: object) -> object:
    """Turn a NumPy scalar into a number that JSON knows."""
    return value.item() if isinstance(value, np.generic) else value
