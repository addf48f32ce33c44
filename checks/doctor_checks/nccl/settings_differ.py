"""NCCL003: the effective settings of NCCL differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from doctor.api import (
    ALONE,
    BaselineDeviation,
    Finding,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Verdict,
    baseline_values,
    check,
    correlates,
    describe,
    ranks_in_words,
    split,
    stands_alone,
)
from doctor.facts import NcclFacts, Setting
from doctor.knowledge.environment_variables import is_foreign as is_foreign_variable
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.variable_values import effective as effective_value
from doctor.testing import Fails, Passes, healthy

_HOSTS_OWN = {"NCCL_SOCKET_IFNAME": "ens5", "NCCL_IB_HCA": "mlx5_0", "NCCL_HOSTID": "b", "NCCL_DEBUG": "INFO"}


def _in_file(name: str, value: str) -> tuple[Setting, ...]:
    return (Setting(name, value, "system file", "/etc/nccl.conf", 3),)


@check(
    id="NCCL003",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    needs=(NcclFacts,),
    uses_baseline=True,
    needs_peers=True,
    impacts={
        r"NCCL_ALGO|NCCL_PROTO": (
            "Ranks that select different algorithms or protocols wait for data that never arrives. The first "
            "collective hangs, and no log message names the setting."
        ),
        r"CHANNELS|CTAS": (
            "Ranks that use different numbers of channels wait for data that never arrives. The first collective "
            "hangs, and no log message names the setting."
        ),
        r"NCCL_IB_DISABLE|NCCL_IB_HCA|NCCL_NET|IFNAME": (
            "Ranks that select different networks cannot connect: the job hangs or fails when NCCL starts."
        ),
        r"NCCL_IB_TIMEOUT|RETRY": ("When packets are lost, connections fail earlier on some ranks than on others."),
    },
    cases=lambda: (
        Passes("nothing set", healthy(2, 2)),
        Passes("the same everywhere", healthy(2, 2).environ(NCCL_ALGO="Ring", NCCL_CROSS_NIC="1")),
        Passes("interfaces, host ids and logs of one host", healthy(2, 2).environ(ranks=(2, 3), **_HOSTS_OWN)),
        Passes("the default written out", healthy(2, 2).environ(ranks=(2, 3), NCCL_CROSS_NIC="2")),
        Passes("one value in two spellings", healthy().environ(NCCL_ALGO="ring").environ(ranks=(1,), NCCL_ALGO="Ring")),
        Passes(
            "environment here, file there",
            healthy(2, 1)
            .environ(ranks=(0,), NCCL_ALGO="Ring")
            .alter(NcclFacts, ranks=(1,), settings=_in_file("NCCL_ALGO", "Ring")),
        ),
        Passes("packages of two images", healthy(2, 1).environ(ranks=(0,), NCCL_VERSION="2.27.3-1")),
        Passes(
            "one process, as in the capture",
            healthy(1, 1).environ(NCCL_ALGO="ring").expecting(healthy().environ(NCCL_ALGO="Ring")),
        ),
        Passes(
            "what belongs to one job alone",
            healthy().environ(NCCL_COMM_ID="10.0.0.1:4000").expecting(healthy().environ(NCCL_COMM_ID="10.9.0.1:4000")),
        ),
        Passes(
            "a capture whose own ranks disagree",
            healthy().expecting(healthy().environ(ranks=(1,), NCCL_ALGO="Tree")),
        ),
        Fails("an algorithm on one host alone", healthy(3, 2).environ(ranks=(4, 5), NCCL_ALGO="Tree"), ranks=(4, 5)),
        Fails(
            "a file on one host changes the channels",
            healthy(3, 2).alter(NcclFacts, ranks=(2, 3), settings=_in_file("NCCL_MIN_NCHANNELS", "32")),
            ranks=(2, 3),
        ),
        Fails("sockets on one rank", healthy(2, 2).environ(ranks=(3,), NCCL_IB_DISABLE="1"), ranks=(3,)),
        Fails("half of the ranks", healthy(2, 1).environ(ranks=(1,), NCCL_PROTO="Simple"), ranks=(0, 1)),
        Fails(
            "a time-out of one host",
            healthy(3, 1).environ(ranks=(1,), NCCL_IB_TIMEOUT="22"),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Fails(
            "half of the ranks, and a baseline that shows which",
            healthy(2, 1).environ(ranks=(1,), NCCL_PROTO="Simple").expecting(healthy().environ(NCCL_PROTO="Simple")),
            ranks=(0,),
        ),
        Fails(
            "two settings of the capture are set nowhere",
            healthy(2, 2).expecting(healthy().environ(NCCL_ALGO="Ring", NCCL_IB_DISABLE="1")),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "one process with a setting that the baseline lacks",
            healthy(1, 1).environ(NCCL_IB_TIMEOUT="22").expecting(healthy()),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
    ),
)
def settings_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks run NCCL with the same effective settings.

    Why it hurts: ranks that select different algorithms, protocols, channel counts or networks wait for data that
    never arrives. The first collective hangs or truncates data, and no message names the setting.
    Fix: Set the variable on every rank or on none, for example in the job script.
    """
    if stands_alone(job, job.expected.each(NcclFacts) if job.expected else ()):
        yield Skip(ALONE)
        return
    unlike: dict[tuple[tuple[int, ...], Severity | None], list[tuple[str, MajoritySplit]]] = {}
    jobs = (job, job.expected) if job.expected else (job,)
    known = {setting.name for one in jobs for nccl, _ in one.each(NcclFacts) for setting in nccl.settings}
    names = sorted(name for name in known if not is_foreign_variable(name) and _matters(name))
    expected = baseline_values(job, lambda worked: _values(worked, names))
    for name in names:
        found = split(job, NcclFacts, partial(_value, name), expected=expected.get(name))
        if found.expected and found.minorities:
            unlike.setdefault((found.odd, _severity(name)), []).append((name, found))
        else:
            yield from _differences(job, name, found)
    for (ranks, severity), settings in unlike.items():
        # Usually one script or one file sets all of them.
        rows = tuple(found.unlike(name, _shown) for name, found in settings)
        deviation = BaselineDeviation(rows, all(found.drifted for _, found in settings))
        finding = deviation.finding(
            ranks,
            {
                "values": {name: describe(found._replace(expected=None), absent="not set") for name, found in settings},
                "origins": {name: origins for name, _ in settings if (origins := _origins(job, name))},
                "goes_with": list(correlates(job, ranks)),
            },
            severity=severity,
            explains=tuple(found for name, _ in settings for found in _CONSEQUENCES.get(name, ())),
        )
        new = ", or record a new baseline with `doctor capture -o expected.json`" if deviation.drifted else ""
        yield finding.extended({}, f"{_as_in_the_baseline(ranks, settings)}{new}.")


def _as_in_the_baseline(ranks: tuple[int, ...], settings: Sequence[tuple[str, MajoritySplit]]) -> str:
    expected = [(name, found.expected.value) for name, found in settings if found.expected is not None]
    wanted = [f"set `{name}={value}`" if value is not None else f"unset `{name}`" for name, value in expected[:4]]
    what = " and ".join(wanted)
    return f"{what[:1].upper()}{what[1:]} on {ranks_in_words(ranks, 4)}, as in the baseline"


def _value(name: str, nccl: NcclFacts) -> str | None:
    return effective_value(name, nccl.get(name))


def _values(worked: Job, names: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    for nccl, _ in worked.each(NcclFacts):
        yield from ((name, _value(name, nccl)) for name in names if name not in _OF_ONE_JOB)


_OF_ONE_JOB = frozenset({"NCCL_COMM_ID", "NCCL_IB_ADDR_RANGE", "NCCL_SOCKET_MAGIC"})
"""Addresses and an identifier of one job: those of another job cannot serve as a baseline."""


def _matters(name: str) -> bool:
    info = known_variable(name)
    return info is not None and info.peers != "may differ"


def _differences(job: Job, name: str, found: MajoritySplit) -> Iterator[Finding]:
    if not found.minorities:
        return
    sides = [f"{_shown(group.value)} on {ranks_in_words(group.ranks, 4)}" for group in found.minorities[:4]]
    others = [f"{_shown(found.common.value)} on the others"] if found.common else []
    yield Finding(
        f"{name} differs between ranks: {', '.join([*sides, *others])}",
        ranks=found.odd,
        fix=_fix(job, name, found),
        evidence={
            "values": describe(found, absent="not set"),
            "origins": _origins(job, name),
            "goes_with": list(correlates(job, found.odd)),
        },
        severity=_severity(name),
    )


def _fix(job: Job, name: str, found: MajoritySplit) -> str:
    files = list(dict.fromkeys(place.rpartition(":")[0] for place in _origins(job, name) if "/" in place))
    if files:
        where, what = " and ".join(files), "the file" if len(files) == 1 else "the files"
        holders = [rank for nccl, same in job.each(NcclFacts) if _is_in_file(nccl, name) for rank in same.ranks]
        on = f" on {job.place_of(holders)}"
        return f"Remove {name} from {where}{on}, or make {what} identical on all hosts."
    if found.common is None:
        return f"Set {name} to the same value on all ranks, or unset it on all ranks."
    on = ranks_in_words(found.odd, 4)
    if found.common.value is None:
        return f"Unset {name} on {on}, or set it to the same value on all ranks."
    return f"Set `{name}={found.common.value}` on {on}, as on the other ranks."


def _is_in_file(nccl: NcclFacts, name: str) -> bool:
    setting = nccl.setting(name)
    return setting is not None and "/" in setting.source


def _severity(name: str) -> Severity | None:
    info = known_variable(name)
    return None if info is not None and info.peers == "agree" else Severity.WARNING


_CONSEQUENCES = {"NCCL_IB_GID_INDEX": ("NET021",), "NCCL_SOCKET_FAMILY": ("NET016",)}
"""Checks that, with the same baseline, report the consequence of a setting."""


def _shown(value: object) -> str:
    return "not set" if value is None else f"{value}"


def _origins(job: Job, name: str) -> list[str]:
    places = (setting for nccl, _ in job.each(NcclFacts) if (setting := nccl.setting(name)))
    return list(dict.fromkeys(f"{one.source}:{one.line}" if one.line else one.source for one in places))[:8]
