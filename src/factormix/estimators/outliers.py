"""``MFAOutlierDetector``: an ensemble of smooth mixtures that scores and explains outliers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import OutlierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import attribution
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, latent_variances, precise_dtype
from factormix.data.batches import Batch, join_batches
from factormix.data.checks import add_observed_rows, ensure_finite_blocks, ensure_finite_rows
from factormix.data.columns import Columns
from factormix.data.features import describe_features
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows
from factormix.data.units import Units
from factormix.defaults import DTYPE
from factormix.errors import InputError
from factormix.estimators.ensemble import (
    CONTAMINATED,
    NOVELTY,
    REFERENCE,
    Kind,
    Level,
    Member,
    Recipe,
    Reference,
    WorkingRows,
    assign_components,
    find_fence,
    measure_level,
    measure_levels,
    score_mixture,
    train_mixture,
)
from factormix.estimators.explanation import Explanation, build_explanation, check_scoring
from factormix.estimators.fitting import FitsBar, check_jobs, run_fits
from factormix.estimators.storage import Settings, StoredModel, Tensors
from factormix.estimators.validation import (
    Array,
    check_device,
    check_dtype,
    check_seed,
    fitted_features,
    join_results,
    like_input,
    set_features_,
)
from factormix.training.evaluation import FARTHEST, count_block_rows
from factormix.training.serialization import add_prefix, select_prefix
from factormix.training.solvers.base import is_number
from factormix.training.threads import use_threads

DETECTOR_SCORES = (*attribution.SCORES, "calibrated", "tail_probability")

MIN_ROWS = 4
"""Fewest rows of which some can be usual and some unusual."""
NEW_SHARE = 0.01
"""Share of clean new rows that ``contamination="auto"`` calls outliers when ``novelty=True``."""
CONSTANT_SHARE = 0.1
"""Unit of a constant column as a share of its value. With the noise of the mixtures, a change by 1
to 5% of the value is one standard deviation."""


@dataclass(eq=False, repr=False, kw_only=True)
class MFAOutlierDetector(OutlierMixin, StoredModel):
    """Outlier detection by an ensemble of mixtures of factor analyzers.

    Each column is standardised; mixtures of several kinds, with a noise floor that keeps them
    smooth, are trained on different parts of the rows. The score of a row is the mean of their
    scores, each relative to the rows that the mixture was not trained on: 0 is the median of
    ordinary rows, and lower is less usual. New rows can be scored in both modes. Missing entries
    (NaN) count as ordinary: a row is scored by its observed entries.

    Parameters
    ----------
    novelty : bool
        False: the training rows themselves may contain outliers, which must not explain
        themselves. The mixtures are trained on small draws and drop their lightest components.
        True: the training rows are clean, and outliers are looked for in new rows. The mixtures
        learn more detail, and the threshold comes from rows that they have not seen.
    contamination : float or "auto"
        The share of outliers that sets the threshold: among the training rows with
        ``novelty=False``, as elsewhere in scikit-learn; among clean new rows with
        ``novelty=True``, so that 0.01 is one false alarm in a hundred. "auto" is 0.01 with
        ``novelty=True``; else a row is an outlier when its score is more than 1.5 interquartile
        ranges below the lower quartile of ``held_out_scores_`` (Tukey's fence).
    scoring : str
        The score of each mixture: ``"log_likelihood"``; ``"best_component"``, the log-likelihood of
        the most probable component alone; ``"mahalanobis"``, the distance to it;
        ``"reconstruction"``, the part of the row that its factors cannot express;
        ``"calibrated"``, the log-likelihood relative to other rows of that component.
        ``"tail_probability"`` is the share of held-out training rows with a lower log-likelihood
        score.
    recipe : Recipe or None
        The mixtures and the rows that each is trained on. None takes the default of the mode,
        ``factormix.estimators.NOVELTY`` or ``CONTAMINATED``.
    random_state : int, RandomState or None
        Seed of the parts of the rows and of the mixtures.
    device : str, torch.device or None
        Where to compute; None is the CPU.
    dtype : str or torch.dtype
        ``"float32"`` or ``"float64"``, in which the mixtures are trained; scores are in float64.
    verbose : int
        1 shows a progress bar.
    n_jobs : int or None
        Number of mixtures that are trained at the same time, in threads; None is 1, and -1 one for
        each processor. Results are the same.

    Attributes
    ----------
    offset_ : float
        ``decision_function`` is ``score_samples`` minus this; rows below it are outliers.
    mixtures_ : list of PrecisionMixture
        In units where each column has deviation one.
    held_out_scores_ : array (m,)
        Scores of the training rows, each by the mixtures that were not trained on it. If there
        are more than ``recipe.max_rows`` rows, these are a random choice.
    n_features_in_, feature_names_in_, image_shape_
        As in ``MFA``.

    Examples
    --------
    >>> import numpy as np
    >>> from factormix import MFAOutlierDetector
    >>> X = np.random.default_rng(0).normal(size=(500, 3))
    >>> detector = MFAOutlierDetector(novelty=True, random_state=0).fit(X)
    >>> detector.predict([[0, 0, 0], [0, 9, 0]])
    array([ 1, -1])
    >>> detector.explain([[0, 9, 0]]).ranking()[0, 0].item()
    1
    """

    novelty: bool = False
    contamination: float | str = "auto"
    scoring: str = "log_likelihood"
    recipe: Recipe | None = None
    random_state: int | np.random.RandomState | None = None
    device: str | torch.device | None = None
    dtype: str | torch.dtype = DTYPE
    verbose: int = 0
    n_jobs: int | None = None

    offset_: float = field(init=False)
    held_out_scores_: NDArray[np.float64] = field(init=False)
    _units: Units = field(init=False)
    _members: list[Member] = field(init=False)
    _reference: Reference = field(init=False)

    @use_threads()
    def fit(self, X: Array | Rows, y: object = None) -> Self:
        """Learn usual rows from X (n, d), in which NaN is a missing value."""
        recipe = self._check_options()
        rows = as_rows(X)
        if rows.n_rows < MIN_ROWS:
            raise InputError(
                f"X has n_samples={rows.n_rows}, fewer than the {MIN_ROWS} rows that a detector"
                " needs: give more rows."
            )
        rows, seed = ensure_finite_rows(rows), check_seed(self.random_state)
        most = recipe.max_rows
        if rows.n_rows <= most:
            drawn = join_batches(list(rows.blocks(most)))
        else:
            drawn = next(rows.shuffled(most, seed=seed, epoch=0))
        sample = add_observed_rows(rows, drawn)
        columns = Columns(sample)
        if not columns.variance.any():
            raise InputError(
                f"every column of X is constant (n_samples={rows.n_rows}): give rows that differ."
            )
        units = _choose_units(sample, columns, robust=recipe.robust)
        self._train_members(recipe, units, sample, seed)
        set_features_(self, describe_features(rows))
        self.offset_ = self._compute_offset(rows)
        return self

    def score_samples(self, X: Array | Rows) -> Any:
        """Compute the score of each row of X (n, d), shape (n,): the lower, the less usual."""
        return like_input(self._score(self._check_rows(X)), X)

    def decision_function(self, X: Array | Rows) -> Any:
        """Compute the score relative to the threshold, (n,): negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Array | Rows) -> Any:
        """Return -1 for outliers and +1 for the others among the rows of X (n, d)."""
        unusual = self._score(self._check_rows(X)) < self.offset_
        return like_input(torch.where(unusual, -1, 1), X)

    def tail_probability(self, X: Array | Rows) -> Any:
        """Compute the share of held-out training rows that score lower than each row of X, (n,)."""
        return like_input(self._tail(self._mean_scores(self._check_rows(X))), X)

    @property
    def fit_predict(self) -> Callable[..., Any]:
        """Learn from the rows of X (n, d), and return -1 for outliers among them, +1 for others.

        Not available with ``novelty=True``, as in scikit-learn's ``LocalOutlierFactor``.
        """
        if self.novelty:
            raise AttributeError(
                "fit_predict is not available with novelty=True, where the training rows are clean:"
                " call fit, and predict on new rows."
            )
        return self._fit_predict

    def _fit_predict(self, X: Array | Rows, y: object = None) -> Any:
        return self.fit(X).predict(X)

    def member_scores(self, X: Array | Rows) -> Any:
        """Compute the score of each row of X (n, d) by each mixture, shape (n, n_mixtures).

        The mean over the mixtures is the score, unless that is a tail probability.
        """

        def of_block(block: WorkingRows) -> Sequence[Tensor]:
            return [torch.stack([m.score(self.scoring, block) for m in self._members], dim=1)]

        return like_input(self._evaluate(self._check_rows(X), of_block)[0], X)

    def explain(self, X: Array | Rows) -> Explanation:
        """Explain which features make each row of X (n, d) usual or unusual.

        The contributions of a row sum to its score. Expected values come from one more mixture,
        less smooth than the others, that is trained on the ordinary rows.
        """
        rows, reference = self._check_rows(X), self._reference

        def of_block(block: WorkingRows) -> Sequence[Tensor]:
            splits = [m.contributions(self.scoring, block) for m in self._members]
            best = assign_components(reference.mixture, block)
            return [torch.stack(splits).mean(dim=0), best, *reference.conditionals(block)]

        split, *others = self._evaluate(rows, of_block)
        if self.scoring == "tail_probability":
            split = self._tail_contributions(split)
        arrays = [part.cpu().numpy() for part in (split.sum(dim=1), split, *others)]
        return build_explanation(
            rows, fitted_features(self), self._units, arrays[0], arrays[1], arrays[2:]
        )

    @property
    def mixtures_(self) -> list[PrecisionMixture]:
        """The mixtures, in units where each column has deviation one."""
        check_is_fitted(self)
        return [member.mixture for member in self._members]

    def _check_options(self) -> Recipe:
        """Check all options, before any data is looked at, and return the recipe."""
        share: Any = self.contamination
        automatic = isinstance(share, str) and share == "auto"
        if not automatic and not (is_number(share) and 0 < float(share) <= 0.5):
            raise InputError(
                f"contamination must be 'auto' or a number above 0 and up to 0.5, not {share!r}."
            )
        if not isinstance(self.novelty, (bool, np.bool_)):
            raise InputError(f"novelty must be True or False, not {self.novelty!r}.")
        check_scoring(self.scoring, DETECTOR_SCORES)
        check_dtype(self.dtype)
        check_device(self.device)
        check_jobs(self.n_jobs)
        recipe = self.recipe or (NOVELTY if self.novelty else CONTAMINATED)
        if not isinstance(recipe, Recipe):
            raise InputError(f"recipe must be a Recipe or None, not {recipe!r}.")
        recipe.check()
        return recipe

    @torch.no_grad()
    def _train_members(self, recipe: Recipe, units: Units, sample: Batch, seed: int) -> None:
        """Train the members on parts of a sample (m, d), and score the rows left out by each."""
        device = check_device(self.device)
        rows = _to_working(units, sample, device)
        # Rows without any observed entry would pass for ordinary.
        rows = rows.take(rows.observed_share() > 0)
        random = np.random.default_rng(seed)
        parts = list(recipe.split(len(rows), random))
        fits = [(part, kind) for part in range(len(parts)) for kind in recipe.kinds]
        bar = FitsBar(dict.fromkeys(fits, 1), shown=bool(self.verbose))

        @torch.no_grad()
        def fit_member(fit: tuple[int, Kind], stop: object) -> tuple[Member, Tensor]:
            part, kind = fit
            inside, outside = (rows.take(torch.from_numpy(i).to(device)) for i in parts[part])
            own_seed = kind.seed(seed, part)
            length, kept = recipe.max_epochs, recipe.kept_weight
            mixture = train_mixture(kind, inside, own_seed, self.dtype, length, kept)
            values = score_mixture(mixture, self.scoring, outside)
            if self.scoring == "calibrated":
                level = measure_levels(mixture, values, outside)
            else:
                level = measure_level(values, outside.positive_share())
            member = Member(mixture, level)
            bar.move(fit, 1.0, f"{len(fits)} mixtures")
            return member, member.score(self.scoring, outside).cpu()

        found = run_fits(fit_member, fits, self.n_jobs)
        bar.close()
        members = [member for member, _ in found]
        total, votes = (torch.zeros(len(rows), dtype=torch.float64) for _ in range(2))
        for (part, _), (_, scores_left_out) in zip(fits, found, strict=True):
            total[parts[part][1]] += scores_left_out
            votes[parts[part][1]] += 1
        scored = (votes > 0).nonzero()[:, 0]
        scores = (total[scored] / votes[scored]).numpy()
        ordinary = scored[scores >= find_fence(scores)].to(device)
        self._units, self._members, self.held_out_scores_ = units, members, scores
        usual = rows.take(ordinary)
        own_seed, length = REFERENCE.seed(seed, 0), NOVELTY.max_epochs
        reference = train_mixture(REFERENCE, usual, own_seed, self.dtype, length)
        self._reference = Reference(reference, len(usual))

    def _compute_offset(self, rows: Rows) -> float:
        """Compute the threshold on the scores."""
        share = self.contamination
        if share == "auto" and not self.novelty:
            mean = find_fence(self.held_out_scores_)
        else:
            if self.novelty:
                # New rows are not learned, so the threshold must not come from learned rows.
                scores = self.held_out_scores_
            else:
                every, observed = self._evaluate(
                    rows, lambda block: [self._mean_score(block), block.observed_share()]
                )
                scores = every[observed > 0].numpy()
            mean = float(np.quantile(scores, NEW_SHARE if share == "auto" else float(share)))
        if self.scoring == "tail_probability":
            return float(self._tail(torch.tensor([mean], dtype=torch.float64)))
        return mean

    def _score(self, rows: Rows) -> Tensor:
        """Compute the score of each row, (n,), on the CPU."""
        means = self._mean_scores(rows)
        return self._tail(means) if self.scoring == "tail_probability" else means

    def _mean_scores(self, rows: Rows) -> Tensor:
        """Compute the mean of the members' scores, (n,), on the CPU."""
        return self._evaluate(rows, lambda block: [self._mean_score(block)])[0]

    def _mean_score(self, block: WorkingRows) -> Tensor:
        return torch.stack([m.score(self.scoring, block) for m in self._members]).mean(dim=0)

    def _tail(self, means: Tensor) -> Tensor:
        """Compute the share of held-out rows whose mean score is lower, (n,)."""
        below = torch.from_numpy(np.sort(self.held_out_scores_)).to(means)
        return torch.searchsorted(below, means).to(means.dtype) / len(below)

    def _tail_contributions(self, split: Tensor) -> Tensor:
        """Turn contributions to the mean score (n, d) into contributions to its tail probability.

        The secant from the median carries one over to the other.
        """
        means, d = split.sum(dim=1), split.shape[1]
        centre = torch.tensor([float(np.median(self.held_out_scores_))], dtype=split.dtype)
        tail, middle, step = self._tail(means), self._tail(centre), means - centre
        near = step.abs() < 1e-12
        slope = torch.where(near, 0.0, (tail - middle) / torch.where(near, 1.0, step))
        base = torch.where(near, tail, middle)
        return (base / d).unsqueeze(1) + slope.unsqueeze(1) * (split - centre / d)

    def _evaluate(
        self, rows: Rows, function: Callable[[WorkingRows], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Compute functions (B, ...) of each block of rows in working units, joined to (n, ...)."""
        device = check_device(self.device)
        size = min(
            count_block_rows(m.mixture.n_components, rows.n_features, m.mixture.n_factors)
            for m in self._members
        )
        blocks = ensure_finite_blocks(rows, size)

        def of_block(block: Batch) -> list[Tensor]:
            with torch.no_grad():
                return [part.cpu() for part in function(_to_working(self._units, block, device))]

        with use_threads() as threads:
            return join_results(threads.stream(of_block, blocks), rows.n_rows)

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        tensors = {
            "units.offset": self._units.offset,
            "units.scale": self._units.scale,
            "held_out_scores": torch.from_numpy(self.held_out_scores_),
        }
        tensors |= add_prefix("reference.", self._reference.mixture.state_dict())
        for i, member in enumerate(self._members):
            tensors |= add_prefix(f"member{i}.", member.mixture.state_dict())
            tensors |= add_prefix(f"member{i}.level.", member.level._asdict())
        return tensors, {
            "members": len(self._members),
            "reference_rows": self._reference.n_rows,
            "offset": self.offset_,
        }

    def _unpack_(self, tensors: Tensors, settings: Settings) -> int:
        place = check_device(self.device)
        if settings["options"]["recipe"] is not None:
            self.recipe = Recipe.from_dict(settings["options"]["recipe"])
        self._units = Units(tensors["units.offset"], tensors["units.scale"])
        self._members = []
        for i in range(settings["members"]):
            mixture, own = _unpack_mixture(tensors, f"member{i}.", place)
            level = Level(own["level.median"], own["level.spread"])
            self._members.append(Member(mixture, level))
        mixture, _ = _unpack_mixture(tensors, "reference.", place)
        self._reference = Reference(mixture, int(settings["reference_rows"]))
        self.held_out_scores_ = tensors["held_out_scores"].numpy()
        self.offset_ = float(settings["offset"])
        return len(self._units.offset)


def _unpack_mixture(
    tensors: Tensors, prefix: str, device: torch.device
) -> tuple[PrecisionMixture, Tensors]:
    """Return the mixture whose tensors have a prefix, and all tensors with it, by their names."""
    own = {name: t.to(device) for name, t in select_prefix(prefix, tensors).items()}
    E, Gamma = own["precision_diag"], own["precision_factors"]
    parameters = Parameters(own["logits"], own["means"], E, Gamma, latent_variances(E, Gamma))
    return PrecisionMixture.from_parameters(parameters), own


def _choose_units(sample: Batch, columns: Columns, *, robust: bool) -> Units:
    """Choose units in which each of the columns of a sample (m, d) has deviation one.

    A constant column has a unit of its own, so that a change of its value is not lost among columns
    of larger values.
    """
    usual = Units.estimate(columns, "feature")
    units = Units.estimate_robust(sample, usual) if robust else usual
    own = torch.minimum(units.scale, columns.spread.sqrt())
    own = torch.where(
        columns.mean == 0, own, torch.minimum(own, CONSTANT_SHARE * columns.mean.abs())
    )
    return Units(units.offset, torch.where(columns.variance > 0, units.scale, own))


def _to_working(units: Units, block: Batch, device: torch.device) -> WorkingRows:
    dtype = precise_dtype(device)
    batch = units.to_working(Batch(block.rows), device, dtype)
    farthest = FARTHEST[dtype]
    return WorkingRows(batch.tensors()[0].clamp(-farthest, farthest), batch.missing)
