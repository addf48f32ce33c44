"""What a scene is, the words to write one with, and how one is judged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tests.faults.stage import Host, Outcome, Play, Process, own_alarms, perform, true_here


class Expected(Protocol):
    """What findings must say and whom they must blame: of a scene on one machine, or of a live one."""

    @property
    def id(self) -> str:
        """The check."""

    @property
    def severity(self) -> str:
        """Of its findings."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Exactly those to blame."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Likewise, where they are named."""

    @property
    def says(self) -> tuple[str, ...]:
        """Words of the findings."""


@dataclass(frozen=True)
class Scene:
    """One fault, caused for real, and its healthy twin.

    ``says``: words that the finding's summary or evidence must hold. ``ranks`` and ``hosts``: exactly those to blame.
    ``also``: ids of further findings that are true in this scene. ``code``: the exit code, 1 for an error and 0 for
    the rest unless said otherwise.
    """

    name: str
    id: str
    faulty: Play
    twin: Play
    severity: str = "error"
    ranks: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    code: int | None = None

    @property
    def title(self) -> str:
        """The name and the id, for tables and test ids."""
        return f"{self.id} {self.name}"

    @property
    def exit_code(self) -> int:
        """What the command must end with."""
        return (1 if self.severity == "error" else 0) if self.code is None else self.code


class Score(NamedTuple):
    """What the doctor made of a scene; each list holds what went wrong."""

    found: list[str]
    blamed: list[str]
    silent: list[str]

    @property
    def complaints(self) -> list[str]:
        """Everything that went wrong."""
        return [*self.found, *self.blamed, *self.silent]


def score(scene: Scene) -> Score:
    """Play ``scene`` and its twin. Raises ``CannotPlay`` where that can't be done here."""
    faulty, twin = perform(scene.faulty), perform(scene.twin)
    return Score(_not_found(scene, faulty), _wrongly_blamed(scene, faulty), loud(scene.twin, twin))


def loud(play: Play, outcome: Outcome) -> list[str]:
    """What is said at severity error or warning where nothing is wrong, and checks that broke."""
    alarms = {check: words for check, words in outcome.alarms().items() if check not in true_here(play)}
    return [f"false alarm {check}: {'; '.join(words)}" for check, words in alarms.items()] + outcome.crashed()


def _not_found(scene: Scene, outcome: Outcome) -> list[str]:
    result = outcome.result(scene.id)
    wrong = []
    if result["status"] != "fail" or result["severity"] != scene.severity:
        wrong.append(f"{scene.id} is {result['status']} ({result['severity']}): {result['reason']}")
    if outcome.code != scene.exit_code and not own_alarms():
        wrong.append(f"exit code {outcome.code}, not {scene.exit_code}")
    return wrong + unsaid(scene, outcome)


def unsaid(scene: Expected, outcome: Outcome) -> list[str]:
    """Words that the findings of ``scene`` were to say, and do not."""
    findings = outcome.findings(scene.id)
    words = " ".join(f"{one['summary']} {one['evidence']} {one['source']} {one['fix']}" for one in findings)
    return [f"{word!r} is not in the words: {words[:400]}" for word in scene.says if word not in words]


def others_blamed(scene: Expected, outcome: Outcome) -> list[str]:
    """Ranks and hosts that are blamed in the place of those of ``scene``."""
    findings = [one for one in outcome.findings(scene.id) if one["severity"] == scene.severity]
    ranks = {rank for finding in findings for rank in finding["ranks"]}
    hosts = {host for finding in findings for host in finding["hosts"]}
    wrong = []
    if ranks != set(scene.ranks):
        wrong.append(f"ranks {sorted(ranks)} are blamed, not {sorted(scene.ranks)}")
    if scene.hosts and hosts != set(scene.hosts):
        wrong.append(f"hosts {sorted(hosts)} are blamed, not {sorted(scene.hosts)}")
    return wrong


def _wrongly_blamed(scene: Scene, outcome: Outcome) -> list[str]:
    wrong = others_blamed(scene, outcome)
    true = {scene.id, *scene.also, *true_here(scene.faulty)}
    others = outcome.alarms(but_consequences_of=scene.id)
    wrong += [f"untrue there: {check} {words}" for check, words in others.items() if check not in true]
    return wrong


# ---- words to write scenes with ----


def process(*, shell: str = "", gpus: tuple[str, ...] = (), packages: tuple[str, ...] = (), **environ: str) -> Process:
    """A process with ``environ`` on top of the clean environment."""
    return Process(tuple(environ.items()), shell, gpus, packages)


def alone(
    *,
    spaces: tuple[str, ...] = (),
    setup: str = "",
    needs: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    shell: str = "",
    gpus: tuple[str, ...] = (),
    packages: tuple[str, ...] = (),
    **environ: str,
) -> Play:
    """``doctor check`` in one process."""
    one = process(shell=shell, gpus=gpus, packages=packages, **environ)
    return Play((Host((one,), spaces, setup, needs),), options)


def together(*processes: Process, spaces: tuple[str, ...] = (), setup: str = "", needs: tuple[str, ...] = ()) -> Play:
    """Several processes of one host, captured each by itself and diagnosed together."""
    return Play((Host(processes, spaces, setup, needs),))


def launched(
    launcher: str,
    *,
    spaces: tuple[str, ...] = (),
    setup: str = "",
    needs: tuple[str, ...] = (),
    shell: str = "",
    **environ: str,
) -> Play:
    """What a real launcher starts; ``environ`` is that of the launcher's own shell, ``shell`` runs in each rank."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environ.items())
    return Play((Host((Process(shell=shell),), spaces, f"{setup}\n{exports}", needs, launcher),))


def torchrun_environ(rank: int, world: int, local: int | None = None, per_host: int | None = None) -> dict[str, str]:
    """What torchrun sets for a worker (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    per_host = per_host or world
    local = rank % per_host if local is None else local
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "GROUP_WORLD_SIZE": str(-(-world // per_host)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def crew(
    world: int, changes: Mapping[int, Mapping[str, str]] | None = None, *, like: Process | None = None, **common: str
) -> tuple[Process, ...]:
    """``world`` ranks of one host as torchrun starts them. ``changes``: what differs, by rank; ``common``: for all.

    A value of ``None`` is not possible: what torchrun sets is always there.
    """
    template = like or Process()
    return tuple(
        replace(
            template,
            environ=tuple({**torchrun_environ(rank, world), **common, **(changes or {}).get(rank, {})}.items()),
        )
        for rank in range(world)
    )


def srun_environ(rank: int, tasks: int, per_node: int | None = None) -> dict[str, str]:
    """What slurmstepd sets for a task of ``srun`` (slurm src/common/env.c)."""
    per_node = per_node or tasks
    nodes = -(-tasks // per_node)
    listed = f"{per_node}(x{nodes})" if nodes > 1 else str(per_node)
    names = "node0" if nodes == 1 else f"node[0-{nodes - 1}]"
    return {
        **allocation_environ(tasks, per_node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": listed,
        "SLURM_STEP_NODELIST": names,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_DISTRIBUTION": "block",
    }


def allocation_environ(tasks: int, per_node: int) -> dict[str, str]:
    """What a job has in every shell of it (sbatch(1), salloc(1): output environment variables)."""
    nodes = -(-tasks // per_node)
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "node0" if nodes == 1 else f"node[0-{nodes - 1}]",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_CLUSTER_NAME": "lab",
    }


HEALTHY = alone()
CUDA = ("torch==2.8.0+cu128", "nvidia-nccl-cu12==2.27.3")
"""A torch for GPUs, as pip installs it."""
