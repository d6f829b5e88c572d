"""What a trained mixture shows: its parameters, and how it was trained."""

from __future__ import annotations

from typing import Any

from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import criteria
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, effective_factors, loadings, noise_variances
from factormix.errors import InputError
from factormix.training.loop import Record, Run
from factormix.training.placement import n_components
from factormix.training.solvers import Solver

__all__ = ["FittedAttributes"]


class FittedAttributes:
    """The attributes of an estimator that follow from its run."""

    _run: Run
    _returns: str
    """How fitted quantities are returned: "torch", or the name of a NumPy dtype."""

    @property
    def weights_(self) -> Any:
        """Pi, (K,)."""
        return self._returned(self._fitted(factors=False).log_weights.exp())

    @property
    def means_(self) -> Any:
        """Mu, (K, d)."""
        return self._returned(self._fitted(factors=False).means)

    @property
    def precision_diag_(self) -> Any:
        """E, (K, d)."""
        return self._returned(self._fitted(factors=False).precision_diag)

    @property
    def precision_factors_(self) -> Any:
        """Gamma, (K, d, l)."""
        return self._returned(self._fitted().precision_factors)

    @property
    def loadings_(self) -> Any:
        """Lambda, (K, d, l)."""
        return self._returned(loadings(self._fitted()))

    @property
    def noise_variances_(self) -> Any:
        """D, (K, d)."""
        return self._returned(noise_variances(self._fitted(factors=False).precision_diag))

    @property
    def mixture_(self) -> PrecisionMixture:
        """The density as a torch module in data units.

        In float64 where the device has it, because data units may need its digits; ``.float()``
        gives a module that is twice as fast.
        """
        return PrecisionMixture.from_parameters(Parameters(*(t.clone() for t in self._fitted())))

    @property
    def n_parameters_(self) -> int:
        """The number of free parameters."""
        run = self._fitted_run()
        here, d, l = run.parameters.shape
        return criteria.n_free_parameters(n_components(run.problem.processes, here), d, l)

    @property
    def effective_factors_(self) -> Any:
        """The effective number of factors of each component, ``sum_j (1 - M_jj)``, (K,)."""
        return self._returned(effective_factors(self._whole_run().parameters))

    @property
    def n_factors_(self) -> int:
        """l, the number of factors that are used."""
        return self._fitted_run().parameters.shape[2]

    @property
    def solver_(self) -> Solver[Any]:
        """The solver that trained the model, with its options."""
        solver: Solver[Any] = self._fitted_run().plan.solver
        return solver

    @property
    def planned_epochs_(self) -> int | None:
        """Passes over the data that were planned; None for a stream."""
        return self._fitted_run().epochs

    @property
    def finished_(self) -> bool:
        """Whether nothing is left of the planned passes."""
        return self._fitted_run().finished

    @property
    def seconds_(self) -> float:
        """Time that the training has taken."""
        return self._fitted_run().seconds

    @property
    def batch_size_(self) -> int:
        """Rows per step."""
        return self._fitted_run().batch_size

    @property
    def n_iter_(self) -> int:
        """Passes over the data that were begun; steps for a stream."""
        run = self._fitted_run()
        return run.epoch + (run.batch > 0) if run.epochs is not None else run.steps

    @property
    def n_steps_(self) -> int:
        """Steps taken."""
        return self._fitted_run().steps

    @property
    def position_(self) -> int:
        """Rows of the last ``factormix.stream`` that were taken: where it goes on."""
        check_is_fitted(self)
        return self._run.position

    @property
    def n_samples_seen_(self) -> int:
        """Rows learned from, each pass counted."""
        return self._fitted_run().samples

    @property
    def converged_(self) -> bool:
        """Whether the solver's own criterion was met."""
        return self._fitted_run().converged

    @property
    def history_(self) -> list[Record]:
        """Records of the training, oldest first."""
        return self._fitted_run().history

    def __sklearn_is_fitted__(self) -> bool:
        """Say whether there is a model."""
        return hasattr(self, "_run")

    def _fitted_run(self) -> Run:
        if not hasattr(self, "_run"):
            raise AttributeError(f"this {type(self).__name__} is not fitted yet: call fit first.")
        return self._run

    def _whole_run(self) -> Run:
        """Return the run of a mixture of which this process has all components."""
        run = self._fitted_run()
        if run.problem.processes.divided:
            raise InputError(
                "this process has some of the components only, and all processes together can"
                " score, predict and save: save the model, and load it where it is to be used."
            )
        return run

    def _fitted(self, *, factors: bool = True) -> Parameters:
        """Return the mixture in data units; without its factors, which are most of it, l = 0."""
        run = self._whole_run()
        parameters = run.parameters
        if not factors:
            parameters = parameters._replace(
                precision_factors=parameters.precision_factors[..., :0],
                latent_variances=parameters.latent_variances[..., :0],
            )
        return run.units.to_data(parameters)

    def _returned(self, values: Tensor) -> Any:
        """Return a fitted quantity the way the training data came."""
        if self._returns == "torch":
            dtype = self._run.parameters.means.dtype
            return values.to(dtype) if values.is_floating_point() else values
        array = values.cpu().numpy()
        return array.astype(self._returns, copy=False) if array.dtype.kind == "f" else array
