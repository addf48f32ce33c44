"""The gathering of a Ray cluster: real clusters of hosts with networks and names of their own."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from doctor.cluster.ray.cluster_address import ray_head_address
from doctor.cluster.ray.driver_process import EndedNodes
from doctor.cluster.ray.node_task import given_environ
from doctor.cluster.ray.ray_cluster import RayNode
from doctor.core.errors import UnusableError
from tests.lab.needs import CannotPlay, clean_environ
from tests.lab.ray_nodes import PORT, WITHOUT_LOGS, kill_ray, ray_nodes, start_again
from tests.lab.speed import patience

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

DOCTOR = [sys.executable, "-m", "doctor"]
CHECK = [*DOCTOR, "check", "--format", "json", "--ray"]
STARTING = 60
"""Seconds in which a driver has entered the cluster."""


@pytest.fixture(scope="module")
def cluster():
    """Three nodes, as long as no test below has changed them."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(ray_nodes(3))
        except CannotPlay as why:
            pytest.skip(str(why))
        yield made


def statuses(report, *checks):
    found = {result["id"]: result["status"] for result in report["results"]}
    return [found[check] for check in checks]


def soon(holds, seconds=10):
    until = time.monotonic() + patience(seconds)
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    return holds()


LIST = "print(json.dumps({'keys': [key.decode() for key in _internal_kv_list(b'', namespace=NAMESPACE)]}), file=answer)"


def drive(cluster, script):
    """What a driver answered as JSON. Ray prints to standard output too, whatever it was told: that a node died which
    an earlier test killed."""
    prologue = """
import json, os, ray, sys, time
answer, sys.stdout = sys.stdout, sys.stderr
from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put
from doctor.cluster.transport.ray_store import NAMESPACE, STALE_AFTER, RayStoreBackend, new_run
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
"""
    done = cluster.run([sys.executable, "-c", prologue + script])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BOARD = """
run = new_run()
one, other, stranger = RayStoreBackend(run), RayStoreBackend(run), RayStoreBackend(new_run())
found = {"nothing": other.get("call")}
one.set("call", b"\\0first")
found["exchanged"] = [
    one.exchange("call", None, b"x"),
    one.exchange("call", b"y", b"x"),
    other.exchange("call", b"\\0first", b"second"),
    one.exchange("call", b"\\0first", b"third"),
    one.get("call") == b"second",
]
one.append("box", b"a"), other.append("box", b"b"), one.append("boxes", b"c")
entries, mark = one.fetch("box", None)
other.append("box", b"a")
again, mark = one.fetch("box", mark)
found["fetched"] = [sorted(map(bytes.decode, entries)), [entry.decode() for entry in again], one.fetch("box", mark)[0]]
stranger.set("call", b"")
one.set("nonce/verdict", b""), one.set("nonce2/verdict", b"")
one.clear("nonce")
found["cleared"] = [one.get("nonce/verdict"), one.get("nonce2/verdict") == b""]
old = f"{int(time.time() - STALE_AFTER) - 60}-dead/call".encode()
_internal_kv_put(old, b"", namespace=NAMESPACE)
one.close()
left = _internal_kv_list(b"", namespace=NAMESPACE)
found["closed"] = [stranger.get("call") == b"", len(left)]
stranger.close()
print(json.dumps(found), file=answer)
"""


def test_the_board_keeps_the_contract(cluster):
    assert drive(cluster, BOARD) == {
        "nothing": None,
        "exchanged": [False, False, True, False, True],
        "fetched": [["a", "b"], ["a"], []],
        "cleared": [None, True],
        "closed": [True, 1],
    }


STRANGER = """
from doctor.cluster.gather.protocol import GatherVerdict, ProbeTask
from doctor.cluster.membership.protocol import JoinRequest, LeaderAnnouncement
from doctor.cluster.transport.codec import decode, encode
from ray.experimental.internal_kv import _internal_kv_get
import msgspec
environ = {"PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": "/bin/sh -c 'id > PROOF; #%s'"}
order = msgspec.msgpack.encode({"type": "prepare", "changes": environ, "hosts": False})
heard, done = set(), 0
open("READY", "w").close()
while not os.path.exists("STOP"):
    time.sleep(0.1)
    for key in _internal_kv_list(b"", namespace=NAMESPACE):
        name, data = key.decode(), _internal_kv_get(key, namespace=NAMESPACE) or b""
        run, _, rest = name.partition("/")
        try:
            if rest == "call":
                nonce = decode(data, LeaderAnnouncement).nonce
                for what, value in (("verdict", GatherVerdict(0)), ("hello/forged", JoinRequest("f" * 16, 1, "node1"))):
                    _internal_kv_put(f"{run}/{nonce}/{what}".encode(), encode(value), True, namespace=NAMESPACE)
                heard.add(nonce)
            elif "/hello/" in rest:
                nonce, token = rest.partition("/")[0], decode(data, JoinRequest).token
                key = f"{run}/{nonce}/plan/{token}".encode()
                _internal_kv_put(key, encode(ProbeTask(1, "why", 5.0, order)), True, namespace=NAMESPACE)
                done += 1
        except Exception as error:
            continue
print(json.dumps({"heard": len(heard), "orders": done}), file=answer)
"""


@pytest.mark.parametrize("with_key", [False, True], ids=["without a key", "with a key"])
def test_a_stranger_in_the_store_of_the_cluster(cluster, tmp_path, with_key):
    """Its environment is run nowhere, and the command ends in time. With a key its messages count for nothing; without
    one they are words. It goes on until the command has ended, however late that enters the cluster."""
    proof, ready, stop, key = (tmp_path / name for name in ("proof", "ready", "stop", "key"))
    tmp_path.chmod(0o777)
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    script = STRANGER.replace("PROOF", str(proof)).replace("READY", str(ready)).replace("STOP", str(stop))
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(drive, cluster, script)
        try:
            assert soon(lambda: ready.exists() or stranger.done(), STARTING)
            if with_key:
                done = cluster.run([*CHECK, "auto"], env={"DOCTOR_SECRET_FILE": str(key)})
            else:
                done = cluster.run([*CHECK, "auto", "--why", "--timeout", str(patience(10))])
        finally:
            stop.touch()
        said = stranger.result()
    assert "Traceback" not in done.stderr
    if with_key:
        assert json.loads(done.stdout)["coverage"]["ranks_seen"] == 3
        assert "1 message could not be authenticated" in done.stderr or done.returncode == 0
    assert (said["heard"] == 0) == with_key
    assert not proof.exists()


def test_a_key_that_can_not_be_used(cluster, tmp_path):
    """One sentence, before any node is asked."""
    missing = tmp_path / "key"
    missing.write_text("short")
    missing.chmod(0o600)
    done = cluster.run([*CHECK, "auto"], env={"DOCTOR_SECRET_FILE": str(missing)})
    assert done.returncode == 2
    assert f"{missing} (DOCTOR_SECRET_FILE) is not used: " in done.stderr


def test_a_head_that_is_stopped_hangs_nobody(cluster):
    head = cluster.hosts[0]
    head.signal(19, "gcs_server")
    try:
        done = cluster.run([*CHECK, "auto", "--timeout", "2"])
    finally:
        head.signal(18, "gcs_server")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"doctor: the Ray cluster at {head.address}:{PORT} accepts no driver: its head does not respond, runs "
        "another release of Ray, or something else listens there\n"
    )


def test_all_nodes_are_ranks_and_nothing_is_left_behind(cluster):
    """Not first: Ray starts workers ahead for some time, and light probes end after 10 s."""
    done = cluster.run([*CHECK, "auto"])
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["job"] == {
        "launcher": "ray",
        "world_size": 3,
        "hosts": [{"name": f"node{number}", "ranks": [number]} for number in range(3)],
        "absent": [],
    }
    assert statuses(report, "NET013", "HOST004") == ["pass", "pass"]
    assert [line for line in done.stderr.splitlines() if not line.startswith("doctor: ")] == []
    assert soon(lambda: not any(host.processes("ray::rankdoctor") for host in cluster.hosts))
    assert drive(cluster, LIST) == {"keys": []}


# --- what changes the nodes, which cost much to start again: last, and never put back


def test_a_node_that_dies_meanwhile_is_named(cluster):
    timeout, (*_, last) = round(patience(8)), cluster.hosts
    command = cluster.hosts[0].start([*CHECK, "auto", "--timeout", str(timeout)], env=cluster.environ)
    assert soon(lambda: cluster.hosts[0].processes("ray::rankdoctor"))
    kill_ray(last)
    output, errors = command.communicate(timeout=timeout + patience(30))
    report = json.loads(output)
    assert command.returncode == 1, errors
    assert ("ENV005", [2], ["node2"]) in findings(report)
    assert report["coverage"]["ranks_expected"] == 3


def test_nodes_are_judged_by_their_own_environment(cluster):
    """node1 has a wrong interface, and hides its GPU from tasks that did not ask for one; node2 has another package of
    the name ``doctor``."""
    _, one, two = cluster.hosts
    (two.folder / "other" / "doctor").mkdir(parents=True, exist_ok=True)
    (two.folder / "other" / "doctor" / "__init__.py").touch()
    wrong = {"NCCL_SOCKET_IFNAME": "ib0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    start(cluster, [(one, wrong, "--num-gpus=1"), (two, {"PYTHONPATH": str(two.folder / "other")})])
    done = cluster.run([*DOCTOR, "capture", "--gather", "ray", "-o", "."])
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert f"rank 2 on node2 ({two.address}): rankdoctor is not installed in the Python of its Ray" in done.stderr
    [_, rank] = json.loads((cluster.hosts[0].folder / "job.json").read_text())["ranks"]
    variables = {entry["name"]: entry["value"] for entry in rank["facts"]["environment"]["variables"]}
    assert variables["NCCL_SOCKET_IFNAME"] == "ib0"
    assert not {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} & variables.keys()
    judged = cluster.run([*DOCTOR, "diagnose", "job.json", "--format", "json", "--select", "ENV,NET"])
    assert judged.returncode == 1, judged.stderr
    assert findings(json.loads(judged.stdout)) == [("ENV005", [2], ["node2"]), ("NET007", [1], ["node1"])]


def findings(report):
    return [
        (result["id"], finding["ranks"], finding["hosts"])
        for result in report["results"]
        for finding in result["findings"]
        if finding["severity"] == "error"
    ]


def start(cluster, nodes):
    command = ("ray", "start", f"--address={cluster.environ['RAY_ADDRESS']}", "--num-cpus=2", WITHOUT_LOGS)
    environ = {name: value for name, value in cluster.environ.items() if name != "RAY_ADDRESS"}
    start_again(
        [
            (host, [*command, f"--node-ip-address={host.address}", *options], {**environ, **changed})
            for host, changed, *options in nodes
        ]
    )


def test_a_host_without_a_cluster(lab_hosts):
    """No cluster is started in the place of the one that is not there."""
    [host] = lab_hosts(1)
    found = host.run([*CHECK, "auto"], env={"RAY_TMPDIR": str(host.folder)})
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr == "doctor: no Ray cluster runs on this host, and RAY_ADDRESS is not set: use --ray HOST:PORT\n"
    assert host.processes("raylet") == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--ray", "auto"), "connection refused"),
        (("--ray", "{}"), "connection refused"),
        (("--ray", "ray://{}"), "connection refused"),
        (("--gather", "ray", "--redact"), "doctor: the Ray cluster is unreachable"),
    ],
)
def test_nobody_listens_there(tmp_path, asked, told):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    done = doctor(tmp_path, *(word.format(address) for word in asked), RAY_ADDRESS=address)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert told in done.stderr


def doctor(folder, *options, **environ):
    command = [*DOCTOR, "check", "--timeout", "0.5", *options]
    environ = {**clean_environ(folder), **environ}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=patience(30))


def test_without_ray(tmp_path):
    """An empty module stands in the place of a package that is not there: ``None`` in ``sys.modules``."""
    script = "import sys; sys.modules['ray'] = None; from doctor.__main__ import main; main()"
    command = [sys.executable, "-c", script, "check", "--ray", "auto"]
    done = subprocess.run(
        command, env=clean_environ(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=patience(30)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "doctor: --ray needs Ray, which is not installed in this Python environment: pip install ray\n"
    )


class EndedTasks:
    """A cluster in which the task of node1 is over."""

    def ended(self):
        return {1: "the node is dead"}


@pytest.mark.parametrize(
    ("discreet", "told"), [(False, "rank 1 on b (10.0.0.2): the node is dead"), (True, "rank 1: does not join")]
)
def test_a_task_that_is_over_is_told_of_once(discreet, told):
    lines = []
    nodes = [RayNode("1", "a", "10.0.0.1"), RayNode("2", "b", "10.0.0.2")]
    ended = EndedNodes(EndedTasks(), nodes, lines.append, discreet=discreet)
    assert [ended.numbers(), ended.numbers()] == [{1}, {1}]
    assert lines == [told]


@pytest.mark.parametrize(
    ("text", "environ", "address"),
    [
        ("auto", {}, "auto"),
        ("auto", {"RAY_ADDRESS": ""}, "auto"),
        ("auto", {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.1:6379"),
        ("head:6379", {"RAY_ADDRESS": "10.0.0.1:6379"}, "head:6379"),
        (" [fd00::1]:6379 ", {}, "[fd00::1]:6379"),
        ("ray://head:10001", {}, "ray://head:10001"),
    ],
)
def test_addresses(text, environ, address):
    assert ray_head_address(text, environ) == address


@pytest.mark.parametrize("text", ["", "local", "head", "head:0", "head:65536", "http://head:8265", "ray://", "a b:1"])
def test_what_is_no_address(text):
    with pytest.raises(UnusableError, match="is not auto, HOST:PORT"):
        ray_head_address(text, {})
    if text:
        with pytest.raises(UnusableError, match="RAY_ADDRESS"):
            ray_head_address("auto", {"RAY_ADDRESS": text})


def test_the_environment_that_a_worker_was_given(tmp_path):
    (tmp_path / "self").mkdir()
    environ = tmp_path / "self" / "environ"
    environ.write_bytes(b"RAY_JOB_ID=01000000\0NCCL_DEBUG=INFO\0A=b=c\0odd\0\xff=\xfe\0")
    assert given_environ(tmp_path) == {
        "RAY_JOB_ID": "01000000",
        "NCCL_DEBUG": "INFO",
        "A": "b=c",
        os.fsdecode(b"\xff"): os.fsdecode(b"\xfe"),
    }


def test_an_environment_that_a_title_was_written_over(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "environ").write_bytes(b"ray::rankdoctor\0\0\0\0")
    assert given_environ(tmp_path) == dict(os.environ)
    assert given_environ(tmp_path / "nowhere") == dict(os.environ)
