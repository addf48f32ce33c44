"""Options that several commands share, and the settings that they override."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from doctor.cli.completion import complete_checks
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

    def settings(self, *, commands: bool = False, preview: bool = False, tests: bool = False) -> Settings:
        """Return the settings of the file that applies, overridden by these options.

        ``commands``: the output of commands that collectors run is kept; ``preview``: findings in preview are
        reported; ``tests``: those in tests are."""
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
            preview=preview,
            tests=tests,
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
    return click.option(
        "--format", "form", type=click.Choice(names), default="text", show_default=True, help="Output format."
    )


PATH = click.Path(path_type=Path, readable=False)
"""Not checked by click: of several inputs, an unreadable one is listed in the report instead of a usage error."""

output_option = click.option("-o", "--output", type=PATH, metavar="FILE", help="Write to FILE instead of stdout.")
select_option = click.option(
    "--select",
    default="",
    metavar="IDS",
    help="Run only these checks: ids, families or ALL, comma-separated.",
    shell_complete=complete_checks,
)
plugin_option = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="Load checks from this Python file too (repeatable).",
)


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
    "--redact", is_flag=True, help="Replace user names, hosts, paths, buckets and addresses with placeholders."
)
gathering_options = in_order(
    click.option(
        "--timeout",
        type=click.FloatRange(0.1, 3600),
        metavar="SECONDS",
        help="Seconds to wait for the other ranks, and for any collector (default: 30).",
    ),
    click.option(
        "--gather",
        type=click.Choice(("auto", "none", "store", "share", "ray")),
        default="auto",
        show_default=True,
        help="How ranks find each other (auto: from the launcher's environment).",
    ),
    click.option(
        "--share", type=PATH, metavar="DIR", help="Rendezvous in a folder that all hosts share; does not need PyTorch."
    ),
    click.option(
        "--share-group",
        "group",
        metavar="GROUP",
        envvar=VARIABLE,
        help="Trust members of this group (name or GID) in the shared folder, and let them read the files there "
        f"(default: ${VARIABLE}, else only this user).",
    ),
    click.option(
        "--ray", metavar="ADDRESS", help="Check every node of this Ray cluster: auto, HOST:PORT or ray://HOST:PORT."
    ),
    click.option(
        "--master", metavar="HOST:PORT", help="Rendezvous address, if MASTER_ADDR and MASTER_PORT are not set."
    ),
)
ignore_option = click.option(
    "--ignore",
    default="",
    metavar="IDS",
    help="Show findings of these checks, but do not fail on them.",
    shell_complete=complete_checks,
)
fail_on_option = click.option(
    "--fail-on",
    type=click.Choice(("error", "warning", "never")),
    help="Exit 1 if a finding has at least this severity (default: error).",
)
strict_option = click.option("--strict", is_flag=True, help="Exit 3 if any check could not be evaluated.")
detail_options = in_order(
    click.option("-q", "--quiet", is_flag=True, help="Show only findings and the verdict."),
    click.option("-v", "--verbose", is_flag=True, help="Show every check on its own line, and all evidence."),
)


def report_options(*more_formats: str) -> Decorator:
    """Return the options of a command that writes a report, in the usual formats and ``more_formats``."""
    return in_order(
        format_option("text", "json", "markdown", "html", "junit", "github", *more_formats),
        output_option,
        select_option,
        ignore_option,
        fail_on_option,
        strict_option,
        click.option(
            "--expect",
            type=PATH,
            metavar="CAPTURE",
            help="Baseline capture from a working job; report every difference from it, even if most ranks agree.",
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
