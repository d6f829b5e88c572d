"""The report of a reproduction: verdicts, then each experiment with its tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import reproduction_figure1 as figure1
import reproduction_table1 as table1
from harness import Result, Store, Table
from pages import Page
from reproduction_plan import Scale
from reproduction_tables import (
    list_datasets,
    make_class_table,
    make_convergence_table,
    make_main_table,
    make_streaming_table,
    make_svhn_table,
    make_trial_table,
)
from reproduction_verdicts import RULES, judge_claims, write_summary

from factormix.estimators import MFA, load
from factormix.files import make_folder
from factormix.views import plotting
from factormix.views.plotting import save_figure
from factormix.views.plotting.drawing import COLOURS, MARK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONG = 12
"""Rows of the longest table that is shown unfolded: more would fill a screen."""


INTRODUCTIONS = {
    "figure1": (
        "figure1",
        "Figure 1: centroids, precisions, loading columns",
        "K = 25, l = 4, classes 0, 1 and 2, E ≤ 20, {length}. The paper's figure shows, for MNIST"
        " above FashionMNIST, the 5 x 5 centroids, the precisions coloured from 18 to 20, and the"
        " four loading columns coloured from -1 to 1; neighbouring centroids look alike, and the"
        " columns become weaker from first to last.",
    ),
    "figure2": (
        "figure1",
        "Figure 2: samples of single components",
        "Samples of the models of Figure 1. The paper chose components 0, 6, 15 (MNIST) and 1, 3,"
        " 13 (FashionMNIST) of its own models and found slants and strokes that differ. A"
        " component's number has no meaning across trainings: the same numbers show other shapes"
        " here. Its figure seems to be drawn without the noise term; both are shown.",
    ),
    "convergence": (
        "figure1",
        "Convergence from random starts",
        "The paper repeats Figure 1's training ten times and always observes convergence.",
    ),
    "table1": (
        "table1",
        "Table I: outlier detection",
        "K = 49, {length}, one class held out. The paper's table, class 9 held out: MNIST GMM 90.1,"
        " MFA 92.2; FashionMNIST GMM 83.7, MFA 85.3. It does not give standard deviations. Rows are"
        " variants that the paper leaves open; none was chosen by its result. Both scores come from"
        " the same trained model.",
    ),
    "svhn": (
        "svhn",
        "SVHN",
        "The abstract names SVHN; the text has no experiment on it. K = 25, l = 4, E ≤ 20, 32 x 32"
        " colour images, d = 3072, trained as in Table I.",
    ),
    "streaming": (
        "streaming",
        "Streaming: evaluate, then train",
        "Each batch of 100 is scored before it is learned. Half-way a new class appears and is then"
        " learned like the others. K = 25, l = 4, E ≤ 20. The stream for the paper's SGD passes"
        " five times over each half, so only its first pass over the new class is really new."
        " The stream for the natural gradient passes once. The paper gives no numbers.",
    ),
}
"""Of each part of the report: the experiment that trained its models, a title and a text."""


@dataclass
class ReproductionReport:
    """Build the report, and write its tables and pictures into a folder."""

    folder: Path
    store: Store
    found: Sequence[Result]
    """All finished trials."""
    scale: Scale
    wanted: Sequence[str]
    remarks: Sequence[str]
    """Notes on missing data and unfinished trials."""

    def build(self) -> Page:
        """Add all parts for which there are results."""
        self.report = Page(
            "The paper, reproduced",
            "Mixtures of factor analyzers by constrained SGD on precisions: every experiment again",
        )
        self._verdicts()
        parts = {
            "figure1": self._figure1,
            "figure2": self._figure2,
            "convergence": self._convergence,
            "table1": self._table1,
            "svhn": self._svhn,
            "streaming": self._streaming,
        }
        for name, add_results in parts.items():
            trained, title, text = INTRODUCTIONS[name]
            runs = self._of(trained)
            if name in self.wanted or runs:
                self.report.heading(title).text(text.format(length=self.scale.length))
            if runs:
                add_results(runs)
        return self.report

    def _of(self, experiment: str) -> list[Result]:
        return [one for one in self.found if one.trial.experiment == experiment]

    def _verdicts(self) -> None:
        self.report.heading("What held")
        if self.scale.change is not None:
            self.report.note(
                f"This is a **shortened** run: {self.scale.change}. It shows that everything works;"
                " its verdicts are no judgement of the paper."
            )
        for remark in self.remarks:
            self.report.note(remark)
        hours = sum(one.values.get("seconds", 0.0) for one in self.found) / 3600
        judged = judge_claims(self.found)
        if self.scale.change is None:
            self.report.text(write_summary(judged))
        with self.report.fold(f"All {len(judged)} claims, one by one"):
            verdicts = [(one.full_claim, f"**{one.status}**", one.number) for one in judged]
            self.report.table(("Claim", "Verdict", "Number"), verdicts)
        self.report.text(
            f"{len(self.found)} trainings, {hours:.1f} hours in all, each in one thread. Numbers in"
            " brackets count the random starts behind a mean. We had the text of the paper but not"
            " its figures, so they are described beside ours."
            " `python benchmarks/reproduction.py` made this page."
        )
        rows = [[one.full_claim, one.status, one.number] for one in judged]
        caption = "Claims of the paper and their verdicts."
        Table("verdicts", caption, ("claim", "verdict", "number"), rows).save(self._tables)
        with self.report.fold("Rules of the verdicts"):
            self.report.text(RULES.strip())

    @property
    def _tables(self) -> Path:
        return self.folder / "tables"

    def _table(self, table: Table) -> None:
        """Add a table, behind a fold if it is a long one."""
        table.save(self._tables)
        if len(table.rows) <= LONG:
            self.report.table(table.columns, table.rows, table.caption)
            return
        with self.report.fold(f"{table.caption.rstrip('.')} ({len(table.rows)} rows)"):
            self.report.table(table.columns, table.rows)

    def _picture(self, figure: Figure, name: str, caption: str) -> None:
        folder = self.folder / "figures"
        make_folder(folder)
        for suffix in (".png", ".svg"):
            save_figure(figure, folder / f"{name}{suffix}")
        self.report.figure(figure, caption)

    def _first_models(self, runs: Sequence[Result]) -> list[tuple[Result, MFA]]:
        """Load the stored models of the first seed."""
        paths = [(one, self.store.model_path(one.trial)) for one in runs if one["seed"] == 0]
        return [(one, load(path)) for one, path in paths if path is not None]

    def _figure1(self, runs: Sequence[Result]) -> None:
        for one, model in self._first_models(runs):
            name, shape = one["dataset"], one["image_shape"]
            pictures = {
                "centroids": (plotting.plot_means(model, shape), "centroids"),
                "precisions": (
                    plotting.plot_precisions(model, shape, vmin=18, vmax=20),
                    "precisions from 18 to 20, as in the paper",
                ),
                "loadings": (
                    plotting.plot_loadings(model, image_shape=shape),
                    "the four columns of the low-rank part, in one colour scale",
                ),
            }
            for what, (figure, caption) in pictures.items():
                self._picture(figure, f"figure1-{name}-{what}", f"{name}: {caption}")

    def _figure2(self, runs: Sequence[Result]) -> None:
        for one, model in self._first_models(runs):
            name = one["dataset"]
            chosen = figure1.COMPONENTS.get(name, (0, 6, 15))
            for noise, words in ((False, "without"), (True, "with")):
                figure = _plot_samples(model, one["image_shape"], chosen, noise=noise)
                caption = f"{name}: samples {words} noise"
                self._picture(figure, f"figure2-{name}-{words}-noise", caption)

    def _convergence(self, runs: Sequence[Result]) -> None:
        for dataset in list_datasets(runs):
            chosen = [one for one in runs if one["dataset"] == dataset]
            caption = f"{dataset}: log-likelihood of the batches, and components in use"
            self._picture(plot_convergence(chosen), f"convergence-{dataset}", caption)
        self._table(make_convergence_table(runs))

    def _table1(self, runs: Sequence[Result]) -> None:
        self._table(make_class_table(runs, "E ≤ 20", "table1-classes-E20"))
        for dataset in list_datasets(runs):
            self._roc([one for one in runs if one["dataset"] == dataset], dataset)
        self._table(make_main_table(runs))
        if any(one["variant"] == "E ≤ 400" for one in runs):
            with self.report.fold("The same with E ≤ 400"):
                self._table(make_class_table(runs, "E ≤ 400", "table1-classes-E400"))
        make_trial_table(runs, "outlier-trials").save(self._tables)

    def _roc(self, runs: Sequence[Result], name: str) -> None:
        curves = {}
        for one in runs:
            first = (one["seed"], one["variant"]) == (0, "E ≤ 20")
            if first and one["held_out"] in table1.MAIN_CLASSES:
                arrays = self.store.arrays(one.trial)
                label = f"{one['model']}, without {one['held_out']}"
                curves[label] = (arrays["inlier"], arrays["scores"])
        if curves:
            caption = f"{name}: ROC of the first seed, E ≤ 20, log-sum-exp score"
            self._picture(plotting.plot_roc(curves), f"roc-{name}", caption)

    def _svhn(self, runs: Sequence[Result]) -> None:
        if runs[0]["note"]:
            self.report.note(f"Of SVHN, {runs[0]['note']}. The full set may give other numbers.")
        self._table(make_svhn_table(runs))
        make_trial_table(runs, "svhn-trials").save(self._tables)
        self._roc(runs, "svhn")
        for one, model in self._first_models(runs):
            if (one["model"], one["held_out"]) == ("MFA", table1.MAIN_CLASSES[0]):
                shape = one["image_shape"]
                means, samples = plotting.plot_means(model, shape), _plot_samples(model, shape)
                self._picture(means, "svhn-centroids", "svhn: centroids")
                self._picture(samples, "svhn-samples", "svhn: samples without noise")

    def _streaming(self, runs: Sequence[Result]) -> None:
        self._table(make_streaming_table(runs))
        self._stream(runs[0])
        with self.report.fold(f"The other {len(runs) - 1} streams"):
            for one in runs[1:]:
                self._stream(one)

    def _stream(self, one: Result) -> None:
        name = f"{one['dataset']}-{one['solver']}-new{one['new_class']}"
        caption = f"{one['dataset']}, {one['solver']}: class {one['new_class']} is new"
        self._picture(plot_stream(one), f"streaming-{name}", caption)


def _plot_samples(
    model: MFA, shape: Sequence[int], chosen: Sequence[int] | None = None, noise: bool = False
) -> Figure:
    return plotting.plot_samples(
        model, chosen, n=12, noise=noise, image_shape=shape, random_state=0
    )


@styled
def plot_convergence(runs: Sequence[Result]) -> Figure:
    """Draw the likelihood and the components in use of every random start over the epochs."""
    fig = new_figure(7.0, 4.2)
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    tail: list[float] = []
    for run in runs:
        epochs, likelihoods, used = zip(*run["history"], strict=True)
        upper.plot(epochs, likelihoods, color=COLOURS[0], alpha=0.6, linewidth=1.0)
        lower.plot(epochs, used, color=COLOURS[1], alpha=0.6, linewidth=1.0)
        tail += likelihoods[len(likelihoods) // 20 :]
    if tail:
        margin = 0.05 * (max(tail) - min(tail)) or 1.0
        upper.set_ylim(min(tail) - margin, max(tail) + margin)
    upper.set(
        title=f"{runs[0]['dataset']}: {len(runs)} random start{'s' * (len(runs) > 1)}",
        ylabel="log-likelihood",
    )
    lower.set(xlabel="epoch", ylabel="components\nin use")
    for axes in (upper, lower):
        axes.grid(True)
    return fig


@styled
def plot_stream(run: Result) -> Figure:
    """Draw likelihood and detection over a stream in which a class appears half-way."""
    fig = new_figure(7.0, 4.4)
    upper, lower = fig.subplots(2, 1, sharex=True)
    windows = run["windows"]
    for axes, keys in (
        (upper, {"known": "known classes", "new": "new class"}),
        (lower, {"auc": "in the stream", "probe_auc": "held-out images"}),
    ):
        for colour, (key, name) in zip(COLOURS, keys.items(), strict=False):
            points = [(w["batch"], w[key]) for w in windows if w[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.axvline(run["change"], color=MARK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.grid(True)
        axes.legend(loc="best")
    late = [w["known"] for w in windows[len(windows) // 10 :] if w["known"] is not None]
    late += [w["new"] for w in windows if w["new"] is not None]
    if late and max(late) > min(late):
        margin = 0.05 * (max(late) - min(late))
        upper.set_ylim(min(late) - margin, max(late) + margin)
    name = f"{run['dataset']}, {run['solver']}: class {run['new_class']} appears"
    upper.set(title=name, ylabel="log-likelihood\nbefore learning")
    lower.set(xlabel="batch", ylabel="AUC of the new class")
    return fig
