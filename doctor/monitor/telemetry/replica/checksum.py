"""Checksums of parameters that are equal if and only if the parameters are, to the bit.

On a CPU it is the CRC-32 of the bytes: one call, and no torch operation. On a CUDA device, bits are added as integers
that wrap around, so the order of the additions does not matter. A single differing bit always shows: in the CRC by its
definition, in a sum because it changes it by a power of two. Both depend on a tensor's shape, type and values alone,
not on its memory layout.

Buffers are left out. In data-parallel training each rank updates them from its own batches (running means of batch
normalization), and DistributedDataParallel only broadcasts them at the start of the next forward; after a step, they
differ between healthy ranks.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Union

import msgspec

from doctor.monitor.telemetry.replica.model_layout import Named, whole_parameters

if TYPE_CHECKING:
    import torch

MOST_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Bytes read by one sample: less than a millisecond."""
MOST_PIECES = 64
"""Sums of one sample, a few microseconds each on the host."""

_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
"""Process memory as bytes, without a ctypes type for each size, which would be created for each sample."""
_TO_READ = 0x100
"""PyBUF_READ of the interpreter's C API."""

Sum = Union[int, "torch.Tensor"]
"""The sum of a CPU's bytes, or a tensor that stays on its device."""


class ParameterSlice(msgspec.Struct, frozen=True):
    """Rows ``first`` to ``end`` of a parameter of ``shape``, which is not kept alive."""

    name: str
    parameter: weakref.ref[torch.Tensor]
    shape: tuple[int, ...]
    first: int
    end: int


class ParameterChunk(msgspec.Struct, frozen=True):
    """The part of the parameters that one sample covers."""

    label: str
    pieces: tuple[ParameterSlice, ...]


class ParameterChunks:
    """The parameters of a module in bounded parts, equal on all ranks with the same model."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.all: tuple[ParameterChunk, ...] = ()
        self._cut()

    def sums(self, number: int) -> tuple[str, list[Sum]]:
        """Return label and sums of the part for sample ``number``; empty if there is nothing to add.

        The parts are recomputed if parameters were replaced.
        """
        for _ in range(2):
            part = self.all[number % len(self.all)] if self.all else ParameterChunk("", ())
            sums = list(chunk_sums(part))
            if sums and len(sums) == len(part.pieces):
                return part.label, sums
            self._cut()
        return "", []

    def _cut(self) -> None:
        module = self._module()
        self.all = split_into_chunks(whole_parameters(module)) if module is not None else ()


def split_into_chunks(parameters: Sequence[Named], most_bytes: int | None = None) -> tuple[ParameterChunk, ...]:
    """Split ``parameters`` into parts of at most ``most_bytes`` and :data:`MOST_PIECES`.

    By default, ``most_bytes`` depends on their device. A single row is never split.
    """
    if not parameters:
        return ()
    room = most_bytes or MOST_BYTES[parameters[0][1].device.type]
    groups: list[list[ParameterSlice]] = [[]]
    left = room
    for piece, size in _pieces(parameters, room):
        if groups[-1] and (size > left or len(groups[-1]) == MOST_PIECES):
            groups.append([])
            left = room
        groups[-1].append(piece)
        left -= size
    if len(groups) == 1:
        return (ParameterChunk("all", tuple(groups[0])),)
    return tuple(
        ParameterChunk(f"{_names(group)} ({number} of {len(groups)})", tuple(group))
        for number, group in enumerate(groups, 1)
    )


def _pieces(parameters: Sequence[Named], room: int) -> Iterator[tuple[ParameterSlice, int]]:
    """Yield each parameter in as few pieces as ``room`` bytes allow, with the size of each."""
    for name, parameter in parameters:
        rows = parameter.shape[0] if parameter.dim() else 1
        row_bytes = parameter.numel() // rows * parameter.element_size()
        step = max(1, room // row_bytes)
        for first in range(0, rows, step):
            end = min(rows, first + step)
            yield (
                ParameterSlice(name, weakref.ref(parameter), tuple(parameter.shape), first, end),
                (end - first) * row_bytes,
            )


def _names(group: Sequence[ParameterSlice]) -> str:
    first, last = group[0].name, group[-1].name
    return first if first == last else f"{first} to {last}"


def chunk_sums(part: ParameterChunk) -> Iterator[Sum]:
    """Yield the sum of each piece, up to the first whose parameter was replaced."""
    for piece in part.pieces:
        parameter = piece.parameter()
        if parameter is None or parameter.shape != piece.shape:
            return
        if parameter.is_cpu:
            yield byte_sum(parameter, piece.first, piece.end)
        else:
            values = parameter.detach()
            yield bit_sum(values.narrow(0, piece.first, piece.end - piece.first) if piece.shape else values.view(1))


def byte_sum(values: torch.Tensor, first: int, end: int) -> int:
    """Return the CRC-32 of rows of a dense CPU tensor; without dimensions, it is one row."""
    if not values.is_contiguous():  # the size of a part bounds the copy
        values, first, end = values.detach()[first:end].contiguous(), 0, end - first
    size = values.element_size()
    row = values.numel() // (len(values) or 1) * size if values.dim() else size
    begin, length = first * row, (end - first) * row
    if values.untyped_storage().nbytes() < values.storage_offset() * size + begin + length:
        return 0  # its memory was freed and will be restored, as torch.distributed does between steps
    return zlib.crc32(_memory_at(values.data_ptr() + begin, length, _TO_READ))


def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of ``values`` as signed 64-bit integers that wrap around."""
    import torch

    if values.is_complex():
        values = torch.view_as_real(values)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.element_size()]).sum(dtype=torch.int64)


def digest(sums: Iterable[int]) -> str:
    """Return sums as one short text."""
    numbers = list(sums)
    return hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).hexdigest()
