"""Settings of training frameworks and of PyTorch's allocator that reduce or defragment device memory."""

from __future__ import annotations

from collections.abc import Sequence

from doctor.api import Job, Rank, conjunction
from doctor.facts import EnvironmentFacts, Frame, TrainingFacts
from doctor.knowledge.alloc_conf import split_options

EXPANDABLE_SEGMENTS = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

_PLAIN = "use a smaller batch per rank with more gradient accumulation, or use activation checkpointing"
_TRANSFORMERS = (
    "lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor in TrainingArguments, "
    "or set gradient_checkpointing=True"
)
_LIGHTNING = (
    "lower the batch_size of the DataLoader and raise `accumulate_grad_batches` of the Trainer by the same factor, or "
    'set `Trainer(precision="bf16-mixed")`'
)
_DEEPSPEED = (
    "lower train_micro_batch_size_per_gpu and raise gradient_accumulation_steps by the same factor in the DeepSpeed "
    "configuration, or raise zero_optimization.stage"
)

_BY_FRAME: tuple[tuple[tuple[str, ...], str], ...] = (
    (("/transformers/trainer.py", "/transformers/trainer_seq2seq.py", "/trl/trainer/"), _TRANSFORMERS),
    (("/lightning/pytorch/", "/pytorch_lightning/"), _LIGHTNING),
    (("/deepspeed/runtime/",), _DEEPSPEED),
)
"""Parts of paths in a traceback. A Trainer comes before DeepSpeed, because it writes DeepSpeed's batch sizes."""

_BY_EVALUATION: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("/transformers/trainer.py", "/transformers/trainer_seq2seq.py"),
        ("evaluation_loop", "prediction_loop"),
        "lower per_device_eval_batch_size in TrainingArguments, or set eval_accumulation_steps",
    ),
    (
        ("loops/evaluation_loop.py", "loops/prediction_loop.py"),
        (),
        'lower the batch_size of the evaluation DataLoader, or set `Trainer(precision="bf16-mixed")`',
    ),
)
"""Parts of paths, functions (empty: any) and settings of evaluation, whose batch size is separate."""


def smaller_batch(job: Job, frames: Sequence[Frame] = ()) -> str:
    """A clause that names the settings that reduce device memory, by a traceback or by the framework of a run."""
    places = [(frame.file.replace("\\", "/"), frame.function) for frame in frames]
    for parts, functions, advice in _BY_EVALUATION:
        if any(_is_in(file, parts) and (not functions or function in functions) for file, function in places):
            return advice
    for parts, advice in _BY_FRAME:
        if any(_is_in(file, parts) for file, _ in places):
            return advice
    frameworks = {training.framework for training, _ in job.facts(TrainingFacts)}
    if "transformers" in frameworks:
        return _TRANSFORMERS
    return _LIGHTNING if any("lightning" in framework for framework in frameworks) else _PLAIN


def _is_in(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def uses_expandable_segments(rank: Rank | None) -> bool:
    """Whether the rank's environment enables expandable segments."""
    environment = rank.find(EnvironmentFacts) if rank else None
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options, _ = split_options((environment.get(name) if environment else None) or "")
        if any(option.key == "expandable_segments" and option.value == "True" for option in options):
            return True
    return False


def allocations(count: int) -> str:
    """``1 allocation``, ``12 allocations``."""
    return f"{count} allocation{'' if count == 1 else 's'}"


def end_processes(pids: Sequence[int], host: str = "", gpu: str = "the GPU") -> str:
    """What to do about other processes on a GPU; ``pids``: those that are known; ``host``: if it is known."""
    end = f"On {host}, end" if host else "End"
    instead = "or select another GPU with CUDA_VISIBLE_DEVICES."
    if not pids:
        return f"{end} other processes on {gpu} (`nvidia-smi` lists them), {instead}"
    if len(pids) == 1:
        shown = f"`ps -o user,lstart,cmd -p {pids[0]}` shows its owner"
        return f"{end} process {pids[0]} if no job needs it ({shown}), {instead}"
    numbers = [str(pid) for pid in pids]
    shown = f"`ps -o pid,user,lstart,cmd -p {','.join(numbers)}` shows their owners"
    return f"{end} processes {conjunction(numbers)} if no job needs them ({shown}), {instead}"


def defragmenting(message: str) -> str:
    """The allocator setting that reduces fragmentation, as a command; empty if the release has none.

    Before 2.1, which has expandable segments, a message gives the total capacity first, and recommends
    max_split_size_mb if the release reads it (1.10, c10/cuda/CUDACachingAllocator.cpp)."""
    if "total capacity; " not in message:
        return EXPANDABLE_SEGMENTS
    return "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512" if "max_split_size_mb" in message else ""


def as_sentence(clause: str) -> str:
    """``clause`` with a capital letter and a full stop."""
    return f"{clause[:1].upper()}{clause[1:]}."
