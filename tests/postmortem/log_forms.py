"""The forms in which logs of one job are handed over: converters from the output of torchrun into each of them.

The job has four ranks, and rank 3 runs out of GPU memory. ``job_of_four_ranks.txt`` is what ``torchrun --tee 3``
printed. Each converter returns the files of a form by name.
"""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import html
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

Files = dict[str, bytes]
RANKS = range(4)
RECORDED = Path(__file__).with_name("job_of_four_ranks.txt").read_text(encoding="utf-8")
_BEGIN = datetime.datetime(2026, 11, 23, 21, 35, tzinfo=datetime.timezone.utc)
_LABEL = re.compile(r"\[default(\d)\]:")


class Line(NamedTuple):
    """A line of a rank, or of the launcher: ``rank`` is ``None``."""

    rank: int | None
    text: str
    at: datetime.datetime

    @property
    def iso(self) -> str:
        return self.at.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")

    @property
    def milliseconds(self) -> int:
        return round(self.at.timestamp() * 1000)

    @property
    def nanoseconds(self) -> str:
        return f"{self.milliseconds}000000"

    @property
    def pod(self) -> str:
        return f"train-worker-{self.rank}"

    @property
    def node(self) -> str:
        return f"node{(self.rank or 0) // 2}"

    @property
    def tagged(self) -> str:
        return self.text if self.rank is None else f"[default{self.rank}]:{self.text}"


def _lines() -> list[Line]:
    found = []
    for number, text in enumerate(RECORDED.splitlines()):
        label = _LABEL.match(text)
        at = _BEGIN + datetime.timedelta(milliseconds=10 * number)
        found.append(Line(int(label[1]) if label else None, text[label.end() :] if label else text, at))
    return found


LINES = _lines()
OF_RANKS = [line for line in LINES if line.rank is not None]


def text_of(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


TAGGED = RECORDED.encode()
UNTAGGED = text_of(line.text for line in LINES)
"""What torchrun prints without labels: only its table of failures names a rank."""
LAUNCHER = text_of(line.text for line in LINES if line.rank is None)


# One file a rank.


def output_of(rank: int) -> bytes:
    return text_of(line.text for line in LINES if line.rank == rank)


def by_rank(name: str, **more: Callable[[int], object]) -> Callable[[], Files]:
    """Files whose name is made from ``{rank}``, ``{node}``, ``{local}`` and ``more``."""
    return lambda: {
        name.format(rank=rank, node=rank // 2, local=rank % 2, **{key: of(rank) for key, of in more.items()}): (
            output_of(rank)
        )
        for rank in RANKS
    }


def only(name: str) -> Callable[[], Files]:
    return lambda: {name: output_of(3)}


def master_and_workers() -> Files:
    return {f"train-{'master-0' if rank == 0 else f'worker-{rank - 1}'}.log": output_of(rank) for rank in RANKS}


def with_table() -> Files:
    return {**by_rank("logs/x_70fl1913/attempt_0/{rank}/stderr.log")(), "torchrun.out": LAUNCHER}


def second_node() -> Files:
    """The files of the second of two hosts; the agent's table tells which ranks it has."""
    table = re.sub(rb"rank      : (\d) \(", lambda found: b"rank      : %d (" % (int(found[1]) + 4), LAUNCHER)
    return {**by_rank("logs/x_70fl1913/attempt_0/{rank}/stderr.log")(), "torchrun.out": table}


def cri() -> Files:
    """The files of containerd; the number of a file counts restarts."""
    return {
        f"pods/default_train-worker-{rank}_8d7e2c1a-33f0-4d2b-9a{rank}5-0c1d2e3f4a5{rank}/pytorch/0.log": text_of(
            f"{line.iso} stderr F {line.text}" for line in LINES if line.rank == rank
        )
        for rank in RANKS
    }


# One file for all ranks.


def each_line(name: str, of: Callable[[Line], str], lines: list[Line] = OF_RANKS) -> Callable[[], Files]:
    return lambda: {name: text_of(of(line) for line in lines)}


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_csv(header: list[str], of: Callable[[Line], list[object]], lines: list[Line] = OF_RANKS) -> Callable[[], Files]:
    def files() -> Files:
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(header)
        rows.writerows(of(line) for line in lines)
        return {"export.csv": text.getvalue().encode()}

    return files


def document(of: Callable[[list[Line]], object], indent: int | None = None) -> Callable[[], Files]:
    return lambda: {"export.json": json.dumps(of(OF_RANKS), indent=indent, ensure_ascii=False).encode()}


def loki_response(lines: list[Line]) -> object:
    streams = [
        {
            "stream": {"namespace": "default", "pod": f"train-worker-{rank}"},
            "values": [[line.nanoseconds, line.text] for line in lines if line.rank == rank],
        }
        for rank in RANKS
    ]
    return {"status": "success", "data": {"resultType": "streams", "result": streams, "stats": {}}}


def filtered_events(lines: list[Line]) -> object:
    return {
        "events": [
            {
                "logStreamName": f"train/pytorch/{line.pod}",
                "timestamp": line.milliseconds,
                "message": line.text,
                "ingestionTime": line.milliseconds + 900,
                "eventId": f"3{line.milliseconds}",
            }
            for line in lines
        ],
        "searchedLogStreams": [],
    }


def insights(lines: list[Line]) -> object:
    def row(line: Line) -> list[object]:
        values = {
            "@timestamp": line.at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
            "@message": line.text,
            "@logStream": line.pod,
        }
        return [{"field": field, "value": value} for field, value in values.items()]

    return {"results": [row(line) for line in lines], "statistics": {"recordsMatched": 4.0}, "status": "Complete"}


def grafana(lines: list[Line]) -> object:
    return [
        {"line": line.text, "timestamp": line.nanoseconds, "date": line.iso, "fields": {"pod": line.pod}}
        for line in lines
    ]


def newest_first(of: Callable[[list[Line]], object]) -> Callable[[], Files]:
    return document(lambda lines: of(lines[::-1]))


def one_stream_each() -> Files:
    """``aws logs get-log-events`` for each stream."""
    return {
        f"worker-{rank}.json": json.dumps(
            {
                "events": [
                    {"timestamp": line.milliseconds, "message": line.text, "ingestionTime": line.milliseconds + 900}
                    for line in LINES
                    if line.rank == rank
                ],
                "nextForwardToken": "f/3",
                "nextBackwardToken": "b/3",
            },
            indent=4,
        ).encode()
        for rank in RANKS
    }


def journald(line: Line) -> dict[str, object]:
    return {
        "_HOSTNAME": "node0",
        "SYSLOG_IDENTIFIER": "torchrun",
        "_PID": f"{4000 + (line.rank or 0)}",
        "PRIORITY": "6",
        "MESSAGE": line.tagged,
        "__REALTIME_TIMESTAMP": f"{line.milliseconds}000",
    }


EVENTS = b"""\
LAST SEEN   TYPE      REASON      OBJECT               MESSAGE
2m          Normal    Pulled      pod/train-worker-0   Container image "registry/train:1" already present on machine
2m          Normal    Started     pod/train-worker-3   Started container pytorch
12s         Warning   BackOff     pod/train-worker-3   Back-off restarting failed container pytorch
"""


def with_events() -> Files:
    return {**by_rank("train-worker-{rank}.log")(), "events.txt": EVENTS}


# Quotes, encodings and archives of a whole text.


def quoted(mark: str) -> Callable[[bytes], bytes]:
    return lambda data: text_of(f"{mark}{line}" for line in data.decode().splitlines())


def in_markdown(data: bytes) -> bytes:
    return (
        b"### Describe the bug\n\nThe job ends after a few steps.\n\n<details>\n<summary>Log</summary>\n\n```console\n"
        b"$ torchrun --nproc-per-node 4 train.py\n" + data + b"```\n\n</details>\n\n### Versions\n\ntorch 2.9\n"
    )


def in_quoted_markdown(data: bytes) -> bytes:
    return quoted("> ")(in_markdown(data))


def cut_at(width: int) -> Callable[[bytes], bytes]:
    """Text that was copied from a terminal, in which long lines continue on the next row."""

    def cut(data: bytes) -> bytes:
        return b"\n".join(
            line[at : at + width] for line in data.split(b"\n") for at in range(0, max(len(line), 1), width)
        )

    return cut


def colored(data: bytes) -> bytes:
    return text_of(f"\x1b[3{number % 8}m{line}\x1b[0m" for number, line in enumerate(data.decode().splitlines()))


def with_bars(data: bytes) -> bytes:
    bars = "".join(
        f"\rstep: {number}%|{'#' * (number // 10):10}| {number}/100 [00:01<00:09, 9.9it/s]" for number in range(99)
    )
    return bars.encode() + b"\n" + data.replace(b"\n", b"\r\n")


def with_hole(data: bytes) -> bytes:
    """A log that was truncated while it was written to: the file system fills the gap with zeros."""
    return bytes(200_000) + data


def with_zeros(data: bytes) -> bytes:
    return data.replace(b"\n", b"\0\0\n")


def from_the_middle(data: bytes) -> bytes:
    at = data.index(b"line 26, in main")
    return data[at + 7 :]


def to_the_middle(data: bytes) -> bytes:
    return data[: data.index(b"Signal 15 (SIGTERM) received by PID") + 12]


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda data: data,
    "quoted": quoted("> "),
    "quoted without a space": quoted(">"),
    "quoted twice": quoted("> > "),
    "indented": quoted("    "),
    "markdown": in_markdown,
    "quoted markdown": in_quoted_markdown,
    "colors": colored,
    "source of a web page": lambda data: html.escape(data.decode()).encode(),
    "copied from a terminal of 110 columns": cut_at(110),
    "columns collapsed": lambda data: re.sub(rb"(?<=\S) {2,}(?=\S)", b" ", data),
    "named stream": lambda data: re.sub(rb"^", b"[2026-11-23T21:35:00.000001Z] 8de2ca82 || ", data, flags=re.MULTILINE),
    "progress bars and CRLF": with_bars,
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "UTF-16 BE": lambda data: b"\xfe\xff" + data.decode().encode("utf-16-be"),
    "UTF-16 without a mark": lambda data: data.decode().encode("utf-16-le"),
    "UTF-8 with a mark": lambda data: data.decode().encode("utf-8-sig"),
    "a hole of zeros": with_hole,
    "zeros in lines": with_zeros,
}


def in_tar(files: Files, mode: str = "w") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"job/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def in_zip(files: Files) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"job/{name}", content)
    return data.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "job.log.gz": gzip.compress,
    "job.log.xz": lzma.compress,
    "job.log.bz2": bz2.compress,
}
ARCHIVES: dict[str, Callable[[Files], bytes]] = {
    "logs.zip": in_zip,
    "logs.tar": in_tar,
    "logs.tar.gz": lambda files: in_tar(files, "w:gz"),
    "logs.tar.xz": lambda files: in_tar(files, "w:xz"),
    "logs.tar.bz2": lambda files: in_tar(files, "w:bz2"),
    "a tar in a zip.zip": lambda files: in_zip({"logs.tar.gz": in_tar(files, "w:gz")}),
}


FILES: dict[str, Callable[[], Files]] = {
    "torchrun --log-dir": by_rank("logs/f60eeccd-27e3-43fc-9c7d-f8ac4780b555_70fl1913/attempt_0/{rank}/stderr.log"),
    "torchrun --log-dir, one file": only("none_70fl1913/attempt_0/3/stderr.log"),
    "torchrun --log-dir, and its output": with_table,
    "mpirun --output-filename": by_rank("out/1/rank.{rank}/stderr"),
    "mpirun --output-filename, one file": only("out/1/rank.3/stderr"),
    "rank_3.log": by_rank("rank_{rank}.log"),
    "rank_3.log, alone": only("rank_3.log"),
    "rank-3/train.err": by_rank("rank-{rank}/train.err"),
    "node1/3.out": by_rank("node{node}/{rank}.out"),
    "worker-3.log": by_rank("worker-{rank}.log"),
    "worker3/stdout.txt": by_rank("worker{rank}/stdout.txt"),
    "3/stderr.log": by_rank("logs/{rank}/stderr.log"),
    "3.log": by_rank("{rank}.log"),
    "srun --output=%j.%t.out": by_rank("48213.{rank}.out"),
    "srun --output=job-%j-%t.out": by_rank("job-48213-{rank}.out"),
    "srun --output=%x-%t-%N.out": by_rank("train-{rank}-node{node}.out"),
    "Kubeflow pods": master_and_workers,
    "pods of a StatefulSet": by_rank("train-{rank}.log"),
    "pods of an indexed Job": by_rank(
        "train-{rank}-{end}.log", end=lambda rank: ("x7k2p", "9wq4z", "mm2hd", "bv6tl")[rank]
    ),
    "container runtime": cri,
    "pods and their events": with_events,
    "srun --label": each_line("job.log", lambda line: f"{line.rank}: {line.text}"),
    "mpirun --tag-output": each_line("job.log", lambda line: f"[1,{line.rank}]<stderr>:{line.text}"),
    "prterun --output tag": each_line("job.log", lambda line: f"[prterun-node0-77@1,{line.rank}]<stderr>: {line.text}"),
    "mpiexec -l": each_line("job.log", lambda line: f"[{line.rank}] {line.text}"),
    "kubectl logs --prefix": each_line("job.log", lambda line: f"[pod/{line.pod}/pytorch] {line.text}"),
    "kubectl logs --prefix --timestamps": each_line(
        "job.log", lambda line: f"[pod/{line.pod}/pytorch] {line.iso} {line.text}"
    ),
    "stern": each_line("job.log", lambda line: f"{line.pod} pytorch {line.text}"),
    "stern -o json": each_line(
        "job.log",
        lambda line: as_json(
            {
                "message": line.text,
                "nodeName": line.node,
                "namespace": "default",
                "podName": line.pod,
                "containerName": "pytorch",
            }
        ),
    ),
    "docker compose logs": each_line("job.log", lambda line: f"{line.pod}  | {line.text}"),
    "logcli": each_line(
        "job.log", lambda line: f'{line.at.isoformat()} {{container="pytorch", pod="{line.pod}"}} {line.text}'
    ),
    "logcli -o jsonl": each_line(
        "job.log",
        lambda line: as_json(
            {"labels": {"container": "pytorch", "pod": line.pod}, "line": line.text, "timestamp": line.iso}
        ),
    ),
    "Loki's API": document(loki_response),
    "Grafana, JSON": document(grafana),
    "Grafana, CSV": as_csv(
        ["container", "pod", "Time", "Line", "tsNs", "id"],
        lambda line: ["pytorch", line.pod, line.milliseconds, line.text, line.nanoseconds, f"{line.nanoseconds}_a"],
    ),
    "CloudWatch Insights, CSV": as_csv(
        ["@timestamp", "@message", "@logStream"],
        lambda line: [line.at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], line.text, line.pod],
    ),
    "CloudWatch Insights, JSON": document(insights, indent=4),
    "CloudWatch Insights, newest first": newest_first(insights),
    "Grafana, newest first": newest_first(grafana),
    "Google Cloud Logging": document(
        lambda lines: [
            {
                "insertId": f"a{number}",
                "resource": {"type": "k8s_container", "labels": {"pod_name": line.pod, "cluster_name": "c1"}},
                "textPayload": line.text,
                "timestamp": line.iso,
            }
            for number, line in enumerate(lines)
        ],
        indent=2,
    ),
    "CloudWatch console, CSV": as_csv(["timestamp", "message"], lambda line: [line.milliseconds, line.tagged], LINES),
    "aws logs filter-log-events": document(filtered_events, indent=4),
    "aws logs get-log-events": one_stream_each,
    "aws logs tail": each_line("job.log", lambda line: f"{line.at.isoformat()} train/pytorch/{line.pod} {line.text}"),
    "journalctl": each_line(
        "job.log", lambda line: f"{line.at:%b %d %H:%M:%S} node0 torchrun[3999]: {line.tagged}", LINES
    ),
    "journalctl -o json": each_line("job.log", lambda line: as_json(journald(line)), LINES),
    "Docker's json-file": each_line(
        "c0ffee-json.log",
        lambda line: as_json({"log": f"{line.tagged}\n", "stream": "stderr", "time": line.iso}),
        LINES,
    ),
}
"""Forms with the files of ranks, or with labels from which the rank follows."""

HOSTS = {
    **dict.fromkeys(
        (
            "kubectl logs --prefix",
            "kubectl logs --prefix --timestamps",
            "stern",
            "logcli",
            "logcli -o jsonl",
            "Loki's API",
            "Grafana, JSON",
            "Grafana, CSV",
            "stern -o json",
            "CloudWatch Insights, JSON",
            "aws logs filter-log-events",
            "aws logs tail",
            "CloudWatch Insights, CSV",
            "CloudWatch Insights, newest first",
            "Grafana, newest first",
            "Google Cloud Logging",
        ),
        "train-worker-3",
    ),
    **dict.fromkeys(("journalctl", "journalctl -o json"), "node0"),
}
"""The host or pod of rank 3 in the forms that name it."""
