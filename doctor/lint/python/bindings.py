"""Collects what each name of a file is bound to, by scope and regardless of order."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Binding = ast.AST | str
"""What a name is bound to: the dotted name of an import, a definition, an expression, a parameter; another node if the
value is unknown (a loop variable, a part of a tuple)."""
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass
class LexicalScope:
    """The names that are bound in a module, class or function."""

    node: ast.AST
    names: dict[str, list[Binding]] = field(default_factory=dict)

    def bind(self, name: str, binding: Binding) -> None:
        """One more value."""
        self.names.setdefault(name, []).append(binding)


class Bindings:
    """The scopes of ``tree``; ``kinds``: its nodes by type."""

    def __init__(self, tree: ast.Module, parents: Mapping[ast.AST, ast.AST], kinds: Mapping[type, list[Any]]) -> None:
        self._parents = parents
        self._scopes: dict[ast.AST, LexicalScope] = {}
        self._members: dict[ast.ClassDef, dict[str, list[Binding]]] | None = None
        self._whole: set[ast.ClassDef] = set()
        kinds_of_assignment = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)
        self._assignments = [node for kind in kinds_of_assignment for node in kinds.get(kind, ())]
        self.classes: dict[str, ast.ClassDef] = {one.name: one for one in kinds.get(ast.ClassDef, ())}
        defined = [*kinds.get(ast.FunctionDef, ()), *kinds.get(ast.AsyncFunctionDef, ())]
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.methods: dict[tuple[str, str], ast.FunctionDef | ast.AsyncFunctionDef] = {}
        for one in defined:
            owner = parents.get(one)
            if isinstance(owner, ast.ClassDef):
                self.methods[owner.name, one.name] = one
            else:
                self.functions[one.name] = one
        self.of_the_module = self._scope(tree)
        self._bind_all(kinds)

    def _bind_all(self, kinds: Mapping[type, list[Any]]) -> None:
        for kind, read in _READERS.items():
            for node in kinds.get(kind, ()):
                for name, binding in read(node):
                    self._scope_around(node).bind(name, binding)
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda):
            for node in kinds.get(kind, ()):
                given = node.args
                for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
                    if parameter is not None:
                        self._scope(node).bind(parameter.arg, parameter)
        for kind in (ast.Global, ast.Nonlocal):
            for node in kinds.get(kind, ()):
                self._share(node)

    def _share(self, node: ast.Global | ast.Nonlocal) -> None:
        """Move names that a function assigns to the outer scope that declares them."""
        inner = self._scope_around(node)
        if isinstance(inner.node, ast.Module):
            return  # `global` outside of functions says nothing
        outer = self._scope_around(inner.node)
        for name in node.names:
            for binding in inner.names.pop(name, ()):
                while isinstance(node, ast.Global) and not isinstance(outer.node, ast.Module):
                    outer = self._scope_around(outer.node)
                outer.bind(name, binding)

    def _scope(self, node: ast.AST) -> LexicalScope:
        return self._scopes.setdefault(node, LexicalScope(node))

    def _scope_around(self, node: ast.AST) -> LexicalScope:
        while (node := self._parents[node]) and not isinstance(node, _SCOPES):
            pass
        return self._scope(node)

    def scope_of(self, node: ast.AST, name: str) -> LexicalScope | None:
        """The scope that binds a name used at ``node``; methods do not see the names of their class."""
        current: ast.AST | None = node
        is_first = True
        while current is not None:
            if isinstance(current, _SCOPES):
                scope = self._scopes.get(current)
                visible = is_first or not isinstance(current, ast.ClassDef)
                if scope is not None and visible and name in scope.names:
                    return scope
                is_first = False
            current = self._parents.get(current)
        return None

    def members(self, owner: ast.ClassDef) -> Mapping[str, list[Binding]]:
        """The attributes that a class and its methods give to instances."""
        if self._members is None:
            self._members = {}
            for node in self._assignments:
                for target, value in _assigned(node):
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        self._give(node, target.value.id, target.attr, value)
        own = self._members.setdefault(owner, {})
        if owner not in self._whole:
            self._whole.add(owner)
            for name, bindings in self._scope(owner).names.items():
                own[name] = [*bindings, *own.get(name, ())]
        return own

    def _give(self, node: ast.AST, base: str, attribute: str, value: Binding) -> None:
        """Bind ``self.attribute = value`` in the classes of the methods around it; any name may stand for ``self``."""
        members = self._members if self._members is not None else {}
        while (node := self._parents.get(node)) is not None:  # type: ignore[assignment]
            method, owner = node, self._parents.get(node)
            if not isinstance(owner, ast.ClassDef) or not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if method.args.args and method.args.args[0].arg == base:
                members.setdefault(owner, {}).setdefault(attribute, []).append(value)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, Binding]]:
    """Targets of an assignment with their values; parts of a tuple get theirs if it is written out."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _paired(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, node


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, Binding]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    whole = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
    for place, part in enumerate(target.elts):
        if whole and isinstance(value, (ast.Tuple, ast.List)):
            yield from _paired(part, value.elts[place])
        else:
            yield (part.value if isinstance(part, ast.Starred) else part), ast.Starred(value=value, ctx=ast.Load())


def _names_assigned(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    for target, value in _assigned(node):
        if isinstance(target, ast.Name):
            yield target.id, value


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Binding]]:
    package = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else None
    for one in node.names:
        if package is not None:
            yield one.asname or one.name, f"{package}{'' if package.endswith('.') else '.'}{one.name}"
        else:
            yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2


def _looped(node: ast.For | ast.AsyncFor | ast.comprehension) -> Iterator[tuple[str, Binding]]:
    for one in ast.walk(node.target):
        if isinstance(one, ast.Name):
            yield one.id, node


def _opened(node: ast.With | ast.AsyncWith) -> Iterator[tuple[str, Binding]]:
    for item in node.items:
        if isinstance(item.optional_vars, ast.Name):
            yield item.optional_vars.id, node


def _named(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler,
) -> Iterator[tuple[str, Binding]]:
    if node.name:
        yield node.name, node


_READERS: dict[type, Any] = {
    ast.Import: _imported,
    ast.ImportFrom: _imported,
    ast.FunctionDef: _named,
    ast.AsyncFunctionDef: _named,
    ast.ClassDef: _named,
    ast.Assign: _names_assigned,
    ast.AnnAssign: _names_assigned,
    ast.NamedExpr: _names_assigned,
    ast.AugAssign: _names_assigned,
    ast.For: _looped,
    ast.AsyncFor: _looped,
    ast.comprehension: _looped,
    ast.With: _opened,
    ast.AsyncWith: _opened,
    ast.ExceptHandler: _named,
}
