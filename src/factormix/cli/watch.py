"""``factormix watch``: score rows as they come, learn from them, and tell the unlikely ones."""

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

from factormix.cli.console import (
    BAD_INPUT,
    Device,
    Model,
    Quiet,
    check_device,
    check_target,
    complain,
    load_mixture,
    note,
    parse_seconds,
    stopped_code,
    undisturbed,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from factormix.data.readers.lines import LineReader
    from factormix.estimators import MFA

__all__ = ["watch"]

REMEMBERED = 10_000
"""Scores among which the lowest share is looked for."""
FEWEST = 100
"""Scores before which nothing is told to be low."""
PAUSE = 0.2
"""Seconds without a new line after which those that are there are scored."""


class Format(StrEnum):
    """What lines are."""

    csv = "csv"
    json = "json"


class OnBadRow(StrEnum):
    """What is done about a line that cannot be used."""

    stop = "stop"
    skip = "skip"


def watch(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="MODEL", help="Where the model goes.", show_default="MODEL"
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
        typer.Option(min=1, help="Rows that are learned at once.", show_default="the model's"),
    ] = None,
    forgetting: Annotated[
        float | None,
        typer.Option(help="Least rate of learning, for streams that drift, as in 0.02."),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn/--no-learn", help="Whether the model learns the rows.")
    ] = True,
    on_bad_row: Annotated[
        OnBadRow, typer.Option(help="Stop at a line that cannot be used, or skip and count it.")
    ] = OnBadRow.stop,
    form: Annotated[
        Format | None, typer.Option("--format", help="What lines are.", show_default="guessed")
    ] = None,
    every: Annotated[str, typer.Option(metavar="TIME", help="Time between saves.")] = "60s",
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Read rows from standard input, write their scores, and learn from them.

    Lines are CSV, whose first line may have the names of the columns, or JSON lines. Each row is
    scored by the model before it has learned that row, and gives a line row, log_likelihood,
    component, and with --alert whether it is among the least likely. MODEL is saved every now and
    then and at the end of the input; Ctrl-C is such an end.
    """
    import numpy as np

    if alert is not None and not 0 < alert < 1:
        raise InputError(f"--alert is a share between 0 and 1, not {alert}.")
    if not learn and (output is not None or forgetting is not None):
        raise InputError("--no-learn changes no model: leave --output and --forgetting out.")
    if forgetting is not None and not 0 < forgetting <= 1:
        raise InputError(f"--forgetting lies above 0 and is at most 1, not {forgetting}.")
    seconds = parse_seconds(every, "--every")
    target = model if output is None else output
    if learn:
        check_target(target, ())
    check_device(device)

    from factormix.data.readers.lines import LineReader
    from factormix.estimators.streaming import follow_stream
    from factormix.estimators.validation import trained_features

    fitted = load_mixture(model, device)
    if learn:
        follow_stream(fitted, forgetting)
    name = "standard input"
    reader = LineReader(trained_features(fitted), None if form is None else form.value, name)
    watching = _Watch(
        fitted,
        reader,
        target if learn else None,
        batch_size or fitted._run.batch_size,
        seconds,
        alert,
        on_bad_row is OnBadRow.skip,
        np,
    )
    code = watching.run(sys.stdin, sys.stdout)
    if not quiet:
        note(watching.summary())
    if code:
        raise typer.Exit(code)


class _Watch:
    """Rows that are read, scored, told of and learned, in this order."""

    def __init__(
        self,
        model: MFA,
        reader: LineReader,
        target: Path | None,
        size: int,
        seconds: float,
        alert: float | None,
        skip: bool,
        np: Any,
    ) -> None:
        self._model, self._reader, self._target = model, reader, target
        self._size, self._seconds, self._alert, self._skip = size, seconds, alert, skip
        self._np, self._scores = np, deque[float](maxlen=REMEMBERED)
        self._held = list[Any]()
        """Rows that were scored and are learned next."""
        self._saved_at, self._unsaved = time.monotonic(), False
        self.rows = self.skipped = self.alerts = self.learned = 0

    def run(self, lines: TextIO, out: TextIO) -> int:
        """Go on until the lines end, and return the exit code."""
        try:
            self._header(out)
            for group in _groups(lines, self._size):
                self._take(group, out)
            self._learn()
        except KeyboardInterrupt:
            with undisturbed():
                self._learn()
                self._save()
            return stopped_code()
        except BrokenPipeError:
            # Who reads has seen enough; what was learned is kept.
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        except InputError as error:
            self._learn()
            self._save()
            kept = "" if self._target is None else "; what came before it is learned and saved"
            complain(f"{str(error).rstrip('.')}{kept}.")
            return BAD_INPUT
        self._save()
        return 0

    def summary(self) -> str:
        """Say what was done."""
        parts = [f"{self.rows:,} rows scored"]
        parts += [f"{self.learned:,} learned"] if self._target is not None else []
        parts += [f"{self.skipped:,} lines skipped"] if self.skipped else []
        parts += [f"{self.alerts:,} alerts"] if self._alert is not None else []
        return ", ".join(parts) + (f"; the model is in {self._target}" if self._target else "")

    def _take(self, lines: list[str], out: TextIO) -> None:
        """Read some lines, score their rows, and learn whenever there are enough."""
        rows, wrong = list[Any](), None
        for line in lines:
            try:
                row = self._reader.row(line)
            except InputError as error:
                if self._skip:
                    self.skipped += 1
                    continue
                wrong = error
                break
            if row is not None:
                rows.append(row)
            if len(self._held) + len(rows) == self._size:
                self._tell(rows, out)
                self._learn()
                rows = []
        if rows:
            self._tell(rows, out)
        if time.monotonic() - self._saved_at > self._seconds:
            self._save()
        if wrong is not None:
            raise wrong

    def _tell(self, rows: list[Any], out: TextIO) -> None:
        from factormix.data.sources.arrays import ArrayRows

        table = self._np.stack(rows)
        scores, components = self._model.score_and_predict(ArrayRows(table).mark_finite())
        low = self._low(scores)
        marks = [""] * len(rows) if low is None else [f",{int(mark)}" for mark in low]
        told = zip(count(self.rows), scores.tolist(), components.tolist(), marks, strict=False)
        lines = [f"{row},{score:.9g},{k}{mark}\n" for row, score, k, mark in told]
        # Counted before anybody can see them, so that an interrupt finds them counted.
        self.rows += len(rows)
        self._held += rows if self._target is not None else []
        out.write("".join(lines))
        out.flush()

    def _low(self, scores: NDArray[Any]) -> NDArray[Any] | None:
        """Tell which scores are below the lowest share of those before them."""
        if self._alert is None:
            return None
        enough = len(self._scores) >= max(FEWEST, math.ceil(1 / self._alert))
        bound = self._np.quantile(self._scores, self._alert) if enough else -math.inf
        low = scores < bound
        self._scores.extend(scores.tolist())
        self.alerts += int(low.sum())
        return low

    def _learn(self) -> None:
        from factormix.data.sources.arrays import ArrayRows

        if self._held:
            rows, self._held = self._np.stack(self._held), []
            # An interrupt comes after the step, which then counts.
            self.learned, self._unsaved = self.learned + len(rows), True
            self._model.partial_fit(ArrayRows(rows).mark_finite())

    def _save(self) -> None:
        if self._target is not None and self._unsaved:
            self._model.save(self._target)
            self._unsaved = False
        self._saved_at = time.monotonic()

    def _header(self, out: TextIO) -> None:
        out.write("row,log_likelihood,component" + (",alert\n" if self._alert else "\n"))
        out.flush()


def _groups(lines: TextIO, size: int) -> Iterator[list[str]]:
    """Yield lines as they come, as many as there are without waiting long, at most ``size``.

    When nothing comes for a while, there are none.
    """
    waiting: queue.Queue[str | Exception | None] = queue.Queue(4 * size)

    def read() -> None:
        try:
            for line in _lines(lines):
                waiting.put(line)
            waiting.put(None)
        except (OSError, ValueError) as error:
            waiting.put(error)

    # A thread of its own, which the process does not wait for: reading cannot be interrupted.
    threading.Thread(target=read, daemon=True, name="factormix-lines").start()
    group, count = list[str](), 0
    while True:
        try:
            line = waiting.get(timeout=PAUSE if group else 1.0)
        except queue.Empty:
            yield group
            group = []
            continue
        if isinstance(line, Exception):
            raise InputError(f"standard input cannot be read after line {count} ({line})")
        if line is not None:
            group.append(line)
            count += 1
        if group and (line is None or len(group) == size):
            yield group
            group = []
        if line is None:
            return


def _lines(text: TextIO) -> Iterator[str]:
    """Yield the lines of a text, of a real file without the lock of its buffer.

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
