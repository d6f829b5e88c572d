"""Defaults that the command line shows; without torch, so that ``--help`` is fast."""

from __future__ import annotations

from typing import Final

MOST_COMPONENTS, DEFAULT_ROWS_PER_COMPONENT, MOST_FACTORS = 25, 100, 8
"""Most components by default and rows for each, and most factors: held out, mixtures of these sizes
are at least as good as a Gaussian on the small tables of ``benchmarks/tables.py``."""
MAX_FACTORS = 32
"""Most factors of a component that chooses its rank, as in published mixtures of activations
(arXiv 2602.02464)."""
SOLVER_NAMES = ("natural", "covariance", "sgd", "em")
SOLVER = "natural"
NOISE_MODELS = ("component", "tied", "isotropic")
NOISE: Final = "component"
N_INIT = 1
SCALING: Final = "global"
DTYPE = "float32"
PATIENCE = 3
"""Evaluations without a gain after which training stops early."""
CRITERIA = ("held_out", "bic", "aic", "icl")
"""Criteria by which ``select`` chooses a size."""
CANDIDATES: Final = "auto"
MESH: Final = "auto"
