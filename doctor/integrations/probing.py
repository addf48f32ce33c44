"""Light probes between the hosts of a run, before its first batch: the gathering of the pre-flight, with probes, on a
board of its own beside the job's store."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from doctor.collectors.base import Surroundings
from doctor.collectors.identity import host_identity
from doctor.folders import OwnFolder
from doctor.gather.attending import Attendant, NobodyKeeps
from doctor.gather.board import Board, BoardLost
from doctor.gather.folder import Folder
from doctor.gather.keeping import Keeper, Superseded
from doctor.gather.party import Party
from doctor.gather.seat import Seat
from doctor.gather.signing import Rejected, Secret, Signed
from doctor.gather.speaker import Claim
from doctor.gather.store import Store, join_store
from doctor.gather.survey import LocalLightSurvey
from doctor.integrations.base_facts import BaseFacts, Sections
from doctor.sentinel.way import Address, derived_run, find_store

SECONDS = 15.0
"""For all ranks to come and the probes together."""


_COUNT = itertools.count()
"""Runs whose hosts this process has measured: as many on every rank, which is how they know what they speak of before
they have spoken."""


def probe_between(
    facts: BaseFacts,
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
    key = f"probes-{derived_run(store, next(_COUNT), os.environ)}"
    seat = Seat(rank, world_size, key)
    survey = LocalLightSurvey(rank, speaks=facts.speaks, tell=tell, within=SECONDS / 2)
    party = Party(
        seat,
        host_identity(Surroundings()),
        Claim(seat.key_here, host_identity(Surroundings()), f"the probes of rank {rank}"),
        lambda keys: {key: value for key, value in facts.now(SECONDS / 2).items() if key in keys},
        answers_at=survey.answers_at,
    )
    try:
        board, rejected = _board(store, directory, key), Rejected()
        board.wrap(lambda carrier: Signed(carrier, key, secret, rejected))
        _take_part(board, seat, party, survey, tell)
    except (BoardLost, NobodyKeeps, Superseded, OSError, RuntimeError) as lost:  # torch raises RuntimeErrors
        tell(f"the ways between hosts were not measured on rank {rank}: {str(lost) or 'nobody asked'}")
    return survey.sections


def _board(store: Address | None, directory: Path | OwnFolder, key: str) -> Board:
    if store is None:
        return Board(Folder(directory, key))
    carrier = join_store(store.host, store.port, SECONDS)
    return Board(Store(carrier, key, f"the store at {store.host}:{store.port}", outlives_its_keeper=False))


def _take_part(board: Board, seat: Seat, party: Party, survey: LocalLightSurvey, tell: Callable[[str], None]) -> None:
    close_at = time.monotonic() + SECONDS
    try:
        if seat.number:
            Attendant(board, seat, party.hello, party.card, survey, close_at=close_at, longest=SECONDS).attend()
            return
        keeper = Keeper(board, seat, secrets.token_hex(8), close_at=close_at, tell=tell)
        keeper.open(party.hello)
        keeper.gather(party.card, survey)
        keeper.announce(0)
        keeper.dismiss()
    finally:
        board.close()
