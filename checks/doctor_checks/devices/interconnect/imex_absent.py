"""GPU023: multi-node NVLink without IMEX."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Skip, Unknown, Verdict, check, hosts_text
from doctor.facts import DriverFacts, Fabric, GpuFacts, NcclFacts, Service
from doctor.testing import Fails, JobBuilder, Passes, healthy

Domain = tuple[str, int | None]


def _rack(
    cluster: str = "ab12", clique: int = 7, hosts: tuple[str, ...] | None = None, on: JobBuilder | None = None
) -> JobBuilder:
    sketch = on or healthy(hosts=4, per_host=2).alter(
        DriverFacts, services=(Service("imex", True, "570.124.06"),), imex_channels=1
    )
    for index in range(2):
        sketch = sketch.gpu(index, hosts=hosts, name="NVIDIA GB200", fabric=Fabric("completed", 0, clique, cluster))
    return sketch


@check(
    id="GPU023",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts, DriverFacts),
    impacts={
        r"clique": (
            "Hosts of different cliques communicate over the network instead of NVLink, which is many times slower."
        ),
        r"IMEX": (
            'NCCL reports "MNNVL is available but not working" and fails, or uses the network instead of NVLink.'
        ),
    },
    cases=lambda: (
        Passes("one rack with IMEX on every host", _rack()),
        Passes("NVSwitch inside each host alone", healthy(hosts=2, per_host=8)),
        Passes("two racks", _rack("cd34", hosts=("node2", "node3"), on=_rack())),
        Passes("switched off for NCCL", _rack().alter(DriverFacts, imex_channels=0).environ(NCCL_MNNVL_ENABLE="0")),
        Fails(
            "the daemon is stopped on one host",
            _rack().alter(DriverFacts, hosts=("node2",), services=(Service("imex", False),)),
            ranks=(4, 5),
        ),
        Fails(
            "no channel in one container", _rack().alter(DriverFacts, hosts=("node1",), imex_channels=0), ranks=(2, 3)
        ),
        Fails("one host in another clique", _rack(clique=8, hosts=("node3",), on=_rack()), ranks=(6, 7)),
    ),
)
def imex_absent(job: Job) -> Iterator[Verdict]:
    """Ask whether hosts that share an NVLink domain have the IMEX daemon, a channel and the same clique.

    Why it hurts: NCCL reports "MNNVL is available but not working", or hosts of one rack communicate over the network
    instead of NVLink.
    Fix: List all hosts of the domain in /etc/nvidia-imex/nodes_config.cfg and start the daemon with `sudo systemctl
    enable --now nvidia-imex`, or set NCCL_MNNVL_ENABLE=0.
    """
    domains: dict[str, list[LocalRanks]] = {}
    for local in job.by_host():
        for cluster in {cluster for cluster, _ in _domains(local)}:
            domains.setdefault(cluster, []).append(local)
    spanning = {cluster: members for cluster, members in domains.items() if len(members) > 1}
    if not spanning:
        may_span = job.ungathered and any(map(_domains, job.by_host()))
        yield Unknown("other ranks not gathered") if may_span else Skip("no two hosts share an NVLink domain")
    for members in spanning.values():
        for local in members:
            yield from _judge(local)
        yield from _judge_cliques(members)


def _domains(local: LocalRanks) -> set[Domain]:
    """The multi-node NVLink domains of a host. A cluster id of zeros is an NVSwitch inside the host."""
    gpus = local.find(GpuFacts)
    settings = [nccl.get("NCCL_MNNVL_ENABLE") for rank in local.members[:1] if (nccl := rank.find(NcclFacts))]
    fabrics = [gpu.fabric for gpu in gpus.gpus if gpu.fabric] if gpus and settings != ["0"] else []
    return {
        (fabric.cluster, fabric.clique)
        for fabric in fabrics
        if fabric.state == "completed" and fabric.cluster and fabric.cluster.strip("0-")
    }


def _judge(local: LocalRanks) -> Iterator[Verdict]:
    drivers = local.find(DriverFacts)
    if drivers is None:
        return
    imex = drivers.service("imex")
    faults = []
    if imex and imex.running is False:
        faults.append("The IMEX daemon is not running")
    if not drivers.imex_channels:
        faults.append(f"{'no' if faults else 'No'} IMEX channel is accessible")
    if faults:
        yield Finding(
            f"{' and '.join(faults)} on {local.name}",
            ranks=local.ranks,
            evidence={
                "imex_running": imex.running if imex else None,
                "imex_channels": drivers.imex_channels,
                "domains": sorted(f"{cluster}.{clique}" for cluster, clique in _domains(local)),
            },
            fix=f"Start the daemon on {local.name}:\nsudo systemctl enable --now nvidia-imex"
            if "daemon" in faults[0]
            else f"Pass /dev/nvidia-caps-imex-channels/channel0 to the container on {local.name}.",
        )
    elif imex is None or imex.running is None:
        reason = "the state of the IMEX daemon is not visible from here"
        yield Unknown(reason, local.ranks, "nvidia-imex-ctl -N on the host")


def _judge_cliques(members: list[LocalRanks]) -> Iterator[Verdict]:
    groups: dict[frozenset[Domain], list[LocalRanks]] = {}
    for local in members:
        groups.setdefault(frozenset(_domains(local)), []).append(local)
    # No baseline: a clique belongs to a rack, and another job may have run in another rack.
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    if len({domain for domains in groups for domain in domains}) < 2:
        return
    even = len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1])
    odd = ordered if even or len(ordered) == 1 else ordered[1:]
    hosts = [local for _, locals_ in odd for local in locals_]
    cliques = "different cliques" if even and len(hosts) > 1 else "another clique"
    yield Finding(
        f"{hosts_text(local.name for local in hosts)} {'is' if len(hosts) == 1 else 'are'} in {cliques} of the same "
        "NVLink domain",
        ranks=tuple(rank for local in hosts for rank in local.ranks),
        fix="Request hosts of one clique from the scheduler, or set NCCL_MNNVL_ENABLE=0.",
        evidence={
            "hosts_by_clique": {
                " ".join(sorted(f"{cluster}.{clique}" for cluster, clique in domains)): [one.name for one in locals_]
                for domains, locals_ in ordered
            }
        },
    )
