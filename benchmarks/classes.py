"""Tell the classes of MNIST and FashionMNIST apart by a mixture for each, and reject the unsure.

    python benchmarks/classes.py --write-docs     # about twenty minutes on one core
    python benchmarks/classes.py --quick          # a try in seconds, on small digits

The noise floor is chosen by accuracy on rows of the training set that are held out, and the size of
each class's mixture by ``select`` on the training rows of the class. The test rows are looked at
with what was chosen. Every training is a trial with a result file of its own: a benchmark
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import labelled
import machine
import numpy as np
from numpy.typing import NDArray

from factormix.files import make_folder, write_whole
from factormix.studies.harness import Result, Store, Table, Trial, folded, read_results, run_trials
from factormix.views.plotting import save_figure
from factormix.views.plotting.drawing import COLOURS, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
GOALS = {"mnist": 0.975, "fashion-mnist": 0.87}
NAMES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "digits": "digits (8 x 8)"}
SHARED = {"components": [5, 10], "factors": [10, 20], "epochs": 10, "seed": 0}
FLOORS = (0.01, 0.03, 0.06)
"""Least noise variances, of pixels between 0 and 1."""
ROWS, JUDGES = 10_000, 10_000
PEER = {"components": 50, "regularisation": 0.01}
REJECTED = (0.005, 0.01, 0.02, 0.05, 0.1)
QUICK_SHARED = {"components": [1, 2], "factors": [2, 4], "epochs": 5, "seed": 0}


def main() -> None:
    options = parse()
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
    curves = {r["data"]: store.arrays(r.trial) for r in results if r.trial.run is labelled.judge}
    save_figure(draw(curves), options.output / "classes.png")
    text = compose(chosen, results, curves, "classes.png")
    write_whole(options.output / "classes.md", text.encode())
    print(text)
    if options.write_docs:
        docs = ROOT / "docs"
        save_figure(draw(curves), docs / "benchmarks" / "classes.png")
        text = compose(chosen, results, curves, "benchmarks/classes.png")
        write_whole(docs / "benchmarks-classes.md", text.encode())
        print("docs/benchmarks-classes.md is written.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (1)")
    parser.add_argument("--data-folder", help="where the data sets are")
    parser.add_argument("--quick", action="store_true", help="small digits and small mixtures")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--write-docs", action="store_true", help="write the page of the docs")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args()
    if options.quick and options.write_docs:
        parser.error("--quick is too small for the docs: leave out one of the two")
    return options


def report(failures: dict[str, str]) -> None:
    for title, reason in failures.items():
        print(f"{title} failed: {reason}")


def plan_choices(options: argparse.Namespace) -> list[Trial]:
    """List the trainings among which the noise floor is chosen."""
    names = ["digits"] if options.quick else list(GOALS)
    shared = QUICK_SHARED if options.quick else SHARED
    rows = {"rows": 700, "judges": 300} if options.quick else {"rows": ROWS, "judges": JUDGES}
    return [
        Trial(
            "choose",
            f"{name}-floor{floor}",
            {"data": name, "floor": floor, **shared, **rows},
            labelled.choose,
        )
        for name in names
        for floor in FLOORS
    ]


def plan_finals(options: argparse.Namespace, chosen: list[Result]) -> list[Trial]:
    """List the trainings on all training rows: with the best floor, and the peer's."""
    trials = []
    for name in dict.fromkeys(result["data"] for result in chosen):
        mine = [result for result in chosen if result["data"] == name]
        floor = max(mine, key=lambda result: result["accuracy"])["floor"]
        shared = QUICK_SHARED if options.quick else SHARED
        settings = {"data": name, "floor": floor, **shared}
        trials.append(Trial("judge", name, settings, labelled.judge))
        trials.append(Trial("judge", f"{name}-peer", {"data": name, **PEER}, labelled.peer))
    return trials


def compose(
    chosen: list[Result],
    results: list[Result],
    curves: dict[str, dict[str, NDArray[Any]]],
    picture: str,
) -> str:
    """Write the page."""
    rows = [_row(r) for r in results if r.trial.run is labelled.judge]
    rows += [_peer_row(r) for r in results if r.trial.run is labelled.peer]
    columns = ("data", "model", "test accuracy", "goal", "seconds")
    accuracy = Table("accuracy", "", columns, sorted(rows))
    choice = Table(
        "choice",
        "",
        (
            *("data", "least noise variance", "accuracy", "sizes, K x l"),
            *(f"errors in 5%, by {by}" for by in labelled.MEASURES),
        ),
        [
            (
                *(NAMES[r["data"]], r["floor"], f"{100 * r['accuracy']:.2f}%", _sizes(r["sizes"])),
                *(f"{100 * r['errors'][by]:.0f}%" for by in labelled.MEASURES),
            )
            for r in chosen
        ],
    )
    rejected = Table(
        "rejected",
        "",
        ("data", "by", *(f"{100 * share:g}%" for share in REJECTED)),
        [_rejected(name, by, found) for name, found in curves.items() for by in labelled.MEASURES],
    )
    left = Table(
        "left",
        "",
        ("data", "by", "none", *(f"{100 * share:g}%" for share in REJECTED)),
        [_left(name, by, found) for name, found in curves.items() for by in labelled.MEASURES],
    )
    shares = ", ".join(
        f"{NAMES[r['data']]} {100 * r['rejected']['margin']:.1f}% by margin,"
        f" {100 * r['rejected']['ratio']:.1f}% by ratio and"
        f" {100 * r['rejected']['density']:.1f}% by density"
        for r in results
        if r.trial.run is labelled.judge
    )
    return PAGE.format(
        accuracy=accuracy.markdown(),
        choice=folded("Every floor that was tried", choice.markdown()),
        rejected=rejected.markdown(),
        left=folded("Accuracy on the images that are left", left.markdown()),
        shares=shares,
        best=_best_measures(chosen, results),
        picture=picture,
        machine=machine.fold_of(machine.describe(1, 1, ("factormix", "torch"))),
    )


PAGE = """# A density for each class: benchmark

Written by `python benchmarks/classes.py --write-docs`. `MFAClassifier` trains a mixture for each
class on all training images, raw pixels between 0 and 1. The least noise variance was chosen by
accuracy on 10,000 training images that were held out, with 10,000 others to train on; the size of
each class's mixture by `select`, the likelihood of held-out images of the class. Test images were
looked at after that.

{accuracy}

The peer is scikit-learn's quadratic discriminant analysis on 50 principal components: one full
Gaussian per class. Seconds include the choice of sizes, and whatever else ran on the machine.

## The choice

On training images that were held out: accuracy, and the share of errors among the 5% whose
prediction is least sure.

{choice}

## Rejection

Of the test images whose prediction is least sure, these shares are errors. By "margin", the
difference of log p(x, class) between the two most probable classes, what is rejected lies between
classes; "ratio" is the margin in relation to how far the image is from the most likely ones; by
"density", log p(x), what is rejected is unlike all of the training, and need not be wrong.

Among the held-out training images above, {best}. The measure "ratio" was added after a first look
at the test images by the other two, and the held-out training images were asked whether it is
worth having.

{rejected}

![Accuracy on what is left, against the share rejected]({picture})

{left}

With `reject=0.01`, one in a hundred *training* images is rejected; of the test images, which the
model has not seen, more are: {shares}.

{machine}
"""


def _row(result: Result) -> tuple[str, str, str, str, str]:
    goal = GOALS.get(result["data"])
    reached = "" if goal is None else ("reached" if result["accuracy"] >= goal else "missed")
    told = "" if goal is None else f"{100 * goal:.1f}%, {reached}"
    accuracy, floor = f"{100 * result['accuracy']:.2f}%", result["floor"]
    model = f"MFAClassifier, noise floor {floor}, {_sizes(result['sizes'])}"
    return NAMES[result["data"]], model, accuracy, told, f"{result['seconds']:.0f}"


def _peer_row(result: Result) -> tuple[str, str, str, str, str]:
    accuracy = f"{100 * result['accuracy']:.2f}%"
    return NAMES[result["data"]], "PCA and QDA", accuracy, "", f"{result['seconds']:.0f}"


def _best_measures(chosen: list[Result], results: list[Result]) -> str:
    """Say which measure found most errors among held-out training images, with the best floor."""
    floors = {r["data"]: r["floor"] for r in results if r.trial.run is labelled.judge}
    mine = [r for r in chosen if floors.get(r["data"]) == r["floor"]]
    best = {NAMES[r["data"]]: max(r["errors"], key=r["errors"].__getitem__) for r in mine}
    return " and ".join(f'"{by}" finds most errors of {name}' for name, by in best.items())


def _sizes(sizes: list[list[int]]) -> str:
    """Write sizes with the number of classes that have each."""
    counts = Counter(f"{K} x {l}" for K, l in sizes)
    return ", ".join(f"{size} ({n})" for size, n in sorted(counts.items()))


def _rejected(name: str, by: str, found: dict[str, NDArray[Any]]) -> tuple[str, ...]:
    """Write the share of errors among the images rejected, for some shares rejected."""
    wrong = found["wrong"][np.argsort(found[by], kind="stable")]
    counts = [max(1, round(share * len(wrong))) for share in REJECTED]
    return NAMES[name], by, *(f"{100 * wrong[:n].mean():.0f}%" for n in counts)


def _left(name: str, by: str, found: dict[str, NDArray[Any]]) -> tuple[str, ...]:
    """Write the accuracy on the images left, for some shares rejected."""
    wrong = found["wrong"][np.argsort(found[by], kind="stable")]
    counts = [0, *(round(share * len(wrong)) for share in REJECTED)]
    return NAMES[name], by, *(f"{100 * (1 - wrong[n:].mean()):.2f}%" for n in counts)


@styled
def draw(curves: dict[str, dict[str, NDArray[Any]]]) -> Figure:
    """Draw the accuracy on what is left against the share rejected, one panel for each data set."""
    figure = new_figure(4.2 * max(1, len(curves)), 3.4)
    for place, (name, found) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(1, len(curves), place, title=NAMES[name])
        n = len(found["wrong"])
        kept = np.arange(n, n // 2, -1)
        for colour, by in zip(COLOURS, labelled.MEASURES, strict=False):
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


if __name__ == "__main__":
    main()
