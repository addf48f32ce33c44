"""``doctor estimate`` as people run it: a process, its exit code, its two streams."""

import json
import os
import re
import subprocess
import sys

import msgspec
import pytest

from doctor.core.capture import encode_document, to_document
from doctor.core.facts import DeviceSpeed, DeviceSpeedFacts
from doctor.core.report_summary import summarize
from doctor.testing import healthy
from tests.lab.sample import long_only

OTHER_FACTORIES = long_only("test_factory.py loads such factories without the command")
CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
GIB = 1 << 30

SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(3))

    def forward(self, batch):
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return batch.square().mean()

def make():
    return Model(), torch.zeros(64, 2048)
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def estimate(*arguments, cwd, code=None):
    command = [sys.executable, "-m", "doctor", "estimate", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=110)
    assert "Traceback" not in done.stderr
    if code is not None:
        assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "missing argument"),
        (("train",), "expected MODULE:FACTORY (for example train.py:make)"),
        (("train:make", "--devices", "0"), "0 is not in the range"),
        (("script.py",), "script.py is a script, which estimate does not run: name a function without arguments"),
        (("script.py", "config/small.py"), "(script.py:make)"),
        (("script.py", "--module", "llama3", "--config", "llama3_8b"), "script.py is a script"),
        (("run_train.sh",), "run_train.sh is a script"),
        (("script.py:make",), "script.py: no such file"),
        (("train:make", "--device", "H10"), "similar: H100 80GB"),
        (("train:make", "--device", "A100"), "A100 80GB, A100 40GB"),
        (("train:make", "--device-memory", "80"), "'80' is not a valid memory size"),
        (("train:make", "--host-memory", "much"), "'much' is not a valid memory size"),
        (("train:make", "--device", "H200", "--device-memory", "1GiB"), "give only one"),
        (("train:make", "--like", "nothing.json"), "cannot read nothing.json"),
        (("train:make", "--context-from", "nothing.json"), "cannot read nothing.json"),
        (("train:make", "--strategy", "magic"), "is not one of"),
        (("train:make", "--select", "XYZ999"), "XYZ999"),
    ],
)
def test_bad_usage_is_one_sentence(here, arguments, words):
    done = estimate(*arguments, cwd=here, code=2)
    assert words in done.stderr
    assert done.stdout == ""


def test_the_parent_never_imports_torch(here):
    (here / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = estimate("train:make", "--help", cwd=here, code=0)
    assert "MODULE:FACTORY" in done.stdout
    modules = "doctor.cli.estimate, doctor.estimate.estimator, doctor.estimate.evaluation"
    command = f"import sys, {modules}, doctor.report.estimate.terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], cwd=here, check=True)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("broken:make", "broken"),
        pytest.param("nowhere:make", "nowhere", marks=OTHER_FACTORIES),
        pytest.param("train:nothing", "nothing", marks=OTHER_FACTORIES),
    ],
)
def test_a_factory_that_can_not_be_used_is_one_sentence(here, factory, words):
    (here / "broken.py").write_text("1 / 0\n")
    done = estimate(factory, cwd=here, code=2)
    assert words in the_sentence(done)


def the_sentence(done):
    """The one line on stderr besides those of progress."""
    (line,) = [each for each in done.stderr.splitlines() if not re.fullmatch(r"doctor: .* … \d+ s", each)]
    return line


def test_the_answer_is_alone_on_stdout_as_json(here):
    done = estimate("train:make", "--device-memory", "4GiB", "--format", "json", cwd=here, code=0)
    document = json.loads(done.stdout)
    answer = document["estimate"]
    assert (document["schema"], document["job"], document["verdict"]) == (1, None, "pass")
    assert [result["id"] for result in document["results"]] == ["GPU007", "MEM005", "MEM008"]
    assert answer["parts"]["parameters"] == pytest.approx(3 * 4 * 2048 * 2049, rel=0.01)
    assert answer["batch_size"] == 64
    assert answer["largest_batch"] > 64
    assert answer["allocated_bytes"] <= answer["reserved_bytes"] < answer["peak_bytes"] < answer["high_bytes"]
    assert {way["name"] for way in answer["ways"]} >= {"adafactor"}


def test_what_does_not_fit_on_captured_devices_ends_with_1_and_names_can_be_hidden(here):
    sketch = healthy(1, 2).gpu(1, memory_used=79 * GIB, memory_free=GIB)
    (here / "capture.json").write_bytes(encode_document(to_document(sketch.job())))
    options = ("--like", "capture.json", "--devices", "2", "--redact")
    done = estimate("train.py:make", *options, cwd=here, code=1)
    assert "It does not fit" in done.stdout
    assert "node0" not in done.stdout
    assert "MEM005" in done.stdout
    assert "GPU 1 has the least free memory" in " ".join(done.stdout.split())


def measured_job(name="NVIDIA H100 80GB HBM3", **changes):
    def speed(rank):
        return DeviceSpeed(f"cuda:{rank}", name, "bfloat16", 8192, 0.0015, **{"context": (700 + rank) << 20, **changes})

    sketch = healthy(1, 2)
    for rank in (0, 1):
        sketch = sketch.put(DeviceSpeedFacts(samples=(speed(rank),)), ranks=(rank,))
    return sketch.job()


def write_report(path, job):
    path.write_bytes(msgspec.json.encode(summarize(job, (), started=0.0)))


def test_the_context_of_a_report_or_a_capture_replaces_that_of_the_table(here):
    job = measured_job()
    write_report(here / "report.json", job)
    (here / "capture.json").write_bytes(encode_document(to_document(job)))

    def context(*arguments):
        options = ("--device", "H100 80GB", "--peak-only", "--format", "json", *arguments)
        answer = json.loads(estimate("train.py:make", *options, cwd=here, code=0).stdout)["estimate"]
        return answer["parts"]["context"], str(answer["notes"])

    table, _ = context()
    for name in ("report.json", "capture.json"):
        size, notes = context("--context-from", name)
        assert size - table == (701 - 520) << 20
        assert f"measured on NVIDIA H100 80GB HBM3: 701 MiB ({name})" in notes


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (healthy(1, 2).job(), "report.json holds no CUDA context: doctor check --probe full measures it"),
        (measured_job(context=None), "report.json holds no CUDA context"),
        (measured_job(context=-5), "report.json holds no CUDA context"),
        (measured_job(context=1 << 50), "report.json holds no CUDA context"),
        (measured_job("Tesla T4"), "report.json holds a CUDA context of Tesla T4, not of H100 80GB"),
    ],
    ids=["no probe", "unknown", "negative", "too large", "other GPU"],
)
def test_a_report_without_a_context_to_use_is_one_sentence(here, job, words):
    write_report(here / "report.json", job)
    done = estimate("train.py:make", "--device", "H100 80GB", "--context-from", "report.json", cwd=here, code=2)
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("context", [{"device": "H100"}, {"device": "H100", "bytes": -1}, {"device": 1, "bytes": 1}, 7])
def test_a_malformed_report_is_one_sentence(here, context):
    write_report(here / "report.json", measured_job())
    document = json.loads((here / "report.json").read_text())
    (here / "report.json").write_text(json.dumps({**document, "contexts": [context]}))
    done = estimate("train.py:make", "--device", "H100 80GB", "--context-from", "report.json", cwd=here, code=2)
    assert "cannot read report.json: not a valid rankdoctor report" in done.stderr
    assert done.stdout == ""
