"""GPU003 in launch files: CUDA_VISIBLE_DEVICES is not valid."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.visible_devices import VisibleList, VisibleListFault, parse_visible_devices
from doctor.api import Script, Severity, Violation, rule
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.devices.assignment.visible_devices_invalid import (
    fault_text,
    fix_of_fault,
    shown_list,
    visible_devices_invalid,
)


@rule(
    check=visible_devices_invalid,
    reads=EnvironmentSource,
    cases=lambda: (
        shell_fails("a device twice", "export CUDA_VISIBLE_DEVICES=0,0  # !", "torchrun train.py"),
        shell_fails("blanks instead of commas", 'CUDA_VISIBLE_DEVICES="0 1" torchrun train.py  # !'),
        fails("in a script", 'os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,1"  # !\n'),
        shell_passes("a list", "export CUDA_VISIBLE_DEVICES=0,1,2,3", "torchrun train.py"),
        shell_passes("hides all", "CUDA_VISIBLE_DEVICES= python test.py"),
        fails("in a script for one GPU", 'os.environ["CUDA_VISIBLE_DEVICES"] = "4.5.6.7"  # !\nmodel.to("cuda")\n'),
        passes("in a script, one for each rank", 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]\n'),
        passes("in a script, a list", 'os.environ["CUDA_VISIBLE_DEVICES"] = "0, 1"\n'),
    ),
)
def visible_devices_invalid_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether CUDA reads a list of devices that a file sets as intended."""
    for setting in file.settings:
        value = setting.known_value if setting.name == "CUDA_VISIBLE_DEVICES" and setting.is_exported else None
        listed = parse_visible_devices(value)
        fault = listed.fault if value is not None else None
        if fault is not None:
            yield Violation(
                setting.place,
                f"{shown_list(value or '')} {fault_text(fault, 0)}",
                fix=fix_of_fault(fault, value or ""),
                severity=_severity_of(file, listed),
                evidence=(("value", value),),
                effect=_LOST if _reads_all(fault) else "",
            )


_LOST = (
    "CUDA shows the devices as intended, because it reads the digits that an entry begins with; what follows them is "
    "lost, such as a variable behind a backslash without a blank."
)
_ANOTHER_DEVICE = re.compile(r"[+-]?\d+(?:[\s.;:/|&+_-]+|to|and)[+-]?\d")
"""An entry that means more devices than the first number: ``0-3``, ``0 1``, ``4.5``."""


def _reads_all(fault: VisibleListFault) -> bool:
    """Whether CUDA reads every device that is meant: an entry with a number has something else behind it."""
    return fault.kind == "partly read" and _ANOTHER_DEVICE.match(fault.entry) is None


def _severity_of(file: EnvironmentSource, listed: VisibleList) -> Severity | None:
    if listed.entries and _needs_one(file):
        return Severity.INFO
    return Severity.WARNING if listed.fault is not None and _reads_all(listed.fault) else None


_SEVERAL = re.compile(
    r"distributed|parallel|accelerat|lightning|deepspeed|horovod|trainer|device_map|device_count|cuda:[1-9]|\bray\b|vllm|"
    r"spawn|subprocess|num_gpus|n_gpus?\b|gpu_ids|devices?_ids|\bdevices\s*=|[\[(]\s*0\s*,\s*1\b",
    re.IGNORECASE,
)
"""Words of scripts that use more than one GPU, or start processes that may."""


def _needs_one(file: EnvironmentSource) -> bool:
    """Whether a script, with the modules of its project, puts its model on the current device alone, so that the first
    GPU of the list is enough."""
    if not isinstance(file, Script) or "cuda" not in file.text:
        return False
    around = file.modules.texts_around(file.location) if file.modules is not None and file.location else ()
    lines = (line for text in (file.text, *around) for line in text.splitlines())
    return not any(_SEVERAL.search(line) for line in lines if "CUDA_VISIBLE_DEVICES" not in line)
