"""Working units: training sees data that is centred and scaled, whatever the units it came in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core.parameters import Parameters, change_units
from factormix.data.batches import Batch, Values
from factormix.errors import InputError

__all__ = ["Scaling", "Units", "precise_dtype", "shareable"]

Scaling = Literal["global", "feature"] | None

SHARED_TYPES = frozenset(map(np.dtype, ("f8", "f4", "f2", "u1", "i1", "i2", "i4", "i8")))
"""Types of NumPy that torch takes over without a conversion."""


@dataclass(frozen=True)
class Units:
    """The map ``working = (x - offset) / scale`` between a caller's units and those of a solver."""

    offset: Tensor
    """(d,), float64, on the CPU."""
    scale: Tensor
    """(d,), float64, positive, on the CPU."""
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Copies of both where batches lie, so that no batch waits for a transfer."""

    @classmethod
    def identity(cls, n_features: int) -> Self:
        """Return the units that leave data as it is."""
        return cls(
            torch.zeros(n_features, dtype=torch.float64),
            torch.ones(n_features, dtype=torch.float64),
        )

    @classmethod
    def estimate(cls, sample: Batch, scaling: Scaling) -> Self:
        """Choose units from a batch of the data, rows (n, d) with weights (n,) above zero.

        ``"global"`` subtracts the mean and divides by one number, the root of the mean variance;
        ``"feature"`` divides each feature by its own standard deviation (a constant one by the
        global number); None leaves the data as it is.
        """
        if scaling is None:
            return cls.identity(sample.rows.shape[1])
        offset, variance = _moments(sample)
        overall = _mean_variance(variance, len(sample)).sqrt().expand_as(offset).clone()
        if scaling == "feature":
            return cls(offset, torch.where(variance > 0, variance.sqrt(), overall))
        return cls(offset, overall)

    @cached_property
    def log_volume(self) -> float:
        """The logarithm of the Jacobian: working log-likelihood minus that in data units."""
        return float(self.scale.log().sum())

    @cached_property
    def is_identity(self) -> bool:
        """Whether data passes through unchanged."""
        return bool((self.offset == 0).all() and (self.scale == 1).all())

    def to_working(self, batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
        """Bring a batch of rows (n, d) into working units, device and dtype, as tensors.

        The offset is subtracted before rounding to dtype, so that a large one costs no digits.
        """
        x = _tensor(batch.rows)
        if not self.is_identity:
            offset, scale = self._at(x.device)
            x = (x.to(offset.dtype) - offset).div_(scale)
        weights = None if batch.weights is None else _tensor(batch.weights).to(device, dtype)
        return replace(batch, rows=x.to(device, dtype).contiguous(), weights=weights)

    def bound(self, max_precision: float | None, default: float, sample: Batch) -> Tensor:
        """Return the bound on E in working units, (d,).

        ``max_precision`` is in data units. Without it, each feature is bounded by ``default`` over
        its own spread in ``sample``, rows (n, d) with weights (n,) above zero.
        """
        if max_precision is not None:
            return max_precision * self.scale.square()
        return default * self.scale.square() / _spread(sample)

    def to_data(self, parameters: Parameters) -> Parameters:
        """Express working parameters in data units, in float64 where the device has it."""
        offset, scale = self._at(parameters.means.device)
        return change_units(Parameters(*(t.to(offset.dtype) for t in parameters)), offset, scale)

    def _at(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            dtype = precise_dtype(device)
            self._on_device[device] = self.offset.to(device, dtype), self.scale.to(device, dtype)
        return self._on_device[device]


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or the best that a device without it has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _moments(sample: Batch) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of each column, both (d,) in float64; 0 where it is constant."""
    x, weights = _precise(sample.rows), sample.weights
    if weights is None:
        variance, mean = torch.var_mean(x, dim=0, correction=0)
    else:
        share = _precise(weights)
        share = share / share.sum()
        mean = share @ x
        variance = share @ (x - mean).square()
    # The spread of a constant column is rounding, not data.
    single = sample.rows.dtype in (np.float32, torch.float32)
    resolution = torch.finfo(torch.float32).eps if single else 1e-13
    rounding = x.abs().amax(dim=0) * resolution
    return mean, torch.where(variance.sqrt() > rounding, variance, 0)


def _spread(sample: Batch) -> Tensor:
    """Compute how far each column spreads, as a variance, (d,), positive.

    That of a column which is mostly constant, such as a pixel at the border of an image, follows
    its range rather than its variance, within ten standard deviations; that of a constant one is
    the mean variance.
    """
    variance = _moments(sample)[1]
    x, weights = _precise(sample.rows), sample.weights
    reach = (0.2 * (x.amax(dim=0) - x.amin(dim=0))).square()
    spread = torch.minimum(torch.maximum(variance, reach), 100 * variance)
    # A few wild values must not set the scale of all others.
    middle = _middle(x[:1024], None if weights is None else _precise(weights[:1024]))
    spread = torch.where(middle > 0, torch.minimum(spread, (10 * middle).square()), spread)
    return torch.where(variance > 0, spread, _mean_variance(variance, len(sample)))


def _middle(x: Tensor, weights: Tensor | None) -> Tensor:
    """Compute the range of the middle half of each column of x (n, d), (d,), by weights (n,)."""
    if weights is None:
        first, last = len(x) // 4, len(x) * 3 // 4
        columns = np.partition(x.numpy().T, (first, last), axis=1)
        return torch.from_numpy(columns[:, last] - columns[:, first])
    ordered, order = x.sort(dim=0)
    below = weights[order].cumsum(dim=0)
    low, high = ((below <= q * below[-1]).sum(dim=0, keepdim=True) for q in (0.25, 0.75))
    return (ordered.gather(0, high) - ordered.gather(0, low)).squeeze(0)


def _mean_variance(variance: Tensor, n_samples: int) -> Tensor:
    mean = variance.mean()
    if not mean > 0:
        raise InputError(
            "every column of X is constant in the rows that set its scale"
            f" (n_samples={n_samples}): give rows that differ, or both scaling=None and"
            " max_precision."
        )
    if not mean.isfinite():
        raise InputError(
            "the values of X are so large that their variance overflows: divide X by a constant."
        )
    return mean


def _precise(values: Values) -> Tensor:
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


def _tensor(values: Values) -> Tensor:
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(shareable(values))


def shareable(x: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an array that torch can share: C order, writable, of a type that torch has."""
    if x.dtype not in SHARED_TYPES:
        return np.ascontiguousarray(x, dtype=np.float64)
    x = np.ascontiguousarray(x)
    return x if x.flags.writeable else x.copy()
