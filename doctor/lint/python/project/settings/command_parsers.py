"""Reads the parsers of argparse that a program makes before it parses its command. Nothing is run.

The text is followed as Python runs it: the statements of the program, the modules of the project that it imports, and
the functions that it calls. What a branch or loop declares may be missing; a parser that something unknown gets may
have any options.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from doctor.lint.python.script import UNKNOWN, Script, last_name

if TYPE_CHECKING:
    from doctor.lint.engine.project_files import ProjectFiles

MOST_STATEMENTS = 20_000
"""Statements of one program that are followed."""
MOST_EXPRESSIONS = 200_000
DEEPEST = 24
"""Calls and imports inside one another that are followed."""
MOST_VALUES = 10_000
"""Values of one list of choices."""
LARGEST_NARGS = 64
"""Words of one option; argparse makes a pattern of that length."""
_WORDS = ("ArgumentParser", "add_argument", "parse_args", "parse_known_args", "argv")
"""Words of modules that make parsers, or change what these read."""
_HARMLESS = frozenset(
    (
        *("set_defaults", "print_help", "print_usage", "format_help", "format_usage", "error", "exit", "get_default"),
        *("description", "usage", "epilog", "prog", "formatter_class"),
    )
)
"""Methods and attributes of parsers that change no option."""
_OF_CLASS = re.compile(r"_*[A-Z]\w*[a-z]")
_TYPES = ("int", "float", "str", "bool")
_NARGS = {"REMAINDER": "...", "PARSER": "A...", "OPTIONAL": "?", "ZERO_OR_MORE": "*", "ONE_OR_MORE": "+"}
_SAFE_DECORATORS = frozenset({"record", "no_grad", "inference_mode"})
_OF_DEEPSPEED = (
    *(("--deepspeed", True), ("--deepspeed_config", False), ("--deepscale", True), ("--deepscale_config", False)),
    *(("--deepspeed_mpi", True),),
)
"""What ``deepspeed.add_config_arguments`` declares, and whether it is a switch (deepspeed/__init__.py; releases before
0.3.13 lack the last one)."""


class DeclaredArgument(NamedTuple):
    """A call of ``add_argument``. ``given``: the keywords that matter, :data:`UNKNOWN` if they cannot be read;
    ``is_certain``: it is in no branch; ``group``: the index of its mutually exclusive group, or -1."""

    names: tuple[str, ...]
    given: Mapping[str, object]
    is_certain: bool = True
    group: int = -1

    @property
    def is_positional(self) -> bool:
        """Whether it has no name that begins with a dash."""
        return not self.names[0].startswith("-")


class CommandParser(NamedTuple):
    """A parser as it is when the program parses its command. ``groups``: whether each mutually exclusive group is
    required; ``known_only``: words that it does not know are accepted (``parse_known_args``); ``path``, ``line``:
    where it parses."""

    declared: tuple[DeclaredArgument, ...]
    groups: tuple[bool, ...]
    adds_help: bool
    abbreviates: bool
    conflicts: str
    from_file: str
    known_only: bool
    path: str
    line: int


@dataclass(eq=False)
class _Core:
    declared: list[DeclaredArgument] = field(default_factory=list)
    groups: list[bool] = field(default_factory=list)
    adds_help: bool = True
    abbreviates: bool = True
    conflicts: str = "error"
    from_file: str = ""
    is_open: bool = False


class _Parser(NamedTuple):
    """A parser, or a group of it."""

    core: _Core
    group: int = -1


class _BoundMethod(NamedTuple):
    """``parser.add_argument`` under another name."""

    parser: _Parser


class _Known(NamedTuple):
    value: object


class _Import(NamedTuple):
    """A name that an import binds: of a module, or a module itself (``name`` is empty)."""

    importer: str
    module: str
    name: str


@dataclass(eq=False)
class _Scope:
    script: Script
    around: _Scope | None = None
    names: dict[str, object] = field(default_factory=dict)
    returned: list[object] = field(default_factory=list)
    is_main: bool = False

    def find(self, name: str) -> object:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.around
        return None

    def has(self, name: str) -> bool:
        scope: _Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.around
        return scope is not None


@dataclass(eq=False)
class _Function:
    node: ast.FunctionDef
    scope: _Scope

    @cached_property
    def is_generator(self) -> bool:
        """Whether a call of it runs nothing."""
        inner = self.scope.script.inside(self.node, ast.expr)
        return any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inner)

    @property
    def uses_parser(self) -> bool:
        """Whether it has the name of a parser that is bound around it."""
        return any(isinstance(self.scope.find(one), _Parser) for one in self._names)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(one.id for one in self.scope.script.inside(self.node, ast.Name))


class _Ended(Exception):
    """The program has parsed its command, or too much of it was read."""


class _Returned(Exception):
    """A function has returned, whatever its branches do."""


def command_parsers(modules: ProjectFiles, location: str) -> tuple[CommandParser, ...]:
    """The parsers that are surely given the whole command of the program at ``location``, in the order in which it
    reaches them; each must accept it."""
    key = ("command parsers", location)
    if key not in modules.memo:
        reader = _ParserReader(modules)
        with suppress(_Ended, RecursionError):
            reader.module(location, is_main=True)
        modules.memo[key] = tuple(reader.found)
    found: tuple[CommandParser, ...] = modules.memo[key]
    return found


class _ParserReader:
    def __init__(self, modules: ProjectFiles) -> None:
        self.found: list[CommandParser] = []
        self._modules = modules
        self._left = MOST_STATEMENTS
        self._expressions = MOST_EXPRESSIONS
        self._doubt = 0  # branches and loops around
        self._is_doubtful_import = False
        self._argv_changed = False
        self._scopes: dict[str, _Scope | None] = {}
        self._running: list[object] = []

    def module(self, location: str, *, is_main: bool = False) -> _Scope | None:
        """Run the text of a module once."""
        if location not in self._scopes:
            self._scopes[location] = None  # modules that import each other
            script = self._modules.script_at(location)
            if script is None or len(self._running) > DEEPEST:
                return None
            self._scopes[location] = scope = _Scope(script, is_main=is_main)
            self._running.append(location)
            doubt, self._doubt = self._doubt, 0
            before, self._is_doubtful_import = self._is_doubtful_import, self._is_doubtful_import or doubt > 0
            self._run(script.tree.body, scope)
            self._doubt, self._is_doubtful_import = doubt, before
            self._running.pop()
        return self._scopes[location]

    # -- statements

    def _run(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            self._left -= 1
            if self._left < 0:
                raise _Ended
            handle = _STATEMENTS.get(type(statement))
            if handle is not None:
                handle(self, statement, scope)
            else:
                self._children(statement, scope)

    def _doubtful(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        """A body that may not run, or not to its end."""
        self._doubt += 1
        try:
            self._run(body, scope)
        except _Returned:
            self._doubt += 1  # all below is reached only if it is not
        finally:
            self._doubt -= 1

    def _define(self, node: ast.FunctionDef, scope: _Scope) -> None:
        decorators = {last_name(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}
        self._bind(node.name, _Function(node, scope) if decorators <= _SAFE_DECORATORS else None, scope)

    def _forget_name(self, node: ast.ClassDef | ast.AsyncFunctionDef, scope: _Scope) -> None:
        self._bind(node.name, None, scope)

    def _import(self, node: ast.Import, scope: _Scope) -> None:
        for one in node.names:
            name = one.asname or one.name.partition(".")[0]
            module = one.name if one.asname else name
            self._bind(name, _Import(scope.script.location, module, ""), scope)
            self._load(scope.script.location, one.name)

    def _import_from(self, node: ast.ImportFrom, scope: _Scope) -> None:
        module, importer = f"{'.' * node.level}{node.module or ''}", scope.script.location
        loaded = self._load(importer, module)
        for one in node.names:
            if one.name == "*":
                given = loaded.names if loaded is not None else {}
                scope.names.update({name: _Import(importer, module, name) for name in given})
            else:
                self._bind(one.asname or one.name, _Import(importer, module, one.name), scope)
                below = f"{module}{'' if module.endswith('.') else '.'}{one.name}"
                self._load(importer, below)

    def _load(self, importer: str, module: str) -> _Scope | None:
        """Run a module of the project if it has to do with parsers."""
        place = self._modules.located(importer, module)
        if place is None:
            return None
        text = self._modules.text_of(place)
        return self.module(place) if place in self._scopes or any(one in text for one in _WORDS) else None

    def _assign(self, node: ast.Assign | ast.AnnAssign, scope: _Scope) -> None:
        value = self._value(node.value, scope) if node.value is not None else None
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._assign_to(target, value, scope)

    def _assign_to(self, target: ast.expr, value: object, scope: _Scope) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value, scope)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._assign_to(one, None, scope)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, scope)
            if isinstance(owner, _Parser) and target.attr not in _HARMLESS:
                owner.core.is_open = True
            self._note_argv(target, scope)
            _open(value)
        else:
            self._children(target, scope)
            _open(value)

    def _bind(self, name: str, value: object, scope: _Scope) -> None:
        if self._doubt:
            old = scope.find(name)
            if isinstance(old, _Parser) and (not isinstance(value, _Parser) or value.core is not old.core):
                _open(old)
                _open(value)
            elif not isinstance(value, (_Parser, _Import, _Function)) or isinstance(old, _Function):
                value = None
        scope.names[name] = value

    def _return(self, node: ast.Return, scope: _Scope) -> None:
        value = self._value(node.value, scope) if node.value is not None else None
        scope.returned.append(value)
        raise _Returned

    def _if(self, node: ast.If, scope: _Scope) -> None:
        if _is_main_guard(node.test):
            self._run(node.body if scope.is_main else node.orelse, scope)
            return
        decided = self._decided(node.test, scope) if not self._doubt else None  # a loop may change the value
        if decided is not None:
            self._run(node.body if decided else node.orelse, scope)
            return
        self._children(node.test, scope)
        before = dict(scope.names)
        self._doubtful(node.body, scope)
        if node.orelse:
            merged, scope.names = scope.names, before
            self._doubtful(node.orelse, scope)
            self._merge(merged, scope)

    def _decided(self, test: ast.expr, scope: _Scope) -> bool | None:
        """What a test of a known value gives: ``if given is not None``, of a parameter that has its default."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand, scope)
            return None if inner is None else not inner
        if isinstance(test, ast.Name):
            value = self._value(test, scope)
            return bool(value.value) if isinstance(value, _Known) else None
        if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name) or len(test.ops) != 1:
            return None
        value, other = self._value(test.left, scope), self._value(test.comparators[0], scope)
        if not isinstance(value, _Known) or other != _Known(None) or not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            return None
        return (value.value is None) is isinstance(test.ops[0], ast.Is)

    def _merge(self, other: Mapping[str, object], scope: _Scope) -> None:
        """What two branches bind differently is unknown."""
        for name, value in other.items():
            own = scope.names.get(name)
            if name in scope.names and own is not value and own != value:
                _open(own)
                _open(value)
                scope.names[name] = None
            elif name not in scope.names:
                scope.names[name] = value

    def _loop(self, node: ast.For | ast.While | ast.AsyncFor, scope: _Scope) -> None:
        if isinstance(node, ast.While):
            self._children(node.test, scope)
        else:
            _open(self._value(node.iter, scope))
            self._doubt += 1
            self._assign_to(node.target, None, scope)
            self._doubt -= 1
        self._doubtful(node.body, scope)
        self._doubtful(node.orelse, scope)

    def _with(self, node: ast.With | ast.AsyncWith, scope: _Scope) -> None:
        for one in node.items:
            _open(self._value(one.context_expr, scope))
            if one.optional_vars is not None:
                self._assign_to(one.optional_vars, None, scope)
        self._run(node.body, scope)

    def _try(self, node: ast.Try, scope: _Scope) -> None:
        is_plain = not any(map(_catches_exit, node.handlers)) and len(node.body) == 1
        if is_plain and isinstance(node.body[0], (ast.Expr, ast.Assign)):
            self._run(node.body, scope)
        else:
            self._doubtful(node.body, scope)
        for handler in node.handlers:
            self._doubtful(handler.body, scope)
        self._doubtful(node.orelse, scope)
        self._doubtful(node.finalbody, scope)

    def _match(self, node: ast.Match, scope: _Scope) -> None:
        _open(self._value(node.subject, scope))
        for case in node.cases:
            self._doubtful(case.body, scope)

    def _delete(self, node: ast.Delete, scope: _Scope) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                scope.names[target.id] = None
            else:
                self._children(target, scope)

    # -- expressions

    def _children(self, node: ast.AST, scope: _Scope, *, doubtful: bool = False) -> None:
        """The parts of a node whose value is unknown: a parser in it may get any options."""
        self._doubt += doubtful
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                _open(self._value(part, scope))
            elif not isinstance(part, ast.stmt):
                self._children(part, scope)
        self._doubt -= doubtful

    def _value(self, node: ast.expr, scope: _Scope) -> object:
        """What an expression is, if it is of interest: a parser, a function, an import, or a known value."""
        self._expressions -= 1
        if self._expressions < 0:
            raise _Ended
        handle = _EXPRESSIONS.get(type(node))
        if handle is not None:
            return handle(self, node, scope)
        self._children(node, scope, doubtful=isinstance(node, _MAY_NOT_RUN))
        return None

    def _constant(self, node: ast.Constant, scope: _Scope) -> object:
        return _Known(node.value)

    def _name(self, node: ast.Name, scope: _Scope) -> object:
        return self._resolved(scope.find(node.id))

    def _resolved(self, value: object) -> object:
        """What an imported name is in its module, through modules that import it themselves."""
        for _ in range(DEEPEST):
            if not isinstance(value, _Import) or not value.name:
                return value
            if (value.module, value.name) == ("sys", "argv"):
                self._argv_changed = True
            below = f"{value.module}{'' if value.module.endswith('.') else '.'}{value.name}"
            if _OF_CLASS.match(value.name) and self._modules.located(value.importer, below) is None:
                return None  # its calls are not followed, and its module may import most of the project
            place = self._modules.located(value.importer, value.module)
            scope = self.module(place) if place is not None else None
            if scope is not None and value.name in scope.names:
                value = scope.names[value.name]
            elif self._modules.located(value.importer, below) is not None:
                return _Import(value.importer, below, "")
            else:
                return None
        return None

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> object:
        self._note_argv(node, scope)
        owner = self._value(node.value, scope)
        if isinstance(owner, _Parser) and node.attr == "add_argument":
            return _BoundMethod(owner)
        if isinstance(owner, _Parser) and node.attr not in _HARMLESS:
            _open(owner)
        if isinstance(owner, _Import):
            return self._resolved(_Import(owner.importer, owner.module, node.attr))
        return None

    def _note_argv(self, node: ast.Attribute, scope: _Scope) -> None:
        """Another use of ``sys.argv`` than to read it as a whole, or the name of the program."""
        if node.attr != "argv" or scope.script.name(node) != "sys.argv":
            return
        outer = scope.script.parent(node)
        is_name = isinstance(outer, ast.Subscript) and isinstance(outer.slice, ast.Constant) and outer.slice.value == 0
        is_read = isinstance(outer, ast.Call) and last_name(outer.func) in ("join", "print", "len", "info")
        is_stored = isinstance(getattr(outer, "ctx", None), (ast.Store, ast.Del))
        if is_stored or not (is_name or is_read):
            self._argv_changed = True

    def _several(self, node: ast.Tuple | ast.List | ast.Set, scope: _Scope) -> object:
        values = [self._value(one, scope) for one in node.elts]
        known = [one.value for one in values if isinstance(one, _Known)]
        if len(known) == len(values) and len(values) <= MOST_VALUES:
            return _Known(tuple(known))
        for one in values:
            _open(one)
        return None

    def _mapping(self, node: ast.Dict, scope: _Scope) -> object:
        """The keys alone, of which choices are made."""
        for one in node.values:
            _open(self._value(one, scope))
        keys = [self._value(one, scope) if one is not None else None for one in node.keys]
        known = [one.value for one in keys if isinstance(one, _Known)]
        return _Known(tuple(known)) if len(known) == len(keys) <= MOST_VALUES else None

    def _negative(self, node: ast.UnaryOp, scope: _Scope) -> object:
        value = self._value(node.operand, scope)
        if isinstance(node.op, ast.USub) and isinstance(value, _Known) and isinstance(value.value, (int, float)):
            return _Known(-value.value)
        _open(value)
        return None

    def _sum(self, node: ast.BinOp, scope: _Scope) -> object:
        left, right = self._value(node.left, scope), self._value(node.right, scope)
        if isinstance(node.op, ast.Add) and isinstance(left, _Known) and isinstance(right, _Known):
            if isinstance(left.value, str) and isinstance(right.value, str):
                return _short(left.value + right.value)
            if isinstance(left.value, tuple) and isinstance(right.value, tuple):
                return _short(left.value + right.value)
        _open(left)
        _open(right)
        return None

    def _text(self, node: ast.JoinedStr, scope: _Scope) -> object:
        """``f"--{name}"`` of a known name."""
        parts: list[str] = []
        for one in node.values:
            inner = one.value if isinstance(one, ast.FormattedValue) else one
            value = self._value(inner, scope)
            is_plain = not isinstance(one, ast.FormattedValue) or (one.conversion == -1 and one.format_spec is None)
            if not isinstance(value, _Known) or not isinstance(value.value, (str, int)) or not is_plain:
                _open(value)
                return None
            parts.append(str(value.value))
        return _short("".join(parts))

    def _walrus(self, node: ast.NamedExpr, scope: _Scope) -> object:
        value = self._value(node.value, scope)
        self._assign_to(node.target, value, scope)
        return value

    # -- calls

    def _call(self, node: ast.Call, scope: _Scope) -> object:
        func = node.func
        target: object = None
        if isinstance(func, ast.Attribute):
            owner = self._value(func.value, scope)
            if isinstance(owner, _Parser):
                return self._method(owner, func.attr, node, scope)
            if isinstance(owner, _Known):
                return owner if func.attr == "keys" and isinstance(owner.value, tuple) else self._given(node, scope)
            if isinstance(owner, _Import):
                target = self._resolved(_Import(owner.importer, owner.module, func.attr))
            self._note_argv(func, scope)
        else:
            target = self._value(func, scope)
        name = scope.script.name(func)
        if name == "argparse.ArgumentParser":
            return self._made(node, scope)
        if name == "deepspeed.add_config_arguments" and node.args:
            return self._with_deepspeed(self._value(node.args[0], scope))
        if isinstance(target, _BoundMethod):
            self._declare(target.parser, node, scope)
            return None
        if isinstance(target, _Function):
            return self._followed(target, node, scope)
        if isinstance(func, ast.Name) and not scope.has(func.id):
            return self._builtin(func.id, node, scope)
        return self._given(node, scope)

    def _given(self, node: ast.Call, scope: _Scope) -> object:
        """The arguments of a call that is not followed."""
        for one in (*node.args, *(word.value for word in node.keywords)):
            _open(self._value(one, scope))
        return None

    def _builtin(self, name: str, node: ast.Call, scope: _Scope) -> object:
        values = [self._value(one, scope) for one in node.args]
        known = [one.value for one in values if isinstance(one, _Known)]
        if len(known) == len(values) and values and not node.keywords:
            if name in ("list", "tuple", "set", "sorted") and isinstance(known[0], tuple) and len(known) == 1:
                return _Known(known[0])
            if name == "range" and all(isinstance(one, int) and abs(one) <= MOST_VALUES for one in known):
                return _Known(tuple(range(*known[:3]))) if 0 not in known[2:] else None  # type: ignore[call-overload]
        for one in values:
            if name not in ("print", "isinstance", "id", "type"):
                _open(one)
        for word in node.keywords:
            _open(self._value(word.value, scope))
        return None

    def _followed(self, function: _Function, node: ast.Call, scope: _Scope) -> object:
        values = [self._value(one, scope) for one in node.args]
        named = {one.arg: self._value(one.value, scope) for one in node.keywords}
        given = [*values, *named.values()]
        has_parser = any(isinstance(one, _Parser) for one in given)
        is_spread = None in named or any(isinstance(one, ast.Starred) for one in node.args)
        if (
            is_spread
            or function in self._running
            or len(self._running) > DEEPEST
            or (self._doubt and not has_parser and not function.uses_parser)
            or function.is_generator
        ):
            for one in given:
                _open(one)
            return None
        inner = _Scope(function.scope.script, function.scope)
        if not self._bind_arguments(function, values, named, inner):
            for one in given:
                _open(one)
            return None
        doubt = self._doubt
        self._running.append(function)
        with suppress(_Returned):
            self._run(function.node.body, inner)
        self._running.pop()
        self._doubt = doubt
        return _only(inner.returned)

    def _bind_arguments(
        self, function: _Function, values: Sequence[object], named: Mapping[str | None, object], inner: _Scope
    ) -> bool:
        """Bind the parameters of a call; false if it does not fit them."""
        taken = function.node.args
        places = [*taken.posonlyargs, *taken.args]
        for one, default in zip(places[::-1], taken.defaults[::-1], strict=False):
            inner.names[one.arg] = self._value(default, function.scope)
        for one, given in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
            inner.names[one.arg] = self._value(given, function.scope) if given is not None else None
        for more in (taken.vararg, taken.kwarg):
            if more is not None:
                inner.names[more.arg] = None
        names = [one.arg for one in (*places, *taken.kwonlyargs)]
        if len(values) > len(places) or any(name not in names for name in named):
            return False
        inner.names.update(zip(names, values, strict=False))
        inner.names.update({name: value for name, value in named.items() if name is not None})
        for name in names:
            inner.names.setdefault(name, None)
        return True

    # -- parsers

    def _made(self, node: ast.Call, scope: _Scope) -> object:
        given = {one.arg: one.value for one in node.keywords}
        core = _Core(is_open=None in given or any(isinstance(one, ast.Starred) for one in node.args))
        if len(node.args) > 4:  # parents and more by position
            core.is_open = True
        parents = given.pop("parents", None)
        if isinstance(parents, (ast.List, ast.Tuple)):
            for one in parents.elts:
                self._inherit(core, self._value(one, scope))
        elif parents is not None:
            core.is_open = True
        read = {name: self._value(value, scope) for name, value in given.items()}
        known = {name: one.value for name, one in read.items() if isinstance(one, _Known)}
        for name, default in _SETTINGS.items():
            value = known.get(name, UNKNOWN) if name in given else default
            core.is_open |= not isinstance(value, type(default)) and not (
                name == "fromfile_prefix_chars" and value is None
            )
            known[name] = value
        core.is_open |= known["prefix_chars"] != "-"
        core.adds_help, core.abbreviates = known["add_help"] is True, known["allow_abbrev"] is True
        core.conflicts, core.from_file = str(known["conflict_handler"]), str(known["fromfile_prefix_chars"] or "")
        return _Parser(core)

    def _inherit(self, core: _Core, parent: object) -> None:
        """The arguments of a parent, which declares no help of its own or ends the program with a conflict."""
        if not isinstance(parent, _Parser) or parent.core.is_open:
            core.is_open = True
            return
        first = len(core.groups)
        core.groups += parent.core.groups
        for one in parent.core.declared:
            core.declared.append(one._replace(group=one.group + first) if one.group >= 0 else one)

    def _with_deepspeed(self, parser: object) -> object:
        if isinstance(parser, _Parser):
            for name, is_switch in _OF_DEEPSPEED:
                given = {"action": "store_true"} if is_switch else {}
                parser.core.declared.append(DeclaredArgument((name,), given, is_certain=False))
        return parser

    def _method(self, parser: _Parser, name: str, node: ast.Call, scope: _Scope) -> object:
        if name == "add_argument":
            self._declare(parser, node, scope)
            return None
        if name == "add_argument_group":
            self._given(node, scope)
            return parser
        if name == "add_mutually_exclusive_group":
            required = next((one.value for one in node.keywords if one.arg == "required"), ast.Constant(value=False))
            value = self._value(required, scope)
            parser.core.groups.append(value == _Known(True) and not self._doubt)
            return _Parser(parser.core, len(parser.core.groups) - 1)
        if name in ("parse_args", "parse_known_args"):
            self._parse(parser, node, scope, known_only=name == "parse_known_args")
            return None
        self._given(node, scope)
        if name not in _HARMLESS:
            _open(parser)
        return None

    def _declare(self, parser: _Parser, node: ast.Call, scope: _Scope) -> None:
        names = [self._value(one, scope) for one in node.args]
        known = [one.value for one in names if isinstance(one, _Known) and isinstance(one.value, str)]
        if not known or len(known) != len(names) or not all(known):
            parser.core.is_open = True
            return
        given: dict[str, object] = {}
        for word in node.keywords:
            if word.arg is None:
                given.update(action=UNKNOWN, nargs=UNKNOWN)
            elif word.arg in _READ:
                given[word.arg] = self._setting(word.arg, word.value, scope)
            else:
                _open(self._value(word.value, scope))
        one = DeclaredArgument(tuple(map(str, known)), given, not self._doubt, parser.group)
        parser.core.declared.append(one)

    def _setting(self, name: str, node: ast.expr, scope: _Scope) -> object:
        """The value of a keyword of ``add_argument``: types and actions by their names."""
        if name == "type":
            plain = isinstance(node, ast.Name) and not scope.has(node.id)
            return node.id if plain and isinstance(node, ast.Name) and node.id in _TYPES else UNKNOWN
        dotted = scope.script.name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        if dotted == "argparse.BooleanOptionalAction":
            return "BooleanOptionalAction"
        if name == "nargs" and dotted.startswith("argparse."):
            return _NARGS.get(dotted.removeprefix("argparse."), UNKNOWN)
        value = self._value(node, scope)
        _open(value)
        if not isinstance(value, _Known):
            return UNKNOWN
        if name == "nargs" and isinstance(value.value, int) and not 0 < value.value <= LARGEST_NARGS:
            return UNKNOWN
        return value.value

    def _parse(self, parser: _Parser, node: ast.Call, scope: _Scope, *, known_only: bool) -> None:
        core = parser.core
        words = next((one.value for one in node.keywords if one.arg == "args"), node.args[0] if node.args else None)
        is_whole = words is None or _is_all_of_argv(words, scope) or self._value(words, scope) == _Known(None)
        if self._doubt or self._is_doubtful_import or core.is_open or self._argv_changed or not is_whole:
            return
        if any(one.arg is None for one in node.keywords):
            return
        self.found.append(
            CommandParser(
                tuple(core.declared),
                tuple(core.groups),
                core.adds_help,
                core.abbreviates,
                core.conflicts,
                core.from_file,
                known_only,
                scope.script.path,
                node.lineno,
            )
        )
        if not known_only:
            raise _Ended


_SETTINGS: dict[str, object] = {
    "add_help": True,
    "allow_abbrev": True,
    "conflict_handler": "error",
    "fromfile_prefix_chars": "",
    "prefix_chars": "-",
}
"""Settings of parsers that matter, and their defaults."""
_READ = frozenset({"action", "nargs", "type", "choices", "required", "default"})
_MAY_NOT_RUN = (*(ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),)


def _short(value: str | tuple[object, ...]) -> _Known | None:
    return _Known(value) if len(value) <= MOST_VALUES else None


def _open(value: object) -> None:
    """Something unknown gets a parser."""
    if isinstance(value, _BoundMethod):
        value = value.parser
    if isinstance(value, _Parser):
        value.core.is_open = True


def _only(returned: Sequence[object]) -> object:
    """What a function returns, if all of its branches return the same."""
    first = returned[0] if returned else None
    if all(one is first or one == first for one in returned):
        return first
    for one in returned:
        _open(one)
    return None


def _is_main_guard(test: ast.expr) -> bool:
    """``__name__ == "__main__"``."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = {ast.unparse(one) for one in (test.left, test.comparators[0])}
    return sides == {"__name__", "'__main__'"}


def _catches_exit(handler: ast.ExceptHandler) -> bool:
    """Whether a handler may catch what argparse raises to end the program."""
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return not all(last_name(one) in ("Exception", "KeyboardInterrupt", "RuntimeError", "ValueError") for one in kinds)


def _is_all_of_argv(node: ast.expr, scope: _Scope) -> bool:
    """``sys.argv[1:]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
        return False
    part = node.slice
    is_rest = (
        isinstance(part.lower, ast.Constant) and part.lower.value == 1 and part.upper is None and part.step is None
    )
    return is_rest and scope.script.name(node.value) == "sys.argv"


_STATEMENTS: dict[type[ast.stmt], Callable[..., None]] = {
    ast.FunctionDef: _ParserReader._define,
    ast.AsyncFunctionDef: _ParserReader._forget_name,
    ast.ClassDef: _ParserReader._forget_name,
    ast.Import: _ParserReader._import,
    ast.ImportFrom: _ParserReader._import_from,
    ast.Assign: _ParserReader._assign,
    ast.AnnAssign: _ParserReader._assign,
    ast.Return: _ParserReader._return,
    ast.If: _ParserReader._if,
    ast.For: _ParserReader._loop,
    ast.AsyncFor: _ParserReader._loop,
    ast.While: _ParserReader._loop,
    ast.With: _ParserReader._with,
    ast.AsyncWith: _ParserReader._with,
    ast.Try: _ParserReader._try,
    ast.Match: _ParserReader._match,
    ast.Delete: _ParserReader._delete,
}
_EXPRESSIONS: dict[type[ast.expr], Callable[..., Any]] = {
    ast.Constant: _ParserReader._constant,
    ast.Name: _ParserReader._name,
    ast.Attribute: _ParserReader._attribute,
    ast.Tuple: _ParserReader._several,
    ast.List: _ParserReader._several,
    ast.Set: _ParserReader._several,
    ast.Dict: _ParserReader._mapping,
    ast.UnaryOp: _ParserReader._negative,
    ast.BinOp: _ParserReader._sum,
    ast.NamedExpr: _ParserReader._walrus,
    ast.Call: _ParserReader._call,
    ast.JoinedStr: _ParserReader._text,
}
