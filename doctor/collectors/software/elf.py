"""Read from a shared library what the dynamic loader reads: dependencies, search paths and exported names.

By bounded reads and never by mapping: a mapped file on a network mount that shrinks kills the process with SIGBUS.
Little-endian ELF, 32 and 64 bit (System V ABI, "Dynamic Linking").
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

PT_LOAD = 1
PT_DYNAMIC = 2
SHT_DYNSYM = 11
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME, DT_RPATH, DT_RUNPATH = 0, 1, 5, 14, 15, 29

MAX_TABLE = 16 << 20
"""Bytes of a string or symbol table; libtorch_cpu.so, an extreme one, has 12 MB of names."""

MAX_STRING = 1 << 14
"""Bytes of a name or a search path; those of the torch wheels have about 700."""

MAX_TEXT = 64 << 20
"""Bytes of read-only data that are searched; libnccl.so.2 has about 1 MB besides its device code."""


class ElfError(ValueError):
    """The file is not an ELF library that this machine could load, or it is truncated."""


class ElfSectionHeader(msgspec.Struct, frozen=True):
    """A section of the file; ``link`` is the number of the section that it refers to."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


class ElfLibrary(msgspec.Struct, frozen=True):
    """The dynamic section of a library. ``rpath`` is empty if ``runpath`` is not: the loader then ignores it."""

    path: Path
    machine: tuple[int, int]
    needed: tuple[str, ...] = ()
    soname: str | None = None
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()


class _Layout(msgspec.Struct, frozen=True):
    word: str
    header: str
    program: str
    program_fields: tuple[int, int, int, int, int]  # kind, offset, address, size in file, size of the record
    section: str
    section_fields: tuple[int, int, int, int, int]  # name, kind, offset, size, link
    symbol: int


_LAYOUTS = {
    1: _Layout("I", "<HHIIIIIHHHHHH", "<IIIIIIII", (0, 1, 2, 4, 32), "<IIIIIIIIII", (0, 1, 4, 5, 6), 16),
    2: _Layout("Q", "<HHIQQQIHHHHHH", "<IIQQQQQQ", (0, 2, 3, 5, 56), "<IIQQQQIIQQ", (0, 1, 4, 5, 6), 24),
}


class ElfFile:
    """An open ELF file. Everything raises :class:`ElfError` for a malformed and ``OSError`` for an unreadable one."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.path = path
        self._stream = stream
        self._size = stream.seek(0, 2)
        ident = self.read(0, 16)
        if ident[:4] != b"\x7fELF" or ident[4] not in _LAYOUTS or ident[5] != 1:
            raise ElfError("not a little-endian ELF file")
        self.layout = _LAYOUTS[ident[4]]
        header = struct.unpack(self.layout.header, self.read(16, struct.calcsize(self.layout.header)))
        self.machine = (ident[4], header[1])
        self._program_table, self._section_table = header[4], header[5]
        self._programs, self._sections, self._names = header[9], header[11], header[12]

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly ``size`` bytes from ``offset``."""
        if size > MAX_TEXT:
            raise ElfError(f"a part of {size} bytes is larger than any real one")
        data = self._up_to(offset, size)
        if len(data) != size:
            raise ElfError("the file is cut short")
        return data

    def _up_to(self, offset: int, size: int) -> bytes:
        if offset > self._size:
            raise ElfError("the file is cut short")
        self._stream.seek(offset)
        return self._stream.read(size)

    def _string(self, offset: int) -> str:
        """Return the text at ``offset``. Read one by one: the names of a large library fill megabytes."""
        data = self._up_to(offset, MAX_STRING)
        if b"\0" not in data:
            raise ElfError("a name without an end")
        return text_at(data, 0)

    def library(self) -> ElfLibrary:
        """Return the dynamic section, which every shared library has."""
        segments, dynamic = self._segments()
        if dynamic is None:
            raise ElfError("no dynamic section")
        entries = list(self._dynamic(*dynamic[1:]))
        table = next((value for tag, value in entries if tag == DT_STRTAB), None)
        start = _file_offset(table, segments) if table is not None else 0

        def texts(wanted: int) -> tuple[str, ...]:
            return tuple(self._string(start + value) for tag, value in entries if tag == wanted)

        runpath = tuple(path for text in texts(DT_RUNPATH) for path in text.split(":"))
        rpath = tuple(path for text in texts(DT_RPATH) for path in text.split(":"))
        return ElfLibrary(
            path=self.path,
            machine=self.machine,
            needed=texts(DT_NEEDED),
            soname=next(iter(texts(DT_SONAME)), None),
            rpath=() if runpath else rpath,
            runpath=runpath,
        )

    def sections(self) -> Iterator[ElfSectionHeader]:
        """Yield the sections; a stripped library keeps the relevant ones."""
        layout, name, kind, offset, size, link = (self.layout.section, *self.layout.section_fields)
        step = struct.calcsize(layout)
        table = self.read(self._section_table, step * self._sections)
        rows = [struct.unpack_from(layout, table, step * number) for number in range(self._sections)]
        if self._names >= len(rows):
            return
        names = self.read(rows[self._names][offset], min(rows[self._names][size], MAX_TABLE))
        for row in rows:
            yield ElfSectionHeader(text_at(names, row[name]), row[kind], row[offset], row[size], row[link])

    def exported(self, pattern: re.Pattern[bytes]) -> tuple[str, ...]:
        """Return names of the dynamic symbol table that match ``pattern`` and are defined in this library."""
        sections = list(self.sections())
        table = next((section for section in sections if section.kind == SHT_DYNSYM), None)
        if table is None or table.link >= len(sections):
            return ()
        names = self.read(sections[table.link].offset, min(sections[table.link].size, MAX_TABLE))
        symbols = self.read(table.offset, min(table.size, MAX_TABLE))
        found = (bytes_at(names, offset) for offset in self._defined(symbols))
        return tuple(sorted({name.decode("ascii", "replace") for name in found if pattern.fullmatch(name)}))

    def search(self, pattern: re.Pattern[bytes], section: str = ".rodata") -> re.Match[bytes] | None:
        """Return the first match of ``pattern`` in a section of read-only data."""
        for header in self.sections():
            if header.name == section and header.size <= MAX_TEXT:
                return pattern.search(self.read(header.offset, header.size))
        return None

    def _segments(self) -> tuple[list[tuple[int, int, int]], tuple[int, int, int] | None]:
        """Return address, offset in the file and size of the loadable parts, and those of the dynamic section."""
        kind, offset, address, size, step = self.layout.program_fields
        table = self.read(self._program_table, step * self._programs)
        loads: list[tuple[int, int, int]] = []
        dynamic = None
        for number in range(self._programs):
            row = struct.unpack_from(self.layout.program, table, step * number)
            segment = (row[address], row[offset], row[size])
            if row[kind] == PT_LOAD:
                loads.append(segment)
            elif row[kind] == PT_DYNAMIC:
                dynamic = segment
        return loads, dynamic

    def _dynamic(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        entry = f"<{self.layout.word}{self.layout.word}"
        size = struct.calcsize(entry)
        data = self.read(offset, min(length, MAX_TABLE) // size * size)
        for tag, value in struct.iter_unpack(entry, data):
            if tag == DT_NULL:
                return
            yield tag, value

    def _defined(self, symbols: bytes) -> Iterator[int]:
        """Yield offsets of the names of symbols that have a section (st_shndx is not SHN_UNDEF)."""
        size = self.layout.symbol
        index_at = 14 if size == 16 else 6
        for start in range(0, len(symbols) // size * size, size):
            if struct.unpack_from("<H", symbols, start + index_at)[0]:
                yield struct.unpack_from("<I", symbols, start)[0]


def read_library(path: Path) -> ElfLibrary:
    """Return the dynamic section of the library at ``path``. Raises :class:`ElfError` or ``OSError``."""
    with path.open("rb") as stream:
        return ElfFile(stream, path).library()


def exported_symbols(path: Path, pattern: re.Pattern[bytes]) -> tuple[str, ...]:
    """Return the exported names of a library that match ``pattern``. Raises :class:`ElfError` or ``OSError``."""
    with path.open("rb") as stream:
        return ElfFile(stream, path).exported(pattern)


def search_read_only(path: Path, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """Return the first match in the read-only data of a library, ``None`` also if that cannot be read."""
    try:
        with path.open("rb") as stream:
            return ElfFile(stream, path).search(pattern)
    except (ElfError, OSError):
        return None


def machine_of(path: Path) -> tuple[int, int] | None:
    """Return ELF class and machine number of a file, ``None`` if it is not an ELF file or unreadable."""
    try:
        with path.open("rb") as stream:
            return ElfFile(stream, path).machine
    except (ElfError, OSError):
        return None


def _file_offset(address: int, segments: list[tuple[int, int, int]]) -> int:
    for start, offset, size in segments:
        if start <= address < start + size:
            return address - start + offset
    raise ElfError("an address lies outside of the file")


def bytes_at(names: bytes, offset: int) -> bytes:
    """Return the bytes at ``offset`` up to a zero byte or the end."""
    end = names.find(b"\0", offset)
    return names[offset : end if end >= 0 else len(names)]


def text_at(names: bytes, offset: int) -> str:
    """Return the text at ``offset`` up to a zero byte or the end."""
    return bytes_at(names, offset).decode("utf-8", "replace")
