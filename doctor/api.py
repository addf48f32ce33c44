"""What a check or a rule imports, with :mod:`doctor.facts` and :mod:`doctor.testing`; plugins may rely on it.

Helpers of one family live beside its checks; ``doctor.analysis`` and ``doctor.knowledge`` are internal, and built-in
checks name the modules that they use. A test pins these names.
"""

from __future__ import annotations

from doctor.analysis.interface_choice import hosts_text
from doctor.analysis.launch_origin import ranks_in_words
from doctor.analysis.stats.baseline import (
    BaselineDeviation,
    BaselineValue,
    baseline_value,
    baseline_values,
    stands_alone,
)
from doctor.analysis.stats.majority import MajoritySplit, correlates, describe, split, split_groups
from doctor.core.check import Check, check
from doctor.core.finding import (
    ALONE,
    Finding,
    Scope,
    Severity,
    Skip,
    Source,
    Status,
    Unknown,
    Verdict,
    merge,
    source_of,
)
from doctor.core.job import Facts, Group, Host, Job, LocalRanks, Rank
from doctor.core.logs.event_groups import EventGroup, event_groups, finding_from_logs, is_logged, line_of
from doctor.core.section_table import IdenticalRanks
from doctor.knowledge.releases import is_older
from doctor.lint.engine.rule import (
    DropArgument,
    Edit,
    FileFails,
    FilePasses,
    InsertStatement,
    RenameArgument,
    ReplaceExpression,
    Rule,
    SetArgument,
    SourceLocation,
    Violation,
    location_of,
    rule,
)
from doctor.lint.launch.launch_file import LaunchFile
from doctor.lint.python.script import Script

__all__ = [
    "ALONE",
    "BaselineDeviation",
    "BaselineValue",
    "Check",
    "DropArgument",
    "Edit",
    "EventGroup",
    "Facts",
    "FileFails",
    "FilePasses",
    "Finding",
    "Group",
    "Host",
    "IdenticalRanks",
    "InsertStatement",
    "Job",
    "LaunchFile",
    "LocalRanks",
    "MajoritySplit",
    "Rank",
    "RenameArgument",
    "ReplaceExpression",
    "Rule",
    "Scope",
    "Script",
    "SetArgument",
    "Severity",
    "Skip",
    "Source",
    "SourceLocation",
    "Status",
    "Unknown",
    "Verdict",
    "Violation",
    "baseline_value",
    "baseline_values",
    "check",
    "correlates",
    "describe",
    "event_groups",
    "finding_from_logs",
    "hosts_text",
    "is_logged",
    "is_older",
    "line_of",
    "location_of",
    "merge",
    "ranks_in_words",
    "rule",
    "source_of",
    "split",
    "split_groups",
    "stands_alone",
]
