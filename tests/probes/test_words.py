"""Each step of each stage says before what it costs: seconds, how many at once, and bytes where some flow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import pytest

from doctor.analysis.fabric.pairing import NO_PARTNER
from doctor.api import Job
from doctor.cluster.gather.probe_schedule import ProbeOptions, full_stages
from doctor.facts import (
    Address,
    CollectiveFacts,
    DeviceSpeed,
    DeviceSpeedFacts,
    Directory,
    Interface,
    InterfaceFacts,
    PathFacts,
    PathSample,
    Reach,
    ReachFacts,
    StorageFacts,
    StorageReading,
    StorageSpeedFacts,
    StorageTrial,
    TrainerFacts,
    Transfer,
    TransferFacts,
)
from doctor.probes.ablation.stage import WhyStage
from doctor.probes.bandwidth.stage import LATE_START, TransfersStage
from doctor.probes.base import ProbeParticipant, Stage, StageOrders
from doctor.probes.collectives.group_cost import RING_TIMES, most_sent
from doctor.probes.collectives.group_driver import TURNS
from doctor.probes.collectives.group_steps import WORLD, AxisMembership, JoinGroup, TorchCapabilities
from doctor.probes.collectives.stage import GroupsStage
from doctor.probes.devices.stage import DevicesStage
from doctor.probes.reachability.stage import LightStage
from doctor.probes.runtime.cost_text import in_bytes, in_seconds
from doctor.probes.storage.stage import StorageStage
from doctor.testing import JobBuilder, healthy
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

SECONDS = re.compile(r"(\d+) s\b")
BYTES = re.compile(r"at most \d+(\.\d)? (KB|MB|GB) |, \d+(\.\d)? (KB|MB|GB) in all")
AT_ONCE = re.compile(r"\d \w+ at once|\b(all|torch|hosts) at once|at the same time|one \w+ at a time|one process")


def posts_of(job: Job, notes: Sequence[bytes] = ()) -> list[ProbeParticipant]:
    """Of all ranks; the first of each host speaks."""
    spoken: set[int] = set()
    made = []
    for place, rank in enumerate(job.ranks):
        speaks = rank.host.index not in spoken
        spoken.add(rank.host.index)
        note = notes[place] if notes else b""
        made.append(ProbeParticipant(str(place), rank, rank.host.index, speaks, 4000 if speaks else None, "word", note))
    return made


def planned(stage: Stage, job: Job, note: bytes = b"") -> StageOrders:
    orders = stage.plan(job, posts_of(job, [note] * len(job.ranks)))
    assert orders is not None
    return orders


def assert_speaks(orders: StageOrders, *, sends: bool, late: float = 0.0) -> None:
    """``late``: seconds beyond what is said."""
    seconds = SECONDS.findall(orders.words)
    assert seconds, orders.words
    assert int(seconds[-1]) >= orders.seconds - late, orders.words
    assert AT_ONCE.search(orders.words), orders.words
    assert bool(BYTES.search(orders.words)) is sends, orders.words


def test_all_stages_are_played_here():
    played = [LightStage, TransfersStage, StorageStage, DevicesStage, GroupsStage, WhyStage]
    assert [type(stage) for stage in full_stages(ProbeOptions("full", why=True))] == played


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 KB"),
        (1, "0.1 KB"),
        (5_001, "5.1 KB"),
        (64 << 20, "68 MB"),
        (134_217_728, "135 MB"),
        (3_758_096_384, "3.8 GB"),
        (10 * 10**9, "10 GB"),
        (10 * 10**9 + 1, "11 GB"),
    ],
)
def test_bytes_are_rounded_up(count, words):
    assert in_bytes(count) == words


def test_seconds_are_rounded_up():
    assert [in_seconds(seconds) for seconds in (2.0, 2.5, 17.5)] == ["2 s", "3 s", "18 s"]


def test_light_probes():
    orders = planned(LightStage(), healthy(8, 2).job())
    assert_speaks(orders, sends=True)
    assert orders.words.startswith("light probes: 8 hosts, 64 connections, at most 3.0 MB in all and 10 s; all hosts ")
    assert orders.words.endswith("all hosts at once, up to 8 connections each")


def sending(count: int, slow: int) -> Job:
    """All pairs of hosts have measured one another; one is slow to everybody."""
    sketch = healthy(count, 1)
    for own in range(count):
        peers = [peer for peer in range(count) if peer != own]
        sent = tuple(
            Transfer(
                f"node{peer}",
                "done",
                1e7 if slow in (own, peer) else 1e9 * (1 + 0.01 * peer),
                round=own ^ peer,
                address=f"10.0.0.{peer + 1}",
            )
            for peer in peers
        )
        sketch = sketch.put(TransferFacts(samples=sent), hosts=(f"node{own}",))
    return sketch.job()


def test_bandwidth():
    stage = TransfersStage()
    first = planned(stage, healthy(8, 1).job())
    again = planned(stage, sending(8, 3))
    assert_speaks(first, sends=True, late=LATE_START)
    assert_speaks(again, sends=True, late=LATE_START)
    assert "(repeated)" in again.words
    pair = planned(TransfersStage(), healthy(2, 1).job())
    assert pair.words.endswith("at most 67 MB each way a pair, 135 MB in all and 3 s"), "half of 5 s is no 2 s"


FOLDER = "/runs"


def with_folder(*more: Directory) -> JobBuilder:
    folder = Directory(FOLDER, "checkpoint", "settings", exists=True, writable=True, free=1 << 40)
    return healthy(4, 2, gpus=0).put(StorageFacts(directories=(folder, *more)))


def written(sketch: JobBuilder, slow: int, unseen: int) -> Job:
    """Each host wrote and read what the next one wrote; ``slow`` is so, and the file of ``unseen`` is not seen."""
    for host in range(4):
        trial = StorageTrial(FOLDER, "checkpoint", 8 << 20, 30.0 if host == slow else 0.1, 0.1)
        writer = (host + 1) % 4
        reading = StorageReading(FOLDER, f"node{writer}", "absent" if writer == unseen else "whole", 0.1)
        facts = StorageSpeedFacts(trials=(trial,), readings=(reading,))
        sketch = sketch.put(facts, hosts=(f"node{host}",))
    return sketch.job()


def test_storage():
    sketch, stage = with_folder(), StorageStage()
    writes = planned(stage, sketch.job())
    after = written(sketch, slow=2, unseen=1)
    reads, looks, clears, again = (planned(stage, after) for _ in range(4))
    assert stage.plan(after, posts_of(after)) is None
    for orders in (writes, reads, looks, again):
        assert_speaks(orders, sends=True)
    assert_speaks(clears, sends=False)
    assert writes.words == (
        "storage: 8 MiB from each of 4 hosts written to /runs and removed again, 4 files at once, "
        "at most 34 MB in all and 20 s"
    )
    assert reads.words == "storage: what others wrote, read by 4 hosts, 4 files at once, at most 34 MB in all and 15 s"
    assert clears.words == "storage: what 4 hosts wrote is removed, all at once, at most 5 s"
    assert "storage: what was slow once more, from each of 4 hosts, 4 files at once" in again.words


def test_storage_counts_the_files_of_all_directories():
    dumps = Directory("/dumps", "flight-recorder", "settings", exists=True, writable=True, free=1 << 40)
    orders = planned(StorageStage(), with_folder(dumps).job())
    assert "8 files at once, at most 68 MB in all" in orders.words


def speeds(sketch: JobBuilder, odd: int) -> Job:
    for rank in range(len(sketch.members)):
        seconds = 0.006 if rank == odd else 0.0015 * (1 + 0.01 * rank)
        one = DeviceSpeed(f"cuda:{rank}", "H100", "bfloat16", 8192, seconds=seconds)
        again = msgspec.structs.replace(one, confirms=True)
        sketch = sketch.put(DeviceSpeedFacts(samples=(one, again)), ranks=(rank,))
    return sketch.job()


def test_devices():
    stage, job = DevicesStage(), speeds(healthy(1, 4), odd=2)
    load = planned(stage, job)
    assert_speaks(load, sends=False)
    measure, again, last = (planned(stage, job, b"loaded") for _ in range(3))
    for orders in (measure, again, last):
        assert_speaks(orders, sends=True)
        assert "6 copies of 64 MiB to and from its GPU, at most 806 MB a rank" in orders.words
    assert "1 rank may be slow; 4 ranks measured again" in again.words


def test_devices_that_are_processors_copy_nothing():
    stage, job = DevicesStage(), healthy(1, 2, gpus=0).job()
    planned(stage, job)
    measure = planned(stage, job, b"loaded")
    assert_speaks(measure, sends=False)
    assert measure.words == ("devices: matrix products for a second on 2 ranks at the same time, at most 15 s")


def ready(**changes: object) -> bytes:
    return msgspec.msgpack.encode(TorchCapabilities(**{"backends": ("gloo",), **changes}))


@pytest.mark.parametrize("gpus", [0, 2])
def test_groups(gpus):
    stage, job = GroupsStage(), healthy(2, 2, gpus=gpus).job()
    load = planned(stage, job)
    opens = planned(stage, job, ready(devices=gpus, nccl=bool(gpus)))
    join = planned(stage, job, b"4000")
    assert_speaks(load, sends=False)
    assert_speaks(opens, sends=False)
    assert "creates a rendezvous store" in opens.words
    assert_speaks(join, sends=True)
    assert ("MiB, 2 pairs at once" in join.words) == bool(gpus)


def test_a_gpu_alone_meets_nobody():
    stage, job = GroupsStage(), healthy(1, 1).job()
    planned(stage, job)
    planned(stage, job, ready(devices=1, nccl=True))
    join = planned(stage, job, b"4000")
    assert "pair" not in join.words
    assert "at most 0 KB a rank" in join.words


def test_what_is_only_told_costs_nothing():
    stage, job = GroupsStage(), healthy(2, 1, gpus=0).put(TrainerFacts(source="fabric run", backend="mpi")).job()
    planned(stage, job)
    told = planned(stage, job, ready())
    assert told.by_token
    assert told.words == ""


def two_networks(hosts: int = 2) -> JobBuilder:
    sketch = healthy(hosts, 1)
    for host in range(hosts):
        eth1 = Interface("eth1", mtu=1500, addresses=(Address("inet", f"10.1.0.{host + 1}", 24),))
        sketch = sketch.alter(InterfaceFacts, hosts=(f"node{host}",), interfaces=lambda old, eth1=eth1: (*old, eth1))
    return sketch


def losing(sketch: JobBuilder) -> JobBuilder:
    lost = PathFacts(samples=(PathSample("node1", "10.0.0.2", full_size_arrived=False),))
    return sketch.put(lost, hosts=("node0",))


def closed(sketch: JobBuilder) -> JobBuilder:
    return sketch.put(ReachFacts(attempts=(Reach("node1", "10.0.0.2", 40000, "silent"),)), hosts=("node0",))


ROUNDED = 0.5
"""Seconds that the words of a path lack: 20.5 are said to be 20."""


def test_why_packets_are_lost():
    orders = planned(WhyStage(), losing(two_networks()).job())
    assert_speaks(orders, sends=True, late=ROUNDED)
    assert "12 connections at once" in orders.words


def test_why_a_path_is_closed():
    orders = planned(WhyStage(), closed(two_networks()).job())
    assert_speaks(orders, sends=True)
    assert "2 connections at once, at most 0.2 KB in all" in orders.words


def test_why_a_path_is_slow():
    slow = sending(6, slow=3)
    sketch = two_networks(6)
    for host in slow.hosts:
        sketch = sketch.put(host.find(TransferFacts), hosts=(host.name,))
    orders = planned(WhyStage(), sketch.job())
    assert_speaks(orders, sends=True)
    assert "one connection at a time" in orders.words


def test_a_slow_path_without_another_way_is_only_told():
    assert planned(WhyStage(), sending(6, slow=3)).words == ""


def test_why_a_device_is_slow():
    orders = planned(WhyStage(), speeds(healthy(1, 4), odd=2))
    assert_speaks(orders, sends=True)
    assert "one child at a time, at most" in orders.words
    assert "copied to and from the GPU" in orders.words


def test_why_a_collective_breaks():
    stage = WhyStage()
    job = healthy(1, 4).put(CollectiveFacts(backend="nccl", error="unhandled system error")).job()
    prepare = planned(stage, job)
    assert_speaks(prepare, sends=False)
    assert "4 processes load torch at the same time" in prepare.words
    meet = planned(stage, job, b"4000")
    assert_speaks(meet, sends=True)
    assert meet.words.startswith("why the collective is slow or fails: 4 ranks at once, at most ")


PROGRAM = """
import json, sys
import msgspec, torch, torch.distributed as dist
from doctor.probes.collectives import collective_timing, pair_exchange
from doctor.probes.collectives.group_steps import JoinGroup, ExchangeMessages, TimeCollectives, VerifyCollectives
from doctor.probes.collectives.process_group import ProcessGroupSession

collective_timing.SECONDS = collective_timing.SMALL_SECONDS = 1e9
pair_exchange.SECONDS = pair_exchange.ENOUGH_SECONDS = 1e9
times, turns, sent = int(sys.argv[1]), int(sys.argv[2]), 0

def counted(name, size):
    act = getattr(dist, name)
    def count(*given, **more):
        global sent
        sent += size(dist.get_world_size(more.get("group")), *given)
        return act(*given, **more)
    setattr(dist, name, count)

counted("all_reduce", lambda size, one: times * one.nbytes if size > 1 else 0)
counted("all_gather", lambda size, received, one: (size - 1) * one.nbytes)
counted("all_to_all_single", lambda size, received, every: (size - 1) * every.nbytes // size)
counted("batch_isend_irecv", lambda size, every: sum(one.tensor.nbytes for one in every if one.op == dist.isend))
order = msgspec.json.decode(sys.argv[3], type=JoinGroup)
session = ProcessGroupSession(order)
axes = {share.axis: share.members for share in order.shares}
done = [session.set_up(), *(session.verify(VerifyCollectives(axis)) for axis in axes)]
for turn in range(turns):
    shared = [axis for axis in axes if turn == 0 or len(axes[axis]) < order.count]
    done += [session.time(TimeCollectives(axis, turn)) for axis in shared]
done.append(session.exchange(ExchangeMessages()))
print(json.dumps([sent, [one.error or one.reason for one in done if one.error or one.reason]]), flush=True)
"""

NUMBERS = 4000
"""Bytes of the numbers that ranks agree on while they time, counted as many as there may be."""


def joined(place: int, port: int) -> JoinGroup:
    """Three ranks, the last of which is alone on one axis and rests in one round."""
    dp = (0, 1) if place < 2 else (2,)
    shares = (AxisMembership(WORLD, (0, 1, 2), 4096), AxisMembership("dp", dp, 1 << 20))
    partners = ((1, 2), (0, NO_PARTNER), (NO_PARTNER, 0))[place]
    return JoinGroup(("127.0.0.1",), port, place, 3, "gloo", "cpu", shares, 60.0, 60.0, partners=partners)


def test_what_a_rank_sends_is_counted_in_real_groups():
    """With all the time that there is, all is sent that may be: no less than said, but for a few numbers, and no
    more."""
    pytest.importorskip("torch")
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    orders = [joined(place, store.port) for place in range(3)]
    environ = {**clean_environ(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(RING_TIMES), str(TURNS)]
    processes = [
        subprocess.Popen([*command, msgspec.json.encode(order).decode()], stdout=subprocess.PIPE, env=environ)
        for order in orders
    ]
    try:
        found = [json.loads(process.communicate(timeout=patience(120))[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for order, (sent, errors) in zip(orders, found, strict=True):
        assert errors == []
        assert 0 <= most_sent(order) - sent < NUMBERS, (order.place, sent)
