"""Rewrites the text of a file with LibCST, keeping its formatting; no other module imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from doctor.lint.engine.discovery import LINE_END
from doctor.lint.engine.rule import (
    DropArgument,
    Edit,
    InsertStatement,
    RenameArgument,
    ReplaceExpression,
    SetArgument,
    SourceLocation,
)

Start = tuple[int, int]
Span = tuple[Start, Start]
Node = TypeVar("Node", bound=cst.CSTNode)


def rewrite(text: str, wishes: Sequence[Sequence[Edit]]) -> tuple[str, tuple[int, ...]]:
    """The text with the edits of each wish, all or none of them, and the indices of the granted wishes.

    A wish whose place is not found, or that conflicts with an earlier one, is left for another pass.

    Raises:
        libcst.ParserSyntaxError: the text, or what an edit puts into it, is no Python that LibCST knows.
    """
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    nodes = _NodeIndex(wrapper, LINE_END.split(text))
    plan = _EditPlan(nodes)
    granted = tuple(number for number, edits in enumerate(wishes) if plan.add(edits))
    if not granted:
        return text, ()
    return wrapper.module.visit(_Rewriter(plan.steps, wrapper.module.config_for_parsing)).code, granted


class _NodeIndex:
    """The nodes of a module by place: lines from 1, columns in characters from 0."""

    def __init__(self, wrapper: MetadataWrapper, lines: list[str]) -> None:
        self._lines = lines
        self._expressions: dict[Span, cst.BaseExpression] = {}
        self._statements: dict[Start, cst.CSTNode] = {}
        self.standing: set[cst.CSTNode] = set()  # those that may have another before them, unlike an ``elif``
        self.spans: dict[cst.CSTNode, Span] = {}
        for node, range_ in wrapper.resolve(PositionProvider).items():
            if not isinstance(range_, CodeRange):
                continue
            span = (range_.start.line, range_.start.column), (range_.end.line, range_.end.column)
            self.spans[node] = span
            if isinstance(node, cst.BaseExpression):
                self._expressions[span] = node
            elif isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                self._statements[span[0]] = node
            elif isinstance(node, (cst.IndentedBlock, cst.Module)):
                self.standing.update(node.body)

    def expression(self, place: SourceLocation) -> cst.BaseExpression | None:
        """The expression at a place; its end decides, because nested calls begin at the same place."""
        if place.end_line is None or place.end_column is None:
            return None
        start = self._at(place.line, place.column)
        return self._expressions.get((start, self._at(place.end_line, place.end_column)))

    def statement(self, place: SourceLocation) -> cst.CSTNode | None:
        return self._statements.get(self._at(place.line, place.column))

    def _at(self, line: int, column: int) -> Start:
        """A place of :mod:`ast`, whose columns are bytes of UTF-8, in characters."""
        text = self._lines[line - 1] if 0 < line <= len(self._lines) else ""
        return line, len(text.encode("utf-8", "replace")[:column].decode("utf-8", "ignore"))


class _EditPlan:
    def __init__(self, nodes: _NodeIndex) -> None:
        self._nodes = nodes
        self._claims: set[tuple[cst.CSTNode, str]] = set()
        self._replaced: list[Span] = []
        self._touched: list[Span] = []
        self.steps: dict[cst.CSTNode, list[Edit]] = {}

    def add(self, edits: Sequence[Edit]) -> bool:
        targets = [(edit, self._target(edit)) for edit in edits]
        if not targets or any(node is None or not self._is_free(edit, node) for edit, node in targets):
            return False
        for edit, node in targets:
            if node is not None:
                self._take(edit, node)
        return True

    def _target(self, edit: Edit) -> cst.CSTNode | None:
        if isinstance(edit, InsertStatement):
            statement = self._nodes.statement(edit.place)
            if edit.inside:
                return statement if isinstance(getattr(statement, "body", None), cst.IndentedBlock) else None
            return statement if statement in self._nodes.standing else None
        found = self._nodes.expression(edit.place)
        if isinstance(edit, ReplaceExpression) or not isinstance(found, cst.Call):
            return found if isinstance(edit, ReplaceExpression) else None
        has = any(_is_called(argument, edit.name) for argument in found.args)
        may_have = any(argument.star == "**" for argument in found.args)  # what is unpacked may have it, too
        return found if has or (isinstance(edit, SetArgument) and not may_have) else None

    def _is_free(self, edit: Edit, node: cst.CSTNode) -> bool:
        span = self._nodes.spans[node]
        if isinstance(edit, ReplaceExpression):
            return not any(_overlap(span, other) for other in (*self._touched, *self._replaced))
        return (node, _claim(edit)) not in self._claims and not any(_overlap(span, one) for one in self._replaced)

    def _take(self, edit: Edit, node: cst.CSTNode) -> None:
        span = self._nodes.spans[node]
        self._claims.add((node, _claim(edit)))
        if isinstance(edit, ReplaceExpression):
            self._replaced.append(span)
        elif not isinstance(edit, InsertStatement):
            self._touched.append(span)
        self.steps.setdefault(node, []).append(edit)


def _claim(edit: Edit) -> str:
    """The part of a node that an edit changes."""
    if isinstance(edit, InsertStatement):
        return f"{'inside' if edit.inside else 'before'} {edit.statement}"
    return "" if isinstance(edit, ReplaceExpression) else edit.name


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class _Rewriter(cst.CSTTransformer):
    """Applies the edits when leaving a node, after those below it."""

    def __init__(self, steps: dict[cst.CSTNode, list[Edit]], config: cst.PartialParserConfig) -> None:
        super().__init__()
        self._steps = steps
        self._config = config

    def on_leave(
        self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT
    ) -> cst.CSTNodeT | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNodeT]:
        before: list[cst.CSTNode] = []
        node: cst.CSTNode = updated_node
        for edit in self._steps.get(original_node, ()):
            if isinstance(edit, InsertStatement) and not edit.inside:
                before.append(cst.parse_statement(edit.statement, config=self._config))
            else:
                node = self._changed(node, edit)
        if before:
            return cst.FlattenSentinel([*before, node])  # type: ignore[list-item]
        return node  # type: ignore[return-value]

    def _changed(self, node: cst.CSTNode, edit: Edit) -> cst.CSTNode:
        if isinstance(edit, ReplaceExpression):
            return cst.parse_expression(edit.expression, config=self._config)
        if isinstance(edit, InsertStatement):
            return _with_first(node, cst.parse_statement(edit.statement, config=self._config))
        if not isinstance(node, cst.Call):
            raise TypeError(f"{type(node).__name__} has no arguments")
        if isinstance(edit, DropArgument):
            return _without(node, edit.name)
        value = None if edit.value is None else cst.parse_expression(edit.value, config=self._config)
        if isinstance(edit, RenameArgument):
            return _renamed(node, edit, value)
        return _with_argument(node, edit.name, value)


def _is_called(argument: cst.Arg, name: str) -> bool:
    return argument.keyword is not None and argument.keyword.value == name


def _renamed(call: cst.Call, edit: RenameArgument, value: cst.BaseExpression | None) -> cst.Call:
    def change(argument: cst.Arg) -> cst.Arg:
        if not _is_called(argument, edit.name):
            return argument
        return argument.with_changes(keyword=cst.Name(edit.to), value=argument.value if value is None else value)

    return call.with_changes(args=[change(argument) for argument in call.args])


def _with_argument(call: cst.Call, name: str, value: cst.BaseExpression | None) -> cst.Call:
    """The call with ``name=value``, formatted like its other arguments."""
    value = value if value is not None else cst.Name("None")
    if any(_is_called(argument, name) for argument in call.args):
        args = [one.with_changes(value=value) if _is_called(one, name) else one for one in call.args]
        return call.with_changes(args=args)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    added = cst.Arg(value, keyword=cst.Name(name), equal=equal)
    if not call.args:
        return call.with_changes(args=[added])
    last = call.args[-1]
    added = added.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    between = last.with_changes(comma=_separator(call), whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*call.args[:-1], between, added])


def _separator(call: cst.Call) -> cst.Comma:
    """The separator of the arguments of a call: one line each, or all on one line."""
    if len(call.args) > 1 and isinstance(comma := call.args[-2].comma, cst.Comma):
        after = comma.whitespace_after
        if not isinstance(after, cst.ParenthesizedWhitespace):
            return comma
        # A comment behind the comma belongs to another argument.
        plain = after.with_changes(first_line=after.first_line.with_changes(comment=None), empty_lines=[])
        return comma.with_changes(whitespace_after=plain)
    before = call.whitespace_before_args
    is_a_line_each = isinstance(before, cst.ParenthesizedWhitespace)
    return cst.Comma(whitespace_after=before if is_a_line_each else cst.SimpleWhitespace(" "))


def _without(call: cst.Call, name: str) -> cst.Call:
    """The call without the argument, keeping what follows the last one."""
    args = list(call.args)
    place = next(number for number, argument in enumerate(args) if _is_called(argument, name))
    dropped = args.pop(place)
    if not args:
        return call.with_changes(args=[], whitespace_before_args=cst.SimpleWhitespace(""))
    if place == len(args):
        args[-1] = args[-1].with_changes(comma=dropped.comma, whitespace_after_arg=dropped.whitespace_after_arg)
    return call.with_changes(args=args)


def _with_first(node: cst.CSTNode, statement: cst.BaseStatement) -> cst.CSTNode:
    """The statement with another one at the beginning of its body, after a docstring."""
    block = node.body  # type: ignore[attr-defined]
    first = block.body[0] if block.body else None
    small = first.body[0] if isinstance(first, cst.SimpleStatementLine) else None
    is_text = isinstance(small, cst.Expr) and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))
    behind = 1 if is_text and not isinstance(node, (cst.For, cst.While)) else 0
    body = [*block.body[:behind], statement, *block.body[behind:]]
    return node.with_changes(body=block.with_changes(body=body))
