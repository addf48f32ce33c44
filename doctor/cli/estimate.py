"""``doctor estimate``: traces training steps of a factory's model and reports their memory."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from doctor.cli.options import (
    PATH,
    CommonOptions,
    detail_options,
    fail_on_option,
    format_option,
    here,
    ignore_option,
    output_option,
    print_notes,
    redact_option,
    select_option,
    settings_options,
    with_common_options,
)
from doctor.cli.output import print_notice, rendered, write, write_drawn
from doctor.core.errors import UnusableError

if TYPE_CHECKING:
    from doctor.core.report_document import Report
    from doctor.estimate.data_model import Estimate, MeasuredThroughput, TrainingPlan
    from doctor.estimate.device_budget import DeviceBudget

STRATEGIES = ("none", "ddp", "fsdp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
ZERO_GRADS = ("early", "late", "in-place")
OUTPUTS = ("held", "step", "released")
COUNT = click.IntRange(1, 1 << 20)
SECONDS = 90.0
"""Default time for all traces, and again for ``--measure``."""

BEGINNING = 0.8
"""Share of that time in which a further trace may begin; the last one ends in the rest."""


@click.command("estimate")
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("--devices", type=COUNT, metavar="N", help="Devices of a node (default: as the Trainer says, else 1).")
@click.option("--nodes", type=COUNT, metavar="N", help="Nodes (default: as the Trainer says, else 1).")
@click.option("--strategy", type=click.Choice(STRATEGIES), help="How ranks train together (several: ddp).")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of weights and of the computation (32-true).")
@click.option("--optimizer", metavar="NAME", help="A class of torch.optim (default: the factory's, else AdamW).")
@click.option("--batch-size", type=COUNT, metavar="N", help="Samples of one rank and micro-batch (the factory's).")
@click.option("--accumulate", type=COUNT, metavar="N", help="Micro-batches of one optimizer step.")
@click.option(
    "--zero-grad", type=click.Choice(ZERO_GRADS), help="When the loop clears gradients (early; Lightning: late)."
)
@click.option("--outputs", type=click.Choice(OUTPUTS), help="How long the loop refers to the model's outputs (held).")
@click.option(
    "--checkpointing", is_flag=True, default=None, help="Run each block that repeats again in the backward pass."
)
@click.option("--device-memory", metavar="SIZE", help="Of one device, such as 80GiB.")
@click.option("--device", metavar="NAME", help='A device by name, such as "H100 80GB".')
@click.option(
    "--like", type=PATH, metavar="CAPTURE", help="Devices and hosts as a capture shows them, with what is free."
)
@click.option("--host-memory", metavar="SIZE", help="Of one node, such as 512GiB.")
@click.option("--ranks-per-device", type=COUNT, metavar="N", help="Ranks that share a device.")
@click.option("--measure", is_flag=True, help="Train a few steps here: are several ranks on one device worth it?")
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(1, 3600),
    default=SECONDS,
    help=f"Seconds for all traces, and again for --measure (default: {SECONDS:g}).",
)
@format_option("text", "json", "markdown", "junit", "github")
@output_option
@select_option
@ignore_option
@fail_on_option
@settings_options
@redact_option
@detail_options
@with_common_options
def command(
    options: CommonOptions,
    factory: str,
    device_memory: str | None,
    device: str | None,
    like: Path | None,
    host_memory: str | None,
    measure: bool,
    seconds: float,
    **plan_options: Any,
) -> None:
    """Tell the peak memory of a rank before the run, whether it fits, the largest batch that does, and what would help.

    MODULE may be a file: train.py:make. The factory returns a module (or a LightningModule) and a batch, or a Trainer
    with them. It is called in a child process on tensors without data: no GPU is needed, no weights are allocated.
    """
    import msgspec

    from doctor.core.capture import from_document, read_capture, to_document
    from doctor.core.redact.placeholders import redact
    from doctor.estimate.device_budget import device_budget_of, with_host_memory
    from doctor.estimate.evaluation import report_of
    from doctor.session import load_checks

    started = time.time()
    if not re.fullmatch(r"[^:]+:\w+", factory):
        raise click.BadParameter("it is written as train:make or train.py:make", param_hint="MODULE:FACTORY")
    settings = options.settings()
    print_notes(settings)
    job = read_capture(like).job() if like is not None else None
    if job is not None and options.redact:
        job = from_document(redact(to_document(job)))
    budget = device_budget_of(device_memory, device, job, devices=plan_options["devices"] or 1)
    if host_memory:
        budget = with_host_memory(budget, host_memory)
    registry = load_checks(settings)
    estimate = _estimate(factory, plan_options, budget, seconds)
    if measure:
        estimate = msgspec.structs.replace(estimate, measured=_measured(factory, estimate.plan, seconds))
    report = report_of(estimate, budget, registry, settings, started=started)
    _write_report(report, estimate, options)
    raise SystemExit(report.exit_code)


def _estimate(factory: str, plan_options: dict[str, Any], budget: DeviceBudget, seconds: float) -> Estimate:
    from doctor.estimate.data_model import plan_of
    from doctor.estimate.estimator import estimate_of
    from doctor.estimate.memory.non_torch import workspace
    from doctor.estimate.tracer_client import TracerClient

    tell, done = _progress()
    tell(f"loading {factory}")
    last = time.monotonic() + seconds * BEGINNING
    try:
        size = workspace(budget.capability)
        with TracerClient(
            factory, directory=here(), seconds=seconds, workspace=size, capability=budget.capability
        ) as tracer:
            plan = plan_of(plan_options, tracer.loading.asked)
            left = last - time.monotonic()
            return estimate_of(tracer.run, tracer.loading, plan, budget, seconds=left, tell=tell)
    finally:
        done()


def _measured(factory: str, plan: TrainingPlan, seconds: float) -> tuple[MeasuredThroughput, ...]:
    from doctor.estimate.measure.throughput import measure

    tell, done = _progress()
    try:
        tell("measuring")
        return measure(factory, plan, directory=here(), seconds=seconds)
    except UnusableError as error:
        print_notice(str(error))
        return ()
    finally:
        done()


def _progress() -> tuple[Callable[[str], None], Callable[[], None]]:
    """Return two functions that show and clear a progress line, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None, lambda: None

    def line(text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()

    return lambda words: line(f"doctor: {words} …"[:78]), lambda: line("")


def _write_report(report: Report, estimate: Estimate, options: CommonOptions) -> None:
    if options.form == "text":
        from doctor.report.estimate.terminal import draw_estimate

        write_drawn(partial(draw_estimate, report), estimate, options)
    elif options.form == "markdown":
        from doctor.report.estimate.markdown import render_estimate_markdown

        write(render_estimate_markdown(report, estimate), options.output)
    else:
        from doctor.report.estimate.wording import github_notice

        notice = github_notice(estimate) if options.form == "github" else ""
        write(notice + rendered(report, options.form), options.output)
