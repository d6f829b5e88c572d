"""``factormix impute``: missing values filled in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import (
    Columns,
    Data,
    Device,
    Header,
    Key,
    Model,
    check_device,
    check_target,
    mixture_of,
    parse_columns,
    read,
    say,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.base import Rows

__all__ = ["impute"]


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
        typer.Option(min=1, help="Draw so many completions instead of filling in the mean."),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Add intervals that hold this share of what may be, such as 0.9."),
    ] = None,
    random_state: Annotated[
        int | None, typer.Option(min=0, help="Seed of the draws.", show_default="the model's")
    ] = None,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    device: Device = None,
) -> None:
    """Fill in the missing values of DATA, given those that are there, and write the rows to OUT.

    Empty cells of a .csv file, nulls of a .parquet file and NaN are missing. OUT has the columns of
    the model, with their names if they have any.

    With --n-draws each row comes several times, and the columns row and draw tell which; .npy has
    the shape (draws, rows, columns). With --interval the columns NAME_lower and NAME_upper follow;
    .npy has the shape (3, rows, columns), with values, lower and upper ends.
    """
    check_target(output, (".csv", ".npy", ".parquet"), model, data)
    check_device(device)

    from factormix.estimators import MFAImputer, load
    from factormix.estimators.imputation import check_completion
    from factormix.estimators.validation import check_rows

    check_completion(n_draws, interval)
    fitted: Any = load(model, device=device)
    if not isinstance(fitted, MFAImputer):
        fitted = mixture_of(fitted, model)
    if random_state is not None:
        fitted.set_params(random_state=random_state)
    shape = fitted.image_shape_
    size = (shape[0], shape[1]) if shape and data.is_dir() else None
    chosen = parse_columns(columns)
    rows = check_rows(fitted, read(data, key=key, image_size=size, header=header, columns=chosen))
    kind = output.suffix.lower()
    write = {".csv": _write_csv, ".npy": _write_npy, ".parquet": _write_parquet}[kind]
    blocks = _Completed(fitted, rows, n_draws, interval)
    if kind != ".npy":
        blocks.check_names()
    write(blocks, output)
    total = rows.n_rows * rows.n_features
    say(f"{output} has {rows.n_rows:,} rows, {blocks.filled:,} of {total:,} values filled in")


class _Completed:
    """Blocks of completed rows, with a bar, and a count of what was filled in."""

    def __init__(self, model: Any, rows: Rows, n_draws: int | None, interval: float | None) -> None:
        self.rows, self.n_draws, self.interval = rows, n_draws, interval
        self._model, self.filled = model, 0
        self.copies = n_draws or (1 if interval is None else 3)
        names = getattr(rows, "feature_names", None)
        # Rows without names have the columns of the model, and so their names.
        names = getattr(model, "feature_names_in_", None) if names is None else names
        self.names = None if names is None else [str(name) for name in names]
        self.numbers = [] if n_draws is None else ["row", "draw"]
        """Columns of whole numbers that come first."""

    def check_names(self) -> None:
        """Check that the columns that are added have names of their own."""
        if self.names is None:
            return
        added = [*self.numbers]
        if self.interval is not None:
            added += [f"{name}_{end}" for name in self.names for end in ("lower", "upper")]
        taken = next((name for name in added if name in self.names), None)
        if taken is not None:
            raise InputError(
                f"a column of the data is named {taken}, as one that would be added: rename it, or"
                " write an .npy file, which has no names."
            )

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield for each block arrays (B, d): draws, or values and the ends of intervals."""
        from tqdm import tqdm

        from factormix.estimators.imputation import completed_blocks

        asked: dict[str, Any] = {"n_draws": self.n_draws, "interval": self.interval}
        with tqdm(total=self.rows.n_rows, unit="row", disable=None, leave=False) as bar:
            for filled, parts in completed_blocks(self._model, self.rows, **asked):
                arrays = [part.cpu().numpy() for part in parts]
                if self.interval is not None:
                    # Deviations have no place in a table of values.
                    del arrays[1]
                self.filled += filled
                bar.update(len(arrays[0]))
                yield arrays

    def tables(self) -> Iterator[tuple[list[str] | None, Any]]:
        """Yield names and values (m, columns) of the table of each block."""
        import numpy as np

        names, row = self.names, 0
        plain = names or [str(j) for j in range(self.rows.n_features)]
        for arrays in self:
            n = len(arrays[0])
            if self.n_draws is not None:
                numbers = np.repeat(np.arange(row, row + n), self.n_draws)
                draws = np.tile(np.arange(self.n_draws), n)
                values = np.stack(arrays, axis=1).reshape(n * self.n_draws, -1)
                yield [*self.numbers, *plain], np.column_stack([numbers, draws, values])
            elif self.interval is not None:
                ends = [f"{name}_{end}" for end in ("lower", "upper") for name in plain]
                yield [*plain, *ends], np.hstack(arrays)
            else:
                yield names, arrays[0]
            row += n


def _write_csv(blocks: _Completed, output: Path) -> None:
    import csv

    from factormix.files import replacing

    with replacing(output) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer, begun = csv.writer(file, lineterminator="\n"), False
        for names, values in blocks.tables():
            if names is not None and not begun:
                writer.writerow(names)
            begun = True
            writer.writerows([_text(v) for v in line] for line in values.tolist())


def _text(value: float) -> str:
    """Write a number in as few digits as it takes to read it back."""
    short = f"{value:.15g}"
    return short if float(short) == value else repr(value)


def _write_npy(blocks: _Completed, output: Path) -> None:
    import numpy as np

    from factormix.files import replacing

    n, d = blocks.rows.n_rows, blocks.rows.n_features
    several = blocks.n_draws is not None or blocks.interval is not None
    single = str(blocks.rows.dtype) in ("float32", "torch.float32")
    dtype = np.float32 if single else np.float64
    with replacing(output) as temporary:
        shape = (blocks.copies, n, d) if several else (n, d)
        whole = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        first = 0
        for arrays in blocks:
            last = first + len(arrays[0])
            for i, array in enumerate(arrays):
                (whole[i] if several else whole)[first:last] = array
            first = last
        whole.flush()


def _write_parquet(blocks: _Completed, output: Path) -> None:
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
        for names, values in blocks.tables():
            names = names or [str(j) for j in range(values.shape[1])]
            columns = [
                pa.array(values[:, j].astype("int64") if j < len(blocks.numbers) else values[:, j])
                for j in range(len(names))
            ]
            table = pa.Table.from_arrays(columns, names=names)
            writer = writer or pq.ParquetWriter(temporary, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
