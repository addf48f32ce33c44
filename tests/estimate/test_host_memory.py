from doctor.estimate.data_model import LoaderUse, MemoryBreakdown, TracedStep, TrainingPlan
from doctor.estimate.host_memory import PROCESS, WORKER, host_memory

MIB, GIB = 1 << 20, 1 << 30
TRACED = TracedStep(
    plan=TrainingPlan(),
    parts=MemoryBreakdown(),
    moment="backward",
    reserved=0,
    batch_size=8,
    parameter_count=1000,
    parameter_bytes=4 * GIB,
    trainable_count=1000,
    batch_bytes=48 * MIB,
)
LOADING = LoaderUse(workers=4, prefetch=3, dataset_bytes=10 * GIB, checkpoint_bytes=12 * GIB, pinned=True)
EIGHT = TrainingPlan(strategy="ddp", devices=8)


def test_all_ranks_of_a_node_count():
    host = host_memory(EIGHT, TRACED, LOADING, python=(3, 11))
    assert host.ranks == 8
    assert host.processes == 8 * (PROCESS + 4 * GIB)
    assert host.dataset == 80 * GIB
    assert host.workers == 8 * (4 * WORKER + 12 * 48 * MIB)
    assert host.checkpoint == 96 * GIB
    assert host.pinned == 8 * GIB  # twelve batches of 48 MiB, rounded up to a power of two
    assert host.total == host.processes + host.dataset + host.workers + host.checkpoint + host.pinned
    assert "up to 320 GiB more" in " ".join(host.notes)


def test_workers_that_are_no_forks_hold_a_copy_each():
    forked = host_memory(EIGHT, TRACED, LOADING, python=(3, 13))
    pickled = host_memory(EIGHT, TRACED, LOADING, python=(3, 14))
    assert pickled.workers - forked.workers == 8 * 4 * 10 * GIB
    assert "gets a copy" in " ".join(pickled.notes)


def test_ranks_that_share_devices_are_ranks_of_the_node():
    two = TrainingPlan(strategy="ddp", devices=2, nodes=4, ranks_per_device=3)
    assert host_memory(two, TRACED, LOADING, python=(3, 11)).ranks == 6


def test_sharded_checkpoints_are_loaded_in_parts():
    plan = TrainingPlan(strategy="fsdp2", devices=8, nodes=2)
    assert host_memory(plan, TRACED, LOADING, python=(3, 11)).checkpoint == 8 * (12 * GIB // 16)


def test_what_is_not_known_is_said():
    host = host_memory(EIGHT, TRACED, LoaderUse())
    assert host.dataset == host.pinned == host.checkpoint == host.workers == 0
    assert "returned no data loader" in " ".join(host.notes)
    counted = host_memory(EIGHT, TRACED, LoaderUse(workers=0))
    assert "is unknown" in " ".join(counted.notes)


def test_a_small_data_set_is_not_worth_a_note():
    assert host_memory(EIGHT, TRACED, LoaderUse(workers=2, dataset_bytes=MIB), python=(3, 11)).notes == ()
