"""Defaults that the command line shows; without torch, so that ``--help`` is fast."""

from __future__ import annotations

from typing import Final

MOST_COMPONENTS, DEFAULT_ROWS_PER_COMPONENT, MOST_FACTORS = 25, 100, 8
"""Default maximum of components, rows for each, and maximum of factors: held out, mixtures of these
sizes are at least as good as a Gaussian on the small tables of ``benchmarks/tables.py``."""
MAX_FACTORS = 32
"""Maximum number of factors of a component that chooses its rank, as in published mixtures of
activations (arXiv 2602.02464)."""
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
IMAGE_KINDS, IMAGE_SCALES, IMAGE_FEATURES, IMAGE_NEIGHBOURS = 32, 3, 96, 24
"""Sizes of a ``ConvMFA``: with 40 s of a core for the red channel of CIFAR-10 they had 4.764 bits,
twice the features 4.772, half the kinds 4.774, 64 kinds of one scale 4.767, 40 neighbours 4.772."""
IMAGE_STEPS, IMAGE_BATCH, IMAGE_RATE = 10_000, 2_000, 0.005
"""Its training. In the same comparison, batches of 1,000 have 4.771, and twice the rate 4.774."""
