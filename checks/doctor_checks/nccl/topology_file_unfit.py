"""NCCL014: a topology or graph file is missing, unreadable or describes another machine."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import bus_key
from doctor.api import (
    Finding,
    Job,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    merge,
    source_of,
)
from doctor.core.text import HERE, counted
from doctor.facts import GpuFacts, NcclFacts, ReferencedFile
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

_PATH = "/opt/topology/ndv5.xml"
_OWN = ("0000:10:00.0", "0000:11:00.0")
_FOREIGN = ("0000:a1:00.0", "0000:b1:00.0")


def _file(**changes: object) -> tuple[ReferencedFile, ...]:
    values: dict[str, object] = {"exists": True, "readable": True, "gpus": _OWN, **changes}
    return (ReferencedFile("NCCL_TOPO_FILE", _PATH, **values),)  # type: ignore[arg-type]


_SET = healthy(2, 2).environ(NCCL_TOPO_FILE=_PATH)

_GRAPHS = "NCCL_GRAPH_FILE"


def _graphs(*gpus: str, error: str | None = None) -> JobBuilder:
    file = ReferencedFile(_GRAPHS, "/opt/graphs.xml", exists=True, readable=True, error=error, gpus=gpus)
    return healthy(1, 2).environ(NCCL_GRAPH_FILE=file.path).alter(NcclFacts, references=(file,))


_DEFAULT = "/var/run/nvidia-topologyd/virtualTopology.xml"
"""The path that NCCL reads by default; most machines have no such file (graph/topo.cc)."""


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "nccl.topo_file", by=("path",)):
        file, variable = group.value("path"), _GRAPHS if group.value("what") == "graph" else "NCCL_TOPO_FILE"
        if file != _DEFAULT:
            yield finding_from_logs(
                group,
                f"NCCL cannot read {file}: {group.value('err')}",
                effect="NCCL initialization fails with a system error." if variable == _GRAPHS else "",
                fix=f"Make {file} readable by the job's user, or run `unset {variable}`."
                if "denied" in (group.value("err") or "")
                else f"Run `unset {variable}`, or set it to an existing file for this machine type.",
                severity=Severity.ERROR if variable == _GRAPHS else None,
                confidence=0.9,
                symptoms=False,
            )


@check(
    id="NCCL014",
    severity=Severity.WARNING,
    when="PM",
    needs=(NcclFacts,),
    from_logs=_from_logs,
    impacts={
        r"^NCCL_GRAPH_FILE=\S* (?:does not exist|cannot be read)|cannot read \S*graph": (
            "NCCL initialization fails with a system error."
        ),
        # ncclTopoGetChannelFromXml (graph/search.cc) returns a system error.
        r"names GPU": "NCCL initialization may fail with `XML Import Channel : dev ... not found`.",
        r"describes another machine": "NCCL may select slow paths, or NCCL initialization may fail.",
        r"^NCCL cannot use its": "NCCL initialization fails on every rank that uses the file.",
        # xmlLoadSub ignores an element without a handler (graph/xml.cc), and ncclTopoCompute then searches
        # (graph/search.cc).
        r"^NCCL_GRAPH_FILE=.* root element is": "NCCL ignores the file and searches for rings and trees itself.",
        r"root element is": "NCCL ignores the file and detects the topology itself.",
        r"does not exist|cannot be read|cannot read": (
            "NCCL continues without the file and detects the topology itself. In a virtual machine, it may then select "
            "slow paths."
        ),
        r"not valid|not well-formed": "NCCL initialization may fail on every rank that uses the file.",
    },
    cases=lambda: (
        Passes("not set", healthy(2, 2)),
        Passes("a file of this machine", _SET.alter(NcclFacts, references=_file())),
        Passes("a file without GPUs", _SET.alter(NcclFacts, references=_file(gpus=()))),
        Passes("no GPU to compare with", healthy(2, 2, gpus=0).alter(NcclFacts, references=_file(gpus=_FOREIGN))),
        Passes("a part of the machine", _SET.alter(NcclFacts, references=_file(gpus=_OWN[:1]))),
        Fails(
            "missing on one host",
            _SET.alter(NcclFacts, references=_file()).alter(
                NcclFacts, ranks=(2, 3), references=_file(exists=False, readable=False, gpus=())
            ),
            ranks=(2, 3),
        ),
        Fails(
            "not readable",
            _SET.alter(NcclFacts, references=_file(readable=False, error="Permission denied", gpus=())),
            ranks=(0, 1, 2, 3),
        ),
        Fails("no XML", _SET.alter(NcclFacts, references=_file(error="not well-formed", gpus=())), ranks=(0, 1, 2, 3)),
        Fails(
            "a file that NCCL reads and refuses",
            _SET.alter(NcclFacts, references=_file(error="a <cpu> element has no arch attribute")),
            ranks=(0, 1, 2, 3),
        ),
        Fails("a graph of this machine", _graphs("0", "1"), ranks=(0, 1), severity=Severity.INFO),
        Fails("a graph of a machine with four GPUs", _graphs("0", "1", "2", "3"), ranks=(0, 1)),
        Fails(
            "a graph in the place of a topology",
            _SET.alter(NcclFacts, references=_file(error="its root element is <graphs>, not <system>", gpus=())),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "a topology in the place of a graph",
            _graphs(error="its root element is <system>, not <graphs>"),
            ranks=(0, 1),
        ),
        Fails("of another machine", _SET.alter(NcclFacts, references=_file(gpus=_FOREIGN)), ranks=(0, 1, 2, 3)),
        Passes(
            "a default file that most machines do not have",
            logged(
                "node1:41:77 [0] NCCL INFO Could not open XML topology file "
                "/var/run/nvidia-topologyd/virtualTopology.xml : No such file or directory"
            ),
        ),
    ),
)
def topology_file_unfit(job: Job) -> Iterator[Verdict]:
    """Ask whether the files named by NCCL_TOPO_FILE and NCCL_GRAPH_FILE exist and describe this machine.

    Why it hurts: without the file, NCCL uses the flat PCI tree of the virtual machine and selects slow paths. With a
    file of another machine, NCCL selects wrong paths or fails to start.
    Fix: Unset NCCL_TOPO_FILE and NCCL_GRAPH_FILE, or set them to files for this machine type.
    """
    yield from merge(_findings(job), job.place_of)
    for nccl, identical in job.each(NcclFacts):
        for file in _files(nccl):
            if file.exists is None:
                yield Unknown(f"{file.path} ({file.variable}) could not be accessed", identical.ranks)


def _files(nccl: NcclFacts) -> Iterator[ReferencedFile]:
    return (file for file in nccl.references if file.variable in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"))


def _findings(job: Job) -> Iterator[Finding]:
    for nccl, identical in job.each(NcclFacts, also=(GpuFacts,)):
        for file in _files(nccl):
            wrong, setting = _wrong(file, identical.find(GpuFacts)), nccl.setting(file.variable)
            if wrong:
                yield Finding(
                    f"{file.variable}={file.path} {wrong}",
                    ranks=identical.ranks,
                    evidence={"gpus_in_file": list(file.gpus)},
                    fix=_fix(file),
                    # NCCL returns a system error for a graph file that it cannot open (graph/xml.cc).
                    severity=Severity.ERROR if file.variable == _GRAPHS and not file.readable else None,
                    source=source_of(setting),
                )
            elif file.variable == _GRAPHS and file.exists:
                yield Finding(
                    f"{_GRAPHS}={file.path} overrides NCCL's search for rings and trees",
                    ranks=identical.ranks,
                    evidence={"gpus_in_file": list(file.gpus)},
                    effect="The file is valid only for one machine type, one set of visible GPUs and one NCCL version.",
                    fix=f"Run `unset {_GRAPHS}` unless you are testing a file for this machine type.",
                    severity=Severity.INFO,
                    source=source_of(setting),
                )


def _fix(file: ReferencedFile) -> str:
    if file.exists is not False and file.readable is False:
        return f"Make {file.path} readable by the job's user on {HERE}, or run `unset {file.variable}`."
    for variable, root in (("NCCL_TOPO_FILE", "system"), (_GRAPHS, "graphs")):
        if variable != file.variable and f"root element is <{root}>" in (file.error or ""):
            kind = "a topology" if root == "system" else "a graph file"
            return f"Run `unset {file.variable}`, and set {variable} to this file instead if you need it: it is {kind}."
    return f"Run `unset {file.variable}` on {HERE}, or set it to a file for this machine type."


def _wrong(file: ReferencedFile, gpus: GpuFacts | None) -> str | None:
    if file.exists is False:
        return f"does not exist on {HERE}"
    if file.readable is False:
        return f"cannot be read on {HERE}" + (f" ({file.error})" if file.error else "")
    if file.error:
        broken, colon, reason = file.error.partition("not well-formed")
        return f"is not well-formed XML{reason}" if colon and not broken else f"is not valid: {file.error}"
    if file.variable == _GRAPHS:
        beyond = [number for number in map(int, file.gpus) if gpus and gpus.gpus and number >= len(gpus.gpus)]
        if not beyond:
            return None
        count = len(gpus.gpus) if gpus else 0
        return f"names GPU {max(beyond)}, which does not exist on {HERE} ({counted(count, 'GPU')})"
    here = {bus_key(gpu.bus_id) for gpu in gpus.gpus} if gpus else set()
    named = {bus_key(bus_id) for bus_id in file.gpus}
    if here and named and not here & named:
        return f"describes another machine: none of its {len(named)} GPUs is in the host"
    return None
