"""What a solver is.

A solver is a frozen dataclass of options. ``solver.plan(problem)`` applies them to a problem: the
plan holds all that stays the same in a run. Everything that changes is in a state, and everything
that a batch tells is in a contribution:

- ``plan.init()`` makes the state from random values, without looking at data;
- ``plan.contribution(state, batch)`` computes what a batch says under the current parameters, as a
  NamedTuple of tensors that are **sums over the samples**, so that contributions of several
  processes, or of the parts of a batch, can be added (``add``) before they are used;
- ``plan.update(state, contribution)`` takes one step and returns ``(state, info)``;
- ``step(plan, state, batch)`` is the two in a row.

A step consumes its state: tensors are updated in place, and the returned state is the one to keep.
``pack`` turns a state into named tensors and JSON-ready values, and ``unpack`` turns them back,
bit by bit, so that a run goes on where it stopped. Data reaches a solver in working units
(centred and scaled by the caller), of the problem's dtype and on its device; a solver never knows
where a batch came from.

Ranges that the options of solvers must lie in, with the words for what lies outside.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from factormix.core.parameters import Parameters
from factormix.data.batches import Batch
from factormix.errors import InputError
from factormix.training.distributed.processes import ALONE, Processes

__all__ = [
    "AT_LEAST_ONE",
    "BETWEEN",
    "COUNT",
    "NOT_NEGATIVE",
    "POSITIVE",
    "SHARE",
    "Change",
    "Info",
    "PlainState",
    "Plan",
    "Problem",
    "Range",
    "Solver",
    "State",
    "add",
    "check_length",
    "check_options",
    "pack",
    "step",
    "unpack",
]

Packed = tuple[dict[str, Tensor], dict[str, Any]]


PRECISION = 10_000.0
"""Bound on E in working units where a problem has none."""


@dataclass(frozen=True)
class Problem:
    """Say what is to be solved: the size of the mixture, its bound, where it lives, how long it
    runs.
    """

    n_components: int
    n_features: int
    n_factors: int
    max_precision: Tensor | None = None
    """Bound on E in working units: a scalar or (d,) tensor; None takes the solver's own."""
    seed: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    batches_per_epoch: int | None = None
    """None for a stream whose length is not known."""
    epochs: int | None = None
    """Passes that are planned; None for a stream."""
    batch_size: int | None = None
    """Rows per batch, the last of a pass excepted; None when the caller does not know."""
    n_init: int = 1
    """Random starts that are tried on the first rows; the best goes on."""
    candidates: int | str | None = "auto"
    """Components that each row is evaluated against: a number, "auto", or None for all. Only
    solvers that screen components look at it.
    """
    processes: Processes = dataclasses.field(default=ALONE, repr=False, compare=False)
    """Who solves it together."""

    def bound(self, own: float) -> Tensor:
        """Return the bound on E, (d,), where ``own`` is the solver's."""
        bound = torch.tensor(own) if self.max_precision is None else self.max_precision
        return bound.to(self.device, self.dtype).expand(self.n_features).contiguous()


class Change(NamedTuple):
    """New working units: what was x is now ``(x - offset) / scale``."""

    offset: Tensor
    """(d,)."""
    scale: Tensor
    """(d,), positive."""


class Info(NamedTuple):
    """What one step reports. Tensors stay on the device until somebody reads them."""

    log_likelihood: Tensor
    """Mean log-likelihood of the batch, before the step, scalar."""
    scalars: Mapping[str, float]
    """The solver's own quantities, such as sigma and learning_rate."""
    converged: bool
    """Whether the solver's own criterion says that nothing more is to be gained."""
    stop: bool
    """Whether the loop should end now."""


class State(Protocol):
    """A dataclass whose fields are Parameters, other NamedTuples of tensors, tensors and JSON
    values.
    """

    parameters: Parameters
    steps: int

    @property
    def mixture(self) -> Parameters:
        """What was learned: the parameters, unless they stand for more than themselves."""

    @property
    def logits(self) -> Tensor:
        """Those of the mixture, (K,), without the cost of all of it."""


class PlainState:
    """A state whose parameters are the mixture that was learned."""

    parameters: Parameters

    @property
    def mixture(self) -> Parameters:
        """What was learned."""
        return self.parameters

    @property
    def logits(self) -> Tensor:
        """Those of the mixture, (K,)."""
        return self.parameters.logits


S = TypeVar("S", bound=State)


class Plan(Protocol[S]):
    """A solver's options applied to a problem: nothing in it changes during a run."""

    in_parts: typing.ClassVar[bool]
    """Whether processes with the same components step a part of them each: then ``update`` is given
    sums of components over the rows of its process, and ``training/distributed/data.py`` adds them.
    """

    @property
    def solver(self) -> Solver[S]:
        """The options."""

    @property
    def problem(self) -> Problem:
        """What is to be solved."""

    def init(self) -> S:
        """Make the first state from random values."""

    def settled(self, state: S) -> bool:
        """Tell whether the beginning is over, in which the likelihood may stand still or fall."""

    def contribution(self, state: S, batch: Batch) -> Any:
        """Sum over the samples of a batch of tensors what ``update`` needs."""

    def update(self, state: S, contribution: Any) -> tuple[S, Info]:
        """Take one step."""

    def change_units(self, state: S, units: Change) -> S:
        """Express a state in other working units."""


@runtime_checkable
class Solver(Protocol[S]):
    """The names that every solver has; ``tests/training/test_solvers.py`` is the contract."""

    name: typing.ClassVar[str]
    needs_passes: typing.ClassVar[bool]
    """Whether it needs passes over data of known length: ``check_length`` refuses a stream."""

    @property
    def state_type(self) -> type[S]:
        """The dataclass of the state."""

    def default_batch_size(self, n_rows: int | None) -> int:
        """Rows per batch when the caller does not say; ``n_rows`` is None for a stream."""

    @property
    def default_max_precision(self) -> float | None:
        """Bound on E times the spread of a feature when the caller does not say; None leaves it to
        the resolution of the feature.
        """

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Passes over the data when the caller does not say."""

    def plan(self, problem: Problem) -> Plan[S]:
        """Apply the options to a problem."""


def check_length(solver: Solver[Any], batches_per_epoch: int | None) -> None:
    """Refuse to follow a stream, whose length is None, by a solver that cannot."""
    if solver.needs_passes and batches_per_epoch is None:
        raise InputError(
            f"the solver {solver.name!r} needs passes over data of known length: use fit, or the"
            " solver 'natural' for a stream."
        )


def step(plan: Plan[S], state: S, batch: Batch) -> tuple[S, Info]:
    """Take one step on a batch."""
    return plan.update(state, plan.contribution(state, batch))


C = TypeVar("C", bound=tuple[Tensor | None, ...])


def add(first: C, second: C) -> C:
    """Add two contributions: that of a batch equals the sum of those of its parts."""
    make: Any = type(first)
    if hasattr(first, "add"):
        return typing.cast(C, first.add(second))
    pairs = zip(first, second, strict=True)
    return typing.cast(C, make(*(a if a is None or b is None else a + b for a, b in pairs)))


def pack(state: Any) -> Packed:
    """Turn a state into named tensors and JSON-ready values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value
        elif hasattr(value, "_asdict"):
            # What is None has a default, which comes back by itself.
            parts = {name: t for name, t in value._asdict().items() if t is not None}
            tensors |= {f"{field.name}.{name}": t for name, t in parts.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            values[field.name] = dataclasses.asdict(value)
        else:
            values[field.name] = value
    return tensors, values


def unpack(state_type: type[S], tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> S:
    """Turn what ``pack`` gave back into a state."""
    hints = typing.get_type_hints(state_type)
    fields: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(typing.cast(Any, state_type))):
        kind = hints[name]
        if kind is Tensor:
            fields[name] = tensors[name]
        elif hasattr(kind, "_fields"):
            parts = {part: tensors.get(f"{name}.{part}") for part in kind._fields}
            missing = [part for part, t in parts.items() if t is None]
            if not set(missing) <= set(kind._field_defaults):
                raise KeyError(f"{name}.{missing[0]}")
            fields[name] = kind(**{part: t for part, t in parts.items() if t is not None})
        elif dataclasses.is_dataclass(kind):
            fields[name] = typing.cast(Any, kind)(**values[name])
        else:
            fields[name] = values[name]
    return state_type(**fields)


class Range(NamedTuple):
    """The numbers that an option may be."""

    contains: Callable[[Any], bool]
    wanted: str
    """What an option must, in words."""


POSITIVE = Range(lambda v: 0 < v < math.inf, "be positive")
NOT_NEGATIVE = Range(lambda v: 0 <= v < math.inf, "be 0 or more")
SHARE = Range(lambda v: 0 < v <= 1, "lie above 0 and be at most 1")
AT_LEAST_ONE = Range(lambda v: 1 <= v < math.inf, "be 1 or more")
BETWEEN = Range(lambda v: 0 < v < 1, "lie between 0 and 1")
COUNT = Range(
    lambda v: isinstance(v, numbers.Integral) and int(v) >= 1,
    "be a whole number of 1 or more",
)


def check_options(solver: Any, ranges: Mapping[Range, Sequence[str]]) -> None:
    """Refuse an option of a solver that is no number of its range; None passes as a default."""
    defaults = {field.name: field.default for field in dataclasses.fields(solver)}
    for allowed, names in ranges.items():
        for name in names:
            value = getattr(solver, name)
            if value is None and defaults[name] is None:
                continue
            if not (_is_number(value) and allowed.contains(value)):
                raise InputError(f"{name} must {allowed.wanted}, not {_shown(value)}.")


def _is_number(value: object) -> bool:
    """Tell whether a value is a number that a float can hold; bools are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(value: object) -> str:
    """Show a value in one short line, with its type where it is no plain number or text."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    plain = value is None or isinstance(value, numbers.Real | str)
    return text if plain else f"{text} ({type(value).__name__})"
