"""Where the ranks are whose stacks were collected, for the report."""

from __future__ import annotations

from doctor.analysis.hang.stack_groups import call_tree, stack_groups
from doctor.core.facts import ProgressFacts
from doctor.core.job import Job
from doctor.core.report_document import RankStacks
from doctor.core.text import ranks_in_words


def collected_stacks(job: Job) -> RankStacks | None:
    """Return the groups of the ranks of ``job`` and their merged stacks; ``None`` if no stacks were collected."""
    found = {rank.number: progress for rank in job.ranks if (progress := rank.find(ProgressFacts)) is not None}
    sampled = {rank: progress for rank, progress in found.items() if progress.sampled}
    if not sampled:
        return None
    guessed = tuple(sorted(rank for rank, progress in sampled.items() if progress.guessed))
    notes = (f"rank number{'s' if len(guessed) > 1 else ''} guessed: {ranks_in_words(guessed)}",) if guessed else ()
    return RankStacks(groups=stack_groups(job), calls=call_tree(job), notes=notes)
