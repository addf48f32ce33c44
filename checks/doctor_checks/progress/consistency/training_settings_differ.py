"""RUN020: ranks that train one model use different settings."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.stats.rank_roles import replicas_in
from doctor.analysis.stats.setting_differences import SettingDifference, setting_differences
from doctor.api import Finding, Job, Scope, Severity, Skip, Verdict, check
from doctor.facts import TORCH_SEED, PointInTime, ProgressFacts, ReplicaFacts, StepSettings, TrainingFacts, Variable
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, running


def _sampled(name: str, usual: str, other: str, *ranks: int, step: int = 100) -> JobBuilder:
    """Four ranks that sampled a setting after step 50 and ``step``; ``ranks`` have another value at the end."""
    usually = (StepSettings(50, (Variable(name, usual),)), StepSettings(step, (Variable(name, usual),)))
    odd = (usually[0], StepSettings(step, (Variable(name, other),)))
    return running(2, 2).alter(ReplicaFacts, settings=usually).alter(ReplicaFacts, ranks=ranks, settings=odd)


def _reducing(more: float) -> JobBuilder:
    """Rank 2 reduces gradients in each of three batches, and takes a batch in ``more`` times the seconds of others."""

    def at_pace(seconds: float) -> tuple[PointInTime, ...]:
        return tuple(PointInTime("train", "step", batch, 1000.0 + seconds * batch) for batch in range(8))

    sketch = _sampled("gradient reductions per optimizer step", "1", "3", 2)
    return sketch.alter(ProgressFacts, recent=at_pace(0.1)).alter(ProgressFacts, ranks=(2,), recent=at_pace(0.1 * more))


@check(
    id="RUN020",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="R",
    needs=(TrainingFacts,),
    needs_peers=True,
    impacts={
        r"accumul": (
            "Ranks reduce gradients after different numbers of batches, and wait for each other in different "
            "collectives."
        ),
        r"^lr|weight_decay|momentum|betas|clip|max_grad_norm|^learning_rate|^warmup|^optim": (
            "The ranks apply different updates to equal gradients, so their models diverge."
        ),
        r"precision": (
            "Gradients that were computed with different precision are averaged, and DDP may fail on tensors of "
            "different types."
        ),
        r"find_unused|static_graph|broadcast_buffers|bucket_cap": (
            "DistributedDataParallel calls other collectives on one rank than on the others, which deadlocks or aborts "
            "them."
        ),
        r"max_epochs|max_steps|limit_": (
            "Ranks run different numbers of steps, and those that run more wait in a collective that the others never "
            "join."
        ),
        r"val_check_interval|check_val|evaluat": (
            "One rank evaluates while the others train, and they wait for each other in different collectives."
        ),
    },
    cases=lambda: (
        Passes("the same settings on all ranks", running(2, 2)),
        Passes("a single rank", running(1, 1)),
        Passes(
            "a setting of a later step, which not all ranks have reached",
            _sampled("lr", "0.1", "0.05", 1, step=150).alter(
                ReplicaFacts, ranks=(0,), settings=(StepSettings(50, (Variable("lr", "0.1"),)),)
            ),
        ),
        Passes(
            "two of four ranks, before the others have reported theirs",
            _sampled("lr", "0.1", "0.05", 1).alter(ReplicaFacts, ranks=(2, 3), settings=()),
        ),
        Passes(
            "a custom loop, whose ranks may train different models",
            in_a_loop(running(1, 2).alter(TrainingFacts, ranks=(1,), precision="autocast to bfloat16")),
        ),
        Passes(
            "a seed per rank, for dropout masks and augmentations",
            running(1, 2)
            .alter(TrainingFacts, arguments=(Variable(TORCH_SEED, "7"),))
            .alter(TrainingFacts, ranks=(1,), arguments=(Variable(TORCH_SEED, "8"),)),
        ),
        Passes(
            "stages of a pipeline",
            running(1, 2)
            .alter(TrainingFacts, ranks=(1,), accumulate=4, data_parallel_size=1)
            .alter(TrainingFacts, ranks=(0,), data_parallel_size=1),
        ),
        Fails("a frozen layer on one rank", _sampled("parameters frozen in training", "none", "head", 1), ranks=(1,)),
        Fails("a step that one rank skipped", _sampled("batches trained", "100", "101", 1), ranks=(1,)),
        Fails("dropout is off on one rank", _sampled("modules in eval mode", "none", "dropout", 1), ranks=(1,)),
        Fails("gradients that one rank reduces in batches of accumulation, too", _reducing(3.0), ranks=(2,)),
        Passes("further backward passes of one rank, which do not delay it", _reducing(1.1)),
        Fails("another optimizer on one rank", _sampled("optimizer class", "SGD", "Adam", 1), ranks=(1,)),
        Fails("a learning rate that a scheduler lowered on one rank", _sampled("lr", "0.1", "0.05", 2), ranks=(2,)),
        Fails(
            "autocast on one rank",
            running(2, 2).alter(TrainingFacts, ranks=(3,), precision="bf16-mixed"),
            ranks=(3,),
        ),
        Fails(
            "gradients are accumulated on one rank",
            running(1, 4).alter(TrainingFacts, ranks=(2,), accumulate=4),
            ranks=(2,),
        ),
        Fails(
            "DistributedDataParallel looks for unused parameters on one rank of a loop",
            in_a_loop(running(1, 3), (0, 1, 2))
            .alter(TrainingFacts, arguments=(Variable("find_unused_parameters", "False"),))
            .alter(TrainingFacts, ranks=(2,), arguments=(Variable("find_unused_parameters", "True"),)),
            ranks=(2,),
        ),
        Fails(
            "one of two ranks evaluates more often",
            running(1, 2).alter(TrainingFacts, ranks=(1,), arguments=(Variable("val_check_interval", "50"),)),
            ranks=(0, 1),
        ),
    ),
)
def training_settings_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks that train one model use the same settings.

    Why it hurts: the ranks compute different updates for one model, or wait for each other in different collectives.
    Fix: Read settings from one configuration on all ranks, and call `model.train()` on all of them.
    """
    if not replicas_in(job):
        yield Skip("no two ranks are known to train one model")
    for one in setting_differences(job):
        yield _finding(one)


def _finding(one: SettingDifference) -> Finding:
    return Finding(
        one.text,
        ranks=one.ranks,
        evidence={"values": {str(group.value): list(group.ranks[:64]) for group in one.split.groups}},
        effect=one.effect,
        fix=one.fix,
    )
