"""What is said when the time is up, by what the process had done until then."""

import sys

import msgspec
import pytest

from doctor.core.errors import UnusableError
from doctor.estimate import tracer_client
from doctor.estimate.data_model import LoaderUse, TrainingPlan
from doctor.estimate.tracer_client import TracerClient
from doctor.estimate.tracer_main import LoadFactory, TracePlan, TracerReply, work
from doctor.probes.runtime.torch_child import ChildLost

LOADING = LoaderUse(parameter_count=1_240_000_000, parameter_bytes=4 << 30)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A client whose process takes 4 s to load a model, and is lost in the step: after ``seconds``."""
    clock = [0.0]

    def made(seconds, lost_after):
        class Child:
            def __init__(self, *_):
                pass

            def ask(self, _work, request, _kind, _left):
                clock[0] += lost_after if isinstance(request, TracePlan) else 4.0
                if clock[0] > seconds or isinstance(request, TracePlan):
                    raise ChildLost("it was killed")
                return TracerReply(loading=LOADING)

            def close(self):
                pass

        monkeypatch.setattr(tracer_client, "TorchChild", Child)
        monkeypatch.setattr(tracer_client.time, "monotonic", lambda: clock[0])
        return TracerClient("train:make", directory=tmp_path, seconds=seconds)

    return made


def test_the_time_is_up_in_a_step(client):
    with pytest.raises(UnusableError) as error:
        client(10.0, lost_after=6.0).run(TrainingPlan())
    assert "not finished within 10 s (--timeout): loading the model took 4 s" in str(error.value)
    assert "(1,240 M parameters, 4 GiB), tracing a step 6 s" in str(error.value)


def test_the_time_is_up_before_a_model_is_there(client):
    with pytest.raises(UnusableError, match="the model was not loaded within 2 s"):
        client(2.0, lost_after=0.0)


def test_a_process_that_ends_early_is_not_late(client):
    with pytest.raises(UnusableError, match="train:make: it was killed"):
        client(60.0, lost_after=1.0).run(TrainingPlan())


def test_an_environment_without_torch_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    reply = work(msgspec.json.encode(LoadFactory("train:make", ".")))
    assert reply.unusable == "estimate needs torch, which is not installed: pip install torch"
