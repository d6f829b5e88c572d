"""A local web page that shows a trained mixture, analyses rows, and follows a training run."""

from factormix.views.explorer.server import Server, check_packages
from factormix.views.explorer.session import Session

__all__ = ["Server", "Session", "check_packages"]
