"""What a rank knows before it trains: the facts of the pre-flight, collected in the background; some are read again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import msgspec

from doctor.analysis.visible_devices import states_binding
from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.participant import keys_to_collect
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.collectors.launch.launcher import launch_facts
from doctor.collectors.runner import collect_facts
from doctor.core.background import start_thread
from doctor.core.facts import SECTIONS, GpuFacts, HostUseFacts, LaunchFacts, Missing, Section, StorageFacts
from doctor.monitor.telemetry.host_counters import HostCounters

Sections = dict[str, "Section | Missing"]
Pairs = tuple[tuple[str, str], ...]

REREAD = (GpuFacts.key, "host")
"""Sections of the host that change while it works: clocks, throttling, memory."""
OF_TRAINERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which a Trainer tells the processes that it starts who they are."""
EVERY = 60.0
"""Seconds between two readings of these."""
DEADLINE = 10.0
"""Seconds that a collector may take in the background of a run."""


def settled_launch(launch: LaunchFacts, rank: int, world_size: int) -> LaunchFacts:
    """The launch as the run has settled it. Where no launcher started the processes, the Trainer did: it sets RANK and
    the like itself, in each of them what it needs there, and they are no instructions of the user's."""
    if launch.launcher not in ("none", "lightning"):
        return launch
    return msgspec.structs.replace(
        launch,
        rank=rank,
        world_size=world_size,
        running_together="",
        claims=(),
        variables=tuple(one for one in launch.variables if one.name not in OF_TRAINERS),
    )


class StaticFacts:
    """The sections that no monitor brings. ``key``: what the processes of this job have in common on this host;
    ``directories`` and ``outputs``: as :class:`.Surroundings`; ``rank`` and ``world_size``: this process's place in the
    job that runs."""

    def __init__(self, key: str, directories: Pairs, outputs: Pairs, *, rank: int, world_size: int) -> None:
        self._place = (rank, world_size)
        self._surroundings = Machine(directories=directories, outputs=outputs)
        self._speaker = HostLease(key, host_identity(self._surroundings), "the host of a run")
        self._use = HostCounters()
        self._known: Sections = {}
        self._ready = threading.Event()
        self._read_at = time.monotonic()
        self._reading: threading.Thread | None = None
        own_gpus = states_binding(launch_facts(os.environ))
        self._first = keys_to_collect(leads_host=self._speaker.granted, own_gpus=own_gpus)
        self._start(self._first)

    @property
    def speaks(self) -> bool:
        """Whether this process reads the facts of its host."""
        return self._speaker.granted

    def now(self, patience: float = 0.0) -> Sections:
        """What is known; waits at most ``patience`` seconds for the first reading."""
        self._ready.wait(patience)
        if self.speaks:
            self._known[HostUseFacts.key] = self._use.facts()
            self._again()
        return dict(self._known)

    def storage(self, patience: float = 2.0) -> Sections:
        """The directories and locks as they are now: ranks may wait on a lock."""
        if not self.speaks:
            return {}
        return collect_facts((StorageFacts.key,), self._surroundings, timeout=patience)

    def close(self) -> None:
        """Give the claim back."""
        self._speaker.close()

    def _again(self) -> None:
        reading = self._reading is not None and self._reading.is_alive()
        if not reading and time.monotonic() - self._read_at >= EVERY:
            self._start([key for key in REREAD if isinstance(self._known.get(key), Section)])

    def _start(self, keys: Iterable[str]) -> None:
        self._read_at = time.monotonic()
        self._reading = start_thread("doctor-facts", self._read, tuple(keys))

    def _read(self, keys: tuple[str, ...]) -> None:
        try:
            found = collect_facts(keys, self._surroundings, timeout=DEADLINE)
            launch = found.get(LaunchFacts.key)
            if isinstance(launch, LaunchFacts):
                found[LaunchFacts.key] = settled_launch(launch, *self._place)
            self._known.update({key: value for key, value in found.items() if key in SECTIONS})
        finally:
            self._ready.set()
