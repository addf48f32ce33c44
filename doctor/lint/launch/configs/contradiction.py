"""Two contradicting settings of one file."""

from __future__ import annotations

import re
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.launch.yaml_tree import YamlNode


class Contradiction(NamedTuple):
    """``at``: the later setting; ``claim``: one line; ``is_refused``: the program fails at its start, else it ignores
    one setting; ``costs_little``: a run that fits on its GPUs is the same without that setting; ``confidence``: below 1
    if the command line or another file may override it."""

    at: YamlNode
    claim: str
    fix: str
    is_refused: bool = True
    costs_little: bool = False
    confidence: float = 1.0


def later(one: YamlNode, other: YamlNode) -> YamlNode:
    """The later of two values."""
    return max(one, other, key=lambda node: node.line)


ZERO3_NAME = lazy_compile(r"(?<![a-z0-9])(?:zero|z|stage)[-_]?3(?!\d)", re.IGNORECASE)
"""Names of files for ZeRO-3: ds_z3_config.json, zero3_offload.json, ds_config_stage_3.json."""
OFFLOADED = ("cpu", "nvme")


def stage_of(root: YamlNode) -> int | None:
    """The ZeRO stage of a DeepSpeed configuration, 0 if it has none; ``None`` if it is ``auto`` or unknown."""
    zero = root.get("zero_optimization")
    if zero is None:
        return 0
    if not zero.is_mapping:  # true and false, as the first releases took it
        return None
    return zero.number("stage") if zero.get("stage") is not None else 0
