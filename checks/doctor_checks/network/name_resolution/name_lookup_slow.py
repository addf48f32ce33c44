"""NET024: name lookups take seconds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.api import Finding, IdenticalRanks, Job, Scope, Severity, Verdict, check, hosts_text
from doctor.facts import HostFacts, MasterFacts, NameLookup, PathFacts, PathSample, ReverseLookup
from doctor.testing import Fails, Passes, healthy

_SILENT = (ReverseLookup("10.0.0.2", error="no answer within 2.5 s", seconds=2.5),)
_SLOW = (NameLookup("node1", "hostname", ("10.0.0.2",), seconds=5.01),)
_PEER = PathFacts(samples=(PathSample("node0", "10.0.0.1", forward_lookup=0.001, reverse_lookup=10.0),))
_NAMELESS = PathFacts(
    samples=(
        PathSample(
            "node0",
            "10.0.0.1",
            forward_lookup=0.002,
            forward_error="Name or service not known",
            reverse_lookup=0.004,
            reverse_error="Name or service not known",
            reverse_address="::ffff:10.0.0.1",
        ),
    )
)


_ALONE = (
    "A job on one host starts a little later; in a job on several hosts, every connection to the store waits for a "
    "lookup."
)


class _Lookup(msgspec.Struct, frozen=True):
    what: str
    seconds: float
    error: str | None
    own: bool = False


_OWN = " (the host's own name)"
_OF_OWN_NAME = (
    "Gloo and torchrun look up the host's own name when they start, so each process group and each start takes longer."
)


@check(
    id="NET024",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    needs=(HostFacts,),
    cases=lambda: (
        Passes("answers in a millisecond", healthy(hosts=2, per_host=2)),
        Passes(
            "an address without a name, answered at once",
            healthy(2, 1).alter(HostFacts, reverse=(ReverseLookup("10.0.0.1", error="Unknown host", seconds=0.02),)),
        ),
        Passes("a laptop off line", healthy(per_host=1, gpus=0).alter(HostFacts, reverse=_SILENT), silent=False),
        Fails(
            "a name server that drops packets",
            healthy(2, 2).alter(HostFacts, hosts=("node1",), reverse=_SILENT),
            ranks=(2, 3),
        ),
        Fails(
            "the first name server is dead", healthy(2, 1).alter(HostFacts, hosts=("node1",), names=_SLOW), ranks=(1,)
        ),
        Fails("the peers' addresses are looked up slowly", healthy(2, 1).put(_PEER, hosts=("node1",)), ranks=(1,)),
        Passes("peers without a name, answered at once", healthy(2, 1).put(_NAMELESS, hosts=("node1",))),
        Fails(
            "the master's name takes seconds",
            healthy(2, 1).alter(MasterFacts, ranks=(1,), seconds=5.0),
            ranks=(1,),
        ),
        Fails(
            "one host alone only needs to know it",
            healthy(1, 2).alter(HostFacts, reverse=_SILENT),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
    ),
)
def name_lookup_slow(job: Job, *, seconds: float = 1.0) -> Iterator[Verdict]:
    """Ask whether lookups of host names and addresses are fast.

    Why it hurts: every connection to the store waits for a lookup, so a job with many ranks seems to hang in
    init_process_group().
    Fix: List all hosts with their addresses in /etc/hosts, or remove unresponsive name servers from /etc/resolv.conf.
    """
    severity = Severity.WARNING if job.is_multi_host else Severity.INFO
    found: dict[str, list[tuple[str, list[_Lookup], IdenticalRanks]]] = {}
    for host, identical in job.each(HostFacts, also=(PathFacts, MasterFacts)):
        slow = [one for one in _lookups(host, identical) if one.seconds >= seconds]
        if slow:
            kind = "Reverse lookup" if all(one.what.startswith("reverse") for one in slow) else "Lookup"
            found.setdefault(kind, []).append((host.hostname, slow, identical))
    for kind, hosts in found.items():
        every = [one for _, slow, _ in hosts for one in slow]
        worst = max(every, key=lambda one: one.seconds)
        about = worst.what.partition("lookup of ")[2]
        least = "at least " if (worst.error or "").startswith("no answer") else ""
        yield Finding(
            f"{kind} of {about}{_OWN if worst.own else ''}"
            f" takes {least}{worst.seconds:.1f} s on {hosts_text(name for name, _, _ in hosts)}",
            ranks=tuple(sorted({rank for _, _, identical in hosts for rank in identical.ranks})),
            severity=severity,
            effect=_ALONE if not job.is_multi_host else _OF_OWN_NAME if worst.own else "",
            fix=f"Add {about.rpartition('=')[2]} and its {'name' if kind.startswith('Reverse') else 'address'} to "
            f"/etc/hosts on {hosts_text(name for name, _, _ in hosts)}, or remove unresponsive name servers from "
            "/etc/resolv.conf.",
            evidence={one.what: one.error or f"{one.seconds:.3f} s" for one in every[:8]},
        )


def _lookups(host: HostFacts, identical: IdenticalRanks) -> Iterator[_Lookup]:
    for name in host.names:
        if name.seconds is not None:
            yield _Lookup(f"lookup of {name.name}", name.seconds, name.error, own=True)
    for reverse in host.reverse:
        if reverse.seconds is not None:
            yield _Lookup(f"reverse lookup of {reverse.address}", reverse.seconds, reverse.error)
    master = identical.find(MasterFacts)
    if master is not None and master.seconds is not None:
        yield _Lookup(f"lookup of MASTER_ADDR={master.address}", master.seconds, master.error)
    paths = identical.find(PathFacts)
    for sample in paths.samples if paths else ():
        if sample.forward_lookup is not None:
            yield _Lookup(f"lookup of {sample.peer}", sample.forward_lookup, sample.forward_error)
        if sample.reverse_lookup is not None:
            asked = sample.reverse_address or sample.address or sample.peer
            yield _Lookup(f"reverse lookup of {asked}", sample.reverse_lookup, sample.reverse_error)
