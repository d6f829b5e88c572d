"""Remove noise from images by mixtures of their patches, or by a density of whole images.

Every patch of the image, at every position, is replaced by its posterior mean under a mixture of
clean patches, and overlapping patches are averaged. The mixture is learned from the noisy image
itself. With a mixture of the patches of clean photographs as well, whose weights adapt to every
part of the image, the estimate is the mean of both, whose errors are partly independent. Its low
frequencies come from the image at half the size (Facciolo, Pierazzo and Morel, 2017), where patches
reach twice as far.

In the end, every patch gets a Gaussian of its own, that of the patches around it that look most
alike in this first estimate, and the noisy patches are filtered once more (Lebrun, Buades and
Morel, 2013).

Patches are described without their mean, by the other coefficients of a cosine transform, which
keeps the noise equal and independent, and by their position, so that components belong to places.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from factormix.core.arrays import BLOCK_ELEMENTS
from factormix.core.wiener import (
    EigenMixture,
    diagonalise_covariances,
    filter_groups,
    filter_rows,
)
from factormix.data.pictures import LARGEST, as_array
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import check_positive, check_seed
from factormix.training.threads import use_threads

PATCH = 8
"""Height and width of patches without a prior, as in EPLL (Zoran and Weiss, 2011)."""
PATCHES_PER_COMPONENT, FACTORS, EPOCHS, MAX_PATCHES = 1500, 12, 3, 200_000
"""The mixture of a noisy image. Factors were chosen on two photographs of BSD68 with noise of 25
levels: with 100 components, 12 factors were 0.06 dB ahead of 40 on average. On two training
photographs of BSDS300, 750 patches for a component instead of 1,500 bring 0.01 dB in twice the
time. No script repeats it."""
NEAR = 30
"""Pixels that weigh as much as one deviation of the noise. On parts of 180 x 180 pixels of six
training photographs of BSDS300, with noise of 25 levels: 27.93 dB, 27.91 without positions, 27.92
with 60 pixels and 27.90 with 15; averaged with a prior of other photographs, 28.02 and without
positions 27.99. No script repeats it."""
LOW_SHARE = 0.5
"""Share of the frequencies of the half image that are taken from it. On the same parts, with a
prior of 200 kinds in nine scales: 28.06 dB without any, 28.09 with 0.3 and 0.5, 28.05 with 0.7. No
script repeats it."""
NEIGHBOURS = 32
"""Height and width, in patches, of the parts to which a prior adapts its weights. On the middle 180
x 180 pixels of six other training photographs, by a prior of 100 kinds in nine scales alone: 28.16
dB with the same weights everywhere, 28.45 with 16, 28.49 with 24 and 28.50 with 32. No script
repeats it."""
GROUP, GROUP_PATCH, REACH, STEP = 32, 6, 15, 4
"""Patches of a group, their height and width, how far away they may be, and pixels between the
patches that have a group. On such middles of six more training photographs, at deviations of 15, 25
and 50: 31.31, 28.69 and 25.42 dB before and 31.58, 28.96 and 25.74 after, in 0.3 s; with a prior
31.48, 28.92 and 25.77 before and 31.66, 29.11 and 26.02 after. Patches of 8 x 8 bring 31.53, 28.97
and 25.79 in 0.8 s, 16 of them 28.82 at 25; 24 and 40 in a group, a reach of 20 and steps of 3 are
within 0.03 dB. No script repeats it."""
TILE, TILE_QUANTILE = 64, 0.1
"""Pixels of a tile, and the quantile of tiles that estimates the noise: within 2% on five of six
photographs of BSD68, at deviations of 25 and 50; no script repeats it."""
FEW_PATCHES = 625
"""Patches of a tile, 25 x 25, below which the estimate of its noise is corrected."""
STRIP = 1 << 15
"""Patches that are filtered together: 8 MiB."""


@runtime_checkable
class Denoiser(Protocol):
    """A density of whole images, such as ``ConvMFA``, that removes noise itself."""

    def denoise(
        self, image: Any, sigma: float | None = None, *, random_state: int = 0
    ) -> NDArray[Any]:
        """Remove noise from an image."""


def denoise(
    image: ArrayLike,
    sigma: float | None = None,
    *,
    prior: MFA | Denoiser | None = None,
    random_state: int = 0,
) -> NDArray[Any]:
    """Remove Gaussian noise from an image.

    Parameters
    ----------
    image : array (height, width) or (height, width, 3)
        Of whole numbers or floats, on any scale.
    sigma : float or None
        Standard deviation of the noise, in units of the image; estimated if None, which takes more
        than about 16 x 16 pixels.
    prior : MFA, ConvMFA or None
        What is known of clean images, in the units of this image: a mixture of square patches,
        trained on rows of p x p pixels, whose estimate is averaged with the estimate by the patches
        of this image; or a density of whole images, see ``ConvMFA.denoise``. A mixture of patches
        is also applied at half the size, which suits photographs, where patches of all sizes
        are alike; regular textures can get worse.
    random_state : int
        Seed of the training.

    Returns
    -------
    array of the shape and dtype of the image; whole numbers are rounded, and stay in their range.

    Examples
    --------
    >>> import numpy as np
    >>> import factormix
    >>> clean = np.add.outer(np.arange(64), np.arange(64)) % 32 * 4.0
    >>> noisy = clean + np.random.default_rng(0).normal(scale=10, size=clean.shape)
    >>> denoised = factormix.denoise(noisy, sigma=10)
    >>> bool(np.std(denoised - clean) < 6)
    True
    """
    if isinstance(prior, Denoiser) and not isinstance(prior, MFA | type):
        return prior.denoise(image, sigma, random_state=random_state)
    given = as_array(image)
    planes = _split_planes(given)
    size = find_patch_size(prior)
    check_size(planes.shape[1], planes.shape[2], size, estimated=sigma is None)
    if sigma is None:
        sigma = float(np.median([_estimate_sigma(plane) for plane in planes]))
    else:
        sigma = check_sigma(sigma)
    # A deviation below the rounding of the values counts as none.
    if sigma <= 1e-6 * float(planes.abs().max()):
        return given.copy()
    basis, seed = _make_basis(size), check_seed(random_state)
    cleaned = list[Tensor]()
    with torch.no_grad(), use_threads():
        for plane in planes:
            if float(plane.max() - plane.min()) <= 1e-6 * sigma:
                # A plane of nearly one value has nothing to learn from.
                cleaned.append(torch.full_like(plane, float(plane.double().mean())))
                continue
            # In units of the noise, the units of the image do not change the result.
            scaled = plane / sigma
            clean = sigma * _filter_patches(scaled, _learn_mixture(scaled, basis, seed), 1.0, basis)
            if prior is not None:
                known = _convert_prior(prior, basis)
                clean = (clean + _filter_patches(plane, known, sigma, basis, adapt=True)) / 2
                small = _halve(plane)
                if min(small.shape) >= size:
                    low = _filter_patches(small, known, sigma / 2, basis, adapt=True)
                    clean = _replace_low(clean, low)
            cleaned.append(sigma * _filter_groups(scaled, clean / sigma))
    return _merge_planes(torch.stack(cleaned), given)


def estimate_noise(image: ArrayLike) -> float:
    """Estimate the standard deviation of Gaussian noise in an image, in units of the image.

    The eigenvalues of the covariance of all patches are the variance of the noise where the clean
    patches do not vary. The largest are left out until the others lie evenly around their mean
    (Chen, Zhu and Heng, 2015). This is done in tiles, because texture hides the noise, and the
    result is a low quantile of the tiles.
    """
    planes = _split_planes(as_array(image))
    check_size(planes.shape[1], planes.shape[2], 1, estimated=True)
    return float(np.median([_estimate_sigma(plane) for plane in planes]))


def find_patch_size(prior: Any) -> int:
    """Return the height of the patches of a trained prior, which is 1 if it is of whole images."""
    if prior is None:
        return PATCH
    if isinstance(prior, Denoiser) and not isinstance(prior, MFA | type):
        return 1
    if isinstance(prior, type) or not hasattr(prior, "mixture_"):
        raise InputError(
            "prior must be a trained MFA of square patches, or a trained ConvMFA: call fit first."
        )
    size = math.isqrt(prior.n_features_in_)
    if size**2 != prior.n_features_in_ or size < 2:
        raise InputError(
            f"prior has {prior.n_features_in_} features: train it on rows of p x p pixels, such as"
            " 64 for patches of 8 x 8."
        )
    return size


def check_sigma(sigma: Any) -> float:
    """Return a deviation of noise that float32 can hold."""
    found = check_positive(sigma, "sigma, the deviation of the noise,")
    if found > LARGEST:
        raise InputError(
            f"sigma, the deviation of the noise, must be at most {LARGEST:g}, not {sigma!r}: give"
            " it in the units of the image."
        )
    return found


def check_size(height: int, width: int, patch: int, *, estimated: bool) -> None:
    """Refuse images that are too small for patches, or for an estimate of their noise."""
    # A single patch cannot train a mixture.
    if min(height, width) < patch or max(height, width) == patch > 1:
        raise InputError(
            f"the image has {height} x {width} pixels, and patches have {patch} x {patch}: give a"
            " larger image."
        )
    rows, columns = (min(n, TILE) - PATCH + 1 for n in (height, width))
    # With no more patches than pixels in each, the covariance lacks noise in some directions.
    if estimated and (min(rows, columns) < 1 or rows * columns <= PATCH**2):
        raise InputError(
            f"the image has {height} x {width} pixels, too few to estimate the noise: give sigma,"
            " its deviation."
        )


def _split_planes(image: NDArray[Any]) -> Tensor:
    """Return an image as planes (c, height, width) in float32 that share no noise."""
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3)):
        raise InputError(
            f"the image has the shape {image.shape}: give (height, width), or (height, width, 3)"
            " for colour."
        )
    if image.dtype.kind not in "buif":
        raise InputError(f"the image has the type {image.dtype}: give numbers.")
    if not np.isfinite(image).all():
        raise InputError("the image has NaN or infinite pixels: fill them in first.")
    largest = max(float(image.max(initial=0)), -float(image.min(initial=0)))
    if largest and not 1 / LARGEST <= largest <= LARGEST:
        raise InputError(
            f"the largest value of the image is {largest:g}, and must lie between {1 / LARGEST:g}"
            f" and {LARGEST:g}: multiply the image and sigma by a constant."
        )
    planes = torch.from_numpy(np.ascontiguousarray(image, np.float32))
    if image.ndim == 2:
        return planes.unsqueeze(0)
    planes = planes.permute(2, 0, 1)
    coloured: Tensor = torch.tensordot(_cosines(len(planes)), planes, dims=1)
    return coloured


def _merge_planes(planes: Tensor, given: NDArray[Any]) -> NDArray[Any]:
    """Return planes (c, height, width) as an image of the shape and dtype of a given one."""
    if given.ndim == 3:
        planes = torch.tensordot(_cosines(len(planes)).mT, planes, dims=1).permute(1, 2, 0)
    return restore_type(planes.reshape(given.shape).numpy(), given.dtype)


def restore_type(found: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return real numbers in a type; whole numbers are rounded and stay in their range."""
    if dtype.kind == "b":
        return found > 0.5
    if dtype.kind in "ui":
        limits = np.iinfo(dtype)
        found = np.rint(found.astype(np.float64)).clip(limits.min, limits.max)
    return found.astype(dtype)


def _cosines(n: int) -> Tensor:
    """Return the orthonormal cosine transform of n values, (n, n), the constant first."""
    k, x = torch.arange(n).unsqueeze(1), torch.arange(n, dtype=torch.float64) + 0.5
    rows: Tensor = (2 / n) ** 0.5 * torch.cos(torch.pi / n * k * x)
    rows[0] /= 2**0.5
    return rows.float()


def _take_low(plane: Tensor, rows: int, columns: int) -> Tensor:
    """Return the lowest frequencies of an image, (rows, columns)."""
    height, width = plane.shape
    return _cosines(height)[:rows] @ plane @ _cosines(width)[:columns].mT


def _halve(plane: Tensor) -> Tensor:
    """Return the lower half of the frequencies as an image, whose noise has half the deviation."""
    height, width = (n // 2 for n in plane.shape)
    low = _take_low(plane, height, width)
    return _cosines(height).mT @ low @ _cosines(width) / 2


def _replace_low(plane: Tensor, small: Tensor) -> Tensor:
    """Replace the lowest frequencies of an image by the frequencies of its half."""
    rows, columns = (int(LOW_SHARE * n) for n in small.shape)
    change = 2 * _take_low(small, rows, columns) - _take_low(plane, rows, columns)
    height, width = plane.shape
    return plane + _cosines(height)[:rows].mT @ change @ _cosines(width)[:columns]


def _make_basis(size: int) -> Tensor:
    """Return the patterns of a patch other than the constant, (p p, p p - 1), orthonormal."""
    rows = _cosines(size)
    return torch.kron(rows, rows)[1:].mT.contiguous()


def _view_patches(plane: Tensor, size: int) -> Tensor:
    """Return a view of the patches at all positions, (rows, columns, p, p)."""
    return plane.unfold(0, size, 1).unfold(1, size, 1)


def _estimate_sigma(plane: Tensor) -> float:
    """Return the quantile over tiles of the deviation of the noise in a tile."""
    height, width = plane.shape
    found = [
        _estimate_tile(plane[i : i + TILE, j : j + TILE])
        for i in range(0, max(1, height - TILE + 1), TILE)
        for j in range(0, max(1, width - TILE + 1), TILE)
    ]
    return float(np.quantile(found, TILE_QUANTILE))


def _estimate_tile(tile: Tensor) -> float:
    patches = _view_patches(tile, PATCH).reshape(-1, PATCH**2).double()
    values = torch.linalg.eigvalsh(patches.mT.cov())
    n = len(values)
    while int((values[:n] > values[:n].mean()).sum()) < int((values[:n] < values[:n].mean()).sum()):
        n -= 1
    share = _share_found(len(patches)) / _share_found(FEW_PATCHES)
    return float(values[:n].mean().clamp(min=0).sqrt()) / min(1.0, share)


def _share_found(n_patches: int) -> float:
    """Return the mean estimate of noise of deviation one from n patches without an image.

    Simulated means are 0.44 of 81 patches, 0.66 of 121, 0.76 of 169, 0.83 of 225, 0.87 of 289 and
    0.94 of 625. No script repeats it.
    """
    return 1 - 36 / (n_patches - 16)


def _describe_patches(patches: Tensor, places: Tensor, basis: Tensor, spread: float) -> Tensor:
    """Return the coefficients of patches (n, p, p), and places (n, 2) times ``spread``.

    The result is (n, p p + 1).
    """
    coefficients = patches.reshape(len(patches), -1) @ basis
    return torch.cat([coefficients, spread * places.to(coefficients)], dim=1)


def _draw_rows(plane: Tensor, basis: Tensor, seed: int, most: int = MAX_PATCHES) -> Tensor:
    """Describe the patches of an image with noise of variance one, at most ``most`` at random."""
    patches = _view_patches(plane, math.isqrt(len(basis)))
    columns = patches.shape[1]
    n = patches.shape[0] * columns
    numbers = torch.arange(n)
    if n > most:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randperm(n, generator=generator)[:most].sort().values
    i, j = numbers // columns, numbers % columns
    return _describe_patches(patches[i, j], torch.stack([i, j], dim=1), basis, 1 / NEAR)


def _learn_mixture(plane: Tensor, basis: Tensor, seed: int) -> EigenMixture:
    """Train a mixture on patches of an image with noise of variance one, and take the noise out."""
    rows = _draw_rows(plane, basis, seed)
    model = MFA(
        max(1, len(rows) // PATCHES_PER_COMPONENT),
        min(FACTORS, basis.shape[1] - 1),
        max_precision=1.0,
        max_epochs=EPOCHS,
        random_state=seed,
    )
    with warnings.catch_warnings():
        # A small image has few patches, and its user did not choose the sizes of the mixture.
        warnings.simplefilter("ignore", TrainingWarning)
        model.fit(rows.numpy())
    parameters = model.mixture_.precision_form
    identity = torch.eye(rows.shape[1], dtype=parameters.means.dtype)
    return _to_float32(diagonalise_covariances(parameters, identity, noise=1.0))


def _convert_prior(prior: MFA, basis: Tensor) -> EigenMixture:
    """Express a mixture of patches in the basis of their coefficients."""
    parameters = prior.mixture_.precision_form
    return _to_float32(
        diagonalise_covariances(
            parameters, basis.to(parameters.means), scales=getattr(prior.solver_, "scales", 1)
        )
    )


def _to_float32(mixture: EigenMixture) -> EigenMixture:
    return EigenMixture(*(t.to("cpu", torch.float32) for t in mixture))


def _filter_patches(
    plane: Tensor, mixture: EigenMixture, sigma: float, basis: Tensor, *, adapt: bool = False
) -> Tensor:
    """Replace all patches by their posterior means, and average them where they overlap.

    A patch counts by the inverse of the number of directions that its filter keeps, because noise
    remains in these directions. With ``adapt``, the weights of the mixture are adapted to every
    part of the image.
    """
    m, size = basis.shape[1], math.isqrt(len(basis))
    patches = _view_patches(plane, size)
    rows, columns = patches.shape[:2]
    height, width = (NEIGHBOURS, NEIGHBOURS) if adapt else (max(1, STRIP // columns), columns)
    total, weights = torch.zeros_like(plane), torch.zeros_like(plane)
    # Parts of nearly equal sizes: none has too few patches to adapt weights to.
    for top, bottom in _split_evenly(rows, height):
        for left, right in _split_evenly(columns, width):
            part = patches[top:bottom, left:right]
            # A mixture of clean photographs has no positions.
            places = torch.cartesian_prod(torch.arange(top, bottom), torch.arange(left, right))
            given = _describe_patches(part.flatten(0, 1), places, basis, sigma / NEAR)
            given = given[:, : mixture.means.shape[1]]
            found, kept = filter_rows(given, mixture, sigma**2, adapt=adapt)
            share = (1 / (1 + kept)).view(part.shape[:2])
            means = part.mean(dim=(2, 3), keepdim=True)
            clean = means + (found[:, :m] @ basis.mT).view(part.shape)
            here = slice(top, bottom + size - 1), slice(left, right + size - 1)
            _add_patches_(total[here], clean * share[:, :, None, None])
            _add_patches_(weights[here], share[:, :, None, None].expand_as(clean))
    return total / weights


def _add_patches_(plane: Tensor, patches: Tensor) -> None:
    """Add patches (rows, columns, p, p) at all positions to an image."""
    rows, columns, height, width = patches.shape
    for i in range(height):
        for j in range(width):
            plane[i : i + rows, j : j + columns] += patches[:, :, i, j]


def _filter_groups(plane: Tensor, clean: Tensor) -> Tensor:
    """Take out noise of variance one by the Gaussians of groups of patches that look alike.

    A group has the patches nearest to one of them in the estimate ``clean`` of the image, which
    also gives its mean and covariance.
    """
    views = [_view_patches(one, min(GROUP_PATCH, *plane.shape)) for one in (plane, clean)]
    rows, columns = views[0].shape[:2]
    noisy, known = (view.reshape(rows * columns, -1) for view in views)
    total, shares = torch.zeros_like(noisy), noisy.new_zeros(rows * columns)
    steps = torch.arange(-REACH, REACH + 1)
    # The last patches are those that end at the border.
    centres = torch.cartesian_prod(
        *(torch.tensor([*range(0, n - 1, STEP), n - 1]) for n in (rows, columns))
    )
    near = torch.cartesian_prod(steps, steps)
    limits, size = torch.tensor([rows, columns]), BLOCK_ELEMENTS // (len(near) * known.shape[1])
    for some in torch.split(centres, size):
        places = some.unsqueeze(1) + near
        inside = ((places >= 0) & (places < limits)).all(dim=2)
        numbers = (places[..., 0] * columns + places[..., 1]).where(inside, 0)
        own = len(near) // 2
        distances = (known[numbers] - known[numbers[:, own : own + 1]]).square_().sum(dim=2)
        distances.masked_fill_(~inside, torch.inf)
        # Equal patches around it do not displace a patch from its group.
        distances[:, own] = -1
        group = min(GROUP, int(inside.sum(dim=1).amin()))
        chosen = numbers.gather(1, distances.topk(group, dim=1, largest=False).indices)
        found, kept = filter_groups(noisy[chosen], known[chosen])
        share = (1 / (1 + kept)).repeat_interleave(group)
        shares.index_add_(0, chosen.view(-1), share)
        total.index_add_(0, chosen.view(-1), found.flatten(0, 1) * share.unsqueeze(1))
    result, weights = torch.zeros_like(plane), torch.zeros_like(plane)
    shape = views[0].shape
    _add_patches_(result, total.view(shape))
    _add_patches_(weights, shares.view(rows, columns, 1, 1).expand(shape))
    return result / weights


def _split_evenly(n: int, length: int) -> list[tuple[int, int]]:
    """Return the bounds of parts of n places, of at most a length and nearly equal."""
    count = -(-n // length)
    return [(n * i // count, n * (i + 1) // count) for i in range(count)]
