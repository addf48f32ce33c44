"""Records a healthy job for tests/data/captures: ``python -m tests.faults.record`` from the top of the repository.

Eight ranks of torchrun on a host with eight H100 capture themselves (``--redact``) on the stage. What the stage can't
make is put right afterwards: processors and memory of such a host in place of those of the machine that records, a
kernel log without that machine's events, and plain places for the environment in place of temporary ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from doctor.core.capture import encode_document, merge_captures, read_capture, to_document
from tests.faults.job_scenes import machine
from tests.faults.scenes import CUDA, crew, process
from tests.faults.stage import ROOT, Play, capture
from tests.lab.nvml import build_library

TARGET = ROOT / "tests/data/captures/eight_h100_healthy.json"
PROCESSORS = 16


def record() -> dict[str, Any]:
    """The job as one document."""
    ranks = crew(8, like=process(gpus=("eight_h100",), packages=CUDA))
    with tempfile.TemporaryDirectory() as name:
        files = sorted(capture(Play((machine(0, *ranks),)), Path(name), "--redact").iterdir())
        document = to_document(merge_captures([read_capture(path) for path in files]))
    places = {
        name: "/tmp/job",
        str(build_library().parent): "/usr/lib/lab",
        str(ROOT): "/opt/rankdoctor",
        sys.prefix: "/opt/venv",
        sys.base_prefix: "/usr",
    }
    text = json.dumps(document)
    for place, plain in places.items():
        text = text.replace(place, plain)
    return _with_processors(json.loads(text))


def _with_processors(document: dict[str, Any]) -> dict[str, Any]:
    for host in document["hosts"]:
        host["facts"].get("kernel-log", {})["events"] = []
        host["facts"]["host"].update(cpu_count=PROCESSORS, ram_total=2 << 40, ram_available=19 << 36)
    for rank in document["ranks"]:
        rank["facts"]["process"]["cpus_allowed"] = list(range(PROCESSORS))
    return document


if __name__ == "__main__":
    TARGET.write_bytes(encode_document(record()))
