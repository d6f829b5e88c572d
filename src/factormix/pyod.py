"""``MFAOD``: the outlier detector in PyOD's convention, in the extra ``pyod``."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from factormix.estimators.ensemble import Recipe
from factormix.estimators.explanation import Explanation
from factormix.estimators.outliers import MFAOutlierDetector

try:
    from pyod.models.base import BaseDetector
except ImportError as missing:
    raise ImportError('factormix.pyod needs PyOD: pip install "factormix[pyod]"') from missing

__all__ = ["MFAOD"]


class MFAOD(BaseDetector):
    """``MFAOutlierDetector`` in PyOD's convention: high scores are unusual, labels are 0 and 1.

    Parameters
    ----------
    contamination : float
        Share of outliers among the training rows, above 0 and up to 0.5; it sets the threshold.
    novelty : bool
        Whether the training rows are clean. If so, ``decision_scores_`` come from mixtures that
        have not seen the row.
    scoring : str
        The score of each mixture, as in ``MFAOutlierDetector``.
    recipe : Recipe or None
        The mixtures and the rows that each is trained on; None is the default of the mode.
    random_state : int, RandomState or None

    Attributes
    ----------
    decision_scores_ : array (n,)
    threshold_ : float
    labels_ : array (n,)
        As in all of PyOD's detectors.
    detector_ : MFAOutlierDetector

    Examples
    --------
    >>> import numpy as np
    >>> from factormix.pyod import MFAOD
    >>> X = np.random.default_rng(0).normal(size=(300, 3))
    >>> model = MFAOD(contamination=0.1, random_state=0).fit(X)
    >>> int(model.labels_.sum()), model.predict([[0, 9, 0]]).tolist()
    (30, [1])
    """

    def __init__(
        self,
        contamination: float = 0.1,
        *,
        novelty: bool = False,
        scoring: str = "log_likelihood",
        recipe: Recipe | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(contamination=contamination)
        self.novelty = novelty
        self.scoring = scoring
        self.recipe = recipe
        self.random_state = random_state

    def fit(self, X: Any, y: object = None) -> Self:
        """Learn usual rows from X (n, d)."""
        detector = MFAOutlierDetector(
            novelty=self.novelty,
            scoring=self.scoring,
            recipe=self.recipe,
            random_state=self.random_state,
        ).fit(X)
        self._set_n_classes(y)
        # Clean rows set the threshold by mixtures that have not seen them, like new rows.
        held_out = self.novelty and len(detector.held_out_scores_) == len(X)
        scores = detector.held_out_scores_ if held_out else detector.score_samples(X)
        self.detector_ = detector
        self.decision_scores_ = -np.asarray(scores, dtype=np.float64)
        self._process_decision_scores()
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Compute the score of each row of X (n, d), shape (n,): the higher, the less usual."""
        check_is_fitted(self, ["decision_scores_", "threshold_", "labels_"])
        return -np.asarray(self.detector_.score_samples(X), dtype=np.float64)

    def explain(self, X: Any) -> Explanation:
        """Explain by which features each row of X (n, d) is unusual, as the detector does.

        The contributions of a row sum to minus its decision function.
        """
        check_is_fitted(self, ["decision_scores_", "threshold_", "labels_"])
        return self.detector_.explain(X)
