"""``doctor estimate``: traces training steps of a model and reports their memory."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from doctor.cli.completion import complete_file
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
from doctor.cli.progress import progress_line
from doctor.core.errors import UnusableError

if TYPE_CHECKING:
    from doctor.core.report_document import Report
    from doctor.estimate.configuration.job import JobSource
    from doctor.estimate.data_model import Estimate, MeasuredThroughput, TrainingPlan
    from doctor.estimate.device_budget import DeviceBudget

STRATEGIES = ("none", "ddp", "fsdp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
ZERO_GRADS = ("early", "late", "in-place")
OUTPUTS = ("held", "step", "released")
QUANTIZATIONS = ("4bit", "8bit")
COUNT = click.IntRange(1, 1 << 20)
SECONDS = 90.0
"""Default time for all traces, and again for ``--measure``."""

BEGINNING = 0.8
"""Share of that time in which a further trace may begin; the last one ends in the rest."""


class _EstimateCommand(click.Command):
    """Answers the command line of a training with what to name instead of its script."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; the errors are Click's, but for scripts."""
        script = next((each for each in args if re.fullmatch(r"[^-].*\.(py|sh)", each)), None)
        try:
            return super().parse_args(context, args)
        except click.UsageError:
            if script is None:
                raise
            raise _no_function(script) from None


def _no_function(script: str) -> click.UsageError:
    example = f"{script}:make" if script.endswith(".py") else "train.py:make"
    return click.UsageError(
        f"{script} is a script, which estimate does not run: name a function without arguments that returns the module "
        f"and a batch ({example}), or a configuration of the model (config.json, hf:ORG/NAME)."
    )


@click.command("estimate", cls=_EstimateCommand, short_help="Estimate the peak memory per rank before a run.")
@click.argument("model", metavar="MODULE:FACTORY|CONFIG|FOLDER|hf:ORG/NAME", shell_complete=complete_file)
@click.option("--devices", type=COUNT, metavar="N", help="Devices per node (default: from the Trainer, else 1).")
@click.option("--nodes", type=COUNT, metavar="N", help="Nodes (default: from the Trainer, else 1).")
@click.option(
    "--strategy", type=click.Choice(STRATEGIES), help="Parallelism strategy (default: ddp for several ranks)."
)
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Precision of weights and computation (default: 32-true)."
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="A class of torch.optim or bitsandbytes, such as adamw8bit (default: the factory's, else AdamW).",
)
@click.option(
    "--batch-size", type=COUNT, metavar="N", help="Samples per rank and micro-batch (default: the factory's)."
)
@click.option("--accumulate", type=COUNT, metavar="N", help="Micro-batches per optimizer step.")
@click.option(
    "--zero-grad",
    type=click.Choice(ZERO_GRADS),
    help="When the loop clears gradients (default: early; Lightning: late).",
)
@click.option(
    "--outputs",
    type=click.Choice(OUTPUTS),
    help="How long the loop keeps a reference to the model's outputs (default: held).",
)
@click.option(
    "--checkpointing/--no-checkpointing",
    default=None,
    help="Enable activation checkpointing for repeated blocks.",
)
@click.option(
    "--seq-len", type=COUNT, metavar="N", help="Tokens per sample, for a model configuration (default: 2048)."
)
@click.option("--lora", type=COUNT, metavar="RANK", help="Train LoRA adapters of this rank and freeze the weights.")
@click.option(
    "--lora-targets",
    metavar="NAMES",
    default="",
    help="Layers with adapters: q_proj,v_proj or all-linear (default: as in PEFT).",
)
@click.option("--quantize", type=click.Choice(QUANTIZATIONS), help="Quantize frozen weights with bitsandbytes.")
@click.option(
    "--training-config",
    type=PATH,
    metavar="FILE",
    help="Configuration of Accelerate, LLaMA-Factory, Axolotl, TRL or Lightning's command line; options override it.",
)
@click.option("--peak-only", is_flag=True, help="Trace only the job itself: no largest batch, no suggestions.")
@click.option("--device-memory", metavar="SIZE", help="Memory per device, such as 80GiB.")
@click.option("--device", metavar="NAME", help='Device model, such as "H100 80GB".')
@click.option(
    "--like", type=PATH, metavar="CAPTURE", help="Take devices, hosts and their free memory from this capture."
)
@click.option(
    "--context-from",
    type=PATH,
    metavar="FILE",
    help="Take the size of a CUDA context from this report of doctor check --probe full, or from a capture.",
)
@click.option("--host-memory", metavar="SIZE", help="Host memory per node, such as 512GiB.")
@click.option("--ranks-per-device", type=COUNT, metavar="N", help="Ranks per device.")
@click.option(
    "--measure", is_flag=True, help="Train a few steps here to measure whether several ranks per device pay off."
)
@click.option(
    "--timeout",
    "seconds",
    metavar="SECONDS",
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
    model: str,
    device_memory: str | None,
    device: str | None,
    like: Path | None,
    context_from: Path | None,
    host_memory: str | None,
    measure: bool,
    seconds: float,
    peak_only: bool,
    training_config: Path | None,
    **plan_options: Any,
) -> None:
    """Estimate the peak memory per rank, whether it fits, and the largest batch that fits.

    MODULE may be a file: train.py:make. The factory returns a module (or a LightningModule) and a batch, or a Trainer
    with them. It is called in a subprocess with fake (meta) tensors: no GPU is needed, and no weights are allocated.

    Instead of a factory: a Transformers config.json, its FOLDER, or a model in the local Hugging Face cache; or a YAML
    file of LLaMA-Factory, Axolotl, TRL or Lightning's command line that names one. Nothing is downloaded, and no code
    next to the configuration is run.

    Example: doctor estimate train.py:make --devices 8 --strategy fsdp --device "H100 80GB"
    """
    import msgspec

    from doctor.core.capture import from_document, read_capture, to_document
    from doctor.core.redact.placeholders import redact
    from doctor.estimate.device_budget import device_budget_of, with_host_memory, with_measured_context
    from doctor.estimate.evaluation import report_of
    from doctor.session import load_checks

    started = time.time()
    job = _job_source(model, training_config, plan_options)
    if measure and not isinstance(job.source, str):
        raise click.UsageError("--measure runs real steps and needs MODULE:FACTORY.")
    settings = options.settings()
    print_notes(settings)
    captured = read_capture(like).job() if like is not None else None
    if captured is not None and options.redact:
        captured = from_document(redact(to_document(captured)))
    budget = device_budget_of(device_memory, device, captured, devices=job.plan.get("devices", 1))
    if context_from is not None:
        from doctor.cli.context_file import contexts_in

        source = "the file of --context-from" if options.redact else context_from.name
        budget = with_measured_context(budget, contexts_in(context_from), source)
    if host_memory:
        budget = with_host_memory(budget, host_memory)
    registry = load_checks(settings)
    estimate = _estimate(job, budget, seconds, peak_only=peak_only)
    if measure:
        estimate = msgspec.structs.replace(estimate, measured=_measured(model, estimate.plan, seconds))
    report = report_of(estimate, budget, registry, settings, started=started)
    _write_report(report, estimate, options)
    raise SystemExit(report.exit_code)


def _job_source(model: str, training: Path | None, options: dict[str, Any]) -> JobSource:
    from doctor.estimate.configuration.job import ModelOptions, job_source
    from doctor.estimate.configuration.model import HUB

    is_known = model.startswith(HUB) or model.endswith((".json", ".yaml", ".yml")) or (here() / model).is_dir()
    if not is_known and not re.fullmatch(r"[^:]+:\w+", model):
        if model.endswith((".py", ".sh")):
            raise _no_function(model)
        raise click.BadParameter(
            "expected MODULE:FACTORY (for example train.py:make), config.json, FOLDER or hf:ORG/NAME.",
            param_hint="MODULE:FACTORY",
        )
    of_model = ModelOptions(
        sequence_length=options.pop("seq_len"),
        lora=options.pop("lora"),
        lora_targets=tuple(filter(None, options.pop("lora_targets").split(","))),
        quantization=options.pop("quantize"),
    )
    return job_source(model, training, of_model, options, here())


def _estimate(job: JobSource, budget: DeviceBudget, seconds: float, *, peak_only: bool) -> Estimate:
    from doctor.estimate.data_model import plan_of
    from doctor.estimate.estimator import estimate_of
    from doctor.estimate.memory.non_torch import workspace
    from doctor.estimate.tracer_client import TracerClient

    last = time.monotonic() + seconds * BEGINNING
    with progress_line() as progress:
        progress.tell(f"loading {job.name}")
        size = workspace(budget.capability)
        with TracerClient(
            job.source, directory=here(), seconds=seconds, workspace=size, capability=budget.capability
        ) as tracer:
            return estimate_of(
                tracer.run,
                tracer.loading,
                plan_of(job.plan, tracer.loading.asked),
                budget,
                seconds=last - time.monotonic(),
                loading_seconds=tracer.loading_seconds,
                peak_only=peak_only,
                notes=job.notes,
                tell=progress.tell,
            )


def _measured(factory: str, plan: TrainingPlan, seconds: float) -> tuple[MeasuredThroughput, ...]:
    from doctor.estimate.measure.throughput import measure

    with progress_line() as progress:
        progress.tell("measuring")
        try:
            return measure(factory, plan, directory=here(), seconds=seconds)
        except UnusableError as error:
            print_notice(str(error))
            return ()


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
