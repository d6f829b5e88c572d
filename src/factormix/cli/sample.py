"""``factormix sample``: new rows from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import check_target, load_mixture, parse_shape, say, shape_text
from factormix.cli.options import Model
from factormix.errors import InputError

__all__ = ["sample"]


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
