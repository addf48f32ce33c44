"""Variables that a script sets for the programs that it starts, but does not export to them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from doctor.knowledge.environment_variables import known
from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch
from doctor.lint.launch.partial_text import is_known

DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
_OF_PROGRAMS = re.compile(
    r"(?:TORCH_)?NCCL_\w+|TORCH_DISTRIBUTED_DEBUG|PYTORCH_(?:CUDA_)?ALLOC_CONF|(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES|"
    r"OMP_NUM_THREADS|GLOO_SOCKET_IFNAME|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING|TOKENIZERS_PARALLELISM"
)
"""Variables that only programs read: a script that needs a separate value has no use for these names."""
_MAY_EXPORT = re.compile(
    r"^[ \t]*(?:set[ \t]+(?:-\w*a|-o[ \t]+allexport)|(?:source|\.)[ \t]+(?![^\n;&|]*(?:activate|conda\.sh|bashrc)))|"
    r"\beval\b|\b(?:declare|typeset)\b|<<",
    re.MULTILINE,
)
"""What may export a variable by other means, or write a text that another shell reads."""
_ALLOCATES = re.compile(r"^#SBATCH\b|\b(?:srun|salloc|sbatch|qsub|bsub)\b|\bmodule[ \t]+load\b", re.MULTILINE)
"""Schedulers of clusters export the visible devices of a job, so that an assignment changes what its programs see."""
_SETS = re.compile(rf"^[ \t]*set[ \t]+(?P<name>{_OF_PROGRAMS.pattern})=(?P<value>[\w,.:-]+)[ \t]*$", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")


def unexported(
    text: str, settings: Iterable[EnvironmentSetting], launches: Iterable[Launch]
) -> tuple[EnvironmentSetting, ...]:
    """The variables of programs that a script only sets, and that nothing else in it names, above a program that it
    starts. POSIX.1-2017, Shell Command Language, 2.9.1: an assignment without a command affects the shell alone, unless
    the variable is exported."""
    last = max((one.place.line for one in launches), default=0)
    if not last or _MAY_EXPORT.search(text):
        return ()
    given = [one for one in settings if _OF_PROGRAMS.fullmatch(one.name)]
    count = Counter(one.name for one in given)
    words = Counter(re.findall(r"\w+", _COMMENT.sub("", text)))
    is_allocated = _ALLOCATES.search(text) is not None
    return tuple(
        one
        for one in given
        if not one.is_exported
        and one.is_certain
        and one.place.line < last
        and words[one.name] == count[one.name] == 1
        and is_known(one.value)
        and one.value
        and not (is_allocated and one.name in DEVICES)
        and ("NCCL" not in one.name or known(one.name) is not None)
    )


def set_as_arguments(text: str) -> tuple[EnvironmentSetting, ...]:
    """The variables of programs that a script gives to ``set``, as in a shell of Windows. In one of POSIX, the words
    become its positional parameters (Shell Command Language, 2.14, ``set``), and no variable is set."""
    if "<<" in text:
        return ()
    lines = ((text.count("\n", 0, one.start("name")) + 1, one) for one in _SETS.finditer(text))
    return tuple(
        EnvironmentSetting(one["name"], one["value"], SourceLocation(line, 0, line), is_exported=False)
        for line, one in lines
    )
