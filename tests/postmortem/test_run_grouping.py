"""Which files are of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor.core.facts import Event, LogFile
from doctor.postmortem.run_grouping import RunIdentity, group_by_run, identity_of, names_of_runs
from tests.lab.cases import each_case
from tests.lab.command import run_doctor


def run(path: str, *ranks: int, span: tuple[float, float] | None = None, **more: object) -> RunIdentity:
    """A log that tells of a run by itself."""
    bare = identity_of(Path(path), (), LogFile(path))
    return bare._replace(ranks=frozenset(ranks), span=span, is_run=True, **more)


def rest(path: str, **more: object) -> RunIdentity:
    """A log, table or dump that does not."""
    return run(path, **more)._replace(is_run=False)


def grouped(*traces: RunIdentity) -> list[list[str]]:
    return [[traces[place].path.as_posix() for place in places] for places in group_by_run(traces)]


AGENT = frozenset({("agent", "x_ab12cd3e")})
ONE_RUN = {
    "ranks": [run(f"logs/rank_{rank}.log", rank) for rank in range(3)],
    "ranks of which none speaks": [run(f"logs/rank_{rank}.log") for rank in range(3)],
    "hosts": [run("logs/node01.log"), run("logs/node02.log")],
    "addresses": [run("logs/ip-10-0-0-1.log", 0), run("logs/ip-10-0-0-2.log", 1)],
    "numbers": [run("logs/0.log"), run("logs/1.log"), run("logs/10.log")],
    "folders of ranks": [run("job/rank_0/stdout.log", 0), run("job/rank_1/stdout.log", 1)],
    "two streams": [run("job/train.out"), run("job/train.err")],
    "stdout and stderr": [run("job/stdout.log", 0, 1), run("job/stderr.log", 0, 1)],
    "torchrun's folders": [
        run(f"logs/none_ab12cd3e/attempt_{attempt}/{rank}/stderr.log") for attempt in (0, 1) for rank in (0, 1)
    ],
    "torchrun's folders and the log of its launcher": [
        run("job.log", 0, 1, span=(0.0, 60.0), is_launcher=True),
        *(run(f"logs/x_ab12cd3e/attempt_0/{rank}/stderr.log", rank, span=(3.0, 59.0), ids=AGENT) for rank in (0, 1)),
        rest("dmesg.txt"),
    ],
    "torchrun's folders and its output with the lines of all ranks": [
        run("job.log", 0, 1, span=(0.0, 60.0)),
        *(run(f"logs/x_ab12cd3e/attempt_0/{rank}/stderr.log", rank, span=(3.0, 59.0), ids=AGENT) for rank in (0, 1)),
    ],
    "streams of a SLURM job": [run("slurm-77.out"), run("slurm-77.err"), run("other/job_77/rank0.log", 0)],
    "complementary ranks at the same time": [
        run("job/master.log", 0, span=(0.0, 50.0)),
        run("job/worker.log", 1, span=(5.0, 49.0)),
    ],
    "ranks below a folder with a year": [run(f"/data/user-2026/out/task{rank}.out", rank) for rank in range(3)],
    "a communicator": [
        run("a/x.log", links=frozenset({("communicator", "0x1")})),
        run("b/y.log", links=frozenset({("communicator", "0x1")})),
    ],
    "a kernel log beside it": [run("job/train.log"), rest("job/dmesg.txt")],
    "a kernel log elsewhere": [run("job/train.log"), rest("kernel/node1.log")],
    "nothing that is a run": [rest("job/dmesg.txt"), rest("job/nvidia-smi.txt"), rest("job/nccl.txt")],
    "a rank that ended early": [run("rank0.log", 0, span=(0.0, 30.0)), run("rank1.log", 1, span=(5.0, 9000.0))],
}
SEVERAL = {
    "a launcher at another time": [
        run("job.log", 0, span=(0.0, 60.0), is_launcher=True),
        run("logs/x_ab12cd3e/attempt_0/0/stderr.log", 0, span=(90.0, 99.0), ids=AGENT),
    ],
    "two launchers at the same time": [
        run("one.log", 0, span=(0.0, 60.0), is_launcher=True),
        run("two.log", 0, span=(0.0, 60.0), is_launcher=True),
        run("logs/x_ab12cd3e/attempt_0/0/stderr.log", 0, span=(3.0, 59.0), ids=AGENT),
    ],
    "jobs of SLURM": [run("slurm-123.out"), run("slurm-124.out"), run("slurm-125.out")],
    "tasks of an array": [run("slurm-9_1.out"), run("slurm-9_2.out")],
    "numbered jobs": [run("job_1.log"), run("job_2.log")],
    "numbered experiments": [run("runs/exp-1/log.txt"), run("runs/exp-2/log.txt")],
    "versions of Lightning's logger": [
        run("lightning_logs/version_0/out.log"),
        run("lightning_logs/version_1/out.log"),
    ],
    "ids behind a name": [run("llama-48213.out"), run("llama-48214.out")],
    "logs that have nothing to do with one another": [run("a.log"), run("d.log")],
    "folders of two jobs with the same ranks": [run("a/rank0.log", 0), run("b/rank0.log", 0)],
    "the same name a day later": [
        run("rank0.log", 0, span=(0.0, 60.0)),
        run("rank1.log", 1, span=(90_000.0, 90_060.0)),
    ],
    "whole logs of one series": [run("train_0.log", 0, 1), run("train_1.log", 0, 1)],
    "runs of torchrun": [
        run("logs/none_ab12cd3e/attempt_0/0/stderr.log"),
        run("logs/none_zz99yy88/attempt_0/0/stderr.log"),
    ],
    "complementary ranks without a time": [run("job/a.log", 0), run("job/b.log", 1)],
}


@each_case("traces", ONE_RUN.values(), ids=ONE_RUN)
def test_one_run(traces: list[RunIdentity]) -> None:
    assert len(grouped(*traces)) == 1


@each_case("traces", SEVERAL.values(), ids=SEVERAL)
def test_several_runs(traces: list[RunIdentity]) -> None:
    assert grouped(*traces) == [[trace.path.as_posix()] for trace in traces]


def test_the_id_in_the_text_counts() -> None:
    def log(name: str, job: int) -> RunIdentity:
        text = f"slurmstepd: error: *** JOB {job} ON node1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***"
        return identity_of(Path(name), [Event("slurm.timelimit", text, name, 1)], LogFile(name))._replace(is_run=True)

    assert grouped(log("a.log", 5), log("b.log", 6), log("c.log", 5)) == [["a.log", "c.log"], ["b.log"]]


def test_what_is_no_run_goes_to_the_nearest_one() -> None:
    one, two = run("one/train.log", hosts=frozenset({"n1"})), run("two/train.log", hosts=frozenset({"n2"}))
    kernel = rest("kernel/k.log", hosts=frozenset({"n2"}))
    assert grouped(one, two, kernel, rest("one/dmesg.txt")) == [
        ["one/train.log", "one/dmesg.txt"],
        ["two/train.log", "kernel/k.log"],
    ]
    assert grouped(one, two, rest("kernel/k.log")) == [["one/train.log"], ["two/train.log"], ["kernel/k.log"]]


OOM = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 3, in <module>\n    x = y.cuda()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 1.05 GiB is free. Of the allocated memory 21.1 GiB is allocated by PyTorch, and 1.21 GiB is reserved by "
    "PyTorch but unallocated.\n"
)
BAD_LABEL = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nValueError: bad label 7\n'


@pytest.fixture
def three_jobs(tmp_path: Path) -> Path:
    (tmp_path / "slurm-123.out").write_text(OOM)
    (tmp_path / "slurm-124.out").write_text(BAD_LABEL)
    (tmp_path / "slurm-125.out").write_text("srun: error: node09: task 1: Segmentation fault\n")
    return tmp_path


def diagnose(folder: Path, *arguments: str) -> tuple[int, str]:
    done = run_doctor("diagnose", ".", *arguments, cwd=folder)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_each_job_gets_its_own_verdict(three_jobs: Path) -> None:
    code, text = diagnose(three_jobs, "--format", "json")
    document = json.loads(text)
    assert (code, document["exit_code"], document["verdict"]) == (1, 1, "fail")
    told = {run["name"]: run["report"] for run in document["runs"]}
    assert {name: report["primary"] for name, report in told.items()} == {
        "job 123": "MEM011",
        "job 124": "RUN004",
        "job 125": "RUN004",
    }
    assert [one["path"] for one in told["job 124"]["inputs"]] == ["slurm-124.out"]
    assert "bad label 7" in json.dumps(told["job 124"]["results"])
    assert "MEM011" not in json.dumps([f for r in told["job 125"]["results"] for f in r["findings"]])
    assert "SIGSEGV" in json.dumps(told["job 125"]["results"])


@pytest.mark.parametrize("form", ["text", "markdown", "html", "junit", "github"])
def test_every_format_names_every_run(three_jobs: Path, form: str) -> None:
    code, text = diagnose(three_jobs, "--format", form)
    assert code == 1
    for job, words in (("123", "ran out of memory"), ("124", "bad label 7"), ("125", "SIGSEGV")):
        assert f"job {job}" in text
        assert words in text


def test_redacted_runs_bear_numbers(three_jobs: Path) -> None:
    _, text = diagnose(three_jobs, "--format", "json", "--redact")
    assert [run["name"] for run in json.loads(text)["runs"]] == ["run 1", "run 2", "run 3"]


def test_an_open_run_beside_a_finding(three_jobs: Path) -> None:
    """The worst verdict is that of the document; where no run has a finding, an open one is."""
    for name in ("slurm-123.out", "slurm-124.out", "slurm-125.out"):
        (three_jobs / name).write_text(f"hello from {name}\n")
    code, text = diagnose(three_jobs, "--format", "json")
    document = json.loads(text)
    assert (code, document["verdict"]) == (3, "inconclusive")


def test_runs_have_names_of_their_own() -> None:
    runs = [
        [run("slurm-7.out")],
        [run("x/a.log")],
        [run("y/a.log")],
        [run("job/rank0.log"), run("job/rank1.log")],
    ]
    assert names_of_runs(runs) == ["job 7", "a.log", "a.log (2)", "job"]
