"""Where live scenes are played: hosts of the lab, a job on them, and ``doctor check`` in every process of it at once.

A :class:`Play` is data: how many hosts, what is done to them before the start, the processes, who starts them, and what
happens meanwhile. :func:`perform` makes it real and returns what every process said and how it ended.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tests.faults import stage as alone
from tests.faults.wheels import install
from tests.lab.hosts import FIRST, NETWORK, Command, LabHost, hosts, together
from tests.lab.needs import CannotPlay, clean_environ
from tests.lab.nvml import FakeNvml, build_library, compiler
from tests.lab.slurm import SlurmCluster
from tests.lab.speed import patience, slowness

PORT = 29500
"""MASTER_PORT of every play that does not say otherwise."""
TORCHRUN_SECONDS = 20
"""Of torchrun's own rendezvous: nobody waits for a master that does not come."""

TORCH_IS_LATE = "importing torch took longer than --timeout"
"""What the doctor says where the machine is too crowded for the time-out of a play."""
AT_LEISURE = 45.0

Lab = tuple[LabHost, ...]


@dataclass(frozen=True)
class Act:
    """Something that is done to hosts before the start, or a context that lasts as long as the play. A value: plays
    that do the same are the same play. Made by :func:`on` and :func:`among`."""

    numbers: tuple[int, ...]
    do: Callable[..., object]
    args: tuple[object, ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    as_one: bool = False


def on(where: int | tuple[int, ...], do: Callable[..., object], *args: object, **options: object) -> Act:
    """``do(host, *args, **options)`` on one host, or on each of several."""
    return Act((where,) if isinstance(where, int) else where, do, args, tuple(options.items()))


def among(where: tuple[int, ...], do: Callable[..., object], *args: object, **options: object) -> Act:
    """``do([host, …], *args, **options)``, once."""
    return Act(where, do, args, tuple(options.items()), as_one=True)


def shell(host: LabHost, script: str) -> None:
    """For :func:`on`: a script on that host, which must succeed."""
    host.sh(script)


def address(number: int) -> str:
    """The address of a host of the lab."""
    return str(NETWORK[FIRST + number])


@dataclass(frozen=True)
class Ranks:
    """``count`` ranks on the host with that number, started the same way.

    ``environ`` is laid over what the launcher sets. ``shell`` runs before the doctor in the same shell (``ulimit -n
    256``, ``unset RANK``, ``sleep 2``). ``gpus``: a machine of the lab and more lines for its driver. ``packages``:
    ``name==version`` as pip would have installed them. Ranks that are not ``started`` count in the world all the same.
    """

    host: int
    count: int = 1
    environ: tuple[tuple[str, str], ...] = ()
    shell: str = ""
    gpus: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    started: bool = True


def ranks(host: int, count: int = 1, *, shell: str = "", started: bool = True, **environ: str) -> Ranks:
    """Ranks with ``environ``; see :class:`Ranks`."""
    return Ranks(host, count, tuple(environ.items()), shell, started=started)


@dataclass(frozen=True)
class Launcher:
    """Who starts the ranks. ``start`` returns when all have ended or the play's time is up. ``number``: where a process
    finds its rank, in shell. ``lab``: what makes the hosts."""

    name: str
    start: Callable[[Stage], None]
    number: str
    lab: Callable[[int], AbstractContextManager[Lab | SlurmCluster]] = hosts


@dataclass(frozen=True)
class Play:
    """What is put on stage: ``ranks`` on so many ``hosts``, numbered in their order.

    ``way``: how the ranks gather; a folder needs no torch and is faster. ``timeout`` is the doctor's own. ``during``
    runs beside the ranks, from just before they start; ``seconds``: after which all that is left is killed. Both are
    those of an idle machine.
    """

    hosts: int
    ranks: tuple[Ranks, ...]
    before: tuple[Act, ...] = ()
    launcher: Launcher = field(default_factory=lambda: DIRECT)
    way: Literal["share", "store"] = "share"
    options: tuple[str, ...] = ()
    timeout: float = 20
    master: str = "node0"
    port: int = PORT
    during: Callable[[Stage], None] | None = None
    seconds: float = 60
    command: str = "check --format json"

    @property
    def world_size(self) -> int:
        """All ranks, started or not."""
        return sum(group.count for group in self.ranks)

    @property
    def started(self) -> tuple[tuple[int, int, int], ...]:
        """Every rank that is started: its number, its local rank, and the place of its group among ``ranks``."""
        every = [(local, place) for place, group in enumerate(self.ranks) for local in range(group.count)]
        numbered = enumerate(every)
        return tuple((rank, local, place) for rank, (local, place) in numbered if self.ranks[place].started)


@dataclass(frozen=True)
class Said:
    """What one process said. ``rank``: by its launcher's count, ``None`` where it has none; ``code``: ``None`` for one
    that was killed with its shell."""

    host: str
    rank: int | None
    code: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Outcome:
    """What all processes ``said``, by rank; ``seconds`` from the start of the first to the end of the last."""

    said: tuple[Said, ...]
    seconds: float

    @property
    def report(self) -> alone.Outcome | None:
        """Of the process that printed one; ``None`` where nobody did."""
        printed = [one for one in self.said if one.stdout]
        assert len(printed) < 2, f"{len(printed)} processes printed: ranks {[one.rank for one in printed]}"
        if not printed:
            return None
        [one] = printed
        assert one.code is not None
        return alone.Outcome(one.code, json.loads(one.stdout), one.stderr)

    @property
    def codes(self) -> tuple[tuple[int | None, int | None], ...]:
        """Rank and exit code of every process."""
        return tuple((one.rank, one.code) for one in self.said)

    def stderr(self, rank: int) -> str:
        """What the processes of ``rank`` wrote to stderr."""
        return "".join(one.stderr for one in self.said if one.rank == rank)

    def __str__(self) -> str:
        return "\n".join(
            f"--- {one.host} rank {one.rank} exit {one.code}\n{one.stdout[:200]}\n{one.stderr}" for one in self.said
        )


@dataclass(frozen=True)
class Stage:
    """A play under way. ``cluster``: the SLURM whose nodes the hosts are, if there is one."""

    play: Play
    hosts: Lab
    folder: Path
    cluster: SlurmCluster | None = None

    @property
    def share(self) -> Path:
        """The folder in which the ranks meet."""
        return self.folder / "share"

    def script(self, number: int) -> Path:
        """The shell script of a group of ranks, by its place in the play. It takes the rank as ``$1`` from launchers
        that do not set it, and leaves what the doctor said where :meth:`said` finds it."""
        group = self.play.ranks[number]
        path = self.folder / f"ranks-{number}.sh"
        if not path.exists():
            path.write_text(_SCRIPT.format(stage=self, group=_preparation(group, path), command=self._command()))
        return path

    def _command(self) -> str:
        share = ["--share", str(self.share)] if self.play.way == "share" else []
        words = [sys.executable, "-m", "doctor", *self.play.command.split()]
        return shlex.join([*words, "--timeout", str(self.play.timeout), *share, *self.play.options])

    def said(self) -> tuple[Said, ...]:
        """What was said by processes so far, by rank."""
        found = [_read_said(path) for path in self.folder.glob("said-*.stdout")]
        return tuple(sorted(found, key=lambda one: (-1 if one.rank is None else one.rank, one.host)))

    def says(self, words: str) -> bool:
        """Whether a rank has said this by now, as it goes."""
        return any(words in one.stderr for one in self.said())

    def ended(self) -> set[int | None]:
        """The ranks that have ended."""
        return {one.rank for one in self.said() if one.code is not None}

    def until(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until ``holds()``, for :attr:`Play.during`."""
        end = time.monotonic() + (patience(15) if seconds is None else seconds)
        while not holds():
            assert time.monotonic() < end, "what was waited for did not happen"
            time.sleep(0.02)


_SCRIPT = """\
{group}
said={stage.folder}/said-$(hostname)-$$
echo "$(hostname) {stage.play.launcher.number}" > $said.who
{command} > $said.stdout 2> $said.stderr
code=$?
echo $code > $said.aside; mv $said.aside $said.code
exit $code
"""


def _preparation(group: Ranks, path: Path) -> str:
    """What the shell of a rank does before the doctor starts."""
    added = dict(group.environ)
    if group.gpus:
        if compiler() is None:
            raise CannotPlay("no C compiler for the GPUs of the lab")
        lab = FakeNvml(build_library(), _folder_of(path)).environ(*group.gpus)
        added |= {"LD_LIBRARY_PATH": str(build_library().parent), "FAKE_NVML_CONF": lab["FAKE_NVML_CONF"]}
    if group.packages:
        folder = _folder_of(path)
        added["PYTHONPATH"] = f"{install(folder, group.packages)}:{clean_environ(folder)['PYTHONPATH']}"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in added.items())
    return f"{exports}{group.shell}"


def _folder_of(path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    return folder


def _read_said(path: Path) -> Said:
    def text(suffix: str) -> str:
        part = path.with_suffix(suffix)
        return part.read_text(errors="replace") if part.exists() else ""

    host, _, rank = text(".who").strip().partition(" ")
    code = text(".code").strip()
    return Said(host, int(rank) if rank else None, int(code) if code else None, text(".stdout"), text(".stderr"))


def start_direct(stage: Stage) -> None:
    """Every process by itself, with the variables of torch's ``env://``."""
    play = stage.play
    commands: list[Command] = []
    for rank, local, place in play.started:
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(play.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(play.ranks[place].count),
            "MASTER_ADDR": play.master,
            "MASTER_PORT": str(play.port),
        }
        script = str(stage.script(place))
        commands.append((stage.hosts[play.ranks[place].host], ["bash", script, str(rank)], environ))
    together(commands, play.seconds)


def start_torchrun(stage: Stage) -> None:
    """A torchrun for each group of ranks, which are all started and as many on each host."""
    play = stage.play
    commands: list[Command] = []
    for place, group in enumerate(play.ranks):
        options = {
            "--nnodes": len(play.ranks),
            "--node-rank": place,
            "--nproc-per-node": group.count,
            "--master-addr": play.master,
            "--master-port": play.port,
            "--rdzv-conf": f"timeout={TORCHRUN_SECONDS},read_timeout={TORCHRUN_SECONDS}",
        }
        words = [f"{name}={value}" for name, value in options.items()]
        argv = ["torchrun", *words, "--no-python", "bash", str(stage.script(place))]
        commands.append((stage.hosts[group.host], argv, None))
    together(commands, play.seconds)


DIRECT: Launcher = Launcher("direct", start_direct, "$1")
TORCHRUN = Launcher("torchrun", start_torchrun, "$RANK")


@functools.cache
def perform(play: Play) -> Outcome:
    """What :func:`perform_anew` says of ``play``, which is made once a process of the test run."""
    return perform_anew(play)


def perform_anew(play: Play) -> Outcome:
    """What became of ``play``, which is made again with more time where the machine was too crowded for it.

    Raises:
        CannotPlay: a tool or a right is missing.
    """
    outcome = _perform(play)
    if play.timeout < AT_LEISURE and any(TORCH_IS_LATE in one.stderr for one in outcome.said):
        outcome = _perform(replace(play, timeout=AT_LEISURE, seconds=play.seconds + AT_LEISURE))
    assert "Traceback" not in "".join(one.stderr for one in outcome.said), str(outcome)
    return outcome


def at_this_speed(play: Play) -> Play:
    """``play`` with the deadlines that it needs on this machine."""
    return replace(play, timeout=play.timeout * slowness(), seconds=play.seconds * slowness())


def _perform(play: Play) -> Outcome:
    play = at_this_speed(play)
    with ExitStack() as stack:
        made = stack.enter_context(play.launcher.lab(play.hosts))
        cluster = made if isinstance(made, SlurmCluster) else None
        lab = cluster.hosts if cluster else made
        assert isinstance(lab, tuple)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankdoctor-live-")))
        for act in play.before:
            _act(act, lab, stack)
        stage = Stage(play, lab, folder, cluster)
        began = time.monotonic()
        with _Beside(stage):
            play.launcher.start(stage)
        return Outcome(stage.said(), time.monotonic() - began)


def _act(act: Act, lab: Lab, stack: ExitStack) -> None:
    chosen = [lab[number] for number in act.numbers]
    for subject in [chosen] if act.as_one else chosen:
        made = act.do(subject, *act.args, **dict(act.options))
        if isinstance(made, AbstractContextManager):
            stack.enter_context(made)


class _Beside:
    """Has what happens during a play happen in a thread of its own; what goes wrong there is raised in the end."""

    def __init__(self, stage: Stage) -> None:
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(stage,), daemon=True)

    def _run(self, stage: Stage) -> None:
        try:
            if stage.play.during is not None:
                stage.play.during(stage)
        except BaseException as error:  # raised again in the thread of the test
            self._errors.append(error)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.join(patience(30))
        if self._errors and kind is None:
            raise self._errors[0]


def true_here(play: Play) -> frozenset[str]:
    """Ids that are not held against ``play``: they are true of this machine, whatever is played on it."""
    by_host: dict[int, int] = {}
    for group in play.ranks:
        by_host[group.host] = by_host.get(group.host, 0) + group.count
    crowded = {"ENV012"} if max(by_host.values()) > len(os.sched_getaffinity(0)) else set()
    return alone.own_alarms() | crowded
