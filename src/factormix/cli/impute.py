"""``factormix impute``: fill in missing values."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import open_output, print_line
from factormix.cli.options import (
    Columns,
    Data,
    Device,
    Header,
    Key,
    Model,
    check_device,
    check_output,
    read_data,
    require_mixture,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.base import Rows


def impute(
    model: Model,
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="A .csv, .npy or .parquet file for the rows."
        ),
    ],
    n_draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draw this many completions instead of filling in the mean."),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Add intervals that hold the value with this probability, such as 0.9."),
    ] = None,
    random_state: Annotated[
        int | None, typer.Option(min=0, help="Seed of the draws.", show_default="the model's")
    ] = None,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    device: Device = None,
) -> None:
    """Fill in the missing values of DATA from the others in their row, and write the rows to OUT.

    Empty cells of a .csv file, nulls of a .parquet file and NaN are missing. OUT has the columns of
    the model, with their names if they have any.

    With --n-draws each row comes several times, numbered by the columns row and draw; .npy has the
    shape (draws, rows, columns). With --interval the columns NAME_lower and NAME_upper follow; .npy
    has the shape (3, rows, columns): values, lower and upper ends.
    """
    check_output(output, (".csv", ".npy", ".parquet"), model, data)
    check_device(device)

    from factormix.estimators import MFAImputer, load
    from factormix.estimators.imputation import check_imputation
    from factormix.estimators.validation import check_rows

    check_imputation(n_draws, interval)
    fitted: Any = load(model, device=device)
    if not isinstance(fitted, MFAImputer):
        fitted = require_mixture(fitted, model)
    if random_state is not None:
        fitted.set_params(random_state=random_state)
    shape = fitted.image_shape_
    rows = check_rows(
        fitted, read_data(data, key=key, header=header, columns=columns, image_shape=shape)
    )
    completions = _Completions(fitted, rows, n_draws, interval)
    kind = output.suffix.lower()
    if kind == ".npy":
        _write_npy(completions, output)
    else:
        completions.check_names()
        (_write_csv if kind == ".csv" else _write_parquet)(completions, output)
    total = rows.n_rows * rows.n_features
    print_line(
        f"{output} has {rows.n_rows:,} rows, {completions.n_filled:,} of {total:,} values filled in"
    )


class _Completions:
    """Completed rows in blocks, with a progress bar and a count of the values filled in."""

    def __init__(self, model: Any, rows: Rows, n_draws: int | None, interval: float | None) -> None:
        self.rows, self.n_draws, self.interval = rows, n_draws, interval
        self._model, self.n_filled = model, 0
        self.n_copies = n_draws or (1 if interval is None else 3)
        self.n_whole = 0 if n_draws is None else 2
        """Columns of whole numbers that come first in a table."""
        names = getattr(rows, "feature_names", None)
        # Rows without names have the columns of the model, and so their names.
        names = getattr(model, "feature_names_in_", None) if names is None else names
        plain = [str(name) for name in (range(rows.n_features) if names is None else names)]
        self.names: list[str] | None = None if names is None else plain
        if n_draws is not None:
            self.names = ["row", "draw", *plain]
        elif interval is not None:
            ends = [f"{name}_{end}" for end in ("lower", "upper") for name in plain]
            self.names = [*plain, *ends]

    def check_names(self) -> None:
        """Check that no added column has the name of another."""
        names = self.names or []
        taken = next((name for name in names if names.count(name) > 1), None)
        if taken is not None:
            raise InputError(
                f"the data already has a column named {taken}, which impute would add: rename it,"
                " or write an .npy file, which has no names."
            )

    def blocks(self) -> Iterator[list[Any]]:
        """Yield arrays (B, d) for each block: the draws, or the values and ends of intervals."""
        from tqdm import tqdm

        from factormix.estimators.imputation import impute_blocks

        asked: dict[str, Any] = {"n_draws": self.n_draws, "interval": self.interval}
        with tqdm(total=self.rows.n_rows, unit="row", disable=None, leave=False) as bar:
            for n_filled, parts in impute_blocks(self._model, self.rows, **asked):
                arrays = [part.cpu().numpy() for part in parts]
                if self.interval is not None:
                    # The second is the deviations, which a table of values has no place for.
                    del arrays[1]
                self.n_filled += n_filled
                bar.update(len(arrays[0]))
                yield arrays

    def tables(self) -> Iterator[Any]:
        """Yield the table (m, columns) of each block."""
        import numpy as np

        row = 0
        for arrays in self.blocks():
            n = len(arrays[0])
            if self.n_draws is None:
                yield np.hstack(arrays)
            else:
                numbers = np.repeat(np.arange(row, row + n), self.n_draws)
                draws = np.tile(np.arange(self.n_draws), n)
                values = np.stack(arrays, axis=1).reshape(n * self.n_draws, -1)
                yield np.column_stack([numbers, draws, values])
            row += n


def _write_csv(completions: _Completions, output: Path) -> None:
    with open_output(output) as file:
        writer = csv.writer(file, lineterminator="\n")
        if completions.names is not None:
            writer.writerow(completions.names)
        for values in completions.tables():
            writer.writerows([_format_number(v) for v in line] for line in values.tolist())


def _format_number(value: float) -> str:
    """Write a number in as few digits as it takes to read it back."""
    short = f"{value:.15g}"
    return short if float(short) == value else repr(value)


def _write_npy(completions: _Completions, output: Path) -> None:
    import numpy as np

    from factormix.files import replacing

    n, d = completions.rows.n_rows, completions.rows.n_features
    several = completions.n_draws is not None or completions.interval is not None
    single = str(completions.rows.dtype) in ("float32", "torch.float32")
    with replacing(output) as temporary:
        whole = np.lib.format.open_memmap(
            temporary,
            mode="w+",
            dtype=np.float32 if single else np.float64,
            shape=(completions.n_copies, n, d) if several else (n, d),
        )
        copies = whole if several else whole[None]
        row = 0
        for arrays in completions.blocks():
            for copy, array in zip(copies, arrays, strict=True):
                copy[row : row + len(array)] = array
            row += len(arrays[0])
        whole.flush()


def _write_parquet(completions: _Completions, output: Path) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(
            'Writing Parquet files needs pyarrow: run pip install "factormix[data]".'
        ) from error

    from factormix.files import replacing

    with replacing(output) as temporary:
        writer = None
        for values in completions.tables():
            names = completions.names or [str(j) for j in range(values.shape[1])]
            columns = [
                pa.array(column.astype("int64") if j < completions.n_whole else column)
                for j, column in enumerate(values.T)
            ]
            table = pa.Table.from_arrays(columns, names=names)
            writer = writer or pq.ParquetWriter(temporary, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
