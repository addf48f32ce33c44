"""ENV008: another process listens on MASTER_PORT."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import events_of_kinds, set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Rank,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    finding_from_logs,
)
from doctor.facts import Event, LaunchFacts, Listener, MasterFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy, logged

STRANGER = Listener("0.0.0.0", 29500, 4711, "python", "python train.py --name other-run")  # noqa: S104 - as seen


def _of_refusals(job: Job) -> Iterator[Finding]:
    """Report a port in use unless the job starts anyway: torchrun joins an agent of its own job that holds the port."""
    for group in _refusals(job):
        port = next((port for event in group.events if (port := _port_of(event))), None)
        yield finding_from_logs(
            group,
            f"Port {port} is already in use" if port else "A port that the job listens on is already in use",
            ranks=(),
            evidence={"port": port},
            confidence=0.95 if port else 0.85,
            fix=f"Use another port, or end the process that `ss -tlnp sport = :{port}` shows."
            if port
            else "Find the port in the traceback and its listener with `ss -ltnp`, then end that process or change the "
            "port on all hosts (torchrun reads `--master-port`).",
            explains=("NET006", "ENV015", "ENV005"),
        )


def _of_strangers(job: Job) -> Iterator[Finding]:
    events = [event for event in events_of_kinds(job, "torch.store.stranger") if not set_up_after(job, event)]
    if events:
        group = EventGroup(events[0].kind, tuple(events))
        where = f"{group.value('host')}:{group.value('port')}" if group.value("host") else "the master port"
        # The bytes that were read as a number, if they are letters: HTTP, SSH-.
        number = int((group.value("got") or "0")[:20])
        letters = number.to_bytes(9, "little").rstrip(b"\0")
        speaks = letters.decode("ascii") if letters.isascii() and letters.decode("ascii").isprintable() else ""
        yield finding_from_logs(
            group,
            f"The process that listens on {where} is not a TCPStore" + (f": it sends {speaks!r}" if speaks else ""),
            evidence={"address": where, "expected_reply": group.value("want"), "received": group.value("got")},
            ranks=(),
            confidence=0.85,
            fix="Choose a MASTER_PORT that no other program, proxy or load balancer uses, and an address that reaches "
            "the host of rank 0 directly.",
            explains=("NET006", "ENV015"),
        )


def _refusals(job: Job) -> Iterator[EventGroup]:
    """Group the log events, those that name the port first."""
    events = [
        event for event in events_of_kinds(job, *_KINDS) if _is_taken(job, event) and not set_up_after(job, event)
    ]
    if events:
        yield EventGroup(events[0].kind, tuple(sorted(events, key=lambda event: _port_of(event) is None)))


def _is_taken(job: Job, event: Event) -> bool:
    """Whether the error is EADDRINUSE; torch's final line names no error, the lines per address before it do."""
    if event.kind != "torch.store.listen_fail" or "in use" in event.text or "EADDRINUSE" in event.text:
        return True
    numbers = {one.value("errno") or one.value("errno2") for one in events_of_kinds(job, event.kind)} - {None}
    return numbers <= {"98"}


_KINDS = (
    "torch.store.listen_fail",
    "torch.store.port_busy.old",
    "host.address_in_use",
    "accelerate.port_busy",
    "net.port.busy_windows",
)
_PORT = re.compile(r"(?:[\]\w.*]:|[\w.:'], |[Pp]ort:? `?)(?P<port>\d{2,5})\b(?!\.)")
"""A port in such a message: ``[::]:29500``, ``('0.0.0.0', 29500)``, ``port: 29500``."""


def _port_of(event: Event) -> int | None:
    named = (event.value(name) for name in ("port", "port2"))
    found = next((value for value in named if value), None)
    words = _PORT.search(event.text.partition("use")[0]) if found is None else None
    number = int((found or (words["port"] if words else "0"))[:6])
    return number if 0 < number < 65536 else None


@check(
    id="ENV008",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts, MasterFacts),
    compares_ranks=False,
    from_logs=(_of_strangers, _of_refusals),
    impacts={
        r"is already in use": (
            "The process that needs the port fails, and the ranks that connect to it block until their timeout."
        ),
        r"is not a TCPStore": (
            "The ranks connect to another program: they fail with an error or block until the timeout."
        ),
        r"in use by": (
            'Rank 0 fails to host the store ("address already in use"). If the other process hosts the store '
            "of another job, the ranks connect to that store."
        ),
    },
    cases=lambda: (
        Passes("the port is free", healthy(hosts=2, per_host=2).by_srun()),
        Passes("torchrun's agent hosts the store", healthy().alter(MasterFacts, listener=STRANGER)),
        Passes(
            "the launcher listens",
            healthy().by_srun().alter(MasterFacts, listener=Listener("::", 29500, 88, "pt_elastic", is_ancestor=True)),
        ),
        Passes(
            "rank 0 itself listens: the run is on",
            healthy().by_srun().alter(MasterFacts, listener=Listener("::", 29500, 10_000, "python")),
        ),
        Passes(
            "rank 1 alone sees its own rank 0", healthy().by_srun().alter(MasterFacts, listener=STRANGER).only((1,))
        ),
        Fails(
            "another training holds the default port",
            healthy(hosts=2, per_host=2).by_srun().alter(MasterFacts, ranks=(0, 1), listener=STRANGER),
            ranks=(0,),
        ),
        Fails(
            "a process that may not be seen listens",
            healthy().by_srun().alter(MasterFacts, listener=Listener("::", 29500)),
            ranks=(0,),
        ),
        Fails(
            "a shell with MASTER_ADDR and MASTER_PORT, before the start",
            healthy(hosts=1, per_host=1)
            .launched(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
            .put(MasterFacts(address="127.0.0.1", port=29500, is_local=True, listener=STRANGER)),
            ranks=(0,),
        ),
        Passes(
            "torchrun finds the agent of its own job there, and joins it",
            logged(
                "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29400 (errno: 98 - Address "
                "already in use).",
                "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local network address.",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
            ),
        ),
    ),
)
def master_port_busy(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_PORT is free on the master's host.

    Why it hurts: rank 0 fails to host the store ("address already in use"), or ranks join the store of another job;
    ranks on other hosts block until the timeout.
    Fix: Use another port on all ranks (`export MASTER_PORT=29600`) or, on one host, `torchrun --standalone`.
    """
    asked = False
    for launch, master, identical in job.each(LaunchFacts, MasterFacts):
        hosting = _that_hosts(launch, identical)
        if hosting is None or not master.is_local:
            continue
        asked = True
        if launch.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            continue
        note = master.why_hidden("listener")
        if master.listener is not None:
            yield from _judge(job, master, master.listener, hosting)
        elif note is not None:
            yield Unknown(note.reason, (hosting.number,), note.unhide)
    if not asked:
        yield Skip("the host of MASTER_PORT was not checked")


def _that_hosts(launch: LaunchFacts, identical: IdenticalRanks) -> Rank | None:
    if launch.rank not in (0, None):
        return None
    return identical.members[0]


def _judge(job: Job, master: MasterFacts, listener: Listener, hosting: Rank) -> Iterator[Finding]:
    if listener.is_ancestor or (listener.pid is not None and listener.pid in _own_pids(job, hosting)):
        return
    who = (
        f"{listener.process or 'a process'} (PID {listener.pid})" if listener.pid else "a process hidden from this user"
    )
    yield Finding(
        f"MASTER_PORT {listener.port} on {hosting.host.name} is in use by {who}",
        ranks=(hosting.number,),
        confidence=1.0 if listener.pid else 0.8,
        evidence={
            "MASTER_ADDR": master.address,
            "MASTER_PORT": listener.port,
            "listens_on": listener.address,
            "pid": listener.pid,
            "process": listener.process,
            "command": " ".join((listener.command or "").split())[:200] or None,
        },
        fix=_fix(listener),
    )


def _own_pids(job: Job, hosting: Rank) -> set[int]:
    members = job.by_host()[hosting.host.index].members
    return {process.pid for rank in members if (process := rank.find(ProcessFacts)) is not None}


def _fix(listener: Listener) -> str:
    other = listener.port + 100 if listener.port + 100 < 65536 else listener.port - 100
    look = f"ps -fp {listener.pid}" if listener.pid else f"sudo ss -tlnp sport = :{listener.port}"
    return f"Use another port on all ranks (`export MASTER_PORT={other}`), or end the process that `{look}` shows."
