"""Whole dumps of the flight recorder: there once a rank stands still, and read by torch's own tools."""

import argparse

import pytest

from doctor.core.capture import read_capture
from doctor.core.facts import ProcessGroup, ProgressFacts, RecorderFacts
from doctor.core.job import Member
from doctor.monitor.telemetry.flight_recorder import load_dump, parse_recorder, read_recorder, take_dumps
from doctor.monitor.watchdog.local_state import LocalState
from doctor.monitor.watchdog.run_records import RunRecords
from tests.lab.speed import NEVER
from tests.watchdog.ranks import LIMIT, ScriptedSource, warm_up


class Recorded(ScriptedSource):
    """One whose collectives torch records."""

    def position(self):
        return {**super().position(), "flight-recorder": read_recorder()}

    def dumps(self):
        return take_dumps()


def recorded(rank):
    """The script of a rank begins: everything is as in a real run but the pace."""
    rank.source = rank.watchdog._source = Recorded(rank.number, rank.source.hang_after)
    rank.watchdog.start()
    rank.watchdog.check_start(LIMIT)


def waits_for_rank_1(rank):
    import torch
    import torch.distributed as dist

    recorded(rank)
    for _ in range(5):
        dist.all_reduce(torch.ones(2, 3))
        rank.source.step()
    if rank.number != 1:
        dist.barrier()
    rank.stand_still()


def inherited():
    """How many calls the recorder of this process holds: of earlier tests, and then of every rank that it forks."""
    library = pytest.importorskip("torch._C._distributed_c10d")
    return len(load_dump(library._dump_fr_trace()).get("entries", ())) if hasattr(library, "_dump_fr_trace") else 0


def read_by_torch(folder):
    """What torch's own analyser loads, or nothing where this torch has none that can be imported."""
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    details, _ = loader.read_dir(argparse.Namespace(trace_dir=str(folder), prefix=None))
    return {one["rank"]: [entry["profiling_name"] for entry in one["entries"]] for one in details.values()}


def test_ranks_that_stand_still_leave_their_dumps(scene):
    warm_up()
    before = inherited()
    scene.start(waits_for_rank_1, 2)
    decision = scene.until_judged("stall")
    folder = scene.directory / "flight-recorder" / "cpu"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1"]
    held = {number: parse_recorder(load_dump((folder / f"rank_{number}").read_bytes())) for number in range(2)}
    assert [entry.operation for entry in held[1].collectives[before:]] == ["all_reduce"] * 5
    assert [entry.operation for entry in held[0].collectives[before:]] == ["all_reduce"] * 5 + ["barrier"]
    assert "waits_for_rank_1" in [frame.function for frame in held[0].collectives[-1].frames]
    for number in range(2):
        dump = read_capture(scene.directory / f"rank-{number}.json").members[0].sections[RecorderFacts.key].dump
        assert dump == decision["members"][str(number)]["dump"] == str(folder / f"rank_{number}")
    assert scene.until_told() == [f"flight-recorder dumps, one per rank: {folder}"]
    assert {rank: names[before:] for rank, names in read_by_torch(folder).items()} == {
        0: ["gloo:all_reduce"] * 5 + ["gloo:barrier"],
        1: ["gloo:all_reduce"] * 5,
    }


def test_ranks_that_go_on_leave_none(scene):
    def script(rank):
        recorded(rank)
        rank.train(1.0)
        rank.source.state = "ended"
        rank.watchdog.stop(LIMIT)

    scene.start(script, 2, hang_after=NEVER)
    scene.wait()
    assert sorted(path.name for path in scene.directory.iterdir()) == ["rank-0.json", "rank-1.json"]
    assert scene.judged("end")
    assert not scene.judged("stall")


def test_dumps_that_can_not_be_written_are_done_without(scene):
    scene.directory.mkdir()
    (scene.directory / "flight-recorder").write_text("a file")
    warm_up()
    scene.start(waits_for_rank_1, 2)
    decision = scene.until_judged("stall")
    assert {member["dump"] for member in decision["members"].values()} == {None}
    assert {member["state"] for member in decision["members"].values()} == {"stalled"}
    scene.until(lambda: len(scene.until_told()) == 2)
    assert all(" cannot write its record to " in line for line in scene.until_told())
    held = read_capture(scene.directory / "rank-0.json").members[0].sections[RecorderFacts.key]
    assert len(held.collectives) == inherited() + 6


def test_dumps_of_an_earlier_run_go_where_its_records_are(tmp_path):
    def keep(rank, run, dump):
        kept = RunRecords(tmp_path, rank, 3, print)
        kept.write([Member(rank, {}, None)], run)
        return kept.write_dumps({"cpu": dump, "nccl": dump})

    folder = tmp_path / "flight-recorder"
    assert [keep(rank, "abc-1", b"old") for rank in range(3)] == [
        str(folder / f"nccl/rank_{rank}") for rank in range(3)
    ]
    keep(0, "abc-2", b"new")
    RunRecords(tmp_path, 0, 3, print).move_others("abc-2")
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.glob("**/rank_*")}
    assert found == {
        **{f"flight-recorder/{name}/rank_0": b"new" for name in ("cpu", "nccl")},
        **{
            f"earlier/abc-1/flight-recorder/{name}/rank_{rank}": b"old" for name in ("cpu", "nccl") for rank in range(3)
        },
    }


def test_what_was_read_with_stacks_stays_until_the_recorder_goes_on():
    def facts(called, **more):
        recorder = RecorderFacts(groups=(ProcessGroup("0", enqueued=called),), **more)
        return {"progress": ProgressFacts(passed=4), "flight-recorder": recorder}

    own = LocalState(0, None)
    own.set_position(facts(7))
    own.keep_dump("/run/rank_0")
    assert own.dump == "/run/rank_0"
    own.update(facts(7, version="without stacks"))
    assert own.member.sections["flight-recorder"].dump == "/run/rank_0"
    own.update(facts(8))
    assert own.member.sections["flight-recorder"].dump is None
