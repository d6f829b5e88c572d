"""What a model says about one row: likelihood, components, latent code, reasons; what is missing.

The parameters stay as they are, so that what rows are multiplied by is gathered once per model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import density, reasons, sampling
from factormix.core.imputation import Imputer
from factormix.core.mixture import PrecisionMixture
from factormix.core.observed import observed_posterior
from factormix.core.observed_reasons import observed_conditionals
from factormix.core.parameters import Parameters
from factormix.errors import InputError
from factormix.views.explorer.subject import Subject

__all__ = ["analyse"]

SHARES = 6
"""Components of a row that are listed, at most."""
LEAST_SHARE = 0.0005
"""Responsibility from which a component is listed."""
FILLING = 16
"""Components by which a row with values missing is filled in and judged value by value: those that
its observed values speak for."""
OWN_SAMPLES = 500
"""Samples by which a model says what is usual for rows with the same values missing."""

Answer = tuple[dict[str, Any], dict[str, NDArray[Any]]]


@torch.no_grad()
def analyse(subject: Subject, values: NDArray[np.float64]) -> Answer:
    """Describe a row (d,), in which NaN stands for what is missing, as facts and arrays (d,)."""
    if values.shape != (subject.d,):
        raise InputError(f"a row of this model has {subject.d} values, not {values.size}.")
    if np.isinf(values).any():
        raise InputError("every value of a row must be a finite number, or missing.")
    missing = np.isnan(values)
    if missing.all():
        raise InputError("all values of the row are missing: give at least one.")
    return _incomplete(subject, values, missing) if missing.any() else _complete(subject, values)


def _complete(subject: Subject, values: NDArray[np.float64]) -> Answer:
    x = torch.tensor(values[None]).to(subject.mixture.means)
    ops, display = subject.operands, subject.display
    log_p, Y = density.project(x, ops)
    log_likelihood, shares = _judged(log_p + ops.log_weights)
    k = int(shares.argmax())
    z = Y[0, k] * ops.latent_variances[k].sqrt()
    rebuilt = _decoded(subject.mixture.component(k).precision_form, z)
    given_others = reasons.conditionals(x, ops)
    facts = _facts(float(log_likelihood), shares[0], k, z, ops.latent_variances[k])
    return facts, {
        "row": display.row(values),
        "centroid": subject.means[k],
        "rebuilt": display.row(rebuilt),
        "expected": display.row(given_others.expected[0].numpy()),
        "z_scores": given_others.z_score[0].float().numpy(),
    }


def _incomplete(
    subject: Subject, values: NDArray[np.float64], missing: NDArray[np.bool_]
) -> Answer:
    """Describe a row by its observed values, and fill in the others.

    The marginal of the observed values costs little for all components; the few that it speaks for
    fill in the rest.
    """
    display, whole = subject.display, subject.parameters
    there = torch.from_numpy(np.flatnonzero(~missing))
    marginal = subject.mixture.marginal(there)
    x = torch.tensor(values[None]).to(whole.means)
    joint = marginal.component_log_prob(x[:, there]) + whole.log_weights
    log_likelihood, shares = _judged(joint)
    chosen = shares[0].topk(min(FILLING, subject.K)).indices
    few = Parameters(*(t[chosen] for t in whole))
    gaps = torch.from_numpy(missing[None])
    filler = Imputer(few)
    _, codes, variances = observed_posterior(x, gaps, filler.ops)
    z = codes[0, 0]
    own = marginal.log_prob(_drawn(marginal))
    given_others = observed_conditionals(x, gaps, filler.ops)
    k = int(chosen[0])
    facts = _facts(float(log_likelihood), shares[0], k, z, variances[0, 0])
    facts |= {
        "missing": int(missing.sum()),
        "percentile": float((own < log_likelihood).double().mean()),
        "among": "samples",
    }
    return facts, {
        "row": display.row(values),
        "centroid": subject.means[k],
        "rebuilt": display.row(_decoded(Parameters(*(t[:1] for t in few)), z)),
        "filled": display.row(filler.mean(x, gaps)[0].numpy()),
        "doubt": display.spread(filler.deviation(x, gaps)[0].numpy()),
        "expected": display.row(given_others.expected[0].numpy()),
        "z_scores": given_others.z_score[0].float().numpy(),
    }


def _judged(joint: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-likelihood (1,) and responsibilities (1, K) of a row; say if there are none."""
    log_likelihood, shares = density.log_normaliser(joint)
    if not bool(torch.isfinite(log_likelihood)):
        raise InputError("the values are too large to compute with: give smaller ones.")
    return log_likelihood, shares


def _facts(score: float, shares: Tensor, k: int, z: Tensor, variances: Tensor) -> dict[str, Any]:
    largest = shares.topk(min(SHARES, len(shares)))
    listed = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    return {
        "log_likelihood": score,
        "component": k,
        "shares": [[j, share] for j, share in listed if share >= LEAST_SHARE],
        "code": z.tolist(),
        "code_deviation": variances.sqrt().tolist(),
    }


def _decoded(component: Parameters, z: Tensor) -> NDArray[Any]:
    """Compute ``mu + Lambda z``, (d,), for the code z (l,) of a mixture of one component."""
    row = sampling.decode(component, z[None].to(component.means), torch.zeros(1, dtype=torch.long))
    return row[0].numpy()


def _drawn(mixture: PrecisionMixture) -> Tensor:
    return mixture.sample(OWN_SAMPLES, generator=torch.Generator().manual_seed(0))
