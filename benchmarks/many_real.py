"""The part "real" of ``many.py``: fits by few of many components, by all, and by another commit.

Each fit has a process of its own with one thread, so that another commit's package can be imported.
Fits of a data set run one after the other, and their processor seconds are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from against import ROOT, check_out
from harness import Outcome, Settings
from torch import Tensor

SHIFT, SLANT = 2.0, 0.25
"""Largest shift of an image in pixels, and largest slant in pixels per pixel of height."""
HELD_OUT = 5000
"""Rows of activations that are held out, the last ones of a store."""
GOALS = {"fashion-mnist": 0.5, "varied mnist": 0.2, "activations": 0.3}
"""Wanted ratios of the processor seconds by few and by all components."""
SIZES: dict[str, Settings] = {
    "fashion-mnist": {"K": 1600, "l": 4, "rows": 54_000, "max_precision": 400.0},
    "varied mnist": {"K": 6400, "l": 4, "rows": 60_000, "max_precision": 400.0},
    "activations": {"K": 4000, "l": 10, "rows": 60_000},
}
QUICK: Settings = {"K": 30, "l": 2, "rows": 1000, "max_precision": 400.0}


def compare_fits(settings: Settings, data: str | None) -> Outcome:
    """Train by few candidates and by all components, here and with another commit."""
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sources = {"": ROOT / "src"}
        if settings["against"] is not None:
            sources["before_"] = check_out(settings["against"], Path(folder) / "other")
        for candidates in ("auto", None):
            for name, source in sources.items():
                fit = {**settings, "candidates": candidates, "folder": data}
                found = start_fit(fit, source)
                kind = "few" if candidates else "all"
                values |= {f"{name}{kind}_{key}": value for key, value in found.items()}
    return Outcome(values)


def start_fit(fit: Settings, source: Path) -> dict[str, float]:
    """Run a fit in a process of its own that imports the package from ``source``."""
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(fit)],
        env={**os.environ, **variables},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_fit(fit: Settings) -> dict[str, float]:
    """Train once; return processor seconds, held-out likelihood and the screen at the end."""
    from factormix import MFA

    train, test = read_rows(fit)
    model = MFA(
        fit["K"],
        fit["l"],
        max_epochs=1,
        max_precision=fit.get("max_precision"),
        candidates=fit["candidates"],
        random_state=0,
    )
    start = time.process_time()
    model.fit(train)
    seconds, last = time.process_time() - start, model.history_[-1]
    return {
        "seconds": seconds,
        "held_out": float(np.mean(model.score_samples(test, exact=True))),
        "candidates": last.get("candidates", float(fit["K"])),
        "loss": last.get("screening_loss", 0.0),
    }


def read_rows(fit: Settings) -> tuple[Any, Any]:
    """Read training and held-out rows."""
    from factormix import datasets

    name, folder, n = fit["data"], fit["folder"], fit["rows"]
    if name == "activations":
        from safetensors.numpy import load_file

        shards = sorted(Path(fit["store"]).glob("*.safetensors"))
        rows = np.concatenate([load_file(shard)["activations"] for shard in shards])
        order = np.random.default_rng(0).permutation(len(rows) - HELD_OUT)[:n]
        return rows[order].astype(np.float32), rows[-HELD_OUT:].astype(np.float32)
    if name == "varied mnist":
        train, test = (datasets.load("mnist", split=s, folder=folder) for s in ("train", "test"))
        generator = torch.Generator().manual_seed(0)
        varied = [
            vary_images(torch.from_numpy(part), generator).numpy()
            for part in (train.data[:n], test.data[:2000])
        ]
        return varied[0], varied[1]
    classes = list(range(9))
    train, test = (
        datasets.load(name, classes=classes, split=s, folder=folder) for s in ("train", "test")
    )
    return train.data[:n], test.data


def vary_images(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift and slant square images (n, d) at random."""
    n, side = len(images), math.isqrt(images.shape[1])
    slant, across, down = 2 * torch.rand(3, n, generator=generator) - 1
    turn = torch.eye(2, 3).repeat(n, 1, 1)
    turn[:, 0, 1] = SLANT * slant
    turn[:, 0, 2], turn[:, 1, 2] = (2 / side * SHIFT * shift for shift in (across, down))
    grid = torch.nn.functional.affine_grid(turn, [n, 1, side, side], align_corners=False)
    square = images.view(n, 1, side, side)
    return torch.nn.functional.grid_sample(square, grid, align_corners=False).view(n, -1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fit", help="the settings of a fit as JSON")
    print(json.dumps(run_fit(json.loads(parser.parse_args().fit))))
