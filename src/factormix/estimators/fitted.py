"""What a trained mixture can do: score, assign, encode, decode and sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import criteria, density, sampling
from factormix.core.density import Operands, Posterior
from factormix.core.observed import ObservedOperands, observed_joint, observed_posterior
from factormix.core.parameters import (
    precise_dtype,
)
from factormix.core.screened import Found
from factormix.core.workspace import Workspace
from factormix.data.sources import Rows, check_finite, count_used
from factormix.errors import InputError
from factormix.estimators.attributes import FittedAttributes
from factormix.estimators.validation import (
    Array,
    as_tensor,
    check_count,
    check_rows,
    check_seed,
    like_input,
)
from factormix.training.divided_scores import divided_mean, divided_scores
from factormix.training.evaluation import (
    evaluate,
    joint_log_prob_of,
    mean_log_likelihood,
    observed_joint_of,
    with_missing_volume,
)
from factormix.training.searching import few_of
from factormix.training.threads import team

__all__ = ["FittedMixture"]

OfRows = Callable[[Tensor, Operands, Workspace], Sequence[Tensor]]
OfPartialRows = Callable[[Tensor, Tensor, ObservedOperands], Sequence[Tensor]]
OfFew = Callable[[Found], Sequence[Tensor]]


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
            sampling.decode(parameters, z.to(parameters.means), k.to(device).long()), Z
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
        drawn, components = sampling.sample(
            parameters, n, component=component, noise=noise, generator=generator
        )
        return self._returned(drawn), self._returned(components)

    def bic(self, X: Array | Rows) -> float:
        """Compute the Bayesian information criterion on X (n, d); lower is better."""
        rows = self._checked(X)
        n = count_used(rows)
        return criteria.bic(n * self._mean_log_likelihood(rows), self.n_parameters_, n)

    def aic(self, X: Array | Rows) -> float:
        """Compute the Akaike information criterion on X (n, d); lower is better."""
        rows = self._checked(X)
        log_likelihood = count_used(rows) * self._mean_log_likelihood(rows)
        return criteria.aic(log_likelihood, self.n_parameters_)

    def icl(self, X: Array | Rows) -> float:
        """Compute the integrated complete likelihood on X (n, d) as a criterion; lower is better.

        It is ``bic`` plus twice the entropy of the assignments of rows to components.
        """
        rows = self._checked(X)
        entropy = criteria.assignment_entropy
        (entropies,) = self._each(
            X,
            lambda *block: [entropy(density.joint_log_prob(*block))],
            lambda *block: [entropy(observed_joint(*block))],
        )
        weights = getattr(rows, "weights", None)
        mean = float(np.average(entropies.cpu().double().numpy(), weights=weights))
        n, level = count_used(rows), self._mean_log_likelihood(rows)
        return criteria.icl(n * level, n * mean, self.n_parameters_, n)

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
                threads, run.parameters, run.units, rows, function, partial, few=few, of_few=of_few
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
