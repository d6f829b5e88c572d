"""One trained model as the page shows it: units, pictures, components and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import avg_pool1d, avg_pool2d

from factormix.core.inspection import feature_variances, in_use, variance_shares
from factormix.core.missing import PreparedMixture
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, change_units, loadings
from factormix.data.sources.arrays import ArrayRows
from factormix.errors import InputError
from factormix.estimators import MFA
from factormix.views.explorer.layout import (
    MANY_CELLS,
    USUAL_RATIO,
    arrange_on_grid,
    choose_grid,
)
from factormix.views.plotting.drawing import value_limits
from factormix.views.plotting.tiles import check_image_shape

Floats = NDArray[np.float32]

MAX_DOUBLES = 30_000_000
"""Parameters up to which a mixture is held in float64, 240 MB; larger ones are float32."""
MAP_BYTES = 4_000_000
"""Approximate limit on the bytes of all pictures of the map: about as many as the map has pixels on
a large screen, 2560 x 1440."""
N_SAMPLES = 1000
"""Samples that stand in for the data where none was given: the standard error of a percentile is at
most 1.6%."""
MIN_CORRELATION = 0.3
"""Correlation of neighbouring pixels above which rows of unknown shape are drawn as images."""
MAX_BARS = 32
"""Features up to which a row is drawn as bars; longer rows are drawn as a line."""


@dataclass(frozen=True)
class Display:
    """How a row (d,) is shown: ``(x - centre) / scale``, drawn between ``low`` and ``high``.

    Images are shown in their own values. Other rows are shown as deviations from the mean of the
    mixture in standard deviations, because their features may have different units.
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

    def convert_rows(self, x: Any) -> Floats:
        """Convert rows (..., d) to the units shown."""
        return np.asarray((np.asarray(x, np.float64) - self.centre) / self.scale, np.float32)

    def convert_deviations(self, x: Any) -> Floats:
        """Convert standard deviations (..., d) to the units shown."""
        return np.asarray(np.asarray(x, np.float64) / self.scale, np.float32)

    def draw_tiles(self, rows: Floats, max_bytes: int) -> NDArray[np.uint8]:
        """Draw shown rows (n, d) in 256 levels, (n, *tile), averaged down to ``max_bytes``."""
        levels = (rows - self.low) * np.float32(255 / (self.high - self.low))
        pixels = np.clip(np.rint(levels), 0, 255).astype(np.uint8).reshape(-1, *self.shape)
        factor, n_axes = 1, 2 if self.kind == "image" else 1
        while pixels.size // factor**n_axes > max_bytes:
            factor += 1
        return pixels if factor == 1 else _downsample(pixels, factor)


class ModelView:
    """A model with everything that the page asks for more than once."""

    def __init__(
        self, model: MFA, image_shape: Sequence[int] | None = None, *, profiles: bool = False
    ) -> None:
        """Draw rows as images of ``image_shape`` or the model's own, or all as ``profiles``."""
        self.model = model
        mixture = model.mixture_
        K, d, l = mixture.precision_form.shape
        if K * d * (l + 2) > MAX_DOUBLES:
            mixture = mixture.float()
        self.mixture: PrecisionMixture = mixture
        self.K, self.d, self.l = K, d, l
        names = getattr(model, "feature_names_in_", None)
        self.feature_names = None if names is None else [str(name) for name in names]
        with torch.no_grad():
            self.parameters = Parameters(*(t.detach() for t in mixture.precision_form))
            self.weights = mixture.weights.double().numpy()
            self.in_use: NDArray[np.bool_] = in_use(self.weights)
            self.counts = model.n_rows_trained_ * self.parameters.log_weights.exp()
            """Training rows of each component, (K,)."""
            self.display = self._choose_display((d,) if profiles else image_shape)
            self.means = self.display.convert_rows(mixture.means.numpy())
        self._orders: dict[tuple[int, int], NDArray[np.int32]] = {}
        self.arrange(USUAL_RATIO)
        self.tiles = self.display.draw_tiles(self.means, MAP_BYTES)
        """Pictures of the components, (K, *tile)."""

    def arrange(self, ratio: float) -> tuple[tuple[int, int], NDArray[np.int32]]:
        """Return rows and columns of a map, and the component in every cell, (K,).

        The map fills a space whose width over height, in pictures, is ``ratio``. Large maps are
        arranged once, when the model is loaded, because that takes seconds.
        """
        grid = choose_grid(self.K, ratio if self.K <= MANY_CELLS else USUAL_RATIO)
        if grid not in self._orders:
            self._orders[grid] = arrange_on_grid(self.means, *grid).astype(np.int32)
        return grid, self._orders[grid]

    def _choose_display(self, image_shape: Sequence[int] | None) -> Display:
        given = image_shape or self.model.image_shape_
        means = self.mixture.means[torch.from_numpy(self.in_use)].numpy()
        shape = check_image_shape(self.d, given)
        if given is None and (self.feature_names is not None or not _is_smooth(means, shape)):
            shape = (self.d,)
        if len(shape) > 1:
            zeros = np.zeros(self.d)
            return Display("image", shape, zeros, zeros + 1, *find_image_limits(means))
        mean = np.asarray(self.weights @ self.mixture.means.double().numpy())
        scale = feature_variances(self.parameters).sqrt().double().numpy()
        deviations = np.abs((means - mean) / scale)
        high = max(1.0, float(np.quantile(deviations, 0.99))) * 1.15
        return Display("bars" if self.d <= MAX_BARS else "line", shape, mean, scale, -high, high)

    @cached_property
    def prepared(self) -> PreparedMixture:
        """The mixture with the matrices that rows are multiplied by."""
        return PreparedMixture(self.parameters)

    @torch.no_grad()
    def describe_component(self, k: int) -> tuple[dict[str, Any], dict[str, Floats]]:
        """Return facts about a component, and arrays (d,) or (l, d) in the units shown."""
        self.check_component(k)
        centre, scale = (
            torch.from_numpy(t).to(self.mixture.means)
            for t in (self.display.centre, self.display.scale)
        )
        alone = self.mixture.component(k).precision_form
        shown = change_units(alone, -centre / scale, scale.reciprocal())
        shares = variance_shares(shown)
        facts = {
            "component": k,
            "weight": self.weights[k],
            "in_use": bool(self.in_use[k]),
            "explained": shares.factors[0].tolist(),
            "noise": float(shares.noise[0]),
        }
        return facts, {
            "mean": self.means[k],
            "precision": shown.precision_diag[0].float().numpy(),
            "deviation": feature_variances(shown).sqrt().float().numpy(),
            "loadings": loadings(shown)[0].mT.float().contiguous().numpy(),
        }

    @torch.no_grad()
    def draw_samples(self, k: int | None, n: int, noise: bool, seed: int) -> Floats:
        """Draw rows (n, d) from component ``k``, or from all, in the units shown."""
        mixture = self.mixture
        if k is not None:
            self.check_component(k)
            mixture = mixture.component(k)
        generator = torch.Generator().manual_seed(seed)
        drawn = mixture.sample(n, noise=noise, generator=generator)
        return self.display.convert_rows(drawn.numpy())

    @cached_property
    def sample_scores(self) -> NDArray[np.float64]:
        """Log-likelihoods of samples of the model, ascending."""
        generator = torch.Generator().manual_seed(0)
        drawn = self.mixture.sample(N_SAMPLES, generator=generator).double().numpy()
        return np.sort(np.asarray(self.model.score_samples(ArrayRows(drawn)), np.float64))

    def check_length(self, n_bytes: int) -> None:
        """Raise an error if the body of a request is longer than a row of float64."""
        if n_bytes > 8 * self.d:
            raise InputError("the row has more values than the model has features.")

    def check_component(self, k: int) -> None:
        """Raise an error if there is no component ``k``."""
        if not 0 <= k < self.K:
            raise InputError(f"there is no component {k}: they are numbered 0 to {self.K - 1}.")


def _is_smooth(means: NDArray[Any], shape: Sequence[int]) -> bool:
    """Return whether neighbouring pixels of means (n, d) are alike, as in images."""
    if len(shape) < 2:
        return False
    pixels = means.reshape(-1, *shape)
    pixels = pixels - pixels.mean()
    variance = max(float((pixels**2).mean()), np.finfo(np.float64).tiny)
    products = (pixels[:, 1:] * pixels[:, :-1], pixels[:, :, 1:] * pixels[:, :, :-1])
    return all(float(product.mean()) > MIN_CORRELATION * variance for product in products)


def find_image_limits(means: NDArray[Any]) -> tuple[float, float]:
    """Return the values of black and white: 0 to 255, 0 to 1, or the range of the means."""
    low, high = (float(q) for q in np.quantile(means, (0.002, 0.998)))
    # A tenth of the range may lie beyond either end, as in value_limits.
    if low >= -26 and 40 < high <= 281:
        return 0.0, 255.0
    return value_limits(means)


def _downsample(pixels: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Average ``factor`` neighbours of (n, w) or (n, h, w[, 3]); the last group may be smaller."""
    pool = avg_pool1d if pixels.ndim == 2 else avg_pool2d
    x = torch.from_numpy(pixels).float()
    x = x.movedim(-1, 1) if x.ndim == 4 else x.unsqueeze(1)
    averages = pool(x, factor, ceil_mode=True, count_include_pad=False).round().byte()
    averages = averages.movedim(1, -1) if pixels.ndim == 4 else averages.squeeze(1)
    return averages.contiguous().numpy()
