"""GPU003 in launch files: CUDA_VISIBLE_DEVICES is not valid."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import parse_visible_devices
from doctor.api import Violation, rule
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
        passes("in a script, one for each rank", 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]\n'),
        passes("in a script, a list", 'os.environ["CUDA_VISIBLE_DEVICES"] = "0, 1"\n'),
    ),
)
def visible_devices_invalid_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether CUDA reads a list of devices that a file sets as intended."""
    for setting in file.settings:
        value = setting.known_value if setting.name == "CUDA_VISIBLE_DEVICES" and setting.is_exported else None
        fault = parse_visible_devices(value).fault if value is not None else None
        if fault is not None:
            yield Violation(
                setting.place,
                f"{shown_list(value or '')} {fault_text(fault, 0)}",
                fix=fix_of_fault(fault, value or ""),
                evidence=(("value", value),),
            )
