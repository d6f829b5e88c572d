"""Model files: a run as named tensors and JSON-ready values, and back, bit by bit.

A file is safetensors with a header that holds format, version, settings and a checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from factormix.core.parameters import Parameters, factor_major
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.files import replacing
from factormix.training.distributed.communicator import Communicator
from factormix.training.run import Best, Following, Run
from factormix.training.solvers import Problem, Solver, from_settings, to_settings
from factormix.training.solvers.base import PlainState, pack, unpack

FORMAT = "factormix"
FORMAT_VERSION = 1
MIXTURE = "parameters."
BEST = "best."
FOLLOWING = "following."
BOUND = "problem.max_precision"
# Every field of a run and of a problem is saved under its name, so that none can be forgotten. Only
# the fields named here are packed in their own way.
PLAIN = [
    field.name
    for field in dataclasses.fields(Run)
    if field.name not in ("plan", "state", "units", "recent", "best", "following", "cached_search")
]
SIZES = [
    field.name
    for field in dataclasses.fields(Problem)
    if field.name not in ("max_precision", "device", "dtype", "communicator")
]


@dataclasses.dataclass
class FittedState(PlainState):
    """The state of a model that was saved without the solver's state and cannot learn."""

    parameters: Parameters
    steps: int = 0


def pack_run(run: Run, *, training_state: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn a run into named tensors and JSON-ready values, with or without the solver's state."""
    training_state = training_state and not isinstance(run.state, FittedState)
    tensors, values = _pack_state(run, run.state)
    if not training_state:
        tensors = {MIXTURE + name: t for name, t in run.parameters._asdict().items()}
        values = {"steps": run.state.steps}
    tensors |= {"units.offset": run.units.offset, "units.scale": run.units.scale}
    if run.problem.max_precision is not None:
        tensors[BOUND] = run.problem.max_precision
    settings = {name: getattr(run, name) for name in PLAIN}
    settings["recent"] = float(run.recent)
    settings["solver"] = to_settings(run.plan.solver)
    settings["problem"] = {name: getattr(run.problem, name) for name in SIZES}
    settings["bounded"] = run.problem.max_precision is not None
    settings["state"] = values
    settings["training_state"] = training_state
    if training_state and run.best is not None:
        others, values = _pack_state(run, run.best.state)
        tensors |= {BEST + name: tensor for name, tensor in others.items()}
        rest = {f.name: getattr(run.best, f.name) for f in dataclasses.fields(Best)[1:]}
        settings["best"] = rest | {"state": values}
    if training_state and run.following is not None:
        others, values = pack(run.following)
        tensors |= {FOLLOWING + name: tensor for name, tensor in others.items()}
        settings["following"] = values
    return tensors, settings


def _pack_state(run: Run, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack a state without the screen of one process's components."""
    tensors, values = pack(state)
    if not run.problem.communicator.has_all_components and hasattr(state, "screen"):
        empty = type(state.screen).empty(state.parameters.means)
        tensors |= {f"screen.{name}": tensor for name, tensor in empty._asdict().items()}
    return tensors, values


def unpack_run(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], device: torch.device
) -> Run:
    """Rebuild the run that ``pack_run`` packed."""
    solver: Solver[Any] = from_settings(settings["solver"])
    units = Units(tensors["units.offset"].cpu(), tensors["units.scale"].cpu())
    state_type = solver.state_type if settings["training_state"] else FittedState
    on_device = {name: t.to(device) for name, t in tensors.items()}
    state = _unpack_state(state_type, on_device, settings["state"])
    _check_consistent(state.parameters, units)
    problem = Problem(
        **{name: settings["problem"][name] for name in SIZES},
        max_precision=tensors[BOUND] if settings["bounded"] else None,
        device=device,
        dtype=state.parameters.means.dtype,
    )
    run = Run(
        plan=solver.plan(problem),
        state=state,
        units=units,
        recent=settings["recent"],
        **{name: settings[name] for name in PLAIN},
    )
    if "best" in settings:
        others = {n.removeprefix(BEST): t for n, t in on_device.items() if n.startswith(BEST)}
        best = _unpack_state(state_type, others, settings["best"]["state"])
        run.best = Best(**settings["best"] | {"state": best})
    if "following" in settings:
        rows, weights = (tensors[FOLLOWING + name].cpu() for name in ("rows", "weights"))
        run.following = Following(rows=rows, weights=weights, **settings["following"])
    return run


def _unpack_state(
    state_type: type[Any], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> Any:
    """Unpack a state, with the memory layout of factors that training uses."""
    state = unpack(state_type, tensors, values)
    parameters = state.parameters
    state.parameters = parameters._replace(
        precision_factors=factor_major(parameters.precision_factors)
    )
    return state


def _check_consistent(parameters: Parameters, units: Units) -> None:
    K, d, l = parameters.shape
    shapes = [tuple(t.shape) for t in (*parameters, units.offset, units.scale)]
    if shapes != [(K,), (K, d), (K, d), (K, d, l), (K, l), (d,), (d,)]:
        raise InputError("the tensors of the model do not fit together: save the model again.")


def cut_run(run: Run) -> None:
    """Cut a run in place to the components of this process, if processes divide them."""
    communicator = run.problem.communicator
    if communicator.has_all_components:
        return
    run.state = _cut_state(run.state, communicator)
    if run.best is not None:
        run.best.state = _cut_state(run.best.state, communicator)


def _cut_state(state: Any, communicator: Communicator) -> Any:
    """Return a state with the components of this process and an empty screen."""
    state = unpack(type(state), *pack(state))
    parameters: Parameters = state.parameters
    state.parameters, state.averages = (
        communicator.components.cut(parameters),
        communicator.components.cut(state.averages),
    )
    if hasattr(state, "watch") and state.watch.active:
        watched = (communicator.components.select(t).clone() for t in state.watch[:3])
        state.watch = type(state.watch)(*watched, state.watch.rows)
    for name in ("totals", "clusters"):
        if hasattr(state, name):
            totals = getattr(state, name)
            sums = [communicator.components.select(t).clone() for t in totals[2:]]
            setattr(state, name, type(totals)(*totals[:2], *sums))
    if hasattr(state, "screen"):
        state.screen = type(state.screen).empty(torch.zeros_like(parameters.means[0]))
    return state


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], settings: Any) -> Path:
    """Write tensors and JSON-ready settings to a file, completely or not at all."""
    header = make_header(settings)
    plain: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().to("cpu").contiguous()
        # A file holds no views: tensors that share memory are copied.
        if plain[name].untyped_storage().data_ptr() in owners:
            plain[name] = plain[name].clone()
        owners.add(plain[name].untyped_storage().data_ptr())
    header["checksum"] = _checksum(header, plain)
    try:
        with replacing(path) as temporary:
            save_file(plain, temporary, metadata=header)
    except (SafetensorError, OSError) as error:
        raise write_error(path, error) from error
    return Path(path)


def make_header(settings: Any) -> dict[str, str]:
    """Make the header of a file, without its checksum, from JSON-ready settings."""
    try:
        text = json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"the settings of the model cannot be saved as JSON: {error}.") from error
    return {"format": FORMAT, "format_version": str(FORMAT_VERSION), "settings": text}


def write_error(path: str | os.PathLike[str], error: Exception) -> InputError:
    """Build the error for a file that cannot be written."""
    return InputError(f"cannot write {path} ({_brief(error)}): make room or choose another path.")


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors, onto the CPU, and the settings that ``write_file`` wrote."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file; check the path of the model.")
    if not path.is_file():
        raise InputError(f"{path} is not a file; give the path of a model file.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            _check_header(path, header)
            # Copies, because overwriting a file that is mapped would end the process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        _check_checksum(path, header, tensors)
        return tensors, json.loads(header["settings"])
    except (SafetensorError, json.JSONDecodeError, KeyError, OSError) as error:
        raise InputError(
            f"{path} is not a complete factormix model ({_brief(error)}): it is truncated, damaged"
            " or of another kind; save the model again."
        ) from error


def is_model(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a complete model of any version."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError):
        return False


def _check_header(path: Path, header: Mapping[str, str]) -> None:
    version = header.get("format_version", "")
    if header.get("format") != FORMAT or not version.isdigit():
        raise InputError(
            f"{path} is a safetensors file but not a factormix model: give a file that MFA.save"
            " wrote."
        )
    if int(version) > FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {version}, newer than the {FORMAT_VERSION} that this"
            " factormix reads: upgrade factormix."
        )


def _check_checksum(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    if header.get("checksum") != _checksum(header, tensors):
        raise InputError(
            f"{path} is damaged: its checksum does not match its contents; save the model again or"
            " use an earlier copy."
        )


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of the version, the settings and all tensors."""
    total = hashlib.sha256()
    # Each text ends with a zero byte, so that different contents never give the same bytes.
    total.update(f"{header['format_version']}\0{header['settings']}\0".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(describe_for_checksum(name, str(tensor.dtype), tuple(tensor.shape)))
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def describe_for_checksum(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that precede a tensor's values in the checksum."""
    return f"{name}\0{dtype}\0{shape}\0".encode()


def _brief(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
