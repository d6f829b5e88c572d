"""The scikit-learn faces of a mixture, their checks, and models on disk."""

from factormix.estimators.classifier import MFAClassifier
from factormix.estimators.explanation import Explanation
from factormix.estimators.imputer import MFAImputer
from factormix.estimators.mfa import MFA, Progress
from factormix.estimators.outliers import MFAOutlierDetector
from factormix.estimators.selection import Selection, select
from factormix.estimators.storage import load
from factormix.estimators.streaming import Scored, stream

__all__ = [
    "MFA",
    "Explanation",
    "MFAClassifier",
    "MFAImputer",
    "MFAOutlierDetector",
    "Progress",
    "Scored",
    "Selection",
    "load",
    "select",
    "stream",
]
