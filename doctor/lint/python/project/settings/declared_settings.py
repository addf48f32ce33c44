"""What a Python file declares of options and settings, and what it gives them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from doctor.lint.python.project.settings.options import OF_SETTINGS
from doctor.lint.python.script import UNKNOWN, ProjectModules, last_name, parsed

HOLDERS = re.compile(rf"(?:\w+_)?(?:args|cfgs?|configs?|conf|options|params)$|{OF_SETTINGS.pattern}", re.IGNORECASE)
"""Names of objects that hold the options or settings of a program."""


_KEEPS = re.compile(r"conf|args|arguments|opt|param|setting|flags|namespace", re.IGNORECASE)
"""Words of classes that hold settings."""


class DeclaredOption(NamedTuple):
    """An option as a program declares it. ``spelled``: all its names; ``read``: the value of the word that a command
    gives, or of an option alone; :data:`UNKNOWN` if that is not known."""

    spelled: tuple[str, ...]
    default: object
    read: Callable[[str | None], object]


class NamedValues:
    """What a file declares and sets by name: options of parsers, fields with a default, and other values; ``replaced``:
    settings that get a computed value; ``copied``: those of them that get what another one has at first;
    ``fixed``: those that get 1 from the program itself, and no other value: ``args.steps = 1``; ``commands``: texts
    with options, of commands or a part of one."""

    def __init__(self, text: str) -> None:
        self.declared: dict[str, list[DeclaredOption]] = defaultdict(list)
        self.written: dict[str, list[ast.expr]] = defaultdict(list)
        self.replaced: set[str] = set()
        self.copied: dict[str, str] = {}
        self.fixed: set[str] = set()
        self.commands: list[str] = []
        nodes = list(ast.walk(parsed(text)))
        declaring: set[ast.AST] = _computed_locals(nodes)
        keeps = any(isinstance(one, ast.ClassDef) and _KEEPS.search(one.name) for one in nodes)
        replacing: dict[str, list[ast.Assign]] = defaultdict(list)
        for node in nodes:
            if isinstance(node, ast.Call) and (read := _DECLARATIONS.get(last_name(node.func))) is not None:
                declaring.update(ast.walk(node))
                for name, option in read(node, literal):
                    self.declared[name].append(option)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if "--" in node.value and node not in declaring:
                    self.commands.append(node.value)
            elif isinstance(node, ast.ClassDef):
                declaring.update(self._read_fields(node))
            elif node not in declaring and (keeps or not _is_of_self(node)):
                for name in _replaced_by(node):
                    replacing[name] += [node] if isinstance(node, ast.Assign) else []
                for name, value in _written_by(node):
                    self.written[name].append(value)
        self.replaced = set(replacing)
        assigning = [one for one in nodes if isinstance(one, (ast.Assign, ast.AugAssign))]
        self._read_copies(replacing, assigning)
        self._read_fixed(assigning)

    def _read_fixed(self, nodes: Sequence[ast.Assign | ast.AugAssign]) -> None:
        for name in {
            owner_and_entry(target)[1] for one in nodes if isinstance(one, ast.Assign) for target in one.targets
        }:
            values = [literal(one) for one in self.written[name] if not is_copy(one, name)] if name else []
            if values == [1] and name not in self.declared:
                self.fixed.add(name)

    def _read_copies(
        self, replacing: Mapping[str, Sequence[ast.Assign]], nodes: Sequence[ast.Assign | ast.AugAssign]
    ) -> None:
        """``opt.total = opt.batch_size``, unless a line above gives the other one a value."""
        for name, (copy, *others) in replacing.items():
            other = owner_and_entry(copy.value)[1] if isinstance(copy.value, ast.Attribute) else ""
            values = [one for one in self.written[name] if one is not copy.value]
            if not other or others or not all(is_copy(one, name) for one in values):
                continue
            if not any(one.lineno < copy.lineno and _sets(one, other) for one in nodes):
                self.copied[name] = other

    def _read_fields(self, owner: ast.ClassDef) -> Iterator[ast.AnnAssign]:
        for one in owner.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
                default = literal(_default_in(one.value))
                kind = "str" if isinstance(default, str) else last_name(one.annotation)
                read = partial(_switched, read=_READERS.get(kind, scalar))
                self.declared[one.target.id].append(DeclaredOption((f"--{one.target.id}",), default, read))
                yield one


def settings_in(modules: ProjectModules, shown: str, text: str) -> NamedValues | None:
    """What the file shown as ``shown`` declares and sets; ``None`` if it cannot be parsed."""
    key = ("settings", shown)
    if key not in modules.memo:
        try:
            modules.memo[key] = NamedValues(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            modules.memo[key] = None
    found: NamedValues | None = modules.memo[key]
    return found


def owner_and_entry(node: ast.expr) -> tuple[str, str]:
    """The name of the settings and that of the entry: of ``args.mode``, ``cfg["train"]["amp"]``, ``cfg.get("amp")``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        name, base = literal(node.args[0]), node.func.value
    elif isinstance(node, ast.Subscript):
        name, base = literal(node.slice), node.value
    elif isinstance(node, ast.Attribute):
        name, base = node.attr, node.value
    else:
        return "", ""
    while isinstance(base, (ast.Attribute, ast.Subscript)):
        if isinstance(base, ast.Attribute) and HOLDERS.match(base.attr):
            break
        base = base.value
    owner = last_name(base)
    return (owner, name) if isinstance(name, str) and HOLDERS.match(owner) else ("", "")


def is_copy(value: ast.expr, name: str) -> bool:
    """Whether a value is that of the same name elsewhere: ``amp=args.amp``, ``self.amp = amp``."""
    return last_name(value) == name or owner_and_entry(value)[1] == name


def literal(node: ast.expr | None) -> object:
    """The value of a constant or a negative number; :data:`UNKNOWN` for all else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        return -number if isinstance(number, (int, float)) else UNKNOWN
    return UNKNOWN


def _written_by(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a node gives a value: attributes, entries, keywords, variables of modules and classes."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            name = literal(target.slice) if isinstance(target, ast.Subscript) else last_name(target)
            if isinstance(name, str):
                yield name, node.value
    elif isinstance(node, ast.AugAssign):
        yield last_name(node.target), ast.BinOp(node.target, node.op, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield last_name(node.target), node.value
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg, node.value
    elif isinstance(node, ast.Dict):
        named = zip(node.keys, node.values, strict=True)
        yield from ((key, value) for one, value in named if isinstance(key := literal(one), str))
    elif isinstance(node, ast.arguments):
        yield from _defaults_of(node)


def _computed_locals(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """The assignments of functions that compute a variable (``dataset = CIFAR10("data")``) of which no setting is made:
    ``args.dataset = dataset``, ``Config(dataset=dataset)``, ``locals()``."""
    shared = {one for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for one in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and last_name(node.func) in ("locals", "vars", "exec", "eval"):
            return set()
        shared.update(name for name, value in _written_by(node) if isinstance(value, ast.Name) and value.id == name)
    functions = (one for one in nodes if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {
        one
        for function in functions
        for one in ast.walk(function)
        if isinstance(one, ast.Assign)
        and isinstance(one.value, ast.Call)
        and all(isinstance(target, ast.Name) and target.id not in shared for target in one.targets)
    }


def _replaced_by(node: ast.AST) -> Iterator[str]:
    """The settings that a statement gives a value which is computed, and not from what they are: ``args.n_gpu =
    device_count()``."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        owner, name = owner_and_entry(target)
        if owner and isinstance(node, ast.Assign) and literal(node.value) is UNKNOWN:
            if not any(is_copy(part, name) for part in ast.walk(node.value) if isinstance(part, ast.expr)):
                yield name


def _sets(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(one, (ast.Attribute, ast.Subscript)) and owner_and_entry(one)[1] == name for one in targets)


def _is_of_self(node: ast.AST) -> bool:
    """``self.steps = ...``: what an object has, which is no setting unless its class holds them."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return all(isinstance(one, ast.Attribute) and last_name(one.value) == "self" for one in targets)


def _defaults_of(node: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    given = [*node.posonlyargs, *node.args]
    defaults = zip(given[::-1], node.defaults[::-1], strict=False)
    yield from ((one.arg, _default_in(value)) for one, value in defaults)
    keywords = zip(node.kwonlyargs, node.kw_defaults, strict=True)
    yield from ((one.arg, _default_in(value)) for one, value in keywords if value is not None)


def declared_by(call: ast.Call, value: Callable[[ast.expr | None], object]) -> Iterator[tuple[str, DeclaredOption]]:
    """The name and the declaration of an option by ``add_argument``."""
    names = [one for arg in call.args if isinstance(one := value(arg), str) and one.startswith("-")]
    long = [one for one in names if one.startswith("--")]
    given = {one.arg: one.value for one in call.keywords}
    if None in given or not (long or "dest" in given):
        return
    dest = value(given["dest"]) if "dest" in given else long[0].lstrip("-").replace("-", "_")
    if not isinstance(dest, str):
        return
    action = value(given["action"]) if "action" in given and not _is_optional(given["action"]) else None
    default = value(given["default"]) if "default" in given else None
    if "action" in given and _is_optional(given["action"]):
        off = tuple(f"--no-{one.lstrip('-')}" for one in long)
        yield dest, DeclaredOption((*names, *off), UNKNOWN, lambda _: UNKNOWN)
    elif action in ("store_true", "store_false"):
        is_on = action == "store_true"
        yield dest, DeclaredOption(tuple(names), (not is_on) if default is None else default, lambda _: is_on)
    elif action not in (None, "store") or "nargs" in given:
        yield dest, DeclaredOption(tuple(names), UNKNOWN, lambda _: UNKNOWN)
    else:
        kind = last_name(given["type"]) if "type" in given else "str"
        read = (
            bool
            if kind == "bool"
            else _READERS.get(kind, _of_words if re.search(r"bool", kind, re.IGNORECASE) else lambda _: UNKNOWN)
        )
        if isinstance(default, str) and kind != "str":
            default = read(default)
        yield dest, DeclaredOption(tuple(names), default, lambda word: UNKNOWN if word is None else read(word))


def _declared_by_click(
    call: ast.Call, value: Callable[[ast.expr | None], object]
) -> Iterator[tuple[str, DeclaredOption]]:
    """``@click.option("--steps", default=4)``."""
    names = [one for arg in call.args if isinstance(one := value(arg), str)]
    long = [one for one in names if one.startswith("--")]
    bare = next((one for one in names if one.isidentifier()), long[0].lstrip("-").replace("-", "_") if long else "")
    given = {one.arg: one.value for one in call.keywords}
    if long and "is_flag" not in given:
        default = value(given["default"]) if "default" in given else None
        kind = type(default).__name__ if default is not None else last_name(given.get("type", call))
        yield bare, DeclaredOption(tuple(long), default, partial(_read_word, read=_READERS.get(kind, scalar)))


def _declared_by_absl(
    call: ast.Call, value: Callable[[ast.expr | None], object]
) -> Iterator[tuple[str, DeclaredOption]]:
    """``flags.DEFINE_integer("steps", 4, "...")``."""
    given = {one.arg: one.value for one in call.keywords}
    name = value(call.args[0] if call.args else given.get("name"))
    default = value(call.args[1] if len(call.args) > 1 else given.get("default"))
    kind = "int" if last_name(call.func) == "DEFINE_integer" else "float"
    if isinstance(name, str):
        yield name, DeclaredOption((f"--{name}",), default, partial(_read_word, read=_READERS[kind]))


def _read_word(word: str | None, read: Callable[[str], object]) -> object:
    return UNKNOWN if word is None else read(word)


_DECLARATIONS = {
    "add_argument": declared_by,
    "option": _declared_by_click,
    "DEFINE_integer": _declared_by_absl,
    "DEFINE_float": _declared_by_absl,
}


def _default_in(value: ast.expr) -> ast.expr:
    """The default that a declaration of a field or an option gives: ``field(default=4)``, ``Field(4, ge=1)``."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in ("field", "Field", "Option"):
        return value
    given = [word.value for word in value.keywords if word.arg == "default"]
    return given[0] if given else value.args[0] if value.args else value


def _is_optional(action: ast.expr) -> bool:
    return last_name(action) == "BooleanOptionalAction"


def _of_number(kind: type[int] | type[float]) -> Callable[[str], object]:
    def read(word: str) -> object:
        try:
            return kind(word)
        except ValueError:
            return UNKNOWN

    return read


def _of_words(word: str) -> object:
    """What functions for options accept."""
    named = word.lower()
    if named in ("true", "yes", "on", "t", "y", "1"):
        return True
    return False if named in ("false", "no", "off", "f", "n", "0") else UNKNOWN


def of_text(word: str) -> object:
    """The text that a word is; :data:`UNKNOWN` with variables or placeholders in it."""
    return UNKNOWN if "$" in word or "<" in word or "{" in word else word


_READERS: dict[str, Callable[[str], object]] = {
    "int": _of_number(int),
    "float": _of_number(float),
    "str": of_text,
    "bool": _of_words,
}


def _switched(word: str | None, read: Callable[[str], object]) -> object:
    """The value of a field that a command has, alone for ``True``."""
    return True if word is None else read(word)


def scalar(word: str | None) -> object:
    """The value of a plain word of a configuration (yaml.org/type/bool.html), or of an option alone."""
    if not word or word[0] in "[({&*!|>":
        return True if word is None else UNKNOWN
    named = word.lower()
    if named in _SCALARS:
        return _SCALARS[named]
    for read in (_of_number(int), _of_number(float)):
        if (number := read(word)) is not UNKNOWN:
            return number
    return word


_SCALARS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "none", "~"), None),
}
