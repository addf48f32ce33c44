"""A job with tensor, data and pipeline parallel groups, played until it stands still, and the dumps that it leaves.

Each rank has a host, which enqueues calls some way ahead, and a device, which does them one after the other and leaves
a call when all of its members have come to it. A fault is planted on one rank.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from doctor.core.facts import Collective, Frame, ProcessGroup, RecorderFacts

NOON = 1_760_000_000.0
KINDS = ("stops", "gone", "device", "skips", "other-size", "other-call")


class Call(NamedTuple):
    """A call in the program of a rank. ``peer``: the other rank of a send or receive, counted in the group."""

    group: str
    operation: str
    size: int
    line: int
    peer: int | None = None


class Fault(NamedTuple):
    """``kind``, one of ``KINDS`` or ``none``: ``stops`` (the host enqueues no more), ``gone`` (and leaves no dump),
    ``device`` (the device reports no more and the host stops a little later), ``skips`` (one call is left out),
    ``other-size``, ``other-call``."""

    kind: str
    rank: int
    at: int


class SimulatedJob:
    """Played when it is made; ``host`` and ``device`` say how far each rank came."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(f"{seed} {kind}")
        self.tensor, self.data, self.stages = (self.random.choice(sizes) for sizes in ((2, 4), (2, 4), (1, 2)))
        if kind in ("skips", "other-size", "other-call"):
            self.tensor = 4
        self.world = self.tensor * self.data * self.stages
        self.ahead = self.random.choice((1, 3, 40))
        self.groups = self._groups()
        self.programs = [self._program(rank) for rank in range(self.world)]
        rank = self.random.randrange(self.world)
        first, last = len(self.programs[rank]) // 3, 2 * len(self.programs[rank]) // 3
        self.fault = Fault(kind, rank, self.random.randrange(first, last))
        self._plant()
        self.host = [0] * self.world
        self.device = [0] * self.world
        self._numbers = [self._numbered(program) for program in self.programs]
        self._play()

    def _groups(self) -> dict[str, tuple[int, ...]]:
        groups = {"0": tuple(range(self.world))}
        for rank in range(self.world):
            for name in self._names(rank):
                groups[name] = tuple(other for other in range(self.world) if name in self._names(other))
        return groups

    def _names(self, rank: int) -> tuple[str, str, str]:
        place, replica, stage = self._place(rank)
        return f"t{replica}.{stage}", f"d{place}.{stage}", f"p{place}.{replica}"

    def _place(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tensor, rank // self.tensor % self.data, rank // self.tensor // self.data

    def _program(self, rank: int) -> list[Call]:
        tensor, data, pipe = self._names(rank)
        stage = self._place(rank)[2]
        calls: list[Call] = []
        for step in range(12):
            if self.stages > 1 and stage:
                calls.append(Call(pipe, "recv", 64, 10, 0))
            for layer in range(4):
                calls.append(Call(tensor, "all_gather_into_tensor", 128, 20 + layer))
                calls.append(Call(tensor, "reduce_scatter_tensor", 128, 30 + layer))
            if self.stages > 1 and not stage:
                calls.append(Call(pipe, "send", 64, 40, 1))
            calls.append(Call(data, "all_reduce", 256, 50))
            if step % 4 == 3:
                calls.append(Call("0", "all_reduce", 1, 60))
        return calls

    def _plant(self) -> None:
        program, (kind, rank, at) = self.programs[self.fault.rank], self.fault
        if kind in ("skips", "other-size", "other-call"):
            at = next(place for place in range(at, len(program)) if program[place].group == self._names(rank)[0])
            call = program[at]
            if kind == "skips":
                del program[at]
            elif kind == "other-size":
                program[at] = call._replace(size=call.size + 1, line=99)
            else:
                program[at] = call._replace(operation="all_reduce", line=99)

    def _numbered(self, program: list[Call]) -> list[int]:
        counts: dict[tuple[str, str], int] = {}
        numbers = []
        for call in program:
            key = (call.group, call.operation if call.peer is not None else "")
            counts[key] = counts.get(key, 0) + 1
            numbers.append(counts[key])
        return numbers

    def _play(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in self.random.sample(range(self.world), self.world):
                moved |= self._enqueue(rank)
            for rank in range(self.world):
                moved |= self._leave(rank)

    def _enqueue(self, rank: int) -> bool:
        end = min(len(self.programs[rank]), self.device[rank] + self.ahead)
        if self.fault.kind in ("stops", "gone") and rank == self.fault.rank:
            end = min(end, self.fault.at)
        if self.fault.kind == "device" and rank == self.fault.rank:
            end = min(end, self.fault.at + 5)
        moved = end > self.host[rank]
        self.host[rank] = max(end, self.host[rank])
        return moved

    def _head(self, rank: int) -> tuple[Call, int] | None:
        place = self.device[rank]
        return (self.programs[rank][place], self._numbers[rank][place]) if place < self.host[rank] else None

    def _leave(self, rank: int) -> bool:
        head = self._head(rank)
        if head is None:
            return False
        call, number = head
        members = self._members(rank, call)
        heads = [self._head(member) for member in members]
        if all(one is not None and self._fits(call, number, *one) for one in heads):
            for member in members:
                self.device[member] += 1
            return True
        return False

    def _members(self, rank: int, call: Call) -> tuple[int, ...]:
        group = self.groups[call.group]
        return tuple(sorted((rank, group[call.peer]))) if call.peer is not None else group

    def _fits(self, call: Call, number: int, other: Call, other_number: int) -> bool:
        if call.group != other.group or number != other_number:
            return False
        return call.peer is not None or (call.operation, call.size) == (other.operation, other.size)

    def dumps(self, *, only_open: bool = False, most: int = 1000) -> dict[int, RecorderFacts]:
        """What recorders hold: the ``most`` newest calls, or the open ones of these alone."""
        ranks = [rank for rank in range(self.world) if not (self.fault.kind == "gone" and rank == self.fault.rank)]
        return {rank: self._dump(rank, only_open, most) for rank in ranks}

    def _dump(self, rank: int, only_open: bool, most: int) -> RecorderFacts:
        is_dead = self.fault.kind == "device" and rank == self.fault.rank
        left = min(self.device[rank], self.fault.at) if is_dead else self.device[rank]
        entries = [self._entry(rank, place, place < left) for place in range(self.host[rank])]
        entered: dict[str, int] = {}
        ended: dict[str, int] = {}
        for entry in entries:
            entered[entry.group] = entry.sequence
            if entry.state == "completed":
                ended[entry.group] = entry.sequence
        groups = tuple(
            ProcessGroup(name, "", members, entered.get(name), None, ended.get(name))
            for name, members in self.groups.items()
            if rank in members
        )
        shown = [entry for entry in entries if not only_open or entry.state != "completed"]
        return RecorderFacts(version="2.9", groups=groups, collectives=tuple(shown[-most:]), wrapped=only_open)

    def _entry(self, rank: int, place: int, has_ended: bool) -> Collective:
        call, number = self.programs[rank][place], self._numbers[rank][place]
        own = self.groups[call.group].index(rank)
        source = None if call.peer is None else own if call.operation == "send" else call.peer
        return Collective(
            call.group,
            number,
            call.operation,
            "nccl",
            is_p2p=call.peer is not None,
            source=source,
            peer=call.peer,
            input_sizes=((call.size,),),
            output_sizes=((call.size,),),
            types=("Float",),
            state="completed" if has_ended else "scheduled",
            retired=has_ended,
            at=NOON + place,
            frames=(Frame("/home/me/train.py", call.line, "step", user=True),),
        )
