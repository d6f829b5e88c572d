"""Rows from memory and from .npy files: every row once, in a known order, in bounded memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factormix.data.batches import Batch
from factormix.data.checks import add_observed_rows, check_finite, ensure_finite_rows
from factormix.data.features import Features, match_columns
from factormix.data.readers import read_rows
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, take_rows
from factormix.data.sources.convert import as_rows
from factormix.data.sources.files import FileRows
from factormix.data.sources.streams import Stream
from factormix.errors import InputError


def table(n: int, d: int, dtype: str = "f4") -> np.ndarray:
    """Number all cells, so that a row shows which one it is."""
    return np.arange(n * d).reshape(n, d).astype(dtype)


def everything(batches) -> np.ndarray:
    return np.concatenate([np.asarray(batch.rows) for batch in batches])


def saved(path: Path, X: np.ndarray) -> Path:
    np.save(path, X)
    return path


KINDS = ["array", "fortran array", "tensor", "file", "fortran file", "map"]


def source_of(kind: str, X: np.ndarray, folder: Path, **options: int) -> Rows:
    if kind == "array":
        return ArrayRows(X)
    if kind == "fortran array":
        return as_rows(np.asfortranarray(X))
    if kind == "tensor":
        return as_rows(torch.from_numpy(X))
    path = saved(folder / f"{kind}.npy", np.asfortranarray(X) if "fortran" in kind else X)
    if kind == "map":
        return as_rows(np.load(path, mmap_mode="r"))
    return FileRows(path, **options)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_pass_visits_every_row_once_in_an_order_of_seed_and_epoch(kind, data, tmp_path_factory):
    n, d = data.draw(st.integers(1, 1000), "n"), data.draw(st.integers(1, 4), "d")
    batch_size = data.draw(st.integers(1, 2 * n), "batch_size")
    seed, epoch = data.draw(st.integers(0, 2**64), "seed"), data.draw(st.integers(0, 1000), "epoch")
    # Small buffers make passes of many buffers, and blocks of one row or several.
    options = {"buffer_bytes": data.draw(st.integers(1, 8 * n), "buffer_bytes")}
    X = table(n, d)
    source = source_of(kind, X, tmp_path_factory.mktemp("rows"), **options)
    assert (source.n_rows, source.n_features) == (n, d)

    batches = list(source.shuffled(batch_size, seed=seed, epoch=epoch))
    sizes = [len(batch) for batch in batches]
    assert sizes[:-1] == [batch_size] * (len(batches) - 1)
    assert 1 <= sizes[-1] <= batch_size
    order = everything(batches)
    np.testing.assert_array_equal(order[np.argsort(order[:, 0])], X)

    again = everything(source.shuffled(batch_size, seed=seed, epoch=epoch))
    np.testing.assert_array_equal(order, again)
    start = data.draw(st.integers(0, len(batches) + 1), "start")
    rest = list(source.shuffled(batch_size, seed=seed, epoch=epoch, start=start))
    assert len(rest) == max(0, len(batches) - start)
    for batch, expected in zip(rest, batches[start:], strict=True):
        np.testing.assert_array_equal(batch.rows, expected.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_other_seeds_and_epochs_give_other_orders(kind, tmp_path):
    source = source_of(kind, table(500, 2), tmp_path, buffer_bytes=400)
    runs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    orders = [everything(source.shuffled(64, seed=s, epoch=e))[:, 0] for s, e in runs]
    for i, a in enumerate(orders):
        # A random permutation leaves about one row where it was.
        assert (a == table(500, 2)[:, 0]).sum() < 10
        assert all((a == b).sum() < 10 for b in orders[:i])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_blocks_come_in_order(kind, size, tmp_path):
    X = table(100, 3)
    blocks = list(source_of(kind, X, tmp_path).blocks(size))
    assert {len(block) for block in blocks[:-1]} <= {size}
    np.testing.assert_array_equal(everything(blocks), X)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_does_not_change_when_the_next_is_read(kind, tmp_path):
    source = source_of(kind, table(100, 2), tmp_path, buffer_bytes=80)
    kept, copies = [], []
    for batch in source.shuffled(10, seed=0, epoch=0):
        kept.append(batch.rows)
        copies.append(np.asarray(batch.rows).copy())
    for batch, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(batch, copy)


def test_a_file_sorted_by_class_is_mixed_well(tmp_path):
    classes, n = 10, 400_000
    labels = np.sort(np.arange(n) % classes).astype("u1")
    path = saved(tmp_path / "sorted.npy", np.repeat(labels[:, None], 16, axis=1))
    # A tenth of the file: about one class would fit.
    source = FileRows(path, buffer_bytes=n * 16 // 10)
    shares = np.array(
        [
            np.bincount(batch.rows[:, 0], minlength=classes) / len(batch)
            for batch in source.shuffled(500, seed=3, epoch=0)
        ]
    )
    assert len(shares) == n // 500
    assert shares.min() > 0.01
    assert shares.max() < 0.25
    # Independent draws would have a spread of 0.0134; whole blocks add to it, but not much.
    assert shares.std() < 0.04


@pytest.mark.parametrize("order", ["C", "F"])
def test_array_rows_copy_no_more_than_a_batch(order):
    X = np.asarray(table(100, 2), order=order)
    assert all(np.shares_memory(block.rows, X) for block in ArrayRows(X).blocks(10))


def test_tensors_stay_tensors_of_their_kind():
    X = torch.arange(12.0, dtype=torch.bfloat16, requires_grad=True).reshape(6, 2)
    source = as_rows(X)
    assert source.dtype == torch.bfloat16
    for batch in (*source.shuffled(4, seed=0, epoch=0), *source.blocks(4)):
        assert isinstance(batch.rows, torch.Tensor)
        assert batch.rows.dtype == torch.bfloat16
        assert not batch.rows.requires_grad


@pytest.mark.parametrize("dtype", ["u1", "?", "i2", "f2", "f4", "f8", ">f4", ">i4", "g"])
@pytest.mark.parametrize("kind", ["array", "file", "fortran file", "map"])
def test_dtypes_are_kept_as_torch_can_take_them(dtype, kind, tmp_path):
    X = table(10, 3, dtype)
    source = source_of(kind, X, tmp_path)
    expected = np.dtype("f8") if dtype == "g" else np.dtype(dtype).newbyteorder("=")
    assert source.dtype == expected
    for batch in (next(source.blocks(10)), next(source.shuffled(10, seed=0, epoch=0))):
        assert batch.rows.dtype == expected
        torch.from_numpy(batch.rows)
    np.testing.assert_array_equal(next(source.blocks(10)).rows, X)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 4, 5, 3), (6, 4, 5, 1)])
def test_stacks_of_images_are_flattened(order, shape, tmp_path):
    X = np.arange(np.prod(shape)).reshape(shape).astype("u1")
    source = FileRows(saved(tmp_path / "stack.npy", np.array(X, order=order)))
    assert source.image_shape == ((4, 5, 3) if shape[3:] == (3,) else (4, 5))
    np.testing.assert_array_equal(everything(source.blocks(4)), X.reshape(6, -1))


VIEWS = {
    "whole": lambda X: X,
    "rows": lambda X: X[7:40],
    "every other row": lambda X: X[3::2],
    "columns": lambda X: X[:, 1:3],
    "one column": lambda X: X[:, 2:3],
    "transposed": lambda X: X.T,
    "part transposed": lambda X: X[5:20].T,
    "rows of the transposed": lambda X: X.T[1:3],
    "plain array": lambda X: np.asarray(X)[10:],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_views_of_memory_maps_are_read_from_the_file(name, mode, tmp_path):
    path = saved(tmp_path / "X.npy", table(50, 5))
    X = np.load(path, mmap_mode=mode)
    if mode == "r+":
        X[20, 2] = -1
    view = VIEWS[name](X)
    source = as_rows(view)
    assert isinstance(source, FileRows)
    np.testing.assert_array_equal(everything(source.blocks(7)), view)


def test_a_map_with_an_offset_is_read_from_the_file(tmp_path):
    X = table(2000, 4)
    X.tofile(tmp_path / "raw")
    mapped = np.memmap(tmp_path / "raw", "f4", "r", offset=1000 * 16, shape=(1000, 4))
    source = as_rows(mapped[5:])
    assert isinstance(source, FileRows)
    np.testing.assert_array_equal(everything(source.blocks(100)), X[1005:])


@pytest.mark.parametrize("case", ["mode c", "backwards", "other file", "no file"])
def test_maps_that_their_file_does_not_show_are_read_in_place(case, tmp_path):
    path = saved(tmp_path / "X.npy", table(50, 5))
    X = np.load(path, mmap_mode="c" if case == "mode c" else "r")
    if case == "mode c":
        X[0, 0] = -1
    if case == "backwards":
        X = X[::-1]
    if case == "other file":
        os.replace(saved(tmp_path / "Y.npy", -table(50, 5) - 1), path)
    if case == "no file":
        path.unlink()
    source = as_rows(X)
    assert isinstance(source, ArrayRows)
    np.testing.assert_array_equal(everything(source.blocks(9)), X)


def test_rows_are_made_of_what_has_an_array():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    np.testing.assert_array_equal(next(as_rows(frame).blocks(2)).rows, [[1, 3], [2, 4]])
    source = as_rows(np.ones((2, 2)))
    assert as_rows(source) is source
    assert isinstance(source, Rows)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_selected_in_any_order(kind, tmp_path):
    X = table(50, 4)
    source: Any = source_of(kind, X, tmp_path)
    chosen = source.select(np.array([3, 0, 1])).select(np.array([1, 0]))
    np.testing.assert_array_equal(everything(chosen.blocks(7)), X[:, [0, 3]])
    mixed = everything(chosen.shuffled(7, seed=0, epoch=0))
    np.testing.assert_array_equal(mixed[np.argsort(mixed[:, 0])], X[:, [0, 3]])
    assert (chosen.n_rows, chosen.n_features) == (50, 2)
    np.testing.assert_array_equal(everything(source.blocks(7)), X)


def test_a_temporary_file_outlives_copies_of_its_rows(tmp_path):
    path = saved(tmp_path / "X.npy", table(3, 2))
    source = FileRows(path, delete=True).with_weights(np.ones(3)).select(np.array([1]))
    gc.collect()
    np.testing.assert_array_equal(everything(source.blocks(3)), table(3, 2)[:, 1:])
    del source
    gc.collect()
    assert not path.exists()


def test_a_file_is_checked_once_and_a_later_change_is_noticed(tmp_path):
    path = saved(tmp_path / "X.npy", table(3, 2))
    source = FileRows(path)
    assert not source.checked
    checked: Any = ensure_finite_rows(source)
    assert checked.checked
    assert checked.complete
    assert checked.with_weights(np.ones(3)).checked
    assert ensure_finite_rows(checked) is checked
    bad = table(3, 2)
    bad[1, 1] = np.inf
    os.replace(saved(tmp_path / "Y.npy", bad), path)
    with pytest.raises(InputError, match="infinite value in row 1, column 1"):
        ensure_finite_rows(source)
    with pytest.raises(InputError, match="infinite value in row 1, column 1"):
        list(checked.shuffled(2, seed=0, epoch=0))
    assert ensure_finite_rows(source.select(np.array([0]))).checked  # type: ignore[attr-defined]
    bad[1, 1] = np.nan
    os.replace(saved(tmp_path / "Z.npy", bad), path)
    assert not ensure_finite_rows(source).complete  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="has changed since it was checked"):
        list(checked.shuffled(2, seed=0, epoch=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_sample_gets_rows_with_the_columns_that_it_lacks(dtype):
    X = torch.full((50, 3), torch.nan, dtype=dtype)
    X[:, 0], X[40:, 1], X[45, 2] = 1, 2, 3
    rows = as_rows(X)
    sample = add_observed_rows(rows, Batch(X[:5]))
    assert bool((~sample.rows.isnan()).any(dim=0).all())
    X[45, 2] = torch.nan
    with pytest.raises(InputError, match=r"no value in column 2 \(counting from 0\)"):
        add_observed_rows(rows, Batch(X[:5]))


def test_an_array_may_change_after_it_was_checked():
    X = table(3, 2)
    source = ArrayRows(X)
    assert ensure_finite_rows(source).checked  # type: ignore[attr-defined]
    X[0, 0] = np.inf
    with pytest.raises(InputError, match="infinite value in row 0, column 0"):
        ensure_finite_rows(source)


def test_a_temporary_file_goes_with_its_rows(tmp_path):
    path = saved(tmp_path / "X.npy", table(3, 2))
    source = FileRows(path, delete=True)
    assert path.exists()
    del source
    gc.collect()
    assert not path.exists()


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.ones(3), r"X must have the shape .*, not \(3,\): Reshape .* X\.reshape\(1, -1\)"),
        (torch.ones(3, 2, 2), r"not \(3, 2, 2\).*X\.reshape\(len\(X\), -1\)"),
        (np.ones((2, 2, 2), "u1"), r"not \(2, 2, 2\).*X\.reshape\(len\(X\), -1\)"),
        (np.ones((0, 2)), r"X has 0 sample\(s\) \(shape=\(0, 2\)\)"),
        (np.ones((2, 0)), r"X has 0 feature\(s\) \(shape=\(2, 0\)\)"),
        (np.array([["a"]]), "X must hold numbers only, not strings"),
        (np.array([["a", None]], object), "X must hold numbers only"),
        (np.ones((2, 2), complex), "Complex data not supported"),
        (torch.ones(2, 2, dtype=torch.complex64), "Complex data not supported"),
        (np.ones((2, 2), "M8[s]"), "X must hold numbers only, not values of the type datetime64"),
        ("data.csv", r"X is the path 'data.csv', not rows: open it by .*read_rows"),
        (Path("shards"), "X is the path 'shards', not rows: open it by .*open_store"),
        (iter([np.ones((2, 2))]), "can be read once and may never end: only partial_fit"),
        (Stream([np.ones((2, 2))]), "X is a Stream, which can be read once"),
    ],
)
def test_bad_input_raises_one_sentence(X, message):
    with pytest.raises(InputError, match=message) as caught:
        as_rows(X)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [ArrayRows(np.ones((3, 2))), None])
def test_bad_batch_sizes_raise_one_sentence(source, tmp_path):
    source = source or FileRows(saved(tmp_path / "X.npy", np.ones((3, 2))))
    with pytest.raises(InputError, match="batch size is 0; it must be at least 1"):
        next(source.shuffled(0, seed=0, epoch=0))
    with pytest.raises(InputError, match="batch size is 0; it must be at least 1"):
        next(source.blocks(0))
    with pytest.raises(InputError, match="start at is -1; it must be at least 0"):
        next(source.shuffled(1, seed=0, epoch=0, start=-1))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_value_that_is_infinite_is_named(value, kind, tmp_path):
    X = np.zeros((3000, 500), "f4")
    X[2500, 5] = np.nan
    assert not check_finite(source_of(kind, X, tmp_path), "data")
    X[2500, 7] = X[2500, 9] = X[2600, 1] = value
    with pytest.raises(InputError, match="has an infinite value in row 2500, column 7 "):
        check_finite(source_of(kind, X, tmp_path), "data")
    assert check_finite(as_rows(np.ones((3, 3), int)))
    assert check_finite(as_rows(torch.ones(3, 3)))


def test_a_file_that_shrinks_or_disappears_raises_one_sentence(tmp_path):
    path = saved(tmp_path / "X.npy", table(1000, 4))
    source = FileRows(path)
    os.truncate(path, 8000)
    with pytest.raises(InputError, match=r"X\.npy cannot be read: it is shorter than it was"):
        list(source.shuffled(100, seed=0, epoch=0))
    path.unlink()
    with pytest.raises(InputError, match=r"X\.npy cannot be read: No such file"):
        next(source.blocks(10))


def write_zeros(folder: Path, megabytes: int, kind: str) -> Path:
    """Write a table of zeros: a long file with a hole, which is quick to make."""
    path = folder / f"{megabytes}.npy"
    np.lib.format.open_memmap(path, "w+", "f4", ((megabytes << 20) // 1024, 256))
    if kind == "npz":
        archive = path.with_suffix(".npz")
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.write(path, "X.npy")
        path = archive
    return path


def read_twice(path: Path, kind: str) -> None:
    """Read all rows shuffled and in order, through the file."""
    source = as_rows(np.load(path, mmap_mode="r")) if kind == "map" else read_rows(path)
    assert isinstance(source, FileRows)
    count = sum(len(batch) for batch in source.shuffled(1000, seed=0, epoch=0))
    assert count + sum(len(block) for block in source.blocks(1000)) == 2 * source.n_rows


@pytest.mark.parametrize("kind", ["map", "npy", "npz"])
def test_memory_does_not_grow_with_the_file(kind, tmp_path):
    """The arrays that a pass allocates, whatever the machine does besides."""
    peaks = []
    for megabytes in (60, 120):
        path = write_zeros(tmp_path, megabytes, kind)
        tracemalloc.start()
        read_twice(path, kind)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Two buffers of 32 MB, of which the shorter file takes one or two.
    assert peaks[1] - peaks[0] < 40 << 20
    assert peaks[1] < 88 << 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["map", "npy", "npz"])
def test_resident_memory_does_not_grow_with_the_file(kind, tmp_path):
    """In a process of its own, because the peak of a process never falls."""
    peaks = []
    for megabytes in (64, 256):
        path = write_zeros(tmp_path, megabytes, kind)
        script = f"from test_sources import *; print_peak({str(path)!r}, {kind!r})"
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        here = Path(__file__).parent
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=here,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert run.returncode == 0, run.stderr
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 24 << 10
    assert peaks[1] < 96 << 10


def print_peak(path: str, kind: str) -> None:
    """Print by how many kilobytes the peak of resident memory rises while a file is read."""

    def find(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    before = find("VmRSS")
    read_twice(Path(path), kind)
    print(find("VmHWM") - before)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_weighted_pass_visits_every_row_that_counts_once(kind, data, tmp_path_factory):
    n, d = data.draw(st.integers(1, 500), "n"), data.draw(st.integers(1, 4), "d")
    batch_size = data.draw(st.integers(1, 2 * n), "batch_size")
    order = {"seed": data.draw(st.integers(0, 2**64), "seed"), "epoch": 3}
    options = {"buffer_bytes": data.draw(st.integers(1, 8 * n), "buffer_bytes")}
    X = table(n, d)
    # The weight of a row shows which one it is; long runs of zeros empty whole buffers.
    numbers = np.arange(1.0, n + 1)
    start = data.draw(st.integers(0, n - 1), "first zero")
    weights = np.where(numbers % data.draw(st.integers(1, 4), "used") == 0, numbers, 0)
    weights[start : start + data.draw(st.integers(0, n), "zeros")] = 0
    source = source_of(kind, X, tmp_path_factory.mktemp("rows"), **options)
    assert isinstance(source, Rows)

    source = source.with_weights(weights)
    batches = list(source.shuffled(batch_size, **order))
    sizes = [len(batch) for batch in batches]
    assert sum(sizes) == np.count_nonzero(weights)
    assert sizes[:-1] == [batch_size] * len(sizes[:-1])
    for batch in batches:
        np.testing.assert_array_equal(batch.rows, X[batch.weights.astype(int) - 1])
    drawn = np.concatenate([[], *(batch.weights for batch in batches)])
    np.testing.assert_array_equal(np.sort(drawn), weights[weights > 0])

    skipped = data.draw(st.integers(0, len(batches) + 1), "start")
    rest = list(source.shuffled(batch_size, **order, start=skipped))
    assert len(rest) == max(0, len(batches) - skipped)
    for batch, same in zip(rest, batches[skipped:], strict=True):
        np.testing.assert_array_equal(batch.rows, same.rows)
        np.testing.assert_array_equal(batch.weights, same.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_a_zero_do_not_change_the_order(kind, tmp_path):
    source = source_of(kind, table(300, 2), tmp_path, buffer_bytes=400)
    plain = source.shuffled(32, seed=1, epoch=2)
    weighted = source.with_weights(np.linspace(1, 2, 300)).shuffled(32, seed=1, epoch=2)
    for batch, same in zip(plain, weighted, strict=True):
        np.testing.assert_array_equal(batch.rows, same.rows)


def test_a_weighted_pass_over_a_file_takes_no_more_memory_than_another(tmp_path):
    n = 400_000
    source = FileRows(saved(tmp_path / "x.npy", np.ones((n, 8), "f4")), buffer_bytes=1 << 18)
    weights = np.linspace(0, 1, n)
    peaks = []
    for batches in (
        source.shuffled(500, seed=0, epoch=0),
        source.with_weights(weights).shuffled(500, seed=0, epoch=0),
    ):
        tracemalloc.start()
        for _ in batches:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The weights alone are 3.2 MB.
    assert peaks[1] < peaks[0] + (1 << 20)


@pytest.mark.parametrize("order", ["C", "F"])
def test_single_rows_of_a_source(tmp_path, order):
    table = np.arange(60.0).reshape(12, 5)
    np.save(tmp_path / "x.npy", np.asarray(table, order=order))
    names = tuple("abcde")
    turned = Features(5, ("e", "a", "b", "c", "d"))
    numbers = np.array([7, 0, 11, 7])
    sources = [
        ArrayRows(table, feature_names=names),
        FileRows(tmp_path / "x.npy", feature_names=names),
        OnlyBlocks(table, names),
    ]
    for source in sources:
        np.testing.assert_array_equal(take_rows(source, numbers).rows, table[numbers])
        ordered = match_columns(source, turned, "MFA")
        np.testing.assert_array_equal(
            take_rows(ordered, numbers).rows, table[numbers][:, [4, 0, 1, 2, 3]]
        )
        assert len(take_rows(source, np.array([], dtype=np.int64)).rows) == 0
        for wrong in (-1, 12):
            with pytest.raises(InputError, match="0 to 11"):
                take_rows(source, np.array([wrong]))


class OnlyBlocks:
    """Rows that can be read in passes and in no other way."""

    def __init__(self, table, names):
        self._table, self.feature_names = table, names
        (self.n_rows, self.n_features), self.dtype = table.shape, table.dtype

    def blocks(self, size):
        for first in range(0, self.n_rows, 4):
            yield Batch(self._table[first : first + 4])

    def shuffled(self, batch_size, *, seed, epoch, start=0):
        raise AssertionError("a pass in order is enough")
