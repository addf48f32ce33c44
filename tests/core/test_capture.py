import json

import msgspec
import pytest

from doctor.core.capture import (
    from_document,
    merge_captures,
    parse_capture,
    read_capture,
    same_run,
    to_document,
    to_record,
)
from doctor.core.check_registry import load_registry
from doctor.core.check_runner import examine_job as examine
from doctor.core.errors import UnusableError
from doctor.facts import EnvironmentFacts, HostFacts, LaunchFacts, ProcessFacts, ProgressFacts
from doctor.testing import healthy, running


def captured(sketch):
    return parse_capture(msgspec.json.encode(to_document(sketch.job())), "capture")


def document():
    return to_document(healthy(hosts=2, per_host=2, rdma=1).job())


def test_a_job_survives_the_way_there_and_back():
    once = document()
    again = to_document(from_document(once))
    assert {**again, "created": ""} == {**once, "created": ""}


def test_a_capture_is_judged_as_the_job_itself():
    sketch = healthy(hosts=2, per_host=2).environ(ranks=(1,), NCCL_SOCKET_IFNAME="eth9")
    catalog = load_registry(plugins=False)

    def verdicts(job):
        return [(r.id, r.status, [f.ranks for f in r.findings]) for r in examine(job, catalog)]

    assert verdicts(from_document(to_document(sketch.job()))) == verdicts(sketch.job())


def test_sections_of_a_later_release_are_passed_over():
    changed = document()
    changed["ranks"][0]["facts"]["aura"] = {"colour": "blue"}
    changed["ranks"][0]["facts"]["process"]["mood"] = "calm"
    assert from_document(changed).ranks[0].find(ProcessFacts) is not None


def hostile():
    valid = document()
    text = json.dumps(valid)
    yield "newer schema", json.dumps({**valid, "schema": 2}), "has schema 2; this release reads schema 1"
    yield "schema of another type", json.dumps({**valid, "schema": "1"}), "has schema 1; this release reads"
    yield "no schema", '{"kind": "capture"}', "has schema None"
    yield "another kind", '{"kind": "report", "schema": 1}', "is not a capture"
    yield "truncated", text[: len(text) // 2], "not a valid capture"
    yield "no JSON", "hello", "not a valid capture"
    yield "empty", "", "not a valid capture"
    yield "not UTF-8", b"\xff\xfe{", "not a valid capture"
    yield "deep lists", '{"schema": 1, "kind": "capture", "x": ' + "[" * 300_000, "nested too deeply"
    yield "deep tables", '{"schema":1,"kind":"capture","ranks":' + '{"a":' * 200_000, ""
    yield (
        "huge number",
        json.dumps({**valid, "world_size": 0}).replace('"world_size": 0', '"world_size": ' + "9" * 5000),
        "",
    )
    yield "huge world", json.dumps({**valid, "world_size": 10**12}), "claims a world of 1000000000000 ranks"
    yield "negative world", json.dumps({**valid, "world_size": -1}), "claims a world of -1 ranks"
    yield "wrong type", json.dumps({**valid, "ranks": "all"}), "not a valid capture"
    yield "no rank", json.dumps({**valid, "ranks": []}), "contains no rank"
    yield "no kind\nof ours", json.dumps({**valid, "kind": "a\nb"}), "its kind is 'a b'"
    yield "absent beyond the world", json.dumps({**valid, "absent": [4]}), "misses ranks that a world of 4"
    yield "negative absent", json.dumps({**valid, "absent": [-1]}), "misses ranks that a world of 4"
    yield "rank of no job", text.replace('"rank": 3', f'"rank": {10**30}'), "a rank number that is too large"
    yield "a host that is not there", text.replace('"host": 1', '"host": 7'), "rank 2 refers to host 7 of 2"
    yield "a negative host", text.replace('"host": 1', '"host": -1'), "rank 2 refers to host -1 of 2"
    yield "a section of the wrong type", text.replace('"mtu": 9000', '"mtu": "wide"'), "malformed in interfaces"


@pytest.mark.parametrize(("data", "words"), [case[1:] for case in hostile()], ids=[case[0] for case in hostile()])
def test_hostile_input_is_one_sentence(data, words, tmp_path):
    path = tmp_path / "capture.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(UnusableError) as caught:
        read_capture(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_more_than_4_mb_for_a_rank_are_refused():
    big = document()
    big["ranks"][0]["facts"]["environment"] = {"variables": [{"name": "NCCL_X", "value": "x" * (5 << 20)}]}
    with pytest.raises(UnusableError, match="more than 4 MB are refused"):
        from_document(big)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UnusableError, match="No such file"):
        read_capture(tmp_path / "none.json")


def test_captures_of_single_ranks_become_one_job():
    whole = healthy(hosts=2, per_host=2)
    parts = [captured(whole.only((rank,))) for rank in (2, 0, 3)]
    job = merge_captures(parts)
    assert [rank.number for rank in job.ranks] == [0, 2, 3]
    assert (job.world_size, job.ungathered, len(job.hosts)) == (4, 1, 2)


def test_of_two_captures_of_one_process_the_later_counts():
    old = captured(healthy(1, 2))
    new = captured(healthy(1, 2).alter(ProcessFacts, ranks=(1,), threads_per_process=9))
    old = msgspec.structs.replace(old, created="2026-01-01T00:00:00+00:00")
    job = merge_captures([new, old])
    assert len(job.ranks) == 2
    assert job.ranks[1].find(ProcessFacts).threads_per_process == 9


def test_two_processes_with_one_rank_stay_two():
    twice = healthy(hosts=1, per_host=2).alter(LaunchFacts, ranks=(1,), rank=0).renumbered(1, 0)
    job = merge_captures([captured(twice)])
    assert [rank.number for rank in job.ranks] == [0, 0]


def test_lone_processes_of_several_hosts_get_numbers():
    alone = [captured(healthy(1, 1).alter(HostFacts, hostname=name, boot_id=name)) for name in ("a", "b", "c")]
    job = merge_captures(alone)
    assert [rank.number for rank in job.ranks] == [0, 1, 2]
    assert (job.world_size, job.ungathered) == (3, 0)


def test_bytes_that_are_no_text_are_one_sentence(tmp_path):
    path = tmp_path / "capture.json"
    path.write_bytes(b'{"schema":1,"kind":"capture","created":"\xed\xa0\x80","hosts":[],"ranks":[]}')
    with pytest.raises(UnusableError, match="not a valid capture"):
        read_capture(path)


def recorded(sketch, rank, run="abc-1"):
    document = to_record(sketch.only((rank,)).job(), run)
    return parse_capture(msgspec.json.encode({**document, "world_size": 3}), "record")


def test_records_of_a_run_become_one_job():
    """Their ranks are what they say, also where nothing in the environment numbers them (spawned processes)."""
    sketch = running(1, 3).alter(LaunchFacts, rank=None, world_size=None, running_together="")
    job = merge_captures([recorded(sketch, rank) for rank in (2, 0)])
    assert [rank.number for rank in job.ranks] == [0, 2]
    assert (job.world_size, job.ungathered) == (3, 1)
    assert job.ranks[1].find(ProgressFacts) == sketch.job().ranks[2].find(ProgressFacts)


def test_of_two_records_of_a_rank_the_later_counts():
    """A rank that was started again is one rank, whatever its process."""
    old = recorded(running(1, 3), 1)
    new = recorded(running(1, 3, batch=70).alter(ProcessFacts, pid=77), 1)
    job = merge_captures([new, msgspec.structs.replace(old, created="2026-01-01T00:00:00+00:00")])
    assert [rank.find(ProgressFacts).batch for rank in job.ranks] == [70]


def test_what_was_captured_before_a_run_fills_the_gaps_of_its_record():
    before = captured(healthy(1, 3).alter(ProcessFacts, pid=77))
    watched = running(1, 3).drop(EnvironmentFacts)
    job = merge_captures([recorded(watched, rank) for rank in range(3)] + [before])
    assert [rank.number for rank in job.ranks] == [0, 1, 2]
    assert job.ranks[1].sections["environment"] == before.job().ranks[1].sections["environment"]
    assert job.ranks[1].find(ProcessFacts) == watched.job().ranks[1].find(ProcessFacts)
    elsewhere = captured(healthy(1, 3).alter(HostFacts, hostname="other", boot_id="other"))
    assert len(merge_captures([recorded(watched, 0), elsewhere]).ranks) == 4


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("abc-1", "abc-1", True),
        ("abc-1", "abc-2", False),
        ("abc-1", "abc", True),
        ("abc", "abc", True),
        ("abc-1", "xyz", False),
        ("", "", True),
        ("", "abc-1", False),
    ],
)
def test_ids_of_runs(one, other, same):
    assert same_run(one, other) is same
    assert same_run(other, one) is same
