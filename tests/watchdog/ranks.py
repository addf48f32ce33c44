"""Ranks of a watched run as real processes: forked after one import of torch, over Gloo, each with its own watchdog.

The source is as small as possible: it stalls when its script does. The evaluator writes down the job it was given.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from doctor.core.facts import Failure, HostFacts, ProgressFacts, RecorderFacts
from doctor.core.job import Job
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.telemetry.stacks.live_stacks import thread_stack
from doctor.monitor.watchdog.watchdog import Decision, Sections, Trigger, Watchdog
from tests.lab.ports import free_port
from tests.lab.speed import patience, slowness

HANG_AFTER = 0.8 * slowness()
"""Seconds without progress that these sources call a stall."""
LIMIT = patience(20.0)
"""Seconds after which a process hangs."""


class ScriptedSource:
    """A rank that makes progress whenever it is told to."""

    def __init__(self, rank: int, hang_after: float = HANG_AFTER) -> None:
        self.rank = rank
        self.hang_after = hang_after
        self.since = time.monotonic()
        self.batch = 0
        self.state = "running"
        self.failure: Failure | None = None
        self.trainer = threading.get_ident()

    def step(self) -> None:
        """Make progress."""
        self.batch += 1
        self.since = time.monotonic()

    def stall(self) -> Stall | None:
        """As the monitor has it."""
        idle = time.monotonic() - self.since
        return Stall(idle, self.hang_after) if self.state == "running" and idle > self.hang_after else None

    def startup_facts(self) -> Sections:
        """The host, and where it is."""
        return {"host": HostFacts(hostname="here", boot_id="b", machine_id="m"), **self.current_facts()}

    def current_facts(self) -> Sections:
        """Where it is."""
        facts = ProgressFacts(
            state="stalled" if self.stall() else self.state,
            pid=os.getpid(),
            at=time.time(),
            stage="train",
            point="backward",
            batch=self.batch,
            passed=self.batch,
            failure=self.failure,
        )
        return {"progress": facts}

    def look_facts(self) -> Sections:
        """The same."""
        return self.current_facts()

    def position(self) -> Sections:
        """The same with its stack."""
        facts = self.current_facts()["progress"]
        assert isinstance(facts, ProgressFacts)
        facts = msgspec.structs.replace(facts, stack=thread_stack(self.trainer), stack_from="interpreter")
        return {"progress": facts}

    def dumps(self) -> Mapping[str, bytes]:
        """Nothing is recorded."""
        return {}

    def fails(self, message: str) -> None:
        """An exception ends it."""
        self.state, self.failure = "failed", Failure("ValueError", message, time.time())


class Rank:
    """What a script has in its hands, in the process of a rank."""

    def __init__(self, number: int, world: int, folder: Path, directory: Path, **options: Any) -> None:
        self.number = number
        self.world = world
        self.folder = folder
        hang_after = options.pop("hang_after", HANG_AFTER)
        self.faulty = options.pop("faulty", True)
        self.source = ScriptedSource(number, hang_after)
        self.watchdog = Watchdog(number, world, self.source, directory, self.judge, write_line=self.tell, **options)
        self.directory = directory

    def write(self, **said: Any) -> None:
        """Leave a line for the test, at once: this process may not live long."""
        with (self.folder / f"rank-{self.number}.jsonl").open("a") as stream:
            stream.write(json.dumps({"rank": self.number, "time": time.time(), **said}) + "\n")

    def tell(self, line: str) -> None:
        """What goes to the console."""
        self.write(told=line)

    def judge(self, job: Job, occasion: Trigger) -> Decision:
        """Write down what is to be judged."""
        members = {}
        for rank in job.ranks:
            progress = rank.find(ProgressFacts) or ProgressFacts(state="unknown")
            held = rank.find(RecorderFacts)
            members[rank.number] = {
                "state": progress.state,
                "batch": progress.batch,
                "seen_by": progress.seen_by,
                "letter": progress.kernel_state,
                "stack": [frame.function for frame in progress.stack],
                "stack_from": progress.stack_from,
                "host": rank.host.name,
                "dump": held.dump if held else None,
                "failure": progress.failure.message if progress.failure else None,
            }
        self.write(judged=occasion, members=members, world=job.world_size)
        return Decision(occasion in ("stall", "failure") and self.faulty, f"judged by {self.number}", ("RUN001",), (0,))

    def train(self, seconds: float) -> None:
        """Make progress for a while, longer on a slow machine."""
        until = time.monotonic() + seconds * slowness()
        while time.monotonic() < until:
            self.source.step()
            time.sleep(0.02)

    def stand_still(self, seconds: float = LIMIT) -> None:
        """As in a collective that never ends."""
        time.sleep(seconds)

    def hold_the_lock(self, seconds: int = 60) -> None:
        """As a library that keeps the interpreter's lock."""
        ctypes.PyDLL(None).sleep(seconds)

    def kill(self, number: signal.Signals) -> None:
        """Send itself a signal."""
        self.write(struck=number.name)
        os.kill(os.getpid(), number)


Script = Callable[[Rank], None]


class Scene:
    """One job, as a context: whatever it started is ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "run"
        self.pids: dict[int, int] = {}
        self._others: list[int] = []
        self.codes: dict[int, int] = {}

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.pids.values(), *self._others]:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def start(
        self,
        script: Script,
        world: int,
        *,
        store: str = "rank 0",
        directories: Mapping[int, Path] | None = None,
        **options: Any,
    ) -> None:
        """Start the ranks. ``store``: ``rank 0`` hosts it, an ``agent`` does, or there is ``none``."""
        port, address = (self._agent(), "agent") if store == "agent" else (free_port(), store)
        for number in range(world):
            directory = (directories or {}).get(number, self.directory)
            self.pids[number] = fork(
                lambda number=number, directory=directory: self._be(
                    script, number, world, address, port, directory, options
                )
            )

    def _agent(self) -> int:
        reads, writes = os.pipe()

        def host() -> None:
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writes, str(store.port).encode())
            time.sleep(LIMIT)

        self._others.append(fork(host))
        os.close(writes)
        port = int(os.read(reads, 16))
        os.close(reads)
        return port

    @property
    def agent(self) -> int:
        """The process that hosts the store."""
        return self._others[0]

    def _be(
        self, script: Script, number: int, world: int, store: str, port: int, directory: Path, options: dict[str, Any]
    ) -> None:
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch looks up names that not every name server knows
        if store != "none":
            open_group(number, world, port, by_agent=store == "agent")
        script(Rank(number, world, self.folder, directory, **options))

    def wait(self, *numbers: int, seconds: float = LIMIT) -> None:
        """Wait for ranks to end, by default for all."""
        until = time.monotonic() + seconds
        for number in numbers or (*self.pids,):
            if number not in self.codes:
                self.codes[number] = wait_for(self.pids[number], until)

    def said(self, rank: int | None = None) -> list[dict[str, Any]]:
        """What the ranks left for the test, by time."""
        files = self.folder.glob("rank-*.jsonl" if rank is None else f"rank-{rank}.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return sorted(lines, key=lambda line: line["time"])

    def judged(self, occasion: str) -> list[dict[str, Any]]:
        """What was judged on one occasion."""
        return [line for line in self.said() if line.get("judged") == occasion]

    def until_judged(self, occasion: str, seconds: float = LIMIT) -> dict[str, Any]:
        """The first judgement on that occasion, once it is there."""
        return self.until(lambda: self.judged(occasion), seconds)[0]

    def until_told(self, rank: int | None = None, seconds: float = LIMIT) -> list[str]:
        """The lines for the console, of all ranks or of one, once there are any."""
        return self.until(lambda: [line["told"] for line in self.said(rank) if "told" in line], seconds)

    def until(self, holds: Callable[[], Any], seconds: float = LIMIT) -> Any:
        """What ``holds`` gives, once that is anything."""
        until = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < until, f"it did not come; {self.said()}"
            time.sleep(0.05)
        return found


def open_group(number: int, world: int, port: int, *, by_agent: bool) -> None:
    """A process group over Gloo, as a job would open it."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore

    master = number == 0 and not by_agent
    store = TCPStore("127.0.0.1", port, world, is_master=master, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("attempt_0", store), rank=number, world_size=world)


def warm_up() -> None:
    """Load what torch needs for its first stacks of a recorder, once for all ranks: that may take seconds."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._profiler import gather_traceback, symbolize_tracebacks  # type: ignore[attr-defined]

        symbolize_tracebacks([gather_traceback(python=True, script=False, cpp=False)])


def fork(work: Callable[[], None]) -> int:
    """A child that does ``work`` and never returns into the test."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(pid: int, until: float) -> int:
    """The exit code of a child, negative for a signal."""
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    raise AssertionError(f"process {pid} did not end")
