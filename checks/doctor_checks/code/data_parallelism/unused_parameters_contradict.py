"""CODE018: find_unused_parameters contradicts what the script does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, SetArgument, Severity, Violation, is_older, location_of, rule
from doctor.lint.python.lightning_version import known_lightning
from doctor.lint.python.project.one_process import never_runs
from doctor.lint.python.project.settings.options import left_off
from doctor.lint.python.project.starts.accelerate_jobs import shards_always
from doctor.lint.python.training import DDP, FABRIC, TRAINER, hooks, lightning_modules, trains_on_several
from doctor.testing.script_cases import fails, passes

_CHECKPOINT = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")
_KWARGS = ("accelerate.DistributedDataParallelKwargs", "accelerate.utils.DistributedDataParallelKwargs")
_STRATEGIES = ("lightning.pytorch.strategies.DDPStrategy", "lightning.fabric.strategies.DDPStrategy")
_FINDS = "_find_unused_parameters_true"
_PLAIN = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
_OPTION = re.compile(r"checkpoint|recompute", re.IGNORECASE)
_NOT_REENTRANT_SINCE = "5.0"
"""Transformers: ``gradient_checkpointing_enable`` was reentrant before, unless set otherwise."""


@rule(
    id="CODE018",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("find_unused_parameters", "manual_backward"),
    foreshadows=("RUN009",),
    impacts={
        r"is redundant": "None except a warning, because static_graph=True detects unused parameters itself.",
        r"reentrant checkpointing": (
            'DDP fails with "Expected to mark a variable ready only once" in the first backward pass.'
        ),
        r"leaves parameters unused": (
            'DDP fails with "Expected to have finished reduction in the prior iteration" in the second step.'
        ),
    },
    cases=lambda: (
        fails("with reentrant checkpointing", _REENTRANT),
        fails("as a strategy of Lightning", _STRATEGY),
        fails("as arguments of Transformers", _ARGUMENTS, releases=(("transformers", "4.57.1"),)),
        fails("a graph that is said to be the same in every step", _STATIC),
        fails(
            "two optimizers, each with a backward pass of its own",
            _TWO_OPTIMIZERS,
            fixed={'strategy="ddp"': 'strategy="ddp_find_unused_parameters_true"'},
        ),
        passes("with checkpointing that is not reentrant", _NOT_REENTRANT),
        passes("reentrant, and no search or a static graph", _NO_SEARCH),
        passes(
            "a search alone, where unused parameters can't be told",
            _SEARCH,
            releases=(("transformers", "5.23.0"),),
        ),
        fails("a model whose blocks are checkpointed", _REFERENCE, releases=(("transformers", "4.57.1"),)),
        passes(
            "a reference, which is only evaluated",
            _REFERENCE.replace("# !", "") + "net.eval()\n",
            releases=(("transformers", "4.57.1"),),
        ),
        passes("two optimizers on one device, with the search, and before Lightning 2", _ONE_DEVICE),
    ),
)
def unused_parameters_contradict(script: Script) -> Iterator[Violation]:
    """Ask whether find_unused_parameters matches the checkpointing, the graph and the optimizers.

    Why it hurts: with reentrant checkpointing, DDP fails with "Expected to mark a variable ready only once"; if each
    backward pass reaches only some parameters, DDP fails without find_unused_parameters.
    Fix: Use `checkpoint(..., use_reentrant=False)`, and find_unused_parameters=True only if parameters stay unused.
    """
    reentrant = _reentrant(script)
    for call, word in _searches(script):
        if script.value(script.argument(call, "static_graph")) is True:
            yield Violation(
                call,
                f"{word} is redundant with static_graph=True",
                fix="Remove `find_unused_parameters=True`.",
                severity=Severity.INFO,
            )
        elif reentrant is not None and not any(True for _ in script.method_calls("_set_static_graph")):
            is_off = left_off(script, reentrant) != ""
            yield Violation(
                call,
                f"{word} conflicts with reentrant checkpointing (line {reentrant.lineno})",
                fix=f"Pass `{_not_reentrant(script, reentrant)}` at line {reentrant.lineno}, or remove `{word}`.",
                severity=Severity.INFO if is_off else Severity.WARNING if _is_asked_for(script, reentrant) else None,
                preview=is_off,
            )
    yield from _parts(script)


def _searches(script: Script) -> Iterator[tuple[ast.Call, str]]:
    kwargs = () if shards_always(script) else _KWARGS
    for call in script.calls(DDP, *kwargs, *_STRATEGIES):
        if script.value(script.argument(call, "find_unused_parameters")) is True:
            yield call, "find_unused_parameters=True"
    for call in script.calls(TRAINER, FABRIC):
        strategy = script.value(script.argument(call, "strategy"))
        if isinstance(strategy, str) and strategy.endswith(_FINDS):
            yield call, f'strategy="{strategy}"'
    for call in script.calls("transformers.TrainingArguments"):
        if script.value(script.argument(call, "ddp_find_unused_parameters")) is True:
            yield call, "ddp_find_unused_parameters=True"


def _not_reentrant(script: Script, call: ast.Call) -> str:
    if script.name(call.func) in _CHECKPOINT:
        return "use_reentrant=False"
    return 'gradient_checkpointing_kwargs={"use_reentrant": False}'


def _reentrant(script: Script) -> ast.Call | None:
    for call in script.calls(*_CHECKPOINT):
        chosen = script.argument(call, "use_reentrant")
        is_reentrant = not script.is_open(call) and (chosen is None or script.value(chosen) is True)
        if is_reentrant and not never_runs(script, call, options=True):
            return call
    for call in (
        *script.method_calls("gradient_checkpointing_enable"),
        *script.calls("transformers.TrainingArguments"),
    ):
        if _is_own_method(script, call):
            continue
        if _is_reentrant_in_transformers(script, call) and not _only_judges(script, call):
            if not never_runs(script, call, options=True):
                return call
    return None


def _is_own_method(script: Script, call: ast.Call) -> bool:
    """Whether a class of the project has the method, and does not checkpoint reentrantly."""
    if script.modules is None or not isinstance(call.func, ast.Attribute):
        return False
    texts = [text for _, text in script.modules.mentioning(f"def {call.func.attr}(")]
    return bool(texts) and not any(re.search(r"use_reentrant[\"']?\s*[=:]\s*True", text) for text in texts)


def _only_judges(script: Script, call: ast.Call) -> bool:
    """Whether the model is in evaluation mode, where nothing is checkpointed: a reference, whose method ``train`` is
    never called."""
    model = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    modes = {
        one.func.attr
        for one in script.method_calls("eval", "train")
        if isinstance(one.func, ast.Attribute) and ast.unparse(one.func.value) == model
    }
    return bool(model) and modes == {"eval"}


def _is_asked_for(script: Script, call: ast.Call) -> bool:
    """``if args.gradient_checkpointing:`` around it: runs without that option have no conflict."""
    branches = (one.test for one in script.around(call) if isinstance(one, ast.If))
    return any(_OPTION.search(ast.unparse(one)) for one in branches)


def _is_reentrant_in_transformers(script: Script, call: ast.Call) -> bool:
    enables = isinstance(call.func, ast.Attribute) and call.func.attr == "gradient_checkpointing_enable"
    if not enables and script.value(script.argument(call, "gradient_checkpointing")) is not True:
        return False
    options = script.argument(call, "gradient_checkpointing_kwargs", 0 if enables else None)
    if isinstance(options, ast.Dict):
        pairs = zip(options.keys, options.values, strict=True)
        return any(
            key is not None and script.value(key) == "use_reentrant" and script.value(value) is True
            for key, value in pairs
        )
    release = script.releases.get("transformers", "") if script.states_release_of("transformers") else ""
    return options is None and not script.is_open(call) and is_older(release, _NOT_REENTRANT_SINCE) is True


def _parts(script: Script) -> Iterator[Violation]:
    """Lightning 2 no longer searches by default: modules with several optimizers fail in their first step."""
    step = next(
        (
            one
            for owner in lightning_modules(script)
            for one in hooks(owner, "training_step")
            if _alternates(script, one)
        ),
        None,
    )
    known = known_lightning(script)
    if step is None or (known.number is not None and is_older(known.number, "2.0") is True):
        return
    for call in script.calls(TRAINER):
        strategy = script.argument(call, "strategy")
        name = script.value(strategy) if strategy is not None else "ddp"
        if name in _PLAIN and trains_on_several(script, call):
            yield Violation(
                call,
                f"Each backward pass of training_step (line {step.lineno}) leaves parameters unused, which strategy "
                f"{name} rejects",
                fix=f'Use `strategy="{name}{_FINDS}"`.',
                severity=Severity.WARNING if known.is_open else None,
                edits=(SetArgument(location_of(call), "strategy", f'"{name}{_FINDS}"'),)
                if not script.is_open(call) and not known.is_open
                else (),
            )


def _alternates(script: Script, step: ast.FunctionDef) -> bool:
    passes = [one for one in script.inside(step, ast.Call) if script.text_of(one.func) == "self.manual_backward"]
    taken = [
        one
        for one in script.inside(step, ast.Assign)
        if isinstance(one.targets[0], (ast.Tuple, ast.List))
        and len(one.targets[0].elts) > 1
        and script.text_of(one.value).startswith("self.optimizers(")
    ]
    return len(passes) > 1 and bool(taken)


_REENTRANT = """\
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def forward(self, x):
        return checkpoint(self.mlp, x)

model = DDP(Net(), device_ids=[local_rank], find_unused_parameters=True)  # !
"""
_STRATEGY = """\
import torch.utils.checkpoint as cp

class Model(L.LightningModule):
    def forward(self, x):
        return cp.checkpoint(self.encoder, x, use_reentrant=True)

trainer = L.Trainer(devices=4, strategy="ddp_find_unused_parameters_true")  # !
"""
_ARGUMENTS = """\
from transformers import TrainingArguments

args = TrainingArguments("out", gradient_checkpointing=True, ddp_find_unused_parameters=True)  # !
"""
_REFERENCE = """\
from accelerate import Accelerator, DistributedDataParallelKwargs

accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])  # !
net = AutoModel.from_pretrained("net")
net.gradient_checkpointing_enable()
"""
_STATIC = """\
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model, find_unused_parameters=True, static_graph=True)  # !
"""
_TWO_OPTIMIZERS = """\
class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        g_loss = self.generator_loss(batch)
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        d_loss = self.discriminator_loss(batch)
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()

trainer = L.Trainer(accelerator="gpu", devices=2, strategy="ddp")  # !
trainer.fit(GAN())
"""
_NOT_REENTRANT = """\
from torch.utils.checkpoint import checkpoint

def forward(block, x):
    return checkpoint(block, x, use_reentrant=False)

model = DDP(Net(), find_unused_parameters=True)
"""
_NO_SEARCH = """\
from torch.utils.checkpoint import checkpoint

def forward(block, x):
    return checkpoint(block, x, use_reentrant=True)

model = DDP(Net(), find_unused_parameters=args.find_unused)
other = DDP(Net(), find_unused_parameters=False)
"""
_SEARCH = """\
from transformers import TrainingArguments

args = TrainingArguments("out", gradient_checkpointing=True, ddp_find_unused_parameters=True)
trainer = L.Trainer(devices=4, strategy="ddp_find_unused_parameters_true")
"""
_ONE_DEVICE = """\
class GAN(L.LightningModule):
    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        self.manual_backward(self.generator_loss(batch))
        self.manual_backward(self.discriminator_loss(batch))

alone = L.Trainer(accelerator="gpu", devices=1)
trainer = L.Trainer(devices=2, strategy="ddp_find_unused_parameters_true")
"""
