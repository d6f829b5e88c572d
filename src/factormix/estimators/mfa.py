"""The scikit-learn face of a mixture of factor analyzers: a density estimator and transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils.validation import check_is_fitted

from factormix.data.sources import (
    Features,
    Peeked,
    Rows,
    Source,
    as_rows,
    as_source,
    checked_rows,
    count_used,
    features_of,
)
from factormix.data.units import Scaling
from factormix.data.weights import absolute_weights
from factormix.defaults import CANDIDATES, DTYPE, MESH, N_COMPONENTS, N_INIT, SCALING, SOLVER
from factormix.errors import InputError
from factormix.estimators.completing import CompletingMixture
from factormix.estimators.display import DisplayedMixture
from factormix.estimators.explaining import ExplainedMixture
from factormix.estimators.fitted import FittedMixture
from factormix.estimators.models import StoredMixture
from factormix.estimators.options import check_options, factors_for
from factormix.estimators.running import Prepared, begun, prepared, processes_of, resumed, trained
from factormix.estimators.sharing import SCALE_ROWS, Shared, check_first_columns
from factormix.estimators.validation import (
    Array,
    check_enough_for_scale,
    check_seed,
    check_source,
    kind_of,
    remember_features,
    weighed,
)
from factormix.training.callbacks import Progress
from factormix.training.checkpoints import FittedState
from factormix.training.following import Following
from factormix.training.loop import stream
from factormix.training.processes import ALONE, Processes
from factormix.training.solvers import Solver, resolve
from factormix.training.solvers.base import check_length
from factormix.training.threads import team

__all__ = ["MFA", "Progress"]


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
        self._begin(X, features_of(start.rows), start, processes)
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
        size, features = resolve(self.solver).default_batch_size(None), features_of(source)
        if isinstance(source, Rows):
            source = weighed(source, absolute_weights)
            n_rows = count_used(source)
            if sets_scale:
                check_enough_for_scale(source, n_rows)
            source, size = checked_rows(source), min(size, max(100, n_rows))
        size = int(self.batch_size or size)
        peeked = Peeked(source, size, SCALE_ROWS)
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
