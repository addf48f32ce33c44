"""NCCL003: the effective settings of NCCL differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Job,
    NcclFacts,
    Scope,
    Setting,
    Severity,
    Sick,
    Split,
    Verdict,
    Well,
    check,
    correlates,
    describe,
    effective_value,
    healthy,
    is_foreign_variable,
    known_variable,
    split,
)

_HOSTS_OWN = {"NCCL_SOCKET_IFNAME": "ens5", "NCCL_IB_HCA": "mlx5_0", "NCCL_HOSTID": "b", "NCCL_DEBUG": "INFO"}


def _in_file(name: str, value: str) -> tuple[Setting, ...]:
    return (Setting(name, value, "system file", "/etc/nccl.conf", 3),)


@check(
    id="NCCL003",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    needs=(NcclFacts,),
    cases=lambda: (
        Well("nothing set", healthy(2, 2)),
        Well("the same everywhere", healthy(2, 2).environ(NCCL_ALGO="Ring", NCCL_CROSS_NIC="1")),
        Well("interfaces, host ids and logs of one host", healthy(2, 2).environ(ranks=(2, 3), **_HOSTS_OWN)),
        Well("the default written out", healthy(2, 2).environ(ranks=(2, 3), NCCL_CROSS_NIC="2")),
        Well("one value in two spellings", healthy().environ(NCCL_ALGO="ring").environ(ranks=(1,), NCCL_ALGO="Ring")),
        Well(
            "environment here, file there",
            healthy(2, 1)
            .environ(ranks=(0,), NCCL_ALGO="Ring")
            .alter(NcclFacts, ranks=(1,), settings=_in_file("NCCL_ALGO", "Ring")),
        ),
        Well("packages of two images", healthy(2, 1).environ(ranks=(0,), NCCL_VERSION="2.27.3-1")),
        Sick("an algorithm on one host alone", healthy(3, 2).environ(ranks=(4, 5), NCCL_ALGO="Tree"), ranks=(4, 5)),
        Sick(
            "a file on one host changes the channels",
            healthy(3, 2).alter(NcclFacts, ranks=(2, 3), settings=_in_file("NCCL_MIN_NCHANNELS", "32")),
            ranks=(2, 3),
        ),
        Sick("sockets on one rank", healthy(2, 2).environ(ranks=(3,), NCCL_IB_DISABLE="1"), ranks=(3,)),
        Sick("half of the ranks", healthy(2, 1).environ(ranks=(1,), NCCL_PROTO="Simple"), ranks=(0, 1)),
        Sick(
            "a time-out of one host",
            healthy(3, 1).environ(ranks=(1,), NCCL_IB_TIMEOUT="22"),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
    ),
)
def settings_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks run NCCL with the same effective settings.

    Why it hurts: ranks that choose another algorithm, protocol, number of channels or network wait for data that
    never comes: the first collective hangs, or is cut short, with no message that names the setting.
    Fix: set it on every rank or on none: export it in the job script, pass it with `mpirun -x` or `srun --export=ALL`,
    and bring /etc/nccl.conf and ~/.nccl.conf of the hosts into line.
    """
    for name in sorted(_names(job)):
        found = split(job, NcclFacts, lambda nccl, name=name: effective_value(name, nccl.get(name)))  # type: ignore[misc]
        yield from _differences(job, name, found)


def _names(job: Job) -> set[str]:
    names = {setting.name for nccl, _ in job.each(NcclFacts) for setting in nccl.settings}
    return {name for name in names if not is_foreign_variable(name) and _matters(name)}


def _matters(name: str) -> bool:
    info = known_variable(name)
    return info is not None and info.peers != "may differ"


def _differences(job: Job, name: str, found: Split) -> Iterator[Finding]:
    if not found.minorities:
        return
    info = known_variable(name)
    ranks = tuple(rank for group in found.minorities for rank in group.ranks)
    common = "no common value" if found.common is None else f"elsewhere {_shown(found.common.value)}"
    values = ", ".join(_shown(group.value) for group in found.minorities[:4])
    yield Finding(
        f"{name} differs: {values}; {common}" if found.common else f"{name} differs, split evenly: {values}",
        ranks=ranks,
        evidence={
            "name": name,
            "values": describe(found),
            "origins": _origins(job, name),
            "goes_with": list(correlates(job, ranks)),
        },
        severity=None if info is not None and info.peers == "agree" else Severity.WARNING,
    )


def _shown(value: object) -> str:
    return "not set" if value is None else f"{value}"


def _origins(job: Job, name: str) -> list[str]:
    """Where the values come from, each place once."""
    places = (setting for nccl, _ in job.each(NcclFacts) if (setting := nccl.setting(name)))
    return list(dict.fromkeys(f"{one.source}:{one.line}" if one.line else one.source for one in places))[:8]
