"""The words of a command as what it starts: through wrappers (``nohup``, containers, ``env``) and launchers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch
from doctor.lint.launch.launcher_options import (
    ACCELERATE,
    DEEPSPEED,
    FABRIC,
    MODULES,
    MPIRUN,
    OTHERS,
    SLURM,
    TORCHRUN,
    WRAPPERS,
    CommandWord,
    OptionSyntax,
    parse_options,
)
from doctor.lint.launch.partial_text import is_all_unknown, is_known

Scripted = Callable[[str, int, Mapping[str, EnvironmentSetting], bool], "Launch | None"]
"""Reads the text of ``bash -c`` that stands on a line, with an environment, inside a step of srun or not."""


@dataclass(frozen=True)
class CommandContext:
    """Where a command stands. ``launch``: what holds for each program of it; ``inside_step``: srun starts it."""

    place: SourceLocation
    settings: Mapping[str, EnvironmentSetting]
    scripted: Scripted
    inside_step: bool = False
    in_background: bool = False
    in_branch: bool = False
    in_loop: bool = False
    depth: int = field(default=0)

    def launch(self, program: str) -> Launch:
        """A program here, of which nothing more is known."""
        return Launch(
            program,
            self.place,
            settings=self.settings,
            in_background=self.in_background,
            in_branch=self.in_branch,
            in_loop=self.in_loop,
        )


_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_SHELLS = ("bash", "sh", "zsh", "dash")
DEPTH = 12
"""Programs that start each other."""


def read_command(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """What is started; ``None`` where it is nothing of interest or can't be told."""
    if not fields or around.depth > DEPTH:
        return None
    around = replace(around, depth=around.depth + 1)
    name = fields[0].text.rpartition("/")[2]
    rest = fields[1:]
    if name in _READERS:
        return _READERS[name](rest, around)
    if _PYTHON.fullmatch(name):
        return _python(rest, around)
    if name in _SHELLS:
        return _shell(rest, around)
    if name in WRAPPERS:
        return _wrapped(rest, around)
    if name in OTHERS or name.endswith((".sh", ".sbatch", ".slurm")) or is_all_unknown(name):
        return replace(around.launch("other"), script=fields[0].text)
    if name.endswith(".py"):
        return _script(fields, around)
    return None


def _wrapped(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """What a wrapper runs: the first word that is a known program; ``NAME=value`` before it is its environment."""
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
    return (
        name in _READERS
        or bool(_PYTHON.fullmatch(name))
        or name in _SHELLS
        or name in WRAPPERS
        or name.endswith((".py", ".sh"))
    )


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
    if name in MODULES:
        return _LAUNCHERS[MODULES[name]](rest, around)
    if name in ("accelerate", "lightning", "fabric") and rest:
        return _READERS[name](rest, around)
    return replace(around.launch("python"), script=name, arguments=tuple(field.text for field in rest))


def _script(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    if not fields:
        return None
    arguments = tuple(field.text for field in fields[1:])
    return replace(around.launch("python"), script=fields[0].text, arguments=arguments)


def _launcher(program: str, syntax: OptionSyntax) -> Callable[[Sequence[CommandWord], CommandContext], Launch | None]:
    """A program whose own options stand before the script."""

    def read(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
        options, end, is_open = parse_options(fields, syntax)
        words = tuple(field.text for field in fields[end:])
        return replace(
            around.launch(program),
            options=options,
            script=words[0] if words else "",
            arguments=words[1:],
            is_open=is_open,
        )

    return read


def _srun(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    options, end, is_open = parse_options(fields, SLURM)
    settings = dict(around.settings)
    for entry in options.get("export", "").split(","):
        name, equals, value = entry.partition("=")
        if equals and name.isidentifier():
            settings[name] = EnvironmentSetting(name, value, around.place)
    within = replace(around, inside_step=True, settings=settings)
    inner = read_command(fields[end:], within) or _wrapped(fields[end:], within)
    return replace(
        around.launch("srun"),
        options=options,
        is_open=is_open,
        inner=inner,
        settings=settings,
        script=fields[end].text if end < len(fields) else "",
    )


def _mpirun(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """Its options are many and several have two values: what is no known program belongs to them."""
    start = next((at for at, (text, _) in enumerate(fields) if at and _is_program(text)), len(fields))
    options, _, is_open = parse_options(fields[:start], MPIRUN)
    settings = dict(around.settings)
    for entry in _variables_given(fields[:start]):
        name, equals, value = entry.partition("=")
        if equals:
            settings[name] = EnvironmentSetting(name, value, around.place)
    inner = read_command(fields[start:], replace(around, settings=settings))
    return replace(around.launch("mpirun"), options=options, is_open=is_open, inner=inner, settings=settings)


def _variables_given(fields: Sequence[CommandWord]) -> list[str]:
    return [fields[at + 1].text for at, (text, _) in enumerate(fields[:-1]) if text == "-x"]


def _accelerate(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    if not fields or fields[0].text != "launch":
        return None
    return _LAUNCHERS["accelerate"](fields[1:], around)


def _fabric(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    """``fabric run``, before that ``lightning run model``; in other places ``lightning`` is something else."""
    words = [field.text for field in fields[:2]]
    if words[:1] != ["run"]:
        return None
    return _LAUNCHERS["fabric"](fields[2 if words[1:] == ["model"] else 1 :], around)


def _llamafactory(fields: Sequence[CommandWord], around: CommandContext) -> Launch | None:
    if not fields or fields[0].text != "train":
        return None
    script = fields[1].text if len(fields) > 1 and is_known(fields[1].text) else ""
    return replace(around.launch("llamafactory"), script=script, arguments=tuple(field.text for field in fields[2:]))


_LAUNCHERS = {
    "torchrun": _launcher("torchrun", TORCHRUN),
    "accelerate": _launcher("accelerate", ACCELERATE),
    "deepspeed": _launcher("deepspeed", DEEPSPEED),
    "fabric": _launcher("fabric", FABRIC),
}
_READERS: dict[str, Callable[[Sequence[CommandWord], CommandContext], Launch | None]] = {
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpirun,
    "torchrun": _LAUNCHERS["torchrun"],
    "deepspeed": _LAUNCHERS["deepspeed"],
    "accelerate": _accelerate,
    "accelerate-launch": _LAUNCHERS["accelerate"],
    "fabric": _fabric,
    "lightning": _fabric,
    "llamafactory-cli": _llamafactory,
}
