"""NCCL005: a configuration file changes the effective settings."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.effective_settings import group_by_value
from doctor.api import Finding, Job, Scope, Severity, Source, Unknown, Verdict, check
from doctor.facts import NcclFacts, Setting
from doctor.knowledge.variable_values import effective as effective_value
from doctor.testing import Fails, Passes, healthy

_FILE = Setting("NCCL_IB_DISABLE", "1", "system file", "/etc/nccl.conf", 4)
_USER = Setting("NCCL_P2P_LEVEL", "SYS", "user file", "/home/ann/.nccl.conf", 1)
_OVERRULED = Setting("NCCL_IB_DISABLE", "0", overrides=("/etc/nccl.conf:4=1",))


@check(
    id="NCCL005",
    severity=Severity.INFO,
    scope=Scope.HOST,
    needs=(NcclFacts,),
    cases=lambda: (
        Passes("no file", healthy(2, 1)),
        Passes("the environment alone", healthy(2, 1).environ(NCCL_ALGO="Ring")),
        Passes("the environment overrules the file", healthy(2, 1).alter(NcclFacts, settings=(_OVERRULED,))),
        Passes(
            "the file writes a default out",
            healthy(2, 1).alter(
                NcclFacts, settings=(Setting("NCCL_IB_DISABLE", "0", "system file", "/etc/nccl.conf", 1),)
            ),
        ),
        Fails(
            "the system's file",
            healthy(2, 2).alter(NcclFacts, hosts=("node1",), settings=(_FILE,)),
            ranks=(2, 3),
            hosts=("node1",),
        ),
        Fails("the user's file on all hosts", healthy(2, 1).alter(NcclFacts, settings=(_USER,)), ranks=(0, 1)),
    ),
)
def settings_from_file(job: Job) -> Iterator[Verdict]:
    """Ask whether a configuration file changes the settings that NCCL uses.

    Why it hurts: a setting that is not in the job script is easily overlooked. On a host without the file, NCCL runs
    with different settings.
    Fix: Move the settings that the job needs from the file into the job script.
    """
    for group in group_by_value(
        job,
        NcclFacts,
        lambda nccl, _: tuple(
            setting
            for setting in nccl.settings
            if setting.layer != "environment"
            and effective_value(setting.name, setting.value) != effective_value(setting.name, None)
        ),
    ):
        if group.value:
            yield _finding(group.value, group.ranks, f" on {job.place_of(group.ranks)}")
    for hidden, ranks in group_by_value(job, NcclFacts, lambda nccl, _: nccl.why_hidden("files")):
        if hidden is not None:
            yield Unknown(hidden.reason, ranks, hidden.unhide)


def _finding(settings: tuple[Setting, ...], ranks: tuple[int, ...], where: str) -> Finding:
    first = settings[0]
    files = list(dict.fromkeys(setting.source for setting in settings))
    names = ", ".join(f"{setting.name}={setting.value}" for setting in settings[:4])
    more = f" and {len(settings) - 4} more" if len(settings) > 4 else ""
    moved = ", ".join(setting.name for setting in settings[:4]) + more
    return Finding(
        f"{' and '.join(files)}{where} {'sets' if len(files) == 1 else 'set'} {names}{more}",
        ranks=ranks,
        evidence={f"{setting.source}:{setting.line}": f"{setting.name}={setting.value}" for setting in settings},
        fix=f"Move {moved} from {' and '.join(files)}{where} into the job script.",
        source=Source(first.source, first.line),
    )
