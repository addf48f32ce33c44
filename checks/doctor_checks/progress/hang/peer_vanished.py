"""RUN012: ranks lost another one, or the store that it kept: a consequence."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.logs.root_event import LOST_PEERS, LaterEvents, exceptions, first_trouble, nature_of_exception
from doctor.api import EventGroup, Job, Scope, Severity, Verdict, check, finding_from_logs, line_of, ranks_in_words
from doctor.testing import Fails, Passes, logged

_RECV = (
    "[rank{rank}]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87, addr=[node1]:40242, "
    "remote=[node0]:48749): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
    "or crash?"
)
_FLAG = (
    '[rank2]:[W ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0 Rank 2] Failed to check the "should dump" flag on '
    "TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe"
)


@check(
    id="RUN012",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="M",
    cases=lambda: (
        Passes(
            "the cause is logged",
            logged("[rank0]: ValueError: the loss is no number", _RECV.format(rank=1)),
            silent=False,
        ),
        Fails("the store of rank 0 is gone", logged(_RECV.format(rank=1), _FLAG), ranks=(1, 2)),
    ),
)
def peer_vanished(job: Job) -> Iterator[Verdict]:
    """Ask whether ranks lost another one, or the store that rank 0 keeps.

    Why it hurts: these errors stand last and largest in a log, and tell of no fault of the ranks that print them.
    Fix: look for the rank that they do not come from: the first error in time, its own log, `dmesg -T` and the exit
    code of its process; rank 0 keeps the store.
    """
    if job.evidence is None:
        return
    raised = {id(event) for event in exceptions(job.evidence) if nature_of_exception(event) == "peer"}
    lost = tuple(event for event in job.evidence.events if event.kind in LOST_PEERS or id(event) in raised)
    if lost:
        group = EventGroup(lost[0].kind, lost)
        first = first_trouble(job)
        places = {(event.file, event.line) for event in lost}
        cause = first if first is not None and (first.file, first.line) not in places else None
        peaceful = LaterEvents(job.evidence).is_peaceful
        who = ranks_in_words(group.ranks) if group.ranks else "ranks"
        found = diagnose_stall(job)
        is_diagnosed = found is not None and not (found.ending is not None and found.ending.nature == "peer")
        yield finding_from_logs(
            group,
            f"{who} lost a peer or the store"
            + (
                ", after the run had ended well"
                if peaceful
                else f", after {line_of(cause)[:160]}"
                if cause
                else ": another rank ended before, and why is not told here"
            ),
            evidence={"first_trouble": line_of(cause) if cause else None},
            severity=Severity.INFO if peaceful or cause or is_diagnosed else Severity.WARNING,
            confidence=0.7,
            symptoms=False,
            fix="" if cause is None else "See the first error; these lines follow from it.",
        )
