"""Steps, memory and replicas on a real CUDA device: right numbers, and nothing on the step path that waits for it."""

import math
import threading

import pytest

from doctor.monitor.telemetry.event_log import ENDED
from doctor.monitor.telemetry.memory.memory_samples import MemorySampler
from doctor.monitor.telemetry.replica.loss_tracker import TOGETHER
from doctor.monitor.telemetry.replica.replica_tracker import ReplicaTracker
from doctor.monitor.telemetry.step_clock import WINDOW, StepClock

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 1 << 20


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def no_waiting(device):
    """Whatever waits for the device raises."""
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_time_of_the_device_is_that_of_its_work(device, no_waiting):
    steps, matrix = StepClock(), torch.ones(4096, 4096, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    steps.use_device(device)
    for batch in range(WINDOW * 2):
        steps.device.begin(batch)
        steps.take([(batch * 0.1, "step", (batch, 0, batch))])
        if batch == 0:
            begin.record()
        for _ in range(4):
            matrix = matrix @ matrix
        steps.device.end()
        steps.take([(batch * 0.1 + 0.05, "data", ENDED)])
    end.record()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    steps.device.begin(2 * WINDOW)
    steps.take([(10.0, "step", (0, 0, 2 * WINDOW))])
    windows = steps.facts().windows
    assert windows[0].device == pytest.approx(begin.elapsed_time(end) / 1000 / (WINDOW * 2), rel=0.5)


def test_memory_of_a_device(device):
    memory = MemorySampler()
    memory.use_device(device)
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    memory.sample(50, 1)
    facts = memory.facts()
    assert len(kept) <= facts.allocated <= facts.peak_allocated <= facts.reserved < facts.total
    assert facts.foreign > 0, "at least the context of this process"
    assert facts.samples[0].peak == facts.peak_allocated
    assert facts.device_id
    assert facts.allocator == torch.cuda.get_allocator_backend()


def _train(replica, net, device, batches, spoilt=None):
    for batch in range(1, batches + 1):
        loss = net(torch.ones(4, 64, device=device)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        replica.loss(batch, loss * math.nan if batch == spoilt else loss)
        replica.batch_end(batch)


def test_replicas_on_a_device(device):
    checksums, initial = [], []
    for flipped in (False, False, True):
        torch.manual_seed(1)
        net, replica = (
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)).to(device),
            ReplicaTracker(5),
        )
        replica.attach(net, replicated=True, broadcast=True)
        if flipped:
            with torch.no_grad():
                net[0].weight.view(torch.int32)[3, 3] ^= 1 << 20
        torch.cuda.set_sync_debug_mode("error")
        _train(replica, net, device, 20)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(device)
        replica.batch_end(21)
        initial.append(replica.model().initial)
        checksums.append(replica.facts().checksums)
    assert len(set(initial)) == 1
    assert len(checksums[0]) == 4
    assert checksums[0] == checksums[1]
    assert not set(checksums[0]) & set(checksums[2])


def test_a_non_finite_loss_is_found_without_waiting(device, no_waiting):
    net, replica = torch.nn.Linear(64, 1, device=device), ReplicaTracker(1000)
    replica.attach(net, replicated=False, broadcast=None)
    _train(replica, net, device, TOGETHER, spoilt=3)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    replica.batch_end(TOGETHER + 1)
    (first,) = replica.facts().non_finite
    assert (first.step, first.what, first.value) == (3, "loss", "nan")
    assert replica.facts().losses == TOGETHER


def test_facts_asked_for_in_another_thread_end_no_capture_of_a_graph(device):
    memory, stop = MemorySampler(), threading.Event()
    memory.use_device(device)
    matrix = torch.ones(64, 64, device=device)
    memory.facts()

    def ask():
        while not stop.is_set():
            memory.facts()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(50):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # the strict mode, for all threads, by default
                for _ in range(100):
                    matrix = matrix @ matrix
            graph.replay()
    finally:
        stop.set()
        thread.join()
    torch.cuda.synchronize(device)
