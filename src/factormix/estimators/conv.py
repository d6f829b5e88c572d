"""``ConvMFA``: an exact, normalised density of whole images of any size."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from factormix.core.arrays import slice_rows
from factormix.core.parameters import Parameters
from factormix.data.features import Features
from factormix.data.pictures import Pictures, as_array, as_image, as_pictures
from factormix.defaults import (
    IMAGE_BATCH,
    IMAGE_FEATURES,
    IMAGE_KINDS,
    IMAGE_NEIGHBOURS,
    IMAGE_RATE,
    IMAGE_SCALES,
    IMAGE_STEPS,
    MESH,
)
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.denoising import PATCH, check_sigma, estimate_noise, restore_type
from factormix.estimators.denoising import denoise as remove_noise
from factormix.estimators.fitting import call_callbacks
from factormix.estimators.mfa import MFA
from factormix.estimators.storage import (
    Settings,
    StoredModel,
    Tensors,
    pack_model,
    unpack_model,
)
from factormix.estimators.validation import (
    LEAST_ROWS_PER_NUMBER,
    MIN_SCALE_ROWS,
    check_callbacks,
    check_count,
    check_device,
    check_positive,
    check_seed,
    set_features_,
)
from factormix.training.callbacks import Progress, ProgressBar, draw_bar
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.distributed.mesh import join_mesh, local_device
from factormix.training.fillings import Fillings
from factormix.training.image_gradient import raise_density
from factormix.training.image_run import (
    ImageRun,
    begin_run,
    pack_image_run,
    train_images,
    unpack_image_run,
)
from factormix.training.run import Record
from factormix.training.scans import (
    SCORE_ROWS,
    Stage,
    blank_plane,
    draw_level,
    scan,
    split_levels,
)
from factormix.training.serialization import add_prefix, select_prefix
from factormix.training.threads import use_threads
from factormix.training.thumbnails import MEASURED_ROWS, Thumbnails, flatten_images

SCORED_PIXELS = 1 << 20
"""Pixels whose planes are in memory at a time while images are scored."""
DEEP_UNIT = 257.0
"""A level of 8 bits in levels of 16 bits: 65,535 / 255."""
MEAN_DRAWS = 16
"""Draws in a mean: its variance is larger by a sixteenth than with very many."""


@dataclass(eq=False, repr=False)
class ConvMFA(StoredModel):
    """A density of images: at every position the same conditional mixture, given the neighbours.

    The probability of an image is a product of conditional mixtures, one for each pixel and channel
    given what is already known: an exact density of images of any size, grey or in colour.
    Images of 8 bits (``uint8``) have probabilities, images of real numbers have densities.

    Parameters
    ----------
    n_kinds : int
        Linear predictions of a mixture.
    n_scales : int
        Widths of each kind, so that a mixture has ``n_kinds * n_scales`` components.
    n_features : int
        Linear features of the neighbours whose energies choose among the components.
    n_neighbours : int
        Nearest pixels that a pixel is given.
    depth : int
        0 scans the pixels in raster order, which has the highest likelihood. With 1 or more, the
        image is halved this many times by block means; the thumbnail comes first, and then the
        differences within blocks, coarse to fine, which gives samples more structure.
    thumbnails : (int, int) or None
        Components and factors of an ``MFA`` of the thumbnails, which all pixels of a thumbnail
        follow together. Samples then have the structure of whole images, and all images have the
        size of the training images. This needs a ``depth``. None scans thumbnails in raster order.
    n_steps : int
        Steps of ``fit``.
    batch_size : int
        Positions of a step.
    learning_rate : float
        Rate of Adam; it falls to a hundredth over the second half of ``fit``.
    random_state : int, RandomState or None
        Seed of initial values, positions and draws.
    device : device or None
        Where to compute; None is the CPU.
    verbose : int
        1 shows a progress bar in training and in ``inpaint``.
    callbacks : sequence of callables
        Called with a ``Progress`` during ``fit`` and ``resume``: see ``factormix.callbacks``.
    mesh : {"auto", "data"} or None
        Processes started by ``torchrun`` share the pixels of each step; None trains alone.

    Attributes
    ----------
    history_ : list of dict
        Step, seconds, bits per dimension of the batches before learning them, and rate.
    n_steps_ : int
        Steps taken.
    finished_ : bool
        Whether ``resume`` has nothing to do.
    image_size_ : (int, int) or None
        Height and width of all images of a model with ``thumbnails``.
    n_features_in_ : int
        Channels of the images.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from factormix import ConvMFA
    >>> images = load_digits().images.astype("uint8")
    >>> model = ConvMFA(n_kinds=4, n_neighbours=6, n_steps=50, random_state=0).fit(images)
    >>> model.score_samples(images[:3]).shape, model.sample(2, size=(8, 8)).shape
    ((3,), (2, 8, 8))
    """

    n_kinds: int = IMAGE_KINDS
    n_scales: int = IMAGE_SCALES
    _: KW_ONLY
    n_features: int = IMAGE_FEATURES
    n_neighbours: int = IMAGE_NEIGHBOURS
    depth: int = 0
    thumbnails: tuple[int, int] | None = None
    n_steps: int = IMAGE_STEPS
    batch_size: int = IMAGE_BATCH
    learning_rate: float = IMAGE_RATE
    random_state: Any = None
    device: Any = None
    verbose: int = 0
    callbacks: Sequence[Callable[[Progress], object]] = ()
    mesh: Any = MESH

    _run: ImageRun = field(init=False)
    _mfa: MFA = field(init=False)
    _unsaved = ("device", "callbacks", "mesh")

    def fit(self, images: Any, y: object = None) -> Self:
        """Train from random values on images.

        ``images`` is an array (n, h, w) or (n, h, w, c), which may be a memory map, a list of
        images of different sizes, or the path of a folder of image files. Ctrl-C ends the training
        after the current step; the estimator then holds the model so far, and ``resume`` continues.
        While the mixture of ``thumbnails`` is trained, which comes first, there is no such model.
        """
        pictures = self._begin(images, self.n_steps)
        return self._train(pictures, self._run.planned_steps)

    def partial_fit(self, images: Any, y: object = None) -> Self:
        """Learn from more images at the full rate: one step for each ``batch_size`` pixels.

        The first call begins from random values and takes the statistics of neighbours from its
        images.
        """
        if hasattr(self, "_run"):
            pictures = self._join(images)
            if self._run.thumbnails is not None:
                plane = split_levels(pictures, self._run.depth)[0][0]
                # A copy learns: a failure or a stop leaves the model as it is.
                mfa = copy.deepcopy(self._mfa)
                thumbnails = _learn_thumbnails(
                    mfa.partial_fit, plane, pictures, self._run.communicator
                )
                self._mfa, self._run.thumbnails = mfa, thumbnails
            # Later steps keep the rate.
            self._run.planned_steps = 0
        else:
            pictures = self._begin(images, 0)
        return self._train(pictures, math.ceil(int(pictures.starts[-1]) / self._run.batch_size))

    def resume(self, images: Any) -> Self:
        """Continue a ``fit`` that was interrupted, or saved before its end, on the same images."""
        pictures = self._join(images)
        if self._run.fingerprint != pictures.fingerprint():
            raise InputError(
                "resume needs the images of fit, and these differ: give the same ones, or learn"
                " from others by partial_fit."
            )
        return self._train(pictures, max(0, self._run.planned_steps - self._run.steps))

    def score_samples(self, images: Any) -> NDArray[np.float64]:
        """Return the log-probability (8 bits) or log-density of each image (n,), in nats."""
        return np.array([surprise.sum() for surprise in self._iterate_surprise(images)]) * -1.0

    def score(self, images: Any, y: object = None) -> float:
        """Return the mean log-probability or log-density of images, in nats."""
        return float(self.score_samples(images).mean())

    def bits_per_dim(self, images: Any) -> float:
        """Return the bits per number of a pixel, over all images; lower is better."""
        pictures = self._check(images)
        dims = int(pictures.starts[-1]) * pictures.n_channels
        return float(-self.score_samples(pictures).sum() / (dims * math.log(2)))

    def surprise(self, images: Any) -> Any:
        """Return how surprising each pixel is, in nats; the sum of a map is minus the score.

        The maps are one array (n, h, w) if all images have one size, and a list of arrays (h, w)
        otherwise. With a depth, the nats of a block are shared by its pixels.
        """
        maps = list(self._iterate_surprise(images))
        return np.stack(maps) if len({one.shape for one in maps}) == 1 else maps

    def sample(
        self,
        n_samples: int = 1,
        size: tuple[int, int] | None = None,
        *,
        every_depth: bool = False,
    ) -> Any:
        """Draw images (n, h, w) or (n, h, w, c) of a size (height, width).

        None is (32, 32) or, with ``thumbnails``, the size of the training images, the only one
        possible. With ``every_depth``, return a list of the thumbnails, the same images twice as
        large, and so on up to ``size``: how each draw came about.
        """
        run = self._fitted_run()
        n = check_count(n_samples, "n_samples", 1)
        sizes = [self.image_size_ or (32, 32) if size is None else _check_size(size)]
        self._check_sizes(*sizes)
        for _ in range(run.depth):
            sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
        random = self._random()
        with use_threads(), torch.inference_mode():
            drawn = [blank_plane(n, sizes.pop(), self.n_features_in_, run.levels)]
            if run.thumbnails is not None:
                run.thumbnails.draw_(drawn[0], random)
            else:
                scan(run.stages[0][0], drawn, random)
            for stages in run.stages[1:]:
                drawn.append(draw_level(stages, drawn[-1], sizes.pop(), random))
        found = [self._output(one) for one in (drawn if every_depth else drawn[-1:])]
        return found if every_depth else found[0]

    def inpaint(
        self, image: Any, mask: Any, *, n_draws: int = 0, n_sweeps: int = 50
    ) -> NDArray[Any]:
        """Fill the pixels of an image (h, w[, c]) where ``mask`` (h, w) is true.

        Return the mean of possible fillings, (h, w[, c]), or ``n_draws`` of them, (n, h, w[, c]).
        Fillings are first drawn in the order of the model. Then the values of missing pixels change
        at random, one by one and in squares, in ``n_sweeps`` sweeps of Metropolis, which converge
        to the distribution given all known pixels; wide holes need more sweeps. The mean is over
        the second half of the sweeps of sixteen fillings.
        """
        run = self._fitted_run()
        n, sweeps = check_count(n_draws, "n_draws", 0), check_count(n_sweeps, "n_sweeps", 0)
        pixels, missing = self._check_image(image), as_array(mask)
        if missing.dtype != bool or missing.shape != pixels.shape[:2]:
            raise InputError(
                f"mask has the type {missing.dtype} and the shape {missing.shape}: give booleans of"
                f" the shape {pixels.shape[:2]}, true where pixels are missing."
            )
        bar = draw_bar(shown=bool(self.verbose), total=sweeps, unit="sweep")
        with use_threads(), torch.inference_mode(), bar:
            fillings = Fillings(
                run.stages, pixels, missing, n or MEAN_DRAWS, self._random(), run.thumbnails
            )
            total = np.zeros(pixels.shape)
            for sweep in range(sweeps):
                fillings.sweep()
                # The first half is left to converge to the distribution given all known pixels.
                total += fillings.images.mean(axis=0) if 2 * sweep + 1 >= sweeps else 0.0
                bar.update()
        found = fillings.images
        if n:
            found = found.astype(pixels.dtype)
        else:
            found = total / ((sweeps + 1) // 2) if sweeps else found.mean(axis=0)
            found = np.where(missing[:, :, None], found, pixels)
        return found[..., 0] if pixels.shape[2] == 1 else found

    def upsample(self, image: Any, factor: int = 2, *, n_draws: int = 0) -> NDArray[Any]:
        """Enlarge an image (h, w[, c]) by 2 or a higher power of 2, up to 2 to the ``depth``.

        The pixels of the image are taken as means of the blocks of a larger one. Return the mean of
        possible larger images, (factor h, factor w[, c]), or ``n_draws`` of them, (n, ...).
        """
        run = self._fitted_run()
        if not run.depth:
            raise InputError("a model of depth 0 cannot enlarge: train one with depth=1 or more.")
        if factor not in [2**i for i in range(1, run.depth + 1)]:
            raise InputError(
                f"factor must be a power of 2 from 2 to 2**depth = {2**run.depth}, not {factor!r}:"
                " a higher depth enlarges more."
            )
        n = check_count(n_draws, "n_draws", 0)
        # Only the differences are drawn, and they have no size of their own.
        pixels, random = self._check([image], any_size=True).image(0), self._random()
        h, w, c = pixels.shape
        with use_threads(), torch.inference_mode():
            drawn = blank_plane(n or MEAN_DRAWS, (h, w), c, run.levels)
            drawn.values.reshape(-1, h, w, c)[:] = pixels
            for stages in run.stages[-int(math.log2(factor)) :]:
                h, w = 2 * h, 2 * w
                drawn = draw_level(stages, drawn, (h, w), random)
        found = self._output(drawn)
        return found if n else found.mean(axis=0)

    def denoise(
        self, image: Any, sigma: float | None = None, *, random_state: int = 0
    ) -> NDArray[Any]:
        """Remove Gaussian noise of deviation ``sigma`` from an image (h, w[, c]).

        The image is of 8 bits (``uint8``) or real numbers. It and ``sigma`` have the scale of the
        training images; ``sigma`` is estimated if None. For a model of 8-bit images, an array of 16
        bits (``uint16``) and its ``sigma`` are divided by 257. Noise is first removed by the
        image's own patches (``factormix.denoise`` without a prior), of which a very small image has
        none; gradient steps then raise the density of the clean image given the noisy one,
        ``log p(x) - |x - image|^2 / (2 sigma^2)``. A model of grey images denoises the channels of
        a colour image one by one. The result has the shape and type of the image.
        """
        run = self._fitted_run()
        given: Any = image if isinstance(image, str | os.PathLike) else as_array(image)
        dtype, unit = getattr(given, "dtype", None), 1.0
        if dtype == np.uint16:
            given, unit = given.astype(np.float32), 1.0 if run.levels is None else DEEP_UNIT
        pixels = as_image(given)
        h, w, c = pixels.shape
        check_noisy_shape(self, h, w, c)
        sigma = estimate_noise(pixels) if sigma is None else check_sigma(sigma)
        self._check_units(pixels, sigma)
        noisy, sigma = pixels.astype(np.float32) / np.float32(unit), sigma / unit
        start = noisy.copy()
        # A deviation below the rounding of the values counts as none.
        if sigma > 1e-6 * np.abs(start).max():
            if min(h, w) >= PATCH < max(h, w):
                start = remove_noise(start, sigma, random_state=random_state)
            for i in range(0, c, self.n_features_in_):
                part = np.s_[:, :, i : i + self.n_features_in_]
                start[part] = raise_density(
                    run.stages, start[part], noisy[part], sigma, run.thumbnails
                )
            if not np.isfinite(start).all():
                raise InputError(
                    f"noise of deviation {sigma:g} gave numbers that are not finite: give sigma in"
                    " the units of the image, and an image in the units of the training."
                )
        found = (start * np.float32(unit)).reshape(np.shape(given) or pixels.shape)
        return restore_type(found, dtype or pixels.dtype)

    def _begin(self, images: Any, planned_steps: int) -> Pictures:
        """Check options and images, and start a run."""
        sizes, depth, rate, device, chosen = check_options(self)
        communicator = self._join_processes(device)
        pictures = communicator.run_together(lambda: as_pictures(images))
        if chosen:
            _check_one_size(pictures, depth, chosen[1])
            _check_enough(len(pictures), chosen[0], streaming=planned_steps == 0)
        communicator.check_same(pictures.fingerprint(), _DIFFERENT)
        levels, thumbnails, mfa = split_levels(pictures, depth), None, None
        seed = communicator.broadcast(check_seed(self.random_state))
        if chosen:
            # Each process trains it alone: it takes little of the time.
            _check_different(levels[0][0])
            mfa = MFA(
                *chosen,
                random_state=seed,
                device=local_device(device),
                mesh=None,
                verbose=int(bool(self.verbose) and communicator.is_first),
            )
            learn = mfa.fit if planned_steps else mfa.partial_fit
            if planned_steps and communicator.is_first:
                _warn_of_few_images(len(pictures), *chosen)
            thumbnails = _learn_thumbnails(learn, levels[0][0], pictures, communicator)
        run = begin_run(
            levels,
            rate=rate,
            planned_steps=planned_steps,
            seed=seed,
            device=local_device(device),
            communicator=communicator,
            thumbnails=thumbnails,
            **sizes,
        )
        run.fingerprint = pictures.fingerprint()
        self._run = run
        if mfa is not None:
            self._mfa = mfa
        set_features_(self, Features(pictures.n_channels, None, None))
        return pictures

    def _join(self, images: Any) -> Pictures:
        """Check images to continue with, and let the run join the present processes."""
        self._check_can_learn()
        check_callbacks(self.callbacks)
        communicator = self._join_processes(check_device(self.device))
        pictures = communicator.run_together(lambda: self._check(images))
        state = self._run.steps, self._run.seed, pictures.fingerprint()
        communicator.check_same(state, _DIFFERENT)
        self._run.communicator = communicator
        return pictures

    def _join_processes(self, device: torch.device) -> Communicator:
        if self.mesh not in ("auto", "data", None):
            raise InputError(f"mesh must be 'auto', 'data' or None, not {self.mesh!r}.")
        communicator = join_mesh(self.mesh, local_device(device))
        if communicator.data.size > self.batch_size:
            raise InputError(
                f"a batch of {self.batch_size} pixels cannot be shared by {communicator.data.size}"
                " processes: use a larger batch_size."
            )
        return communicator

    def _train(self, pictures: Pictures, n_steps: int) -> Self:
        run, before, communicator = self._run, self._run.steps, self._run.communicator
        bar = ProgressBar(before) if self.verbose and communicator.is_first else None
        features = Features(self.n_features_in_, None, None)
        shown: list[Callable[[Progress], object]] = [bar] if bar else []
        callbacks = [*shown, *self.callbacks]

        def report(entry: Record, last: bool) -> bool:
            progress = Progress(self, entry, run, features, last, before)  # type: ignore[arg-type]
            return call_callbacks(callbacks, progress, communicator)

        try:
            if n_steps:
                train_images(run, pictures, n_steps, report)
        finally:
            if bar:
                bar.close()
            # Every process has the whole model now, and uses it alone.
            run.communicator = SINGLE
        return self

    @property
    def history_(self) -> list[Record]:
        """The records of the training."""
        return self._fitted_run().history

    @property
    def n_steps_(self) -> int:
        """Steps taken."""
        return self._fitted_run().steps

    @property
    def finished_(self) -> bool:
        """Whether ``resume`` has nothing to do."""
        return self._fitted_run().finished

    @property
    def image_size_(self) -> tuple[int, int] | None:
        """Height and width of all images of a model with ``thumbnails``."""
        thumbnails = self._fitted_run().thumbnails
        return None if thumbnails is None else thumbnails.size

    def _fitted_run(self) -> ImageRun:
        check_is_fitted(self, "_run")
        return self._run

    def _check_can_learn(self) -> None:
        if not self._fitted_run().first:
            raise InputError(
                "this model was saved without its training state and cannot learn: save it with"
                " training_state=True."
            )

    def _check(self, images: Any, *, any_size: bool = False) -> Pictures:
        """Make pictures that the model can score."""
        run = self._fitted_run()
        pictures = as_pictures(images, self.n_features_in_)
        if pictures.n_channels != self.n_features_in_:
            raise InputError(
                f"images have {pictures.n_channels} channels where the model has"
                f" {self.n_features_in_}: convert them."
            )
        if pictures.levels != run.levels:
            kind = "real numbers: give floats" if pictures.levels else "8-bit images: give uint8"
            raise InputError(f"the model was trained on {kind}.")
        if not any_size:
            sizes = set(zip(pictures.heights.tolist(), pictures.widths.tolist(), strict=True))
            self._check_sizes(*sizes)
        return pictures

    def _check_sizes(self, *sizes: tuple[int, int]) -> None:
        """Refuse images of another size than the mixture of thumbnails has."""
        own = self.image_size_
        for h, w in sizes:
            if own is not None and (h, w) != own:
                raise InputError(
                    f"an image has {h} x {w} pixels, and the thumbnails of this model are"
                    f" of images of {own[0]} x {own[1]}: resize them, or train without thumbnails."
                )

    def _check_image(self, image: Any) -> NDArray[Any]:
        """Return one image (h, w, c) of the model's kind."""
        pictures = self._check([image])
        return pictures.image(0)

    def _check_units(self, pixels: NDArray[Any], sigma: float) -> None:
        """Refuse a noisy image that is likely to have other units than the model or ``sigma``."""
        levels, largest = self._run.levels, float(np.abs(pixels).max())
        if sigma > 10 * max(largest, (levels or 1) - 1) > 0:
            raise InputError(
                f"noise of deviation {sigma:g} is too large for an image of values up to"
                f" {largest:g}: give sigma in the units of the image."
            )
        if levels is None or pixels.dtype.kind != "f" or (pixels == pixels.round()).all():
            return
        # Noise of less than a level, in an image of no more than a level.
        if sigma < 1 and largest <= 1 + 5 * sigma:
            raise InputError(
                f"the image has values up to {largest:g}, and the model is of 8-bit images, with"
                " values up to 255: multiply the image and sigma by 255."
            )

    def _iterate_surprise(self, images: Any) -> Iterator[NDArray[np.float64]]:
        """Yield the map (h, w) of each image; few images are in memory at a time."""
        pictures, run = self._check(images), self._fitted_run()
        start = 0
        while start < len(pictures):
            stop = int(np.searchsorted(pictures.starts, pictures.starts[start] + SCORED_PIXELS))
            stop = min(max(stop, start + 1), len(pictures))
            yield from _map_surprise(run, pictures.take(start, stop))
            start = stop

    def _random(self) -> torch.Generator:
        return torch.Generator(self._run.device).manual_seed(check_seed(self.random_state))

    def _output(self, pictures: Pictures) -> NDArray[Any]:
        """Return images of one size as an array, grey ones without channels."""
        h, w, c = pictures.image(0).shape
        array = pictures.values.reshape(len(pictures), h, w, c)
        array = array.astype(np.uint8) if pictures.levels else array
        return array[..., 0] if c == 1 else array

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        training_state = training_state and bool(self._run.first)
        tensors, settings = pack_image_run(self._run, training_state=training_state)
        thumbnails = self._run.thumbnails
        if thumbnails is not None:
            packed, mfa = pack_model(self._mfa, training_state=training_state)
            tensors |= add_prefix(_THUMBNAILS, packed)
            settings |= {
                "thumbnails": {"mfa": mfa, "size": thumbnails.size, "nats": thumbnails.nats}
            }
        return tensors, settings

    def _unpack_(self, tensors: Tensors, settings: Settings) -> int:
        thumbnails, packed = None, settings.get("thumbnails")
        if packed:
            mfa = unpack_model(MFA, select_prefix(_THUMBNAILS, tensors), packed["mfa"], self.device)
            h, w = packed["size"]
            self._mfa, form = mfa, mfa.mixture_.precision_form
            thumbnails = Thumbnails.build(form, (h, w), settings["run"]["levels"], packed["nats"])
        self._run = unpack_image_run(
            tensors, settings["run"], check_device(self.device), thumbnails
        )
        return int(settings["run"]["n_channels"])


_DIFFERENT = "the processes of this run have different images or models: give all the same."
_THUMBNAILS = "thumbnails."
"""Prefix of the tensors of the mixture of thumbnails in files."""
_COUNTS = ("n_kinds", "n_scales", "n_features", "n_neighbours", "n_steps", "batch_size")


class _Options(NamedTuple):
    """The options of a new run, checked."""

    sizes: dict[str, int]
    depth: int
    rate: float
    device: torch.device
    thumbnails: tuple[int, int] | None


def check_options(model: ConvMFA) -> _Options:
    """Check the options of a new run, for which no images are needed."""
    sizes = {name: check_count(getattr(model, name), name, 1) for name in _COUNTS}
    del sizes["n_steps"]
    check_callbacks(model.callbacks)
    depth, device = check_count(model.depth, "depth", 0), check_device(model.device)
    rate = check_positive(model.learning_rate, "learning_rate", or_none=False)
    return _Options(sizes, depth, rate, device, _check_thumbnails(model.thumbnails, depth))


def check_noisy_shape(model: ConvMFA, h: int, w: int, c: int) -> None:
    """Refuse an image (h, w, c) that a model cannot denoise."""
    if model.n_features_in_ not in (1, c):
        raise InputError(
            f"the image has {c} channels where the model has {model.n_features_in_}: convert it."
        )
    model._check_sizes((h, w))


def _check_size(size: Any) -> tuple[int, int]:
    if not isinstance(size, Sequence) or len(size) != 2:
        raise InputError(f"size must be (height, width), not {size!r}.")
    return check_count(size[0], "the height", 1), check_count(size[1], "the width", 1)


def _check_thumbnails(value: Any, depth: int) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InputError(f"thumbnails must be (components, factors), not {value!r}.")
    if depth == 0:
        raise InputError("thumbnails needs a depth of 1 or more: depth 0 has no thumbnails.")
    components = check_count(value[0], "the number of components in thumbnails", 1)
    return components, check_count(value[1], "the number of factors in thumbnails", 0)


def _check_one_size(pictures: Pictures, depth: int, n_factors: int) -> None:
    """Refuse images that a mixture of thumbnails cannot learn."""
    h, w = int(pictures.heights[0]), int(pictures.widths[0])
    if (pictures.heights != h).any() or (pictures.widths != w).any():
        raise InputError(
            "thumbnails needs images of one size, and these have several: resize or cut them, or"
            " leave thumbnails out."
        )
    n = -(-h // 2**depth) * -(-w // 2**depth) * pictures.n_channels
    if n_factors >= n:
        raise InputError(
            f"a thumbnail has {n} numbers, and its mixture {n_factors} factors: give fewer factors"
            " in thumbnails, or a lower depth."
        )


def _check_enough(n_images: int, n_components: int, *, streaming: bool) -> None:
    """Refuse fewer images than the first training of a mixture of thumbnails needs."""
    if streaming and n_images < MIN_SCALE_ROWS:
        raise InputError(
            f"the first call of partial_fit with thumbnails needs {MIN_SCALE_ROWS} images or more,"
            f" and has {n_images}: give more, or leave thumbnails out."
        )
    least = max(2, n_components)
    if not streaming and n_images < least:
        raise InputError(
            f"thumbnails with {n_components} components needs {least} images or more, and has"
            f" {n_images}: give more images, or fewer components in thumbnails."
        )


def _check_different(plane: Pictures) -> None:
    """Refuse thumbnails that are all the same: their variances would be zero."""
    rows = flatten_images(plane)
    # The first part usually decides, and parts need little memory.
    parts = slice_rows(len(rows), max(1, SCORED_PIXELS // rows.shape[1]))
    if all((rows[part] == rows[0]).all() for part in parts):
        raise InputError(
            "all thumbnails are the same, and a mixture needs some that differ: give other images,"
            " or leave thumbnails out."
        )


def _warn_of_few_images(n_images: int, n_components: int, n_factors: int) -> None:
    least = LEAST_ROWS_PER_NUMBER * (n_factors + 1)
    if n_images < least * n_components:
        warnings.warn(
            f"thumbnails of {n_components} components with {n_factors} factors are likely to be a"
            f" poor model for {n_images} images: use"
            f" thumbnails={max(1, n_images // least), n_factors}, fewer factors, or more images.",
            TrainingWarning,
            stacklevel=4,
        )


def _learn_thumbnails(
    learn: Callable[[Any], MFA], plane: Pictures, pictures: Pictures, communicator: Communicator
) -> Thumbnails:
    """Train the mixture of the thumbnails of pictures, with the first rank's numbers on all."""
    rows = flatten_images(plane)
    try:
        # ``_warn_of_few_images`` says it in the words of this estimator.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)
            mfa = learn(rows)
    except InputError as error:
        largest = int(np.maximum(rows.max(axis=1), -rows.min(axis=1)).argmax())
        raise InputError(
            "the mixture of thumbnails cannot learn images whose values are so far apart: leave out"
            f" or correct image {largest} (counting from 0), which has the largest."
        ) from error
    except KeyboardInterrupt:
        # There is no whole model that could be saved.
        raise KeyboardInterrupt("at once") from None
    form = Parameters(*communicator.broadcast_tensors(mfa.mixture_.precision_form))
    size = int(pictures.heights[0]), int(pictures.widths[0])
    found = Thumbnails.build(form, size, plane.levels)
    some = rows[:: -(-len(rows) // MEASURED_ROWS)]
    return replace(found, nats=-float(found.score(some).mean()))


def _map_surprise(run: ImageRun, pictures: Pictures) -> Iterator[NDArray[np.float64]]:
    """Yield the maps of some images."""
    levels = split_levels(pictures, run.depth)
    finer = [planes[0] for planes in levels[1:]] + [pictures]
    maps = [np.zeros(size) for size in zip(finer[0].heights, finer[0].widths, strict=True)]
    if run.thumbnails is not None:
        scores = run.thumbnails.score(flatten_images(levels[0][0]))
        maps = list(-scores.reshape(len(maps), *maps[0].shape, -1).sum(axis=-1))
    for i, (stages, planes) in enumerate(zip(run.stages, levels, strict=True)):
        for stage in stages:
            plane, nats = planes[stage.shape.target], _score_plane(stage, planes)
            for j, one in enumerate(maps):
                h, w = int(plane.heights[j]), int(plane.widths[j])
                one[:h, :w] -= nats[plane.starts[j] : plane.starts[j + 1]].reshape(h, w)
        if i:
            sizes = zip(finer[i].heights, finer[i].widths, strict=True)
            maps = [_spread(one, *size) for one, size in zip(maps, sizes, strict=True)]
    yield from maps


def _score_plane(stage: Stage, planes: Sequence[Pictures]) -> NDArray[np.float64]:
    """Return the log-probability of each position of the target plane, all channels together."""
    plane = planes[stage.shape.target]
    total = int(plane.starts[-1])

    def score(start: int) -> NDArray[np.float64]:
        pixels = np.arange(start, min(start + SCORE_ROWS, total))
        found = stage.score(stage.read(planes, plane.locate(pixels)))
        scores: NDArray[np.float64] = found.double().sum(1).cpu().numpy()
        return scores

    with use_threads() as threads, torch.inference_mode():
        found = list(threads.stream(score, range(0, total, SCORE_ROWS)))
    return np.concatenate(found) if found else np.zeros(0)


def _spread(blocks: NDArray[np.float64], h: int, w: int) -> NDArray[np.float64]:
    """Share the numbers of blocks equally among their pixels (h, w)."""
    for axis, length in enumerate((h, w)):
        counts = np.full(blocks.shape[axis], 2)
        counts[-1] -= length % 2
        shape = [-1, 1] if axis == 0 else [1, -1]
        blocks = np.repeat(blocks / counts.reshape(shape), counts, axis=axis)
    return blocks
