"""Faulty networks, caused in namespaces of their own and read by the real collectors.

A host here is a set of namespaces with its own interfaces, host name, /etc/hosts, resolver and boot id, so two of them
are two machines to the doctor. RDMA is read from recorded trees of sysfs.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from doctor.analysis.interface_choice import nccl_endpoints
from doctor.api import Severity, Status
from doctor.collectors.base import Machine
from doctor.collectors.nccl.configuration import collect_nccl
from doctor.collectors.network.rdma import collect_rdma
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.facts import NcclLibrary
from doctor.core.job import Job, Member, build_job
from doctor.core.report_document import CheckResult
from doctor.facts import InterfaceFacts, NcclFacts, RdmaFacts, SoftwareFacts, TorchBuild
from doctor.knowledge.interface_syntax import parse_nccl_list
from doctor.testing import healthy
from tests.collectors.recorded import plant
from tests.lab.elsewhere import facts_elsewhere
from tests.lab.speed import patience

CHECKS = {check.id: check for check in builtin_checks()}
SECTIONS = ("host", "interfaces", "nccl", "environment", "master")
SPACES = "unshare --net --mount --uts --pid --fork --mount-proc --kill-child"
COMPILER = shutil.which("cc") or shutil.which("gcc")


@functools.cache
def _may_unshare() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(f"{SPACES} true", shell=True, capture_output=True, timeout=patience(20)).returncode == 0


@pytest.fixture(scope="module")
def needs_namespaces() -> None:
    if not _may_unshare():
        pytest.skip("needs root, unshare (util-linux) and ip (iproute2)")


def link(name: str, address: str = "", *, up: bool = True, carrier: bool = True) -> str:
    """An interface with a partner that nobody listens on; without ``carrier`` the partner stays down."""
    lines = [f"ip link add {name} type veth peer name peer-{name}"]
    lines += [f"echo 1 > /proc/sys/net/ipv6/conf/peer-{name}/disable_ipv6"]
    lines += [f"ip link set peer-{name} up"] if carrier else []
    lines += [f"ip address add {address} dev {name}"] if address else []
    return "; ".join([*lines, f"ip link set {name} {'up' if up else 'down'}"])


def bridge(name: str, address: str) -> str:
    """A bridge with a member, so that it runs; the kernel takes up to a second to say so."""
    return f"ip link add {name} type bridge; ip address add {address} dev {name}; {link('port')}; " + (
        f"ip link set port master {name}; ip link set {name} up; "
        "for end in port peer-port; do echo 1 > /proc/sys/net/ipv6/conf/$end/disable_ipv6; done; "
        f"for i in $(seq 50); do ip link show {name} | grep -q NO-CARRIER || break; sleep 0.1; done"
    )


def host(folder: Path, number: int, network: str, *, hosts: str = "", resolver: str = "", name: str = "") -> str:
    """The command that starts another command on a host of its own."""
    folder.mkdir(exist_ok=True)
    (folder / f"hosts{number}").write_text(f"127.0.0.1 localhost\n{hosts}\n")
    (folder / f"resolv{number}").write_text(resolver)
    (folder / f"boot{number}").write_text(f"{number:08x}-0000-4000-8000-000000000000\n")
    mounts = {"hosts": "/etc/hosts", "resolv": "/etc/resolv.conf", "boot": "/proc/sys/kernel/random/boot_id"}
    lines = ["set -e", "mount -t sysfs none /sys", f"hostname {name or f'node{number}'}", "ip link set lo up"]
    lines += [f"mount --bind {folder}/{kind}{number} {path}" for kind, path in mounts.items()]
    script = "\n".join([*lines, network, 'exec "$@"'])
    return f"{SPACES} bash -c {shlex.quote(script)} inside"


def facts(folder: Path, number: int, network: str, *, hosts: str = "", resolver: str = "", **environ: str) -> Member:
    """The real facts of a process on such a host."""
    wrap = host(folder, number, network, hosts=hosts, resolver=resolver)
    clean = {"HOME": str(folder), **environ}
    return Member(number, facts_elsewhere(*SECTIONS, wrap=wrap, **clean))


def job(*members: Member) -> Job:
    return build_job(members, world_size=len(members))


def judged(job: Job, check: str) -> CheckResult:
    (result,) = examine_job(job, CheckRegistry((CHECKS[check],)))
    assert result.status is not Status.ERROR, result.reason
    return result


def blamed(result: CheckResult) -> set[int]:
    return {rank for finding in result.findings for rank in finding.ranks}


def loud(result: CheckResult) -> set[int]:
    """Who is blamed at more than info."""
    return {rank for finding in result.findings if finding.severity is not Severity.INFO for rank in finding.ranks}


GOOD = (link("eth0", "10.7.0.1/24"), link("eth0", "10.7.0.2/24"))
NAMES = "10.7.0.1 node0\n10.7.0.2 node1"


@pytest.fixture(scope="module")
def pair(needs_namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Member, Member]:
    """Two well hosts."""
    tmp_path = tmp_path_factory.mktemp("pair")
    return facts(tmp_path, 0, GOOD[0], hosts=NAMES), facts(tmp_path, 1, GOOD[1], hosts=NAMES)


def test_two_well_hosts_are_left_alone(pair: tuple[Member, Member]) -> None:
    found = {name: judged(job(*pair), name).findings for name in CHECKS if name.startswith("NET")}
    assert {name: findings for name, findings in found.items() if findings} == {}
    assert job(*pair).is_multi_host


def test_host_names(pair: tuple[Member, Member], tmp_path: Path) -> None:
    unknown = facts(tmp_path, 1, GOOD[1], hosts="10.7.0.1 node0")
    debian = [facts(tmp_path, number, GOOD[number], hosts=f"127.0.1.1 node{number}") for number in (0, 1)]
    assert blamed(judged(job(pair[0], unknown), "NET001")) == {1}
    assert judged(job(pair[0], debian[1]), "NET002").severity is Severity.WARNING
    assert judged(job(*debian), "NET002").severity is Severity.ERROR
    assert "eth0" in judged(job(pair[0], debian[1]), "NET002").findings[0].fix
    alone = judged(job(debian[0]._replace(rank=0)), "NET002")
    assert alone.severity is Severity.INFO


def test_a_name_server_that_drops_packets(pair: tuple[Member, Member], tmp_path: Path) -> None:
    silent = '"$1" -c "import socket,time;s=socket.socket(2,2);s.bind((\'127.0.0.1\',53));time.sleep(30)" & sleep 0.3'
    slow = facts(tmp_path, 1, f"{GOOD[1]}; {silent}", resolver="nameserver 127.0.0.1\n")
    result = judged(job(pair[0], slow), "NET024")
    assert blamed(result) == {1}
    assert result.severity is Severity.WARNING


def test_what_nccl_takes_by_itself(pair: tuple[Member, Member], tmp_path: Path) -> None:
    only_docker = facts(tmp_path, 1, bridge("docker0", "172.17.0.1/16"), hosts=NAMES)
    beside = facts(tmp_path, 1, f"{bridge('docker0', '172.17.0.1/16')}; {GOOD[1]}", hosts=NAMES)
    compose = facts(tmp_path, 1, f"{bridge('br-0a1b2c3d4e5f', '172.18.0.1/16')}; {GOOD[1]}", hosts=NAMES)
    assert blamed(judged(job(pair[0], only_docker), "NET009")) == {1}
    assert judged(job(pair[0], beside), "NET009").findings == ()
    assert "br-0a1b2c3d4e5f" in judged(job(pair[0], compose), "NET009").findings[0].summary
    wait = "for i in $(seq 50); do ip -6 address show dev eth1 | grep -q fe80 && break; sleep 0.1; done"
    spare = facts(tmp_path, 1, f"{GOOD[1]}; {link('eth1')}; {wait}", hosts=NAMES)
    result = judged(job(pair[0], spare), "NET009")
    assert (result.severity, blamed(result)) == (Severity.WARNING, {1})


def test_the_same_bridged_address_on_every_host(needs_namespaces: None, tmp_path: Path) -> None:
    twins = [
        facts(tmp_path, number, link("eth0", "172.17.0.2/16"), hosts=f"172.17.0.2 node{number}") for number in (0, 1)
    ]
    assert blamed(judged(job(*twins), "NET009")) == {0, 1}


@pytest.mark.parametrize(
    ("network", "faulty"),
    [
        (link("eth1", "10.8.0.2/24"), set()),
        (link("eth1", "10.8.0.2/24", up=False), {1}),
        (link("eth1", "10.8.0.2/24", carrier=False), {1}),
        (link("eth1"), {1}),
    ],
    ids=["up", "down", "no carrier", "no address"],
)
def test_a_selected_interface(needs_namespaces: None, tmp_path: Path, network: str, faulty: set[int]) -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    well = facts(tmp_path, 0, f"{GOOD[0]}; {link('eth1', '10.8.0.1/24')}", hosts=NAMES, **chosen)
    other = facts(tmp_path, 1, f"{GOOD[1]}; {network}", hosts=NAMES, **chosen)
    assert blamed(judged(job(well, other), "NET008")) == faulty
    assert judged(job(well, other), "NET007").findings == ()


def test_a_line_of_a_conf_file_is_named(pair: tuple[Member, Member], tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("# copied from the other cluster\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ens9\n")
    other = facts(tmp_path, 1, GOOD[1], hosts=NAMES, NCCL_CONF_FILE=str(conf))
    result = judged(job(pair[0], other), "NET007")
    (finding,) = result.findings
    assert (finding.ranks, finding.source.file, finding.source.line) == ((1,), str(conf), 3)


def test_gloo_reads_no_signs(pair: tuple[Member, Member], tmp_path: Path) -> None:
    other = facts(tmp_path, 1, GOOD[1], hosts=NAMES, GLOO_SOCKET_IFNAME="^lo,docker")
    result = judged(job(pair[0], other), "NET011")
    assert blamed(result) == {1}
    assert judged(job(pair[0], other), "NET007").findings == ()


def test_the_master_as_the_ranks_see_it(needs_namespaces: None, tmp_path: Path) -> None:
    def member(number: int, address: str, hosts: str = NAMES) -> Member:
        return facts(tmp_path, number, GOOD[number], hosts=hosts, MASTER_ADDR=address, MASTER_PORT="29500")

    first = member(0, "node0")
    assert blamed(judged(job(first, member(1, "localhost")), "NET005")) == {1}
    assert blamed(judged(job(first, member(1, "node0", "10.7.0.2 node1")), "NET004")) == {1}
    at_home = judged(job(member(0, "127.0.0.1"), member(1, "node0")), "NET005")
    assert (at_home.severity, blamed(at_home)) == (Severity.INFO, {0})
    assert "export MASTER_ADDR=node0" in at_home.findings[0].fix
    debian = member(0, "node0", "127.0.1.1 node0\n10.7.0.2 node1")
    assert judged(job(debian, member(1, "node0")), "NET005").findings == ()
    well = job(first, member(1, "node0"))
    assert {judged(well, check).status for check in ("NET004", "NET005")} == {Status.PASS}


def test_mtu_and_family(pair: tuple[Member, Member], tmp_path: Path) -> None:
    jumbo = facts(tmp_path, 1, f"{GOOD[1]}; ip link set eth0 mtu 9000", hosts=NAMES)
    six = facts(tmp_path, 1, link("eth0", "fd00:7::2/64"), hosts="fd00:7::2 node1")
    assert judged(job(pair[0], jumbo), "NET012").severity is Severity.WARNING
    assert judged(job(pair[0], six), "NET016").severity is Severity.ERROR


ORACLE = r"""
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <sys/socket.h>
int main(void) {
  struct ifaddrs *all, *one;
  if (getifaddrs(&all)) return 1;
  for (one = all; one; one = one->ifa_next)
    if (one->ifa_addr && (one->ifa_addr->sa_family == AF_INET || one->ifa_addr->sa_family == AF_INET6))
      printf("%s %d\n", one->ifa_name, (one->ifa_flags & IFF_RUNNING) != 0);
  return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_the_order_is_that_of_getifaddrs(needs_namespaces: None, tmp_path: Path) -> None:
    """NCCL walks getifaddrs and keeps each name once: so does the doctor, on a host with a mixed bag of interfaces."""
    network = "; ".join(
        (
            link("eth5", "fd00:5::1/64"),
            link("eth3", "10.3.0.1/24"),
            link("eth4", "10.4.0.1/24", carrier=False),
            link("ib7", "10.5.0.1/24"),
            f"{link('eth1', '10.6.0.1/24')}; ip address add fd00:6::1/64 dev eth1",
            "sleep 0.1",
        )
    )
    (tmp_path / "oracle.c").write_text(ORACLE)
    subprocess.run([COMPILER, "-o", tmp_path / "oracle", tmp_path / "oracle.c"], check=True)
    wrap = host(tmp_path / "a", 0, network)
    listed = subprocess.run(f"{wrap} {tmp_path}/oracle", shell=True, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    member = facts(tmp_path / "b", 0, network)
    interfaces, nccl = member.sections["interfaces"], NcclFacts()
    assert isinstance(interfaces, InterfaceFacts)
    for text, release in (("^lo", "2.28.3"), ("^lo", "2.27.3"), ("eth", "2.28.3"), ("=eth1,ib7", "2.28.3")):
        running = [name for name, runs in rows if runs == "1" or release < "2.28.3"]
        expected = [name for name in dict.fromkeys(running) if parse_nccl_list(text).selects(name)]
        setting = collect_nccl(Machine(environ={"NCCL_SOCKET_IFNAME": text, "HOME": str(tmp_path)})).settings
        found = nccl_endpoints(NcclFacts(settings=setting), interfaces, release)
        assert [endpoint.interface.name for endpoint in found] == expected, text
    assert [one.interface.name for one in nccl_endpoints(nccl, interfaces, "2.28.3")] == ["ib7"]


# ---- RDMA, from a recorded host with eight InfiniBand ports and one of Ethernet ----

TREE = "h100-eight-ndr-one-roce"
PORT = "sys/class/infiniband/{device}/ports/1/{file}"


def rdma_host(root: Path, **edits: str) -> RdmaFacts:
    """The recorded host with files of its tree overwritten: ``mlx5_4__state="1: DOWN"``."""
    machine = plant(TREE, root)
    library = root / "usr/lib/libibverbs.so.1"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    for key, text in edits.items():
        device, _, file = key.partition("__")
        (root / PORT.format(device=device, file=file)).write_text(text + "\n")
    return collect_rdma(machine)


def rdma_job(*hosts: RdmaFacts | None, gpus: int = 1, **environ: str) -> Job:
    """One rank on each of these hosts with ``gpus``, with real NCCL settings from ``environ``; ``None``: no RDMA."""
    settings = collect_nccl(Machine(environ={"HOME": "/nonexistent", **environ}))
    sketch = healthy(len(hosts), 1, gpus=gpus).put(settings)
    for number, rdma in enumerate(hosts):
        sketch = sketch.put(rdma, hosts=(f"node{number}",)) if rdma is not None else sketch
    return sketch.job()


NDR = "=mlx5_0,mlx5_3,mlx5_4,mlx5_6,mlx5_9,mlx5_10,mlx5_11"


def test_rdma_settings(tmp_path: Path) -> None:
    hosts = rdma_host(tmp_path / "a"), rdma_host(tmp_path / "b")
    assert judged(rdma_job(*hosts, NCCL_IB_HCA=NDR), "NET018").findings == ()
    assert judged(rdma_job(*hosts, NCCL_IB_HCA="mlx5"), "NET018").findings == ()
    assert blamed(judged(rdma_job(*hosts, NCCL_IB_HCA="=mlx5"), "NET018")) == {0, 1}
    assert blamed(judged(rdma_job(*hosts, NCCL_IB_HCA="=mlx5_5"), "NET018")) == {0, 1}
    assert blamed(judged(rdma_job(*hosts, NCCL_IB_DISABLE="1"), "NET019")) == {0, 1}
    assert judged(rdma_job(*hosts, NCCL_IB_DISABLE="yes"), "NET019").findings == ()


def test_rdma_ports(tmp_path: Path) -> None:
    well = [rdma_host(tmp_path / f"well{number}") for number in range(2)]
    down = rdma_host(tmp_path / "down", mlx5_4__state="1: DOWN", mlx5_4__phys_state="2: Polling")
    half = rdma_host(tmp_path / "half", mlx5_9__rate="200 Gb/sec (2X NDR)")
    hints = judged(rdma_job(*well, NCCL_IB_HCA=NDR), "NET020").findings
    assert {finding.severity for finding in hints} == {Severity.INFO}, "a port that counted many errors since boot"
    assert judged(rdma_job(*well, NCCL_IB_HCA=NDR), "NET022").findings == ()
    assert loud(judged(rdma_job(*well, down, NCCL_IB_HCA=NDR), "NET020")) == {2}
    assert blamed(judged(rdma_job(*well, down, NCCL_IB_HCA=NDR), "NET022")) == {2}
    assert loud(judged(rdma_job(*well, half, NCCL_IB_HCA=NDR), "NET020")) == {2}
    mixed = judged(rdma_job(*well), "NET022")
    assert (mixed.severity, blamed(mixed)) == (Severity.ERROR, {0, 1})


def test_rdma_devices_without_their_files(tmp_path: Path) -> None:
    """A pod sees the devices of its machine in /sys and the files of some of them."""
    well, part = rdma_host(tmp_path / "well"), tmp_path / "part"
    machine = plant(TREE, part)
    for number in (3, 5):
        (part / f"dev/infiniband/uverbs{number}").unlink()
    (part / "usr/lib").mkdir(parents=True)
    (part / "usr/lib/libibverbs.so.1").touch()
    some = collect_rdma(machine)
    found = judged(rdma_job(some, some, gpus=8, NCCL_IB_HCA=NDR), "NET019")
    assert (found.severity, blamed(found)) == (Severity.INFO, {0, 1})
    assert "5 of 7 active RDMA devices: mlx5_4, mlx5_6 have no device file" in found.findings[0].summary
    assert judged(rdma_job(some, some, gpus=4, NCCL_IB_HCA=NDR), "NET019").findings == ()
    assert judged(rdma_job(well, well, gpus=8, NCCL_IB_HCA=NDR), "NET019").findings == ()
    assert blamed(judged(rdma_job(well, well, some, gpus=8, NCCL_IB_HCA=NDR), "NET022")) == {2}


def elastic_host(root: Path) -> RdmaFacts:
    """The recorded host with its first card turned into one of EFA, and no other."""
    machine = plant(TREE, root)
    devices = root / "sys/class/infiniband"
    for device in devices.iterdir():
        if device.name != "mlx5_0":
            device.unlink() if device.is_symlink() else shutil.rmtree(device)
    driver = (devices / "mlx5_0/device/driver").resolve().parent / "efa"
    driver.mkdir(exist_ok=True)
    (devices / "mlx5_0/device/driver").unlink()
    (devices / "mlx5_0/device/driver").symlink_to(driver)
    (root / PORT.format(device="mlx5_0", file="link_layer")).write_text("Unspecified\n")
    return collect_rdma(machine)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_elastic_fabric_on_one_host_of_two(tmp_path: Path) -> None:
    source = tmp_path / "plugin.c"
    source.write_text("void *ncclNetPlugin_v10[8] = {0};\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", tmp_path / "libnccl-net.so", source], check=True)
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    efa = elastic_host(tmp_path / "efa")
    assert [device.driver for device in efa.devices] == ["efa"]
    assert blamed(judged(rdma_job(efa, None, **environ), "NET026")) == {1}
    assert judged(rdma_job(efa, efa, **environ), "NET026").findings == ()
    assert judged(rdma_job(None, None, **environ), "NET026").findings == ()


def test_rdma_addresses(tmp_path: Path) -> None:
    well = rdma_host(tmp_path / "well")
    bare = rdma_host(
        tmp_path / "bare", **{f"mlx5_1__gids/{n}": "0000:0000:0000:0000:0000:0000:0000:0000" for n in (2, 3)}
    )
    roce = {"NCCL_IB_HCA": "=mlx5_1"}
    assert judged(rdma_job(well, well, **roce), "NET021").findings == ()
    assert blamed(judged(rdma_job(well, bare, **roce, NCCL_IB_GID_INDEX="3"), "NET021")) == {1}
    assert judged(rdma_job(well, well, **roce, NCCL_IB_GID_INDEX="1"), "NET021").severity is Severity.WARNING


def test_memory_of_gpus_out_of_reach(tmp_path: Path) -> None:
    machine = plant(TREE, tmp_path)
    (tmp_path / "proc/modules").write_text("mlx5_ib 1 0 - Live 0x0\n")
    (tmp_path / "proc/sys/kernel/osrelease").write_text("5.4.0-150-generic\n")
    shutil.rmtree(tmp_path / "sys/module", ignore_errors=True)
    assert blamed(judged(rdma_job(collect_rdma(machine)), "NET023")) == {0}
    assert judged(rdma_job(rdma_host(tmp_path / "well")), "NET023").findings == ()


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("symbol", "release", "faulty"),
    [
        ("ncclNetPlugin_v8", "2.27.3", set()),
        ("ncclNetPlugin_v4", "2.27.3", {0, 1}),
        ("ncclNetPlugin_v4", "2.18.5", set()),
    ],
)
def test_a_plugin_that_is_found_first(tmp_path: Path, symbol: str, release: str, faulty: set[int]) -> None:
    source = tmp_path / "plugin.c"
    source.write_text(f"void *{symbol}[8] = {{0}};\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", tmp_path / "libnccl-net.so", source], check=True)
    environ = {"HOME": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    torch = TorchBuild("2.8.0", cuda="12.8", nccl=release)
    software = SoftwareFacts(torch=torch, nccl_libraries=(NcclLibrary("/x/libnccl.so.2", release, chosen=True),))
    sketch = healthy(2, 1).put(software).put(collect_nccl(Machine(environ=environ)))
    assert blamed(judged(sketch.job(), "NET026")) == faulty


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    settings = collect_nccl(Machine(environ={"HOME": str(tmp_path), "NCCL_NET_PLUGIN": "not-installed-here"}))
    result = judged(healthy(2, 1).put(settings, ranks=(1,)).job(), "NET026")
    assert blamed(result) == {1}
    assert "not-installed-here" in result.findings[0].summary
