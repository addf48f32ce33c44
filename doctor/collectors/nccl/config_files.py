"""Configuration files of NCCL, and the files that settings name."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from doctor.collectors.base import Machine
from doctor.collectors.host.pci import DISPLAY_CLASSES
from doctor.core.facts import HiddenField, Layer, ReferencedFile, SettingsFile

LONGEST_LINE = 4095
LONGEST_VALUE = 1023
"""Bytes of the buffers of NCCL (src/misc/param.cc): the rest of a line counts as another line."""

CONF_LIMIT = 1 << 20
XML_LIMIT = 4 << 20
"""Bytes of a topology file; those of machines with 16 GPUs have about 20 kB."""

NAMED_FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")
"""Variables that name a file to read. NCCL_*_DUMP_FILE and NCCL_DEBUG_FILE name files to write."""

_CR_LF = "its lines end in CR LF; NCCL before 2.30 takes the CR for a part of the value"


class ConfEntry(msgspec.Struct, frozen=True):
    """A line of a configuration file."""

    name: str
    value: str
    line: int


def conf_paths(machine: Machine) -> Iterator[tuple[Path, Layer, bool]]:
    """Yield the files that NCCL reads, highest priority first, with layer and whether the user named it.

    NCCL_CONF_FILE replaces the file in the home folder (since NCCL 2.23) and is not expanded.
    """
    asked = machine.environ.get("NCCL_CONF_FILE")
    in_homes = home_files(machine.environ)
    if asked:
        yield Path(asked), "user file", True
    elif in_homes:
        yield next((path for path in in_homes if path.exists()), in_homes[0]), "user file", False
    yield machine.etc / "nccl.conf", "system file", False


def home_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the places of the user's file: the home of the user database, or since NCCL 2.30 that of HOME."""
    homes = (_home(), environ.get("HOME"))
    return tuple(dict.fromkeys(Path(home, ".nccl.conf") for home in homes if home))


def ambiguous_home(machine: Machine) -> tuple[HiddenField, ...]:
    """Return a note if the user file depends on the release of NCCL."""
    files = home_files(machine.environ)
    if machine.environ.get("NCCL_CONF_FILE") or len(files) < 2 or not any(path.exists() for path in files):
        return ()
    reason = f"NCCL before 2.30 reads {files[0]}, newer releases {files[1]}"
    return (HiddenField("files", reason, f"let HOME and the user database agree, or set NCCL_CONF_FILE={files[0]}"),)


def _home() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def read_conf(path: Path, layer: Layer) -> tuple[SettingsFile, tuple[ConfEntry, ...]]:
    """Return a configuration file and its entries, in the order of the file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(CONF_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        return SettingsFile(str(path), layer, exists=False), ()
    except OSError as error:
        return SettingsFile(str(path), layer, error=error.strerror or str(error)), ()
    entries = tuple(parse_conf(data))
    return SettingsFile(str(path), layer, settings=len(entries), error=_CR_LF if b"\r\n" in data else None), entries


def parse_conf(data: bytes) -> Iterator[ConfEntry]:
    """Yield the entries of a configuration file as NCCL parses it (src/misc/param.cc setEnvFile).

    ``#`` starts a comment in the first column only; a line without ``=`` is not an entry; blanks belong to the adjacent
    name or value; the first of two entries with one name counts.
    """
    for number, line in enumerate(data.split(b"\n"), 1):
        for start in range(0, len(line), LONGEST_LINE):
            part = line[start : start + LONGEST_LINE].partition(b"\0")[0].removesuffix(b"\r")
            name, equals, value = part.partition(b"=")
            if equals and name and not part.startswith(b"#"):
                yield ConfEntry(_text(name), _text(value), number)


def _text(data: bytes) -> str:
    return data[:LONGEST_VALUE].decode("utf-8", "replace")


def read_references(settings: Mapping[str, str], machine: Machine) -> Iterator[ReferencedFile]:
    """Yield the files that settings name, and the default topology file of a cloud virtual machine."""
    for variable in NAMED_FILES:
        if settings.get(variable):
            yield read_reference(variable, Path(settings[variable]))
    provided = machine.etc.parent / "var/run/nvidia-topologyd/virtualTopology.xml"
    if "NCCL_TOPO_FILE" not in settings and provided.is_file():
        yield read_reference("NCCL_TOPO_FILE (default)", provided)


def read_reference(variable: str, path: Path) -> ReferencedFile:
    """Return whether a named file exists and is readable, and the content of a topology file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(XML_LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ReferencedFile(variable, str(path), exists=False, readable=False)
    except OSError as error:
        return ReferencedFile(variable, str(path), exists=True, readable=False, error=error.strerror or str(error))
    if variable == "NCCL_TUNER_CONFIG_FILE":
        return ReferencedFile(variable, str(path), exists=True, readable=True)
    content = parse_graphs(data) if variable == "NCCL_GRAPH_FILE" else parse_topology(data)
    return ReferencedFile(
        variable,
        str(path),
        exists=True,
        readable=True,
        error=content.error,
        gpus=tuple(dict.fromkeys(content.gpus)),
        devices=tuple(dict.fromkeys(content.devices)),
    )


class NcclXml(msgspec.Struct):
    """GPUs and network devices in a file; ``error``: what NCCL refuses in it, or why it could not be read to its end.

    ``root``: the element that NCCL reads, and ``required``: attributes of its elements (src/graph/xml.cc, topo.cc
    ncclTopoAddCpu, search.cc ncclTopoGetGraphFromXmlSub). NCCL adds those of a CPU only if the communicator uses a GPU
    below it (NVIDIA/nccl#379, aws/aws-ofi-nccl#785)."""

    root: ClassVar[str]
    required: ClassVar[dict[str, tuple[str, ...]]]

    gpus: list[str] = msgspec.field(default_factory=list)
    devices: list[str] = msgspec.field(default_factory=list)
    error: str | None = None
    _depth: int = 0

    def opened(self, tag: str, attributes: dict[str, str]) -> None:
        """Handle the start of an element."""
        if self._depth == 0 and tag != self.root:
            self._fail(f"its root element is <{tag}>, not <{self.root}>")
        elif self._depth == 0 and attributes.get("version", "").strip() != "1":
            self._fail(f"<{self.root}> has version {attributes.get('version', 'none')}, and NCCL reads version 1")
        self._depth += 1
        for name in self.required.get(tag, ()):
            if name not in attributes:
                self._fail(f"a <{tag}> element has no {name} attribute")
        self.found(tag, attributes)

    def found(self, tag: str, attributes: dict[str, str]) -> None:
        """Collect the GPU or network device of an element."""

    def closed(self, tag: str) -> None:
        """Handle the end of an element."""
        self._depth -= 1

    def _fail(self, error: str) -> None:
        self.error = self.error or error


class Graphs(NcclXml):
    """A graph file: ``gpus`` are device numbers as NVML counts them."""

    root: ClassVar[str] = "graphs"
    required: ClassVar[dict[str, tuple[str, ...]]] = {
        "graph": ("id", "crossnic", "pattern", "nchannels", "speedintra", "speedinter", "samechannels"),
        "gpu": ("dev",),
        "net": ("dev",),
    }

    def found(self, tag: str, attributes: dict[str, str]) -> None:
        """Collect the number of a GPU, which NCCL parses as hexadecimal."""
        if tag == "gpu" and re.fullmatch(r"(0x)?[0-9a-fA-F]{1,4}", attributes.get("dev", "")):
            self.gpus.append(str(int(attributes["dev"], 16)))


class Topology(NcclXml):
    """A topology file: ``gpus`` are bus ids."""

    root: ClassVar[str] = "system"
    required: ClassVar[dict[str, tuple[str, ...]]] = {"cpu": ("numaid", "arch"), "pci": ("busid",)}

    _bus_ids: list[str] = msgspec.field(default_factory=list)

    def found(self, tag: str, attributes: dict[str, str]) -> None:
        """Collect a GPU, which is a PCI device of a display class or one with a ``gpu`` element, or a net device."""
        if tag == "cpu" and attributes.get("arch") == "x86_64" and "vendor" not in attributes:
            self._fail("a <cpu> element of x86_64 has no vendor attribute")
        if tag == "pci":
            bus_id = attributes.get("busid", "").lower()
            self._bus_ids.append(bus_id)
            if attributes.get("class", "").startswith(DISPLAY_CLASSES):
                self.gpus.append(bus_id)
        elif tag == "gpu" and self._bus_ids:
            self.gpus.append(self._bus_ids[-1])
        elif tag == "net" and attributes.get("name"):
            self.devices.append(attributes["name"])

    def closed(self, tag: str) -> None:
        """Handle the end of an element."""
        super().closed(tag)
        if tag == "pci" and self._bus_ids:
            self._bus_ids.pop()


class _RefusedXml(Exception):
    """The document has a document type declaration, which could expand without limit."""


def parse_topology(data: bytes) -> Topology:
    """Return the content of a topology file."""
    return _parse(data, Topology())


def parse_graphs(data: bytes) -> Graphs:
    """Return the content of a graph file."""
    return _parse(data, Graphs())


X = TypeVar("X", bound=NcclXml)


def _parse(data: bytes, content: X) -> X:
    if len(data) > XML_LIMIT:
        content.error = f"larger than {XML_LIMIT} bytes"
        return content
    from xml.parsers import expat  # most jobs name no such file

    parser = expat.ParserCreate()
    parser.StartElementHandler = content.opened
    parser.EndElementHandler = content.closed
    parser.StartDoctypeDeclHandler = _refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        content.error = f"not well-formed: {error}"
    except _RefusedXml as refusal:
        content.error = str(refusal)
    return content


def _refuse(*_: object) -> None:
    raise _RefusedXml("a document type declaration is not accepted")
