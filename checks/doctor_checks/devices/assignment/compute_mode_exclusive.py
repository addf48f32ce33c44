"""GPU016: the compute mode of a GPU blocks a CUDA context that the job needs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from doctor.analysis.visible_devices import (
    devices_of,
    hidden_of_gpus,
    is_foreign,
    process_ids,
    sees_host_processes,
    shares_by_machine,
    visible_to,
)
from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Unknown, Verdict, check
from doctor.facts import EnvironmentFacts, Gpu, GpuFacts, GpuProcess, HostFacts, LaunchFacts
from doctor.testing import Fails, Passes, healthy, logged

LIMITED = ("exclusive-process", "exclusive-thread", "prohibited")


@check(
    id="GPU016",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    impacts={
        r"prohibited, which": (
            'Every process that uses this GPU fails with "CUDA-capable device(s) is/are busy or unavailable".'
        ),
        r"could not be created|already uses it": (
            'The rank fails at its first CUDA call ("CUDA-capable device(s) is/are busy or unavailable"), and the '
            "other ranks wait for it until their timeout."
        ),
        r"ranks share it": (
            'Only one of these ranks can use the GPU. Each other rank fails at its first CUDA call ("CUDA-capable '
            'device(s) is/are busy or unavailable").'
        ),
    },
    cases=lambda: (
        Passes("default mode", healthy(hosts=2, per_host=2)),
        Passes(
            "exclusive, and each rank sees its own GPU alone",
            healthy(per_host=2)
            .gpu(0, compute_mode="exclusive-process")
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="0")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
        ),
        Fails(
            "exclusive, one rank a GPU, and the ranks see the GPUs of the others",
            healthy(per_host=2).gpu(0, compute_mode="exclusive-process").gpu(1, compute_mode="exclusive-process"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes("default mode, shared", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="0")),
        Passes(
            "exclusive and shared through MPS",
            healthy(per_host=2, gpus=1)
            .gpu(0, compute_mode="exclusive-process")
            .environ(CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps"),  # noqa: S108 - the default of MPS
        ),
        Passes(
            "exclusive, and a container hides the processes",
            healthy(per_host=1)
            .alter(HostFacts, container="docker")
            .gpu(0, compute_mode="exclusive-process", processes=(GpuProcess(4242, 9 << 30),)),
        ),
        Fails(
            "exclusive and shared by two ranks",
            healthy(hosts=2, per_host=2)
            .gpu(0, hosts=("node1",), compute_mode="exclusive-process")
            .environ(ranks=(2, 3), CUDA_VISIBLE_DEVICES="0"),
            ranks=(2, 3),
        ),
        Fails(
            "log of a GPU that refuses a context",
            logged("[rank1]: RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
            ranks=(1,),
        ),
        Fails("prohibited", healthy(per_host=2).gpu(1, compute_mode="prohibited"), ranks=(1,)),
        Fails(
            "exclusive and in use by another process",
            healthy(per_host=2).gpu(
                1, compute_mode="exclusive-process", processes=(GpuProcess(4242, 9 << 30, "python"),)
            ),
            ranks=(1,),
        ),
    ),
)
def compute_mode_exclusive(job: Job) -> Iterator[Verdict]:
    """Ask whether the compute mode of each GPU allows the job's processes to use it.

    Why it hurts: only one process can use the GPU. Each other process fails at its first CUDA call ("CUDA-capable
    device(s) is/are busy or unavailable"), and the remaining ranks wait for it until their timeout.
    Fix: Set the compute mode with `sudo nvidia-smi --compute-mode=DEFAULT`, or start one process per GPU.
    """
    devices = devices_of(job)
    for machine, found in shares_by_machine(job):
        if note := hidden_of_gpus(machine, "compute_mode"):
            yield Unknown(note.reason, machine.ranks, note.unhide)
        limited = [share for share in found if share.ranks and share.gpu.compute_mode in LIMITED]
        # With MPS, the driver sees one client for all ranks.
        used = (devices[rank] for rank in machine.members if limited and not _by_mps(rank))
        clients = Counter(device.gpu.uuid for device in used if device)
        for share in limited:
            reason = _forbidden(machine, share.gpu, clients[share.gpu.uuid])
            if reason:
                yield Finding(
                    f"GPU {share.gpu.index} of {machine.name} is in compute mode {share.gpu.compute_mode}, {reason}",
                    ranks=share.ranks,
                    evidence={
                        "gpu": share.gpu.uuid,
                        "compute_mode": share.gpu.compute_mode,
                        "ranks_on_it": len(share.ranks),
                        "processes_on_it": [process.pid for process in share.gpu.processes or ()],
                    },
                    fix=_fix(reason, share.gpu, machine.name),
                )
            elif _may_be_taken(machine, share.gpu):
                reason = f"GPU {share.gpu.index} allows one process, and its processes are not visible from here"
                yield Unknown(reason, share.ranks, "run nvidia-smi on the host, or start the container with --pid=host")
        yield from _exposed(machine, [share.gpu for share in limited if not _forbidden(machine, share.gpu, 1)])


def _fix(reason: str, gpu: Gpu, host: str) -> str:
    if "ranks share" in reason:
        # In the default mode, NCCL rejects two ranks on one GPU (GPU001).
        return (
            "Start one process per GPU (`torchrun --nproc-per-node=gpu`), and call "
            '`torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before any other CUDA call.'
        )
    if process := re.search(r"process (\d+)", reason):
        owner = f"`ps -o user,lstart,cmd -p {process[1]}` shows its owner"
        return (
            f"End process {process[1]} on {host} if no job needs it ({owner}), or select another GPU with "
            "CUDA_VISIBLE_DEVICES."
        )
    return f"Allow processes on GPU {gpu.index} of {host}:\nsudo nvidia-smi -i {gpu.index} --compute-mode=DEFAULT"


def _exposed(machine: LocalRanks, gpus: list[Gpu]) -> Iterator[Finding]:
    """Ranks that can open a GPU of another one by mistake, which costs memory in the default mode and fails here."""
    ranks = [rank for rank in machine.members if not _by_mps(rank) and _is_one_of_several(rank)]
    seen = {rank.number: visible_to(rank) for rank in ranks}
    wide = tuple(number for number, one in seen.items() if one and (one.devices is None or len(one.devices) > 1))
    if gpus and wide:
        yield Finding(
            f"GPUs of {machine.name} are in compute mode {gpus[0].compute_mode}, and its ranks see each other's GPUs",
            ranks=wide,
            evidence={"compute_mode": gpus[0].compute_mode, "gpus": [gpu.index for gpu in gpus]},
            effect="A rank that uses the GPU of another rank, for example by cuda() before set_device() or a barrier "
            "without device_ids, fails with `CUDA-capable device(s) is/are busy or unavailable`.",
            fix="Set CUDA_VISIBLE_DEVICES to one GPU for each rank, or call `torch.cuda.set_device(int(os.environ["
            '"LOCAL_RANK"]))` before any other CUDA call.',
            severity=Severity.INFO,
        )


def _is_one_of_several(rank: Rank) -> bool:
    launch = rank.find(LaunchFacts)
    return launch is not None and (launch.local_world_size or 1) > 1


def _by_mps(rank: Rank) -> bool:
    environment = rank.find(EnvironmentFacts)
    return environment is not None and bool(environment.get("CUDA_MPS_PIPE_DIRECTORY"))


def _may_be_taken(machine: LocalRanks, gpu: Gpu) -> bool:
    if gpu.processes is None:
        return True
    own, host_ids = process_ids(machine), sees_host_processes(machine)
    return any(one.kind == "compute" and is_foreign(one, own, host_ids) is None for one in gpu.processes)


def _forbidden(machine: LocalRanks, gpu: Gpu, clients: int) -> str | None:
    if gpu.compute_mode == "prohibited":
        return "which allows no process"
    if clients > 1:
        return f"but {clients} ranks share it"
    own, host_ids = process_ids(machine), sees_host_processes(machine)
    taken = [one for one in gpu.processes or () if one.kind == "compute" and is_foreign(one, own, host_ids)]
    served = any(one.kind == "mps" or (one.name or "").startswith("nvidia-cuda-mps") for one in gpu.processes or ())
    return f"and process {taken[0].pid} already uses it" if taken and not served else None
