"""CODE034: the optimizer is created before FSDP shards the parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.training import FSDP
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE034",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("FullyShardedDataParallel", "FSDP", "fully_shard"),
    cases=lambda: (
        fails("the wrapper last", _WRAPPER_LAST),
        fails("FSDP2, layer by layer", _BY_LAYER),
        fails("parameters that were taken before", _KEPT_PARAMETERS),
        passes("wrapped first", _WRAPPED_FIRST),
        passes("generators, which the optimizer reads after the model is wrapped", _LAZY),
        passes("another model, another branch, and made anew", _ANOTHER_MODEL),
        passes("DistributedDataParallel keeps the parameters, and other functions", _DDP),
    ),
)
def optimizer_before_sharding(script: Script) -> Iterator[Violation]:
    """Ask whether optimizers are created after FSDP has sharded the parameters.

    Why it hurts: the optimizer updates the old parameters, which FSDP has replaced with shards: the loss does not
    decrease, and the old parameters stay in memory.
    Fix: Create the optimizer after the model is sharded.
    """
    wraps = [call for call in script.calls(*FSDP) if call.args]
    for made in script.all(ast.Call) if wraps else ():
        if not script.name(made.func).startswith("torch.optim.") or not made.args:
            continue
        for taken in _taken_from(script, made):
            wrapped = next((call for call in wraps if _replaces(script, call, taken, made)), None)
            if wrapped is not None:
                yield Violation(
                    made,
                    f"{script.text_of(made.func)} holds parameters of {script.text_of(_model(taken), 30)}, which "
                    f"{script.text_of(wrapped.func)} replaces at line {wrapped.lineno}",
                    fix=_fix(script, made, taken, wrapped),
                )
                break


def _fix(script: Script, made: ast.Call, taken: ast.Call, wrapped: ast.Call) -> str:
    is_kept = made not in script.around(taken) and not _is_lazy(script, taken)
    earlier = f"Call `{script.text_of(taken.func, 40)}()` and create" if is_kept else "Create"
    return f"{earlier} the optimizer after line {wrapped.lineno}."


def _taken_from(script: Script, made: ast.Call) -> Iterator[ast.Call]:
    groups = [made.args[0]]
    if isinstance(made.args[0], ast.Name):
        groups = list(script.values_of(made.args[0]))
        if len(groups) != 1:
            return
    for node in ast.walk(groups[0]) if groups else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("parameters", "named_parameters"):
                yield node


def _model(taken: ast.Call) -> ast.expr:
    assert isinstance(taken.func, ast.Attribute)
    return taken.func.value


def _replaces(script: Script, wrap: ast.Call, taken: ast.Call, made: ast.Call) -> bool:
    read = made if _is_lazy(script, taken) else taken
    if ast.unparse(wrap.args[0]) != ast.unparse(_model(taken)) or wrap.lineno <= read.lineno:
        return False
    if script.function_of(wrap) is not script.function_of(taken):
        return False
    return not _apart(script, taken, wrap) and not _made_again(script, made, wrap)


def _is_lazy(script: Script, taken: ast.Call) -> bool:
    """Whether the parameters are read when the optimizer iterates: ``p = model.parameters()``, also in a generator
    expression or ``filter``."""
    statement = script.statement_of(taken)
    value = statement.value if isinstance(statement, ast.Assign) else None
    is_filter = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("filter", "map")
    return value is taken or is_filter or isinstance(value, ast.GeneratorExp)


def _apart(script: Script, one: ast.AST, other: ast.AST) -> bool:
    """Whether the first one is in a branch that the other does not share, so that both need not run."""
    conditions = {outer for outer in script.around(other) if isinstance(outer, (ast.If, ast.Try))}
    for outer in script.around(one):
        if isinstance(outer, (ast.If, ast.Try, ast.ExceptHandler)):
            return outer not in conditions or _branch(script, outer, one) != _branch(script, outer, other)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
    return False


def _branch(script: Script, outer: ast.AST, node: ast.AST) -> str:
    chain = {node, *script.around(node)}
    blocks = ("body", "orelse", "handlers", "finalbody")
    return next((name for name in blocks if not chain.isdisjoint(getattr(outer, name, ()))), "")


def _made_again(script: Script, made: ast.Call, wrap: ast.Call) -> bool:
    statement = script.statement_of(made)
    if made.lineno > wrap.lineno or not isinstance(statement, ast.Assign):
        return False
    names = {ast.unparse(target) for target in statement.targets}
    scope = script.function_of(made) or script.tree
    return any(
        one.lineno > wrap.lineno and not names.isdisjoint(ast.unparse(target) for target in one.targets)
        for one in script.inside(scope, ast.Assign)
    )


_WRAPPER_LAST = """\
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # !
model = FSDP(model)
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
"""
_BY_LAYER = """\
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam

def main():
    model = Transformer(args)
    optimizer = Adam(model.parameters(), lr=3e-4, fused=True)  # !
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, optimizer)
"""
_KEPT_PARAMETERS = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

class Runner:
    def build(self):
        self.model = build_model()
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        self.model = FullyShardedDataParallel(self.model, device_id=self.local_rank)
        self.optimizer = torch.optim.SGD(decayed, lr=0.1)  # !
"""
_WRAPPED_FIRST = """\
model = FSDP(Net().cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
_LAZY = """\
weights = model.parameters()
model = FSDP(model)
optimizer = torch.optim.AdamW(weights, lr=1e-3)

trained = (p for p in encoder.parameters() if p.requires_grad)
encoder = FSDP(encoder)
other = torch.optim.AdamW(trained, lr=1e-3)
"""
_ANOTHER_MODEL = """\
critic_optimizer = torch.optim.Adam(critic.parameters())
if args.fsdp:
    model = FSDP(model)
    optimizer = torch.optim.Adam(model.parameters())
else:
    optimizer = torch.optim.Adam(model.parameters())

optimizer = torch.optim.Adam(model.parameters())
if args.shard:
    model = FSDP(model)
    optimizer = torch.optim.Adam(model.parameters())
"""
_DDP = """\
import torch
from torch.distributed.fsdp import fully_shard

optimizer = torch.optim.Adam(model.parameters())
model = DDP(model)

def shard(model):
    fully_shard(model)
    return model
"""
