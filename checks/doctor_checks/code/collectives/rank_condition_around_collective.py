"""CODE005: a collective call inside a rank-dependent branch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.knowledge.releases import end_of_line
from doctor.lint.engine.rule import LONGEST_SUMMARY
from doctor.lint.python.collective_paths import ends_in_error
from doctor.lint.python.collectives import CollectiveCall, collectives_and_forwards
from doctor.lint.python.lightning_version import known_lightning
from doctor.lint.python.matching_collectives import flow_of, unmatched_condition
from doctor.lint.python.project.before_group import waits_for_nobody
from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.project.settings.compared_ranks import is_certain_of
from doctor.lint.python.project.settings.options import switch_off_by_default
from doctor.lint.python.rank_branches import (
    RankCondition,
    block_of,
    denied_test,
    main_first,
    plain_test,
    rank_condition,
)
from doctor.lint.python.script import last_name
from doctor.lint.python.training import is_without_gradients
from doctor.lint.python.wrapped_models import FORWARD_OF_DDP, is_wrapped_later, parameter_names, shows_buffers
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE005",
    severity=Severity.ERROR,
    reads=Script,
    mentions=(
        *("distributed", "accelerate", "lightning", "deepspeed", "horovod", "Trainer", "all_reduce", "all_gather"),
        *("DataParallel", "fully_shard", "rank", "is_main"),
    ),
    foreshadows=("RUN006",),
    preview_infos=True,
    impacts={
        r"lets the other ranks enter": (
            "The other ranks run the block while the first one is still in it, and may read data that it is preparing."
        ),
        r"DDP forward": (
            "DDP broadcasts buffers, such as BatchNorm statistics, in its forward pass: the ranks that run it wait for "
            "the others, or mismatched collectives are paired."
        ),
        r"FSDP forward": (
            "FSDP gathers parameters in its forward pass: the ranks that run it wait for the others, or mismatched "
            "collectives are paired."
        ),
    },
    cases=lambda: (
        fails("a loss is reduced on rank 0 alone", _REDUCED),
        fails("before an error that ends all ranks", _LAST),
        fails("evaluation in a function that gathers", _EVALUATED),
        fails("a hook of rank 0 saves a checkpoint and logs with sync_dist", _HOOK),
        fails("the others have returned", _RETURNED),
        fails("the state of a sharded model", _SHARDED),
        fails("Accelerate: the others wait for the main process, and it for them", _ACCELERATE),
        fails("two ranks, two collectives", _DIFFERENT),
        fails("the forward pass of a wrapped model, in a function that rank 0 calls", _FORWARD),
        fails("the forward pass of a sharded model", _FORWARD.replace("DDP(", "FSDP(")),
        fails("the state of a sharded model that a caller hands in", _HANDED),
        fails("the shards of a Trainer, or of DeepSpeed under Accelerate", _SAVED),
        passes("the inner model on rank 0, or all ranks", _INNER),
        passes("one rank saves a replica", _REPLICA),
        passes("a model that is sharded afterwards", _SHARDED_LATER),
        passes("all reduce, one prints", _REDUCED_BY_ALL),
        passes("both branches broadcast", _BRANCHES),
        passes("the others wait, rank 0 works, rank 0 joins", _FIRST),
        passes("the others come to their call below", _BELOW),
        passes("one rank leaves after its wait, the others wait at the end", _LEAVES),
        fails("one rank waits twice before it leaves", _WAITS_TWICE),
        fails("one rank may leave inside its branch", _LEAVES_INSIDE),
        fails("rank 0 leaves where it is asked to test, which is reported once", _ONLY_TESTS),
        passes("ranks without a part go on to the same call in the loop", _PARTS),
        passes("one rank, or all of them if the state is sharded", _OR_ALL),
        passes("ranks of two kinds", _KINDS),
        passes("no job of several ranks: -1 is no rank", _NO_JOB),
        fails("a job without ranks, or rank 0", _NO_JOB_OR_FIRST),
        fails("rank 0 in several words", _FIRST_IN_WORDS),
        fails("a function that all ranks meet in if there are several", _OF_MODELS),
        passes("rank 0 in other words, after the others", _OTHERS_FIRST),
        passes("rank 0 of an Accelerator, after the others", _OF_ACCELERATOR),
        passes("even ranks, and odd ones", _EVEN_AND_ODD),
        passes("all ranks create the groups that loops over rank numbers select", _GROUPS_OF_LOOPS),
        fails(
            "the loop does not hide the rank",
            _GROUPS_OF_LOOPS.replace("= row * 4 + column", "= dist.get_rank()").replace("+ row]))", "+ row]))  # !"),
        ),
        passes("a context that half of the ranks enter late", _STAGGERED),
        fails("a context that rank 0 enters alone", _ENTERED_ALONE),
        passes("the ranks of a group reduce in it", _GROUP),
        passes("rank 0 signals, and the others wait in the function around", _SIGNALED),
        passes("who has left, left because of the opposite", _OPPOSITE),
        passes("who has left, left in a branch of the opposite", _OPPOSITE_AROUND),
        fails(
            "who has left, left for another reason",
            _OPPOSITE.replace("self.together:", "self.other:").replace("reduce(value)", "reduce(value)  # !"),
        ),
        passes("the forward pass of a model without buffers, which broadcasts nothing", _NO_BUFFERS),
        fails(
            "the forward pass of a model with batch norm",
            _NO_BUFFERS.replace("nn.Dropout(0.1)", "nn.BatchNorm1d(8)").replace("loader))", "loader))  # !"),
        ),
        passes("who has left, left for a reason that is asked again", _ASKED_AGAIN),
        passes("every rank evaluates items of its own", _PARTED),
        passes("a rank that tries the next name makes the call in the next round", _RETRY),
        passes("both parts of an expression reduce", _EITHER_WAY),
        passes("each rank in its turn", _TURNS),
        passes("the others receive the flag in their next round", _NEXT_ROUND),
        fails("a flag that the others never receive", _NO_NEXT_ROUND),
        fails(
            "each other rank in its turn", _TURNS.replace("turn == rank", "0 == rank").replace("(loss)", "(loss)  # !")
        ),
        passes("another round, in which the rank comes to the call that the others wait in", _ROUNDS),
        fails(
            "a round less than the others",
            _ROUNDS.replace("while True", "for _ in range(9)").replace("(done)", "(done)  # !"),
        ),
        passes("the others have it done by another package", _NATIVE),
        fails(
            "the others write a log and leave",
            _NATIVE.replace("save_all(", "logging.info(").replace("()\n", "()  # !\n").replace("rank()  # !", "rank()"),
        ),
        passes("who may leave inside its branch, does so for the opposite", _RESUMED),
        fails("reports of Ray Train by rank 0", _RAY),
        fails("a state that may be sharded, of Accelerate", _STATE_DICT),
        passes("a state of replicas: the script configures DDP", _STATE_OF_REPLICAS),
        fails("a metric of torchmetrics on rank 0", _METRIC_OF_ONE),
        passes("a helper that asks for a job, before there is one", _BEFORE_JOB),
        fails(
            "a helper that asks for a job, after it was joined",
            _BEFORE_JOB.replace("    if int", "    join(args)\n    if int", 1).replace('("start")', '("start")  # !'),
        ),
        passes(
            "a helper that asks, below one that only is called like a start of a job",
            _BEFORE_JOB.replace("def main", "def setup_run(args):\n    print(args)\n\ndef main").replace(
                "    if int", "    setup_run(args)\n    if int", 1
            ),
        ),
        fails(
            "a helper that does not ask",
            _BEFORE_JOB.replace("    if dist.is_initialized():\n        dist", "    dist").replace(
                '("start")', '("start")  # !'
            ),
        ),
        passes("one process alone tests, with a Trainer of one device", _ALONE),
        passes("one process alone tests, with a Trainer of one device in a function", _ALONE_IN_FUNCTION),
        passes("a Trainer on CPUs", _ALONE_IN_FUNCTION.replace("devices=1", "accelerator='cpu'")),
        fails(
            "with a Trainer of several devices in a function",
            _ALONE_IN_FUNCTION.replace("devices=1", "devices=8").replace(
                "test(model, data)\n", "test(model, data)  # !\n"
            ),
        ),
        passes("a condition on the rank in another function", _ELSEWHERE),
        passes("the first rank makes them per request, in an object that it hands to a server", _SERVED),
        fails(
            "a server with another object",
            _SERVED.replace("Server(policy)", "Server(None)").replace("    loop()", "    loop()  # !"),
        ),
        passes("the first rank has it run by a sweep", _SWEEP),
        passes("the first rank has it run by a study, the others run it as often", _STUDY),
        passes("in a function that it makes for the study", _STUDY.replace("(run,", "(lambda trial: run(trial),")),
        fails(
            "the first rank has another function run by a study",
            _STUDY.replace("(run,", "(other,").replace("run(None)", "run(None)  # !"),
        ),
        fails("a checkpoint of all ranks", _CHECKPOINT_OF_ALL),
        passes("a checkpoint that one rank reads alone", _CHECKPOINT_OF_ALL.replace(")  # !", ", no_dist=True)")),
        fails(
            "the first rank has another function run by a sweep",
            _SWEEP.replace("=train)", "=test)").replace("    train()", "    train()  # !"),
        ),
    ),
)
def rank_condition_around_collective(script: Script) -> Iterator[Violation]:
    """Ask whether a call that synchronizes ranks is inside a rank-dependent branch.

    Why it hurts: the ranks that make the call wait for the others, which skip it or are in another collective. The job
    deadlocks until the timeout, or mismatched collectives are paired.
    Fix: Make the call on all ranks, and use its result only inside the branch.
    """
    exits: set[tuple[ast.AST, str]] = set()
    for one in collectives_and_forwards(script).all():
        if _may_be_alone(script, one) or _is_without_barrier(script, one.call):
            continue
        condition = unmatched_condition(script, one)
        first = main_first(script, one.call) if condition is None else None
        if condition is not None and waits_for_nobody(script, one.call, one.word):
            continue
        if condition is not None:
            exit_of = (condition.where, condition.test)
            if condition.certain or exit_of not in exits:  # an early exit is reported once, at the first call after it
                yield _run_by_some(script, one, condition)
            exits.add(exit_of)
        elif first is not None and not one.grouped and rank_condition(script, one.call) is None:
            yield _waited_for(script, one, first)


def _run_by_some(script: Script, one: CollectiveCall, condition: RankCondition) -> Violation:
    line = getattr(condition.where, "lineno", one.call.lineno)
    if condition.test.startswith("@"):
        who = "one rank" if "last_process" in condition.test or "on_process" in condition.test else "rank 0"
        where = f"runs only on {who} ({condition.test}, line {line})"
    elif denied := denied_test(condition.test):
        where = f"is not reached if {denied} (line {line})"
    else:
        where = f"runs only if {plain_test(condition.test)} (line {line})"
    depends = not condition.certain or _OF_A_GROUP.search(condition.test) is not None
    depends = depends or not is_certain_of(script, condition)
    depends = depends or _is_stopped(script, one.call) or _is_last(script, condition)
    # The function may ask first whether the model is sharded, without which nothing waits.
    depends = depends or (one.through is not None and not one.certain and one.word.endswith("state_dict"))
    depends = depends or (one.word == FORWARD_OF_DDP and not shows_buffers(script))
    option = _option_of(script, one)
    is_certain = one.certain and not depends and not option
    is_advice = _is_advice(script, one)
    summary = f"{f'With {option}, ' if option else ''}{_words(script, one)} {where}"
    longer = f"{summary}, not on all ranks"
    is_complete = condition.test.startswith("@") or "is not reached" in where
    return Violation(
        one.call,
        longer if len(longer) <= LONGEST_SUMMARY and not is_complete else summary,
        fix=_fix(script, one, condition),
        severity=None if is_certain else Severity.INFO if depends or is_advice else Severity.WARNING,
        evidence=(("condition", plain_test(condition.test)), ("line_of_condition", line), ("collective", one.word)),
        confidence=(0.95 if one.through is None else 0.9) if is_certain else 0.7,
        flow=flow_of(script, one, condition),
        effect=_OF_SHARDED if one.word == "get_state_dict" else "",
        once=_callee(script, one),
    )


def _callee(script: Script, one: CollectiveCall) -> str:
    """The function of another file that makes the collective: its callers share one fault."""
    is_imported = one.through is not None and script.definition(one.call.func) is None and one.steps
    return f"{one.through} {one.steps[-1].file}:{one.steps[-1].line}" if is_imported else ""


_OF_SHARDED = (
    "If the model is sharded (FSDP, DeepSpeed ZeRO-3), the ranks that make the call wait for the others, which skip it "
    "or are in another collective."
)
"""``Accelerator.get_state_dict`` gathers only shards: of FSDP, ZeRO-3 and DeepSpeed's tensor parallelism."""
_WHEN_STOPPED = frozenset({"on_keyboard_interrupt", "on_exception"})


def _is_stopped(script: Script, node: ast.AST) -> bool:
    """Whether a place runs only in a job that is being stopped: in a hook of the Trainer or a handler for that, or in a
    handler of signals."""
    for outer in script.around(node):
        if isinstance(outer, ast.ExceptHandler) and outer.type is not None and "Interrupt" in ast.unparse(outer.type):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            handled = (one for call in script.calls("signal.signal") for one in call.args[1:])
            return outer.name in _WHEN_STOPPED or any(script.definition(one) is outer for one in handled)
    return False


def _is_last(script: Script, condition: RankCondition) -> bool:
    """Whether all ranks end with an error below a branch on the rank, in a block that few runs get to."""
    outer, where = script.parent(condition.where), condition.where
    if not isinstance(outer, (ast.If, ast.ExceptHandler)) or not isinstance(where, ast.stmt):
        return False
    block = block_of(outer, where)
    return any(ends_in_error(one) for one in block[block.index(where) + 1 :])


def _is_without_barrier(script: Script, call: ast.Call) -> bool:
    """``trainer.save_checkpoint()`` of Lightning before 2.0, which had no barrier: with DDP rank 0 writes, and the
    others leave (trainer/connectors/checkpoint_connector.py of the wheels 1.5.10 to 1.9.5)."""
    if last_name(call.func) != "save_checkpoint" or not re.search(
        r"\btrainer$", ast.unparse(call.func).rpartition(".")[0]
    ):
        return False
    known = known_lightning(script)
    return known.number is not None and not known.is_open and end_of_line(known.number) < (2,)


def _is_advice(script: Script, one: CollectiveCall) -> bool:
    """What is harmless in most jobs: a state that only sharding gathers, which the file does not ask for, and a forward
    pass without gradients, whose broadcast DDP leaves out of the next step instead."""
    if one.word == "get_state_dict":
        return True
    if one.word != FORWARD_OF_DDP:
        return False
    here = any(is_without_gradients(script, node) for node in (one.call, *_body_of(script, one)))
    return here or _is_without_gradients_elsewhere(script, one)


def _is_without_gradients_elsewhere(script: Script, one: CollectiveCall) -> bool:
    """Whether a function of another file, which runs the forward pass, does so without gradients."""
    found = called_function(script, one.call) if script.definition(one.call.func) is None else None
    if found is None:
        return False
    other, function = found
    names = parameter_names(function)
    calls = [call for call in other.inside(function, ast.Call) if last_name(call.func) in names]
    return bool(calls) and all(is_without_gradients(other, call) for call in calls)


def _option_of(script: Script, one: CollectiveCall) -> str:
    """The option, off by default, without which the collective is not reached."""
    lines = [step.line for step in one.steps if step.file == script.path]
    nodes = [one.call, *(call for call in script.all(ast.Call) if lines and call.lineno in lines)]
    branches = (
        branch
        for node in nodes
        for branch in script.around(node)
        if isinstance(branch, ast.If) and _holds(branch, node)
    )
    return next(filter(None, (switch_off_by_default(script, branch.test) for branch in branches)), "")


def _holds(branch: ast.If, node: ast.AST) -> bool:
    line = getattr(node, "lineno", 0)
    return branch.body[0].lineno <= line <= (branch.body[-1].end_lineno or 0)


def _body_of(script: Script, one: CollectiveCall) -> Iterator[ast.AST]:
    """The forward passes of the function that is called."""
    function = script.definition(one.call.func)
    names = parameter_names(function) if function is not None else ()
    for call in script.inside(function, ast.Call) if function is not None else ():
        if isinstance(call.func, ast.Name) and call.func.id in names:
            yield call
    kept = collectives_and_forwards(script).in_body(function) if function is not None else ()
    yield from (other.call for other in kept if other.word == FORWARD_OF_DDP)


def _may_be_alone(script: Script, one: CollectiveCall) -> bool:
    """Joining a job does not depend on its members; with DDP one rank may save; and a model that is sharded only below
    exchanges nothing yet."""
    if one.word in ("save_state", "load_state"):
        return not _saves_together(script, one.call)
    if one.word == "init_process_group" or _takes_turns(script, one) or _is_handed_on(script, one.call):
        return True
    return not one.certain and is_wrapped_later(script, one.call)


def _takes_turns(script: Script, one: CollectiveCall) -> bool:
    """Whether some ranks make the call in ``__enter__`` and the others in ``__exit__`` of the same class: ``with`` then
    runs it on all of them, in turns."""
    owner = script.class_of(one.call)
    entered_or_left = {
        script.bindings.methods.get((owner.name, name)) for name in ("__enter__", "__exit__") if owner is not None
    }
    if script.function_of(one.call) not in entered_or_left:
        return False
    same = (other.call for other in collectives_and_forwards(script).all() if other.word == one.word)
    partial = {script.function_of(call) for call in same if rank_condition(script, call) is not None}
    return len(entered_or_left - {None}) == 2 and entered_or_left <= partial


def _is_handed_on(script: Script, call: ast.Call) -> bool:
    """Whether the branch opposite to that of a call passes the function that it calls to another one:
    ``wandb.agent(sweep, function=trainer.train)``."""
    called = ast.unparse(call.func)
    branch = script.nearest(call, ast.If)
    if branch is None:
        return False
    opposite = branch.body if script.statement_of(call) in branch.orelse else branch.orelse
    handed = (
        given
        for statement in opposite
        for one in script.inside(statement, ast.Call)
        for given in (*one.args, *(word.value for word in one.keywords))
    )
    return any(ast.unparse(one) == called for one in handed if isinstance(one, (ast.Name, ast.Attribute)))


def _saves_together(script: Script, call: ast.Call) -> bool:
    """Whether the Accelerator of a ``save_state`` shards its model, or numbers checkpoints behind a barrier."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    made = [one for one in script.values_of(owner) if isinstance(one, ast.Call)]
    given = (script.argument(one, name) for one in made for name in ("deepspeed_plugin", "fsdp_plugin"))
    return any(one is not None and any(isinstance(value, ast.Call) for value in script.values_of(one)) for one in given)


_OF_A_GROUP = re.compile(
    r"(?:^|_|\b)(?:data|tensor|model|pipeline|expert|context|sequence|parallel|[dtpecs]p|mp|group|sub|replica|shard)_"
    r"(?:\w{1,30}_)?rank\b|\b(?:not )?in \w{0,30}(?:ranks|group|members|procs)\w*|\b(?:ranks|group|members)(?:_\w+)?\b"
)
"""Ranks in a part of the job: who else has that number, or is a member, is not in the file."""
_BARRIERS = frozenset({"barrier", "wait_for_everyone"})


def _waited_for(script: Script, one: CollectiveCall, first: ast.Call) -> Violation:
    """A barrier meets the one at which the others wait to enter, so that nothing blocks, and they enter too early;
    another collective meets that barrier and blocks."""
    is_barrier = {one.word, *one.reached} <= _BARRIERS
    return Violation(
        one.call,
        f"{_words(script, one)} lets the other ranks enter the block at line {first.lineno} too early"
        if is_barrier
        else f"{_words(script, one)} deadlocks inside `with {script.text_of(first, 50)}` (line {first.lineno})",
        severity=Severity.WARNING if is_barrier else None,
        fix=f"Move line {one.call.lineno} below the block, so that all ranks make the call after it.",
        evidence=(("condition", script.text_of(first)), ("line_of_condition", first.lineno), ("collective", one.word)),
    )


def _words(script: Script, one: CollectiveCall) -> str:
    if one.word.startswith("forward of ") and one.through is None:
        return f"The {one.word.removeprefix('forward of ')} forward pass {script.text_of(one.call.func, 40)}()"
    if one.word == "sync_dist":
        return f"{script.text_of(one.call.func, 40)}(sync_dist=True)"
    name = script.text_of(one.call.func, 40)
    if one.through and one.word.startswith("forward of "):
        return f"{name} (which runs the {one.word.removeprefix('forward of ')} forward pass)"
    return f"{name} (which calls {one.word})" if one.through else name


_FIXES = {
    "sync_dist": "Call `{call}` on all ranks, outside the branch; if only one rank has the value, pass "
    "`rank_zero_only=True` instead of `sync_dist=True`.",
    "save_checkpoint": "Call `{call}` on all ranks: it contains a barrier, and only rank 0 writes.",
    "save": "Call `{call}` on all ranks: it contains a barrier, and only rank 0 writes.",
    "barrier": "Move the barrier out of the branch, or remove it: the other ranks do not call it.",
    "validate": "Evaluate on all ranks, each on its shard; run a test on one process in a separate script with "
    "`Trainer(devices=1)`.",
    "new_group": "Call `{call}` on all ranks, outside the branch, including ranks that are not members of the group.",
    "forward of DDP": "Run the forward pass on all ranks, or call the inner model (`model.module`) on one rank.",
    "forward of FSDP": "Run the forward pass on all ranks: FSDP gathers the parameters of each layer from all of them.",
    "save_model": "Call `{call}` on all ranks: under FSDP it gathers the shards, and only rank 0 writes.",
    "save_state": "Call `{call}` on all ranks: each rank writes its own shard.",
}
"""``{call}``: the call of the script."""
_FIXES |= dict.fromkeys(("test", "predict", "fit"), _FIXES["validate"])


def _fix(script: Script, one: CollectiveCall, condition: RankCondition) -> str:
    name = script.text_of(one.call.func, 40)
    if one.through and one.word == FORWARD_OF_DDP and not _other_collectives(script, one):
        return f"Call `{name}` on all ranks, or pass it the inner model: `model.module`."
    if one.word == "distributed checkpoint":
        return f"Call `{name}` on all ranks: each of them reads or writes its own shards."
    is_inside = any(one is condition.where for one in script.around(one.call))
    if not one.through and one.word in _FIXES and (is_inside or one.word not in _BARRIERS):
        whole = script.text_of(one.call, 80)
        return _FIXES[one.word].replace("{call}", name if whole.endswith("…") else whole)
    line = getattr(condition.where, "lineno", one.call.lineno)
    if isinstance(condition.where, ast.If) and not is_inside:
        return f"Call `{name}` also on the ranks that leave at line {line}{_or_remove(one)}."
    if isinstance(condition.where, ast.If) and isinstance(script.parent(one.call), ast.Expr):
        return f"Move line {one.call.lineno} out of the branch at line {line}, so that all ranks make the call."
    return f"Call `{name}` on all ranks, and use its result only inside the branch."


def _other_collectives(script: Script, one: CollectiveCall) -> frozenset[str]:
    """The collectives of the function that is called, besides the forward pass of its model."""
    function = script.definition(one.call.func)
    own = collectives_and_forwards(script).reached_words.get(function, frozenset()) if function is not None else ()
    return one.reached.union(own) - {FORWARD_OF_DDP}


def _or_remove(one: CollectiveCall) -> str:
    return ", or remove the call" if one.word in _BARRIERS else ""


_CHECKPOINT_OF_ALL = """\
import torch.distributed.checkpoint as dcp

if dist.get_rank() == 0:
    dcp.load_state_dict(state, reader)  # !
"""
_SERVED = """\
from somewhere import Server

class Policy:
    def answer(self, request):
        dist.broadcast(request, 0)

def loop():
    while True:
        dist.broadcast(torch.zeros(1), 0)

policy = Policy()
if dist.get_rank() == 0:
    server = Server(policy)
    server.serve_forever()
else:
    loop()
"""
_STUDY = """\
import optuna
import torch.distributed as dist

def run(trial):
    trial = optuna.integration.TorchDistributedTrial(trial)
    loss = train(trial)
    dist.all_reduce(loss)
    return loss.item()

def main(rank, trials):
    dist.init_process_group("nccl")
    if rank == 0:
        optuna.create_study().optimize(run, n_trials=trials)
    else:
        for _ in range(trials):
            try:
                run(None)
            except optuna.TrialPruned:
                pass
"""
_SWEEP = """\
import wandb

def train():
    dist.all_reduce(loss)

if dist.get_rank() == 0:
    wandb.agent(sweep, function=train)
else:
    train()
"""
_ONLY_TESTS = """\
def main(args, rank):
    if args.only_test and rank == 0:
        test(args)
        return
    dist.barrier()  # !
    train(args)
    dist.barrier()
"""
_EITHER_WAY = """\
def backward(parts):
    rank = dist.get_rank()
    return [dist.reduce(parts[rank], rank) if i == rank else dist.reduce(parts[i], i) for i in range(8)]
"""
_NEXT_ROUND = """\
def train(model, loader, rank, patience, stop):
    waited = 0
    for batch in loader:
        dist.broadcast(stop, src=0)
        if stop.item():
            break
        train_step(model, batch)
        if rank == 0:
            waited = 0 if improved(model) else waited + 1
            if waited > patience:
                stop.fill_(1)
                dist.broadcast(stop, src=0)
            if stop.item():
                break
"""
_NO_NEXT_ROUND: str = _NEXT_ROUND.replace("        dist.broadcast(stop, src=0)\n", "", 1).replace(
    "src=0)\n            if", "src=0)  # !\n            if"
)
_TURNS = """\
def load(rank, world_size):
    for turn in range(world_size):
        if turn == rank:
            dist.all_reduce(loss)
"""
_ROUNDS = """\
def chat(model):
    while True:
        done = torch.zeros(1)
        if dist.get_rank() == 0:
            words = input()
            if not words:
                continue
            done += words == "quit"
        dist.all_reduce(done)
        model.generate()
"""
_NATIVE = """\
import logging
from engine.saving import save_all

def save(model):
    if dist.get_rank() == 0:
        save_all(model)
        return
    torch.save(model, "part.pt")
    dist.barrier()
"""
_RESUMED = """\
def main(args, again):
    if is_master(args):
        if os.path.exists(args.log) and not again:
            print("there is one")
            return
    if again:
        dist.barrier()
    print(args)
"""
_OPPOSITE = """\
class Meter:
    def flush(self, value):
        if not self.together and dist.get_rank() != 0:
            return
        if self.together:
            dist.all_reduce(value)
        print(value)
"""
_OPPOSITE_AROUND = """\
def finish(mode, value):
    if mode != "all":
        if dist.get_rank() != 0:
            return
    if mode == "all" and value is not None:
        dist.all_reduce(value)
    print(value)
"""
_NO_BUFFERS = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x):
        return self.layers(x)

def test(net, loader):
    net.eval()
    with torch.no_grad():
        return [net(x) for x in loader]

def main(loader, rank):
    dist.init_process_group("nccl")
    net = Net().cuda()
    model = DDP(net)
    for epoch in range(10):
        if rank == 0:
            print(test(model, loader))
"""
_LAST = """\
def train(model, loader, rank):
    for batch in loader:
        loss = model(batch).mean()
        if torch.isnan(loss):
            if rank == 0:
                dist.all_reduce(loss)  # !
            sys.exit(1)
"""
_REDUCED = """\
def train(model, loader, optimizer, rank):
    for step, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            dist.all_reduce(loss)  # !
            print(step, loss.item() / dist.get_world_size())
"""
_REDUCED_BY_ALL = """\
def train(model, loader, optimizer, rank):
    for step, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(step, loss.item() / dist.get_world_size())
"""
_EVALUATED = """\
import torch

def is_main():
    return int(os.environ["RANK"]) == 0

def evaluate(model, loader):
    model.eval()
    scores = [model(x).mean() for x in loader]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, scores)
    return scores

def main(model, train_loader, val_loader):
    dist.init_process_group("nccl")
    model = DDP(model.cuda())
    for epoch in range(10):
        train_one_epoch(model, train_loader)
        if is_main():
            print(evaluate(model, val_loader))  # !
"""
_HOOK = """\
from lightning.pytorch.utilities import rank_zero_only

class Keep(L.Callback):
    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint("last.ckpt")  # !

class Net(L.LightningModule):
    def validation_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        if self.trainer.is_global_zero:
            self.log("val_loss", loss, sync_dist=True)  # !
"""
_RETURNED = """\
def save(model, path):
    if dist.get_rank() != 0:
        return
    torch.save(model.state_dict(), path)
    dist.barrier()  # !
"""
_SHARDED = """\
def main(build, path):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = FSDP(build().cuda())
    train(model)
    if rank == 0:
        torch.save(model.state_dict(), path)  # !
"""
_FORWARD = """\
import torch
import torchvision

def evaluate(net, loader):
    net.eval()
    with torch.no_grad():
        return sum(net(x).argmax(dim=1).eq(y).sum().item() for x, y in loader)

def main(loader, rank):
    dist.init_process_group("nccl")
    model = DDP(torchvision.models.resnet18().cuda())
    for epoch in range(10):
        if rank == 0:
            print(evaluate(model, loader))  # !
            print(model(torch.zeros(1, 3, 32, 32)))  # !
"""
_INNER = """\
import torch
import torchvision

def evaluate(net, loader):
    return [net(x) for x in loader]

def main(loader, rank):
    model = torchvision.models.resnet18().cuda()
    if rank == 0:
        print(model(torch.zeros(1, 3, 32, 32)))
    model = DDP(model)
    scores = evaluate(model, loader)
    if rank == 0:
        print(scores, evaluate(model.module, loader))
"""
_HANDED = """\
import torch

def save(model, rank, path):
    if rank == 0:
        with FSDP.state_dict_type(model, FULL):
            state = model.state_dict()  # !
        torch.save(state, path)

def step(model, loss, optimizer, rank):
    loss.backward()
    if rank == 0:
        print(model.clip_grad_norm_(1.0))  # !
    optimizer.step()

def main(build, rank):
    model = FSDP(build().cuda())
    step(model, model(batch()), make(model), rank)
    save(model, rank, "a.pt")
"""
_SAVED = """\
from accelerate import DeepSpeedPlugin
from transformers import Trainer, TrainingArguments

args = TrainingArguments(output_dir="out", fsdp="full_shard auto_wrap")
trainer = Trainer(model=model, args=args)
trainer.train()
if trainer.is_world_process_zero():
    trainer.save_model("out/final")  # !

plugin = DeepSpeedPlugin(zero_stage=2)
accelerator = Accelerator(deepspeed_plugin=plugin)
if accelerator.is_main_process:
    accelerator.save_state("out/state")  # !
"""
_REPLICA = """\
from transformers import Trainer, TrainingArguments

trainer = Trainer(model=model, args=TrainingArguments(output_dir="out"))
if trainer.is_world_process_zero():
    trainer.save_model("out/final")
accelerator = Accelerator()
if accelerator.is_main_process:
    accelerator.save_state("out/state")
"""
_SHARDED_LATER = """\
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from project.parallel import apply_fully_shard, load_everywhere

def prepare(model, settings):
    state = {}
    if dist.get_rank() == 0:
        state = get_model_state_dict(model, options=settings.options)
    apply_fully_shard(model, settings)
    load_everywhere(model, state)
"""
_ACCELERATE = """\
accelerator = Accelerator()

def evaluate(model, loader):
    for batch in loader:
        logits = model(batch)
        if accelerator.is_main_process:
            everything = accelerator.gather_for_metrics(logits)  # !

with accelerator.main_process_first():
    data = load()
    accelerator.wait_for_everyone()  # !
"""
_DIFFERENT = """\
import torch

def share(rank, settings):
    if rank == 0:
        dist.broadcast_object_list([settings], src=0)  # !
    else:
        dist.barrier()  # !
"""
_BRANCHES = """\
def share(rank, settings):
    if rank == 0:
        box = [settings]
        dist.broadcast_object_list(box, src=0)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=0)
    if dist.get_rank() == 0:
        dist.gather(box[0], gather_list=[], dst=0)
    else:
        dist.gather(box[0], dst=0)
    return box[0]
"""
_FIRST = """\
from contextlib import contextmanager

def load(args, build):
    if args.local_rank not in [-1, 0]:
        torch.distributed.barrier()
    data = build()
    if args.local_rank == 0:
        torch.distributed.barrier()
    return data

@contextmanager
def zero_first(local_rank):
    if local_rank not in (-1, 0):
        torch.distributed.barrier(device_ids=[local_rank])
    yield
    if local_rank == 0:
        torch.distributed.barrier(device_ids=[0])
"""
_BELOW = """\
def best(metrics, score, is_last_rank):
    if metrics is None or not is_last_rank():
        dist.all_reduce(score)
        return score
    score += metrics["score"]
    dist.all_reduce(score)
    return score

def load(settings, build):
    if getattr(settings, "wait_for_the_first_process", True) and settings.shared and settings.local_rank not in [-1, 0]:
        dist.barrier()
    data = build(settings)
    if getattr(settings, "wait_for_the_first_process", True) and settings.shared and settings.local_rank == 0:
        dist.barrier()
    return data
"""
_LEAVES = """\
import torch

def export(folder, build):
    settings = None
    if dist.get_rank() == 0:
        settings = read(folder)
    state = build()
    if dist.get_rank() == 0:
        if settings is None:
            print("no settings")
            dist.barrier()
            return
        try:
            torch.save(convert(state, settings), folder / "exported.pt")
        except OSError:
            dist.barrier()
            raise
    dist.barrier()
"""
_WAITS_TWICE = """\
import torch

def export(folder, state):
    if dist.get_rank() == 0:
        torch.save(state, folder / "exported.pt")
        dist.barrier()
        dist.barrier()  # !
        return
    dist.barrier()

def publish(folder, state):
    if dist.get_rank() != 0:
        dist.barrier()
        return
    torch.save(state, folder / "published.pt")
    dist.barrier()
    dist.barrier()  # !
"""
_LEAVES_INSIDE = """\
import shutil

def publish(source, target):
    if dist.get_rank() == 0:
        if not source.exists():
            return

        def skipped(folder, names):
            return [name for name in names if name.endswith(".tmp")]

        shutil.copytree(source, target, ignore=skipped)
    dist.barrier()  # !
    dist.all_reduce(torch.ones(1))

def copy(source, target):
    if dist.get_rank() == 0:
        def skipped(folder, names):
            return []

        shutil.copytree(source, target, ignore=skipped)
    dist.barrier()

def step(params, padded, rank, world_size):
    for base in range(0, len(params), world_size):
        if base + rank < len(params):
            grad = params[base + rank].grad
            if grad is None:
                continue
            update(params[base + rank], grad)
        dist.all_gather(padded[base : base + world_size], padded[base + rank])
"""
_PARTS = """\
def step(params, padded, rank, world_size, state):
    for base in range(0, len(params), world_size):
        if base + rank < len(params):
            own = params[base + rank]
            if own not in state:
                state[own] = torch.zeros_like(own)
                dist.all_gather(padded[base : base + world_size], own)
                continue
            own.add_(state[own])
        dist.all_gather(padded[base : base + world_size], padded[base + rank])
"""
_OR_ALL = """\
def check(trainer, kind, path):
    if (dist.get_rank() == 0 and kind == "full") or kind == "sharded":
        if kind == "sharded":
            paths = [None] * dist.get_world_size()
            dist.all_gather_object(paths, path)
"""
_KINDS = """\
def player(model, group):
    dist.broadcast(model.weight, 0)

def trainer(model, group):
    dist.broadcast(model.weight, 0, group=group)

def main(rank, model, group):
    if rank == 0:
        player(model, group)
    else:
        trainer(model, group)
"""
_NO_JOB = """\
import torch

def reduce(loss, args, rank=None):
    if args.local_rank != -1:
        dist.all_reduce(loss)
    if rank is not None:
        dist.barrier()
    if args.world_size == 1 and args.rank == 0:
        dist.barrier()
    if args.local_rank >= 0:
        dist.barrier()
"""
_OF_MODELS = """\
import torch.distributed as dist

def save(models, path):
    is_distributed = False
    if models:
        is_distributed = any(is_sharded(one) for one in models)
    if is_distributed:
        dist.barrier()
    write(models, path)

def save_together(models, path):
    is_distributed = dist.is_initialized()
    if is_distributed:
        dist.barrier()
    write(models, path)

def main(models, rank):
    if rank == 0:
        save(models, "models.pt")
    if rank == 0:
        save_together(models, "models.pt")  # !
"""
_FIRST_IN_WORDS = """\
import torch.distributed as dist

def save(model, args):
    if args.rank == 0:
        dist.barrier()  # !
    write(model)
    if dist.get_rank() == 0:
        dist.barrier()  # !
    if not args.local_rank:
        dist.barrier()  # !
    if is_main_process():
        dist.barrier()  # !
"""
_OTHERS_FIRST = """\
import torch.distributed as dist

def load(args):
    if args.rank != 0:
        dist.barrier()
    data = read()
    if dist.get_rank() == 0:
        dist.barrier()
    if not is_main_process():
        dist.barrier()
    write(data)
    if not args.rank:
        dist.barrier()
    return data
"""
_OF_ACCELERATOR = """\
accelerator = Accelerator()
if not accelerator.is_main_process:
    accelerator.wait_for_everyone()
data = read()
if accelerator.is_main_process:
    accelerator.wait_for_everyone()
"""
_EVEN_AND_ODD = """\
import torch.distributed as dist

def turns(args):
    if args.rank % 2 == 0:
        dist.barrier()
    if (args.rank + 1) % 2 == 0:
        dist.barrier()
"""
_NO_JOB_OR_FIRST = """\
import torch.distributed as dist

def save(model, args):
    if args.local_rank == -1 or dist.get_rank() == 0:
        write(model)
        dist.barrier()  # !

def without(args):
    if not dist.is_initialized() or args.rank == 0:
        dist.barrier()  # !

def unset(args):
    if args.rank is None or args.rank == 0:
        dist.barrier()  # !

def alone(args):
    if dist.get_world_size() == 1 or args.rank == 0:
        dist.barrier()  # !
"""
_GROUP = """\
def reduce(loss, rank, ranks, tp_rank):
    group = dist.new_group(ranks)
    if rank in ranks:
        dist.all_reduce(loss, group=group)
    if tp_rank == 0:
        dist.broadcast(loss, 0, group)
"""
_BEFORE_JOB = """\
def report(text):
    print(text)
    if dist.is_initialized():
        dist.barrier()

def join(args):
    dist.init_process_group("nccl")

def main(args):
    if int(os.environ["RANK"]) == 0:
        report("start")
    join(args)
    report("joined")
    train(DDP(build(args)))

main(read())
"""
_ALONE = """\
def main(model, data):
    trainer = L.Trainer(devices=8, strategy="ddp")
    trainer.fit(model, data)
    if trainer.is_global_zero:
        tester = L.Trainer(devices=1, num_nodes=1)
        tester.test(model, data)
"""
_ALONE_IN_FUNCTION = """\
import lightning as L

def test(model, data):
    trainer = L.Trainer(devices=1, logger=False)
    return trainer.predict(model, data)

def main(model, data):
    trainer = L.Trainer(devices=8, strategy="ddp")
    trainer.fit(model, data)
    if trainer.is_global_zero:
        test(model, data)
"""
_ELSEWHERE = """\
from lightning.pytorch.utilities import rank_zero_only

@rank_zero_only
def say(words):
    print(words)

def step(loss, rank, first):
    if rank == 0:
        def late():
            dist.barrier()
        register(late)
    if first:
        dist.all_reduce(loss)
    say(loss)
"""
_RETRY = """\
def fetch(names, folder):
    for name in names:
        if dist.get_rank() == 0:
            try:
                download(name, folder)
            except FileNotFoundError:
                continue
        dist.barrier()
        break
"""
_RAY = """\
import ray.train

def loop(config):
    context = ray.train.get_context()
    for epoch in range(10):
        loss = train_epoch(config)
        if context.get_world_rank() == 0:
            ray.train.report({"loss": loss})  # !
"""
_STATE_DICT = """\
accelerator = Accelerator()
model = accelerator.prepare(build())
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), "model.pt")  # !
"""
_GROUPS_OF_LOOPS = """\
import torch.distributed as dist

dist.init_process_group("nccl")
groups = []
for row in range(4):
    for column in range(4):
        local_rank = row * 4 + column
        if local_rank < column * 4 + row:
            groups.append(dist.new_group([local_rank, column * 4 + row]))
"""
_STAGGERED = """\
class Staggered:
    def __enter__(self):
        if self.local_rank % 2 == 0:
            dist.barrier()
        return self

    def __exit__(self, *error):
        if self.local_rank % 2 == 1:
            dist.barrier()
        dist.barrier()
"""
_ENTERED_ALONE = """\
class First:
    def __enter__(self):
        if dist.get_rank() == 0:
            dist.barrier()  # !
        return self

    def __exit__(self, *error):
        return None
"""
_STATE_OF_REPLICAS = """\
from accelerate import DistributedDataParallelKwargs

accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)])
model = accelerator.prepare(build())
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), "model.pt")
"""
_METRIC_OF_ONE = """\
import torchmetrics

def evaluate(net, loader, rank):
    model = DDP(net)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
    for x, y in loader:
        accuracy.update(model(x), y)
    if rank == 0:
        print(accuracy.compute())  # !
"""
_SIGNALED = """\
def take_step(model, optimizer, batches, rank):
    going = torch.zeros(1)

    def closure():
        if rank == 0:
            going.fill_(1)
            dist.broadcast(going, src=0)
        return total_loss(model, batches)

    if rank == 0:
        optimizer.step(closure)
        going.fill_(0)
        dist.broadcast(going, src=0)
    else:
        while True:
            dist.broadcast(going, src=0)
            if going.item() == 0:
                break
            closure()
"""
_ASKED_AGAIN = """\
def collect(part, folder, rank, by_one):
    write(part, folder, rank)
    dist.barrier()
    if by_one and rank != 0:
        return None
    parts = read_all(folder)
    if not by_one:
        dist.barrier()
    return parts
"""
_PARTED = """\
def score(net, examples, rank, world_size):
    model = DDP(net)
    hits = 0
    for number, (x, y) in enumerate(examples):
        if number % world_size == rank:
            with torch.no_grad():
                hits += int(model(x).argmax() == y)
    return hits
"""
