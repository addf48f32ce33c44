"""Collectors of facts about a process and its host, one function with ``@collector`` for each section.

A collector takes a :class:`~doctor.collectors.base.Machine`, so that tests can pass recorded trees. It raises
``NotPresent`` or ``NotVisible`` if the whole section cannot be read, and adds a note to ``hidden`` for a single value.
Only sections in ``MODULES`` are collected.
"""

from __future__ import annotations

import importlib

from doctor.collectors.base import COLLECTORS, Collector
from doctor.core.facts import SECTIONS, GpuFacts, SlurmFacts

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


def keys_to_collect(*, leads_host: bool, own_gpus: bool = False) -> tuple[str, ...]:
    """Return the sections that a process collects: those of its host only if it leads the host.

    ``own_gpus``: its visible GPUs may differ from those of other processes on the host.
    """
    # SLURM is queried by the first task of a node, whether or not it leads the host.
    of_host = (SlurmFacts.key, GpuFacts.key) if own_gpus else (SlurmFacts.key,)
    return tuple(key for key in MODULES if leads_host or SECTIONS[key].level == "rank" or key in of_host)


def collector_for(key: str) -> Collector:
    """Return the collector of the section ``key``; ``KeyError`` for a section without one."""
    importlib.import_module(f"doctor.collectors.{MODULES[key]}")
    return COLLECTORS[key]
