"""The page of whole images: verdicts first, then the measurements and pictures of each part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import fold_description
from harness import Result, Store
from images_restoration import SHOWN
from images_trials import FORMATS, THUMBNAILS
from numpy.typing import NDArray
from pages import Cell, Page
from PIL import Image, ImageDraw

from factormix.files import make_folder, replacing
from factormix.views.plotting.drawing import COLOURS, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Result]
"""Finished trials by title."""

PUBLISHED = {
    "NICE": 4.48,
    "deep GMM": 4.00,
    "RealNVP": 3.49,
    "RIDE": 3.47,
    "Glow": 3.35,
    "PixelCNN": 3.14,
}
"""Bits per dimension on CIFAR-10: van den Oord et al. (2016), Kingma and Dhariwal (2018)."""
GOAL_BITS, STRETCH_BITS, GOAL_SECONDS = 3.40, 3.35, 7200
"""Bits per dimension within an hour of two cores."""
PUBLISHED_QUALITY = {
    15: {"BM3D": 31.07, "EPLL": 31.21, "WNNM": 31.37},
    25: {"BM3D": 28.57, "EPLL": 28.68, "WNNM": 28.83},
    50: {"BM3D": 25.62, "EPLL": 25.67, "WNNM": 25.87},
}
"""Decibels on all of BSD68: Zhang et al. (2017), table 2."""
LONGEST = 1.01
"""Length of codes relative to the stated bits."""
SET_NAMES = {
    "cifar10": "CIFAR-10",
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "olivetti": "Olivetti faces",
    "svhn": "SVHN",
    "bsds300": "BSDS300",
}
SHEETS = (
    *(f"ConvMFA, depth {depth}" for depth in (0, 1, 2, 4)),
    *(THUMBNAILS, "MFA", "training images"),
)
SHEET_NUMBERS, MOST_COLUMNS = 55_000, 16
"""Numbers in a sheet of samples of one method: files of six such sheets are below 300 KB."""
LINE = 16
"""Pixels of a line of text in a picture."""
FOLDER = "benchmarks"
JUDGED: Mapping[str, str] = {
    "olivetti": " The test images of Olivetti are faces of other people than the training images.",
    "bsds300": " Samples of BSDS300 are of models of whole photographs, and compared with random"
    " squares of 64 × 64 pixels.",
    "svhn": " Samples of SVHN are of models of the first 4,000 of its test images, and compared"
    " with 1,000 others.",
}
"""What samples of a set are compared with, where that needs a word."""
SEEN: Mapping[str, tuple[str, bool]] = {
    "cifar10": (
        "At depth 0, samples are textures and patches of colour in no order. At depth 2, many look"
        " like scenes, with a ground, a horizon and something in front of it, but no object can be"
        " named. With an MFA of the thumbnails, a shape stands in the middle of most. The MFA's are"
        " blurred blobs under grain.",
        True,
    ),
    "fashion-mnist": (
        "At depth 0, samples are pieces of cloth in no order. At depth 2, about half are garments"
        " or shoes, with parts missing. At depth 2 with an MFA of the thumbnails, nearly all are,"
        " with firm edges, where half of the MFA's are under grain.",
        True,
    ),
    "mnist": (
        "At depth 0, samples are strokes that end anywhere. At depth 2, about half are digits. At"
        " depth 2 with an MFA of the thumbnails, most are digits of clean strokes, where the MFA's"
        " are digits made of dots.",
        True,
    ),
    "svhn": (
        "At depths 0 and 1, samples are coloured strokes in no order. At depth 2, some have a"
        " stroke on a ground. With an MFA of the thumbnails, many show a blurred digit; the MFA's"
        " digits are clearer, under grain.",
        False,
    ),
    "bsds300": (
        "At depth 0, samples are of one swirling texture. At depth 2, they have smooth and rough"
        " areas, edges and something like horizons, but no objects. The MFA's are clouds under"
        " grain.",
        True,
    ),
    "olivetti": (
        "At depth 0, samples show fragments of faces in no order. At depth 2, brows and eyes are"
        " mostly in place, but few samples are faces: they are more coherent than at depth 0, and"
        " less than the MFA's, which are whole faces under grain. At depth 4, about half are faces,"
        " though distorted. At depth 2 with an MFA of the thumbnails, nearly all are faces, without"
        " the grain but with smears.",
        False,
    ),
}
"""How 64 samples of each method look, and whether depth 2 is more coherent than depth 0 and
sharper than an MFA."""

Verdict = tuple[str, str, bool | None]
"""A goal, the figures, and whether they meet it; None if that is not measured."""
UNKNOWN = "not measured yet"


def write_page(path: Path, results: Results, store: Store, description: Mapping[str, str]) -> Path:
    """Write the page and its pictures, with every part that has results."""
    page = Page("Whole images", "Densities of images by `ConvMFA`, and noise removed by mixtures.")
    page.text(
        "Everything here is made by `python benchmarks/images.py`, in one thread. Seconds are"
        " processor seconds. Each section says how many images were used; what was not run is"
        " not here."
    )
    verdicts = [v for judge in JUDGES for v in judge(results)]
    page.heading("Goals").table(
        ("goal", "found", "met"),
        [(goal, found, MARKS[met]) for goal, found, met in verdicts],
    )
    for add in (
        _add_bits,
        _add_coding,
        _add_photographs,
        _add_samples,
        _add_outliers,
        _add_denoising,
        _add_restoration,
    ):
        add(page, results, store, path.parent / FOLDER)
    page.text(fold_description(description))
    return page.write(path, FOLDER)


MARKS = {True: "yes", False: "**no**", None: "–"}


def select(results: Results, experiment: str) -> list[Result]:
    """Return the results of an experiment."""
    return [one for one in results.values() if one.trial.experiment == experiment]


# Verdicts


def judge_bits(results: Results) -> list[Verdict]:
    """Judge the bits per dimension of CIFAR-10."""
    goals = (
        f"CIFAR-10: at most {GOAL_BITS:.2f} bits per dimension within an hour of two cores",
        f"CIFAR-10: at most {STRETCH_BITS:.2f} bits per dimension (Glow)",
    )
    measured = _list_cifar_models(results)
    if not measured:
        return [(goal, UNKNOWN, None) for goal in goals]
    ours, model = measured[0]
    n, seconds = ours.values["n_images"], model["seconds"]
    found = f"{ours['bits']:.3f} on {n:,} test images after {seconds:.0f} s of one thread"
    in_time = seconds <= GOAL_SECONDS
    limits = (GOAL_BITS, STRETCH_BITS)
    return [
        (goal, found, ours["bits"] <= limit and in_time)
        for goal, limit in zip(goals, limits, strict=True)
    ]


def _list_cifar_models(results: Results) -> list[tuple[Result, Result]]:
    """Return bits and model of each ConvMFA of CIFAR-10, fewest bits first."""
    bits = [one for one in select(results, "bits") if one.trial.name.startswith("cifar10")]
    bits.sort(key=lambda one: float(one["bits"]))
    return [(one, results[f"models/{one.trial.name}"]) for one in bits]


def judge_coding(results: Results) -> list[Verdict]:
    """Judge the lengths of coded images."""
    goals = (
        "A coder driven by the model is lossless, within 1% of the stated bits",
        f"and shorter than {', '.join(FORMATS)}",
    )
    if "coding/cifar10" not in results:
        return [(goal, UNKNOWN, None) for goal in goals]
    one = results["coding/cifar10"]
    n, ratio = one.values["n_images"], one["coded"] / one["stated"]
    best = min(min(lengths.values()) for lengths in one["formats"].values())
    same = "identical" if one["identical"] else "different"
    found = f"{n} images of CIFAR-10, {same} after decoding, {100 * (ratio - 1):+.2f}%"
    lengths = one["coded"] / one["dims"], best / one["dims"]
    shorter = f"{lengths[0]:.2f} bits per dimension, {lengths[1]:.2f} the best of them"
    return [
        (goals[0], found, one["identical"] and ratio <= LONGEST),
        (f"and shorter than {', '.join(one['formats'])}", shorter, one["coded"] < best),
    ]


def judge_photographs(results: Results) -> list[Verdict]:
    """Compare the bits of photographs with those of the MCGSM with as many neighbours."""
    found = list[Verdict]()
    for one in select(results, "mcgsm"):
        n = one.trial.name
        if f"bits/photographs-{n}" in results:
            ours, theirs = results[f"bits/photographs-{n}"]["bits"], one["bits"]
            goal = f"BSDS300, grey: fewer bits per pixel than MCGSM, {n} neighbours"
            found.append((goal, f"{ours:.3f} and {theirs:.3f}", ours < theirs))
    return found or [("BSDS300, grey: fewer bits per pixel than MCGSM", UNKNOWN, None)]


def judge_samples(results: Results) -> list[Verdict]:
    """Return of which sets the samples are as they should be, to someone who looked at them."""
    goal = "Samples of depth 2 are more coherent than those of depth 0, and sharper than an MFA's"
    sets = {one["images"] for one in select(results, "samples")}
    seen = {SET_NAMES[name]: met for name, (_, met) in SEEN.items() if name in sets}
    if not seen:
        return [(goal, UNKNOWN, None)]
    groups = [(met, [name for name in seen if seen[name] == met]) for met in (True, False)]
    texts = [f"{'so' if met else 'not so'}: {', '.join(names)}" for met, names in groups if names]
    return [(goal, "; ".join(texts), all(seen.values()))]


def judge_denoising(results: Results) -> list[Verdict]:
    """Judge the means of qualities over images."""
    found = list[Verdict]()
    for (name, sigma), means in _average_denoising(results).items():
        n = int(means.pop("n"))
        where = f"{name}, sigma {sigma}"
        if "BM3D" in means:
            own, peer = means["own patches"], means["BM3D"]
            goal = f"{where}: without training data at least BM3D"
            found.append((goal, f"{own:.2f} and {peer:.2f} dB, {n} images", own >= peer))
        if (name, sigma) == ("BSD68", 25):
            goal = f"{where}: with a prior 28.83 dB (WNNM, all 68 images)"
            quality = means["with a prior"]
            published = PUBLISHED_QUALITY[25]
            # BM3D shows whether the images that were used are harder or easier than all 68.
            harder = means.get("BM3D", math.nan) - published["BM3D"]
            met = quality >= published["WNNM"] if n == 68 else quality - harder >= published["WNNM"]
            text = f"{quality:.2f} dB, {n} images"
            if n < 68:
                text += f", on which BM3D has {harder:+.2f} of what it has on all"
            found.append((goal, text, met))
    return found or [
        ("BSD68, sigma 25: with a prior 28.83 dB (WNNM)", UNKNOWN, None),
        ("BSD68 and Set12: without training data at least BM3D", UNKNOWN, None),
    ]


JUDGES: Sequence[Callable[[Results], list[Verdict]]] = (
    judge_bits,
    judge_coding,
    judge_photographs,
    judge_samples,
    judge_denoising,
)


# Sections


def _add_bits(page: Page, results: Results, store: Store, folder: Path) -> None:
    measured = _list_cifar_models(results)
    if not measured:
        return
    rows = [(name, bits, "published") for name, bits in PUBLISHED.items()]
    for ours, model in measured:
        about = f"{_name_sizes(model)}, trained here, {model['seconds']:.0f} s"
        rows.append(("**ConvMFA**", ours["bits"], about))
    if "models/cifar10-mfa" in results:
        mfa = results["models/cifar10-mfa"]
        about = f"K = {mfa['n_components']}, l = {mfa['n_factors']}, trained here,"
        rows.append(("MFA", mfa["bits"], f"{about} {mfa['seconds']:.0f} s"))
    rows.append(("PNG files", measured[0][0]["png"], "optimised"))
    rows.sort(key=lambda row: row[1])
    page.heading("Bits per dimension of CIFAR-10")
    page.figure(_draw_curves(measured), "Bits per dimension against minutes")
    page.text(
        "Curves have the batches of training before they are learned, averaged over the steps"
        " between two points; crosses have the test images. The rate falls in the second half."
        f" All figures are of all {measured[0][0].values['n_images']:,} test images, which nothing"
        " was chosen on."
    )
    page.table(
        ("density", "bits per dimension", ""),
        [(name, f"{bits:.3f}", text) for name, bits, text in rows],
    )
    if "models/cifar10-mfa" in results:
        page.text(
            "The MFA sees an image as a row of 3,072 numbers. Its density is of the levels plus"
            " uniform noise of one level, for training and test images: the bits are a bound, as"
            " those of NICE, RealNVP and Glow are. ConvMFA, RIDE and PixelCNN have"
            " probabilities of levels."
        )


@styled
def _draw_curves(measured: Sequence[tuple[Result, Result]]) -> Figure:
    figure = new_figure(6.4, 4.0)
    panel = figure.subplots()
    for colour, (ours, model) in zip(COLOURS, measured, strict=False):
        minutes = [seconds / 60 for _, seconds, _ in model["curve"]]
        bits = [b for *_, b in model["curve"]]
        panel.plot(minutes, bits, color=colour, label=f"ConvMFA, {_name_sizes(model)}")
        panel.plot(minutes[-1:], [ours["bits"]], "x", color=colour)
    above = math.inf
    for name, level in sorted(PUBLISHED.items(), key=lambda one: -one[1]):
        panel.axhline(level, color="0.7", linewidth=0.8, zorder=0)
        # Right of the panel; a name below a near one hangs from its line.
        side = "top" if above - level < 0.05 else "bottom"
        where = panel.get_yaxis_transform()
        panel.text(1.01, level, name, va=side, transform=where, fontsize=7, color="0.4")
        above = level
    panel.set(xlabel="minutes of one thread", ylabel="bits per dimension", ylim=(3.05, 4.6))
    panel.legend(loc="upper center")
    return figure


def _name_sizes(model: Result) -> str:
    """Return what sizes a model has, and its steps."""
    settings = model.trial.settings
    sizes = [
        f"{settings[name]} {name.removeprefix('n_')}"
        for name in ("n_kinds", "n_features", "n_neighbours")
        if name in settings
    ]
    return f"{', '.join(sizes) or 'default sizes'}, {settings['n_steps']:,} steps"


def _add_coding(page: Page, results: Results, store: Store, folder: Path) -> None:
    if "coding/cifar10" not in results:
        return
    one = results["coding/cifar10"]
    dims, n = one["dims"], one.values["n_images"]
    rows: list[tuple[Cell, ...]] = [
        ("stated by the model", f"{one['stated'] / dims:.3f}", None),
        ("coded by the model", f"**{one['coded'] / dims:.3f}**", None),
    ]
    for name, lengths in one["formats"].items():
        rows.append((name, f"{lengths['files'] / dims:.3f}", f"{lengths['mosaic'] / dims:.3f}"))
    page.heading("Images coded without loss").text(
        f"The first {n} test images of CIFAR-10 are coded by a range coder (package"
        " `constriction`), one string of 32-bit words for each image, with the model's probability"
        " of each level. Decoding gives "
        + ("the same images." if one["identical"] else "**different images**.")
        + f" Coding takes {one['encoding_seconds'] / n:.2f} s for an image and decoding"
        f" {one['decoding_seconds'] / n:.2f} s, {n} at a time. Files of the other formats have"
        " headers; one mosaic of all images nearly does without. The size of the model is not"
        " counted, and neither is that of the other decoders."
    )
    page.table(("", "bits per dimension, single images", "one mosaic"), rows)


def _add_photographs(page: Page, results: Results, store: Store, folder: Path) -> None:
    rows, n_images = list[tuple[Cell, ...]](), 0
    for one in select(results, "mcgsm"):
        n = one.trial.name
        n_images = one.values["n_images"]
        if f"bits/photographs-{n}" in results:
            ours, model = results[f"bits/photographs-{n}"], results[f"models/photographs-{n}"]
            times = f"{model['seconds']:.0f} s", f"{one['seconds']:.0f} s"
            bits = f"{ours['bits']:.3f}", f"{one['bits']:.3f}"
            rows.append((int(n), bits[0], times[0], bits[1], times[1]))
    if not rows:
        return
    page.heading("Photographs").text(
        f"Bits per pixel of {n_images} of the 100 test photographs of BSDS300 (every fifth), in"
        " grey, by models of its 200 training photographs, and by the mixture of conditional"
        " Gaussian scale mixtures (MCGSM; Theis, Hosseini and Bethge, 2012), trained here on the"
        " same photographs with as many kinds, scales, features, steps and random positions. The"
        " bits of both are of the mass of bins, with the outer ones open."
    )
    page.table(("neighbours", "ConvMFA", "training", "MCGSM", "training"), rows)
    page.text(
        "MCGSM is the case of the conditional mixture of [`ConvMFA`](conv.md#the-model) whose gates"
        " have no linear part ($v = 0$) and whose features enter by their squares, and whose"
        " noise is normal. Squares are the limit of large floors: $B \\log(z^2 + e)$ is"
        " $B \\log e + (B / e) z^2$ for $e \\gg z^2$. Its weights of features are"
        " $-\\beta_{mk}^2 \\exp(\\alpha_{ks}) / 2$, with the precision of the noise in them, where"
        " ours are free."
    )


def _add_samples(page: Page, results: Results, store: Store, folder: Path) -> None:
    found = select(results, "samples")
    if not found:
        return
    page.heading("Samples").text(
        "NDB is the share of bins of k-means whose frequencies differ between samples and test"
        " images at the 5% level (Richardson and Weiss, 2018); precision is the share of samples"
        " that are as near to a test image as its third neighbour, and recall the converse"
        " (Kynkäänniemi et al., 2019); all in the first 32 principal components of training images,"
        " with as many samples as test images. Training images themselves show what is possible."
        f" In *{THUMBNAILS}* the thumbnails, of a quarter of the size, follow an MFA (option"
        " `thumbnails`), for sets whose images have one size."
        + "".join(
            text for name, text in JUDGED.items() if any(one["images"] == name for one in found)
        )
    )
    rows = [
        (
            SET_NAMES[one["images"]],
            one["method"],
            *_describe_training(one, results),
            one.values["n_samples"],
            f"{one['ndb']:.2f}",
            f"{one['precision']:.2f}",
            f"{one['recall']:.2f}",
        )
        for one in found
    ]
    names = ("images", "method", "steps", "training", "samples", "NDB", "precision", "recall")
    page.table(names, rows)
    for name in dict.fromkeys(one["images"] for one in found):
        sheets = {
            one["method"]: store.arrays(one.trial)["images"]
            for one in found
            if one["images"] == name
        }
        shown = {method: sheets[method] for method in SHEETS if method in sheets}
        file, first = f"images-{name}.png", next(iter(shown.values()))[0]
        n = min(MOST_COLUMNS, SHEET_NUMBERS // first.size // 2)
        picture = stack_sheets({method: images[: 2 * n] for method, images in shown.items()}, n)
        save_picture(picture, folder / file)
        seen = f" {SEEN[name][0]}" if name in SEEN else ""
        page.text(
            f"**{SET_NAMES[name]}.**{seen}\n\n![Samples of {SET_NAMES[name]}]({FOLDER}/{file})"
        )


def _describe_training(one: Result, results: Results) -> tuple[Cell, Cell]:
    """Return steps and seconds of the ConvMFA that samples are of, None of other methods."""
    if "options" not in one.trial.settings:
        return None, None
    model = results[f"models/{one['model']}"]
    return f"{model.trial.settings['n_steps']:,}", f"{model['seconds']:.0f} s"


def stack_sheets(sheets: Mapping[str, NDArray[np.uint8]], columns: int) -> Image.Image:
    """Return one picture with the sheet of each method under its name."""
    rows = [lay_out(images, columns) for images in sheets.values()]
    size = max(row.width for row in rows), sum(row.height + LINE for row in rows)
    picture = Image.new(rows[0].mode, size, "white")
    pen, y = ImageDraw.Draw(picture), 0
    for name, row in zip(sheets, rows, strict=True):
        pen.text((0, y + 2), name, fill="black")
        picture.paste(row, (0, y + LINE))
        y += row.height + LINE
    return picture


def lay_out(images: NDArray[np.uint8], columns: int) -> Image.Image:
    """Return images (n, h, w[, 3]) side by side, with a gap of two pixels."""
    n, h, w = images.shape[:3]
    rows = math.ceil(n / columns)
    sheet = np.full((rows * (h + 2) - 2, columns * (w + 2) - 2, *images.shape[3:]), 255, np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * (h + 2), i % columns * (w + 2)
        sheet[y : y + h, x : x + w] = image
    return Image.fromarray(sheet)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG file and its folder."""
    make_folder(path.parent)
    with replacing(path) as temporary:
        picture.save(temporary, "PNG", optimize=True)


def _add_outliers(page: Page, results: Results, store: Store, folder: Path) -> None:
    found = select(results, "outliers")
    if not found:
        return
    names = [f"{SET_NAMES[one['images']]}, outliers {SET_NAMES[one['outliers']]}" for one in found]
    rows: list[tuple[Cell, ...]] = [
        (score, *(f"{one['auc'][score]:.3f}" for one in found)) for score in found[0]["auc"]
    ]
    for i, text in enumerate(("bits per dimension, known", "bits per dimension, outliers")):
        rows.append((text, *(f"{one['bits'][i]:.3f}" for one in found)))
    counts = f"{found[0].values['n_images']:,}"
    page.heading("Outliers").text(
        f"AUC of scores that should be greater for images of another set: {counts} test images of"
        f" each. The likelihood is minus the log-probability; *both tails* is its distance from the"
        " mean of training images; *relative to PNG* subtracts the length of the PNG file (Serrà et"
        " al., 2020). Of the surprise map, *most surprising block* is the greatest mean of 4 × 4"
        " pixels, and *shape* the Mahalanobis distance of its quantiles (5, 25, 50, 75, 95%) from"
        " those of 1,000 training images."
    )
    page.table(("score", *names), rows)
    page.text(
        "As with other models of pixels, the likelihood alone fails where outliers are simpler"
        " images than those that were learned."
    )


def _average_denoising(results: Results) -> dict[tuple[str, int], dict[str, float]]:
    """Return mean qualities of methods, and the number of images n, by set and noise."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for one in _leave_shown_out(select(results, "denoising")):
        groups.setdefault((one["images"], one["sigma"]), []).append(one)
    found = dict[tuple[str, int], dict[str, float]]()
    for key in sorted(groups):
        every = groups[key]
        methods = [m for m in every[0]["methods"] if all(m in one.values for one in every)]
        means = {m: statistics.fmean(one[m]["quality"] for one in every) for m in methods}
        found[key] = {**means, "n": len(every)}
    return found


def _add_denoising(page: Page, results: Results, store: Store, folder: Path) -> None:
    averages = _average_denoising(results)
    if not averages:
        return
    methods = ("own patches", "noise estimated", "with a prior", "BM3D")
    rows = list[tuple[Cell, ...]]()
    for (name, sigma), means in averages.items():
        best = max(means.get(m, 0.0) for m in methods)
        cells = [_mark_best(means[m], best) if m in means else None for m in methods]
        rows.append((name, int(means["n"]), sigma, *cells))
    every = [one for one in select(results, "denoising") if one["images"] == "BSD68"]
    times = list[Cell]()
    for m in methods:
        known = [one[m]["seconds"] for one in every if m in one.values]
        times.append(f"{statistics.median(known):.1f}" if known else None)
    rows.append(("BSD68, seconds per image", None, None, *times))
    differences = [
        f"{name}, sigma {sigma}: {_compare_with_bm3d(results, name, sigma)}"
        for (name, sigma), means in averages.items()
        if "BM3D" in means
    ]
    published = "; ".join(
        f"sigma {sigma}: " + ", ".join(f"{name} {quality:.2f}" for name, quality in row.items())
        for sigma, row in PUBLISHED_QUALITY.items()
    )
    page.heading("Noise removed").text(
        "Mean decibels over images with Gaussian noise; BM3D is the package `bm3d`, on the same"
        " noisy images. The sizes of the mixture of an image's own patches were chosen on the first"
        " and eleventh photographs of BSD68, all else on BSDS300's training photographs. The prior"
        " is a mixture of the patches of these. Published on all 68 photographs of BSD68 (Zhang et"
        f" al., 2017): {published}."
    )
    page.table(("images", "number", "sigma", *methods), rows)
    page.text(
        "Decibels above BM3D, with the standard error over images. "
        + " ".join(f"{text}." for text in differences)
    )
    _add_strip(page, results, store, folder, "denoising/shown")


def _compare_with_bm3d(results: Results, images: str, sigma: int) -> str:
    """Return by how much own patches and a prior are above BM3D, with standard errors."""
    every = [
        one
        for one in _leave_shown_out(select(results, "denoising"))
        if (one["images"], one["sigma"]) == (images, sigma)
    ]
    found = list[str]()
    for method in ("own patches", "with a prior"):
        above = [one[method]["quality"] - one["BM3D"]["quality"] for one in every]
        error = statistics.stdev(above) / math.sqrt(len(above)) if len(above) > 1 else math.nan
        found.append(f"{method} {statistics.fmean(above):+.2f} ± {error:.2f}")
    return ", ".join(found)


def _add_restoration(page: Page, results: Results, store: Store, folder: Path) -> None:
    filled, enlarged = (
        _leave_shown_out(select(results, name)) for name in ("inpainting", "upsampling")
    )
    if filled:
        rows = list[tuple[Cell, ...]]()
        for mask, text in (("random", "half of the pixels, at random"), ("text", "under text")):
            rows += [(text, *row) for row in _average([r for r in filled if r["mask"] == mask])]
        side = filled[0]["side"]
        page.heading("Missing pixels filled").text(
            f"The middle {side} × {side} pixels of photographs of Set12, of which some are missing;"
            " decibels over all pixels. ConvMFA (12 neighbours, trained on BSDS300) takes the mean"
            f" of 16 chains of {filled[0]['n_sweeps']} sweeps; *biharmonic* is that of"
            " scikit-image, *cubic* a piecewise cubic surface."
        )
        page.table(("missing", "method", "images", "dB", "seconds per image"), rows)
        _add_strip(page, results, store, folder, "inpainting/text-shown")
    if enlarged:
        page.heading("Images enlarged").text(
            "The middle 256 × 256 pixels of photographs of Set12, halved by means of 2 × 2 pixels"
            " and enlarged again. ConvMFA has depth 1 and was trained on BSDS300; its result is the"
            " mean of 16 draws."
            " Back-projection (Irani and Peleg, 1991) corrects bicubic interpolation until the"
            " means of blocks are right."
        )
        page.table(("method", "images", "dB", "seconds per image"), _average(enlarged))
        _add_strip(page, results, store, folder, "upsampling/shown")


def _average(results: Sequence[Result]) -> list[tuple[Cell, ...]]:
    """Return a row for each method: images, mean quality, median seconds."""
    if not results:
        return []
    methods = [m for m, found in results[0].values.items() if isinstance(found, dict)]
    means = {m: statistics.fmean(one[m]["quality"] for one in results) for m in methods}
    return [
        (
            m,
            len(results),
            _mark_best(mean, max(means.values())),
            f"{statistics.median(one[m]['seconds'] for one in results):.1f}",
        )
        for m, mean in means.items()
    ]


def _mark_best(value: float, best: float) -> str:
    """Format decibels, the best in bold."""
    return f"**{value:.2f}**" if value == best else f"{value:.2f}"


def _leave_shown_out(results: Sequence[Result]) -> list[Result]:
    """Return the results that count; one more photograph is only shown."""
    return [one for one in results if one["images"] != SHOWN]


def _add_strip(page: Page, results: Results, store: Store, folder: Path, title: str) -> None:
    """Show the original, what was given and the result of every method side by side."""
    if title not in results:
        return
    arrays, methods = store.arrays(results[title].trial), results[title].values
    names = [
        *(name for name in arrays if name not in methods),
        *(m for m in methods if m in arrays),
    ]
    names.sort(key=lambda name: name != "original")
    images: list[Any] = [arrays[name][:128, :128] for name in names]
    file = f"images-{title.split('/')[0]}.png"
    save_picture(lay_out(np.stack(images), len(images)), folder / file)
    page.text(
        f"![{', '.join(names)}]({FOLDER}/{file})\n\n*From left to right: {', '.join(names)}.*"
    )
