"""NET007: a setting matches no network interface of the host."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import gloo_name_refused, parse_address, setting_text
from doctor.api import (
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    merge,
    source_of,
)
from doctor.facts import EnvironmentFacts, InterfaceFacts, NcclFacts, Setting
from doctor.knowledge.interface_syntax import (
    NcclList,
    gloo_names,
    list_fault,
    looks_like_nccl_syntax,
    nccl_interface_list,
    repaired_list,
)
from doctor.testing import Fails, Passes, healthy
from doctor_checks.network.interfaces._export_line import selecting_fix


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gloo.noaddr"):
        name = gloo_name_refused(group.first)
        if not looks_like_nccl_syntax(name or "") and "rp != nullptr" not in group.first.text:
            yield finding_from_logs(
                group,
                f"GLOO_SOCKET_IFNAME{f'={name}' if name else ''} names an interface that does not exist on the host",
                effect=_effect("GLOO_SOCKET_IFNAME", name) if name else "",
                fix="Run `unset GLOO_SOCKET_IFNAME`, or set it to the exact name of an interface that `ip -br address` "
                "shows on the host.",
                confidence=0.95,
            )


@check(
    id="NET007",
    severity=Severity.ERROR,
    when="PM",
    needs=(InterfaceFacts,),
    from_logs=_from_logs,
    impacts={
        r"NCCL found no|received an invalid address": (
            "The rank fails when NCCL starts, and the other ranks block until the timeout."
        ),
        r"^(?i:gloo)": "init_process_group() fails on the rank, and the other ranks block until the timeout.",
    },
    cases=lambda: (
        Passes("nothing is set", healthy(hosts=2, per_host=2)),
        Passes("a prefix", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="eth", GLOO_SOCKET_IFNAME="eth0")),
        Passes("an exact name", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="=eth0")),
        Passes("all but some", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="^docker,lo,virbr")),
        Passes("a portable list", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="ens,bond0,eth0")),
        Passes("one character counts as unset", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="x")),
        Fails("an interface of another machine", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="ens5"), ranks=(0, 1, 2, 3)),
        Fails(
            "a prefix where exact names are asked for", healthy(1, 2).environ(NCCL_SOCKET_IFNAME="=eth"), ranks=(0, 1)
        ),
        Fails("a space before the name", healthy(1, 2).environ(NCCL_SOCKET_IFNAME=" eth0"), ranks=(0, 1)),
        Fails(
            "everything is excluded on one host",
            healthy(2, 1).environ(ranks=(1,), NCCL_SOCKET_IFNAME="^lo,eth"),
            ranks=(1,),
        ),
        Fails(
            "an exclusion inside a list that excludes",
            healthy(1, 2).environ(NCCL_SOCKET_IFNAME="^docker,^virbr"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "an exclusion behind the names to use",
            healthy(1, 2).environ(NCCL_SOCKET_IFNAME="eth0,^lo,^usb0"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "GLOO_SOCKET_IFNAME of a missing interface",
            healthy(1, 2).environ(GLOO_SOCKET_IFNAME="bond1"),
            ranks=(0, 1),
        ),
        Fails(
            "Gloo needs every interface of its list",
            healthy(1, 2).environ(GLOO_SOCKET_IFNAME="eth0,eth1"),
            ranks=(0, 1),
        ),
        Fails("an address in place of a name", healthy(1, 2).environ(GLOO_SOCKET_IFNAME="10.0.0.1"), ranks=(0, 1)),
        Fails("TP_SOCKET_IFNAME of a missing interface", healthy(1, 2).environ(TP_SOCKET_IFNAME="ib0"), ranks=(0, 1)),
    ),
)
def interface_unmatched(job: Job) -> Iterator[Verdict]:
    """Ask whether NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME match network interfaces on the host.

    Why it hurts: NCCL fails with `Bootstrap : no socket interface found`, Gloo with `Unable to find address for`. Any
    other ranks block until the timeout.
    Fix: Run `unset NCCL_SOCKET_IFNAME`, or set it to interfaces that `ip -br address` shows on every host.
    """
    found: list[Finding] = []
    for interfaces, identical in job.each(InterfaceFacts, also=(NcclFacts, EnvironmentFacts)):
        found += [*_nccl(interfaces, identical), *_by_environment(interfaces, identical)]
    yield from merge(found)


def _nccl(interfaces: InterfaceFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    nccl = identical.find(NcclFacts)
    setting = nccl.setting("NCCL_SOCKET_IFNAME") if nccl else None
    wanted = nccl_interface_list(setting.value) if setting else None
    if setting is None or wanted is None:
        return
    if any(wanted.selects(one.name) for one in interfaces.interfaces):
        yield from _malformed(setting, wanted, identical)
        return
    hint = "" if wanted.exclude else _hint(wanted, interfaces)
    claim = (
        "excludes every network interface" if wanted.exclude else f"matches no {'' if hint else 'network '}interface"
    )
    yield Finding(
        f"{setting_text(setting)} {claim}{hint}",
        ranks=identical.ranks,
        evidence={"interfaces": _names(interfaces)},
        effect=_effect("NCCL_SOCKET_IFNAME", setting.value),
        fix=selecting_fix("NCCL_SOCKET_IFNAME", interfaces),
        explains=("NET027",),
        source=source_of(setting),
    )


def _malformed(setting: Setting, wanted: NcclList, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report an invalid entry in a list that selects interfaces: an interface meant to be excluded stays in use."""
    if fault := list_fault(setting.value):
        value = repaired_list(setting.value)
        fix = (
            f"In {setting.source}, set `NCCL_SOCKET_IFNAME={value}`."
            if source_of(setting)
            else f"export NCCL_SOCKET_IFNAME='{value}'"
        )
        yield Finding(
            f"{setting_text(setting)}: {fault}",
            ranks=identical.ranks,
            effect=_effect_of_entry(fault, exclude=wanted.exclude),
            fix=fix if value else "",
            severity=Severity.WARNING if wanted.exclude else Severity.INFO,
            source=source_of(setting),
        )


def _effect_of_entry(fault: str, *, exclude: bool) -> str:
    """The impact of an entry without effect in a list that still selects an interface."""
    if not exclude:
        return (
            "None as long as another entry matches the intended interface, because NCCL ignores entries without a "
            "match."
        )
    syntax = "accepts `^` and `=` only at the start of the list and " if "nothing" in fault else ""
    return f"NCCL {syntax}ignores entries without a match, so it may use an interface that was meant to be excluded."


def _hint(wanted: NcclList, interfaces: InterfaceFacts) -> str:
    names = _names(interfaces)
    for entry, _ in wanted.entries:
        plain = entry.strip()
        if entry != plain and any(name.startswith(plain) for name in names):
            return ": the value contains a space"
        if any(name.lower() == plain.lower() or name.lower().startswith(plain.lower()) for name in names):
            return f": {entry!r} is not an exact name" if wanted.exact else f": {entry!r} is case-sensitive"
        if parse_address(plain):
            return f": {entry!r} is an address, not an interface name"
    return ""


def _by_environment(interfaces: InterfaceFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    environment = identical.find(EnvironmentFacts)
    if environment is None:
        return
    value = environment.get("GLOO_SOCKET_IFNAME") or ""
    absent = [name for name in gloo_names(value) if interfaces.named(name) is None]
    if absent and not looks_like_nccl_syntax(value) and not any(_is_nccl_entry(name, interfaces) for name in absent):
        yield _missing("GLOO_SOCKET_IFNAME", value, absent, interfaces, identical)
    value = environment.get("TP_SOCKET_IFNAME") or ""
    if value and interfaces.named(value) is None:
        yield _missing("TP_SOCKET_IFNAME", value, [value], interfaces, identical)


def _is_nccl_entry(name: str, interfaces: InterfaceFacts) -> bool:
    """Whether the entry is valid for NCCL: a prefix, or a name and a port. NET011 reports that."""
    plain = name.partition(":")[0]
    return bool(plain) and any(one.name.startswith(plain) for one in interfaces.interfaces)


def _missing(
    variable: str, value: str, absent: list[str], interfaces: InterfaceFacts, identical: IdenticalRanks
) -> Finding:
    claim = "names an interface that does not exist"
    if parse_address(absent[0]):
        claim = "is an address, not the name of an interface"
    elif absent != [value]:
        claim = f"names {', '.join(absent)}, which {'does' if len(absent) == 1 else 'do'} not exist"
    return Finding(
        f"{variable}={value} {claim}",
        ranks=identical.ranks,
        evidence={"interfaces": _names(interfaces)},
        effect=_effect(variable, absent[0]),
        fix=selecting_fix(variable, interfaces),
        explains=("NET027",),
    )


def _effect(variable: str, name: str) -> str:
    """The error of the library that reads the variable; ``name``: the interface that it reports.

    TensorPipe: ``guessAddress`` in torch/csrc/distributed/rpc/tensorpipe_agent.cpp."""
    if variable == "TP_SOCKET_IFNAME":
        return "TensorPipe falls back to 127.0.0.1, so RPC workers on other hosts cannot connect."
    errors = {
        "NCCL_SOCKET_IFNAME": "NCCL fails with `Bootstrap : no socket interface found`.",
        "GLOO_SOCKET_IFNAME": f"Gloo fails with `Unable to find address for: {name}`.",
    }
    return f"{errors[variable]} Any other ranks block until the timeout."


def _names(interfaces: InterfaceFacts) -> list[str]:
    return [one.name for one in interfaces.interfaces]
