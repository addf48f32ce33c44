"""NET004: MASTER_ADDR does not resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from doctor.analysis.interface_choice import names_unknown
from doctor.analysis.logs.event_timeline import names_itself, set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    hosts_text,
    merge,
)
from doctor.core.text import HERE
from doctor.facts import MasterFacts
from doctor.testing import Fails, Passes, healthy, logged

_NOT_KNOWN = MasterFacts(address="node0", port=29500, error="Name or service not known", seconds=0.01)
_MISSPELT = MasterFacts(address="nood0", port=29500, error="Name or service not known", seconds=0.01)
_SILENT = MasterFacts(address="node0", port=29500, error="no answer within 2.5 s", seconds=2.5)


def _from_logs(job: Job) -> Iterator[Finding]:
    """Report names that do not resolve.

    Torch requests IPv6 addresses with AI_V4MAPPED (torch/csrc/distributed/c10d/socket.cpp): one failure is enough."""
    for group in event_groups(job, "torch.store.gai", by=("host",)):
        is_own = any(names_itself(event, group.value("host")) for event in group.events)
        if not is_own and group.value("host") != "localhost" and not set_up_after(job, group.events[-1]):
            yield _unknown(group, group.value("host"), 0.9)
    for name in names_unknown(job):
        if not name.own and not set_up_after(job, name.event):
            sure = 0.6 if "gaierror" in name.event.text else 0.85
            yield _unknown(EventGroup(name.event.kind, (name.event,)), name.name, sure, name.error)


def _unknown(group: EventGroup, name: str | None, confidence: float, error: str | None = None) -> Finding:
    why = error or group.value("err") or ""
    reason = f": {why}" if why and why != "unknown name" else ""
    by_launcher = bool(_LAUNCHERS.search(group.first.text))
    return finding_from_logs(
        group,
        f"{f'Host name {name}' if name else 'A host name'} does not resolve{reason}",
        effect=_effect(name, by_launcher=by_launcher),
        fix=_fix(name, why, by_launcher=by_launcher, hosts=group.hosts),
        confidence=confidence,
        explains=("NET006", "ENV015", "ENV005"),
    )


def _effect(name: str | None, *, by_launcher: bool) -> str:
    if by_launcher:
        return "The launcher cannot start processes on that host, and the job does not start."
    if name is None:
        return (
            "If it is the master's name, the rank cannot join the job, and the other ranks wait for it until the "
            "timeout."
        )
    return ""


_LAUNCHERS = re.compile(r"^(?:ssh|srun|pdsh@[^:]+): |HYDU_|\bmpi(?:run|exec)\b")
"""Beginnings of lines of launchers, which look up the hosts that they start processes on."""


def _fix(name: str | None, error: str, *, by_launcher: bool, hosts: Sequence[str] = ()) -> str:
    unnamed = "the host that runs the launcher" if by_launcher else "the host that logged this error"
    place = hosts_text(hosts) if hosts else unnamed
    if name is None and by_launcher:
        return "Add the names of all hosts to DNS, or to /etc/hosts on the host that launches the job."
    if name is None:
        return "Set MASTER_ADDR to the IP address of rank 0's host, or add the host to DNS or /etc/hosts."
    if error.startswith("Temporary failure"):
        # EAI_AGAIN of getaddrinfo(3): the name server gave no answer, so the name itself may be right.
        return f"Correct the name servers in /etc/resolv.conf on {place}, or add {name} to /etc/hosts there."
    if by_launcher:
        return f"Use the IP address of {name} in the hostfile, or add the name to DNS or /etc/hosts."
    return f"Use the IP address instead of {name}, or add the name to DNS or to /etc/hosts on all hosts."


@check(
    id="NET004",
    severity=Severity.ERROR,
    when="PM",
    needs=(MasterFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes(
            "no IPv6 address of localhost",
            logged(
                "[W socket.cpp:601] [c10d] The IPv6 network addresses of (localhost, 51595) cannot be retrieved (gai "
                "error: -2 - Name or service not known)."
            ),
        ),
        Passes("the master's name is known everywhere", healthy(hosts=2, per_host=2)),
        Passes("no master is named", healthy(per_host=1)),
        Passes("no answer within the time limit", healthy(2, 1).put(_SILENT, ranks=(1,))),
        Fails(
            "the name is known on the master's host alone",
            healthy(hosts=2, per_host=2).put(_NOT_KNOWN, ranks=(2, 3)),
            ranks=(2, 3),
        ),
        Fails(
            "a misspelt name",
            healthy(hosts=2, per_host=1).put(_MISSPELT),
            ranks=(0, 1),
        ),
        Passes(
            "a name that was not there yet, and then was",
            logged(
                "[W socket.cpp:601] [c10d] The IPv6 network addresses of (job-0.svc, 29500) cannot be retrieved (gai "
                "error: -2 - Name or service not known).",
                "All distributed processes registered. Starting with 8 processes",
            ),
        ),
    ),
)
def master_unresolvable(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_ADDR resolves on every rank.

    Why it hurts: ranks that cannot resolve the name never join the job, and the other ranks wait for them until the
    timeout.
    Fix: Set MASTER_ADDR to the IP address of rank 0's host, or add its name to DNS or to /etc/hosts on all hosts.
    """
    found = []
    for master, identical in job.each(MasterFacts):
        if master.resolved:
            continue
        error = master.error or "no address"
        if error.startswith("no answer"):
            yield Unknown(
                f"the lookup of MASTER_ADDR={master.address} did not complete: {error}",
                identical.ranks,
                f"time getent ahosts {master.address}",
            )
            continue
        found.append(
            Finding(
                f"MASTER_ADDR={master.address} does not resolve on {HERE}: {error}",
                ranks=identical.ranks,
                fix=f"Set MASTER_ADDR to the IP address of {_first_host(job)}, or add {master.address} to DNS or to "
                f"/etc/hosts on {HERE}.",
            )
        )
    yield from merge(found, job.place_of)


def _first_host(job: Job) -> str:
    hosts = job.hosts_of((0,))
    return f"{hosts[0]}, the host of rank 0" if hosts else "rank 0's host"
