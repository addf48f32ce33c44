"""RUN012: ranks lost their connection to a peer or to the store: a consequence."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.logs.error_lines import has_continued, orderly_ends
from doctor.analysis.logs.root_event import (
    EXCEPTION,
    TIMED_OUT,
    LaterEvents,
    exceptions,
    first_trouble,
    lost_peers,
    nature_of_exception,
)
from doctor.api import EventGroup, Job, Scope, Severity, Verdict, check, finding_from_logs, line_of, ranks_in_words
from doctor.facts import Event
from doctor.testing import Fails, Passes, logged
from doctor_checks.progress.hang._store_waits import (
    STORE_WAITS,
    missing_ranks,
    timed_out_waits,
    waiting_evidence,
    waiting_fix,
    waiting_text,
)

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
    impacts={
        r"launcher ended its processes": (
            "The job ends, and the messages of the launcher do not name the rank that failed first."
        ),
        r"to set a key in the store": "The waiting rank fails, which ends the job.",
    },
    cases=lambda: (
        Passes(
            "the cause is logged",
            logged("[rank0]: ValueError: the loss is not finite", _RECV.format(rank=1)),
            silent=False,
        ),
        Passes(
            "a launcher that ends its processes after one failed",
            logged("srun: error: node3: task 3: Exited with exit code 1", "srun: Terminating StepId=4711.0"),
        ),
        Fails(
            "a launcher that ends its processes, and nothing else",
            logged(
                "W1218 20:27:21.4 140 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 124 "
                "closing signal SIGTERM"
            ),
        ),
        Fails(
            "a wait in the store that names no key",
            logged("[rank1]: torch.distributed.DistStoreError: Socket Timeout"),
            ranks=(1,),
        ),
        Fails("the store of rank 0 is gone", logged(_RECV.format(rank=1), _FLAG), ranks=(1, 2)),
    ),
)
def peer_vanished(job: Job) -> Iterator[Verdict]:
    """Ask whether ranks lost their connection to a peer, or to the store that rank 0 hosts.

    Why it hurts: ranks that lose a connection fail, and their errors do not show why the other rank ended.
    Fix: Read the end of the log of the rank that does not report a lost connection (rank 0 if the store was lost).
    """
    if job.evidence is None:
        return
    raised = {id(event) for event in exceptions(job.evidence) if nature_of_exception(event) == "peer"}
    gone = raised.union(map(id, lost_peers(job.evidence)))
    lost = tuple(event for event in job.evidence.events if id(event) in gone)
    if lost:
        group = EventGroup(lost[0].kind, lost)
        first = first_trouble(job)
        places = {(event.file, event.line) for event in lost}
        cause = first if first is not None and (first.file, first.line) not in places else None
        peaceful = LaterEvents(job.evidence).is_peaceful
        who = ranks_in_words(group.ranks) if group.ranks else "a rank"
        of_store = {(event.file, event.line) for event in lost if event.kind in _OF_STORE}
        is_store = of_store == places
        what, ended = ("the store", "its process") if is_store else ("a peer or the store", "another rank")
        claim = f"{who} lost {what}"
        found = diagnose_stall(job)
        is_diagnosed = found is not None and not (found.ending is not None and found.ending.nature == "peer")
        yield finding_from_logs(
            group,
            claim
            + (
                " after the run had ended normally"
                if peaceful
                else _after(cause, _MOST - len(claim))
                if cause
                else f": {ended} probably ended, and the logs do not show why"
            ),
            evidence={"first_trouble": line_of(cause) if cause else None},
            severity=Severity.INFO if peaceful or cause or is_diagnosed else Severity.WARNING,
            confidence=0.7,
            symptoms=False,
            effect="None, because the run had ended normally."
            if peaceful
            else f"The lost connection is a consequence: {who if group.ranks else 'the rank that logged it'} "
            f"{'are' if len(group.ranks) > 1 else 'is'} not at fault."
            if cause
            else "",
            fix="Ignore these errors, which follow from the end of the other processes."
            if peaceful
            else f"Fix the first error{_where(cause)}."
            if cause
            else "Read the ends of the logs of rank 0 and of the launcher on its host: one of them serves the store."
            if is_store
            else "",
        )
    elif waits := _open_waits(job):
        yield finding_from_logs(
            waits,
            waiting_text(waits),
            evidence=waiting_evidence(waits),
            fix=waiting_fix(()),
            confidence=0.5,
            symptoms=False,
        )
    elif takedown := _takedown(job):
        yield finding_from_logs(
            EventGroup(takedown[0].kind, takedown),
            "The launcher ended its processes, but this log does not show why",
            ranks=(),
            fix="Run `doctor diagnose` on the logs of all ranks and hosts to find the process that failed first.",
            confidence=0.35,
            symptoms=False,
        )


_OF_STORE = ("torch.store.recv0", "torch.store.op_failed", "torch.nccl.dump_flag_store")
"""Lost connections to the store. Rank 0 serves it, or the agent of torchrun on its host
(``TORCHELASTIC_USE_AGENT_STORE`` in torch/distributed/rendezvous.py)."""
_MOST = 100
"""Characters of a summary."""


def _where(event: Event) -> str:
    """`` on rank 0 (job.log:1)``."""
    return f"{f' on rank {event.rank}' if event.rank is not None else ''} ({event.file}:{event.line})"


def _after(cause: Event, most: int) -> str:
    """`` after an error on rank 0 (ValueError: the loss is not finite)``, in ``most`` characters."""
    who = f" on rank {cause.rank}" if cause.rank is not None else ""
    start = f" after an error{who}"
    return f"{start} ({shorten(cause.text, max(20, most - len(start) - 3), placeholder=' …')})"


def _open_waits(job: Job) -> EventGroup | None:
    """The waits in the store for a rank that is not known; RUN001 reports the others."""
    waits, first = timed_out_waits(job), first_trouble(job)
    is_first = first is None or first.kind in (*TIMED_OUT, *STORE_WAITS)
    return waits if waits is not None and is_first and not missing_ranks(waits) else None


def _takedown(job: Job) -> tuple[Event, ...]:
    """Messages of a launcher that ends its processes, if nothing in the logs shows why."""
    evidence = job.evidence
    if evidence is None or evidence.of(*_REASONS) or first_trouble(job) is not None or orderly_ends(evidence, ()):
        return ()
    if evidence.of("elastic.sigexc", "elastic.sigrecv"):  # ENV016, ENV017
        return ()
    found = evidence.of(*_TAKEDOWNS)
    is_by_user = any(one.value("type") == "KeyboardInterrupt" for one in evidence.of(EXCEPTION))
    if is_by_user or any(one.value("sig") in _OF_USERS for one in found):
        return ()
    return tuple(one for one in found if not has_continued(evidence, one))


_TAKEDOWNS = ("elastic.closing", "launch.takedown", "slurm.aborted")
_OF_USERS = ("1", "2", "SIGHUP", "SIGINT", "Signals.SIGHUP", "Signals.SIGINT")
"""Signals of a terminal: ENV016, or a user who interrupted the run."""
_REASONS = (
    "elastic.child_line",
    "launch.exit_code",
    "launch.failed",
    "launch.hangup",
    "mpi.abort",
    "pl.child",
    "pl.sigterm",
)
"""Messages that show why a launcher ends its processes, in addition to those of :func:`first_trouble`."""
