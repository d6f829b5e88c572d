"""The page of the benchmark on missing values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from machine import fold_of

from factormix.studies.harness import Result, Table
from incomplete import images, tables

__all__ = ["compose"]


def compose(results: Sequence[Result], planned: int, described: Mapping[str, str]) -> str:
    """Write the page, whatever the results are."""
    filled = [one for one in results if one.trial.experiment == "imputation"]
    trained = {one["kind"]: one for one in results if one.trial.experiment == "images"}
    parts = [
        "# Benchmarks: missing values",
        "",
        "Imputation of tables by `MFAImputer` beside scikit-learn's imputers, and training on",
        "images with 30% of the entries missing. `python benchmarks/missing.py --write-docs`",
        "repeats it; it reads ADBench's files from the folder `adbench` in `FACTORMIX_DATA`.",
        "",
    ]
    if len(results) < planned:
        parts += [f"**{planned - len(results)} of {planned} trials are not finished.**", ""]
    if filled:
        parts += _imputation(filled)
    if len(trained) == len(images.KINDS):
        parts += _images(trained)
    return "\n".join([*parts, fold_of(described)]) + "\n"


def _imputation(results: Sequence[Result]) -> list[str]:
    found = {(one["table"], one["method"]): one for one in results}
    methods = [m for m in tables.METHODS if any(method == m for _, method in found)]
    names = [
        t
        for t in dict.fromkeys(table for table, _ in found)
        if all((t, m) in found for m in methods)
    ]
    if not names:
        return []
    error = {m: np.array([found[t, m]["rmse"] for t in names]) for m in methods}
    seconds = {m: np.array([found[t, m]["seconds"] for t in names]) for m in methods}
    ours = tables.OURS
    others = [m for m in methods if m != ours]
    below = all(error[ours].mean() < error[m].mean() for m in others)
    best = min(error[m].mean() for m in others)
    lines = [
        "## Imputation",
        "",
        f"- The mean error of `{ours}` is {'below' if below else '**not** below'} that of all"
        f" others: {error[ours].mean():.3f} against {best:.3f} of the best of them.",
    ]
    if "MissForest" in methods:
        faster = seconds["MissForest"].sum() / seconds[ours].sum()
        lines.append(
            f"- It takes {1 / faster:.3f} times as long as MissForest ({faster:.0f} times faster)."
        )
    held = sum(found[t, ours]["held"] for t in names)
    missing = sum(found[t, ours]["missing"] for t in names)
    each = [found[t, ours]["held"] / found[t, ours]["missing"] for t in names]
    return [
        *lines,
        f"- Its 90% intervals hold {held / missing:.1%} of the {missing:,} entries, between"
        f" {min(each):.1%} and {max(each):.1%} by table"
        f" ({', '.join(f'{t} {share:.1%}' for t, share in zip(names, each, strict=True))}).",
        "",
        f"{len(names)} tables, inliers only where they are of ADBench, at most"
        f" {found[names[0], ours]['rows']} rows each: two thirds to learn from, of which 30% of the"
        " entries are missing at random, and one third of new rows, of which 30% are to be filled"
        " in. The error is the root of the mean squared difference to what was taken away, in"
        " standard deviations of the training rows. Seconds are those of learning and filling in"
        " together, in one thread, on a machine with other work to do. MissForest is"
        f" `IterativeImputer` with forests of {tables.TREES} trees and {tables.ROUNDS} rounds, and"
        " takes time in proportion to both: with half of the trees it would be about half as slow."
        " All else has its defaults. The recipe of `MFAImputer` was chosen on"
        f" {', '.join(tables.CHOSEN_ON)}, none of which is among these.",
        "",
        Table(
            "errors",
            "",
            ["table", "rows", "columns", *methods],
            [
                [
                    t,
                    int(found[t, ours]["training_rows"]),
                    int(found[t, ours]["features"]),
                    *(
                        _mark(found[t, m]["rmse"], [found[t, n]["rmse"] for n in methods])
                        for m in methods
                    ),
                ]
                for t in names
            ]
            + [
                ["**mean error**", "", "", *(f"**{error[m].mean():.3f}**" for m in methods)],
                ["mean rank", "", "", *(f"{_ranks(error, m):.1f}" for m in methods)],
                ["mean seconds", "", "", *(f"{seconds[m].mean():.2f}" for m in methods)],
            ],
        ).markdown(),
        "",
    ]


def _mark(value: float, all_of_them: Sequence[float]) -> str:
    text = f"{value:.3f}"
    return f"**{text}**" if value == min(all_of_them) else text


def _ranks(error: Mapping[str, np.ndarray], method: str) -> float:
    stacked = np.stack(list(error.values()))
    place = list(error).index(method)
    return float((1 + (stacked < stacked[place]).sum(axis=0)).mean())


def _images(trained: Mapping[str, Result]) -> list[str]:
    complete, gaps, mean = (trained[kind] for kind in images.KINDS)
    lost = (complete["score"] - gaps["score"]) / abs(complete["score"])
    worse = (complete["score"] - mean["score"]) / abs(complete["score"])
    rows = [
        [kind, f"{trained[kind]['score']:.1f}", f"{trained[kind]['seconds']:.0f}"]
        for kind in images.KINDS
    ]
    return [
        "## Training with gaps",
        "",
        f"- With 30% of the entries missing, training comes within {lost:.2%} of complete training"
        f" ({'at most' if lost <= 0.02 else '**more than**'} 2%).",
        f"- With the mean of each pixel in their place it stays {worse:.0%} below.",
        "",
        f"FashionMNIST, classes 0-8, {complete['training_rows']:,} images, K ="
        f" {complete['components']}, l = {complete['factors']}, {complete['epochs']} passes each,"
        " `max_precision=400`, one seed; held-out mean log-likelihood of the complete test images.",
        "",
        Table(
            "images", "", ["training rows", "held-out log-likelihood", "seconds"], rows
        ).markdown(),
        "",
    ]
