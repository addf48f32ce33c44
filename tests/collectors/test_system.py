"""The host: names, container, memory, PCIe and clock, from made trees and in real namespaces."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.host.container import read_container, read_hypervisor, read_image
from doctor.collectors.host.kernel_clock import _Timex, read_clock
from doctor.collectors.host.pci import read_access_control
from doctor.collectors.host.shared_memory import SharedMemoryFile, left_over, read_shared_memory
from doctor.collectors.host.system import read_host
from doctor.collectors.network.dns import TimedLookup, look_up
from tests.collectors.namespaces import run_in_namespaces
from tests.collectors.recorded import machine_at, plant, put_parent
from tests.lab.speed import patience

DOCKER = "cgroup-v1-docker"


def fill(root: Path, files: dict[str, str]) -> Machine:
    for path, text in files.items():
        put_parent(root / path).write_text(text)
    return machine_at(root)


TRAINING_HOST = {
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
    "proc/sys/kernel/random/boot_id": "2f9c0f3e-1111-2222-3333-444455556666\n",
    "proc/sys/kernel/osrelease": "5.15.0-1045-nvidia\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "proc/sys/net/ipv4/ip_unprivileged_port_start": "1024\n",
    "proc/meminfo": "MemTotal: 2113456 kB\nMemFree: 1 kB\nMemAvailable:   2000000 kB\nHugePages_Total:       0\n",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/md0 intel_iommu=on iommu=pt quiet\n",
    "sys/devices/system/cpu/online": "0-55,112-167\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate\n",
    "sys/kernel/iommu_groups/0/type": "DMA-FQ\n",
    "sys/kernel/iommu_groups/1/type": "DMA-FQ\n",
}


def test_values_of_a_training_host(tmp_path):
    host = read_host(fill(tmp_path, TRAINING_HOST), "localhost", [])
    assert host.hostname == "localhost"
    assert host.machine_id == "0123456789abcdef0123456789abcdef"
    assert host.boot_id == "2f9c0f3e-1111-2222-3333-444455556666"
    assert (host.kernel, host.distribution) == ("5.15.0-1045-nvidia", "Ubuntu 22.04.4 LTS")
    assert (host.cpu_count, host.cpu_governor, host.cpu_driver) == (112, "performance,powersave", "intel_pstate")
    assert (host.ram_total, host.ram_available) == (2113456 * 1024, 2000000 * 1024)
    assert (host.port_range, host.unprivileged_port_start) == ((32768, 60999), 1024)
    assert (host.iommu_groups, host.iommu_setting) == (2, "intel_iommu=on iommu=pt")
    assert host.names[0].role == "hostname"
    assert {"127.0.0.1", "::1"} & set(host.names[0].addresses)
    assert {note.field for note in host.hidden} >= {"shm", "cpu_quota", "pci_access_control"}


@pytest.mark.parametrize("garbage", ["", "\x00\xff", "a b c", "9" * 400, "-", "0-"])
def test_garbage_in_any_file_is_survived(tmp_path, garbage):
    host = read_host(fill(tmp_path, dict.fromkeys(TRAINING_HOST, garbage)), "localhost", [])
    assert host.port_range is None
    assert host.ram_total is None
    assert host.cpu_count == os.cpu_count()


def test_folders_in_the_place_of_files_are_survived(tmp_path):
    for path in TRAINING_HOST:
        (tmp_path / path).mkdir(parents=True)
    host = read_host(machine_at(tmp_path), "localhost", [])
    assert (host.machine_id, host.cpu_governor, host.port_range, host.iommu_groups) == (None, None, None, 2)


def test_id_of_an_image_is_no_machine_id(tmp_path):
    host = read_host(fill(tmp_path, {"etc/machine-id": "uninitialized\n"}), "localhost", [])
    assert host.machine_id is None


def test_an_empty_machine_is_survived(tmp_path):
    host = read_host(machine_at(tmp_path), "localhost", [])
    assert (host.machine_id, host.kernel, host.iommu_groups) == (None, None, None)


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_NAME": "torch.sif"}, "apptainer"),
        ({}, {"SINGULARITY_CONTAINER": "/sw/torch.sif"}, "apptainer"),
        ({"proc/1/environ": "PATH=/bin\0container=lxc\0"}, {}, "lxc"),
        ({"proc/1/environ": "PATH=/bin\0container=rocket-ship\0"}, {}, "unknown"),
        ({"proc/self/cgroup": "0::/kubepods.slice/pod1\n"}, {}, "kubernetes"),
        ({"proc/self/cgroup": "0::/user.slice/session-3.scope\n"}, {}, None),
        (
            {"proc/self/mountinfo": "22 1 0:31 /enroot/data/user-7/pyxis_1.0 / rw - ext4 /dev/md0 rw\n"},
            {},
            "enroot",
        ),
    ],
)
def test_container(tmp_path, files, environ, kind):
    fill(tmp_path, files)
    assert read_container(machine_at(tmp_path, environ)) == kind


def test_container_of_docker_by_its_groups(tmp_path):
    assert read_container(plant(DOCKER, tmp_path)) == "docker"


def test_machine_booted_from_an_image_is_no_container(tmp_path):
    fill(tmp_path, {".dockerenv": ""})
    for name, target in (("pid", "pid:[4026531836]"), ("uts", "uts:[4026531838]")):
        put_parent(tmp_path / "proc/self/ns" / name).symlink_to(target)
    assert read_container(machine_at(tmp_path)) is None


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"proc/cpuinfo": "flags\t: fpu vme hypervisor\n"}, "unknown"),
        ({"proc/cpuinfo": "flags\t: fpu hypervisor\n", "sys/class/dmi/id/sys_vendor": "QEMU\n"}, "kvm"),
        ({"proc/cpuinfo": "flags\t: fpu vme\n", "sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, None),
        ({"proc/cpuinfo": "flags\t: fpu hypervisor\n", "sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, "nitro"),
        ({"proc/cpuinfo": "Features\t: fp asimd\n", "sys/class/dmi/id/product_name": "KVM Virtual Machine\n"}, "kvm"),
        ({"proc/cpuinfo": "Features\t: fp asimd\n", "sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, None),
        ({"sys/hypervisor/type": "xen\n"}, "xen"),
        ({}, None),
    ],
)
def test_hypervisor(tmp_path, files, kind):
    assert read_hypervisor(fill(tmp_path, files)) == kind


def test_image(tmp_path):
    assert read_image(machine_at(tmp_path)) is None
    environ = {"NVIDIA_PRODUCT_NAME": "PyTorch", "NVIDIA_PYTORCH_VERSION": "25.04", "NVIDIA_BUILD_ID": "162183490"}
    assert read_image(machine_at(tmp_path, environ)) == "PyTorch 25.04 build 162183490"
    environ["APPTAINER_CONTAINER"] = "/sw/torch.sif"
    assert read_image(machine_at(tmp_path, environ)) == "/sw/torch.sif"
    fill(tmp_path, {"run/.containerenv": 'engine="podman-4"\nimage="docker.io/pytorch:2.6"\n'})
    assert read_image(machine_at(tmp_path)) == "docker.io/pytorch:2.6"


def configuration(port_type: int, control: int | None, size: int = 4096) -> bytes:
    """A configuration space with a PCI Express capability at 0x40 and, behind another one, access control at 0x140."""
    data = bytearray(4096)
    data[0x34] = 0x40
    data[0x40:0x44] = struct.pack("<BBH", 0x10, 0, port_type << 4 | 2)
    data[0x100:0x104] = struct.pack("<I", 0x0001 | 1 << 16 | (0x140 if control is not None else 0) << 20)
    if control is not None:
        data[0x140:0x148] = struct.pack("<IHH", 0x000D | 1 << 16, 0x5F, control)
    return bytes(data[:size])


@pytest.mark.parametrize(
    ("ports", "answer"),
    [
        ([], False),
        ([configuration(6, 0x1D)], True),
        ([configuration(6, 0x00), configuration(6, None)], False),
        ([configuration(6, 0x01)], False),
        ([configuration(4, 0x1D)], False),
        ([configuration(6, 0x00), configuration(5, 0x0C)], True),
        ([b""], None),
        ([b"\xff" * 4096], False),
    ],
)
def test_access_control(tmp_path, ports, answer):
    devices = tmp_path / "sys/bus/pci/devices"
    put_parent(devices / "0000:01:00.0/class").write_text("0x030200\n")
    for number, data in enumerate(ports):
        put_parent(devices / f"0000:0{number}:01.0/class").write_text("0x060400\n")
        (devices / f"0000:0{number}:01.0/config").write_bytes(data)
    found, hidden = read_access_control(machine_at(tmp_path))
    assert found is answer
    assert (len(hidden) == 1) == (answer is None)


def test_access_control_that_only_root_sees(tmp_path):
    """Others get the first 64 bytes of a file that says it has 4096."""
    device = tmp_path / "sys/bus/pci/devices/0000:01:01.0"
    put_parent(device / "class").write_text("0x060400\n")
    (device / "config").write_bytes(configuration(6, 0x1D, size=64))
    found, hidden = read_access_control(machine_at(tmp_path))
    assert found is None
    assert "root" in hidden[0].reason


OFFSETS = """
#include <stddef.h>
#include <stdio.h>
#include <sys/timex.h>
int main(void) {
  printf("%zu %zu %zu", offsetof(struct timex, maxerror), offsetof(struct timex, status), sizeof(struct timex));
  return 0;
}
"""


def test_layout_of_timex_is_that_of_the_c_library(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "offsets.c").write_text(OFFSETS)
    subprocess.run([compiler, "-o", tmp_path / "offsets", tmp_path / "offsets.c"], check=True, timeout=patience(60))
    out = subprocess.run(
        [tmp_path / "offsets"], capture_output=True, text=True, check=True, timeout=patience(60)
    ).stdout
    maxerror, status, size = map(int, out.split())
    assert (_Timex.maxerror.offset, _Timex.status.offset) == (maxerror, status)
    assert ctypes.sizeof(_Timex) >= size


def test_real_clock_is_read():
    clock = read_clock()
    assert clock.synchronised is not None or clock.hidden
    assert clock.error is None or (clock.synchronised and clock.error >= 0)


def test_names_that_do_not_exist_and_are_none():
    for name in ("a" * 300, "bad..name", "\udcff"):
        own = look_up(name, ["not-an-address"])
        assert own.names[0].addresses == ()
        assert own.names[0].error
        assert own.reverse[0].name is None


def test_full_name_that_was_learnt_late_gets_what_time_is_left(monkeypatch):
    never, resolve = threading.Event(), socket.getaddrinfo
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.example")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda n, *a, **k: [] * never.wait() if "." in n else resolve(n, *a, **k)
    )
    own = look_up("localhost", [], limit=20, total=0.1)
    never.set()
    assert [(name.role, name.error) for name in own.names] == [("hostname", None), ("fqdn", "no answer within 0.5 s")]
    assert (own.fqdn, own.hidden) == ("localhost.example", ())


def test_question_passes_on_answer_and_error():
    assert TimedLookup(lambda: 7).wait(20)[:2] == (7, None)
    answer, error, _ = TimedLookup(lambda: Path("/nonexistent/x").read_text()).wait(20)
    assert (answer, error) == (None, "No such file or directory")


def test_what_took_long_once_is_asked_again():
    pauses = iter((0.6, 0.0))
    assert TimedLookup(lambda: time.sleep(next(pauses))).wait(20)[2] < 0.5
    assert TimedLookup(lambda: time.sleep(0.6)).wait(20)[2] >= 0.6


SILENT_NAME_SERVER = """
import json, msgspec, socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
server.settimeout(5)
from doctor.collectors.base import Machine
from doctor.collectors import collector_for
from doctor.collectors.runner import collect_sections
outcome = collect_sections([collector_for("host")], Machine())["host"]
print(type(outcome).__name__, len(server.recv(512)) > 12)
print(json.dumps(msgspec.to_builtins(outcome)))
"""


def test_silent_name_server_costs_its_limit_and_no_more():
    setup = """
    ip link set lo up
    ip link add web0 type bridge
    ip link set web0 up
    ip addr add 10.4.0.1/24 dev web0
    hostname silent-host
    folder=$(mktemp -d)
    mount -t tmpfs none $folder
    echo 'nameserver 127.0.0.1' > $folder/resolv
    echo '127.0.0.1 localhost' > $folder/hosts
    echo 'hosts: files dns' > $folder/switch
    mount --bind $folder/resolv /etc/resolv.conf
    mount --bind $folder/hosts /etc/hosts
    mount --bind $folder/switch /etc/nsswitch.conf
    umount -l $folder
    rmdir $folder
    """
    first, second = run_in_namespaces(setup, SILENT_NAME_SERVER, kinds=("--net", "--mount", "--uts")).splitlines()
    assert first == "HostFacts True"
    host = json.loads(second)
    assert host["hostname"] == "silent-host"
    assert host["names"] == [{"name": "silent-host", "error": "no answer within 2.5 s", "seconds": 2.5}]
    assert host["reverse"] == [{"address": "::ffff:10.4.0.1", "error": "no answer within 2.5 s", "seconds": 2.5}]
    assert "fqdn" not in host
    assert "fqdn" in [note["field"] for note in host["hidden"]]


SHARED_MEMORY = """
import ctypes, mmap, os
from doctor.collectors.base import Machine
from doctor.collectors.host.shared_memory import read_shared_memory
for name in ("nccl-left01", "nccl-mapped", "nccl-opened", "torch_77"):
    with open(f"/dev/shm/{name}", "wb+") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        if name == "nccl-mapped":
            # By the C library: a mapping of Python's keeps a descriptor, one of NCCL's does not.
            ctypes.CDLL(None).mmap(None, ctypes.c_size_t(1 << 20), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
opened = open("/dev/shm/nccl-opened")
state = read_shared_memory(Machine())
print(state.filesystem.total, state.filesystem.free, state.filesystem.kind, state.left_files, state.left_bytes)
"""


def test_real_shared_memory_of_64_mib():
    out = run_in_namespaces("mount -t tmpfs -o size=64m none /dev/shm", SHARED_MEMORY)
    assert out.split() == [str(64 << 20), str(60 << 20), "tmpfs", "1", str(1 << 20)]


def test_segments_in_a_container_that_shares_the_hosts_ipc_are_not_counted(tmp_path):
    machine = machine_at(tmp_path)
    put_parent(tmp_path / "proc/self/ns/ipc").symlink_to("ipc:[4026531839]")
    put_parent(tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532001]")
    put_parent(tmp_path / "dev/shm/nccl-abc").write_text("x")
    state = read_shared_memory(machine)
    assert (state.left_files, state.left_bytes) == (None, None)
    assert "nccl_shm_files" in [note.field for note in state.hidden]
    assert left_over(machine, []) == []


def test_segment_of_a_process_that_is_gone_is_left_over(tmp_path):
    segment = SharedMemoryFile("/dev/shm/nccl-abc", 4096, 12345)
    assert left_over(machine_at(tmp_path), [segment]) == [segment]
