"""Text that only looks like stacks stays a log, and any text is read without an error and in bounded work."""

import json
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor.core.facts.section import in_unicode
from doctor.core.stack_dumps.threads import LONGEST_NAME
from doctor.postmortem.file_kinds import kind_of, kind_of_head
from doctor.postmortem.run_reader import read_runs
from doctor.postmortem.stacks.collected import MOST_SAMPLES, read_stacks
from doctor.postmortem.stacks.dump_text import looks_like_stacks
from doctor.postmortem.stacks.processes import collect_stacks, ranks_of_stacks

DATA = Path(__file__).parents[2] / "data" / "stacks"
DUMPS = {path: path.read_text() for path in sorted(DATA.rglob("*")) if path.is_file()}
SMALL = [text for text in DUMPS.values() if len(text) < 8000]
FAULT = (DATA / "asleep" / "faulthandler" / "stacks_rank_0.txt").read_text()
PY_SPY = (DATA / "asleep" / "py_spy.txt").read_text()
STEPS = "".join(f"[2026-11-23 14:00:{second:02}] INFO step {second} loss 2.31 rank 0\n" for second in range(60))
CRASH = f"Fatal Python error: Segmentation fault\n\n{FAULT}\nExtension modules: numpy.core (total: 1)\n"
PROSE = (
    'At 14:02 py-spy showed\nThread 42 (idle): "MainThread"\n    f (a.py:1)\nand nothing else moved.\n'
    + "It went on.\n" * 9
)


@pytest.mark.parametrize(
    "text",
    [
        STEPS,
        STEPS + FAULT,
        FAULT + STEPS,
        STEPS + "Timeout (0:00:08)!\n" + FAULT,
        STEPS + PY_SPY,
        CRASH,
        STEPS + CRASH,
        PROSE,
        "UserWarning: old call (train.py:12)\nepoch 1\n",
        "Thread 0x00007f70b25bcb80 is stuck\n" * 3,
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n',
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py", line 1, in f\n[rank0]: ValueError: x\n',
        'rank 0: ready\nrank 1: ready\nThread 7 (idle): "MainThread"\n    f (a.py:1)\n' + "rank 1: step\n" * 20,
        "#0 building with docker\n#1 load build definition\n#2 DONE 0.1s\n",
    ],
)
def test_a_log_stays_a_log(text):
    assert kind_of_head(text.encode()) == "log"


@pytest.mark.parametrize("text", ["[]", '[{"pid": 1}]', '{"pid": 1, "thread_id": 2, "frames": []}', "[1, 2]"])
def test_other_json_is_not_taken(text):
    assert kind_of_head(text.encode()) != "stacks"


def test_source_text_with_a_dump_is_not_read_in_a_folder(tmp_path):
    (tmp_path / "notes.md").write_text(PY_SPY)
    (tmp_path / "dump.txt").write_text(PY_SPY)
    (run,) = read_runs([tmp_path])
    assert {one.path.rpartition("/")[2]: bool(one.skipped) for one in run.inputs} == {
        "notes.md": True,
        "dump.txt": False,
    }


def read_all(text):
    """What is read of a text under several names, as bytes of facts."""
    names = ("a.txt", "rank1.txt", "node7_20261123_144410.txt")
    stacks = collect_stacks([(Path(name), text) for name in names])
    facts = [msgspec.json.encode(in_unicode(one)) for one in stacks.hosts.values()]
    progress = ranks_of_stacks(stacks).progress
    assert all(0 <= rank < 1 << 17 for rank in progress)
    return facts, msgspec.json.encode(list(progress.values()))


quick = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
LINES = sorted({line for text in SMALL for line in text.splitlines() if line.strip()})


@st.composite
def mutated(draw):
    """A dump of which parts were cut out, repeated, or replaced by junk."""
    text = draw(st.sampled_from(SMALL))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 300)))
        text = text[:start] + draw(st.sampled_from([text[start:end] * 2, ""]) | st.text(max_size=40)) + text[end:]
    return text


@quick
@given(mutated() | st.lists(st.sampled_from(LINES) | st.text(max_size=30), max_size=40).map("\n".join))
def test_any_text(text):
    looks_like_stacks(text)
    kind_of_head(text.encode("utf-8", "surrogatepass"))
    read_all(text)


@quick
@given(st.binary(max_size=400))
def test_any_bytes(data):
    kind_of_head(data)
    read_all(data.decode("utf-8", "replace"))


def test_numbers_out_of_range():
    huge = "9" * 400
    text = (
        f'Process {huge}: x\nThread {huge} (idle): "MainThread"\n    f (a.py:{huge})\n'
        f'Process 99999999: x\nThread 99999999999 (idle): "MainThread"\n    f (a.py:9999999999)\n'
        f"Thread {huge} (Thread 0x1 (LWP {huge})):\n#0  0x0000000000000001 in f () at a.c:{huge}\nRANK={huge}\n"
        f'=== Rank 9999999: http://a:1/x ===\nThread 1 (idle): "MainThread"\n    f (a.py:1)\n'
    )
    read_all(text)


def test_names_are_bounded_printable_and_masked():
    secret = "https://me:hunter2secret@host/x"
    text = (
        f"Process 7: python --token=hunter2secret {secret}\nPython v3.11 (/usr/bin/python)\n\n"
        f'Thread 7 (idle): "MainThread"\n    {"f" * 9000} ({secret}.py:1)\n    \x1b]0;x\x07g (b.py:2)\n'
        f"Error: {secret} {'e' * 5000}\n"
    )
    facts, progress = read_all(text)
    for encoded in (*facts, progress):
        assert b"hunter2secret" not in encoded
        assert b"\\u001b" not in encoded
        assert b"f" * (LONGEST_NAME + 1) not in encoded


def test_samples_and_deep_stacks_are_bounded():
    frames = "".join(f"    f{line} (a.py:{line})\n" for line in range(1, 1500))
    (process,) = read_stacks(f'Process 7: x\nThread 7 (idle): "MainThread"\n{frames}' * 70)
    assert len(process.samples) == MOST_SAMPLES
    assert len(process.main.frames) < 100


def dump_of(processes):
    """The text of so many processes with three threads each."""
    return "".join(
        f"Process {1000 + pid}: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        + "".join(
            f'Thread {thread} (idle): "{name}"\n    all_reduce (torch/distributed/distributed_c10d.py:{place})\n'
            for place, (thread, name) in enumerate([(1000 + pid, "MainThread"), (90_000, "a"), (90_001, "b")])
        )
        for pid in range(processes)
    )


def test_thousands_of_processes_take_work_in_proportion(tmp_path):
    def seconds(count):
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            ranks = ranks_of_stacks(collect_stacks([(tmp_path / "all.txt", dump_of(count))]))
            best = min(best, time.perf_counter() - started)
            assert len(ranks.progress) == count
        return best

    assert seconds(2000) < 40 * seconds(200)


def test_nested_and_endless_json_is_refused(tmp_path):
    head = '[{"pid": 1, "thread_id": 2, "thread_name": "x", "frames": '
    for name, text in {"deep": head + "[" * 200_000, "open": head + "[" * 3, "many": "[" * 300_000}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        kind_of(path)
        assert read_stacks(text) == []


def test_json_with_errors_between_documents():
    text = (DATA / "py_spy_json" / "plain.json").read_text()
    found = read_stacks(
        f"{text}Error: Failed to suspend process\n{text.replace(str(json.loads(text)[0]['pid']), '77')}"
    )
    assert len(found) == 2
    assert 77 in {process.pid for process in found}
