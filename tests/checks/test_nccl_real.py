"""Faults of NCCL's settings and libraries, caused for real: files, variables and compiled libraries, read by the
collectors and judged by the checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from doctor.collectors.base import Machine
from doctor.collectors.launch.launcher import collect_launch
from doctor.collectors.nccl import config_files
from doctor.collectors.nccl.configuration import collect_nccl
from doctor.collectors.runner import collect_facts
from doctor.collectors.software.environment import collect_environment
from doctor.collectors.storage.directories import collect_storage
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.facts import (
    GpuFacts,
    HostFacts,
    Missing,
    MissingReason,
    NcclLibrary,
    Section,
    SlurmFacts,
    SoftwareFacts,
    TorchBuild,
)
from doctor.core.job import Member, build_job
from tests.lab.nvml import FakeNvml, compiler

ROOT = Path(__file__).parents[2]
CATALOG = CheckRegistry(tuple(check for check in builtin_checks() if check.family == "nccl" or check.id == "MEM007"))
Found = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]


class Cluster:
    """Hosts that are folders: each has an /etc of its own; all share one empty home."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.members: list[Member] = []

    def etc(self, host: str) -> Path:
        folder = self.root / host / "etc"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def rank(self, host: str, *more: Section, **variables: str) -> None:
        """One more process on ``host`` with these variables; ``more``: what else is known of it."""
        number = len(self.members)
        machine = Machine(environ={"HOME": str(self.root), "RANK": str(number), **variables}, etc=self.etc(host))
        sections: tuple[Section, ...] = (
            HostFacts(hostname=host, boot_id=host),
            collect_environment(machine),
            collect_nccl(machine),
            collect_launch(machine),
            collect_storage(machine),
            SoftwareFacts(torch=TorchBuild("2.13.0+cpu", backends=("gloo",))),
            *more,
        )
        self.members.append(Member(number, {section.key: section for section in sections}))

    def judge(self) -> Found:
        """Severity and ranks of what the checks find, by id."""
        job = build_job(self.members, world_size=len(self.members))
        results = examine(job, CATALOG)
        assert not [result.reason for result in results if result.status.value == "error"]
        return {
            result.id: tuple((finding.severity.value, finding.ranks) for finding in result.findings)
            for result in results
            if result.findings
        }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(config_files, "_home", lambda: str(tmp_path))
    return Cluster(tmp_path)


def four(cluster: Cluster, odd: Mapping[str, str], odd_rank: int = 2, **common: str) -> Found:
    for number in range(4):
        cluster.rank(f"node{number // 2}", **common, **(odd if number == odd_rank else {}))
    return cluster.judge()


def test_a_healthy_cluster_is_silent(cluster: Cluster) -> None:
    sound = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_VERSION": "2.29.7", "NCCL_IB_TIMEOUT": "22"}
    assert four(cluster, {"NCCL_HOSTID": "b", "NCCL_IB_HCA": "mlx5_0"}, **sound) == {}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NCCL_SOKET_IFNAME": "eth0"}, {"NCCL001": (("warning", (2,)),)}),
        ({"NCCL_TEAM_COLOUR": "blue"}, {"NCCL001": (("info", (2,)),)}),
        ({"NCCL_NCHANNELS_PER_PEER": "4"}, {}),
        ({"NCCL_DEBUG_SUBSYS": "INIT,VERSION"}, {"NCCL002": (("info", (2,)),)}),
        ({"NCCL_SHM_DISABLE": "yes"}, {"NCCL002": (("error", (2,)),)}),
        ({"NCCL_DEBUG": "VERBOSE"}, {"NCCL002": (("warning", (2,)),)}),
        ({"NCCL_ALGO": "Ring"}, {"NCCL003": (("error", (2,)),)}),
        ({"NCCL_IB_RETRY_CNT": "5"}, {"NCCL003": (("warning", (2,)),)}),
        ({"NCCL_ASYNC_ERROR_HANDLING": "3"}, {"NCCL003": (("warning", (2,)),), "NCCL004": (("info", (2,)),)}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"NCCL007": (("info", (2,)),)}),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"NCCL007": (("error", (2,)),)}),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, {"NCCL007": (("info", (2,)),), "NCCL011": (("info", (2,)),)}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {"NCCL011": (("warning", (2,)),)}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"}, {"MEM007": (("error", (2,)),)}),
    ],
    ids=lambda value: next(iter(value), "silent") if isinstance(value, dict) else "",
)
def test_a_variable_on_one_rank(cluster: Cluster, variables: dict[str, str], expected: Found) -> None:
    assert four(cluster, variables) == expected


def test_a_systems_file_on_one_host(cluster: Cluster) -> None:
    (cluster.etc("node1") / "nccl.conf").write_text("# by the site\nNCCL_PROTO=Simple\nNCCL_DEBUG = INFO\n")
    found = four(cluster, {})
    assert found["NCCL001"] == (("warning", (2, 3)),)
    assert found["NCCL003"] == (("error", (0, 1, 2, 3)),)  # split evenly: nobody is the odd one
    assert found["NCCL005"] == (("info", (2, 3)),)


def test_the_environment_wins_over_the_file(cluster: Cluster) -> None:
    (cluster.etc("node1") / "nccl.conf").write_text("NCCL_PROTO=Simple\n")
    assert four(cluster, {}, NCCL_PROTO="^LL128") == {}


def test_a_user_file_that_is_not_there(cluster: Cluster) -> None:
    found = four(cluster, {"NCCL_CONF_FILE": str(cluster.root / "gone.conf")})
    assert found["NCCL002"] == (("warning", (2,)),)


def test_a_topology_file_that_is_missing_or_no_xml(cluster: Cluster) -> None:
    broken = cluster.root / "broken.xml"
    broken.write_text("<system version='1'>")
    cluster.rank("node0", NCCL_TOPO_FILE=str(cluster.root / "gone.xml"))
    cluster.rank("node0", NCCL_TOPO_FILE=str(broken))
    assert [ranks for _, ranks in cluster.judge()["NCCL014"]] == [(0,), (1,)]


def test_a_sound_topology_file(cluster: Cluster) -> None:
    sound = cluster.root / "sound.xml"
    cpu = "<cpu numaid='0' arch='x86_64' vendor='GenuineIntel'><pci busid='0000:07:00.0' class='0x030200'/></cpu>"
    sound.write_text(f"<system version='1'>{cpu}</system>")
    cluster.rank("node0", NCCL_TOPO_FILE=str(sound))
    cluster.rank("node1", NCCL_TOPO_FILE=str(sound))
    assert cluster.judge() == {}


def test_dumps_that_nobody_can_write(cluster: Cluster) -> None:
    place = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(cluster.root / "no/such/folder/trace_rank_")}
    assert four(cluster, {}, **place)["NCCL011"] == (("warning", (0, 1, 2, 3)),)


def test_a_time_limit_shorter_than_the_time_out(cluster: Cluster) -> None:
    marks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    for host in ("node0", "node1"):
        cluster.rank(host, **marks)
    short, long = SlurmFacts(job_id="1", time_limit=600), SlurmFacts(job_id="1", time_limit=86400)
    outside = Missing(MissingReason.ABSENT, "not inside a SLURM job")
    for slurm, ids in ((short, {"NCCL012"}), (long, set()), (outside, set())):
        cluster.members = [one._replace(sections={**one.sections, "slurm": slurm}) for one in cluster.members]
        assert cluster.judge().keys() & {"NCCL012"} == ids


# ---- GPUs of a fake driver ----


@pytest.fixture
def hopper(fake_nvml: FakeNvml) -> GpuFacts:
    """Eight H100 behind NVSwitches, as the collector reads them."""
    gpus = collect_facts(("gpus",), Machine(environ=fake_nvml.environ("eight_h100")))["gpus"]
    assert isinstance(gpus, GpuFacts), gpus
    return gpus


@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"NCCL_P2P_LEVEL": "LOC"}, "warning"),
        ({"NCCL_NVLS_ENABLE": "0"}, "info"),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_NVLS_ENABLE": "2"}, None),
    ],
    ids=lambda value: str(value),
)
def test_a_switch_on_a_machine_with_nvlink(
    cluster: Cluster, hopper: GpuFacts, variables: dict[str, str], severity: str | None
) -> None:
    for _ in range(2):
        cluster.rank("node0", hopper, **variables)
    assert cluster.judge().get("NCCL006", ()) == (((severity, (0, 1)),) if severity else ())


def test_a_topology_file_of_another_machine(cluster: Cluster, hopper: GpuFacts) -> None:
    foreign = cluster.root / "foreign.xml"
    foreign.write_text("<system version='1'><pci busid='0000:fe:00.0' class='0x030200'/></system>")
    cluster.rank("node0", hopper, NCCL_TOPO_FILE=str(foreign))
    assert cluster.judge()["NCCL014"] == (("warning", (0,)),)


def test_a_release_that_is_older_than_the_gpu(cluster: Cluster, hopper: GpuFacts) -> None:
    for version in ("2.12.12", "2.27.3"):
        library = NcclLibrary("/usr/lib/libnccl.so.2", version, "system", chosen=True)
        torch = TorchBuild("2.8.0", cuda="12.8", nccl=version, backends=("gloo", "nccl"))
        cluster.rank("node0", hopper, SoftwareFacts(torch=torch, nccl_libraries=(library,)))
    assert cluster.judge()["NCCL009"] == (("warning", (0,)),)


# ---- libraries, compiled ----


def compile_library(path: Path, text: str = "", *options: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(f'const char *const text_of_it = "{text}";\n' if text else "int nothing;\n")
    subprocess.run([str(compiler()), "-shared", "-fPIC", "-o", path, source, *options], check=True, timeout=60)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder with a torch of CUDA 12.8 that was built with NCCL 2.27.3, and that NCCL's wheel."""
    if compiler() is None:
        pytest.skip("no C compiler")
    site = tmp_path / "site"
    torch = site / "torch"
    compile_library(torch / "lib/libtorch_cpu.so")
    compile_library(torch / "lib/libtorch_python.so")
    compile_library(
        torch / "lib/libtorch_cuda.so",
        "",
        "-Wl,--no-as-needed,--enable-new-dtags,-rpath,$ORIGIN/../../nvidia/nccl/lib",
        *nccl(site / "nvidia/nccl/lib", "2.27.3"),
    )
    (torch / "__init__.py").write_text("")
    (torch / "version.py").write_text("__version__ = '2.8.0+cu128'\ncuda = '12.8'\nhip = None\n")
    for name, version, more in (
        ("torch", "2.8.0", "Requires-Dist: nvidia-nccl-cu12==2.27.3\n"),
        ("nvidia_nccl_cu12", "2.27.3", ""),
    ):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}\n")
    return site


def nccl(folder: Path, release: str) -> tuple[str, ...]:
    """Put an NCCL into ``folder``; the options that link to it."""
    compile_library(folder / "libnccl.so.2", f"NCCL version {release}+cuda12.8", "-Wl,-soname,libnccl.so.2")
    return (f"-L{folder}", "-l:libnccl.so.2")


def software_of(site: Path, **variables: str) -> SoftwareFacts:
    """What a fresh interpreter with that site-packages folder sees of its software."""
    program = (
        "import sys, msgspec\n"
        "from doctor.collectors.base import Machine\n"
        "from doctor.collectors.software.python_environment import collect_software\n"
        "sys.stdout.buffer.write(msgspec.json.encode(collect_software(Machine())))\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    environ = {**clean, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, timeout=60, check=True)
    return msgspec.json.decode(done.stdout, type=SoftwareFacts)


def test_an_older_library_by_ld_library_path_on_one_rank(cluster: Cluster, site: Path, tmp_path: Path) -> None:
    nccl(tmp_path / "other", "2.18.3")
    sound, old = software_of(site), software_of(site, LD_LIBRARY_PATH=str(tmp_path / "other"))
    assert (sound.nccl, old.nccl) == ("2.27.3", "2.18.3")
    for number in range(3):
        cluster.rank(f"node{number}", old if number == 1 else sound)
    found = cluster.judge()
    assert found["NCCL008"] == found["NCCL010"] == (("error", (1,)),)


def test_a_newer_library_by_ld_library_path_everywhere(cluster: Cluster, site: Path, tmp_path: Path) -> None:
    nccl(tmp_path / "other", "2.30.7")
    new = software_of(site, LD_LIBRARY_PATH=str(tmp_path / "other"))
    for number in range(2):
        cluster.rank(f"node{number}", new)
    assert {name: found for name, found in cluster.judge().items() if name in ("NCCL008", "NCCL010")} == {
        "NCCL010": (("warning", (0, 1)),)
    }


def test_a_newer_wheel_than_torch_requires(cluster: Cluster, site: Path) -> None:
    """As `pip install nvidia-nccl-cu12==2.30.7` leaves it: the same folder, other metadata."""
    nccl(site / "nvidia/nccl/lib", "2.30.7")
    metadata = site / "nvidia_nccl_cu12-2.27.3.dist-info"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia_nccl_cu12\nVersion: 2.30.7\n\n")
    metadata.rename(site / "nvidia_nccl_cu12-2.30.7.dist-info")
    new = software_of(site)
    for number in range(2):
        cluster.rank(f"node{number}", new)
    assert {name: found for name, found in cluster.judge().items() if name in ("NCCL008", "NCCL010")} == {
        "NCCL010": (("info", (0, 1)),)
    }


def test_the_wheel_alone_is_silent(cluster: Cluster, site: Path) -> None:
    sound = software_of(site)
    for number in range(2):
        cluster.rank(f"node{number}", sound)
    assert cluster.judge().keys() & {"NCCL008", "NCCL009", "NCCL010"} == set()
