"""The facts of the local rank between two rounds."""

from doctor.core.facts import HostFacts, ProgressFacts, StepFacts
from doctor.monitor.watchdog.local_state import LocalState


def test_a_look_leaves_the_other_facts_as_they_were():
    state = LocalState(0, ("b", "m", "here"))
    state.set_startup_facts({"host": HostFacts(hostname="here")})
    state.update({"progress": ProgressFacts(passed=1), "steps": StepFacts(seen=1)})
    state.update_some({"progress": ProgressFacts(passed=2)})
    assert state.member.sections == {
        "host": HostFacts(hostname="here"),
        "progress": ProgressFacts(passed=2),
        "steps": StepFacts(seen=1),
    }


def test_a_position_is_kept_until_all_facts_are_updated():
    state = LocalState(0, ("b", "m", "here"))
    state.update({"progress": ProgressFacts(passed=1)})
    assert not state.has_position
    state.set_position({"progress": ProgressFacts(passed=1, blocked="a lock")})
    assert state.has_position
    state.update({"progress": ProgressFacts(passed=1)})
    assert state.has_position
    assert state.member.sections["progress"].blocked == "a lock"
    state.update({"progress": ProgressFacts(passed=1, loops=9.0, blocked="the end of a search")})
    assert state.member.sections["progress"].blocked == "the end of a search"
    state.update({"progress": ProgressFacts(passed=2)})
    assert not state.has_position
    assert state.member.sections["progress"].blocked == ""
