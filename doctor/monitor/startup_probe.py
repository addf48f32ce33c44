"""Light probes between the hosts of a run, before its first batch: the gathering of the pre-flight, with probes, on a
board of its own beside the job's store."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from doctor.cluster.gather.coordinator import Coordinator, Superseded
from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.member import GatherMember, NoCoordinator
from doctor.cluster.gather.participant import Participant
from doctor.cluster.gather.probe_schedule import LocalProbeSchedule
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.signing import RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from doctor.cluster.transport.tcp_store import TCPStoreBackend, join_store
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.static_facts import Sections, StaticFacts
from doctor.monitor.watchdog.store_discovery import StoreAddress, derived_run_id, find_store

SECONDS = 15.0
"""For all ranks to come and the probes together."""


_COUNT = itertools.count()
"""Runs whose hosts this process has measured: as many on every rank, which is how they know what they speak of before
they have spoken."""


def probe_hosts(
    facts: StaticFacts,
    *,
    rank: int,
    world_size: int,
    directory: Path | OwnFolder,
    tell: Callable[[str], None],
    secret: Secret | None = None,
) -> Sections:
    """What this rank measured, for its host; empty where it does not speak for one, or where the ranks did not find
    together, of which ``tell`` hears."""
    address = find_store()
    key = f"probes-{derived_run_id(address, next(_COUNT), os.environ)}"
    identity = ProcessIdentity(rank, world_size, key)
    schedule = LocalProbeSchedule(rank, leads_host=facts.speaks, write_line=tell, within=SECONDS / 2)
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
        _take_part(store, identity, participant, schedule, tell)
    except (StoreLost, NoCoordinator, Superseded, OSError, RuntimeError) as lost:  # torch raises RuntimeErrors
        tell(f"the ways between hosts were not measured on rank {rank}: {str(lost) or 'nobody asked'}")
    return schedule.sections


def _open_store(address: StoreAddress | None, directory: Path | OwnFolder, key: str) -> KeyValueStore:
    if address is None:
        return KeyValueStore(FileStoreBackend(directory, key))
    client = join_store(address.host, address.port, SECONDS)
    return KeyValueStore(
        TCPStoreBackend(client, key, f"the store at {address.host}:{address.port}", survives_coordinator=False)
    )


def _take_part(
    store: KeyValueStore,
    identity: ProcessIdentity,
    participant: Participant,
    schedule: LocalProbeSchedule,
    tell: Callable[[str], None],
) -> None:
    close_at = time.monotonic() + SECONDS
    try:
        if identity.number:
            GatherMember(
                store,
                identity,
                participant.join_request,
                participant.member_facts,
                schedule,
                close_at=close_at,
                max_seconds=SECONDS,
            ).participate()
            return
        coordinator = Coordinator(store, identity, secrets.token_hex(8), close_at=close_at, write_line=tell)
        coordinator.open(participant.join_request)
        coordinator.gather(participant.member_facts, schedule)
        coordinator.announce(0)
        coordinator.dismiss()
    finally:
        store.close()
