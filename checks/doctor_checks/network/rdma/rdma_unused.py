"""NET019: RDMA is available, but NCCL would use sockets."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import (
    loaded_net_plugin,
    nccl_matters,
    nccl_rdma_ports,
    setting_text,
    what_forces_sockets,
)
from doctor.analysis.logs.event_timeline import spans_hosts
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Skip,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    merge,
    source_of,
)
from doctor.core.text import HERE
from doctor.facts import GpuFacts, NcclFacts, NcclPlugin, RdmaDevice, RdmaFacts, Setting, SoftwareFacts, TrainerFacts
from doctor.knowledge.interface_syntax import nccl_device_list, parse_nccl_integer
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

_OFI = (
    NcclPlugin("net", "libnccl-net.so", path="/opt/amazon/ofi-nccl/lib/libnccl-net.so", symbols=("ncclNetPlugin_v10",)),
)
_FILE = (Setting("NCCL_IB_DISABLE", "1", "system file", "/etc/nccl.conf", 3),)


def _shut_second(gpus: int = 2) -> JobBuilder:
    """Hosts of two RDMA devices, of which mlx5_1 has no device file."""

    def shut(old: tuple[RdmaDevice, ...]) -> tuple[RdmaDevice, ...]:
        return (old[0], *(RdmaDevice(one.name, one.ports, has_uverbs=False) for one in old[1:]))

    return healthy(2, 1, gpus=gpus, rdma=2).alter(RdmaFacts, devices=shut)


def _from_logs(job: Job) -> Iterator[Finding]:
    networks = {group.value("net"): group for group in event_groups(job, "nccl.net.using", by=("net",))}
    if not spans_hosts(job) or "Socket" not in networks:
        return
    sockets = networks["Socket"].events[:1]
    switched = [group for group in event_groups(job, "nccl.env.set", by=("env", "value")) if _switches_off(group)]
    if switched:
        where = switched[0].on_hosts
        summary = f"NCCL_IB_DISABLE={switched[0].value('value')} disables RDMA{where}: NCCL uses sockets between hosts"
        group = EventGroup(switched[0].kind, (*switched[0].events[:3], *sockets))
        fix = f"Run `unset NCCL_IB_DISABLE`{where}, or remove it from nccl.conf{' there' if where else ''}."
        yield _logged_finding(group, summary, 0.7, fix)
        return
    for group in event_groups(job, "nccl.net.ib_none"):
        hints = (
            *(one for one in event_groups(job, "nccl.bootstrap.using", by=("if",)) if _is_of_infiniband(one)),
            *(one for one in event_groups(job, "nccl.env.set", by=("env",)) if one.value("env") == "NCCL_IB_HCA"),
        )
        if hints:
            summary = "NCCL finds no RDMA device on hosts with InfiniBand, and uses sockets"
            shown = EventGroup(group.kind, (*group.events[:2], hints[0].first, *sockets))
            yield _logged_finding(shown, summary, 0.8, _FIX)
            return


def _is_of_infiniband(group: EventGroup) -> bool:
    return (group.value("if") or "").startswith("ib")


_FIX = "Pass `--device=/dev/infiniband` to the container, and install libibverbs (rdma-core) in its image."


def _logged_finding(group: EventGroup, summary: str, confidence: float, fix: str) -> Finding:
    return finding_from_logs(group, summary, confidence=confidence, fix=fix, symptoms=False)


def _switches_off(group: EventGroup) -> bool:
    """Whether the setting disables RDMA; NCCL parses a number, so `true` has no effect."""
    value = group.value("value") or ""
    return group.value("env") == "NCCL_IB_DISABLE" and (parse_nccl_integer(value, 0) or 0) != 0


@check(
    id="NET019",
    severity=Severity.WARNING,
    when="PM",
    needs=(NcclFacts, RdmaFacts),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("RDMA is used", healthy(hosts=2, per_host=2, rdma=2)),
        Passes("no RDMA", healthy(2, 2).environ(NCCL_IB_DISABLE="1")),
        Passes("one host needs no network", healthy(1, 2, rdma=2).environ(NCCL_IB_DISABLE="1")),
        Passes("the text true disables nothing", healthy(2, 2, rdma=2).environ(NCCL_IB_DISABLE="true")),
        Passes(
            "another plug-in takes its place",
            healthy(2, 2, rdma=2).environ(NCCL_IB_DISABLE="1").alter(NcclFacts, plugins=_OFI),
        ),
        Passes("CPU training", healthy(2, 2, gpus=0, rdma=2).environ(NCCL_IB_DISABLE="1")),
        Passes(
            "one host has no RDMA, so sockets are right",
            healthy(2, 2, rdma=2).drop(RdmaFacts, hosts=("node1",)).environ(NCCL_IB_DISABLE="1"),
        ),
        Fails(
            "NCCL_IB_DISABLE=1 was left behind", healthy(2, 2, rdma=2).environ(NCCL_IB_DISABLE="1"), ranks=(0, 1, 2, 3)
        ),
        Fails("sockets are asked for", healthy(2, 1, rdma=2).environ(NCCL_NET="Socket"), ranks=(0, 1)),
        Fails(
            "a line in /etc/nccl.conf", healthy(2, 1, rdma=2).alter(NcclFacts, ranks=(1,), settings=_FILE), ranks=(1,)
        ),
        Fails("the image has no libibverbs", healthy(2, 1, rdma=2).alter(RdmaFacts, verbs_library=False), ranks=(0, 1)),
        Fails("one of two devices has no device file", _shut_second(), ranks=(0, 1), severity=Severity.INFO),
        Passes("one GPU and one device of two, as a device plugin assigns them", _shut_second(gpus=1)),
        Passes("NCCL_IB_HCA selects the one that can be opened", _shut_second().environ(NCCL_IB_HCA="=mlx5_0")),
        Passes(
            "one host, no RDMA",
            logged(
                "node1:41:77 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
                "node1:41:77 [0] NCCL INFO NET/IB : No device found.",
                "node1:41:77 [0] NCCL INFO Using network Socket",
            ),
        ),
        Passes(
            "two hosts with nothing but Ethernet",
            logged(
                *(f"node{host}:41:77 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.{host}<0>" for host in (1, 2)),
                "node1:41:77 [0] NCCL INFO NET/IB : No device found.",
                "node1:41:77 [0] NCCL INFO Using network Socket",
            ),
        ),
        Fails(
            "two hosts with InfiniBand, in containers without its devices",
            logged(
                *(f"node{host}:41:77 [0] NCCL INFO Bootstrap : Using ib0:10.8.0.{host}<0>" for host in (1, 2)),
                "node1:41:77 [0] NCCL INFO NET/IB : No device found.",
                "node1:41:77 [0] NCCL INFO Using network Socket",
            ),
        ),
        Fails(
            "a switch that was left on",
            logged(
                *(f"node{host}:41:77 [0] NCCL INFO Bootstrap : Using eth0:10.8.0.{host}<0>" for host in (1, 2)),
                "node1:41:77 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.",
                "node1:41:77 [0] NCCL INFO Using network Socket",
            ),
        ),
    ),
)
def rdma_unused(job: Job) -> Iterator[Verdict]:
    """Ask whether NCCL would use the RDMA ports that the hosts have.

    Why it hurts: traffic between hosts uses TCP sockets, which are often more than ten times slower than RDMA; the
    log shows only `NCCL INFO Using network Socket`.
    Fix: Pass `--device=/dev/infiniband` to the container, and install libibverbs (rdma-core) in its image.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    firsts = (local.members[0].find(RdmaFacts) for local in job.by_host())
    if not all(rdma is not None and _active(rdma) for rdma in firsts):
        return
    found = []
    for nccl, rdma, identical in job.each(NcclFacts, RdmaFacts, also=(SoftwareFacts, GpuFacts, TrainerFacts)):
        if nccl_matters(identical):
            causes = (_by_setting(nccl, rdma, identical), _by_system(nccl, rdma, identical))
            found += [one for one in (*causes, _in_part(nccl, rdma, identical)) if one][:1]
    yield from merge(found, job.place_of)


def _active(rdma: RdmaFacts) -> int:
    return sum(port.state == "ACTIVE" for device in rdma.devices for port in device.ports)


def _active_names(rdma: RdmaFacts) -> list[str]:
    ports = ((device, port) for device in rdma.devices for port in device.ports if port.state == "ACTIVE")
    return [f"{device.name}:{port.number}" for device, port in ports][:16]


def _counted(rdma: RdmaFacts, state: str = "active ") -> str:
    return f"{_active(rdma)} {state}RDMA port{'' if _active(rdma) == 1 else 's'}"


def _by_setting(nccl: NcclFacts, rdma: RdmaFacts, identical: IdenticalRanks) -> Finding | None:
    setting = what_forces_sockets(nccl)
    if setting is None:
        return None
    return Finding(
        f"{setting_text(setting)} on {HERE} makes NCCL use sockets despite {_counted(rdma, '')}",
        ranks=identical.ranks,
        evidence={"active_ports": _active_names(rdma)},
        fix=f"unset {setting.name}"
        if setting.layer == "environment"
        else f"Remove {setting.name} from {setting.source} on {HERE}.",
        source=source_of(setting),
    )


def _by_system(nccl: NcclFacts, rdma: RdmaFacts, identical: IdenticalRanks) -> Finding | None:
    """Report a host without libibverbs.so or /dev/infiniband/uverbs*, on which NCCL falls back to sockets."""
    openable = any(device.has_uverbs is not False for device in rdma.devices)
    if loaded_net_plugin(nccl) is not None or (rdma.verbs_library is not False and openable):
        return None
    why = "libibverbs is not installed" if openable else "/dev/infiniband/uverbs* cannot be opened"
    return Finding(
        f"{why} on {HERE}, so NCCL uses sockets despite {_counted(rdma)}",
        ranks=identical.ranks,
        evidence={"active_ports": _active_names(rdma)},
        fix="Install libibverbs and its providers in the image (`apt-get install libibverbs1 ibverbs-providers`)."
        if openable
        else "Pass the devices to the container (`docker run --device=/dev/infiniband`).",
    )


def _in_part(nccl: NcclFacts, rdma: RdmaFacts, identical: IdenticalRanks) -> Finding | None:
    """Report selected active devices that libibverbs leaves out because their device file is missing
    (libibverbs/init.c, try_access_device).

    A pod sees all devices of its machine in /sys, but has the files of those it was assigned; where it has no more GPUs
    than such devices, nothing is reported."""
    gpus, wanted = identical.find(GpuFacts), nccl_device_list(nccl.get("NCCL_IB_HCA"))
    shut = [
        device.name
        for device in rdma.devices
        if device.has_uverbs is False
        and any(
            port.state == "ACTIVE"
            and port.link_layer in (None, "InfiniBand", "Ethernet")
            and wanted.selects(device.name, port.number)
            for port in device.ports
        )
    ]
    usable = {choice.device.name for choice in nccl_rdma_ports(nccl, rdma)}
    if not shut or not usable or gpus is None or len(usable) >= len(gpus.gpus) or loaded_net_plugin(nccl) is not None:
        return None
    names = ", ".join(shut[:4]) + (" …" if len(shut) > 4 else "")
    why = f"{names} {'has' if len(shut) == 1 else 'have'} no device file"
    return Finding(
        f"NCCL on {HERE} can open only {len(usable)} of {len(usable) + len(shut)} active RDMA devices: {why}",
        ranks=identical.ranks,
        severity=Severity.INFO,
        evidence={"usable": sorted(usable)[:16], "closed": shut[:16] if len(shut) > 4 else None},
        effect=f"The traffic of {len(gpus.gpus)} GPUs shares {len(usable)} device{'s' if len(usable) > 1 else ''}, and "
        "NCCL logs no warning.",
        fix="Pass all RDMA devices to the container, for example with `docker run --device=/dev/infiniband`.",
    )
