"""Titles, hosts, impacts and fixes that follow from one line of a log, or from the hosts and settings of a job."""

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.facts import NcclFacts, NcclPlugin
from doctor.testing import healthy, logged
from tests.lab.cases import each_case

CHECKS = {check.id: check for check in builtin_checks()}
FSDP = "ERROR: expected to be in states [<TrainingState_.IDLE: 1>] but current state is TrainingState_.BACKWARD_PRE"
ONECCL = (
    "2026:01:02-03:04:05:( 4242) |CCL_WARN| host: node1, rank: 0, local_port_id: { 65559 0 1 }, port issue: { status: "
    "failed, details: training timeout }"
)
OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 3.05 GiB (GPU 2; 31.75 GiB total capacity; 29.80 GiB already "
    "allocated; 1.10 GiB free; 30.02 GiB reserved in total by PyTorch)"
)
IMAGE = 'Warning  Failed  3s  kubelet  Failed to pull image "repo/train:1": rpc error: code = NotFound'
VOLUME = 'Warning  FailedMount  5s  kubelet  MountVolume.SetUp failed for volume "pvc-1" : mount failed: exit status 32'
DEVICES = (
    "Warning  UnexpectedAdmissionError  kubelet  Allocate failed due to requested number of devices unavailable for "
    "nvidia.com/gpu. Requested: 8, Available: 7, which is unexpected"
)
NO_SERVER = (
    "[E socket.cpp:794] [c10d] The network addresses of (node01, 29500) cannot be retrieved (gai error: -3 - Temporary "
    "failure in name resolution)."
)
EFA = (
    "libfabric:4:17::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid address My EFA addr: "
    "fi_addr_efa://[fe80::1b:d4ff:fe2a:c51e]:0:10 My host id: i-0a Peer EFA addr: "
    "fi_addr_efa://[fe80::c2:bff:fe59:318]:0:94 Peer host id: i-0b (7)"
)
COMPLETION = (
    "node1:1:5 [0] transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<41234> with status=11 "
    "opcode=0 len=0 vendor err 129 (Recv)"
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
TORCHCOMMS = "[TC][rank=0][name=default_pg] Operation timed out after 600123 ms"
ILLEGAL = "failed (exitcode: -4) local_rank: 1 (pid: 4320) of binary: /usr/bin/python"
RNG = (
    "Didn't find an RNG file, if you are resuming a training that was launched in a distributed fashion, "
    "reproducibility is not guaranteed."
)
SSH = "ssh: Could not resolve hostname worker-0: Temporary failure in name resolution"


def finding_of(check_id, sketch):
    (result,) = examine_job(sketch.job(), CheckRegistry((CHECKS[check_id],)))
    return result.findings[0]


def texts_of(check_id, sketch):
    finding = finding_of(check_id, sketch)
    return f"{finding.summary} | {finding.effect} | {finding.fix}"


@each_case(
    ("check", "line", "text"),
    [
        ("NCCL015", ONECCL, "link training timed out"),
        ("GPU002", "ValueError: No slot '4' specified on host 'node7'", "slot 4, which node7 does not have"),
        ("MEM011", OOM, "allocating 3.05 GiB"),
        ("RUN018", IMAGE, "Failed to pull image repo/train:1 (NotFound)"),
        ("RUN018", IMAGE, "image repo/train:1, for which the registry reports NotFound"),
        ("RUN018", "      Reason:       ImagePullBackOff", "tag of the image, and the pull secret"),
        ("RUN018", VOLUME, "FailedMount of volume pvc-1 (mount failed: exit status 32)"),
        ("RUN018", DEVICES, "UnexpectedAdmissionError (nvidia.com/gpu: Requested: 8, Available: 7)"),
        ("RUN018", FSDP, "If an error precedes this line"),
        ("GPU018", "RuntimeError: CUDA error: peer access is not supported between these two devices", "all GPUs"),
        ("GPU021", "RuntimeError: Found no NVIDIA driver on your system.", "`--gpus all`"),
        ("GPU021", "AssertionError: Torch not compiled with XPU enabled", "built without XPU support"),
        ("GPU021", "AssertionError: Torch not compiled with XPU enabled", "has no Intel GPU"),
        ("HOST009", "nvidia-container-cli: device error: 0: unknown device: unknown", "unknown device (GPU 0)"),
        ("NET004", NO_SERVER, "name servers in /etc/resolv.conf on the host that logged this error"),
        ("NET020", EFA, "Find the first error of the process on the peer at fe80::c2:bff:fe59:318, whose"),
        ("NET020", COMPLETION, "Find the first error of the process on 10.0.0.2."),
        ("MEM012", "systemd[1]: train.service: Failed with result 'oom-kill'.", "`MemoryMax=` of train.service if"),
        ("GPU009", "NVRM: GPU at 0000:3b:00.0: Row remapping failed", "and have the GPU at 0000:3b:00.0 replaced."),
        ("GPU022", CUBLAS, "cublasCreate failed: CUBLAS_STATUS_NOT_INITIALIZED, often because GPU memory is full |"),
        (
            "GPU022",
            "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "A call to a CUDA library failed: CUDNN",
        ),
        ("NET004", SSH, "name servers in /etc/resolv.conf on the host that runs the launcher"),
        ("RUN001", TORCHCOMMS, "Attach torchcomms' `FlightRecorderHook` to the communicator, if the program uses"),
        ("RUN001", TORCHCOMMS, "\nexport TORCH_FR_BUFFER_SIZE=2000 TORCHCOMM_FR_DUMP_TEMP_FILE=torchcomm_trace_\n"),
        ("RUN004", ILLEGAL, "The process of local rank 1 (PID 4320) was terminated by signal 4 (SIGILL)"),
        ("RUN004", ILLEGAL, "with the flags that `lscpu` shows"),
        ("RUN004", "train.sh: line 3:   812 Illegal instruction (core dumped) python train.py", "flags that `lscpu`"),
        ("RUN017", RNG, "for this process: several ranks saved the checkpoint"),
        ("ENV008", "OSError: [Errno 98] Address already in use", "its listener with `ss -ltnp`"),
    ],
)
def test_a_finding_says_what_its_line_shows(check, line, text):
    assert text in texts_of(check, logged(line))


def test_the_driver_has_no_setting_of_visible_devices():
    assert "VISIBLE" not in finding_of("GPU021", logged("RuntimeError: Found no NVIDIA driver on your system.")).fix


@pytest.mark.parametrize(
    ("check", "line", "ranks", "hosts"),
    [
        ("NCCL015", ONECCL, (0,), ("node1",)),
        ("GPU002", "ValueError: No slot '4' specified on host 'node7'", (), ("node7",)),
    ],
)
def test_a_finding_names_the_ranks_and_hosts_of_its_line(check, line, ranks, hosts):
    finding = finding_of(check, logged(line))
    assert (finding.ranks, finding.hosts) == (ranks, hosts)


PLUGIN = (NcclPlugin("net", "libnccl-net.so", path="/opt/ofi/libnccl-net.so", symbols=("ncclNetPlugin_v8",)),)
TUNER = (NcclPlugin("tuner", "libnccl-tuner.so", path="/opt/t/libnccl-tuner.so", symbols=("ncclTunerPlugin_v1",)),)
AWS = healthy(2, 1).environ(NCCL_NET="AWS Libfabric")


@each_case(
    ("sketch", "text"),
    [
        (AWS.alter(NcclFacts, ranks=(0,), plugins=PLUGIN), "Install aws-ofi-nccl on node1, or add its directory"),
        (AWS, "`unset NCCL_NET` on node0 and node1, or install aws-ofi-nccl on all hosts"),
        (healthy(2, 1).environ(NCCL_NET="IB"), "node0 and node1 have no RDMA device"),
        (healthy(2, 1).environ(ranks=(1,), NCCL_NET="IB"), "node1 has no RDMA device"),
        (healthy(2, 1).alter(NcclFacts, plugins=TUNER), "None: NCCL uses its built-in tuner"),
    ],
)
def test_a_network_that_nccl_cannot_use_names_its_hosts(sketch, text):
    assert text in texts_of("NET026", sketch)


@pytest.mark.parametrize(
    ("ranks", "effect"),
    [((0, 1), "init_process_group() fails on every rank."), ((1,), "ranks that have all of them wait")],
)
def test_ranks_wait_for_others_only_if_these_have_all_variables(ranks, effect):
    found = finding_of("ENV001", healthy().launched(ranks=ranks, MASTER_ADDR=""))
    assert effect in found.effect


def text_of_case(check_id, name):
    (case,) = [case for case in CHECKS[check_id].cases() if case.name == name]
    return texts_of(check_id, case.sketch)


@each_case(
    ("check", "case", "text"),
    [
        ("GPU008", "off on a server", "GPU 0 of node1"),
        ("GPU018", "switched off by a driver setting", "only with `NCCL_P2P_LEVEL=SYS`"),
        ("NET001", "Gloo falls back to loopback, and then can't reach the others", "In a job on several hosts, other"),
        ("NET005", "localhost in a job of two hosts", "but rank 0 runs on node0"),
        ("NET003", "cloned machines kept the name of their image", "Rename the host of rank 3, for example"),
        ("NET003", "cloned machines kept the name of their image", "if the master has this name"),
        ("NET005", "one host takes the master's name for its own", "node0 resolves to 127.0.1.1 on node2, but rank 0"),
        ("NET008", "the cable is out", "eth1 on node1 has no carrier"),
        ("NET008", "a link that went down, and ranks that lost each other", "and node1 lost connections afterwards"),
        (
            "NET009",
            "every container is 172.17.0.2",
            "node1 would use eth0 (172.17.0.2), an address that 2 hosts share",
        ),
        ("NET009", "every container is 172.17.0.2", "A host that connects to this address reaches itself"),
        ("NET010", "one host takes the storage network", "On node2, set NCCL_SOCKET_IFNAME to the interface in the"),
        ("NET012", "all hosts have 1500, and the job that worked had 9000", "Set the MTU of eth0 on node0 and 2 more"),
        ("NET013", "two hosts that never meet", "Allow all TCP traffic between node0 and node1 in their firewalls"),
        (
            "NET013",
            "one pair of four hosts, which has another network",
            "on all ranks (tested: node1 reaches node3 over",
        ),
        ("NET015", "an interface that drops what it receives in a run", "ring of eth0 on node1 with `sudo ethtool -G"),
        ("NET015", "an interface that counts errors in a run", "only 0.005% of the TCP segments were retransmitted"),
        ("NET018", "an exact name inside the list", "NCCL uses only mlx5_0 and ignores =mlx5_1, because `=` is"),
        ("NET019", "a line in /etc/nccl.conf", "Remove NCCL_IB_DISABLE from /etc/nccl.conf on node1."),
        (
            "NET026",
            "EFA is asked for and not there",
            "or, without EFA hardware, run `unset FI_PROVIDER` on",
        ),
        ("HOST006", "a script forks its ranks for GPUs", '`strategy="ddp_find_unused_parameters_true"`'),
        ("NET018", "the selected port is down", "or check the cable and the switch port of mlx5_0:1 on node1"),
        ("NET020", "UCX gets no answer over InfiniBand", "check the RDMA links of node1 and the peers with `ibstat`"),
        ("NET020", "all ports of a lone host at half the rate of the capture", "`sudo mlxlink -d mlx5_0 -m -c`"),
        ("NET024", "the first name server is dead", "Gloo and torchrun look up the host's own name"),
        ("NET026", "a stale plugin is found first", "Remove /opt/old from LD_LIBRARY_PATH"),
        ("NET026", "a plugin on one of two hosts", "on only 1 of 2 ranks (not on rank 0)"),
        ("NET027", "two wait for one another, the rest for them", "ranks 2 and 3: recv timed out after 8 s"),
        ("NET027", "two wait for one another, the rest for them", "connections between ranks 2 and 3 on node0"),
        ("NCCL007", "DETAIL on one rank alone", "Rank 2 waits in init_process_group()"),
        ("RUN002", "integers among floats, which the back end adds up without an error", "only if both lines pass the"),
        ("RUN004", "log of an error on one rank, and of peers that lose it", "then fail with a lost connection."),
        ("RUN013", "a backward pass of nine times the forward pass", "takes 64 ms; each step spends 286 ms more"),
        (
            "HOST004",
            "a file in the place of the directory",
            "mv /home/me/runs/checkpoints /home/me/runs/checkpoints.old",
        ),
        (
            "MEM007",
            "a backend that has no segments to expand",
            "`export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`",
        ),
        ("MEM007", "a name that a build for ROCm of torch 2.4 does not read", "export PYTORCH_HIP_ALLOC_CONF="),
    ],
)
def test_a_finding_says_what_its_case_shows(check, case, text):
    assert text in text_of_case(check, case)


def test_the_library_and_the_cpus_of_a_binding_are_evidence():
    (case,) = [case for case in CHECKS["ENV022"].cases() if case.name == "the same with that library"]
    evidence = finding_of("ENV022", case.sketch).evidence
    assert evidence["openmp_library"] == "/opt/lib/libiomp5.so"
    assert evidence["cpus"].startswith("0-")
