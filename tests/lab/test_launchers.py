"""Real launchers over hosts of the lab start real ranks on them, and leave none behind."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.lab.hosts import LabHost
from tests.lab.network import link_down
from tests.lab.openmpi import mpirun
from tests.lab.sample import long_only
from tests.lab.slurm import SlurmCluster

pytestmark = long_only("tests/examples/ and tests/attach/test_gathered.py start jobs by these launchers")
LINGER = ["bash", "-c", "hostname; setsid sleep 600"]


def test_srun_starts_tasks_on_every_node(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(3)
    report = ["bash", "-c", "echo $SLURM_PROCID $(hostname) $SLURM_LOCALID $GREETING"]
    done = cluster.srun(["-N", "3", "--ntasks-per-node", "2"], report, {"GREETING": "good day"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} node{rank // 2} {rank % 2} good day" for rank in range(6)]
    assert cluster.srun(["-N", "3"], ["bash", "-c", "exit $SLURM_PROCID"]).returncode == 2


def test_srun_out_of_time_leaves_a_free_cluster(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(2)
    done = cluster.srun(["-N", "2"], LINGER, timeout=1)
    assert (done.returncode, sorted(done.stdout.split())) == (-9, ["node0", "node1"])
    assert [host.processes("sleep 600") for host in cluster.hosts] == [[], []]
    assert cluster.srun(["-N", "2", "--exclusive"], ["hostname"], timeout=20).returncode == 0


def test_sbatch_gives_what_the_job_wrote(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(2)
    output = cluster.sbatch("#!/bin/bash\necho batch on $(hostname)\nsrun hostname\necho failing >&2\n", ["-N", "2"])
    assert sorted(output.splitlines()) == ["batch on node0", "failing", "node0", "node1"]
    with pytest.raises(subprocess.TimeoutExpired) as late:
        cluster.sbatch("#!/bin/bash\necho started\nsleep 600\n", timeout=4)
    assert "started" in str(late.value.stdout)


def test_tasks_have_gpus_of_their_own(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(1, gpus=8)
    show = ["bash", "-c", "echo $SLURM_PROCID:$CUDA_VISIBLE_DEVICES"]
    done = cluster.srun(["-n", "2", "--gpus-per-task", "2"], show)
    assert sorted(done.stdout.split()) == ["0:0,1", "1:2,3"]


def test_clusters_stand_side_by_side(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    one, other = slurm_cluster(1), slurm_cluster(2)
    assert [cluster.srun([], ["bash", "-c", "echo $SLURM_JOB_ID"]).stdout for cluster in (one, other)] == ["1\n", "1\n"]


def test_mpirun_starts_ranks_on_every_host(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    first, second, third = lab_hosts(3)
    report = ["bash", "-c", "echo $OMPI_COMM_WORLD_RANK $(hostname) $GREETING"]
    done = mpirun([(first, 2), (second, 1), (third, 2)], report, {"GREETING": "good day"})
    assert done.returncode == 0, done.stderr
    places = ["node0", "node0", "node1", "node2", "node2"]
    assert sorted(done.stdout.splitlines()) == [f"{rank} {place} good day" for rank, place in enumerate(places)]
    assert mpirun([(first, 1), (second, 1)], ["bash", "-c", "exit $OMPI_COMM_WORLD_RANK"]).returncode == 1


def test_mpirun_out_of_time_leaves_no_rank(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    first, second = lab_hosts(2)
    done = mpirun([(first, 1), (second, 1)], LINGER, timeout=2)
    assert (done.returncode, sorted(done.stdout.split())) == (-9, ["node0", "node1"])
    assert [host.processes("sleep 600") for host in (first, second)] == [[], []]


def test_mpirun_needs_the_network(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    first, second = lab_hosts(2)
    link_down(second)
    done = mpirun([(first, 1), (second, 1)], ["hostname"], timeout=30)
    assert done.returncode not in (0, -9)
    assert "node1" in done.stderr
