"""Who is asked to connect to whom, for jobs of all sizes."""

from __future__ import annotations

import msgspec
import pytest

from doctor.facts import Address, HostFacts, Interface, InterfaceFacts, Listener, MasterFacts, NameLookup
from doctor.probes.reachability.assignments import Agent, Assignment
from doctor.probes.reachability.connection_plan import ALL_PAIRS, partners, plan_light, reference_of
from doctor.probes.reachability.stage import cost_text
from doctor.testing import JobBuilder, healthy

SIZES = [*range(2, 140), 255, 256, 257, 1000, 1023, 1024, 4095, 4096]


def agents(count: int, per_host: int = 1) -> list[Agent]:
    return [Agent(host * per_host, host, 40000, f"word{host}") for host in range(count)]


def plan(sketch: JobBuilder) -> tuple[Assignment, ...]:
    job = sketch.job()
    return plan_light(job, agents(len(job.hosts), len(job.ranks) // len(job.hosts)))


@pytest.mark.parametrize("count", SIZES)
def test_partners(count: int) -> None:
    every = [partners(place, count) for place in range(count)]
    assert all(place not in own and len(set(own)) == len(own) for place, own in enumerate(every))
    assert all(place in every[other] for place, own in enumerate(every) for other in own), "one way only"
    most = count - 1 if count <= ALL_PAIRS else 2 * (count - 1).bit_length()
    assert max(map(len, every)) <= most
    assert min(map(len, every)) >= min(count - 1, 8)
    assert _reached(every) == set(range(count))


def _reached(every: list[list[int]]) -> set[int]:
    """Who can be reached from the first, step by step."""
    seen, edge = {0}, {0}
    while edge:
        edge = {other for place in edge for other in every[place]} - seen
        seen |= edge
    return seen


@pytest.mark.parametrize("count", SIZES)
def test_every_clock_is_compared_with_that_of_a_partner_on_the_way_to_the_first(count: int) -> None:
    asked = [0] * count
    for place in range(1, count):
        reference = reference_of(place, count)
        asked[reference] += 1
        assert reference in partners(place, count)
        steps = 0
        while place:
            place, steps = reference_of(place, count), steps + 1
        assert steps <= 12
    assert max(asked) <= max(ALL_PAIRS, 12)


@pytest.mark.parametrize("count", [2, 3, 32, 33, 100])
def test_assignments(count: int) -> None:
    found = plan(healthy(count, 2))
    assert [one.host for one in found] == [f"node{number}" for number in range(count)]
    for place, one in enumerate(found):
        assert [target.peer for target in one.targets] == [f"node{other}" for other in partners(place, count)]
        assert all(target.word == f"word{target.peer[4:]}" for target in one.targets)
        assert (one.reference is None) == (place == 0)
    assert [one.hold_port for one in found] == [29500] + [None] * (count - 1)
    assert all(one.master.held and one.master.peer == "node0" for one in found)
    assert plan(healthy(count, 2)) == found
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=tuple[Assignment, ...]) == found


def test_a_job_of_thousands() -> None:
    found = plan(healthy(4096, 1))
    assert len(found) == 4096
    assert max(len(one.targets) for one in found) <= 24
    assert sum(len(one.targets) + (one.master is not None) for one in found) < 110_000


def test_one_host_has_nothing_to_probe() -> None:
    assert plan(healthy(1, 8)) == ()
    assert plan_light(healthy(3, 1).job(), agents(1)) == ()


def test_assignments_keep_the_order_of_the_agents_and_leave_out_who_does_not_count() -> None:
    job = healthy(3, 2).job()
    given = [
        Agent(5, 2, 1, "c"),
        Agent(1, 0, 2, "a"),
        Agent(4, 2, 3, "again"),
        Agent(3, 1, 4, "b"),
        Agent(9, 7, 5, "nowhere"),
        Agent(9, -1, 5, "nowhere"),
    ]
    found = plan_light(job, given)
    assert [(one.rank, one.host) for one in found] == [(5, "node2"), (1, "node0"), (3, "node1")]
    assert {target.word for one in found for target in one.targets} == {"a", "b", "c"}


def dialled(sketch: JobBuilder) -> list[tuple[str | None, str | None, bool]]:
    """What node1 is dialled at."""
    return [(one.address, one.library, one.measured) for one in plan(sketch)[0].targets if one.peer == "node1"]


def test_the_address_that_nccl_or_gloo_would_dial() -> None:
    two = (
        Interface("lo", "loopback", mtu=65536, physical=False, addresses=(Address("inet", "127.0.0.1", 8),)),
        Interface("eth0", mtu=1500, addresses=(Address("inet", "10.0.0.2", 16),)),
        Interface("ib0", "infiniband", mtu=4092, addresses=(Address("inet", "10.9.0.2", 16),)),
    )
    base = healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=two)
    assert dialled(healthy(2, 1)) == [("10.0.0.2", "NCCL", True)]
    assert dialled(base) == [("10.9.0.2", "NCCL", True)]
    assert dialled(base.environ(NCCL_SOCKET_IFNAME="=eth0")) == [("10.0.0.2", "NCCL", True)]
    assert dialled(base.environ(GLOO_SOCKET_IFNAME="eth0")) == [("10.9.0.2", "NCCL", True), ("10.0.0.2", "Gloo", False)]
    assert dialled(base.environ(GLOO_SOCKET_IFNAME="ib0")) == [("10.9.0.2", "NCCL", True)]
    assert dialled(healthy(2, 1, gpus=0).environ(GLOO_SOCKET_IFNAME="eth0")) == [("10.0.0.2", "Gloo", True)]
    assert [one.burst for one in plan(base)] == [18000, 8192]


def test_an_address_where_none_would_be_dialled_or_it_would_lead_nowhere() -> None:
    for setting in ("nosuch0", "lo"):
        assert dialled(healthy(2, 1).environ(NCCL_SOCKET_IFNAME=setting)) == [("10.0.0.2", None, True)]
    link_local = (Interface("eth0", addresses=(Address("inet6", "fe80::1", 64),)),)
    assert dialled(healthy(2, 1).alter(InterfaceFacts, interfaces=link_local)) == [("10.0.0.2", None, True)]
    unseen = healthy(2, 1).drop(InterfaceFacts)
    assert dialled(unseen) == [("10.0.0.2", None, True)]
    names = (NameLookup("node1", "hostname", ("127.0.1.1", "::1")),)
    assert dialled(unseen.alter(HostFacts, names=names)) == [(None, None, True)]


def test_of_two_ranks_0_the_one_at_the_masters_address_holds_the_port() -> None:
    base = healthy(3, 1).renumbered(2, 0)
    ports = [one.hold_port for one in plan(base)]
    assert ports == [29500, None, None]
    elsewhere = base.alter(MasterFacts, ranks=(0,), is_local=False)
    assert plan(elsewhere)[0].hold_port == 29500


def test_the_port_of_the_master() -> None:
    base = healthy(3, 2)
    listener = Listener("0.0.0.0", 29500)
    seen = plan(base.alter(MasterFacts, ranks=(0,), listener=listener))
    assert [(one.hold_port, one.master.held) for one in seen] == [(None, True)] * 3
    without_zero = base.only(range(2, 6), absent=(0, 1)).job()
    found = plan_light(without_zero, [Agent(2, 0, 1, ""), Agent(4, 1, 1, "")])
    assert [(one.hold_port, one.master.held, one.master.peer) for one in found] == [(None, False, "")] * 2
    assert all(one.master is None for one in plan(base.drop(MasterFacts)))
    for wrong in (None, 0, 65536, -1):
        assert {one.master for one in plan(base.alter(MasterFacts, port=wrong))} == {None}
        assert {one.hold_port for one in plan(base.alter(MasterFacts, port=wrong))} == {None}
    own = plan(base.alter(MasterFacts, ranks=(4, 5), address="elsewhere", port=1234))
    assert (own[2].master.address, own[2].master.port, own[2].master.held) == ("elsewhere", 1234, True)


def test_the_cost_is_formatted_in_one_line() -> None:
    assert cost_text(plan(healthy(8, 4))) == (
        "light probes: 8 hosts, 64 connections, at most 3.0 MB in all and 10 s; all hosts at once, "
        "up to 8 connections each"
    )


def test_a_message_of_nonsense_is_no_agent() -> None:
    for port in (0, 65536, -1, "x"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"rank": 0, "host": 0, "port": port, "word": ""}, Agent)
