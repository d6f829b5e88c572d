"""The page docs/benchmarks-tables.md: every number and every verdict on it is computed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from common import fold_description
from harness import Result, Table, median
from pages import markdown_fold
from tables_trials import (
    COMPONENTS_OF_WIDE,
    CONDITIONS,
    FEATURES_OF_FULL,
    FEATURES_OF_LAST,
    IMAGES,
    LAST,
    LEAST_VARIANCE,
    MOST_COMPONENTS,
    MOST_FEATURES,
    MOST_ROWS,
    SCALINGS,
    TIMED_FACTORS,
)

WORST = 5
"""Number of cases before the fold."""

ENOUGH = 0.06
"""Largest median seconds of a small fit in one warm thread."""
SLOWER = 1.5
"""Largest ratio of the time beside a busy process, with default threads, to one thread alone."""
ALONE, _, BUSY = CONDITIONS
TOLERANCE = 0.05
"""Nats per feature that our best may lie below the better of scikit-learn's mixtures."""
Fit = Mapping[str, Any]


def compose_page(
    tables: Sequence[ScaledTable],
    unbounded: Sequence[Result],
    timings: Sequence[Result],
    tuned: Sequence[str],
    machine: Mapping[str, str],
    remarks: Sequence[str],
) -> str:
    """Compose the page; ``tuned`` are the names of the tables that the defaults were chosen on."""
    parts = [INTRODUCTION, *remarks, "## Verdict"]
    parts += [*judge(tables, tuned), *(count_failures(tables) if tables else [])]
    for scaling in SCALINGS:
        chosen = [table for table in tables if table.scaling == scaling]
        if chosen:
            parts += [f"## {scaling.capitalize()} tables", *list_scaling(chosen, tuned)]
    parts += [*compare_unbounded(tables, unbounded), *compose_seconds(timings)]
    parts += ["## How the comparison is made", METHOD, fold_description(machine)]
    return "\n\n".join(parts) + "\n"


def judge(tables: Sequence[ScaledTable], tuned: Sequence[str]) -> Iterator[str]:
    """Count the comparisons that hold, in each group, and show the others."""
    all_of_them = [c for table in tables for c in table.comparisons()]
    if not all_of_them:
        yield "No table is finished yet."
        return
    missed = sorted((c for c in all_of_them if not c.holds), key=lambda c: c.difference)
    judges = [c for c in all_of_them if c.table.name not in tuned]
    yield (
        f"{count_held(all_of_them)} comparisons hold; on test tables,"
        f" {count_held(judges)}. A comparison is a table, a scaling and a number of components K."
        f" It holds if our best l lies at most {TOLERANCE} nats per feature below the better"
        " of scikit-learn's two mixtures at the same K."
    )
    rows = []
    for name, chosen in split_groups(all_of_them, tuned):
        for scaling in SCALINGS:
            found = [c for c in chosen if c.table.scaling == scaling]
            if not found:
                continue
            ahead = sum(c.difference > 0 for c in found)
            middle = median(c.difference for c in found if math.isfinite(c.difference))
            rows.append(
                [name, scaling, count_held(found), f"{ahead} of {len(found)}", write_signed(middle)]
            )
    yield write_table(
        ("tables", "scaling", "hold", "ours ahead", "median difference per feature"), rows
    )
    yield f"The defaults were chosen on {', '.join(tuned)}; all other tables are for testing."
    yield list_missed(missed, tuned)


def split_groups(
    comparisons: Sequence[Comparison], tuned: Sequence[str]
) -> list[tuple[str, list[Comparison]]]:
    return [
        ("test", [c for c in comparisons if c.table.name not in tuned]),
        ("tuning", [c for c in comparisons if c.table.name in tuned]),
    ]


def count_held(comparisons: Sequence[Comparison]) -> str:
    """Count the comparisons that hold, in bold if some do not."""
    count = sum(c.holds for c in comparisons)
    text = f"{count} of {len(comparisons)}"
    return text if count == len(comparisons) else f"**{text}**"


def list_missed(missed: Sequence[Comparison], tuned: Sequence[str]) -> str:
    """List the comparisons that do not hold with their reasons, the worst first."""
    if not missed:
        return "All comparisons hold."
    columns = ("table", "scaling", "K", "ours", "scikit-learn", "per feature", "reason")
    rows = [
        [
            c.table.name + (" (tuning)" if c.table.name in tuned else ""),
            c.table.scaling,
            c.components,
            write_score(c.ours, "l = "),
            write_score(c.theirs),
            f"**{write_signed(c.difference)}**",
            c.reason,
        ]
        for c in missed
    ]
    text = "The comparisons that do not hold, the worst first:\n\n" + write_table(
        columns, rows[:WORST]
    )
    if len(rows) > WORST:
        rest = rows[WORST:]
        text += "\n\n" + markdown_fold(f"The other {len(rest)}", write_table(columns, rest))
    return text


def count_failures(tables: Sequence[ScaledTable]) -> Iterator[str]:
    """Count the fits without a model, ours in bold."""
    rows = []
    for model in ("MFA", "full", "diag", "FactorAnalysis", "KernelDensity"):
        fits = [fit for table in tables for fit in table.fits(model=model)]
        # Messages that differ only in a number count as one.
        reasons = Counter(re.sub(r"\d+", "n", f["failure"])[:100] for f in fits if f["failure"])
        count = f"{reasons.total()} of {len(fits)}"
        bold = model == "MFA" and reasons.total()
        most = "; ".join(f"{n} x {text}" for text, n in reasons.most_common(3))
        rows.append([f"**{model}**" if bold else model, f"**{count}**" if bold else count, most])
    yield "Fits that ended without a model:"
    yield write_table(("model", "failed", "most frequent messages"), rows)


def list_scaling(tables: Sequence[ScaledTable], tuned: Sequence[str]) -> Iterator[str]:
    """Show one compact table, and fold away the long ones."""
    components = sorted({K for table in tables for K in table.components})
    rows = []
    for table in tables:
        cells = {c.components: write_comparison(c) for c in table.comparisons()}
        group = "tuning" if table.name in tuned else "test"
        found = [cells.get(K, "") for K in components]
        rows.append([table.name, group, f"{table.features:.0f}", table.training_rows, *found])
    yield (
        "Mean held-out log-likelihood: ours (best l) / the better of scikit-learn's (its kind) /"
        " difference per feature, bold where it does not hold."
    )
    columns = ["table", "group", "d", "rows", *(f"K = {K}" for K in components)]
    yield markdown_fold("Every table", write_table(columns, rows))
    yield markdown_fold("Every number of factors, with the seconds of a fit", list_sizes(tables))
    yield markdown_fold("Other densities, and the best of all sizes", list_other_densities(tables))


def write_comparison(c: Comparison) -> str:
    text = f"{write_score(c.ours, 'l = ')} / {write_score(c.theirs)} / {write_signed(c.difference)}"
    return text if c.holds else f"**{text}**"


def list_sizes(tables: Sequence[ScaledTable]) -> str:
    labels = dict.fromkeys(f["factors"] for table in tables for f in table.fits(model="MFA"))
    ordered = sorted(labels, key=lambda label: (label == LAST, label != LAST and int(label)))
    rows = []
    for table in tables:
        for K in table.components:
            ours = table.scores("MFA", K)
            theirs = table.scores("full", K) | table.scores("diag", K)
            cells = [write_timed(ours, label, ours=True) for label in ordered]
            cells += [write_timed(theirs, kind) for kind in ("full", "diag")]
            rows.append([table.name, K, *cells])
    head = ["table", "K", *(f"l = {label}" for label in ordered), "sklearn full", "sklearn diag"]
    return write_table(head, rows)


def write_timed(scores: Mapping[str, Score | None], label: str, ours: bool = False) -> str:
    """Write a score with the seconds of a fit; nothing if there was no fit."""
    if label not in scores:
        return ""
    found = scores[label]
    if found is None:
        return "**no model**" if ours else "no model"
    return f"{found.mean:.2f} ({found.seconds:.2f} s)"


def list_other_densities(tables: Sequence[ScaledTable]) -> str:
    rows = []
    for table in tables:
        rows.append(
            [
                table.name,
                write_score(table.best_of_all(["MFA"]), "l = "),
                write_score(table.best_of_all(["full", "diag"])),
                write_score(table.best(["FactorAnalysis"]), "l = "),
                write_score(table.best(["KernelDensity"]), None),
            ]
        )
    head = ("table", "ours", "GaussianMixture", "FactorAnalysis", "KernelDensity")
    return write_table(head, rows)


def write_score(found: Score | None, before: str | None = "") -> str:
    """Write a mean and the label of its size; ``before`` None leaves the label out."""
    if found is None:
        return "no model"
    return f"{found.mean:.2f}" + ("" if before is None else f" ({before}{found.label})")


def write_signed(value: float) -> str:
    return f"{value:+.3f}"


def write_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[cell if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return Table("", "", columns, cells).markdown()


INTRODUCTION = """# Benchmarks: ordinary tables

`MFA` with its defaults beside scikit-learn on ordinary tables: ADBench's (inliers only) and the
ones that come with scikit-learn, standardised and raw. `python benchmarks/tables.py --write-docs`
repeats it. It reads ADBench's files from the folder `adbench` in `FACTORMIX_DATA`."""

UNBOUNDED = f"""Standardised tables with columns of few values, on which [the
defaults](benchmarks-defaults.md) are behind `GaussianMixture`. `MFA` bounds its density there by
one over the step between values. Without this bound, its least variance is that of
`GaussianMixture`, by `max_precision={1 / LEAST_VARIANCE:_.0f}`; data, sizes and seeds are the same.
The gain is the difference between our best scores, its median over K."""

METHOD = f"""- A fixed number of rows of each table is used at most (see the command), drawn with a
fixed seed. Columns that are constant in the table, or in the training rows of a fold, are dropped
for all models alike. Standardising uses the training rows alone.
- A score is the mean log-likelihood of the rows of a held-out fold, and the score of a table is the
  mean over its folds. The best l, and the better kind of scikit-learn's mixture, are chosen by that
  same score. A size has no model if its fit fails, or has no finite score, on any fold.
- K is limited to two training rows for each component, and to {COMPONENTS_OF_WIDE} where the number
  of features d is above {FEATURES_OF_FULL}. Factors are 0, 1, 2, 5, 10 and d - 1 where d allows;
  d - 1 is left out where d is above {FEATURES_OF_LAST}.
- `GaussianMixture` keeps its defaults; full covariances are left out where d is above
  {FEATURES_OF_FULL}. `KernelDensity` is Gaussian on columns scaled to deviation 1, with Scott's
  bandwidth, corrected by the Jacobian of the scaling.
- Seconds beside scores are medians over the folds, in one thread. The command gives the number of
  concurrent fits.
- A column counts as near-discrete if the training rows have at most 20 values in it, or one value
  in at least a quarter of them. There the likelihood of `GaussianMixture` has no bound: a component
  may sit on one value. `MFA` bounds the density by one over the step between values, and so stays
  below it on tables of whole numbers; [the page of defaults](benchmarks-defaults.md) compares both
  with this bound."""


def compare_unbounded(tables: Sequence[ScaledTable], unbounded: Sequence[Result]) -> Iterator[str]:
    """Compare tables of few values with themselves, without the bound on our density."""
    rows, details, compared = [], [], list[tuple[Comparison, Comparison]]()
    for table in tables:
        free = table.replace_ours(unbounded)
        if free is None:
            continue
        pairs = list(zip(table.comparisons(), free.comparisons(), strict=True))
        compared += pairs
        known = [(a.ours.mean, b.ours.mean) for a, b in pairs if a.ours and b.ours]
        gain = median((b - a) / table.features for a, b in known)
        held = [count_held(each) for each in zip(*pairs, strict=True)]
        rows.append([table.name, *held, write_signed(gain)])
        details += [
            [
                table.name,
                a.components,
                write_score(a.ours, "l = "),
                write_score(b.ours, "l = "),
                write_score(a.theirs),
            ]
            for a, b in pairs
        ]
    if not rows:
        return
    yield "## Without the bound on the density"
    names = ",".join(str(row[0]) for row in rows)
    yield f"{UNBOUNDED} `python benchmarks/tables.py --tables {names}` gives these figures alone."
    held, held_free = (count_held(each) for each in zip(*compared, strict=True))
    yield f"With the bound, {held} comparisons hold; without it, {held_free}."
    columns = ("table", "hold with the bound", "hold without", "median gain per feature without")
    yield write_table(columns, rows)
    columns = ("table", "K", "ours with the bound", "ours without", "scikit-learn")
    yield markdown_fold("Every number of components", write_table(columns, details))


def compose_seconds(results: Sequence[Result]) -> Iterator[str]:
    """Compose the section on seconds from the finished measurements."""
    small = {r["condition"]: r for r in results if r.trial.name.startswith("small")}
    passes = {r["condition"]: r for r in results if r.trial.name.startswith("pass")}
    if not results:
        return
    yield "## Seconds"
    if small:
        yield from describe_small_fits(small)
    if passes:
        yield from describe_pass(passes)


def describe_small_fits(found: Mapping[str, Result]) -> Iterator[str]:
    """Compare the median seconds of small fits under each condition."""
    tables = dict.fromkeys(fit["table"] for r in found.values() for fit in r["fits"])
    yield (
        f"Small fits: standardised tables of at most {MOST_ROWS:,} rows and {MOST_FEATURES}"
        f" features ({', '.join(tables)}), K up to {MOST_COMPONENTS}, l = {TIMED_FACTORS}. Medians"
        " over all of them, in milliseconds."
    )
    alone = median_seconds(found[ALONE], "MFA") if ALONE in found else math.nan
    rows = []
    for condition, result in found.items():
        times = [median_seconds(result, model) for model in ("MFA", "full", "diag")]
        ratio = f"{times[0] / alone:.2f}"
        cells = [f"{1000 * seconds:.1f}" for seconds in times]
        rows.append([condition, result["torch_threads"], *cells, ratio, count_failed(result)])
    columns = ["", "threads of torch", "ours", "sklearn full", "sklearn diag"]
    columns += ["ours / ours in one thread alone", "our fits without a model"]
    yield Table("", "", columns, rows).markdown()
    yield write_target(f"a small fit takes at most {1000 * ENOUGH:.0f} ms in one warm thread",
                 alone <= ENOUGH, f"{1000 * alone:.1f} ms")  # fmt: skip
    if BUSY in found:
        yield judge_slowdown("small fits", median_seconds(found[BUSY], "MFA") / alone)


def describe_pass(found: Mapping[str, Result]) -> Iterator[str]:
    """Compare the seconds of one pass under each condition."""
    yield f"One pass over {IMAGES.title}:"
    alone = found[ALONE]["seconds"] if ALONE in found else math.nan
    rows = [
        [condition, r["torch_threads"], f"{r['seconds']:.2f}", f"{r['seconds'] / alone:.2f}",
         f"{r['log_likelihood']:.1f}"]
        for condition, r in found.items()
    ]  # fmt: skip
    columns = ("", "threads of torch", "seconds", "/ one thread alone", "held-out log-likelihood")
    yield Table("", "", columns, rows).markdown()
    if BUSY in found:
        yield judge_slowdown("one pass", found[BUSY]["seconds"] / alone)


def median_seconds(result: Result, model: str) -> float:
    """Return the median seconds of the fits that have a model."""
    return median(fit[model] for fit in result["fits"] if fit[model] is not None)


def count_failed(result: Result) -> str:
    count = sum(fit["MFA"] is None for fit in result["fits"])
    return f"**{count}**" if count else "0"


def judge_slowdown(what: str, ratio: float) -> str:
    text = f"{what} beside a busy process, with default threads: at most {SLOWER} times as long as"
    return write_target(f"{text} in one thread alone", ratio <= SLOWER, f"{ratio:.2f} times")


def write_target(text: str, met: bool, measured: str) -> str:
    return f"Target, {text}: {'met' if met else '**not met**'}, {measured}."


@dataclass(frozen=True)
class Score:
    """A model of one size on all folds."""

    label: str
    folds: tuple[float, ...]
    """Mean held-out log-likelihood of each fold."""
    seconds: float
    """Median of a fit."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.folds))


@dataclass(frozen=True)
class ScaledTable:
    """All folds of a table in one scaling."""

    name: str
    scaling: str
    folds: tuple[Mapping[str, Any], ...]

    @property
    def features(self) -> float:
        """Mean number of columns that vary in the training rows of a fold."""
        return float(np.mean([fold["features"] for fold in self.folds]))

    @property
    def training_rows(self) -> int:
        return int(min(fold["training_rows"] for fold in self.folds))

    @property
    def components(self) -> list[int]:
        """The numbers of components that were tried."""
        found = {f["components"] for f in self.fits() if f.get("components")}
        return sorted(found)

    def fits(self, **wanted: Any) -> list[Fit]:
        """List the fits of all folds that match."""
        return [
            fit
            for fold in self.folds
            for fit in fold["fits"]
            if all(fit.get(key) == value for key, value in wanted.items())
        ]

    def scores(self, model: str, components: int | None = None) -> dict[str, Score | None]:
        """Score every size of a model, by its label; None where a fold has no model."""
        fits = self.fits(model=model, components=components)
        labels = dict.fromkeys(fit.get("factors", model) for fit in fits)
        found: dict[str, Score | None] = {}
        for label in labels:
            chosen = [fit for fit in fits if fit.get("factors", model) == label]
            whole = len(chosen) == len(self.folds) and not any(f["failure"] for f in chosen)
            found[label] = (
                Score(
                    label,
                    tuple(fit["score"] for fit in chosen),
                    median(fit["seconds"] for fit in chosen),
                )
                if whole
                else None
            )
        return found

    def best(self, models: Iterable[str], components: int | None = None) -> Score | None:
        """Choose the size with the highest mean; None if no size has a model on all folds."""
        found = [s for m in models for s in self.scores(m, components).values() if s is not None]
        return max(found, key=lambda score: score.mean, default=None)

    def best_of_all(self, models: Sequence[str]) -> Score | None:
        """Choose among all numbers of components too."""
        found = [self.best(models, K) for K in self.components]
        known = [score for score in found if score is not None]
        return max(known, key=lambda score: score.mean, default=None)

    def replace_ours(self, results: Sequence[Result]) -> ScaledTable | None:
        """Replace our fits by others; None if they are not there for all folds."""
        key = self.name, self.scaling
        fits = {r["fold"]: r["fits"] for r in results if (r["table"], r["scaling"]) == key}
        if len(fits) < len(self.folds):
            return None
        folds = [
            {**fold, "fits": [*fits[i], *(fit for fit in fold["fits"] if fit["model"] != "MFA")]}
            for i, fold in enumerate(self.folds)
        ]
        return replace(self, folds=tuple(folds))

    def comparisons(self) -> list[Comparison]:
        """Compare at every number of components."""
        return [Comparison(self, K) for K in self.components]


@dataclass(frozen=True)
class Comparison:
    """Ours and theirs at one number of components."""

    table: ScaledTable
    components: int

    @cached_property
    def ours(self) -> Score | None:
        return self.table.best(["MFA"], self.components)

    @cached_property
    def theirs(self) -> Score | None:
        return self.table.best(["full", "diag"], self.components)

    @cached_property
    def per_fold(self) -> list[float]:
        """Our lead in each fold, in nats per feature."""
        if self.ours is None or self.theirs is None:
            return []
        pairs = zip(self.ours.folds, self.theirs.folds, self.table.folds, strict=True)
        return [(a - b) / fold["features"] for a, b, fold in pairs]

    @property
    def difference(self) -> float:
        """Our mean lead: minus infinity if only they have a model, infinity if only we do."""
        if self.ours is None:
            return -math.inf
        return float(np.mean(self.per_fold)) if self.per_fold else math.inf

    @property
    def holds(self) -> bool:
        return self.difference >= -TOLERANCE

    @property
    def reason(self) -> str:
        """The visible reasons why the comparison does not hold."""
        if self.holds:
            return ""
        if self.ours is None or self.theirs is None:
            return "ours has no model: " + self._failure()
        parts = [
            self._one_fold(),
            self._richer(),
            self._dependent(),
            self._few_rows(),
            self._discrete(),
        ]
        return "; ".join(filter(None, parts)) or "none of the usual reasons applies"

    def _failure(self) -> str:
        failed = [
            f for f in self.table.fits(model="MFA", components=self.components) if f["failure"]
        ]
        return failed[0]["failure"] if failed else "no number of factors was run on all folds"

    def _one_fold(self) -> str:
        worst = int(np.argmin(self.per_fold))
        rest = [value for number, value in enumerate(self.per_fold) if number != worst]
        if not rest or float(np.mean(rest)) < -TOLERANCE or self.ours is None:
            return ""
        return f"one fold alone: fold {worst + 1} at {self.ours.folds[worst]:.1f}"

    def _richer(self) -> str:
        if self.theirs is None or self.theirs.label != "full":
            return ""
        labels = self.table.scores("MFA", self.components)
        if LAST not in labels and self.table.features - 1 > max(int(l) for l in labels):
            most = max(int(l) for l in labels)
            return f"theirs has full covariances, ours has at most {most} factors"
        return "theirs has full covariances"

    def _dependent(self) -> str:
        count = max(fold["dependent_columns"] for fold in self.table.folds)
        if not count or self.theirs is None or self.theirs.label != "full":
            return ""
        # Their smallest variance is 1e-6 in any units; ours is the rounding of the values.
        return (
            f"{count} of {self.table.features:.0f} columns follow exactly from others, and theirs"
            " are more certain of it than the rounding of the values allows"
        )

    def _few_rows(self) -> str:
        share = self.table.training_rows / self.components
        if share >= 2 * self.table.features:
            return ""
        return f"{share:.0f} training rows for a component of {self.table.features:.0f} features"

    def _discrete(self) -> str:
        count = max(fold["discrete_columns"] for fold in self.table.folds)
        return f"{count} of {self.table.features:.0f} columns are near-discrete" if count else ""


def gather_tables(results: Sequence[Result]) -> list[ScaledTable]:
    """Gather the tables with all folds finished, in their order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        found.setdefault((one["table"], one["scaling"]), []).append(one)
    return [
        ScaledTable(name, scaling, tuple(r.values for r in sorted(folds, key=lambda r: r["fold"])))
        for (name, scaling), folds in found.items()
        if len(folds) == folds[0]["folds"]
    ]
