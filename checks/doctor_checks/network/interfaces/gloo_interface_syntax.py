"""NET011: GLOO_SOCKET_IFNAME uses NCCL syntax."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import gloo_name_refused, good_interfaces
from doctor.api import Finding, IdenticalRanks, Job, Severity, Verdict, check, event_groups, finding_from_logs, merge
from doctor.facts import EnvironmentFacts, InterfaceFacts
from doctor.knowledge.interface_syntax import gloo_names, looks_like_nccl_syntax, parse_nccl_list
from doctor.testing import Fails, Passes, healthy, logged


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gloo.noaddr"):
        value = gloo_name_refused(group.first) or ""
        names = (group.value("if") or "" for group in event_groups(job, "nccl.bootstrap.using", by=("if",)))
        name = next((name for name in names if value and name != value and name.startswith(value)), None)
        if looks_like_nccl_syntax(value) or name:
            yield finding_from_logs(
                group,
                f"GLOO_SOCKET_IFNAME={quoted(value)} {f'is only a prefix of {name}' if name else 'uses NCCL syntax'}, "
                "but Gloo accepts only exact names",
                fix=f"export GLOO_SOCKET_IFNAME={name}" if name else fix_of_value(value),
                confidence=0.95,
                explains=("NET007",),
            )


@check(
    id="NET011",
    severity=Severity.ERROR,
    when="PM",
    needs=(EnvironmentFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("not set", healthy(hosts=2, per_host=1)),
        Passes("an exact name", healthy(2, 1).environ(GLOO_SOCKET_IFNAME="eth0")),
        Passes("a list of exact names", healthy(1, 2).environ(GLOO_SOCKET_IFNAME="eth0,lo,")),
        Passes("NCCL's own variable may have it", healthy(2, 1).environ(NCCL_SOCKET_IFNAME="^docker,lo")),
        Passes("a missing interface is another illness", healthy(1, 2).environ(GLOO_SOCKET_IFNAME="ib0")),
        Fails("an exclusion", healthy(2, 1).environ(GLOO_SOCKET_IFNAME="^lo,docker"), ranks=(0, 1)),
        Fails("an equals sign", healthy(2, 2).environ(ranks=(2, 3), GLOO_SOCKET_IFNAME="=eth0"), ranks=(2, 3)),
        Fails("a prefix of an interface", healthy(1, 2).environ(GLOO_SOCKET_IFNAME="eth"), ranks=(0, 1)),
        Fails("a name with a port", healthy(1, 2).environ(GLOO_SOCKET_IFNAME="eth0:1"), ranks=(0, 1)),
        Fails(
            "an exclusion where interfaces can't be seen",
            healthy(1, 2).drop(InterfaceFacts).environ(GLOO_SOCKET_IFNAME="^docker0"),
            ranks=(0, 1),
        ),
        Passes(
            "GLOO_SOCKET_IFNAME of another machine",
            logged("RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth9"),
        ),
        Fails(
            "GLOO_SOCKET_IFNAME with an exclusion",
            logged(
                "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: ^lo,docker0"
            ),
        ),
        Fails(
            "a prefix that NCCL understands",
            logged(
                "node1:41:77 [0] NCCL INFO Bootstrap: Using ens5:10.0.0.1<0>",
                "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: ens",
            ),
        ),
    ),
)
def gloo_interface_syntax(job: Job) -> Iterator[Verdict]:
    """Ask whether GLOO_SOCKET_IFNAME contains only exact interface names.

    Why it hurts: init_process_group() fails with `Unable to find address for`, and any other ranks wait until the
    timeout.
    Fix: Set GLOO_SOCKET_IFNAME to the exact name of an interface that `ip -br address` shows.
    """
    found = []
    for environment, identical in job.each(EnvironmentFacts, also=(InterfaceFacts,)):
        value = environment.get("GLOO_SOCKET_IFNAME")
        interfaces = identical.find(InterfaceFacts)
        why = _fault(value, interfaces) if value else None
        if value and why:
            summary = f"GLOO_SOCKET_IFNAME={quoted(value)} {why}, but Gloo accepts only exact names"
            found.append(_finding(summary, value, interfaces, identical))
    yield from merge(found)


def _fault(value: str, interfaces: InterfaceFacts | None) -> str | None:
    names = gloo_names(value)
    if names and looks_like_nccl_syntax(value):
        return "uses NCCL syntax"
    for name in names:
        plain = name.partition(":")[0]
        if interfaces is None or not plain or interfaces.named(name) is not None:
            continue
        longer = next((one.name for one in interfaces.interfaces if one.name.startswith(plain)), None)
        if longer == plain:
            return "includes a port"
        if longer is not None:
            return f"{'is' if name == value else f'has {name},'} only a prefix of {longer}"
    return None


def quoted(value: str) -> str:
    """The value in quotation marks if it begins with ``=``, which reads as a slip otherwise."""
    return f"'{value}'" if value.startswith("=") else value


def fix_of_value(value: str) -> str:
    """An exact name if the value has one behind ``=``; empty, for the check's own, if not."""
    name = value.removeprefix("=")
    return f"export GLOO_SOCKET_IFNAME={name}" if name and name != value and "^" not in name else ""


def _finding(summary: str, value: str, interfaces: InterfaceFacts | None, identical: IdenticalRanks) -> Finding:
    # The usable interfaces that NCCL would select for this value.
    good = good_interfaces(interfaces) if interfaces else ()
    meant = tuple(one for one in good if parse_nccl_list(value).selects(one.name)) or good
    fix = f"export GLOO_SOCKET_IFNAME={meant[0].name}" if meant else fix_of_value(value)
    names = [one.name for one in interfaces.interfaces] if interfaces else []
    return Finding(summary, ranks=identical.ranks, evidence={"interfaces": names}, fix=fix)
