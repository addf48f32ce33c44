"""RUN018: a library or launcher failed with an error that no other check covers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import failed_before
from doctor.analysis.logs.log_component import report_of
from doctor.api import Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs
from doctor.testing import Fails, Passes, logged

_COMMANDS = re.compile(r"`([^`]+)`")
_RANK = re.compile(r"^(?:\[[Rr]ank:? ?\d{1,7}\]:? ?)+")
MOST = 4
"""Maximum number of messages that are reported, the first ones."""


@check(
    id="RUN018",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="M",
    impacts={
        r"extension could not be built": (
            "The import of the extension fails on the rank that logged this, and the other ranks wait for it until "
            "their timeout."
        ),
        r"SLURM refused|^(?:salloc|sbatch|[bq]sub) failed": "The job does not start.",
        r"Kubernetes found no node": "The pod stays pending, and the ranks in other pods wait for it.",
        r"Kubernetes could not start": "The pod does not start, and the ranks in other pods wait for it.",
        r"start the batch script": "The job ends before any rank starts.",
        r"container plugin": "The job step ends before any rank starts.",
        r"tasks of a step|daemon on a host|by ssh|ColossalAI": (
            "The ranks on the affected host do not start, so the job does not start either."
        ),
        r"no process manager": "The processes do not find each other: each one runs alone, or fails.",
        r"slots": "The launcher starts no process.",
        r"launcher failed: unknown option": "The launcher does not start the job.",
        r"launcher failed": "The launcher does not start the job, or ends it.",
        r"Ray cluster": "Ray does not start the workers, and the job waits for them.",
        r"Ray's raylet": "The worker ends, and the task or rank that it should run does not start.",
        r"Open MPI terminated|called MPI (?:before|after)|MPICH's process manager": "All processes of the job end.",
    },
    cases=lambda: (
        Passes(
            "NCCL's messages of a run that goes well",
            logged(
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Destroy COMPLETE",
            ),
        ),
        Fails(
            "an internal error of NCCL",
            logged("[rank1]: node1:41:77 [0] scheduler/list.cc:212 NCCL WARN Active list loop at element 12"),
            ranks=(1,),
        ),
        Fails(
            "a graph of Intel Gaudi",
            logged("[rank2]: [Rank:2] Habana exception raised from compile at graph.cpp:599"),
            ranks=(2,),
        ),
    ),
)
def library_error(job: Job) -> Iterator[Verdict]:
    """Ask whether a library or launcher reported an error that no other check covers.

    Why it hurts: the process fails, and the other ranks wait for it until their timeout or lose the connection.
    Fix: Search the documentation and the issues of the component for the message; include its release and the logs
    of all ranks in a bug report.
    """
    reported = 0
    for group in event_groups(job, "software.cause", by=("component", "message")):
        if reported < MOST and failed_before(job, group.first) is None:
            reported += 1
            yield finding_from_logs(
                group,
                f"{group.value('component')} failed: {_RANK.sub('', group.value('said') or '')}",
                evidence={"component": group.value("component")},  # ranks it as a message of software
                fix=_fix(group.value("component") or ""),
                confidence=0.5,
            )


def _fix(component: str) -> str:
    release, more = report_of(component)
    search = f"Search the documentation and the issues of {component} for the message, or report it with"
    commands = [*_COMMANDS.findall(release), *_COMMANDS.findall(more)]
    if more.startswith("`export ") and release.startswith("`"):
        below = "\n".join(commands)
        return f"{search} the output of these commands and the logs of all ranks of a rerun:\n{below}"
    rerun = f"a rerun with {more}" if more else "the run"
    shown = f"the output of {release}" if release.startswith("`") else release
    return f"{search} {shown} and the logs of all ranks of {rerun}."
