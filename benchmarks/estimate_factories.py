"""Rebuilds the models and batches of ``estimate_published.json`` without weights.

``doctor estimate benchmarks/estimate_factories.py:NAME`` takes the name of any case of that file. Architectures follow
the public configurations and the operations of the sources; no code of theirs is copied.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, misc"
from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from doctor.estimate.data_model import LoraAdapters, Quantization
from doctor.estimate.tracing.lora_adapters import add_adapters
from doctor.estimate.tracing.quantized_layers import quantize

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def __getattr__(name: str) -> Callable[[], Any]:
    """Return the factory of the case of this name."""
    path = Path(__file__).with_name("estimate_published.json")
    for case in msgspec.json.decode(path.read_bytes())["cases"]:
        if case["name"] == name:
            return partial(globals()[case["factory"]], **case.get("arguments", {}))
    raise AttributeError(name)


# --- Transformers, with LoRA as peft adds it ---


def causal_lm(
    kind: str,
    config: dict[str, Any],
    batch: int,
    tokens: int,
    attention: str = "sdpa",
    dtype: str = "fp32",
    lora: int = 0,
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    quantization: Quantization | None = None,
    checkpointing: bool = False,
    expands: bool = False,
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A causal language model of Transformers by its public configuration, whose labels are its inputs.

    ``quantization``: of frozen weights, the others of which are cast to float32. ``expands``: keys and values of
    grouped queries are repeated before ``scaled_dot_product_attention``."""
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    made._attn_implementation = attention
    model = getattr(transformers, f"{kind}ForCausalLM")(made).to(_DTYPES[dtype])
    model.config.use_cache = False
    if quantization is not None:
        quantize(model, quantization, _DTYPES[dtype], _DTYPES[dtype], double=False)
        model = model.float()
    if lora:
        add_adapters(model, "", LoraAdapters(rank=lora, targets=targets))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if expands:
        _expand_groups()
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def _expand_groups() -> None:
    """Let ``scaled_dot_product_attention`` repeat keys and values, and use the memory-efficient kernel.

    An ``attn_mask`` of None with ``is_causal`` selects that kernel on a GPU without flash attention."""
    attention = F.scaled_dot_product_attention
    if hasattr(attention, "expands"):
        return

    def expanding(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        groups = query.size(-3) // key.size(-3)
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
            options.pop("enable_gqa", None)
        return attention(query, key, value, *rest, **options)

    expanding.expands = True  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = expanding


class _SoftmaxWithInput(torch.autograd.Function):
    """Softmax as releases of torch before 1.12 have it: its backward formula takes the input, which is saved, too."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            result = torch.softmax(x, dim, dtype=dtype)
        context.save_for_backward(x, result)
        context.dim = dim
        return result

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        x, result = context.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], result, context.dim, x.dtype), None, None


def _softmax_of_2022(x: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
    is_low = torch.is_autocast_enabled("cuda") and x.dtype is torch.float16
    return _SoftmaxWithInput.apply(x, dim, torch.float32 if is_low else dtype or x.dtype)


class Trainer:
    """Stands for Transformers' Trainer, whose own AdamW of 2022 updates one parameter after the other: it has no
    temporaries as large as all of them, as a fused kernel has none."""

    def __init__(self, model: nn.Module, optimizer: str = "adamw_hf, as fused") -> None:
        self.model, self.args = model, SimpleNamespace(optim=optimizer)


def classifier_of_2022(
    config: dict[str, Any], batch: int, tokens: int
) -> tuple[Trainer, nn.Module, dict[str, torch.Tensor]]:
    """BERT in Transformers' Trainer with torch 1.10."""
    model, inputs = classifier("Bert", config, batch, tokens)
    F.softmax = _softmax_of_2022  # type: ignore[assignment]
    return Trainer(model), model, inputs


def classifier(
    kind: str, config: dict[str, Any], batch: int, tokens: int, attention: str = "eager", masked: bool = False
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A classifier of sequences of Transformers."""
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    made._attn_implementation = attention
    model = getattr(transformers, f"{kind}ForSequenceClassification")(made)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    mask = {"attention_mask": torch.ones(batch, tokens, dtype=torch.long)} if masked else {}
    return model, {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.long), **mask}


def trained_by_trainer(
    kind: str, head: str, config: dict[str, Any], inputs: str, batch: int
) -> tuple[Trainer, nn.Module, dict[str, torch.Tensor]]:
    """A model in Transformers' Trainer of 2024, with the shapes that optimum-benchmark gives to its task."""
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    made._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}{head}" if kind == "GPT2" else f"{kind}For{head}")(made)
    ids = torch.zeros((batch, 1, 16) if inputs == "choice" else (batch, 16), dtype=torch.long)
    labels = ids if inputs == "tokens" else torch.zeros(batch, dtype=torch.long)
    if inputs == "image":
        return Trainer(model, "adamw_torch"), model, {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": labels}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return Trainer(model, "adamw_torch"), model, given


# --- A vision transformer as in torchvision ---


class _VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, width), nn.Dropout(0.0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        y = y + x
        return y + self.mlp(self.ln_2(y))


class VisionTransformer(nn.Module):
    """torchvision's ViT (``torchvision/models/vision_transformer.py``)."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int, patch: int, image: int, classes: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(_VisionBlock(width, heads, hidden) for _ in range(layers))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x)[:, 0])


def vision_transformer(batch: int, **size: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A ViT on images; the logits meet the targets in a cross entropy."""
    image = size["image"]
    return VisionTransformer(**size), (torch.zeros(batch, 3, image, image), torch.zeros(batch, dtype=torch.long))


# --- A GPT written out step by step ---


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class _WrittenAttention(nn.Module):
    def __init__(self, width: int, tokens: int, heads: int, keeps_mask: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        if keeps_mask:
            self.register_buffer("mask", torch.triu(torch.ones(tokens, tokens), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        key, query, value = (
            layer(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for layer in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        mask = getattr(self, "mask", None)
        if mask is None:
            mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1)
        scores.masked_fill_(mask.bool()[:tokens, :tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))


class _FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))


class _WrittenBlock(nn.Module):
    def __init__(self, width: int, tokens: int, heads: int, variant: int) -> None:
        super().__init__()
        norm = nn.LayerNorm if variant >= 6 else _Norm
        self.att = (
            _FusedAttention(width, heads) if variant >= 7 else _WrittenAttention(width, tokens, heads, not variant)
        )
        gelu = nn.GELU(approximate="tanh") if variant >= 6 else _Gelu()
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.norm1, self.norm2, self.drop = norm(width), norm(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.att(self.norm1(x))) + x
        return self.drop(self.ff(self.norm2(x))) + x


class WrittenGpt(nn.Module):
    """GPT-2 of 124 M parameters as a book writes it out; ``variant``: how many of the page's changes are in."""

    def __init__(self, variant: int, vocabulary: int = 50257, tokens: int = 1024, width: int = 768) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(_WrittenBlock(width, tokens, 12, variant) for _ in range(12)))
        self.norm = (nn.LayerNorm if variant >= 6 else _Norm)(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.drop(x))))


def written_gpt(variant: int, batch: int, dtype: str = "fp32") -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The GPT; the cross entropy is that of flattened logits."""
    ids = torch.zeros(batch, 1024, dtype=torch.long)
    return WrittenGpt(variant).to(_DTYPES[dtype]), (ids, ids)


# --- Lightning's Transformer ---


def lightning_transformer() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The LightningModule of the documentation on FSDP, with a batch of WikiText-2: one row of 35 words."""
    import lightning
    from lightning.pytorch.demos import Transformer

    class LanguageModel(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(vocab_size=33278, nlayers=32, nhid=4096, ninp=1024, nhead=64)

        def training_step(self, batch: Any) -> torch.Tensor:
            words, target = batch
            return F.nll_loss(self.model(words, target), target.view(-1))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    ids = torch.zeros(1, 35, dtype=torch.long)
    return LanguageModel(), (ids, ids)


# --- litgpt ---


class _Chunked(nn.Module):
    """litgpt's step: logits in chunks of 128 tokens, and their cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        chunked_cross_entropy = importlib.import_module("litgpt.utils").chunked_cross_entropy
        logits = self.model(ids, lm_head_chunk_size=128)
        logits[-1] = logits[-1][..., :-1, :]
        return chunked_cross_entropy(logits, ids[..., 1:]), logits


def litgpt_lora(
    name: str, batch: int, tokens: int, rank: int = 8, every: bool = False, dropout: float = 0.05
) -> tuple[nn.Module, torch.Tensor]:
    """LoRA of litgpt: of queries and values, or of ``every`` layer."""
    litgpt = importlib.import_module("litgpt.lora")
    layers = ("lora_key", "lora_projection", "lora_mlp", "lora_head") if every else ()
    options = dict.fromkeys(("lora_query", "lora_value", *layers), True)
    config = litgpt.Config.from_name(name, lora_r=rank, lora_alpha=16, lora_dropout=dropout, **options)
    model = litgpt.GPT(config)
    litgpt.mark_only_lora_as_trainable(model)
    model.max_seq_length = tokens
    return _Chunked(model), torch.zeros(batch, tokens, dtype=torch.long)


def litgpt_full(name: str, batch: int, tokens: int) -> tuple[nn.Module, torch.Tensor]:
    """Full fine-tuning of litgpt."""
    litgpt = importlib.import_module("litgpt.model")
    model = litgpt.GPT(litgpt.Config.from_name(name))
    model.max_seq_length = tokens
    return _Chunked(model), torch.zeros(batch, tokens, dtype=torch.long)


# --- torchtitan's Llama ---


class _TitanAttention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head = width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))
        self.times = heads // groups

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (layer(x).view(batch, tokens, -1, self.head) for layer in (self.wq, self.wk, self.wv))
        query, key = self._turned(query, turns), self._turned(key, turns)
        key, value = (self._repeated(each) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(batch, tokens, -1))

    def _turned(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, groups, head = x.shape
        wide = x[:, :, :, None, :].expand(batch, tokens, groups, self.times, head)
        return wide.reshape(batch, tokens, groups * self.times, head)


class _TitanNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class _TitanBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.attention = _TitanAttention(width, heads, groups)
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.attention_norm, self.ffn_norm = _TitanNorm(width), _TitanNorm(width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class TitanLlama(nn.Module):
    """Llama 3.1 8B as torchtitan trains it; ``checkpointing``: ``op``, ``full``, ``2`` (every second layer), or none.

    The loss is calculated inside, so that the logits are released before the backward pass, as in its loop."""

    def __init__(self, checkpointing: str, tokens: int) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tok_embeddings = nn.Embedding(128256, 4096)
        self.register_buffer("turns", torch.zeros(tokens, 64, dtype=torch.complex64), persistent=False)
        self.layers = nn.ModuleList(_TitanBlock(4096, 32, 8, 14336) for _ in range(32))
        self.norm, self.output = _TitanNorm(4096), nn.Linear(4096, 128256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.tok_embeddings(ids)
        for place, layer in enumerate(self.layers, 1):
            x = _checkpointed(layer, self.checkpointing, place)(x, self.turns)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), ids.flatten(0, 1))


def _checkpointed(layer: nn.Module, how: str, place: int) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    if how == "none" or (how.isdigit() and place % int(how)):
        return layer
    if how == "op":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_Policy())
    return lambda *args: checkpoint(layer, *args, **options)


class _Policy:
    """Saves the products, but every second plain one, and attention."""

    def __init__(self) -> None:
        self._count: dict[bool, int] = defaultdict(int)

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy

        aten = torch.ops.aten
        saved = {aten.mm.default, aten._scaled_dot_product_flash_attention.default, aten.max.default}
        saved.add(aten._scaled_dot_product_efficient_attention.default)
        if operation is aten.mm.default:
            self._count[context.is_recompute] += 1
            if self._count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE


def titan_llama(checkpointing: str, batch: int, tokens: int) -> tuple[nn.Module, torch.Tensor]:
    """Llama 3.1 8B and a batch of whole sequences."""
    return TitanLlama(checkpointing, tokens), torch.zeros(batch, tokens, dtype=torch.long)
