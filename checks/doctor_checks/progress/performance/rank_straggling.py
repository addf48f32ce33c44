"""RUN003: a rank is slower than its peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

import msgspec

from doctor.analysis.stats.outliers import PeerValues
from doctor.analysis.stats.rank_roles import same_role, uses_lightning
from doctor.analysis.stats.step_times import PHASES, common_windows, milliseconds, parts_of
from doctor.api import Finding, Job, Rank, Scope, Severity, Skip, Verdict, check, correlates, ranks_in_words
from doctor.facts import (
    TIME_PARTS,
    MemorySample,
    ProgressFacts,
    RankPausesFacts,
    RunMemoryFacts,
    StepFacts,
    TimeSpan,
    TrainingFacts,
    Window,
)
from doctor.testing import Fails, JobBuilder, Passes, running

REDUCTION = "reduction"
"""What follows in the backward pass once a rank has computed its own gradients, and known waits after a batch."""

WAITS_ON_PROCESSOR = (REDUCTION, "backward", "forward", "data", "other", "optimizer")
"""Parts of a step by the probability that a rank waits for others in them, the highest first. DDP reduces gradients at
the end of the backward pass, FSDP also within it, and DDP sends buffers in the forward pass; Lightning broadcasts a
flag before each batch."""

WAITS_ON_GPU = ("other", REDUCTION, "backward", "optimizer", "forward", "data")
"""The same if the host only launches kernels: it waits when a value is read back, or when the queue is full."""

NEAR = 0.5
"""The fraction of a rank's excess time that its peers must be seen to wait. Ranks that wait for each other wait for
all of it: 1.00 to 1.01 in monitored loops of two ranks on a busy host, with and without accumulation. Medians of
varying parts do not add up, so the fraction is one half."""


def _windows(
    count: int = 6,
    first: int = 100,
    mean: float | None = None,
    means: tuple[float, ...] = (),
    gradients: float | None = None,
    waited: float | None = None,
    **parts: float,
) -> StepFacts:
    """Windows with these parts in seconds per step; ``mean``: of whole steps, if some take longer; ``means``: of the
    parts; ``gradients``: of the backward pass, for the rank's own gradients; ``waited``: of the other part."""
    usual = {"data": 0.01, "forward": 0.1, "backward": 0.25, "optimizer": 0.03, "other": 0.01}
    step = {name: parts.get(name, seconds) for name, seconds in usual.items()}
    total = sum(step.values())
    return StepFacts(
        windows=tuple(
            Window(
                first + 20 * place,
                20,
                total,
                data=step["data"],
                forward=step["forward"],
                backward=step["backward"],
                optimizer=step["optimizer"],
                other=step["other"],
                mean=total if mean is None else mean,
                means=means,
                gradients=gradients,
                waited=waited,
            )
            for place in range(count)
        )
    )


def _rare(**parts: float) -> StepFacts:
    """Windows with these means, and the usual medians."""
    means = {"data": 0.01, "forward": 0.1, "backward": 0.25, "optimizer": 0.03, "other": 0.01, **parts}
    return _windows(means=tuple(means.values()))


_QUOTA = RankPausesFacts(seconds=64.0, cpu_quota=0.1, periods=640, throttled_periods=600, throttled_seconds=50.0)


def _paused(pauses: RankPausesFacts) -> JobBuilder:
    return _job(_windows(), {}).put(RankPausesFacts(seconds=64.0)).put(pauses, ranks=(2,))


def _job(usual: StepFacts, slow: Mapping[int, StepFacts], hosts: int = 2, gpus: int | None = 0) -> JobBuilder:
    sketch = running(hosts, 2, gpus=gpus).put(usual)
    for rank, steps in slow.items():
        sketch = sketch.put(steps, ranks=(rank,))
    return sketch


def _noisy(seed: int) -> StepFacts:
    swings = [((seed * 7 + place * 5) % 11 - 5) * 0.012 for place in range(8)]
    return StepFacts(
        windows=tuple(
            Window(100 + 20 * place, 20, 0.4, data=0.01, forward=0.1 + swing, backward=0.25 - swing, optimizer=0.04)
            for place, swing in enumerate(swings)
        )
    )


def _spanned(
    seconds: float, on: tuple[int, ...] = (0,), within: str = "checkpoint", training: float = 8.0
) -> JobBuilder:
    """Two ranks. Checkpoints, or another part, of those in ``on`` take so many seconds in each span, besides those of
    the ``training``, and the others wait as long."""

    def spans(part: str) -> StepFacts:
        times = {"backward": training} | {part: seconds + (training if part == "backward" else 0.0)}
        row = tuple(times.get(name, 0.0) for name in TIME_PARTS)
        return StepFacts(windows=_windows().windows, spans=tuple(TimeSpan(16 * at, 16, row) for at in range(6)))

    return _job(spans("backward"), {rank: spans(within) for rank in on}, hosts=1)


def _sampled(usual: tuple[float, ...], slow: tuple[float, ...]) -> JobBuilder:
    """Steps of four ranks whose parts are equally long, with the shares of the time in which they wait; rank 1 is the
    slow one."""
    sketch = _job(_windows(), {}).alter(TrainingFacts, strategy="FSDPNet")
    return sketch.put(RankPausesFacts(waiting=usual)).put(RankPausesFacts(waiting=slow), ranks=(1,))


def _swinging() -> StepFacts:
    slow, usual = _windows(data=0.11, backward=0.15).windows, _windows().windows
    return StepFacts(windows=tuple((slow if place % 2 else usual)[place] for place in range(6)))


@check(
    id="RUN003",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="R",
    needs=(StepFacts,),
    needs_peers=True,
    cases=lambda: (
        Passes("the same on all ranks", running(2, 4)),
        Passes("a rank alone", running(1, 1)),
        Passes("too few windows", _job(_windows(2), {1: _windows(2, data=0.2, backward=0.06)})),
        Passes("windows too short to decide", _job(_windows(3), {}).put(StepFacts(windows=(Window(0, 20, 0.01),) * 3))),
        Passes("noise of an overcommitted host", _job(_noisy(0), {1: _noisy(1), 2: _noisy(2), 3: _noisy(3)})),
        Passes("a rank that is fast", _job(_windows(data=0.06), {2: _windows(data=0.005, backward=0.305)})),
        Passes("every other window", _job(_windows(), {1: _swinging()})),
        Passes("8 % of a step", _job(_windows(), {3: _windows(data=0.042, backward=0.218)})),
        Passes(
            "much of a very short step",
            _job(
                _windows(60, data=0.0005, forward=0.001, backward=0.004, optimizer=0.001, other=0.001),
                {1: _windows(60, data=0.0035, forward=0.001, backward=0.001, optimizer=0.001, other=0.001)},
            ),
        ),
        Passes("all ranks wait equally for data", _job(_windows(data=0.2), {})),
        Fails(
            "data, seen by the rank that waits least",
            _job(_windows(), {2: _windows(data=0.11, backward=0.15)}),
            ranks=(2,),
        ),
        Fails("12 % of a step", _job(_windows(), {3: _windows(data=0.06, backward=0.2)}), ranks=(3,)),
        Fails(
            "the slower one of two, by where the other waits",
            _job(_windows(backward=0.35), {0: _windows(data=0.11)}, hosts=1),
            ranks=(0,),
        ),
        Fails(
            "a slow forward pass",
            _job(_windows(), {1: _windows(forward=0.19, backward=0.16)}),
            ranks=(1,),
        ),
        Fails(
            "a slow backward pass, whose end the others wait for",
            _job(_windows(gradients=0.1), {1: _windows(gradients=0.24)}),
            ranks=(1,),
        ),
        Fails(
            "the slower backward pass of two ranks",
            _job(_windows(gradients=0.1), {1: _windows(gradients=0.24)}, hosts=1).only((0, 1)),
            ranks=(1,),
        ),
        Fails(
            "rank 0 logs, and the others wait for its flag as long",
            _job(_windows(gradients=0.1, other=0.13, waited=0.12), {0: _windows(gradients=0.1, other=0.13)}),
            ranks=(0,),
        ),
        Passes("a backward pass that is as slow on all ranks", _job(_windows(gradients=0.24), {})),
        Passes("gradients of one rank that were timed", _job(_windows(), {1: _windows(gradients=0.24)})),
        Fails(
            "rank 0 logs while the others wait for its flag",
            _job(_windows(data=0.13), {0: _windows(other=0.13)}),
            ranks=(0,),
        ),
        Fails(
            "one of two logs while the other waits for its flag",
            _job(_windows(data=0.13), {0: _windows(other=0.13)}, hosts=1),
            ranks=(0,),
        ),
        Fails(
            "both ranks of one host",
            _job(_windows(), {2: _windows(data=0.1, backward=0.16), 3: _windows(data=0.11, backward=0.15)}),
            ranks=(2, 3),
        ),
        Passes("ranks that do not wait for each other", _job(_windows(), {1: _windows(forward=0.3)})),
        Passes(
            "a rank that takes two batches a step, the other three",
            _job(
                _windows(60, data=0.0001, forward=0.0, backward=0.0, optimizer=0.0, other=0.0219),
                {0: _windows(60, data=0.0, forward=0.0, backward=0.0, optimizer=0.0, other=0.033)},
                hosts=1,
            ),
        ),
        Passes(
            "the same, where a batch with a reduction takes longer",
            _job(
                _windows(60, mean=0.022, data=0.0, forward=0.0, backward=0.0, optimizer=0.0, other=0.01),
                {0: _windows(60, data=0.0, forward=0.0, backward=0.0, optimizer=0.0, other=0.033)},
                hosts=1,
            ),
        ),
        Fails(
            "gradients are accumulated, and the others wait in every eighth batch",
            _job(_windows(mean=0.49), {1: _windows(mean=0.49, forward=0.19)}),
            ranks=(1,),
        ),
        Fails(
            "a rank whose interpreter's lock is held now and then",
            _paused(RankPausesFacts(seconds=64.0, delays=8, delayed_seconds=16.0)),
            ranks=(2,),
        ),
        Passes(
            "a rank that was stopped once",
            _paused(RankPausesFacts(seconds=64.0, delays=1, delayed_seconds=16.0)),
        ),
        Fails(
            "a rank that its quota stops, in a loop of one part",
            _paused(_QUOTA),
            ranks=(2,),
        ),
        Passes(
            "all ranks have a quota that stops them",
            _job(_windows(), {}).put(_QUOTA),
        ),
        Fails(
            "rare long steps of a rank",
            _job(_rare(forward=0.1, backward=0.29), {1: _rare(forward=0.14, backward=0.25)}),
            ranks=(1,),
        ),
        Fails(
            "rare long steps of one of two, while the other waits for its flag as long",
            _job(_rare(other=0.11, waited=0.1), {0: _rare(other=0.11, waited=0.0)}, hosts=1),
            ranks=(0,),
        ),
        Passes(
            "rare long steps with equally long waits of both ranks",
            _job(_rare(other=0.11, waited=0.05), {}, hosts=1),
        ),
        Passes(
            "rare long steps in which no waits are known",
            _job(_rare(other=0.11), {}, hosts=1),
        ),
        Fails("a rank whose checkpoints the other waits for", _spanned(8), ranks=(0,)),
        Passes("checkpoints that take a twentieth of the time", _spanned(0.5)),
        Passes("the same share in the first seconds of a run", _spanned(2, training=2.0)),
        Fails("a rank that lists files before each epoch", _spanned(8, within="between"), ranks=(0,)),
        Passes("the same checkpoints on both ranks", _spanned(8, on=(0, 1))),
        Fails(
            "a rank that its peers wait for in the middle of a sharded forward pass",
            _sampled((0.7, 0.75, 0.6, 0.7), (0.1, 0.05, 0.2, 0.1)),
            ranks=(1,),
        ),
        Passes("ranks that wait for each other in turn", _sampled((0.7, 0.1, 0.7, 0.1), (0.1, 0.7, 0.1, 0.7))),
        Passes("a rank that waits a little less", _sampled((0.3, 0.32, 0.3, 0.3), (0.18, 0.2, 0.19, 0.18))),
        Passes(
            "waits within the backward pass of DDP, which stacks do not show",
            _sampled((0.7, 0.75, 0.6, 0.7), (0.1, 0.05, 0.2, 0.1)).alter(TrainingFacts, strategy="ddp"),
        ),
        Fails(
            "on GPUs the others wait where they read a value back",
            _job(_windows(other=0.12), {1: _windows(data=0.12)}, hosts=1, gpus=None),
            ranks=(1,),
        ),
    ),
)
def rank_straggling(
    job: Job,
    *,
    slower_share: float = 0.1,
    least_seconds: float = 0.005,
    least_windows: float = 3,
    watched_seconds: float = 3,
    persistent_share: float = 0.8,
) -> Iterator[Verdict]:
    """Ask whether a rank is consistently slower than the others.

    Why it hurts: all ranks wait for the slowest one in each step, so it slows down the whole job.
    Fix: Look for work that only the slow rank does, and for slow storage, a slow GPU or other processes on its host.
    """
    # TraceML warns from a tenth of the step. Less than 5 ms, or less than 3 s of steps, may be other processes on a
    # busy host; windows are medians of 20 steps, so single slow steps do not count.
    found = False
    for ranks in same_role(job):
        steps, windows = common_windows(ranks, int(least_windows), watched_seconds)
        found = found or bool(steps and len(windows) > 1)
        if len(windows) > 1:
            slow = list(_judge(job, ranks, steps, windows, slower_share, least_seconds, persistent_share))
            paused = slow or [*_throttled_alone(ranks)] or [*_delayed(ranks)]
            rare = paused or [*_rarely_slow(ranks, windows, slower_share, _waits(ranks))]
            outside = rare or [*_outside_steps(ranks, slower_share)]
            yield from outside or _hardly_waiting(ranks)
    if not found:
        yield Skip("not enough steps yet on ranks that do the same work")


class _Lag(msgspec.Struct, frozen=True):
    """The excess time of a rank in a window: ``excess`` seconds per step in ``part`` (``own`` in all parts), while the
    others wait ``waited`` seconds in ``wait``, and ``waited_in_all`` in all parts and in rare steps; ``total``: a step
    of this rank; ``longer``: the mean excess of its whole steps."""

    part: str
    excess: float
    own: float
    wait: str
    waited: float
    waited_in_all: float
    total: float
    longer: float

    def is_waited_for(self, limit: float) -> bool:
        """If the mean step is longer, the steps are independent: ranks that wait for each other have equal mean
        steps."""
        return self.longer < limit and self.waited_in_all >= NEAR * self.excess


def _judge(
    job: Job,
    ranks: tuple[Rank, ...],
    steps: tuple[int, ...],
    windows: Mapping[int, Mapping[int, Window]],
    share: float,
    least: float,
    persistent: float,
) -> Iterator[Finding]:
    lags: dict[int, list[_Lag]] = {}
    order = _waits(ranks)
    for step in steps:
        for rank, lag in _lags({rank: own[step] for rank, own in windows.items()}, order, share, least):
            lags.setdefault(rank, []).append(lag)
    slow: dict[str, dict[int, _Lag]] = {}
    for rank, own in lags.items():
        if len(own) >= persistent * len(steps):
            lag = _typical(own)
            if lag.is_waited_for(max(least, share * lag.total)):
                slow.setdefault(lag.part, {})[rank] = lag
    # If most ranks are slow, the others are the odd ones, and no rank waits for them.
    if sum(map(len, slow.values())) <= len(windows) / 2:
        for part, members in slow.items():
            yield _finding(job, ranks, part, members)


def _waits(ranks: tuple[Rank, ...]) -> tuple[str, ...]:
    training = next((found for rank in ranks if (found := rank.find(TrainingFacts))), None)
    on_gpu = training is not None and (training.device or "").startswith("cuda")
    return WAITS_ON_GPU if on_gpu else WAITS_ON_PROCESSOR


def _lags(
    windows: Mapping[int, Window], order: tuple[str, ...], share: float, least: float
) -> Iterator[tuple[int, _Lag]]:
    """A rank with excess time in a part in which ranks are likely to wait has waited; one with excess elsewhere, and
    less there, made others wait."""
    parts = _parts(windows)
    peers = {name: PeerValues(own[name] for own in parts.values()) for name in order}
    totals = PeerValues(window.total for window in windows.values())
    means = PeerValues(map(_mean, windows.values()))
    for rank, own in parts.items():
        excess = {name: own[name] - peers[name].median(own[name]) for name in order}
        part, wait = max(order, key=excess.__getitem__), min(order, key=excess.__getitem__)
        total = totals.median(windows[rank].total)
        limit = max(least, share * total)
        waited, longer = -excess[wait], windows[rank].total - total
        was_waited_for = waited >= limit and order.index(wait) < order.index(part)
        if excess[part] >= limit and (was_waited_for or longer >= limit):
            slower = _mean(windows[rank]) - means.median(_mean(windows[rank]))
            rarely = max(0.0, longer - slower)  # in single steps, which medians do not show
            waited_in_all = sum(max(0.0, -one) for one in excess.values()) + rarely
            yield rank, _Lag(part, excess[part], own[part], wait, waited, waited_in_all, windows[rank].total, slower)


def _parts(windows: Mapping[int, Window]) -> dict[int, dict[str, float]]:
    """The parts of each rank, with its waits apart where the gradients of all ranks were timed."""
    parts = {rank: parts_of(window) | {REDUCTION: 0.0} for rank, window in windows.items()}
    if all(window.gradients is not None for window in windows.values()):
        for rank, window in windows.items():
            whole = parts[rank]["backward"]
            parts[rank]["backward"] = own = min(whole, window.gradients or 0.0)
            waited = min(parts[rank]["other"], window.waited or 0.0)
            parts[rank]["other"] -= waited
            parts[rank][REDUCTION] = whole - own + waited
    return parts


def _mean(window: Window) -> float:
    return window.total if window.mean is None else window.mean


def _typical(lags: list[_Lag]) -> _Lag:
    part = Counter(lag.part for lag in lags).most_common(1)[0][0]
    own = [lag for lag in lags if lag.part == part]
    return msgspec.structs.replace(
        own[-1],
        excess=median(lag.excess for lag in own),
        own=median(lag.own for lag in own),
        waited=median(lag.waited for lag in own),
        waited_in_all=fmean(lag.waited_in_all for lag in own),
        total=median(lag.total for lag in own),
        longer=fmean(lag.longer for lag in own),
    )


def _finding(job: Job, ranks: tuple[Rank, ...], part: str, members: Mapping[int, _Lag]) -> Finding:
    worst = max(members, key=lambda rank: members[rank].excess)
    lag, numbers = members[worst], tuple(sorted(members))
    together = correlates(job, numbers)
    sizes = {rank.number: size for rank in ranks if (size := _largest(rank)) is not None}
    others = [size for rank, size in sizes.items() if rank != worst]
    units = sizes.get(worst), median(others) if others else None
    who = ranks_in_words(numbers) + (f" ({together[0]})" if together else "")
    spend = "spends" if len(numbers) == 1 else "spend up to"
    paused = next((rank.find(RankPausesFacts) for rank in ranks if rank.number == worst), None)
    quota = _throttled(paused) if paused is not None else ""
    return Finding(
        f"{who} {spend} {milliseconds(lag.own)} of a {milliseconds(lag.total)} step {_WORDS[part]} (peers: "
        f"{milliseconds(max(0.0, lag.own - lag.excess))}){quota}",
        ranks=numbers,
        evidence={
            "seconds_a_step_by_rank": {
                str(rank): {"own": one.own, "excess": one.excess, "others_wait": one.waited_in_all, "step": one.total}
                for rank, one in list(members.items())[:16]
            },
            "others_wait_in": _WAITS.get(lag.wait) or PHASES[lag.wait].removeprefix("in "),
            "goes_along_with": list(together),
            "largest_batch_units": {"own": units[0], "peers_median": units[1]},
        },
        effect=f"The other ranks wait {milliseconds(lag.waited_in_all)} for "
        f"{ranks_in_words((worst,))} in each step of {milliseconds(lag.total)}.",
        fix=_fix_of_quota(worst) if quota else _fix(job, part, units, worst, numbers),
        explains=("RUN005", "RUN013") if part == "data" else ("RUN013",),
    )


_WAITS = {"data": "data loading", REDUCTION: "the reduction of gradients"}
_WORDS = PHASES | {REDUCTION: "after its gradients are computed"}
_LEAST_LOST, _LEAST_TIMES = 2.0, 3
"""Seconds that rare pauses or long steps of a rank must cost in total, and their minimum number, above one."""
_LEAST_DELAYED, _LEAST_THROTTLED = 0.05, 0.1
"""Least share of the time for which a rank did not run, and for which its quota stopped it."""


def _delayed(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Ranks that could not run at times, although they were not throttled: their interpreter's lock was held."""
    pauses = {rank.number: one for rank in ranks if (one := rank.find(RankPausesFacts)) is not None}
    lost = PeerValues(one.delayed_seconds for one in pauses.values())
    for number, one in pauses.items():
        if one.delays < _LEAST_TIMES or one.delayed_seconds < max(_LEAST_LOST, _LEAST_DELAYED * one.seconds):
            continue
        if 2 * lost.median(one.delayed_seconds) > one.delayed_seconds:
            continue
        quota = _throttled(one)
        often = f"{one.delays} times ({one.delayed_seconds:.0f} s of the last {one.seconds:.0f} s)"
        pid, host = _process_of(ranks, number)
        yield Finding(
            f"Rank {number} was stopped {often}{quota}"
            if quota
            else f"Code in rank {number} held the interpreter lock (GIL) {often}",
            ranks=(number,),
            effect=f"The other ranks wait for rank {number} meanwhile.",
            fix=_fix_of_quota(number)
            if quota
            else f"Run `py-spy record --gil --native --pid {pid} --duration 30` on {host} to find the thread that "
            "holds the GIL, and move its work to a separate process or release the GIL around it.",
            explains=("RUN013",),
        )


def _process_of(ranks: tuple[Rank, ...], number: int) -> tuple[str, str]:
    """The process id of a rank, ``PID`` if it is unknown, and its host."""
    one = next(rank for rank in ranks if rank.number == number)
    progress = one.find(ProgressFacts)
    return str(progress.pid) if progress is not None and progress.pid else "PID", one.host.name


def _throttled_alone(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Ranks that their CPU quota stops, in a loop whose parts do not show which rank the others wait for."""
    pauses = {rank.number: one for rank in ranks if (one := rank.find(RankPausesFacts)) is not None}
    lost = PeerValues(one.throttled_seconds or 0.0 for one in pauses.values())
    for number, one in pauses.items():
        seconds, words = one.throttled_seconds or 0.0, _throttled(one)
        least = max(_LEAST_LOST, _LEAST_THROTTLED * one.seconds)
        if words and seconds >= least and 2 * lost.median(seconds) <= seconds:
            yield Finding(
                f"The CPU quota of rank {number} ({one.cpu_quota:g} CPUs) throttled it for {seconds:.0f} s of the last "
                f"{one.seconds:.0f} s",
                ranks=(number,),
                evidence={"throttled_periods": f"{one.throttled_periods} of {one.periods}"},
                effect=f"The other ranks wait while rank {number} is throttled.",
                fix=_fix_of_quota(number),
                explains=("RUN013",),
            )


def _rarely_slow(
    ranks: tuple[Rank, ...], windows: Mapping[int, Mapping[int, Window]], share: float, order: tuple[str, ...]
) -> Iterator[Finding]:
    """Ranks with rare long steps, which medians do not show: the sum of what they cost the others."""
    shared = sorted(set.intersection(*(set(own) for own in windows.values())))
    steps = [step for step in shared if all(own[step].means for own in windows.values())]
    means = {rank: {step: _means(own[step]) for step in steps} for rank, own in windows.items()}
    excess: dict[int, dict[str, list[float]]] = {rank: {name: [] for name in order} for rank in windows}
    for step in steps:
        for name in order:
            peers = PeerValues(own[step][name] for own in means.values())
            for rank, own in means.items():
                mean = own[step][name]
                excess[rank][name].append((mean - peers.median(mean)) * windows[rank][step].steps)
    for rank, parts in excess.items():
        part = max(order, key=lambda name: sum(parts[name]))
        costs = parts[part]
        lost, waited = sum(costs), -sum(min(0.0, sum(one)) for one in parts.values())
        whole = sum(_mean(windows[rank][step]) * windows[rank][step].steps for step in steps)
        times = [one for one in costs if one > 0.2 * lost / max(1, len(costs))]
        if lost < max(_LEAST_LOST, share * whole) or waited < NEAR * lost or len(times) < _LEAST_TIMES:
            continue
        wait = min(order, key=lambda name: sum(parts[name]))
        if max(costs) > 0.5 * lost or order.index(wait) >= order.index(part) or part == REDUCTION:
            continue
        compared = sum(windows[rank][step].steps for step in steps)
        usual = fmean(median(parts_of(own[step])[part] for own in windows.values()) for step in steps)
        longest = sorted(zip(costs, steps, strict=True), reverse=True)[: min(_SHOWN_WINDOWS, len(times))]
        slowest = max((windows[rank][step].slowest or 0.0) for step in steps)
        pid, host = _process_of(ranks, rank)
        yield Finding(
            f"Rank {rank} spent {lost:.3g} s of {whole:.3g} s {PHASES[part]} in rare long steps",
            ranks=(rank,),
            evidence={
                "steps_compared": compared,
                "median_step": f"{milliseconds(usual)} {PHASES[part]}",
                "extra_time_of_the_rank": ", ".join(
                    f"{milliseconds(cost)} in steps {step}-{step + windows[rank][step].steps - 1}"
                    for cost, step in sorted(longest, key=lambda one: one[1])
                ),
                "longest_step": milliseconds(slowest) if slowest else None,
            },
            effect=f"The other ranks waited {waited:.3g} s for rank {rank} in these {compared} steps.",
            fix=_FIX_OF_RARE[part].format(rank=rank, pid=pid, host=host),
            explains=("RUN013",),
        )


def _means(window: Window) -> dict[str, float]:
    """The means of the parts, with the known waits apart: a capture of an older version has none."""
    means = dict(zip(PHASES, window.means, strict=False))
    waited = min(means["other"], window.means[len(PHASES)]) if len(window.means) > len(PHASES) else 0.0
    return means | {"other": means["other"] - waited, REDUCTION: waited}


_SHOWN_WINDOWS = 6
"""Intervals of rare long steps that the evidence shows, those that cost most."""
_FIX_OF_RARE = {
    "data": "Check the samples and the storage that rank {rank} reads in these steps, or use more DataLoader workers.",
    "forward": "Look for work that rank {rank} does only in some calls of `forward`: recompilation by `torch.compile` "
    "(`TORCH_LOGS=recompiles` logs it), memory allocation, or larger inputs.",
    "backward": "Look for work that rank {rank} does only in some backward passes: hooks of gradients, memory "
    "allocation, or larger inputs.",
    "optimizer": "Look for work that only rank {rank} does in some calls of `optimizer.step()`, such as hooks or "
    "offloading.",
    "other": "Run `py-spy record --pid {pid} --duration 60 -o rank-{rank}.svg` on {host} to find the work that only "
    "rank {rank} does in some of its steps (saving, logging, evaluation), and move it to a background thread.",
}

_OUTSIDE = {"checkpoint": "on checkpoints", "between": "between epochs", "epoch-start": "before its epochs"}
"""Parts of the time outside of steps, which windows leave out."""
_LEAST_SPANNED = 25.0
"""Seconds of training from which on their share counts. Before, it may be that of the start alone: a schedule may save
checkpoints more often at first, and a run that ends earlier lost only some seconds."""


def _outside_steps(ranks: tuple[Rank, ...], share: float) -> Iterator[Finding]:
    """Ranks that save checkpoints or prepare epochs while their peers wait, for a large part of all the time."""
    spans = {rank.number: {one.first: one for one in steps.spans} for rank in ranks if (steps := rank.find(StepFacts))}
    own = {number: found for number, found in spans.items() if found}
    shared = sorted(set.intersection(*(set(found) for found in own.values()))) if len(own) > 1 else []
    rows = [first for first in shared if len({found[first].batches for found in own.values()}) == 1]
    for number, found in own.items():
        peers = [other for rank, other in own.items() if rank != number]
        excess = {part: _excess(part, found, peers, rows) for part in _OUTSIDE}
        part = max(_OUTSIDE, key=lambda name: sum(excess[name]))
        costs = excess[part]
        lost, whole = sum(costs), sum(sum(found[at].seconds) for at in rows)
        # Of most ranks: their other parts need not be compared.
        if whole < _LEAST_SPANNED or lost < max(_LEAST_LOST, share * whole):
            continue
        excess |= {other: _excess(other, found, peers, rows) for other in TIME_PARTS if other not in excess}
        waited = -sum(min(0.0, sum(one)) for one in excess.values())
        times = [one for one in costs if one > 0.2 * lost / max(1, len(costs))]
        if waited < NEAR * lost or len(times) < _LEAST_TIMES:
            continue
        if max(costs) <= 0.5 * lost:
            yield Finding(
                f"Rank {number} spent {lost:.0f} s of {whole:.0f} s {_OUTSIDE[part]} while its peers waited",
                ranks=(number,),
                evidence={"checkpoints" if part == "checkpoint" else "times": len(times)},
                effect=f"Training is interrupted for {lost / whole:.0%} of the time.",
                fix="Save less often, or in the background with `torch.distributed.checkpoint.async_save`."
                if part == "checkpoint"
                else f"Look for work that only rank {number} does between two epochs, such as listing files, shuffling "
                "or starting data workers, and do it once before the run.",
                explains=("RUN013",),
            )


def _excess(
    part: str, found: Mapping[int, TimeSpan], peers: Sequence[Mapping[int, TimeSpan]], rows: Sequence[int]
) -> list[float]:
    """The seconds of a rank in one part of each span above the median of its peers."""
    return [found[at].part(part) - median(other[at].part(part) for other in peers) for at in rows]


_SLOTS, _LEAST_LESS, _LESS_IN_EACH = 4, 0.2, 0.1
"""The newest periods in which waits were sampled, by how much less a rank waits than all of its peers, and in each
period. A share of 50 samples has a standard deviation of up to 0.07."""


def _hardly_waiting(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """A rank that hardly waits for its peers, while all of these wait, in parts that are equally long on all."""
    trainings = [found for rank in ranks if (found := rank.find(TrainingFacts))]
    shares = {rank.number: one.waiting for rank in ranks if (one := rank.find(RankPausesFacts)) and one.waiting}
    recent = {number: own[-_SLOTS:] for number, own in shares.items() if len(own) >= _SLOTS}
    if len(recent) < max(2, len(shares)) or not all(one.waits_within_step for one in trainings):
        return
    for number, own in recent.items():
        others = [one for rank, one in recent.items() if rank != number]
        less = [min(row) - mine for mine, row in zip(own, zip(*others, strict=True), strict=True)]
        if fmean(less) >= _LEAST_LESS and min(less) >= _LESS_IN_EACH:
            theirs = min(fmean(one) for one in others)
            yield Finding(
                f"Rank {number} waits for other ranks {fmean(own):.0%} of the time, its peers {theirs:.0%} or more",
                ranks=(number,),
                evidence={"waiting_by_rank": {str(rank): round(fmean(one), 2) for rank, one in recent.items()}},
                effect=f"The other ranks wait for rank {number} in each step.",
                fix=f"Look for work that only rank {number} does in its forward or backward pass, such as longer "
                "batches, and for other processes on its CPUs or its GPU.",
                explains=("RUN013",),
            )


def _throttled(pauses: RankPausesFacts) -> str:
    """``; its CPU quota (0.1 CPUs) throttles it``; empty if it did not matter."""
    periods = pauses.periods or 0
    share = (pauses.throttled_periods or 0) / periods if periods else 0.0
    if share < 0.1 or pauses.cpu_quota is None:
        return ""
    return f"; its CPU quota ({pauses.cpu_quota:g} CPUs) throttles it"


def _fix_of_quota(rank: int) -> str:
    return (
        f"Raise the CPU limit of rank {rank} (Docker `--cpus`, Kubernetes `resources.limits.cpu`), or lower its "
        "OMP_NUM_THREADS."
    )


def _largest(rank: Rank) -> int | None:
    facts = rank.find(RunMemoryFacts)
    samples: tuple[MemorySample, ...] = facts.samples[-5:] if facts else ()
    return max((sample.units for sample in samples if sample.units), default=None)


def _fix(job: Job, part: str, units: tuple[int | None, float | None], number: int, numbers: tuple[int, ...]) -> str:
    own, usual = units
    rank = next(one for one in job.ranks if one.number == number)
    host = rank.host.name
    if part in ("forward", "backward") and own and usual and own > 1.1 * usual:
        return (
            f"Divide the samples among the ranks by length: rank {number} has batches of up to {own:,} tokens or "
            f"samples, its peers {usual:,.0f}."
        )
    if part == "data":
        whose = "their" if len(numbers) > 1 else "its"
        return (
            f"Compare the storage that {ranks_in_words(numbers)} read{'' if len(numbers) > 1 else 's'}, the CPU load "
            f"of {host} and {whose} CPU affinity (`taskset -p PID`) with those of the other ranks."
        )
    if part in ("forward", "backward") and _waits((rank,)) is WAITS_ON_GPU:
        return (
            f"Run `nvidia-smi -q -d PERFORMANCE,CLOCK,PIDS` on {host} to look for thermal or power limits of the GPU "
            f"of rank {number} and for other processes on it."
        )
    if part in ("forward", "backward"):
        return f"Run `top` on {host} to look for other processes on the CPUs of rank {number}."
    hooks = "callbacks, `self.log(..., rank_zero_only=True)`, loggers" if uses_lightning(job) else "logging, evaluation"
    return (
        f"Look for work that only rank {number} does in each step, such as {hooks}, files written or tensors copied to "
        "the CPU."
    )
