"""ENV001 in launch files: variables of a rank are missing or not numeric."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import LaunchFile, Severity, Violation, rule
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.partial_text import shown
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    hosts_of,
    option_name,
    option_of,
    rank_of_host,
    starts_of,
    uses_node_rank,
)
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.rank_variables_incomplete import rank_variables_incomplete

_BATCH = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1")


@rule(
    check=rank_variables_incomplete,
    reads=LaunchFile,
    cases=lambda: (
        shell_fails(
            "srun starts torchrun on two hosts, and both are host 0",
            *_BATCH,
            "srun torchrun --nnodes=2 --nproc-per-node=8 --master-addr=$HEAD train.py  # !",
        ),
        shell_fails(
            "an endpoint without a backend",
            *_BATCH,
            "srun torchrun --nnodes=2 --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$HEAD:29500 x.py  # !",
        ),
        shell_fails(
            "the same command on each host",
            "torchrun --nnodes=4 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 train.py  # !",
        ),
        shell_fails(
            "LLaMA-Factory", "FORCE_TORCHRUN=1 NNODES=2 MASTER_ADDR=10.0.0.1 llamafactory-cli train sft.yaml  # !"
        ),
        shell_passes(
            "the rendezvous gives out the numbers",
            *_BATCH,
            "srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py",
        ),
        shell_passes(
            "each task says its number",
            *_BATCH,
            "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD train.py'",
        ),
        shell_passes("options that can't be told", "torchrun --nnodes=2 $DISTRIBUTED_ARGS train.py"),
        shell_passes("by variables", "export PET_NODE_RANK=$RANK", "torchrun --nnodes=2 --master_addr=$HEAD train.py"),
        shell_passes(
            "srun is missing, which is told alone",
            "#SBATCH --nodes=2",
            "torchrun --nnodes=2 --nproc_per_node=8 train.py",
        ),
        shell_passes(
            "an address to be filled in, in several words",
            "MASTER_ADDR='address of the first host'",
            'JOB="--nnodes 2 --master_addr $MASTER_ADDR --node_rank $RANK_OF_HOST"',
            "torchrun $JOB train.py",
        ),
        shell_fails(
            "an address to be filled in, and no number",
            "MASTER_ADDR='address of the first host'",
            "torchrun --nnodes 2 --nproc_per_node 8 --master_addr $MASTER_ADDR train.py  # !",
        ),
        shell_fails(
            "a comment after a backslash ends the command",
            *_BATCH,
            "srun torchrun --nnodes=2 \\  # of the job  # !",
            "--rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py",
        ),
        shell_passes("one host", "torchrun --nproc_per_node=8 train.py"),
    ),
)
def rank_variables_incomplete_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether each host of a job has a node rank, unless a rendezvous assigns it.

    Why it hurts: all hosts use the same ranks, and the other ranks never join.
    Fix: Pass a different node rank on each host, starting at 0.
    """
    for start in starts_of(file):
        launch, hosts = start.launch, hosts_of(start.launch)
        if not hosts or hosts < 2 or launch.is_open or rank_of_host(launch) is not None:
            continue
        # The batch script starts it on one host only, which is another fault (ENV014).
        job = file.allocation if isinstance(file, ShellFile) else None
        if job is not None and start.outer is None and job.nodes != 1:
            continue
        if launch.command.assumes_rank_0 and uses_node_rank(launch):
            yield _violation(start, hosts)


def _violation(start: ProcessLaunch, hosts: int) -> Violation:
    launch = start.launch
    command = launch.command
    number = option_name(launch, command.node_rank)
    return Violation(
        launch.place,
        f"{launch.program} on {hosts} hosts has a static --{command.rendezvous} and no {number}: each host uses node "
        "rank 0"
        if launch.option(command.host_port)
        else f"{launch.program} starts on {hosts} hosts without {number}, so each host uses node rank 0",
        fix=_cut_off(launch)
        if launch.script and not launch.script.strip()
        else _rendezvous(launch)
        if start.step is not None and command.rendezvous
        else f"Set {number} to a different number on each host, starting at 0.",
        severity=None if start.step is not None else Severity.WARNING,
        confidence=1.0 if start.step is not None else 0.7,
        evidence=(("hosts", hosts),),
    )


def _cut_off(launch: Launch) -> str:
    """For a command whose program is an escaped space: a backslash with a comment or a space after it does not
    continue the line."""
    return (
        f"Remove what follows the backslash of line {launch.place.end_line}: the command ends there, so the options in "
        "the lines below are not passed."
    )


def _rendezvous(launch: Launch) -> str:
    """The options of a rendezvous that assigns node ranks; an endpoint or a master address of the file is kept."""
    if launch.option(launch.command.host_port):
        return f"Add `--{launch.command.rendezvous}=c10d`, which assigns the node ranks."
    added = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint="
    given = option_of(launch, launch.command.master)
    if given:
        return f"Replace `--{launch.command.master}={shown(given)}` with `{added}{shown(given)}`."
    return f'Add `{added}"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"`.'
