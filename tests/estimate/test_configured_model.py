"""Models built from configurations: their weights, adapters and states by arithmetic, and what is refused."""

import json
import sys
from importlib.util import find_spec

import pytest

from doctor.estimate.data_model import LoraAdapters, ModelRecipe, TrainingPlan
from doctor.estimate.tracer_main import LoadModel, TracePlan, TracerReply
from doctor.probes.runtime.torch_child import TorchChild
from tests.lab.needs import clean_environ
from tests.lab.sample import long_only

MORE = long_only("a case of the same kind runs")
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="Transformers is not there")

WIDTH, LAYERS, HIDDEN, WORDS = 256, 2, 512, 1000
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": HIDDEN,
    "vocab_size": WORDS,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "attn_implementation": "kernels-community/flash-attn3",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
}
LINEAR = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)
REST = WORDS * WIDTH + (2 * LAYERS + 1) * WIDTH
"""Embeddings, which are tied to the output layer, and norms."""
PLAN = TrainingPlan(optimizer="adamw", outputs="released")
LORA = LoraAdapters(rank=8)
ADAPTERS = LAYERS * 2 * 8 * 2 * WIDTH
"""Parameters of adapters on two square layers of each block."""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    made = TorchChild(clean_environ(home), {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    yield made
    made.close()


@pytest.fixture
def load(child):
    def run(config=LLAMA, **recipe):
        made = ModelRecipe(name="config.json", config=json.dumps(config), **recipe)
        return child.ask("estimate", LoadModel(made), TracerReply, 60.0)

    return run


@pytest.fixture
def step(load, child):
    def run(plan=PLAN, config=LLAMA, **recipe):
        assert load(config, **recipe).unusable == ""
        reply = child.ask("estimate", TracePlan(plan, 0), TracerReply, 60.0)
        return reply.unusable or reply.traced

    return run


def test_a_configuration_has_the_weights_of_its_model_and_a_batch_of_tokens(step):
    traced = step()
    assert traced.parameter_count == traced.trainable_count == LINEAR + REST
    assert traced.parameter_bytes == 4 * (LINEAR + REST)
    assert traced.batch_bytes == 3 * 64 * 8
    assert "each sample has 64 tokens (--seq-len)" in traced.notes
    assert traced.bound == ""
    longer = step(sequence_length=128)
    assert longer.batch_bytes == 2 * traced.batch_bytes
    assert "128 tokens are more than the model's 64 positions" in longer.notes


def test_adapters_alone_have_gradients_and_states(step):
    traced = step(lora=LORA, dtype="bfloat16")
    assert traced.trainable_count == ADAPTERS
    assert traced.parameter_bytes == 2 * (LINEAR + REST) + 4 * ADAPTERS
    assert traced.parts.optimizer == pytest.approx(8 * ADAPTERS, rel=0.1)
    assert any("q_proj, v_proj, peft's default: 4 layers" in note for note in traced.notes)
    assert step(lora=LoraAdapters(rank=8, targets=("all-linear",))).trainable_count > 3 * ADAPTERS


@pytest.mark.parametrize(
    ("kind", "double", "scales"),
    [
        pytest.param("4bit", False, LINEAR / 64 * 4, marks=MORE),
        ("4bit", True, LINEAR / 64),
        pytest.param("8bit", True, 0, marks=MORE),
    ],
)
def test_quantized_weights_are_packed_with_their_scales(step, kind, double, scales):
    recipe = {"quantization": kind, "double_quantization": double, "dtype": "bfloat16", "lora": LORA}
    traced = step(**recipe)
    assert traced.parameter_count == LINEAR + REST + ADAPTERS
    packed = LINEAR // 2 if kind == "4bit" else LINEAR
    assert traced.parameter_bytes == packed + 4 * REST + 4 * ADAPTERS
    assert traced.parts.buffers == pytest.approx(scales, abs=50_000)


@pytest.mark.parametrize(
    ("version", "notes"), [("4.57.6", 0), ("5.0.0", 1), ("5.3.0.dev0", 1), ("5.4.0", 0), ("6.0", 0)]
)
def test_a_release_that_loads_in_threads_is_named(version, notes):
    from doctor.estimate.tracing.configured_model import _loading

    found = list(_loading(version, 3 << 30))
    assert len(found) == notes
    assert all(f"Transformers {version} loads weights in threads" in note and "3 GiB" in note for note in found)


def test_sharded_quantized_weights_are_outside(step, load):
    plan = TrainingPlan(strategy="fsdp2", devices=2)
    recipe = {"quantization": "4bit", "lora": LORA, "dtype": "bfloat16", "upcasts": False}
    assert "fsdp2 with quantized weights is not supported" in step(plan, **recipe)
    assert load(**recipe).loading.parameter_bytes == LINEAR // 2 + 2 * REST + 4 * ADAPTERS


def test_adapters_of_a_sharded_model_stay_in_32_bits(step):
    plan = TrainingPlan(strategy="fsdp2", devices=2, precision="bf16-mixed", optimizer="adamw")
    traced = step(plan, lora=LORA, dtype="bfloat16")
    assert traced.parts.optimizer == pytest.approx(8 * ADAPTERS / 2, rel=0.2)


PAGED = 4 * WIDTH * WIDTH * LAYERS
"""Parameters whose states a paged optimizer leaves on the device, because they are few."""


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        pytest.param("adamw_torch_fused", 8 * (LINEAR + REST), marks=MORE),
        ("adamw8bit", 2 * (1 + 4 / 256) * (LINEAR + REST)),
        pytest.param("adamw_bnb_8bit", 2 * (1 + 4 / 256) * (LINEAR + REST), marks=MORE),
        pytest.param("lion_8bit", (1 + 4 / 256) * (LINEAR + REST), marks=MORE),
        ("paged_adamw_32bit", 8 * PAGED),
    ],
)
def test_states_of_optimizers_by_either_name(step, optimizer, states):
    traced = step(TrainingPlan(optimizer=optimizer))
    assert traced.parts.optimizer == pytest.approx(states, abs=40_000)
    assert any("unified memory" in note for note in traced.notes) is optimizer.startswith("paged")


BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64}
BERT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
VIT = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT |= {"intermediate_size": 128, "image_size": 32, "patch_size": 8}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "num_layers": 2, "vocab_size": 100}
T5 |= {"decoder_start_token_id": 0}


WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("config", "batch_bytes"),
    [
        pytest.param(BERT, 2 * 16 * 8 + 8, marks=MORE),
        (VIT, 3 * 32 * 32 * 4 + 8),
        pytest.param(T5, 3 * 16 * 8, marks=MORE),
    ],
)
def test_the_batch_is_that_of_the_task(step, config, batch_bytes):
    traced = step(config=config, sequence_length=16)
    assert traced.batch_bytes == batch_bytes
    assert traced.batch_size == 1


@pytest.mark.parametrize(
    ("config", "recipe", "words"),
    [
        (LLAMA | {"model_type": "llama99"}, {}, "has no model 'llama99'; code next to the configuration is never run"),
        (LLAMA | {"hidden_size": "wide"}, {}, "cannot build the model"),
        (LLAMA | {"num_attention_heads": 0}, {}, "cannot build the model"),
        (LLAMA | {"hidden_size": -8}, {}, "cannot build the model"),
        ({"model_type": "timesformer"}, {}, "give MODULE:FACTORY"),
        (WHISPER, {}, "cannot generate a batch for WhisperForConditionalGeneration"),
        (LLAMA, {"lora": LoraAdapters(rank=8, targets=("nothing",))}, "give --lora-targets"),
    ],
)
def test_what_can_t_be_built_is_one_sentence(load, config, recipe, words):
    said = load(config, **recipe).unusable
    assert words in said
    assert said.startswith("config.json: ")
    assert "\n" not in said


def test_without_transformers_the_extra_is_named(monkeypatch):
    pytest.importorskip("torch")
    from doctor.core.errors import UnusableError
    from doctor.estimate.tracing.configured_model import ConfiguredModel

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnusableError, match=r"pip install transformers"):
        ConfiguredModel(ModelRecipe(name="config.json", config=json.dumps(LLAMA)))
