"""CODE016: a rank skips a step or leaves the loop for a reason that is local to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.divergent_conditions import disagreement
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.rank_losses import own_loops
from doctor.lint.python.script import last_name, step_at
from doctor.lint.python.swallowed_errors import swallows_error
from doctor.lint.python.training import gradients_reduced, hooks, lightning_modules, several_ranks, unwrapped
from doctor.testing.script_cases import fails, passes

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_Leaving = ast.Continue | ast.Break | ast.Return


@rule(
    id="CODE016",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("backward", "distributed", "all_reduce", "all_gather", "training_step"),
    foreshadows=("DATA001", "RUN001"),
    cases=lambda: (
        fails("a bad loss skips the step", _SKIPS),
        fails("an empty batch skips the step", _NO_BATCH),
        passes("an empty batch, instead of which the rank draws another one", _NEXT_BATCH),
        fails(
            "an empty batch that counts as a step",
            _NEXT_BATCH.replace("        if step >=", "        step += 1\n        if step >=").replace(
                "continue", "continue  # !"
            ),
        ),
        fails(
            "an empty batch of data that end",
            _NEXT_BATCH.replace("while True:", "for _ in range(9):").replace("continue", "continue  # !"),
        ),
        fails("a rank out of memory goes on with the next batch", _MEMORY),
        fails("whatever fails is passed over", _PASSED_OVER),
        fails("the time is up on one rank", _CLOCK),
        fails("no loss from training_step", _LIGHTNING),
        fails("early stopping on the rank's own loss", _STOPPER),
        fails("a counter of epochs without progress", _COUNTED),
        fails("a low loss of a part of the data", _LOW),
        fails("a loss that is too high", _SPIKE),
        fails("nothing is labeled in the batch", _UNLABELED),
        fails("early stopping with Fabric", _FABRIC),
        passes("the mean over the ranks of Fabric", _FABRIC.replace("return total", "return fabric.all_reduce(total)")),
        passes("one process ends its loop", _ONE_ENDS),
        passes("an error that goes on if there are other ranks", _RAISED_FOR_SEVERAL),
        fails("in methods, with a return", _METHODS),
        passes("early stopping on the mean over ranks", _STOPPER_AGREED),
        passes("early stopping on data that all ranks have", _STOPPER_SHARED_DATA),
        passes("fewer passes are allowed", _JOINED),
        fails(
            "fewer passes",
            _JOINED.replace("    with model.join():\n    ", "").replace("continue", "continue  # !"),
        ),
        passes("the number of steps", _STEPS_COUNTED),
        passes("the ranks agree to skip", _AGREED),
        passes("scores that are reduced in place, and a target of the settings", _HISTORY),
        fails(
            "scores of one rank",
            _HISTORY.replace("dist.all_reduce(score)", "pass").replace("break", "break  # !"),
        ),
        passes("values of a list against a target of the settings", _HISTORY_OF_TARGETS),
        passes("a loss of zero takes part", _ZERO),
        passes("every rank stops at the same step", _STEPS),
        passes("a loop without collectives", _PLAIN),
        passes("the error goes on", _RAISED),
        passes("the handler runs the step another way", _AGAIN),
        fails("only a collective is tried", _GATHERED_STATUS),
        passes("nothing after the last collective is skipped", _AFTER),
    ),
)
def loop_left_on_data(script: Script) -> Iterator[Violation]:
    """Ask whether a rank can skip a step, or leave the loop, because of its own data, clock or memory.

    Why it hurts: the other ranks wait in the backward pass of the step that one rank skipped. The job hangs, or
    gradients of different steps are averaged.
    Fix: Reduce a flag over all ranks (`dist.all_reduce(flag, op=dist.ReduceOp.MAX)`), and skip the step on all of them.
    """
    synchronizing = {one.call: one.word for one in collectives_of(script).all() if one.word not in _NOT_IN_STEPS}
    synchronizing.update(dict.fromkeys(gradients_reduced(script), "backward"))
    leaving: list[_Leaving] = [*script.all(ast.Continue), *script.all(ast.Break), *script.all(ast.Return)]
    for statement in leaving:
        if found := _left(script, statement, synchronizing):
            yield found
    for tried in script.all(ast.Try):
        yield from _swallowed(script, tried, synchronizing)
    if several_ranks(script) is not None:
        yield from _without_loss(script)


_REASONS = {
    "data": "its own data",
    "time": "its own clock",
    "signal": "a signal it received",
    "error": "its own error",
    "loss": "its own loss",
}
_NOT_IN_STEPS = frozenset({"prepare", "setup", "init_process_group", "new_group", "load", "load_state", "full_tensor"})


def _left(script: Script, statement: _Leaving, calls: dict[ast.Call, str]) -> Violation | None:
    left = (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef)
    loop = next((one for one in script.around(statement) if isinstance(one, left)), None)
    if not isinstance(loop, _LOOPS):
        return None
    after = statement.lineno if isinstance(statement, ast.Continue) else 0
    missed = [call for call in script.inside(loop, ast.Call) if call in calls and call.lineno > after]
    if not missed or rank_condition(script, statement) is not None or runs_alone(script, statement):
        return None
    asked = _asked(script, statement, loop)
    if asked is None:
        return None
    test, why = asked
    if isinstance(statement, ast.Return) and why != "loss":
        return None
    branch = script.parent(test)
    if any(one is branch for call in missed for one in script.around(call)):
        return None  # A collective in the branch that leaves: ranks may agree there.
    word = "skips the rest of the step" if isinstance(statement, ast.Continue) else "ends the loop"
    found = _hit(script, statement, f"`{script.text_of(test, 45)}` (line {test.lineno})", word, missed[0], why)
    if not isinstance(statement, ast.Continue) and _has_spread(script, branch, test, loop, calls):
        return replace(found, severity=Severity.WARNING, effect=_LOST)
    return found


_NOT_FINITE = re.compile(r"\bis_?(?:nan|inf|finite)\b|\bisnan\b|\bnan\b", re.IGNORECASE)
_LOST = (
    "The backward pass above has spread the NaN to the weights of all ranks, so the run is lost: the "
    "other ranks wait in the next step until the timeout instead of ending."
)


def _has_spread(
    script: Script, branch: ast.AST | None, test: ast.expr, loop: ast.AST | None, calls: dict[ast.Call, str]
) -> bool:
    """Whether a test for NaN is below the backward pass of its own step, which has averaged the gradients. A gradient
    scaler would have skipped the step on all ranks."""
    if not isinstance(loop, _LOOPS) or _NOT_FINITE.search(ast.unparse(test)) is None:
        return False
    if not isinstance(branch, ast.stmt) or branch not in loop.body or "scale" in ast.unparse(loop):
        return False
    above = loop.body[: loop.body.index(branch)]
    plain = (one.value for one in above if isinstance(one, ast.Expr))
    return any(isinstance(one, ast.Call) and calls.get(one) == "backward" for one in plain)


def _asked(script: Script, statement: ast.stmt, loop: ast.AST | None) -> tuple[ast.expr, str] | None:
    """The test between the statement and its loop, and what it depends on."""
    inner: ast.AST = statement
    for outer in script.around(statement):
        if outer is loop:
            return None
        if isinstance(outer, ast.If) and inner in outer.body:
            why = disagreement(script, outer.test)
            if not why and not _draws_again(script, statement, loop):
                why = _no_batch(loop, outer.test)
            if not why and not isinstance(statement, ast.Continue) and own_loops(script, outer.test):
                why = "loss"
            if why:
                return outer.test, why
        inner = outer
    return None


_LOADER = re.compile(r"loader|(?:^|_)(?:dl|batches|iter|iterator)$", re.IGNORECASE)


def _no_batch(loop: ast.AST | None, test: ast.expr) -> str:
    """``if batch is None``, ``if len(batch["x"]) == 0``: a test of the loop's own batch."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)) or not _LOADER.search(ast.unparse(unwrapped(loop.iter))):
        return ""
    own = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
    for one in ast.walk(test):
        if not isinstance(one, ast.Compare) or not isinstance(one.comparators[0], ast.Constant):
            continue
        value, left = one.comparators[0].value, one.left
        is_none = value is None and isinstance(one.ops[0], (ast.Is, ast.Eq)) and isinstance(left, ast.Name)
        is_empty = value == 0 and value is not False and isinstance(left, ast.Call) and last_name(left) == "len"
        read = {part.id for part in ast.walk(left) if isinstance(part, ast.Name)}
        if (is_none or (is_empty and isinstance(one.ops[0], ast.Eq))) and read & own:
            return "data"
    return ""


def _draws_again(script: Script, statement: ast.stmt, loop: ast.AST | None) -> bool:
    """Whether a rank without a batch draws the next one of an iterator that has no end, before anything is computed or
    counted in the round: its steps are as many as those of the others."""
    if not isinstance(statement, ast.Continue) or not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return False
    if not _has_no_end(script, loop.iter) or not any(script.inside(loop, ast.Break)):
        return False
    above = loop.body[: next((at for at, one in enumerate(loop.body) if one in script.around(statement)), 0)]
    kinds = (ast.If, ast.Break, ast.Return, ast.Compare, ast.Name, ast.Attribute, ast.Constant)
    plain = (*kinds, ast.cmpop, ast.expr_context, ast.boolop, ast.BoolOp, ast.unaryop, ast.UnaryOp)
    return all(isinstance(part, plain) for one in above for part in ast.walk(one))


def _has_no_end(script: Script, drawn: ast.Call) -> bool:
    """``itertools.cycle(loader)``, or a generator of the project that yields in ``while True:``."""
    if script.name(drawn.func) == "itertools.cycle":
        return True
    function = script.definition(drawn.func)
    if function is not None:
        return any(_is_endless(one) for one in ast.walk(function))
    name = last_name(drawn.func)
    texts = script.modules.mentioning(f"def {name}(") if script.modules is not None and name else ()
    found = [
        one
        for _, text in texts
        for one in ast.walk(_tree_of(text))
        if isinstance(one, ast.FunctionDef) and one.name == name
    ]
    return bool(found) and all(any(_is_endless(part) for part in ast.walk(one)) for one in found)


def _is_endless(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.While)
        and isinstance(node.test, ast.Constant)
        and bool(node.test.value)
        and any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(node))
        and not any(isinstance(one, (ast.Break, ast.Return)) for one in ast.walk(node))
    )


def _tree_of(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _swallowed(script: Script, tried: ast.Try, calls: dict[ast.Call, str]) -> Iterator[Violation]:
    """A step of a loop whose error is caught and ignored."""
    loop = next((one for one in script.around(tried) if isinstance(one, (*_LOOPS, ast.FunctionDef))), None)
    if not isinstance(loop, _LOOPS):
        return
    missed = [call for part in tried.body for call in script.inside(part, ast.Call) if call in calls]
    for handler in tried.handlers if missed else ():
        if swallows_error(script, handler, loop) and not _runs_again(script, handler, missed):
            caught = (
                f"`{'except ' + script.text_of(handler.type) if handler.type else 'except'}` (line {handler.lineno})"
            )
            found = _hit(script, handler, caught, "continues with the next step", missed[0], "error")
            if _only_saves(missed) or _only_exchanges(tried, missed):
                yield replace(found, severity=Severity.INFO, preview=True)
            else:
                yield replace(found, severity=Severity.WARNING)  # ranks part only if one of them has an error


def _only_saves(missed: list[ast.Call]) -> bool:
    """Whether nothing but a checkpoint is tried: no step is lost, and the ranks part only if the file system fails for
    one of them."""
    words = {last_name(call.func) for call in missed}
    return any("save" in one for one in words) and all("save" in one or one in _AROUND_SAVES for one in words)


def _only_exchanges(tried: ast.Try, missed: list[ast.Call]) -> bool:
    """Whether nothing is tried but collectives, which seldom fail on a single rank."""
    calls = [one.value for one in tried.body if isinstance(one, (ast.Expr, ast.Assign))]
    return len(calls) == len(tried.body) and all(one in missed and last_name(one) not in _OF_A_STEP for one in calls)


_OF_A_STEP = frozenset({"backward", "step"})
_AROUND_SAVES = frozenset({"barrier", "wait_for_everyone", "state_dict", "get_state_dict", "get_model_state_dict"})


def _runs_again(script: Script, handler: ast.ExceptHandler, missed: list[ast.Call]) -> bool:
    """Whether the handler calls what failed, or fails itself: ``except: loss.mean().backward()``."""
    words = {last_name(call.func) for call in missed}
    return any(last_name(call.func) in words for part in handler.body for call in script.inside(part, ast.Call))


def _without_loss(script: Script) -> Iterator[Violation]:
    for owner in lightning_modules(script):
        for step in hooks(owner, "training_step"):
            for left in script.inside(step, ast.Return):
                if left.value is not None and script.value(left.value) is not None:
                    continue
                branch = next((one for one in script.around(left) if isinstance(one, ast.If)), None)
                if branch is not None and left in branch.body and disagreement(script, branch.test):
                    yield Violation(
                        left,
                        f"training_step returns no loss if `{script.text_of(branch.test, 40)}` (line {branch.lineno}), "
                        "which depends on local data",
                        evidence=(("condition", script.text_of(branch.test)), ("line_of_condition", branch.lineno)),
                        confidence=0.85,
                    )


def _hit(script: Script, at: ast.AST, cause: str, does: str, missed: ast.Call, why: str) -> Violation:
    own = _REASONS[why]
    return Violation(
        at,
        f"A rank {does} {'after' if why == 'error' else 'based on'} {own}: {cause}",
        severity=Severity.WARNING if why == "signal" else None,
        fix=_FIXES.get(why, ""),
        evidence=(("condition", cause.partition("`")[2].partition("`")[0]), ("waits_at_line", missed.lineno)),
        confidence=0.85,
        flow=(
            step_at(script, at, f"{cause}: a rank {does} because of {own}"),
            step_at(script, missed, "waits for all ranks"),
        ),
    )


_GATHERED_STATUS = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        model(batch).sum().backward()
        try:
            dist.gather_object(status, everyone, dst=0)
        except RuntimeError as error:  # !
            print(error)
        optimizer.step()
"""
_REDUCE_FLAG = (
    "Reduce the decision over all ranks (`dist.all_reduce(flag, op=dist.ReduceOp.MAX)`), and leave the loop on all of "
    "them."
)
_FIXES = {
    "loss": "Average the loss over all ranks (`dist.all_reduce(loss, op=dist.ReduceOp.AVG)`) before comparing it.",
    "error": "Let the error end the rank, so that the launcher stops the others.",
    "time": _REDUCE_FLAG,
    "signal": _REDUCE_FLAG,
}

_SKIPS = """\
import math

def train(net, loader, optimizer, device):
    model = DDP(net.to(device), device_ids=[device])
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print("skipping a batch")
            continue  # !
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
_JOINED = """\
def train_epoch(model, loader, optimizer):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if loss.item() > 100:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def main(net, loader, optimizer, device):
    model = DDP(net.to(device), device_ids=[device])
    with model.join():
        train_epoch(model, loader, optimizer)
"""
_NO_BATCH = """\
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(build(), make_optimizer(), make_loader())
for step, batch in enumerate(loader):
    if batch is None:
        continue  # !
    accelerator.backward(model(batch))
    optimizer.step()
"""
_NEXT_BATCH = """\
def endless(loader):
    while True:
        yield from loader

def train(net, loader, optimizer, steps):
    model, step = DDP(net), 0
    for batch in endless(loader):
        if step >= steps:
            break
        if batch is None:
            continue
        model(batch).mean().backward()
        optimizer.step()
        step += 1
"""
_MEMORY = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        try:
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
        except RuntimeError as error:  # !
            if "out of memory" in str(error):
                torch.cuda.empty_cache()
                optimizer.zero_grad()
            else:
                raise
"""
_PASSED_OVER = """\
def main(accelerator: Accelerator, model, loader):
    for batch in loader:
        try:
            accelerator.backward(model(batch))
        except Exception as error:  # !
            print("skipped", error)
            continue
"""
_AGAIN = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        loss = model(batch)
        try:
            loss.backward()
        except RuntimeError:
            loss.mean().backward()
        optimizer.step()
"""
_CLOCK = """\
import torch.distributed as dist

def train(net, loader, optimizer, budget):
    model = DDP(net)
    began = time.monotonic()
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        if time.monotonic() - began > budget:
            break  # !
"""
_LIGHTNING = """\
class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        if torch.isnan(loss):
            return None  # !
        return loss

trainer = L.Trainer(devices=4, strategy="ddp")
"""
_SPIKE = """\
import torch.nn.functional as F

model = DDP(build())
for step, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    if step > 100 and loss.item() > 9:
        continue  # !
    loss.backward()
"""
_ONE_ENDS = """\
import torch.distributed as dist

def generate(model, tokens, world_size):
    for _ in range(100):
        tokens, reached = next_token(model, tokens)
        reached_mask = reached == 0
        if world_size == 1:
            if reached_mask.all():
                break
        else:
            done = reached_mask.all().int()
            dist.all_reduce(done)
            if done == world_size:
                break
"""
_UNLABELED = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for image, target in loader:
        valid = target != 255
        if valid.sum() == 0:
            continue  # !
        criterion(model(image)[valid], target[valid]).backward()
        optimizer.step()
"""
_FABRIC = """\
from lightning.fabric import Fabric

def evaluate(fabric, model, batches):
    total = 0.0
    for x, y in batches:
        total += criterion(model(x), y).item()
    return total

def main():
    fabric = Fabric(devices=4, strategy="ddp")
    model, optimizer = fabric.setup(*build())
    train, val = fabric.setup_dataloaders(*make_loaders())
    best, waited = 9.0, 0
    for epoch in range(50):
        for x, y in train:
            fabric.backward(criterion(model(x), y))
            optimizer.step()
        loss = evaluate(fabric, model, val)
        waited = 0 if loss < best else waited + 1
        best = min(best, loss)
        if waited > 3:
            break  # !
"""
_RAISED_FOR_SEVERAL = """\
def train(net, loader, optimizer):
    model = DDP(net) if dist.is_initialized() else net
    for batch in loader:
        try:
            model(batch).mean().backward()
        except RuntimeError as error:
            if "out of memory" in str(error):
                if dist.is_initialized():
                    raise
                torch.cuda.empty_cache()
                continue
            raise
"""
_AGREED = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        loss = model(batch).mean()
        bad = torch.isnan(loss).to(torch.int32)
        dist.all_reduce(bad)
        if bad.item() > 0:
            continue
        loss.backward()
        loss_reduced = reduce_mean(loss).item()
        if loss_reduced > 1e4:
            break
"""
_HISTORY = """\
def train(net, loader, optimizer, args):
    model = DDP(net)
    scores = []
    for epoch in range(args.epochs):
        score = model(next(loader)).mean()
        score.backward()
        optimizer.step()
        dist.all_reduce(score)
        scores.append(score.item())
        if all(one >= args.target_score for one in scores[-args.patience :]):
            break
"""
_HISTORY_OF_TARGETS: str = _HISTORY.replace("score.item()", "epoch").replace("scores", "history")
_ZERO = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        loss = model(batch).mean()
        if not torch.isfinite(loss):
            loss = sum(p.sum() for p in model.parameters()) * 0
        loss.backward()
"""
_STEPS = """\
def train(net, loader, most, skipped):
    model = DDP(net)
    for step, batch in enumerate(loader):
        if step >= most:
            break
        if step in skipped or step % 2 == 0:
            continue
        model(batch).mean().backward()
"""
_PLAIN = """\
def look(net, loader):
    model = DDP(net)
    for batch in loader:
        loss = model.module(batch).mean()
        if torch.isnan(loss):
            continue
        print(loss.item())

def alone(net, loader):
    for batch in loader:
        try:
            look(net, batch)
        except RuntimeError:
            continue

def expected(net):
    model = DDP(net)
    for _ in range(3):
        try:
            model(torch.ones(1)).mean().backward()
        except RuntimeError as error:
            assert "unused" in str(error)
"""
_RAISED = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        try:
            model(batch).mean().backward()
        except torch.cuda.OutOfMemoryError:
            print(torch.cuda.memory_summary())
            raise
        except KeyboardInterrupt:
            break
        except RuntimeError as error:
            failed = str(error)
            print(failed)
        if failed:
            break
"""
_AFTER = """\
def train(net, loader, optimizer, rank):
    model = DDP(net)
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        if not torch.isfinite(loss) or rank != 0:
            continue
        print(loss.item())
"""
_STOPPER = """\
class EarlyStopping:
    def __call__(self, value):
        self.stop = value > 1

def evaluate(net, batches):
    total, count = 0.0, 0
    for x, y in batches:
        total += criterion(net(x), y).item()
        count += 1
    return total / count

def train(net, data, val_data, optimizer):
    model = DDP(net)
    loader = DataLoader(data, sampler=DistributedSampler(data))
    val_sampler = DistributedSampler(val_data, shuffle=False)
    val_loader = DataLoader(val_data, sampler=val_sampler)
    early_stopping = EarlyStopping()
    for epoch in range(100):
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
        loss = evaluate(model, val_loader)
        early_stopping(loss)
        if early_stopping.stop:
            print("stopping")
            break  # !
"""
_STOPPER_AGREED: str = _STOPPER.replace(
    "    return total", "    total = mean_over_ranks(total)\n    return total"
).replace("class EarlyStopping", "def mean_over_ranks(x):\n    dist.all_reduce(x)\n    return x\n\nclass EarlyStopping")
_STOPPER_SHARED_DATA: str = _STOPPER.replace("val_data, sampler=val_sampler", "val_data")
_COUNTED = """\
def train(net, make, data, patience):
    accelerator = Accelerator()
    model, val_loader, loader = accelerator.prepare(net, make(), make())
    best, bad, done = 9.0, 0, False
    for epoch in range(100):
        for batch in loader:
            accelerator.backward(model(batch).loss)
        losses = []
        for batch in val_loader:
            losses.append(float(model(batch).loss))
        val_loss = sum(losses) / len(losses)
        if val_loss < best:
            best, bad = val_loss, 0
        else:
            bad += 1
        if bad > patience:
            done = True
        if done:
            break  # !
"""
_LOW = """\
def train(net, data, optimizer):
    model = DDP(net)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for epoch in range(100):
        train_loss = 0
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            train_loss += loss.detach()
        if epoch > 5 and train_loss / len(loader) < 0.01:
            break  # !
"""
_STEPS_COUNTED = """\
def train(net, data, most, optimizer):
    model = DDP(net)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    step = done = 0
    for epoch in range(100):
        for number, (x, y) in enumerate(loader):
            criterion(model(x), y).backward()
            if (number + 1) % 4 == 0:
                step += 1
            done += len(x)
            if step >= most or done > 10_000:
                break
"""
_METHODS = """\
class Trainer:
    def __init__(self, net, data, val_data):
        self.model = DDP(net)
        self.loader = DataLoader(data, sampler=DistributedSampler(data))
        self.val_loader = DataLoader(val_data, sampler=DistributedSampler(val_data))
        self.best = 9.0
        self.bad = 0

    def evaluate(self):
        right = count = 0
        for x, y in self.val_loader:
            right += (self.model(x).argmax(1) == y).sum().item()
            count += len(y)
        return right / count

    def fit(self):
        for epoch in range(100):
            for x, y in self.loader:
                criterion(self.model(x), y).backward()
            score = self.evaluate()
            if score < self.best:
                self.best, self.bad = score, 0
            else:
                self.bad += 1
            if self.bad == 5:
                return  # !
"""
