"""The section on seconds: small fits and a pass over images, alone and beside a busy process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from factormix.studies.harness import Result, Table, median
from tabular.seconds import (
    CONDITIONS,
    FACTORS,
    IMAGES,
    MOST_COMPONENTS,
    MOST_FEATURES,
    MOST_ROWS,
)

__all__ = ["compose"]

ENOUGH = 0.06
"""Seconds that a small fit may take, in the median, in one warm thread."""

SLOWER = 1.5
"""Times that of one thread that a fit may take beside a busy process, with default threads."""

ALONE, _, BUSY = CONDITIONS


def compose(results: Sequence[Result]) -> Iterator[str]:
    """Write the section, as far as it was measured."""
    small = {r["condition"]: r for r in results if r.trial.name.startswith("small")}
    passes = {r["condition"]: r for r in results if r.trial.name.startswith("pass")}
    if not results:
        return
    yield "## Seconds"
    if small:
        yield from small_fits(small)
    if passes:
        yield from one_pass(passes)


def small_fits(found: Mapping[str, Result]) -> Iterator[str]:
    """Compare the median seconds of small fits under each condition."""
    tables = dict.fromkeys(fit["table"] for r in found.values() for fit in r["fits"])
    yield (
        f"Small fits: standardised tables of at most {MOST_ROWS:,} rows and {MOST_FEATURES}"
        f" features ({', '.join(tables)}), K up to {MOST_COMPONENTS}, l = {FACTORS}. Medians over"
        " all of them, in milliseconds."
    )
    alone = middle(found[ALONE], "MFA") if ALONE in found else math.nan
    rows = []
    for condition, result in found.items():
        times = [middle(result, model) for model in ("MFA", "full", "diag")]
        ratio = f"{times[0] / alone:.2f}"
        cells = [f"{1000 * seconds:.1f}" for seconds in times]
        rows.append([condition, result["torch_threads"], *cells, ratio, failed(result)])
    columns = ["", "threads of torch", "ours", "sklearn full", "sklearn diag"]
    columns += ["ours / ours in one thread alone", "our fits without a model"]
    yield Table("", "", columns, rows).markdown()
    yield target(f"a small fit takes at most {1000 * ENOUGH:.0f} ms in one warm thread",
                 alone <= ENOUGH, f"{1000 * alone:.1f} ms")  # fmt: skip
    if BUSY in found:
        yield slowdown("small fits", middle(found[BUSY], "MFA") / alone)


def one_pass(found: Mapping[str, Result]) -> Iterator[str]:
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
        yield slowdown("one pass", found[BUSY]["seconds"] / alone)


def middle(result: Result, model: str) -> float:
    """Return the median seconds of the fits that have a model."""
    return median(fit[model] for fit in result["fits"] if fit[model] is not None)


def failed(result: Result) -> str:
    count = sum(fit["MFA"] is None for fit in result["fits"])
    return f"**{count}**" if count else "0"


def slowdown(what: str, ratio: float) -> str:
    text = f"{what} beside a busy process, with default threads: at most {SLOWER} times as long as"
    return target(f"{text} in one thread alone", ratio <= SLOWER, f"{ratio:.2f} times")


def target(text: str, met: bool, measured: str) -> str:
    return f"Target, {text}: {'met' if met else '**not met**'}, {measured}."
