"""What goes wrong on the first day: a typing error, a port in use, a limit of the container."""

from __future__ import annotations

from tests.faults.scenes import HEALTHY, Scene, allocation_environ, alone, srun_environ

LISTEN = """
python -c "
import pathlib, socket, time
taken = socket.create_server(('127.0.0.1', 0))
pathlib.Path('port').write_text(str(taken.getsockname()[1]))
time.sleep(60)
" &
LISTENER=$!
while [ ! -s port ]; do sleep 0.02; done
"""
"""A stranger that listens on a port of its own choice, which the file ``port`` then holds."""

MASTER = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}


def shared_memory(size: str) -> str:
    """/dev/shm of that size, as ``docker run --shm-size`` mounts it."""
    return f"mount -t tmpfs -o size={size} shm /dev/shm"


SCENES = (
    Scene(
        "misspelt variable",
        "NCCL001",
        alone(NCCL_SOCKET_IFNMAE="eth0"),
        alone(NCCL_SOCKET_IFNAME="lo,eth,en"),
        severity="warning",
        says=("NCCL_SOCKET_IFNMAE", "NCCL_SOCKET_IFNAME"),
    ),
    Scene(
        "interface that is not there",
        "NET007",
        alone(NCCL_SOCKET_IFNAME="eth9"),
        HEALTHY,
        says=("eth9",),
    ),
    Scene(
        "another program holds MASTER_PORT",
        "ENV008",
        alone(setup=LISTEN, shell="export MASTER_PORT=$(cat port)", **MASTER),
        alone(setup=LISTEN, shell="export MASTER_PORT=$(cat port); kill $LISTENER; sleep 0.2", **MASTER),
        says=("python",),
    ),
    Scene(
        "rank beyond the world",
        "ENV002",
        alone(RANK="4", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
        alone(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
        ranks=(4,),
    ),
    Scene(
        "the same GPU twice",
        "GPU003",
        alone(CUDA_VISIBLE_DEVICES="0,0"),
        alone(CUDA_VISIBLE_DEVICES="0,1"),
    ),
    Scene(
        "python in a batch script of four tasks",
        "ENV010",
        alone(**allocation_environ(4, 4), SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"),
        alone(**allocation_environ(1, 1), SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"),
        also=("ENV014",),
    ),
    Scene(
        "SLURM_NTASKS of the job kept in a step of one task",
        "ENV010",
        alone(**{**srun_environ(0, 1), "SLURM_NTASKS": "4"}),
        alone(**srun_environ(0, 1)),
        says=("SLURM_NTASKS=4",),
    ),
    Scene(
        "allocator option that does not exist",
        "MEM007",
        alone(PYTORCH_CUDA_ALLOC_CONF="expandable_segment:True"),
        alone(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        says=("expandable_segments",),
    ),
    Scene(
        "/dev/shm of a container by default",
        "MEM010",
        alone(spaces=("mount",), setup=shared_memory("64m")),
        alone(spaces=("mount",), setup=shared_memory("1g")),
        says=("64",),
    ),
    Scene(
        "limit of 256 open files",
        "HOST002",
        alone(shell="ulimit -n 256"),
        alone(shell="ulimit -n 1024"),
        severity="warning",
        says=("256",),
    ),
)
