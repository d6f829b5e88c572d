"""The outlier detector as one of PyOD's, in the extra ``pyod``."""

from factormix.estimators.pyod_adapter import MFAOD

__all__ = ["MFAOD"]
