# ruff: noqa: E501 - lines of logs are as long as they are
"""What logs say of launch, network and NCCL, in the words of many releases and launchers: which cause is found.

Texts are made from what the libraries print; hosts, addresses and numbers are invented.
"""

from pathlib import Path

import msgspec
import pytest

from doctor.api import Severity, Status
from doctor.core.check_registry import builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.report_summary import primary_of
from doctor.core.settings import Settings
from doctor.knowledge.log_patterns import known_patterns
from doctor.session import load_checks
from doctor.testing import logged
from tests.lab.cases import each_case

CATALOG = load_checks(Settings())


def _examined(text):
    return examine_job(logged(*text.strip("\n").splitlines()).job(), CATALOG)


def _findings(results):
    return [(result.id, finding) for result in results for finding in result.findings]


def _ranks(results, name):
    return {rank for id_, finding in _findings(results) if id_ == name for rank in finding.ranks}


ADDRESS = "NET007 NET008 NET009 NET010 NET013"
NAMES = "NET001 NET002 NET004"
RDMA = "NET018 NET020 NET021 NET022"
LIBRARY = "NCCL008 NCCL009 NCCL010 VER002"

SICK = [
    # --- interfaces and ways between hosts
    (
        "an interface that is not there",
        "NET007",
        """
[rank2]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:275, internal error - please report this issue to the NCCL developers, NCCL version 2.20.5
[rank2]: ncclInternalError: Internal check failed.
[rank2]: Last error:
[rank2]: Bootstrap : no socket interface found
""",
    ),
    (
        "srun's labels and an NCCL line",
        "NET007",
        """
3: gpu12:9120:9311 [3] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found
3: gpu12:9120:9311 [3] NCCL INFO init.cc:98 -> 3
""",
    ),
    (
        "Gloo is told an interface that is not there",
        "NET007",
        """
Traceback (most recent call last):
  File "/home/u/train.py", line 12, in <module>
    dist.init_process_group("gloo")
RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ens3f0
""",
    ),
    (
        "Gloo is told NCCL's grammar",
        "NET011",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find "
        "address for: =eth0",
    ),
    (
        "a container's address, told to another host",
        "NET009",
        """
a1b2c3d4e5f6:812:840 [0] NCCL INFO Bootstrap : Using eth0:172.17.0.2<0>
a1b2c3d4e5f6:812:840 [0] misc/socket.cc:480 NCCL WARN socketStartConnect: Connect to 172.17.0.3<38847> failed : Software caused connection abort
""",
    ),
    (
        "loopback on two hosts",
        "NET009",
        """
nodeA:511:511 [0] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>
nodeB:388:388 [0] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>
nodeB:388:402 [0] misc/socket.cc:533 NCCL WARN socketPollConnect: connect to 127.0.0.1<45211> returned Connection refused, exceeded error retry count after 35 attempts
""",
    ),
    (
        "NCCL 2.10 finds no route",
        ADDRESS,
        """
ps-3:796:796 [1] NCCL INFO Bootstrap : Using enp67s0:192.168.1.8<0>
ps-3:795:822 [0] include/socket.h:409 NCCL WARN Net : Connect to 192.168.1.9<54263> failed : No route to host
ps-3:795:822 [0] NCCL INFO bootstrap.cc:360 -> 2
""",
    ),
    (
        "NCCL 2.2 waits in vain",
        ADDRESS,
        """
bql-103:18553:18612 [0] INFO comm 0x7fa42c00a3b0 rank 0 nranks 2
bql-103:18553:18611 [0] include/socket.h:360 WARN Call to connect failed : Connection timed out
bql-103:18553:18611 [0] INFO transport/net_socket.cu:118 -> 2
""",
    ),
    (
        "mpirun's prefixes, a filtered port",
        ADDRESS,
        """
[1,1]<stderr>:node-2:77:91 [0] misc/socket.cc:533 NCCL WARN socketPollConnect: connect to 10.3.0.1<41022> returned Connection timed out, exceeded error retry count after 35 attempts
[1,1]<stderr>:node-2:77:91 [0] NCCL INFO misc/socket.cc:612 -> 6
""",
    ),
    (
        "Gloo's mesh over the wrong address",
        f"{ADDRESS} NET001 NET002",
        """
[rank8]:[E ProcessGroupGloo.cpp:144] Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error
[rank8]: Traceback (most recent call last):
[rank8]:   File "/opt/app/serve.py", line 77, in <module>
[rank8]:     group = dist.new_group(ranks, backend="gloo")
[rank8]: RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error
""",
    ),
    (
        "Gloo was told 127.0.1.1 by Debian's /etc/hosts",
        "NET002",
        """
Traceback (most recent call last):
  File "/srv/job/main.py", line 31, in <module>
    torch.distributed.init_process_group(backend="gloo", init_method="env://")
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:33495: Connection refused
""",
    ),
    (
        "no interface in the network of NCCL_COMM_ID",
        ADDRESS,
        """
d9bead19e6d2:1791:1791 [0] misc/socket.cc:237 NCCL WARN Net : No interface found in the same subnet as remote address 10.4.0.1<1778>
d9bead19e6d2:1791:1791 [0] bootstrap.cc:39 NCCL WARN NET/Socket : No usable listening interface found
""",
    ),
    (
        "NCCL 2.21 finds no route",
        ADDRESS,
        """
node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now in progress)
node5:240:240 [6] NCCL INFO misc/socket.cc:570 -> 2
""",
    ),
    (
        "lost SYN packets",
        ADDRESS,
        "node5:240:240 [6] misc/socket.cc:586 NCCL WARN socketPollConnect poll() returned 1, no POLLOUT events",
    ),
    (
        "a tunnel device of the kernel",
        ADDRESS,
        """
pod-a:97:221 [0] NCCL INFO Bootstrap : Using [0]ip6tnl0:fe80::e866:19ff:fe1e:a688%ip6tnl0<0>
pod-b:98:220 [0] NCCL INFO Bootstrap : Using [0]ip6tnl0:fe80::e866:19ff:fe1e:a699%ip6tnl0<0>
""",
    ),
    (
        "a container without any address",
        ADDRESS,
        """
c1:55:70 [0] include/socket.h:344 NCCL WARN Socket creation failed : Address family not supported by protocol
c1:55:70 [0] NCCL INFO bootstrap.cc:98 -> 2
""",
    ),
    (
        "one host takes the storage network",
        ADDRESS,
        """
n1:9:9 [0] NCCL INFO Bootstrap : Using eth0:10.0.1.5<0>
n2:8:8 [0] NCCL INFO Bootstrap : Using ens9f1:192.168.40.7<0>
n1:9:20 [0] misc/socket.cc:533 NCCL WARN socketPollConnect: connect to 192.168.40.7<41022> returned Connection timed out, exceeded error retry count after 35 attempts
""",
    ),
    (
        "Gloo and a refused loopback",
        f"{ADDRESS} NET001 NET002",
        """
[rank1]:[W ProcessGroupGloo.cpp:715] Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME. (function operator())
[rank1]: RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error
""",
    ),
    (
        "Gloo is told an empty name",
        ADDRESS,
        "RuntimeError: GlooDeviceFactory::makeTCPDevice(): interface or hostname can't be empty",
    ),
    (
        "Gloo's mesh in other words",
        ADDRESS,
        "RuntimeError: Gloo connectFullMesh failed with Caught unexpected exception while connecting",
    ),
    (
        "a peer that told no address",
        ADDRESS,
        "n1:9:9 [0] misc/socket.cc:730 NCCL WARN ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)",
    ),
    # --- names
    (
        "Gloo looks for the host's name",
        NAMES,
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:127] rp != nullptr. Unable to find address for: node7",
    ),
    ("Windows asks for the master", NAMES, "socket.gaierror: [Errno 11001] getaddrinfo failed"),
    (
        "a container that does not know its own name",
        NAMES,
        """
[W socket.cpp:697] [c10d] The IPv6 network addresses of (trainer-box, 39067) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).
[W socket.cpp:697] [c10d] The IPv6 network addresses of (trainer-box, 39067) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).
""",
    ),
    (
        "a laptop",
        NAMES,
        "[W1014 16:41:26.522544000 socket.cpp:755] [c10d] The IPv6 network addresses of (Anna-MacBook.local, 59319) cannot "
        "be retrieved (gai error: 8 - nodename nor servname provided, or not known).",
    ),
    ("the store of torch 1.4", NAMES, "RuntimeError: host not found: Temporary failure in name resolution"),
    (
        "Python asks for the master",
        NAMES,
        """
Traceback (most recent call last):
  File "/home/u/launch.py", line 9, in <module>
    ip = socket.gethostbyname(os.environ["MASTER_ADDR"])
socket.gaierror: [Errno -2] Name or service not known
""",
    ),
    ("deepspeed's pdsh", NAMES, 'pdsh@head: gethostbyname("worker-3") failed'),
    ("a batch script that asks for its own address", NAMES, "hostname: Name or service not known\nsrun: Starting"),
    (
        "a container whose name has digits alone",
        NAMES,
        """
[W socket.cpp:697] [c10d] The client socket has failed to connect to [::ffff:0.104.99.143]:47389 (errno: 110 - Connection timed out).
[E socket.cpp:753] [c10d] The client socket has failed to connect to any network address of (6841231, 47389).
""",
    ),
    (
        "horovod's ssh",
        NAMES,
        "ssh: Could not resolve hostname horovod-volcano-w1-0: Temporary failure in name resolution",
    ),
    (
        "a pod that worker processes ask for",
        NAMES,
        """
-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/usr/local/lib/python3.7/dist-packages/torch/distributed/rendezvous.py", line 126, in _tcp_rendezvous_handler
    store = TCPStore(result.hostname, result.port, world_size, start_daemon, timeout)
ValueError: host not found: Name or service not known
""",
    ),
    (
        "Ray's workers and a name of another cloud",
        NAMES,
        """
(WorkerDict pid=204487, ip=10.4.0.9) [W1008 23:40:22.7 socket.cpp:767] [c10d] The client socket has failed to connect to [job-01.internal]:50745 (errno: 22 - Invalid argument).
(WorkerDict pid=204487, ip=10.4.0.9) [W1008 23:40:22.8 socket.cpp:767] [c10d] The IPv6 network addresses of (job-01.internal, 50745) cannot be retrieved (gai error: -2 - Name or service not known).
""",
    ),
    # --- the master
    (
        "no answer, torch 2.7",
        "NET006",
        """
[rank5]:[E521 15:43:02.707733876 socket.cpp:1023] [c10d] The client socket has timed out after 600000ms while trying to connect to (10.18.21.4, 37907).
[rank5]:[E521 15:43:02.707888867 TCPStore.cpp:318] [c10d] TCP client failed to connect/validate to host 10.18.21.4:37907 - timed out (try=1, timeout=600000ms): The client socket has timed out after 600000ms while trying to connect to (10.18.21.4, 37907).
[rank5]: torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.18.21.4, 37907).
""",
    ),
    (
        "no answer, torch 2.0",
        "NET006",
        "TimeoutError: The client socket has timed out after 1800s while trying to connect to (10.0.3.7, 48391).",
    ),
    ("refused, torch 1.6", "NET006", "RuntimeError: Connection refused"),
    ("torch 1.8", "NET006", "RuntimeError: connect() timed out. Original timeout was 1800000 ms."),
    (
        "a route that is not there",
        "NET006",
        """
[W socket.cpp:663] [c10d] The client socket has failed to connect to [10.9.0.2]:29500 (errno: 113 - No route to host).
[W socket.cpp:663] [c10d] The client socket has failed to connect to [10.9.0.2]:29500 (errno: 113 - No route to host).
""",
    ),
    (
        "two hosts and localhost",
        "NET005",
        """
torchrun --nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr localhost --master_port 29500 train.py
[E socket.cpp:858] [c10d] The client socket has timed out after 300s while trying to connect to (localhost, 29500).
""",
    ),
    (
        "each host is told itself",
        "ENV006",
        """
+ python -m torch.distributed.run --nnodes=2 --node_rank=0 --master_addr=10.0.0.11 --master_port=29600 train.py
+ python -m torch.distributed.run --nnodes=2 --node_rank=1 --master_addr=10.0.0.12 --master_port=29600 train.py
RuntimeError: connect() timed out. Original timeout was 1800000 ms.
""",
    ),
    (
        "each rank waits for another master",
        "ENV006",
        """
[rank0]: torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (10.0.0.11, 29500).
[rank8]: torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (10.0.0.12, 29500).
""",
    ),
    # --- the port
    (
        "two trainings, one port, torch 2.0",
        "ENV008",
        "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to "
        "bind to [::]:29500 (errno: 98 - Address already in use). The server socket has failed to bind to ?UNKNOWN? (errno: 98 - "
        "Address already in use).",
    ),
    (
        "torch 2.8",
        "ENV008",
        """
[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29533, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
""",
    ),
    (
        "it listens for a moment, torch 1.12",
        "ENV008",
        """
[W socket.cpp:401] [c10d] The server socket has failed to listen on [::]:47531 (errno: 98 - Address already in use).
[W socket.cpp:401] [c10d] The server socket has failed to bind to 0.0.0.0:47531 (errno: 98 - Address already in use).
[E socket.cpp:435] [c10d] The server socket has failed to listen on any local network address.
""",
    ),
    ("torch 1.7", "ENV008", "RuntimeError: Address already in use"),
    (
        "accelerate",
        "ENV008",
        "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing it.",
    ),
    (
        "two ranks that both host the store",
        "ENV008",
        """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/w/train.py", line 8, in <module>
[rank0]:     dist.init_process_group("nccl")
[rank0]: OSError: [Errno 98] Address already in use
""",
    ),
    (
        "Windows",
        "ENV008",
        "OSError: [WinError 10048] Only one usage of each socket address (protocol/network address/port) is normally permitted",
    ),
    (
        "a proxy in place of the store",
        "ENV008",
        "[W1122 05:32:12.9 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 10.0.0.1:29812 - retrying (try=0, "
        "timeout=6000ms, delay=567ms): Ping failed, invalid value returned from server. Expected: 4825, Got: 1347703880",
    ),
    # --- InfiniBand and RoCE
    (
        "no answer over RoCE, NCCL 2.21",
        "NET021",
        """
h1:41:77 [2] transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer 10.1.0.2<48170> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid ::ffff:10.1.0.1 remoteGids::ffff:10.2.0.2 hca mlx5_2
h1:41:77 [2] NCCL INFO transport/net.cc:1298 -> 6
""",
    ),
    (
        "no way to the peer",
        "NET021",
        """
dgx3:225140:225355 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable
dgx3:225140:225355 [0] NCCL INFO transport/net_ib.cc:579 -> 2
dgx3:225140:225289 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer dgx3<41109>
""",
    ),
    (
        "an index of another host",
        "NET021",
        "h1:9:12 [0] misc/ibvwrap.cc:323 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1, curr "
        "state INIT, next state RTR, local GID index 3, local GID fe80::1, remote GID ::ffff:10.0.1.2",
    ),
    (
        "as the cause of torch's error",
        "NET021",
        """
[rank9]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:328, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
[rank9]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank9]: Last error:
[rank9]: Call to ibv_modify_qp failed with error Connection timed out
""",
    ),
    (
        "a device that belongs to another container",
        RDMA,
        "pod-0:19:70 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_modify_qp failed with error No such device errno 19",
    ),
    (
        "ports of two kinds",
        "NET022",
        "h1:9:12 [0] transport/net_ib.cc:812 NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and "
        "[1]mlx5_1:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA",
    ),
    (
        "a port that fails under a run",
        "NET020",
        """
h1:9:12 [0] NCCL INFO comm 0x55aa rank 0 nranks 16 cudaDev 0 busId 7000 - Init COMPLETE
h1:9:40 [0] transport/net_ib.cc:98 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error
h1:9:40 [0] transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer 10.1.0.2<48170> with status=12 opcode=0 len=0 vendor err 129 (Recv)
""",
    ),
    (
        "NCCL_IB_HCA of another machine",
        "NET018",
        """
h1:9:9 [0] NCCL INFO NCCL_IB_HCA set by environment to =mlx5_8,mlx5_9
h1:9:9 [0] NCCL INFO NET/IB : No device found.
h1:9:9 [0] NCCL INFO NCCL_NET set by environment to IB
h1:9:9 [0] net.cc:310 NCCL WARN Failed to initialize any NET plugin
""",
    ),
    (
        "the network of another cloud",
        "NET026",
        """
h1:9:9 [0] NCCL INFO NCCL_NET set by environment to AWS Libfabric.
h1:9:9 [0] net.cc:536 NCCL WARN Error: network AWS Libfabric not found.
""",
    ),
    (
        "the oldest words for no answer",
        "NET021",
        "w1:946:988 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
    ),
    (
        "with addresses of both ends",
        "NET021",
        "w1:4654:5666 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.3.0.61<39430> with error 12, "
        "opcode 129, len 0, vendor err 129 (Recv) localGid ::ffff:10.3.16.3 remoteGid ::ffff:10.3.17.61",
    ),
    (
        "a link that flaps",
        "NET020",
        """
w1:4654:5666 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_4:1 Got async event : port error
w1:4654:5666 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_4:1 Got async event : port error
""",
    ),
    (
        "flushed by an earlier error",
        RDMA,
        "gh-3:7038:7053 [0] ib_plugin.c:1007 NCCL WARN NET/IB : Got completion from peer 10.1.32.3<54891> with error 5, opcode 0, "
        "len 0, vendor err 249",
    ),
    (
        "devices that a container may not open",
        RDMA,
        """
pod:80744:80744 [1] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed
pod:80744:80744 [1] transport/net_ib.cc:149 NCCL WARN NET/IB : Unable to open device mlx5_58
""",
    ),
    # --- two NCCLs
    (
        "a wheel that replaced another",
        LIBRARY,
        """
Traceback (most recent call last):
  File "/opt/conda/lib/python3.10/site-packages/torch/__init__.py", line 235, in <module>
    from torch._C import *  # noqa: F403
ImportError: /opt/conda/lib/python3.10/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclAlltoAll
""",
    ),
    (
        "ranks of two images",
        "NCCL008",
        "n1:9:9 [0] init.cc:512 NCCL WARN Mismatched NCCL version detected : rank 0 version 22005 rank 4 version 21805",
    ),
    (
        "what torch asks of NCCL",
        LIBRARY,
        "RuntimeError: all2all is only supported for NCCL lib version >= 2.7.0",
    ),
    # --- Lightning and SLURM
    (
        "Lightning waits alone",
        "ENV009",
        """
GPU available: True, used: True
TPU available: False, using: 0 TPU cores
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3,4,5,6,7]
initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/8
""",
    ),
    (
        "two hosts that both begin with rank 0",
        "ENV009",
        """
GPU available: True, used: True
GPU available: True, used: True
initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/8
initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/8
initializing ddp: GLOBAL_RANK: 2, MEMBER: 3/8
initializing ddp: GLOBAL_RANK: 2, MEMBER: 3/8
initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/8
initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/8
initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/8
initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/8
""",
    ),
    (
        "srun starts two tasks, and each spawns a world of two",
        "ENV009 ENV010",
        """
-- Process 1 terminated with the following error:
RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)
""",
    ),
    (
        "one task a host under SLURM",
        "ENV010",
        """
srun python train.py --num-nodes 2 --gpus 2
GPU available: True, used: True
initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/4
initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/4
initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/4
initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/4
""",
    ),
    (
        "a script that reads 4(x2) as a number",
        "ENV010",
        """
Traceback (most recent call last):
  File "/home/u/train.py", line 14, in <module>
    per_node = int(os.environ["SLURM_TASKS_PER_NODE"])
ValueError: invalid literal for int() with base 10: '4(x2)'
""",
    ),
    (
        "accelerate and a left-over LOCAL_RANK",
        "ENV009",
        """
Traceback (most recent call last):
  File "/opt/lib/python3.10/site-packages/torch/distributed/rendezvous.py", line 218, in _get_env_or_raise
    raise _env_error(env_var)
ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set
""",
    ),
    (
        "ranks of two worlds",
        "ENV009",
        "n1:9:9 [0] bootstrap.cc:240 NCCL WARN Bootstrap Root : mismatch in rank count from procs 16 : 8",
    ),
    (
        "tasks and devices",
        "ENV010",
        """
0: Traceback (most recent call last):
0:   File "/home/u/train.py", line 40, in <module>
0:     trainer = L.Trainer(devices=8, num_nodes=2, strategy="ddp")
0: ValueError: You set `devices=8` in Lightning, but the number of tasks per node configured in SLURM `--ntasks-per-node=1` does not match. HINT: Set `devices=1`.
""",
    ),
    (
        "--ntasks",
        "ENV010",
        "RuntimeError: You set `--ntasks=16` in your SLURM bash script, but this variable is not supported. HINT: Use "
        "`--ntasks-per-node=16` instead.",
    ),
    (
        "a job that SLURM refuses",
        "ENV010",
        "srun: error: Unable to create step for job 88123: More processors requested than permitted",
    ),
    (
        "each task sees one GPU",
        "ENV010 ENV011",
        """
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
srun python train.py --devices 4
lightning_fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1, 2, 3]
 But your machine only has: [0]
""",
    ),
    # --- notebooks
    (
        "Lightning 1.6",
        "ENV013",
        "MisconfigurationException: `Trainer(strategy='ddp_spawn')` or `Trainer(accelerator='ddp_spawn')` is not compatible with "
        "an interactive environment. Run your code as a script, or choose one of the compatible strategies: "
        "Trainer(strategy=None|dp|tpu_spawn).",
    ),
    (
        "Lightning 2",
        "ENV013",
        "lightning.fabric.utilities.exceptions.MisconfigurationException: `Trainer(strategy='fsdp')` is not compatible with an "
        "interactive environment. Run your code as a script, or choose a notebook-compatible strategy: "
        "`Trainer(strategy='ddp_notebook')`.",
    ),
    # --- ends from outside
    (
        "ssh broke",
        "ENV016",
        """
Epoch 3:  41%|####      | 410/1000 [10:12<14:33,  1.48s/it, loss=0.31]
W0212 03:11:09.120000 4021 torch/distributed/elastic/agent/server/api.py:704] Received Signals.SIGHUP death signal, shutting down workers
W0212 03:11:09.121000 4021 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 4077 closing signal SIGHUP
torch.distributed.elastic.multiprocessing.api.SignalException: Process 4021 got signal: 1
""",
    ),
    (
        "the time limit of SLURM, in the middle of an epoch",
        "ENV017",
        """
Epoch 7:  12%|#         | 120/1000 [03:00<22:00,  1.50s/it, loss=0.22]
slurmstepd: error: *** JOB 77121 ON n14 CANCELLED AT 2026-02-12T03:11:09 DUE TO TIME LIMIT ***
slurmstepd: error: *** STEP 77121.0 ON n14 CANCELLED AT 2026-02-12T03:11:09 DUE TO TIME LIMIT ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
""",
    ),
    (
        "preempted",
        "ENV017",
        "slurmstepd: error: *** JOB 77121 ON n14 CANCELLED AT 2026-02-12T03:11:09 DUE TO PREEMPTION ***",
    ),
    # --- ranks that never came
    (
        "the rendezvous of torchrun",
        "ENV015 ENV005 NET006",
        """
[INFO] 2026-01-13 22:17:26,653 api: Starting elastic_operator with launch configs:
  min_nodes        : 2
  max_nodes        : 2
  rdzv_backend     : c10d
  rdzv_endpoint    : 10.28.1.16
[ERROR] 2026-01-13 22:18:26,678 error_handler: {
  "message": {
    "message": "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
""",
    ),
    (
        "words of torch 2.0",
        "ENV015 ENV005 NET006",
        """
[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 10.20.0.1:1234
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.
""",
    ),
    (
        "too few hosts",
        "ENV005 ENV015",
        """
Traceback (most recent call last):
  File "/opt/conda/bin/torchrun", line 33, in <module>
    sys.exit(load_entry_point('torch==2.0.1', 'console_scripts', 'torchrun')())
  File "/opt/conda/lib/python3.10/site-packages/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", line 1025, in next_rendezvous
    self._op_executor.run(join_op, deadline)
torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError
""",
    ),
    ("a host that came too late", "ENV005 ENV015", "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"),
    (
        "clients that never came",
        "ENV005",
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 15/16 clients joined.",
    ),
    (
        "a barrier of torch 1.13",
        "ENV005",
        """
INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)
INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)
RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)
""",
    ),
    (
        "a rank twice",
        "ENV004",
        "n1:9:9 [0] bootstrap.cc:231 NCCL WARN Bootstrap Root : rank 2 of 4 ranks has already checked in",
    ),
    # --- nothing but the kind of failure
    (
        "a result of NCCL alone",
        "NCCL013",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, "
        "internal error - please report this issue to the NCCL developers, NCCL version 2.18.1",
    ),
]

WELL = [
    (
        "an NCCL start on one host",
        """
n1:9:9 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>
n1:9:9 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory No plugin found (libnccl-net.so), using internal implementation
n1:9:9 [0] NCCL INFO Failed to open libibverbs.so[.1]
n1:9:9 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
n1:9:9 [0] NCCL INFO Using network Socket
n1:9:20 [0] NCCL INFO comm 0x55aa rank 0 nranks 1 cudaDev 0 busId 7000 - Init COMPLETE
""",
    ),
    (
        "two hosts by eth0",
        """
n1:9:9 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
n2:8:8 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.2<0>
n1:9:9 [0] NCCL INFO Could not find: libnccl-net.so. Using internal net plugin.
n1:9:9 [0] NCCL INFO NET/IB : No device found.
n1:9:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
n1:9:9 [0] NCCL INFO Initialized NET plugin Socket
n1:9:20 [0] NCCL INFO comm 0x55aa rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
n1:9:20 [0] NCCL INFO Connected all rings
n1:9:20 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE
""",
    ),
    (
        "connections that took their time",
        """
n2:8:8 [0] NCCL INFO socketPollConnect: connect to 10.0.0.1<41022> returned Connection refused, retrying (1/34) after sleep for 100 msec
n2:8:8 [0] NCCL INFO socketPollConnect: connect to 10.0.0.1<41022> returned Connection refused, retrying (2/34) after sleep for 200 msec
n2:8:8 [0] NCCL INFO comm 0x55aa rank 1 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE
""",
    ),
    (
        "a store that came a little later",
        """
[W socket.cpp:663] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).
[W socket.cpp:663] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).
Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2
All distributed processes registered. Starting with 2 processes
""",
    ),
    (
        "no IPv6",
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot assign "
        "requested address).",
    ),
    (
        "a launch by torchrun",
        """
INFO:torch.distributed.launcher.api:Starting elastic_operator with launch configs:
  min_nodes        : 2
  max_nodes        : 2
  nproc_per_node   : 8
  rdzv_backend     : static
  rdzv_endpoint    : 10.0.0.1:29500
INFO:torch.distributed.elastic.agent.server.api:[default] Rendezvous complete for workers. Result:
  master_addr=10.0.0.1
""",
    ),
    (
        "members that all came",
        """
Initializing distributed: GLOBAL_RANK: 2, MEMBER: 3/4
Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4
Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/4
Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/4
""",
    ),
    (
        "SLURM and Lightning at work",
        """
SLURM auto-requeueing enabled. Setting signal handlers.
Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/16
----------------------------------------------------------------------------------------------------
distributed_backend=nccl
All distributed processes registered. Starting with 16 processes
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3,4,5,6,7]
""",
    ),
    (
        "a name that is looked up for a download, and a training that goes on",
        """
wandb: Network error (ConnectionError), entering retry loop.
Retrying (Retry(total=4, connect=None)) after connection broken by 'NameResolutionError("<urllib3.connection.HTTPSConnection object at 0x7f>: Failed to resolve 'huggingface.co' ([Errno -3] Temporary failure in name resolution)")'
Epoch 0:  10%|#         | 100/1000 [01:40<15:00,  1.00it/s, loss=2.1]
""",
    ),
    (
        "an orderly end",
        """
`Trainer.fit` stopped: `max_epochs=3` reached.
[rank0]:[W ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.
""",
    ),
    ("sudo in a container", "sudo: unable to resolve host 3f2a9c: Name or service not known"),
    ("nohup", "nohup: ignoring input"),
    (
        "NCCL says that the subnet manager spoke",
        "n1:9:40 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : client reregistration",
    ),
]


@each_case(("accepted", "text"), [case[1:] for case in SICK], ids=[case[0] for case in SICK])
def test_the_cause_is_found(accepted, text):
    results = _examined(text)
    told = [
        (name, finding.severity.value, finding.explained_by, finding.summary) for name, finding in _findings(results)
    ]
    assert primary_of(results) in accepted.split(), told


@each_case("text", [case[1] for case in WELL], ids=[case[0] for case in WELL])
def test_what_is_harmless_is_let_be(text):
    results = _examined(text)
    assert primary_of(results) is None
    assert not [finding.summary for _, finding in _findings(results) if finding.severity is not Severity.INFO]


OWN = sorted(
    (check for check in builtin_checks() if check.family in ("launch", "network", "nccl")), key=lambda check: check.id
)


def test_every_check_that_logs_can_feed_judges_them():
    declared = {pattern.check for pattern in known_patterns() if pattern.finding}
    for check in OWN:
        assert ("M" in check.when) == bool(check.from_logs or check.reads_logs or check.id in declared), check.id


def test_ranks_that_a_barrier_waits_for_are_named():
    lines = (
        f"[rank{rank}]: RuntimeError: Timed out initializing process group in store based barrier on rank: {rank}, for key: "
        "store_based_barrier_key:1 (world_size=8, worker_count=6, timeout=0:30:00)"
        for rank in (0, 1, 2, 4, 5, 6)
    )
    assert _ranks(_examined("\n".join(lines)), "ENV005") == {3, 7}


def test_a_failure_of_the_program_comes_before_the_master_that_went_with_it():
    text = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/w/train.py", line 3, in <module>
[rank0]:     import einops
[rank0]: ModuleNotFoundError: No module named 'einops'
[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (10.0.0.1, 29500).
"""
    results = _examined(text)
    assert primary_of(results) != "NET006"
    (finding,) = [finding for name, finding in _findings(results) if name == "NET006"]
    assert finding.severity is Severity.WARNING
    assert finding.confidence < 0.5


def test_a_task_that_failed_comes_before_the_step_that_srun_cancelled():
    text = """
n3: ValueError: bad sample 17
srun: error: n3: task 3: Exited with exit code 1
slurmstepd: error: *** STEP 77121.0 ON n1 CANCELLED AT 2026-02-12T03:11:09 ***
"""
    assert "ENV017" not in {
        name for name, finding in _findings(_examined(text)) if finding.severity is not Severity.INFO
    }


def test_what_is_not_explained_says_what_to_collect():
    text = "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:825, unhandled cuda error, NCCL version 2.7.8"
    (finding,) = [finding for name, finding in _findings(_examined(text)) if name == "NCCL013"]
    assert "NCCL_DEBUG=INFO" in finding.fix
    assert "TORCH_FR_BUFFER_SIZE" in finding.fix
    assert finding.confidence < 0.5


HUGE = "9" * 500
ODD = [
    f"Bootstrap Root : rank {HUGE} of {HUGE} ranks has already checked in",
    f"Timed out after 6 seconds waiting for clients. 1/{HUGE} clients joined.",
    "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: k (world_size="
    f"{HUGE}, worker_count=1, timeout=0:30:00)",
    f"Initializing distributed: GLOBAL_RANK: {HUGE}, MEMBER: 1/{HUGE}",
    f"Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/{HUGE}",
    f"Mismatched NCCL version detected : rank {HUGE} version {HUGE} rank 1 version 2",
    f"The client socket has timed out after 5ms while trying to connect to (h, {HUGE}).",
    f"The server socket has failed to bind to [::]:{HUGE} (errno: 98 - Address already in use).",
    f"Ping failed, invalid value returned from server. Expected: {HUGE}, Got: {HUGE}",
    f"  max_nodes        : {HUGE}",
    f"torchrun --nnodes={HUGE} --node-rank={HUGE} --master-addr=x train.py",
    f"You requested gpu: [{HUGE}, 1]\n But your machine only has: [0]",
    f"comm 0x1 rank 0 nRanks {HUGE} nNodes {HUGE} localRanks 8",
    "Bootstrap : Using lo:999.999.999.999<0>",
    "connect [::::]:1: Connection refused",
]


@each_case("text", ODD)
def test_garbled_numbers_break_nothing(text):
    assert not [result.id for result in _examined(text) if result.crash or result.status is Status.ERROR]


SHARED = Path(__file__).parents[3] / "shared" / "cases"
FAMILIES = (
    "nccl_socket_interface",
    "hostname_resolution",
    "master_addr_unreachable",
    "port_in_use",
    "ib_roce",
    "lightning_env",
    "slurm_config",
    "lightning_notebook",
    "sighup_terminal",
    "rendezvous_timeout",
    "none",
)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the reported failures are not here")
@pytest.mark.parametrize("family", FAMILIES)
def test_reported_failures_of_the_family(family):
    cases = [msgspec.json.decode(path.read_bytes()) for path in sorted(SHARED.glob("*.json"))]
    for case in cases:
        doubtful = case["text_states_cause"] or case["under_determined"] or case["text_source"] != "excerpt"
        if case["cause_family"] == family and not doubtful:
            assert primary_of(_examined(case["text"])) in (case["accepted_ids"] or [None]), case["id"]
