"""The lost time of a run, in words: a headline, a table by cause, the largest losses, a table by rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.core.report_document import LossCause, LostTime
from doctor.report.formatting import sentence

TITLE = "Lost time"
CAUSES: dict[LossCause, str] = {
    "data": "waiting for data",
    "stragglers": "waiting for slower ranks",
    "checkpoints": "checkpoints",
    "evaluation": "waiting for ranks that evaluate",
    "communication": "communication (estimated)",
    "idle": "idle",
}
MOST_RANKS = 32
"""Ranks of the table; JSON has up to 1024."""
COLUMNS = ("rank", "own work", *CAUSES.values(), "not measured")


def lost_headline(lost: LostTime) -> str:
    """Return ``32 % of 6,208 rank-seconds lost (2 ranks for 3,104 s); scaling efficiency 68 %``."""
    share = lost.lost / lost.rank_seconds if lost.rank_seconds else 0.0
    ranks = "1 rank" if lost.ranks == 1 else f"{lost.ranks} ranks"
    most = "at most " if lost.at_most else ""
    return (
        f"{share:.0%} of {amount(lost.rank_seconds)} rank-seconds lost ({ranks} for {amount(lost.seconds)} s); "
        f"scaling efficiency {most}{lost.efficiency:.0%}"
    )


def cause_rows(lost: LostTime) -> list[tuple[str, str, str]]:
    """Return cause, rank-seconds and share, all causes in a fixed order."""
    rows = []
    for one in lost.causes:
        known = one.seconds is not None and one.share is not None
        seconds, share = (amount(one.seconds or 0.0), f"{one.share:.1%}") if known else ("not measured", "")
        if one.cause == "stragglers" and lost.at_most:
            seconds = f"at least {seconds}"
        rows.append((CAUSES[one.cause], seconds, share))
    if lost.unmeasured:
        rows.append(("not measured (steps too fast to follow)", amount(lost.unmeasured), _share(lost.unmeasured, lost)))
    return rows


def largest_lines(lost: LostTime) -> Iterator[tuple[str, str]]:
    """Yield the largest losses, and what would help against each."""
    for one in lost.largest:
        more = f" See `doctor explain {one.check}`." if one.check else ""
        yield f"{amount(one.seconds)} rank-seconds ({one.share:.0%}): {one.summary}", f"{one.help}{more}"


def rank_table(lost: LostTime) -> list[list[str]]:
    """Return the rows of :data:`COLUMNS` for the ranks that lost most, in seconds."""
    known = {one.cause for one in lost.causes if one.seconds is not None}
    rows = []
    for one in lost.by_rank[:MOST_RANKS]:
        causes = [amount(one.lost.get(cause, 0.0)) if cause in known else "" for cause in CAUSES]
        rows.append([str(one.rank), amount(one.own), *causes, amount(one.unmeasured)])
    return rows


def lost_notes(lost: LostTime) -> Iterator[str]:
    """Yield how the efficiency is computed, what is not in it, and how busy the GPUs were."""
    yield sentence(f"scaling efficiency is the {lost.basis}")
    yield from map(sentence, lost.notes)
    if lost.gpu_busy is None:
        yield "GPU busy time is not known: NVML reported none."
    else:
        yield f"GPUs were busy for {lost.gpu_busy:.0%} of the time, on average of NVML's newest readings."


def amount(seconds: float) -> str:
    """Return ``0.4``, ``31.2`` or ``6,208``."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


def _share(seconds: float, lost: LostTime) -> str:
    return f"{seconds / lost.rank_seconds:.1%}" if lost.rank_seconds else ""
