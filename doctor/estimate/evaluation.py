"""Checks an estimate as a job of one node, and makes the report."""

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
"""The checks that apply to an estimate."""

NO_DEVICE = Missing(
    MissingReason.HIDDEN, "the memory of a device is unknown", "give --device, --device-memory or --like CAPTURE"
)
NO_HOST = Missing(MissingReason.HIDDEN, "the memory of a node is unknown", "give --host-memory or --like CAPTURE")

NODE = "node"
"""The name of a node without a capture."""


def report_of(
    estimate: Estimate, budget: DeviceBudget, registry: CheckRegistry, settings: Settings, *, started: float
) -> Report:
    """Return the report document, in which ``job`` is null and ``estimate`` holds the estimate.

    An upper bound that does not fit makes the verdict inconclusive."""
    from msgspec.structs import replace

    from doctor.session import judge

    chosen = replace(registry, checks=tuple(check for check in registry.checks if check.id in IDS))
    report = judge(job_of(estimate, budget), chosen, settings, must_be_complete=False, started=started)
    if _is_undecided(estimate) and report.verdict == "pass":
        report = msgspec.structs.replace(report, verdict="inconclusive", exit_code=report.exit_code or 3)
    return msgspec.structs.replace(report, job=None, estimate=msgspec.to_builtins(estimate))


def _is_undecided(estimate: Estimate) -> bool:
    return bool(estimate.bound) and estimate.device_memory is not None and estimate.fits is None


def job_of(estimate: Estimate, budget: DeviceBudget) -> Job:
    """Return one node of the job, with the needs of each of its ranks."""
    host: Section | Missing = budget.host or NO_HOST
    gpus = _gpus(estimate, budget)
    members = [
        Member(rank, {HostFacts.key: host, GpuFacts.key: gpus, **dict(sections)}, (None, None, NODE))
        for rank, sections in enumerate(_ranks(estimate))
    ]
    return build_job(members, world_size=len(members), launcher="none")


def _ranks(estimate: Estimate) -> Iterator[dict[str, Section]]:
    plan, host = estimate.plan, estimate.host
    ranks = plan.devices * plan.ranks_per_device
    peaks = EstimateFacts(
        device_peak=estimate.high_bytes,
        # Not every run loads a checkpoint; the report notes what loading one takes in addition.
        host_peak=(host.total - host.checkpoint) // max(1, host.ranks),
        batch_size=estimate.batch_size or None,
        largest_batch=estimate.largest_batch,
    )
    for rank in range(ranks):
        visible = Variable("CUDA_VISIBLE_DEVICES", str(rank % plan.devices))
        yield {
            LaunchFacts.key: LaunchFacts(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks),
            EnvironmentFacts.key: EnvironmentFacts(variables=(visible,)),
            EstimateFacts.key: peaks,
        }


def _gpus(estimate: Estimate, budget: DeviceBudget) -> GpuFacts | Missing:
    if budget.memory is None:
        return NO_DEVICE
    if _is_undecided(estimate):
        return Missing(
            MissingReason.HIDDEN,
            f"the peak is a conservative calculation, and it does not fit: {estimate.bound}",
        )
    # Ranks that share a device share what other processes leave of it.
    shared = estimate.plan.ranks_per_device > 1
    total = budget.memory - budget.others if shared else budget.memory
    return GpuFacts(
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"GPU-{index}",
                name=budget.name,
                memory_total=total,
                memory_used=budget.others,
                memory_free=budget.memory - budget.others,
            )
            for index in range(estimate.plan.devices)
        )
    )
