"""NET020: an RDMA port is down, slow or counts errors."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from doctor.analysis.interface_choice import link_command
from doctor.analysis.logs.event_timeline import has_worked
from doctor.analysis.stats.baseline import BaselineDifference
from doctor.api import (
    BaselineDeviation,
    BaselineValue,
    EventGroup,
    Finding,
    Host,
    Job,
    Scope,
    Severity,
    Verdict,
    baseline_values,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    hosts_text,
)
from doctor.facts import Counter, NcclFacts, PathFacts, RdmaDevice, RdmaFacts, RdmaPort
from doctor.knowledge.interface_syntax import nccl_device_list
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

ERRORS = frozenset(
    {
        "symbol_error",
        "link_error_recovery",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
        "port_rcv_errors",
        "packet_seq_err",
        "local_ack_timeout_err",
    }
)
"""Counters that do not change on a healthy link. Not link_downed, which counts every reboot of a switch."""

SHOWN = 4


def _port(sketch: JobBuilder, host: str, device: str, **changes: object) -> JobBuilder:
    def change(one: RdmaDevice) -> RdmaDevice:
        if changes.get("state") == "DOWN":
            changes.setdefault("physical_state", "Polling")
        values = {name: getattr(one.ports[0], name) for name in RdmaPort.__struct_fields__} | changes
        return RdmaDevice(one.name, (RdmaPort(**values),), one.board, has_uverbs=one.has_uverbs)

    return sketch.alter(
        RdmaFacts, hosts=(host,), devices=lambda old: tuple(change(one) if one.name == device else one for one in old)
    )


def _cards(rate: float, board: str) -> JobBuilder:
    port = RdmaPort(1, "ACTIVE", "LinkUp", rate, "InfiniBand")
    cards = tuple(RdmaDevice(f"mlx5_{index}", (port,), board, has_uverbs=True) for index in range(2))
    return healthy(1, 1, rdma=2).alter(RdmaFacts, devices=cards)


class _ObservedRdmaPort(NamedTuple):
    host: Host
    ranks: tuple[int, ...]
    device: RdmaDevice
    port: RdmaPort
    named: bool

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the same port on other hosts."""
        return (self.device.name, self.port.number)

    @property
    def hardware(self) -> Hashable:
        """Identifies the same port in another job; a port of another board is not a baseline."""
        return (*self.key, self.device.board, self.port.link_layer)

    @property
    def name(self) -> str:
        return f"{self.device.name}:{self.port.number} on {self.host.name}"


_STATUS = {
    "1": "a local length error: two ranks use different sizes for a message",
    "2": "a local error of the queue pair",
    "4": "a local protection error: the memory of the transfer is not registered with the network card",
    "9": "the peer refused the request as invalid",
    "10": "the peer refused access to its memory",
    "11": "the peer could not complete the request",
    "13": "the peer did not post a receive buffer in time",
}
"""ibv_wc_status (libibverbs/verbs.h) of transfers that failed themselves."""

_HARMLESS = ("client reregist", "GID table changed", "SM change", "LID change", "P_Key", "pkey change", "port active")
"""Port events caused by normal work of the subnet manager."""


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "nccl.ib_wc"):
        states = {*group.values("status"), *group.values("status2")}
        lists = [group.value("list") or "" for group in event_groups(job, "nccl.net.ib_using", by=("list",))]
        is_infiniband = bool(lists) and all("/IB" in text and "/RoCE" not in text for text in lists)
        # Status 12 is IBV_WC_RETRY_EXC_ERR, 5 is IBV_WC_WR_FLUSH_ERR (libibverbs/verbs.h).
        if "12" in states and (has_worked(job, group.first) or is_infiniband):
            # Earlier transfers succeeded, or the ports do not use addresses that can be wrong.
            yield finding_from_logs(
                group,
                f"The RDMA port of {_one(group.values('peer')) or 'a peer'} stopped responding (completion status 12)",
                evidence=_peers(group),
                severity=Severity.ERROR,
                confidence=0.6,
                fix=f"Find the first error of the process on {group.value('peer') or 'the peer'}, then check the RDMA "
                f"links of {f'{hosts_text(group.hosts)} and the peer' if group.hosts else 'both hosts'} with `ibstat`.",
                explains=("NET021",),
            )
        elif states == {"5"}:
            yield finding_from_logs(
                group,
                "RDMA transfers were flushed (completion status 5): the connection failed earlier on either host",
                evidence=_peers(group),
                confidence=0.4,
                fix="Find the first NET/IB warning in the logs of all hosts, because this line is a consequence of it.",
            )
        yield from _of_requests(group, states)


def _one(peers: Sequence[str]) -> str | None:
    return peers[0] if len(peers) == 1 else None


def _peers(group: EventGroup) -> dict[str, object]:
    return {"peers": group.values("peer")} if len(group.values("peer")) > 1 else {}


def _of_ucx(job: Job) -> Iterator[Finding]:
    """Transfers between ports of InfiniBand, which need no address, so that none can be wrong (else NET021)."""
    for group in event_groups(job, "host.ucx", by=("dev",)):
        device = group.value("dev") or ""
        if group.value("msg2") and device.endswith("/IB"):
            yield finding_from_logs(
                group,
                f"RDMA transfers of {device.removesuffix('/IB')}{group.on_hosts} received no response (retry count "
                "exceeded)",
                severity=Severity.ERROR,
                confidence=0.6,
                fix="Find the first error in the logs of the peers, then check the RDMA links of "
                f"{f'{hosts_text(group.hosts)} and the peers' if group.hosts else 'all hosts'} with `ibstat`.",
                explains=("NET021",),
            )


def _of_efa(job: Job) -> Iterator[Finding]:
    """Completions with an error that libfabric's EFA provider reports (prov/efa/src/rdm)."""
    for group in event_groups(job, "host.efa_completion"):
        yield finding_from_logs(
            group,
            f"An EFA transfer{group.on_hosts} failed: {group.value('what')}",
            severity=Severity.ERROR,
            confidence=0.6,
            fix=f"Find the first error of the process on {_efa_peer(group)}, whose EFA endpoint may no longer exist.",
        )


def _efa_peer(group: EventGroup) -> str:
    """``the peer at fe80::c2:bff:fe59:318``, from ``fi_addr_efa://[fe80::c2:bff:fe59:318]:0:946813227``."""
    address = (_one(group.values("peer")) or "").partition("[")[2].partition("]")[0]
    return f"the peer at {address}" if address else "the peer"


def _of_requests(group: EventGroup, states: set[str]) -> Iterator[Finding]:
    for status in sorted(states.intersection(_STATUS)):
        yield finding_from_logs(
            group,
            f"RDMA transfer{group.on_hosts} failed (completion status {status}): {_STATUS[status]}",
            evidence=_peers(group),
            severity=Severity.ERROR,
            confidence=0.6,
            fix=_FIXES.get(status, _FIX_OF_MEMORY).format(peer=_one(group.values("peer")) or "the peer"),
        )


_FIX_OF_MEMORY = "Run once with `NCCL_NET_GDR_LEVEL=LOC` to find out whether GPUDirect RDMA causes the error."
_FIXES = {
    "1": "Compare the shapes of the tensors that the ranks pass to the collective.",
    "11": "Find the first error of the process on {peer}.",
    "13": "Find what blocked the process on {peer}, with the end of its log and `py-spy dump`.",
}


def _by_port(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "nccl.ib_async", by=("dev", "port", "e1", "e2", "e3")):
        event = group.value("e1", "e2", "e3") or ""
        if not any(word in event for word in _HARMLESS):
            name = group.value("dev")
            device = f"{name}:{group.value('port')}" if name else None
            port = (f"RDMA port {device}" if device else "an RDMA port") + group.on_hosts
            is_of_queue = "fatal event on QP" in group.first.text
            link = (
                f"the link of {name}{group.on_hosts} with `{link_command(name)}`"
                if name
                else f"the links of the RDMA ports{group.on_hosts} with `ibstat`"
            )
            yield finding_from_logs(
                group,
                f"A queue pair on {port} failed: {event}"
                if is_of_queue
                else f"{port[:1].upper()}{port[1:]} reported an error event: {event}",
                fix=_FIX_OF_MEMORY
                if is_of_queue
                else f"Check {link}, then replace the cable or reset the switch port.",
                severity=Severity.ERROR,
                confidence=0.85,
                explains=("NET021",),
            )


@check(
    id="NET020",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PM",
    needs=(RdmaFacts,),
    uses_baseline=True,
    from_logs=(_by_port, _from_logs, _of_ucx, _of_efa),
    impacts={
        r"is (?:DOWN|INIT|ARMED)|found (?:DOWN|INIT|ARMED)": (
            "NCCL uses only active ports: bandwidth between hosts is lower, or NCCL fails with `Detected mixed local "
            "Net device counts`."
        ),
        r"runs at|Gb/s.*found": "Collectives run at the rate of the slowest port, and all ranks wait for it.",
        r"during the test|since boot": (
            "Packets may be retransmitted, which slows down the port. If the errors increase, transfers may fail with "
            "`status=12`."
        ),
        r"EFA|libfabric|queue pair|transfer.* failed|were flushed|stopped responding": (
            "The rank fails with an NCCL error, and the other ranks wait for it until their timeout."
        ),
        r"no response": "The rank fails with a UCX error, and the other ranks wait for it until their timeout.",
        r"reported an error event": (
            "Transfers over the port fail or time out, and the ranks that use it end with an NCCL error."
        ),
    },
    cases=lambda: (
        Fails(
            "UCX gets no answer over InfiniBand",
            logged("[node1:18241:0:18241] ib_mlx5_log.c:139 Transport retry count exceeded on mlx5_0:1/IB (synd 0x15)"),
            ranks=(),
            severity=Severity.ERROR,
        ),
        Fails(
            "a completion with an error of EFA",
            logged(
                "libfabric:438214:1708498712::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid "
                "address My EFA addr: fi_addr_efa://[fe80::1]:0:1 Peer EFA addr: fi_addr_efa://[fe80::2]:0:2"
            ),
            ranks=(),
            severity=Severity.ERROR,
        ),
        Passes("all ports up", healthy(hosts=3, per_host=2, rdma=4)),
        Passes(
            "links that went down before",
            _port(healthy(2, 1, rdma=2), "node1", "mlx5_0", counters=(Counter("link_downed", 3),)),
        ),
        Passes(
            "a port that is down on every host",
            _port(_port(healthy(2, 1, rdma=2), "node0", "mlx5_1", state="DOWN"), "node1", "mlx5_1", state="DOWN"),
        ),
        Passes(
            "errors since a boot long ago",
            _port(healthy(2, 1, rdma=2), "node1", "mlx5_0", counters=(Counter("symbol_error", 12),)),
        ),
        Passes(
            "a port that is down in the capture too",
            _port(healthy(1, 1, rdma=2), "node0", "mlx5_1", state="DOWN").expecting(
                _port(healthy(1, 1, rdma=2), "node0", "mlx5_1", state="DOWN")
            ),
        ),
        Passes("slower cards than in the capture", _cards(200.0, "MCX653105A").expecting(healthy(1, 1, rdma=2))),
        Fails(
            "a port is down on one host",
            _port(healthy(3, 2, rdma=4), "node1", "mlx5_2", state="DOWN", physical_state="Polling"),
            ranks=(2, 3),
        ),
        Fails(
            "a port waits for the subnet manager",
            _port(healthy(3, 1, rdma=2), "node2", "mlx5_0", state="INIT"),
            ranks=(2,),
        ),
        Fails(
            "one of two ports of a lone host is down",
            _port(healthy(1, 2, rdma=2), "node0", "mlx5_1", state="DOWN"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("a link at half its rate", _port(healthy(3, 1, rdma=2), "node0", "mlx5_1", rate=200.0), ranks=(0,)),
        Fails(
            "one of eight ports of a lone host is slower",
            _port(healthy(1, 2, rdma=8), "node0", "mlx5_6", rate=100.0),
            ranks=(0, 1),
        ),
        Fails(
            "the selected port of a lone host is down",
            _port(healthy(1, 2, rdma=2), "node0", "mlx5_0", state="DOWN").environ(NCCL_IB_HCA="=mlx5_0,mlx5_1"),
            ranks=(0, 1),
        ),
        Fails(
            "far more symbol errors than all other ports",
            _port(healthy(4, 1, rdma=2), "node2", "mlx5_1", counters=(Counter("symbol_error", 900_000),)),
            ranks=(2,),
            severity=Severity.INFO,
        ),
        Fails(
            "errors while paths were measured",
            healthy(2, 1, rdma=2).put(PathFacts(rdma_errors=4000), hosts=("node1",)),
            ranks=(1,),
        ),
        Fails(
            "a port that is down on every host, and up in the capture",
            _port(
                _port(healthy(2, 1, rdma=2), "node0", "mlx5_1", state="DOWN"), "node1", "mlx5_1", state="DOWN"
            ).expecting(healthy(1, 1, rdma=2)),
            ranks=(0, 1),
        ),
        Fails(
            "all ports of a lone host at half the rate of the capture",
            _cards(200.0, "MCX75310AAS-NEAT").expecting(healthy(2, 1, rdma=2)),
            ranks=(0,),
        ),
        Fails(
            "a peer on InfiniBand that does not answer any more",
            logged(
                "node1:41:77 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.8.0.1<0>",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
                "node1:41:77 [0] transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer 10.8.0.2<41234> "
                "with status=12 opcode=0 len=0 vendor err 129 (Recv)",
            ),
            ranks=(0,),
            severity=Severity.ERROR,
        ),
    ),
)
def rdma_port_unhealthy(job: Job, *, outlier_times: float = 100, least_errors: float = 10_000) -> Iterator[Verdict]:
    """Ask whether the RDMA ports are up, at full rate and without errors.

    Why it hurts: NCCL skips the port or waits for the slow one: half the bandwidth, `Detected mixed local Net device
    counts`, or `Got completion from peer ... with status=12` during the run.
    Fix: Check the cable and the switch port with `ibstat`, or exclude the device on all hosts with NCCL_IB_HCA.
    """
    seen = list(_ports(job))
    states = baseline_values(job, lambda worked: ((one.hardware, one.port.state == "ACTIVE") for one in _ports(worked)))
    yield from _down(seen, states)
    rates = baseline_values(job, _rates)
    if rates or len({one.port.rate for one in seen}) > 1:
        yield from _slow(seen, rates)
    for paths, identical in job.each(PathFacts):
        if paths.rdma_errors:
            yield Finding(
                f"RDMA ports of {', '.join(identical.hosts)} counted {paths.rdma_errors:,} errors during the test",
                ranks=identical.ranks,
                fix=f"Check the RDMA links of {', '.join(identical.hosts)} with `ibstat` and `ibqueryerrors`, then "
                "replace the cable or transceiver.",
            )
    # Counters since boot far above those of the other ports of the job: only a hint, because no increase was observed.
    values: dict[str, list[tuple[int, _ObservedRdmaPort]]] = {}
    for one in seen:
        for counter in one.port.counters:
            if counter.name in ERRORS:
                values.setdefault(counter.name, []).append((counter.value, one))
    for name, counted in values.items():
        usual = median(value for value, _ in counted)
        for value, one in counted if len(counted) >= 8 else ():
            if value > max(least_errors, outlier_times * (usual + 1)):
                yield Finding(
                    f"{one.name} counted {value:,} errors (`{name}`) since boot (median of all ports: {usual:g})",
                    ranks=one.ranks,
                    severity=Severity.INFO,
                    confidence=0.5,
                    evidence={"ports compared": len(counted)},
                    fix=_fix_of_link(one),
                )


def _fix_of_link(one: _ObservedRdmaPort) -> str:
    name = one.device.name
    return (
        f"On {one.host.name}, check the link of {name} with `{link_command(name)}`, then replace its cable or "
        "transceiver."
    )


def _fix_of_state(one: _ObservedRdmaPort) -> str:
    name = one.device.name
    if one.port.state in ("INIT", "ARMED") and one.port.link_layer != "Ethernet":
        # sminfo(8) asks the subnet manager of the port; https://access.redhat.com/node/7087953 describes opensm.
        return (
            f"Query the subnet manager with `sudo sminfo -C {name}` on {one.host.name}; if none responds, start it on "
            "the switch, or on one host with `sudo systemctl enable --now opensm`."
        )
    return (
        f"On {one.host.name}, check the cable and the switch port of {name} with `{link_command(name)}`, or exclude "
        f"{name} on all hosts with `export NCCL_IB_HCA='^={name}'`."
    )


def _ports(job: Job) -> Iterator[_ObservedRdmaPort]:
    for local in job.by_host():
        nccl = local.members[0].find(NcclFacts)
        wanted = nccl_device_list(nccl.get("NCCL_IB_HCA") if nccl else None)
        rdma, named = local.find(RdmaFacts), {entry for entry, _ in wanted.entries if not wanted.exclude}
        for device in rdma.devices if rdma else ():
            for port in device.ports:
                yield _ObservedRdmaPort(local.hosts[0], local.ranks, device, port, device.name in named)


def _rates(worked: Job) -> Iterator[tuple[Hashable, float]]:
    for one in _ports(worked):
        if one.port.state == "ACTIVE" and one.port.rate and one.device.board:
            yield one.hardware, one.port.rate


def _down(seen: list[_ObservedRdmaPort], expected: Mapping[Hashable, BaselineValue]) -> Iterator[Finding]:
    """Report inactive ports that should be active: the baseline or most other hosts have the same port active, or a
    setting names it."""
    if all(one.port.state == "ACTIVE" for one in seen):
        return
    active = Tally(one.key for one in seen if one.port.state == "ACTIVE")
    total = Tally(one.key for one in seen)
    unlike: dict[BaselineDifference, list[_ObservedRdmaPort]] = {}
    for one in seen:
        if one.port.state == "ACTIVE":
            continue
        up, known = active[one.key], expected.get(one.hardware)
        state = f"{one.port.state}" + (f" ({one.port.physical_state})" if one.port.physical_state else "")
        if known and known.value:
            unlike.setdefault(BaselineDifference("", "ACTIVE", state, known.source), []).append(one)
        elif one.named or (not known and (2 * up > total[one.key] or (up and total[one.key] == 2))):
            yield Finding(
                f"{one.name} is {state}",
                ranks=one.ranks,
                evidence={"hosts_with_it_active": up} if up else {},
                fix=_fix_of_state(one),
                explains=("NET022",),
            )
        elif not known and _has_active_sibling(one, seen):
            yield Finding(
                f"{one.name} is {state}: NCCL does not use it",
                ranks=one.ranks,
                severity=Severity.INFO,
                confidence=0.5,
                effect="None if the port is intentionally not connected.",
                fix=f"If the port should be connected, check the cable and the switch port of {one.device.name} on "
                f"{one.host.name} with `ibstat {one.device.name}`.",
            )
    yield from _unexpected(unlike)


def _has_active_sibling(down: _ObservedRdmaPort, seen: list[_ObservedRdmaPort]) -> bool:
    """Whether only one host is known, and it has an active port of the same board and link layer."""
    return all(one.host is down.host for one in seen) and any(
        one.port.state == "ACTIVE"
        and (one.device.board, one.port.link_layer) == (down.device.board, down.port.link_layer)
        for one in seen
    )


def _slow(seen: list[_ObservedRdmaPort], expected: Mapping[Hashable, BaselineValue]) -> Iterator[Finding]:
    """Report active ports below the baseline rate, else below that of the same port on most hosts or of most ports of
    that board on the host."""
    by_peer: dict[tuple[Hashable, ...], list[_ObservedRdmaPort]] = {}
    unlike: dict[BaselineDifference, list[_ObservedRdmaPort]] = {}
    for one in seen:
        if one.port.state != "ACTIVE" or not one.port.rate:
            continue
        if expected and (known := expected.get(one.hardware)):
            if one.port.rate < known.value:
                row = BaselineDifference("", f"{known.value:g} Gb/s", f"{one.port.rate:g} Gb/s", known.source)
                unlike.setdefault(row, []).append(one)
            continue
        by_peer.setdefault(one.key, []).append(one)
        if one.device.board:
            by_peer.setdefault((one.host.index, one.device.board, one.port.link_layer), []).append(one)
    reported = set()
    for key, group in by_peer.items():
        if len({one.port.rate for one in group}) == 1:
            continue
        usual = _usual(group, beside_peers=len(key) == 2)
        for one in group:
            if usual and (one.port.rate or 0) < usual and one.name not in reported:
                reported.add(one.name)
                yield Finding(
                    f"{one.name} runs at {one.port.rate:g} Gb/s, its peers at {usual:g} Gb/s",
                    ranks=one.ranks,
                    fix=_fix_of_link(one),
                    evidence={"ports compared": len(group)},
                    explains=("NET022",),
                )
    yield from _unexpected(unlike)


def _unexpected(unlike: Mapping[BaselineDifference, list[_ObservedRdmaPort]]) -> Iterator[Finding]:
    for row, ports in unlike.items():
        names = _names(ports)
        deviation = BaselineDeviation((msgspec.structs.replace(row, what=names),), drifted=False)
        ranks = tuple(sorted({rank for one in ports for rank in one.ranks}))
        finding = deviation.finding(ranks, {"ports": len(ports)}, explains=("NET022",))
        command = link_command(ports[0].device.name)
        yield finding.extended({}, f"Check the cables and switch ports of {names}, for example with `{command}`.")


def _names(ports: Sequence[_ObservedRdmaPort]) -> str:
    """``mlx5_0:1 and mlx5_1:1 on node0``, ``mlx5_1:1 on node0 and 3 more hosts``, ``mlx5_0:1 on node0 and 8 more``."""
    keys = [f"{device}:{number}" for device, number in dict.fromkeys(one.key for one in ports)]
    hosts = list(dict.fromkeys(one.host.name for one in ports))
    if len(keys) * len(hosts) != len(ports) or len(keys) > SHOWN:
        return f"{ports[0].name} and {len(ports) - 1} more"
    return f"{conjunction(keys)} on {hosts_text(hosts)}"


def _usual(group: list[_ObservedRdmaPort], *, beside_peers: bool) -> float | None:
    rates = Tally(one.port.rate or 0.0 for one in group)
    rate, count = rates.most_common(1)[0]
    if 2 * count > len(group) and len(group) > 2:
        return rate
    return max(rates) if beside_peers and len(group) == 2 else None
