"""Limits of what the ranks of a group send, known without torch."""

from __future__ import annotations

SMALL = (8, 4096)
"""Bytes of a loss or a flag, and of a small gradient."""
SMALL_REPEATS = 20
IN_A_ROW = 10
"""Small collectives that are timed together on a GPU: the host enqueues them faster than they run, and synchronizes
once."""
SCOUT = 1 << 18
"""Bytes of the message that shows how large the others can be: a third of a second at 10 Mb/s."""
MOST_REPEATS = 5
MEMORY_SHARE = 8
"""At most this fraction, one in so many, of the free memory of a GPU is used."""
ELEMENTS = {"cuda": 1 << 16, "cpu": 1 << 14}
"""Of a sum, by the kind of device: 256 KiB of float32, which NCCL splits into several chunks. Gloo, which splits it in
two for each rank, runs over networks where four times as much takes seconds with packet loss."""
MOST_GATHERED = 1 << 22
"""Maximum of elements that one rank gathers: 16 MiB of float32."""
SPANS = {"float32": 8, "bfloat16": 2}
"""Addends are below this: a wrong one is a large part of the sum."""
MEASURED = "gloo"
"""The backend without messages of pairs: it uses TCP, over which the bandwidth between hosts is measured."""
LEAST_BYTES = 8
"""Of a message of a pair, for the round trip."""
FIRST_BYTES = 1 << 16
"""Of the first large one: 0.05 s at 10 Mb/s."""
GROWTH = 8
MOST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 23}
"""Of the largest one, by the kind of device: 5 ms at 400 Gb/s."""
REPEATS = 3
NO_TIME = "no time was left for messages of pairs"
