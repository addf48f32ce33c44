"""The GPU collector against the real nvidia-ml-py over a fake driver, in the isolated process it runs in."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from doctor.collectors import collector_for
from doctor.collectors.base import Machine, NotPresent
from doctor.collectors.gpu.gpus import cuda_release, set_bits
from doctor.collectors.runner import Outcome, run_collector
from doctor.core.facts import Fabric, GpuFacts, GpuProcess, Missing, MissingReason, PeerLink
from doctor.knowledge.nvidia import kernel_bus_id, reason_names
from tests.lab.nvml import FakeNvml


def outcome(fake: FakeNvml, machine: str, *lines: str) -> Outcome:
    return run_collector(collector_for("gpus"), Machine(environ=fake.environ(machine, *lines)))


def facts(fake: FakeNvml, machine: str, *lines: str) -> GpuFacts:
    found = outcome(fake, machine, *lines)
    assert isinstance(found, GpuFacts), found
    return found


def test_eight_healthy_gpus(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "eight_h100")
    assert (found.driver_version, found.cuda_version, found.nvml_version) == ("570.124.06", "12.8", "12.570.124.06")
    assert found.hidden == ()
    assert [gpu.index for gpu in found.gpus] == list(range(8))
    assert len({gpu.uuid for gpu in found.gpus}) == 8
    gpu = found.gpus[5]
    assert (gpu.name, gpu.bus_id, gpu.minor, gpu.compute_capability) == (
        "NVIDIA H100 80GB HBM3",
        "0000:15:00.0",
        5,
        "9.0",
    )
    assert gpu.memory_total == 81559 << 20
    assert gpu.memory_free == (81559 - 512) << 20
    assert (gpu.utilization, gpu.temperature, gpu.power, gpu.power_limit) == (0, 40, 100_000, 700_000)
    assert (gpu.clock, gpu.clock_max, gpu.clock_reasons) == (1980, 1980, ())
    assert (gpu.compute_mode, gpu.persistence, gpu.mig, gpu.mig_devices) == ("default", True, False, ())
    assert (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width, gpu.pcie_width_max) == (5, 5, 16, 16)
    assert (gpu.numa_node, gpu.cpus, gpu.processes) == (1, tuple(range(8, 16)), ())
    assert (gpu.lost, gpu.error, gpu.fabric) == (False, None, Fabric("completed", status=0, clique=0, health=2))
    assert gpu.nvlinks is not None
    assert [link.index for link in gpu.nvlinks] == list(range(18))
    assert all(link.active and link.remote == "switch" and link.errors == 0 for link in gpu.nvlinks)


def test_every_pair_of_gpus_has_one_path(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "eight_h100")
    assert len(found.links) == 28
    assert set(found.links) == {
        PeerLink(first, second, "nvlink", "ok", "ok") for first in range(8) for second in range(first + 1, 8)
    }


def test_peer_access_that_the_machine_blocks(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "peer_access_blocked")
    assert found.links == (PeerLink(0, 1, "system", "disabled-by-driver-setting", "topology-not-supported"),)


def test_card_without_nvlink_and_fabric(fake_nvml: FakeNvml) -> None:
    (gpu,) = facts(fake_nvml, "one_gpu_a100").gpus
    assert gpu.nvlinks == ()
    assert gpu.fabric == Fabric("not-supported")


@pytest.mark.parametrize("machine", ["dead_gpu", "fallen_off_bus"])
def test_dead_gpu_leaves_the_others_readable(fake_nvml: FakeNvml, machine: str) -> None:
    found = facts(fake_nvml, machine)
    assert [gpu.index for gpu in found.gpus if gpu.lost] == [4]
    assert "NVML code" in (found.gpus[4].error or "")
    assert all(gpu.memory_total for gpu in found.gpus if gpu.index != 4)
    assert len(found.links) == 21


def test_gpu_lost_half_way_keeps_what_was_read(fake_nvml: FakeNvml) -> None:
    gpu = facts(fake_nvml, "reset_required").gpus[2]
    assert gpu.lost
    assert gpu.uuid
    assert gpu.bus_id == "0000:12:00.0"
    assert gpu.temperature is None


def test_memory_errors(fake_nvml: FakeNvml) -> None:
    gpus = facts(fake_nvml, "memory_errors").gpus
    assert [gpu.index for gpu in gpus if gpu.retired_pages_pending] == [3]
    assert (gpus[5].ecc_sram_uncorrected, gpus[5].ecc_sram_threshold_exceeded) == (42, True)
    assert (gpus[7].ecc_volatile_uncorrected, gpus[7].ecc_aggregate_uncorrected) == (3, 9)
    assert (gpus[7].remapped_correctable, gpus[7].remapped_uncorrectable) == (1, 2)
    assert (gpus[7].remap_pending, gpus[7].remap_failed) == (True, True)
    assert (gpus[7].recovery_action, gpus[0].recovery_action) == ("gpu-reset", None)
    assert (gpus[0].ecc, gpus[0].ecc_volatile_uncorrected, gpus[0].remap_failed) == (True, 0, False)


def test_throttle_reasons_by_name(fake_nvml: FakeNvml) -> None:
    gpu = facts(fake_nvml, "throttled").gpus[6]
    assert gpu.clock_reasons == ("hardware-slowdown", "hardware-thermal")
    assert (gpu.clock, gpu.temperature) == (345, 91)


def test_nvlinks_down_and_with_errors(fake_nvml: FakeNvml) -> None:
    gpus = facts(fake_nvml, "nvlink_down").gpus
    down = gpus[1].nvlinks
    noisy = gpus[3].nvlinks
    assert down is not None
    assert noisy is not None
    assert [(link.index, link.remote) for link in down if not link.active] == [(4, None), (5, None)]
    assert (noisy[7].errors, noisy[7].fatal) == (19, 2)


def test_fabric_that_nobody_started(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "no_fabric_manager")
    assert all(gpu.fabric and (gpu.fabric.state, gpu.fabric.status) == ("not-started", 999) for gpu in found.gpus)
    assert {(link.path, link.read) for link in found.links} == {("system", "unknown")}


def test_multi_node_nvlink_of_the_newest_interfaces(fake_nvml: FakeNvml) -> None:
    gpus = facts(fake_nvml, "multi_node_nvlink").gpus
    assert gpus[0].fabric == Fabric("completed", status=0, clique=32766, cluster="00" * 15 + "07", health=2)
    assert gpus[1].nvlinks is not None
    assert [(link.errors, link.fatal) for link in gpus[1].nvlinks[2:5]] == [(0, 0), (2, 2), (0, 0)]


def test_fabric_of_a_driver_that_knows_only_the_first_structure(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "one_gpu_a100", "gpu.0.fabric_state=2", "error.nvmlDeviceGetGpuFabricInfoV=13")
    assert found.gpus[0].fabric == Fabric("in-progress", status=0, clique=0)


def test_mig_slices_and_their_processes(fake_nvml: FakeNvml) -> None:
    gpus = facts(fake_nvml, "mig").gpus
    assert (gpus[0].mig, gpus[1].mig) == (True, False)
    assert [slice_.index for slice_ in gpus[0].mig_devices] == [0, 1, 2]
    assert gpus[0].mig_devices[1].uuid == "MIG-00000000-0000-0000-0000-000000000001"
    assert gpus[0].mig_devices[1].memory == 9856 << 20
    assert gpus[0].mig_devices[1].name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert [(process.pid, process.memory) for process in gpus[0].processes or ()] == [(71, None)]
    assert gpus[0].utilization is None


def test_processes_by_name_and_owner(fake_nvml: FakeNvml) -> None:
    own = os.getpid()
    found = facts(fake_nvml, "one_gpu_a100", f"gpu.0.procs={own}:300,{2**22 + 1}:-", f"gpu.0.graphics_procs={own}:300")
    known, gone = found.gpus[0].processes or ()
    visible = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    name = Path("/proc/self/comm").read_text().strip() if visible else None
    assert known == GpuProcess(own, 300 << 20, name=name, user_id=os.getuid() if visible else None)
    assert gone == GpuProcess(2**22 + 1, None)


def test_foreign_processes_of_all_kinds(fake_nvml: FakeNvml) -> None:
    gpu = facts(fake_nvml, "foreign_processes").gpus[2]
    assert [(process.pid, process.memory, process.kind) for process in gpu.processes or ()] == [
        (4242, 78_000 << 20, "compute"),
        (4243, None, "compute"),
        (4244, 16 << 20, "graphics"),
    ]
    assert gpu.memory_used == 79_000 << 20


@pytest.mark.parametrize(
    ("machine", "field", "expected"),
    [
        ("exclusive_mode", "compute_mode", ["exclusive-process"] * 8),
        ("pcie_degraded", "pcie_width", [16, 16, 16, 16, 16, 4, 16, 16]),
        ("pcie_degraded", "pcie_generation", [5, 5, 5, 5, 5, 3, 5, 5]),
        ("two_models", "compute_capability", ["9.0"] * 7 + ["8.0"]),
    ],
)
def test_machines_that_differ_in_one_value(
    fake_nvml: FakeNvml, machine: str, field: str, expected: list[object]
) -> None:
    assert [getattr(gpu, field) for gpu in facts(fake_nvml, machine).gpus] == expected


def test_old_driver_without_newer_functions(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "old_driver", "gpu.1.procs=9:100", "gpu.1.clock_reasons=4")
    gpu = found.gpus[1]
    assert found.cuda_version == "11.0"
    assert found.hidden == ()
    assert gpu.clock_reasons == ("software-power-cap",)
    assert [process.pid for process in gpu.processes or ()] == [9]
    assert gpu.memory_total == 81559 << 20
    assert (gpu.fabric, gpu.remap_failed, gpu.ecc_sram_uncorrected, gpu.recovery_action) == (None, None, None, None)


def test_what_permission_hides_has_a_note(fake_nvml: FakeNvml) -> None:
    found = facts(fake_nvml, "restricted_container")
    first, second = found.gpus
    assert first.processes is None  # although the list of graphics processes is there, and empty
    assert (second.lost, second.uuid) == (False, "")
    assert "ermission" in (second.error or "")
    note = found.why_hidden("gpus.processes")
    assert note is not None
    assert note.reason.startswith("GPU 0: ")
    assert note.unhide


@pytest.mark.parametrize(
    ("machine", "lack", "words"),
    [
        ("driver_not_loaded", MissingReason.ABSENT, "no NVIDIA driver"),
        ("version_mismatch", MissingReason.HIDDEN, "different releases"),
        ("no_permission", MissingReason.HIDDEN, "does not start"),
    ],
)
def test_driver_that_does_not_start(fake_nvml: FakeNvml, machine: str, lack: MissingReason, words: str) -> None:
    found = outcome(fake_nvml, machine)
    assert isinstance(found, Missing)
    assert found.lack is lack
    assert words in found.reason
    assert not found.is_breakage


def test_gpus_on_the_bus_without_a_loaded_driver_are_hidden(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NotPresent("no NVIDIA driver: Driver Not Loaded (NVML code 9)")

    # In this process, for an isolated one reads the true /sys.
    monkeypatch.setattr("doctor.collectors.gpu.gpus.start_nvml", refuse)
    for number in (5, 6):
        folder = tmp_path / f"bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
    here = Machine(environ=fake_nvml.environ("driver_not_loaded"), sys=tmp_path)
    found = run_collector(collector_for("gpus"), here, here=True)
    assert isinstance(found, Missing)
    assert found.lack is MissingReason.HIDDEN
    assert found.reason.startswith("2 NVIDIA GPUs are on the PCI bus")
    assert "modprobe" in found.unhide


def test_version_mismatch_says_how_to_end_it(fake_nvml: FakeNvml) -> None:
    found = outcome(fake_nvml, "version_mismatch")
    assert isinstance(found, Missing)
    assert "reboot" in found.unhide


def test_no_library_means_no_driver(tmp_path: Path) -> None:
    try:
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        found = run_collector(collector_for("gpus"), Machine(environ={"LD_LIBRARY_PATH": str(tmp_path)}))
        assert isinstance(found, Missing)
        assert found.lack is MissingReason.ABSENT
        assert "libnvidia-ml.so.1" in found.reason
    else:
        pytest.skip("this machine has a driver")


def test_hanging_driver_call_ends_at_the_deadline_and_leaves_no_process(fake_nvml: FakeNvml) -> None:
    environ = fake_nvml.environ("hanging_driver")
    found = run_collector(msgspec.structs.replace(collector_for("gpus"), deadline=1.0), Machine(environ=environ))
    assert isinstance(found, Missing)
    assert found.lack is MissingReason.TIMEOUT
    assert processes_with(f"FAKE_NVML_CONF={environ['FAKE_NVML_CONF']}") == []


def processes_with(variable: str) -> list[str]:
    """The processes that were started with this variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_names_and_numbers() -> None:
    assert cuda_release(12080) == "12.8"
    assert cuda_release(13000) == "13.0"
    assert cuda_release(None) is None
    assert kernel_bus_id("00000000:3B:00.0") == "0000:3b:00.0"
    assert kernel_bus_id("00010000:01:00.0") == "00010000:01:00.0"
    assert reason_names(0x1) == ("gpu-idle",)
    assert reason_names(1 << 20) == ("0x100000",)
    assert set_bits([1 << 63 | 1, 2]) == (0, 63, 65)
