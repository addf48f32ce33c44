"""ENV001: hosts of a job are not told which of them they are."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, is_static, rank_of_host, starts_of
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing import lines

_BATCH = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1")


@rule(
    id="ENV001",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "srun starts torchrun on two hosts, and both are host 0",
            lines(*_BATCH, "srun torchrun --nnodes=2 --nproc-per-node=8 --master-addr=$HEAD train.py  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "an endpoint without a backend",
            lines(
                *_BATCH,
                "srun torchrun --nnodes=2 --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$HEAD:29500 x.py  # !",
            ),
            name="job.sbatch",
        ),
        FileFails(
            "the same command on each host",
            lines("torchrun --nnodes=4 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "LLaMA-Factory",
            lines("FORCE_TORCHRUN=1 NNODES=2 MASTER_ADDR=10.0.0.1 llamafactory-cli train sft.yaml  # !"),
            name="train.sh",
        ),
        FilePasses(
            "the rendezvous gives out the numbers",
            lines(*_BATCH, "srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "each task says its number",
            lines(*_BATCH, "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD train.py'"),
            name="job.sbatch",
        ),
        FilePasses(
            "options that can't be told",
            lines("torchrun --nnodes=2 $DISTRIBUTED_ARGS train.py"),
            name="train.sh",
        ),
        FilePasses(
            "by variables",
            lines("export PET_NODE_RANK=$RANK", "torchrun --nnodes=2 --master_addr=$HEAD train.py"),
            name="train.sh",
        ),
        FilePasses(
            "srun is missing, which is told alone",
            lines("#SBATCH --nodes=2", "torchrun --nnodes=2 --nproc_per_node=8 train.py"),
            name="job.sbatch",
        ),
        FilePasses("one host", lines("torchrun --nproc_per_node=8 train.py"), name="train.sh"),
    ),
)
def rank_variables_incomplete(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether each host of a job is told its number, where nothing else gives it out.

    Why it hurts: without --node-rank every host takes itself for host 0: ranks are claimed twice, and the others are
    waited for.
    Fix: `--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=<host 0>:29500`, which needs no number; or
    `--node-rank` from 0 on, another on each host.
    """
    for start in starts_of(file):
        launch, hosts = start.launch, hosts_of(start.launch)
        if not hosts or hosts < 2 or launch.is_open or rank_of_host(launch) is not None:
            continue
        if _lacks_srun(file, start):
            continue
        if is_static(launch) or launch.program == "llamafactory":
            yield _hit(start, hosts)


def _lacks_srun(file: LaunchFile, start: ProcessLaunch) -> bool:
    """Whether the batch script starts it on one host alone, which is another fault (ENV014)."""
    job = file.allocation if isinstance(file, ShellFile) else None
    return job is not None and start.outer is None and job.nodes != 1


def _hit(start: ProcessLaunch, hosts: int) -> Violation:
    launch = start.launch
    name = "NODE_RANK" if launch.program == "llamafactory" else "--node-rank"
    backend = ", and --rdzv-backend is static" if launch.option("rdzv-endpoint") else ""
    return Violation(
        launch.place,
        f"{launch.program} for {hosts} hosts without {name}{backend}: each takes itself for host 0",
        severity=None if start.step is not None else Severity.WARNING,
        confidence=1.0 if start.step is not None else 0.7,
        evidence=(("hosts", hosts),),
    )
