"""Which clock is ahead, and in what order things happened."""

from doctor.core.facts import Event
from doctor.postmortem.logs.clock_skew import clock_shifts, in_order, shifted

NOON = 1_760_000_000.0


def init(rank, host, at, meeting="0x9f", line=1, phase="COMPLETE"):
    return Event(
        "nccl.init",
        f"ncclCommInitRank comm 0x55 rank {rank} nranks 3 commId {meeting} - Init {phase}",
        f"{host}.log",
        line,
        rank=rank,
        host=host,
        at=at,
        values=(("commid", meeting), ("phase", phase)),
    )


def said(name, at=None, file="job.log", line=1, host=None):
    return Event(name, name, file, line, host=host, at=at)


def test_a_clock_that_is_ahead_is_found_by_what_all_left_together():
    events = [
        *(init(rank, f"node{rank}", NOON + (120 if rank == 2 else 0) + rank / 10) for rank in range(3)),
        *(init(rank, f"node{rank}", NOON + 50 + (121 if rank == 2 else 0), "0xaa", 2) for rank in range(3)),
    ]
    shifts = clock_shifts(events)
    assert set(shifts) == {"node2"}
    assert 119 < shifts["node2"] < 122
    assert shifted(said("x", NOON + 120, host="node2"), shifts).at < NOON + 2


def test_clocks_that_agree_within_a_second_are_left_alone():
    assert clock_shifts([init(rank, f"node{rank}", NOON + rank * 0.4) for rank in range(3)]) == {}


def test_ranks_that_came_late_tell_nothing_of_clocks():
    """They begin at any time, and end together."""
    starts = [init(rank, f"node{rank}", NOON + rank * 40, phase="START") for rank in range(3)]
    assert clock_shifts([*starts, *(init(rank, f"node{rank}", NOON + 100, line=2) for rank in range(3))]) == {}


def test_events_are_ordered_by_time_over_files():
    one = [said("b", NOON + 2, "one.log", 1), said("d", NOON + 4, "one.log", 2)]
    other = [said("a", NOON + 1, "other.log", 1), said("c", NOON + 3, "other.log", 2)]
    assert [event.kind for event in in_order([*one, *other])] == ["a", "b", "c", "d"]


def test_an_event_without_a_stamp_stays_with_the_one_before_it():
    events = [said("c", NOON + 5, "a.log", 9), said("b", None, "b.log", 2), said("a", NOON, "b.log", 1)]
    assert [event.kind for event in in_order(events)] == ["a", "b", "c"]


def test_one_before_all_stamps_of_its_file_stands_with_the_first_of_them():
    events = [said("c", NOON + 1, "b.log", 2), said("b", None, "b.log", 1), said("a", NOON, "a.log", 1)]
    assert [event.kind for event in in_order(events)] == ["a", "b", "c"]


def test_files_without_stamps_stand_behind_in_the_order_of_their_lines():
    events = [said("d", None, "z.log", 7), said("c", None, "z.log", 3), said("a", NOON, "a.log"), said("b", NOON + 9)]
    assert [event.kind for event in in_order(events)] == ["a", "b", "c", "d"]
