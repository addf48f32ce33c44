"""NET001: a host cannot resolve its own name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.analysis.interface_choice import gloo_name_refused, names_unknown
from doctor.analysis.logs.event_timeline import names_itself, set_up_after, spans_hosts
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    hosts_text,
    is_logged,
)
from doctor.facts import HostFacts, NameLookup
from doctor.testing import Fails, Passes, healthy, logged

_UNKNOWN_NAME = (NameLookup("node1", "hostname", error="Name or service not known", seconds=0.01),)
_LONE = (NameLookup("node0", "hostname", error="Name or service not known", seconds=0.01),)
_SILENT = (NameLookup("node1", "hostname", error="no answer within 2.5 s", seconds=2.5),)


def _by_fallback(job: Job) -> Iterator[Finding]:
    """Report that Gloo and RPC fall back to loopback without an address; on one host that works."""
    for group in event_groups(job, "gloo.loopback", "net.name.own_unknown"):
        broken = is_logged(job, "gloo.mesh", "net.peer.connect_failed")
        if broken or not set_up_after(job, group.events[-1]):
            yield finding_from_logs(
                group,
                "A host's own name does not resolve to one of its addresses, so "
                f"{'Gloo' if group.kind == 'gloo.loopback' else 'torch.distributed.rpc'} uses loopback",
                severity=None if broken or spans_hosts(job) else Severity.INFO,
                effect="" if broken or spans_hosts(job) else _ALONE,
                confidence=0.85 if broken else 0.7,
                explains=("NET009", "NET013"),
            )


def _by_lookup(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gloo.noaddr"):
        if "rp != nullptr" in group.first.text:
            name = gloo_name_refused(group.first)
            yield finding_from_logs(
                group,
                f"Gloo cannot resolve the host's own name{f' ({name})' if name else ''}",
                fix=_fix((name,)) if name else "",
                explains=("NET007",),
            )
    own = [one for one in names_unknown(job) if one.own]
    if own:
        harmless = all(one.name for one in own) and not spans_hosts(job)
        yield finding_from_logs(
            EventGroup(own[0].event.kind, tuple(one.event for one in own)),
            f"A host cannot resolve its own name: {own[0].error}",
            severity=Severity.INFO if harmless else None,
            effect=_ALONE if harmless else "",
            explains=_CONSEQUENCES,
        )


def _by_store(job: Job) -> Iterator[Finding]:
    """Report host names that do not resolve; torchrun passes the name of its host to the ranks as MASTER_ADDR."""
    for group in event_groups(
        job, "torch.store.gai", "torch.store.connect_fail", "torch.store.connect_timeout", by=("host",)
    ):
        name = group.value("host") or ""
        own = group.kind == "torch.store.gai" and any(names_itself(event, name) for event in group.events)
        if not (name.isdigit() or own) or set_up_after(job, group.events[-1]):
            continue
        yield finding_from_logs(
            group,
            f"The host name {name} consists of digits only and is parsed as an IPv4 address"
            if name.isdigit()
            else f"{name} cannot resolve its own name: {group.value('err')}",
            fix=f"Give the host or container a name that contains a letter, such as host-{name} (`docker run "
            f"--hostname=host-{name}`)."
            if name.isdigit()
            else _fix((name,)),
            explains=_CONSEQUENCES,
        )


_CONSEQUENCES = ("NET004", "NET006", "ENV015")
_ALONE = "None while all ranks run on this host; a job on several hosts would hang at startup."


def _fix(names: Sequence[str]) -> str:
    if len(names) > 1:
        return f"Add {', '.join(names[:8])} with their addresses to /etc/hosts on all hosts, or to DNS."
    return (
        f"Add {names[0]} with its address to /etc/hosts or DNS, and verify that `getent ahosts {names[0]}` prints the "
        "address."
    )


@check(
    id="NET001",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(HostFacts,),
    from_logs=(_by_fallback, _by_lookup, _by_store),
    impacts={
        r"digits only": (
            "Ranks that look up this name connect to another address and never reach the host: the job times out at "
            "startup."
        ),
        r"uses loopback": (
            "In a job on several hosts, other hosts receive the address 127.0.0.1 and connect to themselves, and the "
            "job hangs or fails at startup."
        ),
        r"Gloo cannot resolve": (
            "init_process_group() fails on this host, and the other ranks wait for it until the timeout."
        ),
    },
    cases=lambda: (
        Passes("every host knows itself", healthy(hosts=2, per_host=2)),
        Passes("no answer within the time limit", healthy(2, 2).alter(HostFacts, hosts=("node1",), names=_SILENT)),
        Passes(
            "a lone machine without a resolvable name",
            healthy(per_host=1, gpus=0).alter(HostFacts, names=_LONE),
            silent=False,
        ),
        Fails(
            "one host of two is missing in /etc/hosts and DNS",
            healthy(hosts=2, per_host=2).alter(HostFacts, hosts=("node1",), names=_UNKNOWN_NAME),
            ranks=(2, 3),
        ),
        Fails(
            "one host alone only needs to know it",
            healthy(hosts=1, per_host=2).alter(HostFacts, names=_LONE),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "Gloo on a laptop falls back to loopback",
            logged(
                "[W ProcessGroupGloo.cpp:684] Warning: Unable to resolve hostname to a (local) address. Using the "
                "loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME."
            ),
            silent=False,
        ),
        Fails(
            "`hostname -i` of a batch script fails",
            logged("hostname: Name or service not known", "MASTER_ADDR="),
        ),
        Fails(
            "Gloo looks for the host",
            logged(
                "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:127] rp != nullptr. "
                "Unable to find address for: node7"
            ),
        ),
        Fails(
            "a container whose name has digits alone",
            logged(
                "[E socket.cpp:753] [c10d] The client socket has failed to connect to any network address of (6841231, "
                "47389)."
            ),
        ),
        Fails(
            "Gloo falls back to loopback, and then can't reach the others",
            logged(
                "[W ProcessGroupGloo.cpp:684] Warning: Unable to resolve hostname to a (local) address. Using the "
                "loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME.",
                "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.0.1]:33495: "
                "Connection refused",
            ),
        ),
    ),
)
def hostname_unresolvable(job: Job) -> Iterator[Verdict]:
    """Ask whether every host can resolve its own name.

    Why it hurts: other hosts cannot connect, because Gloo advertises 127.0.0.1, and torchrun advertises a name that
    does not resolve. The job hangs at startup.
    Fix: Add the host's name and address to /etc/hosts or DNS, and verify that `getent ahosts "$(hostname)"` prints the
    address.
    """
    severity = Severity.ERROR if job.is_multi_host else Severity.INFO
    failed: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for host, identical in job.each(HostFacts):
        own = next((name for name in host.names if name.role == "hostname"), None)
        if own is None or (not own.addresses and (own.error or "").startswith("no answer")):
            yield _unknown(host, own, identical.ranks)
        elif not own.addresses:
            failed.setdefault(own.error or "no address", []).append((own.name, identical.ranks))
    for error, hosts in failed.items():
        names = [name for name, _ in hosts]
        yield Finding(
            f"{hosts_text(names)} cannot resolve {'its own name' if len(names) == 1 else 'their own names'}: {error}",
            ranks=tuple(sorted(rank for _, ranks in hosts for rank in ranks)),
            severity=severity,
            evidence={"names": names[:16]} if len(names) > 1 else {},
            effect="" if job.is_multi_host else _ALONE,
            fix=_fix(tuple(dict.fromkeys(names))),
        )


def _unknown(host: HostFacts, own: NameLookup | None, ranks: tuple[int, ...]) -> Unknown:
    note = host.why_hidden("names")
    if own is not None:
        return Unknown(
            f"the lookup of {own.name} did not complete: {own.error}", ranks, f"time getent ahosts {own.name}"
        )
    reason = note.reason if note else f"the name of {host.hostname or 'the host'} was not looked up"
    return Unknown(reason, ranks, note.unhide if note else "")
