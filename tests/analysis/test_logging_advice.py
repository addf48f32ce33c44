"""What to switch on for the next run, by the torch that was seen."""

import pytest

from doctor.analysis.logs.logging_advice import recorder_assignments
from doctor.facts import Package, SoftwareFacts
from doctor.testing import healthy


def with_torch(version):
    return healthy().alter(SoftwareFacts, packages=(Package("torch", version),)).job()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (None, "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000"),
        (with_torch("2.5.1+cu124"), "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"),
        (with_torch("2.10.0"), "TORCH_FR_BUFFER_SIZE=2000"),
    ],
)
def test_the_variable_is_that_of_the_release(job, words):
    assert recorder_assignments(job) == words
