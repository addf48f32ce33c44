"""Whether a job went on after an error: restarts by torchrun."""

import pytest

from doctor.analysis.logs.root_event import LaterEvents
from doctor.testing import logged

AGENT = "E0102 03:04:05.678000 7 torch/distributed/elastic/multiprocessing/api.py:1002] "
FAILED = f"{AGENT}failed (exitcode: 1) local_rank: 1 (pid: 10) of binary: /usr/bin/python"
ERROR = "[rank1]: ValueError: x"
STEPS = tuple(f"2026-01-02 03:04:1{rank} [rank{rank}]: epoch 0 step 5/5 loss 0.1" for rank in (0, 1))
TABLE = (
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-01-02_03:04:20",
    "  host      : node0",
    "  rank      : 1 (local_rank: 1)",
    "  exitcode  : 1 (pid: 10)",
    "  error_file: <N/A>",
    "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
)


def survives(*lines):
    evidence = logged(*lines).job().evidence
    return LaterEvents(evidence).preceded_restart(evidence.of("python.exception")[0])


def test_a_later_attempt_that_completes():
    assert survives(ERROR, FAILED, *STEPS, "exit status 0")


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(STEPS, id="no end is seen"),
        pytest.param(("exit status 0",), id="the status of another command"),
        pytest.param((*TABLE, "exit status 0"), id="torchrun gave up, and tee did not fail"),
        pytest.param((*STEPS, *TABLE, "exit status 0"), id="the last attempt failed as well"),
        pytest.param((*STEPS, FAILED), id="the next attempt failed"),
    ],
)
def test_a_job_that_does_not_complete(later):
    assert not survives(ERROR, FAILED, *later)
