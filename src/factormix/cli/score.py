"""``factormix score``: the log-likelihood and component of every row."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from factormix.cli.console import check_device, check_fit, check_target, say

if TYPE_CHECKING:
    from factormix.data.sources import FileRows
    from factormix.estimators import MFA

__all__ = ["score"]

BLOCK_ELEMENTS = 1 << 22
"""Values that are read and scored at once."""


def score(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A file of train.")],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="A .npy, .npz, .csv or .parquet file, or a folder of images."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="SCORES", help="A .csv file, or - for the screen."),
    ] = Path("-"),
    key: Annotated[str | None, typer.Option(help="Name of the array in an .npz file.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute: cpu, cuda, mps.", show_default="cpu")
    ] = None,
) -> None:
    """Compute the log-likelihood of each row of DATA.

    SCORES has the columns row, log_likelihood and component, the most probable one. Rows that are
    unlike the training data have a low log-likelihood.
    """
    on_screen = str(output) == "-"
    if not on_screen:
        check_target(output, (".csv",), model, data)
    check_device(device)

    from factormix.data.readers import read_rows
    from factormix.estimators import load

    fitted = load(model, device=device)
    shape = fitted.notes_.get("image_shape")
    rows = read_rows(data, key=key, image_size=shape[:2] if shape and data.is_dir() else None)
    check_fit(fitted, rows, data)
    with _opened(output, on_screen) as file:
        mean = _write_scores(fitted, rows, file)
    if not on_screen:
        say(f"{output} has the scores of {rows.n_rows:,} rows, mean log-likelihood {mean:.6g}")


def _write_scores(model: MFA, rows: FileRows, file: TextIO) -> float:
    """Write a line per row, block by block, and return the mean log-likelihood."""
    file.write("row,log_likelihood,component\n")
    total, row = 0.0, 0
    for block in rows.blocks(max(1, BLOCK_ELEMENTS // rows.n_features)):
        scores, components = model.score_samples(block), model.predict(block)
        pairs = zip(scores.tolist(), components.tolist(), strict=True)
        file.writelines(f"{i},{s:.9g},{k}\n" for i, (s, k) in enumerate(pairs, row))
        total, row = total + float(scores.sum(dtype="float64")), row + len(block)
    return total / row


@contextmanager
def _opened(output: Path, on_screen: bool) -> Iterator[TextIO]:
    """Open the screen, or a file that appears only when it is complete."""
    from factormix.files import replacing

    if on_screen:
        yield sys.stdout
        return
    with replacing(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
        yield file
