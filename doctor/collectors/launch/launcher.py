"""The launcher of this process, and whether it is one of several that run now.

All decisions are pure functions of environment variables.
"""

from __future__ import annotations

from doctor.collectors.base import Machine, collector, first_known
from doctor.collectors.host.processes import ancestors_of
from doctor.collectors.launch.rank_variables import (
    Environ,
    any_set,
    claim_from,
    claims_of,
    is_slurm_step,
    whole_number,
)
from doctor.core.facts import Claim, LaunchFacts
from doctor.core.masking import mask_variables, readable
from doctor.knowledge.launcher_index import (
    BY_NAME,
    BY_PRECEDENCE,
    COUNTED,
    PREFIXES,
    STEP,
    STEPLESS_MARKS,
    VARIABLES,
    function_of,
)
from doctor.knowledge.launchers import Launcher

PORTS = range(1, 65536)
"""Valid ports."""


def is_launch_variable(name: str) -> bool:
    """Return whether the variable ``name`` belongs to a launcher."""
    return name in VARIABLES or name.startswith(PREFIXES)


def launcher_of(environ: Environ) -> str:
    """Return the innermost launcher that started this process, or ``none``: the ``launcher`` of the report.

    torchrun comes first because its workers inherit the variables of the srun or mpirun around it. SLURM starts batch
    scripts and shells of salloc too, but not as ranks.
    """
    return next((row.name for row in BY_PRECEDENCE if _is_detected(row, environ)), "none")


def _is_detected(row: Launcher, environ: Environ) -> bool:
    if row.detector:
        return bool(function_of(row.detector)(row, environ))
    if row.detected_by:
        return any_set(environ, row.detected_by)
    if row is STEP:
        return is_slurm_step(environ)
    # srun sets the variables of PMI and Open MPI too (--mpi=pmi2), then equal to its own.
    claim = claim_from(row, environ)
    if claim is None or claim.rank is None:
        return False
    tasks = claim_from(STEP, environ) if is_slurm_step(environ) else None
    return tasks is None or (claim.rank, claim.world_size) != (tasks.rank, tasks.world_size)


def running_together(environ: Environ) -> str:
    """Return the variable that shows that this process is one of several that run now; empty for a single process.

    Stale variables, a batch script, a shell of salloc and a rank outside the world count as a single process. The count
    of an agent such as torchrun is final: a world of 1 is a single process whatever step it runs in. A Ray worker
    inherits the step in which ``ray start`` ran, which does not describe the worker.
    """
    for _, count in COUNTED:
        if count.by_agent and count.mark not in environ:
            continue
        if count.in_step and (not is_slurm_step(environ) or any_set(environ, STEPLESS_MARKS)):
            continue
        if _is_one_of(environ, count.rank, whole_number(environ, *count.sizes)):
            return count.mark
        if count.by_agent:
            return ""
    reachable = environ.get("MASTER_ADDR", "").strip() and whole_number(environ, "MASTER_PORT") in PORTS
    ranked = "RANK" in environ and _is_one_of(environ, "RANK", whole_number(environ, "WORLD_SIZE"))
    return "RANK" if reachable and ranked else ""


def launch_facts(environ: Environ, ancestors: tuple[str, ...] = ()) -> LaunchFacts:
    """Return the launch facts of these variables.

    RANK, WORLD_SIZE and the like precede the variables of the launcher, because torch reads them (``env://`` in
    torch/distributed/rendezvous.py).
    """
    launcher, claims = launcher_of(environ), claims_of(environ)
    own = _own_claim(launcher, claims)
    return LaunchFacts(
        launcher=launcher,
        rank=first_known(whole_number(environ, "RANK"), own.rank),
        world_size=first_known(whole_number(environ, "WORLD_SIZE"), own.world_size),
        local_rank=first_known(whole_number(environ, "LOCAL_RANK"), own.local_rank),
        local_world_size=first_known(whole_number(environ, "LOCAL_WORLD_SIZE"), own.local_world_size),
        node_rank=first_known(own.node_rank, whole_number(environ, "GROUP_RANK", "NODE_RANK")),
        running_together=running_together(environ),
        claims=claims,
        variables=mask_variables(environ, is_launch_variable),
        ancestors=ancestors,
    )


@collector(LaunchFacts)
def collect_launch(machine: Machine) -> LaunchFacts:
    """Collect the launch of this process from its environment and the names of its parents."""
    ancestors = tuple(readable(parent.name) for parent in ancestors_of(machine.proc))
    return launch_facts(machine.environ, ancestors)


def _own_claim(launcher: str, claims: tuple[Claim, ...]) -> Claim:
    """Return the claim of the launcher about this process; only the node rank if the launcher counts hosts."""
    row = BY_NAME.get(launcher)
    if row is None:
        return Claim(launcher)
    claim = next((claim for claim in claims if claim.source == row.claim), Claim(row.claim))
    return Claim(row.claim, node_rank=claim.node_rank) if row.counts_hosts else claim


def _is_one_of(environ: Environ, rank_name: str, size: int | None) -> bool:
    """Return whether the size is above 1 and the rank, if set, is within it."""
    if size is None or size < 2:
        return False
    rank = whole_number(environ, rank_name)
    return rank_name not in environ or (rank is not None and 0 <= rank < size)
