"""Runs that go well, and what is missing around them: a store, a shared directory, a rank."""

import json
import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from doctor.cluster.transport.signing import Secret
from doctor.core.capture import merge_captures
from doctor.core.facts import ProgressFacts
from doctor.monitor.watchdog import local_state
from doctor.monitor.watchdog.watchdog import Watchdog
from doctor.postmortem.inputs import read_inputs
from tests.lab.ports import free_port
from tests.lab.speed import NEVER, slowness
from tests.watchdog.ranks import LIMIT, Rank, ScriptedSource, open_group


def fits(rank, fit=1):
    """A run from the first batch to the last one, with its own watchdog."""
    decision = rank.watchdog.start() or rank.watchdog.check_start(LIMIT)
    rank.write(fit=fit, met=decision is not None and decision.words, run=rank.watchdog.run)
    rank.train(0.3)
    rank.source.state = "ended"
    rank.watchdog.stop(NEVER)
    rank.write(fit=fit, stopped=True)


@pytest.mark.parametrize("store", ["rank 0", "agent", "none"])
def test_two_fits_of_one_process_group(scene, store):
    """Each has an id of its own, the same on all ranks; the records of the first are moved, and nothing else stays."""

    def script(rank):
        for fit in (1, 2):
            fits(Rank(rank.number, rank.world, rank.folder, rank.directory), fit)

    scene.directory.mkdir()
    (scene.directory / "rank-2.json").write_text("of somebody else")
    scene.start(script, 3, store=store)
    scene.wait()
    assert scene.codes == {0: 0, 1: 0, 2: 0}
    met = [line for line in scene.said() if "met" in line]
    first, second = ({line["run"] for line in met if line["fit"] == fit} for fit in (1, 2))
    assert (len(met), len(first), len(second)) == (6, 1, 1)
    assert first != second
    assert {line["met"] for line in met} == {"judged by 0"}
    for occasion in ("before", "end"):
        decisions = scene.judged(occasion)
        assert [(decision["rank"], sorted(decision["members"])) for decision in decisions] == [(0, ["0", "1", "2"])] * 2
    assert all(member["state"] == "ended" for member in scene.judged("end")[1]["members"].values())
    assert len([line for line in scene.said() if "stopped" in line]) == 6
    left = sorted(entry.name for entry in scene.directory.iterdir())
    assert left == ["earlier", "rank-0.json", "rank-1.json", "rank-2.json"]
    assert {json.loads(path.read_text())["run"] for path in scene.directory.glob("rank-*.json")} == second
    moved = {path.relative_to(scene.directory / "earlier") for path in scene.directory.glob("earlier/*/*")}
    assert {Path(*first, f"rank-{number}.json") for number in range(3)} < moved
    assert len(moved) == 4, "the file of somebody else is kept too"


@pytest.mark.parametrize("store", ["rank 0", "none"])
def test_rank_0_evaluates_the_end_even_if_the_others_ended_long_before(scene, store, monkeypatch):
    """They are held up for no longer than they allow, and nothing is left of them."""

    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        if rank.number == 0:
            while len([line for line in scene.said() if "stopped" in line]) < 2:
                rank.train(0.1)
        else:
            rank.train(0.3)
        rank.source.state = "ended"
        rank.watchdog.stop(2 * slowness() if rank.number else NEVER)
        rank.write(stopped=True)

    scene.start(script, 3, store=store)
    scene.wait()
    (decision,) = scene.judged("end")
    assert (decision["rank"], sorted(decision["members"])) == (0, ["0", "1", "2"])
    assert all(member["state"] == "ended" for member in decision["members"].values())
    assert sorted(entry.name for entry in scene.directory.iterdir()) == [f"rank-{number}.json" for number in range(3)]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_the_next_rank_evaluates_the_end_if_rank_0_never_does(scene, end):
    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        rank.train(0.3)
        if rank.number == 0:
            rank.kill(signal.SIGKILL if end == "killed" else signal.SIGSTOP)
        rank.train(0.6)
        rank.source.state = "ended"
        rank.watchdog.stop(5 * slowness() if end == "stopped" else NEVER)
        rank.write(stopped=True)

    scene.start(script, 2, store="agent")
    assert scene.until_judged("end")["rank"] == 1
    scene.wait(1)


def test_runs_that_end_as_soon_as_they_began(scene):
    """Their ranks meet all the same: one id each, one folder each, and nothing else stays."""

    def script(rank):
        for _ in range(3):
            one = Rank(rank.number, rank.world, rank.folder, rank.directory)
            one.watchdog.start()
            one.source.state = "ended"
            one.watchdog.stop(LIMIT)
            rank.write(run=one.watchdog.run)

    scene.start(script, 2)
    scene.wait()
    runs = {line["run"] for line in scene.said() if "run" in line}
    assert len(runs) == 3
    assert {frozenset(decision["members"]) for decision in scene.judged("end")} == {frozenset("01")}
    names = sorted(entry.name for entry in scene.directory.iterdir())
    assert names == ["earlier", "rank-0.json", "rank-1.json"]
    assert len([*scene.directory.glob("earlier/*")]) == 2
    assert len([*scene.directory.glob("earlier/*/rank-*.json")]) == 4


def test_a_rank_that_comes_late_is_waited_for(scene):
    def script(rank):
        time.sleep(2.0 * slowness() if rank.number == 0 else 0.0)
        fits(rank)

    scene.start(script, 2)
    scene.wait()
    (decision,) = scene.judged("before")
    assert (decision["rank"], sorted(decision["members"])) == (0, ["0", "1"])
    assert [line["met"] for line in scene.said() if "met" in line] == ["judged by 0"] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_joins_too_late_is_not_evaluated(scene, late):
    """Whichever it is, the others are; it hears what was said, and who is missing is said once."""

    def script(rank):
        time.sleep(3.5 * slowness() if rank.number == late else 0.0)
        rank.watchdog.start()
        decision = rank.watchdog.check_start(3 * slowness())
        rank.write(met=decision.words if decision else None, run=rank.watchdog.run)
        rank.source.state = "ended"
        rank.watchdog.stop(LIMIT)

    scene.start(script, 3, secret=Secret(b"s" * 16, "test"))  # rank 0 does not adopt an unsigned decision
    scene.wait()
    (decision,) = scene.judged("before")
    assert sorted(decision["members"]) == sorted({"0", "1", "2"} - {str(late)})
    assert decision["rank"] == (1 if late == 0 else 0)
    met = [line for line in scene.said() if "met" in line]
    assert {line["met"] for line in met} == {f"judged by {decision['rank']}"}
    assert len({line["run"] for line in met}) == 1
    (told,) = [line["told"] for line in scene.said() if "told" in line]
    assert told == f"rank {late} did not report before the first batch; checked without it"
    assert sorted(scene.judged("end")[0]["members"]) == ["0", "1", "2"]


def test_a_directory_that_cannot_be_written_to(scene):
    """One line a rank, and all goes on by the store."""

    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        rank.train(0.3)
        rank.stand_still()

    scene.directory.write_text("a file")
    scene.start(script, 2)
    assert sorted(scene.until_judged("stall")["members"]) == ["0", "1"]
    told = sorted((line["rank"], line["told"]) for line in scene.said() if "told" in line)
    assert [rank for rank, _ in told] == [0, 1]
    assert all(f"cannot write its record to {scene.directory}: " in line for _, line in told)


def test_directories_that_are_not_shared_and_no_store(scene):
    """Nobody hears anybody: each keeps its record, and diagnose has them all."""

    def script(rank):
        rank.watchdog.start()
        assert rank.watchdog.check_start((1.0 if rank.number else 0.5) * slowness()) is None or rank.number == 0
        rank.train(0.3)
        rank.stand_still()

    own = {number: scene.folder / f"of-{number}" for number in range(2)}
    scene.start(script, 2, store="none", directories=own)
    scene.until(lambda: len(scene.judged("stall")) == 2)
    judged = {decision["rank"]: [*decision["members"]] for decision in scene.judged("stall")}
    assert judged == {0: ["0"], 1: ["1"]}
    told = {line["rank"]: line["told"] for line in scene.said() if "cannot reach" in line.get("told", "")}
    assert told[1].startswith("cannot reach rank 0")
    job = merge_captures(read_inputs(own.values()).captures)
    assert [(rank.number, rank.find(ProgressFacts).state) for rank in job.ranks] == [(0, "stalled"), (1, "stalled")]
    assert (job.world_size, job.ungathered) == (2, 0)


def test_rounds_are_taken_over_from_a_rank_that_is_silent(scene):
    def script(rank):
        rank.watchdog.start()
        if rank.number == 0:
            rank.train(1.5)
            rank.kill(signal.SIGSTOP)
        rank.train(LIMIT)

    scene.start(script, 2, store="agent", round_seconds=0.3 * slowness())
    scene.until(lambda: any(decision["rank"] == 1 for decision in scene.judged("round")))
    assert scene.judged("round")[0]["rank"] == 0


def spawned(number, folder, port):
    """A rank that was spawned: nothing of the parent's is there."""
    open_group(number, 2, port, by_agent=False)
    fits(Rank(number, 2, Path(folder), Path(folder) / "run"))


def test_ranks_that_are_spawned(scene):
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes = [context.Process(target=spawned, args=(number, str(scene.folder), port)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0
    assert sorted(scene.judged("before")[0]["members"]) == ["0", "1"]
    assert len({line["run"] for line in scene.said() if "met" in line}) == 1


def test_neither_torch_nor_a_group_is_needed(tmp_path, monkeypatch):
    """A single process has no others: all is judged here, and nothing is packed for them."""
    judged, packed = [], []
    monkeypatch.setattr(local_state, "pack_member", packed.append)
    dog = Watchdog(0, 1, ScriptedSource(0), tmp_path, lambda job, occasion: judged.append((occasion, job)))
    dog.start()
    dog.check_start(5)
    dog.stop(5)
    assert [occasion for occasion, _ in judged] == ["before", "end"]
    assert packed == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank-0.json"]
