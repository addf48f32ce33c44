"""ENV007: MASTER_PORT is not a valid port for the master to listen on."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import PORT_CHOOSERS, whole_number
from doctor.api import Finding, IdenticalRanks, Job, Severity, Unknown, Verdict, check, merge
from doctor.facts import HostFacts, LaunchFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy


@check(
    id="ENV007",
    severity=Severity.ERROR,
    when="P",
    needs=(LaunchFacts,),
    impacts={
        r"to connect to": "The ranks with this port cannot connect to rank 0, and block until the timeout.",
        r"MASTER_PORT=0": "The other ranks cannot connect to rank 0, and block until the timeout.",
        r"is not a (?:valid port|number)": "init_process_group() fails on every rank with this setting.",
    },
    cases=lambda: (
        Passes("the default port", healthy(hosts=2, per_host=2).by_srun()),
        Passes("torchrun chose an ephemeral port", healthy().launched(MASTER_PORT="45123")),
        Passes(
            "root may bind port 80",
            healthy().by_srun().launched(MASTER_PORT="80").alter(ProcessFacts, user_id=0),
        ),
        Passes(
            "the kernel lets everybody bind port 80",
            healthy().by_srun().launched(MASTER_PORT="80").alter(HostFacts, unprivileged_port_start=80),
        ),
        Fails("an address where the port belongs", healthy().launched(MASTER_PORT="node0:29500"), ranks=(0, 1)),
        Fails("port 0", healthy(hosts=2, per_host=2).launched(ranks=(2, 3), MASTER_PORT="0"), ranks=(2, 3)),
        Fails("port 0 on all ranks", healthy().launched(MASTER_PORT="0"), ranks=(0, 1)),
        Fails("a digit too many", healthy().launched(MASTER_PORT="295000"), ranks=(0, 1)),
        Fails(
            "a port that this user may not bind",
            healthy().by_srun().launched(MASTER_PORT="80"),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "a port that the kernel gives to outgoing connections",
            healthy().by_srun().launched(MASTER_PORT="40000"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
    ),
)
def master_port_invalid(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_PORT is a valid port that rank 0 can listen on and the other ranks can connect to.

    Why it hurts: PyTorch raises an error, or rank 0 binds a port unknown to the other ranks, and they block until the
    timeout.
    Fix: Set the same free port from 1024 to 32767 on every host, for example with `export MASTER_PORT=29500`.
    """
    findings: list[Finding] = []
    by_port: dict[str, list[tuple[LaunchFacts, IdenticalRanks]]] = {}
    for launch, identical in job.each(LaunchFacts, also=(HostFacts, ProcessFacts)):
        if (text := launch.filled.get("MASTER_PORT")) is not None:
            by_port.setdefault(text, []).append((launch, identical))
    for text, launches in by_port.items():
        for verdict in _judge(text, launches):
            if isinstance(verdict, Finding):
                findings.append(verdict)
            else:
                yield verdict
    yield from merge(findings)


def _judge(text: str, launches: list[tuple[LaunchFacts, IdenticalRanks]]) -> Iterator[Verdict]:
    port = whole_number(text)
    if wrong := _wrong(text, port):
        ranks = tuple(rank for _, identical in launches for rank in identical.ranks)
        if port == 0 and 0 not in ranks:
            wrong = "MASTER_PORT=0 is not a port to connect to"
        yield Finding(wrong, ranks=ranks, evidence={"MASTER_PORT": text})
        return
    for launch, identical in launches:
        if port is not None and launch.launcher not in PORT_CHOOSERS and "TORCHELASTIC_RUN_ID" not in launch.filled:
            yield from _judge_low(port, launch, identical)
            yield from _judge_ephemeral(port, identical)


def _wrong(text: str, port: int | None) -> str | None:
    if port is None:
        return f"MASTER_PORT={text!r} is not a number"
    if port == 0:
        return "MASTER_PORT=0: rank 0 listens on a port that the kernel picks and other ranks cannot determine"
    return None if 0 < port < 65536 else f"MASTER_PORT={port} is not a valid port (1-65535)"


def _judge_low(port: int, launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Verdict]:
    """Report a privileged port; only rank 0 binds it."""
    if launch.rank not in (0, None) or port >= 1024:
        return
    host, process = identical.find(HostFacts), identical.find(ProcessFacts)
    first = host.unprivileged_port_start if host else None
    user = process.user_id if process else None
    if first is None or user is None:
        yield Unknown(
            f"it is unknown whether this user may bind port {port}",
            identical.ranks,
            "cat /proc/sys/net/ipv4/ip_unprivileged_port_start; id -u",
        )
    elif port < first and user != 0:
        yield Finding(
            f"MASTER_PORT={port} is a privileged port (below {first}): user ID {user} may lack the right to bind it",
            ranks=identical.ranks,
            severity=Severity.INFO,
            evidence={"MASTER_PORT": port, "unprivileged_port_start": first, "user_id": user},
            effect='Without CAP_NET_BIND_SERVICE, rank 0 fails with "Permission denied", and the others wait for it.',
        )


def _judge_ephemeral(port: int, identical: IdenticalRanks) -> Iterator[Finding]:
    host = identical.find(HostFacts)
    if host and host.port_range and host.port_range[0] <= port <= host.port_range[1]:
        low, high = host.port_range
        yield Finding(
            f"MASTER_PORT={port} is in the kernel's ephemeral port range ({low}-{high})",
            ranks=identical.ranks,
            severity=Severity.INFO,
            evidence={"MASTER_PORT": port, "port_range": [low, high]},
            effect="If an outgoing connection of the host already uses the port, rank 0 cannot bind it.",
            fix=f"Use a port below {low}, for example `export MASTER_PORT=29500`."
            if low > 29500
            else f"Reserve the port:\nsudo sysctl net.ipv4.ip_local_reserved_ports={port}",
        )
