"""rankdoctor: the doctor for distributed PyTorch training.

The public names, each loaded when it is first asked for: ``collect``, ``examine``, ``Job``, ``Report``, ``Finding``
and ``check``; in a run ``DoctorCallback`` (Lightning), ``HFDoctorCallback`` (Hugging Face Trainer), ``DoctorTracker``
(Accelerate) and ``watch`` (any other loop); ``DoctorWarning`` and ``Findings``: what these warn with and raise.
"""

from doctor.core.import_path import is_main_package, leave_working_directory

if is_main_package():
    # Before any other import: "python -m" has put the working directory in front of the standard library.
    leave_working_directory()

import doctor.core.clock as _clock  # noqa: F401 - before the program replaces the functions of the clock

TYPE_CHECKING = False
"""As in ``typing``, which would have to be imported; type checkers know the name."""

if TYPE_CHECKING:
    from doctor.core.check import check
    from doctor.core.finding import Finding
    from doctor.core.job import Job
    from doctor.core.report_document import Report
    from doctor.monitor.autostart.accelerate_tracker import DoctorTracker as DoctorTracker
    from doctor.monitor.findings_error import Findings
    from doctor.monitor.integrations.lightning.callback import DoctorCallback as DoctorCallback
    from doctor.monitor.integrations.plain import watch
    from doctor.monitor.integrations.transformers.hf_callback import HFDoctorCallback as HFDoctorCallback
    from doctor.monitor.sinks.python_warnings import DoctorWarning
    from doctor.session import collect, examine
    from doctor.version import __version__

_HOMES = {
    "collect": "doctor.session",
    "examine": "doctor.session",
    "Job": "doctor.core.job",
    "Report": "doctor.core.report_document",
    "Finding": "doctor.core.finding",
    "check": "doctor.core.check",
    "watch": "doctor.monitor.integrations.plain",
    "DoctorCallback": "doctor.monitor.integrations.lightning.callback",
    "HFDoctorCallback": "doctor.monitor.integrations.transformers.hf_callback",
    "DoctorTracker": "doctor.monitor.autostart.accelerate_tracker",
    "DoctorWarning": "doctor.monitor.sinks.python_warnings",
    "Findings": "doctor.monitor.findings_error",
    "__version__": "doctor.version",
}

# The callbacks and the tracker are left out: each needs its framework, and "import *" must not.
__all__ = [
    "DoctorWarning",
    "Finding",
    "Findings",
    "Job",
    "Report",
    "__version__",
    "check",
    "collect",
    "examine",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        # Nothing of ours draws from random while it is imported; a framework may, as where the program imports it.
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
