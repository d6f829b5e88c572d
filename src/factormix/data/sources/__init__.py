"""Rows of numbers, in memory, in a file or in a stream, read in order or shuffled.

Everything that trains or scores takes its batches from a source. `as_rows` makes one of what a
caller has; `factormix.data.readers.read_rows` makes one of what lies on disk.
"""

from typing import TypeAlias

from factormix.data.batches import Weights
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.checks import (
    check_finite,
    check_observed,
    checked_blocks,
    checked_rows,
    never_observed,
    observed_rows,
)
from factormix.data.sources.features import Features, features_of, in_order, rows_at
from factormix.data.sources.files import FileRows
from factormix.data.sources.intake import as_rows, as_source, count_used, weighted
from factormix.data.sources.loaders import loaded_tables
from factormix.data.sources.pieces import Fill, Piece, PiecedRows
from factormix.data.sources.protocol import Rows, Source, WeightableRows
from factormix.data.sources.shares import Share
from factormix.data.sources.streams import OnBad, Peeked, Stream

TableRows: TypeAlias = ArrayRows | FileRows | PiecedRows
"""Rows that a reader makes of files."""

__all__ = [
    "ArrayRows",
    "Features",
    "FileRows",
    "Fill",
    "OnBad",
    "Peeked",
    "Piece",
    "PiecedRows",
    "Rows",
    "Share",
    "Source",
    "Stream",
    "TableRows",
    "WeightableRows",
    "Weights",
    "as_rows",
    "as_source",
    "check_finite",
    "check_observed",
    "checked_blocks",
    "checked_rows",
    "count_used",
    "features_of",
    "in_order",
    "loaded_tables",
    "never_observed",
    "observed_rows",
    "rows_at",
    "weighted",
]
