"""The recorded jobs: how each is played in the lab, and what ``doctor diagnose`` should report about its output.

What is expected follows from the fault that is planted. It was written down before any of the outputs was read by the
doctor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Launcher = Literal["torchrun", "slurm", "lightning", "accelerate", "deepspeed", "ray"]


@dataclass(frozen=True)
class Expected:
    """``id``: the primary finding, empty if there should be none. ``also``: right, but less telling. ``ranks`` and
    ``hosts``: exactly those that it names; ``None`` if the fault is not of single ranks or hosts."""

    id: str = ""
    also: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    hosts: tuple[str, ...] | None = None
    code: int = 1


@dataclass(frozen=True)
class WholeJob:
    """``script``: bash on the first host, in the folder of the project; the argument of ``sbatch`` on SLURM. What it
    leaves in ``output`` is what the user finds. ``fault``: the variable FAULT of the programs, on ``ranks`` where only
    some have it. ``on_hosts``: a script by the number of the host, before the job. ``interrupt``: a text in the output
    and the shell command for the first host once it is there. ``copied_at``: the output is copied when it holds this
    text, while the job runs."""

    name: str
    about: str
    launcher: Launcher
    script: str
    expected: Expected
    fault: str = ""
    ranks: tuple[int, ...] = ()
    hosts: int = 1
    on_hosts: dict[int, str] = field(default_factory=dict)
    interrupt: tuple[str, str] | None = None
    copied_at: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether no finding should be reported as primary."""
        return not self.expected.id


def _torchrun(options: str = "", launch: str = "", program: str = "train.py") -> str:
    """Four ranks with a file each, and the launcher's own output, as a user writes it in a shell script."""
    command = f"torchrun --standalone --nproc-per-node 4 {launch} --log-dir output/logs --tee 3 {program} {options}"
    return f"{command} > output/job.log 2>&1\necho exit status $? >> output/job.log\n"


def _plain_torchrun(options: str = "", program: str = "train.py") -> str:
    """Four ranks in one file."""
    return f"torchrun --standalone --nproc-per-node 4 {program} {options} > output/train.log 2>&1\n"


RANK_SCRIPT = """#!/bin/bash
number=${NUMBER:-SLURM_PROCID}
export RANK=${!number} WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
exec python ${PROGRAM:-train.py} "$@"
"""
"""``rank.sh``: sets torch's variables from those of SLURM."""
_BATCH = """#!/bin/bash
#SBATCH --job-name=regression
#SBATCH --output=output/slurm-%j.out
#SBATCH --nodes={nodes}
#SBATCH --ntasks={tasks}
{more}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
{before}
srun {srun} {program}
"""


def _batch(
    srun: str = "", program: str = "bash rank.sh", *, nodes: int = 3, tasks: int = 16, more: str = "", before: str = ""
) -> str:
    return _BATCH.format(nodes=nodes, tasks=tasks, more=more, before=before, srun=srun, program=program)


_A_FILE_PER_TASK = "--output=output/%x-%j-task%t.out"
_A_FILE_PER_NODE = "--label --output=output/%x-%j-%N.log"
_HEALTHY = Expected(code=0)
_SMALL = "mount -t tmpfs -o size=2m tmpfs"
_RAY = "python train_ray.py > output/driver.log 2>&1\necho exit status $? >> output/driver.log\n"

_TORCHRUN = (
    WholeJob(
        "exception",
        "a sample without a label on one rank",
        "torchrun",
        _torchrun(),
        Expected("RUN004", ranks=(2,)),
        fault="exception",
        ranks=(2,),
    ),
    WholeJob(
        "hang",
        "one rank is blocked in its dataset; the others time out in Gloo",
        "torchrun",
        _torchrun("--timeout 6"),
        Expected("RUN001", ("RUN010",), ranks=(1,)),
        fault="hang",
        ranks=(1,),
    ),
    WholeJob(
        "killed",
        "SIGKILL to one rank",
        "torchrun",
        _torchrun(),
        Expected("RUN004", ("MEM012",), ranks=(3,)),
        fault="killed",
        ranks=(3,),
    ),
    WholeJob(
        "host-memory",
        "one rank exceeds the memory cgroup of the job; the kernel log is beside the job's",
        "torchrun",
        "began=$(cut -d' ' -f1 /proc/uptime); group=/sys/fs/cgroup/memory/training; mkdir $group\n"
        "echo 2200M > $group/memory.limit_in_bytes\n"
        "bash -c 'echo $$ > /sys/fs/cgroup/memory/training/cgroup.procs; exec torchrun --standalone "
        "--nproc-per-node 4 --log-dir output/logs --tee 3 train.py' > output/job.log 2>&1\n"
        "dmesg | awk -F'[][]' -v began=$began '$2 + 0 > began' | sed -n '/oom-killer/,/Killed process/p' "
        "> output/dmesg.txt\nsleep 1; rmdir $group\n",
        Expected("MEM012", ("MEM008",), ranks=(1,)),
        fault="memory",
        ranks=(1,),
    ),
    WholeJob(
        "worker-killed",
        "SIGKILL to a data loader worker",
        "torchrun",
        _torchrun("--workers 1"),
        Expected("DATA012", ("MEM012",), ranks=(2,)),
        fault="worker_killed",
        ranks=(2,),
    ),
    WholeJob(
        "shared-memory-full",
        "/dev/shm of 2 MiB, batches of 4 MiB from data loader workers",
        "torchrun",
        _torchrun("--workers 1 --width 262144"),
        Expected("MEM010", ("DATA012",)),
        on_hosts={0: f"{_SMALL} /dev/shm"},
    ),
    WholeJob(
        "disk-full",
        "rank 0 saves a checkpoint to a full file system",
        "torchrun",
        _torchrun("--save"),
        Expected("HOST004", ranks=(0,)),
        fault="disk",
        on_hosts={0: f"{_SMALL} checkpoints"},
    ),
    WholeJob(
        "read-only",
        "rank 0 saves a checkpoint to a read-only file system",
        "torchrun",
        _plain_torchrun("--save"),
        Expected("HOST004", ranks=(0,)),
        fault="read_only",
        on_hosts={0: f"{_SMALL} checkpoints; mount -o remount,ro checkpoints"},
    ),
    WholeJob(
        "corrupt-checkpoint",
        "all ranks resume from a checkpoint of which the second half is missing",
        "torchrun",
        "torchrun --standalone --nproc-per-node 4 train.py --save > /dev/null 2>&1\n"
        "truncate -s 1000 checkpoints/step_10.pt\n" + _torchrun("--resume checkpoints/step_10.pt"),
        Expected("HOST004", ("RUN017",)),
    ),
    WholeJob(
        "resume-world-size",
        "a checkpoint of two ranks is resumed by four",
        "torchrun",
        "torchrun --standalone --nproc-per-node 2 train.py --save > /dev/null 2>&1\n"
        + _plain_torchrun("--resume checkpoints/step_10.pt"),
        Expected("RUN017"),
    ),
    WholeJob(
        "loader-lengths",
        "one rank has half as many batches as the others",
        "torchrun",
        _torchrun("--verbose"),
        Expected("DATA010", ("DATA001", "RUN006"), ranks=(3,)),
        fault="lengths",
        ranks=(3,),
    ),
    WholeJob(
        "collective-on-one-rank",
        "rank 0 alone reduces a metric",
        "torchrun",
        _torchrun("--timeout 6"),
        Expected("RUN006", ("RUN002",), ranks=(0,)),
        fault="one_rank",
        ranks=(0,),
    ),
    WholeJob(
        "shapes-differ",
        "one rank reduces three numbers, the others two",
        "torchrun",
        _torchrun("--metrics --timeout 6"),
        Expected("RUN002"),
        fault="shape",
        ranks=(2,),
    ),
    WholeJob(
        "debug-detail-crash",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes this release of torch on all ranks when DDP is built",
        "torchrun",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL\n" + _torchrun("--metrics --timeout 6"),
        Expected("RUN004", ranks=(0, 1, 2, 3)),
    ),
    WholeJob(
        "model-differs",
        "one rank builds a wider model",
        "torchrun",
        _torchrun("--timeout 6"),
        Expected("RUN014", ("RUN002",), ranks=(1,)),
        fault="model",
        ranks=(1,),
    ),
    WholeJob(
        "port-in-use",
        "another program listens on the master's port",
        "torchrun",
        "python -m http.server 29500 > /dev/null 2>&1 & sleep 2\n"
        "torchrun --nproc-per-node 4 --master-addr node0 --master-port 29500 train.py > output/train.log 2>&1\n"
        "echo exit status $? >> output/train.log\nkill %1\n",
        Expected("ENV008"),
    ),
    WholeJob(
        "unused-parameters",
        "a head that the loss does not depend on",
        "torchrun",
        _torchrun(),
        Expected("RUN009"),
        fault="unused",
    ),
    WholeJob(
        "exit-code",
        "one rank ends itself by sys.exit(1)",
        "torchrun",
        _torchrun(),
        Expected("RUN004", ranks=(2,)),
        fault="exit",
        ranks=(2,),
    ),
    WholeJob(
        "segfault",
        "a segmentation fault in native code on one rank",
        "torchrun",
        _torchrun(),
        Expected("RUN004", ranks=(1,)),
        fault="segfault",
        ranks=(1,),
    ),
    WholeJob(
        "cuda-without-gpu",
        "CUDA devices are requested on a machine without a GPU",
        "torchrun",
        _torchrun(),
        Expected("GPU021"),
        fault="cuda",
    ),
    WholeJob(
        "nan",
        "the loss of one rank is NaN, which ends the run",
        "torchrun",
        _torchrun("--timeout 6"),
        Expected("RUN008", ranks=(1,)),
        fault="nan",
        ranks=(1,),
    ),
    WholeJob(
        "restart-fails",
        "one rank fails while it trains; both restarts of torchrun fail to connect",
        "torchrun",
        _torchrun(launch="--max-restarts 2"),
        Expected("RUN004", ranks=(1,)),
        fault="first_attempt",
        ranks=(1,),
    ),
    WholeJob(
        "restart-fails-early",
        "one rank fails before it connects; both restarts of torchrun fail to connect",
        "torchrun",
        _torchrun(launch="--max-restarts 2"),
        Expected("RUN004", ranks=(1,)),
        fault="first_start",
        ranks=(1,),
    ),
    WholeJob(
        "restart-succeeds",
        "one rank cannot read its dataset; the second attempt of torchrun succeeds",
        "torchrun",
        _torchrun(launch="--max-restarts 2", program="train_restart.py"),
        _HEALTHY,
        ranks=(1,),
    ),
    WholeJob("healthy", "nothing", "torchrun", _torchrun("--workers 1"), _HEALTHY),
    WholeJob(
        "going-on",
        "the output is copied while the job runs",
        "torchrun",
        _torchrun("--steps 400 --pause 0.2"),
        Expected(code=3),
        copied_at="step 12/",
    ),
)

_SLURM = (
    WholeJob(
        "slurm-exception",
        "16 ranks on 3 hosts, a file per task: a sample without a label on one rank",
        "slurm",
        _batch(_A_FILE_PER_TASK),
        Expected("RUN004", ranks=(7,), hosts=("node1",)),
        fault="exception",
        ranks=(7,),
        hosts=3,
    ),
    WholeJob(
        "slurm-killed",
        "16 ranks on 3 hosts, a file per host with labels: SIGKILL to one rank",
        "slurm",
        _batch(_A_FILE_PER_NODE),
        Expected("RUN004", ("MEM012",), ranks=(13,), hosts=("node2",)),
        fault="killed",
        ranks=(13,),
        hosts=3,
    ),
    WholeJob(
        "slurm-hang",
        "16 ranks on 3 hosts, one file: one rank is blocked in its dataset",
        "slurm",
        _batch("--kill-on-bad-exit=1", "bash rank.sh --timeout 12"),
        Expected("RUN001", ("RUN010",), ranks=(9,), hosts=("node1",)),
        fault="hang",
        ranks=(9,),
        hosts=3,
    ),
    WholeJob(
        "slurm-import-error",
        "16 ranks on 3 hosts, a file per task: one host lacks a module",
        "slurm",
        _batch(_A_FILE_PER_TASK + " --kill-on-bad-exit=1", before="export PROGRAM=train_sharded.py"),
        Expected("RUN004", hosts=("node1",)),
        hosts=3,
        on_hosts={
            1: "mkdir -p hidden; mount -t tmpfs tmpfs hidden; cp *.py *.sh hidden; rm hidden/tokenlib.py; "
            "mkdir hidden/output; mount --bind output hidden/output; mount --rbind hidden ."
        },
    ),
    WholeJob(
        "slurm-master-address",
        "6 ranks on 3 hosts: MASTER_ADDR is an unused address on one host",
        "slurm",
        _batch(
            _A_FILE_PER_TASK + " --kill-on-bad-exit=1",
            "bash -c '[ $(hostname) != node2 ] || export MASTER_ADDR=10.20.0.99; . rank.sh --timeout 20'",
            tasks=6,
        ),
        Expected("NET006", ("ENV006", "NET013"), hosts=("node2",)),
        hosts=3,
    ),
    WholeJob(
        "slurm-name-resolution",
        "6 ranks on 3 hosts: one host cannot resolve the master's name",
        "slurm",
        _batch(_A_FILE_PER_NODE + " --kill-on-bad-exit=1", "bash rank.sh --timeout 20", tasks=6),
        Expected("NET004", hosts=("node2",)),
        hosts=3,
        on_hosts={2: "sed /node0/d /etc/hosts > hosts.new; cp hosts.new /etc/hosts"},
    ),
    WholeJob(
        "slurm-late-rank",
        "4 ranks on 2 hosts: one rank joins after the store's timeout",
        "slurm",
        _batch("--label --kill-on-bad-exit=1", "bash rank.sh --timeout 12", nodes=2, tasks=4),
        Expected("ENV005", ("RUN010",), ranks=(3,)),
        fault="late",
        ranks=(3,),
        hosts=2,
    ),
    WholeJob(
        "slurm-rank-numbers",
        "4 ranks on 2 hosts: RANK is taken from SLURM_LOCALID",
        "slurm",
        _batch(
            _A_FILE_PER_NODE,
            "bash rank.sh --timeout 12",
            nodes=2,
            tasks=4,
            before="export NUMBER=SLURM_LOCALID",
        ),
        Expected("ENV004", ("ENV009",)),
        hosts=2,
    ),
    WholeJob(
        "slurm-time-limit",
        "4 ranks on 2 hosts: the time limit of the job",
        "slurm",
        _batch("--label", "bash rank.sh --steps 4000 --pause 1", nodes=2, tasks=4, more="#SBATCH --time=1"),
        Expected("ENV017"),
        hosts=2,
    ),
    WholeJob(
        "slurm-cancelled",
        "16 ranks on 3 hosts, a file per task: scancel",
        "slurm",
        _batch(_A_FILE_PER_TASK, "bash rank.sh --steps 4000 --pause 1"),
        Expected("ENV017"),
        hosts=3,
        interrupt=("step 5/", "scancel --user=root"),
    ),
    WholeJob(
        "slurm-requeued",
        "4 ranks on 2 hosts: requeued once, the second run completes",
        "slurm",
        _batch(
            "--label",
            "bash rank.sh --steps 14 --pause 0.5",
            nodes=2,
            tasks=4,
            more="#SBATCH --requeue\n#SBATCH --open-mode=append",
        )
        + "echo exit status $?\n",
        _HEALTHY,
        hosts=2,
        interrupt=("step 5/", "scontrol requeue $(squeue --noheader --format=%i)"),
    ),
    WholeJob(
        "slurm-healthy",
        "16 ranks on 3 hosts, a file per task: nothing",
        "slurm",
        _batch(_A_FILE_PER_TASK) + "echo exit status $?\n",
        _HEALTHY,
        hosts=3,
    ),
)

_LIGHTNING = (
    WholeJob(
        "lightning-exception",
        "an exception in training_step on one rank",
        "lightning",
        _torchrun(program="train_lightning.py"),
        Expected("RUN004", ranks=(1,)),
        fault="exception",
    ),
    WholeJob(
        "lightning-argument",
        "Trainer(gpus=4), which Lightning 2 has removed",
        "lightning",
        "python train_lightning.py > output/train.log 2>&1\necho exit status $? >> output/train.log\n",
        Expected("VER006"),
        fault="argument",
    ),
    WholeJob(
        "lightning-nan",
        "EarlyStopping(check_finite=True) ends the run at a loss of NaN",
        "lightning",
        "python train_lightning.py > output/train.log 2>&1\necho exit status $? >> output/train.log\n",
        Expected("RUN008"),
        fault="nan",
    ),
    WholeJob(
        "lightning-slurm-healthy",
        "4 ranks on 2 hosts by srun: nothing",
        "lightning",
        _batch("--label", "python train_lightning.py", nodes=2, tasks=4, more="#SBATCH --ntasks-per-node=2"),
        _HEALTHY,
        hosts=2,
    ),
)

_ACCELERATE = (
    "accelerate launch --multi_gpu --num_processes 4 --num_machines 1 --mixed_precision no --dynamo_backend no"
)
_OTHERS = (
    WholeJob(
        "accelerate-exit-code",
        "one rank ends itself by sys.exit(1)",
        "accelerate",
        f"{_ACCELERATE} train_accelerate.py > output/train.log 2>&1\n",
        Expected("RUN004", ranks=(2,)),
        fault="exit",
    ),
    WholeJob(
        "accelerate-shape",
        "a batch of the wrong width on one rank",
        "accelerate",
        f"{_ACCELERATE} train_accelerate.py > output/train.log 2>&1\necho exit status $? >> output/train.log\n",
        Expected("RUN004", ranks=(3,)),
        fault="shape",
    ),
    WholeJob(
        "deepspeed-exception",
        "an exception on one rank under DeepSpeed",
        "deepspeed",
        "export DS_ACCELERATOR=cpu\n" + _torchrun(program="train_deepspeed.py"),
        Expected("RUN004", ranks=(3,)),
        fault="exception",
    ),
    WholeJob(
        "deepspeed-batch-size",
        "train_batch_size does not fit the number of ranks",
        "deepspeed",
        "export DS_ACCELERATOR=cpu\n" + _plain_torchrun(program="train_deepspeed.py"),
        Expected("RUN004", ("ENV003", "DATA002")),
        fault="batch",
    ),
    WholeJob(
        "ray-exception",
        "an exception in one worker of Ray Train, 4 workers on 2 hosts",
        "ray",
        _RAY,
        Expected("RUN004", ranks=(1,)),
        fault="exception",
        hosts=2,
    ),
    WholeJob(
        "ray-killed",
        "SIGKILL to one worker of Ray Train, 4 workers on 2 hosts",
        "ray",
        _RAY,
        Expected("RUN004", ("MEM012",)),
        fault="killed",
        hosts=2,
    ),
    WholeJob(
        "ray-driver",
        "the driver reads metrics that Ray Train does not return, after a training without a fault",
        "ray",
        _RAY,
        Expected("RUN004"),
        fault="driver",
        hosts=2,
    ),
    WholeJob("ray-healthy", "4 workers of Ray Train on 2 hosts: nothing", "ray", _RAY, _HEALTHY, hosts=2),
)
JOBS = (*_TORCHRUN, *_SLURM, *_LIGHTNING, *_OTHERS)
