"""Arguments of the Trainer or Fabric in environment variables."""

from __future__ import annotations

import json
from collections.abc import Mapping

from doctor.collectors.base import Machine, NotPresent, collector, parse_int
from doctor.core.facts import TrainerFacts, Variable
from doctor.core.masking import mask_value, readable

TRAINER = "PL_TRAINER_"
"""Defaults of the arguments of the Trainer (lightning/pytorch/utilities/argparse.py)."""

FABRIC = "LT_"
"""Arguments that ``fabric run`` passes to Fabric, with or without LT_CLI_USED (lightning/fabric/connector.py)."""

FABRIC_ARGUMENTS = ("accelerator", "devices", "num_nodes", "precision", "strategy")
"""Arguments that Fabric reads; other LT_ names are not its own."""


@collector(TrainerFacts)
def collect_trainer(machine: Machine) -> TrainerFacts:
    """Collect the arguments, those of the Trainer if both are set. Raises ``NotPresent``."""
    arguments = arguments_from(machine.environ, TRAINER)
    source = f"{TRAINER}*" if arguments else f"{FABRIC}*"
    if not arguments:
        named = arguments_from(machine.environ, FABRIC)
        arguments = {name: named[name] for name in FABRIC_ARGUMENTS if name in named}
    if not arguments:
        raise NotPresent(f"no {TRAINER}* or {FABRIC}* variable is set")
    return TrainerFacts(
        source=source,
        devices=device_count(arguments.get("devices")),
        node_count=_positive(arguments.get("num_nodes")),
        strategy=arguments.get("strategy"),
        accelerator=arguments.get("accelerator"),
        backend=arguments.get("process_group_backend"),
        arguments=tuple(Variable(name, arguments[name]) for name in sorted(arguments)),
    )


def arguments_from(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the variables that begin with ``prefix`` by the lower-case rest of their names, with secrets masked."""
    return {
        readable(name[len(prefix) :].lower()): mask_value(name, value)
        for name, value in environ.items()
        if name.startswith(prefix) and len(name) > len(prefix)
    }


def device_count(text: str | None) -> int | None:
    """Return the number of devices of an argument ``devices``: ``4`` is a count, ``0,1`` and ``[0, 1]`` are lists.

    ``None`` for ``auto``, ``-1`` (all), and other text; ``0,`` is a list of one
    (lightning/fabric/utilities/device_parser.py).
    """
    text = (text or "").strip()
    if text.startswith("["):
        return len(json_list(text)) or None
    if "," not in text:
        return _positive(text)
    numbers = [parse_int(part) for part in text.split(",") if part.strip()]
    return len(numbers) if numbers and None not in numbers and -1 not in numbers else None


def json_list(text: str) -> list[object]:
    """Return the entries of a list in JSON; none for other text."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return entries if isinstance(entries, list) else []


def _positive(text: str | None) -> int | None:
    number = parse_int(text)
    return number if number is not None and 0 < number < 1 << 31 else None
