"""The caching allocator's rules, and what a ledger says of a step."""

from doctor.estimate.memory.caching_allocator import MIB, CachingAllocator, peak_reserved, rounded, segment_size
from doctor.estimate.tracing.ledger import AllocationLedger


def reserved(*sizes):
    return peak_reserved(range(len(sizes)), list(sizes))


def test_sizes_of_blocks_and_segments():
    assert [rounded(size) for size in (1, 512, 513)] == [512, 512, 1024]
    assert segment_size(512) == segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(10 * MIB + 512) == 12 * MIB


def test_small_blocks_share_a_segment():
    assert reserved(*[512] * 4096) == 2 * MIB
    assert reserved(*[512] * 4097) == 4 * MIB


def test_large_blocks_share_a_segment_of_twenty():
    assert reserved(*[5 * MIB] * 4) == 20 * MIB
    assert reserved(*[5 * MIB] * 5) == 40 * MIB


def test_a_freed_block_is_taken_again_and_split():
    # 40 MiB freed, then 30: the rest of 10 MiB is a block of its own and holds 9.
    assert peak_reserved([0, ~0, 1, 2], [40 * MIB, 30 * MIB, 9 * MIB]) == 40 * MIB


def test_a_rest_of_up_to_one_mib_is_not_split_off():
    assert (
        peak_reserved([0, ~0, 1, 2], [40 * MIB, 39 * MIB, MIB]) == 40 * MIB + 2 * MIB
    )  # the small one in its own pool
    assert peak_reserved([0, ~0, 1, 2], [40 * MIB, 39 * MIB, MIB + 512]) == 60 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    # 40 and 20 MiB are free; 20 takes the 20, so that 40 still finds a place.
    assert peak_reserved([0, 1, ~0, ~1, 2, 3], [40 * MIB, 20 * MIB, 20 * MIB, 40 * MIB]) == 60 * MIB


def test_free_neighbours_become_one():
    sizes = [5 * MIB] * 4 + [19 * MIB - 512]
    assert peak_reserved([0, 1, 2, 3, ~1, ~2, ~0, ~3, 4], sizes) == 20 * MIB
    sizes[4] = 9 * MIB
    assert peak_reserved([0, 1, 2, 3, ~1, ~2, 4], sizes) == 20 * MIB  # two of 5 became one of 10
    assert peak_reserved([0, 1, 2, 3, ~0, ~2, 4], sizes) == 40 * MIB  # two of 5 that are apart did not


def test_of_equal_blocks_that_of_the_newest_segment_is_taken():
    # Two of 20 MiB are free. 12 MiB split the newer; when the rest of 8 is taken, the older still holds 20.
    sizes = [20 * MIB, 20 * MIB, 12 * MIB]
    allocator = CachingAllocator()
    for key in (0, 1, ~0, ~1, 2):
        allocator.allocate(key, sizes[key]) if key >= 0 else allocator.free(~key)
    taken, newest = allocator._taken[2][0].address, allocator._lowest_address
    assert taken == newest


def test_each_stream_has_blocks_of_its_own():
    sizes = [20 * MIB] * 3
    assert peak_reserved([0, ~0, 1, ~1, 2], sizes) == 20 * MIB
    assert peak_reserved([0, ~0, 1, ~1, 2], sizes, {1: 1}) == 40 * MIB


def test_what_was_never_taken_is_freed_without_harm():
    allocator = CachingAllocator()
    allocator.allocate(0, 0)
    allocator.free(0)
    assert allocator.reserved == 0


def test_the_peak_is_split_by_what_things_turned_out_to_be():
    ledger = AllocationLedger()
    weights = ledger.allocate(1000 * 512, "parameters")
    ledger.enter("forward")
    passing = ledger.allocate(512, "activations")
    kept = ledger.allocate(100 * 512, "activations")
    ledger.free(passing)
    ledger.enter("backward")
    made = ledger.allocate(50 * 512, "temporary")
    ledger.mark(made, "gradients")
    ledger.free(kept)
    ledger.enter("optimizer step")
    ledger.allocate(512, "optimizer")
    parts, moment = ledger.peak()
    assert moment == "backward"
    assert (parts.parameters, parts.activations, parts.gradients) == (1000 * 512, 100 * 512, 50 * 512)
    assert parts.total == 1150 * 512
    assert ledger.kinds[passing] == "temporary"
    assert ledger.kinds[weights] == "parameters"


def test_a_peak_is_counted_in_blocks():
    ledger = AllocationLedger()
    ledger.allocate(1, "parameters")
    ledger.allocate(0, "parameters")
    assert ledger.peak()[0].total == 512
