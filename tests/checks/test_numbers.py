"""Values that are no numbers: what is said of them is what was seen."""

from doctor.api import Severity
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.facts import NonFinite, ReplicaFacts
from doctor.testing import running


def test_nobody_knows_whether_a_step_that_all_ranks_spoil_alike_was_taken():
    check = next(one for one in builtin_checks() if one.id == "RUN008")
    spoilt = ReplicaFacts(losses=200, non_finite=(NonFinite(3, "loss", value="inf"),))
    (result,) = examine_job(running(1, 2).put(spoilt).job(), CheckRegistry((check,)))
    (finding,) = result.findings
    assert finding.severity is Severity.INFO
    assert finding.summary == "The loss became Inf on all ranks in batch 3: no single rank is at fault"
    assert "a gradient scaler skips it" in finding.effect
