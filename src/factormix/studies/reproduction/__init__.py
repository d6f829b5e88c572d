"""The paper's experiments, run again, and a verdict on each of its claims.

Each experiment is a module that plans its trials and runs one of them through the public
interface. ``reproduce`` runs the trials without a result, then writes tables, pictures and a report
from all results.
"""

from factormix.studies.reproduction.plan import FULL, QUICK, Scale
from factormix.studies.reproduction.runner import EXPERIMENTS, Outputs, reproduce
from factormix.studies.reproduction.table1 import threshold_auc

__all__ = [
    "EXPERIMENTS",
    "FULL",
    "QUICK",
    "Outputs",
    "Scale",
    "reproduce",
    "threshold_auc",
]
