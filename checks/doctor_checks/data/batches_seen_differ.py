"""DATA010: the data loader of a rank ended earlier than those of others."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.exits import RunEnd
from doctor.analysis.logs.root_event import exceptions
from doctor.analysis.stats.majority import split_values
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Skip,
    Source,
    Unknown,
    Verdict,
    check,
    correlates,
    describe,
    event_groups,
    finding_from_logs,
    line_of,
    ranks_in_words,
)
from doctor.facts import LoaderEpoch, LoaderFacts, LogEvidence, ProgressFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, logged, running, with_loader
from doctor_checks.data._rank_loaders import (
    AT_THE_SAME_STEP,
    EVALUATION,
    TRAINING,
    PeerLoaders,
    advice,
    any_stuck,
    batches_in_words,
    effect_of_waiting,
    ends_by_steps,
    limit_argument,
    loader_hook,
    odd_by_count,
    peer_loaders,
)


class _EpochBatches(msgspec.Struct, frozen=True):
    """``ended``: the ranks whose loader was exhausted."""

    epoch: int
    batches: dict[int, int]
    ended: frozenset[int]

    @property
    def shortest(self) -> int:
        return min(self.batches[rank] for rank in self.ended)


def _streams(batches: dict[int, tuple[int, bool]], *, stage: str = "train", world: int = 3) -> JobBuilder:
    sketch = running(1, world)
    for rank in range(world):
        seen, ended = batches.get(rank, (100, True))
        epochs = (LoaderEpoch(0, batches=seen, ended=ended),)
        sketch = with_loader(sketch, ranks=(rank,), stage=stage, kind="iterable", length=None, epochs=epochs)
    return sketch


_LOST_PEER = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:24984"
_AGENT = "W0102 03:04:05.678000 5 torch/distributed/elastic/multiprocessing/api.py:"


def _table_entry(rank: int, pid: int, code: str) -> tuple[str, ...]:
    """Lines of a process in torchrun's table of failures."""
    return (
        f"[{rank}]:",
        "  time      : 2026-01-02_03:04:05",
        "  host      : node0",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: {pid})",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "data.exhausted"):
        named = tuple(sorted({int(rank) for rank in group.values("rank")}))
        if not 1 < job.world_size <= len(named):
            who = ranks_in_words(named)
            yield finding_from_logs(
                group,
                f"{who} ran out of batches",
                ranks=named,
                effect=f"Unless `join()` wraps the loop, the other ranks wait for {who} until a collective times out.",
                confidence=0.75,
            )
    if job.evidence is not None:
        stopped = tuple(event for event in exceptions(job.evidence) if event.value("type") == "StopIteration")
        ranks = {event.rank for event in stopped if event.rank is not None}
        if stopped and 0 < len(ranks) < job.world_size:
            group = EventGroup(stopped[0].kind, stopped)
            who, verb = ranks_in_words(group.ranks), "fails" if len(group.ranks) == 1 else "fail"
            yield finding_from_logs(
                group,
                f"{who} raised StopIteration, probably because the data ended early",
                effect=f"{who.capitalize()} {verb}, and the other ranks wait until their timeout.",
                confidence=0.7,
            )


@check(
    id="DATA010",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(LoaderFacts,),
    or_needs=(ProgressFacts,),
    needs_peers=True,
    from_logs=_from_logs,
    impacts={
        r"ran out of batches while others": "PyTorch raises this error on all ranks, and the job ends.",
        r"uneven workload": "The program ends the epoch early and skips the remaining batches.",
    },
    cases=lambda: (
        Passes("all loaders end after as many batches", running(hosts=2, per_host=2)),
        Passes("StopIteration on all ranks", logged(*(f"[rank{rank}]: StopIteration" for rank in range(2)))),
        Fails(
            "StopIteration on one rank",
            logged("[rank0]: batch_size=8", "[rank1]: StopIteration", "[rank2]: batch_size=8"),
            ranks=(1,),
        ),
        Fails(
            "torchrun's table does not list a rank that ended normally",
            logged(
                *(f"[rank{rank}]: RuntimeError: {_LOST_PEER}" for rank in (0, 1)),
                "2026-01-02 03:04:05 [rank2]: epoch 0 step 5/5 loss 0.1",
                f"{_AGENT}1028] Sending process 9 closing signal SIGTERM",
                f"{_AGENT}1002] failed (exitcode: 1) local_rank: 1 (pid: 10) of binary: /usr/bin/python",
                "Failures:",
                *_table_entry(0, 9, "-15"),
                "Root Cause (first observed failure):",
                *_table_entry(1, 10, "1"),
            ),
            ranks=(2,),
        ),
        Passes(
            "an older torchrun does not list the ranks that it ended",
            logged(
                *(f"[rank{rank}]: RuntimeError: {_LOST_PEER}" for rank in (0, 1)),
                "2026-01-02 03:04:05 [rank2]: epoch 0 step 5/5 loss 0.1",
                f"{_AGENT}1028] Sending process 9 closing signal SIGTERM",
                f"{_AGENT}1028] Sending process 11 closing signal SIGTERM",
                f"{_AGENT}1002] failed (exitcode: 1) local_rank: 1 (pid: 10) of binary: /usr/bin/python",
                "Root Cause (first observed failure):",
                *_table_entry(1, 10, "1"),
            ),
            silent=False,
        ),
        Passes(
            "a Trainer of transformers, which max_steps ends at the same step",
            _streams({1: (103, True)}).alter(TrainingFacts, framework="transformers", max_steps=150),
            silent=False,
        ),
        Passes("one rank has not reached the end yet", _streams({1: (97, False)})),
        Passes(
            "one rank is an epoch ahead",
            with_loader(_streams({}), ranks=(1,), epochs=lambda old: (*old, LoaderEpoch(1, batches=3))),
        ),
        Passes("a limit, which is not the loader's end", _streams({0: (100, False), 1: (100, False)})),
        Passes("uneven inputs are joined", _streams({1: (103, True)}).alter(TrainingFacts, joins=True)),
        Passes(
            "batches by next(), and loaders that are started anew",
            with_loader(_streams({1: (103, True)}), by_next=True, epochs=lambda old: (*old, LoaderEpoch(1, batches=3))),
        ),
        Fails(
            "batches by next(), and a rank that stops where its loader ends",
            with_loader(_streams({1: (97, True)}), by_next=True).alter(ProgressFacts, state="stalled"),
            ranks=(1,),
        ),
        Passes("uneven validation", _streams({1: (103, True)}, stage="validate"), silent=False),
        Passes(
            "a loop of the user's own, whose ranks may train models of their own",
            in_a_loop(_streams({1: (103, True)})),
            silent=False,
        ),
        Passes(
            "two groups of ranks, each as long as it is",
            in_a_loop(_streams(dict.fromkeys((2, 3), (90, True)), world=4), (0, 1), (2, 3)),
        ),
        Passes(
            "most ranks may still end where the first one did",
            _streams({0: (97, True), 1: (98, False), 2: (97, False)}),
        ),
        Fails(
            "one ended, one went on, one stands between its batches",
            _streams({0: (97, False), 1: (97, True), 2: (98, False)}).alter(
                ProgressFacts, ranks=(0, 2), state="stalled"
            ),
            ranks=(1,),
        ),
        Fails(
            "the last one may still end, and changes nothing",
            _streams({0: (97, True), 1: (97, True), 2: (98, False), 3: (97, False)}, world=4),
            ranks=(2,),
        ),
        Fails("one stream of three ends early", _streams({1: (97, True)}), ranks=(1,)),
        Fails("one stream of three is longer", _streams({2: (101, True)}), ranks=(2,)),
        Fails("two ranks: the longer one blocks", _streams({1: (101, True)}, world=2), ranks=(1,)),
        Fails("the longer one has begun a batch that no other rank has", _streams({1: (101, False)}), ranks=(1,)),
        Passes(
            "a loop with an exit has fetched a batch more, and may leave before it is used",
            with_loader(_streams({1: (101, False)}), has_exits=True),
        ),
        Fails(
            "a loop with an exit is stuck in a batch more",
            with_loader(_streams({1: (101, False)}), has_exits=True).alter(ProgressFacts, ranks=(1,), state="stalled"),
            ranks=(1,),
        ),
        Fails(
            "a loop with an exit has used a batch more",
            with_loader(_streams({1: (102, False)}), has_exits=True),
            ranks=(1,),
        ),
        Fails("within one of two groups", in_a_loop(_streams({3: (103, True)}, world=4), (0, 1), (2, 3)), ranks=(3,)),
        Fails(
            "in a plain loop",
            _streams({0: (60, True)}).alter(TrainingFacts, framework="plain"),
            ranks=(0,),
        ),
    ),
)
def batches_seen_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether the loaders of all ranks ended after the same number of batches.

    Why it hurts: ranks with more batches wait until the timeout in a collective that the others never enter, or
    gradients of different steps are averaged without an error.
    Fix: Give every rank the same number of batches, or stop all ranks when the shortest stream ends.
    """
    if (found := diagnose_stall(job)) is not None and found.data_ended:
        yield _of_stacks(found)
        return
    if found is not None and found.ending is not None and found.ending.left and job.evidence is not None:
        yield _of_early_end(job.evidence, found.ending)
        return
    readers_known = [group for one in peer_loaders(job, (*TRAINING, *EVALUATION)) for group in one.by_group()]
    if not any(reader.loader.epochs for readers in readers_known for reader in readers.members):
        yield Skip("no batch was observed yet")
    for readers in readers_known:
        if all(reader.training.joins for reader in readers.members):
            continue
        # Ranks that are behind the one whose loader was exhausted may still end equally.
        ended = (_without_unused(job, readers, seen) for seen in _epochs(readers) if seen.ended)
        differing = next((seen for seen in ended if max(seen.batches.values()) > seen.shortest), None)
        if differing is None or _goes_on(job, readers):
            continue
        if odd := _odd(job, differing):
            yield _finding(job, readers, differing, odd)
        else:
            yield Unknown(
                "a data loader has ended; whether those of most ranks continue is not known yet", readers.ranks
            )


def _without_unused(job: Job, readers: PeerLoaders, seen: _EpochBatches) -> _EpochBatches:
    """The same without the batch that a loop has fetched beyond the shortest loader, and may leave before it is used.

    A loop without an exit uses it, and one that is stuck does too."""
    if any_stuck(job):
        return seen
    may_leave = {reader.rank for reader in readers.members if reader.may_leave} - seen.ended
    one_more = seen.shortest + 1
    unused = {rank for rank in may_leave if seen.batches.get(rank) == one_more}
    return msgspec.structs.replace(seen, batches={**seen.batches, **dict.fromkeys(unused, seen.shortest)})


def _goes_on(job: Job, readers: PeerLoaders) -> bool:
    """Whether the program takes batches by ``next()``, and ranks whose loader ended have started it again or ended."""
    states = {rank.number: rank.find(ProgressFacts) for rank in job.ranks}
    if not any(reader.loader.by_next for reader in readers.members):
        return False
    if any(one is not None and one.state not in ("running", "ended") for one in states.values()):
        return any(epoch.ended for reader in readers.members for epoch in reader.loader.epochs[:-1])
    return True


def _of_stacks(found: Diagnosis) -> Finding:
    uneven = found.uneven
    ended, continuing = (uneven.ended, uneven.continuing) if uneven is not None else ((), ())
    loop = uneven.loop if uneven is not None else None
    what = f"the loop over `{loop.loop_data}`" if loop is not None else "the training epoch"
    return Finding(
        f"{ranks_in_words(ended)} ended {what} while {ranks_in_words(continuing)} "
        f"{'are' if len(continuing) > 1 else 'is'} still in it: {found.places_apart}",
        ranks=found.ranks,
        evidence={
            "ended": list(ended[:64]),
            "continuing": list(continuing[:64]),
            **({"loop": f"{place_of_frame(loop)}, line {loop.loop[0]}-{loop.loop[1]}"} if loop is not None else {}),
        },
        fix="Give every rank the same number of batches, or wrap the loop in `model.join()` of DDP.",
        confidence=found.confidence,
        explains=("RUN001", "RUN002", "RUN006", "RUN010", "RUN012"),
        source=Source(loop.file, loop.line) if loop is not None else None,
    )


def _of_early_end(evidence: LogEvidence, ending: RunEnd) -> Finding:
    lost = tuple(sorted({*ending.ranks, *ending.consequences}))
    return Finding(
        f"{ranks_in_words(ending.left)} ended normally while {ranks_in_words(lost)} "
        f"{'were' if len(lost) > 1 else 'was'} still training, probably after fewer batches",
        ranks=ending.left,
        evidence={"said": [line_of(event) for event in exceptions(evidence) if event.rank in lost][:4]},
        effect=f"{ranks_in_words(lost).capitalize()} lose{'s' if len(lost) == 1 else ''} the connection or "
        f"wait{'s' if len(lost) == 1 else ''} until a timeout, and fail{'s' if len(lost) == 1 else ''}.",
        fix="Give every rank the same number of batches, or look for a `return`, `break` or `sys.exit(0)` that depends "
        "on the rank.",
        confidence=0.65,
        explains=("RUN004", "RUN006", "RUN012"),
    )


def _epochs(readers: PeerLoaders) -> Iterator[_EpochBatches]:
    batches: dict[int, dict[int, int]] = {}
    ended: dict[int, set[int]] = {}
    for reader in readers.members:
        for epoch in reader.loader.epochs:
            batches.setdefault(epoch.epoch, {})[reader.rank] = epoch.batches
            if epoch.ended:
                ended.setdefault(epoch.epoch, set()).add(reader.rank)
    for number in sorted(batches):
        yield _EpochBatches(number, batches[number], frozenset(ended.get(number, ())))


def _odd(job: Job, seen: _EpochBatches) -> tuple[int, ...] | None:
    """Ranks that are not beyond the shortest and did not end there count like the longer ones in a stuck run; while it
    runs and they are decisive, the result is ``None``."""
    shortest = seen.shortest
    known = {rank: count for rank, count in seen.batches.items() if rank in seen.ended or count > shortest}
    undecided = set(seen.batches).difference(known)
    longer = min(count for count in known.values() if count > shortest)
    continuing, ending = (odd_by_count({**known, **dict.fromkeys(undecided, count)}) for count in (longer, shortest))
    run_states = {progress.state for progress, _ in job.facts(ProgressFacts)}
    if not undecided or "running" not in run_states or run_states & {"stalled", "failed"}:
        return continuing
    certain = tuple(rank for rank in continuing if rank not in undecided)
    return certain if set(certain) == set(ending).difference(undecided) else None


def _finding(job: Job, readers: PeerLoaders, seen: _EpochBatches, odd: tuple[int, ...]) -> Finding:
    shortest = seen.shortest
    by_steps = readers.stage in TRAINING and ends_by_steps(readers.members)
    is_error = readers.stage in TRAINING and readers.is_one_job and not by_steps
    counts = {rank: f"{count} {'in all' if rank in seen.ended else 'so far'}" for rank, count in seen.batches.items()}
    mine = {seen.batches[rank] for rank in odd}
    others = set(seen.batches.values()) - mine
    rest = tuple(rank for rank in seen.batches if rank not in odd)
    on_others = ranks_in_words(rest) if len(rest) == 1 else "the others"
    return Finding(
        f"The {readers.name} yielded {batches_in_words(*sorted(mine))} on {ranks_in_words(odd)} in epoch {seen.epoch}"
        + (f", but {_listed(others)} on {on_others}" if others else ""),
        ranks=odd,
        evidence={
            "batches": describe(split_values(counts)),
            "goes_with": list(correlates(job, odd)),
        },
        effect=AT_THE_SAME_STEP
        if by_steps
        else effect_of_waiting({rank: max(count, shortest) for rank, count in seen.batches.items()}, trains=True)
        if is_error
        else _effect(readers.is_one_job),
        fix=advice(
            job,
            lightning=f"Set `Trainer({limit_argument(readers.stage)}={shortest})`, or better, give "
            f"every rank the same number of samples in `{loader_hook(readers.stage)}`, because Lightning does "
            "not shard iterable datasets.",
            transformers="Shard the stream so that all shards have the same length."
            if by_steps
            else f"Set `TrainingArguments(max_steps={shortest})`, or better, shard the stream so that all shards have "
            "the same length.",
            plain=f"Stop the loop after {batches_in_words(shortest)} on every rank with `itertools.islice`, or better, "
            "shard the stream so that all shards have the same length.",
        ),
        severity=Severity.ERROR if is_error else Severity.INFO,
        explains=("RUN001", "RUN002", "RUN004", "RUN006", "RUN010", "RUN012") if is_error else (),
    )


def _effect(is_one_job: bool) -> str:
    if not is_one_job:
        return (
            "None if the ranks train separate models; if they use collectives, ranks with more batches wait until the "
            "timeout."
        )
    return (
        "If each batch runs a collective, ranks with more batches wait in it until the timeout; otherwise this is "
        "harmless."
    )


def _listed(values: set[int]) -> str:
    return ", ".join(f"{value:,}" for value in sorted(values)[:4]) + (" and others" if len(values) > 4 else "")
