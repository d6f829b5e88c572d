"""The page docs/benchmarks.md: results by setting and method, targets, pictures and prose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import fold_description, save_picture
from harness import Store, Table, Trial, median
from pages import markdown_fold
from quality_methods import FLOORS, METHODS
from quality_problems import EM_ITERATIONS, FLOOR, NOTES, Point, Setting, compute_median_curve

from factormix.views.plotting.drawing import INK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
ONE_PASS_SHARE, ONE_PASS_TIME, FIVE_PASS_TIME = 0.99, 0.1, 1 / 3
IN_USE = 0.98
LARGE = {1: 950.0, 3: 970.0}
"""Held-out log-likelihood on FashionMNIST with K = 1600, by the number of passes."""
TRUE_SHARE, MATCHED = 0.005, 0.95
FAR = 0.4
"""A method that ends further below the best, as a share of its value, is not drawn."""
AXES = {"seconds": "seconds of training", "passes": "passes over the data"}


def compose_page(
    settings: Sequence[Setting],
    groups: Mapping[str, Mapping[str, Group]],
    lines: Sequence[Target],
    machine: Mapping[str, str],
    figures: Mapping[str, str],
    left_out: Sequence[str] = (),
) -> str:
    """Compose the page.

    ``figures`` maps names of settings to addresses of pictures; ``left_out`` has a sentence for
    each method that could not run.
    """
    parts = [INTRODUCTION, *left_out, "## Verdict", *_verdict(lines)]
    for setting in settings:
        found = groups.get(setting.name)
        if not found:
            continue
        parts += [f"## {setting.title}", _data_line(found)]
        if setting.name in figures:
            parts.append(f"![Log-likelihood, {setting.title}]({figures[setting.name]})")
        parts.append(markdown_fold("Numbers", tabulate_summary(setting, found).markdown()))
    floors = [[f"`{name}`", text] for name, text in FLOORS.items()]
    parts += ["## How the comparison is made", METHOD]
    parts.append(Table("floors", "", ("method", "variance floor"), floors).markdown())
    parts.append(fold_description(machine))
    return "\n\n".join(parts) + "\n"


def _verdict(lines: Sequence[Target]) -> Iterator[str]:
    """Count the targets by verdict, show the ones not met, and fold the whole list."""
    counts = Counter(line.verdict.strip("*") for line in lines)
    counted = ", ".join(f"{n} {word}" for word, n in counts.most_common())
    yield f"**Of {len(lines)} targets: {counted}.** {TARGETS}"
    missed = [line for line in lines if line.met is False]
    if missed:
        yield tabulate_targets(missed).markdown()
    yield markdown_fold(f"All {len(lines)} targets", tabulate_targets(lines).markdown())


def _data_line(groups: Mapping[str, Group]) -> str:
    first = next(r for g in groups.values() for r in g.results)
    seeds = {len(g.results) for g in groups.values()}
    count = f"{min(seeds)}"
    if len(seeds) > 1:
        count += f", {max(seeds)} for the natural solver"
    line = (
        f"{first.rows:,} training rows of {first.features:,} features,"
        f" {first.held_out_rows:,} held out; seeds: {count}."
    )
    if first.true_log_likelihood is not None:
        line += f" The true mixture scores {first.true_log_likelihood:.1f} on the held-out rows."
        shares = {m: g.median(lambda r: r.matched or 0.0) for m, g in groups.items() if g.trained}
        found = ", ".join(f"{METHODS[m].label} {value:.0%}" for m, value in shares.items())
        line += f" Components matched: {found}."
    return line


INTRODUCTION = f"""# Benchmarks

Held-out mean log-likelihood against seconds and against passes over the data, for the solvers of
factormix and for other packages. All methods run on the same rows and the same machine, in the same
hours and with the same number of threads. Their noise variance is at least {FLOOR}
(1/{1 / FLOOR:.0f}) in data units. `make bench` installs the peers and runs everything with its
defaults. [The page on scale](benchmarks-scale.md) has the cost of a step and the memory."""

TARGETS = f"""Numbers are medians over the seeds. EM means `MFA(solver="em")` with {EM_ITERATIONS}
iterations from k-means. Natural means `MFA(solver="natural")` with its defaults, from random
values. Its time to a likelihood is the time of its first checkpoint at or above it."""

METHOD = """- Seconds count training alone, from the call to the checkpoint. The clock stops
  while held-out rows are scored. Starting the process, importing packages and loading data do not
  count.
- One pass reads every training row once. The passes of a k-means start are its iterations and one
  for seeding.
- Every peer starts from the same scikit-learn k-means (one run, k-means++ seeding), whose time
  counts. tgmm and torchgmm have a k-means of their own, which is left out in their favour: tgmm's
  seeding compares every row with all earlier centres for each new one, and torchgmm's reads the
  data 300 times to estimate the variance of the features. Our EM starts from ten passes of its own
  k-means, whose time and passes count as well.
- Peers keep their own defaults for tolerance and number of iterations. A method is stopped when its
  time is up, and its last likelihood is shown; with more time it might reach more. A method without
  a model by then is shown as not finished: its final likelihood is unknown.
- With hundreds of components only Adam and scikit-learn's diagonal mixture run beside our natural
  solver and EM, with three times the budget. The whole benchmark then takes hours, not days. This
  list follows a first run with K = 400 on FashionMNIST: after 40 s neither Adam nor scikit-learn,
  diagonal or full, had a model, and our SGD stood below -3,000.
- SGD takes the paper's steps, but for 15 passes instead of 15 + 50 epochs, and at the common floor,
  E <= 400, instead of E <= 20.
- One scorer judges the models of all methods from their parameters, not by their own functions.
- Components in use have a weight of at least 0.1/K. A component of the synthetic mixture is matched
  if, in the best assignment of means, its mean is closer than a quarter of the distance to the next
  true mean and its weight is right within a factor of 1.5.
- The constants of the natural solver were chosen on a split of the training rows of MNIST and
  FashionMNIST, 8/9 to train and 1/9 to score, and on the synthetic mixture, which is therefore no
  independent test of them. Early versions, with other constants, were also scored on the test rows.
- Adam trains the covariance form `Lambda Lambda' + D` by autograd, in batches of 256, at the best
  of four learning rates in a trial on FashionMNIST, K = 49. The same rate is used for all other
  settings; with K = 400 its likelihood falls from the start.

How each method keeps the common variance floor:"""


@dataclass(frozen=True)
class Result:
    """The result of one trial."""

    plan: dict[str, Any]
    status: str
    """finished; stopped in time, with a model; unfinished, without one; or failed."""
    message: str
    points: list[Point]
    seconds: float
    components_in_use: int | None
    matched: float | None
    true_log_likelihood: float | None
    rows: int
    features: int
    held_out_rows: int
    peak_memory: int


def read_result(store: Store, trial: Trial) -> Result | None:
    """Read the result of a trial, None if it has none."""
    values = store.read(trial)
    try:
        points = [Point(*point) for point in (values or {})["points"]]
        return Result(**{**(values or {}), "plan": dict(trial.settings), "points": points})
    except (TypeError, KeyError):
        return None


@dataclass(frozen=True)
class Group:
    """The results of a method on a setting, one for each seed."""

    method: str
    results: list[Result]

    @property
    def trained(self) -> list[Result]:
        """The results that have a model."""
        return [r for r in self.results if r.points]

    @property
    def log_likelihood(self) -> float:
        """Median of the final held-out mean log-likelihoods; NaN without a model."""
        return self.median(lambda r: r.points[-1].log_likelihood)

    @property
    def seconds(self) -> float:
        """Median of the seconds at the final checkpoints."""
        return self.median(lambda r: r.points[-1].seconds)

    @property
    def message(self) -> str:
        """The remarks beside the numbers, with their frequency."""
        texts = Counter(r.message for r in self.results if r.message)
        n = len(self.results)
        return "; ".join(f"{t} ({m} of {n} seeds)" if m < n else t for t, m in texts.items())

    def median(self, value: Callable[[Result], float]) -> float:
        """Return the median over the seeds that have a model."""
        return median(value(r) for r in self.trained)

    def seconds_until(self, reached: Callable[[Point], bool]) -> float:
        """Return the median seconds of the first checkpoint that satisfies a condition."""
        return median(
            min((p.seconds for p in r.points if reached(p)), default=math.inf) for r in self.trained
        )

    def read_at_passes(self, passes: float) -> tuple[float, float]:
        """Return the median log-likelihood and seconds of the last checkpoint within ``passes``."""
        within = [[p for p in r.points if p.passes <= passes + 1e-6] for r in self.trained]
        last = [points[-1] for points in within if points]
        return median(p.log_likelihood for p in last), median(p.seconds for p in last)


def group_results(results: Iterable[Result]) -> dict[str, dict[str, Group]]:
    """Group results by the name of the setting, then by method, in their order."""
    arranged: dict[str, dict[str, Group]] = {}
    for result in results:
        setting = f"{result.plan['dataset']}-k{result.plan['components']}"
        method = result.plan["method"]
        groups = arranged.setdefault(setting, {})
        groups.setdefault(method, Group(method, [])).results.append(result)
    return arranged


def tabulate_summary(setting: Setting, groups: Mapping[str, Group]) -> Table:
    """Tabulate the final values of all methods on a setting: medians over the seeds."""
    ours = groups.get("natural")
    rows = [_write_summary_row(setting, g, ours) for g in groups.values()]
    return Table("summary", "", SUMMARY_HEAD, rows)


def _write_summary_row(setting: Setting, group: Group, ours: Group | None) -> list[str]:
    label = METHODS[group.method].label
    if not group.trained:
        return [label, "", "", "", "", "", "", group.message]
    reached = ""
    if ours is not None and group.method not in ("natural", "natural-1"):
        first = ours.seconds_until(lambda p: p.log_likelihood >= group.log_likelihood)
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


def tabulate_targets(lines: Iterable[Target]) -> Table:
    """Tabulate targets."""
    rows = [[t.where, t.target, t.measured, t.verdict, t.note] for t in lines]
    return Table("targets", "", ("data", "target", "measured", "verdict", "note"), rows)


def tabulate_trials(results: Iterable[Result]) -> Table:
    """Tabulate the trials, one in each row."""
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


def tabulate_curves(results: Iterable[Result]) -> Table:
    """Tabulate the checkpoints, one in each row."""
    plan = ["dataset", "components", "method", "seed"]
    rows = [[*(r.plan[key] for key in plan), *p] for r in results for p in r.points]
    return Table("curves", "", [*plan, "seconds", "passes", "log_likelihood"], rows)


Groups = dict[str, Group]


@dataclass(frozen=True)
class Target:
    """A line of the table."""

    where: str
    target: str
    measured: str
    met: bool | None
    """None if it was not measured."""
    note: str = ""
    word: str = ""
    """The verdict, if it is none of the usual ones."""

    @property
    def verdict(self) -> str:
        return self.word or {True: "met", False: "**not met**", None: "not measured"}[self.met]


def list_targets(setting: Setting, groups: Groups) -> list[Target]:
    """List the targets of a setting."""
    lines: list[Target] = []
    if setting.dataset in ("fashion-mnist", "mnist"):
        if setting.components <= 400:
            lines += compare_with_em(setting, groups)
        lines += check_components_in_use(setting, groups)
    if setting.dataset == "fashion-mnist" and setting.components == 1600:
        lines += check_large_mixture(setting, groups)
    if setting.dataset == "synthetic":
        lines += compare_with_truth(setting, groups)
    return [*lines, *compare_times(setting, groups)]


def compare_with_em(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare one and five passes with EM from k-means."""
    em, ours = groups.get("em"), groups.get("natural")
    once = groups.get("natural-1", ours)
    at_least = f"one pass: at least 99% of the log-likelihood of {EM_ITERATIONS} EM iterations"
    in_time = "one pass: at most 1/10 of that EM's time, k-means included"
    above = "within five passes: above that EM"
    third = "within five passes: above it in at most 1/3 of its time"
    if not (em and em.trained and ours and ours.trained and once):
        yield from (Target(setting.title, t, "", None) for t in (at_least, in_time, above, third))
        return
    reference, em_seconds = em.log_likelihood, em.seconds
    value, seconds = once.read_at_passes(1)
    enough = value >= reference - (1 - ONE_PASS_SHARE) * abs(reference)
    share = f" ({value / reference:.1%})" if reference > 0 else ""
    yield Target(setting.title, at_least, f"{value:.1f} against {reference:.1f}{share}", enough)
    yield Target(
        setting.title,
        in_time,
        f"{seconds:.1f} s against {em_seconds:.1f} s ({seconds / em_seconds:.2f})",
        seconds <= ONE_PASS_TIME * em_seconds,
    )
    value, seconds = ours.read_at_passes(5)
    yield Target(setting.title, above, f"{value:.1f} against {reference:.1f}", value > reference)
    first = ours.seconds_until(lambda p: p.passes <= 5 + 1e-6 and p.log_likelihood > reference)
    measured = "not reached"
    if math.isfinite(first):
        measured = f"{first:.1f} s against {em_seconds:.1f} s ({first / em_seconds:.2f})"
    yield Target(setting.title, third, measured, first <= FIVE_PASS_TIME * em_seconds)


def check_components_in_use(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Count the components of weight 0.1/K or more, in the worst seed."""
    if setting.components > 400:
        return
    trained = groups["natural"].trained if "natural" in groups else []
    text = "components in use, worst seed: at least 98%"
    if not trained:
        yield Target(setting.title, text, "", None)
        return
    worst = min((r.components_in_use or 0) / setting.components for r in trained)
    yield Target(setting.title, text, f"{worst:.1%} of {len(trained)} seeds", worst >= IN_USE)


def check_large_mixture(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare the largest mixture, K = 1600, with fixed numbers."""
    for passes, wanted in LARGE.items():
        found = groups.get("natural-1" if passes == 1 else "natural")
        text = f"log-likelihood within {passes} pass{'es' * (passes > 1)}: at least {wanted:+.0f}"
        if found is None or not found.trained:
            yield Target(setting.title, text, "", None)
            continue
        value, seconds = found.read_at_passes(passes)
        yield Target(setting.title, text, f"{value:+.1f} in {seconds:.1f} s", value >= wanted)


def compare_with_truth(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare with the true mixture of the data."""
    trained = groups["natural"].trained if "natural" in groups else []
    near = "log-likelihood within 0.5% of the true model's"
    matched = "at least 95% of the components matched"
    if not trained or trained[0].true_log_likelihood is None:
        yield from (Target(setting.title, text, "", None) for text in (near, matched))
        return
    true, value = trained[0].true_log_likelihood, groups["natural"].log_likelihood
    gap = (true - value) / abs(true)
    measured = f"{value:.1f} against {true:.1f} ({gap:.2%} below)"
    yield Target(setting.title, near, measured, gap <= TRUE_SHARE)
    share = groups["natural"].median(lambda r: r.matched or 0.0)
    yield Target(setting.title, matched, f"{share:.1%}", share >= MATCHED)


def compare_times(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare the time to every other method's final likelihood."""
    ours = groups.get("natural")
    for name, other in groups.items():
        if name in ("natural", "natural-1"):
            continue
        text = f"the final log-likelihood of {METHODS[name].label} sooner than it"
        if ours is None or not ours.trained:
            yield Target(setting.title, text, "", None)
        elif not other.trained:
            # A peer that ran out of time is behind; a crash proves nothing.
            late = all(r.status == "unfinished" for r in other.results)
            measured = f"it has no model: {other.message}; ours ends after {ours.seconds:.1f} s"
            word = "ahead of a peer that did not finish" if late else ""
            yield Target(setting.title, text, measured, None, word=word)
        else:
            yield _compare_time(setting, text, ours, other)


def _compare_time(setting: Setting, text: str, ours: Group, other: Group) -> Target:
    wanted, theirs = other.log_likelihood, other.seconds
    first = ours.seconds_until(lambda p: p.log_likelihood >= wanted)
    measured = f"{ours.log_likelihood:.1f} of {wanted:.1f}: not reached"
    if math.isfinite(first):
        measured = f"{wanted:.1f} at {first:.2f} s against {theirs:.2f} s"
        if ours.log_likelihood < wanted:
            measured += f", but ours ends at {ours.log_likelihood:.1f}"
    met = first < theirs and ours.log_likelihood >= wanted
    known = NOTES.get((setting.name, other.method)) or METHODS[other.method].why_ahead
    note = "" if met else known or "no reason is known yet"
    return Target(setting.title, text, measured, met, note)


def draw_setting(setting: Setting, groups: Mapping[str, Group], path: Path) -> None:
    """Draw held-out log-likelihood against seconds and against passes."""
    save_picture(_setting_figure(setting, {m: g for m, g in groups.items() if g.trained}), path)


@styled
def _setting_figure(setting: Setting, groups: Mapping[str, Group]) -> Figure:
    from matplotlib.ticker import NullFormatter

    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    floor = choose_lower_limit([g.log_likelihood for g in groups.values()])
    true = next((r.true_log_likelihood for g in groups.values() for r in g.results), None)
    for panel, axis in zip(panels, AXES, strict=True):
        for name, group in groups.items():
            _draw_method(panel, name, group, axis, floor)
        if true is not None:
            panel.axhline(true, color=INK, linewidth=0.8, linestyle=":", label="true model")
        panel.set(xscale="log", xlabel=AXES[axis])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(True)
    panels[0].set(ylabel="held-out mean log-likelihood", title=setting.title)
    if np.isfinite(floor):
        best = max(g.log_likelihood for g in groups.values())
        panels[0].set_ylim(floor, best + 0.08 * (best - floor))
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    return figure


def _draw_method(panel: Any, name: str, group: Group, axis: str, floor: float) -> None:
    method = METHODS[name]
    for result in group.trained:
        at = [getattr(p, axis) for p in result.points]
        values = [p.log_likelihood for p in result.points]
        panel.plot(at, values, color=method.colour, linewidth=0.6, alpha=0.3)
    x, y = compute_median_curve([r.points for r in group.trained], axis)
    below = " (below)" if len(y) and y.max() < floor else ""
    width = 2.2 if name == "natural" else 1.4
    panel.plot(x, y, ".-", color=method.colour, linewidth=width, label=method.label + below)


def choose_lower_limit(finals: Sequence[float]) -> float:
    """Choose the lower end of the axis, so that methods far below do not flatten the others."""
    finals = [value for value in finals if np.isfinite(value)]
    if not finals:
        return float("nan")
    best = max(finals)
    shown = min(value for value in finals if value >= best - FAR * abs(best))
    return shown - max(0.25 * (best - shown), 0.02 * abs(best), 1e-3)
