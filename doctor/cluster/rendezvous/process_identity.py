"""Which process of the job this is, and in which run: known before anybody can be asked."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from doctor.collectors.launch.launcher import launch_facts
from doctor.collectors.launch.rank_variables import Environ
from doctor.core.capture import WORLD_LIMIT
from doctor.core.facts import LaunchFacts

_COUNTED_BY = {"SLURM_STEP_ID": "slurm", "OMPI_COMM_WORLD_SIZE": "openmpi", "PMI_SIZE": "pmi"}
"""Marks of launchers that count the processes themselves. Their count is true even where a RANK that was exported
before the start makes all processes say the same, which is a fault to be found and not to be followed."""

_SCHEDULER_JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_RUNS = {
    "TORCHELASTIC_RUN_ID": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
}
"""Variables that name the run, by mark: the same in all of its processes, another in any other run."""


class ProcessIdentity(NamedTuple):
    """A process's place: its number from 0, how many there are, the key of the run, and whether there may be processes
    on other hosts. ``port``: what MASTER_PORT says."""

    number: int
    world_size: int
    key: str
    spans_hosts: bool = True
    port: str = ""

    @property
    def key_here(self) -> str:
        """A name that no other run on this host has at the same time: launchers that give their runs none of their own
        (plain starts, torchrun without ``--rdzv-id``) need a port for each of them."""
        return f"{self.key} {self.port}"


def process_identity(environ: Environ, launch: LaunchFacts | None = None) -> ProcessIdentity | None:
    """The seat of this process; ``None`` where it can't be told, or is outside the world."""
    launch = launch or launch_facts(environ)
    claim = launch.claim(_COUNTED_BY.get(launch.running_together, ""))
    number, size = (claim.rank, claim.world_size) if claim else (launch.rank, launch.world_size)
    if number is None or size is None or not 0 <= number < size <= WORLD_LIMIT:
        return None
    key, port = run_key(environ, launch.running_together), environ.get("MASTER_PORT", "").strip()
    return ProcessIdentity(number, size, key, may_span_hosts(launch), port)


def run_key(environ: Environ, mark: str) -> str:
    """A name for the run that all of its processes derive alike.

    MASTER_ADDR and MASTER_PORT are no part of it: ranks that are told different ones belong together all the same.
    """
    named = {name: environ[name] for name in (*_SCHEDULER_JOBS, *_RUNS.get(mark, ())) if name in environ}
    return hashlib.sha256(json.dumps([mark, named], sort_keys=True).encode()).hexdigest()[:12]


def may_span_hosts(launch: LaunchFacts) -> bool:
    """Whether the job may have several hosts: unless its launcher says that all processes are on this one."""
    own = launch.claim(launch.launcher)
    if own is not None and own.node_count is not None:
        return own.node_count > 1
    here = launch.local_world_size
    return here is None or launch.world_size is None or here < launch.world_size
