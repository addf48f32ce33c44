"""Ranks whose wait for a key of the store timed out: another rank did not do its part in time."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.logging_advice import recorder_switch
from doctor.analysis.logs.root_event import LaterEvents
from doctor.analysis.logs.store_keys import rank_of_key, stage_of_key
from doctor.api import EventGroup, Finding, Job, Severity, finding_from_logs, ranks_in_words
from doctor.facts import Event

STORE_WAITS = ("torch.store.wait", "torch.store.wait.old", "torch.nccl.storekey")
"""Messages of a wait for a key that timed out."""


def store_waits(job: Job) -> Iterator[Finding]:
    """The waits of a job for keys of a started group, as one finding."""
    evidence = job.evidence
    if evidence is None or LaterEvents(evidence).is_peaceful:
        return
    waits = tuple(one for one in evidence.of(*STORE_WAITS) if has_timed_out(one))
    if not waits:
        return
    group = EventGroup(waits[0].kind, waits)
    missing = tuple(sorted({rank for one in waits if (rank := _publisher(one)) is not None} - set(group.ranks)))
    waiting = ranks_in_words(group.ranks) if group.ranks else "ranks"
    awaited = ranks_in_words(missing) if missing else "another rank"
    seconds = _seconds(group)
    limit = f" of {seconds:g} s" if seconds else ""
    yield finding_from_logs(
        group,
        f"{waiting} waited for {awaited} in the store until the timeout{limit}: {awaited} did not start the same "
        "collective or barrier",
        ranks=missing,
        evidence={"keys": sorted(set(filter(None, map(_key, waits))))[:8], "ranks_that_waited": list(group.ranks)},
        fix=f"Likely causes, in this order: {awaited} failed or was killed before, see the end of its log and "
        "`dmesg -T`; it was busy for longer than the timeout (tokenizing, a download, a checkpoint, compilation), do "
        "that before `init_process_group` or raise its `timeout`; the ranks do not run the same collectives, see "
        "conditions on the rank. "
        f"For the next run: `export {recorder_switch(job)} TORCH_DISTRIBUTED_DEBUG=DETAIL`.",
        severity=Severity.WARNING,
        confidence=0.5 if missing else 0.4,
        explains=("RUN012", "RUN016"),
        symptoms=False,
    )


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
