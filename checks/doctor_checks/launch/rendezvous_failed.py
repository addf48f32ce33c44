"""ENV015: no host serves the store of the rendezvous."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import events_of_kinds, launch_setting, set_up_before
from doctor.api import EventGroup, Finding, Job, Scope, Severity, Verdict, check, finding_from_logs
from doctor.facts import Event
from doctor.testing import Fails, Passes, logged

_KINDS = ("elastic.rdzv_connect", "elastic.rdzv_timeout")
_LATE_WORDS = ("heartbeat", "shutdown the rendezvous", "shut down the rendezvous")
"""Words in the messages of agents about a store whose host has already exited."""


@check(
    id="ENV015",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="M",
    impacts={
        r"was closed": "The launcher of this host ends without starting its ranks.",
    },
    cases=lambda: (
        Passes(
            "the agent that hosts the store ended first",
            logged(
                "[W dynamic_rendezvous.py:1072] The node 'node2_41_0' has failed to send a keep-alive heartbeat to the "
                "rendezvous 'none' due to an error of type RendezvousConnectionError."
            ),
        ),
        Passes(
            "the store broke after the ranks had met",
            logged(
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
                "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the "
                "C10d store has "
                "failed. See inner exception for details.",
            ),
        ),
        Fails(
            "a pod that was restarted after the others had ended",
            logged(
                "ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{",
                '    "message": "RendezvousClosedError: ",',
            ),
        ),
        Fails(
            "all hosts are clients of a store that no process hosts",
            logged(
                "  rdzv_backend     : c10d",
                "  rdzv_endpoint    : train-service:29400",
                "[E socket.cpp:793] [c10d] The client socket has timed out after 60s while trying to connect to "
                "(train-service, 29400).",
                "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the "
                "C10d store has "
                "failed. See inner exception for details.",
            ),
        ),
    ),
)
def rendezvous_failed(job: Job) -> Iterator[Verdict]:
    """Ask whether the rendezvous of torchrun could connect to its store.

    Why it hurts: all hosts wait at the rendezvous until the timeout. With the c10d backend, only a host
    whose own name or address is the endpoint serves the store.
    Fix: Set --rdzv-endpoint on all hosts to the host name or an address of the first host, or pass --rdzv-conf
    is_host=true on the first host, so that it serves the store.
    """
    yield from _by_closing(job)
    early = tuple(event for event in events_of_kinds(job, *_KINDS) if _is_start(job, event))
    if early:
        endpoint = launch_setting(job, "rdzv_endpoint")
        yield finding_from_logs(
            EventGroup(early[0].kind, early),
            f"No store responded at the rendezvous endpoint{f' {endpoint}' if endpoint else ''}",
            ranks=(),
            evidence={"endpoint": endpoint},
            confidence=0.7,
            explains=("NET006",),
        )


def _by_closing(job: Job) -> Iterator[Finding]:
    closed = tuple(
        event
        for event in events_of_kinds(job, "elastic.rdzv_timeout")
        if event.value("what") == "RendezvousClosedError" and not set_up_before(job, event)
    )
    if closed:
        yield finding_from_logs(
            EventGroup(closed[0].kind, closed),
            "The rendezvous was closed before this host joined: the other hosts had timed out or finished",
            ranks=(),
            confidence=0.6,
            fix="Start the launcher on all hosts with a new --rdzv-id, within the join_timeout of --rdzv-conf (600 s "
            "by default).",
            explains=("NET006", "ENV005"),
        )


def _is_start(job: Job, event: Event) -> bool:
    if any(word in event.text for word in _LATE_WORDS) or set_up_before(job, event):
        return False
    return event.kind == "elastic.rdzv_connect" or "RendezvousConnectionError" in event.text
