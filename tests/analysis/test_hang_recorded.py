"""Who is to blame by flight recorders alone: jobs of which dumps are left and nothing else."""

from pathlib import Path

import msgspec
import pytest

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.core.facts import Failure, Frame
from doctor.core.job import Member, build_job
from doctor.facts import Collective, ProcessGroup, ProgressFacts, RecorderFacts
from doctor.postmortem.flight_recorder.dumps import read_dumps

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
NOON = 1_760_000_000.0
ALL = ("0", (0, 1, 2, 3))


class Dump:
    """The dump of a rank, written call by call."""

    def __init__(self, *groups, backend="nccl"):
        self.members = dict(groups)
        self.backend = backend
        self.entries = []
        self.counted = {}

    def call(self, group, count=1, *, state="completed", operation="all_reduce", at=None, **more):
        for _ in range(count):
            self.counted[group] = self.counted.get(group, 0) + 1
            at = NOON + len(self.entries) if at is None else at
            sizes = more.pop("sizes", ((8,),))
            entry = Collective(
                group,
                self.counted[group],
                operation,
                self.backend,
                input_sizes=sizes,
                output_sizes=sizes,
                types=("Float",),
                state="scheduled" if self.backend == "gloo" else state,
                retired=state == "completed",
                at=at,
                **more,
            )
            self.entries.append(entry)
        return self

    def open(self, group, count=1, **more):
        return self.call(group, count, state="scheduled", **more)

    def transfer(self, operation, group, source, peer):
        pair = {"is_p2p": True, "source": source, "peer": peer}
        entry = Collective(group, 1, operation, self.backend, at=NOON + len(self.entries), **pair)
        self.entries.append(entry)
        return self

    def facts(self, *, only_open=False):
        shown = [one for one in self.entries if not only_open or one.state != "completed"]
        groups = tuple(
            ProcessGroup(name, "", members, self.counted.get(name), None, self._completed(name))
            for name, members in self.members.items()
        )
        return RecorderFacts(version="2.9", groups=groups, collectives=tuple(shown))

    def _completed(self, group):
        ended = [one.sequence for one in self.entries if one.group == group and one.retired]
        return ended[-1] if ended else None


def job(dumps, only_open=False):
    members = []
    for rank, dump in dumps.items():
        sections = {"flight-recorder": dump.facts(only_open=only_open)}
        members.append(Member(rank, sections, (None, None, f"node{rank // 2}")))
    return build_job(members)


def told(dumps, **options):
    found = diagnose_stall(job(dumps, **options))
    return (found.kind, found.ranks) if found else None


def everybody(change, *groups, backend="nccl", world=4):
    """A dump of each rank, in which ``change`` wrote what happened to it."""
    dumps = {rank: Dump(*(groups or (ALL,)), backend=backend) for rank in range(world)}
    for rank, dump in dumps.items():
        change(rank, dump)
    return dumps


@pytest.mark.parametrize("only_open", [False, True], ids=["full", "open entries alone"])
class TestOneGroup:
    def test_a_rank_that_did_not_come(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank == 2 else 1))
        assert told(dumps, only_open=only_open) == ("missing", (2,))

    def test_two_ranks_that_did_not_come(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank in (0, 3) else 1))
        assert told(dumps, only_open=only_open) == ("missing", (0, 3))

    def test_hosts_that_ran_a_thousand_calls_ahead(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank == 2 else 1000))
        assert told(dumps, only_open=only_open) == ("missing", (2,))

    def test_a_device_that_does_not_finish_what_others_have(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 3 if rank == 1 else 5).open("0", 4 if rank == 1 else 2))
        assert told(dumps, only_open=only_open) == ("behind", (1,))

    def test_all_in_one_call_and_how_long_is_not_told(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0"))
        assert told(dumps, only_open=only_open) == ("undetermined", (0, 1, 2, 3))

    def test_one_that_enqueued_nothing_more_where_all_are_in_one_call(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 1 if rank == 3 else 9))
        assert told(dumps, only_open=only_open) == ("missing", (3,))

    def test_without_one_dump(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0"))
        del dumps[1]
        assert told(dumps, only_open=only_open) == ("unresponsive", (1,))

    def test_without_a_dump_where_another_one_shows_who_is_late(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank == 2 else 1))
        del dumps[1]
        assert told(dumps, only_open=only_open) == ("missing", (2,))

    def test_without_most_dumps(self, only_open):
        dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0"))
        assert told({0: dumps[0]}, only_open=only_open) is None or told({0: dumps[0]})[0] == "undetermined"


@pytest.mark.parametrize("backend", ["nccl", "gloo", "xccl", "hccl"])
def test_dumps_of_a_healthy_moment(backend):
    assert told(everybody(lambda rank, dump: dump.call("0", 5), backend=backend)) is None


@pytest.mark.parametrize("backend", ["nccl", "xccl", "hccl"])
def test_a_call_that_is_retired_and_not_completed_ran_out_of_time(backend):
    def live(rank, dump):
        dump.call("0", 5)
        if rank != 2:
            dump.open("0")
            dump.entries[-1] = msgspec.structs.replace(dump.entries[-1], retired=True)

    assert told(everybody(live, backend=backend)) == ("missing", (2,))


def test_gloo_retires_what_ran_out_of_time_like_what_went_well():
    dumps = everybody(lambda rank, dump: dump.call("0", 4 if rank == 1 else 5), backend="gloo")
    found = diagnose_stall(job(dumps))
    assert (found.kind, found.ranks) == ("missing", (1,))
    assert found.confidence < 0.7


def test_a_root_of_gloo_goes_on_before_others_come():
    def live(rank, dump):
        dump.call("0", 4)
        if rank == 0:
            dump.call("0", operation="broadcast")

    assert told(everybody(live, backend="gloo")) is None


def test_a_dump_of_gloo_taken_a_moment_before_the_others():
    def live(rank, dump):
        dump.call("0", 4)
        (dump.open if rank == 0 else dump.call)("0")

    assert told(everybody(live, backend="gloo")) is None


def test_the_end_of_a_chain_of_groups():
    """Rank 3 misses its row; rank 2 waits there for it, rank 1 in a column, and rank 0 for rank 2 in the other one."""
    groups = (("top", (0, 1)), ("bottom", (2, 3)), ("left", (0, 2)), ("right", (1, 3)))

    def live(rank, dump):
        row, column = ("top", "bottom")[rank // 2], ("left", "right")[rank % 2]
        dump.call(row, 3).call(column, 3)
        if rank < 2:
            dump.call(row).open(column)
        if rank == 2:
            dump.open(row)

    dumps = everybody(live, *groups)
    for rank, dump in dumps.items():
        dump.members = {name: members for name, members in groups if rank in members}
    assert told(dumps) == ("missing", (3,))


def test_one_that_did_not_come_and_a_device_that_does_not_finish():
    groups = (("a", (0, 1, 2)), ("b", (3, 4, 5)), ("c", (0, 3)))

    def live(rank, dump):
        name = "a" if rank < 3 else "b"
        dump.call(name, 3)
        if rank == 5:
            dump.open(name, 3)
        elif rank != 2:
            dump.call(name, 2 if rank > 2 else 0).open(name, 4)

    dumps = everybody(live, *groups, world=6)
    found = diagnose_stall(job(dumps))
    assert (found.kind, found.ranks, found.behind) == ("missing", (2, 5), (5,))


def test_groups_in_another_order():
    groups = (("a", (0, 1)), ("b", (0, 1)))
    dumps = everybody(lambda rank, dump: dump.open("ab"[rank]).open("ba"[rank]), *groups, world=2)
    assert told(dumps) == ("deadlock", (0, 1))


def test_one_with_its_groups_in_another_order():
    groups = (("a", (0, 1, 2, 3)), ("b", (0, 1, 2, 3)))
    dumps = everybody(lambda rank, dump: dump.open("b" if rank == 2 else "a"), *groups)
    assert told(dumps) == ("deadlock", (2,))


PIPE = ("p", (0, 2, 4, 6))


def pipeline(*calls):
    """Dumps of ranks 0, 2, 4, 6, whose group-local ranks are 0 to 3."""
    dumps = {}
    for place, own in enumerate(calls):
        dumps[place * 2] = Dump(PIPE)
        for operation, peer in own:
            dumps[place * 2].transfer(operation, "p", place if operation == "send" else peer, peer)
    return dumps


def test_a_pair_of_a_pipeline_and_not_its_whole_group():
    assert told(pipeline([("send", 1)], [("send", 2)], [], [("recv", 2)])) == ("missing", (4,))


def test_a_send_that_meets_its_receive_waits_for_what_the_receiver_does_before():
    dumps = pipeline([("send", 1)], [("recv", 2), ("recv", 0)], [], [])
    assert told(dumps) == ("missing", (4,))


def test_all_transfers_of_a_batch_are_waited_for():
    """Ranks 0 and 4 exchange with rank 2 in one batch, and rank 2 has only come to exchange with rank 0."""
    dumps = pipeline([("send", 1), ("recv", 1)], [("send", 0), ("recv", 0), ("send", 2), ("recv", 2)], [], [])
    assert told(dumps) == ("missing", (4,))


def test_two_that_send_to_one_another():
    assert told(pipeline([("send", 1)], [("send", 0)], [], [])) == ("deadlock", (0, 2))


def test_histories_of_other_lengths():
    def live(rank, dump):
        dump.call("alone" if rank == 3 else "0", 7 if rank == 3 else 0)
        dump.call("0", 5).open("0", 0 if rank == 1 else 1)

    assert told(everybody(live, ALL, ("alone", (3,)))) == ("missing", (1,))


@pytest.mark.parametrize(
    ("change", "aspect"),
    [({"sizes": ((9,),)}, "size"), ({"operation": "broadcast"}, "operation")],
    ids=["size", "operation"],
)
def test_the_odd_one_by_majority(change, aspect):
    dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", **(change if rank == 0 else {})).open("0", 40))
    found = diagnose_stall(job(dumps))
    assert (found.kind, found.ranks, found.divergence.aspect) == ("differ", (0,), aspect)


def test_a_tie_blames_both_and_shows_both_sites():
    def live(rank, dump):
        frames = (Frame("/home/me/train.py", 40 + rank, "step", user=True),)
        dump.call("0", 5).open("0", operation=("all_gather", "barrier")[rank], frames=frames)

    found = diagnose_stall(job(everybody(live, ("0", (0, 1)), world=2)))
    assert (found.kind, found.ranks) == ("differ", (0, 1))
    assert [variant.site.place for variant in found.divergence.variants] == ["train.py:40 (step)", "train.py:41 (step)"]


def test_without_history_it_is_less_sure():
    dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank == 2 else 1))
    sure, less = (diagnose_stall(job(dumps, only_open=only)).confidence for only in (False, True))
    assert less < sure


def test_an_error_of_its_own_comes_before_the_calls_that_miss_it():
    dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank == 2 else 1))
    members = [Member(rank, {"flight-recorder": dump.facts()}) for rank, dump in dumps.items()]
    failure = ProgressFacts(state="failed", stage="", point="", failure=Failure("ValueError", "no", NOON))
    members[2] = Member(2, {**members[2].sections, "progress": failure})
    found = diagnose_stall(build_job(members))
    assert (found.kind, found.ranks) == ("died", (2,))


def test_a_rank_without_a_dump_that_ran_out_of_time_itself_is_not_to_blame():
    dumps = everybody(lambda rank, dump: dump.call("0", 5).open("0", 0 if rank == 2 else 1))
    members = [Member(rank, {"flight-recorder": dump.facts()}) for rank, dump in dumps.items()]
    words = "Watchdog caught collective operation timeout"
    members[3] = Member(
        3, {"progress": ProgressFacts(state="failed", failure=Failure("DistBackendError", words, NOON))}
    )
    found = diagnose_stall(build_job(members))
    assert (found.kind, found.ranks) == ("missing", (2,))


def test_a_peer_that_lost_the_others_after_they_ran_out_of_time_had_left_its_last_call():
    dumps = everybody(lambda rank, dump: dump.call("0", 4 if rank == 2 else 5), backend="gloo")
    closed, timeout = "Connection closed by peer", "Timed out waiting 1800000ms for recv operation to complete"
    members = []
    for rank, dump in dumps.items():
        failure = Failure("RuntimeError", closed if rank == 2 else timeout, NOON + rank)
        progress = ProgressFacts(state="failed", stage="", point="", failure=failure)
        members.append(Member(rank, {"flight-recorder": dump.facts(), "progress": progress}))
    found = diagnose_stall(build_job(members))
    assert (found.kind, found.ranks) == ("missing", (2,))


# Dumps of real faults.


@pytest.mark.parametrize(
    ("folder", "kind", "ranks"),
    [
        ("gpu_error_1st", "behind", (12, 14)),
        ("lock_gil_2nd", "missing", (10, 15)),
        ("gloo/fr_order", "differ", (0, 1)),
        ("gloo/lit_uneven_log", "loader-ended", (1,)),
        ("gloo/fr_shape", None, None),
    ],
)
def test_real_faults(folder, kind, ranks):
    if not (TRACES / folder).is_dir():
        pytest.skip("the dumps of real faults are not here")
    dumps, _ = read_dumps(path for path in (TRACES / folder).iterdir() if path.suffix != ".log")
    found = diagnose_stall(build_job(Member(dump.rank, {"flight-recorder": dump.facts}) for dump in dumps))
    assert (found and found.kind, found and found.ranks) == (kind, ranks)
