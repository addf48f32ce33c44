"""CODE002: ranks use a GPU that is hard-coded in the script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.cuda import shows_same_devices
from doctor.lint.python.gpu_use import is_where_one_gpu, runs_alone, simulates_ranks
from doctor.lint.python.reachable_functions import is_certain, is_run_by_all
from doctor.lint.python.script import UNKNOWN, last_name
from doctor.lint.python.training import DDP, GROUP, is_test, several_ranks
from doctor.testing.script_cases import fails, passes

_INDEXED = re.compile(r"^cuda:(\d+)$")
_OF_ONE_HOST = re.compile(r"local_?rank|nproc|device_count|torchrun|spawn|accelerate|localid", re.IGNORECASE)
"""Words of scripts with several ranks on one host; others may have one GPU in each."""
_MOVES = ("to", "cuda")
_VISIBLE = re.compile(r"environ(?:\[|\.setdefault\(|\.update\()[^\n]{0,200}CUDA_VISIBLE_DEVICES|set_visible_devices")
_BY_NAME = ("torch.", "transformers.")


@rule(
    id="CODE002",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("cuda", "device"),
    foreshadows=("GPU001", "MEM001"),
    impacts={
        r"\.(?:to|cuda)\([^()]+\)$": (
            "All ranks of a host put these tensors on GPU 0, which may run out of memory. Operations that combine them "
            "with tensors on the GPU of a rank fail."
        ),
    },
    cases=lambda: (
        fails("a fixed device beside a process group", _FIXED_DEVICE),
        fails("the first GPU by number", _FIRST_GPU),
        fails("moved before the rank has its device", _MOVED_EARLY),
        fails("a model that Transformers puts onto the first GPU", _DEVICE_MAP),
        passes("the device of the rank", _OF_RANK),
        passes("a loss without weights, which has no tensors to move", _LOSS_EARLY),
        fails(
            "a loss with weights",
            _LOSS_EARLY.replace("CrossEntropyLoss()", "CrossEntropyLoss(weight=shares)").replace(
                "cuda()", "cuda()  # !"
            ),
        ),
        passes("chosen anew where there are ranks", _CHOSEN_AGAIN),
        passes("a process that sees one GPU", _ONE_VISIBLE),
        fails(
            "a process that may see several GPUs",
            _ONE_VISIBLE.replace("count == 1", "count >= 1").replace("device(0)", "device(0)  # !"),
        ),
        passes("the first GPU until the branch of ranks sets theirs", _SET_AGAIN.format(moved="args.gpu")),
        fails(
            "the first GPU, to which the model is moved before",
            _SET_AGAIN.format(moved="").replace("device(0)", "device(0)  # !"),
        ),
        fails(
            "a branch that ranks may not take",
            _SET_AGAIN.format(moved="args.gpu")
            .replace("if args.distributed:", "if args.own:")
            .replace("device(0)", "device(0)  # !"),
        ),
        passes("a device that nothing reads, beside that of Accelerate", _UNREAD),
        passes("one process, or one model over several GPUs", _ONE_PROCESS),
        passes("layers of one model on two GPUs, and every rank sees its own GPU alone", _LAYERS),
        passes("a group of one rank", _GROUP),
        passes("a model of two halves", _TWO_GPUS),
    ),
)
def device_fixed_in_ranks(script: Script) -> Iterator[Violation]:
    """Ask whether each rank uses its own GPU.

    Why it hurts: all ranks of a host use the same GPU, while the others are idle: NCCL fails with "Duplicate GPU
    detected" or hangs, or the GPU runs out of memory.
    Fix: Use the GPU of the local rank: `torch.device("cuda", local_rank)`, where local_rank is
    `int(os.environ["LOCAL_RANK"])` under torchrun.
    """
    shown = several_ranks(script)
    if shown is None or is_test(script) or simulates_ranks(script) or _spreads_one_model(script):
        return
    if _VISIBLE.search(script.text) and not shows_same_devices(script):
        return
    for sets in script.calls("torch.cuda.set_device"):
        function = script.function_of(sets)
        body = (function or script.tree).body
        if not sets.args or _is_first(sets.args[0]) or script.statement_of(sets) not in body:
            continue
        for call in script.method_calls("cuda", "to"):
            if (
                call.lineno < sets.lineno
                and script.function_of(call) is function
                and _is_current_device(script, call)
                and not _moves_nothing(script, call)
                and script.statement_of(call) in body
            ):
                yield Violation(
                    call,
                    f"{script.text_of(call)} uses GPU 0: the rank selects its own GPU only at line {sets.lineno}",
                    fix=f"Move {script.text_of(sets)} above line {call.lineno}.",
                )
    for node in script.all(ast.Call):
        words = _moves_to_first(script, node) or _made_on_first(script, node)
        if not words or runs_alone(script, node) or is_where_one_gpu(script, node):
            continue
        if is_run_by_all(script, node) and not _is_set_again(script, node):
            certain = bool(_OF_ONE_HOST.search(script.text)) and not _meets_by_gloo(script)
            yield Violation(
                node,
                f"Every rank uses GPU 0 of its host: {words}",
                fix=_fix(words),
                evidence=(("job_started_at_line", shown.lineno),),
                severity=None if certain else Severity.WARNING,
                confidence=0.9 if certain else 0.6,
                once=script.path,
            )


def _is_set_again(script: Script, sets: ast.Call) -> bool:
    """Whether ``set_device(0)`` has no effect in ranks: its function sets the device of the rank below it, and does
    nothing in between that uses the current device, or wraps the model, or calls a collective."""
    function = script.function_of(sets)
    if script.name(sets.func) != _SETS or function is None:
        return False
    below = [one for one in script.inside(function, ast.Call) if one.lineno > sets.lineno]
    again = [one for one in below if script.name(one.func) == _SETS and one.args and not _is_first(one.args[0])]
    last = next((one.lineno for one in again if is_certain(script, one)), 0)
    between = [one for one in below if one.lineno < last]
    own = filter(None, (script.definition(one.func) for one in between))
    between += [call for one in own for call in script.inside(one, ast.Call)]
    return last > 0 and not any(_uses_device(script, one) for one in between)


def _uses_device(script: Script, call: ast.Call) -> bool:
    """Whether a call uses the current GPU, or that of the rank: ``x.cuda()``, ``device="cuda"``, a collective."""
    given = (*call.args, *(one.value for one in call.keywords))
    is_named = any(isinstance(one, ast.Constant) and str(one.value).startswith("cuda") for one in given)
    name = script.name(call.func)
    is_of_ranks = name in (DDP, GROUP) or name.startswith("torch.distributed.")
    return is_named or is_of_ranks or _is_current_device(script, call)


_SETS = "torch.cuda.set_device"


def _meets_by_gloo(script: Script) -> bool:
    """Whether each process group of the file has the backend Gloo, which does not ask for a GPU of each rank's own."""
    backends = [script.argument(call, "backend", 0) for call in script.calls(GROUP)]
    return bool(backends) and all(one is not None and script.value(one) == "gloo" for one in backends)


_OWN_GPU = (
    ("torch.cuda.set_device(", "torch.cuda.set_device(local_rank)"),
    ("device_ids=", "device_ids=[local_rank]"),
    ("device_map=", 'device_map={"": local_rank}'),
    ("device=", 'device=torch.device("cuda", local_rank)'),
    (".to(", ".to(local_rank)"),
    (".cuda(", ".cuda(local_rank)"),
)
"""The same argument or call for the GPU of the rank."""


def _fix(words: str) -> str:
    own = next((code for part, code in _OWN_GPU if part in words), 'torch.device("cuda", local_rank)')
    return (
        f'Use the GPU of the local rank: `{own}`, where local_rank is `int(os.environ["LOCAL_RANK"])` under torchrun.'
    )


def _spreads_one_model(script: Script) -> bool:
    """Whether the file uses other GPUs too: layers of one model, a server next to the training."""
    numbers = {
        match[1]
        for one in script.all(ast.Constant)
        if isinstance(one.value, str) and (match := _INDEXED.match(one.value))
    }
    return bool(numbers - {"0"})


def _moves_to_first(script: Script, call: ast.Call) -> str:
    bare = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = script.name(call.func)
    if bare in _MOVES and call.args and _is_first(call.args[0]) and not _moves_nothing(script, call):
        moved = script.text_of(call.func.value, 24) if isinstance(call.func, ast.Attribute) else ""
        return f"{moved}.{bare}({script.text_of(call.args[0])})"
    if name == "torch.cuda.set_device" and call.args and _is_first(call.args[0]):
        return script.text_of(call)
    if name == DDP and script.value(script.argument(call, "device_ids", 1)) == (0,):
        return "device_ids=[0]"
    return ""


_WITHOUT_TENSORS = re.compile(
    r"^torch\.nn\.(?:\w+\.)*(?:\w+Loss|(?:Leaky)?ReLU6?|[A-Z]?ELU|SiLU|Mish|Tanh|Sigmoid|Softplus|(?:Log)?Softmax|"
    r"Flatten|Unflatten|Identity|(?:Alpha)?Dropout\d?d?|(?:Adaptive)?(?:Max|Avg)Pool\dd|Upsample|PixelShuffle|"
    r"CosineSimilarity|PairwiseDistance)\(\)$"
)
"""Modules of torch without parameters; losses have a buffer if they are given weights."""
_OF_LOSSES = ("weight", "pos_weight")
_WEIGHT_FIRST = frozenset(
    {"CrossEntropyLoss", "NLLLoss", "NLLLoss2d", "BCELoss", "BCEWithLogitsLoss", "MultiLabelSoftMarginLoss"}
)
"""torch/nn/modules/loss.py: these take ``weight`` as the first argument."""


def _moves_nothing(script: Script, call: ast.Call) -> bool:
    """Whether what a call moves is a module without parameters and buffers: ``CrossEntropyLoss().cuda()``."""
    if not isinstance(call.func, ast.Attribute):
        return False
    made = [one for one in script.values_of(call.func.value) if one is not call and not _moves(one, call.func.value)]
    return bool(made) and all(
        isinstance(one, ast.Call)
        and _WITHOUT_TENSORS.match(f"{script.name(one.func)}()") is not None
        and not script.is_open(one)
        and all(script.argument(one, name) is None for name in _OF_LOSSES)
        and not (one.args and last_name(one.func) in _WEIGHT_FIRST)
        for one in made
    )


def _moves(value: ast.expr, moved: ast.expr) -> bool:
    """``loss = loss.cuda()``: a value of a name that is the name itself, moved."""
    is_move = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES
    return is_move and isinstance(value, ast.Call) and ast.unparse(value.func).startswith(f"{ast.unparse(moved)}.")


def _is_first(node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else UNKNOWN
    return value == "cuda:0" or (value == 0 and isinstance(value, int) and not isinstance(value, bool))


def _made_on_first(script: Script, call: ast.Call) -> str:
    """``torch.device("cuda:0")`` that no other device replaces; ``device=`` and ``device_map=``."""
    name = script.name(call.func)
    if name == "torch.device":
        either = call.args[0] if call.args and isinstance(call.args[0], ast.IfExp) else None
        words = f"torch.device({script.text_of(either.body)} if ...)" if either is not None else script.text_of(call)
        return words if _is_device_of_all(script, call) else ""
    if not name.startswith(_BY_NAME):
        return ""
    if (device := script.argument(call, "device")) is not None and _is_first(device):
        return f"device={script.text_of(device)}"
    mapped = script.argument(call, "device_map")
    if isinstance(mapped, ast.Dict) and len(mapped.values) == 1 and _is_first(mapped.values[0]):
        return f"device_map={script.text_of(mapped)}"
    return ""


def _is_device_of_all(script: Script, call: ast.Call) -> bool:
    if not call.args or not _is_first_device(script, call):
        return False
    statement = script.statement_of(call)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], (ast.Name, ast.Attribute)):
        return isinstance(script.parent(call), ast.Call)
    target = statement.targets[0]
    return len(script.values_of(target)) == 1 and not _is_unread(script, target)


def _is_unread(script: Script, target: ast.expr) -> bool:
    """Whether nothing reads a variable of a function: a device that was replaced by that of an Accelerator."""
    if not isinstance(target, ast.Name) or script.function_of(target) is None:
        return False
    scope = script.scope_of(target, target.id)
    return not any(
        one.id == target.id and isinstance(one.ctx, ast.Load) and script.scope_of(one, one.id) is scope
        for one in script.all(ast.Name)
    )


def _is_first_device(script: Script, call: ast.Call) -> bool:
    named = call.args[0]
    if isinstance(named, ast.IfExp):
        named = named.body
    if isinstance(named, ast.Constant) and named.value == "cuda":
        return script.value(script.argument(call, "index", 1)) == 0
    return isinstance(named, ast.Constant) and named.value == "cuda:0"


def _is_current_device(script: Script, call: ast.Call) -> bool:
    bare = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if bare == "cuda":
        return not call.args and not call.keywords
    return bool(call.args) and script.value(call.args[0]) == "cuda"


_FIXED_DEVICE = """\
dist.init_process_group("nccl")
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")  # !
model = DDP(Net().to(device))
for images, labels in loader:
    loss = criterion(model(images.to(device)), labels.to(device))
    loss.backward()
"""
_FIRST_GPU = """\
import torch
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)  # !
    model = Net().cuda(0)  # !
    model = DistributedDataParallel(model, device_ids=[0])  # !
    for x, y in loader:
        x = x.to("cuda:0", non_blocking=True)  # !
        criterion(model(x), y.to(0)).backward()  # !

main()
"""
_MOVED_EARLY = """\
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    model = Net().cuda()  # !
    torch.cuda.set_device(local_rank)
    train(model)

main()
"""
_LOSS_EARLY = """\
import torch
from torch import nn

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    criterion = nn.CrossEntropyLoss().cuda()
    torch.cuda.set_device(local_rank)
    train(DDP(Net().to(local_rank)), criterion)

main()
"""
_DEVICE_MAP = """\
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("gpt2", device_map={"": 0})  # !
model, optimizer = accelerator.prepare(model, optimizer)
"""
_OF_RANK = """\
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
model = DDP(Net().cuda(), device_ids=[local_rank])
for x, y in loader:
    criterion(model(x.to(f"cuda:{local_rank}")), y.cuda(local_rank)).backward()
"""
_UNREAD = """\
def main():
    device = torch.device("cuda:0")
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(Net(), make_optimizer())
    model.to(accelerator.device)
"""
_SET_AGAIN = """\
import torch

def main(args):
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = Net()
    model.cuda({moved})
    if args.distributed:
        torch.cuda.set_device(args.gpu)
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    train(model, args.local_rank)

main(parse())
"""
_CHOSEN_AGAIN = """\
def main(args):
    device = torch.device("cuda:0")
    if args.distributed:
        device = torch.device("cuda", args.local_rank)
        dist.init_process_group("nccl")
    else:
        torch.cuda.set_device(0)
    if args.local_rank == 0:
        ema = Net().to("cuda:0")
    model = Net().to(device)

main(parse())
"""
_ONE_VISIBLE = """\
import torch

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
count = torch.cuda.device_count()
if args.spread:
    torch.cuda.set_device(local_rank)
elif count == 1:
    torch.cuda.set_device(0)
"""
_ONE_PROCESS = """\
device = torch.device("cuda:0")
model = Net().to(device)
for x, y in loader:
    criterion(model(x.to(device)), y.to(device)).backward()
"""
_LAYERS = """\
import torch

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["SLURM_LOCALID"]
dist.init_process_group("nccl")
model = Net().to("cuda:0")
"""
_GROUP = """\
import torch

dist.init_process_group("nccl", rank=0, world_size=1)
model = Net().to("cuda:0")
"""
_TWO_GPUS = """\
import torch

dist.init_process_group("gloo")
first = Half().to("cuda:0")
second = Half().to("cuda:1")
"""
