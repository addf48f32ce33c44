"""Dumps of the flight recorder that nobody wrote: random bytes, broken dumps, odd values in the right places."""

import pickle
import resource

import msgspec
import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor.analysis.hang.diagnosis_rules import diagnose_stall, silent_mismatches
from doctor.core.facts import RecorderFacts
from doctor.core.job import Member, build_job
from doctor.core.stack_dumps.recorder_dump import parse_recorder
from doctor.postmortem.flight_recorder.dumps import read_dumps
from doctor.postmortem.flight_recorder.unpickling import looks_like_dump
from tests.lab.sample import examples

ROUNDS = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
MANY = settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck), database=None)

OPCODES = [
    *(bytes([code]) for code in b"(.012FILMSTUVGJKNP QRXabcdeghijlopqrstu)]}\x80\x81\x82\x83\x84\x85\x86\x87\x88\x89"),
    *(bytes([code]) for code in range(0x8A, 0x99)),
    b"cos\nsystem\n",
    b"(ios\nsystem\n",
    b"X\x04\x00\x00\x00true",
    b"\x8c\x02os\x94\x8c\x06system\x94\x93",
    b"r\xff\xff\xff\x0f",
    b"\x8e\xff\xff\xff\xff\xff\x00\x00\x00",
    b"\x8b\xff\xff\xff\x7f",
    b"\x00",
    b"\xff\xff\xff\xff",
    b"\n",
]
SOUND = {
    "record_id": 0,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "op_id": 1,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 10**18,
    "duration_ms": 0.5,
    "input_sizes": [[4]],
    "input_dtypes": ["Float"],
    "output_sizes": [[4]],
    "output_dtypes": ["Float"],
    "state": "scheduled",
    "retired": False,
    "timeout_ms": 600_000,
    "is_p2p": False,
    "frames": [{"name": "f", "filename": "/home/me/train.py", "line": 7}],
}
"""A sound entry."""
KEYS = [*SOUND, "seq_id", "name", "desc", "ranks", "filename", "line", "last_enqueued_collective"]
NAMES = ["nccl:all_reduce", "gloo:barrier", "nccl:send 0->1", "nccl:recv 1<-0", "nccl:coalesced", "a b->c", "x:y:z 9->"]


def whole(entries=12):
    """The bytes of a sound dump."""
    calls = [{**SOUND, "record_id": number, "collective_seq_id": number + 1} for number in range(entries)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    status = {"0": {"last_enqueued_collective": entries, "last_completed_collective": 0}}
    values = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": calls}
    return pickle.dumps(values, 2)


edits = st.lists(st.tuples(st.integers(0, len(whole()) - 1), st.integers(0, 255)), min_size=1, max_size=8)


def edited(changes):
    data = bytearray(whole())
    for position, value in changes:
        data[position] = value
    return bytes(data)


files = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=100).map(lambda tail: b"\x80\x02}" + tail),
    edits.map(edited),
    st.integers(0, len(whole())).map(lambda end: whole()[:end]),
    st.lists(st.sampled_from(OPCODES), max_size=60).map(lambda codes: b"\x80\x04" + b"".join(codes)),
    st.text(alphabet='{}[]":,0123456789entriespg_config', max_size=200).map(str.encode),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def most_resident():
    """KiB that a reader may take; of the children of earlier tests, the largest one counts as well."""
    return max(3 << 20, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


@ROUNDS
@given(st.lists(files, min_size=20, max_size=20))
def test_any_bytes_are_a_dump_or_said_to_be_none(folder, most_resident, contents):
    paths = [folder / f"rank_{rank}" for rank in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
        looks_like_dump(content)
    dumps, skipped = read_dumps(paths)
    assert len(dumps) + len(skipped) == len(paths)
    assert all(reason.isprintable() and "Traceback" not in reason for _, reason in skipped)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= most_resident
    diagnose_stall(build_job(Member(dump.rank, {"flight-recorder": dump.facts}) for dump in dumps))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 10**30, -(10**30)])
    | st.floats()
    | st.text(alphabet="a0:->/[]\x1b\u202e\ud800", max_size=8)
    | st.sampled_from([*NAMES, "0", "[0, 1]", "completed", "scheduled"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=6,
)
entries = st.dictionaries(st.sampled_from(KEYS), plain, max_size=4).map(lambda odd: {**SOUND, **odd})
dumps = st.fixed_dictionaries(
    {},
    optional={
        "version": plain,
        "pg_config": st.dictionaries(st.sampled_from(["0", "1", ""]), plain, max_size=2) | plain,
        "pg_status": st.dictionaries(st.sampled_from(["0", "1"]), plain, max_size=2) | plain,
        "entries": st.lists(entries | plain, max_size=6) | plain,
    },
)


@MANY
@given(st.lists(dumps, min_size=1, max_size=3))
def test_any_values_are_facts_and_can_be_judged(values):
    facts = [parse_recorder(value) for value in values]
    assert all(isinstance(one, RecorderFacts) for one in facts)
    job = build_job(Member(rank, {"flight-recorder": one}) for rank, one in enumerate(facts))
    found = diagnose_stall(job)
    assert found is None or set(found.ranks) <= {*range(len(facts)), *found.states.unseen}
    silent_mismatches(job)


@MANY
@given(dumps)
def test_facts_of_any_values_can_be_written(values):
    facts = parse_recorder(values)
    try:
        msgspec.json.encode(facts)
    except UnicodeEncodeError:
        pytest.fail("text that no document can hold")
