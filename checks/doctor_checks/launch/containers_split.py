"""ENV018: ranks of one host in separate namespaces."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Job,
    LocalRanks,
    Rank,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    conjunction,
    merge,
    ranks_in_words,
)
from doctor.facts import HostFacts, Namespace, ProcessFacts
from doctor.testing import Fails, Passes, healthy

KINDS = ("shm", "ipc", "pid", "net")
"""What P2P and shared memory depend on."""

NAMESPACES = {
    "ipc": "IPC",
    "pid": "PID",
    "net": "network",
}

_OPTIONS = {"shm": "--ipc=host", "ipc": "--ipc=host", "pid": "--pid=host", "net": "--network=host"}
"""Options of docker and podman that make a container use the namespace, and /dev/shm, of its host."""

Spaces = tuple[object, ...]
"""The values of :data:`KINDS`; ``None`` if one is unknown."""
UNKNOWN: Spaces = (None,) * len(KINDS)


@check(
    id="ENV018",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="P",
    needs=(ProcessFacts,),
    compares_ranks=True,
    needs_peers=True,
    cases=lambda: (
        Passes("one set of namespaces a machine", healthy(hosts=2, per_host=8)),
        Passes("only the mount namespace differs", healthy().alter(ProcessFacts, ranks=(1,), namespaces=_own("mnt"))),
        Fails(
            "one rank has a /dev/shm of its own",
            healthy(per_host=4).alter(ProcessFacts, ranks=(3,), shm_device=91),
            ranks=(3,),
        ),
        Fails(
            "each rank of a machine in its own container",
            healthy(per_host=2)
            .alter(ProcessFacts, ranks=(0,), shm_device=91, namespaces=_own("ipc", "pid", "net"))
            .alter(ProcessFacts, ranks=(1,), shm_device=92, namespaces=_own("mnt")),
            ranks=(0, 1),
        ),
        Fails(
            "two pods on one machine",
            healthy(hosts=2, per_host=2).alter(HostFacts, boot_id="boot-0"),
            ranks=(0, 1, 2, 3),
            hosts=("node0", "node1"),
        ),
        Fails(
            "a rank with a network namespace of its own",
            healthy(hosts=2, per_host=4).alter(ProcessFacts, ranks=(1,), namespaces=_own("net")),
            ranks=(1,),
            hosts=("node0",),
        ),
    ),
)
def containers_split(job: Job) -> Iterator[Verdict]:
    """Ask whether the ranks of one host share /dev/shm and their IPC, PID and network namespaces.

    Why it hurts: NCCL uses neither P2P nor shared memory between ranks in separate namespaces. Their traffic goes
    through the network card or a bridge, which is many times slower.
    Fix: Run all ranks of a host in one container, or start each container with
    `--ipc=host --pid=host --network=host`.
    """
    machines = [_spaces_of(local) for local in job.by_machine()]
    for known in machines:
        if len(known) > 1 and (blind := tuple(rank.number for rank, spaces in known if spaces == UNKNOWN)):
            yield Unknown(
                "the namespaces of the process are unknown", blind, "ls -l /proc/self/ns; stat -c %d /dev/shm"
            )
    split = [(known, differing) for known in machines if (differing := _differing(known))]
    yield from merge(_report(known, differing, is_only=len(split) == 1) for known, differing in split)


def _spaces_of(local: LocalRanks) -> list[tuple[Rank, Spaces]]:
    known: list[tuple[Rank, Spaces]] = []
    last: ProcessFacts | None = None
    for rank in local.members:
        if (process := rank.find(ProcessFacts)) is None:
            continue
        same = last and last.shm_device == process.shm_device and last.namespaces == process.namespaces
        known.append((rank, known[-1][1] if same else _spaces(process)))
        last = process
    return known


def _differing(known: list[tuple[Rank, Spaces]]) -> tuple[str, ...]:
    if len({spaces for _, spaces in known}) < 2:
        return ()
    values = zip(*(spaces for _, spaces in known), strict=True)
    return tuple(kind for kind, seen in zip(KINDS, values, strict=True) if len({*seen} - {None}) > 1)


def _spaces(process: ProcessFacts) -> Spaces:
    seen = {space.kind: space.identity for space in process.namespaces}
    return (process.shm_device, seen.get("ipc"), seen.get("pid"), seen.get("net"))


def _report(known: list[tuple[Rank, Spaces]], differing: tuple[str, ...], *, is_only: bool) -> Finding:
    """Report one machine; ``is_only``: no other is split, so that its ranks and hosts can be named in the summary."""
    groups: dict[Spaces, list[int]] = {}
    for rank, spaces in known:
        groups.setdefault(spaces, []).append(rank.number)
    # No baseline: namespaces and device numbers are created anew for every job.
    ordered = sorted(groups.values(), key=lambda ranks: -len(ranks))
    tie = len(ordered[0]) == len(ordered[1])
    blamed = tuple(sorted(number for ranks in (ordered if tie else ordered[1:]) for number in ranks))
    who, others, where = "Ranks" if tie else "Some ranks", "" if tie else " with the others", "on one host"
    if is_only:
        hosts = list(dict.fromkeys(rank.host.name for rank, _ in known))
        where = f"on {hosts[0]}" if len(hosts) == 1 else f"on one host ({', '.join(hosts[:4])})"
        who = who if tie else ranks_in_words(blamed).capitalize()
    verb = "does" if who.startswith("Rank ") else "do"
    return Finding(
        f"{who} {where} {verb} not share {_shared(differing)}{others}",
        ranks=blamed,
        evidence={
            "differing": list(differing),
            "groups": [ranks_in_words(tuple(sorted(ranks))) for ranks in ordered[:8]],
        },
        effect=_effect(differing),
        fix="Run all ranks of a host in one container, or start each container with "
        f"`{' '.join(dict.fromkeys(_OPTIONS[kind] for kind in differing))}`.",
    )


def _shared(differing: tuple[str, ...]) -> str:
    """``/dev/shm or the IPC and PID namespaces``."""
    names = [NAMESPACES[kind] for kind in differing if kind in NAMESPACES]
    named = f"the {conjunction(names)} namespace" if names else ""
    parts = ("/dev/shm" if "shm" in differing else "", named + ("s" if len(names) > 1 else ""))  # noqa: S108
    return " or ".join(filter(None, parts))


def _effect(differing: tuple[str, ...]) -> str:
    """Source: src/transport/shm.cc and p2p.cc; both require the same /dev/shm, compared by its device number."""
    if "shm" in differing:
        return (
            "NCCL uses P2P and shared memory only between ranks with the same /dev/shm, so the traffic between these "
            "ranks goes through the network, which is many times slower."
        )
    if "net" in differing:
        return "P2P may fail: NCCL passes cuMem handles over UNIX sockets that exist only in one network namespace."
    return "One rank cannot open the CUDA memory handles and shared memory segments of another."


def _own(*kinds: str) -> tuple[Namespace, ...]:
    """Namespaces of host 0 (as in a healthy job), except for ``kinds``."""
    return tuple(Namespace(kind, f"{kind}:[{'own' if kind in kinds else 0}]") for kind in ("ipc", "mnt", "net", "pid"))
