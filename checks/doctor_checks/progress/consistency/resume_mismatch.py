"""RUN017: a checkpoint with a different world size or sharding, or ranks that resume at different steps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.core.text import lazy_compile
from doctor.facts import Event
from doctor.testing import Fails, Passes, logged

_FLAT = (
    "size mismatch for layers.0._fsdp_wrapped_module.flat_param_0: copying a param with shape torch.Size([1048576]) "
    "from checkpoint, the shape in current model is torch.Size([524288])."
)


@check(
    id="RUN017",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    compares_ranks=False,
    needs_peers=True,
    impacts={
        r"different steps": (
            "The ranks load different optimizer states, and different parameters if nothing synchronizes them, so the "
            "replicas may diverge. Ranks that run more steps wait in a collective that the others never join."
        ),
        r"^No random number state": (
            "A rank without its saved state draws different random numbers than in the first run, so the run is not "
            "reproduced exactly."
        ),
        r"sharded differently|sharding differs|different shape|saved with|ZeRO stage 3": (
            "The checkpoint does not load, and the run cannot resume."
        ),
    },
    cases=lambda: (
        Passes("all resume at one step", logged(*(f"[rank{r}]: Resuming from checkpoint step 1200" for r in range(3)))),
        Passes(
            "a job that was resumed twice",
            logged("[rank0]: Resuming from step 100", "[rank0]: Resuming from step 900"),
        ),
        Passes(
            "a new head for fine-tuning",
            logged(
                "size mismatch for head.weight: copying a param with shape torch.Size([1000, 512]) from checkpoint, "
                "the shape in current model is torch.Size([10, 512])."
            ),
        ),
        Passes(
            "random states of fewer processes",
            logged(
                "Didn't find an RNG file for process 5, if you are resuming a training that wasn't launched in a "
                "distributed fashion, reproducibility is not guaranteed."
            ),
            silent=False,
        ),
        Fails(
            "a parameter that ZeRO stage 3 has not gathered",
            logged(
                "[rank1]:   size mismatch for head.weight: copying a param with shape torch.Size([1000, 512]) from "
                "checkpoint, the shape in current model is torch.Size([0])."
            ),
        ),
        Fails("FSDP's flat parameters", logged(f"RuntimeError: Error(s) in loading state_dict: {_FLAT}")),
        Fails(
            "one rank resumes elsewhere",
            logged(
                "[rank0]: Resuming from step 1200",
                "[rank1]: Resuming from step 1200",
                "[rank2]: Resuming from step 1100",
            ),
            ranks=(2,),
        ),
        Fails(
            "a program that compares the world sizes itself",
            logged("[rank0]: RuntimeError: checkpoint a.pt was saved with world_size=2, but this job has world_size=4"),
        ),
        Passes("equal world sizes", logged("Checkpoint saved with world size 8, current world size: 8")),
    ),
)
def resume_mismatch(job: Job) -> Iterator[Verdict]:
    """Ask whether a checkpoint matches the ranks that resume from it, and whether all resume at the same step.

    Why it hurts: shards written with another world size do not load, or load incorrectly. Ranks at different steps call
    different collectives and hang.
    Fix: Resume with the same number of ranks and the same sharding, or convert the checkpoint to a full state dict.
    """
    if job.evidence is None:
        yield Skip("no logs to read checkpoint messages from")
    for group in event_groups(job, "torch.resume_world", "run.resume_argument", "run.resume_init"):
        was = group.value("was", "was2", "was3", "was4", "old", "old2", "old3")
        now = group.value("now", "now3", "now4", "new", "new2", "new3")
        if was and was == now:
            continue
        if group.value("was2") and not any(_REFUSED.search(event.text) for event in group.events):
            continue
        # Llama's loader: a file for each model-parallel rank (llama/generation.py).
        is_of_model = group.value("arg") is None and _OF_MODEL in group.first.text
        what = (
            f"{group.value('arg')} {was}"
            if group.value("arg")
            else f"model-parallel size {was}"
            if is_of_model
            else f"{was or 'a different number of'} rank{'' if was == '1' else 's'}"
        )
        yield finding_from_logs(
            group,
            f"The checkpoint was saved with {what}"
            + (
                f" but is loaded with {now}{_ranks(now) if is_of_model else ''}"
                if now
                else " and cannot be loaded with a different number of them"
            ),
            ranks=(),
            fix=f"Set {_option(group)} to {was}, or convert the checkpoint{f' to size {now}' if now else ''}."
            if group.value("arg") and was
            else f"Start the job with {was}{_ranks(was)}, or convert the checkpoint to model-parallel size {now}."
            if is_of_model and was
            else f"Resume with {what}, or convert the checkpoint to a full state dict first."
            if was
            else "",
            confidence=0.95,
        )
    for group in event_groups(job, "torch.dcp_mismatch", by=("was", "now")):
        if group.value("was"):
            yield finding_from_logs(
                group,
                f"{group.value('key2')} has size {group.value('was')} in the checkpoint but {group.value('now')} in "
                "this job: the model or its sharding differs",
                ranks=(),
                fix="Use the sizes of the model and of its tensor and pipeline parallelism with which the checkpoint "
                "was saved.",
                confidence=0.7,
            )
    for group in event_groups(job, *_SIZES):
        of_shards = tuple(one for one in group.events if _is_of_shard(one))
        if of_shards:
            first = of_shards[0]
            name = first.value("key") or first.value("key2") or "A tensor"
            is_zero = first.value("now") == "torch.Size([0])"
            is_flat = bool(_OF_SHARDS.search(name))
            yield finding_from_logs(
                EventGroup(group.kind, of_shards),
                f"{name} is empty in this job, probably because ZeRO stage 3 has sharded it"
                if is_zero
                else f"{name} in the checkpoint is sharded differently than in this job"
                if is_flat
                else f"{name} in the checkpoint has a different shape than in this job",
                ranks=(),
                evidence=_sizes(first),
                fix=f"Load {name} inside `deepspeed.zero.GatheredParameters(..., modifier_rank=0)`."
                if is_zero
                else "Resume with the same number of ranks and the same wrapping as when the checkpoint was saved, or "
                "load a full state dict."
                if is_flat
                else "Load with the wrapping and the state-dict type with which the checkpoint was saved.",
                confidence=0.75,
            )
    yield from map(_of_random_states, event_groups(job, "run.resume_rng"))
    yield from _steps(job)


def _of_random_states(group: EventGroup) -> Finding:
    """``rng_state_5.pth``, or ``rng_state.pth`` in a job of one process, is not in the checkpoint (Trainer of
    transformers, ``_load_rng_state``)."""
    missing = tuple(sorted({int(number) for number in group.values("of") if len(number) < 8}))
    files = f"`rng_state_{missing[0]}.pth`" if len(missing) == 1 else "the missing `rng_state_*.pth`"
    return finding_from_logs(
        group,
        f"No random number state for {ranks_in_words(missing, 1)}: saved by fewer ranks, or left on another host"
        if missing
        else "No random number state for this process: several ranks saved the checkpoint",
        ranks=missing,
        fix=f"Copy {files} into the checkpoint on this host, or resume with as many ranks as saved it, if the run must "
        "be reproduced exactly."
        if missing
        else "Resume with as many ranks as saved the checkpoint, if the run must be reproduced exactly.",
        severity=Severity.INFO,
        confidence=0.8,
        symptoms=False,
    )


def _sizes(event: Event) -> dict[str, str]:
    """``torch.Size([2, 3])`` as ``[2, 3]``."""
    sizes = {"written": event.value("was"), "in_this_job": event.value("now")}
    return {name: size.removeprefix("torch.Size(").rstrip(")") for name, size in sizes.items() if size}


def _option(group: EventGroup) -> str:
    """The option of Megatron that sets an argument; else the argument (megatron/training/checkpointing.py)."""
    name = group.value("arg") or ""
    return f"`--{name.replace('_', '-')}`" if re.fullmatch(r"\w+_parallel_size", name) else name


def _ranks(count: str) -> str:
    return " rank" if count == "1" else " ranks"


_OF_MODEL = "a checkpoint for MP="
_SIZES = ("torch.state_mismatch", "run.resume_sizes")
"""Messages about one tensor of a checkpoint: another model, or another sharding."""
_OF_SHARDS = lazy_compile(r"flat_param|(?:^|[._])(?:dp_)?rank_?\d+\b")
_EMPTY, _SINGLE = "[0]", "[1]"
"""Shapes of a parameter that ZeRO stage 3 has not gathered (deepspeed/runtime/zero/partition_parameters.py): empty, in
releases of 2021 one element."""
_REFUSED = lazy_compile(r"\bbut\b|cannot|can't|\w(?:Error|Exception)\b")


def _is_of_shard(event: Event) -> bool:
    """Whether a tensor is a shard: by its name, or because only one of the two shapes is flat or a placeholder."""
    name = event.value("key") or event.value("key2") or ""
    if _is_placeholder(event.value("was") or "", event.value("now") or ""):
        return True
    was, now = (len(re.findall(r"\d+", event.value(side) or "")) for side in ("was", "now"))
    return bool(_OF_SHARDS.search(name)) or (event.kind == "run.resume_sizes" and was != now)


def _is_placeholder(was: str, now: str) -> bool:
    """Whether one of two shapes is a placeholder of the other: all values are in shards."""
    pairs = ((was, now), (now, was))
    return any((_EMPTY in one and _EMPTY not in other) or (_SINGLE in one and "," in other) for one, other in pairs)


def _steps(job: Job) -> Iterator[Finding]:
    by_rank: dict[int, list[Event]] = {}
    for group in event_groups(job, "run.resumed"):
        for event in group.events:
            if event.rank is not None:
                by_rank.setdefault(event.rank, []).append(event)
    if len(by_rank) < 2 or len({sum(event.count for event in events) for events in by_rank.values()}) > 1:
        return
    last = {rank: events[-1] for rank, events in by_rank.items()}
    steps: dict[str, list[int]] = {}
    for rank, event in last.items():
        steps.setdefault(event.value("step") or event.value("step2") or "", []).append(rank)
    if len(steps) > 1:
        ordered = sorted(steps.items(), key=lambda item: -len(item[1]))
        even = len(ordered[0][1]) == len(ordered[1][1])
        odd = sorted(rank for _, ranks in (ordered if even else ordered[1:]) for rank in ranks)
        events = tuple(last[rank] for rank in (*odd, *(rank for rank in last if rank not in odd)))
        yield finding_from_logs(
            EventGroup("run.resumed", events),
            "Ranks resume at different steps: "
            + "; ".join(f"{ranks_in_words(tuple(sorted(ranks)))} at step {step}" for step, ranks in ordered[:4]),
            ranks=tuple(odd),
            fix="Choose the checkpoint on rank 0, and broadcast its path with "
            "`torch.distributed.broadcast_object_list`.",
            confidence=0.8,
            explains=("RUN002",),
        )
