"""Programs for accelerators whose collectives are not those of NCCL or RCCL."""

from __future__ import annotations

import re

from doctor.lint.engine.imported_names import modules_at_top
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.lint.python.project.settings.options import shown_starts
from doctor.lint.python.script import Script, per_script

_PACKAGES = re.compile(r"(?:habana_frameworks|optimum\.habana|torch_npu|torch_neuronx)(?:\.|$)")
"""Packages that need the driver of Gaudi, Ascend or Trainium, where they are imported."""
_STARTS = re.compile(r"(?:^|[\s;`])(?:HCCL|HABANA|PT_HPU|ASCEND|NEURON)_\w+=|\bgaudi_spawn\b")
"""Commands for these: ``PT_HPU_LAZY_MODE=1 python train.py``, and ``gaudi_spawn.py`` of Optimum."""


def uses_no_nccl(file: EnvironmentSource) -> bool:
    """Whether the ranks of a script communicate with another library on other accelerators, so that nothing reads the
    variables of NCCL and of its process group: it cannot be imported without one, or every start of it that the project
    shows is for one."""
    return isinstance(file, Script) and _is_for_others(file)


@per_script
def _is_for_others(script: Script) -> bool:
    if any(map(_PACKAGES.match, modules_at_top(script.text))):
        return True
    if script.modules is None or not script.location:
        return False
    starts = shown_starts(script)
    return bool(starts) and all(map(_STARTS.search, starts))
