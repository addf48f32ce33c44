"""Reports of watched jobs with findings made to order."""

from doctor.api import Finding, Severity, check
from doctor.core.check_registry import CheckRegistry
from doctor.core.settings import Settings
from doctor.facts import TrainingFacts
from doctor.monitor.sinks.finding_sink import FindingEvent
from doctor.session import judge
from doctor.testing import running


def result_of(check_id, name, *findings, severity=Severity.ERROR):
    """A check of that id and name that always finds the same."""

    def judged(job):
        yield from findings

    judged.__name__ = name.replace("-", "_")
    return check(id=check_id, severity=severity, needs=(TrainingFacts,))(judged)


DIED = Finding(
    "Rank 2 failed first: ValueError: bad sample",
    ranks=(2,),
    evidence={"error": "ValueError: bad sample"},
    effect="The others wait for it.",
    fix="Look at `train.py:42`.",
    explains=("RUN012",),
)
VANISHED = Finding("ranks lost their peer", ranks=(0, 1, 2, 3), effect="They end, too.", fix="See the cause.")
SLOW = Finding("rank 1 takes 1.9 times as long", ranks=(1,), effect="All wait.", fix="Look at its loader.")


def report_of(*checks, sketch=None, settings=None):
    """The report on a healthy job of four ranks on two hosts, by ``checks``."""
    return judge((sketch or running(2, 2)).job(), CheckRegistry(checks), settings or Settings())


def all_news(report):
    """Every finding of the report as if it had not been known."""
    return [FindingEvent(result, finding) for result in report.results for finding in result.findings]
