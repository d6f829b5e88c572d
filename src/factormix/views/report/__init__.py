"""Reports: one self-contained HTML page, or the same as Markdown with its pictures beside it.

A report is built from top to bottom, block by block, and written whole. Text may hold a little
Markdown: paragraphs, lists, ``**bold**``, ``*italic*`` and code between backticks. Anything else is
shown as it stands: HTML has no effect.
"""

from factormix.views.report.blocks import Status, Table
from factormix.views.report.builder import Report
from factormix.views.report.markdown import markdown_fold, markdown_table
from factormix.views.report.packages import check_packages

__all__ = ["Report", "Status", "Table", "check_packages", "markdown_fold", "markdown_table"]
