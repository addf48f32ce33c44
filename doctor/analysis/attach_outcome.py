"""Whether the job that was attached to makes progress, and what of it could not be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from doctor.analysis.attached_job import AttachedRank, attached_ranks
from doctor.analysis.hang.stack_groups import call_tree, stack_groups
from doctor.analysis.process_movement import movement_of
from doctor.analysis.step_rate import step_rate
from doctor.core.facts import AttachedProcess, AttachFacts, ProgressFacts
from doctor.core.job import Job
from doctor.core.report_document import RankStacks, RunOutcome
from doctor.core.text import ranks_in_words

MOST_NOTES = 16


def outcome_of_attach(members: Job) -> Callable[[Job, Collection[tuple[str, int]], float], RunOutcome]:
    """Return what tells the outcome of the job that the ``members`` attached to (``doctor.session.OutcomeOf``)."""
    ranks = attached_ranks(members)
    return lambda job, _places, _at: _outcome(job, ranks)


def _outcome(job: Job, ranks: Collection[AttachedRank]) -> RunOutcome:
    unread = [rank for rank in ranks if rank.movement.kind == "unread" or rank.process.refused]
    moving = [rank.number for rank in ranks if rank.movement.is_progress]
    if unread:
        several = len({rank.host for rank in ranks}) > 1
        return RunOutcome("unknown", _unread_in_words(unread), collect=_remedies(unread, several_hosts=several))
    if have_ended(ranks):
        return _of_ended(ranks)
    if len(moving) == len(ranks):
        verb = "make" if len(moving) > 1 else "makes"
        return RunOutcome("running", f"{ranks_in_words(tuple(moving))} {verb} progress{_pace(ranks)}")
    still = [rank for rank in ranks if not rank.movement.is_progress and rank.movement.kind != "ended"]
    if moving:
        left = f", {ranks_in_words(tuple(rank.number for rank in still))} did not" if still else ""
        ended = [rank.number for rank in ranks if rank.movement.kind == "ended"]
        gone = f", {ranks_in_words(tuple(ended))} ended" if ended else ""
        return RunOutcome("running", f"{ranks_in_words(tuple(moving))} made progress{left}{gone}")
    times = [rank.movement.seconds for rank in still]
    known = [seconds for seconds in times if seconds is not None]
    watch = "Attach again with `--watch 60`: a rank that is only slow will have moved by then"
    native = "Attach with `--native` to see the native function that each rank is in"
    return RunOutcome(
        "unknown",
        f"no rank made progress for {min(known):.0f} s" if known else "one sample does not show whether ranks move",
        collect=(watch,) if any(map(_was_asked_for_native, still)) else (watch, native),
    )


def _remedies(unread: Iterable[AttachedRank], *, several_hosts: bool) -> tuple[str, ...]:
    """What allows to read the ranks: a command that names a process once a host, with the PIDs of all its ranks."""
    options: dict[tuple[str, str, str], list[str]] = {}
    for rank in unread:
        before, option, after = rank.process.remedy.partition(f"--pid {rank.process.pid}")
        place = f"  # on {rank.host}" if option and several_hosts else ""
        if before:
            options.setdefault((before, after, place), []).append(option)
    return tuple(before + " ".join(found).strip() + after + place for (before, after, place), found in options.items())


def _was_asked_for_native(rank: AttachedRank) -> bool:
    """Whether native frames were asked for."""
    process = rank.process
    return bool(process.native_refused) or any(thread.native for one in process.samples for thread in one.threads)


def have_ended(ranks: Collection[AttachedRank]) -> bool:
    """Whether all ranks ended before or while they were read."""
    return bool(ranks) and all(rank.movement.kind == "ended" for rank in ranks)


def _of_ended(ranks: Collection[AttachedRank]) -> RunOutcome:
    """A job without processes: healthy only if it is known of each rank that it moved or ended without an error."""
    unseen = [rank.number for rank in ranks if rank.process.exit_code != 0 and not _moved_before(rank.process)]
    if not unseen:
        return RunOutcome("ended", "all ranks made progress until the job ended")
    return RunOutcome(
        "unknown",
        f"the job ended while it was read: {ranks_in_words(tuple(unseen))} could not be seen to make progress",
    )


def _moved_before(process: AttachedProcess) -> bool:
    before = movement_of(msgspec.structs.replace(process, ended=""))
    return len(process.samples) > 1 and before.is_progress


def _pace(ranks: Collection[AttachedRank]) -> str:
    """``, 2.5 steps/s``."""
    rate = step_rate(rank.process for rank in ranks)
    return f", {rate.per_second:.3g} steps/s" if rate is not None else ""


def _unread_in_words(unread: Collection[AttachedRank]) -> str:
    why = next((rank.process.refused for rank in unread if rank.process.refused), "no stack was returned")
    numbers = ranks_in_words(tuple(rank.number for rank in unread))
    return f"the stack{'s' if len(unread) > 1 else ''} of {numbers} could not be read: {why.rstrip('.')}"


def rank_stacks(members: Job, job: Job) -> RankStacks:
    """Where the ranks of ``job`` are, which the ``members`` attached to, and what was not read."""
    ranks = attached_ranks(members)
    rate = step_rate(rank.process for rank in ranks) if all(rank.movement.is_progress for rank in ranks) else None
    return RankStacks(
        job=_job_in_words(ranks, job),
        steps_per_second=rate.per_second if rate is not None else None,
        steps_from=rate.source if rate is not None else "",
        groups=stack_groups(job),
        calls=call_tree(job),
        notes=tuple(dict.fromkeys(_notes(members, ranks, job)))[:MOST_NOTES],
    )


def _job_in_words(ranks: Collection[AttachedRank], job: Job) -> str:
    """``train.py · launched by torchrun · 8 ranks on 2 hosts · job 4711``."""
    processes = [rank.process for rank in ranks]
    programs = list(dict.fromkeys(process.program.rpartition("/")[2] for process in processes if process.program))
    ids = list(dict.fromkeys(process.job for process in processes if process.job))
    read = (
        rank for rank in job.ranks if (progress := rank.find(ProgressFacts)) is not None and progress.pid is not None
    )
    hosts = len({rank.host.identity for rank in read})
    parts = [
        ", ".join(programs[:3]),
        f"launched by {job.launcher}" if job.launcher != "none" else "",
        f"{job.world_size} rank{'s' if job.world_size > 1 else ''}",
        f"{hosts} host{'s' if hosts > 1 else ''} attached" if hosts else "",
        f"job {', '.join(ids[:3])}" if ids else "",
    ]
    return " · ".join(part for part in parts if part)


def _notes(members: Job, ranks: Collection[AttachedRank], job: Job) -> Iterable[str]:
    if job.ungathered:
        missing = sorted(set(range(job.world_size)) - {rank.number for rank in job.ranks})
        yield f"not attached: {ranks_in_words(tuple(missing))}{_hosts_of(ranks, len(missing))}"
    guesses = [rank for rank in ranks if rank.process.guessed]
    guessed, ways = [rank.number for rank in guesses], {rank.process.rank_from for rank in guesses} - {""}
    if guessed:
        numbers = "numbers" if len(guessed) > 1 else "number"
        order = f"by the {next(iter(ways))}" if len(ways) == 1 else "without the variables of a launcher"
        yield f"rank {numbers} guessed {order}: {ranks_in_words(tuple(guessed))}"
    yield from _without_native(ranks)
    for member in members.ranks:
        facts = member.find(AttachFacts)
        if facts is not None:
            yield from facts.notes
            if facts.unreadable:
                count = f"{facts.unreadable} process{'' if facts.unreadable == 1 else 'es'}"
                yield f"environment or command line not readable: {count} on {member.host.name}"


def _without_native(ranks: Iterable[AttachedRank]) -> Iterable[str]:
    refused: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.process.native_refused:
            refused.setdefault(rank.process.native_refused, []).append(rank.number)
    for reason, numbers in refused.items():
        yield f"native frames of {ranks_in_words(tuple(numbers))} could not be read: {reason.rstrip('.')}"


def _hosts_of(ranks: Iterable[AttachedRank], missing: int) -> str:
    """`` (2 hosts)``, by the number of ranks that a host has."""
    sizes = [rank.process.local_world_size for rank in ranks]
    size = next((size for size in sizes if size), None)
    if not size or missing % size:
        return ""
    return f" ({missing // size} host{'s' if missing > size else ''})"
