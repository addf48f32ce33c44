"""Faults under the launchers of clusters: srun of a real SLURM, alone and around torchrun, and mpirun."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL

from tests.faults.live.launchers import GOES_ON, SBATCH, mpirun, srun, srun_torchrun
from tests.faults.live.rank_scenes import BUSY, BY_FOLDER_SECONDS, KILLED, LATE, struck
from tests.faults.live.scenes import LiveScene
from tests.faults.live.stage import Launcher, Play, Ranks, ranks
from tests.faults.live.strikes import Loss, Strike, has_arrived
from tests.faults.scenes import CUDA
from tests.lab.slurm import slurm

SRUN, MPIRUN = srun(), mpirun()
STORE = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
ETH9 = ranks(1, NCCL_SOCKET_IFNAME="eth9")


def by(
    launcher: Launcher, count: int, each: int = 1, *, odd: Ranks | None = None, shell: str = "", **environ: str
) -> Play:
    """``each`` ranks on so many hosts, which meet in a folder; ``odd`` in the place of those of its host."""
    identical = [ranks(number, each, shell=shell, **environ) for number in range(count)]
    groups = tuple(odd if odd and odd.host == one.host else one for one in identical)
    return Play(count, groups, launcher=launcher)


def as_told(play: Play) -> Play:
    """The same over a store, where the launcher's own variables tell the ranks to meet."""
    return replace(play, way="store")


STEP = by(SRUN, 3)
STEP_AS_TOLD = as_told(STEP)

BY_SRUN = (
    LiveScene(
        "srun: an interface that one host does not have, the store where SLURM's node list says",
        "NET007",
        as_told(by(SRUN, 3, odd=ETH9)),
        STEP_AS_TOLD,
        ranks=(1,),
        hosts=("node1",),
        says=("eth9",),
    ),
    LiveScene(
        "sbatch: an interface that one host does not have, in a step of the script",
        "NET007",
        by(SBATCH, 3, odd=ETH9),
        STEP,
        ranks=(1,),
        hosts=("node1",),
        says=("eth9",),
    ),
    LiveScene(
        "srun: RANK=0 exported before it",
        "ENV009",
        as_told(by(SRUN, 3, RANK="0", WORLD_SIZE="3", **STORE)),
        STEP_AS_TOLD,
        ranks=(1, 2),
        hosts=("node1", "node2"),
        says=("SLURM_PROCID",),
    ),
    LiveScene(
        "srun: only RANK=0 exported before it",
        "ENV009",
        by(SRUN, 3, RANK="0"),
        STEP,
        ranks=(1, 2),
        hosts=("node1", "node2"),
    ),
    LiveScene(
        "srun: WORLD_SIZE written by hand",
        "ENV003",
        by(SRUN, 3, shell="export RANK=$SLURM_PROCID", WORLD_SIZE="4", **STORE),
        by(SRUN, 3, shell="export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS", **STORE),
        ranks=(0, 1, 2),
        says=("WORLD_SIZE=4", "SLURM_NTASKS=3"),
    ),
    LiveScene(
        "srun: another count of tasks exported",
        "ENV010",
        by(SRUN, 3, SLURM_NTASKS="4"),
        STEP,
        ranks=(0, 1, 2),
        says=("SLURM_NTASKS=4", "3 tasks"),
    ),
    LiveScene(
        "srun: a task that ends before the doctor starts; the node list says where it was",
        "ENV005",
        replace(by(SRUN, 3, odd=ranks(1, started=False)), timeout=BY_FOLDER_SECONDS),
        STEP,
        ranks=(1,),
        hosts=("node1",),
        says=("did not join",),
    ),
    LiveScene(
        "srun: a node that is lost while all gather",
        "ENV005",
        replace(by(srun("--wait=1", lab=slurm), 3, odd=Ranks(1, gpus=BUSY)), during=Loss(1), timeout=BY_FOLDER_SECONDS),
        STEP,
        ranks=(1,),
        hosts=("node1",),
        says=(LATE,),
        codes=((1, None),),
    ),
    LiveScene(
        "srun: two torchruns a node",
        "ENV009",
        by(srun_torchrun(2), 2),
        by(srun_torchrun(1), 2),
        ranks=(0, 1),
        says=("2 times per host",),
    ),
)

OWN_GPU = """
cp $FAKE_NVML_CONF $0-$SLURM_PROCID.conf; export FAKE_NVML_CONF=$0-$SLURM_PROCID.conf CUDA_VISIBLE_DEVICES=0
echo gpu.0.uuid=GPU-00000000-0000-0000-0000-00000000000$SLURM_LOCALID >> $FAKE_NVML_CONF
"""
"""What a task sees of the GPUs where SLURM's device cgroups part them: its own, as the first."""
TASK_BOUND = srun("--gpus-per-task=1", gpus=4)
GPUS_BY_NODE = srun("--gpus-per-node=2", gpus=4)


def on_gpus(launcher: Launcher, *lines: str, shell: str = "") -> Play:
    """Two tasks on each of two nodes, whose drivers show them these GPUs."""
    groups = tuple(Ranks(host, 2, shell=shell, gpus=("eight_h100", *lines), packages=CUDA) for host in range(2))
    return Play(2, groups, launcher=launcher)


BY_NODE = on_gpus(GPUS_BY_NODE, "count=4")
BEHIND_CGROUPS = on_gpus(TASK_BOUND, "count=1", shell=f"{OWN_GPU}export LOCAL_RANK=0")

ON_GPUS = (
    LiveScene(
        "srun: --gpus-per-task under ranks that count devices themselves",
        "ENV011",
        on_gpus(TASK_BOUND, "count=4"),
        BY_NODE,
        severity="warning",
        ranks=(1, 3),
        says=("gpu:per_task:1",),
    ),
    LiveScene(
        "srun: each task has a GPU of its own and asks for the one of its local rank",
        "ENV011",
        on_gpus(TASK_BOUND, "count=1", shell=f"{OWN_GPU}export LOCAL_RANK=$SLURM_LOCALID"),
        BEHIND_CGROUPS,
        ranks=(1, 3),
    ),
    LiveScene(
        "srun: two tasks a node and one GPU",
        "GPU001",
        on_gpus(srun("--gpus-per-node=1", gpus=4), "count=4"),
        BY_NODE,
        ranks=(0, 1, 2, 3),
        also=("ENV011", "GPU002"),
    ),
)

JOB, JOB_AS_TOLD = by(MPIRUN, 3), as_told(by(MPIRUN, 3))
IN_TURN = mpirun("--map-by", "seq", *GOES_ON)
"""Ranks go by the list of hosts; else those of mpirun's own come first."""

BY_MPIRUN = (
    LiveScene(
        "mpirun: an interface that one host does not have, the store on mpirun's node",
        "NET007",
        as_told(by(MPIRUN, 3, odd=ETH9)),
        JOB_AS_TOLD,
        ranks=(1,),
        hosts=("node1",),
        says=("eth9",),
    ),
    LiveScene(
        "mpirun: an interface that no host has, by -x",
        "NET007",
        by(mpirun("-x", "NCCL_SOCKET_IFNAME=eth9", *GOES_ON), 3),
        by(mpirun("-x", "NCCL_SOCKET_IFNAME=eth0"), 3),
        ranks=(0, 1, 2),
        hosts=("node0", "node1", "node2"),
        says=("eth9",),
    ),
    LiveScene(
        "mpirun on a node without ranks, as a login node: an interface that one host does not have",
        "NET007",
        Play(3, (ranks(1), ranks(2, NCCL_SOCKET_IFNAME="eth9")), launcher=mpirun(*GOES_ON), way="store"),
        JOB_AS_TOLD,
        ranks=(1,),
        hosts=("node2",),
        says=("eth9",),
    ),
    LiveScene(
        "mpirun with rank 0 elsewhere: an interface that one host does not have",
        "NET007",
        Play(3, (ranks(2), ranks(0), ranks(1, NCCL_SOCKET_IFNAME="eth9")), launcher=IN_TURN, way="store"),
        JOB_AS_TOLD,
        ranks=(2,),
        hosts=("node1",),
        says=("eth9",),
    ),
    LiveScene(
        "mpirun: a rank killed after its hello",
        "ENV005",
        struck(by(mpirun(*GOES_ON), 3), Strike(1, SIGKILL, has_arrived)),
        JOB,
        ranks=(1,),
        hosts=("node1",),
        says=(LATE,),
        codes=((1, KILLED),),
    ),
)

SCENES = (*BY_SRUN, *ON_GPUS, *BY_MPIRUN)
