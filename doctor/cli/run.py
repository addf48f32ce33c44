"""``doctor run``: starts a command whose training processes are watched without an edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from doctor.cli.completion import complete_checks, complete_file
from doctor.core.text import words
from doctor.monitor.autostart.launch import CHOICES, replace_process

_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP = """Run COMMAND, and watch its training processes as the callback would, without an edit of the script.

\b
Example: doctor run --on-hang abort -- torchrun --nproc-per-node=8 train.py

Watched are the Trainers of Lightning and Hugging Face, and loops of your own around DistributedDataParallel or FSDP,
with Accelerate and Fabric too. A script that has the callback or doctor.watch keeps its own. All Python processes below
COMMAND inherit it; those of another user, interpreter or Python release are not watched and say so, and `python -I`,
`-E` and `-S` can't be reached. DOCTOR_DISABLE=1 turns it off.

The exit code is that of COMMAND; 126 if it can't be executed, 127 if it is not found, and 2 for a wrong option of
doctor run.
"""


@click.command("run", help=_HELP, short_help="Run a training command and watch its ranks.", context_settings=_SETTINGS)
@click.option(
    "--folder",
    "dirpath",
    type=click.Path(path_type=Path),
    help="Write the report and the records of the ranks here (default: rankdoctor/ next to the output of the run).",
)
@click.option(
    "--on-error",
    type=click.Choice(CHOICES["on_error"]),
    help="raise: end all ranks at the start if an error is found that would break the run (default: warn).",
)
@click.option(
    "--on-hang",
    type=click.Choice(CHOICES["on_hang"]),
    help="abort: end a rank once a hang has been explained (default: report).",
)
@click.option(
    "--hang-after",
    type=float,
    metavar="S",
    help="Seconds without progress that count as a hang (default: adapts to the run's own steps).",
)
@click.option("--every-n-steps", type=int, metavar="N", help="Interval of memory samples and checksums (default: 50).")
@click.option(
    "--probe",
    type=click.Choice(CHOICES["probe"]),
    help="light: probe the connections between hosts at the start (default: none).",
)
@click.option("--prometheus-port", type=int, metavar="PORT", help="Serve metrics on this port of each host.")
@click.option(
    "--select",
    default="",
    metavar="IDS",
    help="Run these checks only: ids or families, comma-separated.",
    shell_complete=complete_checks,
)
@click.option(
    "--ignore",
    default="",
    metavar="IDS",
    help="Accept these findings: ids or families, comma-separated.",
    shell_complete=complete_checks,
)
@click.option("--share-group", metavar="GROUP", help="Share the files of the run with this group (name or number).")
@click.option(
    "--html/--no-html",
    "html_report",
    default=None,
    help="Write report.html at the end (default: unless a run of less than 30 s was healthy).",
)
@click.option("--otlp", is_flag=True, help="Send telemetry to the collector of OTEL_EXPORTER_OTLP_ENDPOINT.")
@click.option("--otlp-endpoint", metavar="URL", help="Send telemetry to this collector (http://HOST:4318).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_file)
def command(
    command: tuple[str, ...], select: str, ignore: str, otlp: bool, otlp_endpoint: str | None, **given: Any
) -> None:
    """Replace this process by the command; see ``_HELP``."""
    from doctor.monitor.autostart.options import encode_options

    try:
        sends = otlp if otlp_endpoint is None else otlp_endpoint
        options = encode_options({**given, "otlp": sends, "select": words(select), "ignore": words(ignore)})
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    raise SystemExit(replace_process(command, options))
