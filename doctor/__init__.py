"""rankdoctor: the doctor for distributed PyTorch training.

The public names, each loaded when it is first asked for: ``collect``, ``examine``, ``Job``, ``Report``, ``Finding``
and ``check``; in a run ``DoctorCallback`` (Lightning), ``HFDoctorCallback`` (Hugging Face Trainer) and ``watch`` (any
other loop); ``DoctorWarning`` and ``Findings``: what these warn with and raise.
"""

from doctor.import_path import is_main_package, leave_working_directory

if is_main_package():
    # Before any other import: "python -m" has put the working directory in front of the standard library.
    leave_working_directory()

TYPE_CHECKING = False
"""As in ``typing``, which would have to be imported; type checkers know the name."""

if TYPE_CHECKING:
    from doctor.checking import check
    from doctor.finding import Finding
    from doctor.integrations.findings import Findings
    from doctor.integrations.lightning import DoctorCallback as DoctorCallback
    from doctor.integrations.plain import watch
    from doctor.integrations.transformers import HFDoctorCallback as HFDoctorCallback
    from doctor.job import Job
    from doctor.outlets.python_warnings import DoctorWarning
    from doctor.result import Report
    from doctor.session import collect, examine
    from doctor.version import __version__

_HOMES = {
    "collect": "doctor.session",
    "examine": "doctor.session",
    "Job": "doctor.job",
    "Report": "doctor.result",
    "Finding": "doctor.finding",
    "check": "doctor.checking",
    "watch": "doctor.integrations.plain",
    "DoctorCallback": "doctor.integrations.lightning",
    "HFDoctorCallback": "doctor.integrations.transformers",
    "DoctorWarning": "doctor.outlets.python_warnings",
    "Findings": "doctor.integrations.findings",
    "__version__": "doctor.version",
}

# The callbacks are left out: each needs its framework, and "import *" must not.
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

        from doctor.random_state import random_state_kept

        with random_state_kept():
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
