"""Whether a divergence is a call that only some ranks make, or different calls on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doctor.analysis.call_sites import conditions_of
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup
from doctor.core.text import lazy_compile

_LINE = lazy_compile(r"line (\d+)$")


class OneSidedCall(msgspec.Struct, frozen=True):
    """``call``: the call that only the ranks of one variant make. ``others``: what the other ranks call instead.
    ``ranks``: the faulty ranks, which are the minority. ``extra``: the faulty ranks are those that make the call."""

    call: MismatchGroup
    others: MismatchGroup
    ranks: tuple[int, ...]
    extra: bool


def one_sided_call(divergence: Divergence) -> OneSidedCall | None:
    """The call that only some ranks make; ``None`` if all ranks make different calls, or no line is known.

    Evidence, the strongest first: one of the lines is under a condition on the rank and the other is not in another
    branch of it; some ranks made the call that usually follows; one call was never made before and the other one was; a
    framework makes one of them for all ranks; a few ranks skip a call that most ranks make."""
    if len({one.key for one in divergence.variants}) == 1 or not any(one.site.frame for one in divergence.variants):
        return None
    divergence = msgspec.structs.replace(divergence, variants=_distinguished(divergence.variants))
    found = _by_condition(divergence)
    if found is None and not _are_branches(divergence.variants):
        found = _by_habit(divergence) or _by_novelty(divergence)
    if found is None and not divergence.is_even and all(one.is_usual for one in divergence.variants):
        found = _skipped_by(*divergence.variants[:2])
    return found if found and found.call.key != found.others.key else None


def _by_condition(divergence: Divergence) -> OneSidedCall | None:
    under = [one for one in divergence.variants if one.site.condition]
    free = [one for one in divergence.variants if not one.site.condition]
    if not under or not free or _are_branches(divergence.variants):
        return None
    return _made_by(under[0], free[0])


def _distinguished(variants: Sequence[MismatchGroup]) -> tuple[MismatchGroup, ...]:
    """The variants with their innermost condition that not all of them have in common.

    A condition such as ``if local_rank >= 0: main()`` is on the stack of every call."""
    conditions = [conditions_of(one.entry.frames) for one in variants]
    common = set(conditions[0]).intersection(*conditions)
    own = [next((one for one in found if one not in common), "") for found in conditions]
    return tuple(
        msgspec.structs.replace(one, site=msgspec.structs.replace(one.site, condition=condition))
        for one, condition in zip(variants, own, strict=True)
    )


def _are_branches(variants: Sequence[MismatchGroup]) -> bool:
    return any(_is_same_if(variants[0], other) for other in variants[1:])


def _is_same_if(first: MismatchGroup, second: MismatchGroup) -> bool:
    lines = [_LINE.search(one.site.condition) for one in (first, second)]
    files = {one.site.frame.file for one in (first, second) if one.site.frame}
    is_same = bool(lines[0] and lines[1] and lines[0][1] == lines[1][1] and len(files) == 1)
    return is_same and first.site.condition != second.site.condition


def _by_habit(divergence: Divergence) -> OneSidedCall | None:
    usual = next((one for one in divergence.variants if one.key == divergence.usual_next), None)
    others = [one for one in divergence.variants if one is not usual]
    if usual is None:
        return None
    # The others skipped the usual call if theirs is a usual one too; otherwise they made an extra call.
    return _skipped_by(usual, others[0]) if others[0].is_usual else _made_by(others[0], usual)


def _by_novelty(divergence: Divergence) -> OneSidedCall | None:
    shared = set.intersection(*map(_lines_of_user, divergence.variants))
    for is_usual in (
        lambda variant: variant.is_usual,
        lambda variant: not variant.site.own or not _lines_of_user(variant) - shared,
    ):
        usual = [one for one in divergence.variants if is_usual(one)]
        novel = [one for one in divergence.variants if not is_usual(one)]
        if usual and novel:
            return _made_by(novel[0], usual[0])
    return None


def _lines_of_user(variant: MismatchGroup) -> set[tuple[str, int]]:
    """The lines of the user's code on the stack. A framework makes a call by itself if all ranks are in the same ones,
    and others are in a function of the user that it called."""
    return {(frame.file, frame.line) for frame in variant.entry.frames if frame.user}


def _made_by(call: MismatchGroup, others: MismatchGroup) -> OneSidedCall:
    """The ranks that make the call are faulty, unless they are the majority."""
    extra = len(call.ranks) <= len(others.ranks)
    return OneSidedCall(call, others, call.ranks if extra else others.ranks, extra)


def _skipped_by(call: MismatchGroup, others: MismatchGroup) -> OneSidedCall:
    """The ranks that do not make the call are faulty, unless they are the majority."""
    extra = len(call.ranks) < len(others.ranks)
    return OneSidedCall(call, others, call.ranks if extra else others.ranks, extra)
