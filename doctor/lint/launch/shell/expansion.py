"""Expands the variables in the words of a script, as far as the script sets them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from doctor.lint.launch.partial_text import IN_STEP, OUTPUT, is_known, unknown_mark
from doctor.lint.launch.shell.tokens import ArithmeticExpansion, Array, Literal, Opaque, ParameterExpansion, Part, Word

Value = str | tuple[str, ...]
PER_TASK = frozenset(
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID", "SLURMD_NODENAME", "SLURM_TASK_PID", "HOSTNAME")
)
"""Variables that SLURM or the shell sets for each task of a step; a batch script has those of its first host
(srun(1))."""
LONGEST = 1 << 14
"""Characters of a value, or words of an array; longer ones (doubled again and again) are not followed."""
_FORMULA = re.compile(r"[\w\s+*/%()-]{1,200}")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


class Variables:
    """The values of a script's variables at the current command. ``inside_step``: srun runs this script."""

    def __init__(
        self, given: Mapping[str, Value] | None = None, doubtful: Iterable[str] = (), *, inside_step: bool = False
    ) -> None:
        self.values: dict[str, Value] = dict(given or {})
        self.doubtful = frozenset(doubtful)
        self.inside_step = inside_step

    def value(self, name: str) -> Value:
        """Its value, or a mark if unknown."""
        if name in self.values and name not in self.doubtful:
            return self.values[name]
        return unknown_mark(f"{IN_STEP}{name}" if self.inside_step and name in PER_TASK else name)

    def assign(self, name: str, value: Value, *, append: bool = False) -> None:
        """``name=value`` or ``name+=value``."""
        if append:
            old = self.value(name)
            both = isinstance(old, str) and isinstance(value, str)
            value = old + value if both else (*_as_list(old), *_as_list(value))  # type: ignore[operator]
        self.values[name] = value if len(value) <= LONGEST else unknown_mark(name)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Mark these variables, or all of them, as unknown."""
        if names is None:
            self.values.clear()
        for name in names or ():
            self.values.pop(name, None)

    # -- words

    def text(self, parts: Iterable[Part]) -> str:
        """The text of a value, which is not split into words."""
        return "".join(_one(self._part(part)) for part in parts)

    def assigned(self, parts: tuple[Part, ...]) -> Value:
        """The value of an assignment: a text, or the words of an array."""
        if len(parts) == 1 and isinstance(parts[0], Array):
            return tuple(field for word in parts[0].words for field in self.fields(word))
        return self.text(parts)

    def fields(self, word: Word) -> list[str]:
        """The words that a word becomes; a variable without quotes may hold several."""
        done: list[str] = []
        current: str | None = "" if word.quoted else None
        for part in word.parts:
            pieces = self._pieces(part)
            if not pieces:
                continue
            current = (current or "") + pieces[0]
            for piece in pieces[1:]:
                done.append(current)
                current = piece
        return done if current is None else [*done, current]

    def _pieces(self, part: Part) -> list[str]:
        value = self._part(part)
        if isinstance(value, tuple):
            return list(value)
        if isinstance(part, ParameterExpansion) and not part.quoted:
            return value.split()
        return [value]

    def _part(self, part: Part) -> Value:
        if isinstance(part, Literal):
            return part.text
        if isinstance(part, ParameterExpansion):
            value = self.value(part.name)
            if part.default is not None and value == "":
                return self.text(part.default)
            if part.is_list or isinstance(value, str):
                return value
            return value[0] if value else ""
        if isinstance(part, ArithmeticExpansion):
            number = calculate(part.text, self)
            return unknown_mark(OUTPUT) if number is None else str(number)
        return unknown_mark(part.text if isinstance(part, Opaque) else OUTPUT)


def _one(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _as_list(value: Value) -> Iterator[str]:
    yield from value.split() if isinstance(value, str) else value


def calculate(text: str, variables: Variables) -> int | None:
    """The value of ``$((text))``; ``None`` if a part of it is unknown."""
    filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: _one(variables.value(match[1])) or "0", text)
    if not is_known(filled) or not _FORMULA.fullmatch(filled):
        return None
    try:
        return _number(ast.parse(filled.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("no whole number")
