"""The output of nvidia-smi is read as the GPUs of a host, and the checks of GPUs judge it."""

from pathlib import Path

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.facts import GpuFacts, GpuProcess
from doctor.core.finding import Severity
from doctor.postmortem.nvidia_smi.printout import looks_like_nvidia_smi, read_nvidia_smi
from doctor.testing.cases import healthy

DATA = Path(__file__).parents[1] / "data" / "nvidia_smi"
MIB = 1 << 20


def text_of(name):
    return (DATA / name).read_text()


def facts_of(*texts):
    (facts,) = read_nvidia_smi("\n".join(texts).splitlines(), "smi.txt")
    return facts


def hidden(facts):
    return {note.field.removeprefix("gpus.") for note in facts.hidden}


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.txt")))
def test_every_form_is_known_by_its_beginning(name):
    assert looks_like_nvidia_smi(text_of(name))


def test_a_log_in_which_somebody_printed_the_table_is_a_log():
    log = "\n".join(f"step {step}: loss 0.{step}" for step in range(200))
    assert not looks_like_nvidia_smi(text_of("table.txt") + log)
    assert not looks_like_nvidia_smi(log)
    assert not looks_like_nvidia_smi("index, name, value\n1, warmup, 3\n2, decay, 4\n")
    assert not looks_like_nvidia_smi("")
    assert looks_like_nvidia_smi("$ nvidia-smi\n" + text_of("table.txt"))


def test_the_table():
    facts = facts_of(text_of("table.txt"))
    assert (facts.driver_version, facts.cuda_version) == ("570.133.20", "12.8")
    first, second = facts.gpus
    assert (first.index, first.name, first.bus_id) == (0, "NVIDIA H100 80GB HBM3", "0000:19:00.0")
    assert (first.memory_used, first.memory_total) == (61234 * MIB, 81559 * MIB)
    assert (first.temperature, first.power, first.power_limit, first.utilization) == (38, 119_000, 700_000, 97)
    assert (first.persistence, first.compute_mode, first.mig, first.ecc) == (True, "default", False, True)
    assert first.ecc_volatile_uncorrected == 0
    assert first.processes == (
        GpuProcess(1234567, 61220 * MIB, "/opt/venv/bin/python3"),
        GpuProcess(1700, 4 * MIB, "/usr/lib/xorg/Xorg", kind="graphics"),
    )
    assert second.processes == ()


def test_a_table_does_not_tell_everything():
    facts = facts_of(text_of("table.txt"))
    assert hidden(facts) == {
        "clock_reasons",
        "remap_failed",
        "retired_pages_pending",
        "pcie_width",
        "pcie_generation",
        "nvlinks",
        "fabric",
    }
    assert facts.gpus[0].clock_reasons is None


def test_a_table_of_an_old_driver():
    (gpu,) = facts_of(text_of("table_2016.txt")).gpus
    assert (gpu.bus_id, gpu.ecc_volatile_uncorrected, gpu.compute_mode) == ("0000:00:04.0", 2, "exclusive-process")
    assert (gpu.mig, gpu.processes) == (None, ())


def test_slices_of_a_gpu():
    (gpu,) = facts_of(text_of("table_mig.txt")).gpus
    assert gpu.mig is True
    assert [(one.index, one.memory) for one in gpu.mig_devices] == [(0, 9856 * MIB), (1, 9856 * MIB)]
    assert gpu.processes == (GpuProcess(4242, 9012 * MIB, "python"),)
    assert gpu.ecc_volatile_uncorrected is None


def test_a_container_lists_nobody():
    kept = [line for line in text_of("table.txt").splitlines() if "python3" not in line and "Xorg" not in line]
    facts = facts_of("\n".join(kept))
    assert facts.gpus[0].processes is None
    assert facts.gpus[1].processes == ()
    assert "processes" in hidden(facts)


def test_the_last_of_several_tables_counts():
    earlier = text_of("table.txt").replace("61234MiB", " 1234MiB")
    assert facts_of(earlier, text_of("table.txt")).gpus[0].memory_used == 61234 * MIB


def test_a_gpu_without_a_handle_is_lost_and_the_table_goes_on():
    words = "Unable to determine the device handle for GPU2: 0000:5D:00.0: Unknown Error"
    facts = facts_of(words, text_of("table.txt"))
    assert [(gpu.index, gpu.lost) for gpu in facts.gpus] == [(0, False), (1, False), (2, True)]
    assert (facts.gpus[2].bus_id, facts.gpus[2].error) == ("0000:5d:00.0", "Unknown Error")
    older = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover"
    (gpu,) = facts_of(older).gpus
    assert (gpu.lost, gpu.bus_id, gpu.error) == (True, "0000:3b:00.0", "GPU is lost")
    assert looks_like_nvidia_smi(older)


def test_err_in_place_of_values():
    """One of them is a sensor; all of them a GPU that does not answer."""
    table = text_of("table.txt")
    assert facts_of(table.replace("71W /  700W", "ERR! /  700W")).gpus[1].error == "ERR! instead of a value"
    lost = table.replace(
        "| N/A   36C    P0             71W /  700W |       1MiB /  81559MiB |      0%      Default |",
        "|ERR!  ERR! ERR!           ERR! / ERR!    |    GPU is lost         |    ERR!         ERR! |",
    )
    assert [gpu.lost for gpu in facts_of(lost).gpus] == [False, True]


def test_the_query():
    facts = facts_of(text_of("query.txt"))
    (gpu,) = facts.gpus
    assert (facts.driver_version, facts.cuda_version) == ("560.35.03", "12.6")
    assert (gpu.uuid, gpu.bus_id, gpu.minor) == ("GPU-f7b02328-d6fe-5b1f-9683-15041689bb03", "0000:db:00.0", 7)
    assert (gpu.memory_used, gpu.memory_free) == (22380 * MIB, 58730 * MIB)
    assert (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width, gpu.pcie_width_max) == (5, 5, 16, 16)
    assert (gpu.ecc_volatile_uncorrected, gpu.ecc_aggregate_uncorrected, gpu.ecc_sram_uncorrected) == (0, 0, 0)
    assert (gpu.remap_pending, gpu.remap_failed, gpu.retired_pages_pending) == (False, False, None)
    assert (gpu.clock_reasons, gpu.clock, gpu.clock_max, gpu.power) == (("gpu-idle",), 345, 1980, 71530)
    assert (gpu.fabric.state, gpu.fabric.status, gpu.mig, gpu.compute_mode) == ("completed", 0, False, "default")
    assert gpu.processes == (GpuProcess(280058, 22374 * MIB, "/home/me/venv/bin/python"),)
    assert hidden(facts) == {"nvlinks"}


def altered(old, new):
    query = text_of("query.txt")
    assert old in query
    return facts_of(query.replace(old, new)).gpus[0]


def test_errors_in_the_query():
    volatile = altered(
        "            DRAM Uncorrectable            : 0\n        Aggregate",
        " " * 12 + "DRAM Uncorrectable : 4\n        Aggregate",
    )
    assert (volatile.ecc_volatile_uncorrected, volatile.ecc_aggregate_uncorrected) == (4, 0)
    assert altered("Pending                           : No", "Pending                           : Yes").remap_pending
    assert altered("Occurred        : No", "Occurred        : Yes").remap_failed
    assert altered("Exceeded       : No", "Exceeded       : Yes").ecc_sram_threshold_exceeded
    assert altered("Pending Page Blacklist            : N/A", "Pending Page Blacklist : Yes").retired_pages_pending
    assert altered("Reset Required                    : No", "Reset Required : Yes").recovery_action == "gpu-reset"
    assert altered(": Completed", ": In Progress").fabric.state == "in-progress"
    assert altered("Success", "Insufficient Resources").fabric.status


def test_counters_of_clock_reasons_are_no_reasons():
    hot = altered("HW Slowdown                       : Not Active", "HW Slowdown                       : Active")
    assert hot.clock_reasons == ("gpu-idle", "hardware-slowdown")
    older = facts_of(text_of("query.txt").replace("Clocks Event Reasons", "Clocks Throttle Reasons"))
    assert older.gpus[0].clock_reasons == ("gpu-idle",)


def test_double_bit_errors_of_older_drivers():
    old = """==============NVSMI LOG==============
Driver Version                      : 390.30
Attached GPUs                       : 1
GPU 00000000:3B:00.0
    Product Name                    : Tesla V100-SXM2-16GB
    Ecc Mode
        Current                     : Enabled
    ECC Errors
        Volatile
            Single Bit
                Device Memory       : 9
                Total               : 9
            Double Bit
                Device Memory       : 2
                Total               : 2
        Aggregate
            Double Bit
                Total               : 5
    Retired Pages
        Single Bit ECC              : 0
        Double Bit ECC              : 2
        Pending                     : Yes
"""
    (gpu,) = facts_of(old).gpus
    assert (gpu.ecc, gpu.ecc_volatile_uncorrected, gpu.ecc_aggregate_uncorrected) == (True, 2, 5)
    assert gpu.retired_pages_pending is True
    assert "clock_reasons" in hidden(facts_of(old))


CSV = """index, name, pci.bus_id, driver_version, memory.used [MiB], ecc.errors.uncorrected.volatile.total, {reasons}
0, NVIDIA A100-SXM4-80GB, 00000000:07:00.0, 535.54.03, 71234 MiB, 0, 0x0000000000000004
1, NVIDIA A100-SXM4-80GB, 00000000:0F:00.0, 535.54.03, 12 MiB, 3, 0x0000000000000048
""".format(reasons="clocks_event_reasons.active")


def test_a_list():
    facts = facts_of(CSV)
    assert facts.driver_version == "535.54.03"
    assert [gpu.ecc_volatile_uncorrected for gpu in facts.gpus] == [0, 3]
    assert [gpu.clock_reasons for gpu in facts.gpus] == [
        ("software-power-cap",),
        ("hardware-slowdown", "hardware-thermal"),
    ]
    assert (facts.gpus[1].bus_id, facts.gpus[1].memory_used) == ("0000:0f:00.0", 12 * MIB)
    assert {"remap_failed", "processes"} <= hidden(facts)
    assert looks_like_nvidia_smi(CSV)


def test_a_list_of_a_gpu_that_needs_a_reset():
    (gpu,) = facts_of("index, uuid, memory.used [MiB]\n0, GPU-aa, [GPU requires reset]\n").gpus
    assert (gpu.lost, gpu.recovery_action, gpu.memory_used) == (False, "gpu-reset", None)
    (gpu,) = facts_of("index, uuid, memory.used [MiB]\n0, GPU-aa, [GPU is lost]\n").gpus
    assert gpu.lost


def test_lists_of_processes_and_rows():
    users = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-aa, 77, python, 4000 MiB\n"
    (gpu,) = facts_of("index, uuid, memory.used [MiB]\n3, GPU-aa, 4003 MiB\n", users).gpus
    assert (gpu.index, gpu.processes) == (3, (GpuProcess(77, 4000 * MIB, "python"),))
    rows = "gpu_bus_id, remapped_rows.uncorrectable, remapped_rows.pending, remapped_rows.failure\n"
    rows += "00000000:19:00.0, 1, Yes, No\n"
    (gpu,) = facts_of(rows).gpus
    assert (gpu.remapped_uncorrectable, gpu.remap_pending, gpu.remap_failed) == (1, True, False)


def test_links_and_paths():
    facts = facts_of(text_of("links.txt"))
    paths = {(link.first, link.second): link.path for link in facts.links}
    assert paths == {(0, 1): "nvlink", (0, 2): "system", (1, 2): "host-bridge"}
    first, second = facts.gpus
    assert [(link.index, link.active, link.errors, link.fatal) for link in first.nvlinks] == [
        (0, True, 14, 3),
        (1, False, None, None),
    ]
    assert all(link.active and not link.fatal for link in second.nvlinks)


def test_forms_of_one_gpu_are_put_together():
    query = text_of("query.txt").replace("00000000:DB:00.0", "00000000:19:00.0")
    facts = facts_of(text_of("table.txt"), query, text_of("links.txt"))
    assert [gpu.index for gpu in facts.gpus] == [0, 1]
    assert facts.gpus[0].clock_max == 1980
    assert len(facts.gpus[0].nvlinks) == 2


# What the checks make of it.


def judged(facts):
    """The checks of GPUs that find an error or a warning on a host that printed this, where a rank uses each GPU."""
    count = len(facts.gpus)
    job = healthy(per_host=count, gpus=count).put(facts).job()
    results = examine_job(job, CheckRegistry(tuple(check for check in builtin_checks() if check.family == "devices")))
    grave = (Severity.ERROR, Severity.WARNING)
    return {result.id for result in results for finding in result.findings if finding.severity in grave}


NO_FAULT_OF_LINKS = {"<inactive>": "26.562 GB/s", "Recovery Errors: 3": "Recovery Errors: 0"}
LOADED = {"Gpu                               : 4 %": "Gpu                               : 99 %"}
NO_STRANGER = {"python3": "Xorg", "      C   /opt": "      G   /usr", "61220MiB": "    9MiB", "61234MiB": "    9MiB"}


def changed(name, changes):
    text = text_of(name)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return facts_of(text)


@pytest.mark.parametrize(
    ("name", "changes"), [("table.txt", NO_STRANGER), ("query.txt", LOADED), ("links.txt", NO_FAULT_OF_LINKS)]
)
def test_a_healthy_host_gives_no_error_and_no_warning(name, changes):
    # Whoever holds the GPU of a sample is a stranger to the job of the case.
    assert judged(changed(name, changes)) <= ({"GPU006"} if name == "query.txt" else set())


SICK = [
    ("GPU006", "table.txt", {}),
    ("GPU009", "table.txt", {**NO_STRANGER, "Off |                    0 |": "Off |                   12 |"}),
    ("GPU009", "query.txt", {"Occurred        : No": "Occurred        : Yes"}),
    ("GPU011", "query.txt", {"HW Thermal Slowdown           : Not": "HW Thermal Slowdown           :"}),
    ("GPU012", "query.txt", {**LOADED, "Current                   : 16x": "Current                   : 4x"}),
    ("GPU013", "links.txt", {}),
    ("GPU016", "table.txt", {"0%      Default": "0%   Prohibited"}),
    ("GPU019", "query.txt", {"GPU C2C Mode                          : Disabled": "GPU Recovery Action : Node Reboot"}),
    (
        "GPU019",
        "table.txt",
        {"| NVIDIA-SMI": "Unable to determine the device handle for GPU2: Unknown Error\n| NVIDIA-SMI"},
    ),
]


@pytest.mark.parametrize(("check", "name", "changes"), SICK, ids=[f"{one[0]}-{one[1]}" for one in SICK])
def test_a_fault_in_the_output_is_found(check, name, changes):
    assert check in judged(changed(name, changes))


def test_nothing_is_read_from_nothing():
    assert read_nvidia_smi([]) == ()
    assert read_nvidia_smi(["No devices were found"]) == ()
    assert isinstance(facts_of(text_of("table.txt")), GpuFacts)
