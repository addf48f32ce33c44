"""Ranks that do not come, end on the way, come twice, or are set up otherwise than the rest."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL, SIGSTOP

from tests.faults.live.network_scenes import by_store, job
from tests.faults.live.scenes import LiveScene
from tests.faults.live.stage import TORCHRUN, Play, Ranks, on, ranks
from tests.faults.live.strikes import Strike, Strikes, has_arrived, has_started, is_measured, others_have_arrived
from tests.faults.scenes import CUDA
from tests.lab.hosts import LabHost

KILLED = 128 + SIGKILL
"""The exit code of a shell whose doctor was killed."""
BY_FOLDER_SECONDS, BY_STORE_SECONDS = 6.0, 12.0
"""How long the others wait; the store needs torch, whose import takes its time on a busy machine."""
BUSY = ("hanging_driver",)
"""GPUs of a rank whose facts take ten seconds: there is time to strike between its hello and its facts."""

THREE = job(3)
THREE_BY_STORE = by_store(THREE)
EARLY, LATE = "did not join", "joined and then stopped responding"


def struck(play: Play, *strikes: Strike) -> Play:
    """``play``, of one rank a host, in which these strikes happen. Ranks that are to be met on the way are at their
    facts for long."""
    busy = {strike.rank for strike in strikes if strike.when in (has_arrived, others_have_arrived)}
    groups = tuple(replace(group, gpus=BUSY) if group.host in busy else group for group in play.ranks)
    seconds = BY_FOLDER_SECONDS if play.way == "share" else BY_STORE_SECONDS
    return replace(play, ranks=groups, during=Strikes(strikes), timeout=seconds)


BY_FOLDER = (
    LiveScene(
        "a rank that was not started, and one that was stopped before it said hello",
        "ENV005",
        struck(job(4, odd=ranks(1, started=False)), Strike(2, SIGSTOP, has_started)),
        THREE,
        ranks=(1, 2),
        says=(EARLY,),
        codes=((2, KILLED),),
    ),
    LiveScene(
        "a rank killed and one stopped, after their hello",
        "ENV005",
        struck(job(4), Strike(2, SIGKILL, has_arrived), Strike(3, SIGSTOP, has_arrived)),
        THREE,
        ranks=(2, 3),
        hosts=("node2", "node3"),
        says=(LATE,),
        codes=((2, KILLED), (3, KILLED)),
    ),
    LiveScene(
        "a rank killed while the network is measured",
        "ENV005",
        struck(THREE, Strike(2, SIGKILL, is_measured)),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("reported, but stopped responding",),
        codes=((2, KILLED),),
    ),
    LiveScene(
        "rank 0 killed: the next one reports",
        "ENV005",
        struck(THREE, Strike(0, SIGKILL, others_have_arrived)),
        THREE,
        ranks=(0,),
        hosts=("node0",),
        says=(LATE,),
        codes=((0, KILLED),),
    ),
    LiveScene(
        "rank 0 stopped: the next one reports",
        "ENV005",
        struck(THREE, Strike(0, SIGSTOP, others_have_arrived)),
        THREE,
        ranks=(0,),
        hosts=("node0",),
        says=(LATE,),
        codes=((0, KILLED),),
    ),
)

LOST = ((1, "ENV005"), (2, "ENV005"), (0, ""))
"""What is said where rank 0, which hosts the store, is gone: nothing by itself."""

BY_STORE = (
    LiveScene(
        "a rank killed after its hello, over the store",
        "ENV005",
        struck(THREE_BY_STORE, Strike(1, SIGKILL, has_arrived)),
        THREE_BY_STORE,
        ranks=(1,),
        hosts=("node1",),
        says=(LATE,),
        codes=((1, KILLED),),
    ),
    LiveScene(
        "rank 0 killed, over its store",
        "ENV005",
        struck(THREE_BY_STORE, Strike(0, SIGKILL, others_have_arrived)),
        THREE_BY_STORE,
        lines=LOST,
        codes=((0, KILLED),),
    ),
    LiveScene(
        "rank 0 stopped, over its store",
        "ENV005",
        struck(THREE_BY_STORE, Strike(0, SIGSTOP, others_have_arrived)),
        THREE_BY_STORE,
        lines=LOST,
        codes=((0, KILLED),),
    ),
)

BY_TORCHRUN = (
    LiveScene(
        "torchrun: ranks stopped early, killed, and rank 0 stopped; the agent's store stays, and the next one reports",
        "ENV005",
        struck(
            replace(by_store(job(4)), launcher=TORCHRUN),
            Strike(3, SIGSTOP, has_started),
            Strike(2, SIGKILL, has_arrived),
            Strike(0, SIGSTOP, has_arrived),
        ),
        replace(by_store(job(2)), launcher=TORCHRUN),
        ranks=(0, 2, 3),
        says=(EARLY, LATE, "node0", "node2"),
        codes=((0, KILLED), (2, KILLED), (3, KILLED)),
    ),
)

NUMBERED_AGAIN = "export RANK=$LOCAL_RANK NODE_RANK=0"
TWO_EACH = Play(2, (ranks(0, 2), ranks(1, 2)))

TWICE = (
    LiveScene(
        "one rank twice on different hosts",
        "ENV004",
        job(3, odd=ranks(2, RANK="1")),
        THREE,
        ranks=(1,),
        hosts=("node1", "node2"),
    ),
    LiveScene(
        "one rank twice on one host",
        "ENV004",
        Play(2, (ranks(0), ranks(1), ranks(1, RANK="1"))),
        Play(2, (ranks(0), ranks(1, 2))),
        ranks=(1,),
        hosts=("node1",),
    ),
    LiveScene(
        "rank 0 twice",
        "ENV004",
        job(3, odd=ranks(2, RANK="0")),
        THREE,
        ranks=(0,),
        hosts=("node0", "node2"),
    ),
    LiveScene(
        "rank 0 twice, over the store",
        "ENV004",
        by_store(job(3, odd=ranks(2, RANK="0"))),
        THREE_BY_STORE,
        ranks=(0,),
        hosts=("node0", "node2"),
    ),
    LiveScene(
        "NODE_RANK=0 on both hosts",
        "ENV004",
        Play(2, (ranks(0, 2), ranks(1, 2, shell=NUMBERED_AGAIN))),
        TWO_EACH,
        ranks=(0, 1),
        hosts=("node0", "node1"),
    ),
    LiveScene(
        "world sizes that differ",
        "ENV003",
        job(3, odd=ranks(2, WORLD_SIZE="4")),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("4", "3"),
    ),
)


def released(*packages: str, odd: tuple[str, ...] = (), gpus: tuple[str, ...] = ()) -> Play:
    """Three hosts with these ``packages``, the last of them with ``odd`` ones."""
    places = [Ranks(number, packages=packages, gpus=gpus) for number in range(3)]
    return Play(3, (*places[:2], replace(places[2], packages=odd or packages)))


ONE_GPU = ("eight_h100", "count=1")

DIFFERENT = (
    LiveScene(
        "an algorithm forced on one host",
        "NCCL003",
        job(3, odd=ranks(2, NCCL_ALGO="Ring")),
        THREE,
        ranks=(2,),
        hosts=("node2",),
        says=("NCCL_ALGO",),
    ),
    LiveScene(
        "an algorithm in the nccl.conf of one host",
        "NCCL003",
        job(3, on(2, LabHost.write_file, "/etc/nccl.conf", "# tuned\nNCCL_ALGO=Ring\n")),
        job(3, on((0, 1, 2), LabHost.write_file, "/etc/nccl.conf", "# tuned\nNCCL_ALGO=Ring\n")),
        ranks=(2,),
        hosts=("node2",),
        says=("NCCL_ALGO", "/etc/nccl.conf:2"),
    ),
    LiveScene(
        "DETAIL only on one host",
        "NCCL007",
        job(3, odd=ranks(1, TORCH_DISTRIBUTED_DEBUG="DETAIL")),
        job(3, TORCH_DISTRIBUTED_DEBUG="INFO"),
        ranks=(1,),
        hosts=("node1",),
        says=("DETAIL",),
    ),
    LiveScene(
        "another torch on one host",
        "VER001",
        released("torch==2.8.0", odd=("torch==2.7.1",)),
        released("torch==2.8.0"),
        ranks=(2,),
        hosts=("node2",),
        says=("2.7.1", "2.8.0"),
    ),
    LiveScene(
        "another NCCL on one host",
        "NCCL008",
        released(*CUDA, odd=(CUDA[0], "nvidia-nccl-cu12==2.21.5"), gpus=ONE_GPU),
        released(*CUDA, gpus=ONE_GPU),
        ranks=(2,),
        hosts=("node2",),
        says=("2.21.5", "2.27.3"),
    ),
    LiveScene(
        "another driver on one host",
        "GPU005",
        replace(
            released(*CUDA, gpus=ONE_GPU),
            ranks=tuple(
                Ranks(host, gpus=(*ONE_GPU, *(("driver=550.54.15",) if host == 2 else ())), packages=CUDA)
                for host in range(3)
            ),
        ),
        released(*CUDA, gpus=ONE_GPU),
        ranks=(2,),
        hosts=("node2",),
        says=("550.54.15",),
        severity="warning",
    ),
    LiveScene(
        "more ranks than GPUs on one host",
        "GPU002",
        Play(2, (Ranks(0, 2, gpus=("eight_h100", "count=2"), packages=CUDA), Ranks(1, 2, gpus=ONE_GPU, packages=CUDA))),
        Play(2, tuple(Ranks(host, 2, gpus=("eight_h100", "count=2"), packages=CUDA) for host in range(2))),
        ranks=(3,),
        hosts=("node1",),
    ),
)

SCENES = (*BY_FOLDER, *BY_STORE, *BY_TORCHRUN, *TWICE, *DIFFERENT)
