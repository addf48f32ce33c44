"""Installers for launchers of torch: a process that failed stays visible until the others have reported it.

torchrun ends the other processes within a tenth of a second, and ``torch.multiprocessing.spawn`` at once: before a rank
that waits in a collective can find out, and before its watchdog has. So the processes are looked at just before the
launcher does, without taking their exit status: the kernel keeps a killed one as a zombie, with its signal, which its
peers can read. The launcher goes on as soon as the others have ended, or after :data:`HOLD`. So it does below torchrun
for a process that ended with an error which it has not reported itself. Nothing is held back if processes end in any
other way, or if the launcher itself ends them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from doctor.core.clock import monotonic, sleep
from doctor.monitor.integrations.reported_error import is_noted

HOLD = 6.0
"""Seconds at most that the others get: a watchdog looks twice a second, a decision takes a second or two, and to begin
a run for it as long."""
MOMENT, POLL = 0.5, 0.05


def watch_torchrun(module: Any) -> None:
    """Have torchrun's processes looked at before it does (torch/distributed/elastic/multiprocessing/api.py)."""
    kind = module.SubprocessContext
    poll = kind._poll

    @functools.wraps(poll)
    def observed(self: Any) -> Any:
        others: Collection[int] = ()
        with suppress(Exception):
            others = _note_killed(self, module.ProcessFailure)
        await_end(others)
        return poll(self)

    kind._poll = observed


def _note_killed(context: Any, failure_of: Any) -> Collection[int]:
    """Enter failed processes where torchrun does, at their time; return the pids of the others.

    torchrun names the failure with the lowest time as root cause: what the others do meanwhile must not precede it.
    """
    pids = {rank: context.subprocess_handlers[rank].proc.pid for rank in context._running_local_ranks}
    ends = {rank: _exit_code(pid) for rank, pid in pids.items()}
    failed = {
        rank: code for rank, code in ends.items() if code < 0 or (code and not is_noted(context.error_files[rank]))
    }
    for rank, code in failed.items():
        failure = failure_of(local_rank=rank, pid=pids[rank], exitcode=code, error_file=context.error_files[rank])
        context._failures[rank] = failure
        context._running_local_ranks.discard(rank)
    return [pid for rank, pid in pids.items() if rank not in failed] if failed else ()


def watch_spawn(module: Any) -> None:
    """Have processes of ``torch.multiprocessing.spawn`` looked at before it does (torch/multiprocessing/spawn.py)."""
    kind = module.ProcessContext
    join = kind.join

    @functools.wraps(join)
    def joined(self: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        ready = wait(list(self.sentinels), timeout) if self.sentinels else []
        if not ready:
            return join(self, 0, *args, **kwargs)
        # A sentinel is a pipe, which the kernel closes a moment before the process is a zombie.
        await_end([self.processes[self.sentinels[one]].pid for one in ready], MOMENT)
        others: Collection[int] = ()
        with suppress(Exception):
            others = _keep_killed(self)
        await_end(others)
        return join(self, timeout, *args, **kwargs)

    kind.join = joined


def _keep_killed(context: Any) -> Collection[int]:
    """Have the context join a killed process, and none that ends meanwhile; return the pids of the others."""
    running = {sentinel: context.processes[index].pid for sentinel, index in context.sentinels.items()}
    killed = next((sentinel for sentinel, pid in running.items() if _exit_code(pid) < 0), None)
    if killed is None:
        return ()
    context.sentinels = {killed: context.sentinels[killed]}
    return [pid for sentinel, pid in running.items() if sentinel != killed]


def watch_lightning_children(module: Any) -> None:
    """Have the other ranks of Lightning or Fabric looked at before its first rank does.

    Once it has seen that a signal killed one, it kills all others and itself
    (lightning/fabric/strategies/launchers/subprocess_script.py).
    """
    kind = getattr(module, "_ChildProcessObserver", None)
    look = getattr(kind, "_run", None)
    if kind is None or look is None:
        return

    @functools.wraps(look)
    def observed(self: Any) -> Any:
        with suppress(Exception):
            if any(_exit_code(one.pid) < 0 for one in self._child_processes if one.returncode is None):
                sleep(HOLD)
        return look(self)

    kind._run = observed


def await_end(pids: Collection[int], seconds: float | None = None) -> None:
    """Wait until these children have ended, for :data:`HOLD` seconds by default. Handlers of signals may raise here."""
    until = monotonic() + (HOLD if seconds is None else seconds)
    while not all(map(_has_ended, pids)) and monotonic() < until:
        sleep(POLL)


def _exit_code(pid: int) -> int:
    """Return the exit code of a child that was not waited for yet, the signal that killed it as a negative number.

    0 if it runs, or was ended by a signal that kills no process of its own accord.
    """
    from doctor.core.process import KILLS

    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if seen is None:
        return 0
    if seen.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return -seen.si_status if seen.si_status in KILLS else 0
    return seen.si_status


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except OSError:  # somebody else has waited for it
        return True
