"""Why stacks cannot be read, by the kernel's rules; most rules that this kernel applies are tested with the sampler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.attach.py_spy import DumpOutput
from doctor.attach.refusals import explain_denial, explain_failure
from doctor.core.process import ChildOwner
from tests.attach.readable import FILTERED, FORBIDS_TRACING, SLEEPER, functions_of, read_from, started
from tests.lab.cases import each_case
from tests.lab.needs import clean_environ
from tests.lab.speed import patience
from tests.lab.users import ALICE, run_as

PTRACE = 1 << 19
DENIED = "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'"


def process(proc, name, uids=(1000, 1000, 1000), *, capabilities=0, namespace="user:[1]", more=""):
    folder = proc / str(name)
    (folder / "ns").mkdir(parents=True, exist_ok=True)
    uid, gid = "\t".join(map(str, (*uids, uids[1]))), "\t".join(["1000"] * 4)
    (folder / "status").write_text(f"Name:\tpython\nUid:\t{uid}\nGid:\t{gid}\nCapEff:\t{capabilities:016x}\n{more}")
    (folder / "ns" / "user").symlink_to(namespace)
    return folder


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A tree whose files belong to whom the kernel would show: the effective user of the process."""
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    return tmp_path


def owned(monkeypatch, uid):
    """Files about processes belong to ``uid``."""
    from pathlib import Path
    from types import SimpleNamespace

    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_uid=uid))


@each_case(
    "scope, reason, remedy",
    [
        (1, "kernel.yama.ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"),
        (2, "kernel.yama.ptrace_scope is 2", "sudo doctor attach --pid 7"),
        (3, "kernel.yama.ptrace_scope is 3", "reboot"),
    ],
)
def test_yama(scope, reason, remedy, tmp_path_factory):
    proc = tmp_path_factory.mktemp("proc")
    (proc / "sys/kernel/yama").mkdir(parents=True)
    (proc / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    process(proc, "self")
    process(proc, 7)
    with pytest.MonkeyPatch.context() as patch:
        owned(patch, 1000)
        refusal = explain_denial(7, None, proc)
    assert reason in refusal.reason
    assert remedy in refusal.remedy


def test_process_with_more_capabilities(proc, monkeypatch):
    process(proc, "self")
    process(proc, 7, capabilities=1 << 12)
    owned(monkeypatch, 1000)
    assert "capabilities that doctor attach lacks" in explain_denial(7, None, proc).reason


def test_process_of_several_users(proc, monkeypatch):
    process(proc, "self")
    process(proc, 7, (1000, 1001, 1001))
    owned(monkeypatch, 1001)
    assert "several user ids" in explain_denial(7, None, proc).reason


def test_child_of_root_has_the_rights_of_its_user(proc, monkeypatch):
    process(proc, "self", (0, 0, 0), capabilities=PTRACE)
    process(proc, 7, (1001, 1001, 1001))
    owned(monkeypatch, 1001)
    assert "runs as uid 1000" in explain_denial(7, ChildOwner(1000, 1000), proc).reason


def test_other_user_namespace(proc, monkeypatch):
    process(proc, "self", (0, 0, 0), capabilities=PTRACE)
    process(proc, 7, namespace="user:[2]")
    owned(monkeypatch, 1000)
    assert "user namespace" in explain_denial(7, None, proc).reason


@each_case("mode, source", [("2", "seccomp filter"), ("0", "security module")])
def test_what_else_refuses(mode, source, tmp_path_factory):
    proc = tmp_path_factory.mktemp("proc")
    process(proc, "self", (0, 0, 0), capabilities=PTRACE, more=f"Seccomp:\t{mode}\n")
    process(proc, 7)
    assert source in explain_denial(7, None, proc).reason


def test_process_that_is_gone(proc):
    process(proc, "self")
    assert explain_denial(7, None, proc).remedy == "Run doctor attach as root."


@each_case(
    "message, reason",
    [
        ("Error: Failed to find python version from target process\n", "no Python interpreter"),
        ("Error: Unsupported version of Python: 3.19.0\n", "does not support Python 3.19.0"),
        ("Error: new failure\n\nCaused by:\n    0: outer\n    1: the cause\n\nStack backtrace:\n  0: f\n", "the cause"),
        ("Error: \x1b[2J hf_" + "Ab1" * 12 + " " + "x" * 5000, "<redacted>"),
        ("", "no reason"),
    ],
)
def test_words_of_py_spy(message, reason):
    refusal = explain_failure(DumpOutput(b"", message, 1), 1)
    assert reason in refusal.reason
    assert refusal.reason.isprintable()
    assert len(refusal.reason) < 400


@each_case("limit, reason", [("size", "larger"), ("deadline", "deadline"), ("pause", "deadline")])
def test_limits(limit, reason):
    assert reason in explain_failure(DumpOutput(b"", DENIED, None, stopped_by=limit), 1).reason


def attached_from(before, target, *options):
    """The exit code and report of the command, run by a process whose command begins with ``before``."""
    command = [sys.executable, "-m", "doctor", "attach", "--isolated", "--format", "json", "--pid", str(target.pid)]
    environ = clean_environ(Path("/"))
    done = subprocess.run(
        [*before, *command, *options], env=environ, cwd="/", capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_seccomp_filter_leaves_memory_readable():
    """py-spy then reads /proc/PID/mem, which no filter of system calls refuses; native frames need ptrace."""
    with started() as target:
        found = read_from(FILTERED, target)
        code, report = attached_from(FILTERED, target, "--native", "--rounds", "2")
    assert functions_of(found) == ["inner", "outer", "<module>"]
    assert found.samples[0].paused == 0.0
    assert (code, report["outcome"]["kind"]) == (3, "unknown")
    assert "no rank made progress" in json.dumps(report["outcome"])
    assert "inner" in json.dumps(report["stacks"]["groups"])
    assert any(
        one.startswith("native frames of rank 0 could not be read: A seccomp filter refuses ptrace")
        for one in report["stacks"]["notes"]
    )
    assert not any("--native" in one for one in report["outcome"]["collect"])


def test_seccomp_filter_and_a_process_that_forbids_tracing():
    with started(FORBIDS_TRACING + SLEEPER, before=run_as(ALICE)) as target:
        code, report = attached_from([*FILTERED, *run_as(ALICE)], target, "--rounds", "1")
        by_root = attached_from([], target, "--rounds", "1")[1]
    assert code == 3
    assert "PR_SET_DUMPABLE is 0" in json.dumps(report["outcome"])
    assert report["outcome"]["collect"] == [f"sudo doctor attach --pid {target.pid}"]
    assert "inner" in json.dumps(by_root["stacks"]["groups"])
