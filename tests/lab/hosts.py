"""Several hosts on one machine: namespaces that differ in all that tells hosts apart, joined by a switch.

Every host has its own network, name, IPC, mounts and processes, its own ``/etc``, ``/dev/shm``, ``/proc``, ``/sys``,
machine id and boot id. Other folders are those of the machine, as if they lay on a shared file system. The switch is
a bridge in a network of its own, so labs run side by side and the machine's own network sees none of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import IO, TypeAlias

import psutil

from tests.lab.needs import clean_environ, require_found, require_namespaces, require_tools
from tests.lab.running import Held, Run, end, environ_of, first_line, wait_for_stop, wait_or_kill, wake
from tests.lab.spaces import OWN_LAYER, WRITE_FILE, hold_host, hold_switch, layers
from tests.lab.speed import patience

NETWORK = IPv4Network("10.20.0.0/24")
FIRST = 10
"""The last number in the address of the first host."""
MOST = 200
TOOLS = ("bash", "env", "findmnt", "hostname", "ip", "mount", "nsenter", "setpriv", "unshare")
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Switch:
    """What joins the hosts: a bridge called ``switch`` in the network of the process ``pid``."""

    pid: int
    folder: Path

    def run(self, *argv: str) -> None:
        """Run ``argv`` in the network of the switch; it must succeed."""
        command, environ = self._enter(argv), clean_environ(self.folder)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience(20))
        assert done.returncode == 0, f"switch: {argv}: {done.stderr}"

    @contextmanager
    def serving(self, argv: Sequence[str]) -> Iterator[None]:
        """Have ``argv`` run in the network of the switch, from when it has printed a line; it shall end when its
        standard input closes."""
        with Held(self._enter(argv), self.folder, f"{Path(argv[0]).name}.log") as held:
            held.ready()
            yield

    def _enter(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--", *argv]


@dataclass(frozen=True)
class LabHost:
    """One host. ``folder`` is its home, which all hosts see. ``pid`` is its process 1 as the machine knows it, and
    ``port`` the other end of its ``eth0``."""

    name: str
    address: str
    folder: Path
    pid: int
    switch: Switch
    port: str
    _started: list[subprocess.Popen[str]] = field(default_factory=list, repr=False, compare=False)

    @property
    def environ(self) -> dict[str, str]:
        """What every process starts from on this host; the ``env`` of a call is laid over it."""
        return clean_environ(self.folder)

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start ``argv`` on this host, in its folder. What is returned waits for it outside: killing that kills
        ``argv``; other signals go through :meth:`signal`. ``argv`` ends with the lab, and with the thread that called
        this (PR_SET_PDEATHSIG in prctl(2))."""
        enter = ("nsenter", "--target", str(self.pid), "--net", "--uts", "--ipc", "--mount", "--pid", "--")
        # nsenter leaves the process at the root of the mounts that it enters.
        inside = ("env", f"--chdir={self.folder}", *_DIE_WITH_PARENT, "--", *map(str, argv))
        started = subprocess.Popen(
            [*_DIE_WITH_PARENT, *enter, *inside],
            env={**self.environ, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        input: str = "",  # noqa: A002  as subprocess.run has it
    ) -> subprocess.CompletedProcess[str]:
        """What ``argv`` did on this host, with whatever exit code.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, which grow with the machine's slowness;
                it and its offspring are dead, and what they wrote is in the exception.
            CannotPlay: ``argv`` needs an optional tool that this machine lacks.
        """
        with Run(patience(timeout)) as run:
            run.start(self, argv, env, input)
            in_time = run.wait()
        [done] = run.results
        if not in_time:
            raise subprocess.TimeoutExpired(done.args, timeout, done.stdout, done.stderr)
        require_found(done)
        return done

    def sh(
        self,
        script: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        input: str = "",  # noqa: A002  as subprocess.run has it
    ) -> subprocess.CompletedProcess[str]:
        """Run ``script`` by bash on this host with ``args`` as ``$1``, ``$2`` …; it must succeed."""
        done = self.run(["bash", "-c", script, self.name, *args], env=env, timeout=timeout, input=input)
        assert done.returncode == 0, f"{self.name}: {script}\nexit {done.returncode}: {done.stdout}{done.stderr}"
        return done

    @contextmanager
    def serving(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Have ``argv`` run on this host, from when it has printed a line until the context ends. Nobody reads what it
        prints after that: it shall not be much."""
        service = self.start(argv, env=env, stderr=subprocess.STDOUT)
        assert first_line(service), f"{self.name}: {argv} did not start"
        try:
            yield service
        finally:
            end(service)

    def write_file(self, path: str | Path, text: str) -> None:
        """Give this host alone a file ``path``, there already or not, with ``text``; its folder must exist."""
        self.sh(WRITE_FILE, str(path), env=layers(self.folder), input=text)

    def write_hosts(self, text: str) -> None:
        """Replace ``/etc/hosts``."""
        self.write_file("/etc/hosts", text)

    def write_resolv(self, text: str) -> None:
        """Replace ``/etc/resolv.conf``, which names no server in the beginning: unknown names fail at once."""
        self.write_file("/etc/resolv.conf", text)

    def own_layer(self, folder: str | Path) -> None:
        """From now on, what changes below ``folder`` changes for this host alone: site-packages, to miss a package."""
        self.sh(OWN_LAYER, str(folder), env=layers(self.folder))

    def processes(self, holding: str = "", **environ: str) -> list[psutil.Process]:
        """Processes of this host, under the numbers of the machine, whose command line holds a text and that were
        started with these variables. The script's name is in the launcher's command line too: ``RANK="1"`` tells a
        rank."""
        space = _pid_space(self.pid)
        here = (one for one in psutil.process_iter() if one.pid != self.pid and _pid_space(one.pid) == space)
        return [
            process
            for process in here
            if (line := _command_line(process)) and holding in line and environ.items() <= environ_of(process).items()
        ]

    def signal(self, signum: int, holding: str = "", **environ: str) -> None:
        """Send ``signum`` to what :meth:`processes` finds, which must be something. What was sent SIGSTOP stands still
        when this returns."""
        found = self.processes(holding, **environ)
        assert found, f"{self.name} has no process {holding!r} {environ}"
        for process in found:
            with suppress(psutil.NoSuchProcess):
                waiting = process.ppid()
                process.send_signal(signum)
                if signum == signal.SIGSTOP:
                    wait_for_stop(process)
                if signum in (signal.SIGCONT, signal.SIGKILL):
                    self._wake(waiting)

    def kill(self, holding: str = "", **environ: str) -> None:
        """Send SIGKILL; see :meth:`signal`."""
        self.signal(signal.SIGKILL, holding, **environ)

    def _wake(self, pid: int) -> None:
        """Let the process outside that waits for a command go on, which stopped along with it."""
        for started in self._started:
            if started.pid == pid:
                wake(started)


Command: TypeAlias = "tuple[LabHost, Sequence[str | Path], Mapping[str, str] | None]"
"""Where, what, and the environment that is laid over the host's own."""


def together(commands: Sequence[Command], timeout: float = 60) -> list[subprocess.CompletedProcess[str]]:
    """What ``commands`` did, started at the same moment, in their order. Where one takes longer than ``timeout``
    seconds, all that is left of them on all hosts is killed, in sessions of its own or stopped as it may be; killed
    commands have the return code -9, and what they wrote until then."""
    with Run(patience(timeout)) as run:
        for host, argv, env in commands:
            run.start(host, argv, env)
        run.wait()
    return run.results


@contextmanager
def hosts(count: int, *, names: str = "node{}") -> Iterator[tuple[LabHost, ...]]:
    """``count`` hosts on one network; ``names`` is formatted with 0, 1, 2 …. All know the names of all.

    Raises:
        CannotPlay: a tool or a right is missing.
    """
    require_namespaces()
    require_tools(*TOOLS)
    addresses = {names.format(number): str(NETWORK[FIRST + number]) for number in range(count)}
    if not 0 < len(addresses) == count <= MOST:
        raise ValueError(f"a lab has 1 to {MOST} hosts of different names, not {count} of {names!r}")
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="rankdoctor-lab-"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        switch = Switch(int(stack.enter_context(hold_switch(root)).ready()), root)
        holders = {name: stack.enter_context(_hold(root / name, addresses, switch)) for name in addresses}
        stack.callback(_end, started, holders.values())
        yield tuple(
            LabHost(name, addresses[name], root / name, int(holder.ready()), switch, _port(name, addresses), started)
            for name, holder in holders.items()
        )


def _hold(folder: Path, addresses: Mapping[str, str], switch: Switch) -> Held:
    name = folder.name
    etc = folder / "etc"
    etc.mkdir(parents=True)
    (etc / "hosts").write_text(_hosts_file(addresses))
    (etc / "hostname").write_text(f"{name}\n")
    (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
    (etc / "resolv.conf").write_text("")
    (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
    return hold_host(folder, f"{addresses[name]}/{NETWORK.prefixlen}", switch.pid, _port(name, addresses))


def _hosts_file(addresses: Mapping[str, str]) -> str:
    # Without lines "::ffff:ADDRESS NAME", as no machine has them, c10d warns that it can't find its clients' names.
    names = "".join(f"{address} {name}\n" for name, address in addresses.items())
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{names}"


def _port(name: str, addresses: Mapping[str, str]) -> str:
    return f"port{list(addresses).index(name)}"


def _end(started: Sequence[subprocess.Popen[str]], holders: Iterable[Held]) -> None:
    for holder in holders:
        holder.release()
    for process in started:
        wait_or_kill(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has just ended
        return ""


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended, or only waits to be reaped
        return ""
