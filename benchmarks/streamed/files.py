"""Tables that are made on the spot, written in pieces as files of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "blocks", "write"]

KINDS = ("memory map", "parquet lists", "parquet columns", "safetensors shards")
BLOCK = 20_000
"""Rows that are made at once, and rows of a row group."""
CLUSTERS = 32
DRAWN = 8
"""Blocks whose noise is drawn."""


def blocks(n_rows: int, d: int, seed: int = 0) -> Iterator[NDArray[np.float32]]:
    """Make rows (n_rows, d) around a few centres, with correlated noise, block by block.

    Their own noise is drawn for a few blocks, and comes in another order in later ones.
    """
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(CLUSTERS, d)).astype(np.float32)
    turn = draw.normal(size=(8, d)).astype(np.float32) / 3
    noise = list[NDArray[np.float32]]()
    for number, first in enumerate(range(0, n_rows, BLOCK)):
        n = min(BLOCK, n_rows - first)
        own = np.random.default_rng([seed, first])
        if number < DRAWN:
            noise.append(own.standard_normal((n, d), dtype=np.float32) / 2)
        block = own.standard_normal((n, 8), dtype=np.float32) @ turn
        block += centres[own.integers(CLUSTERS, size=n)]
        block += np.roll(noise[number % DRAWN], own.integers(BLOCK), axis=0)[:n]
        yield block


def write(kind: str, folder: Path, n_rows: int, d: int, files: int = 16) -> Path:
    """Write a table as one kind of files, unless it is there already, and return its path."""
    path = folder / f"{kind.replace(' ', '-')}-{n_rows}x{d}"
    path = path.with_suffix(".npy") if kind == "memory map" else path
    done = path.with_name(path.name + ".done")
    if done.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "memory map":
        _write_map(path, n_rows, d)
    else:
        path.mkdir(exist_ok=True)
        if kind == "safetensors shards":
            _write_shards(path, n_rows, d, files)
        else:
            _write_parquet(path, n_rows, d, files, lists=kind == "parquet lists")
    done.touch()
    return path


def _write_map(path: Path, n_rows: int, d: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, d)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks(n_rows, d):
            file.write(block.data)


def _write_parquet(path: Path, n_rows: int, d: int, files: int, *, lists: bool) -> None:
    """Write a row group for each block, as one column of lists or as d columns of numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(block: NDArray[np.float32]) -> Any:
        if lists:
            flat = pa.array(block.reshape(-1))
            return pa.table({"vector": pa.FixedSizeListArray.from_arrays(flat, d)})
        return pa.table({f"c{j}": np.ascontiguousarray(block[:, j]) for j in range(d)})

    schema = table(np.zeros((1, d), np.float32)).schema
    # Random floats repeat nowhere: a dictionary of them would be no smaller.
    paths = (path / f"part-{i:03d}.parquet" for i in range(files))
    writers = [pq.ParquetWriter(one, schema, use_dictionary=False) for one in paths]
    for number, block in enumerate(blocks(n_rows, d)):
        writers[number % files].write_table(table(block))
    for writer in writers:
        writer.close()


def _write_shards(path: Path, n_rows: int, d: int, files: int) -> None:
    from safetensors.numpy import save_file

    held = list[NDArray[np.float32]]()
    per_file, number = -(-n_rows // files), 0
    for block in blocks(n_rows, d):
        held.append(block)
        if sum(map(len, held)) >= per_file:
            save_file({"rows": np.concatenate(held)}, path / f"shard-{number:03d}.safetensors")
            held, number = [], number + 1
    if held:
        save_file({"rows": np.concatenate(held)}, path / f"shard-{number:03d}.safetensors")
