"""Modules that only configurations name, and that need packages which their project does not require (CODE022)."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE022"))
PART = "from tracker.client import Client\nfrom lightning.pytorch.loggers.base import rank_zero_experiment\n"
PROGRAM = "import logging\nimport lightning.pytorch as pl\n\npl.Trainer(devices=2).fit(net)\n"
FILES = {
    "requirements.txt": "lightning==2.5.0\n",
    "own/reports.py": PART,
    "reports.yaml": "logger:\n  _target_: own.reports.Own\n",
    "train.py": PROGRAM,
}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, "warning"),
        ({"requirements.txt": "lightning==2.5.0\ntracker\n"}, "error"),
        ({"tracker/client.py": "Client = None\n"}, "error"),
        ({"train.py": PROGRAM + "from own import reports\n"}, "error"),
        ({"own/reports.py": "\n".join(reversed(PART.splitlines()))}, "error"),
        ({"own/reports.py": PART.replace("tracker.client", "json")}, "error"),
    ],
)
def test_part_that_needs_another_package_first(tmp_path, changes, severity):
    assert severities_in(tmp_path, {**FILES, **changes}, BOOK) == [("CODE022", severity)]


@pytest.mark.parametrize(("users", "severity"), [("", "warning"), ("from own.logging import Client\n", "error")])
def test_part_with_the_name_of_a_standard_module(tmp_path, users, severity):
    files = {
        **{name: text for name, text in FILES.items() if name != "own/reports.py"},
        "own/logging.py": PART,
        "reports.yaml": "logger:\n  _target_: own.logging.Own\n",
        "train.py": PROGRAM + users,
    }
    assert severities_in(tmp_path, files, BOOK) == [("CODE022", severity)]
