"""Impacts and fixes that follow from what a case of a check shows."""

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from tests.lab.cases import each_case

CHECKS = {check.id: check for check in builtin_checks()}


def texts_of(check_id, case_name):
    check = CHECKS[check_id]
    (case,) = [case for case in check.cases() if case.name == case_name]
    (result,) = examine_job(case.sketch.job(), CheckRegistry((check,)))
    finding = result.findings[0]
    return f"{finding.summary} | {finding.effect} | {finding.fix}"


@each_case(
    ("check", "case", "text"),
    [
        ("DATA001", "shards of different sizes, without a Trainer", "After 90 batches, ranks 1 and 2 wait for rank 0"),
        ("DATA001", "ranks that log different lengths", "End the epoch on all ranks after 1,560 batches"),
        ("DATA002", "observed, as the dataset makes the batches", "yield batches of 32 on rank 2, as on the others"),
        ("DATA002", "one rank of four", "Set `batch_size=32` on rank 3 in `train_dataloader`"),
        (
            "DATA003",
            "in one of two groups",
            "num_replicas=2, rank=torch.distributed.get_rank(group))` to the DataLoader",
        ),
        ("DATA004", "made for four ranks", "The ranks read only 2 of 4 shards"),
        ("DATA004", "created before the ranks were known", "Every rank reads the whole dataset"),
        ("DATA004", "the shard of rank 0 on all ranks", "Rank 1 reads shard 0 of the data instead of shard 1."),
        ("DATA006", "on one rank", "in epochs 0 and 1 on rank 1 |"),
        ("DATA006", "on one rank", "Call `set_epoch(self.current_epoch)` of the sampler"),
        ("DATA006", "an epoch that the order of a custom sampler does not use", "`Chunks.__iter__` depend on"),
        ("DATA008", "an unsplit stream of Hugging Face, before the first batch", "split_dataset_by_node"),
        ("DATA009", "one rank is pinned to two cores", "or give rank 1 more CPUs"),
        ("DATA009", "16 workers for each of 8 ranks", "workers of 8 ranks on node0 share"),
        ("DATA010", "torchrun's table does not list a rank that ended normally", "Ranks 0 and 1 lose the connection"),
        ("DATA010", "within one of two groups", "103 batches on rank 3 in epoch 0, but 100 on rank 2 |"),
        (
            "DATA011",
            "a wrapped sampler that draws from a different random state on each rank",
            "SubsetRandomSampler in DistributedSamplerWrapper uses seed 8 on rank 1, but 7 on the others",
        ),
        (
            "DATA011",
            "a wrapped sampler that draws from a different random state on each rank",
            "Call `seed_everything(7)` on all ranks before the Trainer is created.",
        ),
        ("DATA011", "the sampler of one rank has a different seed", "uses seed 7 on rank 2, but 0 on the others"),
        ("DATA011", "the sampler of one rank has a different seed", "Pass `seed=0` to `DistributedSampler` on rank 2"),
        ("DATA011", "seed_everything(rank), which the Trainer's samplers use", "Call `seed_everything`"),
        ("ENV014", "python in a batch script of four tasks", "RuntimeError, because SLURM_NTASKS is set without"),
        ("ENV014", "a batch script of four tasks per host", "this process is task 0 (SLURM_PROCID), starts no others"),
        ("ENV014", "a batch script of four tasks per host", "`srun --ntasks-per-node=4`"),
        ("ENV014", "the shell of salloc in a named job with tasks per host", "which is not set, and raises KeyError"),
        ("GPU003", "names a device that is not there", "so only cuda:0 is visible. A rank that selects cuda:1 fails"),
        ("GPU003", "a UUID of another host", 'ranks find no GPU ("No CUDA GPUs are available")'),
        ("GPU009", "logged by the driver", "Process 7194 (python) used the damaged memory and ends."),
        ("GPU024", "a GPU that can't compute", "cannot compute on cuda:5: CUDA error"),
        ("GPU024", "a GPU that can't compute", "`srun --exclude=node1`"),
        ("MEM001", "contexts beside the rank at home, by rows of a table", "2 processes that probably use other GPUs"),
        ("MEM001", "contexts of two ranks, by a table of nvidia-smi", "2 processes that use other GPUs"),
        ("MEM002", "rank 0 keeps a second model", "tensors that only rank 0 keeps"),
        ("MEM003", "filled by its own rank", "Rank 0 uses 78.0 GiB of 80.0 GiB on GPU 0 of node0"),
        ("MEM003", "another job's memory", "On node1, end process 4242"),
        ("MEM003", "a run that is short of memory", "peak 74.0 GiB, others 1.0 GiB of 80.0 GiB, 12 retries"),
        (
            "MEM004",
            "all ranks keep 2 MiB of each step",
            'All ranks then fail with "CUDA out of memory" at about',
        ),
        ("MEM004", "one rank keeps 10 MiB of each step", "Rank 2 then fails"),
        ("MEM005", "too large for every GPU", "at most 12 per rank (now 16)"),
        ("MEM005", "too large where another process holds memory", "that GPU 0 on node1 has free"),
        ("MEM006", "log of a failed allocation with gigabytes unused", "Rank 1 fails with"),
        ("MEM008", "a run that fills the host", "or run fewer ranks on node1"),
        ("MEM010", "filled by files of killed jobs", "NCCL needs 399 MiB of /dev/shm on node0"),
        ("MEM010", "logged by Python", "or remove files from it that no process uses"),
        ("MEM011", "a snapshot with an allocation that was refused", "GPU 1 of rank 1 ran out of memory"),
        ("NCCL006", "shared memory is off, no GPU is seen", "GPUs without peer access communicate over the network"),
        ("NCCL012", "a time-out of two hours in a job of one", "7200 s, argument of the strategy"),
        ("NCCL015", "HCCL waits for a rank", "HCCL failed with EI0006 on rank 0"),
        ("NCCL015", "HCCL waits for a rank", "or raise HCCL_CONNECT_TIMEOUT if ranks only start slowly"),
        (
            "NET025",
            "bfloat16 holds 129",
            "On node0, check the GPUs for ECC and NVLink errors with `nvidia-smi -q -d ECC`",
        ),
        ("NET025", "integers are exact", "grep -E 'Hardware Error|EDAC.* (CE|UE) '"),
        ("RUN001", "dumps of all ranks but one", "it may have exited, or the dump was not collected"),
        ("RUN002", "calls printed by TORCH_DISTRIBUTED_DEBUG=DETAIL", "Pass a tensor of the same shape at"),
        ("RUN004", "sys.exit(1) on all ranks", "Find the condition under which ranks 0 and 1 exit at train.py:42"),
        (
            "RUN004",
            "an error that the run outlived",
            "Fix the cause of `ValueError: no such sample` (job.log:1), unless",
        ),
        ("RUN005", "a third of the step on all ranks", "per rank if the hosts have free CPUs"),
        ("RUN006", "log of a barrier that only rank 0 reached", "ranks 1-3 did not arrive in time"),
        ("RUN010", "a data worker that was stopped", "waits for a stopped data worker (PID 7)"),
        ("RUN010", "a data worker that was stopped", "Run `kill -CONT 7` on"),
        (
            "RUN010",
            "a data worker that waits for a server",
            "Data worker PID 7 waits for data from 10.0.0.9:80 at data.py:17",
        ),
        ("RUN007", "both ranks of a job of two", "The parameters differ between ranks 0 and 1 after step 50"),
        ("RUN007", "from the start", "Rank 1 started with different parameters, which still differ after step 150 | "),
        ("RUN007", "from the start", "checkpoint of the other ranks on rank 1, and check that the initial broadcast"),
        ("RUN014", "a wider layer on one rank", "DDP raises an error when it wraps the model"),
        ("RUN014", "one tensor more", "Rank 2 wraps a different model: head is an additional tensor"),
        ("RUN014", "one tensor less", "Rank 2 wraps a different model: layer.bias is missing"),
        ("RUN014", "another type", "DDP does not compare types"),
        ("RUN016", "a thread holds the GIL", "probably because a thread held the GIL"),
        ("RUN017", "random states of fewer processes", "for rank 5: saved by fewer ranks, or left on another host | "),
        ("RUN017", "random states of fewer processes", "Copy `rng_state_5.pth` into the checkpoint on this host"),
        ("RUN017", "one rank resumes elsewhere", "the replicas may diverge"),
        ("RUN017", "FSDP's flat parameters", "is sharded differently"),
        ("RUN017", "a parameter that ZeRO stage 3 has not gathered", "probably because ZeRO stage 3 has sharded it"),
        ("VER003", "a GPU newer than torch", "torch==2.8.0+cu128 --index-url https://download.pytorch.org/whl/cu128"),
        ("VER003", "a GPU that torch dropped", "https://download.pytorch.org/whl/cu126"),
        ("VER003", "code for a later GPU of the generation", "On node1, install a PyTorch build whose"),
        ("VER004", "torch older than required", "2.0.1 is installed on node1"),
        ("VER004", "torch older than required", 'pip install "torch==2.8.0"'),
        ("VER004", "an old Lightning that shuts torch 2 out", "pip install -U pytorch-lightning"),
    ],
)
def test_a_finding_says_what_its_case_shows(check, case, text):
    assert text in texts_of(check, case)


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("one rank of four gives more elements", {}),
        ("printed calls of three ranks", {}),
        (
            "one rank broadcasts where the others reduce",
            {"rank 1": "broadcast of 330 Float elements", "ranks 0 and 2": "all_reduce of 330 Float elements"},
        ),
    ],
)
def test_calls_are_evidence_only_beyond_the_title_and_the_locations(case, calls):
    (sketch,) = [one.sketch for one in CHECKS["RUN002"].cases() if one.name == case]
    (result,) = examine_job(sketch.job(), CheckRegistry((CHECKS["RUN002"],)))
    assert result.findings[0].evidence["calls"] == calls


@pytest.mark.parametrize(
    ("check", "case"),
    [
        ("DATA009", "16 workers for each of 8 ranks"),
        ("RUN014", "another order"),
        ("RUN003", "rare long steps of a rank"),
    ],
)
def test_values_of_a_summary_are_not_repeated_as_evidence(check, case):
    check = CHECKS[check]
    (sketch,) = [one.sketch for one in check.cases() if one.name == case]
    (result,) = examine_job(sketch.job(), CheckRegistry((check,)))
    assert not {"workers", "cpus", "parameters", "seconds_lost"} & result.findings[0].evidence.keys()
