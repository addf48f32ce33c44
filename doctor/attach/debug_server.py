"""What torch's debug server reports of the ranks of a job: stacks, and flight recorders.

``torch.distributed.debug.start_debug_server`` (torch 2.10 and later) serves pages on rank 0 that contain one text for
each rank (torch/distributed/debug/_debug_handlers.py). The user names the server: its address may not come from the
environment of a process.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.facts import AttachedProcess, ProcessSample, RecorderFacts, StackThread
from doctor.core.masking import mask_record
from doctor.core.stack_dumps.recorder_dump import parse_recorder
from doctor.core.stack_dumps.threads import dumped_frame, dumped_thread
from doctor.monitor.telemetry.stacks.stack_files import stack_in

PORT = 25999
"""Default port of the server."""
SECONDS = 5.0
"""Timeout of one page."""
LARGEST = 64 << 20
"""Maximum bytes of a page: a flight recorder of 2000 entries takes 1 MB a rank."""
_RANK = re.compile(r"<h2>Rank (\d{1,7}): [^<\n]{0,300}</h2>\s{0,100}<pre>")


class ServerAddress(NamedTuple):
    """Host and port of a debug server."""

    host: str
    port: int = PORT


class RankReport(NamedTuple):
    """What the server reports of a rank."""

    threads: tuple[StackThread, ...] = ()
    recorder: RecorderFacts | None = None


def server_address(text: str) -> ServerAddress:
    """Return the address in ``HOST``, ``HOST:PORT`` or ``http://HOST:PORT``.

    Raises:
        UnusableError: it is none of these.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username is not None:
        raise UnusableError("Expected the address of the debug server as HOST:PORT, for example node1:25999.")
    return ServerAddress(host, port or PORT)


def ask_debug_server(
    processes: Sequence[AttachedProcess], address: str, seconds: float = SECONDS
) -> tuple[tuple[AttachedProcess, ...], tuple[str, ...]]:
    """Return ``processes`` with what the server at ``address`` reports, and sentences for the user if it reports
    nothing. It is not asked if the address is empty.

    Raises:
        UnusableError: it is not an address.
    """
    if not address:
        return tuple(processes), ()
    try:
        reports = read_debug_server(server_address(address), seconds)
    except OSError as error:
        return tuple(processes), (f"the debug server {address} does not respond ({error.strerror or error})",)
    missing = () if reports else (f"the debug server {address} reports no rank",)
    return with_reports(processes, reports), missing


def read_debug_server(address: ServerAddress, seconds: float = SECONDS) -> Mapping[int, RankReport]:
    """Return what the server reports of each rank; nothing of ranks that do not respond to it.

    Raises:
        OSError: the server does not respond.
    """
    until = time.monotonic() + seconds
    stacks = _texts_of(_page(address, "/stacks", until))
    reports = {rank: RankReport(_threads(text)) for rank, text in stacks.items()}
    with contextlib.suppress(OSError):
        for rank, text in _texts_of(_page(address, "/fr_trace_json", until)).items():
            reports[rank] = reports.get(rank, RankReport())._replace(recorder=_recorder(text))
    return reports


def with_reports(
    processes: Sequence[AttachedProcess], reports: Mapping[int, RankReport]
) -> tuple[AttachedProcess, ...]:
    """Return ``processes`` with the flight recorders of their ranks, and with stacks for those that have none."""
    return tuple(
        _with_report(one, reports[one.rank]) if one.rank is not None and one.rank in reports else one
        for one in processes
    )


def _with_report(process: AttachedProcess, report: RankReport) -> AttachedProcess:
    process = msgspec.structs.replace(process, recorder=process.recorder or report.recorder)
    if process.ended or not report.threads or any(one.threads for one in process.samples):
        return process
    *others, last = process.samples or (ProcessSample(time.time()),)
    samples = (*others, msgspec.structs.replace(last, threads=report.threads))
    return msgspec.structs.replace(process, samples=samples, stack_source="debug-server", refused="", remedy="")


def _page(address: ServerAddress, path: str, until: float) -> str:
    """Return a page of the server; redirections are not followed.

    Raises:
        OSError: it cannot be read before ``until``.
    """
    import http.client  # takes longer to import than the rest of this module

    connection = http.client.HTTPConnection(*address, timeout=max(0.1, until - time.monotonic()))
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        parts: list[bytes] = []
        size = 0
        while part := response.read1(1 << 16):
            parts.append(part)
            size += len(part)
            if size > LARGEST or time.monotonic() > until:
                raise TimeoutError(f"{path} of the debug server did not end")
    except http.client.HTTPException as error:
        raise ConnectionError(f"not an HTTP server: {type(error).__name__}") from None
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise ConnectionError(f"{path} of the debug server: HTTP status {response.status}")
    return b"".join(parts).decode("utf-8", "replace")


def _texts_of(page: str) -> dict[int, str]:
    """Return the text of each rank in a page."""
    found: dict[int, str] = {}
    for head in _RANK.finditer(page):
        end = page.find("</pre>", head.end())
        if end >= 0:
            found.setdefault(int(head[1]), html.unescape(page[head.end() : end]))
    return found


def _threads(text: str) -> tuple[StackThread, ...]:
    """Return the main thread, which faulthandler prints last."""
    frames = [dumped_frame(one.file, one.line, one.function) for one in stack_in(text)]
    return (dumped_thread(frames, is_main=True),) if frames else ()


def _recorder(text: str) -> RecorderFacts | None:
    """Return the content of a dump; ``None`` if it has neither groups nor calls."""
    try:
        dump = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = mask_record(parse_recorder(dump)) if isinstance(dump, dict) else RecorderFacts()
    return found if found.groups or found.collectives else None
