"""A RAS service that speaks as NCCL's does (``rasClientEventLoop`` in src/ras/client_support.cc), for tests."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from doctor.attach.sources.nccl_ras import RasAddress

Reports = Callable[[int, str], bytes]
"""The report for the client of this number, in this format (``text``, ``json``)."""


def json_report(
    counts: Sequence[int], *, pids: Sequence[int], errors: Mapping[int, int] = {}, lost: Mapping[int, bool] = {}
) -> str:
    """A report of one communicator of all ranks, as ``rasDumpCommsToJSON`` writes it.

    ``counts``: launches of AllReduce by rank; ``errors``: codes of asynchronous errors; ``lost``: ranks that do not
    report, and whether they are considered dead."""

    def place(rank: int) -> dict[str, Any]:
        return {"rank": rank, "host": "10.0.0.1", "pid": pids[rank], "cuda_dev": rank, "nvml_dev": rank}

    ranks = [
        {
            **place(rank),
            "status": {
                "init_state": 0,
                "async_error": errors.get(rank, 0),
                "finalize_called": False,
                "destroy_flag": False,
                "abort_flag": False,
            },
            "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": count},
        }
        for rank, count in enumerate(counts)
        if rank not in lost
    ]
    missing = [
        {**place(rank), "status": {"unresponsive": True, "considered_dead": dead}} for rank, dead in lost.items()
    ]
    communicator = {
        "hash": "0xae94423cfbb2ef4a",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(counts),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing),
        "ranks": ranks,
        "missing_ranks": missing,
    }
    return json.dumps(
        {
            "nccl_version": "2.29.1",
            "cuda_runtime_version": 13000,
            "cuda_driver_version": 13000,
            "timestamp": "2026-03-19 13:06:53",
            "communicators_count": 1,
            "communicators": [communicator],
            "ras": {"collection_time_sec": 0.002, "timeouts_count": 0},
        },
        indent=2,
    )


class _Client(socketserver.StreamRequestHandler):
    server: RasServer

    def handle(self) -> None:
        chosen = "text"
        for line in self.rfile:
            command = line.decode().rstrip("\r\n")
            self.server.commands.append(command)
            word = command.lower()
            if word.startswith("client protocol "):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif word.startswith("timeout "):
                self.wfile.write(b"OK\n" if word[8:].isdigit() else b"ERROR: Invalid timeout value\n")
            elif word == "set format json" and self.server.has_json:
                chosen = "json"
                self.wfile.write(b"OK\n")
            elif word in ("status", "verbose status"):
                self.server.asked += 1
                self.wfile.write(self.server.report(self.server.asked, chosen))
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {command}\n".encode())


class RasServer(socketserver.ThreadingTCPServer):
    """``has_json``: NCCL 2.28.7 or later."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, report: Reports, *, has_json: bool) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Client)
        self.report, self.has_json = report, has_json
        self.commands: list[str] = []
        self.asked = 0

    @property
    def address(self) -> RasAddress:
        """Where it listens."""
        return RasAddress(*self.server_address[:2])  # type: ignore[arg-type]


@contextmanager
def ras_server(report: str | Reports, host: str = "127.0.0.1", *, has_json: bool = True) -> Iterator[RasServer]:
    """A service with the same report for every client, or what a function returns."""
    reports: Reports = (lambda *_: report.encode()) if isinstance(report, str) else report
    with RasServer(host, reports, has_json=has_json) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()
