"""How fast ranks compute, measured for real: one on a processor that others use, and its healthy twin."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import msgspec
import pytest

from doctor.api import Severity, Status
from doctor.collectors.base import Machine
from doctor.facts import DeviceSpeedFacts, MissingReason
from doctor.probes.base import ProbeContext
from doctor.probes.devices import stage as stage_module
from doctor.probes.devices.device_worker import DeviceTask
from doctor.probes.devices.stage import DevicesOrder, DevicesStage
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import TorchChild
from doctor.probes.runtime.torch_startup import LoadedTorch
from doctor.testing.cases import healthy
from tests.probes.staged import Staged, staged

pytest.importorskip("torch")
needs_processors = pytest.mark.skipif(os.cpu_count() < 2, reason="needs two processors")
RANKS = 3
LEAST_SHARE = 0.05
"""Of a processor: three times what is left beside the processes of :func:`busy`."""


def played(benches: Mapping[int, ProbeContext] | None = None) -> Staged:
    members = healthy(RANKS, 1, gpus=0).members
    return staged(members, [DevicesStage() for _ in members], os.environ, benches or {})


def loaded(rank: int, *processors: int) -> ProbeContext:
    """What a process has at hand whose child has imported torch; it may use these processors only, if any are given."""
    bench = ProbeContext(rank, None, Machine())
    bench._child = TorchChild(dict(os.environ), processors=processors)
    bench._child.ask("load", None, LoadedTorch, 60)
    return bench


_SPIN = """
import os, pathlib, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.setpriority(os.PRIO_PROCESS, 0, -15)
own = pathlib.Path("/proc/self/autogroup")
own.exists() and own.write_text("-15")
print(flush=True)
while True: pass
"""


@contextlib.contextmanager
def busy(processor: int) -> Iterator[None]:
    """Processes spin on ``processor`` and come before others: on a busy machine usual ones would only have their share
    of it, as the ranks have elsewhere. Each is in a session of its own, between which Linux shares time first
    (sched_autogroup_enabled in sched(7))."""
    command = [sys.executable, "-c", _SPIN, str(processor)]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            spinner = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
            )
            stack.callback(spinner.kill)
            if not spinner.stdout.readline():
                pytest.skip("needs the right to put a process before others")
        yield


@needs_processors
def test_a_rank_on_a_busy_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "PAUSE", 0.1)
    benches = {0: loaded(0), 1: loaded(1, 0), 2: loaded(2)}
    with busy(processor=0):
        found = played(benches)
    samples = [rank.find(DeviceSpeedFacts).samples for rank in found.job.ranks]
    if samples[0][0].processor_share < LEAST_SHARE:
        pytest.skip(
            "too many others compute on this machine: no rank has more of it than the one with a busy processor"
        )
    [finding] = found.result("GPU024").findings
    assert (finding.severity, finding.ranks, finding.hosts) == (Severity.WARNING, (1,), ("node1",))
    assert "of CPU 0, which other processes use" in finding.evidence["cause"]
    assert finding.evidence["processor_share"] < 0.6 * finding.evidence["usual_processor_share"]
    assert "exclude" not in finding.evidence, "the host is well"
    assert [[sample.confirms for sample in own] for own in samples] == [[False, True, True]] * RANKS
    assert samples[1][0].pinned_to == (0,)


@needs_processors
def test_a_rank_bound_to_a_processor_of_its_own() -> None:
    found = played({1: loaded(1, 0)})
    result = found.result("GPU024")
    assert (result.status, result.findings) == (Status.PASS, ())
    samples = [rank.find(DeviceSpeedFacts).samples[0] for rank in found.job.ranks]
    assert {(sample.device, sample.dtype, sample.size) for sample in samples} == {("cpu", "float32", 256)}
    assert all(sample.repeats > 50 and 0 < sample.processor_share <= 1 for sample in samples)
    assert "on 3 ranks at the same time" in found.orders[1].words


def test_without_torch(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')")
    bench = ProbeContext(0, None, Machine())
    bench._child = _child_that_finds(tmp_path)
    members = healthy(1, 1, gpus=0).members
    found = staged(members, [DevicesStage()], os.environ, {0: bench})
    missing = found.job.ranks[0].missing(DeviceSpeedFacts)
    assert (missing.lack, missing.reason) == (MissingReason.ABSENT, "torch is not installed")
    assert found.result("GPU024").status is Status.SKIP
    assert len(found.orders) == 1


def _child_that_finds(folder) -> TorchChild:
    sys.path.insert(0, str(folder))
    try:
        return TorchChild(dict(os.environ))
    finally:
        sys.path.remove(str(folder))


def test_a_child_that_ends_before_it_measures() -> None:
    order = msgspec.msgpack.encode(DevicesOrder("measure", DeviceTask()))
    bench = ProbeContext(0, None, Machine())
    try:
        child = bench.torch_child()._child
        child.kill()
        child.wait()
        found = DevicesStage().take_part(order, bench, ProbeDeadline(10))
    finally:
        bench.close()
    [sample] = found.sections[DeviceSpeedFacts.key].samples
    assert (sample.seconds, bool(sample.error)) == (None, True)
