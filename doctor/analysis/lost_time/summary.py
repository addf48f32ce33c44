"""The lost time of a run: by cause and rank, and what would help against the largest losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import get_args

from doctor.analysis.lost_time.accounts import Accounts
from doctor.analysis.lost_time.advice import loss_words
from doctor.analysis.stats.rank_roles import same_role
from doctor.core.facts import RunMemoryFacts, StepFacts
from doctor.core.job import Job
from doctor.core.report_document import LargestLoss, LossCause, LostByCause, LostByRank, LostTime

MOST_LISTED = 1024
SHOWN, LEAST_SHOWN = 3, 0.01
"""Number of the largest losses, and the least share of the rank-seconds that one must have."""
MAIN = 0.1
"""Least share of the largest part of a loss that a rank must have to be named for it."""
CAUSES: tuple[LossCause, ...] = get_args(LossCause)
BASIS = (
    "share of the rank-seconds (ranks x seconds) in which ranks did their own work: 1 - (lost + unmeasured) / "
    "rank-seconds; seconds is the longest time of a rank since its first training batch"
)


def lost_time(job: Job) -> LostTime | None:
    """Return the lost time of a run; ``None`` if no rank has recorded a training batch."""
    ranks = {rank.number: rank for rank in job.ranks if (steps := rank.find(StepFacts)) and steps.spans}
    if not ranks:
        return None
    accounts = Accounts()
    groups = [[rank for rank in group if rank.number in ranks] for group in same_role(job)]
    grouped = {rank.number for group in groups for rank in group}
    for group in (*filter(None, groups), *([rank] for number, rank in ranks.items() if number not in grouped)):
        accounts.enter(group, len(ranks))
    seconds = max(accounts.total.values())
    for number, own in accounts.total.items():
        accounts.lose(number, "idle", seconds - own)
    return _summary(job, accounts, seconds)


def _summary(job: Job, accounts: Accounts, seconds: float) -> LostTime:
    count = len(accounts.total)
    whole = count * seconds
    by_rank = [_by_rank(rank, accounts, seconds) for rank in accounts.total]
    lost = sum(sum(one.lost.values()) for one in by_rank)
    unmeasured = sum(one.unmeasured for one in by_rank)
    own = max(0.0, whole - lost - unmeasured)
    notes = list(accounts.hidden)
    if job.world_size > count:
        notes.append(f"{job.world_size - count} of {job.world_size} ranks recorded no training batch: not counted")
    return LostTime(
        ranks=count,
        seconds=round(seconds, 3),
        rank_seconds=round(whole, 3),
        own=round(own, 3),
        lost=round(lost, 3),
        unmeasured=round(unmeasured, 3),
        efficiency=round(own / whole, 4) if whole else 0.0,
        at_most=bool(accounts.hidden),
        basis=BASIS,
        causes=tuple(_by_cause(cause, accounts, whole) for cause in CAUSES),
        largest=tuple(_largest(job, accounts, whole)),
        by_rank=tuple(sorted(by_rank, key=lambda one: (one.own, one.rank)))[:MOST_LISTED],
        gpu_busy=_gpu_busy(job),
        notes=tuple(notes),
    )


def _by_rank(rank: int, accounts: Accounts, seconds: float) -> LostByRank:
    amounts = {cause: round(accounts.of(rank, cause), 3) for cause in CAUSES}
    lost = {cause: amount for cause, amount in amounts.items() if amount}
    unmeasured = round(accounts.unmeasured[rank], 3)
    return LostByRank(rank, round(max(0.0, seconds - sum(lost.values()) - unmeasured), 3), lost, unmeasured)


def _by_cause(cause: LossCause, accounts: Accounts, whole: float) -> LostByCause:
    if cause == "communication" and not accounts.knows_communication and len(accounts.total) > 1:
        return LostByCause(cause, None, None)
    seconds = sum(accounts.of(rank, cause) for rank in accounts.total)
    return LostByCause(cause, round(seconds, 3), round(seconds / whole, 4) if whole else 0.0)


def _gpu_busy(job: Job) -> float | None:
    """Return the mean utilization of the ranks' GPUs, 0 to 1."""
    means = [
        fmean(memory.utilization)
        for rank in job.ranks
        if (memory := rank.find(RunMemoryFacts)) is not None and memory.utilization
    ]
    return round(fmean(means) / 100, 3) if means else None


def _largest(job: Job, accounts: Accounts, whole: float) -> Iterable[LargestLoss]:
    """Yield the largest losses: waiting for one rank counts together, and so does what all ranks do alike."""
    sums: dict[tuple[LossCause, int | None, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for losses in accounts.lost.values():
        for loss, seconds in losses.items():
            one_culprit = loss.cause in ("stragglers", "evaluation")
            because = loss.because if loss.cause == "stragglers" else ""
            sums[loss.cause, loss.culprit if one_culprit else None, because][loss.culprit] += seconds
    ordered = sorted(sums.items(), key=lambda pair: -sum(pair[1].values()))
    for (cause, _, because), by_rank in ordered[:SHOWN]:
        seconds, most = sum(by_rank.values()), max(by_rank.values())
        if seconds >= LEAST_SHOWN * whole:
            ranks = tuple(sorted(rank for rank, amount in by_rank.items() if amount >= MAIN * most))
            words = loss_words(job, cause, ranks, because)
            share = round(seconds / whole, 4)
            yield LargestLoss(cause, round(seconds, 3), share, ranks, words.summary, words.help, words.check)
