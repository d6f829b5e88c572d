"""``factormix images``: train and use densities of whole images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import format_table, print_line, show_help
from factormix.cli.options import (
    Device,
    Quiet,
    check_model_output,
    check_output,
    write_frames,
)
from factormix.cli.train import RunFiles, join_processes, parse_image_size
from factormix.defaults import (
    IMAGE_BATCH,
    IMAGE_FEATURES,
    IMAGE_KINDS,
    IMAGE_NEIGHBOURS,
    IMAGE_SCALES,
    IMAGE_STEPS,
)
from factormix.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from factormix.estimators import ConvMFA

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model file of factormix images train.")
]
Images = Annotated[
    Path,
    typer.Argument(
        metavar="IMAGES",
        help="A folder of 8-bit images of any sizes, an image, or a .npy file of images"
        " (n, height, width) or (n, height, width, channels) of uint8 or real numbers.",
    ),
]
OneImage = Annotated[
    Path,
    typer.Argument(
        metavar="IMAGE",
        help="An image, or a .npy file of one (height, width) or (height, width, channels).",
    ),
]
Draws = Annotated[
    int, typer.Option(min=0, help="Number of draws, for a .npy file; 0 is their mean.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed.", show_default="the model's")]

images_app = typer.Typer(
    help="Densities of whole images: train, score, surprise, sample, inpaint, upsample.",
    epilog="""\b
Examples:
  factormix images train photos/ -o scenes.safetensors
  factormix images score scenes.safetensors photos/ -o scores.csv""",
    rich_markup_mode=None,
    invoke_without_command=True,
)


images_app.callback()(show_help)


@images_app.command(
    epilog="""\b
Examples:
  factormix images train photos/ -o scenes.safetensors --n-steps 50
  factormix images train photos/ -o deep.safetensors --n-steps 20 --depth 1 --checkpoint steps"""
)
def train(
    context: typer.Context,
    images: Images,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MODEL", help="A file for the model.")
    ],
    n_kinds: Annotated[int, typer.Option(min=1, help="Linear predictions.")] = IMAGE_KINDS,
    n_scales: Annotated[int, typer.Option(min=1, help="Widths of each.")] = IMAGE_SCALES,
    n_features: Annotated[int, typer.Option(min=1, help="Features of gates.")] = IMAGE_FEATURES,
    n_neighbours: Annotated[
        int, typer.Option(min=1, help="Known pixels that a pixel is given.")
    ] = IMAGE_NEIGHBOURS,
    depth: Annotated[
        int, typer.Option(min=0, help="Times the image is halved; 0 is one raster scan.")
    ] = 0,
    thumbnails: Annotated[
        str | None,
        typer.Option(
            metavar="COMPONENTS,FACTORS",
            help="Sizes of a mixture of whole thumbnails, as in 400,40, for images of one size and"
            " a depth of 1 or more.",
            show_default="a raster scan",
        ),
    ] = None,
    n_steps: Annotated[int, typer.Option(min=1, help="Steps of the training.")] = IMAGE_STEPS,
    batch_size: Annotated[int, typer.Option(min=1, help="Pixels of a step.")] = IMAGE_BATCH,
    random_state: Annotated[
        int | None, typer.Option(min=0, help="Seed.", show_default="random")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder for numbered checkpoints.")
    ] = None,
    every: Annotated[
        str | None, typer.Option(metavar="TIME", help="Between checkpoints.", show_default="60s")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Checkpoints that stay.", show_default="3")
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train a density of whole images, and write it to MODEL.

    The bar shows bits per dimension. Ctrl-C saves the model so far, and --resume continues to the
    model of an uninterrupted run; a resumed run has the options that it was started with. When
    torchrun starts several processes, they train one model together.
    """
    sizes = _parse_pair(thumbnails)
    _, communicator = join_processes(None, device)

    def prepare() -> tuple[RunFiles, Path | None]:
        check_model_output(output, images, resume=resume)
        files = RunFiles(output, checkpoint, every, keep)
        return files, files.find_start(resume)

    files, start = communicator.run_together(prepare)

    from factormix.data.pictures import as_pictures
    from factormix.estimators import ConvMFA
    from factormix.estimators.conv import check_options

    model = ConvMFA(
        n_kinds,
        n_scales,
        n_features=n_features,
        n_neighbours=n_neighbours,
        depth=depth,
        thumbnails=sizes,
        n_steps=n_steps,
        batch_size=batch_size,
        random_state=random_state,
        device=device,
    )
    # Reading the images may take long: wrong options must fail before it.
    communicator.run_together(lambda: check_options(model))
    if start is not None:
        model = communicator.run_together(lambda: _load(start, device))
    pictures = communicator.run_together(lambda: as_pictures(images))
    model.set_params(verbose=int(not quiet), callbacks=[files.callback])
    files.train(model, pictures, start, context.obj, communicator)
    if not quiet and communicator.saves:
        last = model.history_[-1]
        summary = {
            "images": f"{len(pictures):,}",
            "bits per dimension": f"{last['bits_per_dim']:.4f}",
            "seconds": f"{last['seconds']:.1f}",
            "model": output,
        }
        print_line(format_table(summary))


@images_app.command(
    epilog="""\b
Example:
  factormix images score scenes.safetensors photos/ -o scores.csv"""
)
def score(
    model: Model,
    images: Images,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="SCORES", help="A .csv file, or - for the screen."),
    ] = Path("-"),
    device: Device = None,
) -> None:
    """Compute the log-likelihood of each image, in nats, and its bits per dimension.

    SCORES has the columns image, the number or the file, log_likelihood and bits_per_dim.
    """
    on_screen = str(output) == "-"
    if not on_screen:
        check_output(output, (".csv",), model, images)

    import numpy as np
    import pandas as pd

    from factormix.data.pictures import as_pictures

    fitted = _load(model, device)
    pictures = as_pictures(images, fitted.n_features_in_)
    scores = fitted.score_samples(pictures)
    dims = pictures.heights * pictures.widths * pictures.n_channels
    names = _name_images(images, len(dims))
    found = {"image": names, "log_likelihood": scores, "bits_per_dim": -scores / dims / np.log(2)}
    write_frames(iter([pd.DataFrame(found)]), output, float_format="%.9g")
    if not on_screen:
        bits = -scores.sum() / dims.sum() / np.log(2)
        print_line(
            f"{output} has the scores of {len(dims):,} images, {bits:.4f} bits per dimension"
        )


@images_app.command(
    epilog="""\b
Example:
  factormix images surprise scenes.safetensors noisy.png -o surprise.png"""
)
def surprise(
    model: Model,
    images: Images,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="MAPS",
            help="A .png picture of one image, or a .npz file with the map of each image, in nats.",
        ),
    ],
    device: Device = None,
) -> None:
    """Map how surprising each pixel is, given those before it.

    The sum of a map is minus the log-likelihood of the image. A picture is black where pixels are
    least surprising, and white at the 99.5% quantile and above.
    """
    check_output(output, (".png", ".npz"), model, images)

    import numpy as np

    from factormix.data.pictures import as_pictures
    from factormix.files import replacing

    fitted = _load(model, device)
    pictures = as_pictures(images, fitted.n_features_in_)
    if output.suffix.lower() == ".png" and len(pictures) > 1:
        raise InputError(
            f"{images} has {len(pictures):,} images, and a .png has the map of one: name {output}"
            " .npz."
        )
    maps = fitted.surprise(pictures)
    if output.suffix.lower() == ".npz":
        names = _name_images(images, len(maps))
        with replacing(output) as temporary, temporary.open("wb") as file:
            np.savez(file, **{str(name): one for name, one in zip(names, maps, strict=True)})
    else:
        low, high = np.quantile(maps[0], (0, 0.995))
        _write(255 * (maps[0] - low) / max(high - low, 1e-9), output)
    print_line(f"{output} has the surprise of {int(pictures.starts[-1]):,} pixels")


@images_app.command(
    epilog="""\b
Example:
  factormix images sample scenes.safetensors -n 16 --size 24x32 -o scenes.png"""
)
def sample(
    model: Model,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="A .png picture or a .npy array."),
    ],
    n_samples: Annotated[
        int, typer.Option("--n-samples", "-n", min=1, help="Number of samples.")
    ] = 64,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="HEIGHTxWIDTH",
            help="Size of the samples.",
            show_default="32x32; with thumbnails, the trained size",
        ),
    ] = None,
    every_depth: Annotated[
        bool,
        typer.Option(
            "--every-depth",
            help="Show each sample at every depth, from its thumbnail on, side by side.",
        ),
    ] = False,
    random_state: Seed = None,
    device: Device = None,
) -> None:
    """Draw images from MODEL."""
    shape = parse_image_size(size)
    check_output(output, (".png", ".npy"), model)

    import numpy as np

    fitted = _load(model, device, random_state)
    _check_channels(fitted.n_features_in_, output)
    drawn = fitted.sample(n_samples, size=shape, every_depth=every_depth)
    if every_depth:
        h, w = drawn[-1].shape[1:3]
        factors = [2**i for i in reversed(range(len(drawn)))]
        large = [
            one.repeat(factor, axis=1).repeat(factor, axis=2)[:, :h, :w]
            for one, factor in zip(drawn, factors, strict=True)
        ]
        drawn = np.concatenate(large, axis=2)
    if output.suffix.lower() == ".npy":
        _write(drawn, output)
    else:
        from factormix.views.plotting import save_image_grid

        whole = drawn.dtype.kind == "u"
        rows = (drawn / 255.0 if whole else drawn).reshape(n_samples, -1)
        save_image_grid(rows, output, drawn.shape[1:])
    print_line(f"{output} has {n_samples:,} samples")


@images_app.command(
    epilog="""\b
Example:
  factormix images inpaint scenes.safetensors noisy.png scratches.png -o filled.png"""
)
def inpaint(
    model: Model,
    image: OneImage,
    mask: Annotated[
        Path,
        typer.Argument(
            metavar="MASK",
            help="An image that is not black, or a .npy file that is not 0, where pixels are to be"
            " filled.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="An image, or .npy for draws."),
    ],
    n_draws: Draws = 0,
    n_sweeps: Annotated[int, typer.Option(min=0, help="Times the pixels are drawn again.")] = 50,
    random_state: Seed = None,
    device: Device = None,
) -> None:
    """Fill pixels of an image, given all the others."""
    _check_picture(output, n_draws, model, image, mask)

    fitted = _load(model, device, random_state)
    pixels, holes = _read_image(image, fitted, output), _read_mask(mask)
    fitted.verbose = 1
    _write(fitted.inpaint(pixels, holes, n_draws=n_draws, n_sweeps=n_sweeps), output)
    print_line(f"{output} has the image with {int(holes.sum()):,} pixels filled")


@images_app.command(
    epilog="""\b
Example:
  factormix images upsample deep.safetensors noisy.png -o twice.png"""
)
def upsample(
    model: Model,
    image: OneImage,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="An image, or .npy for draws."),
    ],
    factor: Annotated[int, typer.Option(min=2, help="2, or a higher power of 2.")] = 2,
    n_draws: Draws = 0,
    random_state: Seed = None,
    device: Device = None,
) -> None:
    """Enlarge an image; MODEL needs a depth of 1 or more."""
    _check_picture(output, n_draws, model, image)

    fitted = _load(model, device, random_state)
    pixels = _read_image(image, fitted, output)
    _write(fitted.upsample(pixels, factor, n_draws=n_draws), output)
    print_line(f"{output} has the image, {factor} times as large")


def _parse_pair(text: str | None) -> tuple[int, int] | None:
    """Parse two sizes such as 400,40."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+),(\d+)", text)
    if not found:
        raise InputError(f"--thumbnails {text!r} is not COMPONENTS,FACTORS, as in 400,40.")
    return int(found[1]), int(found[2])


def _load(path: Path, device: str | None, random_state: int | None = None) -> ConvMFA:
    from factormix.estimators import ConvMFA, load

    model = load(path, device=device)
    if not isinstance(model, ConvMFA):
        raise InputError(
            f"{path} holds an {type(model).__name__}, and this command needs a density of images:"
            " give a file of factormix images train."
        )
    if random_state is not None:
        model.set_params(random_state=random_state)
    return model


def _name_images(images: Path, n: int) -> Sequence[object]:
    """Return the files of a folder, or numbers."""
    from factormix.data.readers.images import list_image_files

    return [file.name for file in list_image_files(images)] if images.is_dir() else range(n)


def _check_picture(output: Path, n_draws: int, *inputs: Path) -> None:
    """Check the name of a file for an image or for draws."""
    from factormix.data.readers.images import IMAGE_SUFFIXES

    check_output(output, (".npy",) if n_draws else (*IMAGE_SUFFIXES, ".npy"), *inputs)


def _check_channels(n_channels: int, output: Path) -> None:
    if output.suffix.lower() != ".npy" and n_channels not in (1, 3):
        raise InputError(
            f"the images have {n_channels} channels, and a {output.suffix} has 1 or 3: name"
            f" {output} .npy."
        )


def _read_image(path: Path, model: ConvMFA, output: Path) -> NDArray[Any]:
    """Return an image (h, w, c) for a model, after a check that the output can hold the result."""
    from factormix.data.pictures import as_image

    pixels = as_image(path, model.n_features_in_)
    _check_channels(pixels.shape[2], output)
    if output.suffix.lower() != ".npy" and pixels.dtype.kind == "f":
        raise InputError(
            f"{path} has real numbers, and a {output.suffix} has 8 bits: name {output} .npy."
        )
    return pixels


def _read_mask(path: Path) -> Any:
    """Return where a mask (h, w) is not black, or not 0."""
    from factormix.data.pictures import as_image, map_array

    array = path.suffix.lower() == ".npy" and path.is_file()
    holes = (map_array(path) if array else as_image(path)) != 0
    return holes.any(axis=2) if holes.ndim == 3 else holes


def _write(pixels: NDArray[Any], path: Path) -> None:
    """Write an array, or an 8-bit image."""
    import numpy as np
    from PIL import Image

    from factormix.files import replacing

    with replacing(path) as temporary:
        if path.suffix.lower() == ".npy":
            np.save(temporary, pixels)
        else:
            Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(temporary)
