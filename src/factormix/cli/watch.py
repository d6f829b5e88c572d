"""``factormix watch``: score the rows of a stream, learn from them, and mark the unlikely ones."""

from __future__ import annotations

import codecs
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from factormix.cli.console import BAD_INPUT, ignore_signals, print_error, print_note, stop_code
from factormix.cli.options import (
    Device,
    Model,
    Quiet,
    check_device,
    check_output,
    load_mixture,
    parse_seconds,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from factormix.data.readers.lines import LineReader
    from factormix.estimators import MFA

REMEMBERED_SCORES = 10_000
"""Recent scores whose quantile is the threshold of alerts: one in 1,000 leaves ten below it."""
FEWEST_SCORES = 100
"""Scores before the first alert: a quantile of fewer is too noisy."""
PAUSE = 0.2
"""Seconds without a new line after which the lines read so far are scored: little for a person."""


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
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A file for the model.", show_default="MODEL"
        ),
    ] = None,
    alert: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Mark rows whose scores are among the lowest share, as in 0.01."
        ),
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
    """Read rows from standard input, write their scores, and learn from them.

    Lines are CSV, with or without a first line of column names, or JSON lines. The model scores
    each row before learning it, and writes a line row, log_likelihood, component, and with --alert
    whether the row is among the least likely. MODEL is saved from time to time and when the input
    ends or Ctrl-C is pressed.
    """
    if alert is not None and not 0 < alert < 1:
        raise InputError(f"--alert is a share between 0 and 1, not {alert}.")
    if not learn and (output is not None or forgetting is not None):
        raise InputError("--no-learn changes no model: leave --output and --forgetting out.")
    if forgetting is not None and not 0 < forgetting <= 1:
        raise InputError(f"--forgetting must be above 0 and at most 1, not {forgetting}.")
    seconds = parse_seconds(every, "--every")
    target = model if output is None else output
    if learn:
        check_output(target, ())
    check_device(device)

    from factormix.data.readers.lines import LineReader
    from factormix.estimators.streaming import follow_stream
    from factormix.estimators.validation import fitted_features

    fitted = load_mixture(model, device)
    if learn:
        follow_stream(fitted, forgetting)
    name = "standard input"
    reader = LineReader(fitted_features(fitted), None if form is None else form.value, name)
    watcher = _Watcher(
        fitted,
        reader,
        target if learn else None,
        batch_size=batch_size or fitted.batch_size_,
        seconds=seconds,
        alert=alert,
        skip_bad=on_bad_row is OnBadRow.skip,
    )
    code = watcher.run(sys.stdin, sys.stdout)
    if not quiet:
        print_note(watcher.summary())
    if code:
        raise typer.Exit(code)


class _Watcher:
    """Score the rows of a stream, write their scores, then learn them."""

    def __init__(
        self,
        model: MFA,
        reader: LineReader,
        target: Path | None,
        *,
        batch_size: int,
        seconds: float,
        alert: float | None,
        skip_bad: bool,
    ) -> None:
        self._model, self._reader, self._target = model, reader, target
        self._batch_size, self._seconds = batch_size, seconds
        self._alert, self._skip_bad = alert, skip_bad
        self._scores = deque[float](maxlen=REMEMBERED_SCORES)
        self._unlearned = list[Any]()
        """Rows that were scored and are learned next."""
        self._saved_at, self._unsaved = time.monotonic(), False
        self.n_rows = self.n_skipped = self.n_alerts = self.n_learned = 0

    def run(self, lines: TextIO, out: TextIO) -> int:
        """Work until the lines end, and return the exit code."""
        try:
            out.write("row,log_likelihood,component" + (",alert\n" if self._alert else "\n"))
            out.flush()
            for group in _group_lines(lines, self._batch_size):
                self._take(group, out)
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
            saved = "" if self._target is None else "; the rows before it are learned and saved"
            print_error(f"{str(error).rstrip('.')}{saved}.")
            return BAD_INPUT
        self._save()
        return 0

    def summary(self) -> str:
        """Write the counts of rows, and where the model is."""
        parts = [f"{self.n_rows:,} rows scored"]
        parts += [f"{self.n_learned:,} learned"] if self._target is not None else []
        parts += [f"{self.n_skipped:,} lines skipped"] if self.n_skipped else []
        parts += [f"{self.n_alerts:,} alerts"] if self._alert is not None else []
        return ", ".join(parts) + (f"; the model is in {self._target}" if self._target else "")

    def _take(self, lines: list[str], out: TextIO) -> None:
        """Parse lines, score their rows, and learn each complete batch."""
        rows, wrong = list[Any](), None
        for line in lines:
            try:
                row = self._reader.row(line)
            except InputError as error:
                if self._skip_bad:
                    self.n_skipped += 1
                    continue
                wrong = error
                break
            if row is not None:
                rows.append(row)
            if len(self._unlearned) + len(rows) == self._batch_size:
                self._score(rows, out)
                self._learn()
                rows = []
        if rows:
            self._score(rows, out)
        if time.monotonic() - self._saved_at > self._seconds:
            self._save()
        if wrong is not None:
            raise wrong

    def _score(self, rows: list[Any], out: TextIO) -> None:
        import numpy as np

        from factormix.data.sources.arrays import ArrayRows

        table = ArrayRows(np.stack(rows)).mark_finite()
        scores, components = self._model.score_and_predict(table)
        low = self._find_low(scores)
        marks = [""] * len(rows) if low is None else [f",{int(mark)}" for mark in low]
        cells = zip(count(self.n_rows), scores.tolist(), components.tolist(), marks, strict=False)
        lines = [f"{row},{score:.9g},{k}{mark}\n" for row, score, k, mark in cells]
        # Counted before they are visible, so that an interrupt finds them counted.
        self.n_rows += len(rows)
        self._unlearned += rows if self._target is not None else []
        out.write("".join(lines))
        out.flush()

    def _find_low(self, scores: NDArray[Any]) -> NDArray[Any] | None:
        """Return which scores are in the lowest share of the scores before them, (B,)."""
        import numpy as np

        if self._alert is None:
            return None
        enough = len(self._scores) >= max(FEWEST_SCORES, math.ceil(1 / self._alert))
        bound = np.quantile(self._scores, self._alert) if enough else -math.inf
        low: NDArray[Any] = scores < bound
        self._scores.extend(scores.tolist())
        self.n_alerts += int(low.sum())
        return low

    def _learn(self) -> None:
        import numpy as np

        from factormix.data.sources.arrays import ArrayRows

        if self._unlearned:
            rows, self._unlearned = np.stack(self._unlearned), []
            # Training puts an interrupt off until the step is done, so the rows count.
            self.n_learned, self._unsaved = self.n_learned + len(rows), True
            self._model.partial_fit(ArrayRows(rows).mark_finite())

    def _save(self) -> None:
        if self._target is not None and self._unsaved:
            self._model.save(self._target)
            self._unsaved = False
        self._saved_at = time.monotonic()


def _group_lines(lines: TextIO, size: int) -> Iterator[list[str]]:
    """Yield up to ``size`` lines at a time, fewer when the next one is slow to come.

    A group is empty after a second without lines, so that the caller can save.
    """
    waiting: queue.Queue[str | Exception | None] = queue.Queue(4 * size)

    def read() -> None:
        try:
            for line in _read_lines(lines):
                waiting.put(line)
            waiting.put(None)
        except (OSError, ValueError) as error:
            waiting.put(error)

    # A read cannot be interrupted: it has a thread that the process need not wait for.
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
            raise InputError(f"standard input cannot be read after line {n_lines} ({line})")
        if line is not None:
            group.append(line)
            n_lines += 1
        if group and (line is None or len(group) == size):
            yield group
            group = []
        if line is None:
            return


def _read_lines(text: TextIO) -> Iterator[str]:
    """Yield the lines of a text; a real file is read without the lock of its buffer.

    A thread that waits in a buffer would keep the process from ending.
    """
    try:
        descriptor = text.fileno()
    except OSError:
        yield from text
        return
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    while data := os.read(descriptor, 1 << 16):
        *whole, rest = (rest + decoder.decode(data)).split("\n")
        yield from whole
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest
