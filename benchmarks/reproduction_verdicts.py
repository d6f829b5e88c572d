"""Verdicts on the paper's claims, each by a stated rule, and a summary in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import reproduction_table1 as table1
from harness import Result
from reproduction_tables import (
    Spread,
    list_datasets,
    mean_over_classes,
    summarise,
    summarise_auc,
)

from factormix.core.annealing import COLLAPSED

Status = Literal["held", "held with a change", "not found"]

TOLERANCE = 0.02
"""Largest difference from the paper's AUC that still agrees: its table's gap between models."""

VISIBLE = 0.005
"""Smallest difference between two AUCs that counts: a single seed has no standard error."""

RULES = """
- **Training converges**: a run has converged when its smoothing kernel has collapsed, at least \
98% of its components are in use and its test log-likelihood lies within 2% of the mean of all \
runs. A run has levelled off when its last tenth brought less than 5% of its rise in likelihood \
after the first tenth. Each claim is held if this is true of all runs, and held with a change if \
it is true of at least four in five.
- **Grid**: neighbours are similar when they lie nearer than in 99% of random arrangements of the \
same centroids on the grid.
- **Structure** (grid, loading columns, precisions, samples): held if every run meets the stated \
bound; held with a change if at least half of the runs meet it.
- **AUC of Table I**: held if the mean for class 9, E ≤ 20, log-sum-exp score and 100 thresholds \
lies within 2 points, or two standard errors, of the paper's. Held with a change if one single \
other reading of the paper (E ≤ 400, another floor of M, the largest component's score, the exact \
area, or class 0 as the outlier) brings the numbers of GMM and MFA there together; it is named. \
Otherwise not found.
- **MFA better than GMM**: held if its mean for class 9 (100 thresholds) is higher by more than \
half a point and more than the standard error of the difference. Held with a change if that fails \
but the mean of the exact area over all ten held-out classes is higher by more than half a point. \
Otherwise not found. Both are for E ≤ 20.
- **SVHN**: the paper gives no number. Held with a change if the MFA's exact AUC is above 60% for \
both classes held out.
- **Streaming**: detection held if the new class has an AUC above 60% when it appears, with a \
change if that is so for one of the two classes; cost held if the factored covariance form takes \
at least 1.1 times as long to score, with a change if only the dense one does.
"""


@dataclass(frozen=True)
class Finding:
    """A claim, its verdict and the numbers behind it."""

    claim: str
    status: Status
    number: str
    about: str = ""
    """Data set, and solver if there are several; "" if the claim is about none."""

    @property
    def full_claim(self) -> str:
        """The claim with what it is about."""
        return f"{self.about}: {self.claim}" if self.about else self.claim


def judge_share(passed: Sequence[bool], enough: float = 0.5) -> Status:
    """Judge a claim about every run by the share of runs that meet it."""
    if all(passed):
        return "held"
    return "held with a change" if np.mean(passed) >= enough else "not found"


def agrees(found: Spread, paper: float) -> bool:
    """Return whether a mean lies within the tolerance, or two standard errors, of the paper's."""
    return abs(found.mean - paper) <= max(TOLERANCE, 2 * found.error)


def judge_auc(
    paper: float, main: Spread, others: Mapping[str, Spread]
) -> tuple[Status, str | None]:
    """Judge an AUC by the paper's own case, then by the named others; name the one that agrees."""
    if agrees(main, paper):
        return "held", None
    near = {name: abs(s.mean - paper) for name, s in others.items() if agrees(s, paper)}
    return ("held with a change", min(near, key=near.__getitem__)) if near else ("not found", None)


def judge_better(
    mfa: Spread, gmm: Spread, mean_mfa: float | None, mean_gmm: float | None
) -> Status:
    """Judge whether the MFA is ahead for the paper's class, else on average over all classes."""
    if mfa.mean - gmm.mean > max(VISIBLE, float(np.hypot(mfa.error, gmm.error))):
        return "held"
    ahead = mean_mfa is not None and mean_gmm is not None and mean_mfa - mean_gmm > VISIBLE
    return "held with a change" if ahead else "not found"


def judge_claims(results: Sequence[Result]) -> list[Finding]:
    """Judge all claims for which there are results."""
    by_name = {
        name: [one for one in results if one.trial.experiment == name]
        for name in ("figure1", "table1", "svhn", "streaming")
    }
    found: list[Finding] = []
    for dataset in list_datasets(by_name["figure1"]):
        runs = [r for r in by_name["figure1"] if r["dataset"] == dataset]
        found += [*_judge_convergence(runs, dataset), *_judge_structure(runs, dataset)]
    for dataset in list_datasets(by_name["table1"]):
        found += _judge_table1(by_name["table1"], dataset)
    found += _judge_svhn(by_name["svhn"])
    found += _judge_streaming(by_name["streaming"])
    return found


def _judge_convergence(runs: Sequence[Result], about: str) -> Iterator[Finding]:
    used = [r["components_in_use"] for r in runs]
    fewest, most = min(used), max(used)
    scores = [r["test_log_likelihood"] for r in runs]
    mean = np.mean(scores)
    converged = [
        r["sigma"] < COLLAPSED
        and r["components_in_use"] >= 0.98 * r["n_components"]
        and abs(r["test_log_likelihood"] - mean) <= 0.02 * abs(mean)
        for r in runs
    ]
    likelihoods = summarise(scores)
    yield Finding(
        "training from random values always converges",
        judge_share(converged, 0.8),
        f"{sum(converged)} of {len(runs)} runs; last kernel width"
        f" {max(r['sigma'] for r in runs):.2f};"
        f" {fewest if fewest == most else f'{fewest} to {most}'} of {runs[0]['n_components']}"
        f" components in use; test log-likelihood {likelihoods.text() if likelihoods else ''}",
        about,
    )
    rises = [r["late_rise"] for r in runs]
    level = [abs(rise) < 0.05 for rise in rises]
    yield Finding(
        "the likelihood has levelled off by the last epoch",
        judge_share(level, 0.8),
        f"{sum(level)} of {len(runs)} runs; the last tenth brought"
        f" {100 * np.mean(rises):.1f}% of the rise",
        about,
    )


def _judge_structure(runs: Sequence[Result], about: str) -> Iterator[Finding]:
    values = {
        name: np.array([r[name] for r in runs])
        for name in (
            "neighbour_ratio",
            "neighbour_chance",
            "column_cosine",
            "column_strengths",
            "share_18_20",
            "sample_spread",
        )
    }
    mean = {name: each.mean(axis=0) for name, each in values.items()}
    claims: dict[str, tuple[Any, str]] = {
        "neighbouring components are similar": (
            values["neighbour_chance"] < 0.01,
            f"distance {mean['neighbour_ratio']:.2f} of the mean of all pairs; at most"
            f" {100 * values['neighbour_chance'].max():.1f}% of random arrangements are as near",
        ),
        "loading columns are distinct (mean |cosine| below 0.2)": (
            values["column_cosine"] < 0.2,
            f"mean |cosine| {mean['column_cosine']:.3f}",
        ),
        "loading columns become weaker from first to last": (
            (np.diff(values["column_strengths"], axis=1) < 0).all(axis=1),
            "mean norms " + ", ".join(f"{norm:.2f}" for norm in mean["column_strengths"]),
        ),
        "precisions lie between 18 and 20 (at least 90% of them)": (
            values["share_18_20"] >= 0.9,
            f"{100 * mean['share_18_20']:.0f}% do",
        ),
        "samples of one component differ in shape (typical distance, without noise, above 0.1 of"
        " that between centroids)": (
            values["sample_spread"] > 0.1,
            f"ratio {mean['sample_spread']:.2f}",
        ),
    }
    for claim, (passed, number) in claims.items():
        yield Finding(claim, judge_share(passed), number, about)


def _judge_table1(runs: Sequence[Result], dataset: str) -> Iterator[Finding]:
    mains = {model: summarise_auc(runs, dataset, model, 9) for model in table1.MODELS}
    papers = {m: p for m in mains if (p := table1.PAPER.get((dataset, m))) is not None}
    readings = _collect_readings(runs, dataset)
    for model, paper in papers.items():
        main = mains[model]
        if main is None:
            continue
        fitting = {
            name: found[model] for name, found in readings.items() if _all_agree(found, papers)
        }
        status, change = judge_auc(paper, main, fitting)
        number = main.text(100)
        if change is not None:
            number += f"; {fitting[change].text(100)} with {change}"
        elif status == "not found":
            known = {name: found[model] for name, found in readings.items() if model in found}
            closest = min(known, key=lambda name: abs(known[name].mean - paper), default=None)
            if closest is not None:
                number += f"; closest other reading: {known[closest].text(100)} with {closest}"
        claim = f"the {model}'s AUC for class 9 is {100 * paper:.1f}%"
        yield Finding(claim, status, number, dataset)
    gmm, mfa = mains["GMM"], mains["MFA"]
    if gmm is None or mfa is None:
        return
    means = [mean_over_classes(runs, dataset, model) for model in ("MFA", "GMM")]
    number = f"class 9: {mfa.text(100)} against {gmm.text(100)}"
    if means[0] is not None and means[1] is not None:
        number += f"; mean of ten classes: {100 * means[0]:.1f} against {100 * means[1]:.1f}"
    claim = "the MFA is slightly better than a GMM of the same K"
    yield Finding(claim, judge_better(mfa, gmm, *means), number, dataset)


def _all_agree(found: Mapping[str, Spread], papers: Mapping[str, float]) -> bool:
    """Return whether one reading brings every model's number to the paper's."""
    return all(model in found and agrees(found[model], paper) for model, paper in papers.items())


def _collect_readings(runs: Sequence[Result], dataset: str) -> dict[str, dict[str, Spread]]:
    """Gather, by model, the rows that differ from the paper's own case in one thing."""
    bound, wide, floor = table1.VARIANTS
    cases = {
        wide: (9, wide, "log-sum-exp", "thresholds"),
        floor: (9, floor, "log-sum-exp", "thresholds"),
        "the largest component's score": (9, bound, "max-component", "thresholds"),
        "the exact area": (9, bound, "log-sum-exp", "rank"),
        "class 0 held out": (0, bound, "log-sum-exp", "thresholds"),
    }
    found: dict[str, dict[str, Spread]] = {}
    for name, case in cases.items():
        for model in table1.MODELS:
            value = summarise_auc(runs, dataset, model, *case)
            # A GMM has no M, so another floor does not change it.
            if value is None and name == floor and model == "GMM":
                value = summarise_auc(runs, dataset, model, 9)
            if value is not None:
                found.setdefault(name, {})[model] = value
    return found


def _judge_svhn(runs: Sequence[Result]) -> Iterator[Finding]:
    found = {c: summarise_auc(runs, "svhn", "MFA", c, area="rank") for c in table1.MAIN_CLASSES}
    known = {c: value for c, value in found.items() if value is not None}
    if known:
        good = len(known) == len(found) and all(value.mean > 0.6 for value in known.values())
        status: Status = "held with a change" if good else "not found"
        number = "; ".join(f"class {c}: {value.text(100)}" for c, value in known.items())
        yield Finding("an MFA on SVHN detects outliers (abstract)", status, number, "svhn")


def _judge_streaming(runs: Sequence[Result]) -> Iterator[Finding]:
    for dataset in list_datasets(runs):
        for solver in dict.fromkeys(r["solver"] for r in runs):
            chosen = [r for r in runs if r["dataset"] == dataset and r["solver"] == solver]
            first = {r["new_class"]: a for r in chosen if (a := _find_first_auc(r)) is not None}
            if first:
                yield Finding(
                    "evaluate-then-train notices a new class",
                    judge_share([value > 0.6 for value in first.values()]),
                    "AUC when it appears: "
                    + ", ".join(f"class {c} {100 * v:.1f}%" for c, v in first.items()),
                    f"{dataset}, {solver}",
                )
    if runs:
        factored, dense = (
            float(np.median([r["costs"][way] / r["costs"]["precision"] for r in runs]))
            for way in ("factored", "dense")
        )
        yield Finding(
            "the precision form is cheaper to keep ready for scoring than a covariance",
            judge_cost(factored, dense),
            f"factored covariance {factored:.2f} times, dense {dense:.0f} times as long",
        )


def judge_cost(factored: float, dense: float) -> Status:
    """Judge the cost of scoring after an update, in multiples of the precision form's."""
    if factored >= 1.1:
        return "held"
    return "held with a change" if dense >= 1.1 else "not found"


def _find_first_auc(run: Result) -> float | None:
    return next((w["auc"] for w in run["windows"] if w["auc"] is not None), None)


def write_summary(findings: Sequence[Finding]) -> str:
    """Count the verdicts, and list the claims by verdict with what each is about."""
    number = Counter(one.status for one in findings)
    lines = [
        f"**Of {len(findings)} claims {number['held']} held, {number['held with a change']} held"
        f" with a change, and {number['not found']} were not found.**\n"
    ]
    for status in get_args(Status):
        claims: dict[str, list[str]] = {}
        for one in findings:
            if one.status == status:
                claims.setdefault(one.claim, []).append(one.about)
        for claim, about in claims.items():
            where = f" ({'; '.join(about)})" if any(about) else ""
            lines.append(f"- {status.capitalize()}: {claim}{where}.")
    return "\n".join(lines)
