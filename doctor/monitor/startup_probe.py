"""Light probes between the hosts of a run, before its first batch.

Runs the collection protocol of preflight, with probes, under a separate prefix of the job's store.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from doctor.cluster.gather.coordinator import Coordinator, Superseded
from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.member import GatherMember, NoCoordinator
from doctor.cluster.gather.participant import Participant
from doctor.cluster.gather.probe_schedule import ProbeSchedule, light_schedule
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.signing import RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from doctor.cluster.transport.tcp_store import TCPStoreBackend, join_store
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.core.clock import monotonic
from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.static_facts import StaticFacts
from doctor.monitor.telemetry.rank_telemetry import Sections
from doctor.monitor.watchdog.store_discovery import StoreAddress, derived_run_id, find_store

SECONDS = 15.0
"""Time limit in seconds for joining and for all probes together."""
_COUNT = itertools.count()
"""Number of probe runs of this process. It is equal on all ranks, so they derive the same key without communication."""


def probe_hosts(
    facts: StaticFacts,
    *,
    rank: int,
    world_size: int,
    directory: Path | OwnFolder,
    write_line: Callable[[str], None],
    secret: Secret | None = None,
) -> Sections:
    """Run the light probes and return the sections measured for this host.

    Empty if this rank does not hold the host lease, or if the ranks did not find each other, which is reported by
    ``write_line``.
    """
    address = find_store()
    key = f"probes-{derived_run_id(address, next(_COUNT), os.environ)}"
    identity = ProcessIdentity(rank, world_size, key)
    schedule = light_schedule(rank, SECONDS, Machine(), leads_host=facts.leads_host, write_line=write_line)
    participant = Participant(
        identity,
        host_identity(Machine()),
        HostLease(identity.key_here, host_identity(Machine()), f"the probes of rank {rank}"),
        lambda keys: {key: value for key, value in facts.now(SECONDS / 2).items() if key in keys},
        answers_at=schedule.answers_at,
    )
    try:
        store, rejected = _open_store(address, directory, key), RejectedMessages()
        store.wrap(lambda backend: SignedBackend(backend, key, secret, rejected))
        _gather(store, identity, participant, schedule, write_line)
    except (StoreLost, NoCoordinator, Superseded, OSError, RuntimeError) as lost:  # torch raises RuntimeError
        write_line(f"connectivity between hosts was not measured on rank {rank}: {str(lost) or 'no request arrived'}")
    return schedule.sections


def _open_store(address: StoreAddress | None, directory: Path | OwnFolder, key: str) -> KeyValueStore:
    if address is None:
        return KeyValueStore(FileStoreBackend(directory, key))
    client = join_store(address.host, address.port, SECONDS)
    return KeyValueStore(
        TCPStoreBackend(client, key, f"the store at {address.host}:{address.port}", survives_coordinator=False)
    )


def _gather(
    store: KeyValueStore,
    identity: ProcessIdentity,
    participant: Participant,
    schedule: ProbeSchedule,
    write_line: Callable[[str], None],
) -> None:
    close_at = monotonic() + SECONDS
    try:
        if identity.number:
            GatherMember(store, participant, schedule, close_at=close_at, max_seconds=SECONDS).participate()
            return
        coordinator = Coordinator(store, identity, secrets.token_hex(8), close_at=close_at, write_line=write_line)
        coordinator.open(participant.join_request)
        coordinator.gather(participant.member_facts, schedule)
        coordinator.announce(0)
        coordinator.dismiss()
    finally:
        store.close()
