"""A share of every batch, for one of several processes that read the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from factormix.data.batches import Batch, weightless
from factormix.data.sources.protocol import Rows

__all__ = ["Share", "share_of_batch"]


class Share:
    """Serve one of ``count`` shares of every batch, the rows of all shares being the batch.

    Rows that know how to read a share alone do so; of others, the rest is read and left out.
    """

    def __init__(self, rows: Rows, index: int, count: int) -> None:
        self._rows, self._index, self._count = rows, index, count
        self.complete: bool = getattr(rows, "complete", False)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the share of each batch; see ``Rows``."""
        order: dict[str, Any] = {"seed": seed, "epoch": epoch, "start": start}
        own = getattr(self._rows, "shuffled_share", None)
        if own is not None:
            return own(batch_size, share=(self._index, self._count), **order)  # type: ignore[no-any-return]
        batches = self._rows.shuffled(batch_size, **order)
        return (share_of_batch(batch, self._index, self._count) for batch in batches)


def share_of_batch(batch: Batch, index: int, count: int) -> Batch:
    """Return one of the shares of a batch; where there are too few rows, one without weight."""
    first, end = (len(batch) * i // count for i in (index, index + 1))
    if end > first:
        return batch.take(slice(first, end))
    return weightless(batch)
