"""Results as CSV files and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from methods import METHODS
from results import Group, Result
from settings import Setting
from targets import Target

from factormix.files import replacing

__all__ = [
    "curves_csv",
    "markdown",
    "summary",
    "summary_csv",
    "target_table",
    "targets_csv",
    "write",
]

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
TARGET_HEAD = ("data", "target", "measured", "", "note")


def write(path: Path, text: str) -> None:
    """Write a text file, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        Path(temporary).write_text(text)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines
    )


def summary(setting: Setting, groups: Mapping[str, Group]) -> str:
    """Lay out the final values of all methods on a setting; medians over the seeds."""
    ours = groups.get("natural")
    return markdown(SUMMARY_HEAD, [_summary_row(setting, g, ours) for g in groups.values()])


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


def target_table(lines: Iterable[Target]) -> str:
    """Lay out targets."""
    rows = [[t.where, t.target, t.measured, t.verdict, t.note] for t in lines]
    return markdown(TARGET_HEAD, rows)


def summary_csv(results: Iterable[Result]) -> str:
    """Return a line for each unit."""
    head = ["dataset", "components", "factors", "method", "seed", "status", "log_likelihood"]
    head += ["seconds", "passes", "components_in_use", "matched", "peak_memory", "message"]
    rows = []
    for r in results:
        last = r.points[-1] if r.points else None
        rows.append(
            [
                *(r.plan[key] for key in head[:5]),
                r.status,
                *((last.log_likelihood, last.seconds, last.passes) if last else ("", "", "")),
                r.components_in_use,
                r.matched,
                r.peak_memory,
                r.message,
            ]
        )
    return _csv(head, rows)


def curves_csv(results: Iterable[Result]) -> str:
    """Return a line for each checkpoint."""
    head = ["dataset", "components", "method", "seed", "seconds", "passes", "log_likelihood"]
    rows = [[*(r.plan[key] for key in head[:4]), *p] for r in results for p in r.points]
    return _csv(head, rows)


def targets_csv(lines: Iterable[Target]) -> str:
    """Return a line for each target."""
    rows = [[t.where, t.target, t.measured, t.verdict.strip("*"), t.note] for t in lines]
    return _csv(["data", "target", "measured", "verdict", "note"], rows)


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
