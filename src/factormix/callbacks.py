"""What can watch a training run: see ``factormix.training.callbacks``."""

from factormix.training.callbacks import Checkpoint, EarlyStopping, Progress, ProgressBar
from factormix.training.snapshots import Checkpoints, checkpoints_in

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "EarlyStopping",
    "Progress",
    "ProgressBar",
    "checkpoints_in",
]
