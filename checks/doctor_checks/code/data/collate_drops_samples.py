"""CODE017: a collate function that leaves samples out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import LOADERS
from doctor.lint.python.script import FunctionNode, last_name, module_of
from doctor.lint.python.training import hooks, several_ranks
from doctor.testing.script_cases import fails, passes

_COLLATES = re.compile(r"collat", re.IGNORECASE)
_REFILLS = frozenset(
    {"choice", "choices", "randint", "sample", "append", "extend", "repeat", "pad", "cycle", "resample"}
)


@rule(
    id="CODE017",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("collat",),
    foreshadows=("DATA002",),
    cases=lambda: (
        fails("without what could not be read", _script("batch = [item for item in batch if item is not None]  # !")),
        fails("filtered", _script("batch = list(filter(lambda item: item is not None, batch))  # !")),
        fails("by length", _script("kept = [x for x in batch if len(x['tokens']) <= 512]  # !\n    batch = kept")),
        fails("pictures of those that have one", _script("batch = [x[0] for x in batch if x is not None]  # !")),
        fails("a lambda", _LAMBDA),
        fails("a loop that goes on", _LOOP),
        passes("all of them", _script("batch = [item['image'] for item in batch]")),
        passes(
            "filled up again",
            _script(
                "good = [item for item in batch if item is not None]\n"
                "    batch = good + random.choices(good, k=len(batch) - len(good))"
            ),
        ),
        passes("some labels, of all samples", _script("labels = [x['label'] for x in batch if x['id'] in known]")),
        passes(
            "parts of a sample, not samples", _script("boxes = [[b for b in item if b is not None] for item in batch]")
        ),
        passes(
            "one process",
            _script("batch = [item for item in batch if item is not None]").replace("dist.init", "# dist.init"),
        ),
        passes("no sample is None", _NEVER_NONE),
        passes("no sample is None, as a helper makes it", _NEVER_NONE.replace("return {", _HELPER)),
        fails(
            "a helper may return None",
            _NEVER_NONE.replace("return {", _HELPER.replace("pass", "return None")).replace("None]", "None]  # !"),
        ),
        fails(
            "a sample may be None",
            _NEVER_NONE.replace("return {", "return None if i % 7 == 0 else {").replace(
                "if item is not None]", "if item is not None]  # !"
            ),
        ),
        passes("no sample is None, in any mode", _NEVER_NONE.replace("return {", _OF_MODES)),
        fails(
            "a sample of some kinds may be None",
            _NEVER_NONE.replace("return {", _OF_MODES.replace("self.mode in", "self.kinds[i] in")).replace(
                "None]", "None]  # !"
            ),
        ),
        passes("no sample is None, with a filter", _NEVER_NONE.replace(_KEPT, _FILTERED)),
        fails(
            "a filter of what may be None",
            _NEVER_NONE.replace(_KEPT, f"{_FILTERED}  # !").replace("return {", "return None if i % 7 == 0 else {"),
        ),
        passes(
            "not what collates",
            _script("pass").replace("pass", "pass\n\ndef clean(batch):\n    return [x for x in batch if x]\n"),
        ),
    ),
)
def collate_drops_samples(script: Script) -> Iterator[Violation]:
    """Ask whether collate functions return as many samples as they are given.

    Why it hurts: `all_gather` of such batches may hang or fail, and DDP averages gradients as if all batches had the
    same size. An empty batch makes the rank fail, or skip a step in which the others wait.
    Fix: Remove bad samples from the dataset before it is sharded, or replace them so that each batch stays full.
    """
    ranks = several_ranks(script)
    if ranks is None:
        return
    for function in _collating(script):
        name = getattr(function, "name", "The collate function")
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args) if one.arg not in ("self", "cls")]
        batch = names[0] if names else ""
        if batch and not _refills(script, function):
            for node in _filters(script, function, batch):
                if _asks_for_none_alone(node) and _datasets_return_samples(script):
                    continue
                yield Violation(
                    node,
                    f"{name} drops samples from its batch, so batch sizes may differ between ranks",
                    evidence=(("job_started_at_line", ranks.lineno),),
                    severity=None if _gathers(script) else Severity.INFO,
                )


_GATHERS = re.compile(r"all_?gather|\bgather\(|gather_for_metrics|all_to_all|reduce_scatter|broadcast\(")


def _gathers(script: Script) -> bool:
    """Whether the file, or a module of its project that may use its batches, exchanges tensors whose size may be that
    of a batch. Without that, DDP weighs the samples of a smaller batch a little more."""
    modules = script.modules
    if _GATHERS.search(script.text) or modules is None or modules.is_one_file:
        return True
    words = ("gather", "all_to_all", "reduce_scatter", "broadcast")
    return any(_GATHERS.search(text) for word in words for _, text in modules.mentioning(word))


def _collating(script: Script) -> Iterator[FunctionNode | ast.Lambda]:
    found: dict[ast.AST, None] = {}
    for call in script.calls(*LOADERS):
        given = script.argument(call, "collate_fn", 6)
        for one in script.values_of(given) if given is not None else ():
            if isinstance(one, ast.Lambda):
                found[one] = None
        function = script.definition(given) if given is not None else None
        if function is not None:
            found[function] = None
    found.update((one, None) for one in script.functions if _COLLATES.search(one.name))
    yield from found  # type: ignore[misc]


def _refills(script: Script, function: ast.AST) -> bool:
    called = (call.func for call in script.inside(function, ast.Call))
    names = {last_name(one) for one in called}
    return not names.isdisjoint(_REFILLS - {"append", "extend"})


def _filters(script: Script, function: ast.AST, batch: str) -> Iterator[ast.AST]:
    for node in ast.walk(function):
        if (isinstance(node, ast.ListComp) and _keeps_some(node, batch)) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "filter"
            and len(node.args) == 2
            and _is_batch(node.args[1], batch)
        ):
            yield node
        elif isinstance(node, ast.For) and _is_batch(node.iter, batch):
            yield from (one for one in node.body if _goes_on(script, one, node))


def _keeps_some(node: ast.ListComp, batch: str) -> bool:
    """``[x for x in batch if …]``, and ``[f(x) for x in batch if x is not None]``; a selection of labels is neither."""
    first = node.generators[0]
    if len(node.generators) > 1 or not first.ifs or not _is_batch(first.iter, batch):
        return False
    sample = ast.dump(first.target).replace("Store", "Load")
    return ast.dump(node.elt) == sample or any(
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and ast.dump(test.left) == sample
        for test in first.ifs
    )


def _asks_for_none_alone(node: ast.AST) -> bool:
    """``[x for x in batch if x is not None]``, ``filter(lambda x: x is not None, batch)``."""
    tests = node.generators[0].ifs if isinstance(node, ast.ListComp) else []
    if isinstance(node, ast.Call) and isinstance(node.args[0], ast.Lambda):
        tests = [node.args[0].body]
    return bool(tests) and all(re.fullmatch(r"\w+ is not None", ast.unparse(one)) for one in tests)


def _datasets_return_samples(script: Script) -> bool:
    """Whether the file, or else the modules that it imports from its project, or else all of the project, have
    datasets, and each returns something on every path: never ``None``."""
    if _reads_of(script):
        return _all_return_samples([script])
    modules = script.modules
    if modules is None or not script.location:
        return False
    around = frozenset(one for one in modules.texts_around(script.location) if _READS in one)
    found = [(shown, text) for shown, text in modules.mentioning(_READS) if shown.endswith(".py")]
    near = [one for one in found if one[1] in around] or found
    if not near or len(near) > _MOST_MODULES:
        return False
    try:
        datasets = [module_of(modules, shown, text) for shown, text in near]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _all_return_samples(datasets)


def _all_return_samples(scripts: list[Script]) -> bool:
    found = [(script, one) for script in scripts for one in _reads_of(script)]
    return bool(found) and all(_returns_samples(script, one) for script, one in found)


_READS = "__getitem__"
_MOST_MODULES = 8


def _reads_of(script: Script) -> list[FunctionNode]:
    return [one for one in script.functions if one.name == _READS]


def _returns_samples(script: Script, function: FunctionNode, depth: int = 3) -> bool:
    returns = [one for one in script.inside(function, ast.Return) if not _is_never_taken(script, function, one)]
    is_complete = isinstance(function.body[-1], (ast.While, ast.With)) or _always_returns(function.body)
    return is_complete and bool(returns) and all(_is_sample(script, one.value, depth) for one in returns)


def _is_never_taken(script: Script, function: FunctionNode, statement: ast.Return) -> bool:
    """Whether a ``return`` is for a value that is ``None`` in no run: ``if row is None: return None``, where ``row`` is
    an entry of a table, or what a function gives that no start of the project selects."""
    branch = script.parent(statement)
    test = branch.test if isinstance(branch, ast.If) and statement in branch.body else None
    is_none = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and ast.unparse(test.comparators[0])
    if not isinstance(test, ast.Compare) or is_none != "None" or not isinstance(test.left, ast.Name):
        return False
    name = test.left.id
    made = [
        one
        for one in script.inside(function, ast.Assign)
        if any(isinstance(target, ast.Name) and target.id == name for target in one.targets)
    ]
    return bool(made) and all(isinstance(one.value, ast.Subscript) or _is_left_off(script, one) for one in made)


def _is_left_off(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement is under ``if self.make is not None:`` for an argument of the class that is ``None`` by
    default, and that nothing else in the project names."""
    branch, owner = script.parent(statement), script.class_of(statement)
    test = branch.test if isinstance(branch, ast.If) and statement in branch.body else None
    asked = re.fullmatch(r"self\.(\w+) is not None", ast.unparse(test)) if test is not None else None
    made = next(hooks(owner, "__init__"), None) if owner is not None else None
    if asked is None or made is None or script.modules is None or script.modules.is_one_file:
        return False
    names, defaults = made.args.args, made.args.defaults
    given = dict(zip([one.arg for one in names[len(names) - len(defaults) :]], defaults, strict=True))
    given |= {
        one.arg: value
        for one, value in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)
        if value is not None
    }
    default = given.get(asked[1])
    is_none = isinstance(default, ast.Constant) and default.value is None
    is_named = any(word.arg == asked[1] for call in script.all(ast.Call) for word in call.keywords)
    places = {shown for shown, _ in script.modules.mentioning(asked[1])}
    pages = script.modules.pages(script.location) if script.location else ()
    return is_none and not is_named and places <= {script.path} and not any(asked[1] in one for one in pages)


def _always_returns(block: list[ast.stmt]) -> bool:
    """Whether a block ends with a ``return`` or ``raise`` for all samples: also ``if …: return a`` with an ``else``
    that returns too, or a ``try`` whose handlers do. Without an ``else``, a test of the dataset alone (``self.mode ==
    "train"``) has one outcome for all samples: it leaves out no part of a batch."""
    last = block[-1] if block else None
    if isinstance(last, ast.If):
        is_last = not last.orelse and _asks_the_dataset(last.test)
        return _always_returns(last.body) and (is_last or _always_returns(last.orelse))
    if isinstance(last, ast.Try):
        blocks = [last.orelse or last.body, *(one.body for one in last.handlers)]
        return all(map(_always_returns, blocks))
    return isinstance(last, (ast.Return, ast.Raise))


def _asks_the_dataset(test: ast.expr) -> bool:
    """``self.mode in ("eval", "test")``: no part of it depends on the sample."""
    nodes = list(ast.walk(test))
    names = {one.id for one in nodes if isinstance(one, ast.Name)}
    return names == {"self"} and not any(isinstance(one, (ast.Call, ast.Subscript)) for one in nodes)


def _is_sample(script: Script, value: ast.expr | None, depth: int) -> bool:
    """Whether a value that a dataset returns is not ``None``, as far as the file shows: no value of a name is,
    and a function of the file returns a sample."""
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return False
    if isinstance(value, ast.IfExp):
        return _is_sample(script, value.body, depth) and _is_sample(script, value.orelse, depth)
    if isinstance(value, ast.Name) and depth:
        made = [one for one in script.values_of(value) if one is not value]
        return all(_is_sample(script, one, depth - 1) for one in made)
    function = script.definition(value.func) if isinstance(value, ast.Call) and depth else None
    return function is None or _returns_samples(script, function, depth - 1)


def _is_batch(node: ast.expr, batch: str) -> bool:
    return isinstance(node, ast.Name) and node.id == batch


def _goes_on(script: Script, statement: ast.stmt, loop: ast.For) -> bool:
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and isinstance(statement.body[-1], ast.Continue)
        and any(
            isinstance(call.func, ast.Attribute) and call.func.attr == "append"
            for call in script.inside(loop, ast.Call)
        )
    )


def _script(body: str) -> str:
    return f"""\
import random
import torch
from torch.utils.data import default_collate

def collate(batch):
    {body}
    return default_collate(batch)

dist.init_process_group("nccl")
loader = DataLoader(load(), batch_size=16, collate_fn=collate)
"""


_KEPT = "[item for item in batch if item is not None]"
_FILTERED = "list(filter(lambda item: item is not None, batch))"
_HELPER = """\
return self.read(i)

    def read(self, i):
        if i > 9:
            pass
        return {"""
_OF_MODES = """\
if self.mode == "train":
            return self.pairs[i]
        elif self.mode in ("eval", "test"):
            return {"""
_NEVER_NONE: str = (
    _script("batch = [item for item in batch if item is not None]")
    + """\

class Tokens(Dataset):
    def __getitem__(self, i):
        return {"tokens": self.tokens[i]}
"""
)
_LAMBDA = """\
from torch.utils.data import default_collate

loader = DataLoader(
    load(),
    batch_size=16,
    collate_fn=lambda batch: default_collate([x for x in batch if x is not None]),  # !
)
L.Trainer(devices=2).fit(model, loader)
"""
_LOOP = """\
class Collator:
    def collate_fn(self, samples):
        images = []
        for sample in samples:
            if sample["image"] is None:  # !
                continue
            images.append(sample["image"])
        return torch.stack(images)

loader = torch.utils.data.DataLoader(load(), batch_size=16, collate_fn=Collator().collate_fn)
model = DDP(build())
"""
