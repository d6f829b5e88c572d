"""The trials of whole images: training, bits, codes, samples and outliers.

Every function takes the settings of a trial and the folder of results, in which ``models`` has the
models that were trained before. Seconds are processor seconds of one thread.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Outcome, Settings
from images_data import Images, load_photographs, load_set
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import norm
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

import factormix
from factormix import MFA, ConvMFA
from factormix.core.conditional_mixture import ConditionalMixture, _condition
from factormix.data.pictures import Pictures, as_pictures
from factormix.training.callbacks import Progress
from factormix.training.scans import (
    Positions,
    Rows,
    Stage,
    begin_stage,
    blank_plane,
    plan_level,
)

Array = NDArray[np.float64]
SIZES = (
    *("n_kinds", "n_scales", "n_features", "n_neighbours", "depth", "thumbnails"),
    *("n_steps", "batch_size"),
)
FORMATS: dict[str, dict[str, Any]] = {
    "PNG": {"optimize": True},
    "WebP": {"lossless": True, "quality": 100, "method": 6, "exact": True},
    "JXL": {"lossless": True, "effort": 9},
}
"""Image formats and the options of Pillow that give their shortest lossless files."""
CODED_ROWS = 64
"""Positions whose tables of 256 probabilities are made at a time: about ten megabytes."""
NEAREST = 3
"""Neighbours of a radius of precision and recall (Kynkäänniemi et al., 2019)."""
THUMBNAILS = "ConvMFA, depth 2, MFA of thumbnails"
"""The method whose thumbnails, a quarter of the size, are of an MFA."""
COORDINATES, JUDGE_ROWS = 32, 5000
"""Principal components in which samples are judged, and the training images they are of."""
SIGNIFICANT = 0.05
"""Level of the test of each bin (Richardson and Weiss, 2018)."""
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles that describe the shape of a surprise map."""


def load_model(folder: str | None, name: str) -> Any:
    """Load a model that was trained before."""
    return factormix.load(Path(str(folder)) / "models" / f"{name}.safetensors")


def run_training(settings: Settings, folder: str | None) -> Outcome:
    """Train a ConvMFA; keep the model and its curve of bits against processor seconds."""
    images: Any
    if settings["images"].startswith("bsds300"):
        images = load_photographs(settings["images"], quick=settings["quick"])
    else:
        images = load_set(settings["images"], "train", quick=settings["quick"])
    started, curve = time.process_time(), list[tuple[int, float, float]]()

    def note(progress: Progress) -> None:
        if progress.recorded:
            spent, record = time.process_time() - started, progress.record
            curve.append((int(record["step"]), spent, record["bits_per_dim"]))

    sizes = {name: settings[name] for name in SIZES if name in settings}
    model = ConvMFA(**sizes, random_state=0, callbacks=[note]).fit(images)
    seconds = time.process_time() - started
    return Outcome({"seconds": seconds, "curve": curve, "n_images": len(images)}, model=model)


def run_bits(settings: Settings, folder: str | None) -> Outcome:
    """Count the bits per dimension of test images, and of the same images as PNG files."""
    model, test = load_model(folder, settings["model"]), load_judged(settings)
    started = time.process_time()
    bits = model.bits_per_dim(test)
    seconds = time.process_time() - started
    values = {"bits": bits, "seconds": seconds, "n_images": len(test)}
    if isinstance(test, np.ndarray):
        values["png"] = 8 * sum(count_bytes(image, "PNG") for image in test) / test.size
    return Outcome(values)


def load_judged(settings: Settings) -> Any:
    """Load the test images of a trial: a set, or every n-th photograph."""
    if settings["images"].startswith("bsds300"):
        return load_photographs("bsds300/test", settings["every"], quick=settings["quick"])
    return load_set(settings["images"], "test", quick=settings["quick"])[: settings["n_images"]]


def count_bytes(image: Images, name: str) -> int:
    """Return the length of an image as a file of a format; its options are in ``FORMATS``."""
    if name == "JXL":
        import pillow_jxl  # noqa: F401 (adds the format to Pillow)
    file = io.BytesIO()
    Image.fromarray(image).save(file, name, **FORMATS[name])
    return len(file.getvalue())


def run_mfa_bits(settings: Settings, folder: str | None) -> Outcome:
    """Bound the bits per dimension of an MFA of the same images as rows.

    Whole numbers plus uniform noise have a density. The mean of its negative logarithm is at least
    the bits of the probabilities that it gives to bins, as in the figures of NICE and RealNVP.
    """
    started = time.process_time()
    model = fit_mfa(load_set(settings["images"], "train", quick=settings["quick"]), settings)
    trained = time.process_time() - started
    test = load_judged(settings)
    nats = model.score(add_noise(test, 1))
    bits = 8 - nats / (math.log(2) * test[0].size)
    return Outcome({"bits": bits, "seconds": trained, "n_images": len(test)}, model=model)


def fit_mfa(images: Images, settings: Settings) -> MFA:
    """Train an MFA on images as rows between 0 and 1."""
    model = MFA(
        settings["n_components"],
        settings["n_factors"],
        max_epochs=settings["max_epochs"],
        random_state=0,
    )
    return model.fit(add_noise(images, 0))


def add_noise(images: Images, seed: int) -> NDArray[np.float32]:
    """Return images as rows of real numbers in [0, 1): the levels plus uniform noise."""
    rows = images.reshape(len(images), -1).astype(np.float32)
    return (rows + np.random.default_rng(seed).random(rows.shape, np.float32)) / 256


# Coding


def run_coding(settings: Settings, folder: str | None) -> Outcome:
    """Code test images by a range coder, decode them, and compare lengths with image formats."""
    model, images = load_model(folder, settings["model"]), load_judged(settings)
    started = time.process_time()
    words = encode(model, images)
    encoded = time.process_time() - started
    decoded = decode(model, words, images.shape[1:3])
    seconds = time.process_time() - started
    stated = -model.score_samples(images).sum() / math.log(2)
    mosaic = np.concatenate([np.concatenate(list(row), 1) for row in _fold(images)])
    formats = dict[str, dict[str, float]]()
    for name in FORMATS:
        try:
            files = sum(count_bytes(image, name) for image in images)
            formats[name] = {"files": 8 * files, "mosaic": 8 * count_bytes(mosaic, name)}
        except (ImportError, KeyError, OSError):
            continue
    return Outcome(
        {
            "identical": bool(np.array_equal(images, decoded)),
            "stated": stated,
            "coded": 32.0 * sum(len(one) for one in words),
            "formats": formats,
            "dims": images.size,
            "n_images": len(images),
            "encoding_seconds": encoded,
            "decoding_seconds": seconds - encoded,
        }
    )


def _fold(images: Images) -> Images:
    """Return images in rows of ten, without a last row that is not full."""
    wide = min(10, len(images))
    return images[: len(images) // wide * wide].reshape(-1, wide, *images.shape[1:])


def encode(model: ConvMFA, images: Images) -> list[NDArray[np.uint32]]:
    """Return the words of each image (n, h, w[, c]), coded by a model of depth 0."""
    from constriction import stream

    family = stream.model.Categorical(perfect=False)
    coders = [stream.queue.RangeEncoder() for _ in images]
    plane = as_pictures(images)

    def code(where: Positions, channel: int, masses: NDArray[np.float32]) -> NDArray[np.int32]:
        pixel = plane.starts[where[0]] + where[1] * plane.widths[where[0]] + where[2]
        symbols = plane.values[pixel, channel].astype(np.int32)
        for i, part in _group_images(where[0]):
            coders[i].encode(symbols[part], family, masses[part])
        return symbols

    _walk(model, len(images), images.shape[1:3], code)
    return [coder.get_compressed() for coder in coders]


def decode(model: ConvMFA, words: Sequence[NDArray[np.uint32]], size: tuple[int, ...]) -> Images:
    """Return the images of a size whose words ``encode`` has made."""
    from constriction import stream

    family = stream.model.Categorical(perfect=False)
    coders = [stream.queue.RangeDecoder(one) for one in words]

    def code(where: Positions, channel: int, masses: NDArray[np.float32]) -> NDArray[np.int32]:
        symbols = np.empty(len(masses), np.int32)
        for i, part in _group_images(where[0]):
            symbols[part] = coders[i].decode(family, masses[part])
        return symbols

    plane = _walk(model, len(words), size, code)
    images = plane.values.astype(np.uint8).reshape(len(words), *size, -1)
    return images[..., 0] if images.shape[-1] == 1 else images


def _group_images(image: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Yield each image of sorted positions with the slice of its positions."""
    starts = np.flatnonzero(np.diff(image, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(image)], strict=True):
        yield int(image[start]), slice(int(start), int(stop))


def _walk(
    model: ConvMFA,
    n: int,
    size: tuple[int, ...],
    code: Callable[[Positions, int, NDArray[np.float32]], NDArray[np.int32]],
) -> Pictures:
    """Fill images in the order of a scan, with the numbers that ``code`` returns.

    ``code`` is given positions, a channel and the probabilities (B, 256) of all levels. Encoder and
    decoder walk the same way, so that they see the same probabilities to the last bit.
    """
    [[stage]] = model._run.stages
    plane = blank_plane(n, (size[0], size[1]), len(stage.mixtures), 256)
    step, rows = stage.shape.reach + 1, np.arange(size[0])
    with torch.inference_mode():
        for front in range(size[1] + step * (size[0] - 1)):
            y = rows[(front - step * rows >= 0) & (front - step * rows < size[1])]
            image, row = np.repeat(np.arange(n), len(y)), np.tile(y, n)
            where = image, row, front - step * row
            contexts = stage.read([plane], where, targets=False)
            for j, mixture in enumerate(stage.mixtures):
                x = contexts.x[:, : stage.neighbourhood.width + j]
                parts = [list_masses(mixture, part) for part in x.split(CODED_ROWS)]
                symbols = code(where, j, torch.cat(parts).numpy())
                contexts.y[:, j] = torch.from_numpy(symbols).to(contexts.y)
                stage.append_error_(contexts, j)
            pixel = plane.starts[image] + row * plane.widths[image] + where[2]
            plane.values[pixel] = contexts.y.numpy().astype(plane.values.dtype)
    return plane


def list_masses(mixture: ConditionalMixture, x: Tensor) -> Tensor:
    """Return the probabilities (B, 256) of all levels given contexts (B, d)."""
    found = _condition(mixture, x)
    means = found.means[:, :, None].expand(found.log_shares.shape).flatten(1)
    edges = torch.arange(255).to(x) + 0.5
    z = (edges[:, None] - means[:, None]) / found.widths.flatten()
    below = torch.bmm(z.sigmoid_(), found.log_shares.flatten(1).exp()[:, :, None])[:, :, 0]
    zero, one = below.new_zeros(len(x), 1), below.new_ones(len(x), 1)
    return torch.diff(torch.cat([zero, below, one], dim=1)).clamp(min=0)


# The mixture of conditional Gaussian scale mixtures (Theis, Hosseini and Bethge, 2012)


def run_mcgsm(settings: Settings, folder: str | None) -> Outcome:
    """Train an MCGSM on photographs, from the same contexts, steps and rates as a ConvMFA."""
    started = time.process_time()
    train = as_pictures(load_photographs("bsds300/train", quick=settings["quick"]))
    [shape] = plan_level(settings["n_neighbours"], coarsest=True)
    # Only the whitened neighbours and the linear prediction of this stage are used.
    stage = begin_stage(
        shape, [train], n_kinds=1, n_scales=1, n_features=1, seed=0, device=torch.device("cpu")
    )
    parameters = draw_mcgsm(stage, settings)
    rate, steps = settings["learning_rate"], settings["n_steps"]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    random = np.random.default_rng(0)
    for step in range(steps):
        # The rate falls to a hundredth over the second half, as for a ConvMFA.
        optimizer.param_groups[0]["lr"] = rate * 0.01 ** max(0.0, 2 * step / steps - 1)
        pixels = random.integers(0, int(train.starts[-1]), settings["batch_size"])
        optimizer.zero_grad()
        loss = -score_mcgsm(parameters, stage, stage.read([train], train.locate(pixels))).mean()
        loss.backward()
        optimizer.step()
    trained = time.process_time() - started
    test = as_pictures(load_judged(settings))
    nats, total = 0.0, int(test.starts[-1])
    with torch.inference_mode():
        for start in range(0, total, 8192):
            pixels = np.arange(start, min(start + 8192, total))
            rows = stage.read([test], test.locate(pixels))
            nats -= float(score_mcgsm(parameters, stage, rows).double().sum())
    bits = nats / (math.log(2) * total)
    return Outcome({"bits": bits, "seconds": trained, "n_images": len(test)})


def draw_mcgsm(stage: Stage, settings: Settings) -> list[Tensor]:
    """Draw the random values that training starts from."""
    K, S, M = settings["n_kinds"], settings["n_scales"], settings["n_features"]
    d, random = stage.neighbourhood.width, torch.Generator().manual_seed(0)
    normal = [
        torch.randn(shape, generator=random) * deviation
        for shape, deviation in (
            ((K, S), 0.1),  # eta, the logits
            ((d, M), 1 / math.sqrt(d)),  # b, the features
            ((M, K), 0.5 / math.sqrt(M)),  # beta, their weights
            ((d, K), 0.25 / math.sqrt(d)),  # a, the predictions
            ((K,), 0.1),  # their offsets
            ((K, S), 0.1),  # alpha, the logarithms of precisions
        )
    ]
    # Squares of the widths span three orders, as those of a ConvMFA do.
    normal[5] += torch.linspace(-1, 5, S)
    return [tensor.requires_grad_() for tensor in normal]


def score_mcgsm(parameters: Sequence[Tensor], stage: Stage, rows: Rows) -> Tensor:
    """Return the log-masses (B,) of levels: normal bins, of which the outer ones are open."""
    eta, b, beta, a, offsets, alpha = parameters
    mixture = stage.mixtures[0]
    x, y = rows.x[:, : stage.neighbourhood.width], rows.y[:, 0]
    energies = (x @ b).square() @ beta.square()
    gates = eta - 0.5 * alpha.exp() * energies[:, :, None]
    means = (x @ mixture.regression + mixture.intercept)[:, None]
    means = means + mixture.error * (x @ a + offsets)
    widths = (mixture.error * torch.exp(-0.5 * alpha)).clamp(min=mixture.least_width)
    z = ((y[:, None] - means)[:, :, None] / widths).flatten(1)
    h = (0.5 / widths).flatten()
    near, far = torch.special.log_ndtr(h - z.abs()), torch.special.log_ndtr(-h - z.abs())
    inside = near + torch.log1p(-torch.exp(far - near).clamp(max=1 - 1e-6))
    lowest, highest = (y <= rows.low[:, 0])[:, None], (y >= rows.high[:, 0])[:, None]
    outer = torch.special.log_ndtr(torch.where(lowest, z, -z) + h)
    masses = torch.where(lowest | highest, outer, inside)
    return torch.logsumexp(torch.log_softmax(gates.flatten(1), 1) + masses, dim=1)


# Samples


def run_samples(settings: Settings, folder: str | None) -> Outcome:
    """Draw samples by one method, and judge them beside test images that no method has seen."""
    name, quick = settings["images"], settings["quick"]
    train, test = (load_set(name, split, quick=quick) for split in ("train", "test"))
    test, started = test[: settings["n_samples"]], time.process_time()
    drawn = draw_images(settings, folder, train, len(test))
    seconds = time.process_time() - started
    values = {**judge_samples(drawn, train, test, settings["n_bins"]), "seconds": seconds}
    return Outcome({**values, "n_samples": len(test)}, {"images": drawn[:64]})


def draw_images(settings: Settings, folder: str | None, train: Images, n: int) -> Images:
    """Draw n images by a model, by an MFA, by one Gaussian, or from the training images."""
    method, shape = settings["method"], train.shape[1:]
    if method == "training images":
        chosen = np.random.default_rng(0).choice(len(train), n, replace=len(train) < n)
        return train[chosen]
    if method == "Gaussian":
        return _to_levels(draw_gaussian(train, n), shape)
    if method == "MFA":
        given = "model" in settings
        mfa = load_model(folder, settings["model"]) if given else fit_mfa(train, settings)
        return _to_levels(256 * np.asarray(mfa.sample(n, random_state=0)[0]), shape)
    model = load_model(folder, settings["model"])
    drawn: Images = model.sample(n, size=shape[:2])
    return drawn


def draw_gaussian(images: Images, n: int) -> NDArray[np.float32]:
    """Draw rows (n, d) from the normal distribution with the mean and covariance of images."""
    rows = images[:10_000].reshape(min(len(images), 10_000), -1).astype(np.float32)
    mean = rows.mean(axis=0)
    weights = np.random.default_rng(0).standard_normal((n, len(rows)), np.float32)
    return mean + weights @ (rows - mean) / np.float32(math.sqrt(len(rows)))


def _to_levels(rows: NDArray[Any], shape: tuple[int, ...]) -> Images:
    """Round rows down to levels of images."""
    return np.floor(rows).clip(0, 255).astype(np.uint8).reshape(-1, *shape)


def judge_samples(drawn: Images, train: Images, test: Images, n_bins: int) -> dict[str, float]:
    """Return NDB, precision and recall of samples, against test images, in a PCA of training."""
    parts = train[:JUDGE_ROWS], drawn, test
    rows = [images.reshape(len(images), -1).astype(np.float32) for images in parts]
    pca = PCA(min(COORDINATES, len(rows[0])), svd_solver="randomized", random_state=0)
    pca.fit(rows[0])
    a, b, c = (pca.transform(part) for part in rows)
    return {
        "ndb": count_different_bins(a, b, c, n_bins),
        "precision": share_within(b, c),
        "recall": share_within(c, b),
    }


def count_different_bins(train: Array, drawn: Array, test: Array, n_bins: int) -> float:
    """Return the share of bins of k-means whose frequencies differ significantly."""
    bins = KMeans(n_bins, n_init=1, random_state=0).fit(train)
    first, second = (np.bincount(bins.predict(x), minlength=n_bins) for x in (drawn, test))
    n, m = len(drawn), len(test)
    pooled = (first + second) / (n + m)
    error = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    z = np.abs(first / n - second / m) / np.where(error > 0, error, 1)
    return float((2 * norm.sf(z) < SIGNIFICANT).mean())


def share_within(points: Array, others: Array) -> float:
    """Return the share of points that are as near to one of the others as its neighbours are."""
    nearest = NearestNeighbors(n_neighbors=min(NEAREST + 1, len(others))).fit(others)
    radii = nearest.kneighbors(others)[0][:, -1]
    inside = 0
    for block in np.array_split(points, max(1, len(points) // 500)):
        squares = (block**2).sum(1)[:, None] + (others**2).sum(1) - 2 * block @ others.T
        inside += int((squares <= radii**2).any(axis=1).sum())
    return inside / len(points)


# Outliers


def run_outliers(settings: Settings, folder: str | None) -> Outcome:
    """Return the AUC of each score for test images against images of another set."""
    model, quick = load_model(folder, settings["model"]), settings["quick"]
    n = settings["n_images"]
    known = load_set(settings["images"], "test", quick=quick)[:n]
    other = load_set(settings["outliers"], settings["outliers_split"], quick=quick)[:n]
    train = load_set(settings["images"], "train", quick=quick)[: settings["n_train"]]
    started = time.process_time()
    maps = [np.asarray(model.surprise(images)) for images in (train, known, other)]
    seconds = time.process_time() - started
    lengths = [
        np.array([8 * math.log(2) * count_bytes(image, "PNG") for image in images])
        for images in (train, known, other)
    ]
    scores = [score_maps(*each, maps[0]) for each in zip(maps[1:], lengths[1:], strict=True)]
    labels = np.repeat([0, 1], [len(known), len(other)])
    areas = {
        name: float(roc_auc_score(labels, np.concatenate([one[name] for one in scores])))
        for name in scores[0]
    }
    bits = [float(one.mean()) / math.log(2) / _count_channels(train) for one in maps[1:]]
    values = {"auc": areas, "bits": bits, "seconds": seconds, "n_images": n}
    return Outcome({**values, "n_outliers": len(other)})


def _count_channels(images: Images) -> int:
    return images.shape[3] if images.ndim == 4 else 1


def score_maps(maps: Array, lengths: Array, train: Array) -> dict[str, Array]:
    """Return scores of images by their surprise maps (n, h, w), greater for stranger ones."""
    nats, usual = maps.sum(axis=(1, 2)), train.sum(axis=(1, 2)).mean()
    shapes, usual_shapes = (
        np.quantile(part.reshape(len(part), -1), SHARES, axis=1).T for part in (maps, train)
    )
    inverse = np.linalg.pinv(np.cov(usual_shapes, rowvar=False))
    away = shapes - usual_shapes.mean(axis=0)
    n, h, w = maps.shape
    blocks = maps[:, : h // 4 * 4, : w // 4 * 4].reshape(n, h // 4, 4, w // 4, 4).mean(axis=(2, 4))
    return {
        "likelihood": nats,
        "likelihood, both tails": np.abs(nats - usual),
        "likelihood relative to PNG": nats - lengths,
        "map: most surprising block": blocks.max(axis=(1, 2)),
        "map: shape": np.einsum("ni,ij,nj->n", away, inverse, away),
    }
