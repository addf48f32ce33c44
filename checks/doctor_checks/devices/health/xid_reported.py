"""GPU010: the driver reported a GPU fault in the kernel log."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.facts import GpuFacts, KernelEvent, KernelLogFacts, MissingReason
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks.devices._xid_events import XidReport, logged_xids, xids_of

OWN = ("hardware", "application", "notice")
ALL = (*OWN, "memory", "nvlink", "lost")
"""Without NVML, the checks of memory, NVLink and lost devices do not report their Xids, so this check does."""


def _line(code: int, time: float, device: str = "0000:11:00", words: str = "") -> KernelEvent:
    text = f"NVRM: Xid (PCI:{device}): {code}, pid=4242, name=python, {words}"
    return KernelEvent("xid", time, code, device, 4242, text)


def _told(job: Job) -> Iterator[Finding]:
    for reported in logged_xids(job, OWN):
        severity = Severity.ERROR if reported.is_listed else Severity.WARNING
        if reported.known.kind in ("application", "notice"):
            severity = Severity.INFO
        yield reported.finding(("GPU022",), severity)


@check(
    id="GPU010",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    from_logs=_told,
    impacts={
        r"fallen off": (
            "Programs on this GPU fail or hang, and the other ranks wait for them until their timeout. The host "
            "needs a reboot."
        ),
        r"after a program error": (
            "The GPU itself is not at fault: the program fails, and the other ranks wait for it until their timeout."
        ),
        r"illegal memory access": (
            'The GPU itself is usually not at fault: the program fails with "an illegal memory access was encountered".'
        ),
        r"after the program ended": "None by itself: the driver removes what a program left on the GPU when it ends.",
        r"not in rankdoctor's": "Unknown. Many Xids end or block the programs on the GPU.",
        r"before this job": "The fault often recurs on the same GPU; it then ends or blocks the rank that uses it.",
        r"GSP": (
            "The driver can no longer control the GPU: programs on it hang until the host is rebooted or the "
            "GPU is reset."
        ),
    },
    cases=lambda: (
        Passes(
            "no GPU and no kernel log",
            healthy(per_host=2, gpus=0).drop(KernelLogFacts, MissingReason.HIDDEN, "a container"),
        ),
        Passes("a quiet kernel log", healthy(hosts=2, per_host=2)),
        Passes("no GPU, other kernel events", healthy(gpus=0).alter(KernelLogFacts, events=(KernelEvent("oom", 5.0),))),
        Passes(
            "a memory Xid, which another check covers",
            healthy(per_host=2).alter(KernelLogFacts, events=(_line(48, 863500.0),)),
        ),
        Passes(
            "the driver takes its request for a reset back",
            healthy(per_host=2).alter(
                KernelLogFacts,
                events=(
                    _line(
                        154, 863500.0, words="GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
                    ),
                ),
            ),
        ),
        Passes(
            "an illegal access of the last program",
            healthy(per_host=2).alter(KernelLogFacts, events=(_line(31, 863500.0),)),
            silent=False,
        ),
        Fails(
            "the GPU's system processor stopped answering in this job",
            healthy(hosts=2, per_host=2).alter(KernelLogFacts, hosts=("node1",), events=(_line(119, 863500.0),)),
            ranks=(3,),
        ),
        Fails(
            "fallen off the bus, and the driver hangs",
            healthy(per_host=2)
            .drop(GpuFacts, MissingReason.TIMEOUT, "the gpus collector did not end within 10 s")
            .alter(KernelLogFacts, events=(_line(79, 863500.0),)),
            ranks=(0, 1),
        ),
        Fails(
            "a context-switch time-out before this job",
            healthy(per_host=2).alter(KernelLogFacts, events=(_line(109, 500.0), _line(109, 501.0))),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Fails(
            "a program that was killed",
            healthy(per_host=2).alter(KernelLogFacts, events=(_line(45, 500.0, "0000:10:00"),)),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "a code that no table has",
            healthy(per_host=2).alter(KernelLogFacts, events=(_line(999, 863500.0, "0000:99:00"),)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes(
            "a log names an Xid that follows a fault of the program",
            logged(
                "[86400.5] NVRM: Xid (PCI:0000:0f:00): 31, pid=7194, name=python, Ch 00000008, intr 00000000. MMU "
                "Fault",
                "[86401.5] NVRM: Xid (PCI:0000:0f:00): 43, pid=7194, name=python, Ch 00000008",
            ),
            silent=False,
        ),
        Fails(
            "logged by the driver",
            logged(
                "Jan 02 03:04:05 node7 kernel: NVRM: Xid (PCI:0000:4f:00): 119, pid=7194, name=python, Timeout after "
                "6s of waiting for RPC response from GPU1 GSP!"
            ),
        ),
    ),
)
def xid_reported(job: Job) -> Iterator[Verdict]:
    """Ask whether the NVIDIA driver reported a fault of a GPU (an Xid) in the kernel log.

    Why it hurts: a hardware Xid usually ends or blocks the programs on that GPU, and the other ranks only see a
    timeout. The fault often recurs on the same GPU.
    Fix: Look up the code in NVIDIA's Xid catalog (https://docs.nvidia.com/deploy/xid-errors/) and follow its action;
    `sudo dmesg -T | grep -i xid` prints the lines.
    """
    judged = [local for local in job.by_host() if local.find(KernelLogFacts) or _has_gpus(local)]
    if not judged:
        reasons = (host.missing(GpuFacts) for host in job.hosts)
        yield Skip(next((one.reason for one in reasons if one and one.lack is MissingReason.UNMEASURED), "no GPU"))
    for local in judged:
        missing = local.hosts[0].missing(KernelLogFacts)
        if missing:
            yield Unknown(missing.reason, local.ranks, missing.unhide)
        for reported in xids_of(local, OWN if local.find(GpuFacts) else ALL):
            yield reported.finding(local, _severity(reported))


def _has_gpus(local: LocalRanks) -> bool:
    missing = local.hosts[0].missing(GpuFacts)
    return missing is None or missing.lack not in (MissingReason.ABSENT, MissingReason.UNMEASURED)


def _severity(reported: XidReport) -> Severity:
    if reported.known.kind in ("application", "notice") or not reported.ranks:
        return Severity.INFO
    return Severity.ERROR if reported.recent and reported.is_listed else Severity.WARNING
