"""RUN009: DDP found parameters without gradient."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from doctor.api import EventGroup, Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs, ranks_in_words
from doctor.core.text import conjunction
from doctor.testing import Fails, Passes, logged

_UNUSED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error "
    "indicates that your module has parameters that were not used in producing loss. You can enable unused parameter "
    "detection by passing the keyword argument `find_unused_parameters=True` to "
    "`torch.nn.parallel.DistributedDataParallel`, and by"
)
_NOT_NEEDED = (
    "[W reducer.cpp:1050] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any "
    "unused parameters."
)
_READY_TWICE = "mark a variable ready only once"
"""The opposite error of the same reducer, which quotes the same advice."""
_SHOWN = 50
"""Characters of the list of parameters in the summary; the evidence has all of them."""
_KINDS = ("ddp.unused", "pl.unused", "ddp.unused.list", "ddp.unused.hint")


@check(
    id="RUN009",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="M",
    cases=lambda: (
        Passes("find_unused_parameters is set, and none is unused", logged(_NOT_NEEDED)),
        Passes(
            "a parameter that is used in two backward passes",
            logged(
                "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the "
                "following reasons: 3) Incorrect unused parameter detection, which making sure all `forward` function "
                "outputs participate in calculating loss avoids."
            ),
            silent=False,
        ),
        Fails(
            "by index",
            logged(_UNUSED, "Parameter indices which did not receive grad for rank 1: 130 131"),
            ranks=(1,),
        ),
    ),
)
def parameters_unused(job: Job) -> Iterator[Verdict]:
    """Ask whether every parameter that DDP reduces receives a gradient.

    Why it hurts: DDP raises an error in the next step, because the reduction of the gradients never completes.
    Fix: Freeze unused parameters with `requires_grad_(False)` before DDP wraps the model, or set
    `find_unused_parameters=True` in `DistributedDataParallel` (Lightning:
    `strategy="ddp_find_unused_parameters_true"`).
    """
    groups = [one for kind in _KINDS for one in event_groups(job, kind)]
    events = tuple(event for one in groups for event in one.events if _READY_TWICE not in event.text)
    if events:
        everything = EventGroup(events[0].kind, events)
        which: dict[str, str] = {}
        for event in everything.events:
            what = event.value("names") or event.value("idx")
            if what:
                words = what.strip() if event.value("names") else f"indices {what.strip()}"
                which.setdefault(event.value("rank") or event.value("rank2") or "", words[:400])
        by_rank = {rank: what for rank, what in which.items() if rank}
        differ = len(set(by_rank.values())) > 1
        yield finding_from_logs(
            everything,
            _claim(which, differ),
            ranks=_ranks(which),
            evidence={"without_gradient": which} if len(which) > 1 or _is_long(which) else {},
            fix=_fix(everything, differ, _parameters(which)),
            confidence=0.95,
        )


def _is_long(which: dict[str, str]) -> bool:
    return any(len(what) > _SHOWN for what in which.values())


def _claim(which: dict[str, str], differ: bool) -> str:
    """``Rank 1 computed no gradient for fc.weight and fc.bias``; ``which``: rank, or empty, -> names or indices."""
    if not which:
        return "Some parameters of the DDP model received no gradient"
    if differ:
        return "Ranks computed no gradient for different parameters"
    ranks = _ranks(which)
    return f"{ranks_in_words(ranks) if ranks else 'a rank'} computed no gradient for {_parameters(which)}"


def _ranks(which: dict[str, str]) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in which if rank.isdecimal() and len(rank) < 8))


def _parameters(which: dict[str, str]) -> str:
    """``fc.weight and fc.bias``, ``parameters 130 and 131``; empty if no message names them."""
    named = next(iter(which.values()), "")
    are_indices = named.startswith("indices ")
    words = named.removeprefix("indices ").split() if are_indices else [one for one in named.split(", ") if one]
    if len(", ".join(words)) <= _SHOWN:
        names = conjunction(words)
    else:
        names = shorten(", ".join(words), _SHOWN, placeholder=" …")
    return f"parameter{'s' if len(words) > 1 else ''} {names}" if are_indices else names


def _fix(group: EventGroup, differ: bool, names: str) -> str:
    if differ:
        return (
            "Set `find_unused_parameters=True` in `DistributedDataParallel`, or add the output of skipped parts to the "
            "loss with a factor of 0, because the ranks skip different parts of the model."
        )
    if any("find_unused_parameters=True` is enabled" in event.text for event in group.events):
        return (
            "Return from `forward` only tensors that the loss uses, directly or in lists, tuples and dicts, because "
            "`find_unused_parameters=True` is already set."
        )
    if names and not names.endswith("…"):
        return (
            f"Freeze {names} with `requires_grad_(False)` before DDP wraps the model, or set "
            "`find_unused_parameters=True` in `DistributedDataParallel` (Lightning: "
            '`strategy="ddp_find_unused_parameters_true"`).'
        )
    return ""
