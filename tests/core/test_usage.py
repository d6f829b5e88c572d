"""Which components are in use: the same everywhere, at the edge too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factormix.core.inspection import components_in_use, in_use
from factormix.views.plotting.drawing import used_components

# A tenth of the average of eight is exactly 1 / 80.
WEIGHTS = [0.5, 0.3, 0.1, 0.06, 1 / 80, 0.0124, 0.0125, 0.0026]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_tenth_of_the_average_is_in_use(make):
    weights = make(WEIGHTS, dtype=torch.float64 if make is torch.tensor else np.float64)
    assert in_use(weights).tolist() == [True] * 5 + [False, True, False]
    assert components_in_use(weights) == 6
    assert components_in_use(make([0.5, 0.46, 0.026, 0.014])) == 3


def test_pictures_see_the_same():
    class Model:
        weights_ = np.array(WEIGHTS)

    assert used_components(Model()).tolist() == in_use(np.array(WEIGHTS)).tolist()
