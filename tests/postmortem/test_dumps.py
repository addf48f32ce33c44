"""Dumps of the flight recorder as files: what they are, whose, which of several counts, and what is refused."""

import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading

import pytest

from doctor.core.errors import UnusableError
from doctor.postmortem.filenames import hosts_in, parse_name
from doctor.postmortem.flight_recorder import loader_processes
from doctor.postmortem.flight_recorder.dumps import read_dumps, world_size_in
from doctor.postmortem.flight_recorder.unpickling import looks_like_dump
from tests.lab.cases import each_case
from tests.lab.speed import patience

NOON = 1_760_000_000_000_000_000


def read_dump(path):
    dumps, skipped = read_dumps([path], jobs=1)
    if skipped:
        raise UnusableError(skipped[0][1])
    return dumps[0]


def entry(number, *, frames=True, **more):
    stack = [{"name": "step", "filename": "/home/me/train.py", "line": 7}]
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": NOON + number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **({"frames": stack} if frames else {}),
        **more,
    }


def dump(count=3, **options):
    """The values of a dump, in torch's order."""
    last = {"last_enqueued_collective": count, "last_started_collective": -1, "last_completed_collective": count}
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "comm_lib_version": "2.27.3",
        "pg_status": {"0": last},
        "entries": [entry(number, **options) for number in range(count)],
    }


def as_json(values):
    return json.dumps(values).encode()


def saved(folder, name, values, protocol=2):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(values if isinstance(values, bytes) else pickle.dumps(values, protocol))
    return path


@each_case(
    ("name", "rank", "rest"),
    [
        ("_dump_12", 12, ""),
        ("nccl_trace_rank_3", 3, ""),
        ("comm_lib_trace_rank_3", 3, ""),
        ("rank_3", 3, ""),
        ("rank-3.json", 3, ""),
        ("rank3.pkl", 3, ""),
        ("node7_rank3.pkl", 3, "node7"),
        ("nccl_trace_node-07.cluster_rank_30.pickle", 30, "node-07.cluster"),
        ("hostA_3", 3, "hostA"),
        ("before_1", 1, ""),
        ("rank_3_20250923", 3, ""),
        ("global_rank_9_local_rank_1", 9, ""),
        ("0", 0, ""),
        ("trace", None, ""),
        ("trace_1695490000000", None, ""),
    ],
)
def test_names(name, rank, rest):
    assert parse_name(name) == (rank, rest)


def test_hosts_are_told_by_names_that_look_so_or_differ_from_rank_to_rank(tmp_path):
    def hosts(*names):
        return [hosts_in([tmp_path / name for name in names]).get(tmp_path / name) for name in names]

    assert hosts("node7_rank_0", "node8_rank_1") == ["node7", "node8"]
    assert hosts("alpha_0", "alpha_1", "beta_2") == ["alpha", "alpha", "beta"]
    assert hosts("alpha_0", "beta_0", "alpha_1", "beta_1") == [None] * 4, "moments, not hosts"
    assert hosts("mine_0", "mine_1") == [None, None]
    assert hosts("_dump_0", "_dump_1") == [None, None]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_dump_of_any_protocol(tmp_path, protocol):
    found = read_dump(saved(tmp_path, "node7_rank_1", dump(), protocol))
    assert (found.rank, found.host, found.facts.version) == (1, "node7", "2.10")
    assert [one.sequence for one in found.facts.collectives] == [1, 2, 3]
    assert found.facts.groups[0].members == (0, 1)
    assert found.facts.collectives[-1].frames[0].line == 7


def test_json_says_the_same_without_stacks(tmp_path):
    texts = {key: str(value) for key, value in dump()["pg_status"]["0"].items()}
    values = {**dump(frames=False), "pg_status": {"0": texts}}
    from_json = read_dump(saved(tmp_path, "rank_0.json", as_json(values)))
    assert from_json.facts == read_dump(saved(tmp_path, "rank_0", dump(frames=False))).facts


def test_what_looks_like_a_dump():
    assert looks_like_dump(pickle.dumps(dump(), 2)[:65536])
    assert looks_like_dump(as_json(dump())[:65536])
    assert looks_like_dump(b' {\n "pg_config" : {}')
    assert not looks_like_dump(pickle.dumps({"segments": []}))
    assert not looks_like_dump(b"[rank0]: pg_config is not set")
    assert not looks_like_dump(as_json({"kind": "capture", "text": "profiling_name"}))
    assert not looks_like_dump(b"")


def test_of_several_moments_the_newest_counts_and_of_two_formats_the_one_with_stacks(tmp_path):
    saved(tmp_path, "before_0", dump(2))
    saved(tmp_path, "hang_0", dump(5))
    saved(tmp_path, "hang_0.json", as_json(dump(5, frames=False)))
    saved(tmp_path, "before_1", dump(3))
    dumps, skipped = read_dumps(tmp_path.iterdir())
    assert [(one.rank, len(one.facts.collectives), one.host) for one in dumps] == [(0, 5, None), (1, 3, None)]
    assert {path.name: why for path, why in skipped} == {
        "before_0": "an older dump of rank 0 than hang_0",
        "hang_0.json": "the same dump of rank 0 as hang_0",
    }


def test_a_call_that_came_to_its_end_makes_a_dump_newer(tmp_path):
    saved(tmp_path, "x_0", dump(3))
    values = dump(3)
    values["entries"][-1].update(state="scheduled", retired=False)
    saved(tmp_path, "y_0", values)
    assert [path.name for path, _ in read_dumps(tmp_path.iterdir())[1]] == ["y_0"]


def test_folders_with_the_same_ranks_are_runs_and_others_are_hosts(tmp_path):
    for folder, count in (("monday", 3), ("tuesday", 4)):
        for rank in range(2):
            saved(tmp_path, f"{folder}/rank_{rank}", dump(count))
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    dumps, skipped = read_dumps(paths)
    assert [len(one.facts.collectives) for one in dumps] == [4, 4]
    assert {why for _, why in skipped} == {"it is from a different run than the dumps in tuesday"}
    assert len(read_dumps([paths[0], paths[3]])[0]) == 2


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/was-here",)


def proto(body):
    return b"\x80\x04" + body


HOSTILE = {
    "reduce": pickle.dumps(Evil(), 2),
    "reduce in an entry": pickle.dumps({"entries": [{**entry(0), "frames": Evil()}]}, 2),
    "stack global": pickle.dumps(Evil(), 4),
    "global": b"cposix\nsystem\n(S'true'\ntR.",
    "inst": b"(S'true'\niposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nS'true'\no.",
    "newobj": proto(b"cbuiltins\nobject\n)\x81."),
    "newobj_ex": proto(b"cbuiltins\nobject\n)}\x92."),
    "build": proto(b"cbuiltins\nobject\n)\x81}b."),
    "persistent id": b"Pelsewhere\n.",
    "persistent id on the stack": proto(b"K\x01Q."),
}
GARBLED = {
    "extension 1": proto(b"\x82\x01."),
    "extension 2": proto(b"\x83\x01\x00."),
    "extension 4": proto(b"\x84\x01\x00\x00\x00."),
    "call of text": proto(b"X\x01\x00\x00\x00a)R."),
    "state of a list": proto(b"]}b."),
    "no stack": proto(b"R."),
    "no memo": proto(b"h\x07."),
    "next buffer": proto(b"\x97."),
    "a future protocol": b"\x80\x63.",
    "no opcode": proto(b"\xff."),
    "no text": proto(b"X\x02\x00\x00\x00\xff\xff."),
    "no number": b"\x80\x02Ixyz\n.",
    "a number of ten thousand digits": b"\x80\x02L" + b"9" * 10_000 + b"L\n.",
    "list as a key": proto(b"}]K\x01s."),
    "another pickle": pickle.dumps({"segments": []}),
    "plain text": b"nothing of the kind\n",
    "binary": bytes(range(256)) * 10,
    "other JSON": b'{"a": 1}',
    "broken JSON": b'{"entries": [}',
    "deep JSON": b'{"entries":' + b"[" * 100_000,
    "no file at all": b"",
}
BOMBS = {
    "bytes of 8 EiB": proto(b"\x8e" + struct.pack("<Q", 1 << 62) + b"x."),
    "text of 8 EiB": proto(b"\x8d" + struct.pack("<Q", 1 << 62) + b"x."),
    "array of 8 EiB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.",
    "a memo of 32 GiB": proto(b"Nr\xff\xff\xff\xff."),
    "a frame of 8 EiB": proto(b"\x95" + struct.pack("<Q", 1 << 62) + b"N."),
    "a long of 2 GiB": proto(b"\x8b\xff\xff\xff\x7f\x01."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_is_run(tmp_path, name):
    with pytest.raises(UnusableError, match=r"^it tries to load (?:\w+\.\w+|an object from outside): nothing was run$"):
        read_dump(saved(tmp_path, "rank_0", HOSTILE[name]))


@pytest.mark.parametrize("name", [*GARBLED, *BOMBS])
def test_what_is_no_dump_is_said_to_be_none(tmp_path, name):
    with pytest.raises(UnusableError) as refusal:
        read_dump(saved(tmp_path, "rank_0", {**GARBLED, **BOMBS}[name]))
    assert 10 < len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


def test_a_value_that_would_take_for_ever_to_print_is_passed_over(tmp_path):
    deep = []
    for _ in range(60):
        deep = [deep, deep]
    values = dump(1)
    for key in ("profiling_name", "state", "input_dtypes", "input_sizes", "pg_id", "frames"):
        values["entries"][0][key] = deep
    values["entries"].append(entry(1, frames=False) | {"frames": [{"filename": deep, "name": deep, "line": deep}] * 3})
    values["version"] = deep
    values["pg_config"]["1"] = {"name": deep, "desc": deep, "ranks": "[" * 100_000}
    found = read_dump(saved(tmp_path, "rank_0", values))
    assert [(one.operation, one.state) for one in found.facts.collectives] == [
        ("", "scheduled"),
        ("all_reduce", "completed"),
    ]


@pytest.mark.parametrize("threads", [1, 2], ids=["alone", "beside another thread"])
def test_a_file_that_takes_for_ever_is_given_up(tmp_path, monkeypatch, threads):
    """A key whose hash takes 2 ** 60 steps: C code that nothing interrupts."""
    monkeypatch.setattr(loader_processes, "SECONDS", 1)
    monkeypatch.setattr(loader_processes.threading, "active_count", lambda: threads)
    value = b"K\x01q\x00" + b"".join(
        b"h" + bytes([number]) + b"h" + bytes([number]) + b"\x86q" + bytes([number + 1]) + b"0" for number in range(60)
    )
    slow = saved(tmp_path, "rank_1", b"\x80\x02" + value + b"}h" + bytes([60]) + b"K\x01s.")
    good = [saved(tmp_path, f"rank_{rank}", dump()) for rank in (0, 2, 3)]
    dumps, skipped = read_dumps([good[0], slow, *good[1:]])
    assert [one.rank for one in dumps] == [0, 2, 3]
    assert [(path, "damaged or hostile" in why) for path, why in skipped] == [(slow, True)]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_a_dump_that_breaks_off_says_what_it_still_can(tmp_path, share):
    whole = dump(50)
    for one in whole["entries"][10:]:
        one.update(state="scheduled", retired=False)
    data = pickle.dumps(whole, 2)
    cut = data[: int(len(data) * share)]
    found = read_dump(saved(tmp_path, "rank_0", cut))
    assert found.facts.groups[0].enqueued == 50, "the counters come before the entries"
    assert 0 < len(found.facts.collectives) < 50
    assert [hidden.reason for hidden in found.facts.hidden] == [f"the dump breaks off after {len(cut)} bytes"]


def test_a_dump_that_breaks_off_before_its_counters_says_how_far_it_goes(tmp_path):
    data = pickle.dumps(dump(), 2)[:87]
    with pytest.raises(UnusableError, match="the pickle breaks off after 87 bytes"):
        read_dump(saved(tmp_path, "rank_0", data))
    with pytest.raises(UnusableError, match="the JSON breaks off after 40 bytes"):
        read_dump(saved(tmp_path, "rank_0.json", as_json(dump())[:40]))


def test_files_that_can_not_be_read_are_listed_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_processes, "LARGEST", 10_000)
    monkeypatch.setattr(loader_processes.threading, "active_count", lambda: 1)  # pytest's plugins may have a thread
    good = saved(tmp_path, "rank_0", dump())
    large = saved(tmp_path, "rank_1", dump(100))
    odd = saved(tmp_path, "trace", dump())
    gone = tmp_path / "rank_3"
    dumps, skipped = read_dumps([good, large, odd, gone, good])
    assert [one.rank for one in dumps] == [0]
    reasons = {path.name: why for path, why in skipped}
    assert reasons["rank_1"].startswith("it has 0 MiB, and no dump has more")
    assert reasons["rank_3"] == "it can't be read: No such file or directory"
    assert reasons["trace"] == "its name does not contain the rank"


def test_workers_and_this_process_read_the_same(tmp_path, monkeypatch):
    paths = [saved(tmp_path, f"rank_{rank}", dump(40 + rank)) for rank in range(40)]
    here = {one.rank: one.facts for one in beside_a_thread(paths)[0]}
    monkeypatch.setattr(loader_processes, "PARALLEL", 0)
    dumps, skipped = read_dumps(paths, jobs=3)
    assert not skipped
    assert {one.rank: one.facts for one in dumps} == here
    assert len(here) == 40


def beside_a_thread(paths):
    """Where another thread runs, no process is forked."""
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    try:
        return read_dumps(paths)
    finally:
        go.set()
        thread.join()


@pytest.mark.parametrize("name", [*HOSTILE, *BOMBS])
def test_without_workers_memory_has_the_same_limit(tmp_path, name):
    before = resource.getrlimit(resource.RLIMIT_AS)
    paths = [saved(tmp_path, "rank_0", {**HOSTILE, **BOMBS}[name]), saved(tmp_path, "rank_1", dump())]
    dumps, skipped = beside_a_thread(paths)
    assert ([one.rank for one in dumps], len(skipped)) == ([1], 1)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_folder_may_tell_the_rank_and_a_hostile_file_is_named_before_its_name_is_asked(tmp_path):
    assert read_dump(saved(tmp_path, "rank_5/trace.pkl", dump())).rank == 5
    with pytest.raises(UnusableError, match="tries to load"):
        read_dump(saved(tmp_path, "evil.pkl", HOSTILE["reduce"]))


def test_no_torch_is_needed(tmp_path):
    path = saved(tmp_path, "rank_0", dump())
    code = (
        "import sys; from pathlib import Path; from doctor.postmortem.flight_recorder.dumps import read_dumps;"
        f"read_dumps([Path({str(path)!r})]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=patience(60)).returncode == 0


def test_groups_without_entries_are_counted_by_their_order(tmp_path):
    """Only open entries were dumped, and there are none: names and numbers both count the groups that were made."""
    names = {"0": "default_pg", "35": "TENSOR", "112": "DATA"}
    counters = {number: {"last_enqueued_collective": count} for number, count in (("0", 163), ("5", 39), ("14", 7))}
    config = {name: {"name": name, "desc": words, "ranks": "[0, 1]"} for name, words in names.items()}
    values = {"version": "2.9", "pg_config": config, "pg_status": counters, "entries": []}
    found = read_dump(saved(tmp_path, "rank_0", values))
    assert {group.name: group.enqueued for group in found.facts.groups} == {"0": 163, "35": 39, "112": 7}
    values["pg_status"].popitem()
    found = read_dump(saved(tmp_path, "rank_0", values))
    assert {group.enqueued for group in found.facts.groups} == {None}, "one group more than counters: no telling which"


def test_the_world_is_what_groups_and_dumps_tell(tmp_path):
    assert world_size_in([]) is None
    assert world_size_in([read_dump(saved(tmp_path, "rank_0", dump()))]) == 2
    assert world_size_in([read_dump(saved(tmp_path, "rank_7", dump()))]) == 8
