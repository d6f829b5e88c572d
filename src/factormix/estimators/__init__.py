"""The scikit-learn faces of a mixture, their checks, and models on disk."""

from factormix.estimators.mfa import MFA, Progress
from factormix.estimators.models import load

__all__ = ["MFA", "Progress", "load"]
