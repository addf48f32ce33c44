"""Keys of the c10d store: in which part of a job a process waits for one, and which rank sets it."""

from __future__ import annotations

import re
from typing import Literal

from doctor.core.text import lazy_compile

_OF_THE_END = lazy_compile(r"terminal_state|/finished|exit")
"""Keys with which agents wait for each other at the end (torch/distributed/elastic/agent/server/api.py)."""
_OF_THE_START = lazy_compile(
    r"rendezvous|torchelastic|torch/elastic|worker_count|store_based_barrier|/init", re.IGNORECASE
)
"""Keys that agents and ``init_process_group`` set when a process joins (torch/distributed/elastic/utils/store.py)."""
_GLOO_ADDRESS = lazy_compile(r"//\w{1,20}//\d{1,6}/(?:rank_)?(?P<rank>\d{1,6})\s*$")
"""The address of a rank, which it sets when it creates the group (gloo/rendezvous/context.cc)."""
_NCCL_ID = lazy_compile(r"(?://\w{1,20}//|default_pg/\d{1,6}/)(?P<rank>\d{1,6})(?::\d{1,6})?\s*$")
"""The id of a communicator, which its first rank sets at its first collective (broadcastUniqueNCCLID in
ProcessGroupNCCL.cpp)."""


def stage_of_key(key: str) -> Literal["start", "collective", "end"]:
    """When a key is set: while processes join, at a collective or barrier, or when agents end."""
    if _OF_THE_END.search(key):
        return "end"
    return "start" if _OF_THE_START.search(key) or _GLOO_ADDRESS.search(key) else "collective"


def rank_of_key(key: str) -> int | None:
    """The rank that sets a key of the default group; ``None`` if the key does not show it."""
    found = _GLOO_ADDRESS.search(key) or _NCCL_ID.search(key)
    return int(found["rank"]) if found and "default_pg" in key else None
