"""ENV005: ranks that never came."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Job,
    Scope,
    Severity,
    Sick,
    SlurmFacts,
    Verdict,
    Well,
    absent_by_host,
    check,
    healthy,
    ranks_in_words,
)


@check(
    id="ENV005",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    cases=lambda: (
        Well("all came", healthy(hosts=2, per_host=2)),
        Well("nobody was waited for", healthy(hosts=2, per_host=2).only((0,))),
        Sick(
            "one process of a host died before it could answer",
            healthy(hosts=2, per_host=2).only((0, 1, 2), absent=(3,)),
            ranks=(3,),
            hosts=("node1",),
        ),
        Sick(
            "a host of the allocation never started",
            healthy(hosts=4, per_host=2).by_srun().only((0, 1, 4, 5, 6, 7), absent=(2, 3)),
            ranks=(2, 3),
            hosts=("node1",),
        ),
        Sick(
            "the only host of the node list that nobody is on",
            healthy(hosts=3, per_host=2)
            .put(SlurmFacts(job_id="7", node_list="node[0-2]"))
            .only((0, 1, 2, 3), absent=(4, 5)),
            ranks=(4, 5),
            hosts=("node2",),
        ),
        Sick(
            "a host of which nothing is known",
            healthy(hosts=2, per_host=2).only((0, 1), absent=(2, 3)),
            ranks=(2, 3),
        ),
    ),
)
def rank_absent(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank of the world answered.

    Why it hurts: the others wait for it in init_process_group() or in the first collective, until the time-out.
    Fix: look at the log of the missing ranks first, their start command and their host; the ranks that wait are fine.
    """
    if not job.absent:
        return
    for host, ranks in absent_by_host(job).items():
        where = f" on {host}" if host else ""
        yield Finding(
            f"{ranks_in_words(ranks)}{where} never came; {len(job.ranks)} of {job.world_size} answered",
            ranks=ranks,
            hosts=tuple(host.split(", ")) if host else (),
            evidence={"absent": len(ranks), "came": len(job.ranks), "world_size": job.world_size, "host": host or None},
            fix=_fix(job, host),
        )


def _fix(job: Job, host: str) -> str:
    if not host:
        return "Look for the hosts that printed nothing: is the job started there, with the same MASTER_ADDR, MASTER_PORT "\
            "and number of nodes? `python -m doctor check` alone on such a host says what it lacks."
    if host in {one.name for one in job.hosts}:
        return f"The host answers, some of its processes do not: read their logs, and `dmesg -T | tail` on {host} for the "\
            "out-of-memory killer; they died before or during their imports, or were not started."
    return f"Nothing of {host} answered: `ssh {host} true`, then its log; is the job started there, and can it reach the "\
        "master (NET004 and NET006 on that host)?"
