"""``factormix outliers``: which rows are unusual, and why."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import open_output, print_line
from factormix.cli.options import (
    Data,
    Device,
    Quiet,
    Reading,
    check_device,
    check_output,
    open_ids,
    with_shared_options,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.base import Rows
    from factormix.estimators import MFAOutlierDetector
    from factormix.estimators.outliers import Judge

BLOCK_ELEMENTS = 1 << 20
"""Values of a block of rows: 8 MB in float64, and several times that while it is explained."""
REASONS = ["feature", "value", "expected", "deviation", "z_score", "contribution"]


@with_shared_options
def outliers(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A detector or a model of factormix train; --fit writes it."
        ),
    ],
    data: Data,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="A .csv file, or - for the screen.",
            show_default="the screen; nothing with --fit",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add the reason: a sentence for each outlier.")
    ] = False,
    reasons: Annotated[
        Path | None,
        typer.Option(metavar="TABLE", help="A .csv file for the reasons of each outlier."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="Maximum number of columns that a reason names.")
    ] = 3,
    fit: Annotated[
        bool, typer.Option("--fit", help="Train a detector on DATA first, and write it to MODEL.")
    ] = False,
    novelty: Annotated[
        bool,
        typer.Option("--novelty", help="With --fit: DATA is clean, outliers will be in new rows."),
    ] = False,
    contamination: Annotated[
        float | None,
        typer.Option(
            help="Share of rows to call outliers.", show_default="the detector's own threshold"
        ),
    ] = None,
    scoring: Annotated[
        str | None,
        typer.Option(help="With --fit: the score of each mixture.", show_default="log_likelihood"),
    ] = None,
    random_state: Annotated[
        int | None,
        typer.Option(min=0, help="With --fit: seed, for the same detector every time."),
    ] = None,
    *,
    reading: Reading,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Find the unusual rows of DATA, and the reasons.

    MODEL is a detector that --fit has trained, or a mixture of factormix train. OUT has the columns
    row, those that identify rows, score (low is unusual), tail_probability (the share of held-out
    training rows that score lower) and outlier (1 or 0); --explain adds reason. A mixture has no
    threshold: --contamination gives the share of rows with the lowest scores. Without it, all rows
    are explained. Rows that the mixture was trained on are scored as if each had been left out.
    """
    files = [path for path in (output, reasons) if path is not None and str(path) != "-"]
    for path in files:
        check_output(path, (".csv",), data, *(() if fit else (model,)))
    if len(files) == 2 and files[0].absolute() == files[1].absolute():
        raise InputError(f"{files[0]} is both OUT and TABLE: name another.")
    _check_options(fit, novelty, scoring, random_state, contamination)
    check_device(device)
    if fit:
        check_output(model, (".safetensors",), data, *files)

    from factormix.estimators import load
    from factormix.estimators.outliers import Judge

    if fit:
        rows: Rows = reading.read(data)
        detector = fit_detector(
            rows,
            novelty=novelty,
            contamination="auto" if contamination is None else contamination,
            scoring=scoring or "log_likelihood",
            random_state=random_state,
            device=device,
            verbose=int(not quiet),
        )
        detector.save(model)
        if not quiet:
            print_line(f"{model} is a detector of outliers, trained on {rows.n_rows:,} rows")
        if output is None and reasons is None:
            return
        judge = Judge(detector)
    else:
        fitted = load(model, device=device)
        judge = Judge(fitted, contamination)
        rows = reading.read(data, model=fitted)
    rows = judge.check_rows(rows)
    n_outliers = _write(judge, rows, output or Path("-"), reasons, explain, top)
    if files and not quiet:
        found = "" if n_outliers is None else f", {n_outliers:,} of them outliers"
        names = " and ".join(map(str, files))
        print_line(f"{names} {'cover' if len(files) > 1 else 'covers'} {rows.n_rows:,} rows{found}")


def fit_detector(rows: Rows, **options: Any) -> MFAOutlierDetector:
    """Train a detector with options of its class."""
    from factormix.estimators import MFAOutlierDetector

    return MFAOutlierDetector(**options).fit(rows)


def _check_options(
    fit: bool,
    novelty: bool,
    scoring: str | None,
    random_state: int | None,
    contamination: float | None,
) -> None:
    training = {
        "--novelty": novelty,
        "--scoring": scoring,
        "--random-state": random_state is not None,
    }
    given = [name for name, value in training.items() if value]
    if given and not fit:
        raise InputError(f"{given[0]} is for training: add --fit, or leave it out.")
    if contamination is not None and not 0 < contamination <= 0.5:
        raise InputError(
            f"--contamination must be above 0 and up to 0.5, not {contamination:g}: it is the share"
            " of rows to call outliers."
        )


def _write(
    judge: Judge, rows: Rows, output: Path, reasons: Path | None, explain: bool, top: int
) -> int | None:
    """Write a line for each row and a table of reasons; return the number of outliers."""
    with ExitStack() as files:

        def open_table(path: Path, names: list[str]) -> Any:
            table = csv.writer(files.enter_context(open_output(path)), lineterminator="\n")
            table.writerow(names)
            return table

        ids, take_ids = open_ids(rows)
        first_name, *names = judge.columns
        lines = open_table(output, [first_name, *ids, *names, *(["reason"] if explain else [])])
        table = None if reasons is None else open_table(reasons, ["row", *ids, *REASONS])
        first, n_outliers = 0, 0
        for block in judge.blocks(rows, max(1, BLOCK_ELEMENTS // rows.n_features)):
            explanation = block.explain() if explain or table is not None else None
            sentences = explanation.sentences(top) if explanation is not None and explain else []
            reason = dict(zip(block.outliers.tolist(), sentences, strict=False))
            labels = take_ids(len(block))
            for row, values in enumerate(block.cells):
                more = [reason.get(row, "")] if explain else []
                lines.writerow([first + row, *labels[row], *values, *more])
            if table is not None and explanation is not None:
                for record in explanation.records(top):
                    row = int(block.outliers[record["row"]])
                    numbers = [f"{record[name]:.9g}" for name in REASONS[1:]]
                    table.writerow([first + row, *labels[row], record["feature"], *numbers])
            first, n_outliers = first + len(block), n_outliers + len(block.outliers)
    return n_outliers if judge.has_threshold else None
