"""Jobs described by files: whose configuration is read, what of it, and what is said of one that can't be used."""

import json
import os
import time

import pytest

from doctor.core.errors import UnusableError
from doctor.estimate.configuration.files import MOST_JSON, MOST_YAML
from doctor.estimate.configuration.job import ModelOptions, job_source
from doctor.estimate.configuration.model import model_configuration
from doctor.estimate.configuration.training import read_training
from doctor.estimate.data_model import LoraAdapters

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "dtype": "bfloat16"}
COMMIT = "0123456789abcdef"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model, and a cache of the hub with another."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    folder = tmp_path / "hub" / "models--org--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def source(here, named, training=None, plan=None, **options):
    return job_source(named, training, ModelOptions(**options), plan or {}, here)


@pytest.mark.parametrize("name", ["model", "model/config.json", "hf:org/small"])
def test_a_model_is_a_file_a_folder_or_in_the_cache(here, name):
    recipe, plan, notes = source(here, name)
    assert (recipe.name, json.loads(recipe.config), recipe.lora, notes) == (name, LLAMA, None, ())
    assert plan == {"batch_size": 1, "optimizer": "adamw_torch_fused", "outputs": "released"}
    assert recipe.dtype == "float32"


def test_a_snapshot_of_another_revision_is_found(here):
    (here / "hub" / "models--org--small" / "refs" / "main").unlink()
    assert json.loads(model_configuration("hf:org/small", here).text) == LLAMA


def test_the_cache_is_where_the_hub_s_library_has_it(here, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(here))
    assert model_configuration("hf:org/small", here).dtype == "bfloat16"


def test_adapters_and_quantized_weights(here):
    recipe, plan, _ = source(here, "model", lora=8, quantization="4bit", sequence_length=512)
    assert (recipe.lora, recipe.quantization, recipe.sequence_length) == (LoraAdapters(rank=8), "4bit", 512)
    assert (plan["precision"], recipe.dtype, recipe.compute_dtype) == ("bf16-mixed", "bfloat16", "bfloat16")
    recipe, plan, _ = source(here, "model", lora=8, plan={"precision": "16-mixed", "batch_size": None})
    assert (plan["precision"], recipe.dtype, plan["batch_size"]) == ("16-mixed", "float16", 1)


@pytest.mark.parametrize(
    ("named", "options", "words"),
    [
        ("hf:org/other", {}, "is not in"),
        ("hf:../../etc", {}, "expected hf:ORG/NAME"),
        ("nothing.json", {}, "cannot read"),
        ("empty", {}, "cannot read"),
        ("model", {"quantization": "4bit"}, "--lora RANK"),
        ("model", {"lora_targets": ("q_proj",)}, "--lora RANK"),
        ("train:make", {"lora": 8}, "apply to a model's configuration"),
    ],
)
def test_what_can_t_be_used_is_one_sentence(here, named, options, words):
    (here / "empty").mkdir()
    with pytest.raises(UnusableError, match=words) as error:
        source(here, named, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b"[1, 2]", "does not contain a mapping"),
        (b"{}", "no model_type"),
        (b'{"model_type": 3}', "no model_type"),
        (b'{"num_hidden_layers": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
        (b" " * (MOST_JSON + 1), "larger than"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**12}).encode(), "num_hidden_layers is 1e"),
        (json.dumps(LLAMA | {"text_config": {"depths": [2, 10**9]}}).encode(), "depths is 1e"),
        (json.dumps(LLAMA | {"hidden_size": 10**18}).encode(), "hidden_size is 1e"),
        (json.dumps(LLAMA | {"quantization_config": {"quant_method": "gptq"}}).encode(), r"already quantized \(gptq\)"),
    ],
)
def test_a_hostile_configuration_is_refused_at_once(here, content, words):
    (here / "config.json").write_bytes(content)
    began = time.monotonic()
    with pytest.raises(UnusableError, match=words) as error:
        source(here, "config.json")
    assert time.monotonic() - began < 1
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_what_is_no_file_is_not_waited_for(here):
    os.mkfifo(here / "config.json")
    with pytest.raises(UnusableError, match="is not a file"):
        source(here, "config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "levels"),
        ("a: [1", "line 2"),
        ("a: !!python/object/apply:os.system [true]", "line 1"),
        ("\n".join(["a: &a {x: 1}", *(f"b{i}: {{<<: [*a, *a]}}" for i in range(20))]), "aliases"),
        ("x: 1\n" * MOST_YAML, "larger than"),
        ("a: 1", "not a configuration of"),
        ("train: {micro_batch_size: 4}", "is a configuration of litgpt, which is not read"),
        ("- 1", "does not contain a mapping"),
    ],
)
def test_a_hostile_training_configuration_is_refused(here, text, words):
    (here / "train.yaml").write_text(text)
    with pytest.raises(UnusableError, match=words):
        read_training(here / "train.yaml")


LLAMA_FACTORY = """
model_name_or_path: org/small
trust_remote_code: true
stage: sft
finetuning_type: lora
quantization_bit: 4
lora_rank: 64
lora_target: q_proj,v_proj
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
deepspeed: zero.json
optim: adamw_bnb_8bit
bf16: true
"""


def test_llama_factory(here):
    (here / "zero.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    )
    (here / "train.yaml").write_text(LLAMA_FACTORY)
    recipe, plan, notes = source(here, "train.yaml", plan={"devices": 4})
    assert recipe.name == "hf:org/small"
    assert (recipe.lora, recipe.quantization) == (LoraAdapters(rank=64, targets=("q_proj", "v_proj")), "4bit")
    assert (recipe.sequence_length, recipe.upcasts, recipe.double_quantization) == (1024, False, True)
    assert plan == {
        "devices": 4,
        "strategy": "deepspeed-2",
        "precision": "bf16-mixed",
        "batch_size": 2,
        "accumulate": 8,
        "optimizer": "adamw_bnb_8bit",
        "checkpointing": True,
        "outputs": "released",
    }
    assert notes == ("not covered, the step is estimated without it: offload to host memory",)


def test_full_fine_tuning_in_llama_factory_has_weights_of_32_bits(here):
    (here / "train.yaml").write_text(
        "model_name_or_path: model\ntemplate: x\nfinetuning_type: full\nbf16: true\nstage: dpo\n"
    )
    recipe, plan, notes = source(here, "train.yaml", plan={"checkpointing": False})
    assert (recipe.name, recipe.lora, recipe.dtype) == ("model", None, "float32")
    assert (plan["precision"], plan["batch_size"], plan["checkpointing"]) == ("bf16-mixed", 8, False)
    assert "stage dpo" in notes[0]


AXOLOTL = """
base_model: org/small
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_32bit
bf16: auto
gradient_checkpointing: true
"""


def test_axolotl(here):
    (here / "train.yml").write_text(AXOLOTL)
    recipe, plan, notes = source(here, "train.yml", lora=16)
    assert recipe.lora == LoraAdapters(rank=16, targets=("all-linear",), dropout=0.05)
    assert (recipe.quantization, recipe.dtype, recipe.upcasts, notes) == ("4bit", "bfloat16", False, ())
    assert (plan["optimizer"], plan["batch_size"], plan["accumulate"]) == ("paged_adamw_32bit", 2, 4)
    assert plan["checkpointing"] is True


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


@pytest.mark.parametrize("named", ["model", "train:make"])
def test_accelerate_goes_with_a_model_or_a_factory(here, named):
    (here / "accelerate.yaml").write_text(ACCELERATE)
    _, plan, notes = source(here, named, "accelerate.yaml", plan={"precision": "bf16-true"})
    assert {name: plan[name] for name in ("devices", "nodes", "strategy", "precision")} == {
        "devices": 8,
        "nodes": 2,
        "strategy": "fsdp2",
        "precision": "bf16-true",
    }
    assert "offload" in notes[0]
    with pytest.raises(UnusableError, match="does not name a model"):
        source(here, "accelerate.yaml")


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: no", "ddp"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}", "deepspeed-3"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}", "ddp"),
        ("distributed_type: 'NO'", "none"),
    ],
)
def test_strategies_of_accelerate(here, text, strategy):
    (here / "accelerate.yaml").write_text(text)
    assert read_training(here / "accelerate.yaml").plan["strategy"] == strategy


LIGHTNING = """
trainer:
  devices: [0, 1]
  precision: bf16-mixed
  strategy: {class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {stage: 3}}
model: {class_path: package.Module, init_args: {MODEL}}
data: {class_path: package.Data, init_args: {batch_size: 4}}
optimizer: {class_path: torch.optim.SGD}
"""


def test_lightning_s_command_line(here):
    (here / "fit.yaml").write_text(LIGHTNING.replace("MODEL", "model_name: org/small"))
    recipe, plan, notes = source(here, "fit.yaml")
    assert recipe.name == "hf:org/small"
    assert notes[0].endswith("code of the LightningModule around the model")
    assert (plan["strategy"], plan["devices"], plan["batch_size"]) == ("deepspeed-3", 2, 4)
    assert (plan["optimizer"], plan["zero_grad"], plan["outputs"]) == ("SGD", "late", "step")
    (here / "fit.yaml").write_text(LIGHTNING.replace("MODEL", "width: 3"))
    with pytest.raises(UnusableError, match="does not name a model"):
        source(here, "fit.yaml")


def test_trl(here):
    lora = "use_peft: true\nlora_r: 8\nload_in_8bit: true"
    (here / "sft.yaml").write_text(f"model_name_or_path: model\nmax_length: 256\nbf16: true\ndtype: bfloat16\n{lora}")
    recipe, plan, _ = source(here, "sft.yaml")
    assert (recipe.lora, recipe.quantization) == (LoraAdapters(rank=8), "8bit")
    assert (recipe.sequence_length, recipe.double_quantization, plan["checkpointing"]) == (256, False, False)


def test_a_training_configuration_may_be_json(here):
    (here / "train.json").write_text('{"model_name_or_path": "model", "template": "x", "lora_rank": 4}')
    assert source(here, "train.json")[0].lora == LoraAdapters(rank=4, targets=("all-linear",))


def test_two_training_configurations_contradict_each_other(here):
    (here / "train.yaml").write_text(LLAMA_FACTORY)
    with pytest.raises(UnusableError, match="give only one"):
        source(here, "train.yaml", "train.yaml")
