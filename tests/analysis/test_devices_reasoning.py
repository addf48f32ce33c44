"""Which GPU a rank will use, against torch's own reading of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import random

import pytest

from doctor.analysis.visible_devices import (
    backend_asked,
    bound_per_task,
    bus_key,
    device_of,
    devices_of,
    gpu_of,
    has_own_gpus,
    is_data_centre,
    is_foreign,
    on_processor,
    parse_visible_devices,
    sees_host_processes,
    shares,
    shares_by_host,
    shares_by_machine,
    uses_nccl,
    visible_gpus,
)
from doctor.core.facts import (
    EnvironmentFacts,
    Gpu,
    GpuFacts,
    GpuProcess,
    HostFacts,
    KernelEvent,
    KernelLogFacts,
    LaunchFacts,
    MigDevice,
    Namespace,
    ProcessFacts,
    SlurmFacts,
    SoftwareFacts,
    TorchBuild,
    TrainerFacts,
    Variable,
)
from doctor.knowledge.xid_catalog import ACTIONS, xid
from doctor.testing.cases import healthy
from doctor_checks.devices._xid_events import xids_of
from doctor_checks.devices.assignment.visible_devices_invalid import fault_text
from tests.lab.cases import each_case

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f937-0000-4106-c12f-20bd9faed9f7",
    "GPU-1111aaaa-d72c-4106-c12f-20bd9faed9f8",
    "GPU-2222bbbb-d72c-4106-c12f-20bd9faed9f9",
]
FOUR = GpuFacts(gpus=tuple(Gpu(index, uuid, "NVIDIA H100") for index, uuid in enumerate(UUIDS)))


def environment(**variables: str) -> EnvironmentFacts:
    return EnvironmentFacts(variables=tuple(Variable(name, value) for name, value in variables.items()))


def indices(text: str | None, gpus: GpuFacts = FOUR, **more: str) -> tuple[int, ...] | None:
    given = environment(**more) if text is None else environment(CUDA_VISIBLE_DEVICES=text, **more)
    found = visible_gpus(given, gpus).gpus
    return None if found is None else tuple(gpu.index for gpu in found)


@each_case(
    ("text", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,1", (2, 1)),
        ("0,2,-1,1", (0, 2)),
        ("0,0", ()),
        ("0, 1", (0, 1)),
        ("1,9,2", (1,)),
        ("0 1", (0,)),
        ("x,0", ()),
        ("0,", (0,)),
        (UUIDS[3], (3,)),
        ("GPU-1111", (2,)),
        ("GPU-8932", ()),
        ("GPU-8932f937-d,GPU-2222", (0, 3)),
        ("GPU-1111,GPU-ffff,GPU-2222", (2,)),
        ("GPU-1111,GPU-1111aaaa", ()),
        ("GPU-1111,0", (2,)),
        ("0,GPU-1111", (0,)),
        ("99999999999999999999", ()),
    ],
)
def test_what_cuda_shows(text: str | None, expected: tuple[int, ...]) -> None:
    assert indices(text) == expected


def test_no_value_breaks_the_reading() -> None:
    for text in ("+", "-", "9" * 5000, "\u0661,0", ",,,", "GPU-", "MIG-", "0,\n1", "\x00"):
        assert visible_gpus(environment(CUDA_VISIBLE_DEVICES=text), FOUR).size is not None, text


def test_the_same_as_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch.cuda")
    words = [
        "0",
        "1",
        "2",
        "3",
        "9",
        "00",
        "-1",
        "",
        " 1",
        "1x",
        "x",
        "-2",
        "+1",
        *UUIDS,
        "GPU-8932",
        "GPU-2222",
        "GPU-ff",
    ]
    chance = random.Random(7)
    for _ in range(3000):
        text = ",".join(chance.choice(words) for _ in range(chance.randint(1, 5)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        read = cuda._parse_visible_devices()
        if read and isinstance(read[0], str):
            expected = cuda._transform_uuid_to_ordinals(read, UUIDS)
        else:
            there = [position for position, index in enumerate(read) if index >= len(UUIDS)]
            expected = read[: there[0]] if there else read
        assert indices(text) == tuple(expected), text


@pytest.mark.parametrize("text", ["0,1", " 2", "0,", "0,1,-1", "", " ", "-1", "nodevfiles", "none", "GPU-1,GPU-2"])
def test_sound_values_have_no_fault(text: str) -> None:
    assert parse_visible_devices(text).fault is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,-1,1", "contains '-1', which is not a device: CUDA stops there and ignores 1"),
        ("0,a", "contains 'a', which is not a device: CUDA stops there"),
        ("0,,1", "contains '', which is not a device: CUDA stops there and ignores 1"),
        ("1,1", "repeats device 1"),
        ("1,01", "repeats device 1"),
        ("0;1", "reads only 0"),
        ('"0,1"', "CUDA stops there"),
        ("GPU-1, GPU-2", "contains ' GPU-2', which is not a device: CUDA stops there"),
        ("GPU-1,GPU-1", "repeats device GPU-1"),
    ],
)
def test_faults_are_named(text: str, words: str) -> None:
    fault = parse_visible_devices(text).fault
    assert fault
    assert words in fault_text(fault, 2)


def test_different_models_are_not_guessed() -> None:
    mixed = GpuFacts(gpus=(Gpu(0, "GPU-a", "NVIDIA T400"), Gpu(1, "GPU-b", "NVIDIA H100")))
    seen = visible_gpus(environment(), mixed)
    assert (seen.gpus, seen.size) == (None, 2)
    assert "models" in seen.why
    assert indices(None, mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID") == (0, 1)
    assert indices("GPU-b", mixed) == (1,)


def test_one_slice_is_visible() -> None:
    cut = (MigDevice("MIG-a", 0), MigDevice("MIG-b", 1))
    sliced = GpuFacts(gpus=(Gpu(0, "GPU-a", "A100", mig=True, mig_devices=cut), Gpu(1, "GPU-b", "A100")))
    for text, uuid in (("MIG-b", "MIG-b"), ("MIG-b,MIG-a", "MIG-b"), ("0", "MIG-a"), ("1", "GPU-b")):
        devices = visible_gpus(environment(CUDA_VISIBLE_DEVICES=text), sliced).devices
        assert devices is not None
        assert [device.uuid for device in devices] == [uuid]
    assert visible_gpus(environment(), sliced).devices is None
    assert visible_gpus(environment(CUDA_VISIBLE_DEVICES="MIG-x"), sliced).size == 0
    old = visible_gpus(environment(CUDA_VISIBLE_DEVICES="MIG-GPU-a/1/0"), sliced).devices
    assert old is not None
    assert old[0].gpu.index == 0


def test_local_ranks_address_devices() -> None:
    job = healthy(hosts=2, per_host=2).environ(ranks=(2, 3), CUDA_VISIBLE_DEVICES="1,0").job()
    assert [gpu.index if (gpu := gpu_of(rank)) else None for rank in job.ranks] == [0, 1, 1, 0]
    few = healthy(per_host=3, gpus=2).job()
    assert [gpu.index if (gpu := gpu_of(rank)) else None for rank in few.ranks] == [0, 1, None]
    one = healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="1").job()
    assert [gpu.index if (gpu := gpu_of(rank)) else None for rank in one.ranks] == [1, 1]


def test_who_computes_on_the_processor() -> None:
    base = healthy(per_host=1)
    plain = base.job().ranks[0]
    assert on_processor(plain) is None
    assert device_of(plain) is not None
    assert uses_nccl(plain)
    for sketch in (
        base.environ(CUDA_VISIBLE_DEVICES=""),
        base.put(TrainerFacts(accelerator="cpu")),
        base.alter(SoftwareFacts, torch=TorchBuild("2.8.0+cpu")),
        base.environ(ACCELERATE_USE_CPU="true"),
    ):
        rank = sketch.job().ranks[0]
        assert on_processor(rank)
        assert device_of(rank) is None
        assert not uses_nccl(rank)
    assert not uses_nccl(base.put(TrainerFacts(backend="gloo")).job().ranks[0])


def test_the_old_variable_counts_for_old_lightning_alone() -> None:
    asked = healthy(per_host=1).environ(PL_TORCH_DISTRIBUTED_BACKEND="gloo")
    assert backend_asked(asked.job().ranks[0]) is None
    old = asked.alter(SoftwareFacts, packages=())
    assert backend_asked(old.job().ranks[0]) == "gloo"


def test_slurm_binds_tasks() -> None:
    assert not bound_per_task(healthy(per_host=2).launched(SLURM_NTASKS="2").job().ranks[0])
    assert bound_per_task(healthy(per_host=2).launched(SLURM_GPUS_PER_TASK="1").job().ranks[0])
    assert not has_own_gpus(healthy(per_host=2).launched(SLURM_GPUS_PER_TASK="1").job().ranks[0])
    assert has_own_gpus(healthy(per_host=2).by_srun().launched(SLURM_GPUS_PER_TASK="1").job().ranks[0])
    assert bound_per_task(healthy(per_host=2).launched(SLURM_TRES_PER_TASK="gres/gpu:1").job().ranks[0])
    assert not bound_per_task(healthy(per_host=2).launched(SLURM_TRES_PER_TASK="cpu=4").job().ranks[0])
    assert not bound_per_task(healthy(per_host=2).launched(SLURM_GPU_BIND="none").job().ranks[0])


def test_what_slurmd_did_counts_for_more_than_what_sbatch_was_asked() -> None:
    base = healthy(per_host=2).by_srun()
    assert bound_per_task(base.launched(SLURMD_TRES_BIND="gpu:per_task:1").job().ranks[0])
    asked = base.launched(SLURM_GPUS_PER_TASK="1", SLURMD_TRES_BIND="gpu:none")
    assert not bound_per_task(asked.put(SlurmFacts(gpus_per_task=1)).job().ranks[0])


def test_shares_of_launched_ranks_and_of_a_lone_process() -> None:
    (local,) = healthy(per_host=2, gpus=4).job().by_host()
    assert [share.ranks for share in shares(local)] == [(0,), (1,), (), ()]
    (lone,) = healthy(per_host=1, gpus=4).environ(CUDA_VISIBLE_DEVICES="2,3").job().by_host()
    assert [share.ranks for share in shares(lone)] == [(), (), (0,), (0,)]
    (hidden,) = healthy(per_host=1, gpus=2).environ(CUDA_VISIBLE_DEVICES="").job().by_host()
    assert [share.ranks for share in shares(hidden)] == [(), ()]


def test_containers_of_one_machine_show_its_gpus_once() -> None:
    job = (
        healthy(hosts=2, per_host=1, gpus=2)
        .alter(HostFacts, boot_id="one")
        .put(healthy(per_host=1, gpus=2).job().hosts[0].find(GpuFacts))
        .alter(LaunchFacts, ranks=(1,), local_rank=1)
        .job()
    )
    assert len(shares_by_host(job)) == 2
    ((machine, found),) = shares_by_machine(job)
    assert [share.ranks for share in found] == [(0,), (1,)]
    assert machine.ranks == (0, 1)
    assert devices_of(job) is devices_of(job)


@pytest.mark.parametrize(
    ("namespace", "container", "expected"),
    [
        ("pid:[4026531836]", None, True),
        ("pid:[4026531836]", "kubernetes", True),
        ("pid:[4026532841]", None, False),
        ("pid:[0]", "docker", False),
        ("pid:[0]", None, True),
    ],
)
def test_whose_process_ids(namespace: str, container: str | None, expected: bool) -> None:
    sketch = healthy(per_host=1).alter(HostFacts, container=container)
    (local,) = sketch.alter(ProcessFacts, namespaces=(Namespace("pid", namespace),)).job().by_host()
    assert sees_host_processes(local) is expected


def test_foreign_processes() -> None:
    assert is_foreign(GpuProcess(7), {7: 0}, host_ids=True) is False
    assert is_foreign(GpuProcess(8), {7: 0}, host_ids=True) is True
    assert is_foreign(GpuProcess(7), {7: 0}, host_ids=False) is None
    assert is_foreign(GpuProcess(8, name="python"), {7: 0}, host_ids=False) is True


@each_case(
    ("name", "expected"),
    [
        *(
            (name, True)
            for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB", "Tesla T4")
        ),
        *((name, True) for name in ("NVIDIA L40S", "NVIDIA GB200", "NVIDIA GH200 480GB", "NVIDIA A10G", "NVIDIA B200")),
        *((name, False) for name in ("NVIDIA GeForce RTX 4090", "NVIDIA RTX A6000", "NVIDIA T400", "Quadro P400")),
        *((name, False) for name in ("NVIDIA TITAN V", "NVIDIA RTX 6000 Ada Generation", "NVIDIA GeForce MX150", "")),
    ],
)
def test_models_for_servers(name: str, expected: bool) -> None:
    assert is_data_centre(Gpu(0, name=name)) is expected


def test_spellings_of_a_pci_address() -> None:
    assert bus_key("00000000:3B:00.0") == bus_key("0000:3b:00.0") == bus_key("0000:3b:00") == "0000:3b:00"
    assert bus_key("0001:3b:00.0") != bus_key("0000:3b:00.0")


def test_every_xid_says_what_to_do() -> None:
    known = {code: found for code in range(1, 200) if (found := xid(code)) is not None}
    assert len(known) > 100
    assert all(found.meaning and found.action in ACTIONS for found in known.values())
    assert {code for code, found in known.items() if found.kind == "nvlink"} == {74, *range(144, 151)}
    assert {48, 63, 64, 92, 94, 95} <= {code for code, found in known.items() if found.kind == "memory"}
    assert {13, 31, 43, 45} <= {code for code, found in known.items() if found.kind == "application"}
    assert [code for code, found in known.items() if found.kind == "lost"] == [79]
    assert xid(7) is None


def test_xids_are_folded_by_code_and_device() -> None:
    events = (
        KernelEvent("xid", 10.0, 119, "0000:11:00", text="first"),
        KernelEvent("xid", 50.0, 119, "0000:11:00", text="last"),
        KernelEvent("xid", 12.0, 119, "0000:10:00"),
        KernelEvent("xid", 12.0, 31, "0000:10:00"),
        KernelEvent("oom", 13.0),
    )
    (local,) = healthy(per_host=2).alter(KernelLogFacts, events=events, job_started=40.0).job().by_host()
    found = list(xids_of(local, {"hardware"}))
    assert [(one.code, one.gpu, one.lines, one.recent, one.ranks) for one in found] == [
        (119, "GPU 1", 2, True, (1,)),
        (119, "GPU 0", 1, False, (0,)),
    ]
    assert found[0].last.text == "last"
    (strange,) = (
        healthy(per_host=2)
        .alter(KernelLogFacts, events=(KernelEvent("xid", 1.0, 999, None),), job_started=None)
        .job()
        .by_host()
    )
    (one,) = xids_of(strange, {"hardware"})
    assert (one.is_listed, one.recent, one.ranks) == (False, None, (0, 1))
