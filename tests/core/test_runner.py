"""The loop around collectors forgives everything and waits for nothing for ever."""

import os
import signal
import time

import psutil
import pytest
from msgspec.structs import replace

from doctor.collectors import MODULES, collector_for
from doctor.collectors.base import Collector, Machine, NotPresent, NotVisible
from doctor.collectors.runner import collect_facts, collect_sections, decode_outcome, encode_outcome, run_collector
from doctor.core.facts import SECTIONS, HostFacts, Missing, MissingReason, NameLookup, ProcessFacts
from doctor.core.process import abandon_child, start_child

HERE = Machine(environ={})


def collector(collect, **options):
    return Collector(ProcessFacts, collect, **options)


def raising(error):
    def collect(machine):
        raise error

    return collect


@pytest.mark.parametrize(
    ("error", "lack"),
    [
        (NotPresent("no driver"), MissingReason.ABSENT),
        (NotVisible("no permission", "run as root"), MissingReason.HIDDEN),
        (ZeroDivisionError("oops"), MissingReason.FAILED),
        (RecursionError("deep"), MissingReason.FAILED),
    ],
)
def test_what_goes_wrong_becomes_a_fact(error, lack):
    outcome = run_collector(collector(raising(error)), HERE)
    assert outcome.lack is lack
    assert str(error) in outcome.reason


def test_one_that_blocks_costs_its_deadline_and_the_others_are_there():
    def block(machine):
        time.sleep(30)

    slow = Collector(HostFacts, block, deadline=0.3)
    told = []
    outcomes = collect_sections([slow, collector(lambda s: ProcessFacts(pid=7))], HERE, announce=told.append)
    assert outcomes["process"] == ProcessFacts(pid=7)
    assert outcomes["host"].lack is MissingReason.TIMEOUT
    assert not told


def test_somebody_who_waits_is_told_what_for(monkeypatch):
    monkeypatch.setattr("doctor.collectors.runner.PATIENCE", 0.05)

    def take_time(machine):
        time.sleep(0.3)
        return ProcessFacts()

    told = []
    collect_sections([collector(take_time)], HERE, announce=told.append)
    assert told == ["still reading process (at most 5 s)"]


def test_a_collector_that_cannot_be_loaded_is_broken_like_any_other(monkeypatch):
    monkeypatch.setitem(MODULES, "host", "no_such_module")
    outcomes = collect_facts(["host", "process"], Machine())
    assert outcomes["host"].lack is MissingReason.FAILED
    assert isinstance(outcomes["process"], ProcessFacts)


def test_an_isolated_one_runs_in_a_process_of_its_own():
    isolated = replace(collector_for("process"), isolated=True)
    outcome = run_collector(isolated, Machine())
    assert isinstance(outcome, ProcessFacts)
    assert outcome.pid != os.getpid()


@pytest.mark.parametrize("outcome", [ProcessFacts(pid=3, cpus_allowed=(0, 1)), Missing(MissingReason.ABSENT, "none")])
def test_outcomes_survive_the_way_between_processes(outcome):
    assert decode_outcome("process", encode_outcome(outcome)) == outcome


def test_every_collected_section_has_a_collector_and_no_other():
    collected = {key for key, section in SECTIONS.items() if section.origin == "collected"}
    assert set(MODULES) == collected
    for key in MODULES:
        assert collector_for(key).section is SECTIONS[key]
        assert 0 < collector_for(key).deadline <= 15


def test_names_that_are_not_utf8_can_be_written_down():
    outcome = run_collector(collector(lambda _: HostFacts(hostname="n\udcffode", names=(NameLookup("a\udc80"),))), HERE)
    assert outcome == HostFacts(hostname="n\ufffdode", names=(NameLookup("a\ufffd"),))
    assert decode_outcome("host", encode_outcome(outcome)) == outcome


def test_what_has_no_place_in_json_is_a_broken_collector():
    outcome = run_collector(collector(lambda _: ProcessFacts(pid=object())), HERE)
    assert outcome.lack is MissingReason.FAILED


def test_an_abandoned_child_is_killed_with_what_it_started():
    child = start_child(["sh", "-c", "sleep 600 & echo $!; wait"])
    grandchild = int(child.stdout.readline())
    abandon_child(child)
    assert child.returncode == -signal.SIGKILL
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
