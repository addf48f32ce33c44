"""Which processes are ranks, of which job, and what the others are; all scenes are real processes."""

import contextlib
import os
import pty
import subprocess
import sys
import time

import pytest

from doctor.attach import process_marks
from doctor.attach.processes import Process, ProcessTable, own_users
from doctor.attach.targets import INCOMPLETE, TargetRequest, find_targets, job_ids
from tests.attach.sleepers import (
    FORK,
    RANK_0_OF_2,
    READY,
    THREAD,
    found,
    jobs_of,
    ranks_of,
    roles_of,
    running,
    running_all,
    table_of_tests,
)
from tests.lab.ports import free_port
from tests.lab.users import ALICE, as_user, require_root, run_as

RANK_1_OF_2 = {**RANK_0_OF_2, "RANK": "1"}
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
TORCHRUN = {**RANK_0_OF_2, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
MEMBER = THREAD + "thread('pt_gloo_runloop')\n"
_TITLED = """
import ctypes, sys, time
# The area that the kernel shows as the command line, and the one of the environment: overwritten, as setproctitle does.
title = sys.argv[1].encode()
fields = [int(field) for field in open("/proc/self/stat").read().rpartition(")")[2].split()[45:49]]
start, end = fields[0], fields[3 if len(sys.argv) > 2 else 1]
ctypes.memset(start, 0, end - start)
ctypes.memmove(start, title, len(title))
time.sleep(1000)
"""
BRIEF = "import time\nprint(flush=True)\ntime.sleep(1000)\n"


def _named(tmp_path, name, target=sys.executable):
    """A program of that name, for launchers that are not installed here."""
    path = tmp_path / name
    path.symlink_to(target)
    return path


def _script(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_two_ranks_by_plain_variables_are_one_job():
    with running_all(RANK_0_OF_2, RANK_1_OF_2) as pids:
        [job] = jobs_of(pids)
    assert [(target.facts.pid, target.facts.rank, target.facts.rank_from) for target in job.ranks] == [
        (pids[0], 0, "RANK"),
        (pids[1], 1, "RANK"),
    ]
    assert (job.world_size, job.launcher, job.program, job.found_by) == (2, "", "-c", "variables")
    assert not job.ranks[0].facts.guessed


def test_two_jobs_of_one_user_are_told_apart_by_their_port():
    other = {"MASTER_PORT": "29562"}
    with running_all(RANK_0_OF_2, RANK_1_OF_2, {**RANK_0_OF_2, **other}, {**RANK_1_OF_2, **other}) as pids:
        jobs = jobs_of(pids)
    assert [[target.facts.pid for target in job.ranks] for job in jobs] == [pids[:2], pids[2:]]


def test_two_jobs_of_a_scheduler_are_told_apart_and_found_by_their_id():
    first = [{**STEP, "SLURM_PROCID": rank} for rank in "01"]
    second = [{**environ, "SLURM_JOB_ID": "78"} for environ in first]
    with running_all(*first, *second) as pids:
        jobs = jobs_of(pids)
        by_id = {name: ranks_of(pids, TargetRequest(job=name)) for name in ("77", "78.0", "7", "778")}
    assert [(job.id, job.launcher, job.world_size) for job in jobs] == [("77", "slurm", 2), ("78", "slurm", 2)]
    assert by_id["77"] == {pids[0]: 0, pids[1]: 1}
    assert by_id["78.0"] == {pids[2]: 0, pids[3]: 1}
    assert by_id["7"] == by_id["778"] == {}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"LSB_JOBID": "5", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "5"),
        ({**RANK_0_OF_2, "PBS_JOBID": "12.server"}, "12.server"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "mine"}, "mine"),
        ({**TORCHRUN, "RAY_JOB_ID": "01000000"}, "01000000"),
        ({**RANK_0_OF_2, "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}, "9_4"),
    ],
)
def test_jobs_are_found_by_the_id_of_any_scheduler(environ, name):
    with running(environ=environ) as process:
        assert ranks_of([process.pid], TargetRequest(job=name)) == {process.pid: 0}
        assert ranks_of([process.pid], TargetRequest(job=f"{name}0")) == {}


def test_default_ids_identify_no_job():
    assert job_ids({"TORCHELASTIC_RUN_ID": "none", "RAY_JOB_ID": "ffffffff"}) == ()
    assert job_ids({"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1"}) == ("3", "3.1")


def test_left_over_slurm_variables_of_an_interactive_shell_make_no_rank():
    """A shell that ``srun --pty`` once started, or a session of tmux in it."""
    leader, follower = pty.openpty()
    environ = {**STEP, "SLURM_PROCID": "0", "PATH": os.environ["PATH"]}
    python = f"{sys.executable} -S -c 'import time; time.sleep(1000)'"
    shell = ["setsid", "--ctty", "bash", "--norc", "-c", f"{python} & {python} & wait"]
    with subprocess.Popen(shell, env=environ, stdin=follower) as process:
        for _ in range(200):
            seen = [child.pid for child in table_of_tests().descendants(process.pid) if child.arguments[1:2] == ("-S",)]
            if len(seen) == 2:
                break
            time.sleep(0.02)
        assert len(seen) == 2
        assert ranks_of(seen) == {}
        for pid in (*seen, process.pid):
            os.kill(pid, 9)
    os.close(leader)
    os.close(follower)


def test_variables_of_a_batch_script_make_no_rank():
    environ = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": str(0xFFFFFFFB)}
    with running(environ=environ) as process:
        assert jobs_of([process.pid]) == []


def test_a_shell_around_a_rank_and_its_helpers_are_not_ranks(tmp_path):
    helper = _script(tmp_path, "tensorboard", BRIEF)
    inner = f"""
import subprocess, sys
tracker = "from multiprocessing.resource_tracker import main; import time; time.sleep(1000)"
for command in ([sys.executable, "-S", {str(helper)!r}], [sys.executable, "-S", "-c", tracker], ["sleep", "1000"]):
    subprocess.Popen(command, stdout=subprocess.DEVNULL)
{READY}"""
    script = _script(tmp_path, "train.py", inner)
    shell = ["bash", "-c", f"{sys.executable} -S {script}; true"]
    with running(command=shell, environ=RANK_0_OF_2) as process:
        [job] = jobs_of([child.pid for child in table_of_tests().descendants(process.pid)])
    assert [target.facts.role for target in job.targets] == ["rank", "other", "other", "other"]
    assert job.program == str(script)


def test_data_workers_belong_to_their_rank():
    code = f"{THREAD}{FORK}fork(lambda: name_thread('pt_data_worker'))\nfork()\n"
    with running(code, RANK_0_OF_2) as process:
        [job] = jobs_of([process.pid])
    workers = [target for target in job.targets if target.facts.role == "worker"]
    assert [target.facts.parent for target in workers] == [process.pid] * 2
    assert {target.process.name for target in workers} == {"pt_data_worker", "python"}
    assert [target.facts.rank for target in job.targets] == [0, None, None]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_are_workers_of_their_rank(tmp_path, method):
    script = _script(
        tmp_path,
        "train.py",
        f"""
import multiprocessing, sys, time
def work(ready):
    ready.put(1)
    time.sleep(1000)
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    ready = context.SimpleQueue()
    for _ in range(2):
        context.Process(target=work, args=(ready,), daemon=True).start()
    ready.get(), ready.get()
    print(flush=True)
    time.sleep(1000)
""",
    )
    with running(command=[sys.executable, "-S", script], environ=RANK_0_OF_2) as process:
        [job] = jobs_of([process.pid])
    roles = [target.facts.role for target in job.targets]
    assert (roles.count("rank"), roles.count("worker")) == (1, 2)
    assert {target.facts.parent for target in job.targets if target.facts.role == "worker"} == {process.pid}
    assert job.program == str(script)


def test_the_agent_in_a_task_of_srun_is_not_a_rank(tmp_path):
    ranks = "".join(
        f"subprocess.Popen([sys.executable, '-S', {str(tmp_path / 'train.py')!r}], stdout=subprocess.DEVNULL, "
        f"env=dict(os.environ, **{ {**TORCHRUN, 'RANK': rank, 'LOCAL_RANK': rank}!r}))\n"
        for rank in "01"
    )
    _script(tmp_path, "train.py", "import time\ntime.sleep(1000)\n")
    torchrun = _script(tmp_path, "torchrun", f"import os, subprocess, sys\n{ranks}{READY}")
    environ = {**STEP, "SLURM_PROCID": "0"}
    with running(command=[sys.executable, "-S", torchrun], environ=environ) as process:
        [job] = jobs_of([process.pid])
        whole = ranks_of([process.pid], TargetRequest(pids=(process.pid,)))
    assert [(target.facts.role, target.facts.rank) for target in job.targets] == [
        ("rank", 0),
        ("rank", 1),
        ("agent", None),
    ]
    assert job.launcher == "torchrun"
    assert job.id == "77"
    assert sorted(whole.values()) == [0, 1]


LAUNCH = ("python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30=", "--node_rank=%n", "train.py")
RUNNER = ("python3", "/env/bin/deepspeed", "--hostfile=hosts", "train.py")


@pytest.mark.parametrize(
    "parents",
    [
        [("/usr/sbin/sshd", "sshd: alice@notty"), ("/usr/bin/bash", "bash", "-c", "cd /home; python3 -u ..."), LAUNCH],
        [RUNNER, LAUNCH],
        [RUNNER, ("/usr/bin/pdsh", "pdsh", "-w", "node1"), ("/usr/bin/ssh", "ssh", "node1"), LAUNCH],
        [("/usr/sbin/slurmstepd", "slurmstepd: [7.batch]"), ("/usr/bin/bash", "bash", "job.sh"), RUNNER, LAUNCH],
    ],
)
def test_ranks_of_deepspeed_on_its_own_and_below_pdsh_and_ssh(parents, tmp_path):
    """Parents as deepspeed/launcher/runner.py and multinode_runner.py start them, and the variables of launch.py."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"} if len(parents) == 4 else {}
    chain = [_recorded(10 + depth, arguments, batch) for depth, arguments in enumerate(parents)]
    agent = chain[-1].pid
    sizes = {"WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}
    ranks = [
        _recorded(20 + at, RANK, {**batch, **sizes, "RANK": str(2 + at), "LOCAL_RANK": str(at)}, agent) for at in (0, 1)
    ]
    table = ProcessTable({one.pid: one for one in (*chain, *ranks)}, proc=tmp_path)
    [job] = find_targets(table, TargetRequest()).jobs
    assert [(target.facts.pid, target.facts.rank) for target in job.ranks] == [(20, 2), (21, 3)]
    assert (job.launcher, job.world_size, job.program) == ("deepspeed", 4, "train.py")
    assert agent in [target.facts.pid for target in job.targets if target.facts.role == "agent"]


RANK = ("python3", "-u", "train.py", "--local_rank=0")


def _recorded(pid, arguments, environ, parent=None):
    """A process of a recorded table, the child of the one before it."""
    program = arguments[0] if arguments[0].startswith("/") else f"/usr/bin/{arguments[0]}"
    words = arguments[1:] if arguments[0].startswith("/") else arguments
    name = program.rpartition("/")[2]
    return Process(
        pid, parent or pid - 1, float(pid), os.geteuid(), name, arguments=words, environ=environ, executable=program
    )


def test_a_python_program_that_starts_ranks_is_their_agent(tmp_path):
    """A launcher of the user's, inside a task: it has the variables of the task, its ranks have others."""
    ranks = "".join(
        f"subprocess.Popen([sys.executable, '-S', {str(tmp_path / 'train.py')!r}], stdout=subprocess.DEVNULL, "
        f"env=dict(os.environ, **{ {**RANK_0_OF_2, 'RANK': rank}!r}))\n"
        for rank in "01"
    )
    _script(tmp_path, "train.py", "import time\ntime.sleep(1000)\n")
    launcher = _script(tmp_path, "launch.py", f"import os, subprocess, sys\n{ranks}{READY}")
    environ = {**STEP, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    with running(command=[sys.executable, "-S", launcher], environ=environ) as process:
        roles = roles_of(process)
    assert roles == {"rank": ["python", "python"], "agent": ["python"]}


def test_lightnings_main_process_is_rank_0_of_those_that_it_started(tmp_path):
    """Strategy ``ddp``: it has no variable of its own, and the others no RANK."""
    code = """
import os, subprocess, sys
if "LOCAL_RANK" not in os.environ:
    for rank in (1, 2):
        others = dict(LOCAL_RANK=str(rank), NODE_RANK=os.environ.get("NODE_RANK", "0"), WORLD_SIZE="6",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29570")
        child = subprocess.Popen([sys.executable, "-S", sys.argv[0]], env=dict(os.environ, **others),
                                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(flush=True)
import time
time.sleep(1000)
"""
    script = _script(tmp_path, "fit.py", code)
    seen = {}
    for node in ("0", "1"):
        with running(command=[sys.executable, "-S", script], environ={"NODE_RANK": node}) as process:
            [job] = jobs_of([process.pid])
        seen[node] = [(t.facts.rank, t.facts.local_rank, t.facts.rank_from, t.facts.guessed) for t in job.targets]
        assert (job.launcher, job.world_size, job.ranks[0].facts.pid) == ("lightning", 6, process.pid)
    main, own = "LOCAL_RANK of its children", "LOCAL_RANK"
    assert seen["0"] == [(0, 0, main, False), (1, 1, own, False), (2, 2, own, False)]
    assert seen["1"] == [(3, 0, main, False), (4, 1, own, False), (5, 2, own, False)]


def test_spawned_processes_are_numbered_by_their_order_and_guessed():
    """What torch.multiprocessing starts, without torch: children of multiprocessing with threads of a process group."""
    code = (
        f"{MEMBER}{FORK}".replace("thread('pt_gloo_runloop')\n", "")
        + "for _ in range(3): fork(lambda: thread('pt_gloo_runloop'))\n"
    )
    with running(code) as process:
        children = [child.pid for child in table_of_tests().children(process.pid)]
        [job] = jobs_of([process.pid])
        part = jobs_of(children[1:], TargetRequest(pids=(children[1],)))
    ranks = [target.facts for target in job.ranks]
    assert [(rank.pid, rank.rank) for rank in ranks] == list(zip(children, range(3), strict=True))
    assert all(rank.guessed and rank.rank_from == "order of the processes" for rank in ranks)
    assert [target.facts.role for target in job.targets] == ["rank"] * 3 + ["agent"]
    assert (job.world_size, job.found_by) == (3, "parent")
    assert [(target.facts.pid, target.facts.rank) for target in part[0].targets] == [(children[1], 1)]


def test_the_process_that_serves_the_store_is_rank_0():
    code = (
        THREAD
        + FORK
        + "fork(lambda: thread('gloo_tcp_loop'))\n"
        + ("fork(lambda: (thread('gloo_tcp_loop'), thread('pt_tcpstore_uv')))\n")
    )
    with running(code) as process:
        children = [child.pid for child in table_of_tests().children(process.pid)]
        assert ranks_of(children) == {children[1]: 0, children[0]: 1}


def test_connections_tell_ranks_from_data_workers_where_threads_have_no_names():
    """torch before 2.5: the second child connects to the first, as to its store."""
    code = f"""{FORK}
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
held = []
fork(lambda: threading.Thread(target=lambda: held.append(server.accept()), daemon=True).start())
fork(lambda: held.append(socket.create_connection(server.getsockname())))
"""
    with running(code) as process:
        children = [child.pid for child in table_of_tests().children(process.pid)]
        assert ranks_of(children) == dict(zip(children, range(2), strict=True))


def test_processes_that_set_their_variables_themselves_are_joined_by_their_connections():
    port, connect = free_port(), "held = socket.create_connection(('127.0.0.1', {}))"
    serve = "server = socket.create_server(('127.0.0.1', {}))\nheld = []\nthread('pt_tcpstore')\n" + (
        "threading.Thread(target=lambda: held.append(server.accept()), daemon=True).start()"
    )
    others = free_port()
    codes = [f"import socket\n{MEMBER}{code.format(number)}" for number in (port, others) for code in (serve, connect)]
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(running(code)).pid for code in codes]
        jobs = jobs_of(pids)
    assert [[target.facts.pid for target in job.ranks] for job in jobs] == [pids[:2], pids[2:]]
    assert all(job.found_by == "connections" for job in jobs)
    assert all(target.facts.guessed for job in jobs for target in job.ranks)


@pytest.mark.parametrize(("ports", "count"), [(("29571", "29572"), 2), (("", ""), 1)])
def test_ranks_that_a_program_of_the_users_started(tmp_path, ports, count):
    """A sweep starts independent jobs; without MASTER_PORT, the parent is what its ranks have in common."""
    train = _script(tmp_path, "train.py", "import time\ntime.sleep(1000)\n")
    starts = "".join(
        f"subprocess.Popen([sys.executable, '-S', {str(train)!r}], stdout=subprocess.DEVNULL, "
        f"env=dict(os.environ, **{ {**RANK_0_OF_2, 'MASTER_PORT': port, 'RANK': rank}!r}))\n"
        for rank, port in zip("01", ports, strict=True)
    )
    launch = _script(tmp_path, "launch.py", f"import os, subprocess, sys\n{starts}{READY}")
    with running(command=[sys.executable, "-S", launch]) as process:
        jobs = jobs_of([process.pid])
    assert len(jobs) == count
    assert [target.facts.rank for job in jobs for target in job.ranks] == [0, 1]
    assert all(job.targets[-1].facts.pid == process.pid for job in jobs)


def test_processes_spawned_in_a_task_are_numbered_by_the_node_of_the_task():
    """``srun --ntasks-per-node=1`` of a script that calls torch.multiprocessing.spawn."""
    code = f"{THREAD}{FORK}for _ in range(2): fork(lambda: thread('pt_nccl_watchdg'))\n"
    with running(code, {**STEP, "SLURM_PROCID": "1"}) as process:
        [job] = jobs_of([process.pid])
    assert [(target.facts.rank, target.facts.role) for target in job.targets] == [
        (2, "rank"),
        (3, "rank"),
        (None, "agent"),
    ]
    assert (job.world_size, job.ranks[0].facts.node) == (4, 1)


def test_a_data_worker_whose_rank_has_ended_is_no_rank():
    spawned = "from multiprocessing.spawn import spawn_main; spawn_main(1, 2)"
    named = running(f"{THREAD}name_thread('pt_data_worker')", RANK_0_OF_2)
    command = [sys.executable, "-S", "-c", f"{THREAD}thread('pt_autograd_0')\n{READY}#{spawned}"]
    with named as first, running(command=command, environ=RANK_0_OF_2) as second:
        assert jobs_of([first.pid, second.pid]) == []


def test_forked_children_without_any_mark_are_data_workers(tmp_path):
    """A process with torch, of which nothing else shows that it trains, is a job of its own."""
    code = THREAD + FORK + "thread('pt_autograd_0')\nfork()\n"
    with running(code) as process:
        [job] = jobs_of([process.pid])
    assert [(target.facts.role, target.facts.rank) for target in job.targets] == [("rank", 0), ("worker", None)]
    assert (job.found_by, job.world_size, job.ranks[0].facts.guessed) == ("libraries", 1, True)


def test_python_without_torch_and_without_variables_is_no_target():
    with running() as process:
        assert jobs_of([process.pid]) == []


def test_named_pids_are_targets_whatever_they_are():
    with running() as process:
        [job] = jobs_of([process.pid], TargetRequest(pids=(process.pid,)))
    assert [(target.facts.role, target.facts.rank, target.facts.guessed) for target in job.targets] == [
        ("rank", 0, True)
    ]
    assert job.found_by == "request"


def test_a_named_child_of_a_rank_is_read_like_a_rank():
    with running(THREAD + FORK + "thread('pt_autograd_0')\nfork()\n") as process:
        [child] = table_of_tests().descendants(process.pid)
        [job] = jobs_of([child.pid], TargetRequest(pids=(child.pid,)))
    assert [(target.facts.pid, target.facts.role) for target in job.targets] == [(child.pid, "rank")]


def test_what_could_not_be_read_in_time_is_noted(monkeypatch):
    assert INCOMPLETE not in found().notes
    monkeypatch.setattr(process_marks.ProcessMarks.__init__, "__kwdefaults__", {"seconds": 0.0})
    with running(), running(MEMBER, RANK_0_OF_2) as process:  # the marks of the first one would have to be read
        seen = found()
        [job] = [job for job in seen.jobs if process.pid in {target.facts.pid for target in job.targets}]
    assert INCOMPLETE in seen.notes
    assert job.ranks[0].facts.rank == 0


def test_a_named_pid_that_does_not_exist_is_missing():
    with running() as process:
        pass
    found_none = found(TargetRequest(pids=(process.pid,)))
    assert (found_none.missing, found_none.jobs) == ((process.pid,), ())


def test_the_attaching_process_and_its_children_are_never_targets():
    program = (
        "import os, subprocess, sys\n"
        "from doctor.attach.processes import process_table\n"
        "from doctor.attach.targets import TargetRequest, find_targets\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "pids = (os.getpid(), child.pid)\n"
        "lists = [find_targets(process_table(), TargetRequest(asked)) for asked in ((), pids)]\n"
        "print(not {target.facts.pid for found in lists for target in found.targets} & {*pids})\n"
        "child.kill()\n"
    )
    environ = {**os.environ, **RANK_0_OF_2}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_another_attaching_process_is_no_target(tmp_path):
    """``srun --overlap doctor attach`` starts one on every host, with the variables of a task."""
    doctor = _script(tmp_path, "doctor", READY)
    with running(command=[sys.executable, "-S", doctor, "attach"], environ={**STEP, "SLURM_PROCID": "0"}) as process:
        assert jobs_of([process.pid]) == []


@pytest.mark.parametrize(
    "forged",
    [
        {"RANK": "1" + "0" * 30},
        {"RANK": "-1"},
        {"RANK": "two"},
        {"RANK": "7"},
        {"WORLD_SIZE": "-2"},
        {"RANK": "0", "LOCAL_RANK": "99999999999", "LOCAL_WORLD_SIZE": "-1", "NODE_RANK": "x"},
        {"RANK": "\x1b[31m0", "MASTER_PORT": "\x1b]0;title\x07"},
    ],
)
def test_forged_numbers_are_not_used(forged):
    with running(MEMBER, {**RANK_0_OF_2, **forged}) as process:
        [job] = jobs_of([process.pid])
    [rank] = [target.facts for target in job.ranks]
    assert rank.rank == 0
    assert rank.guessed == (forged.get("RANK") != "0" and "WORLD_SIZE" not in forged)
    for number in (rank.local_rank, rank.local_world_size, rank.world_size, rank.node):
        assert number is None or 0 <= number < 1 << 24


def test_two_processes_with_the_same_rank_are_numbered_by_their_order():
    with running_all(RANK_0_OF_2, RANK_0_OF_2) as pids:
        [job] = jobs_of(pids)
    assert [(target.facts.pid, target.facts.rank, target.facts.guessed) for target in job.ranks] == [
        (pids[0], 0, True),
        (pids[1], 1, True),
    ]


def test_a_stale_rank_that_all_tasks_inherited_does_not_number_them():
    tasks = [{**STEP, "SLURM_PROCID": rank, "RANK": "0", "WORLD_SIZE": "2"} for rank in "01"]
    with running_all(*tasks) as pids:
        [job] = jobs_of(pids)
    assert [(target.facts.rank, target.facts.rank_from, target.facts.guessed) for target in job.ranks] == [
        (0, "SLURM_PROCID", False),
        (1, "SLURM_PROCID", False),
    ]


def test_an_unreadable_environment_is_numbered_by_what_is_left(tmp_path):
    """The second rank is not dumpable, so its environment may not be read even by its own user."""
    require_root()
    undumpable = "import os, ctypes\nif os.environ['RANK'] == '1': ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
    command = [*run_as(ALICE), sys.executable, "-S", "-c", undumpable + BRIEF]
    ranks = "".join(
        f"subprocess.Popen({command!r}, stdout=subprocess.PIPE, "
        f"env=dict(os.environ, **{ {**TORCHRUN, 'RANK': rank, 'LOCAL_RANK': rank}!r})).stdout.readline()\n"
        for rank in "01"
    )
    torchrun = _script(tmp_path, "torchrun", f"import os, subprocess, sys\n{ranks}{READY}")
    with running(command=[sys.executable, "-S", torchrun]) as process, as_user(ALICE):
        pids = [child.pid for child in table_of_tests().children(process.pid)]
        [job] = jobs_of(pids)
        unreadable = found(TargetRequest(pids=tuple(pids))).unreadable
    assert [(target.facts.rank, target.facts.guessed) for target in job.ranks] == [(0, False), (1, True)]
    assert unreadable == 1


@pytest.mark.parametrize("threads", ["", MEMBER], ids=["without threads", "with threads of torch"])
def test_named_processes_with_unreadable_environments_are_one_job(threads):
    """Nothing but the request shows that they are ranks of one job."""
    require_root()
    python = [*run_as(ALICE), sys.executable, "-S", "-c"]
    undumpable = f"import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n{threads}{BRIEF}"
    command = [*python, undumpable]
    with running(command=command) as one, running(command=command) as other, as_user(ALICE):
        listed = found(TargetRequest(pids=(one.pid, other.pid)))
        [alone] = found(TargetRequest(pids=(one.pid,))).jobs
    assert [[target.facts.pid for target in job.ranks] for job in listed.jobs] == [[one.pid, other.pid]]
    assert [target.facts.guessed for target in listed.targets] == [True, True]
    assert listed.unreadable == 2
    assert [target.facts.pid for target in alone.ranks] == [one.pid]


def test_an_environment_that_a_title_has_overwritten_is_unreadable(tmp_path):
    titled = _script(tmp_path, "titled.py", _TITLED.replace("time.sleep", "print(flush=True)\ntime.sleep"))
    ranks = "".join(
        f"subprocess.Popen([sys.executable, '-S', {str(titled)!r}, 'training rank {rank}', 'all'], "
        f"stdout=subprocess.PIPE, env=dict(os.environ, **{ {**TORCHRUN, 'RANK': rank}!r})).stdout.readline()\n"
        for rank in "01"
    )
    torchrun = _script(tmp_path, "torchrun", f"import os, subprocess, sys\n{ranks}{READY}")
    with running(command=[sys.executable, "-S", torchrun]) as process:
        [job] = jobs_of([process.pid])
        unreadable = found(TargetRequest(pids=(process.pid,))).unreadable
    assert [(target.facts.rank, target.facts.guessed) for target in job.ranks] == [(0, True), (1, True)]
    assert [target.facts.program for target in job.ranks] == ["training rank 0", "training rank 1"]
    assert (job.launcher, unreadable) == ("torchrun", 2)


def test_processes_of_other_users_are_left_out_without_the_option():
    require_root()
    python = [*run_as(ALICE), sys.executable, "-S", "-c", BRIEF]
    with running(command=python, environ=RANK_0_OF_2) as process:
        assert jobs_of([process.pid]) == []
        assert found().others >= 1
        assert ranks_of([process.pid], TargetRequest(all_users=True)) == {process.pid: 0}
        assert ranks_of([process.pid], TargetRequest(pids=(process.pid,))) == {process.pid: 0}
        [job] = jobs_of([process.pid], TargetRequest(all_users=True))
    assert job.user == ALICE


def test_who_called_sudo_counts_as_this_user():
    require_root()
    assert own_users({"SUDO_UID": "41001"}) == {0, 41001}
    assert own_users({"SUDO_UID": "x"}) == own_users({}) == {0}


def test_a_zombie_among_the_ranks_is_told():
    code = f"""
{MEMBER}{FORK}
for _ in range(2): fork(lambda: thread('pt_gloo_runloop'))
if os.fork() == 0: os._exit(0)
import time
time.sleep(0.2)
""".replace("def fork", "def fork", 1).replace(MEMBER, THREAD)
    with running(code) as process:
        [job] = jobs_of([process.pid])
    assert [(target.facts.rank, target.facts.ended) for target in job.ranks] == [(0, ""), (1, ""), (2, "zombie")]


def test_secrets_and_control_characters_do_not_enter_the_facts(tmp_path):
    secret = "hf_" + "aB3dE5gH7jK9" * 3
    script = _script(tmp_path, "train\x1b[31m.py", READY)
    command = [sys.executable, "-S", script, "--token", secret, f"--api-key={secret}"]
    with running(command=command, environ={**RANK_0_OF_2, "HF_TOKEN": secret, "SLURM_JOB_ID": "\x1b[2J5"}) as process:
        [job] = jobs_of([process.pid])
    text = repr([target.facts for target in job.targets]) + repr(job._replace(targets=(), ids=frozenset()))
    assert secret not in text
    assert job.program == str(tmp_path / "train\ufffd[31m.py")
    assert job.id == "\ufffd[2J5"


def test_ranks_of_another_pid_namespace_have_the_numbers_of_this_one():
    require_root()
    inner = f"{sys.executable} -S -c 'import sys; print(flush=True); sys.stdin.read()' inside"
    with running(
        command=["unshare", "--pid", "--fork", "bash", "-c", f"{inner}; true"], environ=RANK_0_OF_2
    ) as process:
        pids = [child.pid for child in table_of_tests().descendants(process.pid)]
        [job] = jobs_of(pids)
    assert job.ranks[0].process.inner_pid != job.ranks[0].facts.pid
    assert job.ranks[0].facts.pid in pids


def test_ranks_of_ray_are_told_from_its_idle_workers_by_their_titles(tmp_path):
    """Ray sets the variables of a rank in Python, so its title, its parent and its threads are left."""
    titled = _script(tmp_path, "titled.py", _TITLED)
    titles = ["ray::RayTrainWorker.go", "ray::IDLE", "ray::RayTrainWorker.go", "ray::DashboardAgent", "ray::MyActor"]
    raylet = _named(tmp_path, "raylet", "/bin/bash")
    starts = "".join(f"{sys.executable} -S {titled} {title} & " for title in titles)
    with running(command=[raylet, "-c", f"{starts} echo; wait"]) as process:
        for _ in range(100):
            seen = {child.arguments for child in table_of_tests().children(process.pid)}
            if seen == {(title,) for title in titles}:
                break
            time.sleep(0.05)
        [job] = jobs_of([child.pid for child in table_of_tests().children(process.pid)])
    assert [(target.facts.role, target.facts.rank) for target in job.targets] == [
        ("rank", 0),
        ("rank", 1),
        ("agent", None),
    ]
    assert (job.launcher, job.program) == ("ray", "ray::RayTrainWorker")
