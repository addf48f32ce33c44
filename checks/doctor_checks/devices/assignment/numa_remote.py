"""GPU017: a rank's CPUs are on another NUMA node than its devices."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import devices_of
from doctor.api import Finding, Job, Rank, Scope, Severity, Verdict, check
from doctor.facts import Gpu, GpuFacts, ProcessFacts, RdmaFacts, SlurmFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy

LOW = tuple(range(48))
HIGH = tuple(range(48, 96))


def _two_sockets(rdma: int = 0) -> JobBuilder:
    return (
        healthy(hosts=2, per_host=2, rdma=rdma)
        .gpu(0, cpus=LOW, numa_node=0)
        .gpu(1, cpus=HIGH, numa_node=1)
        .alter(ProcessFacts, ranks=(0, 2), cpus_allowed=LOW)
        .alter(ProcessFacts, ranks=(1, 3), cpus_allowed=HIGH)
    )


@check(
    id="GPU017",
    severity=Severity.INFO,
    scope=Scope.HOST,
    needs=(GpuFacts, ProcessFacts),
    cases=lambda: (
        Passes("not pinned", healthy(per_host=2).gpu(0, cpus=LOW).gpu(1, cpus=HIGH)),
        Passes("pinned beside the GPU", _two_sockets()),
        Passes("the kernel does not report it", healthy(per_host=2)),
        Fails(
            "pinned to the other socket",
            _two_sockets().alter(ProcessFacts, ranks=(3,), cpus_allowed=tuple(range(8))),
            ranks=(3,),
        ),
        Fails("pinned away from the only network device", _two_sockets(rdma=1), ranks=(1, 3)),
    ),
)
def numa_remote(job: Job) -> Iterator[Verdict]:
    """Ask whether each rank may run on CPUs that are local to its GPU and to a network device.

    Why it hurts: traffic of the rank to the device crosses the link between the CPU sockets and is slower, so all ranks
    wait for this one in the next collective.
    Fix: Bind ranks near their GPUs with `srun --gpu-bind=closest`, or remove the CPU binding.
    """
    devices = devices_of(job)
    for local in job.by_host():
        gpus = local.find(GpuFacts)
        if gpus is None or not any(gpu.cpus for gpu in gpus.gpus):
            continue
        nodes = {gpu.numa_node: frozenset(gpu.cpus) for gpu in gpus.gpus if gpu.numa_node is not None and gpu.cpus}
        used = ((rank, device.gpu) for rank in local.members if (device := devices[rank]))
        remote = [(rank, far) for rank, gpu in used if (far := _far(gpu, rank, nodes))]
        if remote:
            first, far = remote[0]
            more = f" (and {len(remote) - 1} more)" if len(remote) > 1 else ""
            yield Finding(
                f"Rank {first.number}{more} on {local.name} is bound to CPUs that are remote from {' and '.join(far)}",
                ranks=tuple(rank.number for rank, _ in remote),
                fix=_fix(first, far, {gpu.index: gpu.numa_node for gpu in gpus.gpus}),
                evidence={
                    "remote_devices_by_rank": {str(rank.number): far for rank, far in remote},
                    "processors_allowed_by_rank": {str(rank.number): _allowed(rank) for rank, _ in remote},
                    "numa_node_by_gpu": {str(gpu.index): gpu.numa_node for gpu in gpus.gpus},
                    "numa_nodes_of_rdma_devices": _rdma_nodes(first),
                },
            )


def _fix(rank: Rank, far: list[str], nodes: dict[int, int | None]) -> str:
    """SLURM binds ranks by itself; elsewhere, the program that starts the rank does."""
    if rank.find(SlurmFacts) is not None:
        return ""
    node = next((place for index, place in nodes.items() if far[0] == f"GPU {index}"), None)
    other = f", or bind it to NUMA node {node} with `numactl --cpunodebind={node}`" if node is not None else ""
    return f"Remove the CPU binding of rank {rank.number}{other}."


def _allowed(rank: Rank) -> tuple[int, ...]:
    process = rank.find(ProcessFacts)
    return process.cpus_allowed if process else ()


def _rdma_nodes(rank: Rank) -> list[str]:
    rdma = rank.find(RdmaFacts)
    return [f"{device.name}: {device.numa_node}" for device in rdma.devices] if rdma else []


def _far(gpu: Gpu, rank: Rank, nodes: dict[int, frozenset[int]]) -> list[str]:
    allowed = set(_allowed(rank))
    far = []
    if allowed and gpu.cpus and allowed.isdisjoint(gpu.cpus):
        far.append(f"GPU {gpu.index}")
    if allowed and _is_far_from_network(rank, allowed, nodes):
        far.append("every RDMA device")
    return far


def _is_far_from_network(rank: Rank, allowed: set[int], nodes: dict[int, frozenset[int]]) -> bool:
    rdma = rank.find(RdmaFacts)
    places = (
        [nodes.get(device.numa_node) if device.numa_node is not None else None for device in rdma.devices]
        if rdma
        else []
    )
    return bool(places) and all(place is not None and allowed.isdisjoint(place) for place in places)
