"""Process ends that Python does not report: crashes and aborts of native code, and commands that never started."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from doctor.analysis.hang.exits import nature_of
from doctor.analysis.logs.root_event import LOST_PEERS, TIMED_OUT, exceptions, nature_of_exception
from doctor.api import EventGroup, Job
from doctor.facts import Event, Failure, LogEvidence

_CAUSES = ("end.assertion", "end.heap", "end.terminate")
"""Messages that give the reason of an abort; the shell reports only that it happened."""
_NEAR = 10
"""Lines after a terminate message within which C++ prints the exception."""


class NativeCrash(msgspec.Struct, frozen=True):
    """How a process ended: the log events, a ``claim`` (``crashed: Segmentation fault``), and a fix.
    ``states_cause``: the evidence shows why, as a failed start does and a signal does not."""

    events: EventGroup
    claim: str
    fix: str
    states_cause: bool


def native_crashes(job: Job) -> NativeCrash | None:
    """The first process that ended in native code or failed to start, if it is a cause and the run did not continue.

    Watchdogs abort their process on purpose after a timeout or a lost peer; such an end is a consequence."""
    evidence = job.evidence
    if evidence is None:
        return None
    reporters = ("slurm.task_exit", "mpi.peer_exit", "elastic.", "python.fatal")
    reported = {(one.file, one.line) for one in evidence.of(*reporters)}
    ends = [
        one for one in evidence.of(*_CAUSES, "end.signal", "end.not_started") if (one.file, one.line) not in reported
    ]
    fatal = [one for one in ends if not _is_outlived(evidence, one) and not _is_consequence(evidence, one)]
    if not fatal:
        return None
    first = next((one for one in fatal if one.kind in _CAUSES), fatal[0])
    claim, fix = _claim(evidence, first)
    rest = (one for one in (*fatal, *_whats(evidence, first)) if one is not first)
    return NativeCrash(EventGroup(first.kind, (first, *rest)), claim, fix, first.kind == "end.not_started")


def _is_outlived(evidence: LogEvidence, end: Event) -> bool:
    steps = (one for one in evidence.marks if one.kind in ("mark.step", "mark.end"))
    later = (*steps, *evidence.of("run.ended_well"))
    return any(one.file == end.file and one.line > end.line for one in later)


def _is_consequence(evidence: LogEvidence, end: Event) -> bool:
    """Whether a process aborted itself because its peers were lost or late; a crash never is a consequence."""
    if end.kind == "end.terminate":
        thrown = end.value("type") or ""
        kind = "RuntimeError" if thrown.startswith(("c10::", "torch::", "gloo::")) else thrown
        return nature_of(Failure(kind, _what(evidence, end))) != "own" or _lost_before(evidence)
    return end.kind == "end.signal" and end.value("what") == "Aborted" and _lost_before(evidence)


def _lost_before(evidence: LogEvidence) -> bool:
    natures = (nature_of_exception(one) for one in exceptions(evidence))
    return bool(evidence.of(*TIMED_OUT, *LOST_PEERS)) or any(nature in ("timeout", "peer") for nature in natures)


def _what(evidence: LogEvidence, end: Event) -> str:
    return next((one.value("what") or "" for one in _whats(evidence, end)), "")


def _whats(evidence: LogEvidence, end: Event) -> Iterator[Event]:
    return (one for one in evidence.of("end.what") if one.file == end.file and 0 <= one.line - end.line <= _NEAR)


def _claim(evidence: LogEvidence, end: Event) -> tuple[str, str]:
    if end.kind == "end.not_started":
        return f"never began: {end.text}", _FIX_OF_START
    if end.kind == "end.terminate":
        what = _what(evidence, end)
        thrown = end.value("type")
        fix = _FIX_OF_THROWN if (thrown or "").startswith(("c10::", "torch::")) else _FIX_OF_ABORT
        return f"aborted: {thrown or end.text}{f': {what}' if what else ''}", fix
    if end.kind == "end.assertion":
        place = f"{end.value('file')}:{end.value('line')}"
        return f"aborted: `{end.value('condition')}` failed at {place}", _FIX_OF_ABORT
    if end.kind == "end.heap":
        return f"aborted: {end.value('what')}", _FIX_OF_ABORT
    signal = _signal_named(end.value("what") or end.text)
    if "SIGABRT" in signal:
        return "aborted (SIGABRT)", _FIX_OF_ABORT
    return f"crashed: {signal}", FIX_OF_ILLEGAL_INSTRUCTION if "SIGILL" in signal else _FIX_OF_CRASH


def _signal_named(text: str) -> str:
    """``SIGABRT``, ``Segmentation fault (SIGSEGV)``."""
    words = next((words for words in _SIGNALS if words in text), "")
    if words:
        return f"{words} ({_SIGNALS[words]})"
    if found := re.search(r"\bSIG[A-Z]{2,8}\b", text):
        return next((f"{words} ({name})" for words, name in _SIGNALS.items() if name == found[0]), found[0])
    found = re.search(r"[Ss]ignal (\d{1,2}) \(([\w ]{1,40})", text)
    return f"{found[2]} (signal {found[1]})" if found else text.strip(" *")[:60]


_SIGNALS = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Segmentation fault": "SIGSEGV",
}
"""Signals as shells print them (strsignal(3))."""


_FIX_OF_START = "Install the command in the environment or container in which it ran, or correct its path."
_FIX_OF_ABORT = "Set `PYTHONFAULTHANDLER=1` and rerun the job to see which call aborts."
_FIX_OF_THROWN = (
    "Set `PYTHONFAULTHANDLER=1` and `TORCH_SHOW_CPP_STACKTRACES=1`, and rerun the job to see which call aborts."
)
"""For exceptions of PyTorch, whose messages then contain the stack of C++."""
FIX_OF_ILLEGAL_INSTRUCTION = (
    "Compare the CPU instructions for which the compiled libraries of the program were built with the flags that "
    "`lscpu` shows on its host, and install a build for this CPU."
)
_FIX_OF_CRASH = "Set `PYTHONFAULTHANDLER=1` and rerun the job to see which call crashes."
