"""``factormix score``: the log-likelihood and component of every row.

``factormix sample``: new rows from a model.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

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
    load_mixture,
    mixture_of,
    opened,
    parse_columns,
    parse_shape,
    read,
    say,
    shape_text,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.base import Rows
    from factormix.estimators import MFA, MFAClassifier

__all__ = ["sample", "score"]

BLOCK_ELEMENTS = 1 << 22
"""Values that are read and scored at once."""


def score(
    model: Model,
    data: Data,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="SCORES", help="A .csv file, or - for the screen."),
    ] = Path("-"),
    key: Key = None,
    header: Header = None,
    columns: Columns = None,
    device: Device = None,
) -> None:
    """Compute the log-likelihood of each row of DATA.

    SCORES has the columns row, log_likelihood and component, the most probable one, or class, if
    MODEL is a classifier. Rows that are unlike the training data have a low log-likelihood.
    """
    on_screen = str(output) == "-"
    if not on_screen:
        check_target(output, (".csv",), model, data)
    check_device(device)

    from factormix.estimators import MFAClassifier, load
    from factormix.estimators.validation import check_rows

    found: object = load(model, device=device)
    fitted = found if isinstance(found, MFAClassifier) else mixture_of(found, model)
    shape = fitted.image_shape_
    size = (shape[0], shape[1]) if shape and data.is_dir() else None
    chosen = parse_columns(columns)
    rows = check_rows(fitted, read(data, key=key, image_size=size, header=header, columns=chosen))
    with opened(output) as file:
        mean = _write_scores(fitted, rows, file)
    if not on_screen:
        say(f"{output} has the scores of {rows.n_rows:,} rows, mean log-likelihood {mean:.6g}")


def _write_scores(model: MFA | MFAClassifier, rows: Rows, file: TextIO) -> float:
    """Write a line per row, block by block, and return the mean log-likelihood."""
    from factormix.data.sources.arrays import ArrayRows
    from factormix.estimators import MFAClassifier

    classifies = isinstance(model, MFAClassifier)
    file.write(f"row,log_likelihood,{'class' if classifies else 'component'}\n")
    total, row = 0.0, 0
    for block in rows.blocks(max(1, BLOCK_ELEMENTS // rows.n_features)):
        # Its reader has checked the file, and its columns are in order.
        part = ArrayRows(block.rows).mark_finite()
        if isinstance(model, MFAClassifier):
            scores, found = model.score_samples(part), model.predict(part)
        else:
            scores, found = model.score_and_predict(part)
        pairs = zip(scores.tolist(), found.tolist(), strict=True)
        lines = csv.writer(file, lineterminator="\n")
        lines.writerows((i, f"{s:.9g}", k) for i, (s, k) in enumerate(pairs, row))
        total, row = total + float(scores.sum(dtype="float64")), row + len(block)
    return total / row


def sample(
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A .npy file for rows, .png for a picture."
        ),
    ],
    n_samples: Annotated[int, typer.Option("--n-samples", "-n", min=1, help="How many.")] = 64,
    component: Annotated[
        int | None, typer.Option(min=0, help="Draw from this component only.")
    ] = None,
    noise: Annotated[
        bool, typer.Option("--noise/--no-noise", help="With or without the noise term.")
    ] = True,
    random_state: Annotated[
        int | None,
        typer.Option(min=0, help="Seed.", show_default="the model's"),
    ] = None,
    image_shape: Annotated[
        str | None,
        typer.Option(
            metavar="HEIGHTxWIDTH[x3]",
            help="Shape of an image in a picture.",
            show_default="that of the training images",
        ),
    ] = None,
) -> None:
    """Draw samples from MODEL."""
    given = parse_shape(image_shape)
    check_target(output, (".npy", ".png"), model)

    import numpy as np

    from factormix.files import replacing

    fitted = load_mixture(model)
    if random_state is not None:
        fitted.set_params(random_state=random_state)
    if given is not None and int(np.prod(given)) != fitted.n_features_in_:
        raise InputError(
            f"an image of {shape_text(given)} has {int(np.prod(given))} values where the model has"
            f" {fitted.n_features_in_} features: give another --image-shape."
        )
    drawn = np.asarray(fitted.sample(n_samples, component=component, noise=noise)[0])
    if output.suffix.lower() == ".png":
        from factormix.views.plotting import save_image_grid

        save_image_grid(drawn, output, given or fitted.image_shape_)
    else:
        with replacing(output) as temporary, open(temporary, "wb") as file:
            np.save(file, drawn, allow_pickle=False)
    say(f"{output} has {n_samples:,} samples")
