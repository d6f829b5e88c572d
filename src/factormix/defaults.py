"""Defaults that the command line shows; without torch, so that ``--help`` is fast."""

from __future__ import annotations

from typing import Final

N_COMPONENTS = 25
MOST_FACTORS = 4
"""Default number of factors, if there are more features than that."""
SOLVER_NAMES = ("natural", "covariance", "sgd", "em")
SOLVER = "natural"
N_INIT = 1
SCALING: Final = "global"
DTYPE = "float32"
PATIENCE = 3
CRITERIA = ("held_out", "bic", "aic", "icl")
"""Criteria by which ``select`` chooses a size."""
CANDIDATES: Final = "auto"
MESH: Final = "auto"
