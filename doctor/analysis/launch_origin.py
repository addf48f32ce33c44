"""The launcher that started a process, and launch variables that are left over from another one.

A variable proves little by itself: a batch script, an interactive allocation and a shell inside a task all have
SLURM_NTASKS, and any shell may have an old RANK. The functions below combine several of them.

Sources: slurm src/common/env.c and src/common/slurm_protocol_defs.h (what sbatch, salloc and srun set; step numbers),
torch/distributed/rendezvous.py (env://), torch/distributed/elastic/agent/server/local_elastic_agent.py (torchrun),
lightning/fabric/plugins/environments (how Lightning detects launchers).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from doctor.analysis.logs.event_timeline import parse_count
from doctor.core.facts import LaunchFacts, SlurmFacts, TrainerFacts
from doctor.core.job import Job, Rank
from doctor.core.logs.event_groups import EventGroup
from doctor.core.section_table import IdenticalRanks
from doctor.core.text import lazy_compile
from doctor.knowledge.launcher_index import BY_NAME, BY_PRECEDENCE, COUNTED, PARENTS
from doctor.knowledge.launchers import FIRST_SPECIAL_STEP, INTERACTIVE_JOBS, LAUNCHERS, Launcher, ProcessCount

PORT_CHOOSERS = frozenset(row.name for row in LAUNCHERS if row.chooses_port)
"""Launchers that choose MASTER_PORT themselves: a free port, or one reserved for it."""

MAX_HOSTS = 65_536
"""The maximum number of names that :func:`expand_hosts` returns; a longer list counts as damaged."""
MAX_LIST = 1 << 20
"""The maximum number of characters of a list; one variable holds at most 128 KiB (MAX_ARG_STRLEN of Linux)."""
MAX_CHARACTERS = 16 << 20
"""The maximum number of characters of all names: 65,536 names of 253 characters, the longest DNS name."""
LONGEST_NUMBER = 32
"""Characters of a rank, size or port that are read."""
_UNCOUNTED = tuple(
    name for row in BY_PRECEDENCE if row.counts is None and not row.recognized_by for name in row.detected_by
)
"""Marks of ranks of launchers that neither a count nor a claim identifies, such as jsrun."""
_RECOGNIZED_BY_COUNT = tuple((row, count) for row, count in COUNTED if row.recognized_by == "counts")
_DIRECT_MARKS = frozenset(("SLURM_STEP_ID", *(count.mark for _, count in _RECOGNIZED_BY_COUNT)))
"""The variables of which srun or mpirun sets one for every process that it starts."""
_STARTED_DIRECTLY = {
    row.title: tuple((other, count) for other, count in COUNTED if other.title == row.title and not count.by_agent)
    for row, _ in COUNTED
}
"""The launchers without agents by the word for them in findings, each with its count."""
_PARTS = lazy_compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKETS = lazy_compile(r"\[([^\[\]]*)\]")


def whole_number(text: str | None) -> int | None:
    """``text`` as Python's ``int()`` reads it, which is how torch and Lightning read ranks, sizes and ports."""
    if text is None or len(text) > LONGEST_NUMBER:
        return None
    try:
        return int(text)
    except ValueError:
        return None


def launch_number(launch: LaunchFacts, name: str) -> int | None:
    """The launch variable ``name`` as a number; ``None`` if it is not set or not a number."""
    return whole_number(launch.values.get(name))


def launch_kinds(job: Job) -> tuple[LaunchFacts, ...]:
    """The launch of one rank of each kind: by launcher, mark, world size, and names of variables that are not empty.

    Computed once for a job. What follows from these alone is decided for a few kinds, and not for every rank."""
    if job not in _KINDS:
        kinds: dict[Hashable, LaunchFacts] = {}
        for launch, _ in job.each(LaunchFacts):
            key = (launch.launcher, launch.running_together, launch.world_size, tuple(launch.filled))
            kinds.setdefault(key, launch)
        _KINDS[job] = tuple(kinds.values())
    return _KINDS[job]


_KINDS: WeakKeyDictionary[Job, tuple[LaunchFacts, ...]] = WeakKeyDictionary()


def may_be_direct(job: Job) -> bool:
    """Whether :func:`direct_launch` may return something for any rank."""
    return any(map(_may_be_direct, launch_kinds(job)))


def _may_be_direct(launch: LaunchFacts) -> bool:
    if _DIRECT_MARKS.isdisjoint(launch.filled):
        return False
    innermost = next(((row, count) for row, count in _RECOGNIZED_BY_COUNT if count.mark in launch.filled), None)
    return innermost is None or not innermost[1].by_agent or bool(_STARTED_DIRECTLY.get(innermost[0].title))


class SlurmStep(msgspec.Struct, frozen=True):
    """The srun job step of a process. ``size``: its tasks; ``most_per_node``: the most tasks on one node."""

    number: int
    task: int | None
    size: int | None
    nodes: int | None
    most_per_node: int | None


def slurm_step(launch: LaunchFacts) -> SlurmStep | None:
    """The step that this process runs in; ``None`` in a batch script, under salloc, or outside of SLURM."""
    number = launch_number(launch, "SLURM_STEP_ID") if "SLURM_STEP_ID" in launch.values else None
    if number is None or not 0 <= number < FIRST_SPECIAL_STEP:
        return None
    size = launch_number(launch, "SLURM_STEP_NUM_TASKS")
    size = launch_number(launch, "SLURM_NTASKS") if size is None else size
    nodes = launch_number(launch, "SLURM_STEP_NUM_NODES")
    most = most_tasks(launch.get("SLURM_STEP_TASKS_PER_NODE") or "") or None
    if most is None and size is not None and nodes:
        most = -(-size // nodes)
    elif most is None and (local := launch_number(launch, "SLURM_LOCALID")):
        most = local + 1
    return SlurmStep(number, launch_number(launch, "SLURM_PROCID"), size, nodes, most)


@lru_cache(maxsize=64)
def most_tasks(text: str) -> int | None:
    """The most tasks on one node in SLURM's ``8(x2),4``. ``None`` if it is missing or damaged."""
    counts = [re.fullmatch(r"\s*(\d{1,6})(?:\(x\d{1,6}\))?\s*", part, re.ASCII) for part in text.split(",")]
    return max((int(match[1]) for match in counts if match), default=None) if all(counts) else None


def is_interactive_job(launch: LaunchFacts) -> bool:
    """Whether Lightning treats the SLURM job as an interactive session, by its name."""
    return launch.get("SLURM_JOB_NAME") in INTERACTIVE_JOBS


def inner_launcher(launch: LaunchFacts) -> str | None:
    """The launcher that started this process inside a task, an allocation or a shell: torchrun, mpirun, Ray …

    ``None`` if srun started it directly, or no launcher did."""
    counting = _counting_launcher(launch)
    if counting is not None:
        return counting.title
    own = BY_NAME.get(launch.launcher)
    if own is not None and own.recognized_by == "launcher":
        return own.title
    for row in BY_PRECEDENCE:
        if row.recognized_by == "claim" and launch.claim(row.claim) is not None:
            return row.title
    return next((PARENTS[name] for name in launch.ancestors if name in PARENTS), None)


def _counting_launcher(launch: LaunchFacts) -> Launcher | None:
    """The innermost launcher whose count of processes is set and is not that of the step."""
    for row, count in _RECOGNIZED_BY_COUNT:
        if count.mark in launch.filled:
            step = None if count.by_agent else slurm_step(launch)
            # srun --mpi sets MPI's variables too, without an mpirun: they repeat those of the step.
            if step is None or (step.task, step.size) != _rank_and_size(launch, count):
                return row
    return None


def _rank_and_size(launch: LaunchFacts, count: ProcessCount) -> tuple[int | None, int | None]:
    return launch_number(launch, count.rank), launch_number(launch, count.sizes[0])


class DirectLaunch(NamedTuple):
    """A rank that srun or mpirun started directly: its number, the world size, and the variables with these values."""

    program: str
    rank: int | None
    size: int | None
    rank_name: str
    size_name: str
    most_per_node: int | None


def direct_launch(launch: LaunchFacts) -> DirectLaunch | None:
    """How srun or mpirun started this rank directly, one process per rank; ``None`` if neither did."""
    if _DIRECT_MARKS.isdisjoint(launch.values):
        return None
    counting = _counting_launcher(launch)
    if counting is not None:
        for row, count in _STARTED_DIRECTLY.get(counting.title, ()):
            if count.mark in launch.filled:
                most = launch_number(launch, row.local_world_size[0]) if row.local_world_size else None
                given = _rank_and_size(launch, count)
                return DirectLaunch(counting.title, *given, count.rank, count.sizes[0], most)
        return None
    step = slurm_step(launch)
    if step is None or inner_launcher(launch):
        return None
    size_name = "SLURM_NTASKS" if "SLURM_NTASKS" in launch.filled else "SLURM_STEP_NUM_TASKS"
    size = launch_number(launch, size_name)
    return DirectLaunch("srun", step.task, size, "SLURM_PROCID", size_name, step.most_per_node)


def is_left_alone(launch: LaunchFacts) -> bool:
    """Whether no launcher starts ranks around this process, and no complete set of variables is there.

    Values of RANK, LOCAL_RANK or NODE_RANK are then left over, or were meant for another process."""
    if launch.running_together or inner_launcher(launch) or slurm_step(launch):
        return False
    return launch.filled.keys().isdisjoint(("RANK", "WORLD_SIZE", *_UNCOUNTED))


def is_lightning_slurm(launch: LaunchFacts) -> bool:
    """Whether Lightning treats this process as a SLURM task: neither of an interactive job nor of torchrun."""
    torchrun = "TORCHELASTIC_RUN_ID" in launch.filled
    return not torchrun and launch.get("SLURM_NTASKS") is not None and not is_interactive_job(launch)


def starts_tasks_unlaunched(job: Job, launch: LaunchFacts) -> bool:
    """Whether a process is in an allocation of several tasks that neither srun nor another launcher started.

    Several processes that were seen together have been started by a launcher. One task needs no srun."""
    if len(job.ranks) > 1 or not is_lightning_slurm(launch) or inner_launcher(launch):
        return False
    tasks = launch_number(launch, "SLURM_NTASKS")
    return slurm_step(launch) is None and (tasks is None or tasks > 1)


@lru_cache(maxsize=8)
def expand_hosts(text: str | None) -> tuple[str, ...]:
    """SLURM's ``gpu[01-03,7],login1`` as single names, in its order. Empty if it is missing or damaged."""
    names: list[str] = []
    for part in _PARTS.findall((text or "")[:MAX_LIST]):
        found = _expanded(part.strip(), MAX_HOSTS - len(names))
        if found is None:
            return ()
        names.extend(found)
    return tuple(names)


def _expanded(part: str, most: int) -> list[str] | None:
    pieces = _BRACKETS.split(part)
    names = [pieces[0]]
    for numbers, text in zip(pieces[1::2], pieces[2::2], strict=True):
        ends = [number + text for number in itertools.islice(_numbers(numbers), most + 1)]
        if len(names) * len(ends) > most or len(names) * len(ends) * len(names[0] + text) > MAX_CHARACTERS:
            return None
        names = [name + end for name in names for end in ends]
    return names if len(names) <= most else None


def _numbers(text: str) -> Iterator[str]:
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece.strip())
        if match is None:
            continue
        last = int(match[2] or match[1])
        for number in range(int(match[1]), min(last, int(match[1]) + MAX_HOSTS) + 1):
            yield f"{number:0{len(match[1])}d}"


def absent_by_host(job: Job) -> dict[str, tuple[int, ...]]:
    """The absent ranks by host; ``""`` for those whose host can't be determined.

    A rank that registered named its host. Launchers number ranks host by host, so the host of a block is that of a
    present sibling. A block without present ranks belongs to a host of the node list without ranks: with certainty if
    there is one such host, or if srun numbered its ranks in the order of the list."""
    if not job.absent:
        return {}
    size = _block_size(job)
    registered = [(seen.rank, seen.host) for seen in job.last_seen if seen.host]
    homes = [*registered, *((rank.number, rank.host.name) for rank in job.ranks)]
    seen = {number // size: name for number, name in homes} if size else {}
    blocks = {block: list(ranks) for block, ranks in groupby(job.absent, key=lambda rank: rank // size if size else -1)}
    silent = _silent_hosts(job, [block for block in blocks if block not in seen])
    found: dict[str, list[int]] = {}
    for block, ranks in blocks.items():
        for rank in ranks:
            name = dict(registered).get(rank) or seen.get(block) or silent.get(block, "")
            found.setdefault(name, []).append(rank)
    return {host: tuple(ranks) for host, ranks in found.items()}


def _block_size(job: Job) -> int | None:
    sizes = {launch.local_world_size for launch, _ in job.each(LaunchFacts)}
    size = sizes.pop() if len(sizes) == 1 else None
    if not size:
        return None
    homes: dict[int, int] = {}
    fits = all(homes.setdefault(rank.number // size, rank.host.index) == rank.host.index for rank in job.ranks)
    return size if fits else None


def _silent_hosts(job: Job, blocks: list[int]) -> dict[int, str]:
    names, in_order = _node_list(job)
    seen = {rank.host.name.partition(".")[0] for rank in job.ranks}
    left = [name for name in names if name.partition(".")[0] not in seen]
    if in_order and blocks and max(blocks) < len(names):
        placed = {block: names[block] for block in blocks}
        return placed if set(placed.values()) <= set(left) else {}
    if len(left) != len(blocks):
        return {}
    return dict.fromkeys(blocks, ", ".join(left))


def _node_list(job: Job) -> tuple[tuple[str, ...], bool]:
    for rank in job.ranks:
        launch, slurm = rank.find(LaunchFacts), rank.find(SlurmFacts)
        direct = direct_launch(launch) if launch else None
        for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
            if launch and name in launch.filled:
                block = (launch.get("SLURM_DISTRIBUTION") or "block").startswith("block")
                return expand_hosts(launch.get(name)), bool(direct and direct.program == "srun" and block)
        if slurm and slurm.node_list:
            return expand_hosts(slurm.node_list), False
    return (), False


def devices_asked(process: Rank | IdenticalRanks) -> int | None:
    """The number of devices per host that the Trainer is configured to use; ``None`` if it is unset or ``auto``."""
    trainer = process.find(TrainerFacts)
    return trainer.devices if trainer else None


def joined_ranks(group: EventGroup) -> dict[int, int]:
    """Ranks that logged that they wait for the others, with the number of messages.

    More than one if several processes claim one rank, or if the log has several runs."""
    times: dict[int, int] = {}
    for event in group.events:
        rank = parse_count(event.value("rank"))
        if rank is not None:
            times[rank] = times.get(rank, 0) + event.count
    return times
