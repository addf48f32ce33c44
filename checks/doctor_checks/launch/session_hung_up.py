"""ENV016: the terminal or ssh session of the launcher closed."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.api import Job, Scope, Severity, Verdict, check
from doctor.testing import Fails, Passes, logged


@check(
    id="ENV016",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="M",
    cases=lambda: (
        Passes(
            "ended by SIGTERM",
            logged(
                "W1218 20:27:21.4 140 torch/distributed/elastic/agent/server/api.py:739] Received "
                "Signals.SIGTERM death "
                "signal, shutting down workers",
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 140 got signal: 15",
            ),
        ),
        Fails(
            "torchrun of torch 1.9 to 2.2",
            logged(
                "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers",
                "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 812 closing signal SIGHUP",
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 800 got signal: 1",
            ),
        ),
    ),
)
def session_hung_up(job: Job) -> Iterable[Verdict]:
    """Ask whether the launcher received SIGHUP.

    Why it hurts: when a terminal or an ssh session closes, the system sends SIGHUP to the processes in it, and torchrun
    forwards it to all ranks. Nothing is wrong with the training itself.
    Fix: Resume from the last checkpoint inside `tmux` or `screen`, as a batch job, or with
    `setsid nohup torchrun train.py > train.log 2>&1 &` (nohup alone may not suffice, because torchrun installs its own
    handler for SIGHUP).
    """
    return ()
