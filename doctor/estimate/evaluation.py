"""An estimate as a job of one node, judged by the checks that read estimates everywhere, and its report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from doctor.core.facts import (
    EnvironmentFacts,
    EstimateFacts,
    Gpu,
    GpuFacts,
    HostFacts,
    LaunchFacts,
    Missing,
    MissingReason,
    Section,
    Variable,
)
from doctor.core.job import Job, Member, build_job
from doctor.estimate.data_model import Estimate
from doctor.estimate.device_budget import DeviceBudget

if TYPE_CHECKING:
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.report_document import Report
    from doctor.core.settings import Settings

IDS = ("GPU007", "MEM005", "MEM008")
"""The checks that an estimate can be judged by."""

NO_DEVICE = Missing(
    MissingReason.HIDDEN, "nobody said how much memory a device has", "give --device, --device-memory or --like CAPTURE"
)
NO_HOST = Missing(
    MissingReason.HIDDEN, "nobody said how much memory a node has", "give --host-memory or --like CAPTURE"
)

NODE = "node"
"""The name of the node where no capture has a better one."""


def report_of(
    estimate: Estimate, offer: DeviceBudget, catalog: CheckRegistry, settings: Settings, *, started: float
) -> Report:
    """The report document: ``job`` is null, ``estimate`` holds the answer. A bound that does not fit proves nothing:
    then the verdict is inconclusive."""
    from doctor.session import judge

    job = job_of(estimate, offer)
    report = judge(job, _chosen(catalog), settings, must_be_complete=False, started=started)
    if _is_undecided(estimate) and report.verdict == "pass":
        report = msgspec.structs.replace(report, verdict="inconclusive", exit_code=report.exit_code or 3)
    return msgspec.structs.replace(report, job=None, estimate=document_of(estimate))


def _chosen(catalog: CheckRegistry) -> CheckRegistry:
    from doctor.core.check_registry import CheckRegistry as Chosen

    return Chosen(tuple(check for check in catalog.checks if check.id in IDS), catalog.broken)


def document_of(estimate: Estimate) -> dict[str, object]:
    """The answer as the mapping that the report holds."""
    document: dict[str, object] = msgspec.to_builtins(estimate)
    return document


def _is_undecided(estimate: Estimate) -> bool:
    return bool(estimate.bound) and estimate.device_memory is not None and estimate.fits is None


def job_of(estimate: Estimate, offer: DeviceBudget) -> Job:
    """One node of the job, with what each of its ranks will need."""
    host: Section | Missing = offer.host or NO_HOST
    gpus = _gpus(estimate, offer)
    members = [
        Member(rank, {HostFacts.key: host, GpuFacts.key: gpus, **dict(sections)}, (None, None, NODE))
        for rank, sections in enumerate(_ranks(estimate))
    ]
    return build_job(members, world_size=len(members), launcher="none")


def _ranks(estimate: Estimate) -> Iterator[dict[str, Section]]:
    plan, host = estimate.plan, estimate.host
    ranks = plan.devices * plan.ranks_per_device
    peaks = EstimateFacts(
        device_peak=estimate.peak_bytes,
        # Not every run loads a checkpoint; the report says what comes on top when one does.
        host_peak=(host.total - host.checkpoint) // max(1, host.ranks),
        largest_batch=estimate.largest_batch,
    )
    for rank in range(ranks):
        visible = Variable("CUDA_VISIBLE_DEVICES", str(rank % plan.devices))
        yield {
            LaunchFacts.key: LaunchFacts(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks),
            EnvironmentFacts.key: EnvironmentFacts(variables=(visible,)),
            EstimateFacts.key: peaks,
        }


def _gpus(estimate: Estimate, offer: DeviceBudget) -> GpuFacts | Missing:
    if offer.memory is None:
        return NO_DEVICE
    if _is_undecided(estimate):
        return Missing(
            MissingReason.HIDDEN,
            f"the peak is calculated by a rule, which errs on the safe side, and does not fit: {estimate.bound}",
        )
    # Ranks that share a device share what the others leave of it.
    shared = estimate.plan.ranks_per_device > 1
    total = offer.memory - offer.others if shared else offer.memory
    return GpuFacts(
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"GPU-{index}",
                name=offer.name,
                memory_total=total,
                memory_used=offer.others,
                memory_free=offer.memory - offer.others,
            )
            for index in range(estimate.plan.devices)
        )
    )
