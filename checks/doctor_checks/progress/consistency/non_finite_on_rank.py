"""RUN008: the loss became NaN or Inf on a rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.analysis.logs.error_lines import ends
from doctor.analysis.logs.root_event import LaterEvents
from doctor.analysis.stats.rank_roles import uses_lightning
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Rank,
    Severity,
    Skip,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.core.text import lazy_compile
from doctor.facts import Event, NonFinite, ReplicaFacts, StepFacts
from doctor.testing import Fails, JobBuilder, Passes, logged, running


def _first(step: int, what: str = "loss", name: str = "") -> ReplicaFacts:
    return ReplicaFacts(non_finite=(NonFinite(step, what, name, "nan"),), losses=200)


def _spoilt(*ranks: int, step: int = 120, then: int | None = None) -> JobBuilder:
    others = ReplicaFacts(losses=200) if then is None else _first(then)
    return running(2, 2).put(others).put(_first(step), ranks=ranks)


def _from_logs(job: Job) -> Iterator[Finding]:
    ended = list(event_groups(job, "loss.fatal"))
    for group in ended:
        survived = job.evidence is not None and LaterEvents(job.evidence).outlived(group.events[-1])
        yield finding_from_logs(
            group,
            _claim(group),
            ranks=_named_ranks(group),
            fix=_fix_of_log(group),
            severity=Severity.WARNING if survived else None,
            confidence=0.9,
            symptoms=not survived,
        )
    if not ended:
        yield from _passing(job)
    smallest = tuple(event for event in _overflows(job) if float(_scale(event)) < 1)
    if smallest and not ended:
        yield finding_from_logs(
            EventGroup("loss.overflow", smallest),
            f"The loss scale fell to {_scale(smallest[-1])}, and gradients still overflow",
            fix=_FIX_OF_SCALE,
            severity=Severity.WARNING,
            confidence=0.7,
            symptoms=False,
        )


def _passing(job: Job) -> Iterator[Finding]:
    """Values that logs show as NaN in their last step or after it; the run may have continued with them.

    A training loss that is NaN when the run ends has spoilt the parameters: nothing came after it."""
    marks = job.evidence.marks if job.evidence else ()
    last = {mark.file: mark.line for mark in marks if mark.kind == "mark.step"}
    losses = tuple(mark for mark in marks if mark.kind == "mark.nan" and "loss" in mark.text.lower())
    warned = job.evidence.of("loss.not_finite") if job.evidence else ()
    for kind, spoilt in (("mark.nan", losses), ("loss.not_finite", warned)):
        final = tuple(event for event in spoilt if event.line >= last.get(event.file, 0))
        if final:
            what, value = _named(final[-1]) if kind == "loss.not_finite" else ("loss", "NaN")
            is_result = kind == "mark.nan" and _is_result(job, final[-1])
            subject = _subject(what)
            yield finding_from_logs(
                EventGroup(kind, final),
                f"{subject[:1].upper()}{subject[1:]} {_verb(what)} {value} in the last logged step"
                + (", and the run ended" if is_result else ""),
                ranks=(),
                effect="The trained parameters are probably NaN, and so are those of the last checkpoint."
                if is_result
                else "",
                severity=None if is_result else Severity.WARNING,
                confidence=0.7 if is_result else 0.6,
                symptoms=False,
            )
            return


_TRAINING_LOSS = lazy_compile(
    r"(?i)(?:^|[^\w/])(?<!val )(?<!valid )(?<!validation )(?<!eval )(?<!evaluation )(?<!test )(?:train(?:ing)?[_/ ])?"
    r"loss(?:_step|_epoch)?[\"']?\s{0,4}[:=]?\s{0,4}[\"'(]{0,2}(?:tensor\()?nan\b"
)
"""Not of a validation, which may have had no batches."""


def _is_result(job: Job, spoilt: Event) -> bool:
    """Whether a training loss is NaN where the log shows that the run ended."""
    found = ends(job.evidence) if job.evidence and _TRAINING_LOSS.search(spoilt.text) else ()
    return any(end.file == spoilt.file and end.line >= spoilt.line for end in found)


def _named(event: Event) -> tuple[str, str]:
    """The quantity that a message names, and its value."""
    what = next(filter(None, (event.value(f"what{n}") for n in ("", *range(2, 8)))), "loss")
    value = next(filter(None, (event.value(f"value{n}") for n in ("", *range(2, 12)))), "not finite")
    # Messages such as "became infinite or NaN" and "NaN or Inf found" name both.
    is_either = _EITHER.search(event.text) is not None
    return what.lower(), "NaN or Inf" if is_either else _spelled(value)


_EITHER = lazy_compile(
    r"(?i)\b(?:nans?|inf(?:inite|inity)?s?)\b`?(?: or | and/or |/|, )`?(?:nans?|inf(?:inite|inity)?s?)\b"
)


def _spelled(value: str) -> str:
    """``NaN`` and ``Inf`` as Python code and the documentation of PyTorch write them in text."""
    plain = value.strip("`").removeprefix("tensor(").rstrip("s")
    return {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}.get(plain.lower(), plain)


def _overflows(job: Job) -> tuple[Event, ...]:
    return job.evidence.of("loss.overflow") if job.evidence else ()


def _scale(event: Event) -> str:
    return event.value("scale") or event.value("scale2") or "1"


def _named_ranks(group: EventGroup) -> tuple[int, ...] | None:
    """The ranks that messages name, or ``None`` for those that logged them."""
    named = {int(rank) for event in group.events if (rank := event.value("rank") or event.value("rank2")) is not None}
    return tuple(sorted(named)) or None


def _claim(group: EventGroup) -> str:
    if group.value("scale"):
        return "The loss scale of float16 reached its minimum: gradients overflow at every scale"
    if function := group.value("function"):
        return f"{function} returned NaN in the backward pass"
    what, value = _named(group.first)
    ranks = _named_ranks(group) or group.ranks
    on = f" on {ranks_in_words(ranks)}" if ranks else ""
    if stopped := _STOPPED.search(group.first.text):
        return f"EarlyStopping ended the training because {stopped[1]} was {value}"
    verb = "were" if _verb(what) == "are" else "was"
    if "probability tensor" in what or _OF_DISTRIBUTION in group.first.text:
        subject = "a probability tensor" if "probability tensor" in what else "a parameter of a distribution"
        if named := _PARAMETER.search(group.first.text):
            subject = f"the parameter {named[1]} of the distribution {named[2]}"
        return f"The program ended because {subject} had invalid values{on}"
    if what == "tensor":
        return f"The program ended because a tensor contained {value}{on}"
    return f"The program ended because {_subject(what)} {verb} {value}{on}"


_STOPPED = lazy_compile(r"Monitored metric (\S{1,80}) = .{1,40} is not finite")
"""Lightning's ``EarlyStopping(check_finite=True)``."""
_OF_DISTRIBUTION = "of distribution "
_PARAMETER = lazy_compile(r"Expected parameter (\w{1,40}) .{0,200}?of distribution (\w{1,40})")
"""torch/distributions/distribution.py"""


def _verb(what: str) -> str:
    if what == "tensor":
        return "contains"
    return "are" if what.endswith("s") and not what.endswith("ss") else "is"


def _subject(what: str) -> str:
    """``the loss``; ``a tensor``, if a message says no more."""
    if what == "floatingpointerror":
        return "a value"
    return f"a {what}" if what == "tensor" else what if "_" in what else f"the {what}"


def _fix_of_log(group: EventGroup) -> str:
    if group.value("scale"):
        return _FIX_OF_SCALE
    if group.value("function"):
        return (
            "Find the forward operation in the traceback that anomaly detection prints above this error, and check its "
            "inputs for NaN, Inf and zero."
        )
    return ""


_FIX_OF_SCALE = "Train in bfloat16 instead of float16, or lower the learning rate."


@check(
    id="RUN008",
    severity=Severity.ERROR,
    when="RM",
    needs=(ReplicaFacts,),
    from_logs=_from_logs,
    impacts={
        r"loss scale of float16 reached": "The program ends, and the steps since the last checkpoint are lost.",
        r"loss scale": "The optimizer skips each step that overflows, so the model trains slowly or not at all.",
        r"program ended": "The steps since the last checkpoint are lost.",
        r"EarlyStopping ended": "The training ends before its last epoch.",
        r"last logged step": (
            "If the parameters are NaN too, later steps train nothing, and later checkpoints are useless."
        ),
        r"backward pass": "Anomaly detection raises RuntimeError, which ends the program.",
        r"on the other ranks": (
            "The gradient reduction has spread the value to all ranks: the parameters are NaN, and later steps train "
            "nothing."
        ),
        r"^The gradient": (
            "The next reduction spreads the value to all ranks, and the optimizer makes the parameters NaN."
        ),
        r"^The loss became": (
            "The gradients of this loss are NaN. The next reduction spreads them to all ranks, and later steps "
            "train nothing."
        ),
    },
    cases=lambda: (
        Passes("all losses are numbers", running(2, 2)),
        Passes(
            "a scaler of float16 that searches for its scale: gradients alone, on all ranks",
            running(2, 2).put(_first(3, "gradient", "layer.weight")),
        ),
        Passes("all ranks at once: training diverges", _spoilt(0, 1, 2, 3), silent=False),
        Passes(
            "no other rank has come so far yet",
            running(2, 2).put(ReplicaFacts(losses=119)).put(_first(120), ranks=(0,)),
        ),
        Passes(
            "ranks whose newest facts are of the start of the run",
            running(2, 2).put(ReplicaFacts()).put(StepFacts(seen=3)).put(_first(120), ranks=(0,)),
        ),
        Passes("no losses are recorded", running(2, 2).put(ReplicaFacts())),
        Fails("one rank, and one batch later all", _spoilt(2, then=121), ranks=(2,)),
        Fails("one rank alone", _spoilt(3), ranks=(3,)),
        Fails("both ranks of a host", _spoilt(2, 3, then=122), ranks=(2, 3)),
        Fails(
            "gradients of one rank alone",
            running(2, 2).put(_first(7, "gradient", "layer.weight"), ranks=(1,)),
            ranks=(1,),
        ),
        Fails("all ranks at the same time", _spoilt(0, 1, 2, 3), ranks=(0, 1, 2, 3), severity=Severity.INFO),
        Fails(
            "all ranks at the same time, in all batches since",
            running(2, 2).put(
                ReplicaFacts(non_finite=(NonFinite(120, "loss", value="nan"),), losses=140, non_finite_losses=21)
            ),
            ranks=(0, 1, 2, 3),
            severity=Severity.WARNING,
        ),
        Passes(
            "a scaler that finds its scale",
            logged("[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"),
        ),
        Fails(
            "DeepSpeed ends at the smallest scale",
            logged(
                "[rank1]: Exception: Current loss scale already at minimum - cannot decrease scale anymore. "
                "Exiting run."
            ),
            ranks=(1,),
        ),
        Fails(
            "a progress bar that ends with NaN",
            logged("step 8: loss 0.7", "step 9: loss nan", "step 10: loss nan"),
            severity=Severity.WARNING,
        ),
        Fails(
            "a run that ends with a loss of NaN",
            logged("Epoch 0/1 10/10 24.00it/s train_loss: nan", "exit status 0"),
            severity=Severity.ERROR,
        ),
        Fails(
            "a run that ends with a validation loss of NaN",
            logged("Epoch 0/1 10/10 24.00it/s validation loss: nan", "exit status 0"),
            severity=Severity.WARNING,
        ),
        Fails(
            "outputs of a network that end the program",
            logged("[rank1]: ValueError:Network outputs is NAN! Stop Training"),
            ranks=(1,),
        ),
        Fails(
            "early stopping at a loss that is not finite",
            logged(
                "Monitored metric val_loss = nan is not finite. Previous best value was inf. Signaling Trainer to stop."
            ),
        ),
        Fails(
            "a warning about NaN in the last step",
            logged("step 8: loss 0.7", "WARNING:root:NaN or Inf found in input tensor."),
            severity=Severity.WARNING,
        ),
        Passes(
            "a gradient that is not finite once",
            logged("step 8: loss 0.7", "WARNING: gradient norm is inf", "step 9: loss 0.7", "step 10: loss 0.6"),
        ),
        Passes("a loss that recovers", logged("step 8: loss nan", "step 9: loss 0.7", "step 10: loss 0.6")),
        Fails(
            "the scale of Apex falls below 1",
            logged("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 0.0078125"),
            severity=Severity.WARNING,
        ),
    ),
)
def non_finite_on_rank(job: Job) -> Iterator[Verdict]:
    """Ask whether a loss or gradient became NaN or Inf, and on which rank first.

    Why it hurts: the next reduction spreads it to all ranks: every parameter becomes NaN, and the run continues without
    training anything.
    Fix: Run again with `torch.autograd.set_detect_anomaly(True)` to find the operation whose gradient is NaN, or check
    the batches for samples that are not finite.
    """
    judged = [seen for rank in job.ranks if (seen := _seen(rank))]
    if not judged:
        yield Skip("no loss was reported so far")
    spoilt = [seen for seen in judged if seen.first]
    if not spoilt:
        return
    step = min(seen.step for seen in spoilt)
    first = [seen for seen in spoilt if seen.step == step]
    others = [seen for seen in judged if seen.step > step and seen.losses >= step]
    if others:
        yield _finding(job, first, others, step)
    elif len(first) == len(judged) and first[0].first and first[0].first.what == "loss" and not _is_early(job, step):
        yield _diverged(job, first, first[0].first)


def _is_early(job: Job, step: float) -> bool:
    """Whether the newest facts of some ranks are of an earlier batch: their losses may be finite."""
    seen = [steps.seen for rank in job.ranks if (steps := rank.find(StepFacts)) is not None]
    return len(job.ranks) < (job.world_size or 0) or any(batches < step for batches in seen)


def _diverged(job: Job, first: list[_RankLosses], loss: NonFinite) -> Finding:
    """A loss that is not finite on all ranks at once: in one batch, or in all since, as if parameters are NaN."""
    clipping = "`Trainer(gradient_clip_val=...)`" if uses_lightning(job) else "`torch.nn.utils.clip_grad_norm_`"
    who = "all ranks" if len(first) > 1 else "the only rank"
    lasting = min(seen.lasting for seen in first)
    has_diverged = lasting >= LASTING
    value = _spelled(loss.value or "not finite")
    return Finding(
        f"The loss has been {value} on {who} since batch {loss.step:,}, in each of the last {lasting:,} batches"
        if has_diverged
        else f"The loss became {value} on {who} in batch {loss.step:,}: no single rank is at fault",
        ranks=tuple(seen.rank.number for seen in first),
        evidence={} if has_diverged else {"non_finite_losses": lasting},
        effect="The parameters are probably NaN, so later steps train nothing, and later checkpoints are useless."
        if has_diverged
        else "If the optimizer applies this step, the parameters become NaN; a gradient scaler skips it.",
        fix=f"Resume from a checkpoint before batch {loss.step:,} with a lower learning rate, or clip gradients with "
        f"{clipping}."
        if has_diverged
        else f"If later losses are not finite either, lower the learning rate, or clip gradients with {clipping}.",
        severity=Severity.WARNING if has_diverged else Severity.INFO,
    )


LASTING = 10
"""Losses in a row that are not finite on any rank: a gradient scaler that searches for its scale leaves losses finite,
and a bad batch spoils one of them."""


class _RankLosses(msgspec.Struct, frozen=True):
    rank: Rank
    first: NonFinite | None
    losses: int
    lasting: int

    @property
    def step(self) -> float:
        return self.first.step if self.first else float("inf")


def _seen(rank: Rank) -> _RankLosses | None:
    replica = rank.find(ReplicaFacts)
    if replica is None or not (replica.losses or replica.non_finite):
        return None
    # In one batch the loss comes before its gradients.
    first = min(replica.non_finite, key=lambda one: (one.step, one.what != "loss"), default=None)
    return _RankLosses(rank, first, replica.losses, replica.non_finite_losses)


def _finding(job: Job, first: list[_RankLosses], others: list[_RankLosses], step: float) -> Finding:
    ranks = tuple(seen.rank.number for seen in first)
    what = first[0].first or NonFinite(int(step), "loss")
    where = f" of {what.name}" if what.name else ""
    finite = sum(seen.first is None for seen in others)
    batches = int(min(seen.step for seen in others) - step) if finite < len(others) else 0
    later = "one batch" if batches == 1 else f"{batches:,} batches"
    rest = f", and on the other ranks {later} later" if batches else "; it is finite on all other ranks"
    anomaly = "Trainer(detect_anomaly=True)" if uses_lightning(job) else "torch.autograd.set_detect_anomaly(True)"
    return Finding(
        f"The {what.what}{where} became {_spelled(what.value or 'not finite')} on {ranks_in_words(ranks)} in batch "
        f"{int(step):,}{rest}",
        ranks=ranks,
        evidence={
            "first_on_others": {str(seen.rank.number): seen.first.step for seen in others[:32] if seen.first},
            "still_finite": [seen.rank.number for seen in others if seen.first is None][:32],
        },
        fix=(
            f"Inspect batch {int(step)} of rank {ranks[0]} for empty or broken samples, or run again with `{anomaly}` "
            "to find the operation whose gradient is NaN."
        ),
    )
