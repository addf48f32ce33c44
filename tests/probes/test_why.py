"""When a change counts as a cure, and which sizes of packets are tried."""

from __future__ import annotations

import pytest

from doctor.core.facts import Address, Interface, InterfaceFacts, Transfer, Trial
from doctor.probes.ablation.alternative_paths import MOST_WAYS, AlternativePath, alternative_paths
from doctor.probes.ablation.path_trials import SIZES_AT_ONCE, burst_of, sizes_between, speed_trials
from doctor.probes.ablation.trials import MOST_ROUNDS, SpeedOrder, is_improvement
from doctor.probes.bandwidth.schedule import TransferPairing, TransferSchedule
from doctor.testing.cases import healthy


@pytest.mark.parametrize(
    ("before", "after", "usual", "cures"),
    [
        ([None, None], [1.0, 1.0], None, True),
        ([None, None], [1.0, None], None, False),
        ([None, 1.0], [1.0, 1.0], None, False),
        ([1.0, 1.0], [1.0, 1.0], None, False),
        ([1.0, 1.0], [6.0, 6.0], 10.0, True),
        ([1.0, 1.0], [5.0, 5.0], 10.0, False),
        ([5.0, 5.0], [7.0, 7.0], 10.0, False),
        ([1.0, 1.0, 1.0], [9.0, 2.0, 9.0], 10.0, False),
        ([1.0, 1.0, 1.0], [2.0, 9.0, 9.0], 10.0, True),
        ([1.0], [9.0], 10.0, False),
        ([None, None], [0.0, 0.0], None, False),
        ([], [], None, False),
    ],
)
def test_a_cure_mends_twice_in_a_row(before, after, usual, cures):
    assert is_improvement(before, after, usual) is cures


def resent(faulty: int, other: int, sent: int = 4000) -> list[Trial]:
    """What is told of a way that lost so many segments in each round, and of another one."""
    meeting = TransferPairing(0, 1, "node1", "10.0.0.2", 1, "", calls=True)
    itinerary = TransferSchedule(1, 0, "", (meeting,), first=0, round_seconds=1.0, bytes=1, seconds=1.0)
    order = SpeedOrder(itinerary, (AlternativePath("other interface eth1", "", "10.1.0.2"),), 1 / 0.006, lossy=True)
    samples = [
        Transfer("node1", "done", 1e8, segments_sent=sent, segments_retransmitted=lost)
        for _ in range(MOST_ROUNDS)
        for lost in (faulty, other)
    ]
    return list(speed_trials(order, samples))


def test_a_lossy_way_is_mended_by_one_that_loses_less_than_a_finding():
    [trial] = resent(200, 0)
    assert (trial.restores, trial.before, trial.after, trial.unit) == (True, 20.0, 4000.0, "segments")


def test_a_way_that_is_lossy_too_mends_nothing():
    trial, *rest = resent(200, 60)
    assert (trial.restores, trial.error) == (False, "at most 1 % are healthy")
    assert [one.knob for one in rest] == ["not tried"]


def test_a_way_that_loses_nothing_by_now_is_mended_by_nothing():
    assert [(one.knob, one.restores) for one in resent(4, 0)] == [("nothing changed", False)]


def test_hardly_any_segments_tell_nothing():
    trial, *_ = resent(15, 0, sent=15)
    assert (trial.restores, trial.before, trial.after) == (False, None, None)


def largest(limit: int, passes: int, fails: int) -> tuple[int, int]:
    """What a search finds on a way that passes packets up to ``limit``, and in how many rounds."""
    rounds = 0
    while fails - passes > 1:
        sizes = sizes_between(passes, fails)
        assert len(sizes) <= SIZES_AT_ONCE
        assert all(passes < size < fails for size in sizes)
        passes = max([passes, *(size for size in sizes if size <= limit)])
        fails = min([fails, *(size for size in sizes if size > limit)])
        rounds += 1
    return passes, rounds


@pytest.mark.parametrize("limit", [576, 577, 1280, 1500, 4092, 8999])
def test_the_largest_size_is_found_exactly_in_few_rounds(limit):
    assert largest(limit, 576, 9000)[0] == limit
    assert largest(limit, 576, 9000)[1] <= 4


def test_a_burst_holds_several_packets_and_is_bounded():
    assert burst_of(9000) == 18000
    assert burst_of(1500) == 8 << 10
    assert burst_of(65535) == 65535 * 2


def sketch(*more: Interface):
    """Two hosts; the second one has ``more`` interfaces, whose last number the first one has one less of."""

    def own(host: int, old: tuple[Interface, ...]) -> tuple[Interface, ...]:
        return (*old, *(moved(interface, host) for interface in more))

    def moved(interface: Interface, host: int) -> Interface:
        addresses = tuple(
            Address(one.family, one.address.replace("HOST", str(host + 1)), one.prefix_length)
            for one in interface.addresses
        )
        return Interface(interface.name, interface.kind, mtu=interface.mtu, addresses=addresses)

    made = healthy(2, 1, gpus=0)
    for host in range(2):
        made = made.alter(InterfaceFacts, hosts=(f"node{host}",), interfaces=lambda old, host=host: own(host, old))
    return made.job()


def test_other_interfaces_of_a_common_subnet_are_tried_from_it():
    job = sketch(Interface("eth1", mtu=1500, addresses=(Address("inet", "10.1.0.HOST", 24),)))
    [way] = alternative_paths(job.ranks[0], job.ranks[1], "10.0.0.2")
    assert (way.source, way.address, way.mtu) == ("10.1.0.1", "10.1.0.2", 1500)
    assert way.setting == "export GLOO_SOCKET_IFNAME=eth1  # on all hosts"
    assert way.knob == "other interface eth1 (10.1.0.1 -> 10.1.0.2)"


def test_the_other_family_of_the_same_interface():
    job = sketch(Interface("eth1", addresses=(Address("inet", "10.1.0.HOST", 24), Address("inet6", "fd00::HOST", 64))))
    [way, _] = alternative_paths(job.ranks[0], job.ranks[1], "10.1.0.2")
    assert way.address == "10.0.0.2"
    ways = alternative_paths(job.ranks[0], job.ranks[1], "10.1.0.2")
    assert [one.knob for one in ways if ":" in one.address] == ["IPv6 on eth1 (fd00::1 -> fd00::2)"]


def test_bridges_that_lead_nowhere_and_link_local_addresses_are_not_tried():
    job = sketch(
        Interface("docker0", "container-bridge", addresses=(Address("inet", "172.17.0.1", 16),)),
        Interface("eth2", addresses=(Address("inet6", "fe80::HOST", 64),)),
    )
    assert alternative_paths(job.ranks[0], job.ranks[1], "10.0.0.2") == ()


def test_no_more_ways_than_the_limit():
    more = [
        Interface(f"eth{number}", addresses=(Address("inet", f"10.{number}.0.HOST", 24),)) for number in range(1, 9)
    ]
    job = sketch(*more)
    assert len(alternative_paths(job.ranks[0], job.ranks[1], "10.0.0.2")) == MOST_WAYS
