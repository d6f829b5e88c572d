"""Runs saved by earlier versions, brought into today's form.

Up to format version 2 the states of solvers held their problem, and the natural solver had options
that are constants now. Running averages once held variances times the weight of their component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from factormix.core.screening import Screen

__all__ = ["upgraded"]

Tensors = Mapping[str, Tensor]
Settings = Mapping[str, Any]

NO_OPTIONS = {
    "anneal_steps",
    "anneal_batch",
    "anneal_rate",
    "anneal_sigma",
    "prune_units",
    "growth",
    "initial_loading",
    "first_variance",
    "bound_units",
    "manage_units",
}
"""Options of the natural solver that are constants now."""


def upgraded(tensors: Tensors, settings: Settings) -> tuple[Tensors, Settings]:
    """Return the tensors and settings of a run in today's form."""
    if not isinstance(settings, Mapping):
        raise TypeError("the settings of the run are not a table")
    tensors = _counting(tensors, settings)
    # Runs had no position in a stream.
    settings = {"position": 0, **settings}
    tensors = _with_variances(tensors)
    if "problem" in settings:
        return _without_screen(tensors, settings)
    new, tensors = dict(settings), dict(tensors)
    state, name = settings["state"], settings["solver"]["name"]
    K, d, l = tensors["parameters.precision_factors"].shape
    new["problem"] = {
        "n_components": state.get("n_components", K),
        "n_features": d,
        "n_factors": l,
        "n_init": 1,
        **{key: settings[key] for key in ("seed", "batches_per_epoch", "epochs", "batch_size")},
    }
    options = settings["solver"]["options"]
    if name == "natural":
        options = {key: value for key, value in options.items() if key not in NO_OPTIONS}
        new["solver"] = {"name": name, "options": options}
    new["bounded"] = "max_precision" in tensors
    if new["bounded"]:
        tensors["problem.max_precision"] = tensors["max_precision"]
    if settings["training_state"]:
        tensors, new["state"] = _upgraded_state(name, tensors, state, settings)
        if "best" in settings:
            best = {n.removeprefix("best."): t for n, t in tensors.items() if n[:5] == "best."}
            best, values = _upgraded_state(name, best, settings["best"]["state"], settings)
            tensors |= {f"best.{n}": t for n, t in best.items()}
            rest = {key: value for key, value in settings["best"].items() if key != "looked"}
            new["best"] = rest | {"last_look": settings["best"]["looked"], "state": values}
    return _without_screen(tensors, new)


def _without_screen(tensors: Tensors, settings: Settings) -> tuple[Tensors, Settings]:
    """Return a run that knew no screens as one that has none yet."""
    new, tensors = dict(settings), dict(tensors)
    new["problem"] = {"candidates": "auto"} | settings["problem"]
    if not settings["training_state"] or settings["solver"]["name"] != "natural":
        return tensors, new
    for before in ("", "best."):
        if before + "bound" in tensors and before + "applied_bound" not in tensors:
            bound = tensors[before + "bound"]
            tensors[before + "applied_bound"] = bound.new_zeros(bound.shape)
            tensors[before + "missed"] = bound.new_zeros(2)
            screen = Screen.nothing(bound)._asdict()
            tensors |= {f"{before}screen.{name}": t for name, t in screen.items()}
        if before + "bound" in tensors and before + "scales" not in tensors:
            tensors[before + "scales"] = tensors[before + "bound"].new_zeros(0)
    new["state"] = _with_all_values(settings["state"])
    if "best" in settings:
        best = settings["best"]
        new["best"] = {**best, "state": _with_all_values(best["state"])}
    return tensors, new


def _with_all_values(state: Settings) -> Settings:
    """Return the values of a natural run that had no screens, nor counted what it remembers."""
    # As if all rows counted alike.
    concentration = 1 / state["samples"] if state["samples"] else 0.0
    return {"search": {}, "concentration": concentration, "gaps": False} | dict(state)


def _counting(tensors: Tensors, settings: Settings) -> Tensors:
    """Return the tensors of batch EM in which sums of k-means tell how many entries were seen.

    Before rows could have missing entries, they told only how many rows there were.
    """
    running = settings["training_state"] and settings["solver"]["name"] == "em"
    if not running or not settings["state"]["kmeans_left"]:
        return tensors
    A, B = tensors["totals.A"], tensors["totals.B"]
    if B.shape[1] == 2:
        return tensors
    return {**tensors, "totals.B": torch.cat([B, A.expand_as(B)], dim=1)}


def _with_variances(tensors: Tensors) -> Tensors:
    """Return averages with variances where they had variances times the component's weight."""
    new = dict(tensors)
    for before in ("running.", "best.running."):
        if before + "U" in new:
            U, weight = new.pop(before + "U"), new[before + "weight"]
            least = torch.finfo(weight.dtype).tiny ** 0.5
            new[before + "V"] = U / weight.clamp(min=least).unsqueeze(-1)
    return new


def _upgraded_state(
    name: str, tensors: Tensors, values: Settings, settings: Settings
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of a solver's state in today's form."""
    tensors, values = dict(tensors), dict(values)
    none = tensors["parameters.means"].new_zeros(0)
    if name != "em":
        tensors["bound"] = tensors["max_precision"]
    else:
        tensors |= {"totals.loss_alone": none, "totals.loss_together": none.clone()}
    if name == "natural":
        K = len(tensors["running.weight"])
        watched = K if values["n_components"] < K else 0
        zeros = none.new_zeros(watched)
        tensors |= {
            "watch.candidates": zeros.bool(),
            "watch.alone": zeros,
            "watch.together": zeros.clone(),
            "watch.rows": none.new_zeros(min(watched, 1)),
        }
        every = settings["solver"]["options"].get("manage_units", 5.0)
        values["last_look"] = float(values["managed"] * every)
    return tensors, values
