"""NCCL015: a collective library other than NCCL reported an error."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import EventGroup, Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs, ranks_in_words
from doctor.testing import Fails, Passes, logged

CODES = {
    "EI0002": ("a rank did not reach a collective within HCCL_EXEC_TIMEOUT", True),
    "EI0004": ("the rank table is not valid, or does not fit the devices", False),
    "EI0005": ("ranks called a collective with different arguments", False),
    "EI0006": ("a rank did not connect within HCCL_CONNECT_TIMEOUT", True),
    "EI0013": ("a RoCE transfer was not acknowledged by the peer", True),
    "EJ0001": ("processes of another run still use the devices, or the run was started twice", False),
    "EJ0003": ("a port of HCCL is in use: processes of another run are left", False),
}
"""Error codes of HCCL (CANN's HCCL user guide): what they mean, and whether a peer may be the cause."""


@check(
    id="NCCL015",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="M",
    impacts={
        r"did not connect": (
            "The communicator cannot be created, and all ranks fail at startup when the connection times out."
        ),
        r"failed link|port issue": "GPUs that use this link cannot exchange data, and the collective fails.",
        r"not supported": "The call fails on every rank.",
    },
    cases=lambda: (
        Passes("a hint of oneCCL", logged("2026:01:02-03:04:05:( 4242) |CCL_WARN| value of CCL_ATL_TRANSPORT changed")),
        Fails(
            "oneCCL's transport",
            logged(
                "[rank1]: 2026:01:02-03:04:05:( 4242) |CCL_ERROR| atl_ofi.cpp:512 ep_poll: fi_cq_readerr: err: 5, "
                "prov_err: Input/output error"
            ),
            ranks=(1,),
        ),
        Fails(
            "a collective of Intel Gaudi",
            logged("[rank1]: RuntimeError: Collective call returned error"),
            ranks=(1,),
        ),
        Fails(
            "HCCL waits for a rank",
            logged(
                "[rank0]: EI0006: [PID: 7] 2025-07-01-00:40:04.135.732 Getting socket times out. Reason: Remote Rank "
                "did not send the data in time."
            ),
        ),
    ),
)
def vendor_collective_error(job: Job) -> Iterator[Verdict]:
    """Ask whether oneCCL, HCCL or another vendor's collective library reported an error.

    Why it hurts: the rank fails, and the other ranks wait for it until their timeout.
    Fix: Find the first error in the logs of all ranks, because later errors are consequences of it.
    """
    groups = list(event_groups(job, "collective.vendor", by=("code",)))
    # A code is more specific than the lines without one that follow it.
    for group in [group for group in groups if group.value("code") in CODES] or groups[:1]:
        meaning, of_peer = CODES.get(group.value("code") or "", ("", False))
        host = _HOST.search(group.first.text) if group.value("text7") else None
        yield finding_from_logs(
            group,
            _claim(group, meaning),
            ranks=() if of_peer else (int(host["rank"]),) if host and host["rank"] else None,
            hosts=(host["host"],) if host else (),
            confidence=0.6 if of_peer else 0.85,
            fix=_fix(group),
        )


def _fix(group: EventGroup) -> str:
    code = group.value("code")
    if code:
        return _FIXES.get(code) or (
            f"Find the first error in {_LOGS} on all hosts, and look up {code} in the HCCL user guide."
        )
    if group.value("text7"):
        host = found["host"] if (found := _HOST.search(group.first.text)) else "the host"
        return f"Exclude {host} from the job until the link between its GPUs is repaired."
    if status := group.value("text8"):
        return _SYNAPSE_STATUS.get(status.rpartition(" ")[2], ("", ""))[1]
    if "average operation is not supported" in group.first.text:
        return "Use `ReduceOp.SUM` and divide by the number of ranks, instead of `ReduceOp.AVG`."
    if _is_of_oneccl(group):
        return (
            "Run the job again with these variables, and find the first error in the logs of all ranks:\n"
            "export CCL_LOG_LEVEL=info FI_LOG_LEVEL=warn"
        )
    return ""


_FIX_OF_LEFT_OVERS = "End the processes of the other run, which `npu-smi info` lists."
_LOGS = "~/ascend/log/debug/plog"
_FIXES = {
    "EI0002": f"Find the rank that failed or hangs by the first error in {_LOGS} of all hosts, or raise "
    "HCCL_EXEC_TIMEOUT if a rank only takes longer.",
    "EI0004": "Correct the rank table, so that it lists the devices of this job.",
    "EI0005": "Call the collective with the same arguments on all ranks.",
    "EI0006": f"Find the rank that failed or started late by the first error in {_LOGS} of all hosts, or raise "
    "HCCL_CONNECT_TIMEOUT if ranks only start slowly.",
    "EI0013": "Check the process of the peer, and the links of the devices that the message names with `hccn_tool -i "
    "DEVICE -link -g`.",
    "EJ0001": _FIX_OF_LEFT_OVERS,
    "EJ0003": _FIX_OF_LEFT_OVERS,
}
_SYNAPSE_STATUS = {
    "4": ("synOutOfDeviceMemory", ""),
    "8": ("synNoDeviceFound", "Check with `hl-smi` that the driver shows the devices of the host."),
    "16": ("synFailedNotEnoughDevicesFound", "Start at most as many processes as `hl-smi` shows idle devices."),
    "17": ("synDeviceReset", "Find in `dmesg -T | grep -i habanalabs` why the driver resets the device."),
    "20": (
        "synDeviceAlreadyAcquired",
        "Find an HCL error before this line, or the process that holds the device (`hl-smi` lists it).",
    ),
    "22": ("synBusy", ""),
    "40": ("synFailHccl", ""),
}
"""Statuses of Intel Gaudi's Synapse API (synapse_common_types.h): their names, and a fix."""
_HCCL_RESULTS = {
    "1": "HCCL_E_PARA",
    "3": "HCCL_E_MEMORY",
    "4": "HCCL_E_INTERNAL",
    "6": "HCCL_E_NOT_FOUND",
    "7": "HCCL_E_UNAVAIL",
    "8": "HCCL_E_SYSCALL",
    "9": "HCCL_E_TIMEOUT",
    "11": "HCCL_E_TCP_CONNECT",
    "12": "HCCL_E_ROCE_CONNECT",
    "15": "HCCL_E_RUNTIME",
    "16": "HCCL_E_DRV",
}
"""Results of CANN's HCCL (hccl_types.h)."""
_HOST = re.compile(r"\bhost: (?P<host>[\w.-]{1,253})(?:, rank: (?P<rank>\d{1,7})\b)?")
_OF_DEVICE = re.compile(r"\bDevice:(?P<device>\d{1,4})\b[^\n]{0,40}?\b(?P<code>ERR\d{5})\b")
_SYNAPSE_CALL = re.compile(r"\b(?P<call>syn\w{1,60})\([^\n]{0,200}\) failed with synapse error")
_DETAILS = re.compile(r"details: (?P<details>[^}\n]{1,80}?) ?\}")


def _is_of_oneccl(group: EventGroup) -> bool:
    text = group.first.text
    return group.value("text7") is not None or "oneCCL" in text or "CCL_ERROR" in text


def _claim(group: EventGroup, meaning: str) -> str:
    text = group.value("text", "text2", "text3", "text4", "text5", "text6", "text8") or ""
    if code := group.value("code"):
        who = f" on {ranks_in_words(group.ranks)}" if group.ranks else ""
        return f"HCCL failed with {code}{who}: {meaning or text}"
    if call := group.value("call"):
        result = group.value("result") or ""
        name = f" ({_HCCL_RESULTS[result]})" if result in _HCCL_RESULTS else ""
        return f"HCCL failed: {call} returned {result}{name}"
    if port := group.value("text7"):
        details = found["details"] if (found := _DETAILS.search(port)) else port
        details = "link training timed out" if details == "training timeout" else details
        of = f" of {found['host']}" if (found := _HOST.search(group.first.text)) else ""
        return f"oneCCL found a failed link between GPUs{of}: {details}"
    if group.value("text4"):
        found = _OF_DEVICE.search(group.first.text)
        return f"An HCCL call failed on device {found['device']} ({found['code']})" if found else "An HCCL call failed"
    if group.value("text8"):
        call = found["call"] if (found := _SYNAPSE_CALL.search(group.first.text)) else "An HCCL call"
        status = text.rpartition(" ")[2]
        name = f" ({_SYNAPSE_STATUS[status][0]})" if status in _SYNAPSE_STATUS else ""
        return f"{call} failed with Synapse status {status}{name}"
    if _is_of_oneccl(group):
        where = group.value("function", "function2")
        return f"oneCCL failed in {where}: {text}"
    return f"{group.value('library') or 'HCCL'} failed: {text}"
