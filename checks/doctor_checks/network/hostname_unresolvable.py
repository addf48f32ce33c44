"""NET001: a host's own name does not resolve."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    HostFacts,
    Job,
    NameLookup,
    Scope,
    Severity,
    Sick,
    Unknown,
    Verdict,
    Well,
    check,
    healthy,
    hosts_text,
)

_UNKNOWN_NAME = (NameLookup("node1", "hostname", error="Name or service not known", seconds=0.01),)
_SILENT = (NameLookup("node1", "hostname", error="no answer within 2.5 s", seconds=2.5),)


@check(
    id="NET001",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(HostFacts,),
    cases=lambda: (
        Well("every host knows itself", healthy(hosts=2, per_host=2)),
        Well("no answer yet is no answer", healthy(2, 2).alter(HostFacts, hosts=("node1",), names=_SILENT)),
        Well(
            "a lone machine without a resolvable name",
            healthy(per_host=1, gpus=0).alter(HostFacts, names=_UNKNOWN_NAME),
            silent=False,
        ),
        Sick(
            "one host of two is missing in /etc/hosts and DNS",
            healthy(hosts=2, per_host=2).alter(HostFacts, hosts=("node1",), names=_UNKNOWN_NAME),
            ranks=(2, 3),
        ),
        Sick(
            "one host alone only needs to know it",
            healthy(hosts=1, per_host=2).alter(HostFacts, names=_UNKNOWN_NAME),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
    ),
)
def hostname_unresolvable(job: Job) -> Iterator[Verdict]:
    """Ask whether every host can resolve its own name.

    Why it hurts: Gloo falls back to 127.0.0.1 and the other hosts dial themselves; torchrun gives out a name that
    nobody can look up. The job hangs when it starts.
    Fix: `echo "<the host's address> $(hostname)" | sudo tee -a /etc/hosts`, or repair the name in DNS;
    `getent ahosts "$(hostname)"` must print an address.
    """
    severity = Severity.ERROR if job.is_multi_host else Severity.INFO
    failed: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for host, alike in job.each(HostFacts):
        own = next((name for name in host.names if name.role == "hostname"), None)
        if own is None or (not own.addresses and (own.error or "").startswith("no answer")):
            yield _unknown(host, own, alike.ranks)
        elif not own.addresses:
            failed.setdefault(own.error or "no address", []).append((own.name, alike.ranks))
    for error, hosts in failed.items():
        names = [name for name, _ in hosts]
        yield Finding(
            f"{hosts_text(names)} cannot resolve {'its own name' if len(names) == 1 else 'their own names'}: {error}",
            ranks=tuple(sorted(rank for _, ranks in hosts for rank in ranks)),
            severity=severity,
            evidence={"names": names[:16], "error": error},
        )


def _unknown(host: HostFacts, own: NameLookup | None, ranks: tuple[int, ...]) -> Unknown:
    note = host.why_hidden("names")
    if own is not None:
        return Unknown(f"whether {own.name} resolves: {own.error}", ranks, f"time getent ahosts {own.name}")
    reason = note.reason if note else f"the name of {host.hostname or 'the host'} was not looked up"
    return Unknown(reason, ranks, note.unhide if note else "")
