"""RUN019: lines that look like errors, and that no check explains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import shorten

from doctor.analysis.logs.error_lines import errors_in, orderly_ends, unexplained_lines
from doctor.analysis.logs.log_component import component_of
from doctor.analysis.logs.root_event import launcher_reports
from doctor.api import EventGroup, Job, Scope, Severity, Verdict, check, finding_from_logs, ranks_in_words
from doctor.facts import Event, LogEvidence, ProgressFacts
from doctor.testing import Fails, Passes, logged

_WARN = "node1:41:77 [3] transport/net_socket.cc:12 NCCL WARN Net : something that no release said before"
_AGENT = "torch/distributed/elastic/multiprocessing/api.py"
_MOST_QUOTED = 48
"""Characters of the error that the summary quotes."""


@check(
    id="RUN019",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="M",
    last_resort=True,
    cases=lambda: (
        Passes(
            "words of errors in a line that is none",
            logged("Could not find cached file, downloading", "step 1: loss 0.5"),
        ),
        Passes(
            "an error that the run survived",
            logged("ERROR: sample 17 is broken", *(f"step {step}: loss 0.5" for step in range(20))),
        ),
        Passes("an error before an orderly end", logged("ERROR: retrying the download", "Training finished.")),
        Passes(
            "what torchrun prints while it ends the other processes",
            logged(
                f"W1218 20:27:21.426000 140 {_AGENT}:900] Sending process 124 closing signal SIGTERM",
                f"W1218 20:27:51.426000 140 {_AGENT}:916] Unable to shutdown process 124 via Signals.SIGTERM, "
                "forcefully exiting via Signals.SIGKILL",
                f"E1218 20:27:52.426000 140 {_AGENT}:874] failed (exitcode: 1) local_rank: 3 (pid: 127) of binary: "
                "/usr/bin/python3",
            ),
        ),
        Fails("a warning of NCCL that no check knows", logged(_WARN), hosts=("node1",), ranks=()),
        Fails(
            "the first of two errors, from a logger",
            logged(
                "2026-01-02 03:04:05,678 - mypkg.engine - ERROR - the state is inconsistent",
                "2026-01-02 03:04:06,678 - mypkg.engine - CRITICAL - giving up",
            ),
        ),
    ),
)
def unexplained_error(job: Job) -> Iterator[Verdict]:
    """Ask whether logs contain errors that no check explains.

    Why it hurts: the run may have failed for a reason that rankdoctor does not know; nothing else was found.
    Fix: Search the documentation and the issues of the component that logged the first error, or run `doctor diagnose`
    on the complete logs of all ranks.
    """
    evidence = job.evidence
    if evidence is None or _is_recorded(job):
        return
    found = unexplained_lines(evidence, evidence.quoted)
    errors = _without_launcher(evidence, errors_in(evidence, found))
    if not errors or orderly_ends(evidence, found):
        return
    first = errors[0]
    component = component_of(first)
    name = component.name if component else None
    words = f'"{_shortened(first.text, name)}"'
    yield finding_from_logs(
        EventGroup(first.kind, tuple(errors)),
        f"No check explains the first error{_origin(first, name)}: {words}",
        ranks=(first.rank,) if first.rank is not None else (),
        fix=_fix(name or "the program that logged it", words, component.collect if component else ""),
        confidence=0.3,
        explains=("RUN004", "RUN012"),
        symptoms=False,
    )


def _fix(name: str, error: str, collect: str) -> str:
    search = f"Search the documentation and the issues of {name} for {error}"
    diagnose = f"{search}, or run `doctor diagnose` on the complete logs of all ranks"
    commands = re.findall("`([^`]+)`", collect)
    if collect == " and ".join(f"`{one}`" for one in commands if one.startswith("export ")) != "":
        return "\n".join((f"{diagnose} of a rerun with these settings:", *commands))
    rest = f" of a rerun with {collect}" if "`export " in collect else f", and include {collect}" if collect else ""
    return f"{diagnose}{rest.rstrip('.')}."


def _is_recorded(job: Job) -> bool:
    """Whether the callback recorded that all ranks ended or continue: then an error in a log was survived."""
    records = [facts for facts, _ in job.each(ProgressFacts) if facts.stage]
    return bool(records) and all(one.state in ("ended", "running") for one in records)


_LAUNCHER = "torch.distributed.elastic"
_EXITS = ("elastic.failed", "elastic.entry", "elastic.child_line")
"""torchrun's reports of the exit of a process."""
_TAKEDOWN = ("elastic.no_error_file", "elastic.closing", "elastic.force", "elastic.sigkill_left")
"""What torchrun prints in addition to its report, and while it ends the other processes (errors and api.py of
torch/distributed/elastic/multiprocessing)."""


def _without_launcher(evidence: LogEvidence, errors: list[Event]) -> list[Event]:
    """The errors without a launcher's lines about the end of a process that it reported: the error is in that process.

    Events are the first lines of their kind, so that repeated ones are found by the beginning of their message."""
    reports = tuple(launcher_reports(evidence))
    signals = evidence.of("elastic.sigexc", "elastic.sigrecv")
    if not evidence.of(*_EXITS) and not reports and not signals:
        return errors
    consequences = [one for one in evidence.of("software.consequence") if one.value("component") == _LAUNCHER]
    known = (*evidence.of(*_EXITS, *_TAKEDOWN), *signals, *reports, *consequences)
    places, texts = {(one.file, one.line) for one in known}, {one.text.strip() for one in known}
    beginnings = {(one.value("message") or "").partition("%s")[0] for one in consequences} - {""}
    return [
        one
        for one in errors
        if (one.file, one.line) not in places
        and one.text.strip() not in texts
        and not any(beginning in one.text for beginning in beginnings)
    ]


def _origin(first: Event, name: str | None) -> str:
    who = ranks_in_words((first.rank,)) if first.rank is not None else first.host
    return (f" from {name}" if name else "") + (f" on {who}" if who else "")


def _shortened(text: str, name: str | None) -> str:
    words = _LEVEL.sub("", text.removeprefix(name or "").lstrip(" -:")) or text
    return shorten(words, _MOST_QUOTED, placeholder=" …")


_LEVEL = re.compile(r"^(?:\S{1,80}:\d{1,6} )?(?:NCCL WARN|ERROR|CRITICAL|FATAL|WARNING)[ :-]{1,4}")
