"""CODE040: BatchNorm is converted to SyncBatchNorm after DDP has wrapped the model."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.knowledge.releases import within
from doctor.lint.python.training import DDP
from doctor.testing.script_cases import fails, passes

_NEEDS_NO_DDP = "1.9"
"""The release of torch whose SyncBatchNorm no longer needs what DDP set on its layers (pull requests 55946, 56425)."""
_CONVERTS = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"


@rule(
    id="CODE040",
    severity=Severity.INFO,
    reads=Script,
    mentions=("convert_sync_batchnorm",),
    cases=lambda: (
        fails("the same name", "model = DDP(net)\nmodel = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # !\n"),
        fails(
            "in one expression",
            "import torch.nn as nn\nmodel = nn.SyncBatchNorm.convert_sync_batchnorm(DDP(net))  # !\n",
        ),
        fails("an attribute, and the module inside", _ATTRIBUTE),
        passes("before", "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)\nmodel = DDP(net)\n"),
        passes(
            "another model",
            "model = DDP(net)\nteacher = torch.nn.SyncBatchNorm.convert_sync_batchnorm(teacher)\n",
        ),
        passes("in another function, which comes first", _FUNCTIONS),
        passes("in the other branch", _BRANCHES),
    ),
)
def batchnorm_converted_after_ddp(script: Script) -> Iterator[Violation]:
    """Ask whether BatchNorm layers are converted to SyncBatchNorm before DDP wraps the model.

    Why it hurts: before torch 1.9, layers that DDP has not seen raise AttributeError in training. Later releases give
    the new layers the same parameters and buffers, but not the hooks of the old ones. The documentation of DDP
    requires the conversion first.
    Fix: Call `model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` above `model =
    DistributedDataParallel(model)`.
    """
    may_be_old = _may_be_old(script)
    for call in script.calls(_CONVERTS):
        given = script.argument(call, "module", 0)
        wrap = _wrapped_before(script, given, call) if given is not None else None
        if given is not None and wrap is not None:
            yield Violation(
                call,
                f"{script.text_of(given)} is converted to SyncBatchNorm after {script.text_of(wrap.func)} has wrapped "
                f"it (line {wrap.lineno})",
                fix=f"Move the conversion at line {call.lineno} above line {wrap.lineno}."
                if call.lineno != wrap.lineno
                else "Convert the module before it is wrapped.",
                preview=not may_be_old,
            )


def _may_be_old(script: Script) -> bool:
    """Whether torch may be older than 1.9: by what a project requires; of a file alone, nothing is known."""
    if script.modules is None or script.modules.is_one_file:
        return True
    return script.states_release_of("torch") and within(script.releases.get("torch", ""), before=_NEEDS_NO_DDP)


def _wrapped_before(script: Script, given: ast.expr, call: ast.Call) -> ast.Call | None:
    if isinstance(given, ast.Attribute) and given.attr == "module":
        given = given.value
    if isinstance(given, ast.Call):
        return given if script.name(given.func) == DDP else None
    for wrap in script.calls(DDP):
        statement = script.parent(wrap)
        names = [ast.unparse(one) for one in statement.targets] if isinstance(statement, ast.Assign) else []
        if ast.unparse(given) in names and wrap.lineno < call.lineno and _same_block(script, wrap, call):
            return wrap
    return None


def _same_block(script: Script, wrap: ast.Call, call: ast.Call) -> bool:
    """Whether the conversion is reached from the wrapping: in its block, or deeper."""
    statement = script.statement_of(wrap)
    outer = script.parent(statement)
    blocks = (getattr(outer, name, None) for name in ("body", "orelse", "finalbody"))
    block = next((one for one in blocks if isinstance(one, list) and statement in one), [])
    return any(one in block for one in script.around(call))


_ATTRIBUTE = """\
class Runner:
    def build(self, sync):
        self.model = DDP(self.model, device_ids=[0])
        if sync:
            self.model.module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.model.module)  # !
"""
_FUNCTIONS = """\
def build(model):
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model

def main():
    model = build(net())
    model = DDP(model)
"""
_BRANCHES = """\
if args.ddp:
    model = DDP(model)
elif args.sync_bn:
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""
