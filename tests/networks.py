"""Small networks and a tokenizer for tests of activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

N_TOKENS = 50


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, h: Tensor) -> tuple[Tensor, str]:
        return h + torch.tanh(self.dropout(self.mix(h))), "beside"


def look_back(h: Tensor) -> Tensor:
    """Add to each token (B, T, d) the mean of all up to it, as attention may."""
    return h + h.cumsum(dim=1) / torch.arange(1, h.shape[1] + 1, device=h.device).view(-1, 1)


class Network(nn.Module):
    """Embeddings, means over earlier tokens, and three blocks, whose outputs are tuples."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(N_TOKENS, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(3))
            self.head = nn.Linear(width, N_TOKENS)
            self.unused = nn.Linear(width, width)
        self.calls = 0

    def hidden(self, input_ids: Tensor, n_blocks: int) -> Tensor:
        """Compute the output of block ``n_blocks - 1`` without hooks, in evaluation mode."""
        h = look_back(self.embed(input_ids))
        for block in self.blocks[:n_blocks]:
            h = h + torch.tanh(block.mix(h))
        return h

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        h = look_back(self.embed(input_ids))
        for block in self.blocks:
            h, _ = block(h)
        return self.head(h)


class Tokenizer:
    """One token for each letter, called as fast tokenizers of ``transformers`` are."""

    model_max_length = 12

    def __call__(
        self, texts, *, truncation=False, max_length=None, return_overflowing_tokens=False
    ):
        rows = [[ord(c) % (N_TOKENS - 1) + 1 for c in text] for text in texts]
        if not truncation:
            return {"input_ids": rows}
        if not return_overflowing_tokens:
            return {"input_ids": [row[:max_length] for row in rows]}
        windows = [
            (i, row[at : at + max_length])
            for i, row in enumerate(rows)
            for at in range(0, max(1, len(row)), max_length)
        ]
        owners, ids = zip(*windows, strict=True)
        return {"input_ids": list(ids), "overflow_to_sample_mapping": list(owners)}

    def decode(self, ids):
        return " ".join(f"t{i}" for i in ids)


def make_ids(n: int = 24, length: int = 10, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, N_TOKENS, (n, length), generator=generator)
