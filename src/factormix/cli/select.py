"""``factormix select``: train models of several sizes and choose the best."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import INTERRUPTED, ignore_signals, print_line
from factormix.cli.options import (
    Data,
    Device,
    Quiet,
    Reading,
    Training,
    check_model_output,
    check_output,
    with_shared_options,
    write_frames,
)
from factormix.defaults import CRITERIA
from factormix.errors import InputError, require_package

if TYPE_CHECKING:
    from factormix.data.readers.base import TableRows
    from factormix.estimators import Selection

PICTURES = (".png", ".svg", ".pdf")


@with_shared_options
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
        typer.Option(
            metavar="L,L,...",
            help="Numbers of factors to try, or auto for those that each component supports.",
            show_default="0,2,4,8",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="MODEL", help="A file for the best model."),
    ] = None,
    criterion: Annotated[
        str, typer.Option(help=f"What to choose by: {', '.join(CRITERIA)}.")
    ] = CRITERIA[0],
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE|DATA",
            help="Share of the rows to hold out, or other rows to judge by.",
            show_default="a fifth, at most 20,000 rows",
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="A .csv file for the table.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PICTURE", help="A .png, .svg or .pdf file for a heat map of the sizes."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Train every size to its end, hopeless or not.")
    ] = False,
    *,
    training: Training,
    reading: Reading,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train mixtures of several sizes on DATA, print a table of them and write the best to MODEL.

    Sizes are judged by the likelihood of held-out rows, and the best is trained again on all rows.
    Ctrl-C ends the search: the table then has the sizes so far, and MODEL the best of them.
    """
    components = _parse_numbers(n_components, "--n-components")
    factors: Any = n_factors if n_factors == "auto" else _parse_numbers(n_factors, "--n-factors")
    if output is not None:
        check_model_output(output, data)
    if table is not None:
        check_output(table, (".csv",), data)
    if plot is not None:
        check_output(plot, PICTURES, data)
        require_package("matplotlib", "plots")
    if criterion not in CRITERIA:
        raise InputError(f"--criterion must be one of {', '.join(CRITERIA)}, not {criterion!r}.")

    from factormix.estimators import MFA
    from factormix.estimators import select as select_size
    from factormix.estimators.validation import check_options

    options = training.given() | ({"n_factors": "auto"} if factors == "auto" else {})
    estimator = MFA(**options, device=device)
    check_options(estimator)
    rows = reading.read(data)
    judges = _read_judges(held_out, data, rows, reading)
    selection = select_size(
        rows,
        components,
        factors,
        criterion=criterion,
        held_out=judges,
        estimator=estimator,
        stop_hopeless=not every,
        verbose=int(not quiet),
    )
    with ignore_signals():
        _write(selection, output, table, plot)
    if not quiet:
        print_line(str(selection))
        if output is not None:
            print_line(f"{output} has the best model")
    if not selection.complete:
        raise typer.Exit(INTERRUPTED)


def _parse_numbers(text: str | None, name: str) -> list[int] | None:
    """Parse whole numbers as in 5,10,20."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(f"{name} must be whole numbers, as in 5,10,20, not {text!r}.")
    return [int(part) for part in text.split(",")]


def _read_judges(text: str | None, data: Path, rows: TableRows, reading: Reading) -> Any:
    """Return the share of rows to hold out, or the rows of another file."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return reading.read_held_out(Path(text), data, rows)


def _write(
    selection: Selection, output: Path | None, table: Path | None, plot: Path | None
) -> None:
    """Write the requested files, the model first."""
    if output is not None:
        selection.best_estimator_.save(output)
    if table is not None:
        import pandas as pd

        # As objects, whole numbers stay whole beside cells without a value.
        write_frames(iter([pd.DataFrame(selection.records(), dtype=object)]), table)
    if plot is not None:
        from factormix.views.plotting import plot_selection, save_figure

        save_figure(plot_selection(selection), plot)
