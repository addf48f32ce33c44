"""What NCCL and Gloo would use, told from facts; and which measured paths are to blame."""

import pytest

from doctor.analysis.fabric.slow_paths import MeasuredPath, slow_paths
from doctor.analysis.interface_choice import (
    data_goes_by_sockets,
    gid_index,
    gloo_endpoints,
    good_interfaces,
    nccl_endpoints,
    nccl_rdma_ports,
    release_of,
    routed_ranges,
    what_forces_sockets,
)
from doctor.core.facts import (
    Address,
    EnvironmentFacts,
    Gid,
    HostFacts,
    Interface,
    InterfaceFacts,
    NameLookup,
    NcclFacts,
    NcclPlugin,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    Route,
    Setting,
    Variable,
)
from doctor.core.text import hosts_text
from doctor_checks.network.interfaces._export_line import export_line, selecting_fix


def _interface(name, *addresses, kind="ethernet", **more):
    parsed = tuple(Address("inet6" if ":" in one else "inet", *_split(one)) for one in addresses)
    return Interface(name, kind, addresses=parsed, **more)


def _split(text):
    address, _, length = text.partition("/")
    return address, int(length or 24)


LO = _interface("lo", "127.0.0.1/8", "::1/128", kind="loopback", physical=False)
ETH0 = _interface("eth0", "10.0.0.1/16", "fd00::1/64")
ETH1 = _interface("eth1", "192.168.1.1/24")
DOCKER = _interface("docker0", "172.17.0.1/16", kind="container-bridge", physical=False)
VIRBR = _interface("virbr0", "192.168.122.1/24", kind="virtual-bridge", physical=False)
IB0 = _interface("ib0", "10.9.0.1/16", kind="infiniband")
SIX = _interface("net6", "fd00:1::1/64", "fe80::1/64")


def _facts(*interfaces, routes=()):
    return InterfaceFacts(interfaces=interfaces, routes=routes)


def _nccl(**settings):
    return NcclFacts(settings=tuple(Setting(name, value) for name, value in sorted(settings.items())))


def _names(nccl, *interfaces, release=None):
    return [one.interface.name for one in nccl_endpoints(nccl, _facts(*interfaces), release)]


@pytest.mark.parametrize(
    ("interfaces", "release", "expected"),
    [
        ((LO, ETH0, ETH1), None, ["eth0", "eth1"]),
        ((LO, DOCKER, ETH0), None, ["eth0"]),
        ((LO, ETH0, IB0), None, ["ib0"]),
        ((LO, VIRBR, ETH0), "2.28.3", ["eth0"]),
        ((LO, VIRBR, ETH0), "2.27.7", ["virbr0", "eth0"]),
        ((LO, DOCKER), None, ["docker0"]),
        ((LO,), None, ["lo"]),
        ((VIRBR,), "2.28.3", ["virbr0"]),
        ((), None, []),
    ],
)
def test_automatic_choice(interfaces, release, expected):
    assert _names(_nccl(), *interfaces, release=release) == expected


def test_comm_id_comes_after_ib_and_before_the_rest():
    assert _names(_nccl(NCCL_COMM_ID="192.168.1.77:4000"), LO, ETH0, ETH1) == ["eth1"]
    assert _names(_nccl(NCCL_COMM_ID="[fd00::9]:4000"), LO, ETH1, ETH0) == ["eth0"]
    assert _names(_nccl(NCCL_COMM_ID="192.168.1.77:4000"), LO, ETH1, IB0) == ["ib0"]
    assert _names(_nccl(NCCL_COMM_ID="node0:4000"), LO, ETH0, ETH1) == ["eth0", "eth1"]


def test_a_setting_is_find_or_fail():
    assert _names(_nccl(NCCL_SOCKET_IFNAME="eth1"), LO, ETH0, ETH1) == ["eth1"]
    assert _names(_nccl(NCCL_SOCKET_IFNAME="ens"), LO, ETH0, ETH1) == []
    assert _names(_nccl(NCCL_SOCKET_IFNAME="e"), LO, ETH0) == ["eth0"]


def test_ipv4_of_all_interfaces_comes_before_ipv6():
    endpoints = nccl_endpoints(_nccl(), _facts(SIX, ETH0))
    assert [endpoint.text for endpoint in endpoints] == ["eth0 (10.0.0.1)", "net6 (fd00:1::1)"]


def test_a_forced_family_leaves_out_the_rest():
    six = _nccl(NCCL_SOCKET_FAMILY="AF_INET6")
    assert [endpoint.text for endpoint in nccl_endpoints(six, _facts(LO, ETH0, ETH1))] == ["eth0 (fd00::1)"]
    assert nccl_endpoints(_nccl(NCCL_SOCKET_FAMILY="AF_INET6", NCCL_SOCKET_IFNAME="lo"), _facts(LO)) == ()


def test_carrier_counts_since_2_28_3():
    unplugged = _interface("eth0", "10.0.0.1/16", running=False)
    assert _names(_nccl(), LO, unplugged, ETH1, release="2.28.3") == ["eth1"]
    assert _names(_nccl(), LO, unplugged, ETH1, release="2.27.7") == ["eth0", "eth1"]


def test_sixteen_interfaces_at_most():
    many = [_interface(f"eth{number}", f"10.{number}.0.1/24") for number in range(20)]
    assert len(_names(_nccl(), *many)) == 16


def _gloo(value, *interfaces, addresses=("10.0.0.1",)):
    variables = () if value is None else (Variable("GLOO_SOCKET_IFNAME", value),)
    host = HostFacts(hostname="me", names=(NameLookup("me", "hostname", addresses),))
    found = gloo_endpoints(EnvironmentFacts(variables=variables), _facts(*interfaces), host)
    return [endpoint.text for endpoint in found]


def test_gloo_goes_by_name_or_by_the_hosts_own_name():
    assert _gloo("eth1,eth0", LO, ETH0, ETH1) == ["eth1 (192.168.1.1)", "eth0 (10.0.0.1)"]
    assert _gloo("eth", LO, ETH0, ETH1) == []
    assert _gloo(None, LO, ETH0, ETH1, addresses=("192.168.1.1",)) == ["eth1 (192.168.1.1)"]
    assert _gloo(None, LO, ETH0, addresses=("10.7.7.7", "10.0.0.1")) == ["eth0 (10.0.0.1)"]
    assert _gloo(None, LO, ETH0, addresses=("127.0.1.1", "10.0.0.1")) == ["lo (127.0.0.1)"]
    assert _gloo(None, LO, ETH0, addresses=()) == ["lo (127.0.0.1)"]


def test_recommendations_name_real_interfaces():
    fast = _interface("ens5", "10.1.0.1/16", speed=100_000)
    slow = _interface("eno1", "10.0.0.1/16", speed=1_000)
    dead = _interface("ens6", "10.2.0.1/16", up=False, running=False)
    facts = _facts(LO, DOCKER, slow, fast, dead)
    assert [one.name for one in good_interfaces(facts)] == ["ens5", "eno1"]
    assert export_line("NCCL_SOCKET_IFNAME", facts) == "export NCCL_SOCKET_IFNAME='=ens5'"
    assert selecting_fix("GLOO_SOCKET_IFNAME", facts) == (
        "Select the interface that connects the hosts (eno1 is also up):\nexport GLOO_SOCKET_IFNAME=ens5"
    )
    assert selecting_fix("GLOO_SOCKET_IFNAME", _facts(LO, fast)) == "export GLOO_SOCKET_IFNAME=ens5"
    routed = _facts(LO, slow, fast, routes=(Route("0.0.0.0/0", "eno1", "10.0.255.254"),))
    assert good_interfaces(routed)[0].name == "eno1"
    assert export_line("NCCL_SOCKET_IFNAME", _facts(LO)) == ""
    assert selecting_fix("NCCL_SOCKET_IFNAME", _facts(LO)) == (
        "Bring up an interface that connects the hosts, and set NCCL_SOCKET_IFNAME to its name."
    )


def test_routes():
    routes = (Route("0.0.0.0/0", "eth0", "10.0.0.254"), Route("10.0.0.0/16", "eth0"), Route("10.0.7.0/24", "eth1"))
    facts = _facts(ETH0, ETH1, routes=routes)
    inner = routed_ranges(facts, 4, default=False)
    assert routed_ranges(facts, 4) == ((0, 2**32 - 1),)
    assert len(inner) == 2
    assert all(start <= end for start, end in inner)


PORTS = tuple(
    RdmaDevice(f"mlx5_{number}", (RdmaPort(1, "ACTIVE", rate=400.0, link_layer="InfiniBand"),), has_uverbs=True)
    for number in (0, 1, 10)
)


def test_rdma_ports():
    rdma = RdmaFacts(devices=PORTS)
    assert [one.name for one in nccl_rdma_ports(_nccl(NCCL_IB_HCA="mlx5_1"), rdma)] == ["mlx5_1:1", "mlx5_10:1"]
    assert [one.name for one in nccl_rdma_ports(_nccl(NCCL_IB_HCA="=mlx5_1"), rdma)] == ["mlx5_1:1"]
    assert len(nccl_rdma_ports(_nccl(), rdma)) == 3
    shut = RdmaFacts(
        devices=(RdmaDevice("mlx5_0", (RdmaPort(1, "DOWN"),)), RdmaDevice("mlx5_1", PORTS[1].ports, has_uverbs=False))
    )
    assert nccl_rdma_ports(_nccl(), shut) == ()


@pytest.mark.parametrize(
    ("settings", "forced"),
    [
        ({}, None),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE"),
        ({"NCCL_IB_DISABLE": "0x1"}, "NCCL_IB_DISABLE"),
        ({"NCCL_IB_DISABLE": "true"}, None),
        ({"NCCL_IB_DISABLE": "0"}, None),
        ({"NCCL_NET": "socket"}, "NCCL_NET"),
        ({"NCCL_NET": "IB"}, None),
    ],
)
def test_what_forces_sockets(settings, forced):
    setting = what_forces_sockets(_nccl(**settings))
    assert (setting.name if setting else None) == forced


def test_a_plugin_takes_the_place_of_sockets():
    plugin = (NcclPlugin("net", "libnccl-net.so", path="/x/libnccl-net.so"),)
    nccl = NcclFacts(settings=(Setting("NCCL_IB_DISABLE", "1"),), plugins=plugin)
    assert what_forces_sockets(nccl) is None
    assert not data_goes_by_sockets(nccl, None)
    assert data_goes_by_sockets(_nccl(), None)
    assert not data_goes_by_sockets(_nccl(), RdmaFacts(devices=PORTS))


MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"
LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
TABLE = (Gid(0, LOCAL, "RoCE v1"), Gid(1, LOCAL, "RoCE v2"), Gid(2, MAPPED, "RoCE v1"), Gid(3, MAPPED, "RoCE v2"))


@pytest.mark.parametrize(
    ("settings", "release", "table", "expected"),
    [
        ({}, "2.27.3", TABLE, 3),
        ({}, None, TABLE, 3),
        ({}, "2.20.5", TABLE, 0),
        ({"NCCL_IB_GID_INDEX": "1"}, "2.27.3", TABLE, 1),
        ({"NCCL_IB_GID_INDEX": "-1"}, "2.27.3", TABLE, 3),
        ({"NCCL_IB_ROCE_VERSION_NUM": "1"}, "2.27.3", TABLE, 2),
        ({}, "2.27.3", TABLE[:2], 0),
        ({"NCCL_IB_ADDR_RANGE": "10.1.0.0/16"}, "2.27.3", TABLE, 0),
        ({"NCCL_IB_ADDR_RANGE": "10.0.0.0/16"}, "2.27.3", TABLE, 3),
    ],
)
def test_gid_index(settings, release, table, expected):
    port = RdmaPort(1, "ACTIVE", link_layer="Ethernet", gids=table)
    assert gid_index(_nccl(**settings), port, release) == expected


def test_releases():
    assert release_of("2.27.3+cuda12.8") == (2, 27, 3)
    assert release_of(None) is None
    assert release_of("unknown") is None


def test_hosts_in_words():
    assert hosts_text(["a"]) == "a"
    assert hosts_text(["a", "b", "b"]) == "a and b"
    assert hosts_text(["a", "b", "c"]) == "a and 2 more hosts"


def _mesh(hosts, value):
    return [
        MeasuredPath(f"h{one}", f"h{two}", value(one, two))
        for one in range(hosts)
        for two in range(hosts)
        if one != two
    ]


def _bandwidth(paths, **more):
    return slow_paths(paths, lower_is_worse=True, factor=0.6, sigmas=5.0, **more)


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_a_slow_host(hosts):
    found = _bandwidth(_mesh(hosts, lambda one, two: 1.0 if 2 in (one, two) else 10.0 + 0.1 * one))
    assert [host for host, _ in found.hosts] == ["h2"]
    assert found.links == ()
    assert len(found.hosts[0][1]) == 2 * (hosts - 1)


def test_two_slow_hosts():
    found = _bandwidth(_mesh(10, lambda one, two: 1.0 if {3, 7} & {one, two} else 10.0))
    assert sorted(host for host, _ in found.hosts) == ["h3", "h7"]
    assert found.links == ()


def test_a_slow_link():
    found = _bandwidth(_mesh(6, lambda one, two: 1.0 if {one, two} == {1, 4} else 10.0))
    assert found.hosts == ()
    assert {path.pair for path in found.links} == {("h1", "h4")}


def test_a_slow_boundary():
    racks = {f"h{number}": "east" if number < 3 else "west" for number in range(6)}
    found = _bandwidth(_mesh(6, lambda one, two: 10.0 if (one < 3) == (two < 3) else 4.0), groups=racks)
    ((first, second, paths),) = found.boundaries
    assert {first, second} == {"east", "west"}
    assert len(paths) == 18
    assert found.hosts == ()
    assert found.links == ()


def test_a_ring_of_measurements_tells_a_host_from_a_link():
    ring = [(number, (number + 1) % 8) for number in range(8)]
    slow = {(2, 3)}
    paths = [MeasuredPath(f"h{one}", f"h{two}", 1.0 if (one, two) in slow else 10.0) for one, two in ring]
    assert _bandwidth(paths).hosts == ()
    assert [path.pair for path in _bandwidth(paths).links] == [("h2", "h3")]
    slow.add((3, 4))
    paths = [MeasuredPath(f"h{one}", f"h{two}", 1.0 if (one, two) in slow else 10.0) for one, two in ring]
    assert [host for host, _ in _bandwidth(paths).hosts] == ["h3"]


def test_nothing_stands_out():
    assert _bandwidth(_mesh(5, lambda one, two: 10.0 + one + 0.5 * two))[1:] == ((), (), ())
    assert _bandwidth(_mesh(2, lambda one, two: 1.0 + 9.0 * one))[1:] == ((), (), ())
    assert slow_paths([], lower_is_worse=True, factor=0.6, sigmas=5.0).typical == 0.0


def test_round_trips_need_more_than_noise():
    paths = _mesh(5, lambda one, two: 400e-6 if 1 in (one, two) else 50e-6)
    far = slow_paths(paths, lower_is_worse=False, factor=1 / 3, sigmas=5.0, least=200e-6)
    near = slow_paths(paths, lower_is_worse=False, factor=1 / 3, sigmas=5.0, least=1e-3)
    assert [host for host, _ in far.hosts] == ["h1"]
    assert near.hosts == ()
