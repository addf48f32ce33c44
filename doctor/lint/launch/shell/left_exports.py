"""Variables that a script exports for none of its programs: after these have ended, or where all run on other hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.engine.project_files import ProjectFiles
from doctor.lint.launch.partial_text import OUTPUT
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.shell.statements import DECLARING, Statement, assigned_name, split_script
from doctor.lint.launch.shell.tokens import Array, Literal, Opaque, ParameterExpansion, Part, Word

_QUIET = frozenset(
    (
        *("sleep", "echo", "printf", "cp", "mv", "rm", "mkdir", "rmdir", "touch", "ls", "cat", "tee", "ln", "chmod"),
        *("head", "tail", "grep", "date", "pwd", "hostname", "sync", "[", "[[", "test", "true", "false", ":"),
        *("exit", "return", "break", "continue", "shift", "wait", "kill", "cd", "set", "unset", *DECLARING),
    )
)
"""Commands that use no GPU, and start no other program."""
_OPEN_FUNCTION = re.compile(r"^[ \t]*function[ \t]+[\w.:-]+[ \t]*(?:\{|$)", re.MULTILINE)
"""A function without brackets behind its name, whose block :mod:`statements` does not follow."""
_LATER = frozenset(("trap", "alias"))
"""Commands whose words run later."""
_SSH_ENVIRONMENT = re.compile(r"\b(?:SendEnv|SetEnv|printenv|env|declare|typeset|export[ \t]+-p)\b")
"""What may carry variables to other hosts."""
_PROGRAM = re.compile(
    r"\b(?:python[\d.]*|torchrun|deepspeed|accelerate|srun|mpi(?:run|exec)|docker)\b|\.(?:py|sh)\b|\beval\b"
)
MOST_FUNCTIONS = 100
"""Functions of a script whose calls are followed."""


def without_left_exports(file: ShellFile, text: str, modules: ProjectFiles) -> ShellFile:
    """The file with the variables as not exported that it sets when it starts no more programs, or if it starts all of
    them through ssh, which passes none on. A file that starts none before, or that another one of its project reads
    with ``source``, may set them for others."""
    if not modules.is_script_of_whole(file.path) or not (text.startswith("#!") or "ssh" in text):
        return file
    statements = split_script(text).statements
    execs = (one.line for one in statements if one.words[0].plain == "exec" and len(one.words) > 1)
    first = min((*(one.place.line for one in file.launches), *execs), default=None)
    left = _left_lines(statements, text, first) if first is not None and text.startswith("#!") else set()
    left |= _local_lines(statements, text)
    if not left or is_sourced(file, modules):
        return file
    settings = (replace(one, is_exported=False) if one.place.line in left else one for one in file.settings)
    return replace(file, settings=tuple(settings))


def is_sourced(file: ShellFile, modules: ProjectFiles) -> bool:
    """Whether a script or a page of the project runs a file in its own shell: ``source file``, ``. file``."""
    name = PurePath(file.path).name
    reads = re.compile(rf"(?:\bsource|(?<![\w./-])\.)\s+[^\s;&|]*{re.escape(name)}")
    return any(reads.search(line) for text in modules.texts_with(file.path, name) for line in joined_lines(text))


def _left_lines(statements: tuple[Statement, ...], text: str, first: int) -> set[int]:
    """The lines with nothing but variables and quiet commands that run below the first start of a program (its line),
    and after which no program starts."""
    if _OPEN_FUNCTION.search(text) or any(one.words[0].plain in _LATER for one in statements):
        return set()
    if len({one.function for one in statements}) > MOST_FUNCTIONS:
        return set()
    order = _Order(statements)
    noisy = {
        line
        for at, one in enumerate(statements)
        if not order.is_quiet(at)
        for line in range(one.line, one.end_line + 1)
    }
    set_at = (
        at for at, one in enumerate(statements) if _sets(one) and order.is_below(at, first) and order.is_quiet_after(at)
    )
    return {statements[at].line for at in set_at} - noisy


def _local_lines(statements: tuple[Statement, ...], text: str) -> set[int]:
    """The lines with variables of a script whose programs all run in commands of ssh that do not name them: a login has
    an environment of its own, and what it gets of that of its user has to be named (ssh_config, SendEnv)."""
    remote = [one for one in statements if one.words[0].plain == "ssh"]
    others = [one for one in statements if one not in remote]
    lines = text.splitlines()

    def text_of(statement: Statement) -> str:
        return "\n".join(lines[statement.line - 1 : statement.end_line])

    sent = "\n".join(map(text_of, remote))
    if not remote or _SSH_ENVIRONMENT.search(sent) or _OPEN_FUNCTION.search(text):
        return set()
    if any(_PROGRAM.search(text_of(one)) or not _is_harmless(one) for one in others):
        return set()
    named = ((one.line, _NAME.findall(text_of(one))) for one in others if _sets(one))
    return {line for line, names in named if not any(re.search(rf"\b{name}\b", sent) for name in names)}


def _is_harmless(statement: Statement) -> bool:
    """Whether a statement has a quiet command, or sets variables, also with a name that is none: ``A-B=4``."""
    first = statement.words[0].parts[0]
    return statement.words[0].plain in _QUIET or _sets(statement) or (isinstance(first, Literal) and "=" in first.text)


_NAME = re.compile(r"\b([A-Za-z_]\w*)=")


def _sets(statement: Statement) -> bool:
    return statement.words[0].plain in DECLARING or all(map(assigned_name, statement.words))


class _Order:
    """Which commands run after which. In the body of a function, these are the ones below and those after each of its
    calls; of a loop, all commands."""

    def __init__(self, statements: tuple[Statement, ...]) -> None:
        self._statements = statements
        self._bodies: dict[str, list[int]] = {}
        self._uses: dict[str, list[int]] = {}
        for at, one in enumerate(statements):
            self._bodies.setdefault(one.function, []).append(at)
            for name in {word.plain for word in one.words if word.plain}:
                self._uses.setdefault(name, []).append(at)
        self._quiet: dict[int, bool] = {}
        self._after: dict[str, bool] = {}  # functions after all of whose calls no program starts
        self._below: dict[str, bool] = {}  # those of which all calls are below the first start
        ends = {name: [at for at in body if not self.is_quiet(at)] for name, body in self._bodies.items()}
        self._last = {name: max(found, default=-1) for name, found in ends.items()}

    def is_quiet(self, at: int) -> bool:
        """Whether a command starts no program, nor does the function that it calls; one that calls itself may."""
        if at not in self._quiet:
            self._quiet[at] = False
            self._quiet[at] = self._starts_nothing(self._statements[at].words)
        return self._quiet[at]

    def _starts_nothing(self, words: tuple[Word, ...]) -> bool:
        if any(_runs_command(word.parts) for word in words):
            return False
        command = next((word for word in words if assigned_name(word) is None), None)
        if command is None:
            return True
        if any(word.plain in self._bodies for word in words if word is not command and word.plain):
            return False  # the name of a function, for a command that may call it
        name = command.plain or ""
        return all(map(self.is_quiet, self._bodies[name])) if name and name in self._bodies else name in _QUIET

    def is_quiet_after(self, at: int) -> bool:
        """Whether all commands that run after one start no program."""
        here = self._statements[at]
        if here.in_loop or self._last[here.function] > at:
            return False
        return not here.function or self._is_of_all_calls(here.function, self._after, self.is_quiet_after)

    def is_below(self, at: int, line: int) -> bool:
        """Whether a command is below a line, or all calls of the function are whose body it is in."""
        here = self._statements[at]
        if not here.function:
            return here.line > line
        return self._is_of_all_calls(here.function, self._below, lambda one: self.is_below(one, line))

    def _is_of_all_calls(self, function: str, known: dict[str, bool], judge: Callable[[int], bool]) -> bool:
        if function not in known:
            known[function] = False
            calls = self._uses.get(function, [])
            known[function] = bool(calls) and all(map(judge, calls))
        return known[function]


def _runs_command(parts: Iterable[Part]) -> bool:
    """Whether a word has the output of a command, which may be a program."""
    for part in parts:
        if isinstance(part, Opaque) and part.text == OUTPUT:
            return True
        if isinstance(part, ParameterExpansion) and part.default and _runs_command(part.default):
            return True
        if isinstance(part, Array) and any(_runs_command(word.parts) for word in part.words):
            return True
    return False
