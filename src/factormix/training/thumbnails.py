"""Thumbnails as rows: all numbers of the coarsest plane of an image follow one mixture.

It takes the place of the raster scan that begins a coarse-to-fine model, and knows the whole image
at once. Pixels follow each other in raster order, and colours within a pixel, each number given
those before it (``core.sequential``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core.arrays import BLOCK_ELEMENTS, CACHE_ELEMENTS, slice_rows
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import (
    Parameters,
    diagonalise_precisely,
    from_generative,
    loadings,
    noise_variances,
)
from factormix.core.sequential import SequentialMixture, draw_sequences_, score_sequences
from factormix.data.pictures import Pictures
from factormix.training.scans import LEAST_WIDTH
from factormix.training.threads import use_threads

MEASURED_ROWS = 1000
"""Training thumbnails whose mean is their share of the bits that training reports."""


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """The mixture of the thumbnails of images of one size."""

    size: tuple[int, int]
    """Height and width of the whole images."""
    levels: int | None
    mixture: PrecisionMixture
    """In float64."""
    sequence: SequentialMixture
    """The same mixture in float32."""
    nats: float = 0.0
    """Mean surprise of a number of the training thumbnails."""

    @classmethod
    def build(
        cls, parameters: Parameters, size: tuple[int, int], levels: int | None, nats: float = 0.0
    ) -> Self:
        """Prepare a mixture, in units of the pixels."""
        form = diagonalise_precisely(parameters)
        if levels is not None:
            noise = noise_variances(form.precision_diag).clamp(min=LEAST_WIDTH**2)
            form = from_generative(form.logits, form.means, loadings(form), noise)
        sequence = SequentialMixture.prepare(form).to(torch.float32)
        return cls(size, levels, PrecisionMixture.from_parameters(form), sequence, nats)

    def score(self, rows: NDArray[np.number]) -> NDArray[np.float64]:
        """Return the log-mass or log-density of each number (n, d) of thumbnails (n, d)."""
        _, K, l = self.sequence.gains.shape
        parts = slice_rows(len(rows), CACHE_ELEMENTS // (K * (l + 1)))

        def score(part: slice) -> Tensor:
            x = torch.from_numpy(rows[part].astype(np.float32)).to(self.sequence.means)
            return score_sequences(self.sequence, x, self.levels)

        with use_threads() as threads, torch.inference_mode():
            found = torch.cat(list(threads.stream(score, parts)))
        scores: NDArray[np.float64] = found.double().cpu().numpy()
        return scores

    def draw_(
        self, plane: Pictures, random: torch.Generator, missing: NDArray[np.bool_] | None = None
    ) -> None:
        """Draw thumbnails in place, or their pixels that are ``missing`` (n, h, w)."""
        rows, (_, K, l) = flatten_images(plane), self.sequence.gains.shape
        hidden = None
        if missing is not None:
            hidden = np.repeat(missing.reshape(len(rows), -1), plane.n_channels, axis=1)
        for part in slice_rows(len(rows), BLOCK_ELEMENTS // (K * (l + 1))):
            x = torch.from_numpy(rows[part].astype(np.float32)).to(self.sequence.means)
            some = None if hidden is None else torch.from_numpy(hidden[part]).to(x.device)
            draw_sequences_(self.sequence, x, self.levels, random, some)
            rows[part] = x.cpu().numpy()

    def differentiate(self, image: Tensor) -> tuple[float, Tensor]:
        """Return the log-density of a thumbnail (h, w, c) of real numbers, and its gradient."""
        with torch.enable_grad():
            x = image.detach().requires_grad_()
            log_p = self.mixture.log_prob(x.to(self.mixture.means).reshape(1, -1))[0]
            (gradient,) = torch.autograd.grad(log_p, x)
        return float(log_p.detach()), gradient


def flatten_images(plane: Pictures) -> NDArray[np.number]:
    """Return a view (n, h w c) of images of one size."""
    return plane.values.reshape(len(plane), -1)
