"""The lab is what it claims to be: its hosts differ, hear each other, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.lab.hosts import LabHost, hosts, together
from tests.lab.needs import ROOT, CannotPlay, require_namespaces, require_tools
from tests.lab.speed import patience

MakeHosts = Callable[..., tuple[LabHost, ...]]

IDENTITY = """
cat /etc/machine-id /proc/sys/kernel/random/boot_id /etc/hostname
for space in net uts ipc mnt pid; do readlink /proc/self/ns/$space; done
ip -brief address show eth0
"""
LINGER = """
setsid sleep 600 &
setsid bash -c 'kill -STOP $$; sleep 600' &
echo started; echo failing >&2
kill -STOP $$
"""
"""A run that no signal to its process or its group would end."""

OPEN_LAB = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.lab.hosts import hosts
def spaces(pid, *kinds):
    return [os.readlink(f"/proc/{{pid}}/ns/{{kind}}") for kind in kinds]
with hosts(2) as (first, second):
    first.start(["bash", "-c", "setsid sleep 600 & kill -STOP $$"])
    while len(first.processes()) < 2:
        time.sleep(0.01)
    print(first.folder.parent, *spaces(first.pid, "net", "mnt", "pid"), *spaces(first.switch.pid, "net"), flush=True)
    if sys.argv[1] == "error":
        raise RuntimeError
    if sys.argv[1] == "wait":
        time.sleep(600)
"""


def test_hosts_have_names_addresses_and_identities_of_their_own(lab_hosts: MakeHosts) -> None:
    lab = lab_hosts(3, names="gpu-{}")
    assert [host.name for host in lab] == ["gpu-0", "gpu-1", "gpu-2"]
    assert [host.run(["hostname"]).stdout for host in lab] == ["gpu-0\n", "gpu-1\n", "gpu-2\n"]
    identities = [host.sh(IDENTITY).stdout.splitlines() for host in lab]
    for values in zip(*identities, strict=True):
        assert len(set(values)) == 3, values
    for host, identity in zip(lab, identities, strict=True):
        assert f"{host.address}/24" in identity[-1]


def test_hosts_have_proc_sys_and_shm_of_their_own(lab_hosts: MakeHosts) -> None:
    first, second = lab_hosts(2)
    with first.serving(["bash", "-c", "echo up; read -r _ < <(sleep 60)"]):
        assert "sleep 60" in first.sh("ps -e -o args").stdout
        assert "sleep 60" not in second.sh("ps -e -o args").stdout
    assert first.sh("ls /sys/class/net").stdout.split() == ["eth0", "lo"]
    assert first.sh("ls /sys/fs/cgroup").stdout.split() == sorted(os.listdir("/sys/fs/cgroup"))
    first.sh("touch /dev/shm/mine ~/shared")
    assert second.sh("ls /dev/shm; stat --format %n ~/../node0/shared; df --output=size /dev/shm").stdout.split() == [
        f"{second.folder}/../node0/shared",
        "1K-blocks",
        str(2**20),
    ]


def test_hosts_reach_each_other_by_name_and_nobody_else(lab_hosts: MakeHosts) -> None:
    lab = lab_hosts(3)
    for host in lab:
        for peer in lab:
            host.sh(f"ping -c 1 -W 2 {peer.name}")
    assert lab[0].sh("ip route").stdout.startswith("10.20.0.0/24 dev eth0")
    assert "default" not in lab[0].sh("ip route").stdout


def test_unknown_names_fail_at_once(lab_hosts: MakeHosts) -> None:
    (host,) = lab_hosts(1)
    assert host.run(["getent", "hosts", "nowhere.example"]).returncode == 2


def test_commands_start_from_a_clean_environment(lab_hosts: MakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (host,) = lab_hosts(1)
    environ = dict(line.split("=", 1) for line in host.run(["env"], env={"RANK": "1"}).stdout.splitlines())
    assert environ.keys() - {"LAB_RUN"} == {"PATH", "HOME", "LANG", "PYTHONPATH", "RANK"}
    assert environ["HOME"] == str(host.folder) == host.sh("pwd").stdout.strip()
    assert host.run([sys.executable, "-m", "doctor", "--version"]).returncode == 0


def test_run_takes_input_and_gives_exit_codes(lab_hosts: MakeHosts) -> None:
    (host,) = lab_hosts(1)
    assert host.run(["cat"], input="text").stdout == "text"
    assert host.run(["bash", "-c", "exit 7"]).returncode == 7
    assert host.run(["bash", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV
    with pytest.raises(AssertionError, match=r"node0: false\nexit 1"):
        host.sh("false")


def test_a_run_out_of_time_leaves_no_process(lab_hosts: MakeHosts) -> None:
    (host,) = lab_hosts(1)
    with pytest.raises(subprocess.TimeoutExpired) as late:
        host.run(["bash", "-c", LINGER], timeout=0.5)
    assert [str(late.value.stdout), str(late.value.stderr)] == ["started\n", "failing\n"]
    assert host.processes() == []


def test_together_starts_all_at_once_and_keeps_what_each_wrote(lab_hosts: MakeHosts) -> None:
    lab = lab_hosts(4)
    write = 'date +%s.%N; head -c 1000000 /dev/zero | tr "\\0" "$LETTER" | tee /dev/stderr'
    done = together([(host, ["bash", "-c", write], {"LETTER": host.name[-1]}) for host in lab])
    starts = [float(one.stdout.split("\n")[0]) for one in done]
    assert max(starts) - min(starts) < 2
    for host, one in zip(lab, done, strict=True):
        assert one.stdout.split("\n")[1] == one.stderr == host.name[-1] * 1_000_000


def test_together_kills_what_takes_too_long_on_every_host(lab_hosts: MakeHosts) -> None:
    lab = lab_hosts(2)
    quick, *stuck = together(
        [(lab[0], ["echo", "done"], None), *((host, ["bash", "-c", LINGER], None) for host in lab)], 1
    )
    assert (quick.returncode, quick.stdout) == (0, "done\n")
    assert [(one.returncode, one.stdout) for one in stuck] == [(-9, "started\n")] * 2
    assert [host.processes() for host in lab] == [[], []]


def test_a_rank_is_found_by_its_environment(lab_hosts: MakeHosts) -> None:
    first, second = lab_hosts(2)
    ranks = [host.start(["sleep", "600"], env={"RANK": str(rank)}) for rank, host in enumerate((first, second, second))]
    wait_for(lambda: len(second.processes("sleep 600")) == 2)
    second.kill("sleep", RANK="2")
    assert ranks[2].wait(patience(10)) == -signal.SIGKILL
    second.signal(signal.SIGTERM, RANK="1")
    assert ranks[1].wait(patience(10)) == -signal.SIGTERM
    assert ranks[0].poll() is None
    with pytest.raises(AssertionError, match="node1 has no process"):
        second.kill(RANK="0")


def test_a_command_that_was_stopped_can_go_on_or_be_killed(lab_hosts: MakeHosts) -> None:
    (host,) = lab_hosts(1)
    # One process a rank: a shell's child would be stopped between fork and exec, and found under another name later.
    wait = [sys.executable, "-c", "import os, time\nwhile not os.path.exists('until'): time.sleep(0.05)"]
    commands = [host.start(wait, env={"RANK": str(rank)}) for rank in range(2)]
    wait_for(lambda: all(host.processes("until", RANK=str(rank)) for rank in range(2)))
    host.signal(signal.SIGSTOP, "until")
    wait_for(lambda: {psutil.Process(command.pid).status() for command in commands} == {psutil.STATUS_STOPPED})
    host.sh("touch until")
    assert [command.poll() for command in commands] == [None, None]
    host.signal(signal.SIGCONT, "until", RANK="0")
    host.kill("until", RANK="1")
    assert [command.wait(patience(10)) for command in commands] == [0, -signal.SIGKILL]


@pytest.mark.parametrize(("count", "names"), [(0, "node{}"), (2, "node"), (201, "node{}")])
def test_a_lab_that_can_t_be(count: int, names: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 hosts"), hosts(count, names=names):
        pass


def test_orphans_are_reaped(lab_hosts: MakeHosts) -> None:
    (host,) = lab_hosts(1)
    host.sh("for _ in 1 2 3; do (setsid sleep 0.05 &); done")
    wait_for(lambda: "sleep" not in host.sh("ps -e -o args").stdout)


@pytest.mark.parametrize(
    "path",
    ["/etc/hosts", "/etc/nccl.conf", "/proc/sys/net/core/somaxconn", ROOT / "LICENSE", ROOT / "not-there.txt"],
    ids=str,
)
def test_a_host_has_files_of_its_own(lab_hosts: MakeHosts, path: str | Path) -> None:
    first, second = lab_hosts(2)
    before = second.run(["cat", path])
    first.write_file(path, "one\n")
    first.write_file(path, "two\n")
    assert first.run(["cat", path]).stdout == "two\n"
    assert second.run(["cat", path]).stdout == before.stdout
    assert not (ROOT / "not-there.txt").exists()


def test_a_host_misses_what_it_removed_from_its_own_layer(lab_hosts: MakeHosts) -> None:
    first, second = lab_hosts(2)
    first.own_layer(ROOT / "checks")
    first.sh('rm -r "$1"', str(ROOT / "checks" / "doctor_checks"))
    count = [sys.executable, "-c", "import doctor_checks"]
    assert "ModuleNotFoundError" in first.run(count).stderr
    assert second.run(count).returncode == 0


def test_labs_stand_side_by_side(lab_hosts: MakeHosts) -> None:
    one, other = lab_hosts(2), lab_hosts(2)
    assert [host.address for host in one] == [host.address for host in other]
    one[1].sh("ip link set eth0 down")
    assert one[0].run(["ping", "-c", "1", "-W", "1", "node1"]).returncode == 1
    other[0].sh("ping -c 1 -W 2 node1")


def test_eight_hosts() -> None:
    with hosts(8) as lab:
        assert [done.stdout for done in together([(host, ["hostname"], None) for host in lab])] == [
            f"node{number}\n" for number in range(8)
        ]


@pytest.mark.parametrize(
    ("way", "signum"),
    [("leave", None), ("error", None), ("wait", "SIGINT"), ("wait", "SIGTERM"), ("wait", "SIGKILL")],
)
def test_nothing_is_left_however_it_ends(way: str, signum: str | None) -> None:
    require_namespaces()
    interfaces = os.listdir("/sys/class/net")
    opener = subprocess.Popen(
        [sys.executable, "-c", OPEN_LAB, way], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert opener.stdout is not None
    folder, *spaces = opener.stdout.readline().split()
    if signum:
        opener.send_signal(signal.Signals[signum])
    opener.wait(patience(20))
    opener.stdout.close()
    wait_for(lambda: not Path(folder).exists())
    wait_for(lambda: all_spaces().isdisjoint(spaces))
    assert folder not in Path("/proc/self/mounts").read_text()
    assert os.listdir("/sys/class/net") == interfaces


def test_missing_tools_are_named() -> None:
    with pytest.raises(CannotPlay, match=r"^needs no-such-tool, nor-this$"):
        require_tools("bash", "no-such-tool", "nor-this")


def all_spaces() -> set[str]:
    """The namespaces that some process is in."""
    found = set()
    for process in psutil.process_iter():
        for kind in ("net", "mnt", "pid"):
            with suppress(OSError):  # it has just ended
                found.add(os.readlink(f"/proc/{process.pid}/ns/{kind}"))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + patience(
        40
    )  # the kernel takes namespaces down one after the other, those of other tests too
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
