"""What goes wrong inside a step, in one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from factormix.errors import InputError

__all__ = ["in_one_sentence"]


@contextmanager
def in_one_sentence(step: int, dtype: torch.dtype) -> Iterator[None]:
    """Turn what torch raises in a step, such as a factorisation that failed, into an InputError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()
        reason = text[0].rstrip(". ") if text else type(error).__name__
        wider = "" if dtype == torch.float64 else "dtype='float64', "
        raise InputError(
            f"step {step} of the training failed ({reason}): try {wider}scaling='feature', fewer"
            " components, or a lower max_precision."
        ) from error
