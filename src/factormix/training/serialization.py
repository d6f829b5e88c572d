"""Model files: a run as named tensors and JSON-ready values, and back, bit by bit.

A file is safetensors with a header that holds format, version, settings and a checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch import distributed as dist

from factormix.core.arrays import zero_pages
from factormix.core.parameters import Parameters, factor_major
from factormix.data.units import Units
from factormix.errors import InputError, first_line
from factormix.files import replacing
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.run import Best, Following, Run
from factormix.training.solvers import Problem, Solver, from_settings, to_settings
from factormix.training.solvers.base import State, pack, unpack

FORMAT = "factormix"
FORMAT_VERSION = 1
BEST = "best."
FOLLOWING = "following."
PIECE_BYTES = 16 << 20
"""Bytes that are sent at a time: large beside the latency of a message, small beside a model."""
PER_COMPONENT = re.compile(
    r"(best\.)?(parameters\..*|averages\..*|watch\.(candidates|alone|together)|totals\.[ABS]"
    r"|clusters\.(counts|sums|seen|squares))"
)
"""Names of the tensors whose first axis has the components."""
WITH_FACTORS = {"parameters.precision_factors": 0, "averages.Theta": 1, "totals.B": 1}
"""Tensors with a row of d numbers for each factor, and the rows before the first factor."""
RANKS = "parameters.ranks"
# Every field of a run and of a problem is saved under its name, so that none can be forgotten. Only
# the fields named here are packed in their own way.
OWN_FORM = (
    *("plan", "state", "units", "recent", "pass_sum", "best", "following"),
    *("whole_ranges", "cached_search", "unscored"),
)
PLAIN = [field.name for field in dataclasses.fields(Run) if field.name not in OWN_FORM]
SIZES = [
    field.name
    for field in dataclasses.fields(Problem)
    if field.name not in ("max_precision", "means", "device", "dtype", "communicator")
]


@dataclasses.dataclass
class FittedState(State):
    """The state of a model that was saved without the solver's state and cannot learn."""

    parameters: Parameters
    steps: int = 0


def pack_run(run: Run, *, training_state: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn a run into named tensors and JSON-ready values, with or without the solver's state."""
    training_state = training_state and not isinstance(run.state, FittedState)
    tensors, values = _pack_state(run, run.state)
    if not training_state:
        tensors = add_prefix("parameters.", run.parameters._asdict())
        values = {"steps": run.state.steps}
    given = {
        "problem.max_precision": run.problem.max_precision,
        "problem.means": run.problem.means,
        "units.whole_ranges": run.whole_ranges,
    }
    optional = {name: tensor for name, tensor in given.items() if tensor is not None}
    tensors |= {"units.offset": run.units.offset, "units.scale": run.units.scale} | optional
    settings = {name: getattr(run, name) for name in PLAIN}
    settings |= {
        "recent": float(run.recent),
        "pass_sum": float(run.pass_sum),
        "solver": to_settings(run.plan.solver),
        "problem": {name: getattr(run.problem, name) for name in SIZES},
        "state": values,
        "training_state": training_state,
        "optional": list(optional),
    }
    if training_state and run.best is not None:
        others, values = _pack_state(run, run.best.state)
        tensors |= add_prefix(BEST, others)
        rest = {f.name: getattr(run.best, f.name) for f in dataclasses.fields(Best)[1:]}
        settings["best"] = rest | {"state": values}
    if run.problem.choose_ranks:
        tensors = pack_factors(pack_factors(tensors), BEST)
    if training_state and run.following is not None:
        others, settings["following"] = pack(run.following)
        tensors |= add_prefix(FOLLOWING, others)
    return tensors, settings


def pack_factors(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Leave zero factors out of the tensors of a state, so that files follow the ranks.

    Tensors (K, m, d) with a row for each factor become (n, d), and the ranks (K,) are added.
    """
    packed, rows = dict(tensors), _rows_of_factors(tensors, prefix)
    if not rows:
        return packed
    M = tensors[f"{prefix}parameters.latent_variances"]
    K, l = M.shape
    ranks = torch.zeros(K, dtype=torch.long, device=M.device)
    for name, t in rows.items():
        used = torch.linalg.vector_norm(t[:, WITH_FACTORS[name] :], dim=2) != 0
        last = (used * torch.arange(1, l + 1, device=M.device)).amax(dim=1) if l else ranks
        ranks = torch.maximum(ranks, last)
    for name, t in rows.items():
        packed[prefix + name] = t[_held(ranks, t.shape[1], WITH_FACTORS[name])]
    packed[prefix + RANKS] = ranks
    return packed


def unpack_factors(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Restore what ``pack_factors`` left out."""
    whole = dict(tensors)
    ranks = whole.pop(prefix + RANKS, None)
    if ranks is None:
        return whole
    K, l = whole[f"{prefix}parameters.latent_variances"].shape
    for name, first in WITH_FACTORS.items():
        if prefix + name in whole:
            some = whole[prefix + name]
            t = zero_pages(some, K, first + l, some.shape[1])
            t[_held(ranks, first + l, first)] = some
            whole[prefix + name] = t if first else t.mT
    return whole


def _rows_of_factors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of ``WITH_FACTORS`` that exist, by name, (K, m, d)."""
    found = {name: tensors[prefix + name] for name in WITH_FACTORS if prefix + name in tensors}
    return {name: t if WITH_FACTORS[name] else t.mT for name, t in found.items()}


def _held(ranks: Tensor, n_rows: int, first: int) -> Tensor:
    """Return which of the rows of components are held, (K, n_rows), by their ranks (K,)."""
    return torch.arange(n_rows, device=ranks.device) < first + ranks.unsqueeze(1)


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with a prefix before their names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _pack_state(run: Run, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack a state without the screen of one process's components."""
    tensors, values = pack(state)
    if not run.problem.communicator.has_all_components and hasattr(state, "screen"):
        empty = type(state.screen).empty(state.parameters.means)
        tensors |= add_prefix("screen.", empty._asdict())
    return tensors, values


def unpack_run(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], device: torch.device
) -> Run:
    """Rebuild the run that ``pack_run`` packed."""
    tensors = unpack_factors(unpack_factors(tensors), BEST)
    solver: Solver[Any] = from_settings(settings["solver"])
    units = Units(tensors["units.offset"].cpu(), tensors["units.scale"].cpu())
    state_type = solver.state_type if settings["training_state"] else FittedState
    on_device = {name: t.to(device) for name, t in tensors.items()}
    state = _unpack_state(state_type, on_device, settings["state"])
    _check_consistent(state.parameters, units)
    optional = {name: tensors[name] for name in settings["optional"]}
    problem = Problem(
        **{name: settings["problem"][name] for name in SIZES},
        max_precision=optional.get("problem.max_precision"),
        means=optional.get("problem.means"),
        device=device,
        dtype=state.parameters.means.dtype,
    )
    run = Run(
        plan=solver.plan(problem),
        state=state,
        units=units,
        whole_ranges=optional.get("units.whole_ranges"),
        **{name: settings[name] for name in ("recent", "pass_sum", *PLAIN)},
    )
    if "best" in settings:
        others = select_prefix(BEST, on_device)
        best = _unpack_state(state_type, others, settings["best"]["state"])
        run.best = Best(**settings["best"] | {"state": best})
    if "following" in settings:
        others = select_prefix(FOLLOWING, tensors)
        kept: dict[str, Any] = {name: tensor.cpu() for name, tensor in others.items()}
        run.following = Following(**kept, **settings["following"])
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
    tensors, values = pack(state)
    for name, tensor in tensors.items():
        if _has_component_rows(name, tensor):
            part = communicator.components.select(tensor)
            tensors[name] = part.clone(memory_format=torch.preserve_format)
    state = unpack(type(state), tensors, values)
    if hasattr(state, "screen"):
        state.screen = type(state.screen).empty(torch.zeros_like(state.parameters.means[0]))
    return state


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    settings: Any,
    communicator: Communicator = SINGLE,
) -> None:
    """Write tensors and JSON-ready settings to a file, completely or not at all.

    Ranks that divide the components all call this, with the rows of their own components in tensors
    that have a row for each. They send their rows to the first rank in pieces, so that no rank ever
    holds more than one piece of another. The file is the same for any number of ranks.
    """
    if communicator.has_all_components:
        communicator = SINGLE
    try:
        text = json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"the settings of the model cannot be saved as JSON: {error}.") from error
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "settings": text}
    # Closing a file on a full disk fails once more.
    with _explain_write_errors(path), ExitStack() as stack:
        counts = {name: _count_rows(name, tensors[name], communicator) for name in sorted(tensors)}
        layout = _Layout(tensors, header, counts)

        def begin() -> IO[bytes] | None:
            if not communicator.is_first:
                return None
            with _explain_write_errors(path):
                file = stack.enter_context(stack.enter_context(replacing(path)).open("wb"))
                file.write(layout.head)
                file.truncate(len(layout.head) + layout.size)
            return file

        file = communicator.run_together(begin)
        failure: OSError | None = None
        # Other ranks with the same components have nothing to add.
        for name in sorted(tensors) if communicator.data.rank == 0 else ():
            for piece in _pieces(tensors[name], counts[name], communicator):
                try:
                    if file is not None and failure is None:
                        layout.add(file, name, piece)
                except OSError as error:
                    # The other ranks go on sending, and learn of it at the end.
                    failure = error

        def finish() -> None:
            with _explain_write_errors(path):
                if failure is not None:
                    raise failure
                if file is not None:
                    layout.finish(file)
                    stack.pop_all().close()

        communicator.run_together(finish)


@contextmanager
def _explain_write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({first_line(error)}): make room or choose another path."
        ) from error


class _Layout:
    """The place of each tensor in a safetensors file, and the checksum of the written bytes."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        header: dict[str, str],
        counts: Mapping[str, list[int] | None],
    ) -> None:
        self._places = dict[str, tuple[int, bytes]]()
        self.size = 0
        table: dict[str, Any] = {"__metadata__": header | {"checksum": "0" * 64}}
        # The widest types first, so that each is aligned to its width.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            tensor = tensors[name]
            shape = tuple(tensor.shape)
            if (rows := counts[name]) is not None:
                shape = (sum(rows), *shape[1:])
            end = self.size + tensor.element_size() * math.prod(shape)
            table[name] = {
                "dtype": _dtype_name(tensor.dtype),
                "shape": shape,
                "data_offsets": [self.size, end],
            }
            self._places[name] = self.size, _describe(name, tensor.dtype, shape)
            self.size = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self._checksum = _begin_checksum(header)
        self._last = ""

    def add(self, file: IO[bytes], name: str, piece: Tensor) -> None:
        """Write the next piece of a tensor; tensors come in the order of their names."""
        if name != self._last:
            place, description = self._places[name]
            self._checksum.update(description)
            file.seek(len(self.head) + place)
            self._last = name
        self._checksum.update(view_bytes(piece))
        file.write(view_bytes(piece))

    def finish(self, file: IO[bytes]) -> None:
        """Write the checksum into its place in the header."""
        file.seek(self.head.index(b'"checksum":"') + len(b'"checksum":"'))
        file.write(self._checksum.hexdigest().encode())
        file.flush()


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors, such as F64 for float64."""
    name = str(dtype).removeprefix("torch.")
    irregular = {"bool": "BOOL", "bfloat16": "BF16"}
    return irregular.get(name) or re.sub("[a-z]+", name[0].upper(), name)


def _has_component_rows(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of this name has a row for each component."""
    # An inactive watch has no rows.
    return bool(PER_COMPONENT.fullmatch(name)) and (tensor.ndim > 1 or len(tensor) > 0)


def _count_rows(name: str, tensor: Tensor, communicator: Communicator) -> list[int] | None:
    """Count the rows of a tensor on each rank that has some of the components; None for others."""
    placement = communicator.components
    if communicator.has_all_components or not _has_component_rows(name, tensor):
        return None
    if tensor.ndim == 2 and name.removeprefix(BEST) in WITH_FACTORS:
        # One row for each factor: the sum of the ranks of its components.
        own = torch.tensor([len(tensor)], device=tensor.device)
        return placement.gather_from_ranks(own)[:, 0].tolist()
    return placement.counts


def _pieces(
    tensor: Tensor, counts: list[int] | None, communicator: Communicator
) -> Iterator[Tensor]:
    """Yield a tensor in pieces: all of it on the first rank, its own part elsewhere.

    ``counts`` are its rows on each rank.
    """
    placement = communicator.components
    rank, ranks = placement.group.rank, placement.group.ranks
    if counts is None:
        if rank == 0:
            yield tensor.detach().cpu().contiguous()
        return
    size = max(1, PIECE_BYTES // max(1, math.prod(tensor.shape[1:]) * tensor.element_size()))
    for owner, count in enumerate(counts):
        for first in range(0, count, size) if rank in (0, owner) else ():
            if owner == rank:
                piece = tensor[first : first + size].detach().cpu().contiguous()
            else:
                shape = (min(size, count - first), *tensor.shape[1:])
                piece = torch.empty(shape, dtype=tensor.dtype)
            plain = piece.view(torch.uint8) if piece.dtype == torch.bool else piece
            with communicator.sending(*([plain] if rank else [])):
                if rank:
                    dist.send(plain, ranks[0], communicator.world.handle)
                elif owner:
                    dist.recv(plain, ranks[owner], communicator.world.handle)
            yield piece


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
        if header.get("checksum") != _checksum(header, tensors):
            raise InputError(
                f"{path} is damaged: its checksum does not match its contents; save the model again"
                " or use an earlier copy."
            )
        return tensors, json.loads(header["settings"])
    except (SafetensorError, json.JSONDecodeError, KeyError, OSError) as error:
        raise InputError(
            f"{path} is not a complete factormix model ({first_line(error)}): it is truncated,"
            " damaged or of another kind; save the model again."
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


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of the version, the settings and all tensors."""
    total = _begin_checksum(header)
    for name, tensor in sorted(tensors.items()):
        total.update(_describe(name, tensor.dtype, tuple(tensor.shape)))
        total.update(view_bytes(tensor))
    return total.hexdigest()


def _begin_checksum(header: Mapping[str, str]) -> hashlib._Hash:
    # Each text ends with a zero byte, so that different contents never give the same bytes.
    return hashlib.sha256(f"{header['format_version']}\0{header['settings']}\0".encode())


def _describe(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that precede a tensor's values in the checksum."""
    return f"{name}\0{dtype}\0{shape}\0".encode()


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor on the CPU as bytes, in the order of its indices."""
    flat = tensor.detach().contiguous().view(-1)
    # One element may have any stride, but its bytes can only be viewed with stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
