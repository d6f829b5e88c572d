"""``factormix outliers``: which rows are unusual, and why."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from factormix.cli.console import (
    Columns,
    Data,
    Device,
    Header,
    Key,
    Quiet,
    check_device,
    check_target,
    opened,
    parse_columns,
    read,
    say,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.base import Rows
    from factormix.estimators import Explanation, MFAOutlierDetector
    from factormix.estimators.outliers import Judge

__all__ = ["outliers"]

BLOCK_ELEMENTS = 1 << 20
"""Values that are read and judged at once."""
REASONS = ["row", "feature", "value", "expected", "deviation", "z_score", "contribution"]


def outliers(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A detector, or a file of train; --fit writes it."),
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
        bool, typer.Option("--explain", help="Say why: a sentence for each outlier.")
    ] = False,
    reasons: Annotated[
        Path | None,
        typer.Option(metavar="TABLE", help="A .csv file for the reasons of each outlier."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Most columns that a reason names.")] = 3,
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
        typer.Option(help="With --fit: what mixtures are asked.", show_default="log_likelihood"),
    ] = None,
    random_state: Annotated[
        int | None,
        typer.Option(min=0, help="With --fit: seed, for the same detector every time."),
    ] = None,
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Tell which rows of DATA are unusual, and why.

    MODEL is a detector that --fit has trained, or a mixture of factormix train. OUT has the columns
    row, score (low is unusual), tail_probability (the share of held-out training rows that score
    lower) and outlier (1 or 0); --explain adds reason. A mixture of train has no threshold: give
    --contamination, the share of rows of DATA with the lowest scores, or explain all rows.
    """
    targets = [path for path in (output, reasons) if path is not None and str(path) != "-"]
    for path in targets:
        check_target(path, (".csv",), data, *(() if fit else (model,)))
    if len(targets) == 2 and targets[0].absolute() == targets[1].absolute():
        raise InputError(f"{targets[0]} is to be both OUT and TABLE: name another.")
    _check_options(fit, novelty, scoring, random_state, contamination)
    check_device(device)
    if fit:
        check_target(model, (".safetensors",), data, *targets)

    from factormix.estimators.outliers import judge_of

    chosen = parse_columns(columns)
    if fit:
        rows: Rows = read(data, key=key, header=header, columns=chosen)
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
        judge = judge_of(detector)
        if not quiet:
            say(f"{model} is a detector of outliers, trained on {rows.n_rows:,} rows")
        if output is None and reasons is None:
            return
    else:
        judge = judge_of(_loaded(model, device), contamination)
        shape = judge.image_shape
        size = (shape[0], shape[1]) if shape and data.is_dir() else None
        rows = read(data, key=key, image_size=size, header=header, columns=chosen)
    rows = judge.prepared(rows)
    called = _write(judge, rows, output or Path("-"), reasons, explain, top)
    if targets and not quiet:
        found = "" if called is None else f", {called:,} of them outliers"
        tell = "tell" if len(targets) > 1 else "tells"
        say(f"{' and '.join(map(str, targets))} {tell} about {rows.n_rows:,} rows{found}")


def _check_options(
    fit: bool,
    novelty: bool,
    scoring: str | None,
    random_state: int | None,
    contamination: float | None,
) -> None:
    given = {"--novelty": novelty, "--scoring": scoring, "--random-state": random_state is not None}
    without = [name for name, value in given.items() if value]
    if without and not fit:
        raise InputError(f"{without[0]} is for training: add --fit, or leave it out.")
    if contamination is not None and not 0 < contamination <= 0.5:
        raise InputError(
            f"--contamination must be above 0 and up to 0.5, not {contamination:g}: it is the share"
            " of rows to call outliers."
        )


def fit_detector(rows: Rows, **options: Any) -> MFAOutlierDetector:
    """Train a detector on the device that its options name."""
    from factormix.estimators import MFAOutlierDetector

    return MFAOutlierDetector(**options).fit(rows)


def _loaded(model: Path, device: str | None) -> Any:
    from factormix.estimators import load

    return load(model, device=device)


def _write(
    judge: Judge, rows: Rows, output: Path, reasons: Path | None, explain: bool, top: int
) -> int | None:
    """Write what is known of each row, block by block, and return the number of outliers."""
    with ExitStack() as files:
        lines = _writer(files.enter_context(opened(output)))
        table = None if reasons is None else _writer(files.enter_context(opened(reasons)))
        lines.writerow([*judge.columns, *(["reason"] if explain else [])])
        if table is not None:
            table.writerow(REASONS)
        first, called = 0, 0
        for block in judge.blocks(rows, max(1, BLOCK_ELEMENTS // rows.n_features)):
            told = block.explained() if explain or table is not None else None
            sentences = told.sentences(top) if told is not None and explain else []
            reason = dict(zip(block.chosen.tolist(), sentences, strict=False))
            for row, values in enumerate(block.values):
                more = [reason.get(row, "")] if explain else []
                lines.writerow([first + row, *values, *more])
            if table is not None and told is not None:
                _write_reasons(table, told, first + block.chosen, top)
            first, called = first + len(block), called + len(block.chosen)
    return called if judge.has_threshold else None


def _write_reasons(table: Any, told: Explanation, numbers: Any, top: int) -> None:
    for record in told.records(top):
        row = int(numbers[record["row"]])
        table.writerow([row, record["feature"], *(f"{record[n]:.9g}" for n in REASONS[2:])])


def _writer(file: TextIO) -> Any:
    return csv.writer(file, lineterminator="\n")
