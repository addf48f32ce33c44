"""Turns what the user named into a source for the tracer: a factory, or the recipe of a model, with a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from doctor.core.errors import UnusableError
from doctor.estimate.configuration.model import HUB, model_configuration
from doctor.estimate.configuration.training import TrainingConfiguration, is_training, read_training
from doctor.estimate.data_model import Dtype, LoraAdapters, ModelRecipe, Precision, Quantization

_FACTORY = re.compile(r"[^:]+:\w+")
_YAML = (".yaml", ".yml")
DEFAULT_OPTIMIZER = "adamw_torch_fused"
"""``TrainingArguments.default_optim`` of Transformers with torch 2.8 or later."""
_DTYPES: dict[str, Dtype] = {"bf16": "bfloat16", "16": "float16", "32": "float32"}


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command that apply to a model's configuration alone."""

    sequence_length: int | None = None
    lora: int | None = None
    lora_targets: tuple[str, ...] = ()
    quantization: Quantization | None = None

    @property
    def is_empty(self) -> bool:
        """Whether none was given."""
        return self == ModelOptions()


class JobSource(NamedTuple):
    """``source``: a factory, or a recipe. ``plan``: fields of a plan, those of the user over those of files."""

    source: str | ModelRecipe
    plan: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the user named it."""
        return self.source if isinstance(self.source, str) else self.source.name


def job_source(
    named: str, training: Path | None, options: ModelOptions, plan: Mapping[str, Any], directory: Path
) -> JobSource:
    """Return the source of the job that ``named`` is: a factory, a model's configuration, or a trainer's.

    ``training``: a trainer's configuration beside it. ``plan``: what the user asked for; ``None`` for the rest.

    Raises:
        UnusableError: it is none of them, can't be read, or an option does not apply to it.
    """
    is_factory = not named.startswith(HUB) and bool(_FACTORY.fullmatch(named)) and not (directory / named).exists()
    is_json = not is_factory and named.endswith(".json") and (directory / named).is_file()
    names_trainer = not is_factory and (named.endswith(_YAML) or (is_json and is_training(directory / named)))
    if names_trainer and training is not None:
        raise UnusableError(f"{named} and --training-config are both trainer configurations: give only one")
    found = read_training(directory / training) if training is not None else TrainingConfiguration(tool="")
    if names_trainer:
        found = read_training(directory / named)
        named = _model_of(named, found, directory)
        found = _without_module(found)
    outside = (_outside(found),) if found.outside else ()
    asked = {name: value for name, value in plan.items() if value is not None}
    if is_factory:
        file = named.rpartition(":")[0]
        if file.endswith(".py") and not (directory / file).is_file():
            raise UnusableError(f"{named}: {directory / file}: no such file")
        if not options.is_empty:
            raise UnusableError("--seq-len, --lora, --lora-targets and --quantize apply to a model's configuration")
        return JobSource(named, {**found.plan, **asked}, outside)
    return JobSource(*_recipe(named, found, options, asked, directory), outside)


def _without_module(found: TrainingConfiguration) -> TrainingConfiguration:
    """Say that the code of a LightningModule is not run where its configuration names the model."""
    if found.tool != "Lightning":
        return found
    return msgspec.structs.replace(found, outside=(*found.outside, "code of the LightningModule around the model"))


def _outside(found: TrainingConfiguration) -> str:
    return f"not covered, the step is estimated without it: {', '.join(found.outside)}"


def _model_of(name: str, found: TrainingConfiguration, directory: Path) -> str:
    if found.model is None:
        raise UnusableError(f"{name} does not name a model: give the model, and pass this file as --training-config")
    folder = (directory / found.model).expanduser()
    return found.model if folder.exists() else f"{HUB}{found.model}"


def _recipe(
    named: str, found: TrainingConfiguration, options: ModelOptions, asked: dict[str, Any], directory: Path
) -> tuple[ModelRecipe, dict[str, Any]]:
    model = model_configuration(named, directory)
    quantization = options.quantization or found.quantization
    lora = _adapters(found.lora, options)
    if quantization is not None and lora is None:
        raise UnusableError("quantized weights are frozen: add --lora RANK")
    # As with a Trainer: it returns from compute_loss with the loss alone.
    plan = {"batch_size": 1, "optimizer": DEFAULT_OPTIMIZER, "outputs": "released", **found.plan, **asked}
    if lora is not None:
        plan.setdefault("precision", "bf16-mixed")
    precision: Precision = plan.get("precision", "32-true")
    half = _DTYPES[precision.partition("-")[0]]
    recipe = ModelRecipe(
        name=model.name,
        config=model.text,
        sequence_length=options.sequence_length or found.sequence_length,
        dtype=half if lora is not None else found.dtype or "float32",
        compute_dtype=half,
        lora=lora,
        quantization=quantization,
        double_quantization=found.double_quantization,
        upcasts=found.upcasts,
    )
    return recipe, plan


def _adapters(found: LoraAdapters | None, options: ModelOptions) -> LoraAdapters | None:
    if options.lora is None and found is None:
        if options.lora_targets:
            raise UnusableError("--lora-targets needs --lora RANK")
        return None
    adapters = found or LoraAdapters(rank=options.lora or 1)
    return msgspec.structs.replace(
        adapters, rank=options.lora or adapters.rank, targets=options.lora_targets or adapters.targets
    )
