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
    store = find_store()
    key = f"probes-{derived_run_id(store, next(_COUNT), os.environ)}"
    seat = ProcessIdentity(rank, world_size, key)
    survey = LocalProbeSchedule(rank, speaks=facts.speaks, tell=tell, within=SECONDS / 2)
    party = Participant(
        seat,
        host_identity(Machine()),
        HostLease(seat.key_here, host_identity(Machine()), f"the probes of rank {rank}"),
        lambda keys: {key: value for key, value in facts.now(SECONDS / 2).items() if key in keys},
        answers_at=survey.answers_at,
    )
    try:
        board, rejected = _board(store, directory, key), RejectedMessages()
        board.wrap(lambda carrier: SignedBackend(carrier, key, secret, rejected))
        _take_part(board, seat, party, survey, tell)
    except (StoreLost, NoCoordinator, Superseded, OSError, RuntimeError) as lost:  # torch raises RuntimeErrors
        tell(f"the ways between hosts were not measured on rank {rank}: {str(lost) or 'nobody asked'}")
    return survey.sections


def _board(store: StoreAddress | None, directory: Path | OwnFolder, key: str) -> KeyValueStore:
    if store is None:
        return KeyValueStore(FileStoreBackend(directory, key))
    carrier = join_store(store.host, store.port, SECONDS)
    return KeyValueStore(
        TCPStoreBackend(carrier, key, f"the store at {store.host}:{store.port}", outlives_its_keeper=False)
    )


def _take_part(
    board: KeyValueStore,
    seat: ProcessIdentity,
    party: Participant,
    survey: LocalProbeSchedule,
    tell: Callable[[str], None],
) -> None:
    close_at = time.monotonic() + SECONDS
    try:
        if seat.number:
            GatherMember(board, seat, party.hello, party.card, survey, close_at=close_at, longest=SECONDS).attend()
            return
        keeper = Coordinator(board, seat, secrets.token_hex(8), close_at=close_at, tell=tell)
        keeper.open(party.hello)
        keeper.gather(party.card, survey)
        keeper.announce(0)
        keeper.dismiss()
    finally:
        board.close()
