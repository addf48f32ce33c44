"""RUN014: ranks wrap different models."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import zip_longest
from zlib import crc32

from doctor.analysis.stats.rank_roles import replicas_in, uses_lightning
from doctor.api import (
    EventGroup,
    Finding,
    Group,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    describe,
    event_groups,
    finding_from_logs,
    ranks_in_words,
    split_groups,
)
from doctor.facts import ModelFacts, TensorShape, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, logged, running

USUAL = (TensorShape("layer.weight", (10, 32), "float32"), TensorShape("layer.bias", (10,), "float32"))
WIDE = (TensorShape("layer.weight", (12, 32), "float32"), TensorShape("layer.bias", (12,), "float32"))
SWAPPED = (TensorShape("layer.bias", (10,), "float32"), TensorShape("layer.weight", (10, 32), "float32"))
FROZEN = (USUAL[0], TensorShape("layer.bias", (10,), "float32", frozen=True))
HALF = (TensorShape("layer.weight", (10, 32), "bfloat16"), TensorShape("layer.bias", (10,), "bfloat16"))


_DDP = "DDP expects same model across all ranks, but"


def _other(tensors: tuple[TensorShape, ...], *ranks: int, hosts: int = 2, parameters: int = 330) -> JobBuilder:
    digest = f"{crc32(repr(tensors).encode()):08x}"
    return running(hosts, 2).alter(
        ModelFacts, ranks=ranks, digest=digest, tensors=tensors, parameters=parameters, count=len(tensors)
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "ddp.diff_model"):
        counts = {rank: group.value(count) for rank, count in ((group.value("a"), "na"), (group.value("b"), "nb"))}
        first, *rest = counts.items()
        words = f"rank {first[0]} has {first[1]} parameter tensors" + "".join(
            f", rank {rank} has {n}" for rank, n in rest
        )
        if not_counted := [event for event in group.events if not _is_count(event.value("nb"))]:
            yield _not_received(job, EventGroup(group.kind, tuple(not_counted)))
            continue
        yield finding_from_logs(
            group,
            f"Ranks wrap different models: {words}",
            ranks=tuple(sorted(int(rank) for rank in counts if rank)),
            effect=_AT_STARTUP,
            fix=_FIX_OF_COUNT,
            explains=("RUN002",),
            confidence=0.9,
        )
    for group in event_groups(job, "ddp.diff_shape", by=("rank",)):
        rank, what = group.value("rank"), "strides" if group.value("what") == "strides" else "shape"
        named = (int(rank),) if rank else group.ranks
        yield finding_from_logs(
            group,
            f"{ranks_in_words(named) if named else 'A rank'} wraps a different model than rank {group.value('ref')}: "
            f"parameter {group.value('i')} has {what} {group.value('v')}",
            ranks=(int(rank),) if rank else None,
            effect=_AT_STARTUP,
            fix="Use the same memory format on all ranks before the model is wrapped."
            if what == "strides"
            else _fix_of_shape(job, f"parameter {group.value('i')}"),
            explains=("RUN002",),
            confidence=0.95,
        )


_AT_STARTUP = "DDP raises an error when it wraps the model, and the job ends at startup."
_FIX_OF_COUNT = "Build the model from the same configuration on all ranks, without layers that depend on the rank."
_MOST_PARAMETERS = 1_000_000
"""More parameters (tensors, not their elements) than a model has; large mixtures of experts have some ten thousand."""


def _is_count(count: str | None) -> bool:
    """Whether a rank can have sent this number: DDP refuses a model without parameters before it compares counts."""
    return count is not None and 0 < int(count) <= _MOST_PARAMETERS


def _not_received(job: Job, group: EventGroup) -> Finding:
    """An all-gather into uninitialized tensors that failed (torch/csrc/distributed/c10d/reducer.cpp).

    The reader compares the buffers in the order of ranks, so the rank that it names is only the first of them."""
    speaker, other, count = (group.value(name) for name in ("a", "b", "nb"))
    return finding_from_logs(
        group,
        f"DDP could not compare the models: rank {speaker} received an invalid count from rank {other}",
        ranks=(),
        evidence={"count": count},
        fix="Run again with `NCCL_DEBUG=INFO`, and find in the logs of all ranks why the collective that exchanges the "
        "counts failed.",
        explains=("RUN004",),
        confidence=0.5,
        symptoms=False,
    )


@check(
    id="RUN014",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ModelFacts,),
    needs_peers=True,
    from_logs=_from_logs,
    impacts={r"could not compare": _AT_STARTUP},
    cases=lambda: (
        Passes("one model", running(2, 4)),
        Fails(
            "log of counts that differ",
            logged(f"[rank1]: RuntimeError: {_DDP} Rank 1 has 128 params, while rank 0 has inconsistent 130 params."),
            ranks=(0, 1),
        ),
        Fails(
            "log of a count that was not received",
            logged(f"[rank5]: RuntimeError: {_DDP} Rank 5 has 128 params, while rank 0 has inconsistent 0 params."),
            ranks=(),
        ),
        Passes(
            "stages of a pipeline",
            _other(WIDE, 2, 3).alter(TrainingFacts, data_parallel_size=2),
        ),
        Passes(
            "a custom loop, whose ranks may train different models",
            in_a_loop(_other(WIDE, 1, hosts=1)),
        ),
        Passes(
            "parts of a model, each replicated in a separate group",
            in_a_loop(_other(WIDE, 1, 3), (0, 2), (1, 3)),
        ),
        Passes("a single rank", running(1, 1)),
        Passes("most ranks have none yet", running(2, 2).drop(ModelFacts, ranks=(0, 1, 2))),
        Fails("a wider layer on one rank", _other(WIDE, 3, parameters=396), ranks=(3,)),
        Fails("another order", _other(SWAPPED, 1), ranks=(1,)),
        Fails("another type", _other(HALF, 0), ranks=(0,)),
        Fails("a parameter frozen on one rank", _other(FROZEN, 2), ranks=(2,)),
        Fails("one tensor more", _other((*USUAL, TensorShape("head", (2,), "float32")), 2), ranks=(2,)),
        Fails("one tensor less", _other(USUAL[:1], 2), ranks=(2,)),
        Fails("two ranks, two models", _other(WIDE, 1, hosts=1, parameters=396), ranks=(0, 1)),
        Fails("within one of two groups", in_a_loop(_other(WIDE, 3), (0, 2), (1, 3)), ranks=(1, 3)),
        Fails(
            "the list of tensors ends before the difference",
            running(2, 2).alter(ModelFacts, ranks=(2,), digest="other", count=9000, parameters=10**9),
            ranks=(2,),
        ),
    ),
)
def model_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks wrap the same model: the same parameters in the same order, shapes and types, and the same
    of them frozen.

    Why it hurts: DDP fails when it wraps the model, or it averages gradients of different tensors.
    Fix: Build the model from the same configuration on every rank.
    """
    replicas = replicas_in(job)
    if not replicas:
        yield Skip("no two ranks are known to hold full replicas of one model")
    for ranks in replicas:
        digests: dict[Hashable, list[int]] = {}
        for rank in ranks:
            model = rank.find(ModelFacts)
            if model and model.digest:
                digests.setdefault(model.digest, []).append(rank.number)
        found = split_groups(digests)
        for group in found.groups[1:]:
            yield _finding(job, found, group)


def _finding(job: Job, found: MajoritySplit, group: Group[str]) -> Finding:
    even = found.common is None
    common, other = _model(job, found.groups[0].value), _model(job, group.value)
    others = tuple(sorted(rank for one in found.groups if one is not group for rank in one.ranks)) if even else ()
    verb = "wraps" if len(group.ranks) == 1 else "wrap"
    compared = (
        ("parameters", other.parameters, common.parameters),
        ("tensors", other.count, common.count),
        ("class", other.name, common.name),
    )
    theirs = f" than {ranks_in_words(others)}" if even else ""
    return Finding(
        f"{ranks_in_words(group.ranks)} {verb} a different model{theirs}: {_difference(common, other)}",
        ranks=(*group.ranks, *others),
        evidence={
            **{name: {"here": own, "elsewhere": usual} for name, own, usual in compared if own != usual},
            "hashes": describe(found),
            **({"here_ranks": list(group.ranks)} if even else {}),
        },
        effect=_effect(common, other),
        fix=_fix(job, common, other, ranks_in_words(group.ranks)),
        explains=("RUN001", "RUN002", "RUN004", "RUN007"),
    )


def _effect(common: ModelFacts, other: ModelFacts) -> str:
    """DDP compares numbers and shapes of tensors that need a gradient (``verify_params_across_processes`` in torch's
    reducer.cpp)."""
    if other.count != common.count or other.parameters != common.parameters:
        return _AT_STARTUP
    pairs = tuple(zip(common.tensors, other.tensors, strict=False))
    if any(usual.shape != own.shape or usual.frozen != own.frozen for usual, own in pairs):
        return _AT_STARTUP
    if any(usual.type != own.type for usual, own in pairs):
        return (
            "DDP does not compare types: the ranks exchange tensors of different types, and fail, hang or get wrong "
            "values."
        )
    return "DDP does not compare names: it averages gradients of different tensors without an error."


def _model(job: Job, digest: str) -> ModelFacts:
    return next(model for model, _ in job.facts(ModelFacts) if model.digest == digest)


def _difference(common: ModelFacts, other: ModelFacts) -> str:
    for position, (usual, own) in enumerate(zip_longest(common.tensors, other.tensors)):
        if usual != own:
            if usual and own and usual.name == own.name:
                if _is_alike(usual, own):
                    return f"{own.name} is {'frozen' if own.frozen else 'not frozen'}"
                if usual.shape == own.shape:
                    return f"{own.name} is {own.type}, not {usual.type}"
                if usual.type == own.type:
                    return f"{own.name} has shape {list(own.shape)} instead of {list(usual.shape)}"
                return f"{own.name} is {_kind(own)}, not {_kind(usual)}"
            if usual is None or own is None:
                return f"{own.name} is an additional tensor" if own else f"{usual.name if usual else ''} is missing"
            return f"tensor {position} is {own.name} instead of {usual.name}"
    if other.count != common.count:
        return f"{other.count:,} tensors instead of {common.count:,}"
    return f"{other.parameters:,} parameters instead of {common.parameters:,}"


def _is_alike(usual: TensorShape, own: TensorShape) -> bool:
    return (usual.shape, usual.type) == (own.shape, own.type)


def _kind(tensor: TensorShape) -> str:
    return f"{list(tensor.shape)} {tensor.type}"


def _fix(job: Job, common: ModelFacts, other: ModelFacts, who: str) -> str:
    """How to make the first tensor equal in which the models differ."""
    pairs = zip_longest(common.tensors, other.tensors)
    usual, own = next(((usual, own) for usual, own in pairs if usual != own), (None, None))
    if usual is None and own is None:
        return _FIX_OF_COUNT
    if usual is None or own is None:
        extra = own or usual
        where = f"on {who}, as on the other ranks" if own is None else "on all ranks or on none of them"
        return f"Create {extra.name if extra else ''} {where}, and build the model from the same configuration."
    if usual.name != own.name:
        return f"Create the layers in the same order on {who} as on the other ranks: {own.name} comes too early."
    if _is_alike(usual, own):
        state = "require no gradient" if usual.frozen else "require a gradient"
        return f"Let {own.name} {state} on {who}, as on the other ranks, before the model is wrapped."
    if usual.shape == own.shape:
        return f"Convert the model to {usual.type} on {who}, as on the other ranks, before it is wrapped."
    return _fix_of_shape(job, usual.name)


def _fix_of_shape(job: Job, name: str) -> str:
    if uses_lightning(job):
        return (
            f"Compute the shape of {name} in `prepare_data()` and store it in a file that all ranks read, instead of "
            "computing it from the data of each rank."
        )
    return (
        f"Compute the shape of {name} on one rank, and broadcast it with `torch.distributed.broadcast_object_list` "
        "before the model is built."
    )
