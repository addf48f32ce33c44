"""Finds the ranks among the processes of a host: of the Python processes that a launch leaves, those that train.

Launch variables are inherited: the shell around a rank, its data workers, its helpers, and an agent inside a task of
srun have them too. So of all processes that have the same claim one is the rank, and a process that starts ranks of
another launcher is its agent. Where variables do not tell, the parent, the threads of torch and the connections do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from doctor.attach.process_marks import ProcessMarks
from doctor.attach.processes import Process, ProcessTable, start_order
from doctor.attach.programs import (
    agent_of,
    is_doctor,
    is_helper,
    is_interactive_shell,
    is_spawned,
    multiprocessing_children,
    python_command,
    runs_python,
)
from doctor.attach.rank_numbers import BY_CHILDREN, RankNumbers, claimed_numbers, node_of
from doctor.knowledge.launcher_index import BY_NAME, STEP
from doctor.knowledge.training_processes import DATA_WORKER, RAY_TITLE, RAY_TRAINERS

RAY = "ray"


class RankProcess(NamedTuple):
    """A rank. ``claims``: its numbers by its variables, most preferred first; ``agent``: the process that started it
    and others, ``None`` if unknown; ``found_by``: what showed that it is a rank (``variables``, ``parent``,
    ``connections``, ``libraries``, ``request``). ``node``: number of its host, and ``nodes``: their count, if the
    process that started it knows them."""

    process: Process
    claims: tuple[RankNumbers, ...]
    agent: Process | None
    found_by: str
    node: int | None = None
    nodes: int | None = None


class RankSearch:
    """A search among the processes of ``users`` and the processes ``asked`` for."""

    def __init__(
        self, table: ProcessTable, marks: ProcessMarks, users: Collection[int] | None, asked: Collection[int] = ()
    ) -> None:
        self.table = table
        self.marks = marks
        self.asked = asked
        self._users = users
        self._excluded = frozenset(self._own_processes())
        self.agent_name: Callable[[int], str] = cache(self._agent_name)
        self.claims: Callable[[int], tuple[RankNumbers, ...]] = cache(
            lambda pid: claimed_numbers(table.processes[pid].environ)
        )
        self.trainers = sorted(filter(self._may_train, table.processes.values()), key=start_order)
        self._trainer_pids = frozenset(process.pid for process in self.trainers)
        self._ranks: dict[int, RankProcess] = {}
        self.starters: set[int] = set()

    def ranks(self) -> dict[int, RankProcess]:
        """Return the ranks by PID."""
        self._add_claimed()
        self._add_script_mains()
        self._remove_agents()
        self._add_spawned()
        self._add_ray_workers()
        self._add_unreadable()
        self._add_ended()
        self._add_unclaimed()
        self._add_named()
        return self._ranks

    def is_allowed(self, process: Process) -> bool:
        """Return whether the process is one that may be a target."""
        if process.pid in self._excluded:
            return False
        return self._users is None or process.user in self._users or process.pid in self.asked

    def forced_ranks(self, among: Collection[int]) -> Iterator[RankProcess]:
        """Return the topmost Python processes ``among`` these as ranks, because the user asked for them."""
        chosen: set[int] = set()
        for process in self.trainers:
            above = {parent.pid for parent in self.table.ancestors(process)}
            if process.pid in among and above.isdisjoint(chosen):
                chosen.add(process.pid)
                yield RankProcess(process, self.claims(process.pid), self.nearest_agent(process), "request")

    def nearest_agent(self, process: Process) -> Process | None:
        """Return the nearest parent that is an agent of a launcher."""
        return next((parent for parent in self.table.ancestors(process) if self.agent_name(parent.pid)), None)

    def starter(self, process: Process) -> Process | None:
        """Return the Python program that started a rank, if no launcher did."""
        parent = self.table.get(process.parent)
        is_program = parent is not None and parent.pid in self._trainer_pids and parent.pid not in self._ranks
        return parent if is_program else None

    def _own_processes(self) -> Iterator[int]:
        own = [process.pid for process in self.table.processes.values() if is_doctor(process)]
        for pid in (*own, *([self.table.own] if self.table.own is not None else [])):
            yield pid
            yield from (process.pid for process in self.table.descendants(pid))

    def _may_train(self, process: Process) -> bool:
        if not self.is_allowed(process) or process.is_zombie or process.arguments == ("",):
            return False
        if process.name == DATA_WORKER or not self.is_python(process):
            return False
        return not self.agent_name(process.pid) and not is_helper(process)

    def is_python(self, process: Process) -> bool:
        """Return whether an interpreter runs in the process; another program may embed one."""
        if runs_python(process):
            return True
        return bool(self.claims(process.pid)) and self.marks.has_interpreter(process)

    def _agent_name(self, pid: int) -> str:
        process = self.table.processes[pid]
        return agent_of(process, is_python=runs_python(process))

    # Ranks by their variables.

    def _add_claimed(self) -> None:
        # A spawned process has inherited its variables, and may have outlived the rank that it worked for.
        launched = [process for process in self.trainers if not is_spawned(process)]
        claimed = [process for process in launched if self.claims(process.pid) and self._is_credible(process)]
        identities = {process.pid: _identity(self.claims(process.pid)[0]) for process in claimed}
        inherited: defaultdict[int, list[Process]] = defaultdict(list)
        for process in claimed:
            same = [
                parent.pid
                for parent in self.table.ancestors(process)
                if identities.get(parent.pid) == identities[process.pid]
            ]
            inherited[same[-1] if same else process.pid].append(process)
        for processes in inherited.values():
            rank = self._training_one(processes)
            agent = self.nearest_agent(rank)
            self._ranks[rank.pid] = RankProcess(rank, self.claims(rank.pid), agent, "variables")

    def _is_credible(self, process: Process) -> bool:
        """Return whether the variables describe this process, and were not left in the shell that started it."""
        claim = self.claims(process.pid)[0]
        for parent in self.table.ancestors(process):
            if self.agent_name(parent.pid):
                break
            if is_interactive_shell(parent):
                return claim.launcher != STEP.name and self.marks.has_torch(process)
        if claim.world_size is not None and claim.world_size > 1:
            return True
        agent = self.nearest_agent(process)
        by_agent = agent is not None and self.agent_name(agent.pid) not in (STEP.name, RAY)
        return by_agent or self.marks.has_torch(process)

    def _training_one(self, processes: Sequence[Process]) -> Process:
        """Return the process that trains of those that have the same claim, parents first."""
        own = [process for process in processes if not self._is_mp_child(process)]
        for mark in (self.marks.is_member, self.marks.has_torch):
            found = next((process for process in own if len(own) > 1 and mark(process)), None)
            if found is not None:
                return found
        return (own or processes)[0]

    def _is_mp_child(self, process: Process) -> bool:
        parent = self.table.get(process.parent)
        if parent is None:
            return False
        return is_spawned(process) or any(
            child.pid == process.pid for child in multiprocessing_children(parent, self.table)
        )

    def _add_script_mains(self) -> None:
        """Add the processes of training scripts that started the other ranks, as Lightning's strategy ``ddp`` does."""
        started: defaultdict[int, list[RankProcess]] = defaultdict(list)
        for rank in self._ranks.values():
            row = BY_NAME.get(rank.claims[0].launcher)
            if row is not None and row.is_script:
                started[rank.process.parent].append(rank)
        for process in self.trainers:
            others = started.get(process.pid, [])
            if others and all(rank.claims[0].local_rank != 0 for rank in others):
                main = _numbers_of_main([rank.claims[0] for rank in others])
                self._ranks[process.pid] = RankProcess(process, (main,), process, "parent")
                for rank in others:
                    claims = (_beside_main(rank.claims[0], main), *rank.claims[1:])
                    self._ranks[rank.process.pid] = rank._replace(agent=process, claims=claims)

    def _remove_agents(self) -> None:
        """Remove what starts ranks of another launcher: an agent in a task of srun has a rank of its own."""
        for rank in list(self._ranks.values()):
            for parent in self.table.ancestors(rank.process):
                outer = self._ranks.get(parent.pid)
                if outer is not None and outer.agent is not outer.process and not self.marks.is_member(parent):
                    del self._ranks[parent.pid]
                    self.starters.add(parent.pid)

    # Ranks without variables of their own.

    def _add_spawned(self) -> None:
        """Add the processes that a script started by multiprocessing to train: their variables are set in Python."""
        for process in self.trainers:
            if self._is_below_rank(process):
                continue
            children = [
                child
                for child in multiprocessing_children(process, self.table)
                if child.name != DATA_WORKER and not child.is_zombie and not is_helper(child)
            ]
            main = self._ranks.get(process.pid)
            if children and (main is None or main.agent is not process) and self._are_ranks(process, children):
                outer = self._ranks.pop(process.pid, None)
                numbers = outer.claims[0] if outer and outer.claims else RankNumbers()
                is_host = (numbers.world_size or 1) > 1
                node = numbers.rank if is_host else node_of(process.environ)
                nodes = numbers.world_size if is_host else None
                self.starters.add(process.pid)
                for child in children:
                    self._ranks[child.pid] = RankProcess(child, (), process, "parent", node, nodes)

    def _are_ranks(self, parent: Process, children: Sequence[Process]) -> bool:
        """Return whether the children of multiprocessing train, rather than load data for their parent."""
        if self.marks.is_member(parent):
            return False
        if any(map(self.marks.is_member, children)) or self.marks.links((parent, *children)):
            return True
        claims = self.claims(parent.pid) if parent.pid in self._ranks else ()
        if claims and (claims[0].world_size or 1) > 1:
            return False
        return all(map(is_spawned, children)) and any(map(self.marks.has_torch, children))

    def _add_ray_workers(self) -> None:
        for process in self.trainers:
            title = python_command(process.arguments).word
            agent = self.nearest_agent(process)
            if process.pid in self._ranks or agent is None or self.agent_name(agent.pid) != RAY:
                continue
            if not title.startswith(RAY_TITLE) or self._is_below_rank(process):
                continue
            if any(name in title for name in RAY_TRAINERS) or self.marks.is_member(process):
                self._ranks[process.pid] = RankProcess(process, (), agent, "parent")

    def _add_unreadable(self) -> None:
        """Add the processes that an agent started and whose environment may not be read, or was overwritten by a title
        (setproctitle)."""
        for process in self.trainers:
            agent = self.nearest_agent(process)
            if process.environ or agent is None or self.agent_name(agent.pid) == RAY:
                continue
            if not self._is_below_rank(process) and not self._is_above_rank(process) and not self._is_mp_child(process):
                self._ranks.setdefault(process.pid, RankProcess(process, (), agent, "parent"))

    def _add_named(self) -> None:
        """Add the processes that the user named, if no other rank covers them and their environment cannot be read."""
        for process in self.trainers:
            if process.pid in self.asked and not process.environ and process.pid not in self.starters:
                if not self._is_below_rank(process) and not self._is_above_rank(process):
                    self._ranks.setdefault(process.pid, RankProcess(process, (), None, "request"))

    def _add_ended(self) -> None:
        """Add the zombies that the parent of other ranks has not waited for: they were ranks."""
        for rank in list(self._ranks.values()):
            for child in self.table.children(rank.agent.pid) if rank.agent is not None else ():
                if child.is_zombie and child.name == rank.process.name and self.is_allowed(child):
                    self._ranks.setdefault(
                        child.pid, RankProcess(child, (), rank.agent, "parent", rank.node, rank.nodes)
                    )

    def _add_unclaimed(self) -> None:
        """Add processes that torch shows to be training, whoever started them."""
        for process in self.trainers:
            if process.pid in self._ranks or process.pid in self.starters:
                continue
            if self._is_below_rank(process) or self._is_above_rank(process):
                continue
            title = python_command(process.arguments).word
            if title.startswith(RAY_TITLE):
                continue
            if self.marks.is_member(process):
                self._ranks[process.pid] = RankProcess(process, (), None, "connections")
            elif self.marks.has_torch(process) and not is_spawned(process):
                self._ranks[process.pid] = RankProcess(process, (), None, "libraries")

    def _is_below_rank(self, process: Process) -> bool:
        return any(parent.pid in self._ranks for parent in self.table.ancestors(process))

    def _is_above_rank(self, process: Process) -> bool:
        return any(child.pid in self._ranks for child in self.table.descendants(process.pid))


def _identity(numbers: RankNumbers) -> tuple[object, ...]:
    return numbers.launcher, numbers.rank, numbers.local_rank, numbers.world_size


def _numbers_of_main(others: Sequence[RankNumbers]) -> RankNumbers:
    """Return the numbers of the process that started these: local rank 0 of its host."""
    some, count = others[0], len(others) + 1
    return RankNumbers(
        some.launcher,
        (some.node or 0) * count,
        BY_CHILDREN,
        local_rank=0,
        world_size=some.world_size,
        local_world_size=some.local_world_size or count,
        node=some.node,
    )


def _beside_main(numbers: RankNumbers, main: RankNumbers) -> RankNumbers:
    """Return the numbers of a process that knows its local rank alone; every host has as many ranks."""
    numbers = msgspec.structs.replace(numbers, local_world_size=main.local_world_size)
    if numbers.rank is not None or numbers.local_rank is None or main.rank is None:
        return numbers
    return msgspec.structs.replace(numbers, rank=main.rank + numbers.local_rank)
