"""What the process groups of this process are for: tensor parallel, context parallel, experts.

torch describes the groups of a device mesh by its dimensions (``mesh_cp``), and Megatron-LM describes its own
(``CONTEXT_PARALLEL_GROUP``, megatron/core/parallel_state.py). DeepSpeed and older releases of Megatron-LM only keep
theirs in variables of a module, some of which are dictionaries (``_EXPERT_PARALLEL_GROUP`` by ``ep_size_2``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

MODULES = (
    "deepspeed.utils.groups",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "megatron.core.parallel_state",
    "megatron.mpu.initialize",
)
UNDEFINED = "undefined"
"""torch's description of a group that was made without one."""
_GROUP = re.compile(r"_[A-Z][A-Z_]*GROUPS?(_[A-Z]+)*")
"""A variable with groups: ``_EXPERT_PARALLEL_GROUP``, ``_DATA_PARALLEL_GROUP_WITH_CP``."""


def group_descriptions() -> dict[str, str]:
    """Return the descriptions of the groups of this process by their names; empty if torch has another structure.

    A group of several variables has the first one's name.
    """
    try:
        torch = sys.modules["torch.distributed.distributed_c10d"]
        names = dict(torch._world.pg_names)
        found: dict[str, str] = {}
        for group, name in names.items():
            if (words := str(getattr(group, "group_desc", ""))) and words != UNDEFINED:
                found[str(name)] = words
        for words, group in _variables():
            if isinstance(group, torch.ProcessGroup) and group in names:
                found.setdefault(str(names[group]), words)
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return {}
    return found


def _variables() -> Iterator[tuple[str, Any]]:
    """The groups in variables of the modules, with the names of these."""
    for module in filter(None, map(sys.modules.get, MODULES)):
        for name, value in list(vars(module).items()):
            if not _GROUP.fullmatch(name):
                continue
            words = name.strip("_")
            if isinstance(value, dict):
                yield from ((f"{words} {key}", group) for key, group in list(value.items()))
            elif isinstance(value, (list, tuple)):
                yield from ((words, group) for group in value)
            else:
                yield words, value
