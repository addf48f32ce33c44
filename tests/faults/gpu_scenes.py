"""Faulty GPUs and drivers, through the real bindings and a driver of the lab."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.newcomer_scenes import shared_memory
from tests.faults.scenes import CUDA, Scene, alone, crew, process, srun_environ, together
from tests.faults.stage import Play, Process

MIG_SLICE = "MIG-00000000-0000-0000-0000-00000000000"
NOBODY = "gpu.0.mig.1.procs="
TWO = ("eight_h100", "count=2")


def on(machine: str, *lines: str, packages: tuple[str, ...] = CUDA, **environ: str) -> Play:
    """One process on a machine of the lab."""
    return alone(gpus=(machine, *lines), packages=packages, **environ)


def ranks_on(
    machine: str, *lines: str, world: int = 2, changes: Mapping[int, Mapping[str, str]] | None = None, **common: str
) -> Play:
    """Ranks as torchrun starts them on a machine of the lab."""
    return together(*crew(world, changes, like=process(gpus=(machine, *lines), packages=CUDA), **common))


def task(rank: int, **environ: str) -> Process:
    """One of two tasks of srun on a node with four GPUs."""
    start = {**srun_environ(rank, 2), "SLURM_GPUS_PER_TASK": "2", **environ}
    return process(gpus=("eight_h100", "count=4"), packages=CUDA, **start)


EIGHT = on("eight_h100")
PAIR = ranks_on(*TWO)


def switches(fabric_manager: bool) -> str:
    """The PCI tree of a machine with four NVSwitches, and perhaps its fabric manager as a process."""
    tree = """
mount -t tmpfs pci /sys/bus/pci/devices
for N in 5 6 7 8; do
  D=/sys/bus/pci/devices/0000:0$N:00.0; mkdir $D; echo 0x10de > $D/vendor; echo 0x068000 > $D/class
done
"""
    daemon = "cp $(command -v sleep) nv-fabricmanager; ./nv-fabricmanager 60 &\nsleep 0.1"
    return tree + (daemon if fabric_manager else "")


def container_devices(*names: str) -> str:
    """/dev of a container, with character devices of those names besides the usual ones."""
    nodes = "; ".join(f"mknod dev/{name} c 1 3" for name in names)
    return f"""
mkdir dev; mount -t tmpfs dev dev; mkdir dev/shm
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty dev/
ln -s /proc/self/fd dev/fd; {nodes}
mount --move dev /dev; {shared_memory("1g")}
mkdir root; touch root/container; mount -t tmpfs run /run; mkdir -p /run/systemd; echo docker > /run/systemd/container
"""


SCENES = (
    Scene("a GPU that is lost", "GPU019", on("dead_gpu"), EIGHT, says=("GPU 4",)),
    Scene("a GPU that fell off the bus", "GPU019", on("fallen_off_bus"), EIGHT, says=("GPU 4",)),
    Scene("a GPU that waits for its reset", "GPU019", on("reset_required"), EIGHT, says=("GPU 2",)),
    Scene("uncorrectable memory errors", "GPU009", on("memory_errors"), EIGHT, says=("GPU 7", "GPU 5", "GPU 3")),
    Scene("a GPU too hot", "GPU011", on("throttled"), EIGHT, severity="warning", says=("GPU 6", "345")),
    Scene(
        "another user's training",
        "GPU006",
        on("foreign_processes"),
        on("eight_h100", "gpu.2.mem_used_mib=300", "gpu.2.graphics_procs=4244:200"),
        severity="warning",
        says=("GPU 2", "4242"),
    ),
    Scene(
        "a GPU nearly full before the run",
        "MEM003",
        on("foreign_processes"),
        on("eight_h100", "gpu.2.mem_used_mib=300"),
        severity="warning",
        says=("GPU 2",),
        also=("GPU006",),
    ),
    Scene(
        "two NVLinks down",
        "GPU013",
        on("eight_h100", "gpu.1.nvlink.4=0", "gpu.1.nvlink.5=0"),
        EIGHT,
        says=("GPU 1", "16 of 18"),
    ),
    Scene(
        "fewer PCIe lanes than its neighbors",
        "GPU012",
        on("pcie_degraded"),
        EIGHT,
        severity="warning",
        says=("GPU 5",),
    ),
    Scene(
        "no peer access",
        "GPU018",
        on("peer_access_blocked"),
        on("eight_h100", "count=2", "link=50", "p2p.0=0", "gpu.*.nvlinks=0"),
    ),
    Scene(
        "persistence mode off", "GPU008", on("one_gpu_a100", "gpu.0.persistence=0"), on("one_gpu_a100"), severity="info"
    ),
    Scene("a torch without CUDA", "GPU021", on("one_gpu_a100", packages=("torch==2.8.0",)), on("one_gpu_a100")),
    Scene(
        "a driver too old for this CUDA",
        "VER002",
        on("old_driver"),
        on("old_driver", "driver=570.124.06", "cuda=12080"),
        says=("450",),
    ),
    Scene(
        "a GPU that this torch has no code for",
        "VER003",
        on("one_gpu_a100", "gpu.0.name=Tesla V100-SXM2-32GB", "gpu.0.cc_major=7"),
        on("one_gpu_a100"),
        says=("7.0",),
    ),
    Scene(
        "an NCCL too old for this GPU",
        "NCCL009",
        on("eight_h100", packages=("torch==2.1.2+cu118", "nvidia-nccl-cu11==2.15.1")),
        EIGHT,
        severity="warning",
        says=("2.15.1",),
    ),
    Scene("P2P switched off on NVLink", "NCCL006", on("eight_h100", NCCL_P2P_DISABLE="1"), EIGHT, severity="warning"),
    Scene(
        "a visible device that is not there", "GPU003", on("eight_h100", CUDA_VISIBLE_DEVICES="0,9"), EIGHT, says=("9",)
    ),
    Scene(
        "a UUID of another machine",
        "GPU003",
        on("eight_h100", CUDA_VISIBLE_DEVICES="GPU-11111111-2222-3333-4444-555555555555"),
        on("eight_h100", CUDA_VISIBLE_DEVICES="GPU-00000000-0000-0000-0000-000000000003"),
    ),
    Scene(
        "two ranks on one GPU",
        "GPU001",
        ranks_on(*TWO, changes={0: {"CUDA_VISIBLE_DEVICES": "0"}, 1: {"CUDA_VISIBLE_DEVICES": "0"}}),
        ranks_on(*TWO, changes={0: {"CUDA_VISIBLE_DEVICES": "0,1"}, 1: {"CUDA_VISIBLE_DEVICES": "0,1"}}),
        ranks=(0, 1),
        also=("GPU002",),
    ),
    Scene(
        "--gpus-per-task under ranks that count devices themselves",
        "ENV011",
        together(*(task(rank, CUDA_VISIBLE_DEVICES=f"{2 * rank},{2 * rank + 1}") for rank in range(2))),
        together(*(task(rank, CUDA_VISIBLE_DEVICES="0,1,2,3") for rank in range(2))),
        severity="warning",
        ranks=(1,),
    ),
    Scene(
        "a shorter list of devices on one rank",
        "GPU004",
        ranks_on("eight_h100", "count=4", changes={1: {"CUDA_VISIBLE_DEVICES": "2,3"}}),
        ranks_on("eight_h100", "count=4"),
        severity="warning",
        ranks=(0, 1),
    ),
    Scene(
        "more ranks than GPUs",
        "GPU002",
        ranks_on("eight_h100", "count=1"),
        PAIR,
        ranks=(1,),
    ),
    Scene(
        "exclusive mode and two ranks on one GPU",
        "GPU016",
        ranks_on("exclusive_mode", "count=2", CUDA_VISIBLE_DEVICES="0"),
        ranks_on("exclusive_mode", "count=2"),
        ranks=(0, 1),
        also=("GPU001", "GPU002"),
    ),
    Scene(
        "GPUs of two models",
        "GPU005",
        ranks_on("eight_h100", "count=2", "gpu.1.name=NVIDIA A100-SXM4-80GB", "gpu.1.cc_major=8"),
        PAIR,
        severity="warning",
        ranks=(0, 1),
    ),
    Scene(
        "ranks on slices of one GPU",
        "GPU015",
        ranks_on("mig", NOBODY, changes={r: {"CUDA_VISIBLE_DEVICES": f"{MIG_SLICE}{r}"} for r in (0, 1)}),
        on("mig", NOBODY, CUDA_VISIBLE_DEVICES=f"{MIG_SLICE}0"),
        severity="warning",
        ranks=(0, 1),
        also=("GPU004",),
    ),
    Scene(
        "NVSwitches without their fabric manager",
        "GPU014",
        alone(
            spaces=("mount",),
            setup=switches(fabric_manager=False),
            needs=("host-pids",),
            gpus=("eight_h100",),
            packages=CUDA,
        ),
        alone(
            spaces=("mount",),
            setup=switches(fabric_manager=True),
            needs=("host-pids",),
            gpus=("eight_h100",),
            packages=CUDA,
        ),
    ),
    Scene(
        "a container without nvidia-uvm",
        "HOST009",
        alone(
            spaces=("mount",),
            setup=container_devices("nvidia0", "nvidiactl"),
            gpus=("one_gpu_a100",),
            packages=CUDA,
        ),
        alone(
            spaces=("mount",),
            setup=container_devices("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"),
            gpus=("one_gpu_a100",),
            packages=CUDA,
        ),
        says=("nvidia-uvm",),
    ),
)
