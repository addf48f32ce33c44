"""Tables of torch's debug server about flight recorders.

The recorded file is what torch 2.13 prints of three dumps with two completed collectives, and a third one that rank 1
has not entered.
"""

from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.core.facts import RecorderFacts
from doctor.core.facts.section import in_unicode
from doctor.postmortem.file_kinds import kind_of, kind_of_head
from doctor.postmortem.run_reader import read_runs
from doctor.postmortem.stacks.recorder_tables import looks_like_recorder_tables, read_recorder_tables

FILE = Path(__file__).parents[2] / "data" / "stacks" / "fr_trace" / "fr_trace_20261123_144410.txt"
TEXT = FILE.read_text()


def test_calls_of_each_rank():
    found = read_recorder_tables(TEXT)
    calls = {
        rank: [(one.operation, one.sequence, one.state, one.backend) for one in facts.collectives]
        for rank, facts in found.items()
    }
    common = [("all_reduce", 1, "completed", "nccl"), ("all_gather_into_tensor", 2, "completed", "nccl")]
    last = ("all_reduce", 3, "started", "nccl")
    assert calls == {0: [*common, last], 1: common, 2: [*common, last]}
    assert {facts.groups[0].members for facts in found.values()} == {(0, 1, 2)}
    assert {facts.groups[0].description for facts in found.values()} == {"default_pg"}


def test_the_rank_that_did_not_enter_is_named():
    assert kind_of(FILE) == "stacks"
    (run,) = read_runs([FILE])
    assert all(rank.find(RecorderFacts) is not None for rank in run.job.ranks)
    found = diagnose_stall(run.job)
    assert (found.kind, found.ranks, found.waiting) == ("missing", (1,), (0, 2))


def test_ranks_that_did_not_answer_are_listed_first():
    text = f"PARTIAL DATA: 2/3 workers responded\n  Rank 1: Timeout: x\n\n{TEXT}"
    assert looks_like_recorder_tables(text)
    assert read_recorder_tables(text) == read_recorder_tables(TEXT)


def test_a_log_that_mentions_the_tables_stays_a_log():
    assert kind_of_head(b"INFO: wrote === FR Trace === to a file\nstep 1\n") == "log"


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_table(data):
    text = TEXT
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 200)))
        text = text[:start] + data.draw(st.sampled_from([text[start:end] * 2, ""]) | st.text(max_size=30)) + text[end:]
    looks_like_recorder_tables(text)
    for facts in read_recorder_tables(text).values():
        msgspec.json.encode(in_unicode(facts))
