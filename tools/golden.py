"""Hash the parameters that ten small fits end with.

A change that only moves or renames code must keep every hash. Hashes differ between kinds of
processors, so they are compared on one machine, before and after a change:

    python tools/golden.py --write before.json
    python tools/golden.py --against before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Products in several threads round differently: one thread gives the same bits every time.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np

import factormix
from factormix import MFA
from factormix.solvers import CovarianceGradient


def clusters(n: int, d: int, k: int, *, seed: int = 0, gaps: float = 0.0) -> np.ndarray:
    """Draw rows (n, d) of k clusters, each with a direction of its own; a share may be missing."""
    rng = np.random.default_rng(seed)
    centres, ways = 3 * rng.normal(size=(k, d)), rng.normal(size=(k, d))
    which = rng.integers(k, size=n)
    X = centres[which] + ways[which] * rng.normal(size=(n, 1)) + 0.3 * rng.normal(size=(n, d))
    X[rng.random(X.shape) < gaps] = np.nan
    return X


def natural() -> MFA:
    return MFA(12, 3, random_state=0).fit(clusters(4000, 16, 9))


def em() -> MFA:
    return MFA(8, 2, solver="em", random_state=0, max_epochs=12).fit(clusters(1500, 10, 6))


def sgd() -> MFA:
    return MFA(9, 2, solver="sgd", random_state=0, max_epochs=6).fit(clusters(1500, 10, 6))


def missing() -> MFA:
    return MFA(6, 2, random_state=0).fit(clusters(2000, 10, 5, gaps=0.2))


def screened() -> MFA:
    model = MFA(900, 2, random_state=0, max_epochs=2, candidates=200)
    return model.fit(clusters(12_000, 48, 300))


def scales() -> MFA:
    solver = CovarianceGradient(scales=3)
    rng = np.random.default_rng(1)
    X = clusters(8000, 12, 20) * np.exp(0.5 * rng.normal(size=(8000, 1)))
    return MFA(3 * 70, 8, solver=solver, random_state=0, max_epochs=4).fit(X)


def stream() -> MFA:
    model = MFA(30, 2, random_state=0)
    for seed in range(6):
        model.partial_fit(clusters(1500, 12, 20) + 0.01 * seed)
    return model


def covariance() -> MFA:
    """Train many components with many factors on few features, by means and covariances."""
    return MFA(110, 8, solver="covariance", random_state=0, max_epochs=4).fit(
        clusters(8000, 12, 60)
    )


def by_rows() -> MFA:
    return _two_processes("data")


def by_components() -> MFA:
    return _two_processes("components")


def _two_processes(mesh: str) -> MFA:
    with tempfile.TemporaryDirectory() as folder:
        rows, path = Path(folder) / "rows.npy", Path(folder) / "model.safetensors"
        np.save(rows, clusters(4000, 16, 9))
        options = [
            "--n-components",
            "12",
            "--n-factors",
            "3",
            "--random-state",
            "0",
            "--mesh",
            mesh,
        ]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, "--nproc-per-node", "2", "-m", "factormix", "train", str(rows)]
        subprocess.run([*command, "-o", str(path), *options], check=True, capture_output=True)
        return factormix.load(path)


CONFIGURATIONS: tuple[Callable[[], MFA], ...] = (
    natural, em, sgd, missing, screened, scales, covariance, stream,
    by_rows, by_components,
)  # fmt: skip


def fingerprint(model: MFA) -> str:
    """Hash the parameters of a trained model."""
    digest = hashlib.sha256()
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        digest.update(np.ascontiguousarray(getattr(model, name)).tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Fit every configuration; print, write or compare the hashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="write the hashes to this file")
    parser.add_argument("--against", type=Path, help="compare with the hashes of this file")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    found = {}
    for make in CONFIGURATIONS:
        found[make.__name__] = fingerprint(make())
        known = before.get(make.__name__)
        mark = "" if known is None else "same" if known == found[make.__name__] else "DIFFERENT"
        print(f"{make.__name__:15} {found[make.__name__]} {mark}", flush=True)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(before.get(name, one) != one for name, one in found.items()))


if __name__ == "__main__":
    main()
