"""The mixture as an anomaly detector of river, in the extra ``river``."""

from factormix.estimators.river_adapter import MFAAnomaly

__all__ = ["MFAAnomaly"]
