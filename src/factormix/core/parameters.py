"""Parameters of a mixture of factor analyzers in precision form, their constraints and conversions.

==============  =========  =======================================================
symbol          shape      meaning
==============  =========  =======================================================
K, d, l                    components, data dimension, latent dimension
pi              K          component weights, the softmax of free logits
mu              K, d       means
E               K, d       diagonal part of the precision
Gamma           K, d, l    low-rank part of the precision
P               K, d, d    precision ``E - Gamma Gamma'``, never formed
M               K, l       diagonal of ``I - Gamma' E^-1 Gamma``, which is kept diagonal
D = 1/E         K, d       noise variances of the generative model
Lambda          K, d, l    loadings of the generative model
Sigma           K, d, d    covariance ``D + Lambda Lambda'``, never formed
==============  =========  =======================================================

``l = 0`` is the diagonal Gaussian mixture on the same path. Factors have the shape (K, d, l) and
lie in memory as (K, l, d), so that ``Gamma.mT.reshape(K * l, d)`` is a view and sums over d are
contiguous.

What holds after every step: bounded precisions, a diagonal M, eigenvalues above a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from factormix.core.arrays import (
    BLOCK_ELEMENTS,
    CACHE_ELEMENTS,
    Workspace,
    reuse,
    slice_rows,
)

LEAST_FACTORS, MOST_USED = 100, 0.7
"""Factors of all components from which it pays to look for zero factors, and the share of other
factors up to which leaving out the zeros pays: chosen. Log-densities (K = 50, d = 64, l = 16) take
0.4 of the time where 27% are not zero, 0.6 to 0.9 where 51 to 87% are not."""
LEAST_SPLIT = 16
"""Least number of factors for which components of lower ranks step by themselves. Where half of 300
components have a quarter of the factors (256 features, 1,000 rows, one core), the step then takes
1.6 of the time with 4 factors, 1.2 with 8, 0.9 with 16 and 0.8 with 32."""


class Like(TypedDict):
    """Device and dtype of a tensor, as keyword arguments."""

    device: torch.device
    dtype: torch.dtype


def like_tensor(tensor: Tensor) -> Like:
    """Return the device and dtype of a tensor as keyword arguments."""
    return {"device": tensor.device, "dtype": tensor.dtype}


class Parameters(NamedTuple):
    """The free parameters of a mixture, and the diagonal of M that follows from them."""

    logits: Tensor
    """(K,) unnormalised log-weights."""
    means: Tensor
    """mu, (K, d)."""
    precision_diag: Tensor
    """E, (K, d), positive."""
    precision_factors: Tensor
    """Gamma, (K, d, l), factor-major in memory."""
    latent_variances: Tensor
    """The diagonal of M, (K, l): also the posterior variance of the latent."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (K, d, l)."""
        K, d, l = self.precision_factors.shape
        return K, d, l

    @property
    def log_weights(self) -> Tensor:
        """Return log pi, (K,)."""
        return torch.log_softmax(self.logits, dim=0)

    def take(self, components: slice | Tensor) -> Parameters:
        """Return the parameters of some components."""
        return Parameters(*(t[components] for t in self))


def factor_major(factors: Tensor) -> Tensor:
    """Lay (K, d, l) factors out in memory as (K, l, d), without changing shape or values."""
    return factors.mT.contiguous().mT


def factor_rows(factors: Tensor) -> Tensor:
    """Return (K, d, l) factors as the rows of one (K * l, d) matrix, a view when factor-major."""
    K, d, l = factors.shape
    return factors.mT.reshape(K * l, d)


def latent_variances(precision_diag: Tensor, precision_factors: Tensor) -> Tensor:
    """Compute the diagonal of ``M = I - Gamma' E^-1 Gamma``, (K, l).

    Sums in float64 where the device has it: a strong factor has a small M, and ``1 - sum`` loses
    the digits that its logarithm needs.
    """
    dtype = precise_dtype(precision_diag.device)
    E, Gamma = precision_diag.to(dtype), precision_factors.to(dtype)
    return (1 - (Gamma.square() / E.unsqueeze(-1)).sum(dim=1)).to(precision_diag.dtype)


def find_ranks(parameters: Parameters) -> Tensor | None:
    """Count the factors of each component up to the last that is not zero, (K,).

    None if too few factors are zero to be worth leaving out.
    """
    (K, _, l), Gamma, M = parameters.shape, *parameters[3:]
    # Only on the CPU are the numbers known without waiting for the device.
    if Gamma.requires_grad or Gamma.device.type != "cpu" or K * l < LEAST_FACTORS:
        return None
    most = int(MOST_USED * K * l)
    # The M of a zero factor is one, and is quicker to look at.
    if int((M != 1).sum()) > most:
        return None
    # A norm needs no memory for comparisons.
    ranks = _last_used(torch.linalg.vector_norm(Gamma.mT, dim=2) != 0)
    return None if int(ranks.sum()) > most else ranks


def group_by_rank(M: Tensor) -> Tensor | None:
    """Return the number of factors, (K,), of each component in a step, from M (K, l).

    Ranks are rounded up to powers of two, so that components form few groups with matrices of equal
    size. None if this leaves out too little to pay for the copies, or if it would wait for a
    device.
    """
    l = M.shape[1]
    if l < LEAST_SPLIT or M.device.type != "cpu":
        return None
    ranks = _last_used(M < 1)
    widths = torch.pow(2.0, ranks.clamp(min=1).log2().ceil()).long().clamp(max=l)
    return widths if float(widths.double().mean()) <= MOST_USED * l else None


def _last_used(used: Tensor) -> Tensor:
    """Return the number of the last of the factors (K, l) in use, counted from one, (K,)."""
    return (used * torch.arange(1, used.shape[1] + 1)).amax(dim=1)


def effective_factors(parameters: Parameters) -> Tensor:
    """Compute ``sum_j (1 - M_jj)``, (K,), the number of factors that each component uses.

    M is the posterior variance of the latent, whose prior variance is one. A factor that stands
    clear of the noise counts as one, and a factor without information as zero.
    """
    return (1 - parameters.latent_variances).sum(dim=1)


def latent_log_determinant(
    precision_diag: Tensor,
    precision_factors: Tensor,
    ranks: Tensor | None = None,
    elements: int = CACHE_ELEMENTS,
) -> Tensor:
    """Compute ``log |M|``, (K,), of ``M = I - Gamma' E^-1 Gamma``, diagonal or not.

    In float64 where the device has it: for a strong factor, the rounding of Gamma leaves elements
    off the diagonal that are not small compared with the diagonal. If the ``ranks`` (K,) are given,
    later factors are zero. ``elements`` bounds copies of factors.
    """
    K, d, l = precision_factors.shape
    order = None if ranks is None else ranks.argsort()
    found = list[Tensor]()
    for place in slice_rows(K, elements // max(1, d * l)):
        if order is None or ranks is None:
            E, Gamma = precision_diag[place], precision_factors[place]
        else:
            some = order[place]
            width = int(ranks[some[-1]])
            E, Gamma = precision_diag[some], precision_factors[some, :, :width]
        found.append(torch.linalg.slogdet(latent_matrix(E, Gamma)).logabsdet)
    log_M = torch.cat(found).to(precision_diag.dtype)
    return log_M if order is None else torch.empty_like(log_M).index_copy_(0, order, log_M)


def latent_matrix(precision_diag: Tensor, precision_factors: Tensor) -> Tensor:
    """Compute ``M = I - Gamma' E^-1 Gamma``, (K, l, l), in float64 where the device has it."""
    dtype = precise_dtype(precision_diag.device)
    E, Gamma = precision_diag.to(dtype), precision_factors.to(dtype)
    M = -(Gamma.mT @ (Gamma / E.unsqueeze(-1)))
    return M + torch.eye(M.shape[-1], dtype=dtype, device=M.device)


def is_definite(parameters: Parameters) -> bool:
    """Return whether ``P = E - Gamma Gamma'`` of all components is positive definite, as M is."""
    K, d, l = parameters.shape
    E, Gamma = parameters.precision_diag, parameters.precision_factors
    # Some components at a time, because the sums need a copy of the factors.
    return not l or all(
        bool((torch.linalg.cholesky_ex(latent_matrix(E[part], Gamma[part])).info == 0).all())
        for part in slice_rows(K, BLOCK_ELEMENTS // (d * l))
    )


def noise_variances(precision_diag: Tensor) -> Tensor:
    """Compute ``D = E^-1``, (K, d)."""
    return precision_diag.reciprocal()


def whiten_factors(
    precision_factors: Tensor, precision_diag: Tensor, work: Workspace | None = None
) -> Tensor:
    """Compute ``E^-1 Gamma``, (K, d, l), factor-major; in the workspace if there is one."""
    rows = precision_factors.mT
    out = reuse(work, "E^-1 Gamma", precision_diag, *rows.shape)
    return torch.div(rows, precision_diag.unsqueeze(1), out=out).mT


def loadings(parameters: Parameters) -> Tensor:
    """Compute ``Lambda = E^-1 Gamma M^(-1/2)``, (K, d, l), the paper's identification."""
    E, Gamma, M = parameters[2:]
    return Gamma * M.rsqrt().unsqueeze(1) / E.unsqueeze(-1)


def covariances(parameters: Parameters) -> Tensor:
    """Compute ``Lambda Lambda' + D`` of each component, (K, d, d)."""
    Lambda = loadings(parameters)
    return (Lambda @ Lambda.mT).add_(noise_variances(parameters.precision_diag).diag_embed())


def from_generative(
    logits: Tensor, means: Tensor, loadings: Tensor, noise_variances: Tensor
) -> Parameters:
    """Convert ``(Lambda, D)`` into precision form.

    With ``L = I + Lambda' E Lambda = O ell O'``: ``Gamma = E Lambda O ell^(-1/2)`` and
    ``M = 1/ell``, diagonal already. Columns come strongest first.
    """
    E = noise_variances.reciprocal()
    E_Lambda = E.unsqueeze(-1) * loadings
    ell, O = torch.linalg.eigh(loadings.mT @ E_Lambda)
    ell, O = ell.clamp(min=0).flip(-1) + 1, O.flip(-1)
    Gamma = (ell.rsqrt().unsqueeze(-1) * O.mT @ E_Lambda.mT).mT
    return Parameters(logits, means, E, Gamma, ell.reciprocal())


def change_units(parameters: Parameters, offset: Tensor, scale: Tensor) -> Parameters:
    """Express a mixture of x as the mixture of ``offset + scale * x``; (d,) or scalar tensors."""
    logits, means, E, Gamma, M = parameters
    scale = torch.as_tensor(scale).expand(means.shape[-1])
    return Parameters(
        logits, offset + scale * means, E / scale.square(), Gamma / scale.unsqueeze(-1), M
    )


def to_precise_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in float64 where the device has it."""
    dtype = precise_dtype(parameters.means.device)
    if parameters.means.dtype == dtype:
        return parameters
    logits, mu, E, Gamma = (t.to(dtype) for t in parameters[:4])
    # The M of training has lost digits where it is small.
    return Parameters(logits, mu, E, Gamma, latent_variances(E, Gamma))


def diagonalise_precisely(parameters: Parameters, min_eigenvalue: float = 0.0) -> Parameters:
    """Return parameters in float64, with an M that is diagonal to as many digits."""
    logits, mu, E, Gamma, _ = to_precise_dtype(parameters)
    return Parameters(logits, mu, E, *diagonalise(E, Gamma, min_eigenvalue))


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or the widest dtype of a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the dtype of the tensors in a block or function, also within ``torch.autocast``.

    Products in float16 or bfloat16 would lose the digits of densities, and exceed float16.
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps"):
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def at_least_float32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a conversion of tensors that moves them likewise, but not to a 16-bit format.

    A module of densities passes it to ``_apply``: precisions exceed the digits of such formats.
    """

    def moved(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        short = converted.is_floating_point() and converted.dtype.itemsize < 4
        return tensor.to(converted.device) if short else converted

    return moved


def bound_precision_(precision_diag: Tensor, max_precision: Tensor | float) -> Tensor:
    """Clip E (K, d) in place into ``(0, max_precision]``, a scalar or (d,)."""
    info = torch.finfo(precision_diag.dtype)
    bound = torch.as_tensor(max_precision, device=precision_diag.device, dtype=precision_diag.dtype)
    lowest = (bound * info.eps**2).clamp(info.tiny, info.eps**2)
    return precision_diag.clamp_(lowest, bound)


def diagonalise(
    precision_diag: Tensor,
    precision_factors: Tensor,
    min_eigenvalue: float,
    work: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate Gamma so that M is diagonal, and shrink the columns whose eigenvalue is too small.

    ``Gamma' E^-1 Gamma = O s O'`` gives ``Gamma <- Gamma O`` and ``M = 1 - s``, which leaves
    ``Gamma Gamma'`` and P unchanged. Where ``M_ii < min_eigenvalue`` the column is
    multiplied by ``sqrt((1 - min_eigenvalue) / (1 - M_ii))``, which makes M_ii the floor exactly
    (the paper's rescaling omits "1 -"). Columns come strongest first.

    Returns
    -------
    Gamma : Tensor (K, d, l), factor-major
    M : Tensor (K, l), the diagonal
    """
    share = precision_factors.mT @ whiten_factors(precision_factors, precision_diag, work)
    # A column far beyond its limit would cost the others their digits: shorten it first.
    near = (16 / share.diagonal(dim1=-2, dim2=-1)).clamp(max=1).sqrt().unsqueeze(-1)
    # Negated, so that the order of the eigenvalues puts the strongest column first.
    negated, O = torch.linalg.eigh(share * near * -near.mT)
    most = 1 - min_eigenvalue
    factor = (-most / negated.clamp(max=-most)).sqrt().unsqueeze(-1)
    Gamma = ((factor * O.mT * near.mT) @ precision_factors.mT).mT
    return Gamma, 1 + negated.clamp(-most, 0)
