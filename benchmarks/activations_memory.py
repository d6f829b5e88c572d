"""Measure the memory and time of mixtures whose components differ in rank, for docs/activations.md.

    python benchmarks/activations_memory.py     # a minute

Models of 1,000 components in 384 features are written to files. A process of its own loads each,
scores rows and takes a step of training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import current_memory, make_parser, peak_memory

import factormix
from factormix import MFA
from factormix.core.averages import rotate_averages
from factormix.core.parameters import like_tensor
from factormix.core.ranks import switch_off_, trim

SIZES = {"components": 1000, "features": 384, "rows": 1000}
QUICK_SIZES = {"components": 60, "features": 48, "rows": 200}
MIB = 2**20
ROWS = {
    "file": "model file with running averages",
    "loaded": "the same, loaded",
    "first": "`score_samples` of one row, in addition",
    "score": "`score_samples` of 1,000 rows, in addition",
    "step": "a step of training, in addition",
    "first_seconds": "`score_samples` of one row",
    "score_seconds": "`score_samples` of 1,000 rows",
    "step_seconds": "a step of training",
}


def main() -> None:
    """Print the table, or measure one model in this process."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="measure this model, and print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is not None:
        print(json.dumps(measure(options.model)))
        return
    sizes = QUICK_SIZES if options.quick else SIZES
    K, found = sizes["components"], {}
    mixed = np.minimum(np.random.default_rng(0).geometric(0.2, K), 32)
    mixed[0] = 32
    cases = {
        f"ranks of mean {mixed.mean():.0f} and highest 32": mixed,
        "5 factors each": np.full(K, 5),
        "32 factors each": np.full(K, 32),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks in cases.items():
            path = Path(folder) / "model.mfa"
            write_model(path, ranks, sizes)
            command = [sys.executable, __file__, "--model", str(path)]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name] = {"file": path.stat().st_size, **json.loads(run.stdout)}
    print(f"| | {' | '.join(found)} |\n|---|{'--:|' * len(found)}")
    for key, text in ROWS.items():
        values = [one[key] for one in found.values()]
        cells = [
            f"{value:.2f} CPU s" if key.endswith("seconds") else f"{value / MIB:.0f} MiB"
            for value in values
        ]
        print(f"| {text} | {' | '.join(cells)} |")


@torch.inference_mode()
def write_model(path: Path, ranks: np.ndarray, sizes: dict[str, int]) -> None:
    """Write a model whose components have these ranks (K,), and rows beside it."""
    rng, (K, d, n) = np.random.default_rng(0), sizes.values()
    centres = 3 * rng.normal(size=(K, d))

    def draw() -> np.ndarray:
        return (centres[rng.integers(K, size=n)] + rng.normal(size=(n, d))).astype(np.float32)

    model = MFA(K, "auto", max_factors=int(ranks.max()), random_state=0, batch_size=n)
    model.partial_fit(draw())
    # A stream is seeded by its first rows, and grows to its number of components.
    while len(model._run.state.rows) or len(model._run.state.averages.V) != K:
        model.partial_fit(draw())
    state = model._run.state
    averages = state.averages
    averages.Theta[:, 1:] = torch.randn(averages.Theta[:, 1:].shape)
    switch_off_(averages, torch.arange(ranks.max()) < torch.from_numpy(ranks).unsqueeze(1))
    bound = torch.full((d,), 1e6, **like_tensor(averages.V))
    averages.V.fill_(1)
    state.averages, state.parameters = trim(
        *rotate_averages(averages, bound, 1e-6), int(ranks.max())
    )
    model.save(path)
    np.save(path.with_suffix(".npy"), draw())


def measure(path: Path) -> dict[str, float]:
    """Load a model, score rows and take a step; return bytes that each adds, and CPU seconds."""
    rows, found = np.load(path.with_suffix(".npy")), dict[str, float]()
    # What is loaded with the first model stays out of the account.
    MFA(2, 1, max_epochs=1).fit(rows[:100, :4]).score_samples(rows[:5, :4])
    before = current_memory()
    model = factormix.load(path)
    found["loaded"] = current_memory() - before
    for name, act in {
        "first": lambda: model.score_samples(rows[:1]),
        "score": lambda: model.score_samples(rows),
        "step": lambda: model.partial_fit(rows),
    }.items():
        forget_peak()
        before, start = current_memory(), time.process_time()
        act()
        found[f"{name}_seconds"] = time.process_time() - start
        found[name] = max(0, peak_memory() - before)
    return found


def forget_peak() -> None:
    """Let the record of this process's most memory begin anew, on Linux."""
    place = Path("/proc/self/clear_refs")
    if place.exists():
        place.write_text("5")


if __name__ == "__main__":
    main()
