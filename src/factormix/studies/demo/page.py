"""The report of the demo."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from factormix.estimators import MFA
from factormix.studies.demo.digits import Digits
from factormix.studies.demo.fits import Fitted, Outliers, Plan, winner
from factormix.views import plotting
from factormix.views.report import Report

__all__ = ["demo_report"]

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
