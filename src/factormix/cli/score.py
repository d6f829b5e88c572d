"""``factormix score`` and ``sample``: the likelihood of rows, and new rows from a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import format_shape, print_line
from factormix.cli.options import (
    Data,
    Device,
    ImageShape,
    Model,
    Reading,
    check_output,
    load_mixture,
    open_ids,
    parse_shape,
    require_mixture,
    with_shared_options,
    write_frames,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.sources.base import Rows
    from factormix.estimators import MFA, MFAClassifier


@with_shared_options
def score(
    model: Model,
    data: Data,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="SCORES", help="A .csv file, or - for the screen."),
    ] = Path("-"),
    *,
    reading: Reading,
    device: Device = None,
) -> None:
    """Compute the log-likelihood of each row of DATA.

    SCORES has the number of each row, the columns that identify rows (--id), log_likelihood and
    component (the most probable one). For a classifier, the last column is class. Rows unlike the
    training data have a low log-likelihood.
    """
    on_screen = str(output) == "-"
    if not on_screen:
        check_output(output, (".csv",), model, data)

    from factormix.estimators import MFAClassifier, load
    from factormix.estimators.validation import check_rows

    loaded: object = load(model, device=device)
    fitted = loaded if isinstance(loaded, MFAClassifier) else require_mixture(loaded, model)
    rows = check_rows(fitted, reading.read(data, model=fitted))
    totals = list[float]()
    write_frames(_score_blocks(fitted, rows, totals), output, float_format="%.9g")
    if not on_screen:
        mean = sum(totals) / rows.n_rows
        print_line(
            f"{output} has the scores of {rows.n_rows:,} rows, mean log-likelihood {mean:.6g}"
        )


def _score_blocks(model: MFA | MFAClassifier, rows: Rows, totals: list[float]) -> Iterator[Any]:
    """Yield a data frame of each block, and append the sum of its scores to ``totals``."""
    import pandas as pd

    from factormix.data.checks import count_chunk_rows
    from factormix.data.sources.arrays import ArrayRows
    from factormix.estimators import MFAClassifier

    number_rows = open_ids(rows)
    for batch in rows.blocks(count_chunk_rows(rows)):
        # The reader has checked the values, and the columns are in order.
        block = ArrayRows(batch.rows).mark_finite()
        if isinstance(model, MFAClassifier):
            name, scores, labels = "class", model.score_samples(block), model.predict(block)
        else:
            name, (scores, labels) = "component", model.score_and_predict(block)
        totals.append(float(scores.sum(dtype="float64")))
        # As objects, labels are written as they are.
        found = {"log_likelihood": scores, name: pd.Series(labels.tolist(), dtype=object)}
        yield pd.concat([number_rows(len(batch)), pd.DataFrame(found)], axis=1)


def sample(
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .npy, .csv or .parquet file for rows, .png for a picture.",
        ),
    ],
    n_samples: Annotated[
        int, typer.Option("--n-samples", "-n", min=1, help="Number of samples.")
    ] = 64,
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
    image_shape: ImageShape = None,
) -> None:
    """Draw samples from MODEL.

    In a .csv or .parquet file, columns that had only whole numbers in training have whole numbers
    within the range of the training rows. A .npy file has the values as drawn.
    """
    shape = parse_shape(image_shape)
    check_output(output, (".npy", ".csv", ".parquet", ".png"), model)

    import numpy as np

    from factormix.files import replacing

    fitted = load_mixture(model)
    if random_state is not None:
        fitted.set_params(random_state=random_state)
    if shape is not None and int(np.prod(shape)) != fitted.n_features_in_:
        raise InputError(
            f"an image of {format_shape(shape)} has {int(np.prod(shape))} values where the model"
            f" has {fitted.n_features_in_} features: give another --image-shape."
        )
    is_table = output.suffix.lower() in (".csv", ".parquet")
    drawn = np.asarray(
        fitted.sample(n_samples, component=component, noise=noise, rounded=is_table)[0]
    )
    if output.suffix.lower() == ".png":
        from factormix.views.plotting import save_image_grid

        save_image_grid(drawn, output, shape or fitted.image_shape_)
    elif is_table:
        import pandas as pd

        names = getattr(fitted, "feature_names_in_", None)
        columns = [str(j) for j in range(drawn.shape[1])] if names is None else list(names)
        whole = (drawn == drawn.round()).all(axis=0) & (np.abs(drawn) < 2.0**53).all(axis=0)
        frame = pd.DataFrame(drawn, columns=columns)
        types = dict.fromkeys(np.asarray(columns)[whole], "int64")
        write_frames(iter([frame.astype(types)]), output)
    else:
        with replacing(output) as temporary, open(temporary, "wb") as file:
            np.save(file, drawn, allow_pickle=False)
    print_line(f"{output} has {n_samples:,} samples")
