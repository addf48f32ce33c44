"""Where every rank of a run stands: its record, the collectives that it has entered, and those that it waits in."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from doctor.analysis.call_sites import CallSite, is_in_backward, site_of, site_of_wait
from doctor.core.facts import Collective, LoaderFacts, ProgressFacts, RecorderFacts, TrainingFacts
from doctor.core.frames import waits_in
from doctor.core.job import Job

LEAST_WAIT = 3.0
"""Seconds in one place from which a rank in a collective counts as waiting though it is not past its own limit: in a
run that goes well it is in one half of the time."""
DEFAULT_GROUPS = frozenset({"", "0", "default_pg"})
"""What torch calls the group of all ranks."""

WITH_ALL = frozenset(
    {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_to_all",
        "reduce_scatter_tensor",
        "reduce_scatter",
        "barrier",
    }
)
"""Operations that no rank can finish before all have given their part."""
_ON_HOST = frozenset({"", "gloo", "mpi", "ucc"})
"""Back ends whose calls run on the host, one after the other."""

_STAGES = {
    "setup": "set-up",
    "sanity": "the sanity check",
    "train": "training",
    "validate": "validation",
    "predict": "prediction",
    "teardown": "tear-down",
}


def is_of_device(entry: Collective) -> bool:
    """Whether a device runs a call on its own, so that its host may go on."""
    return entry.backend not in _ON_HOST


@dataclass(frozen=True)
class RankState:
    """One rank. A section that is missing is ``None``. ``ended_waiting``: it ended in an error that says that a
    collective ran out of time (``timeout``) or lost a peer (``peer``): its newest one is the one that it waited in."""

    rank: int
    progress: ProgressFacts | None
    recorder: RecorderFacts | None
    ended_waiting: str = ""

    @property
    def state(self) -> str:
        """As in :class:`doctor.core.facts.ProgressFacts`; empty where nothing is known of its progress."""
        return self.progress.state if self.progress else ""

    @property
    def is_stuck(self) -> bool:
        """Whether it makes no progress, by its own limit, by what others saw, or by the open call in a dump."""
        if self.state in ("stalled", "stopped", "silent") or self.ended_waiting == "timeout":
            return True
        return self.is_left_behind and self.wait is not None

    @property
    def is_left_behind(self) -> bool:
        """Whether what is known of it is a dump, and logs perhaps, and nobody watched it."""
        is_watched = self.progress is not None and (bool(self.progress.run) or self.progress.idle is not None)
        return self.recorder is not None and not is_watched

    @functools.cached_property
    def pending(self) -> Mapping[str, Collective]:
        """The oldest collective of each group that it has entered and not left."""
        found: dict[str, Collective] = {}
        for entry in self.recorder.collectives if self.recorder else ():
            if not entry.is_p2p and entry.group not in found and self._is_open(entry):
                found[entry.group] = entry
        return found

    @functools.cached_property
    def transfers(self) -> tuple[Collective, ...]:
        """Sends and receives that have not come to an end."""
        entries = self.recorder.collectives if self.recorder else ()
        return tuple(entry for entry in entries if entry.is_p2p and self._is_open(entry))

    def _is_open(self, entry: Collective) -> bool:
        if entry.state == "completed":
            return False
        if self.ended_waiting and self.recorder and entry is self.recorder.collectives[-1]:
            return True
        return not entry.retired or entry.backend in self._tells_completion

    @functools.cached_property
    def _tells_completion(self) -> frozenset[str]:
        """Back ends that tell when a call was completed: what they retire without that ran out of time. Gloo retires
        every call and completes none, and its counters say after a time-out that it did."""
        entries = self.recorder.collectives if self.recorder else ()
        told = {entry.backend for entry in entries if entry.state == "completed"}
        unfinished = {entry.backend for entry in entries if self._is_beyond_counter(entry)}
        return frozenset((told | unfinished) - _ON_HOST)

    def _is_beyond_counter(self, entry: Collective) -> bool:
        group = self.recorder.group(entry.group) if self.recorder and entry.retired and not entry.is_p2p else None
        return group is not None and group.enqueued is not None and (group.completed or 0) < entry.sequence

    @functools.cached_property
    def _entered(self) -> Mapping[str, int]:
        entries = self.recorder.collectives if self.recorder else ()
        entered: dict[str, int] = {}
        for entry in entries:
            if not entry.is_p2p:
                entered[entry.group] = max(entered.get(entry.group, 0), entry.sequence)
        # Where a group has sends and receives, NCCL counts these in the same counter.
        mixed = {entry.group for entry in entries if entry.is_p2p}
        for group in self.recorder.groups if self.recorder else ():
            if group.enqueued is not None and group.name not in mixed:
                entered[group.name] = max(entered.get(group.name, 0), group.enqueued)
        return entered

    def entered(self, group: str) -> int:
        """The sequence of the newest collective of a group that it has entered; 0 for none."""
        return self._entered.get(group, 0)

    def has_left(self, group: str, sequence: int) -> bool:
        """Whether it has entered a collective and come out of it."""
        if self.entered(group) < sequence:
            return False
        oldest = self.pending.get(group)
        return oldest is None or oldest.sequence > sequence

    @functools.cached_property
    def wait(self) -> Collective | None:
        """The collective that it waits in: of several groups' the oldest."""
        open_ones = [*self.pending.values(), *self.transfers]
        return min(open_ones, key=lambda entry: entry.at or 0.0, default=None)

    @property
    def stack_wait(self) -> str:
        """The operation that its stack says it waits in; empty where it says nothing of the kind."""
        return waits_in(self.progress.stack) if self.progress else ""

    @property
    def _stands(self) -> bool:
        idle = self.progress.idle if self.progress else None
        return self.is_stuck or bool(self.ended_waiting) or idle is None or idle >= LEAST_WAIT

    @property
    def may_wait_in_backward(self) -> bool:
        """Whether it is in the backward pass, where it computes or waits, and no recorder tells which."""
        return self.recorder is None and self.progress is not None and is_in_backward(self.progress.stack)

    @property
    def waits(self) -> bool:
        """Whether it surely waits for others, and not only for a moment."""
        return (self.wait is not None or bool(self.stack_wait)) and self._stands

    @functools.cached_property
    def site(self) -> CallSite | None:
        """Where it waits, or else where it is; ``None`` where no line is known."""
        failure = self.progress.failure.frames if self.progress and self.progress.failure else ()
        if failure and not self.ended_waiting:
            return site_of_wait(failure)
        if self.wait is not None and self.wait.frames:
            return site_of(self.wait.operation, self.wait.frames)
        if failure:
            return site_of_wait(failure)
        stack = self.progress.stack if self.progress else ()
        operation = self.wait.operation if self.wait else self.stack_wait
        if stack or operation:
            return site_of(operation or ("all_reduce" if self.may_wait_in_backward else ""), stack)
        return None

    @property
    def place(self) -> str:
        """``training, epoch 1, batch 40``."""
        return place_of_progress(self.progress) if self.progress else ""


def place_of_progress(progress: ProgressFacts) -> str:
    """``training, epoch 1, batch 40``; parts that are not known are left out."""
    parts = [_STAGES.get(progress.stage, progress.stage)]
    parts += [f"epoch {progress.epoch}"] if progress.epoch is not None else []
    parts += [f"batch {progress.batch}"] if progress.batch is not None else []
    return ", ".join(part for part in parts if part)


def _shared_names(job: Job) -> frozenset[str]:
    """Names that several groups have: a group that is split gives all its parts one name."""
    members: dict[str, set[tuple[int, ...]]] = {}
    for recorder, _ in job.facts(RecorderFacts):
        for group in recorder.groups:
            if group.members:
                members.setdefault(group.name, set()).add(group.members)
    return frozenset(name for name, found in members.items() if len(found) > 1)


def _with_first_member(recorder: RecorderFacts, shared: frozenset[str]) -> RecorderFacts:
    """The same with the first member in the names of groups that others have too."""
    names = {
        group.name: f"{group.name} from rank {group.members[0]}"
        for group in recorder.groups
        if group.name in shared and group.members
    }
    groups = (msgspec.structs.replace(one, name=names.get(one.name, one.name)) for one in recorder.groups)
    entries = (msgspec.structs.replace(one, group=names.get(one.group, one.group)) for one in recorder.collectives)
    return msgspec.structs.replace(recorder, groups=tuple(groups), collectives=tuple(entries))


def _between(ranks: Collection[int]) -> range:
    """The ranks up to the highest one that is there; none where most of them are not there."""
    return range(max(ranks)) if max(ranks) < 2 * len(ranks) else range(0)


def _group_members(standing: RankState) -> set[int]:
    """The members of its groups."""
    groups = standing.recorder.groups if standing.recorder else ()
    return {rank for group in groups for rank in group.members}


class JobState:
    """All ranks of a job as far as a run shows them.

    ``unseen``: ranks of which nothing is known. ``ungathered``: how many nobody asked. ``joins``: uneven inputs are
    joined. ``hosts``: their names, by rank. ``ended_waiting``: as in :class:`RankState`, by rank. ``ended_by_count``:
    of some of these ranks only counters say so, see :func:`cut_off`.

    It does not hold the job: what is worked out once a job is kept for as long as the job is.
    """

    def __init__(
        self, job: Job, ended_waiting: Mapping[int, str] | None = None, *, ended_by_count: bool = False
    ) -> None:
        waited = ended_waiting or {}
        self.ended_by_count = ended_by_count
        self.ungathered = job.ungathered
        self.joins = any(training.joins for training, _ in job.facts(TrainingFacts))
        self.hosts: dict[int, str] = {rank.number: rank.host.name for rank in job.ranks}
        self.ranks: dict[int, RankState] = {}
        self.loaders: dict[int, LoaderFacts] = {}
        silent = set(job.absent)
        shared = _shared_names(job)
        for rank in job.ranks:
            progress, recorder = rank.find(ProgressFacts), rank.find(RecorderFacts)
            recorder = _with_first_member(recorder, shared) if recorder and shared else recorder
            if progress is None and recorder is None:
                silent.add(rank.number)
            else:
                standing = RankState(rank.number, progress, recorder, waited.get(rank.number, ""))
                self.ranks.setdefault(rank.number, standing)
            if (loaders := rank.find(LoaderFacts)) is not None:
                self.loaders.setdefault(rank.number, loaders)
        if self.is_left_behind:
            silent.update(_between(self.ranks), *(_group_members(one) for one in self.ranks.values()))
        self.unseen = tuple(sorted(silent.difference(self.ranks)))

    @functools.cached_property
    def is_left_behind(self) -> bool:
        """Whether dumps are there and nobody watched the run."""
        recorded = [one for one in self.ranks.values() if one.recorder is not None]
        return bool(recorded) and all(one.is_left_behind for one in recorded)

    @functools.cached_property
    def calls(self) -> Mapping[str, Mapping[int, Mapping[int, Collective]]]:
        """All collectives that are shown, by group, number and rank."""
        found: dict[str, dict[int, dict[int, Collective]]] = {}
        for rank, standing in self.ranks.items():
            for entry in standing.recorder.collectives if standing.recorder else ():
                if not entry.is_p2p:
                    found.setdefault(entry.group, {}).setdefault(entry.sequence, {})[rank] = entry
        return found

    @functools.cached_property
    def members(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of each group: as the ranks tell; of the default group, and of one that nobody tells, all ranks, or
        those that have used it."""
        told: dict[str, set[int]] = {}
        used: dict[str, set[int]] = {}
        for standing in self.ranks.values():
            for group in standing.recorder.groups if standing.recorder else ():
                told.setdefault(group.name, set()).update(group.members)
                used.setdefault(group.name, set()).add(standing.rank)
        everybody = {*self.ranks, *self.unseen}
        return {
            name: tuple(sorted(told[name] or (everybody if name in DEFAULT_GROUPS else used[name]))) for name in told
        }

    @functools.cached_property
    def stuck(self) -> tuple[int, ...]:
        """Ranks that make no progress."""
        return tuple(rank for rank, standing in self.ranks.items() if standing.is_stuck)

    @functools.cached_property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that surely wait for others."""
        return tuple(rank for rank, standing in self.ranks.items() if standing.waits)

    @functools.cached_property
    def has_recorder(self) -> bool:
        """Whether the flight recorder of any rank is there."""
        return any(standing.recorder is not None for standing in self.ranks.values())

    def name_of(self, group: str) -> str:
        """A group in words: ``the default group``, ``group 12 (TENSOR_MODEL_PARALLEL_GROUP)``, ``group 12``."""
        if group in DEFAULT_GROUPS:
            return "the default group"
        told = (one.recorder.group(group) for one in self.ranks.values() if one.recorder)
        description = next((found.description for found in told if found and found.description), "")
        return f"group {group} ({description})" if description else f"group {group}"
