"""What the wrapper of Megatron-LM tells about the ranks that train with it.

Its class has the name of torch's (megatron/core/distributed/distributed_data_parallel.py, ``DistributedDataParallel``)
and other attributes. It sends nothing while it is constructed. Imported where a program uses it.
"""

from __future__ import annotations

import sys
from typing import Any

from doctor.monitor.integrations.hook_guard import value_or_default


def data_parallel_group(module: Any) -> Any:
    """Return the group of the ranks that hold the same parameters and read different samples.

    Ranks of one context-parallel group read parts of the same samples.
    """
    return module.dp_group if hasattr(module, "dp_group") else module.data_parallel_group


def reads_alone(module: Any) -> bool | None:
    """Return whether every rank has a loader of its own, with samples that no other rank reads.

    It has if there is neither tensor, pipeline nor context parallelism: then all ranks are one data-parallel group.
    ``None`` for older releases, whose group holds ranks of one context-parallel group, too.
    """

    def read() -> bool | None:
        whole: int = sys.modules["torch.distributed"].get_world_size()
        return data_parallel_group(module).size() == whole if hasattr(module, "dp_cp_group") else None

    return value_or_default(read, None)


def holds_same_parameters(module: Any) -> bool | None:
    """Return whether the ranks of that group hold the same parameters after each step; ``None`` if that is unknown.

    Experts differ within it, and with ``overlap_param_gather`` parts arrive in the next forward pass.
    """

    def read() -> bool:
        experts = getattr(module, "ep_group", None)
        return not ((experts is not None and experts.size() > 1) or module.ddp_config.overlap_param_gather)

    return value_or_default(read, None)
