"""Work that has nothing to do with the job, on hosts of the lab."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.lab.hosts import LabHost
from tests.lab.needs import require_tools

_SPIN = "while :; do :; done"
_WAIT = "kill -STOP $$; "


@contextmanager
def busy_processor(
    host: LabHost, processor: int, spinners: int = 3, *, waiting: bool = False
) -> Iterator[Callable[[], None]]:
    """As long as this context lasts, so many processes of ``host`` spin on ``processor`` and on no other; if they are
    ``waiting``, from when what this yields is called.

    Processors are those of the machine, and all hosts share them: a rank is hit as one of a real host would be when it
    is bound to this one (``taskset``), and less when it is free to go elsewhere."""
    require_tools("taskset")
    script = f"echo ready; {_WAIT if waiting else ''}{_SPIN}"
    with ExitStack() as stack:
        for _ in range(spinners):
            stack.enter_context(host.serving(["taskset", "--cpu-list", str(processor), "bash", "-c", script]))
        yield lambda: host.signal(signal.SIGCONT, _SPIN)
