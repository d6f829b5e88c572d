"""The trials of ``many.py``: steps, quality, long streams and image patches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import current_memory, peak_memory
from harness import Outcome, Settings
from many_real import vary_images
from torch import Tensor

from factormix import MFA, datasets
from factormix.core.arrays import Workspace
from factormix.core.averages import Averages, StepOptions, natural_step, rotate_averages
from factormix.core.density import log_prob, operands, sample
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, from_generative
from factormix.core.screening import CandidateSearch, make_screen, update_screen_
from factormix.core.statistics import Tuning
from factormix.solvers import CovarianceGradient, NaturalGradient
from factormix.training.screens import Screening

RATE, FLOOR = 0.02, 1e-6
CLASSES = list(range(9))
COUNTS = 5500.0
"""Factor that turns a random mixture into one of counts, with noise of about 1,000."""
STREAM_PART = 10_000
"""Rows that a stream yields at a time."""
PATCH_WIDENING = 1.2
"""For patches, which come in all contrasts."""


def make_mixture(K: int, d: int, l: int, seed: int = 0, n_directions: int = 40) -> Averages:
    """Make a random mixture whose K means and loadings vary in ``n_directions`` directions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.linspace(3, 0.5, n_directions).unsqueeze(1)
    directions = normal(n_directions, d) / math.sqrt(d) * spread
    means = normal(K, n_directions) @ directions
    loadings = normal(K, l, n_directions) @ directions * 0.3
    variances = 0.02 + 0.03 * torch.rand(K, d, generator=generator)
    weight = torch.softmax(0.5 * normal(K), dim=0)
    return Averages(torch.cat([means.unsqueeze(1), loadings], dim=1), variances, weight)


def draw_rows(parameters: Parameters, n: int, seed: int) -> Tensor:
    """Draw rows (n, d) of a mixture."""
    return sample(parameters, n, generator=torch.Generator().manual_seed(seed))[0]


def time_steps(settings: Settings, data: str | None) -> Outcome:
    """Time natural steps and scoring, by all pairs and as the solver takes them, in turn."""
    K, d, l, B = (settings[name] for name in ("K", "d", "l", "B"))
    bound = torch.full((d,), 1e3)
    with torch.inference_mode():
        running, parameters = rotate_averages(make_mixture(K, d, l), bound, FLOOR)
        x = draw_rows(parameters, B, 1)
        work, state = Workspace(), [running, parameters]
        count = Screening().choose_first("auto", parameters.shape) or K
        few = None if count == K else CandidateSearch(make_screen(parameters), count)

        def dense_step() -> None:
            found = expected_statistics(state[1], x, work=work, tuning=Tuning(pair_cost=math.inf))
            state[:] = natural_step(*state, found, StepOptions(RATE, bound, FLOOR))

        def step() -> None:
            found = expected_statistics(state[1], x, search=few, work=work)
            state[:] = natural_step(*state, found, StepOptions(RATE, bound, FLOOR, n_rows=B / RATE))
            if few is not None:
                update_screen_(few.screen, state[1], found.sums.touched)

        def dense_score() -> Tensor:
            ops = operands(state[1], centre=False, diagonal=True)
            return torch.cat([log_prob(part, ops, work) for part in torch.split(x, 500)])

        def score() -> Tensor:
            return dense_score() if few is None else few.find_best(x, state[1], work).log_prob

        seconds = _medians(
            {"dense_step": dense_step, "step": step, "dense_score": dense_score, "score": score},
            settings["repeats"],
        )
        if few is not None:
            update_screen_(few.screen, state[1])
        lost = float((dense_score() - score()).mean())
    return Outcome({**seconds, "candidates": count, "lost": lost})


def _medians(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run the jobs in turn and return the median processor seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def train_images(settings: Settings, data: str | None) -> Outcome:
    """Train on images of classes 0-8, by all components or by few; score test images exactly."""
    train = datasets.load(settings["data"], classes=CLASSES, folder=data)
    test = datasets.load(settings["data"], classes=CLASSES, split="test", folder=data)
    return _train(settings, train.data, test.data)


def train_patches(settings: Settings, data: str | None) -> Outcome:
    """Train on image patches and score validation and test patches exactly."""
    folder = Path(settings["folder"])
    train = np.load(folder / "train.npy", mmap_mode="r")[: settings.get("rows")]
    val, test = (np.load(folder / f"{name}.npy") for name in ("val", "test"))
    outcome = _train(settings, train, val, PATCH_WIDENING)
    model = outcome.model
    assert model is not None
    scores = np.asarray(model.score_samples(test, exact=True))
    error = float(scores.std() / math.sqrt(len(scores)))
    values = {"test": float(scores.mean()), "error": error, "patches": len(train)}
    return Outcome({**outcome.values, **values}, model=model)


def _train(settings: Settings, train: Any, held_out: Any, widening: float = 1.0) -> Outcome:
    options = {"widening": widening, "first_components": settings.get("first")}
    scales = settings.get("scales", 1)
    model = MFA(
        settings["K"],
        settings["l"],
        max_epochs=settings["passes"],
        max_precision=settings.get("max_precision"),
        batch_size=settings.get("batch_size"),
        candidates=settings["candidates"],
        solver=CovarianceGradient(scales=scales, **options)
        if scales > 1
        else NaturalGradient(**options),
        random_state=settings["seed"],
    )
    start, cpu = time.perf_counter(), time.process_time()
    model.fit(train)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    last = model.history_[-1]
    values = {
        "held_out": float(np.mean(model.score_samples(held_out, exact=True))),
        "seconds": seconds,
        "processor_seconds": cpu,
        "in_use": last["components_in_use"],
        "final_candidates": last.get("candidates", settings["K"]),
        "screening_loss": last.get("screening_loss", 0.0),
    }
    return Outcome(values, model=model)


def follow_stream(settings: Settings, data: str | None) -> Outcome:
    """Learn a random mixture from a stream of its rows; compare with the truth on new rows.

    Rows are 16-bit integers, like the output of sensors' converters.
    """
    d, n = settings["d"], settings["rows"]
    made = make_mixture(settings["true_K"], d, settings["l"], 7, settings["directions"])
    made = Averages(COUNTS * made.Theta, COUNTS**2 * made.V, made.weight)
    truth = from_generative(made.weight.log(), made.Theta[:, 0], made.Theta[:, 1:].mT, made.V)

    def rows(n: int, seed: int) -> np.ndarray:
        return _counts(draw_rows(truth, n, seed)).numpy()

    new = rows(2000, 10**9)
    values = _learn_stream(settings, lambda i: rows(min(STREAM_PART, n - i), i + 1), new)
    x, ops = torch.from_numpy(new).float(), operands(truth, centre=False)
    true = torch.cat([log_prob(part, ops) for part in torch.split(x, 200)])
    gaussian = _fit_gaussian(made).log_prob(x.double())
    return Outcome(values | {"true": float(true.mean()), "gaussian": float(gaussian.mean())})


def follow_images(settings: Settings, data: str | None) -> Outcome:
    """Learn from a stream of images that are shifted and slanted at random, no two alike."""
    train, test = (
        torch.from_numpy(datasets.load(settings["data"], split=split, folder=data).data)
        for split in ("train", "test")
    )
    n = settings["rows"]

    def part(first: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(first + 1)
        size = min(STREAM_PART, n - first)
        which = torch.randint(len(train), (size,), generator=generator)
        return vary_images(train[which], generator).numpy()

    new = vary_images(test[:2000], torch.Generator().manual_seed(0)).numpy()
    return Outcome(_learn_stream(settings, part, new, max_precision=400.0))


def _learn_stream(
    settings: Settings,
    part: Callable[[int], np.ndarray],
    new: np.ndarray,
    max_precision: float | None = None,
) -> dict[str, float]:
    """Learn from the parts of a stream that start at rows 0, 10,000 and so on; score new rows."""
    K, l, before = settings["K"], settings["l"], current_memory()
    stream = (part(first) for first in range(0, settings["rows"], STREAM_PART))
    model = MFA(K, l, batch_size=settings["B"], max_precision=max_precision, random_state=0)
    start = time.perf_counter()
    model.partial_fit(stream)
    seconds, memory = time.perf_counter() - start, peak_memory() - before
    last = model.history_[-1]
    return {
        "seconds": seconds,
        "learned": float(np.mean(model.score_samples(new, exact=True))),
        "memory": memory,
        "parameters": 4 * K * new.shape[1] * (l + 2),
        "in_use": last["components_in_use"],
        "candidates": last.get("candidates", K),
        "screening_loss": last.get("screening_loss", 0.0),
    }


def _fit_gaussian(made: Averages) -> torch.distributions.MultivariateNormal:
    """Return the Gaussian with the mean and the covariance of a mixture."""
    Theta, V, weight = (t.double() for t in made)
    mean = weight @ Theta[:, 0]
    Theta[:, 0] -= mean
    rows = (Theta * weight.sqrt().view(-1, 1, 1)).flatten(0, 1)
    return torch.distributions.MultivariateNormal(mean, rows.mT @ rows + torch.diag(weight @ V))


def _counts(x: Tensor) -> Tensor:
    """Round rows to 16-bit integers."""
    return x.round_().clamp_(-32_768, 32_767).to(torch.int16)
