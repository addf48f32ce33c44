"""torch's flight recorder: of a real process, in every format that it ever had, and what is no dump at all."""

import os
import pickle
import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest

from doctor.collectors.base import NotVisible
from doctor.core.facts import RecorderFacts
from doctor.core.stack_dumps.recorder_dump import AFTER, BEFORE, WITH_SITE, WITH_STACK, parse_recorder
from doctor.monitor.telemetry import flight_recorder
from doctor.monitor.telemetry.flight_recorder import load_dump
from tests.lab.needs import ROOT
from tests.lab.speed import patience

REAL = textwrap.dedent(
    """\
    import json, sys, tempfile, time
    from pathlib import Path
    import msgspec
    import torch
    import torch.distributed as dist
    from doctor.collectors.base import NotPresent, NotVisible
    from doctor.monitor.telemetry import flight_recorder
    from doctor.monitor.telemetry.flight_recorder import load_dump, parse_recorder, read_recorder, take_dumps

    flight_recorder.DEADLINE = float(sys.argv[2])

    def tell():
        try:
            print(msgspec.json.encode(read_recorder()).decode(), flush=True)
        except (NotPresent, NotVisible) as why:
            print(type(why).__name__, why, getattr(why, "unhide", ""), flush=True)

    def step():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2, 3))

    def is_retired():
        try:
            return read_recorder(stacks=False).collectives[-1].retired
        except NotVisible:
            return True

    tell()
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    some = dist.new_group([0], group_desc="some")
    dist.barrier(group=some)
    for _ in range(250):
        step()
    until = time.monotonic() + float(sys.argv[2])
    # Gloo marks a collective as retired after the caller has gone on.
    while not is_retired() and time.monotonic() < until:
        time.sleep(0.01)
    tell()
    dumps = take_dumps()
    print(*dumps, take_dumps())
    Path(sys.argv[1]).write_bytes(dumps.get("cpu", b""))
    text = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    told = parse_recorder(load_dump(dumps["cpu"]) if dumps else {})
    read = parse_recorder(text)
    bare = [msgspec.structs.replace(entry, frames=()) for entry in told.collectives]
    same = (list(read.collectives), read.groups) == (bare, told.groups)
    print(same and (not bare or list(read_recorder(stacks=False).collectives) == bare))
    dist.destroy_process_group()
    tell()
    """
)


def _run(folder, **environ):
    pytest.importorskip("torch")
    script, dump = folder / "train.py", folder / "rank_0"
    script.write_text(REAL)
    os.utime(script, (1, 1))
    # On a busy machine the first dump with stacks, which loads a symbolizer, takes longer than the product waits.
    command = [sys.executable, str(script), str(dump), str(patience(60))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), dump


def test_a_real_recorder(tmp_path):
    (before, facts, saved, json_tells_the_same, after), dump = _run(tmp_path)
    assert before == after == "NotPresent no process group "
    found = msgspec.json.decode(facts, type=RecorderFacts)
    assert {group.name: (group.description, group.members, group.enqueued) for group in found.groups} == {
        "0": ("default_pg", (0,), 250),
        "1": ("some", (0,), 1),
    }
    first, *others = found.collectives
    assert (first.group, first.operation, len(others)) == ("1", "barrier", 200)
    assert found.wrapped
    newest = others[-1]
    assert (newest.sequence, newest.operation, newest.backend, newest.retired) == (250, "all_reduce", "gloo", True)
    assert (newest.input_sizes, newest.types, newest.timeout) == (((2, 3),), ("Float",), 1800.0)
    own = [(frame.line, frame.function, frame.condition) for frame in newest.frames if frame.user]
    assert own == [(20, "step", "if dist.get_rank() == 0, line 19"), (33, "<module>", "")]
    assert [bool(entry.frames) for entry in found.collectives].count(True) == WITH_SITE
    assert (saved, json_tells_the_same) == ("cpu {}", "True"), "a dump is given out once"
    assert len(parse_recorder(load_dump(dump.read_bytes()), 1000).collectives) == 251


def test_a_recorder_that_is_off(tmp_path):
    (_, answer, saved, _, _), _ = _run(tmp_path, TORCH_FR_BUFFER_SIZE="0")
    assert answer == "NotVisible the flight recorder is off export TORCH_FR_BUFFER_SIZE=2000"
    assert saved == "{}"


def test_a_recorder_that_does_not_answer_is_asked_once(monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(flight_recorder, "DEADLINE", 0.1)
    with pytest.raises(NotVisible, match="did not respond within"):
        flight_recorder._dump_with_deadline(lambda *_: bytes(go.wait(30)))
    with pytest.raises(NotVisible, match="has not responded to an earlier request"):
        flight_recorder._dump_with_deadline(lambda *_: b"")
    go.set()
    flight_recorder._DUMP_THREADS[0].join()
    assert flight_recorder._dump_with_deadline(lambda *_: b"dump") == b"dump"


class Evil:
    def __reduce__(self):
        return os.system, ("false",)


@pytest.mark.parametrize(
    "data", [pickle.dumps(Evil()), pickle.dumps({"entries": [Evil()]}), b"", b"no pickle", b"\x80\x05"]
)
def test_what_is_no_dump_is_refused(data):
    with pytest.raises(NotVisible, match="cannot read"):
        load_dump(data)


def test_plain_values_that_make_no_sense_are_passed_over():
    assert load_dump(pickle.dumps([1, 2])) == {}
    junk = {
        "version": 7,
        "entries": [3, None, {}, {"process_group": 5, "profiling_name": None, "frames": [1, {"line": "x"}]}],
        "pg_config": {"0": 5, "1": {"name": "1", "ranks": "no list"}},
        "pg_status": "none",
    }
    found = parse_recorder(junk)
    assert found.version == "7"
    assert found.collectives == ()
    assert [(group.name, group.members) for group in found.groups] == [("1", ())]


def _entry(number, name="nccl:all_reduce", group=("7", "TENSOR"), **more):
    return {
        "record_id": number,
        "pg_id": 3,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **more,
    }


def test_nccl_with_its_table_of_groups_and_sends():
    dump = {
        "version": "2.9",
        "pg_config": {"7": {"name": "7", "desc": "TENSOR", "ranks": "[4, 6]"}},
        "pg_status": {
            "3": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 3}
        },
        "entries": [
            _entry(4, "nccl:_all_gather_base", state="completed", duration_ms=2.5),
            _entry(5, "nccl:send 1->0", is_p2p=True, p2p_seq_id=9),
            _entry(5, "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=10),
        ],
    }
    found = parse_recorder(dump)
    (group,) = found.groups
    assert (group.members, group.enqueued, group.started, group.completed) == ((4, 6), 5, None, 3)
    gather, send, receive = found.collectives
    assert (gather.operation, gather.state, gather.seconds) == ("all_gather_into_tensor", "completed", 0.0025)
    assert (send.operation, send.sequence, send.source, send.peer) == ("send", 9, 1, 0)
    assert (receive.operation, receive.source, receive.peer) == ("recv", 0, 0)
    assert gather.at == pytest.approx(1_700_000_000)
    assert found.wrapped


def test_the_oldest_format_has_no_names_of_groups():
    entry = _entry(0)
    for name in ("process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "timeout_ms"):
        del entry[name]
    found = parse_recorder({"version": "2.1", "entries": [{**entry, "seq_id": 12}]})
    assert [(one.group, one.sequence, one.timeout) for one in found.collectives] == [("3", 12, None)]
    assert [group.name for group in found.groups] == ["3"]


def test_gloo_counts_transfers_that_it_does_not_show():
    status = {
        "3": {"last_enqueued_collective": "13", "last_started_collective": "-1", "last_completed_collective": "8"}
    }
    entries = [_entry(8, "gloo:all_to_all"), _entry(11, "gloo:barrier", op_id=13)]
    (group,) = parse_recorder({"pg_status": status, "entries": entries}).groups
    assert (group.enqueued, group.started, group.completed) == (11, None, 8)


def test_stacks_of_the_newest_and_call_sites_of_older_ones():
    stack = [
        {"name": f"f{depth}", "filename": f"/x/site-packages/torch/{depth}.py", "line": depth} for depth in range(40)
    ]
    stack[30] = {"name": "fit", "filename": "/home/me/train.py", "line": 7}
    entries = [_entry(number, frames=stack, state="completed") for number in range(100)]
    found = parse_recorder({"entries": entries})
    kept = [len(entry.frames) for entry in found.collectives]
    assert kept == [0] * (100 - WITH_SITE) + [2] * (WITH_SITE - WITH_STACK) + [25] * WITH_STACK
    assert all(entry.frames[-1].function == "fit" for entry in found.collectives[-WITH_SITE:])


def test_what_lies_around_the_oldest_open_call_is_kept_however_much_was_queued_behind_it():
    entries = [
        _entry(number, frames=[{"name": "f", "filename": "/home/me/train.py", "line": number}])
        for number in range(1000)
    ]
    for entry in entries[:100]:
        entry["state"] = "completed"
    kept = {one.sequence: one for one in parse_recorder({"entries": entries}, 50).collectives}
    assert min(kept) == 100 - BEFORE
    assert max(kept) == 999
    assert len(kept) == BEFORE + AFTER + 50
    assert kept[100].frames[0].line == 100


def _batch(number, whole, *names):
    parts = [_entry(number, f"nccl:{name}", is_p2p=True, p2p_seq_id=number, collective_seq_id=0) for name in names]
    last = _entry(number, "nccl:coalesced", is_p2p=True, p2p_seq_id=number, collective_seq_id=0, state=whole)
    return [*parts, *([last] if whole else [])]


def _states(*batches):
    found = parse_recorder({"entries": [entry for batch in batches for entry in batch]})
    return [(one.sequence, one.operation, one.state) for one in found.collectives]


def test_parts_of_coalesced_calls_have_the_state_of_the_whole():
    both = ("send 0->1", "recv 0<-1")
    assert _states(_batch(1, "completed", *both), _batch(2, "scheduled", *both)) == [
        (1, "send", "completed"),
        (1, "recv", "completed"),
        (1, "coalesced", "completed"),
        (2, "send", "scheduled"),
        (2, "recv", "scheduled"),
        (2, "coalesced", "scheduled"),
    ]


def test_coalesced_calls_whose_whole_is_not_shown_have_ended_but_for_the_newest():
    both = ("send 0->1", "recv 0<-1")
    found = _states(_batch(1, "", *both), _batch(2, "", *both))
    assert [state for _, _, state in found] == ["completed"] * 2 + ["scheduled"] * 2


def test_a_dump_imports_nothing_that_the_program_may_be_importing() -> None:
    """To name frames of generated code, torch would import its compiler; what the program gets afterwards is whole."""
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from doctor.monitor.telemetry import flight_recorder\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dump = torch._C._distributed_c10d._dump_fr_trace\n"
        "assert b'all_reduce' in flight_recorder._dump_with_deadline(dump)\n"
        "assert 'torch._inductor' not in sys.modules and '_inductor' not in vars(torch)\n"
        "assert torch._inductor.config is sys.modules['torch._inductor.config']\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
