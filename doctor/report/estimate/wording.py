"""What an estimate says, in words and numbers that all its reports share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doctor.core.text import byte_size
from doctor.estimate.data_model import (
    MOST_SAMPLES,
    Estimate,
    HostMemory,
    MeasuredThroughput,
    MemoryBreakdown,
    Suggestion,
)
from doctor.report.formatting import spelt_out

LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "batch": "the batch",
    "buffers": "buffers of the model",
    "temporary": "temporary tensors",
    "communication": "communication buckets",
    "gathered": "gathered shards",
    "rounding": "allocator rounding",
    "context": "CUDA context, NCCL",
    "others": "others on the device",
}
"""The parts of a peak, as a report names them."""

LEAST_SHARE = 0.01
"""A smaller part of the peak is shown with the rest."""


class MemoryRow(NamedTuple):
    """A part of the device's memory: its bytes, and its share of the whole device, or of the peak where nobody said
    how large a device is."""

    label: str
    size: int
    share: float


def title_words(estimate: Estimate) -> list[str]:
    """What was estimated: the model, the devices, the strategy, the batch."""
    plan = estimate.plan
    device = estimate.device_name or "device"
    count = plan.devices * plan.nodes
    ranks = f", {plan.ranks_per_device} ranks each" if plan.ranks_per_device > 1 else ""
    strategy = f"{plan.strategy}, {plan.world_size} ranks" if plan.world_size > 1 else "one rank"
    batch = f"batch {estimate.batch_size} a rank" if estimate.batch_size else "its batch"
    times = f" x {plan.accumulate}" if plan.accumulate > 1 else ""
    words = [f"{_count(estimate.parameter_count)} parameters", f"{count} x {device}{ranks}", strategy, plan.precision]
    words += [*(["checkpointing"] if plan.checkpointing else []), *([plan.optimizer] if plan.optimizer else [])]
    return [*words, f"{batch}{times}"]


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def headline(estimate: Estimate) -> str:
    """Whether it fits, and by how much, in a sentence."""
    need, usable, who = _need(estimate), _usable(estimate), _who(estimate)
    most = "about " if estimate.bound else ""
    if usable is None:
        return f"{who} {most}{byte_size(need)} at the peak."
    whole = byte_size(usable)
    if estimate.fits is None:
        return f"Whether it fits can't be told: {_lower(who)} {most}{byte_size(need)}, and there are {whole}."
    if estimate.fits:
        return (
            f"It fits{_tightly(estimate)}: {_lower(who)} {most}{byte_size(need)} of {whole} ({percent(need / usable)})."
        )
    missing = byte_size(need - usable)
    return f"It does not fit: {_lower(who)} {byte_size(need)}, {missing} more than the {whole} that there are."


def percent(share: float) -> str:
    """``39 %``."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _tightly(estimate: Estimate) -> str:
    """Whether the batch is above the one that leaves something to spare."""
    is_tight = estimate.safe_batch is None or estimate.batch_size > estimate.safe_batch
    return ", but tightly" if is_tight and estimate.largest_batch else ""


def _who(estimate: Estimate) -> str:
    ranks = estimate.plan.ranks_per_device
    return "A rank takes" if ranks == 1 else f"The {ranks} ranks on a device take"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _need(estimate: Estimate) -> int:
    """Bytes on a device by all its ranks."""
    return estimate.peak_bytes * estimate.plan.ranks_per_device


def _usable(estimate: Estimate) -> int | None:
    """What others leave of the device."""
    if estimate.device_memory is None:
        return None
    others = estimate.parts.others - (estimate.plan.ranks_per_device - 1) * estimate.peak_bytes
    return estimate.device_memory - others


def github_notice(estimate: Estimate) -> str:
    """The answer as a workflow command: an annotation beside the findings."""
    words = " ".join(filter(None, (headline(estimate), batch_words(estimate))))
    return f"::notice title=doctor estimate::{spelt_out(words).replace('%', '%25')}\n"


def _shares_alone(estimate: Estimate) -> bool:
    """Whether nobody but ranks of this job holds memory of the device."""
    return estimate.parts.others == (estimate.plan.ranks_per_device - 1) * estimate.peak_bytes


def batch_words(estimate: Estimate) -> str:
    """The largest batch, and what a sample takes; empty where nothing is known of it."""
    parts = []
    if estimate.largest_batch == MOST_SAMPLES:
        parts.append(f"The memory does not limit the batch: {MOST_SAMPLES} samples a rank fit.")
    elif estimate.largest_batch and not estimate.searched:
        parts.append(f"A batch of {estimate.largest_batch} samples a rank fits, and a larger one may.")
    elif estimate.largest_batch:
        spare = estimate.safe_batch
        leaves = f"; {spare} leaves 5 % to spare" if spare and spare < estimate.largest_batch else ""
        parts.append(f"The largest batch that fits is {estimate.largest_batch} samples a rank{leaves}.")
    elif estimate.fits is False and estimate.batch_size:
        parts.append("No batch fits, not even one of 1 sample." if estimate.searched else "No batch was found to fit.")
    if estimate.sample_bytes:
        parts.append(f"A further sample takes {byte_size(estimate.sample_bytes)}.")
    return " ".join(parts)


def when_words(estimate: Estimate) -> str:
    """When the peak comes."""
    return f"The peak comes {estimate.when}."


def part_rows(estimate: Estimate) -> list[MemoryRow]:
    """The parts of the device's memory at the peak, the largest first, then the rest and what is free."""
    parts: MemoryBreakdown = estimate.parts
    whole = estimate.device_memory or parts.total
    labels = LABELS | ({"others": "the other ranks"} if _shares_alone(estimate) else {})
    sizes = {labels[name]: getattr(parts, name) for name in parts.__struct_fields__}
    shown = [MemoryRow(label, size, size / whole) for label, size in sizes.items() if size >= LEAST_SHARE * parts.total]
    rows = sorted(shown, key=lambda row: -row.size)
    rest = parts.total - sum(row.size for row in rows)
    if rest > 0:
        rows.append(MemoryRow("all other", rest, rest / whole))
    free = (estimate.device_memory or 0) - parts.total
    if free > 0:
        rows.append(MemoryRow("free", free, free / whole))
    return rows


def suggestion_cells(way: Suggestion) -> tuple[str, str, str, str]:
    """Its words; on a device the peak with it, and what it saves; the largest batch with it."""
    largest = str(way.largest_batch) if way.largest_batch else "-"
    peak = way.peak_bytes * way.plan.ranks_per_device
    return way.words, byte_size(peak), byte_size(way.saved_bytes) if way.saved_bytes > 0 else "-", largest


SUGGESTION_HEADER = ("what would help", "peak", "saves", "largest batch")


def host_words(host: HostMemory) -> str:
    """Host memory of a node, in a sentence with its parts."""
    ranks = "its rank" if host.ranks == 1 else f"its {host.ranks} ranks"
    parts = {"processes": host.processes, "data set": host.dataset, "loader workers": host.workers}
    parts["pinned batches"] = host.pinned
    told = ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items() if size)
    resuming = f"; {byte_size(host.checkpoint)} more while all load a checkpoint" if host.checkpoint else ""
    return f"{byte_size(host.total - host.checkpoint)} of a node's memory for {ranks}: {told}{resuming}"


def measured_head(measured: Sequence[MeasuredThroughput]) -> tuple[str, str, str, str]:
    """The head of their table: on what they ran."""
    device = next((one.device for one in measured if one.device), "this machine")
    return f"measured here, on {device}", "samples/s", "ratio", "memory"


def measured_cells(one: MeasuredThroughput) -> tuple[str, str, str, str]:
    """A way to train as it was timed: samples a second, the ratio to one rank, bytes; or why there is nothing."""
    if one.error:
        return f"{one.name}: {one.error}", "-", "-", "-"
    ratio = f"{one.ratio:.2f} ± {one.spread:.2f}" if one.ratio is not None else "-"
    rate = one.samples_per_second
    return one.name, f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", ratio, byte_size(one.peak_bytes)


def conclusion(measured: Sequence[MeasuredThroughput]) -> str:
    """What follows for several ranks on one device; empty where the measurements do not tell."""
    shared = next((one for one in measured if one.plan.ranks_per_device > 1 and one.ratio is not None), None)
    alone = [one for one in measured if one.plan.ranks_per_device == 1 and one.ratio is not None]
    if shared is None or not alone or shared.ratio is None:
        return ""
    best = max(alone, key=lambda one: one.ratio or 0.0)
    ratio = (best.ratio or 0.0) / shared.ratio
    here = ". On a GPU it may be otherwise" if best.device == "CPU" else ""
    noise = best.spread + shared.spread
    memory = f"{byte_size(best.peak_bytes)} in place of {byte_size(shared.peak_bytes)}"
    if abs((best.ratio or 0.0) - shared.ratio) <= noise:
        return f"Sharing the device gains nothing beyond the noise: {best.name} does as much, with {memory}{here}."
    if ratio > 1:
        return f"Sharing the device does not pay: {best.name} is {ratio:.2f} times as fast, with {memory}{here}."
    return f"Sharing pays: {shared.name} are {1 / ratio:.2f} times as fast as the best of one rank, {best.name}{here}."


def all_notes(estimate: Estimate) -> Iterator[str]:
    """What a reader must know of how it was come by."""
    if estimate.bound:
        yield f"a calculation by a rule, no traced step: {estimate.bound}"
    yield from estimate.notes
    yield from estimate.host.notes
