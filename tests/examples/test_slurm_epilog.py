"""The epilog, run by a real slurmd: which nodes it names, and that no node is drained by it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.network import rate
from tests.lab.sample import long_only
from tests.lab.slurm import READY_WITHIN, SlurmCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCTOR = Path(sys.executable).parent / "doctor"


@dataclass(frozen=True)
class Site:
    """A cluster with the epilog; ``shared`` is what is ``/shared/rankdoctor`` in the recipes."""

    cluster: SlurmCluster
    shared: Path

    @property
    def epilog(self) -> Path:
        """What the nodes run after a job."""
        return self.shared / "epilog.sh"

    def run(self, script: str, *options: str) -> str:
        """What a job on all nodes wrote, once their epilogs have ended."""
        written = self.cluster.sbatch(f"#!/usr/bin/env bash\n{script}", options, timeout=100)
        self.cluster.wait_until_idle()
        return written

    def excluded(self) -> dict[str, str]:
        """What stands for each host that later jobs should do without."""
        return {file.name: file.read_text() for file in (self.shared / "excluded").iterdir()}

    def exclude_option(self) -> str:
        """The option as the recipe has it, worked out by a shell."""
        told = next(
            line for line in (EXAMPLES / "slurm_epilog.sh").read_text().splitlines() if line.startswith("#   sbatch ")
        )
        words = told.removeprefix("#   sbatch ").removesuffix(" …").replace("/shared/rankdoctor", str(self.shared))
        return self.cluster.hosts[0].sh(f"printf %s {words}").stdout


@pytest.fixture
def site(slurm_cluster: Callable[..., SlurmCluster], tmp_path: Path) -> Callable[..., Site]:
    """Makes one, of so many nodes, whose epilog finds the doctor at ``doctor``."""

    def make(nodes: int, doctor: Path | str = DOCTOR) -> Site:
        for folder in ("jobs", "excluded"):
            (tmp_path / folder).mkdir()
        one = Site(slurm_cluster(nodes), tmp_path)
        _take_epilogs(one)
        text = (EXAMPLES / "slurm_epilog.sh").read_text()
        text = text.replace("DOCTOR:-/opt/rankdoctor/bin/doctor", f"DOCTOR:-{doctor}")
        one.epilog.write_text(text.replace("DOCTOR_SHARED:-/shared/rankdoctor", f"DOCTOR_SHARED:-{tmp_path}"))
        return one

    return make


def _take_epilogs(one: Site) -> None:
    """Have every slurmd run the epilog; one that says that it came, as they take a new configuration when they like."""
    one.epilog.write_text(f"#!/usr/bin/env bash\n: > {one.shared}/came-$SLURMD_NODENAME\n")
    one.epilog.chmod(0o755)
    for host in one.cluster.hosts:
        host.sh(f"echo Epilog={one.epilog} >> /etc/slurm/slurm.conf")
    one.cluster.hosts[0].sh("scontrol reconfigure")
    until = time.monotonic() + READY_WITHIN
    while len(list(one.shared.glob("came-*"))) < len(one.cluster.hosts):
        assert time.monotonic() < until, "the nodes run no epilog"
        one.run("true", f"--nodes={len(one.cluster.hosts)}")


def test_what_the_job_named_is_left_out_of_the_next(site: Callable[..., Site]) -> None:
    one = site(3, "/nowhere/doctor")
    one.run(f"echo 'node[1,7],other' > {one.shared}/jobs/$SLURM_JOB_ID", "--nodes=3")
    assert one.excluded().keys() == {"node1"}
    assert f"{time.strftime('%Y-%m-%d', time.gmtime())}T" in one.excluded()["node1"]
    assert "named by the check of job" in one.excluded()["node1"]
    assert one.exclude_option() == "--exclude=node1"
    went = one.cluster.srun(["--nodes=2", one.exclude_option()], ["hostname"])
    assert sorted(went.stdout.split()) == ["node0", "node2"], went.stderr
    old = time.time() - 8 * 24 * 3600
    os.utime(one.shared / "excluded" / "node1", (old, old))
    assert one.cluster.srun(["--nodes=3", one.exclude_option()], ["hostname"]).stdout.count("node") == 3


@long_only("30 s of full probes, which tests/faults/live/test_full_probes.py plays")
def test_a_slow_host_is_measured_and_left_out_of_the_next(site: Callable[..., Site]) -> None:
    one = site(4)
    rate(one.cluster.hosts[2], "10mbit")
    kept = [
        line
        for line in (EXAMPLES / "slurm_full.sbatch").read_text().splitlines()
        if not line.startswith(("#SBATCH --gpus", "#SBATCH --time", "#SBATCH --n", "srun python"))
    ]
    job = "\n".join(kept).replace("/shared/rankdoctor", str(one.shared))
    written = one.run(f"{job}\n", "--nodes=4", "--ntasks-per-node=1")
    assert one.excluded().keys() == {"node2"}, written
    went = one.cluster.srun(["--nodes=3", one.exclude_option()], ["hostname"])
    assert sorted(went.stdout.split()) == ["node0", "node1", "node3"], went.stderr


def test_a_list_that_is_none_names_nobody(site: Callable[..., Site]) -> None:
    one = site(1, "/nowhere/doctor")
    for left in (
        "ln -s {names} {list}",
        "printf -- '--version\\n' > {list}",
        "echo 'node0 ;' > {list}",
        "mkdir {list}",
    ):
        (one.shared / "names").write_text("node0\n")
        one.run(left.format(names=one.shared / "names", list=f"{one.shared}/jobs/$SLURM_JOB_ID"))
        assert one.excluded() == {}, left
    one.run(f"cp {one.shared}/names {one.shared}/jobs/$SLURM_JOB_ID")
    assert one.excluded().keys() == {"node0"}


def test_a_node_with_an_error_names_itself(site: Callable[..., Site]) -> None:
    one = site(2)
    one.cluster.hosts[1].sh("mount -o remount,size=1m /dev/shm")
    one.run("true", "--nodes=2")
    assert one.excluded().keys() == {"node1"}
    assert "MEM010 after job" in one.excluded()["node1"]


def test_an_epilog_that_hangs_or_fails_drains_no_node(site: Callable[..., Site], tmp_path: Path) -> None:
    doctor, came = tmp_path / "doctor", tmp_path / "came"
    doctor.write_text(f"#!/usr/bin/env bash\necho $$ >> {came}\nexec sleep 1000\n")
    doctor.chmod(0o755)
    one = site(1, doctor)
    one.epilog.write_text(one.epilog.read_text().replace("--kill-after=5 55", "--kill-after=1 4"))
    assert one.run("echo well") == "well\n"
    doctor.write_text(f"#!/usr/bin/env bash\necho again >> {came}\necho '::error title=MEM010 x::y'\n")
    (one.shared / "excluded").rmdir()
    for _ in range(2):  # the node takes a job again
        assert one.run("echo well") == "well\n"
    hung, *again = came.read_text().split()
    assert again == ["again", "again"]
    assert one.cluster.hosts[0].run(["kill", "-0", hung]).returncode != 0
