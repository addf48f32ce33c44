"""How ranks find one another, whatever stands on the board."""

import threading
import time
from types import SimpleNamespace

import pytest

from doctor.cluster.membership.protocol import LeaderAnnouncement
from doctor.cluster.transport.codec import encode
from doctor.cluster.transport.failover import FailoverStore, StoreConnection
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.monitor.watchdog import admission
from doctor.monitor.watchdog.admission import AdmissionLeader, AdmissionRequest, own_namespace
from doctor.monitor.watchdog.protocol import MemberList
from doctor.monitor.watchdog.watchdog_loop import FAST_JOIN, LATE_JOINS, WatchdogLoop
from tests.lab.speed import patience, slowness

WORLD = 3
LONGEST = patience(20.0)
"""Seconds for all of them to find one another, on a machine that is busy."""


class Newcomer(threading.Thread):
    """A rank that looks for the others, and answers them where it leads."""

    def __init__(self, number, directory, bell="bell", after=0.0):
        super().__init__(daemon=True)
        self.lines = FailoverStore([StoreConnection(bell, lambda: FileStoreBackend(directory, "runs"))])
        self.number, self._after = number, after
        self.over = threading.Event()
        self.place = None
        self.start()

    def run(self):
        time.sleep(self._after)
        own = own_namespace(self.number, "abc")
        looks, leader = AdmissionRequest(self.number, WORLD, own, time.monotonic()), None
        until = time.monotonic() + LONGEST
        while not self.over.is_set() and time.monotonic() < until:
            self.lines.step(time.monotonic(), 0.0)
            if self.place is None:
                self.place = looks.step(self.lines.usable(time.monotonic()), time.monotonic())
                leader = AdmissionLeader(self.place, self.number, WORLD) if self.place and self.place.leads else None
            if leader is not None:
                leader.step(self.lines.reading)
            time.sleep(0.02)


def settled(*ranks):
    until = time.monotonic() + LONGEST
    while not all(rank.place for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.02)
    for rank in ranks:
        rank.over.set()
    return [rank.place for rank in ranks]


def test_rank_0_leads_and_makes_the_run_id(tmp_path):
    places = settled(*(Newcomer(number, tmp_path) for number in (2, 1, 0)))
    assert [place.leads for place in places] == [False, False, True]
    assert len({(place.run, place.name) for place in places}) == 1
    assert places[0].run.startswith("abc-")


def test_what_an_earlier_run_left_is_passed_over(tmp_path):
    folder = FileStoreBackend(tmp_path, "runs")
    folder.exchange("bell/lead", None, encode(LeaderAnnouncement("0123abcd", 0)))
    folder.set("0123abcd/roll", encode(MemberList("abc-old", b"12345678" * 3)))
    folder.append("0123abcd/hello", b"no request at all")
    places = settled(*(Newcomer(number, tmp_path) for number in range(WORLD)))
    assert len({place.name for place in places}) == 1
    assert places[0].name != "0123abcd"
    assert "old" not in places[0].run


def test_another_leads_where_rank_0_is_late_and_rank_0_joins_it(tmp_path):
    late = Newcomer(0, tmp_path, after=2.5 * slowness())
    places = settled(Newcomer(1, tmp_path), Newcomer(2, tmp_path), late)
    assert sorted(place.leads for place in places[:2]) == [False, True], "rank 1, unless it is held up"
    assert not places[2].leads
    assert {place.run for place in places} == {"abc"}, "the part that all derive alike"


def test_runs_with_other_bells_do_not_mix(tmp_path):
    places = settled(Newcomer(0, tmp_path, "one"), Newcomer(0, tmp_path, "other"), Newcomer(1, tmp_path, "other"))
    assert places[0].run != places[1].run == places[2].run


def test_of_many_who_would_lead_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "IN_TURN", 0.0)
    places = settled(*(Newcomer(number, tmp_path) for number in range(1, 9)))
    assert len({place.name for place in places}) == 1
    assert sum(place.leads for place in places) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_is_admitted_without_a_connection(tmp_path, rank):
    looks = AdmissionRequest(rank, WORLD, own_namespace(rank, "abc"), 0.0)
    assert looks.step((), 1000.0) is None


def test_a_leader_whose_announcement_was_removed_announces_itself_again(tmp_path):
    folder = FileStoreBackend(tmp_path, "runs")
    first = Newcomer(0, tmp_path)
    until = time.monotonic() + LONGEST
    while not first.place and time.monotonic() < until:
        time.sleep(0.02)
    folder.clear("bell")
    late = Newcomer(1, tmp_path)
    places = settled(first, late)
    assert places[0].name == places[1].name


def test_a_leader_that_admitted_all_looks_for_late_joins_less_often_and_on_all_connections():
    store = SimpleNamespace(reading=("first",), usable=lambda now: ("first", "second"))
    context = SimpleNamespace(rank=0, world_size=3, namespace=None, rejected=None, store=store)
    loop, looks = WatchdogLoop(context, "report", 15.0, 0.0), []
    leader = SimpleNamespace(admitted=1, step=looks.append)
    loop._admit(leader, FAST_JOIN + 1.0)
    loop._admit(leader, FAST_JOIN + 1.5)
    leader.admitted = 2
    loop._admit(leader, FAST_JOIN - 0.5)
    assert looks == [("first",)] * 3
    looks.clear()
    for tick in range(40):
        loop._admit(leader, FAST_JOIN + tick / 2)
    assert looks == [("first", "second")] * int(20 / LATE_JOINS)
