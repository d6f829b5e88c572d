"""An outlier detector as named tensors and settings, and back.

The scikit-learn face of outlier detection: an ensemble of smooth mixtures.

Rows judged block by block by a detector or by a plain mixture: what a command writes of each.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import attribution
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, latent_variances, precise_dtype
from factormix.data.batches import Batch, join_batches
from factormix.data.checks import add_observed_rows, ensure_finite_blocks, ensure_finite_rows
from factormix.data.columns import Columns
from factormix.data.features import Features, describe_features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows
from factormix.data.units import Units
from factormix.defaults import DTYPE
from factormix.errors import InputError
from factormix.estimators.ensemble import (
    CONTAMINATED,
    NOVELTY,
    Kind,
    Level,
    Member,
    Recipe,
    Working,
    best_components,
    calibrated,
    level_of,
    raw_scores,
    train_mixture,
)
from factormix.estimators.explanation import Explanation, check_scoring, explanation_of
from factormix.estimators.mfa import MFA
from factormix.estimators.storage import StoredModel
from factormix.estimators.validation import (
    Array,
    check_device,
    check_dtype,
    check_rows,
    check_seed,
    like_input,
    progress,
    remember_features,
)
from factormix.training.evaluation import FARTHEST
from factormix.training.threads import team

if TYPE_CHECKING:
    pass

__all__ = [
    "DETECTOR_SCORES",
    "Block",
    "Judge",
    "MFAOutlierDetector",
    "judge_of",
    "pack_detector",
    "unpack_detector",
]

D = TypeVar("D", bound="MFAOutlierDetector")


def pack_detector(detector: MFAOutlierDetector) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all that a detector is, as named tensors and JSON-ready settings."""
    tensors = {
        "units.offset": detector._units.offset,
        "units.scale": detector._units.scale,
        "held_out_scores": torch.from_numpy(detector.held_out_scores_),
    }
    for number, member in enumerate(detector._members):
        for name, tensor in member.mixture.state_dict().items():
            tensors[f"member{number}.{name}"] = tensor
        for name, tensor in member.level._asdict().items():
            tensors[f"member{number}.level.{name}"] = tensor
    names = getattr(detector, "feature_names_in_", None)
    return tensors, {
        "options": _options(detector),
        "feature_names": None if names is None else [str(name) for name in names],
        "image_shape": detector.image_shape_,
        "members": len(detector._members),
        "reader": detector._reader,
        "offset": detector.offset_,
    }


def _options(detector: MFAOutlierDetector) -> dict[str, Any]:
    seed: Any = detector.random_state
    share, recipe = detector.contamination, detector.recipe
    return {
        "novelty": bool(detector.novelty),
        "contamination": share if isinstance(share, str) else float(share),
        "scoring": detector.scoring,
        "recipe": None if recipe is None else recipe.packed(),
        "random_state": int(seed) if isinstance(seed, numbers.Integral) else None,
        "dtype": str(check_dtype(detector.dtype)).removeprefix("torch."),
        "verbose": int(detector.verbose),
    }


def unpack_detector(
    cls: type[D], tensors: Any, settings: dict[str, Any], device: str | torch.device | None
) -> D:
    """Make a detector of what ``pack_detector`` returned."""
    options, place = dict(settings["options"]), check_device(device)
    if options["recipe"] is not None:
        options["recipe"] = Recipe.unpacked(options["recipe"])
    detector = cls(**options, device=device)
    detector._units = Units(tensors["units.offset"], tensors["units.scale"])
    detector._members = [_member(tensors, i, place) for i in range(settings["members"])]
    detector._reader = int(settings["reader"])
    detector.held_out_scores_ = tensors["held_out_scores"].numpy()
    detector.offset_ = float(settings["offset"])
    names, shape = settings["feature_names"], settings["image_shape"]
    count = len(tensors["units.offset"])
    features = Features(count, names and tuple(names), shape and tuple(shape))
    remember_features(detector, features)
    return detector


def _member(tensors: Any, number: int, device: torch.device) -> Member:
    def part(name: str) -> Tensor:
        tensor: Tensor = tensors[f"member{number}.{name}"]
        return tensor.to(device)

    E, Gamma = part("precision_diag"), part("precision_factors")
    parameters = Parameters(part("logits"), part("means"), E, Gamma, latent_variances(E, Gamma))
    mixture = PrecisionMixture.from_parameters(parameters)
    return Member(mixture, Level(part("level.median"), part("level.spread")))


DETECTOR_SCORES = (*attribution.SCORES, "calibrated", "tail_probability")

FEWEST_ROWS = 4
"""Rows that can be told apart into usual and unusual at all."""
NEW_SHARE = 0.01
"""Share of clean new rows that ``contamination="auto"`` calls outliers when ``novelty=True``."""
FENCE = 2.0
"""Interquartile ranges below the median from which "auto" calls a training row an outlier."""
BLOCK_ELEMENTS = 1 << 20
"""Elements that a block of rows and the products of one mixture have together."""


class MFAOutlierDetector(OutlierMixin, StoredModel, BaseEstimator):
    """Outlier detection by an ensemble of mixtures of factor analyzers.

    Each column is standardised; mixtures of several kinds, with a floor on their noise that keeps
    them smooth, are trained on different parts of the rows. A row's score is the mean of what they
    say, each relative to the level of the rows that it was not trained on: 0 is the median of
    ordinary rows, and lower is less usual. New rows may always be scored. Missing entries (NaN) are
    taken to be ordinary: a row is judged by what is known of it.

    Parameters
    ----------
    novelty : bool
        False: the training rows themselves may hold outliers, and these must not explain
        themselves. The mixtures are trained on small draws and leave their lightest components out.
        True: the training rows are clean, and what is to be found is in new rows. The mixtures
        learn more detail, and the threshold comes from rows that they have not seen.
    contamination : float or "auto"
        The share of rows that is called outliers: with ``novelty=False`` that of the training rows,
        as elsewhere in scikit-learn; with ``novelty=True`` that of clean new rows, so that 0.01 is
        one false alarm in a hundred. "auto" is 0.01 with ``novelty=True``; else a training row is
        an outlier when its score is more than two interquartile ranges below the median.
    scoring : str
        What each mixture says of a row: ``"log_likelihood"``; ``"best_component"``, the same of the
        most probable component alone; ``"mahalanobis"``, the distance to it; ``"reconstruction"``,
        the part of the row that its factors cannot express; ``"calibrated"``, the
        log-likelihood relative to the rows of that component. ``"tail_probability"`` is the share
        of held-out training rows whose log-likelihood score is lower.
    recipe : Recipe or None
        The mixtures and the rows that each is trained on. None takes the default of the mode,
        ``factormix.estimators.ensemble.NOVELTY`` or ``CONTAMINATED``.
    random_state : int, RandomState or None
        Seed of the parts of the rows and of the mixtures.
    device : str, torch.device or None
        Where to compute; None is the CPU.
    dtype : str or torch.dtype
        ``"float32"`` or ``"float64"``, in which the mixtures are trained; scores are in float64.
    verbose : int
        1 shows a progress bar.

    Attributes
    ----------
    offset_ : float
        ``decision_function`` is ``score_samples`` minus this; rows below it are outliers.
    mixtures_ : list of PrecisionMixture
        In units where each column has deviation one.
    held_out_scores_ : array (m,)
        Scores of the training rows, each by the mixtures that were not trained on it; of a random
        choice of rows, where there are more than ``recipe.most_rows``.
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

    def __init__(
        self,
        *,
        novelty: bool = False,
        contamination: float | str = "auto",
        scoring: str = "log_likelihood",
        recipe: Recipe | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = DTYPE,
        verbose: int = 0,
    ) -> None:
        self.novelty = novelty
        self.contamination = contamination
        self.scoring = scoring
        self.recipe = recipe
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    @team()
    def fit(self, X: Array | Rows, y: object = None) -> Self:
        """Learn what is usual from the rows of X (n, d), of which NaN is missing."""
        recipe = self._checked_options()
        rows = as_rows(X)
        if rows.n_rows < FEWEST_ROWS:
            raise InputError(
                f"X has n_samples={rows.n_rows}, fewer than the {FEWEST_ROWS} rows that a detector"
                " needs: give more rows."
            )
        rows, seed = ensure_finite_rows(rows), check_seed(self.random_state)
        sample = add_observed_rows(rows, _sample(rows, recipe.most_rows, seed))
        if not Columns(sample).variance.any():
            raise InputError(
                f"every column of X is constant (n_samples={rows.n_rows}): give rows that differ."
            )
        units = (
            Units.estimate_robust(sample) if recipe.robust else Units.estimate(sample, "feature")
        )
        self._train(recipe, units, sample, seed)
        remember_features(self, describe_features(rows))
        self.offset_ = self._offset(rows)
        return self

    def score_samples(self, X: Array | Rows) -> Any:
        """Compute the score of each row of X (n, d), shape (n,): the lower, the less usual."""
        check_is_fitted(self)
        return like_input(self._told(self._ensemble(check_rows(self, X))), X)

    def decision_function(self, X: Array | Rows) -> Any:
        """Compute the score relative to the threshold, (n,): negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Array | Rows) -> Any:
        """Tell outliers, -1, from the others, +1, among the rows of X (n, d)."""
        check_is_fitted(self)
        unusual = self._told(self._ensemble(check_rows(self, X))) < self.offset_
        return like_input(torch.where(unusual, -1, 1), X)

    def tail_probability(self, X: Array | Rows) -> Any:
        """Compute the share of held-out training rows that score lower than each row of X, (n,)."""
        check_is_fitted(self)
        return like_input(self._tail(self._ensemble(check_rows(self, X))), X)

    @property
    def fit_predict(self) -> Callable[..., Any]:
        """Learn from the rows of X (n, d) and tell the outliers among them, -1, from the others.

        Not there with ``novelty=True``, as in scikit-learn's ``LocalOutlierFactor``.
        """
        if self.novelty:
            raise AttributeError(
                "fit_predict is not there with novelty=True, where the training rows are clean:"
                " call fit, and predict on new rows."
            )
        return self._fit_predict

    def _fit_predict(self, X: Array | Rows, y: object = None) -> Any:
        return self.fit(X).predict(X)

    def member_scores(self, X: Array | Rows) -> Any:
        """Compute what each of ``mixtures_`` says of each row of X (n, d), shape (n, mixtures).

        The mean over the mixtures is the score, unless that is a tail probability.
        """
        check_is_fitted(self)

        def of_block(block: Working) -> Sequence[Tensor]:
            return [torch.stack([m.scores(self.scoring, block) for m in self._members], dim=1)]

        return like_input(self._each(check_rows(self, X), of_block)[0], X)

    def explain(self, X: Array | Rows) -> Explanation:
        """Tell which features make each row of X (n, d) as usual or unusual as it is.

        The contributions of a row sum to its score. What each feature is expected to be, given all
        others, is told by the mixture that explains rows best which it has not seen.
        """
        check_is_fitted(self)
        rows = check_rows(self, X)
        reader = self._members[self._reader]

        def of_block(block: Working) -> Sequence[Tensor]:
            told = [m.contributions(self.scoring, block) for m in self._members]
            best = best_components(reader.mixture, block)
            return [torch.stack(told).mean(dim=0), best, *reader.conditionals(block)]

        split, *others = self._each(rows, of_block)
        split = self._told_split(split)
        arrays = [part.cpu().numpy() for part in (split.sum(dim=1), split, *others)]
        return explanation_of(self, rows, self._units, arrays[0], arrays[1], arrays[2:])

    @property
    def mixtures_(self) -> list[Any]:
        """The mixtures, in units where each column has deviation one."""
        check_is_fitted(self)
        return [member.mixture for member in self._members]

    def _checked_options(self) -> Recipe:
        """Check all options, before any data is looked at, and return the recipe."""
        share: Any = self.contamination
        number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not (0 < float(share) <= 0.5 if number else isinstance(share, str) and share == "auto"):
            raise InputError(
                f"contamination must be 'auto' or a number above 0 and up to 0.5, not {share!r}."
            )
        if not isinstance(self.novelty, (bool, np.bool_)):
            raise InputError(f"novelty must be True or False, not {self.novelty!r}.")
        check_scoring(self.scoring, DETECTOR_SCORES)
        check_dtype(self.dtype)
        check_device(self.device)
        recipe = self.recipe or (NOVELTY if self.novelty else CONTAMINATED)
        if not isinstance(recipe, Recipe):
            raise InputError(f"recipe must be a Recipe or None, not {recipe!r}.")
        recipe.check()
        return recipe

    @torch.no_grad()
    def _train(self, recipe: Recipe, units: Units, sample: Batch, seed: int) -> None:
        """Train the members on parts of a sample (m, d), and score what each has not seen."""
        device = check_device(self.device)
        rows = _working(units, sample, device)
        rows = rows.take(rows.known_share() > 0)  # empty ones would pass for ordinary
        random = np.random.default_rng(seed)
        members, levels = list[Member](), list[float]()
        total, votes = (torch.zeros(len(rows), dtype=torch.float64) for _ in range(2))
        with progress(recipe.n_parts * len(recipe.kinds), self.verbose) as tell:
            for part, (seen, unseen) in enumerate(recipe.parts(len(rows), random)):
                inside, outside = (
                    rows.take(torch.from_numpy(i).to(device)) for i in (seen, unseen)
                )
                for kind in recipe.kinds:
                    member, level = self._member(
                        recipe, kind, inside, outside, kind.seed(seed, part)
                    )
                    members.append(member)
                    levels.append(level)
                    total[unseen] += member.scores(self.scoring, outside).cpu()
                    votes[unseen] += 1
                    tell(f"held-out log-likelihood {level:.4g}")
        self._units, self._members, self._reader = units, members, int(np.argmax(levels))
        known = votes > 0
        self.held_out_scores_ = (total[known] / votes[known]).numpy()

    def _member(
        self, recipe: Recipe, kind: Kind, seen: Working, unseen: Working, seed: int
    ) -> tuple[Member, float]:
        """Train one mixture, and return it with its median log-likelihood of unseen rows."""
        mixture = train_mixture(kind, seen, seed, self.dtype, recipe.kept_weight)
        share = unseen.counted_share()
        values = raw_scores(mixture, self.scoring, unseen)
        by_component = self.scoring == "calibrated"
        level = calibrated(mixture, values, unseen) if by_component else level_of(values, share)
        likelihood = raw_scores(mixture, "log_likelihood", unseen) / share
        return Member(mixture, level), float(likelihood.median())

    def _offset(self, rows: Rows) -> float:
        """Compute the threshold on the scores."""
        share = self.contamination
        if share == "auto" and not self.novelty:
            raw = float(attribution.compressed(torch.tensor(-FENCE, dtype=torch.float64)))
        else:
            # What is judged must not have been learned: clean new rows have not.
            judged = self.held_out_scores_ if self.novelty else self._observed_scores(rows)
            raw = float(np.quantile(judged, NEW_SHARE if share == "auto" else float(share)))
        return float(self._told(torch.tensor([raw], dtype=torch.float64)))

    def _ensemble(self, rows: Rows) -> Tensor:
        """Compute the mean of the members' scores, (n,), on the CPU."""
        return self._each(rows, lambda block: [self._mean_score(block)])[0]

    def _observed_scores(self, rows: Rows) -> Any:
        """Compute the same, as an array, for the rows of which something is observed."""
        found, share = self._each(rows, lambda b: [self._mean_score(b), b.known_share()])
        return found[share > 0].numpy()

    def _mean_score(self, block: Working) -> Tensor:
        return torch.stack([m.scores(self.scoring, block) for m in self._members]).mean(dim=0)

    def _told(self, ensemble: Tensor) -> Tensor:
        """Turn the mean of the members' scores (n,) into the score that was asked for."""
        return self._tail(ensemble) if self.scoring == "tail_probability" else ensemble

    def _told_split(self, split: Tensor) -> Tensor:
        """Turn contributions to the members' mean (n, d) into those to the score."""
        if self.scoring != "tail_probability":
            return split
        ensemble, d = split.sum(dim=1), split.shape[1]
        centre = torch.tensor([float(np.median(self.held_out_scores_))], dtype=split.dtype)
        tail, middle, step = self._tail(ensemble), self._tail(centre), ensemble - centre
        near = step.abs() < 1e-12
        slope = torch.where(near, 0.0, (tail - middle) / torch.where(near, 1.0, step))
        base = torch.where(near, tail, middle)
        return (base / d).unsqueeze(1) + slope.unsqueeze(1) * (split - centre / d)

    def _tail(self, ensemble: Tensor) -> Tensor:
        below = torch.from_numpy(np.sort(self.held_out_scores_)).to(ensemble)
        return torch.searchsorted(below, ensemble).to(ensemble.dtype) / len(below)

    def _each(self, rows: Rows, function: Any) -> list[Tensor]:
        """Compute functions (B, ...) of each block of rows in working units, joined to (n, ...)."""
        device = check_device(self.device)
        widest = max(
            m.mixture.n_components * (m.mixture.n_factors + 1) + rows.n_features
            for m in self._members
        )
        blocks = ensure_finite_blocks(rows, max(1, BLOCK_ELEMENTS // widest))

        def of_block(block: Batch) -> list[Tensor]:
            with torch.no_grad():
                return [part.cpu() for part in function(_working(self._units, block, device))]

        with team() as threads:
            parts = list(threads.stream(of_block, blocks))
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def __sklearn_is_fitted__(self) -> bool:
        """Say whether there is a model."""
        return hasattr(self, "_members")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _pack(self, *, training_state: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return pack_detector(self)

    @classmethod
    def _unpack(
        cls, tensors: Any, settings: dict[str, Any], device: str | torch.device | None
    ) -> Self:
        return unpack_detector(cls, tensors, settings, device)


def _sample(rows: Rows, most: int, seed: int) -> Batch:
    """Return all rows in their order, or a random choice where there are many."""
    if rows.n_rows <= most:
        return join_batches(list(rows.blocks(most)))
    return next(rows.shuffled(most, seed=seed, epoch=0))


def _working(units: Units, block: Batch, device: torch.device) -> Working:
    dtype = precise_dtype(device)
    batch = units.to_working(Batch(block.rows), device, dtype)
    farthest = FARTHEST[dtype]
    return Working(batch.tensors()[0].clamp(-farthest, farthest), batch.missing)


Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """Some rows, what is to be written of each, and which of them are to be explained."""

    model: Any
    rows: Rows
    values: list[list[str]]
    """For each row, its cells after the row's number."""
    chosen: NDArray[np.intp]
    """Numbers of the outliers within the block; of all rows where there is no threshold."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    def explained(self) -> Explanation | None:
        """Explain the chosen rows, None if there are none."""
        if not len(self.chosen):
            return None
        (block,) = self.rows.blocks(len(self))
        explained: Explanation = self.model.explain(ArrayRows(block.rows[self.chosen]))
        return explained


class Judge:
    """Tell of each row how unusual it is, and whether that makes it an outlier."""

    columns: tuple[str, ...] = ("row", "score", "tail_probability", "outlier")
    has_threshold = True

    def __init__(self, model: MFAOutlierDetector, share: float | None) -> None:
        self._model, self._share = model, share
        self.image_shape = model.image_shape_

    def prepared(self, rows: Rows) -> Rows:
        """Return rows with their columns in the order of the training."""
        return check_rows(self._model, rows)

    def blocks(self, rows: Rows, size: int) -> Iterator[Block]:
        """Judge rows, ``size`` at a time."""
        for batch in rows.blocks(size):
            block = ArrayRows(batch.rows)
            scores, tail = (
                np.asarray(values, dtype=np.float64)
                for values in (
                    self._model.score_samples(block),
                    self._model.tail_probability(block),
                )
            )
            unusual = scores < self._model.offset_ if self._share is None else tail < self._share
            cells = [
                [f"{s:.9g}", f"{t:.6g}", str(int(u))]
                for s, t, u in zip(scores, tail, unusual, strict=True)
            ]
            yield Block(self._model, block, cells, np.flatnonzero(unusual))


class MixtureJudge(Judge):
    """Judge by the log-likelihood of a plain mixture, which has no threshold of its own."""

    def __init__(self, model: MFA, share: float | None) -> None:
        self._mixture, self._share = model, share
        self.image_shape = model.image_shape_
        self.has_threshold = share is not None
        self.columns = ("row", "score", "outlier") if self.has_threshold else ("row", "score")

    def prepared(self, rows: Rows) -> Rows:
        """Return rows with their columns in the order of the training."""
        return check_rows(self._mixture, rows)

    def blocks(self, rows: Rows, size: int) -> Iterator[Block]:
        """Judge rows, ``size`` at a time; with a share, by the lowest scores of all of them."""
        level = -np.inf
        if self._share is not None:
            level = float(np.quantile(self._mixture.score_samples(rows), self._share))
        for batch in rows.blocks(size):
            block = ArrayRows(batch.rows)
            scores = np.asarray(self._mixture.score_samples(block), dtype=np.float64)
            cells, chosen = [[f"{s:.9g}"] for s in scores], np.arange(len(scores))
            if self._share is not None:
                unusual = scores < level
                chosen = np.flatnonzero(unusual)
                cells = [[*cell, str(int(u))] for cell, u in zip(cells, unusual, strict=True)]
            yield Block(self._mixture, block, cells, chosen)


def judge_of(model: Any, share: float | None = None) -> Judge:
    """Make a judge of a loaded model; ``share`` replaces a detector's own threshold."""
    if isinstance(model, MFAOutlierDetector):
        return Judge(model, share)
    if isinstance(model, MFA):
        return MixtureJudge(model, share)
    raise InputError(
        f"a {type(model).__name__} does not tell outliers: give a detector or a mixture."
    )
