"""Three clusters in six dimensions, and a mixture that is trained on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from factormix import MFA

rng = np.random.default_rng(0)
X = np.concatenate(
    [
        centre
        + rng.normal(size=(150, 2)) @ rng.normal(size=(2, 6))
        + 0.4 * rng.normal(size=(150, 6))
        for centre in (-4, 0, 4)
    ]
)


def fitted(data: Any = X, **options: Any) -> MFA:
    defaults = {
        "n_components": 3,
        "n_factors": 2,
        "max_epochs": 10,
        "random_state": 0,
        "solver": "sgd",
    }
    return MFA(**defaults | options).fit(data)
