"""What logs say of progress and data, in the wordings of many releases and frameworks: the verdict of a whole job."""
# ruff: noqa: E501

import pytest

from doctor.core.report_summary import primary_of
from doctor.session import examine
from doctor.testing.from_logs import logged
from tests.lab.cases import each_case

FP = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default))"
WATCHDOG = (
    "[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)={ms}) ran for {ms} "
    "milliseconds before timing out."
)


def watchdog(rank, seq=808, op="ALLREDUCE", n=98, ms=600000):
    return WATCHDOG.format(rank=rank, seq=seq, op=op, n=n, ms=ms)


def call(rank, shape, op="ALLREDUCE", seq="SequenceNumber=3104, "):
    return f"Rank {rank} is running collective: CollectiveFingerPrint({seq}OpType={op}, TensorShape=[{shape}], {FP})"


def refusal(one, other):
    return f"RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}."


TOLD = {
    # Ranks that call different collectives.
    "detail, sizes": ("RUN002", [f"[rank1]: {refusal(call(1, '195812480'), call(0, '51123456'))}"]),
    "detail, operations": (
        "RUN002",
        [
            f"[rank0]: {refusal(call(0, '20, 10'), call(1, '20, 10', 'REDUCE'))}Collectives differ in the following aspects: "
        ],
    ),
    "detail, numbers": (
        "RUN002",
        [
            refusal(
                call(26, "1", "BROADCAST"),
                "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)",
            )
        ],
    ),
    "detail, wordings of 1.9": (
        "RUN002",
        [
            "RuntimeError: Error when verifying shape tensors for collective ALLREDUCE on rank 1. This likely indicates "
            "that input shapes into the collective are mismatched across ranks. Got shapes: [ 2 ]"
        ],
    ),
    "watchdogs with two operations under one number": (
        "RUN002",
        [*(watchdog(rank, 42, "ALLREDUCE") for rank in (0, 1, 2)), watchdog(3, 42, "BROADCAST")],
    ),
    "watchdogs with two sizes under one number": (
        "RUN002",
        [*(watchdog(rank, 42, "_ALLGATHER_BASE", 512) for rank in (0, 1, 2)), watchdog(3, 42, "_ALLGATHER_BASE", 480)],
    ),
    "gloo, sizes": (
        "RUN002",
        [
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
            "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= "
            "op.nbytes. 8192 vs 4096",
        ],
    ),
    "accelerate, shapes": (
        "RUN002",
        [
            "accelerate.utils.operations.DistributedOperationException: Cannot apply desired operation due to shape "
            "mismatches. All shapes across devices must be valid.",
            "Operation: `accelerate.utils.operations.gather`",
            "  - Process 0: [1, 5]",
            "  - Process 1: [1, 2, 5]",
        ],
    ),
    "NCCL's own count": (
        "RUN002",
        [
            *(
                f"node1:{45006 + dev}:{45006 + dev} [{dev}] NCCL INFO AllReduce: opCount 28c sendbuff 0x7f5d recvbuff 0x7f5d "
                f"count 9984512 datatype 7 op 0 root 0 comm 0x55bef020137{dev} [nranks=4] stream 0x55"
                for dev in (0, 1, 3)
            ),
            "node1:45012:45012 [2] NCCL INFO AllGather: opCount 28c sendbuff 0x7f1f recvbuff 0x7f1e count 59205120 datatype 0 "
            "op 0 root 0 comm 0x559c24b55610 [nranks=4] stream 0x55",
        ],
    ),
    "NCCL's network layer": (
        "RUN002",
        [
            "node1:201800:201900 [2] transport/net_ib.cc:700 NCCL WARN NET/IB : collective mismatch error local size 512 remote 2048 addr 7f rkey 1 seq 1/1"
        ],
    ),
    # Batches.
    "join throws": (
        "DATA010",
        ["[rank0]: RuntimeError: Detected at least one rank that has exhausted inputs. Throwing across all ranks."],
    ),
    "a rank says that it has no more": ("DATA010", ["[rank0]: step 97", "rank 3 ran out of data after 97 batches"]),
    "lengths of loaders, plainly": (
        "DATA001",
        [f"[rank{rank}]: number of batches: {1563 - (rank == 3)}" for rank in range(4)]
        + [watchdog(rank) for rank in (0, 1, 2)],
    ),
    "lengths of loaders, as steps": (
        "DATA001",
        ["[rank0]: steps_per_epoch=404", "[rank1]: steps_per_epoch=404", "[rank2]: steps_per_epoch=399"],
    ),
    "an empty loader": (
        "DATA001",
        [
            "[rank2]: RuntimeError: `DataLoader` within local rank has zero length. Please make sure that it returns at "
            "least 1 batch."
        ],
    ),
    "StopIteration on one rank": ("DATA010", ["[rank0]: epoch 0", "[rank1]: StopIteration", "[rank2]: epoch 0"]),
    # One rank works on, and the others wait.
    "tokenising for longer than the watchdog waits": (
        "RUN010",
        [
            "Tokenizing texts:  61%|######    | 61210/100000 [29:51<18:49, 34.4it/s]",
            watchdog(1, 1, n=1, ms=1800000),
        ],
    ),
    "a map over the data set": (
        "RUN010",
        ["Map (num_proc=8):  41%|####      | 412331/1000000 [09:58<14:12, 689.41 examples/s]", watchdog(3, 4, n=1)],
    ),
    "generating a split": (
        "RUN010",
        ["Generating train split: 1043000 examples [30:02, 578.11 examples/s]", watchdog(1, 1, n=1, ms=1800000)],
    ),
    "evaluation on rank 0": (
        "RUN010",
        ["Evaluating:  80%|########  | 8000/10000 [29:59<07:28,  4.46it/s]", watchdog(5, 9012, n=1, ms=1800000)],
    ),
    "waiting for the first process": (
        "RUN010",
        [
            "[rank1]: Traceback (most recent call last):",
            '[rank1]:   File "train.py", line 94, in main',
            "[rank1]:     with accelerator.main_process_first():",
            '[rank1]:   File "/env/lib/python3.11/site-packages/accelerate/state.py", line 500, in main_process_first',
            "[rank1]:     self.wait_for_everyone()",
            "[rank1]: torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
        ],
    ),
    "YOLO's first of all": (
        "RUN010",
        [
            "[rank1]: Traceback (most recent call last):",
            '[rank1]:   File "train.py", line 30, in train',
            '[rank1]:   File "/app/utils/torch_utils.py", line 40, in torch_distributed_zero_first',
            "[rank1]: RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
            "key-value store by key '0', but store->get('0') got error: Socket Timeout",
        ],
    ),
    "a bar and the watchdog in one line": (
        "RUN010",
        [
            "Creating dataset split:  96%|#########6| 1927287/2000000 [29:56<01:08, 1060.83it/s][E ProcessGroupNCCL.cpp:474] "
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
            "Timeout(ms)=1800000) ran for 1800790 milliseconds before timing out."
        ],
    ),
    "torch 1's spelling": (
        "RUN010",
        [
            "Running tokenizer on dataset:  38%|###8      | 32068/85249 [32:13<53:59, 16.42ba/s]",
            "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value store by "
            "key '0', but store->get('0') got error: Socket Timeout",
        ],
    ),
    "two pieces of work, one after the other": (
        "RUN010",
        [
            "Map: 100%|##########| 412331/412331 [19:58<00:00, 389.41 examples/s]",
            "Filter:  41%|####      | 112331/412331 [09:40<14:12, 189.41 examples/s]",
            watchdog(1, 1, n=1, ms=1800000),
        ],
    ),
    "a bar of a rank that waited too": (
        "RUN001",
        ["Evaluating:  12%|#         | 120/1000 [00:31<03:40,  4.0it/s]", *(watchdog(rank, 42) for rank in range(2))],
    ),
    "a monitored barrier of the others": (
        "RUN010",
        [
            "Map (num_proc=14):  70%|#######   | 652383/930514 [6:39:53<4:31:33, 17.07 examples/s]",
            "[E ProcessGroupGloo.cpp:138] Rank 3 successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0. Please check rank 0 logs for faulty rank.",
        ],
    ),
    "saving, by the clock": (
        "RUN010",
        [
            "2026-02-18 10:28:25,496 - root - INFO - Saving latest checkpoint model trained for 3 complete epochs",
            *(f"2026-02-18 10:29:{number:02},000 - root - INFO - still here" for number in range(30)),
            "2026-02-18 10:48:25,681 - root - ERROR - [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1512677, "
            "OpType=ALLREDUCE, NumelIn=306176, NumelOut=306176, Timeout(ms)=1200000) ran for 1200027 milliseconds before timing out.",
        ],
    ),
    # Parameters without gradient.
    "unused, in Lightning": (
        "RUN009",
        [
            "[rank1]: RuntimeError: It looks like your LightningModule has parameters that were not used in producing the "
            "loss returned by training_step. If this is intentional, you must enable the detection of unused parameters"
        ],
    ),
    "unused, with names": (
        "RUN009",
        [
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
            "Parameters which did not receive grad for rank 0: backbone.fc.weight, backbone.fc.bias",
        ],
    ),
    "unused, several ranks": (
        "RUN009",
        [
            f"[rank{rank}]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
            "one. This error indicates that your module has parameters that were not used in producing loss."
            for rank in range(2)
        ],
    ),
    # A rank that died.
    "one error of a user, and lost peers": (
        "RUN004",
        [
            "[rank2]: Traceback (most recent call last):",
            '[rank2]:   File "/home/me/train.py", line 58, in training_step',
            "[rank2]: AssertionError: targets out of range",
            "[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:27845",
            "[rank1]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        ],
    ),
    "all fail alike": (
        "RUN004",
        [f"[rank{rank}]: FileNotFoundError: [Errno 2] No such file or directory: 'data.json'" for rank in range(4)],
    ),
    "a crash of native code": (
        "RUN004",
        [
            "[rank1]: Fatal Python error: Segmentation fault",
            "[rank1]: Current thread 0x00007f0 (most recent call first):",
            '[rank1]:   File "/home/me/train.py", line 58 in training_step',
        ],
    ),
    "a launcher that names the signal": (
        "RUN004",
        ["[rank: 1] Child process with PID 4242 terminated with code -11. Forcefully terminating all other processes"],
    ),
    "the store of rank 0 is gone": (
        "RUN012",
        [
            "[rank1]:[W810 23:02:42.715 ProcessGroupNCCL.cpp:1826] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "
            '"should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection '
            "reset by peer",
            "[rank2]:[W810 23:02:42.716 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=67, addr=[node1]:36214, "
            "remote=[node0]:43145): Broken pipe",
        ],
    ),
    "gloo lost a peer": (
        "RUN012",
        [
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer "
            "[172.18.0.3]:4001"
        ],
    ),
    "a killed rank in torchrun's table": (
        ("RUN004", "MEM012"),
        [
            "train.py FAILED",
            "Failures:",
            "  <NO_OTHER_FAILURES>",
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2026-01-02_03:04:05",
            "  host      : node01",
            "  rank      : 3 (local_rank: 3)",
            "  exitcode  : -9 (pid: 4321)",
            "  error_file: <N/A>",
            "  traceback : Signal 9 (SIGKILL) received by PID 4321",
            "============================================================",
        ],
    ),
    # Tensors of the host.
    "cpu tensor, torch 2": ("RUN011", ["[rank0]: RuntimeError: No backend type associated with device type cpu"]),
    "cpu tensor, torch 1": ("RUN011", ["RuntimeError: Tensors must be CUDA and dense"]),
    "cpu tensor, as a ValueError": ("RUN011", ["ValueError: Tensors must be CUDA and dense"]),
    # One rank alone.
    "one rank alone in a barrier": (
        ("RUN006", "RUN001"),
        [
            "distributed init (rank 0): env://, world_size: 4",
            "[rank0]: RuntimeError: ProcessGroupWrapper: Monitored Barrier encountered error running collective: "
            "CollectiveFingerPrint(SequenceNumber=6, OpType=ALLREDUCE). Error: ",
            "[rank0]: [Rank 0]: Ranks 1, 2, 3 failed to pass monitoredBarrier in 1800000 ms",
        ],
    ),
    "rank_zero_only on the way": (
        "RUN006",
        [
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "/env/lib/python3.11/site-packages/lightning_utilities/core/rank_zero.py", line 41, in wrapped_fn',
            "[rank0]:     return fn(*args, **kwargs)",
            '[rank0]:   File "/home/me/callbacks.py", line 171, in on_train_epoch_end',
            '[rank0]:   File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3245, in all_reduce',
            "[rank0]: RuntimeError: [unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
        ],
    ),
    "a barrier that ranks miss": (
        "RUN001",
        ["[rank0]: RuntimeError: [Rank 0]: Ranks 5 failed to pass monitoredBarrier in 120000 ms"],
    ),
    "desync report": (
        "RUN001",
        [
            watchdog(0),
            "\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any "
            "collectives",
        ],
    ),
    # The rest.
    "a stuck watchdog": (
        "RUN016",
        [
            "[rank0]:[E1019 01:04:03.356947152 ProcessGroupNCCL.cpp:1413] [PG 3 Rank 0] Heartbeat monitor timed out! Process "
            "will be terminated after dumping debug info. workMetaList_.size()=121",
            "[rank0]:[F1019 01:14:03 ProcessGroupNCCL.cpp:1224] [PG 3 Rank 0] [PG 3 Rank 0] ProcessGroupNCCL's watchdog got "
            "stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        ],
    ),
    "another world": (
        "RUN017",
        [
            "[rank5]: deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of "
            "32 but the current world size is 128. Automatic adjustment is not currently supported."
        ],
    ),
    "ranks that resume apart": (
        "RUN017",
        ["[rank0]: Resuming from checkpoint at iteration 1200", "[rank1]: Resuming from checkpoint at iteration 1150"],
    ),
    "models that differ": (
        "RUN014",
        [
            "[rank1]: RuntimeError: DDP expects same model across all ranks, but Rank 1 has 161 params, while rank 0 has "
            "inconsistent 159 params."
        ],
    ),
    "models that differ in shape": (
        "RUN014",
        [
            "RuntimeError: [1]: params[0] in this process with shape [5, 32] appears not to match sizes of the same param in "
            "process 0."
        ],
    ),
    "a worker that crashed": (
        "DATA012",
        ["RuntimeError: DataLoader worker (pid 4242) is killed by signal: Segmentation fault. "],
    ),
    "a worker that raised": (
        "DATA012",
        [
            "[rank1]: ValueError: Caught ValueError in DataLoader worker process 0.",
            "[rank1]: Original Traceback (most recent call last):",
            '[rank1]:   File "/home/me/data.py", line 17, in __getitem__',
            "[rank1]: ValueError: bad sample",
        ],
    ),
}

HEALTHY = {
    "ordinary training": [
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2",
        "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2",
        "Epoch 0:  50%|#####     | 50/100 [30:01<30:01,  1.66it/s, v_num=0]",
        "`Trainer.fit` stopped: `max_epochs=1` reached.",
    ],
    "a map that came to its end": ["Map: 100%|##########| 1000/1000 [29:59<00:00, 689.41 examples/s]", "step 1"],
    "noise at the end": [
        "{'train_runtime': 12.3, 'train_samples_per_second': 81.2, 'epoch': 1.0}",
        "[rank1]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87, addr=[a]:40242, remote=[b]:48749): Failed "
        "to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
    "an error that was handled": [
        "Traceback (most recent call last):",
        '  File "/home/me/data.py", line 3, in load',
        "OSError: truncated image",
        *(f"step {number}" for number in range(300)),
    ],
    "groups that NCCL counts alike": [
        f"node1:{4000 + rank}:{4000 + rank} [{rank}] NCCL INFO {op}: opCount 5 sendbuff 0x7f recvbuff 0x7f count {count} datatype 7 "
        f"op 0 root 0 comm 0x{rank}{comm} [nranks=2] stream 0x55"
        for rank in range(4)
        for comm, op, count in ((1, "AllReduce", 100 + rank // 2), (2, "AllGather", 7))
    ],
    "a training bar of hours and a save": [
        "Saving model checkpoint to out/checkpoint-500",
        "Epoch 3:  47%|####       | 3169/6811 [5:30:01<38:27,  1.58it/s, loss=0.3]",
    ],
    "all ranks say the same": [f"[rank{rank}]: len(train_loader) = 100" for rank in range(8)],
    "details of calls that agree": [
        f"[rank{rank}]:[I ProcessGroupWrapper.cpp:587] [Rank {rank}] Running collective: CollectiveFingerPrint("
        f"SequenceNumber={number}, OpType=ALLREDUCE, TensorShape=[{number}], TensorDtypes=Float)"
        for number in range(1, 5)
        for rank in range(3)
    ],
    "advice of Lightning": [
        "It is recommended to use `self.log('val_loss', ..., sync_dist=True)` when logging on epoch level in distributed "
        "setting to accumulate the metric across devices.",
        "Restored all states from the checkpoint at /ckpt/epoch=1-step=1200.ckpt",
    ],
}


def _report(lines):
    return examine(logged(*lines).job())


@each_case("name", TOLD)
def test_the_verdict(name):
    wanted, lines = TOLD[name]
    report = _report(lines)
    assert report.primary in ((wanted,) if isinstance(wanted, str) else wanted), _loud(report)


@pytest.mark.parametrize("name", HEALTHY)
def test_no_verdict_on_a_healthy_log(name):
    report = _report(HEALTHY[name])
    assert report.primary is None, _loud(report)
    assert not _loud(report)


def _loud(report):
    return [
        (result.id, one.summary, one.confidence, one.explained_by)
        for result in report.results
        for one in result.findings
        if one.severity.value != "info"
    ]


def test_blames_the_rank_that_was_first():
    report = _report(TOLD["one error of a user, and lost peers"][1])
    (finding,) = report.result("RUN004").findings
    assert finding.ranks == (2,)
    assert "training_step" in finding.summary
    assert primary_of(report.results) == "RUN004"
