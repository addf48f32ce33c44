"""From a process group to the address of its store, and no further."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from doctor.monitor.watchdog.store_discovery import StoreAddress, derived_run_id, find_store, open_connections
from tests.lab.ports import free_port
from tests.lab.speed import NEVER, patience
from tests.watchdog.ranks import fork, wait_for


def in_a_child(work):
    """The process group is a child's own."""
    assert wait_for(fork(work), time.monotonic() + patience(30)) == 0


def opens(make, expected):
    """A script: a process group with the store that ``make`` gives, and what is found of it."""

    def work():
        import torch.distributed as dist

        store = make(dist)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert find_store() == expected(store), find_store()

    return work


def test_the_store_below_all_prefixes():
    pytest.importorskip("torch.distributed")
    port = free_port()

    def make(dist):
        store = dist.TCPStore("localhost", port, 1, is_master=True)
        return dist.PrefixStore("job", dist.PrefixStore("attempt_0", store))

    in_a_child(opens(make, lambda store: StoreAddress("localhost", port)))


@pytest.mark.parametrize("kind", ["HashStore", "FileStore"])
def test_stores_that_are_not_used(kind, tmp_path):
    pytest.importorskip("torch.distributed")
    arguments = () if kind == "HashStore" else (str(tmp_path / "store"), 1)
    in_a_child(opens(lambda dist: getattr(dist, kind)(*arguments), lambda store: None))


def test_no_group_no_store():
    pytest.importorskip("torch.distributed")
    assert find_store() is None


def test_the_store_of_torchrun_before_there_is_a_group(monkeypatch):
    pytest.importorskip("torch.distributed")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert find_store() is None  # that of rank 0, which may not be there yet
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert find_store() == StoreAddress("node0", 29500)


def test_torch_is_not_imported():
    code = "import sys; import doctor.monitor.watchdog.watchdog as s; s.find_store(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("listens", [True, False])
def test_a_store_that_cannot_be_joined_leaves_the_folder(tmp_path, listens, monkeypatch):
    """Nobody listens; or somebody does who says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        store, folder = open_connections(StoreAddress("127.0.0.1", silent.getsockname()[1]), tmp_path, 0, "abc")
        began = time.monotonic()
        while (waited := time.monotonic() - began) < patience(10):
            store.step(time.monotonic())
            folder.step(time.monotonic())
            if waited > 1.0 and folder.is_alive and store.is_opening == listens:
                break
            time.sleep(0.02)
        assert (store.is_alive, store.is_opening) == (False, listens)
        assert folder.is_alive


def test_what_all_ranks_derive():
    """The same on all ranks, though Lightning starts the first one otherwise; another one in another run."""
    first = {"MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    other = {**first, "RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_ADDR": "here"}
    run = derived_run_id(None, 0, first)
    assert derived_run_id(None, 0, other) == run
    others = [
        derived_run_id(None, 1, first),
        derived_run_id(None, 0, {**first, "MASTER_PORT": "29501"}),
        derived_run_id(None, 0, {**first, "SLURM_JOB_ID": "7"}),
        derived_run_id(None, 0, {**first, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}),
        derived_run_id(None, 0, {**first, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}),
        derived_run_id(StoreAddress("there", 1), 0, first),
    ]
    assert len({run, *others}) == 7
    assert derived_run_id(StoreAddress("a", 1), 0, first) == derived_run_id(StoreAddress("b", 1), 0, first), (
        "a host has many names"
    )


def test_a_store_that_has_ended_is_not_asked(capfd):
    """torch would write a warning and a stack of C++ to stderr at each call."""
    pytest.importorskip("torch.distributed")
    port = free_port()

    def host():
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        time.sleep(NEVER)
        del store

    server = fork(host)
    try:
        line, _ = open_connections(StoreAddress("127.0.0.1", port), Path("/nowhere"), 0, "run")
        until = time.monotonic() + patience(30)
        while not line.is_alive and time.monotonic() < until:
            line._due = 0.0
            line._tries = 0
            line.step(time.monotonic())
            time.sleep(0.02)
        line.set("name", b"value")
        assert line.get("name") == b"value"
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    capfd.readouterr()
    assert line.get("name") is None
    assert not line.is_alive
    line.close()
    assert capfd.readouterr().err == ""
