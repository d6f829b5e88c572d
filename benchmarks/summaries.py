"""Results as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from methods import METHODS
from results import Group, Result
from settings import Setting
from targets import Target

from factormix.studies.harness import Table

__all__ = ["curve_table", "summary", "target_table", "trial_table"]

SUMMARY_HEAD = (
    "method",
    "held-out log-likelihood",
    "seconds",
    "passes",
    "natural is there after",
    "components in use",
    "peak memory",
    "",
)


def summary(setting: Setting, groups: Mapping[str, Group]) -> Table:
    """Lay out the final values of all methods on a setting; medians over the seeds."""
    ours = groups.get("natural")
    rows = [_summary_row(setting, g, ours) for g in groups.values()]
    return Table("summary", "", SUMMARY_HEAD, rows)


def _summary_row(setting: Setting, group: Group, ours: Group | None) -> list[str]:
    label = METHODS[group.method].label
    if not group.trained:
        return [label, "", "", "", "", "", "", group.message]
    reached = ""
    if ours is not None and group.method not in ("natural", "natural-1"):
        first = ours.first_at(lambda p: p.log_likelihood >= group.log_likelihood)
        reached = f"{first:.2f} s" if math.isfinite(first) else "not reached"
    used = group.median(lambda r: r.components_in_use or 0)
    return [
        label,
        f"{group.log_likelihood:.1f}",
        f"{group.seconds:.1f}",
        f"{group.median(lambda r: r.points[-1].passes):.3g}",
        reached,
        f"{used:.0f} of {setting.components}",
        f"{group.median(lambda r: r.peak_memory) / 2**20:.0f} MiB",
        group.message,
    ]


def target_table(lines: Iterable[Target]) -> Table:
    """Lay out targets."""
    rows = [[t.where, t.target, t.measured, t.verdict, t.note] for t in lines]
    return Table("targets", "", ("data", "target", "measured", "verdict", "note"), rows)


def trial_table(results: Iterable[Result]) -> Table:
    """List the trials, one in each row."""
    plan = ["dataset", "components", "factors", "method", "seed"]
    rows = []
    for r in results:
        last = r.points[-1] if r.points else None
        rows.append(
            [
                *(r.plan[key] for key in plan),
                r.status,
                *((last.log_likelihood, last.seconds, last.passes) if last else ("", "", "")),
                r.components_in_use,
                r.matched,
                r.peak_memory,
                r.message,
            ]
        )
    columns = [*plan, "status", "log_likelihood", "seconds", "passes", "components_in_use"]
    return Table("trials", "", [*columns, "matched", "peak_memory", "message"], rows)


def curve_table(results: Iterable[Result]) -> Table:
    """List the checkpoints, one in each row."""
    plan = ["dataset", "components", "method", "seed"]
    rows = [[*(r.plan[key] for key in plan), *p] for r in results for p in r.points]
    return Table("curves", "", [*plan, "seconds", "passes", "log_likelihood"], rows)
