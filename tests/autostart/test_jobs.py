"""Whole jobs of two ranks below ``doctor run``: each is watched once, and is otherwise the job without it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.lab.needs import ROOT, clean_environ
from tests.lab.ports import free_port
from tests.lab.sample import long_only
from tests.lab.speed import patience

PROGRAMS = Path(__file__).parent / "programs"
RUN = [sys.executable, "-m", "doctor", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def job(folder: Path, *command: str, options: tuple[str, ...] | None = ("--",)) -> subprocess.CompletedProcess[str]:
    """Run a program of ours in ``folder``, without ``doctor run`` where there are no options."""
    environ = clean_environ(folder) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}", "OMP_NUM_THREADS": "1"}
    prefix = [] if options is None else [*RUN, *options]
    return subprocess.run(
        [*prefix, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=patience(100)
    )


def loop(folder: Path, *words: str, options: tuple[str, ...] | None = ("--",)) -> subprocess.CompletedProcess[str]:
    return job(folder, *TORCHRUN, str(PROGRAMS / "loop.py"), str(folder), *words, options=options)


def report_in(folder: Path) -> Any:
    """The report of a run of two ranks in which nothing went wrong with the doctor."""
    report = json.loads((folder / "report.json").read_text())
    assert report["coverage"]["ranks_seen"] == 2
    assert report["coverage"]["checks"].get("error", 0) == 0
    return report


def findings(report: Any) -> dict[str, Any]:
    return {
        result["id"]: one for result in report["results"] for one in result["findings"] if one["severity"] != "info"
    }


WITH_WORKERS = long_only("the same loop with workers of its loader is run")
SHARDED = long_only("test_frameworks.py shards by FSDP 1, and benchmarks/frameworks.py plays FSDP2")
LONGEST = long_only("the same job with a rank that waits for a lock is run, and one with a rank that works")
CRASHES = long_only("a spawned rank that raises is run")
EACH_ONCE = long_only("each trainer is run once, with a callback of its own or without")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("plain", marks=WITH_WORKERS),
        "workers",
        pytest.param("fsdp2", marks=SHARDED),
        "accelerated",
    ],
)
def test_the_numbers_are_those_of_the_job_without_it(kind: str, tmp_path: Path) -> None:
    """Losses, parameters and the random states of torch, numpy and Python after every step."""
    if kind == "accelerated" and find_spec("accelerate") is None:
        pytest.skip("needs accelerate")
    traces = []
    for name, options in (("bare", None), ("watched", ("--every-n-steps", "3", "--"))):
        folder = tmp_path / name
        folder.mkdir()
        done = loop(folder, kind, options=options)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "disabled after" not in done.stderr
        assert "is not watched" not in done.stderr
        traces.append([(folder / f"trace-{rank}.json").read_text() for rank in range(2)])
    assert traces[0] == traces[1]
    assert not (tmp_path / "bare/rankdoctor").exists()
    assert findings(report_in(tmp_path / "watched/rankdoctor")) == {}


def test_a_clock_that_the_program_replaces_is_not_read(tmp_path: Path) -> None:
    """Those of tests count their calls, or give a list of times, one for each call."""
    traces = []
    for name, options in (("bare", None), ("watched", ("--every-n-steps", "3", "--"))):
        folder = tmp_path / name
        folder.mkdir()
        done = loop(folder, "counted", options=options)
        assert done.returncode == 0, done.stderr[-3000:]
        traces.append([(folder / f"trace-{rank}.json").read_text() for rank in range(2)])
    assert traces[0] == traces[1]
    assert not (folder / "read").exists()
    (line,) = [line for line in done.stderr.splitlines() if "rankdoctor" in line]
    assert "on 2 ranks; report: " in line
    assert findings(report_in(folder / "rankdoctor")) == {}


def test_a_hang_of_one_rank_is_named(tmp_path: Path) -> None:
    options = ("--folder", "out", "--on-hang", "abort", "--hang-after", f"{patience(3):g}", "--")
    done = loop(tmp_path, "hang", options=options)
    assert done.returncode == 1  # torchrun's
    found = findings(report_in(tmp_path / "out"))
    assert found["RUN001"]["ranks"] == [1]
    assert found["RUN001"]["source"]["file"].endswith("loop.py")
    assert "RUN001" in done.stderr


def test_a_deadlock_before_the_first_batch_is_named(tmp_path: Path) -> None:
    done = loop(tmp_path, "deadlocks", options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode == 1  # torchrun's
    found = findings(report_in(tmp_path / "out"))["RUN001"]
    assert found["ranks"] == [1]
    assert "loop.py" in found["summary"]
    assert "waits for a lock of its own process" in found["summary"]


@pytest.mark.parametrize(
    "kind",
    [
        "late_deadlock",
        "late_for_group",
        "late_for_barrier",
        "late_in_file",
        pytest.param("late_shards", marks=LONGEST),
        pytest.param("late_sleep", marks=LONGEST),
    ],
)
def test_a_hang_before_the_model_is_wrapped_is_named(kind: str, tmp_path: Path) -> None:
    """The other rank waits in the constructor of its wrapper, in the first step, in a barrier, or for the group.

    The store of the group may be a file.
    """
    done = loop(tmp_path, kind, options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode == 1  # torchrun's
    found = findings(report_in(tmp_path / "out"))["RUN001"]
    assert found["ranks"] == [1]
    assert "loop.py" in found["summary"]
    started = float((tmp_path / "stopped").read_text())
    limit = 60.0 if kind == "late_sleep" and sys.version_info < (3, 11) else 15.0
    assert (tmp_path / "out/report.json").stat().st_mtime - started < patience(limit)


@pytest.mark.parametrize("kind", ["late_refuses", "refuses"])
def test_an_exception_before_the_first_batch_is_named(kind: str, tmp_path: Path) -> None:
    """Before the model is wrapped, and before the loop begins."""
    done = loop(tmp_path, kind)
    assert done.returncode == 1  # torchrun's
    assert "ValueError: no such optimizer" in done.stderr
    found = findings(report_in(tmp_path / "rankdoctor"))["RUN004"]
    assert found["ranks"] == [1]
    assert "ValueError: no such optimizer at loop.py" in found["summary"]
    assert "waits for" not in found["evidence"]["where"]["1"]


def test_a_rank_that_exits_with_an_error_is_named(tmp_path: Path) -> None:
    """It has said that its run is over; its exit code says that it failed."""
    done = loop(tmp_path, "stops", options=("--folder", "out", "--"))
    assert done.returncode == 1  # torchrun's
    found = findings(json.loads((tmp_path / "out/report.json").read_text()))["RUN004"]
    assert found["ranks"] == [1]
    assert "exit code 1" in found["summary"]


def test_a_rank_that_waits_at_another_store_is_named(tmp_path: Path) -> None:
    """It does not name the others, which respond to one another but not to it."""
    done = loop(tmp_path, "late_other_port", options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode == 1  # torchrun's
    found = findings(json.loads((tmp_path / "out/report.json").read_text()))["RUN001"]
    assert found["ranks"] == [1]
    assert "Ranks 0" not in done.stderr
    assert "Rank 0 is" not in done.stderr


def test_a_rank_that_is_killed_before_anything_is_watched_is_named(tmp_path: Path) -> None:
    done = loop(tmp_path, "late_killed", options=("--folder", "out", "--"))
    assert done.returncode == 1  # torchrun's
    found = findings(json.loads((tmp_path / "out/report.json").read_text()))["RUN004"]
    assert found["ranks"] == [1]
    assert "SIGKILL" in found["summary"]


def test_models_that_a_wrapper_refuses_are_compared(tmp_path: Path) -> None:
    """All ranks raise the same error, before anything is watched."""
    done = loop(tmp_path, "late_wider")
    assert done.returncode == 1  # torchrun's
    assert "DDP expects same model" in done.stderr
    report = report_in(tmp_path / "rankdoctor")
    found = findings(report)["RUN014"]
    assert found["ranks"] == [0, 1]
    assert "3.weight is an additional tensor" in found["summary"]
    assert report["primary"] == "RUN014"


def test_an_exception_while_the_others_prepare_is_named(tmp_path: Path) -> None:
    """The others do not report: nothing of theirs shows that they are watched."""
    done = loop(tmp_path, "late_alone")
    assert done.returncode == 1  # torchrun's
    report = json.loads((tmp_path / "rankdoctor/report.json").read_text())
    assert findings(report)["RUN004"]["ranks"] == [1]


@pytest.mark.parametrize("kind", ["late_work", pytest.param("late_everywhere", marks=LONGEST)])
def test_what_takes_long_before_the_model_is_wrapped_is_not_a_hang(kind: str, tmp_path: Path) -> None:
    done = loop(tmp_path, kind, options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is not watched" not in done.stderr
    assert findings(report_in(tmp_path / "out")) == {}


def test_a_call_before_the_model_that_one_rank_makes_is_named(tmp_path: Path) -> None:
    """Both wait, each in a call that the other one does not make; no limit of theirs is exceeded for long."""
    done = loop(tmp_path, "late_tells", options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode == 1  # torchrun's
    found = findings(report_in(tmp_path / "out"))["RUN006"]
    assert found["ranks"] == [1]
    assert "Only rank 1 calls broadcast at loop.py" in found["summary"]
    started = float((tmp_path / "stopped").read_text())
    assert (tmp_path / "out/report.json").stat().st_mtime - started < patience(15)


@pytest.mark.parametrize("kind", ["late_helps", "evaluates"])
def test_ranks_that_wait_for_long_before_a_model_or_without_one(kind: str, tmp_path: Path) -> None:
    """For a thread of another rank, or for a rank that works, in a program that never trains."""
    done = loop(tmp_path, kind, options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is not watched" not in done.stderr
    assert findings(report_in(tmp_path / "out")) == {}


def test_work_before_the_first_batch_is_not_a_hang(tmp_path: Path) -> None:
    """Of one rank, for longer than it takes to name one; and nothing is drawn when the run begins beside it."""
    traces = []
    for name, options in (("bare", None), ("watched", ("--folder", "out", "--on-hang", "abort", "--"))):
        folder = tmp_path / name
        folder.mkdir()
        done = loop(folder, "prepares", options=options)
        assert done.returncode == 0, done.stderr[-3000:]
        traces.append([(folder / f"trace-{rank}.json").read_text() for rank in range(2)])
    assert traces[0] == traces[1]
    assert findings(report_in(tmp_path / "watched/out")) == {}


def test_uneven_loaders_whose_loops_count_to_the_smallest_number(tmp_path: Path) -> None:
    done = loop(tmp_path, "uneven_counted")
    assert done.returncode == 0, done.stderr[-3000:]
    assert findings(report_in(tmp_path / "rankdoctor")) == {}
    assert "DATA0" not in done.stderr


def test_uneven_loaders_that_begin_again(tmp_path: Path) -> None:
    done = loop(tmp_path, "uneven_repeated")
    assert done.returncode == 0, done.stderr[-3000:]
    assert findings(report_in(tmp_path / "rankdoctor")) == {}
    assert "DATA0" not in done.stderr


def test_uneven_loaders_whose_loops_end_by_themselves(tmp_path: Path) -> None:
    """Nothing shows before that they will, so there is a warning; it is withdrawn when they have."""
    done = loop(tmp_path, "uneven_flagged")
    assert done.returncode == 0, done.stderr[-3000:]
    assert findings(report_in(tmp_path / "rankdoctor")) == {}
    assert "DATA001" in done.stderr


def test_uneven_loaders_that_end_the_loop(tmp_path: Path) -> None:
    """The same loop, whose counter ends it too late."""
    options = ("--folder", "out", "--on-hang", "abort", "--hang-after", f"{patience(3):g}", "--")
    done = loop(tmp_path, "uneven", options=options)
    assert done.returncode == 1  # torchrun's
    found = findings(report_in(tmp_path / "out"))
    named = [found[one] for one in ("DATA001", "DATA010") if one in found]
    assert named
    assert all(one["ranks"] == [1] for one in named)
    assert {one["severity"] for one in named} == {"error"}


def test_a_program_that_watches_itself_is_watched_once(tmp_path: Path) -> None:
    done = loop(tmp_path, "edited")
    assert done.returncode == 0, done.stderr[-3000:]
    report_in(tmp_path / "own")
    assert not (tmp_path / "rankdoctor").exists()
    assert not (tmp_path / "own/earlier").exists()


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=CRASHES), "fork"])
def test_ranks_that_the_program_starts_itself(method: str, tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "loop.py"), str(tmp_path), method, f"{free_port()}"]
    done = job(tmp_path, *program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert findings(report_in(tmp_path / "rankdoctor")) == {}


def test_an_exception_that_multiprocessing_catches_is_named(tmp_path: Path) -> None:
    done = job(tmp_path, sys.executable, str(PROGRAMS / "loop.py"), str(tmp_path), "crash", f"{free_port()}")
    assert done.returncode == 1
    assert "ValueError: of rank 1" in done.stderr
    found = findings(report_in(tmp_path / "rankdoctor"))["RUN004"]
    assert found["ranks"] == [1]
    assert "ValueError: of rank 1" in found["summary"]


def test_a_broken_package_costs_one_line_a_process(tmp_path: Path) -> None:
    (tmp_path / "doctor_checks").mkdir()
    (tmp_path / "msgspec.py").write_text("raise ImportError('a broken dependency')\n")
    broken = ["env", f"PYTHONPATH={tmp_path}:{ROOT / 'doctor/monitor/autostart/hook'}:{ROOT}:{ROOT / 'checks'}"]
    done = job(tmp_path, *broken, *TORCHRUN, str(PROGRAMS / "loop.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum("a broken dependency" in line for line in done.stderr.splitlines()) == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("framework", "own"),
    [
        ("lightning.pytorch", False),
        pytest.param("lightning.pytorch", True, marks=EACH_ONCE),
        pytest.param("pytorch_lightning", False, marks=EACH_ONCE),
        ("pytorch_lightning", True),
        pytest.param("transformers", False, marks=EACH_ONCE),
        ("transformers", True),
    ],
)
def test_trainers_get_the_callback_once(framework: str, own: bool, tmp_path: Path) -> None:
    if find_spec(framework.partition(".")[0]) is None:
        pytest.skip(f"needs {framework}")
    launcher = TORCHRUN if framework == "transformers" else [sys.executable]
    words = [str(PROGRAMS / "trainer.py"), str(tmp_path), framework, *(["own"] if own else [])]
    done = job(tmp_path, *launcher, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    folders = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("report.json")}
    used = {folder for folder in folders if "earlier" not in folder}
    assert used == ({"own"} if own else {"out/rankdoctor"})
    report_in(tmp_path / used.pop())


@pytest.mark.parametrize("framework", ["lightning.pytorch", pytest.param("transformers", marks=EACH_ONCE)])
def test_a_hang_after_a_trainer_has_returned_is_named(framework: str, tmp_path: Path) -> None:
    if find_spec(framework.partition(".")[0]) is None:
        pytest.skip(f"needs {framework}")
    launcher = TORCHRUN if framework == "transformers" else [sys.executable]
    words = [str(PROGRAMS / "trainer.py"), str(tmp_path), framework, "hangs"]
    done = job(tmp_path, *launcher, *words, options=("--folder", "out", "--on-hang", "abort", "--"))
    assert done.returncode != 0
    found = findings(report_in(tmp_path / "out"))["RUN001"]
    assert found["ranks"] == [1]
    assert "trainer.py" in found["summary"]
