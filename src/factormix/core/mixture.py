"""The mixture as a torch distribution and module, with fixed parameters or with trainable ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from factormix.core import conditionals, density, parameters
from factormix.core.density import Posterior
from factormix.core.missing import PreparedMixture, RowBlock
from factormix.core.parameters import (
    Parameters,
    at_least_float32,
    factor_major,
    latent_matrix,
    like_tensor,
    without_autocast,
)
from factormix.errors import InputError
from factormix.notebook import mixture_html

Mask = Tensor | ArrayLike | Literal[False] | None
"""Missing entries: booleans of the shape of the rows, None for the NaN among them, or False."""

MIN_EIGENVALUE = 1e-6
"""Smallest eigenvalue of M in training: about 8 times the rounding of 1 in float32, because M is
the difference of 1 and a sum."""

NOISE_FLOOR = 1e-4
"""Smallest share of a feature's variance that is noise. On digits (K = 10, l = 4), 500 steps of
Adam at a rate of 0.1 end at 139 nats; with 1e-6 they oscillate between 67 and 137."""


class PrecisionMixture(nn.Module, Distribution):
    """A mixture of factor analyzers with precisions ``P_k = E_k - Gamma_k Gamma_k'``.

    It is a ``torch.distributions.Distribution`` of rows (d,) and a module whose buffers are
    ``logits``, ``means``, ``precision_diag`` and ``precision_factors``. Results are differentiable
    in the tensors that it is given. ``trainable`` returns a module for an optimiser. Within a
    network in float16 or bfloat16, it computes in float32.

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

    Examples
    --------
    >>> import torch
    >>> means = torch.tensor([[0.0, 0.0], [4.0, 4.0]])
    >>> mixture = PrecisionMixture(torch.ones(2), means, precision_diag=torch.ones(2, 2))
    >>> mixture.log_prob(torch.zeros(1, 2)).round(decimals=3)
    tensor([-2.5310])
    >>> mixture.sample(3, component=1).shape
    torch.Size([3, 2])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "logits": constraints.real_vector,
        "means": constraints.real,
        "precision_diag": constraints.positive,
        "precision_factors": constraints.real,
    }
    support = constraints.real_vector
    has_rsample = False

    logits: Tensor
    means: Tensor
    precision_diag: Tensor
    precision_factors: Tensor

    def __init__(
        self,
        weights: Tensor,
        means: Tensor,
        precision_diag: Tensor,
        precision_factors: Tensor | None = None,
    ) -> None:
        means = _floating_means(means)
        like = like_tensor(means)
        if precision_factors is None:
            precision_factors = means.new_zeros(*means.shape, 0)
        weights, E, Gamma = (
            torch.as_tensor(t).to(**like) for t in (weights, precision_diag, precision_factors)
        )
        _check_shapes(weights, means, E, Gamma)
        _check_definite(E, Gamma)
        self._set(_rotate_factors(weights.log(), means.clone(), E.clone(), Gamma))

    @classmethod
    def from_parameters(cls, values: Parameters) -> PrecisionMixture:
        """Wrap parameters whose M is diagonal already, without copying or checking them."""
        mixture = PrecisionMixture.__new__(PrecisionMixture)
        mixture._set(values)
        return mixture

    @classmethod
    def from_generative(
        cls, weights: Tensor, means: Tensor, loadings: Tensor, noise_variances: Tensor
    ) -> PrecisionMixture:
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
        means = _floating_means(means)
        like = like_tensor(means)
        weights, Lambda, D = (
            torch.as_tensor(t).to(**like) for t in (weights, loadings, noise_variances)
        )
        _check_shapes(
            weights, means, D, Lambda, names=("weights", "means", "noise_variances", "loadings")
        )
        scaled = Lambda * D.rsqrt().unsqueeze(-1)
        return cls.from_parameters(_convert_scaled(weights.log(), means.clone(), scaled, D))

    def _set(self, values: Parameters) -> None:
        self._begin(values.means)
        self.register_buffer("logits", values.logits)
        self.register_buffer("means", values.means)
        self.register_buffer("precision_diag", values.precision_diag)
        self.register_buffer("precision_factors", factor_major(values.precision_factors))

    def _begin(self, means: Tensor) -> None:
        nn.Module.__init__(self)
        Distribution.__init__(self, event_shape=means.shape[1:], validate_args=False)

    def trainable(self, noise_floor: float = NOISE_FLOOR) -> TrainableMixture:
        """Copy the mixture into a module whose parameters may take any real values.

        Parameters
        ----------
        noise_floor : float
            Smallest noise variance of a feature, as a share of the feature's variance in this
            mixture. Without a floor, the likelihood of a constant feature has no maximum.

        Returns
        -------
        TrainableMixture
            A `PrecisionMixture` too. Any optimiser of torch can train its ``parameters()``, and its
            method ``fixed`` copies the result.
        """
        if not 0 < noise_floor < 1:
            raise InputError(f"noise_floor must lie between 0 and 1, not {noise_floor}.")
        return TrainableMixture(self, noise_floor)

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
        return self.precision_factors.shape[2]

    @property
    @without_autocast()
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
    @without_autocast()
    def loadings(self) -> Tensor:
        """Lambda, (K, d, l)."""
        return parameters.loadings(_unit_latents(self.precision_form))

    @property
    def noise_variances(self) -> Tensor:
        """D, (K, d)."""
        return parameters.noise_variances(self.precision_diag)

    @property
    def latent_variances(self) -> Tensor:
        """The diagonal of M, (K, l)."""
        return self.precision_form.latent_variances

    @property
    @without_autocast()
    def mean(self) -> Tensor:
        """The mean of the mixture, (d,)."""
        return self.weights @ self.means

    @property
    @without_autocast()
    def variance(self) -> Tensor:
        """The variance of each feature, (d,)."""
        within = self.noise_variances + self.loadings.square().sum(dim=2)
        return self.weights @ (within + (self.means - self.mean).square())

    def component(self, k: int) -> PrecisionMixture:
        """Return component k alone, as a mixture of one: its parameters are copies."""
        self._check_component(k)
        values = (t[k : k + 1].detach().clone() for t in self.precision_form)
        return self.from_parameters(Parameters(*values)._replace(logits=self.logits.new_zeros(1)))

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``log p(x)``, (...), for x (..., d)."""
        return self.log_prob(x)

    @without_autocast()
    def component_log_prob(self, x: Tensor | ArrayLike, missing: Mask = None) -> Tensor:
        """Compute ``log p_k(x)``, (..., K), for x (..., d).

        NaN are missing entries: the result is the density of the observed ones, and 0 for a row
        without any. ``missing`` (..., d) marks missing entries instead, and False says that there
        are none, as ``torch.vmap`` needs. The same holds for ``log_prob``,
        ``responsibilities`` and ``posterior``. Arrays are accepted too; results are tensors.

        Means may lie so far apart, in standard deviations, that the matrix products of a density
        lose its digits. Such components are computed from ``x - mu`` in float64; in float32, use
        ``.double()`` for means that are more than about 90 standard deviations apart.
        """
        block, shape = self._flatten_rows(x, missing)
        return block.components().view(shape)

    def log_prob(self, x: Tensor | ArrayLike, missing: Mask = None) -> Tensor:
        """Compute ``log p(x)``, (...), for x (..., d)."""
        joint = self._joint(x, missing)
        return density.log_normaliser(joint.view(-1, self.n_components))[0].view(joint.shape[:-1])

    def responsibilities(self, x: Tensor | ArrayLike, missing: Mask = None) -> Tensor:
        """Compute ``p(k | x)``, (..., K), for x (..., d)."""
        return torch.softmax(self._joint(x, missing), dim=-1)

    def _joint(self, x: Tensor | ArrayLike, missing: Mask) -> Tensor:
        return self.component_log_prob(x, missing) + torch.log_softmax(self.logits, dim=0)

    @without_autocast()
    def posterior(self, x: Tensor | ArrayLike, missing: Mask = None) -> Posterior:
        """Compute ``p(k | x)`` and ``z | x, k`` of x (..., d).

        Means are (..., K, l) and variances (K, l). With missing entries, variances differ from row
        to row: (..., K, l).
        """
        block, shape = self._flatten_rows(x, missing)
        latent = (*shape, self.n_factors)
        shares, means, variances = block.posterior()
        if block.missing is not None:
            variances = variances.view(latent)
        return Posterior(shares.view(shape), means.view(latent), variances)

    @torch.no_grad()
    @without_autocast()
    def marginal(self, indices: Tensor | Sequence[int]) -> PrecisionMixture:
        """Return the mixture of some features, given in order by numbers or by a mask (d,).

        >>> mixture = PrecisionMixture(torch.ones(1), torch.tensor([[1.0, 2.0, 3.0]]),
        ...                            torch.ones(1, 3))
        >>> mixture.marginal([2, 0]).means.tolist()
        [[3.0, 1.0]]
        """
        kept = self._features(indices)
        return self.from_parameters(conditionals.marginal(self.precision_form, kept))

    @torch.no_grad()
    @without_autocast()
    def condition(
        self, indices: Tensor | Sequence[int], values: Tensor | Sequence[float]
    ) -> PrecisionMixture:
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
        return self.from_parameters(conditionals.conditional(self.precision_form, given, known))

    @torch.no_grad()
    def sample(
        self,
        sample_shape: int | Sequence[int] = (),
        component: int | None = None,
        noise: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw samples, (*sample_shape, d), from all components or from one.

        ``noise=False`` leaves out eps, as pictures of such models usually do.
        """
        return self.rsample(sample_shape, component, noise, generator)

    @without_autocast()
    def rsample(
        self,
        sample_shape: int | Sequence[int] = (),
        component: int | None = None,
        noise: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw samples, (*sample_shape, d), as ``mu_k + Lambda_k z + D_k^(1/2) eps`` of random k.

        The gradient reaches means, loadings and noise of the components that were drawn, and it is
        unbiased for these. It does not reach the weights, because k is discrete: ``has_rsample`` is
        False for this reason. Draw from each component by ``component`` and weight the results by
        ``weights`` for a gradient in all parameters.
        """
        if component is not None:
            self._check_component(component)
        shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        drawn, _ = density.sample(
            _unit_latents(self.precision_form),
            math.prod(shape),
            component=component,
            noise=noise,
            generator=generator,
        )
        return drawn.view(*shape, self.n_features)

    @torch.no_grad()
    def _repr_html_(self) -> str:
        """Show the mixture in a notebook, its components as profiles."""
        K, d, l = self.n_components, self.n_features, self.n_factors
        facts = {"components": f"{K:,}", "factors each": l, "features": f"{d:,}"}
        weights, means = (t.double().cpu().numpy() for t in (self.weights, self.means))
        return mixture_html(type(self).__name__, facts, weights, means)

    def extra_repr(self) -> str:
        """Describe the size of the mixture."""
        K, d, l = self.n_components, self.n_features, self.n_factors
        return f"n_components={K}, n_features={d}, n_factors={l}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert the tensors, but keep at least float32."""
        super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def _check_component(self, k: int) -> None:
        if not 0 <= k < self.n_components:
            raise InputError(f"component must lie between 0 and {self.n_components - 1}, not {k}.")

    def _flatten_rows(
        self, x: Tensor | ArrayLike, missing: Mask
    ) -> tuple[RowBlock, tuple[int, ...]]:
        """Return rows (n, d), without gaps if there are none, and the shape (..., K)."""
        try:
            if not isinstance(x, Tensor):
                x = torch.as_tensor(np.asarray(x), **like_tensor(self.means))
            if missing is not None and missing is not False and not isinstance(missing, Tensor):
                missing = torch.as_tensor(np.asarray(missing), device=self.means.device)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"x must be rows of numbers, as a tensor or array: {error}."
            ) from error
        if x.shape[-1:] != self.event_shape:
            raise InputError(
                f"x must have the shape (..., {self.n_features}), not {tuple(x.shape)}: the mixture"
                f" has n_features={self.n_features}."
            )
        if missing is None:
            missing = x.isnan()
            missing = missing if missing.any() else False
        rows, shape = x.reshape(-1, self.n_features), (*x.shape[:-1], self.n_components)
        form = self.precision_form
        prepared = PreparedMixture(form, exact=form.means.dtype == torch.float64)
        if missing is False:
            return RowBlock(prepared, rows), shape
        if missing.dtype != torch.bool or missing.shape != x.shape:
            raise InputError(f"missing must be booleans of the shape of x, {tuple(x.shape)}.")
        return RowBlock(prepared, rows, missing.reshape(rows.shape)), shape

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


class TrainableMixture(PrecisionMixture):
    """A mixture whose parameters may take any real values, as an optimiser needs.

    ``PrecisionMixture.trainable`` makes it. Its parameters have no units, so a learning rate
    suits data in any units. With the mean ``centre`` and the deviation ``scale``
    (d,) of each feature in the first mixture, which are buffers:

    - ``mu = centre + scale * scaled_means``, (K, d);
    - ``D = noise_floor + scale^2 exp(log_noise)``, (K, d), with a buffer ``noise_floor`` (d,);
    - ``scaled_loadings``, (K, d, l), are ``D^(-1/2) Lambda``, shortened slightly where M would have
      an eigenvalue near zero;
    - ``logits``, (K,).
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "logits": constraints.real_vector,
        "scaled_means": constraints.real,
        "log_noise": constraints.real,
        "scaled_loadings": constraints.real,
    }
    centre: Tensor
    scale: Tensor
    noise_floor: Tensor

    @torch.no_grad()
    def __init__(self, mixture: PrecisionMixture, noise_floor: float) -> None:
        self._begin(mixture.means)
        logits, mu, E, Gamma, M = mixture.precision_form
        self.register_buffer("centre", mixture.mean)
        self.register_buffer("scale", mixture.stddev)
        self.register_buffer("noise_floor", noise_floor * mixture.variance)
        noise = (E * self.scale.square()).reciprocal() - noise_floor
        # The inverse of ``_convert_scaled``, for columns of Gamma that are orthogonal.
        lengths = (M - MIN_EIGENVALUE).clamp(min=MIN_EIGENVALUE).rsqrt()
        self.logits = nn.Parameter(logits.clone())
        self.scaled_means = nn.Parameter((mu - self.centre) / self.scale)
        self.log_noise = nn.Parameter(noise.clamp(min=noise_floor).log())
        self.scaled_loadings = nn.Parameter(Gamma * E.rsqrt().unsqueeze(-1) * lengths.unsqueeze(1))

    @property
    def n_factors(self) -> int:
        """l."""
        return self.scaled_loadings.shape[2]

    @property
    @without_autocast()
    def precision_form(self) -> Parameters:
        """All parameters as one tuple, in precision form and with a diagonal M."""
        D = self.noise_floor + self.scale.square() * self.log_noise.exp()
        return _convert_scaled(self.logits, self.means, self.scaled_loadings, D, MIN_EIGENVALUE)

    def fixed(self) -> PrecisionMixture:
        """Copy the mixture as it is now, without gradients."""
        return self.from_parameters(Parameters(*(t.detach().clone() for t in self.precision_form)))

    @property
    def means(self) -> Tensor:  # type: ignore[override]  # computed here, stored there
        """Mu, (K, d)."""
        return self.centre + self.scale * self.scaled_means

    @property
    def precision_diag(self) -> Tensor:  # type: ignore[override]  # computed here, stored there
        """E, (K, d)."""
        return self.precision_form.precision_diag

    @property
    def precision_factors(self) -> Tensor:  # type: ignore[override]  # computed here, stored there
        """Gamma, (K, d, l)."""
        return self.precision_form.precision_factors


def _convert_scaled(
    logits: Tensor, means: Tensor, V: Tensor, D: Tensor, min_eigenvalue: float = 0.0
) -> Parameters:
    """Convert scaled loadings ``V = D^(-1/2) Lambda``, (K, d, l), into precision form.

    ``[V; I] = Q R`` gives ``R'R = I + V'V``, and the upper part of Q, ``V R^-1``, is
    ``E^(-1/2) Gamma`` up to a rotation. It exists for every V. Multiplied by
    ``(1 - min_eigenvalue)^(1/2)``, it leaves M without smaller eigenvalues.
    """
    K, d, l = V.shape
    precise = V.to(parameters.precise_dtype(V.device))
    identity = torch.eye(l, **like_tensor(precise)).expand(K, l, l)
    W = torch.linalg.qr(torch.cat([precise, identity], dim=1)).Q[:, :d]
    Gamma = math.sqrt(1 - min_eigenvalue) * D.rsqrt().unsqueeze(-1) * W
    return _rotate_factors(logits, means, D.reciprocal(), Gamma)


def _rotate_factors(logits: Tensor, means: Tensor, E: Tensor, Gamma: Tensor) -> Parameters:
    """Rotate Gamma, which may be wider than E, so that M is diagonal with its smallest first.

    The rotation is a constant to autograd: densities do not depend on it, and the derivative of
    eigenvectors does not exist where eigenvalues are equal.
    """
    with torch.no_grad():
        O = torch.linalg.eigh(latent_matrix(E, Gamma)).eigenvectors
    Gamma = factor_major((Gamma @ O.to(Gamma.dtype)).to(E.dtype))
    return Parameters(logits, means, E, Gamma, parameters.latent_variances(E, Gamma))


def _unit_latents(form: Parameters) -> Parameters:
    """Return parameters with the same loadings and M = I, which have the right derivatives.

    ``Lambda = E^-1 Gamma L^-T`` of ``M = L L'``: at a diagonal M these are the loadings of
    ``parameters.loadings``, but with the derivatives of M off the diagonal too.
    """
    E, Gamma, M = form[2:]
    L, failed = torch.linalg.cholesky_ex(latent_matrix(E, Gamma))
    # Rounding can leave a strong factor with an M that is positive on its diagonal alone.
    L = torch.where(failed.view(-1, 1, 1) > 0, M.sqrt().diag_embed().to(L), L)
    Gamma = torch.linalg.solve_triangular(L.to(Gamma.dtype), Gamma.mT, upper=False).mT
    return form._replace(precision_factors=Gamma, latent_variances=torch.ones_like(M))


@torch.no_grad()
def _check_definite(E: Tensor, Gamma: Tensor) -> None:
    share = torch.linalg.eigvalsh(Gamma.mT @ (Gamma / E.unsqueeze(-1)))
    if not (share < 1).all():
        raise InputError(
            "precision_factors are too large for precision_diag: E - Gamma Gamma' must be positive"
            " definite; scale the factors down."
        )


def _floating_means(means: Tensor) -> Tensor:
    means = torch.as_tensor(means)
    if means.ndim != 2:
        raise InputError(f"means must have the shape (K, d), not {tuple(means.shape)}.")
    if not means.is_floating_point():
        return means.to(torch.get_default_dtype())
    return means.float() if means.dtype.itemsize < 4 else means


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
