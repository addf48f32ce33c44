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

    Why it hurts: the signal, which `torchrun` forwards, ends all ranks. The training itself did not fail.
    Fix: Restart the job in a `tmux` session or as a batch job, and resume from the last checkpoint.
    """
    return ()
