"""What was typed, as settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from doctor.cli.options import CONFIG, ISOLATED
from doctor.cli.output import print_notice

if TYPE_CHECKING:
    from doctor.core.report_document import FailOn
    from doctor.core.settings import Settings


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
