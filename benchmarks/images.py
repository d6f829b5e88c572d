"""Train a density of CIFAR-10's images and count the bits of its test images.

    python benchmarks/images.py FOLDER                              # the default sizes, depth 0
    python benchmarks/images.py FOLDER --depth 2 --n-steps 2000
    python benchmarks/images.py FOLDER --n-kinds 64 --n-features 192 --n-neighbours 40

FOLDER has the official binary files (data_batch_1.bin to data_batch_5.bin and test_batch.bin).
Prints the curve of bits per dimension against processor seconds, the bits of test images and, for
comparison, of the same images as PNG files, and the seconds that 64 samples take. With
``--samples FILE.png`` the samples are kept. Options are chosen on training images only:
``--held-out 1000`` counts the bits of the last training images instead, which are then not learned.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import make_parser
from numpy.typing import NDArray
from PIL import Image

from factormix import ConvMFA
from factormix.training.callbacks import Progress

Images = NDArray[np.uint8]
SIZES = ("n_kinds", "n_scales", "n_features", "n_neighbours", "depth", "n_steps", "batch_size")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    for name in SIZES:
        default = getattr(ConvMFA(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--held-out", type=int, default=0, help="training images to test on")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--model", type=Path, help="keep the model here")
    parser.add_argument("--samples", type=Path, help="keep samples here, as .png")
    options = parser.parse_args(arguments)
    train = np.concatenate([read(options.folder / f"data_batch_{i}.bin") for i in range(1, 6)])
    if options.held_out:
        train, test = train[: -options.held_out], train[-options.held_out :]
    else:
        test = read(options.folder / "test_batch.bin")
    test = test[: options.test_images]

    started, curve = time.process_time(), list[tuple[int, float, float]]()

    def note(progress: Progress) -> None:
        if progress.recorded:
            spent, record = time.process_time() - started, progress.record
            curve.append((int(record["step"]), spent, record["bits_per_dim"]))

    sizes = {name: getattr(options, name) for name in SIZES}
    model = ConvMFA(**sizes, random_state=0, callbacks=[note]).fit(train)
    print("| step | processor seconds | bits/dim in training |\n|---|---|---|")
    for step, spent, bits in curve[:: max(1, len(curve) // 20)]:
        print(f"| {step:,} | {spent:.0f} | {bits:.4f} |")
    print(f"bits/dim of {len(test):,} images: {model.bits_per_dim(test):.4f}")
    print(f"as PNG files: {count_png_bits(test):.4f}")
    before = time.process_time()
    drawn = model.sample(64, size=test.shape[1:3])
    print(f"64 samples: {time.process_time() - before:.1f} processor seconds")
    if options.model:
        model.save(options.model, training_state=False)
    if options.samples:
        from factormix.views.plotting import save_image_grid

        save_image_grid(drawn.reshape(64, -1) / 255, options.samples, drawn.shape[1:])


def read(path: Path) -> Images:
    """Read a binary file of CIFAR-10: a label and three planes of 32 x 32 for each image."""
    records = np.fromfile(path, np.uint8).reshape(-1, 3073)
    return np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def count_png_bits(images: Images) -> float:
    """Return the bits per dimension of images as optimised PNG files."""
    total = 0
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png", optimize=True)
        total += len(file.getvalue())
    return 8 * total / images.size


if __name__ == "__main__":
    main()
