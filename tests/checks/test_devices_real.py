"""Faulty GPUs, caused in a fake driver and read by the real collectors through the real nvidia-ml-py."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.host.kernel_log import parse_event
from doctor.collectors.runner import Outcome, collect_facts
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.facts import HostFacts, KernelLogFacts, Missing, MissingReason, SoftwareFacts, TorchBuild
from doctor.core.finding import Severity, Status
from doctor.core.job import Job, Member, build_job
from doctor.core.report_document import CheckResult
from tests.lab.nvml import FakeNvml

RANK = ("launch", "environment", "process")
CHECKS = {check.id: check for check in builtin_checks()}
TORCH = SoftwareFacts(torch=TorchBuild("2.8.0", cuda="12.8", nccl="2.27.3", backends=("gloo", "nccl")))


@functools.cache
def this_host() -> dict[str, Outcome]:
    """What does not change from test to test; SLURM is left out, the tests may run inside it."""
    found = collect_facts(("trainer", "nccl", "host", "drivers"), Machine())
    return {**found, "software": TORCH, "slurm": Missing(MissingReason.ABSENT, "not inside a SLURM job")}


_READ: dict[tuple[str, tuple[str, ...]], Outcome] = {}
"""GPUs of machines that were read before: each reading starts a process."""


def _read(environ: dict[str, str]) -> Outcome:
    return collect_facts(("gpus",), Machine(environ=environ))["gpus"]


def gathered(
    fake: FakeNvml, machine: str, *ranks: dict[str, str], lines: tuple[str, ...] = (), sys: Path = Path("/sys")
) -> Job:
    """A job of processes on ``machine`` whose environments have these variables; the GPUs are read once."""
    environ = fake.environ(machine, *lines)
    gpus = {"gpus": _READ.get((machine, lines)) or _read(environ)}
    _READ[machine, lines] = gpus["gpus"]
    if sys != Path("/sys"):
        gpus |= collect_facts(("drivers",), Machine(environ=environ, sys=sys))
    launched = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    members = []
    for number, variables in enumerate(ranks):
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(len(ranks))}
        own["LOCAL_WORLD_SIZE"] = str(len(ranks))
        started = {**launched, **own} if len(ranks) > 1 else {}
        own_facts = collect_facts(RANK, Machine(environ={**environ, **started, **variables}))
        members.append(Member(number, {**this_host(), **own_facts, **gpus}))
    return build_job(members)


def judged(job: Job, check: str) -> CheckResult:
    (result,) = examine(job, CheckRegistry((CHECKS[check],)))
    assert result.status is not Status.ERROR, result.reason
    return result


def blamed(result: CheckResult) -> set[int]:
    return {rank for finding in result.findings for rank in finding.ranks}


DEVICES = sorted(name for name in CHECKS if name.startswith("GPU") or name in ("MEM001", "MEM003", "MEM010"))


@pytest.mark.parametrize(("machine", "ranks"), [("eight_h100", 1), ("eight_h100", 8), ("one_gpu_a100", 1)])
def test_a_healthy_machine_is_silent(fake_nvml: FakeNvml, machine: str, ranks: int) -> None:
    lines = () if ranks == 1 else ("gpu.*.cpus=",)
    job = gathered(fake_nvml, machine, *({} for _ in range(ranks)), lines=lines)
    loud = [finding for check in DEVICES for finding in judged(job, check).findings]
    assert not loud, loud


def test_an_idle_desktop_is_silent(fake_nvml: FakeNvml) -> None:
    lines = (
        "gpu.*.name=NVIDIA GeForce RTX 4060 Laptop GPU",
        "gpu.*.mem_total_mib=8188",
        "gpu.*.mem_used_mib=600",
        "gpu.*.pcie_gen=1",
        "gpu.*.pcie_max_gen=4",
        "gpu.*.pcie_width=8",
        "gpu.*.pcie_max_width=8",
        "gpu.*.persistence=0",
        "gpu.*.clock=210",
        "gpu.*.clock_reasons=0x1",
        "gpu.*.graphics_procs=1:300",
        "gpu.*.error.nvmlDeviceGetEccMode=3",
        "gpu.*.error.nvmlDeviceGetTotalEccErrors=3",
        "gpu.*.error.nvmlDeviceGetRemappedRows=3",
    )
    job = gathered(fake_nvml, "one_gpu_a100", {}, lines=lines)
    loud = [finding for check in DEVICES for finding in judged(job, check).findings]
    assert not loud, loud


@pytest.mark.parametrize(
    ("machine", "check", "ranks"),
    [
        ("dead_gpu", "GPU019", {4}),
        ("fallen_off_bus", "GPU019", {4}),
        ("reset_required", "GPU019", {2}),
        ("throttled", "GPU011", {6}),
        ("memory_errors", "GPU009", {3, 5, 7}),
        ("nvlink_down", "GPU013", {1, 3}),
        ("pcie_degraded", "GPU012", {5}),
    ],
)
def test_a_faulty_gpu_is_blamed_on_its_rank(fake_nvml: FakeNvml, machine: str, check: str, ranks: set[int]) -> None:
    result = judged(gathered(fake_nvml, machine, *({} for _ in range(8))), check)
    assert result.status is Status.FAIL
    assert blamed(result) == ranks


def test_a_lone_process_answers_for_every_gpu_that_it_sees(fake_nvml: FakeNvml) -> None:
    assert blamed(judged(gathered(fake_nvml, "throttled", {}), "GPU011")) == {0}
    assert judged(gathered(fake_nvml, "throttled", {"CUDA_VISIBLE_DEVICES": "0,1"}), "GPU011").status is Status.PASS


def test_two_models_differ(fake_nvml: FakeNvml) -> None:
    ranks = [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for _ in range(8)]
    result = judged(gathered(fake_nvml, "two_models", *ranks), "GPU005")
    assert (result.severity, blamed(result)) == (Severity.WARNING, {7})
    assert judged(gathered(fake_nvml, "eight_h100", *ranks), "GPU005").status is Status.PASS


def test_blocked_peer_access(fake_nvml: FakeNvml) -> None:
    assert blamed(judged(gathered(fake_nvml, "peer_access_blocked", {}, {}), "GPU018")) == {0, 1}
    assert judged(gathered(fake_nvml, "eight_h100", {}, {}), "GPU018").status is Status.PASS


def test_exclusive_mode_forbids_a_shared_gpu_alone(fake_nvml: FakeNvml) -> None:
    shared = [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    assert blamed(judged(gathered(fake_nvml, "exclusive_mode", *shared), "GPU016")) == {0, 1}
    apart = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert judged(gathered(fake_nvml, "exclusive_mode", *apart), "GPU016").status is Status.PASS
    exposed = judged(gathered(fake_nvml, "exclusive_mode", {}, {}), "GPU016")
    assert {one.severity for one in exposed.findings} == {Severity.INFO}
    assert judged(gathered(fake_nvml, "eight_h100", *shared), "GPU016").status is Status.PASS


def test_persistence_off(fake_nvml: FakeNvml) -> None:
    job = gathered(fake_nvml, "eight_h100", {}, {}, lines=("gpu.1.persistence=0",))
    assert blamed(judged(job, "GPU008")) == {1}


def test_slices_of_a_gpu(fake_nvml: FakeNvml) -> None:
    slices = [device.uuid for device in _gpus(gathered(fake_nvml, "mig", {}))[0].mig_devices]
    assert len(slices) == 3
    job = gathered(fake_nvml, "mig", *({"CUDA_VISIBLE_DEVICES": uuid} for uuid in slices[:2]))
    assert blamed(judged(job, "GPU015")) == {0, 1}
    assert judged(job, "GPU001").status is Status.PASS
    twice = gathered(fake_nvml, "mig", *({"CUDA_VISIBLE_DEVICES": slices[0]} for _ in range(2)))
    assert blamed(judged(twice, "GPU001")) == {0, 1}


def _gpus(job: Job):
    from doctor.core.facts import GpuFacts

    return job.hosts[0].find(GpuFacts).gpus


@pytest.mark.parametrize(
    ("values", "check", "ranks"),
    [
        (("0", "0"), "GPU001", {0, 1}),
        (("0", "0"), "GPU002", {1}),
        (("0,1", "1,0"), "GPU001", {0, 1}),
        (("0,1", "1,0"), "GPU004", {0, 1}),
        (("0,9", "0,9"), "GPU003", {0, 1}),
        (("0,0", "0,1"), "GPU003", {0}),
        (("0,-1,1", "0,1"), "GPU003", {0}),
        (("0", "1"), "GPU004", {1}),
    ],
)
def test_visible_devices(fake_nvml: FakeNvml, values: tuple[str, ...], check: str, ranks: set[int]) -> None:
    job = gathered(fake_nvml, "eight_h100", *({"CUDA_VISIBLE_DEVICES": value} for value in values))
    assert blamed(judged(job, check)) == ranks


@pytest.mark.parametrize("value", ["0,1", "1, 0", "", "-1", "NoDevFiles"])
def test_sound_lists_of_visible_devices(fake_nvml: FakeNvml, value: str) -> None:
    job = gathered(fake_nvml, "eight_h100", *({"CUDA_VISIBLE_DEVICES": value} for _ in range(2)))
    loud = [finding for check in ("GPU001", "GPU002", "GPU003", "GPU004") for finding in judged(job, check).findings]
    assert not loud, loud


def test_more_ranks_than_gpus(fake_nvml: FakeNvml) -> None:
    assert blamed(judged(gathered(fake_nvml, "one_gpu_a100", {}, {}), "GPU002")) == {1}


@pytest.fixture
def stranger() -> Iterator[int]:
    """The id of a process of this machine that is no rank."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def _in_first_pid_namespace() -> bool:
    return str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]"


def test_somebody_else_holds_a_gpu(fake_nvml: FakeNvml, stranger: int) -> None:
    lines = (f"gpu.1.procs={stranger}:78000", "gpu.1.mem_used_mib=79000")
    job = gathered(fake_nvml, "eight_h100", {}, {}, lines=lines)
    if not _in_first_pid_namespace():
        # Numbers of another namespace mean nothing here: never an alarm.
        assert judged(job, "GPU006").status is Status.UNKNOWN
        return
    assert blamed(judged(job, "GPU006")) == {1}
    assert blamed(judged(job, "MEM003")) == {1}
    assert not judged(
        gathered(fake_nvml, "eight_h100", {}, lines=(f"gpu.1.procs={stranger}:78000",)), "MEM003"
    ).findings
    assert not judged(gathered(fake_nvml, "eight_h100", {"CUDA_VISIBLE_DEVICES": "0"}, lines=lines), "GPU006").findings


def test_a_private_pid_namespace_hides_whose_memory_it_is(fake_nvml: FakeNvml, stranger: int) -> None:
    job = gathered(fake_nvml, "eight_h100", {}, {}, lines=("gpu.1.procs=3999999:78000", "gpu.1.mem_used_mib=79000"))
    members = []
    for rank in job.ranks:
        sections = {**rank.sections, **rank.host.sections}
        host = sections["host"]
        assert isinstance(host, HostFacts)
        sections["host"] = HostFacts(hostname="c", boot_id=host.boot_id, container="docker", shm=host.shm)
        process = sections["process"]
        space = type(process.namespaces[0])("pid", "pid:[4026532841]")
        sections["process"] = type(process)(pid=process.pid, namespaces=(space,))
        members.append(Member(rank.number, sections))
    inside = build_job(members)
    for check in ("GPU006", "MEM003"):
        result = judged(inside, check)
        assert (result.status, result.findings) == (Status.UNKNOWN, ()), check
        assert "pid" in (result.reason or "")


def test_ranks_on_the_first_gpu(fake_nvml: FakeNvml, stranger: int) -> None:
    """Two ranks, the second a real process of its own that holds memory of both GPUs."""
    lines = (f"gpu.0.procs={stranger}:500", f"gpu.1.procs={stranger}:4000")
    job = gathered(fake_nvml, "eight_h100", {}, {}, lines=lines)
    members = [Member(rank.number, {**rank.sections, **rank.host.sections}) for rank in job.ranks]
    process = members[1].sections["process"]
    own = type(process)(pid=stranger, namespaces=process.namespaces)
    members[1] = members[1]._replace(sections={**members[1].sections, "process": own})
    if not _in_first_pid_namespace():
        pytest.skip("needs the host's own PID namespace")
    result = judged(build_job(members), "MEM001")
    assert blamed(result) == {1}
    assert "set_device" in str(result.findings[0].evidence["likely_cause"])


@pytest.fixture
def switches(tmp_path: Path) -> Path:
    """A /sys with four NVSwitches on its PCI bus."""
    for number in range(4):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x068000\n")
    return tmp_path / "sys"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[int]:
    """A process that bears the name of the fabric manager."""
    program = tmp_path / "nv-fabricmanager"
    shutil.copy(shutil.which("sleep") or pytest.skip("needs sleep"), program)
    process = subprocess.Popen([program, "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_running_fabric_manager(fake_nvml: FakeNvml, switches: Path, manager: int) -> None:
    well = judged(gathered(fake_nvml, "eight_h100", {}, {}, sys=switches), "GPU014")
    assert (well.status, well.findings) == (Status.PASS, ())
    faulty = judged(gathered(fake_nvml, "no_fabric_manager", {}, {}, sys=switches), "GPU014")
    assert (faulty.status, blamed(faulty)) == (Status.FAIL, {0, 1})


def test_no_fabric_manager(fake_nvml: FakeNvml, switches: Path) -> None:
    if not _in_first_pid_namespace():
        pytest.skip("the host's processes can't be seen from this container")
    result = judged(gathered(fake_nvml, "eight_h100", {}, {}, sys=switches), "GPU014")
    assert blamed(result) == {0, 1}
    assert "not running" in result.findings[0].summary


def _rack(fake: FakeNvml, dev: Path, *cliques: int) -> Job:
    """A job of one rank a host; the hosts share an NVLink domain, each in the clique given for it."""
    members = []
    for number, clique in enumerate(cliques):
        environ = fake.environ("multi_node_nvlink", f"gpu.*.fabric_clique={clique}", f"gpu.0.uuid=GPU-{number}")
        found = collect_facts(("gpus", "drivers"), Machine(environ=environ, dev=dev))
        host = HostFacts(hostname=f"node{number}", boot_id=f"boot-{number}")
        members.append(Member(number, {**found, "host": host}))
    return build_job(members)


@pytest.fixture
def imex(tmp_path: Path) -> Iterator[Path]:
    """A /dev with an IMEX channel, while a process bears the name of the daemon."""
    channels = tmp_path / "dev/nvidia-caps-imex-channels"
    channels.mkdir(parents=True)
    (channels / "channel0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    program = tmp_path / "nvidia-imex"
    shutil.copy(shutil.which("sleep") or pytest.skip("needs sleep"), program)
    process = subprocess.Popen([program, "60"])
    yield tmp_path / "dev"
    process.kill()
    process.wait()


def test_hosts_of_one_nvlink_domain(fake_nvml: FakeNvml, imex: Path) -> None:
    assert judged(_rack(fake_nvml, imex, 7, 7, 7), "GPU023").status is Status.PASS
    assert blamed(judged(_rack(fake_nvml, imex, 7, 7, 8), "GPU023")) == {2}
    (imex / "nvidia-caps-imex-channels/channel0").unlink()
    assert blamed(judged(_rack(fake_nvml, imex, 7, 7), "GPU023")) == {0, 1}


def test_a_cpu_build_beside_gpus(fake_nvml: FakeNvml) -> None:
    """The torch of the test environment is read from its files; only a build without CUDA is faulty."""
    pytest.importorskip("torch")
    environ = fake_nvml.environ("eight_h100")
    sections = collect_facts(("environment", "trainer", "software", "gpus"), Machine(environ=environ))
    software = sections["software"]
    assert isinstance(software, SoftwareFacts)
    assert software.torch is not None
    result = judged(build_job([Member(0, sections)]), "GPU021")
    assert bool(result.findings) is (software.torch.cuda is None and software.torch.hip is None)
    hidden = collect_facts(("environment",), Machine(environ={**environ, "CUDA_VISIBLE_DEVICES": ""}))
    assert not judged(build_job([Member(0, {**sections, **hidden})]), "GPU021").findings


LINES = {
    79: "NVRM: Xid (PCI:0000:11:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    119: "NVRM: Xid (PCI:0000:11:00): 119, pid=4242, name=python, Timeout waiting for RPC from GSP!",
    31: "NVRM: Xid (PCI:0000:11:00): 31, pid=4242, name=python, Ch 00000018, intr 00000000. MMU Fault",
    74: "NVRM: Xid (PCI:0000:11:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 4",
    95: "NVRM: Xid (PCI:0000:11:00): 95, pid=4242, name=python, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
}


@pytest.mark.parametrize(
    ("code", "check", "severity"),
    [
        (79, "GPU019", Severity.ERROR),
        (119, "GPU010", Severity.ERROR),
        (31, "GPU010", Severity.INFO),
        (74, "GPU013", Severity.ERROR),
        (95, "GPU009", Severity.ERROR),
    ],
)
def test_lines_of_the_kernel_log(fake_nvml: FakeNvml, code: int, check: str, severity: Severity) -> None:
    event = parse_event(5000.0, LINES[code])
    assert event is not None
    job = gathered(fake_nvml, "eight_h100", {}, {})
    members = [Member(rank.number, {**rank.sections, **rank.host.sections}) for rank in job.ranks]
    log = KernelLogFacts(events=(event,), job_started=4000.0)
    told = build_job(member._replace(sections={**member.sections, "kernel-log": log}) for member in members)
    result = judged(told, check)
    assert (result.severity, blamed(result)) == (severity, {1})
    others = {"GPU009", "GPU010", "GPU013", "GPU019"} - {check}
    assert not any(judged(told, other).findings for other in others)
