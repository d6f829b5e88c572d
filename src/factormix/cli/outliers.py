"""``factormix outliers``: which rows are unusual, and why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from factormix.cli.console import open_output, print_line
from factormix.cli.options import (
    Data,
    Device,
    Quiet,
    Reading,
    check_output,
    open_ids,
    with_shared_options,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.arrays import ArrayRows
    from factormix.data.sources.base import Rows
    from factormix.estimators import MFA, MFAOutlierDetector

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

    MODEL is a detector that --fit has trained, or a mixture of factormix train. OUT has the
    number of each row, the columns that identify rows (--id), score (low is unusual),
    tail_probability (the share of held-out training rows that score lower) and outlier (1 or 0);
    --explain adds reason. A mixture has no threshold: --contamination gives the share of rows with
    the lowest scores. Without it, all rows are explained. Rows that the mixture was trained on are
    scored as if each had been left out.
    """
    files = [path for path in (output, reasons) if path is not None and str(path) != "-"]
    for path in files:
        check_output(path, (".csv",), data, *(() if fit else (model,)))
    if len(files) == 2 and files[0].absolute() == files[1].absolute():
        raise InputError(f"{files[0]} is both OUT and TABLE: name another.")
    training = {"--novelty": novelty, "--scoring": scoring, "--random-state": random_state}
    given = [name for name, value in training.items() if value not in (None, False)]
    if given and not fit:
        raise InputError(f"{given[0]} is for training: add --fit, or leave it out.")
    if contamination is not None and not 0 < contamination <= 0.5:
        raise InputError(
            f"--contamination must be above 0 and up to 0.5, not {contamination:g}: it is the share"
            " of rows to call outliers."
        )
    if fit:
        check_output(model, (".safetensors",), data, *files)

    from factormix.estimators import MFA, MFAOutlierDetector, load
    from factormix.estimators.validation import check_device, check_rows

    check_device(device)
    if fit:
        given_rows = reading.read(data)
        detector = MFAOutlierDetector(
            novelty=novelty,
            contamination="auto" if contamination is None else contamination,
            scoring=scoring or "log_likelihood",
            random_state=random_state,
            device=device,
            verbose=int(not quiet),
        ).fit(given_rows)
        detector.save(model)
        if not quiet:
            print_line(f"{model} is a detector of outliers, trained on {given_rows.n_rows:,} rows")
        if output is None and reasons is None:
            return
        # The detector has derived its own threshold from this share.
        contamination = None
    else:
        detector = load(model, device=device)
        if not isinstance(detector, MFA | MFAOutlierDetector):
            raise InputError(
                f"{model} holds an {type(detector).__name__}, which does not find outliers: give a"
                " detector or a mixture."
            )
        given_rows = reading.read(data, model=detector)
    rows = check_rows(detector, given_rows)
    n_outliers = _write(detector, rows, contamination, output or Path("-"), reasons, explain, top)
    if files and not quiet:
        found = "" if n_outliers is None else f", {n_outliers:,} of them outliers"
        names = " and ".join(map(str, files))
        print_line(f"{names} {'cover' if len(files) > 1 else 'covers'} {rows.n_rows:,} rows{found}")


def make_judge(
    model: MFA | MFAOutlierDetector, rows: Rows, share: float | None
) -> Callable[[ArrayRows], Any]:
    """Return a function that makes a data frame of a block of rows, with score and outlier.

    A detector has a threshold, unless a ``share`` sets one on the tail probability. A single
    mixture has none; with a ``share``, the rows of lowest log-likelihood are outliers. The rows
    that a mixture was trained on are scored as if each had been left out.
    """
    import numpy as np
    import pandas as pd

    from factormix.estimators import MFA

    if isinstance(model, MFA):
        left_out = model.is_trained_on(rows)
        score_rows = model.leave_one_out_scores if left_out else model.score_samples
        threshold = None if share is None else np.quantile(score_rows(rows), share)

        def judge(block: ArrayRows) -> Any:
            frame = pd.DataFrame({"score": np.asarray(score_rows(block))})
            return frame if threshold is None else frame.assign(outlier=frame.score < threshold)

        return judge

    def judge_by_detector(block: ArrayRows) -> Any:
        scores, tail = (
            np.asarray(compute(block)) for compute in (model.score_samples, model.tail_probability)
        )
        unusual = scores < model.offset_ if share is None else tail < share
        return pd.DataFrame({"score": scores, "tail_probability": tail, "outlier": unusual})

    return judge_by_detector


def _write(
    model: MFA | MFAOutlierDetector,
    rows: Rows,
    share: float | None,
    output: Path,
    reasons: Path | None,
    explain: bool,
    top: int,
) -> int | None:
    """Write a line for each row and a table of reasons; return the number of outliers."""
    import numpy as np
    import pandas as pd

    from factormix.data.checks import count_chunk_rows
    from factormix.data.sources.arrays import ArrayRows

    with ExitStack() as files:
        out = files.enter_context(open_output(output))
        table = None if reasons is None else files.enter_context(open_output(reasons))
        judge, number_rows = make_judge(model, rows, share), open_ids(rows)
        header, n_outliers = True, 0
        for batch in rows.blocks(count_chunk_rows(rows)):
            frame, numbers = judge(ArrayRows(batch.rows)), number_rows(len(batch))
            has_threshold = "outlier" in frame
            found = np.flatnonzero(frame.outlier if has_threshold else np.ones(len(frame)))
            n_outliers += len(found)
            if has_threshold:
                frame["outlier"] = frame.outlier.astype(int)
            if explain:
                frame["reason"] = ""
            records = list[dict[str, Any]]()
            if len(found) and (explain or table is not None):
                explanation = model.explain(ArrayRows(batch.rows[found]))
                records = list(explanation.records(top))
                if explain:
                    frame.loc[found, "reason"] = explanation.sentences(top)
            _append(pd.concat([numbers, frame], axis=1), out, header)
            if table is not None:
                named = pd.DataFrame(records, columns=["row", *REASONS])
                which = numbers.iloc[found[named.pop("row").to_numpy(int)]]
                _append(pd.concat([which.reset_index(drop=True), named], axis=1), table, header)
            header = False
    return n_outliers if has_threshold else None


def _append(frame: Any, file: TextIO, header: bool) -> None:
    frame.to_csv(file, index=False, header=header, float_format="%.9g", lineterminator="\n")
