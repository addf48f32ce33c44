"""ENV010 in launch files: the SLURM tasks do not match the ranks of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.api import Severity, SourceLocation, Violation, rule
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, option_name, starts_of, trainer_option
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.slurm_tasks_disagree import slurm_tasks_disagree

_ASKED = ("nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task")
_TWO_HOSTS = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:8")
_LIGHTNING = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4")


@rule(
    check=slurm_tasks_disagree,
    reads=ShellFile,
    impacts={
        r"ignores --\w": "The job starts with the scheduler's default for this option.",
        r"1 host, but srun": "Each host trains a separate model.",
        r"hosts, but srun .* only": "The launcher waits for the missing hosts until its timeout.",
        r"hosts, but srun": "The launcher rejects the additional hosts.",
        r"^trainer\.": "Lightning raises ValueError before training starts.",
        r"^srun requests": "srun rejects the step, and no rank starts.",
        r"share 1 GPU": (
            "NCCL rejects several ranks on one GPU; with another backend, they share its memory and compute time."
        ),
    },
    cases=lambda: (
        shell_fails(
            "torchrun waits for four hosts and gets two",
            *_TWO_HOSTS,
            "srun torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d train.py  # !",
        ),
        shell_fails(
            "torchrun for two hosts is started on four",
            "#!/bin/bash",
            "#SBATCH --nodes=4",
            "#SBATCH --ntasks-per-node=1",
            "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d train.py  # !",
        ),
        shell_fails(
            "each host trains for itself",
            *_TWO_HOSTS,
            "srun torchrun --standalone --nproc-per-node=8 train.py --epochs 3  # !",
        ),
        shell_fails(
            "devices=8 for Lightning, and four tasks start",
            *_LIGHTNING,
            "srun python train.py fit --trainer.devices=8 --trainer.num_nodes=2  # !",
        ),
        shell_fails(
            "num_nodes=4 for NeMo, and two hosts are requested",
            *_LIGHTNING,
            "srun python pretrain.py trainer.devices=4 trainer.num_nodes=4  # !",
        ),
        shell_fails(
            "two tasks for one GPU",
            "#!/bin/bash",
            "#SBATCH --cpus-per-task=4",
            "#SBATCH --gres=gpu:p6000:1",
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks-per-node=2",
            "srun python slurm_test.py  # !",
        ),
        shell_fails(
            "a step on more hosts than the job has",
            *_LIGHTNING,
            "srun --nodes=4 --ntasks-per-node=4 python train.py  # !",
        ),
        shell_fails(
            "a line that sbatch never reads",
            "#!/bin/bash",
            "#SBATCH --nodes=2",
            "set -e",
            "#SBATCH --gres=gpu:8  # !",
            "srun python train.py",
        ),
        shell_passes(
            "two tasks for a GPU of Intel, whose tiles are devices",
            "#SBATCH --gres=gpu:1",
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks-per-node=2",
            "export ZE_FLAT_DEVICE_HIERARCHY=FLAT",
            "srun python train.py",
        ),
        shell_passes(
            "three tasks for each GPU, as they are bound",
            "#SBATCH --gpus-per-node=8",
            "#SBATCH --nodes=3",
            "#SBATCH --ntasks-per-node=24",
            "#SBATCH --gpu-bind=single:3",
            "srun --distribution=plane=3 python train.py",
        ),
        shell_passes(
            "two tasks for a GPU with the service for it",
            "#SBATCH --gres=gpu:1",
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks-per-node=2",
            "export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps",
            "srun python train.py",
        ),
        shell_passes(
            "a script that writes another one",
            "#!/bin/bash",
            "#SBATCH --nodes=1",
            "cat > x.sh <<EOF",
            "#SBATCH --nodes=2",
            "EOF",
            "sbatch x.sh",
        ),
        shell_passes(
            "one torchrun on each of two hosts",
            *_TWO_HOSTS,
            "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 train.py",
        ),
        shell_passes(
            "one task for each device",
            *_LIGHTNING,
            "srun python train.py fit --trainer.devices=4 --trainer.num_nodes=2",
        ),
        shell_passes(
            "a step for each host",
            *_TWO_HOSTS,
            "for i in 0 1; do",
            "  srun -N1 -n1 -w ${HOSTS[$i]} torchrun --nnodes=2 --node_rank=$i --master_addr=$HEAD train.py &",
            "done",
            "wait",
        ),
        shell_passes(
            "a helper step on one host",
            *_LIGHTNING,
            "srun --nodes=1 --ntasks=1 python prepare.py",
            "srun python train.py",
        ),
        shell_passes(
            "the number of hosts is set outside",
            *_TWO_HOSTS,
            "NNODES=${1:-4}",
            'srun torchrun --nnodes="$NNODES" --nproc-per-node=8 train.py',
        ),
        shell_passes(
            "an elastic job", *_TWO_HOSTS, "srun torchrun --nnodes=1:2 --nproc-per-node=8 --rdzv-backend=c10d train.py"
        ),
        shell_passes(
            "one task that starts its ranks by itself",
            "#SBATCH --gres=gpu:4",
            "srun python train.py --trainer.devices=auto",
        ),
    ),
)
def slurm_tasks_disagree_in_files(file: ShellFile) -> Iterator[Violation]:
    """Ask whether the tasks and hosts that a batch script requests match those that it starts.

    Why it hurts: ranks wait for tasks that SLURM never starts, each host trains separately, or Lightning rejects the
    settings.
    Fix: Request one task per GPU and start with `srun python train.py`; with torchrun, request one task per host and
    pass `--nnodes=$SLURM_NNODES`.
    """
    if file.allocation is None:
        return
    yield from _ignored(file.late_headers, file.allocation)
    for start in starts_of(file):
        if start.step is not None and not start.is_part:
            place = start.outer.place if start.outer else SourceLocation(1)
            found = _too_many_hosts(file.allocation, start.step, place) or _judge_agent(start, start.step)
            yield from found or _judge_launched_trainer(file, start, start.step)


def _ignored(late: Mapping[int, Mapping[str, str]], job: Allocation) -> Iterator[Violation]:
    """The options that sbatch never reads. One that repeats a value of the header changes nothing: it is an info, since
    a change of the ignored line would have no effect either."""
    for line, options in late.items():
        asked = {name: value for name, value in options.items() if name in _ASKED}
        repeats = all(job.options.get(name) == value for name, value in asked.items())
        named = [f"--{name}" for name in asked]
        if named:
            yield Violation(
                SourceLocation(line),
                f"sbatch ignores {', '.join(named)} after the first command",
                fix="Remove the line." if repeats else "Move all #SBATCH lines above the first command.",
                severity=Severity.INFO if repeats else Severity.WARNING,
                preview=repeats,
                effect="None: the #SBATCH lines above the first command have the same values." if repeats else "",
                evidence=(("options", named),),
            )


def _too_many_hosts(job: Allocation, step: Allocation, place: SourceLocation) -> list[Violation]:
    if job.nodes is None or step.nodes is None or step.nodes <= job.nodes:
        return []
    return [
        Violation(
            place,
            f"srun requests {step.nodes} hosts, but the job has {job.nodes}",
            fix=f"Use `#SBATCH --nodes={step.nodes}` or `srun --nodes={job.nodes}`.",
            evidence=(("nodes", job.nodes), ("step_nodes", step.nodes)),
        )
    ]


def _judge_agent(start: ProcessLaunch, step: Allocation) -> list[Violation]:
    """Report a launcher with another number of hosts than srun starts it on; several on one host are ENV009."""
    expected, nodes = hosts_of(start.launch) if start.is_agent else None, step.nodes
    if expected is None or nodes is None or step.tasks_per_node != 1 or expected == nodes:
        return []
    option = option_name(start.launch, start.launch.command.hosts)
    told = f"{expected} host{'' if expected == 1 else 's'}"
    return [
        Violation(
            start.launch.place,
            f"{start.launch.program} is configured for {told}, but srun starts it on "
            f"{'only ' if nodes < expected else ''}{nodes}",
            fix=f"Use `{option}={nodes}` with a common rendezvous for all hosts, or `#SBATCH --nodes={expected}`.",
            evidence=(("nodes", nodes), ("expected", expected)),
        )
    ]


def _judge_launched_trainer(file: ShellFile, start: ProcessLaunch, step: Allocation) -> list[Violation]:
    """Lightning requires one task per device (lightning/fabric/plugins/environments/slurm.py, validate_settings)."""
    if start.is_agent or start.launch.program != "python":
        return []
    for name, option, given in (
        ("devices", "ntasks-per-node", step.tasks_per_node),
        ("num_nodes", "nodes", step.nodes),
    ):
        asked = whole_number(trainer_option(start.launch, name))
        if asked is not None and given is not None and asked != given:
            return [
                Violation(
                    start.launch.place,
                    f"trainer.{name}={asked}, but srun uses --{option}={given}",
                    fix=f"Use `#SBATCH --{option}={asked}`, or `trainer.{name}={given}`.",
                    evidence=((f"trainer.{name}", asked), (option, given)),
                )
            ]
    tasks, gpus = step.tasks_per_node, step.gpus_per_node
    if not tasks or not gpus or tasks <= gpus or tasks % gpus or step.number("ntasks-per-node") is None:
        return []
    if start.launch.setting("ZE_FLAT_DEVICE_HIERARCHY") is not None or start.launch.setting("ZE_AFFINITY_MASK"):
        return []  # each tile of a GPU of Intel may be a device
    if step.shares_gpus or "CUDA_MPS_PIPE_DIRECTORY" in start.launch.settings:
        return []
    if file.modules is not None and file.modules.runs_alone(start.launch.script):
        return []  # tasks that join no job, as loaders or evaluations beside each other
    intended = file.modules is not None and file.modules.shares_gpus(start.launch.script)
    return [
        Violation(
            start.launch.place,
            f"{tasks} tasks per host share {gpus} GPU{'' if gpus == 1 else 's'}",
            fix=f"Use `#SBATCH --gpus-per-node={tasks}` or `#SBATCH --ntasks-per-node={gpus}`.",
            severity=Severity.INFO if intended else Severity.WARNING,
            confidence=0.7,
            evidence=(("tasks_per_node", tasks), ("gpus_per_node", gpus)),
            preview=intended,
            effect="None if the tasks fit: they share the memory and the compute time of the GPUs." if intended else "",
        )
    ]
