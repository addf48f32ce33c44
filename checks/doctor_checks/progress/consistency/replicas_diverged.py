"""RUN007: replicas of the model have diverged."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import msgspec

from doctor.analysis.stats.majority import describe, split_values
from doctor.analysis.stats.rank_roles import replicas_in, same_role, uses_lightning
from doctor.api import (
    Finding,
    Job,
    MajoritySplit,
    Rank,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    ranks_in_words,
    split_groups,
)
from doctor.facts import (
    TORCH_SEED,
    Checksum,
    Counted,
    EpochEnd,
    ModelFacts,
    ProgressFacts,
    ReplicaFacts,
    StepSettings,
    TrainingFacts,
    Variable,
)
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, running
from doctor_checks.progress._named_causes import cause_of_values, with_cause


def _sums(
    *values: str, part: str = "all", counted: Counted = "step", moved: bool | None = None, local: bool = False
) -> ReplicaFacts:
    rows = enumerate(values, 1)
    return ReplicaFacts(
        checksums=tuple(Checksum(50 * place, value, part, counted, moved=moved, local=local) for place, value in rows)
    )


def _both(steps: ReplicaFacts, batches: ReplicaFacts) -> ReplicaFacts:
    return ReplicaFacts(checksums=steps.checksums + batches.checksums)


def _by_batch(first: ReplicaFacts, second: ReplicaFacts) -> JobBuilder:
    return running(1, 2).put(first, ranks=(0,)).put(second, ranks=(1,))


def _with(*values: str, ranks: tuple[int, ...], part: str = "all") -> JobBuilder:
    return running(2, 2).put(_sums("a", "b", "c", part=part)).put(_sums(*values, part=part), ranks=ranks)


def _unlike(sketch: JobBuilder) -> JobBuilder:
    return sketch.alter(ModelFacts, replicated=None, broadcast=None).alter(
        TrainingFacts, framework="plain", strategy=None, data_parallel_root=None
    )


def _joined(*values: str) -> JobBuilder:
    """Two ranks with 60 and 67 batches in an epoch, which ``Join`` lets end apart."""
    return (
        running(1, 2)
        .put(_sums("a", "b", "c"))
        .put(_sums(*values), ranks=(1,))
        .alter(TrainingFacts, joins=True)
        .alter(ProgressFacts, ended=(EpochEnd("train", 0, 0, 60),))
        .alter(ProgressFacts, ranks=(1,), ended=(EpochEnd("train", 0, 0, 67),))
    )


def _each_for_itself() -> JobBuilder:
    sketch = running(2, 2)
    for rank in range(4):
        sketch = sketch.put(_sums(f"a{rank}", f"b{rank}"), ranks=(rank,))
    return sketch


_TRAINS_ON = "The ranks silently train different models, and a checkpoint contains only that of rank 0."
"""The impact if the ranks average gradients, whatever separated them."""


@check(
    id="RUN007",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="R",
    needs=(ReplicaFacts, ModelFacts),
    needs_peers=True,
    impacts={
        r"^lr differs|momentum|weight_decay|^optimizer class": (
            "The ranks apply different updates to equal gradients, so their parameters diverge from then on."
        ),
        r"started with different parameters": (
            "Each rank trains a separate model, and a checkpoint contains only that of rank 0."
        ),
        r"hold|differ (?:from|between)": _TRAINS_ON,
    },
    cases=lambda: (
        Passes("equal everywhere", running(2, 4)),
        Passes("a rank that is a step behind", _with("a", "b", ranks=(1,))),
        Passes(
            "a rank whose older sums are forgotten", running(1, 2).put(ReplicaFacts(checksums=(Checksum(100, "2e00"),)))
        ),
        Fails(
            "one of three, of which another has not reported the last step yet",
            running(1, 3)
            .put(_sums("a", "b", "c"))
            .put(_sums("a", "b"), ranks=(1,))
            .put(_sums("a", "y", "z"), ranks=(2,)),
            ranks=(2,),
        ),
        Passes(
            "two of three that differ, before the third has reported the same step",
            running(1, 3).put(_sums("a", "b", "c")).put(_sums("a"), ranks=(1,)).put(_sums("a", "y", "z"), ranks=(2,)),
            silent=False,
        ),
        Passes("steps after the epoch in which Join let one rank end first", _joined("a", "y", "z")),
        Fails("different before that", _joined("x", "y", "z"), ranks=(0, 1)),
        Passes("shards of one model", _with("x", "y", "z", ranks=(1,)).alter(ModelFacts, replicated=False)),
        Passes(
            "stages of a pipeline", _with("x", "y", "z", ranks=(2, 3)).alter(ModelFacts, ranks=(2, 3), digest="two")
        ),
        Passes(
            "other tensors were added up on the two ranks",
            running(1, 2).put(_sums("a", part="first"), ranks=(0,)).put(_sums("z", part="second"), ranks=(1,)),
        ),
        Passes(
            "parts of a model of one shape, each replicated by itself",
            in_a_loop(_with("x", "y", "z", ranks=(1, 3)), (0, 2), (1, 3)),
        ),
        Passes(
            "a loop of the user's own, whose ranks may train what they like",
            in_a_loop(_with("x", "y", "z", ranks=(1,))),
        ),
        Passes("a rank alone", running(1, 1)),
        Passes(
            "equal after equal steps, which ranks take different numbers of batches for",
            _by_batch(
                _both(_sums("a", "b"), _sums("h", "a", counted="batch")),
                _both(_sums("a", "b"), _sums("x", "y", counted="batch")),
            ),
        ),
        Passes(
            "equal after equal batches, where a rank did not count every step",
            _by_batch(
                _both(_sums("a", "b"), _sums("a", "b", counted="batch")),
                _both(_sums("x", "y"), _sums("a", "b", counted="batch")),
            ),
        ),
        Passes(
            "different after equal batches, without step counts",
            _by_batch(_sums("a", "b", counted="batch", moved=True), _sums("x", "y", counted="batch", moved=True)),
        ),
        Fails(
            "different after equal batches too",
            _by_batch(
                _both(_sums("a", "b"), _sums("a", "b", counted="batch")),
                _both(_sums("a", "y"), _sums("a", "y", counted="batch")),
            ),
            ranks=(0, 1),
        ),
        Fails(
            "a rank whose optimizer never steps",
            _by_batch(
                _both(_sums("b", "c"), _sums("b", "c", counted="batch", moved=True)),
                _sums("a", "a", counted="batch", moved=False),
            ),
            ranks=(1,),
        ),
        Fails("one rank from step 100 on", _with("a", "y", "z", ranks=(2,)), ranks=(2,)),
        Fails(
            "from the start", _with("x", "y", "z", ranks=(1,)).alter(ModelFacts, ranks=(1,), initial="9"), ranks=(1,)
        ),
        Fails("both ranks of a job of two", running(1, 2).put(_sums("q", "r"), ranks=(1,)), ranks=(0, 1)),
        Fails("every rank for itself", _each_for_itself(), ranks=(0, 1, 2, 3)),
        Fails("two that agree with one another", _with("a", "b", "z", ranks=(0, 3)), ranks=(0, 1, 2, 3)),
        Fails(
            "one of the replicas of a part", in_a_loop(_with("a", "b", "z", ranks=(3,)), (0, 2), (1, 3)), ranks=(1, 3)
        ),
        Fails(
            "another learning rate on one of four",
            _with("a", "y", "z", ranks=(2,))
            .alter(ReplicaFacts, settings=(StepSettings(50, (Variable("lr", "0.1"),)),))
            .alter(ReplicaFacts, ranks=(2,), settings=(StepSettings(50, (Variable("lr", "0.05"),)),)),
            ranks=(2,),
        ),
        Fails(
            "models without a wrapper that began by seeds of their own",
            _unlike(_with("x", "y", "z", ranks=(1,)).alter(ModelFacts, ranks=(1,), initial="9")),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Passes(
            "models without a wrapper that began equal, and are averaged now and then",
            _unlike(_with("x", "y", "z", ranks=(1,))),
        ),
        Passes(
            "models without a wrapper that were made equal by hand",
            _unlike(running(2, 2).alter(ModelFacts, ranks=(1,), initial="9")),
        ),
        Passes(
            "steps of each rank's own within no_sync(), which ranks average now and then",
            running(1, 2).put(_sums("a", "b", local=True)).put(_sums("y", "b", local=True), ranks=(1,)),
            silent=False,
        ),
        Fails(
            "one rank that steps within no_sync()",
            running(1, 3).put(_sums("a", "b", "c")).put(_sums("a", "y", "z", local=True), ranks=(1,)),
            ranks=(1,),
        ),
        Fails("a part of the tensors", _with("a", "b", "y", ranks=(3,), part="17"), ranks=(3,)),
    ),
)
def replicas_diverged(job: Job) -> Iterator[Verdict]:
    """Ask whether parameters that must be equal on all ranks are equal.

    Why it hurts: the ranks silently train different models, and a checkpoint contains only that of rank 0.
    Fix: Start all ranks with the same weights, and step every optimizer on every rank with reduced gradients.
    """
    groups = list(_replicas(job))
    compared = 0
    for ranks in groups:
        steps, batches = list(_splits(ranks, "step")), list(_splits(ranks, "batch"))
        common = _last_common_step(ranks)
        if common is not None:
            steps, batches = [one for one in steps if one.step <= common], []
        compared += len(steps) + len(batches)
        unlike = [one for one in steps if one.split.minorities and not _is_refuted(one, batches)]
        apart = [one for one in unlike if not one.is_local]
        if local := [one for one in unlike if one.is_local]:
            yield Unknown(
                "the ranks differ after steps within no_sync(), as between two averages of local SGD",
                tuple(sorted(_ranks_of(local[-1]))),
                "average the parameters, or leave no_sync() before optimizer.step()",
            )
        if apart and len(ranks) > 2 == max(len(_ranks_of(one)) for one in apart):
            yield Unknown(
                "two ranks hold different parameters, and no other rank has reported the same step yet",
                tuple(sorted(_ranks_of(apart[-1]))),
                "wait for the next round",
            )
        elif apart:
            yield _finding(job, ranks, steps, apart)
        else:
            yield from _uncounted(job, ranks, steps, batches)
    unwrapped = _of_unwrapped(job)
    if unwrapped is not None:
        yield unwrapped
    elif not compared:
        held = any(len(ranks) > 1 for ranks in groups)
        yield Skip(
            "no checksum of the same step on two ranks so far" if held else "no two ranks hold the same parameters"
        )


class _Compared(msgspec.Struct, frozen=True):
    """The checksums of one part after one step or batch; ``still``: ranks on which it has never changed, ``moved``: the
    others; ``is_local``: all ranks took the step within ``no_sync()``."""

    step: int
    part: str
    split: MajoritySplit
    still: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    is_local: bool = False


def _replicas(job: Job) -> Iterator[tuple[Rank, ...]]:
    for role in same_role(job):
        whole = {rank.number for rank in role if (model := rank.find(ModelFacts)) and model.replicated}
        for members in replicas_in(job):
            yield tuple(rank for rank in members if rank.number in whole)


def _last_common_step(ranks: tuple[Rank, ...]) -> int | None:
    """The last step until which equal numbers of steps mean equal parameters; ``None`` without such a limit.

    With ``Join``, ranks whose batches end early wait until the others' end, and get the parameters of these: from the
    next epoch on their step of a number is another one.
    """
    training = [facts for rank in ranks if (facts := rank.find(TrainingFacts))]
    if not any(facts.joins for facts in training):
        return None
    by_epoch: dict[int, set[int]] = {}
    for rank in ranks:
        progress = rank.find(ProgressFacts)
        for end in progress.ended if progress else ():
            if end.stage == "train" and end.loader == 0:
                by_epoch.setdefault(end.epoch, set()).add(end.batches)
    steps, accumulate = 0, max((facts.accumulate or 1 for facts in training), default=1)
    for _, batches in sorted(by_epoch.items()):
        steps += min(batches) // accumulate
        if len(batches) > 1:
            return steps
    return None


def _unwrapped(job: Job) -> tuple[Rank, ...]:
    """All ranks of a loop of the user's own, if their samplers divide one dataset among all of them, and no wrapper
    makes their models equal."""
    found: list[Rank] = []
    for rank in job.ranks:
        training, model = rank.find(TrainingFacts), rank.find(ModelFacts)
        if training is None or model is None or training.framework != "plain" or model.replicated is not None:
            return ()
        if training.data_parallel_root is not None or training.data_parallel_size != training.world_size:
            return ()
        found.append(rank)
    return tuple(found)


def _of_unwrapped(job: Job) -> Finding | None:
    """Models that started different and were never equal; models that ranks average occasionally start equal."""
    ranks = _unwrapped(job)
    compared = [*_splits(ranks, "step")]
    began = {rank.number: model.initial for rank in ranks if (model := rank.find(ModelFacts)) and model.initial}
    if len(set(began.values())) < 2 or not compared or any(not one.split.minorities for one in compared):
        return None
    if len({model.digest for rank in ranks if (model := rank.find(ModelFacts))}) > 1:
        return None
    split, seeds = split_values(began), {rank.number: _seed(rank) for rank in ranks}
    why = f", with different seeds ({describe(split_values(seeds))})" if len(set(seeds.values())) > 1 else ""
    return Finding(
        f"{ranks_in_words(split.odd)} started with different parameters{why}, which still differ after step "
        f"{compared[-1].step:,}",
        ranks=split.odd,
        evidence={"initial": _initial(ranks), "seeds": {str(rank): seed for rank, seed in [*seeds.items()][:64]}},
        fix="Wrap the model in `DistributedDataParallel`, or, if the program reduces gradients itself, call "
        "`torch.manual_seed` with the same seed on every rank before the model is built.",
        severity=Severity.WARNING,
        confidence=0.7,
    )


def _seed(rank: Rank) -> str | None:
    training = rank.find(TrainingFacts)
    return training.argument(TORCH_SEED) if training is not None else None


def _splits(ranks: Iterable[Rank], counted: Counted) -> Iterator[_Compared]:
    found: dict[tuple[int, str], dict[int, Checksum]] = {}
    for rank in ranks:
        replica = rank.find(ReplicaFacts)
        for one in replica.checksums if replica else ():
            if one.counted == counted:
                found.setdefault((one.step, one.part), {})[rank.number] = one
    for (step, part), sums in sorted(found.items()):
        values: dict[Hashable, list[int]] = {}
        for number, one in sums.items():
            values.setdefault(one.value, []).append(number)
        if len(sums) > 1:
            still, moved = (frozenset(rank for rank, one in sums.items() if one.moved is way) for way in (False, True))
            is_local = all(one.local for one in sums.values())
            yield _Compared(step, part, split_groups(values), still, moved, is_local)


def _is_refuted(one: _Compared, batches: Sequence[_Compared]) -> bool:
    """If the last comparison by batch was equal on these ranks, not all of them count every step."""
    newest = next((other for other in reversed(batches) if other.part == one.part), None)
    return newest is not None and not newest.split.minorities and _ranks_of(one) <= _ranks_of(newest)


def _uncounted(
    job: Job, ranks: tuple[Rank, ...], steps: Sequence[_Compared], batches: Sequence[_Compared]
) -> Iterator[Verdict]:
    """Ranks that differ after the same batch may need different numbers of batches for a step, unless one keeps its
    initial values while others change."""
    by_step = frozenset(rank for one in steps for rank in _ranks_of(one))
    apart = [one for one in batches if one.split.minorities and not _ranks_of(one) <= by_step]
    stuck = [one for one in apart if one.still and one.moved]
    keeps = frozenset.intersection(*(one.still for one in stuck)) if len(stuck) > 1 else frozenset[int]()
    if keeps:
        yield _kept_finding(job, ranks, stuck, tuple(sorted(keeps)))
    elif apart and apart[-1] in batches[-4:]:  # one recent comparison for each of a few parts
        yield Unknown(
            "the ranks differ after the same batch, but they may take different numbers of batches per optimizer step, "
            "and have no counted step in common",
            tuple(sorted(_ranks_of(apart[-1]))),
            "call w.step() on every rank after optimizer.step(), or step the optimizers of self.optimizers()",
        )


def _of_most_ranks(apart: list[_Compared]) -> _Compared:
    """The newest comparison of the most ranks: some of them report a step later than others."""
    return max(enumerate(apart), key=lambda numbered: (len(_ranks_of(numbered[1])), numbered[0]))[1]


def _ranks_of(one: _Compared) -> frozenset[int]:
    return frozenset(rank for group in one.split.groups for rank in group.ranks)


def _finding(job: Job, ranks: tuple[Rank, ...], same: list[_Compared], apart: list[_Compared]) -> Finding:
    first, newest = apart[0], _of_most_ranks(apart)
    before = [one.step for one in same if one.step < first.step and not one.split.minorities]
    odd = newest.split.odd
    since = f"after step {first.step:,}" + (f" (equal after {before[-1]:,})" if before else "")
    who = (
        f"The parameters of {ranks_in_words(odd)} differ from those of the other ranks"
        if newest.split.common
        else f"The parameters differ between ranks {odd[0]} and {odd[1]}"
        if len(odd) == 2
        else f"The parameters differ between {ranks_in_words(odd)}"
    )
    began_apart = not before and len(_initial(ranks)) > 1
    finding = Finding(
        f"{ranks_in_words(odd)} started with different parameters, which still differ after step {newest.step:,}"
        if began_apart
        else f"{who} {since}",
        ranks=odd,
        evidence={
            "part": newest.part,
            "checksums": _described(newest),
            "initial": _initial(ranks),
        },
        effect=_TRAINS_ON if began_apart else "",
        fix=_fix_of_start(job, ranks, newest.split) if began_apart else _fix(job, odd),
    )
    return with_cause(finding, cause_of_values(job))


def _kept_finding(job: Job, ranks: tuple[Rank, ...], stuck: list[_Compared], keeps: tuple[int, ...]) -> Finding:
    newest = stuck[-1]
    holds = "still holds" if len(keeps) == 1 else "still hold"
    return Finding(
        f"{ranks_in_words(keeps)} {holds} the initial parameters after batch {newest.step:,}; the other ranks do not",
        ranks=keeps,
        evidence={"part": newest.part, "checksums": _described(newest)},
        effect=f"{ranks_in_words(keeps).capitalize()} {'does' if len(keeps) == 1 else 'do'} not train, and "
        f"contribute{'s' if len(keeps) == 1 else ''} gradients of the initial model to the other ranks.",
        fix=f"Look for the condition that keeps {ranks_in_words(keeps)} from calling `optimizer.step()`, or for an "
        "optimizer that was created without the parameters of the model.",
    )


def _described(one: _Compared) -> dict[str, list[int]]:
    return {str(group.value): list(group.ranks[:32]) for group in one.split.groups[:8]}


def _initial(ranks: Iterable[Rank]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        model = rank.find(ModelFacts)
        if model and model.initial is not None:
            found.setdefault(model.initial, []).append(rank.number)
    return found


def _fix_of_start(job: Job, ranks: tuple[Rank, ...], split: MajoritySplit) -> str:
    model = ranks[0].find(ModelFacts)
    if model and model.broadcast is False:
        seed = "lightning.seed_everything(seed)" if uses_lightning(job) else "torch.manual_seed(seed)"
        return (
            f"Call `{seed}` with the same seed on every rank before the model is created, or broadcast its parameters "
            "from rank 0."
        )
    who = ranks_in_words(split.odd)
    if split.common:
        return (
            f"Use the seed and the checkpoint of the other ranks on {who}, and check that the initial broadcast of the "
            f"parameters reaches {'them' if len(split.odd) > 1 else 'it'}."
        )
    return (
        f"Use the same seed and the same checkpoint on {who}, and check that the initial broadcast of the parameters "
        "reaches all of them."
    )


def _fix(job: Job, odd: tuple[int, ...]) -> str:
    if uses_lightning(job):
        return (
            f"Look for code that changes the parameters differently on {ranks_in_words(odd)}: `optimizer.step()` "
            "inside a rank-dependent branch, a backward pass without `self.manual_backward(loss)`, or an assignment to "
            "parameters in a hook."
        )
    return (
        f"Look for code that changes the parameters differently on {ranks_in_words(odd)}: `optimizer.step()` inside a "
        "rank-dependent branch, a call of `model.module` instead of the DDP module, or an assignment to parameters."
    )
