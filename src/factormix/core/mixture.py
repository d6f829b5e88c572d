"""The mixture as a torch module: parameters in precision form, density and sampling as methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from factormix.core import conditionals, density, parameters
from factormix.core.density import Posterior
from factormix.core.missing import observed_components, observed_operands, observed_posterior
from factormix.core.parameters import (
    Parameters,
    bound_precision_,
    diagonalise,
    factor_major,
    like_tensor,
)
from factormix.errors import InputError
from factormix.notebook import mixture_html


class PrecisionMixture(nn.Module):
    """A mixture of factor analyzers with precisions ``P_k = E_k - Gamma_k Gamma_k'``.

    Parameters
    ----------
    weights : Tensor (K,)
        Positive; they are normalised to sum to one.
    means : Tensor (K, d)
    precision_diag : Tensor (K, d)
        E, positive.
    precision_factors : Tensor (K, d, l) or None
        Gamma; None or l = 0 is the diagonal Gaussian mixture. The columns are rotated so that
        ``M = I - Gamma' E^-1 Gamma`` is diagonal, which does not change P.

    Notes
    -----
    The free parameters are ``logits``, ``means``, ``precision_diag`` and ``precision_factors``.
    After an optimiser step on them M is no longer diagonal: call ``constrain_`` after each step.

    Examples
    --------
    >>> import torch
    >>> means = torch.tensor([[0.0, 0.0], [4.0, 4.0]])
    >>> mixture = PrecisionMixture(torch.ones(2), means, precision_diag=torch.ones(2, 2))
    >>> mixture.log_prob(torch.zeros(1, 2)).detach().round(decimals=3)
    tensor([-2.5310])
    >>> mixture.sample(3, component=1).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        weights: Tensor,
        means: Tensor,
        precision_diag: Tensor,
        precision_factors: Tensor | None = None,
    ) -> None:
        super().__init__()
        means = _floating(means, "means")
        like = like_tensor(means)
        weights = torch.as_tensor(weights).detach().to(**like)
        E = torch.as_tensor(precision_diag).detach().to(**like)
        if precision_factors is None:
            precision_factors = means.new_zeros(*means.shape, 0)
        Gamma = torch.as_tensor(precision_factors).detach().to(**like)
        _check_shapes(weights, means, E, Gamma)
        _check_definite(E, Gamma)
        Gamma, M = diagonalise(E, Gamma, 0.0)
        self._set(Parameters(weights.log(), means.clone(), E.clone(), Gamma, M))

    @classmethod
    def from_parameters(cls, values: Parameters) -> Self:
        """Wrap parameters whose M is diagonal already, without copying or checking them."""
        mixture = cls.__new__(cls)
        nn.Module.__init__(mixture)
        mixture._set(values)
        return mixture

    @classmethod
    def from_generative(
        cls, weights: Tensor, means: Tensor, loadings: Tensor, noise_variances: Tensor
    ) -> Self:
        """Build the mixture from the generative model ``x = mu + Lambda z + eps``.

        Parameters
        ----------
        weights : Tensor (K,)
        means : Tensor (K, d)
        loadings : Tensor (K, d, l)
            Lambda.
        noise_variances : Tensor (K, d)
            D, the diagonal covariance of eps.
        """
        means = _floating(means, "means")
        like = like_tensor(means)
        weights, Lambda, D = (
            torch.as_tensor(t).detach().to(**like) for t in (weights, loadings, noise_variances)
        )
        _check_shapes(
            weights, means, D, Lambda, names=("weights", "means", "noise_variances", "loadings")
        )
        values = parameters.from_generative(weights.log(), means.clone(), Lambda, D)
        return cls.from_parameters(values)

    def _set(self, values: Parameters) -> None:
        self.logits = nn.Parameter(values.logits)
        self.means = nn.Parameter(values.means)
        self.precision_diag = nn.Parameter(values.precision_diag)
        self.precision_factors = nn.Parameter(factor_major(values.precision_factors))

    @property
    def n_components(self) -> int:
        """K."""
        return self.precision_factors.shape[0]

    @property
    def n_features(self) -> int:
        """d."""
        return self.precision_factors.shape[1]

    @property
    def n_factors(self) -> int:
        """l."""
        return self.precision_factors.shape[2]

    @property
    def precision_form(self) -> Parameters:
        """All parameters as one tuple, with the diagonal of M that follows from them."""
        E, Gamma = self.precision_diag, self.precision_factors
        M = parameters.latent_variances(E, Gamma)
        return Parameters(self.logits, self.means, E, Gamma, M)

    @property
    def weights(self) -> Tensor:
        """Pi, (K,)."""
        return torch.softmax(self.logits, dim=0)

    @property
    def loadings(self) -> Tensor:
        """Lambda, (K, d, l)."""
        return parameters.loadings(self.precision_form)

    @property
    def noise_variances(self) -> Tensor:
        """D, (K, d)."""
        return parameters.noise_variances(self.precision_diag)

    @property
    def latent_variances(self) -> Tensor:
        """The diagonal of M, (K, l)."""
        return self.precision_form.latent_variances

    def component(self, k: int) -> Self:
        """Return component k alone, as a mixture of one: its parameters are copies."""
        self._check_component(k)
        E = self.precision_diag[k : k + 1].detach().clone()
        Gamma = self.precision_factors[k : k + 1].detach().clone()
        means = self.means[k : k + 1].detach().clone()
        M = parameters.latent_variances(E, Gamma)
        return self.from_parameters(Parameters(means.new_zeros(1), means, E, Gamma, M))

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``log p(x)``, (B,), for x (B, d)."""
        return self.log_prob(x)

    def component_log_prob(
        self, x: Tensor | ArrayLike, missing: Tensor | ArrayLike | None = None
    ) -> Tensor:
        """Compute ``log p_k(x)``, (B, K), for x (B, d).

        ``missing`` (B, d), such as ``x.isnan()``, is true for missing entries. The result is the
        density of the observed ones, and 0 for a row without any. The same holds for ``log_prob``,
        ``responsibilities`` and ``posterior``. Arrays are accepted too; results are tensors.
        """
        x, missing = self._checked(x, missing)
        if missing is None:
            return density.component_log_prob(x, density.operands(self.precision_form))
        ops = observed_operands(self.precision_form)
        return observed_components(x, missing, ops)

    def log_prob(self, x: Tensor | ArrayLike, missing: Tensor | ArrayLike | None = None) -> Tensor:
        """Compute ``log p(x)``, (B,), for x (B, d)."""
        joint = self.component_log_prob(x, missing) + torch.log_softmax(self.logits, dim=0)
        return density.log_normaliser(joint)[0]

    def responsibilities(
        self, x: Tensor | ArrayLike, missing: Tensor | ArrayLike | None = None
    ) -> Tensor:
        """Compute ``p(k | x)``, (B, K), for x (B, d)."""
        joint = self.component_log_prob(x, missing) + torch.log_softmax(self.logits, dim=0)
        return torch.softmax(joint, dim=1)

    def posterior(
        self, x: Tensor | ArrayLike, missing: Tensor | ArrayLike | None = None
    ) -> Posterior:
        """Compute ``p(k | x)`` and ``z | x, k``: means (B, K, l), variances (K, l), of x (B, d).

        With ``missing``, variances differ from row to row: (B, K, l).
        """
        x, missing = self._checked(x, missing)
        if missing is None:
            return density.posterior(x, density.operands(self.precision_form))
        ops = observed_operands(self.precision_form)
        return observed_posterior(x, missing, ops)

    @torch.no_grad()
    def marginal(self, indices: Tensor | Sequence[int]) -> Self:
        """Return the mixture of some features, given in order by numbers or by a mask (d,).

        >>> mixture = PrecisionMixture(torch.ones(1), torch.tensor([[1.0, 2.0, 3.0]]),
        ...                            torch.ones(1, 3))
        >>> mixture.marginal([2, 0]).means.tolist()
        [[3.0, 1.0]]
        """
        kept = self._features(indices)
        return type(self).from_parameters(conditionals.marginal(self.precision_form, kept))

    @torch.no_grad()
    def condition(self, indices: Tensor | Sequence[int], values: Tensor | Sequence[float]) -> Self:
        """Return the mixture of all other features, in their order, given some at values (q,).

        ``indices`` are numbers of features (q,), or a mask (d,). The result gives conditional
        means, densities and samples.

        >>> import torch
        >>> factors = torch.tensor([[[0.6], [0.6]]])
        >>> mixture = PrecisionMixture(
        ...     torch.ones(1), torch.zeros(1, 2), torch.ones(1, 2), factors
        ... )
        >>> round(mixture.condition([0], [1.0]).means.item(), 4)
        0.5625
        """
        given = self._features(indices)
        if len(given) == self.n_features:
            raise InputError(
                f"all {self.n_features} features are given and none is left: give fewer."
            )
        known = torch.as_tensor(values).detach().to(**like_tensor(self.means))
        if known.shape != given.shape or not known.isfinite().all():
            raise InputError(
                f"values must be {len(given)} finite numbers, one for each of the given features;"
                " leave out unknown ones."
            )
        return type(self).from_parameters(
            conditionals.conditional(self.precision_form, given, known)
        )

    @torch.no_grad()
    def sample(
        self,
        n: int,
        component: int | None = None,
        noise: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw n samples, (n, d), from all components or from one."""
        if component is not None:
            self._check_component(component)
        drawn, _ = density.sample(
            self.precision_form, n, component=component, noise=noise, generator=generator
        )
        return drawn

    @torch.no_grad()
    def constrain_(
        self, *, max_precision: Tensor | float | None = None, min_eigenvalue: float = 1e-6
    ) -> Self:
        """Restore the constraints in place: E in its bounds, M diagonal and above its floor."""
        E = self.precision_diag
        bound = torch.finfo(E.dtype).max if max_precision is None else max_precision
        bound_precision_(E, bound)
        Gamma, _ = diagonalise(E, self.precision_factors, min_eigenvalue)
        self.precision_factors.copy_(Gamma)
        return self

    @torch.no_grad()
    def _repr_html_(self) -> str:
        """Show the mixture in a notebook, its components as profiles."""
        K, d, l = self.precision_factors.shape
        facts = {"components": f"{K:,}", "factors each": l, "features": f"{d:,}"}
        weights, means = (t.double().cpu().numpy() for t in (self.weights, self.means))
        return mixture_html(type(self).__name__, facts, weights, means)

    def extra_repr(self) -> str:
        """Describe the size of the mixture."""
        K, d, l = self.precision_factors.shape
        return f"n_components={K}, n_features={d}, n_factors={l}"

    def _check_component(self, k: int) -> None:
        if not 0 <= k < self.n_components:
            raise InputError(f"component must lie between 0 and {self.n_components - 1}, not {k}.")

    def _checked(
        self, x: Tensor | ArrayLike, missing: Tensor | ArrayLike | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return rows (B, d) and their mask as tensors; tensors are not converted."""
        try:
            if not isinstance(x, Tensor):
                x = torch.as_tensor(np.asarray(x), **like_tensor(self.means))
            if not (missing is None or isinstance(missing, Tensor)):
                missing = torch.as_tensor(np.asarray(missing), device=self.means.device)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"x must be rows of numbers, as a tensor or array: {error}."
            ) from error
        if x.ndim != 2 or x.shape[1] != self.n_features:
            raise InputError(
                f"x must have the shape (n, {self.n_features}), not {tuple(x.shape)}: the mixture"
                f" has n_features={self.n_features}."
            )
        if missing is not None and (missing.dtype != torch.bool or missing.shape != x.shape):
            raise InputError(f"missing must be booleans of the shape of x, {tuple(x.shape)}.")
        return x, missing

    def _features(self, indices: Tensor | Sequence[int]) -> Tensor:
        """Return the numbers of features (q,), given as numbers or as a mask (d,)."""
        chosen = torch.as_tensor(indices).detach().to(self.means.device)
        if chosen.dtype == torch.bool and chosen.shape == (self.n_features,):
            chosen = chosen.nonzero()[:, 0]
        whole = not (chosen.is_floating_point() or chosen.dtype == torch.bool)
        if (
            chosen.ndim != 1
            or not len(chosen)
            or not whole
            or not ((chosen >= 0) & (chosen < self.n_features)).all()
            or len(set(chosen.tolist())) < len(chosen)
        ):
            raise InputError(
                f"indices must be different whole numbers between 0 and {self.n_features - 1}, at"
                f" least one, or a mask of {self.n_features} booleans."
            )
        return chosen.long()


def _check_definite(E: Tensor, Gamma: Tensor) -> None:
    share = torch.linalg.eigvalsh(Gamma.mT @ (Gamma / E.unsqueeze(-1)))
    if not (share < 1).all():
        raise InputError(
            "precision_factors are too large for precision_diag: E - Gamma Gamma' must be positive"
            " definite; scale the factors down."
        )


def _floating(values: Tensor, name: str) -> Tensor:
    values = torch.as_tensor(values).detach()
    if values.ndim != 2:
        raise InputError(f"{name} must have the shape (K, d), not {tuple(values.shape)}.")
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _check_shapes(
    weights: Tensor,
    means: Tensor,
    diagonal: Tensor,
    factors: Tensor,
    names: tuple[str, ...] = ("weights", "means", "precision_diag", "precision_factors"),
) -> None:
    K, d = means.shape
    if weights.shape != (K,) or not (weights > 0).all():
        raise InputError(f"weights must be {K} positive numbers, one for each of the means.")
    if diagonal.shape != (K, d) or not (diagonal > 0).all():
        raise InputError(f"{names[2]} must be positive, of the shape {(K, d)} of the means.")
    if factors.ndim != 3 or factors.shape[:2] != (K, d):
        raise InputError(
            f"{names[3]} must have the shape ({K}, {d}, l), not {tuple(factors.shape)}."
        )
    if not all(bool(t.isfinite().all()) for t in (weights, means, diagonal, factors)):
        raise InputError("the parameters of a mixture must be finite: they hold NaN or infinities.")
