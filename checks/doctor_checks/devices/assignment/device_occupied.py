"""GPU006: other processes use the job's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import (
    GpuSharers,
    is_foreign,
    mebibytes,
    process_ids,
    sees_host_processes,
    shares_by_machine,
)
from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Unknown, Verdict, check
from doctor.facts import Gpu, GpuFacts, GpuProcess, HostFacts, MigDevice, ProcessFacts
from doctor.testing import Fails, Passes, healthy

GIB = 1 << 30
MIB = 1 << 20

SERVICES = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm")
"""Name prefixes of NVIDIA's daemons, which hold a CUDA context but do not run work."""


@check(
    id="GPU006",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    needs=(GpuFacts, ProcessFacts),
    cases=lambda: (
        Passes("no process on the GPUs", healthy(hosts=2, per_host=2)),
        Passes(
            "the job's own ranks on their GPUs",
            healthy(per_host=2)
            .gpu(0, processes=(GpuProcess(10_000, 4 * GIB, "python"),))
            .gpu(1, processes=(GpuProcess(10_001, 4 * GIB, "python"),)),
        ),
        Passes(
            "a display server with little memory",
            healthy(per_host=1).gpu(0, processes=(GpuProcess(900, 300 * MIB, "Xorg", 0, "graphics"),)),
        ),
        Passes(
            "another job on a GPU that this one does not use",
            healthy(per_host=2, gpus=4).gpu(3, processes=(GpuProcess(4242, 70 * GIB, "python", 1001),)),
        ),
        Passes(
            "a container that can't see whose processes they are",
            healthy(per_host=1).alter(HostFacts, container="docker").gpu(0, processes=(GpuProcess(4242, 70 * GIB),)),
        ),
        Passes(
            "a process on a MIG slice, perhaps another one",
            healthy(per_host=1)
            .gpu(0, mig=True, mig_devices=(MigDevice("MIG-a", 0), MigDevice("MIG-b", 1)))
            .gpu(0, processes=(GpuProcess(4242, 9 * GIB, "python", 1001),)),
        ),
        Fails(
            "another user's training on the second GPU",
            healthy(per_host=2).gpu(
                1, processes=(GpuProcess(4242, 70 * GIB, "python", 1001),), memory_used=70 * GIB, utilization=97
            ),
            ranks=(1,),
        ),
        Fails(
            "a zombie of the last run, whose memory MIG hides",
            healthy(hosts=2, per_host=2).gpu(
                0, hosts=("node1",), processes=(GpuProcess(777, None, "python", 1000),), memory_used=20 * GIB
            ),
            ranks=(2,),
        ),
        Fails(
            "a desktop program that fills the card",
            healthy(per_host=1).gpu(
                0, processes=(GpuProcess(4000, 40 * GIB, "blender", 1000, "graphics"),), memory_used=40 * GIB
            ),
            ranks=(0,),
        ),
    ),
)
def device_occupied(
    job: Job, *, compute_share: float = 0.005, graphics_share: float = 0.25, unseen_share: float = 0.05
) -> Iterator[Verdict]:
    """Ask whether other processes use the GPUs of this job.

    Why it hurts: a rank on this GPU has less memory and computes more slowly, and all ranks wait for it in every step.
    Fix: End the other processes (`nvidia-smi` lists them), or select other GPUs with CUDA_VISIBLE_DEVICES.
    """
    for machine, found in shares_by_machine(job):
        occupied = [share for share in found if share.ranks and share.gpu.processes != ()]
        if not occupied:
            continue
        own, host_ids = process_ids(machine), sees_host_processes(machine)
        for share in occupied:
            if share.gpu.processes is None:
                yield from _hidden(machine, share, unseen_share)
                continue
            held = [one for one in share.gpu.processes if _holds(share.gpu, one, compute_share, graphics_share)]
            others = [process for process in held if is_foreign(process, own, host_ids)]
            if others and share.gpu.mig:
                reason = f"other processes use GPU {share.gpu.index}, but their MIG slice is not visible"
                yield Unknown(reason, share.ranks, "nvidia-smi lists processes by slice (columns GI ID and CI ID)")
            elif others:
                yield _finding(machine, share, others, alone=job.world_size == 1)
            elif any(is_foreign(process, own, host_ids) is None for process in held):
                reason = f"the owners of the processes on GPU {share.gpu.index} are not visible in this container"
                yield Unknown(reason, share.ranks, "start the container with --pid=host, or run nvidia-smi on the host")


def _holds(gpu: Gpu, process: GpuProcess, compute_share: float, graphics_share: float) -> bool:
    if (process.name or "").startswith(SERVICES):
        return False
    share = graphics_share if process.kind == "graphics" else compute_share
    if process.memory is None:
        return process.kind != "graphics"
    return process.memory >= share * (gpu.memory_total or process.memory)


def _hidden(machine: LocalRanks, share: GpuSharers, unseen_share: float) -> Iterator[Verdict]:
    gpu = share.gpu
    if gpu.lost or (gpu.memory_used or 0) <= unseen_share * (gpu.memory_total or 0):
        return
    facts = machine.find(GpuFacts)
    note = facts.why_hidden("gpus.processes") if facts else None
    reason = f"the processes on GPU {gpu.index} are hidden, and {mebibytes(gpu.memory_used)} are in use"
    yield Unknown(f"{reason}: {note.reason}" if note else reason, share.ranks, note.unhide if note else "")


def _effect(gpu: Gpu, others: list[GpuProcess], alone: bool) -> str:
    """Less memory alone if nothing computes there now; empty for the check's own."""
    if gpu.utilization == 0:
        held = sum(process.memory or 0 for process in others)
        less = f"{mebibytes(held)} less GPU memory" if held else "less GPU memory"
        return f"{'The job' if alone else 'A rank on this GPU'} has {less}, and may run out of it."
    return "The job has less GPU memory and computes more slowly." if alone else ""


def _finding(machine: LocalRanks, share: GpuSharers, others: list[GpuProcess], *, alone: bool) -> Finding:
    first = max(others, key=lambda process: process.memory or 0)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return Finding(
        f"GPU {share.gpu.index} of {machine.name} is used by {first.name or 'a process'} (PID {first.pid}"
        f"{f', {mebibytes(first.memory)}' if first.memory is not None else ''}){more}",
        ranks=share.ranks,
        evidence={
            "gpu": share.gpu.uuid,
            "memory_used_bytes": share.gpu.memory_used,
            "utilization_percent": share.gpu.utilization,
            "processes": [
                {"pid": one.pid, "name": one.name, "user_id": one.user_id, "memory_bytes": one.memory, "kind": one.kind}
                for one in others
            ],
        },
        effect=_effect(share.gpu, others, alone),
        fix=f"End process {first.pid} on {machine.name} if no job needs it (`ps -o user,lstart,cmd -p {first.pid}` "
        "shows its owner), or select other GPUs with CUDA_VISIBLE_DEVICES.",
        explains=("MEM003", "GPU016"),
    )
