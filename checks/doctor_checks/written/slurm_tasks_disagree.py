"""ENV010: a batch script asks for other tasks or hosts than the training needs."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, SourceLocation, Violation, rule
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, starts_of, trainer_option
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing import lines

_ASKED = ("nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task")
_OPTIONS = {"accelerate": "--num_machines", "fabric": "--num-nodes"}
_TWO_HOSTS = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:8")
_LIGHTNING = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4")


@rule(
    id="ENV010",
    severity=Severity.ERROR,
    reads=ShellFile,
    cases=lambda: (
        FileFails(
            "torchrun waits for four hosts and gets two",
            lines(*_TWO_HOSTS, "srun torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d train.py  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "each host trains for itself",
            lines(*_TWO_HOSTS, "srun torchrun --standalone --nproc-per-node=8 train.py --epochs 3  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "Lightning is told eight devices, and four tasks start",
            lines(*_LIGHTNING, "srun python train.py fit --trainer.devices=8 --trainer.num_nodes=2  # !"),
            name="job.slurm",
        ),
        FileFails(
            "NeMo is told four hosts, and two are asked for",
            lines(*_LIGHTNING, "srun python pretrain.py trainer.devices=4 trainer.num_nodes=4  # !"),
            name="job.sh",
        ),
        FileFails(
            "two tasks for one GPU",
            lines(
                "#!/bin/bash",
                "#SBATCH --cpus-per-task=4",
                "#SBATCH --gres=gpu:p6000:1",
                "#SBATCH --nodes=1",
                "#SBATCH --ntasks-per-node=2",
                "srun python slurm_test.py  # !",
            ),
            name="job.sh",
        ),
        FileFails(
            "a step on more hosts than the job has",
            lines(*_LIGHTNING, "srun --nodes=4 --ntasks-per-node=4 python train.py  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "a line that sbatch never reads",
            lines("#!/bin/bash", "#SBATCH --nodes=2", "set -e", "#SBATCH --gres=gpu:8  # !", "srun python train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "a script that writes another one",
            lines("#!/bin/bash", "#SBATCH --nodes=1", "cat > x.sh <<EOF", "#SBATCH --nodes=2", "EOF", "sbatch x.sh"),
            name="job.sbatch",
        ),
        FilePasses(
            "one torchrun on each of two hosts",
            lines(*_TWO_HOSTS, "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "one task for each device",
            lines(*_LIGHTNING, "srun python train.py fit --trainer.devices=4 --trainer.num_nodes=2"),
            name="job.slurm",
        ),
        FilePasses(
            "a step for each host",
            lines(
                *_TWO_HOSTS,
                "for i in 0 1; do",
                "  srun -N1 -n1 -w ${HOSTS[$i]} torchrun --nnodes=2 --node_rank=$i --master_addr=$HEAD train.py &",
                "done",
                "wait",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "a helper step on one host",
            lines(*_LIGHTNING, "srun --nodes=1 --ntasks=1 python prepare.py", "srun python train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "the number of hosts comes from outside",
            lines(*_TWO_HOSTS, "NNODES=${1:-4}", 'srun torchrun --nnodes="$NNODES" --nproc-per-node=8 train.py'),
            name="job.sbatch",
        ),
        FilePasses(
            "an elastic job",
            lines(*_TWO_HOSTS, "srun torchrun --nnodes=1:2 --nproc-per-node=8 --rdzv-backend=c10d train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "one task that starts its ranks by itself",
            lines("#SBATCH --gres=gpu:4", "srun python train.py --trainer.devices=auto"),
            name="job.sbatch",
        ),
    ),
)
def slurm_tasks_disagree(file: ShellFile) -> Iterator[Violation]:
    """Ask whether the tasks and hosts that a batch script asks for are those that it starts.

    Why it hurts: the ranks that exist wait for others that SLURM never starts, each host trains for itself, or
    Lightning refuses the numbers.
    Fix: request one task for each GPU and start by `srun python train.py`; with torchrun, one task for each host and
    `--nnodes=$SLURM_NNODES`.
    """
    yield from _late(file)
    if file.allocation is None:
        return
    for start in starts_of(file):
        if start.step is not None and not start.is_part:
            found = _too_many_hosts(
                file.allocation, start.step, start.outer.place if start.outer else SourceLocation(1)
            )
            yield from found or _agents(start, start.step) or _trainer(start, start.step)


def _late(file: ShellFile) -> Iterator[Violation]:
    for line, options in file.late_headers.items():
        asked = [f"--{name}" for name in options if name in _ASKED and file.allocation is not None]
        if asked:
            yield Violation(
                SourceLocation(line),
                f"{', '.join(asked)} stands behind the first command: sbatch passes it over",
                fix="Put all #SBATCH lines above the first command.",
                severity=Severity.WARNING,
                evidence=(("options", asked),),
            )


def _too_many_hosts(job: Allocation, step: Allocation, place: SourceLocation) -> list[Violation]:
    if job.nodes is None or step.nodes is None or step.nodes <= job.nodes:
        return []
    return [
        Violation(
            place,
            f"srun asks for {step.nodes} hosts, and the job has {job.nodes}",
            fix=f"`#SBATCH --nodes={step.nodes}`, or `srun --nodes={job.nodes}`.",
            evidence=(("nodes", job.nodes), ("step_nodes", step.nodes)),
        )
    ]


def _agents(start: ProcessLaunch, step: Allocation) -> list[Violation]:
    """One torchrun a host; several on one are of another kind (ENV009)."""
    expected, nodes = hosts_of(start.launch) if start.is_agent else None, step.nodes
    if expected is None or nodes is None or step.tasks_per_node != 1 or expected == nodes:
        return []
    name = start.launch.program
    told = f"is told {expected} hosts" if expected > 1 else "is told one host, or nothing of hosts"
    return [
        Violation(
            start.launch.place,
            f"{name} {told}, and srun starts it on {nodes}",
            fix=f"`{_OPTIONS.get(name, '--nnodes')}={nodes}` and one rendezvous for all of them, or "
            f"`#SBATCH --nodes={expected}`.",
            evidence=(("nodes", nodes), ("expected", expected)),
        )
    ]


def _trainer(start: ProcessLaunch, step: Allocation) -> list[Violation]:
    """Lightning wants one task for each device (lightning/fabric/plugins/environments/slurm.py, validate_settings)."""
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
                    f"trainer.{name}={asked}, and srun starts with --{option}={given}",
                    fix=f"`#SBATCH --{option}={asked}`, or trainer.{name}={given}.",
                    evidence=((f"trainer.{name}", asked), (option, given)),
                )
            ]
    return _too_few_gpus(start, step)


def _too_few_gpus(start: ProcessLaunch, step: Allocation) -> list[Violation]:
    tasks, gpus = step.tasks_per_node, step.gpus_per_node
    if not tasks or not gpus or tasks <= gpus or tasks % gpus or step.number("ntasks-per-node") is None:
        return []
    return [
        Violation(
            start.launch.place,
            f"{tasks} tasks of a host share {gpus} GPU{'' if gpus == 1 else 's'}",
            fix=f"`#SBATCH --gpus-per-node={tasks}`, or `--ntasks-per-node={gpus}`.",
            severity=Severity.WARNING,
            confidence=0.7,
            evidence=(("tasks_per_node", tasks), ("gpus_per_node", gpus)),
        )
    ]
