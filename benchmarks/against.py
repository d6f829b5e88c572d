"""Compare this tree with another commit: training steps, images, small tables and patches.

    FACTORMIX_DATA=folder python benchmarks/against.py 2d65e19 [--parts step images tables patches]

Both trees run every fit in turn, each in a process of its own with one thread, so that ratios of
processor seconds hold on a busy machine. Fits use the public interface only. The other commit is
checked out into a temporary folder. Held-out values are mean log-likelihoods in nats; a difference
counts as worse where it exceeds twice the standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("step", "images", "tables", "patches")
SIZES = ((49, 784, 4, 100), (49, 784, 4, 1000), (100, 3072, 10, 500))
"""Components, features, factors and rows of a batch, as in ``step.py``."""
STEPS = 60
COMPONENTS = (5, 25, 90)
TABLES = (
    "iris", "wine", "breast_cancer", "14_glass", "18_Ionosphere", "40_vowels", "6_cardio",
    "38_thyroid",
)  # fmt: skip
KINDS, SCALES, PATCH_ROWS = 60, 11, 100_000

Fit = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD~1", help="the other commit")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fit is not None:
        print(json.dumps(run_fit(json.loads(options.fit))))
        return
    with tempfile.TemporaryDirectory() as folder:
        other = check_out(options.commit, Path(folder) / "other")
        print(f"{'fit':44} {'nats':>9} {'before':>9} {'ratio of seconds':>17}", flush=True)
        for part in options.parts:
            for name, fit in list_fits(part, options.quick):
                compare(name, fit, other, options.seeds)


def check_out(commit: str, folder: Path) -> Path:
    """Write the package of another commit into a folder, and return the folder of its source."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive.stdout)
    return folder / "src"


def list_fits(part: str, quick: bool) -> Iterator[tuple[str, Fit]]:
    """Yield a name and the settings of every fit of a part."""
    if part == "step":
        for solver in ("natural", "sgd"):
            for K, d, l, B in SIZES[:1] if quick else SIZES:
                yield (
                    f"{solver}, K = {K}, d = {d}, l = {l}, B = {B}",
                    {"part": part, "solver": solver, "size": (K, d, l, B), "quick": quick},
                )
    elif part == "images":
        for K in (10,) if quick else (49, 400, 1600):
            yield f"FashionMNIST 0-8, one pass, K = {K}", {"part": part, "K": K, "quick": quick}
    elif part == "tables":
        for table in TABLES[:1] if quick else TABLES:
            for K in COMPONENTS[:1] if quick else COMPONENTS:
                yield f"{table}, K = {K}", {"part": part, "table": table, "K": K}
    else:
        yield f"patches, {KINDS} kinds in {SCALES} scales", {"part": part, "quick": quick}


def compare(name: str, fit: Fit, other: Path, seeds: int) -> None:
    """Run a fit with both trees and several seeds, and print medians."""
    now, before = [], []
    for seed in range(seeds):
        settings = json.dumps({**fit, "seed": seed})
        for source, results in ((ROOT / "src", now), (other, before)):
            results.append(start_fit(settings, source))
    ratio = statistics.median(result["seconds"] for result in now) / statistics.median(
        result["seconds"] for result in before
    )
    if "nats" not in now[0]:
        print(f"{name:44} {'':>9} {'':>9} {ratio:17.2f}", flush=True)
        return
    values, previous = ([result["nats"] for result in results] for results in (now, before))
    mean, last = statistics.fmean(values), statistics.fmean(previous)
    spread = 2 * max(np.std(values), np.std(previous))
    worse = "  worse" if seeds > 1 and mean < last - spread else ""
    print(f"{name:44} {mean:9.3f} {last:9.3f} {ratio:17.2f}{worse}", flush=True)


def start_fit(settings: str, source: Path) -> dict[str, float]:
    """Run a fit in a process of its own that imports the package from ``source``."""
    result: dict[str, float] = run_process([__file__, "--fit", settings], source)
    return result


def run_process(arguments: Sequence[str], source: Path) -> Any:
    """Run Python with one thread and the package from ``source``; return its last line of JSON."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **threads, "PYTHONPATH": str(source)},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_fit(fit: Fit) -> dict[str, float]:
    """Train once and return processor seconds and, except for steps, the held-out score."""
    import warnings

    from factormix import MFA
    from factormix.solvers import resolve

    warnings.simplefilter("ignore")
    # What a first fit imports is not part of the seconds.
    MFA(2, 1, max_epochs=1).fit(np.random.default_rng(0).normal(size=(50, 3)))
    seed = fit["seed"]
    if fit["part"] == "step":
        K, d, l, B = fit["size"]
        rows = np.random.default_rng(0).normal(size=(B * (6 if fit["quick"] else STEPS), d))
        model = MFA(K, l, solver=fit["solver"], batch_size=B, max_epochs=1, random_state=seed)
        return {"seconds": _time(lambda: model.fit(rows.astype(np.float32)))}
    if fit["part"] == "images":
        train, test = _read_images(fit["quick"])
        model = MFA(fit["K"], 4, max_epochs=1, max_precision=400, random_state=seed)
    elif fit["part"] == "tables":
        train, test = _read_table(fit["table"], seed)
        model = MFA(fit["K"], 2, random_state=seed)
    else:
        train, test = _cut_patches(fit["quick"])
        scaled = next(name for name in ("covariance", "natural") if _has_scales(name))
        solver = resolve(scaled)
        solver = type(solver)(scales=SCALES, widening=1.2)
        model = MFA(KINDS * SCALES, 16, solver=solver, max_epochs=1, random_state=seed)
    seconds = _time(lambda: model.fit(train))
    return {"seconds": seconds, "nats": float(model.score(test))}


def _has_scales(name: str) -> bool:
    from factormix.solvers import resolve

    try:
        return hasattr(resolve(name), "scales")
    except ValueError:
        return False


def _time(job: Any) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def _read_images(quick: bool) -> tuple[Any, Any]:
    from factormix import datasets

    classes = list(range(9))
    train = datasets.load("fashion-mnist", classes=classes).data
    test = datasets.load("fashion-mnist", classes=classes, split="test").data
    return (train[:2000], test[:500]) if quick else (train, test)


def _read_table(name: str, seed: int) -> tuple[Any, Any]:
    """Split the standardised rows of a table into training and test rows."""
    if name[0].isdigit():
        folder = Path(os.environ.get("FACTORMIX_DATA", "data")) / "adbench"
        rows = np.load(folder / f"{name}.npz")["X"]
    else:
        from sklearn import datasets

        rows = getattr(datasets, f"load_{name}")().data
    rows = rows[:, rows.std(axis=0) > 0]
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    n_test = len(rows) // 5
    return rows[n_test:], rows[:n_test]


def _cut_patches(quick: bool) -> tuple[Any, Any]:
    """Cut 8 x 8 patches, without their mean, out of the photographs of BSDS300."""
    from PIL import Image

    folder = Path(os.environ.get("FACTORMIX_DATA", "data")) / "bsds300"
    rng = np.random.default_rng(0)

    def cut(name: str, n: int) -> Any:
        paths = sorted((folder / name).glob("*.jpg"))
        parts = []
        for path in paths:
            grey = np.asarray(Image.open(path).convert("L"), np.float32) / 255
            windows = np.lib.stride_tricks.sliding_window_view(grey, (8, 8)).reshape(-1, 64)
            parts.append(windows[rng.integers(len(windows), size=n // len(paths))])
        rows = np.concatenate(parts) + rng.normal(0, 0.002, (n // len(paths) * len(paths), 64))
        rows -= rows.mean(axis=1, keepdims=True)
        return rng.permutation(rows)[:, :63].astype(np.float32)

    n = 5000 if quick else PATCH_ROWS
    return cut("train", n), cut("test", n // 5)


if __name__ == "__main__":
    main()
