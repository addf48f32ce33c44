"""Measured bandwidths compared with the rates of the links, from what drivers report.

Comparing ranks finds nothing if all of them are equally slow, or if there is nothing to compare with. Here each
measurement is compared with the rate of its own link; a link with an unknown rate is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from doctor.analysis.device_speed import LEAST_PEERS, What, kinds, samples_of, speed_of
from doctor.analysis.fabric.p2p_bandwidth import P2PBandwidth, p2p_bandwidths
from doctor.analysis.fabric.transfer_matrix import ONE_STREAM, HostBandwidths
from doctor.analysis.interface_choice import (
    CHOICE_SECTIONS,
    choice_of,
    data_goes_by_sockets,
    nccl_rdma_ports,
    what_forces_sockets,
)
from doctor.analysis.visible_devices import ordinal_of, visible_gpus
from doctor.core.facts import (
    CollectiveFacts,
    DeviceSpeed,
    DeviceSpeedFacts,
    EnvironmentFacts,
    Gpu,
    GpuFacts,
    InterfaceFacts,
    MissingReason,
    NcclFacts,
    RdmaFacts,
)
from doctor.core.job import Host, Job, Rank

LEAST_MEASURED = 2
"""The minimum number of measurements: a pair of hosts has one in each direction."""

TELLING_BYTES = 1 << 24
TELLING_TRIPS = 2
"""The duration of a message in round trips, or if these are unknown its bytes, from which its latency does not matter.
A GPU without free memory can only send shorter ones."""

COPIES: tuple[What, ...] = ("to_device", "to_host")

_LANES = {1: 2500 * 8 / 10, 2: 5000 * 8 / 10, 3: 8000 * 128 / 130, 4: 16000 * 128 / 130, 5: 32000 * 128 / 130}
"""Mb/s of one PCIe lane by generation, without the encoding: Linux drivers/pci/pci.h, PCIE_SPEED2MBS_ENC. That is 985
MB/s for generation 3, and twice the previous one after it."""
_FLIT = 64000 * 242 / 256
"""The same for generation 6, which has no encoding but sends units of 256 bytes, of which 8 are a checksum and 6
correct errors (PCI-SIG, PCI Express 6.0, FLIT mode)."""


class UniformlySlowPaths(NamedTuple):
    """All paths over TCP are slow: the ``best`` of them, and the ``roofline`` of their links, in bytes per second."""

    best: float
    roofline: float


class SlowMessages(NamedTuple):
    """All messages between ranks of different hosts are slow.

    ``best``: the message that is closest to the ``roofline`` of its own path; ``messages``: their number; ``by_rdma``:
    over RDMA ports, else over interfaces."""

    best: P2PBandwidth
    roofline: float
    by_rdma: bool
    ranks: tuple[int, ...]
    hosts: int
    messages: int


class SlowCopies(NamedTuple):
    """Slow copies between the host and the device of a rank without enough peers: their ``speeds``, and the
    ``roofline`` of the GPU's PCIe link, in bytes per second."""

    rank: int
    gpu: Gpu
    sample: DeviceSpeed
    speeds: Mapping[What, float]
    roofline: float


def pcie_rate(generation: int | None, width: int | None) -> float | None:
    """The bandwidth of a PCIe link in one direction in bytes per second; ``None`` if either value is unknown."""
    lane = {**_LANES, 6: _FLIT}.get(generation or 0)
    return lane * width * 1e6 / 8 if lane and width and width > 0 else None


def interface_rates(job: Job) -> dict[str, float]:
    """Bytes per second of the interface of each host, by host name, if it is hardware with a known speed."""
    rates: dict[str, float] = {}
    for _, same in job.each(InterfaceFacts, also=(NcclFacts, *CHOICE_SECTIONS)):
        choice = choice_of(same)
        interface = choice.first.interface if choice is not None and choice.first is not None else None
        if interface is not None and interface.physical and interface.speed and interface.speed > 0:
            rates.update(dict.fromkeys(same.hosts, interface.speed * 1e6 / 8))
    return rates


def paths_below(job: Job, known: HostBandwidths, share: float) -> UniformlySlowPaths | None:
    """The result if all paths over TCP are below ``share`` of the interfaces at both ends and of one stream."""
    if len(known.readings) < LEAST_MEASURED:
        return None
    rates = interface_rates(job)
    bounds = [
        min(ONE_STREAM, *(rates.get(known.hosts[place], 0.0) for place in (one.source, one.target)))
        for one in known.readings
    ]
    if any(one.value >= share * bound for one, bound in zip(known.readings, bounds, strict=True)):
        return None
    return UniformlySlowPaths(max(one.value for one in known.readings), max(bounds))


def messages_below(job: Job, share: float) -> SlowMessages | None:
    """The result if all messages over NCCL between hosts are slower than ``share`` of what their paths could carry.

    A path is as fast as its slower end, and an end is shared by the ranks of the host that send in the same round."""
    ranks = {rank.number: rank for rank in job.ranks}
    sent = _between_hosts(job, ranks)
    if len(sent) < LEAST_MEASURED:
        return None
    sharing: dict[tuple[int, int], set[int]] = {}
    for one in sent:
        for number in (one.source, one.target):
            sharing.setdefault((ranks[number].host.index, one.round), set()).add(number)
    ways = _HostLinks(job)
    best: tuple[float, P2PBandwidth, float, bool] | None = None
    for one in sent:
        hosts = [ranks[one.source].host, ranks[one.target].host]
        bound, by_rdma = ways.bound([(host, len(sharing[host.index, one.round])) for host in hosts])
        if bound is None or one.value >= share * bound:
            return None
        if best is None or one.value / bound > best[0]:
            best = (one.value / bound, one, bound, by_rdma)
    if best is None:
        return None
    members = tuple(sorted({number for one in sent for number in (one.source, one.target)}))
    return SlowMessages(*best[1:], members, len({ranks[number].host.index for number in members}), len(sent))


def _between_hosts(job: Job, ranks: Mapping[int, Rank]) -> list[P2PBandwidth]:
    """Messages of NCCL between machines that are long enough. Containers of one machine use no network."""
    telling = {
        (one.source, rank, one.round)
        for facts, same in job.facts(CollectiveFacts)
        if facts.backend == "nccl"
        for rank in same.ranks
        for one in facts.exchanges
        if (one.bytes >= TELLING_BYTES if one.round_trip is None else one.seconds >= TELLING_TRIPS * one.round_trip)
    }
    return [
        one
        for one in p2p_bandwidths(job)
        if (one.source, one.target, one.round) in telling
        and one.source in ranks
        and ranks[one.source].host.machine != ranks[one.target].host.machine
    ]


class _HostLinks:
    """The network links of each host: RDMA ports, or the interface if NCCL uses sockets."""

    def __init__(self, job: Job) -> None:
        self._interfaces = interface_rates(job)
        self._ports: dict[int, dict[str, float | None]] = {}
        self._sockets: set[int] = set()
        for nccl, same in job.each(NcclFacts, also=(RdmaFacts,)):
            hosts = {rank.host.index for rank in same.members}
            rdma, missing = same.find(RdmaFacts), same.missing(RdmaFacts)
            hidden = missing is not None and missing.lack is not MissingReason.ABSENT
            if (not hidden or what_forces_sockets(nccl) is not None) and data_goes_by_sockets(nccl, rdma):
                self._sockets |= hosts
                continue
            rates = {one.name: one.port.rate for one in nccl_rdma_ports(nccl, rdma)} if rdma is not None else {}
            for host in hosts:
                self._ports.setdefault(host, {}).update(rates)

    def bound(self, ends: Sequence[tuple[Host, int]]) -> tuple[float | None, bool]:
        """The bound of a message between hosts in bytes per second, and whether it uses RDMA.

        ``ends``: each host, and the number of ranks that share its links. NCCL uses one kind of network for all: if one
        end has no port, both use sockets."""
        by_rdma = not any(host.index in self._sockets for host, _ in ends)
        found = [
            self._by_ports(host, sharing) if by_rdma else self._by_interface(host, sharing) for host, sharing in ends
        ]
        rates = [rate for rate in found if rate is not None]
        return min(rates) if len(rates) == len(found) else None, by_rdma

    def _by_ports(self, host: Host, sharing: int) -> float | None:
        """At most the rate of the fastest port alone, because the port of a message is unknown."""
        known = [*self._ports.get(host.index, {}).values()]
        rates = [rate * 1e9 / 8 for rate in known if rate is not None and rate > 0]
        return min(max(rates), sum(rates) / sharing) if rates and len(rates) == len(known) else None

    def _by_interface(self, host: Host, sharing: int) -> float | None:
        """Without the bound of one stream, because NCCL may open several connections (NCCL_NSOCKS_PERTHREAD)."""
        rate = self._interfaces.get(host.name)
        return None if rate is None else rate / sharing


def copies_below(job: Job, share: float) -> tuple[SlowCopies, ...]:
    """Ranks without enough peers whose copies are slower than ``share`` of the current rate of their GPU's PCIe link.

    An idle link may have a lower generation, which makes the check more lenient."""
    alone = {
        (rank, what)
        for peers in kinds(samples_of(job, 0)).values()
        for what in COPIES
        if sum(speed_of(sample, what) is not None for sample in peers.values()) < LEAST_PEERS
        for rank, sample in peers.items()
        if speed_of(sample, what) is not None
    }
    found: dict[int, SlowCopies] = {}
    for facts, gpus, same in job.each(DeviceSpeedFacts, GpuFacts, also=(EnvironmentFacts,)):
        samples = [one for one in facts.samples if one.error is None]
        gpu = _measured_gpu(samples[0], gpus, same.find(EnvironmentFacts)) if samples else None
        roofline = pcie_rate(gpu.pcie_generation, gpu.pcie_width) if gpu is not None else None
        if gpu is None or roofline is None:
            continue
        speeds: dict[What, float] = {}
        for what in COPIES:
            measured = [speed for one in samples if (speed := speed_of(one, what)) is not None]
            # The fastest of several measurements: the others may have been disturbed.
            if measured and max(measured) < share * roofline:
                speeds[what] = max(measured)
        for rank in same.ranks:
            own = {what: speed for what, speed in speeds.items() if (rank, what) in alone}
            if own:
                found[rank] = SlowCopies(rank, gpu, samples[0], own, roofline)
    return tuple(found[rank] for rank in sorted(found))


def _measured_gpu(sample: DeviceSpeed, gpus: GpuFacts, environment: EnvironmentFacts | None) -> Gpu | None:
    ordinal, devices = ordinal_of(sample.device), visible_gpus(environment, gpus).devices
    return devices[ordinal].gpu if ordinal is not None and devices and ordinal < len(devices) else None
