"""The page docs/benchmarks-outliers.md: every number and every verdict on it is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from machine import fold_of

from factormix.studies.harness import Result, Table, folded
from outlying import verdicts
from outlying.candidates import CANDIDATES, base, shipped
from outlying.trials import OURS, WIDEST
from outlying.verdicts import Comparison

__all__ = ["compose"]

TITLES = {"novelty": "Novelty: clean training rows", "contaminated": "Contaminated training rows"}
SPLITS = {
    "novelty": "Train on half of the inliers, judge the other half and all outliers.",
    "contaminated": "Fit all rows and judge the same rows.",
}


def compose(
    results: Sequence[Result], machine: Mapping[str, str], remarks: Sequence[str], rows: int
) -> str:
    """Compose the page."""
    parts = [INTRODUCTION, *remarks]
    for mode, title in TITLES.items():
        found = verdicts.compare(results, mode)
        parts += [f"## {title}"]
        parts += list(tables_of(found)) if found else ["No table is finished yet."]
    parts += [*images_of(results), *patches_of(results)]
    parts += ["## How the comparison is made", method(rows), fold_of(machine)]
    return "\n\n".join(parts) + "\n"


def tables_of(found: Comparison) -> Iterator[str]:
    """Tell the verdict of a mode, the candidates, and every table."""
    default = shipped(found.mode) or found.best
    ours, kept = found.chosen, found.candidates[default]
    yield SPLITS[found.mode] + " " + verdict(found, ours)
    ranks_chosen, ranks_kept = found.ranks(ours), found.ranks(kept)
    lines: list[tuple[str | float, ...]] = [
        ("**ours, default chosen on the other tables**", ours.mean(), ranks_chosen[""], "", ""),
        ("ours, the default that is shipped", kept.mean(), ranks_kept[""], "", ""),
    ]
    for name, areas in sorted(found.peers.items(), key=lambda item: -np.nanmean(item[1])):
        low, high = verdicts.interval(ours - areas)
        difference = f"{np.nanmean(ours - areas):+.3f} ({low:+.3f} to {high:+.3f})"
        ahead = verdicts.wins(ours, areas)
        tried = int((~np.isnan(areas)).sum())
        label = name if tried == len(areas) else f"{name} ({tried} tables)"
        lines.append((label, float(np.nanmean(areas)), ranks_chosen[name], difference, ahead))
    columns = ("method", "mean AUC", "mean rank", "ours minus theirs (95%)", "ahead / behind")
    cells = [[a, f"{m:.4f}", f"{r:.2f}", d, w] for a, m, r, d, w in lines]
    yield grid(columns, cells)
    yield candidates_of(found, default)
    yield folded("Every table", every_table(found, kept))
    if found.failures:
        yield folded("Fits that failed", "\n".join(f"- {text}" for text in found.failures))


def verdict(found: Comparison, ours: np.ndarray) -> str:
    """Say whether the goals are met; the best peer is the one that comes closest to ours."""
    best = min(found.peers, key=lambda name: np.nanmean(ours - found.peers[name]))
    tried = ~np.isnan(found.peers[best])
    mine, theirs = ours[tried].mean(), found.peers[best][tried].mean()
    low, high = verdicts.interval(ours - found.peers[best])
    ranks = found.ranks(ours)
    first = min(ranks, key=lambda name: ranks[name])
    where = "" if tried.all() else f", on the {tried.sum()} tables that it was tried on, {mine:.4f}"
    text = (
        f"Our mean area under the ROC curve over {len(found.tables)} tables is {ours.mean():.4f}"
        f"{where}, {'above' if mine > theirs else 'not above'} that of the best peer, {best}"
        f" ({theirs:.4f}); the difference is {mine - theirs:+.4f}, with a paired bootstrap interval"
        f" over tables of {low:+.4f} to {high:+.4f}."
    )
    if found.mode == "novelty":
        text += (
            f" Our mean rank is {ranks['']:.2f}, the best of all."
            if first == ""
            else f" Our mean rank is {ranks['']:.2f}; the best is {first}'s, {ranks[first]:.2f}."
        )
    return text


def candidates_of(found: Comparison, default: str) -> str:
    """List the settings that the default was chosen among."""
    chosen = Counter(found.choices)
    lines = [
        [name + (" (shipped)" if name == default else ""), f"{areas.mean():.4f}", chosen[name]]
        for name, areas in sorted(found.candidates.items(), key=lambda item: -item[1].mean())
    ]
    return folded(
        "The settings that the default was chosen among",
        grid(("kinds of mixtures", "mean AUC", "tables it was chosen for"), lines)
        + "\n\n"
        + recipes(found.mode),
    )


def recipes(mode: str) -> str:
    """Describe the kinds of a mode by their numbers."""
    kinds = {k: name for name, ks in CANDIDATES[mode].items() if len(ks) == 1 for k in ks}
    every = dict.fromkeys(k for ks in CANDIDATES[mode].values() for k in ks)
    lines = [
        [
            kinds.get(kind, "") or names_of(mode, kind),
            f"{kind.floor:.3g}",
            kind.rows_per_component,
            kind.most_components,
            kind.n_factors,
        ]
        for kind in every
    ]
    recipe = base(mode)
    parts = (
        f"{recipe.n_parts} folds"
        if recipe.rows_per_part is None
        else f"{recipe.n_parts} draws of {recipe.rows_per_part} rows, components up to"
        f" {recipe.kept_weight:.0%} of the weight"
    )
    columns = ("kind", "variance floor", "rows per component", "most components", "factors")
    return f"Each is trained on {parts}.\n\n" + grid(columns, lines)


def names_of(mode: str, kind: object) -> str:
    """Find the word that stands for a kind in the names of the candidates."""
    for name, kinds in CANDIDATES[mode].items():
        words = name.split(" + ")
        if len(words) == len(kinds) and kind in kinds:
            return words[kinds.index(kind)]
    return ""


def every_table(found: Comparison, kept: np.ndarray) -> str:
    peers = sorted(found.peers, key=lambda name: -np.nanmean(found.peers[name]))
    lines = [
        [
            table,
            *(
                f"{a[i]:.3f}".replace("nan", "")
                for a in (found.chosen, kept, *(found.peers[p] for p in peers))
            ),
        ]
        for i, table in enumerate(found.tables)
    ]
    return grid(("table", "ours, left out", "ours, shipped", *peers), lines)


def images_of(results: Sequence[Result]) -> Iterator[str]:
    """Tell the areas of each class held out of the image sets."""
    for dataset in ("mnist", "fashion-mnist"):
        areas = verdicts.mean_areas(results, dataset)
        if not areas:
            continue
        sizes = next(one for one in results if one.trial.experiment == "images").trial.settings
        yield f"## A class of {dataset} held out"
        yield (
            f"Train on {sizes['train_rows']:,} images of the other nine classes, judge"
            f" {sizes['judged_rows']:,} test images of all ten, one seed. `factormix` is the"
            " detector with `novelty=True`, `MFA` the paper's mixture of 25 components and 4"
            " factors with precisions up to 20. Pixels are as they are, in [0, 1]."
        )
        ordered = sorted(areas.items(), key=lambda item: -float(np.mean(item[1])))
        lines = [
            [name, *(f"{area:.3f}" for area in found), f"**{np.mean(found):.3f}**"]
            for name, found in ordered
        ]
        yield grid(("method", *map(str, range(10)), "mean"), lines)


def patches_of(results: Sequence[Result]) -> Iterator[str]:
    """Tell how often a pasted patch holds the lowest contributions."""
    for one in results:
        if one.trial.experiment != "patches":
            continue
        settings = one.trial.settings
        yield "## Reasons: a patch pasted into MNIST"
        yield (
            f"A patch of 4 x 4 pixels, each 0 or 1 at random, is pasted somewhere into each of"
            f" {settings['judged_rows']:,} test images; the models are trained on"
            f" {settings['train_rows']:,} clean images. Share of images in which the lowest"
            " contribution lies in the patch. `MFA` has 49 components, 32 factors and precisions"
            " up to 10; `factormix` is the detector with `novelty=True`, which standardises each"
            " pixel, so that a rare pixel of a stroke stands out as much as the patch:"
        )
        yield grid(
            ("model", "share"), [[name, f"{share:.1%}"] for name, share in one.values.items()]
        )


def method(rows: int) -> str:
    left_out = "; ".join(
        f"{name} is not tried on tables of more than {widest} columns, where a fit takes many"
        " minutes, and is compared on the others"
        for name, widest in WIDEST.items()
    )
    return f"""- Of each table at most {rows:,} rows are used, drawn by the seed with the table's
  own share of outliers, or at least 30 of them. Areas are means over the seeds.
- Columns are standardised by the training rows, and those that are constant in them left out, for
  all methods alike. PyOD's detectors keep their defaults. One that fails counts as chance,
  {verdicts.CHANCE}.
- {left_out}.
- Our setting is chosen among those listed, in each mode. For the first line of a table each of
  ADBench's tables is judged by the setting with the best mean over all *other* tables; the second
  line is the default of the library, the best over all of them, so that it has seen what it is
  judged by. The kinds themselves were found on these tables too, on one seed and fewer rows: what
  the choice among them cannot show, the first line cannot either.
- Intervals are those of the mean over tables, by {verdicts.DRAWS:,} draws of tables with
  replacement. Ranks are among all methods; equal areas share a rank.
- `{OURS}` and the peers have one thread each."""


def grid(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[cell if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return Table("", "", columns, cells).markdown()


INTRODUCTION = """# Benchmarks: outliers

`MFAOutlierDetector` with one fixed default for each mode, beside the detectors of PyOD, on the
tables of ADBench; each class of MNIST and FashionMNIST held out; and whether reasons point at what
was changed. `python benchmarks/outliers.py --write-docs` repeats it; it reads ADBench's files from
the folder `adbench` in `FACTORMIX_DATA`, and needs the extra `pyod`."""
