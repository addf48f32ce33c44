"""Files of stacks: of a process whose interpreter can't answer, of several dumps, and what is none."""

import faulthandler
import threading

import pytest

from doctor.monitor.telemetry.stacks.stack_files import HEAD, read_stack_file


def test_what_faulthandler_writes_of_another_thread(tmp_path):
    def training_step(reached, go):
        reached.set()
        go.wait(30)

    reached, go = threading.Event(), threading.Event()
    trainer = threading.Thread(target=training_step, args=(reached, go))
    trainer.start()
    assert reached.wait(10)
    with (tmp_path / "rank-0.txt").open("w") as stream:
        stream.write(HEAD.format(trainer.ident))
        stream.flush()
        faulthandler.dump_traceback(stream)
    go.set()
    trainer.join()
    own = [frame.function for frame in read_stack_file(tmp_path / "rank-0.txt") if frame.user]
    assert own == ["training_step"]


TWO = """\
training thread 0x2
Current thread 0x0000000000000001 (most recent call first):
  File "/x/watchdog.py", line 8 in tick

Thread 0x0000000000000002 (most recent call first):
  File "/home/me/old.py", line 1 in old

Current thread 0x0000000000000001 (most recent call first):
  File "/x/watchdog.py", line 8 in tick

Thread 0x0000000000000003 [worker] (most recent call first):
  File "/x/worker.py", line 4 in run

Thread 0x0000000000000002 [MainThread] (most recent call first):
  File "/home/me/tra, in.py", line 30 in training_step
  File "/home/me/train.py", line 90 in <module>
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (TWO, [30, 90]),
        (TWO.replace("training thread 0x2\n", ""), [30, 90]),
        (TWO[: TWO.index(", line 90")], [30]),
        (TWO[: TWO.index("Thread 0x0000000000000003")], [1]),
        ("training thread 0x9\n" + TWO, []),
        ("training thread 0x2\n", []),
        ("", []),
        ("\x00\xff File no stack at all", []),
    ],
)
def test_files_of_stacks(tmp_path, text, lines):
    path = tmp_path / "rank-0.txt"
    path.write_text(text)
    assert [frame.line for frame in read_stack_file(path)] == lines


def test_no_file_of_stacks(tmp_path):
    assert read_stack_file(tmp_path / "nobody.txt") == ()
