"""Models of all the kinds that people train, each made with a batch by a function without arguments: no download."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn


class Residual(nn.Module):
    """A block of a residual network: two convolutions, and the way past them."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.past = (
            nn.Identity() if channels == out and stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(images) + self.past(images))


class ResNet(nn.Module):
    """A residual network for images of any size; its loss."""

    def __init__(self, width: int = 64, depths: tuple[int, ...] = (2, 2, 2, 2), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        sizes = [width << stage for stage in range(len(depths))]
        self.blocks = nn.ModuleList(
            Residual(
                sizes[max(0, stage - 1)] if not block else sizes[stage], sizes[stage], 2 if stage and not block else 1
            )
            for stage, depth in enumerate(depths)
            for block in range(depth)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = self.pool(self.stem(images))
        for block in self.blocks:
            images = block(images)
        return functional.cross_entropy(self.head(images.mean((2, 3))), labels)


class Block(nn.Module):
    """A block of a transformer: attention by ``scaled_dot_product_attention``, then an MLP."""

    def __init__(self, width: int, heads: int, causal: bool = True, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count, length, width = tokens.shape
        parts = self.qkv(self.before(tokens)).split(width, dim=2)
        query, key, value = (part.view(count, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return tokens + self.mlp(self.between(tokens))


class Gpt(nn.Module):
    """A decoder whose head and embedding may share their weights; its loss on the next token."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, length: int, *, tied: bool = True, **kinds: Any
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        make = kinds.get("mlp", lambda: None)
        self.blocks = nn.ModuleList(Block(width, heads, mlp=make()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        hidden = self.tokens(tokens[:, :-1]) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Experts(nn.Module):
    """Each token goes to the expert that a router likes best: how many each gets depends on the data."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        done = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(1)
            done = done.index_add(0, own, (expert(flat[own]) * weight[own, None]).to(done.dtype))
        return done.view_as(tokens)


class Vit(nn.Module):
    """A vision transformer; its loss."""

    def __init__(self, layers: int, width: int, heads: int, size: int, patch: int = 16, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return functional.cross_entropy(self.head(self.norm(self.blocks(tokens)).mean(1)), labels)


class Lstm(nn.Module):
    """Sequences of several lengths, packed; its loss. ``lengths`` lie on the CPU, as torch asks."""

    def __init__(self, vocabulary: int = 20000, width: int = 256, hidden: int = 512, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, 16)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.tokens(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return functional.cross_entropy(self.head(hidden[-1]), labels)


class Recommender(nn.Module):
    """Nearly all parameters are in embedding tables; its loss."""

    def __init__(self, rows: int = 200_000, width: int = 32, tables: int = 6) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.mlp = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, items: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        found = torch.cat([table(items[:, place]) for place, table in enumerate(self.tables)], dim=1)
        return functional.binary_cross_entropy_with_logits(self.mlp(found).squeeze(1), clicked)


class Lora(nn.Module):
    """A frozen linear map with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def _images(count: int, size: int, classes: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def _with_lora(model: Gpt, rank: int = 8) -> Gpt:
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Lora(block.qkv, rank), Lora(block.out, rank)
    return model


def resnet() -> tuple[nn.Module, Any]:
    """11.7 M parameters, images of 128 x 128."""
    return ResNet(), _images(8, 128)


def resnet_tiny() -> tuple[nn.Module, Any]:
    return ResNet(8, (1, 1), 10), _images(4, 32, 10)


def gpt() -> tuple[nn.Module, Any]:
    """124 M parameters, those of GPT-2."""
    return Gpt(12, 768, 12, 50257, 1024), torch.randint(50257, (2, 257))


def gpt_billion() -> tuple[nn.Module, Any]:
    """1.0 B parameters."""
    return Gpt(16, 2048, 16, 50257, 1024, tied=False), torch.randint(50257, (2, 1025))


def gpt_small() -> tuple[nn.Module, Any]:
    return Gpt(4, 256, 8, 8000, 256), torch.randint(8000, (4, 129))


def gpt_untied() -> tuple[nn.Module, Any]:
    return Gpt(4, 256, 8, 8000, 256, tied=False), torch.randint(8000, (4, 129))


def vit() -> tuple[nn.Module, Any]:
    """22 M parameters, ViT-S/16."""
    return Vit(12, 384, 6, 224), _images(4, 224)


def lstm() -> tuple[nn.Module, Any]:
    lengths = torch.tensor([64, 60, 48, 40, 33, 20, 12, 7])
    return Lstm(), (torch.randint(20000, (8, 64)), lengths, torch.randint(16, (8,)))


def recommender() -> tuple[nn.Module, Any]:
    """38 M parameters, nearly all in embeddings."""
    return Recommender(), (torch.randint(200_000, (512, 6)), torch.rand(512))


def moe() -> tuple[nn.Module, Any]:
    return Gpt(4, 256, 8, 8000, 256, mlp=lambda: Experts(256, 4)), torch.randint(8000, (4, 129))


def lora() -> tuple[nn.Module, Any]:
    return _with_lora(Gpt(6, 512, 8, 8000, 256)), torch.randint(8000, (4, 257))


def gpt2_transformers() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=8000, n_positions=256, **still)
    return GPT2LMHeadModel(config), _language(4, 128)


def gpt2_dropout() -> tuple[nn.Module, Any]:
    """With the dropout that its configuration has by default: the kernels for it are others on a GPU than on a CPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=8000, n_positions=256)
    return GPT2LMHeadModel(config), _language(4, 128)


def bert_transformers() -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=1024,
        vocab_size=8000,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), {**_language(4, 128), "attention_mask": torch.ones(4, 128, dtype=torch.long)}


def llama_transformers() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=688,
        vocab_size=8000,
    )
    return LlamaForCausalLM(config), _language(4, 128)


def _language(count: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(8000, (count, length))
    return {"input_ids": tokens, "labels": tokens}


def lightning_gpt() -> tuple[Any, Any]:
    """A LightningModule that configures its own optimizer."""
    from lightning import pytorch as pl

    class LightningGpt(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Gpt(4, 256, 8, 8000, 256)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return LightningGpt(), torch.randint(8000, (4, 129))
