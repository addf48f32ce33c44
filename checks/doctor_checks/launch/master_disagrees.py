"""ENV006: ranks use different master addresses or ports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from doctor.analysis.interface_choice import is_loopback, parse_address
from doctor.analysis.logs.event_timeline import set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    Host,
    Job,
    LaunchFile,
    Scope,
    Severity,
    Unknown,
    Verdict,
    Violation,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
    rule,
)
from doctor.facts import Address, Event, Interface, InterfaceFacts, MasterFacts
from doctor.lint.launch.partial_text import IN_STEP, is_known, names_in, shown
from doctor.lint.launch.process_launches import (
    endpoint_of,
    hosts_of,
    is_loopback_name,
    port_of,
    rank_of_host,
    starts_of,
)
from doctor.testing import Fails, Passes, healthy, logged
from doctor.testing.script_cases import shell_fails, shell_passes

MOST_FINDINGS = 8
"""Endpoints reported separately; more have a common cause, such as localhost on every host."""


class MasterEndpoint(NamedTuple):
    """The master endpoint of a rank: a host of the job by its index, else addresses; and the port."""

    host: int | None
    addresses: tuple[str, ...]
    port: int | None


class ReportedMaster(NamedTuple):
    """The master address configured on one rank, as reports show it."""

    told: str
    address: str
    rank: int
    host: Host


def _by_commands(job: Job) -> Iterator[Finding]:
    """Report start commands of several hosts with different masters.

    Two consecutive jobs use the same node rank, so their commands are not compared.
    """
    masters = {(one.file, one.line): one.value("host") for one in _given(job, "launch.master_given")}
    nodes = {(one.file, one.line): one.value("node") for one in _given(job, "launch.node_given")}
    pairs = {(str(nodes[place]), str(master)) for place, master in masters.items() if place in nodes}
    if len(dict(pairs)) > 1 and len({master for _, master in pairs}) > 1:
        (group,) = event_groups(job, "launch.master_given")
        yield _differing(group, {f"host {node}": master for node, master in sorted(pairs)}, 0.9)


def _by_attempts(job: Job) -> Iterator[Finding]:
    """Report ranks that time out while connecting to different masters.

    A name and an address may refer to the same host, so only addresses are compared.
    """
    for group in event_groups(job, "torch.store.connect_timeout"):
        waiting = {
            (f"rank {event.rank}" if event.rank is not None else event.host or event.file): event.value("host") or ""
            for event in group.events
            if not set_up_after(job, event)
        }
        addresses = {who: host for who, host in waiting.items() if parse_address(host) is not None}
        if len(set(addresses.values())) > 1:
            yield _differing(group, addresses, 0.8)


def _waits(rank: int, master: str) -> str:
    return f"[rank{rank}]: The client socket has timed out after 300000ms while trying to connect to ({master}, 29500)."


def _differing(group: EventGroup, masters: dict[str, str], confidence: float) -> Finding:
    return finding_from_logs(
        group,
        f"Hosts are configured with different masters: {', '.join(sorted(set(masters.values())))}",
        ranks=(),
        evidence={"masters": masters},
        confidence=confidence,
        fix="Pass the same --master_addr (or --rdzv-endpoint) on every host: an address of the host with node rank 0.",
        explains=("NET006", "ENV005", "ENV015"),
    )


def _given(job: Job, kind: str) -> tuple[Event, ...]:
    return job.evidence.of(kind) if job.evidence else ()


@check(
    id="ENV006",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(MasterFacts,),
    from_logs=(_by_commands, _by_attempts),
    impacts={
        r"loopback|itself": (
            "Each host connects to itself, so its ranks wait for the ranks of the other hosts until the timeout."
        ),
    },
    cases=lambda: (
        Passes("one address for all", healthy(hosts=2, per_host=2)),
        Passes(
            "the master's own host resolves its name to loopback",
            healthy(hosts=2, per_host=2).alter(MasterFacts, ranks=(0, 1), resolved=("127.0.1.1",)),
        ),
        Passes(
            "the master's address is also that of a bridge elsewhere",
            healthy(hosts=3, per_host=1).alter(InterfaceFacts, hosts=("node2",), interfaces=_with_address_of_node0),
        ),
        Passes(
            "one host knows the master by another name",
            healthy(hosts=3, per_host=2).alter(MasterFacts, ranks=(2, 3), address="node0.cluster"),
        ),
        Fails(
            "each host uses its own address",
            healthy(hosts=2, per_host=2).alter(
                MasterFacts, ranks=(2, 3), address="10.0.0.2", resolved=("10.0.0.2",), is_local=True
            ),
            ranks=(2, 3),
        ),
        Fails(
            "localhost on every host",
            healthy(hosts=3, per_host=1).alter(
                MasterFacts, address="localhost", resolved=("::1", "127.0.0.1"), is_local=True
            ),
            ranks=(1, 2),
        ),
        Fails(
            "localhost on many hosts: one finding",
            healthy(hosts=12, per_host=1).alter(
                MasterFacts, address="localhost", resolved=("127.0.0.1",), is_local=True
            ),
            ranks=tuple(range(1, 12)),
        ),
        Fails(
            "a stale /etc/hosts on one host",
            healthy(hosts=3, per_host=2).alter(MasterFacts, ranks=(4, 5), resolved=("192.168.7.9",)),
            ranks=(4, 5),
        ),
        Fails(
            "one rank has another port",
            healthy(hosts=2, per_host=2).alter(MasterFacts, ranks=(0,), port=29501),
            ranks=(0,),
        ),
        Passes(
            "commands of two hosts that name one master",
            logged(
                "python -m torch.distributed.launch --nnodes=2 --node_rank=0 --master_addr=10.1.0.3 train.py",
                "python -m torch.distributed.launch --nnodes=2 --node_rank=1 --master_addr=10.1.0.3 train.py",
            ),
        ),
        Passes(
            "two jobs, one after the other",
            logged(
                "torchrun --nnodes=2 --node-rank=0 --master-addr=10.1.0.3 train.py",
                "torchrun --nnodes=2 --node-rank=0 --master-addr=10.1.0.7 train.py",
            ),
        ),
        Passes(
            "ranks that wait for one master",
            logged(*(_waits(rank, "10.1.0.3") for rank in (1, 2))),
        ),
        Fails("each waits for another master", logged(_waits(0, "10.1.0.3"), _waits(8, "10.1.0.4"))),
        Fails(
            "each host uses itself",
            logged(
                "torchrun --nnodes=2 --node-rank=0 --master-addr=10.1.0.3 --master-port=29501 train.py",
                "torchrun --nnodes=2 --node-rank=1 --master-addr=10.1.0.4 --master-port=29501 train.py",
            ),
        ),
    ),
)
def master_disagrees(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks use the same master address and port.

    Why it hurts: ranks with another master wait for a store that does not exist, while the others wait for them.
    Fix: Set MASTER_ADDR to the name of the host of rank 0 on every host, not to localhost.
    """
    owners = _owners(job)
    places: dict[MasterEndpoint, list[ReportedMaster]] = {}
    for master, identical in job.each(MasterFacts):
        told, known = f"{master.address}:{master.port}", dict[int, MasterEndpoint]()
        for rank in identical.members if master.resolved else ():
            place = known.get(rank.host.index) or known.setdefault(rank.host.index, _place(master, rank.host, owners))
            places.setdefault(place, []).append(ReportedMaster(told, master.resolved[0], rank.number, rank.host))
    right = _right(job, places)
    if right is not None:
        # Ranks that use an address at which the master's host finds itself share its endpoint, even if no interface
        # shows it: a second host has the same address, or network address translation is in use.
        own = {look.address for look in places[right] if right.host is not None}
        own = {address for address in own if not is_loopback(address)}
        for place in [place for place in places if place.host is None and place.port == right.port]:
            if own.intersection(place.addresses):
                places[right] += places.pop(place)
    if len(places) < 2 or _meet_somewhere(places):
        return
    if right is not None and right.host is not None and right.host not in owners.known:
        yield Unknown("the addresses of the master's host are unknown", unhide="collect the interfaces of every host")
        return
    wrong = [looks for place, looks in places.items() if place != right]
    where = ""
    if len(wrong) > MOST_FINDINGS:
        where = f"{len(wrong)} other masters"
        wrong = [[look for looks in wrong for look in looks]]
    for looks in wrong:
        yield _report(looks, places.get(right) if right else None, where)


class Owners(NamedTuple):
    """The host that owns each address, if it is unique, and the hosts whose addresses are known."""

    of: dict[str, int]
    known: set[int]


def _owners(job: Job) -> Owners:
    """Addresses that several hosts have (container bridges) identify no host."""
    owners: dict[str, set[int]] = {}
    known: set[int] = set()
    for host in job.hosts:
        interfaces = host.find(InterfaceFacts)
        if interfaces is not None:
            known.add(host.index)
        for interface in interfaces.interfaces if interfaces else ():
            for address in interface.addresses:
                owners.setdefault(address.address, set()).add(host.index)
    return Owners({address: next(iter(hosts)) for address, hosts in owners.items() if len(hosts) == 1}, known)


def _place(master: MasterFacts, host: Host, owners: Owners) -> MasterEndpoint:
    """A rank whose master is on its own host uses that host, whatever the name resolves to."""
    if master.is_local or all(is_loopback(address) for address in master.resolved):
        return MasterEndpoint(host.index, (), master.port)
    owner = next((owners.of[address] for address in master.resolved if address in owners.of), None)
    addresses = tuple(sorted(master.resolved)) if owner is None else ()
    return MasterEndpoint(owner, addresses, master.port)


def _right(job: Job, places: dict[MasterEndpoint, list[ReportedMaster]]) -> MasterEndpoint | None:
    """The endpoint on the host of rank 0, which hosts the store; else that of most ranks. ``None``: a tie.

    A baseline does not help: every job has its own master."""
    home = next((rank.host.index for rank in job.ranks if rank.number == 0), None)
    at_home = {place: looks for place, looks in places.items() if place.host == home and home is not None}
    ordered = sorted((at_home or places).items(), key=lambda item: -len(item[1]))
    if len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1]):
        return None
    return ordered[0][0] if ordered else None


def _meet_somewhere(places: dict[MasterEndpoint, list[ReportedMaster]]) -> bool:
    """Whether a name with several addresses (round robin) resolves to one that all ranks share."""
    if len({place.port for place in places}) > 1 or any(place.host is not None for place in places):
        return False
    return bool(set.intersection(*(set(place.addresses) for place in places)))


def _report(looks: list[ReportedMaster], right: list[ReportedMaster] | None, where: str) -> Finding:
    first, ranks = looks[0], tuple(look.rank for look in looks)
    elsewhere = f"the others {_shown(right[0])}" if right else "without a majority"
    verb = "uses" if len(ranks) == 1 else "use"
    return Finding(
        f"{ranks_in_words(ranks).capitalize()} {verb} {where or f'master {_shown(first)}'}, {elsewhere}",
        ranks=ranks,
        evidence={
            "told": first.told,
            "resolved": first.address,
            "on_host": first.host.name,
            "elsewhere_told": right[0].told if right else None,
            "elsewhere_resolved": right[0].address if right else None,
        },
        fix=_fix(first, right[0]) if right and not is_loopback(right[0].address) else "",
        explains=() if is_loopback(first.address) else ("NET006",),  # NET005 explains loopback
    )


def _fix(odd: ReportedMaster, right: ReportedMaster) -> str:
    name, _, port = right.told.rpartition(":")
    name, port = shlex.quote(name), shlex.quote(port)
    export = f"export MASTER_ADDR={name} MASTER_PORT={port}"
    if odd.told.rpartition(":")[0] != right.told.rpartition(":")[0] or odd.address == right.address:
        return f"Use the same master on {odd.host.name} as on the other hosts:\n{export}"
    return f"On {odd.host.name}, correct the name service so that `getent ahosts {name}` prints {right.address}."


def _with_address_of_node0(old: tuple[Interface, ...]) -> tuple[Interface, ...]:
    return (*old, Interface("br-lab", "container-bridge", addresses=(Address("inet", "10.0.0.1", 24),)))


def _shown(look: ReportedMaster) -> str:
    name, _, port = look.told.rpartition(":")
    place = f" ({look.address}, {look.host.name} itself)" if is_loopback(look.address) else f" ({look.address})"
    return f"{name}:{port}" + ("" if look.address == name else place)


_OLD = "python -m torch.distributed.launch --nproc_per_node=8 --nnodes=2"


@rule(
    check=master_disagrees,
    reads=LaunchFile,
    cases=lambda: (
        shell_fails(
            "each host is told itself",
            "# node 1",
            f'{_OLD} --node_rank=0 --master_addr="192.168.1.3" --master_port=12581 train.py > 1.log 2>&1 &',
            "# node 2",
            f'{_OLD} --node_rank=1 --master_addr="192.168.1.2" --master_port=12581 train.py > 2.log 2>&1 &  # !',
        ),
        shell_fails(
            "another port on the second host",
            f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
            f"{_OLD} --node_rank=1 --master_addr=10.0.0.1 --master_port=29501 train.py  # !",
        ),
        shell_fails(
            "accelerate",
            "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip a x.py",
            "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip b x.py  # !",
        ),
        shell_fails(
            "each host of a step is told itself",
            "#SBATCH --nodes=4",
            "srun bash -c 'torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500 x.py'  # !",
        ),
        shell_passes(
            "the batch script is told the first host",
            "#SBATCH --nodes=4",
            'srun bash -c "torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500 x.py"',
        ),
        shell_passes(
            "a job of its own on each host",
            "#SBATCH --nodes=4",
            "srun bash -c 'torchrun --nnodes=1 --rdzv-endpoint=$(hostname):29500 x.py'",
        ),
        shell_passes(
            "both are told the first",
            f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
            f"{_OLD} --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 train.py",
        ),
        shell_passes(
            "two jobs",
            f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 pretrain.py",
            f"{_OLD} --node_rank=1 --master_addr=10.0.0.2 --master_port=29500 finetune.py",
        ),
        shell_passes(
            "from outside",
            f"{_OLD} --node_rank=0 --master_addr=$1 --master_port=29500 train.py",
            f"{_OLD} --node_rank=1 --master_addr=$2 --master_port=29500 train.py",
        ),
    ),
)
def master_disagrees_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the commands for the hosts of one job use the same master.

    Why it hurts: each host waits for the others at a different address until the store times out.
    Fix: Use the address of the host with `--node-rank=0` and the same port in all commands.
    """
    yield from _told_themselves(file)
    masters: dict[tuple[str, ...], tuple[str, str, int]] = {}
    for start in starts_of(file):
        launch = start.launch
        hosts, number, endpoint = hosts_of(launch), rank_of_host(launch), endpoint_of(launch)
        if not hosts or hosts < 2 or number is None or not number.isdigit() or endpoint is None:
            continue
        if not is_known(endpoint) or is_loopback_name(endpoint):
            continue
        master = f"{endpoint}:{port_of(launch) or ''}"
        key = (launch.program, str(hosts), launch.script)
        first, other, line = masters.setdefault(key, (number, master, launch.place.line))
        if first != number and other != master:
            yield Violation(
                launch.place,
                f"Host {number} uses master {master.rstrip(':')}, but host {first} (line {line}) uses "
                f"{other.rstrip(':')}",
                evidence=(("master", master.rstrip(":")), ("elsewhere", other.rstrip(":"))),
            )


_OWN_HOST = frozenset({f"{IN_STEP}HOSTNAME", f"{IN_STEP}SLURMD_NODENAME"})
"""Marks of variables that each task of a step expands to the name of its own host."""


def _told_themselves(file: LaunchFile) -> Iterator[Violation]:
    """Report multi-host steps in which each task uses its own host as the master."""
    for start in starts_of(file):
        launch = start.launch
        if start.step is None or (start.step.nodes or 1) < 2 or hosts_of(launch) == 1:
            continue
        setting = launch.settings.get("MASTER_ADDR")
        endpoint = endpoint_of(launch) if launch.is_agent else None
        own = endpoint if endpoint is not None else setting.value if setting is not None else ""
        if not _OWN_HOST.isdisjoint(names_in(own)):
            is_from_setting = setting is not None and not _OWN_HOST.isdisjoint(names_in(setting.value))
            yield Violation(
                setting.place if setting is not None and is_from_setting else launch.place,
                f"Each of {start.step.nodes} hosts uses its own name as the master: {shown(own)}",
                fix="Use the first host of the job in the command:\n"
                'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                evidence=(("endpoint", shown(own)), ("nodes", start.step.nodes)),
            )
