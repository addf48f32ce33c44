"""Ranks of a test program that are forked after it loaded torch, which takes seconds for each of them otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def play_ranks(world: int, play: Callable[[int], object]) -> bool:
    """Fork ``world`` ranks that each call ``play`` with their number; return whether all returned from it."""
    children = [_forked(play, rank) for rank in range(world)]
    statuses = [os.waitpid(child, 0)[1] for child in children]  # of all: none is left behind
    return not any(statuses)


def _forked(play: Callable[[int], object], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        play(rank)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)
