"""Light probes between hosts of the lab: faulty networks, clocks and name servers, and the same hosts in health."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from doctor.api import Severity, Status
from doctor.probes.reachability import connection_plan
from doctor.probes.reachability.stage import most_bytes
from tests.lab import network
from tests.lab.delay import delayed
from tests.lab.hosts import LabHost
from tests.lab.speed import patience
from tests.probes.survey import JUDGES, PORT, Findings, surveying

Lab = Callable[[int], tuple[LabHost, ...]]
SECONDS = 8.0
"""What an agent may take: the default of probe_light."""


def in_time(found: Findings) -> bool:
    return max(found.took.values()) <= SECONDS + patience(0.3)


@contextmanager
def busy_processors() -> Iterator[None]:
    """Every processor of the machine computes, as it does where loaders are at work."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def carry_jumbo_frames(host: LabHost) -> None:
    """Packets of 9000 bytes, as a real cable carries them, at both ends of this host's link."""
    network.whole_frames(host)
    host.sh("ip link set eth0 mtu 9000")
    host.switch.run("ip", "link", "set", host.port, "mtu", "9000")


@pytest.mark.parametrize("count", [2, 3])
def test_healthy_hosts(lab_hosts: Lab, count: int) -> None:
    with surveying(lab_hosts(count)) as survey:
        found = survey.run()
    assert found.faulty() == {}
    # A few hosts send too few packets to tell loss, and two have no way to compare with.
    unjudged = {"NET014", "NET015"} if count == 2 else {"NET015"}
    assert {name for name in JUDGES if found.result(name).status is not Status.PASS} == unjudged
    assert set(found.outcomes().values()) == set(found.outcomes("master").values()) == {"open"}
    assert len(found.outcomes()) == count * (count - 1)
    samples = [sample for one in found.measured.values() for sample in one.paths.samples]
    assert all(sample.full_size_arrived and 0 < sample.round_trip < 0.05 for sample in samples)
    assert max(found.took.values()) < patience(2)
    [attempt] = found.reach(1, "node0")
    assert (attempt.address, attempt.interface, attempt.source_address) == ("10.20.0.10", "eth0", "10.20.0.11")


def test_healthy_again_and_again(lab_hosts: Lab) -> None:
    with surveying(lab_hosts(3)) as survey:
        for _ in range(20):
            found = survey.run()
            assert found.faulty() == {}, found.measured
        assert max(found.files.values()) < 20, "descriptors leak"


def test_healthy_while_all_processors_compute(lab_hosts: Lab) -> None:
    with surveying(lab_hosts(4)) as survey, busy_processors():
        for _ in range(20):
            found = survey.run()
            assert found.faulty() == {}, found.measured
            assert in_time(found)


def test_a_firewall_that_drops(lab_hosts: Lab) -> None:
    first, second, third = lab_hosts(3)
    network.drop_new_from(third, first.address)
    network.drop_new_from(third, second.address)
    with surveying((first, second, third)) as survey:
        found = survey.run()
    assert found.outcomes()[0, "node2"] == found.outcomes()[1, "node2"] == "silent"
    assert found.outcomes()[2, "node0"] == found.outcomes()[0, "node1"] == "open"
    assert found.faulty() == {"NET013": {"node2"}}
    assert in_time(found)


def test_a_firewall_that_rejects(lab_hosts: Lab) -> None:
    first, second = lab_hosts(2)
    second.sh(
        "nft add table inet lab; nft add chain inet lab input '{ type filter hook input priority 0; }';"
        "nft add rule inet lab input ip saddr 10.20.0.10 tcp flags syn / syn,ack reject with tcp reset"
    )
    with surveying((first, second)) as survey:
        found = survey.run()
    assert found.outcomes()[0, "node1"] == "refused"
    assert found.outcomes()[1, "node0"] == "open"
    assert found.faulty() == {"NET013": {"node0", "node1"}}
    assert max(found.took.values()) < patience(2)


def test_no_route(lab_hosts: Lab) -> None:
    first, second, third = lab_hosts(3)
    for host in (first, second):
        host.sh(f"ip route add unreachable {third.address}")
    with surveying((first, second, third)) as survey:
        found = survey.run()
    assert found.outcomes()[0, "node2"] == "unroutable"
    assert found.faulty()["NET013"] == {"node2"}


def test_a_cable_that_is_pulled(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    with surveying(machines) as survey:
        network.link_down(machines[2])
        found = survey.run()
    assert {found.outcomes()[rank, "node2"] for rank in (0, 1)} <= {"silent", "unroutable"}
    assert found.faulty()["NET013"] == {"node2"}
    assert found.faulty()["NET006"] == {"node2"}
    assert in_time(found)


def test_a_bridge_of_the_same_address_on_both_hosts(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for host in machines:
        network.add_bridge(host, "docker0", "172.17.0.1/16")
        host.sh("ip link add cable type veth peer name end; ip link set cable up; ip link set end up master docker0")
    with surveying(machines, env={"NCCL_SOCKET_IFNAME": "docker0"}) as survey:
        found = survey.run()
    assert found.outcomes() == {(0, "node1"): "stranger", (1, "node0"): "stranger"}
    assert "another process" in found.result("NET013").findings[0].evidence["pairs"][0]


@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_no_matter_of_the_network(lab_hosts: Lab, variable: str) -> None:
    with surveying(lab_hosts(2), env={variable: "nosuch0"}) as survey:
        found = survey.run()
    assert found.outcomes() == {(0, "node1"): "open", (1, "node0"): "open"}
    assert found.faulty() == {}


def test_the_network_of_gloo_is_closed_and_that_of_nccl_is_open(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for number, host in enumerate(machines):
        host.sh(
            "ip link add extra type veth peer name other; ip link set other up; ip link set extra up;"
            f"ip address add 10.40.0.{number + 1}/24 dev extra"
        )
    settings = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "extra"}
    with surveying(machines, env=settings) as survey:
        found = survey.run()
    outcomes = {one.library: one.outcome for one in found.reach(0, "node1")}
    assert outcomes["NCCL"] == "open"
    assert outcomes["Gloo"] in ("silent", "unroutable")
    assert found.faulty() == {"NET013": {"node0", "node1"}}
    assert found.result("NET013").severity is Severity.WARNING


def arrived(found: Findings) -> dict[tuple[int, str], bool | None]:
    """Whether packets of full size did, by rank and peer."""
    return {
        (rank, one.peer): one.full_size_arrived for rank, own in found.measured.items() for one in own.paths.samples
    }


def test_full_size_packets_of_a_host_vanish(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    for host in machines:
        carry_jumbo_frames(host)
    network.black_hole(machines[2:])
    with surveying(machines) as survey:
        found = survey.run()
    assert {way for way, whole in arrived(found).items() if whole is not True} == {(2, "node0"), (2, "node1")}
    assert set(arrived(found).values()) == {True, False}
    assert found.faulty() == {"NET012": {"node2"}}
    assert found.result("NET012").severity is Severity.ERROR
    assert in_time(found)


def test_full_size_packets_to_a_host_vanish(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    for host in machines:
        carry_jumbo_frames(host)
    machines[1].sh(
        "nft add table netdev lab;"
        "nft add chain netdev lab input '{ type filter hook ingress device eth0 priority 0; }';"
        "nft add rule netdev lab input meta length '>' 1500 drop"
    )
    with surveying(machines) as survey:
        found = survey.run()
    assert {way for way, whole in arrived(found).items() if whole is False} == {(0, "node1"), (2, "node1")}
    assert found.faulty() == {"NET012": {"node1"}}


def test_full_size_packets_vanish_between_all(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    network.black_hole(machines)
    with surveying(machines) as survey:
        found = survey.run()
    assert set(arrived(found).values()) == {False}
    assert found.faulty() == {"NET012": {"node0", "node1"}}


def test_jumbo_frames_arrive(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for host in machines:
        carry_jumbo_frames(host)
    with surveying(machines) as survey:
        found = survey.run()
        assert survey.plan()[0].burst == 18000
    assert arrived(found) == {(0, "node1"): True, (1, "node0"): True}
    assert found.faulty() == {}


def test_a_link_of_10_megabits(lab_hosts: Lab) -> None:
    machines = lab_hosts(4)
    for host in machines:
        network.rate(host, "10mbit")
    with surveying(machines) as survey:
        found = survey.run()
    assert set(arrived(found).values()) == {True}
    assert found.faulty() == {}


def test_a_host_that_is_far_away(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    with delayed(machines[2], milliseconds=20), surveying(machines) as survey:
        found = survey.run()
    far = next(one for one in found.measured[0].paths.samples if one.peer == "node2")
    assert 0.039 < far.round_trip < 0.06
    assert far.full_size_arrived
    assert found.faulty() == {"NET014": {"node2"}}


def test_a_lossy_way_is_neither_closed_nor_too_small(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    with delayed(machines[2], milliseconds=10, loss=0.05), surveying(machines) as survey:
        found = survey.run()
    assert set(found.outcomes().values()) == {"open"}
    assert not found.faulty().keys() & {"NET012", "NET013", "NET006", "HOST003"}
    assert in_time(found)


@pytest.mark.parametrize("ahead", [5.0, -3.0])
def test_a_clock_that_is_wrong(lab_hosts: Lab, ahead: float) -> None:
    with surveying(lab_hosts(3), ahead={"node1": ahead}) as survey:
        found = survey.run()
    assert found.faulty() == {"HOST003": {"node1"}}
    assert found.measured[1].clock.offset == pytest.approx(ahead, abs=0.01)
    assert found.measured[0].clock.reference == found.measured[2].clock.reference == "node0"


def test_the_reference_itself_is_wrong(lab_hosts: Lab) -> None:
    with surveying(lab_hosts(3), ahead={"node0": 60}) as survey:
        assert survey.run().faulty() == {"HOST003": {"node0"}}


def test_a_millisecond_is_no_difference(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    with delayed(machines[1], milliseconds=1, jitter=1), surveying(machines, ahead={"node2": 0.001}) as survey:
        found = survey.run()
    assert "HOST003" not in found.faulty()
    assert abs(found.measured[2].clock.offset - 0.001) < 0.001


def test_a_name_server_that_swallows_packets(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    network.swallow_dns(machines[1])
    with surveying(machines) as survey:
        found = survey.run()
    assert found.faulty() == {"NET024": {"node1"}}
    [sample, *_] = [one for one in found.measured[1].paths.samples if one.reverse_error]
    assert (sample.forward_lookup < 0.5, sample.reverse_lookup) == (True, 5.0)
    assert set(found.outcomes().values()) == {"open"}
    assert in_time(found)


def test_a_peer_that_stands_still(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    with surveying(machines) as survey:
        machines[2].signal(signal.SIGSTOP, "agent.py")
        try:
            found = survey.run(without=[2])
        finally:
            machines[2].signal(signal.SIGCONT, "agent.py")
    assert found.outcomes()[0, "node2"] == "unanswered"
    assert found.faulty() == {}
    assert found.result("NET013").status is Status.UNKNOWN
    assert in_time(found)


def test_the_port_of_the_master_is_filtered(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    network.drop_port(machines[0], PORT)
    with surveying(machines) as survey:
        found = survey.run()
    assert found.outcomes("master") == {(0, "node0"): "open", (1, "node0"): "silent", (2, "node0"): "silent"}
    assert found.faulty() == {"NET006": {"node1", "node2"}}
    assert (
        "eth0 from 10.20.0.11"
        in found.result("NET006").findings[0].summary + found.result("NET006").findings[1].summary
    )


def test_the_port_of_the_master_is_rejected(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    network.reject_port(machines[0], PORT)
    with surveying(machines) as survey:
        found = survey.run()
    assert found.outcomes("master")[1, "node0"] == "refused"
    assert found.faulty() == {"NET006": {"node1"}}


def test_the_master_address_is_that_of_another_host(lab_hosts: Lab) -> None:
    with surveying(lab_hosts(2), env={"MASTER_ADDR": "node1"}) as survey:
        assert survey.run().faulty() == {"NET006": {"node0", "node1"}}


def test_the_port_of_the_master_is_free_afterwards(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    bind = f"import socket; socket.create_server(('', {PORT}), reuse_port=False).close()"
    with surveying(machines) as survey:
        survey.run()
        assert machines[0].run([sys.executable, "-c", bind]).returncode != 0
        survey.stations[0].process.stdin.close()
        assert survey.stations[0].process.wait(10) == 0
    assert machines[0].run([sys.executable, "-c", bind]).returncode == 0


def test_hosts_that_know_only_ipv6(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for number, host in enumerate(machines):
        host.sh(
            f"echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6; ip address add fd00::{number + 1}/64 dev eth0 nodad"
        )
        host.sh("ip -4 address flush dev eth0")
        host.write_hosts("127.0.0.1 localhost\nfd00::1 node0\nfd00::2 node1\n")
    with surveying(machines) as survey:
        found = survey.run()
    assert [one.address for one in found.reach(0, "node1")] == ["fd00::2"]
    assert set(found.outcomes().values()) == set(found.outcomes("master").values()) == {"open"}
    assert found.faulty() == {}


def test_hosts_without_ipv6(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for host in machines:
        host.sh("for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $file; done")
    with surveying(machines) as survey:
        found = survey.run()
    assert set(found.outcomes().values()) == {"open"}
    assert found.faulty() == {}


def test_a_job_too_large_for_all_pairs(lab_hosts: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven hosts as if they were hundreds: chords in place of all pairs, and clocks compared step by step."""
    monkeypatch.setattr(connection_plan, "ALL_PAIRS", 3)
    machines = lab_hosts(7)
    with surveying(machines, ahead={"node5": 5}) as survey:
        found = survey.run()
        assert found.faulty() == {"HOST003": {"node5"}}
        assert found.measured[6].clock.reference == "node4"
        network.drop_new_from(machines[3], "10.20.0.0/24")
        assert survey.run().faulty() == {"HOST003": {"node5"}, "NET013": {"node3"}}


def test_no_more_bytes_than_announced(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    network.black_hole(machines[:1])
    with surveying(machines) as survey:
        before = sum(map(sent_bytes, machines))
        survey.run()
        sent = sum(map(sent_bytes, machines)) - before
        assert 10_000 < sent < most_bytes(survey.plan())


def sent_bytes(host: LabHost) -> int:
    return int(host.sh("cat /sys/class/net/eth0/statistics/tx_bytes").stdout)


def test_few_open_files_allowed(lab_hosts: Lab) -> None:
    with surveying(lab_hosts(8), before="ulimit -n 64") as survey:
        found = survey.run()
    assert len(found.outcomes()) == 56
    assert set(found.outcomes().values()) == {"open"}
    assert found.faulty() == {}


def test_the_whole_probe_keeps_its_time_whatever_it_is(lab_hosts: Lab) -> None:
    """Everything at once: silent ports, a name server that swallows packets, and little time."""
    machines = lab_hosts(3)
    network.drop_new_from(machines[2], machines[0].address)
    network.swallow_dns(machines[0])
    with surveying(machines) as survey:
        found = survey.run(seconds=3.0)
    assert max(found.took.values()) < 3.0 + patience(0.3)
