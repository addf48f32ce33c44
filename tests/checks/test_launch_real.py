"""Causes the faults of a launch for real: variables, sockets, affinity, namespaces, prompts, torchrun."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts, decode_outcome
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.facts import LaunchFacts
from doctor.core.job import Member, build_job
from doctor.testing.cases import healthy

ROOT = Path(__file__).parents[2]
KEYS = ("launch", "environment", "master", "process", "trainer", "host", "interfaces")
CHECKS = CheckRegistry(tuple(check for check in builtin_checks() if check.id.startswith("ENV")))

PROGRAM = """
import json, os, sys
from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts, encode_outcome
sections = collect_facts(KEYS, Machine())
text = json.dumps({key: encode_outcome(outcome).hex() for key, outcome in sections.items()})
out = os.environ.get("FACTS_TO")
open(f"{out}.{os.environ['RANK']}", "w").write(text) if out else print(text)
""".replace("KEYS", repr(KEYS))

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[0-1]",
}
"""As SLURM 22.05 sets them for task 1 of `srun` in a batch script of 2 nodes with 2 tasks each."""

BATCH = {name: value for name, value in STEP.items() if "STEP" not in name} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""The batch script of the same job."""

HELPER = STEP | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
"""`srun --nodes=1 --ntasks=1` in the same script: SLURM_NTASKS_PER_NODE stays the job's."""

RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29311"}


def faulty(*members):
    """What is found, as ``{id: (severity, ranks)}``; the worst finding of each id."""
    results = examine_job(build_job(Member(rank, sections) for rank, sections in members), CHECKS)
    assert [result.reason for result in results if result.status.value == "error"] == []
    return {
        result.id: (result.severity.value, tuple(sorted({rank for one in result.findings for rank in one.ranks})))
        for result in results
        if result.findings
    }


def here(environ, *keys):
    """The facts that this process collects under other variables."""
    return collect_facts(keys or KEYS, Machine(environ=environ))


def lone(environ):
    """A lone process with these variables, numbered as the command line would number it."""
    sections = here(environ, "launch", "environment", "trainer", "process", "host")
    launch = sections["launch"]
    assert isinstance(launch, LaunchFacts)
    return faulty((launch.rank or 0, sections))


def start(*prefix, arguments=("-c", PROGRAM), **variables):
    """A Python process in its own surroundings that collects its facts."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [*prefix, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        cwd=ROOT,
    )


def facts_of(process):
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return read(output)


def read(text):
    return {key: decode_outcome(key, bytes.fromhex(data)) for key, data in json.loads(text).items()}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        RENDEZVOUS,
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **RENDEZVOUS},
        STEP,
        STEP | RENDEZVOUS,
        HELPER,
        BATCH | {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"},
        {name: value for name, value in BATCH.items() if "NTASKS" not in name},
        BATCH | {"SLURM_JOB_NAME": "interactive"},
        HELPER | {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"},
        {"NODE_RANK": "1", **RENDEZVOUS},
        {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", **RENDEZVOUS},
        STEP | {"SLURM_GPUS_PER_TASK": "1", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"},
    ],
    ids=[
        "nothing is set",
        "a batch script's master",
        "one of two by hand",
        "a task of srun",
        "a task of srun, master exported",
        "a helper step",
        "a batch script of one task",
        "a batch script that requests no tasks",
        "an interactive allocation",
        "the shell step of an interactive allocation",
        "Lightning on several hosts",
        "a child of Lightning",
        "one GPU a task, used as device 0",
    ],
)
def test_healthy_variables(environ):
    assert lone(environ) == {}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WORLD_SIZE": "8"}, {"ENV001": ("error", (0,))}),
        ({"RANK": "0", "WORLD_SIZE": "two", **RENDEZVOUS}, {"ENV001": ("error", (0,))}),
        ({"RANK": "4", "WORLD_SIZE": "4", **RENDEZVOUS}, {"ENV002": ("error", (4,))}),
        ({"RANK": "-1", "WORLD_SIZE": "4", **RENDEZVOUS}, {"ENV002": ("error", (-1,))}),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", **RENDEZVOUS},
            {"ENV002": ("error", (0,))},
        ),
        (STEP | {"RANK": "1", "WORLD_SIZE": "8", **RENDEZVOUS}, {"ENV003": ("error", (1,))}),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, {"ENV007": ("error", (0,))}),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, {"ENV007": ("error", (0,))}),
        ({"LOCAL_RANK": "1"}, {"ENV009": ("error", (0,))}),
        ({"NODE_RANK": "2"}, {"ENV009": ("error", (0,))}),
        (STEP | {"RANK": "0", "WORLD_SIZE": "4", **RENDEZVOUS}, {"ENV009": ("error", (0,))}),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2"}, {"ENV010": ("error", (1,))}),
        (HELPER | {"SLURM_NTASKS": "4"}, {"ENV010": ("error", (0,))}),
        (STEP | {"SLURM_PROCID": "5"}, {"ENV010": ("error", (5,))}),
        (STEP | {"PL_TRAINER_DEVICES": "8"}, {"ENV010": ("error", (1,))}),
        (STEP | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, {"ENV011": ("warning", (1,))}),
        (
            STEP | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "1"},
            {"ENV011": ("error", (1,))},
        ),
        (BATCH, {"ENV010": ("error", (0,)), "ENV014": ("error", (0,))}),
        ({"SLURM_NTASKS": "4"}, {"ENV014": ("error", (0,))}),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
def test_faulty_variables(environ, expected):
    assert lone(environ) == expected


@contextlib.contextmanager
def stranger():
    """Another process that listens on a port of loopback; yields its process id and port."""
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.communicate(timeout=20)


def test_a_busy_port():
    with stranger() as (pid, port):
        sections = here({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port})
        assert faulty((0, sections))["ENV008"] == ("error", (0,))
        assert sections["master"].listener.pid == pid
        other_rank = here({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port})
        agent = here({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": port})
        assert "ENV008" not in faulty((1, other_rank)) | faulty((0, agent))
    free = here({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port})
    assert "ENV008" not in faulty((0, free))


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset (util-linux)")
def test_ranks_on_one_core():
    first = str(min(os.sched_getaffinity(0)))
    pinned = [start("taskset", "-c", first, OMP_NUM_THREADS="1") for _ in range(2)]
    assert faulty(*enumerate(map(facts_of, pinned))) == {"ENV012": ("warning", (0, 1))}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_ranks_on_two_cores():
    free = [start(OMP_NUM_THREADS="1") for _ in range(2)]
    assert faulty(*enumerate(map(facts_of, free))) == {}


def unshared(*kinds):
    """A command prefix that starts a process in namespaces of its own; skips where that is not allowed."""
    probe = ["unshare", *kinds, "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, timeout=20).returncode:
        pytest.skip("needs root and unshare (util-linux)")
    return ["unshare", *kinds]


@pytest.mark.parametrize(
    ("kinds", "setup"),
    [
        (("--mount",), "mount -t tmpfs none /dev/shm"),
        (("--ipc",), "true"),
        (("--net",), "ip link set lo up || true"),
        (("--pid", "--fork", "--mount-proc"), "true"),
    ],
    ids=["shm", "ipc", "net", "pid"],
)
def test_containers_of_one_machine(kinds, setup):
    apart = start(*unshared(*kinds), "sh", "-c", f'{setup}; exec "$0" "$@"')
    others = [start(), start()]
    first, second, third = map(facts_of, [*others, apart])
    assert faulty((0, first), (1, second), (2, third))["ENV018"] == ("warning", (2,))
    assert "ENV018" not in faulty((0, first), (1, second))


def test_each_host_is_its_own_master():
    hosts = [
        start(
            *unshared("--uts", "--net"), "sh", "-c", f'hostname {name}; ip link set lo up; exec "$0" "$@"', **RENDEZVOUS
        )
        for name in ("alpha", "beta")
    ]
    found = faulty(*enumerate(map(facts_of, hosts)))
    assert found["ENV006"] == ("error", (1,))


@pytest.mark.parametrize(
    ("options", "strategy", "expected"),
    [
        (("-i",), "ddp", {"ENV013": ("error", (0,))}),
        (("-i",), "ddp_notebook", {}),
        ((), "ddp", {}),
    ],
    ids=["ddp at a prompt", "ddp_notebook at a prompt", "ddp in a script"],
)
def test_an_interactive_session(options, strategy, expected):
    process = start(arguments=(*options, "-c", PROGRAM), PL_TRAINER_STRATEGY=strategy)
    assert faulty((0, facts_of(process))) == expected


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_torchrun(tmp_path):
    program, facts = tmp_path / "collect.py", tmp_path / "facts"
    program.write_text(PROGRAM)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program))
    process = start(arguments=launcher, FACTS_TO=str(facts))
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    ranks = [read((tmp_path / f"facts.{rank}").read_text()) for rank in range(2)]
    assert [sections["launch"].launcher for sections in ranks] == ["torchrun", "torchrun"]
    assert faulty(*enumerate(ranks)) == {}
    assert faulty((0, ranks[0]), (0, ranks[1]))["ENV004"] == ("error", (0,))


def test_the_way_out_of_a_collision_is_that_of_the_launcher():
    """Hosts that torchrun was started on need numbers; tasks of srun have theirs, and only RANK is in the way."""
    by_torchrun = healthy(hosts=2, per_host=1).renumbered(1, 0)
    by_srun = healthy(hosts=2, per_host=1).by_srun().alter(LaunchFacts, ranks=(1,), rank=0)
    for sketch, word, other in ((by_torchrun, "--node-rank=1", "srun"), (by_srun, "SLURM_PROCID", "--node-rank")):
        [result] = [result for result in examine_job(sketch.job(), CHECKS) if result.id == "ENV004"]
        [finding] = result.findings
        assert word in finding.fix
        assert other not in finding.fix
