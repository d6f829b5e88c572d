"""Files and folders as rows: the values, and one sentence for each fault."""

from __future__ import annotations

import gc
import gzip
import lzma
import os
import re
import struct
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factormix.data.features import Features
from factormix.data.pictures import as_image
from factormix.data.readers import read_rows
from factormix.data.readers.lines import LineReader
from factormix.data.readers.tables import read_table
from factormix.data.sources.base import Rows
from factormix.data.sources.files import FileRows
from factormix.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")
ExifTags = pytest.importorskip("PIL.ExifTags")


@pytest.fixture(autouse=True)
def spools(tmp_path_factory, monkeypatch):
    """Send temporary copies to a folder of their own, and check that none is left."""
    folder = tmp_path_factory.mktemp("spools")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    if any(folder.iterdir()):
        gc.collect()
    assert list(folder.iterdir()) == []


def whole(source: Rows) -> np.ndarray:
    return np.concatenate([batch.rows for batch in source.blocks(7)])


def find_error(path: Path, **options: object) -> str:
    """Return the one sentence of the error that reading `path` raises."""
    with pytest.raises(InputError) as caught:
        read_rows(path, **options)
    message = str(caught.value)
    assert message.startswith((str(path), "A", "The", "Columns"))
    assert message.endswith(".")
    assert "\n" not in message
    return message.removeprefix(str(path)).strip()


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def random_table(n: int = 50, d: int = 4, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, d)).astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "u1", "i8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_are_read_where_they_lie(dtype, order, tmp_path, spools):
    X = np.array(random_table(dtype=dtype), order=order)
    np.save(tmp_path / "data.npy", X)
    source = read_rows(tmp_path / "data.npy")
    assert (source.name, source.dtype) == ("data.npy", X.dtype)
    assert source.image_shape is None
    assert source.feature_names is None
    np.testing.assert_array_equal(whole(source), X)
    assert list(spools.iterdir()) == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("key", ["X", "x", "data", "only"])
def test_npz_files_give_their_array(save, order, key, tmp_path, spools):
    X = np.array(random_table(dtype="f8"), order=order)
    others = {} if key == "only" else {"labels": np.arange(50)}
    save(tmp_path / "data.npz", **{key: X}, **others)
    source = read_rows(tmp_path / "data.npz")
    assert (source.name, source.dtype) == ("data.npz", X.dtype)
    np.testing.assert_array_equal(whole(source), X)
    assert len(list(spools.iterdir())) == 1
    del source
    gc.collect()
    assert list(spools.iterdir()) == []


def test_a_key_chooses_the_array(tmp_path):
    np.savez(tmp_path / "data.npz", X=random_table(), other=random_table(9, 2))
    assert read_rows(tmp_path / "data.npz", key="other").n_rows == 9
    assert read_rows(str(tmp_path / "data.npz")).n_rows == 50


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 3, 4, 3), (5, 3, 4, 1)])
def test_stacks_of_bytes_are_images_in_their_own_values(suffix, shape, tmp_path):
    X = np.random.default_rng(0).integers(0, 256, shape).astype("u1")
    path = tmp_path / f"stack{suffix}"
    (np.save if suffix == ".npy" else np.savez)(path, X)
    source = read_rows(path)
    assert source.image_shape == ((3, 4, 3) if shape[3:] == (3,) else (3, 4))
    assert source.dtype == np.uint8
    np.testing.assert_array_equal(whole(source), X.reshape(5, -1))


BAD_ARRAYS = {
    "gap": (np.array([[1, np.nan], [np.inf, 3]]), "has an infinite value in row 1, column 0"),
    "inf": (np.array([[1, -np.inf]]), "has an infinite value in row 0, column 1 (counting"),
    "1-D": (np.ones(3), "has shape (3,); two dimensions, (rows, columns), are needed: try"),
    "0-D": (np.array(3.0), "has shape (); two dimensions"),
    "3-D": (np.ones((3, 2, 2)), "has shape (3, 2, 2); two dimensions, (rows, columns), are needed"),
    "channels": (np.ones((3, 2, 2, 5), "u1"), "has shape (3, 2, 2, 5); two dimensions"),
    "no rows": (np.ones((0, 2)), "has shape (0, 2), so it is empty; give at least one row."),
    "no columns": (np.ones((2, 0)), "has shape (2, 0), so it is empty"),
    "strings": (np.array([["a", "b"]]), "holds strings; only real numbers can be used"),
    "bytes": (np.array([[b"a", b"b"]]), "holds strings; only real numbers can be used"),
    "complex": (np.ones((2, 2), complex), "holds complex numbers; only real numbers"),
    "objects": (np.array([[None, 1]]), "holds objects; only real numbers can be used"),
    "structured": (np.ones((2, 2), [("ä€", "f4")]), None),
}


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("name", BAD_ARRAYS)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_bad_arrays(suffix, name, tmp_path):
    X, message = BAD_ARRAYS[name]
    path = tmp_path / f"data{suffix}"
    (np.save if suffix == ".npy" else np.savez)(path, X)
    found = find_error(path).removeprefix("[arr_0]").strip()
    if message is not None:
        assert found.startswith(message)


def test_npy_files_that_cannot_be_read(tmp_path):
    np.save(tmp_path / "whole.npy", random_table())
    content = (tmp_path / "whole.npy").read_bytes()
    for size in (len(content) - 1, 200, 128):
        short = written(tmp_path / "short.npy", content[:size])
        assert find_error(short) == (
            f"is truncated: it has {size} bytes of {len(content)}; write or copy it again."
        )
    for broken in (content[:100], content[:7], b"a" * 500, b"PK\3\4" + content):
        path = written(tmp_path / "broken.npy", broken)
        assert find_error(path).startswith("is not a readable .npy file; write it again with numpy")


def test_npz_files_that_cannot_be_read(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", X=random_table(500))
    content = (tmp_path / "whole.npz").read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 255
    for broken in (content[:-1], content[:500], content[:10], b"a" * 500, bytes(flipped)):
        path = written(tmp_path / "broken.npz", broken)
        assert find_error(path) == "is not a readable .npz file; write it again with numpy.savez."


def test_npz_files_without_a_clear_choice(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, a=random_table(), b=random_table())
    assert find_error(path) == "has several arrays (a, b); say which with a key."
    assert find_error(path, key="X") == "has no array called 'X'; it has a, b."
    np.savez(path)
    assert find_error(path).startswith("has no arrays in it")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_csv_numbers_come_back_exactly(delimiter, header, end, data, tmp_path_factory):
    n, d = data.draw(st.integers(1, 20)), data.draw(st.integers(2, 6))
    floats = st.floats(allow_nan=False, allow_infinity=False)
    X = np.array(
        data.draw(st.lists(st.lists(floats, min_size=d, max_size=d), min_size=n, max_size=n))
    )
    lines = [delimiter.join(repr(float(x)) for x in row) for row in X]
    names = tuple(f"column {j}" for j in range(d))
    if header:
        lines.insert(0, delimiter.join(f'"{name}"' for name in names))
    path = written(tmp_path_factory.mktemp("csv") / "data.csv", end.join(lines) + end)
    source = read_rows(path)
    assert source.dtype == np.float64
    assert source.feature_names == (names if header else None)
    np.testing.assert_array_equal(whole(source), X)


@pytest.mark.parametrize(
    ("text", "names", "X"),
    [
        ("1\n2\n3", None, [[1], [2], [3]]),
        ("x\n1\n2", ("x",), [[1], [2]]),
        ("1,2\n3,4", None, [[1, 2], [3, 4]]),
        ("\n\n1,2\n\n3,4\n\n", None, [[1, 2], [3, 4]]),
        ("\ufeffa,b\n3,4\n", ("a", "b"), [[3, 4]]),
        ("# a, b\n3, 4\n", ("a", "b"), [[3, 4]]),
        ('"a;b",c\n"3",4\n', ("a;b", "c"), [[3, 4]]),
        ("label,0,1\n5,6,7\n", ("label", "0", "1"), [[5, 6, 7]]),
        # Whole numbers above other things are names, as a data frame writes them.
        ("0,1\n0.5,6.0\n1.5,2.25\n", ("0", "1"), [[0.5, 6], [1.5, 2.25]]),
        (
            "2019,2020,2021\n5,1.5,7\n6,2.5,8\n",
            ("2019", "2020", "2021"),
            [[5, 1.5, 7], [6, 2.5, 8]],
        ),
        ("7\n0.5\n1e-3", ("7",), [[0.5], [0.001]]),
        ("label,2019,2020\n5,6,7\n", ("label", "2019", "2020"), [[5, 6, 7]]),
        # Numbers that are not whole, or come twice, are no names.
        ("1.0,2.0\n0.5,0.25\n", None, [[1, 2], [0.5, 0.25]]),
        ("3,0,0\n0.5,0.25,0.75\n", None, [[3, 0, 0], [0.5, 0.25, 0.75]]),
        ("3,1\n2,5\n4,0\n", None, [[3, 1], [2, 5], [4, 0]]),
        ("-3,1\n0.5,0.25\n", None, [[-3, 1], [0.5, 0.25]]),
        # A number without decimals in each column may be a round value.
        ("3,1\n0.5,2\n4,0.5\n", None, [[3, 1], [0.5, 2], [4, 0.5]]),
        (
            ",".join(map(str, range(20))) + "\n" + ",".join("7" * 20),
            tuple(map(str, range(20))),
            [[7] * 20],
        ),
        ("1e3,-.5\n+2.,1E-3", None, [[1000, -0.5], [2, 0.001]]),
    ],
)
def test_csv_forms(text, names, X, tmp_path):
    source = read_rows(written(tmp_path / "data.csv", text))
    assert source.feature_names == names
    np.testing.assert_array_equal(whole(source), X)


@pytest.mark.parametrize("text", ["0,1,2\n5,6,7\n", "2019,2022\n5,6\n7,8\n1,2\n"])
def test_a_doubtful_first_line_is_a_row_with_a_warning(text, tmp_path):
    path = written(tmp_path / "data.csv", text)
    with pytest.warns(UserWarning, match=r"data\.csv is taken as a row of numbers.*--header"):
        source = read_rows(path)
    assert source.feature_names is None
    rows = [list(map(float, line.split(","))) for line in text.split()]
    np.testing.assert_array_equal(whole(source), rows)
    # The option decides without a warning.
    named = read_rows(path, header=True)
    assert named.feature_names == tuple(text.split()[0].split(","))
    np.testing.assert_array_equal(whole(named), rows[1:])
    np.testing.assert_array_equal(whole(read_rows(path, header=False)), rows)


@pytest.mark.parametrize("labels", [range(5), [2019, 2020, 2021, 2022, 2023], [7, 3, 1, 9, 4]])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_frame_with_numbers_for_names_comes_back(labels, kind, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(random_table(100, 5, "f8"), columns=labels)
    path = tmp_path / f"data.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    source = read_rows(path)
    assert source.n_rows == 100
    assert source.feature_names == tuple(map(str, labels))
    np.testing.assert_array_equal(whole(source), frame.to_numpy())


def test_a_named_index_of_a_frame_is_no_feature(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(random_table(100, 2, "f8"), columns=["a", "b"])
    frame.index = pandas.Index(np.arange(100) + 1000, name="customer")
    frame.to_parquet(tmp_path / "data.parquet")
    source = read_rows(tmp_path / "data.parquet")
    assert source.feature_names == ("a", "b")
    np.testing.assert_array_equal(whole(source), frame.to_numpy())
    # It can be chosen.
    chosen = read_rows(tmp_path / "data.parquet", columns=["customer", "a"])
    np.testing.assert_array_equal(whole(chosen), frame.reset_index()[["customer", "a"]])


def test_columns_are_chosen_by_name_or_number(tmp_path):
    X = random_table(30, 3, "f8")
    lines = [f"id{i}," + ",".join(map(repr, row)) for i, row in enumerate(X.tolist())]
    text = "key,a,b,2\n" + "\n".join(lines) + "\n"
    path = written(tmp_path / "data.csv", text)
    pq.write_table(
        pa.table({"key": ["x"] * 30, "a": X[:, 0], "b": X[:, 1], "2": X[:, 2]}),
        tmp_path / "data.parquet",
    )
    np.save(tmp_path / "data.npy", np.column_stack([np.full(30, np.nan), X]))
    np.savez(tmp_path / "data.npz", np.column_stack([np.full(30, np.nan), X]))
    for kind in ("csv", "parquet"):
        for columns, names, places in [
            (["b", "a"], ("b", "a"), [1, 0]),
            ([3, 1], ("2", "a"), [2, 0]),
            # A name goes before a number.
            (["2", "1"], ("2", "a"), [2, 0]),
        ]:
            source = read_rows(tmp_path / f"data.{kind}", columns=columns)
            assert source.feature_names == names
            np.testing.assert_array_equal(whole(source), X[:, places])
    for kind in ("npy", "npz"):
        source = read_rows(tmp_path / f"data.{kind}", columns=[2, "1"])
        assert (source.n_features, source.feature_names) == (2, None)
        np.testing.assert_array_equal(whole(source), X[:, [1, 0]])
        rows = np.concatenate([b.rows for b in source.shuffled(4, seed=0, epoch=0)])
        np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(X[:, [1, 0]], axis=0))
    assert find_error(path, columns=["c"]).startswith("has no column 'c'; it has key, a, b, 2, and")
    assert find_error(path, columns=[4]).endswith("numbers count from 0 to 3.")
    assert find_error(tmp_path / "data.npy", columns=["a"]).startswith(
        "has no column 'a'; it has no"
    )
    assert find_error(path, columns=["a", 1]).endswith("was chosen twice; name each one once.")
    assert "'id0', which is not a number" in find_error(path, columns=["key"])
    assert find_error(written(tmp_path / "odd.csv", text + "id,1,2\n"), columns=["a"]).startswith(
        "has 3 columns in line 32, and 4 in the first line"
    )
    assert "is not a .csv file" in find_error(tmp_path / "data.npy", header=True)
    (tmp_path / "images").mkdir()
    assert "is a folder of images" in find_error(tmp_path / "images", columns=["a"])


@pytest.mark.parametrize("comments", ["# made by X\n", "# one\n#two, three, four\n"])
def test_comments_above_a_table_are_skipped(comments, tmp_path):
    for header in ("a,b\n", "# a,b\n"):
        rows = read_rows(written(tmp_path / "data.csv", comments + header + "1,2\n3,4\n"))
        assert rows.feature_names == ("a", "b")
        np.testing.assert_array_equal(whole(rows), [[1, 2], [3, 4]])
        reader = LineReader(Features(2, ("a", "b")))
        lines = (comments + header + "1,2\n").splitlines()
        assert [reader.row(line) for line in lines[:-1]] == [None] * (len(lines) - 1)
        np.testing.assert_array_equal(reader.row(lines[-1]), [1, 2])


def test_numbers_that_may_identify_rows_are_named(tmp_path):
    text = "customer_id,paid_id,x\n" + "".join(f"{7 * i + 3},{i % 3},{i}.5\n" for i in range(9))
    path = written(tmp_path / "data.csv", text)
    pd.read_csv(path).to_parquet(tmp_path / "data.parquet")
    for name in ("data.csv", "data.parquet"):
        with pytest.warns(UserWarning, match="'customer_id' is used as a feature: if it") as found:
            rows = read_rows(tmp_path / name)
        assert len(found) == 1
        assert rows.n_features == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_rows(tmp_path / name, ids=["customer_id"]).n_features == 2
            read_rows(tmp_path / name, columns=["customer_id", "x"])


def test_csv_files_of_several_chunks(tmp_path):
    X, path = random_table(2000, 10, "f8"), tmp_path / "data.csv"
    np.savetxt(path, X, delimiter=",", header="a,b,c,d,e,f,g,h,i,j")
    source = read_table(path, chunk_bytes=20_000)
    assert source.feature_names == tuple("abcdefghij")
    np.testing.assert_array_equal(np.concatenate([batch.rows for batch in source.blocks(1000)]), X)
    with path.open("a") as file:
        file.write("1,2,3,4,5,6,seven,8,9,10\n")
    with pytest.raises(InputError, match="'seven', which is not a number, in line 2002, column 7"):
        read_table(path, chunk_bytes=20_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b\n1,2\n3,x\n",
            "has 'x', which is not a number, in line 3, column 2 (b); write a finite",
        ),
        ("1,2\n3,x\n", "has 'x', which is not a number, in line 2, column 2; write a finite"),
        ("5.1,abc\n3,4\n", "has 'abc', which is not a number, in line 1, column 2; write a finite"),
        ("1,2\n\n3,\n4,x\n", "has 'x', which is not a number, in line 4, column 2;"),
        ("1,2\n3,nan\n,inf\n", "has an infinite value (inf) in line 3, column 2;"),
        ("1,2\n-inf,4\n", "has an infinite value (-inf) in line 2, column 1;"),
        ("1,2\n1e999,4\n", "has an infinite value (1e999) in line 2, column 1;"),
        ("1,2\n1_000,4\n", "has '1_000', which is not a number, in line 2"),
        (
            "1,0;2\n1,5;4,x\n",
            "has '4,x', which is not a number, in line 2, column 2; write a finite",
        ),
        (
            "1,2,3\n4,5\n",
            "has 2 columns in line 2, and 3 in the first line; give every line the same number.",
        ),
        ("a,b\n4,5,6\n", "has 3 columns in line 2, and 2 in the first line"),
        ("a,b\n1,2\n4,5,6\n", "has 3 columns in line 3, and 2 in the first line"),
        ("a,b\n", "has names but no rows; give at least one row."),
        ("\n \n", "has only blank lines; write it again."),
        ("", "is empty; write it again."),
        (b"1,2\n\xe4,3\n", "has 'ä', which is not a number, in line 2, column 1; write"),
        (b"1,2\n\0\0,3\n", "is not a text file; save it as one."),
        ("name,town\nAnn,Bonn\nBob,Rome\n", "has no columns of numbers; choose columns, or"),
        (
            "a,b\ncm,kg\n1,2\n3,4\n",
            "has 'cm', which is not a number, in line 2, column 1 (a); delete line 2 if it is a"
            " second header, or",
        ),
        ("# made\n# today\na,b\n1,x\n3,4\n", "has 'x', which is not a number, in line 4, column 2"),
        ('1,2\n"3,4\n', "has 1 columns in line 2, and 2 in the first line"),
    ],
)
def test_bad_csv_files(text, message, tmp_path):
    assert find_error(written(tmp_path / "data.csv", text)).startswith(message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,\n,2\n", [[1, np.nan], [np.nan, 2]]),
        ("1.5,NA,3\nnull,nan,N/A\n", [[1.5, np.nan, 3], [np.nan] * 3]),
        ('"1";"";3\n ; "NA" ;None\n', [[1, np.nan, 3], [np.nan] * 3]),
        ("1\t\t3\n\t2\t\n", [[1, np.nan, 3], [np.nan, 2, np.nan]]),
        ("1,,,4\n,,,\n", [[1, np.nan, np.nan, 4], [np.nan] * 4]),
        # Sodium is a name among names, and no name where it stands alone.
        ("NA,K\n1,2\n", [[1, 2]]),
        ("NA,2\n1,\n", [[np.nan, 2], [1, np.nan]]),
    ],
)
def test_cells_without_a_value_are_missing(text, expected, tmp_path):
    source = read_rows(written(tmp_path / "data.csv", text))
    np.testing.assert_array_equal(whole(source), expected)
    assert source.checked
    assert source.complete == np.isfinite(expected).all()


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        ({"a": [1, 2], "b": [1, None]}, "f8"),
        ({"a": [True, None], "b": [1.0, 2.0]}, "f8"),
        ({"a": pa.array([1.0, None], "f4"), "b": pa.array([np.nan, 2], "f4")}, "f4"),
        ({"a": pa.array([Decimal(1), None]), "b": [None, 2]}, "f8"),
    ],
)
def test_nulls_of_parquet_are_missing(columns, dtype, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    source = read_rows(tmp_path / "data.parquet")
    assert source.dtype == np.dtype(dtype)
    assert not source.complete
    lists = [c.to_pylist() if hasattr(c, "to_pylist") else c for c in columns.values()]
    expected = np.array([[np.nan if v is None else float(v) for v in c] for c in lists]).T
    np.testing.assert_array_equal(whole(source), expected)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["float32", "float32"], "f4"),
        (["float64", "float32"], "f8"),
        (["int64", "float32"], "f8"),
        (["uint8", "uint8"], "u1"),
        (["uint8", "int32"], "i4"),
        (["bool", "float32"], "f4"),
        (["float16", "float16"], "f2"),
        (["decimal", "uint8"], "f8"),
    ],
)
def test_parquet_columns_keep_their_kind(types, expected, tmp_path):
    columns = {}
    for j, name in enumerate(types):
        values = np.arange(1000) % 2 + j if name != "bool" else np.arange(1000) % 2 == 0
        columns[f"column {j}"] = (
            pa.array([Decimal(int(v)) for v in values], pa.decimal128(10, 2))
            if name == "decimal"
            else pa.array(values.astype(name))
        )
    pq.write_table(pa.table(columns), tmp_path / "data.parquet", row_group_size=300)
    source = read_rows(tmp_path / "data.parquet")
    assert source.dtype == np.dtype(expected)
    assert source.feature_names == tuple(columns)
    expected_columns = [np.asarray(column.to_pylist(), float) for column in columns.values()]
    np.testing.assert_array_equal(whole(source), np.stack(expected_columns, axis=1))


def test_a_data_frame_comes_back_without_its_index(tmp_path):
    pandas = pytest.importorskip("pandas")
    X = random_table(3_000, 3, "f8")
    frame = pandas.DataFrame(X, columns=["a", "b", "a.b"], index=np.arange(len(X)) * 2)
    frame.to_parquet(tmp_path / "data.parquet")
    source = read_rows(tmp_path / "data.parquet")
    assert source.feature_names == ("a", "b", "a.b")
    np.testing.assert_array_equal(np.concatenate([batch.rows for batch in source.blocks(1000)]), X)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [None], "b": ["x"]}, "has no columns of numbers; choose columns, or convert"),
        (
            {"a": [1.0, 2.0, None], "b": [1.0, np.nan, -np.inf]},
            "has an infinite value in row 2 (counting from 0), column 'b'; remove the row or",
        ),
        ({"a": [np.inf, 2.0]}, "has an infinite value in row 0 (counting from 0), column 'a'"),
        ({"a": pa.array([], "f8")}, "has columns but no rows; give at least one row."),
        ({}, "has no columns; write it again."),
    ],
)
def test_bad_parquet_files(columns, message, tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table(columns), path)
    assert find_error(path).startswith(message)


def test_a_bad_cell_deep_in_a_parquet_file(tmp_path):
    path = tmp_path / "data.parquet"
    X = random_table(6_000, 2)
    X[5_555, 1] = np.inf
    pq.write_table(pa.table({"a": X[:, 0], "b": X[:, 1]}), path, row_group_size=500)
    assert find_error(path).startswith("has an infinite value in row 5555 (counting from 0),")


def test_parquet_files_that_cannot_be_read(tmp_path):
    pq.write_table(pa.table({"a": np.arange(1000.0)}), tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    for broken in (content[:-1], content[:100], b"a" * 500):
        path = written(tmp_path / "broken.parquet", broken)
        assert find_error(path) == "is not a readable Parquet file; write it again."


def pixels(*shape: int, seed: int = 0, white: int = 255) -> np.ndarray:
    kind = "u1" if white == 255 else "u2"
    return np.random.default_rng(seed).integers(0, white + 1, shape).astype(kind)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".PNG"])
def test_images_are_rows_by_name(shape, suffix, tmp_path):
    X = [pixels(*shape, seed=i) for i in range(3)]
    for name, image in zip("bca", X, strict=True):
        Image.fromarray(image).save(tmp_path / f"{name}{suffix}")
    written(tmp_path / "notes.txt", "not an image")
    written(tmp_path / "._a.png", "not an image either")
    source = read_rows(tmp_path)
    assert source.image_shape == shape
    assert (source.name, source.dtype) == (tmp_path.name, np.float32)
    expected = np.stack([X[2], X[0], X[1]]).reshape(3, -1) / np.float32(255)
    np.testing.assert_array_equal(whole(source), expected)


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".webp"])
def test_images_that_lose_a_little_are_close(suffix, tmp_path):
    image = np.add.outer(np.arange(32), np.arange(32)).astype("u1") * 3
    Image.fromarray(image).save(tmp_path / f"a{suffix}", quality=95)
    source = read_rows(tmp_path)
    X = whole(source).reshape(source.image_shape)
    expected = image / 255 if X.ndim == 2 else np.repeat(image[..., None] / 255, 3, axis=2)
    np.testing.assert_allclose(X, expected, atol=0.05)


def test_images_of_16_bits_keep_them(tmp_path):
    image = pixels(6, 6, white=65535)
    Image.fromarray(image).save(tmp_path / "a.png")
    np.testing.assert_allclose(
        whole(read_rows(tmp_path)), image.reshape(1, -1) / 65535, rtol=0, atol=1e-6
    )
    assert read_rows(tmp_path, image_size=(3, 3)).n_features == 9


def test_one_image_in_colour_makes_all_so(tmp_path):
    grey, deep, colour = pixels(4, 4), pixels(4, 4, white=65535), pixels(4, 4, 3)
    for name, image in {"a": grey, "b": deep, "c": colour}.items():
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    Image.fromarray(pixels(4, 4, 4)).save(tmp_path / "d.png")
    X = whole(read_rows(tmp_path)).reshape(4, 4, 4, 3)
    np.testing.assert_allclose(X[0], np.repeat(grey[..., None] / 255, 3, axis=2), atol=1e-6)
    np.testing.assert_allclose(X[1], np.repeat(deep[..., None] / 65535, 3, axis=2), atol=1e-6)
    np.testing.assert_allclose(X[2], colour / 255, atol=1e-6)


def test_an_image_size_brings_all_to_it(tmp_path):
    Image.fromarray(np.full((8, 8), 51, "u1")).save(tmp_path / "a.png")
    Image.fromarray(np.full((20, 10), 102, "u1")).save(tmp_path / "b.png")
    source = read_rows(tmp_path, image_size=(3, 5))
    assert source.image_shape == (3, 5)
    np.testing.assert_allclose(whole(source), np.repeat([[0.2], [0.4]], 15, axis=1), atol=1e-6)
    assert find_error(tmp_path, image_size=(0, 5)).startswith("The image size is (0, 5); give")


@pytest.mark.parametrize(
    ("suffix", "shape"), [(".png", (4, 6, 3)), (".tif", (4, 6)), (".webp", (4, 6, 3))]
)
def test_photographs_that_are_marked_as_turned_are_turned(suffix, shape, tmp_path):
    """Also a grey TIFF, which lies in its file as in memory."""
    image = pixels(*shape)
    marks = Image.Exif()
    marks[ExifTags.Base.Orientation] = 6
    Image.fromarray(image).save(tmp_path / f"a{suffix}", exif=marks, lossless=True)
    upright = np.rot90(image, -1)
    Image.fromarray(upright).save(tmp_path / f"b{suffix}", lossless=True)
    source = read_rows(tmp_path)
    assert source.image_shape == upright.shape
    expected = upright.reshape(1, -1) / np.float32(255)
    np.testing.assert_array_equal(whole(source), np.repeat(expected, 2, axis=0))
    found = as_image(tmp_path / f"a{suffix}").reshape(upright.shape)
    np.testing.assert_array_equal(found, upright)


def write_deep_png(path: Path, image: np.ndarray) -> Path:
    """Write an image (h, w, c) of 16 bits, independently of the reader."""
    h, w, c = image.shape
    header = struct.pack(">2I5B", w, h, 16, {2: 4, 3: 2, 4: 6}[c], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in image.astype(">u2"))
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + name + body
        content += struct.pack(">I", zlib.crc32(name + body))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_16_bits_are_refused_rather_than_cut(channels, tmp_path):
    write_deep_png(tmp_path / "a.png", pixels(5, 4, channels, white=65535))
    for read in (read_rows, as_image):
        with pytest.raises(InputError, match=r"a\.png has 16 bits in colour .* with 8 bits"):
            read(tmp_path / "a.png" if read is as_image else tmp_path)


def test_a_file_of_several_images_is_refused(tmp_path):
    first, second = (Image.fromarray(pixels(5, 4, seed=i)) for i in range(2))
    first.save(tmp_path / "a.tif", save_all=True, append_images=[second])
    for read in (read_rows, as_image):
        with pytest.raises(InputError, match=r"a\.tif has 2 images; save each as a file of its"):
            read(tmp_path / "a.tif" if read is as_image else tmp_path)


def test_the_preview_behind_a_photograph_is_left_out(tmp_path):
    photograph, preview = (Image.fromarray(pixels(n, n, 3)) for n in (8, 4))
    photograph.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[preview])
    assert read_rows(tmp_path).image_shape == (8, 8, 3)


def test_bad_images(tmp_path):
    assert find_error(tmp_path).startswith("has no images in it; give a folder with .png, .jpg")
    Image.fromarray(pixels(40, 50)).save(tmp_path / "a.png")
    Image.fromarray(pixels(50, 40)).save(tmp_path / "b.png")
    with pytest.raises(InputError, match=r"b\.png is 40 x 50 pixels where a\.png is 50 x 40; give"):
        read_rows(tmp_path)
    content = (tmp_path / "a.png").read_bytes()
    for broken in (content[: len(content) // 2], content[:20], b"", b"no image"):
        written(tmp_path / "b.png", broken)
        with pytest.raises(InputError, match=r"b\.png is not a readable image; replace or remove"):
            read_rows(tmp_path)
    (tmp_path / "b.png").unlink()
    Image.fromarray(np.ones((40, 50), "f4")).save(tmp_path / "c.tif")
    with pytest.raises(InputError, match=r"c\.tif has floating-point pixels; save it with 8 or 16"):
        read_rows(tmp_path)


def test_bad_paths(tmp_path):
    assert find_error(tmp_path / "none.npy") == "does not exist; check the path."
    assert find_error(written(tmp_path / "data.doc", "x")) == (
        "is of an unknown kind; give a .npy, .npz, .csv, .tsv, .jsonl, .xlsx, .safetensors, .pt,"
        " .parquet, .arrow, .feather file, or a folder of images, of Parquet or Arrow files, or of"
        " .npy, .safetensors or .pt shards."
    )
    assert find_error(written(tmp_path / "data.xlsx", "x")).startswith("cannot be read as a sheet")
    for suffix in (".npy", ".npz", ".csv", ".parquet"):
        assert find_error(written(tmp_path / f"data{suffix}", "")) == "is empty; write it again."
    path = tmp_path / "data.npy"
    np.save(path, random_table())
    assert "is not an .npz, .safetensors, .pt or .xlsx file" in find_error(path, key="X")
    assert "is not a folder of images; leave it out" in find_error(path, image_size=(2, 2))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    path = written(tmp_path / "data.csv", "1,2\n")
    path.chmod(0)
    assert find_error(path) == "cannot be read: Permission denied."


def test_reading_leaves_the_source_alone(tmp_path):
    path = written(tmp_path / "data.csv", "1,2\n3,4\n")
    assert isinstance(read_rows(path), FileRows)
    gc.collect()
    assert path.read_text() == "1,2\n3,4\n"


@contextmanager
def small_files() -> Iterator[None]:
    """Let no file grow beyond 10,000 bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_npz(folder: Path) -> Path:
    np.savez_compressed(folder / "data.npz", X=np.zeros((2000, 500)))
    return folder / "data.npz"


def write_images(folder: Path) -> Path:
    # Small writes, so that some are still in a buffer when one fails.
    for i in range(20):
        Image.fromarray(pixels(16, 16)).save(folder / f"{i}.png")
    return folder


@pytest.mark.parametrize("write", [write_npz, write_images])
def test_a_lack_of_room_for_a_temporary_copy_is_named(write, tmp_path, spools):
    path = write(tmp_path)
    with pytest.raises(InputError) as caught, small_files():
        read_rows(path)
    assert str(caught.value) == (
        f"There is no room for a temporary copy in {spools}; set TMPDIR to a folder that has it."
    )


def test_lines_of_text_are_rows_or_one_sentence():
    named = Features(2, ("a", "b"))
    reader = LineReader(named)
    assert reader.row("b,x,a\n") is None
    np.testing.assert_array_equal(reader.row("1,2,3\n"), [3, 1])
    assert reader.row("\n") is None
    np.testing.assert_array_equal(reader.row("NA,2,3\n"), [3, np.nan])
    assert reader.named_cells() == {"b": "NA", "x": "2", "a": "3"}
    np.testing.assert_array_equal(LineReader(named).row('{"b": 1, "a": null}'), [np.nan, 1])
    reader = LineReader(named)
    reader.row('{"b": 1, "id": "P-17", "a": null}')
    assert reader.named_cells() == {"b": "1", "id": "P-17", "a": ""}
    np.testing.assert_array_equal(LineReader(named).row("[1, 2.5]"), [1, 2.5])
    for line, message in {
        "1,2,3": "line 1 of the text has 3 values, where 2 are expected",
        "a,c": "has no column 'b', which the model has",
        "1,inf": "has an infinite value",
        "1\r2,3": "is not a line of CSV",
        "[1, true]": "has 'True', which is not a number",
        f"[1, {10**400}]": "has an infinite value",
        '{"c": 1}': "has no value of 'a' or any other column",
        "{a": "is not a line of JSON",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            LineReader(named).row(line)


def test_wide_delimiters_and_packed_files_are_read(tmp_path):
    expected = [[1, 2], [3, 4]]
    with pa.output_stream(str(tmp_path / "data.csv.zst"), compression="zstd") as file:
        file.write(b"a,b\n1,2\n3,4\n")
    for path in (
        tmp_path / "data.csv.zst",
        written(tmp_path / "data.csv.xz", lzma.compress(b"a|b\n1|2\n3|4\n")),
    ):
        source = read_rows(path)
        assert source.feature_names == ("a", "b")
        np.testing.assert_array_equal(whole(source), expected)
    cut = written(tmp_path / "cut.csv.gz", gzip.compress(b"a,b\n1,2\n3,4\n" * 50)[:-20])
    assert find_error(cut).startswith("cannot be unpacked (")
    # A delimiter at the end of each line is no column.
    with pytest.warns(UserWarning, match="left out as not numeric: 'Unnamed: 2'"):
        source = read_rows(written(tmp_path / "end.csv", "a,b,\n1,2,\n3,4,\n"))
    np.testing.assert_array_equal(whole(source), expected)


def test_a_missing_reader_of_sheets_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(InputError, match=r'needs openpyxl: run pip install "factormix\[excel\]"'):
        read_rows(written(tmp_path / "data.xlsx", "x"))


@pytest.mark.parametrize(
    ("text", "header", "names", "left_out"),
    [
        # The first line of a table without names has words above words.
        ("39,State,7\n50,Self,8\n38,Private,9\n", False, None, "'1'"),
        ("age,work,7\n50,Self,8\n38,Private,9\n", True, ("age", "7"), "'work'"),
        ("name,2019,2020\nAnn,1,2\nBob,3,4\nCy,5,6\n", True, ("2019", "2020"), "'name'"),
        ("pred,true\n0.5,1\n0.25,0\n", True, ("pred", "true"), None),
    ],
)
def test_headers_of_tables_with_text(text, header, names, left_out, tmp_path):
    path = written(tmp_path / "data.csv", text)
    with pytest.warns() if left_out else nullcontext():
        source = read_rows(path)
    assert source.feature_names == names
    assert source.n_rows == len(text.split()) - header
