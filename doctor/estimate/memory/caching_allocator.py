"""Simulates torch's caching allocator for CUDA on a trace of allocations, without torch.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (native backend, default settings): sizes are
rounded up to 512 bytes, blocks of at most 1 MiB come from segments of 2 MiB, larger ones from segments of 20 MiB or,
from 10 MiB on, of their own size rounded up to 2 MiB; the smallest block that is large enough is taken and split;
free neighbors are merged. Of blocks of the same size the one at the lowest address is taken (``BlockComparatorSize``):
the newest, because the driver maps each segment below those that exist, as mmap does. Each stream has its own blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

MIB = 1 << 20
TOP = 1 << 47
"""Addresses of segments begin below it and descend."""
MIN_BLOCK = 512
SMALL_SIZE = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB


def rounded(size: int) -> int:
    """Return the bytes of a block for ``size`` bytes."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Return the bytes of a new segment for a block of ``size`` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class _SimulatedBlock:
    __slots__ = ("address", "before", "behind", "is_free", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.is_free = True
        self.before: _SimulatedBlock | None = None
        self.behind: _SimulatedBlock | None = None


class _BlockPool:
    def __init__(self, keep_from: int, is_small: bool) -> None:
        self.keep_from = keep_from
        self.is_small = is_small
        self._free: list[tuple[int, int]] = []
        self._by_address: dict[int, _SimulatedBlock] = {}

    def add(self, block: _SimulatedBlock) -> None:
        block.is_free = True
        insort(self._free, (block.size, block.address))
        self._by_address[block.address] = block

    def remove(self, block: _SimulatedBlock) -> None:
        block.is_free = False
        del self._free[bisect_left(self._free, (block.size, block.address))]
        del self._by_address[block.address]

    def best(self, size: int) -> _SimulatedBlock | None:
        place = bisect_left(self._free, (size, 0))
        return self._by_address[self._free[place][1]] if place < len(self._free) else None

    def splits(self, rest: int) -> bool:
        """Whether a remainder of ``rest`` bytes becomes a block."""
        return rest >= self.keep_from if self.is_small else rest > self.keep_from


class CachingAllocator:
    """Simulates allocations. ``reserved``: bytes of all segments, which are never freed."""

    def __init__(self) -> None:
        self.reserved = 0
        self._lowest_address = TOP
        self._pools: dict[tuple[int, bool], _BlockPool] = {}
        self._taken: dict[int, tuple[_SimulatedBlock, _BlockPool]] = {}

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate ``size`` bytes for ``key`` on a stream."""
        if size <= 0:
            return
        size = rounded(size)
        pool = self._pool_of(stream, is_small=size <= SMALL_SIZE)
        block = pool.best(size) or self._new_segment(pool, size)
        pool.remove(block)
        if pool.splits(block.size - size):
            self._split(block, size, pool)
        self._taken[key] = (block, pool)

    def _pool_of(self, stream: int, *, is_small: bool) -> _BlockPool:
        found = self._pools.get((stream, is_small))
        if found is None:
            found = self._pools[stream, is_small] = _BlockPool(MIN_BLOCK if is_small else SMALL_SIZE, is_small)
        return found

    def free(self, key: int) -> None:
        """Free the block of ``key``."""
        block, pool = self._taken.pop(key, (None, None))
        if block is None or pool is None:
            return
        for neighbor in (block.before, block.behind):
            if neighbor is not None and neighbor.is_free:
                pool.remove(neighbor)
                block = _joined(*sorted((block, neighbor), key=lambda each: each.address))
        pool.add(block)

    def _new_segment(self, pool: _BlockPool, size: int) -> _SimulatedBlock:
        block = _SimulatedBlock(self._lowest_address - segment_size(size), segment_size(size))
        self._lowest_address = block.address
        self.reserved += block.size
        pool.add(block)
        return block

    def _split(self, block: _SimulatedBlock, size: int, pool: _BlockPool) -> None:
        rest = _SimulatedBlock(block.address + size, block.size - size)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        pool.add(rest)


def _joined(first: _SimulatedBlock, second: _SimulatedBlock) -> _SimulatedBlock:
    first.size += second.size
    first.behind = second.behind
    if second.behind is not None:
        second.behind.before = first
    return first


def peak_reserved(events: Iterable[int], sizes: list[int], streams: Mapping[int, int] | None = None) -> int:
    """Return the bytes of all segments after ``events``: ``key`` allocates ``sizes[key]`` bytes, ``~key`` frees it.

    ``streams``: the stream of each ``key`` that is not allocated on the default stream, 0."""
    allocator = CachingAllocator()
    for event in events:
        if event >= 0:
            allocator.allocate(event, sizes[event], streams.get(event, 0) if streams else 0)
        else:
            allocator.free(~event)
    return allocator.reserved
