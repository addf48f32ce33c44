"""Recognizes datasets whose items are random numbers or all alike: the order in which they are read has no meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.project.imported_functions import ModuleSummary
from doctor.lint.python.project.settings.options import is_switched_off
from doctor.lint.python.script import Script, last_name, per_script
from doctor.lint.python.training import DDP
from doctor.lint.python.value_flow import origins, part_of

_DRAWS = re.compile(r"^(?:torch|numpy\.random|random)\.(?:rand\w*|normal|uniform|integers|standard_normal)$")
_COMPUTES = re.compile(r"^(?:torch|numpy|random|math)\.(?!load|hub|jit|from_?file|fromfile|memmap|genfromtxt)")
_FILLS = re.compile(r"^torch\.(?:arange|zeros|ones|full|linspace|eye)$")
_MADE_UP = re.compile(r"mock|dummy|fake|synthetic|random|toy", re.IGNORECASE)
"""Words of names of classes for data that a program makes up."""
_BUILTINS = frozenset({"abs", "float", "int", "len", "list", "max", "min", "range", "round", "sum", "super", "tuple"})


def is_random(script: Script, dataset: ast.expr) -> bool:
    """Whether all values that a dataset may be are instances of classes, of the file or of another module of the
    project, whose items are drawn at random; but for those in the branch of a switch that is off by default, and which
    nothing in the project turns on: ``if args.use_cifar:``."""
    made = list(_objects(script, dataset))
    used = [one for one in made if not is_switched_off(script, one)]
    return bool(used) and all(_is_of_random_class(script, one) for one in used)


_KEEPS_VALUES = frozenset({"to", "cuda", "float", "half", "bfloat16", "requires_grad_", "contiguous"})


@per_script
def trains_on_noise(script: Script) -> bool:
    """Whether all that a program gives to the models which it wraps in DistributedDataParallel are tensors that it
    fills with random numbers or one number in place, and nothing else gets these models: what they learn is nothing."""
    wrapped = [script.parent(one) for one in script.calls(DDP)]
    targets = [one.targets[0] for one in wrapped if isinstance(one, ast.Assign)]
    names = {one.id for one in targets if isinstance(one, ast.Name)}
    if not names or len(targets) < len(wrapped) or next(script.method_calls("backward"), None) is None:
        return False
    uses = [one for one in script.all(ast.Name) if one.id in names and isinstance(one.ctx, ast.Load)]
    called = [call for one in uses if isinstance(call := script.parent(one), ast.Call)]
    given = [value for call in called for value in (*call.args, *(one.value for one in call.keywords))]
    return bool(given) and all(_is_noise(script, one) for one in given)


def _is_noise(script: Script, tensor: ast.expr, depth: int = 3) -> bool:
    while isinstance(tensor, ast.Call) and isinstance(tensor.func, ast.Attribute) and tensor.func.attr in _KEEPS_VALUES:
        tensor = tensor.func.value
    if isinstance(tensor, ast.Name) and depth:
        values = script.values_of(tensor)
        return bool(values) and all(_is_noise(script, one, depth - 1) for one in values)
    return isinstance(tensor, ast.Call) and _DRAWN_OR_FILLED.match(script.name(tensor.func)) is not None


_DRAWN_OR_FILLED = re.compile(rf"{_DRAWS.pattern}|{_FILLS.pattern}")


def _objects(script: Script, dataset: ast.expr) -> Iterator[ast.expr]:
    """The values of an expression that are not names themselves."""
    for name in (dataset, *origins(script, dataset)):
        for value in script.values_of(name) if not isinstance(name, ast.Starred) else ():
            found = part_of(script, name, value) if isinstance(value, ast.Starred) else value
            for one in script.values_of(found) if found is not None else (value,):
                if not isinstance(one, (ast.Name, ast.Attribute)):
                    yield one


def _is_of_random_class(script: Script, made: ast.expr) -> bool:
    if isinstance(made, ast.ListComp):
        return _is_drawn(script, made)
    if not isinstance(made, ast.Call):
        return False
    if script.name(made.func) == "torch.utils.data.TensorDataset":
        return bool(made.args) and all(_is_drawn(script, one) or _is_constant(script, one) for one in made.args)
    if script.name(made.func) == "torchvision.datasets.FakeData":
        return True
    owner = script.class_definition(made.func)
    if owner is not None:
        return owner.name in random_datasets(script) or _holds_given(script, owner, made)
    module, _, name = script.name(made.func).rpartition(".")
    if script.modules is None or not module or not script.modules.has(script.location, module):
        return False
    summary: ModuleSummary | None = script.modules.find(script.location, module, whole=True)
    return summary is not None and name in summary.random_datasets


@per_script
def random_datasets(script: Script) -> frozenset[str]:
    """The classes of a file whose ``__getitem__`` returns random numbers, or entries of a collection of them."""
    return frozenset(name for name, owner in script.bindings.classes.items() if _draws_its_items(script, owner))


def _draws_its_items(script: Script, owner: ast.ClassDef) -> bool:
    getter = script.bindings.methods.get((owner.name, "__getitem__"))
    if getter is None or not all(map(_is_computed, _names_of_calls(script, owner))) or _reads_files(owner):
        return False
    if _says_made_up(script, owner) and _makes_up(script, owner):
        return True
    entries = [one.value for one in script.inside(getter, ast.Subscript) if isinstance(one.value, ast.Attribute)]
    read = [values for one in entries if (values := script.values_of(one))]
    if len(read) < len(entries):
        return False
    drawn = (any(_draws(script, value) or _is_repeated(value) for value in values) for values in read)
    return all(drawn) if read else _draws(script, getter)


def _says_made_up(script: Script, owner: ast.ClassDef) -> bool:
    """Whether the name of a class, its docstring or the line above it says that it makes its data up."""
    first = min([owner.lineno, *(one.lineno for one in owner.decorator_list)])
    above = script.lines[first - 2 : first - 1] if first > 1 else []
    texts = (owner.name, ast.get_docstring(owner) or "", *(one for one in above if one.startswith("#")))
    return any(map(_MADE_UP.search, texts))


_MAKES_TENSORS = re.compile(r"^(?:torch|numpy)\.(?:full|zeros|ones|arange|eye|linspace|tensor|rand|normal)\w*$")
_IS_SIZE = re.compile(
    r"size|len|num|n_|^n$|dim|hidden|shape|depth|width|height|channel|class|seed|count|vocab|seq", re.IGNORECASE
)


_READS = re.compile(r"^(?:open|load|read|imread|fetch|from_?file|glob|listdir)(?:$|_)", re.IGNORECASE)


def _reads_files(owner: ast.ClassDef) -> bool:
    """Whether a method of a class reads files, by the names of what it calls: random numbers change what is read."""
    return any(_READS.match(last_name(one.func)) for one in ast.walk(owner) if isinstance(one, ast.Call))


def _makes_up(script: Script, owner: ast.ClassDef) -> bool:
    """Whether a class makes tensors of numbers alone: it calls nothing that may read a file, and ``__init__`` takes
    sizes, by their names."""
    calls = {script.name(one.func) or ast.unparse(one.func) for one in ast.walk(owner) if isinstance(one, ast.Call)}
    made = script.bindings.methods.get((owner.name, "__init__"))
    given = [one.arg for one in (*made.args.args[1:], *made.args.kwonlyargs)] if made is not None else []
    is_computed = all(map(_is_computed, calls - {"print"})) and any(map(_MAKES_TENSORS.match, calls))
    return is_computed and all(map(_IS_SIZE.search, given))


def _holds_given(script: Script, owner: ast.ClassDef, made: ast.Call) -> bool:
    """Whether the items of a class are entries of what it is given, and that is drawn: ``Rows(torch.randn(9, 8))``."""
    getter = script.bindings.methods.get((owner.name, "__getitem__"))
    if getter is None or not all(map(_is_computed, _names_of_calls(script, owner))):
        return False
    entries = [one.value for one in script.inside(getter, ast.Subscript) if isinstance(one.value, ast.Attribute)]
    kept = [value for one in entries for value in script.values_of(one)]
    given = [*made.args, *(one.value for one in made.keywords)]
    is_kept = bool(kept) and all(isinstance(one, ast.Name) for one in kept)
    return is_kept and bool(given) and all(_is_drawn(script, one) for one in given)


def _is_constant(script: Script, tensor: ast.expr) -> bool:
    """Whether a tensor is a series or one number: ``torch.arange(9)``, ``torch.zeros(9, 8)``."""
    return all(
        isinstance(one, ast.Call) and _FILLS.match(script.name(one.func)) is not None
        for one in script.values_of(tensor) or (tensor,)
    )


def _is_repeated(value: ast.expr) -> bool:
    """``["some text"] * 1000``."""
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and isinstance(value.left, ast.List)


def _is_drawn(script: Script, tensor: ast.expr) -> bool:
    """Whether a tensor is computed from random numbers and nothing else above it, as far as its function shows."""
    called = (one.func for one in _above(script, tensor, tensor.lineno) if isinstance(one, ast.Call))
    calls = [script.name(one) or (one.id if isinstance(one, ast.Name) else "") for one in called]
    drawn = any(_DRAWS.match(one) for one in calls)
    return drawn and all(map(_is_computed, calls))


def _above(script: Script, value: ast.expr, line: int, depth: int = 4) -> Iterator[ast.AST]:
    """The nodes of an expression, and of the values that its names get no later than a line."""
    for node in ast.walk(value):
        yield node
        for one in script.values_of(node) if depth and isinstance(node, ast.Name) else ():
            if one is not value and getattr(one, "lineno", 0) <= line:
                yield from _above(script, one, line, depth - 1)


def _names_of_calls(script: Script, owner: ast.ClassDef) -> Iterator[str]:
    return (script.name(call.func) for call in script.inside(owner, ast.Call))


def _is_computed(name: str) -> bool:
    """Whether a function makes numbers of numbers: it reads no file."""
    return name in _BUILTINS or _COMPUTES.match(name) is not None or name.startswith(("super()", "torch.utils.data."))


def _draws(script: Script, node: ast.AST) -> bool:
    return any(_DRAWS.match(script.name(one.func)) for one in ast.walk(node) if isinstance(one, ast.Call))
