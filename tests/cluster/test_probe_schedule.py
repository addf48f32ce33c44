"""Stages of measuring, driven as a keeper and an attendant drive them."""

from collections.abc import Callable
from typing import ClassVar

import msgspec
import pytest

from doctor.cluster.gather.probe_schedule import MARGIN, ProbeSchedule, light_schedule, probe_addresses
from doctor.cluster.gather.protocol import MemberFacts, ProbeTask
from doctor.cluster.gather.section_merge import merge_section, merge_sections
from doctor.cluster.transport.codec import MalformedMessage
from doctor.collectors.base import Machine
from doctor.core.job import build_job
from doctor.facts import DeviceSpeed, DeviceSpeedFacts, Missing, MissingReason, StorageSpeedFacts, StorageTrial
from doctor.probes.base import StageOrders, StageResult
from doctor.testing import healthy

TOKENS = tuple(f"{number:016x}" for number in range(4))


class Counting:
    """A stage of so many steps, in which everybody answers how often it was asked."""

    name: ClassVar[str] = "counting"
    makes: ClassVar = (DeviceSpeedFacts,)

    def __init__(self, steps: int = 2, name: str = "counting") -> None:
        self.most_seconds = 5.0
        self.name = name
        self.steps, self.asked, self.notes = steps, 0, []

    def plan(self, job, posts):
        self.notes.append([post.note for post in posts])
        if self.steps == 0:
            return None
        self.steps -= 1
        return StageOrders({post.token: b"count" for post in posts if post.speaks}, 3.0, f"{self.name}: nothing")

    def take_part(self, order, bench, deadline):
        assert order == b"count"
        assert 0 < deadline.left() <= 5
        self.asked += 1
        return StageResult({DeviceSpeedFacts.key: _product(self.asked)}, b"%d" % self.asked)


class Breaking(Counting):
    def take_part(self, order, bench, deadline):
        raise ZeroDivisionError("division\nby zero")


def _product(number):
    return DeviceSpeedFacts(samples=(DeviceSpeed(f"cpu {number}", seconds=1.0),))


def _records(hosts=2, per_host=2):
    job = healthy(hosts, per_host).job()
    return job, [
        MemberFacts(
            TOKENS[rank.number],
            rank.number,
            rank.host.name,
            b"",
            port=4000 + rank.number if rank.number % per_host == 0 else None,
            word="word",
        )
        for rank in job.ranks
    ]


def _schedule(*stages, told: Callable = lambda _: None, within=None):
    return ProbeSchedule(0, stages, Machine(), leads_host=False, write_line=told, within=within)


def test_participants_are_the_members_and_one_leads_each_host():
    job, arrivals = _records()
    posts = probe_addresses(job, arrivals, {TOKENS[2]: b"ready"})
    assert [(post.number, post.host, post.speaks, post.note) for post in posts] == [
        (0, 0, True, b""),
        (1, 0, False, b""),
        (2, 1, True, b"ready"),
        (3, 1, False, b""),
    ]


def test_two_processes_that_claim_one_rank_are_two_posts():
    _, arrivals = _records(1, 2)
    twins = [arrivals[0], msgspec.structs.replace(arrivals[0], token=TOKENS[3], port=4009)]
    both = build_job([healthy(1, 2).members[0]] * 2)
    posts = probe_addresses(both, twins, {})
    assert [post.number for post in posts] == [0, 0]
    assert [post.speaks for post in posts] == [True, False]


def test_steps_go_on_until_a_stage_has_nothing_to_plan():
    job, arrivals = _records()
    told = []
    first, second = Counting(2, "one"), Counting(1, "two")
    survey = _schedule(first, second, told=told.append)
    notes, plans = {}, []
    while (plan := survey.next(job, arrivals, notes, 60.0)) is not None:
        plans.append(plan)
        notes = {token: survey.take_part(task).note for token, task in plan.tasks.items()}
    assert [[task.stage for task in plan.tasks.values()] for plan in plans] == [["one"] * 2, ["one"] * 2, ["two"] * 2]
    assert [task.step for plan in plans for task in plan.tasks.values()] == [1, 1, 2, 2, 3, 3]
    assert told == ["one: nothing", "one: nothing", "two: nothing"]
    assert first.notes == [[b""] * 4, [b"1", b"", b"2", b""], [b"3", b"", b"4", b""]]
    assert second.notes[0] == [b""] * 4, "notes are of one stage"


def test_no_step_begins_without_time():
    job, arrivals = _records()
    survey = _schedule(Counting(5))
    assert survey.next(job, arrivals, {}, MARGIN + 1.0).seconds == pytest.approx(1.0 + MARGIN)
    assert survey.next(job, arrivals, {}, MARGIN) is None


def test_a_stage_that_plans_for_ever_is_ended():
    job, arrivals = _records()
    survey = _schedule(Counting(10**9))
    count = 0
    while survey.next(job, arrivals, {}, 60.0) is not None:
        count += 1
        assert count < 100


def test_a_probe_that_breaks_is_missing_and_says_why():
    told = []
    survey = _schedule(Breaking(), told=told.append)
    found = survey.take_part(ProbeTask(1, "counting", 3.0, b"count"))
    missing = found.sections[DeviceSpeedFacts.key]
    assert missing == Missing(MissingReason.FAILED, "the probe counting raised ZeroDivisionError: division")
    assert told == [missing.reason]


def test_a_task_of_an_unknown_stage_is_answered_with_nothing():
    assert _schedule().take_part(ProbeTask(1, "of a later release", 3.0)) == StageResult({})


@pytest.mark.parametrize("order", [b"", b"\xc1", b"\xa2\xff\xfe", b"\x80"])
def test_an_order_that_is_none_is_unreadable(order):
    survey = light_schedule(0, 10.0, Machine(), leads_host=False, write_line=lambda _: None)
    with pytest.raises(MalformedMessage):
        survey.take_part(ProbeTask(1, "light", 1.0, order))


def test_light_probes_end_with_the_gathering_and_full_ones_begin_then():
    light = light_schedule(0, 10.0, Machine(), leads_host=False, write_line=lambda _: None)
    assert (light.seconds, light.overtime) == (5.0, 0.0)
    full = _schedule(Counting(), Counting())
    assert full.seconds == full.overtime == 2 * (5.0 + MARGIN)


def test_sections_of_several_steps_are_joined():
    one, two = _product(1), _product(2)
    assert merge_section(one, two).samples == (*one.samples, *two.samples)
    assert merge_section(one, one) == one
    missing = Missing(MissingReason.TIMEOUT, "late")
    assert merge_section(one, missing) == merge_section(missing, one) == one
    assert merge_section(missing, Missing(MissingReason.FAILED, "broke")).reason == "broke"
    storage = StorageSpeedFacts(trials=(StorageTrial("/data", "checkpoint"),))
    sections = merge_sections({one.key: one, storage.key: storage}, {one.key: two})
    assert sections == {one.key: merge_section(one, two), storage.key: storage}
