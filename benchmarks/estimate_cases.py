"""What ``benchmarks/estimate.py`` compares: model, batch, optimizer, precision, checkpointing, accumulation, ranks."""

from __future__ import annotations

from typing import Any

from estimate_truth import Case

from doctor.estimate.data_model import TrainingPlan

BLOCKS = {
    "bert_transformers": "BertLayer",
    "gpt2_transformers": "GPT2Block",
    "llama_transformers": "LlamaDecoderLayer",
    "resnet": "Residual",
}
"""The class of the blocks that repeat, where it is not ``Block``."""


def _case(name: str, **plan: Any) -> Case:
    return Case(factory=f"tests.estimate.models:{name}", plan=TrainingPlan(**plan), blocks=BLOCKS.get(name, "Block"))


CASES = (
    _case("resnet", optimizer="sgd"),
    _case("resnet", batch_size=2, optimizer="adamw"),
    _case("resnet", batch_size=16, optimizer="sgd", checkpointing=True),
    _case("resnet", optimizer="adamw", precision="bf16-mixed"),
    _case("resnet", batch_size=4, optimizer="sgd", accumulate=4),
    _case("gpt", batch_size=1),
    _case("gpt", batch_size=1, optimizer="sgd"),
    _case("gpt", checkpointing=True),
    _case("gpt", batch_size=1, precision="bf16-mixed"),
    _case("gpt_small"),
    _case("gpt_small", batch_size=16),
    _case("gpt_small", batch_size=16, checkpointing=True),
    _case("gpt_small", batch_size=16, precision="bf16-mixed"),
    _case("gpt_small", batch_size=8, precision="bf16-true"),
    _case("gpt_small", accumulate=4),
    _case("gpt_small", optimizer="adafactor"),
    _case("gpt_small", optimizer="rmsprop"),
    _case("gpt_untied"),
    _case("vit", batch_size=2),
    _case("vit", checkpointing=True),
    _case("lstm", optimizer="adam"),
    _case("lstm", batch_size=32, optimizer="sgd"),
    _case("recommender"),
    _case("recommender", batch_size=4096, optimizer="sgd"),
    _case("moe"),
    _case("moe", batch_size=16, checkpointing=True),
    _case("lora"),
    _case("lora", batch_size=8, checkpointing=True),
    _case("gpt2_transformers"),
    _case("bert_transformers", batch_size=8),
    _case("llama_transformers", batch_size=8),
    _case("llama_transformers", batch_size=8, precision="bf16-mixed", checkpointing=True),
    _case("lightning_gpt"),
    _case("lightning_gpt", batch_size=8, accumulate=2),
    _case("gpt_small", strategy="ddp", devices=2),
    _case("gpt_small", strategy="ddp", devices=2, accumulate=2),
    _case("resnet", strategy="ddp", devices=2, batch_size=4, optimizer="sgd"),
    _case("gpt_small", strategy="fsdp2", devices=2),
    _case("gpt_small", strategy="fsdp2", devices=2, batch_size=8, checkpointing=True),
    _case("llama_transformers", strategy="fsdp2", devices=2, optimizer="sgd"),
)

ON_GPU = (
    _case("gpt", batch_size=16),
    _case("gpt", batch_size=16, checkpointing=True),
    _case("gpt", batch_size=16, precision="bf16-mixed"),
    _case("gpt", batch_size=16, precision="16-mixed"),
    _case("gpt2_dropout", batch_size=16),
    _case("gpt_billion", precision="bf16-true"),
    _case("resnet", batch_size=64, precision="bf16-mixed"),
    _case("vit", batch_size=32, precision="bf16-mixed"),
)
"""Further ones where a GPU runs them: larger than a CPU can do in seconds, or with kernels that a CPU has not."""
