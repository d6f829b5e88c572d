"""``factormix watch``: score rows as they come, learn from them, and mark the unlikely ones."""

from __future__ import annotations

import csv
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer

from factormix.cli.console import BAD_INPUT, ignore_signals, print_error, print_note, stop_code
from factormix.cli.options import (
    Device,
    Model,
    Quiet,
    Reading,
    check_output,
    load_mixture,
    parse_seconds,
    split_names,
)
from factormix.errors import InputError, input_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from factormix.data.readers.lines import LineReader
    from factormix.data.sources.base import Rows
    from factormix.estimators import MFA
    from factormix.estimators.alerts import Alerts

STANDARD_INPUT = Path("-")
LINE_SUFFIXES = (".csv", ".tsv", ".jsonl")
"""Files that are read line by line, as standard input is; others are read as tables."""

TIMES = ("time", "timestamp", "datetime", "date")
"""Names, in any case, of a column with the time of a row."""
PAUSE = 0.2
"""Seconds without a new line after which the lines read so far are scored: short for a person."""


class Format(StrEnum):
    """Format of the lines."""

    csv = "csv"
    json = "json"


class OnBadRow(StrEnum):
    """What to do about an unusable line."""

    stop = "stop"
    skip = "skip"


def watch(
    model: Model,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A file or folder of rows, of a kind that factormix score reads; - is standard"
            " input.",
            show_default="standard input",
        ),
    ] = STANDARD_INPUT,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A file for the model.", show_default="MODEL"
        ),
    ] = None,
    alert: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Mark unlikely rows; RATE is the share of ordinary rows that may raise an alert,"
            " as in 0.001.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="With --alert: give the reason for each alert.")
    ] = False,
    learn_alerts: Annotated[
        bool, typer.Option("--learn-alerts", help="With --alert: learn the marked rows as well.")
    ] = False,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="A,B,...", help="Columns to repeat beside the scores."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a learning step.", show_default="the model's"),
    ] = None,
    forgetting: Annotated[
        float | None,
        typer.Option(help="Smallest learning rate, for streams that drift, as in 0.02."),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn/--no-learn", help="Whether the model learns the rows.")
    ] = True,
    on_bad_row: Annotated[
        OnBadRow, typer.Option(help="Stop at an unusable line, or skip and count it.")
    ] = OnBadRow.stop,
    form: Annotated[
        Format | None, typer.Option("--format", help="Format of lines.", show_default="guessed")
    ] = None,
    every: Annotated[str, typer.Option(metavar="TIME", help="Time between saves.")] = "60s",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Score rows from standard input or DATA one by one, and learn from them.

    Lines are CSV, with or without a first line of column names, or JSON lines. A file or folder is
    read once, to its end. Columns that the model does not know are ignored. The model scores each
    row before learning it, and writes a line with row, log_likelihood and component, and the time
    of the row if the input has a column for it. --alert adds alert, 1 or 0, and marked rows are not
    learned. MODEL is saved from time to time and when the input ends or Ctrl-C is pressed.
    """
    if alert is None and (explain or learn_alerts):
        option = "--explain" if explain else "--learn-alerts"
        raise InputError(f"{option} is about alerts: add --alert with a rate, as in 0.001.")
    if not learn and (output is not None or forgetting is not None or learn_alerts):
        raise InputError(
            "--no-learn changes no model: leave --output, --forgetting and --learn-alerts out."
        )
    if forgetting is not None and not 0 < forgetting <= 1:
        raise InputError(f"--forgetting must be above 0 and at most 1, not {forgetting}.")
    seconds = parse_seconds(every, "--every")
    target = model if output is None else output
    if learn:
        check_output(target, (), data)

    from factormix.data.readers.lines import LineReader
    from factormix.estimators.alerts import Alerts, check_rate
    from factormix.estimators.streaming import follow_stream
    from factormix.estimators.validation import check_rows, fitted_features

    if alert is not None:
        check_rate(alert, "--alert")
    fitted = load_mixture(model, device)
    if learn:
        follow_stream(fitted, forgetting)
    alerts = None
    if alert is not None:
        fitted.alert_threshold(alert)
        alerts = Alerts(fitted._run, alert, learn=learn, learn_alerts=learn_alerts)
    keys, skip_bad = split_names(ids) or [], on_bad_row is OnBadRow.skip
    name = "standard input" if data == STANDARD_INPUT else str(data)
    rows: Any = None
    if data != STANDARD_INPUT and not (data.suffix.lower() in LINE_SUFFIXES and data.is_file()):
        if form is not None:
            raise InputError(f"--format is for lines, and {data} has none: leave it out.")
        rows = check_rows(fitted, Reading().read(data, model=fitted))
        if skip_bad and hasattr(rows, "skip_damaged"):
            rows = rows.skip_damaged()
    features = fitted_features(fitted)
    kind = Format.json if rows is not None else form
    reader = LineReader(features, None if kind is None else kind.value, name)
    watcher = _Watcher(
        fitted,
        reader,
        target if learn else None,
        batch_size=batch_size or fitted.batch_size_,
        seconds=seconds,
        alerts=alerts,
        explain=explain,
        learn_alerts=learn_alerts,
        keys=keys,
        skip_bad=skip_bad,
        source=name,
    )
    size = watcher.batch_size
    if rows is not None:
        code = watcher.run(_group_rows(rows, size, features.names, keys), sys.stdout)
        watcher.n_skipped += getattr(rows, "skipped", 0)
    else:
        with nullcontext(sys.stdin) if data == STANDARD_INPUT else _open_text(data) as lines:
            code = watcher.run(_group_lines(lines, size, name), sys.stdout)
    if not quiet:
        print_note(watcher.summary())
    if code:
        raise typer.Exit(code)


class _Row(NamedTuple):
    """A row of the input."""

    number: int
    values: NDArray[Any]
    """(d,)."""
    repeated: list[str]
    """Cells to repeat beside its score."""


@dataclass
class _Watcher:
    """Score the rows of a stream, write their scores, then learn them."""

    model: MFA
    reader: LineReader
    target: Path | None
    """The file for the model; None if it does not learn."""
    batch_size: int
    seconds: float
    """Time between saves."""
    alerts: Alerts | None
    explain: bool
    learn_alerts: bool
    keys: list[str]
    skip_bad: bool
    source: str
    """The name of the input, for messages."""
    repeated: list[str] | None = None
    """Columns to repeat beside the scores, known from the first row on."""
    waiting: int = 0
    """Number of rows scored since the last step."""
    unlearned: list[Any] = field(default_factory=list)
    """Rows that the next step learns."""
    saved_at: float = field(default_factory=time.monotonic)
    unsaved: bool = False
    next_row: int = 0
    """Number of the next row of the input, skipped ones included."""
    n_rows: int = 0
    n_skipped: int = 0
    n_alerts: int = 0
    n_learned: int = 0
    n_left_out: int = 0

    def run(self, groups: Iterable[list[str]], out: TextIO) -> int:
        """Work until the groups of lines end, and return the exit code."""
        try:
            for group in groups:
                self._take(group, out)
            if self.repeated is None:
                self._write_header(out, self.keys)
            self._learn()
        except KeyboardInterrupt:
            with ignore_signals():
                self._learn()
                self._save()
            return stop_code()
        except BrokenPipeError:
            # The reader of the scores has gone; the model is saved below.
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        except InputError as error:
            self._learn()
            self._save()
            saved = "" if self.target is None else "; the rows with scores are learned and saved"
            skip = "; --on-bad-row skip leaves such rows out" if self.next_row else ""
            print_error(f"{str(error).rstrip('.')}{saved}{skip}.")
            return BAD_INPUT
        self._save()
        return 0

    def summary(self) -> str:
        """Write the counts of rows, and where the model is."""
        parts = [f"{self.n_rows:,} rows scored"]
        parts += [f"{self.n_learned:,} learned"] if self.target is not None else []
        parts += [f"{self.n_skipped:,} skipped"] if self.n_skipped else []
        parts += [f"{self.n_alerts:,} alerts"] if self.alerts is not None else []
        if self.n_left_out:
            parts.append(f"{self.n_left_out:,} not learned because the scores had fallen")
        return ", ".join(parts) + (f"; the model is in {self.target}" if self.target else "")

    def _take(self, lines: list[str], out: TextIO) -> None:
        """Parse lines, score their rows, and learn each complete batch."""
        rows, wrong = list[_Row](), None
        for line in lines:
            try:
                values = self.reader.row(line)
            except InputError as error:
                if self.skip_bad:
                    self.n_skipped, self.next_row = self.n_skipped + 1, self.next_row + 1
                    continue
                wrong = error
                break
            if values is None:
                continue
            cells = self.reader.named_cells()
            if self.repeated is None:
                self._write_header(out, self._choose_columns(list(cells)))
            rows.append(
                _Row(self.next_row, values, [cells.get(name, "") for name in self.repeated or ()])
            )
            self.next_row += 1
            if self.waiting + len(rows) == self.batch_size:
                self._score(rows, out)
                self._learn()
                rows = []
        if rows:
            self._score(rows, out)
        if time.monotonic() - self.saved_at > self.seconds:
            self._save()
        if wrong is not None:
            raise wrong

    def _choose_columns(self, names: list[str]) -> list[str]:
        """Return the columns to repeat: the time of a row, if there is one, and its keys."""
        lacking = [key for key in self.keys if key not in names]
        if lacking:
            known = f"has only {', '.join(names[:9])}" if names else "has no names of columns"
            raise InputError(
                f"--id names the column {lacking[0]!r}, and {self.source} {known}: give another."
            )
        times = [name for name in names if name.lower() in TIMES and name not in self.keys]
        return [*times[:1], *self.keys]

    def _write_header(self, out: TextIO, repeated: list[str]) -> None:
        self.repeated = repeated
        more = ["alert"] if self.alerts is not None else []
        more += ["reason"] if self.explain else []
        csv.writer(out, lineterminator="\n").writerow(
            ["row", *repeated, "log_likelihood", "component", *more]
        )
        out.flush()

    def _score(self, rows: list[_Row], out: TextIO) -> None:
        import numpy as np

        from factormix.data.sources.arrays import ArrayRows

        values = np.stack([row.values for row in rows])
        scores, components = self.model.score_and_predict(ArrayRows(values).mark_finite())
        found = np.zeros(len(rows), dtype=bool)
        if self.alerts is not None:
            found = self.alerts.mark(values, scores, components)
        reasons = [""] * len(rows)
        if self.explain and found.any():
            sentences = self.model.explain(ArrayRows(values[found]).mark_finite()).sentences()
            for place, sentence in zip(np.flatnonzero(found), sentences, strict=True):
                reasons[place] = sentence
        # Counted before they are visible, so that an interrupt finds them counted.
        self.n_rows, self.waiting = self.n_rows + len(rows), self.waiting + len(rows)
        self.n_alerts += int(found.sum())
        if self.target is not None:
            self.unlearned += list(values if self.learn_alerts else values[~found])
        lines = csv.writer(out, lineterminator="\n")
        for i, row in enumerate(rows):
            more = [int(found[i])] if self.alerts is not None else []
            reason = [reasons[i]] if self.explain else []
            cells = [row.number, *row.repeated, f"{scores[i]:.9g}", components[i], *more, *reason]
            lines.writerow(cells)
        out.flush()

    def _learn(self) -> None:
        import numpy as np

        from factormix.data.sources.arrays import ArrayRows

        rows, self.unlearned = self.unlearned, []
        waiting, self.waiting = self.waiting, 0
        if self.target is None or not waiting:
            return
        if self.alerts is not None and not self.alerts.settle():
            self.n_left_out += len(rows)
        elif rows:
            # Training puts an interrupt off until the step is done, so the rows count.
            self.n_learned, self.unsaved = self.n_learned + len(rows), True
            self.model.partial_fit(ArrayRows(np.stack(rows)).mark_finite())

    def _save(self) -> None:
        if self.target is not None and self.unsaved:
            self.model.save(self.target)
            self.unsaved = False
        self.saved_at = time.monotonic()


def _group_rows(
    rows: Rows, size: int, names: Sequence[str] | None, keys: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the rows of a table as JSON lines, ``size`` at a time.

    With names, a line also has the columns ``keys`` and the time of the row, if there are any.
    """
    records: Any = getattr(rows, "records", None)
    take = None
    if names is not None and records is not None:
        columns = [one for one in records.columns if one in keys or one.lower() in TIMES]
        others = [one for one in columns if one not in names]
        take = records.open(others) if others else None
    for batch in rows.blocks(size):
        lines: list[Any] = batch.rows.tolist()
        if names is not None:
            lines = [dict(zip(names, values, strict=True)) for values in lines]
        if take is not None:
            found = take(len(batch))
            beside = found.astype(str).where(found.notna(), "").to_dict("records")
            lines = [{**cells, **values} for cells, values in zip(beside, lines, strict=True)]
        yield list(map(json.dumps, lines))


def _open_text(path: Path) -> TextIO:
    with input_error(f"{path} cannot be read: {{reason}}.", OSError):
        return open(path, encoding="utf-8", newline="\n")


def _group_lines(lines: TextIO, size: int, name: str) -> Iterator[list[str]]:
    """Yield up to ``size`` lines at a time, fewer when the next one is slow to come.

    A group is empty after a second without lines, so that the caller can save.
    """
    waiting: queue.Queue[str | Exception | None] = queue.Queue(4 * size)

    def read() -> None:
        try:
            for line in _open_again(lines):
                waiting.put(line)
            waiting.put(None)
        except (OSError, ValueError) as error:
            waiting.put(error)

    # A read cannot be interrupted, so it has a thread that the process need not wait for.
    threading.Thread(target=read, daemon=True, name="factormix-lines").start()
    group, n_lines = list[str](), 0
    while True:
        try:
            line = waiting.get(timeout=PAUSE if group else 1.0)
        except queue.Empty:
            yield group
            group = []
            continue
        if isinstance(line, Exception):
            raise InputError(
                f"{name} cannot be read after line {n_lines} ({line}): watch reads lines of UTF-8"
                " text, CSV or JSON; decompress or convert others first, as by zcat or iconv"
            )
        if line is not None:
            group.append(line)
            n_lines += 1
        if group and (line is None or len(group) == size):
            yield group
            group = []
        if line is None:
            return


def _open_again(text: TextIO) -> Iterable[str]:
    """Return the lines of a text, through a buffer of its own if it is a real file.

    A thread that waits for the buffer of standard input would keep the process from ending.
    """
    try:
        return open(text.fileno(), encoding="utf-8", newline="\n", closefd=False)
    except OSError:
        return text
