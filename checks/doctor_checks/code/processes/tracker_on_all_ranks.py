"""CODE041: every rank starts its own run of an experiment tracker."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import mentions_ranks, words_behind
from doctor.lint.python.project.settings.options import left_off
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import per_script
from doctor.lint.python.single_rank import may_run_alone
from doctor.lint.python.training import ACCELERATOR, calls_of, is_test, several_ranks
from doctor.testing.script_cases import fails, passes

_STARTS = {
    "wandb.init": "run",
    "mlflow.start_run": "run",
    "comet_ml.Experiment": "experiment",
    "comet_ml.start": "experiment",
    "neptune.init_run": "run",
    "clearml.Task.init": "task",
    "swanlab.init": "run",
    "aim.Run": "run",
    "trackio.init": "run",
}
_PARTED = frozenset(
    {
        *("group", "mode", "disabled", "settings", "id", "resume"),
        *("run_id", "with_id", "run_hash", "experiment_key"),
    }
)
"""Arguments by which ranks may share a run or have runs on purpose."""
_OF_TRACKING = re.compile(
    r"wandb|w_and_b|mlflow|comet|neptune|clearml|swanlab|\baim|trackio|track|log|report", re.IGNORECASE
)
"""Options that ask for the tracker itself."""
_SWITCHES = ("WANDB_MODE", "WANDB_DISABLED", "WANDB_RUN_GROUP", "wandb.setup", "SWANLAB_MODE", "wandb.agent")


@rule(
    id="CODE041",
    severity=Severity.WARNING,
    reads=Script,
    mentions=tuple(name.partition(".")[0] for name in _STARTS),
    cases=lambda: (
        fails("on every rank", _script("wandb.init(project='gpt')  # !")),
        fails("in a function that all ranks run", _FUNCTION),
        fails("another tracker", _script("with mlflow.start_run(run_name='a'):  # !\n    print()", "import mlflow")),
        passes("on rank 0", _script("if rank == 0:\n    wandb.init(project='gpt')")),
        passes("in a group, by intention", _script("wandb.init(project='gpt', group='ddp')")),
        passes("off on the others", _script("wandb.init(mode='online' if rank == 0 else 'disabled')")),
        passes("a name with the rank in it", _script("wandb.init(name=f'run-{dist.get_rank()}')")),
        passes("under a flag that the other ranks turn off", _FLAG),
        passes("under a flag of the object that is on only on rank 0", _FLAG_OF_ONE),
        fails("under a flag of the object that is the same on all ranks", _FLAG_OF_ALL),
        passes("one run that exists", _script("mlflow.start_run(run_id=shared)", "import mlflow")),
        passes(
            "a job of Azure, whose processes share a run",
            _script("mlflow.start_run()", "import mlflow\nfrom azureml.core import Run"),
        ),
        passes("one process", "import wandb\nwandb.init(project='gpt')\n"),
        passes("before the ranks are started", _SPAWNED),
        passes("options that are not known", _script("wandb.init(**options)")),
    ),
)
def tracker_on_all_ranks(script: Script) -> Iterator[Violation]:
    """Ask whether only one rank starts a run of the experiment tracker.

    Why it hurts: each rank appears as a separate run with the curves of its own data, and waits for the network.
    Fix: Start the run and log to it only on rank 0.
    """
    ranks = several_ranks(script)
    if ranks is None or is_test(script) or any(one in script.text for one in _SWITCHES):
        return
    for call in script.calls(*_STARTS):
        if script.name(call.func).startswith("mlflow.") and _shares_runs(script):
            continue
        if script.is_open(call) or any(one.arg in _PARTED for one in call.keywords):
            continue
        words = frozenset[str]().union(*(words_behind(script, one) for one in _arguments(call)))
        function = script.function_of(call)
        if _is_switched_off(script, call):
            continue
        if function in run_by_all(script) and not may_run_alone(script, call) and not mentions_ranks(words):
            what = _STARTS[script.name(call.func)]
            option = left_off(script, call)
            is_off = option != "" and _OF_TRACKING.search(option) is None
            yield Violation(
                call,
                f"{script.text_of(call.func)} runs on all ranks, so each of them starts its own {what}",
                severity=Severity.INFO if is_off else None,
                preview=is_off,
                evidence=(("job_started_at_line", ranks.lineno),),
                fix=_fix(script, call, by_accelerate=script.name(ranks.func) == ACCELERATOR),
            )


def _fix(script: Script, call: ast.Call, *, by_accelerate: bool) -> str:
    """For wandb, what keeps later calls of ``wandb.log()`` valid on the other ranks."""
    is_first = "accelerator.is_main_process" if by_accelerate else "torch.distributed.get_rank() == 0"
    if script.name(call.func) == "wandb.init":
        return f'Pass `mode=None if {is_first} else "disabled"` to wandb.init.'
    if isinstance(script.parent(call), ast.withitem):
        entered = f"with {script.text_of(call, 50)} if {is_first} else contextlib.nullcontext():"
        return f"Enter the run, and log to it, on one rank only: `{entered}`."
    what = _STARTS[script.name(call.func)]
    return f"Put line {call.lineno}, and the calls that log to the {what}, under `if {is_first}:`."


_SHARES_RUNS = ("azureml", "azure.ai.ml", "MLFLOW_RUN_ID")
"""Azure Machine Learning sets MLFLOW_RUN_ID for all processes of a job, which ``mlflow.start_run()`` then resumes
(mlflow/tracking/fluent.py)."""


@per_script
def _shares_runs(script: Script) -> bool:
    modules = script.modules
    if modules is None or any(word in script.text for word in _SHARES_RUNS):
        return any(word in script.text for word in _SHARES_RUNS)
    pages = modules.pages(script.location) if script.location else ()
    return any(modules.mentioning(word) or any(word in one for one in pages) for word in _SHARES_RUNS)


def _is_switched_off(script: Script, call: ast.Call) -> bool:
    """Whether the call, or a call of its function, is under a flag of the object that is off on some ranks:
    ``if rank != 0: self._use_wandb = False``."""
    function = script.function_of(call)
    places = [call, *(calls_of(script, function) if function is not None else ())]
    return any(_asks_for_flag(script, one) for one in places)


def _asks_for_flag(script: Script, node: ast.AST) -> bool:
    tests = (ast.unparse(one.test) for one in script.around(node) if isinstance(one, ast.If))
    flags = {f"self.{name}" for test in tests for name in re.findall(r"\bself\.(\w+)", test)}
    return any(
        ast.unparse(target) in flags and _is_off_on_some(script, one)
        for one in (script.all(ast.Assign) if flags else ())
        for target in one.targets
    )


def _is_off_on_some(script: Script, assigned: ast.Assign) -> bool:
    """``False`` in a branch of some ranks, or a value that depends on the rank: ``args.wandb and is_main_process``."""
    if script.value(assigned.value) is False:
        return may_run_alone(script, assigned)
    return mentions_ranks(words_behind(script, assigned.value))


def _arguments(call: ast.Call) -> tuple[ast.expr, ...]:
    return (*call.args, *(one.value for one in call.keywords))


_FLAG = """\
import wandb

class Run:
    def __init__(self, rank):
        dist.init_process_group("nccl")
        self.uses_tracker = True
        if rank != 0:
            self.uses_tracker = False
        self.model = DDP(build())
        if self.uses_tracker:
            self.start()

    def start(self):
        wandb.init(project="gpt")

Run(rank)
"""


def _flagged(value: str, mark: str = "") -> str:
    return f"""\
import wandb

class Run:
    def __init__(self, args):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        self.uses_tracker = {value}
        self.model = DDP(build())
        if self.uses_tracker:
            wandb.init(project="gpt"){mark}

Run(parse())
"""


_FLAG_OF_ONE: str = _flagged("args.track and self.rank == 0")
_FLAG_OF_ALL: str = _flagged("args.track and args.project is not None", "  # !")


def _script(start: str, imported: str = "import wandb") -> str:
    return f"""\
{imported}

dist.init_process_group("nccl")
rank = dist.get_rank()
{start}
model = DDP(build())
"""


_FUNCTION = """\
import wandb

accelerator = Accelerator()

def track(config):
    wandb.init(project="sft", config=config)  # !

def main():
    track(load())

main()
"""
_SPAWNED = """\
import wandb

def main(rank):
    dist.init_process_group("nccl", rank=rank, world_size=4)
    model = DDP(build())

wandb.init(project="gpt")
mp.spawn(main, nprocs=4)
"""
