"""Makes an estimate: the peak of a rank, whether it fits, the largest batch that fits, suggestions, and host memory.

Everything is traced, within limits on the number of traces and on time; notes say what there was no time for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from doctor.core.errors import UnusableError
from doctor.estimate.batch_search import BatchSearchResult, bytes_a_sample, largest_batch
from doctor.estimate.data_model import Estimate, LoaderUse, Suggestion, TracedStep, TrainingPlan
from doctor.estimate.device_budget import DeviceBudget
from doctor.estimate.host_memory import host_memory
from doctor.estimate.memory.non_torch import outside
from doctor.estimate.suggestions import candidates, helps, traced_suggestion

BELOW, ABOVE = 0.03, 0.07
"""Shares of the estimate by which a peak may lie below and above it: the range that holds nine of ten published peaks
of the half that is examined (``benchmarks/estimate_published.json``). What fits, fits at its upper end."""

TRACES, SUGGESTION_TRACES = 12, 4
"""Most traces of the search for the largest batch: of the job itself, of a suggestion."""
SLACK, SUGGESTION_SLACK = 0.005, 0.03
"""Relative accuracy of the largest batch, which is exact below 200 samples: of the job itself, of a suggestion."""

SEARCHING = 0.6
"""Share of the time in which the search for the job's largest batch may begin a trace; the rest is for suggestions."""

Trace = Callable[[TrainingPlan], TracedStep]
ProgressReport = Callable[[str], None]


class TraceCache:
    """Traces each plan once, until the time is up. ``refused``: why plans could not be traced."""

    def __init__(self, trace: Trace, seconds: float, now: Callable[[], float], tell: ProgressReport) -> None:
        self._trace, self._seconds, self._now, self._tell = trace, seconds, now, tell
        self.started = now()
        self._known: dict[TrainingPlan, TracedStep] = {}
        self.refused: list[str] = []
        self.ran_out = False
        self.purpose = "the job itself"
        self.spent: dict[str, list[float]] = {}
        """The seconds of each trace, by purpose."""

    def _timed(self, plan: TrainingPlan) -> TracedStep:
        began = self._now()
        try:
            return self._trace(plan)
        finally:
            self.spent.setdefault(self.purpose, []).append(self._now() - began)

    def first(self, plan: TrainingPlan) -> TracedStep:
        """Trace the job itself, whatever the time and the errors."""
        traced = self._known[plan] = self._timed(plan)
        if traced.batch_size and not plan.batch_size:
            self._known[replace(plan, batch_size=traced.batch_size)] = traced
        return traced

    def __call__(self, plan: TrainingPlan, share: float = 1.0) -> TracedStep | None:
        """Return the trace of ``plan``, or ``None`` if that share of the time is up, or it can't be traced."""
        if plan not in self._known:
            if self._is_up(share):
                self.ran_out = True
                return None
            self._tell(_words_of(plan))
            try:
                self._known[plan] = self._timed(plan)
            except UnusableError as error:
                if self._is_up():
                    self.ran_out = True
                else:
                    self.refused.append(str(error).rstrip("."))
                return None
        return self._known[plan]

    def _is_up(self, share: float = 1.0) -> bool:
        return self._now() - self.started >= share * self._seconds


def _words_of(plan: TrainingPlan) -> str:
    batch = f"batch {plan.batch_size}, " if plan.batch_size else ""
    extra = ", checkpointing" if plan.checkpointing else ""
    return f"{batch}{plan.strategy}, {plan.precision}, {plan.optimizer or 'its own optimizer'}{extra}"


def estimate_of(
    trace: Trace,
    loading: LoaderUse,
    plan: TrainingPlan,
    budget: DeviceBudget,
    *,
    seconds: float,
    loading_seconds: float = 0.0,
    peak_only: bool = False,
    notes: tuple[str, ...] = (),
    now: Callable[[], float] = time.monotonic,
    tell: ProgressReport = lambda _: None,
) -> Estimate:
    """Return the estimate for ``plan`` on the device, with further traces begun for ``seconds``.

    ``loading_seconds``: how long it took to load the model. ``peak_only``: trace the job itself alone. ``notes``: of
    what was read.

    Raises:
        UnusableError: the job itself can't be traced.
    """
    tracing = TraceCache(trace, seconds, now, tell)
    tell(_words_of(plan))
    first = tracing.first(plan)
    if not plan.batch_size and first.batch_size:
        plan = replace(plan, batch_size=first.batch_size)
    run = _EstimateRun(tracing, budget, first, plan)
    estimate = run.peak_estimate(loading) if peak_only else run.estimate(loading)
    spent = (_spent(tracing.spent, loading_seconds),) if tracing.ran_out else ()
    return replace(
        estimate, notes=(*notes, *estimate.notes, *spent), seconds=round(loading_seconds + now() - tracing.started, 1)
    )


def _spent(traces: Mapping[str, list[float]], loading_seconds: float) -> str:
    parts = [f"loading the model {loading_seconds:.0f} s"]
    for purpose, seconds in traces.items():
        count = f", {len(seconds)} traces" if len(seconds) > 1 else ""
        parts.append(f"{purpose} {sum(seconds):.0f} s{count}")
    return f"the --timeout was spent on: {'; '.join(parts)}"


class _EstimateRun:
    """One plan on one device, and its traces. ``unsettled``: suggestions whose search was not completed."""

    def __init__(self, tracing: TraceCache, budget: DeviceBudget, first: TracedStep, plan: TrainingPlan) -> None:
        self.tracing, self.budget, self.first, self.plan = tracing, budget, first, plan
        self.limit = within_range(budget.for_one_of(plan.ranks_per_device))
        self.peak = peak_of(first, plan, budget)
        self.unsettled: list[str] = []

    def estimate(self, loading: LoaderUse) -> Estimate:
        """Return the estimate, but for its time."""
        self.tracing.purpose = "the largest batch"
        found = self.largest() if self.plan.batch_size else BatchSearchResult(0, exact=False, points={})
        self.tracing.purpose = "suggestions"
        suggestions, untried = self.suggestions(found.batch or None)
        estimate = self.peak_estimate(loading)
        return replace(
            estimate,
            largest_batch=found.batch or None,
            searched=found.settled,
            sample_bytes=bytes_a_sample(found.points),
            ways=suggestions,
            notes=tuple(dict.fromkeys((*estimate.notes, *self._notes(found, untried)))),
        )

    def peak_estimate(self, loading: LoaderUse) -> Estimate:
        """Return what the trace of the job itself shows."""
        plan, first, budget = self.plan, self.first, self.budget
        return Estimate(
            plan=plan,
            allocated_bytes=first.parts.allocated,
            reserved_bytes=reserved_of(first),
            peak_bytes=self.peak,
            low_bytes=lower_end(self.peak),
            high_bytes=upper_end(self.peak),
            parts=replace(
                first.parts,
                rounding=max(0, first.reserved - first.parts.allocated),
                context=self.peak - reserved_of(first),
                others=budget.others + (plan.ranks_per_device - 1) * self.peak,
            ),
            when=_WHEN[first.moment],
            batch_size=plan.batch_size or 0,
            parameter_count=first.parameter_count,
            searched=None,
            fits=self.fits,
            device_memory=budget.memory,
            device_name=budget.name,
            host=host_memory(plan, first, loading),
            bound=first.bound,
            notes=(*first.notes, *budget.notes),
        )

    @property
    def fits(self) -> bool | None:
        """Whether the job fits at the upper end of its range; ``None`` without a device, or if an upper bound does
        not fit."""
        if self.limit is None:
            return None
        return None if self.first.bound and self.peak > self.limit else self.peak <= self.limit

    def peak_with(self, plan: TrainingPlan, share: float = 1.0) -> int | None:
        """Return the peak of a rank of another plan, unless it is an upper bound and that of the job itself is not."""
        traced = self.tracing(plan, share)
        if traced is None or (traced.bound and not self.first.bound):
            return None
        return peak_of(traced, plan, self.budget)

    def largest(self) -> BatchSearchResult:
        """Search for the largest batch of the job; without a device, trace two batches for the bytes per sample."""
        batch = self.plan.batch_size or 1
        if self.limit is None:
            twice = self.peak_with(replace(self.plan, batch_size=2 * batch))
            points = {batch: self.peak} | ({2 * batch: twice} if twice else {})
            return BatchSearchResult(0, exact=False, points=points)
        return self.search(self.plan, {batch: self.peak}, self.limit, traces=TRACES, slack=SLACK, share=SEARCHING)

    def search(
        self, plan: TrainingPlan, known: dict[int, int], limit: int, *, traces: int, slack: float, share: float = 1.0
    ) -> BatchSearchResult:
        """Search for the largest batch of ``plan`` within ``limit`` bytes."""
        traced, sample = self.tracing(plan), 0
        if traced is not None and traced.batch_size:
            growing = traced.parts.activations + traced.parts.batch + traced.parts.temporary
            sample = growing // traced.batch_size
        return largest_batch(
            lambda size: self.peak_with(replace(plan, batch_size=size), share),
            limit,
            known,
            traces=traces,
            slack=slack,
            sample=sample,
        )

    def suggestions(self, largest: int | None) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
        """Return what helps, with the largest batch of each, and the names of what could not be traced."""
        found = list(candidates(self.plan, self.plan.batch_size or 0, largest))
        traced, untried = traced_suggestion(found, self.plan, self.peak, self.peak_with)
        before = self.peak * self.plan.ranks_per_device
        searched = (self._with_largest(one, largest) for one in traced)
        return tuple(one for one in searched if helps(one, before, largest)), untried

    def _with_largest(self, one: Suggestion, largest: int | None) -> Suggestion:
        """Search for the largest batch with a suggestion, beginning with ``largest``, that of the job itself."""
        limit = within_range(self.budget.for_one_of(one.plan.ranks_per_device))
        if limit is None or not one.plan.batch_size:
            return one
        known = {one.plan.batch_size: one.peak_bytes}
        peak = self.peak_with(replace(one.plan, batch_size=largest)) if largest else None
        known |= {largest: peak} if largest and peak else {}
        found = self.search(one.plan, known, limit, traces=SUGGESTION_TRACES, slack=SUGGESTION_SLACK)
        if not found.settled:
            self.unsettled.append(one.name)
        return replace(one, largest_batch=found.batch or None, searched=found.settled)

    def _notes(self, found: BatchSearchResult, untried: tuple[str, ...]) -> Iterator[str]:
        plan, batch = self.plan, self.plan.batch_size
        if plan.ranks_per_device > 1 and plan.strategy != "none":
            allowed = "before 2.30, and unless NCCL_MULTI_RANK_GPU_ENABLE=1"
            yield f"NCCL refuses two ranks on one device ({allowed}): use gloo"
        if not batch:
            yield "the tensors of the batch have no common first dimension, so other batch sizes could not be tried"
        elif self.limit is not None and not found.settled:
            above = min((size for size in found.points if size > found.batch), default=None)
            why = "the --timeout expired" if self.tracing.ran_out else "other batch sizes cannot be traced"
            yield f"the search for the largest batch was cut short, {why}" + (
                f": {above} does not fit" if above else ""
            )
        if self.unsettled:
            yield f"larger batches may fit with {', '.join(self.unsettled)}: the search was cut short"
        if untried:
            why = "the --timeout expired" if self.tracing.ran_out else "it cannot be traced"
            yield f"not tried, {why}: {', '.join(untried)}"
        for reason in dict.fromkeys(self.tracing.refused):
            yield f"a variant cannot be traced: {reason}"


_WHEN = {
    "forward": "in the forward pass, while activations are kept for the backward pass",
    "backward": "in the backward pass, when the first gradients and most activations are in memory",
    "optimizer step": "in the optimizer step, where the batch size matters little",
    "between steps": "between the steps: only parameters, gradients and optimizer state",
}


def peak_of(traced: TracedStep, plan: TrainingPlan, budget: DeviceBudget) -> int:
    """Return the peak of a rank in bytes, inside and outside of torch's allocator."""
    context = outside(plan, budget.capability, loading=budget.loading, measured=budget.context)
    return reserved_of(traced) + context


def reserved_of(traced: TracedStep) -> int:
    """Return the bytes that torch's allocator reserves at the peak."""
    return max(traced.reserved, traced.parts.allocated)


def lower_end(peak: int) -> int:
    """Return the lower end of the range of a peak."""
    return int(peak * (1 - BELOW))


def upper_end(peak: int) -> int:
    """Return the upper end of the range of a peak."""
    return int(peak * (1 + ABOVE))


def within_range(limit: int | None) -> int | None:
    """Return the largest peak whose range ends within ``limit`` bytes."""
    return None if limit is None else int((limit + 1) / (1 + ABOVE))
