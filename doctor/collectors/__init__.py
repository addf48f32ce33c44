"""Collectors of facts about a process and its host, one function with ``@collector`` for each section.

A collector takes a :class:`~doctor.collectors.base.Machine`, so that tests can pass recorded trees. It raises
``NotPresent`` or ``NotVisible`` if the whole section cannot be read, and adds a note to ``hidden`` for a single value.
Only sections in ``MODULES`` are collected.
"""

from __future__ import annotations

import importlib

from doctor.collectors.base import COLLECTORS, Collector

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
"""Module of each section; imported only when its section is collected."""


def collector_for(key: str) -> Collector:
    """Return the collector of the section ``key``; ``KeyError`` for a section without one."""
    importlib.import_module(f"doctor.collectors.{MODULES[key]}")
    return COLLECTORS[key]
