"""A local web page on which a trained mixture can be looked at, tried, and watched in training."""

from factormix.views.explorer.exhibition import Exhibition
from factormix.views.explorer.server import Server, check_packages, make_app

__all__ = ["Exhibition", "Server", "check_packages", "make_app"]
