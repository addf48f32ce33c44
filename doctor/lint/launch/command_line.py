"""Parses the words of a command into what it launches, through wrappers (``nohup``, ``env``) and launchers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from doctor.core.text import lazy_compile
from doctor.knowledge.launcher_index import COMMANDS, STEP
from doctor.knowledge.launchers import LaunchCommand, OptionSyntax
from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch
from doctor.lint.launch.launcher_options import CommandWord, parse_options
from doctor.lint.launch.partial_text import is_all_unknown

Scripted = Callable[[str, int, Mapping[str, EnvironmentSetting], bool], "Launch | None"]
"""Reads the text of ``bash -c`` on a line, with an environment, inside a step of srun or not."""


@dataclass(frozen=True)
class CommandContext:
    """The context of a command. ``inside_step``: srun starts it."""

    place: SourceLocation
    settings: Mapping[str, EnvironmentSetting]
    scripted: Scripted
    inside_step: bool = False
    in_background: bool = False
    in_branch: bool = False
    in_loop: bool = False
    depth: int = 0

    def launch(self, program: str) -> Launch:
        """A program in this context, without options."""
        return Launch(
            program,
            self.place,
            settings=self.settings,
            in_background=self.in_background,
            in_branch=self.in_branch,
            in_loop=self.in_loop,
        )


_PYTHON = lazy_compile(r"python(\d(\.\d+)?)?")
_SHELLS = ("bash", "sh", "zsh", "dash")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WRAPPERS = _names(
    "nohup time exec sudo stdbuf nice ionice taskset numactl timeout env command setsid unbuffer singularity "
    "apptainer enroot shifter podman-hpc conda mamba micromamba uv poetry pipenv pixi pdm hatch run nsys ncu dlprof "
    "coverage xvfb-run"
)
"""Programs that run their arguments on the same host."""
_OTHERS = _names(
    "ray horovodrun composer colossalai jsrun aprun flux prun charmrun clush ibrun blaunch mpiexec.hydra mpirun_rsh "
    "make parallel xargs ssh pdsh sbatch docker podman kubectl sky wandb dask optuna snakemake nextflow submitit dora "
    "swift xtuner deepy.py"
)
"""Programs that may start ranks and are not followed."""
_OF_TRACKER = _names("disabled enabled offline online login logout init status sync sweep artifact restore")
"""Commands of ``wandb`` that start no program; ``wandb agent`` does."""
_REMOTE = ("ssh", "pdsh", "clush")
"""Programs that run the text of their last argument on other hosts."""
DEPTH = 12
"""Nested programs that are followed."""


def read_command(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """What a command starts; ``None`` if it is unknown or not of interest."""
    if not fields or around.depth > DEPTH:
        return None
    around = replace(around, depth=around.depth + 1)
    name = fields[0].text.rpartition("/")[2]
    rest = fields[1:]
    if name in _CALLS:
        return _call(name, rest, around)
    if _PYTHON.fullmatch(name):
        return _python(rest, around)
    if name in _SHELLS:
        return _shell(rest, around)
    if name in _WRAPPERS:
        return _wrapped(rest, around)
    if name == "wandb" and rest and rest[0].text in _OF_TRACKER:
        return None
    if name in _REMOTE and rest:  # at its last word, which is the command
        arguments = tuple(one.text for one in rest)
        return replace(
            around.launch("other"), script=fields[0].text, arguments=arguments, place=SourceLocation(rest[-1].line)
        )
    if name in _OTHERS or name.endswith((".sh", ".sbatch", ".slurm")) or is_all_unknown(name):
        return replace(around.launch("other"), script=fields[0].text)
    if name.endswith(".py"):
        return _script(fields, around)
    return None


def _wrapped(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """What a wrapper runs: the first known program; ``NAME=value`` before it is its environment."""
    settings = dict(around.settings)
    for position, (text, line) in enumerate(fields):
        name, equals, value = text.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            settings[name] = EnvironmentSetting(name, value, SourceLocation(line), for_task=around.inside_step)
        elif _is_program(text):
            return read_command(fields[position:], replace(around, settings=settings))
    return None


def _is_program(text: str) -> bool:
    name = text.rpartition("/")[2]
    is_named = name in _CALLS or name in _SHELLS or name in _WRAPPERS
    return is_named or bool(_PYTHON.fullmatch(name)) or name.endswith((".py", ".sh"))


def _shell(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """``bash -c text``, or ``bash file``."""
    for position, (text, _) in enumerate(fields):
        if re.fullmatch(r"-[a-z]*c", text) and position + 1 < len(fields):
            script = fields[position + 1]
            return around.scripted(script.text, script.line, around.settings, around.inside_step)
        if not text.startswith("-"):
            return replace(around.launch("other"), script=text)
    return None


def _python(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    at = 0
    while at < len(fields) and fields[at].text.startswith("-"):
        option = fields[at].text
        if option == "-m" and at + 1 < len(fields):
            return _module(fields[at + 1].text, fields[at + 2 :], around)
        if option in ("-c", "-", "-V", "--version"):
            return None
        at += 2 if option in ("-X", "-W") else 1
    return _script(fields[at:], around)


def _module(name: str, rest: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    if name in _MODULES:
        return replace(_launch(_MODULES[name], rest, around), module=name)
    if name in _CALLS and rest:
        return _call(name, rest, around)
    return replace(around.launch("python"), script=name, arguments=tuple(field.text for field in rest))


def _script(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    if not fields:
        return None
    arguments = tuple(field.text for field in fields[1:])
    return replace(around.launch("python"), script=fields[0].text, arguments=arguments)


def _call(name: str, fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """A launcher by its first word and its subcommand; with other subcommands it starts nothing."""
    for subcommand, command in _CALLS[name]:
        if tuple(field.text for field in fields[: len(subcommand)]) == subcommand:
            return _launch(command, fields[len(subcommand) :], around)
    return None


def _launch(command: LaunchCommand, fields: Sequence[CommandWord], around: CommandContext) -> Launch:
    if command.starts == "tasks":
        return _tasks(command, fields, around)
    options, end, is_open = parse_options(fields, command.options) if command.options else ({}, 0, False)
    words = tuple(field.text for field in fields[end:])
    script = words[0] if words else ""
    return replace(around.launch(command.program), options=options, script=script, arguments=words[1:], is_open=is_open)


def _tasks(command: LaunchCommand, fields: Sequence[CommandWord], around: CommandContext) -> Launch:
    programs = (at for at, (text, _) in enumerate(fields) if at and _is_program(text))
    end = next(programs, len(fields)) if command.several_values else None
    options, read, is_open = parse_options(fields[:end], command.options or OptionSyntax(()))
    start = read if end is None else end
    settings = dict(around.settings)
    for entry in _variables_given(fields[:start], *command.variables):
        name, equals, value = entry.partition("=")
        if equals and name.isidentifier():
            settings[name] = EnvironmentSetting(name, value, around.place)
    is_step = around.inside_step or command is STEP.command
    within = replace(around, inside_step=is_step, settings=settings)
    inner = read_command(fields[start:], within) or _wrapped(fields[start:], within)
    return replace(around.launch(command.program), options=options, is_open=is_open, inner=inner, settings=settings)


def _variables_given(fields: Sequence[CommandWord], option: str, separator: str) -> Iterator[str]:
    for at, (text, _) in enumerate(fields):
        name, equals, value = text.partition("=")
        if name == option and (equals or at + 1 < len(fields)):
            yield from (value if equals else fields[at + 1].text).split(separator)


def _calls() -> dict[str, list[tuple[tuple[str, ...], LaunchCommand]]]:
    found: dict[str, list[tuple[tuple[str, ...], LaunchCommand]]] = {}
    for command in COMMANDS.values():
        for call in command.calls:
            first, *subcommand = call.split()
            found.setdefault(first, []).append((tuple(subcommand), command))
    return found


_CALLS = _calls()
"""Launchers and their subcommands by the first word."""
_MODULES = {module: command for command in COMMANDS.values() for module in command.modules}
