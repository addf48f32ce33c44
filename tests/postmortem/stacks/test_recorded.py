"""Stacks of real jobs over Gloo, recorded with real tools: what is read of them, and whom the diagnosis names.

``asleep``: three ranks, of which rank 1 sleeps while the others wait in all_reduce. ``branch``: rank 0 waits in a
barrier that the others don't call, they wait in the backward pass of DDP. ``moving``: rank 0 works, and rank 1 waits
for it in a barrier. py-spy 0.4.3, pystack 1.7.2, gdb 13.1, Python 3.11, torch 2.13; paths were replaced, and the long
names of pybind11's functions.
"""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.cli.main import app
from doctor.core.facts import ProgressFacts
from doctor.core.frames import NATIVE_CODE
from doctor.core.text import ranks_in_words
from doctor.postmortem.file_kinds import kind_of
from doctor.postmortem.run_reader import read_runs

DATA = Path(__file__).parents[2] / "data" / "stacks"
FILES = sorted(path for scene in ("asleep", "branch", "moving") for path in (DATA / scene).rglob("*") if path.is_file())
ONE_FILE = ("py_spy.txt", "py_spy_locals.txt", "py_spy_native.txt", "py_spy.json", "pystack.txt", "pystack_native.txt")
ASLEEP = (*ONE_FILE, "gdb.txt", "gdb_py_bt.txt", "faulthandler", "debug_server")


def job_of(*paths):
    (run,) = read_runs(paths)
    assert not any(one.skipped for one in run.inputs)
    return run.job


def progress_of(job):
    return {rank.number: rank.find(ProgressFacts) for rank in job.ranks}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recorded_file_is_known_as_stacks(path):
    assert kind_of(path) == "stacks"


@pytest.mark.parametrize("name", ASLEEP)
def test_the_rank_that_sleeps_is_named(name):
    job = job_of(DATA / "asleep" / name)
    found = diagnose_stall(job)
    assert (found.kind, found.ranks, found.waiting) == ("elsewhere", (1,), (0, 2))
    assert not found.within_limit
    progress = progress_of(job)
    native = name == "gdb.txt"
    inner = {rank: one.stack[0].function for rank, one in progress.items()}
    assert inner == {0: "all_reduce", 1: "clock_nanosleep" if native else "read_shard", 2: "all_reduce"}
    assert all((one.stack[0].file == NATIVE_CODE) == native for one in progress.values())
    assert {one.state for one in progress.values()} == {"stalled"}


@pytest.mark.parametrize(("name", "source"), [("gdb.txt", "gdb"), ("debug_server", "debug-server")])
def test_facts_of_a_rank(name, source):
    progress = progress_of(job_of(DATA / "asleep" / name))
    assert {one.stack_from for one in progress.values()} == {source}
    assert len({one.pid for one in progress.values()} - {0, None}) == 3


def test_how_ranks_are_numbered():
    guessed = {
        name: {one.guessed for one in progress_of(job_of(DATA / "asleep" / name)).values()}
        for name in ("py_spy.txt", "py_spy_locals.txt", "faulthandler", "debug_server")
    }
    assert guessed == {
        "py_spy.txt": {True},
        "py_spy_locals.txt": {True},
        "faulthandler": {False},
        "debug_server": {False},
    }


def test_files_of_one_process_each(tmp_path):
    """Files in the wrong order, with the rank in their names."""
    text = (DATA / "asleep" / "py_spy.txt").read_text()
    for place, part in enumerate(text.split("Process ")[1:]):
        (tmp_path / f"node7_rank{2 - place}.txt").write_text(f"Process {part}")
    job = job_of(tmp_path)
    assert diagnose_stall(job).ranks == (1,)
    assert {rank: one.pid for rank, one in progress_of(job).items()} == {0: 21662, 1: 21661, 2: 21660}
    assert {rank.host.name for rank in job.ranks} == {"node7"}


def test_environment_numbers_ranks_before_or_after_the_stack(tmp_path):
    parts = (DATA / "asleep" / "py_spy.txt").read_text().split("Process ")[1:]
    lines = [f"RANK={place + 4}\nWORLD_SIZE=8\n" for place in (2, 0, 1)]
    for name, pairs in {
        "before.txt": [f"{head}Process {part}" for head, part in zip(lines, parts, strict=True)],
        "after.txt": [f"Process {part}{head}" for head, part in zip(lines, parts, strict=True)],
    }.items():
        path = tmp_path / name
        path.write_text("\n".join(pairs))
        job = job_of(path)
        progress = progress_of(job)
        assert {rank: one.pid for rank, one in progress.items()} == {6: 21660, 4: 21661, 5: 21662}
        assert job.world_size == 8
        assert not any(one.guessed for one in progress.values())
        assert diagnose_stall(job).ranks == (4,)


def test_local_ranks_of_command_lines(tmp_path):
    text = (DATA / "asleep" / "py_spy.txt").read_text()
    for pid, local in ((21660, 1), (21661, 2), (21662, 0)):
        text = text.replace(f"Process {pid}: ", f"Process {pid}: /usr/bin/python -u train.py --local_rank={local} ")
    path = tmp_path / "dump.txt"
    path.write_text(text)
    progress = progress_of(job_of(path))
    assert {rank: one.pid for rank, one in progress.items()} == {1: 21660, 2: 21661, 0: 21662}
    assert not any(one.guessed for one in progress.values())


@pytest.mark.parametrize(
    "heading", ["== rank {} ==", "=== Rank {}: pid 7 ===", "# global rank: {}", "--- rank{} on node: gpu1"]
)
def test_headings_of_scripts_number_ranks(tmp_path, heading):
    parts = (DATA / "asleep" / "pystack.txt").read_text().split("Traceback for ")[1:]
    path = tmp_path / "all.txt"
    path.write_text("\n".join(f"{heading.format(2 - place)}\nTraceback for {part}" for place, part in enumerate(parts)))
    job = job_of(path)
    assert diagnose_stall(job).ranks == (1,)
    assert progress_of(job)[0].stack[0].function == "all_reduce"
    assert not any(one.guessed for one in progress_of(job).values())


@pytest.mark.parametrize("label", ["gpu{}: ", "gpu{} out: ", "[1,{}]<stdout>: "])
def test_labels_of_parallel_shells(tmp_path, label):
    """Lines of hosts arrive mixed, each with its label."""
    parts = (DATA / "asleep" / "py_spy.txt").read_text().split("Process ")[1:]
    streams = [
        [f"{label.format(place)}{line}" for line in f"Process {part}".splitlines()] for place, part in enumerate(parts)
    ]
    longest = max(map(len, streams))
    mixed = [stream[place] for place in range(longest) for stream in streams if place < len(stream)]
    path = tmp_path / "pdsh.txt"
    path.write_text("\n".join(mixed))
    assert kind_of(path) == "stacks"
    job = job_of(path)
    assert diagnose_stall(job).ranks == (1,)
    if label.startswith("gpu"):
        assert [rank.host.name for rank in job.ranks] == ["gpu0", "gpu1", "gpu2"]


@pytest.mark.parametrize("name", ["py_spy.txt", "gdb.txt"])
def test_different_calls(name):
    job = job_of(DATA / "branch" / name)
    found = diagnose_stall(job)
    assert (found.kind, found.ranks) == ("differ", (0,))
    (odd,) = found.divergence.odd
    assert (odd.site.operation, found.divergence.variants[0].site.operation) == ("barrier", "all_reduce")
    # One stack of each rank: less sure than from two equal ones.
    assert found.confidence < 0.6


@pytest.mark.parametrize("name", ["py_spy", "faulthandler"])
def test_a_rank_whose_stack_changes_is_running(name):
    job = job_of(DATA / "moving" / name)
    assert {rank: one.state for rank, one in progress_of(job).items()} == {0: "running", 1: "stalled"}
    found = diagnose_stall(job)
    assert found is None or found.within_limit


def test_times_between_the_dumps_of_one_process():
    waited = {name: progress_of(job_of(DATA / "moving" / name))[1].idle for name in ("py_spy", "faulthandler")}
    assert waited == {"py_spy": 0.0, "faulthandler": 40.0}
    assert progress_of(job_of(DATA / "asleep" / "debug_server"))[1].idle == 17.0


def report_of(*paths):
    done = CliRunner().invoke(app, ["diagnose", "--format", "json", *map(str, paths)])
    return done.exit_code, json.loads(done.stdout)


def test_one_rank_alone_is_inconclusive(tmp_path):
    shutil.copy(DATA / "asleep" / "faulthandler" / "stacks_rank_0.txt", tmp_path)
    assert diagnose_stall(job_of(tmp_path)) is None
    code, report = report_of(tmp_path)
    assert (code, report["verdict"]) == (3, "inconclusive")
    assert report["outcome"]["reason"] == "one stack of each rank does not show whether the ranks move"
    assert {one["id"] for one in report["results"] if one["status"] == "unknown"} == {"RUN001"}


def test_all_ranks_in_one_call_is_inconclusive_from_one_stack_of_each(tmp_path):
    for rank in range(3):
        shutil.copy(DATA / "asleep" / "faulthandler" / "stacks_rank_0.txt", tmp_path / f"stacks_rank_{rank}.txt")
    code, report = report_of(tmp_path)
    assert code == 3
    assert [(group["ranks"], group["state"]) for group in report["stacks"]["groups"]] == [([0, 1, 2], "waiting")]


@pytest.mark.parametrize(
    ("path", "code", "states"),
    [
        ("asleep/py_spy.txt", 1, ["waiting", "seen"]),
        ("asleep/debug_server", 1, ["waiting", "standing"]),
        ("branch/gdb.txt", 1, ["waiting", "waiting"]),
        ("moving/py_spy", 0, ["moving", "waiting"]),
    ],
)
def test_report_shows_where_ranks_are(path, code, states):
    exit_code, report = report_of(DATA / path)
    assert exit_code == code
    assert [group["state"] for group in report["stacks"]["groups"]] == states
    assert report["stacks"]["calls"]
    notes = report["stacks"].get("notes", [])
    ranks = ranks_in_words(tuple(range(report["job"]["world_size"])))
    assert notes == ([] if path == "asleep/debug_server" else [f"rank numbers guessed: {ranks}"])


def test_stacks_beside_the_log_of_the_job(tmp_path):
    """The error in the log of a rank explains more than its stack."""
    (tmp_path / "train.log").write_text(
        '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/home/user/train.py", line 9, in step\n'
        "[rank2]: ValueError: bad shape\n"
    )
    shutil.copy(DATA / "asleep" / "faulthandler" / "stacks_rank_0.txt", tmp_path)
    shutil.copy(DATA / "asleep" / "faulthandler" / "stacks_rank_1.txt", tmp_path)
    progress = progress_of(job_of(tmp_path))
    assert progress[2].failure.kind == "ValueError"
    assert progress[1].stack[0].function == "read_shard"
