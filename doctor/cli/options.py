"""Options that several commands share, and the settings that they override."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from doctor.cli.output import print_notice
from doctor.core.files.trusted_owners import VARIABLE

if TYPE_CHECKING:
    from doctor.core.report_document import FailOn
    from doctor.core.settings import Settings

Command = TypeVar("Command", bound=Callable[..., object])

FORMATS = ("text", "json", "markdown", "html", "junit", "github")


def options(*several: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of the help text."""

    def decorate(command: Command) -> Command:
        for option in reversed(several):
            command = option(command)
        return command

    return decorate


def format_option(*names: str) -> Callable[[Command], Command]:
    """``--format`` with these choices, the first of which is ``text``."""
    return click.option("--format", "form", type=click.Choice(names), default="text", help="How it is written.")


PATH = click.Path(path_type=Path, readable=False)
"""A path that is looked at by those who read or write it: one that can't be read among others is listed."""

output_option = click.option("-o", "--output", type=PATH, help="Write it to this file, not to standard output.")
select_option = click.option(
    "--select", default="", metavar="IDS", help="Only these: ids, families or ALL, comma-separated."
)
plugin_option = click.option("--plugin", "plugins", multiple=True, type=PATH, help="A Python file with further checks.")
CONFIG, ISOLATED = "doctor.config", "doctor.isolated"
"""Where the context of a command keeps what was said of settings files."""


def _kept(name: str) -> Callable[[click.Context, click.Parameter, object], object]:
    def keep(context: click.Context, _: click.Parameter, value: object) -> object:
        context.meta[name] = value
        return value

    return keep


settings_options = options(
    click.option(
        "--config",
        type=PATH,
        metavar="FILE",
        expose_value=False,
        callback=_kept(CONFIG),
        help="Read settings from FILE (default: $DOCTOR_CONFIG, else the project's doctor.toml or pyproject.toml, else "
        "~/.config/rankdoctor/doctor.toml). Plugins of a project's file are loaded only with this option.",
    ),
    click.option(
        "--isolated", is_flag=True, expose_value=False, callback=_kept(ISOLATED), help="Read no settings file."
    ),
)
redact_option = click.option(
    "--redact", is_flag=True, help="Replace names of users, hosts, paths, buckets and addresses with placeholders."
)
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    help="Seconds to wait for the other ranks, and for any collector (default: 30).",
)
read_timeout_option = click.option(
    "--read-timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Stop reading after S seconds and exit 3 (default: by size, at least 60 for each file).",
)
gathering_options = options(
    timeout_option,
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
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Only findings and the verdict.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Every check on a line of its own, every value.")
judging_options = options(
    format_option(*FORMATS),
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
    quiet_option,
    verbose_option,
)


def settings_of(
    select: str,
    ignore: str,
    fail_on: FailOn | None,
    plugins: tuple[Path, ...],
    timeout: float | None,
    *,
    commands: bool = False,
) -> Settings:
    """The settings of the file that counts (see ``--config`` and ``--isolated``) with what was typed put over them.

    Raises:
        UnusableError: a settings file can't be used.
    """
    from doctor.core.settings import read_settings
    from doctor.session import with_command_line

    meta = click.get_current_context().meta
    config, isolated = meta.get(CONFIG), meta.get(ISOLATED, False)
    if config is not None and isolated:
        raise click.UsageError("--config and --isolated exclude each other.")
    return with_command_line(
        read_settings(here(), config=config, isolated=isolated),
        select=words(select),
        ignore=words(ignore),
        fail_on=fail_on,
        plugins=plugins,
        timeout=timeout,
        commands=commands,
    )


def print_notes(settings: Settings) -> None:
    """Say which files and plugins of the settings do not count."""
    for note in settings.notes:
        print_notice(note)


def here() -> Path:
    """The current directory; one that was deleted holds no settings."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def words(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]
