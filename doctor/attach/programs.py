"""What a process runs, by its arguments: a training script, a launcher, a helper, or a child of multiprocessing."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from doctor.attach.processes import Process, ProcessTable
from doctor.collectors.host.kernel_view import plain
from doctor.knowledge.training_processes import (
    AGENT_MODULES,
    AGENT_PROCESSES,
    AGENT_SCRIPTS,
    DATA_WORKER,
    FORK_SERVER,
    HELPER_CODE,
    HELPER_FOLDERS,
    HELPER_MODULES,
    HELPER_SCRIPTS,
    RAY_HELPERS,
    RAY_TITLE,
    SHELLS,
    SPAWNED,
)

PYTHON_NAME = re.compile(r"(?:python|pypy)[\d.]*[a-z]{0,3}(?: \(deleted\))?", re.ASCII)
"""Names of the program of an interpreter."""
DOCTOR_SCRIPTS = ("doctor", "rankdoctor")
"""Names of the script of this package."""
_WITH_VALUE = "WX"
"""Short options of the interpreter that take a value."""
_LONG_WITH_VALUE = ("--check-hash-based-pycs",)


class Command(NamedTuple):
    """What an interpreter runs: a ``script``, a ``module``, ``code`` (``-c``), or a ``title`` that replaced it."""

    kind: Literal["script", "module", "code", "title", ""] = ""
    word: str = ""


def python_command(arguments: tuple[str, ...] | None) -> Command:
    """Return what ``python ARGUMENTS`` runs; an empty command for an interactive interpreter or if unknown."""
    if not arguments:
        return Command()
    if len(arguments) == 1 and not PYTHON_NAME.fullmatch(PurePosixPath(arguments[0]).name):
        return Command("title", arguments[0])
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            return Command("script", argument) if argument != "-" else Command()
        if argument.startswith("--"):
            if argument in _LONG_WITH_VALUE:
                next(rest, None)
            continue
        letters = "".join(takewhile(lambda letter: letter not in "cm" + _WITH_VALUE, argument[1:]))
        decisive, value = argument[1 + len(letters) :][:1], argument[2 + len(letters) :]
        if decisive:
            value = value or next(rest, "")
        if decisive == "c":
            return Command("code", value)
        if decisive == "m":
            return Command("module", value)
    return Command()


def program_of(process: Process, table: ProcessTable) -> str:
    """Return the script or module that a process runs, without arguments, masked and printable.

    A child of multiprocessing runs the program of its parent.
    """
    for runner in (process, *table.ancestors(process)):
        if runner is not process and not runs_python(runner):
            return ""
        command = python_command(runner.arguments)
        if command.kind == "code" and _starts_others(command.word):
            continue
        if command.kind == "title":
            return plain(command.word.partition(".")[0] if command.word.startswith(RAY_TITLE) else command.word)
        if command.kind == "module":
            return plain(f"-m {command.word}")
        return plain(command.word) if command.kind == "script" else "-c" if command.kind == "code" else ""
    return ""


def runs_python(process: Process) -> bool:
    """Return whether the program of the process is an interpreter of Python, as far as its name shows."""
    program = process.executable or (process.arguments or ("",))[0]
    if PYTHON_NAME.fullmatch(PurePosixPath(program).name) or process.name == DATA_WORKER:
        return True
    return not process.executable and bool(PYTHON_NAME.fullmatch(process.name))


def _starts_others(code: str) -> bool:
    return SPAWNED in code or FORK_SERVER in code


def agent_of(process: Process, *, is_python: bool) -> str:
    """Return the launcher of which this process is an agent, as the name of its row; empty if it is none."""
    if not is_python:
        name = PurePosixPath(process.executable).name or process.name
        found = (
            row for start, row in AGENT_PROCESSES.items() if name.startswith(start) or process.name.startswith(start)
        )
        return next(found, "")
    command = python_command(process.arguments)
    if command.kind == "module":
        return AGENT_MODULES.get(command.word, "")
    if command.kind == "script":
        paths = ((row, f"/{module.replace('.', '/')}.py") for module, row in AGENT_MODULES.items())
        as_file = next((row for row, path in paths if command.word.endswith(path)), "")
        return as_file or AGENT_SCRIPTS.get(PurePosixPath(command.word).name, "")
    return AGENT_PROCESSES.get(process.name, "") if command.kind == "title" else ""


def is_doctor(process: Process) -> bool:
    """Return whether the process runs this program."""
    command = python_command(process.arguments)
    in_module = command.kind == "module" and command.word == "doctor"
    return in_module or (command.kind == "script" and PurePosixPath(command.word).name in DOCTOR_SCRIPTS)


def is_helper(process: Process) -> bool:
    """Return whether a Python process serves a job or a user and does not train."""
    command = python_command(process.arguments)
    if command.kind == "code":
        return any(code in command.word for code in HELPER_CODE)
    if command.kind == "module":
        return command.word in HELPER_MODULES
    if command.kind == "title":
        return command.word.startswith(RAY_HELPERS)
    in_folder = any(folder in command.word for folder in HELPER_FOLDERS)
    return command.kind == "script" and (in_folder or PurePosixPath(command.word).name in HELPER_SCRIPTS)


def is_interactive_shell(process: Process) -> bool:
    """Return whether the process is a shell on a terminal."""
    return process.terminal and process.name in SHELLS


def is_fork_server(process: Process) -> bool:
    """Return whether multiprocessing forks the children of its parent from this process."""
    command = python_command(process.arguments)
    return command.kind == "code" and FORK_SERVER in command.word


def is_spawned(process: Process) -> bool:
    """Return whether multiprocessing started the process with the method ``spawn``."""
    command = python_command(process.arguments)
    return command.kind == "code" and SPAWNED in command.word


def multiprocessing_children(process: Process, table: ProcessTable) -> tuple[Process, ...]:
    """Return the processes that ``process`` started by multiprocessing or forked, in the order of their start."""
    found: list[Process] = []
    for child in table.children(process.pid):
        if is_fork_server(child) and not is_fork_server(process):
            found.extend(table.children(child.pid))
        elif child.name == DATA_WORKER or is_spawned(child) or _is_fork(child, process):
            found.append(child)
    return tuple(found)


def _is_fork(child: Process, parent: Process) -> bool:
    """Return whether the child runs what its parent does, without an ``execve`` of its own."""
    return bool(child.arguments) and child.arguments == parent.arguments and child.environ == parent.environ
