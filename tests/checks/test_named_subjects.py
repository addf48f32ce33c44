"""Findings name the ranks, hosts and values that their facts or log lines show."""

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.facts import Directory, GpuFacts, HostFacts, LaunchFacts, MasterFacts, ProcessFacts, StorageFacts
from doctor.testing import healthy, logged


def found(check_id, sketch):
    check = next(one for one in builtin_checks() if one.id == check_id)
    (result,) = examine_job(sketch.job(), CheckRegistry((check,)))
    (finding,) = result.findings
    return finding


def without_tmpdir(*hosts):
    folder = Directory("/tmp/none", "temporary", "TMPDIR", exists=False)
    return healthy(hosts=3).put(StorageFacts(directories=(folder,)), hosts=hosts)


def loopback(hosts):
    return healthy(hosts=hosts, per_host=1).alter(MasterFacts, address="localhost", resolved=("::1",), is_local=True)


@pytest.mark.parametrize(
    ("check_id", "sketch", "summary"),
    [
        (
            "ENV006",
            loopback(12),
            "The master is localhost:29500 on 12 hosts: each host connects to itself",
        ),
        (
            "ENV009",
            healthy(hosts=2, per_host=2).by_srun().launched(RANK="0", WORLD_SIZE="4"),
            "RANK=0, but srun started these processes as SLURM_PROCID=1-3",
        ),
        (
            "ENV011",
            healthy().by_srun().launched(SLURM_GPUS_PER_TASK="1").drop(GpuFacts),
            "The SLURM task of local rank 1 may see only 1 GPU (SLURM_GPUS_PER_TASK=1)",
        ),
        (
            "ENV012",
            healthy(hosts=2, per_host=8).alter(ProcessFacts, ranks=range(8), threads_per_process=32),
            "8 ranks on node0 run 256 threads on 96 CPUs (all CPUs of the host)",
        ),
        (
            "ENV012",
            healthy(hosts=2, per_host=8).alter(ProcessFacts, threads_per_process=32),
            "8 ranks on a host run 256 threads on 96 CPUs (all CPUs of the host)",
        ),
        (
            "ENV018",
            healthy(hosts=2, per_host=4).alter(ProcessFacts, ranks=(3,), shm_device=91),
            "Rank 3 on node0 does not share /dev/shm with the others",
        ),
        (
            "ENV018",
            healthy(hosts=2, per_host=4).alter(ProcessFacts, ranks=(3, 7), shm_device=91),
            "Some ranks on one host do not share /dev/shm with the others",
        ),
        (
            "ENV018",
            healthy(hosts=2, per_host=2).alter(HostFacts, boot_id="boot-0"),
            "Ranks on one host (node0, node1) do not share the IPC, PID and network namespaces",
        ),
        ("HOST004", without_tmpdir("node1"), "TMPDIR=/tmp/none on node1 does not exist"),
        ("HOST004", without_tmpdir("node1", "node2"), "TMPDIR=/tmp/none does not exist"),
        (
            "GPU012",
            healthy(per_host=4).gpu(2, pcie_width=4, pcie_generation=1),
            "The PCIe link of GPU 2 of node0 uses 4 of 16 lanes",
        ),
        (
            "GPU014",
            logged(
                "fabric manager NVIDIA GPU driver interface version 550.54.15 don't match with driver version "
                "550.90.07. Please update with matching NVIDIA driver package."
            ),
            "Fabric manager 550.54.15 does not match driver 550.90.07",
        ),
        (
            "GPU027",
            logged("kernel: amdgpu 0000:c3:00.0: amdgpu: VM_L2_PROTECTION_FAULT_STATUS:0x00301031"),
            "A kernel failed on the GPU at PCI address 0000:c3:00.0: page fault (VM_L2_PROTECTION_FAULT_STATUS)",
        ),
        (
            "HOST008",
            logged("Still waiting to acquire lock on /home/me/x.lock (elapsed: 3600.1 seconds)"),
            "A process waited 60 minutes for the lock /home/me/x.lock",
        ),
        (
            "ENV017",
            logged("Normal  Preempted  10s  default-scheduler  Preempted by pod 7f2a on node node1"),
            "A pod was preempted by the Kubernetes scheduler",
        ),
    ],
)
def test_summary_names_what_is_known(check_id, sketch, summary):
    assert found(check_id, sketch).summary == summary


@pytest.mark.parametrize(
    ("check_id", "sketch", "words"),
    [
        ("ENV006", loopback(2), "export MASTER_ADDR=node0"),
        ("ENV003", healthy(hosts=3, per_host=2).alter(LaunchFacts, ranks=(4, 5), world_size=8), "On node2, use"),
        ("ENV004", healthy(hosts=2, per_host=2).renumbered(3, 2), "PID 10000 or 10001"),
        (
            "ENV017",
            logged("slurmstepd: error: *** JOB 123456 ON node01 CANCELLED AT 2026-01-02T03:04:05 ***"),
            "`sacct -X -j 123456 -o state%40`",
        ),
        (
            "GPU009",
            logged("NVRM: Xid (PCI:0000:0f:00): 94, pid=7194, name=python, Contained: SM (0x1). RST: No"),
            "-i 0000:0f:00.0",
        ),
    ],
)
def test_fix_names_what_is_known(check_id, sketch, words):
    assert words in found(check_id, sketch).fix
