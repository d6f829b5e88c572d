"""The paper's experiments: what was done, run again, and what became of each claim.

Each experiment is a module that lists its trials, trainings that stand alone, and says how one of
them is run through the public interface. ``reproduce`` runs the trials that have no result yet
and then writes tables, pictures and a report from all results.
"""

from factormix.studies.reproduction.plan import FULL, QUICK, Scale, threshold_auc
from factormix.studies.reproduction.reproduction import EXPERIMENTS, Outputs, reproduce

__all__ = [
    "EXPERIMENTS",
    "FULL",
    "QUICK",
    "Outputs",
    "Scale",
    "reproduce",
    "threshold_auc",
]
