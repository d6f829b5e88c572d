"""Show the values of defaults in the reference, where the source has names for them.

mkdocstrings calls it: ``n_components: int = N_COMPONENTS`` tells a reader nothing.
"""

from __future__ import annotations

from typing import Any

import griffe

from factormix import defaults


class Constants(griffe.Extension):
    """Put the value of each constant of ``factormix.defaults`` in place of its name."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        for parameter in func.parameters:
            name = str(parameter.default)
            if name.isupper() and hasattr(defaults, name):
                parameter.default = repr(getattr(defaults, name))
