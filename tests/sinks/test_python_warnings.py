import warnings

import pytest

from doctor.api import Finding, Severity
from doctor.monitor.sinks.python_warnings import DoctorWarning, WarningSink
from tests.sinks.reports import DIED, all_news, report_of, result_of


def warned(report, action="always"):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action)
        WarningSink().found(all_news(report), report)
    return seen


def test_a_finding_is_one_warning_of_a_category_of_its_own():
    (one,) = warned(report_of(result_of("RUN004", "rank-died", DIED)))
    assert one.category is DoctorWarning
    assert issubclass(DoctorWarning, UserWarning)
    assert str(one.message) == ("RUN004 rank-died: Rank 2 failed first: ValueError: bad sample (rank 2 (node1))")


def test_each_is_warned_of_by_the_usual_filter():
    """Which shows a warning once a line of code: all of ours come from one."""
    report = report_of(result_of("RUN004", "rank-died", DIED, Finding("another", ranks=(3,))))
    assert len(warned(report, "default")) == 2


def test_without_a_filter_of_the_user_they_are_not_shown_beside_the_console():
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        WarningSink().found(all_news(report := report_of(result_of("RUN004", "rank-died", DIED))), report)
    assert seen == []


def test_remarks_are_no_warnings():
    remark = result_of("RUN013", "communication-bound", Finding("40 %"), severity=Severity.INFO)
    assert warned(report_of(remark)) == []


def test_a_filter_that_turns_warnings_into_errors_does_not_end_the_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = report_of(result_of("RUN004", "rank-died", DIED))
        WarningSink().found(all_news(report), report)
        with pytest.raises(DoctorWarning):
            warnings.warn("the filter was in force", DoctorWarning, stacklevel=1)


def test_filters_can_name_category_and_module():
    report = report_of(result_of("RUN004", "rank-died", DIED))
    for how in ({"category": DoctorWarning}, {"module": "doctor"}, {"message": "RUN004"}):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", **how)
            WarningSink().found(all_news(report), report)
        assert seen == [], how


def test_a_flood_is_a_few_warnings_and_one_that_says_so():
    report = report_of(result_of("RUN008", "non-finite", *(Finding(f"rank {n}", ranks=(n % 4,)) for n in range(200))))
    seen = warned(report)
    assert len(seen) == 6
    assert "the report lists all of them" in str(seen[-1].message)
