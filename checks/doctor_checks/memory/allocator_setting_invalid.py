"""MEM007: a setting of PyTorch's CUDA memory allocator is invalid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from doctor.analysis.effective_settings import group_by_value
from doctor.api import Finding, Job, Severity, Verdict, check
from doctor.facts import EnvironmentFacts, SoftwareFacts, TorchBuild
from doctor.knowledge.alloc_conf import AllocConfFault
from doctor.knowledge.alloc_conf import alloc_conf_faults as allocator_complaints
from doctor.knowledge.alloc_conf import split_options as allocator_options
from doctor.knowledge.releases import within
from doctor.testing import Fails, Passes, healthy

CUDA_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
GENERAL_VARIABLE = "PYTORCH_ALLOC_CONF"
HIP_VARIABLE = "PYTORCH_HIP_ALLOC_CONF"
_SOUND = (
    "max_split_size_mb:512, garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:8],"
    "expandable_segments:False,pinned_use_background_threads:False"
)
_NEW_TORCH = TorchBuild("2.13.0", cuda="13.0")


@check(
    id="MEM007",
    severity=Severity.ERROR,
    needs=(EnvironmentFacts,),
    impacts={
        r"which ignores": (
            "The memory pool of the CUDA driver decides how memory is split and reused, and a failure that the option "
            "should prevent may still occur."
        ),
        r"no benefit": "None: expandable segments avoid the fragmentation that max_split_size_mb limits.",
        r"unknown option|which requires|supports only|on ROCm it is": (
            "PyTorch rejects the option with an error at the first use of CUDA."
        ),
        r"which fails with": "The rank fails when the allocator collects unused segments.",
        r"must be|quotation marks|separate option and value": (
            "PyTorch rejects the value with an error at the first use of CUDA."
        ),
    },
    cases=lambda: (
        Passes("nothing set", healthy()),
        Passes("sound options", healthy().environ(PYTORCH_CUDA_ALLOC_CONF=_SOUND)),
        Passes("empty", healthy().environ(PYTORCH_CUDA_ALLOC_CONF="")),
        Passes(
            "both names with the same value",
            healthy()
            .alter(SoftwareFacts, torch=_NEW_TORCH)
            .environ(
                PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,", PYTORCH_ALLOC_CONF="expandable_segments: True"
            ),
        ),
        Passes("the other backend alone", healthy().environ(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")),
        Fails(
            "a limit that expandable segments ignore",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:512"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "garbage collection with expandable segments",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,garbage_collection_threshold:0.8"),
        ),
        Fails(
            "the same before torch 2.5, which asserts",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.4.1", cuda="12.1"))
            .environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,garbage_collection_threshold:0.8"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "an unknown option",
            healthy(2, 2).environ(ranks=(1,), PYTORCH_CUDA_ALLOC_CONF="max_split_size:512"),
            ranks=(1,),
        ),
        Fails(
            "true in small letters", healthy().environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:true"), ranks=(0, 1)
        ),
        Fails(
            "quotation marks of an env file are part of the value",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="'expandable_segments:True'"),
            ranks=(0, 1),
        ),
        Fails("an equals sign", healthy().environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb=512"), ranks=(0, 1)),
        Fails("below the least size", healthy().environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:10"), ranks=(0, 1)),
        Fails(
            "a threshold of 1",
            healthy()
            .alter(SoftwareFacts, torch=_NEW_TORCH)
            .environ(PYTORCH_ALLOC_CONF="garbage_collection_threshold:1.0"),
            ranks=(0, 1),
        ),
        Fails(
            "divisions by three",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="roundup_power2_divisions:[256:1,512:3]"),
            ranks=(0, 1),
        ),
        Fails(
            "an option newer than this torch",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="throw_on_cudamalloc_oom:True"),
            ranks=(0, 1),
        ),
        Fails(
            "the spelling of CUDA on a build for ROCm that knows its own alone",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.1.0+rocm5.6", hip="5.6.31061"))
            .environ(PYTORCH_HIP_ALLOC_CONF="release_lock_on_cudamalloc:True"),
            ranks=(0, 1),
        ),
        Fails(
            "a name that a build for ROCm of torch 2.4 does not read",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.4.1+rocm6.1", hip="6.1.40091"))
            .environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "both names on that build",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.4.1+rocm6.1", hip="6.1.40091"))
            .environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512", PYTORCH_HIP_ALLOC_CONF="max_split_size_mb:512"),
        ),
        Passes(
            "the same on a build that knows both",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.2.0+rocm5.7", hip="5.7.31921"))
            .environ(PYTORCH_HIP_ALLOC_CONF="release_lock_on_cudamalloc:True"),
        ),
        Fails(
            "the two names with different values",
            healthy()
            .alter(SoftwareFacts, torch=_NEW_TORCH)
            .environ(
                PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:False"
            ),
            ranks=(0, 1),
        ),
        Fails(
            "a backend that has no segments to expand",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync,expandable_segments:True"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes(
            "pinned memory beside a backend that has its own allocator on the device",
            healthy().environ(
                PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync,pinned_use_cuda_host_register:True,"
                "pinned_num_register_threads:8"
            ),
        ),
        Fails(
            "a backend that ignores the size",
            healthy().environ(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync,max_split_size_mb:512"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "a name that torch 2.8 does not read",
            healthy().environ(PYTORCH_ALLOC_CONF="expandable_segments:True"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "an option that torch 2.9 ignores under the new name",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.9.1+cu128", cuda="12.8"))
            .environ(PYTORCH_ALLOC_CONF="expandable_segments:True"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "the same under the old name",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.9.1+cu128", cuda="12.8"))
            .environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        ),
        Passes(
            "the same under both names",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.9.1+cu128", cuda="12.8"))
            .environ(PYTORCH_ALLOC_CONF="expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        ),
        Passes(
            "the new name where it works",
            healthy()
            .alter(SoftwareFacts, torch=TorchBuild("2.11.0+cu130", cuda="13.0"))
            .environ(PYTORCH_ALLOC_CONF="expandable_segments:True"),
        ),
        Fails(
            "wrong without a known torch",
            healthy(gpus=0).alter(SoftwareFacts, torch=None).environ(PYTORCH_CUDA_ALLOC_CONF="foo:1"),
            ranks=(0, 1),
        ),
    ),
)
def allocator_setting_invalid(job: Job) -> Iterator[Verdict]:
    """Ask whether the options and values in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are valid for this PyTorch.

    Why it hurts: PyTorch raises an error at the first use of CUDA on every rank, or reads only one of two
    contradictory variables.
    Fix: Write option:value pairs separated by commas, for example `export
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    for (cuda, hip, general, torch, is_rocm), ranks in group_by_value(
        job, EnvironmentFacts, lambda own, identical: _values(own, identical.find(SoftwareFacts)), also=(SoftwareFacts,)
    ):
        if is_rocm and torch is not None and within(torch, before="2.5"):
            yield from _of_hipified(cuda, hip, torch, ranks)
        elif cuda is not None:
            yield from _complaints(CUDA_VARIABLE, cuda, torch, is_rocm, ranks)
        if general is None:
            continue
        if torch is not None and within(torch, before="2.9"):
            if cuda is None:
                yield Finding(
                    f"PyTorch {torch} does not read {GENERAL_VARIABLE}, which was added in 2.9",
                    ranks=ranks,
                    evidence={"value": general, "torch": torch},
                    effect="The allocator uses its defaults.",
                    fix=f"export {CUDA_VARIABLE}={shlex.quote(general)}",
                    severity=Severity.INFO,
                )
            continue
        yield from _complaints(GENERAL_VARIABLE, general, torch, is_rocm, ranks)
        if cuda is not None:
            yield from _contradictions(cuda, general, ranks)
        elif torch is not None and not is_rocm and within(torch, first="2.9", before="2.10"):
            yield from _ignored_segments(general, torch, ranks)


def _values(
    environment: EnvironmentFacts, software: SoftwareFacts | None
) -> tuple[str | None, str | None, str | None, str | None, bool]:
    torch = software.torch if software else None
    return (
        environment.get(CUDA_VARIABLE),
        environment.get(HIP_VARIABLE),
        environment.get(GENERAL_VARIABLE),
        torch.version if torch else None,
        bool(torch and torch.hip),
    )


def _of_hipified(cuda: str | None, hip: str | None, torch: str, ranks: tuple[int, ...]) -> Iterator[Finding]:
    """Builds for ROCm in which hipify also replaced the name in getenv(): their error on exhausted memory names
    PYTORCH_HIP_ALLOC_CONF up to 2.4.1 (https://github.com/pytorch/pytorch/issues/138002). Later ones read both names
    (c10/cuda/CUDAAllocatorConfig.h)."""
    if hip is not None:
        yield from _complaints(HIP_VARIABLE, hip, torch, True, ranks)
    elif cuda is not None:
        yield Finding(
            f"PyTorch {torch} reads {HIP_VARIABLE} instead of {CUDA_VARIABLE}",
            ranks=ranks,
            evidence={"value": cuda, "torch": torch},
            effect="The allocator uses its defaults.",
            fix=f"export {HIP_VARIABLE}={shlex.quote(cuda)}",
            severity=Severity.INFO,
        )


def _ignored_segments(general: str, torch: str, ranks: tuple[int, ...]) -> Iterator[Finding]:
    """Report expandable_segments under the new name in 2.9, whose CUDA allocator reads it under the old one only
    (https://github.com/pytorch/pytorch/issues/183387; measured there with 2.9.1 and 2.11.0)."""
    options = {entry.partition(":")[0].strip(): entry.partition(":")[2].strip() for entry in general.split(",")}
    if options.get("expandable_segments", "").lower() == "true":
        yield Finding(
            f"PyTorch {torch} ignores expandable_segments in {GENERAL_VARIABLE}",
            ranks=ranks,
            evidence={"value": general, "torch": torch},
            effect="The allocator keeps segments of fixed size, and more memory is lost to fragmentation.",
            fix=f"export {CUDA_VARIABLE}={shlex.quote(general)}",
            severity=Severity.INFO,
        )


def _complaints(name: str, text: str, torch: str | None, is_rocm: bool, ranks: tuple[int, ...]) -> Iterator[Finding]:
    for complaint in allocator_complaints(text, torch, is_rocm=is_rocm):
        yield Finding(
            f"{name} {complaint.text}",
            ranks=ranks,
            evidence={"value": text, "option": complaint.option, "torch": torch},
            fix=_fix(name, text, complaint),
            severity=_severity(complaint),
        )


def _severity(complaint: AllocConfFault) -> Severity | None:
    if complaint.ignored:
        return Severity.INFO
    return Severity.WARNING if complaint.harmless else None


def _fix(name: str, text: str, complaint: AllocConfFault) -> str:
    option, problem = complaint.option, complaint.text
    if complaint.alternative:
        return (
            f"Run `export {name}={shlex.quote(complaint.value)}` to keep the backend, or "
            f"`export {name}={shlex.quote(complaint.alternative)}` to use {problem.partition('which ignores ')[2]}."
        )
    if complaint.value:
        return f"export {name}={shlex.quote(complaint.value)}"
    better = complaint.fix or _valid(option, problem)
    if not better and ("unknown option" in problem or "PyTorch" in problem):
        return _without(name, text, option)
    if "powers of two" in problem:
        return f"Replace the sizes and divisions of {option} in {name} that are not powers of two."
    if not better:
        return f"Correct or remove {option} in {name}." if option else f"Correct {name}, or unset it."
    if not option and ":" in better and "," not in text:
        return f"export {name}={shlex.quote(better)}"
    entries = [entry for entry in text.split(",") if entry.strip().partition(":")[0].strip() == option]
    if len(entries) == 1 and ":" in better and "[" not in text:
        return f"export {name}={shlex.quote(text.replace(entries[0], better))}"
    return f"Write `{better}` in {name}."


def _valid(option: str, problem: str) -> str:
    """A value that the option takes: the least that the problem names, or the example of PyTorch's documentation."""
    if option == "garbage_collection_threshold" and "must be" in problem:
        return f"{option}:0.8"
    least = re.search(r"must be at least (\d+)", problem)
    return f"{option}:{least[1]}" if least else ""


def _without(name: str, text: str, option: str) -> str:
    if "[" in text:
        return f"Remove {option} from {name}."
    kept = [entry.strip() for entry in text.split(",") if entry.strip().partition(":")[0].strip() != option]
    return f"export {name}={shlex.quote(','.join(kept))}" if kept else f"unset {name}"


def _contradictions(cuda: str, general: str, ranks: tuple[int, ...]) -> Iterator[Finding]:
    """Since torch 2.9, different parts of the allocator read both names (c10/core and c10/cuda)."""
    first, second = dict(allocator_options(cuda)[0]), dict(allocator_options(general)[0])
    if first == second:
        return
    clashing = [key for key in first if key in second and first[key] != second[key]]
    shown = ", ".join(clashing) or "their options"
    yield Finding(
        f"{CUDA_VARIABLE} and {GENERAL_VARIABLE} differ in {shown}",
        ranks=ranks,
        evidence={CUDA_VARIABLE: cuda, GENERAL_VARIABLE: general},
        effect="Parts of the allocator read different variables, so which value takes effect depends on the option.",
        fix=f"Set all options in {CUDA_VARIABLE}, and unset {GENERAL_VARIABLE}.",
        severity=None if clashing else Severity.WARNING,
    )
