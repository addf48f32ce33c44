"""HOST006: processes are forked after CUDA was initialized."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import on_processor
from doctor.api import (
    Finding,
    Job,
    Rank,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import GpuFacts, GpuProcess, Namespace, ProcessFacts, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in include/linux/proc_ns.h: in this namespace, process ids are those of the driver."""


def _notebook(strategy: str, *, holds_gpu: bool = False, interactive: bool = True, gpus: int = 2) -> JobBuilder:
    sketch = (
        healthy(per_host=1, gpus=gpus)
        .put(TrainerFacts(source="PL_TRAINER", strategy=strategy, accelerator="auto"))
        .alter(
            ProcessFacts,
            interactive=interactive,
            forked_after_cuda=False,
            namespaces=(Namespace("pid", INITIAL_PID_NAMESPACE),),
        )
    )
    return sketch.gpu(0, processes=(GpuProcess(10_000, 400 << 20),)) if holds_gpu else sketch


_SPAWN = (
    'Pass `multiprocessing_context="spawn"` to the DataLoader if a worker failed, or start the ranks with torchrun.'
)
_EARLY = 'Do not call `.cuda()`, `.to("cuda")` or other CUDA functions before {call}, and restart the {what}.'


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "cuda.forked"):
        text = group.first.text
        only_hints = all(event.value("weak") for event in group.events)
        if only_hints:
            summary = "CUDA initialization failed, probably in a process that was forked after CUDA was used"
            effect = "The process cannot use CUDA: it fails, and the other ranks wait for it until their timeout."
            fix = _SPAWN
        elif "notebook_launcher" in text:
            summary, effect = "CUDA was used before `notebook_launcher()` forked the ranks", _NOT_STARTED
            fix = _EARLY.format(call="`notebook_launcher()`", what="notebook kernel")
        elif "Accelerator" in text:
            summary = "An `Accelerator` was created before `notebook_launcher()` forked the ranks"
            effect, fix = (
                _NOT_STARTED,
                "Restart the notebook kernel, and create the `Accelerator` inside the training function.",
            )
        elif "create new processes" in text:
            summary, effect = "CUDA was already initialized when Lightning tried to fork the ranks", _NOT_STARTED
            fix = _EARLY.format(call="`trainer.fit()`", what="process or notebook kernel")
        else:
            summary, effect, fix = "CUDA was used in a process that was forked after CUDA was initialized", "", _SPAWN
        yield finding_from_logs(
            group,
            summary,
            effect=effect,
            confidence=0.4 if only_hints else 0.95,
            fix=fix,
            explains=("DATA012",),
        )


_NOT_STARTED = "No rank is started."


@check(
    id="HOST006",
    severity=Severity.ERROR,
    scope=Scope.RANK,
    when="PM",
    needs=(ProcessFacts,),
    from_logs=_from_logs,
    impacts={
        r"fail if CUDA is used before": (
            'If CUDA is used before `trainer.fit()`, each rank fails with "Cannot re-initialize CUDA in forked '
            'subprocess".'
        ),
        r"already holds GPU memory|after (?:its|their) parent": (
            'The first CUDA call of the forked process fails with "Cannot re-initialize CUDA in forked '
            'subprocess", or hangs in a driver lock.'
        ),
        r"in a process that was forked after": (
            "The forked process fails, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("unknown", healthy()),
        Passes("ranks made by spawn or exec", healthy().alter(ProcessFacts, forked_after_cuda=False)),
        Passes("a notebook before its first use of CUDA", _notebook("ddp_notebook")),
        Passes("a script that forks ranks for the CPU", _notebook("ddp_fork", interactive=False, gpus=0)),
        Passes("subprocesses while CUDA is in use", _notebook("ddp", holds_gpu=True)),
        Fails(
            "one rank was forked from a process that used CUDA",
            healthy(per_host=4).alter(ProcessFacts, ranks=(2,), forked_after_cuda=True),
            ranks=(2,),
        ),
        Fails("a notebook that holds GPU memory will fork", _notebook("ddp_notebook", holds_gpu=True), ranks=(0,)),
        Fails(
            "a script forks its ranks for GPUs",
            _notebook("ddp_fork_find_unused_parameters_true", interactive=False),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
    ),
)
def fork_after_cuda(job: Job) -> Iterator[Verdict]:
    """Ask whether ranks or DataLoader workers are forked from a process that already uses CUDA.

    Why it hurts: a CUDA context does not survive a fork. The first CUDA call of the child fails with "Cannot
    re-initialize CUDA in forked subprocess", or the child hangs in a driver lock.
    Fix: Start the ranks with torchrun, or use `DataLoader(..., multiprocessing_context="spawn")` for workers that need
    CUDA.
    """
    forked: list[int] = []
    holding: dict[str, list[int]] = {}
    forking: dict[str, list[int]] = {}
    told = False
    for rank in job.ranks:
        process = rank.find(ProcessFacts)
        if process is None:
            continue
        told = told or process.forked_after_cuda is not None
        strategy = _forking_strategy(rank)
        if process.forked_after_cuda:
            forked.append(rank.number)
        elif strategy and _holds_gpu(rank, process):
            holding.setdefault(strategy, []).append(rank.number)
        elif strategy and not process.interactive:
            forking.setdefault(strategy, []).append(rank.number)
    yield from _findings(forked, holding, forking)
    if not (told or forked or holding or forking):
        yield Skip("before the run, it is unknown whether CUDA is in use when processes are forked")


def _findings(forked: list[int], holding: dict[str, list[int]], forking: dict[str, list[int]]) -> Iterator[Verdict]:
    if forked:
        yield Finding(
            f"{ranks_in_words(tuple(forked)).capitalize()} {'was' if len(forked) == 1 else 'were'} forked after "
            f"{'its' if len(forked) == 1 else 'their'} parent process had initialized CUDA",
            ranks=tuple(forked),
            fix="Start the ranks with torchrun, or do not use CUDA before they are forked.",
            evidence={"torch.cuda._is_in_bad_fork": True},
        )
    for strategy, ranks in holding.items():
        yield Finding(
            f"Strategy {strategy} forks the ranks from a process that already holds GPU memory",
            ranks=tuple(ranks),
            evidence={"strategy": strategy, "parent_holds_gpu_memory": True},
            fix=_EARLY.format(call="`trainer.fit()`", what="process or notebook kernel")
            if strategy.startswith("ddp_notebook")
            else _without_fork(strategy),
        )
    for strategy, ranks in forking.items():
        yield Finding(
            f"Strategy {strategy} forks the ranks, which fail if CUDA is used before",
            ranks=tuple(ranks),
            severity=Severity.WARNING,
            evidence={"strategy": strategy, "interactive": False},
            fix=_without_fork(strategy),
        )


def _without_fork(strategy: str) -> str:
    """Lightning registers ``ddp`` with the same suffixes, such as ``_find_unused_parameters_true``."""
    suffix = strategy.removeprefix("ddp_fork").removeprefix("ddp_notebook")
    return f'Use `strategy="ddp{suffix}"`, which does not fork the ranks.'


def _forking_strategy(rank: Rank) -> str | None:
    """The strategy with which Lightning will fork ranks that use GPUs (registered names: ddp_fork, ddp_notebook and
    both with find_unused_parameters); ``None`` if it will not."""
    trainer = rank.find(TrainerFacts)
    name = trainer.strategy if trainer else None
    if not name or not name.startswith(("ddp_fork", "ddp_notebook")):
        return None
    return name if rank.find(GpuFacts) is not None and on_processor(rank) is None else None


def _holds_gpu(rank: Rank, process: ProcessFacts) -> bool:
    gpus = rank.find(GpuFacts)
    if gpus is None or process.namespace("pid") != INITIAL_PID_NAMESPACE:
        return False
    return any(process.pid == other.pid for gpu in gpus.gpus for other in gpu.processes or ())
