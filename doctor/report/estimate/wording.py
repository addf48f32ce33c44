"""The rows and sentences of an estimate, as both the terminal and Markdown show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doctor.core.report_document import Report
from doctor.core.text import byte_size, counted
from doctor.estimate.data_model import MOST_SAMPLES, Estimate, HostMemory, MeasuredThroughput, Suggestion
from doctor.report.formatting import spelt_out

LABELS = {
    "optimizer": "optimizer state",
    "batch": "the batch",
    "buffers": "buffers of the model",
    "temporary": "temporary tensors",
    "communication": "communication buckets",
    "gathered": "gathered shards",
    "rounding": "allocator rounding",
    "context": "CUDA context, NCCL",
    "others": "other processes on the device",
}
"""Labels of the fields of :class:`doctor.estimate.data_model.MemoryBreakdown` other than their names."""

LEAST_SHARE = 0.01
"""Smaller parts of the peak are summed up in one row."""


class MemoryRow(NamedTuple):
    """A part of the device's memory: bytes, and the share of the device's memory, or of the peak if that is unknown."""

    label: str
    size: int
    share: float

    @property
    def cells(self) -> tuple[str, str, str]:
        """The row as text, the share as a percentage."""
        return self.label, byte_size(self.size), percent(self.share)


class EstimateTable(NamedTuple):
    """A table of alternatives, and a sentence below it, if it has one."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    conclusion: str | None = None


def title_words(estimate: Estimate) -> list[str]:
    """Return what was estimated: the model, the devices, the strategy, the batch."""
    plan = estimate.plan
    count = estimate.parameter_count
    unit, size = next((one for one in (("B", 10**9), ("M", 10**6), ("K", 10**3)) if count >= one[1]), ("", 1))
    shared = f", {plan.ranks_per_device} ranks each" if plan.ranks_per_device > 1 else ""
    batch = f"batch {estimate.batch_size} per rank" if estimate.batch_size else "its batch"
    return [
        f"{count / size:.3g} {unit} parameters" if unit else counted(count, "parameter"),
        f"{plan.devices * plan.nodes} x {estimate.device_name or 'device'}{shared}",
        f"{plan.strategy}, {plan.world_size} ranks" if plan.world_size > 1 else "one rank",
        plan.precision,
        *(["checkpointing"] if plan.checkpointing else []),
        *([plan.optimizer] if plan.optimizer else []),
        batch + (f" x {plan.accumulate}" if plan.accumulate > 1 else ""),
    ]


def headline(estimate: Estimate) -> str:
    """Return one sentence: whether it fits, and by how much."""
    ranks = estimate.plan.ranks_per_device
    who = "a rank needs" if ranks == 1 else f"the {ranks} ranks on a device need"
    need, most = estimate.peak_bytes * ranks, estimate.high_bytes * ranks
    takes = f"{who} {'about ' if estimate.bound else ''}{byte_size(need)}"
    if estimate.device_memory is None:
        return f"{takes[:1].upper()}{takes[1:]} at the peak."
    usable = estimate.device_memory - _held_by_others(estimate)
    if estimate.fits is None:
        return f"Inconclusive whether it fits: {takes}, and {byte_size(usable)} are available."
    if estimate.fits:
        return f"It fits: {takes} of {byte_size(usable)} ({percent(need / usable)})."
    missing = byte_size(most - usable)
    return (
        f"It does not fit: {who} {byte_size(need)}, up to {byte_size(most)}: {missing} more than the "
        f"{byte_size(usable)} available."
    )


def range_words(estimate: Estimate) -> str:
    """Return a sentence on the range of a rank's peak, and what of it torch reports."""
    low, high = byte_size(estimate.low_bytes), byte_size(estimate.high_bytes)
    of_torch = f"{byte_size(estimate.allocated_bytes)} allocated and {byte_size(estimate.reserved_bytes)} reserved"
    return f"Peak of a rank: {low} to {high}, with {of_torch} by torch."


def percent(share: float) -> str:
    """Return ``39 %``."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _held_by_others(estimate: Estimate) -> int:
    """Bytes of the device that processes of other jobs hold."""
    return estimate.parts.others - (estimate.plan.ranks_per_device - 1) * estimate.peak_bytes


def github_notice(estimate: Estimate) -> str:
    """Return the answer as a workflow command, which adds an annotation to those of the findings."""
    words = " ".join(filter(None, (headline(estimate), batch_words(estimate))))
    return f"::notice title=doctor estimate::{spelt_out(words).replace('%', '%25')}\n"


def batch_words(estimate: Estimate) -> str:
    """Return sentences on the largest batch and the memory per sample; empty if neither is known."""
    parts = []
    if estimate.largest_batch == MOST_SAMPLES:
        parts.append(f"Memory does not limit the batch: {MOST_SAMPLES} samples per rank fit.")
    elif estimate.largest_batch and not estimate.searched:
        parts.append(
            f"The largest batch that fits is >= {counted(estimate.largest_batch, 'sample')} per rank: "
            "the search was cut short."
        )
    elif estimate.largest_batch:
        parts.append(f"The largest batch that fits is {counted(estimate.largest_batch, 'sample')} per rank.")
    elif estimate.fits is False and estimate.batch_size and estimate.searched is not None:
        parts.append(
            "No batch size fits, not even 1 sample." if estimate.searched else "No batch size was found that fits."
        )
    if estimate.sample_bytes:
        parts.append(f"Each additional sample needs {byte_size(estimate.sample_bytes)}.")
    return " ".join(parts)


def when_words(estimate: Estimate) -> str:
    """Return the sentence that says when the peak comes."""
    return f"The peak occurs {estimate.when}."


def part_rows(estimate: Estimate) -> list[MemoryRow]:
    """Return the parts of the device's memory at the peak, the largest first, then the rest and what is free."""
    parts = estimate.parts
    whole = estimate.device_memory or parts.total
    labels = LABELS if _held_by_others(estimate) else LABELS | {"others": "the other ranks"}
    sizes = {labels.get(name, name): getattr(parts, name) for name in parts.__struct_fields__}
    shown = {label: size for label, size in sizes.items() if size >= LEAST_SHARE * parts.total}
    last = {"all other": parts.total - sum(shown.values()), "free": (estimate.device_memory or 0) - parts.total}
    rows = [*sorted(shown.items(), key=lambda row: -row[1]), *(row for row in last.items() if row[1] > 0)]
    return [MemoryRow(label, size, size / whole) for label, size in rows]


def tables(estimate: Estimate) -> Iterator[EstimateTable]:
    """Return the suggestions, and the throughput that was measured, each if there is any."""
    if estimate.ways:
        rows: list[tuple[str, ...]] = []
        for one in estimate.ways:
            saved = byte_size(one.saved_bytes) if one.saved_bytes > 0 else "-"
            peak = byte_size(one.peak_bytes * one.plan.ranks_per_device)
            rows.append((one.words, peak, saved, _largest_cell(one)))
        yield EstimateTable(("suggestion", "peak", "saves", "largest batch"), rows)
    if estimate.measured:
        device = next((one.device for one in estimate.measured if one.device), "this machine")
        head = (f"measured here, on {device}", "samples/s", "ratio", "memory")
        yield EstimateTable(head, list(map(_measured_cells, estimate.measured)), conclusion(estimate.measured))


def _largest_cell(one: Suggestion) -> str:
    """Return the largest batch, marked if the search for it was not completed."""
    if not one.largest_batch:
        return "-"
    return str(one.largest_batch) if one.searched else f">= {one.largest_batch}"


def host_words(host: HostMemory) -> str:
    """Return a sentence on the host memory of a node and its parts."""
    ranks = "its rank" if host.ranks == 1 else f"its {host.ranks} ranks"
    parts = {"processes": host.processes, "dataset": host.dataset, "loader workers": host.workers}
    parts["pinned batches"] = host.pinned
    listed = ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items() if size)
    resuming = f"; {byte_size(host.checkpoint)} more while all ranks load a checkpoint" if host.checkpoint else ""
    return f"Host: {byte_size(host.total - host.checkpoint)} of a node's memory for {ranks}: {listed}{resuming}."


def _measured_cells(one: MeasuredThroughput) -> tuple[str, str, str, str]:
    if one.error:
        return f"{one.name}: {one.error}", "-", "-", "-"
    ratio = f"{one.ratio:.2f} ± {one.spread:.2f}" if one.ratio is not None else "-"
    rate = one.samples_per_second
    return one.name, f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", ratio, byte_size(one.peak_bytes)


def conclusion(measured: Sequence[MeasuredThroughput]) -> str:
    """Return whether several ranks on one device are worth it; empty if the measurements do not show it."""
    shared = next((one for one in measured if one.plan.ranks_per_device > 1 and one.ratio is not None), None)
    alone = [one for one in measured if one.plan.ranks_per_device == 1 and one.ratio is not None]
    if shared is None or not alone or shared.ratio is None:
        return ""
    best = max(alone, key=lambda one: one.ratio or 0.0)
    ratio = (best.ratio or 0.0) / shared.ratio
    here = ". Results on a GPU may differ" if best.device == "CPU" else ""
    noise = best.spread + shared.spread
    memory = f"{byte_size(best.peak_bytes)} instead of {byte_size(shared.peak_bytes)}"
    if abs((best.ratio or 0.0) - shared.ratio) <= noise:
        return f"Sharing the device gains nothing measurable: {best.name} is as fast, with {memory}{here}."
    if ratio > 1:
        return f"Sharing the device does not pay off: {best.name} is {ratio:.2f} times as fast, with {memory}{here}."
    return (
        f"Sharing pays off: {shared.name} are {1 / ratio:.2f} times as fast as the best of one rank, {best.name}{here}."
    )


def all_notes(estimate: Estimate) -> Iterator[str]:
    """Return how the numbers were obtained, and what they leave out."""
    if estimate.bound:
        yield f"calculated by a rule, not from a traced step: {estimate.bound}"
    yield from estimate.notes
    yield from estimate.host.notes


def unknown_checks(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """Return the checks that could not be evaluated, by reason; with ``verbose``, the status of all others, too."""
    reasons: dict[str, list[str]] = {}
    for result in report.results:
        if result.status.value == "unknown":
            reasons.setdefault(result.reason or "", []).append(result.id)
        elif verbose:
            yield f"{result.id} {result.name}: {result.status.value}{f', {result.reason}' if result.reason else ''}."
    for reason, ids in reasons.items():
        yield spelt_out(f"Not evaluated: {', '.join(ids)}: {reason}.")
