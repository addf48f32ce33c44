"""The answer: the peak of a rank, whether it fits, the largest batch that does, what would help, and the host.

Everything is traced; how many traces there are is bounded by their number and by time. What there was no time for is
said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from doctor.core.errors import UnusableError
from doctor.estimate.batch_search import BatchSearchResult, batch_within, bytes_a_sample, largest_batch
from doctor.estimate.data_model import Estimate, LoaderUse, MemoryBreakdown, Suggestion, TracedStep, TrainingPlan
from doctor.estimate.device_budget import DeviceBudget
from doctor.estimate.host_memory import host_memory
from doctor.estimate.memory.non_torch import outside
from doctor.estimate.suggestions import candidates, helps, traced_suggestion

SPARE = 0.05
"""Share of a peak by which the estimate may be too low: what :attr:`Estimate.safe_batch` leaves free."""

TRACES, TRACES_OF_A_WAY = 12, 4
"""Traces that the search for the largest batch may take: of the job itself, of a way that helps."""
SLACK, SLACK_OF_A_WAY = 0.005, 0.03
"""To which share it is answered: exactly below 200 samples; of a way that helps roughly."""

SEARCHING = 0.6
"""Share of the time in which the search for the job's own largest batch may begin a trace; the rest is for ways."""

Trace = Callable[[TrainingPlan], TracedStep]
ProgressReport = Callable[[str], None]


class TimeBudget(NamedTuple):
    """So many seconds from ``started``, by ``now``."""

    started: float
    seconds: float
    now: Callable[[], float] = time.monotonic

    def is_up(self, share: float = 1.0) -> bool:
        """Whether so much of the time is over, and nothing new may be begun."""
        return self.now() - self.started >= share * self.seconds


class TraceCache:
    """Traces plans, each once, until time is up. ``refused``: why plans could not be traced."""

    def __init__(self, trace: Trace, clock: TimeBudget, tell: ProgressReport) -> None:
        self._trace, self._clock, self._tell = trace, clock, tell
        self._known: dict[TrainingPlan, TracedStep] = {}
        self.refused: list[str] = []
        self.ran_out = False

    def first(self, plan: TrainingPlan) -> TracedStep:
        """The trace of the job itself, and the errors of that."""
        self._known[plan] = self._trace(plan)
        return self._known[plan]

    def keep(self, plan: TrainingPlan, traced: TracedStep) -> None:
        """``traced`` is the trace of ``plan``, too."""
        self._known[plan] = traced

    def __call__(self, plan: TrainingPlan, share: float = 1.0) -> TracedStep | None:
        """The trace of ``plan``; ``None`` where that share of the time is up, or it can't be traced."""
        if plan not in self._known:
            if self._clock.is_up(share):
                self.ran_out = True
                return None
            self._tell(_words_of(plan))
            try:
                self._known[plan] = self._trace(plan)
            except UnusableError as error:
                if self._clock.is_up():
                    self.ran_out = True
                else:
                    self.refused.append(str(error).rstrip("."))
                return None
        return self._known[plan]


def _words_of(plan: TrainingPlan) -> str:
    """What is being traced, for somebody who waits."""
    batch = f"batch {plan.batch_size}, " if plan.batch_size else ""
    extra = ", checkpointing" if plan.checkpointing else ""
    return f"{batch}{plan.strategy}, {plan.precision}, {plan.optimizer or 'its own optimizer'}{extra}"


def estimate_of(
    trace: Trace,
    loading: LoaderUse,
    plan: TrainingPlan,
    offer: DeviceBudget,
    *,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
    tell: ProgressReport = lambda _: None,
) -> Estimate:
    """The estimate for ``plan`` on what is offered, with further traces begun for ``seconds``.

    Raises:
        UnusableError: the job itself can't be traced.
    """
    started = now()
    tracing = TraceCache(trace, TimeBudget(started, seconds, now), tell)
    tell(_words_of(plan))
    first = tracing.first(plan)
    batch = plan.batch_size or first.batch_size
    if batch != plan.batch_size and batch:
        plan = replace(plan, batch_size=batch)
        tracing.keep(plan, first)
    question = _EstimateRun(tracing, offer, first, plan)
    found = question.largest() if batch else BatchSearchResult(0, exact=False, points={})
    return _put_together(question, loading, found, lambda: now() - started)


class _EstimateRun:
    """One plan on one device, and the traces that answer it. ``unsettled``: ways whose largest batch is not known to
    the end."""

    def __init__(self, tracing: TraceCache, offer: DeviceBudget, first: TracedStep, plan: TrainingPlan) -> None:
        self.tracing, self.offer, self.first, self.plan = tracing, offer, first, plan
        self.limit = offer.for_one_of(plan.ranks_per_device)
        self.peak = peak_of(first, plan, offer)
        self.unsettled: list[str] = []

    @property
    def fits(self) -> bool | None:
        """Whether it does; ``None`` where nobody said on what, or a mere bound exceeds it."""
        if self.limit is None:
            return None
        return None if self.first.bound and self.peak > self.limit else self.peak <= self.limit

    def peak_with(self, plan: TrainingPlan, share: float = 1.0) -> int | None:
        """The peak of a rank of another plan, begun within that share of the time. A bound where the job itself was
        traced is not comparable."""
        traced = self.tracing(plan, share)
        if traced is None or (traced.bound and not self.first.bound):
            return None
        return peak_of(traced, plan, self.offer)

    def largest(self) -> BatchSearchResult:
        """The largest batch of the job itself; without a device, two batches tell what a sample takes."""
        batch = self.plan.batch_size or 1
        if self.limit is None:
            twice = self.peak_with(replace(self.plan, batch_size=2 * batch))
            points = {batch: self.peak} | ({2 * batch: twice} if twice else {})
            return BatchSearchResult(0, exact=False, points=points)
        return self.search(self.plan, {batch: self.peak}, self.limit, traces=TRACES, slack=SLACK, share=SEARCHING)

    def search(
        self, plan: TrainingPlan, known: dict[int, int], limit: int, *, traces: int, slack: float, share: float = 1.0
    ) -> BatchSearchResult:
        """The largest batch of ``plan`` within ``limit`` bytes."""
        return largest_batch(
            lambda size: self.peak_with(replace(plan, batch_size=size), share),
            limit,
            known,
            traces=traces,
            slack=slack,
            sample=_bytes_a_sample(self.tracing(plan)),
        )

    def safe(self, found: BatchSearchResult) -> int | None:
        """The largest batch that leaves something to spare; ``None`` where there is none, or no time to look."""
        if self.limit is None or not found.batch:
            return None
        limit = int(self.limit / (1 + SPARE))
        within = batch_within(found.points, limit)
        if not within:
            within = self.search(self.plan, dict(found.points), limit, traces=TRACES_OF_A_WAY, slack=SPARE).batch
        return within or None

    def ways(self, largest: int | None) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
        """What helps, with the largest batch of each, and what could not be tried."""
        batch = self.plan.batch_size or 0
        found = list(candidates(self.plan, batch, largest))
        ways, untried = traced_suggestion(found, self.plan, self.peak, self.peak_with)
        held = self.peak * self.plan.ranks_per_device
        told = (self._with_largest(way, largest) for way in ways)
        return tuple(way for way in told if helps(way, held, largest)), untried

    def _with_largest(self, way: Suggestion, largest: int | None) -> Suggestion:
        """``largest``: of the job itself. What the way does there tells more of larger batches than a small one."""
        limit = self.offer.for_one_of(way.plan.ranks_per_device)
        if limit is None or not way.plan.batch_size:
            return way
        known = {way.plan.batch_size: way.peak_bytes}
        there = self.peak_with(replace(way.plan, batch_size=largest)) if largest else None
        known |= {largest: there} if largest and there else {}
        found = self.search(way.plan, known, limit, traces=TRACES_OF_A_WAY, slack=SLACK_OF_A_WAY)
        if not found.settled:
            self.unsettled.append(way.name)
        return replace(way, largest_batch=found.batch or None)


def _bytes_a_sample(traced: TracedStep | None) -> int:
    """What a sample is likely to take: by the parts that grow with the batch."""
    if traced is None or not traced.batch_size:
        return 0
    parts = traced.parts
    return (parts.activations + parts.batch + parts.temporary) // traced.batch_size


def peak_of(traced: TracedStep, plan: TrainingPlan, offer: DeviceBudget) -> int:
    """Bytes on its device by a rank at its peak: what torch's allocator holds, and what is outside of it."""
    return max(traced.reserved, traced.parts.allocated) + outside(plan, offer.capability)


def _put_together(
    question: _EstimateRun, loading: LoaderUse, found: BatchSearchResult, seconds: Callable[[], float]
) -> Estimate:
    plan, first = question.plan, question.first
    ways, untried = question.ways(found.batch or None)
    notes = _notes(question, found, untried)
    safe = question.safe(found)
    return Estimate(
        plan=plan,
        peak_bytes=question.peak,
        parts=_parts(question),
        when=when(first),
        batch_size=plan.batch_size or 0,
        parameter_count=first.parameter_count,
        largest_batch=found.batch or None,
        searched=found.settled,
        safe_batch=safe,
        sample_bytes=bytes_a_sample(found.points),
        fits=question.fits,
        device_memory=question.offer.memory,
        device_name=question.offer.name,
        ways=ways,
        host=host_memory(plan, first, loading),
        bound=first.bound,
        notes=tuple(dict.fromkeys((*first.notes, *question.offer.notes, *notes))),
        seconds=round(seconds(), 1),
    )


def _parts(question: _EstimateRun) -> MemoryBreakdown:
    traced, plan, offer = question.first, question.plan, question.offer
    return replace(
        traced.parts,
        rounding=max(0, traced.reserved - traced.parts.allocated),
        context=outside(plan, offer.capability),
        others=offer.others + (plan.ranks_per_device - 1) * question.peak,
    )


_WHEN = {
    "forward": "in the forward pass, while activations are kept for the backward pass",
    "backward": "in the backward pass, when the first gradients are there and most activations still are",
    "optimizer step": "in the optimizer step, where the batch matters little",
    "between steps": "between the steps: parameters, gradients and optimizer state alone",
}


def when(traced: TracedStep) -> str:
    """When in a step the peak comes, as the end of a sentence."""
    return _WHEN[traced.moment]


def _notes(question: _EstimateRun, found: BatchSearchResult, untried: tuple[str, ...]) -> Iterator[str]:
    plan, batch = question.plan, question.plan.batch_size
    if plan.ranks_per_device > 1 and plan.strategy != "none":
        yield "NCCL refuses two ranks on one device (before 2.30, and unless NCCL_MULTI_RANK_GPU_ENABLE=1): use gloo"
    if not batch:
        yield "the batch has no common first dimension, so no other batch size could be tried"
    elif question.limit is not None and not found.settled:
        above = min((size for size in found.points if size > found.batch), default=None)
        why = "there was no time (--timeout)" if question.tracing.ran_out else "it can't be traced at other sizes"
        yield f"the search for the largest batch was cut short, {why}" + (f": {above} does not fit" if above else "")
    if question.unsettled:
        yield f"larger batches may fit with {', '.join(question.unsettled)}: the search was cut short"
    if untried:
        why = "there was no time (--timeout)" if question.tracing.ran_out else "it can't be traced"
        yield f"not tried, {why}: {', '.join(untried)}"
    for reason in dict.fromkeys(question.tracing.refused):
        yield f"a variant can't be traced: {reason}"
