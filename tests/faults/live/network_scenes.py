"""Faults of names, interfaces, ports and paths between hosts. Most are a minority's: three hosts, one of them odd."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from tests.faults.live.scenes import LiveScene
from tests.faults.live.stage import PORT, Act, Play, Ranks, address, among, on, ranks, shell
from tests.lab.delay import delayed
from tests.lab.hosts import LabHost
from tests.lab.needs import clean_environ
from tests.lab.network import (
    add_bridge,
    black_hole,
    drop_new_from,
    drop_port,
    link_down,
    reject_port,
    swallow_dns,
    whole_frames,
)

NOBODY_ELSE = 8.0
"""Seconds that are waited where some ranks can't come, torch's import on a crowded machine included."""
_LISTEN = """
import socket, sys, time
listener = socket.create_server(("", int(sys.argv[1])))
print("ready", flush=True)
time.sleep(600)
"""
SHIFTED = Path(__file__).parent / "shifted_clock"
"""On PYTHONPATH it moves the clock of a process: no namespace moves CLOCK_REALTIME."""


def job(count: int, *before: Act, odd: Ranks | None = None, **environ: str) -> Play:
    """One rank a host, started directly; ``odd`` in the place of the rank of its host."""
    identical = [Ranks(number, environ=tuple(environ.items())) for number in range(count)]
    return Play(count, tuple(odd if odd and odd.host == one.host else one for one in identical), before)


def by_store(play: Play, *, timeout: float = 20) -> Play:
    """The same over torch's store."""
    return replace(play, way="store", timeout=timeout)


def names(count: int, **other: str | None) -> str:
    """A hosts file for so many hosts, with ``other`` addresses for some; ``None`` leaves a name out."""
    known = {f"node{number}": address(number) for number in range(count)} | other
    lines = [f"{where} {name}" for name, where in known.items() if where]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *lines, ""])


def add_interface(host: LabHost, name: str, own: str) -> None:
    """A second interface with the address ``own`` (``10.1.0.1/24``), on the switch that all hosts share."""
    port = f"{host.port}-{name}"
    host.switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", name, "netns", str(host.pid))
    host.switch.run("ip", "link", "set", port, "master", "switch", "up")
    # Both are on one switch: without this either answers for the other's address (arp_ignore in ip-sysctl.rst).
    host.sh(f"echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore; ip address add {own} dev {name}; ip link set {name} up")


def listen(host: LabHost, port: int) -> AbstractContextManager[Popen[str]]:
    """A program that has nothing to do with the job and holds ``port``."""
    return host.serving([sys.executable, "-c", _LISTEN, str(port)])


def ipv6_alone(host: LabHost, own: str) -> None:
    """The host loses its IPv4 address and gets ``own``."""
    host.sh(f"echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6; ip address add {own} dev eth0 nodad")
    host.sh("ip -4 address flush dev eth0")


TWO, THREE = job(2), job(3)
TWO_BY_STORE = by_store(TWO)

NAMES = (
    LiveScene(
        "MASTER_ADDR is 127.0.1.1 on one host",
        "NET005",
        job(3, on(1, LabHost.write_hosts, names(3, node0="127.0.1.1"))),
        THREE,
        ranks=(1,),
        hosts=("node1",),
        says=("127.0.1.1",),
    ),
    LiveScene(
        "MASTER_ADDR leads elsewhere on one host",
        "ENV006",
        job(3, on(2, LabHost.write_hosts, names(3, node0="10.20.0.77"))),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("10.20.0.77",),
    ),
    LiveScene(
        "MASTER_ADDR unknown on one host",
        "NET004",
        job(3, on(2, LabHost.write_hosts, names(3, node0=None))),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("node0",),
    ),
    LiveScene(
        "MASTER_ADDR is 127.0.1.1 on one host and unknown on another, over the store",
        "ENV005",
        by_store(
            job(
                3,
                on(1, LabHost.write_hosts, names(3, node0="127.0.1.1")),
                on(2, LabHost.write_hosts, names(3, node0=None)),
            ),
            timeout=NOBODY_ELSE,
        ),
        TWO_BY_STORE,
        ranks=(1, 2),
        lines=((1, "NET005"), (2, "NET004")),
        line_says=((1, "127.0.1.1"), (2, "does not resolve")),
    ),
    LiveScene(
        "a name server that swallows packets",
        "NET024",
        job(2, on(1, swallow_dns)),
        TWO,
        severity="warning",
        ranks=(1,),
        hosts=("node1",),
    ),
    LiveScene(
        "a name server that swallows packets, over the store",
        "NET024",
        # Its ten seconds are those of torch's store, which looks up each client; what the probes add is another scene.
        replace(by_store(job(2, on(1, swallow_dns))), options=("--probe", "none")),
        TWO_BY_STORE,
        severity="warning",
        ranks=(1,),
        hosts=("node1",),
    ),
    LiveScene(
        "own names on loopback",
        "NET002",
        Play(
            2,
            (ranks(0), ranks(1)),
            (
                on(0, LabHost.write_hosts, names(2, node0="127.0.1.1")),
                on(1, LabHost.write_hosts, names(2, node1="127.0.1.1")),
            ),
            master=address(0),
        ),
        TWO,
        ranks=(0, 1),
        hosts=("node0", "node1"),
        says=("127.0.1.1",),
    ),
    LiveScene(
        "two hosts of one name",
        "NET003",
        job(3, on(2, shell, "hostname node1")),
        THREE,
        ranks=(1, 2),
        hosts=("node1",),
    ),
    LiveScene(
        "clocks apart",
        "HOST003",
        job(3, odd=ranks(2, PYTHONPATH=f"{SHIFTED}:{clean_environ(Path())['PYTHONPATH']}", CLOCK_AHEAD="37")),
        job(3, odd=ranks(2, PYTHONPATH=f"{SHIFTED}:{clean_environ(Path())['PYTHONPATH']}", CLOCK_AHEAD="0")),
        severity="warning",
        ranks=(2,),
        hosts=("node2",),
        says=("37.0 s",),
    ),
)

MASTER_PORT = (
    LiveScene(
        "the master's port dropped for one host",
        "NET006",
        job(3, on(2, drop_port, PORT, "out")),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("No response", str(PORT)),
    ),
    LiveScene(
        "the master's port rejected for one host",
        "NET006",
        job(3, on(2, reject_port, PORT, "out")),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("Nothing listens", str(PORT)),
    ),
    LiveScene(
        "the master's port dropped for one host, rejected for another, a third cut off, over the store",
        "ENV005",
        by_store(
            job(
                4, on(1, drop_port, PORT, "out"), on(2, reject_port, PORT, "out"), on(3, shell, "ip link set eth0 down")
            ),
            timeout=NOBODY_ELSE,
        ),
        TWO_BY_STORE,
        ranks=(1, 2, 3),
        lines=((1, "NET006"), (2, "NET006"), (3, "NET006")),
        line_says=((1, "no answer"), (2, "refused"), (3, "no route")),
    ),
    LiveScene(
        "the master is not started, over the store",
        "NET006",
        by_store(job(3, odd=ranks(0, started=False)), timeout=2),
        TWO_BY_STORE,
        lines=((1, "NET006"), (2, "NET006")),
    ),
    LiveScene(
        "the master is not started",
        "ENV005",
        replace(job(3, odd=ranks(0, started=False)), timeout=3),
        THREE,
        ranks=(0,),
    ),
    LiveScene("the master's port is taken", "ENV008", job(2, on(0, listen, PORT)), TWO, ranks=(0,), hosts=("node0",)),
    LiveScene(
        "the master's port is taken, over the store",
        "ENV008",
        by_store(job(2, on(0, listen, PORT)), timeout=NOBODY_ELSE),
        TWO_BY_STORE,
        ranks=(0,),
        hosts=("node0",),
        lines=((1, "ENV008"),),
    ),
)

DOCKER = on((0, 1, 2), add_bridge, "docker0", "172.17.0.1/16")
STORAGE = tuple(on(number, add_interface, "eth1", f"10.30.0.{number + 1}/24") for number in range(3))

INTERFACES = (
    LiveScene(
        "an interface that one host does not have",
        "NET007",
        job(3, odd=ranks(1, NCCL_SOCKET_IFNAME="eth9")),
        job(3, NCCL_SOCKET_IFNAME="eth0"),
        ranks=(1,),
        hosts=("node1",),
        says=("eth9",),
    ),
    LiveScene(
        "the selected interface is down on one host",
        "NET008",
        job(3, *STORAGE, on(2, shell, "ip link set eth1 down"), NCCL_SOCKET_IFNAME="eth1"),
        job(3, *STORAGE, NCCL_SOCKET_IFNAME="eth1"),
        ranks=(2,),
        hosts=("node2",),
        says=("eth1 is down",),
    ),
    LiveScene(
        "the cable of the selected interface is out on one host",
        "NET008",
        job(3, on(2, link_down), NCCL_SOCKET_IFNAME="eth0"),
        job(3, NCCL_SOCKET_IFNAME="eth0"),
        ranks=(2,),
        hosts=("node2",),
        says=("no carrier",),
    ),
    LiveScene(
        "the only interface is down on one host",
        "NET008",
        job(3, on(2, shell, "ip link set eth0 down")),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("No interface",),
    ),
    LiveScene(
        "NCCL's '=' in Gloo's variable",
        "NET011",
        job(2, GLOO_SOCKET_IFNAME="=eth0"),
        job(2, GLOO_SOCKET_IFNAME="eth0"),
        ranks=(0, 1),
        says=("=eth0",),
    ),
    LiveScene(
        "NCCL's '^' in Gloo's variable",
        "NET011",
        job(3, DOCKER, odd=ranks(2, GLOO_SOCKET_IFNAME="^docker0")),
        job(3, DOCKER, GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="^docker0,lo"),
        ranks=(2,),
        hosts=("node2",),
        says=("^docker0",),
    ),
    LiveScene(
        "a container bridge that every host has is selected",
        "NET009",
        job(3, DOCKER, NCCL_SOCKET_IFNAME="docker0"),
        job(3, DOCKER),
        ranks=(0, 1, 2),
        says=("docker0",),
    ),
    LiveScene(
        "one host in a subnet without a route",
        "NET010",
        job(
            3,
            *STORAGE[:2],
            on(2, add_interface, "eth1", "10.31.0.3/24"),
            NCCL_SOCKET_IFNAME="eth1",
        ),
        job(3, *STORAGE, NCCL_SOCKET_IFNAME="eth1"),
        severity="warning",
        ranks=(2,),
        hosts=("node2",),
        # The probes prove it: NET013, which this explains, is an error.
        codes=((0, 1), (1, 1), (2, 1)),
    ),
    LiveScene(
        "only IPv6 on one host",
        "NET016",
        Play(
            3,
            (ranks(0), ranks(1), ranks(2)),
            (
                on(2, ipv6_alone, "fd00:20::12/64"),
                on((0, 1, 2), LabHost.write_hosts, names(3, node2="fd00:20::12")),
            ),
            master=address(0),
        ),
        THREE,
        ranks=(2,),
        hosts=("node2",),
    ),
)

PATHS = (
    LiveScene(
        "new connections blocked between one pair",
        "NET013",
        job(3, on(1, drop_new_from, address(2))),
        THREE,
        ranks=(1, 2),
        hosts=("node1", "node2"),
        says=("node2 -> node1",),
    ),
    LiveScene(
        "new connections to one host blocked",
        "NET013",
        job(3, on(2, drop_new_from, address(0)), on(2, drop_new_from, address(1))),
        THREE,
        ranks=(2,),
        hosts=("node2",),
    ),
    LiveScene(
        "new connections blocked everywhere",
        "NET013",
        job(3, *(on(one, drop_new_from, address(other)) for one in range(3) for other in range(3) if one != other)),
        THREE,
        ranks=(0, 1, 2),
        says=("None of the 3 hosts",),
    ),
    LiveScene(
        "full-size packets lost",
        "NET012",
        job(2, among((0, 1), black_hole)),
        job(2, on((0, 1), whole_frames)),
        ranks=(0, 1),
        hosts=("node0", "node1"),
        says=("Full-size",),
    ),
    LiveScene(
        "one host 20 ms away",
        "NET014",
        job(3, on(2, delayed, milliseconds=20)),
        job(3, on((0, 1, 2), delayed, milliseconds=20)),
        severity="warning",
        ranks=(2,),
        hosts=("node2",),
        says=("Round trips",),
    ),
)

SCENES = (*NAMES, *MASTER_PORT, *INTERFACES, *PATHS)
