"""Rank, world size and run of a process, known from the environment alone."""

from __future__ import annotations

import hashlib
import json

import msgspec

from doctor.collectors.launch.launcher import launch_facts
from doctor.collectors.launch.rank_variables import Environ
from doctor.core.capture import WORLD_LIMIT
from doctor.core.facts import LaunchFacts
from doctor.knowledge.launcher_index import COUNTED, JOB_VARIABLES

_COUNTED = {count.mark: row for row, count in COUNTED}
"""Launchers that count the processes themselves, by mark. Their count holds even if a RANK exported before the start
makes all processes claim the same rank: that is a fault to report, not a number to follow."""

RUN_MARKS = tuple(counts.mark for row, counts in COUNTED if row.run_variables)
"""Marks of the launchers that name their runs."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process: its rank, the world size, the key of the run.

    ``spans_hosts``: whether there may be processes on other hosts. ``port``: the value of MASTER_PORT.
    """

    number: int
    world_size: int
    key: str
    spans_hosts: bool = True
    port: str = ""

    @property
    def key_here(self) -> str:
        """Name that no other run on this host has at the same time.

        Launchers that do not identify their runs (plain starts, torchrun without ``--rdzv-id``) need a port for each of
        them.
        """
        return f"{self.key} {self.port}"


def process_identity(environ: Environ, launch: LaunchFacts | None = None) -> ProcessIdentity | None:
    """Return the identity of this process; ``None`` if unknown or outside the world size."""
    launch = launch or launch_facts(environ)
    counted_by = _COUNTED.get(launch.running_together)
    claim = launch.claim(counted_by.claim) if counted_by else None
    number, size = (claim.rank, claim.world_size) if claim else (launch.rank, launch.world_size)
    if number is None or size is None or not 0 <= number < size <= WORLD_LIMIT:
        return None
    key, port = run_key(environ, launch.running_together), environ.get("MASTER_PORT", "").strip()
    return ProcessIdentity(number, size, key, may_span_hosts(launch), port)


def identity_of_turn(identity: ProcessIdentity, turn: int) -> ProcessIdentity:
    """Return the identity of the same process in another gather of the same run, which shares no messages with it."""
    if not turn:
        return identity
    return msgspec.structs.replace(identity, key=hashlib.sha256(f"{identity.key} {turn}".encode()).hexdigest()[:12])


def run_key(environ: Environ, mark: str) -> str:
    """Return a key of the run that is the same in all of its processes.

    MASTER_ADDR and MASTER_PORT are not part of it: ranks with different values still belong together.
    """
    launcher = _COUNTED.get(mark)
    names = (*JOB_VARIABLES, *launcher.run_variables) if launcher else JOB_VARIABLES
    named = {name: environ[name] for name in names if name in environ}
    return hashlib.sha256(json.dumps([mark, named], sort_keys=True).encode()).hexdigest()[:12]


def may_span_hosts(launch: LaunchFacts) -> bool:
    """Return whether the job may have several hosts, unless its launcher rules that out."""
    own = launch.claim(launch.launcher)
    if own is not None and own.node_count is not None:
        return own.node_count > 1
    here = launch.local_world_size
    return here is None or launch.world_size is None or here < launch.world_size
