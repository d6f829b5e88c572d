"""Very many components: what steps and scores cost, and what it costs in likelihood.

    python benchmarks/many.py                         # steps and images: an hour on one core
    python benchmarks/many.py --quick                 # a try in a minute
    python benchmarks/many.py --parts steps           # the times alone
    python benchmarks/many.py --parts race            # a pass at K = 1,600 against the clock
    python benchmarks/many.py --parts stream          # K = 25,600 on 1,000,000 rows: hours
    python benchmarks/many.py --parts patches --patches DIR --more DIR   # train, val, test.npy

Every trial leaves a result file, so that a run that was stopped goes on. The page has what is
finished. Times of steps are those of the processor, all kinds in turn in one process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import machine
import many_trials

from factormix.files import make_folder, write_whole
from factormix.studies.harness import Result, Store, Table, Trial, read_results, run_trials

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("steps", "images", "race", "stream", "patches")
SIZES = {400: 5, 1600: 5, 6400: 5, 25_600: 5}
"""Components, and how often each kind of step is timed."""
FEW_DIRECTIONS, MANY_DIRECTIONS = 40, 400
"""Of 784, those in which the components of the streams lie: near each other, and far apart."""
TARGETS = {400: 0.6, 1600: 0.3, 6400: 0.12, 25_600: 0.05}
PATCHES = ((100, 62, 2), (400, 62, 2), (4000, 20, 1))
"""Components, factors and passes over the million patches; the last by all components too."""
IN_SCALES = ((100, 11, 62, 2), (400, 11, 62, 2))
MORE_PATCHES = ((1600, 11, 62, 1), (1600, 11, 62, 2))
"""Kinds of components, scales of each, factors and passes over the million patches, and over more
patches of the same photographs."""
FIRST = 100
"""Kinds to begin with where there are several scales."""
BEFORE = 28.7
"""Seconds of a pass at K = 1,600 on FashionMNIST in one thread, in docs/benchmarks.md."""
VAMM = ((400, 961.5, 62), (1600, 945.0, 27))
"""Components, held-out log-likelihood and seconds of VAMM with its published settings."""
PUBLISHED = {
    "Gaussian": 96.7, "RealNVP": 153.3, "MADE-MoG": 153.7, "Deep RNADE": 155.2, "MAF": 155.7,
    "MAF-MoG": 156.4,
}  # fmt: skip


def main() -> None:
    options = parse()
    trials = [] if options.page else [t for part in options.parts for t in plan(part, options)]
    trials = [trial for trial in trials if trial.name.startswith(options.only)]
    store = Store(options.output / "many")
    # What is against the clock takes the cores that the library takes by itself.
    failures = {}
    for threads, race in ((options.threads, False), (None, True)):
        some = [trial for trial in trials if (trial.experiment in ("race", "patches")) is race]
        failures |= run_trials(some, store, options.data, 1, threads=threads, fresh=True)
    for title, failure in failures.items():
        print(f"{title}: {failure}")
    every = [trial for part in PARTS for trial in plan(part, options)]
    text = compose(read_results(every, store), options, options.output / "figures", "figures")
    print(text)
    write_whole(options.output / "many.md", text.encode())
    if options.write_docs:
        docs = ROOT / "docs"
        text = compose(read_results(every, store), options, docs / "benchmarks", "benchmarks")
        write_whole(docs / "benchmarks-many.md", text.encode())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=lambda t: t.split(","), default=["steps", "images"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", help="folder of the image sets")
    parser.add_argument("--patches", type=Path, help="folder of train.npy, val.npy and test.npy")
    parser.add_argument("--more", type=Path, help="folder of more patches of the same images")
    parser.add_argument("--only", default="", help="trials whose names begin so, as 1600 or mnist")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page anew")
    parser.add_argument("--busy", action="store_true", help="say that others used the machine too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks-many.md")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose from {', '.join(PARTS)}")
    if options.quick and options.write_docs:
        parser.error("--quick is too small for docs/benchmarks-many.md: leave out one of the two")
    if "patches" in options.parts and options.patches is None:
        parser.error("--parts patches needs the folder of the patches: give it by --patches")
    make_folder(options.output)
    return options


def plan(part: str, options: argparse.Namespace) -> list[Trial]:
    """List the trials of a part."""
    quick = options.quick
    if part == "steps":
        base = {"d": 40, "l": 2, "B": 600} if quick else {"d": 784, "l": 4, "B": 4000}
        sizes = {60: 1, 900: 1} if quick else SIZES
        return [
            Trial("steps", f"K{K}", {"K": K, "repeats": n, **base}, many_trials.time_steps)
            for K, n in sizes.items()
        ]
    if part == "images":
        sets = ("digits",) if quick else ("fashion-mnist", "mnist")
        return [
            _training("images", {"data": name, "K": K, "l": 4, "passes": 1, "seed": seed,
                                 "candidates": few, "max_precision": 400.0},
                      many_trials.train_images)
            for name in sets
            for K in ((30,) if quick else (400, 1600))
            for few in (("auto", None, 10) if quick else ("auto", None))
            for seed in range(options.seeds)
        ]  # fmt: skip
    if part == "race":
        data, K = ("digits", 30) if quick else ("fashion-mnist", 1600)
        return [
            _training("race", {"data": data, "K": K, "l": 4, "passes": 1, "seed": 0,
                               "candidates": few, "max_precision": 400.0},
                      many_trials.train_images)
            for few in ("auto", None)
        ]  # fmt: skip
    if part == "stream":
        return _streams(quick)
    if options.patches is None:
        return []
    base = {"seed": 0, "rows": 5000 if quick else None, "batch_size": None if quick else 4000}
    found = [
        {"folder": str(options.patches.absolute()), "K": K, "l": l, "passes": n, "candidates": few}
        for K, l, n in (((20, 3, 1),) if quick else PATCHES)
        for few in ("auto", None)
        if few or K == 4000
    ]
    scaled = [(options.patches, one) for one in (((5, 4, 3, 1),) if quick else IN_SCALES)]
    if options.more and not quick:
        scaled += [(options.more, one) for one in MORE_PATCHES]
    found += [
        {"folder": str(folder.absolute()), "K": kinds * n, "l": l, "passes": passes, "scales": n,
         "candidates": None, "first": min(kinds, FIRST)}
        for folder, (kinds, n, l, passes) in scaled
    ]  # fmt: skip
    return [_training("patches", one | base, many_trials.train_patches) for one in found]


def _streams(quick: bool) -> list[Trial]:
    """List long streams: of made mixtures, and of images."""
    size, directions = {"K": 40, "d": 20, "l": 2, "rows": 8000, "B": 400, "true_K": 20}, (4, 20)
    images = {"data": "digits", "l": 2, "rows": 8000, "B": 400}
    if not quick:
        size = {"K": 25_600, "d": 784, "l": 4, "rows": 1_000_000, "B": 4000, "true_K": 5000}
        directions = FEW_DIRECTIONS, MANY_DIRECTIONS
        images = {"data": "mnist", "l": 4, "rows": 1_000_000, "B": 4000}
    made = [
        Trial("stream", f"in-{n}", size | {"directions": n}, many_trials.follow_stream)
        for n in directions
    ]
    return made + [
        Trial("stream", f"images-K{K}", images | {"K": K}, many_trials.follow_images)
        for K in ((20, 40) if quick else (400, 1600, 6400, 25_600))
    ]


def _training(part: str, settings: dict[str, Any], run: Any) -> Trial:
    names = ("data", "K", "l", "candidates", "seed")
    names += ("scales", "passes") if "scales" in settings else ()
    name = "-".join(str(settings[n]) for n in names if n in settings)
    return Trial(part, name, settings, run)


def compose(
    results: Sequence[Result], options: argparse.Namespace, folder: Path, pictures: str
) -> str:
    """Compose the page of what is finished."""
    parts = ["# Benchmarks: very many components", INTRODUCTION]
    if options.busy:
        parts.append(BUSY)
    by = {part: [r for r in results if r.trial.experiment == part] for part in PARTS}
    if by["steps"]:
        parts += steps_section(by["steps"], folder, pictures)
    if by["images"]:
        parts += ["## Held-out likelihood on images", IMAGES, image_table(by["images"])]
    if by["race"]:
        parts += ["## One pass against the clock", RACE, race_table(by["race"])]
    if by["stream"]:
        parts += ["## A long stream", *stream_section(by["stream"])]
    if by["patches"]:
        parts += ["## Image patches", PATCH_TEXT, patch_table(by["patches"])]
    open_parts = [part for part in PARTS if not by[part]]
    if open_parts:
        parts.append(f"Not run yet: {', '.join(open_parts)}.")
    parts.append(machine.fold_of(machine.describe(options.threads)))
    return "\n\n".join(parts) + "\n"


def steps_section(results: Sequence[Result], folder: Path, pictures: str) -> list[str]:
    head = ("K", "dense step, s", "step, s", "ratio", "wanted", "dense scoring, s", "scoring, s",
            "ratio", "candidates", "nats lost")  # fmt: skip
    lines = [
        [r["K"], r["dense_step"], r["step"], r["step"] / r["dense_step"], TARGETS.get(r["K"]),
         r["dense_score"], r["score"], r["score"] / r["dense_score"], r["candidates"], r["lost"]]
        for r in results
    ]  # fmt: skip
    size = ", ".join(f"{name} = {results[0][name]}" for name in ("B", "d", "l"))
    texts = [
        "## A step and scoring",
        f"{size}. {STEPS}",
        Table("steps", "", head, lines).markdown(),
    ]
    found = {r["K"]: r for r in results}
    if {1600, 25_600} <= set(found):
        power = math.log(found[25_600]["step"] / found[1600]["step"]) / math.log(16)
        texts.append(f"Power of K that the time of a step grows with above 1,600: {power:.2f}.")
    curves = {
        kind.replace("_", " "): ([r["K"] for r in results], [r[kind] for r in results])
        for kind in ("dense_step", "step", "dense_score", "score")
    }
    make_folder(folder)
    labels = ("components K", "seconds of the processor")
    figures.draw_lines("A step and scoring", labels, curves, folder / "many-steps.png")
    return [*texts, f"![Time of a step and of scoring against K]({pictures}/many-steps.png)"]


def image_table(results: Sequence[Result]) -> str:
    head = ("data", "K", "candidates", "seed", "held-out", "of dense", "seconds of the processor",
            "in use", "candidates at the end", "estimated loss")  # fmt: skip
    dense = {
        (r["data"], r["K"], r["seed"]): r["held_out"] for r in results if r["candidates"] is None
    }
    lines = []
    for r in results:
        whole = dense.get((r["data"], r["K"], r["seed"]))
        share = None if whole is None else f"{100 * (r['held_out'] / whole - 1):+.2f}%"
        few = "all" if r["candidates"] is None else str(r["candidates"])
        lines.append(
            [r["data"], r["K"], few, r["seed"], r["held_out"], share, r["processor_seconds"],
             r["in_use"], r["final_candidates"], r["screening_loss"]]
        )  # fmt: skip
    return Table("images", "", head, lines).markdown()


def race_table(results: Sequence[Result]) -> str:
    lines: list[list[Any]] = [
        [f"factormix, {'all' if r['candidates'] is None else 'few'} components for each row",
         r["K"], r["held_out"], r["seconds"], r["processor_seconds"]]
        for r in results
    ]  # fmt: skip
    lines.append(["factormix before, in one thread", 1600, 966.2, BEFORE, None])
    lines += [["VAMM", K, value, seconds, None] for K, value, seconds in VAMM]
    head = ("", "K", "held-out", "seconds", "seconds of the processor")
    return Table("race", "", head, lines).markdown()


def stream_section(results: Sequence[Result]) -> list[str]:
    made = [r for r in results if "true" in r.values]
    images = [r for r in results if "true" not in r.values]
    texts = [stream_text(made)] if made else []
    if not images:
        return texts
    lines = [
        [r["K"], r["learned"], r["in_use"], r["parameters"] / 2**20, r["memory"] / 2**20,
         r["candidates"], r["screening_loss"], r["seconds"]]
        for r in images
    ]  # fmt: skip
    head = ("K", "held-out", "in use", "parameters, MiB", "memory, MiB", "candidates at the end",
            "estimated loss", "seconds")  # fmt: skip
    told = f"{images[0]['rows']:,} images of {images[0]['data']}, {VARIED}"
    return [*texts, told, Table("stream", "", head, lines).markdown()]


def stream_text(results: Sequence[Result]) -> str:
    """Tell of made mixtures, and what percentages of their log-density mean."""
    lines = []
    for r in results:
        lost, gap = r["true"] - r["learned"], r["true"] - r["gaussian"]
        lines.append(
            [r["directions"], r["true"], r["learned"], lost, f"{100 * lost / abs(r['true']):.2f}%",
             gap, f"{100 * (1 - lost / gap):.0f}%", r["memory"] / r["parameters"], r["in_use"],
             r["candidates"], r["screening_loss"], r["seconds"]]
        )  # fmt: skip
    head = ("directions", "truth", "learned", "lost", "of the truth's", "lost by one Gaussian",
            "of which gained", "memory / parameters", "in use", "candidates at the end",
            "estimated loss", "seconds")  # fmt: skip
    r = results[0]
    lost, own = r["true"] - r["learned"], r["true"] + r["d"] * math.log(2**16)
    return "\n\n".join(
        [
            f"K = {r['K']:,} on {r['rows']:,} rows of made mixtures of {r['true_K']:,} components,"
            f" {r['d']} features in counts of 16 bits. {MADE}",
            Table("made", "", head, lines).markdown(),
            f"Percentages are those of the nats, or bits, by which a row is coded, and depend on"
            f" the units: were the range of the counts called one, the first truth would have"
            f" {own:,.0f} nats, of which {lost:.0f} are {100 * lost / abs(own):.1f}%. In any units,"
            f" fitting {r['parameters'] / 4e6:,.0f} million numbers to so few rows costs about"
            f" {r['parameters'] / 8 / r['rows']:.0f} nats a row by Akaike's rule, less where"
            " components stay what their common ancestor was. One Gaussian is that with the mean"
            " and the covariance of the truth.",
        ]
    )


def patch_table(results: Sequence[Result]) -> str:
    lines: list[list[Any]] = [
        [name, None, None, value, None, None, None] for name, value in PUBLISHED.items()
    ]
    best = max(results, key=lambda r: r["held_out"])
    for r in results:
        name = f"K = {r['K']:,}, l = {r['l']}"
        if n := r.trial.settings.get("scales"):
            name = f"K = {r['K'] // n:,} in {n} scales, l = {r['l']}"
        elif r["candidates"] is None:
            name += ", all candidates"
        name = f"**{name}**" if r is best else name
        patches = f"{r['passes']} x {r['patches']:,}"
        lines.append([name, patches, r["held_out"], r["test"], r["error"], r["seconds"],
                      r["processor_seconds"]])  # fmt: skip
    head = ("model", "passes x patches", "validation", "test", "standard error", "seconds",
            "seconds of the processor")  # fmt: skip
    table = Table("patches", "", head, sorted(lines, key=lambda line: line[3])).markdown()
    above = [name for name, value in PUBLISHED.items() if best["test"] > value]
    below = [name for name in PUBLISHED if name not in above]
    verdict = f"The one with the best validation patches is above {', '.join(above) or 'none'}"
    verdict += f", and below {', '.join(below)}." if below else "."
    return f"{table}\n\n{verdict}"


INTRODUCTION = """`python benchmarks/many.py` measures what `candidates="auto"` does. A screen ranks
all components, and each row is evaluated against few of them; statistics are summed over the pairs
of a row and a component that matter, and only components that a row touched are rewritten."""
BUSY = """Other work had a large share of the machine while these were measured: ratios are those of
one run, but what waits for memory suffers more than what computes, and seconds by the clock are too
long."""
STEPS = """Seconds of the processor in one thread, medians, all in turn in one process. The dense
step sums over all pairs and rewrites all components; the other one is what training does, without
the few rows that it evaluates in full. The mixture is made at random, and so are the rows."""
IMAGES = """Classes 0-8, l = 4, one pass; test images are scored against all components."""
RACE = """FashionMNIST, classes 0-8, l = 4, one pass, with as many threads as there are cores. The
line of before is that of docs/benchmarks.md; those of VAMM (truncated variational EM, C++) are its
figures with its published settings on a machine like this."""
MADE = """Their means and loadings lie in some directions of the space: in few, where components
overlap, and in many, where they are far apart and a stream has to find each. At most 1% below the
truth and 4 times the memory of the parameters were wanted. New rows are scored by all
components."""
VARIED = """each shifted by up to two pixels and slanted by up to a quarter of its height at
random, so that no two are alike; held-out images are of the test set, varied in the same way.
`max_precision=400`. Memory includes that of the images in the making."""
PATCH_TEXT = """Grey 8 x 8 patches of natural images, 63 features, with the published figures for
the same protocol. Bold is what has the best validation patches. "In n scales" are kinds of
components that come in n scales each (`NaturalGradient(scales=n)`), n K components in all. Where
there are more than a million training patches, they are of the same 180 photographs. All halves of
a split differ in width (`widening=1.2`), and those in scales grow from 100 kinds. With l = 62 any
covariance is possible, and steps are those of means and covariances. Seconds are by the clock, on
cores of which other work had a part."""


if __name__ == "__main__":
    main()
