"""Reports: one self-contained HTML page, or the same as Markdown with its pictures beside it.

A report is built from top to bottom, block by block, and written whole. Text may hold a little
Markdown: paragraphs, lists, ``**bold**``, ``*italic*`` and code between backticks. Anything else is
shown as it stands: HTML has no effect.
"""

from factormix.views.report.blocks import Status, Table, check_packages
from factormix.views.report.builder import Report
from factormix.views.report.render import markdown_fold, markdown_table

__all__ = ["Report", "Status", "Table", "check_packages", "markdown_fold", "markdown_table"]
