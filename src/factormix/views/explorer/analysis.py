"""Analyse one row: likelihood, components, latent code, and the value expected at each feature.

Rows are analysed by the parameters of the whole model, so the matrices that rows are multiplied by
are computed once per model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import attribution, density
from factormix.core.attribution import Conditionals
from factormix.core.conditionals import Imputer
from factormix.core.missing import RowBlock
from factormix.core.parameters import Parameters
from factormix.data.sources.arrays import ArrayRows
from factormix.errors import InputError
from factormix.views.explorer.model_view import ModelView

Analysis = tuple[dict[str, Any], dict[str, NDArray[Any]]]
"""Facts, and arrays (d,) in the units shown."""

MAX_SHARES = 6
"""Maximum number of components listed for a row or a token: few enough to read at a glance."""
MIN_SHARE = 0.0005
"""Responsibility from which a component is listed: half a pixel of a bar of 1,000 pixels."""
IMPUTING_COMPONENTS = 16
"""Most responsible components, which fill in missing values and predict observed ones. It bounds
the d x d work per click; a component after them has a responsibility of at most 1/17."""
N_SAMPLES = 500
"""Samples, with the same values missing, that an incomplete row is compared with: the standard
error of a percentile p is ``sqrt(p (1 - p) / 500)``, at most 2.2%."""


@torch.no_grad()
def analyse_row(view: ModelView, values: NDArray[np.float64]) -> Analysis:
    """Analyse a row (d,) in which NaN stands for a missing value."""
    if values.shape != (view.d,):
        raise InputError(f"a row of this model has {view.d} values, not {values.size}.")
    if np.isinf(values).any():
        raise InputError("every value of a row must be a finite number, or missing.")
    missing = np.isnan(values)
    if missing.all():
        raise InputError("all values of the row are missing: give at least one.")
    analyse = _analyse_incomplete if missing.any() else _analyse_complete
    facts, arrays = analyse(view, values)
    if view.counts[facts["component"]] < 1 + density.LEAST_REST:
        # The row has a component for itself, and the others say what is expected.
        by_others = view.model.explain(ArrayRows(values[None]))
        arrays["expected"] = view.display.convert_rows(by_others.expected[0])
        arrays["z_scores"] = by_others.z_score[0].astype(np.float32)
    return facts, arrays


def _analyse_complete(view: ModelView, values: NDArray[np.float64]) -> Analysis:
    block = RowBlock(view.prepared, torch.tensor(values[None]).to(view.mixture.means))
    ops = block.ops
    log_p, Y = density.project(block.x, ops)
    log_likelihood, responsibilities = _normalise(log_p + ops.log_weights)
    k = int(responsibilities.argmax())
    z, variances = Y[0, k] * ops.latent_variances[k].sqrt(), ops.latent_variances[k]
    facts = _facts(log_likelihood, responsibilities[0], k, z, variances)
    return facts, _arrays(view, values, k, z, attribution.conditionals(block, view.counts))


def _analyse_incomplete(view: ModelView, values: NDArray[np.float64]) -> Analysis:
    """Analyse the observed values, and fill in the others.

    The marginal density of the observed values is cheap for all components. Only the most
    responsible ones fill in the missing values.
    """
    display, parameters = view.display, view.parameters
    missing = np.isnan(values)
    observed = torch.from_numpy(np.flatnonzero(~missing))
    marginal = view.mixture.marginal(observed)
    x = torch.tensor(values[None]).to(parameters.means)
    joint = marginal.component_log_prob(x[:, observed]) + parameters.log_weights
    log_likelihood, responsibilities = _normalise(joint)
    chosen = responsibilities[0].topk(min(IMPUTING_COMPONENTS, view.K)).indices
    gaps = torch.from_numpy(missing[None])
    imputer = Imputer(Parameters(*(t[chosen] for t in parameters)))
    block = RowBlock(imputer.mixture, x, gaps)
    _, codes, variances = block.posterior()
    k, z = int(chosen[0]), codes[0, 0]
    samples = marginal.sample(N_SAMPLES, generator=torch.Generator().manual_seed(0))
    facts = _facts(log_likelihood, responsibilities[0], k, z, variances[0, 0]) | {
        "missing": int(missing.sum()),
        "percentile": float((marginal.log_prob(samples) < log_likelihood).double().mean()),
        "among": "samples",
    }
    predicted = attribution.conditionals(block, view.counts[chosen])
    return facts, _arrays(view, values, k, z, predicted) | {
        "imputed": display.convert_rows(imputer.mean(x, gaps)[0].numpy()),
        "imputed_deviation": display.convert_deviations(imputer.deviation(x, gaps)[0].numpy()),
    }


def _normalise(joint: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood (1,) and responsibilities (1, K) of a row."""
    log_likelihood, responsibilities = density.log_normaliser(joint)
    if not bool(torch.isfinite(log_likelihood)):
        raise InputError("the values are too large to compute with: give smaller ones.")
    return log_likelihood, responsibilities


def _facts(
    log_likelihood: Tensor, shares: Tensor, k: int, z: Tensor, variances: Tensor
) -> dict[str, Any]:
    largest = shares.topk(min(MAX_SHARES, len(shares)))
    listed = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    return {
        "log_likelihood": float(log_likelihood),
        "component": k,
        "shares": [[j, share] for j, share in listed if share >= MIN_SHARE],
        "code": z.tolist(),
        "code_deviation": variances.sqrt().tolist(),
    }


def _arrays(
    view: ModelView, values: NDArray[np.float64], k: int, z: Tensor, predicted: Conditionals
) -> dict[str, NDArray[Any]]:
    """Return a row, its component, its reconstruction ``mu + Lambda z`` and what is expected."""
    component, convert = view.mixture.component(k).precision_form, view.display.convert_rows
    decoded = density.decode(component, z[None].to(component.means), torch.zeros(1).long())
    return {
        "row": convert(values),
        "centroid": view.means[k],
        "reconstruction": convert(decoded[0].numpy()),
        "expected": convert(predicted.expected[0].numpy()),
        "z_scores": predicted.z_score[0].float().numpy(),
    }
