"""``doctor estimate`` on configurations: what it hands to the tracer, and when it refuses."""

import json

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.errors import UnusableError
from doctor.estimate import tracer_client
from doctor.estimate.data_model import LoaderUse, MemoryBreakdown, TracedStep

CONFIG = {"model_type": "llama", "num_hidden_layers": 2}
GIB = 1 << 30


class Tracer:
    """A step of as many GiB as the batch has samples; keeps what it was asked for."""

    asked: tuple = ()
    loading = LoaderUse()
    loading_seconds = 2.0

    def __init__(self, source, **_):
        type(self).asked = (source, [])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self, plan):
        self.asked[1].append(plan)
        return TracedStep(
            plan=plan,
            parts=MemoryBreakdown(activations=(plan.batch_size or 1) * GIB),
            moment="backward",
            reserved=0,
            batch_size=plan.batch_size or 1,
            parameter_count=10,
            parameter_bytes=40,
            trainable_count=10,
            batch_bytes=8,
        )


@pytest.fixture
def estimate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracer_client, "TracerClient", Tracer)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: fp8\n")

    def run(*arguments):
        done = CliRunner().invoke(app, ["estimate", *arguments, "--isolated", "--format", "json"])
        return done if done.exit_code else json.loads(done.stdout)["estimate"]

    return run


def test_the_peak_alone_takes_one_trace(estimate):
    options = ("--lora", "8", "--quantize", "4bit", "--seq-len", "32", "--batch-size", "3", "--optimizer", "adamw8bit")
    answer = estimate("config.json", *options, "--peak-only", "--device-memory", "80GiB")
    recipe, (plan,) = Tracer.asked
    assert (recipe.lora.rank, recipe.quantization, recipe.sequence_length) == (8, "4bit", 32)
    assert (plan.batch_size, plan.optimizer, plan.precision, plan.outputs) == (3, "adamw8bit", "bf16-mixed", "released")
    assert (answer["searched"], answer["largest_batch"], answer["ways"], answer["fits"]) == (None, None, [], True)


def test_a_training_configuration_sets_what_no_option_says(estimate):
    answer = estimate(".", "--training-config", "accelerate.yaml", "--peak-only")
    _, (plan,) = Tracer.asked
    assert (plan.strategy, plan.devices, plan.precision, plan.batch_size) == ("ddp", 4, "bf16-mixed", 1)
    assert "float8" in answer["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("config.json", "--quantize", "4bit"), "add --lora RANK"),
        (("config.json", "--measure"), "needs MODULE:FACTORY"),
        (("train:make", "--seq-len", "8"), "apply to a model's configuration"),
        (("hf:org/none",), "nothing is downloaded"),
        (("no.json",), "cannot read"),
        (("accelerate.yaml",), "does not name a model"),
        (("neither",), "config.json, FOLDER or hf:ORG/NAME"),
    ],
)
def test_what_can_t_be_estimated_is_said(estimate, arguments, words):
    done = estimate(*arguments)
    assert isinstance(done.exception, UnusableError) or done.exit_code == 2
    assert words in f"{done.exception} {' '.join(done.stderr.split())}"
