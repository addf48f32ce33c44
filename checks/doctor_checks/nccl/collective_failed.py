"""NCCL013: NCCL failed, and the logs do not show why."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import events_of_kinds, failed_before
from doctor.analysis.logs.logging_advice import recorder_assignments
from doctor.api import EventGroup, Finding, Job, Scope, Severity, Verdict, check, finding_from_logs
from doctor.facts import Event
from doctor.knowledge.releases import is_older
from doctor.testing import Fails, Passes, logged

MEANINGS = (
    ("system error", "a system call failed on a socket, shared memory or an RDMA device"),
    ("cuda error", "a CUDA call in NCCL failed because of the driver, GPU memory or the GPU"),
    ("internal error", "NCCL reached an unexpected state, often because a peer had exited"),
    ("invalid usage", "NCCL rejected the call because two ranks use one GPU or a tensor is on the wrong device"),
    ("invalid argument", "an argument of the call is invalid, such as the root, the data type or a pointer"),
    ("remote process exited", "a peer exited, or the network to it failed"),
)
"""NCCL's text for a result (ncclGetErrorString, src/init.cc), and its possible meaning."""
_TIMEOUT = ("timeout", "a call did not complete in the time that the program or NCCL allows")
"""ncclTimeout, whose text is a part of other messages."""


@check(
    id="NCCL013",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="M",
    cases=lambda: (
        Passes(
            "communicators that were initialized and destroyed in order",
            logged(
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Destroy COMPLETE",
            ),
        ),
        Fails(
            "a result without a reason",
            logged(
                "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
                "ProcessGroupNCCL.cpp:1333, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
                "version 2.19.3",
                "ncclUnhandledCudaError: Call to CUDA function failed.",
                "Last error:",
            ),
        ),
        Fails(
            "a CUDA call of NCCL that failed for a reason that the result does not tell",
            logged("node1:41:77 [0] enqueue.cc:512 NCCL WARN Cuda failure 'invalid argument'"),
            severity=Severity.WARNING,
        ),
        Fails(
            "torch 1.x",
            logged(
                "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, internal error, NCCL "
                "version 2.7.8"
            ),
        ),
        Fails(
            "a result in a message of XLA",
            logged(
                "2026-01-02 03:04:05.678901: E external/xla/xla/service/gpu/nccl_utils.cc:191] Aborting communicator: "
                "0x57d4ac74802c due to async NCCL error: unhandled system error"
            ),
        ),
        Fails(
            "a call that NCCL only logs at the level INFO",
            logged(
                "node1:41:77 [0] NCCL INFO misc/socket.cc:564 -> 2",
                "node1:41:77 [0] NCCL INFO bootstrap.cc:270 -> 2",
                "node1:41:77 [0] NCCL INFO group.cc:64 -> 2 [Async thread]",
            ),
        ),
        Passes(
            "an inner call that fails where NCCL goes on",
            logged("node1:41:77 [0] NCCL INFO transport/p2p.cc:310 -> 3", "step 1: loss 0.5"),
        ),
        Fails(
            "log of a system call that NCCL does not name",
            logged(
                "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled system error, NCCL "
                "version 2.7.8"
            ),
        ),
    ),
)
def collective_failed(job: Job) -> Iterator[Verdict]:
    """Ask whether NCCL failed without logging the cause.

    Why it hurts: the rank fails, and the other ranks wait for it until their timeout.
    Fix: Run again with `NCCL_DEBUG=INFO` and read the first WARN line of the first rank that has one.
    """
    events = events_of_kinds(job, "torch.nccl.error", "torch.nccl.error.code", "torch.nccl.comm_error")
    gone = events_of_kinds(job, *_GONE)
    if events and not (gone and (_is_of_a_peer(events) or all(_is_last_error(one, gone) for one in events))):
        yield _finding(job, events)
    elif not events and (
        returned := _results_of_others(job) or _returned_errors(job) or _cuda_warnings(job) or _proxy_failures(job)
    ):
        yield _finding(job, returned)


_LAST_ERROR = 3
"""Lines from the result to the text of the last error: "Last error:" is a separate line."""
_GONE = ("nccl.peer_closed", "nccl.peer_closed.old", "nccl.recv_fail", "torch.store.recv0", "torch.store.op_failed")
"""Messages about a peer that exited; other checks report that exit."""


def _is_last_error(event: Event, gone: tuple[Event, ...]) -> bool:
    """Whether a peer that exited is the last error of NCCL, which torch prints below the result
    (getNcclErrorDetailStr in torch/csrc/distributed/c10d/NCCLUtils.cpp)."""
    below = (one for one in gone if one.file == event.file and 0 <= one.line - event.line <= _LAST_ERROR)
    return any("NCCL WARN" not in one.text for one in below)


def _is_of_a_peer(events: tuple[Event, ...]) -> bool:
    return all("remote" in event.text.lower() for event in events)


_RESULTS = {"1": "cuda error", "2": "system error", "3": "internal error", "4": "invalid argument"}
_RESULTS |= {"5": "invalid usage", "6": "remote process exited"}
"""Values of ncclResult_t (src/nccl.h.in)."""
_PUBLIC_CALLS = ("group.cc", "init.cc", "enqueue.cc")
"""Files of the calls that return a result to the program. NCCL can recover from failures of inner functions."""


def _results_of_others(job: Job) -> tuple[Event, ...]:
    """Results printed by programs other than PyTorch; RUN012 reports the exit of a peer."""
    return tuple(one for one in events_of_kinds(job, "nccl.result") if "remote" not in one.text)


def _proxy_failures(job: Job) -> tuple[Event, ...]:
    """Operations that failed in NCCL's proxy, with their result (proxyProgressAsync in src/proxy.cc)."""
    return tuple(one for one in events_of_kinds(job, "nccl.proxy_fail") if _PROXY_RESULT.search(one.text))


_PROXY_RESULT = re.compile(r"\b(?:res=|retcode )(?P<code>[1-6])\b")


def _cuda_warnings(job: Job) -> tuple[Event, ...]:
    """CUDA calls that failed in NCCL (CUDACHECK in src/include/checks.h): each returns an unhandled CUDA error."""
    return tuple(one for one in events_of_kinds(job, "nccl.cuda_fail") if "NCCL INFO" not in one.text)


def _returned_errors(job: Job) -> tuple[Event, ...]:
    """The lines of a failed call (``NCCL INFO group.cc:64 -> 2``, NCCLCHECK in src/include/checks.h): each function
    that returns an error logs one, the innermost first. Only those of a call that reached the program count."""
    lines = events_of_kinds(job, "nccl.abort_reason")
    failed = {
        (one.file, one.rank, one.host, one.value("code"))
        for one in lines
        if (one.value("file") or "").rpartition("/")[2] in _PUBLIC_CALLS and one.value("code") in _RESULTS
    }
    return tuple(one for one in lines if (one.file, one.rank, one.host, one.value("code")) in failed)


def _result_of(events: tuple[Event, ...]) -> tuple[str, str] | None:
    """The entry of :data:`MEANINGS` for the first result."""
    text = " ".join(event.text for event in events).lower()
    name = _RESULTS.get(events[0].value("code") or "") if events[0].kind == "nccl.abort_reason" else None
    name = "cuda error" if events[0].kind == "nccl.cuda_fail" else name
    if events[0].kind == "nccl.proxy_fail" and (result := _PROXY_RESULT.search(events[0].text)):
        name = _RESULTS[result["code"]]
    # torch names the constants: ncclUnhandledCudaError, ncclSystemError.
    return next(
        (one for one in MEANINGS if one[0] == name or one[0] in text or f"{one[0].replace(' ', '')}: " in text),
        MEANINGS[-1] if "ncclremoteerror" in text else _TIMEOUT if "nccltimeout" in text else None,
    )


def _variables(job: Job, events: tuple[Event, ...], level: str) -> str:
    release = next((found for event in events if (found := event.value("ver"))), None)
    if release is not None and is_older(release, _WITH_RECORDER):
        return f"export {level}NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH NCCL_DEBUG_FILE=nccl.%h.%p.log"
    return (
        f"export {level}NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH NCCL_DEBUG_FILE=nccl.%h.%p.log\n"
        f"export TORCH_NCCL_DUMP_ON_TIMEOUT=1 {recorder_assignments(job)}"
    )


_WITH_RECORDER = "2.19"
"""The NCCL of PyTorch 2.2, the first release with a flight recorder. Earlier ones lack the subsystem BOOTSTRAP
(src/include/nccl_common.h) or the recorder."""
_CUDA_REASON = re.compile(r"Cuda failure (?:\d+ )?'(?P<reason>[^'\n]{1,60})'")


def _finding(job: Job, events: tuple[Event, ...]) -> Finding:
    found = _result_of(events)
    cuda = _CUDA_REASON.search(events[0].text) if events[0].kind == "nccl.cuda_fail" else None
    reason = f": {cuda['reason']}" if cuda else ""
    result, meaning = found or (None, None)
    name = (result or "").replace("cuda", "CUDA")
    at = f" in {events[0].value('file')}" if events[0].kind == "nccl.abort_reason" else ""
    # At the level INFO, NCCL has logged the subsystems INIT, BOOTSTRAP and ENV by default (src/debug.cc).
    level = "" if any("NCCL INFO" in event.text for event in events) else "NCCL_DEBUG=INFO "
    return finding_from_logs(
        EventGroup(events[0].kind, events),
        f"NCCL failed ({name}{reason}{at}), and the logs do not show why"
        if found
        else "NCCL failed, and the logs do not show why",
        ranks=(),
        evidence={"may_mean": None if cuda else meaning},
        confidence=0.45,
        fix="Run again on all ranks with these variables, then pass the log files to `doctor diagnose`:\n"
        + _variables(job, events, level),
        explains=() if failed_before(job, events[0]) or _is_of_a_peer(events) else ("RUN004",),
        symptoms=False,
    )
