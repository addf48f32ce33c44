"""The kernel log: lines as drivers write them, the real device, and logs that may not be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.collectors.base import Machine, NotVisible
from doctor.collectors.host.kernel_log import EVENTS, collect_kernel_log, job_started, parse_event
from doctor.core.facts import KernelEvent
from tests.collectors.namespaces import run_in_namespaces
from tests.collectors.recorded import machine_at, put_parent
from tests.lab.cases import each_case

FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@each_case(
    ("line", "kind", "code", "device", "pid"),
    [
        (FALLEN, "xid", 79, "0000:3b:00", 1234),
        ("NVRM: Xid (PCI:0000:3B:00): 48, pid='<unknown>', name=<unknown>, DBE", "xid", 48, "0000:3b:00", None),
        ("NVRM: Xid (PCI:0000:ba:00): 94, pid='771', name=python3, Contained", "xid", 94, "0000:ba:00", 771),
        ("NVRM: Xid (PCI:0000:89:00): 31, Ch 00000014, intr 10000000.", "xid", 31, "0000:89:00", None),
        ("NVRM: Xid (0000:03:00): 13, 0004 00000000", "xid", 13, "0000:03:00", None),
        ("NVRM: Xid (PCI:0000:1a:00): 145, pid=9, name=x, NVLINK: RLW_CTRL", "xid", 145, "0000:1a:00", 9),
        ("nvidia-nvswitch3: SXid (PCI:0000:c7:00.0): 20034, Fatal, Link 30 LTSSM", "sxid", 20034, "0000:c7:00.0", None),
        (
            "Out of memory: Killed process 4567 (python) total-vm:1kB, anon-rss:2kB, UID:0 oom_score_adj:0",
            "oom",
            None,
            None,
            4567,
        ),
        ("Memory cgroup out of memory: Killed process 98 (pt_data_worker) total-vm:1kB", "oom", None, None, 98),
        ("Out of memory: Kill process 12 (java) score 900 or sacrifice child", "oom", None, None, 12),
        ("pcieport 0000:15:01.0: AER: Corrected error received: 0000:18:00.0", "pcie", None, "0000:15:01.0", None),
        ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)", "pcie", None, "0000:3b:00.0", None),
    ],
)
def test_lines_that_matter(line, kind, code, device, pid):
    assert parse_event(12.5, line) == KernelEvent(kind, 12.5, code, device, pid, line)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "pcieport 0000:15:01.0: AER: enabled with IRQ 29",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=98,uid=0",
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "NVRM: Xid (PCI:0000:3b:00): ",
        "",
    ],
)
def test_lines_that_do_not(line):
    assert parse_event(1.0, line) is None


def with_log(tmp_path: Path, text: str) -> Machine:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(text)
    return machine_at(tmp_path)


def test_records_times_and_continuations(tmp_path):
    text = (
        "6,339,5140900,-;NET: Registered protocol family 10\n"
        f"4,340,91827364555,-;{FALLEN}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"
        "3,341,91827365000,-,caller=T1;Memory cgroup out of memory: Killed process 98 (python)\n"
    )
    events = collect_kernel_log(with_log(tmp_path, text)).events
    assert [(event.kind, event.time) for event in events] == [("xid", 91827.364555), ("oom", 91827.365)]


def test_flood_of_one_kind_leaves_the_others(tmp_path):
    flood = "".join(f"3,{n},{n},-;pcieport 0000:15:01.0: AER: Corrected error received\n" for n in range(1, 5000))
    events = collect_kernel_log(with_log(tmp_path, f"4,0,7,-;{FALLEN}\n{flood}")).events
    assert len(events) == EVENTS + 1
    assert events[0].kind == "xid"
    assert events[-1].time == 4999 / 1e6


@pytest.mark.parametrize("garbage", ["", "\x00\xff\n;;\n", "nonsense\n", f"x,y,z;{FALLEN}\n", "9" * 5000, ";" + FALLEN])
def test_garbage_is_survived(tmp_path, garbage):
    events = collect_kernel_log(with_log(tmp_path, garbage)).events
    assert [event.time for event in events] in ([], [None])


def test_no_log_is_not_visible(tmp_path):
    with pytest.raises(NotVisible) as caught:
        collect_kernel_log(machine_at(tmp_path))
    assert "container" in caught.value.reason
    assert "dmesg" in caught.value.unhide


def test_a_folder_in_its_place_is_not_visible(tmp_path):
    put_parent(tmp_path / "dev/kmsg/x").write_text("")
    with pytest.raises(NotVisible):
        collect_kernel_log(machine_at(tmp_path))


def test_real_log_is_read_to_its_end():
    """Does not wait for further lines; whoever may not read it is told so."""
    try:
        facts = collect_kernel_log(Machine())
    except NotVisible:
        pytest.skip("needs the right to read the kernel log")
    assert facts.job_started > 0


WITHOUT_RIGHTS = """
import os
from doctor.collectors.base import NotVisible, Machine
from doctor.collectors.host.kernel_log import collect_kernel_log
os.setgid(65534); os.setuid(65534)
try:
    print(collect_kernel_log(Machine()))
except NotVisible as barrier:
    print("NotVisible", barrier)
"""


def test_log_without_the_right_to_read_it():
    if Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() != "1":
        pytest.skip("needs kernel.dmesg_restrict=1")
    out = run_in_namespaces("true", WITHOUT_RIGHTS)
    assert out.startswith("NotVisible the kernel log may not be read")


def processes(tmp_path: Path, *rows: tuple[int, int, str, int]) -> Machine:
    """``rows``: pid, parent, name, start in seconds; the first is this process."""
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, parent, name, start in rows:
        fields = f"S {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {start * ticks} 0 0"
        put_parent(tmp_path / f"proc/{pid}/stat").write_text(f"{pid} ({name}) {fields}\n")
    (tmp_path / "proc/self").symlink_to(str(rows[0][0]))
    return machine_at(tmp_path)


@pytest.mark.parametrize(
    ("rows", "started"),
    [
        (
            [(9, 8, "python", 50), (8, 7, "torchrun", 40), (7, 6, "bash", 20), (6, 1, "sshd", 5), (1, 0, "systemd", 0)],
            40,
        ),
        ([(9, 8, "python3.11", 50), (8, 7, "bash", 40), (7, 1, "slurmstepd", 30), (1, 0, "systemd", 0)], 30),
        ([(9, 8, "rank) 0 (x", 50), (8, 1, "bash", 10), (1, 0, "init", 0)], 50),
        ([(9, 8, "python", 50), (8, 7, "tmux: server", 30), (7, 1, "slurmstepd", 10)], 50),
        ([(9, 9, "python", 50)], 50),
    ],
)
def test_job_started_with_its_outermost_launcher(tmp_path, rows, started):
    assert job_started(processes(tmp_path, *rows)) == started


def test_job_started_is_unknown_without_processes(tmp_path):
    assert job_started(machine_at(tmp_path)) is None


def test_real_job_began_before_its_child():
    program = (
        "from doctor.collectors.base import Machine as S\n"
        "from doctor.collectors.host.kernel_log import job_started\n"
        "print(job_started(S()))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert 0 < float(done.stdout) <= float(Path("/proc/uptime").read_text().split()[0])
