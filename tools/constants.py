"""Show the values of defaults in the reference instead of the names of constants.

mkdocstrings calls this extension: ``n_components: int = N_COMPONENTS`` does not help a reader.
"""

from __future__ import annotations

from typing import Any

import griffe

from factormix import defaults


class Constants(griffe.Extension):
    """Replace the name of each constant of ``factormix.defaults`` by its value."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        for parameter in func.parameters:
            name = str(parameter.default)
            if name.isupper() and hasattr(defaults, name):
                parameter.default = repr(getattr(defaults, name))

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Do the same for the fields of dataclasses, of which signatures are made."""
        name = str(attr.value)
        if name.isupper() and hasattr(defaults, name):
            attr.value = repr(getattr(defaults, name))
