"""Interfaces: recorded trees, real ones in network namespaces, and damaged files."""

from __future__ import annotations

import json

import pytest

from doctor.collectors.base import Machine
from doctor.collectors.network.interfaces import (
    KernelInterface,
    collect_interfaces,
    prefix_length,
    read_interfaces,
    seen_interfaces,
)
from doctor.core.facts import Address, InterfaceFacts, Route
from tests.collectors.namespaces import run_in_namespaces
from tests.collectors.recorded import machine_at, plant, put_parent


def kinds(facts: InterfaceFacts) -> dict[str, str]:
    return {interface.name: interface.kind for interface in facts.interfaces}


def test_docker_host_tells_bridges_apart(tmp_path):
    facts = read_interfaces(plant("docker-host", tmp_path), {})
    assert kinds(facts) == {
        "lo": "loopback",
        "enp5s0": "ethernet",
        "enp6s0": "ethernet",
        "virbr0": "virtual-bridge",
        "docker0": "container-bridge",
        "br-4f1d2c3b5a69": "container-bridge",
        "veth93af0b1": "veth",
        "mac0": "other",
        "tailscale0": "tunnel",
        "dummy0": "dummy",
    }
    physical = {interface.name for interface in facts.interfaces if interface.physical}
    assert physical == {"enp5s0", "enp6s0", "mac0"}
    assert facts.hidden == ()


def test_docker_host_details(tmp_path):
    facts = read_interfaces(plant("docker-host", tmp_path), {})
    card = facts.named("enp5s0")
    assert (card.speed, card.driver, card.pci, card.numa_node) == (2500, "igc", "0000:05:00.0", None)
    assert card.carrier_changes == 4
    unplugged = facts.named("enp6s0")
    assert (unplugged.up, unplugged.running, unplugged.speed) == (True, False, None)
    assert facts.named("veth93af0b1").parent == "br-4f1d2c3b5a69"
    assert (facts.segments_sent, facts.segments_retransmitted) == (3120045, 4711)


def test_docker_host_routes(tmp_path):
    routes = read_interfaces(plant("docker-host", tmp_path), {}).routes
    assert routes == (
        Route("0.0.0.0/0", "enp5s0", "192.168.1.1", 100),
        Route("172.17.0.0/16", "docker0"),
        Route("172.18.0.0/16", "br-4f1d2c3b5a69"),
        Route("192.168.1.0/24", "enp5s0", None, 100),
        Route("192.168.122.0/24", "virbr0"),
        Route("2001:db8::/64", "enp5s0", None, 100),
        Route("fe80::/64", "enp5s0", None, 256),
        Route("::/0", "enp5s0", "fe80::211:32ff:fe44:5566", 100),
    )


def test_bond_vlan_and_bridge_are_physical_through_their_ports(tmp_path):
    facts = read_interfaces(plant("bond-vlan-bridge-ipoib", tmp_path), {})
    assert kinds(facts) == {
        "lo": "loopback",
        "eno1np0": "ethernet",
        "eno2np1": "ethernet",
        "bond0": "bond",
        "bond0.120": "vlan",
        "br0": "bridge",
        "ib0": "infiniband",
        "bond1.7": "vlan",
        "bond1": "bond",
    }
    physical = {interface.name: interface.physical for interface in facts.interfaces}
    assert [physical[name] for name in ("bond0", "bond0.120", "br0", "ib0")] == [True] * 4
    assert [physical[name] for name in ("bond1", "bond1.7", "lo")] == [False] * 3
    assert facts.named("eno1np0").parent == "bond0"
    assert facts.named("bond0.120").parent == "br0"
    assert facts.named("bond1.7").parent == "bond1"
    assert facts.named("bond1").up is False
    assert facts.named("ib0").numa_node == 1


def test_virtio_guest_in_the_order_of_addresses(tmp_path):
    seen = {
        "lo": KernelInterface((Address("inet", "127.0.0.1", 8),)),
        "eth0": KernelInterface((Address("inet", "192.0.2.2", 24),)),
    }
    facts = read_interfaces(plant("virtio-guest", tmp_path), seen)
    assert [interface.name for interface in facts.interfaces] == ["lo", "eth0", "ifb0", "ifb1"]
    card = facts.named("eth0")
    assert (card.kind, card.driver, card.pci, card.speed) == ("ethernet", "virtio_net", "0000:00:03.0", None)
    assert card.physical
    assert card.addresses == (Address("inet", "192.0.2.2", 24),)
    assert (facts.named("ifb0").kind, facts.named("ifb0").physical, facts.named("ifb0").up) == ("other", False, False)


def test_another_namespaces_sysfs_is_not_believed(tmp_path):
    seen = {"eth0": KernelInterface((), flags=0x41, mtu=9000, driver="veth", index=77)}
    facts = read_interfaces(plant("virtio-guest", tmp_path), seen)
    card = facts.named("eth0")
    assert (card.kind, card.mtu, card.pci, card.physical) == ("veth", 9000, None, False)
    assert "eth0" in facts.why_hidden("interfaces").reason


def test_without_sysfs_kinds_are_guessed_and_said_to_be(tmp_path):
    put_parent(tmp_path / "proc/net/dev").write_text(
        "head\nhead\n"
        + "".join(f"{name}: 0 0\n" for name in ("lo", "docker0", "virbr0", "ib0", "bond0", "tun0", "eth0"))
    )
    facts = read_interfaces(machine_at(tmp_path), {})
    assert kinds(facts) == {
        "lo": "loopback",
        "docker0": "container-bridge",
        "virbr0": "virtual-bridge",
        "ib0": "infiniband",
        "bond0": "bond",
        "tun0": "tunnel",
        "eth0": "ethernet",
    }
    assert "guessed" in facts.why_hidden("interfaces").reason
    assert facts.why_hidden("routes") is not None


def test_folders_in_the_place_of_files_are_survived(tmp_path):
    machine = plant("docker-host", tmp_path)
    for path in list(tmp_path.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "dev":
            path.unlink()
            path.mkdir()
    facts = read_interfaces(machine, {})
    assert facts.named("enp5s0").mtu is None


@pytest.mark.parametrize("garbage", ["", "\x00\xff", "nonsense here", "9" * 400, "-5", "eth0 zz zz zz\n" * 3])
def test_garbage_in_any_file_is_survived(tmp_path, garbage):
    machine = plant("docker-host", tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "dev"]
    assert len(files) > 50
    for path in files:
        path.write_text(garbage)
    facts = read_interfaces(machine, {})
    assert len(facts.interfaces) == 10
    assert facts.named("enp5s0").speed is None
    assert facts.routes == ()


def test_nothing_to_read_is_no_interface(tmp_path):
    assert read_interfaces(machine_at(tmp_path), {}).interfaces == ()


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        ("255.255.255.0", 24),
        ("0.0.0.0", 0),
        ("ffff:ffff:ffff:ffff::", 64),
        ("255.0.255.0", None),
        ("x", None),
        (None, None),
    ],
)
def test_prefix_length(mask, length):
    assert prefix_length(mask) == length


def test_this_machine_has_a_loopback():
    facts = collect_interfaces(Machine())
    loopback = facts.named("lo")
    assert loopback.kind == "loopback"
    assert Address("inet", "127.0.0.1", 8) in loopback.addresses


REPORT = """
import json, msgspec
from doctor.collectors.base import Machine
from doctor.collectors.network.interfaces import collect_interfaces
print(json.dumps(msgspec.to_builtins(collect_interfaces(Machine()))))
"""


def test_real_virtual_interfaces():
    setup = """
    ip link set lo up
    ip link add br-0123456789ab type bridge
    ip link add docker0 type bridge
    ip link add br0 type bridge
    ip link add vethaa type veth peer name inside
    ip link set vethaa master br-0123456789ab
    ip link set br-0123456789ab up
    ip link set vethaa up mtu 9000
    ip link set inside up
    ip addr add 10.3.0.1/20 dev br-0123456789ab
    ip addr add fd00:3::7/64 dev inside nodad
    ip tuntap add tun7 mode tun
    ip route add 10.9.0.0/16 via 10.3.0.9 metric 7
    """
    facts = json.loads(run_in_namespaces(setup, REPORT))
    found = {interface["name"]: interface for interface in facts["interfaces"]}
    assert {name: found[name].get("kind", "ethernet") for name in found} == {
        "lo": "loopback",
        "br-0123456789ab": "container-bridge",
        "docker0": "container-bridge",
        "br0": "bridge",
        "vethaa": "veth",
        "inside": "veth",
        "tun7": "tunnel",
    }
    assert not any(interface.get("physical", True) for interface in found.values())
    assert (found["vethaa"]["mtu"], found["vethaa"]["parent"]) == (9000, "br-0123456789ab")
    assert found["docker0"]["up"] is False
    assert {"family": "inet6", "address": "fd00:3::7", "prefix_length": 64} in found["inside"]["addresses"]
    assert {"destination": "10.9.0.0/16", "interface": "br-0123456789ab", "gateway": "10.3.0.9", "metric": 7} in facts[
        "routes"
    ]
    assert "hidden" not in facts


ORDER = """
import ctypes
from doctor.collectors.network.interfaces import seen_interfaces

class Entry(ctypes.Structure):
    pass

Entry._fields_ = [
    ("next", ctypes.POINTER(Entry)), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ushort)),
]
first = ctypes.POINTER(Entry)()
assert ctypes.CDLL(None).getifaddrs(ctypes.byref(first)) == 0
names = []
while first:
    entry = first.contents
    if entry.address and entry.address[0] in (2, 10) and entry.name.decode() not in names:
        names.append(entry.name.decode())
    first = entry.next
print(names)
print([name for name, seen in seen_interfaces().items() if seen.addresses])
"""


def test_order_is_that_of_getifaddrs():
    setup = """
    ip link set lo up
    for name in zeta alpha mid late; do ip link add $name type bridge; ip link set $name up; done
    ip addr add fd00:1::1/64 dev alpha nodad
    ip addr add 10.2.0.1/24 dev late
    ip addr add 10.1.0.1/24 dev zeta
    ip addr add 10.1.1.1/24 dev zeta
    """
    kernel, ours = run_in_namespaces(setup, ORDER).splitlines()
    assert ours == kernel
    assert ours.index("'zeta'") < ours.index("'late'") < ours.index("'alpha'")


def test_live_interfaces_know_their_flags():
    loopback = seen_interfaces()["lo"]
    assert loopback.flags is not None
    assert loopback.index is not None
