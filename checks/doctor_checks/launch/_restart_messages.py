"""Messages of jobs that were ended and began again."""

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
"""Messages of jobs that were ended and begin again, in the same log: their ranks come once more."""
