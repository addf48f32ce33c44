"""The program of :mod:`tests.probes.survey` on each host: tell the facts, answer probes, and probe when told to.

Usage: ``python agent.py [SECONDS AHEAD]``. It speaks JSON, a line a message, on standard input and output.
"""

from __future__ import annotations

import json
import os
import sys
import time

import msgspec

from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts, encode_outcome
from doctor.probes.ablation.stage import WhyStage
from doctor.probes.bandwidth.stage import TransfersStage
from doctor.probes.base import ProbeContext
from doctor.probes.reachability.assignments import Assignment
from doctor.probes.reachability.light_probe import probe_light
from doctor.probes.responder.listener import Responder
from doctor.probes.runtime.deadline import ProbeDeadline

SECTIONS = ("launch", "environment", "master", "trainer", "nccl", "host", "interfaces", "gpus")
STAGES = {stage.name: stage for stage in (TransfersStage, WhyStage)}


def main(ahead: str = "0") -> None:
    """See the module."""

    def clock() -> float:
        return time.time() + float(ahead)

    facts = collect_facts(SECTIONS, Machine())
    responder = Responder(clock)
    tell(port=responder.port, word=responder.word, facts={key: encode_outcome(one).hex() for key, one in facts.items()})
    bench = ProbeContext(0, responder, Machine())
    for line in sys.stdin:
        task = json.loads(line)
        if "order" in task:
            began = time.monotonic()
            stage = STAGES[task.get("stage", "transfers")]()
            found = stage.take_part(bytes.fromhex(task["order"]), bench, ProbeDeadline(task["seconds"]))
            sections = {key: encode_outcome(one).hex() for key, one in found.sections.items()}
            tell(took=time.monotonic() - began, sections=sections, files=open_files())
            continue
        assignment = msgspec.msgpack.decode(bytes.fromhex(task["assignment"]), type=Assignment)
        began = time.monotonic()
        measured = probe_light(assignment, responder, clock=clock, **task["options"])
        tell(took=time.monotonic() - began, measured=msgspec.msgpack.encode(measured).hex(), files=open_files())
    responder.close()


def tell(**message: object) -> None:
    print(json.dumps(message), flush=True)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main(*sys.argv[1:])
