"""Facts of preflight, collected in the background of a run; some are refreshed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import msgspec

from doctor.analysis.visible_devices import states_binding
from doctor.cluster.gather.host_lease import HostLease
from doctor.collectors import keys_to_collect
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.collectors.launch.launcher import launch_facts
from doctor.collectors.runner import collect_facts
from doctor.core.background import start_thread
from doctor.core.clock import monotonic
from doctor.core.facts import SECTIONS, GpuFacts, HostUseFacts, LaunchFacts, Section, StorageFacts
from doctor.knowledge.launcher_index import BY_NAME
from doctor.monitor.telemetry.host_counters import HostCounters
from doctor.monitor.telemetry.rank_telemetry import Sections

Pairs = tuple[tuple[str, str], ...]

REREAD = (GpuFacts.key, "host")
"""Sections of the host that change during a run: clocks, throttling, memory."""
TRAINER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that a Trainer sets in the processes it starts."""
EVERY = 60.0
"""Seconds between two refreshes of the :data:`REREAD` sections."""
DEADLINE = 10.0
"""Time limit in seconds for a collector in the background of a run."""


def settled_launch(launch: LaunchFacts, rank: int, world_size: int) -> LaunchFacts:
    """Return the launch facts with the rank and world size that the run settled on.

    Without a launcher, :data:`TRAINER_VARIABLES` are not the user's configuration and are dropped.
    """
    row = BY_NAME.get(launch.launcher)
    if row is not None and not row.is_script:
        return launch
    return msgspec.structs.replace(
        launch,
        rank=rank,
        world_size=world_size,
        running_together="",
        claims=(),
        variables=tuple(one for one in launch.variables if one.name not in TRAINER_VARIABLES),
    )


class StaticFacts:
    """The sections that telemetry does not provide.

    ``key``: common to the processes of this job on this host; ``directories`` and ``outputs``: as in :class:`.Machine`;
    ``rank`` and ``world_size``: of this process in the running job.
    """

    def __init__(self, key: str, directories: Pairs, outputs: Pairs, *, rank: int, world_size: int) -> None:
        self._rank_and_world_size = (rank, world_size)
        self._machine = Machine(directories=directories, outputs=outputs)
        self._lease = HostLease(key, host_identity(self._machine), "the host of a run")
        self._host_counters = HostCounters()
        self._known: Sections = {}
        self._ready = threading.Event()
        self._read_at = monotonic()
        self._reading: threading.Thread | None = None
        own_gpus = states_binding(launch_facts(os.environ))
        self._start(keys_to_collect(leads_host=self._lease.granted, own_gpus=own_gpus))

    @property
    def leads_host(self) -> bool:
        """Whether this process collects the facts of its host."""
        return self._lease.granted

    def now(self, timeout: float = 0.0) -> Sections:
        """Return the known sections; wait at most ``timeout`` seconds for the first collection."""
        self._ready.wait(timeout)
        if self.leads_host:
            self._known[HostUseFacts.key] = self._host_counters.facts()
            reading = self._reading is not None and self._reading.is_alive()
            if not reading and monotonic() - self._read_at >= EVERY:
                self._start([key for key in REREAD if isinstance(self._known.get(key), Section)])
        return dict(self._known)

    def storage(self, timeout: float = 2.0) -> Sections:
        """Collect directories and locks again: ranks may be blocked on a lock."""
        if not self.leads_host:
            return {}
        return collect_facts((StorageFacts.key,), self._machine, timeout=timeout)

    def close(self) -> None:
        """Release the host lease."""
        self._lease.close()

    def _start(self, keys: Iterable[str]) -> None:
        self._read_at = monotonic()
        self._reading = start_thread("doctor-facts", self._read, tuple(keys))

    def _read(self, keys: tuple[str, ...]) -> None:
        try:
            found = collect_facts(keys, self._machine, timeout=DEADLINE)
            launch = found.get(LaunchFacts.key)
            if isinstance(launch, LaunchFacts):
                found[LaunchFacts.key] = settled_launch(launch, *self._rank_and_world_size)
            self._known.update({key: value for key, value in found.items() if key in SECTIONS})
        finally:
            self._ready.set()
