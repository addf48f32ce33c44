"""Launchers of torch below ``doctor run``: after a process was killed, the others get the time to report it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from doctor.monitor.autostart import launchers

ENDS = {
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "raises": "raise SystemExit(3)",
    "reports": "import pathlib, sys, time; time.sleep(0.4); pathlib.Path(sys.argv[1]).touch(); raise SystemExit(1)",
    "raises_reported": "import os, pathlib; "
    "pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).with_name('rankdoctor-reported').touch(); raise SystemExit(3)",
    "hangs": "import time; time.sleep(60)",
}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of torchrun's processes, changed as below ``doctor run``."""
    from torch.distributed.elastic.multiprocessing import api

    monkeypatch.setattr(api.SubprocessContext, "_poll", api.SubprocessContext._poll)  # restored afterwards
    launchers.watch_torchrun(api)
    return api


def run(api: Any, folder: Path, *ends: str) -> dict[int, int]:
    """The exit codes by local rank, in the order in which torchrun names the failures."""
    context = api.SubprocessContext(
        name="test",
        entrypoint=sys.executable,
        args={rank: ("-S", "-c", ENDS[end], str(folder / "reported")) for rank, end in enumerate(ends)},
        envs={rank: {} for rank in range(len(ends))},
        logs_specs=api.DefaultLogsSpecs(str(folder)),
    )
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        context.start()
        result = context.wait(timeout=60, period=0.05)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    failures = sorted(result.failures.values(), key=lambda one: one.timestamp)
    return {one.local_rank: one.exitcode for one in failures}


def test_the_others_report_before_torchrun_ends_them_and_the_killed_one_stays_its_first_failure(
    api: Any, tmp_path: Path
) -> None:
    codes = run(api, tmp_path, "reports", "killed", "reports")
    assert codes == {1: -signal.SIGKILL, 0: 1, 2: 1}
    assert next(iter(codes)) == 1
    assert (tmp_path / "reported").exists()


def test_a_process_that_does_not_end_is_ended_soon(api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "HOLD", 0.2)
    assert run(api, tmp_path, "killed", "hangs") == {0: -signal.SIGKILL, 1: -signal.SIGTERM}


def test_nothing_is_held_back_after_an_error(api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been reported by the process itself."""
    waits: list[Any] = []
    monkeypatch.setattr(launchers, "await_end", lambda pids: waits.extend(pids))
    assert run(api, tmp_path, "raises_reported", "hangs") == {0: 3, 1: -signal.SIGTERM}
    assert waits == []


def test_the_others_report_one_that_ended_with_an_error_of_which_it_said_nothing(api: Any, tmp_path: Path) -> None:
    codes = run(api, tmp_path, "reports", "raises")
    assert codes == {1: 3, 0: 1}
    assert next(iter(codes)) == 1
    assert (tmp_path / "reported").exists()


def test_lightning_ends_the_others_after_they_had_the_time_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("lightning.fabric.strategies.launchers.subprocess_script")
    kind = module._ChildProcessObserver
    monkeypatch.setattr(kind, "_run", kind._run)
    held: list[bool] = []
    killed = subprocess.Popen([sys.executable, "-S", "-c", ENDS["killed"]])
    monkeypatch.setattr(launchers, "sleep", lambda seconds: held.append(killed.returncode is None))
    launchers.watch_lightning_children(module)
    observer = kind(os.getpid(), [killed])
    monkeypatch.setattr(observer, "_terminate_all", lambda: held.append(killed.returncode is None))
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert observer._run()
    assert held == [True, False]


def test_what_ends_the_launcher_is_not_swallowed(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler of SIGTERM raises, within the wait, too."""

    def interrupted(seconds: float) -> None:
        raise api.SignalException("test", signal.SIGTERM)

    child = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ENDS["hangs"]], {})
    monkeypatch.setattr(launchers, "sleep", interrupted)
    try:
        with pytest.raises(api.SignalException):
            launchers.await_end([child])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_launcher_of_another_release_is_left_alone() -> None:
    """Attributes that are not there cost the wait, and nothing else."""

    class Context:
        def _poll(self) -> str:
            return "polled"

    launchers.watch_torchrun(SimpleNamespace(SubprocessContext=Context, ProcessFailure=None))
    assert Context()._poll() == "polled"


def _spawned(number: int, folder: str) -> None:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.4)
    Path(folder, "reported").touch()
    raise ValueError("the peer is gone")


def test_the_others_report_before_spawn_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = importlib.import_module("torch.multiprocessing.spawn")  # torch.multiprocessing.spawn is a function, too
    monkeypatch.setattr(spawn.ProcessContext, "join", spawn.ProcessContext.join)
    launchers.watch_spawn(spawn)
    context = spawn.start_processes(_spawned, (str(tmp_path),), nprocs=2, join=False, start_method="fork")
    with pytest.raises(spawn.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        context.join()
    assert (tmp_path / "reported").exists()
