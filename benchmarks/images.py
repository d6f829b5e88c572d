"""Measure densities of whole images: bits, codes, samples, outliers, and restored photographs.

    FACTORMIX_DATA=folder python benchmarks/images.py --write-docs   # hours of one thread
    python benchmarks/images.py --parts coding,outliers              # some parts
    python benchmarks/images.py --parts denoising --every 4          # every fourth photograph
    python benchmarks/images.py --no-run --write-docs                # the page, of what is there
    python benchmarks/images.py --quick                              # a try, without any data

Every model and every measurement is a trial with its own result file, so a benchmark that was
interrupted continues where it stopped. FACTORMIX_DATA has cifar10 (the official binary files),
mnist, fashion-mnist, olivetti, svhn, bsds300 (train and test) and denoising (BSD68 and Set12). The
peers are in benchmarks/requirements.txt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import DOCS, describe_machine, make_parser, parse_options, print_trial
from harness import Outcome, Settings, Store, Trial, read_results, run_trials
from images_page import write_page
from images_restoration import (
    SHOWN,
    SWEEPS,
    run_denoising,
    run_inpainting,
    run_prior,
    run_upsampling,
)
from images_trials import (
    THUMBNAILS,
    run_bits,
    run_coding,
    run_mcgsm,
    run_mfa_bits,
    run_outliers,
    run_samples,
    run_training,
)

from factormix.defaults import IMAGE_BATCH, IMAGE_RATE

PARTS = ("bits", "coding", "photographs", "samples", "outliers", "restoration", "denoising")
SETS = ("cifar10", "olivetti", "fashion-mnist", "mnist", "bsds300", "svhn")
DEPTHS = (0, 1, 2)
NEIGHBOURS = (12, 24)
SIGMAS = (25, 15, 50)
"""Standard deviations of the noise; the one with goals first."""
N_PHOTOGRAPHS = {"Set12": 12, "BSD68": 68}
N_RESTORED = 6
"""Photographs of Set12 that are filled and enlarged."""
FILLED_SIDE = 64
"""Side of the middle of a photograph that is filled: sweeps cost seconds per thousand pixels."""

MIDDLE_SIDE = 256
"""Side of the middle of a photograph that is enlarged or shown: the least side of Set12."""
QUICK_SIDE = 16

STEPS: Mapping[str, Mapping[int, int]] = {
    "cifar10": {1: 600, 2: 1000},
    "olivetti": {0: 3000, 1: 1000, 2: 1500, 4: 750},
    "fashion-mnist": {0: 3000, 1: 600, 2: 600},
    "mnist": {0: 1500, 1: 600, 2: 600},
    "svhn": {0: 600, 1: 300, 2: 400},
}
"""Steps at each depth: one of depth 1 takes four times as long as one of depth 0, one of depth 2
seven times, and one of depth 4 thirteen times."""
MIXTURES: Mapping[str, Mapping[str, int]] = {
    "cifar10": {"n_components": 64, "n_factors": 32, "max_epochs": 1},
    "mnist": {"n_components": 100, "n_factors": 16, "max_epochs": 3},
    "fashion-mnist": {"n_components": 100, "n_factors": 16, "max_epochs": 3},
    "olivetti": {"n_components": 5, "n_factors": 40, "max_epochs": 100},
    "bsds300": {"n_components": 20, "n_factors": 32, "max_epochs": 5},
    "svhn": {"n_components": 20, "n_factors": 32, "max_epochs": 5},
}
"""Options of the MFA of each set."""
THUMBNAIL_SIZES: Mapping[str, tuple[int, int]] = {
    **{name: (MIXTURES[name]["n_components"], MIXTURES[name]["n_factors"]) for name in STEPS},
    # Colours of neighbours agree if nearly all numbers have factors: thumbnails of other images of
    # SVHN have -714 nats with (20, 32), -604 with (20, 96), -578 with (5, 150).
    "cifar10": (20, 150),
    "svhn": (5, 150),
    # Components of 60 faces each would be fitted to chance.
    "olivetti": (1, 40),
}
"""Components and factors of the mixture of thumbnails of each set whose images have one size."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    # Ten minutes of training, where the goal allows an hour of two cores.
    "cifar10-0": {
        "depth": 0,
        "n_kinds": 48,
        "n_features": 192,
        "n_neighbours": 40,
        "n_steps": 14_000,
    },
    # The default sizes, for codes, outliers and samples.
    "cifar10-default-0": {"n_steps": 6000},
    **{
        f"{name}-{depth}": {"depth": depth, "n_steps": steps[depth]}
        for name, steps in STEPS.items()
        for depth in steps
    },
    **{
        f"{name}-thumbnails": {"depth": 2, "n_steps": STEPS[name][2], "thumbnails": sizes}
        for name, sizes in THUMBNAIL_SIZES.items()
    },
    **{f"photographs-{n}": {"n_neighbours": n, "n_steps": 2500} for n in NEIGHBOURS},
    "photographs-enlarged": {"depth": 1, "n_steps": 800},
    "photographs-scenes": {"depth": 2, "n_steps": 800},
}
"""Options of ConvMFA that are not its defaults."""
QUICK_SIZES = {"n_kinds": 2, "n_features": 4, "n_neighbours": 4, "n_steps": 10, "batch_size": 100}
PEERS = ("bm3d", "constriction", "pillow", "pillow-jxl-plugin", "scikit-image")
QUICK_MIXTURE = {"n_components": 2, "n_factors": 2, "max_epochs": 2}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "images")
    for part in options.parts if not options.no_run else ():
        for trials in plan(part, options):
            run(trials, store, options)
    trials = [trial for part in PARTS for group in plan(part, options) for trial in group]
    results = {one.trial.title: one for one in read_results(trials, store)}
    description = describe_machine(1, options.jobs, packages=("factormix", "torch", *PEERS))
    description["command"] = f"`python benchmarks/images.py --every {options.every}`"
    folder = DOCS if options.write_docs else options.output
    write_page(folder / "benchmarks-images.md", results, store, description)
    print(f"The page has the results of {len(results)} of {len(trials)} trials.")


def run(trials: Sequence[Trial], store: Store, options: argparse.Namespace) -> None:
    """Run the trials without a result; small ones in this process, which is quicker to start."""
    folder = str(store.folder)
    if not options.quick:
        run_trials(trials, store, folder, options.jobs, on_finish=print_trial)
        return
    for trial in trials:
        if store.read(trial) is None:
            store.write(trial, trial.run(trial.settings, folder))
            print_trial(trial, None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-images.md")
    parser.add_argument("--parts", type=lambda t: t.split(","), default=PARTS)
    parser.add_argument("--every", type=int, default=1, help="denoise every n-th image of BSD68")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    options = parse_options(parser, arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"{part} is not one of {', '.join(PARTS)}")
    return options


def plan(part: str, options: argparse.Namespace) -> list[list[Trial]]:
    """List the trials of a part: its models, and then what needs them."""
    quick = options.quick

    def train(name: str) -> Trial:
        sizes = dict(QUICK_SIZES if quick else MODELS[name])
        if quick:
            sizes["depth"] = MODELS[name].get("depth", 0)
            if "thumbnails" in MODELS[name]:
                sizes["thumbnails"] = (2, 2)
        images = name.rsplit("-", 1)[0].removesuffix("-default")
        images = "bsds300/train" if name.startswith("photographs") else images
        return make("models", name, {"images": images, **sizes}, run_training)

    def make(
        experiment: str,
        name: str,
        settings: Settings,
        run: Callable[[Settings, str | None], Outcome],
    ) -> Trial:
        return Trial(experiment, name, {**settings, "quick": quick}, run)

    def use(name: str) -> dict[str, Any]:
        # A result belongs to a model with these options.
        return {"model": name, "options": dict(train(name).settings)}

    cifar = {"images": "cifar10"}
    if part == "bits":
        names = ("cifar10-default-0", "cifar10-0")
        bits = [
            make("bits", name, {**cifar, **use(name), "n_images": 10_000}, run_bits)
            for name in names
        ]
        return [[train(name) for name in names], [*bits, _plan_mixture(make, quick)]]
    if part == "coding":
        settings = {**cifar, **use("cifar10-default-0"), "n_images": 4 if quick else 100}
        return [[train("cifar10-default-0")], [make("coding", "cifar10", settings, run_coding)]]
    if part == "photographs":
        return _plan_photographs(train, use, make, quick)
    if part == "samples":
        return _plan_samples(train, use, make, quick)
    if part == "outliers":
        trials = [
            make(
                "outliers",
                f"{known}-{other}",
                {
                    **use(model),
                    "images": known,
                    "outliers": other,
                    # Of SVHN, one part of the test images stands for all images.
                    "outliers_split": "train" if other == "svhn" else "test",
                    "n_images": 50 if quick else 2000,
                    "n_train": 50 if quick else 1000,
                },
                run_outliers,
            )
            for known, other, model in (
                ("fashion-mnist", "mnist", "fashion-mnist-0"),
                ("cifar10", "svhn", "cifar10-default-0"),
            )
        ]
        return [[train("fashion-mnist-0"), train("cifar10-default-0")], trials]
    if part == "restoration":
        return _plan_restoration(train, use, make, quick)
    return _plan_denoising(make, quick, options.every)


Make = Callable[[str, str, Settings, Callable[[Settings, str | None], Outcome]], Trial]
Train = Callable[[str], Trial]
Use = Callable[[str], dict[str, Any]]


def _mixture(name: str, quick: bool) -> Mapping[str, int]:
    return QUICK_MIXTURE if quick else MIXTURES[name]


def _plan_mixture(make: Make, quick: bool) -> Trial:
    """Return the MFA of CIFAR-10, which has bits and samples."""
    settings = {"images": "cifar10", **_mixture("cifar10", quick), "n_images": 10_000}
    return make("models", "cifar10-mfa", settings, run_mfa_bits)


def _plan_photographs(train: Train, use: Use, make: Make, quick: bool) -> list[list[Trial]]:
    """List the models of photographs and the MCGSMs, fewest neighbours first."""
    judged = {"images": "bsds300/test", "every": 5}
    sizes = {"n_kinds": 32, "n_scales": 3, "n_features": 96, "n_steps": 2500}
    shared = {"batch_size": IMAGE_BATCH, "learning_rate": IMAGE_RATE}
    groups = list[list[Trial]]()
    for n in NEIGHBOURS[:1] if quick else NEIGHBOURS:
        name = f"photographs-{n}"
        options = {**sizes, "n_neighbours": n, **(QUICK_SIZES if quick else {})}
        groups += [
            [train(name)],
            [
                make("bits", name, {**judged, **use(name)}, run_bits),
                make("mcgsm", str(n), {**judged, **shared, **options}, run_mcgsm),
            ],
        ]
    return groups


def _plan_samples(train: Train, use: Use, make: Make, quick: bool) -> list[list[Trial]]:
    """List what samples each set: a model of each depth, an MFA, a Gaussian, training images."""
    groups = list[list[Trial]]()
    for name in SETS[:1] if quick else SETS:
        models = {depth: f"{name}-{depth}" for depth in DEPTHS}
        if name == "cifar10":
            models[0] = "cifar10-default-0"
        if name == "olivetti":
            models[4] = "olivetti-4"
        if name == "bsds300":
            names = ["photographs-24", "photographs-enlarged", "photographs-scenes"]
            models = dict(enumerate(names))
        n_bins = 5 if quick or name == "olivetti" else 50
        shared = {"images": name, "n_samples": 20 if quick else 1000, "n_bins": n_bins}
        options: dict[str, Mapping[str, Any]] = {
            **{f"ConvMFA, depth {depth}": use(model) for depth, model in models.items()},
            **({THUMBNAILS: use(f"{name}-thumbnails")} if name in THUMBNAIL_SIZES else {}),
            "MFA": {"model": "cifar10-mfa"} if name == "cifar10" else _mixture(name, quick),
            "Gaussian": {},
            "training images": {},
        }
        trained = [train(option["model"]) for option in options.values() if "options" in option]
        trained += [_plan_mixture(make, quick)] * (name == "cifar10")
        trials = [
            make(
                "samples",
                f"{name}-{method.replace(',', '').replace(' ', '-').lower()}",
                {**shared, **options[method], "method": method},
                run_samples,
            )
            for method in options
        ]
        groups += [trained, trials]
    return groups


def _plan_restoration(train: Train, use: Use, make: Make, quick: bool) -> list[list[Trial]]:
    """List the photographs that are filled and enlarged: one for pictures, then some of Set12."""
    photographs = [("shown", SHOWN, 0)]
    photographs += [(str(i), "Set12", i) for i in range(1 if quick else N_RESTORED)]
    filled = [
        make(
            "inpainting",
            f"{mask}-{name}",
            {
                **use("photographs-12"),
                "images": images,
                "index": index,
                "mask": mask,
                "side": QUICK_SIDE if quick else FILLED_SIDE,
                "n_sweeps": 2 if quick else SWEEPS,
            },
            run_inpainting,
        )
        for name, images, index in photographs
        for mask in ("random", "text")
    ]
    enlarged = [
        make(
            "upsampling",
            name,
            {
                **use("photographs-enlarged"),
                "images": images,
                "index": index,
                "side": QUICK_SIDE if quick else MIDDLE_SIDE,
            },
            run_upsampling,
        )
        for name, images, index in photographs
    ]
    return [[train("photographs-enlarged")], enlarged, [train("photographs-12")], filled]


def _plan_denoising(make: Make, quick: bool, every: int) -> list[list[Trial]]:
    """List the photographs whose noise is removed, one level of noise after the other."""
    sizes = {"n_kinds": 100, "n_scales": 9, "n_factors": 62, "n_patches": 3000}
    if quick:
        sizes = {"n_kinds": 1, "n_scales": 2, "n_factors": 8, "n_patches": 100}
    prior = make("models", "prior", sizes, run_prior)
    shared = {"model": "prior", "options": sizes}
    methods = ["own patches", "with a prior", "BM3D"]
    shown = {
        **{"images": SHOWN, "index": 0, "sigma": SIGMAS[0], "methods": methods},
        "side": QUICK_SIDE if quick else MIDDLE_SIDE,
    }
    trials = [make("denoising", "shown", {**shared, **shown}, run_denoising)]
    for sigma in SIGMAS[:1] if quick else SIGMAS:
        # The noise is estimated at the level with goals.
        more = ["noise estimated"] if sigma == SIGMAS[0] else []
        for name, n in N_PHOTOGRAPHS.items():
            for index in range(0, 1 if quick else n, every if name == "BSD68" else 1):
                one = {"images": name, "index": index, "sigma": sigma, "methods": [*methods, *more]}
                title = f"{name}-{sigma}-{index}"
                trials.append(make("denoising", title, {**shared, **one}, run_denoising))
    return [[prior], trials]


if __name__ == "__main__":
    main()
