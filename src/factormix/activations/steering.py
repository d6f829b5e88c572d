"""Steer a network: move the activations of a layer during forward passes."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from factormix.activations.coder import MixtureCoder, fit_dtype, is_index
from factormix.activations.collecting import find_layer, first_tensor
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import without_autocast
from factormix.errors import InputError, input_error
from factormix.estimators.mfa import MFA

How = Literal["loading", "centroid", "code", "off"]
WAYS = ("loading", "centroid", "code", "off")
KINDS = (TypeError, ValueError, RuntimeError)
"""Errors of torch for values that do not make a tensor."""


def steer(
    network: nn.Module,
    layer: str,
    mixture: MFA | PrecisionMixture | MixtureCoder,
    how: How = "loading",
    *,
    component: int = 0,
    factor: int = 0,
    amount: float = 1.0,
    code: Tensor | Mapping[int, float] | None = None,
    members_only: bool = False,
) -> Steering:
    """Return a context in which the outputs x of a layer are moved.

    The network is unchanged after the context, even after an error. Outputs keep their dtype; the
    move itself is computed in float32. Gradients flow through it.

    Parameters
    ----------
    network, layer
        A module, and the name of a module within it. If it has several outputs, the first is moved.
    mixture
        Trained on outputs of this layer.
    how
        - ``"loading"``: along a factor of the component, ``x + a * Lambda_j``. An amount of 1 is a
          standard deviation of that factor.
        - ``"centroid"``: towards its centroid, ``(1 - a) x + a mu``.
        - ``"code"``: latent variables of the component are set, ``x + Lambda (z' - z(x))``, and
          what the factors do not explain stays.
        - ``"off"``: x stays.
    component, factor
        Numbers of the component and of its factor.
    amount
        a.
    code
        New code (l,), or values of some factors by their number.
    members_only
        Whether to move only rows whose most probable component is this one.

    Examples
    --------
    >>> import torch
    >>> from factormix import MFA
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> model = MFA(2, 1, random_state=0).fit(network[0](x).detach())
    >>> before = network(x)
    >>> with steer(network, "0", model, component=1, amount=3.0):
    ...     moved = network(x)
    >>> bool((moved != before).any()), torch.equal(network(x), before)
    (True, True)
    """
    module = find_layer(network, layer)
    _check_way(how)
    given: Any = mixture
    coder: MixtureCoder = given if isinstance(given, MixtureCoder) else MixtureCoder(given)
    component, rank = coder.check_component(component), coder.ranks[component]
    if how == "loading" and not is_index(factor, rank):
        raise InputError(
            f"factor must lie between 0 and {rank - 1}, not {factor!r}."
            if rank
            else f"component {component} has no factors: choose another, or another way than"
            " 'loading'."
        )
    _check_amount(amount)
    if (code is not None) != (how == "code"):
        raise InputError("code and how='code' go together: give both or neither.")
    target = None if code is None else _complete_code(code, coder.n_factors)
    return Steering(module, layer, coder, how, component, factor, amount, target, members_only)


@dataclass(eq=False)
class Steering:
    """The context of ``steer``; ``how`` and ``amount`` may be changed within it."""

    _module: nn.Module
    _layer: str
    coder: MixtureCoder
    how: How
    component: int
    factor: int
    amount: float
    _code: Tensor | None
    members_only: bool
    _hooks: list[Any] = field(default_factory=list, init=False)

    def __enter__(self) -> Self:
        self._hooks.append(self._module.register_forward_hook(self._hook))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.pop().remove()

    @without_autocast()
    def move(self, x: Tensor) -> Tensor:
        """Return activations x (..., d) after the move, in the same dtype."""
        # Both may have been changed within the context.
        _check_way(self.how)
        _check_amount(self.amount)
        if self.how == "off":
            return x
        if x.device != self.coder.means.device:
            self.coder.to(x.device)
        k, coder = self.component, self.coder
        rows = x.to(coder.means.dtype)
        if self.how == "loading":
            moved = rows + self.amount * coder.loadings[k, :, self.factor]
        elif self.how == "centroid":
            moved = (1 - self.amount) * rows + self.amount * coder.means[k]
        elif self._code is None:
            raise InputError("how='code' needs a code: give it to steer.")
        else:
            z = coder.encode_in(rows, k)
            target = self._code.to(z)
            step = torch.where(target.isnan(), torch.zeros_like(z), target - z)
            moved = rows + step @ coder.loadings[k].mT
        if self.members_only:
            members = coder.encode(x).components == k
            moved = torch.where(members.unsqueeze(-1), moved, rows)
        return fit_dtype(moved, x.dtype)

    def _hook(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        x = first_tensor(output)
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.coder.n_features,):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"the layer {self._layer!r} gives {shape}, and the mixture has"
                f" {self.coder.n_features} features: steer the layer that it was trained on."
            )
        return _replace_first(output, self.move(x))


def _check_way(how: str) -> None:
    if how not in WAYS:
        raise InputError(f"how must be one of {', '.join(map(repr, WAYS))}, not {how!r}.")


def _check_amount(amount: Any) -> None:
    if isinstance(amount, Tensor):
        finite = amount.numel() == 1 and bool(amount.detach().isfinite())
    else:
        finite = isinstance(amount, numbers.Real) and math.isfinite(amount)
    if not finite:
        raise InputError(f"amount must be a finite number, not {amount!r}.")


def _complete_code(code: Tensor | Mapping[int, float], n_factors: int) -> Tensor:
    """Return a code (l,) with NaN for factors that stay."""
    if isinstance(code, Mapping):
        wrong = [j for j in code if not is_index(j, n_factors)]
        if wrong:
            raise InputError(f"code has no factor {wrong[0]!r}: there are {n_factors}, from 0.")
    with input_error(f"code must be {n_factors} finite numbers, or some by their factor.", *KINDS):
        given = torch.as_tensor(list(code.values()) if isinstance(code, Mapping) else code)
    full = given
    if isinstance(code, Mapping):
        full = torch.full((n_factors,), torch.nan)
        full[list(code)] = given.to(full)
    if full.shape != (n_factors,) or not given.isfinite().all():
        raise InputError(f"code must be {n_factors} finite numbers, or some by their factor.")
    return full.detach()


def _replace_first(output: Any, tensor: Tensor) -> Any:
    """Return a layer's output with another first tensor."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        name = next(iter(output))
        changed[name] = _replace_first(output[name], tensor)
        return changed
    parts = [_replace_first(output[0], tensor), *output[1:]]
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
