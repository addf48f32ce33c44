"""Collectors: one module, one section. They read and never judge; each module holds one ``COLLECTOR``."""

from __future__ import annotations

import importlib

from doctor.collectors.base import Collector

MODULES: dict[str, str] = {
    "launch": "launch",
    "environment": "environment",
    "master": "master",
    "process": "process",
    "trainer": "trainer",
    "slurm": "slurm",
    "software": "software",
    "nccl": "nccl",
    "host": "host",
    "interfaces": "interfaces",
    "rdma": "rdma",
    "gpus": "gpus",
    "drivers": "drivers",
    "storage": "storage",
    "kernel-log": "kernel_log",
}
"""The module of each section; imported only when its section is asked for."""


def collector_for(key: str) -> Collector:
    """The collector of the section ``key``; ``KeyError`` for a section that nobody collects."""
    module = importlib.import_module(f"doctor.collectors.{MODULES[key]}")
    collector: Collector = module.COLLECTOR
    return collector
