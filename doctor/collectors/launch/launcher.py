"""Who launched this process, and whether it is one of several that run now.

The decisions are pure functions of a mapping of environment variables.
"""

from __future__ import annotations

from collections.abc import Callable

from doctor.collectors.base import Collector, Machine
from doctor.collectors.host.ancestors import ancestors_of
from doctor.collectors.launch.rank_variables import (
    ACCELERATE,
    OPEN_MPI,
    PMI,
    TASK_COUNTS,
    Environ,
    RankVariables,
    any_set,
    claim_from,
    claims_of,
    is_pod_of_kubeflow,
    is_ray_worker,
    is_slurm_step,
    is_started_by_lightning,
    slurm_claim,
    whole_number,
)
from doctor.core.facts import Claim, LaunchFacts
from doctor.core.masking import mask_variables, readable

PREFIXES = (
    "TORCHELASTIC_",
    "PET_",
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SALLOC_",
    "SBATCH_",
    "OMPI_COMM_",
    "MPI_LOCAL",
    "MV2_COMM_",
    "PMI_",
    "PALS_",
    "LSB_",
    "JSM_",
    "RAY_",
    "LT_",
    "PL_",
    "ACCELERATE_",
)
"""Beginnings of the names that launchers set or read."""

NAMES = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMPI_UNIVERSE_SIZE",
        "PMIX_RANK",
        "FORCE_TORCHRUN",
        "NNODES",
        "NPROC_PER_NODE",
        "SM_HOSTS",
        "SM_CURRENT_HOST",
        "SM_NUM_GPUS",
        "SM_NUM_CPUS",
        "SM_NETWORK_INTERFACE_NAME",
        "SM_CURRENT_INSTANCE_TYPE",
        "KUBERNETES_SERVICE_HOST",
        "STANDALONE_PORT",
        "JPY_PARENT_PID",
        "AZ_BATCH_MASTER_NODE",
        "AZ_BATCHAI_MPI_MASTER_NODE",
        "AZUREML_EXPERIMENT_ID",
        "DLTS_JOB_ID",
        "PBS_JOBID",
        "FLUX_JOB_ID",
    ]
)
"""The single names. Of SageMaker's, those without the user's hyperparameters, which may hold anything."""

PORTS = range(1, 65536)
"""Ports that a peer can connect to."""


def is_launch_variable(name: str) -> bool:
    """Whether the variable ``name`` belongs to a launcher."""
    return name in NAMES or name.startswith(PREFIXES)


def launcher_of(environ: Environ) -> str:
    """The innermost launcher that started this process, or ``none``; one of the names of the report's ``launcher``.

    torchrun comes first, since its workers inherit everything of the srun or mpirun around it. A batch script and a
    shell of salloc were started by SLURM, but not as ranks.
    """
    started_by: tuple[tuple[str, Callable[[Environ], bool]], ...] = (
        ("torchrun", lambda seen: "TORCHELASTIC_RUN_ID" in seen),
        ("ray", is_ray_worker),
        ("lsf", lambda seen: "JSM_NAMESPACE_RANK" in seen),
        ("openmpi", lambda seen: _is_started_by_mpi(seen, OPEN_MPI)),
        ("mpich", lambda seen: _is_started_by_mpi(seen, PMI)),
        ("slurm", is_slurm_step),
        ("kubeflow", _is_started_by_kubeflow),
        ("sagemaker", lambda seen: {"SM_HOSTS", "SM_CURRENT_HOST"} <= seen.keys()),
        ("accelerate", lambda seen: any_set(seen, ACCELERATE.marks)),
        ("lightning", lambda seen: is_started_by_lightning(seen) or "LT_CLI_USED" in seen),
    )
    return next((name for name, holds in started_by if holds(environ)), "none")


def running_together(environ: Environ) -> str:
    """The variable that shows that this process is one of several which run now; empty for a lone process.

    Left-over variables, a batch script, a shell of salloc and a rank outside the world are judged alone. Inside
    torchrun its word is final: a world of 1 stays alone, whatever the step around it holds. A Ray worker inherits the
    step in which ``ray start`` ran, which says nothing about the worker.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        size = whole_number(environ, "WORLD_SIZE")
        return "TORCHELASTIC_RUN_ID" if _is_one_of(environ, "RANK", size) else ""
    tasks = whole_number(environ, *TASK_COUNTS)
    if _is_one_of(environ, "OMPI_COMM_WORLD_RANK", whole_number(environ, "OMPI_COMM_WORLD_SIZE")):
        return "OMPI_COMM_WORLD_SIZE"
    if _is_one_of(environ, "PMI_RANK", whole_number(environ, "PMI_SIZE")):
        return "PMI_SIZE"
    if is_slurm_step(environ) and not is_ray_worker(environ) and _is_one_of(environ, "SLURM_PROCID", tasks):
        return "SLURM_STEP_ID"
    return "RANK" if _has_plain_rank(environ) else ""


def launch_facts(environ: Environ, ancestors: tuple[str, ...] = ()) -> LaunchFacts:
    """Everything that the variables say. RANK, WORLD_SIZE and the like come before the launcher's own names, since
    torch goes by them (``env://`` in torch/distributed/rendezvous.py)."""
    launcher, claims = launcher_of(environ), claims_of(environ)
    own = _own_claim(launcher, claims)
    return LaunchFacts(
        launcher=launcher,
        rank=_first(whole_number(environ, "RANK"), own.rank),
        world_size=_first(whole_number(environ, "WORLD_SIZE"), own.world_size),
        local_rank=_first(whole_number(environ, "LOCAL_RANK"), own.local_rank),
        local_world_size=_first(whole_number(environ, "LOCAL_WORLD_SIZE"), own.local_world_size),
        node_rank=_first(own.node_rank, whole_number(environ, "GROUP_RANK", "NODE_RANK")),
        running_together=running_together(environ),
        claims=claims,
        variables=mask_variables(environ, is_launch_variable),
        ancestors=ancestors,
    )


def collect_launch(surroundings: Machine) -> LaunchFacts:
    """The launch of this process, from its environment and the names of its parents."""
    ancestors = tuple(readable(parent.name) for parent in ancestors_of(surroundings.proc))
    return launch_facts(surroundings.environ, ancestors)


def _own_claim(launcher: str, claims: tuple[Claim, ...]) -> Claim:
    """The claim of the launcher about this very process. Kubeflow and SageMaker speak of a node: only that is taken."""
    source = {"mpich": "pmi"}.get(launcher, launcher)
    claim = next((claim for claim in claims if claim.source == source), Claim(source))
    if source in ("kubeflow", "sagemaker"):
        return Claim(source, node_rank=claim.node_rank)
    return claim


def _is_one_of(environ: Environ, rank_name: str, size: int | None) -> bool:
    """Whether the size is above 1 and the rank, where one is stated, is a number within it."""
    if size is None or size < 2:
        return False
    rank = whole_number(environ, rank_name)
    return rank_name not in environ or (rank is not None and 0 <= rank < size)


def _has_plain_rank(environ: Environ) -> bool:
    port = whole_number(environ, "MASTER_PORT")
    reachable = bool(environ.get("MASTER_ADDR", "").strip()) and port in PORTS
    return reachable and "RANK" in environ and _is_one_of(environ, "RANK", whole_number(environ, "WORLD_SIZE"))


def _is_started_by_mpi(environ: Environ, names: RankVariables) -> bool:
    """Whether mpirun or mpiexec set these variables: srun sets PMI's too (``--mpi=pmi2``), then equal to its own."""
    claim = claim_from(names, environ)
    if claim is None or claim.rank is None:
        return False
    tasks = slurm_claim(environ) if is_slurm_step(environ) else None
    return tasks is None or (claim.rank, claim.world_size) != (tasks.rank, tasks.world_size)


def _is_started_by_kubeflow(environ: Environ) -> bool:
    told = any_set(environ, "PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK")
    return is_pod_of_kubeflow(environ) or (told and "KUBERNETES_SERVICE_HOST" in environ)


def _first(number: int | None, other: int | None) -> int | None:
    return other if number is None else number


COLLECTOR = Collector(section=LaunchFacts, collect=collect_launch)
