"""Recognizes the launcher or trainer that a configuration belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from doctor.lint.launch.yaml_tree import YamlNode


class LauncherConfig(NamedTuple):
    """One configuration. ``kind``: ``accelerate``, ``deepspeed`` or ``llamafactory``."""

    kind: str
    root: YamlNode


STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
"""Of LLaMA-Factory (src/llamafactory/hparams/finetuning_args.py)."""
_TRAINS = ("per_device_train_batch_size", "do_train", "dataset", "output_dir")


def configs_in(tree: YamlNode) -> Iterator[LauncherConfig]:
    """The configuration in a document, and a DeepSpeed configuration nested in it."""
    kind = _kind_of(tree)
    if kind:
        yield LauncherConfig(kind, tree)
    inner = tree.get("deepspeed") if kind == "llamafactory" else None
    if inner is not None and inner.is_mapping:
        yield LauncherConfig("deepspeed", inner)


def _kind_of(tree: YamlNode) -> str:
    if tree.get("distributed_type") is not None and (tree.get("num_processes") or tree.get("compute_environment")):
        return "accelerate"
    # Many programs know a train_batch_size, none of them ``{"fp16": {"enabled": …}}`` beside it.
    is_precise = any(tree.get(name, "enabled") is not None for name in ("fp16", "bf16", "bfloat16"))
    is_small = tree.get("train_batch_size") is not None and is_precise
    if tree.get("zero_optimization") or tree.get("train_micro_batch_size_per_gpu") or is_small:
        return "deepspeed"
    # Configurations for inference and merging have no ranks.
    named = tree.get("finetuning_type") is not None or tree.word("stage") in STAGES
    trains = tree.get("model_name_or_path") is not None and any(tree.get(name) is not None for name in _TRAINS)
    return "llamafactory" if named and trains else ""
