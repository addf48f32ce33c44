"""Ranks whose wait for a key of the store timed out: another rank did not do its part in time."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.root_event import LaterEvents
from doctor.analysis.logs.store_keys import rank_of_key, stage_of_key
from doctor.api import EventGroup, Finding, Job, Severity, finding_from_logs, ranks_in_words
from doctor.facts import Event

STORE_WAITS = ("torch.store.wait", "torch.store.wait.old", "torch.nccl.storekey")
"""Messages of a wait for a key that timed out."""


def waits_for_a_rank(job: Job) -> Iterator[Finding]:
    """The waits of a job for keys that a known rank sets, as one finding."""
    group = timed_out_waits(job)
    if group is None:
        return
    missing = missing_ranks(group)
    if not missing:
        return
    yield finding_from_logs(
        group,
        waiting_text(group),
        ranks=missing,
        evidence=waiting_evidence(group),
        fix=waiting_fix(missing),
        severity=Severity.WARNING,
        confidence=0.5,
        explains=("RUN012", "RUN016"),
        symptoms=False,
    )


def timed_out_waits(job: Job) -> EventGroup | None:
    """The waits for keys of a started group that timed out, unless the run ended in order."""
    evidence = job.evidence
    if evidence is None or LaterEvents(evidence).is_peaceful:
        return None
    waits = tuple(one for one in evidence.of(*STORE_WAITS) if has_timed_out(one))
    return EventGroup(waits[0].kind, waits) if waits else None


def missing_ranks(group: EventGroup) -> tuple[int, ...]:
    """The ranks that set the keys and did not wait themselves, as far as the messages show them."""
    return tuple(sorted({rank for one in group.events if (rank := _publisher(one)) is not None} - set(group.ranks)))


def waiting_text(group: EventGroup) -> str:
    """``ranks 1-3 timed out after 600 s waiting for rank 0 to set a key in the store``."""
    waiting = ranks_in_words(group.ranks) if group.ranks else "a rank"
    missing = missing_ranks(group)
    seconds = _seconds(group)
    limit = f" after {seconds:g} s" if seconds else ""
    awaited = ranks_in_words(missing) if missing else "another rank"
    return f"{waiting} timed out{limit} waiting for {awaited} to set a key in the store"


def waiting_evidence(group: EventGroup) -> dict[str, object]:
    """The keys that the ranks waited for."""
    keys = sorted(set(filter(None, map(_key, group.events))))
    return {"keys": keys[:8]}


def waiting_fix(missing: tuple[int, ...]) -> str:
    """Where to look first, and what to set in the next run."""
    several = len(missing) > 1
    where = (
        f"the log{'s' if several else ''} of {ranks_in_words(missing)} what ended or delayed the "
        f"process{'es' if several else ''}"
        if missing
        else "the logs of the other ranks which of them ended or was delayed"
    )
    return f"Find in {where}, or run again with these variables:\n{_VERBOSE}"


# https://docs.pytorch.org/docs/stable/distributed.html, "Logging"
_VERBOSE = "export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL"


def has_timed_out(event: Event) -> bool:
    """Whether a wait of a started group timed out, and the store was not lost."""
    error = event.value("err")
    return stage_of_key(_key(event)) == "collective" and (error is None or "imeout" in error)


def _key(event: Event) -> str:
    return (event.value("keys") or event.value("key") or "").strip()


def _publisher(event: Event) -> int | None:
    """The rank that sets the key, if that follows from the message."""
    if event.kind == "torch.nccl.storekey":
        root = event.value("root")
        return int(root) if root is not None and len(root) < 7 else None
    return rank_of_key(_key(event))


def _seconds(group: EventGroup) -> float | None:
    ms = group.value("ms")
    return int(ms) / 1000 if ms is not None and len(ms) < 12 else None
