"""The table of known messages: what it finds, and what it leaves alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib.resources import files

import msgspec
import pytest

from doctor.knowledge.log_patterns import LogPattern, known_patterns
from doctor.postmortem.logs.lines import LONG
from doctor.postmortem.logs.scanner import read_lines
from tests.lab.cases import assert_each
from tests.lab.speed import exceeds_reference

MESSAGES = known_patterns()
FOLDER = files("doctor.knowledge") / "log_lines"
SPEAKERS = sorted(entry.name.removesuffix(".json") for entry in FOLDER.iterdir() if entry.name.endswith(".json"))
LAUNCHERS = (
    "[rank3]: ",
    "[rank3]:",
    "[1,0]<stdout>:",
    "[default3]:",
    "(RayTrainWorker pid=1234, ip=10.0.0.1) ",
)
"""Prefixes that launchers put before a line."""


def test_every_file_is_read() -> None:
    assert [message for speaker in SPEAKERS for message in _of(speaker)] == list(MESSAGES)


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_examples(speaker: str) -> None:
    assert_each(_finds_its_examples, _by_kind(speaker))


def _finds_its_examples(message: LogPattern) -> None:
    assert message.examples
    for line in message.examples:
        assert message.compiled.search(line), line
        assert any(cue in line for cue in message.cues), line


ALIGNED = {"end.signal", "launch.takedown"}
"""Kinds of a shell's reports of jobs, whose columns tell a command from other words."""


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_examples_without_alignment(speaker: str) -> None:
    """Web pages and Markdown collapse spaces."""
    assert_each(_finds_collapsed_examples, [one for one in _by_kind(speaker) if one[0] not in ALIGNED])


def _finds_collapsed_examples(message: LogPattern) -> None:
    for line in (re.sub(r"(?<=\S) {2,}(?=\S)", " ", line) for line in message.examples):
        assert message.compiled.search(line), line
        assert any(cue in line for cue in message.cues), line


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_cues(speaker: str) -> None:
    assert_each(_has_specific_cues, _by_kind(speaker))


def _has_specific_cues(message: LogPattern) -> None:
    for cue in message.cues:
        assert len(cue) > 2
        assert cue.strip(" :").lower() not in {"error", "rank", "warning", "failed", "info"}


def test_by_the_reader() -> None:
    """The reader of logs makes an event of its kind of every example, but of those that look like source."""
    assert not [(kind, line) for kind, line in _spoken() if kind not in _kinds(line)]


@pytest.mark.parametrize("prefix", LAUNCHERS)
def test_behind_prefixes(prefix: str) -> None:
    assert not [(kind, line) for kind, line in _spoken() if kind not in _kinds(prefix + line)]


def _spoken() -> Iterator[tuple[str, str]]:
    for message in MESSAGES:
        yield from ((message.kind, line) for line in message.examples if not line.lstrip().startswith(("#", "-")))


@functools.cache
def _kinds(line: str) -> frozenset[str]:
    events, _ = read_lines([line], "log")
    return frozenset(event.kind for event in events)


def _by_kind(speaker: str) -> Iterator[tuple[str, tuple[LogPattern]]]:
    yield from ((message.kind, (message,)) for message in _of(speaker))


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_patterns_end_soon(speaker: str) -> None:
    assert_each(_ends_soon, _by_kind(speaker))


def _ends_soon(message: LogPattern) -> None:
    slow = [line[:80] for line in _hostile(message) if _is_slow(message, line)]
    assert not slow


SIZE = LONG
"""Characters of the longest piece of a line that the reader looks at."""
MOST_REFERENCES = 10
"""How many times the work of the reference a pattern may take over it."""


def _hostile(message: LogPattern) -> Iterator[str]:
    first, example = message.cues[0], message.examples[0]
    for text in (first, example, "[", "0", "a:"):
        yield (text * (SIZE // len(text) + 1))[:SIZE]
    for text in ("0", "a ", " "):
        yield first + text * (SIZE // len(text))
    yield example + " " * SIZE + "!"


def _is_slow(message: LogPattern, line: str) -> bool:
    return exceeds_reference(lambda: message.compiled.search(line), MOST_REFERENCES)


HEALTHY = """\
Epoch 3:  45%|████▌     | 450/1000 [05:12<06:21,  1.44it/s, v_num=12, train_loss=0.231]
Training:  12%|█▏        | 1200/10000 [10:00<1:13:20,  2.00it/s]
100%|██████████| 782/782 [00:31<00:00, 24.80it/s]
Validation DataLoader 0: 100%|██████████| 20/20 [00:01<00:00, 12.05it/s]
step 1200 loss 2.31 lr 3.0e-4 grad_norm 0.91 tokens/s 41230
{"loss": 1.2345, "learning_rate": 2e-05, "epoch": 0.31}
{'train_runtime': 1234.5, 'train_samples_per_second': 12.3, 'train_loss': 0.45, 'epoch': 3.0}
INFO:root:error rate 0.023 on the validation set
INFO - mean absolute error: 0.0137
val_error=0.12 test_error=0.13
[2024-01-02 03:04:05,678] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.0001], mom=[[0.9, 0.999]]
[2024-01-02 03:04:05,678] [INFO] [comm.py:637:init_distributed] cdb=None
[2024-01-02 03:04:05,678] [INFO] [launch.py:347:main] Process 12345 exits successfully.
INFO:torch.nn.parallel.distributed:Reducer buckets have been rebuilt in this iteration.
INFO:torch.distributed.distributed_c10d:Added key: store_based_barrier_key:1 to store for rank: 0
Seed set to 42
Global seed set to 42
TPU available: False, using: 0 TPU cores
HPU available: False, using: 0 HPUs
distributed_backend=nccl
Trainer already configured with model summary callbacks
Restoring states from the checkpoint path at /ckpt/last.ckpt
Restored all states from the checkpoint at /ckpt/last.ckpt
`Trainer.fit` stopped: `max_epochs=3` reached.
  | Name  | Type    | Params
0 | model | ResNet  | 25.6 M
25.6 M    Trainable params
102.2     Total estimated model params size (MB)
Loading checkpoint shards: 100%|██████████| 2/2 [00:05<00:00,  2.61s/it]
Saving model checkpoint to output/checkpoint-500
Some weights of BertForSequenceClassification were not initialized from the model checkpoint
Special tokens have been added in the vocabulary, make sure the associated word embeddings are fine-tuned or trained.
***** Running training *****
  Num examples = 52002
  Total train batch size (w. parallel, distributed & accumulation) = 128
wandb: Currently logged in as: someone. Use `wandb login --relogin` to force relogin
wandb: Run data is saved locally in /scratch/wandb/run-20240102
wandb: Synced 5 W&B file(s), 0 media file(s), 0 artifact file(s) and 0 other file(s)
2024-01-02 03:04:05.678901: I tensorflow/core/util/port.cc:110] oneDNN custom operations are on.
FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Use `torch.amp.autocast('cuda', args...)` instead.
UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.
UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly.
UserWarning: The given NumPy array is not writable, and PyTorch does not support non-writable tensors.
DeprecationWarning: pkg_resources is deprecated as an API
[W NNPACK.cpp:64] Could not initialize NNPACK! Reason: Unsupported hardware.
Using /home/me/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...
Loading extension module fused_adam...
Time to load fused_adam op: 0.0638 seconds
ninja: no work to do.
Downloading: 100%|██████████| 440M/440M [00:10<00:00, 41.8MB/s]
Files already downloaded and verified
batch_size: 32
num_workers: 8
gradient_clip_val: 1.0
strategy: ddp
devices: 8
timeout: 1800
max_restarts: 3
output_dir: /scratch/runs/out of memory experiments
find_unused_parameters: false
seed=1337 world_size=16 local_rank=3 rank=11
Namespace(backend='nccl', dist_url='env://', gpu=0, lr=0.1, rank=0, world_size=8)
rank 3 finished epoch 2 in 312.4 s
Rank 0 has 1000 samples
[rank0] saving checkpoint
memory allocated: 31.2 GiB reserved: 38.0 GiB
max_memory_allocated 40123 MiB
GPU memory in use: 12.3 GiB of 79.2 GiB
nvidia-smi topology: NV18
Thu Jan  4 12:00:00 2024
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |                    0 |
| N/A   34C    P0             115W / 700W |  65031MiB / 81559MiB |     99%      Default |
NVLink bandwidth 450 GB/s
SLURM job 123456 starts on node[01-04]
srun: job 123456 queued and waiting for resources
Submitted batch job 123456
The job will end at 12:00 if the limit is reached
Processing file killed_in_action.txt
Terminating training early: patience of 3 epochs is used up
Early stopping, best score 0.91
Connection to the tracking server established
connecting to db at localhost:5432
retrying upload in 5 s
Port 29500 is free
the network address of this host is 10.0.0.1
Timeout for collectives set to 30 minutes
assertion checks enabled
2 warnings, 0 errors
0 failed, 12 passed in 3.41s
exit code 0
Process finished with exit code 0
""".splitlines()


def test_healthy_lines() -> None:
    assert_each(_is_no_failure, [(line, (line,)) for line in HEALTHY])


def _is_no_failure(line: str) -> None:
    assert not {
        kind
        for kind in _kinds(line)
        if not kind.startswith((*OF_HEALTHY_RUNS, "mark.step", "mark.end")) and not kind.endswith(".harmless")
    }


OF_HEALTHY_RUNS = (
    "mark.step",
    "mark.end",
    "run.bar",
    "run.busy",
    "run.training",
    "run.resumed",
    "run.world",
    "run.ended_well",
    "data.",
    "launch.",
    "slurm.script",
    "trainer.named",
    "host.link_up",
)
"""Kinds, or how they begin, that tell what a run is or does."""


BY_SPEAKER = ("nccl", "torch", "gloo", "ddp", "elastic", "dataloader", "cuda", "lightning", "host", "slurm", "python")
"""The files of the table that are by speaker: there a line has one kind."""
CARRIERS = {
    "cuda.error",
    "nccl.cuda_fail",
    "nccl.result",
    "nccl.syscall_fail",
    "nccl.ibv_fail",
    "torch.nccl.error",
    "torch.nccl.error.code",
    "torch.nccl.last_error",
    "torch.nccl.watchdog_exc",
    "torch.nccl.watchdog_exc.old",
    "torch.nccl2.prefix",
    "torch.store.reset",
    "torch.store.recv0",
    "elastic.failed",
    "elastic.child_line",
    "elastic.signal_tb",
    "elastic.sigrecv",
    "elastic.sigexc",
    "elastic.closing",
    "elastic.rdzv_timeout",
    "launch.exit_code",
    "launch.spawn_died",
    "slurm.task_exit",
    "slurm.cancel",
    "slurm.oom",
    "mpi.peer_exit",
    "dl.fds",
    "dl.killed",
    "host.address_in_use",
    "host.name_unknown",
    "host.xid",
    "host.oom_kernel",
    "nccl.ib_hint",
}
"""Kinds that say how something failed, beside which another names what the text in them means."""
TOGETHER = (
    {"ddp.unused", "ddp.unused.hint"},
    {"torch.mismatch", "torch.seq_mismatch"},
    {"torch.nccl.storekey", "torch.store.wait"},
    {"torch.nccl.storekey", "torch.store.wait.old"},
    {"torch.nccl.watchdog_timeout", "torch.nccl.pg_status.old"},
    {"torch.nccl.using_device", "torch.use_device.harmless"},
)
"""Kinds of one line: two sentences of it are known."""


def test_one_kind_a_line() -> None:
    messages = [message for speaker in BY_SPEAKER for message in _of(speaker)]
    for message in messages:
        for line in message.examples:
            kinds = {other.kind for other in messages if _says(other, line)} - CARRIERS
            assert len(kinds) < 2 or kinds in TOGETHER, f"narrow the pattern of one of {sorted(kinds)}: {line}"


@functools.cache
def _of(speaker: str) -> tuple[LogPattern, ...]:
    content = (FOLDER / f"{speaker}.json").read_bytes()
    return msgspec.json.decode(content, type=tuple[LogPattern, ...])


def _says(message: LogPattern, line: str) -> bool:
    return any(cue in line for cue in message.cues) and message.compiled.search(line) is not None


HARMLESS_THAT_ALARM = """\
[W416 23:24:57.460001114 socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. err=-3
CUDA kernel errors might be asynchronously reported at some other API call
node01:1234:5678 [0] NCCL INFO [Service thread] Connection closed by localRank 3
NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!
UserWarning: resource_tracker: There appear to be 6 leaked semaphore objects to clean up at shutdown
It is recommended to use `self.log('val_loss', ..., sync_dist=True)` when logging on epoch level in distributed setting
DeprecationWarning: This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child.
LightningDeprecationWarning: Setting `Trainer(gpus=2)` is deprecated in v1.7 and will be removed in v2.0.
""".splitlines()


def test_harmless_lines_are_classified_as_harmless() -> None:
    assert_each(_is_harmless, [(line, (line,)) for line in HARMLESS_THAT_ALARM])


def _is_harmless(line: str) -> None:
    kinds = {kind for kind in _kinds(line) if not kind.startswith(OF_HEALTHY_RUNS)}
    assert kinds
    assert all(kind.endswith(".harmless") for kind in kinds)
