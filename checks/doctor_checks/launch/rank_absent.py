"""ENV005: ranks that did not join."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import absent_by_host, joined_ranks
from doctor.analysis.logs.event_timeline import (
    ended_after,
    events_of_kinds,
    failed_before,
    parse_count,
    set_up_after,
    set_up_before,
    unroutable_clients,
)
from doctor.analysis.logs.store_keys import rank_of_key, stage_of_key
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    ranks_in_words,
)
from doctor.facts import Event, SlurmFacts
from doctor.knowledge.launcher_index import BY_NAME
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks.launch._restart_messages import RESTARTS

MEASURED_AGAIN = ("NET006", "NET013", "NET014", "NET015")
"""Consequences for the peers of a dead or stopped process: connections to it get no answer."""

_ALIVE = (
    "On {host}, check whether the process is stopped (T), is blocked in the kernel (D) or was killed by the OOM "
    "killer:\n"
    "ps -o pid,stat,wchan:32,etime,cmd -C python\n"
    "sudo dmesg -T | tail"
)

_WAITED = "torch.distributed.DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//cpu//0/0"
MOST_FINDINGS = 8
"""Hosts reported separately; if ranks of more are missing, the cause is common and there is one finding."""


def _by_count(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "torch.store.clients", by=("got", "want")):
        got, want = parse_count(group.value("got")), parse_count(group.value("want"))
        if got is not None and want is not None and got < want:
            yield finding_from_logs(
                group,
                f"Only {got} of {want} processes joined the store of rank 0 before the timeout",
                ranks=(),
                evidence={"joined": got, "expected": want},
                confidence=0.9,
                # A client without a route to an address that others reached is the root cause: NET006.
                explains=("ENV015",) if unroutable_clients(job) else ("NET006", "ENV015"),
            )


def _by_barrier(job: Job) -> Iterator[Finding]:
    """Report ranks that did not reach the barrier of init_process_group().

    Each waiting rank logs how many reached it.
    """
    for group in _barriers(job):
        last, world = group.events[-1], parse_count(group.value("world")) or 0
        joined = max((parse_count(value) or 0 for value in group.values("got")), default=0)
        waiting = sorted(joined_ranks(group))
        # A rank timed out, or one or more were still waiting in their last lines.
        times = sum(event.count for event in group.events)
        gave_up = any(event.kind == "torch.store.barrier_timeout" for event in group.events) or times > 1
        if joined == world or set_up_after(job, last) or not gave_up:
            continue
        if joined > world:
            if is_logged(job, *RESTARTS):  # otherwise the sizes of the ranks differ: ENV003
                yield _more_than_world(group, joined, world)
            continue
        missing = tuple(rank for rank in range(world) if rank not in waiting) if len(waiting) == joined else ()
        absent = ranks_in_words(missing) if missing else "the others"
        yield finding_from_logs(
            group,
            f"{joined} of {world} ranks reached init_process_group(); {absent} did not",
            ranks=missing,
            evidence={"joined": joined, "world_size": world, "waiting": waiting},
            confidence=0.9 if missing else 0.85,
            fix=_read_logs(missing),
        )


def _more_than_world(group: EventGroup, joined: int, world: int) -> Finding:
    """The barrier waits for an exact number, which a restarted job passes if the store kept the keys of an attempt."""
    return finding_from_logs(
        group,
        f"{joined} processes joined a process group of {world} rank{'' if world == 1 else 's'}, probably some from an "
        "earlier attempt",
        ranks=(),
        evidence={"joined": joined, "world_size": world},
        confidence=0.8,
        fix="End all processes of the earlier attempt, and start again with another port or --rdzv-id.",
    )


def _barriers(job: Job) -> Iterator[EventGroup]:
    groups: dict[str, list[Event]] = {}
    for event in events_of_kinds(job, "torch.store.barrier_wait", "torch.store.barrier_timeout"):
        groups.setdefault(event.value("key") or "", []).append(event)
    for events in groups.values():
        yield EventGroup(events[0].kind, tuple(events))


def _by_rendezvous(job: Job) -> Iterator[Finding]:
    """Report a rendezvous that timed out; the store was reachable, so the missing hosts did not join."""
    for group in event_groups(job, "elastic.rdzv_timeout"):
        late = any("RendezvousTimeoutError" in event.text for event in group.events)
        if late and not set_up_before(job, group.first):
            yield finding_from_logs(
                group,
                "The rendezvous timed out: fewer hosts joined than the job needs",
                ranks=(),
                confidence=0.75,
                fix="Use the same --rdzv-id, --rdzv-endpoint and --nnodes on all hosts, and start torchrun on all of "
                "them within the join_timeout of --rdzv-conf (600 s by default).",
                explains=("NET006", "ENV015"),
            )


def _by_store(job: Job) -> Iterator[Finding]:
    waits = tuple(one for one in events_of_kinds(job, "torch.store.wait", "torch.store.members") if _is_of_start(one))
    if not waits or set_up_before(job, waits[0]):
        return
    group = EventGroup(waits[0].kind, waits)
    keys = sorted({key for one in waits if (key := one.value("keys"))})
    awaited = {rank for key in keys if (rank := rank_of_key(key)) is not None}
    # Rank 0 hosts the store and may itself wait for a rank that did not join.
    missing = tuple(sorted(awaited - {0, *group.ranks}))
    if awaited == {0} and not is_logged(job, "elastic."):
        missing = _besides_the_store(job, group)
    absent = ranks_in_words(missing) if missing else "some ranks"
    of_members = waits[0].kind == "torch.store.members"
    yield finding_from_logs(
        group,
        f"The c10d store timed out waiting for {_all_members(group.value('want'))} to join"
        if of_members
        else f"Startup timed out: {absent}{' probably' if awaited == {0} and missing else ''} did not join",
        ranks=missing,
        evidence={"keys": keys[:8], "waiting": list(group.ranks[:64]), "world_size": group.value("want")},
        effect="The members that joined fail after the timeout, and no rank starts training."
        if of_members
        else "Rank 0 hosts the store and publishes its own key after all ranks have connected. The ranks that wait for "
        "this key fail at the timeout."
        if missing and awaited == {0}
        else "",
        confidence=0.7 if missing else 0.6,
        fix=f"Check that {_all_members(group.value('want'))} of the store were started, and read the log of the one "
        "that did not join."
        if of_members
        else _read_logs(missing),
    )


def _all_members(count: str | None) -> str:
    return "both members" if count == "2" else f"all {count} members" if count else "all members"


def _besides_the_store(job: Job, group: EventGroup) -> tuple[int, ...]:
    """The ranks that rank 0 waits for: it hosts the store that answered, and sets its key after all have joined."""
    others = tuple(rank.number for rank in job.ranks if rank.number not in {0, *group.ranks})
    return others if len(others) <= len(group.ranks) else ()


def _is_of_start(event: Event) -> bool:
    return event.kind == "torch.store.members" or stage_of_key(event.value("keys") or "") == "start"


NEAR_THE_END = 20
"""Lines that Lightning and its loggers may print while ranks still wait for the others."""


def _by_members(job: Job) -> Iterator[Finding]:
    """Report ranks for which Lightning did not print its startup line.

    Lightning prints one line per rank. A rank without one, in a log that ends there, did not start.
    """
    for group in event_groups(job, "pl.init_dist", by=("w",)):
        world = parse_count(group.value("w")) or 0
        came = set(joined_ranks(group))
        missing = tuple(rank for rank in range(world) if rank not in came)
        # A log in which most ranks are missing is a part of the log, rather than a job without most of its ranks.
        if missing and len(missing) <= len(came) and _ends_there(job, group.events[-1]):
            yield finding_from_logs(
                group,
                f"{ranks_in_words(missing).capitalize()} of {world} did not join; the log ends while Lightning waits",
                ranks=missing,
                evidence={"ranks_that_came": sorted(came), "world_size": world},
                confidence=0.6,
                fix=_read_logs(missing),
            )


def _ends_there(job: Job, event: Event) -> bool:
    if set_up_after(job, event) or failed_before(job, event) or ended_after(job, event):
        return False
    files = job.evidence.files if job.evidence else ()
    lines = next((file.lines for file in files if file.path == event.file), event.line)
    return lines - event.line <= NEAR_THE_END


@check(
    id="ENV005",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs_peers=True,
    from_logs=(_by_count, _by_barrier, _by_rendezvous, _by_members, _by_store),
    impacts={
        r"during the network measurement|stopped responding": (
            "The report lacks what this rank would have measured. In the job, the other ranks would block until "
            "the timeout."
        ),
        r"earlier attempt": (
            "init_process_group() waits for exactly as many processes as ranks, so it fails at the timeout."
        ),
        r"rendezvous timed out": "The launcher ends without starting the training on any host.",
        r"before the timeout|Startup timed out|log ends while|reached init_process_group": (
            "The ranks that joined wait for the others in init_process_group() until the timeout, and then fail."
        ),
    },
    cases=lambda: (
        Fails(
            "rank 0 hosts the store and waits for a rank that is late",
            logged(
                *(f"[rank{rank}]: {_WAITED}" for rank in (1, 2)),
                "srun: error: node1: task 3: Terminated",
                "srun: error: node0: tasks 0,2: Terminated",
            ),
            ranks=(3,),
        ),
        Fails(
            "a store that counts the processes of an earlier attempt",
            logged(
                "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 2/3 attempts left; "
                "will restart worker group",
                "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: "
                "store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)",
            ),
            ranks=(),
        ),
        Passes("all ranks joined", healthy(hosts=2, per_host=2)),
        Passes(
            "agents that waited for each other at the end",
            logged("DistStoreError: wait timeout after 300000ms, keys: /torchelastic/agent/terminal_state/last_member"),
        ),
        Fails(
            "an agent that waited for others in the store",
            logged("torch.distributed.DistStoreError: timed out waiting for all 2 members to join"),
        ),
        Passes("no rank is missing", healthy(hosts=2, per_host=2).only((0,))),
        Fails(
            "one process of a host died before it could answer",
            healthy(hosts=2, per_host=2).only((0, 1, 2), absent=(3,)),
            ranks=(3,),
            hosts=("node1",),
        ),
        Fails(
            "a host of the allocation never started",
            healthy(hosts=4, per_host=2).by_srun().only((0, 1, 4, 5, 6, 7), absent=(2, 3)),
            ranks=(2, 3),
            hosts=("node1",),
        ),
        Fails(
            "the only host of the node list without a rank",
            healthy(hosts=3, per_host=2)
            .put(SlurmFacts(job_id="7", node_list="node[0-2]"))
            .only((0, 1, 2, 3), absent=(4, 5)),
            ranks=(4, 5),
            hosts=("node2",),
        ),
        Fails(
            "a host of which nothing is known",
            healthy(hosts=2, per_host=2).only((0, 1), absent=(2, 3)),
            ranks=(2, 3),
        ),
        Fails(
            "a rank that was stopped before it joined",
            healthy(hosts=3, per_host=1).only((0, 1), absent=(2,)).fell_silent(2, "node2", "joined"),
            ranks=(2,),
            hosts=("node2",),
        ),
        Fails(
            "a node of a cluster that its list still has",
            healthy(hosts=3, per_host=1).only((0, 1), absent=(2,)).fell_silent(2, "node2", "listed"),
            ranks=(2,),
            hosts=("node2",),
        ),
        Fails(
            "a rank that died while the network was measured",
            healthy(hosts=3, per_host=1).fell_silent(1, "node1", "answered"),
            ranks=(1,),
            hosts=("node1",),
        ),
        Passes(
            "all members registered",
            logged(*(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in range(4))),
        ),
        Passes(
            "the log of one host of two, and training goes on",
            logged(
                "initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4",
                "initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/4",
                "distributed_backend=nccl",
                "All distributed processes registered. Starting with 4 processes",
            ),
        ),
        Passes(
            "a rank waits, and then all are there",
            logged(
                "Waiting in store based barrier to initialize process group for rank: 0, key: "
                "store_based_barrier_key:1 (world_size=2, num_workers_joined=1, timeout=0:30:00)",
                "Rank 0: Completed store-based barrier for key:store_based_barrier_key:1 with 2 nodes.",
            ),
        ),
        Fails(
            "a barrier that one rank of four did not reach",
            logged(
                *(
                    f"[rank{rank}]: RuntimeError: Timed out initializing process group in store based barrier on rank: "
                    f"{rank}, for key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)"
                    for rank in (0, 1, 3)
                )
            ),
            ranks=(2,),
        ),
        Fails(
            "hosts that did not join the rendezvous",
            logged(
                "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
                "ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler: RendezvousTimeoutError",
            ),
        ),
        Fails(
            "Lightning waits for two of four",
            logged(
                "GPU available: True (cuda), used: True",
                "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4",
                "Initializing distributed: GLOBAL_RANK: 2, MEMBER: 3/4",
            ),
            ranks=(1, 3),
        ),
    ),
)
def rank_absent(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank of the job joined.

    Why it hurts: the other ranks block in init_process_group() or in the first collective until the timeout.
    Fix: Check that the ranks that did not join were started, and read their logs.
    """
    yield from _fallen_silent(job)
    found = absent_by_host(job)
    if len(found) > MOST_FINDINGS:
        found = {", ".join(host for host in found if host): job.absent}
    answered = {host.name for host in job.hosts}
    for host, ranks in found.items():
        joined = {seen.rank for seen in job.last_seen if seen.step == "joined"} >= set(ranks)
        who = f"{ranks_in_words(ranks).capitalize()}{_where(host)}"
        verdict = "joined and then stopped responding" if joined else "did not join"
        yield Finding(
            f"{who} {verdict}; {len(job.ranks)} of {job.world_size} ranks reported",
            ranks=ranks,
            hosts=tuple(host.split(", ")) if host else (),
            evidence={"absent": len(ranks), "reported": len(job.ranks), "world_size": job.world_size},
            fix=_ALIVE.format(host=host) if joined else _fix(host, host in answered, job.launcher),
            explains=MEASURED_AGAIN,
        )


def _fallen_silent(job: Job) -> Iterator[Finding]:
    """Report ranks that sent their facts, but did not take part in the network measurement."""
    for seen in job.last_seen:
        if seen.rank not in job.absent:
            yield Finding(
                f"Rank {seen.rank}{_where(seen.host)} reported, but stopped responding during the network measurement",
                ranks=(seen.rank,),
                hosts=(seen.host,) if seen.host else (),
                evidence={"last_seen": "sent its facts, which the report includes"},
                fix=_ALIVE.format(host=seen.host or "its host"),
                explains=MEASURED_AGAIN,
            )


def _read_logs(missing: tuple[int, ...]) -> str:
    if not missing:
        return "Check that the ranks that did not join were started, and read their logs."
    logs, they, were = ("log", "it", "was") if len(missing) == 1 else ("logs", "they", "were")
    return (
        f"Read the {logs} of {ranks_in_words(missing)} to find out why {they} did not join, or whether {they} {were} "
        "started."
    )


def _where(host: str) -> str:
    names = host.split(", ") if host else []
    more = f" and {len(names) - 4} more hosts" if len(names) > 4 else ""
    return f" on {', '.join(names[:4])}{more}" if names else ""


def _fix(host: str, has_answered: bool, launcher: str) -> str:
    first = host.split(", ")[0]
    row = BY_NAME.get(launcher)
    if host and row and row.status_command and row.daemon_log:
        return (
            f"Check with `{row.status_command}` whether {first} is still in the cluster, and read {row.daemon_log} on "
            f"{first}."
        )
    if not host:
        return (
            "On each host without output, check that the job was started with the same MASTER_ADDR, MASTER_PORT and "
            "number of nodes, and run `doctor check`."
        )
    if has_answered:
        log = f"ssh {first} sudo dmesg -T | grep -i 'out of memory'"
        return f"Read the logs of {host}, and look for the OOM killer there:\n{log}"
    return f"Read the log of {first}, and check that the job was started there:\nssh {first} pgrep -af python"
