"""What was typed, as settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doctor.settings import FailOn, Settings


def settings_of(
    select: str, ignore: str, fail_on: FailOn | None, plugins: tuple[Path, ...], timeout: float | None
) -> Settings:
    """The settings of the current directory with what was typed put over them.

    Raises:
        UnusableError: a settings file can't be used.
    """
    from doctor.session import with_command_line
    from doctor.settings import read_settings

    return with_command_line(
        read_settings(here()),
        select=words(select),
        ignore=words(ignore),
        fail_on=fail_on,
        plugins=plugins,
        timeout=timeout,
    )


def here() -> Path:
    """The current directory; one that was deleted holds no settings."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def words(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]
