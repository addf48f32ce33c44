"""Directories and locks: real folders, real locks, a real file system that never answers."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from doctor.collectors.base import Machine
from doctor.collectors.storage.bounded_scan import DirectoryQuery, scan_directories
from doctor.collectors.storage.directories import collect_storage, read_storage
from doctor.collectors.storage.directory_scan import LOCKS, scan_directory
from doctor.collectors.storage.mounts import Mount, mount_of, read_mounts, resolve
from doctor.core.facts import Directory, StorageFacts
from tests.collectors.namespaces import run_in_namespaces
from tests.collectors.recorded import machine_at, put_parent

REMOTE = (Mount("/", "ext4"), Mount("/remote", "nfs4"))


def here(environ: dict[str, str], *directories: tuple[str, str]) -> Machine:
    return Machine(environ=environ, directories=directories)


def by_role(facts: StorageFacts, role: str) -> list[Directory]:
    return [directory for directory in facts.directories if directory.role == role]


def test_named_directories(tmp_path):
    (tmp_path / "fr").mkdir()
    environ = {
        "TMPDIR": str(tmp_path),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/fr/rank_",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/gone/rank_",
        "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.log",
    }
    facts = collect_storage(here(environ, ("checkpoint", f"{tmp_path}/runs")))
    assert [(one.role, one.path, one.source, one.exists) for one in facts.directories] == [
        ("flight-recorder", f"{tmp_path}/gone", "TORCH_FR_DUMP_TEMP_FILE", False),
        ("flight-recorder", f"{tmp_path}/fr", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", True),
        ("nccl-debug", str(tmp_path), "NCCL_DEBUG_FILE", True),
        ("temporary", str(tmp_path), "TMPDIR", True),
        ("checkpoint", f"{tmp_path}/runs", "settings", False),
    ]
    temporary = by_role(facts, "temporary")[0]
    assert (temporary.writable, temporary.error) == (True, None)
    assert 0 < temporary.free <= temporary.total
    missing = by_role(facts, "checkpoint")[0]
    assert missing.writable
    assert missing.total == temporary.total, "sizes and permission are those of the place where it would be made"
    assert os.listdir(tmp_path) == ["fr"], "nothing was written"


def test_default_is_the_temporary_directory_alone():
    facts = collect_storage(here({}))
    assert [(one.role, one.path, one.source) for one in facts.directories] == [("temporary", "/tmp", "")]


def test_standard_streams_are_no_debug_file(tmp_path):
    facts = collect_storage(here({"TMPDIR": str(tmp_path), "NCCL_DEBUG_FILE": "/dev/stdout"}))
    assert by_role(facts, "nccl-debug") == []


def test_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "runs").write_text("")
    facts = collect_storage(here({"TMPDIR": str(tmp_path)}, ("checkpoint", f"{tmp_path}/runs")))
    directory = by_role(facts, "checkpoint")[0]
    assert (directory.exists, directory.error) == (False, "not a directory")


PERMISSIONS = """
import os, sys
from doctor.collectors.storage.directory_scan import scan_directory
os.setgid(65534); os.setuid(65534)
print([scan_directory(path).get("writable") for path in sys.argv[1:]], scan_directory(sys.argv[2] + "/inside"))
"""


def test_permissions_are_those_of_this_user(tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    top = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        for name, mode in (("open", 0o777), ("closed", 0o700)):
            (top / name).mkdir()
            (top / name).chmod(mode)
        top.chmod(0o755)
        command = [sys.executable, "-c", PERMISSIONS, str(top / "open"), str(top / "closed")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    finally:
        for path in (top / "open", top / "closed", top):
            path.rmdir()
    assert done.stdout.startswith("[True, False] {'exists': None,")
    assert "Permission denied" in done.stdout


def caches(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}


def test_caches_are_told_only_where_they_exist(tmp_path):
    assert by_role(collect_storage(here(caches(tmp_path))), "cache") == []
    (tmp_path / ".triton/cache").mkdir(parents=True)
    named = {**caches(tmp_path), "HF_HOME": f"{tmp_path}/hub"}
    (tmp_path / "hub").mkdir()
    found = [(one.path, one.source) for one in by_role(collect_storage(here(named)), "cache")]
    assert found == [(f"{tmp_path}/.triton/cache", ""), (f"{tmp_path}/hub", "HF_HOME")]


def test_caches_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    named = {**caches(tmp_path), "TRITON_CACHE_DIR": f"{tmp_path}/later", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/file"}
    found = by_role(collect_storage(here({**named, "XDG_CACHE_HOME": f"{tmp_path}/file"})), "cache")
    assert {(one.path, one.exists, one.error) for one in found} == {
        (f"{tmp_path}/later", False, None),
        *((f"{tmp_path}/file{name}", False, "not a directory") for name in ("", "/torch_extensions", "/huggingface")),
    }


NOEXEC = """
from doctor.collectors.storage.directory_scan import scan_directory
print(scan_directory("/run")["noexec"], scan_directory("/")["noexec"])
"""


def test_mount_that_loads_no_libraries():
    assert run_in_namespaces("mount -t tmpfs -o noexec none /run", NOEXEC).split() == ["True", "False"]


def test_locks_and_who_holds_them(tmp_path):
    stale = put_parent(tmp_path / ".cache/torch_extensions/py311_cu128/fused_adam/lock")
    stale.write_text("")
    os.utime(stale, (1_700_000_000, 1_700_000_000))
    live = put_parent(tmp_path / ".cache/torch_extensions/py311_cu128/rotary/lock")
    baton = os.open(live, os.O_CREAT | os.O_EXCL)
    advisory = put_parent(tmp_path / ".cache/huggingface/hub/.locks/model/abc.lock")
    put_parent(tmp_path / ".triton/cache/K7/kernel.lock").write_text("")
    with advisory.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        facts = collect_storage(here(caches(tmp_path)))
    os.close(baton)
    locks = {Path(lock.path).parent.name: lock for lock in facts.locks}
    assert {name: (lock.kind, lock.blocking, lock.held) for name, lock in locks.items()} == {
        "fused_adam": ("torch-extension", True, False),
        "rotary": ("torch-extension", True, True),
        "model": ("hub", False, True),
        "K7": ("triton", False, False),
    }
    assert locks["fused_adam"].age > 1e6
    assert locks["rotary"].age < 1e5


def test_lock_held_only_by_flock_of_another_process(tmp_path):
    """The table of locks names it, even where the holder's files cannot be seen."""
    lock = put_parent(tmp_path / "home/.triton/cache/K/x.lock")
    lock.write_text("")
    state = lock.stat()
    row = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    machine = replace(machine_at(tmp_path, caches(tmp_path / "home")))
    put_parent(tmp_path / "proc/self/mountinfo").write_text("1 0 0:1 / / rw - ext4 /dev/x rw\n")
    (tmp_path / "proc/locks").write_text(f"1: FLOCK  ADVISORY  WRITE 4242 {row} 0 EOF\n")
    assert [one.held for one in read_storage(machine).locks] == [True]
    (tmp_path / "proc/locks").write_text(f"1: -> FLOCK  ADVISORY  WRITE 4242 {row} 0 EOF\n")
    assert [one.held for one in read_storage(machine).locks] == [False]


def test_holders_on_other_hosts_are_out_of_sight(tmp_path):
    lock = put_parent(tmp_path / "home/.cache/torch_extensions/py311_cpu/x/lock")
    lock.write_text("")
    put_parent(tmp_path / "proc/self/mountinfo").write_text("1 0 0:1 / / rw - nfs4 server:/home rw\n")
    facts = read_storage(machine_at(tmp_path, caches(tmp_path / "home")))
    assert [(one.held, one.blocking) for one in facts.locks] == [(None, True)]
    assert {one.shared for one in facts.directories} == {True}


def test_scan_for_locks_is_bounded(tmp_path):
    for number in range(LOCKS + 20):
        (tmp_path / f"{number}.lock").write_text("")
    deep = tmp_path / "a/b/c/d/e/f"
    deep.mkdir(parents=True)
    (deep / "lock").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = scan_directory(str(tmp_path), locks_at=time.time())["locks"]
    assert len(found) == LOCKS
    assert str(deep / "lock") not in {one["path"] for one in found}


SILENT = (sys.executable, "-S", "-c", "import time; time.sleep(60)")


def test_child_that_does_not_answer_is_given_up():
    wishes = [DirectoryQuery("/remote/a"), DirectoryQuery("/"), DirectoryQuery("/remote/b")]
    first, second, third = scan_directories(wishes, REMOTE, SILENT, limit=0.3)
    assert first.record == third.record == {"error": "no answer within 0.3 s"}
    assert (first.mount.kind, first.mount.shared) == ("nfs4", True)
    assert second.record["exists"] is True


@pytest.mark.parametrize(
    ("program", "error"),
    [("raise SystemExit(3)", "ended with code 3"), ("print('oops')", "ended with code 0"), ("print([1])", "no answer")],
)
def test_child_that_breaks(program, error):
    seen = scan_directories([DirectoryQuery("/remote/a")], REMOTE, (sys.executable, "-S", "-c", program))
    assert error in seen[0].record["error"]


def test_child_sees_the_same(tmp_path):
    """The script that the child runs gives what the function gives."""
    (tmp_path / "x.lock").write_text("")
    mounts = (Mount("/", "nfs"),)
    remote = scan_directories([DirectoryQuery(str(tmp_path), scan=True)], mounts)[0].record
    local = scan_directory(str(tmp_path), locks_at=time.time())
    assert (remote["exists"], remote["writable"], remote["total"]) == (True, True, local["total"])
    assert remote["locks"][0]["inode"] == local["locks"][0]["inode"]


HANGING = """
import ctypes, json, os, msgspec
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"silent", b"/mnt", b"fuse", 0, options) != 0:
    print(json.dumps(None)); raise SystemExit
from doctor.collectors.base import Machine
from doctor.collectors.storage.directories import read_storage
os.symlink("/mnt/inside", "/run/data")
places = (("checkpoint", "/mnt/runs"), ("checkpoint", "/run/data/runs"))
facts = read_storage(Machine(environ={"TMPDIR": "/run"}, directories=places), limit=1.0)
print(json.dumps(msgspec.to_builtins(facts.directories)))
"""


def test_real_file_system_that_never_answers():
    """A FUSE mount whose daemon reads no request; the way in over a symbolic link is noticed too."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse")
    found = json.loads(run_in_namespaces("mount -t tmpfs none /run", HANGING))
    if found is None:
        pytest.skip("needs the right to mount FUSE")
    temporary, direct, linked = found
    assert (temporary["exists"], temporary["filesystem"]) == (True, "tmpfs")
    for one in (direct, linked):
        assert (one["error"], one["filesystem"]) == ("no answer within 1 s", "fuse")
        assert "exists" not in one


def test_mount_of_a_path():
    mounts = (Mount("/", "ext4"), Mount("/data", "xfs"), Mount("/data", "lustre"), Mount("/data2", "nfs"))
    assert mount_of("/data/x", mounts).kind == "lustre"
    assert mount_of("/data2", mounts).kind == "nfs"
    assert mount_of("/database", mounts).kind == "ext4"
    assert mount_of("/x", ()) is None


def test_resolve_follows_links_and_survives_loops(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "up").symlink_to("../" + tmp_path.name + "/real")
    (tmp_path / "real").mkdir()
    local = (Mount("/", "ext4"),)
    assert resolve(f"{tmp_path}/up/x", local)[0] == f"{tmp_path}/real/x"
    assert resolve(f"{tmp_path}/loop/x", local)[1].kind == "ext4"


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("ext4", False), ("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("fuse.juicefs", True), ("fuse.x", None)],
)
def test_shared_by_kind(kind, shared):
    assert Mount("/", kind).shared is shared


@pytest.mark.parametrize("garbage", ["", "\x00", "a - b", "1 2 3 4 5 6 - nfs", " - - - "])
def test_garbage_in_the_table_of_mounts(tmp_path, garbage):
    put_parent(tmp_path / "proc/self/mountinfo").write_text(garbage)
    facts = read_storage(machine_at(tmp_path, {"TMPDIR": str(tmp_path)}))
    assert [(one.exists, one.shared) for one in facts.directories] == [(True, None)]


def test_spaces_in_mount_points(tmp_path):
    put_parent(tmp_path / "proc/self/mountinfo").write_text("1 0 0:1 / /my\\040data rw shared:1 - nfs4 a:/b\\134 rw\n")
    assert read_mounts(machine_at(tmp_path)) == (Mount("/my data", "nfs4", "/", "rw", "a:/b\\"),)
