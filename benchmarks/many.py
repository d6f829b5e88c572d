"""Very many components: the cost of steps and scores, and what screening costs in likelihood.

    python benchmarks/many.py                         # steps and images: an hour on one core
    python benchmarks/many.py --quick                 # a try in a minute
    python benchmarks/many.py --parts steps           # the times alone
    python benchmarks/many.py --parts race            # a pass at K = 1,600 against the clock
    python benchmarks/many.py --parts real --activations DIR --against COMMIT
    python benchmarks/many.py --parts stream          # K = 25,600 on 1,000,000 rows: hours
    python benchmarks/many.py --parts patches --patches DIR --more DIR   # train, val, test.npy

Every trial has its own result file, so an interrupted run continues where it stopped. The page
shows the finished trials. Steps are timed in processor seconds, all kinds in turn in one process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import many_real
import many_trials
from common import DOCS, describe_machine, draw_lines, fold_description, make_parser, parse_options
from harness import Result, Store, Table, Trial, read_results, run_trials

from factormix.files import make_folder, write_whole

PARTS = ("steps", "images", "real", "race", "stream", "patches")
SIZES = {400: 5, 1600: 5, 6400: 5, 25_600: 5}
"""Numbers of components, and repeats of each kind of step."""
FEW_DIRECTIONS, MANY_DIRECTIONS = 40, 400
"""Directions, of 784, that the components of the streams vary in: near each other, or far apart."""
TARGETS = {400: 0.6, 1600: 0.3, 6400: 0.12, 25_600: 0.05}
PATCHES = ((100, 62, 2), (400, 62, 2), (4000, 20, 1))
"""Components, factors and passes over the million patches; the last also by all components."""
IN_SCALES = ((100, 11, 62, 2), (400, 11, 62, 2))
MORE_PATCHES = ((1600, 11, 62, 1), (1600, 11, 62, 2))
"""Kinds of components, scales of each, factors and passes over the million patches, and over more
patches of the same photographs."""
FIRST = 100
"""Number of kinds at the start of a mixture in scales."""
BEFORE = 28.7
"""Seconds of a pass at K = 1,600 on FashionMNIST in one thread, in docs/benchmarks.md."""
VAMM = ((400, 961.5, 62), (1600, 945.0, 27))
"""Components, held-out log-likelihood and seconds of VAMM with its published settings."""
PUBLISHED = {
    "Gaussian": 96.7, "RealNVP": 153.3, "MADE-MoG": 153.7, "Deep RNADE": 155.2, "MAF": 155.7,
    "MAF-MoG": 156.4,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    trials = [] if options.page else [t for part in options.parts for t in plan(part, options)]
    trials = [trial for trial in trials if trial.name.startswith(options.only)]
    store = Store(options.output / "many")
    # Trials against the clock use as many threads as the library does by default.
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
        text = compose(read_results(every, store), options, DOCS / "benchmarks", "benchmarks")
        write_whole(DOCS / "benchmarks-many.md", text.encode())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-many.md")
    parser.add_argument("--parts", type=lambda t: t.split(","), default=["steps", "images"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", help="folder of the image sets")
    parser.add_argument("--patches", type=Path, help="folder of train.npy, val.npy and test.npy")
    parser.add_argument("--activations", type=Path, help="store of activations, for the part real")
    parser.add_argument("--against", help="another commit whose fits the part real compares with")
    parser.add_argument("--more", type=Path, help="folder of more patches of the same images")
    parser.add_argument(
        "--only", default="", help="run trials whose names start with this, such as 1600 or mnist"
    )
    parser.add_argument("--page", action="store_true", help="run nothing, only rewrite the page")
    parser.add_argument(
        "--busy", action="store_true", help="note on the page that other work used the machine"
    )
    options = parse_options(parser, arguments)
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
    if part == "real":
        return _real(options)
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


def _real(options: argparse.Namespace) -> list[Trial]:
    """List the comparisons of few and all components on real data."""
    sizes = {"digits": many_real.QUICK} if options.quick else many_real.SIZES
    base = {"against": options.against, "store": str(options.activations)}
    return [
        Trial("real", name.replace(" ", "-"), size | base | {"data": name}, many_real.compare_fits)
        for name, size in sizes.items()
        if name != "activations" or options.activations
    ]


def _streams(quick: bool) -> list[Trial]:
    """List long streams: of random mixtures, and of images."""
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
    """Compose the page from the finished trials."""
    parts = ["# Benchmarks: very many components", INTRODUCTION]
    if options.busy:
        parts.append(BUSY)
    by = {part: [r for r in results if r.trial.experiment == part] for part in PARTS}
    if by["steps"]:
        parts += steps_section(by["steps"], folder, pictures)
    if by["images"]:
        parts += ["## Held-out likelihood on images", IMAGES, image_table(by["images"])]
    if by["real"]:
        parts += ["## Few components and all of them on real data", REAL, real_table(by["real"])]
    if by["race"]:
        parts += ["## One pass against the clock", RACE, race_table(by["race"])]
    if by["stream"]:
        parts += ["## A long stream", *stream_section(by["stream"])]
    if by["patches"]:
        parts += ["## Image patches", PATCH_TEXT, patch_table(by["patches"])]
    open_parts = [part for part in PARTS if not by[part]]
    if open_parts:
        parts.append(f"Not run yet: {', '.join(open_parts)}.")
    parts.append(fold_description(describe_machine(options.threads)))
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
        texts.append(f"Above 1,600, the time of a step grows with the power {power:.2f} of K.")
    curves = {
        kind.replace("_", " "): ([r["K"] for r in results], [r[kind] for r in results])
        for kind in ("dense_step", "step", "dense_score", "score")
    }
    make_folder(folder)
    labels = ("components K", "processor seconds")
    draw_lines("A step and scoring", labels, curves, folder / "many-steps.png")
    return [*texts, f"![Time of a step and of scoring against K]({pictures}/many-steps.png)"]


def image_table(results: Sequence[Result]) -> str:
    head = ("data", "K", "candidates", "seed", "held-out", "of dense", "processor seconds",
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


def real_table(results: Sequence[Result]) -> str:
    head = ["data", "K", "l", "rows", "held-out, few", "all", "lost", "processor seconds, few",
            "all", "ratio", "wanted", "candidates at the end", "estimated loss"]  # fmt: skip
    compared = all("before_few_seconds" in r.values for r in results)
    lines = []
    for r in results:
        few, every = r["few_held_out"], r["all_held_out"]
        line = [r["data"], r["K"], r["l"], r["rows"], few, every,
                f"{100 * (every - few) / abs(every):+.2f}%", r["few_seconds"], r["all_seconds"],
                r["few_seconds"] / r["all_seconds"], many_real.GOALS.get(r["data"]),
                r["few_candidates"], r["few_loss"]]  # fmt: skip
        if compared:
            line += [r["before_few_seconds"] / r["before_all_seconds"], r["before_few_held_out"],
                     r["few_seconds"] / r["before_few_seconds"]]  # fmt: skip
        lines.append(line)
    if compared:
        head += ["ratio before", "held-out before", "seconds over those before"]
    return Table("real", "", head, lines).markdown()


def race_table(results: Sequence[Result]) -> str:
    lines: list[list[Any]] = [
        [f"factormix, {'all' if r['candidates'] is None else 'few'} components for each row",
         r["K"], r["held_out"], r["seconds"], r["processor_seconds"]]
        for r in results
    ]  # fmt: skip
    lines.append(["factormix in docs/benchmarks.md, one thread", 1600, 966.2, BEFORE, None])
    lines += [["VAMM", K, value, seconds, None] for K, value, seconds in VAMM]
    head = ("", "K", "held-out", "seconds", "processor seconds")
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
    text = f"{images[0]['rows']:,} images of {images[0]['data']}, {VARIED}"
    return [*texts, text, Table("stream", "", head, lines).markdown()]


def stream_text(results: Sequence[Result]) -> str:
    """Describe the streams of random mixtures, and explain percentages of a log-density."""
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
            f"K = {r['K']:,} on {r['rows']:,} rows of random mixtures of {r['true_K']:,}"
            f" components, {r['d']} features as 16-bit counts. {MADE}",
            Table("made", "", head, lines).markdown(),
            "Percentages refer to the nats, or bits, that code a row. They depend on the units:"
            f" with the range of the counts as unit, the first truth would have {own:,.0f} nats,"
            f" of which {lost:.0f} are {100 * lost / abs(own):.1f}%. In any units, fitting"
            f" {r['parameters'] / 4e6:,.0f} million numbers to {r['rows']:,} rows costs about"
            f" {r['parameters'] / 8 / r['rows']:.0f} nats a row by Akaike's rule, and less where"
            " components stay equal to their common ancestor. The one Gaussian has the mean and"
            " the covariance of the truth.",
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
            "processor seconds")  # fmt: skip
    table = Table("patches", "", head, sorted(lines, key=lambda line: line[3])).markdown()
    above = [name for name, value in PUBLISHED.items() if best["test"] > value]
    below = [name for name in PUBLISHED if name not in above]
    verdict = f"The model with the best validation likelihood is above {', '.join(above) or 'none'}"
    verdict += f", and below {', '.join(below)}." if below else "."
    return f"{table}\n\n{verdict}"


INTRODUCTION = """`python benchmarks/many.py` measures the effect of `candidates="auto"`. A screen
ranks all components, and each row is evaluated against few of them. Statistics are summed over the
pairs of a row and a component that matter, and only components that a row touched are updated."""
BUSY = """Other work used a large share of the machine during the measurements. Both sides of a
ratio come from one run, but work that waits for memory suffers more than work that computes, and
seconds by the clock are too long."""
STEPS = """Processor seconds in one thread, medians, all in turn in one process. The dense
step sums over all pairs and updates all components. The other step is the step of training, without
the few rows that training evaluates in full. Mixture and rows are random."""
IMAGES = """Classes 0-8, l = 4, one pass; test images are scored against all components."""
REAL = """One pass by `candidates="auto"` and by all components, in one thread each. Varied MNIST
has each training image once, shifted and slanted at random. Activations come from MiniLM, layer
3, 384 features. "Lost" is the share of the held-out log-likelihood, by all components in both
cases; below zero, few were better. The limit in training is 0.2% of the gain over one Gaussian.
Columns with "before" are the same run of the commit given by `--against`."""
RACE = """FashionMNIST, classes 0-8, l = 4, one pass, with as many threads as cores. The third line
is the one in docs/benchmarks.md. The lines of VAMM (truncated variational EM, C++) are its figures
with its published settings on a machine like this."""
MADE = """Their means and loadings vary in some directions of the space. With few directions,
components overlap; with many, they are far apart, and a stream has to find each. The targets were
at most 1% below the truth, and 4 times the memory of the parameters. New rows are scored by all
components."""
VARIED = """each shifted by up to two pixels and slanted by up to a quarter of its height at
random, so that no two are alike. Held-out images come from the test set and are varied in the same
way. `max_precision=400`. Memory includes the memory for making the images."""
PATCH_TEXT = """Grey 8 x 8 patches of natural images, 63 features, with the published figures for
the same protocol. Bold marks the model with the best validation likelihood. "K in n scales" means K
kinds of components in n scales each (`CovarianceGradient(scales=n)`), n K components in all.
Training sets of more than a million patches come from the same 180 photographs. The halves of a
split differ in width (`widening=1.2`), and mixtures in scales grow from 100 kinds. With l = 62 any
covariance is possible, and steps in scales update means and covariances directly. Seconds are by
the clock, on cores shared with other work."""


if __name__ == "__main__":
    main()
