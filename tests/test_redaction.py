"""Placeholders: what must change, what must stay, and that the same problems are found afterwards."""

import copy
import ipaddress
import json
import re

import pytest

from doctor.core.capture import from_document, to_document
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.redact.networks import AddressBook
from doctor.core.redact.placeholders import redact
from doctor.facts import Address, EnvironmentFacts, HostFacts, Interface, InterfaceFacts, Route, SlurmFacts, Variable
from doctor.testing import Fails, healthy
from tests.lab.cases import assert_each, each_case

CHECKS = sorted(builtin_checks(), key=lambda check: check.id)
FAMILIES = sorted({check.family for check in CHECKS})
SAMPLE = 10
"""One of how many cases is examined beside the first failing case of each check."""


def _host(name="atlas07.hpc.example.edu", **sections):
    """A capture with one host called ``name`` and one rank."""
    host = {"hostname": name.partition(".")[0], "fqdn": name, "machine_id": "m" * 32, "boot_id": "b" * 36}
    facts = {"host": host, **sections}
    return {
        "schema": 1,
        "kind": "capture",
        "hosts": [{"name": host["hostname"], "boot_id": "b" * 36, "machine_id": "m" * 32, "facts": facts}],
        "ranks": [{"rank": 0, "host": 0, "facts": {}}],
    }


def _text(text, name="atlas07.hpc.example.edu", **sections):
    """What becomes of a free text in a capture of that host."""
    document = _host(name, **sections)
    document["ranks"][0]["facts"]["free"] = {"command": text}
    return redact(document)["ranks"][0]["facts"]["free"]["command"]


@each_case(
    ("text", "expected"),
    [
        ("torchrun --master_addr=atlas07 --master_port=29500", "torchrun --master_addr=host-1 --master_port=29500"),
        ("ssh atlas07.hpc.example.edu", "ssh host-1.domain-1"),
        ("tcp://atlas07:29400", "tcp://host-1:29400"),
        ("/scratch/atlas07/slurm-atlas07-17.out", "/scratch/host-1/slurm-host-1-17.out"),
        ("srun -w atlas[07-08,11] train", "srun -w host-[1-3] train"),
        ("atlas071 and xatlas07", "atlas071 and xatlas07"),
        ("mirror.hpc.example.edu", "server-1.domain-1"),
        ("/home/alice/env/lib", "/home/user-1/env/lib"),
        ("/home/alice", "/home/user-1"),
        ("/root/.cache", "/root/.cache"),
        ("GPU-8f2a0c11-1111-2222-3333-444455556666", "GPU-00000001-0000-0000-0000-000000000000"),
        ("ether 3c:ec:ef:01:02:03", "ether 02:00:00:00:00:01"),
        ("enx3cecef010203", "enx020000000001"),
        ("localhost:29500 127.0.0.1 127.0.1.1 ::1 0.0.0.0 ::", "localhost:29500 127.0.0.1 127.0.1.1 ::1 0.0.0.0 ::"),
        ("8.8.8.8", "192.0.2.1"),
        ("2a00:1450:4001:81b::200e", "2001:db8::1"),
        ("[fe80::3eec:efff:fe01:203%eth0]:1234", "[fe80::1%eth0]:1234"),
        ("at::native std::vector 12:34:56 00000000:10:00.0", "at::native std::vector 12:34:56 00000000:10:00.0"),
        ("cudnn-9.10.2.21", "cudnn-9.10.2.21"),
        ("https://hf.co?key=hf_abcdefghijklmnopqrstuv", "https://hf.co?key=<redacted>"),
    ],
)
def test_what_becomes_of_a_text(text, expected):
    assert _text(text) == expected


@pytest.mark.parametrize("name", ["node", "gpu", "eth0", "mlx5_0", "system", "environment", "docker", "localhost"])
def test_a_host_with_a_common_name_wrecks_nothing(name):
    text = "gpu-idle on each node: eth0, docker0 and mlx5_0 by the system file; the environment of localhost"
    assert _text(text, name) == text
    job = healthy(hosts=2).alter(HostFacts, hosts=("node1",), hostname=name).job()
    before = to_document(job)
    after = redact(copy.deepcopy(before))
    assert [sorted(host["facts"]) for host in after["hosts"]] == [sorted(host["facts"]) for host in before["hosts"]]
    assert (
        after["hosts"][1]["name"] == name
        if name == "localhost"
        else re.fullmatch(r"host-\d", after["hosts"][1]["name"])
    )
    assert after["hosts"][1]["facts"]["interfaces"]["interfaces"][1]["name"] == "eth0"
    from_document(after)


def test_a_name_without_digits_is_found_inside_longer_texts_only():
    assert _text("ssh kepler uptime", "kepler") == "ssh host-1 uptime"
    assert _text("/data/kepler/run", "kepler") == "/data/host-1/run"
    assert _text("johannes-kepler", "kepler") == "johannes-kepler"
    assert _text("kepler", "kepler") == "kepler"
    assert _text("/logs/vm.out of a vm-like machine", "vm") == "/logs/host-1.out of a vm-like machine"


def test_keys_and_versions_stay():
    job = healthy().environ(NCCL_DEBUG="INFO").job()
    before = to_document(job)
    after = redact(copy.deepcopy(before))
    assert _keys(after) == _keys(before)
    for key in ("software", "environment", "nccl"):
        assert after["ranks"][0]["facts"][key] == json.loads(json.dumps(before["ranks"][0]["facts"][key]))


def _keys(value):
    if isinstance(value, dict):
        return {key: _keys(inner) for key, inner in value.items()}
    return [_keys(inner) for inner in value] if isinstance(value, (list, tuple)) else None


def test_variables_of_users_hosts_and_secrets():
    job = (
        healthy(hosts=2)
        .launched(
            MASTER_ADDR="atlas1.lab", SLURM_JOB_NODELIST="atlas[1-2]", SLURM_JOB_USER="grace", SLURM_JOB_ID="4711"
        )
        .alter(
            EnvironmentFacts, variables=(Variable("TRITON_CACHE_DIR", "/tmp/triton_grace"), Variable("A_TOKEN", "x"))
        )
        .put(SlurmFacts(job_id="4711", node_list="atlas[1-2]"))
        .job()
    )
    after = redact(to_document(job))
    launch = {one["name"]: one["value"] for one in after["ranks"][0]["facts"]["launch"]["variables"]}
    environment = {one["name"]: one["value"] for one in after["ranks"][0]["facts"]["environment"]["variables"]}
    nodes = launch["SLURM_JOB_NODELIST"]
    assert launch["SLURM_JOB_USER"] == "user-1"
    assert environment["TRITON_CACHE_DIR"] == "/tmp/triton_user-1"
    assert environment["A_TOKEN"] == "<redacted>"
    assert launch["SLURM_JOB_ID"] == "4711"
    assert re.fullmatch(r"host-\[(\d+)-(\d+)\]", nodes)
    assert after["hosts"][0]["facts"]["slurm"]["node_list"] == nodes
    assert launch["MASTER_ADDR"] == f"host-{nodes[6:-1].split('-')[0]}.domain-1"


def test_addresses_keep_their_networks():
    interfaces = InterfaceFacts(
        interfaces=(
            Interface("eth0", addresses=(Address("inet", "10.40.7.9", 20), Address("inet6", "fd12:3456::9", 64))),
            Interface("eth1", addresses=(Address("inet", "141.3.9.17", 22),)),
            Interface("eth2", addresses=(Address("inet", "10.41.0.9", 24),)),
        ),
        routes=(
            Route("0.0.0.0/0", "eth0", "10.40.0.1"),
            Route("10.40.0.0/20", "eth0"),
            Route("10.0.0.0/8", "eth2", "10.41.0.1"),
            Route("141.3.8.0/22", "eth1"),
        ),
    )
    after = redact(to_document(healthy(per_host=1).put(interfaces).job()))["hosts"][0]["facts"]["interfaces"]
    (own, six), (public,), (other,) = (interface["addresses"] for interface in after["interfaces"])
    first = ipaddress.ip_network(f"{own['address']}/20", strict=False)
    assert own["address"] != "10.40.7.9"
    assert ipaddress.ip_address(own["address"]) in ipaddress.ip_network("10.0.0.0/8")
    assert ipaddress.ip_address(six["address"]) in ipaddress.ip_network("fc00::/7")
    assert ipaddress.ip_address(public["address"]) in ipaddress.ip_network("192.0.2.0/24")
    assert ipaddress.ip_address(other["address"]) not in first
    default, local, wide, outside = after["routes"]
    assert default["destination"] == "0.0.0.0/0"
    assert ipaddress.ip_address(default["gateway"]) in first
    assert ipaddress.ip_network(local["destination"]) == first
    assert wide["destination"] == "10.0.0.0/8"
    assert ipaddress.ip_address(public["address"]) in ipaddress.ip_network(outside["destination"])


def test_a_gid_of_a_network_card_follows_its_address():
    gid = "0000:0000:0000:0000:0000:ffff:0a28:0709"
    text = _text(f"{gid} 10.40.7.9")
    mapped, _, address = text.partition(" ")
    assert len(mapped) == 39
    assert str(ipaddress.ip_address(mapped).ipv4_mapped) == address != "10.40.7.9"


def test_many_public_networks_stay_apart():
    networks = [ipaddress.ip_network(f"141.{index // 256}.{index % 256}.0/24") for index in range(1000)]
    addresses = [network[7] for network in networks]
    book = AddressBook(networks, addresses)
    standins = [book.address(address) for address in addresses]
    assert len({ipaddress.ip_network(f"{one}/24", strict=False) for one in standins}) == 1000
    assert all(standin in book.network(network) for standin, network in zip(standins, networks, strict=True))
    assert not any(one.is_global for one in standins)


def test_a_large_private_network_fits():
    network = ipaddress.ip_network("10.0.0.0/18")
    addresses = [network[index] for index in range(1, 2**14 - 1)]
    book = AddressBook([network, ipaddress.ip_network("10.0.3.0/24")], addresses)
    standins = {book.address(address) for address in addresses}
    assert len(standins) == len(addresses)
    assert all(one in book.network(network) for one in standins)


def test_cut_uuids_stay_the_beginning_of_theirs():
    document = _host(gpus={"gpus": [{"uuid": f"GPU-{n}8f2a0c1-1111-2222-3333-444455556666"} for n in "12"]})
    document["ranks"][0]["facts"]["free"] = {"command": "GPU-28f2 GPU-1 GPU-"}
    after = redact(document)
    uuids = [gpu["uuid"] for gpu in after["hosts"][0]["facts"]["gpus"]["gpus"]]
    second, first, _ = after["ranks"][0]["facts"]["free"]["command"].split()
    assert uuids[1].startswith(second)
    assert uuids[0].startswith(first)
    assert not uuids[0].startswith(second)


def test_nothing_of_the_original_is_left_and_the_result_is_stable():
    originals = ["atlas07", "example", "alice", "10.40.7.9", "3c:ec:ef", "m" * 32, "b" * 36]
    document = _host(
        interfaces={"interfaces": [{"name": "eth0", "addresses": [{"address": "10.40.7.9", "prefix_length": 20}]}]},
        storage={"directories": [{"path": "/home/alice/runs/atlas07", "role": "checkpoint"}]},
        text={"text": "alice@atlas07.hpc.example.edu from 10.40.7.9 (3c:ec:ef:01:02:03) in /gpfs/alice"},
    )
    once, twice = redact(copy.deepcopy(document)), redact(copy.deepcopy(document))
    assert once == twice
    assert not [word for word in originals if word in json.dumps(once)]


def test_the_original_is_not_changed():
    document = to_document(healthy(hosts=2).job())
    before = copy.deepcopy(document)
    redact(document)
    assert document == before


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_is_found_afterwards(family):
    checks = [check for check in CHECKS if check.family == family]
    assert_each(_finds_the_same_redacted, [one for check in checks for one in _sampled(check)])


def _sampled(check):
    cases = list(check.cases())
    failing = next(case for case in cases if isinstance(case, Fails))
    others = [case for case in cases if case is not failing]
    yield from ((f"{check.id}, {case.name}", (check, case)) for case in [failing, *others[::SAMPLE]])


def _finds_the_same_redacted(check, case):
    job = case.sketch.job()
    document = to_document(job)
    (before,) = examine(job, CheckRegistry((check,)))
    (after,) = examine(from_document(redact(document)), CheckRegistry((check,)))
    assert (after.status, after.severity) == (before.status, before.severity), (before.reason, after.reason)
    assert [(f.ranks, f.severity) for f in after.findings] == [(f.ranks, f.severity) for f in before.findings]


def test_hosts_of_ranks_that_fell_silent_get_stand_ins():
    job = healthy(hosts=3, per_host=1).only((0, 1), absent=(2,)).fell_silent(2, "node2", "joined").job()
    document = redact(to_document(job))
    assert "node2" not in json.dumps(document)
    (seen,) = from_document(document).last_seen
    assert (seen.rank, seen.step) == (2, "joined")


def test_stand_ins_are_in_the_order_of_the_names():
    """Where a boundary lies is told by hosts whose names are in a row, whatever the order of the ranks."""
    documents = to_document(healthy(hosts=12, per_host=1).job())
    documents["hosts"].reverse()
    names = {
        host["name"]: stand_in["name"]
        for host, stand_in in zip(documents["hosts"], redact(documents)["hosts"], strict=True)
    }
    assert [int(names[f"node{number}"].removeprefix("host-")) for number in range(12)] == list(range(1, 13))
