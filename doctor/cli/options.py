"""Options that several commands share, and the settings that they override."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from doctor.cli.output import print_notice
from doctor.core.files.trusted_owners import VARIABLE
from doctor.core.text import words

if TYPE_CHECKING:
    from doctor.core.report_document import FailOn
    from doctor.core.settings import Settings

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class CommonOptions(NamedTuple):
    """Values of the options that several commands share; defaults for those that a command lacks."""

    form: str = "text"
    output: Path | None = None
    select: str = ""
    ignore: str = ""
    fail_on: FailOn | None = None
    strict: bool = False
    expect: Path | None = None
    config: Path | None = None
    isolated: bool = False
    plugins: tuple[Path, ...] = ()
    redact: bool = False
    quiet: bool = False
    verbose: bool = False
    timeout: float | None = None

    def settings(self, *, commands: bool = False) -> Settings:
        """Return the settings of the file that applies, overridden by these options.

        ``commands``: the output of commands that collectors run is kept."""
        from doctor.core.settings import read_settings
        from doctor.session import with_command_line

        if self.config is not None and self.isolated:
            raise click.UsageError("--config and --isolated exclude each other.")
        return with_command_line(
            read_settings(here(), config=self.config, isolated=self.isolated),
            select=words(self.select),
            ignore=words(self.ignore),
            fail_on=self.fail_on,
            plugins=self.plugins,
            timeout=self.timeout,
            commands=commands,
        )


def with_common_options(command: Command) -> Command:
    """Pass ``command`` its common options as one argument ``options``, of type :class:`CommonOptions`."""

    @wraps(command)
    def grouped(**values: Any) -> Any:
        common = {name: values.pop(name) for name in CommonOptions._fields if name in values}
        return command(options=CommonOptions(**common), **values)

    return grouped


def in_order(*several: Decorator) -> Decorator:
    """Return several options as one decorator, in the order of the help text."""

    def decorate(command: Command) -> Command:
        for option in reversed(several):
            command = option(command)
        return command

    return decorate


def format_option(*names: str) -> Decorator:
    """Return ``--format`` with these choices; the default is ``text``."""
    return click.option("--format", "form", type=click.Choice(names), default="text", help="How it is written.")


PATH = click.Path(path_type=Path, readable=False)
"""Not checked by click: of several inputs, an unreadable one is listed in the report instead of a usage error."""

output_option = click.option("-o", "--output", type=PATH, help="Write it to this file, not to standard output.")
select_option = click.option(
    "--select", default="", metavar="IDS", help="Only these: ids, families or ALL, comma-separated."
)
plugin_option = click.option("--plugin", "plugins", multiple=True, type=PATH, help="A Python file with further checks.")


settings_options = in_order(
    click.option(
        "--config",
        type=PATH,
        metavar="FILE",
        help="Read settings from FILE (default: $DOCTOR_CONFIG, else the project's doctor.toml or pyproject.toml, else "
        "~/.config/rankdoctor/doctor.toml). Plugins of a project's file are loaded only with this option.",
    ),
    click.option("--isolated", is_flag=True, help="Read no settings file."),
)
redact_option = click.option(
    "--redact", is_flag=True, help="Replace names of users, hosts, paths, buckets and addresses with placeholders."
)
gathering_options = in_order(
    click.option(
        "--timeout",
        type=click.FloatRange(0.1, 3600),
        help="Seconds to wait for the other ranks, and for any collector (default: 30).",
    ),
    click.option(
        "--gather",
        type=click.Choice(("auto", "none", "store", "share", "ray")),
        default="auto",
        help="How the ranks of a job find together (auto: as the launcher tells).",
    ),
    click.option("--share", type=PATH, metavar="DIR", help="Meet in a folder that all hosts see; needs no torch."),
    click.option(
        "--share-group",
        "group",
        metavar="GROUP",
        envvar=VARIABLE,
        help="Trust the members of this group (name or GID) in the shared folder, and let them read what is written "
        f"there; also {VARIABLE} (default: trust this user alone).",
    ),
    click.option("--ray", metavar="ADDRESS", help="Look at every node of this Ray cluster (auto, HOST:PORT, ray://…)."),
    click.option("--master", metavar="HOST:PORT", help="Meet here, where no MASTER_ADDR and MASTER_PORT are set."),
)
ignore_option = click.option(
    "--ignore", default="", metavar="IDS", help="Findings of these do not count; they stay visible."
)
fail_on_option = click.option(
    "--fail-on", type=click.Choice(("error", "warning", "never")), help="Exit 1 from this severity on (error)."
)
strict_option = click.option("--strict", is_flag=True, help="What could not be judged makes the verdict inconclusive.")
detail_options = in_order(
    click.option("-q", "--quiet", is_flag=True, help="Only findings and the verdict."),
    click.option("-v", "--verbose", is_flag=True, help="Every check on a line of its own, every value."),
)
report_options = in_order(
    format_option("text", "json", "markdown", "html", "junit", "github"),
    output_option,
    select_option,
    ignore_option,
    fail_on_option,
    strict_option,
    click.option(
        "--expect",
        type=PATH,
        metavar="CAPTURE",
        help="A capture of a job that worked: what differs from it is odd, whatever the majority has.",
    ),
    settings_options,
    plugin_option,
    redact_option,
    detail_options,
)


def print_notes(settings: Settings) -> None:
    """Print which files and plugins of the settings are ignored."""
    for note in settings.notes:
        print_notice(note)


def here() -> Path:
    """Return the current directory, or ``/`` if it was deleted."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")
