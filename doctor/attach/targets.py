"""The targets of ``doctor attach``: which processes of this host are ranks, of which job, and what belongs to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from doctor.attach.process_marks import ProcessMarks
from doctor.attach.processes import Process, ProcessTable, own_users
from doctor.attach.programs import multiprocessing_children, program_of, runs_python
from doctor.attach.rank_numbers import RankNumbers, claimed_numbers, common_world_size, number_ranks
from doctor.attach.rank_search import RAY, RankProcess, RankSearch
from doctor.collectors.host.kernel_view import plain
from doctor.core.facts.attached import AttachedProcess
from doctor.knowledge.launcher_index import BY_NAME, JOB_VARIABLES
from doctor.knowledge.launchers import LAUNCHERS
from doctor.knowledge.training_processes import DATA_WORKER, NIL_RAY_JOB

Role = Literal["rank", "worker", "agent", "other"]
MOST_TARGETS = 4096
"""Processes that one job may have on this host."""
_ORDER: dict[Role, int] = {"rank": 0, "worker": 1, "agent": 2, "other": 3}
_RUN_ID = "TORCHELASTIC_RUN_ID"
_RAY_JOB = "RAY_JOB_ID"
_STEP = "SLURM_STEP_ID"
_ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
_RUN_VARIABLES = tuple(name for row in LAUNCHERS for name in row.run_variables if name != "TORCHELASTIC_RESTART_COUNT")
_NO_ID = frozenset(("", "none", NIL_RAY_JOB))
"""Values that identify no job: torchrun's run id without ``--rdzv-id``, Ray's of a worker started in advance."""
INCOMPLETE = "Some processes were left out: this host has too many, or reading them took too long."
_LOOPBACK = ("localhost", "127.", "::1")
_T = TypeVar("_T")


class TargetRequest(NamedTuple):
    """What the user asked for: processes by PID with their descendants, or a job by its id, or all training processes
    of this user, with ``all_users`` of every user."""

    pids: tuple[int, ...] = ()
    job: str = ""
    all_users: bool = False


class Target(NamedTuple):
    """A process of a job: as ``/proc`` shows it, and its facts without samples."""

    process: Process
    facts: AttachedProcess


class TargetJob(NamedTuple):
    """The processes of one job on this host, ranks first and by rank.

    ``id``: the scheduler's, empty if it has none; ``ids``: all names by which it may be asked for. ``launcher``: name
    of a row of :mod:`doctor.knowledge.launchers`, empty if unknown. ``world_size``: that most ranks state, or their
    number on this host if none does. ``found_by``: what showed the ranks: ``variables``, ``parent``, ``connections``
    (of a process group), ``libraries`` (a process with torch), ``request`` (the user named it)."""

    id: str
    ids: frozenset[str]
    launcher: str
    program: str
    world_size: int | None
    user: int
    found_by: str
    targets: tuple[Target, ...]

    @property
    def ranks(self) -> tuple[Target, ...]:
        """The ranks of this host."""
        return tuple(target for target in self.targets if target.facts.role == "rank")


class TargetList(NamedTuple):
    """The jobs that were found; launched ones before lone processes, then in the order in which they were started.

    ``unreadable``: processes of these jobs whose environment or command line could not be read. ``missing``: PIDs that
    the user named and that do not exist. ``others``: processes of other users that state a rank. ``notes``: sentences
    for the user."""

    jobs: tuple[TargetJob, ...] = ()
    unreadable: int = 0
    missing: tuple[int, ...] = ()
    others: int = 0
    notes: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets of all jobs."""
        return tuple(target for job in self.jobs for target in job.targets)


def find_targets(table: ProcessTable, request: TargetRequest = TargetRequest()) -> TargetList:  # noqa: B008 - immutable
    """Return the processes to read, by job. Nothing is written, and no signal is sent.

    A job whose ranks could not be told from its other processes has the topmost Python processes as ranks, if the user
    named it or its PIDs.
    """
    users = None if request.all_users else own_users()
    asked = _with_descendants(table, request.pids)
    with ProcessMarks(table.proc) as marks:
        search = RankSearch(table, marks, users, asked)
        jobs = list(_Assembly(search, search.ranks().values()).jobs())
        if request.pids:
            jobs = [part for job in jobs if (part := _only(job, asked)) is not None]
        if request.job:
            jobs = [job for job in jobs if request.job in job.ids]
        if (request.pids or request.job) and not jobs:
            among = asked if request.pids else _of_job(table, request.job)
            jobs = list(_Assembly(search, search.forced_ranks(among)).jobs())
        others = sum(_is_rank_of_others(process, users) for process in table.processes.values()) if users else 0
    targets = [target.process for job in jobs for target in job.targets]
    return TargetList(
        tuple(sorted(jobs, key=_job_order)),
        sum(not process.is_zombie and not (process.environ and process.arguments) for process in targets),
        tuple(pid for pid in request.pids if table.get(pid) is None),
        others,
        () if table.complete and marks.complete else (INCOMPLETE,),
    )


def _with_descendants(table: ProcessTable, pids: Iterable[int]) -> frozenset[int]:
    return frozenset(
        pid for root in pids if table.get(root) for pid in (root, *(child.pid for child in table.descendants(root)))
    )


def _of_job(table: ProcessTable, job: str) -> frozenset[int]:
    return frozenset(process.pid for process in table.processes.values() if job in job_ids(process.environ or {}))


def _is_rank_of_others(process: Process, users: Collection[int]) -> bool:
    """Return whether a process of another user states a rank, and is no data worker."""
    if process.user in users or process.name == DATA_WORKER or not claimed_numbers(process.environ):
        return False
    return runs_python(process)


def _only(job: TargetJob, pids: Collection[int]) -> TargetJob | None:
    """Return the named part of a job; ``None`` if it has no rank: a named data worker is read as a rank itself."""
    part = job._replace(targets=tuple(target for target in job.targets if target.process.pid in pids))
    return part if part.ranks else None


def _job_order(job: TargetJob) -> tuple[bool, float]:
    started = min((target.process.started for target in job.targets), default=0.0)
    return job.found_by == "libraries", started


def job_ids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the job that the variables state, that of the scheduler first."""
    names = [name for name in JOB_VARIABLES if name != _STEP]
    found = [environ[name] for name in names if environ.get(name)]
    if environ.get(_STEP):
        found.extend(f"{job}.{environ[_STEP]}" for job in found[:1])
    if all(environ.get(name) for name in _ARRAY):
        found.append("_".join(environ[name] for name in _ARRAY))
    found.extend(environ.get(name, "") for name in (_RUN_ID, _RAY_JOB))
    return tuple(name for name in found if name not in _NO_ID)


class _Assembly:
    """Puts ranks together to jobs, with the processes that belong to them."""

    def __init__(self, search: RankSearch, ranks: Iterable[RankProcess]) -> None:
        self._search = search
        self._table = search.table
        self._ranks = {rank.process.pid: rank for rank in ranks}

    def jobs(self) -> Iterator[TargetJob]:
        """Return the jobs."""
        for group in self._groups():
            yield self._job(group)

    def _groups(self) -> Iterator[list[RankProcess]]:
        joined = _Groups(self._ranks)
        by_key: defaultdict[object, list[int]] = defaultdict(list)
        for pid, rank in self._ranks.items():
            for key in self._keys(rank):
                by_key[key].append(pid)
        for pids in by_key.values():
            joined.join(pids)
        for pair in self._linked():
            joined.join(pair)
        for pids in self._named(joined):
            joined.join(pids)
        for pids in joined.groups():
            yield [self._ranks[pid] for pid in pids]

    def _named(self, joined: _Groups) -> Iterator[list[int]]:
        """Return the ranks of one program that only the user's request shows to belong together, with the job that it
        was named with."""
        by_program: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for pid, rank in self._ranks.items():
            if pid in self._search.asked:
                by_program[rank.process.user, program_of(rank.process, self._table)].append(pid)
        for pids in by_program.values():
            shown = [pid for pid in pids if self._shows_its_job(self._ranks[pid])]
            groups = [group for group in joined.groups() if not set(shown).isdisjoint(group)]
            yield pids if len(groups) < 2 else [pid for pid in pids if pid not in shown]

    @staticmethod
    def _shows_its_job(rank: RankProcess) -> bool:
        """Return whether a process that the user named shows which job it belongs to. Its threads and libraries do not
        if its variables cannot be read, because its connections cannot be read then either."""
        return rank.found_by in ("variables", "parent") or (bool(rank.process.environ) and rank.found_by != "request")

    def _linked(self) -> Iterator[tuple[int, int]]:
        """Return the pairs of ranks without claims that run one program and are connected with each other."""
        by_program: defaultdict[str, list[Process]] = defaultdict(list)
        for rank in self._ranks.values():
            if not rank.claims:
                by_program[program_of(rank.process, self._table)].append(rank.process)
        for processes in by_program.values():
            for pair in self._search.marks.links(processes) if len(processes) > 1 else ():
                for pid in pair:
                    if self._ranks[pid].found_by == "libraries":
                        self._ranks[pid] = self._ranks[pid]._replace(found_by="connections")
                yield pair

    def _keys(self, rank: RankProcess) -> Iterator[object]:
        """Return what the ranks of one job have in common, and no two jobs."""
        process = rank.process
        environ = process.environ or {}
        variables = tuple(environ.get(name, "") for name in (*JOB_VARIABLES, *_RUN_VARIABLES, _RAY_JOB))
        address = environ.get("MASTER_ADDR", "")
        network = process.network if not address or address.startswith(_LOOPBACK) else ""
        endpoint = (address, environ.get("MASTER_PORT", ""), network)
        if rank.claims and (endpoint[1] or not _NO_ID.issuperset(variables)):
            yield process.user, variables, endpoint
        elif rank.claims and (starter := self._search.starter(process)) is not None:
            yield process.user, starter.pid
        if rank.agent is None:
            return
        if self._search.agent_name(rank.agent.pid) != RAY:
            yield process.user, rank.agent.pid
        else:
            yield process.user, rank.agent.pid, environ.get(_RAY_JOB, ""), program_of(process, self._table)

    def _job(self, ranks: Sequence[RankProcess]) -> TargetJob:
        numbers = number_ranks(
            [(rank.process, rank.claims) for rank in ranks],
            first=self._store(ranks),
            node=_first(rank.node for rank in ranks),
            nodes=_first(rank.nodes for rank in ranks),
        )
        ids = [job_ids(rank.process.environ or {}) for rank in ranks]
        some = min(ranks, key=lambda rank: numbers[rank.process.pid].rank or 0)
        launcher = self._parent_launcher(some) or _first(number.launcher or None for number in numbers.values())
        job = TargetJob(
            id=plain(_first(names[0] for names in ids if names) or ""),
            ids=frozenset(name for names in ids for name in names),
            launcher=launcher or self._launcher(some),
            program=program_of(some.process, self._table),
            world_size=common_world_size(numbers.values()),
            user=some.process.user,
            found_by=min((rank.found_by for rank in ranks), key=_FOUND_BY.index),
            targets=(),
        )
        described = [
            _target(process, role, job, numbers.get(process.pid), parent, program_of(process, self._table))
            for process, role, parent in self._members(ranks)
        ]
        described.sort(key=lambda target: _target_order(target.facts))
        return job._replace(targets=tuple(described[:MOST_TARGETS]))

    def _store(self, ranks: Sequence[RankProcess]) -> int | None:
        """Return the PID of the rank that serves the store of the others, which is rank 0."""
        marks = self._search.marks
        if len(ranks) < 2 or all(rank.claims for rank in ranks):
            return None
        serving = [rank.process.pid for rank in ranks if marks.serves_store(rank.process)]
        if not serving:
            processes = [rank.process for rank in ranks]
            serving = [
                one.pid for one in processes if marks.listens_for(one, [two for two in processes if two is not one])
            ]
        return serving[0] if len(serving) == 1 else None

    def _parent_launcher(self, rank: RankProcess) -> str:
        """Return the launcher that is a Python program and started a rank; empty if there is none.

        Several programs run torch's elastic agent (accelerate/commands/launch.py), which sets the variables of
        torchrun, and DeepSpeed's launcher sets only the plain ones."""
        return self._launcher(rank) if rank.agent is not None and runs_python(rank.agent) else ""

    def _launcher(self, rank: RankProcess) -> str:
        if rank.agent is None:
            return ""
        name = self._search.agent_name(rank.agent.pid)
        return name if name in BY_NAME else ""

    def _members(self, ranks: Sequence[RankProcess]) -> Iterator[tuple[Process, Role, int | None]]:
        """Return the processes of a job with their role, and the rank that a child belongs to."""
        agents: dict[int, Process] = {}
        for rank in ranks:
            yield rank.process, "rank", None
            yield from self._below(rank.process)
            above = [one for one in (rank.agent, self._search.starter(rank.process)) if one is not None]
            above += [
                one
                for one in self._table.ancestors(rank.process)
                if self._search.agent_name(one.pid) or one.pid in self._search.starters
            ]
            agents |= {one.pid: one for one in above if one.pid not in self._ranks and self._search.is_allowed(one)}
        for agent in agents.values():
            yield agent, "agent", None

    def _below(self, rank: Process) -> Iterator[tuple[Process, Role, int | None]]:
        started = {child.pid for child in multiprocessing_children(rank, self._table)}
        inner: set[int] = set()
        for child in self._table.descendants(rank.pid):
            if child.pid in self._ranks or child.parent in inner:
                inner.add(child.pid)
            elif self._search.is_allowed(child):
                is_worker = child.pid in started or child.name == DATA_WORKER
                yield child, "worker" if is_worker else "other", rank.pid


_FOUND_BY = ("variables", "parent", "connections", "libraries", "request")


class _Groups:
    """Disjoint sets of PIDs."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._heads = {pid: pid for pid in pids}

    def join(self, pids: Iterable[int]) -> None:
        """Put the sets of these together."""
        heads = {self._head(pid) for pid in pids}
        for head in heads:
            self._heads[head] = min(heads)

    def groups(self) -> Iterable[list[int]]:
        """Return the sets."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for pid in self._heads:
            found[self._head(pid)].append(pid)
        return found.values()

    def _head(self, pid: int) -> int:
        while self._heads[pid] != pid:
            pid = self._heads[pid]
        return pid


def _target(
    process: Process, role: Role, job: TargetJob, numbers: RankNumbers | None, parent: int | None, program: str
) -> Target:
    numbers = numbers or RankNumbers()
    facts = AttachedProcess(
        pid=process.pid,
        started=process.started,
        role=role,
        parent=parent,
        rank=numbers.rank,
        rank_from=numbers.rank_from,
        guessed=numbers.guessed,
        local_rank=numbers.local_rank,
        world_size=numbers.world_size,
        local_world_size=numbers.local_world_size,
        node=numbers.node,
        job=job.id,
        launcher=job.launcher,
        program=program,
        user=process.user,
        ended="zombie" if process.is_zombie else "",
    )
    return Target(process, facts)


def _target_order(facts: AttachedProcess) -> tuple[int, int, int]:
    return _ORDER[facts.role], facts.rank if facts.rank is not None else 1 << 31, facts.pid


def _first(values: Iterable[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)
