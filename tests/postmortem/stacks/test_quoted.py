"""Stacks as people quote them: in Markdown, among prose, behind labels, cut off, and with numbers left out."""

from pathlib import Path

import pytest

from doctor.core.facts import ProgressFacts
from doctor.core.stack_dumps.native_calls import waiting_thread
from doctor.postmortem.file_kinds import kind_of_head
from doctor.postmortem.run_reader import read_runs
from doctor.postmortem.stacks.collected import read_stacks
from doctor.postmortem.stacks.processes import collect_stacks

WAITING = """\
Thread 71 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2600)
    step (train.py:40)
    <module> (train.py:80)
"""
LOADING = """\
Thread 72 (idle): "MainThread"
    read_shard (data.py:12)
    step (train.py:38)
    <module> (train.py:80)
"""
PROSE = "The job has stood still since this morning, and nvidia-smi shows every GPU at 100 percent.\n\n"
STARTED = """\
#0  0x00007f0000000001 in poll () from /lib64/libc.so.6
#1  0x00007f0000000002 in gloo::transport::tcp::Loop::run() () from /venv/torch/lib/libtorch_cpu.so
#2  0x00007f0000000003 in start_thread () from /lib64/libpthread.so.0
#3  0x00007f0000000004 in clone () from /lib64/libc.so.6
"""


def kind(text):
    return kind_of_head(text.encode())


def mains(text):
    """The innermost function of the main thread of each process."""
    assert kind(text) == "stacks"
    found = (waiting_thread(process.samples[-1]) if process.samples else None for process in read_stacks(text))
    return [main.frames[0].function if main and main.frames else "" for main in found]


def roles(text):
    facts = collect_stacks([(Path("dump.txt"), text)]).hosts
    return [(one.role, one.rank) for each in facts.values() for one in each.processes]


def fenced(*blocks):
    return PROSE + "\n".join(f"{title}\n```text\n{text}```\n" for title, text in blocks)


def test_blocks_of_markdown_with_the_rank_above_them():
    text = fenced(("On rank 1:", LOADING), ("**rank 0**", WAITING))
    assert mains(text) == ["read_shard", "all_reduce"]
    assert roles(text) == [("rank", 1), ("rank", 0)]


@pytest.mark.parametrize("title", ["ranks 0-6:", "rank 1-7 look alike:", "rank 3 and 5 print this:"])
def test_a_line_about_several_ranks_numbers_none(title):
    (process,) = read_stacks(fenced((title, WAITING)))
    assert process.rank is None


def test_a_block_that_ends_with_the_text():
    assert mains(PROSE + "```\n" + WAITING + "    main (tr") == ["all_reduce"]


def test_prose_around_less_than_its_lines():
    text = "py-spy shows:\n\n" + WAITING + "Thread 90 (idle)\n\nI have no idea what it waits for.\n"
    assert mains(text) == ["all_reduce"]


def test_frames_alone_in_a_block():
    frames = "\n".join(WAITING.splitlines()[1:]) + "\n"
    assert mains(fenced(("Most ranks:", frames.replace("    all", "   all")))) == ["all_reduce"]


def test_the_label_of_a_container():
    text = "Process 71: sglang::scheduler_TP6\nPython v3.12.1 (/usr/bin/python3)\n\n" + WAITING
    labelled = "".join(f"worker-1  | {line}\n" for line in text.splitlines())
    assert mains(labelled) == ["all_reduce"]
    assert roles(labelled) == [("rank", 6)]


def test_titles_with_places_in_two_dimensions():
    one = "Process {pid}: sglang::scheduler_PP{pp}_TP{tp}\n\n" + WAITING.replace("71", "{pid}")
    text = "".join(one.format(pid=80 + place, pp=place // 2, tp=place % 2) for place in range(4))
    assert roles(text) == [("rank", 0), ("rank", 1), ("rank", 2), ("rank", 3)]


@pytest.mark.parametrize(
    "header",
    ['Thread (active): "MainThread"', 'Thread (active) "MainThread"', 'card 0: Thread 71 (active): "MainThread"'],
)
def test_headers_that_people_edit(header):
    assert mains(f"```\n{WAITING}```".replace(WAITING.splitlines()[0], header)) == ["all_reduce"]


def test_what_stands_for_frames_left_out():
    assert mains(WAITING.replace("step (train.py:40)", "step ()\n    ...")) == ["all_reduce"]


def test_the_end_of_a_stack_whose_beginning_is_missing_shows_no_place():
    text = (
        "    step (train.py:40)\n    <module> (train.py:80)\n"
        + 'Thread 9 (idle): "Thread-1"\n    wait (threading.py:1)\n'
    )
    assert mains(text) == [""]
    other = "Process 72: python train.py\n\n" + LOADING
    assert mains(text + other) == ["read_shard"]


def test_a_named_thread_is_not_the_main_thread():
    text = 'Thread 9 (idle): "writer"\n    get (queue.py:180)\n    run (writer.py:5)\n'
    assert mains(text) == [""]


def test_a_thread_whose_stack_was_cut_is_not_the_main_thread():
    frames = '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
    rest = '  File "/usr/lib/python3.11/queue.py", line 171 in get\n'
    assert mains("Thread 0x00007f01 (most recent call first):\n" + frames + rest) == [""]
    assert mains("Thread 0x00007f01 (most recent call first):\n" + frames + '  File "/a/run.py", line 3 in f\n') == [
        "wait"
    ]


def test_native_threads_other_than_the_main_one():
    assert mains("(gdb) bt\n" + STARTED) == [""]
    assert mains(STARTED.partition("\n")[2] + "\nThread 2 (Thread 0x7f01 (LWP 55)):\n" + STARTED) == [""]


def test_a_backtrace_without_its_innermost_frames():
    text = (
        "#8  0x00007f0000000001 in cudaMemcpyAsync () from /venv/lib/libcudart.so\n#9  0x00007f0000000002 in main ()\n"
    )
    assert mains(fenced(("gdb:", text))) == ["synchronization with the GPU"]


def test_a_thread_that_gdb_switched_to():
    text = """\
(gdb) thread 12
[Switching to thread 12 (Thread 0x7f01 (LWP 30756))]
#0  0x00007f0000000001 in poll () at ../sysdeps/unix/syscall-template.S:81
81      in ../sysdeps/unix/syscall-template.S
(gdb) py-bt
#3 Frame 0x7f02, for file /usr/lib/python2.7/multiprocessing/queues.py, line 131, in get (self=<Queue>)
"""
    assert mains(text) == [""]


def test_source_before_a_backtrace_of_python():
    source = "".join(f"{'>' if line == 358 else ' '}{line}    delay = {line}\n" for line in range(353, 363))
    text = "Thread 1 (Thread 0x7f01 (LWP 237)):\n" + source + "(gdb) py-bt\n"
    frame = "#4 Frame 0x7f02, for file /job/train.py, line 358, in wait (timeout=1)\n"
    assert mains(text + frame) == ["wait"]


def test_two_tools_on_one_process():
    text = fenced(("py-spy:", WAITING), ("gdb:", "#0  0x00007f0000000001 in ?? () from /lib64/libcuda.so.1\n" * 2))
    assert mains(text) == ["all_reduce"]


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("Process 5: /venv/bin/python -mtorch.distributed.run train.py\n\n" + WAITING, "agent"),
        ("Process 5: /venv/bin/python /venv/bin/torchrun train.py\n\n" + WAITING, "agent"),
        ("Process 5: /venv/bin/python train.py --run torchrun\n\n" + WAITING, "rank"),
        (
            LOADING.replace("read_shard (data.py:12)", "_worker_loop (torchdata/stateful_dataloader/worker.py:1)"),
            "worker",
        ),
        (
            LOADING.replace("read_shard (data.py:12)", "get_response (vllm/v1/executor/multiproc_executor.py:1)"),
            "other",
        ),
    ],
)
def test_processes_that_are_no_ranks(text, role):
    assert [one for one, _ in roles(text)] == [role]


@pytest.mark.parametrize(
    "text",
    [
        fenced(("The log:", "epoch 1 loss 2.3\n2026-11-23 14:00:01 INFO step\n" * 20), ("The stack:", WAITING)),
        PROSE + "```\nTraceback (most recent call last):\nValueError: x\n```\n" + fenced(("Then:", WAITING)),
        PROSE * 4 + WAITING,
        fenced(("It fails:", 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n')),
    ],
)
def test_a_log_with_a_stack_stays_a_log(text):
    assert kind(text) == "log"


@pytest.mark.parametrize("label", ["(WorkerDict pid=71) ", "(WorkerDict pid=71, ip=10.0.0.1) ", "[pod/train-0/main] "])
def test_the_label_of_an_actor_or_a_pod(label):
    assert mains("".join(f"{label}{line}\n" for line in WAITING.splitlines())) == ["all_reduce"]


def test_what_grep_found_in_several_files():
    first, second = WAITING.splitlines()[:3], LOADING.splitlines()[:3]
    text = "".join(
        "--\n" + "".join(f"traces/rank{rank}.out{'-' if place else ':'}{line}\n" for place, line in enumerate(lines))
        for rank, lines in ((1, second), (0, first))
    )
    assert mains(text) == ["read_shard", "all_reduce"]
    assert roles(text) == [("rank", 1), ("rank", 0)]


def test_what_grep_found_in_one_stream():
    text = "\n--\n".join("\n".join(one.splitlines()[:3]) for one in (LOADING, WAITING))
    assert mains(text) == ["read_shard", "all_reduce"]


def test_marks_of_html_and_of_replies():
    assert mains(WAITING.replace("<module>", "&lt;module&gt;")) == ["all_reduce"]
    reply = "".join(f"> {line}\n" for line in ["```", *WAITING.splitlines(), "```"])
    assert mains(PROSE + reply + "\nDo others do the same?\n") == ["all_reduce"]


def test_a_thread_of_a_pool_whose_outermost_frames_have_no_names():
    frames = "#0  0x00007f0000000001 in pthread_cond_wait () from /lib/libc.so.6\n"
    pool = "#1  0x00007f0000000002 in c10::ThreadPool::main_loop(unsigned long) ()\n   from /venv/libc10.so\n"
    assert mains("(gdb) bt\n" + frames + pool + "#2  0x00007f0000000003 in ?? () from /lib/libc.so.6\n") == [""]


def test_frames_of_templates_without_an_address():
    inner = "#0  std::unique_lock<std::mutex>::wait<long, std::ratio<1l, 10l> > (this=0x1) at /usr/include/mutex:178\n"
    outer = "#1  gloo::transport::tcp::UnboundBuffer::waitRecv (this=0x2) at /src/buffer.cc:80\n"
    assert mains(fenced(("gdb:", inner + outer))) == ["collective"]
    assert kind("#1 load build> (definition) from Dockerfile\n#2 DONE (0.1s)\n" * 3) == "log"


def indented(text):
    return "".join(f"    {line}\n" for line in text.splitlines())


def test_a_block_that_indentation_marks():
    assert mains("py-spy shows:\n\n" + indented(WAITING) + "\nWhat does it wait for?\n") == ["all_reduce"]
    assert kind(PROSE * 3 + indented(WAITING)) == "log"
    assert kind("loss 2.3\n" * 9 + "\n" + indented(WAITING)) == "log"


@pytest.mark.parametrize("note", ["     <- stuck here", "   \u2190 waits for rank 3", "  # <--- here"])
def test_notes_behind_frames(note):
    text = WAITING.replace(":2600)", f":2600){note}")
    assert mains(text) == ["all_reduce"]


def test_an_address_of_a_thread_that_was_shortened():
    other = 'Thread 0x7F... (active): "reader"\n    read (data.py:3)\n'
    assert mains(other + WAITING.replace("Thread 71", "Thread 0x7F...")) == ["all_reduce"]


def test_lines_of_a_log_beside_stacks_are_read_too(tmp_path):
    lock = "    wait (torch/utils/file_baton.py:42)\n    step (train.py:40)\n"
    stack = 'Thread 71 (idle): "MainThread"\n' + lock + "    main (train.py:70)\n    <module> (train.py:80)\n"
    path = tmp_path / "dump.txt"
    for text, is_log in ((stack, False), ("It hangs here:\n\n" + stack + "\nWhat does it wait for?\n", True)):
        path.write_text(text)
        (run,) = read_runs([path])
        assert [rank.find(ProgressFacts) is not None for rank in run.job.ranks] == [True]
        assert bool(run.job.evidence and run.job.evidence.of("lock.waits")) == is_log
