"""A run as named tensors and JSON-ready values, and back, bit by bit."""

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
from factormix.training.distributed.components import cut, mine
from factormix.training.distributed.processes import Processes
from factormix.training.run import Best, Following, Run
from factormix.training.solvers import Problem, Solver, from_settings, to_settings
from factormix.training.solvers.base import PlainState, pack, unpack

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "FittedState",
    "cannot_write",
    "cut_run",
    "hashed_name",
    "header_of",
    "is_model",
    "pack_run",
    "read_file",
    "unpack_run",
    "write_file",
]

MIXTURE = "parameters."
BEST = "best."
FOLLOWING = "following."
BOUND = "problem.max_precision"
# What is not a plain value has its own way into the file; everything else is saved under its
# name, so that no field can be forgotten.
PLAIN = [
    field.name
    for field in dataclasses.fields(Run)
    if field.name not in ("plan", "state", "units", "recent", "best", "following", "remembered")
]
SIZES = [
    field.name
    for field in dataclasses.fields(Problem)
    if field.name not in ("max_precision", "device", "dtype", "processes")
]


@dataclasses.dataclass
class FittedState(PlainState):
    """Stand in for the solver's state in a model saved without it, which cannot learn."""

    parameters: Parameters
    steps: int = 0


def pack_run(run: Run, *, training_state: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn a run into named tensors and JSON-ready values, with the solver's state or without."""
    training_state = training_state and not isinstance(run.state, FittedState)
    tensors, values = _packed(run, run.state)
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
        others, values = _packed(run, run.best.state)
        tensors |= {BEST + name: tensor for name, tensor in others.items()}
        rest = {f.name: getattr(run.best, f.name) for f in dataclasses.fields(Best)[1:]}
        settings["best"] = rest | {"state": values}
    if training_state and run.following is not None:
        others, values = pack(run.following)
        tensors |= {FOLLOWING + name: tensor for name, tensor in others.items()}
        settings["following"] = values
    return tensors, settings


def _packed(run: Run, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack a state without what holds for the components of one process only."""
    tensors, values = pack(state)
    if run.problem.processes.divided and hasattr(state, "screen"):
        nothing = type(state.screen).empty(state.parameters.means)
        tensors |= {f"screen.{name}": tensor for name, tensor in nothing._asdict().items()}
    return tensors, values


def unpack_run(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], device: torch.device
) -> Run:
    """Turn what ``pack_run`` gave back into a run."""
    solver: Solver[Any] = from_settings(settings["solver"])
    units = Units(tensors["units.offset"].cpu(), tensors["units.scale"].cpu())
    state_type = solver.state_type if settings["training_state"] else FittedState
    moved = {name: t.to(device) for name, t in tensors.items()}
    state = _unpacked_state(state_type, moved, settings["state"])
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
        others = {n.removeprefix(BEST): t for n, t in moved.items() if n.startswith(BEST)}
        best = _unpacked_state(state_type, others, settings["best"]["state"])
        run.best = Best(**settings["best"] | {"state": best})
    if "following" in settings:
        rows, weights = (tensors[FOLLOWING + name].cpu() for name in ("rows", "weights"))
        run.following = Following(rows=rows, weights=weights, **settings["following"])
    return run


def _unpacked_state(
    state_type: type[Any], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> Any:
    """Unpack a state with its factors laid out as they are in training."""
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
    """Leave this process its own components of a run, where its problem says they are divided."""
    processes = run.problem.processes
    if not processes.divided:
        return
    run.state = _cut_state(run.state, processes)
    if run.best is not None:
        run.best.state = _cut_state(run.best.state, processes)


def _cut_state(state: Any, processes: Processes) -> Any:
    """Return a state with the components of this process; a screen is made anew."""
    state = unpack(type(state), *pack(state))
    parameters: Parameters = state.parameters
    state.parameters, state.running = cut(processes, parameters), cut(processes, state.running)
    if hasattr(state, "watch") and state.watch.active:
        watched = (mine(processes, t).clone() for t in state.watch[:3])
        state.watch = type(state.watch)(*watched, state.watch.rows)
    for name in ("totals", "clusters"):
        if hasattr(state, name):
            totals = getattr(state, name)
            sums = [mine(processes, t).clone() for t in totals[2:]]
            setattr(state, name, type(totals)(*totals[:2], *sums))
    if hasattr(state, "screen"):
        state.screen = type(state.screen).empty(torch.zeros_like(parameters.means[0]))
    return state


FORMAT = "factormix"


FORMAT_VERSION = 1


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], settings: Any) -> Path:
    """Write tensors and JSON-ready settings to a file, all of it or nothing."""
    header = header_of(settings)
    plain: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().to("cpu").contiguous()
        # A file holds no views: what shares its memory with another gets its own.
        if plain[name].untyped_storage().data_ptr() in owners:
            plain[name] = plain[name].clone()
        owners.add(plain[name].untyped_storage().data_ptr())
    header["checksum"] = _checksum(header, plain)
    try:
        with replacing(path) as temporary:
            save_file(plain, temporary, metadata=header)
    except (SafetensorError, OSError) as error:
        raise cannot_write(path, error) from error
    return Path(path)


def header_of(settings: Any) -> dict[str, str]:
    """Make the header of a file, all but its checksum, from JSON-ready settings."""
    try:
        text = json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"the settings of the model cannot be saved as JSON: {error}.") from error
    return {"format": FORMAT, "format_version": str(FORMAT_VERSION), "settings": text}


def cannot_write(path: str | os.PathLike[str], error: Exception) -> InputError:
    """Say why a file cannot be written."""
    return InputError(f"cannot write {path} ({_brief(error)}): make room or choose another path.")


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Any]:
    """Read back what ``write_file`` wrote, onto the CPU."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file; check the path of the model.")
    if not path.is_file():
        raise InputError(f"{path} is not a file; give the path of a model file.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            _check_header(path, header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_sum(path, header, tensors)
        return tensors, json.loads(header["settings"])
    except (SafetensorError, json.JSONDecodeError, KeyError, OSError) as error:
        raise InputError(
            f"{path} is not a complete factormix model ({_brief(error)}): it is truncated, damaged"
            " or of another kind; save the model again."
        ) from error


def is_model(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file is a whole model, of whatever version."""
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


def _check_sum(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    if header.get("checksum") != _checksum(header, tensors):
        raise InputError(
            f"{path} is damaged: its checksum does not match what it holds; save the model again or"
            " use an earlier copy."
        )


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of the version, the settings, and names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    # Each text ends with a zero byte, so that no two contents run together to the same bytes.
    total.update(f"{header['format_version']}\0{header['settings']}\0".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(hashed_name(name, str(tensor.dtype), tuple(tensor.shape)))
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def hashed_name(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what the checksum has of a tensor before its bytes."""
    return f"{name}\0{dtype}\0{shape}\0".encode()


def _brief(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
