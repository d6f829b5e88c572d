"""The protocol of solvers.

A solver is a frozen dataclass of options. ``solver.plan(problem)`` applies them to a problem. The
plan holds everything that stays the same in a run, a state everything that changes, and a
contribution the statistics of a batch. Contributions are **sums over the rows**: the contributions
of several processes, or of the parts of a batch, can be added (``add``) before they are used.

A step consumes its state: it updates tensors in place, and only the returned state is valid.
``pack`` turns a state into named tensors and JSON-ready values, and ``unpack`` restores it bit by
bit, so that a run can stop and go on. Batches reach a solver in working units (centred and scaled
by the caller), in the problem's dtype and on its device. A solver never knows where a batch came
from.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from factormix.core.noise import Noise
from factormix.core.parameters import Like, Parameters
from factormix.data.batches import Batch
from factormix.defaults import NOISE
from factormix.errors import InputError
from factormix.training.distributed.communicator import SINGLE, Communicator

PRECISION = 10_000.0
"""Bound on E in working units if the problem has none: a standard deviation of 0.01."""


@dataclass(frozen=True)
class Problem:
    """The size of a mixture, its bound, its device and dtype, and the length of the run."""

    n_components: int
    n_features: int
    n_factors: int
    max_precision: Tensor | None = None
    """Bound on E in working units, a scalar or (d,); None takes the solver's own."""
    seed: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    batches_per_epoch: int | None = None
    """None for a stream of unknown length."""
    epochs: int | None = None
    """Number of planned passes; None for a stream."""
    batch_size: int | None = None
    """Rows per batch, except for the last one of a pass; None if unknown."""
    n_init: int = 1
    """Random starts that are tried on the first rows; the best is trained."""
    candidates: int | str | None = "auto"
    """Components that each row is evaluated against: a number, "auto", or None for all. Solvers
    that do not screen components ignore it.
    """
    noise: str = NOISE
    """The noise model, one of ``defaults.NOISE_MODELS``."""
    choose_ranks: bool = False
    """Whether each component keeps only the factors that its rows support; ``n_factors`` is then
    the maximum."""
    means: Tensor | None = dataclasses.field(default=None, repr=False, compare=False)
    """(K, d), where the means of the components begin, in working units; None leaves it to the
    solver."""
    communicator: Communicator = dataclasses.field(default=SINGLE, repr=False, compare=False)
    """The processes that train together."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """K, d and l of the mixture."""
        return self.n_components, self.n_features, self.n_factors

    @property
    def like(self) -> Like:
        """Device and dtype, as arguments of functions that make tensors."""
        return {"device": self.device, "dtype": self.dtype}

    def bound(self, own: float) -> Tensor:
        """Return the bound on E, (d,): the problem's, or else the solver's ``own``."""
        bound = torch.tensor(own) if self.max_precision is None else self.max_precision
        bound = bound.to(self.device, self.dtype).expand(self.n_features).contiguous()
        return self.noise_model.pool_bound(bound)

    @property
    def noise_model(self) -> Noise:
        """The noise model of all components, which ranks may have together."""
        return Noise(self.noise, self.communicator.components.sum)


class Change(NamedTuple):
    """New working units: x becomes ``(x - offset) / scale``."""

    offset: Tensor
    """(d,)."""
    scale: Tensor
    """(d,), positive."""


class Info(NamedTuple):
    """The report of one step. Tensors stay on the device until they are read."""

    log_likelihood: Tensor
    """Mean log-likelihood of the batch before the step, scalar."""
    scalars: Mapping[str, float]
    """The solver's own quantities, such as sigma and learning_rate."""
    converged: bool
    """Whether the solver's own criterion expects no more gain."""
    stop: bool
    """Whether the loop should end now."""


class State:
    """The base of states: dataclasses of NamedTuples of tensors, tensors and JSON-ready values."""

    parameters: Parameters
    steps: int

    @property
    def mixture(self) -> Parameters:
        """The learned mixture, which the parameters may hold in a shorter form."""
        return self.parameters

    @property
    def logits(self) -> Tensor:
        """Logits of the mixture, (K,), without the cost of the whole mixture."""
        return self.parameters.logits


S = TypeVar("S", bound=State)


class Plan(Protocol[S]):
    """A solver's options applied to a problem. Nothing in it changes during a run."""

    steps_by_owner: typing.ClassVar[bool]
    """Whether each of the ranks with the same components updates a part of them. Then ``update``
    gets the sums of components over the rows of its own rank
    (``training/distributed/parallel_step.py``)."""

    @property
    def solver(self) -> Solver[S]:
        """The options."""

    @property
    def problem(self) -> Problem:
        """The problem."""

    def init(self) -> S:
        """Make the first state from random values."""

    def settled(self, state: S) -> bool:
        """Return whether the first phases, in which the likelihood may fall, are over."""

    def contribution(self, state: S, batch: Batch) -> Any:
        """Sum the statistics that ``update`` needs over the rows of a batch."""

    def update(self, state: S, contribution: Any) -> tuple[S, Info]:
        """Take one step."""

    def change_units(self, state: S, units: Change) -> S:
        """Express a state in other working units."""

    def begin_fit_(self, state: S) -> None:
        """Prepare a trained state for passes over other rows: forget the sums of the last pass, and
        what its likelihood is compared with.
        """


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
        """Return the default number of rows per batch; ``n_rows`` is None for a stream."""

    @property
    def default_max_precision(self) -> float | None:
        """Default bound on E times the variance of a feature; None derives the bound from the
        resolution of the feature.
        """

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the default number of passes over the data."""

    def plan(self, problem: Problem) -> Plan[S]:
        """Apply the options to a problem."""


class SolverOptions:
    """The base of solvers: dataclasses of options that scikit-learn can read, copy and search."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(typing.cast(Any, self))}

    def set_params(self, **options: Any) -> Self:
        """Return a solver with some options changed; this one, which a model may use, stays."""
        unknown = options.keys() - self.get_params().keys()
        if unknown:
            raise InputError(
                f"the solver {type(self).__name__} has no option {min(unknown)!r}: use one of"
                f" {', '.join(self.get_params())}."
            )
        return typing.cast(Self, dataclasses.replace(typing.cast(Any, self), **options))

    def __repr__(self) -> str:
        """Return the options that differ from their defaults."""
        fields = dataclasses.fields(typing.cast(Any, self))
        values = {f.name: getattr(self, f.name) for f in fields}
        changed = [f"{f.name}={values[f.name]!r}" for f in fields if values[f.name] != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"


def check_length(solver: Solver[Any], batches_per_epoch: int | None) -> None:
    """Refuse a stream, whose length is None, for a solver that needs passes."""
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
    """Add two contributions: the contributions of the parts of a batch add up to the whole."""
    make: Any = type(first)
    if hasattr(first, "add"):
        return typing.cast(C, first.add(second))
    pairs = zip(first, second, strict=True)
    return typing.cast(C, make(*(a if a is None or b is None else a + b for a, b in pairs)))


def pack(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn a state into named tensors and JSON-ready values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value
        elif hasattr(value, "_asdict"):
            # A field that is None has a default, which ``unpack`` uses.
            parts = {name: t for name, t in value._asdict().items() if t is not None}
            tensors |= {f"{field.name}.{name}": t for name, t in parts.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            values[field.name] = dataclasses.asdict(value)
        else:
            values[field.name] = value
    return tensors, values


def unpack(state_type: type[S], tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> S:
    """Rebuild the state that ``pack`` packed."""
    hints = typing.get_type_hints(state_type)
    fields: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(typing.cast(Any, state_type))):
        kind = hints[name]
        if kind is Tensor:
            fields[name] = tensors[name]
        elif hasattr(kind, "_fields"):
            parts = {
                part: tensors[f"{name}.{part}"]
                for part in kind._fields
                if part not in kind._field_defaults or f"{name}.{part}" in tensors
            }
            fields[name] = kind(**parts)
        elif dataclasses.is_dataclass(kind):
            fields[name] = typing.cast(Any, kind)(**values[name])
        else:
            fields[name] = values[name]
    return state_type(**fields)


RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "positive": (lambda v: 0 < v < math.inf, "be positive"),
    "not_negative": (lambda v: 0 <= v < math.inf, "be 0 or more"),
    "share": (lambda v: 0 < v <= 1, "lie above 0 and be at most 1"),
    "at_least_one": (lambda v: 1 <= v < math.inf, "be 1 or more"),
    "between": (lambda v: 0 < v < 1, "lie between 0 and 1"),
    "count": (
        lambda v: isinstance(v, numbers.Integral) and int(v) >= 1,
        "be a whole number of 1 or more",
    ),
    "flag": (lambda v: isinstance(v, bool), "be True or False"),
}
"""Ranges of options, with the words for the message "NAME must WORDS"."""


def check_ranges(options: Any, **names: Sequence[str]) -> None:
    """Refuse a field of a dataclass outside its range, as in ``check_ranges(self, count=["n"])``.

    None passes if it is the default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for allowed, some in names.items():
        contains, words = RANGES[allowed]
        for name in some:
            value = getattr(options, name)
            if value is None and defaults[name] is None:
                continue
            if not ((allowed == "flag" or is_number(value)) and contains(value)):
                raise InputError(f"{name} must {words}, not {_show(value)}.")


def is_number(value: object) -> bool:
    """Return whether a value is a number that a float can hold; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _show(value: object) -> str:
    """Show a value in one short line, with its type unless it is a number or text."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    plain = value is None or isinstance(value, numbers.Real | str)
    return text if plain else f"{text} ({type(value).__name__})"
