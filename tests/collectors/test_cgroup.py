"""Control groups: recorded trees of both versions, and real limits read back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.host.cgroup import CgroupReader, read_cgroup
from tests.collectors.recorded import machine_at, plant
from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]


def test_version_2_in_a_pod(tmp_path):
    limits = read_cgroup(plant("cgroup-v2-pod", tmp_path))
    assert (limits.cpu_quota, limits.cpu_periods, limits.cpu_throttled) == (6.5, 91823, 20411)
    assert limits.memory_limit == 48 << 30
    assert limits.memory_used == (40 << 30) - (9 << 30), "page cache that can be dropped is no use"
    assert (limits.pids_limit, limits.pids_used) == (4096, 3901)
    assert limits.hidden == ()


def test_a_reader_reads_new_counts_and_follows_the_process(tmp_path):
    machine = plant("cgroup-v2-pod", tmp_path)
    reader, folder = CgroupReader(machine, ("cpu",)), tmp_path / "sys/fs/cgroup"
    assert reader.read().cpu_quota == 6.5
    (folder / "cpu.max").write_text("200000 100000\n")
    (folder / "cpu.stat").write_text("nr_periods 91900\nnr_throttled 20411\n")
    assert (reader.read().cpu_quota, reader.read().cpu_periods) == (2.0, 91900)
    (folder / "moved").mkdir()
    (folder / "moved/cpu.max").write_text("100000 100000\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/moved\n")
    assert reader.read().cpu_quota == read_cgroup(machine).cpu_quota


def test_version_2_takes_the_tightest_of_all_parents(tmp_path):
    limits = read_cgroup(plant("cgroup-v2-slurm-step", tmp_path))
    assert (limits.cpu_quota, limits.cpu_periods, limits.cpu_throttled) == (16.0, 77, 0)
    assert limits.memory_limit == 256 << 30
    assert limits.pids_limit is None


def test_version_1_in_a_container(tmp_path):
    limits = read_cgroup(plant("cgroup-v1-docker", tmp_path))
    assert (limits.cpu_quota, limits.cpu_periods, limits.cpu_throttled) == (1.5, 500, 125)
    assert (limits.memory_limit, limits.memory_used) == (None, None), "LONG_MAX in pages is no limit"
    assert (limits.pids_limit, limits.pids_used) == (512, 500)
    assert limits.hidden == ()


def test_namespace_from_outside(tmp_path):
    machine = plant("cgroup-v2-pod", tmp_path)
    (tmp_path / "proc/self/cgroup").write_text("0::/../../other\n")
    assert read_cgroup(machine).cpu_quota == 6.5


def test_no_limit_is_none_and_not_hidden(tmp_path):
    machine = plant("cgroup-v2-pod", tmp_path)
    for name in ("cpu.max", "memory.max", "pids.max"):
        (tmp_path / "sys/fs/cgroup" / name).write_text("max 100000\n" if name == "cpu.max" else "max\n")
    limits = read_cgroup(machine)
    assert (limits.cpu_quota, limits.memory_limit, limits.pids_limit, limits.hidden) == (None, None, None, ())
    assert limits.cpu_periods == 91823


def test_group_that_is_not_mounted_is_hidden(tmp_path):
    limits = read_cgroup(machine_at(tmp_path))
    assert [note.field for note in limits.hidden] == ["cpu_quota", "memory_limit", "pids_limit"]


@pytest.mark.parametrize("tree", ["cgroup-v2-pod", "cgroup-v1-docker", "cgroup-v2-slurm-step"])
@pytest.mark.parametrize("garbage", ["", "\x00\xff", "max max", "0 0", "-7 -7", "9" * 400, "1:2:3:4\n - - -"])
def test_garbage_is_no_limit(tmp_path, tree, garbage):
    machine = plant(tree, tmp_path)
    for path in (tmp_path / "sys").rglob("*"):
        if path.is_file():
            path.write_text(garbage)
    limits = read_cgroup(machine)
    assert limits.cpu_quota is None
    assert limits.cpu_throttled is None
    for name in ("cgroup", "mountinfo"):
        (tmp_path / "proc/self" / name).write_text(garbage)
    assert len(read_cgroup(machine).hidden) == 3


@pytest.fixture
def version_1_groups() -> Iterator[list[Path]]:
    """New groups of the machine's version 1 hierarchies, removed afterwards."""
    made = []
    try:
        for controller in ("cpu", "memory", "pids"):
            group = Path("/sys/fs/cgroup") / controller / f"rankdoctor-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                pytest.skip("needs root and control groups of version 1")
            made.append(group)
        yield made
    finally:
        for group in made:
            group.rmdir()


PROGRAM = """
import os, sys
for group in sys.argv[1:]:
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from doctor.collectors.base import Machine
from doctor.collectors.host.cgroup import read_cgroup
print(read_cgroup(Machine()))
"""


def test_real_limits_of_version_1(version_1_groups):
    cpu, memory, pids = version_1_groups
    (cpu / "cpu.cfs_quota_us").write_text("125000")
    (memory / "memory.limit_in_bytes").write_text(str(256 << 20))
    (pids / "pids.max").write_text("77")
    command = [sys.executable, "-c", PROGRAM, *map(str, version_1_groups)]
    text = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=patience(60), check=True).stdout
    assert "cpu_quota=1.25," in text
    assert f"memory_limit={256 << 20}," in text
    assert "pids_limit=77, pids_used=1," in text
    assert "hidden=()" in text


def test_this_process_has_visible_groups_or_says_so():
    limits = read_cgroup(Machine())
    assert limits.memory_limit is None or limits.memory_limit > 0
    assert limits.cpu_quota is None or limits.cpu_quota > 0
