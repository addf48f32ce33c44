"""GPU013: NVLinks are down or report errors."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import GpuSharers, shares_by_host
from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Unknown, Verdict, check
from doctor.facts import Gpu, GpuFacts, KernelEvent, KernelLogFacts, MigDevice, NvLink
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged
from doctor_checks.devices._xid_events import XidReport, logged_xids, xids_of


def _links(count: int, down: tuple[int, ...] = (), fatal: int = 0, remote: str = "switch") -> tuple[NvLink, ...]:
    return tuple(NvLink(link, link not in down, remote, fatal, fatal) for link in range(count))


def _bridged(pairs: int) -> JobBuilder:
    sketch = healthy(per_host=4)
    for index in range(4):
        links = _links(12, () if index < 2 * pairs else tuple(range(12)), remote="gpu")
        sketch = sketch.gpu(index, name="NVIDIA A100 80GB PCIe", nvlinks=links)
    return sketch


_NONFATAL = "Nonfatal"
"""Word of the driver in the lines of NVLink 5 (Xids 144 to 150) about errors that it calls non-fatal."""


def _told(job: Job) -> Iterator[Finding]:
    for reported in logged_xids(job, {"nvlink"}):
        recovered = all(_NONFATAL in event.text for event in reported.events.events)
        yield reported.finding(("GPU010", "GPU018", "GPU022"), Severity.WARNING if recovered else None)


@check(
    id="GPU013",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    from_logs=_told,
    impacts={
        r"SXid \d+ before this job": "The switch may fail again during this job, which then fails or hangs.",
        r"^Xid.*before this job": (
            "The link may fail again during this job, which then ends or falls back to a slower path."
        ),
        r"^Xid|NVLink failed|over nvlink": (
            "Processes that use this link may fail or hang, and the other ranks then wait for them until the timeout."
        ),
        r"fatal SXid": (
            "Processes that use this switch fail or hang, and the other ranks wait for them until the timeout."
        ),
        r"^0 of \d+ NVLinks are active": "Traffic of this GPU uses PCIe or host memory, which is many times slower.",
        r"NVLinks are active": ("Traffic of this GPU uses fewer NVLinks, or PCIe, and is slower."),
        r"recovery errors?": (
            "Each recovery interrupts the traffic of the link. A link that fails to recover ends the job."
        ),
    },
    cases=lambda: (
        Passes("all links active", healthy(hosts=2, per_host=8)),
        Passes("cards without bridges", healthy(per_host=2).gpu(0, nvlinks=_links(4, (0, 1, 2, 3))).gpu(1, nvlinks=())),
        Passes("two bridged pairs", _bridged(2)),
        Passes("one bridged pair beside two cards without a bridge", _bridged(1), silent=False),
        Passes(
            "a GPU in slices, whose links rest",
            healthy(per_host=1, gpus=2).gpu(
                0, mig=True, mig_devices=(MigDevice("MIG-a", 0),), nvlinks=_links(18, tuple(range(18)))
            ),
        ),
        Passes("replays, which are repaired", healthy(per_host=1).gpu(0, nvlinks=(NvLink(0, True, "gpu", 12, 0),))),
        Passes(
            "an NVLink Xid before the last reset",
            healthy(per_host=1).alter(KernelLogFacts, events=(KernelEvent("xid", 9.0, 74, "0000:99:00"),)),
            silent=False,
        ),
        Fails(
            "two links of one GPU down",
            healthy(hosts=2, per_host=4).gpu(1, hosts=("node1",), nvlinks=_links(18, (4, 5))),
            ranks=(5,),
        ),
        Fails(
            "no link on one GPU of four", healthy(per_host=4).gpu(3, nvlinks=_links(18, tuple(range(18)))), ranks=(3,)
        ),
        Fails(
            "every GPU has only some of its links",
            healthy(per_host=2).gpu(0, nvlinks=_links(6, (4, 5))).gpu(1, nvlinks=_links(6, (4, 5))),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "recovery errors",
            healthy(per_host=2).gpu(0, nvlinks=_links(18, fatal=2)),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
        Fails(
            "a fatal error of an NVSwitch before this job",
            healthy(hosts=2, per_host=8).alter(
                KernelLogFacts,
                hosts=("node1",),
                events=(
                    KernelEvent("sxid", 9.0, 12028, "0000:05:00.0", text="SXid (PCI:0000:05:00.0): 12028, Non-fatal"),
                    KernelEvent("sxid", 9.5, 19084, "0000:05:00.0", text="SXid (PCI:0000:05:00.0): 19084, Fatal"),
                ),
            ),
            ranks=tuple(range(8, 16)),
            severity=Severity.WARNING,
        ),
        Fails(
            "Xid 74 since the job began",
            healthy(per_host=2).alter(KernelLogFacts, events=(KernelEvent("xid", 863100.0, 74, "0000:11:00"),)),
            ranks=(1,),
        ),
        Passes(
            "a log names links and errors that were repaired",
            logged(
                "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
                "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
            ),
        ),
        Fails(
            "an error that the driver calls non-fatal",
            logged("kernel: NVRM: Xid (PCI:0000:66:00): 145, RLW_CTRL Nonfatal XC1 i0 Link 10"),
            severity=Severity.WARNING,
        ),
        Fails(
            "logged by the driver and a switch",
            logged(
                "kernel: NVRM: Xid (PCI:0000:66:00): 145, RLW_CTRL Nonfatal XC1 i0 Link 10",
                "kernel: nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            ),
        ),
    ),
)
def nvlink_down(job: Job) -> Iterator[Verdict]:
    """Ask whether all NVLinks of each GPU are up and without fatal errors.

    Why it hurts: NCCL falls back to PCIe or shared memory for that GPU, which is many times slower, or fails to
    start. Errors that the link cannot recover from end the job.
    Fix: Check `nvidia-smi nvlink --status` and `nvidia-smi nvlink --errorcounters`, then reset the GPUs or reboot the
    host.
    """
    for local, found in shares_by_host(job):
        used = [share for share in found if share.ranks and not share.gpu.lost and not share.gpu.mig]
        active = [_active(share.gpu) for share in used]
        most: dict[str, int] = {}
        for share, links in zip(used, active, strict=True):
            most[share.gpu.name] = max(most.get(share.gpu.name, 0), links)
        for share, links in zip(used, active, strict=True):
            yield from _judge(local, share, links, most[share.gpu.name], len(used))
        for reported in xids_of(local, {"nvlink"}):
            yield _from_log(local, reported)
        # Fatal errors of NVSwitches ("SXid (PCI:…): 19084, Fatal, Link 40 …", NVIDIA Fabric Manager user guide). The
        # driver recovers from those that it calls non-fatal.
        log = local.find(KernelLogFacts)
        fatal = {
            (event.code, event.device): event
            for event in (log.events if log else ())
            if event.kind == "sxid" and ", fatal" in event.text.lower()
        }
        for (code, device), event in fatal.items():
            began = log.job_started if log else None
            recent = began is not None and event.time is not None and event.time >= began
            when = "" if recent or began is None or event.time is None else " before this job"
            yield Finding(
                f"The NVSwitch at {device} of {local.name} reported the fatal SXid {code}{when}",
                ranks=local.ranks,
                fix=f"End all processes on the GPUs of {local.name}, then reset them with `sudo nvidia-smi "
                "--gpu-reset` or "
                "reboot the host.",
                evidence={"sxid": code, "device": device, "seconds_since_boot": event.time, "kernel_log": event.text},
                severity=Severity.ERROR if recent else Severity.WARNING,
            )


def _active(gpu: Gpu) -> int:
    return [link.active for link in gpu.nvlinks or ()].count(True)


def _judge(local: LocalRanks, share: GpuSharers, active: int, most: int, peers: int) -> Iterator[Verdict]:
    gpu = share.gpu
    facts = local.find(GpuFacts) if gpu.nvlinks is None else None
    note = facts.why_hidden("gpus.nvlinks") if facts else None
    if note:
        yield Unknown(f"the NVLinks of GPU {gpu.index} cannot be read: {note.reason}", share.ranks, note.unhide)
        return
    total = len(gpu.nvlinks or ())
    if active < most or 0 < active < total:
        words = f"{active} of {total} NVLinks are active on {{gpu}}"
        yield _finding(local, share, words, _severity(gpu, active == most and peers > 1), most)
    if failing := [link for link in gpu.nvlinks or () if link.fatal]:
        errors = sum(link.fatal or 0 for link in failing)
        words = (
            f"{{gpu}} has {errors} recovery error{'' if errors == 1 else 's'} on "
            f"{len(failing)} NVLink{'' if len(failing) == 1 else 's'}"
        )
        yield _finding(local, share, words, Severity.WARNING, most)


def _severity(gpu: Gpu, all_alike: bool) -> Severity:
    """If all GPUs of the host lack the same links, the machine or virtual machine may be built that way. A PCIe card
    without any link, next to others that have links, usually has no bridge."""
    if all_alike:
        return Severity.WARNING
    return Severity.INFO if "pcie" in gpu.name.lower() and not _active(gpu) else Severity.ERROR


def _finding(local: LocalRanks, share: GpuSharers, words: str, severity: Severity, most: int) -> Finding:
    links = share.gpu.nvlinks or ()
    return Finding(
        words.format(gpu=f"GPU {share.gpu.index} of {local.name}"),
        ranks=share.ranks,
        evidence={
            "gpu": share.gpu.uuid,
            "inactive_links": [link.index for link in links if not link.active],
            "active_links_of_best_peer": most,
            "recovery_errors_by_link": {str(link.index): link.fatal for link in links if link.fatal},
            # Recovery errors are also errors.
            "errors_by_link": {str(link.index): link.errors for link in links if link.errors}
            if any(link.errors != link.fatal for link in links if link.errors)
            else {},
        },
        fix=_fix(local.name, share.gpu, severity),
        severity=severity,
        explains=("GPU018",),
    )


def _fix(host: str, gpu: Gpu, severity: Severity) -> str:
    if severity is Severity.INFO:
        return f"Install an NVLink bridge on GPU {gpu.index} of {host} if the job needs one."
    return (
        f"Check the links of GPU {gpu.index} of {host}, then reset the GPU or reboot the host:\n"
        f"nvidia-smi nvlink --status -i {gpu.index}\nnvidia-smi nvlink --errorcounters -i {gpu.index}"
    )


def _from_log(local: LocalRanks, reported: XidReport) -> Finding:
    severity = Severity.ERROR if reported.recent and _NONFATAL not in reported.last.text else Severity.WARNING
    healed = reported.recent is False and not any(
        0 < _active(gpu) < len(gpu.nvlinks or ()) for facts in [local.find(GpuFacts)] if facts for gpu in facts.gpus
    )
    if healed or not reported.ranks:
        return reported.finding(local, Severity.INFO, _WATCH)
    return reported.finding(local, severity)


_WATCH = "Report the GPU to the cluster administrators if the error recurs."
