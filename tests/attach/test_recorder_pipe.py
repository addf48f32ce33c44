"""Flight recorders by the dump pipe: ranks that answer, and files that a hostile environment names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from doctor.attach.sources.recorder_pipe import PIPE, dump_paths, read_recorders
from doctor.collectors.host.local_processes import process_start_time
from doctor.core.facts import AttachedProcess
from doctor.core.finding import Severity
from tests.attach.attached import at, members, process
from tests.attach.jobs import doctor_attach
from tests.attach.test_attached_job import findings, judged
from tests.lab.speed import patience
from tests.lab.users import ALICE, belongs_to, public_folder, require_root

PROGRAM = Path(__file__).with_name("dump_pipe.py")


@contextlib.contextmanager
def ranks_of(
    folder: Path, *commands: str, uid: int = 0
) -> Iterator[tuple[list[AttachedProcess], dict[int, Mapping[str, str]]]]:
    """Ranks that were started with these arguments, and their environments by PID."""
    processes, environs = [], {}
    try:
        for rank, command in enumerate(commands):
            environ = {
                "PATH": os.environ["PATH"],
                "RANK": str(rank),
                "USER_ID": str(uid),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "LOCAL_WORLD_SIZE": str(len(commands)),
                PIPE: f"{folder}/fr_",
                "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_",
            }
            argv = [sys.executable, "-S", str(PROGRAM), *command.split()]
            one = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, start_new_session=True)
            processes.append(one)
            environs[one.pid] = environ
        for one in processes:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n"
        yield [_attached(rank, one.pid) for rank, one in enumerate(processes)], environs
    finally:
        for one in processes:
            one.kill()
            one.communicate()


def _attached(rank: int, pid: int) -> AttachedProcess:
    return AttachedProcess(pid, process_start_time(pid) or 0.0, rank=rank)


def test_ranks_dump_their_recorders_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(b"of an earlier request")
    with ranks_of(tmp_path, "5", "5 slow", "4", "5 silent", "5 garbage", "5 huge") as (ranks, environs):
        read, notes = read_recorders(ranks, environs, patience(1.5))
        again, _ = read_recorders(ranks[:1], environs, patience(4))
        assert all(Path(f"/proc/{rank.pid}").exists() for rank in ranks)
    known = {rank.rank: rank.recorder for rank in read if rank.recorder is not None}
    assert {rank: one.groups[0].enqueued for rank, one in known.items()} == {0: 5, 1: 5, 2: 4}
    assert known[0].collectives[-1].frames[0].line == 41
    assert again[0].recorder is not None
    assert sorted(note.partition(":")[0] for note in notes) == [
        f"no flight recorder of rank {rank}" for rank in (3, 4, 5)
    ]
    assert any("more than 16 MiB" in note for note in notes)
    assert any("did not write one in time" in note for note in notes)


@pytest.mark.real_time
def test_the_command_names_the_rank_that_is_missing_in_the_recorders(tmp_path: Path) -> None:
    with ranks_of(tmp_path, "5", "5", "4 done") as (ranks, _):
        pids = [word for rank in ranks for word in ("--pid", str(rank.pid))]
        quick = ("--isolated", "--rounds", "2", "--format", "json", *pids)
        reports = [json.loads(doctor_attach(*quick, *more).stdout) for more in ((), ("--flight-recorder",))]
    named = [
        [(result["id"], finding["ranks"]) for result in report["results"] for finding in result["findings"]]
        for report in reports
    ]
    assert named == [[], [("RUN001", [2])]]
    assert next(group["place"] for group in reports[1]["stacks"]["groups"]) == "all_reduce at train.py:41 (train)"


Danger = tuple[str, str]


@pytest.fixture
def danger(tmp_path: Path) -> Mapping[str, Danger]:
    """Prefixes of FIFO and dump that must not be used, and what the note says."""
    for name in ("link", "file", "shared", "hard", "dangling"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "real.pipe")
    (tmp_path / "link" / "0.pipe").symlink_to(tmp_path / "real.pipe")
    (tmp_path / "file" / "0.pipe").write_text("")
    os.mkfifo(tmp_path / "hard" / "0.pipe")
    os.link(tmp_path / "hard" / "0.pipe", tmp_path / "hard" / "other")
    os.mkfifo(tmp_path / "shared" / "0.pipe")
    (tmp_path / "shared").chmod(0o777)
    os.mkfifo(tmp_path / "dangling" / "0.pipe")
    return {
        "a link": (f"{tmp_path}/link/", "not of the expected kind"),
        "a file": (f"{tmp_path}/file/", "not of the expected kind"),
        "two names": (f"{tmp_path}/hard/", "not of the expected kind"),
        "a shared folder": (f"{tmp_path}/shared/", "other users may change"),
        "no reader": (f"{tmp_path}/dangling/", "cannot be opened (No such device or address)"),
        "nothing": (f"{tmp_path}/none/", "cannot be opened (No such file or directory)"),
        "a way out": (f"{tmp_path}/link/../dangling/", "its path cannot be used"),
        "a long path": (f"{tmp_path}/{'x' * 5000}", "its path cannot be used"),
        "a device": ("/dev/null/", "cannot be opened (Not a directory)"),
    }


def test_no_other_file_is_opened(danger: Mapping[str, Danger]) -> None:
    own = _attached(0, os.getpid())
    for name, (prefix, why) in danger.items():
        begun = time.monotonic()
        (rank,), notes = read_recorders([own], {own.pid: {PIPE: prefix}}, patience(1))
        assert rank.recorder is None, name
        assert why in notes[0], (name, notes)
        assert time.monotonic() - begun < patience(2), name


def test_a_dump_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    with ranks_of(tmp_path, "5") as (ranks, environs):
        (tmp_path / "trace_0").symlink_to(tmp_path / "target")
        (rank,), notes = read_recorders(ranks, environs, patience(1))
    assert (rank.recorder, len(notes)) == (None, 1)


def test_root_takes_on_the_user_of_the_rank() -> None:
    require_root()
    with public_folder() as folder:
        home, vault = folder / "alice", folder / "vault"
        home.mkdir()
        vault.mkdir(mode=0o700)
        os.mkfifo(vault / "fr_0.pipe")
        belongs_to(ALICE, home, vault / "fr_0.pipe")
        with ranks_of(home, "5", uid=ALICE) as (ranks, environs):
            (rank,), notes = read_recorders(ranks, environs, patience(4))
            assert rank.recorder is not None, notes
            (hidden,), notes = read_recorders(ranks, {ranks[0].pid: {PIPE: f"{vault}/fr_"}}, patience(1))
    assert (hidden.recorder, "Permission denied" in notes[0]) == (None, True)
    assert os.geteuid() == 0


def test_a_pid_that_was_reused_gets_no_line(tmp_path: Path) -> None:
    with ranks_of(tmp_path, "5") as ((rank,), environs):
        other = AttachedProcess(rank.pid, rank.started + 5, rank=0)
        assert read_recorders([other], environs, patience(1))[1] == ("no flight recorder of rank 0: it ended",)


def test_ranks_without_a_pipe_or_with_a_guessed_number_are_not_asked() -> None:
    ranks = [process(0), process(1, guessed=True), process(None, pid=77), process(3, ended="zombie")]
    environs = {one.pid: {PIPE: "/tmp/x"} for one in ranks[1:]}
    assert read_recorders(ranks, environs) == (
        tuple(ranks),
        (
            f"no flight recorder of rank 0, PID 77: {PIPE} is not set for it",
            "no flight recorder of rank 1: its number is guessed",
        ),
    )


@pytest.mark.parametrize(
    ("environ", "dumps"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "/a_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b_"}, ["/a_3", "/b_3"]),
        (
            {"HOME": "/home/me", "XDG_CACHE_HOME": "/cache"},
            [
                "/cache/torch/comm_lib_trace_rank_3",
                "/cache/torch/nccl_trace_rank_3",
                "/home/me/.cache/torch/comm_lib_trace_rank_3",
                "/home/me/.cache/torch/nccl_trace_rank_3",
                "/tmp/nccl_trace_rank_3",
            ],
        ),
    ],
)
def test_paths_of_each_release_of_torch(environ: Mapping[str, str], dumps: Sequence[str]) -> None:
    paths = dump_paths(3, {PIPE: "/run/fr_", **environ})
    assert paths is not None
    assert (str(paths.pipe), [str(path) for path in paths.dumps]) == ("/run/fr_3.pipe", dumps)
    assert dump_paths(3, environ) is None


# In a job.


def test_a_rank_that_spins_waits_in_the_call_that_has_been_open_for_long(tmp_path: Path) -> None:
    with ranks_of(tmp_path, "5", "5", "4 done") as (ranks, environs):
        read, _ = read_recorders(ranks, environs, patience(4))
    recorders = [rank.recorder for rank in read]
    now = time.time()
    spins = [process(rank, (at(41),), cpu=1.0, recorder=recorders[rank], world=3) for rank in range(3)]
    here = [_at_time(one, now) for one in spins]
    (finding,) = judged(members(*here)).result("RUN001").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity) == ((2,), Severity.INFO)
    assert (
        "waits in all_reduce at train.py:41 (train); collective 5 of the default group"
        in finding.evidence["where"]["0"]
    )
    early = [_at_time(one, now - 90) for one in spins]
    assert findings(members(*early)) == []
    moving = [*here[:2], _at_time(process(2, (at(40),), (at(41),), recorder=recorders[2], world=3), now)]
    assert {severity for *_, severity in findings(members(*moving))} <= {Severity.INFO}


def _at_time(one: AttachedProcess, seconds: float) -> AttachedProcess:
    shift = seconds - one.samples[-1].at
    samples = tuple(msgspec.structs.replace(sample, at=sample.at + shift) for sample in one.samples)
    return msgspec.structs.replace(one, samples=samples)
