"""Peaks of real GPUs that others published, as data, and ``doctor estimate`` against them.

``estimate_published.json`` beside this program has the figures with their sources; ``estimate_factories.py`` rebuilds
the model and the step of each without weights. A hash of the address of each figure divides them: mechanisms may be
examined on the half ``tuned``; the half ``held`` only scores them. Figures of the set ``fresh`` were gathered later.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from estimate_results import MIB, percent
from evidence_pages import folded, write_between

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TrainingPlan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "estimate_published_results.json"
PATH = ROOT / "benchmarks" / "estimate_published.json"
PATIENCE = 600.0
PART = "a100_vit_large_bf16_b4_sgd"
"""The case of ``--part``."""

Metric = Literal["allocated", "reserved", "process"]
HALVES = ("tuned", "held", "fresh")
METRICS: tuple[Metric, ...] = ("allocated", "reserved", "process")

GOALS: dict[Metric, tuple[float, float]] = {
    "allocated": (0.02, 0.05),
    "reserved": (0.04, 0.10),
    "process": (0.05, 0.12),
}
"""Aims with the same software: median without sign, and the worst; of ``allocated`` how far below the figure."""
OLD_MEDIAN, OLD_LOW, OLD_LOW_COUNT = 0.05, 0.10, 2
"""Aims with older software: the median, and how many estimates may be too low by more than a share."""
COVERED, WIDTH = 0.90, 0.10
"""Aims for the range: the share of figures in it, and its median width as a share of the estimate."""


class PublishedSource(msgspec.Struct, frozen=True, kw_only=True):
    """``url`` with ``at``, its commit or date. ``is_current``: nearly the same software as that which estimates.

    ``workspace``: bytes that its software gives to cuBLAS, if not those of current releases: torch before 2.5 gives
    none to hipBLAS (``CublasHandlePool.cpp``). ``is_fresh``: gathered after the mechanisms were fixed, and committed
    before the first estimate."""

    url: str
    at: str
    gpu: str
    software: str
    method: str
    is_current: bool = False
    is_fresh: bool = False
    capability: str = ""
    cuda: str = ""
    workspace: int | None = None


class PublishedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure or several of one run, in bytes. ``factory`` and ``arguments``: how the step is rebuilt.

    ``plan``: how the source trained, with what its loop does with outputs and gradients. ``needs``: packages beyond
    those of the project's tests."""

    name: str
    source: str
    factory: str
    arguments: dict[str, Any] = {}
    plan: TrainingPlan
    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None
    needs: tuple[str, ...] = ()
    note: str = ""


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The file: sources by name, and cases."""

    sources: dict[str, PublishedSource]
    cases: tuple[PublishedCase, ...]


class PublishedError(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate against one figure, both in bytes; ``low`` and ``high``: the range of the estimate, if it has one."""

    name: str
    half: str
    is_current: bool
    metric: Metric
    figure: int
    estimate: int
    low: int = 0
    high: int = 0

    @property
    def off(self) -> float:
        """The error as a share of the figure; negative if the estimate is too low."""
        return self.estimate / self.figure - 1


class PublishedResults(msgspec.Struct, frozen=True, kw_only=True):
    """All errors of one run, and what could not be estimated, by case. ``first``: the errors of the first run, before
    any mechanism was examined."""

    torch: str
    errors: tuple[PublishedError, ...]
    failed: dict[str, str] = {}
    first: tuple[PublishedError, ...] = ()


def half_of(case: PublishedCase, source: PublishedSource) -> str:
    """Return ``fresh``, or the half to which a hash of the address assigns a case: that of the source, and its place
    in it."""
    if source.is_fresh:
        return "fresh"
    address = f"{source.url}#{case.name}"
    return "held" if hashlib.sha256(address.encode()).digest()[0] % 2 else "tuned"


def read_table() -> PublishedTable:
    """Return the figures."""
    return msgspec.json.decode(PATH.read_bytes(), type=PublishedTable)


def run(only: str) -> PublishedResults:
    """Estimate all cases with ``only`` in their name, each in a process of its own."""
    table = read_table()
    errors: list[PublishedError] = []
    failed: dict[str, str] = {}
    for case in table.cases:
        if only not in case.name:
            continue
        missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
        if missing:
            failed[case.name] = f"needs: pip install --no-deps {' '.join(missing)}"
            continue
        try:
            found = list(_errors_of(case, table.sources[case.source]))
        except UnusableError as error:
            failed[case.name] = str(error)
            print(f"{case.name:44s} {error}", flush=True)
            continue
        errors += found
        for one in found:
            print(_line(one), flush=True)
    return PublishedResults(torch=importlib.metadata.version("torch"), errors=tuple(errors), failed=failed)


def _errors_of(case: PublishedCase, source: PublishedSource) -> Iterator[PublishedError]:
    from doctor.estimate.estimator import lower_end, reserved_of, upper_end
    from doctor.estimate.memory.non_torch import loading_of, outside, workspace
    from doctor.estimate.tracer_client import TracerClient

    plan = case.plan
    factory = f"benchmarks/estimate_factories.py:{case.name}"
    given = workspace(source.capability) if source.workspace is None else source.workspace
    with TracerClient(
        factory, directory=ROOT, seconds=PATIENCE, workspace=given, capability=source.capability
    ) as tracer:
        traced = tracer.run(plan)
    values = {
        "allocated": traced.parts.allocated,
        "reserved": reserved_of(traced),
        "process": reserved_of(traced) + outside(plan, source.capability, loading=loading_of(source.cuda)),
    }
    for metric in METRICS:
        figure = getattr(case, metric)
        if figure is not None:
            yield PublishedError(
                name=case.name,
                half=half_of(case, source),
                is_current=source.is_current,
                metric=metric,
                figure=figure,
                estimate=values[metric],
                low=lower_end(values[metric]),
                high=upper_end(values[metric]),
            )


def _line(one: PublishedError) -> str:
    era = "same software" if one.is_current else "older"
    return (
        f"{one.name:44s} {one.half:6s} {era:14s} {one.metric:10s} {one.figure / MIB:10,.0f} MiB  "
        f"estimate {one.estimate / MIB:10,.0f}  {percent(one.off):>8s}"
    )


def summary(results: PublishedResults) -> str:
    """Return the error of each half by metric, with the same and with older software."""
    lines = ["| half | software | metric | figures | median | median absolute | lowest | highest |", "|---" * 8 + "|"]
    for half in HALVES:
        for is_current in (True, False):
            for metric in (*METRICS, None):
                chosen = list(_chosen(results.errors, half, is_current, metric))
                if chosen and (metric is not None or not is_current):
                    lines.append(_row(half, is_current, metric, chosen))
    ranges = [one for one in results.errors if one.high]
    for half in HALVES:
        own = [one for one in ranges if one.half == half]
        if own:
            lines += ["", _coverage(half, own)]
    if results.failed:
        lines += ["", *(f"- not estimated: {name}: {why}" for name, why in results.failed.items())]
    return "\n".join(lines)


def _coverage(half: str, ranges: Sequence[PublishedError]) -> str:
    inside, width = covered(ranges)
    return (
        f"The range holds {inside:.0%} of the {len(ranges)} figures of the half {half} (aim {COVERED:.0%}) at a median "
        f"width of {width:.0%} (aim {WIDTH:.0%})."
    )


def covered(ranges: Sequence[PublishedError]) -> tuple[float, float]:
    """Return the share of figures within their range, and the median width of a range as a share of the estimate."""
    inside = sum(one.low <= one.figure <= one.high for one in ranges) / len(ranges)
    return inside, statistics.median((one.high - one.low) / one.estimate for one in ranges)


def _row(half: str, is_current: bool, metric: Metric | None, chosen: Sequence[PublishedError]) -> str:
    offs = [one.off for one in chosen]
    cells = (
        half,
        "same" if is_current else "older",
        metric or "all",
        str(len(offs)),
        percent(statistics.median(offs)),
        percent(statistics.median(map(abs, offs))).lstrip("+"),
        percent(min(offs)),
        percent(max(offs)),
    )
    return f"| {' | '.join(cells)} |"


def _chosen(
    errors: Iterable[PublishedError], half: str, is_current: bool, metric: Metric | None
) -> Iterator[PublishedError]:
    for one in errors:
        if one.half == half and one.is_current is is_current and metric in (None, one.metric):
            yield one


def is_good(results: PublishedResults) -> bool:
    """Whether the half that was not examined reaches the aims."""
    held = [one for one in results.errors if one.half == "held"]
    current = {metric: [one.off for one in held if one.is_current and one.metric == metric] for metric in METRICS}
    old = [one.off for one in held if not one.is_current]
    near = all(statistics.median(map(abs, offs)) <= GOALS[metric][0] for metric, offs in current.items() if offs)
    worst = all(
        (min(offs) >= -GOALS[metric][1]) and (metric == "allocated" or max(offs) <= GOALS[metric][1])
        for metric, offs in current.items()
        if offs
    )
    older = not old or (
        statistics.median(map(abs, old)) <= OLD_MEDIAN and sum(off < -OLD_LOW for off in old) <= OLD_LOW_COUNT
    )
    if not held:
        return False
    inside, width = covered(held)
    near = near and _is_fresh_good([one for one in results.errors if one.half == "fresh"])
    return near and worst and older and inside >= COVERED and round(width, 3) <= WIDTH


def _is_fresh_good(fresh: Sequence[PublishedError]) -> bool:
    """Whether the set ``fresh``, whose software is older, reaches the aims of the same software."""
    for metric in METRICS:
        median, worst = GOALS[metric]
        offs = [one.off for one in fresh if one.metric == metric]
        if offs and (statistics.median(map(abs, offs)) > median or min(offs) < -worst):
            return False
        if offs and metric != "allocated" and max(offs) > worst:
            return False
    return True


def markdown(results: PublishedResults) -> str:
    """Return the table of both halves, before and after, and every figure with its source."""
    table = read_table()
    rows = ["| Figure | Half | What | Published | Estimate | Error |", "|---|---|---|---|---|---|"]
    for one in results.errors:
        case = next(each for each in table.cases if each.name == one.name)
        name = f"[{one.name}]({table.sources[case.source].url})"
        figure, estimate = (f"{size / MIB:,.0f} MiB" for size in (one.figure, one.estimate))
        rows.append(f"| {name} | {one.half} | {one.metric} | {figure} | {estimate} | {percent(one.off)} |")
    first = PublishedResults(torch="", errors=results.first)
    return "\n\n".join(
        (
            summary(results),
            folded("The same figures before the work on mechanisms", summary(first)),
            folded("All figures", "\n".join(rows)),
        )
    )


def _among(before: PublishedResults, new: PublishedResults) -> PublishedResults:
    """Return the new results in the places of those that were kept, in the order of the table."""
    places = {case.name: place for place, case in enumerate(read_table().cases)}
    again = {one.name for one in new.errors} | set(new.failed)
    errors = [*(one for one in before.errors if one.name not in again and one.name in places), *new.errors]
    failed = {name: why for name, why in before.failed.items() if name not in again and name in places}
    return PublishedResults(
        torch=new.torch,
        errors=tuple(sorted(errors, key=lambda one: places[one.name])),
        failed=failed | new.failed,
        first=before.first,
    )


def main(only: str, *, is_kept: bool = False, is_written: bool = False, part: bool = False) -> int:
    """Run the table, or show what was kept, and print each half's error. ``only``: keep the other cases' results.
    ``part``: run one case, and keep nothing."""
    if part:
        print(summary(run(only or PART)))
        return 0
    before = msgspec.json.decode(RESULTS.read_bytes(), type=PublishedResults) if RESULTS.exists() else None
    results = before if is_kept and before else run(only)
    if before is not None and not is_kept:
        results = _among(before, results)
    print(summary(results))
    if not is_kept:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    if is_written:
        write_between("estimate-published", markdown(results))
    return int(not is_good(results))
