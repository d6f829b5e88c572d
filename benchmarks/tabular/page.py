"""The page docs/benchmarks-tables.md: every number and every verdict on it is computed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from machine import fold_of

from factormix.studies.harness import Result, folded, median
from factormix.studies.harness import Table as Grid
from tabular import clock
from tabular.data import SCALINGS
from tabular.fits import COMPONENTS_OF_WIDE, FEATURES_OF_FULL, FEATURES_OF_LAST, LAST
from tabular.verdicts import TOLERANCE, Comparison, Score, Table

__all__ = ["compose"]

WORST = 5
"""Cases that are shown first, the others being folded away."""


def compose(
    tables: Sequence[Table],
    timings: Sequence[Result],
    tuned: Sequence[str],
    machine: Mapping[str, str],
    remarks: Sequence[str],
) -> str:
    """Compose the page; ``tuned`` names the tables that the defaults were chosen on."""
    parts = [INTRODUCTION, *remarks, "## Verdict"]
    parts += [*verdict(tables, tuned), *(failures(tables) if tables else [])]
    for scaling in SCALINGS:
        chosen = [table for table in tables if table.scaling == scaling]
        if chosen:
            parts += [f"## {scaling.capitalize()} tables", *by_scaling(chosen, tuned)]
    parts += clock.compose(timings)
    parts += ["## How the comparison is made", METHOD, fold_of(machine)]
    return "\n\n".join(parts) + "\n"


def verdict(tables: Sequence[Table], tuned: Sequence[str]) -> Iterator[str]:
    """Say how many comparisons hold, in each group, and show those that do not."""
    all_of_them = [c for table in tables for c in table.comparisons()]
    if not all_of_them:
        yield "No table is finished yet."
        return
    missed = sorted((c for c in all_of_them if not c.holds), key=lambda c: c.difference)
    judges = [c for c in all_of_them if c.table.name not in tuned]
    yield (
        f"{held(all_of_them)} comparisons hold; of those on tables that only judge,"
        f" {held(judges)}. A comparison is a table, a scaling and a number of components K, and it"
        f" holds if the best l of ours lies at most {TOLERANCE} nats per feature below the better"
        " of scikit-learn's two mixtures at the same K."
    )
    rows = []
    for name, chosen in groups(all_of_them, tuned):
        for scaling in SCALINGS:
            found = [c for c in chosen if c.table.scaling == scaling]
            if not found:
                continue
            ahead = sum(c.difference > 0 for c in found)
            middle = median(c.difference for c in found if math.isfinite(c.difference))
            rows.append([name, scaling, held(found), f"{ahead} of {len(found)}", signed(middle)])
    yield grid(("tables", "scaling", "hold", "ours ahead", "median difference per feature"), rows)
    yield f"The defaults were chosen on {', '.join(tuned)}; all other tables only judge."
    yield worst(missed, tuned)


def groups(
    comparisons: Sequence[Comparison], tuned: Sequence[str]
) -> list[tuple[str, list[Comparison]]]:
    return [
        ("only judge", [c for c in comparisons if c.table.name not in tuned]),
        ("defaults chosen on them", [c for c in comparisons if c.table.name in tuned]),
    ]


def held(comparisons: Sequence[Comparison]) -> str:
    """Count, in bold if some do not hold."""
    count = sum(c.holds for c in comparisons)
    text = f"{count} of {len(comparisons)}"
    return text if count == len(comparisons) else f"**{text}**"


def worst(missed: Sequence[Comparison], tuned: Sequence[str]) -> str:
    """List what does not hold with its reasons, the worst first."""
    if not missed:
        return "All of them hold."
    columns = ("table", "scaling", "K", "ours", "scikit-learn", "per feature", "reason")
    rows = [
        [
            c.table.name + (" (tuned)" if c.table.name in tuned else ""),
            c.table.scaling,
            c.components,
            score(c.ours, "l = "),
            score(c.theirs),
            f"**{signed(c.difference)}**",
            c.reason,
        ]
        for c in missed
    ]
    text = "Those that do not hold, the worst first:\n\n" + grid(columns, rows[:WORST])
    if len(rows) > WORST:
        rest = rows[WORST:]
        text += "\n\n" + folded(f"The other {len(rest)}", grid(columns, rest))
    return text


def failures(tables: Sequence[Table]) -> Iterator[str]:
    """Count the fits without a model, ours in bold."""
    rows = []
    for model in ("MFA", "full", "diag", "FactorAnalysis", "KernelDensity"):
        fits = [fit for table in tables for fit in table.fits(model=model)]
        # Messages that differ in a number are one.
        reasons = Counter(re.sub(r"\d+", "n", f["failure"])[:100] for f in fits if f["failure"])
        count = f"{reasons.total()} of {len(fits)}"
        bold = model == "MFA" and reasons.total()
        most = "; ".join(f"{n} x {text}" for text, n in reasons.most_common(3))
        rows.append([f"**{model}**" if bold else model, f"**{count}**" if bold else count, most])
    yield "Fits that ended without a model:"
    yield grid(("model", "failed", "most frequent messages"), rows)


def by_scaling(tables: Sequence[Table], tuned: Sequence[str]) -> Iterator[str]:
    """Show one compact table, and fold away the long ones."""
    components = sorted({K for table in tables for K in table.components})
    rows = []
    for table in tables:
        cells = {c.components: compact(c) for c in table.comparisons()}
        group = "tuned" if table.name in tuned else "judges"
        found = [cells.get(K, "") for K in components]
        rows.append([table.name, group, f"{table.features:.0f}", table.training_rows, *found])
    yield (
        "Mean held-out log-likelihood: ours (best l) / the better of scikit-learn's (its kind) /"
        " difference per feature, bold where it does not hold."
    )
    columns = ["table", "group", "d", "rows", *(f"K = {K}" for K in components)]
    yield folded("Every table", grid(columns, rows))
    yield folded("Every number of factors, with the seconds of a fit", every_size(tables))
    yield folded("Other densities, and the best of all sizes", other_densities(tables))


def compact(c: Comparison) -> str:
    text = f"{score(c.ours, 'l = ')} / {score(c.theirs)} / {signed(c.difference)}"
    return text if c.holds else f"**{text}**"


def every_size(tables: Sequence[Table]) -> str:
    labels = dict.fromkeys(f["factors"] for table in tables for f in table.fits(model="MFA"))
    ordered = sorted(labels, key=lambda label: (label == LAST, label != LAST and int(label)))
    rows = []
    for table in tables:
        for K in table.components:
            ours = table.scores("MFA", K)
            theirs = table.scores("full", K) | table.scores("diag", K)
            cells = [timed(ours, label, ours=True) for label in ordered]
            cells += [timed(theirs, kind) for kind in ("full", "diag")]
            rows.append([table.name, K, *cells])
    head = ["table", "K", *(f"l = {label}" for label in ordered), "sklearn full", "sklearn diag"]
    return grid(head, rows)


def timed(scores: Mapping[str, Score | None], label: str, ours: bool = False) -> str:
    """Write a score with the seconds of a fit; nothing if it was not tried."""
    if label not in scores:
        return ""
    found = scores[label]
    if found is None:
        return "**no model**" if ours else "no model"
    return f"{found.mean:.2f} ({found.seconds:.2f} s)"


def other_densities(tables: Sequence[Table]) -> str:
    rows = []
    for table in tables:
        rows.append(
            [
                table.name,
                score(table.best_of_all(["MFA"]), "l = "),
                score(table.best_of_all(["full", "diag"])),
                score(table.best(["FactorAnalysis"]), "l = "),
                score(table.best(["KernelDensity"]), None),
            ]
        )
    head = ("table", "ours", "GaussianMixture", "FactorAnalysis", "KernelDensity")
    return grid(head, rows)


def score(found: Score | None, before: str | None = "") -> str:
    """Write a mean and the label of its size; ``before`` None leaves the label out."""
    if found is None:
        return "no model"
    return f"{found.mean:.2f}" + ("" if before is None else f" ({before}{found.label})")


def signed(value: float) -> str:
    return f"{value:+.3f}"


def grid(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[cell if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return Grid("", "", columns, cells).markdown()


INTRODUCTION = """# Benchmarks: ordinary tables

`MFA` with its defaults beside scikit-learn on tables as people have them on their desks: those of
ADBench (inliers only) and those that come with scikit-learn, standardised and raw.
`python benchmarks/tables.py --write-docs` repeats it; it reads ADBench's files from the folder
`adbench` in `FACTORMIX_DATA`."""

METHOD = f"""- Of each table at most a fixed number of rows is used (see the command above), drawn
  with a fixed seed. Columns that are constant in the table are dropped, and in every fold those
  that are constant in its training rows, for all models alike. Standardising uses the training rows
  alone.
- A score is the mean log-likelihood of a held-out fold's rows, and a table's is the mean over the
  folds. The best l, and the better kind of scikit-learn's mixture, are chosen by that same score. A
  size has no model if its fit fails, or has no finite score, on any fold.
- K goes as far as there are two training rows for each component, and to {COMPONENTS_OF_WIDE} where
  the number of features d is above {FEATURES_OF_FULL}. Factors are 0, 1, 2, 5, 10 and
  d - 1 where the number of features d allows; d - 1 is left out where d is above
  {FEATURES_OF_LAST}.
- `GaussianMixture` keeps its defaults; full covariances are left out where d is above
  {FEATURES_OF_FULL}. `KernelDensity` is Gaussian on columns scaled to deviation 1, with Scott's
  bandwidth, corrected by the Jacobian of the scaling.
- Seconds beside scores are medians over the folds, in one thread, with as many fits at a time as
  the command says.
- A column counts as near-discrete if the training rows have at most 20 values in it, or one value
  in at least a quarter of them."""
