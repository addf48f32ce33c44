"""ENV004 in launch files: two processes use the same rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Violation, rule
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.launch_file import LaunchFile
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import names_in as untold_in
from doctor.lint.launch.partial_text import shown
from doctor.lint.launch.process_launches import ProcessLaunch, option_name, rank_of_host, starts_of, uses_node_rank
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.rank_collision import rank_collision

_TWO = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1")
_EIGHT = ("#!/bin/bash", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=8")
_PER_TASK = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GLOBAL_RANK", "MACHINE_RANK", "GROUP_RANK", "PET_NODE_RANK")


@rule(
    check=rank_collision,
    reads=LaunchFile,
    impacts={
        r"expands LOCAL_RANK": "All tasks of a host use GPU 0.",
        r"expands \w+=": "All tasks use the same rank, and the other ranks never join.",
        r"node rank": "All hosts use the same ranks, and the other ranks never join.",
    },
    cases=lambda: (
        shell_fails(
            "the batch script fills in its own number",
            *_TWO,
            "srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD train.py  # !",
        ),
        shell_fails(
            "double quotes do not help",
            *_TWO,
            'srun bash -c "accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID x.py"  # !',
        ),
        shell_fails(
            "RANK is exported before srun",
            *_EIGHT,
            "export RANK=$SLURM_PROCID  # !",
            "export WORLD_SIZE=$SLURM_NTASKS",
            "srun python train.py",
        ),
        shell_fails(
            "LOCAL_RANK is exported before srun",
            *_EIGHT,
            "export LOCAL_RANK=$SLURM_LOCALID  # !",
            "srun python train.py",
        ),
        shell_fails(
            "a number for all hosts", *_TWO, "srun torchrun --nnodes=2 --node_rank=0 --master_addr=$HEAD train.py  # !"
        ),
        shell_fails(
            "pdsh tells all hosts one number",
            'pdsh -w node1,node2 "cd /a && torchrun --nnodes=2 --node_rank=0 --master_addr=node1 train.py"  # !',
        ),
        shell_fails(
            "a loop over hosts, which does not count",
            "for node in a b c; do",
            '  ssh $node "torchrun --nnodes 3 --node-rank 0 --master-addr a train.py" &  # !',
            "done",
        ),
        shell_passes(
            "a loop that counts",
            "rank=0",
            "for node in a b c; do",
            '  ssh $node "torchrun --nnodes 3 --node-rank $rank --master-addr a train.py" &',
            "  rank=$((rank + 1))",
            "done",
        ),
        shell_passes("one host by ssh", 'ssh node1 "torchrun --nnodes=2 --node_rank=0 --master_addr=node1 x.py"'),
        shell_passes(
            "a rendezvous by pdsh",
            'pdsh -w n[1-2] "torchrun --nnodes=2 --node_rank=0 --rdzv_backend=c10d --rdzv_endpoint=n1:29500 x.py"',
        ),
        shell_passes(
            "each task fills in its own",
            *_TWO,
            "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD train.py'",
        ),
        shell_passes(
            "escaped in double quotes",
            *_TWO,
            'srun bash -c "torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID --master_addr=$HEAD train.py"',
        ),
        shell_passes(
            "a rendezvous passes over the number",
            *_TWO,
            "srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --rdzv_backend=c10d train.py",
        ),
        shell_passes(
            "a script that srun runs",
            "export RANK=$SLURM_PROCID",
            "export LOCAL_RANK=$SLURM_LOCALID",
            "python train.py",
        ),
        shell_passes(
            "set again in the task",
            *_EIGHT,
            "export RANK=$SLURM_PROCID",
            "srun bash -c 'RANK=$SLURM_PROCID python train.py'",
        ),
        FileFails("an indexed job whose pods have one command", _INDEXED, name="job.yaml"),
        FilePasses(
            "each pod fills in its index", _INDEXED.replace("0  # !", "$(JOB_COMPLETION_INDEX)"), name="job.yaml"
        ),
        FilePasses(
            "one pod", _INDEXED.replace("parallelism: 4", "parallelism: 1").replace("  # !", ""), name="job.yaml"
        ),
        shell_passes("one host", "#SBATCH --nodes=1", "srun torchrun --node_rank=$SLURM_NODEID x.py"),
    ),
)
def rank_collision_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether each task of a step, and each pod, gets its own rank.

    Why it hurts: the batch script expands $SLURM_PROCID before srun starts the tasks, so all tasks get 0. They use the
    same rank, and the other ranks never join.
    Fix: Write the command in single quotes after `srun bash -c`, so that each task expands
    `--node-rank=$SLURM_NODEID` itself, or use `--rdzv-backend=c10d`, which needs no node rank.
    """
    if isinstance(file, Manifest):
        for workload in file.workloads:
            yield from _judge_pods(workload)
    elif isinstance(file, ShellFile):
        yield from _judge_remote(file)
        yield from _judge_steps(file) if file.allocation is not None else ()


_NUMBER = re.compile(r"--(?:node[-_]rank|machine[-_]rank)[= ](\d+)\b")
_HOSTS = re.compile(r"--(?:nnodes|num[-_]machines)[= ](\d+)\b")
_ELASTIC = re.compile(r"rdzv[-_]backend[= ](?!static)")


def _judge_remote(file: ShellFile) -> Iterator[Violation]:
    """Report a command with a fixed node rank that pdsh or an ssh loop runs on several hosts."""
    for launch in file.launches:
        name = launch.script.rpartition("/")[2] if launch.program == "other" else ""
        if not launch.arguments or not (name in ("pdsh", "clush") or (name == "ssh" and launch.in_loop)):
            continue
        command = launch.arguments[-1] if name == "ssh" else " ".join(launch.arguments)
        number, hosts = _NUMBER.search(command), _HOSTS.search(command)
        one_host = name != "ssh" and not re.search(r"-w\s*\S*[,\[^]", command) and "-w" in launch.arguments
        if number and hosts and int(hosts[1]) > 1 and not _ELASTIC.search(command) and not one_host:
            yield Violation(
                launch.place,
                f"{'The ssh loop' if name == 'ssh' else name} passes node rank {number[1]} to each of {hosts[1]} hosts",
                fix="Pass a different --node-rank to each host, or use `--rdzv-backend=c10d` instead.",
                evidence=(("value", number[1]), ("nodes", int(hosts[1]))),
            )


def _judge_pods(workload: Workload) -> Iterator[Violation]:
    """Pods with one command for all of them, which holds a fixed number of the host."""
    for role in workload.roles:
        starts = ((box, one) for box in role.containers for one in box.chain() if (role.replicas or 1) > 1)
        for box, launch in starts:
            number = rank_of_host(launch)
            if number is not None and number.isdigit() and uses_node_rank(launch):
                told = (place for word, place in box.places if re.match(r"--(?:node|machine)[-_]rank\b", word))
                yield Violation(
                    next(told, launch.place),
                    f"All {role.replicas} pods of the {workload.kind} use node rank {number}",
                    fix="Use `--node-rank=$(JOB_COMPLETION_INDEX)`, which an Indexed Job sets in each pod, or "
                    "`--rdzv-backend=c10d`, which needs no node rank.",
                    evidence=(("value", number), ("nodes", role.replicas)),
                )


def _judge_steps(file: ShellFile) -> Iterator[Violation]:
    for start in starts_of(file):
        yield from _judge_option(start)
    yield from _judge_settings(file)


def _judge_option(start: ProcessLaunch) -> Iterator[Violation]:
    counts = start.is_agent and not start.launch.command.reaches_hosts
    number = rank_of_host(start.launch) if counts else None
    if number is None or start.step is None or (start.step.nodes or 1) < 2 or not uses_node_rank(start.launch):
        return
    filled_in = set(untold_in(number)) & set(_PER_TASK)
    if filled_in or number.isdigit():
        command = start.launch.command
        elastic = f", or use `--{command.rendezvous}=c10d`, which needs no node rank" if command.rendezvous else ""
        yield Violation(
            start.launch.place,
            f"The batch script expands the node rank {shown(number)} to 0 for all hosts"
            if filled_in
            else f"All hosts use node rank {number}",
            fix="Write the command in single quotes after `srun bash -c`, so that each task expands "
            f"`{option_name(start.launch, command.node_rank)}=$SLURM_NODEID` itself{elastic}.",
            evidence=(("value", shown(number)), ("nodes", start.step.nodes)),
        )


def _judge_settings(file: ShellFile) -> Iterator[Violation]:
    own = {setting.name for setting in file.settings if setting.for_task}
    steps = [start for start in starts_of(file) if start.step is not None and not start.is_agent]
    if not any((start.step.tasks or 1) > 1 for start in steps if start.step is not None):
        return
    for setting in file.settings:
        if setting.name in _RANKS and setting.is_exported and setting.name not in own and not setting.for_task:
            if set(setting.reads) & set(_PER_TASK) and any(
                start.launch.program == "python"
                and setting.name in start.launch.settings
                and (start.step.tasks or 1) > 1
                for start in steps
                if start.step is not None
            ):
                yield Violation(
                    setting.place,
                    f"The batch script expands {setting.name}={shown(setting.value)} to 0 for all tasks",
                    fix=f"Set `{setting.name}={shown(setting.value)}` inside each task, in single quotes after `srun "
                    "bash -c`.",
                    evidence=((setting.name, shown(setting.value)),),
                )


_INDEXED = """\
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  completions: 4
  parallelism: 4
  completionMode: Indexed
  template:
    spec:
      containers:
        - name: main
          image: train
          args:
            - torchrun
            - --nnodes=4
            - --nproc-per-node=8
            - --node-rank=0  # !
            - --master-addr=train-0.train
            - train.py
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
"""
