"""Orders that no process of the job would give: each is refused before anything is opened, written or started."""

from __future__ import annotations

import socket

import msgspec
import pytest

from doctor.cluster.gather.probe_schedule import ProbeOptions, ProbeSchedule, full_stages
from doctor.cluster.gather.protocol import ProbeTask
from doctor.cluster.transport.codec import MalformedMessage
from doctor.collectors.base import Machine
from doctor.probes.ablation.setting_variants import ExperimentRow, variant_of
from doctor.probes.runtime import tcp_connect, torch_child
from doctor.probes.storage import file_probe

FOLDER = "/srv/checkpoints"
AROUND = Machine(
    environ={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PATH": "/usr/bin"},
    directories=(("checkpoint", FOLDER),),
)
FILE = {"path": FOLDER, "role": "checkpoint", "name": ".rankdoctor-probe-0123abcd-0-node0", "size": 1 << 20}
TARGET = {"peer": "node1", "address": "10.0.0.2", "port": 40_000, "word": "w"}
ASSIGNMENT = {"rank": 0, "host": "node0", "targets": [TARGET]}
MEETING = {"round": 0, "place": 1, "peer": "n", "address": "10.0.0.2", "port": 40_000, "word": "w", "calls": True}
ITINERARY = {
    "survey": 1,
    "place": 0,
    "word": "w",
    "meetings": [MEETING],
    "first": 0,
    "round_seconds": 1.0,
    "bytes": 1 << 20,
    "seconds": 0.1,
}
WAY = {"knob": "", "setting": "", "address": "10.0.0.2"}
PEER = {"name": "node1", "port": 40_000, "word": "w", "way": WAY, "others": []}
JOIN = {
    "type": "Join",
    "addresses": ["10.0.0.2"],
    "port": 40_000,
    "place": 0,
    "count": 2,
    "backend": "gloo",
    "device": "cpu",
    "shares": [{"axis": "world", "members": [0, 1], "bytes": 1024}],
    "seconds": 1.0,
    "patience": 1.0,
}
NO_PEERS = ["127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "example.org", "10.0.0.2; id", ""]
"""Addresses at which no other host is."""
PORTS = [22, 25, 80, 443, 1023]
"""Of services."""


@pytest.fixture
def heard(monkeypatch):
    """What the process was led to do: nothing of it may be."""
    done = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, end: done.append(("connect", end)))
    monkeypatch.setattr(tcp_connect, "connect_tcp", lambda *rest, **more: done.append(("dial", rest)))
    monkeypatch.setattr(file_probe, "start_child", lambda command, **more: done.append(("start", command)))
    monkeypatch.setattr(torch_child, "start_python", lambda module, **more: done.append(("start", more["env"])))
    return done


def given(stage, order, *, why=True):
    """What a process with all stages does with an order of that stage, and what it says."""
    told = []
    survey = ProbeSchedule(
        0, tuple(full_stages(ProbeOptions("full", why=why))), AROUND, leads_host=True, write_line=told.append
    )
    try:
        return survey.take_part(ProbeTask(1, stage, 1.0, msgspec.msgpack.encode(order))), told
    finally:
        survey.close()


def refused(stage, order, heard):
    """Whether an order came to nothing, with a sentence or as unreadable."""
    try:
        found, told = given(stage, order)
    except MalformedMessage:
        return heard == []
    return heard == [] and found.sections == {} and told[0].startswith(f"refused an order of the {stage} probe: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/etc"},
        {"path": "/srv/checkpoints/"},
        {"path": "/srv/checkpoints/../../etc"},
        {"path": "checkpoints"},
        {"role": "nccl-debug"},
        {"name": "authorized_keys"},
        {"name": "../.rankdoctor-probe-0123abcd-0-node0"},
        {"name": ".rankdoctor-probe-0123abcd-0-../x"},
        {"name": ".rankdoctor-probe-0123abcd-0-x\n"},
        {"size": 1 << 40},
        {"size": -1},
    ],
)
@pytest.mark.parametrize("act", ["write", "read"])
def test_files_elsewhere(heard, act, changes):
    assert refused("storage", {"act": act, "places": [{**FILE, **changes}]}, heard)


@pytest.mark.parametrize("target", [*({"address": one} for one in NO_PEERS), *({"port": one} for one in PORTS)])
def test_connections_that_lead_to_no_rank(heard, target):
    assert refused("light", {**ASSIGNMENT, "targets": [{**TARGET, **target}]}, heard)
    assert refused("transfers", {**ITINERARY, "meetings": [{**MEETING, **target}]}, heard)
    way = {"address": target["address"]} if "address" in target else {}
    peer = {**PEER, "way": {**WAY, **way}, **({"port": target["port"]} if "port" in target else {})}
    assert refused("why", {"type": "reach", "peer": peer}, heard)
    assert refused("why", {"type": "packet", "peer": peer, "largest": 1500, "setting": ""}, heard)
    speed = {"type": "speed", "itinerary": {**ITINERARY, "meetings": [{**MEETING, **target}]}}
    assert refused("why", speed, heard)


@pytest.mark.parametrize("changes", [{"port": one} for one in PORTS] + [{"addresses": ["224.0.0.1"]}])
def test_stores_that_no_rank_has(heard, changes):
    assert refused("groups", {**JOIN, **changes}, heard)


@pytest.mark.parametrize(
    "order",
    [
        {**ASSIGNMENT, "master": {"address": "10.9.9.9", "port": 29500}},
        {**ASSIGNMENT, "master": {"address": "10.0.0.1", "port": 22}},
        {**ASSIGNMENT, "hold_port": 8080},
        {**ASSIGNMENT, "targets": [TARGET] * 300},
        {**ASSIGNMENT, "burst": 1 << 40},
    ],
)
def test_another_master_and_too_much(heard, order):
    assert refused("light", order, heard)


@pytest.mark.parametrize(
    "order",
    [
        {"type": "prepare", "changes": {"PYTHONWARNINGS": "all:0:antigravity.x:0:0"}, "hosts": False},
        {"type": "experiment", "changes": {"LD_PRELOAD": "/tmp/x.so"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "LD_PRELOAD=/tmp/x.so"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "p2p-off", "interface": "lo"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "nccl-interface", "interface": "nosuch0"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "nccl-interface", "interface": "lo,eth0"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "gloo-interface", "interface": "../x"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "gloo-interface"}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "devices-backwards", "devices": 1 << 30}, "hosts": False},
        {"type": "experiment", "experiment": {"id": "devices-backwards", "devices": 1}, "hosts": False},
    ],
)
def test_an_environment_does_not_travel(heard, order):
    assert refused("why", order, heard)


def test_a_stage_that_was_not_asked_for_is_not_run(heard):
    order = {"type": "experiment", "experiment": {"id": "p2p-off"}, "hosts": False}
    assert given("why", order, why=False) == (given("nosuch", {})[0], [])
    assert heard == []


def test_an_experiment_means_the_same_everywhere():
    rows = [
        ExperimentRow("p2p-off"),
        ExperimentRow("gloo-interface", "eth0"),
        ExperimentRow("devices-backwards", devices=3),
    ]
    assert [(knob.name, knob.value) for knob in map(variant_of, rows)] == [
        ("NCCL_P2P_DISABLE", "1"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("CUDA_VISIBLE_DEVICES", "2,1,0"),
    ]
