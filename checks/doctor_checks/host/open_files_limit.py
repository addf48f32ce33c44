"""HOST002: the soft limit of open files is low."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, Scope, Severity, Unknown, Verdict, check, hosts_text
from doctor.facts import UNLIMITED, Limit, ProcessFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy
from doctor_checks.host._hard_limits import raise_hard_limit


def _limited(soft: int, hard: int) -> JobBuilder:
    return healthy(hosts=2).alter(ProcessFacts, ranks=(2, 3), limits=(Limit("open_files", soft, hard),))


@check(
    id="HOST002",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PM",
    needs=(ProcessFacts,),
    impacts={
        r"tensor in shared memory": (
            "The process that reads the batch fails, and the other ranks wait for it until their timeout."
        ),
        r"reached its": (
            'The process fails with "Too many open files", and the other ranks wait for it until their timeout.'
        ),
    },
    cases=lambda: (
        Passes("65,536 files", healthy(hosts=2)),
        Passes("1,024 files, the default of login shells", _limited(1024, 1048576)),
        Passes("no limit", _limited(UNLIMITED, UNLIMITED)),
        Fails("ulimit -n 256 on one host", _limited(256, 1048576), ranks=(2, 3)),
        Fails("hard limit low as well", _limited(512, 512), ranks=(2, 3)),
    ),
)
def open_files_limit(job: Job, *, least: float = 1024) -> Iterator[Verdict]:
    """Ask whether every process may open 1,024 files.

    Why it hurts: the run fails with "Too many open files" as soon as sockets, data files and tensors from DataLoader
    workers together exceed the limit.
    Fix: Run `ulimit -n "$(ulimit -Hn)"` before starting the job, or call
    `torch.multiprocessing.set_sharing_strategy("file_system")`.
    """
    # 1,024 is the default of the kernel and systemd (INR_OPEN_CUR in include/uapi/linux/fs.h); a lower limit was set on
    # purpose.
    low: dict[tuple[int, int], list[int]] = {}
    unread: list[int] = []
    for process, identical in job.facts(ProcessFacts):
        limit = process.limit("open_files")
        if limit is None:
            unread.extend(identical.ranks)
        elif limit.soft != UNLIMITED and limit.soft < least:
            low.setdefault((limit.soft, limit.hard), []).extend(identical.ranks)
    for (soft, hard), ranks in low.items():
        yield Finding(
            f"Open-file limit on {hosts_text(job.hosts_of(ranks))} is only {soft:,}",
            ranks=tuple(ranks),
            evidence={"soft_limit": soft, "hard_limit": hard, "recommended_minimum": int(least)},
            fix=_fix(job, tuple(ranks), soft, hard),
        )
    if unread:
        yield Unknown("the open-files limit could not be read", tuple(unread), "ulimit -n in the job's shell")


def _fix(job: Job, ranks: tuple[int, ...], soft: int, hard: int) -> str:
    if hard == UNLIMITED or hard > soft:
        command = f"ulimit -n {'1048576' if hard == UNLIMITED else hard}"
        return f"Raise the limit on {hosts_text(job.hosts_of(ranks))} before starting the job:\n{command}"
    return raise_hard_limit(job, ranks, "nofile", "LimitNOFILE", "1048576")
