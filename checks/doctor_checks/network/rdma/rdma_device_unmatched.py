"""NET018: NCCL_IB_HCA matches no active port."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from doctor.analysis.interface_choice import (
    active_rdma_ports,
    link_command,
    loaded_net_plugin,
    nccl_rdma_ports,
    setting_text,
    what_forces_sockets,
)
from doctor.analysis.logs.event_timeline import set_up_after
from doctor.analysis.missing_sections import lacking_verdicts
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    merge,
    source_of,
)
from doctor.core.text import HERE
from doctor.facts import (
    EnvironmentFacts,
    GpuFacts,
    InterfaceFacts,
    MissingReason,
    NcclFacts,
    NcclPlugin,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    Setting,
)
from doctor.knowledge.environment_variables import slips
from doctor.knowledge.interface_syntax import (
    NcclList,
    list_fault,
    misplaced_signs,
    nccl_device_list,
    parse_nccl_integer,
    repaired_list,
)
from doctor.testing import Fails, Passes, healthy, logged

_HALF_DOWN = (
    RdmaDevice("mlx5_0", (RdmaPort(1, "DOWN", "Polling", link_layer="InfiniBand"),), has_uverbs=True),
    RdmaDevice("mlx5_1", (RdmaPort(1, "ACTIVE", "LinkUp", 400.0, "InfiniBand"),), has_uverbs=True),
)


def _from_logs(job: Job) -> Iterator[Finding]:
    wanted = [group for group in event_groups(job, "nccl.env.set", by=("env",)) if group.value("env") == "NCCL_IB_HCA"]
    for group in event_groups(job, "nccl.net.ib_none", by=("dev",)):
        if group.value("dev"):
            # Devices that the container lists but cannot open; NCCL continues with the others.
            if not set_up_after(job, group.events[-1]):
                yield finding_from_logs(
                    group,
                    f"RDMA device {group.value('dev')}{group.on_hosts} is visible, but the process cannot open it",
                    severity=Severity.WARNING,
                    confidence=0.5,
                    fix="Pass the device file to the container with `--device=/dev/infiniband`, or exclude the device "
                    f"with `export NCCL_IB_HCA='^={group.value('dev')}'`.",
                    symptoms=False,
                )
        elif wanted and "libibverbs" not in group.first.text:
            value = wanted[0].value("value")
            yield finding_from_logs(
                EventGroup(group.kind, (*group.events[:3], wanted[0].first)),
                f"NCCL_IB_HCA={value} matches no active RDMA port: NCCL finds no device",
                confidence=0.85,
                explains=("NET019",),
            )
    for group in event_groups(job, "nccl.modify_qp", "nccl.ibv_fail", by=("err",)):
        if (group.value("err") or "").startswith("No such device"):
            yield finding_from_logs(
                group,
                f"NCCL{group.on_hosts} selects an RDMA device that its process cannot use: No such device",
                confidence=0.7,
                fix="Set NCCL_IB_HCA to devices that `ibv_devinfo` lists in the container, or start the container with "
                "`--network host`.",
            )


@check(
    id="NET018",
    severity=Severity.ERROR,
    when="PM",
    needs=(NcclFacts,),
    from_logs=_from_logs,
    impacts={
        r"cannot open it": (
            "NCCL does not use the device: traffic between hosts uses fewer devices, or TCP sockets, which are often "
            "more than ten times slower."
        ),
        r"cannot use: ": (
            "NCCL fails when it uses the device, and the other ranks wait for this rank until the timeout."
        ),
    },
    cases=lambda: (
        Passes("not set", healthy(hosts=2, per_host=2, rdma=2)),
        Passes("a prefix of all", healthy(2, 2, rdma=2).environ(NCCL_IB_HCA="mlx5")),
        Passes("devices with ports", healthy(2, 2, rdma=4).environ(NCCL_IB_HCA="=mlx5_0:1,mlx5_3:1")),
        Fails(
            "mlx5_1 is also the beginning of mlx5_10",
            healthy(2, 2, rdma=12).environ(NCCL_IB_HCA="mlx5_0,mlx5_1"),
            ranks=(0, 1, 2, 3),
            severity=Severity.INFO,
        ),
        Passes("mlx5_1 and mlx5_10 are both listed", healthy(2, 2, rdma=11).environ(NCCL_IB_HCA="mlx5_1,mlx5_10")),
        Passes("RDMA is switched off anyway", healthy(2, 2, rdma=2).environ(NCCL_IB_HCA="bond", NCCL_IB_DISABLE="1")),
        Passes(
            "a plug-in carries the data, and NCCL_IB_HCA is left over",
            healthy(2, 2)
            .put(RdmaFacts(devices=(RdmaDevice("rdmap0", (RdmaPort(link_layer="Unspecified"),), driver="efa"),)))
            .alter(NcclFacts, plugins=(NcclPlugin("net", "libnccl-net.so", path="/opt/amazon/lib/libnccl-net.so"),))
            .environ(NCCL_IB_HCA="mlx5"),
        ),
        Fails(
            "devices of another machine", healthy(2, 2, rdma=2).environ(NCCL_IB_HCA="=mlx5_bond_0"), ranks=(0, 1, 2, 3)
        ),
        Fails(
            "a prefix where whole names are asked for", healthy(1, 2, rdma=2).environ(NCCL_IB_HCA="=mlx5"), ranks=(0, 1)
        ),
        Fails(
            "a port that the devices do not have", healthy(1, 2, rdma=2).environ(NCCL_IB_HCA="mlx5_0:2"), ranks=(0, 1)
        ),
        Fails("a misspelt device", healthy(2, 1, rdma=2).environ(ranks=(1,), NCCL_IB_HCA="mlxl5_0"), ranks=(1,)),
        Fails("everything is excluded", healthy(2, 1, rdma=2).environ(NCCL_IB_HCA="^mlx5"), ranks=(0, 1)),
        Passes(
            "a lone host without a cable, NCCL_IB_HCA in its image",
            healthy(1, 2, rdma=1).alter(RdmaFacts, devices=_HALF_DOWN[:1]).environ(NCCL_IB_HCA="mlx5"),
        ),
        Fails(
            "every port that the prefix stands for is down",
            healthy(2, 1, rdma=1)
            .alter(RdmaFacts, hosts=("node1",), devices=_HALF_DOWN[:1])
            .environ(NCCL_IB_HCA="mlx5"),
            ranks=(1,),
        ),
        Fails(
            "the selected port is down",
            healthy(2, 1, rdma=2).alter(RdmaFacts, hosts=("node1",), devices=_HALF_DOWN).environ(NCCL_IB_HCA="=mlx5_0"),
            ranks=(1,),
        ),
        Fails(
            "a list of devices on a host that has none",
            healthy(2, 2).environ(NCCL_IB_HCA="cxi0,cxi1"),
            ranks=(0, 1, 2, 3),
            severity=Severity.INFO,
        ),
        Fails(
            "UCX is to use a device that the container does not show",
            healthy(2, 1).environ(UCX_NET_DEVICES="mlx5_bond_0:1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes("UCX uses an interface", healthy(2, 1).environ(UCX_NET_DEVICES="eth0")),
        Passes("UCX uses a device", healthy(2, 1, rdma=2).environ(UCX_NET_DEVICES="mlx5_0:1,mlx5_9:1")),
        Passes("UCX may use all", healthy(2, 1).environ(UCX_NET_DEVICES="all")),
        Passes("the same on a login node", healthy(1, 1, gpus=0).environ(NCCL_IB_HCA="mlx5_0")),
        Fails(
            "names of Ethernet interfaces, which exclude no device",
            healthy(1, 2, rdma=2).environ(NCCL_IB_HCA="^ens,eth,docker"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "one device to exclude of two that may be there", healthy(1, 2, rdma=2).environ(NCCL_IB_HCA="^mlx5_0,bond")
        ),
        Fails(
            "an exact name inside the list",
            healthy(1, 2, rdma=2).environ(NCCL_IB_HCA="=mlx5_0,=mlx5_1"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes(
            "no RDMA device, and none asked for",
            logged(
                "node1:41:77 [0] NCCL INFO NET/IB : No device found.", "node1:41:77 [0] NCCL INFO Using network Socket"
            ),
        ),
        Fails(
            "NCCL_IB_HCA names a card of another machine",
            logged(
                "node1:41:77 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_4",
                "node1:41:77 [0] NCCL INFO NET/IB : No device found.",
            ),
        ),
        Passes(
            "devices of others, and NCCL goes on without them",
            logged(
                "node1:41:77 [0] transport/net_ib.cc:149 NCCL WARN NET/IB : Unable to open device mlx5_59",
                "node1:41:77 [0] NCCL INFO NET/IB : Using [0]mlx5_1:1/RoCE ; OOB eth0:10.0.0.1<0>",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
            ),
        ),
        Fails(
            "devices that can't be opened, and nothing after",
            logged(
                "node1:41:77 [0] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed",
                "node1:41:77 [0] transport/net_ib.cc:149 NCCL WARN NET/IB : Unable to open device mlx5_59",
            ),
            severity=Severity.WARNING,
        ),
        Fails(
            "a virtual function of another container",
            logged(
                "node1:41:77 [0] misc/ibvwrap.cc:255 NCCL WARN Call to ibv_modify_qp failed with error No such device"
            ),
        ),
    ),
)
def rdma_device_unmatched(job: Job) -> Iterator[Verdict]:
    """Ask whether NCCL_IB_HCA matches an active port.

    Why it hurts: NCCL logs `NET/IB : No device found` and falls back to TCP sockets, which are often more than ten
    times slower; if other hosts use RDMA, the job hangs at startup.
    Fix: Run `unset NCCL_IB_HCA`, or set it to devices that `ibv_devinfo` lists with PORT_ACTIVE.
    """
    yield from lacking_verdicts(job, RdmaFacts)
    yield from merge(_of_ucx(job), job.place_of)
    found: list[Finding] = []
    for nccl, identical in job.each(NcclFacts, also=(RdmaFacts, GpuFacts)):
        setting = nccl.setting("NCCL_IB_HCA")
        if setting is None or not setting.value or what_forces_sockets(nccl) is not None:
            continue
        rdma = identical.find(RdmaFacts)
        if rdma is None:
            found += _unused(setting, identical)
            continue
        active = active_rdma_ports(rdma)
        if loaded_net_plugin(nccl) is not None and not active:
            continue
        wanted = nccl_device_list(setting.value)
        named = [
            f"{device.name}:{port.number} is {port.state}"
            for device in rdma.devices
            for port in device.ports
            if wanted.selects(device.name, port.number)
        ]
        if nccl_rdma_ports(nccl, rdma):
            found += _malformed(setting, rdma, identical)
            continue
        if named and not active and not job.is_multi_host:
            continue  # A single host without a cable needs no RDMA.
        if wanted.exclude and not named and parse_nccl_integer(nccl.get("NCCL_MNNVL_ENABLE"), 2) == 1:
            continue  # NVLink between hosts, asked for, carries everything (NCCL src/init.cc: 2 is automatic).
        found.append(_finding(setting, named, [one.name for one in active], identical))
    yield from merge(found, job.place_of)


def _of_ucx(job: Job) -> Iterator[Finding]:
    """Report UCX_NET_DEVICES that names nothing on the host; UCX then logs "network device ... is not available".

    A list of ``device:port`` and interfaces; ``^`` before it excludes, ``all`` and ranges are left to UCX."""
    for environment, interfaces, identical in job.each(EnvironmentFacts, InterfaceFacts, also=(RdmaFacts,)):
        value, missing = (environment.get("UCX_NET_DEVICES") or "").strip(), identical.missing(RdmaFacts)
        if not value or re.search(r"[\^\[*?]|\ball\b", value) or (missing and missing.lack is not MissingReason.ABSENT):
            continue
        rdma = identical.find(RdmaFacts)
        there = {device.name for device in rdma.devices} if rdma else set()
        there |= {interface.name for interface in interfaces.interfaces}
        if not there & {entry.strip().partition(":")[0] for entry in value.split(",")}:
            yield Finding(
                f"UCX_NET_DEVICES={value} names neither an RDMA device nor an interface on {HERE}",
                ranks=identical.ranks,
                evidence={"devices": sorted(there)[:16]},
                effect="Programs that use UCX (MPI, UCC, NIXL) cannot reach other hosts. NCCL is not affected.",
                fix="unset UCX_NET_DEVICES",
                severity=Severity.INFO,
            )


def _unused(setting: Setting, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report NCCL_IB_HCA on a host with GPUs that has no RDMA devices."""
    missing, gpus = identical.missing(RdmaFacts), identical.find(GpuFacts)
    if missing is not None and missing.lack is MissingReason.ABSENT and gpus is not None and gpus.gpus:
        yield Finding(
            f"{setting_text(setting)} has no effect on {HERE}: no RDMA device",
            ranks=identical.ranks,
            effect="None if the job should not use RDMA; NCCL sends data through its network plugin or sockets.",
            fix=_removing(setting),
            severity=Severity.INFO,
            source=source_of(setting),
        )


def _removing(setting: Setting) -> str:
    return f"Remove NCCL_IB_HCA from {setting.source}." if source_of(setting) else "unset NCCL_IB_HCA"


def _setting(setting: Setting, value: str) -> str:
    line = f"NCCL_IB_HCA='{value}'"
    return f"In {setting.source}, set `NCCL_IB_HCA={value}`." if source_of(setting) else f"export {line}"


def _malformed(setting: Setting, rdma: RdmaFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report a list that selects ports, but has entries without effect."""
    wanted, fault = nccl_device_list(setting.value), list_fault(setting.value)
    names = [device.name for device in rdma.devices]
    fix = _setting(setting, repaired_list(setting.value))
    effect = misplaced_signs(setting.value) or "NCCL uses other ports than the setting intends."
    if not fault and wanted.exclude and not any(map(wanted.names, names)):
        fault = "no RDMA device has such a name"
        effect = "None as long as no device should be excluded: NCCL uses all of them."
        fix = f"{_removing(setting)[:1].upper()}{_removing(setting)[1:]}" if source_of(setting) else "unset NCCL_IB_HCA"
    if not fault and wanted.exclude and (slip := _misspelled(setting.value, names)):
        fault = f"{HERE} has no {slip[0]}; did you mean {slip[1]}?"
        fix = _setting(setting, setting.value.replace(slip[0], slip[1], 1))
    if not fault and not wanted.exclude and (also := _also_selected(wanted, names)):
        fault = f"the prefix {also[0]} also selects {', '.join(also[1][:4])}"
        effect = "NCCL also sends data over the additional devices, which may belong to another network."
        fix = _setting(setting, f"={setting.value}")
    if fault:
        yield Finding(
            f"{setting_text(setting)}: {fault}",
            ranks=identical.ranks,
            evidence={"devices": names},
            effect=effect,
            fix=fix,
            severity=Severity.WARNING if fault and list_fault(setting.value) else Severity.INFO,
            source=source_of(setting),
        )


def _also_selected(wanted: NcclList, devices: Sequence[str]) -> tuple[str, list[str]] | None:
    """The first entry that is a whole device name, with devices of longer names that no other entry spells out."""
    listed = {name for name, _ in wanted.entries}
    for entry in () if wanted.exact else wanted.entries:
        longer = [name for name in devices if name.startswith(entry[0]) and name not in listed]
        if entry[0] in devices and longer:
            return entry[0], longer
    return None


def _misspelled(value: str, devices: Sequence[str]) -> tuple[str, str] | None:
    """The first entry that matches no device and differs by one letter from a device that the list leaves in."""
    entries = [entry.partition(":")[0] for entry in value.removeprefix("^").removeprefix("=").split(",")]
    for entry in entries:
        if not entry or any(device.startswith(entry) for device in devices):
            continue
        for device in devices:
            if slips(entry, device, 1) == 1 and device not in entries:
                return entry, device
    return None


def _finding(setting: Setting, named: list[str], active: list[str], identical: IdenticalRanks) -> Finding:
    wanted = nccl_device_list(setting.value)
    if named:
        claim = f"matches no active port: {', '.join(named[:4])}"
    elif wanted.exclude:
        claim = "excludes every RDMA device"
    elif any(wanted.names(name.partition(":")[0]) for name in active):
        claim = "names no port that the RDMA devices have"
    else:
        claim = "matches no RDMA device"
    devices = ",".join(dict.fromkeys(name.partition(":")[0] for name in active))
    return Finding(
        f"{setting_text(setting)} {claim}",
        ranks=identical.ranks,
        evidence={"active_ports": active},
        fix=_selecting(setting, devices, named) if active else _fix_of_port(named),
        source=source_of(setting),
        explains=("NET022",),
    )


def _selecting(setting: Setting, devices: str, named: list[str]) -> str:
    up = f", or check the cable and the switch port of {named[0].partition(' ')[0]} on {HERE}" if named else ""
    if source_of(setting):
        return f"Remove NCCL_IB_HCA from {setting.source}, or set it to `={devices}` there{up}."
    return f"Run `unset NCCL_IB_HCA` or `export NCCL_IB_HCA='={devices}'`{up}."


def _fix_of_port(named: list[str]) -> str:
    port = named[0].partition(" ")[0] if named else ""
    device = port.partition(":")[0]
    return f"Check the cable and the switch port of {port} on {HERE} with `{link_command(device)}`." if named else ""
