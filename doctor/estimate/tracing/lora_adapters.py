"""LoRA adapters as peft adds them: which layers, which dtypes, which operations.

Operations follow peft 0.20: ``tuners/lora/layer.py`` (``Linear.forward``) and ``tuners/lora/bnb.py``
(``Linear8bitLt.forward``, ``Linear4bit.forward``). Adapters are in float32 (``autocast_adapter_dtype``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Dropout, Identity, Linear, Module

from doctor.core.errors import UnusableError
from doctor.core.text import counted
from doctor.estimate.data_model import LoraAdapters
from doctor.estimate.tracing.quantized_layers import Linear4bit, QuantizedLinear, is_linear, linear_shape

ALL = "all-linear"
SCALING = 2.0

_BY_TARGETS = {
    "q_proj v_proj": "bart gemma gemma2 gemma3_text gpt_neo gptj llama llama4 mistral mixtral opt qwen2 qwen3 stablelm",
    "q v": "mt5 t5",
    "query value": "bert electra layoutlm roberta xlm-roberta",
    "query_key_value": "bloom chatglm falcon gpt_neox RefinedWeb RefinedWebModel",
    "c_attn": "gpt2 gpt_bigcode",
    "q_proj v_proj fc1 fc2": "phi",
    "query_proj value_proj": "deberta-v2",
    "in_proj": "deberta",
    "Wqkv": "mpt",
    "qkv_proj": "codegen",
    "q_proj k_proj v_proj o_proj": "nemotron_h",
    "key value receptance output": "rwkv",
}
"""``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`` of ``peft/utils/constants.py``, peft 0.20."""
_TARGETS = {kind: tuple(names.split()) for names, kinds in _BY_TARGETS.items() for kind in kinds.split()}


class LoraLayer(Module):
    """A frozen linear layer with two adapters beside it."""

    def __init__(self, base: Module, rank: int, dropout: float) -> None:
        super().__init__()
        outputs, inputs = linear_shape(base)
        self.base_layer = base
        self.lora_A = Linear(inputs, rank, bias=False)
        self.lora_B = Linear(rank, outputs, bias=False)
        self.lora_dropout = Dropout(dropout) if dropout else Identity()

    @property
    def weight(self) -> Any:
        """That of the base layer, which some models read (``BaseTunerLayer.weight`` of peft)."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        """That of the base layer."""
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the product of the adapters to that of the base layer."""
        result: torch.Tensor = self.base_layer(x)
        dtype = result.dtype
        if isinstance(self.base_layer, Linear4bit):
            result = result.clone()
        is_quantized = isinstance(self.base_layer, QuantizedLinear)
        if not (is_quantized and torch.is_autocast_enabled(x.device.type)):
            x = x.to(self.lora_A.weight.dtype)
        added = self.lora_B(self.lora_A(self.lora_dropout(x))) * SCALING
        total: torch.Tensor = result + (added.to(dtype) if is_quantized else added)
        return total.to(dtype)


def add_adapters(model: Any, model_type: str, adapters: LoraAdapters) -> tuple[str, ...]:
    """Freeze a model of Transformers, add adapters to it, and return notes.

    Raises:
        UnusableError: no linear layer has one of the names.
    """
    targets = adapters.targets or _TARGETS.get(model_type, (ALL,))
    output = model.get_output_embeddings()
    model.requires_grad_(False)
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fits = name in targets or (bool({ALL, "all"} & set(targets)) and child is not output)
            if fits and is_linear(child) and not isinstance(parent, LoraLayer):
                setattr(parent, name, LoraLayer(child, adapters.rank, adapters.dropout))
                count += 1
    if not count:
        raise UnusableError(f"the model has no linear layer named {' or '.join(targets)}: give --lora-targets")
    # As Transformers' Trainer does with checkpointing: without it, the first block would have no gradient.
    model.enable_input_require_grads()
    names = "all linear layers" if ALL in targets or "all" in targets else ", ".join(targets)
    why = "" if adapters.targets else ", peft's default" if model_type in _TARGETS else " (peft has no default)"
    return (f"LoRA of rank {adapters.rank} on {names}{why}: {counted(count, 'layer')}, adapters in float32",)
