"""Jobs in which nothing is wrong, as clusters have them: no finding at severity error or warning, exit code 0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.faults.live.network_scenes import add_interface, by_store, job
from tests.faults.live.stage import DIRECT, TORCHRUN, Act, Launcher, Play, address, on, ranks, shell
from tests.lab.delay import delayed
from tests.lab.hosts import LabHost, hosts
from tests.lab.network import add_bridge, rate

DOMAIN = "cluster.example"


def crew(count: int, each: int, *before: Act) -> Play:
    """``each`` ranks on so many hosts."""
    return Play(count, tuple(ranks(number, each) for number in range(count)), before)


def torchrun(play: Play) -> Play:
    """The same by torchrun."""
    return replace(play, launcher=TORCHRUN)


def everywhere(count: int, do: object, *args: object, **options: object) -> Act:
    """On every host."""
    assert callable(do)
    return on(tuple(range(count)), do, *args, **options)


def jumbo_frames(host: LabHost) -> None:
    """9000 bytes, at the host and at its port of the switch."""
    host.sh("ip link set eth0 mtu 9000")
    host.switch.run("ip", "link", "set", host.port, "mtu", "9000")


def second_family(host: LabHost) -> None:
    """An IPv6 address beside the other one, which the names of all hosts stand for as well."""
    host.sh("echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6")
    host.sh(f"ip address add fd00:20::{host.address.rpartition('.')[2]}/64 dev eth0 nodad")
    host.sh("sed -nE 's/^10[.]20[.]0[.](.*) (.*)$/fd00:20::\\1 \\2/p' /etc/hosts > six; cat six >> /etc/hosts")


def full_names(host: LabHost) -> None:
    """Every host by its full name first, as hosts(5) shows it, and by its alias."""
    host.sh(f"sed -E 's/^(10[.].*) (node.*)$/\\1 \\2.{DOMAIN} \\2/' /etc/hosts > full; cat full > /etc/hosts")


def routed_subnet(host: LabHost, number: int) -> None:
    """A second interface in a subnet of its own; the switch routes between these subnets."""
    add_interface(host, "eth1", f"10.{40 + number}.0.1/24")
    host.sh(f"ip route add 10.32.0.0/11 via 10.{40 + number}.0.254 dev eth1")
    host.switch.run("ip", "address", "add", f"10.{40 + number}.0.254/24", "dev", "switch")
    host.switch.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")


STORAGE = tuple(on(number, add_interface, "eth1", f"10.30.0.{number + 1}/24") for number in range(3))
FULL_HOSTNAMES = Launcher(
    "direct, full host names", DIRECT.start, DIRECT.number, partial(hosts, names=f"node{{}}.{DOMAIN}")
)

HEALTHY: dict[str, Play] = {
    "two hosts": job(2),
    "three hosts": job(3),
    "eight hosts": job(8),
    "four hosts, two ranks each": crew(4, 2),
    "two hosts, over the store": by_store(job(2)),
    "two hosts, two ranks each, over the store": by_store(crew(2, 2)),
    "two hosts by torchrun, two ranks each, over its store": torchrun(by_store(crew(2, 2))),
    "two hosts by torchrun, in a folder": torchrun(job(2)),
    "the master by its address": Play(2, (ranks(0), ranks(1)), master=address(0)),
    "full names in /etc/hosts": job(3, everywhere(3, full_names)),
    "full names as host names": Play(
        2, (ranks(0), ranks(1)), launcher=FULL_HOSTNAMES, way="store", master=f"node0.{DOMAIN}"
    ),
    "Docker and libvirt on every host": job(
        3,
        everywhere(3, add_bridge, "docker0", "172.17.0.1/16"),
        everywhere(3, add_bridge, "virbr0", "192.168.122.1/24"),
    ),
    "Docker on one host, left out by NCCL's list": job(
        2, on(1, add_bridge, "docker0", "172.17.0.1/16"), NCCL_SOCKET_IFNAME="^docker,lo"
    ),
    "a storage network besides": job(3, *STORAGE),
    "the storage network selected": job(3, *STORAGE, NCCL_SOCKET_IFNAME="=eth1", GLOO_SOCKET_IFNAME="eth1"),
    "two subnets and a router": job(
        2, on(0, routed_subnet, 0), on(1, routed_subnet, 1), NCCL_SOCKET_IFNAME="eth1", GLOO_SOCKET_IFNAME="eth1"
    ),
    "an idle interface that is down": job(
        2, *STORAGE[:2], everywhere(2, shell, "ip link set eth1 down"), NCCL_SOCKET_IFNAME="eth0"
    ),
    "IPv6 in addition to IPv4": by_store(job(2, everywhere(2, second_family))),
    "jumbo frames everywhere": job(3, everywhere(3, jumbo_frames)),
    "100 Mb/s everywhere": job(3, everywhere(3, rate, "100mbit")),
    "hosts 10 ms apart": job(3, everywhere(3, delayed, milliseconds=5)),
}
