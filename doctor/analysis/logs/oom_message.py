"""The numbers in the out-of-memory message of an allocator, and the cause that they show.

Wordings: torch/c10/cuda/CUDACachingAllocator.cpp (0.4 to 1.3 "cached", 1.4 to 2.0 "reserved in total by PyTorch", from
2.1 on "reserved by PyTorch but unallocated"), its copies for HIP, XPU and Ascend's NPU, and ATen/mps/MPSAllocator.mm.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from statistics import median
from typing import Literal

import msgspec

from doctor.core.text import lazy_compile

Cause = Literal["demand", "others", "fragmented", "skew", "limit", "unknown"]

GIB = 1 << 30
MIB = 1 << 20

READ = 4000
"""The number of characters that are read from the first word of the message; with 40 processes it has 2,500."""
CONTEXT = 800 * MIB
"""A CUDA context takes 300 to 800 MiB, by architecture and loaded kernels; older messages do not include it."""
LEAST_CONTEXT = 250 * MIB
OVERHEAD_SHARE, OVERHEAD = 0.1, 4 * GIB
"""The maximum that a process holds beside torch's own memory: context, workspaces of libraries, NCCL's buffers."""

FULL = 0.02
"""The share of a full device that may be free, in pieces that the driver can't allocate."""
UNALLOCATED_SHARE = 0.1
"""The share of the device from which the allocator is fragmented; half of it if that is twice the wanted size, and two
fifths if it is eight times as much. torch's advice ("if reserved but unallocated memory is large") gives no number; a
tenth is enough for one more large activation, and full devices are far below."""
SURPLUS = 1.25
"""How many times the wanted size pieces and free memory have to hold: an allocator that joins them leaves some unused
too. With just what was wanted the device is full, and the next allocation fails."""
LEAST_UNALLOCATED = 512 * MIB
"""What a fragmented allocator holds in pieces at least. Requests of 1 to 10 MiB share segments of 20 MiB, and those
below 1 MiB segments of 2 MiB (CUDACachingAllocator.cpp, kLargeBuffer and kSmallBuffer), so a few hundred MiB of
remainders are in any run: they do not show that a smaller batch would not be needed."""
MANY_PIECES = 8
"""How many times the wanted size is unallocated if there are many pieces, each of which is too small."""
LARGE_PART = 0.25
"""The part of the reserved memory that is not reached by the remainders of blocks in most runs: without a finding of
fragmentation, messages in public threads have up to a fifth."""
NAMED_SHARE, UNNAMED_SHARE = 0.1, 0.25
"""The share of the device that matters, held by processes that the message names, or by others, which may partly be
buffers of libraries."""

_SIZE = r"(?<!\d)(\d{1,20}(?:\.\d{1,9})?) ?([KMGT]i?B|bytes?|B)\b"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_FULL = lazy_compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MUSA|MLU|GPU|MPS)(?: backend)? out of memory\b"
    r"|Allocation on device \d* ?would exceed allowed"
    r"|Free memory on device[^()]{0,40}\([^()]{1,40}\) on startup is less than"
)
_BARE = lazy_compile(
    r"(?:(?:CUDA|cuda|HIP|hip|XPU|NPU)(?: driver| runtime)? error(?: ?\(\d+\))? ?: out of memory"
    r"|Failed to CUDA [cm]alloc|Cuda failure (?:\d+ )?'out of memory'"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
)
_WANTED = lazy_compile(f"Tried to allocate {_SIZE}|Requested *: {_SIZE}|utilization \\([\\d.]+, {_SIZE}")
_DEVICE = lazy_compile(r"[ (](?:GPU|NPU|XPU|MUSA|MLU|on device) (\d+)\b")
_TOTAL = lazy_compile(f"total capac?i?ty of {_SIZE}|{_SIZE} total capacity|Device limit *: {_SIZE}")
_FREE = lazy_compile(f"of which {_SIZE} is free|{_SIZE} free|Free \\(according to CUDA\\): {_SIZE}")
_AT_START = lazy_compile(
    r"Free memory on device[^()]{0,40}"
    r"\((?P<free>\d{1,9}(?:\.\d{1,9})?)/(?P<total>\d{1,9}(?:\.\d{1,9})?) ?(?P<unit>[KMGT]i?B)\)"
)
_OWN = lazy_compile(f"this process has {_SIZE} memory in use")
_ALLOCATED = lazy_compile(
    f"allocated memory {_SIZE} is allocated|{_SIZE} already allocated|MPS allocated: {_SIZE}"
    f"|Currently allocated *: {_SIZE}"
)
_UNALLOCATED = lazy_compile(f"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached")
_RESERVED = lazy_compile(f"{_SIZE} reserved in total")
_ALLOWED = lazy_compile(f"{_SIZE} allowed|max allowed: {_SIZE}|memory fraction\\) ?: {_SIZE}")
_PRIVATE = lazy_compile(f"with {_SIZE} allocated in private pools")
_PROCESS = lazy_compile(f"Process (\\d{{1,11}}) has {_SIZE} memory in use")


class OomMessage(msgspec.Struct, frozen=True):
    """A failed allocation in bytes, with ``None`` for unknown numbers.

    ``total`` and ``free`` of the device. ``in_use_by_process``: with context and libraries. ``reserved_unallocated``:
    held by the allocator and used by no tensor. ``others``: process ids and their memory; ``other_bytes``: the memory
    of all other processes, stated or inferred. ``allowed``: a limit of this process. ``in_private_pools``: reserved for
    CUDA graphs, part of the unallocated memory. ``device``: as numbered by this process."""

    wanted: int | None = None
    total: int | None = None
    free: int | None = None
    in_use_by_process: int | None = None
    allocated: int | None = None
    reserved_unallocated: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    other_bytes: int | None = None
    allowed: int | None = None
    in_private_pools: int | None = None
    device: int | None = None

    @property
    def reserved(self) -> int | None:
        """Bytes that the allocator holds."""
        return None if self.allocated is None else self.allocated + (self.reserved_unallocated or 0)


def parse_oom(text: str) -> OomMessage | None:
    """The first out-of-memory message in a text; ``None`` without one.

    A message without numbers (``CUDA error: out of memory``) gives an empty result."""
    found = _FULL.search(text)
    if found is None:
        return OomMessage() if _BARE.search(text) else None
    end = _FULL.search(text, found.end())
    said = " ".join(text[found.start() : min(end.start() if end else len(text), found.start() + READ)].split())
    processes = tuple((int(one[1]), _bytes(one[2], one[3])) for one in _PROCESS.finditer(said))
    return _with_others(_numbers(said), processes)


def _numbers(said: str) -> OomMessage:
    allocated, reserved, unallocated = _size(_ALLOCATED, said), _size(_RESERVED, said), _size(_UNALLOCATED, said)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    device = _DEVICE.search(said)
    if start := _AT_START.search(said):
        free, total = (_bytes(start[name], start["unit"]) for name in ("free", "total"))
        return OomMessage(wanted=_size(_WANTED, said), total=total, free=free, allocated=0)
    return OomMessage(
        wanted=_size(_WANTED, said),
        total=_size(_TOTAL, said),
        free=_size(_FREE, said),
        in_use_by_process=_size(_OWN, said),
        allocated=allocated,
        reserved_unallocated=unallocated,
        allowed=_size(_ALLOWED, said),
        in_private_pools=_size(_PRIVATE, said),
        device=int(device[1]) if device and len(device[1]) < 6 else None,
    )


def _size(pattern: re.Pattern[str], said: str) -> int | None:
    found = pattern.search(said)
    if found is None:
        return None
    number, unit = (group for group in found.groups() if group is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    """Allocators count by 1,024, whatever the unit (c10/util: format_size)."""
    return int(float(number) * _UNITS.get(unit[0], 1))


def _with_others(message: OomMessage, processes: tuple[tuple[int, int], ...]) -> OomMessage:
    if message.in_use_by_process is None and (own := _own(message, processes)) is not None:
        processes = tuple(one for one in processes if one is not own)
        message = msgspec.structs.replace(message, in_use_by_process=own[1])
    named = sum(size for _, size in processes)
    return msgspec.structs.replace(message, others=processes, other_bytes=named if processes else _unnamed(message))


def _own(message: OomMessage, processes: tuple[tuple[int, int], ...]) -> tuple[int, int] | None:
    if not message.reserved:
        return None
    most = message.reserved + max(OVERHEAD, int(OVERHEAD_SHARE * (message.total or 0)))
    # Numbers are rounded to two decimals, and the driver counts whole pages.
    fitting = [one for one in processes if 0.98 * message.reserved <= one[1] <= most]
    return min(fitting, key=lambda one: one[1], default=None)


def _unnamed(message: OomMessage) -> int | None:
    """The memory of unnamed processes: all but the free memory and that of this process, context included."""
    own = message.in_use_by_process
    if own is None and message.reserved is not None:
        own = message.reserved + CONTEXT
    if own is None or message.total is None or message.free is None:
        return None
    return max(0, message.total - message.free - own)


def cause_of(shortage: OomMessage, *, peers: Collection[int] = ()) -> Cause:
    """The cause of a failed allocation, from its numbers.

    ``limit``: this process may not use what is free. ``demand``: it needs more than there is. ``fragmented``: the
    allocator holds enough memory, in pieces that are too small. ``others``: other processes hold what is missing;
    ``skew`` if these are other ranks: ``peers`` (process ids), or several of the same size on the first device.
    ``unknown``: numbers are missing, or enough memory is free (freed since, or refused by a driver)."""
    wanted, total, free = shortage.wanted, shortage.total, shortage.free
    if wanted is None:
        return "unknown"
    if _is_limited(shortage, wanted):
        return "limit"
    if total is None or free is None or shortage.allocated is None:
        return "demand" if total is not None and wanted > total else "unknown"
    if wanted + shortage.allocated > total:
        return "demand"
    if free >= wanted and free > FULL * total:
        return "unknown"
    unallocated, other = shortage.reserved_unallocated or 0, shortage.other_bytes or 0
    large = UNALLOCATED_SHARE * total
    rules = ((1, 1.0), (2, 0.5), (8, 0.4))
    has_surplus = unallocated + free >= SURPLUS * wanted and unallocated >= LEAST_UNALLOCATED
    is_fragmented = has_surplus and any(unallocated >= max(times * wanted, share * large) for times, share in rules)
    would_do = free + other >= wanted
    if would_do and _is_skew(shortage, peers):
        return "skew" if not is_fragmented or other > unallocated else "fragmented"
    if would_do and other >= (NAMED_SHARE if shortage.others else UNNAMED_SHARE) * total:
        return "others" if not is_fragmented or other > unallocated else "fragmented"
    return "fragmented" if is_fragmented else "demand"


def is_mostly_fragmented(shortage: OomMessage) -> bool:
    """Whether pieces, and not the size of the request, are why a fragmented allocator failed.

    Before it fails, the allocator frees all segments without a tensor (release_cached_blocks in
    CUDACachingAllocator.cpp), and a request takes the smallest free block that holds it. So what is unallocated lies in
    blocks below the wanted size, beside tensors in use. Where a request is as large as all of them together, joined
    blocks would hold this tensor and not its gradient: the job needs more memory. Fragmentation is the reason if many
    blocks would have held it, or if a large part of what is reserved is unallocated.
    """
    wanted, unallocated = shortage.wanted or 0, shortage.reserved_unallocated or 0
    return unallocated >= MANY_PIECES * wanted or unallocated >= LARGE_PART * (shortage.reserved or 0)


def _is_limited(shortage: OomMessage, wanted: int) -> bool:
    if shortage.allowed is None:
        return False
    has_room = shortage.free is None or shortage.free >= wanted
    # Segments are larger than the wanted size, and the limit is rounded to two decimals.
    return has_room and (shortage.reserved or 0) + wanted > 0.98 * shortage.allowed


def _is_skew(shortage: OomMessage, peers: Collection[int]) -> bool:
    """Whether the others are ranks: known by their ids, or by contexts of equal size on the default device."""
    known = set(peers)
    if any(pid in known for pid, _ in shortage.others):
        return True
    sizes = [size for _, size in shortage.others if size >= LEAST_CONTEXT]
    if shortage.device != 0 or len(sizes) < 2:
        return False
    typical = median(sizes)
    return all(abs(size - typical) <= 0.1 * typical for size in sizes)
