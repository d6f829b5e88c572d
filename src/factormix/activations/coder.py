"""A trained mixture as an encoder and decoder of activations, for hooks and for training."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from factormix.core import density, parameters
from factormix.core.density import Operands
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import at_least_float32, without_autocast
from factormix.errors import InputError
from factormix.estimators.mfa import MFA

BLOCK_BYTES = 1 << 26
"""Size of the largest intermediate array; rows are encoded and decoded in blocks."""
_TENSORS = ("offset", "E", "E_mu", "Gamma", "Gamma_mu", "constant", "log_weights")


class Encoding(NamedTuple):
    """Rows as components and codes."""

    components: Tensor
    """The most probable component of each row, (...)."""
    responsibilities: Tensor
    """``p(k | x)``, (..., K)."""
    codes: Tensor
    """Posterior mean of the latent z in that component, (..., l)."""


class BestEncoding(NamedTuple):
    """Rows in their most probable component."""

    components: Tensor
    """(n,)."""
    log_density: Tensor
    """``log p_k(x)`` of that component, (n,)."""
    codes: Tensor
    """(n, l)."""


class MixtureCoder(nn.Module):
    """Encode activations (..., d) into components and codes, and decode them.

    It may be part of a network on any device and in any dtype: rows in float16 or bfloat16 are
    computed in float32, because their squares and precisions exceed these formats. So its tensors
    stay in float32 when a network is converted to them. ``torch.autocast`` has no effect on it.
    Results have the dtype of the rows, except for responsibilities, and gradients flow to the rows.
    Values that exceed float16 become its largest number.

    Parameters
    ----------
    mixture : MFA or PrecisionMixture
        Its parameters are copied.
    dtype : torch.dtype
        Format of the computation, float32 or float64. Components that are too narrow for the digits
        of float32 are computed one by one, which is exact and slower.

    Examples
    --------
    >>> import torch
    >>> from factormix import MFA
    >>> x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    >>> coder = MixtureCoder(MFA(3, 2, random_state=0).fit(x))
    >>> found = coder.encode(x[:4].bfloat16())
    >>> found.codes.shape, found.codes.dtype
    (torch.Size([4, 2]), torch.bfloat16)
    >>> coder.decode(found.codes, found.components).shape
    torch.Size([4, 6])
    """

    Gamma: Tensor
    log_weights: Tensor
    means: Tensor
    loadings: Tensor
    latent_variances: Tensor

    def __init__(self, mixture: MFA | PrecisionMixture, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype must be torch.float32 or torch.float64, not {dtype}.")
        mixture = as_mixture(mixture)
        with torch.no_grad(), without_autocast():
            form = mixture.precision_form
            # Constants are computed in the mixture's own format, which is float64 for an MFA.
            ops = density.operands(form)
            tensors = {name: getattr(ops, name) for name in _TENSORS}
            tensors |= {
                "means": form.means,
                "loadings": parameters.loadings(form),
                "latent_variances": form.latent_variances,
            }
            for name, value in tensors.items():
                self.register_buffer(name, value.detach().to(dtype, copy=True))

    @property
    def n_components(self) -> int:
        """K."""
        return self.means.shape[0]

    @property
    def n_features(self) -> int:
        """d."""
        return self.means.shape[1]

    @property
    def n_factors(self) -> int:
        """l."""
        return self.loadings.shape[2]

    @property
    def ranks(self) -> list[int]:
        """The number of factors of each component: with ``n_factors="auto"``, the rest are zero."""
        used = (self.loadings != 0).any(dim=1)
        last = used * torch.arange(1, self.n_factors + 1, device=used.device)
        ranks: list[int] = last.amax(dim=1).tolist() if self.n_factors else [0] * len(used)
        return ranks

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct rows x (..., d) from their components and codes."""
        found = self.encode(x)
        return self.decode(found.codes, found.components)

    @without_autocast()
    def encode(self, x: Tensor) -> Encoding:
        """Compute components (...), responsibilities (..., K) and codes (..., l) of x (..., d)."""
        self._check_width(x, self.n_features, "x")
        parts = [
            (best, torch.softmax(log_p + self.log_weights, dim=1), codes)
            for best, log_p, codes in self._encode_blocks(x.reshape(-1, self.n_features))
        ]
        components, shares, codes = (torch.cat(part) for part in zip(*parts, strict=True))
        shape = x.shape[:-1]
        return Encoding(
            components.view(shape),
            shares.view(*shape, self.n_components),
            fit_dtype(codes.view(*shape, self.n_factors), x.dtype),
        )

    @without_autocast()
    def encode_best(self, rows: Tensor) -> BestEncoding:
        """Compute component, log-density in it and code of rows (n, d), without all shares."""
        self._check_width(rows, self.n_features, "rows")
        parts = [
            (best, log_p.gather(1, best.unsqueeze(1)).squeeze(1), codes)
            for best, log_p, codes in self._encode_blocks(rows)
        ]
        return BestEncoding(*(torch.cat(part) for part in zip(*parts, strict=True)))

    @without_autocast()
    def encode_in(self, x: Tensor, component: int) -> Tensor:
        """Compute the codes (..., l) of rows x (..., d) in one component."""
        self._check_width(x, self.n_features, "x")
        k, l = self.check_component(component), self.n_factors
        # M^(1/2) Gamma' (x - mu), the posterior mean.
        Gamma = self.Gamma.view(self.n_components, l, self.n_features)[k]
        xt = x.to(self.means.dtype) - self.means[k]
        return fit_dtype((xt @ Gamma.mT) * self.latent_variances[k].sqrt(), x.dtype)

    @without_autocast()
    def decode(self, codes: Tensor, components: Tensor) -> Tensor:
        """Compute ``mu_k + Lambda_k z``, (..., d), of codes z (..., l) in components k (...)."""
        self._check_width(codes, self.n_factors, "codes")
        given: Any = components
        whole = isinstance(given, Tensor) and not given.is_floating_point()
        if not whole or components.shape != codes.shape[:-1]:
            raise InputError(
                f"components must be a tensor of whole numbers of shape {tuple(codes.shape[:-1])},"
                f" one for each code, not {_describe(given)}."
            )
        k = components.reshape(-1)
        z = codes.reshape(len(k), self.n_factors).to(self.means.dtype)
        if not k.is_meta and ((k < 0) | (k >= self.n_components)).any():
            raise InputError(f"components must lie between 0 and {self.n_components - 1}.")
        size = self._count_rows(self.n_features * max(1, self.n_factors))
        parts = [
            self.means[own] + torch.einsum("ndl,nl->nd", self.loadings[own], some)
            for some, own in zip(torch.split(z, size), torch.split(k, size), strict=True)
        ]
        decoded = torch.cat(parts).view(*codes.shape[:-1], self.n_features)
        return fit_dtype(decoded, codes.dtype)

    def check_component(self, component: int) -> int:
        """Return the number of a component after a check."""
        if not is_index(component, self.n_components):
            raise InputError(
                f"component must lie between 0 and {self.n_components - 1}, not {component!r}."
            )
        return int(component)

    def extra_repr(self) -> str:
        """Describe the size of the mixture."""
        K, d, l = self.n_components, self.n_features, self.n_factors
        return f"n_components={K}, n_features={d}, n_factors={l}"

    def _encode_blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield component (B,), ``log p_k(x)`` (B, K) and code (B, l) of each block of rows."""
        values = {name: getattr(self, name) for name in _TENSORS}
        ops = Operands(**values, latent_variances=self.latent_variances)
        size = self._count_rows(self.n_components * (self.n_factors + 1))
        for block in torch.split(rows.to(self.means.dtype), size):
            log_p, Y = self._project(block, ops)
            best = (log_p + ops.log_weights).argmax(dim=1)
            at = torch.arange(len(block), device=block.device), best
            yield best, log_p, Y[at] * self.latent_variances[best].sqrt()

    def _project(self, x: Tensor, ops: Operands) -> tuple[Tensor, Tensor]:
        """Compute ``log p_k(x)``, (B, K), and ``Gamma_k' (x - mu_k)``, (B, K, l)."""
        log_p, Y = density.project(x, ops)
        if x.is_meta:
            return log_p, Y
        Gamma = self.Gamma.view(self.n_components, self.n_factors, self.n_features).mT
        own = ops.log_weights, self.means, ops.E, Gamma, self.latent_variances
        form = parameters.Parameters(*own)
        inexact = density.find_inexact(form)
        if len(inexact):
            log_p = density.correct_components(log_p, x, form, inexact)
            exact = [(x - self.means[k]) @ Gamma[k] for k in inexact.tolist()]
            Y = Y.index_copy(1, inexact, torch.stack(exact, dim=1))
        return log_p, Y

    def _count_rows(self, values_per_row: int) -> int:
        """Return the number of rows of a block."""
        return max(1, BLOCK_BYTES // (values_per_row * self.means.element_size()))

    def _check_width(self, x: Tensor, width: int, name: str) -> None:
        given: Any = x
        real = isinstance(given, Tensor) and given.is_floating_point()
        if not real or x.shape[-1:] != (width,):
            raise InputError(
                f"{name} must be a tensor of real numbers of shape (..., {width}), not"
                f" {_describe(given)}."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert the tensors, but keep at least float32."""
        super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def is_index(value: object, n: int) -> bool:
    """Return whether a value is a whole number from 0 to below n; a tensor may hold it."""
    try:
        return 0 <= operator.index(value) < n  # type: ignore[arg-type]
    except TypeError:
        return False


def _describe(value: Any) -> str:
    """Describe what was given instead of a tensor of another kind."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)}"


def fit_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype; finite values beyond the range of float16 become its largest number."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    return values.to(dtype)


def as_mixture(mixture: Any) -> PrecisionMixture:
    """Return the density of a trained estimator, or a density itself."""
    if isinstance(mixture, PrecisionMixture):
        return mixture
    if isinstance(mixture, MFA):
        return mixture.mixture_
    raise InputError(
        f"mixture is a {type(mixture).__name__}: give a trained MFA or a PrecisionMixture."
    )
