"""Oracles of the tests: random mixtures, their dense form in float64, and a watch on memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from factormix import PrecisionMixture

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""What a result may differ from the dense float64 computation, relative to max(1, |result|)."""


@dataclass
class Dense:
    """The oracle: a mixture as d x d matrices in float64, computed without factormix."""

    weights: np.ndarray
    """(K,)."""
    means: np.ndarray
    """(K, d)."""
    E: np.ndarray
    """(K, d)."""
    Gamma: np.ndarray
    """(K, d, l), as given: no column has been rotated."""

    @cached_property
    def P(self) -> np.ndarray:
        """(K, d, d)."""
        return dense_precision(self.E, self.Gamma)

    @cached_property
    def Sigma(self) -> np.ndarray:
        """(K, d, d)."""
        return np.linalg.inv(self.P)

    def component_log_prob(self, x: np.ndarray) -> np.ndarray:
        """Compute (B, K) by SciPy."""
        # Reshaped because SciPy squeezes away a batch of one row.
        columns = [
            np.reshape(multivariate_normal(m, S).logpdf(x), len(x))
            for m, S in zip(self.means, self.Sigma, strict=True)
        ]
        return np.stack(columns, axis=1)

    def joint_log_prob(self, x: np.ndarray) -> np.ndarray:
        return self.component_log_prob(x) + np.log(self.weights / self.weights.sum())

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        return logsumexp(self.joint_log_prob(x), axis=1)

    def responsibilities(self, x: np.ndarray) -> np.ndarray:
        return softmax(self.joint_log_prob(x), axis=1)


@dataclass
class Case:
    """A random mixture with its dense form and points at which to compare them."""

    dense: Dense
    x: Tensor
    """(B, d), of the mixture's dtype."""
    arguments: tuple[Tensor, Tensor, Tensor, Tensor]
    """weights, means, precision_diag, precision_factors: what the mixture is made of."""

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def mixture(self) -> PrecisionMixture:
        return PrecisionMixture(*self.arguments)

    @property
    def points(self) -> np.ndarray:
        """The same x in float64."""
        return numpy(self.x)


def numpy(tensor: Tensor) -> np.ndarray:
    """Return the values as a float64 array."""
    return tensor.detach().double().numpy()


def dense_precision(E: np.ndarray | Tensor, Gamma: np.ndarray | Tensor) -> np.ndarray:
    """Form ``P = E - Gamma Gamma'``, (K, d, d)."""
    E, Gamma = (numpy(a) if isinstance(a, Tensor) else a for a in (E, Gamma))
    return E[:, :, None] * np.eye(E.shape[1]) - Gamma @ np.swapaxes(Gamma, 1, 2)


def dense_M(E: np.ndarray | Tensor, Gamma: np.ndarray | Tensor) -> np.ndarray:
    """Form ``M = I - Gamma' E^-1 Gamma``, (K, l, l)."""
    E, Gamma = (numpy(a) if isinstance(a, Tensor) else a for a in (E, Gamma))
    return np.eye(Gamma.shape[2]) - np.swapaxes(Gamma, 1, 2) @ (Gamma / E[:, :, None])


def random_factors(
    rng: np.random.Generator, E: np.ndarray, n_factors: int, shares: np.ndarray
) -> np.ndarray:
    """Draw Gamma (K, d, l) for which ``Gamma' E^-1 Gamma`` has the given eigenvalues (K, l), in a
    random rotation; directions beyond the dimension of the data get none.
    """
    K, d = E.shape
    l = n_factors
    directions = np.zeros((K, d, l))
    directions[:, :, : min(d, l)] = np.linalg.qr(rng.normal(size=(K, d, min(d, l)))).Q
    rotation = np.linalg.qr(rng.normal(size=(K, l, l))).Q
    return np.sqrt(E)[:, :, None] * ((directions * np.sqrt(shares)[:, None, :]) @ rotation)


def random_case(
    K: int,
    d: int,
    l: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    largest_share: float = 0.9,
    spread: float = 2.0,
    offset: float = 0.0,
    n: int = 7,
) -> Case:
    """Draw a mixture whose M has eigenvalues of at least ``1 - largest_share``, and n points.

    The dense form is that of the rounded arguments, so that a comparison sees only the errors of
    the computation.
    """
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(K)) + 1e-3
    means = offset * rng.choice([-1, 1], size=d) + spread * rng.normal(size=(K, d))
    E = 10 ** rng.uniform(-1, 1, size=(K, d))
    # Some shares are zero and some equal: repeated eigenvalues are where rotations go wrong.
    shares = largest_share * rng.choice([0.0, 0.5, 1.0, rng.uniform()], size=(K, l))
    Gamma = random_factors(rng, E, l, shares)
    near = means[rng.integers(K, size=n)] + rng.normal(size=(n, d))
    arguments = tuple(torch.tensor(a, dtype=dtype) for a in (weights, means, E, Gamma))
    dense = Dense(*map(numpy, arguments))
    return Case(dense, torch.tensor(near, dtype=dtype), arguments)  # type: ignore[arg-type]


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32),
    max_features: int = 8,
    max_factors: int = 3,
    **options: Any,
) -> Case:
    """Draw mixtures with d <= 8, l from 0 to 3 and K from 1 to 5."""
    return random_case(
        draw(st.integers(1, 5), "K"),
        draw(st.integers(1, max_features), "d"),
        draw(st.integers(0, max_factors), "l"),
        seed=draw(st.integers(0, 2**32 - 1), "seed"),
        dtype=draw(st.sampled_from(dtypes), "dtype"),
        largest_share=draw(st.sampled_from([0.0, 0.3, 0.9, 0.95]), "largest share"),
        **options,
    )


def assert_close(actual: Tensor, expected: np.ndarray | Tensor, tolerance: float) -> None:
    """Compare to a tolerance relative to max(1, |expected|)."""
    expected = numpy(expected) if isinstance(expected, Tensor) else np.asarray(expected)
    assert tuple(actual.shape) == expected.shape
    error = np.abs(numpy(actual) - expected) / np.maximum(1, np.abs(expected))
    assert np.isfinite(error).all()
    assert error.max(initial=0) <= tolerance


class LargestTensor(TorchDispatchMode):
    """Record the numbers held by the largest tensor that any operation inside the block makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.operation = ""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            # The storage, not the shape: an expanded view holds no more than its base.
            if isinstance(made, Tensor):
                made = made.values() if made.layout == torch.sparse_csr else made
                numel = made.untyped_storage().nbytes() // made.element_size()
                if numel > self.numel:
                    self.numel, self.operation = numel, str(func)
        return result
