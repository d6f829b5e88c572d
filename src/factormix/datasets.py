"""The image sets of the experiments; they live in ``factormix.data.datasets``."""

from factormix.data.datasets import NAMES, Availability, Dataset, available, fetch, load

__all__ = ["NAMES", "Availability", "Dataset", "available", "fetch", "load"]
