"""One process group as seen by one of its ranks: set up, used along each axis of the mesh, destroyed.

It has a store of its own, and is run inside the child that has torch. MASTER_ADDR is not read: the groups of the job
and its port are not affected.

Before each step all ranks gather at the store, which identifies a missing one: a collective that hangs does not.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from doctor.core.decoding import prepared
from doctor.core.facts import CollectiveResult, CollectiveTiming
from doctor.core.text import ranks_in_words
from doctor.probes.collectives.backend_errors import LOST, error_text
from doctor.probes.collectives.collective_timing import AxisTimer
from doctor.probes.collectives.group_steps import (
    WORLD,
    AxisMembership,
    ExchangeMessages,
    GroupStep,
    GroupStepResult,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    TimeCollectives,
    VerifyCollectives,
)
from doctor.probes.collectives.known_values import GroupMembers, known_values
from doctor.probes.collectives.pair_exchange import PairExchange
from doctor.probes.runtime.torch_child import WorkRefused

DIAL_SECONDS = 2.0
"""For one address of the host of the store."""
BREAKS = (RuntimeError, ValueError, AssertionError)
"""Errors of torch if a group or a collective fails; those of NCCL and of stores are RuntimeErrors."""


class ProcessGroupSession:
    """The group that this process is in."""

    def __init__(self, order: JoinGroup) -> None:
        self._order = order
        self._numbers = order.numbers
        self._shares = {WORLD: AxisMembership(WORLD, self._numbers, 0), **{share.axis: share for share in order.shares}}
        self._groups: dict[str, GroupMembers] = {}
        self._timers: dict[str, AxisTimer] = {}

    def set_up(self) -> GroupStepResult:
        """Wait for the other ranks, and create the default group."""
        self._device = _device(self._order)
        self._store = _store_at(self._order)
        device = str(self._device)
        if awaited := self._meet("set-up", self._order.seconds):
            return GroupStepResult(error=_absence(awaited), awaited=awaited, device=device)
        try:
            self._make()
        except BREAKS as error:
            return GroupStepResult(error=error_text(error), awaited=self._lost(error, self._numbers), device=device)
        return GroupStepResult(device=device)

    def _make(self) -> None:
        dist.init_process_group(
            self._order.backend,
            store=dist.PrefixStore("group", self._store),  # type: ignore[attr-defined]
            rank=self._order.place,
            world_size=self._order.count,
            timeout=timedelta(seconds=self._order.patience),
        )
        self._groups[WORLD] = GroupMembers(WORLD, self._numbers, self._order.place, None, self._order.backend)
        # NCCL connects a group with its first collective.
        dist.all_reduce(torch.zeros(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def verify(self, step: VerifyCollectives) -> GroupStepResult:
        """Run collectives of known values along an axis."""
        results: list[CollectiveResult] = []

        def run(members: GroupMembers) -> Iterator[str]:
            for operation, result in known_values(members, self._device):
                results.extend([result] if result else [])
                yield operation

        done = self._run(f"values/{step.axis}", step, run)
        return msgspec.structs.replace(done, results=tuple(results))

    def time(self, step: TimeCollectives) -> GroupStepResult:
        """Time collectives along an axis."""
        timings: list[CollectiveTiming] = []

        def run(members: GroupMembers) -> Iterator[str]:
            yield "all_reduce"
            timer = self._timers.setdefault(step.axis, AxisTimer(members, self._device, self._shares[step.axis].bytes))
            timings.extend(timer.timings())

        done = self._run(f"pace/{step.axis}/{step.turn}", step, run)
        return msgspec.structs.replace(done, timings=(*timings, *done.timings))

    def exchange(self, step: ExchangeMessages) -> GroupStepResult:
        """Exchange messages between pairs of ranks.

        A failure is not that of a collective: a job may never send such messages.
        """
        order = self._order
        pairs = PairExchange(order.place, self._numbers, self._device)
        try:
            if awaited := self._meet("meet", order.patience, "over" if step.over else ""):
                return GroupStepResult(error=_absence(awaited), awaited=awaited)
            if self._store.get("meet/0"):
                return GroupStepResult(over=True)
            reason = pairs.run(order.partners)
        except BREAKS as error:
            return GroupStepResult(exchanges=tuple(pairs.found), error=error_text(error))
        return GroupStepResult(exchanges=tuple(pairs.found), reason=reason)

    def _run(
        self, name: str, step: VerifyCollectives | TimeCollectives, run: Callable[[GroupMembers], Iterator[str]]
    ) -> GroupStepResult:
        """Return the result of a step, with the collective that failed, if any.

        ``run`` yields the name of each before it runs.
        """
        share, operation = self._shares[step.axis], "new_group"
        try:
            if awaited := self._meet(name, self._order.patience, "over" if step.over else ""):
                return self._broken(operation, share, _absence(awaited), awaited)
            if self._store.get(f"{name}/0"):
                return GroupStepResult(over=True)
            for operation in run(self._group(share)):  # noqa: B007 - reported if it fails
                pass
        except BREAKS as error:
            return self._broken(operation, share, error_text(error), self._lost(error, share.members))
        return GroupStepResult()

    def _broken(self, operation: str, share: AxisMembership, error: str, awaited: tuple[int, ...]) -> GroupStepResult:
        backend = self._order.backend
        broken = CollectiveTiming(operation, backend, 0, None, share.axis, share.members, 1, error, awaited)
        return GroupStepResult(timings=(broken,), error=error)

    def _group(self, share: AxisMembership) -> GroupMembers:
        """Create each group on its members only, axis by axis: no rank waits for a group of others."""
        if share.axis not in self._groups:
            places = [self._numbers.index(rank) for rank in share.members]
            patience = timedelta(seconds=self._order.patience)
            handle = dist.new_group(places, patience, use_local_synchronization=True)
            place = places.index(self._order.place)
            self._groups[share.axis] = GroupMembers(share.axis, share.members, place, handle, self._order.backend)
        return self._groups[share.axis]

    def _meet(self, step: str, seconds: float, word: str = "") -> tuple[int, ...]:
        """Announce a step with a ``word``, wait until all ranks have, and return the missing ones.

        The store ends with the process of the first rank.
        """
        keys = [f"{step}/{place}" for place in range(self._order.count)]
        try:
            self._store.set(keys[self._order.place], word)
            try:
                self._store.wait(keys, timedelta(seconds=seconds))
            except RuntimeError:
                there = {key for key in keys if self._store.check([key])}
                return tuple(rank for key, rank in zip(keys, self._numbers, strict=True) if key not in there)
        except RuntimeError:
            return self._numbers[:1]
        return ()

    def _lost(self, error: Exception, members: Sequence[int]) -> tuple[int, ...]:
        """Return the others of a group if one of them must be at fault."""
        own = self._numbers[self._order.place]
        return tuple(rank for rank in members if rank != own) if LOST.search(str(error)) else ()

    def leave(self, step: LeaveGroup, *, is_host: bool) -> None:
        """Destroy the group; the host of the store leaves last."""
        if not step.broken:
            dist.destroy_process_group()
        if is_host:
            self._meet("leave", step.seconds)
        else:
            self._store.set(f"leave/{self._order.place}", "")


def _absence(awaited: tuple[int, ...]) -> str:
    return f"{ranks_in_words(awaited)} did not join"


def _device(order: JoinGroup) -> torch.device:
    """Return the device of this rank and make it the current one of the process."""
    if order.device != "cuda":
        return torch.device(order.device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if count == 1 else order.local_rank
    if index is None or index >= count:
        raise WorkRefused(f"local rank {order.local_rank} has no CUDA device: torch sees {count} here")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _store_at(order: JoinGroup) -> Store:
    """Return a client of the store, at the first of its addresses that answers."""
    errors = []
    for address in order.addresses:
        try:
            socket.create_connection((address, order.port), DIAL_SECONDS).close()
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        patience = timedelta(seconds=order.patience)
        store: Store = TCPStore(address, order.port, is_master=False, timeout=patience, wait_for_workers=False)
        return store
    raise WorkRefused(f"the store of the group is unreachable at port {order.port} ({'; '.join(errors)})")


class _State:
    hosted: Store | None = None
    session: ProcessGroupSession | None = None


def work(argument: bytes) -> GroupStepResult:
    """Run the step in ``argument`` (:data:`doctor.probes.collectives.group_steps.GroupStep`).

    A collective that fails is reported in ``GroupStepResult.error``.

    Raises:
        WorkRefused: there is no group to run it in, or no store can be created.
    """
    step = msgspec.json.decode(argument, type=prepared(GroupStep))
    if isinstance(step, OpenStore):
        # The client half of the host goes over loopback; the server listens on every address, at a port that is free.
        patience = timedelta(seconds=step.seconds)
        _State.hosted = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)
        return GroupStepResult(port=_State.hosted.port)
    if isinstance(step, JoinGroup):
        _State.session = ProcessGroupSession(step)
        return _State.session.set_up()
    if _State.session is None:
        raise WorkRefused("there is no group")
    if isinstance(step, LeaveGroup):
        _State.session.leave(step, is_host=_State.hosted is not None)
        _State.session = _State.hosted = None
        return GroupStepResult()
    if isinstance(step, ExchangeMessages):
        return _State.session.exchange(step)
    return _State.session.verify(step) if isinstance(step, VerifyCollectives) else _State.session.time(step)
