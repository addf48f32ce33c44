"""The primary finding is a root: what another finding explains is not, whatever its severity."""

import pytest

from doctor.core.finding import Severity, Status
from doctor.core.report_document import CheckResult, ReportFinding
from doctor.core.report_summary import primary_of

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def result(name, severity, explained_by=None, confidence=0.9):
    finding = ReportFinding("x", severity, None, (), (), {}, "", "", confidence, explained_by)
    return CheckResult(name, name.lower(), "f", Status.FAIL, severity, 1, 1, None, 0.0, (finding,))


@pytest.mark.parametrize(
    ("results", "primary"),
    [
        ([result("A", ERROR), result("B", ERROR, "A")], "A"),
        ([result("A", INFO), result("B", ERROR, "A")], "A"),
        ([result("A", INFO), result("B", ERROR, "A"), result("C", WARNING)], "A"),
        ([result("A", INFO), result("B", ERROR)], "B"),
        ([result("A", INFO), result("B", INFO, "A")], None),
        ([result("A", ERROR, confidence=0.2), result("B", ERROR, "A")], None),
        ([result("A", WARNING, "B"), result("B", ERROR, "A")], "B"),
        ([result("A", ERROR, "B"), result("B", WARNING, "C"), result("C", WARNING)], "C"),
    ],
)
def test_the_primary_finding_is_a_root(results, primary):
    assert primary_of(results) == primary
