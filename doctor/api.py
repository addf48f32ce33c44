"""What a check or a rule imports, with :mod:`doctor.facts` and :mod:`doctor.testing`; plugins may rely on it.

Helpers of one family live beside its checks; ``doctor.analysis`` and ``doctor.knowledge`` are internal, and built-in
checks name the modules that they use. A test pins these names. What rules import is loaded at its first use, because
a process that evaluates checks needs nothing of ``doctor.lint``.
"""

import importlib as _importlib
import typing as _typing

from doctor.analysis.stats.baseline import BaselineDeviation as BaselineDeviation
from doctor.analysis.stats.baseline import BaselineValue as BaselineValue
from doctor.analysis.stats.baseline import baseline_value as baseline_value
from doctor.analysis.stats.baseline import baseline_values as baseline_values
from doctor.analysis.stats.baseline import stands_alone as stands_alone
from doctor.analysis.stats.majority import MajoritySplit as MajoritySplit
from doctor.analysis.stats.majority import correlates as correlates
from doctor.analysis.stats.majority import describe as describe
from doctor.analysis.stats.majority import split as split
from doctor.analysis.stats.majority import split_groups as split_groups
from doctor.core.check import Check as Check
from doctor.core.check import check as check
from doctor.core.finding import ALONE as ALONE
from doctor.core.finding import Finding as Finding
from doctor.core.finding import Scope as Scope
from doctor.core.finding import Severity as Severity
from doctor.core.finding import Skip as Skip
from doctor.core.finding import Source as Source
from doctor.core.finding import Status as Status
from doctor.core.finding import Unknown as Unknown
from doctor.core.finding import Verdict as Verdict
from doctor.core.finding import merge as merge
from doctor.core.finding import source_of as source_of
from doctor.core.job import Facts as Facts
from doctor.core.job import Group as Group
from doctor.core.job import Host as Host
from doctor.core.job import Job as Job
from doctor.core.job import LocalRanks as LocalRanks
from doctor.core.job import Rank as Rank
from doctor.core.logs.event_groups import EventGroup as EventGroup
from doctor.core.logs.event_groups import event_groups as event_groups
from doctor.core.logs.event_groups import finding_from_logs as finding_from_logs
from doctor.core.logs.event_groups import is_logged as is_logged
from doctor.core.logs.event_groups import line_of as line_of
from doctor.core.section_table import IdenticalRanks as IdenticalRanks
from doctor.core.text import conjunction as conjunction
from doctor.core.text import hosts_text as hosts_text
from doctor.core.text import ranks_in_words as ranks_in_words
from doctor.knowledge.releases import is_older as is_older

if _typing.TYPE_CHECKING:
    from doctor.lint.engine.rule import DropArgument as DropArgument
    from doctor.lint.engine.rule import Edit as Edit
    from doctor.lint.engine.rule import FileFails as FileFails
    from doctor.lint.engine.rule import FilePasses as FilePasses
    from doctor.lint.engine.rule import InsertStatement as InsertStatement
    from doctor.lint.engine.rule import RenameArgument as RenameArgument
    from doctor.lint.engine.rule import ReplaceExpression as ReplaceExpression
    from doctor.lint.engine.rule import Rule as Rule
    from doctor.lint.engine.rule import SetArgument as SetArgument
    from doctor.lint.engine.rule import SourceLocation as SourceLocation
    from doctor.lint.engine.rule import Violation as Violation
    from doctor.lint.engine.rule import location_of as location_of
    from doctor.lint.engine.rule import rule as rule
    from doctor.lint.launch.launch_file import LaunchFile as LaunchFile
    from doctor.lint.python.script import Script as Script

_RULES = "doctor.lint.engine.rule"
_LAZY = {
    "DropArgument": _RULES,
    "Edit": _RULES,
    "FileFails": _RULES,
    "FilePasses": _RULES,
    "InsertStatement": _RULES,
    "RenameArgument": _RULES,
    "ReplaceExpression": _RULES,
    "Rule": _RULES,
    "SetArgument": _RULES,
    "SourceLocation": _RULES,
    "Violation": _RULES,
    "location_of": _RULES,
    "rule": _RULES,
    "LaunchFile": "doctor.lint.launch.launch_file",
    "Script": "doctor.lint.python.script",
}
"""Name -> the module of ``doctor.lint`` that defines it."""
__all__ = sorted({name for name in globals() if not name.startswith("_")} | _LAZY.keys())


def __getattr__(name: str) -> _typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
