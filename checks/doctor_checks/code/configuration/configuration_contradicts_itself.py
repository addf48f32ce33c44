"""CODE035: a DeepSpeed, Accelerate or LLaMA-Factory configuration contradicts itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.lint.launch.configs import contradictions_in
from doctor.lint.launch.manifest import Manifest
from doctor.testing import lines
from doctor.testing.script_cases import file_case

_ACCELERATE = ("compute_environment: LOCAL_MACHINE", "num_machines: 1", "num_processes: 8")
_LLAMA = (
    "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507",
    "stage: sft",
    "do_train: true",
    "dataset: alpaca_en_demo",
    "per_device_train_batch_size: 1",
)
_MICRO = '"train_micro_batch_size_per_gpu": "auto",'


def _deepspeed(title: str, *body: str) -> FileFails | FilePasses:
    return file_case(title, lines("{", *body, "}"), "ds_config.json")


def _accelerate(title: str, *body: str) -> FileFails | FilePasses:
    return file_case(title, lines(*_ACCELERATE, *body), "accelerate.yaml")


def _llama(title: str, *body: str) -> FileFails | FilePasses:
    return file_case(title, lines(*_LLAMA, *body), "qwen3_sft.yaml")


@rule(
    id="CODE035",
    severity=Severity.ERROR,
    reads=Manifest,
    mentions=(
        "distributed_type",
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "fp16",
        "bf16",
        "bfloat16",
        "finetuning_type",
        "stage",
    ),
    foreshadows=("MEM011",),
    impacts={
        r"^fsdp_config": "The model is not sharded. If it does not fit on one GPU, the job runs out of memory.",
        r"no effect|ignored": ("If the model fits on the GPU only with offloading, the job runs out of memory."),
        r"^Accelerate rejects (?:distributed|fsdp)": (
            "`accelerate launch` fails with ValueError before it starts any rank."
        ),
        r"rejects|conflicts with|not a multiple": "The program fails at startup on every rank.",
    },
    cases=lambda: (
        _deepspeed(
            "fp16 and bf16",
            _MICRO,
            '  "fp16": {"enabled": true, "loss_scale": 0},',
            '  "bf16": {"enabled": true},  # !',
            '  "zero_optimization": {"stage": 2}',
        ),
        _deepspeed(
            "parameters to the CPU in stage 2",
            '  "zero_optimization": {',
            '    "stage": 2,',
            '    "offload_param": {"device": "cpu", "pin_memory": true},  # !',
            '    "overlap_comm": true',
            "  }",
        ),
        _deepspeed(
            "the optimizer to the CPU without a stage",
            _MICRO,
            '  "zero_optimization": {"offload_optimizer": {"device": "cpu"}}  # !',
        ),
        _deepspeed(
            "a part of the optimizer in stage 2",
            '  "zero_optimization": {"stage": 2, "offload_optimizer": {',
            '    "device": "cpu",',
            '    "ratio": 0.3  # !',
            "  }}",
        ),
        _deepspeed(
            "an accumulation that does not divide the batch",
            '  "train_batch_size": 100,  # !',
            '  "gradient_accumulation_steps": 8,',
            '  "zero_optimization": {"stage": 1}',
        ),
        _deepspeed(
            "left to the framework, with keys of stage 3 alone",
            _MICRO,
            '  "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},',
            '  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},',
            '    "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": true}',
        ),
        _deepspeed(
            "stage 3, everything to the CPU",
            '  "train_batch_size": "auto", "gradient_accumulation_steps": 3,',
            '  "fp16": {"enabled": false}, "bf16": {"enabled": true},',
            '  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},',
            '    "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "ratio": 0.5}}',
        ),
        _deepspeed(
            "nothing to the CPU in stage 1, and elastic training",
            '  "train_batch_size": 100, "gradient_accumulation_steps": 8,',
            '  "elasticity": {"enabled": true, "max_train_batch_size": 2000},',
            '  "zero_optimization": {"stage": 1, "offload_param": {"device": "none"}}',
        ),
        _accelerate(
            "FSDP for plain data parallelism",
            "distributed_type: MULTI_GPU",
            "fsdp_config:  # !",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_sharding_strategy: FULL_SHARD",
        ),
        _accelerate(
            "a stage beside DeepSpeed's file",
            "distributed_type: DEEPSPEED",
            "mixed_precision: bf16",
            "deepspeed_config:",
            "  deepspeed_config_file: ds_z3.json  # !",
            "  zero_stage: 3",
        ),
        _accelerate(
            "parameters to the CPU in stage 2 of Accelerate",
            "distributed_type: DEEPSPEED",
            "deepspeed_config:",
            "  offload_param_device: cpu  # !",
            "  zero_stage: 2",
        ),
        _accelerate(
            "weights in rank 0 alone",
            "distributed_type: FSDP",
            "fsdp_config:",
            "  fsdp_cpu_ram_efficient_loading: true",
            "  fsdp_sync_module_states: false  # !",
        ),
        FileFails(
            "one GPU of several",
            lines("distributed_type: MULTI_GPU", "num_machines: 1", "num_processes: 1", "gpu_ids: '3'  # !"),
            name="accelerate.yaml",
        ),
        FilePasses(
            "one process, with a section of another job",
            lines(
                "compute_environment: LOCAL_MACHINE",
                "distributed_type: 'NO'",
                "num_processes: 1",
                "fsdp_config:",
                "  fsdp_sharding_strategy: NO_SHARD",
            ),
            name="accelerate.yaml",
        ),
        _accelerate(
            "empty sections of other types",
            "distributed_type: MULTI_GPU",
            "mixed_precision: bf16",
            "gpu_ids: all",
            "deepspeed_config: {}",
            "fsdp_config: {}",
            "megatron_lm_config:",
        ),
        _accelerate(
            "DeepSpeed's file, and what may stand beside it",
            "distributed_type: DEEPSPEED",
            "deepspeed_config:",
            "  deepspeed_config_file: ds_z3.json",
            "  zero3_init_flag: true",
        ),
        _accelerate(
            "stage 3 with everything on the CPU",
            "distributed_type: DEEPSPEED",
            "mixed_precision: bf16",
            "deepspeed_config:",
            "  offload_optimizer_device: cpu",
            "  offload_param_device: cpu",
            "  zero_stage: 3",
        ),
        _accelerate(
            "FSDP",
            "distributed_type: FSDP",
            "fsdp_config:",
            "  fsdp_cpu_ram_efficient_loading: true",
            "  fsdp_sync_module_states: true",
        ),
        _llama("both precisions in a YAML", "finetuning_type: lora", "bf16: true", "fp16: true  # !"),
        _llama("DeepSpeed and FSDP", "deepspeed: ds_z2_config.json", "fsdp: full_shard auto_wrap  # !"),
        _llama("eight bits with ZeRO-3", "quantization_bit: 8", "deepspeed: examples/deepspeed/ds_z3_config.json  # !"),
        _llama("a quantised model as a whole", "quantization_bit: 4", "finetuning_type: full  # !"),
        _llama("pure bfloat16 with ZeRO-3", "deepspeed: cfg/zero3_offload.json", "pure_bf16: true  # !"),
        _llama(
            "DeepSpeed's configuration in the file",
            "deepspeed:",
            "  zero_optimization:",
            "    stage: 0",
            "    offload_param:",
            "      device: cpu  # !",
        ),
        _llama("four bits with ZeRO-3", "quantization_bit: 4", "bf16: true", "deepspeed: ds_z3_config.json"),
        _llama("eight bits with ZeRO-2", "quantization_bit: 8", "deepspeed: ds_z2_config.json", "fsdp: ''"),
        _llama("one precision", "finetuning_type: full", "bf16: true", "fp16: false", "deepspeed: ds_z3.json"),
        _llama("pure bfloat16", "finetuning_type: full", "pure_bf16: true", "deepspeed: null"),
    ),
)
def configuration_contradicts_itself(file: Manifest) -> Iterator[Violation]:
    """Ask whether a DeepSpeed, Accelerate or LLaMA-Factory configuration contains contradictory settings.

    Why it hurts: the program fails at startup on every rank.
    Fix: Keep one of the two settings, and remove the other one or set it to "auto".
    """
    is_unnamed = file.modules is not None and file.modules.is_unnamed(file.path)
    for config in file.configs:
        for found in contradictions_in(config):
            if "is ignored, because distributed_type" in found.claim and _is_asked_for(file, found.claim):
                continue
            yield Violation(
                found.at.place,
                found.claim,
                fix=found.fix,
                # Nothing shows that a job reads it, or what it loses
                severity=Severity.INFO
                if is_unnamed or found.costs_little
                else None
                if found.is_refused
                else Severity.WARNING,
                preview=is_unnamed and found.costs_little,
                confidence=found.confidence,
                evidence=(
                    ("configuration_of", config.kind),
                    *((("foreshadows", []),) if found.is_refused else ()),  # it ends before it uses any memory
                ),
            )


_GIVES_LIST = re.compile(r"[\"'](?:--config[_-]file|launch)[\"']")
"""What a program that starts ``accelerate launch`` from a list of words contains; one that declares the switch with
``add_argument`` has not."""


def _is_asked_for(file: Manifest, claim: str) -> bool:
    """Whether each command of the project with a configuration has the switch for the section that a claim is about,
    ``--use_deepspeed``, which overrides ``distributed_type`` (accelerate/commands/launch.py), or a program may give it
    with any configuration: ``cmd += ["--use_deepspeed"]``."""
    if file.modules is None:
        return False
    name = file.path.rpartition("/")[2]
    switch = re.compile(rf"--use[_-]{claim.partition('_config')[0]}\b")
    quoted = re.compile(rf"[\"']{switch.pattern}[\"']")
    given = (text for spelled in ("--use_", "--use-") for _, text in file.modules.mentioning(spelled))
    if any("accelerate" in text and _GIVES_LIST.search(text) and quoted.search(text) for text in given):
        return True
    texts = (text for _, text in file.modules.mentioning(name) if "accelerate" in text)
    lines = (line for text in texts for line in text.replace("\\\n", " ").splitlines())
    commands = [line for line in lines if name in line and "accelerate launch" in line and line.lstrip()[:1] != "#"]
    return bool(commands) and all(map(switch.search, commands))
