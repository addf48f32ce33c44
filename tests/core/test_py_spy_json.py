"""The JSON of py-spy: recorded documents, and any others."""

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.core.errors import UnusableError
from doctor.core.facts import Frame
from doctor.core.stack_dumps.py_spy import (
    pid_of_traces,
    rank_locals_of_py_spy_json,
    threads_of_py_spy_json,
    threads_of_traces,
)
from doctor.core.stack_dumps.threads import LONGEST_NAME, is_own_file

DATA = Path(__file__).parents[1] / "data" / "stacks" / "py_spy_json"
"""py-spy 0.4.3 on a program whose main thread and thread ``helper`` sleep; prefixes of paths were replaced."""
MAIN = (
    Frame("/home/user/rec.py", 6, "<lambda>", user=True),
    Frame("/home/user/rec.py", 7, "train", user=True),
    Frame("/home/user/rec.py", 8, "<module>", user=True),
)


@pytest.mark.parametrize("name", ["plain", "locals", "native"])
def test_threads_of_a_recorded_document(name):
    threads = threads_of_py_spy_json((DATA / f"{name}.json").read_bytes())
    assert {thread.name for thread in threads} == {"MainThread", "helper"}
    (main,) = (thread for thread in threads if thread.is_main)
    assert main.frames == MAIN
    assert (main.name, main.active, main.holds_gil) == ("MainThread", False, False)
    assert main.native == (("clock_nanosleep", "time_sleep") if name == "native" else ())
    (helper,) = (thread for thread in threads if not thread.is_main)
    assert [frame.function for frame in helper.frames] == ["work", "run", "_bootstrap_inner", "_bootstrap"]
    assert [frame.user for frame in helper.frames] == [True, False, False, False]
    assert helper.native_id != main.native_id > 0


def test_locals_that_number_a_rank():
    assert rank_locals_of_py_spy_json((DATA / "locals.json").read_bytes()) == {"rank": 1, "world_size": 2}
    assert rank_locals_of_py_spy_json((DATA / "plain.json").read_bytes()) == {}


def test_locals_of_libraries_are_kept_only_if_they_count_steps():
    def frame(file, *variables):
        listed = [{"name": name, "repr": text} for name, text in variables]
        return {"name": "train", "filename": file, "line": 1, "module": None, "locals": listed}

    library = frame(
        "/env/site-packages/transformers/trainer.py", ("step", "12"), ("epoch", "1"), ("global_step", "'x'")
    )
    own = frame("/home/me/train.py", ("epoch", "1"))
    trace = {"pid": 7, "os_thread_id": 7, "thread_id": 1, "thread_name": "MainThread", "frames": [library, own]}
    (thread,) = threads_of_traces([trace])
    assert [(one.frame, one.name, one.value) for one in thread.locals] == [(0, "step", "12"), (1, "epoch", "1")]


def test_the_main_thread_is_found_by_its_id_before_its_name():
    impostor = {"pid": 7, "os_thread_id": 8, "thread_id": 1, "thread_name": "MainThread", "frames": []}
    main = {"pid": 7, "os_thread_id": 7, "thread_id": 2, "thread_name": "other", "frames": []}
    assert [thread.is_main for thread in threads_of_traces([impostor, main])] == [False, True]
    # py-spy on the host numbers the threads of a container in another PID namespace than their process.
    assert [thread.is_main for thread in threads_of_traces([impostor])] == [True]
    assert pid_of_traces([impostor]) == 7


THREAD_RUNNER = "/env/site-packages/ray/train/v2/_internal/execution/worker_group/thread_runner.py"


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("TrainingThread(train_fn_with_final_checkpoint_flush)", []),
        ("Thread-3", [("_run_target", THREAD_RUNNER), ("run", "/usr/lib/python3.11/threading.py")]),
        ("Thread-3", [("run", "/env/site-packages/ray/air/_internal/util.py")]),
    ],
)
def test_the_thread_that_a_framework_trains_in_counts_as_the_main_one(name, starts):
    def frame(function, file, **variables):
        listed = [{"name": name, "repr": value} for name, value in variables.items()]
        return {"name": function, "filename": file, "line": 1, "module": None, "locals": listed}

    serving = frame("main_loop", "/env/site-packages/ray/_private/worker.py", rank="7")
    training = [frame("train", "/home/me/train.py", rank="1"), *(frame(*one) for one in starts)]
    document = [
        {"pid": 7, "os_thread_id": 7, "thread_id": 1, "thread_name": "MainThread", "frames": [serving]},
        {"pid": 7, "os_thread_id": 9, "thread_id": 2, "thread_name": name, "frames": training},
    ]
    (main,) = (thread for thread in threads_of_traces(document) if thread.is_main)
    assert (main.native_id, main.frames[0].function) == (9, "train")
    assert rank_locals_of_py_spy_json(json.dumps(document)) == {"rank": 1}


def test_text_of_a_process_is_bounded_printable_and_masked():
    frame = {"name": "\x1b[2J" + "f" * 9999, "filename": "https://me:hunter2secret@host/x.py", "line": -1}
    (thread,) = threads_of_traces([{"thread_id": 1, "thread_name": "sk\ud800", "frames": [frame] * 5000}])
    assert thread.name == "sk\ufffd"
    assert len(thread.frames) < 100
    assert len(thread.frames[0].function) <= LONGEST_NAME
    assert thread.frames[0].function.isprintable()
    assert "hunter2secret" not in thread.frames[0].file
    assert thread.frames[0].line == 0


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"[" * 100_000, b'[{"frames": 1}]', b"\xff\xfe["])
def test_other_documents_are_refused(text):
    with pytest.raises(UnusableError, match="not the JSON of py-spy"):
        threads_of_py_spy_json(text)


def test_origin_of_a_file_whose_path_begins_at_its_package():
    own = ["train.py", "/home/me/train.py", "<stdin>", "megatron/training/training.py", "test.py"]
    foreign = [
        "threading.py",
        "torch/nn/modules/module.py",
        "multiprocessing/spawn.py",
        "<frozen runpy>",
        "tqdm/std.py",
    ]
    assert [is_own_file(file) for file in (*own, *foreign)] == [True] * len(own) + [False] * len(foreign)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("pid", "thread_id", "thread_name", "os_thread_id", "active", "owns_gil", "frames")
FRAME_KEYS = ("name", "filename", "module", "line", "locals", "repr")
traces = st.lists(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(KEYS, anything)
        | {
            "frames": st.lists(
                st.dictionaries(st.sampled_from(FRAME_KEYS), anything, max_size=6) | anything, max_size=4
            )
        },
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=200)
@given(traces | anything)
def test_any_document(document):
    msgspec.json.encode(threads_of_traces(document))
    pid_of_traces(document)
    with contextlib.suppress(UnusableError):
        rank_locals_of_py_spy_json(json.dumps(document))
