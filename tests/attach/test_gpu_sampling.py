"""GPUs while ranks are read: NVML by a fake driver that is loaded for real, and which GPU each rank uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from doctor.attach import host_reading
from doctor.attach.host_reading import HostTargets, read_targets
from doctor.attach.sampler import SamplingOptions
from doctor.attach.sources import gpu_sampling
from doctor.attach.sources.gpu_sampling import GpuSampler, with_gpus, with_xids
from doctor.collectors.base import Machine
from doctor.core.facts import AttachedGpu, GpuProcess, KernelEvent, KernelLogFacts
from tests.attach.attached import at, process
from tests.attach.readable import started
from tests.lab.nvml import FakeNvml
from tests.lab.speed import patience

SLEEPER = "import sys, time\nheld = open(sys.argv[1])\nprint('ready', flush=True)\ntime.sleep(300)\n"
Driver = Callable[..., None]


@pytest.fixture
def driver(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Sets the GPUs of this host and what their driver reports."""

    def load(*lines: str, machine: str = "eight_h100") -> None:
        for name, value in fake_nvml.environ(machine, *lines).items():
            monkeypatch.setenv(name, value)

    return load


def test_a_rank_and_its_gpu_are_read_together(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr(host_reading, "_DEVICES", (str(device),))
    monkeypatch.setattr(gpu_sampling, "collect_kernel_log", lambda _: KernelLogFacts(events=_XIDS))
    with started(SLEEPER, arguments=[str(device)]) as rank:
        driver(
            f"gpu.3.procs={rank.pid}:7000", f"gpu.0.procs={rank.pid}:500,1:9", "gpu.3.util=100", "gpu.3.power_mw=85000"
        )
        read = read_targets(HostTargets(None, (rank,)), SamplingOptions(rounds=2, interval=0.2, seconds=patience(10)))
    (one,) = read.processes
    assert (one.uses_gpu, one.gpu, one.gpu_from) == (True, 3, "processes of the GPU")
    gpu = read.gpus[3]
    assert len(read.gpus) == 8
    assert len(gpu.samples) >= 2
    assert {(sample.utilization, sample.power) for sample in gpu.samples} == {(100, 85000)}
    assert (gpu.power_limit, gpu.bus_id, gpu.xids) == (700000, "0000:13:00.0", (31,))


_XIDS = (
    KernelEvent("xid", time=1.0, code=79, device="0000:13:00"),
    KernelEvent("xid", time=1e12, code=31, device="0000:13:00"),
    KernelEvent("xid", time=1e12, code=48, device="0000:0f:00"),
    KernelEvent("oom", time=1e12),
)


def test_ranks_without_a_gpu_start_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reading, "GpuSampler", pytest.fail)
    monkeypatch.setattr(host_reading, "sample", lambda targets, _: tuple(targets))
    assert read_targets(HostTargets(None, (process(0, (at(1),)),)), SamplingOptions()).gpus == ()


def test_a_driver_that_hangs_costs_the_deadline_and_keeps_what_was_read(driver: Driver) -> None:
    driver("sleep.nvmlDeviceGetPowerUsage=60", "count=1")
    begun = time.monotonic()
    assert GpuSampler().result(1.0) == ()
    assert time.monotonic() - begun < patience(2.5)


@pytest.mark.parametrize("machine", ["driver_not_loaded", "version_mismatch", "no_permission"])
def test_a_driver_that_refuses_is_no_error(driver: Driver, machine: str) -> None:
    driver(machine=machine)
    assert GpuSampler().result(patience(5)) == ()


def test_a_lost_gpu_and_one_with_mig_cost_only_their_values(driver: Driver) -> None:
    driver("gpu.1.lost=1", "gpu.0.mig=1", "gpu.0.error.nvmlDeviceGetUtilizationRates=3", "count=3")
    read = GpuSampler().result(patience(5))
    assert [(gpu.index, gpu.mig, gpu.samples[0].utilization) for gpu in read] == [(0, True, None), (2, False, 0)]


def test_output_that_breaks_off_is_read_up_to_there() -> None:
    whole = b'[{"index":0,"samples":[{"at":1.0,"utilization":5}]}]\n'
    (gpu,) = gpu_sampling._joined(whole + whole + whole[:30])
    assert [sample.utilization for sample in gpu.samples] == [5, 5]
    assert gpu_sampling._joined(b"\xff\n[1]\nnull\n") == ()


HIDDEN = tuple(AttachedGpu(index, uuid=f"GPU-{index}", name="H100") for index in range(4))
USERS = [process(rank, (at(1),), uses_gpu=True, local_rank=rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ((None, None), [(0, "LOCAL_RANK"), (1, "LOCAL_RANK")]),
        (("2,3", "2,3"), [(2, "LOCAL_RANK"), (3, "LOCAL_RANK")]),
        (("3", "GPU-1"), [(3, "CUDA_VISIBLE_DEVICES"), (1, "CUDA_VISIBLE_DEVICES")]),
        (("1", "1"), [None, None]),
        (("9" * 30, ""), [None, None]),
    ],
)
def test_in_a_container_the_environment_shows_the_gpu_if_it_shows_one(
    visible: Sequence[str | None], found: Sequence[tuple[int, str] | None]
) -> None:
    environs = [{"HOME": "/root"} | ({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) for text in visible]
    ranks = with_gpus(USERS, HIDDEN, {rank.pid: environ for rank, environ in zip(USERS, environs, strict=True)})
    assert [(rank.gpu, rank.gpu_from) if rank.gpu_from else None for rank in ranks] == list(found)


def test_a_guessed_rank_and_one_without_memory_on_any_gpu_have_none() -> None:
    assert [rank.gpu for rank in with_gpus(USERS, HIDDEN, {})] == [None, None]
    environ = {"HOME": "/root"}
    guessed = [process(0, (at(1),), uses_gpu=True, local_rank=0, guessed=True)]
    assert with_gpus(guessed, HIDDEN, {guessed[0].pid: environ})[0].gpu is None
    listed = [AttachedGpu(0, processes=(GpuProcess(7, 100),)), AttachedGpu(1, processes=(GpuProcess(USERS[1].pid),))]
    assert [rank.gpu for rank in with_gpus(USERS, listed, {rank.pid: environ for rank in USERS})] == [None, 1]


def test_without_access_to_the_kernel_log_there_are_no_xids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_sampling, "Machine", lambda: Machine(dev=tmp_path))
    assert with_xids(HIDDEN, 0.0) == HIDDEN
