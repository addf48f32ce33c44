"""Two settings of one file that can't both hold."""

from __future__ import annotations

import re
from typing import NamedTuple

from doctor.lint.launch.yaml_tree import YamlNode


class Contradiction(NamedTuple):
    """``at``: the later of the two; ``claim``: one line; ``is_refused``: the program stops at its start, else one of
    the two is passed over; ``confidence``: below 1 where the command line or another file may decide otherwise."""

    at: YamlNode
    claim: str
    fix: str
    is_refused: bool = True
    confidence: float = 1.0


def later(one: YamlNode, other: YamlNode) -> YamlNode:
    """Of two values the one that stands below."""
    return max(one, other, key=lambda node: node.line)


ZERO3_NAME = re.compile(r"(?<![a-z0-9])(?:zero|z|stage)[-_]?3(?!\d)", re.IGNORECASE)
"""What files for ZeRO-3 are called: ds_z3_config.json, zero3_offload.json, ds_config_stage_3.json."""
OFFLOADED = ("cpu", "nvme")


def stage_of(root: YamlNode) -> int | None:
    """The ZeRO stage of a configuration of DeepSpeed, 0 where it names none; ``None``: ``auto``, or not told."""
    zero = root.get("zero_optimization")
    if zero is None:
        return 0
    if not zero.is_mapping:  # true and false, as the first releases took it
        return None
    return zero.number("stage") if zero.get("stage") is not None else 0
