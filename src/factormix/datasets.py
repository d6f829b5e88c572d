"""The image sets of the experiments: see ``factormix.data.datasets``."""

from factormix.data.datasets import NAMES, Availability, Dataset, available, fetch, load

__all__ = ["NAMES", "Availability", "Dataset", "available", "fetch", "load"]
