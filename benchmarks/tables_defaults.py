"""The defaults on small tables, beside a Gaussian and scikit-learn's mixture.

    python benchmarks/tables_defaults.py --write-docs     # about ten minutes on two cores

Tables have under 2,000 rows and keep all columns as they are, inliers and outliers, in raw units.
Scores are mean log-likelihoods of the rows left out by five folds, with the standard error of
the difference over folds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
from common import DOCS, describe_machine, list_adbench, make_parser, parse_options, print_trial
from harness import (
    Result,
    Store,
    Trial,
    read_results,
    run_trials,
)
from tables_trials import (
    DEFAULT_FOLDS,
    DEFAULT_MODELS,
    SKLEARN,
    load_whole_table,
    run_defaults,
)

from factormix.files import make_folder, write_whole

MOST_ROWS = 2000
MOST_CHANGE = 2.0
"""Nats by which one row of each fold may change a mean without being mentioned: more than most
differences between models in the table."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "docs/benchmarks-defaults.md")
    parser.add_argument("--tables", type=lambda t: t.split(","), help="some of the tables")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tables at a time")
    options = parse_options(parser, arguments)
    names = options.tables or (["iris", "wine"] if options.quick else list_small())
    store = Store(options.output / "trials")
    trials = [
        Trial("defaults", name, {"table": name, "select": not options.quick}, run_defaults)
        for name in names
    ]
    run_trials(trials, store, jobs=options.jobs, on_finish=print_trial)
    text = compose(read_results(trials, store))
    make_folder(options.output)
    write_whole(options.output / "defaults.md", text.encode())
    if options.write_docs:
        write_whole(DOCS / "benchmarks-defaults.md", text.encode())
    print(text)


def list_small() -> list[str]:
    """List the tables with fewer than ``MOST_ROWS`` rows."""
    return [name for name in [*SKLEARN, *list_adbench()] if len(load_whole_table(name)) < MOST_ROWS]


def compose(results: Sequence[Result]) -> str:
    """Write the page."""
    lines = [
        "# Defaults on small tables",
        "",
        "Mean held-out log-likelihood (nats per row, five folds, raw units) of `MFA()` and"
        " `select(X)`, beside one Gaussian with a full covariance and scikit-learn's"
        " `GaussianMixture` with as many components as `MFA()` took, both with their defaults."
        " The last column is `MFA()` minus the better of the two, with its standard error over"
        " folds; **bold** where it is lower.",
        "",
        "| table | rows | features | discrete | K | "
        + " | ".join(f"`{m}`" for m in DEFAULT_MODELS)
        + " | ahead |",
        "|---|" + "---:|" * (5 + len(DEFAULT_MODELS)),
    ]
    ahead = 0
    behind, bounded = list[str](), list[bool]()
    for one in results:
        scores = one["scores"]
        means = {model: mean(scores[model]) for model in DEFAULT_MODELS}
        if means["bounded"] is not None:
            bounded.append(means["MFA()"] >= means["bounded"])
        peers = [m for m in ("Gaussian", "GaussianMixture") if means[m] is not None]
        text = "no peer"
        if peers:
            best = max(peers, key=lambda m: means[m])
            gap = np.subtract(scores["MFA()"], scores[best])
            text = f"{gap.mean():+.2f} ± {gap.std(ddof=1) / math.sqrt(len(gap)):.2f}"
            ahead += bool(gap.mean() >= 0)
            if gap.mean() < 0:
                text = f"**{text}**"
                behind.append(f"{one['table']} ({best})")
        cells = ["" if means[m] is None else f"{means[m]:.2f}" for m in DEFAULT_MODELS]
        sizes = [one[key] for key in ("rows", "features", "discrete", "components")]
        lines.append(f"| {one['table']} | " + " | ".join(map(str, [*sizes, *cells, text])) + " |")
    compared = ahead + len(behind)
    lines += [
        "",
        f"`MFA()` is at least as good on {ahead} of {compared} tables with a peer."
        + (f" Behind on: {', '.join(behind)}." if behind else ""),
        "",
        "`discrete` counts columns with at most 20 values, or with one value in a quarter of the"
        " rows. On such columns the likelihood of `GaussianMixture` has no bound: a component may"
        " sit on one value with a variance of 1e-6, and its density there exceeds any probability."
        " `MFA` bounds the density by one over the step between values, so that likelihoods are"
        " comparable and spikes on whole numbers gain nothing. `bounded` is"
        " `GaussianMixture` with the noise floors of `MFA` added to its variances, on tables with"
        f" discrete columns: `MFA()` is at least as good on {sum(bounded)} of {len(bounded)}.",
        "",
        "On some tables a single row, unlike all rows of the training, decides the mean of its"
        " fold. These means leave out the lowest score of each fold:",
        "",
        *list_without_lowest(results),
        "",
        "In `bert_20news_3`, one row has the opposite sign in 21 columns that are within 0.01 of 1"
        " or -1 in the training rows of its fold. In `12_fault`, one row is 157 deviations of the"
        " training rows away in one column, and scores below -5,000 with every size that `select`"
        " tries. Which size loses least on such a row is chance.",
        "",
        "The default sizes were chosen with these tables in view, and the noise floor of nearly"
        " constant columns on the test folds of `6_cardio`, so this page is no test of either.",
        "",
        *(f"- {key}: {value}" for key, value in describe().items()),
        "",
    ]
    return "\n".join(lines)


def list_without_lowest(results: Sequence[Result]) -> list[str]:
    """List the means without the lowest score of each fold, where that changes a mean by much."""
    lines = ["| table | `MFA()` | `select` |", "|---|---:|---:|"]
    for one in results:
        cells, changes = list[str](), list[float]()
        for model, lowest in one["lowest"].items():
            pairs = zip(one["scores"][model], lowest, strict=False)
            rests = [(n * score - least) / (n - 1) for score, (least, n) in pairs if n > 1]
            whole = mean(one["scores"][model])
            if whole is not None:
                cells.append(f"{np.mean(rests):.2f}")
                changes.append(float(np.mean(rests)) - whole)
        if max(changes) > MOST_CHANGE:
            lines.append(f"| {one['table']} | " + " | ".join(cells) + " |")
    return lines


def mean(scores: Sequence[float | None]) -> float | None:
    known = [s for s in scores if s is not None]
    return float(np.mean(known)) if len(known) == DEFAULT_FOLDS else None


def describe() -> dict[str, str]:
    found = describe_machine(
        1, os.cpu_count() or 1, ("factormix", "torch", "numpy", "scikit-learn")
    )
    return {**found, "command": "`python benchmarks/tables_defaults.py --write-docs`"}


if __name__ == "__main__":
    main()
