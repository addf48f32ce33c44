"""Reads YAML and JSON of schedulers and launchers: Kubernetes jobs, Accelerate, DeepSpeed, LLaMA-Factory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from doctor.core.text import lazy_compile
from doctor.lint.engine.discovery import UnreadableFile
from doctor.lint.launch.configs import LauncherConfig, configs_in
from doctor.lint.launch.kubernetes import Workload, workloads_in
from doctor.lint.launch.launch_file import LaunchFile
from doctor.lint.launch.yaml_tree import YamlNode, is_template, read_trees


@dataclass(frozen=True)
class Manifest(LaunchFile):
    """``configs``: of launchers; ``workloads``: jobs of Kubernetes."""

    configs: tuple[LauncherConfig, ...] = ()
    workloads: tuple[Workload, ...] = ()

    def of_kind(self, kind: str) -> Iterator[YamlNode]:
        """The configurations of one kind."""
        return (config.root for config in self.configs if config.kind == kind)


_CUES = lazy_compile(
    r"^\s*[\"']?kind[\"']?\s*:\s*[\"']?(?:PyTorchJob|MPIJob|TrainJob|JobSet|Job|Pod)\b"
    r"|^\s*[\"']?(?:compute_environment|distributed_type)[\"']?\s*:"
    r"|[\"'](?:zero_optimization|train_micro_batch_size_per_gpu|finetuning_type)[\"']\s*:|[\"'](?:fp16|bf16|bfloat16)[\"']\s*:\s*\{"
    r"|^finetuning_type\s*:|^[\"']?stage[\"']?\s*:\s*(?:pt|sft|rm|ppo|dpo|kto)\b",
    re.MULTILINE,
)
"""Every file of interest matches; others are not parsed."""


def read_manifest(path: str, text: str) -> Manifest | None:
    """Read a YAML or JSON file; ``None`` if its kind is unknown."""
    if not _CUES.search(text):
        return None
    if is_template(text):
        raise UnreadableFile("it is a template")
    trees = read_trees(text.replace("\t", " ") if path.lower().endswith(".json") else text)
    configs = tuple(config for tree in trees for config in configs_in(tree))
    workloads = tuple(one for tree in trees for one in workloads_in(tree))
    if not configs and not workloads:
        return None
    containers = [box for one in workloads for role in one.roles for box in role.containers]
    return Manifest(
        path,
        tuple(setting for box in containers for setting in box.settings),
        tuple(launch for box in containers for launch in box.launches),
        (),
        configs,
        workloads,
    )
