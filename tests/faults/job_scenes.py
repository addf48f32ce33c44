"""Jobs of several processes and hosts: each captures itself where it runs, and the captures are judged together."""

from __future__ import annotations

import os
from dataclasses import replace

from tests.faults.scenes import CUDA, Scene, crew, process, srun_environ, together, torchrun_environ
from tests.faults.settings_scenes import interface
from tests.faults.stage import Host, Play, Process

TORCH = ("torch==2.8.0",)
WORLD = crew(3, like=process(packages=TORCH))
HEALTHY_WORLD = together(*WORLD)
STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
GPU_WORLD = crew(3, like=process(gpus=("eight_h100", "count=3"), packages=CUDA))


def changed(
    rank: int, ranks: tuple[Process, ...] = WORLD, *, packages: tuple[str, ...] | None = None, **environ: str
) -> Play:
    """The world of three with one rank that differs."""
    odd = replace(ranks[rank], environ=tuple({**dict(ranks[rank].environ), **environ}.items()))
    if packages is not None:
        odd = replace(odd, packages=packages)
    return together(*(odd if number == rank else one for number, one in enumerate(ranks)))


def pinned(*places: int) -> Play:
    """Two ranks, each tied to one of this machine's processors."""
    cpus = sorted(os.sched_getaffinity(0))
    ranks = crew(2, like=process(packages=TORCH))
    tied = (
        replace(one, wrapper=f"taskset -c {cpus[place % len(cpus)]}") for one, place in zip(ranks, places, strict=True)
    )
    return together(*tied, needs=("taskset", "two-cpus"))


ONE_HOST = (
    Scene(
        "world sizes that differ",
        "ENV003",
        changed(2, WORLD_SIZE="4", LOCAL_WORLD_SIZE="4"),
        HEALTHY_WORLD,
        ranks=(2,),
        says=("4", "3"),
    ),
    Scene("one rank twice", "ENV004", changed(2, RANK="1"), HEALTHY_WORLD, ranks=(1,)),
    Scene(
        "an algorithm forced on one rank",
        "NCCL003",
        changed(2, NCCL_ALGO="Ring"),
        HEALTHY_WORLD,
        ranks=(2,),
        says=("NCCL_ALGO",),
    ),
    Scene(
        "DETAIL only on one rank",
        "NCCL007",
        changed(1, TORCH_DISTRIBUTED_DEBUG="DETAIL"),
        HEALTHY_WORLD,
        ranks=(1,),
    ),
    Scene(
        "another torch on one rank",
        "VER001",
        changed(1, packages=("torch==2.7.1",)),
        HEALTHY_WORLD,
        ranks=(1,),
        says=("2.7.1",),
    ),
    Scene(
        "another NCCL on one rank",
        "NCCL008",
        changed(2, GPU_WORLD, packages=("torch==2.8.0+cu128", "nvidia-nccl-cu12==2.21.5")),
        together(*GPU_WORLD),
        ranks=(2,),
        says=("2.21.5", "2.27.3"),
    ),
    Scene(
        "two ranks on the same processor",
        "ENV012",
        pinned(0, 0),
        pinned(0, 1),
        severity="warning",
        ranks=(0, 1),
    ),
    Scene(
        "RANK=0 exported before srun",
        "ENV009",
        together(*(process(**srun_environ(rank, 3), RANK="0", WORLD_SIZE="3") for rank in range(3))),
        together(*(process(**srun_environ(rank, 3)) for rank in range(3))),
        ranks=(0,),
        also=("ENV001",),
    ),
    Scene(
        "WORLD_SIZE written by hand under srun",
        "ENV003",
        together(*(process(**srun_environ(rank, 2), RANK=str(rank), WORLD_SIZE="4", **STORE) for rank in range(2))),
        together(*(process(**srun_environ(rank, 2), RANK=str(rank), WORLD_SIZE="2", **STORE) for rank in range(2))),
        ranks=(0, 1),
        says=("WORLD_SIZE=4", "2"),
        also=("NET002",),
    ),
    Scene(
        "srun starts fewer tasks than SLURM_NTASKS says",
        "ENV010",
        together(*(process(**{**srun_environ(rank, 2), "SLURM_NTASKS": "4"}) for rank in range(2))),
        together(*(process(**srun_environ(rank, 2)) for rank in range(2))),
        ranks=(0, 1),
        says=("SLURM_NTASKS=4",),
    ),
)


def machine(
    number: int,
    *processes: Process,
    name: str = "",
    address: str = "",
    names: str = "10.7.0.1 node0\n10.7.0.2 node1\n10.7.0.3 node2",
    more: str = "",
    boot: int | None = None,
) -> Host:
    """A machine of its own: network, host name, boot id, machine id, /etc/hosts, processes, /dev/shm. No name server:
    what its own file does not say is unknown at once."""
    identity = f"{number if boot is None else boot:08x}-0000-4000-8000-000000000000"
    setup = f"""
hostname {name or f"node{number}"}
echo {identity} > boot{number}; mount --bind boot{number} /proc/sys/kernel/random/boot_id
echo {identity.replace("-", "")} > machine{number}; mount --bind machine{number} /etc/machine-id
printf '127.0.0.1 localhost\\n{names}\\n' > hosts{number}; mount --bind hosts{number} /etc/hosts
: > resolv{number}; mount --bind resolv{number} /etc/resolv.conf
mount -t tmpfs -o size=1g shm /dev/shm
{interface("eth0", address or f"10.7.0.{number + 1}/24")}
{more}
"""
    return Host(processes, ("net", "mount", "uts", "pid"), setup)


def member(rank: int, world: int = 2, **environ: str) -> Process:
    """One rank a host, as torchrun starts it on ``world`` hosts."""
    start = torchrun_environ(rank, world, per_host=1)
    return process(packages=TORCH, **{**start, "MASTER_ADDR": "node0", **environ})


def pair(*, more: str = "", **environ: str) -> Play:
    """Two hosts of one rank, identical."""
    return Play(tuple(machine(number, member(number, **environ), more=more) for number in range(2)))


def three(odd: Host) -> Play:
    """Three hosts of which the last is ``odd``."""
    return Play((machine(0, member(0, 3)), machine(1, member(1, 3)), odd))


TWO_HOSTS = pair()
THREE_HOSTS = three(machine(2, member(2, 3)))

SEVERAL_HOSTS = (
    Scene(
        "host names on loopback, as Debian's installer writes them",
        "NET002",
        Play(
            (
                machine(0, member(0, MASTER_ADDR="10.7.0.1"), names="127.0.1.1 node0\n10.7.0.2 node1"),
                machine(1, member(1, MASTER_ADDR="10.7.0.1"), names="127.0.1.1 node1\n10.7.0.1 node0"),
            )
        ),
        TWO_HOSTS,
        ranks=(0, 1),
        hosts=("node0", "node1"),
        says=("127.0.1.1",),
    ),
    Scene(
        "a host that does not know its own name",
        "NET001",
        Play((machine(0, member(0, 2)), machine(1, member(1, 2), names="10.7.0.1 node0"))),
        TWO_HOSTS,
        ranks=(1,),
        hosts=("node1",),
    ),
    Scene(
        "two machines of one name",
        "NET003",
        Play((machine(0, member(0)), machine(1, member(1), name="node0", names="10.7.0.2 node0"))),
        TWO_HOSTS,
        ranks=(0, 1),
        hosts=("node0",),
        also=("ENV006",),
    ),
    Scene(
        "loopback selected on one host",
        "NET009",
        Play((machine(0, member(0)), machine(1, member(1, NCCL_SOCKET_IFNAME="lo")))),
        TWO_HOSTS,
        ranks=(1,),
        hosts=("node1",),
        says=("lo",),
    ),
    Scene(
        "Docker's bridge selected on both hosts",
        "NET009",
        pair(more=interface("docker0", "172.17.0.1/16"), NCCL_SOCKET_IFNAME="docker0"),
        pair(more=interface("docker0", "172.17.0.1/16"), NCCL_SOCKET_IFNAME="eth0"),
        ranks=(0, 1),
        says=("docker0",),
    ),
    Scene(
        "subnets without a route",
        "NET010",
        Play(
            (
                machine(0, member(0, MASTER_ADDR="10.7.0.1")),
                machine(1, member(1, MASTER_ADDR="10.7.0.1"), address="192.168.50.2/24", names="192.168.50.2 node1"),
            )
        ),
        Play(
            (
                machine(0, member(0, MASTER_ADDR="10.7.0.1"), more="ip route add default via 10.7.0.254"),
                machine(
                    1,
                    member(1, MASTER_ADDR="10.7.0.1"),
                    address="192.168.50.2/24",
                    names="192.168.50.2 node1",
                    more="ip route add default via 192.168.50.254",
                ),
            )
        ),
        severity="warning",
        ranks=(0, 1),
    ),
    Scene(
        "an MTU of 1500 among 9000",
        "NET012",
        Play(
            (
                machine(0, member(0, 3), more="ip link set eth0 mtu 9000"),
                machine(1, member(1, 3), more="ip link set eth0 mtu 9000"),
                machine(2, member(2, 3)),
            )
        ),
        THREE_HOSTS,
        severity="warning",
        ranks=(2,),
        hosts=("node2",),
        says=("9000", "1500"),
    ),
    Scene(
        "the master's name on loopback elsewhere",
        "NET005",
        Play((machine(0, member(0)), machine(1, member(1), names="127.0.1.1 node0\n10.7.0.2 node1"))),
        TWO_HOSTS,
        ranks=(1,),
        hosts=("node1",),
        also=("ENV006",),
    ),
    Scene(
        "the master's name leads elsewhere on one host",
        "ENV006",
        three(machine(2, member(2, 3), names="10.7.0.77 node0\n10.7.0.3 node2")),
        THREE_HOSTS,
        ranks=(2,),
        says=("10.7.0.77",),
    ),
    Scene(
        "the master's name unknown on one host",
        "NET004",
        Play((machine(0, member(0)), machine(1, member(1), names="10.7.0.2 node1"))),
        TWO_HOSTS,
        ranks=(1,),
        hosts=("node1",),
    ),
    Scene(
        "the same --node-rank on two hosts",
        "ENV004",
        Play((machine(0, member(0)), machine(1, member(0)))),
        TWO_HOSTS,
        ranks=(0,),
        hosts=("node0", "node1"),
    ),
    Scene(
        "--nnodes=3 on one host and 2 on the others",
        "ENV003",
        Play((machine(0, member(0, 3)), machine(1, member(1, 3)), machine(2, member(2, 4)))),
        THREE_HOSTS,
        ranks=(2,),
        hosts=("node2",),
    ),
    Scene(
        "only IPv6 on one host",
        "NET016",
        Play(
            (
                machine(0, member(0, MASTER_ADDR="10.7.0.1")),
                machine(1, member(1, MASTER_ADDR="10.7.0.1"), address="fd00:7::2/64", names="fd00:7::2 node1"),
            )
        ),
        TWO_HOSTS,
        ranks=(0, 1),
    ),
    Scene(
        "an interface that one host does not have",
        "NET007",
        Play(
            (
                machine(0, member(0, NCCL_SOCKET_IFNAME="ens5"), more=interface("ens5", "10.8.0.1/24")),
                machine(1, member(1, NCCL_SOCKET_IFNAME="ens5")),
            )
        ),
        Play(
            (
                machine(0, member(0, NCCL_SOCKET_IFNAME="ens5,eth0"), more=interface("ens5", "10.8.0.1/24")),
                machine(1, member(1, NCCL_SOCKET_IFNAME="ens5,eth0"), more=interface("ens5", "10.8.0.2/24")),
            )
        ),
        ranks=(1,),
        hosts=("node1",),
        says=("ens5",),
    ),
    Scene(
        "two containers of one machine",
        "ENV018",
        Play((machine(0, member(0), boot=7), machine(1, member(1), boot=7))),
        TWO_HOSTS,
        severity="warning",
        ranks=(0, 1),
    ),
)

SCENES = (*ONE_HOST, *SEVERAL_HOSTS)
