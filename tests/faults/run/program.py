"""All scenes of runs, in the order in which they are shown, and the healthy runs."""

from __future__ import annotations

from typing import Any

from tests.faults.run.scenes import RunScene
from tests.faults.run.stage import Run

IMPATIENT = (("hang_after", 4.0),)
"""For points that are slow by nature: the default gives a checkpoint two minutes, an epoch's begin one."""
FAR = '[limits]\n"MEM009.horizon" = 20000\n'
"""Seconds of a leak speak of hours then, whatever the host's memory."""
DETAIL = (("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)


def run(program: str, culprits: tuple[int, ...] = (), world: int = 2, **more: Any) -> Run:
    """As :class:`Run`; dictionaries for ``options`` and ``environ``."""
    for name in ("options", "environ"):
        if name in more:
            more[name] = tuple(more[name].items())
    return Run(program, world, culprits=culprits, **more)


DATA = (
    RunScene(
        "one more batch on rank 1",
        "DATA001",
        run("data.uneven_map", (1,), 3),
        does="fails",
        before=True,
    ),
    RunScene(
        "one more batch on rank 1, of two",
        "DATA001",
        run("data.uneven_map", (1,)),
        does="fails",
        before=True,
    ),
    RunScene(
        "one more batch on rank 1, and an epoch-end log with sync",
        "DATA001",
        run("data.uneven_map_logged", (1,), 3),
        does="hangs",
        before=True,
    ),
    RunScene(
        "the same until its timeout: the hang is a consequence",
        "DATA001",
        run("data.uneven_map_logged", (1,), to_the_end=True, timeout=20.0),
        does="hangs",
        before=True,
    ),
    RunScene(
        "the same by the Trainer's launcher",
        "DATA001",
        run("data.uneven_map_logged", (1,), by="trainer"),
        does="hangs",
        before=True,
    ),
    RunScene(
        "the same with on_error=raise: all ranks end together",
        "DATA001",
        run("data.uneven_map_logged", (1,), 3, options={"on_error": "raise"}),
        does="hangs",
        becomes="fails",
        before=True,
    ),
    RunScene(
        "streams, one of which ends early, and an epoch-end log with sync",
        "DATA010",
        run("data.uneven_stream_logged", (1,), 3),
        does="hangs",
    ),
    RunScene("streams, one of which ends early", "DATA010", run("data.uneven_stream", (1,), 3), does="fails"),
    RunScene(
        "one more batch of validation on rank 1, a collective in each",
        "DATA001",
        run("data.uneven_validation", (1,), 3),
        does="hangs",
    ),
    RunScene(
        "a batch sampler that makes fewer batches on rank 1",
        "DATA001",
        run("data.uneven_batch_sampler", (1,), 3),
        does="fails",
        also=("DATA002",),
        before=True,
    ),
    RunScene("twice the batch size on rank 2", "DATA002", run("data.batch_size", (2,), 3), severity="warning"),
    RunScene("no distributed sampler", "DATA003", run("data.no_sampler", (0, 1)), severity="warning", before=True),
    RunScene("a sampler for four ranks", "DATA004", run("data.sampler_world", (0, 1)), before=True),
    RunScene("a sampler of rank 0 on rank 1", "DATA004", run("data.sampler_rank", (1,)), before=True),
    RunScene("two ranks with the same part", "DATA005", run("data.same_part", (1, 2), 3)),
    RunScene("no epoch in the shuffling", "DATA006", run("data.same_order", (0, 1)), severity="warning"),
    RunScene(
        "set_epoch missing in a plain loop",
        "DATA006",
        run("data.same_order_in_a_loop", (0, 1)),
        severity="warning",
    ),
    RunScene(
        "padding counted twice in validation",
        "DATA007",
        run("data.padded_validation", (0, 1)),
        of_host=True,
        severity="info",
    ),
    RunScene("a stream that is not sharded", "DATA008", run("data.same_stream", (0, 1)), severity="warning"),
    RunScene(
        "more workers than processors",
        "DATA009",
        run("data.many_workers", (0, 1)),
        of_host=True,
        severity="warning",
        before=True,
    ),
    RunScene("another seed in the sampler of rank 2", "DATA011", run("data.seeds", (2,), 3), also=("DATA005",)),
)

COLLECTIVES = (
    RunScene("an all_gather only on rank 0", "RUN006", run("progress.gather_alone", (0,)), does="hangs"),
    RunScene("a metric logged with sync only on rank 0", "RUN006", run("progress.log_alone", (0,)), does="hangs"),
    RunScene("a barrier only on rank 0", "RUN006", run("progress.barrier_alone", (0,)), does="hangs"),
    RunScene("a checkpoint saved only by rank 0", "RUN006", run("progress.checkpoint_alone", (0,)), does="hangs"),
    RunScene(
        "an all-reduce in a method for rank zero only, at the end of the second epoch",
        "RUN006",
        run("progress.rank_zero_only_reduce_later", (0,), 3),
        does="hangs",
    ),
    RunScene(
        "the same at the end of the first epoch",
        "RUN006",
        run("progress.rank_zero_only_reduce", (0,), 3, seconds=100.0, timeout=120.0),
        does="hangs",
    ),
    RunScene(
        "a backward pass left out on rank 1", "RUN006", run("progress.skipping", (1,), 3), does="hangs", or_id="RUN002"
    ),
    RunScene(
        "another shape on rank 2, under DETAIL",
        "RUN002",
        run("progress.shapes_in_a_loop", (2,), 3, environ=dict(DETAIL)),
        does="fails",
        also=("NCCL007",),
    ),
    RunScene(
        "another type on rank 2, under DETAIL",
        "RUN002",
        run("progress.types_in_a_loop", (2,), 3, environ=dict(DETAIL)),
        does="fails",
        also=("NCCL007",),
    ),
    RunScene(
        "another shape on rank 2, which Gloo aborts",
        "RUN004",
        run("progress.shapes", (2,), 3),
        does="fails",
        or_id="RUN002",
    ),
    RunScene(
        "another type on rank 2, for which Gloo aborts one of the others",
        "RUN002",
        run("progress.types", (2,), 4),
        does="fails",
    ),
    RunScene(
        "integers among floats on rank 2: nonsense, and no error", "RUN002", run("progress.silent_types", (2,), 3)
    ),
    RunScene("a broadcast on rank 2", "RUN002", run("progress.operations", (2,), 3), does="hangs"),
    RunScene("two collectives swapped on rank 2", "RUN002", run("progress.order", (2,), 3), does="hangs"),
    RunScene("two groups crossed", "RUN015", run("progress.groups_crossed", (0, 1)), does="hangs"),
    RunScene("a send without a receive", "RUN015", run("progress.send_alone", (0,)), does="hangs"),
    RunScene("a receive without a send", "RUN015", run("progress.receive_alone", (1,)), does="hangs"),
)

LEAVES = (
    RunScene(
        "rank 1 breaks out of its loop",
        "RUN001",
        run("loops.leaving_by_break", (1,)),
        does="hangs",
        says=("left the training loop", "6 of 20 batches", "`break` at loops.py"),
    ),
    RunScene(
        "rank 1 of three breaks out of its loop",
        "RUN001",
        run("loops.leaving_by_break", (1,), 3),
        does="hangs",
        says=("left the training loop", "`break` at loops.py"),
    ),
    RunScene(
        "rank 1 returns out of the watched run",
        "RUN001",
        run("loops.leaving_by_return", (1,)),
        does="hangs",
        says=("has finished", "`return` at loops.py"),
    ),
    RunScene(
        "rank 1 returns, and its process ends",
        "RUN001",
        run("loops.leaving_for_good", (1,)),
        does="fails",
        says=("has finished",),
    ),
)

SETTINGS = (
    RunScene(
        "rank 2 accumulates over four batches, the others over two",
        "RUN006",
        run("progress.accumulating", (2,), 3),
        does="hangs",
        says=("accumulate_grad_batches differs", "rank 2: 4"),
    ),
    RunScene(
        "rank 2 validates every seven batches, the others every five",
        "RUN006",
        run("progress.evaluating", (2,), 3),
        does="hangs",
        says=("val_check_interval differs",),
    ),
    RunScene(
        "half the learning rate on rank 1",
        "RUN007",
        run("loops.other_rate", (1,), 3),
        says=("lr differs", "rank 1: 0.005"),
    ),
    RunScene(
        "a learning rate that rank 1 lowers by its own metric",
        "RUN007",
        run("loops.rate_by_metric", (1,), 3),
        says=("lr differs",),
    ),
    RunScene(
        "gradients clipped on rank 1",
        "RUN007",
        run("loops.clipping", (1,), 3),
        says=("gradient clipping differs", "rank 1: by norm, at most 0.01"),
    ),
    RunScene(
        "autocast on rank 1",
        "RUN020",
        run("loops.other_precision", (1,), 3),
        severity="warning",
        says=("autocast to bfloat16",),
    ),
    RunScene(
        "eval mode on rank 1",
        "RUN020",
        run("loops.eval_mode", (1,), 3),
        severity="warning",
        says=("Modules in eval mode differ", "dropout"),
    ),
    RunScene(
        "weights by rank 1's own seed, gradients averaged by hand",
        "RUN007",
        run("loops.own_seeds", (1,), 3),
        severity="warning",
        says=("with different seeds (ranks 0, 2: 1; rank 1: 2)",),
    ),
    RunScene(
        "a layer left out of the loss of rank 1",
        "RUN006",
        run("loops.unused_parameter", (1,)),
        does="hangs",
        or_id="RUN002",
        says=("find_unused_parameters", "extra.weight"),
    ),
    RunScene(
        "a layer frozen when it was wrapped, and trained later",
        "RUN007",
        run("loops.unfrozen", (0, 1)),
        says=("frozen when DDP wrapped the model", "extra.weight"),
    ),
)

STOPS = (
    RunScene("rank 1 asleep", "RUN001", run("progress.sleeping", (1,)), does="hangs"),
    RunScene("rank 0 asleep", "RUN001", run("progress.sleeping", (0,), 3), does="hangs"),
    RunScene("rank 1 asleep, by torchrun", "RUN001", run("progress.sleeping", (1,), by="torchrun"), does="hangs"),
    RunScene(
        "rank 2 of four asleep, hang_after=4",
        "RUN001",
        run("progress.sleeping", (2,), 4, options={"hang_after": 4.0}),
        does="hangs",
    ),
    RunScene(
        "rank 1 asleep, with on_hang=abort: all ranks end together",
        "RUN001",
        run("progress.sleeping", (1,), 3, options={"on_hang": "abort"}),
        does="hangs",
        becomes="fails",
    ),
    RunScene(
        "rank 3 of a mesh asleep, tensor parallel", "RUN001", run("meshes.tensor_parallel", (3,), 4), does="hangs"
    ),
    RunScene(
        "rank 0 of a mesh asleep, tensor parallel", "RUN001", run("meshes.tensor_parallel", (0,), 4), does="hangs"
    ),
    RunScene(
        "rank 2 of a mesh asleep, expert parallel",
        "RUN001",
        run("meshes.expert_parallel", (2,), 4),
        does="hangs",
        says=("mesh_ep",),
    ),
    RunScene(
        "rank 3 of a mesh asleep, context parallel",
        "RUN001",
        run("meshes.context_parallel", (3,), 4),
        does="hangs",
        says=("mesh_cp",),
    ),
    RunScene("rank 1 of a mesh asleep, DTensor and FSDP", "RUN001", run("meshes.of_dtensors", (1,), 4), does="hangs"),
    RunScene("rank 3 of a mesh asleep, pipelines", "RUN001", run("meshes.pipeline", (3,), 4), does="hangs"),
    RunScene("rank 0 of a mesh asleep, pipelines", "RUN001", run("meshes.pipeline", (0,), 4), does="hangs"),
    RunScene("rank 1 stopped", "RUN001", run("progress.stopped", (1,), 3), does="hangs"),
    RunScene("rank 0 stopped", "RUN001", run("progress.stopped", (0,), 3), does="hangs"),
    RunScene("rank 0 stopped, by torchrun", "RUN001", run("progress.stopped", (0,), by="torchrun"), does="hangs"),
    RunScene("the GIL held on rank 1", "RUN001", run("progress.holding_gil", (1,)), does="hangs"),
    RunScene("the GIL held on rank 0", "RUN001", run("progress.holding_gil", (0,), 3), does="hangs"),
    RunScene(
        "a row that never completes on rank 1", "RUN010", run("data.slow_row", (1,)), does="hangs", or_id="RUN001"
    ),
    RunScene(
        "the same in a data worker",
        "RUN010",
        run("data.slow_row_in_a_worker", (1,)),
        does="hangs",
    ),
    RunScene(
        "a lock held over the fork of a data worker",
        "RUN010",
        run("data.lock_over_fork", (1,)),
        does="hangs",
        says=("its data worker", "(_locked) and waits for a lock"),
    ),
    RunScene(
        "a checkpoint that rank 0 never finishes writing",
        "RUN010",
        run("progress.slow_checkpoint", (0,), 3, options=dict(IMPATIENT)),
        does="hangs",
    ),
    RunScene(
        "rank 0 tokenizes while the others wait",
        "RUN010",
        run("progress.slow_preparation", (0,), options=dict(IMPATIENT)),
        does="hangs",
    ),
)

WAITS = (
    RunScene(
        "rank 1 waits for a lock that another process holds",
        "RUN001",
        run("loops.flock_of_another", (1,)),
        does="hangs",
        says=("a lock on", "cache.lock", "held by PID"),
    ),
    RunScene(
        "rank 1 receives from a silent server",
        "RUN001",
        run("loops.silent_socket", (1,)),
        does="hangs",
        says=("waits for data from 127.0.0.1:",),
    ),
    RunScene(
        "rank 1 waits for an item of a queue",
        "RUN001",
        run("loops.empty_queue", (1,)),
        does="hangs",
        says=("queue.get",),
    ),
    RunScene(
        "rank 1 writes to a pipe that nobody reads",
        "RUN001",
        run("loops.full_pipe", (1,)),
        does="hangs",
        says=("room in a pipe", "(sleep)"),
    ),
)

EARLY = (
    RunScene(
        "a lock in the first step of rank 1",
        "RUN001",
        run("progress.locked_at_first", (1,)),
        does="hangs",
    ),
    RunScene(
        "a breakpoint in the first step of rank 1",
        "RUN010",
        run("progress.debugged_at_first", (1,)),
        does="hangs",
        says=("stopped in the debugger",),
    ),
    RunScene(
        "rank 1 stopped in its first step",
        "RUN001",
        run("progress.stopped_at_first", (1,)),
        does="hangs",
        says=("is stopped",),
    ),
    RunScene(
        "rank 1 stopped in the set-up",
        "RUN001",
        run("progress.stopped_in_setup", (1,)),
        does="hangs",
        says=("is stopped",),
    ),
)

DEATHS = (
    RunScene("rank 1 killed", "RUN004", run("progress.killed", (1,)), does="fails"),
    RunScene("rank 0 killed", "RUN004", run("progress.killed", (0,), 3), does="fails"),
    RunScene("rank 1 killed, by torchrun", "RUN004", run("progress.killed", (1,), by="torchrun"), does="fails"),
    RunScene(
        "rank 1 killed, by the Trainer's launcher",
        "RUN004",
        run("progress.killed", (1,), by="trainer"),
        does="fails",
    ),
    RunScene(
        "an exception on rank 1",
        "RUN004",
        run("progress.raising", (1,), 3),
        does="fails",
        says=("11 in a task of 10",),
    ),
    RunScene("an exception on rank 0", "RUN004", run("progress.raising", (0,)), does="fails"),
    RunScene(
        "an exception on rank 1, forked by the Trainer",
        "RUN004",
        run("progress.raising", (1,), by="fork"),
        does="fails",
    ),
    RunScene("sys.exit(0) on rank 1", "RUN004", run("progress.exiting", (1,)), does="fails"),
    RunScene(
        "a row that a worker of rank 1 can't read",
        "RUN004",
        run("progress.raising_worker", (1,)),
        does="fails",
        says=("truncated image",),
    ),
    RunScene("a worker of rank 1 killed", "RUN004", run("progress.killed_worker", (1,)), does="fails"),
)

NUMBERS = (
    RunScene("the loss of rank 1 turns NaN", "RUN008", run("progress.turning_nan", (1,), 3)),
    RunScene("a parameter of rank 1 drifts", "RUN007", run("progress.drifting", (1,), 3)),
    RunScene("a layer more on rank 2", "RUN014", run("progress.wider", (2,), 3), does="fails"),
    RunScene(
        "rank 1 waits for its rows in each step",
        "RUN003",
        run("data.slow_loader_on_one", (1,)),
        severity="warning",
        also=("RUN005",),
    ),
    RunScene("rank 1 computes more in each step", "RUN003", run("progress.computing", (1,)), severity="warning"),
    RunScene(
        "rank 0 writes for 150 ms in every fourth step",
        "RUN003",
        run("loops.rare_saves", (0,), seconds=90.0),
        severity="warning",
        says=("in rare long steps",),
    ),
    RunScene(
        "a thread of rank 1 keeps the interpreter's lock for 2 of 8 s",
        "RUN003",
        run("loops.lock_taken", (1,), seconds=120.0),
        severity="warning",
        says=("interpreter lock",),
    ),
    RunScene(
        "a tenth of a CPU for rank 1",
        "RUN003",
        run("loops.quota", (1,), seconds=150.0),
        severity="warning",
        also=("HOST009", "HOST010", "RUN013"),
        says=("CPU quota (0.1 CPUs)",),
    ),
    RunScene("every rank waits for its rows", "RUN005", run("data.slow_loader", (0, 1)), severity="warning"),
)

HOSTS = (
    RunScene(
        "memory of the host leaks",
        "MEM009",
        run("host.leak", (0, 1), options={"every_n_steps": 10}, settings=FAR),
        of_host=True,
        severity="warning",
    ),
    RunScene(
        "memory of a data worker leaks",
        "MEM009",
        run("host.leak_in_a_worker", (0, 1), options={"every_n_steps": 10}, settings=FAR),
        of_host=True,
        severity="warning",
    ),
    RunScene(
        "checkpoints to a full file system",
        "HOST004",
        run("host.checkpoints", (0, 1), mount="full"),
        of_host=True,
        does="fails",
        before=True,
    ),
    RunScene(
        "checkpoints to a read-only file system",
        "HOST004",
        run("host.checkpoints", (0, 1), mount="read-only"),
        of_host=True,
        does="fails",
        before=True,
    ),
    RunScene(
        "checkpoints to where a file is",
        "HOST004",
        run("host.checkpoints", (0, 1), mount="file"),
        of_host=True,
        does="fails",
        before=True,
    ),
    RunScene(
        "a lock that a killed build left",
        "HOST008",
        run("host.stale_lock", (0, 1), options=dict(IMPATIENT)),
        of_host=True,
        does="hangs",
    ),
)

SCENES: tuple[RunScene, ...] = (
    *DATA,
    *COLLECTIVES,
    *LEAVES,
    *SETTINGS,
    *STOPS,
    *WAITS,
    *EARLY,
    *DEATHS,
    *NUMBERS,
    *HOSTS,
)

HEALTHY: dict[str, Run] = {
    "DDP and validation": run("healthy.plain"),
    "four ranks": run("healthy.plain", world=4),
    "by torchrun": run("healthy.plain", by="torchrun"),
    "by the Trainer's launcher": run("healthy.plain", by="trainer"),
    "spawned by the Trainer": run("healthy.plain", by="spawn"),
    "forked by the Trainer": run("healthy.plain", by="fork"),
    "a thousand small steps": run("healthy.small_steps"),
    "more batches on one rank, with an equal limit": run("healthy.limited"),
    "more batches on one rank, ended by max_steps": run("healthy.limited_by_steps"),
    "more batches of validation on one rank, no collective in them": run("healthy.uneven_validation"),
    "uneven but joined": run("healthy.joined"),
    "a first step of five seconds": run("healthy.long_first_step"),
    "validation a hundred times slower": run("healthy.slow_validation"),
    "a checkpoint of ten seconds": run("healthy.slow_checkpoint"),
    "gradient accumulation": run("healthy.accumulating"),
    "early stopping": run("healthy.stopping_early"),
    "streams of equal length": run("healthy.streaming"),
    "batch norm": run("healthy.norm", world=2),
    "manual optimization": run("healthy.manual"),
    "Lightning's demonstration": run("healthy.demo"),
    "Lightning's demonstration by hand": run("healthy.manual_demo"),
    "resumed from a checkpoint": run("healthy.resuming"),
    "two loaders of validation": run("healthy.two_validations"),
    "a combined loader": run("healthy.combined"),
    "validation within the epoch": run("healthy.validating_within"),
    "metrics with sync on all ranks": run("healthy.logging"),
    "prediction": run("healthy.predicting"),
    "test": run("healthy.testing"),
    "persistent workers and shuffling": run("healthy.persistent_workers"),
    "the other Lightning": run("healthy.other_lightning"),
    "a loop that all ranks leave early": run("loops.leaving_together"),
    "loaders of different lengths, started anew": run("loops.started_anew"),
    "clipping and a schedule on all ranks": run("loops.clipping_everywhere"),
    "rank 0 prepares for long": run("healthy.preparing", seconds=60.0),
    "no_sync in a plain loop": run("healthy.no_sync"),
    "a plain loop of three epochs": run("healthy.loop_with_epochs"),
    "a plain loop under DETAIL": run("healthy.loop_with_epochs", environ=dict(DETAIL)),
}
