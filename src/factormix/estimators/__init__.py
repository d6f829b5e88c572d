"""The scikit-learn estimators, and the types that their methods return."""

from factormix.estimators.classifier import MFAClassifier
from factormix.estimators.conv import ConvMFA
from factormix.estimators.denoising import denoise, estimate_noise
from factormix.estimators.ensemble import CONTAMINATED, NOVELTY, Kind, Recipe
from factormix.estimators.explanation import Explanation
from factormix.estimators.imputation import Imputation
from factormix.estimators.imputer import MFAImputer
from factormix.estimators.mfa import MFA
from factormix.estimators.outliers import MFAOutlierDetector
from factormix.estimators.selection import Selection, SizeResult, select
from factormix.estimators.storage import load
from factormix.estimators.streaming import Scored, stream
from factormix.training.callbacks import Progress

__all__ = [
    "CONTAMINATED",
    "MFA",
    "NOVELTY",
    "ConvMFA",
    "Explanation",
    "Imputation",
    "Kind",
    "MFAClassifier",
    "MFAImputer",
    "MFAOutlierDetector",
    "Progress",
    "Recipe",
    "Scored",
    "Selection",
    "SizeResult",
    "denoise",
    "estimate_noise",
    "load",
    "select",
    "stream",
]
