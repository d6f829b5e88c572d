"""The harness of the studies: trials, their results on disk, and tables of numbers.

A *trial* is a piece of work that stands alone: a name, settings, and a function that does it.
``run_trials`` runs the trials that have no result yet in processes of their own, a ``Store`` keeps
the results as files, and a ``Table`` is written as CSV and as Markdown.
"""

from factormix.studies.harness.processes import run_trials
from factormix.studies.harness.spreads import Spread, median, spread
from factormix.studies.harness.store import Result, Store, read_results
from factormix.studies.harness.tables import Cell, Table, folded
from factormix.studies.harness.trials import Outcome, Settings, Trial

__all__ = [
    "Cell",
    "Outcome",
    "Result",
    "Settings",
    "Spread",
    "Store",
    "Table",
    "Trial",
    "folded",
    "median",
    "read_results",
    "run_trials",
    "spread",
]
