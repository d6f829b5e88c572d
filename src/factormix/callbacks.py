"""What can watch a training run: see ``factormix.training.callbacks``."""

from factormix.training.callbacks import Checkpoint, EarlyStopping, Progress, ProgressBar

__all__ = ["Checkpoint", "EarlyStopping", "Progress", "ProgressBar"]
