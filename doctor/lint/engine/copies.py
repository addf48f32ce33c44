"""Recognizes copies of the same code: a file of several folders, a function of several files."""

from __future__ import annotations

import ast
import hashlib
from functools import cached_property

from doctor.core.text import lazy_compile
from doctor.lint.engine.discovery import LINE_END
from doctor.lint.engine.rule import Violation

_COMMENT = lazy_compile(r"\s*#(?!!|SBATCH\b|PBS\b|BSUB\b)")
"""A line that is a comment, and neither the interpreter nor an option of a scheduler."""
_LINE_NUMBERS = lazy_compile(r"(\blines? )\d+(?:(,| and|-) ?\d+)*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class CodeAround:
    """The code around the lines of one file. ``tree``: of a script; other files are compared as a whole."""

    def __init__(self, text: str, tree: ast.Module | None) -> None:
        self._text = text
        self._tree = tree
        self._digests: dict[ast.AST | None, str] = {}

    def digest(self, violation: Violation) -> str:
        """A digest that is the same for the same violation in a copy: of the function around it, else of the whole
        file, without blanks and comments, and of its place there. Line numbers in its words do not count. Empty if
        the code is nested too deeply."""
        line = violation.place.line
        around = self._function_at(line)
        if around not in self._digests:
            try:
                self._digests[around] = self._normalized(around)
            except RecursionError:
                return ""
        first = _first_line(around) if around is not None else 1
        place = sum(map(_is_code, self._lines[first - 1 : line]))
        words = (violation.summary, violation.fix, violation.effect)
        told = (_LINE_NUMBERS.sub(r"\1", str(text)) for text in words)
        parts = (self._digests[around], str(place), str(violation.place.column), *told)
        return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()

    @cached_property
    def _lines(self) -> list[str]:
        return LINE_END.split(self._text)

    @cached_property
    def _functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """The outermost functions; those inside others depend on what is around them."""
        found, left = [], list[ast.AST]([self._tree] if self._tree is not None else [])
        while left:
            for node in ast.iter_child_nodes(left.pop()):
                if isinstance(node, _FUNCTIONS):
                    found.append(node)
                elif isinstance(node, ast.stmt | ast.ExceptHandler):
                    left.append(node)
        return found

    def _function_at(self, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        within = (one for one in self._functions if _first_line(one) <= line <= (one.end_lineno or one.lineno))
        return next(within, None)

    def _normalized(self, around: ast.AST | None) -> str:
        tree = around or self._tree
        if tree is not None:
            return ast.unparse(tree)
        lines = (line.rstrip() for line in self._lines if _is_code(line))
        return "\n".join(line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min((one.lineno for one in function.decorator_list), default=function.lineno)


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not _COMMENT.match(line)
