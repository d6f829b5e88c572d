"""The paper's procedure: constrained stochastic gradient ascent from random values.

It maximises ``L = mean_n max_k sum_j g_kj(sigma) [log pi_j + log p_j(x_n)]`` by plain mini-batch
steps on all parameters. The kernel g couples neighbours on a torus grid, and narrows whenever L
stops rising. A row weights the components by R, the kernel's row of its best component. Gradients
are closed-form matrix products of sums over the rows of a batch.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from factormix.core.annealing import COLLAPSED, Window, smoothing_kernel, torus_distances
from factormix.core.arrays import Workspace
from factormix.core.density import joint_operands, log_normaliser, project, squared
from factormix.core.missing import (
    factor_observed,
    observed_operands,
    regression,
    row_blocks,
    sum_all_incomplete,
)
from factormix.core.parameters import (
    Parameters,
    bound_precision_,
    change_units,
    diagonalise,
    factor_major,
    from_generative,
    loadings,
    noise_variances,
    whiten_factors,
)
from factormix.data.batches import Batch
from factormix.defaults import NOISE_MODELS
from factormix.errors import InputError
from factormix.training.solvers.base import (
    Change,
    Info,
    Problem,
    SolverOptions,
    State,
    add,
    check_ranges,
)


@dataclass
class SGDState(State):
    """Everything that changes in training."""

    parameters: Parameters
    bound: Tensor
    """(d,), the bound on E."""
    kernel: Tensor
    """(K, K), the smoothing kernel of width ``sigma``."""
    window_sum: Tensor
    """Sum of the mean objective over the steps of this window, scalar."""
    window: Window
    sigma: float
    learning_rate: float
    steps: int = 0
    converged: bool = False


@dataclass(frozen=True, repr=False)
class ConstrainedSGD(SolverOptions):
    """Train by the paper's constrained SGD; every default is the paper's value.

    Parameters
    ----------
    phases : (int, int) or None
        Epochs of phase I, which moves only means and weights, and of phase II, which moves
        everything with ``phase_weight``. A run of another length keeps their proportion. With None,
        and on a stream of unknown length, there is one phase with ``precision_weight`` and
        ``factor_weight``.
    learning_rate, min_learning_rate : float
        First and last step size.
    mean_weight, precision_weight, factor_weight : float
        Factors lambda on the gradients of mu, E and Gamma in one-phase training.
    phase_weight : float
        Factor on the gradients of E and Gamma in phase II.
    logit_weight : float
        Factor on the gradient of the component weights.
    sigma, min_sigma : float or None
        First and last width of the smoothing kernel; None starts at ``0.25 sqrt(2 K)``.
    decay : float
        Factor on sigma and on the learning rate whenever the objective is stationary.
    delta, alpha : float
        The objective is compared over windows of ``1 / alpha`` steps and is stationary when its
        relative change lies between ``-2 delta`` and ``delta``.
    max_precision : float
        Bound on E if the problem has none. The estimator always sets one: the caller's in units of
        the data, or one that follows the scale of the data.
    min_eigenvalue : float
        Floor of the eigenvalues of M.
    initial_mean : float
        Means start uniformly between minus and plus this.
    initial_precision : float or None
        E starts at this; None starts at the bound.
    initial_factor : float
        Gamma starts with orthogonal columns such that ``Gamma' E^-1 Gamma`` is this times I.
    parametrisation : {"square", "linear"}
        Take gradient steps on the root of E, which keeps it positive, or on E itself.
    batch_size : int
        Rows per batch unless the estimator sets them.

    Notes
    -----
    Two safeguards act only where plain ascent would diverge: a mean moves at most as far as the
    mean of its rows, and a step changes the root of E by a factor of two at most. A factor column
    that has vanished is a stationary point. At the end of a window such columns start again from a
    small random direction.

    A step is the weighted mean over the rows of its batch. So weights count within a batch but not
    between batches: use large batches if weights differ much.
    """

    phases: tuple[int, int] | None = (15, 50)
    learning_rate: float = 0.011
    min_learning_rate: float = 0.010
    mean_weight: float = 1.0
    precision_weight: float = 0.1
    factor_weight: float = 0.1
    phase_weight: float = 1.0
    logit_weight: float = 0.5
    sigma: float | None = None
    min_sigma: float = 0.01
    decay: float = 0.9
    delta: float = 0.05
    alpha: float = 0.01
    max_precision: float = 20.0
    min_eigenvalue: float = 0.05
    initial_mean: float = 0.1
    initial_precision: float | None = None
    initial_factor: float = 1e-4
    parametrisation: Literal["square", "linear"] = "square"
    batch_size: int = 100

    name: ClassVar[str] = "sgd"
    needs_passes: ClassVar[bool] = False
    noise_models: ClassVar[tuple[str, ...]] = NOISE_MODELS
    state_type: ClassVar[type[SGDState]] = SGDState
    # Chosen, not measured: a deviation of 0.1 in working units, and steps of a run on few rows.
    default_max_precision: ClassVar[float] = 100.0
    min_steps: ClassVar[int] = 10_000

    def __post_init__(self) -> None:
        rates = ("learning_rate", "min_learning_rate", "sigma", "min_sigma", "delta", "alpha")
        weights = ("mean", "precision", "factor", "phase", "logit")
        check_ranges(
            self,
            positive=(*rates, "max_precision", "initial_precision"),
            not_negative=(*(f"{name}_weight" for name in weights), "initial_mean"),
            between=("min_eigenvalue", "initial_factor", "decay"),
            count=("batch_size",),
        )
        phases: object = self.phases
        if phases is not None and not _are_phases(phases):
            raise InputError(
                f"phases must be two whole numbers of epochs, not both 0, or None, not {phases!r}."
            )
        if self.parametrisation not in ("square", "linear"):
            raise InputError(
                f"parametrisation must be 'square' or 'linear', not {self.parametrisation!r}."
            )

    def default_batch_size(self, n_rows: int | None) -> int:
        """Return the paper's batch size."""
        return self.batch_size

    @property
    def window_steps(self) -> int:
        """Steps of a window, over which the objective is averaged."""
        return max(1, round(1 / self.alpha))

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the paper's number of epochs, or more to reach ``min_steps``."""
        epochs = sum(self.phases) if self.phases else 65
        return max(epochs, math.ceil(self.min_steps / batches_per_epoch))

    def plan(self, problem: Problem) -> SGDPlan:
        """Apply the options to a problem."""
        return SGDPlan(self, problem)


def _are_phases(value: object) -> bool:
    """Return whether a value is a pair of epoch counts, not both 0."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if any(isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in value):
        return False
    return min(value) >= 0 and sum(value) > 0


@dataclass(frozen=True)
class SGDPlan:
    """A run of the paper's procedure on a problem."""

    solver: ConstrainedSGD
    problem: Problem
    steps_by_owner: ClassVar[bool] = False
    work: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    def init(self) -> SGDState:
        """Draw means and factor directions. E starts at its bound, weights at 1/K, M close to I."""
        problem, (K, d, l), like = self.problem, self.problem.shape, self.problem.like
        generator = torch.Generator().manual_seed(problem.seed)
        means = torch.rand(K, d, generator=generator, dtype=torch.float64) * 2 - 1
        directions = torch.randn(K, d, l, generator=generator, dtype=torch.float64)
        bound = problem.bound(self.solver.max_precision)
        E = bound.expand(K, d).clone()
        if self.solver.initial_precision is not None:
            E = E.clamp(max=self.solver.initial_precision)
        columns = torch.linalg.qr(directions).Q.to(**like)
        Gamma = factor_major(columns * (E * self.solver.initial_factor).sqrt().unsqueeze(-1))
        M = torch.full((K, l), 1 - self.solver.initial_factor, **like)
        means = means * self.solver.initial_mean if problem.means is None else problem.means
        parameters = Parameters(torch.zeros(K, **like), means.to(**like), E, Gamma, M)
        sigma = 0.25 * math.sqrt(2 * K) if self.solver.sigma is None else self.solver.sigma
        if problem.means is not None:
            # A wide kernel would draw neighbours on the grid together.
            sigma = self.solver.min_sigma
        return SGDState(
            parameters=parameters,
            bound=bound,
            kernel=smoothing_kernel(torus_distances(K).to(**like), sigma),
            window_sum=torch.zeros((), **like),
            window=Window(self.solver.delta),
            sigma=sigma,
            learning_rate=self.solver.learning_rate,
        )

    @cached_property
    def centroid_steps(self) -> int:
        """Steps of phase I, which moves only means and weights; -1 for a single phase."""
        phases, problem = self.solver.phases, self.problem
        if phases is None or problem.batches_per_epoch is None or problem.epochs is None:
            return -1
        share = phases[0] / max(1, sum(phases))
        return round(share * problem.epochs) * problem.batches_per_epoch

    def settled(self, state: SGDState) -> bool:
        """Return whether precisions and factors move."""
        return state.steps > self.centroid_steps

    def begin_fit_(self, state: SGDState) -> None:
        """Go on at the last width of the kernel and the last step size."""
        state.converged = False

    def contribution(self, state: SGDState, batch: Batch) -> SGDContribution:
        """Sum the terms of the gradient over the rows of a batch."""
        x, weights = batch.tensors()
        kernel = None if state.sigma < COLLAPSED else state.kernel
        moving = state.steps >= self.centroid_steps
        if batch.missing is not None:
            return sum_incomplete_batch(state.parameters, batch, kernel, moving)
        squares = squared(x, self.work)
        joint, Y = project(x, joint_operands(state.parameters), squares, self.work)
        objective, winner = (joint if kernel is None else joint @ kernel.mT).max(dim=1)
        log_likelihood, _ = log_normaliser(joint)
        if weights is None:
            n_samples, ones = torch.full_like(state.window_sum, len(x)), torch.ones_like(objective)
        else:
            n_samples, ones = weights.sum(), weights
            objective, log_likelihood = objective * weights, log_likelihood * weights
            x, squares = x * weights.unsqueeze(1), squares * weights.unsqueeze(1)
        sums = WinnerSums(winner, ones, kernel, joint.shape[1], self.work)
        RY, RYX = sums.latent(Y, x, moving)
        return SGDContribution(
            n_samples=n_samples,
            log_likelihood=log_likelihood.sum(),
            objective=objective.sum(),
            R=sums.sum(ones.unsqueeze(1)).squeeze(1),
            RX=sums.sum(x),
            RY=RY,
            RX2=sums.sum(squares) if moving else None,
            RYX=RYX,
        )

    def update(self, state: SGDState, contribution: SGDContribution) -> tuple[SGDState, Info]:
        """Take a gradient step, restore the constraints, and narrow the kernel at stationarity."""
        c, state.steps = contribution, state.steps + 1
        # If all row weights are zero, so are all sums, and nothing moves.
        n_samples = c.n_samples.clamp(min=torch.finfo(c.n_samples.dtype).tiny)
        self._take_gradient_step(state, c, state.learning_rate / n_samples)
        state.window_sum += c.objective / n_samples
        if state.steps % self.solver.window_steps == 0:
            self._close_window(state)
        scalars = {"sigma": state.sigma, "learning_rate": state.learning_rate}
        return state, Info(c.log_likelihood / c.n_samples, scalars, state.converged, False)

    def change_units(self, state: SGDState, units: Change) -> SGDState:
        """Express a state in other working units."""
        offset, scale = (t.to(state.bound) for t in units)
        state.parameters = change_units(state.parameters, -offset / scale, 1 / scale)
        state.bound = state.bound * scale.square()
        if self.problem.noise_model.isotropic:
            self._share_noise(state)
        return state

    def _share_noise(self, state: SGDState) -> None:
        """Make noise isotropic again in new units; loadings stay."""
        parameters, noise = state.parameters, self.problem.noise_model
        state.bound = noise.pool_bound(state.bound)
        D = noise_variances(parameters.precision_diag)
        D = noise.pool(D, parameters.logits).maximum(1 / state.bound)
        found = from_generative(*parameters[:2], loadings(parameters), D)
        E, Gamma = found.precision_diag, factor_major(found.precision_factors)
        Gamma, M = diagonalise(E, Gamma, self.solver.min_eigenvalue)
        state.parameters = Parameters(*parameters[:2], E, Gamma, M)

    def _take_gradient_step(self, state: SGDState, c: SGDContribution, rate: Tensor) -> None:
        logits, mu, E, Gamma, M = state.parameters
        weights = torch.softmax(logits, dim=0)
        logits_step = (c.R - c.n_samples * weights).mul_(rate * self.solver.logit_weight)
        mu_rate = torch.minimum(rate * self.solver.mean_weight, (state.bound.max() * c.R) ** -1)
        if c.RX2 is None or c.RYX is None:
            mu.addcmul_(mean_gradient(state.parameters, c)[0], mu_rate.unsqueeze(-1))
        else:
            E_weight = Gamma_weight = self.solver.phase_weight
            if self.centroid_steps < 0:
                E_weight, Gamma_weight = self.solver.precision_weight, self.solver.factor_weight
            gradient = likelihood_gradient(state.parameters, c, self.work)
            mu.addcmul_(gradient.means, mu_rate.unsqueeze(-1))
            direction = self.problem.noise_model.pool_gradient(gradient.precision_diag)
            self._move_precision_(E, direction, rate * E_weight)
            bound_precision_(E, state.bound)
            Gamma.addcmul_(gradient.precision_factors, rate * Gamma_weight)
            Gamma, M = diagonalise(E, Gamma, self.solver.min_eigenvalue, self.work)
        state.parameters = Parameters(logits + logits_step, mu, E, Gamma, M)

    def _move_precision_(self, E: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Move E in place by its root, with ``d/d(root) = 2 root d/dE``, or by E itself."""
        if self.solver.parametrisation == "square":
            E.mul_(gradient.mul_(2 * rate).add_(1).clamp_(0.5, 2).square_())
        else:
            E.addcmul_(gradient, rate)

    def _close_window(self, state: SGDState) -> None:
        """Lower sigma and the learning rate when the window's mean objective is stationary."""
        stationary = state.window.close(state.window_sum.item() / self.solver.window_steps)
        state.window_sum.zero_()
        if stationary:
            state.sigma = max(self.solver.min_sigma, state.sigma * self.solver.decay)
            distances = torus_distances(len(state.kernel)).to(state.kernel)
            state.kernel.copy_(smoothing_kernel(distances, state.sigma))
            state.learning_rate = max(
                self.solver.min_learning_rate, state.learning_rate * self.solver.decay
            )
        state.converged = stationary and state.sigma < COLLAPSED
        if state.steps > self.centroid_steps:
            self._restart_columns(state)

    def _restart_columns(self, state: SGDState) -> None:
        """Give vanished factor columns a small random direction."""
        E, Gamma, M = state.parameters[2:]
        vanished = 0.01 * self.solver.initial_factor > 1 - M
        if not vanished.any():
            return
        generator = torch.Generator().manual_seed(self.problem.seed + state.steps)
        noise = torch.randn(Gamma.shape, generator=generator, dtype=torch.float64).to(Gamma)
        noise *= (E / E.shape[1] * self.solver.initial_factor).sqrt().unsqueeze(-1)
        Gamma, M = diagonalise(
            E, torch.where(vanished.unsqueeze(1), noise, Gamma), self.solver.min_eigenvalue
        )
        state.parameters = state.parameters._replace(precision_factors=Gamma, latent_variances=M)


class SGDContribution(NamedTuple):
    """Sums over the rows of a batch, with R the kernel row of each row's best component."""

    n_samples: Tensor
    log_likelihood: Tensor
    objective: Tensor
    R: Tensor
    """``sum R``, (K,)."""
    RX: Tensor
    """``R' X``, (K, d)."""
    RY: Tensor
    """``sum R Y``, (K, l)."""
    RX2: Tensor | None
    """``R' X^2``, (K, d); None in phase I."""
    RYX: Tensor | None
    """``(R Y)' X``, (K, l, d); None in phase I."""


class Gradient(NamedTuple):
    """Derivatives of the weighted sum of component log-likelihoods."""

    means: Tensor
    precision_diag: Tensor
    precision_factors: Tensor


@dataclass(frozen=True)
class WinnerSums:
    """Compute sums over rows weighted by R, the kernel's rows of the winning components.

    Values that do not depend on the component are summed by winner first and smoothed afterwards:
    ``R'X`` is the kernel times K sums of rows. Without a kernel, this also holds for the latent.
    """

    winner: Tensor
    """(B,)."""
    weights: Tensor
    """(B,), weights of the rows."""
    kernel: Tensor | None
    """(K, K); None where only the winner counts."""
    n_components: int
    work: Workspace

    def sum(self, values: Tensor) -> Tensor:
        """Compute ``R' values``, (K, n), for values (B, n) that include the row weights."""
        sums = self._sum_by_winner(values)
        return sums if self.kernel is None else self.kernel.mT @ sums

    def latent(self, Y: Tensor, x: Tensor, products: bool) -> tuple[Tensor, Tensor | None]:
        """Compute ``sum R Y``, (K, l), and ``(R Y)' X``, (K, l, d); x includes the row weights."""
        B, K, l = Y.shape
        if self.kernel is None:
            y = Y.gather(1, self.winner.view(B, 1, 1).expand(B, 1, l)).squeeze(1)
            RY = self._sum_by_winner(y * self.weights.unsqueeze(1))
            if not products:
                return RY, None
            RYX = x.new_empty(K, l, x.shape[1])
            for j in range(l):
                RYX[:, j] = self._sum_by_winner(x * y[:, j : j + 1])
            return RY, RYX
        R = self.kernel[self.winner].unsqueeze(-1)
        RY = torch.mul(R, Y, out=self.work.array("R Y", Y, B, K, l))
        total = (self.weights.unsqueeze(0) @ RY.view(B, K * l)).view(K, l)
        if not products:
            return total, None
        return total, (RY.view(B, K * l).mT @ x).view(K, l, x.shape[1])

    def _sum_by_winner(self, values: Tensor) -> Tensor:
        K = self.n_components
        if values.device.type == "cpu":
            return values.new_zeros(K, values.shape[1]).index_add_(0, self.winner, values)
        # On other devices the order of an indexed sum, and so its last digits, would be random.
        return torch.nn.functional.one_hot(self.winner, K).to(values).mT @ values


def sum_incomplete_batch(
    parameters: Parameters, batch: Batch, kernel: Tensor | None, moving: bool
) -> SGDContribution:
    """Sum the terms of the gradient over a batch with missing entries.

    By Fisher's identity the gradient of the marginal likelihood is the expected gradient of the
    complete rows. So these are the sums of complete rows, with expectations of missing entries.
    ``z = M^(1/2) Y`` gives Y. Without a kernel (K, K) each row counts for its winner alone.
    """
    assert batch.missing is not None
    x, weights = batch.tensors()
    weights = x.new_ones(len(x)) if weights is None else weights
    ops = observed_operands(parameters, centre=False, diagonal=True)
    Theta, root = regression(parameters), parameters.latent_variances.sqrt()
    total: SGDContribution | None = None
    for part in row_blocks(len(x), *parameters.latent_variances.shape):
        w, missing = weights[part], batch.missing[part]
        factored = factor_observed(x[part], missing, ops)
        joint = factored.log_prob + ops.ops.log_weights
        objective, winner = (joint if kernel is None else joint @ kernel.mT).max(dim=1)
        one_hot = torch.nn.functional.one_hot(winner, len(root))
        R = (one_hot if kernel is None else kernel[winner]).to(x) * w.unsqueeze(1)
        sums = sum_all_incomplete(parameters, Theta, x[part], missing, R, factored)
        A, B, S = sums.A, sums.B, sums.S
        found = SGDContribution(
            n_samples=w.sum(),
            log_likelihood=w @ log_normaliser(joint)[0],
            objective=w @ objective,
            R=A[:, 0, 0],
            RX=B[:, 0],
            RY=A[:, 0, 1:] / root,
            RX2=S if moving else None,
            RYX=B[:, 1:] / root.unsqueeze(-1) if moving else None,
        )
        total = found if total is None else add(total, found)
    assert total is not None
    return total


def mean_gradient(parameters: Parameters, c: SGDContribution) -> tuple[Tensor, Tensor]:
    """Compute ``d/dmu = E (R'X - r mu) - Gamma (sum R Y)`` and ``R'X - r mu``, both (K, d)."""
    mu, E, Gamma = parameters[1:4]
    centred = torch.addcmul(c.RX, c.R.unsqueeze(-1), mu, value=-1)
    weighted = (E * centred).unsqueeze(1)
    return weighted.baddbmm_(c.RY.unsqueeze(1), Gamma.mT, alpha=-1).squeeze(1), centred


def likelihood_gradient(
    parameters: Parameters, c: SGDContribution, work: Workspace | None = None
) -> Gradient:
    """Compute the gradient of ``sum_nk R_nk log p_k(x_n)``; consumes ``c.RX2`` and ``c.RYX``.

    ``d/dE = 1/2 (r diag Sigma - sum R xt^2)`` and ``d/dGamma = sum R xt Y' - r E^-1 Gamma M^-1``.
    """
    assert c.RX2 is not None
    assert c.RYX is not None
    mu, E, Gamma, M = parameters[1:]
    d_mu, centred = mean_gradient(parameters, c)
    r = c.R.unsqueeze(-1)
    second = c.RX2.addcmul_(mu, c.RX + centred, value=-1)
    Gamma_E = whiten_factors(Gamma, E, work)
    d_Gamma = c.RYX.addcmul_(c.RY.unsqueeze(-1), mu.unsqueeze(1), value=-1)
    d_Gamma.addcmul_(Gamma_E.mT, (r / M).unsqueeze(-1), value=-1)
    spread = (M.reciprocal().unsqueeze(1) @ Gamma_E.square_().mT).squeeze(1)
    d_E = spread.add_(E.reciprocal()).mul_(r).sub_(second).mul_(0.5)
    return Gradient(d_mu, d_E, d_Gamma.mT)
