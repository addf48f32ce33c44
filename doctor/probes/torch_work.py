"""The other end of :class:`doctor.probes.bench.TorchChild`: reads an order a line, answers a line, until stdin ends.

What torch, NCCL and drivers print goes to stderr, so that stdout carries answers alone.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
from typing import IO

import msgspec

from doctor.probes.bench import Answer, Order, Refused

WORKS = {
    "load": "doctor.probes.loading",
    "device": "doctor.probes.device_work",
    "group": "doctor.probes.group_work",
    "estimate": "doctor.estimate.work",
}
"""Modules by the name of their work; each has a ``work(argument: bytes) -> object``, which may raise :class:`Refused`.
The argument is JSON."""


def main() -> None:
    """Answer until there is nobody to answer: then this process ends, whatever it is doing."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    while True:
        _say(_answer(orders.get()), answers)


def _listen(orders: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        orders.put(line)
    os._exit(0)


def _say(answer: Answer, answers: IO[bytes]) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


def _answer(line: bytes) -> Answer:
    """Errors of torch and of drivers are answers too: they are what is looked for."""
    order = msgspec.json.decode(line, type=Order)
    try:
        result = importlib.import_module(WORKS[order.work]).work(bytes(order.argument))
    except Refused as error:
        return Answer(error=str(error) or "refused")
    except Exception as error:  # noqa: BLE001 - the collector loop of this process
        words = str(error).strip().splitlines()
        return Answer(error=f"{type(error).__name__}: {words[0] if words else 'no words'}"[:500])
    return Answer(msgspec.Raw(msgspec.json.encode(result)))
