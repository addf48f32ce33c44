"""ENV008: another process listens on MASTER_PORT."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import events_of_kinds, set_up_after
from doctor.api import (
    EventGroup,
    FileFails,
    FilePasses,
    Finding,
    IdenticalRanks,
    Job,
    LaunchFile,
    Rank,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    Violation,
    check,
    finding_from_logs,
    rule,
)
from doctor.facts import Event, LaunchFacts, Listener, MasterFacts, ProcessFacts
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, port_of, starts_of
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing import Fails, Passes, healthy, logged
from doctor.testing.script_cases import shell_fails, shell_passes

STRANGER = Listener("0.0.0.0", 29500, 4711, "python", "python train.py --name other-run")  # noqa: S104 - as seen


def _of_refusals(job: Job) -> Iterator[Finding]:
    """Report a port in use unless the job starts anyway: torchrun joins an agent of its own job that holds the port."""
    for group in _refusals(job):
        port = next((port for event in group.events if (port := _port_of(event))), None)
        yield finding_from_logs(
            group,
            f"Port {port} is already in use" if port else "The port to listen on is already in use",
            ranks=(),
            evidence={"port": port},
            confidence=0.95 if port else 0.85,
            fix=f"Use another port, or end the process that `ss -tlnp sport = :{port}` shows."
            if port
            else "Use another port on all ranks (`export MASTER_PORT=29600`), or `torchrun --standalone` on one host.",
            explains=("NET006", "ENV015", "ENV005"),
        )


def _of_strangers(job: Job) -> Iterator[Finding]:
    events = [event for event in events_of_kinds(job, "torch.store.stranger") if not set_up_after(job, event)]
    if events:
        group = EventGroup(events[0].kind, tuple(events))
        where = f"{group.value('host')}:{group.value('port')}" if group.value("host") else "the master port"
        # The bytes that were read as a number, if they are letters: HTTP, SSH-.
        number = int((group.value("got") or "0")[:20])
        letters = number.to_bytes(9, "little").rstrip(b"\0")
        speaks = letters.decode("ascii") if letters.isascii() and letters.decode("ascii").isprintable() else ""
        yield finding_from_logs(
            group,
            f"The process that listens on {where} is not a TCPStore" + (f": it sends {speaks!r}" if speaks else ""),
            evidence={"where": where, "expected": group.value("want"), "got": group.value("got")},
            ranks=(),
            confidence=0.85,
            fix="Choose a MASTER_PORT that no other program, proxy or load balancer uses, and an address that reaches "
            "the host of rank 0 directly.",
            explains=("NET006", "ENV015"),
        )


def _refusals(job: Job) -> Iterator[EventGroup]:
    """Group the log events, those that name the port first."""
    events = [
        event for event in events_of_kinds(job, *_KINDS) if _is_taken(job, event) and not set_up_after(job, event)
    ]
    if events:
        yield EventGroup(events[0].kind, tuple(sorted(events, key=lambda event: _port_of(event) is None)))


def _is_taken(job: Job, event: Event) -> bool:
    """Whether the error is EADDRINUSE; torch's final line names no error, the lines per address before it do."""
    if event.kind != "torch.store.listen_fail" or "in use" in event.text or "EADDRINUSE" in event.text:
        return True
    numbers = {one.value("errno") or one.value("errno2") for one in events_of_kinds(job, event.kind)} - {None}
    return numbers <= {"98"}


_KINDS = (
    "torch.store.listen_fail",
    "torch.store.port_busy.old",
    "host.address_in_use",
    "accelerate.port_busy",
    "net.port.busy_windows",
)
_PORT = re.compile(r"(?:[\]\w.*]:|[\w.:'], |[Pp]ort:? `?)(?P<port>\d{2,5})\b(?!\.)")
"""A port in such a message: ``[::]:29500``, ``('0.0.0.0', 29500)``, ``port: 29500``."""


def _port_of(event: Event) -> int | None:
    named = (event.value(name) for name in ("port", "port2"))
    found = next((value for value in named if value), None)
    words = _PORT.search(event.text.partition("use")[0]) if found is None else None
    number = int((found or (words["port"] if words else "0"))[:6])
    return number if 0 < number < 65536 else None


@check(
    id="ENV008",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts, MasterFacts),
    compares_ranks=False,
    from_logs=(_of_strangers, _of_refusals),
    impacts={
        r"^(?:Port \d+|The port to listen on) is already in use": (
            'The process fails with "address already in use", and the ranks that connect to it block until their '
            "timeout."
        ),
        r"is not a TCPStore": (
            "The ranks connect to another program: they fail with an error or block until the timeout."
        ),
        r"in use by": (
            'Rank 0 fails to host the store ("address already in use"). If the other process is the store of '
            "another job, ranks join that one."
        ),
    },
    cases=lambda: (
        Passes("the port is free", healthy(hosts=2, per_host=2).by_srun()),
        Passes("torchrun's agent hosts the store", healthy().alter(MasterFacts, listener=STRANGER)),
        Passes(
            "the launcher listens",
            healthy().by_srun().alter(MasterFacts, listener=Listener("::", 29500, 88, "pt_elastic", is_ancestor=True)),
        ),
        Passes(
            "rank 0 itself listens: the run is on",
            healthy().by_srun().alter(MasterFacts, listener=Listener("::", 29500, 10_000, "python")),
        ),
        Passes(
            "rank 1 alone sees its own rank 0", healthy().by_srun().alter(MasterFacts, listener=STRANGER).only((1,))
        ),
        Fails(
            "another training holds the default port",
            healthy(hosts=2, per_host=2).by_srun().alter(MasterFacts, ranks=(0, 1), listener=STRANGER),
            ranks=(0,),
        ),
        Fails(
            "a process that may not be seen listens",
            healthy().by_srun().alter(MasterFacts, listener=Listener("::", 29500)),
            ranks=(0,),
        ),
        Fails(
            "a shell with MASTER_ADDR and MASTER_PORT, before the start",
            healthy(hosts=1, per_host=1)
            .launched(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
            .put(MasterFacts(address="127.0.0.1", port=29500, is_local=True, listener=STRANGER)),
            ranks=(0,),
        ),
        Passes(
            "torchrun finds the agent of its own job there, and joins it",
            logged(
                "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29400 (errno: 98 - Address "
                "already in use).",
                "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local network address.",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
            ),
        ),
    ),
)
def master_port_busy(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_PORT is free on the master's host.

    Why it hurts: rank 0 fails to host the store ("address already in use"), or ranks join the store of another job;
    ranks on other hosts block until the timeout.
    Fix: Use another port on all ranks (`export MASTER_PORT=29600`) or, on one host, `torchrun --standalone`.
    """
    asked = False
    for launch, master, identical in job.each(LaunchFacts, MasterFacts):
        hosting = _that_hosts(launch, identical)
        if hosting is None or not master.is_local:
            continue
        asked = True
        if launch.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            continue
        note = master.why_hidden("listener")
        if master.listener is not None:
            yield from _judge(job, master, master.listener, hosting)
        elif note is not None:
            yield Unknown(note.reason, (hosting.number,), note.unhide)
    if not asked:
        yield Skip("the host of MASTER_PORT was not checked")


def _that_hosts(launch: LaunchFacts, identical: IdenticalRanks) -> Rank | None:
    if launch.rank not in (0, None):
        return None
    return identical.members[0]


def _judge(job: Job, master: MasterFacts, listener: Listener, hosting: Rank) -> Iterator[Finding]:
    if listener.is_ancestor or (listener.pid is not None and listener.pid in _own_pids(job, hosting)):
        return
    who = (
        f"{listener.process or 'a process'} (pid {listener.pid})" if listener.pid else "a process hidden from this user"
    )
    yield Finding(
        f"MASTER_PORT {listener.port} on {hosting.host.name} is in use by {who}",
        ranks=(hosting.number,),
        confidence=1.0 if listener.pid else 0.8,
        evidence={
            "MASTER_ADDR": master.address,
            "MASTER_PORT": listener.port,
            "listens_on": listener.address,
            "pid": listener.pid,
            "process": listener.process,
            "command": " ".join((listener.command or "").split())[:200] or None,
        },
        fix=_fix(listener),
    )


def _own_pids(job: Job, hosting: Rank) -> set[int]:
    members = job.by_host()[hosting.host.index].members
    return {process.pid for rank in members if (process := rank.find(ProcessFacts)) is not None}


def _fix(listener: Listener) -> str:
    other = listener.port + 100 if listener.port + 100 < 65536 else listener.port - 100
    look = f"ps -fp {listener.pid}" if listener.pid else f"sudo ss -tlnp sport = :{listener.port}"
    return f"Use another port on all ranks (`export MASTER_PORT={other}`), or end the process that `{look}` shows."


_ARRAY = ("#!/bin/bash", "#SBATCH --array=0-7", "#SBATCH --gres=gpu:2")
_POD = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1  # !
      template:
        spec: {containers: [{name: pytorch, resources: {limits: {nvidia.com/gpu: 1}}}]}
"""
SMALL = 4
"""GPUs; a job that requests fewer is likely to share its host."""


@rule(
    check=master_port_busy,
    severity=Severity.WARNING,
    reads=LaunchFile,
    cases=lambda: (
        shell_fails(
            "all jobs of an array",
            *_ARRAY,
            "torchrun --nproc-per-node=2 --master-port=29500 train.py $SLURM_ARRAY_TASK_ID  # !",
        ),
        shell_fails(
            "two in the background",
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 --master_port=29501 a.py &",
            "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 --master_port=29501 b.py &  # !",
            "wait",
        ),
        shell_fails(
            "a loop that waits for none of its runs",
            "for seed in 0 1 2 3; do",
            "  accelerate launch --num_processes 2 --main_process_port 29555 train.py --seed $seed &  # !",
            "done",
            "wait",
        ),
        FileFails(
            "a pod on the network of its host",
            _POD.replace("spec: {", "spec: {hostNetwork: true, "),
            name="job.yaml",
        ),
        FilePasses("a pod with a network of its own", _POD.replace("  # !", ""), name="job.yaml"),
        shell_passes(
            "a port of its own for each job",
            *_ARRAY,
            "export MASTER_PORT=$((29500 + SLURM_ARRAY_TASK_ID))",
            "torchrun --nproc-per-node=2 --master-port=$MASTER_PORT train.py",
        ),
        shell_passes(
            "one job of the array at a time",
            "#SBATCH --array=0-7%1",
            "#SBATCH --gres=gpu:2",
            "torchrun --master-port=29500 train.py",
        ),
        shell_passes(
            "a host of its own for each job",
            "#SBATCH --array=0-7",
            "#SBATCH --gres=gpu:8",
            "torchrun --master-port=29500 train.py",
        ),
        shell_passes(
            "two ranks of one job, started by hand",
            "export MASTER_PORT=1234",
            "RANK=0 python train.py &",
            "RANK=1 python train.py &",
        ),
        shell_passes(
            "one step on each host",
            "export MASTER_PORT=2345",
            "for n in $NODES; do",
            "  srun -w $n -N1 python train.py &",
            "done",
            "wait",
        ),
        shell_passes("torchrun chooses", *_ARRAY, "torchrun --standalone --nproc-per-node=2 train.py"),
        shell_passes("one after the other", "torchrun --master_port=29501 a.py", "torchrun --master_port=29501 b.py"),
        shell_passes(
            "other ports", "torchrun --master_port=29501 a.py &", "torchrun --master_port=29502 b.py &", "wait"
        ),
        shell_passes(
            "the two hosts of one job, played on one",
            "torchrun --nnodes=2 --node_rank=0 --master_addr=127.0.0.1 --master_port=29501 a.py &",
            "torchrun --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 --master_port=29501 a.py &",
        ),
        shell_passes(
            "it waits in the loop",
            "for seed in 0 1; do",
            "  torchrun --master_port=29501 a.py --seed $seed &",
            "  wait",
            "done",
        ),
    ),
)
def master_port_busy_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether runs that a file starts concurrently use different ports.

    Why it hurts: the second run on a host ends with "address already in use", or its ranks join the store of the
    first.
    Fix: Give each run its own --master-port, or use `torchrun --standalone` on one host, which picks a free one.
    """
    if isinstance(file, ShellFile):
        before: list[ProcessLaunch] = []
        for start in starts_of(file):
            port = _fixed_port(start)
            if port is None or (hosts_of(start.launch) or 1) > 1:
                continue
            line = start.launch.place.line
            before = [one for one in before if not _waits(file, one.launch.place.line, line)]
            why = _in_array(file, start) or _in_loop(file, start) or _beside(start, before)
            if why:
                yield Violation(
                    start.launch.place,
                    f"Port {port} is fixed, and {why}",
                    fix=f"Give each job its own port: `--master-port=$(({port} + SLURM_ARRAY_TASK_ID))`."
                    if "array" in why
                    else "",
                    evidence=(("port", port),),
                )
            if start.launch.in_background:
                before.append(start)
    elif isinstance(file, Manifest):
        for job in file.workloads:
            yield from _judge_pods(job)


def _judge_pods(job: Workload) -> Iterator[Violation]:
    """Report pods that may compete for a port: with hostNetwork the pods of a host share its ports, and PyTorchJob
    uses 23456 for every job."""
    master = next((role for role in job.roles if role.name == "Master"), None)
    gpus = [box.gpus for box in master.containers if box.gpus] if master is not None else []
    if job.kind == "PyTorchJob" and master is not None and master.on_host_network and gpus and max(gpus) < SMALL:
        yield Violation(
            master.place,
            f"{master.name} listens on a fixed port of its host (hostNetwork), which another job may share",
            fix="Remove hostNetwork, or give each job its own containerPort named pytorchjob-port.",
            severity=Severity.INFO,
            evidence=(("gpus", max(gpus)),),
        )


def _fixed_port(start: ProcessLaunch) -> str | None:
    """The port of a launcher; the ranks of one job started by hand all have the same port."""
    return port_of(start.launch) if start.is_agent or start.outer is not None else None


def _is_local(start: ProcessLaunch) -> bool:
    """Whether it runs on this host; srun may start it on another."""
    return start.is_agent and start.outer is None


def _waits(file: ShellFile, after: int, before: int) -> bool:
    return any(after <= line <= before for line in file.waits)


def _in_array(file: ShellFile, start: ProcessLaunch) -> str:
    job = file.allocation
    if job is None or not job.runs_beside_itself or "exclusive" in job.options or (job.nodes or 2) > 1:
        return ""
    gpus = job.gpus_per_node
    return "jobs of the array may share a host" if gpus and gpus < SMALL else ""


def _in_loop(file: ShellFile, start: ProcessLaunch) -> str:
    launch = start.launch
    if not (_is_local(start) and launch.in_loop and launch.in_background) or any(
        line > launch.place.line for line in file.waits_in_loops
    ):
        return ""
    return "the loop starts the next run before this one ends"


def _beside(start: ProcessLaunch, before: list[ProcessLaunch]) -> str:
    port = _fixed_port(start)
    for one in before:
        if _fixed_port(one) == port and not (one.launch.in_branch or start.launch.in_branch):
            if _is_local(one) and _is_local(start):
                return f"the run in line {one.launch.place.line} uses it too"
    return ""
