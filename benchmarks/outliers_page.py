"""The page docs/benchmarks-outliers.md: every number and every verdict on it is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from common import fold_description
from harness import Result, Table
from numpy.typing import NDArray
from outliers_trials import CANDIDATES, OURS, WIDEST, default_recipe, name_default
from pages import markdown_fold
from scipy.stats import rankdata

TITLES = {"novelty": "Novelty: clean training rows", "contaminated": "Contaminated training rows"}
SPLITS = {
    "novelty": "Train on half of the inliers, judge the other half and all outliers.",
    "contaminated": "Fit all rows and judge the same rows.",
}

CHANCE = 0.5
"""The area of a detector that fails."""
DRAWS = 10_000
Array = NDArray[np.float64]


def compose_page(
    results: Sequence[Result], machine: Mapping[str, str], remarks: Sequence[str], rows: int
) -> str:
    """Compose the page."""
    parts = [INTRODUCTION, *remarks]
    for mode, title in TITLES.items():
        found = compare_methods(results, mode)
        parts += [f"## {title}"]
        parts += list(describe_mode(found)) if found else ["No table is finished yet."]
    parts += [*describe_images(results), *describe_patches(results)]
    parts += ["## How the comparison is made", describe_method(rows), fold_description(machine)]
    return "\n\n".join(parts) + "\n"


def describe_mode(found: Comparison) -> Iterator[str]:
    """Write the verdict of a mode, its candidates and every table."""
    default = name_default(found.mode) or found.best
    ours, default_areas = found.chosen, found.candidates[default]
    yield SPLITS[found.mode] + " " + judge(found, ours)
    ranks_chosen, ranks_kept = found.ranks(ours), found.ranks(default_areas)
    lines: list[tuple[str | float, ...]] = [
        ("**ours, default chosen on the other tables**", ours.mean(), ranks_chosen[""], "", ""),
        ("ours, the shipped default", default_areas.mean(), ranks_kept[""], "", ""),
    ]
    for name, areas in sorted(found.peers.items(), key=lambda item: -np.nanmean(item[1])):
        low, high = bootstrap_interval(ours - areas)
        difference = f"{np.nanmean(ours - areas):+.3f} ({low:+.3f} to {high:+.3f})"
        ahead = count_wins(ours, areas)
        tried = int((~np.isnan(areas)).sum())
        label = name if tried == len(areas) else f"{name} ({tried} tables)"
        lines.append((label, float(np.nanmean(areas)), ranks_chosen[name], difference, ahead))
    columns = ("method", "mean AUC", "mean rank", "ours minus theirs (95%)", "ahead / behind")
    cells = [[a, f"{m:.4f}", f"{r:.2f}", d, w] for a, m, r, d, w in lines]
    yield write_table(columns, cells)
    yield list_candidates(found, default)
    yield markdown_fold("Every table", list_tables(found, default_areas))
    if found.failures:
        yield markdown_fold("Fits that failed", "\n".join(f"- {text}" for text in found.failures))


def judge(found: Comparison, ours: np.ndarray) -> str:
    """Compare ours with the best peer, the one that comes closest."""
    best = min(found.peers, key=lambda name: np.nanmean(ours - found.peers[name]))
    tried = ~np.isnan(found.peers[best])
    mine, theirs = ours[tried].mean(), found.peers[best][tried].mean()
    low, high = bootstrap_interval(ours - found.peers[best])
    ranks = found.ranks(ours)
    first = min(ranks, key=lambda name: ranks[name])
    where = f", on the {tried.sum()} tables that the peer was run on, {mine:.4f}"
    text = (
        f"Our mean area under the ROC curve over {len(found.tables)} tables is {ours.mean():.4f}"
        f"{'' if tried.all() else where}, {'above' if mine > theirs else 'not above'}"
        f" the best peer's, {best} ({theirs:.4f}). The difference is {mine - theirs:+.4f}, with a"
        f" paired bootstrap interval over tables of {low:+.4f} to {high:+.4f}."
    )
    if found.mode == "novelty":
        best_rank = (
            f"; the best rank is {first}'s, {ranks[first]:.2f}." if first else ", the best of all."
        )
        text += f" Our mean rank is {ranks['']:.2f}{best_rank}"
    return text


def list_candidates(found: Comparison, default: str) -> str:
    """Tabulate the candidates for the default."""
    chosen = Counter(found.choices)
    lines = [
        [name + (" (shipped)" if name == default else ""), f"{areas.mean():.4f}", chosen[name]]
        for name, areas in sorted(found.candidates.items(), key=lambda item: -item[1].mean())
    ]
    return markdown_fold(
        "The candidates for the default",
        write_table(("kinds of mixtures", "mean AUC", "tables it was chosen for"), lines)
        + "\n\n"
        + describe_kinds(found.mode),
    )


def describe_kinds(mode: str) -> str:
    """Tabulate the kinds of mixtures of a mode."""
    kinds = {k: name for name, ks in CANDIDATES[mode].items() if len(ks) == 1 for k in ks}
    every = dict.fromkeys(k for ks in CANDIDATES[mode].values() for k in ks)
    lines = [
        [
            kinds.get(kind, "") or name_kind(mode, kind),
            f"{kind.noise_floor:.3g}",
            kind.rows_per_component,
            kind.max_components,
            kind.n_factors,
        ]
        for kind in every
    ]
    recipe = default_recipe(mode)
    parts = (
        f"{recipe.n_parts} folds"
        if recipe.rows_per_part is None
        else f"{recipe.n_parts} draws of {recipe.rows_per_part} rows, components up to"
        f" {recipe.kept_weight:.0%} of the weight"
    )
    columns = ("kind", "variance floor", "rows per component", "most components", "factors")
    return f"Each is trained on {parts}.\n\n" + write_table(columns, lines)


def name_kind(mode: str, kind: object) -> str:
    """Return the word for a kind in the names of the candidates."""
    for name, kinds in CANDIDATES[mode].items():
        words = name.split(" + ")
        if len(words) == len(kinds) and kind in kinds:
            return words[kinds.index(kind)]
    return ""


def list_tables(found: Comparison, default_areas: np.ndarray) -> str:
    peers = sorted(found.peers, key=lambda name: -np.nanmean(found.peers[name]))
    lines = [
        [
            table,
            *(
                f"{a[i]:.3f}".replace("nan", "")
                for a in (found.chosen, default_areas, *(found.peers[p] for p in peers))
            ),
        ]
        for i, table in enumerate(found.tables)
    ]
    return write_table(("table", "ours, left out", "ours, shipped", *peers), lines)


def describe_images(results: Sequence[Result]) -> Iterator[str]:
    """Tabulate the areas for each held-out class of the image sets."""
    for dataset in ("mnist", "fashion-mnist"):
        areas = list_areas(results, dataset)
        if not areas:
            continue
        sizes = next(one for one in results if one.trial.experiment == "images").trial.settings
        yield f"## A class of {dataset} held out"
        yield (
            f"Train on {sizes['train_rows']:,} images of the other nine classes, judge"
            f" {sizes['judged_rows']:,} test images of all ten, one seed. `factormix` is the"
            " detector with `novelty=True`, `MFA` the paper's mixture of 25 components and 4"
            " factors with precisions up to 20. Pixels in [0, 1] are not rescaled."
        )
        ordered = sorted(areas.items(), key=lambda item: -float(np.mean(item[1])))
        lines = [
            [name, *(f"{area:.3f}" for area in found), f"**{np.mean(found):.3f}**"]
            for name, found in ordered
        ]
        yield write_table(("method", *map(str, range(10)), "mean"), lines)


def describe_patches(results: Sequence[Result]) -> Iterator[str]:
    """Tabulate how often a pasted patch has the lowest contribution."""
    for one in results:
        if one.trial.experiment != "patches":
            continue
        settings = one.trial.settings
        yield "## Reasons: a patch pasted into MNIST"
        yield (
            f"A patch of 4 x 4 pixels, each 0 or 1 at random, is pasted somewhere into each of"
            f" {settings['judged_rows']:,} test images. The models are trained on"
            f" {settings['train_rows']:,} clean images. The table has the share of images in which"
            " the lowest contribution lies in the patch. `MFA` has 49 components, 32 factors and"
            " precisions up to 10; `factormix` is the detector with `novelty=True`, which"
            " standardises each pixel: a rare pixel of a stroke then stands out as much as the"
            " patch."
        )
        yield write_table(
            ("model", "share"), [[name, f"{share:.1%}"] for name, share in one.values.items()]
        )


def describe_method(rows: int) -> str:
    left_out = "; ".join(
        f"{name} is not run on tables of more than {widest} columns, where a fit takes many"
        " minutes; it is compared on the others"
        for name, widest in WIDEST.items()
    )
    return f"""- At most {rows:,} rows of each table are used, drawn by seed, with the table's own
  share of outliers or at least 30 of them. Areas are means over the seeds.
- Columns are standardised by the training rows, and columns that are constant in them are left out,
  for all methods alike. PyOD's detectors keep their defaults. One that fails counts as chance,
  {CHANCE}.
- {left_out}.
- Our setting is chosen among the listed candidates, in each mode. In the first line, each of
  ADBench's tables is judged by the candidate with the best mean over all *other* tables. The second
  line is the default of the library, the best candidate over all tables, so it was chosen on the
  tables that judge it. The kinds themselves were also found on these tables, on one seed and fewer
  rows. The first line does not correct for that.
- Intervals are for the mean over tables, by {DRAWS:,} draws of tables with replacement. Ranks are
  among all methods; equal areas share a rank.
- `{OURS}` and the peers have one thread each."""


def write_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[cell if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return Table("", "", columns, cells).markdown()


INTRODUCTION = """# Benchmarks: outliers

Three comparisons: `MFAOutlierDetector`, with one fixed default for each mode, beside the detectors
of PyOD on the tables of ADBench; each class of MNIST and FashionMNIST held out; and whether
explanations point at pixels that were changed. `python benchmarks/outliers.py --write-docs` repeats
them. It reads ADBench's files from the folder `adbench` in `FACTORMIX_DATA`, and needs the extra
`pyod`."""


@dataclass(frozen=True)
class Comparison:
    """All methods on all tables of one mode; areas are means over the finished seeds."""

    mode: str
    tables: tuple[str, ...]
    candidates: dict[str, Array]
    """By name, (tables,): settings of ours."""
    peers: dict[str, Array]
    """By name, (tables,); NaN where a method was not run."""
    failures: tuple[str, ...]

    @property
    def chosen(self) -> Array:
        """Our areas (tables,), where each table is judged by a setting chosen on the others."""
        return leave_one_out(self.candidates)[0]

    @property
    def choices(self) -> list[str]:
        """The setting that each table is judged by."""
        return leave_one_out(self.candidates)[1]

    @property
    def best(self) -> str:
        """The setting with the highest mean over all tables."""
        return max(self.candidates, key=lambda name: float(self.candidates[name].mean()))

    def ranks(self, ours: Array) -> dict[str, float]:
        """Return the mean rank of each method, ours under the name "": 1 is the best."""
        return mean_ranks({"": ours, **self.peers})


def compare_methods(results: Iterable[Result], mode: str) -> Comparison | None:
    """Gather the tables of a mode that all methods have a result for; None if there is none."""
    ours: dict[str, list[dict[str, float]]] = {}
    theirs: dict[str, dict[str, list[float]]] = {}
    failures: list[str] = []
    for one in results:
        settings = one.trial.settings
        if settings.get("mode") != mode:
            continue
        table = settings["table"]
        if one.trial.experiment == "ours":
            ours.setdefault(table, []).append(one.values["auc"])
            continue
        area, method = one.values["auc"], settings["method"]
        if area is None:
            failures.append(f"{method} on {table}: {one.values['failure']}")
        areas = theirs.setdefault(table, {}).setdefault(method, [])
        areas.append(CHANCE if area is None else area)
    methods = sorted({method for by_method in theirs.values() for method in by_method})
    most = max((len(found) for found in theirs.values()), default=0)
    tables = tuple(t for t in ours if len(theirs.get(t, ())) >= most - 1)
    if not tables:
        return None
    names = list(ours[tables[0]][0])
    return Comparison(
        mode,
        tables,
        {n: np.array([np.mean([run[n] for run in ours[t]]) for t in tables]) for n in names},
        {m: np.array([np.mean(theirs[t].get(m, [np.nan])) for t in tables]) for m in methods},
        tuple(dict.fromkeys(failures)),
    )


def leave_one_out(candidates: dict[str, Array]) -> tuple[Array, list[str]]:
    """Judge each table by the candidate with the highest mean over all other tables."""
    names = list(candidates)
    areas = np.stack([candidates[name] for name in names])
    others = areas.sum(axis=1, keepdims=True) - areas
    winner = others.argmax(axis=0)
    return areas[winner, np.arange(areas.shape[1])], [names[i] for i in winner]


def mean_ranks(areas: dict[str, Array]) -> dict[str, float]:
    """Compute the mean rank over tables, 1 for the highest area; equal areas share theirs."""
    rounded = np.round(np.stack(list(areas.values())), 6)
    mean = np.nanmean(rankdata(-rounded, axis=0, nan_policy="omit"), axis=1)
    return dict(zip(areas, mean.tolist(), strict=True))


def bootstrap_interval(differences: Array, seed: int = 0) -> tuple[float, float]:
    """Compute a 95% bootstrap interval of the mean of paired differences (tables,)."""
    random, differences = np.random.default_rng(seed), differences[~np.isnan(differences)]
    drawn = random.integers(len(differences), size=(DRAWS, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def count_wins(ours: Array, theirs: Array) -> str:
    """Count the tables on which ours is ahead, behind, or level to three digits."""
    difference = np.round(ours - theirs, 3)
    return f"{int((difference > 0).sum())} / {int((difference < 0).sum())}"


def list_areas(results: Sequence[Result], dataset: str) -> dict[str, list[float]]:
    """Return the areas of each method on the classes of an image set, in order of the classes."""
    found: dict[str, dict[int, float]] = {}
    for one in results:
        settings = one.trial.settings
        if one.trial.experiment == "images" and settings["dataset"] == dataset:
            found.setdefault(settings["method"], {})[settings["class"]] = one.values["auc"]
    return {m: [areas[k] for k in sorted(areas)] for m, areas in found.items() if len(areas) == 10}
