"""The graph of waits, and who stands at its end."""

import msgspec
import pytest

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.rank_state import LONG_STILL, JobState, RankState
from doctor.analysis.hang.wait_graph import CollectiveNode, missing_from, roots_of, strong_components, wait_graph
from doctor.core.facts import Frame
from doctor.core.facts.telemetry import (
    AT_WORK,
    ENDLESS,
    FAILING,
    IDLE,
    LOST,
    PROCESS_EVENT,
    SEARCH,
    SHARED_LOCK,
    TRICKLES,
    WALK,
    WHOSE_THREAD,
    WITH_TIMEOUT,
)
from doctor.core.job import Member, build_job
from doctor.facts import ChildProcess, Collective, ProcessGroup, ProgressFacts, RecorderFacts
from doctor.monitor.telemetry.stacks.blocking_call import OF_THREADS


def job_of(recorders, world=None, **progress):
    """Ranks that stand still, and what their recorders show."""
    stalled = ProgressFacts(state="stalled", stage="", point="", idle=20.0, **progress)
    members = [
        Member(rank, {"progress": stalled, "flight-recorder": recorder} if recorder else {"progress": stalled})
        for rank, recorder in enumerate(recorders)
    ]
    return build_job(members, world_size=world or len(members))


def recorder(*calls, groups=()):
    """Calls as (group, sequence) or Collective; groups as {name: members}."""
    made = tuple(
        call if isinstance(call, Collective) else Collective(*call, "all_reduce", "nccl", at=1.0) for call in calls
    )
    return RecorderFacts(groups=tuple(ProcessGroup(name, "", members) for name, members in groups), collectives=made)


def transfer(operation, peer, group="p", number=1):
    return Collective(group, number, operation, "nccl", is_p2p=True, peer=peer, at=1.0)


def roots(job):
    return list(roots_of(JobState(job)))


ALL = (("0", (0, 1, 2, 3)),)


def test_whoever_has_not_entered_is_the_root():
    job = job_of([recorder(("0", 7), groups=ALL)] * 3 + [recorder(groups=ALL)])
    assert roots(job) == [(3,)]
    assert missing_from(JobState(job), CollectiveNode("0", 7)) == [3]


def test_a_chain_leads_to_its_end():
    groups = (("a", (0, 1)), ("b", (1, 2)), ("c", (2, 3)))
    job = job_of([recorder((name, 1), groups=groups) for name in "abc"] + [recorder(groups=groups)])
    assert roots(job) == [(3,)]


def test_a_circle_and_those_that_wait_for_it():
    groups = (("a", (0, 1)), ("b", (0, 1)), ("c", (1, 2)))
    job = job_of([recorder((name, 1), groups=groups) for name in "abc"])
    assert roots(job) == [(0, 1)]


def test_all_have_met():
    assert roots(job_of([recorder(("0", 7), groups=ALL)] * 4)) == []


def test_two_ends():
    groups = (("a", (0, 1)), ("b", (2, 3)))
    job = job_of([recorder(("a", 1), groups=groups), recorder(groups=groups), recorder(("b", 1), groups=groups), None])
    assert roots(job) == [(1,), (3,)]


def test_ranks_that_never_answered_are_missing():
    job = build_job(
        [
            Member(
                0,
                {
                    "progress": ProgressFacts(state="stalled"),
                    "flight-recorder": recorder(("0", 3), groups=(("0", ()),)),
                },
            )
        ],
        world_size=2,
        absent=(1,),
    )
    assert roots(job) == [(1,)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (transfer("send", 1), transfer("recv", 0), []),
        (transfer("send", 1), transfer("send", 0), [(0, 1)]),
        (transfer("recv", 1), transfer("recv", 0), [(0, 1)]),
        (transfer("send", 1), None, [(1,)]),
        (transfer("send", 7), None, []),
    ],
)
def test_transfers(first, second, expected):
    groups = (("p", (0, 1)),)
    job = job_of([recorder(first, groups=groups), recorder(*([second] if second else []), groups=groups)])
    assert roots(job) == expected


def test_peers_are_counted_in_their_group():
    groups = (("p", (1, 3)),)
    ranks = [recorder(groups=groups) for _ in range(4)]
    ranks[1] = recorder(transfer("send", 1), groups=groups)
    assert roots(job_of(ranks)) == [(3,)]


def in_call(name, file="torch/distributed/distributed_c10d.py", *, answered=False):
    own = Frame("train.py", 30, "train", user=True, answered=answered)
    return ProgressFacts(
        state="stalled",
        stage="train",
        point="step",
        idle=20.0,
        stack=(Frame(file, 2500, name), own) if name else (own,),
    )


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("", [(0,)]),  # rank 0 is in no call: the receive of rank 1 may be from it
        ("barrier", [(1,)]),  # every rank is in a call, and none of them is a send
    ],
)
def test_a_receive_that_no_recorder_shows_may_be_from_a_rank_that_is_in_no_call(own, expected):
    """Two pipelines of two stages over Gloo, each stage with a data-parallel group."""
    groups = (("even", (0, 2)), ("odd", (1, 3)))
    reduced = Collective("odd", 5, "all_reduce", "gloo", at=1.0)
    shown = [recorder(groups=groups)] * 3 + [recorder(reduced, groups=groups)]
    progress = [in_call(own), in_call("recv"), in_call("recv"), in_call("all_reduce")]
    job = build_job(
        [Member(rank, {"progress": progress[rank], "flight-recorder": one}) for rank, one in enumerate(shown)],
        world_size=4,
    )
    assert roots(job) == expected


def shown(calls, peers, groups=(("0", (0, 1, 2)),), *, answered=True):
    """Three ranks that wait: what stacks show that they are in, with peers of those in a send or receive, whose
    function also has the other part of the exchange if it is ``answered``."""
    members = []
    for rank, (name, peer) in enumerate(zip(calls, peers, strict=True)):
        reduced = () if name in ("send", "recv") else (Collective("0", 5, name, "gloo", at=1.0),)
        progress = msgspec.structs.replace(in_call(name, answered=answered), root=peer)
        members.append(Member(rank, {"progress": progress, "flight-recorder": recorder(*reduced, groups=groups)}))
    return build_job(members, world_size=3)


REDUCE = "all_reduce"


@pytest.mark.parametrize(
    ("calls", "peers", "expected"),
    [
        (("recv", REDUCE, REDUCE), (2, None, None), (2,)),  # rank 2 has left its send out
        (("send", REDUCE, REDUCE), (1, None, None), (1,)),
        (("recv", "recv", REDUCE), (2, 2, None), (2,)),
        (("recv", REDUCE, REDUCE), (None, None, None), (0,)),  # of an unknown rank
        (("recv", "recv", REDUCE), (1, 0, None), (0, 1)),  # they wait for each other
        (("recv", "recv", "recv"), (1, 2, 0), (0, 1, 2)),
        (("recv", "recv", REDUCE), (1, 2, None), (2,)),  # a stage that waits for one that waits for rank 2
    ],
)
def test_a_transfer_whose_peer_went_on_is_missing_on_the_peer(calls, peers, expected):
    found = diagnose_stall(shown(calls, peers))
    assert (found.kind, found.ranks) == ("deadlock", expected)


@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_transfer_without_another_part_in_its_function_is_one_too_many(call):
    found = diagnose_stall(shown((call, REDUCE, REDUCE), (2, None, None), answered=False))
    assert (found.kind, found.ranks) == ("deadlock", (0,))


def test_a_transfer_of_a_rank_in_several_groups_may_be_in_any_of_them():
    groups = (("0", (0, 1, 2)), ("1", (0, 2)))
    found = diagnose_stall(shown(("recv", REDUCE, REDUCE), (1, None, None), groups))
    assert found.ranks == (0,)


def test_a_send_is_answered_by_a_receive_from_its_rank():
    graph = wait_graph(JobState(shown(("send", "recv", REDUCE), (1, 0, None))))
    assert graph[0] == graph[1] == []


def test_counters_tell_of_calls_that_were_overwritten():
    waiting = recorder(("0", 7), groups=ALL)
    counted = RecorderFacts(groups=(ProcessGroup("0", "", ALL[0][1], enqueued=7),), wrapped=True)
    assert roots(job_of([waiting] * 3 + [counted])) == []


def test_a_counter_that_counts_transfers_along_is_not_believed():
    waiting = recorder(("p", 7), groups=(("p", (0, 1)),))
    mixed = RecorderFacts(
        groups=(ProcessGroup("p", "", (0, 1), enqueued=900),), collectives=(transfer("recv", 0, number=900),)
    )
    assert missing_from(JobState(job_of([waiting, mixed])), CollectiveNode("p", 7)) == [1]


def test_who_waits_for_a_moment_does_not_wait():
    job = build_job(
        [
            Member(0, {"progress": ProgressFacts(state="running", idle=0.2), "flight-recorder": recorder(("0", 7))}),
            Member(1, {"progress": ProgressFacts(state="stalled", idle=30.0), "flight-recorder": recorder(groups=ALL)}),
        ]
    )
    assert roots(job) == []
    assert diagnose_stall(job) is None


def test_devices_that_do_not_finish_what_others_left():
    groups = (("0", (0, 1, 2, 3)),)
    ahead, behind = recorder(("0", 9), groups=groups), recorder(("0", 7), ("0", 8), ("0", 9), groups=groups)
    found = diagnose_stall(job_of([ahead, ahead, behind, ahead]))
    assert (found.kind, found.ranks) == ("behind", (2,))


def test_the_graph_grows_with_the_ranks_and_not_with_their_pairs():
    world = 1024
    groups = (("0", tuple(range(world))),)
    job = job_of([recorder(("0", 7), groups=groups)] * (world // 2) + [recorder(groups=groups)] * (world // 2))
    graph = wait_graph(JobState(job))
    assert sum(map(len, graph.values())) == world
    assert len(roots(job)) == world // 2


def test_components_of_a_graph_deeper_than_the_stack():
    chain = {number: [number + 1] for number in range(20_000)} | {20_000: [10_000]}
    components = strong_components(chain)
    assert len(components[0]) == 10_001
    assert [len(component) for component in components[1:]] == [1] * 10_000


def test_components_in_the_order_in_which_they_lead_to_one_another():
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": [], "f": ["e"]}
    assert [set(component) for component in strong_components(graph)] == [{"e"}, {"d"}, {"a", "b", "c"}, {"f"}]


LOCK = "a lock of its own process (threading.Lock, or a lock in native code)"
SHARED = f"{SHARED_LOCK} (multiprocessing)"
OWN, LIBRARY = Frame("/job/train.py", 5, "main", user=True), Frame("/env/site-packages/wandb/init.py", 7, "init")
LOADING = {
    "blocked": "an item of a queue (multiprocessing.Queue.get)",
    "stack": (Frame("/env/site-packages/torch/utils/data/dataloader.py", 1275, "_try_get_data"), OWN),
}
WORKER = ChildProcess(7, "S", "pt_data_worker", waits="data from 10.0.0.5:80", still=7.0)
BEFORE_TRAINING = [
    ("a lock in the code of the user", {"blocked": LOCK}, True),
    ("a lock for a moment", {"blocked": LOCK, "still": 4.0}, False),
    ("a lock in a library", {"blocked": LOCK, "stack": (LIBRARY, OWN)}, False),
    ("a lock while a child works", {"blocked": LOCK, "children": (ChildProcess(7, "S", "aws"),)}, False),
    ("an event that another thread sets", {"blocked": "an event or a condition (threading)"}, False),
    ("a lock on a file", {"blocked": "a lock on /data/x.lock", "still": 100.0}, False),
    ("a question to the user", {"blocked": "input from a terminal (/dev/pts/3)"}, True),
    ("a lock that processes share", {"blocked": SHARED}, True),
    ("the same in a library", {"blocked": SHARED, "stack": (LIBRARY, OWN)}, False),
    ("the same of a process that has ended", {"blocked": SHARED + LOST, "stack": (LIBRARY, OWN)}, True),
    ("a sleep, which may be short", {}, False),
    ("a sleep that is long", {"still": LONG_STILL}, True),
    ("the same, as the kernel shows it", {"still": LONG_STILL, "blocked": "the end of a sleep"}, True),
    ("a sleep of which nothing is known", {"still": None}, False),
    ("a sleep of more than a minute", {"blocked": "the end of a sleep of minutes"}, True),
    ("a server that does not answer", {"blocked": "data from 10.0.0.5:80"}, True),
    ("the same in a library", {"blocked": "data from 10.0.0.5:80", "stack": (LIBRARY, OWN)}, False),
    ("a data worker without an answer", {**LOADING, "children": (WORKER,)}, True),
    (
        "a data worker that reads a file",
        {**LOADING, "children": (msgspec.structs.replace(WORKER, waits="the file /d"),)},
        False,
    ),
    (
        "a data worker of which nothing is known",
        {**LOADING, "children": (msgspec.structs.replace(WORKER, waits=""),)},
        False,
    ),
    ("a semaphore", {"blocked": "a semaphore that other processes share"}, False),
    ("a loop that looks for a file", {"blocked": "the end of a sleep", "still": None, "loops": 7.0}, True),
]


@pytest.mark.parametrize(
    ("known", "expected"), [case[1:] for case in BEFORE_TRAINING], ids=[c[0] for c in BEFORE_TRAINING]
)
def test_what_is_certain_before_the_first_batch(known, expected):
    progress = ProgressFacts(state="running", **{"still": 8.0, "stack": (OWN,), **known})
    assert progress.stage == "setup"
    assert RankState(0, progress, None).stands is expected


CONDITION = Frame("/usr/lib/python3.11/threading.py", 327, "wait")
QUEUE, PRODUCER = Frame("/usr/lib/python3.11/queue.py", 171, "get"), "an item of a queue (queue.get)"
EVENT, SAVED = OF_THREADS[:2]
PIPE, DISK = (f"{WHOSE_THREAD}{one}" for one in ("room in a pipe", "the file /mnt/last.ckpt"))
ELSEWHERE = f"{WHOSE_THREAD}{PRODUCER}{WHOSE_THREAD}a result of another process (ray.get)"
SEARCHED = f"{SEARCH}a recursion of solve() at train.py:9"
COMPILER = Frame("/env/site-packages/torch/_inductor/async_compile.py", 9, "wait")
QUEUED = SAVED + WHOSE_THREAD + SAVED + ENDLESS
FUTURE = Frame("/usr/lib/python3.11/concurrent/futures/_base.py", 451, "result")
UPLOAD = Frame("/env/site-packages/urllib3/connection.py", 7, "getresponse")
PATHLIB = Frame("/usr/lib/python3.11/pathlib.py", 1044, "open")
CHECKPOINT = {"point": "checkpoint", "stack": (Frame("/env/site-packages/torch/serialization.py", 9, "save"), OWN)}
FETCH = {
    "blocked": "an item of a queue (multiprocessing.Queue.get)",
    "stack": (Frame("/env/site-packages/torch/utils/data/dataloader.py", 1310, "_try_get_data"), OWN),
}
WORKER, READS = (ChildProcess(pid, "S", "pt_data_worker", still=still) for pid, still in ((5, 8.0), (6, 1.0)))
TORCH_FUTURE = Frame("/env/site-packages/torch/futures/__init__.py", 103, "wait")
RAY = Frame("/env/site-packages/ray/_private/worker.py", 1029, "get_objects")
SOCKET = Frame("/usr/lib/python3.11/socket.py", 718, "readinto")
NOTICE = Frame("/usr/lib/python3.11/multiprocessing/synchronize.py", 268, "wait")
SEMAPHORE = Frame("/usr/lib/python3.11/multiprocessing/synchronize.py", 95, "__enter__")
LOGGING = Frame("/usr/lib/python3.11/logging/__init__.py", 922, "acquire")
DEVICE = Frame("/env/site-packages/torch/cuda/__init__.py", 1040, "synchronize")
IMPORT = Frame("<frozen importlib._bootstrap>", 225, "acquire")
FILELOCK = Frame("/env/site-packages/filelock/_api.py", 340, "acquire")
ANSWER = "data from 10.0.0.9:443"
SLOW = f"{ANSWER}{WITH_TIMEOUT}{TRICKLES}16 bytes in 8 s"
STILL, DEAD = ChildProcess(8, "S", "rsync", still=8.0), ChildProcess(9, "Z", "ls")
COMMAND = {"stack": (Frame("/usr/lib/python3.11/subprocess.py", 2004, "_try_wait"), OWN)}
COMMAND |= {"blocked": "the end of a child process"}
WORKS = ChildProcess(7, "S", "aws", still=2.0)
BATON = Frame("/env/site-packages/torch/utils/file_baton.py", 50, "wait")
POOL = Frame("/usr/lib/python3.11/multiprocessing/pool.py", 768, "get")
FAILED = f"{FAILING} (8 of them, with exit code 1)"
REPLACED = {"children": (ChildProcess(11, "R", "python", still=7.0),)}
PROCESSES = Frame("/usr/lib/python3.11/multiprocessing/queues.py", 90, "put")
FULL = "room in a queue (multiprocessing.Queue.put)"
SERVES = "a request to its own server (serve_forever)"
SELECT = Frame("/usr/lib/python3.11/selectors.py", 415, "select")
SERVER = Frame("/usr/lib/python3.11/socketserver.py", 235, "serve_forever")
BETWEEN_STEPS = [
    ("a lock in the code of the user", {"blocked": LOCK}, True),
    ("the same after an epoch", {"blocked": LOCK, "point": "epoch-end"}, True),
    ("a lock while a child works", {"blocked": LOCK, "children": (ChildProcess(7, "S", "aws"),)}, False),
    ("a lock for a moment", {"blocked": LOCK, "still": 4.0}, False),
    ("a lock of a logger", {"blocked": LOCK, "stack": (LIBRARY, OWN)}, False),
    ("a lock that processes share", {"blocked": SHARED}, True),
    ("the same in a library", {"blocked": SHARED, "stack": (LIBRARY, OWN)}, False),
    ("the same of a process that has ended", {"blocked": SHARED + LOST, "stack": (LIBRARY, OWN)}, True),
    ("the same in a step", {"blocked": SHARED + LOST, "stack": (SEMAPHORE, LIBRARY, OWN), "point": "step"}, True),
    ("the same for a moment", {"blocked": SHARED + LOST, "still": 4.0}, False),
    ("a queue that nobody fills", {"blocked": PRODUCER, "stack": (CONDITION, QUEUE, OWN)}, True),
    ("a queue of a library", {"blocked": PRODUCER, "stack": (CONDITION, QUEUE, LIBRARY, OWN)}, False),
    (
        "a queue of a library that no thread fills, for a moment",
        {"blocked": PRODUCER + ENDLESS, "stack": (CONDITION, QUEUE, LIBRARY, OWN)},
        False,
    ),
    (
        "a queue of a library that no thread fills",
        {"blocked": PRODUCER + ENDLESS, "stack": (CONDITION, QUEUE, LIBRARY, OWN), "still": 11.0},
        True,
    ),
    (
        "a queue of a library whose thread waits for another process",
        {"blocked": PRODUCER + ELSEWHERE, "stack": (CONDITION, QUEUE, LIBRARY, OWN), "still": 11.0},
        True,
    ),
    (
        "the same for a moment",
        {"blocked": PRODUCER + ELSEWHERE, "stack": (CONDITION, QUEUE, LIBRARY, OWN), "still": 4.0},
        False,
    ),
    (
        "the same while that may come",
        {"blocked": PRODUCER + ELSEWHERE + AT_WORK, "stack": (CONDITION, QUEUE, LIBRARY, OWN), "still": 11.0},
        False,
    ),
    ("a task of Ray that computes", {"blocked": f"a result of another process (ray.get){AT_WORK}"}, False),
    ("a future of torch", {"blocked": "a future (torch.futures)", "stack": (TORCH_FUTURE, OWN)}, True),
    (
        "a queue of a library whose thread writes a file",
        {"blocked": PRODUCER + DISK, "stack": (CONDITION, QUEUE, LIBRARY, OWN), "still": 11.0},
        False,
    ),
    (
        "a queue of a library that a thread may fill",
        {"blocked": PRODUCER, "stack": (CONDITION, QUEUE, LIBRARY, OWN), "still": 11.0},
        False,
    ),
    (
        "an event of a library, and all other threads have slept for long",
        {"blocked": EVENT + IDLE, "stack": (CONDITION, LIBRARY, OWN), "still": 11.0},
        True,
    ),
    (
        "the same of a compiler",
        {"blocked": EVENT + IDLE, "stack": (CONDITION, COMPILER, OWN), "still": 11.0},
        False,
    ),
    ("a search while a child works", {"still": None, "loops": 9.0, "blocked": SEARCHED, "children": (WORKS,)}, True),
    ("a loop while a child works", {"still": None, "loops": 9.0, "children": (WORKS,)}, False),
    ("an event that another thread may set", {"blocked": EVENT, "stack": (CONDITION, OWN)}, False),
    ("an event that no thread can set", {"blocked": EVENT + ENDLESS, "stack": (CONDITION, OWN)}, True),
    ("a stuck save in another thread", {"blocked": SAVED + ENDLESS, "stack": (CONDITION, FUTURE, OWN)}, True),
    ("the same in a library", {"blocked": SAVED + ENDLESS, "stack": (CONDITION, FUTURE, LIBRARY, OWN)}, False),
    ("a thread that writes to a full pipe", {"blocked": SAVED + PIPE, "stack": (CONDITION, FUTURE, OWN)}, True),
    ("a pool that waits for itself", {"blocked": QUEUED, "stack": (CONDITION, FUTURE, OWN)}, True),
    ("the same in a step", {"blocked": QUEUED, "stack": (CONDITION, FUTURE, OWN), "point": "step"}, True),
    ("the same in a library", {"blocked": QUEUED, "stack": (CONDITION, FUTURE, LIBRARY, OWN)}, False),
    ("a future in a step", {"blocked": SAVED, "stack": (CONDITION, FUTURE, OWN), "point": "step"}, False),
    (
        "a step of a library that waits for a pool",
        {"blocked": QUEUED, "stack": (CONDITION, FUTURE, LIBRARY, OWN), "point": "step"},
        False,
    ),
    ("the same of a library", {"blocked": SAVED + PIPE, "stack": (CONDITION, FUTURE, LIBRARY, OWN)}, False),
    ("a thread that writes a file", {"blocked": SAVED + DISK, "stack": (CONDITION, FUTURE, OWN)}, False),
    ("a checkpoint in a thread that writes to a full pipe", {**CHECKPOINT, "blocked": SAVED + PIPE}, True),
    ("a checkpoint in a thread that writes a file", {**CHECKPOINT, "blocked": SAVED + DISK}, False),
    ("a server that is silent", {"blocked": "data from 10.0.0.9:80"}, True),
    ("a server that the rank serves on", {"blocked": SERVES, "stack": (SELECT, SERVER, OWN)}, True),
    ("a library that waits for an answer", {"blocked": ANSWER, "stack": (SOCKET, UPLOAD, OWN)}, True),
    ("the same until a timeout", {"blocked": ANSWER + WITH_TIMEOUT, "stack": (SOCKET, UPLOAD, OWN)}, False),
    ("the same while bytes trickle", {"blocked": SLOW, "stack": (SOCKET, UPLOAD, OWN)}, True),
    ("the same while a child works", {"blocked": SLOW, "stack": (SOCKET, OWN), "children": (WORKS,)}, False),
    ("a request until a timeout", {"blocked": ANSWER + WITH_TIMEOUT, "stack": (SOCKET, OWN)}, False),
    ("attempts to receive until a timeout", {"blocked": ANSWER + WITH_TIMEOUT}, True),
    ("a lock of processes", {"blocked": LOCK, "stack": (SEMAPHORE, OWN)}, True),
    ("an event of processes", {"blocked": f"{PROCESS_EVENT} (multiprocessing)", "stack": (NOTICE, OWN)}, True),
    (
        "the same of a library",
        {"blocked": f"{PROCESS_EVENT} (multiprocessing)", "stack": (NOTICE, LIBRARY, OWN)},
        False,
    ),
    ("a handler of a logger", {"blocked": LOCK, "stack": (LOGGING, OWN)}, True),
    ("a pool whose processes fail", {"blocked": EVENT + FAILED, "stack": (CONDITION, POOL, OWN), **REPLACED}, True),
    ("the same in a library", {"blocked": EVENT + FAILED, "stack": (CONDITION, POOL, LIBRARY, OWN), **REPLACED}, True),
    ("the same while another child works", {"blocked": EVENT + FAILED, "children": (WORKS,)}, False),
    ("the same before the first batch", {"blocked": EVENT + FAILED, "stage": "setup", **REPLACED}, True),
    ("a pool whose processes work", {"blocked": EVENT, "stack": (CONDITION, POOL, OWN), **REPLACED}, False),
    ("a walk through many folders", {"blocked": f"{WALK}/data/7"}, False),
    ("a library that waits for a device", {"blocked": LOCK, "stack": (DEVICE, OWN)}, False),
    ("an import that waits", {"blocked": LOCK, "stack": (IMPORT, OWN)}, False),
    ("the same while no other thread runs", {"blocked": LOCK + IDLE, "stack": (IMPORT, OWN)}, True),
    ("the same of a library", {"blocked": LOCK + IDLE, "stack": (IMPORT, LIBRARY, OWN)}, False),
    ("an event, and all other threads sleep", {"blocked": EVENT + IDLE, "stack": (CONDITION, OWN)}, True),
    ("the same in a library", {"blocked": EVENT + IDLE, "stack": (CONDITION, LIBRARY, OWN)}, False),
    ("a task of Ray that never runs", {"blocked": "a result of another process (ray.get)", "stack": (RAY, OWN)}, True),
    ("a loop that does not end", {"still": None, "loops": 8.0}, True),
    ("a loop that began a moment ago", {"still": None, "loops": 3.0}, False),
    ("a loop in the step", {"still": None, "loops": 8.0, "point": "forward"}, False),
    ("a batch of workers that stand", {**FETCH, "children": (WORKER,)}, True),
    ("a batch of a worker that reads", {**FETCH, "children": (WORKER, READS)}, False),
    ("a batch of workers that are not seen", FETCH, False),
    ("a signal that nobody sends", {"blocked": "a signal"}, True),
    ("a lock file that a library waits for", {"blocked": "the end of a sleep", "stack": (FILELOCK, OWN)}, True),
    ("a checkpoint in a pipe that nobody reads", {**CHECKPOINT, "blocked": "room in a pipe"}, True),
    ("a checkpoint that waits for a thread in vain", {**CHECKPOINT, "blocked": SAVED + ENDLESS}, True),
    ("a checkpoint that waits for a thread", {**CHECKPOINT, "blocked": SAVED}, False),
    ("a checkpoint to a slow file server", {**CHECKPOINT, "blocked": "the file /mnt/last.ckpt"}, False),
    ("a named pipe that nobody opens", {"blocked": "the other end of a named pipe", "stack": (PATHLIB, OWN)}, True),
    ("the same of a library", {"blocked": "the other end of a named pipe", "stack": (PATHLIB, LIBRARY, OWN)}, True),
    ("attempts without end", {"blocked": "the end of a sleep"}, True),
    ("pauses of a library between its attempts", {"blocked": "the end of a sleep", "stack": (LIBRARY, OWN)}, False),
    ("an evaluation", {"blocked": ""}, False),
    ("a lock that a child holds", {"blocked": "a lock on /data/x.lock", "children": (STILL,)}, True),
    ("a command that does not end", {**COMMAND, "children": (STILL,)}, True),
    ("the output of a command", {**COMMAND, "blocked": "data from a pipe", "children": (STILL,)}, True),
    ("a command that does not read", {**COMMAND, "blocked": "room in a pipe", "children": (STILL,)}, True),
    ("a command that has ended, and another one that hangs", {**COMMAND, "children": (DEAD, STILL)}, True),
    ("a command that works", {**COMMAND, "children": (ChildProcess(7, "S", "aws", still=2.0), STILL)}, False),
    ("a command of which nothing is known", {**COMMAND, "children": (ChildProcess(7, "S", "aws"),)}, False),
    ("a command that is not seen", COMMAND, False),
    ("a child that the rank forked", {"blocked": "the end of a child process", "children": (STILL,)}, True),
    ("the same while it works", {"blocked": "the end of a child process", "children": (WORKS, STILL)}, False),
    ("a queue whose reader was killed", {"blocked": FULL, "stack": (PROCESSES, OWN), "children": (DEAD,)}, True),
    ("the same while a child works", {"blocked": FULL, "stack": (PROCESSES, OWN), "children": (WORKS,)}, False),
    ("the lock file of a build", {"blocked": "the end of a sleep", "stack": (BATON, OWN)}, True),
    ("the same in a library", {"blocked": "the end of a sleep", "stack": (BATON, LIBRARY, OWN)}, False),
    ("a question to the user", {"blocked": "input from a terminal (/dev/pts/3)"}, True),
    ("a terminal whose output is stopped", {"blocked": "room in a terminal, whose output is stopped"}, True),
    ("a command that stands before the first batch", {**COMMAND, "stage": "setup", "children": (STILL,)}, True),
]


@pytest.mark.parametrize(("known", "expected"), [case[1:] for case in BETWEEN_STEPS], ids=[c[0] for c in BETWEEN_STEPS])
def test_what_is_certain_between_two_steps(known, expected):
    given = {"still": 8.0, "stack": (OWN,), "stage": "train", "point": "batch-end", **known}
    assert RankState(0, ProgressFacts(state="running", **given), None).stands is expected


HELD = Frame("/env/site-packages/doctor/monitor/watchdog/rounds/round_request.py", 41, "wait")
OBSERVED = Frame("/env/site-packages/doctor/monitor/integrations/backward_pass.py", 32, "backward")
ENGINE = Frame("/env/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ((CONDITION, HELD, OWN), True),
        ((HELD, OWN), True),
        ((ENGINE, OBSERVED, OWN), False),
        ((OWN,), False),
        ((), False),
    ],
)
def test_a_rank_is_held_where_the_doctor_waits_and_not_where_it_observes(stack, expected):
    assert RankState(0, ProgressFacts(state="running", stack=stack), None).is_held is expected


@pytest.mark.parametrize("retired", [False, True])
@pytest.mark.parametrize(("entered", "expected"), [(99.5, False), (101.5, False), (91.0, True), (None, True)])
def test_a_rank_that_has_just_entered_a_collective_moves_from_one_to_the_next(entered, expected, retired):
    stack = (Frame("/env/site-packages/torch/distributed/distributed_c10d.py", 3245, "all_gather"), OWN)
    progress = ProgressFacts(run="a", state="stalled", at=100.0, idle=9.0, stage="train", stack=stack)
    entry = Collective("0", 7, "all_gather", backend="gloo", at=entered, retired=retired)
    assert RankState(0, progress, RecorderFacts(collectives=(entry,))).waits is expected


def _in_ray(made):
    """Rank 0 waits in an all_reduce that both made ``made`` times before, and rank 1 in a barrier of Ray Train."""
    step, alone = Frame("/job/train.py", 30, "step", user=True), Frame("/job/train.py", 52, "evaluate", user=True)
    calls = [Collective("0", number, "all_reduce", "nccl", at=1.0, frames=(step,)) for number in range(1, made + 2)]
    done = [msgspec.structs.replace(one, state="completed") for one in calls[:-1]]
    barrier = Frame("/env/site-packages/ray/train/v2/_internal/execution/collective_impl.py", 40, "barrier")
    stalled = ProgressFacts(state="stalled", stage="train", point="step", idle=20.0)
    groups = (("0", (0, 1)),)
    waits = {"progress": stalled, "flight-recorder": recorder(*done, calls[-1], groups=groups)}
    apart = msgspec.structs.replace(stalled, stack=(barrier, alone))
    return build_job(
        [Member(0, waits), Member(1, {"progress": apart, "flight-recorder": recorder(*done, groups=groups)})],
        world_size=2,
    )


@pytest.mark.parametrize(("made", "kind", "ranks"), [(5, "one-sided", (1,)), (0, "deadlock", (0, 1))])
def test_a_call_that_no_recorder_shows_beside_one_that_was_made_before(made, kind, ranks):
    found = diagnose_stall(_in_ray(made))
    assert (found.kind, found.ranks) == (kind, ranks)
