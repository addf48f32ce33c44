"""Configurations are told apart by what they hold; a contradiction is one only where both sides are certain."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.core.finding import Severity
from doctor.lint.engine.discovery import LintTarget, UnreadableFile
from doctor.lint.engine.file_check import FileChecker
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.launch.file_type import read_launch_file
from doctor.lint.launch.manifest import Manifest
from tests.lab.cases import each_case

RULES = builtin_rules()
RULE = next(rule for rule in RULES if rule.id == "CODE035")
LLAMA = {"model_name_or_path": "m", "stage": "sft", "do_train": True, "dataset": "d"}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 8}
LLAMA_TEXT = yaml.safe_dump(LLAMA)


def kinds(name, text):
    file = read_launch_file(name, text)
    return [config.kind for config in file.configs] if isinstance(file, Manifest) else []


def hits(name, holds, *, dump=yaml.safe_dump):
    file = read_launch_file(name, dump(holds))
    assert isinstance(file, Manifest), "it is not read at all"
    return list(RULE.violations(file))


def of_deepspeed(holds):
    return hits(
        "ds.json", {"train_micro_batch_size_per_gpu": "auto", **holds}, dump=lambda one: json.dumps(one, indent=1)
    )


def zero(**holds):
    return of_deepspeed({"zero_optimization": holds})


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("sft.yaml", LLAMA_TEXT, ["llamafactory"]),
        ("sft.yml", "finetuning_type: full\nmodel_name_or_path: m\noutput_dir: o\n", ["llamafactory"]),
        ("sft.json", json.dumps({**LLAMA, "finetuning_type": "lora"}), ["llamafactory"]),
        ("sft.yaml", LLAMA_TEXT + "deepspeed:\n  zero_optimization:\n    stage: 2\n", ["llamafactory", "deepspeed"]),
        ("ds.json", '{"train_batch_size": 8, "fp16": {"enabled": true}}', ["deepspeed"]),
        ("ds.json", '{\n\t"zero_optimization": {"stage": 3}\n}', ["deepspeed"]),
        ("a.yaml", yaml.safe_dump({**ACCELERATE, "distributed_type": "FSDP"}), ["accelerate"]),
    ],
)
def test_a_configuration_is_told_by_what_it_holds(name, text, kind):
    assert kinds(name, text) == kind


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer_state.json", '{"train_batch_size": 8, "log_history": [{"loss": 1.0}]}'),
        ("gpus.json", '{"bf16": {"flops": 989}, "fp16": {"flops": 989}}'),
        (".gitlab-ci.yml", "build:\n  stage: test\n  script: [make]\n"),
        ("infer.yaml", "model_name_or_path: m\nfinetuning_type: lora\ninfer_backend: vllm\ntemplate: qwen3\n"),
        ("merge.yaml", "model_name_or_path: m\nfinetuning_type: lora\nexport_dir: saves\n"),
        ("trl.yaml", "model_name_or_path: m\nper_device_train_batch_size: 1\nbf16: true\nfp16: true\n"),
        ("dvc.yaml", "stage: sft\ncmd: python train.py\n"),
    ],
)
def test_what_only_looks_like_one_is_none(name, text):
    assert not kinds(name, text)


def test_a_large_state_of_a_trainer_is_no_broken_configuration():
    history = [{"loss": 1.0, "step": step} for step in range(30_000)]
    assert read_launch_file("trainer_state.json", json.dumps({"train_batch_size": 8, "log_history": history})) is None


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_both_precisions_of_deepspeed(name):
    (hit,) = of_deepspeed({"fp16": {"enabled": True}, name: {"enabled": True}})
    assert (hit.severity, hit.place.line) == (None, 7)
    for one, other in ((True, False), ("auto", "auto"), (True, "auto"), (False, True)):
        assert not of_deepspeed({"fp16": {"enabled": one}, name: {"enabled": other}})
    assert not of_deepspeed({"fp16": {"enabled": True}, name: {}})


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_leave_the_gpu_in_stage_3_alone(device, stage):
    (hit,) = zero(stage=stage, offload_param={"device": device})
    assert hit.severity is Severity.INFO
    assert f"stage {stage}" in hit.summary
    assert not zero(stage=3, offload_param={"device": device})
    assert not zero(stage="auto", offload_param={"device": device})
    assert not zero(stage=stage, offload_param={"device": "none"})


def test_the_flags_that_were_there_before_the_sections():
    assert zero(stage=2, cpu_offload_param=True)
    assert zero(cpu_offload=True)
    assert not zero(stage=2, cpu_offload=True)
    assert not zero(stage=2, cpu_offload_param=False)
    assert not of_deepspeed({"zero_optimization": True})


def test_a_part_of_the_optimizer():
    (hit,) = zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.3})
    assert hit.severity is None
    for ratio, stage in ((1.0, 2), (0.3, 3), ("auto", 2)):
        assert not zero(stage=stage, offload_optimizer={"device": "cpu", "ratio": ratio})


@pytest.mark.parametrize("section", ["fsdp_config", "deepspeed_config", "megatron_lm_config"])
def test_a_section_of_another_type(section):
    own = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}[section]
    for kind in ("MULTI_GPU", "NO", *({"FSDP", "DEEPSPEED"} - {own})):
        (hit,) = hits("a.yaml", {**ACCELERATE, "distributed_type": kind, section: {"some_key": 1}})
        assert (hit.severity, section in hit.summary, kind in hit.summary) == (Severity.WARNING, True, True)
        assert not hits("a.yaml", {**ACCELERATE, "distributed_type": kind, section: {}})
        assert not hits("a.yaml", {**ACCELERATE, "distributed_type": kind, section: {"some_key": None}})
    for kind in (own, "XLA", "TPU"):
        assert not hits("a.yaml", {**ACCELERATE, "distributed_type": kind, section: {"some_key": 1}})


@pytest.mark.parametrize("field", ["zero_stage", "gradient_clipping", "offload_param_device", "zero3_save_16bit_model"])
def test_what_must_not_stand_beside_the_file_of_deepspeed(field):
    def asked(**section):
        return hits("a.yaml", {**ACCELERATE, "distributed_type": "DEEPSPEED", "deepspeed_config": section})

    (hit,) = asked(deepspeed_config_file="ds.json", **{field: 3})
    assert (hit.confidence, field in hit.summary) == (1.0, True)
    assert not asked(**{field: 3})
    assert not asked(deepspeed_config_file="ds.json", zero3_init_flag=True, deepspeed_multinode_launcher="standard")


def test_a_precision_beside_the_file_of_deepspeed_may_be_undone_by_an_option():
    holds = {**ACCELERATE, "distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (hit,) = hits("a.yaml", {**holds, "mixed_precision": "no"})
    assert hit.confidence < 1
    assert not hits("a.yaml", holds)


def test_weights_in_rank_0_are_sent():
    def asked(text):
        text = f"{yaml.safe_dump({**ACCELERATE, 'distributed_type': 'FSDP'})}fsdp_config: {{{text}}}\n"
        return list(RULE.violations(read_launch_file("a.yaml", text)))

    assert asked("fsdp_cpu_ram_efficient_loading: true, fsdp_sync_module_states: false")
    assert asked("cpu_ram_efficient_loading: true, sync_module_states: false")
    for sound in ("false, fsdp_sync_module_states: false", "true", "true, fsdp_sync_module_states: 'false'"):
        assert not asked(f"fsdp_cpu_ram_efficient_loading: {sound}")


@pytest.mark.parametrize(("listed", "is_refused"), [("0", True), ("all", False), ("0,1", False), (None, False)])
def test_one_gpu_of_several(listed, is_refused):
    holds = {**ACCELERATE, "num_processes": 1, "distributed_type": "MULTI_GPU", "gpu_ids": listed}
    assert bool(hits("a.yaml", holds)) is is_refused
    assert not hits("a.yaml", {**holds, "num_machines": 2, "num_processes": 2})
    assert not hits("a.yaml", {**holds, "distributed_type": "NO"})


Z2, Z3 = "examples/deepspeed/ds_z2_config.json", "examples/deepspeed/ds_z3_config.json"


@each_case(
    ("bad", "sound"),
    [
        ({"fp16": True, "bf16": True}, {"fp16": False, "bf16": True}),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, {"fp16_full_eval": True}),
        ({"deepspeed": Z2, "fsdp": "full_shard"}, {"deepspeed": Z2, "fsdp": ""}),
        ({"deepspeed": Z2, "fsdp": ["full_shard", "auto_wrap"]}, {"deepspeed": None, "fsdp": ["full_shard"]}),
        ({"quantization_bit": 4, "finetuning_type": "full"}, {"quantization_bit": None, "finetuning_type": "full"}),
        ({"quantization_bit": 4, "finetuning_type": "freeze"}, {"quantization_bit": 4, "finetuning_type": "oft"}),
        ({"quantization_bit": 8, "fp8": True}, {"quantization_bit": 8, "fp8": False}),
        ({"quantization_bit": 8, "deepspeed": Z3}, {"quantization_bit": 4, "deepspeed": Z3}),
        (
            {"quantization_bit": 4, "quantization_method": "hqq", "deepspeed": Z3},
            {"quantization_bit": 4, "quantization_method": "bnb", "deepspeed": Z3},
        ),
        (
            {"quantization_bit": 8, "quantization_method": "eetq", "deepspeed": Z3},
            {"quantization_method": "eetq", "deepspeed": Z3},
        ),
        ({"pure_bf16": True, "deepspeed": Z3}, {"pure_bf16": True, "deepspeed": Z2}),
        ({"predict_with_generate": True, "deepspeed": Z3}, {"predict_with_generate": True, "deepspeed": Z2}),
        ({"use_unsloth": True, "deepspeed": Z3}, {"use_unsloth": True, "deepspeed": Z2}),
        ({"pissa_init": True, "deepspeed": Z3}, {"pissa_init": True, "deepspeed": Z2}),
        ({"use_galore": True, "deepspeed": Z2}, {"use_galore": True}),
        ({"use_apollo": True, "deepspeed": Z2}, {"use_apollo": False, "deepspeed": Z2}),
    ],
)
def test_what_llamafactory_refuses(bad, sound):
    (hit,) = hits("sft.yaml", LLAMA | bad)
    assert hit.severity is None
    names = {key: str(value).rpartition("/")[2] for key, value in bad.items() if not key.startswith("quantization")}
    assert all(key in hit.summary or name in hit.summary for key, name in names.items())
    assert not hits("sft.yaml", LLAMA | sound)


@pytest.mark.parametrize("name", ["ds_z3_config.json", "zero3.json", "ds_config_zero_3.json", "a/stage3-offload.json"])
def test_a_file_for_zero_3_is_told_by_its_name(name):
    (hit,) = hits("sft.yaml", {**LLAMA, "pure_bf16": True, "deepspeed": name})
    assert hit.confidence < 1


@pytest.mark.parametrize("name", ["ds_z2_config.json", "ds_z3/zero2.json", "zero30.json", "ds.json", "viz3.json"])
def test_other_names_say_nothing_of_zero_3(name):
    assert not hits("sft.yaml", {**LLAMA, "pure_bf16": True, "deepspeed": name})


def test_the_configuration_of_deepspeed_in_the_file_is_read():
    (hit,) = hits("sft.yaml", {**LLAMA, "pure_bf16": True, "deepspeed": {"zero_optimization": {"stage": 3}}})
    assert hit.confidence == 1
    (hit,) = hits("sft.yaml", {**LLAMA, "deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}})
    assert hit.severity is Severity.INFO


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", yaml.safe_dump({**ACCELERATE, "distributed_type": "NO"})),
        ("a.yaml", yaml.safe_dump({**ACCELERATE, "distributed_type": "MULTI_GPU", "gpu_ids": "0"})),
        (
            "ds.json",
            '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 8}',
        ),
    ],
)
def test_what_another_rule_says_is_not_said_twice(name, text):
    file = read_launch_file(name, text)
    assert not list(RULE.violations(file))
    others = [rule for rule in RULES if isinstance(file, rule.reads) and rule is not RULE]
    assert len([hit for rule in others for hit in rule.violations(file)]) == 1


def test_the_engine_shows_the_line_that_is_hit(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(LLAMA_TEXT + "fp16: true\n\nbf16: true\n")
    judge = FileChecker(Rulebook((RULE,)), releases=Releases({}), processors=None, known={RULE.id: RULE.family})
    (found,) = judge.judge(LintTarget(path, path.name, "config", tmp_path)).found
    assert (found.place.line, found.code) == (7, "bf16: true")


@pytest.mark.parametrize(
    ("commands", "count"),
    [
        (["accelerate launch --config_file configs/all.yaml --use_deepspeed train.py"], 0),
        (["accelerate launch --config_file configs/all.yaml \\\n  --use_deepspeed train.py"], 0),
        (["accelerate launch --config_file all.yaml --use_fsdp train.py"], 1),
        (
            [
                "accelerate launch --config_file all.yaml --use_deepspeed a.py",
                "accelerate launch --config_file all.yaml b.py",
            ],
            1,
        ),
        (["accelerate launch --config_file other.yaml --use_deepspeed train.py"], 1),
        ([], 1),
    ],
)
def test_a_switch_of_the_command_goes_before_the_type_of_the_file(tmp_path, commands, count):
    holds = {**ACCELERATE, "distributed_type": "MULTI_GPU", "deepspeed_config": {"zero_stage": 2}}
    texts = {"all.yaml": yaml.safe_dump(holds), "run.sh": "#!/bin/bash\n" + "\n".join(commands) + "\n"}
    targets = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        kind = "config" if name.endswith(".yaml") else "shell"
        targets.append(LintTarget(tmp_path / name, name, kind, tmp_path))
    known = {RULE.id: RULE.family}
    judge = FileChecker(Rulebook((RULE,)), releases=Releases({}), processors=None, known=known, project=targets)
    assert len(judge.judge(targets[0]).found) == count


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ('cmd = ["accelerate", "launch", "--use_deepspeed", "--config_file", find()]\nrun(cmd)\n', 0),
        ('cmd = ["accelerate", "launch", "--config_file", find()]\nrun(cmd)\n', 1),
        ('import accelerate\nparser.add_argument("--use_deepspeed", action="store_true")\n', 1),
    ],
)
def test_a_program_may_give_the_switch_with_any_configuration(tmp_path, program, count):
    holds = {**ACCELERATE, "distributed_type": "MULTI_GPU", "deepspeed_config": {"zero_stage": 2}}
    targets = []
    for name, kind, text in (("all.yaml", "config", yaml.safe_dump(holds)), ("start.py", "python", program)):
        (tmp_path / name).write_text(text)
        targets.append(LintTarget(tmp_path / name, name, kind, tmp_path))
    known = {RULE.id: RULE.family}
    judge = FileChecker(Rulebook((RULE,)), releases=Releases({}), processors=None, known=known, project=targets)
    assert len(judge.judge(targets[0]).found) == count


_WORDS = """
fp16 bf16 bfloat16 enabled stage zero_optimization offload_param offload_optimizer device ratio deepspeed fsdp
quantization_bit quantization_method finetuning_type pure_bf16 model_name_or_path do_train distributed_type
num_processes num_machines gpu_ids fsdp_config deepspeed_config deepspeed_config_file zero_stage mixed_precision
train_batch_size gradient_accumulation_steps elasticity << compute_environment
"""
_KEYS = st.sampled_from(_WORDS.split())
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.sampled_from(["auto", "", "cpu", "a\nz3", "FSDP", "NO", "0"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.dictionaries(_KEYS, _VALUES, max_size=8), st.sampled_from([LLAMA, {"zero_optimization": {}}, ACCELERATE]))
def test_nothing_in_a_configuration_breaks_the_rule(holds, base):
    with contextlib.suppress(UnreadableFile):
        file = read_launch_file("a.yaml", yaml.safe_dump({**base, **holds}))
        for hit in RULE.violations(file) if file is not None else ():
            assert hit.place.line > 0
            assert "\n" not in hit.summary


def test_the_examples_of_this_project_hold_together():
    examples = Path(__file__).parents[2] / "examples"
    read = [read_launch_file(str(path), path.read_text()) for path in examples.rglob("*.y*ml")]
    assert not [hit for file in read if isinstance(file, Manifest) for hit in RULE.violations(file)]
