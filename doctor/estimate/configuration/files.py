"""Reads configuration files that others wrote: bounded in size, depth and aliases, as plain data."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doctor.core.errors import UnusableError

MOST_JSON, MOST_YAML = 8 << 20, 128 << 10
"""Bytes of a file. Configurations with thousands of labels have a megabyte."""
MOST_DEPTH, MOST_ALIASES = 60, 16
"""Levels of YAML, and its aliases: merged mappings double with each pair of them."""
MOST_DIGITS = 40
"""Bits of a whole number."""
MOST_LAYERS = 10_000
"""Of anything that a model repeats."""
_REPEATED = ("layer", "expert", "block", "depth", "stage")


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file.

    Raises:
        UnusableError: it can't be read, is too large, or is something else.
    """
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    text = _text(path, MOST_YAML if is_yaml else MOST_JSON)
    try:
        found = _yaml(text) if is_yaml else json.loads(text)
    except (ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [""])[0][:120]
        what = "it is nested too deeply" if isinstance(error, RecursionError) else line
        raise UnusableError(f"{path} is not valid {'YAML' if is_yaml else 'JSON'}: {what}") from None
    if not isinstance(found, dict):
        raise UnusableError(f"{path} does not contain a mapping of names to values")
    return {str(name): value for name, value in found.items()}


def _text(path: Path, most: int) -> str:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UnusableError(f"{path} is not a file")
            data = file.read(most + 1)
    except OSError as error:
        raise UnusableError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise UnusableError(f"{path} is larger than {most >> 10:,} KiB, so it is not a configuration")
    return data.decode("utf-8", "replace")


def _yaml(text: str) -> Any:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = aliases = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            kind = type(event).__name__
            depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
            aliases += kind == "AliasEvent"
            if depth > MOST_DEPTH or aliases > MOST_ALIASES:
                raise ValueError(f"it has more than {MOST_DEPTH} levels or {MOST_ALIASES} aliases")
        return yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"line {mark.line + 1}" if mark is not None else "it cannot be parsed") from None


def check_numbers(name: str, config: dict[str, Any]) -> None:
    """Refuse numbers that no model has.

    Raises:
        UnusableError: a size is beyond all bounds.
    """
    for key, value in _numbers(config):
        most = MOST_LAYERS if any(word in key.lower() for word in _REPEATED) else 1 << MOST_DIGITS
        if value > most:
            raise UnusableError(f"{name}: {key} is {value:.3g}, more than the {most:,} that can be estimated")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, int):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _numbers(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, key)
