"""Defaults that the command line shows; without torch, so that ``--help`` is fast."""

from __future__ import annotations

from typing import Final

N_COMPONENTS, MOST_FACTORS = 25, 4
"""Components and factors of the paper's mixture; fewer factors if there are at most 4 features."""
SOLVER_NAMES = ("natural", "covariance", "sgd", "em")
SOLVER = "natural"
N_INIT = 1
SCALING: Final = "global"
DTYPE = "float32"
PATIENCE = 3
"""Evaluations without a gain after which training stops early."""
CRITERIA = ("held_out", "bic", "aic", "icl")
"""Criteria by which ``select`` chooses a size."""
CANDIDATES: Final = "auto"
MESH: Final = "auto"
