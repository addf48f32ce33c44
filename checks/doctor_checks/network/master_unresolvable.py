"""NET004: MASTER_ADDR does not resolve."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, MasterFacts, Severity, Sick, Unknown, Verdict, Well, check, healthy, merge

_NOT_KNOWN = MasterFacts(address="node0", port=29500, error="Name or service not known", seconds=0.01)
_MISSPELT = MasterFacts(address="nood0", port=29500, error="Name or service not known", seconds=0.01)
_SILENT = MasterFacts(address="node0", port=29500, error="no answer within 2.5 s", seconds=2.5)


@check(
    id="NET004",
    severity=Severity.ERROR,
    when="PM",
    needs=(MasterFacts,),
    cases=lambda: (
        Well("the master's name is known everywhere", healthy(hosts=2, per_host=2)),
        Well("no master is named", healthy(per_host=1)),
        Well("no answer yet is no answer", healthy(2, 1).put(_SILENT, ranks=(1,))),
        Sick(
            "the name is known on the master's host alone",
            healthy(hosts=2, per_host=2).put(_NOT_KNOWN, ranks=(2, 3)),
            ranks=(2, 3),
        ),
        Sick(
            "a misspelt name",
            healthy(hosts=2, per_host=1).put(_MISSPELT),
            ranks=(0, 1),
        ),
    ),
)
def master_unresolvable(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_ADDR resolves on every rank.

    Why it hurts: these ranks never reach the store; they repeat `gai error: -2 - Name or service not known` and the
    others wait for them until the time-out.
    Fix: `export MASTER_ADDR=<IP address of rank 0's host>`, or add the name to /etc/hosts or DNS on these hosts;
    `getent ahosts "$MASTER_ADDR"` must print an address. torchrun: `--local-addr` or `--rdzv-endpoint <IP>:<port>`.
    """
    found = []
    for master, alike in job.each(MasterFacts):
        if master.resolved:
            continue
        error = master.error or "no address"
        if error.startswith("no answer"):
            yield Unknown(
                f"whether MASTER_ADDR={master.address} resolves: {error}",
                alike.ranks,
                f"time getent ahosts {master.address}",
            )
            continue
        evidence = {"MASTER_ADDR": master.address, "error": error, "seconds": master.seconds}
        found.append(
            Finding(f"MASTER_ADDR={master.address} does not resolve: {error}", ranks=alike.ranks, evidence=evidence)
        )
    yield from merge(found)
