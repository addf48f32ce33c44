"""Reads a shell script: what it sets and what it starts. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from doctor.core.text import lazy_compile
from doctor.knowledge.interface_syntax import is_loopback_name
from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.command_line import CommandContext, read_command
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch, LaunchFile
from doctor.lint.launch.launcher_options import CommandWord
from doctor.lint.launch.partial_text import is_placeholder, unknown_mark
from doctor.lint.launch.shell.cut_commands import CutCommand, cut_commands
from doctor.lint.launch.shell.expansion import Value, Variables
from doctor.lint.launch.shell.lexer import comments
from doctor.lint.launch.shell.statements import Statement, assigned_name, split_script
from doctor.lint.launch.shell.tokens import Literal, Word
from doctor.lint.launch.shell.unexported import set_as_arguments, unexported
from doctor.lint.launch.slurm_batch import Allocation, read_headers, read_late_headers

DEPTH = 6
"""Nested scripts (``bash -c``, ``eval``) that are followed."""
MOST_SCRIPTS = 100
"""Nested scripts of one file that are followed."""
MOST_COMMANDS = 5000
"""Commands of one script; longer scripts are generated."""
_ASKS = lazy_compile(
    r"\b(?:your|change|replace|fill|modify|adjust|edit)\b|\bmaster(?:[ _-]?node)?(?:'s)?[ _-](?:ip|addr)"
    r"|(?:\bip|\baddress) of (?:the )?(?:master|main|first|head|rank)|主节点|修改|替换|填写|改为|改成",
    re.IGNORECASE,
)
"""Comments of templates on an address: what to do with it, or which one belongs there."""
_HARMLESS = ("activate", "bashrc", "profile", "conda.sh", "zshrc", "bash_profile", "modules", "module.sh", ".env")
"""Ends of names of sourced files that set nothing relevant."""


@dataclass(frozen=True)
class ShellFile(LaunchFile):
    """``allocation``: the request of its ``#SBATCH`` lines; ``None``: it has none and may run anywhere. ``waits``:
    lines of ``wait`` commands; ``waits_in_loops``: those in loops. ``late_headers``: options behind the first command,
    by line; ``cuts``: commands that end too early; ``unexported``: variables that its programs do not get;
    ``set_as_arguments``: those that it only gives to ``set``."""

    allocation: Allocation | None = None
    waits: tuple[int, ...] = ()
    waits_in_loops: tuple[int, ...] = ()
    late_headers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    cuts: tuple[CutCommand, ...] = ()
    unexported: tuple[EnvironmentSetting, ...] = ()
    set_as_arguments: tuple[EnvironmentSetting, ...] = ()


def read_shell(path: str, text: str) -> ShellFile:
    """Read a script of sh or bash."""
    allocation = read_headers(text)
    reader = ScriptReader(allocation.variables() if allocation else {})
    reader.read(text)
    notes = (
        f"lines that begin with {word} are not read: of what they ask for nothing is known"
        for word in ("#PBS", "#BSUB", "#FLUX", "#PJM", "#$ -")
        if f"\n{word}" in text
    )
    return ShellFile(
        path,
        tuple(reader.settings),
        tuple(reader.launches),
        (*notes, *reader.notes),
        allocation,
        tuple(reader.waits),
        tuple(line for line, in_loop in reader.waits.items() if in_loop),
        read_late_headers(text),
        reader.cuts,
        unexported(text, reader.settings, reader.launches),
        set_as_arguments(text),
    )


def _asking_lines(text: str) -> frozenset[int]:
    """The lines with a comment, or with one above them, that asks for another value or describes the right one."""
    if _ASKS.search(text) is None:
        return frozenset()
    lines = text.split("\n")
    asking = [line for line, comment in comments(text) if _ASKS.search(comment)]
    above = (line + 1 for line in asking if lines[line - 1].lstrip().startswith("#"))
    return frozenset((*asking, *above))


class ScriptReader:
    """``given``: variables with known values; ``settings``: the environment of the script."""

    def __init__(
        self,
        given: Mapping[str, Value],
        settings: Mapping[str, EnvironmentSetting] | None = None,
        *,
        inside_step: bool = False,
        line: int = 1,
        depth: int = 0,
        scripts: list[int] | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.settings: list[EnvironmentSetting] = []
        self.launches: list[Launch] = []
        self.cuts: tuple[CutCommand, ...] = ()  # of the last text
        self.waits: dict[int, bool] = {}  # lines, and whether they stand in a loop
        self._asking = frozenset[int]()  # lines whose comments ask for another address
        self._variables = Variables(given, inside_step=inside_step)
        self._current = dict(settings or {})
        self._inside_step = inside_step
        self._first_line = line
        self._depth = depth
        self._exports_all = False
        self._scripts = scripts if scripts is not None else []  # lines of those in words, of the whole file

    def read(self, text: str) -> None:
        """Go through a script."""
        script = split_script(text)
        self._variables.doubtful |= script.doubtful
        self._asking = _asking_lines(text)
        self.cuts = tuple(cut_commands(text, script.statements[:MOST_COMMANDS]))
        for statement in script.statements[:MOST_COMMANDS]:
            self._statement(statement)
        if len(script.statements) > MOST_COMMANDS:
            self.notes.append(f"only the first {MOST_COMMANDS} commands are looked at")

    def run(self, words: Sequence[tuple[str, int]]) -> None:
        """Run one command that is already split into words with lines."""
        if not words:
            return
        here = Statement((), words[0][1], words[-1][1])
        self._first_line = 1
        launch = read_command([CommandWord(*word) for word in words], self._surrounding(here, self._current))
        if launch is not None:
            self._add(launch)

    def _place(self, statement: Statement) -> SourceLocation:
        shift = self._first_line - 1
        return SourceLocation(statement.line + shift, 0, statement.end_line + shift)

    # -- one command

    def _statement(self, statement: Statement) -> None:
        words = list(statement.words)
        assigned: list[Word] = []
        while words and assigned_name(words[0]) is not None:
            assigned.append(words.pop(0))
        if not words:
            for word in assigned:
                self._assign(word, statement, exported=None)
            return
        handle = _BUILTINS.get(words[0].plain or "")
        if handle is not None:
            handle(self, words[1:], statement)
        else:
            self._start(words, assigned, statement)

    def _assign(self, word: Word, statement: Statement, *, exported: bool | None) -> None:
        name = assigned_name(word) or ""
        value, append = self._value_of(word)
        if isinstance(value, str) and self._is_to_fill(name, value, word):
            value = unknown_mark(name)
        self._variables.assign(name, value, append=append)
        known = self._variables.values.get(name, value)
        old = self._current.get(name)
        is_exported = exported or self._exports_all or (old is not None and old.is_exported)
        setting = self._setting(name, known if isinstance(known, str) else "", statement, exported=is_exported)
        self._current[name] = setting
        self.settings.append(setting)

    def _is_to_fill(self, name: str, value: str, word: Word) -> bool:
        """Whether the user has to replace a value before the first run, so that nothing follows from it."""
        return is_placeholder(name, value) or (word.line in self._asking and is_loopback_name(value))

    def _value_of(self, word: Word) -> tuple[Value, bool]:
        first = word.parts[0]
        assert isinstance(first, Literal)
        name, _, rest = first.text.partition("=")
        parts = ((Literal(rest),) if rest else ()) + word.parts[1:]
        return self._variables.assigned(parts), name.endswith("+")

    def _setting(self, name: str, value: str, statement: Statement, *, exported: bool = True) -> EnvironmentSetting:
        certain = not (statement.in_branch or statement.is_chained)
        place, inside = self._place(statement), self._inside_step
        return EnvironmentSetting(name, value, place, is_exported=exported, is_certain=certain, for_task=inside)

    def _start(self, words: Sequence[Word], assigned: Sequence[Word], statement: Statement) -> None:
        settings = dict(self._current)
        for word in assigned:
            value, _ = self._value_of(word)
            name = assigned_name(word) or ""
            settings[name] = self._setting(name, value if isinstance(value, str) else "", statement)
            self.settings.append(settings[name])
        launch = read_command(self._fields(words), self._surrounding(statement, settings))
        if launch is not None:
            self._add(launch)

    def _add(self, launch: Launch) -> None:
        """Add a launch; the file also sets what srun and mpirun export."""
        for one in launch.chain():
            known = set(map(id, self.settings))
            fresh = [one.settings[name] for name in one.settings if id(one.settings[name]) not in known]
            self.settings.extend(setting for setting in fresh if setting is not self._current.get(setting.name))
        self.launches.append(launch)

    def _fields(self, words: Sequence[Word]) -> list[CommandWord]:
        shift = self._first_line - 1
        return [CommandWord(text, word.line + shift) for word in words for text in self._variables.fields(word)]

    def _surrounding(self, statement: Statement, settings: Mapping[str, EnvironmentSetting]) -> CommandContext:
        exported = {name: setting for name, setting in settings.items() if setting.is_exported}
        for name in exported.keys() & (self._variables.doubtful | statement.tested):
            exported[name] = replace(exported[name], value=unknown_mark(name))
        return CommandContext(
            self._place(statement),
            exported,
            lambda text, line, own, inside: self._inner(text, line, own, statement, inside=inside),
            inside_step=self._inside_step,
            in_background=statement.in_background,
            in_branch=statement.in_branch,
            in_loop=statement.in_loop,
        )

    def _inner(
        self, text: str, line: int, settings: Mapping[str, EnvironmentSetting], statement: Statement, *, inside: bool
    ) -> Launch | None:
        """What a nested script starts; of several launchers only that they exist."""
        if self._depth >= DEPTH or len(self._scripts) >= MOST_SCRIPTS:
            return None
        self._scripts.append(line)
        given = {name: setting.value for name, setting in settings.items() if setting.known_value is not None}
        depth, scripts = self._depth + 1, self._scripts
        reader = ScriptReader(given, settings, inside_step=inside, line=line, depth=depth, scripts=scripts)
        reader.read(text)
        self.settings.extend(reader.settings)
        found = [one for one in reader.launches if one.is_agent] or reader.launches
        if len(found) != 1:
            own = CommandContext(self._place(statement), settings, lambda *_: None)
            return own.launch("other") if found else None
        background, branch, loop = statement.in_background, statement.in_branch, statement.in_loop
        return replace(found[0], in_background=background, in_branch=branch, in_loop=loop)

    # -- builtins

    def _export(self, words: Sequence[Word], statement: Statement) -> None:
        for word in words:
            if assigned_name(word) is not None:
                self._assign(word, statement, exported=True)
            elif word.plain in self._current:
                setting = self._current[word.plain]
                self._current[word.plain] = exported = replace(setting, is_exported=True)
                self.settings = [exported if one is setting else one for one in self.settings]

    def _declare(self, words: Sequence[Word], statement: Statement) -> None:
        options = [word.plain or "" for word in words if (word.plain or "").startswith(("-", "+"))]
        exported = any("x" in option for option in options)
        for word in words:
            if assigned_name(word) is not None:
                self._assign(word, statement, exported=exported or None)

    def _unset(self, words: Sequence[Word], statement: Statement) -> None:
        names = [word.plain for word in words if word.plain]
        self._variables.forget(names)
        for name in names:
            self._current.pop(name, None)

    def _set(self, words: Sequence[Word], statement: Statement) -> None:
        text = [word.plain for word in words]
        if "-a" in text or "allexport" in text:
            self._exports_all = text[:1] != ["+o"]
        elif "+a" in text:
            self._exports_all = False

    def _source(self, words: Sequence[Word], statement: Statement) -> None:
        fields = self._fields(words[:1])
        if fields and not fields[0].text.endswith(_HARMLESS):
            self._variables.forget()
            self._current = {name: replace(one, value=unknown_mark(name)) for name, one in self._current.items()}

    def _read_names(self, words: Sequence[Word], statement: Statement) -> None:
        self._variables.forget([word.plain for word in words if word.plain])

    def _eval(self, words: Sequence[Word], statement: Statement) -> None:
        text = " ".join(field.text for field in self._fields(words))
        launch = self._inner(text, self._place(statement).line, self._current, statement, inside=self._inside_step)
        if launch is not None:
            self._add(replace(launch, place=self._place(statement)))

    def _wait(self, words: Sequence[Word], statement: Statement) -> None:
        self.waits[self._place(statement).line] = statement.in_loop

    def _pass(self, words: Sequence[Word], statement: Statement) -> None:
        """Nothing that matters here."""


_BUILTINS = {
    "export": ScriptReader._export,
    "declare": ScriptReader._declare,
    "typeset": ScriptReader._declare,
    "local": ScriptReader._declare,
    "readonly": ScriptReader._declare,
    "unset": ScriptReader._unset,
    "set": ScriptReader._set,
    "source": ScriptReader._source,
    ".": ScriptReader._source,
    "read": ScriptReader._read_names,
    "mapfile": ScriptReader._read_names,
    "getopts": ScriptReader._read_names,
    "eval": ScriptReader._eval,
    "wait": ScriptReader._wait,
    **dict.fromkeys(("echo", "printf", "[[", "[", "test", "cd", "return", "exit", "shift"), ScriptReader._pass),
}
