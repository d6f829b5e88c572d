"""What a trained mixture shows: its parameters, and how it was trained.

What a trained mixture can do: score, assign, encode, decode and sample.

How an estimator looks in a notebook.

The scikit-learn face of a mixture of factor analyzers: a density estimator and transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn import get_config
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    DensityMixin,
    TransformerMixin,
)
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import density, inspection
from factormix.core.arrays import Workspace
from factormix.core.density import Operands, Posterior
from factormix.core.missing import ObservedOperands, observed_joint, observed_posterior
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import (
    Parameters,
    effective_factors,
    loadings,
    noise_variances,
    precise_dtype,
)
from factormix.core.screening import BestComponents
from factormix.data.checks import check_absolute_weights, check_finite, ensure_finite_rows
from factormix.data.features import Features, describe_features
from factormix.data.sources.base import Rows, Source, count_weighted_rows
from factormix.data.sources.convert import as_rows, as_source
from factormix.data.sources.streams import PeekedSource
from factormix.data.units import Scaling
from factormix.defaults import CANDIDATES, DTYPE, MESH, N_COMPONENTS, N_INIT, SCALING, SOLVER
from factormix.errors import InputError
from factormix.estimators.explanation import ExplainedMixture
from factormix.estimators.fitting import (
    SCALE_ROWS,
    Prepared,
    Shared,
    begun,
    check_first_columns,
    prepared,
    processes_of,
    resumed,
    trained,
)
from factormix.estimators.imputation import CompletingMixture
from factormix.estimators.storage import StoredMixture
from factormix.estimators.validation import (
    Array,
    as_tensor,
    check_count,
    check_enough_for_scale,
    check_options,
    check_rows,
    check_seed,
    check_source,
    factors_for,
    kind_of,
    like_input,
    remember_features,
    weighed,
)
from factormix.notebook import mixture_html
from factormix.training.callbacks import Progress
from factormix.training.distributed.components import n_components
from factormix.training.distributed.processes import ALONE, Processes
from factormix.training.evaluation import (
    divided_mean,
    divided_scores,
    evaluate,
    joint_log_prob_of,
    mean_log_likelihood,
    observed_joint_of,
    with_missing_volume,
)
from factormix.training.loop import stream
from factormix.training.run import Following, Record, Run
from factormix.training.screens import few_of
from factormix.training.serialization import FittedState
from factormix.training.solvers import Solver, resolve
from factormix.training.solvers.base import check_length
from factormix.training.threads import team

__all__ = ["MFA", "DisplayedMixture", "FittedAttributes", "FittedMixture", "Progress"]


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
        return inspection.n_free_parameters(n_components(run.problem.processes, here), d, l)

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


OfRows = Callable[[Tensor, Operands, Workspace], Sequence[Tensor]]
OfPartialRows = Callable[[Tensor, Tensor, ObservedOperands], Sequence[Tensor]]
OfFew = Callable[[BestComponents], Sequence[Tensor]]


class FittedMixture(FittedAttributes, ClassNamePrefixFeaturesOutMixin, TransformerMixin):
    """The half of an estimator that needs a trained model and does not change it."""

    random_state: int | np.random.RandomState | None
    candidates: int | str | None
    image_shape_: tuple[int, ...] | None
    """Shape of the training rows as images; None if they were not images."""

    def score_samples(self, X: Array | Rows, *, exact: bool = False) -> Any:
        """Compute the log-likelihood of each row of X (n, d), shape (n,).

        Where there are very many components, each row is evaluated against ``candidates`` of them,
        as are all scores, components and codes of the estimator; ``exact=True`` takes all.
        """
        scores, _ = self._scores_and_components(X, exact=exact)
        return like_input(self._in_data_units(scores), X)

    def score_and_predict(self, X: Array | Rows) -> tuple[Any, Any]:
        """Return ``score_samples(X)`` and ``predict(X)``, both (n,), from one evaluation."""
        scores, best = self._scores_and_components(X)
        return like_input(self._in_data_units(scores), X), like_input(best, X)

    def score(self, X: Array | Rows, y: object = None, sample_weight: Array | None = None) -> float:
        """Compute the mean log-likelihood of the rows of X (n, d), by their weights (n,)."""
        check_is_fitted(self)
        return self._mean_log_likelihood(check_rows(self, X, sample_weight))

    def predict(self, X: Array | Rows) -> Any:
        """Return the most probable component of each row of X (n, d), shape (n,)."""
        _, best = self._scores_and_components(X)
        return like_input(best, X)

    def predict_proba(self, X: Array | Rows) -> Any:
        """Compute ``p(k | x)`` for the rows of X (n, d), shape (n, K)."""
        (shares,) = self._each(
            X,
            lambda *block: [density.responsibilities(*block)],
            lambda *block: [torch.softmax(observed_joint(*block), dim=1)],
        )
        return like_input(shares, X)

    def transform(self, X: Array | Rows) -> Any:
        """Compute the latent posterior mean of the most probable component, (n, l).

        ``posterior`` gives it for every component; ``predict`` tells the component of each row.
        """
        check_is_fitted(self)
        M = self._run.parameters.latent_variances
        (codes,) = self._each(
            X,
            lambda *block: [_best_code(density.posterior(*block))],
            lambda *block: [_best_code(observed_posterior(*block))],
            # z is M^(1/2) Y.
            lambda found: [found.Y * M[found.component].sqrt()],
        )
        return like_input(codes, X)

    def posterior(self, X: Array | Rows) -> Posterior:
        """Compute ``p(k | x)`` (n, K), latent posterior means (n, K, l) and variances (K, l).

        Where X has missing values, variances differ from row to row: (n, K, l).
        """
        rows = self._checked(X)
        if getattr(rows, "complete", False) or check_finite(rows):
            probabilities, means = self._each(X, lambda *block: density.posterior(*block)[:2])
            variances = self._run.parameters.latent_variances.clone()
        else:
            probabilities, means, variances = self._each(X, _posterior_of_each, observed_posterior)
        return Posterior(*(like_input(t, X) for t in (probabilities, means, variances)))

    def inverse_transform(self, Z: Array, components: Array | None = None) -> Any:
        """Compute ``mu_k + Lambda_k z``, (n, d), from latent codes Z (n, l).

        ``components`` (n,) tells the component of each code, as ``predict`` does; it may be left
        out when there is only one component.
        """
        check_is_fitted(self)
        parameters = self._fitted()
        K, _, l = parameters.shape
        z = as_tensor(Z, "Z")
        if z.ndim != 2 or z.shape[1] != l:
            raise InputError(
                f"Z must have the shape (n, {l}), as transform gives, not {tuple(z.shape)}."
            )
        if components is None and K > 1:
            raise InputError(
                "inverse_transform needs components, the component of each code: give"
                " components=model.predict(X)."
            )
        k = (
            torch.zeros(len(z)).long()
            if components is None
            else as_tensor(components, "components")
        )
        if k.shape != (len(z),) or k.is_floating_point() or not ((k >= 0) & (k < K)).all():
            raise InputError(
                f"components must be {len(z)} whole numbers between 0 and {K - 1}, one for each"
                " code."
            )
        device = parameters.means.device
        return like_input(
            density.decode(parameters, z.to(parameters.means), k.to(device).long()), Z
        )

    def sample(
        self, n_samples: int = 1, component: int | None = None, noise: bool = True
    ) -> tuple[Any, Any]:
        """Draw samples (n, d) and the component of each (n,).

        ``component`` draws from that one only; ``noise=False`` leaves out the noise term. Two
        calls give the same samples when ``random_state`` is an integer.
        """
        check_is_fitted(self)
        n = check_count(n_samples, "n_samples", 1)
        parameters = self._fitted()
        K = parameters.shape[0]
        if component is not None and check_count(component, "component", 0) >= K:
            raise InputError(f"component must lie between 0 and {K - 1}, not {component}.")
        generator = torch.Generator(parameters.means.device)
        generator.manual_seed(check_seed(self.random_state))
        drawn, components = density.sample(
            parameters, n, component=component, noise=noise, generator=generator
        )
        return self._returned(drawn), self._returned(components)

    def bic(self, X: Array | Rows) -> float:
        """Compute the Bayesian information criterion on X (n, d); lower is better."""
        rows = self._checked(X)
        n = count_weighted_rows(rows)
        return inspection.bic(n * self._mean_log_likelihood(rows), self.n_parameters_, n)

    def aic(self, X: Array | Rows) -> float:
        """Compute the Akaike information criterion on X (n, d); lower is better."""
        rows = self._checked(X)
        log_likelihood = count_weighted_rows(rows) * self._mean_log_likelihood(rows)
        return inspection.aic(log_likelihood, self.n_parameters_)

    def icl(self, X: Array | Rows) -> float:
        """Compute the integrated complete likelihood on X (n, d) as a criterion; lower is better.

        It is ``bic`` plus twice the entropy of the assignments of rows to components.
        """
        rows = self._checked(X)
        entropy = inspection.assignment_entropy
        (entropies,) = self._each(
            X,
            lambda *block: [entropy(density.joint_log_prob(*block))],
            lambda *block: [entropy(observed_joint(*block))],
        )
        weights = getattr(rows, "weights", None)
        mean = float(np.average(entropies.cpu().double().numpy(), weights=weights))
        n, level = count_weighted_rows(rows), self._mean_log_likelihood(rows)
        return inspection.icl(n * level, n * mean, self.n_parameters_, n)

    @property
    def _n_features_out(self) -> int:
        return self.n_factors_

    def _checked(self, X: Array | Rows) -> Rows:
        check_is_fitted(self)
        return check_rows(self, X)

    def _in_data_units(self, scores: Tensor) -> Tensor:
        return scores.to(precise_dtype(scores.device)) - self._run.units.log_volume

    def _each(
        self,
        X: Array | Rows,
        function: OfRows,
        partial: OfPartialRows | None = None,
        of_few: OfFew | None = None,
    ) -> list[Tensor]:
        """Compute functions (B, ...) of each block of X (n, d), and join each to (n, ...).

        ``partial`` computes the same for rows with missing entries, and ``of_few`` of what few of
        very many components say, where that is enough.
        """
        rows, first, whole, run = self._checked(X), 0, list[Tensor](), self._whole_run()
        few = None if of_few is None else few_of(run, self.candidates)
        with team() as threads:
            for _, parts in evaluate(
                threads,
                run.parameters,
                run.units,
                rows,
                function,
                partial,
                search=few,
                of_best=of_few,
            ):
                # Small parts kept until the end would scatter over the memory and bind it.
                whole = whole or [part.new_empty(rows.n_rows, *part.shape[1:]) for part in parts]
                last = first + len(parts[0])
                for result, part in zip(whole, parts, strict=True):
                    result[first:last] = part
                first = last
        return whole

    def _scores_and_components(self, X: Array | Rows, *, exact: bool = False) -> list[Tensor]:
        """Compute ``log p(x)`` in working units and the most probable component, (n,) both."""
        check_is_fitted(self)
        run = self._run
        if run.problem.processes.divided:
            scored = divided_scores(
                run.problem.processes, run.parameters, run.units, self._checked(X)
            )
            scores, best, _ = zip(*scored, strict=True)
            return [torch.cat(scores), torch.cat(best)]
        return self._each(X, *self._scores_and_best(), None if exact else lambda found: found[:2])

    def _scores_and_best(self) -> tuple[OfRows, OfPartialRows]:
        """Return what computes ``log p(x)``, (B,), and the most probable component, (B,).

        For rows with missing entries, the volume of their units is put right.
        """
        check_is_fitted(self)
        joint_log_prob = joint_log_prob_of(self._run.parameters)
        partial_joint = observed_joint_of(self._run.parameters)
        units = self._run.units

        def of_block(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
            joint = joint_log_prob(x, ops, work)
            return density.log_normaliser(joint)[0], joint.argmax(dim=1)

        def of_partial(x: Tensor, missing: Tensor, ops: ObservedOperands) -> Sequence[Tensor]:
            joint = partial_joint(x, missing, ops)
            scores = density.log_normaliser(joint)[0]
            return with_missing_volume(scores, missing, units), joint.argmax(dim=1)

        return of_block, of_partial

    def _mean_log_likelihood(self, rows: Rows) -> float:
        run = self._run
        if run.problem.processes.divided:
            return divided_mean(run.problem.processes, run.parameters, run.units, rows)
        few = few_of(run, self.candidates)
        return mean_log_likelihood(run.parameters, run.units, rows, few)


def _best_code(posterior: Posterior) -> Tensor:
    """Take the latent posterior mean of each row's most probable component, (B, l)."""
    probabilities, means, _ = posterior
    rows = torch.arange(len(means), device=means.device)
    return means[rows, probabilities.argmax(dim=1)]


def _posterior_of_each(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
    """Compute the latent posterior with variances for each row, (B, K, l)."""
    probabilities, means, variances = density.posterior(x, ops, work)
    return probabilities, means, variances.expand_as(means)


class DisplayedMixture:
    """Show a trained mixture as pictures of its components, above scikit-learn's own view.

    scikit-learn's ``set_config(display="text")`` holds here too.
    """

    def _repr_html_inner(self) -> str:
        """Return HTML for whoever asks for ``_repr_html_``."""
        usual: str = super()._repr_html_inner()  # type: ignore[misc]
        return _pictures(self) + usual

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """Return text and HTML, as Jupyter asks for them."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**options)  # type: ignore[misc]
        if get_config()["display"] == "diagram":
            bundle["text/html"] = _pictures(self) + bundle["text/html"]
        return bundle


def _pictures(model: Any) -> str:
    """Describe a model that is trained; nothing for one that is not."""
    if not model.__sklearn_is_fitted__():
        return ""
    weights, means = (np.asarray(a, np.float64) for a in (model.weights_, model.means_))
    facts = {
        "components": f"{len(weights):,}",
        "factors each": model.n_factors_,
        "features": f"{means.shape[1]:,}",
        "steps": f"{model.n_steps_:,}",
    }
    return mixture_html(type(model).__name__, facts, weights, means, model.image_shape_)


class MFA(
    StoredMixture,
    CompletingMixture,
    FittedMixture,
    ExplainedMixture,
    DisplayedMixture,
    DensityMixin,
    BaseEstimator,
):
    """Mixture of factor analyzers, trained from a stream of batches and random initial values.

    Parameters
    ----------
    n_components : int
        K, the number of mixture components. The default solver begins ``fit`` with more than K, or
        with fewer if K is large: a run that is stopped within its first batches shows these.
    n_factors : int or None
        l, the latent dimensions of each component, fewer than there are features; 0 is the
        diagonal Gaussian mixture. None takes 4, or one less than there are features.
    solver : str or solver object
        How to train: ``"natural"``, ``"sgd"`` (the paper's procedure), ``"em"``, or an object of
        ``factormix.solvers`` with options of its own.
    max_precision : float or None
        Upper bound on the diagonal precisions E, in units of the data: ``1 / max_precision`` is
        the smallest noise variance. The paper uses 20 for images in [0, 1]. None takes it
        from the data, for each feature: from how finely its values are resolved, or, with
        ``"sgd"``, from its spread.
    batch_size : int or None
        Rows per step. None leaves it to the solver.
    max_epochs : int or None
        Most passes over the data in ``fit``. None leaves it to the solver.
    n_init : int
        Random starts that are tried for a few steps on the first rows; the best one goes on. The
        solver ``"sgd"`` always makes one start.
    random_state : int, RandomState or None
        Seed of the initial values and of the order of the rows.
    device : str, torch.device or None
        Where to compute. None: where a torch tensor given to ``fit`` lies, else the CPU.
    dtype : str or torch.dtype
        ``"float32"`` or ``"float64"``.
    verbose : int
        1 shows a progress bar.
    callbacks : sequence of callables
        Each is called with a ``Progress`` about twice a second while ``fit`` runs and when it
        ends, and ends it by returning True.
    scaling : {"global", "feature"} or None
        How training standardises the data; results are in units of the data in every case.
        ``"global"`` subtracts the mean and divides by one number, ``"feature"`` by one number per
        feature, and None trains on the data as it is, as the paper does with images in [0, 1].

    candidates : int, "auto" or None
        Components that each row is evaluated against on average, in training (solver
        ``"natural"``) and in scoring. A screen ranks all of them by their marginals on a few
        directions, and blocks of near rows evaluate the best. ``"auto"`` does so for mixtures so
        large that it pays, and raises the number while rows lose more than 0.00025 nats per feature
        by it, or lowers it again where they lose less than a twentieth of that; what they lose is
        estimated on a few rows that are evaluated in full, ``screening_loss`` in ``history_``.
        None always evaluates all.

    mesh : {"auto", "data", "components"}, (int, int), DeviceMesh or None
        How the processes that ``torchrun`` has started divide the work of ``fit``. ``"data"``: each
        has a share of the rows of every batch. ``"components"``: each has some of the components,
        so that none need hold the whole model. Two numbers: so many processes along the data times
        so many along the components. A ``torch.distributed`` DeviceMesh has these two names for its
        axes. ``"auto"`` is ``"data"`` where there are several processes; None is this process
        alone.

    Attributes
    ----------
    weights_ : array (K,)
    means_ : array (K, d)
    precision_diag_ : array (K, d)
    precision_factors_ : array (K, d, l)
    loadings_ : array (K, d, l)
    noise_variances_ : array (K, d)
    mixture_ : PrecisionMixture
        All of these as a torch module, in units of the data and in float64.
    n_factors_ : int
        l, the number of factors that are used.
    effective_factors_ : array (K,)
        How many of its factors each component makes use of, ``sum_j (1 - M_jj)``. Far below l
        everywhere, l is larger than the data needs.
    n_parameters_ : int
        The number of free parameters, as ``bic``, ``aic`` and ``icl`` count them.
    solver_ : solver object
        The solver that trained the model, with its options.
    n_iter_ : int
        Passes over the data that were begun; steps for a stream.
    n_steps_, n_samples_seen_ : int
    planned_epochs_ : int or None
        Passes over the data that were planned; None for a stream.
    finished_ : bool
        Whether nothing is left of them for ``resume``.
    converged_ : bool
        Whether the solver's own criterion was met.
    seconds_ : float
        Time that the training has taken.
    history_ : list of dict
        Epoch, step, seconds, mean log-likelihood of the batches before learning them, components
        in use and the solver's quantities, in the order of training.
    n_features_in_ : int
    feature_names_in_ : array (d,)
        Names of the columns, where the rows of the training had them: those of a data frame or a
        file. Other rows with the same names have their columns put in this order.
    image_shape_ : tuple or None
        (height, width) or (height, width, 3) where the rows of the training were images.
    notes_ : dict
        Your own JSON-ready remarks, which ``save`` writes and ``load`` reads.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from factormix import MFA
    >>> X = load_digits().data
    >>> model = MFA(n_components=4, n_factors=2, max_epochs=5, random_state=0).fit(X)
    >>> model.score_samples(X).shape, model.transform(X).shape
    ((1797,), (1797, 2))
    """

    def __init__(
        self,
        n_components: int = N_COMPONENTS,
        n_factors: int | None = None,
        *,
        solver: str | Solver[Any] = SOLVER,
        max_precision: float | None = None,
        batch_size: int | None = None,
        max_epochs: int | None = None,
        n_init: int = N_INIT,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = DTYPE,
        verbose: int = 0,
        callbacks: Sequence[Callable[[Progress], object]] = (),
        scaling: Scaling = SCALING,
        candidates: int | Literal["auto"] | None = CANDIDATES,
        mesh: Any = MESH,
    ) -> None:
        self.n_components = n_components
        self.n_factors = n_factors
        self.solver = solver
        self.max_precision = max_precision
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.n_init = n_init
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose
        self.callbacks = callbacks
        self.scaling = scaling
        self.candidates = candidates
        self.mesh = mesh

    @team()
    def fit(self, X: Array | Rows, y: object = None, sample_weight: Array | None = None) -> Self:
        """Train from random initial values on the rows of X (n, d), of which NaN is missing.

        ``sample_weight`` (n,) says how much each row counts; only the proportions matter, and rows
        of weight zero are left out. Ctrl-C ends training after the step under way with
        KeyboardInterrupt; the estimator then holds the model so far, and ``resume`` goes on from
        there.
        """
        processes = processes_of(self, X)
        rows = processes.together(lambda: as_rows(X, sample_weight))
        return self._fit(X, rows, processes=processes)

    def _fit(
        self,
        X: Array | Rows,
        rows: Rows,
        shared: Shared | None = None,
        processes: Processes = ALONE,
    ) -> Self:
        """Train on rows that come from X, with units of their own or those of other mixtures."""
        start = prepared(self, rows, shared, processes)
        assert start.rows is not None
        self._begin(X, describe_features(start.rows), start, processes)
        return self._train(start.rows)

    def fit_predict(
        self, X: Array | Rows, y: object = None, sample_weight: Array | None = None
    ) -> Any:
        """Train on the rows of X (n, d) and return the most probable component of each, (n,)."""
        return self.fit(X, y, sample_weight).predict(X)

    @team()
    def resume(self, X: Array | Rows, sample_weight: Array | None = None) -> Self:
        """Go on with a ``fit`` that was interrupted, or saved before its end.

        X and ``sample_weight`` must be those that ``fit`` was given.
        """
        self._check_can_learn()
        return self._train(resumed(self, X, sample_weight))

    @team()
    def partial_fit(
        self, X: Array | Source, y: object = None, sample_weight: Array | None = None
    ) -> Self:
        """Take one step per batch of X (n, d), going on from the model so far.

        The first call begins from random values and sets the working units from its rows: give it a
        hundred or more. Scoring works between any two calls. ``sample_weight`` (n,) is taken as it
        is, unlike in ``fit``: a row of weight two counts as two rows, one of weight zero as none.

        X may also be a generator of tables, of whatever length, whose values are checked batch by
        batch; if one of them is wrong, what came before it has been learned.
        """
        return self._learn(X, X, sample_weight)

    def _learn(
        self,
        X: Array | Source,
        source: Array | Source,
        sample_weight: Array | None = None,
        shared: Shared | None = None,
    ) -> Self:
        """Learn from a source that comes from X, in units of its own or those of others."""
        if hasattr(self, "_run"):
            self._check_can_learn()
            source = check_source(self, source, sample_weight)
        else:
            check_options(self)
            check_length(resolve(self.solver), None)
            source = self._begin_stream(X, as_source(source, sample_weight), shared)
        stream(self._run, source)
        return self

    def _begin_stream(self, X: Array | Source, source: Source, shared: Shared | None) -> Source:
        """Begin with the first rows of a source, and return what serves all of them."""
        factors_for(self.n_factors, source.n_features)
        sets_scale = shared is None and (self.scaling is not None or self.max_precision is None)
        size, features = resolve(self.solver).default_batch_size(None), describe_features(source)
        if isinstance(source, Rows):
            source = weighed(source, check_absolute_weights)
            n_rows = count_weighted_rows(source)
            if sets_scale:
                check_enough_for_scale(source, n_rows)
            source, size = ensure_finite_rows(source), min(size, max(100, n_rows))
        size = int(self.batch_size or size)
        peeked = PeekedSource(source, size, SCALE_ROWS)
        if sets_scale:
            check_enough_for_scale(peeked, len(peeked.first))
        if shared is None:
            check_first_columns(source, peeked.first)
        units = shared or Shared.estimate(self, peeked.first)
        start = Prepared(None, units, check_seed(self.random_state), size)
        self._begin(X, features, start)
        if shared is None:
            self._run.following = Following.begin(peeked.first, self.scaling, self.max_precision)
        return peeked

    def _begin(
        self,
        X: Array | Source,
        features: Features,
        start: Prepared,
        processes: Processes = ALONE,
    ) -> None:
        """Replace the model by a random one, in given units and bounds."""
        run = processes.together(lambda: begun(self, X, features, start, processes))
        remember_features(self, features)
        self._returns = kind_of(X)
        self._run = run

    def _train(self, rows: Rows) -> Self:
        trained(self, self._run, rows)
        return self

    def _check_can_learn(self) -> None:
        check_is_fitted(self)
        if isinstance(self._run.state, FittedState):
            raise InputError(
                "this model was saved without its training state and cannot go on learning: save it"
                " with training_state=True."
            )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.allow_nan = True
        return tags
