"""Callbacks of a training run; they live in ``factormix.training.callbacks``."""

from factormix.training.callbacks import (
    Checkpoint,
    EarlyStopping,
    JSONLines,
    Progress,
    ProgressBar,
    TensorBoard,
)
from factormix.training.checkpoints import Checkpoints, checkpoints_in

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "EarlyStopping",
    "JSONLines",
    "Progress",
    "ProgressBar",
    "TensorBoard",
    "checkpoints_in",
]
