"""Limits, namespaces, affinity and prompts of real processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.host.own_process import can_lock_memory, collect_process, has_mps_daemon, threads_asked
from tests.lab.speed import patience

READ = """
import json, sys
from doctor.collectors.base import Machine
from doctor.collectors.host.own_process import collect_process
import msgspec
json.dump(msgspec.to_builtins(collect_process(Machine())), sys.stdout)
"""


def read(*prefix: str, options: tuple[str, ...] = (), setup: str = "") -> dict:
    command = [*prefix, sys.executable, *options, "-c", setup + READ]
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, "PYTHONPATH": paths, "PYTHONSTARTUP": ""}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=patience(60), check=True
    )
    return json.loads(done.stdout)


def limit(facts: dict, name: str) -> dict:
    return next(entry for entry in facts["limits"] if entry["name"] == name)


def test_limits_and_affinity() -> None:
    cpu = min(os.sched_getaffinity(0))
    setup = (
        "import os, resource as r; r.setrlimit(r.RLIMIT_NOFILE, (77, 99)); r.setrlimit(r.RLIMIT_STACK, (1 << 20, -1));"
        f"os.sched_setaffinity(0, [{cpu}])\n"
    )
    facts = read(setup=setup)
    assert (limit(facts, "open_files")["soft"], limit(facts, "open_files")["hard"]) == (77, 99)
    assert (limit(facts, "stack")["soft"], limit(facts, "stack")["hard"]) == (1 << 20, -1)
    assert facts["cpus_allowed"] == [cpu]
    assert {entry["name"] for entry in facts["limits"]} == {"locked_memory", "open_files", "processes", "stack"}


def test_prompts() -> None:
    assert not read().get("interactive", False)
    assert read(options=("-i",))["interactive"]
    assert read(setup="import sys; sys.ps1 = '>>> '\n")["interactive"]


def test_an_imported_ipython_is_no_prompt() -> None:
    """Libraries import IPython without a shell; a shell that lives says so."""
    module = "import sys, types; m = sys.modules['IPython'] = types.ModuleType('IPython'); m.get_ipython = lambda: {}\n"
    assert not read(setup=module.format("None")).get("interactive", False)
    assert read(setup=module.format("object()"))["interactive"]


def test_a_terminal_in_jupyter_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not read().get("interactive", False)


def test_namespaces_differ_after_unshare() -> None:
    if subprocess.run(["unshare", "--ipc", "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces can't be made here: needs root or user namespaces")
    here, there = (
        {space["kind"]: space["identity"] for space in facts["namespaces"]}
        for facts in (read(), read("unshare", "--ipc"))
    )
    assert here["ipc"] != there["ipc"]
    assert here["net"] == there["net"]
    assert set(here) == {"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"}


def test_a_tree_without_anything_gives_notes(tmp_path: Path) -> None:
    facts = collect_process(Machine(environ={}, proc=tmp_path, dev=tmp_path))
    assert facts.namespaces == ()
    assert facts.shm_device is None
    assert facts.can_lock_memory is None
    assert facts.why_hidden("namespaces")
    assert facts.why_hidden("shm_device")


@pytest.mark.parametrize(
    ("mask", "namespace", "can"),
    [
        ("000001ffffffffff", "user:[4026531837]", True),
        ("000001ffffffffff", "user:[4026532000]", False),
        ("0000000000000000", "user:[4026531837]", False),
        ("00000000a80425fb", "user:[4026531837]", False),
        ("rubbish", "user:[4026531837]", None),
    ],
)
def test_right_to_lock_memory(tmp_path: Path, mask: str, namespace: str, can: bool | None) -> None:
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "user").symlink_to(namespace)
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nCapInh:\t0\nCapEff:\t{mask}\n")
    assert can_lock_memory(tmp_path) is can


def test_fork_before_and_after_torch() -> None:
    assert "forked_after_cuda" not in read()
    pytest.importorskip("torch")
    assert read(setup="import torch\n")["forked_after_cuda"] is False


@pytest.mark.parametrize(
    ("text", "threads"), [("8", 8), ("4,2", 4), ("0", None), ("-2", None), ("x", None), ("", None)]
)
def test_threads(text: str, threads: int | None) -> None:
    assert threads_asked({"OMP_NUM_THREADS": text}) == threads


def test_mps_daemon_that_listens_has_gone_or_was_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # A path of a socket has at most 107 bytes.
    machine = Machine(environ={"CUDA_MPS_PIPE_DIRECTORY": "mps"}, proc=tmp_path / "proc")
    assert has_mps_daemon(Machine(environ={})) is None
    assert has_mps_daemon(machine) is False
    Path("mps").mkdir()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind("mps/control")
        daemon.listen()
        assert has_mps_daemon(machine) is True
    assert has_mps_daemon(machine) is False


def test_mps_daemon_behind_a_path_that_is_no_directory_or_too_long(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    assert has_mps_daemon(Machine(environ={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "0")})) is False
    assert has_mps_daemon(Machine(environ={"CUDA_MPS_PIPE_DIRECTORY": "/" + "x" * 200})) is None
