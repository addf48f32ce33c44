"""Ranks that the real torchrun, mpirun and srun start."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.scenes import Scene, launched
from tests.faults.settings_scenes import interface
from tests.faults.stage import Host, Play, Process

TORCHRUN = "torchrun --nproc-per-node 2 --no-python"
MPIRUN = "mpirun -n 2 --allow-run-as-root --oversubscribe --bind-to none"
CLUSTER = ("mount", "net", "uts", "pid")
SLURM_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo")

ONE_NODE_CLUSTER = (
    interface("eth0", "10.7.0.1/24")
    + """
export S=$PWD/slurm SLURM_CONF=$PWD/slurm/slurm.conf
mkdir -p $S/state $S/spool; chmod 755 $S
hostname node0; printf '127.0.0.1 localhost\\n10.7.0.1 node0\\n' > names; mount --bind names /etc/hosts
head -c 1024 /dev/urandom > $S/munge.key; chmod 400 $S/munge.key
munged --force --key-file=$S/munge.key --socket=$S/munge.sock --pid-file=$S/munged.pid --log-file=$S/munged.log \
  --seed-file=$S/munge.seed --num-threads=1 2>$S/munged.err
cat > $SLURM_CONF <<CONF
ClusterName=lab
SlurmctldHost=node0(10.7.0.1)
AuthType=auth/munge
AuthInfo=socket=$S/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile=$S/slurmctld.pid
SlurmdPidFile=$S/slurmd.pid
SlurmctldLogFile=$S/slurmctld.log
SlurmdLogFile=$S/slurmd.log
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
NodeName=node0 NodeAddr=10.7.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=00:10:00 State=UP
CONF
slurmctld -c -f $SLURM_CONF
slurmd -N node0 -f $SLURM_CONF
for T in $(seq 50); do [ "$(timeout 2 sinfo -h -t idle -o %D 2>/dev/null)" = 1 ] && break; sleep 0.1; done
"""
)
"""One controller and one node. The daemons end with the PID namespace."""


def by_srun(tasks: int, *, shell: str = "", **environ: str) -> Play:
    """``srun`` on a cluster of one node."""
    launcher = f"timeout 20 srun -n {tasks}"
    return launched(launcher, spaces=CLUSTER, setup=ONE_NODE_CLUSTER, needs=SLURM_TOOLS, shell=shell, **environ)


def in_allocation(command: str) -> Play:
    """One process under ``command`` (salloc …) on the cluster."""
    host = Host((replace(Process(), wrapper=f"timeout 20 {command}"),), CLUSTER, ONE_NODE_CLUSTER, SLURM_TOOLS)
    return Play((host,))


BY_TORCHRUN = launched(TORCHRUN, needs=("torchrun",))
BY_MPIRUN = launched(MPIRUN, needs=("mpirun",))

SCENES = (
    Scene(
        "torchrun: the training script forces an algorithm on rank 1",
        "NCCL003",
        launched(TORCHRUN, needs=("torchrun",), shell="[ $RANK = 0 ] || export NCCL_PROTO=LL"),
        BY_TORCHRUN,
        ranks=(0, 1),
        says=("NCCL_PROTO",),
    ),
    Scene(
        "mpirun: WORLD_SIZE=4 exported, two processes started",
        "ENV003",
        launched(
            MPIRUN,
            needs=("mpirun",),
            shell="export RANK=$OMPI_COMM_WORLD_RANK MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
            WORLD_SIZE="4",
        ),
        BY_MPIRUN,
        ranks=(0, 1),
        also=("NET002",),
    ),
    Scene(
        "srun: RANK and WORLD_SIZE exported by the batch script",
        "ENV009",
        by_srun(2, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
        by_srun(2, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
        ranks=(0,),
        also=("ENV004",),
    ),
    Scene(
        "salloc of two tasks, python without srun",
        "ENV014",
        in_allocation("salloc -Q -J train -n 2"),
        in_allocation("salloc -Q -n 2"),
        says=("srun",),
    ),
)
