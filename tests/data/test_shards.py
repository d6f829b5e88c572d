"""Tables in many shards: folders of Parquet, Arrow, .npy and safetensors files."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from factormix import MFA, InputError
from factormix.data.arrow import write_rows
from factormix.data.readers import read_rows
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, read_ahead
from factormix.data.sources.shards import ShardedRows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

random = np.random.default_rng(0)
X = random.normal(size=(3000, 4)).astype(np.float32)
X[:, 0] = np.arange(3000)
KINDS = ["parquet", "arrow", "lists", "npy", "safetensors", "bfloat16"]


def round_to(kind: str, table: np.ndarray) -> np.ndarray:
    """Round a table to the numbers of a file of this kind."""
    if kind != "bfloat16":
        return table
    return torch.from_numpy(table).to(torch.bfloat16).to(torch.float32).numpy()


def frame(table: np.ndarray) -> Any:
    return pa.table({f"c{j}": table[:, j] for j in range(table.shape[1])})


def lists(table: np.ndarray) -> Any:
    flat = pa.array(table.reshape(-1))
    return pa.table({"vector": pa.FixedSizeListArray.from_arrays(flat, table.shape[1])})


def write(folder: Path, kind: str, table: np.ndarray, cuts: tuple[int, ...]) -> Path:
    """Write the parts of a table between cuts as files of a folder."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.split(table, cuts)):
        path = folder / f"part-{i:02d}"
        if kind in ("parquet", "lists"):
            rows = frame(part) if kind == "parquet" else lists(part)
            pq.write_table(rows, path.with_suffix(".parquet"), row_group_size=170)
        elif kind == "arrow":
            feather.write_feather(frame(part), path.with_suffix(".arrow"), chunksize=130)
        elif kind == "npy":
            np.save(path.with_suffix(".npy"), part)
        else:
            tensor = torch.from_numpy(part.copy())
            tensor = tensor.to(torch.bfloat16) if kind == "bfloat16" else tensor
            save_file({"activations": tensor}, path.with_suffix(".safetensors"))
    return folder


def read_in_shards(folder: Path, buffer_bytes: int = 4000) -> ShardedRows:
    """Read a small table in shards, as a large one is read, with a small buffer."""
    rows = read_rows(folder, in_memory_bytes=0)
    assert isinstance(rows, ShardedRows)
    rows.buffer_bytes = buffer_bytes
    return rows


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory) -> ShardedRows:
    folder = write(tmp_path_factory.mktemp("rows"), request.param, X, (500, 501, 1777))
    rows = read_in_shards(folder)
    rows.kind, rows.folder = request.param, folder
    return rows


def test_a_folder_is_one_table(source):
    expected = round_to(source.kind, X)
    assert isinstance(source, Rows)
    assert isinstance(source, Rows)
    assert (source.n_rows, source.n_features, source.dtype) == (3000, 4, np.float32)
    for size in (1000, 64, 7000):
        blocks = [batch.rows for batch in source.blocks(size)]
        assert {len(block) for block in blocks[:-1]} <= {size}
        np.testing.assert_array_equal(np.concatenate(blocks), expected)
    named = source.kind in ("parquet", "arrow")
    assert source.feature_names == (("c0", "c1", "c2", "c3") if named else None)


def order(rows: Any, batch_size: int = 50, start: int = 0, **which: int) -> np.ndarray:
    batches = rows.shuffled(batch_size, start=start, **{"seed": 0, "epoch": 0} | which)
    return np.concatenate([np.asarray(batch.rows)[:, 0] for batch in batches])


def test_every_pass_has_every_row_once_in_an_order_of_its_own(source):
    numbers = np.sort(round_to(source.kind, X)[:, 0])
    one, again = order(source), order(source)
    np.testing.assert_array_equal(one, again)
    for other in (order(source, epoch=1), order(source, seed=1)):
        np.testing.assert_array_equal(np.sort(other), numbers)
        assert (other != one).mean() > 0.9
    np.testing.assert_array_equal(np.sort(one), numbers)


def test_a_pass_goes_on_from_any_batch(source):
    whole = order(source)
    for start in (0, 1, 7, 30, 59):
        np.testing.assert_array_equal(order(source, start=start), whole[50 * start :])
    assert list(source.shuffled(50, seed=0, epoch=0, start=60)) == []


def test_rows_of_all_places_are_mixed(source):
    """Neighbours of the table are far apart, and the first rows come from many places."""
    whole = order(source)
    together = np.abs(np.diff(whole)) < 5
    assert together.mean() < 0.3
    assert np.ptp(whole[:250]) > 1000


def test_weights_go_with_their_rows(source):
    weights = np.where(X[:, 0] % 3 == 0, 0.0, 1 + np.arange(3000.0))
    weighted = source.with_weights(weights)
    seen = list(weighted.shuffled(50, seed=0, epoch=0))
    assert sum(map(len, seen)) == 2000
    assert [len(batch) for batch in seen[:-1]] == [50] * 39
    if source.kind != "bfloat16":
        for batch in seen:
            np.testing.assert_array_equal(batch.weights, batch.rows[:, 0] + 1)
    tail = list(weighted.shuffled(50, seed=0, epoch=0, start=33))
    np.testing.assert_array_equal(
        np.concatenate([b.weights for b in tail]), np.concatenate([b.weights for b in seen[33:]])
    )
    np.testing.assert_array_equal(np.concatenate([b.weights for b in weighted.blocks(64)]), weights)


def test_columns_are_chosen(source):
    columns = [0] if source.kind == "lists" else [2, 0]
    picked = read_rows(source.folder, columns=columns, in_memory_bytes=0)
    expected = round_to(source.kind, X)
    got = np.concatenate([batch.rows for batch in picked.blocks(999)])
    np.testing.assert_array_equal(got, expected if source.kind == "lists" else expected[:, [2, 0]])
    np.testing.assert_array_equal(np.sort(order(picked, seed=3)), np.sort(got[:, 0]))


@settings(max_examples=20)
@given(
    cuts=st.lists(st.integers(1, 599), max_size=5),
    batch_size=st.integers(1, 200),
    buffer=st.integers(1, 20_000),
    seed=st.integers(0, 99),
    n_open=st.integers(1, 9),
)
def test_any_cut_any_buffer_any_start(cuts, batch_size, buffer, seed, n_open):
    """Shards in memory stand in for files of both kinds: all rows once, and from any batch on."""

    class InMemory:
        first, name = 0, "memory"

        def __init__(self, rows: np.ndarray, direct: bool) -> None:
            self._rows, self.n_rows, self.direct = rows, len(rows), direct

        def open(self, first: int) -> Any:
            left = iter(self._rows[first:])
            return lambda out: np.copyto(out, list(islice(left, len(out))))

    parts = [part for part in np.split(X[:600], sorted(cuts)) if len(part)]
    for direct in (True, False):
        rows = ShardedRows(
            [InMemory(part, direct) for part in parts],
            4,
            X.dtype,
            n_open=n_open,
            buffer_bytes=buffer,
        )
        whole = order(rows, batch_size, seed=seed)
        np.testing.assert_array_equal(np.sort(whole), np.arange(600))
        for start in (1, 3):
            left = [
                b.rows[:, 0] for b in rows.shuffled(batch_size, seed=seed, epoch=0, start=start)
            ]
            got = np.concatenate([[], *left])
            np.testing.assert_array_equal(got, whole[start * batch_size :])


def test_training_takes_a_folder_and_resumes_in_it(source):
    def model(**options: Any) -> MFA:
        return MFA(3, 1, batch_size=200, max_epochs=2, random_state=0, **options)

    whole = model().fit(source)
    stopped = model(callbacks=[lambda p: p.record["step"] >= 12]).fit(source)
    assert stopped.n_steps_ < whole.n_steps_
    again = stopped.set_params(callbacks=()).resume(source)
    np.testing.assert_array_equal(again.means_, whole.means_)
    in_order = model().partial_fit(source)
    table = round_to(source.kind, X)
    np.testing.assert_array_equal(in_order.means_, model().partial_fit(table).means_)
    np.testing.assert_allclose(whole.score(source), whole.score(ArrayRows(table)), rtol=1e-6)


def test_small_tables_of_parquet_are_held_in_memory(tmp_path):
    rows = read_rows(write(tmp_path / "p", "parquet", X, (1000,)))
    assert isinstance(rows, ArrayRows)
    assert rows.checked
    assert rows.complete
    assert rows.feature_names == ("c0", "c1", "c2", "c3")


@pytest.mark.parametrize("dtype", ["uint8", "float16", "int16", "float64", "bool"])
@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet", "arrow"])
def test_values_keep_their_type(tmp_path, kind, dtype):
    table = (np.arange(60).reshape(20, 3) % 2).astype(dtype)
    folder = write(tmp_path / "f", kind, table, (7,))
    rows = read_rows(folder, in_memory_bytes=0)
    assert rows.dtype == dtype
    for batch in rows.shuffled(5, seed=0, epoch=0):
        assert batch.rows.dtype == dtype
    np.testing.assert_array_equal(np.concatenate([b.rows for b in rows.blocks(6)]), table)


def test_images_in_shards_keep_their_shape(tmp_path):
    stack = random.integers(0, 256, size=(30, 6, 5), dtype=np.uint8)
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", stack[10 * i : 10 * i + 10])
    rows = read_rows(tmp_path)
    assert (rows.n_features, rows.image_shape, rows.dtype) == (30, (6, 5), np.uint8)
    np.testing.assert_array_equal(
        np.concatenate([b.rows for b in rows.blocks(7)]), stack.reshape(30, 30)
    )


def find_error(path: Path, **options: Any) -> str:
    """Return the message of the error that a pass over a file or folder raises."""
    with pytest.raises(InputError) as caught:
        list(read_rows(path, in_memory_bytes=0, **options).blocks(100))
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(str(path))


def test_an_infinite_value_stops_with_its_place(tmp_path):
    wrong = X.copy()
    wrong[2000, 2] = np.inf
    wrong[1999, 1] = np.nan
    for kind, where in {
        "parquet": "/part-01.parquet has an infinite value in row 1500 (counting from 0), column",
        "arrow": "/part-01.arrow has an infinite value in row 1500 (counting from 0), column 'c2'",
        "npy": "/part-01.npy has an infinite value in row 1500, column 2 (counting from 0)",
        "safetensors": "/part-01.safetensors has an infinite value in row 1500, column 2 (count",
    }.items():
        folder = write(tmp_path / kind, kind, wrong, (500,))
        assert find_error(folder).startswith(where)
        with pytest.raises(InputError, match="infinite value in row 1500"):
            MFA(2, 1, random_state=0).fit(read_rows(folder, in_memory_bytes=0))


def test_a_truncated_file_is_named(tmp_path):
    for kind in ("parquet", "arrow", "npy", "safetensors"):
        folder = write(tmp_path / kind, kind, X, (500, 1000))
        path = sorted(folder.iterdir())[1]
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        text = find_error(folder)
        assert text.startswith(f"/{path.name} is ")
        assert "again" in text


def test_damage_in_the_middle_of_a_parquet_file_stops_with_its_place(tmp_path):
    folder = write(tmp_path / "p", "parquet", X, (500,))
    path = folder / "part-01.parquet"
    content = bytearray(path.read_bytes())
    # The footer, which is at the end, stays whole.
    content[6000:9000] = bytes(3000)
    path.write_bytes(content)
    text = find_error(folder)
    assert text.startswith("/part-01.parquet cannot be read from row ")
    assert "write it again, or take it out" in text


def test_files_that_do_not_fit_together(tmp_path):
    folder = write(tmp_path / "p", "parquet", X, (500,))
    pq.write_table(frame(X[:, :3]), folder / "part-02.parquet")
    assert "/part-02.parquet has other columns than" in find_error(folder)
    folder = write(tmp_path / "n", "npy", X, (500,))
    np.save(folder / "part-02.npy", X[:, :3])
    assert "part-02.npy has rows of 3 values, float32, and" in find_error(folder)
    np.save(folder / "part-02.npy", X.astype("f8"))
    assert "shards of one table must agree" in find_error(folder)
    write(folder, "parquet", X, (500,))
    assert "has .parquet and .npy files in it; give a folder of one kind" in find_error(folder)


def test_tensors_are_chosen_by_name(tmp_path):
    path = tmp_path / "two.safetensors"
    save_file({"a": torch.zeros(5, 2), "b": torch.ones(7, 2)}, path)
    assert "has several tensors (a, b); say which with a key" in find_error(path)
    assert "has no tensor called 'c'; it has a, b" in find_error(path, key="c")
    assert read_rows(path, key="b").n_rows == 7
    save_file({}, path)
    assert "has no tensors in it" in find_error(path)
    torch.save({"nested": {"a": torch.zeros(5, 2)}}, tmp_path / "nested.pt")
    assert "has no tensors in it" in find_error(tmp_path / "nested.pt")
    save_file({"a": torch.zeros(5, 2, dtype=torch.complex64)}, path)
    assert "holds values of type torch.complex64" in find_error(path)
    path.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    assert "is truncated or not a safetensors file (" in find_error(path)
    path.write_bytes(b"\xff" * 40)
    assert "is truncated or not a safetensors file (" in find_error(path)


def test_lists_of_different_lengths_stop_with_their_place(tmp_path):
    rows = [[1.0, 2.0]] * 5 + [[1.0, 2.0, 3.0]] + [[1.0, 2.0]] * 5
    path = tmp_path / "ragged.parquet"
    pq.write_table(pa.table({"v": rows}), path)
    assert find_error(path).startswith(
        " has a list of 3 entries in row 5 (counting from 0), column 'v', where 2 are expected"
    )
    rows[5] = None
    pq.write_table(pa.table({"v": rows}), path)
    assert " has no list in row 5" in find_error(path)


def test_lists_and_numbers_side_by_side_have_names(tmp_path):
    table = pa.table({"a": [1.0, 2.0], "v": [[3.0, 4.0], [5.0, 6.0]]})
    pq.write_table(table, tmp_path / "x.parquet")
    rows = read_rows(tmp_path / "x.parquet")
    assert rows.feature_names == ("a", "v[0]", "v[1]")
    np.testing.assert_array_equal(next(rows.blocks(9)).rows, [[1, 3, 4], [2, 5, 6]])


def test_partitions_and_addresses(tmp_path):
    for year in (2020, 2021):
        (tmp_path / "t").mkdir(exist_ok=True)
        write(tmp_path / "t" / f"year={year}", "parquet", X[:100], (50,))
    (tmp_path / "t" / "_SUCCESS").write_text("")
    (tmp_path / "t" / "_metadata.parquet").write_text("notes of a writer")
    assert read_rows(tmp_path / "t").n_rows == 200
    assert read_rows(f"file://{tmp_path}/t").n_rows == 200
    with pytest.raises(InputError, match="does not exist"):
        read_rows(f"file://{tmp_path}/none")


def test_reading_ahead_keeps_order_errors_and_no_thread():
    before = threading.active_count()

    def numbers() -> Any:
        yield from range(5)
        raise RuntimeError("broken")

    items = read_ahead(numbers())
    assert [next(items) for _ in range(5)] == list(range(5))
    with pytest.raises(RuntimeError, match="broken"):
        next(items)
    assert threading.active_count() == before
    closed = []

    def endless() -> Any:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    items = read_ahead(endless())
    assert next(items) == 0
    items.close()
    assert closed == [True]
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", ["parquet", "lists", "arrow"])
def test_the_size_of_reads_does_not_change_the_order(kind, tmp_path):
    rows = read_in_shards(write(tmp_path / "f", kind, X[:1000], (500, 501)), 8000)
    whole = [batch.rows for batch in rows.shuffled(50, seed=0, epoch=0)]
    for read_bytes in (1, 16 * 7, 16 * 100, 16 * 169):
        for shard in rows._shards:
            shard.read_bytes = read_bytes
        for start in (0, 7):
            again = [b.rows for b in rows.shuffled(50, seed=0, epoch=0, start=start)]
            np.testing.assert_array_equal(np.concatenate(again), np.concatenate(whole[start:]))


@given(
    n_rows=st.integers(0, 40),
    dtypes=st.lists(st.sampled_from(["f4", "f8", "f2", "u1", "i8", "?"]), min_size=1, max_size=11),
    out=st.sampled_from(["f4", "f8"]),
    at_once=st.integers(1, 50),
)
def test_columns_are_written_as_rows(n_rows, dtypes, out, at_once):
    draw = np.random.default_rng(n_rows)
    columns = [draw.normal(scale=9, size=n_rows).astype("i8").astype(kind) for kind in dtypes]
    rows = np.full((n_rows + 2, len(columns)), 7, out)
    write_rows(columns, rows[1:-1], rows_at_once=at_once)
    np.testing.assert_array_equal(rows[1:-1], np.column_stack(columns).astype(out))
    assert (rows[[0, -1]] == 7).all()


def test_an_open_row_group_takes_the_memory_of_its_rows(tmp_path):
    """Its pages are freed after reading, and rows that were used before others are read."""
    table = random.normal(size=(20_000, 64)).astype(np.float32)
    pq.write_table(frame(table), tmp_path / "x.parquet", use_dictionary=False)
    shard = read_in_shards(tmp_path / "x.parquet")._shards[0]
    space, pool = np.empty((4000, 64), np.float32), pa.default_memory_pool()
    before = pool.bytes_allocated()
    fill = shard.open(0)
    for j in range(5):
        fill(space)
        np.testing.assert_array_equal(space, table[4000 * j : 4000 * (j + 1)])
        assert pool.bytes_allocated() - before < 1.2 * table.nbytes
    del fill
    assert pool.bytes_allocated() == before
