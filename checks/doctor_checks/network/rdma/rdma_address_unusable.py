"""NET021: the RoCE GID in use cannot reach the peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv6Address
from typing import NamedTuple

from doctor.analysis.interface_choice import (
    RdmaChoice,
    gid_address,
    gid_index,
    is_routable_gid,
    loaded_net_plugin,
    nccl_release,
    network_of,
    parse_address,
    rdma_ports_of,
    sends_data_by_sockets,
)
from doctor.analysis.logs.event_timeline import has_worked
from doctor.analysis.stats.baseline import BaselineDifference
from doctor.api import (
    BaselineDeviation,
    BaselineValue,
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    baseline_value,
    check,
    event_groups,
    finding_from_logs,
    hosts_text,
    merge,
)
from doctor.core.text import HERE, lazy_compile
from doctor.facts import (
    Address,
    Gid,
    Interface,
    InterfaceFacts,
    NcclFacts,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    SoftwareFacts,
)
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged


def _roce(host: int, *, gids: int = 4, rail: int = 0) -> RdmaFacts:
    local = f"fe80:0000:0000:0000:0000:00ff:fe00:{host:04x}"
    mapped = f"0000:0000:0000:0000:0000:ffff:0a{rail:02x}:{host + 1:04x}"
    table = (
        Gid(0, local, "RoCE v1", "ens1"),
        Gid(1, local, "RoCE v2", "ens1"),
        Gid(2, mapped, "RoCE v1", "ens1"),
        Gid(3, mapped, "RoCE v2", "ens1"),
    )
    port = RdmaPort(1, "ACTIVE", "LinkUp", 200.0, "Ethernet", gids=table[:gids])
    return RdmaFacts(devices=(RdmaDevice("mlx5_0", (port,), has_uverbs=True),), verbs_library=True)


def _job(hosts: int, index: str | None = None) -> JobBuilder:
    sketch = healthy(hosts, 1)
    for host in range(hosts):
        sketch = sketch.put(_roce(host), hosts=(f"node{host}",))
    return sketch if index is None else sketch.environ(NCCL_IB_GID_INDEX=index)


def _crossed() -> JobBuilder:
    sketch = healthy(3, 1)
    for host, (first, second) in enumerate(((1, 2), (1, 2), (2, 1))):
        cards = tuple(
            Interface(f"ens{rail}", addresses=(Address("inet", f"10.{rail}.0.{host + 1}", 16),)) for rail in (1, 2)
        )
        name = (f"node{host}",)
        one, other = _roce(host, rail=first).devices[0], _roce(host, rail=second).devices[0]
        devices = (one, RdmaDevice("mlx5_1", other.ports, has_uverbs=True))
        sketch = sketch.put(RdmaFacts(devices=devices, verbs_library=True), hosts=name)
        sketch = sketch.alter(InterfaceFacts, hosts=name, interfaces=lambda old, cards=cards: (*old, *cards))
    return sketch


class _ChosenGid(NamedTuple):
    choice: RdmaChoice
    entry: int
    gid: Gid | None
    identical: IdenticalRanks
    fixed: bool

    @property
    def kind(self) -> tuple[str, bool]:
        """What the GIDs of peers must have in common: the RoCE version, and whether it is routable."""
        return (self.gid.kind or "" if self.gid else "", self.gid is not None and is_routable_gid(self.gid))


_NO_WAY_WORDS = (
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "Invalid argument",
    "No such device",
)
"""Errors of ibv_modify_qp if a queue pair has no route to the peer's address: with RoCE, the wrong GID."""


_FIX_WITHOUT_NCCL = (
    "On every host, set the GID index of the program that opened the connection to the one that `show_gids` lists as "
    "RoCE v2 with an IPv4 address."
)


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "nccl.modify_qp", "verbs.modify_qp", by=("err",)):
        error = group.value("err") or ""
        if error.startswith(_NO_WAY_WORDS):
            ends = _ends(group.value("qp") or "")
            own = f"from {hosts_text(group.hosts)} " if group.hosts else ""
            which = f"from {ends[0]} to {ends[1]}" if ends else f"{own}to a peer"
            yield finding_from_logs(
                group,
                f"An RDMA connection {which} failed: {error.partition(' errno ')[0]} (ibv_modify_qp)",
                confidence=0.75 if error.startswith("Invalid") else 0.85,
                fix=_fix_of_connection(group, error, ends),
            )


_ENDS = lazy_compile(r"local GID (?P<local>[0-9a-fA-F:.]{2,45}), remote GID (?P<remote>[0-9a-fA-F:.]{2,45})")


def _ends(queue_pair: str) -> tuple[str, str] | None:
    """The IPv4 addresses of both ends, if their GIDs are made from these."""
    found = _ENDS.search(queue_pair)
    ends = [parse_address(text.lower().removeprefix("::ffff:")) for text in found.groups()] if found else []
    return (str(ends[0]), str(ends[1])) if [one.version for one in ends if one is not None] == [4, 4] else None


def _fix_of_connection(group: EventGroup, error: str, ends: tuple[str, str] | None) -> str:
    """Empty for that of the check. Other libraries than NCCL log verbs.modify_qp."""
    if ends and not error.startswith(("Invalid", "No such")):
        host = group.hosts[0] if group.hosts else f"the host of {ends[0]}"
        return (
            f"Add the route between {ends[0]} and {ends[1]} that RoCE needs, until this command succeeds on {host}:\n"
            f"ping -c 1 -I {ends[0]} {ends[1]}"
        )
    return _FIX_WITHOUT_NCCL if group.kind == "verbs.modify_qp" else ""


def _unanswered(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "host.ucx"):
        # Ports of InfiniBand need no address (NET020); the message names the link layer.
        is_infiniband = (group.value("dev") or "").endswith("/IB")
        if group.value("msg2") and not is_infiniband and not has_worked(job, group.first):
            yield finding_from_logs(
                group,
                f"UCX{group.on_hosts} received no response over RDMA, possibly due to a wrong GID",
                confidence=0.5,
            )
    for group in event_groups(job, "nccl.ib_wc"):
        silent = "12" in (*group.values("status"), *group.values("status2"))
        if silent and not has_worked(job, group.first):
            yield finding_from_logs(
                group,
                f"The first RDMA transfer{group.on_hosts} received no response (status 12): possibly a wrong GID",
                confidence=0.75,
            )


@check(
    id="NET021",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(NcclFacts, RdmaFacts),
    uses_baseline=True,
    from_logs=(_from_logs, _unanswered),
    impacts={
        r"limited to one Ethernet segment|routers do not forward": (
            "Connections to hosts behind a router fail on the first RDMA message; within one Ethernet segment "
            "they work."
        ),
        r"^GID \d": (
            "Connections with this GID fail at setup (`Call to ibv_modify_qp failed`) or on the first RDMA message "
            "(`status=12`)."
        ),
        r"^An RDMA connection": (
            "The rank fails when it connects to its peer, and the other ranks wait for it until the timeout."
        ),
        r"no response": (
            "The rank fails because its first RDMA message is lost, and the other ranks wait for it until the timeout."
        ),
        r"could not read a RoCE": (
            "NCCL cannot use this RDMA port: the job fails when NCCL starts, or uses another network."
        ),
    },
    cases=lambda: (
        Passes("NCCL chooses the index", _job(2)),
        Passes("InfiniBand needs no index", healthy(hosts=2, per_host=2, rdma=2).environ(NCCL_IB_GID_INDEX="3")),
        Passes("the right index by hand", _job(2, "3")),
        Passes("one host", healthy(1, 2).put(_roce(0)).environ(NCCL_IB_GID_INDEX="9")),
        Passes("one process, as in the capture", _job(1).expecting(_job(2))),
        Passes("addresses of another network", _job(2).expecting(healthy(1, 1).put(_roce(0, rail=7)))),
        Fails(
            "the container has half of the table",
            _job(2, "3").put(_roce(1, gids=2), hosts=("node1",)),
            ranks=(1,),
        ),
        Fails(
            "one rank uses another RoCE version",
            _job(3, "3").environ(ranks=(2,), NCCL_IB_GID_INDEX="2"),
            ranks=(2,),
        ),
        Fails(
            "NCCL finds only link-local addresses on one host",
            _job(3).put(_roce(1, gids=2), hosts=("node1",)),
            ranks=(1,),
        ),
        Fails("two cards of one host are swapped", _crossed(), ranks=(2,)),
        Fails(
            "RoCE v1 by hand on all hosts, which works on one Ethernet segment",
            _job(2, "0"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes("RoCE v1 by hand where nothing else is there", _job(2, "0").put(_roce(0, gids=1)).put(_roce(1, gids=1))),
        Fails(
            "a left-over index of a link-local address",
            _job(2, "1"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "RoCE v1 on most hosts, and a capture with RoCE v2",
            _job(3, "2").environ(ranks=(1,), NCCL_IB_GID_INDEX="3").expecting(_job(1)),
            ranks=(0, 2),
        ),
        Fails("one process on RoCE v1, and a capture with RoCE v2", _job(1, "2").expecting(_job(1)), ranks=(0,)),
        Passes(
            "transfers that were flushed because of an earlier error",
            logged(
                "node1:41:77 [0] transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<41234> "
                "with status=5 opcode=0 len=0 vendor err 249 (Recv)"
            ),
        ),
        Fails(
            "the queue pair can't be connected",
            logged(
                "node1:41:77 [0] misc/ibvwrap.cc:300 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed "
                "out, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:10.0.0.1, "
                "remote GID ::ffff:10.0.1.2"
            ),
        ),
        Fails(
            "an index that the port does not have",
            logged(
                "node1:41:77 [0] misc/ibvwrap.cc:255 NCCL WARN Call to ibv_modify_qp failed with error Invalid "
                "argument errno 22"
            ),
        ),
        Fails(
            "no answer to the first transfer, logged by NCCL 2.7",
            logged(
                "node1:41:77 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, "
                "len 0, vendor err 129"
            ),
        ),
    ),
)
def rdma_address_unusable(job: Job) -> Iterator[Verdict]:
    """Ask whether the RoCE address (GID) that NCCL would use can reach the peers.

    Why it hurts: the connection is set up over TCP and fails on the first RDMA message: `Call to ibv_modify_qp failed
    with error Connection timed out`, `Network is unreachable`, or `Got completion ... status=12`.
    Fix: Run `unset NCCL_IB_GID_INDEX`, or set it on every host to the index that `show_gids` lists with RoCE v2 and an
    IPv4 address.
    """
    # Only the kind: addresses and subnets of another job are not a baseline.
    expected = baseline_value(job, lambda worked: (one.kind for one in _used_by_all(worked) if one.gid))
    every = list(_used_by_all(job))
    if not job.is_multi_host and not (expected and every):
        yield Skip("one host")
        return
    used: list[_ChosenGid] = []
    for one in every:
        if one.choice.port.gids:
            used.append(one)
        else:
            reason = f"the GID table of {one.choice.name} is not visible"
            yield Unknown(reason, one.identical.ranks, "run with --network host")
    judged = _judge(used) if expected is None else _judge_by(expected, used)
    yield from merge([*judged, *_on_other_rails(used)], job.place_of)


def _used_by_all(job: Job) -> Iterator[_ChosenGid]:
    for nccl, _, identical in job.each(NcclFacts, RdmaFacts, also=(SoftwareFacts, InterfaceFacts)):
        if not sends_data_by_sockets(identical) and loaded_net_plugin(nccl) is None:
            for choice in rdma_ports_of(identical):
                if choice.port.link_layer == "Ethernet":
                    index = gid_index(nccl, choice.port, nccl_release(identical))
                    gid = next((gid for gid in choice.port.gids if gid.index == index), None)
                    fixed = parse_nccl_integer(nccl.get("NCCL_IB_GID_INDEX"), -1) >= 0
                    yield _ChosenGid(choice, index, gid, identical, fixed)


def _judge(used: list[_ChosenGid]) -> Iterator[Finding]:
    counts: Counter[tuple[str, bool]] = Counter()
    for one in used:
        if one.gid is not None:
            counts[one.kind] += len(one.identical.members)
    top = counts.most_common(2)
    common = top[0][0] if len(top) == 1 or (top and top[0][1] > top[1][1]) else None
    for one in used:
        if one.gid is None:
            yield _finding(one, "is empty", None)
        elif len(counts) > 1 and one.kind != common:
            yield _finding(one, f"differs from most ports: {_brief(one.kind)}", None, usual=common)
        elif one.fixed and one.kind == ("RoCE v2", False) and any(map(is_routable_gid, one.choice.port.gids)):
            yield _finding(one, "is link-local, which routers do not forward", Severity.WARNING)
        elif one.fixed and one.kind[0] == "RoCE v1" and any(map(_is_routable_v2, one.choice.port.gids)):
            yield _finding(one, "is RoCE v1, limited to one Ethernet segment", Severity.INFO)


def _is_routable_v2(gid: Gid) -> bool:
    return gid.kind == "RoCE v2" and is_routable_gid(gid)


def _judge_by(expected: BaselineValue, used: list[_ChosenGid]) -> Iterator[Finding]:
    drifted = len({one.kind for one in used}) == 1
    for one in used:
        if one.kind != expected.value:
            fault = f"differs from the baseline: {_brief(one.kind)}" if one.gid else "is empty, unlike the baseline"
            row = BaselineDifference(
                "GID", _words(expected.value), _words(one.kind) if one.gid else "none", expected.source
            )
            told = BaselineDeviation((row,), drifted and one.gid is not None)
            yield _finding(one, fault, None, told)


def _on_other_rails(used: list[_ChosenGid]) -> Iterator[Finding]:
    """Report ports in a subnet that another device has on most hosts; NCCL pairs devices by their position."""
    subnets: dict[str, Counter[str]] = {}
    placed = [(one, subnet) for one in used if (subnet := _subnet(one)) is not None]
    for one, subnet in placed:
        subnets.setdefault(one.choice.name, Counter())[subnet] += len(one.identical.members)
    usual = {name: top for name, counts in subnets.items() if (top := _majority(counts)) is not None}
    owner = {subnet: name for name, subnet in usual.items()}
    for one, subnet in placed:
        name = one.choice.name
        if name in usual and usual[name] != subnet and owner.get(subnet, name) != name:
            fault = f"is in {subnet}, the subnet of {owner[subnet]} on other hosts"
            effect = "Connections to the same device of other hosts fail unless the two subnets are routed."
            finding = _finding(one, fault, None, shows_origin=False, effect=effect)
            fix = f"Connect {name} on {HERE} to {usual[name]}, its subnet on other hosts."
            yield finding.extended({}, fix)


def _majority(counts: Counter[str]) -> str | None:
    subnet, count = counts.most_common(1)[0]
    return subnet if count > 1 and 2 * count > sum(counts.values()) else None


def _subnet(one: _ChosenGid) -> str | None:
    interfaces = one.identical.find(InterfaceFacts)
    own = gid_address(one.gid) if one.gid else None
    for interface in interfaces.interfaces if interfaces and own else ():
        for address in interface.addresses:
            if address.address == str(own):
                return str(network_of(address))
    return None


def _words(sort: tuple[str, bool] | None) -> str:
    if sort is None:
        return "something else"
    return f"{sort[0] or 'of unknown kind'} with {'an IP' if sort[1] else 'a link-local'} address"


def _brief(sort: tuple[str, bool]) -> str:
    return f"{sort[0] or 'unknown type'} ({'IP' if sort[1] else 'link-local'})"


def _finding(
    one: _ChosenGid,
    fault: str,
    severity: Severity | None,
    told: BaselineDeviation | None = None,
    *,
    shows_origin: bool = True,
    effect: str = "",
    usual: tuple[str, bool] | None = None,
) -> Finding:
    by = "NCCL_IB_GID_INDEX" if one.fixed else "selected by NCCL"
    good = [gid.index for gid in one.choice.port.gids if _is_routable_v2(gid)]
    fix = (
        f"On {HERE}, give the interface of {one.choice.name} an IPv4 address, or start the container with `--network "
        "host`."
        if not good
        else f"export NCCL_IB_GID_INDEX={good[0]}"
    )
    return Finding(
        f"GID {one.entry} of {one.choice.name} on {HERE}{f' ({by})' if shows_origin else ''} {fault}",
        ranks=one.identical.ranks,
        severity=severity,
        evidence={
            "most ports": _words(usual) if usual else None,
            "table": [f"{gid.index}: {_short(gid)} {gid.kind}" for gid in one.choice.port.gids[:8]],
            **(told.evidence if told else {}),
        },
        effect=effect or (told.effect if told else ""),
        fix=fix,
    )


def _short(gid: Gid) -> str:
    """``fe80::1``, or ``::ffff:10.0.0.1`` for a GID that is made from an IPv4 address."""
    try:
        address = IPv6Address(gid.gid)
    except ValueError:
        return gid.gid
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)
