"""Recognizes copies of the same code: a file of several folders, a function of several files."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from functools import cached_property

from doctor.core.text import lazy_compile
from doctor.lint.engine.discovery import LINE_END
from doctor.lint.engine.rule import Violation
from doctor.lint.launch.shell.statements import Statement, assigned_name

_COMMENT = lazy_compile(r"\s*#(?!!|SBATCH\b|PBS\b|BSUB\b)")
"""A line that is a comment, and neither the interpreter nor an option of a scheduler."""
_LINE_NUMBERS = lazy_compile(r"(\blines? )\d+(?:(,| and|-) ?\d+)*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class CodeAround:
    """The code around the lines of one file, as it is compared: a function of a script, else the whole file."""

    def __init__(self, text: str) -> None:
        self._lines = LINE_END.split(text)

    def digest(self, violation: Violation) -> str:
        """A digest that is the same for the same violation in a copy: of the code around it, of its place there and of
        its words, in which line numbers do not count. Empty if the code is nested too deeply."""
        line = violation.place.line
        texts = (violation.summary, violation.fix, violation.effect)
        words = (_LINE_NUMBERS.sub(r"\1", str(text)) for text in texts)
        try:
            parts = (*self._around(line), str(violation.place.column), *words)
        except RecursionError:
            return ""
        return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()

    def _around(self, line: int) -> tuple[str, str]:
        """The code without blanks and comments, and the place of a line in it."""
        lines = (line.rstrip() for line in self._lines if _is_code(line))
        text = "\n".join(line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines)
        return text, self._place(1, line)

    def _place(self, first: int, line: int) -> str:
        return str(sum(map(_is_code, self._lines[first - 1 : line])))


class CodeOfScript(CodeAround):
    """That of a Python script."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        super().__init__(text)
        self._tree = tree
        self._texts: dict[ast.AST, str] = {}

    def _around(self, line: int) -> tuple[str, str]:
        within = (one for one in self._functions if _first_line(one) <= line <= (one.end_lineno or one.lineno))
        function = next(within, None)
        around = function or self._tree
        if around not in self._texts:
            self._texts[around] = ast.unparse(around)
        return self._texts[around], self._place(1 if function is None else _first_line(function), line)

    @cached_property
    def _functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """The outermost functions; those inside others depend on what is around them."""
        found, left = [], list[ast.AST]([self._tree])
        while left:
            for node in ast.iter_child_nodes(left.pop()):
                if isinstance(node, _FUNCTIONS):
                    found.append(node)
                elif isinstance(node, ast.stmt | ast.ExceptHandler):
                    left.append(node)
        return found


class CodeOfShell(CodeAround):
    """That of a shell script. Copies may start the same programs with other arguments, and assign other values: what
    follows from these is in the words of a violation."""

    def __init__(self, text: str, statements: Sequence[Statement]) -> None:
        super().__init__(text)
        self._statements = statements
        self._text = "\n".join(map(_outline, statements))

    def _around(self, line: int) -> tuple[str, str]:
        within = (number for number, one in enumerate(self._statements) if one.line <= line <= one.end_line)
        number = next(within, None)
        place = " ".join(self._lines[line - 1].split()) if number is None and line else str(number)
        return self._text, place


def _outline(statement: Statement) -> str:
    """The command, the variables that are assigned and the scripts that are run."""
    first = next((word for word in statement.words if assigned_name(word) is None), None)
    plain = ((word, word.plain or "") for word in statement.words)
    kept = (
        f"{name}=" if (name := assigned_name(word)) else text.rpartition("/")[2]
        for word, text in plain
        if assigned_name(word) or word is first or text.endswith((".py", ".sh"))
    )
    return " ".join(kept)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min((one.lineno for one in function.decorator_list), default=function.lineno)


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not _COMMENT.match(line)
