"""Answers of NCCL's RAS service are read in both forms, and a count that differs for a moment accuses nobody."""

import json
from pathlib import Path

import pytest

from doctor.postmortem.ras.events import looks_like_ras, read_ras, with_progress
from doctor.postmortem.ras.responses import MOST_OPERATIONS, read_responses

DATA = Path(__file__).parents[1] / "data" / "ras"


def text_of(name):
    return (DATA / name).read_text()


def told(events, kind):
    return [event for event in events if event.kind == f"ras.{kind}"]


def ranks(events, kind):
    return [event.rank for event in told(events, kind)]


@pytest.mark.parametrize("name", ["healthy.txt", "stalled.txt", "answer.json"])
def test_answers_are_known_by_their_beginning(name):
    assert looks_like_ras(text_of(name))


def test_other_texts_are_none():
    for other in ("", "{}", '{"kind": "capture"}', "NCCL version 2.28.9+cuda13.0", "step 1\n" * 100, "Job summary"):
        assert not looks_like_ras(other)


def test_a_healthy_job_says_nothing():
    assert read_ras(text_of("healthy.txt")) == []


def test_who_is_dead_is_not_missing_too():
    events = read_ras(text_of("stalled.txt"), "ras.txt")
    (dead,) = told(events, "rank_dead")
    assert (dead.rank, dead.pid, dead.value("node"), dead.value("why")) == (7, 487984, "10.0.0.2", "dead")
    assert (dead.file, dead.text) == ("ras.txt", "Rank 7 -- GPU 3 managed by process 487984 on node 10.0.0.2")
    assert text_of("stalled.txt").splitlines()[dead.line - 1].strip() == dead.text
    assert told(events, "rank_missing") == []


def test_a_silent_rank_is_missing():
    text = text_of("stalled.txt")
    events = read_ras(text[: text.index("DEAD")] + text[text.index("#0-0") :])
    assert ranks(events, "rank_missing") == [7]
    assert told(events, "rank_missing")[0].value("why") == "unresponsive"


def test_errors_of_several_ranks_and_of_one():
    events = told(read_ras(text_of("stalled.txt")), "async_error")
    assert [(event.rank, event.value("error"), event.value("phase")) for event in events] == [
        (4, "Remote process error", "async"),
        (5, "Remote process error", "async"),
    ]
    alone = text_of("stalled.txt").replace(
        "  2 ranks reported Remote process error\n  Rank 4 --", "  Rank 4 reported Unhandled CUDA error --"
    )
    errors = [event.value("error") for event in told(read_ras(alone), "async_error")]
    assert errors[0] == "Unhandled CUDA error"


def test_ranks_that_are_behind():
    events = told(read_ras(text_of("stalled.txt")), "counts_differ")
    found = [tuple(event.value(name) for name in ("member", "operation", "launched", "most")) for event in events]
    assert found == [
        ("2", "AllReduce", "6649", "6650"),
        ("3", "AllReduce", "6649", "6650"),
        ("1", "AllReduce", "6648", "6650"),
        ("3", "AllGather", "0", "12"),
    ]
    assert [event.rank for event in events] == [2, 3, 1, 3]
    assert {event.value("stuck") for event in events} == {"unknown"}


def test_a_rank_of_a_part_of_the_job_is_known_by_its_process():
    """Its number in a smaller communicator is not its rank."""
    text = text_of("stalled.txt").replace("Rank 3 has not launched", "Rank 1 has not launched")
    last = told(read_ras(text), "counts_differ")[-1]
    assert (last.value("member"), last.rank) == ("1", 3)
    unknown = text.replace("process 483075 on node 10.0.0.1\n\n", "process 99 on node 10.0.0.9\n\n")
    last = told(read_ras(unknown), "counts_differ")[-1]
    assert (last.value("member"), last.rank) == ("1", None)


def test_a_status_unlike_that_of_most():
    (event,) = told(read_ras(text_of("stalled.txt")), "status_differs")
    assert (event.rank, event.value("status")) == (6, "ABORT")


def test_many_ranks_that_are_not_named():
    text = text_of("stalled.txt")
    start, end = text.index("  Rank 2 -- GPU 2"), text.index("  Rank 1 has launched")
    events = told(read_ras(text[:start] + text[end:]), "counts_differ")
    assert (events[0].rank, events[0].value("ranks"), events[0].value("launched")) == (None, "2", "6649")


def test_two_answers_tell_who_is_stuck():
    first = text_of("stalled.txt")
    later = first.replace("operation 6650", "operation 6700").replace("operation 6649", "operation 6690")
    stuck = {event.value("member"): event.value("stuck") for event in told(read_ras(first + first), "counts_differ")}
    assert stuck == {"2": "yes", "3": "yes", "1": "yes"}
    moved = told(read_ras(first + later), "counts_differ")
    assert {event.value("stuck") for event in moved if event.value("operation") == "AllReduce"} == {"no"}
    assert len(moved) == 4


def test_answers_of_two_files():
    first, second = (read_ras(text_of("stalled.txt"), name) for name in ("1.txt", "2.txt"))
    stuck = told(with_progress([*first, *second]), "counts_differ")
    assert {event.value("stuck") for event in stuck} == {"yes"}
    assert {event.file for event in stuck} == {"2.txt"}


def test_json():
    events = read_ras(text_of("answer.json"), "ras.json")
    (missing,) = told(events, "rank_missing")
    assert (missing.rank, missing.pid, missing.value("node")) == (2, 1524346, "172.16.64.246")
    (error,) = told(events, "async_error")
    assert (error.rank, error.value("error")) == (1, "Remote process error")
    (behind,) = told(events, "counts_differ")
    assert (behind.rank, behind.value("operation"), behind.value("launched")) == (1, "AllReduce", "11")
    assert behind.at == 1773925613
    assert {event.kind for event in events} == {"ras.rank_missing", "ras.async_error", "ras.counts_differ"}


def test_json_with_a_comma_missing():
    """Some releases leave one out in the list of missing ranks."""
    broken = text_of("answer.json").replace(
        '"nvml_dev": 0,\n          "status": {\n            "unr',
        '"nvml_dev": 0\n          "status": {\n            "unr',
    )
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    assert [event.kind for event in read_ras(broken)] == [event.kind for event in read_ras(text_of("answer.json"))]


def test_json_twice_and_dead():
    text = text_of("answer.json")
    stuck = told(read_ras(text + "\n" + text), "counts_differ")
    assert [event.value("stuck") for event in stuck] == ["yes"]
    assert ranks(read_ras(text.replace('"considered_dead": false', '"considered_dead": true')), "rank_dead") == [2]


def test_two_ranks_on_one_device():
    shared = text_of("answer.json").replace(
        '"cuda_dev": 1,\n          "nvml_dev": 1', '"cuda_dev": 0,\n          "nvml_dev": 0'
    )
    (event,) = told(read_ras(shared), "device_shared")
    assert (event.value("members"), event.value("node")) == ("0,1", "172.16.64.245")
    assert told(read_ras(text_of("answer.json")), "device_shared") == []


def test_what_is_cut_short():
    for name in ("stalled.txt", "answer.json"):
        text = text_of(name)
        for end in range(0, len(text), 37):
            read_ras(text[:end])


def test_a_report_of_operations_that_nccl_does_not_have_is_read_in_part():
    ranks = [{"rank": number, "collective_counts": {f"Operation{number}": 1}} for number in range(500)]
    document = {"nccl_version": "2.29.1", "communicators": [{"hash": "0x1", "size": 500, "ranks": ranks}]}
    (one,) = read_responses(json.dumps(document))[0].communicators
    assert len({lagging.operation for lagging in one.lagging}) == MOST_OPERATIONS
