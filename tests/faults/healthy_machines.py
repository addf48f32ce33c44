"""Machines and surroundings in which nothing is wrong, as people have them."""

from __future__ import annotations

from tests.faults.gpu_scenes import EIGHT, container_devices
from tests.faults.job_scenes import THREE_HOSTS, machine, member, pair
from tests.faults.launcher_scenes import BY_MPIRUN, BY_TORCHRUN, by_srun
from tests.faults.scenes import CUDA, HEALTHY, allocation_environ, alone, crew, process, srun_environ, together
from tests.faults.settings_scenes import NETWORK, interface
from tests.faults.stage import Play

BRIDGES = """
ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up
ip link add virbr0 type bridge; ip addr add 192.168.122.1/24 dev virbr0; ip link set virbr0 up
"""
LAPTOP = f"""
hostname laptop; printf '127.0.0.1 localhost\\n127.0.1.1 laptop\\n' > names; mount --bind names /etc/hosts
{interface("wlp2s0", "192.168.1.23/24")}; ip route add default via 192.168.1.1
{interface("enp3s0", up=False)}; {BRIDGES}
ip tuntap add tun0 mode tun 2>/dev/null && ip addr add 10.8.0.6/24 dev tun0 && ip link set tun0 up || true
"""

IMAGE = {
    # What an image of a vendor's registry sets, beside what a cluster's prolog adds.
    "NCCL_VERSION": "2.27.3",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "CUDA_VERSION": "12.8.1",
    "NVIDIA_REQUIRE_CUDA": "cuda>=12.8 brand=tesla,driver>=470,driver<471",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX",
    "OMP_NUM_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "^docker0,lo",
    "NCCL_DEBUG": "WARN",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
LIGHTNING_CHILD = {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40123"}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "1",
    "RANK": "0",
}
BATCH = {**allocation_environ(1, 1), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}

MACHINES: dict[str, Play] = {
    "this machine": HEALTHY,
    "a container with 1 GiB of /dev/shm": alone(
        spaces=("mount", "pid", "uts"), setup=f"hostname 3f2a9c; {container_devices()}"
    ),
    "a laptop with Docker, libvirt and a VPN": alone(spaces=NETWORK, setup=LAPTOP),
    "a machine without any network": alone(spaces=NETWORK),
    "eight H100, one process": EIGHT,
    "eight H100, eight ranks": together(*crew(8, like=process(gpus=("eight_h100",), packages=CUDA))),
    "eight H100, the variables of a vendor's image": alone(gpus=("eight_h100",), packages=CUDA, **IMAGE),
    "a workstation with one GPU": alone(gpus=("one_gpu_a100",), packages=CUDA),
    "a desktop on one GPU": alone(
        gpus=(
            "one_gpu_a100",
            "gpu.0.name=NVIDIA GeForce RTX 3090",
            "gpu.0.cc_minor=6",
            "gpu.0.graphics_procs=901:300",
            "gpu.0.mem_used_mib=700",
            "gpu.0.persistence=0",
            "gpu.0.pcie_gen=1",
            "gpu.0.ecc=0",
        ),
        packages=CUDA,
    ),
    "GPUs hidden from a CPU job": alone(gpus=("eight_h100",), packages=("torch==2.8.0",), CUDA_VISIBLE_DEVICES=""),
    "the variables of a vendor's image, no GPU": alone(**IMAGE),
    "a login node": alone(SLURM_CONF="/etc/slurm/slurm.conf", SLURM_TIME_FORMAT="relative"),
    "an interactive salloc of four tasks": alone(**{**allocation_environ(4, 4), "SLURM_JOB_NAME": "interactive"}),
    "a batch script of one task": alone(**BATCH),
    "a batch script that exports the master's address": alone(**BATCH, MASTER_ADDR="127.0.0.1", MASTER_PORT="12910"),
    "a step of one task": alone(**srun_environ(0, 1)),
    "a pod of one process": alone(**POD),
    "a notebook on a workstation": alone(JPY_PARENT_PID="1", gpus=("one_gpu_a100",), packages=CUDA),
    "processes that Lightning starts": together(
        *(process(**LIGHTNING_CHILD, LOCAL_RANK=str(rank), packages=("torch==2.8.0",)) for rank in range(2))
    ),
    "two ranks by torchrun": BY_TORCHRUN,
    "two ranks by mpirun": BY_MPIRUN,
    "two ranks by srun": by_srun(2),
    "two hosts with Docker on both": pair(more=BRIDGES),
    "two hosts that share a router": Play(
        (
            machine(0, member(0, MASTER_ADDR="10.7.0.1"), more="ip route add default via 10.7.0.254"),
            machine(1, member(1, MASTER_ADDR="10.7.0.1"), more="ip route add default via 10.7.0.254"),
        )
    ),
    "three hosts": THREE_HOSTS,
}
