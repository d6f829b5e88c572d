"""What the choice of a size found: a table of sizes, and the best model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from factormix.estimators.mfa import MFA

__all__ = ["Selection", "Trained"]


@dataclass(frozen=True)
class Trained:
    """A size that was tried, and what came of it."""

    n_components: int
    n_factors: int
    value: float
    """Mean log-likelihood of held-out rows, the higher the better; or bic, aic or icl, the lower
    the better.
    """
    difference: float
    """How far the value is from the best one: zero for the best, and negative for all others."""
    error: float | None
    """Standard error of the difference, from the same held-out rows; None for other criteria."""
    n_far: int
    """Held-out rows that score far below all others, more than twenty ranges of the middle half
    below the median: they count as that far, and no more. If there are some, a smaller
    ``max_precision`` may be better.
    """
    log_likelihood: float
    """Mean log-likelihood of the last batches of the training."""
    n_parameters: int
    components_in_use: int
    effective_factors: float
    """Mean of the effective number of factors of the components, by their weights."""
    seconds: float
    status: str
    """"done"; "stopped", if it lay so far behind that it was not trained to the end; "interrupted";
    or "failed" with the reason.
    """

    @classmethod
    def failed(cls, size: tuple[int, int], reason: str) -> Trained:
        """Describe a size that could not be trained."""
        nan = math.nan
        return cls(*size, nan, -math.inf, None, 0, nan, 0, 0, nan, 0.0, f"failed: {reason}")


@dataclass(frozen=True)
class Selection:
    """What ``select`` found.

    Attributes
    ----------
    criterion : str
        ``"held_out"``, ``"bic"``, ``"aic"`` or ``"icl"``.
    sizes : list of Trained
        All sizes that were tried, in the order of components and factors.
    best_params_ : dict
        ``n_components`` and ``n_factors`` of the best size.
    best_score_ : float
        Its value of the criterion.
    best_estimator_ : MFA
        The best model: trained again on all rows with ``refit=True``, else as it was judged.
    complete : bool
        False where an interrupt left sizes out, or the training on all rows.
    """

    criterion: str
    sizes: list[Trained]
    best_size: tuple[int, int]
    best_estimator_: MFA = field(repr=False)
    complete: bool = True

    @property
    def best(self) -> Trained:
        """The best size."""
        return next(s for s in self.sizes if (s.n_components, s.n_factors) == self.best_size)

    @property
    def best_params_(self) -> dict[str, int]:
        """Options of the best size, as ``MFA`` takes them."""
        return {"n_components": self.best.n_components, "n_factors": self.best.n_factors}

    @property
    def best_score_(self) -> float:
        """The best value of the criterion."""
        return self.best.value

    def records(self) -> list[dict[str, Any]]:
        """Return one dict for each size, ready for JSON, CSV or a data frame."""
        name = self.criterion
        return [
            {
                "n_components": one.n_components,
                "n_factors": one.n_factors,
                name: one.value,
                "difference": one.difference,
                "error": one.error,
                "n_far": one.n_far,
                "log_likelihood": one.log_likelihood,
                "n_parameters": one.n_parameters,
                "components_in_use": one.components_in_use,
                "effective_factors": one.effective_factors,
                "seconds": one.seconds,
                "status": one.status,
            }
            for one in self.sizes
        ]

    def to_frame(self) -> Any:
        """Return the table as a pandas data frame."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame needs pandas: run `pip install pandas`") from error
        return pandas.DataFrame(self.records())

    def __str__(self) -> str:
        """Write the table as text; a star marks the best size."""
        titles = ["", "K", "l", self.criterion, "difference", "far out", "parameters", "in use"]
        lines = [[*titles, "factors", "seconds", ""]]
        lines += [_cells(one, one is self.best) for one in self.sizes]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(line[:-1], widths, strict=False))
            + f"  {line[-1]}".rstrip()
            for line in lines
        )


def _cells(one: Trained, best: bool) -> list[str]:
    error = "" if one.error is None or best else f" ± {one.error:.2g}"
    return [
        "*" if best else "",
        str(one.n_components),
        str(one.n_factors),
        f"{one.value:.6g}",
        "" if best else f"{one.difference:.4g}{error}",
        "" if one.error is None else str(one.n_far),
        f"{one.n_parameters:,}",
        str(one.components_in_use),
        f"{one.effective_factors:.1f}",
        f"{one.seconds:.1f}",
        "" if one.status == "done" else one.status,
    ]
