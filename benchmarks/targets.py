"""What the benchmark must show, computed from its results: one line for each target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from methods import METHODS
from results import Group
from settings import EM_ITERATIONS, NOTES, Setting

__all__ = ["Target", "targets"]

Groups = dict[str, Group]

ONE_PASS_SHARE, ONE_PASS_TIME, FIVE_PASS_TIME = 0.99, 0.1, 1 / 3
IN_USE = 0.98
LARGE = {1: 950.0, 3: 970.0}
"""Held-out log-likelihood on FashionMNIST with K = 1600 after so many passes."""
TRUE_SHARE, MATCHED = 0.005, 0.95


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
    """The verdict when it is none of the usual."""

    @property
    def verdict(self) -> str:
        return self.word or {True: "met", False: "**not met**", None: "not measured"}[self.met]


def targets(setting: Setting, groups: Groups) -> list[Target]:
    """Return the lines of a setting."""
    lines: list[Target] = []
    if setting.dataset in ("fashion-mnist", "mnist"):
        if setting.components <= 400:
            lines += against_em(setting, groups)
        lines += in_use(setting, groups)
    if setting.dataset == "fashion-mnist" and setting.components == 1600:
        lines += large(setting, groups)
    if setting.dataset == "synthetic":
        lines += truth(setting, groups)
    return [*lines, *sooner(setting, groups)]


def against_em(setting: Setting, groups: Groups) -> Iterator[Target]:
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
    value, seconds = once.at_passes(1)
    enough = value >= reference - (1 - ONE_PASS_SHARE) * abs(reference)
    share = f" ({value / reference:.1%})" if reference > 0 else ""
    yield Target(setting.title, at_least, f"{value:.1f} against {reference:.1f}{share}", enough)
    yield Target(
        setting.title,
        in_time,
        f"{seconds:.1f} s against {em_seconds:.1f} s ({seconds / em_seconds:.2f})",
        seconds <= ONE_PASS_TIME * em_seconds,
    )
    value, seconds = ours.at_passes(5)
    yield Target(setting.title, above, f"{value:.1f} against {reference:.1f}", value > reference)
    first = ours.first_at(lambda p: p.passes <= 5 + 1e-6 and p.log_likelihood > reference)
    measured = "not reached"
    if math.isfinite(first):
        measured = f"{first:.1f} s against {em_seconds:.1f} s ({first / em_seconds:.2f})"
    yield Target(setting.title, third, measured, first <= FIVE_PASS_TIME * em_seconds)


def in_use(setting: Setting, groups: Groups) -> Iterator[Target]:
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


def large(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare K = 1600 with fixed numbers."""
    for passes, wanted in LARGE.items():
        found = groups.get("natural-1" if passes == 1 else "natural")
        text = f"log-likelihood within {passes} pass{'es' * (passes > 1)}: at least {wanted:+.0f}"
        if found is None or not found.trained:
            yield Target(setting.title, text, "", None)
            continue
        value, seconds = found.at_passes(passes)
        yield Target(setting.title, text, f"{value:+.1f} in {seconds:.1f} s", value >= wanted)


def truth(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare with the mixture that the data was drawn from."""
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


def sooner(setting: Setting, groups: Groups) -> Iterator[Target]:
    """Compare the time to every other method's final likelihood."""
    ours = groups.get("natural")
    for name, other in groups.items():
        if name in ("natural", "natural-1"):
            continue
        text = f"the final log-likelihood of {METHODS[name].label} sooner than it"
        if ours is None or not ours.trained:
            yield Target(setting.title, text, "", None)
        elif not other.trained:
            # Out of time is ahead; a crash, here or there, is nothing.
            late = all(r.status == "unfinished" for r in other.results)
            measured = f"it has no model: {other.message}; ours ends after {ours.seconds:.1f} s"
            word = "ahead, its end unknown" if late else ""
            yield Target(setting.title, text, measured, None, word=word)
        else:
            yield _race(setting, text, ours, other)


def _race(setting: Setting, text: str, ours: Group, other: Group) -> Target:
    wanted, theirs = other.log_likelihood, other.seconds
    first = ours.first_at(lambda p: p.log_likelihood >= wanted)
    measured = f"{ours.log_likelihood:.1f} of {wanted:.1f}: not reached"
    if math.isfinite(first):
        measured = f"{wanted:.1f} at {first:.2f} s against {theirs:.2f} s"
        if ours.log_likelihood < wanted:
            measured += f", but ours ends at {ours.log_likelihood:.1f}"
    met = first < theirs and ours.log_likelihood >= wanted
    known = NOTES.get((setting.name, other.method)) or METHODS[other.method].why_ahead
    note = "" if met else known or "no reason is known yet"
    return Target(setting.title, text, measured, met, note)
