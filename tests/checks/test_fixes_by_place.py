"""Fixes that depend on what starts the ranks: a container manager, a batch system or a login."""

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.facts import HostFacts, Limit, ProcessFacts, SlurmFacts, TrainerFacts
from doctor.testing import healthy, logged


def fix_of(check_id, sketch):
    check = next(one for one in builtin_checks() if one.id == check_id)
    (result,) = examine_job(sketch.job(), CheckRegistry((check,)))
    (finding,) = result.findings
    return finding.fix


def low(container=None):
    limit = Limit("open_files", 256, 256)
    return healthy(hosts=2).alter(ProcessFacts, ranks=(2, 3), limits=(limit,)).alter(HostFacts, container=container)


@pytest.mark.parametrize(
    ("container", "fix"),
    [
        ("docker", "Start the container on node1 with `docker run --ulimit nofile=1048576:1048576`."),
        ("podman", "Start the container on node1 with `podman run --ulimit nofile=1048576:1048576`."),
        ("kubernetes", "Set `LimitNOFILE=1048576` in the systemd unit of containerd on node1, and restart containerd."),
        (None, "Add `* - nofile 1048576` to /etc/security/limits.conf on node1, and start the job from a new login."),
    ],
)
def test_hard_limit_is_raised_where_it_is_set(container, fix):
    assert fix_of("HOST002", low(container)) == fix


def test_hard_limit_in_a_slurm_job_is_that_of_slurmd():
    fix = fix_of("HOST002", low().put(SlurmFacts(job_id="1")))
    assert fix == "Set `LimitNOFILE=1048576` in the systemd unit of slurmd on node1, and restart slurmd."


@pytest.mark.parametrize(
    ("container", "words"),
    [("docker", "docker run --pids-limit=-1"), ("kubernetes", "podPidsLimit"), (None, "TasksMax")],
)
def test_pids_limit_is_raised_where_it_is_set(container, words):
    sketch = healthy(hosts=2, per_host=8).alter(
        HostFacts, hosts=("node1",), container=container, pids_limit=1024, pids_used=900
    )
    assert words in fix_of("HOST007", sketch)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("could not open /dev/nvidia-uvm: No such file or directory", "-u -c 0"),
        ("no NVIDIA GPU device is present: /dev/nvidia3 does not exist", "-c 3"),
        ("could not open /dev/nvidiactl: No such file or directory", "-c 255"),
    ],
)
def test_device_file_is_created_by_its_own_option(line, options):
    assert f"`sudo nvidia-modprobe {options}`" in fix_of("HOST009", logged(line))


def test_mpi_is_not_in_wheels():
    sketch = healthy(per_host=2).put(TrainerFacts(source="fabric run", backend="mpi"))
    assert fix_of("GPU021", sketch).startswith("Request the backend nccl or gloo")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tmp-checkpoint-500", "Install transformers 4.37 or later"),
        ("checkpoint-500.tmp", "Rename the checkpoint on one"),
    ],
)
def test_checkpoint_that_all_ranks_rename(name, words):
    line = f"FileNotFoundError: [Errno 2] No such file or directory: 'out/{name}' -> 'out/checkpoint-500'"
    assert fix_of("HOST004", logged(line)).startswith(words)
