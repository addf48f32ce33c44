"""Facts of a process in other surroundings: behind a shell prefix that sets limits, users, namespaces or variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from doctor.collectors.runner import Outcome, decode_outcome
from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]

_CODE = """
import sys
from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts, encode_outcome
keys, directories = sys.argv[1].split(","), [pair.split("=") for pair in sys.argv[2:]]
facts = collect_facts(keys, Machine(directories=tuple(map(tuple, directories))))
for key, outcome in facts.items():
    print(key, encode_outcome(outcome).hex())
"""


def facts_elsewhere(
    *keys: str,
    before: str = "true",
    wrap: str = "",
    directories: Mapping[str, Path | str] | None = None,
    **environ: str,
) -> dict[str, Outcome]:
    """The sections ``keys`` of a Python that starts after the shell line ``before`` and inside the command ``wrap``."""
    named = [f"{role}={path}" for role, path in (directories or {}).items()]
    command = f'{before} && exec {wrap} "$0" -B -c "$@"'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, _CODE, ",".join(keys), *named],
        env={**os.environ, "PYTHONPATH": f"{environ.pop('PYTHONPATH', '')}:{ROOT}".lstrip(":"), **environ},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    lines = (line.split(" ") for line in done.stdout.splitlines())
    return {key: decode_outcome(key, bytes.fromhex(data)) for key, data in lines}
