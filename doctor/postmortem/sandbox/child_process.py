"""Reading in a fresh interpreter: a few bytes of a pickle can make one ask for any memory, run for ever, or crash."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from doctor.core.errors import UnusableError
from doctor.core.process import abandon_child, start_python


def run_isolated(module: str, arguments: Sequence[str], deadline: float) -> tuple[bytes, int]:
    """What ``main`` of ``module`` writes to stdout when it is called with ``arguments``, and its exit code.

    Raises:
        OSError: no interpreter can be started.
        UnusableError: it takes longer than ``deadline`` seconds.
    """
    child = start_python(module, arguments)
    try:
        answer, _ = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        abandon_child(child)
        raise UnusableError(f"it could not be read within {deadline:.0f} seconds") from None
    return answer, child.returncode
