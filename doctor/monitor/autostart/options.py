"""Options of ``doctor run``, which pass to the watched processes as JSON in one variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from doctor.monitor.autostart.launch import OPTIONS
from doctor.monitor.watch_options import WatchOptions


def encode_options(given: Mapping[str, Any]) -> str:
    """Return the options that differ from their defaults as JSON; empty if none does.

    Raises:
        ValueError: an option is not valid.
    """
    chosen = {
        one.name: given[one.name]
        for one in msgspec.structs.fields(WatchOptions)
        if given.get(one.name) not in (None, (), []) and given[one.name] is not one.default
    }
    WatchOptions(**chosen)
    if "dirpath" in chosen:
        chosen["dirpath"] = os.path.abspath(chosen["dirpath"])  # noqa: PTH100 - links stay as the user named them
    return json.dumps(chosen) if chosen else ""


def decode_options(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the arguments of an adapter.

    Raises:
        ValueError: the variable holds no valid options.
    """
    text = environ.get(OPTIONS, "")
    if not text:
        return {}
    given = json.loads(text)
    if not isinstance(given, dict) or not set(given) <= {one.name for one in msgspec.structs.fields(WatchOptions)}:
        raise ValueError(f"{OPTIONS} has options that this release does not know")
    try:
        WatchOptions(**given)
    except TypeError as error:  # a value of another type
        raise ValueError(f"{OPTIONS}: {error}") from None
    return given
