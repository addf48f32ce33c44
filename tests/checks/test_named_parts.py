"""Findings about runs, NCCL, GPUs and releases name the rank, host, value or option of the job."""

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.testing import logged
from tests.lab.cases import each_case

CHECKS = {check.id: check for check in builtin_checks()}
SHAPES = (
    "[rank{rank}]: RuntimeError: Error when verifying shape tensors for collective ALLREDUCE on rank {rank}. This "
    "likely indicates that input shapes into the collective are mismatched across ranks. Got shapes: [ {size} ]"
)
SYNAPSE = "HCCL demo error: In function initDevice(): synDeviceAcquire(&x, nullptr) failed with synapse error: {}"
HCCL = "RuntimeError: torch_npu/ProcessGroupHCCL.cpp:200 HCCL function error: HcclCommInitRootInfo, error code is 7"
PODS = ("train-worker-0   0/1   RunContainerError   2   30s", "train-worker-1   0/1   RunContainerError   2   30s")
NO_GRADIENT = "Parameters which did not receive grad for rank 1: fc.weight, fc.bias"
STORE = "[rank1]: recvValue failed on SocketImpl(fd=9, addr=[node1]:53372, remote=[node0]:29500): Broken pipe"
DISTRIBUTION = (
    "ValueError: Expected parameter loc (Tensor of shape (4, 2)) of distribution Normal(loc: torch.Size([4, 2])) to "
    "satisfy the constraint Real(), but found invalid values: tensor([[nan, nan],"
)
NO_CODE = "RuntimeError: CUDA error: no kernel image is available for execution on the device"


def found(check_id, sketch):
    (result,) = examine_job(sketch.job(), CheckRegistry((CHECKS[check_id],)))
    return result.findings[0]


def of_case(check_id, name):
    (case,) = [case for case in CHECKS[check_id].cases() if case.name == name]
    return found(check_id, case.sketch)


def texts(finding):
    return f"{finding.summary} | {finding.effect} | {finding.fix}"


@each_case(
    ("check", "case", "text"),
    [
        ("GPU002", "more ranks than GPUs", "Ranks 2 and 3 fail with"),
        ("GPU003", "a UUID of another host", "List devices of node1,"),
        ("GPU004", "one device for each rank, addressed by local rank", "Give all ranks on node0 the same"),
        ("GPU005", "MIG switched on on one host", "2g.20gb on rank 2 (others: disabled)"),
        ("GPU008", "off on a server", "persistence daemon on node1"),
        ("GPU021", "NCCL asked for in a CPU build", "built without NCCL support"),
        ("NCCL003", "a file on one host changes the channels", "from /etc/nccl.conf on node1"),
        ("NCCL005", "the system's file", "/etc/nccl.conf on node1 sets NCCL_IB_DISABLE=1"),
        ("NCCL006", "the driver can't be asked", "(GPUs of node0 could not be checked)"),
        ("NCCL008", "one process, another release than in the capture", "an environment with NCCL 2.27.3, or, if"),
        ("NCCL009", "Blackwell with NCCL 2.21", "2.25.1 or later on node1"),
        ("NCCL010", "LD_LIBRARY_PATH leads to an older one", "from LD_LIBRARY_PATH on node1"),
        ("NCCL011", "the folder is missing on one host", "does not exist on node1: no dumps"),
        ("NCCL011", "the folder is missing on one host", "Check on node1 that the file system of /shared/dumps"),
        ("NCCL014", "missing on one host", "does not exist on node1"),
        ("RUN001", "log of a process that ends because a collective failed", "timed out on rank 3, but"),
        ("RUN002", "calls that are printed and differ", "PyTorch compares the calls before they start"),
        ("RUN003", "rare long steps of a rank", "only in some calls of `forward`"),
        ("RUN003", "rare long steps of a rank", "waited 4.8 s for rank 1 in these 120 steps"),
        ("RUN006", "self.log(sync_dist=True) in a condition on the rank", "at train.py:57 on all ranks"),
        ("RUN006", "a rank that left a parameter out of its loss", "of the modules of head.weight"),
        (
            "RUN006",
            "ranks that accumulate gradients of different numbers of batches: the odd one of four",
            "Set `accumulate_grad_batches` to 1 on rank 3,",
        ),
        ("RUN012", "the store of rank 0 is gone", "Ranks 1 and 2 lost the store: its process"),
        ("RUN014", "a wider layer on one rank", "Compute the shape of layer.weight"),
        ("RUN014", "one tensor less", "Create layer.bias on rank 2"),
        ("RUN014", "one tensor more", "Create head on all ranks or on none"),
        (
            "RUN015",
            "two groups in different order",
            "Run all_reduce at train.py:30 (group 1) and all_reduce at train.py:31",
        ),
        ("RUN015", "two receives, and no recorder", "Let rank 0 send first and rank 1 receive"),
        ("RUN016", "a thread holds the GIL", "was stuck on rank 1 for 480 s"),
        ("RUN020", "a frozen layer on one rank", "no gradient of `head` from rank 1"),
        ("RUN020", "a frozen layer on one rank", "Keep `head` trainable on rank 1"),
        ("RUN020", "dropout is off on one rank", "Rank 1 trains with `dropout` in eval mode"),
        ("RUN020", "autocast on one rank", "Set `precision` to 32-true on rank 3"),
        ("VER002", "CUDA 12 under a driver for 11", "On node1, update the driver"),
        ("VER002", "just below the minimum, NVML silent", "CUDA initialization may fail"),
        ("VER005", "an old pytorch-lightning", "`pip install pytorch-lightning==2.6.1` on node1"),
        ("VER006", "a checkpoint to resume from, which is ignored", 'ckpt_path="/c/last.ckpt"'),
        ("VER007", "a library of another image", "in LD_PRELOAD on node1"),
    ],
)
def test_a_finding_names_what_its_case_has(check, case, text):
    assert text in texts(of_case(check, case))


@each_case(
    ("check", "lines", "text"),
    [
        ("NCCL015", (SYNAPSE.format(20),), "Synapse status 20 (synDeviceAlreadyAcquired)"),
        ("NCCL015", (SYNAPSE.format(20),), "Find an HCL error before this line"),
        ("NCCL015", (SYNAPSE.format(99),), "failed with Synapse status 99 |"),
        ("NCCL015", (HCCL,), "returned 7 (HCCL_E_UNAVAIL)"),
        ("RUN001", ("HorovodAllreduce_grads_1 [missing ranks: 1, 3]",), "on ranks 1 and 3 to find out"),
        ("RUN002", (SHAPES.format(rank=1, size=2),), "Rank 1 passed a tensor of shape [2] to ALLREDUCE, another rank"),
        (
            "RUN002",
            [SHAPES.format(rank=rank, size=1 + (rank == 2)) for rank in range(3)],
            "to ALLREDUCE (ranks 0 and 1: [1]; rank 2: [2])",
        ),
        ("RUN008", (DISTRIBUTION,), "the parameter loc of the distribution Normal had"),
        ("RUN009", (NO_GRADIENT,), "Freeze fc.weight and fc.bias with"),
        ("RUN012", (STORE,), "Read the ends of the logs of rank 0 and of the launcher"),
        ("RUN018", PODS[:1], "could not start train-worker-0: RunContainerError"),
        ("RUN018", PODS, "could not start a pod: RunContainerError"),
        ("RUN018", PODS, "`kubectl describe pod POD`"),
        ("RUN018", ("qsub: Error: Unknown resource type: ngpus",), "The job does not start."),
        ("VER003", (NO_CODE,), "PyTorch or a CUDA extension has no code for this GPU"),
        ("VER003", (NO_CODE,), "rebuild the extension"),
    ],
)
def test_a_finding_names_what_its_lines_have(check, lines, text):
    assert text in texts(found(check, logged(*lines)))


@pytest.mark.parametrize(
    ("check", "lines", "ranks"),
    [
        ("RUN002", (SHAPES.format(rank=1, size=2),), (1,)),
        ("RUN002", [SHAPES.format(rank=rank, size=1 + (rank == 2)) for rank in range(3)], (2,)),
        ("RUN009", (NO_GRADIENT,), (1,)),
        ("RUN012", (STORE,), (1,)),
    ],
)
def test_the_ranks_are_those_of_the_lines_and_no_host_is_made_up(check, lines, ranks):
    finding = found(check, logged(*lines))
    assert (finding.ranks, finding.hosts) == (ranks, ())


def test_a_rank_that_gloo_aborted_does_not_wait_and_the_sizes_are_shown():
    evidence = of_case("RUN006", "a gather of rank 0 alone, for which Gloo aborts another rank").evidence
    assert evidence["waiting_ranks"] == [2]
    assert evidence["calls"] == {
        "rank 0": "all_reduce of 4,096 Float elements",
        "ranks 1 and 2": "all_reduce of 330 Float elements",
    }


def test_rare_long_steps_are_shown_by_their_steps():
    evidence = of_case("RUN003", "rare long steps of a rank").evidence
    assert evidence["steps_compared"] == 120
    assert evidence["median_step"] == "100 ms in the forward pass"
    assert "800 ms in steps 100-119" in evidence["extra_time_of_the_rank"]


def test_a_missing_folder_is_shown_with_the_setting_and_the_hosts_that_have_it():
    evidence = of_case("NCCL011", "the folder is missing on one host").evidence
    assert evidence["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/shared/dumps/rank_"
    assert evidence["exists_on"] == ["node0"]


def test_the_gpu_that_a_recommendation_is_for_is_shown():
    assert of_case("NCCL016", "the GPU that a variable is for").evidence["models"] == ["NVIDIA A10G"]
