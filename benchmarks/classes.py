"""Classify MNIST and FashionMNIST by a mixture for each class, and reject uncertain images.

    python benchmarks/classes.py --write-docs     # about twenty minutes on one core
    python benchmarks/classes.py --quick          # a try in seconds, on small digits

The noise floor is chosen by accuracy on held-out rows of the training set, and the size of each
class's mixture by ``select`` on the training rows of the class. The test rows are used once, with
these choices. Every training is a trial with its own result file, so a benchmark that was
interrupted continues where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from common import DOCS, describe_machine, fold_description, make_parser, parse_options
from harness import (
    Outcome,
    Result,
    Settings,
    Store,
    Table,
    Trial,
    read_results,
    run_trials,
)
from numpy.typing import NDArray
from pages import markdown_fold

from factormix import MFAClassifier, datasets
from factormix.files import make_folder, write_whole
from factormix.views.plotting import save_figure
from factormix.views.plotting.drawing import COLOURS, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOALS = {"mnist": 0.975, "fashion-mnist": 0.87}
NAMES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "digits": "digits (8 x 8)"}
SHARED = {"components": [5, 10], "factors": [10, 20], "epochs": 10, "seed": 0}
FLOORS = (0.01, 0.03, 0.06)
"""Smallest noise variances, for pixels between 0 and 1."""
ROWS, JUDGES = 10_000, 10_000
PEER = {"components": 50, "regularisation": 0.01}
REJECTED = (0.005, 0.01, 0.02, 0.05, 0.1)
QUICK_SHARED = {"components": [1, 2], "factors": [2, 4], "epochs": 5, "seed": 0}

Rows = tuple[NDArray[Any], NDArray[Any]]
MEASURES = ("margin", "ratio", "density")
COMPARED_SHARE = 0.05
"""Share of the least certain rows by which measures are compared on training rows."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "classes")
    choices = plan_choices(options)
    if not options.no_run:
        report(run_trials(choices, store, options.data_folder, options.jobs))
    chosen = read_results(choices, store)
    finals = plan_finals(options, chosen)
    if not options.no_run:
        report(run_trials(finals, store, options.data_folder, options.jobs))
    results = read_results(finals, store)
    make_folder(options.output)
    curves = {r["data"]: store.arrays(r.trial) for r in results if r.trial.run is judge_test_rows}
    save_figure(draw(curves), options.output / "classes.png")
    text = compose(chosen, results, curves, "classes.png")
    write_whole(options.output / "classes.md", text.encode())
    print(text)
    if options.write_docs:
        save_figure(draw(curves), DOCS / "benchmarks" / "classes.png")
        text = compose(chosen, results, curves, "benchmarks/classes.png")
        write_whole(DOCS / "benchmarks-classes.md", text.encode())
        print("docs/benchmarks-classes.md is written.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-classes.md")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (1)")
    parser.add_argument("--data-folder", help="where the data sets are")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    options = parse_options(parser, arguments)
    return options


def report(failures: dict[str, str]) -> None:
    for title, reason in failures.items():
        print(f"{title} failed: {reason}")


def plan_choices(options: argparse.Namespace) -> list[Trial]:
    """List the trainings that choose the noise floor."""
    names = ["digits"] if options.quick else list(GOALS)
    shared = QUICK_SHARED if options.quick else SHARED
    rows = {"rows": 700, "judges": 300} if options.quick else {"rows": ROWS, "judges": JUDGES}
    return [
        Trial(
            "choose",
            f"{name}-floor{floor}",
            {"data": name, "floor": floor, **shared, **rows},
            choose_floor,
        )
        for name in names
        for floor in FLOORS
    ]


def plan_finals(options: argparse.Namespace, chosen: list[Result]) -> list[Trial]:
    """List the trainings on all training rows: ours with the best floor, and the peer's."""
    trials = []
    for name in dict.fromkeys(result["data"] for result in chosen):
        ours = [result for result in chosen if result["data"] == name]
        floor = max(ours, key=lambda result: result["accuracy"])["floor"]
        shared = QUICK_SHARED if options.quick else SHARED
        settings = {"data": name, "floor": floor, **shared}
        trials.append(Trial("judge", name, settings, judge_test_rows))
        trials.append(Trial("judge", f"{name}-peer", {"data": name, **PEER}, train_peer))
    return trials


def compose(
    chosen: list[Result],
    results: list[Result],
    curves: dict[str, dict[str, NDArray[Any]]],
    picture: str,
) -> str:
    """Write the page."""
    rows = [_write_row(r) for r in results if r.trial.run is judge_test_rows]
    rows += [_write_peer_row(r) for r in results if r.trial.run is train_peer]
    columns = ("data", "model", "test accuracy", "goal", "seconds")
    accuracy = Table("accuracy", "", columns, sorted(rows))
    choice = Table(
        "choice",
        "",
        (
            *("data", "least noise variance", "accuracy", "sizes, K x l"),
            *(f"errors in 5%, by {by}" for by in MEASURES),
        ),
        [
            (
                *(
                    NAMES[r["data"]],
                    r["floor"],
                    f"{100 * r['accuracy']:.2f}%",
                    _write_sizes(r["sizes"]),
                ),
                *(f"{100 * r['errors'][by]:.0f}%" for by in MEASURES),
            )
            for r in chosen
        ],
    )
    rejected = Table(
        "rejected",
        "",
        ("data", "by", *(f"{100 * share:g}%" for share in REJECTED)),
        [_write_rejected(name, by, found) for name, found in curves.items() for by in MEASURES],
    )
    left = Table(
        "left",
        "",
        ("data", "by", "none", *(f"{100 * share:g}%" for share in REJECTED)),
        [_write_left(name, by, found) for name, found in curves.items() for by in MEASURES],
    )
    shares = ", ".join(
        f"{NAMES[r['data']]} {100 * r['rejected']['margin']:.1f}% by margin,"
        f" {100 * r['rejected']['ratio']:.1f}% by ratio and"
        f" {100 * r['rejected']['density']:.1f}% by density"
        for r in results
        if r.trial.run is judge_test_rows
    )
    return PAGE.format(
        accuracy=accuracy.markdown(),
        choice=markdown_fold("Every floor that was tried", choice.markdown()),
        rejected=rejected.markdown(),
        left=markdown_fold("Accuracy on the remaining images", left.markdown()),
        shares=shares,
        best=_name_best_measures(chosen, results),
        picture=picture,
        machine=fold_description(describe_machine(1, 1, ("factormix", "torch"))),
    )


PAGE = """# A density for each class: benchmark

Written by `python benchmarks/classes.py --write-docs`. `MFAClassifier` trains a mixture for each
class on all training images, raw pixels between 0 and 1. The smallest noise variance was chosen by
accuracy on 10,000 held-out training images, after training on 10,000 others. The size of each
class's mixture was chosen by `select`, that is, by the likelihood of held-out images of the class.
The test images were used only after that.

{accuracy}

The peer is scikit-learn's quadratic discriminant analysis on 50 principal components: one full
Gaussian per class. Seconds include the choice of sizes. Other work ran on the machine.

## The choice

On held-out training images: accuracy, and the share of errors among the 5% of images with the
least certain predictions.

{choice}

## Rejection

The share of errors among the test images with the least certain predictions, by three measures.
"Margin" is the difference of log p(x, class) between the two most probable classes: it rejects
images between classes. "Ratio" is the margin relative to the image's distance from the most likely
images. "Density" is log p(x): it rejects images unlike all training images, which need not be
wrong.

Among the held-out training images above, {best}. The measure "ratio" was added after
the other two had been tried on the test images. It was kept because of its result on the held-out
training images.

{rejected}

![Accuracy on the remaining images, against the share rejected]({picture})

{left}

With `reject=0.01`, one in a hundred *training* images is rejected. Of the test images, which are
new to the model, more are rejected: {shares}.

{machine}
"""


def _write_row(result: Result) -> tuple[str, str, str, str, str]:
    goal = GOALS.get(result["data"])
    reached = "" if goal is None else ("reached" if result["accuracy"] >= goal else "missed")
    target = "" if goal is None else f"{100 * goal:.1f}%, {reached}"
    accuracy, floor = f"{100 * result['accuracy']:.2f}%", result["floor"]
    model = f"MFAClassifier, noise floor {floor}, {_write_sizes(result['sizes'])}"
    return NAMES[result["data"]], model, accuracy, target, f"{result['seconds']:.0f}"


def _write_peer_row(result: Result) -> tuple[str, str, str, str, str]:
    accuracy = f"{100 * result['accuracy']:.2f}%"
    return NAMES[result["data"]], "PCA and QDA", accuracy, "", f"{result['seconds']:.0f}"


def _name_best_measures(chosen: list[Result], results: list[Result]) -> str:
    """Name the measure that finds most errors among held-out training images, at the best floor."""
    floors = {r["data"]: r["floor"] for r in results if r.trial.run is judge_test_rows}
    best_floor = [r for r in chosen if floors.get(r["data"]) == r["floor"]]
    best = {NAMES[r["data"]]: max(r["errors"], key=r["errors"].__getitem__) for r in best_floor}
    return " and ".join(f'"{by}" finds most errors of {name}' for name, by in best.items())


def _write_sizes(sizes: list[list[int]]) -> str:
    """Write sizes, each with its number of classes."""
    counts = Counter(f"{K} x {l}" for K, l in sizes)
    return ", ".join(f"{size} ({n})" for size, n in sorted(counts.items()))


def _write_rejected(name: str, by: str, found: dict[str, NDArray[Any]]) -> tuple[str, ...]:
    """Write the share of errors among the rejected images, for several shares rejected."""
    wrong = found["wrong"][np.argsort(found[by], kind="stable")]
    counts = [max(1, round(share * len(wrong))) for share in REJECTED]
    return NAMES[name], by, *(f"{100 * wrong[:n].mean():.0f}%" for n in counts)


def _write_left(name: str, by: str, found: dict[str, NDArray[Any]]) -> tuple[str, ...]:
    """Write the accuracy on the remaining images, for several shares rejected."""
    wrong = found["wrong"][np.argsort(found[by], kind="stable")]
    counts = [0, *(round(share * len(wrong)) for share in REJECTED)]
    return NAMES[name], by, *(f"{100 * (1 - wrong[n:].mean()):.2f}%" for n in counts)


@styled
def draw(curves: dict[str, dict[str, NDArray[Any]]]) -> Figure:
    """Draw the accuracy on the remaining images against the share rejected, by data set."""
    figure = new_figure(4.2 * max(1, len(curves)), 3.4)
    for place, (name, found) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(1, len(curves), place, title=NAMES[name])
        n = len(found["wrong"])
        kept = np.arange(n, n // 2, -1)
        for colour, by in zip(COLOURS, MEASURES, strict=False):
            right = 1 - found["wrong"][np.argsort(found[by], kind="stable")].astype(float)
            accuracy = np.cumsum(right[::-1])[kept - 1] / kept
            axes.plot(100 * (1 - kept / n), 100 * accuracy, color=colour, label=f"by {by}")
        ideal = 100 * (kept - np.maximum(found["wrong"].sum() - (n - kept), 0)) / kept
        axes.plot(100 * (1 - kept / n), ideal, color="#8a8a8a", linestyle=":", label="errors first")
        axes.set(xlabel="images rejected, %", xlim=(0, 30))
        axes.grid(True)
        if place == 1:
            axes.set_ylabel("accuracy on the others, %")
            axes.legend(loc="lower right")
    return figure


def choose_floor(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on some of the training rows, and judge by held-out ones."""
    (X, y), (X_val, y_val) = _split_training_rows(settings, data_folder)
    model, seconds = _fit_classifier(settings, X, y)
    wrong, errors = model.predict(X_val) != y_val, dict[str, float]()
    for by in MEASURES:
        sure = model.set_params(reject_by=by).confidence(X_val)
        least = np.argsort(sure, kind="stable")[: round(COMPARED_SHARE * len(sure))]
        errors[by] = float(wrong[least].mean())
    values: dict[str, Any] = {"accuracy": float(1 - wrong.mean()), "errors": errors}
    return Outcome(values | {"sizes": _list_sizes(model), "seconds": seconds})


def judge_test_rows(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on all training rows with the chosen settings, and judge by the test rows, once."""
    X, y = _load_split(settings, "train", data_folder)
    X_test, y_test = _load_split(settings, "test", data_folder)
    model, seconds = _fit_classifier(settings, X, y)
    predicted = model.predict(X_test)
    arrays = {"wrong": (predicted != y_test).astype(np.uint8)}
    values: dict[str, Any] = {"accuracy": float((predicted == y_test).mean()), "seconds": seconds}
    values |= {"sizes": _list_sizes(model), "rejected": {}}
    for by in MEASURES:
        model.set_params(reject_by=by)
        arrays[by] = np.asarray(model.confidence(X_test), dtype=np.float64)
        sure = np.asarray(model.confidence(X), dtype=np.float64)
        # The share of test rows that reject=0.01 would reject.
        values["rejected"][by] = float((arrays[by] < np.quantile(sure, 0.01)).mean())
    return Outcome(values, arrays)


def train_peer(settings: Settings, data_folder: str | None) -> Outcome:
    """Train one Gaussian per class on principal components."""
    from sklearn.decomposition import PCA
    from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
    from sklearn.pipeline import make_pipeline

    X, y = _load_split(settings, "train", data_folder)
    X_test, y_test = _load_split(settings, "test", data_folder)
    start = time.perf_counter()
    gaussians = QuadraticDiscriminantAnalysis(reg_param=settings["regularisation"])
    model = make_pipeline(PCA(min(settings["components"], X.shape[1]), random_state=0), gaussians)
    model.fit(X, y)
    seconds = time.perf_counter() - start
    return Outcome({"accuracy": float(model.score(X_test, y_test)), "seconds": seconds})


def _fit_classifier(
    settings: Settings, X: NDArray[Any], y: NDArray[Any]
) -> tuple[MFAClassifier, float]:
    start = time.perf_counter()
    model = MFAClassifier(
        settings["components"],
        settings["factors"],
        max_precision=1 / settings["floor"],
        max_epochs=settings["epochs"],
        random_state=settings["seed"],
    )
    model.fit(X, y)
    return model, time.perf_counter() - start


def _list_sizes(model: MFAClassifier) -> list[list[int]]:
    """List the numbers of components and factors chosen for each class."""
    return [[one.n_components, one.n_factors_] for one in model.estimators_ if one is not None]


def _split_training_rows(settings: Settings, data_folder: str | None) -> tuple[Rows, Rows]:
    """Split the training rows at random, into some to train on and some to judge by."""
    X, y = _load_split(settings, "train", data_folder)
    order = np.random.default_rng(settings["seed"]).permutation(len(X))
    train, val = order[: settings["rows"]], order[settings["rows"] :][: settings["judges"]]
    return (X[train], y[train]), (X[val], y[val])


def _load_split(settings: Settings, split: str, data_folder: str | None) -> Rows:
    found = datasets.load(settings["data"], split=split, folder=data_folder)
    return np.asarray(found.data, dtype=np.float32), np.asarray(found.labels)


if __name__ == "__main__":
    main()
