"""Shell scripts that let each rank see one GPU and then run what they are given: ``mpiexec ./bind.sh python t.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.lint.python.script import ProjectModules

_RUNS_GIVEN = re.compile(r"^[ \t]*(?:exec[ \t]+)?(?:numactl[^\n$]{0,80}[ \t])?[\"']?\$\{?[@*]", re.MULTILINE)
_SHOWS_ONE = re.compile(
    r"\b(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES=[\"']?(?:\$\{?(\w{1,40})\}?[\"']?\s*$|\$\{?\w*(?:LOCAL_?RANK|LOCALID)|\$\(\()",
    re.MULTILINE,
)
_OF_LOCAL_RANK = re.compile(r"LOCAL_?RANK|LOCALID")
"""Of Slurm, Open MPI, MVAPICH, PMI and PALS: the number of a rank on its host."""
_RANKS = re.compile(r"\b(?:mpiexec|mpirun|srun|aprun|jsrun|torchrun|torch\.distributed|accelerate launch|deepspeed)\b")


def is_run_through(modules: ProjectModules, text: str) -> bool:
    """Whether a launch file runs what it starts through a script of the project which gives each rank one GPU."""
    return any(re.search(rf"(?<![\w.-]){re.escape(name)}(?=[ \t])", text) for name in _wrappers(modules))


def all_ranks_are_bound(modules: ProjectModules) -> bool:
    """Whether every launch file of the project that starts ranks does so through such a script, and there is one."""
    names = list(_wrappers(modules))
    if not names:
        return False
    starts = [text for _, text in modules.mentioning("python", launches=True) if _RANKS.search(text)]
    return bool(starts) and all(is_run_through(modules, text) for text in starts)


def _wrappers(modules: ProjectModules) -> Iterator[str]:
    for shown, text in modules.mentioning("_VISIBLE_DEVICES", launches=True):
        if _RUNS_GIVEN.search(text) and _OF_LOCAL_RANK.search(text) and _SHOWS_ONE.search(text):
            yield PurePath(shown).name
