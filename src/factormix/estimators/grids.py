"""Grids of sizes: which numbers of components and of factors are tried."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

from factormix.defaults import N_COMPONENTS
from factormix.errors import InputError
from factormix.estimators.options import factors_for
from factormix.estimators.validation import check_count

if TYPE_CHECKING:
    from tqdm.auto import tqdm

__all__ = ["Size", "SizesBar", "check_numbers", "cost", "grid"]

COMPONENTS = (1, 2, 5, 10, N_COMPONENTS, 50, 100)
ROWS_PER_COMPONENT = 20
"""Rows below which a component is not tried unless it is asked for."""
FACTORS = (0, 2, 4, 8)

Size = tuple[int, int]
"""Number of components and number of factors."""


def grid(n_components: Any, n_factors: Any, n_rows: int, n_features: int) -> list[Size]:
    """Return the sizes to try, those that train fastest first.

    ``n_rows`` and ``n_features`` are those that there are to learn from. Where nothing is given,
    components have 20 rows or more on average, and there are fewer factors than features.
    """
    components = check_numbers(n_components, "n_components", 1)
    factors = check_numbers(n_factors, "n_factors", 0)
    if components is None:
        components = [K for K in COMPONENTS if K == 1 or n_rows >= K * ROWS_PER_COMPONENT]
    if factors is None:
        few = (0, 1) if n_features == 2 else FACTORS
        factors = [l for l in few if l == 0 or l < n_features]
    for l in factors:
        factors_for(l, n_features)
    least = max(2, *components)
    if n_rows < least:
        raise InputError(
            f"there are {n_rows} rows to learn from, fewer than the {least} that n_components="
            f"{max(components)} needs: try fewer components or give more rows."
        )
    return sorted(product(components, factors), key=cost)


def cost(size: Size) -> int:
    """Return the relative cost of a step: the width of its matrix products."""
    K, l = size
    return K * (l + 2)


def check_numbers(given: Any, name: str, least: int) -> list[int] | None:
    """Return whole numbers in order and without repetition; one number stands for itself."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    numbers = sorted({check_count(one, name, least) for one in (given if several else [given])})
    if not numbers:
        raise InputError(f"{name} is empty: give the numbers to try, as in {name}=[5, 10, 20].")
    return numbers


class SizesBar:
    """Show on standard error how much of a search is done, and the best so far."""

    FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

    def __init__(self, sizes: list[Size], shown: bool) -> None:
        self._costs, self._shown = {size: cost(size) for size in sizes}, shown
        self._shares = dict.fromkeys(sizes, 0.0)
        self._size: Size | None = None
        self._bar: tqdm[None] | None = None

    def begin(self, size: Size, best: str) -> None:
        """Turn to a size; the one before is done with for now."""
        if self._shown and self._bar is None:
            from tqdm.auto import tqdm

            total = sum(self._costs.values())
            self._bar = tqdm(total=total, bar_format=self.FORMAT, dynamic_ncols=True)
        self._size = size
        if self._bar is not None:
            now = f"K={size[0]}, l={size[1]} of {len(self._costs)} sizes"
            self._bar.set_postfix_str(f"{now}; {best}" if best else now)

    def move(self, share: float) -> None:
        """Say how much of a size is done."""
        if self._bar is not None and self._size is not None:
            self._shares[self._size] = share
            done = sum(self._costs[size] * part for size, part in self._shares.items())
            self._bar.update(max(0.0, done - self._bar.n))

    def close(self, best: str) -> None:
        """Leave the bar with the best of all."""
        if self._bar is not None:
            self._bar.set_postfix_str(best)
            self._bar.close()
