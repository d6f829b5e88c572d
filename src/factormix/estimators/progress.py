"""A bar for estimators that train several mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(total: int, verbose: int) -> Iterator[Callable[[str], object]]:
    """Show a bar that the yielded function moves on, with a remark."""
    if not verbose:
        yield lambda remark: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="mixture") as bar:

        def tell(remark: str) -> None:
            bar.set_postfix_str(remark, refresh=False)
            bar.update()

        yield tell
