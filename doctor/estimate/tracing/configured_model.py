"""Builds a model of Transformers and a batch from a configuration: no weights, no network, no code of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from doctor.core.errors import UnusableError
from doctor.core.text import byte_size
from doctor.estimate.data_model import ModelRecipe
from doctor.estimate.tracing.factory import FactoryOutput, in_words
from doctor.estimate.tracing.lora_adapters import add_adapters
from doctor.estimate.tracing.quantized_layers import quantize

TOKENS = 2048
"""Tokens of a sample by default, if the model takes as many."""
_REMOVED = ("auto_map", "attn_implementation", "experts_implementation", "dtype", "torch_dtype", "transformers_version")
"""Keys that would name code, kernels to download, or a dtype; ``ModelRecipe`` has the dtype."""
THREADED_FROM, THREADED_UNTIL = (5, 0), (5, 4)
"""Releases of Transformers that load weights in threads while they are quantized: those before load and quantize one
weight after the other, as those after do if ``has_on_the_fly_quantization``."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ConfiguredModel:
    """Calling it returns the model and a batch of one sample.

    Raises:
        UnusableError: Transformers is missing or does not know the model, or the configuration is not valid.
    """

    def __init__(self, recipe: ModelRecipe) -> None:
        self._recipe = recipe
        self._given: dict[str, Any] = json.loads(recipe.config)
        try:
            import transformers
        except ImportError:
            raise UnusableError(
                f"{recipe.name}: reading a configuration needs Transformers: pip install transformers"
            ) from None
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self._version = str(transformers.__version__)
        self._config = self._configuration(transformers)
        self._task, self._auto = self._task_of(transformers)

    def _configuration(self, transformers: Any) -> Any:
        given = {name: value for name, value in self._given.items() if name not in _REMOVED}
        kind = given.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            code = "; code next to the configuration is never run" if "auto_map" in self._given else ""
            raise UnusableError(
                f"{self._recipe.name}: Transformers {transformers.__version__} has no model {kind!r}{code}"
            )
        try:
            return transformers.AutoConfig.for_model(kind, **without_code(given))
        except Exception as error:  # noqa: BLE001 - whatever Transformers raises for values that it does not expect
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> UnusableError:
        words = in_words(error.__cause__ or error)
        return UnusableError(f"{self._recipe.name}: Transformers cannot build the model: {words}")

    def _task_of(self, transformers: Any) -> tuple[_Task, Any]:
        """Return the task whose class is the first of the configuration's architectures, or else one that there is."""
        given = self._given.get("architectures")
        named = str(given[0]) if isinstance(given, list) and given else ""
        found = []
        for task in _TASKS:
            auto = getattr(transformers, task.auto, None)
            if auto is None or type(self._config) not in auto._model_mapping:
                continue
            made = auto._model_mapping[type(self._config)]
            if named in {each.__name__ for each in (made if isinstance(made, (list, tuple)) else (made,))}:
                return task, auto
            found.append((task._replace(note=f"loaded with {task.auto}; {task.note}".rstrip("; ")), auto))
        takes = getattr(getattr(transformers, named, None), "main_input_name", "input_ids")
        if not found or (takes != "input_ids" and found[0][0].has_text):
            kind = named or self._config.model_type
            raise UnusableError(f"{self._recipe.name}: cannot generate a batch for {kind}: give MODULE:FACTORY")
        return found[0]

    def __call__(self) -> FactoryOutput:
        """Build the model and its batch."""
        recipe = self._recipe
        try:
            model = self._auto.from_config(self._config)
            model = model.to(_DTYPES[recipe.dtype])
            batch = self._task.batch(self._batch_config, self._tokens)
            notes = (*self._notes(), *self._changed(model))
        except UnusableError as error:
            raise UnusableError(f"{recipe.name}: {error}") from None
        except Exception as error:  # noqa: BLE001 - as above
            raise self._unusable(error) from None
        return FactoryOutput(model, batch, notes=notes)

    def _changed(self, model: Any) -> Iterator[str]:
        """Quantize the weights and add adapters, and return notes."""
        recipe = self._recipe
        if recipe.quantization is not None:
            dtype, compute = _DTYPES[recipe.dtype], _DTYPES[recipe.compute_dtype]
            whole = sum(each.nbytes for each in model.parameters())
            yield from quantize(model, recipe.quantization, dtype, compute, double=recipe.double_quantization)
            yield from _loading(self._version, whole)
            if recipe.upcasts:
                model.float()
                yield "weights that are not quantized are cast to float32 (prepare_model_for_kbit_training)"
        if recipe.lora is not None:
            yield from add_adapters(model, self._config.model_type, recipe.lora)

    @property
    def _batch_config(self) -> Any:
        """The part of the configuration that describes the batch."""
        if self._task.has_text:
            return self._config.get_text_config()
        return getattr(self._config, "vision_config", self._config)

    @property
    def _tokens(self) -> int:
        return self._recipe.sequence_length or min(TOKENS, self._longest or TOKENS)

    @property
    def _longest(self) -> int | None:
        longest = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return longest if isinstance(longest, int) and longest > 0 else None

    def _notes(self) -> list[str]:
        notes = []
        if self._task.has_text:
            if self._recipe.sequence_length is None:
                notes.append(f"each sample has {self._tokens} tokens (--seq-len)")
            if self._longest is not None and self._tokens > self._longest:
                notes.append(f"{self._tokens} tokens are more than the model's {self._longest} positions")
        return [*notes, *([self._task.note] if self._task.note else [])]


def _loading(version: str, whole: int) -> Iterator[str]:
    """Say what a release of Transformers keeps in addition that loads weights in threads while it quantizes them.

    ``convert_and_load_state_dict_in_model`` (``core_model_loading.py``) did so from 5.0 to 5.3; how far the threads are
    ahead depends on the machine. ``whole``: bytes of all weights before they are quantized."""
    release = tuple(int(each) for each in version.split(".")[:2] if each.isdecimal())
    if THREADED_FROM <= release < THREADED_UNTIL:
        yield (
            f"Transformers {version} loads weights in threads while it quantizes them: torch may keep up to "
            f"{byte_size(whole)} more reserved than estimated; HF_DEACTIVATE_ASYNC_LOAD=1 or release 5.4 avoid this"
        )


def without_code(given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without keys that name code or kernels, at any depth."""
    kept = {}
    for name, value in given.items():
        if name in ("auto_map", "attn_implementation", "experts_implementation") or name.startswith("_attn"):
            continue
        kept[name] = without_code(value) if isinstance(value, dict) else value
    return kept


def _tokens(config: Any, count: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.zeros(1, count, dtype=torch.long),
        "attention_mask": torch.ones(1, count, dtype=torch.long),
        "labels": torch.zeros(1, count, dtype=torch.long),
    }


def _classes(config: Any, count: int) -> dict[str, torch.Tensor]:
    return {**_tokens(config, count), "labels": torch.zeros(1, dtype=torch.long)}


def _positions(config: Any, count: int) -> dict[str, torch.Tensor]:
    batch = _tokens(config, count)
    del batch["labels"]
    return {**batch, "start_positions": torch.zeros(1, dtype=torch.long), "end_positions": torch.zeros(1).long()}


def _image(config: Any, _: int) -> dict[str, torch.Tensor]:
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.zeros(1, channels, height, width), "labels": torch.zeros(1, dtype=torch.long)}


class _Task(NamedTuple):
    """An Auto class of Transformers, and the batch of its models."""

    auto: str
    batch: Callable[[Any, int], dict[str, torch.Tensor]]
    has_text: bool = True
    note: str = ""


_TASKS = (
    _Task("AutoModelForSeq2SeqLM", _tokens, note="source and target have the same number of tokens"),
    _Task("AutoModelForMaskedLM", _tokens),
    _Task("AutoModelForCausalLM", _tokens),
    _Task("AutoModelForImageTextToText", _tokens, note="not covered: images, because the batch contains only text"),
    _Task("AutoModelForSequenceClassification", _classes),
    _Task("AutoModelForTokenClassification", _tokens),
    _Task("AutoModelForQuestionAnswering", _positions),
    _Task("AutoModelForImageClassification", _image, has_text=False),
)
"""In the order of preference if the configuration names no architecture of them."""
