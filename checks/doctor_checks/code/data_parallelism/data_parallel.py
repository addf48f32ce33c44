"""CODE009: training with DataParallel."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.gpu_use import runs_alone, sees_one_gpu
from doctor.lint.python.project.left_defaults import shown_numbers
from doctor.lint.python.project.settings.option_values import lists_one, values_in_commands
from doctor.lint.python.project.settings.options import switch_off_by_default
from doctor.lint.python.project.starts.own_start import measures_speed
from doctor.lint.python.script import UNKNOWN, FunctionNode, last_name
from doctor.lint.python.training import calls_of, has_backward, is_test, several_ranks
from doctor.testing.script_cases import fails, passes

_DP = "torch.nn.DataParallel"


@rule(
    id="CODE009",
    severity=Severity.WARNING,
    reads=Script,
    foreshadows=("MEM001",),
    mentions=("DataParallel",),
    impacts={
        r"does not reduce gradients": (
            "Each rank trains a separate model: gradients are summed over the GPUs of one process only."
        ),
    },
    cases=lambda: (
        fails("as many a script has it", _MANY_RANKS),
        fails("the devices named", _NAMED_DEVICES),
        fails("inside of ranks", _INSIDE_RANKS),
        passes("DistributedDataParallel", _DDP),
        passes("beside it, where there is one process", _BESIDE_DDP),
        passes("for one process, in a script that another kind of ranks may run", _ONE_PROCESS),
        passes("to read a checkpoint, with one device, or to ask for the type", _FROM_CHECKPOINT),
        passes("to evaluate, beside a function that trains", _EVALUATES),
        fails("to train, beside a function that evaluates", _EVALUATES_BESIDE),
        passes("to evaluate a model that an object holds", _EVALUATES_HELD),
        passes("without gradients", _EVALUATES.replace("no_grad()", "set_grad_enabled(False)")),
        fails("to train a model that an object holds", _TRAINS_HELD),
        fails("a model, and a head that nothing calls", _HEAD_ASIDE.format(mark="", called="model(x)")),
        fails("a model, and a head that is called", _HEAD_ASIDE.format(mark="  # !", called="head(model(x))")),
        passes("bound anew before it is used", _REPLACED),
        passes("bound anew in the branch that trains", _REPLACED_IN_BRANCH),
        fails("the other branch binds it too", _OTHER_BRANCH),
        fails(
            "used before it is bound anew",
            _REPLACED.replace("model = build()", "fit(model)\n    model = build()", 1).replace(*_MARKED),
        ),
        fails("trained without that branch", _REPLACED_IN_BRANCH.replace("evaluate(", "fit(").replace(*_MARKED)),
        passes("one device alone", _ONE_DEVICE),
        fails("a model, and a loss without weights beside it", _WITH_LOSS),
        fails("a loss alone, which may hold the model", _LOSS_ALONE),
        passes("a tutorial of it", _MANY_RANKS, name="data_parallel/train.py"),
        passes("a script that is compared with another", _MANY_RANKS, name="train_dp.py"),
        passes("a helper with one device by default", _ONE_BY_DEFAULT),
        passes("a unit test of it", _MANY_RANKS + "\ndef test_it(): pass\n", name="test_dp.py"),
    ),
)
def data_parallel(script: Script) -> Iterator[Violation]:
    """Ask whether training on several GPUs uses one process per GPU.

    Why it hurts: DataParallel drives all GPUs from threads of one process and copies the model to each GPU in every
    step: two GPUs are often no faster than one, the first GPU uses more memory, and only one host is supported.
    Fix: Call `init_process_group()`, wrap the model in DistributedDataParallel, and start the script with torchrun.
    """
    trains = has_backward(script, script.tree) or any(has_backward(script, one) for one in script.functions)
    if not trains or is_test(script) or _NAMED.search(script.path):
        return
    shown = several_ranks(script)
    offered = "DistributedDataParallel" in script.text
    for call in script.calls(_DP):
        devices = script.value(script.argument(call, "device_ids", 1))
        if devices is not UNKNOWN and isinstance(devices, tuple) and len(devices) < 2:
            continue
        if _names_one(script, call) or runs_alone(script, call) or _only_evaluates(script, call):
            continue
        if _is_replaced(script, call) or _is_loss_beside_model(script, call) or _is_never_called(script, call):
            continue
        if shown is None:
            certain = not offered
        else:  # beside the call that starts the ranks, and not in a branch that may be for one process
            together = script.function_of(call) is script.function_of(shown)
            certain = together and script.nearest(call, ast.If, ast.IfExp) is None
        if certain:
            found = _hit(script, call, shown)
            chosen = shown is None and (
                _has_other_way(script)
                or _is_never_enabled(script, call)
                or sees_one_gpu(script)
                or _has_one_gpu(script, call)
                or measures_speed(script)
                or _is_only_evaluated(script, call)
                or _is_brief(script)
            )
            yield replace(found, severity=Severity.INFO, preview=True) if chosen else found


_LOSS = re.compile(r"criterion|criteria|loss(?:es)?(?:_?fn|_?func\w*)?$", re.IGNORECASE)
_PLACED = frozenset({"cuda", "to", "cpu", "train"})


def _is_loss_beside_model(script: Script, call: ast.Call) -> bool:
    """Whether a loss is wrapped where the same function wraps a model too, whose line says all: most losses have no
    weights that could be copied, and their inputs are on the GPUs already."""
    given = call.args[0] if call.args else None
    while isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr in _PLACED:
        given = given.func.value
    if given is None or not _LOSS.search(last_name(given)):
        return False
    function = script.function_of(call)
    others = [one for one in script.calls(_DP) if one is not call and script.function_of(one) is function]
    return any(one.args and not _LOSS.search(script.text_of(one.args[0])) for one in others)


_MOST_STEPS = 1000
_SMALL = frozenset({"MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST", "USPS"})
"""Datasets of torchvision with images of at most 28 x 28 pixels."""


def _is_brief(script: Script) -> bool:
    """Whether a program is a demonstration: it trains on small digits alone, or leaves each loop that trains after a
    few steps: ``for epoch in range(1)`` and ``if step == 100: break``."""
    kinds = {script.name(one.func) for one in script.all(ast.Call)}
    images = {one.rpartition(".")[2] for one in kinds if one.startswith("torchvision.datasets.")}
    if images and images <= _SMALL:
        return True
    loops = [one for kind in (ast.For, ast.While) for one in script.all(kind) if has_backward(script, one)]
    inner = [one for one in loops if not any(one in script.around(other) for other in loops)]
    return bool(inner) and all(isinstance(one, ast.For) and _leaves_early(script, one) for one in inner)


def _leaves_early(script: Script, loop: ast.For) -> bool:
    """Whether a loop over enumerated batches, with those around it, ends after a known number of steps."""
    counter = (
        loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and last_name(loop.iter) == "enumerate" else None
    )
    ends = [one.test for one in loop.body if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break)]
    limits = [
        script.value(one.comparators[0])
        for one in ends
        if isinstance(one, ast.Compare)
        and isinstance(one.ops[0], (ast.Eq, ast.Gt, ast.GtE))
        and isinstance(counter, ast.Name)
        and ast.unparse(one.left) == counter.id
    ]
    rounds = [_rounds(script, one) for one in script.around(loop) if isinstance(one, (ast.For, ast.While))]
    steps = [one for one in limits if isinstance(one, int)]
    function = script.function_of(loop)
    calls = list(calls_of(script, function)) if function is not None else []
    if function is not None and (len(calls) != 1 or script.nearest(calls[0], ast.For, ast.While) is not None):
        return False
    return bool(steps) and all(rounds) and min(steps) * math.prod(rounds) <= _MOST_STEPS


def _rounds(script: Script, loop: ast.AST) -> int:
    """How often a loop over ``range(count)`` runs; 0 if that is unknown."""
    call = loop.iter if isinstance(loop, ast.For) else None
    is_range = isinstance(call, ast.Call) and last_name(call.func) == "range" and len(call.args) == 1
    count = script.value(call.args[0]) if isinstance(call, ast.Call) and is_range else 0
    return count if isinstance(count, int) else 0


def _has_one_gpu(script: Script, call: ast.Call) -> bool:
    """Whether it gets one GPU, or is not reached, by all numbers, lists and switches that the project shows."""
    devices = script.argument(call, "device_ids", 1)
    if devices is not None and _is_one_device(script, devices):
        return True
    branches = (one for one in script.around(call) if isinstance(one, ast.If))
    return any(_asks_in_vain(script, part) for branch in branches for part in _demanded(branch, call))


def _asks_in_vain(script: Script, test: ast.expr) -> bool:
    """Whether a test for several GPUs, or for a switch, holds in no start that the project shows."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Gt, ast.GtE, ast.NotEq)):
        counted = test.left
        if isinstance(counted, ast.Call) and last_name(counted) == "len" and len(counted.args) == 1:
            return _is_one_device(script, counted.args[0])
        return _is_at_most_one(script, counted)
    values = script.values_of(test)
    if isinstance(test, ast.Name) and values and all(isinstance(one, ast.Constant) and not one.value for one in values):
        return True
    is_own = any(True for _ in script.method_calls("add_argument"))
    return bool(switch_off_by_default(script, test)) and (not is_own or values_in_commands(script, test) is not None)


def _is_at_most_one(script: Script, number: ast.expr) -> bool:
    numbers = shown_numbers(script, number)
    return all(isinstance(one, (int, float)) and one <= 1 for one in numbers)


def _is_one_device(script: Script, devices: ast.expr, depth: int = 3) -> bool:
    """Whether a list of devices has one, wherever the project shows it: ``list(range(args.n_gpu))``, an option with the
    default ``"0"``, what a function makes of such a number."""
    values = [one.value if isinstance(one, ast.Starred) else one for one in script.values_of(devices)]
    if not depth or not values:
        return False
    return all(_is_one_in(script, one, devices, depth - 1) for one in values)


def _is_one_in(script: Script, value: ast.expr, devices: ast.expr, depth: int) -> bool:
    if isinstance(value, ast.ListComp):
        return _is_one_device(script, value.generators[0].iter, depth)
    if isinstance(value, ast.Call):
        bare = last_name(value)
        if bare == "range" and len(value.args) == 1:
            return _is_at_most_one(script, value.args[0])
        inner = value.func.value if bare == "split" and isinstance(value.func, ast.Attribute) else None
        if inner is not None or (bare in ("list", "tuple") and len(value.args) == 1):
            return _is_one_device(script, inner or value.args[0], depth)
        counts = [one for one in value.args if re.search("gpu", ast.unparse(one), re.IGNORECASE)]
        return len(counts) == 1 and _is_at_most_one(script, counts[0])
    name = value.attr if isinstance(value, ast.Attribute) else script.value(getattr(value, "slice", None))
    return isinstance(name, str) and lists_one(script, name)


_ASIDE = frozenset({"train", "eval", "cuda", "to", "parameters", "named_parameters", "state_dict", "zero_grad"})
"""What calls no ``forward``."""


def _is_never_called(script: Script, call: ast.Call) -> bool:
    """Whether nothing in the function around it calls what it is bound to, or hands it on: no step copies it."""
    kept, function = script.parent(call), script.function_of(call)
    target = kept.targets[0] if isinstance(kept, ast.Assign) and len(kept.targets) == 1 else None
    if function is None or not isinstance(kept, ast.Assign) or not isinstance(target, ast.Name):
        return False
    reads = [one for one in script.inside(function, ast.Name) if one.id == target.id and isinstance(one.ctx, ast.Load)]
    later = [script.parent(one) for one in reads if one.lineno > (kept.end_lineno or kept.lineno)]
    return bool(later) and all(isinstance(one, ast.Attribute) and one.attr in _ASIDE for one in later)


def _is_replaced(script: Script, call: ast.Call) -> bool:
    """Whether its name is bound again, without it, above each later use that trains: ``net = DataParallel(net)``, then
    ``net = build()``."""
    kept = script.parent(call)
    target = kept.targets[0] if isinstance(kept, ast.Assign) and len(kept.targets) == 1 else None
    if not isinstance(kept, ast.Assign) or not isinstance(target, ast.Name):
        return False
    within = script.function_of(call) or script.tree
    later = [one for one in script.inside(within, ast.Name) if one.id == target.id and one.lineno > kept.lineno]
    later.sort(key=lambda one: (one.lineno, one.col_offset))
    made = [script.statement_of(one) for one in later if isinstance(one.ctx, ast.Store)]
    anew = {one for one in made if isinstance(one, ast.Assign) and not _reads(script, one, target.id)}
    if not anew or isinstance(later[0].ctx, ast.Load):
        return False
    read = (one for one in later if isinstance(one.ctx, ast.Load) and _is_trained(script, one))
    return all(not anew.isdisjoint(_statements_above(script, one)) for one in read)


def _reads(script: Script, statement: ast.stmt, name: str) -> bool:
    return any(one.id == name and isinstance(one.ctx, ast.Load) for one in script.inside(statement, ast.Name))


def _statements_above(script: Script, node: ast.AST) -> Iterator[ast.stmt]:
    """The statements before one in its block and in the blocks around it, inside its function."""
    inner = node
    for outer in script.around(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(outer, name, None)
            if isinstance(block, list) and inner in block:
                yield from block[: block.index(inner)]
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        inner = outer


def _is_trained(script: Script, name: ast.Name) -> bool:
    """Whether it is given to a call that trains, or to one that may."""
    call = script.nearest(name, ast.Call)
    return (
        call is not None and re.search(r"eval|infer|predict|save|load|\btest|valid", script.text_of(call.func)) is None
    )


def _only_evaluates(script: Script, call: ast.Call) -> bool:
    """Whether the function around it computes no gradients and steps no optimizer: it wraps the model to read a
    checkpoint, or to infer, where DataParallel copies it in the same way but nothing is trained."""
    function = script.function_of(call)
    if function is None or _runs_backward(script, function):
        return False
    calls = list(script.inside(function, ast.Call))
    evaluates = any(last_name(one.func) in ("eval", "no_grad", "inference_mode") for one in calls) or any(
        last_name(one.func) == "set_grad_enabled" and script.value(script.argument(one, "mode", 0)) is False
        for one in calls
    )
    decorated = any(
        "no_grad" in ast.unparse(one) or "inference_mode" in ast.unparse(one) for one in function.decorator_list
    )
    names = " ".join(script.text_of(one.func) for one in calls)
    results = [one.value for one in script.inside(function, ast.Return) if one.value is not None]
    parts = [part for one in results for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    returned = {one.id for one in parts if isinstance(one, ast.Name)}
    kept = _targets_of(script, call)
    return (
        (evaluates or decorated) and not _OF_TRAINING.search(names) and kept is not None and returned.isdisjoint(kept)
    )


_OF_TRAINING = re.compile(r"optim|\btrain|[Tt]rainer|\.fit\b|backward|schedul", re.IGNORECASE)


def _runs_backward(script: Script, function: FunctionNode) -> bool:
    """Whether a function, or one that it calls, runs a backward pass, also in loops."""
    seen: list[ast.AST] = [function]
    for one in seen:
        for call in script.inside(one, ast.Call):
            if has_backward(script, call):
                return True
            called = script.definition(call.func)
            if called is not None and called not in seen:
                seen.append(called)
    return any(has_backward(script, one) for one in seen)


def _targets_of(script: Script, call: ast.Call) -> set[str] | None:
    """The local names that a wrapped model is bound to, or those of the objects that the function makes and keeps it
    in; ``None`` if it is kept elsewhere."""
    statement, function = script.statement_of(call), script.function_of(call)
    if not isinstance(statement, ast.Assign) or function is None:
        return None
    made = {
        target.id
        for one in script.inside(function, ast.Assign)
        if isinstance(one.value, ast.Call)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for one in statement.targets:
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in made:
            found.add(one.value.id)
        elif isinstance(one, ast.Name):
            found.add(one.id)
        else:
            return None
    return found


def _is_only_evaluated(script: Script, call: ast.Call) -> bool:
    """Whether each use of the wrapped model in the function around it evaluates the model, although the function also
    makes what belongs to training: an optimizer whose state is read from a checkpoint."""
    function, kept = script.function_of(call), _targets_of(script, call)
    if function is None or not kept or _trains_below(script, function, call):
        return False
    names = (one for one in script.inside(function, ast.Name) if one.id in kept and one.lineno > call.lineno)
    uses = [one for one in names if isinstance(one.ctx, ast.Load)]
    return bool(uses) and not any(_is_trained(script, one) or _is_returned(script, one) for one in uses)


def _trains_below(script: Script, function: FunctionNode, wrapped: ast.Call) -> bool:
    """Whether a function runs a backward pass after it has wrapped the model, also in a later round of a loop."""
    loop = script.nearest(wrapped, ast.For, ast.While)
    begin = wrapped.lineno if loop is None or script.function_of(loop) is not function else loop.lineno
    below = [one for one in script.inside(function, ast.Call) if one.lineno >= begin]
    called = (script.definition(one.func) for one in below)
    return any(has_backward(script, one) for one in below) or any(
        one is not None and _runs_backward(script, one) for one in called
    )


def _is_returned(script: Script, name: ast.Name) -> bool:
    return script.nearest(name, ast.Call) is None


def _is_never_enabled(script: Script, call: ast.Call) -> bool:
    """Whether it is under a parameter that is false by default, and nothing in the project gives another value."""
    function = script.function_of(call)
    if function is None or script.modules is None or script.modules.is_one_file:
        return False
    parts = [part for outer in script.around(call) if isinstance(outer, ast.If) for part in _demanded(outer, call)]
    names = [one.id for one in parts if isinstance(one, ast.Name)]
    return any(_is_off(script, function, name) for name in names)


def _demanded(branch: ast.If, call: ast.Call) -> list[ast.expr]:
    """What has to be true in the branch of a condition."""
    if not any(call in ast.walk(one) for one in branch.body):
        return []
    test = branch.test
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _is_off(script: Script, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    arguments = function.args
    given = dict(zip([one.arg for one in arguments.args[::-1]], arguments.defaults[::-1], strict=False))
    given |= {
        one.arg: default
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    default = given.get(name)
    if not isinstance(default, ast.Constant) or default.value is not False or script.modules is None:
        return False
    sets = re.compile(rf"\b{re.escape(name)}[\"']?\s*(?:=(?!=)|:)\s*(?!False\b|false\b|bool\s*=\s*False)")
    options = re.compile(rf"--{re.escape(name).replace('_', '[-_]')}\b")
    texts = dict(script.modules.mentioning(name))
    texts[script.path] = script.text
    return not any(sets.search(text) or options.search(text) for text in texts.values())


def _has_other_way(script: Script) -> bool:
    """Whether another file that has its name and more, or a part of it, does the same with one process per GPU:
    ``train_distributed.py`` for ``train.py``; or one of its folder whose name differs in the words for the use of GPUs:
    ``train_ddp.py`` for ``train_gpu.py``. The author has chosen then."""
    if script.modules is None:
        return False
    words = ("DistributedDataParallel", "horovod.torch")
    found = (one for word in words for one in script.modules.mentioning(word))
    return any(shown != script.path and _is_other_way(script.path, shown, text) for shown, text in found)


def _is_other_way(path: str, other: str, text: str) -> bool:
    own, stem = _stem(path), _stem(other)
    if (own in stem or stem in own) and _TRAINS.search(text):
        return True
    in_folder = path.removesuffix(f"{own}.py") == other.removesuffix(f"{stem}.py")
    return in_folder and _task_of(own) == _task_of(stem) and _CALLS_TRAINING.search(text) is not None


_WAYS = re.compile(
    r"(?:(?:single|multi|one|all)?gpus?|cpu|single|multi|one|all|dp|ddp|dist|distributed?|parallel|data|apex|amp|fp16|"
    r"horovod|hvd|fsdp|launch|spawn|nccl)$"
)
"""Words in the names of programs for how they use GPUs and processes."""


def _task_of(stem: str) -> frozenset[str]:
    """The words of a file's name for what it does: of ``train_gpu`` and of ``ddp_training``, ``train``."""
    words = re.split(r"[_\W]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", stem).lower())
    tasks = (re.sub(r"(?<=train)(?:ing|er)$", "", word) for word in words)
    return frozenset(word for word in tasks if word and not _WAYS.match(word))


_TRAINS = re.compile(r"\.backward\(|init_process_group|hvd\.init")
_CALLS_TRAINING = re.compile(rf"{_TRAINS.pattern}|\b(?:train|fit)(?:_\w+)?\(")


_NAMED = re.compile(
    r"(?:^|[\\/])(?:\w{1,60}[_-])?(?:data[_-]?parallel|dp)(?:[_-]\w{1,60})?(?:[\\/][^\\/]{0,80})?\.(?:py|ipynb)$",
    re.IGNORECASE,
)
"""Files, and files of folders, that are named after DataParallel: they show it, or compare it with the alternatives."""


def _names_one(script: Script, call: ast.Call) -> bool:
    devices = script.argument(call, "device_ids", 1)
    lists = [devices, _default_of(script, devices)]
    return any(
        isinstance(one, ast.List) and len(one.elts) == 1 and not isinstance(one.elts[0], ast.Starred) for one in lists
    )


def _default_of(script: Script, name: ast.expr | None) -> ast.expr | None:
    """The default of the parameter that a name reads."""
    function = script.function_of(name) if isinstance(name, ast.Name) else None
    if function is None or not isinstance(name, ast.Name):
        return None
    names, defaults = [one.arg for one in function.args.args], function.args.defaults
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return given.get(name.id)


def _stem(path: str) -> str:
    """The name of a file without its folders and its suffix."""
    return re.split(r"[\\/]", path)[-1].rpartition(".")[0]


def _hit(script: Script, call: ast.Call, shown: ast.Call | None) -> Violation:
    if shown is not None:
        return Violation(
            call,
            f"DataParallel does not reduce gradients across ranks, although line {shown.lineno} joins a process group",
            fix="Replace DataParallel with `DistributedDataParallel(model, device_ids=[local_rank])`.",
            severity=Severity.ERROR,
        )
    model = script.text_of(call.args[0], 30) if call.args else "the model"
    return Violation(call, f"DataParallel({model}) copies the model to every GPU in each step")


_MANY_RANKS = """\
import torch
import torch.nn as nn

model = Net()
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)  # !
model.cuda()
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
"""
_HEAD_ASIDE = """\
import torch

def train(model, head, loader, optimizer):
    model = torch.nn.DataParallel(model)  # !
    head = torch.nn.DataParallel(head){mark}
    head.train()
    for x, y in loader:
        criterion({called}, y).backward()
        optimizer.step()
"""
_NAMED_DEVICES = """\
from torch.nn import DataParallel

def train(model, loader, optimizer):
    model = DataParallel(model, device_ids=[0, 1, 2, 3])  # !
    for x, y in loader:
        loss = model(x, y).mean()
        loss.backward()
        optimizer.step()
"""
_INSIDE_RANKS = """\
dist.init_process_group("nccl")
model = torch.nn.DataParallel(Net().cuda())  # !
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
"""
_ONE_BY_DEFAULT = """\
import torch

def prepare(net, use_gpu=True, gpu_ids=[0]):
    net.to(gpu_ids[0])
    return torch.nn.DataParallel(net, device_ids=gpu_ids)

def step(net, x):
    net(x).sum().backward()
"""
_DDP = """\
import torch.nn as nn

model = nn.parallel.DistributedDataParallel(Net().cuda(), device_ids=[local_rank])
for x, y in loader:
    criterion(model(x), y).backward()
"""
_BESIDE_DDP = """\
if args.distributed:
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
else:
    model = torch.nn.DataParallel(model).cuda()
for x, y in loader:
    criterion(model(x), y).backward()
"""
_ONE_PROCESS = """\
from apex.parallel import DistributedDataParallel as DDP

if args.local_rank != -1:
    torch.distributed.init_process_group("nccl")
    model = DDP(model)
elif n_gpu > 1:
    model = torch.nn.DataParallel(model)
for x, y in loader:
    criterion(model(x), y).backward()
"""
_FROM_CHECKPOINT = """\
import torch.nn as nn

model = nn.DataParallel(Net())
model.load_state_dict(state)
model.eval()
with torch.no_grad():
    for x in loader:
        model(x)
"""
_MARKED: tuple[str, str] = ("DataParallel(model)", "DataParallel(model)  # !")
_REPLACED = """\
import torch

def main(model, several):
    if several:
        model = torch.nn.DataParallel(model)
    model = build()
    for x, y in loader:
        model(x).sum().backward()
"""
_REPLACED_IN_BRANCH = """\
import torch

def main(model, mode):
    model = torch.nn.DataParallel(model)
    if mode == "train":
        model = build()
        for x, y in loader:
            model(x).sum().backward()
    evaluate(model)
"""
_OTHER_BRANCH = """\
import torch

def main(net, several):
    if several:
        model = torch.nn.DataParallel(net)  # !
    else:
        model = net.cuda()
    for x, y in loader:
        model(x).sum().backward()
"""
_EVALUATES = """\
import torch

def evaluate(path, loader):
    model = torch.nn.DataParallel(Net())
    model.load_state_dict(torch.load(path))
    model.eval()
    with torch.no_grad():
        return [model(x).argmax(1) for x in loader]

def train(loader, optimizer):
    model = Net()
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
"""
_EVALUATES_BESIDE: str = _EVALUATES.replace("    model = Net()", "    model = torch.nn.DataParallel(Net())  # !")
_EVALUATES_HELD: str = _EVALUATES.replace(
    "    model = torch.nn.DataParallel(Net())\n", "    run = Run()\n    run.model = torch.nn.DataParallel(Net())\n"
)
_TRAINS_HELD = """\
import torch

def train(loader):
    run = Run()
    run.model.eval()
    run.model = torch.nn.DataParallel(run.model)  # !
    for x, y in loader:
        criterion(run.model(x), y).backward()
        run.optimizer.step()
"""
_WITH_LOSS = """\
import torch

def train(model, criterion, loader):
    model = torch.nn.DataParallel(model.cuda())  # !
    criterion = torch.nn.DataParallel(criterion.cuda())
    for x, y in loader:
        criterion(model(x), y).mean().backward()
"""
_LOSS_ALONE = """\
import torch

def train(criterion, loader):
    criterion = torch.nn.DataParallel(criterion.cuda())  # !
    for x, y in loader:
        criterion(x, y).mean().backward()
"""
_ONE_DEVICE = """\
import torch.nn as nn

model = nn.DataParallel(Net(), device_ids=[0])
if isinstance(model, nn.DataParallel):
    model = model.module
for x, y in loader:
    criterion(model(x), y).backward()
"""
