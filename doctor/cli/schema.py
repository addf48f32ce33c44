"""``doctor schema``: the JSON Schema of what commands write, or of the settings."""

from __future__ import annotations

from pathlib import Path

import click

from doctor.cli.options import output_option
from doctor.cli.output import write
from doctor.core.errors import UnusableError
from doctor.version import PACKAGE

NAMES = ("report", "capture", "records", "settings")


@click.command("schema", short_help="Print the JSON Schema of reports, captures, records or settings.")
@click.argument("name", type=click.Choice(NAMES))
@output_option
def command(name: str, output: Path | None) -> None:
    """Print the JSON Schema of reports, captures, records or settings.

    report: what --format json writes. capture: what doctor capture writes. records: what each rank of a monitored run
    writes (rank-3.json). settings: doctor.toml, for the completion of editors.

    Example: doctor schema settings -o doctor.schema.json
    """
    try:
        text = Path(PACKAGE, "schemas", f"{name}.json").read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"the schema {name} is missing in the installation: {error.strerror}") from error
    write(text, output)
