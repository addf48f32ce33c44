"""Once a rank trains, its device is the one that it says, not the one that its local rank would address."""

import pytest

from doctor.analysis.visible_devices import (
    backend_asked,
    device_of,
    devices_of,
    on_processor,
    ordinal_of,
    shares_by_host,
    uses_nccl,
)
from doctor.core.facts import EnvironmentFacts, TrainerFacts, TrainingFacts
from doctor.testing.cases import healthy
from doctor.testing.training_run import running


def index_of(job, rank=0):
    device = devices_of(job)[job.ranks[rank]]
    assert device == device_of(job.ranks[rank])
    return device.gpu.index if device else None


@pytest.mark.parametrize(
    "name",
    [
        "0000:12:00.0",
        "00000000:12:00.0",
        "GPU-00000000-0000-0000-0000-000000000002",
        "00000000-0000-0000-0000-000000000002",
    ],
)
def test_by_bus_id_and_by_uuid_as_torch_and_the_driver_write_them(name):
    job = running(1, 4).alter(TrainingFacts, ranks=(0,), device="cuda:0", device_id=name).job()
    assert index_of(job) == 2


def test_by_number_among_the_visible_ones():
    sketch = running(1, 4).alter(TrainingFacts, ranks=(0,), device="cuda:1", device_id=None)
    assert index_of(sketch.job()) == 1
    assert index_of(sketch.environ(ranks=(0,), CUDA_VISIBLE_DEVICES="3,2").job()) == 2
    assert index_of(sketch.environ(ranks=(0,), CUDA_VISIBLE_DEVICES="3").alter(TrainingFacts, device="cuda").job()) == 3


def test_before_the_run_by_the_local_rank():
    assert index_of(healthy(1, 4).job(), 3) == 3


def test_a_run_on_the_cpu_uses_none():
    job = running(1, 2).alter(TrainingFacts, device="cpu").job()
    assert index_of(job) is None
    assert on_processor(job.ranks[0]) == "the run computes on cpu"
    assert not uses_nccl(job.ranks[0])


def test_a_run_on_a_gpu_overrules_what_was_asked_for():
    job = running(1, 2).put(TrainerFacts(accelerator="cpu")).job()
    assert on_processor(job.ranks[0]) is None


def test_the_backend_in_use_overrules_the_one_asked_for():
    job = running(1, 2).put(TrainerFacts(backend="nccl")).alter(TrainingFacts, backend="gloo").job()
    assert backend_asked(job.ranks[0]) == "gloo"


def test_shares_follow_the_devices_in_use():
    job = running(1, 2).alter(TrainingFacts, ranks=(1,), device="cuda:0", device_id="0000:10:00.0").job()
    ((_, shares),) = shares_by_host(job)
    assert [share.ranks for share in shares] == [(0, 1), ()]


def test_a_bus_id_does_not_tell_slices_apart():
    job = running(1, 1).gpu(0, mig=True).alter(TrainingFacts, device_id="0000:10:00.0").drop(EnvironmentFacts).job()
    assert index_of(job) is None


@pytest.mark.parametrize(("name", "number"), [("cuda:3", 3), ("cuda", 0), ("cpu", None), ("mps:0", None)])
def test_numbers_in_names_of_devices(name, number):
    assert ordinal_of(name) == number
