"""What the system shows of the drivers, on recorded trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from doctor.collectors.base import Machine, NotPresent
from doctor.collectors.gpu.drivers import collect_drivers, read_kernel_driver
from doctor.core.facts import DriverFacts, Service

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder@U22)  Wed Feb"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  gcc"
HOST = "pid:[4026531836]"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def card(root: Path, bus_id: str, kind: str, vendor: str = "0x10de") -> None:
    folder = root / "sys/bus/pci/devices" / bus_id
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")


def process(root: Path, pid: int, name: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "comm").write_text(name + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A host with two H100, an NVSwitch, a sound card of NVIDIA and another maker's display."""
    card(tmp_path, "0000:10:00.0", "0x030200")
    card(tmp_path, "0000:11:00.0", "0x030200")
    card(tmp_path, "0000:05:00.0", "0x068000")
    card(tmp_path, "0000:10:00.1", "0x040300")
    card(tmp_path, "0000:02:00.0", "0x030000", vendor="0x1a03")
    write(
        tmp_path,
        proc__driver__nvidia__version=OPEN,
        proc__modules=(
            "nvidia_uvm 4956160 0 - Live 0x0 (POE)\nnvidia 14391296 9 nvidia_uvm, Live 0x0 (POE)\n"
            "mlx5_ib 471040 0 - Live 0x0\nib_core 500000 1 mlx5_ib, Live 0x0\next4 1 1 - Live 0x0\n"
            "nvidia_peermem 16384 0 - Live 0x0 (POE)"
        ),
        etc__hostname="node0",
    )
    process(tmp_path, 1, "systemd")
    process(tmp_path, 812, "nv-fabricmanage")
    process(tmp_path, 900, "python")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(HOST)
    for name in (
        "nvidia0",
        "nvidia1",
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-caps/nvidia-cap1",
        "infiniband/uverbs0",
        "nvidia-caps-imex-channels/channel0",
        "null",
    ):
        write(tmp_path, **{f"dev__{name.replace('/', '__')}": ""})
    return Machine(environ={}, proc=tmp_path / "proc", sys=tmp_path / "sys", etc=tmp_path / "etc", dev=tmp_path / "dev")


def test_host_with_gpus(machine: Machine) -> None:
    facts = collect_drivers(machine)
    assert facts.kernel_driver == "570.124.06"
    assert facts.pci_gpus == ("0000:10:00.0", "0000:11:00.0")
    assert facts.nvswitches == 1
    assert set(facts.device_files) == {
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/infiniband/uverbs0",
    }
    assert facts.modules == ("ib_core", "mlx5_ib", "nvidia", "nvidia_peermem", "nvidia_uvm")
    assert facts.imex_channels == 1
    assert facts.forward_compatibility is None
    assert facts.hidden == ()


def test_daemons_of_a_visible_process_list(machine: Machine) -> None:
    facts = collect_drivers(machine)
    assert facts.services == (
        Service("fabric-manager", running=True),
        Service("imex", running=False),
        Service("persistenced", running=False),
    )
    assert facts.service("imex") == Service("imex", running=False)


@pytest.mark.parametrize("namespace", ["pid:[4026532198]", None])
def test_container_can_only_say_what_it_sees(machine: Machine, namespace: str | None) -> None:
    link = machine.proc / "self/ns/pid"
    link.unlink()
    if namespace:
        link.symlink_to(namespace)
    process(machine.proc.parent, 7, "nvidia-imex")
    facts = collect_drivers(machine)
    assert {service.name: service.running for service in facts.services} == {
        "fabric-manager": True,
        "imex": True,
        "persistenced": None,
    }
    note = facts.why_hidden("services")
    assert note is not None
    assert note.unhide


def test_processes_that_hidepid_hides(machine: Machine) -> None:
    (machine.proc / "1/comm").unlink()
    assert collect_drivers(machine).service("imex") == Service("imex", running=None)


def test_versions_by_the_package_list(machine: Machine) -> None:
    write(
        machine.etc.parent,
        var__lib__dpkg__status=(
            "Package: bash\nVersion: 5.2\n\n"
            "Package: nvidia-fabricmanager-570\nStatus: install ok installed\nArchitecture: amd64\n"
            "Version: 570.86.15-1\nDescription: Fabric Manager\n a line\n\n"
            "Package: nvidia-imex-565\nStatus: deinstall ok config-files\nVersion: 565.1-1\n\n"
            "Package: nvidia-imex-570\nStatus: install ok installed\nVersion: 1:570.124.06-1\n"
        ),
    )
    facts = collect_drivers(machine)
    assert [service.version for service in facts.services] == ["570.86.15", "570.124.06", None]


def test_driver_that_is_installed_but_not_loaded(machine: Machine) -> None:
    (machine.proc / "driver/nvidia/version").unlink()
    (machine.proc / "modules").write_text("")
    facts = collect_drivers(machine)
    assert (facts.kernel_driver, facts.modules) == (None, ())
    assert len(facts.pci_gpus) == 2


def test_imex_channels_that_are_missing_are_none_or_unknown(machine: Machine) -> None:
    for path in (machine.dev / "nvidia-caps-imex-channels").iterdir():
        path.unlink()
    assert collect_drivers(machine).imex_channels == 0
    (machine.dev / "nvidia-caps-imex-channels").rmdir()
    assert collect_drivers(machine).imex_channels is None
    (machine.proc / "devices").write_text("Character devices:\n 234 nvidia-caps-imex-channels\n")
    assert collect_drivers(machine).imex_channels == 0


def test_forward_compatibility_that_the_loader_takes(machine: Machine, tmp_path: Path) -> None:
    compat = tmp_path / "usr/local/cuda-12.8/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.570.124.06").write_text("library")
    (compat / "libcuda.so.1").symlink_to("libcuda.so.570.124.06")
    assert collect_drivers(machine).forward_compatibility is None
    facts = collect_drivers(replace(machine, environ={"LD_LIBRARY_PATH": f"/nowhere:{compat}"}))
    assert facts.forward_compatibility == "570.124.06"


def test_stub_of_a_toolkit_that_the_loader_takes(machine: Machine, tmp_path: Path) -> None:
    stubs, driver = tmp_path / "usr/local/cuda/lib64/stubs", tmp_path / "usr/lib"
    for folder in (stubs, driver):
        folder.mkdir(parents=True)
    (stubs / "libcuda.so").write_text("library")
    (driver / "libcuda.so.1").write_text("library")
    path = {"LD_LIBRARY_PATH": f"{stubs}:{driver}"}
    assert collect_drivers(replace(machine, environ=path)).stub_libcuda is None
    (stubs / "libcuda.so.1").symlink_to("libcuda.so")
    assert collect_drivers(replace(machine, environ=path)).stub_libcuda == str(stubs / "libcuda.so.1")
    behind = {"LD_LIBRARY_PATH": f"{driver}:{stubs}"}
    assert collect_drivers(replace(machine, environ=behind)).stub_libcuda is None


def test_libcuda_of_the_driver_itself_is_no_forward_compatibility(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").write_text("library")
    facts = collect_drivers(replace(machine, environ={"LD_LIBRARY_PATH": str(folder)}))
    assert facts.forward_compatibility is None


def test_infiniband_alone(tmp_path: Path) -> None:
    write(tmp_path, dev__infiniband__uverbs0="", proc__modules="mlx5_ib 1 0 - Live 0x0")
    facts = collect_drivers(
        Machine(environ={}, proc=tmp_path / "proc", sys=tmp_path / "sys", etc=tmp_path, dev=tmp_path / "dev")
    )
    assert (facts.device_files, facts.modules, facts.pci_gpus) == (("/dev/infiniband/uverbs0",), ("mlx5_ib",), ())
    assert facts.nvswitches is None


@pytest.mark.parametrize("gpu_id", ["51110", None])
def test_amd_gpus_and_what_the_container_has_of_them(tmp_path: Path, gpu_id: str | None) -> None:
    """The id of a GPU that the cgroup forbids cannot be read; CPUs have the id 0."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "1").mkdir(parents=True)
    write(tmp_path, sys__class__kfd__kfd__topology__nodes__0__gpu_id="0", dev__dri__card0="")
    if gpu_id is not None:
        (nodes / "1/gpu_id").write_text(f"{gpu_id}\n")
    machine = Machine({}, tmp_path / "proc", tmp_path / "sys", tmp_path / "etc", tmp_path / "dev")
    assert (collect_drivers(machine).amd_gpus, collect_drivers(machine).device_files) == (1, ())
    write(tmp_path, dev__kfd="", dev__dri__renderD128="")
    assert collect_drivers(machine).device_files == ("/dev/kfd", "/dev/dri/renderD128")


@pytest.mark.parametrize("modules", ["", "ib_core 1 0 - Live 0x0\nrdma_cm 1 0 - Live 0x0"])
def test_machine_with_neither(tmp_path: Path, modules: str) -> None:
    write(tmp_path, proc__modules=modules)
    with pytest.raises(NotPresent):
        collect_drivers(
            Machine(environ={}, proc=tmp_path / "proc", sys=tmp_path / "sys", etc=tmp_path, dev=tmp_path / "dev")
        )


@pytest.mark.parametrize(
    ("text", "release"),
    [(OPEN, "570.124.06"), (CLOSED, "535.183.01"), ("NVRM version: rubbish", None), ("", None)],
)
def test_kernel_driver(tmp_path: Path, text: str, release: str | None) -> None:
    write(tmp_path, driver__nvidia__version=text)
    assert read_kernel_driver(tmp_path) == release


def test_collector_on_this_machine() -> None:
    try:
        facts = collect_drivers(Machine())
    except NotPresent:
        pytest.skip("no NVIDIA and no InfiniBand here")
    assert isinstance(facts, DriverFacts)
