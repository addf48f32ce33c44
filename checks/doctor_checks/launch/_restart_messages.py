"""Log events of jobs that were stopped and restarted."""

from __future__ import annotations

RESTARTS = (
    "elastic.newnodes",
    "elastic.restart",
    "elastic.sigrecv",
    "launch.ended",
    "pl.sigterm",
    "pl.slurm_requeue.harmless",
    "run.resumed",
    "slurm.aborted",
    "slurm.cancel",
    "slurm.requeued.harmless",
    "slurm.state",
)
"""Events of jobs that were stopped and then restarted in the same log, so that each rank joins again."""
