"""The readers of messages in PyTorch's source code, on small programs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from message_sources import python_calls, torch_calls
from message_sources.components import LONGEST, beginnings, exceptions

CPP = """
// LOG(ERROR) << "a comment";
LOG(ERROR) << logPrefix() << "Failed to reach " << host << " in " << ms << " ms";
LOG(INFO) << "all is well";
C10D_WARNING("recvValue failed on {}: {}", socket.repr(), e.what());
TORCH_CHECK(rank < size, "rank ", rank, " is outside the group of ", size);
TORCH_CHECK_WITH(DistBackendError, ok, "the backend ", name, " can't start");
C10_THROW_ERROR(DistStoreError, "the store is gone");
throw std::runtime_error("Unconvertible NCCL type " + name);
std::string text = c10::str(prefix, "Operation ", op, " timed out");
std::string name = c10::str("gloo:", device);
workInfo = c10::str("WorkNCCL(", "Timeout(ms)=", timeout, ")");
"""
PYTHON = """
import logging, warnings
logger = logging.getLogger(__name__)
def f(size):
    logger.warning("port %s is in use, attempt %d", port, 3)
    logger.info("all is well")
    warnings.warn("this argument is old")
    raise ValueError(f"world size {size} is not divisible by the group size")
"""


def test_what_cpp_logs():
    assert list(torch_calls.logged(CPP)) == [
        "%sFailed to reach %s in %s ms",
        "recvValue failed on %s: %s",
        "%sOperation %s timed out",
    ]


def test_what_cpp_throws():
    assert list(torch_calls.raised(CPP)) == [
        "rank %s is outside the group of %s",
        "the backend %s can't start",
        "the store is gone",
        "Unconvertible NCCL type %s",
        "%sOperation %s timed out",
    ]


def test_what_python_logs_and_raises():
    assert list(torch_calls.logged(PYTHON)) == ["port %s is in use, attempt %d"]
    assert list(torch_calls.raised(PYTHON)) == ["world size %s is not divisible by the group size"]
    assert list(python_calls.raised("assert group, 'no group was made'")) == ["no group was made"]


def test_texts_that_any_program_may_raise_are_left_out():
    found = ["Expected %s, got %s", "Tensors must be on distinct GPU devices", "%s is not a %s of %s, not in %s"]
    assert list(exceptions(lambda source: found)("")) == ["Tensors must be on distinct GPU devices"]


def test_a_long_text_is_cut_between_words():
    (cut,) = beginnings(lambda source: ["word " * 100])("")
    assert LONGEST <= len(cut) < LONGEST + 5
    assert set(cut.split()) == {"word"}
