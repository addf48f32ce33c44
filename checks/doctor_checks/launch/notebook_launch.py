"""ENV013: a strategy that cannot start its processes from a notebook."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import inner_launcher, slurm_step
from doctor.api import Finding, Job, Severity, Verdict, check, event_groups, finding_from_logs
from doctor.facts import LaunchFacts, ProcessFacts, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

STARTS_SCRIPTS = ("ddp", "fsdp", "deepspeed", "hpu_parallel", "model_parallel")
"""Strategies that rerun the script for each device or spawn new interpreters: their launchers are not
interactive compatible (lightning/pytorch/strategies/launchers/subprocess_script.py, multiprocessing.py)."""

FORKS = ("notebook", "fork")
"""Name parts of strategies that fork instead, which works anywhere as long as CUDA is not initialized."""


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "pl.notebook"):
        of_old = group.value("strategy2")  # before Lightning 1.6, without ddp_notebook
        strategy = (group.value("strategy", "strategy2") or "").strip("'\"")
        named = f"strategy={strategy!r}" if strategy else "The strategy"
        yield finding_from_logs(
            group,
            f"{named} cannot start processes from a notebook or an interactive session",
            evidence={"strategy": strategy or None},
            confidence=0.95,
            fix=_AS_SCRIPT if of_old else _fix(strategy),
        )


@check(
    id="ENV013",
    severity=Severity.ERROR,
    when="PM",
    needs=(ProcessFacts, TrainerFacts),
    from_logs=_from_logs,
    impacts={
        r"^notebook_launcher": "notebook_launcher raises ValueError before it starts a process.",
        r"cannot import|still being imported": "The started processes fail before they run their target function.",
    },
    cases=lambda: (
        Passes("ddp in a script", _trained_by("ddp").alter(ProcessFacts, interactive=False)),
        Passes("ddp_notebook in a notebook", _trained_by("ddp_notebook_find_unused_parameters_false")),
        Passes("Lightning chooses", _trained_by("auto")),
        Passes("no strategy is stated", _trained_by(None)),
        Passes("a prompt inside torchrun", healthy().put(_trainer("ddp")).alter(ProcessFacts, interactive=True)),
        Fails("ddp in a notebook", _trained_by("ddp"), ranks=(0,)),
        Fails("DeepSpeed at a Python prompt", _trained_by("deepspeed_stage_2"), ranks=(0,)),
        Fails("spawn in a notebook", _trained_by("ddp_spawn"), ranks=(0,)),
        Fails(
            "accelerate",
            logged(
                "ValueError: To launch a multi-GPU training from your notebook, you need to avoid running any "
                "instruction using `torch.cuda` in any cell. Restart your notebook and make sure no cells use any CUDA "
                "function."
            ),
        ),
    ),
)
def notebook_launch(job: Job) -> Iterator[Verdict]:
    """Ask whether a strategy that starts processes from a script is used in a notebook or interactive session.

    Why it hurts: the Trainer raises MisconfigurationException, because there is no script to start for each device.
    Fix: Run the code as a script, or use `Trainer(strategy="ddp_notebook")` in a fresh kernel.
    """
    for process, trainer, identical in job.each(ProcessFacts, TrainerFacts, also=(LaunchFacts,)):
        launch = identical.find(LaunchFacts)
        started = launch is not None and (inner_launcher(launch) or slurm_step(launch) or launch.running_together)
        if process.interactive and not started and _starts_scripts(trainer.strategy):
            yield Finding(
                f"strategy={trainer.strategy!r} cannot start processes from a notebook or an interactive session",
                ranks=identical.ranks,
                evidence={"strategy": trainer.strategy, "interactive": True, "source": trainer.source},
                fix=_fix(trainer.strategy),
            )


def _fix(strategy: str | None) -> str:
    if (strategy or "ddp").startswith("ddp"):
        return 'Use `Trainer(strategy="ddp_notebook")` in a fresh kernel, or run the code as a script.'
    return _AS_SCRIPT


_AS_SCRIPT = "Save the cells as a script, and run it with `python`."


def _starts_scripts(strategy: str | None) -> bool:
    name = (strategy or "").lower()
    return name.startswith(STARTS_SCRIPTS) and not any(part in name for part in FORKS)


def _trainer(strategy: str | None) -> TrainerFacts:
    return TrainerFacts(source="PL_TRAINER_*", strategy=strategy)


def _trained_by(strategy: str | None) -> JobBuilder:
    return healthy(hosts=1, per_host=1).put(_trainer(strategy)).alter(ProcessFacts, interactive=True)
