"""Reads the configurations of trainers: Accelerate, LLaMA-Factory, Axolotl, TRL and Lightning's command line.

Names and defaults follow Accelerate 1.15 (``utils/dataclasses.py``), LLaMA-Factory of August 2026 (``hparams/``,
``model/adapter.py``), Axolotl of July 2026 (``loaders/model.py``), TRL 0.2x (``ModelConfig``) and Lightning 2.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from doctor.core.errors import UnusableError
from doctor.estimate.configuration.files import read_mapping
from doctor.estimate.data_model import Dtype, LoraAdapters, Precision, Quantization, Strategy

ALL_LINEAR = "all-linear"
_MIXED: dict[str, Precision] = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed", "no": "32-true"}
_BATCH = 8
"""Default ``per_device_train_batch_size`` of Transformers' ``TrainingArguments``."""


class TrainingConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration says of a job; ``None`` or empty for the rest.

    ``model``: a folder or the name of a model in the hub. ``plan``: fields of
    :class:`doctor.estimate.data_model.TrainingPlan`. ``dtype``: of the weights. ``upcasts``: see
    :class:`doctor.estimate.data_model.ModelRecipe`. ``outside``: what it asks for that an estimate leaves out."""

    tool: str
    model: str | None = None
    plan: dict[str, Any] = {}
    sequence_length: int | None = None
    dtype: Dtype | None = None
    lora: LoraAdapters | None = None
    quantization: Quantization | None = None
    double_quantization: bool = True
    upcasts: bool = True
    outside: tuple[str, ...] = ()


def read_training(path: Path) -> TrainingConfiguration:
    """Return what the file says.

    Raises:
        UnusableError: it can't be read, or is the configuration of none of these trainers.
    """
    found = _Settings(path, read_mapping(path))
    for fits, read in _FORMATS:
        if fits(found.values):
            return read(found)
    raise UnusableError(
        f"{path} is not a configuration of Accelerate, LLaMA-Factory, Axolotl, TRL or Lightning's command line"
    )


def is_training(path: Path) -> bool:
    """Whether the file is the configuration of one of these trainers, and not of a model."""
    values = read_mapping(path)
    return any(fits(values) for fits, _ in _FORMATS)


class _Settings:
    """Values of a mapping by name, if they have the expected type. ``path``: of its file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def part(self, name: str) -> _Settings:
        """Return the mapping under a name, empty if there is none."""
        value = self.values.get(name)
        return _Settings(self.path, value if isinstance(value, dict) else {})

    def text(self, *names: str) -> str | None:
        """Return the first text under these names."""
        found = (self.values.get(name) for name in names)
        return next((value for value in found if isinstance(value, str) and value), None)

    def count(self, *names: str) -> int | None:
        """Return the first whole number above 0 under these names."""
        found = (self.values.get(name) for name in names)
        return next((value for value in found if type(value) is int and value > 0), None)

    def number(self, name: str) -> float:
        """Return a number, or 0."""
        value = self.values.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0

    def is_set(self, *names: str) -> bool:
        """Whether one of them is neither absent nor false."""
        return any(self.values.get(name) not in (None, False, "", "false", "no", "none", [], {}) for name in names)

    def named(self, names: Mapping[str, str]) -> Iterator[str]:
        """Return the descriptions of what is set."""
        return (words for name, words in names.items() if self.is_set(name))


def _accelerate(given: _Settings) -> TrainingConfiguration:
    nodes = given.count("num_machines") or 1
    ranks = given.count("num_processes") or nodes
    strategy, offloads = _accelerate_strategy(given)
    mixed = str(given.values.get("mixed_precision") or "no").lower()
    # YAML 1.1 reads an unquoted ``no`` as a boolean.
    plan = {"devices": -(-ranks // nodes), "nodes": nodes, "strategy": strategy, "precision": _MIXED.get(mixed)}
    outside = [
        *offloads,
        *(["float8"] if mixed == "fp8" else []),
        *given.named({"dynamo_config": "torch.compile", "parallelism_config": "tensor or context parallelism"}),
    ]
    accumulate = given.part("deepspeed_config").count("gradient_accumulation_steps")
    return TrainingConfiguration(
        tool="Accelerate", plan=_known({**plan, "accumulate": accumulate}), outside=tuple(outside)
    )


def _accelerate_strategy(given: _Settings) -> tuple[Strategy, list[str]]:
    kind = (given.text("distributed_type") or "NO").upper()
    if kind == "FSDP":
        options = given.part("fsdp_config")
        shards = str(options.values.get("fsdp_sharding_strategy", "")).upper() not in ("NO_SHARD", "3")
        offloads = ["offload to host memory"] if options.is_set("fsdp_offload_params") else []
        if not shards:
            return "ddp", offloads
        return ("fsdp2" if options.count("fsdp_version") == 2 else "fsdp"), offloads
    if kind == "DEEPSPEED":
        options = given.part("deepspeed_config")
        file = options.text("deepspeed_config_file")
        if file:
            return _deepspeed(given, file)
        offloads = ["offload_optimizer_device", "offload_param_device"]
        offloaded = [name for name in offloads if options.text(name) not in (None, "none")]
        return _stage(options.values.get("zero_stage", 2)), ["offload to host memory"] if offloaded else []
    if kind in ("NO", "MULTI_GPU"):
        return ("none" if kind == "NO" else "ddp"), []
    return "ddp", [f"distributed_type {kind[:40]}"]


def _deepspeed(given: _Settings, file: str) -> tuple[Strategy, list[str]]:
    """Return the stage of ZeRO in DeepSpeed's own file, and what it offloads."""
    places = [Path(file), given.path.parent / file]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UnusableError(f"{given.path}: DeepSpeed configuration {file} not found")
    zero = _Settings(path, read_mapping(path)).part("zero_optimization")
    devices = (zero.part(name).text("device") for name in ("offload_optimizer", "offload_param"))
    offloads = any(device not in (None, "none") for device in devices)
    return _stage(zero.values.get("stage", 0)), ["offload to host memory"] if offloads else []


def _stage(stage: object) -> Strategy:
    stages: dict[object, Strategy] = {1: "deepspeed-1", 2: "deepspeed-2", 3: "deepspeed-3"}
    return stages.get(stage, "ddp")


_ARGUMENTS_OUTSIDE = {
    "use_unsloth": "Unsloth",
    "use_dora": "DoRA",
    "use_galore": "GaLore",
    "use_badam": "BAdam",
    "use_liger_kernel": "Liger kernels",
    "enable_liger_kernel": "Liger kernels",
    "torch_compile": "torch.compile",
    "neat_packing": "packing",
}


def _arguments_plan(given: _Settings) -> tuple[dict[str, Any], list[str]]:
    """Return the plan in arguments of Transformers' Trainer, which LLaMA-Factory and TRL extend."""
    precision: Precision = "bf16-mixed" if given.is_set("bf16") else "16-mixed" if given.is_set("fp16") else "32-true"
    strategy, offloads = _arguments_strategy(given)
    plan = {
        "precision": "bf16-true" if given.is_set("pure_bf16") else precision,
        "batch_size": given.count("per_device_train_batch_size") or _BATCH,
        "accumulate": given.count("gradient_accumulation_steps"),
        "optimizer": given.text("optim"),
        "strategy": strategy,
    }
    return _known(plan), [*offloads, *given.named(_ARGUMENTS_OUTSIDE)]


def _arguments_strategy(given: _Settings) -> tuple[Strategy | None, list[str]]:
    zero = given.values.get("deepspeed")
    if isinstance(zero, str) and zero:
        return _deepspeed(given, zero)
    if isinstance(zero, dict):
        return _stage(given.part("deepspeed").part("zero_optimization").values.get("stage", 0)), []
    words = given.values.get("fsdp")
    text = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
    if "shard" not in text:
        return None, []
    options = given.part("fsdp_config")
    version = options.count("fsdp_version", "version")
    return ("fsdp2" if version == 2 else "fsdp"), ["offload to host memory"] if "offload" in text else []


def _llama_factory(given: _Settings) -> TrainingConfiguration:
    plan, outside = _arguments_plan(given)
    plan["checkpointing"] = not given.is_set("disable_gradient_checkpointing")
    kind = given.text("finetuning_type") or "lora"
    stage = given.text("stage") or "sft"
    bits = given.count("quantization_bit")
    if stage not in ("pt", "sft"):
        outside.append(f"stage {stage[:20]}")
    if kind not in ("full", "lora"):
        outside.append(f"finetuning_type {kind[:20]}")
    return TrainingConfiguration(
        tool="LLaMA-Factory",
        model=given.text("model_name_or_path"),
        plan=plan,
        sequence_length=given.count("cutoff_len") or 2048,
        lora=_adapters(given, "lora_rank", 8, _names(given.values.get("lora_target", "all")))
        if kind == "lora"
        else None,
        quantization=_bits(bits),
        double_quantization=given.values.get("double_quantization") is not False,
        upcasts=False,
        outside=tuple(outside),
    )


def _trl(given: _Settings) -> TrainingConfiguration:
    plan, outside = _arguments_plan(given)
    plan["checkpointing"] = given.is_set("gradient_checkpointing")
    uses_lora = given.is_set("use_peft")
    return TrainingConfiguration(
        tool="TRL",
        model=given.text("model_name_or_path"),
        plan=plan,
        sequence_length=given.count("max_length", "max_seq_length"),
        dtype=_dtype(given.text("dtype", "torch_dtype")),
        lora=_adapters(given, "lora_r", 16, _names(given.values.get("lora_target_modules"))) if uses_lora else None,
        quantization=_loaded_in(given),
        double_quantization=given.is_set("use_bnb_nested_quant"),
        outside=tuple(outside),
    )


_AXOLOTL_OUTSIDE = {
    "rl": "reinforcement learning and preferences",
    "peft_use_dora": "DoRA",
    "lora_on_cpu": "adapters on the CPU",
    "torch_compile": "torch.compile",
    "cut_cross_entropy": "cut cross entropy",
    "liger_fused_linear_cross_entropy": "Liger kernels",
    "context_parallel_size": "context parallelism",
    "tensor_parallel_size": "tensor parallelism",
}


def _axolotl(given: _Settings) -> TrainingConfiguration:
    half = given.is_set("bf16", "bfloat16")
    precision: Precision = "bf16-mixed" if half else "16-mixed" if given.is_set("fp16", "float16") else "32-true"
    strategy, offloads = _arguments_strategy(given)
    if strategy is None and given.is_set("fsdp_config"):
        strategy = "fsdp2" if given.count("fsdp_version") == 2 else "fsdp"
    plan = {
        "precision": "bf16-true" if given.is_set("bfloat16") else precision,
        "batch_size": given.count("micro_batch_size") or 1,
        "accumulate": given.count("gradient_accumulation_steps"),
        "optimizer": given.text("optimizer"),
        "checkpointing": given.is_set("gradient_checkpointing"),
        "strategy": strategy,
    }
    adapter = given.text("adapter")
    targets = _names(given.values.get("lora_target_modules"))
    if given.is_set("lora_target_linear"):
        targets = (*targets, ALL_LINEAR)
    dtypes: dict[Precision, Dtype] = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
    outside = [*offloads, *given.named(_AXOLOTL_OUTSIDE)]
    return TrainingConfiguration(
        tool="Axolotl",
        model=given.text("base_model"),
        plan=_known(plan),
        sequence_length=given.count("sequence_len"),
        dtype=dtypes.get(precision),
        lora=_adapters(given, "lora_r", 8, targets) if adapter in ("lora", "qlora") else None,
        quantization=_loaded_in(given),
        upcasts=False,
        outside=tuple(outside if adapter in (None, "lora", "qlora") else [*outside, f"adapter {adapter[:20]}"]),
    )


_LIGHTNING_NAMES = (
    "model_name_or_path",
    "pretrained_model_name_or_path",
    "pretrained_model_name",
    "model_name",
    "model_id",
    "base_model",
    "pretrained",
)


def _lightning(given: _Settings) -> TrainingConfiguration:
    trainer, model, data = given.part("trainer"), given.part("model"), given.part("data")
    strategy, offloads = _lightning_strategy(trainer)
    devices = trainer.values.get("devices")
    optimizer = given.part("optimizer").text("class_path")
    plan = {
        "devices": len(devices) if isinstance(devices, list) else trainer.count("devices"),
        "nodes": trainer.count("num_nodes"),
        "strategy": strategy,
        "precision": _lightning_precision(str(trainer.values.get("precision", ""))),
        "accumulate": trainer.count("accumulate_grad_batches"),
        "batch_size": data.part("init_args").count("batch_size") or data.count("batch_size"),
        "optimizer": optimizer.rpartition(".")[2] if optimizer else None,
        "zero_grad": "late",
        "outputs": "step",
    }
    return TrainingConfiguration(
        tool="Lightning",
        model=model.part("init_args").text(*_LIGHTNING_NAMES) or model.text(*_LIGHTNING_NAMES),
        plan=_known(plan),
        outside=tuple(offloads),
    )


def _lightning_precision(name: str) -> Precision | None:
    known: dict[str, Precision] = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}
    names: tuple[Precision, ...] = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
    return known.get(name) or next((each for each in names if each == name), None)


def _lightning_strategy(trainer: _Settings) -> tuple[Strategy | None, list[str]]:
    given = trainer.text("strategy") or trainer.part("strategy").text("class_path") or ""
    options = trainer.part("strategy").part("init_args")
    name = given.rpartition(".")[2].lower()
    offloads = ["offload to host memory"] if "offload" in name or options.is_set("cpu_offload") else []
    if "modelparallel" in name:
        return "fsdp2", offloads
    if "fsdp" in name:
        return "fsdp", offloads
    if "deepspeed" in name:
        stage = re.search(r"stage_(\d)", name)
        return _stage(int(stage.group(1)) if stage else options.values.get("stage", 2)), offloads
    return ("ddp" if "ddp" in name else None), offloads


def _litgpt(given: _Settings) -> TrainingConfiguration:
    """Refuse a configuration of litgpt, whose models Transformers does not build."""
    raise UnusableError(
        f"{given.path} is a configuration of litgpt, which is not read: name a function that returns "
        "GPT(Config.from_name(NAME)) and {'idx': …, 'targets': …} (make.py:make), or the same model's config.json"
    )


def _adapters(given: _Settings, name: str, default: int, targets: tuple[str, ...]) -> LoraAdapters:
    return LoraAdapters(rank=given.count(name) or default, targets=targets, dropout=given.number("lora_dropout"))


def _names(value: object) -> tuple[str, ...]:
    names: Iterable[object] = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else ()
    return tuple(ALL_LINEAR if str(name).strip() == "all" else str(name).strip() for name in names)


def _bits(bits: int | None) -> Quantization | None:
    return "4bit" if bits == 4 else "8bit" if bits == 8 else None


def _loaded_in(given: _Settings) -> Quantization | None:
    return "4bit" if given.is_set("load_in_4bit") else "8bit" if given.is_set("load_in_8bit") else None


def _dtype(name: str | None) -> Dtype | None:
    names: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
    return next((each for each in names if each == name), None)


def _known(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if value is not None}


_FORMATS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[_Settings], TrainingConfiguration]], ...] = (
    (lambda values: "base_model" in values, _axolotl),
    (
        lambda values: (
            "model_name_or_path" in values and not {"finetuning_type", "template", "stage"}.isdisjoint(values)
        ),
        _llama_factory,
    ),
    (lambda values: "model_name_or_path" in values, _trl),
    (lambda values: "distributed_type" in values or "compute_environment" in values, _accelerate),
    (lambda values: isinstance(values.get("trainer"), dict) and "model" in values, _lightning),
    (lambda values: isinstance(values.get("train"), dict) and "micro_batch_size" in values["train"], _litgpt),
)
"""How each format is recognized."""
