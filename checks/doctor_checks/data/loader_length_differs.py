"""DATA001: ranks have different numbers of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from doctor.analysis.stats.majority import split_values
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    correlates,
    describe,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import (
    Collective,
    Frame,
    LoaderEpoch,
    LoaderFacts,
    ProgressFacts,
    RecorderFacts,
    TrainingFacts,
    Variable,
)
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, logged, running, with_loader, with_sampler
from doctor_checks.data._rank_loaders import (
    AT_THE_SAME_STEP,
    EVALUATION,
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    any_stuck,
    batches_in_words,
    effect_of_waiting,
    ends_by_steps,
    limit_argument,
    loader_hook,
    odd_by_count,
    peer_loaders,
)

_SHARDED = ("fsdp", "deepspeed_stage_3", "model_parallel", "FullyShardedDataParallel")
"""Strategies that gather parameters in every forward pass, so in every evaluation batch too."""
_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class _Ends(msgspec.Struct, frozen=True):
    stage: str
    name: str
    batches: dict[int, int | None]
    members: tuple[RankLoader, ...]
    is_one_job: bool

    @property
    def known(self) -> dict[int, int]:
        return {rank: batches for rank, batches in self.batches.items() if batches is not None}


def _of_validation(lengths: dict[int, int]) -> JobBuilder:
    sketch = with_loader(running(1, 3), stage="validate", length=10, epochs=())
    for rank, length in lengths.items():
        sketch = with_loader(sketch, ranks=(rank,), stage="validate", length=length)
    return sketch


def _in_loop(shortest: int, **of_longer: Any) -> JobBuilder:
    """A loop of the user's own: rank 1 has 5 batches more than the others."""
    sketch = with_loader(running(1, 3).alter(TrainingFacts, framework="plain"), length=shortest, epochs=())
    return with_loader(sketch, ranks=(1,), length=shortest + 5, **of_longer)


def _left(batches: int) -> tuple[LoaderEpoch, ...]:
    return (LoaderEpoch(0, batches=batches), LoaderEpoch(1, batches=3))


def _by_steps(*arguments: Variable) -> JobBuilder:
    return with_loader(running(), ranks=(1,), length=103).alter(
        TrainingFacts, framework="transformers", max_steps=150, arguments=arguments
    )


def _stuck_in_validation(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
    where = Frame("/home/me/train.py", 60, "validation_step", user=True)
    return (*old, Collective("0", 999, "all_gather", frames=(where,)))


def _two_loaders(combined: str, second: Callable[[int], int]) -> JobBuilder:
    sketch = with_loader(running(1, 3), combined=combined)
    for rank in range(3):
        sketch = with_loader(sketch, ranks=(rank,), index=1, length=second(rank))
    return sketch


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "data.length", by=("words",)):
        lengths = {event.rank: int(event.value("n") or 0) for event in group.events if event.rank is not None}
        parted = split_values(lengths)
        if parted.minorities:
            yield _of_lengths(group, lengths, parted)
    for group in event_groups(job, "data.length_of"):
        # One process may log all ranks. Several numbers for a rank are a running count.
        numbers: dict[int, set[int]] = {}
        for event in group.events:
            numbers.setdefault(int(event.value("of") or 0), set()).add(int(event.value("n") or 0))
        stated = {rank: found.pop() for rank, found in numbers.items() if len(found) == 1}
        if len(stated) == len(numbers) and len(set(stated.values())) > 1:
            yield _of_lengths(group, stated, split_values(stated))


def _of_lengths(reported: EventGroup, lengths: dict[int, int], parted: MajoritySplit) -> Finding:
    groups = "; ".join(f"{ranks_in_words(group.ranks)}: {group.value:,}" for group in parted.groups[:4])
    words = reported.value("words") or "batches"
    is_training = "val" not in words and "test" not in words
    return finding_from_logs(
        reported,
        f"Ranks logged different numbers of batches{'' if words == 'batches' else f' ({words})'}: {groups}",
        ranks=parted.odd or tuple(sorted(lengths)),
        effect=effect_of_waiting(lengths, trains=is_training),
        fix=f"End the epoch on all ranks after {batches_in_words(min(lengths.values()))}, or use `DistributedSampler`, "
        "which gives every rank the same number of samples.",
        severity=Severity.ERROR if is_training else Severity.INFO,
        confidence=0.8,
        explains=("DATA010", "RUN002"),
    )


@check(
    id="DATA001",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PRM",
    needs=(LoaderFacts,),
    needs_peers=True,
    from_logs=_from_logs,
    impacts={
        r"has no batches": (
            "The rank without batches fails with this error, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("as many batches on all ranks", running(hosts=2, per_host=2)),
        Passes(
            "ranks that log the same length", logged(*(f"[rank{rank}]: len(train_loader) = 1560" for rank in range(3)))
        ),
        Passes(
            "one rank that logs the lengths of several epochs",
            logged("[rank0]: len(train_loader) = 9", "[rank0]: step 3"),
        ),
        Fails(
            "ranks that log different lengths",
            logged(
                "[rank0]: len(train_loader) = 1560",
                "[rank1]: len(train_loader) = 1560",
                "[rank2]: len(train_loader) = 1563",
            ),
            ranks=(2,),
        ),
        Passes(
            "one process logs the same length for all ranks", logged("rank 0: 1563 batches", "rank 1: 1563 batches")
        ),
        Passes(
            "logged counts that keep growing",
            logged(*(f"rank {rank}: {10 * count + rank} batches" for count in range(1, 4) for rank in range(2))),
        ),
        Fails(
            "one process logs different lengths per rank",
            logged("rank 0: 1563 batches", "rank 1: 1563 batches", "rank 2: 1560 batches"),
            ranks=(2,),
        ),
        Passes("a limit that all reach", with_loader(with_loader(running(), limit=90), ranks=(1,), length=103)),
        Passes(
            "max_steps ends all ranks before the shortest is over",
            with_loader(running(), ranks=(1,), length=103).alter(TrainingFacts, max_steps=50, accumulate=2),
        ),
        Passes(
            "uneven inputs are joined", with_loader(running(), ranks=(1,), length=103).alter(TrainingFacts, joins=True)
        ),
        Passes(
            "a loop of the user's own, whose ranks may train models of their own",
            in_a_loop(with_loader(running(), ranks=(1,), length=103)),
            silent=False,
        ),
        Passes(
            "two groups of ranks, each as long as it is",
            in_a_loop(with_loader(running(2, 2), ranks=(2, 3), length=103), (0, 1), (2, 3)),
        ),
        Passes(
            "a Trainer of transformers, which max_steps ends at the same step",
            _by_steps(),
            silent=False,
        ),
        Fails(
            "the same, with an evaluation after each epoch",
            _by_steps(Variable("eval_strategy", "epoch")),
            ranks=(1,),
        ),
        Passes("a loop that its own counter ends in time", _in_loop(60, loop_limit=60)),
        Passes(
            "a loop that was left in time for a reason of its own, and is run again",
            _in_loop(60, has_exits=True, epochs=_left(61)),
            silent=False,
        ),
        Fails("a loop that its own counter ends too late", _in_loop(60, loop_limit=64), ranks=(1,)),
        Fails(
            "a loop with a break whose moment is unknown",
            _in_loop(60, has_exits=True),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Fails(
            "a loop with a break that was not taken in time",
            _in_loop(60, has_exits=True, epochs=_left(63)),
            ranks=(1,),
        ),
        Passes("streams without a length", with_loader(running(), kind="iterable", length=None)),
        Passes(
            "Lightning's own sampler for predictions, off by one",
            with_sampler(
                with_loader(with_loader(running(), stage="predict", length=7), ranks=(1,), stage="predict", length=6),
                stage="predict",
                name="UnrepeatedDistributedSamplerWrapper",
                pads=False,
            ),
        ),
        Passes("validation without collectives in each batch", _of_validation({1: 12}), silent=False),
        Passes("the shorter of two loaders starts again", _two_loaders("max_size_cycle", lambda rank: 30 + rank)),
        Passes(
            "a sanity check", with_loader(with_loader(running(), stage="sanity"), ranks=(1,), stage="sanity", length=1)
        ),
        Passes(
            "batches by next(), and loaders that are started anew",
            with_loader(with_loader(running(), by_next=True), ranks=(1,), length=103),
        ),
        Passes(
            "batches by next(), before any loader ended",
            with_loader(with_loader(running(epoch=0), by_next=True), ranks=(1,), length=103),
        ),
        Fails(
            "within one of two groups",
            in_a_loop(with_loader(running(2, 2), ranks=(3,), length=101), (0, 1), (2, 3)),
            ranks=(3,),
        ),
        Fails("one rank of four has one batch more", with_loader(running(2, 2), ranks=(2,), length=101), ranks=(2,)),
        Fails("one rank of four has one batch less", with_loader(running(2, 2), ranks=(3,), length=99), ranks=(3,)),
        Fails("two ranks: the longer one blocks", with_loader(running(), ranks=(1,), length=101), ranks=(1,)),
        Fails(
            "split evenly: the longer ones block",
            with_loader(running(2, 2), ranks=(0, 1), length=103),
            ranks=(0, 1),
        ),
        Fails(
            "a limit that only one rank reaches",
            with_loader(with_loader(running(1, 3), limit=102), ranks=(1,), length=200),
            ranks=(1,),
        ),
        Fails(
            "max_steps is reached too late",
            with_loader(running(), ranks=(1,), length=103).alter(TrainingFacts, max_steps=150),
            ranks=(1,),
        ),
        Fails(
            "shards of different sizes, without a Trainer",
            with_loader(
                running(1, 3).alter(TrainingFacts, framework="plain"), ranks=(0,), length=90, dataset_length=8640
            ),
            ranks=(0,),
        ),
        Fails(
            "the longest of two loaders differs", _two_loaders("max_size", lambda rank: 200 + (rank == 1)), ranks=(1,)
        ),
        Fails(
            "validation, where each batch gathers sharded parameters",
            _of_validation({1: 12}).alter(TrainingFacts, strategy="fsdp"),
            ranks=(1,),
        ),
        Fails(
            "validation that hangs in a batch that others do not have",
            _of_validation({1: 12}).alter(
                ProgressFacts, ranks=(1,), stage="validate", batch=10, state="stalled", epoch=0
            ),
            ranks=(1,),
        ),
        Fails(
            "validation with a collective in its step",
            _of_validation({1: 12}).alter(RecorderFacts, ranks=(1,), collectives=_stuck_in_validation),
            ranks=(1,),
        ),
    ),
)
def loader_length_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks have the same number of batches in an epoch.

    Why it hurts: ranks with more batches wait until the timeout in a collective that the others never enter, or
    gradients of different steps are averaged without an error.
    Fix: Give every rank the same number of batches, or stop all ranks after the smallest number of batches.
    """
    compared = 0
    for ends in _ends(job):
        known = ends.known
        if any(reader.loader.by_next for reader in ends.members) and len(set(known.values())) > 1:
            compared += 1
            if not _has_started_anew(ends):
                yield Unknown(_BY_NEXT, tuple(known))
            continue
        if unknown := tuple(rank for rank in ends.batches if rank not in known) if known else ():
            if ends.stage in TRAINING:
                yield Unknown(f"the length of the {ends.name} is unknown on these ranks", unknown)
        if len(known) < 2:
            continue
        compared += 1
        if len(set(known.values())) > 1 and not _is_harmless(ends):
            yield _finding(job, ends)
    if not compared:
        yield Skip("no loader has a known length on two ranks: DATA010 counts the batches")


_BY_NEXT = (
    "the program takes batches by next() or from a generator that repeats the loader, and has not reached the end of a "
    "loader: ranks may have different numbers of batches if it starts its loader again there"
)


def _has_started_anew(ends: _Ends) -> bool:
    """Whether ranks have continued with a new pass after a loader ended."""
    epochs = [reader.loader.epochs for reader in ends.members]
    return any(len(one) > 1 and any(epoch.ended for epoch in one[:-1]) for one in epochs)


def _ends(job: Job) -> Iterator[_Ends]:
    """Training loaders are combined, evaluation loaders run one after the other."""
    training: dict[int | None, list[PeerLoaders]] = {}
    for readers in peer_loaders(job, TRAINING):
        for group in readers.by_group():
            training.setdefault(group.members[0].group, []).append(group)
    for loaders in training.values():
        yield _end_of(loaders[0]) if len(loaders) == 1 else _combined(loaders)
    for readers in peer_loaders(job, EVALUATION):
        yield from map(_end_of, readers.by_group())


def _end_of(readers: PeerLoaders) -> _Ends:
    batches = {reader.rank: reader.loader.batches for reader in readers.members}
    return _Ends(readers.stage, readers.name, batches, readers.members, readers.is_one_job)


def _combined(loaders: Sequence[PeerLoaders]) -> _Ends:
    by_rank: dict[int, list[RankLoader]] = {}
    for readers in loaders:
        for reader in readers.members:
            by_rank.setdefault(reader.rank, []).append(reader)
    batches = {rank: _combine([reader.loader.combined for reader in own], own) for rank, own in by_rank.items()}
    members = tuple(reader for own in by_rank.values() for reader in own)
    return _Ends(loaders[0].stage, "training loaders", batches, members, loaders[0].is_one_job)


def _combine(modes: list[str | None], readers: list[RankLoader]) -> int | None:
    lengths = [reader.loader.batches for reader in readers]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    if "min_size" in modes:
        return min(known)
    return sum(known) if "sequential" in modes else max(known)


def _is_harmless(ends: _Ends) -> bool:
    known = ends.known
    if all(reader.training.joins for reader in ends.members):
        return True
    if ends.stage not in TRAINING:
        spread = max(known.values()) - min(known.values())
        return spread == 1 and all(_is_unrepeated(reader) for reader in ends.members)
    if all(_limit_of_loop(reader) <= min(known.values()) for reader in _longer(ends)):
        return True
    limited = [reader.training for reader in ends.members if reader.training.max_steps is not None]
    return bool(limited) and all((one.max_steps or 0) * one.accumulate <= min(known.values()) for one in limited)


def _longer(ends: _Ends) -> list[RankLoader]:
    """The loaders of ranks with more batches than the shortest."""
    shortest = min(ends.known.values())
    return [reader for reader in ends.members if ends.known.get(reader.rank, shortest) > shortest]


def _limit_of_loop(reader: RankLoader) -> float:
    limit = reader.loader.loop_limit
    return math.inf if limit is None else limit


def _may_leave_in_time(job: Job, ends: _Ends) -> bool:
    """Whether the loops of ranks with more batches can be left for another reason before the shortest loader ends.

    They fetch a batch more if they look at their counter first."""
    shortest, longer = min(ends.known.values()), _longer(ends)
    used = (epoch.batches - (not epoch.ended) for reader in longer for epoch in reader.loader.epochs)
    return all(reader.loader.has_exits for reader in longer) and max(used, default=0) <= shortest and not any_stuck(job)


def _has_left_in_time(job: Job, ends: _Ends) -> bool:
    """Whether loops of which :func:`_may_leave_in_time` is true have done so, and continue."""
    states = {rank.number: one.state for rank in job.ranks if (one := rank.find(ProgressFacts))}
    over = (len(reader.loader.epochs) - (states.get(reader.rank) != "ended") for reader in _longer(ends))
    return all(count > 0 for count in over)


def _is_unrepeated(reader: RankLoader) -> bool:
    """Lightning's sampler for predictions gives some ranks one sample more on purpose."""
    return reader.loader.sampler is not None and reader.loader.sampler.name.startswith("Unrepeated")


def _finding(job: Job, ends: _Ends) -> Finding:
    known = ends.known
    found, odd, shortest = split_values(known), odd_by_count(known), min(known.values())
    by_steps = ends.stage in TRAINING and ends_by_steps(ends.members)
    is_error = ends.is_one_job and not by_steps and (ends.stage in TRAINING or _has_collectives(job, ends))
    others = f"{found.common.value:,} on the others" if found.common else _on_others(known, odd)
    values = sorted({known[rank] for rank in odd})
    how = advice(
        job,
        lightning=f"Set `Trainer({limit_argument(ends.stage)}={shortest})`, or better, {_even(ends.members)} in "
        f"`{loader_hook(ends.stage)}`.",
        transformers=_EVEN_BATCHES
        if by_steps
        else f"Set `TrainingArguments(max_steps={shortest})`, or better, let `Trainer.get_train_dataloader` create the "
        "loader, with the default `accelerator_config={'even_batches': True}`.",
        plain=f"Stop the loop after {batches_in_words(shortest)} on every rank with `itertools.islice`, or better, "
        f"{_even(ends.members)}.",
    )
    is_open = is_error and ends.stage in TRAINING and _may_leave_in_time(job, ends)
    has_left = is_open and _has_left_in_time(job, ends)
    verb = "have" if ends.name.endswith("s") else "has"
    return Finding(
        f"The {ends.name} {verb} {batches_in_words(*values)} on {ranks_in_words(odd)}, but {others}",
        ranks=odd,
        evidence={
            "batches": describe(found),
            **_what_differs(ends.members),
            "goes_with": list(correlates(job, odd)),
        },
        effect=effect_of_waiting(known, trains=ends.stage in TRAINING)
        if is_error and not is_open
        else _effect(ends, shortest if is_open else None, by_steps=by_steps),
        fix=how,
        severity=Severity.INFO if has_left or not is_error else Severity.WARNING if is_open else Severity.ERROR,
        explains=("DATA010", "RUN001", "RUN002", "RUN004", "RUN006", "RUN010", "RUN012") if is_error else (),
    )


_EVEN_BATCHES = (
    "Let `Trainer.get_train_dataloader` create the loader, with the default "
    "`accelerator_config={'even_batches': True}`."
)


def _on_others(known: dict[int, int], odd: tuple[int, ...]) -> str:
    rest = tuple(rank for rank in known if rank not in odd)
    shortest = min(known.values())
    is_one_value = rest and all(known[rank] == shortest for rank in rest)
    return f"{shortest:,} on {ranks_in_words(rest, 4) if is_one_value else 'other ranks'}"


def _effect(ends: _Ends, leaves_at: int | None, *, by_steps: bool) -> str:
    if leaves_at is not None:
        return _OPEN.format(batches=batches_in_words(leaves_at))
    if by_steps:
        return AT_THE_SAME_STEP
    return _MILD if ends.is_one_job else _APART


_MILD = (
    "If each batch runs a collective, such as a gathered metric, ranks with more batches wait in it until the "
    "timeout; otherwise this is harmless."
)

_OPEN = (
    "None if every rank leaves its loop after at most {batches}; otherwise, ranks with more batches wait until the "
    "timeout in a collective that the others never enter."
)

_APART = (
    "None if the ranks train separate models; if they use collectives, ranks with more batches wait until the timeout."
)


def _what_differs(members: Iterable[RankLoader]) -> dict[str, object]:
    evidence: dict[str, object] = {}
    for name in ("dataset_length", "batch_size", "limit", "drop_last", "batch_sampler"):
        found = split_values({reader.rank: getattr(reader.loader, name) for reader in members})
        if found.minorities:
            evidence[name] = describe(found)
    return evidence


def _has_collectives(job: Job, ends: _Ends) -> bool:
    """Whether each evaluation batch contains a collective: by the strategy, by the flight recorder, or because a rank
    is stuck in a batch that the others do not have."""
    if any(reader.training.strategy in _SHARDED for reader in ends.members):
        return True
    shortest = min(ends.known.values())
    for progress, _ in job.facts(ProgressFacts):
        beyond = progress.stage == ends.stage and progress.batch is not None and progress.batch >= shortest
        if beyond and progress.state not in ("running", "ended"):
            return True
    step = _STEPS[ends.stage]
    calls = (call for recorder, _ in job.facts(RecorderFacts) for call in recorder.collectives)
    return any(frame.function == step for call in calls for frame in call.frames)


def _even(members: tuple[RankLoader, ...]) -> str:
    loaders = [reader.loader for reader in members]
    if len({loader.batch_size for loader in loaders}) > 1:
        return "set the same batch size on all ranks"
    if any(loader.kind == "iterable" for loader in loaders):
        return "end every rank's stream after the same number of samples"
    if any(loader.dynamic for loader in loaders):
        return "let the batch sampler drop or repeat batches until all ranks have the same number"
    if len({loader.dataset_length for loader in loaders}) > 1:
        return "cut the datasets of all ranks to the length of the shortest"
    return "divide one dataset with `DistributedSampler`"
