"""What holds after every step: bounded precisions, a diagonal M, eigenvalues above a floor."""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.parameters import scaled_factors
from factormix.core.workspace import Workspace

__all__ = ["bound_precision_", "diagonalise"]


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
    ``Gamma Gamma'`` and so P as they are. Where ``M_ii < min_eigenvalue`` the column is
    multiplied by ``sqrt((1 - min_eigenvalue) / (1 - M_ii))``, which makes M_ii the floor exactly
    (the paper's rescaling omits "1 -"). Columns come strongest first.

    Returns
    -------
    Gamma : Tensor (K, d, l), factor-major
    M : Tensor (K, l), the diagonal
    """
    share = precision_factors.mT @ scaled_factors(precision_factors, precision_diag, work)
    # A column far beyond what M allows would cost the others their digits: bring it near first.
    near = (16 / share.diagonal(dim1=-2, dim2=-1)).clamp(max=1).sqrt().unsqueeze(-1)
    # Negated, so that the order of the eigenvalues puts the strongest column first.
    negated, O = torch.linalg.eigh(share * near * -near.mT)
    most = 1 - min_eigenvalue
    factor = (-most / negated.clamp(max=-most)).sqrt().unsqueeze(-1)
    Gamma = ((factor * O.mT * near.mT) @ precision_factors.mT).mT
    return Gamma, 1 + negated.clamp(-most, 0)
