"""CODE039: each rank initializes different weights, and they are never synchronized."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.rank_branches import is_rank
from doctor.lint.python.script import last_name
from doctor.lint.python.training import ACCELERATOR, FABRIC, TRAINER, WRAPPERS, is_test
from doctor.testing.script_cases import fails, passes

_SEEDS = frozenset({"manual_seed", "seed_everything", "set_seed", "manual_seed_all"})
_SEEDERS = (
    "torch.manual_seed",
    "torch.random.manual_seed",
    "lightning.pytorch.seed_everything",
    "transformers.set_seed",
)
_REDUCES = ("torch.distributed.all_reduce", "torch.distributed.all_reduce_coalesced")
_EQUALIZES = (*WRAPPERS, ACCELERATOR, FABRIC, TRAINER, "deepspeed.initialize", "transformers.Trainer")
"""They broadcast the weights of rank 0, or shard them."""


@rule(
    id="CODE039",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("manual_seed", "seed_everything", "set_seed"),
    cases=lambda: (
        fails("the seed is a sum", _script("torch.manual_seed(1234 + dist.get_rank())\nmodel = Net()  # !")),
        fails(
            "by a variable",
            _script(
                "seed = args.seed * 100 + rank\ntorch.manual_seed(seed)\nmodel = torch.nn.Linear(2, 2).cuda()  # !"
            ),
        ),
        fails("in a function", _IN_FUNCTION),
        fails("a helper seeds, and the model is of the project", _HELPERS),
        passes("the helper gets one seed", _HELPERS.replace("seed + rank", "seed")),
        passes("seeded by rank behind the model", _script("model = Net()\ntorch.manual_seed(1234 + rank)")),
        passes(
            "another seed between",
            _script("torch.manual_seed(1 + rank)\ndata = load()\ntorch.manual_seed(1)\nmodel = Net()"),
        ),
        passes(
            "broadcast",
            _script(
                "torch.manual_seed(1 + rank)\nmodel = Net()\n"
                "for p in model.parameters():\n    dist.broadcast(p.data, 0)"
            ),
        ),
        passes("DDP broadcasts the weights", _script("torch.manual_seed(1 + rank)\nmodel = DDP(Net())")),
        passes(
            "weights of a file",
            _script("torch.manual_seed(1 + rank)\nmodel = Net()\nmodel.load_state_dict(torch.load('a.pt'))"),
        ),
        passes("no rank in the seed", _script("torch.manual_seed(args.seed)\nmodel = Net()")),
    ),
)
def weights_seeded_by_rank(script: Script) -> Iterator[Violation]:
    """Ask whether all ranks start with the same weights if gradients are averaged by hand.

    Why it hurts: each rank starts with different weights and applies the same averaged gradient, so the replicas stay
    different and the gradient fits none of them.
    Fix: Use the same seed on all ranks until the model is built, or broadcast its parameters and buffers from rank 0.
    """
    if is_test(script) or next(script.calls(*_EQUALIZES), None) is not None or "broadcast" in script.text:
        return
    if not any(_is_of_gradients(call) for call in script.calls(*_REDUCES)):
        return
    seeds = [call for call in (*script.calls(*_SEEDERS), *_seeding_calls(script)) if call.args]
    for seed in seeds:
        if not _is_by_rank(script, seed.args[0]):
            continue
        for built, name in _built_behind(script, seed):
            yield Violation(
                built,
                f"{name} is built with the seed `{script.text_of(seed.args[0])}` (line {seed.lineno}), which differs "
                "between ranks",
                evidence=(("seeded_at_line", seed.lineno),),
            )


def _seeding_calls(script: Script) -> Iterator[ast.Call]:
    """Calls of functions of the file that seed torch with their first parameter."""
    seeding = {
        function
        for call in script.calls(*_SEEDERS)
        if (function := script.function_of(call)) is not None and function.args.args and call.args
        if isinstance(call.args[0], ast.Name) and call.args[0].id == function.args.args[0].arg
    }
    yield from (call for call in script.all(ast.Call) if seeding and script.definition(call.func) in seeding)


def _is_of_gradients(call: ast.Call) -> bool:
    parts = (part for one in call.args[:1] for part in ast.walk(one))
    return any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in parts)


def _is_by_rank(script: Script, seed: ast.expr) -> bool:
    values = script.values_of(seed) if isinstance(seed, ast.Name) and not is_rank(script, seed) else (seed,)
    return len(values) == 1 and any(
        isinstance(part, ast.expr) and is_rank(script, part) for one in values for part in ast.walk(one)
    )


def _built_behind(script: Script, seed: ast.Call) -> Iterator[tuple[ast.Assign, str]]:
    """Assignments of models in the function of the seed, before another seed is set."""
    function = script.function_of(seed)
    scope = function or script.tree
    others = [
        call.lineno
        for call in script.inside(scope, ast.Call)
        if call is not seed and call.lineno > seed.lineno and last_name(call.func) in {*_SEEDS, last_name(seed.func)}
    ]
    end = min(others, default=1 << 30)
    for statement in script.inside(scope, ast.Assign):
        if not seed.lineno < statement.lineno < end or script.function_of(statement) is not function:
            continue
        target = statement.targets[0]
        if isinstance(target, ast.Name) and isinstance(statement.value, ast.Call) and _is_model(script, statement):
            yield statement, target.id


def _is_model(script: Script, statement: ast.Assign) -> bool:
    """A module of this file, of torch, or whose parameters an optimizer gets; weights that no file replaces."""
    name = ast.unparse(statement.targets[0])
    made = statement.value
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and isinstance(made.func.value, ast.Call):
        made = made.func.value  # Net().cuda()
    if not isinstance(made, ast.Call):
        return False
    owner = script.class_definition(made.func)
    called = script.name(made.func)
    is_module = (called.startswith("torch.nn.") and last_name(made.func)[:1].isupper()) or script.derives(
        owner, "torch.nn.Module"
    )
    uses = {one.attr for one in script.all(ast.Attribute) if ast.unparse(one.value) == name}
    is_module = is_module or (_is_constructor(script, made) and "parameters" in uses and "backward" in script.text)
    return is_module and not any(one.startswith("load_") for one in uses)


def _is_constructor(script: Script, made: ast.Call) -> bool:
    """``UNet(3, 8)`` of another module of the project, with no word of weights that it loads."""
    words = {*(one.arg or "" for one in made.keywords), *(str(script.value(one)) for one in made.args)}
    is_class = last_name(made.func)[:1].isupper() and isinstance(made.func, (ast.Name, ast.Attribute))
    return is_class and not any(re.search(r"pretrain|weights|checkpoint|ckpt|[/.]", word) for word in words)


def _script(steps: str) -> str:
    return f"""\
from torch import nn

class Net(nn.Module):
    pass

rank = dist.get_rank()
{steps}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
"""


_HELPERS = """\
import random
from project import UNet

def seed_all(value):
    random.seed(value)
    torch.manual_seed(value)

def main(args, rank, seed):
    seed_all(seed + rank)
    model = UNet(3, 6).cuda()  # !
    optimizer = torch.optim.Adam(model.parameters())
    for batch in make_loader(args):
        model(batch).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad.data)
        optimizer.step()
"""
_IN_FUNCTION = """\
import torch.nn as nn

def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)

def run(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).to(rank)  # !
    for batch in make_loader(rank, size):
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        average(model)
"""
