"""``MFA``: a mixture of factor analyzers as a scikit-learn estimator.

The class trains, scores, encodes, samples, explains, imputes and is saved. Its methods check their
input and call functions of ``core``, ``training`` and the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import get_config
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, DensityMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import attribution, density, inspection
from factormix.core.density import Posterior
from factormix.core.missing import RowBlock
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import (
    Parameters,
    covariances,
    effective_factors,
    loadings,
    noise_variances,
    precise_dtype,
)
from factormix.core.ranks import count_ranks
from factormix.core.screening import BestComponents
from factormix.data.batches import Batch
from factormix.data.checks import check_finite, ensure_finite_rows
from factormix.data.columns import to_float64
from factormix.data.features import describe_features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, Source, count_weighted_rows
from factormix.data.sources.convert import as_rows, as_source
from factormix.data.units import Scaling, Units
from factormix.defaults import CANDIDATES, DTYPE, MESH, N_INIT, NOISE, SCALING, SOLVER
from factormix.errors import InputError
from factormix.estimators.alerts import (
    HELD_OUT_ROWS,
    KEPT_BYTES,
    check_rate,
    complete_scores,
    find_threshold,
    keep_scores,
    predict_held_out,
)
from factormix.estimators.explanation import Explanation, explain_rows
from factormix.estimators.fitting import (
    WorkingScale,
    continue_fit,
    count_training_rows,
    draw_sample,
    is_trained_on,
    prepare_resume,
    start_fit,
    start_stream,
    train_run,
)
from factormix.estimators.imputation import ColumnChoice, ImputingModel, number_columns
from factormix.estimators.storage import Settings, Tensors, name_solver
from factormix.estimators.validation import (
    Array,
    check_count,
    check_device,
    check_options,
    check_rows,
    check_seed,
    check_source,
    fitted_features,
    join_results,
    like_input,
    output_kind,
    set_features_,
    to_finite_tensor,
    warn_of_few_rows,
)
from factormix.notebook import mixture_html
from factormix.training.callbacks import Progress
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.distributed.mesh import join_mesh
from factormix.training.evaluation import (
    add_missing_volume,
    evaluate,
    mean_log_likelihood,
    score_on_ranks,
)
from factormix.training.loop import train_on_stream
from factormix.training.run import Run, last_pass
from factormix.training.serialization import FittedState, pack_run, unpack_run
from factormix.training.solvers import Solver, resolve
from factormix.training.solvers.base import check_length
from factormix.training.threads import use_threads

MATRIX_ELEMENTS = 1 << 27
"""Maximum number of elements of ``covariances_`` or ``precisions_``: 1 GiB in float64, which an
ordinary machine can still hold beside a copy."""


def _of_run(function: Callable[[Run], Any]) -> Any:
    """Return a property of an estimator: a function of its run."""
    return property(lambda model: function(model._fitted_run()))


def _of_components(function: Callable[[Parameters], Tensor]) -> Any:
    """Return a property of an estimator: a function of its parameters that has no units."""
    return property(lambda model: model._output(function(model._whole_run().parameters)))


def _of_mixture(function: Callable[[Parameters], Tensor], *, factors: bool = True) -> Any:
    """Return a property of an estimator: a function of its parameters in units of the data."""
    return property(lambda model: model._output(function(model._data_parameters(factors=factors))))


def _of_matrices(function: Callable[[Parameters], Tensor]) -> Any:
    """Return a property of an estimator: a function of its parameters with the shape (K, d, d)."""

    def compute(model: MFA) -> Any:
        K, d, _ = model._whole_run().parameters.shape
        if K * d * d > MATRIX_ELEMENTS:
            raise InputError(
                f"{K:,} matrices of {d:,} x {d:,} would take {K * d * d * 8 / 2**30:.3g} GiB: use"
                " loadings_ and noise_variances_, or precision_diag_ and precision_factors_."
            )
        return model._output(function(model._data_parameters()))

    return property(compute)


@dataclass(eq=False, repr=False)
class TrainingOptions(BaseEstimator):
    """Options of ``MFA`` that an estimator of several mixtures passes on to each of them."""

    _: KW_ONLY
    solver: str | Solver[Any] = SOLVER
    max_precision: float | None = None
    batch_size: int | None = None
    max_epochs: int | None = None
    n_init: int = N_INIT
    random_state: int | np.random.RandomState | None = None
    device: str | torch.device | None = None
    dtype: str | torch.dtype = DTYPE
    scaling: Scaling = SCALING
    noise: Literal["component", "tied", "isotropic"] = NOISE

    def set_params(self, **params: Any) -> Self:
        """Set options; ``solver__tol`` and the like set options of the solver."""
        prefix = "solver__"
        own = {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}
        super().set_params(**{n: v for n, v in params.items() if not n.startswith(prefix)})
        if own:
            # A copy, because a model that was trained by this solver keeps it.
            solver: Any = resolve(self.solver)
            self.solver = solver.set_params(**own)
        return self


@dataclass(eq=False, repr=False)
class MFA(TrainingOptions, ClassNamePrefixFeaturesOutMixin, DensityMixin, ImputingModel):
    """Mixture of factor analyzers, trained from a stream of batches and random initial values.

    Parameters
    ----------
    n_components : int or None
        K, the number of mixture components. None takes one for every hundred rows, at most 25, and
        25 on a stream; ``select`` looks for the best number. The default solver begins ``fit`` with
        more than K components, or with fewer if K is large, and a run stopped in its first batches
        keeps them.
    n_factors : int, "auto" or None
        l, the number of factors (latent dimensions) of each component, below the number of
        features; 0 is the diagonal Gaussian mixture. None takes 8, or one less than the number of
        features. ``"auto"`` lets each component keep the factors that its rows support, ``ranks_``
        of them (solvers ``"natural"`` and ``"em"``). Time and files then follow the sum of the
        ranks, and the parameters in memory the highest of them.
    max_factors : int or None
        Largest number of factors of a component with ``n_factors="auto"``; None takes 32, or one
        less than the number of features. It bounds memory: every component begins with this many
        factors, and later has room for as many as the component of the highest rank.
    solver : str or solver object
        How to train: ``"natural"``, ``"covariance"`` (for few features with many factors),
        ``"em"``, ``"sgd"`` (the paper's procedure), or an object of ``factormix.solvers`` with
        options of its own.
    max_precision : float or None
        Upper bound on the diagonal precisions E, in units of the data: ``1 / max_precision`` is
        the smallest noise variance. The paper uses 20 for images in [0, 1]. None takes a bound
        from the data for each feature: from how finely its values are resolved or, with
        ``"sgd"``, from its variance.
    batch_size : int or None
        Rows per step. None leaves it to the solver.
    max_epochs : int or None
        Maximum number of passes over the data in ``fit``. None leaves it to the solver.
    n_init : int
        Number of random starts that are tried for a few steps on the first rows; the best one goes
        on. The solver ``"sgd"`` always makes one start.
    random_state : int, RandomState or None
        Seed of the initial values and of the order of the rows.
    device : str, torch.device or None
        Where to compute. None takes the device of a torch tensor given to ``fit``, else the CPU.
    dtype : str or torch.dtype
        ``"float32"`` or ``"float64"``.
    verbose : int
        1 shows a progress bar.
    callbacks : sequence of callables
        Each is called with a ``Progress`` about twice a second while ``fit`` runs and once at its
        end. A callback that returns True ends the training.
    scaling : {"global", "feature"} or None
        How training standardises the data; results are in units of the data in every case.
        ``"global"`` subtracts the mean and divides by one number, ``"feature"`` by one number per
        feature, and None trains on the data as it is, as the paper does with images in [0, 1].
    noise : {"component", "tied", "isotropic"}
        Which noise variances are equal. ``"component"``: each component has one for each feature.
        ``"tied"``: all components share one for each feature, which suits few rows per component,
        and a measurement noise that is the same everywhere. ``"isotropic"``: each component has one
        for all features, in the units of the training: with ``scaling="feature"``, noise is the
        same share of each feature's standard deviation. All features then get the largest of their
        noise floors. Not for the solver ``"covariance"``.
    candidates : int, "auto" or None
        Number of components that each row is evaluated against, in training (solver ``"natural"``)
        and in scoring. A screen ranks all components for each row by their marginals along a few
        directions. ``"auto"`` does this in training, for mixtures so large that it pays, with the
        fewest candidates that cost rows at most 0.2% of the mixture's gain over one Gaussian. The
        loss is estimated on a few rows that are evaluated in full: ``screening_loss`` in
        ``history_``. Scores then still use all components, because rows unlike the training data
        lose more. None always evaluates all components.
    mesh : {"auto", "data", "components"}, (int, int), DeviceMesh or None
        How the processes that ``torchrun`` has started divide the work of ``fit``. ``"data"``: each
        process has a share of the rows of every batch. ``"components"``: each has some of the
        components, so that none needs to hold the whole model. Two numbers: the number of processes
        along the data and along the components. A ``torch.distributed`` DeviceMesh has these two
        names for its axes. ``"auto"`` is ``"data"`` if there are several processes; None is this
        process alone.
    means_init : array (K, d) or None
        Where the means begin, in units of the data; the rows nearest to each give its variances and
        weight. There are K components from the start, and ``n_init`` has no effect.
        None begins at random.
    warm_start : bool
        Whether another call of ``fit`` continues from the model so far: ``max_epochs`` more passes,
        over the same rows or others, in the same working units. Rates and schedules go on too.

    Attributes
    ----------
    weights_, means_ : arrays (K,) and (K, d)
        The weights pi and means mu of the components.
    precision_diag_, precision_factors_ : arrays (K, d) and (K, d, l)
        E and Gamma: the precision matrix of component k is ``diag(E_k) - Gamma_k Gamma_k^T``.
    loadings_, noise_variances_ : arrays (K, d, l) and (K, d)
        Lambda and D: its covariance matrix is ``Lambda_k Lambda_k^T + diag(D_k)``.
    covariances_, precisions_ : arrays (K, d, d)
        The same two matrices in full, computed at every access; up to 2**27 numbers.
    mixture_ : PrecisionMixture
        All of these as a torch module, in units of the data and in float64.
    n_components_ : int
        K, the number of components.
    n_factors_ : int
        l, the number of factors of each component; with ``n_factors="auto"``, the highest rank.
    ranks_ : array (K,)
        The number of factors of each component. Columns of ``loadings_`` beyond it are zero.
    effective_factors_ : array (K,)
        The effective number of factors of each component, ``sum_j (1 - M_jj)``. If it is far below
        l everywhere, l is larger than the data needs.
    n_parameters_ : int
        The number of free parameters, as ``bic``, ``aic`` and ``icl`` count them.
    solver_ : solver object
        The solver that trained the model, with its options.
    n_iter_ : int
        Number of passes over the data, the last one perhaps incomplete; steps for a stream.
    n_rows_trained_ : int
        Number of training rows, each counted once.
    n_steps_, n_samples_seen_ : int
        Number of steps, and of rows learned, counted in every pass.
    batch_size_ : int
        Rows per step.
    position_ : int
        Number of rows taken from the last ``factormix.stream``, where the next may start.
    planned_epochs_ : int or None
        Planned number of passes over the data; None for a stream.
    finished_ : bool
        Whether the planned passes are done, so that ``resume`` has nothing to do.
    converged_ : bool
        Whether the solver's own criterion was met.
    lower_bound_ : float
        Mean log-likelihood of the rows in the last pass, each batch before it was learned; on a
        stream, of the last batch.
    seconds_ : float
        Duration of the training.
    held_out_scores_ : array (m,)
        Log-likelihoods of rows that the model has not learned, for ``alert_threshold``. ``fit``
        predicts them from at most 2,048 of its rows, ``calibrate`` and ``stream`` measure them.
    history_ : list of dict
        Epoch, step, seconds, mean log-likelihood of the batches before learning them, components
        in use and the solver's quantities, in the order of training.
    n_features_in_ : int
    feature_names_in_ : array (d,)
        Names of the columns, if the training rows came from a data frame or a file that has names.
        The columns of other rows with the same names are put in this order.
    image_shape_ : tuple or None
        (height, width) or (height, width, 3) if the training rows were images.
    notes_ : dict
        Your own JSON-ready notes, which ``save`` writes and ``load`` reads.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from factormix import MFA
    >>> X = load_digits().data
    >>> model = MFA(n_components=4, n_factors=2, max_epochs=5, random_state=0).fit(X)
    >>> model.score_samples(X).shape, model.transform(X).shape
    ((1797,), (1797, 2))
    """

    n_components: int | None = None
    n_factors: int | Literal["auto"] | None = None
    _: KW_ONLY
    max_factors: int | None = None
    verbose: int = 0
    callbacks: Sequence[Callable[[Progress], object]] = ()
    candidates: int | Literal["auto"] | None = CANDIDATES
    mesh: Any = MESH
    means_init: Array | None = None
    warm_start: bool = False

    notes_: dict[str, Any] = field(init=False)
    _run: Run = field(init=False)
    _output_kind: str = field(init=False)
    """Kind of fitted quantities: "torch", or the name of a NumPy dtype."""
    _unsaved = ("device", "solver", "callbacks", "mesh", "means_init")

    @use_threads()
    def fit(self, X: Array | Rows, y: object = None, sample_weight: Array | None = None) -> Self:
        """Train from random initial values on the rows of X (n, d); NaN is a missing value.

        ``sample_weight`` (n,) gives each row a weight. Only the proportions matter, and rows of
        weight zero are left out. Ctrl-C ends the training after the current step with
        KeyboardInterrupt; the estimator then holds the model so far, and ``resume`` continues.
        """
        options = check_options(self)
        communicator = join_mesh(options.mesh, options.device_for(X))
        if self.warm_start and hasattr(self, "_run"):
            self._check_can_learn()
            rows = communicator.run_together(lambda: check_rows(self, X, sample_weight))
            return self._train(*continue_fit(options, self._run, rows, communicator))
        rows = communicator.run_together(lambda: as_rows(X, sample_weight))
        if communicator.is_first:
            warn_of_few_rows(options, rows)
        return self._fit_rows(X, rows, communicator=communicator)

    def _fit_rows(
        self,
        X: Array | Rows,
        rows: Rows,
        scale: WorkingScale | None = None,
        communicator: Communicator = SINGLE,
    ) -> Self:
        """Train on rows made from X, in the given scale or in their own."""
        options = check_options(self)
        rows, sample, run = start_fit(options, options.device_for(X), rows, scale, communicator)
        self._set_run(X, rows, run)
        return self._train(rows, sample)

    def _train(self, rows: Rows, sample: Batch) -> Self:
        """Take the remaining steps, and keep a sample of the rows for their scores.

        Most models never need these scores, so they are computed later if the sample is small.
        """
        run = self._run
        train_run(self, run, rows)
        if run.problem.communicator.has_all_components:
            values = sample.rows[:HELD_OUT_ROWS]
            small = values.nbytes <= KEPT_BYTES
            if small:
                # A copy, because a part of the sample would keep all of it in memory.
                values = values.clone() if isinstance(values, Tensor) else values.copy()
            run.unscored = values, count_weighted_rows(rows)
            if not small:
                self._predict_held_out()
        return self

    def fit_predict(
        self, X: Array | Rows, y: object = None, sample_weight: Array | None = None
    ) -> Any:
        """Train on the rows of X (n, d) and return the most probable component of each, (n,)."""
        return self.fit(X, y, sample_weight).predict(X)

    @use_threads()
    def resume(self, X: Array | Rows, sample_weight: Array | None = None) -> Self:
        """Continue a ``fit`` that was interrupted, or saved before its end.

        X and ``sample_weight`` must be the same as in ``fit``.
        """
        self._check_can_learn()
        return self._train(*prepare_resume(self, self._run, X, sample_weight))

    @use_threads()
    def partial_fit(
        self, X: Array | Source, y: object = None, sample_weight: Array | None = None
    ) -> Self:
        """Take one step per batch of X (n, d), starting from the model so far.

        The first call begins from random values and sets the working units from its rows: give it a
        hundred or more. Scoring works between any two calls. Unlike in ``fit``, ``sample_weight``
        (n,) is absolute: a row of weight two counts as two rows, one of weight zero as none.

        X may also be a generator of tables of any length. Its values are checked batch by batch; if
        one is wrong, the batches before it have been learned.
        """
        return self._learn(X, X, sample_weight)

    def _learn(
        self,
        X: Array | Source,
        source: Array | Source,
        sample_weight: Array | None = None,
        scale: WorkingScale | None = None,
    ) -> Self:
        """Learn from a source made from X, in the given scale or the scale of its first rows."""
        if hasattr(self, "_run"):
            self._check_can_learn()
            source = check_source(self, source, sample_weight)
        else:
            options = check_options(self)
            check_length(options.solver, None)
            given = as_source(source, sample_weight)
            source, run = start_stream(options, options.device_for(X), given, scale)
            self._set_run(X, given, run)
        train_on_stream(self._run, source)
        return self

    def _set_run(self, X: Array | Source, source: Source, run: Run) -> None:
        """Replace the model by a run that starts on a source made from X."""
        set_features_(self, describe_features(source))
        self._output_kind, self._run = output_kind(X), run

    def _check_can_learn(self) -> None:
        check_is_fitted(self)
        self._predict_held_out()
        if isinstance(self._run.state, FittedState):
            raise InputError(
                "this model was saved without its training state and cannot go on learning: save it"
                " with training_state=True."
            )

    def score_samples(self, X: Array | Rows, *, exact: bool = False) -> Any:
        """Compute the log-likelihood of each row of X (n, d), shape (n,).

        In very large mixtures, each row is evaluated against ``candidates`` components, as in all
        scores, assignments and codes of the estimator; ``exact=True`` evaluates all components.
        """
        scores, _ = self._score_and_assign(self._check_rows(X), exact=exact)
        return like_input(scores, X)

    def leave_one_out_scores(self, X: Array | Rows) -> Any:
        """Compute log-likelihoods of training rows X (n, d) as if each had been left out, (n,).

        A gross error among the training rows may have a component of its own, and then a high
        likelihood. Here each component is taken without the row, from its parameters alone, and a
        component of one row does not count. Two equal gross errors that share a component still
        support each other. X holds rows of weight one that the model was trained on, some or all.
        All components are evaluated.

        Examples
        --------
        >>> import numpy as np
        >>> from factormix import MFA
        >>> X = np.random.default_rng(0).normal(1980, 20, size=(300, 2))
        >>> X[7, 1] = 20190
        >>> model = MFA(5, 1, random_state=0).fit(X)
        >>> model.score_samples(X).argmin() == 7, model.leave_one_out_scores(X).argmin() == 7
        (np.False_, np.True_)
        """
        rows, run = self._check_rows(X), self._whole_run()
        n, units = self.n_rows_trained_, run.units

        def of_block(block: RowBlock) -> Sequence[Tensor]:
            left = density.leave_one_out(
                block.joint(), block.peaks(), block.ops.log_weights, n, block.n_observed
            )
            return [add_missing_volume(left.logsumexp(dim=1), block.missing, units)]

        (scores,) = self._evaluate(rows, of_block)
        return like_input(scores.to(precise_dtype(scores.device)) - units.log_volume, X)

    def is_trained_on(self, X: Array | Rows) -> bool:
        """Return whether X holds exactly the rows of ``fit``, unweighted and in their order."""
        return is_trained_on(self._whole_run(), self._check_rows(X))

    def score_and_predict(self, X: Array | Rows) -> tuple[Any, Any]:
        """Return ``score_samples(X)`` and ``predict(X)``, both (n,), from one evaluation."""
        scores, best = self._score_and_assign(self._check_rows(X))
        return like_input(scores, X), like_input(best, X)

    def score(self, X: Array | Rows, y: object = None, sample_weight: Array | None = None) -> float:
        """Compute the mean log-likelihood of the rows of X (n, d), weighted by (n,) weights."""
        return self._mean_log_likelihood(self._check_rows(X, sample_weight))

    def predict(self, X: Array | Rows) -> Any:
        """Return the most probable component of each row of X (n, d), shape (n,)."""
        _, best = self._score_and_assign(self._check_rows(X))
        return like_input(best, X)

    def predict_proba(self, X: Array | Rows) -> Any:
        """Compute ``p(k | x)`` for the rows of X (n, d), shape (n, K)."""
        (shares,) = self._evaluate(
            self._check_rows(X), lambda block: [torch.softmax(block.joint(), dim=1)]
        )
        return like_input(shares, X)

    def transform(self, X: Array | Rows) -> Any:
        """Compute the latent posterior mean of the most probable component, (n, l).

        ``predict`` returns that component for each row, and ``posterior`` the means of all.
        """
        rows = self._check_rows(X)
        M = self._run.parameters.latent_variances
        (codes,) = self._evaluate(
            rows,
            lambda block: [_best_code(block.posterior())],
            # z is M^(1/2) Y.
            lambda found: [found.Y * M[found.component].sqrt()],
        )
        return like_input(codes, X)

    def posterior(self, X: Array | Rows) -> Posterior:
        """Compute ``p(k | x)`` (n, K), latent posterior means (n, K, l) and variances (K, l).

        If X has missing values, variances differ from row to row: (n, K, l).
        """
        rows = self._check_rows(X)
        if getattr(rows, "complete", False) or check_finite(rows):
            probabilities, means = self._evaluate(rows, lambda block: block.posterior()[:2])
            variances = self._run.parameters.latent_variances.clone()
        else:
            probabilities, means, variances = self._evaluate(rows, _posterior_of_each)
        return Posterior(*(like_input(t, X) for t in (probabilities, means, variances)))

    def inverse_transform(self, Z: Array, components: Array | None = None) -> Any:
        """Compute ``mu_k + Lambda_k z``, (n, d), from latent codes Z (n, l).

        ``components`` (n,) is the component of each code, as ``predict`` returns it; a mixture of
        one component does not need it.
        """
        check_is_fitted(self)
        parameters = self._data_parameters()
        K, _, l = parameters.shape
        z = to_finite_tensor(Z, "Z")
        if z.ndim != 2 or z.shape[1] != l:
            raise InputError(
                f"Z must have the shape (n, {l}), as transform gives, not {tuple(z.shape)}."
            )
        if components is None and K > 1:
            raise InputError(
                "inverse_transform needs components, the component of each code: give"
                " components=model.predict(X)."
            )
        k = torch.zeros(len(z)).long()
        if components is not None:
            k = to_finite_tensor(components, "components")
        if k.shape != (len(z),) or k.is_floating_point() or not ((k >= 0) & (k < K)).all():
            raise InputError(
                f"components must be {len(z)} whole numbers between 0 and {K - 1}, one for each"
                " code."
            )
        device = parameters.means.device
        decoded = density.decode(parameters, z.to(parameters.means), k.to(device).long())
        return like_input(decoded, Z)

    def sample(
        self,
        n_samples: int = 1,
        component: int | None = None,
        noise: bool = True,
        *,
        rounded: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> tuple[Any, Any]:
        """Draw samples (n, d) and return them with the component of each (n,).

        ``component`` draws from that component only; ``noise=False`` leaves out the noise term.
        ``rounded=True`` rounds columns that had only whole numbers, and keeps them within the range
        of the training rows.
        ``random_state`` replaces the estimator's own; two calls give the same samples when it is
        an integer.
        """
        check_is_fitted(self)
        n = check_count(n_samples, "n_samples", 1)
        parameters = self._data_parameters()
        K = parameters.shape[0]
        if component is not None and check_count(component, "component", 0) >= K:
            raise InputError(f"component must lie between 0 and {K - 1}, not {component}.")
        generator = torch.Generator(parameters.means.device)
        seed = self.random_state if random_state is None else random_state
        generator.manual_seed(check_seed(seed))
        drawn, components = density.sample(
            parameters, n, component=component, noise=noise, generator=generator
        )
        ranges = self._run.whole_ranges
        if rounded and ranges is not None:
            low, high = ranges.to(drawn)
            drawn = torch.where(low.isnan(), drawn, drawn.round().clamp(low, high))
        return self._output(drawn), self._output(components)

    def calibrate(self, X: Array | Rows) -> Self:
        """Base alerts on the scores of rows X (n, d) that the model has not learned."""
        rows = ensure_finite_rows(self._check_rows(X))
        run = self._whole_run()
        sample = draw_sample(rows, run.problem.seed).rows[:HELD_OUT_ROWS]
        scores, best = self._score_and_assign(ArrayRows(sample))
        keep_scores(run, complete_scores(run, sample, scores, best))
        return self

    def alert_threshold(self, rate: float = 0.001) -> float:
        """Return the log-likelihood below which a share ``rate`` of ordinary new rows lies.

        It comes from ``held_out_scores_`` and hardly depends on the lowest of them, because they
        may be faults. It is for complete rows; ``stream(model, source, alert=rate)`` also compares
        rows with missing entries.
        """
        check_rate(rate, "rate")
        check_is_fitted(self)
        if not len(self.held_out_scores_):
            raise InputError(
                "this model has no held-out scores, from which the threshold of alerts comes: let"
                " its training end, or call calibrate in Python with rows that it has not learned."
            )
        return find_threshold(self.held_out_scores_, rate)

    def bic(self, X: Array | Rows) -> float:
        """Compute the Bayesian information criterion on X (n, d); lower is better."""
        log_likelihood, n = self._log_likelihood(self._check_rows(X))
        return inspection.bic(log_likelihood, self.n_parameters_, n)

    def aic(self, X: Array | Rows) -> float:
        """Compute the Akaike information criterion on X (n, d); lower is better."""
        log_likelihood, _ = self._log_likelihood(self._check_rows(X))
        return inspection.aic(log_likelihood, self.n_parameters_)

    def icl(self, X: Array | Rows) -> float:
        """Compute the integrated complete likelihood on X (n, d) as a criterion; lower is better.

        It is ``bic`` plus twice the entropy of the assignments of rows to components.
        """
        rows = self._check_rows(X)
        (entropies,) = self._evaluate(
            rows, lambda block: [inspection.assignment_entropy(block.joint())]
        )
        weights = getattr(rows, "weights", None)
        mean = float(np.average(entropies.cpu().double().numpy(), weights=weights))
        log_likelihood, n = self._log_likelihood(rows)
        return inspection.icl(log_likelihood, n * mean, self.n_parameters_, n)

    def explain(self, X: Array | Rows, scoring: str = "log_likelihood") -> Explanation:
        """Explain which features make each row of X (n, d) likely or unlikely.

        ``scoring`` is ``"log_likelihood"``, ``"best_component"`` (the log-likelihood of the most
        probable component), ``"mahalanobis"`` (minus the squared distance to that component) or
        ``"reconstruction"`` (minus the squared length of the part that its factors cannot express,
        in units of its noise). The contributions of a row sum to its score. Expected values come
        from the whole mixture, given all other features of the row, and deviations include the
        uncertainty of a component's parameters. A component of a single training row does not
        count: that row is explained by the others.
        """
        rows, run = self._check_rows(X), self._whole_run()
        return explain_rows(run, rows, fitted_features(self), scoring, self.n_rows_trained_)

    def marginal(self, columns: ColumnChoice) -> PrecisionMixture:
        """Return the density of some features, by number, name or mask, in units of the data."""
        check_is_fitted(self)
        return self.mixture_.marginal(self._number_columns(columns))

    def condition(self, columns: ColumnChoice, values: Array) -> PrecisionMixture:
        """Return the density of all other features, in their order, given some at values (q,).

        Features are given by number, name or mask; values and the result are in units of the data.
        ``impute`` gives the conditional mean, deviation and draws for many rows at once.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from factormix import MFA
        >>> X = load_iris().data
        >>> model = MFA(3, 2, random_state=0).fit(X)
        >>> petals = model.condition([0, 1], [5.0, 3.5])  # of a flower with such sepals
        >>> petals.n_features, petals.sample(100).shape
        (2, torch.Size([100, 2]))
        """
        check_is_fitted(self)
        known = torch.from_numpy(np.atleast_1d(np.asarray(values, dtype=np.float64)))
        return self.mixture_.condition(self._number_columns(columns), known)

    def _number_columns(self, columns: ColumnChoice) -> Tensor:
        return number_columns(columns, [str(n) for n in getattr(self, "feature_names_in_", ())])

    def _imputing_mixtures(self) -> tuple[Sequence[Parameters], Units]:
        return [self._run.parameters], self._run.units

    weights_ = _of_mixture(lambda p: p.log_weights.exp(), factors=False)
    means_ = _of_mixture(lambda p: p.means, factors=False)
    precision_diag_ = _of_mixture(lambda p: p.precision_diag, factors=False)
    precision_factors_ = _of_mixture(lambda p: p.precision_factors)
    loadings_ = _of_mixture(loadings)
    noise_variances_ = _of_mixture(lambda p: noise_variances(p.precision_diag), factors=False)
    covariances_ = _of_matrices(covariances)
    precisions_ = _of_matrices(lambda p: density.precision_matrices(*p[2:4]))

    @property
    def mixture_(self) -> PrecisionMixture:
        """The density as a torch module in units of the data.

        It is in float64 if the device has it, because these units may need its digits;
        ``.float()`` gives a module that is twice as fast.
        """
        return PrecisionMixture.from_parameters(
            Parameters(*(t.clone() for t in self._data_parameters()))
        )

    @property
    def n_parameters_(self) -> int:
        """The number of free parameters."""
        run = self._fitted_run()
        components = run.problem.communicator.components
        here, d, l = run.parameters.shape
        n = inspection.n_free_parameters(components.count(here), d, l, run.problem.noise)
        if run.problem.choose_ranks:
            ranks = count_ranks(run.parameters)
            off = inspection.n_loadings(d, l) - inspection.n_loadings(d, ranks)
            n -= int(components.sum(off.sum()))
        return n

    effective_factors_ = _of_components(effective_factors)
    ranks_ = _of_components(count_ranks)
    n_factors_ = _of_run(lambda run: run.parameters.shape[2])
    n_iter_ = _of_run(lambda run: run.steps if run.problem.epochs is None else run.passes)
    n_rows_trained_ = _of_run(count_training_rows)
    lower_bound_ = _of_run(last_pass)
    solver_ = _of_run(attrgetter("plan.solver"))
    n_components_ = _of_run(attrgetter("problem.n_components"))
    n_steps_ = _of_run(attrgetter("steps"))
    n_samples_seen_ = _of_run(attrgetter("samples"))
    batch_size_ = _of_run(attrgetter("batch_size"))
    planned_epochs_ = _of_run(attrgetter("problem.epochs"))
    finished_ = _of_run(attrgetter("finished"))
    converged_ = _of_run(attrgetter("converged"))
    seconds_ = _of_run(attrgetter("seconds"))
    history_ = _of_run(attrgetter("history"))
    position_ = _of_run(attrgetter("position"))
    _n_features_out = n_factors_

    @property
    def held_out_scores_(self) -> NDArray[np.float64]:
        """Log-likelihoods of rows that the model has not learned, (m,)."""
        self._predict_held_out()
        return np.array(self._run.held_out_scores)

    def _fitted_run(self) -> Run:
        if not hasattr(self, "_run"):
            raise AttributeError(f"this {type(self).__name__} is not fitted yet: call fit first.")
        return self._run

    def _whole_run(self) -> Run:
        """Return the run, if this process has all components of the mixture."""
        run = self._fitted_run()
        if not run.problem.communicator.has_all_components:
            raise InputError(
                "this process has only some of the components, and only score, predict and save"
                " work in all processes together: save the model, and load it in one process."
            )
        return run

    def _data_parameters(self, *, factors: bool = True) -> Parameters:
        """Return the mixture in units of the data.

        ``factors=False`` leaves out the factors, which are most of the memory: l = 0.
        """
        run = self._whole_run()
        parameters = run.parameters
        if not factors:
            parameters = parameters._replace(
                precision_factors=parameters.precision_factors[..., :0],
                latent_variances=parameters.latent_variances[..., :0],
            )
        return run.units.to_data(parameters)

    def _output(self, values: Tensor) -> Any:
        """Return a fitted quantity in the kind of the training data."""
        if self._output_kind == "torch":
            dtype = self._run.parameters.means.dtype
            return values.to(dtype) if values.is_floating_point() else values
        array = values.cpu().numpy()
        return array.astype(self._output_kind, copy=False) if array.dtype.kind == "f" else array

    def _score_and_assign(self, rows: Rows, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Compute ``log p(x)`` in units of the data and the most probable component, (n,) both."""
        run = self._run
        units, communicator = run.units, run.problem.communicator
        if not communicator.has_all_components:
            blocks = score_on_ranks(communicator, run.parameters, units, rows)
            scores, best, _ = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        else:

            def of_block(block: RowBlock) -> Sequence[Tensor]:
                joint = block.joint()
                scores = density.log_normaliser(joint)[0]
                return add_missing_volume(scores, block.missing, units), joint.argmax(dim=1)

            of_best = None if exact else lambda found: found[:2]
            scores, best = self._evaluate(rows, of_block, of_best)
        return scores.to(precise_dtype(scores.device)) - units.log_volume, best

    def _log_likelihood(self, rows: Rows) -> tuple[float, int]:
        """Return the sum over the rows of positive weight, and their number."""
        n = count_weighted_rows(rows)
        return n * self._mean_log_likelihood(rows), n

    @use_threads()
    def _predict_held_out(self) -> None:
        """Predict the scores of kept training rows, as if these had been held out."""
        run = self._fitted_run()
        if run.unscored is None:
            return
        values, n_rows = run.unscored
        rows = ArrayRows(values)
        scores, best = self._score_and_assign(rows)
        (nearness,) = self._evaluate(rows, lambda block: [attribution.score("mahalanobis", block)])
        ranks = count_ranks(run.parameters).cpu()
        predicted = predict_held_out(
            complete_scores(run, values, scores, best),
            -nearness.cpu().double().numpy(),
            best.cpu().numpy(),
            run.parameters.log_weights.exp().cpu().double().numpy(),
            n_rows * float(1 - to_float64(values).isnan().double().mean()),
            len(run.units.offset),
            ranks[best.cpu()].numpy() if run.problem.choose_ranks else run.parameters.shape[2],
        )
        keep_scores(run, predicted)

    def _mean_log_likelihood(self, rows: Rows) -> float:
        run = self._run
        communicator, search = run.problem.communicator, run.search_candidates(self.candidates)
        return mean_log_likelihood(run.parameters, run.units, rows, search, communicator)

    def _evaluate(
        self,
        rows: Rows,
        function: Callable[[RowBlock], Sequence[Tensor]],
        of_best: Callable[[BestComponents], Sequence[Tensor]] | None = None,
    ) -> list[Tensor]:
        """Compute functions (B, ...) of each block of rows (n, d), and join each to (n, ...).

        ``of_best`` computes the same from the best-ranked components only, if the mixture is very
        large.
        """
        run = self._whole_run()
        search = None if of_best is None else run.search_candidates(self.candidates)
        with use_threads() as threads:
            blocks = evaluate(
                threads, run.parameters, run.units, rows, function, search=search, of_best=of_best
            )
            return join_results((parts for _, parts in blocks), rows.n_rows)

    @property
    def _communicator(self) -> Communicator:
        return self._run.problem.communicator

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        self._predict_held_out()
        tensors, run = pack_run(self._run, training_state=training_state)
        return tensors, {
            "returns": self._output_kind,
            "notes": getattr(self, "notes_", {}),
            "run": run,
        }

    def _unpack_(self, tensors: Tensors, settings: Settings) -> int:
        self._run = unpack_run(tensors, settings["run"], check_device(self.device))
        self.solver = name_solver(self._run.plan.solver)
        self._output_kind = settings["returns"]
        self.notes_ = dict(settings["notes"])
        return self._run.parameters.shape[1]

    def _repr_html_inner(self) -> str:
        """Return pictures of the components above scikit-learn's own view."""
        usual: str = super()._repr_html_inner()
        return self._pictures() + usual

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """Return text and HTML for Jupyter; ``set_config(display="text")`` leaves out the HTML."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**options)
        if get_config()["display"] == "diagram":
            bundle["text/html"] = self._pictures() + bundle["text/html"]
        return bundle

    def _pictures(self) -> str:
        if not hasattr(self, "_run"):
            return ""
        weights, means = (np.asarray(a, np.float64) for a in (self.weights_, self.means_))
        facts = {
            "components": f"{len(weights):,}",
            "factors each": self.n_factors_,
            "features": f"{means.shape[1]:,}",
            "steps": f"{self.n_steps_:,}",
        }
        return mixture_html(type(self).__name__, facts, weights, means, self.image_shape_)


def _best_code(posterior: Posterior) -> Tensor:
    """Return the latent posterior mean of each row's most probable component, (B, l)."""
    probabilities, means, _ = posterior
    rows = torch.arange(len(means), device=means.device)
    return means[rows, probabilities.argmax(dim=1)]


def _posterior_of_each(block: RowBlock) -> Sequence[Tensor]:
    """Compute the latent posterior with the variances of each row, (B, K, l)."""
    probabilities, means, variances = block.posterior()
    return probabilities, means, variances.expand_as(means)
