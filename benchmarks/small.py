"""Measure small work: fits, outlier detection, imputation, gaps and imports, in processor seconds.

    FACTORMIX_DATA=folder python benchmarks/small.py --write-docs            # about ten minutes
    FACTORMIX_DATA=folder python benchmarks/small.py --against 2d65e19       # ratios to a commit
    python benchmarks/small.py --quick                                       # a try in seconds

Every part runs in a process of its own with one thread, the other commit's right after ours, so
that ratios hold on a busy machine. Likelihoods, areas and errors stand beside the seconds.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from against import ROOT, check_out, run_process
from common import (
    DOCS,
    adbench_folder,
    describe_machine,
    fold_description,
    list_adbench,
    make_parser,
    parse_options,
)
from missing import TABLES as IMPUTED
from missing import split_table
from numpy.typing import NDArray
from pages import markdown_table
from small_trials import OURS, PARTS, SHORT_RUNS, Results, run_part
from tables_trials import (
    MOST_ROWS,
    SKLEARN,
    choose_small,
    load_table,
    load_whole_table,
    split_fold,
)

from factormix.files import make_folder, write_whole

FOLDS = 5
COMPONENTS = (1, 2, 5, 10)
DETECTED_ROWS = 2000
"""Tables of ADBench with fewer rows than this are searched for outliers."""
MADE = (1000, 20)
"""Rows and features of the table on which detectors and imputers are timed."""
MISSING, GAPS = 0.2, 0.3
"""Shares of missing entries on that table, and in all other trials."""
GAP_TABLES = ((500, 8), (500, 12), (500, 20), (1500, 8), (1500, 12), (1500, 20))
"""Rows and features of made tables with four components of two factors."""
GAP_SEEDS = 5
"""Tables of each shape."""
IMPORTS = ("import torch", "import torch, sklearn.base", "from factormix import MFA")
IMPORT_REPEATS = 5
GOALS = {"fits": 0.030, "outliers": 0.3, "imputation": 1.5, "imports": 0.5}
"""Seconds: the median fit, a detector, an imputer, and the import beyond torch."""
QUALITIES = {
    "fits": ("score", "median held-out log-likelihood"),
    "outliers": ("area", "mean area under the ROC curve"),
    "imputation": ("error", "mean error"),
    "gaps": ("score", "mean held-out log-likelihood"),
}

Array = NDArray[np.float64]
Imports = dict[str, float]
"""Median processor seconds of a fresh process by what it imports."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "docs/benchmarks-small.md")
    parser.add_argument("--against", metavar="COMMIT", help="run the trials by another commit too")
    options = parse_options(parser, arguments)
    with tempfile.TemporaryDirectory() as name:
        folder, ours = Path(name), ROOT / "src"
        write_tables(folder, quick=options.quick)
        other = check_out(options.against, folder / "other") if options.against else None
        found, before = dict[str, Results](), dict[str, Results]()
        for part in PARTS:
            print(part, flush=True)
            found[part] = measure(part, folder, None if options.quick else ours)
            if other is not None:
                before[part] = measure(part, folder, other, ours_only=True)
        repeats, imports = (1, IMPORTS[:1]) if options.quick else (IMPORT_REPEATS, IMPORTS)
        fresh = time_imports(imports, ours, repeats)
        old = {} if other is None else time_imports(imports[-1:], other, repeats)
    text = compose_page(found, fresh, before, old, options.against)
    make_folder(options.output)
    write_whole(options.output / "small.md", text.encode())
    if options.write_docs:
        write_whole(DOCS / "benchmarks-small.md", text.encode())
    print(text)


def measure(part: str, folder: Path, source: Path | None, *, ours_only: bool = False) -> Results:
    """Run a part with the package in ``source`` in a process of its own, or here if it is None."""
    if source is None:
        return run_part(part, folder, ours_only=ours_only)
    script = str(Path(__file__).with_name("small_trials.py"))
    options = ["--ours"] if ours_only else []
    results: Results = run_process([script, str(folder), part, *options], source)
    return results


def time_imports(imports: Sequence[str], source: Path, repeats: int) -> Imports:
    """Import in fresh processes, in turn."""
    seconds: dict[str, list[float]] = {statement: [] for statement in imports}
    for _ in range(repeats):
        for statement, each in seconds.items():
            code = f"import time; {statement}; print(time.process_time())"
            each.append(float(run_process(["-c", code], source)))
    return {statement: statistics.median(each) for statement, each in seconds.items()}


def write_tables(folder: Path, *, quick: bool) -> None:
    """Write the tables of all parts into a folder."""
    random = np.random.default_rng(0)
    names = ["iris", "wine"] if quick else choose_small([*SKLEARN, *list_adbench()], MOST_ROWS)
    for name in names:
        rows = load_table(name, MOST_ROWS)
        for fold in range(1 if quick else FOLDS):
            train, held_out = split_fold(rows, "standardised", fold, FOLDS)
            sizes = np.array([K for K in COMPONENTS if len(train) >= 2 * K])
            _save(folder, f"fits-{name}-{fold}", train=train, held_out=held_out, components=sizes)
    made = draw_mixture(*((200, 5) if quick else MADE), random)
    if quick:
        labels = np.arange(len(made)) < 10
        _save(folder, "outliers-made", rows=made + 5.0 * labels[:, None], labels=labels)
    for name in [] if quick else list_adbench():
        rows = load_whole_table(name)
        if len(rows) < DETECTED_ROWS:
            _save(folder, f"outliers-{name}", rows=rows, labels=load_labels(name))
    _save(folder, "outliers-~timed", rows=made)
    for name in ["wine"] if quick else IMPUTED:
        train, new = split_table(name, 600, 0)
        learned, given = hide(train, GAPS, random), hide(new, GAPS, random)
        _save(folder, f"imputation-{name}", train=learned, new=new, given=given)
    _save(folder, "imputation-~timed", train=hide(made, MISSING, random))
    for i, (n, d) in enumerate([(200, 6)] if quick else GAP_TABLES):
        for seed in range(1 if quick else GAP_SEEDS):
            random = np.random.default_rng((seed, i))
            rows = draw_mixture(n + 2000, d, random, n_components=4, n_factors=2)
            train = hide(rows[:n], GAPS, random)
            _save(folder, f"gaps-{i}-{seed}", train=train, held_out=rows[n:])


def _save(folder: Path, name: str, **arrays: Array | NDArray[np.bool_]) -> None:
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def load_labels(name: str) -> Array:
    """Return which rows of a table of ADBench are outliers, (n,)."""
    with np.load(adbench_folder() / f"{name}.npz", allow_pickle=False) as file:
        return np.asarray(file["y"], dtype=np.float64)


def draw_mixture(
    n: int, d: int, random: np.random.Generator, n_components: int = 5, n_factors: int = 4
) -> Array:
    """Draw rows (n, d) of a mixture of factor analyzers."""
    means = random.normal(0, 1.5, size=(n_components, d))
    loadings = random.normal(size=(n_components, d, n_factors))
    component = random.integers(n_components, size=n)
    z = random.normal(size=(n, n_factors, 1))
    noise = 0.5 * random.normal(size=(n, d))
    return np.asarray(means[component] + (loadings[component] @ z)[..., 0] + noise)


def hide(rows: Array, share: float, random: np.random.Generator) -> Array:
    """Return rows in which a share of the entries is NaN."""
    return np.where(random.random(rows.shape) < share, np.nan, rows)


def compose_page(
    found: Mapping[str, Results],
    imports: Imports,
    before: Mapping[str, Results],
    imports_before: Imports,
    commit: str | None,
) -> str:
    """Compose the page; every number and every verdict on it is computed."""
    lines = [
        "# Benchmarks: small work",
        "",
        "Where people wait for small results: processor seconds of one warm thread, with the"
        " quality of the results beside them. `python benchmarks/small.py --write-docs` repeats"
        " it; it reads ADBench's files from the folder `adbench` in `FACTORMIX_DATA`.",
        "",
        "## A small fit",
        "",
        f"Tables of at most {MOST_ROWS:,} rows and 50 features, standardised, five folds, K ="
        f" {', '.join(map(str, COMPONENTS))} components, two factors; medians over all fits.",
        _judge(_median(found["fits"][OURS]["seconds"]), GOALS["fits"]),
        "",
        _tabulate("fits", found, before, commit, unit=1e3),
        "",
        _compare_likelihoods(found["fits"]),
        "",
        "## Outlier detection",
        "",
        f"Areas are means over the tables of ADBench with fewer than {DETECTED_ROWS:,} rows;"
        f" seconds measure `fit` on {MADE[0]:,} x {MADE[1]}. Lines with parts and passes are other"
        " recipes of `MFAOutlierDetector`: the curve of area against seconds.",
        _judge(found["outliers"][OURS]["seconds"][0], GOALS["outliers"]),
        "",
        _tabulate("outliers", found, before, commit),
        "",
        "## Imputation",
        "",
        f"Errors are means over the ten tables of [missing values](benchmarks-missing.md), with"
        f" {GAPS:.0%} of the entries missing, drawn anew; seconds measure"
        f" `fit_transform` on {MADE[0]:,} x {MADE[1]} with {MISSING:.0%} missing. Lines with K have"
        " mixtures of these sizes only: the curve of error against seconds.",
        _judge(found["imputation"][OURS]["seconds"][0], GOALS["imputation"]),
        "",
        _tabulate("imputation", found, before, commit),
        "",
        "## Training on rows with gaps",
        "",
        f"Made tables with {GAPS:.0%} of the entries missing, K = 4, two factors; complete rows are"
        f" scored. Medians over {GAP_SEEDS} tables of each shape. *Level* is the shortest fit by"
        " `natural` that scores at least as high as the complete one by `em`:"
        f" `max_epochs` is {', '.join(map(str, SHORT_RUNS))} or left out.",
        "",
        _tabulate_gaps(found["gaps"]),
        "",
        _compare_solvers(found["gaps"]),
        "",
        "## Imports",
        "",
        "Processor seconds of a fresh process, medians.",
    ]
    if IMPORTS[-1] in imports:
        beyond = imports[IMPORTS[-1]] - imports[IMPORTS[0]]
        shared = imports[IMPORTS[1]] - imports[IMPORTS[0]]
        lines += [
            _judge(beyond, GOALS["imports"], "beyond torch"),
            f"scikit-learn's base class takes {shared:.2f} s of them: it imports `scipy.stats`, and"
            " pandas and pyarrow where they are installed.",
        ]
    rows = [
        [f"`{name}`", seconds, *([_ratio(seconds, imports_before.get(name))] if commit else [])]
        for name, seconds in imports.items()
    ]
    lines += ["", markdown_table(["", "seconds", *_ratio_column(commit)], rows), ""]
    packages = ("factormix", "torch", "numpy", "scikit-learn", "scipy", "pyod", "pandas")
    option = f" --against {commit}" if commit else ""
    description = describe_machine(1, 1, packages)
    description["command"] = f"`python benchmarks/small.py{option} --write-docs`"
    return "\n".join([*lines, fold_description(description)]) + "\n"


def _tabulate(
    part: str,
    found: Mapping[str, Results],
    before: Mapping[str, Results],
    commit: str | None,
    unit: float = 1.0,
) -> str:
    """Write the table of a part, with ratios to the other commit."""
    name, title = QUALITIES[part]
    average = _median if part == "fits" else _mean
    rows = []
    for method, values in found[part].items():
        seconds = _median(values["seconds"])
        row = [method, unit * seconds, average(values[name])]
        if commit:
            old = before[part].get(method)
            row += ["", ""] if old is None else [
                _ratio(seconds, _median(old["seconds"])), average(old[name])
            ]  # fmt: skip
        rows.append(row)
    other = [*_ratio_column(commit), f"{title} then"] if commit else []
    return markdown_table(["", "ms" if unit > 1 else "seconds", title, *other], rows)


def _tabulate_gaps(results: Results) -> str:
    natural, em = results["natural"], results["em"]
    shapes = list(zip(em["rows"], em["features"], strict=True))
    rows = []
    for n, d in dict.fromkeys(shapes):
        chosen = [shape == (n, d) for shape in shapes]
        columns = natural["score"], em["score"], natural["seconds"], natural["level"], em["seconds"]
        values = [statistics.median(compress(column, chosen)) for column in columns]
        rows.append([f"{n:,} x {d}", *values, _ratio(*values[2::2]), _ratio(*values[3:])])
    names = ["natural", "em", "natural, s", "level, s", "em, s", "natural / em", "level / em"]
    return markdown_table(["", *names], rows)


def _compare_solvers(results: Results) -> str:
    """Count the tables on which a short fit by `natural` is level with `em`, and is faster."""
    levels, seconds = np.array(results["natural"]["level"]), np.array(results["em"]["seconds"])
    return (
        f"`natural` reaches the likelihood of `em` on {np.isfinite(levels).sum()} of"
        f" {len(levels)} tables, and on {(levels < seconds).sum()} in less time than `em` takes."
    )


def _compare_likelihoods(results: Results) -> str:
    """Compare held-out likelihoods with scikit-learn's mixtures, fit by fit."""
    ours, texts = np.array(results[OURS]["score"]), []
    for method, values in results.items():
        if method != OURS:
            other = np.array(values["score"])
            ahead = np.mean(~(other > ours))
            texts.append(f"in {ahead:.0%} of the fits beside `{method}`")
    return f"Our held-out likelihood is at least as high {', and '.join(texts)}."


def _ratio_column(commit: str | None) -> list[str]:
    return [f"/ {commit}"] if commit else []


def _ratio(seconds: float, other: float | None) -> str:
    return "" if other is None else f"{seconds / other:.2f}"


def _judge(seconds: float, goal: float, text: str = "") -> str:
    verdict = "met" if seconds <= goal else "**not met**"
    unit, scale = ("ms", 1e3) if goal < 0.1 else ("s", 1.0)
    found = f"{scale * seconds:.3g} {unit} {text}".rstrip()
    return f"Target, at most {scale * goal:g} {unit}: {verdict}, {found}."


def _median(values: Sequence[float]) -> float:
    return statistics.median(value for value in values if not math.isnan(value))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


if __name__ == "__main__":
    main()
