"""A GPT of 124 million parameters for Lightning, to be estimated before it is trained.

``doctor estimate examples/gpt.py:factory --devices 8 --strategy ddp --device "H100 80GB"``
"""

from __future__ import annotations

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: samples, tokens, width."""
        heads = self.mixed(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed(self.after(x))


class Gpt(LightningModule):
    """GPT-2's smallest size; the output layer shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: samples, tokens. Returns a score for each word of the vocabulary."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.output(self.last(x))

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        """The loss of the next token."""
        scores = self(batch[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As GPT-2 was trained."""
        return torch.optim.AdamW(self.parameters(), lr=6e-4)


def factory() -> tuple[Gpt, Tensor]:
    """What ``doctor estimate`` calls: the module and one batch of 8 samples."""
    return Gpt(), torch.randint(0, VOCABULARY, (8, LENGTH + 1))
