"""The trials of the stream benchmark: speed from files, streams without an end, and drift."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Outcome, Settings
from memory_limit import MemoryLimit, forget_files, limit_memory
from numpy.typing import NDArray

from factormix import MFA, stream
from factormix.callbacks import Progress
from factormix.data.readers import read_rows
from factormix.solvers import NaturalGradient

MEMORY = "memory"
"""The source that all others are compared with: an array."""
WARM = 0.2
"""Share of a run that does not count, while the mixture is seeded and pruned."""

LOOKS = 100
"""Points of a curve."""
DRAWN_BATCHES = 1000
"""Batches drawn at once."""
MAX_PRECISION = 20.0
"""Bound on E. The first column has the least noise, and reaches it."""
KINDS = ("memory map", "parquet lists", "parquet columns", "safetensors shards")
BLOCK = 20_000
"""Rows made at once, and rows of a row group."""
CLUSTERS = 32
Blocks = Iterator[NDArray[np.float32]]
DRAWN_BLOCKS = 8
"""Blocks with noise of their own."""


def run_speed(settings: Settings, data_folder: str | None) -> Outcome:
    """Train for some seconds, and return rows per second and memory over time."""
    kind, n_rows, d = settings["kind"], settings["rows"], settings["features"]
    if kind == MEMORY:
        held = min(n_rows, settings["memory_bytes"] // (4 * d))
        array = np.concatenate(list(make_blocks(held, d)))
        return _train(settings, array, MemoryLimit("none"))
    path = write_rows(kind, Path(settings["scratch"]), n_rows, d)
    # Pages cached while the files were written would be charged to no one.
    forget_files(path)
    with limit_memory(settings["limit"]) as limit:
        rows = np.load(path, mmap_mode="r") if kind == "memory map" else read_rows(path)
        return _train(settings, rows, limit)


def _train(settings: Settings, rows: Any, limit: MemoryLimit) -> Outcome:
    watch, K = _Watch(settings["seconds"]), settings["components"]
    start = time.perf_counter()
    with watch:
        MFA(
            K,
            settings["factors"],
            batch_size=settings["batch_size"],
            max_epochs=settings["epochs"],
            # A constant number of components, all evaluated: every step is the same work.
            solver=NaturalGradient(first_components=K),
            candidates=None,
            random_state=0,
            callbacks=[watch],
        ).fit(rows)
    memory = np.array(watch.memory, dtype=float)
    values = {
        "rows_per_second": watch.speed(),
        "seconds_before": watch.first_step(start),
        "peak": float(memory[:, 1].max()),
        "charged": limit.peak(),
        "limited_by": limit.how,
    }
    return Outcome(values, {"memory": memory})


class _Watch:
    """Record the progress of a run, and the memory of the process."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._start = seconds, time.perf_counter()
        self._seen = list[tuple[float, float]]()
        self.memory = list[tuple[float, float]]()
        self._stop = threading.Event()

    def __enter__(self) -> _Watch:
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._sample_memory, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample_memory(self) -> None:
        while True:
            self.memory.append((time.perf_counter() - self._start, _read_anonymous_memory()))
            if self._stop.wait(0.1):
                return

    def __call__(self, progress: Progress) -> bool:
        now = time.perf_counter()
        self._seen.append((now, progress.record["samples"]))
        return now - self._seen[0][0] > self._seconds

    def first_step(self, start: float) -> float:
        """Return the seconds before the first step: opening, checking and seeding."""
        return self._seen[0][0] - start

    def speed(self) -> float:
        """Return the rows per second after the warm-up."""
        start = self._seen[0][0] + WARM * self._seconds
        seen = [one for one in self._seen if one[0] >= start]
        if seen[0][1] == seen[-1][1]:
            # The run is too short for a warm-up.
            seen = self._seen
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def _read_anonymous_memory() -> float:
    """Return the bytes of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return float(line.split()[1]) * 1024
    return 0.0


def run_endless(settings: Settings, data_folder: str | None) -> Outcome:
    """Call partial_fit for each of many batches, on a stream that does not change."""
    draw, d = np.random.default_rng(0), settings["features"]
    centres = 4 * draw.normal(size=(settings["components"], d))
    loadings = draw.normal(size=(settings["factors"], d))
    noise = np.r_[0.05, np.ones(d - 1)]

    def rows(*n: int) -> NDArray[np.float64]:
        chosen = draw.integers(len(centres), size=n)
        latent = draw.normal(size=(*n, len(loadings)))
        return centres[chosen] + latent @ loadings + noise * draw.normal(size=(*n, d))

    held_out = rows(2000)
    model = MFA(
        settings["components"],
        settings["factors"],
        batch_size=settings["batch_size"],
        max_precision=MAX_PRECISION,
        solver=NaturalGradient(forgetting=settings["forgetting"]),
        random_state=0,
    ).partial_fit(rows(1000))
    every = max(1, settings["batches"] // LOOKS)
    looks, start = list[list[float]](), time.process_time()
    for i in range(settings["batches"]):
        if i % DRAWN_BATCHES == 0:
            batches = rows(DRAWN_BATCHES, settings["batch_size"])
        model.partial_fit(batches[i % DRAWN_BATCHES])
        if (i + 1) % every == 0:
            seconds = (time.process_time() - start) / every
            looks.append(
                [
                    i + 1,
                    seconds,
                    _read_resident_memory(),
                    model.score(held_out),
                    _count_broken_invariants(model),
                ]
            )
            start = time.process_time()
    table = np.array(looks)
    return Outcome({"steps": model.n_steps_, "broken": float(table[:, 4].sum())}, {"looks": table})


def _count_broken_invariants(model: MFA) -> float:
    """Count the broken invariants: finite, bounded, weights, M diagonal, M in [0, 1], history."""
    E, Gamma, weights = model.precision_diag_, model.precision_factors_, model.weights_
    scaled = np.asarray(Gamma / E[:, :, None], dtype=np.float64)
    M = np.eye(Gamma.shape[2]) - np.swapaxes(Gamma, 1, 2) @ scaled
    diagonal = np.diagonal(M, axis1=1, axis2=2)
    off = M - diagonal[:, :, None] * np.eye(Gamma.shape[2])
    holds = [
        all(np.isfinite(a).all() for a in (E, Gamma, weights, model.means_)),
        bool((E > 0).all() and (E <= MAX_PRECISION * (1 + 1e-5)).all()),
        bool((weights > 0).all()) and math.isclose(float(weights.sum()), 1.0, rel_tol=1e-5),
        bool(np.abs(off).max() < 1e-4),
        bool((diagonal > 0).all() and (diagonal <= 1 + 1e-5).all()),
        len(model.history_) <= 2000,
    ]
    return float(len(holds) - sum(holds))


def run_drift(settings: Settings, data_folder: str | None) -> Outcome:
    """Score a stream of wandering clusters, each batch before it is learned."""
    d, size, n = settings["features"], settings["batch_size"], settings["batches"]
    own = np.random.default_rng(1)
    centres = 4 * own.normal(size=(settings["components"], d))
    wander = own.normal(size=centres.shape)

    def batches() -> Iterator[NDArray[np.float64]]:
        draw = np.random.default_rng(2)
        for i in range(n):
            # In place for a fifth of the stream, then away.
            shifted = centres + settings["reach"] * max(0.0, i / n - 0.2) * wander
            yield shifted[draw.integers(len(shifted), size=size)] + draw.normal(size=(size, d))

    model = MFA(
        settings["components"],
        settings["factors"],
        batch_size=size,
        solver=NaturalGradient(forgetting=settings["forgetting"]),
        random_state=0,
    )
    scores = np.array([part.scores.mean() for part in stream(model, batches())])
    per = max(1, n // LOOKS)
    curve = scores[: n // per * per].reshape(-1, per)
    curve = np.nanmean(np.where(np.isnan(curve), np.nanmin(curve), curve), axis=1)
    # The score of the true density, whose clusters do not overlap.
    best = -d / 2 * math.log(2 * math.pi * math.e) - math.log(settings["components"])
    values = {"best": best, "last": float(curve[-LOOKS // 5 :].mean())}
    return Outcome(values, {"curve": curve})


def _read_resident_memory() -> float:
    return float(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_blocks(n_rows: int, d: int, seed: int = 0, block_rows: int = BLOCK) -> Blocks:
    """Make rows (n_rows, d) around a few centres, with correlated noise, block by block.

    The noise of the first few blocks comes again, in another order, in later ones.
    """
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(CLUSTERS, d)).astype(np.float32)
    turn = draw.normal(size=(8, d)).astype(np.float32) / 3
    noise = list[NDArray[np.float32]]()
    for number, first in enumerate(range(0, n_rows, block_rows)):
        n = min(block_rows, n_rows - first)
        own = np.random.default_rng([seed, first])
        if number < DRAWN_BLOCKS:
            noise.append(own.standard_normal((n, d), dtype=np.float32) / 2)
        block = own.standard_normal((n, 8), dtype=np.float32) @ turn
        block += centres[own.integers(CLUSTERS, size=n)]
        block += np.roll(noise[number % DRAWN_BLOCKS], own.integers(block_rows), axis=0)[:n]
        yield block


def write_rows(
    kind: str, folder: Path, n_rows: int, d: int, files: int = 16, block_rows: int = BLOCK
) -> Path:
    """Write a table as files of one kind, unless it exists, and return its path."""
    path = folder / f"{kind.replace(' ', '-')}-{n_rows}x{d}"
    path = path.with_suffix(".npy") if kind == "memory map" else path
    done = path.with_name(path.name + ".done")
    if done.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    blocks = make_blocks(n_rows, d, block_rows=block_rows)
    if kind == "memory map":
        _write_map(path, blocks, n_rows, d)
    elif kind == "safetensors shards":
        _write_shards(path, blocks, -(-n_rows // files))
    else:
        _write_parquet(path, blocks, d, files, lists=kind == "parquet lists")
    done.touch()
    return path


def _write_map(path: Path, blocks: Blocks, n_rows: int, d: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, d)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(block.data)


def _write_parquet(path: Path, blocks: Blocks, d: int, files: int, *, lists: bool) -> None:
    """Write a row group for each block, as one column of lists or as d columns of numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(block: NDArray[np.float32]) -> Any:
        if lists:
            flat = pa.array(block.reshape(-1))
            return pa.table({"vector": pa.FixedSizeListArray.from_arrays(flat, d)})
        return pa.table({f"c{j}": np.ascontiguousarray(block[:, j]) for j in range(d)})

    path.mkdir(exist_ok=True)
    schema = table(np.zeros((1, d), np.float32)).schema
    # Random floats do not repeat, so a dictionary would not make them smaller.
    paths = (path / f"part-{i:03d}.parquet" for i in range(files))
    writers = [pq.ParquetWriter(one, schema, use_dictionary=False) for one in paths]
    for number, block in enumerate(blocks):
        writers[number % files].write_table(table(block))
    for writer in writers:
        writer.close()


def _write_shards(path: Path, blocks: Blocks, shard_rows: int) -> None:
    from safetensors.numpy import save_file

    held = list[NDArray[np.float32]]()
    path.mkdir(exist_ok=True)
    number = 0
    for block in blocks:
        held.append(block)
        if sum(map(len, held)) >= shard_rows:
            save_file({"rows": np.concatenate(held)}, path / f"shard-{number:03d}.safetensors")
            held, number = [], number + 1
    if held:
        save_file({"rows": np.concatenate(held)}, path / f"shard-{number:03d}.safetensors")
