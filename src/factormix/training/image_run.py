"""Train the stages of an image model on the conditional likelihood, from random values.

Each step draws positions of each stage at random from all images, and takes one step of Adam
(Kingma and Ba, 2015) on the mean log-likelihood of all its channels. Positions depend on the seed
and the number of the step alone, so that a resumed run is the same run. Of several ranks, each has
all images and reads its share of the positions; their gradients are added.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from factormix.core.conditional_mixture import ConditionalMixture
from factormix.core.neighbourhoods import Neighbourhood
from factormix.data.pictures import Pictures
from factormix.errors import InputError
from factormix.training.distributed.communicator import SINGLE, Communicator, Notice
from factormix.training.loop import REPORT_SECONDS, defer_interrupts
from factormix.training.run import MAX_RECORDS, Record, steps_per_record
from factormix.training.scans import Stage, begin_stage, plan_level, split_levels
from factormix.training.threads import Threads, use_threads
from factormix.training.thumbnails import Thumbnails

FIRST_DECAY, SECOND_DECAY, TINY = 0.9, 0.999, 1e-8
"""Adam's own values."""
LAST_RATE = 0.01
"""The rate falls to this share of itself over the second half of a run, geometrically: chosen, not
measured."""
N_LEARNED = len(ConditionalMixture._fields) - 4

Report = Callable[[Record, bool], object]
"""Called with a record and whether it is the last one; ends the run by returning True."""


@dataclass
class ImageRun:
    """Where a run stands: all that is needed to go on from here."""

    stages: list[list[Stage]]
    """The stages of each level, the thumbnail first; none there if a mixture has it whole."""
    n_neighbours: int
    batch_size: int
    rate: float
    seed: int
    planned_steps: int = 0
    """0 for ``partial_fit``, which keeps its rate."""
    steps: int = 0
    seconds: float = 0.0
    fingerprint: str = ""
    history: list[Record] = field(default_factory=list)
    record_every: int = 10
    recent: float = 0.0
    """Sum of the bits per dimension of the steps since the last record."""
    recent_steps: int = 0
    first: list[Tensor] = field(default_factory=list)
    """Averages of gradients, for each stage."""
    second: list[Tensor] = field(default_factory=list)
    """Averages of squared gradients."""
    communicator: Communicator = SINGLE
    """The ranks that train together."""
    thumbnails: Thumbnails | None = None
    """The mixture of whole thumbnails."""

    @property
    def problem(self) -> Any:
        """What callbacks ask of any run: its ranks."""
        return SimpleNamespace(communicator=self.communicator)

    @property
    def depth(self) -> int:
        """Levels above the thumbnail."""
        return len(self.stages) - 1

    @property
    def levels(self) -> int | None:
        """256 for 8-bit images, None for real numbers."""
        return self.stages[-1][0].levels

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return self.stages[-1][0].mixtures[0].weights.device

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.steps >= self.planned_steps > 0

    def current_rate(self) -> float:
        """Return the rate of the next step."""
        done = self.steps / self.planned_steps if self.planned_steps else 0.0
        return float(self.rate * LAST_RATE ** max(0.0, 2 * done - 1))


def begin_run(
    levels: Sequence[Sequence[Pictures]],
    *,
    n_neighbours: int,
    batch_size: int,
    rate: float,
    planned_steps: int,
    seed: int,
    device: torch.device,
    communicator: Communicator = SINGLE,
    thumbnails: Thumbnails | None = None,
    **sizes: int,
) -> ImageRun:
    """Start a run on the planes of each level, with the first rank's numbers on all."""
    stages = list[list[Stage]]()
    for i, planes in enumerate(levels):
        whole = i == 0 and thumbnails is not None
        shapes = [] if whole else plan_level(n_neighbours, coarsest=i == 0)
        stages.append(
            [
                begin_stage(shape, planes, **sizes, seed=seed + 10 * i + j, device=device)
                for j, shape in enumerate(shapes)
            ]
        )
    for stage in chain.from_iterable(stages):
        around, c = stage.neighbourhood, len(stage.mixtures)
        every = [around.mean, around.covariance, around.rotation, *chain(*stage.mixtures)]
        mean, covariance, rotation, *rest = communicator.broadcast_tensors(every)
        stage.neighbourhood = Neighbourhood(mean, covariance, rotation, around.sides)
        width = len(rest) // c
        stage.mixtures = [ConditionalMixture(*rest[j * width : (j + 1) * width]) for j in range(c)]
    run = ImageRun(stages, n_neighbours, batch_size, rate, seed, planned_steps)
    run.communicator, run.thumbnails = communicator, thumbnails
    run.record_every = steps_per_record(planned_steps)
    for stage in chain.from_iterable(stages):
        run.first.append(torch.zeros_like(flatten(stage)))
        run.second.append(torch.zeros_like(run.first[-1]))
    return run


def train_images(
    run: ImageRun,
    pictures: Pictures,
    n_steps: int,
    report: Report = lambda record, last: None,
) -> None:
    """Take steps; an interrupt waits for the end of the step under way."""
    levels = split_levels(pictures, run.depth)
    started, reported, stop = time.monotonic() - run.seconds, time.monotonic(), False
    with defer_interrupts() as interrupt, use_threads() as threads:
        for _ in range(n_steps):
            late = time.monotonic() - reported >= REPORT_SECONDS
            notice = Notice(run.batch_size, 1.0, 0.0, interrupt.number, late)
            if not run.communicator.is_single:
                run.communicator.announce(notice)
            bits = _take_step(run, levels, int(pictures.starts[-1]), threads)
            # The ranks report and end together: by the first one's clock, and a signal to any.
            notice = run.communicator.receive_notice(notice)
            run.steps += 1
            run.recent, run.recent_steps = run.recent + bits, run.recent_steps + 1
            run.seconds = time.monotonic() - started
            if not math.isfinite(bits):
                raise InputError(
                    f"step {run.steps} of the training gave numbers that are not finite: use a"
                    " lower learning_rate."
                )
            due = run.steps % run.record_every == 0
            if due or notice.report:
                stop = report(_record(run, keep=due), False) is True
                reported = time.monotonic()
            if run.communicator.is_single:
                notice = notice._replace(signal=interrupt.number)
            interrupt.number = notice.signal
            if stop or interrupt.number:
                break
        # An interrupt adds nothing, so resuming gives the history of an uninterrupted run.
        keep = stop or run.finished
        report(_record(run, keep=keep) if run.recent_steps else run.history[-1], True)
    interrupt.answer()


def _record(run: ImageRun, *, keep: bool) -> Record:
    entry: Record = {
        "step": run.steps,
        "seconds": round(run.seconds, 3),
        "bits_per_dim": run.recent / max(run.recent_steps, 1),
        "rate": run.current_rate(),
    }
    if keep:
        run.history.append(entry)
        run.recent, run.recent_steps = 0.0, 0
        if len(run.history) > MAX_RECORDS:
            run.history[:] = run.history[1::2]
            run.record_every *= 2
    return entry


def _take_step(
    run: ImageRun, levels: Sequence[Sequence[Pictures]], n_pixels: int, threads: Threads
) -> float:
    """Take one step of every stage and return the bits per dimension before it."""
    bits, rate, number = 0.0, run.current_rate(), 0
    if run.thumbnails is not None:
        bits = run.thumbnails.nats / math.log(2) * len(levels[0][0].values) / n_pixels
    for stages, planes in zip(run.stages, levels, strict=True):
        for stage in stages:
            plane = planes[stage.shape.target]
            total = int(plane.starts[-1])
            if total:
                random = np.random.default_rng([run.seed, run.steps, number])
                pixels = random.integers(0, total, run.batch_size)
                shard = pixels[run.communicator.data.rank :: run.communicator.data.size]
                gradient, nats = _differentiate(stage, planes, shard, threads)
                if not run.communicator.is_single:
                    share = torch.cat([gradient, gradient.new_tensor([nats])])
                    share = run.communicator.sum_stepped(share * (len(shard) / len(pixels)))
                    gradient, nats = share[:-1], float(share[-1])
                _step_adam_(run, stage, number, gradient, rate)
                bits += nats / math.log(2) * total / n_pixels
            number += 1
    return bits


def _differentiate(
    stage: Stage, planes: Sequence[Pictures], pixels: Any, threads: Threads
) -> tuple[Tensor, float]:
    """Return the gradient of the mean log-likelihood by what is learned, and nats per number."""
    flat = flatten(stage)
    plane, c = planes[stage.shape.target], len(stage.mixtures)
    K, S = stage.mixtures[0].weights.shape
    M = stage.mixtures[0].features.shape[1]
    # Products with slopes and features, forwards and backwards.
    width = stage.neighbourhood.width * (2 * K + M) + M * K * S
    parts = threads.cut_rows(len(pixels), 3 * c * width * len(pixels))

    def compute(part: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            rows = stage.read(planes, plane.locate(pixels[part]))
            leaf = flat.detach().requires_grad_()
            total = stage.score(rows, unflatten(stage, leaf)).sum() / len(pixels)
            return torch.autograd.grad(total, leaf)[0], total.detach()

    found = threads.map(compute, parts)
    gradient = sum((one for one, _ in found[1:]), start=found[0][0])
    return gradient, -sum(float(total) for _, total in found) / c


def _step_adam_(run: ImageRun, stage: Stage, number: int, gradient: Tensor, rate: float) -> None:
    first, second, t = run.first[number], run.second[number], run.steps + 1
    first.lerp_(gradient, 1 - FIRST_DECAY)
    second.lerp_(gradient.square(), 1 - SECOND_DECAY)
    deviation = (second / (1 - SECOND_DECAY**t)).sqrt_().add_(TINY)
    flat = flatten(stage).addcdiv_(first, deviation, value=rate / (1 - FIRST_DECAY**t))
    stage.mixtures = unflatten(stage, flat)


def flatten(stage: Stage) -> Tensor:
    """Return a copy of all learned numbers of a stage as one vector."""
    return torch.cat([tensor.flatten() for one in stage.mixtures for tensor in one.learned])


def unflatten(stage: Stage, flat: Tensor) -> list[ConditionalMixture]:
    """Return the mixtures of a stage with other learned numbers, as views of a vector."""
    mixtures, start = list[ConditionalMixture](), 0
    for one in stage.mixtures:
        learned = list[Tensor]()
        for tensor in one.learned:
            learned.append(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        mixtures.append(ConditionalMixture(*learned, *one[N_LEARNED:]))
    return mixtures


def pack_image_run(run: ImageRun, *, training_state: bool) -> tuple[dict[str, Tensor], Any]:
    """Turn a run into named tensors and JSON-ready values."""
    tensors = dict[str, Tensor]()
    for number, stage in enumerate(chain.from_iterable(run.stages)):
        tensors |= {
            f"stages.{number}.{name}": getattr(stage.neighbourhood, name)
            for name in ("mean", "covariance", "rotation", "sides")
        }
        for j, mixture in enumerate(stage.mixtures):
            tensors |= {
                f"stages.{number}.channels.{j}.{name}": tensor.detach().contiguous().clone()
                for name, tensor in mixture._asdict().items()
            }
        if training_state:
            tensors[f"first.{number}"] = run.first[number]
            tensors[f"second.{number}"] = run.second[number]
    settings = {name: getattr(run, name) for name in PLAIN}
    settings |= {
        "depth": run.depth,
        "levels": run.levels,
        "n_channels": len(run.stages[-1][0].mixtures),
        "training_state": training_state,
    }
    return tensors, {"run": settings}


PLAIN = (
    *("n_neighbours", "batch_size", "rate", "seed", "planned_steps", "steps", "seconds"),
    *("fingerprint", "history", "record_every", "recent", "recent_steps"),
)
"""Fields of a run that are saved under their names."""


def unpack_image_run(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    device: torch.device,
    thumbnails: Thumbnails | None = None,
) -> ImageRun:
    """Rebuild the run that ``pack_image_run`` packed, given the mixture of its thumbnails."""
    stages, number = list[list[Stage]](), 0
    first, second = list[Tensor](), list[Tensor]()
    for i in range(settings["depth"] + 1):
        several = list[Stage]()
        whole = i == 0 and thumbnails is not None
        for shape in [] if whole else plan_level(settings["n_neighbours"], coarsest=i == 0):
            name = f"stages.{number}."
            neighbourhood = Neighbourhood(
                *(tensors[name + part] for part in ("mean", "covariance", "rotation", "sides"))
            )
            mixtures = [
                ConditionalMixture(
                    *(
                        tensors[f"{name}channels.{j}.{one}"].to(device)
                        for one in ConditionalMixture._fields
                    )
                )
                for j in range(settings["n_channels"])
            ]
            several.append(Stage(shape, neighbourhood, mixtures, settings["levels"]))
            if settings["training_state"]:
                first.append(tensors[f"first.{number}"].to(device))
                second.append(tensors[f"second.{number}"].to(device))
            number += 1
        stages.append(several)
    run = ImageRun(stages, **{name: settings[name] for name in PLAIN})
    run.first, run.second, run.thumbnails = first, second, thumbnails
    return run
