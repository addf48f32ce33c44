import pytest

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.device_budget import device_budget_of, size_of, with_host_memory
from doctor.estimate.memory.non_torch import GROUP, NODES, PAIR, communicator, loading_of, outside, workspace
from doctor.facts import GpuFacts, GpuProcess, HostFacts, MigDevice, RunMemoryFacts, SoftwareFacts, TorchBuild
from doctor.knowledge.device_memory import find_devices, known_devices, near_devices
from doctor.testing import healthy
from tests.lab.cases import each_case

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * GIB),
        ("80 gib", 80 * GIB),
        ("80G", 80 * GIB),
        ("80GB", 80 * 10**9),
        ("40960MiB", 40 * GIB),
        ("1.5TiB", 1536 * GIB),
        ("512kb", 512_000),
    ],
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "80", "GiB", "-1GiB", "0GiB", "80 apples", "1e3GiB", "80GiB 3", "9" * 40 + "GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UnusableError, match="is not a valid memory size"):
        size_of(text)


@each_case("name", known_devices())
def test_every_device_is_found_by_its_own_name_and_has_less_memory_than_that_says(name):
    (found,) = find_devices(name)
    said = int(name.rpartition(" ")[2].removesuffix("GB"))
    assert 0.85 * said * GIB < found.total < said * 1.05 * GIB


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("h100 80 gb", "H100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24GB"),
        ("4090", "RTX 4090 24GB"),
        ("NVIDIA H200", "H200 141GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("H100 NVL", "H100 NVL 94GB"),
    ],
)
def test_names_as_drivers_and_people_write_them(name, known):
    assert [device.name for device in find_devices(name)] == [known]


def test_a_name_that_may_mean_two_is_asked_back():
    with pytest.raises(UnusableError, match="A100 80GB, A100 40GB"):
        device_budget_of(None, "A100", None)


def test_an_unknown_name_gets_near_ones():
    assert "H100 80GB" in near_devices("H10 80GB")
    with pytest.raises(UnusableError, match="H100 80GB"):
        device_budget_of(None, "H10 80GB", None)
    with pytest.raises(UnusableError, match="unknown device"):
        device_budget_of(None, "quantum", None)


def test_size_and_name_contradict_each_other():
    with pytest.raises(UnusableError, match="give only one"):
        device_budget_of("80GiB", "H100 80GB", None)


def test_a_capture_tells_of_the_fullest_of_the_devices_that_are_used():
    sketch = healthy(1, 4).gpu(2, memory_used=30 * GIB, memory_free=50 * GIB)
    offer = device_budget_of(None, None, sketch.job(), devices=4)
    assert (offer.memory, offer.others) == (80 * GIB, 30 * GIB)
    assert "GPU 2 has the least free memory" in " ".join(offer.notes)
    assert offer.for_one_of(2) == 25 * GIB
    assert device_budget_of(None, None, sketch.job(), devices=2).others < GIB


def test_a_capture_of_a_slice():
    sketch = healthy(1, 1).gpu(0, mig=True, mig_devices=(MigDevice("MIG-a", 0, 20 * GIB),))
    assert device_budget_of(None, None, sketch.job()).memory == 20 * GIB


def test_a_capture_gives_the_host_and_a_name_the_device():
    offer = device_budget_of(None, "A100 40GB", healthy(1, 2).drop(GpuFacts).job())
    assert offer.host is not None
    assert offer.host.ram_total == 1024 * GIB
    assert offer.others == 0
    assert with_host_memory(offer, "256GiB").host == HostFacts(
        hostname="node", ram_total=256 * GIB, ram_available=256 * GIB
    )


def test_a_capture_without_gpus_is_not_enough():
    with pytest.raises(UnusableError, match="no GPU"):
        device_budget_of(None, None, healthy(1, 2, gpus=0).job())


def test_a_capture_with_fewer_gpus_says_so():
    assert "shows 2 GPUs, the job has 8" in device_budget_of(None, None, healthy(1, 2).job(), devices=8).notes[0]


def test_what_torch_does_not_see():
    assert communicator(TrainingPlan()) == 0
    assert communicator(TrainingPlan(strategy="ddp", devices=2)) == PAIR
    assert communicator(TrainingPlan(strategy="fsdp2", devices=8)) == GROUP
    assert communicator(TrainingPlan(strategy="ddp", devices=8, nodes=2)) == NODES
    assert communicator(TrainingPlan(strategy="ddp", ranks_per_device=2)) == 0
    assert outside(TrainingPlan(), "7.5") == 141 * MIB, "as measured on a T4"
    assert outside(TrainingPlan(), "7.5") < outside(TrainingPlan(), "8.6") < outside(TrainingPlan(), "9.0") < 800 * MIB
    assert outside(TrainingPlan(), "") >= outside(TrainingPlan(), "9.0")


def test_a_context_with_all_kernels_is_larger():
    assert [loading_of(each) for each in ("11.2", "11.7", "12.8", "13.0", "")] == ["eager", *4 * ["lazy"]]
    assert outside(TrainingPlan(), "7.0", loading="eager") == 1343 * MIB > 3 * outside(TrainingPlan(), "7.0")


def test_the_workspace_of_cublas_by_generation():
    assert workspace("8.6") < 9 * MIB
    assert workspace("9.0") == workspace("10.0") == workspace("") == 32 * MIB


def test_a_captured_run_of_one_process_shows_its_context():
    def context_of(*memory, per_host=1, reserved=20 * GIB):
        processes = tuple(GpuProcess(100 + place, size) for place, size in enumerate(memory))
        run = RunMemoryFacts(reserved=reserved, processes=processes)
        sketch = healthy(1, per_host).put(run)
        return device_budget_of(None, None, sketch.job()).context

    assert context_of(20 * GIB + 700 * MIB) == 700 * MIB
    assert context_of(20 * GIB, 300 * MIB) is None, "another process may be the one"
    assert context_of(None) is None
    assert context_of() is None
    assert context_of(20 * GIB + 900 * MIB, per_host=2) is None, "buffers of NCCL are in it"
    assert outside(TrainingPlan(), "9.0", measured=700 * MIB) == 700 * MIB


def test_a_capture_says_how_kernels_are_loaded():
    def loading(cuda):
        software = SoftwareFacts(torch=TorchBuild("2.1.0", cuda=cuda))
        return device_budget_of(None, None, healthy(1, 1).put(software).job()).loading

    assert [loading(cuda) for cuda in ("11.2", "12.8", None)] == ["eager", "lazy", "lazy"]
