"""What a launch file says: variables that it sets, and who is started, by which launcher, with which options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from doctor.knowledge.launcher_index import COMMANDS
from doctor.knowledge.launchers import LaunchCommand
from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.partial_text import is_known, names_in, whole_number

_NO_LAUNCHER = LaunchCommand("", starts="", default_processes=1)


@dataclass(frozen=True)
class EnvironmentSetting:
    """A variable of the environment that the file sets. ``value`` may hold marks
    (:mod:`doctor.lint.launch.partial_text`).

    ``is_exported``: programs see it; ``is_certain``: it stands in no branch, loop or function; ``for_task``: set inside
    a step of SLURM, by every task.
    """

    name: str
    value: str
    place: SourceLocation
    is_exported: bool = True
    is_certain: bool = True
    for_task: bool = False

    @property
    def told(self) -> str | None:
        """The value, where all of it can be told."""
        return self.value if is_known(self.value) else None

    @property
    def number(self) -> int | None:
        """The value as a whole number."""
        return whole_number(self.value)

    @property
    def reads(self) -> tuple[str, ...]:
        """The variables of which it is made, as far as they are not known."""
        return names_in(self.value)


@dataclass(frozen=True)
class Launch:
    """A program that is started: that of a launcher (:class:`doctor.knowledge.launchers.LaunchCommand`), ``python`` or
    ``other``.

    ``options``: by long name with dashes, ``"true"`` for a flag; the last one counts. ``script``: what it runs, and
    ``arguments`` its words. ``is_open``: words that can't be told may hold more options. ``inner``: what it starts,
    where that is such a program too. ``settings``: the environment at this place, as far as the file sets it.
    """

    program: str
    place: SourceLocation
    options: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    arguments: tuple[str, ...] = ()
    is_open: bool = False
    inner: Launch | None = None
    settings: Mapping[str, EnvironmentSetting] = field(default_factory=dict)
    in_background: bool = False
    in_branch: bool = False
    in_loop: bool = False

    @property
    def command(self) -> LaunchCommand:
        """How the launcher is started; for other programs one without options."""
        return COMMANDS.get(self.program, _NO_LAUNCHER)

    @property
    def is_agent(self) -> bool:
        """Whether it starts the ranks of its host."""
        return self.command.starts == "ranks"

    @property
    def starts_tasks(self) -> bool:
        """Whether it starts tasks on several hosts, as srun and mpirun do."""
        return self.command.starts == "tasks"

    def chain(self) -> Iterator[Launch]:
        """This one and what it starts, from outside in."""
        yield self
        if self.inner is not None:
            yield from self.inner.chain()

    def option(self, *names: str) -> str | None:
        """The value of the first option that is given; it may hold marks."""
        return next((self.options[name] for name in names if name in self.options), None)

    def told(self, *names: str) -> str | None:
        """The same, where all of it can be told."""
        value = self.option(*names)
        return value if value is not None and is_known(value) else None

    def number(self, *names: str) -> int | None:
        """The same as a whole number."""
        return whole_number(self.option(*names))

    def setting(self, name: str) -> str | None:
        """A variable of its environment, where the file sets it and all of it can be told."""
        setting = self.settings.get(name)
        return setting.told if setting is not None else None


@dataclass(frozen=True)
class LaunchFile:
    """``path`` as it is shown. ``launches``: in the order of the text, the outermost program of each. ``notes``: what
    was not read, and why."""

    path: str
    settings: tuple[EnvironmentSetting, ...] = ()
    launches: tuple[Launch, ...] = ()
    notes: tuple[str, ...] = ()
