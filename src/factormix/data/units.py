"""Working units: solvers see centred and scaled data, whatever the units of the input."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core.parameters import Parameters, change_units, precise_dtype
from factormix.data.batches import Batch, Values, mask_missing
from factormix.data.columns import Columns

Scaling = Literal["global", "feature"] | None

SHARED_TYPES = frozenset(map(np.dtype, ("f8", "f4", "f2", "u1", "i1", "i2", "i4", "i8")))
"""NumPy types that torch shares without a conversion."""

LARGEST_RATIO = 1e12
"""Ratio of deviations up to which features share a unit. With the least noise, 1e-6 of a variance,
precisions reach 1e30 in this unit, and float32 ends at 3e38."""


@dataclass(frozen=True)
class Units:
    """The map ``working = (x - offset) / scale`` from data units to working units."""

    offset: Tensor
    """(d,), float64, on the CPU."""
    scale: Tensor
    """(d,), float64, positive, on the CPU."""
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Copies of both on each device, so that no batch waits for a transfer."""

    @classmethod
    def identity(cls, n_features: int) -> Self:
        """Return units that leave data unchanged."""
        return cls(
            torch.zeros(n_features, dtype=torch.float64),
            torch.ones(n_features, dtype=torch.float64),
        )

    @classmethod
    def estimate(cls, columns: Columns, scaling: Scaling) -> Self:
        """Choose units from the columns of a sample of the data.

        ``"global"`` subtracts the mean and divides by one number, the root of the mean variance;
        features that vary by less than 1 / ``LARGEST_RATIO`` of it have a smaller one.
        ``"feature"`` divides each feature by its own standard deviation. A constant feature is
        divided by its spread. None leaves the data unchanged. Wild values, as ``Columns`` finds
        them, do not count.
        """
        if scaling is None:
            return cls.identity(columns.n_features)
        variance = columns.variance
        if scaling == "global":
            variance = torch.minimum(columns.mean_variance, LARGEST_RATIO**2 * variance)
        scale = torch.where(columns.variance > 0, variance, columns.spread).sqrt()
        return cls(columns.mean, scale)

    @classmethod
    def estimate_robust(cls, sample: Batch, usual: Units) -> Self:
        """Choose units by quantiles of rows (n, d), which outliers hardly move.

        The middle half and the middle nine tenths of a column each give the deviation of a
        Gaussian; the scale is the larger one. Where both are zero, it is the ``usual`` scale.
        """
        x = as_tensor(sample.rows).cpu().to(torch.float64).numpy()
        # np.quantile is many times faster, but does not skip NaN.
        quantile = np.nanquantile if np.isnan(x).any() else np.quantile
        low, quarter, middle, upper, high = quantile(x, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
        scale = np.maximum((upper - quarter) / 1.349, (high - low) / 3.290)
        spread = torch.from_numpy(scale)
        return cls(torch.from_numpy(middle), torch.where(spread > 0, spread, usual.scale))

    @cached_property
    def log_volume(self) -> float:
        """Log of the Jacobian: working log-likelihood minus log-likelihood in data units."""
        return float(self.scale.log().sum())

    @cached_property
    def is_identity(self) -> bool:
        """Whether data passes through unchanged."""
        return bool((self.offset == 0).all() and (self.scale == 1).all())

    def to_working(
        self, batch: Batch, device: torch.device, dtype: torch.dtype, *, complete: bool = False
    ) -> Batch:
        """Bring a batch of rows (n, d) into working units, device and dtype, as tensors.

        The offset is subtracted before rounding to dtype, so that a large one costs no digits.
        NaN becomes a missing entry, unless the rows are known to be ``complete``.
        """
        x = as_tensor(batch.rows)
        complete = complete or not x.is_floating_point()
        if not self.is_identity:
            offset, scale = self._at(x.device)
            x = (x.to(offset.dtype) - offset).div_(scale)
        weights = None if batch.weights is None else as_tensor(batch.weights).to(device, dtype)
        # A sum is NaN where one of its terms is, and it costs less than a mask.
        gaps = not complete and bool(x.sum().isnan())
        x = x.to(device, dtype).contiguous()
        return mask_missing(x, weights) if gaps else replace(batch, rows=x, weights=weights)

    def missing_volume(self, missing: Tensor) -> Tensor:
        """Compute the part of ``log_volume`` that belongs to missing entries (n, d), (n,)."""
        log_scale = self._at(missing.device)[1].log()
        return missing.to(log_scale.dtype) @ log_scale

    def bound(self, max_precision: float | None, default: float | None, columns: Columns) -> Tensor:
        """Return the bound on E in working units, (d,).

        ``max_precision`` is in data units. Without it, the bound of a feature is ``default`` over
        its spread in the columns of a sample. Without a default either, it is the inverse of the
        feature's noise floor.
        """
        if max_precision is not None:
            return max_precision * self.scale.square()
        if default is None:
            return self.scale.square() / columns.noise_floor
        return default * self.scale.square() / columns.spread

    def values_to_data(self, values: Tensor) -> Tensor:
        """Bring working values (n, d) into data units, in float64 where the device has it."""
        offset, scale = self._at(values.device)
        return values.to(offset.dtype) * scale + offset

    def to_data(self, parameters: Parameters) -> Parameters:
        """Express working parameters in data units, in float64 where the device has it."""
        offset, scale = self._at(parameters.means.device)
        return change_units(Parameters(*(t.to(offset.dtype) for t in parameters)), offset, scale)

    def _at(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            dtype = precise_dtype(device)
            self._on_device[device] = self.offset.to(device, dtype), self.scale.to(device, dtype)
        return self._on_device[device]


def as_tensor(values: Values) -> Tensor:
    """Return values as a detached tensor, which shares their memory where possible."""
    return (
        values.detach()
        if isinstance(values, Tensor)
        else torch.from_numpy(to_shareable_array(values))
    )


def to_shareable_array(x: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an array that torch can share: in C order, writable, of a type that torch has."""
    if x.dtype not in SHARED_TYPES:
        return np.ascontiguousarray(x, dtype=np.float64)
    x = np.ascontiguousarray(x)
    return x if x.flags.writeable else x.copy()
