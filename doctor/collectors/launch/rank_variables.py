"""Claims of launchers about this process: rank, world size, local rank. Pure functions of variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from doctor.collectors.base import first_known, parse_int
from doctor.collectors.launch.trainer_variables import device_count, json_list
from doctor.core.facts import Claim
from doctor.knowledge.launcher_index import COUNTED, PLAIN_MARKS, STEP, function_of
from doctor.knowledge.launchers import ENVIRONMENT, FIRST_SPECIAL_STEP, LAUNCHERS, Launcher

Environ = Mapping[str, str]

RANK_VARIABLES = tuple(dict.fromkeys(("RANK", "LOCAL_RANK", *(counts.rank for _, counts in COUNTED))))
"""Variables with the rank of a running process."""


def whole_number(environ: Environ, *names: str) -> int | None:
    """Return the first of ``names`` that holds an integer, parsed as Python and so torch does."""
    return first_known(*(parse_int(environ.get(name)) for name in names))


def claim_from(row: Launcher, environ: Environ) -> Claim | None:
    """Return the claim of a launcher by its own variables, or ``None`` if none of its marks is set."""
    if not any_set(environ, row.marks):
        return None
    fields = (row.rank, row.world_size, row.local_rank, row.local_world_size, row.node_rank, row.node_count)
    claim = Claim(row.claim, *(whole_number(environ, *names) for names in fields))
    if not row.tasks_per_node or claim.node_rank is None:
        return claim
    tasks = next((environ[name] for name in row.tasks_per_node if environ.get(name)), "")
    return msgspec.structs.replace(claim, local_world_size=tasks_on_node(tasks, claim.node_rank))


def task_counts(text: str) -> list[tuple[int, int]] | None:
    """Parse ``4(x2),3`` (SLURM_TASKS_PER_NODE) as pairs of tasks per node and number of consecutive nodes."""
    counts: list[tuple[int, int]] = []
    for part in text.split(",") if text else []:
        tasks, repeated, nodes = part.partition("(x")
        count, times = parse_int(tasks), parse_int(nodes.rstrip(")")) if repeated else 1
        if count is None or times is None or not 0 <= count < 1 << 31 or not 0 < times < 1 << 31:
            return None
        counts.append((count, times))
    return counts or None


def tasks_on_node(text: str, node: int) -> int | None:
    """Return the number of tasks on the node with that index; see :func:`task_counts`."""
    for tasks, nodes in task_counts(text) or ():
        if 0 <= node < nodes:
            return tasks
        node -= nodes
    return None


def kubeflow_claim(row: Launcher, environ: Environ) -> Claim | None:
    """Return the claim of Kubeflow about this pod.

    Its RANK and WORLD_SIZE count pods, not processes (kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go);
    PET_* are defaults of the arguments of torchrun.
    """
    configured, is_pod = any_set(environ, row.marks), is_pod_of_kubeflow(environ)
    if not configured and not is_pod:
        return None
    return _claim_of_nodes(
        row,
        node_rank=whole_number(environ, "PET_NODE_RANK", *(("RANK",) if is_pod else ())),
        node_count=whole_number(environ, "PET_NNODES" if configured else "WORLD_SIZE"),
        processes=whole_number(environ, "PET_NPROC_PER_NODE"),
    )


def sagemaker_claim(row: Launcher, environ: Environ) -> Claim | None:
    """Return the claim of SageMaker about this host: its index in SM_HOSTS (sagemaker-training-toolkit)."""
    if not any_set(environ, row.marks):
        return None
    hosts = [entry for entry in json_list(environ.get("SM_HOSTS", "")) if isinstance(entry, str)]
    current = environ.get("SM_CURRENT_HOST")
    return _claim_of_nodes(
        row,
        node_rank=hosts.index(current) if current in hosts else None,
        node_count=len(hosts) or None,
        processes=whole_number(environ, "SM_NUM_GPUS") or None,
    )


def llamafactory_claim(row: Launcher, environ: Environ) -> Claim | None:
    """Return what LLaMA-Factory passes to the torchrun that it starts (its src/llamafactory/launcher.py)."""
    if "FORCE_TORCHRUN" not in environ and not {"NNODES", "NPROC_PER_NODE"} <= environ.keys():
        return None
    return _claim_of_nodes(
        row,
        node_rank=whole_number(environ, "NODE_RANK"),
        node_count=whole_number(environ, "NNODES"),
        processes=whole_number(environ, "NPROC_PER_NODE"),
    )


def lightning_claim(row: Launcher, environ: Environ) -> Claim | None:
    """Return the claim of Lightning about a process that it started.

    It sets no RANK: a rank is the node rank times the devices per node, plus the local rank
    (lightning/fabric/strategies/launchers/subprocess_script.py).
    """
    if not is_started_by_lightning(row, environ):
        return None
    node_rank, local_rank = whole_number(environ, "NODE_RANK", "GROUP_RANK"), whole_number(environ, "LOCAL_RANK")
    devices = device_count(environ.get("LT_DEVICES"))
    rank = local_rank if not node_rank else None
    if node_rank and local_rank is not None and devices:
        rank = node_rank * devices + local_rank
    nodes = whole_number(environ, "LT_NUM_NODES")
    return Claim(row.claim, rank, whole_number(environ, "WORLD_SIZE"), local_rank, devices, node_rank, nodes)


def claims_of(environ: Environ) -> tuple[Claim, ...]:
    """Return the claims of all sources in the order of the table."""
    found = [claim_from(ENVIRONMENT, environ)]
    for row in LAUNCHERS:
        read = function_of(row.claim_reader) if row.claim_reader else claim_from
        found.append(read(row, environ))
    return tuple(claim for claim in found if claim is not None)


def is_slurm_step(environ: Environ) -> bool:
    """Return whether this is a task of srun, not a batch script, salloc or an interactive step."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isascii() and step.isdecimal() and len(step) <= 10 and int(step) < FIRST_SPECIAL_STEP


def is_pod_of_kubeflow(environ: Environ) -> bool:
    """Return whether the training operator set the plain variables, without a launcher inside the pod."""
    wanted = {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return wanted <= environ.keys() and not any_set(environ, ("LOCAL_RANK", *PLAIN_MARKS))


def is_started_by_kubeflow(row: Launcher, environ: Environ) -> bool:
    """Return whether the training operator started this pod, without a launcher inside it."""
    return is_pod_of_kubeflow(environ) or (any_set(environ, row.marks) and "KUBERNETES_SERVICE_HOST" in environ)


def is_started_by_lightning(row: Launcher, environ: Environ) -> bool:
    """Return whether the variables are those of the launcher of Lightning: all but RANK.

    With several tasks of srun that launcher is not used: a batch script exported the variables.
    """
    wanted = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    tasks = whole_number(environ, *STEP.world_size) if is_slurm_step(environ) else None
    launched = wanted <= environ.keys() and "RANK" not in environ and (tasks is None or tasks < 2)
    return launched or "LT_CLI_USED" in environ


def has_all_marks(row: Launcher, environ: Environ) -> bool:
    """Return whether all marks of the launcher are set."""
    return all(name in environ for name in row.marks)


def _claim_of_nodes(row: Launcher, *, node_rank: int | None, node_count: int | None, processes: int | None) -> Claim:
    world = node_count * processes if node_count is not None and processes is not None else None
    world = world if world is not None and abs(world) < 1 << 63 else None
    return Claim(row.claim, None, world, None, processes, node_rank, node_count)


def any_set(environ: Environ, names: Iterable[str]) -> bool:
    """Return whether one of ``names`` is set, even if it is empty."""
    return any(name in environ for name in names)
