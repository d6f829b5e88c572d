"""``factormix select``: models of several sizes, and the best of them."""

from __future__ import annotations

import csv
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import (
    DTYPE_OPTION,
    INTERRUPTED,
    SCALING_OPTION,
    SOLVER_OPTION,
    BatchSize,
    Columns,
    Data,
    Device,
    Header,
    Key,
    MaxEpochs,
    MaxPrecision,
    Quiet,
    RandomState,
    check_device,
    check_target,
    parse_columns,
    read,
    say,
    undisturbed,
)
from factormix.cli.train import check_model_target, held_out_rows
from factormix.defaults import CRITERIA, DTYPE, N_INIT, SCALING, SOLVER
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.estimators import Selection

__all__ = ["select"]

PICTURES = (".png", ".svg", ".pdf")


def select(
    data: Data,
    n_components: Annotated[
        str | None,
        typer.Option(
            metavar="K,K,...",
            help="Numbers of components to try.",
            show_default="1 to 100, each of 20 rows or more",
        ),
    ] = None,
    n_factors: Annotated[
        str | None,
        typer.Option(metavar="L,L,...", help="Numbers of factors to try.", show_default="0,2,4,8"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="MODEL", help="Where the best model goes."),
    ] = None,
    criterion: Annotated[
        str, typer.Option(help=f"What to choose by: {', '.join(CRITERIA)}.")
    ] = CRITERIA[0],
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE|DATA",
            help="Share of the rows that is held out, or other rows to judge by.",
            show_default="a fifth, at most 20,000 rows",
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="A .csv file for the table.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PICTURE", help="A .png, .svg or .pdf file for a heat map."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Train every size to its end, hopeless or not.")
    ] = False,
    solver: Annotated[str, SOLVER_OPTION] = SOLVER,
    max_precision: MaxPrecision = None,
    batch_size: BatchSize = None,
    max_epochs: MaxEpochs = None,
    n_init: Annotated[int, typer.Option(min=1, help="Random starts of each size.")] = N_INIT,
    random_state: RandomState = None,
    scaling: Annotated[str, SCALING_OPTION] = SCALING,
    dtype: Annotated[str, DTYPE_OPTION] = DTYPE,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train mixtures of several sizes on DATA, print a table of them and write the best to MODEL.

    Sizes are judged by the likelihood of rows that are held out, and the best is trained again on
    all rows. Ctrl-C ends the search: the table and MODEL have the best so far.
    """
    options: dict[str, Any] = {"solver": solver, "max_precision": max_precision, "n_init": n_init}
    options |= {"batch_size": batch_size, "max_epochs": max_epochs, "dtype": dtype}
    options |= {"scaling": None if scaling == "none" else scaling, "random_state": random_state}
    components = _numbers(n_components, "--n-components")
    factors = _numbers(n_factors, "--n-factors")
    _check_targets(data, output, table, plot)
    if criterion not in CRITERIA:
        raise InputError(f"--criterion must be one of {', '.join(CRITERIA)}, not {criterion!r}.")
    check_device(device)

    from factormix.estimators import MFA
    from factormix.estimators import select as select_size
    from factormix.estimators.validation import check_options

    estimator = MFA(**options, device=device)
    check_options(estimator)
    reading: dict[str, Any] = {"key": key, "header": header, "columns": parse_columns(columns)}
    judges = _judges(held_out, data, reading)
    rows = read(data, **reading)
    found = select_size(
        rows,
        components,
        factors,
        criterion=criterion,
        held_out=judges,
        estimator=estimator,
        stop_hopeless=not every,
        verbose=int(not quiet),
    )
    with undisturbed():
        _write(found, output, table, plot)
    if not quiet:
        say(str(found))
        if output is not None:
            say(f"{output} has the best model")
    if not found.complete:
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str | None, name: str) -> list[int] | None:
    """Read whole numbers as in 5,10,20."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(f"{name} must be whole numbers, as in 5,10,20, not {text!r}.")
    return [int(part) for part in text.split(",")]


def _judges(text: str | None, data: Path, reading: dict[str, Any]) -> Any:
    """Read what is held out: a share, or rows of another file."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return held_out_rows(Path(text), data, reading | {"image_size": None})


def _check_targets(data: Path, output: Path | None, table: Path | None, plot: Path | None) -> None:
    if output is not None:
        check_model_target(output, data, resume=False)
    if table is not None:
        check_target(table, (".csv",), data)
    if plot is not None:
        check_target(plot, PICTURES, data)
        if find_spec("matplotlib") is None:
            raise InputError('--plot needs matplotlib: run pip install "factormix[plots]".')


def _write(found: Selection, output: Path | None, table: Path | None, plot: Path | None) -> None:
    """Write what was asked for, the model first."""
    if output is not None:
        found.best_estimator_.save(output)
    if table is not None:
        from factormix.files import replacing

        records = found.records()
        with replacing(table) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
    if plot is not None:
        from factormix.views.plotting import plot_selection, save_figure

        save_figure(plot_selection(found), plot)
