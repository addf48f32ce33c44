"""NET003: two hosts have the same name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from doctor.api import Finding, Host, Job, Scope, Severity, Unknown, Verdict, check, ranks_in_words
from doctor.facts import HostFacts
from doctor.testing import Fails, Passes, healthy


@check(
    id="NET003",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="P",
    needs=(HostFacts,),
    needs_peers=True,
    cases=lambda: (
        Passes("every machine has a name of its own", healthy(hosts=4, per_host=2)),
        Passes(
            "two containers of one machine with one name",
            healthy(hosts=2, per_host=2).alter(HostFacts, boot_id="boot-0", hostname="trainer"),
        ),
        Fails(
            "cloned machines kept the name of their image",
            healthy(hosts=4, per_host=1).alter(HostFacts, hosts=("node1", "node3"), hostname="ubuntu"),
            ranks=(1, 3),
        ),
        Fails(
            "clones that share even their machine id",
            healthy(2, 2).alter(HostFacts, hostname="localhost", machine_id="cloned"),
            ranks=(0, 1, 2, 3),
        ),
    ),
)
def hostname_collision(job: Job) -> Iterator[Verdict]:
    """Ask whether every host has a unique name.

    Why it hurts: launchers count one host instead of two, logs of the hosts cannot be distinguished, and if the master
    has this name, a rank that connects to it by name may reach its own host.
    Fix: Give all but one of the hosts another name with `sudo hostnamectl set-hostname`.
    """
    by_name: dict[str, list[Host]] = {}
    for host in job.hosts:
        by_name.setdefault(host.name, []).append(host)
    ranks = {local.hosts[0].index: local.ranks for local in job.by_host()}
    for name, hosts in by_name.items():
        blamed = tuple(rank for host in hosts for rank in ranks[host.index])
        machines = {host.boot_id or host.machine_id for host in hosts}
        if not all(machines):
            yield Unknown(
                f"neither the boot id nor the machine id of {name} is visible", blamed, "mount /proc and /etc"
            )
        elif len(machines) > 1:
            identities = [f"boot ID {host.boot_id} (machine ID {host.machine_id})" for host in hosts]
            yield Finding(
                f"{len(machines)} hosts have the same name, {name}",
                ranks=blamed,
                evidence={"hosts": identities[:8]},
                effect=_EFFECT_ON_MASTER if 0 in blamed else "",
                fix=f"Rename {_renamed([ranks[host.index] for host in hosts])}, for example with "
                f"`sudo hostnamectl set-hostname {shlex.quote(f'{name}-2')}`.",
            )


_EFFECT_ON_MASTER = (
    "A rank that connects to the master by name may reach its own host, launchers count one host instead of two, and "
    "logs of the hosts cannot be distinguished."
)


def _renamed(hosts: list[tuple[int, ...]]) -> str:
    """``the host of rank 3``: all but one of the hosts, by their ranks; that of rank 0 keeps its name."""
    others = sorted(hosts)[1:]
    if len(others) == 1:
        return f"the host of {ranks_in_words(others[0])}"
    return f"the hosts of {ranks_in_words(tuple(sorted(rank for ranks in others for rank in ranks)))}"
