"""Reports: one self-contained HTML page, or Markdown with its pictures beside it.

A report is built from top to bottom, block by block, and written whole. Text may hold a little
Markdown: paragraphs, lists, ``**bold**``, ``*italic*`` and code between backticks. All other text
is shown as it is: HTML has no effect.
"""

from factormix.views.report.marks import check_packages
from factormix.views.report.report import Report, Status, Table, markdown_fold, markdown_table

__all__ = ["Report", "Status", "Table", "check_packages", "markdown_fold", "markdown_table"]
