"""Main program of :class:`doctor.probes.runtime.torch_child.TorchChild`: one request and one reply per line, until
stdin ends.

Output of torch, NCCL and drivers goes to stderr, so that stdout carries replies alone.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys

import msgspec

from doctor.core.background import start_daemon
from doctor.core.decoding import prepared
from doctor.probes.runtime.torch_child import WorkRefused, WorkReply, WorkRequest

WORKS = {
    "load": "doctor.probes.runtime.torch_startup",
    "device": "doctor.probes.devices.device_worker",
    "group": "doctor.probes.collectives.process_group",
    "estimate": "doctor.estimate.tracer_main",
}
"""Modules by the name of their work; each has a ``work(argument: bytes) -> object``, which may raise
:class:`WorkRefused`. The argument is JSON."""


def main() -> None:
    """Reply until stdin ends; the process exits then, even during a call."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            orders.put(line)
        os._exit(0)

    start_daemon("doctor-orders", listen)
    while True:
        answers.write(msgspec.json.encode(_answer(orders.get())) + b"\n")
        answers.flush()


def _answer(line: bytes) -> WorkReply:
    """Return the result; errors of torch and drivers are results too, because the probe looks for them."""
    order = msgspec.json.decode(line, type=prepared(WorkRequest))
    try:
        result = importlib.import_module(WORKS[order.work]).work(bytes(order.argument))
    except WorkRefused as error:
        return WorkReply(error=str(error) or "refused")
    except Exception as error:  # noqa: BLE001 - the collector loop of this process
        words = str(error).strip().splitlines()
        return WorkReply(error=f"{type(error).__name__}: {words[0] if words else 'no message'}"[:500])
    return WorkReply(msgspec.Raw(msgspec.json.encode(result)))
