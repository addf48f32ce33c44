"""The stacks of data workers that this rank waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from doctor.core.facts import ChildProcess, Frame, ProgressFacts
from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.telemetry.rank_telemetry import Sections
from doctor.monitor.telemetry.stacks.blocking_call import blocking_call
from doctor.monitor.watchdog.local_peers.stack_dump import STACK_DUMPER, stack_file

MOST_WORKERS = 4
"""Workers that are asked, a second at most each."""
_LOADER = "torch/utils/data/dataloader.py"
_WORKER = "pt_data_worker"
"""The name that torch gives its data workers (torch/utils/data/_utils/worker.py)."""


def with_worker_stacks(sections: Sections, folder: OwnFolder, rank: int) -> Sections:
    """Return the position of this rank with the stacks of its data workers, if it waits for one of them."""
    progress = sections.get(ProgressFacts.key)
    if not isinstance(progress, ProgressFacts) or not _waits_for_worker(progress.stack):
        return sections
    asked = [one.pid for one in progress.children if one.name.startswith(_WORKER)][:MOST_WORKERS]
    children = tuple(_asked(one, folder, rank) if one.pid in asked else one for one in progress.children)
    return {**sections, ProgressFacts.key: msgspec.structs.replace(progress, children=children)}


def _waits_for_worker(stack: Sequence[Frame]) -> bool:
    own = next((place for place, frame in enumerate(stack) if frame.user), len(stack))
    return any(frame.file.endswith(_LOADER) for frame in stack[:own])


def _asked(child: ChildProcess, folder: OwnFolder, rank: int) -> ChildProcess:
    stack: tuple[Frame, ...] = ()
    with contextlib.suppress(OSError):
        stack = STACK_DUMPER.stack_of_fork(child.pid, stack_file(folder, rank))
    return msgspec.structs.replace(child, stack=stack, waits=blocking_call(child.pid, stack, child.pid))
