"""Everything that a rule may import, besides :class:`doctor.api.Severity` and pure standard library."""

from __future__ import annotations

from doctor.finding import Severity
from doctor.lint.rule import (
    MARK,
    Bad,
    DropArgument,
    Edit,
    Good,
    Hit,
    InsertStatement,
    Place,
    RenameArgument,
    ReplaceExpression,
    Rule,
    SetArgument,
    place_of,
    rule,
)
from doctor.lint.script import UNKNOWN, FunctionNode, Script

__all__ = [
    "MARK",
    "UNKNOWN",
    "Bad",
    "DropArgument",
    "Edit",
    "FunctionNode",
    "Good",
    "Hit",
    "InsertStatement",
    "Place",
    "RenameArgument",
    "ReplaceExpression",
    "Rule",
    "Script",
    "SetArgument",
    "Severity",
    "place_of",
    "rule",
]
