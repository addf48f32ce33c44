"""Finds the configuration of a model of Transformers: a file, a folder, or the cache of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from doctor.core.errors import UnusableError
from doctor.estimate.configuration.files import check_numbers, read_mapping

HUB = "hf:"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_QUANTIZED = ("quantization_config", "compression_config")


class ModelConfiguration(NamedTuple):
    """``name``: as the user named it. ``text``: the configuration as JSON. ``dtype``: of the published weights."""

    name: str
    text: str
    dtype: str | None


def model_configuration(name: str, directory: Path) -> ModelConfiguration:
    """Return the configuration that ``config.json``, ``FOLDER`` or ``hf:ORG/NAME`` names.

    Raises:
        UnusableError: there is none, or no model can be built from it.
    """
    path = _cached(name.removeprefix(HUB)) if name.startswith(HUB) else directory / name
    if path.is_dir():
        path /= "config.json"
    config = read_mapping(path)
    if not isinstance(config.get("model_type"), str):
        raise UnusableError(f"{name}: not a Transformers model configuration: it has no model_type")
    for key in _QUANTIZED:
        if config.get(key):
            raise UnusableError(
                f"{name}: its weights are already quantized{_method(config[key])}: use the configuration of the "
                f"original model with --quantize"
            )
    check_numbers(name, config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelConfiguration(name, json.dumps(config), dtype if isinstance(dtype, str) else None)


def _method(settings: Any) -> str:
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f" ({method[:40]})" if isinstance(method, str) else ""


def _cached(model: str) -> Path:
    """Return the folder of a model in the cache of the hub; nothing is downloaded."""
    if not _ID.fullmatch(model):
        raise UnusableError(f"{HUB}{model}: expected hf:ORG/NAME")
    cache = _cache_folder()
    folder = cache / f"models--{model.replace('/', '--')}"
    for snapshot in _snapshots(folder):
        if (snapshot / "config.json").is_file():
            return snapshot
    raise UnusableError(
        f"{HUB}{model} is not in {cache}, and nothing is downloaded: fetch its config.json first "
        f"(hf download {model} config.json)"
    )


def _cache_folder() -> Path:
    """Return the cache as ``huggingface_hub/constants.py`` finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def _snapshots(folder: Path) -> Iterator[Path]:
    """Return the snapshot that ``main`` refers to, then the others, the newest first."""
    with suppress(OSError):  # a snapshot of another revision may be there
        yield folder / "snapshots" / Path((folder / "refs" / "main").read_text(encoding="utf-8").strip()).name
    try:
        found = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    yield from found
