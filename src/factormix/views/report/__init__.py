"""Reports: one self-contained HTML page, or the same as Markdown with its pictures beside it.

A report is built from top to bottom, block by block, and written whole. Text is taken as plain
paragraphs with a little Markdown in it: ``**bold**``, ``*italic*``, code between backticks, and
lists of lines that begin with ``- ``. Anything else is shown as it stands: HTML has no effect.
"""

from factormix.views.report.blocks import Status
from factormix.views.report.builder import Report

__all__ = ["Report", "Status"]
