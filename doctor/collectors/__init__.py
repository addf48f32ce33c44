"""Collectors of facts about a process and its host: one module for each section, with one ``COLLECTOR``."""

from __future__ import annotations

import importlib

from doctor.collectors.base import Collector

MODULES: dict[str, str] = {
    "launch": "launch.launcher",
    "environment": "software.environment",
    "master": "network.master_address",
    "process": "host.own_process",
    "trainer": "launch.trainer_variables",
    "slurm": "launch.slurm_job",
    "software": "software.python_environment",
    "nccl": "nccl.configuration",
    "host": "host.system",
    "interfaces": "network.interfaces",
    "rdma": "network.rdma",
    "gpus": "gpu.gpus",
    "drivers": "gpu.drivers",
    "storage": "storage.directories",
    "kernel-log": "host.kernel_log",
}
"""The module of each section; imported only when its section is asked for."""


def collector_for(key: str) -> Collector:
    """The collector of the section ``key``; ``KeyError`` for a section without a collector."""
    module = importlib.import_module(f"doctor.collectors.{MODULES[key]}")
    collector: Collector = module.COLLECTOR
    return collector
