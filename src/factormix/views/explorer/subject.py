"""One trained model, as the page shows it: in which units, as which kind of picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.core import density
from factormix.core.density import Operands
from factormix.core.inspection import feature_variances, in_use, variance_shares
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, change_units, loadings
from factormix.data.sources.arrays import ArrayRows
from factormix.errors import InputError
from factormix.views.explorer.arrangement import arrange, grid_shape
from factormix.views.plotting.drawing import value_limits
from factormix.views.plotting.tiles import checked_shape

if TYPE_CHECKING:
    from factormix.estimators import MFA

__all__ = ["Display", "Subject"]

Floats = NDArray[np.float32]

IN_FULL = 30_000_000
"""Numbers of a mixture up to which it is held in float64."""
MAP_BYTES = 4_000_000
"""Bytes that the pictures of a map have together, at most about."""
OWN_SAMPLES = 1000
"""Samples by which a model says what is usual, where there is no data."""
LIKENESS = 0.3
"""Correlation of neighbouring pixels from which rows of no known shape are taken as images."""
BARS = 32
"""Features up to which a row is drawn as bars; more are drawn as a line."""


@dataclass(frozen=True)
class Display:
    """How a row (d,) is shown: ``(x - centre) / scale``, drawn between ``low`` and ``high``.

    Images are shown as they are. Other rows are shown as deviations from the mean of the mixture,
    in standard deviations, because their features need have no unit in common.
    """

    kind: str
    """"image", "bars" or "line"."""
    shape: tuple[int, ...]
    centre: NDArray[np.float64]
    """(d,)."""
    scale: NDArray[np.float64]
    """(d,), positive."""
    low: float
    high: float

    @property
    def units(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What is subtracted and divided by, (d,) each."""
        return self.centre, self.scale

    def row(self, x: Any) -> Floats:
        """Bring rows (..., d) into the units that are shown."""
        return np.asarray((np.asarray(x, np.float64) - self.centre) / self.scale, np.float32)

    def spread(self, x: Any) -> Floats:
        """Bring deviations or directions (..., d) into the units that are shown."""
        return np.asarray(np.asarray(x, np.float64) / self.scale, np.float32)

    def tiles(self, rows: Floats, most: int) -> NDArray[np.uint8]:
        """Draw shown rows (n, d) in 256 steps, (n, *tile), in about ``most`` bytes at most."""
        step = (rows - self.low) * np.float32(255 / (self.high - self.low))
        pixels = np.clip(np.rint(step), 0, 255).astype(np.uint8).reshape(-1, *self.shape)
        axes = (1, 2) if self.kind == "image" else (1,)
        fold = 1
        while pixels.size // fold ** len(axes) > most:
            fold += 1
        return _folded(pixels, axes, fold)


class Subject:
    """A model with all that the page asks of it more than once."""

    def __init__(
        self, model: MFA, image_shape: Sequence[int] | None = None, *, profiles: bool = False
    ) -> None:
        """Show rows as images of ``image_shape``, or as the model says; or all as ``profiles``."""
        self.model = model
        mixture = model.mixture_
        K, d, l = mixture.precision_form.shape
        if K * d * (l + 2) > IN_FULL:
            mixture = mixture.float()
        self.mixture: PrecisionMixture = mixture
        self.K, self.d, self.l = K, d, l
        names = getattr(model, "feature_names_in_", None)
        self.feature_names = None if names is None else [str(name) for name in names]
        with torch.no_grad():
            self.weights = mixture.weights.double().numpy()
            self.display = self._display((self.d,) if profiles else image_shape)
            self.means = self.display.row(mixture.means.numpy())

    def prepare(self) -> None:
        """Compute all that the first picture needs, before anybody waits for it."""
        _ = self.order, self.tiles

    def _display(self, image_shape: Sequence[int] | None) -> Display:
        given = image_shape or self.model.image_shape_
        means = self.mixture.means[torch.from_numpy(in_use(self.weights))].numpy()
        shape, none = checked_shape(self.d, given), np.zeros(self.d)
        if given is None and (self.feature_names is not None or not _smooth(means, shape)):
            shape = (self.d,)
        if len(shape) > 1:
            low, high = _image_limits(means)
            return Display("image", shape, none, none + 1, low, high)
        mean = np.asarray(self.weights @ self.mixture.means.double().numpy())
        scale = feature_variances(self.parameters).sqrt().double().numpy()
        shown = np.abs((means - mean) / scale)
        high = max(1.0, float(np.quantile(shown, 0.99))) * 1.15
        return Display("bars" if self.d <= BARS else "line", shape, mean, scale, -high, high)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of the map."""
        return grid_shape(self.K)

    @cached_property
    def order(self) -> NDArray[np.int32]:
        """The component in every cell of the map, (K,)."""
        return arrange(self.means, *self.grid).astype(np.int32)

    @cached_property
    def tiles(self) -> NDArray[np.uint8]:
        """The pictures of the map, (K, *tile), by the number of the component."""
        return self.display.tiles(self.means, MAP_BYTES)

    @cached_property
    def in_use(self) -> NDArray[np.bool_]:
        """Which components are in use, (K,)."""
        used: NDArray[np.bool_] = in_use(self.weights)
        return used

    @torch.no_grad()
    def component(self, k: int) -> tuple[dict[str, Any], dict[str, Floats]]:
        """Describe one component: facts, and arrays (d,) or (l, d) in the units shown."""
        self.check_component(k)
        display = self.display
        centre, scale = (torch.from_numpy(t).to(self.mixture.means) for t in display.units)
        alone = self.mixture.component(k).precision_form
        shown = change_units(alone, -centre / scale, scale.reciprocal())
        found = variance_shares(shown)
        facts = {
            "component": k,
            "weight": self.weights[k],
            "in_use": bool(self.in_use[k]),
            "explained": found.factors[0].tolist(),
            "noise": float(found.noise[0]),
        }
        return facts, {
            "mean": self.means[k],
            "precision": shown.precision_diag[0].float().numpy(),
            "deviation": feature_variances(shown).sqrt().float().numpy(),
            "loadings": loadings(shown)[0].mT.float().contiguous().numpy(),
        }

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters, in units of the data."""
        with torch.no_grad():
            return Parameters(*(t.detach() for t in self.mixture.precision_form))

    @cached_property
    def operands(self) -> Operands:
        """What rows are multiplied by, gathered once."""
        with torch.no_grad():
            return density.operands(self.parameters)

    @torch.no_grad()
    def samples(self, k: int | None, n: int, noise: bool, seed: int) -> Floats:
        """Draw rows (n, d) of one component, or of all, in the units shown."""
        generator = torch.Generator().manual_seed(seed)
        if k is None:
            drawn = self.mixture.sample(n, noise=noise, generator=generator)
        else:
            self.check_component(k)
            drawn = self.mixture.component(k).sample(n, noise=noise, generator=generator)
        return self.display.row(drawn.numpy())

    @cached_property
    def own_scores(self) -> NDArray[np.float64]:
        """Log-likelihoods of samples of the model itself, ascending: what is usual for it."""
        generator = torch.Generator().manual_seed(0)
        drawn = self.mixture.sample(OWN_SAMPLES, generator=generator).double().numpy()
        return np.sort(np.asarray(self.model.score_samples(ArrayRows(drawn)), np.float64))

    def check_component(self, k: int) -> None:
        """Say so if there is no such component."""
        if not 0 <= k < self.K:
            raise InputError(f"there is no component {k}: they are numbered 0 to {self.K - 1}.")


def _smooth(means: NDArray[Any], shape: Sequence[int]) -> bool:
    """Tell whether means (n, d) of a guessed shape look like images: neighbours are alike."""
    if len(shape) < 2:
        return False
    pixels = means.reshape(-1, *shape)
    pixels = pixels - pixels.mean()
    spread = max(float((pixels**2).mean()), np.finfo(np.float64).tiny)
    pairs = (pixels[:, 1:] * pixels[:, :-1], pixels[:, :, 1:] * pixels[:, :, :-1])
    return all(float(pair.mean()) > LIKENESS * spread for pair in pairs)


def _image_limits(means: NDArray[Any]) -> tuple[float, float]:
    """Find black and white for images: the whole range of bytes or shares, or that of the means."""
    low, high = (float(q) for q in np.quantile(means, (0.002, 0.998)))
    if low >= -26 and 40 < high <= 281:
        return 0.0, 255.0
    return value_limits(means)


def _folded(pixels: NDArray[np.uint8], axes: Sequence[int], fold: int) -> NDArray[np.uint8]:
    """Average ``fold`` neighbours along the axes, the last ones perhaps fewer."""
    if fold == 1:
        return pixels
    summed: NDArray[Any] = pixels.astype(np.float32)
    for axis in axes:
        n = summed.shape[axis]
        firsts = np.arange(0, n, fold)
        counts = np.diff([*firsts, n])
        shape = [1] * summed.ndim
        shape[axis] = len(firsts)
        summed = np.add.reduceat(summed, firsts, axis=axis) / counts.reshape(shape)
    return np.asarray(np.rint(summed), np.uint8)
