"""Paths of poor quality, on hosts of the lab: packets are lost; a link, a boundary or a host is slow, or at times.

Rates are in tc(8)'s words (``10mbit``) and hold for each direction. :mod:`tests.lab.delay` has frames that are late.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from tests.lab.hosts import LabHost
from tests.lab.needs import require_tools
from tests.lab.network import token_bucket, whole_frames

BEYOND = "beyond"
"""The second switch, of hosts beyond a boundary."""

# A leaf of 256 KiB: the default, 1000 frames of up to 64 KiB, would hold a minute's traffic at 10 Mbit a second.
_SLOW_TOWARDS = """
set -eu
tc qdisc show dev eth0 | grep -q htb || tc qdisc add dev eth0 root handle 1: htb
tc class replace dev eth0 parent 1: classid "1:$1" htb rate "$2" burst 32kb cburst 32kb
tc qdisc replace dev eth0 parent "1:$1" bfifo limit 256kb
tc filter add dev eth0 parent 1: protocol ip u32 match ip dst "$3/32" flowid "1:$1"
"""

# Ends when its standard input does: read says 1 then, and more when the seconds are over. Both tc(8) are there all the
# time, and all three go before what is measured: on a busy machine a process may take as long to start as a phase. What
# is queued stays when the rate changes, as the host is slow at times and loses nothing. A leaf of 128 KiB: a frame of
# this network has up to 64 KiB.
_COME_AND_GO = """
set -eu
host=$1 port=$2 limit=$3 slow=$4 well=$5
renice -n -10 $$ > /dev/null || true
exec {at_switch}> >(exec tc -batch -) {on_host}> >(exec nsenter --target "$host" --net -- tc -batch -)
tell() { printf "$1\n" "$port" >&"$at_switch"; printf "$1\n" eth0 >&"$on_host"; }
carry() { tell "class replace dev %s parent 1: classid 1:1 htb rate $1 burst $2 cburst $2"; }
lasts() { read -r -t "$1" _ || [ $? -gt 128 ]; }
tell "qdisc replace dev %s root handle 1: htb default 1"
carry 100gbit 1mb
tell "qdisc replace dev %s parent 1:1 bfifo limit 128kb"
echo ready
until [ "${over-}" ]; do
    carry "$limit" 32kb; lasts "$slow" || over=yes
    carry 100gbit 1mb; [ "${over-}" ] || lasts "$well" || over=yes
done
tell "qdisc del dev %s root"
exec {at_switch}>&- {on_host}>&-
wait
"""


def heed_loss(host: LabHost) -> None:
    """TCP of ``host`` sends less where packets are lost, as it does in most clusters (CUBIC).

    The kernel may have BBR by default, which shrugs loss off. A network namespace may choose among what the machine's
    ``net.ipv4.tcp_allowed_congestion_control`` lists; Reno is always allowed, CUBIC only where the machine says so.
    """
    host.sh("echo reno > /proc/sys/net/ipv4/tcp_congestion_control")


def lossy(host: LabHost, percent: int) -> None:
    """So many of 100 packets on the link of ``host`` are lost, in each direction: packets as a cable has them, not the
    frames of up to 64 KiB that namespaces hand to each other."""
    require_tools("nft")
    packet_by_packet(host)
    host.sh('nft "$1"', _loss_at_ingress("eth0", percent))
    host.switch.run("nft", _loss_at_ingress(host.port, percent))


def packet_by_packet(host: LabHost) -> None:
    """What goes to and from ``host`` is cut and checked on both ends of its link, as for a real cable."""
    whole_frames(host)
    host.switch.run("ethtool", "-K", host.port, "tx", "off", "tso", "off", "gso", "off", "gro", "off")


def _loss_at_ingress(device: str, percent: int) -> str:
    """For nft(8); a table for each device, as the switch has several."""
    hook = f"type filter hook ingress device {device} priority 0;"
    return f"table netdev lossy_{device} {{ chain entering {{ {hook} numgen random mod 100 < {percent} drop; }}; }}"


def slow_link(pair: Sequence[LabHost], limit: str) -> None:
    """What the two hosts of ``pair`` send each other shares ``limit``; what they send to others does not."""
    one, other = pair
    for here, there in ((one, other), (other, one)):
        number = there.address.rpartition(".")[2]
        here.sh(_SLOW_TOWARDS, number, limit, there.address)


def slow_boundary(beyond: Sequence[LabHost], limit: str) -> None:
    """All that goes between the hosts ``beyond`` and the rest shares one cable of ``limit``."""
    second_switch(beyond)
    for end in ("uplink", "downlink"):
        beyond[0].switch.run("tc", "qdisc", "replace", "dev", end, "root", *token_bucket(limit))


def second_switch(beyond: Sequence[LabHost]) -> None:
    """The hosts ``beyond`` move to a switch of their own, with one cable to the other one."""
    run = beyond[0].switch.run
    run("ip", "link", "add", BEYOND, "type", "bridge", "mcast_snooping", "0")
    run("ip", "link", "set", BEYOND, "up")
    run("ip", "link", "add", "uplink", "type", "veth", "peer", "name", "downlink")
    run("ip", "link", "set", "uplink", "master", "switch", "up")
    run("ip", "link", "set", "downlink", "master", BEYOND, "up")
    for host in beyond:
        run("ip", "link", "set", host.port, "master", BEYOND)


def intermittent(host: LabHost, limit: str, *, slow: float, well: float) -> AbstractContextManager[None]:
    """As long as this context lasts, the link of ``host`` carries ``limit`` for ``slow`` seconds, all that comes for
    the next ``well`` seconds, and so on."""
    arguments = (str(host.pid), host.port, limit, str(slow), str(well))
    return host.switch.serving(["bash", "-c", _COME_AND_GO, "lab", *arguments])
