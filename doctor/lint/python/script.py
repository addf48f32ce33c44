"""A Python file for rules: its syntax tree, whose names are resolved to imports or values.

Nothing is imported or run. Unresolved expressions have no name, and rules ignore them.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, Final, Protocol, TypeVar

from doctor.lint.engine.releases import Releases
from doctor.lint.engine.rule import FlowStep, location_of
from doctor.lint.launch.launch_file import EnvironmentSetting, EnvironmentSource
from doctor.lint.launch.partial_text import OUTPUT, unknown_mark
from doctor.lint.python.aliases import canonical
from doctor.lint.python.bindings import Bindings, LexicalScope

N = TypeVar("N", bound=ast.AST)
T = TypeVar("T")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DEPTH = 12
"""Steps through names that a value is followed; cycles end here."""
FOLLOWED = 60
"""Steps that a name is resolved; each attribute, call and alias is one."""
_OF_HOOKS = {"trainer": "lightning.pytorch.Trainer()", "pl_module": "lightning.pytorch.LightningModule()"}
"""Arguments of the hooks of Lightning's callbacks."""


_OWN_BODIES = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda})


_ENVIRONMENTS = ("os.environ", "os.environ.copy()")
"""The environment, and a copy of it for other programs."""


class UnknownValue:
    """A value that the file does not determine."""

    def __repr__(self) -> str:
        """Its name in code."""
        return "UNKNOWN"


UNKNOWN: Final = UnknownValue()


class ProjectModules(Protocol):
    """The other modules of a project. ``memo``: what was found in them, for all scripts."""

    memo: dict[tuple[str, ...], Any]

    @property
    def is_one_file(self) -> bool:
        """Whether there is one module only."""

    def has(self, importer: str, module: str) -> bool:
        """Whether the project has a module of that dotted name, as a file at ``importer`` imports it."""

    def named(self, importer: str, module: str) -> tuple[str, ...]:
        """The shown paths of the modules that a dotted name may mean in the file that is shown as ``importer``; of an
        absolute one, all that end with it."""

    def mentioning(self, word: str, *, launches: bool = False) -> tuple[tuple[str, str], ...]:
        """The shown path and the text of each script and launch file with a word; ``launches``: of launch files."""

    def find(self, importer: str, module: str, *, whole: bool) -> Any:
        """Its summary; ``None`` if there is none, or it cannot be read, or, unless ``whole``, if neither it nor what it
        imports has a word of collectives."""

    def text_at(self, shown: str) -> str:
        """The text of a script or launch file by its shown path; empty if there is none."""

    def can_run(self, shown: str) -> bool:
        """Whether the imports of the script that is shown by this path may succeed."""

    def notebooks(self, word: str) -> tuple[str, ...]:
        """The texts of the notebooks with a word."""

    def is_whole(self, location: str) -> bool:
        """Whether all of the repository of the file at ``location`` is linted, as far as it shows."""

    def root_of(self, location: str) -> str:
        """The folder that was given to be linted, in which the file at ``location`` was found; empty if it is none."""

    def is_copied_project(self, folder: str, root: str) -> bool:
        """Whether a folder below ``root`` has a license of its own, or a page that says how to cite it."""

    def pages_in(self, folder: str) -> tuple[str, ...]:
        """The texts of the pages of a folder."""

    def pages_at_root(self, location: str) -> tuple[str, ...]:
        """The texts of the pages of the folder that :meth:`root_of` gives."""

    def installs(self, location: str) -> bool:
        """Whether the file at ``location`` is of a package that its project installs, which others may import."""

    def pages(self, location: str) -> tuple[str, ...]:
        """The texts of the pages, Dockerfiles and Makefiles that may show how the file at ``location`` is started."""

    def all_pages(self, location: str) -> tuple[str, ...]:
        """The texts of the pages, Dockerfiles and Makefiles of the whole project of the file at ``location``."""

    def console_commands(self, location: str) -> Mapping[str, str]:
        """The commands that the project of the file at ``location`` installs, with the dotted modules that they run."""

    def may_install(self, location: str, word: str) -> bool:
        """Whether the requirements of the project of the file at ``location`` have a word, as far as they are known."""

    def texts_around(self, location: str) -> Iterator[str]:
        """The text of a module, and of those of the project that it imports, the nearest first."""

    def fails_to_import(self, location: str) -> bool:
        """Whether a module that no launch file names imports a name from a module of the project that has none of that
        name, or every module of the project that imports it does."""

    def lacks(self, importer: str, module: str, name: str) -> bool:
        """Whether a module of the project is the one that a file imports, which nothing that shows starts, and surely
        has no such name."""


class Script(EnvironmentSource):
    """``path`` as shown; ``text`` of the file; ``releases``: of distributions, installed or given; ``processors``: of
    the machine that will run it, if known; ``modules``: of its project, and ``location``: its absolute path there.
    Raises as :func:`parsed`."""

    def __init__(
        self,
        path: str,
        text: str,
        *,
        releases: Mapping[str, str] | None = None,
        processors: int | None = None,
        modules: ProjectModules | None = None,
        location: str = "",
    ) -> None:
        self.path = path
        self.modules = modules
        self.location = location
        self.text = text
        self.releases: Mapping[str, str] = {} if releases is None else releases
        self.processors = processors
        self.tree = parsed(text)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._kinds: dict[type, list[ast.AST]] = {}
        self._children: dict[ast.AST, list[ast.AST]] = {}  # the last one first
        self._names: dict[ast.AST, str] = {}
        self._bound_names: dict[tuple[ast.AST, str], str] = {}
        parents, kinds = self._parents, self._kinds  # in the order of the text
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            kind = node.__class__
            kinds.setdefault(kind, []).append(node)
            if kind is ast.Name or kind is ast.Constant:  # most of a tree; they have no children to visit
                continue
            children = children_of(node)
            for child in children:
                parents[child] = node
            children.reverse()
            self._children[node] = children
            stack += children

    def states_release_of(self, distribution: str) -> bool:
        """Whether a release is more than that of the interpreter that runs lint: it was given, the project bounds it,
        or the file is linted alone."""
        return not isinstance(self.releases, Releases) or self.releases.is_bounded(distribution)

    # -- the tree

    def all(self, kind: type[N]) -> Sequence[N]:
        """Every node of one concrete type, in the order of the text."""
        return self._kinds.get(kind, [])  # type: ignore[return-value]

    @cached_property
    def functions(self) -> tuple[FunctionNode, ...]:
        """All functions, sync and async."""
        return (*self.all(ast.FunctionDef), *self.all(ast.AsyncFunctionDef))

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node around it."""
        return self._parents.get(node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around it, the nearest first."""
        while (node := self._parents.get(node)) is not None:  # type: ignore[assignment]
            yield node

    def branches(self, node: ast.AST) -> Iterator[tuple[ast.If, bool]]:
        """The ``if`` statements around it whose test it is no part of, the nearest first, and whether it is in the body
        and not in the ``else``."""
        inner = node
        for outer in self.around(node):
            if isinstance(outer, ast.If) and inner is not outer.test:
                yield outer, inner in outer.body
            inner = outer

    def nearest(self, node: ast.AST, *kinds: type[N]) -> N | None:
        """The nearest node of these types around it."""
        return next((one for one in self.around(node) if isinstance(one, kinds)), None)

    def function_of(self, node: ast.AST) -> FunctionNode | None:
        """The function in whose body it stands."""
        found = (one for one in self.around(node) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
        return next(found, None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose body it stands."""
        return self.nearest(node, ast.ClassDef)

    def inside(self, node: ast.AST, kind: type[N]) -> Iterator[N]:
        """The nodes of a type below ``node``, without those in nested functions, in the order of the text."""
        stack = [node]
        below = self._children
        while stack:
            current = stack.pop()
            if isinstance(current, kind):
                yield current
            if current is node or current.__class__ not in _OWN_BODIES:
                stack += below.get(current, ())

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds it."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def text_of(self, node: ast.AST, longest: int = 60) -> str:
        """Its source on one line, cut to ``longest`` characters."""
        words = " ".join(ast.unparse(node).split())
        return words if len(words) <= longest else words[: longest - 1] + "…"

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, for what reads one of them for each call: splitting it each time is quadratic."""
        return self.text.splitlines()

    # -- names and values

    @cached_property
    def bindings(self) -> Bindings:
        """What every name is bound to."""
        return Bindings(self.tree, self._parents, self._kinds)

    def name(self, node: ast.expr) -> str:
        """The dotted name of an expression, resolved through imports, aliases and simple assignments: ``torch.load``;
        the result of a call ends with ``()``: ``torch.utils.data.DataLoader()``. A function or class of this file
        begins with a dot: ``.train``. An attribute of ``self`` that its class does not define belongs to the first
        base: ``lightning.pytorch.LightningModule().log``. Empty if unknown."""
        return self._follow(node, FOLLOWED)

    def _follow(self, node: ast.expr, depth: int) -> str:
        """Resolve each node once: chains of assignments share parts."""
        if node not in self._names:
            if depth == 0:
                return ""
            self._names[node] = ""  # while it is followed: cycles end
            self._names[node] = self._followed(node, depth)
        return self._names[node]

    def _followed(self, node: ast.expr, depth: int) -> str:
        if isinstance(node, ast.Name):
            return self._follow_name(node, depth)
        if isinstance(node, ast.Attribute):
            return self._follow_attribute(node, depth)
        if isinstance(node, ast.Call):
            made = self._follow(node.func, depth - 1)
            return f"{made}()" if made else ""
        if isinstance(node, (ast.Await, ast.NamedExpr)):
            return self._follow(node.value, depth - 1)
        return ""

    def _follow_name(self, node: ast.Name, depth: int) -> str:
        scope = self.bindings.scope_of(node, node.id)
        if scope is None:
            return ""
        key = (scope.node, node.id)
        if key not in self._bound_names:
            self._bound_names[key] = ""  # as above
            names = {self._bound(binding, depth) for binding in scope.names[node.id]}
            names.discard("None")  # a variable without a value yet
            self._bound_names[key] = names.pop() if len(names) == 1 else ""
        return self._bound_names[key]

    def _bound(self, binding: ast.AST | str, depth: int) -> str:
        if isinstance(binding, str):
            return canonical(binding)
        if isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return f".{binding.name}"
        if isinstance(binding, ast.arg):
            return self._follow_parameter(binding, depth)
        if isinstance(binding, ast.Constant) and binding.value is None:
            return "None"
        return self._follow(binding, depth - 1) if isinstance(binding, ast.expr) else ""

    def _follow_parameter(self, parameter: ast.arg, depth: int) -> str:
        """Resolve a parameter by its annotation; also ``self`` and the arguments of Lightning's callback hooks."""
        if parameter.annotation is not None:
            made = self._follow(_without_none(parameter.annotation), depth - 1)
            return f"{made}()" if made else ""
        owner = self.nearest(parameter, ast.ClassDef)
        function = self.function_of(parameter)
        if owner is None or function is None or self.class_of(function) is not owner:
            return ""
        if function.args.args and function.args.args[0] is parameter:
            return f".{owner.name}()"
        is_hook = parameter.arg in _OF_HOOKS and self.derives(owner, "lightning.pytorch.Callback")
        return _OF_HOOKS[parameter.arg] if is_hook else ""

    def _follow_attribute(self, node: ast.Attribute, depth: int) -> str:
        base = self._follow(node.value, depth - 1)
        if not base:
            return ""
        if not (base.startswith(".") and base.endswith("()")):
            return canonical(f"{base}.{node.attr}")
        owner = self.bindings.classes.get(base[1:-2])
        return self._member(owner, node.attr, depth) if owner is not None else ""

    def _member(self, owner: ast.ClassDef, attribute: str, depth: int) -> str:
        for one in self._lineage(owner):
            if bound := self.bindings.members(one).get(attribute):
                names = {self._bound(binding, depth - 1) for binding in bound} - {"None"}
                found = names.pop() if len(names) == 1 else ""
                return f".{one.name}().{attribute}" if found.startswith(".") and not found.endswith("()") else found
        base = next((name for name in self.bases(owner) if not name.startswith(".")), "")
        return canonical(f"{base}().{attribute}") if base else ""

    def _lineage(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        found = [owner]
        for one in found:
            for base in one.bases:
                parent = self.bindings.classes.get(base.id) if isinstance(base, ast.Name) else None
                if parent is not None and parent not in found:
                    found.append(parent)
        return found

    def bases(self, owner: ast.ClassDef) -> tuple[str, ...]:
        """Names of the classes that a class derives from, through those of this file."""
        names = (self.name(base) for one in self._lineage(owner) for base in one.bases)
        return tuple(dict.fromkeys(filter(None, names)))

    def derives(self, owner: ast.ClassDef | None, *names: str) -> bool:
        """Whether a class derives from one of ``names``, as far as this file shows."""
        return owner is not None and not set(names).isdisjoint(self.bases(owner))

    def values_of(self, node: ast.expr) -> tuple[ast.expr, ...]:
        """The expressions that a name or an attribute of ``self`` is assigned; other expressions themselves."""
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_self(node.value)):
            return tuple(one for one in self._bound_to(node) if isinstance(one, ast.expr))
        return (node,)

    def _bound_to(self, node: ast.Name | ast.Attribute) -> Sequence[ast.AST | str]:
        if isinstance(node, ast.Name):
            scope = self.bindings.scope_of(node, node.id)
            return scope.names[node.id] if scope is not None else ()
        owner = self.class_of(node) if _is_self(node.value) else None
        return self.bindings.members(owner).get(node.attr, ()) if owner is not None else ()

    def value(self, node: ast.expr | None, depth: int = DEPTH) -> object:
        """The value of a literal, or of a name with a single literal: numbers, strings, booleans, ``None``, and tuples
        and lists (as tuples) of them; else :data:`UNKNOWN`."""
        if node is None or depth == 0:
            return UNKNOWN
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            values = tuple(self.value(one, depth - 1) for one in node.elts)
            return UNKNOWN if UNKNOWN in values else values
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand, depth - 1)
            return -number if isinstance(number, (int, float)) else UNKNOWN
        if isinstance(node, (ast.Name, ast.Attribute)):
            bound = self._bound_to(node)
            if len(bound) == 1 and isinstance(bound[0], ast.expr):
                return self.value(bound[0], depth - 1)
        return UNKNOWN

    # -- the environment

    @cached_property
    def settings(self) -> tuple[EnvironmentSetting, ...]:
        """The variables that it sets by ``os.environ`` and ``os.putenv``; unit tests set faulty ones on purpose."""
        if is_test(self):
            return ()
        found = [
            EnvironmentSetting(name, self._text(value), location_of(at), is_certain=self._is_certain(at))
            for at, key, value in self._written()
            if isinstance(name := self.value(key), str)
        ]
        return tuple(sorted(found, key=lambda one: one.place))

    def _written(self) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
        """The node, the key and the value of each variable."""
        for statement in self.all(ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Subscript) and self.name(target.value) in _ENVIRONMENTS:
                    yield statement, target.slice, statement.value
        for call in self.calls(*(f"{one}.setdefault" for one in _ENVIRONMENTS), "os.putenv"):
            if len(call.args) == 2:
                yield call, call.args[0], call.args[1]
        for call in self.calls(*(f"{one}.update" for one in _ENVIRONMENTS)):
            yield from ((word, ast.Constant(word.arg), word.value) for word in call.keywords if word.arg)
            yield from _pairs(call.args[0] if call.args else None)
        for merged in self.all(ast.AugAssign):
            if isinstance(merged.op, ast.BitOr) and self.name(merged.target) in _ENVIRONMENTS:
                yield from _pairs(merged.value)

    def _text(self, value: ast.expr) -> str:
        """The text of a value, as in launch files: ``str(29500)`` is known."""
        if isinstance(value, ast.Call) and last_name(value.func) == "str" and len(value.args) == 1:
            found = self.value(value.args[0])
            known = str(found) if isinstance(found, (str, int, float)) else None
        else:
            found = self.value(value)
            known = found if isinstance(found, str) else None
        return unknown_mark(OUTPUT) if known is None else known

    def _is_certain(self, node: ast.AST) -> bool:
        return not any(isinstance(one, (ast.If, ast.For, ast.While, ast.Try, ast.IfExp)) for one in self.around(node))

    # -- calls

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        """Calls by the last part of the name as written; for imported names and attributes of ``self``, which may be
        aliases, by that of the resolved name."""
        found: dict[str, list[ast.Call]] = {}
        for call in self.all(ast.Call):
            last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if not last or (isinstance(call.func, ast.Attribute) and _is_self(call.func.value)):
                last = self.name(call.func).rpartition(".")[2] or last
            found.setdefault(last, []).append(call)
        return found

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Calls of these dotted names, in the order of the text."""
        wanted = set(names)
        lasts = dict.fromkeys(name.rpartition(".")[2] for name in names)
        likely = (call for last in lasts for call in self._calls.get(last, ()))
        found = [call for call in likely if self.name(call.func) in wanted]
        yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def method_calls(self, *methods: str) -> Iterator[ast.Call]:
        """Calls ``x.method(…)`` of any object by the bare name of the method, in the order of the text."""
        found = [call for method in dict.fromkeys(methods) for call in self._methods.get(method, ())]
        yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def _methods(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.all(ast.Call):
            if isinstance(call.func, ast.Attribute):
                found.setdefault(call.func.attr, []).append(call)
        return found

    def argument(self, call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
        """The argument of that name or position, also of a dictionary that is unpacked and known; ``None`` if it is not
        given, or unpacked (:meth:`is_open`)."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
        if place is not None and place < len(call.args):
            before = call.args[: place + 1]
            return None if any(isinstance(one, ast.Starred) for one in before) else before[-1]
        unpacked = (self._entries(one.value) for one in call.keywords if one.arg is None)
        return next((found[name] for found in unpacked if found is not None and name in found), None)

    def is_open(self, call: ast.Call) -> bool:
        """Whether a call unpacks unknown arguments (``*args``, ``**options``)."""
        unpacked = (one.value for one in call.keywords if one.arg is None)
        return any(isinstance(one, ast.Starred) for one in call.args) or any(
            self._entries(one) is None for one in unpacked
        )

    def _entries(self, unpacked: ast.expr) -> Mapping[str, ast.expr] | None:
        """The entries of a dictionary that is written out, or is the only value of a name which nothing changes:
        ``options = dict(batch_size=8)``, ``DataLoader(data, **options)``; ``None`` if they are unknown."""
        if not isinstance(unpacked, ast.Name):
            return _written_out(unpacked)
        scope = self.scope_of(unpacked, unpacked.id)
        bound = scope.names[unpacked.id] if scope is not None else ()
        if len(bound) != 1 or not isinstance(bound[0], ast.expr):
            return None
        if bound[0] not in self._known_entries:
            uses = [one for one in self.all(ast.Name) if one.id == unpacked.id and isinstance(one.ctx, ast.Load)]
            own = (one for one in uses if self.scope_of(one, one.id) is scope)
            is_kept = all(self._only_reads(one) for one in own)
            self._known_entries[bound[0]] = _written_out(bound[0]) if is_kept else None
        return self._known_entries[bound[0]]

    @cached_property
    def _known_entries(self) -> dict[ast.expr, Mapping[str, ast.expr] | None]:
        return {}

    def _only_reads(self, name: ast.Name) -> bool:
        """Whether a use of a dictionary unpacks it, or reads an entry."""
        around = self.parent(name)
        if isinstance(around, ast.Subscript):
            return around.value is name and isinstance(around.ctx, ast.Load)
        return isinstance(around, ast.keyword) and around.arg is None

    def is_given(self, call: ast.Call, name: str, place: int | None = None) -> bool:
        """Whether an argument is given, or may be unpacked."""
        return self.argument(call, name, place) is not None or self.is_open(call)

    def uses_of(self, function: FunctionNode) -> list[ast.Name]:
        """The places of this file that name a function by its own name."""
        return [one for one in self.all(ast.Name) if one.id == function.name and self.definition(one) is function]

    def definition(self, node: ast.expr) -> FunctionNode | None:
        """The function of this file, or method of a class of this file, that an expression names."""
        name = self.name(node)
        if not name.startswith("."):
            return None
        bound = self._bound_to(node) if isinstance(node, ast.Name) else ()
        if len(bound) == 1 and isinstance(bound[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
            return bound[0]  # of functions with the same name, the one in this scope
        above = [one for one in bound if isinstance(one, FunctionNode) and one.lineno < node.lineno]
        if len(bound) > 1 and above and self.function_of(node) is None:
            return (
                max(above, key=lambda one: one.lineno) if all(isinstance(one, FunctionNode) for one in bound) else None
            )
        if "()." not in name:
            return self.bindings.functions.get(name[1:])
        owner, _, method = name[1:].partition("().")
        own = self.class_of(node) if isinstance(node, ast.Attribute) and _is_self(node.value) else None
        if own is not None and own.name == owner:  # of classes with the same name, the one around it
            return next((one for one in own.body if isinstance(one, FunctionNode) and one.name == method), None)
        return self.bindings.methods.get((owner, method))

    def class_definition(self, node: ast.expr) -> ast.ClassDef | None:
        """The class of this file that an expression names or is an instance of."""
        name = self.name(node)
        return self.bindings.classes.get(name[1:].removesuffix("()")) if name.startswith(".") else None

    def scope_of(self, node: ast.AST, name: str) -> LexicalScope | None:
        """The scope that binds a name used at ``node``."""
        return self.bindings.scope_of(node, name)


def is_test(script: Script) -> bool:
    """Whether a file is a unit test, whose faults may be intended."""
    if re.search(r"(?:^|[\\/])tests?[\\/](?:.*[\\/])?test_\w+\.py$", script.path):
        return True
    named = re.search(r"(?:^|[\\/])test_\w+\.py$|_test\.py$|(?:^|[\\/])tests?[\\/]", script.path)
    tests = any(one.name.startswith("test_") for one in script.functions)
    return named is not None and (
        tests or any(one.name == "pytest" for node in script.all(ast.Import) for one in node.names)
    )


def per_script(function: Callable[[Script], T]) -> Callable[[Script], T]:
    """Make a function of a script compute its result once per script."""
    key = f"{function.__module__}.{function.__name__}"

    @wraps(function)
    def kept(script: Script) -> T:
        if key not in script.__dict__:
            script.__dict__[key] = function(script)
        found: T = script.__dict__[key]
        return found

    return kept


def step_at(script: Script, node: ast.AST, note: str = "") -> FlowStep:
    """A step of the flow at a node; statements with a body by their first line."""
    if isinstance(node, (ast.If, ast.While)):
        code = f"{'if' if isinstance(node, ast.If) else 'while'} {script.text_of(node.test, 90)}:"
    elif isinstance(node, ast.Match):
        code = f"match {script.text_of(node.subject, 90)}:"
    elif isinstance(node, ast.ExceptHandler):
        code = f"except {script.text_of(node.type, 90)}:" if node.type is not None else "except:"
    else:
        code = script.text_of(node, 90)
    return FlowStep(script.path, getattr(node, "lineno", 1), code, note)


def last_name(node: ast.AST) -> str:
    """The last part of what a name, an attribute or a call is written as: ``load`` of ``torch.load``; else empty."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def parsed(text: str) -> ast.Module:
    """The tree of a text, without the warnings of Python.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is not Python of this interpreter.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def module_of(modules: ProjectModules, shown: str, text: str) -> Script:
    """Another module of a project, with its path as shown.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is not Python of this interpreter.
    """
    return Script(shown, text, modules=modules, location=os.path.abspath(shown))  # noqa: PTH100 - links are kept


def is_python(text: str) -> bool:
    """Whether this interpreter can parse a text."""
    try:
        parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def children_of(node: ast.AST) -> list[ast.AST]:
    """The child nodes in the order of the text, without operators and the like; twice as fast as
    :func:`ast.iter_child_nodes`, which dominates the time to read a file."""
    found: list[ast.AST] = []
    kind = node.__class__
    names = _CHILD_FIELDS.get(kind)
    if names is None:
        names = _CHILD_FIELDS[kind] = tuple(name for name in kind._fields if name not in _NO_CHILDREN)
    for name in names:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


_CHILD_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}
_NO_CHILDREN = frozenset({"ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment"})
"""Fields with text, or with nodes of no content."""


def _written_out(node: ast.expr) -> Mapping[str, ast.expr] | None:
    """The entries of ``{"a": 1}`` and of ``dict(a=1)``; ``None`` for other expressions."""
    if isinstance(node, ast.Dict):
        keys = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
        pairs: list[tuple[object, ast.expr]] = list(zip(keys, node.values, strict=True))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        pairs = [(one.arg, one.value) for one in node.keywords]
    else:
        return None
    entries = {key: value for key, value in pairs if isinstance(key, str)}
    return entries if len(entries) == len(pairs) else None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _pairs(node: ast.expr | None) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    if isinstance(node, ast.Dict):
        yield from ((key, key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None)


def _without_none(annotation: ast.expr) -> ast.expr:
    """``X | None`` and ``Optional[X]`` as ``X``. Quoted names are not in the tree."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return annotation.left
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, (ast.Name, ast.Attribute)):
        return annotation.slice if last_name(annotation.value) == "Optional" else annotation
    return annotation
