"""What can watch a training run: see ``factormix.training.callbacks``."""

from factormix.training.callbacks import Checkpoint, EarlyStopping, Progress, ProgressBar
from factormix.training.loggers import JSONLines, TensorBoard
from factormix.training.snapshots import Checkpoints, checkpoints_in

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
