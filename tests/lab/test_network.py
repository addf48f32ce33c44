"""Faults of the network do to real traffic what they say, and to nothing else."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.lab.delay import delayed
from tests.lab.hosts import LabHost
from tests.lab.needs import require_tools
from tests.lab.network import (
    add_bridge,
    black_hole,
    drop_new_from,
    drop_port,
    ephemeral_ports,
    link_down,
    link_up,
    rate,
    reject_port,
    swallow_dns,
)
from tests.lab.traffic import MUCH, PORT, ask, listening, seconds_of

MakeHosts = Callable[..., tuple[LabHost, ...]]

OTHER_PORT = 29501
SOON = 0.7
"""Seconds for what shall not come through; what shall has more, for slow machines."""


@pytest.fixture
def trio(lab_hosts: MakeHosts) -> Iterator[tuple[LabHost, ...]]:
    """Three hosts that all listen at two ports."""
    lab = lab_hosts(3)
    with ExitStack() as stack:
        for host in lab:
            for port in (PORT, OTHER_PORT):
                stack.enter_context(listening(host, port))
        yield lab


def test_everybody_hears_everybody(trio: tuple[LabHost, ...]) -> None:
    assert {ask(client, server, MUCH) for client in trio for server in trio} == {str(MUCH)}


@pytest.mark.parametrize(
    ("block", "answer"), [(drop_port, "TimeoutError"), (reject_port, "ConnectionRefusedError")], ids=["drop", "reject"]
)
def test_a_port_is_blocked_for_those_who_come_in(
    trio: tuple[LabHost, ...], block: Callable[..., None], answer: str
) -> None:
    blocked, *others = trio
    block(blocked, PORT)
    assert [ask(other, blocked, timeout=SOON) for other in others] == [answer, answer]
    assert ask(blocked, blocked) == ask(blocked, others[0]) == ask(others[0], others[1]) == "10"
    assert ask(others[0], blocked, port=OTHER_PORT) == "10"


@pytest.mark.parametrize(
    ("block", "answer"), [(drop_port, "TimeoutError"), (reject_port, "ConnectionRefusedError")], ids=["drop", "reject"]
)
def test_a_port_is_blocked_for_one_who_goes_out(
    trio: tuple[LabHost, ...], block: Callable[..., None], answer: str
) -> None:
    blocked, *others = trio
    block(blocked, PORT, "out")
    assert [ask(blocked, other, timeout=SOON) for other in others] == [answer, answer]
    assert ask(blocked, blocked) == ask(others[0], blocked) == ask(blocked, others[0], port=OTHER_PORT) == "10"


def test_two_ports_of_a_host_are_blocked(trio: tuple[LabHost, ...]) -> None:
    first, second, _ = trio
    drop_port(first, PORT)
    reject_port(first, OTHER_PORT)
    assert ask(second, first, timeout=SOON) == "TimeoutError"
    assert ask(second, first, port=OTHER_PORT) == "ConnectionRefusedError"


def test_new_connections_of_one_pair_to_ephemeral_ports_vanish(trio: tuple[LabHost, ...]) -> None:
    guarded, shunned, welcome = trio
    _, ephemeral = ephemeral_ports(guarded)
    with ExitStack() as stack:
        for host in trio:
            stack.enter_context(listening(host, ephemeral))
        drop_new_from(guarded, shunned.address)
        assert ask(shunned, guarded, port=ephemeral, timeout=SOON) == "TimeoutError"
        assert ask(shunned, guarded) == ask(welcome, guarded, port=ephemeral) == "10"
        assert ask(guarded, shunned, port=ephemeral) == "10"


def test_a_pulled_cable_can_be_put_back(trio: tuple[LabHost, ...]) -> None:
    cut_off, *others = trio
    link_down(cut_off)
    assert cut_off.sh("cat /sys/class/net/eth0/carrier").stdout == "0\n"
    assert ask(others[0], cut_off, timeout=SOON) in {"TimeoutError", "OSError"}
    assert ask(others[0], others[1]) == "10"
    link_up(cut_off)
    assert ask(others[0], cut_off) == "10"


def test_a_black_hole_takes_full_frames_alone(trio: tuple[LabHost, ...]) -> None:
    first, second, _ = trio
    black_hole(trio)
    assert ask(first, second) == "10"
    assert ask(first, second, MUCH, timeout=SOON) == "TimeoutError"
    size = "ping -c 1 -W 1 -M do -s"
    headers = 14 + 20 + 8
    first.sh(f"{size} {1514 - headers} {second.name}")
    assert first.run(["bash", "-c", f"{size} {1515 - headers} {second.name}"]).returncode == 1


def test_a_link_is_slow_in_both_directions(trio: tuple[LabHost, ...]) -> None:
    slow, *others = trio
    rate(slow, "10mbit")
    assert min(seconds_of(lambda: ask(others[0], others[1], MUCH)) for _ in range(3)) < 0.7
    # 8 Mbit, less a burst of 32 KB, at 10 Mbit a second
    assert seconds_of(lambda: ask(slow, others[0], MUCH)) > 0.7
    assert seconds_of(lambda: ask(others[0], slow, MUCH)) > 0.7


def test_a_name_server_swallows_questions(lab_hosts: MakeHosts) -> None:
    mute, well = lab_hosts(2)
    swallow_dns(mute)
    look_up = ["getent", "hosts", "nowhere.example"]
    assert well.run(look_up, timeout=2).returncode == 2
    never = {"RES_OPTIONS": "timeout:30 attempts:5"}  # the most that resolv.conf(5) allows
    with pytest.raises(subprocess.TimeoutExpired):
        mute.run(look_up, env=never, timeout=2)
    assert mute.run(["getent", "ahostsv4", well.name], timeout=2).returncode == 0


def test_a_bridge_is_added(lab_hosts: MakeHosts) -> None:
    first, second = lab_hosts(2)
    add_bridge(first, "docker0", "172.17.0.1/16")
    assert "172.17.0.1/16" in first.sh("ip -brief address show docker0").stdout
    assert second.run(["ip", "link", "show", "docker0"]).returncode != 0
    first.sh("ping -c 1 -W 2 node1")


def test_a_round_trip_is_delayed_twice_and_then_no_more(trio: tuple[LabHost, ...]) -> None:
    far, *others = trio
    with delayed(far, milliseconds=20):
        assert 40 <= round_trip(others[0], far) < 60
        assert round_trip(others[0], others[1]) < 20
        assert ask(others[0], far, MUCH) == str(MUCH)
        assert ask(far, others[0], MUCH) == str(MUCH)
    assert round_trip(others[0], far) < 20


def test_delays_jitter(lab_hosts: MakeHosts) -> None:
    near, far = lab_hosts(2)
    with delayed(far, milliseconds=10, jitter=10):
        times = round_trips(near, far, count=50)
    assert min(times) < 15 < 25 < max(times)


def test_frames_are_lost(lab_hosts: MakeHosts) -> None:
    near, far = lab_hosts(2)
    assert len(round_trips(near, far)) == 20  # they know each other's link address from now on
    with delayed(far, milliseconds=0, loss=0.3):
        assert 5 < len(round_trips(near, far, count=50)) < 45
    assert len(round_trips(near, far)) == 20


def round_trip(client: LabHost, server: LabHost) -> float:
    """The least, in milliseconds."""
    return min(round_trips(client, server))


def round_trips(client: LabHost, server: LabHost, count: int = 20) -> list[float]:
    """Those of ``count`` pings that came back, in milliseconds."""
    require_tools("ping")
    ping = f"ping -c {count} -i 0.01 -W 0.3 {server.name} || true"
    return [float(found) for found in re.findall(r"time=([\d.]+) ms", client.sh(ping).stdout)]
