"""How fast the device of every rank computes and copies, as a stage: load torch, measure, confirm what looks slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, Literal

import msgspec

from doctor.analysis.device_speed import compare_devices, samples_of, slow_devices
from doctor.analysis.visible_devices import local_rank_of, processor_asked
from doctor.core.decoding import prepared
from doctor.core.facts import DeviceSpeed, DeviceSpeedFacts, GpuFacts, Missing, Section
from doctor.core.job import Job
from doctor.probes.base import ProbeContext, ProbeParticipant, StageOrders, StageResult
from doctor.probes.devices.device_worker import COPIES, COPY_BYTES, DeviceTask
from doctor.probes.runtime.cost_text import counted, in_bytes, in_seconds
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import ChildLost, WorkRefused
from doctor.probes.runtime.torch_startup import loaded_in

LOAD_SECONDS = 60.0
"""torch from a cold network file system takes half a minute."""
MEASURE_SECONDS = 15.0
"""A measurement takes 1.5 s; the first CUDA context and kernels of a busy host may take ten."""
USUAL_HOSTS = 7
"""Hosts without suspects that measure again with those that have some: a median of seven is right when three of them
are disturbed."""
PAUSE = 2.0
"""Seconds before the last measurement: what disturbs a processor from outside lasts longer than one."""
TURN = 0.3
"""Seconds of one rank's copies."""
MOST_TURNS = 16
_LOADED = b"loaded"


class DevicesOrder(msgspec.Struct, frozen=True):
    """Load torch, or measure as ``task`` says."""

    act: Literal["load", "measure"]
    task: DeviceTask = DeviceTask()


class DevicesStage:
    """See :class:`doctor.probes.base.Stage`. All ranks measure at the same time, as the job will compute; where one is
    slow, all ranks of its host measure once more, along with those of a few other hosts, and where it is still slow,
    again after a pause."""

    name: ClassVar[str] = "devices"
    makes: ClassVar[tuple[type[Section], ...]] = (DeviceSpeedFacts,)

    def __init__(self) -> None:
        self.most_seconds = LOAD_SECONDS + 3 * MEASURE_SECONDS
        self._step = 0
        self._ready: frozenset[str] = frozenset()

    def plan(self, job: Job, posts: Sequence[ProbeParticipant]) -> StageOrders | None:
        """Load; measure where torch is there; measure again, twice, where something is slow."""
        self._step += 1
        if self._step == 1:
            who = f"{counted(len(posts), 'rank')} at the same time"
            words = f"devices: torch is loaded in a child process on {who}, at most {in_seconds(LOAD_SECONDS)}"
            return StageOrders.of({post.token: DevicesOrder("load") for post in posts}, LOAD_SECONDS, words)
        if self._step == 2:
            self._ready = frozenset(post.token for post in posts if post.note == _LOADED)
        ready = [post for post in posts if post.token in self._ready]
        if self._step == 2:
            words = f"devices: matrix products for a second on {counted(len(ready), 'rank')} at the same time"
            return _orders([(post, _task(post)) for post in ready], words)
        if self._step == 3:
            suspects = {slow.rank for slow in slow_devices(samples_of(job, 0))}
            return _to_confirm(suspects, ready)
        if self._step == 4:
            return _to_confirm({slow.rank for slow in compare_devices(job).slow}, ready, PAUSE)
        return None

    def take_part(self, order: bytes, bench: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Do it in the child that has torch."""
        asked = msgspec.msgpack.decode(order, type=prepared(DevicesOrder))
        if asked.act == "measure":
            return _measure(asked.task, bench, deadline)
        loaded = loaded_in(bench.torch_child(), deadline.left())
        return StageResult({DeviceSpeedFacts.key: loaded}) if isinstance(loaded, Missing) else StageResult({}, _LOADED)


def _to_confirm(suspects: Collection[int], posts: Sequence[ProbeParticipant], pause: float = 0.0) -> StageOrders | None:
    """All ranks of hosts with suspects and of a few other hosts; copies by turns, so that ranks of a host that share a
    PCIe switch do not slow each other down again."""
    sick = {post.host for post in posts if post.number in suspects}
    if not sick:
        return None
    well = list(dict.fromkeys(post.host for post in posts if post.host not in sick))[:USUAL_HOSTS]
    chosen = [post for post in posts if post.host in sick or post.host in well]
    turns: Counter[int] = Counter()
    tasks = []
    for post in chosen:
        wait = TURN * min(turns[post.host], MOST_TURNS)
        turns[post.host] += 1
        tasks.append((post, msgspec.structs.replace(_task(post), confirms=True, pause=pause, wait=wait)))
    words = (
        f"devices: {counted(len(suspects), 'rank')} may be slow, {counted(len(chosen), 'rank')} measured again at the "
        "same time"
    )
    return _orders(tasks, words)


def _task(post: ProbeParticipant) -> DeviceTask:
    return DeviceTask(local_rank_of(post.rank), processor=processor_asked(post.rank) is not None)


def _orders(tasks: Sequence[tuple[ProbeParticipant, DeviceTask]], words: str) -> StageOrders | None:
    orders = {post.token: DevicesOrder("measure", task) for post, task in tasks}
    costs = f"{words}{_copies(tasks)}{in_seconds(MEASURE_SECONDS)}"
    return StageOrders.of(orders, MEASURE_SECONDS, costs) if orders else None


def _copies(tasks: Iterable[tuple[ProbeParticipant, DeviceTask]]) -> str:
    """What is copied where there are GPUs: once to warm up before :data:`COPIES`, each way. Seconds follow."""
    if all(task.processor or post.rank.find(GpuFacts) is None for post, task in tasks):
        return ", at most "
    one, both = f"{COPIES + 1} copies of {COPY_BYTES >> 20} MiB to and from its GPU", 2 * (COPIES + 1) * COPY_BYTES
    return f", and {one}, at most {in_bytes(both)} a rank and "


def _measure(task: DeviceTask, bench: ProbeContext, deadline: ProbeDeadline) -> StageResult:
    """What a device does not manage is told of it, not of the doctor: a driver that hangs is what is looked for."""
    try:
        sample = bench.torch_child().ask("device", task, DeviceSpeed, deadline.left())
    except (ChildLost, WorkRefused) as error:
        sample = DeviceSpeed("", confirms=task.confirms, error=str(error))
    return StageResult({DeviceSpeedFacts.key: DeviceSpeedFacts(samples=(sample,))})
