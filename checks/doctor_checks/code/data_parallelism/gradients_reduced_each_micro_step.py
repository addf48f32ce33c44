"""CODE032: DDP averages gradients in every accumulation step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.engine.rule import LONGEST_SUMMARY
from doctor.lint.python.loader_calls import target_name
from doctor.lint.python.project.left_defaults import shown_numbers
from doctor.lint.python.project.one_process import never_runs
from doctor.lint.python.project.settings.option_values import values_in_commands
from doctor.lint.python.project.starts.accelerate_jobs import shards_always
from doctor.lint.python.rank_branches import block_of, plain_test
from doctor.lint.python.script import last_name
from doctor.lint.python.training import (
    ACCELERATOR,
    DDP,
    FABRIC,
    FSDP,
    Loop,
    is_test,
    loops,
    trains_on_several,
    unwrapped,
)
from doctor.testing.script_cases import fails, passes
from doctor_checks.code.data_parallelism._past_wrapper import calls_past_wrapper

_SPARES = re.compile(
    r"\bno_sync\b|\bno_backward_sync\b|\brequire_backward_grad_sync\b|\baccumulate\(|set_requires_gradient_sync|set_gradient_accumulation_boundary|\bmaybe_no_sync\b"
)
_STEPS = frozenset({"step"})


@rule(
    id="CODE032",
    severity=Severity.WARNING,
    reads=Script,
    foreshadows=("RUN013",),
    mentions=("DistributedDataParallel", "Accelerator", "Fabric"),
    cases=lambda: (
        fails(
            "every fourth step",
            _script(
                "loss.backward()  # !\n"
                "        if (step + 1) % 4 == 0:\n"
                "            optimizer.step()\n"
                "            optimizer.zero_grad()"
            ),
        ),
        fails(
            "with a gradient scaler",
            _script(
                "scaler.scale(loss / accumulation).backward()  # !\n"
                "        if step % accumulation == 0 or step + 1 == len(loader):\n"
                "            scaler.step(optimizer)\n"
                "            scaler.update()"
            ),
        ),
        fails("with accelerate", _ACCELERATE),
        passes(
            "an accelerator that prepares the loader alone",
            _ACCELERATE.replace(
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                "loader = accelerator.prepare(loader)",
            ).replace("  # !", ""),
        ),
        fails(
            "an accelerator that other code may prepare the model with",
            _ACCELERATE.replace(
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                "loader = accelerator.prepare(loader)\nmodel = wrap(model, accelerator)",
            ),
        ),
        fails("a loop over micro-batches", _MICRO),
        passes(
            "forward passes that bypass the wrapper", _MICRO.replace("model(", "model.module(").replace("  # !", "")
        ),
        fails(
            "one of the forward passes of a step bypasses it",
            _MICRO.replace("/ accum", "+ model.module.loss(x) / accum"),
        ),
        fails(
            "a model that nothing wraps is called by its inner module",
            _MICRO.replace("/ accum", "+ judge.module(x) / accum"),
        ),
        fails(
            "the forward passes of one of two wrapped models bypass it",
            _MICRO.replace("loss = model(", "loss = judge(model.module(")
            .replace(")) /", "))) /")
            .replace("optimizer =", "judge = DDP(Judge())\noptimizer ="),
        ),
        passes(
            "not yet averaged",
            _script(
                "last = (step + 1) % 4 == 0\n"
                "        with contextlib.nullcontext() if last else model.no_sync():\n"
                "            loss.backward()\n"
                "        if last:\n"
                "            optimizer.step()"
            ),
        ),
        passes(
            "a step after each",
            _script("loss.backward()\n        optimizer.step()\n        if step % 100 == 0:\n            print(loss)"),
        ),
        passes(
            "a schedule that goes on now and then",
            _script(
                "loss.backward()\n        optimizer.step()\n        if step % 100 == 0:\n            scheduler.step()"
            ),
        ),
        passes(
            "accelerate does it",
            _ACCELERATE.replace(
                "accelerator.backward(loss)  # !",
                "with accelerator.accumulate(model):\n        accelerator.backward(loss)",
            ),
        ),
        fails(
            "every eighth step, by a variable",
            _script(
                "last = (step + 1) % 8 == 0\n"
                "        with contextlib.nullcontext():\n"
                "            loss.backward()  # !\n"
                "        if last:\n"
                "            optimizer.step()"
            ),
        ),
        fails(
            "the others go on with the next micro-step",
            _script(
                "loss.backward()  # !\n        if (step + 1) % 8 != 0:\n            continue\n        optimizer.step()"
            ),
        ),
        fails(
            "a variable for the rounds without a step",
            _script(
                "waits = step % 8 != 7\n"
                "        loss.backward()  # !\n"
                "        if not waits:\n"
                "            optimizer.step()"
            ),
        ),
        passes(
            "batches that are left out have no backward pass either",
            _script(
                "if len(x) % 8 != 0:\n            continue\n        loss.backward()\n        optimizer.step()",
            ),
        ),
        passes(
            "the backward pass is in the branch of the step",
            _script("if len(x) % 8 == 0:\n            loss.backward()\n            optimizer.step()"),
        ),
        passes("a context manager of the project decides", _CONTEXT),
        passes(
            "a loop that tries again until a backward pass succeeds",
            _MICRO.replace("loss.backward()  # !", "loss.backward()\n        break"),
        ),
        passes(
            "a program that needs an engine of DeepSpeed",
            _ACCELERATE.replace("accelerator = Accelerator()", _NEEDS_ENGINE).replace("# !", ""),
        ),
        passes(
            "a program that asserts such an engine",
            _ACCELERATE.replace(
                "accelerator = Accelerator()",
                "accelerator = Accelerator()\nassert accelerator.distributed_type == DistributedType.DEEPSPEED",
            ).replace("# !", ""),
        ),
        passes(
            "a program that asks for one by a variable",
            'import os\nos.environ["ACCELERATE_USE_DEEPSPEED"] = "true"\n' + _ACCELERATE.replace("# !", ""),
        ),
        fails(
            "a program that asks whether it has one",
            _NEEDS_ENGINE.replace("stage =", "if accelerator.distributed_type == 'DEEPSPEED':\n    stage =")
            + _ACCELERATE.partition("\n")[2],
        ),
        passes("FSDP, where that would take memory", _SHARDED),
        passes("FSDP with accelerate", _ACCELERATE.replace("Accelerator()", "Accelerator(fsdp_plugin=plugin)")),
        passes(
            "one process",
            _script("loss.backward()\n        if (step + 1) % 4 == 0:\n            optimizer.step()").replace(
                "DDP(", "("
            ),
        ),
    ),
)
def gradients_reduced_each_micro_step(script: Script) -> Iterator[Violation]:
    """Ask whether ranks average gradients in every gradient accumulation step.

    Why it hurts: DDP averages the gradients in every backward pass, although only the last pass before an optimizer
    step needs it. On slow links, this communication can take most of the step time.
    Fix: Run all but the last forward and backward pass of a step under `with model.no_sync():`.
    """
    fabrics = (call for call in script.calls(FABRIC) if trains_on_several(script, call))
    wraps = (call for call in script.calls(DDP, ACCELERATOR) if not _is_second_choice(script, call))
    wrapper = next(wraps, None) or next(fabrics, None)
    if wrapper is None or is_test(script) or _SPARES.search(script.text) or _shards(script, wrapper):
        return
    if _prepares_no_model(script, wrapper):
        return
    for loop in loops(script):
        if _is_past_wrappers(script, loop):
            continue
        backward = _backward(script, loop)
        step = _accumulated(script, loop, backward) if backward is not None else None
        if backward is not None and step is not None and not _is_decided_by_context(script, loop, backward, wrapper):
            is_off = _is_off_by_default(script, loop)
            summary = f"Gradients are averaged in each micro-step, but used only {step}"
            line = summary.rpartition("(line ")[2].removesuffix(")")
            if len(summary) > LONGEST_SUMMARY and line.isdigit():
                summary = f"Gradients are averaged in each micro-step, but used only in steps that line {line} selects"
            yield Violation(
                backward,
                summary,
                severity=Severity.INFO if is_off else None,
                preview=is_off,
                evidence=(("wrapped_at_line", wrapper.lineno),),
                fix=_fix(script, wrapper),
            )


def _is_past_wrappers(script: Script, loop: Loop) -> bool:
    """Whether the forward passes of a loop bypass every wrapper of a file, so that no backward pass averages anything,
    as CODE033 says."""
    if next(script.calls(ACCELERATOR), None) is not None:
        return False  # the models that it wraps are not known
    inside = set(script.inside(loop.node, ast.Call))
    past = {words for call, words in calls_past_wrapper(script) if call in inside}
    statements = [script.parent(wrap) for wrap in script.calls(DDP)]
    wrappers = {ast.unparse(target) for one in statements if isinstance(one, ast.Assign) for target in one.targets}
    return bool(wrappers) and all(isinstance(one, ast.Assign) for one in statements) and wrappers <= past


def _is_second_choice(script: Script, wrapper: ast.Call) -> bool:
    """Whether the opposite branch wraps the model with FSDP, and an option that no command gives leads to this one:
    ``if args.no_fsdp: DDP(model) else: FSDP(model)``."""
    inner: ast.AST = wrapper
    for outer in script.around(wrapper):
        if isinstance(outer, ast.If) and inner is not outer.test:
            is_in_body = inner in outer.body
            others = outer.orelse if is_in_body else outer.body
            shards = any(script.name(one.func) in FSDP for part in others for one in script.inside(part, ast.Call))
            is_denied = isinstance(outer.test, ast.UnaryOp) and isinstance(outer.test.op, ast.Not)
            option = outer.test.operand if isinstance(outer.test, ast.UnaryOp) and is_denied else outer.test
            values = values_in_commands(script, option) if shards else None
            if values is not None and not any(bool(one) is (is_in_body is not is_denied) for one in values):
                return True
        inner = outer
    return False


_FIXES = {
    ACCELERATOR: "Run each micro-step under `with accelerator.accumulate(model):`, and pass the number of micro-steps "
    "as `gradient_accumulation_steps` to Accelerator.",
    FABRIC: "Use `with fabric.no_backward_sync(model, enabled=not last):` around the forward and backward pass.",
}


_FIX_OF_STATIC_GRAPH = (
    "Run all but the last forward and backward pass of a step under `with model.no_sync():`, except the very first of "
    "the run, where no_sync() raises an internal error with static_graph=True."
)
"""expect_autograd_hooks_ INTERNAL ASSERT FAILED (torch/csrc/distributed/c10d/reducer.cpp of 2.13)."""


def _fix(script: Script, wrapper: ast.Call) -> str:
    """Empty where that of the rule applies."""
    if script.value(script.argument(wrapper, "static_graph")) is True:
        return _FIX_OF_STATIC_GRAPH
    return _FIXES.get(script.name(wrapper.func), "")


def _is_off_by_default(script: Script, loop: Loop) -> bool:
    """Whether the number of accumulation steps is 1 unless something else asks for more: then no reduction is
    unnecessary by default."""
    return any(
        _is_one_by_default(script, loop, *one) or _spares_little(script, *one) for one in _counts_of(script, loop)
    )


def _spares_little(script: Script, steps: ast.expr, _where: ast.AST) -> bool:
    """Whether adapters are trained, and no start that the project shows has more than two micro-steps: one reduction of
    few gradients for each step of the optimizer."""
    if next(script.calls("peft.get_peft_model"), None) is None or not _COUNTS_STEPS.search(ast.unparse(steps)):
        return False
    return all(isinstance(one, (int, float)) and one <= 2 for one in shown_numbers(script, steps))


def _counts_of(script: Script, loop: Loop) -> Iterator[tuple[ast.expr, ast.AST]]:
    """The numbers that may be those of the micro-steps, and where they count: the divisor of the step, and how often a
    loop over micro-batches runs."""
    for part in script.inside(loop.node, ast.BinOp):
        if isinstance(part.op, ast.Mod):
            yield _at_least_one(script, part.right), part
    counted = unwrapped(loop.node.iter)
    if isinstance(counted, ast.Call) and last_name(counted.func) == "range" and len(counted.args) == 1:
        yield _at_least_one(script, counted.args[0]), loop.node


def _is_one_by_default(script: Script, loop: Loop, steps: ast.expr, where: ast.AST) -> bool:
    if isinstance(steps, ast.Constant):
        return False
    decides = isinstance(where, ast.BinOp) and _decides_step(script, loop, where)
    is_count = decides or _COUNTS_STEPS.search(ast.unparse(steps)) is not None
    return is_count and (1 in map(script.value, script.values_of(steps)) or shown_numbers(script, steps) == {1})


def _at_least_one(script: Script, number: ast.expr) -> ast.expr:
    """What a number is unless it is below 1: ``steps`` in ``max(steps, 1)``."""
    if not isinstance(number, ast.Call) or last_name(number.func) != "max" or len(number.args) != 2:
        return number
    others = [one for one in number.args if script.value(one) != 1]
    return others[0] if len(others) == 1 else number


def _decides_step(script: Script, loop: Loop, part: ast.BinOp) -> bool:
    """Whether a remainder is in the condition of a step of the optimizer."""
    branch = script.nearest(part, ast.If)
    if branch is None or branch not in set(script.inside(loop.node, ast.If)):
        return False
    is_asked = any(one is part for one in ast.walk(branch.test))
    return is_asked and any(_is_optimizer_step(call) for one in branch.body for call in script.inside(one, ast.Call))


_COUNTS_STEPS = re.compile(r"accum|grad_?cum|update_?(?:freq|every|interval)|iter_?size", re.IGNORECASE)
"""Options for the number of micro-steps."""


def _shards(script: Script, wrapper: ast.Call) -> bool:
    """A Fabric or an Accelerator with FSDP, where skipping the reduction keeps the whole gradients on every rank, or an
    engine of DeepSpeed, which reduces in its own steps."""
    is_accelerator = script.name(wrapper.func) == ACCELERATOR
    if is_accelerator and (script.argument(wrapper, "fsdp_plugin") is not None or shards_always(script)):
        return True
    strategy = script.argument(wrapper, "strategy") if script.name(wrapper.func) == FABRIC else None
    values = script.values_of(strategy) if strategy is not None else ()
    return any("fsdp" in ast.unparse(one).lower() for one in values)


_OF_LOADERS = re.compile(r"loader|data_?set|sampler|sched", re.IGNORECASE)


def _prepares_no_model(script: Script, wrapper: ast.Call) -> bool:
    """Whether the Accelerators of a file prepare loaders alone, so that its model has no wrapper that reduces: they are
    given to no other code, and the base classes of the project prepare nothing."""
    if script.name(wrapper.func) != ACCELERATOR:
        return False
    prepared = [one for call in script.method_calls("prepare", "prepare_model") for one in (*call.args, *call.keywords)]
    if not prepared or not all(isinstance(one, ast.expr) and _OF_LOADERS.search(last_name(one)) for one in prepared):
        return False
    given = {last_name(one) for call in script.all(ast.Call) for one in (*call.args, *(w.value for w in call.keywords))}
    bases = {last_name(base) for owner in script.all(ast.ClassDef) for base in owner.bases}
    others = script.modules.mentioning(".prepare(") if script.modules is not None else ()
    kept = {last_name(target) for one in script.all(ast.Assign) if one.value is wrapper for target in one.targets}
    return given.isdisjoint(kept) and not any(
        shown != script.path and f"class {base}" in text for base in bases for shown, text in others
    )


def _is_decided_by_context(script: Script, loop: Loop, backward: ast.Call, wrapper: ast.Call) -> bool:
    """Whether a context manager of the project, which gets the model, may suspend the reduction."""
    model = target_name(script, wrapper)
    for outer in script.around(backward):
        if outer is loop.node:
            return False
        contexts = [one.context_expr for one in outer.items] if isinstance(outer, ast.With) else []
        if any(_may_suspend(script, one, model) for one in contexts):
            return True
    return False


def _may_suspend(script: Script, context: ast.expr, model: str) -> bool:
    if not isinstance(context, ast.Call):
        return not script.name(context)
    is_known = script.name(context.func).startswith(("torch.", "contextlib.", "accelerate.", "lightning."))
    gets_model = model in {last_name(one) for one in context.args}
    return not is_known and (gets_model or "sync" in last_name(context))


def _backward(script: Script, loop: Loop) -> ast.Call | None:
    """The backward pass of a loop; of several, the first that may run."""
    found = list(_backwards(script, loop))
    return next((one for one in found if not never_runs(script, one, options=True)), next(iter(found), None))


def _backwards(script: Script, loop: Loop) -> Iterator[ast.Call]:
    for call in script.inside(loop.node, ast.Call):
        # An engine of DeepSpeed decides itself when to average.
        is_engine = "engine" in script.text_of(call.func)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not is_engine:
            between = [one for one in script.around(call) if one is not loop.node and loop.node in script.around(one)]
            if not any(isinstance(one, (ast.For, ast.While)) for one in between) and not _is_last(script, call, loop):
                yield call


def _is_last(script: Script, backward: ast.Call, loop: Loop) -> bool:
    """Whether a loop ends after a backward pass: it tries again until one succeeds."""
    inner: ast.AST = backward
    for outer in script.around(backward):
        block = block_of(outer, inner)
        after = block[block.index(inner) + 1 :] if isinstance(inner, ast.stmt) and block else []
        if any(isinstance(one, (ast.Break, ast.Return)) for one in after):
            return True
        if outer is loop.node:
            return False
        inner = outer
    return False


def _accumulated(script: Script, loop: Loop, backward: ast.Call) -> str | None:
    """The iterations in which the optimizer steps, in words, unless it is all of them."""
    steps = [call for call in script.inside(loop.node, ast.Call) if _is_optimizer_step(call)]
    if not steps:
        return _after(script, loop)
    tests = [_rounds(script, call, backward) or _skipped(script, loop, call, backward) for call in steps]
    return tests[0] if tests[0] is not None and None not in tests else None


def _is_optimizer_step(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _STEPS:
        return False
    owner = call.func.value
    name = last_name(owner).lower()
    return "opt" in name or ("scaler" in name and bool(call.args))


def _rounds(script: Script, call: ast.Call, backward: ast.Call) -> str | None:
    inner: ast.AST = call
    shared = set(script.around(backward))
    for outer in script.around(call):
        if outer in shared:
            return None
        if isinstance(outer, ast.If) and inner in outer.body and _is_every_nth(script, outer.test):
            return f"if {script.text_of(outer.test, 40)} (line {outer.lineno})"
        inner = outer
    return None


def _skipped(script: Script, loop: Loop, call: ast.Call, backward: ast.Call) -> str | None:
    """The round that a statement between backward pass and step leaves: ``if not last: continue``. A statement above
    both leaves out batches, whose gradients nothing averages."""
    for statement in loop.node.body:
        if any(one is call for one in script.inside(statement, ast.Call)):
            return None
        is_between = statement.lineno > backward.lineno
        if is_between and isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue):
            test = statement.test.operand if isinstance(statement.test, ast.UnaryOp) else statement.test
            if _is_every_nth(script, test):
                denied = plain_test(f"not ({ast.unparse(statement.test)})")
                short = denied if len(denied) <= 40 else f"{denied[:39]}…"
                return f"if {short} (line {statement.lineno})"
    return None


def _is_every_nth(script: Script, test: ast.expr) -> bool:
    asked = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    values = script.values_of(asked) if isinstance(asked, ast.Name) else (asked,)
    for part in (part for value in values for part in ast.walk(value)):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            return script.value(part.right) != 1
    return False


def _after(script: Script, loop: Loop) -> str | None:
    if "micro" not in script.text_of(loop.node.iter).lower() and "accum" not in script.text_of(loop.node.iter).lower():
        return None
    parent = script.parent(loop.node)
    body = getattr(parent, "body", [])
    behind = body[body.index(loop.node) + 1 :] if loop.node in body else []
    steps = (call for one in behind for call in script.inside(one, ast.Call) if _is_optimizer_step(call))
    step = next(steps, None)
    return f"at line {step.lineno}" if step is not None else None


def _script(body: str) -> str:
    return f"""\
import contextlib
import torch

model, optimizer, loader, scaler, scheduler, accumulation = build()
model = DDP(model)
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        loss = model(x, y)
        {body}
"""


_ACCELERATE = """\
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    loss = model(**batch).loss / args.gradient_accumulation_steps
    accelerator.backward(loss)  # !
    if step % args.gradient_accumulation_steps == 0 or step == len(loader) - 1:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""
_NEEDS_ENGINE = "accelerator = Accelerator()\nstage = accelerator.state.deepspeed_plugin.zero_stage\n"
_MICRO = """\
model = torch.nn.parallel.DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    optimizer.zero_grad()
    for micro_step in range(accumulation_steps):
        loss = model(next(batches)) / accumulation_steps
        loss.backward()  # !
    optimizer.step()
"""
_CONTEXT: str = _MICRO.replace("# !", "").replace(
    "loss = model(next(batches)) / accumulation_steps\n        loss.backward()",
    "with tools.reduced_if(model, micro_step == accumulation_steps - 1):\n"
    "            loss = model(next(batches)) / accumulation_steps\n"
    "            loss.backward()",
)
_SHARDED = """\
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy

strategy = FSDPStrategy(auto_wrap_policy=policy)
fabric = Fabric(devices=4, strategy=strategy, precision="bf16-true")
for step, batch in enumerate(loader):
    loss = model(batch)
    fabric.backward(loss)
    if step % 4 == 0:
        optimizer.step()
"""
