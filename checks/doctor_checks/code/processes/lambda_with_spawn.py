"""CODE027: a lambda or a nested function is passed to spawned processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.cuda import start_method
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import UNKNOWN
from doctor.lint.python.training import LOADER
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE027",
    severity=Severity.ERROR,
    reads=Script,
    foreshadows=("RUN004",),
    mentions=("spawn", "forkserver"),
    impacts={
        r"lambda": (
            'Starting the processes fails with "Can\'t pickle" or "Can\'t get local object", because a lambda cannot '
            "be imported by name."
        ),
        r"nested": (
            'Starting the processes fails with "Can\'t pickle" or "Can\'t get local object", because a nested function '
            "cannot be imported by name."
        ),
    },
    cases=lambda: (
        fails("a lambda is spawned", _LAMBDA),
        fails("a function of a function is spawned", _LOCAL),
        fails("a collate function, where workers are spawned", _COLLATE),
        fails("an argument of the spawned function", _ARGUMENT),
        fails("a process of a context that spawns", _CONTEXT),
        passes("functions of the module", _MODULE),
        passes("workers that are forked", _FORKED),
        passes("no workers", _NO_WORKERS),
        passes("a call that makes the argument", _CALLED),
    ),
)
def lambda_with_spawn(script: Script) -> Iterator[Violation]:
    """Ask whether everything passed to spawned processes can be pickled.

    Why it hurts: starting the processes fails with "Can't pickle" or "Can't get local object", because a lambda or a
    nested function cannot be imported by name.
    Fix: Define the function with `def` at the top level of the module.
    """
    default = start_method(script)
    for call in script.all(ast.Call):
        for what, sent in _sent(script, call, default):
            if words := _unpicklable(script, sent):
                yield Violation(
                    sent,
                    f"{words} cannot be pickled for the {what} spawned at line {call.lineno}",
                    fix=_fix(sent, words),
                    severity=None if script.function_of(call) in run_by_all(script) else Severity.WARNING,
                    evidence=(("receiver", script.text_of(call.func)), ("line_of_call", call.lineno)),
                )


_SPAWNED = ("spawn", "forkserver")
_SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_MULTIPROCESSING = ("multiprocessing", "torch.multiprocessing")


def _sent(script: Script, call: ast.Call, default: object) -> Iterator[tuple[str, ast.expr]]:
    """What a call sends to other processes, and the words for these."""
    name = script.name(call.func)
    if name in _SPAWN:
        if name.endswith("spawn") or script.value(script.argument(call, "start_method")) in _SPAWNED:
            yield from (("ranks", one) for one in _handed(script, call, "fn", 0, 1))
    elif name == LOADER:
        context = script.argument(call, "multiprocessing_context")
        started = _method(script, context) if context is not None else default
        workers = script.value(script.argument(call, "num_workers", 5))
        if started in _SPAWNED and workers not in (0, UNKNOWN):
            for option, place in (("collate_fn", 6), ("worker_init_fn", 10)):
                if (given := script.argument(call, option, place)) is not None:
                    yield "DataLoader workers", given
    elif name.endswith(".Process") and _started_by(script, call, default) in _SPAWNED:
        yield from (("process", one) for one in _handed(script, call, "target", 1, 3))


def _handed(script: Script, call: ast.Call, function: str, place: int, arguments: int) -> Iterator[ast.expr]:
    given = script.argument(call, function, place)
    if given is not None:
        yield given
    packed = script.argument(call, "args", arguments)
    if isinstance(packed, (ast.Tuple, ast.List)):
        yield from packed.elts


def _started_by(script: Script, call: ast.Call, default: object) -> object:
    name = script.name(call.func).removesuffix(".Process")
    if name in _MULTIPROCESSING:
        return default
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return _method(script, owner) if owner is not None and "get_context" in name else UNKNOWN


def _method(script: Script, node: ast.expr) -> object:
    for value in script.values_of(node):
        if isinstance(value, ast.Call) and script.name(value.func).endswith("multiprocessing.get_context"):
            return script.value(script.argument(value, "method", 0))
    return script.value(node)


def _unpicklable(script: Script, node: ast.expr) -> str:
    if isinstance(node, ast.Lambda):
        return "A lambda"
    if not isinstance(node, ast.Name):
        return ""
    scope = script.scope_of(node, node.id)
    given = scope.names[node.id] if scope is not None else []
    if len(given) != 1:
        return ""
    if isinstance(given[0], ast.Lambda):
        return f"The lambda `{node.id}`"
    if isinstance(given[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        outer = script.function_of(given[0])
        return f"Function {node.id}, which is nested in {outer.name}," if outer is not None else ""
    return ""


def _fix(sent: ast.expr, words: str) -> str:
    if not isinstance(sent, ast.Name):
        return "Replace the lambda with a `def` at the top level of the module."
    if "lambda" in words:
        return f"Replace the lambda with `def {sent.id}` at the top level of the module."
    return f"Move `{sent.id}` to the top level of the module."


_LAMBDA = """\
def train(rank, world, settings):
    run(rank, world, settings)

if __name__ == "__main__":
    settings = load()
    mp.spawn(lambda rank: train(rank, 4, settings), nprocs=4)  # !
"""
_LOCAL = """\
def main(settings):
    def worker(rank):
        train(rank, settings)

    torch.multiprocessing.spawn(worker, nprocs=settings.gpus)  # !
"""
_COLLATE = """\
def loaders(data, pad):
    return DataLoader(
        data,
        batch_size=8,
        num_workers=4,
        multiprocessing_context="spawn",
        collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows, padding_value=pad),  # !
    )
"""
_ARGUMENT = """\
def train(rank, build, world):
    build().to(rank)

def main():
    build = lambda: make("resnet50")
    mp.spawn(train, args=(build, 2), nprocs=2)  # !
"""
_CONTEXT = """\
def main(ranks):
    context = mp.get_context("spawn")
    started = []
    for rank in range(ranks):
        process = context.Process(target=lambda: train(rank))  # !
        process.start()
        started.append(process)
"""
_MODULE = """\
import functools

def collate(rows, pad=0):
    return rows

def train(rank, world):
    return DataLoader(
        data(), num_workers=2, multiprocessing_context="spawn", collate_fn=functools.partial(collate, pad=1)
    )

if __name__ == "__main__":
    mp.spawn(train, args=(4,), nprocs=4, join=True)
    print(sorted([1, 2], key=lambda one: -one))
"""
_FORKED = """\
def main(data):
    process = mp.Process(target=lambda: print("forked"))
    process.start()
    context = mp.get_context("fork")
    context.Process(target=lambda: print("forked")).start()
    return DataLoader(data, num_workers=4, collate_fn=lambda rows: rows)

def spawn(data):
    return DataLoader(data, num_workers=0, multiprocessing_context=None, collate_fn=lambda rows: rows)
"""
_NO_WORKERS = """\
import multiprocessing

multiprocessing.set_start_method("spawn")
loader = DataLoader(data, num_workers=0, collate_fn=lambda rows: rows)
"""
_CALLED = """\
def train(rank, lengths):
    print(rank, lengths)

if __name__ == "__main__":
    mp.spawn(train, args=(max([[1], [2, 3]], key=lambda one: len(one)),), nprocs=2)
"""
