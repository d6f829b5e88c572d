"""A density of whole images as the page shows it: samples, surprise and fillings."""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError
from factormix.estimators import ConvMFA
from factormix.views.explorer.model_view import find_image_limits
from factormix.views.explorer.scores import BackgroundWork

# The times are those of one core and a colour model of the default sizes.
MAX_PIXELS = 1 << 20
"""Pixels of an image whose surprise is shown: 10 seconds."""
MAX_ERASED = 1 << 10
"""Pixels that are filled at once: 40 seconds, or 6 minutes by a model of depth 2."""
MAX_SIDE = 256
"""Height and width of samples: 16 take 16 seconds."""
N_SAMPLES, SAMPLES_AT_ONCE = 16, 4
N_DRAWS, DRAWS_AT_ONCE = 8, 2
"""Samples and fillings, each small enough to compare with the others at a glance, and how many
become visible at a time."""
N_SWEEPS = 10
"""Sweeps of a filling: a fifth of those of ``inpaint``, because somebody waits for it."""
MIN_MARGIN = 8
"""Known pixels that are shown on each side of erased ones, at least: chosen, to see the
seam."""
MAX_WORKS = 4
"""Results that are kept, so that several windows do not undo each other's work."""
LIMIT_SAMPLES, LIMIT_SIDE = 8, 16
"""Samples, and their side, from which the values of black and white are taken."""

Images = NDArray[Any]
Step = Callable[[int], list[Images]]
"""Computes some of the images of a work: one array, or one of each size."""


class ImageWork(BackgroundWork):
    """Images that a thread computes in steps, one work of a model at a time."""

    def __init__(self, step: Step, n: int, at_once: int, turn: Any) -> None:
        """Compute ``n`` images by calls of ``step`` with the numbers of the first of each part."""
        super().__init__()
        self.n, self._step, self._at_once, self._turn = n, step, at_once, turn
        self._parts: list[list[Images]] = []

    @property
    def images(self) -> list[Images] | None:
        """All images, of each size that there is, once they are complete."""
        if self.done < self.n:
            return None
        return [np.concatenate(part) for part in zip(*self._parts, strict=True)]

    def _run(self) -> None:
        try:
            with self._turn:
                while self.done < self.n and not self._stopped.is_set():
                    self._parts.append(self._step(self.done))
                    self.done += self._at_once
        except InputError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"the model could not compute this ({type(error).__name__}: {error})."


class ImageView:
    """A model of whole images, and its works in the background."""

    def __init__(self, model: ConvMFA) -> None:
        self.model = model
        self.n_channels = int(model.n_features_in_)
        self.size = model.image_size_
        few = self._seeded(0).sample(LIMIT_SAMPLES, size=self.size or (LIMIT_SIDE, LIMIT_SIDE))
        self.eight_bit = few.dtype == np.uint8
        self.low, self.high = find_image_limits(few)
        self._works = OrderedDict[tuple[Any, ...], ImageWork]()
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def describe(self) -> dict[str, Any]:
        """Return sizes, limits, and how images are drawn."""
        return {
            "images": {
                "depth": self.model.depth,
                "size": self.size,
                "kinds": self.model.n_kinds,
                "scales": self.model.n_scales,
                "channels": self.n_channels,
                "eight_bit": self.eight_bit,
                "max_pixels": MAX_PIXELS,
                "max_erased": MAX_ERASED,
                "max_side": MAX_SIDE,
            },
            "kind": "image",
            "shape": (1, 1, 3) if self.n_channels == 3 else (1, 1),
            "low": self.low,
            "high": self.high,
        }

    def stop(self, seconds: float = 0.0) -> None:
        """Stop all works, and wait for the current step at most some seconds."""
        with self._lock:
            works = list(self._works.values())
        for work in works:
            work.stop(seconds)

    def sample(self, height: int, width: int, seed: int) -> ImageWork:
        """Draw samples (n, h, w[, c]) at every depth, the thumbnails first."""
        inside = 1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE
        if not inside and (height, width) != self.size:
            raise InputError(f"height and width of samples must lie between 1 and {MAX_SIDE}.")

        def draw(first: int) -> list[Images]:
            size, seeded = (height, width), self._seeded(seed + first)
            return list(seeded.sample(SAMPLES_AT_ONCE, size=size, every_depth=True))

        key = ("sample", height, width, seed)
        return self._find(key, draw, N_SAMPLES, SAMPLES_AT_ONCE)

    def draw_tiles(self, images: Images) -> NDArray[np.uint8]:
        """Draw images in 256 levels from black to white."""
        levels = np.rint((images - self.low) * (255 / (self.high - self.low)))
        return np.clip(levels, 0, 255).astype(np.uint8)

    def surprise(self, body: bytes, height: int, width: int) -> ImageWork:
        """Compute the bits of each pixel of an image, (1, h, w)."""
        image, _ = self._read(body, height, width)

        def compute(_: int) -> list[Images]:
            bits = np.asarray(self.model.surprise(image[None])) / math.log(2)
            return [bits.astype(np.float32)]

        return self._find(("surprise", height, width, _digest(body)), compute, 1, 1)

    def fill(self, body: bytes, height: int, width: int, seed: int) -> ImageWork:
        """Fill the erased pixels of an image, which follow it as a mask.

        The result is the part around them, (n, h, w[, c]).
        """
        image, rest = self._read(body, height, width)
        if len(rest) != height * width:
            raise InputError(f"the mask has {len(rest):,} pixels, not {height} x {width}.")
        mask = np.frombuffer(rest, np.uint8).reshape(height, width) > 0
        erased = int(mask.sum())
        if erased == 0:
            raise InputError("no pixel is erased: erase a region of the image first.")
        if erased > MAX_ERASED:
            raise InputError(
                f"{erased:,} pixels are erased, and at most {MAX_ERASED:,} are filled at once:"
                " restore the image, and erase a smaller region."
            )
        surroundings = tuple(_widen(lines) for lines in mask.nonzero())

        def draw(first: int) -> list[Images]:
            seeded = self._seeded(seed + first)
            draws = seeded.inpaint(image, mask, n_draws=DRAWS_AT_ONCE, n_sweeps=N_SWEEPS)
            return [draws[(slice(None), *surroundings)]]

        key = ("fill", height, width, seed, _digest(body))
        return self._find(key, draw, N_DRAWS, DRAWS_AT_ONCE)

    def check_length(self, n_bytes: int) -> None:
        """Raise an error if the body of a request is longer than the largest image and mask."""
        if n_bytes > MAX_PIXELS * (self.n_channels + 1):
            raise InputError(f"the image has more than {MAX_PIXELS:,} pixels: make it smaller.")

    def _read(self, body: bytes, height: int, width: int) -> tuple[Images, bytes]:
        """Return an image (h, w[, c]) of 8-bit values in the model's units, and the other bytes."""
        if not 1 <= height * width <= MAX_PIXELS:
            raise InputError(
                f"the image has {height} x {width} pixels: give one of at most {MAX_PIXELS:,}."
            )
        size = height * width * self.n_channels
        if len(body) < size:
            raise InputError(
                f"the image has {len(body):,} bytes where {height} x {width} pixels of"
                f" {self.n_channels} channels have {size:,}."
            )
        shape = (height, width) + ((self.n_channels,) if self.n_channels > 1 else ())
        image: Images = np.frombuffer(body[:size], np.uint8).reshape(shape)
        if not self.eight_bit:
            image = (self.low + image * ((self.high - self.low) / 255)).astype(np.float32)
        return image, body[size:]

    def _find(self, key: tuple[Any, ...], step: Step, n: int, at_once: int) -> ImageWork:
        """Return the work of a key, and start it if it is new."""
        with self._lock:
            if key not in self._works:
                self._works[key] = ImageWork(step, n, at_once, self._turn)
            self._works.move_to_end(key)
            work = self._works[key]
            while len(self._works) > MAX_WORKS:
                self._works.popitem(last=False)[1].stop()
        work.start()
        return work

    def _seeded(self, seed: int) -> ConvMFA:
        """Return the model with a seed of its own."""
        model = copy.copy(self.model)
        model.random_state = seed
        return model


def _widen(lines: NDArray[np.int64]) -> slice:
    """Return the range from the first to the last of lines, with half as many on each side."""
    first, last = int(lines.min()), int(lines.max())
    margin = max(MIN_MARGIN, (last + 1 - first) // 2)
    return slice(max(0, first - margin), last + 1 + margin)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
