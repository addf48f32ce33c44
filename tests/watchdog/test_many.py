"""Sixty-four ranks as threads of one process: nobody hears anything twice, and it costs little."""

import itertools
import threading
import time

import pytest

from doctor.cluster.transport import failover
from doctor.cluster.transport.tcp_store import TCPStoreBackend
from doctor.monitor.watchdog import admission, incidents, store_discovery, watchdog
from doctor.monitor.watchdog.rounds import collection_round, requested_rounds
from doctor.monitor.watchdog.rounds.collection_round import RoundTimeouts
from doctor.monitor.watchdog.store_discovery import StoreAddress
from doctor.monitor.watchdog.watchdog import Decision, Watchdog
from tests.cluster.boards import store_boards
from tests.lab.speed import patience, slowness
from tests.watchdog.ranks import ScriptedSource

WORLD = 64
LIMIT = patience(40)
"""Seconds in which all of them meet or leave."""


class Calm(ScriptedSource):
    """One that never stands still by itself. Stacks of threads are no stacks of processes."""

    def __init__(self, rank):
        super().__init__(rank, hang_after=1e9)

    def position(self):
        return self.current_facts()


class Ranks:
    """All of them, each with a watchdog and a source that stalls on demand."""

    def __init__(self, directory):
        self.judged, self.told = [], []
        self.sources = [Calm(number) for number in range(WORLD)]
        self.watchdogs = [
            Watchdog(
                number, WORLD, source, directory, self._evaluate(number), write_line=self.told.append, round_seconds=0.5
            )
            for number, source in enumerate(self.sources)
        ]

    def _evaluate(self, number):
        def judge(job, occasion):
            self.judged.append((occasion, number, len(job.ranks), job.ungathered))
            return Decision(words="well")

        return judge

    def all(self, call):
        """What each of them gives, each in a thread as a training thread would wait."""
        given = [None] * WORLD

        def one(number):
            given[number] = call(self.watchdogs[number])

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return given

    def on(self, occasion):
        return [entry[1:] for entry in self.judged if entry[0] == occasion]


@pytest.fixture(params=["folder", "store"])
def ranks(request, tmp_path, monkeypatch):
    """All share one interpreter, which takes its time; and a few connections to the store."""
    monkeypatch.setattr(incidents, "TIMES", RoundTimeouts(grace=5.0 * slowness(), longest=10.0 * slowness()))
    monkeypatch.setattr(failover, "PATIENCE", 5.0 * slowness())
    monkeypatch.setattr(
        collection_round, "EVALUATION_TIMEOUT", LIMIT
    )  # a busy machine may keep rank 0 from its turn for long
    monkeypatch.setattr(admission, "LEAD", LIMIT)
    monkeypatch.setattr(requested_rounds, "ACKNOWLEDGE_TIMEOUT", LIMIT)
    if request.param == "store":
        new_board = store_boards("many")
        clients = [new_board().backend._store for _ in range(4)]
        taken = itertools.cycle(clients)
        monkeypatch.setattr(watchdog, "find_store", lambda: StoreAddress("there", 1))
        monkeypatch.setattr(
            store_discovery,
            "connect",
            lambda address: TCPStoreBackend(next(taken), "many", "", survives_coordinator=False),
        )
    opened = Ranks(tmp_path)
    yield opened
    opened.all(lambda one: one.stop(5))


def test_all_join_are_evaluated_once_and_end_together(ranks, tmp_path):
    ranks.all(lambda one: one.start())
    assert ranks.all(lambda one: one.check_start(LIMIT)) == [Decision(words="well")] * WORLD
    assert ranks.on("before") == [(0, WORLD, 0)]
    assert len({one.run for one in ranks.watchdogs}) == 1

    ranks.sources[5].hang_after = 0.0
    until = time.monotonic() + LIMIT
    while not ranks.on("stall") and time.monotonic() < until:
        time.sleep(0.02)
    ranks.sources[5].hang_after = 1e9
    assert ranks.on("stall") == [(0, WORLD, 0)]

    ranks.all(lambda one: one.stop(LIMIT))
    assert ranks.on("end") == [(0, WORLD, 0)]
    assert ranks.told == []
    records = {f"rank-{number}.json" for number in range(WORLD)}
    assert {path.name for path in tmp_path.iterdir()} == records
