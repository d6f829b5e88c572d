"""``factormix denoise``: remove noise from image files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factormix.cli.console import print_line
from factormix.cli.options import check_output, require_mixture
from factormix.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def denoise(
    images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="An image, or a folder of images.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="The file for an image, or the folder for a folder of images.",
        ),
    ],
    sigma: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the noise, in grey levels of the file.",
            show_default="estimated",
        ),
    ] = None,
    prior: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A model of p x p patches of clean images in grey levels (factormix train), or of"
            " whole clean images (factormix images train), which helps the mixture of each image's"
            " own patches. For photographs.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip images that are in the folder OUT already.")
    ] = False,
    random_state: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
) -> None:
    """Remove Gaussian noise from an image, or from every image of a folder.

    Images keep their size, and their 8 or 16 bits. An alpha channel is kept as it is. Photographs
    that a camera has marked as turned are turned upright.
    """
    if sigma is not None and not 0 < sigma < float("inf"):
        raise InputError(f"--sigma is the deviation of the noise and must be above 0, not {sigma}.")
    pairs = _pair_files(images, output)

    from factormix.estimators import ConvMFA, load
    from factormix.estimators import denoise as denoise_pixels
    from factormix.training.callbacks import draw_bar

    trained: Any = None if prior is None else load(prior)
    if prior is not None and not isinstance(trained, ConvMFA):
        trained = require_mixture(trained, prior)
    todo = [(source, target) for source, target in pairs if not (resume and target.exists())]
    for source, target in todo:
        _check_file(source, target, trained, estimated=sigma is None)
    if images.is_dir():
        output.mkdir(exist_ok=True)
    with draw_bar(total=len(todo), unit="image") as bar:
        for source, target in todo:
            pixels, alpha = _read(source)
            try:
                found = denoise_pixels(pixels, sigma, prior=trained, random_state=random_state)
            except InputError as error:
                raise InputError(f"{source}: {error}") from error
            _write(found, alpha, target)
            bar.update()
    if images.is_dir():
        print_line(f"{output} has {len(pairs):,} images, {len(todo):,} of them new")
    else:
        print_line(f"{output} has the image without noise")


def _pair_files(images: Path, output: Path) -> list[tuple[Path, Path]]:
    """Return the files to read and to write, checked before any work."""
    from factormix.data.readers.images import IMAGE_SUFFIXES, list_image_files

    if not images.exists():
        raise InputError(f"{images} does not exist: give an image or a folder of images.")
    if not images.is_dir():
        check_output(output, IMAGE_SUFFIXES, images)
        return [(images, output)]
    files = list_image_files(images)
    if output.exists() and (not output.is_dir() or output.samefile(images)):
        raise InputError(f"{output} must be another folder: {images} is a folder of images.")
    if not output.parent.is_dir():
        raise InputError(f"the folder {output.parent} does not exist: create it or name another.")
    return [(file, output / file.name) for file in files]


def _check_file(source: Path, target: Path, prior: Any, *, estimated: bool) -> None:
    """Refuse, by its header, an image that is too small or that its target cannot hold."""
    from factormix.data.readers.images import GREY_MODES, measure_upright, open_image
    from factormix.estimators import ConvMFA
    from factormix.estimators.conv import check_noisy_shape
    from factormix.estimators.denoising import check_size, find_patch_size

    with open_image(source) as image:
        height, width = measure_upright(image)
        channels = 1 if image.mode in GREY_MODES else 3
        deep, alpha = image.mode.startswith("I"), _has_alpha(image)
    suffix = target.suffix.lower()
    if suffix != source.suffix.lower():
        for present, what, holders in (
            (deep, "16 bits", (".png", ".tif", ".tiff")),
            (alpha, "an alpha channel", (".png", ".tif", ".tiff", ".webp")),
        ):
            if present and suffix not in holders:
                raise InputError(
                    f"{source} has {what}, which a file {suffix} cannot hold: name {target}"
                    f" {' or '.join(holders)}."
                )
    try:
        check_size(height, width, find_patch_size(prior), estimated=estimated)
        if isinstance(prior, ConvMFA):
            check_noisy_shape(prior, height, width, channels)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _has_alpha(image: Any) -> bool:
    # Pillow would cut 16 bits to 8 where it adds an alpha channel for a transparent colour.
    if image.mode.startswith("I"):
        return False
    return image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info


def _read(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the pixels of an image and its alpha channel, or None."""
    import numpy as np

    from factormix.data.readers.images import GREY_MODES, load_upright

    image = load_upright(path)
    if _has_alpha(image):
        image = image.convert("LA" if image.mode in GREY_MODES else "RGBA")
        both = np.asarray(image)
        return both[..., 0] if image.mode == "LA" else both[..., :-1], both[..., -1]
    if image.mode not in ("L", "RGB", "I", "I;16", "I;16B"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    pixels = np.asarray(image)
    if image.mode.startswith("I"):
        if pixels.min() < 0 or pixels.max() > np.iinfo(np.uint16).max:
            raise InputError(f"{path} has pixels beyond 16 bits; save it with 8 or 16 bits.")
        pixels = pixels.astype(np.uint16)
    return pixels, None


def _write(pixels: NDArray[Any], alpha: NDArray[Any] | None, path: Path) -> None:
    """Write an image atomically."""
    import numpy as np
    from PIL import Image

    from factormix.files import replacing

    if alpha is not None:
        pixels = np.dstack([pixels, alpha])
    with replacing(path) as temporary:
        Image.fromarray(pixels).save(temporary)
