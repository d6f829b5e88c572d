"""A local web page on which a trained mixture can be looked at, tried, and watched in training."""

from factormix.views.explorer.app import make_app
from factormix.views.explorer.exhibition import Exhibition
from factormix.views.explorer.packages import check_packages
from factormix.views.explorer.server import Server

__all__ = ["Exhibition", "Server", "check_packages", "make_app"]
