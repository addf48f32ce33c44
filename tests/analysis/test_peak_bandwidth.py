"""What was measured against what the links would carry."""

from __future__ import annotations

import msgspec
import pytest

from doctor.analysis.fabric.peak_bandwidth import copies_below, interface_rates, messages_below, paths_below, pcie_rate
from doctor.analysis.fabric.transfer_matrix import HostBandwidths, bandwidths
from doctor.api import Status
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.facts import (
    CollectiveFacts,
    DeviceSpeed,
    DeviceSpeedFacts,
    GpuFacts,
    HostFacts,
    InterfaceFacts,
    MissingReason,
    NcclFacts,
    NcclPlugin,
    RdmaFacts,
    TransferFacts,
)
from doctor.testing import healthy
from doctor.testing.collective_timings import exchanged
from doctor.testing.host_transfers import transferred

SHARE = 0.2
INFINIBAND, ETHERNET = 50e9, 12.5e9
"""Of one port and of the interface of a healthy job, bytes a second."""


@pytest.mark.parametrize(
    ("generation", "width", "megabytes"),
    [(1, 1, 250), (2, 4, 2000), (3, 1, 985), (3, 16, 15754), (4, 16, 31508), (5, 16, 63015), (6, 16, 121000)],
)
def test_what_a_pcie_link_carries(generation: int, width: int, megabytes: int) -> None:
    assert pcie_rate(generation, width) == pytest.approx(megabytes * 1e6, rel=0.001)


@pytest.mark.parametrize(("generation", "width"), [(None, 16), (5, None), (0, 16), (5, 0), (99, 16), (5, -1)])
def test_no_rate_is_guessed(generation: int | None, width: int | None) -> None:
    assert pcie_rate(generation, width) is None


# Paths over TCP.


@pytest.mark.parametrize(
    ("hosts", "usual", "below"), [(2, 0.1, True), (2, 0.6, False), (4, 0.1, True), (4, 0.6, False)]
)
def test_paths(hosts: int, usual: float, below: bool) -> None:
    job = transferred(hosts, usual=usual * 1.25e9).job()
    slow = paths_below(job, bandwidths(job), SHARE)
    assert (slow is not None) == below
    if slow is not None:
        assert slow.roofline == 1.25e9
        assert slow.best == pytest.approx(0.125e9, rel=0.1)


def test_one_path_that_is_well_is_enough() -> None:
    job = transferred(2, lambda source, *_: source == 0, share=0.1).job()
    assert paths_below(job, bandwidths(job), SHARE) is None


def test_a_slow_interface_carries_less_than_a_stream() -> None:
    sketch = _at_speed(transferred(2, usual=0.1e9), 1000)
    job = sketch.job()
    assert interface_rates(job) == {"node0": 125e6, "node1": 125e6}
    assert paths_below(job, bandwidths(job), SHARE) is None


def test_one_way_alone_tells_nothing() -> None:
    job = transferred(2, usual=1e6).job()
    known = bandwidths(job)
    assert paths_below(job, known, SHARE) is not None
    assert paths_below(job, HostBandwidths(known.hosts, known.readings[:1], ()), SHARE) is None


@pytest.mark.parametrize("speed", [None, 0, -1])
def test_an_interface_without_a_speed(speed: int | None) -> None:
    job = _at_speed(transferred(2, usual=1e6), speed).job()
    assert paths_below(job, bandwidths(job), SHARE) is None


def _at_speed(sketch, speed, **chosen):
    def change(old):
        return tuple(msgspec.structs.replace(one, speed=speed) if one.name == "eth0" else one for one in old)

    return sketch.alter(InterfaceFacts, interfaces=change, **chosen)


# Messages over NCCL.


def met(share: float, *, rate: float = INFINIBAND, ports: int = 2, ranks: int = 2, hosts: int = 2, backend="nccl"):
    """Hosts with InfiniBand, between which messages have that share of a port."""
    return exchanged(hosts=hosts, per_host=ranks, rdma=ports, between=share * rate, backend=backend)


@pytest.mark.parametrize("hosts", [2, 4])
def test_messages_over_rdma(hosts: int) -> None:
    slow = messages_below(met(0.1, hosts=hosts).job(), SHARE)
    assert slow is not None
    assert (slow.by_rdma, slow.roofline, slow.hosts, slow.ranks) == (True, INFINIBAND, hosts, tuple(range(2 * hosts)))
    assert slow.best.value == pytest.approx(0.1 * INFINIBAND, rel=0.05)
    assert messages_below(met(0.6, hosts=hosts).job(), SHARE) is None


def test_messages_over_the_interface() -> None:
    slow = messages_below(met(0.1, rate=ETHERNET, ports=0, ranks=1).job(), SHARE)
    assert slow is not None
    assert (slow.by_rdma, slow.roofline) == (False, ETHERNET)
    assert messages_below(met(0.6, rate=ETHERNET, ports=0, ranks=1).job(), SHARE) is None


def test_ranks_that_share_a_port_have_a_part_of_it_each() -> None:
    assert messages_below(met(0.1, ports=1, ranks=8).job(), SHARE) is None
    slow = messages_below(met(0.1 / 8, ports=1, ranks=8).job(), SHARE)
    assert slow is not None
    assert slow.roofline == INFINIBAND / 8


def test_ranks_that_share_an_interface_have_a_part_of_it_each() -> None:
    assert messages_below(met(0.1, rate=ETHERNET, ports=0, ranks=8).job(), SHARE) is None
    slow = messages_below(met(0.1 / 8, rate=ETHERNET, ports=0, ranks=8).job(), SHARE)
    assert slow is not None
    assert slow.roofline == ETHERNET / 8


def test_more_ports_than_ranks_do_not_make_a_message_faster() -> None:
    slow = messages_below(met(0.1, ports=8, ranks=1).job(), SHARE)
    assert slow is not None
    assert slow.roofline == INFINIBAND


def test_ports_that_are_known_to_be_unused_are_no_measure() -> None:
    """NET019 speaks of them; what is left is the interface, of which this is 40 %."""
    sketch = met(0.1, ranks=1)
    assert messages_below(sketch.job(), SHARE) is not None
    assert messages_below(sketch.environ(NCCL_IB_DISABLE="1").job(), SHARE) is None
    slow = messages_below(met(0.01, ranks=1).environ(NCCL_IB_DISABLE="1").job(), SHARE)
    assert slow is not None
    assert (slow.by_rdma, slow.roofline) == (False, ETHERNET)


def test_where_one_host_has_no_port_both_use_sockets() -> None:
    sketch = met(0.1, ranks=1).drop(RdmaFacts, hosts=("node1",))
    assert messages_below(sketch.job(), SHARE) is None
    slow = messages_below(met(0.01, ranks=1).drop(RdmaFacts, hosts=("node1",)).job(), SHARE)
    assert slow is not None
    assert not slow.by_rdma


def test_the_slower_end_counts() -> None:
    sketch = _at_speed(met(0.1, rate=1.25e9, ports=0, ranks=1), 10_000, hosts=("node1",))
    slow = messages_below(sketch.job(), SHARE)
    assert slow is not None
    assert slow.roofline == 1.25e9


def test_a_port_that_nccl_shall_not_take() -> None:
    sketch = met(0.05, ranks=2, ports=2).environ(NCCL_IB_HCA="=mlx5_1")
    slow = messages_below(sketch.job(), SHARE)
    assert slow is not None
    assert slow.roofline == INFINIBAND / 2, "two ranks share the other one"


def test_one_message_that_is_well_is_enough() -> None:
    sketch = exchanged(lambda source, target: {source, target} != {0, 2}, hosts=2, per_host=2, rdma=2, between=40e9)
    assert messages_below(sketch.job(), SHARE) is None


@pytest.mark.parametrize("rate", [None, 0.0])
def test_a_port_without_a_rate(rate: float | None) -> None:
    def change(devices):
        ports = tuple(msgspec.structs.replace(port, rate=rate) for port in devices[0].ports)
        return (msgspec.structs.replace(devices[0], ports=ports), *devices[1:])

    assert messages_below(met(0.01).alter(RdmaFacts, hosts=("node0",), devices=change).job(), SHARE) is None


def test_what_is_hidden_is_not_judged() -> None:
    slow = met(0.01)
    assert messages_below(slow.job(), SHARE) is not None
    assert messages_below(slow.drop(RdmaFacts, MissingReason.HIDDEN).job(), SHARE) is None
    assert messages_below(slow.drop(NcclFacts).job(), SHARE) is None
    without = slow.drop(RdmaFacts)
    assert messages_below(without.job(), SHARE) is not None
    assert messages_below(_at_speed(without, None).job(), SHARE) is None
    plugin = (NcclPlugin("net", "aws-ofi", path="/opt/libnccl-net.so"),)
    assert messages_below(without.alter(NcclFacts, plugins=plugin).job(), SHARE) is None


def test_other_back_ends_and_one_host_need_no_such_link() -> None:
    assert messages_below(met(0.01, backend="gloo").job(), SHARE) is None
    assert messages_below(met(0.01, hosts=1).job(), SHARE) is None
    assert messages_below(healthy(2, 2, rdma=2).job(), SHARE) is None


def test_containers_of_one_machine_need_no_network() -> None:
    same = {"machine_id": "one", "boot_id": "one"}
    assert messages_below(met(0.01).alter(HostFacts, **same).job(), SHARE) is None


@pytest.mark.parametrize(
    ("change", "judged"),
    [
        ({}, True),
        ({"bytes": 1 << 16, "seconds": 150e-6}, False),
        ({"bytes": 1 << 16, "seconds": 150e-6, "round_trip": 100e-6}, False),
        ({"bytes": 1 << 16, "seconds": 20e-3, "round_trip": 100e-6}, True),
    ],
)
def test_messages_that_are_mostly_latency_tell_nothing(change: dict[str, float], judged: bool) -> None:
    def changed(old):
        return tuple(msgspec.structs.replace(one, **change) for one in old)

    sketch = met(0.1)
    for rank in range(4):
        sketch = sketch.alter(CollectiveFacts, ranks=(rank,), exchanges=changed)
    assert (messages_below(sketch.job(), SHARE) is not None) == judged


# What NET014 makes of it.


def judged(sketch):
    check = next(check for check in builtin_checks() if check.id == "NET014")
    (result,) = examine_job(sketch.job(), CheckRegistry((check,)))
    return result


def test_two_hosts_that_are_well_are_not_compared() -> None:
    result = judged(transferred(2))
    assert (result.status, result.reason) == (Status.SKIP, "fewer than three paths were measured")


def test_an_interface_that_is_slow_by_tcp_and_by_nccl_is_told_once() -> None:
    by_tcp = transferred(2, usual=0.1e9)

    def with_tcp(sketch):
        for member in by_tcp.members:
            sketch = sketch.put(member.sections[TransferFacts.key], ranks=(member.rank,))
        return sketch

    (by_interface,) = judged(with_tcp(met(0.01, rate=ETHERNET, ports=0, ranks=1))).findings
    assert "NCCL" not in by_interface.summary
    _, by_rdma = judged(with_tcp(met(0.01, ranks=1))).findings
    assert "RDMA" in by_rdma.summary


# Copies between host and device.

LINK = 63.015e9


def copied(*shares: float, **changes: object):
    """Ranks of one host whose copies have those shares of what PCIe 5.0 x16 carries."""
    sketch = healthy(1, len(shares))
    for rank, share in enumerate(shares):
        values = {
            "device": f"cuda:{rank}",
            "name": "H100",
            "size": 8192,
            "seconds": 0.001,
            "to_device": share * LINK,
            "to_host": share * LINK,
        }
        sample = DeviceSpeed(**{**values, **changes})  # type: ignore[arg-type]
        sketch = sketch.put(DeviceSpeedFacts(samples=(sample,)), ranks=(rank,))
    return sketch


def below(sketch) -> list[int]:
    return [one.rank for one in copies_below(sketch.job(), SHARE)]


def test_copies_of_those_without_peers() -> None:
    assert below(copied(0.1)) == [0]
    assert below(copied(0.6)) == []
    assert below(copied(0.6, 0.1)) == [1]
    assert below(copied(0.1, 0.1)) == [0, 1]
    assert below(copied(0.1, 0.1, 0.1)) == [], "three are compared with one another"


def test_what_is_told_of_them() -> None:
    (slow,) = copies_below(copied(0.1, to_host=0.5 * LINK).job(), SHARE)
    assert dict(slow.speeds) == {"to_device": pytest.approx(0.1 * LINK)}
    assert slow.roofline == pytest.approx(LINK, rel=0.001)
    assert slow.gpu.index == 0


def test_the_link_as_it_is_now() -> None:
    assert below(copied(0.11).gpu(0, pcie_width=8)) == [], "22 % of half as many lanes"
    assert below(copied(0.09).gpu(0, pcie_width=8)) == [0]
    assert below(copied(0.1).gpu(0, pcie_generation=1)) == []


@pytest.mark.parametrize("change", [{"pcie_width": None}, {"pcie_generation": None}, {"pcie_generation": 0}])
def test_a_link_that_is_not_known(change: dict[str, int | None]) -> None:
    assert below(copied(0.1).gpu(0, **change)) == []
    assert below(copied(0.1, 0.1).gpu(0, **change)) == [1]


def test_the_gpu_is_the_one_that_the_process_sees() -> None:
    sketch = copied(0.1).environ(CUDA_VISIBLE_DEVICES="0")
    assert below(sketch) == [0]
    two = healthy(1, 1, gpus=2).environ(CUDA_VISIBLE_DEVICES="1").gpu(1, pcie_width=1)
    slow = copied(0.1).members[0].sections[DeviceSpeedFacts.key]
    assert below(two.put(slow)) == [], "its own link has one lane"
    assert below(two.gpu(1, pcie_width=16).gpu(0, pcie_width=1).put(slow)) == [0]


def test_once_fast_is_fast() -> None:
    samples = tuple(
        DeviceSpeed("cuda:0", "H100", to_device=share * LINK, to_host=share * LINK, confirms=share > 0.5)
        for share in (0.1, 0.6)
    )
    assert below(healthy(1, 1).put(DeviceSpeedFacts(samples=samples[:1]))) == [0]
    assert below(healthy(1, 1).put(DeviceSpeedFacts(samples=samples))) == []


def test_what_was_not_measured() -> None:
    assert below(copied(0.1, error="CUDA error")) == []
    assert below(copied(0.1, to_device=None, to_host=None)) == []
    assert below(copied(0.1).drop(GpuFacts)) == []
    assert below(copied(0.1, device="cpu")) == []
