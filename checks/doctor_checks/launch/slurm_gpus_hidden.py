"""ENV011: SLURM tasks see only some GPUs of the node, but ranks select their GPU by local rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.analysis.launch_origin import devices_asked, inner_launcher, launch_kinds, launch_number, slurm_step
from doctor.analysis.visible_devices import bound_per_task, on_processor, parse_visible_devices, visible_to
from doctor.api import (
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    ranks_in_words,
)
from doctor.facts import EnvironmentFacts, GpuFacts, LaunchFacts, SlurmFacts, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

OPTIONS = (
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
    "SLURM_TRES_BIND",
    "SLURMD_TRES_BIND",
)
"""Variables that show GPU binding by SLURM: the options of srun, and last the result of slurmd."""

MAY_WORK = (
    'A script that uses cuda:LOCAL_RANK fails with "invalid device ordinal" or shares a GPU, and Lightning rejects the '
    "number of devices. A script that uses cuda:0 in every task works, but GPUs in different device cgroups cannot use "
    "P2P."
)


SEVERAL_EACH = (
    "A script that uses cuda:LOCAL_RANK leaves the first GPUs of the task idle, and Lightning rejects the number of "
    "devices. GPUs in different device cgroups cannot use P2P."
)


class LocalRankGpus(msgspec.Struct, frozen=True):
    """A rank's number on its host, whether LOCAL_RANK states it, and how many GPUs the rank sees."""

    number: int
    is_stated: bool
    visible: int | None


class HiddenGpus(msgspec.Struct, frozen=True):
    """The common cause of ranks in one finding. ``devices``: the number of devices configured in Lightning."""

    severity: Severity
    visible: int | None
    options: tuple[tuple[str, str], ...]
    tasks: int
    devices: int | None = None


def _from_logs(job: Job) -> Iterator[Finding]:
    """Report Lightning tasks that request several GPUs and see only one.

    SLURM assigns them if the log is of a batch script, or if many GPUs are requested and only one is visible."""
    for group in event_groups(job, "pl.gpus_missing", by=("wanted",)):
        seen = next(
            (one.value("has") for one in event_groups(job, "pl.gpus_missing", by=("has",)) if one.value("has")), None
        )
        asked, present = _numbers(group.value("wanted")), _numbers(seen)
        slurm = is_logged(job, "slurm.script", "pl.slurm_requeue.harmless", "slurm.task_exit", "slurm.cancel")
        # A log may end before the line with the visible GPUs.
        if (seen and present != (0,)) or len(asked) < 2 or not (slurm or (seen and len(asked) >= WHOLE_HOST)):
            continue
        yield finding_from_logs(
            group,
            f"The Trainer requests {len(asked)} GPUs, but each {'SLURM task' if slurm else 'process'} sees only "
            f"{'one' if seen else 'some'}",
            evidence={"asked": list(asked), "visible": list(present) if seen else "unknown"},
            severity=Severity.ERROR,
            confidence=0.75 if slurm and seen else 0.5,
            fix=f"Request `--gpus-per-node={len(asked)}` instead of `--gpus-per-task=1`, and add `--gpu-bind=none` to "
            "srun."
            if slurm
            else f"Add `--gpu-bind=none` to srun, or without SLURM set CUDA_VISIBLE_DEVICES to all {len(asked)} GPUs.",
            explains=("GPU002", "RUN004"),
        )


WHOLE_HOST = 4
"""GPUs: a job that requests so many was written for a host that has them."""


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(word) for word in (text or "").strip("[]").replace(",", " ").split() if word.isdigit())


@check(
    id="ENV011",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts,),
    compares_ranks=False,
    from_logs=_from_logs,
    impacts={
        r"requests|devices=": "Lightning raises MisconfigurationException, and the training does not start.",
        r"only 1 GPU": (
            'torch.cuda.set_device(LOCAL_RANK) fails with "invalid device ordinal" on every local rank except 0.'
        ),
        r"[Ll]ocal rank": 'torch.cuda.set_device(LOCAL_RANK) fails with "invalid device ordinal" on these ranks.',
    },
    cases=lambda: (
        Passes("every task sees all GPUs of its node", healthy(hosts=2, per_host=4).by_srun()),
        Passes("torchrun outside SLURM", healthy(hosts=2, per_host=4)),
        Passes(
            "one task a node, bound to its GPUs",
            healthy(hosts=2, per_host=1).by_srun().launched(SLURM_GPUS_PER_TASK="1"),
        ),
        Passes(
            "binding is switched off", _per_task().launched(SLURM_GPU_BIND="none", without=("SLURM_GPUS_PER_TASK",))
        ),
        Passes(
            "one visible GPU each, used as device 0",
            _per_task().environ(CUDA_VISIBLE_DEVICES="0").launched(LOCAL_RANK="0"),
        ),
        Passes(
            "one visible GPU each, and GPUs are not used",
            _per_task().environ(CUDA_VISIBLE_DEVICES="0").put(TrainerFacts(accelerator="cpu")),
        ),
        Passes("binding in name only: every task sees all GPUs", _per_task()),
        Fails(
            "--gpus-per-task=1: the device depends on the script",
            _per_task().environ(CUDA_VISIBLE_DEVICES="0"),
            ranks=(1, 2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "--gpus-per-task=1 and LOCAL_RANK set from SLURM_LOCALID",
            _per_task().environ(CUDA_VISIBLE_DEVICES="0").launched(ranks=(1,), LOCAL_RANK="1"),
            ranks=(1, 2, 3),
        ),
        Fails(
            "four tasks a node and two GPUs",
            healthy(per_host=4).by_srun().environ(CUDA_VISIBLE_DEVICES="0,1"),
            ranks=(2, 3),
        ),
        Fails(
            "devices=4 for Lightning, which sees one",
            _per_task().environ(CUDA_VISIBLE_DEVICES="0").put(TrainerFacts(source="LT_*", devices=4)),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "--gpus-per-task=2: ranks 0 and 1 of the node use GPUs of their own, the second of them the wrong one",
            healthy(per_host=2, gpus=4).by_srun().launched(SLURM_GPUS_PER_TASK="2").environ(CUDA_VISIBLE_DEVICES="0,1"),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Fails(
            "no driver to ask on this node",
            healthy().by_srun().launched(SLURM_GPUS_PER_TASK="1").drop(GpuFacts),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Passes(
            "a machine without GPUs",
            logged("MisconfigurationException: You requested gpu: [0]", " But your machine only has: []"),
        ),
        Passes(
            "a workstation with one GPU",
            logged("MisconfigurationException: You requested gpu: [0, 1]", " But your machine only has: [0]"),
        ),
        Fails(
            "a host of eight, of which a task sees one",
            logged(
                "MisconfigurationException: You requested gpu: [0, 1, 2, 3, 4, 5, 6, 7]",
                " But your machine only has: [0]",
            ),
            severity=Severity.ERROR,
        ),
        Fails(
            "a batch script that binds GPUs to tasks",
            logged(
                "#SBATCH --gpus-per-task=1",
                "srun python train.py",
                "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1]",
                " But your machine only has: [0]",
            ),
            severity=Severity.ERROR,
        ),
    ),
)
def slurm_gpus_hidden(job: Job) -> Iterator[Verdict]:
    """Ask whether every SLURM task sees the GPU that its local rank selects.

    Why it hurts: torch.cuda.set_device(LOCAL_RANK) fails with "invalid device ordinal", and Lightning with "You
    requested gpu: [0, 1] But your machine only has: [0]"; GPUs in separate device cgroups cannot use P2P.
    Fix: Replace `--gpus-per-task` with `--gpus-per-node`, and add `--gpu-bind=none` to srun.
    """
    inside = False
    faults: dict[HiddenGpus, list[tuple[LocalRankGpus, IdenticalRanks]]] = {}
    visible: dict[tuple[int, int], int | None] = {}
    outside = all(launch.filled.keys().isdisjoint(("SLURM_JOB_ID", "SLURM_STEP_ID")) for launch in launch_kinds(job))
    also = (EnvironmentFacts, GpuFacts, SlurmFacts, TrainerFacts)
    for launch, identical in () if outside else job.each(LaunchFacts, also=also):
        if "SLURM_JOB_ID" not in launch.filled and slurm_step(launch) is None:
            continue
        inside = True
        key = (id(identical.find(EnvironmentFacts)), id(identical.find(GpuFacts)))
        if key not in visible:
            visible[key] = _visible(identical)
        stated = launch_number(launch, "LOCAL_RANK")
        number = stated if stated is not None else launch_number(launch, "SLURM_LOCALID")
        seat = LocalRankGpus(number or 0, stated is not None, visible[key])
        if (fault := _fault(seat, launch, identical)) and on_processor(identical) is None:
            faults.setdefault(fault, []).append((seat, identical))
    for fault, seats in faults.items():
        yield _report(fault, seats)
    if not inside:
        yield Skip("not inside a SLURM job")


def _fault(seat: LocalRankGpus, launch: LaunchFacts, identical: IdenticalRanks) -> HiddenGpus | None:
    """Return the fault of a rank. A task that sees one GPU and has no LOCAL_RANK may use device 0."""
    step = slurm_step(launch)
    several = (launch.local_world_size or 1) > 1 or (step is not None and (step.most_per_node or 1) > 1)
    bound, asked = _bound(launch, identical), devices_asked(identical.members[0])
    if seat.visible == 0 or not (several or bound):
        return None
    options = tuple((name, launch.get(name) or "") for name in OPTIONS if name in launch.filled)
    tasks = launch.local_world_size or 1
    if bound and asked is not None and asked > (seat.visible or asked) and inner_launcher(launch) is None:
        return HiddenGpus(Severity.ERROR, seat.visible, options, tasks, asked)
    if seat.visible is not None and seat.number >= seat.visible and (seat.is_stated or seat.visible > 1):
        return HiddenGpus(Severity.ERROR, seat.visible, options, tasks)
    if bound and several and seat.number > 0 and _sees_a_part(seat, launch):
        return HiddenGpus(Severity.WARNING, seat.visible, options, tasks)
    return None


def _sees_a_part(seat: LocalRankGpus, launch: LaunchFacts) -> bool:
    """Whether a task sees fewer GPUs than all tasks of its node have; SLURM may bind without hiding the others."""
    step, each = slurm_step(launch), launch_number(launch, "SLURM_GPUS_PER_TASK") or 1
    tasks = (step.most_per_node if step else None) or launch.local_world_size or 1
    return seat.visible is None or seat.visible < tasks * each


def _visible(identical: IdenticalRanks) -> int | None:
    if (seen := visible_to(identical)) is not None:
        return seen.size
    environment = identical.find(EnvironmentFacts)
    listed = parse_visible_devices(environment.get("CUDA_VISIBLE_DEVICES") if environment else None)
    return len(listed.entries) if listed.is_set and not listed.fault else None


def _bound(launch: LaunchFacts, identical: IdenticalRanks) -> bool:
    """Whether SLURM assigns GPUs to each task; --tres-per-task also does if it names GPUs."""
    if (launch.get("SLURM_GPU_BIND") or "").lower() == "none":
        return False
    return bound_per_task(identical.members[0]) or "gpu" in (launch.get("SLURM_TRES_PER_TASK") or "")


def _report(fault: HiddenGpus, seats: list[tuple[LocalRankGpus, IdenticalRanks]]) -> Finding:
    numbers = sorted({seat.number for seat, _ in seats})
    tasks, verb = ("task", "sees") if len(numbers) == 1 or fault.devices else ("tasks", "see")
    of = "" if fault.devices else f" of local {ranks_in_words(tuple(numbers))}"
    start = f"Lightning uses devices={fault.devices}, but the" if fault.devices else "The"
    each = dict(fault.options).get("SLURM_GPUS_PER_TASK", "")
    visible = int(each) if fault.visible is None and each.isdecimal() and len(each) < 4 else fault.visible
    verb = "may see" if fault.visible is None else verb
    count = "some" if visible is None else str(visible)
    cause = f" ({', '.join(f'{name}={value}' for name, value in fault.options)})" if fault.options else ""
    if fault.severity is Severity.ERROR and fault.visible and not fault.devices and min(numbers) >= fault.visible:
        start, of, tasks, verb = (
            f"{'No GPU has the index' if len(numbers) == 1 else 'No GPUs have the indices'} of local "
            f"{ranks_in_words(tuple(numbers))}: each",
            "",
            "task",
            "sees",
        )
    return Finding(
        f"{start} SLURM {tasks}{of} {verb} only {count} GPU{'' if visible == 1 else 's'}{cause}",
        ranks=tuple(number for _, identical in seats for number in identical.ranks),
        severity=fault.severity,
        evidence={"local_ranks": numbers, "visible_gpus": fault.visible, **dict(fault.options)},
        effect=""
        if fault.severity is not Severity.WARNING
        else SEVERAL_EACH
        if fault.visible and max(numbers) < fault.visible
        else MAY_WORK,
        fix=f"Request `--gpus-per-node={max(fault.tasks, 1)}` instead of GPUs per task, and add `--gpu-bind=none` to "
        "srun."
        if fault.options
        else f"Use `#SBATCH --gpus-per-node={max(fault.tasks, 1)}`, which requests as many GPUs per host as tasks.",
        explains=("GPU002", "RUN004"),
    )


def _per_task() -> JobBuilder:
    """Four tasks of a node, one GPU each; the driver shows four, as it does without a device cgroup."""
    return healthy(per_host=4).by_srun().launched(SLURM_GPUS_PER_TASK="1")
