"""Checks of class labels, priors and what is rejected."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import assert_all_finite, column_or_1d
from torch import Tensor

from factormix.data.values import real_array
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.estimators.classifier import MFAClassifier

__all__ = [
    "check_priors",
    "check_reject",
    "class_numbers",
    "common_type",
    "first_classes",
    "reject_label_for",
    "seen_labels",
]

Labels = NDArray[Any]
Numbers = NDArray[np.intp]
REJECTED = "rejected"
REJECT_BY = ("margin", "ratio", "density")


def seen_labels(y: Any, n_rows: int) -> Labels:
    """Return the labels (n,) of as many rows."""
    # What other estimators do not need is not loaded with them.
    from sklearn.utils.multiclass import check_classification_targets

    if y is None:
        raise InputError(
            "MFAClassifier requires y to be passed, but the target y is None: give a label for each"
            " row."
        )
    labels = column_or_1d(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, warn=True)
    assert_all_finite(labels, input_name="y")
    check_classification_targets(labels)
    if len(labels) != n_rows:
        raise InputError(
            f"y has {len(labels)} labels and X has {n_rows} rows: give one label for each row."
        )
    return np.asarray(labels)


def first_classes(classes: Any) -> Labels:
    """Return the classes that a stream will have, in order."""
    if classes is None:
        raise InputError(
            "classes must be passed on the first call to partial_fit: give all labels that will"
            " come."
        )
    return np.unique(np.asarray(classes))


def class_numbers(labels: Labels, classes: Labels) -> Numbers:
    """Return the place of each label (n,) among the classes, which are in order."""
    numbers = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    unknown = np.asarray(labels[classes[numbers] != labels])
    if len(unknown):
        raise InputError(
            f"y has the label {unknown.tolist()[0]!r}, which is not among the classes: name all of"
            " them in the first call of partial_fit."
        )
    return np.asarray(numbers, dtype=np.intp)


def check_priors(priors: Any, classes: Labels, masses: NDArray[Any]) -> NDArray[np.float64]:
    """Return the probabilities of the classes: those given, or their shares of the rows."""
    if priors is None:
        return np.asarray(masses / masses.sum(), dtype=np.float64)
    given = np.asarray(real_array(priors, "priors"), dtype=np.float64)
    if given.shape != classes.shape or not (given >= 0).all():
        raise InputError(
            f"priors must be {len(classes)} numbers of 0 or more, one for each class in the order"
            f" of classes_ ({', '.join(map(str, classes[:5]))}{', ...' * (len(classes) > 5)})."
        )
    if not math.isclose(given.sum(), 1, abs_tol=1e-6):
        raise InputError(f"priors must sum to 1, not {given.sum():.6g}: divide by their sum.")
    return given


def check_reject(model: MFAClassifier, classes: Labels | None) -> None:
    """Check what is rejected and how that is told, as far as classes are known."""
    share: Any = model.reject
    number = isinstance(share, numbers.Real) and not isinstance(share, bool)
    if not number or not 0 <= share < 1:
        raise InputError(f"reject must be a share from 0 to below 1, not {share!r}.")
    if model.reject_by not in REJECT_BY:
        raise InputError(
            f"reject_by must be one of {', '.join(REJECT_BY)}, not {model.reject_by!r}."
        )
    if share and classes is not None:
        label = reject_label_for(model, classes)
        if np.isin(np.asarray(label, dtype=object), classes.astype(object)):
            raise InputError(
                f"reject_label={label!r} is one of the classes: name another for rejected rows."
            )


def common_type(labels: Labels, other: Labels) -> np.dtype[Any]:
    """Return a type that holds both as they are: numbers stay numbers, and booleans booleans."""
    kinds = {"biuf".find(one.dtype.kind) for one in (labels, other)}
    alike = kinds <= {1, 2, 3} or labels.dtype.kind == other.dtype.kind
    return np.result_type(labels, other) if alike else np.dtype(object)


def reject_label_for(model: MFAClassifier, classes: Labels) -> Any:
    """Return what ``predict`` gives for rejected rows."""
    if model.reject_label is not None:
        return model.reject_label
    return -1 if classes.dtype.kind in "biuf" else REJECTED
