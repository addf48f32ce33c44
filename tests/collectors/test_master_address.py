"""MASTER_ADDR and MASTER_PORT with real sockets, real processes and real network namespaces."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from doctor.collectors.base import Machine, NotPresent
from doctor.collectors.network.listeners import decode_address, listener_on, listening
from doctor.collectors.network.master_address import belongs_here, collect_master, own_addresses, resolve
from doctor.core.facts import MasterFacts
from tests.lab.speed import patience

LISTEN = "import socket, sys, time; s = socket.socket(); s.bind(('', 0)); s.listen(); "
LISTEN += "print(s.getsockname()[1], flush=True); time.sleep(600)"


def master(address: str, port: object = 29500, **roots: Path) -> MasterFacts:
    return collect_master(Machine(environ={"MASTER_ADDR": address, "MASTER_PORT": str(port)}, **roots))


@pytest.fixture
def own_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_no_master() -> None:
    with pytest.raises(NotPresent):
        collect_master(Machine(environ={"MASTER_PORT": "29500"}))


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_loopback_is_local(address: str) -> None:
    facts = master(address)
    assert facts.is_local
    assert (facts.interface, facts.error) == ("lo", None)
    assert facts.source_address in ("127.0.0.1", "::1")


def test_addresses_of_this_host() -> None:
    own = own_addresses()
    assert own["127.0.0.1"] == "lo"
    assert all(belongs_here(address, own) for address in own)
    assert belongs_here("::ffff:127.0.0.1", own)
    assert belongs_here("0.0.0.0", own)
    assert not belongs_here("192.0.2.77", own)
    assert not belongs_here("rubbish", own)


@pytest.mark.parametrize(
    ("address", "words"),
    [("", "empty"), ("  ", "empty"), ("a\0b", "not a valid name"), ("a" * 70, "label"), ("x" * 10_000, ""), ("..", "")],
)
def test_names_that_are_none(address: str, words: str) -> None:
    facts = master(address)
    assert facts.error is not None
    assert words in facts.error
    assert (facts.is_local, facts.resolved, facts.listener) == (None, (), None)
    msgspec.msgpack.encode(facts)


def test_a_silent_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = threading.Event()

    def ask(*_: object, flags: int = 0, **__: object) -> list[object]:
        if not flags & socket.AI_NUMERICHOST:
            silence.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    resolved, error, seconds = resolve("node0", limit=0.2)
    silence.set()
    assert (resolved, error, seconds) == ((), "no answer within 0.2 s", 0.2)


ISOLATED = """
import json, sys
from doctor.collectors.base import Machine
from doctor.collectors.network.master_address import collect_master
import msgspec
found = [collect_master(Machine(environ={"MASTER_ADDR": name, "MASTER_PORT": "1"})) for name in sys.argv[1:]]
json.dump(msgspec.to_builtins(found), sys.stdout)
"""


def in_an_empty_network(*names: str) -> list[dict]:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("network namespaces can't be made here: needs root")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = ["unshare", "--net", sys.executable, "-c", ISOLATED, *names]
    return json.loads(
        subprocess.run(command, capture_output=True, env=environ, timeout=patience(60), check=True).stdout
    )


def test_no_route_and_no_name() -> None:
    unknown, far = in_an_empty_network("node0.invalid", "192.0.2.1")
    assert unknown["error"]
    assert unknown.get("resolved", []) == []
    assert far["resolved"] == ["192.0.2.1"]
    assert far["is_local"] is False
    assert far.get("interface") is None
    assert "unreachable" in far["hidden"][0]["reason"]


def test_this_process_listens(own_port: int) -> None:
    listener = master("localhost", own_port).listener
    assert listener is not None
    assert (listener.pid, listener.is_ancestor, listener.address) == (os.getpid(), True, "127.0.0.1")
    assert listener.command


def test_nobody_listens(own_port: int) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        free = server.getsockname()[1]
        assert master("localhost", free).listener is None
    assert master("localhost", "0").listener is None
    assert master("localhost", "70000").listener is None
    assert master("localhost", "port").port is None


def test_a_listener_on_another_address_and_family() -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind(("::1", 0))
        server.listen()
        listener = master("127.0.0.1", server.getsockname()[1]).listener
    assert listener is not None
    assert (listener.address, listener.is_ancestor) == ("::1", True)


def test_a_child_of_this_process_is_no_stranger() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None
            listener = master("localhost", int(rank.stdout.readline())).listener
        finally:
            rank.kill()
    assert listener is not None
    assert (listener.pid, listener.is_ancestor, listener.same_launcher) == (rank.pid, False, True)


def test_a_stranger() -> None:
    """A process that a shell left behind, with a secret in its command line."""
    script = f'"{sys.executable}" -c "{LISTEN}" --hf-token hunter2 & echo $!'
    shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert shell.stdout is not None
    pid, port = sorted((int(shell.stdout.readline()), int(shell.stdout.readline())), key=lambda n: not is_running(n))
    try:
        shell.wait(10)
        listener = master("localhost", port).listener
        assert listener is not None
        assert (listener.pid, listener.address) == (pid, "0.0.0.0")
        assert not listener.is_ancestor
        assert not listener.same_launcher
        assert listener.command is not None
        assert "--hf-token <redacted>" in listener.command
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shell.stdout.close()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "--hf-token" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def table(*rows: tuple[str, int, str, int]) -> str:
    return HEADER + "".join(
        f" 0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 0 100\n"
        for address, port, state, inode in rows
    )


def processes(proc: Path, *parents: tuple[object, int, str, int]) -> None:
    for folder, pid, name, parent in parents:
        (proc / str(folder)).mkdir()
        (proc / str(folder) / "status").write_text(f"Name:\t{name}\nPid:\t{pid}\nPPid:\t{parent}\n")


def native(address: str) -> str:
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "0.0.0.0", "::", "::1", "fd00::2"])
def test_addresses_of_the_kernels_tables(address: str) -> None:
    assert str(decode_address(native(address))) == address


def test_a_listener_that_may_not_be_seen(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    rows = [
        (native("127.0.0.1"), 29500, "01", 5),
        (native("10.0.0.1"), 29500, "0A", 6),
        (native("0.0.0.0"), 29500, "0A", 7),
    ]
    (tmp_path / "net" / "tcp").write_text(table(*rows))
    facts = master("localhost", 29500, proc=tmp_path)
    assert facts.listener is not None
    assert (facts.listener.address, facts.listener.pid) == ("0.0.0.0", None)
    note = facts.why_hidden("listener")
    assert note is not None
    assert "29500" in note.unhide


def test_no_table_is_no_silence(tmp_path: Path) -> None:
    facts = master("localhost", 29500, proc=tmp_path)
    assert facts.listener is None
    assert facts.why_hidden("listener") is not None


@pytest.mark.parametrize(
    ("parent", "same"), [("slurmstepd", True), ("pt_elastic", True), ("bash", False), ("jupyter-lab", False)]
)
def test_the_nearest_common_parent_decides(tmp_path: Path, parent: str, same: bool) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(table((native("0.0.0.0"), 29500, "0A", 77)))
    processes(tmp_path, ("self", 30, "python", 20), (30, 30, "python", 20), (20, 20, "sh", 10), (10, 10, parent, 1))
    processes(tmp_path, (1, 1, "python", 0), (40, 40, "python", 10))
    (tmp_path / "40" / "fd").mkdir()
    (tmp_path / "40" / "fd" / "3").symlink_to("socket:[77]")
    listener = listener_on(tmp_path, 29500)
    assert listener is not None
    assert (listener.pid, listener.process, listener.is_ancestor) == (40, "python", False)
    assert listener.same_launcher is same


def test_rubbish_in_the_tables(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    rubbish = b"\xff\xfe" + HEADER.encode() + b"x\n 0: zz:733C 0 0A 0 0 0 0 0 1\n 0: 00:733C 0 0A 0 0 0 0 0 1\n 0: 0\n"
    (tmp_path / "net" / "tcp").write_bytes(rubbish)
    assert listening(tmp_path, 29500) == []


def test_a_search_without_time_finds_nobody(own_port: int) -> None:
    """A host with very many processes: the owner stays unknown, and who listens does not."""
    seen = listener_on(Path("/proc"), own_port, seconds=-1)
    assert seen is not None
    assert seen.pid in (None, os.getpid())
