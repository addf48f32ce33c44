"""Data of a launch file: the variables that it sets and the programs that it launches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from doctor.knowledge.launcher_index import COMMANDS
from doctor.knowledge.launchers import LaunchCommand
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.partial_text import is_known, is_placeholder, names_in, whole_number

if TYPE_CHECKING:
    from doctor.lint.engine.project_files import ProjectFiles

_LISTS_TORCH = re.compile(
    r"^[\s>*+|`\d.)-]*\[?(?:py)?torch\]?(?:\(http[^)\s]*\))?[ \t`*|=:(v]*(?P<listed>\d+\.\d+(?:\.\d+)*)"
    r"(?:\+(?:cu|cpu|rocm)[\d.]*)?[\s|`)]*$|"
    r"\b(?:tested|developed|trained|implemented|evaluated|support only|experiments)\b(?:[^.\n]|\.\d){0,80}?"
    r"\b(?:py)?torch[ \t`*=:v]*(?P<tested>\d+\.\d+(?:\.\d+)*)"
    r"(?![\d.]*(?:\d|\.x|[ \t`*)]*(?:\+|<|>|-|~|/|(?:or\b|and |versions? )?(?:later|newer|above|higher|up|or)\b)))|"
    r"badge/(?:py)?torch-v?(?P<badge>\d+\.\d+(?:\.\d+)*)-",
    re.MULTILINE | re.IGNORECASE,
)
"""What a project was run with: an entry of a list, or a row of a table (``* pytorch1.2.0``), a sentence that says so
("tested with PyTorch 1.10"), and a badge."""
_NO_LAUNCHER = LaunchCommand("", starts="", default_processes=1)


@dataclass(frozen=True)
class EnvironmentSetting:
    """An environment variable that the file sets. ``value`` may hold marks (:mod:`doctor.lint.launch.partial_text`).

    ``is_exported``: programs see it; ``is_certain``: it is not in a branch, loop or function; ``for_task``: every task
    of a SLURM step sets it.
    """

    name: str
    value: str
    place: SourceLocation
    is_exported: bool = True
    is_certain: bool = True
    for_task: bool = False

    @property
    def known_value(self) -> str | None:
        """The value if all of it is known; that of a template is not."""
        return self.value if is_known(self.value) and not is_placeholder(self.name, self.value) else None

    @property
    def number(self) -> int | None:
        """The value as a whole number."""
        return whole_number(self.value)

    @property
    def reads(self) -> tuple[str, ...]:
        """The unknown variables in it."""
        return names_in(self.value)


class EnvironmentSource:
    """A file that sets environment variables: a launch file, or a script by ``os.environ``. ``releases``: of
    distributions, as its project permits, or as they are installed."""

    releases: Mapping[str, str]

    @property
    def settings(self) -> tuple[EnvironmentSetting, ...]:
        """The variables that it sets, in the order of the text."""
        raise NotImplementedError

    @property
    def stated_torch(self) -> str:
        """The torch that the project bounds, or that its pages list; empty if it states none."""
        known = self.releases
        if not isinstance(known, Releases) or known.is_bounded("torch"):
            return known.get("torch", "")
        found = (one for text in known.pages for one in _LISTS_TORCH.finditer(text))
        return next((one["listed"] or one["tested"] or one["badge"] for one in found), "")

    @property
    def permitted_torch(self) -> tuple[str, str]:
        """The oldest and the newest torch that the project permits; empty where it states none."""
        known, newest = self.releases, self.stated_torch
        if not isinstance(known, Releases):
            return "", newest
        return known.oldest("torch"), newest or (known.get("torch", "") if known.is_certain("torch") else "")


def import_six(texts: Iterable[str]) -> bool:
    """Whether one of these modules imports ``torch._six`` outside of ``try``."""
    return any(line.startswith(_IMPORTS_SIX) for text in texts for line in text.splitlines())


SIX = "torch._six"
LAST_WITH_SIX = "1.13"
"""The last line of torch with that module; 2.0 removed it (pull request 94709)."""
_IMPORTS_SIX = (f"from {SIX} import", f"import {SIX}")


@dataclass(frozen=True)
class Launch:
    """A program that is started: that of a launcher (:class:`doctor.knowledge.launchers.LaunchCommand`), ``python`` or
    ``other``.

    ``options``: by long name with dashes, ``"true"`` for a flag; the last value counts. ``script``: what it runs, with
    ``arguments``. ``is_open``: unknown words may hold more options. ``inner``: the program that it starts, if that is
    known too. ``settings``: the environment at this place, as far as the file sets it. ``module``: the one that a
    launcher is started as, by ``python -m``.
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
    module: str = ""

    @property
    def command(self) -> LaunchCommand:
        """The launcher's command syntax; of other programs an empty one."""
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
        """This launch and those that it starts, outermost first."""
        yield self
        if self.inner is not None:
            yield from self.inner.chain()

    def option(self, *names: str) -> str | None:
        """The value of the first given option; it may hold marks."""
        spelled = (name.replace("_", "-") for name in names)
        return next((self.options[name] for name in spelled if name in self.options), None)

    def known_option(self, *names: str) -> str | None:
        """The same value if all of it is known; that of a template is not."""
        value = self.option(*names)
        if value is None or not is_known(value) or any(is_placeholder(name, value) for name in names):
            return None
        return value

    def number(self, *names: str) -> int | None:
        """The same value as an integer."""
        return whole_number(self.option(*names))

    def setting(self, name: str) -> str | None:
        """A variable of its environment if the file sets it and all of it is known."""
        setting = self.settings.get(name)
        return setting.known_value if setting is not None else None


@dataclass(frozen=True)
class LaunchFile(EnvironmentSource):
    """``launches``: the outermost programs in the order of the text. ``notes``: what was not read, and why.
    ``releases``: of distributions that its project permits; ``modules``: the files of its project."""

    path: str
    settings: tuple[EnvironmentSetting, ...] = ()
    launches: tuple[Launch, ...] = ()
    notes: tuple[str, ...] = ()
    releases: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    modules: ProjectFiles | None = field(default=None, kw_only=True)

    @property
    def permitted_torch(self) -> tuple[str, str]:
        """The oldest and the newest torch that the project permits, also by what it imports."""
        oldest, newest = super().permitted_torch
        return oldest, newest or (LAST_WITH_SIX if self.imports_six else "")

    @property
    def imports_six(self) -> bool:
        """Whether a module of the project imports ``torch._six``, which torch 2.0 removed, at its top level, where
        nothing catches the error."""
        return self.modules is not None and import_six(self.modules.texts_with(self.path, SIX))

    def may_tell(self, distribution: str) -> bool:
        """Whether the release of a distribution is known, bounded or the newest one, or the file is linted alone."""
        known = self.releases
        return not isinstance(known, Releases) or not known.is_of_folder or known.is_certain(distribution)
