"""Memory along a run: what is read when, how samples of a long run are kept, and the numbers of a device as data."""

import mmap
import os
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest

from doctor.collectors.base import Machine
from doctor.collectors.host.cgroup import read_cgroup
from doctor.core.facts import Gpu, GpuFacts, GpuProcess, MemorySample, Missing, MissingReason
from doctor.monitor.telemetry.memory import cuda_device, memory_samples
from doctor.monitor.telemetry.memory.cuda_device import (
    AllocatorStats,
    DriverMemory,
    PeakTracker,
    call_with_timeout,
    device_ids,
    parse_allocator_stats,
)
from doctor.monitor.telemetry.memory.memory_samples import (
    LOOK_MOST,
    MOST,
    REUSED,
    UNREAD,
    MemorySampler,
    MemorySamples,
    host_available,
    merge_samples,
)
from tests.collectors.recorded import machine_at, plant

MIB = 1 << 20
OPENED = []
sys.addaudithook(lambda event, arguments: OPENED.append(arguments[0]) if event == "open" else None)


def test_a_process_without_a_device():
    torch = pytest.importorskip("torch")
    memory = MemorySampler()
    memory.use_device(torch.device("cpu"))
    memory.sample(50, 32)
    facts = memory.facts()
    assert facts.device == "cpu"
    assert facts.resident == pytest.approx(os.sysconf("SC_PAGE_SIZE") * _pages(), rel=0.2)
    assert (facts.allocated, facts.total, facts.processes, facts.foreign) == (None, None, None, None)
    (sample,) = facts.samples
    assert (sample.step, sample.units, sample.allocated) == (50, 32, None)
    assert sample.resident == facts.resident
    assert 0 < sample.host_available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert sample.at == pytest.approx(time.time(), abs=60)


def _pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_a_process_that_grows_is_seen_to_grow():
    memory = MemorySampler()
    memory.sample(50, None)
    before = memory.facts().samples[-1].resident
    with mmap.mmap(-1, 64 * MIB) as block:
        block.write(b"x" * len(block))
        memory.sample(100, None)
        samples = memory.facts().samples
    assert samples[-1].step == 100
    assert samples[-1].resident - before >= 60 * MIB
    assert samples[0].resident == before, "what was read stays with its step"


def test_children_that_were_just_looked_at_are_not_looked_at_again(monkeypatch):
    looks, now = [], [1000.0]
    monkeypatch.setattr(memory_samples, "child_processes", lambda: looks.append(now[0]) or ())
    monkeypatch.setattr(memory_samples, "monotonic", lambda: now[0])
    memory = MemorySampler()
    memory.sample(50, None)
    memory.look(now[0])
    memory.facts()
    assert len(looks) == 1
    now[0] += REUSED
    memory.facts()
    assert len(looks) == 2


def test_a_sample_touches_no_file():
    memory = MemorySampler()
    memory.facts()
    seen = len(OPENED)
    for step in range(1000):
        memory.sample(step, 1)
    assert len(OPENED) == seen
    memory.facts()
    assert len(OPENED) > seen


def test_unread_samples_are_merged_on_a_cpu():
    memory = MemorySampler()
    for step in range(50, 5000, 50):
        memory.sample(step, step % 700)
    (sample,) = memory.facts().samples
    assert (sample.step, sample.units) == (4950, 650), "units of the largest batch of all"
    assert memory.facts().samples == (sample,), "nothing new, nothing changed"


def test_unread_samples_are_bounded():
    memory = MemorySampler()
    for step in range(UNREAD * 3):
        memory.sample(step, None)
    assert len(memory._pending) == UNREAD


def test_facts_are_the_same_whoever_asks_at_the_same_time():
    memory = MemorySampler()
    stop = threading.Event()
    faults = []

    def ask():
        while not stop.is_set():
            steps = [sample.step for sample in memory.facts().samples]
            if steps != sorted(set(steps)):
                faults.append(steps)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(500):
        memory.sample(step, step)
        time.sleep(0.0002)
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert memory.facts().samples[-1].step == 499


def _on_device(step, **numbers):
    return MemorySample(step, allocated=step * MIB, reserved=4096 * MIB, **numbers)


@pytest.mark.parametrize("at_once", [1, 7, 400])
def test_a_long_run_stays_covered_from_its_begin(at_once):
    samples = MemorySamples()
    every = [_on_device(step) for step in range(50, 500_000, 50)]
    for first in range(0, len(every), at_once):
        samples.add(every[first : first + at_once])
        assert len(samples.kept) <= MOST
    steps = [sample.step for sample in samples.kept]
    assert MOST // 2 <= len(steps) <= MOST
    assert steps[0] <= 500_000 / (MOST / 2) + 50
    assert steps[-1] == 499_950
    gaps = [second - first for first, second in pairwise(steps[:-1])]
    assert max(gaps) <= 2 * min(gaps), "evenly spread"
    assert all(sample.allocated == sample.step * MIB for sample in samples.kept), "numbers stay with their step"


def test_what_is_joined_keeps_the_peak_and_the_largest_batch_of_both():
    first = _on_device(50, peak=900 * MIB, units=64, resident=10)
    second = _on_device(100, peak=None, units=32)
    assert merge_samples(first, second) == _on_device(100, peak=900 * MIB, units=64, resident=10)


def test_the_whole_run_keeps_its_highest_peak_and_largest_batch():
    samples = MemorySamples()
    for step in range(10_000):
        samples.add([_on_device(step, peak=7777 * MIB if step == 1234 else None, units=999 if step == 4321 else 8)])
    assert max(sample.peak or 0 for sample in samples.kept) == 7777 * MIB
    assert max(sample.units for sample in samples.kept) == 999


def test_a_second_fit_that_counts_from_the_begin_again_is_kept_apart():
    samples = MemorySamples()
    samples.add([_on_device(step) for step in (50, 100, 150, 50, 100)])
    assert [sample.step for sample in samples.kept] == [50, 100, 150, 50, 100]


def test_only_the_newest_sample_gets_what_is_read_now():
    samples = MemorySamples()
    samples.add([_on_device(50), _on_device(100)])
    samples.complete(MemorySample(0, resident=1, workers=2, host_available=3, device_used=4))
    samples.complete(MemorySample(0, resident=9, workers=9, host_available=9, device_used=9))
    assert [sample.resident for sample in samples.kept] == [None, 1]
    assert (samples.kept[1].workers, samples.kept[1].host_available, samples.kept[1].device_used) == (2, 3, 4)


STATISTICS = {
    "allocated_bytes": {"all": {"current": 3 * MIB, "peak": 7 * MIB, "allocated": 99, "freed": 96}, "small_pool": {}},
    "reserved_bytes": {"all": {"current": 20 * MIB, "peak": 22 * MIB}},
    "inactive_split_bytes": {"all": {"current": 2 * MIB, "peak": 5 * MIB}},
    "num_alloc_retries": 1,
    "num_ooms": 0,
}
"""The part of torch.cuda.memory_stats_as_nested_dict that is read."""


def test_the_allocators_statistics():
    assert parse_allocator_stats(STATISTICS) == AllocatorStats(3 * MIB, 20 * MIB, 7 * MIB, 22 * MIB, 2 * MIB, 1, 0)
    assert parse_allocator_stats({}) == AllocatorStats(), "before CUDA is used"


class Card:
    """The device of a rank, with numbers that the test sets."""

    def __init__(self):
        self.now = AllocatorStats(3 * MIB, 20 * MIB, 7 * MIB, 22 * MIB, 2 * MIB, 1, 0)

    def allocator(self):
        return self.now

    def free_and_total(self):
        return 40 * MIB, 80 * MIB

    backend, identity = (lambda self: "native"), (lambda self: "GPU-1")

    def processes(self):
        return (GpuProcess(7, 5 * MIB),)

    def utilization(self, since):
        return (97, 95) if since <= time.time() else ()


def test_a_device_and_what_others_hold_of_it():
    memory = MemorySampler()
    memory._device = Card()
    memory.sample(50, 32)
    memory._device.now = msgspec.structs.replace(memory._device.now, allocated=4 * MIB)
    memory.sample(100, 48)
    memory._device.now = msgspec.structs.replace(memory._device.now, peak_allocated=9 * MIB)
    memory.sample(150, 48)
    facts = memory.facts()
    assert [sample.allocated for sample in facts.samples] == [3 * MIB, 4 * MIB, 4 * MIB]
    assert [sample.peak for sample in facts.samples] == [7 * MIB, None, 9 * MIB]
    assert [sample.device_used for sample in facts.samples] == [None, None, 40 * MIB]
    assert (facts.total, facts.device_free, facts.foreign) == (80 * MIB, 40 * MIB, 20 * MIB)
    assert (facts.allocated, facts.inactive, facts.retries, facts.failures) == (4 * MIB, 2 * MIB, 1, 0)
    assert (facts.device_id, facts.allocator, facts.processes) == ("GPU-1", "native", (GpuProcess(7, 5 * MIB),))
    assert facts.utilization == (97, 95)


def test_how_busy_a_device_was_before_the_first_sample_does_not_count():
    memory = MemorySampler()
    memory._device = Card()
    assert memory.facts().utilization == ()


def test_the_peak_of_a_stretch_is_known_where_the_counter_moved():
    peaks = PeakTracker()
    assert [peaks.next(counter) for counter in (5, 5, 8, 3, 3, None, 4)] == [5, None, 8, 3, None, None, 4]


def test_names_of_a_device_are_those_that_the_driver_uses():
    uuid = "3f1c0b6e-0000-1111-2222-333344445555"
    properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert device_ids(properties) == (f"GPU-{uuid}", "0000:3b:00.0")
    assert device_ids(SimpleNamespace()) == (None, None), "torch 2.4 tells neither"


def test_the_driver_is_asked_once_a_minute_and_in_the_background(monkeypatch):
    held = (GpuProcess(11, 5), GpuProcess(12, 6))
    asked = []

    def read():
        asked.append(threading.current_thread())
        return GpuFacts(gpus=(Gpu(0, uuid="GPU-a"), Gpu(1, uuid="GPU-b", bus_id="0000:3b:00.0", processes=held)))

    driver = DriverMemory(read)
    driver.processes(("GPU-b", None))
    driver._query_thread.join(10)
    assert driver.processes(("GPU-b", None)) == driver.processes((None, "0000:3b:00.0")) == held
    assert driver.processes(("GPU-c", None)) is None
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()
    monkeypatch.setattr(cuda_device, "QUERY_EVERY", 0.0)
    driver.processes(("GPU-b", None))
    driver._query_thread.join(10)
    assert len(asked) == 2


def test_how_busy_a_device_was_is_kept_look_by_look(monkeypatch):
    monkeypatch.setattr(cuda_device, "QUERY_EVERY", 0.0)
    answers = iter([0, 90, None, *[95] * cuda_device.KEPT_QUERIES])
    driver = DriverMemory(
        lambda: GpuFacts(gpus=(Gpu(0, uuid="GPU-a", utilization=next(answers)), Gpu(1, uuid="GPU-b")))
    )

    def look():
        driver.processes(("GPU-a",))
        driver._query_thread.join(10)

    look()
    began = time.time()
    look()
    look()
    assert driver.utilization(("GPU-a", None), 0.0) == (0, 90)
    assert driver.utilization(("GPU-a", None), began) == (90,)
    assert driver.utilization(("GPU-b", None), 0.0) == driver.utilization(("GPU-c", None), 0.0) == ()
    for _ in range(cuda_device.KEPT_QUERIES):
        look()
    assert driver.utilization(("GPU-a",), 0.0) == (95,) * cuda_device.KEPT_QUERIES


def test_what_the_driver_hides_is_missing():
    driver = DriverMemory(lambda: Missing(MissingReason.HIDDEN, "no permission"))
    driver.processes(("GPU-a", None))
    driver._query_thread.join(10)
    assert driver.processes(("GPU-a", None)) is None
    assert driver.utilization(("GPU-a", None), 0.0) == ()


def test_the_real_driver_answers():
    assert isinstance(DriverMemory()._read(), (GpuFacts, Missing))


def test_a_runtime_that_is_silent_or_refuses_has_no_answer():
    for_ever = threading.Event()
    assert call_with_timeout(0.1, for_ever.wait) is None
    for_ever.set()

    def refuse():
        raise RuntimeError("CUDA error: unspecified launch failure")

    assert call_with_timeout(5.0, refuse) is None
    assert call_with_timeout(5.0, lambda: (1, 2)) == (1, 2)


def test_a_cuda_device_before_cuda_is_used_says_nothing_and_makes_no_context():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("another test uses CUDA in this process")
    memory = MemorySampler()
    memory.use_device(torch.device("cuda", 0))
    memory.sample(1, 8)
    assert memory._device.free_and_total() is None
    assert memory._device.identity() is None
    assert not torch.cuda.is_initialized()


def test_what_the_host_has_left_is_no_more_than_the_group_has(tmp_path):
    machine = plant("cgroup-v2-pod", tmp_path)
    group = read_cgroup(machine)
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.write_text("MemTotal: 536870912 kB\nMemAvailable: 268435456 kB\n")
    assert host_available(machine) == group.memory_limit - group.memory_used
    meminfo.write_text("MemTotal: 536870912 kB\nMemAvailable: 1024 kB\n")
    assert host_available(machine) == MIB


@pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: lots kB\n", "\x00\xff"])
def test_a_host_that_does_not_tell(tmp_path, text):
    machine = machine_at(tmp_path)
    (tmp_path / "proc" / "meminfo").write_text(text)
    assert host_available(machine) is None
    assert MemorySampler(machine).facts().resident is None
    assert host_available(Machine()) is not None


def test_looks_become_rare_as_a_run_lasts():
    memory, looks = MemorySampler(), []
    for tick in range(240):
        memory.sample(50 * tick, None)
        seen = len(OPENED)
        memory.look(1000 + tick / 2)
        looks += [tick / 2] if len(OPENED) > seen else []
    assert looks[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "twice a second at first"
    assert {later - earlier for earlier, later in pairwise(looks) if earlier > 40} == {LOOK_MOST}
    assert memory.facts().samples[len(looks) - 1].step == 50 * 2 * looks[-1], "each look keeps a sample"
