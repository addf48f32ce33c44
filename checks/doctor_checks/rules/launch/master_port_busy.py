"""ENV008 in launch files: another process listens on MASTER_PORT."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, option_name, port_of, starts_of
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.master_port_busy import master_port_busy

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

    Why it hurts: the second run on a host fails with "address already in use", or its ranks join the store of the
    first.
    Fix: Give each run its own --master-port, or start runs on one host with `torchrun --standalone`, which picks a free
    port.
    """
    if isinstance(file, ShellFile):
        before: list[ProcessLaunch] = []
        starts = list(starts_of(file))
        for start in starts:
            port = _fixed_port(start)
            if port is None or not _may_be_bound(port) or (hosts_of(start.launch) or 1) > 1:
                continue
            line = start.launch.place.line
            before = [one for one in before if not _waits(file, one.launch.place.line, line)]
            first = _beside(start, before)
            beside = f"the run in line {first.launch.place.line} uses it too" if first is not None else ""
            alone = _in_array(file, start) or _in_loop(file, start)
            if why := alone or beside:
                may_have_ended = not alone and first is not None and _is_after_another(starts, first, start)
                yield Violation(
                    start.launch.place,
                    f"Port {port} is fixed, and {why}",
                    fix=_fix(start.launch, port, in_array="array" in why),
                    evidence=(("port", port),),
                    severity=Severity.INFO if may_have_ended else None,
                    preview=may_have_ended,
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
            f"The {master.name} pod listens on a fixed port of its host (hostNetwork), which other jobs may use",
            fix="Remove hostNetwork, or give each job its own containerPort named pytorchjob-port.",
            severity=Severity.INFO,
            evidence=(("gpus", max(gpus)),),
        )


def _fix(launch: Launch, port: str, *, in_array: bool) -> str:
    option = option_name(launch, launch.command.port) if launch.command.port else "MASTER_PORT"
    if in_array:
        return f"Give each task its own port: `{option}=$(({port} + SLURM_ARRAY_TASK_ID))`."
    standalone = launch.command.standalone
    local = f", or start runs on one host with `--{standalone}`, which picks a free port" if standalone else ""
    return f"Give each run its own {option}{local}."


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
    return "tasks of the array may share a host" if gpus and gpus < SMALL else ""


def _in_loop(file: ShellFile, start: ProcessLaunch) -> str:
    launch = start.launch
    if not (_is_local(start) and launch.in_loop and launch.in_background) or any(
        line > launch.place.line for line in file.waits_in_loops
    ):
        return ""
    return "the loop starts the next run before this one ends"


def _beside(start: ProcessLaunch, before: list[ProcessLaunch]) -> ProcessLaunch | None:
    """The run in the background that uses the port of another one on this host."""
    port = _fixed_port(start)
    for one in before:
        if _fixed_port(one) == port and not (one.launch.in_branch or start.launch.in_branch):
            if _is_local(one) and _is_local(start):
                return one
    return None


def _may_be_bound(port: str) -> bool:
    """Whether a run gets as far as its port: ENV007 reports one that torch rejects."""
    return not port.isdigit() or int(port) <= 65535


def _is_after_another(starts: list[ProcessLaunch], first: ProcessLaunch, start: ProcessLaunch) -> bool:
    """Whether a run in the foreground, which the shell waits for, is between two others: the first one has probably
    ended then."""
    lines = first.launch.place.line, start.launch.place.line
    between = (one.launch for one in starts if lines[0] < one.launch.place.line < lines[1])
    return any(one.is_agent and not one.in_background for one in between)
