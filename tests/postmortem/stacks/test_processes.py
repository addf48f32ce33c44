"""Which processes of a dump are ranks, on which hosts, and what else is read of them."""

from pathlib import Path

import pytest

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.core.frames import NATIVE_CODE
from doctor.postmortem.run_reader import read_runs
from doctor.postmortem.stacks.collected import read_stacks
from doctor.postmortem.stacks.processes import collect_stacks, ranks_of_stacks

DATA = Path(__file__).parents[2] / "data" / "stacks"
C10D = "torch/distributed/distributed_c10d.py"
THREAD_RUNNER = "ray/train/v2/_internal/execution/worker_group/thread_runner.py"


def process(pid, *frames, command="python train.py", name="MainThread", state="idle"):
    """The text of py-spy for one process."""
    lines = "".join(f"    {function} ({place})\n" for function, place in frames)
    return (
        f'Process {pid}: {command}\nPython v3.11.7 (/usr/bin/python3.11)\n\nThread {pid} ({state}): "{name}"\n{lines}'
    )


WAITS = (("all_reduce", f"{C10D}:3252"), ("train", "train.py:20"))
WORKS = (("tokenize", "train.py:12"), ("train", "train.py:19"))


def collected(**texts):
    return collect_stacks((Path(name.replace("__", ".")), text) for name, text in texts.items())


def roles(stacks):
    return {one.pid: one.role for facts in stacks.hosts.values() for one in facts.processes}


def test_agents_and_workers_are_no_ranks():
    text = (
        process(
            10,
            ("_invoke_run", "torch/distributed/elastic/agent/server/api.py:923"),
            ("main", "torch/distributed/run.py:9"),
        )
        + process(11, *WAITS, ("wrapper", "torch/distributed/elastic/multiprocessing/errors/__init__.py:357"))
        + process(12, ("get", "queue.py:1"), ("_worker_loop", "torch/utils/data/_utils/worker.py:300"))
        + process(13, ("main", "multiprocessing/resource_tracker.py:227"))
        + process(14, ("join", "torch/multiprocessing/spawn.py:130"), ("<module>", "train.py:40"))
        + process(15, ("_main_loop", "torch/_inductor/compile_worker/subproc_pool.py:3"))
    )
    assert roles(collected(a__txt=text)) == {
        10: "agent",
        11: "rank",
        12: "worker",
        13: "other",
        14: "agent",
        15: "other",
    }


def test_agents_of_ray_are_no_ranks():
    stacks = collect_stacks([(Path("ray.txt"), (DATA / "ray" / "ray_stack.txt").read_text())])
    assert roles(stacks) == {25310: "other", 25312: "other", 25378: "rank", 25379: "rank"}
    progress = ranks_of_stacks(stacks).progress
    assert {rank: one.stack[0].function for rank, one in progress.items()} == {0: "all_reduce", 1: "load"}
    assert {one.stack_from for one in progress.values()} == {"ray"}


@pytest.mark.parametrize("name", ["TrainingThread(train_fn_with_final_checkpoint_flush)", "Thread-3"])
def test_ray_train_trains_in_a_thread_of_its_workers(name):
    main = ("main_loop", "ray/_private/worker.py:1069"), ("<module>", "ray/_private/workers/default_worker.py:323")
    outer = ("ThreadRunner.run.<locals>._run_target", f"{THREAD_RUNNER}:37"), ("run", "threading.py:982")
    text = ""
    for pid, inner in ((21, WAITS), (22, WORKS)):
        lines = "".join(f"    {function} ({place})\n" for function, place in (*inner, *outer))
        text += process(pid, *main, command="ray::RayTrainWorker") + f'Thread {pid + 10} (idle): "{name}"\n{lines}'
    stacks = collected(a__txt=text)
    assert roles(stacks) == {21: "rank", 22: "rank"}
    progress = ranks_of_stacks(stacks).progress
    assert {rank: one.stack[0].function for rank, one in progress.items()} == {0: "all_reduce", 1: "tokenize"}


def test_a_worker_belongs_to_its_parent():
    text = process(11, *WAITS) + process(
        12, ("read", "data.py:4"), ("_worker_loop", "torch/utils/data/_utils/worker.py:300")
    ).replace("\n\nThread", "\nParent Process 11: python train.py\n\nThread")
    progress = ranks_of_stacks(collected(a__txt=text)).progress
    assert [(child.pid, child.name) for child in progress[0].children] == [(12, "data worker at data.py:4")]


def test_hosts_in_the_names_of_files():
    texts = {f"trace-jean-zay-iam{number:02}__out": process(7, *WAITS) + process(8, *WAITS) for number in (3, 12)}
    found = collected(**texts)
    assert set(found.hosts) == {"jean-zay-iam03", "jean-zay-iam12"}
    assert ranks_of_stacks(found).homes == {
        0: "jean-zay-iam03",
        1: "jean-zay-iam03",
        2: "jean-zay-iam12",
        3: "jean-zay-iam12",
    }


@pytest.mark.parametrize("name", ["pyspy_dump_20261123_144410", "stacks_rank_3", "dump2", "py_spy_native", "gdb_bt_12"])
def test_names_of_files_that_name_no_host(name):
    assert set(collected(**{f"{name}__txt": process(7, *WAITS)}).hosts) == {""}


def test_containers_have_equal_pids():
    found = collected(rank0__txt=process(1, *WAITS), rank1__txt=process(1, *WORKS))
    progress = ranks_of_stacks(found).progress
    assert {rank: one.stack[0].function for rank, one in progress.items()} == {0: "all_reduce", 1: "tokenize"}


def test_a_variable_that_processes_inherited_numbers_none_of_them():
    text = "".join(f"RANK=0\nWORLD_SIZE=2\n{process(pid, *WAITS)}" for pid in (21, 22))
    (facts,) = collected(a__txt=text).hosts.values()
    assert [(one.rank, one.guessed) for one in facts.processes] == [(0, True), (1, True)]


def test_a_process_that_could_not_be_read():
    text = process(11, *WAITS) + process(12, *WAITS) + "Process 13: python train.py\nError: Failed to suspend process\n"
    found = collected(a__txt=text)
    (refused,) = (one for facts in found.hosts.values() for one in facts.processes if one.refused)
    assert (refused.pid, refused.refused) == (13, "Failed to suspend process")
    assert {rank: one.state for rank, one in ranks_of_stacks(found).progress.items()} == {
        0: "stalled",
        1: "stalled",
        2: "silent",
    }


def test_where_most_could_not_be_read_none_of_them_is_suspected():
    text = process(11, *WAITS) + "".join(
        f"Process {pid}: python train.py\nError: Permission denied\n" for pid in (12, 13)
    )
    assert {one.state for one in ranks_of_stacks(collected(a__txt=text)).progress.values()} == {"stalled"}


def test_a_rank_that_computes_is_running():
    found = collected(a__txt=process(11, *WAITS) + process(12, *WORKS, state="active+gil"))
    assert {rank: one.state for rank, one in ranks_of_stacks(found).progress.items()} == {0: "stalled", 1: "running"}


def test_the_command_line_may_have_several_lines():
    text = process(11, *WAITS, command="python -c import time\nThread = 1\ndef f (x.py:1)\n") + process(12, *WORKS)
    assert [one.pid for one in read_stacks(text)] == [11, 12]
    assert [one.main.frames[0].function for one in read_stacks(text)] == ["all_reduce", "tokenize"]


def test_headings_of_equal_stacks_listed_together():
    text = (
        'Thread 1 (active): "MainThread"\nThread 2 (active): "MainThread"\n    all_reduce (a.py:1)\n'
        'Thread 3 (idle): "MainThread"\n    wait (threading.py:306)\n'
    )
    found = read_stacks(text)
    assert [(one.pid, one.main.frames[0].function) for one in found] == [
        (1, "all_reduce"),
        (2, "all_reduce"),
        (3, "wait"),
    ]


def test_frames_without_a_thread():
    (found,) = read_stacks("barrier (torch/distributed/distributed_c10d.py:5030)\ntrain (train.py:1)\n")
    assert [frame.function for frame in found.main.frames] == ["barrier", "train"]


def test_a_backtrace_without_a_thread():
    text = "#0  0x00007f in ?? () from /lib64/libcuda.so\n#1  0x00007f in cudaMemcpyAsync () from /lib/libcudart.so\n"
    progress = ranks_of_stacks(collect_stacks([(Path("rank3.txt"), text)])).progress
    assert progress[3].stack[0].file == NATIVE_CODE
    assert progress[3].awaits == "synchronization with the GPU"


def test_stacks_of_several_processes_by_faulthandler_in_one_file():
    """The main thread of each process is the last one of its dump."""
    one = (DATA / "asleep" / "faulthandler" / "stacks_rank_0.txt").read_text()
    two = (DATA / "asleep" / "faulthandler" / "stacks_rank_1.txt").read_text()
    assert [len(found.samples) for found in read_stacks(one + two + one)] == [2, 1]


def diagnosed(text, tmp_path):
    path = tmp_path / "dump.txt"
    path.write_text(text)
    (run,) = read_runs([path])
    return diagnose_stall(run.job)


@pytest.mark.parametrize("state", ["idle", "active"])
def test_most_ranks_are_not_at_fault_from_one_stack_of_each(tmp_path, state):
    """A healthy job: rank 0 has come to the collective first."""
    text = process(11, *WAITS) + "".join(process(pid, *WORKS, state=state) for pid in (12, 13, 14))
    assert diagnosed(text, tmp_path).kind == "undetermined"
    assert diagnosed(process(11, *WAITS) + process(12, *WAITS) + process(13, *WORKS), tmp_path).ranks == (2,)


def test_ranks_that_wait_for_their_device_are_not_the_ones_that_others_wait_for(tmp_path):
    """With NCCL a rank waits for its collective in the next synchronization."""
    device = (("cudaStreamSynchronize", "libcudart.so.12"), ("train", "train.py:30"))
    text = process(11, *device) + process(12, *device) + process(13, ("read", "train.py:12"), ("train", "train.py:19"))
    found = diagnosed(text, tmp_path)
    assert (found.kind, found.ranks, found.waiting) == ("elsewhere", (2,), (0, 1))
    assert diagnosed(process(11, *device) + process(12, *device), tmp_path).kind == "undetermined"


def test_a_wait_for_the_device_differs_from_no_collective(tmp_path):
    device = (("cudaStreamSynchronize", "libcudart.so.12"), ("train", "train.py:30"))
    assert diagnosed(process(11, *device) + process(12, *WAITS) + process(13, *WAITS), tmp_path).kind == "undetermined"
