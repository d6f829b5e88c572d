"""How an estimator looks in a notebook."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn import get_config

from factormix.notebook import mixture_html

__all__ = ["DisplayedMixture"]


class DisplayedMixture:
    """Show a trained mixture as pictures of its components, above scikit-learn's own view.

    scikit-learn's ``set_config(display="text")`` holds here too.
    """

    def _repr_html_inner(self) -> str:
        """Return HTML for whoever asks for ``_repr_html_``."""
        usual: str = super()._repr_html_inner()  # type: ignore[misc]
        return _pictures(self) + usual

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """Return text and HTML, as Jupyter asks for them."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**options)  # type: ignore[misc]
        if get_config()["display"] == "diagram":
            bundle["text/html"] = _pictures(self) + bundle["text/html"]
        return bundle


def _pictures(model: Any) -> str:
    """Describe a model that is trained; nothing for one that is not."""
    if not model.__sklearn_is_fitted__():
        return ""
    weights, means = (np.asarray(a, np.float64) for a in (model.weights_, model.means_))
    facts = {
        "components": f"{len(weights):,}",
        "factors each": model.n_factors_,
        "features": f"{means.shape[1]:,}",
        "steps": f"{model.n_steps_:,}",
    }
    return mixture_html(type(model).__name__, facts, weights, means, model.image_shape_)
