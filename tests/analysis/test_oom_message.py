"""What an allocator that found no room says is read in every wording, and its numbers decide the cause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.analysis.logs.oom_message import OomMessage, cause_of, parse_oom
from tests.lab.cases import each_case

GIB, MIB = 1 << 30, 1 << 20

CACHED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.72 GiB (GPU 1; 10.76 GiB total capacity; "
    "4.01 GiB already allocated; 356.00 MiB free; 5.54 GiB cached)"
)
IN_TOTAL = (
    "RuntimeError: CUDA out of memory. Tried to allocate 376.00 MiB (GPU 0; 3.95 GiB total capacity; 1.72 GiB already "
    "allocated; 354.88 MiB free; 2.46 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory"
)
SINCE_2_1 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 2 has a total capacity of 11.92 GiB "
    "of which 65.44 MiB is free. Process 77 has 400.00 MiB memory in use. Including non-PyTorch memory, this process "
    "has 11.40 GiB memory in use. Of the allocated memory 11.04 GiB is allocated by PyTorch, with 8.00 MiB allocated "
    "in private pools (e.g., CUDA Graphs), and 1.59 MiB is reserved by PyTorch but unallocated. If reserved but"
)


def newer(wanted, total, free, *, processes="", own="", allocated="1.00 GiB", unallocated="0 bytes", device="0"):
    """A message of torch 2.1 or newer, in its own words."""
    own = f"Including non-PyTorch memory, this process has {own} memory in use. " if own else ""
    return (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU {device} has a total capacity of {total} of which {free} "
        f"is free. {processes}{own}Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    )


def held(*processes):
    return "".join(f"Process {pid} has {size} memory in use. " for pid, size in processes)


def test_what_was_cached_before_1_4_is_not_allocated():
    read = parse_oom(CACHED)
    assert (read.device, read.wanted, read.total) == (1, int(1.72 * GIB), int(10.76 * GIB))
    assert (read.allocated, read.reserved_unallocated) == (int(4.01 * GIB), int(5.54 * GIB))
    assert (read.free, read.in_use_by_process) == (356 * MIB, None)


def test_what_is_reserved_in_total_holds_what_is_allocated():
    read = parse_oom(IN_TOTAL)
    assert read.reserved == int(2.46 * GIB)
    assert read.reserved_unallocated == int(2.46 * GIB) - int(1.72 * GIB)
    # 3.95 - 0.35 - 2.46 GiB, less a context.
    assert read.other_bytes == pytest.approx(0.36 * GIB, abs=0.03 * GIB)


def test_all_numbers_of_newer_messages():
    read = parse_oom(SINCE_2_1)
    assert read.others == ((77, 400 * MIB),)
    assert read.other_bytes == 400 * MIB
    assert read.in_use_by_process == int(11.40 * GIB)
    assert (read.in_private_pools, read.device) == (8 * MIB, 2)


def test_a_message_that_is_broken_over_lines():
    broken = SINCE_2_1.replace("Tried to", "Tried\n  to").replace(" GiB", "\nGiB").replace("memory in", "memory\nin")
    assert parse_oom(broken) == parse_oom(SINCE_2_1)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: out of memory",
        "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "RuntimeError: cuda runtime error (2) : out of memory at /opt/x/aten/src/THC/generic/THCStorage.cu:58",
        "RuntimeError: HIP error: out of memory",
        "CUDA driver error: out of memory",
        "node01:1:2 [0] include/alloc.h:100 NCCL WARN Failed to CUDA calloc async 4096 bytes",
        "node01:1:2 [0] include/alloc.h:400 NCCL WARN Cuda failure 2 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_message_without_numbers(text):
    assert parse_oom(text) == OomMessage()
    assert cause_of(parse_oom(text)) == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        "everything is well",
        "Out of memory: Killed process 4321 (python) total-vm:104857600kB, anon-rss:98765432kB",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: you tried",
    ],
)
def test_memory_of_the_host_is_another_matter(text):
    assert parse_oom(text) is None


def test_other_devices_speak_alike():
    xpu = (
        "XPU out of memory. Tried to allocate 192.00 MiB. GPU 3 has a total capacity of 31.89 GiB of which 13.22 GiB "
        "is free."
    )
    assert parse_oom(xpu).device == 3
    npu = (
        "RuntimeError: NPU out of memory. Tried to allocate 31.67 GiB (NPU 5; 32.00 GiB total capacity; 6.30 GiB "
        "already allocated; 6.30 GiB current active; 24.39 GiB free; 6.55 GiB reserved in total by PyTorch)"
    )
    assert (parse_oom(npu).device, cause_of(parse_oom(npu))) == (5, "demand")
    mps = (
        "MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: 18.13 GB). "
        "Tried to allocate 192.00 MB on private pool."
    )
    assert parse_oom(mps).allowed == int(18.13 * GIB)


def test_a_device_whose_number_is_no_text():
    """torch 2.3 wrote it as a character."""
    read = parse_oom(newer("224.00 MiB", "44.34 GiB", "160.81 MiB", device="\x03"))
    assert (read.device, read.total) == (None, int(44.34 * GIB))


def test_in_a_container_its_own_process_is_not_somebody_else():
    read = parse_oom(
        newer("200.00 MiB", "47.53 GiB", "896.00 KiB", processes=held((3814292, "47.50 GiB")), allocated="47.14 GiB")
    )
    assert read.others == ()
    assert read.in_use_by_process == int(47.5 * GIB)
    assert cause_of(read) == "demand"


def test_in_a_container_with_somebody_else():
    read = parse_oom(
        newer(
            "20.00 MiB",
            "79.15 GiB",
            "10.12 MiB",
            processes=held((4242, "40.01 GiB"), (4243, "39.10 GiB")),
            allocated="38.44 GiB",
            unallocated="100.00 MiB",
        )
    )
    assert [pid for pid, _ in read.others] == [4242]
    assert cause_of(read) == "others"


CAUSES = {
    "it never fits": ("demand", newer("91.00 GiB", "79.15 GiB", "60.00 GiB", own="18.00 GiB", allocated="17.00 GiB")),
    "it holds all but a little": (
        "demand",
        newer("42.00 MiB", "23.65 GiB", "11.06 MiB", own="23.60 GiB", allocated="22.90 GiB", unallocated="194.87 MiB"),
    ),
    "together it is too much": (
        "demand",
        newer("22.78 GiB", "31.47 GiB", "12.73 GiB", own="18.73 GiB", allocated="9.08 GiB", unallocated="9.35 GiB"),
    ),
    "the last crumbs are free": (
        "demand",
        newer("252.00 MiB", "79.19 GiB", "259.06 MiB", own="78.90 GiB", allocated="76.00 GiB", unallocated="90.00 MiB"),
    ),
    "a desktop beside it": (
        "demand",
        newer(
            "122.00 MiB",
            "23.69 GiB",
            "9.92 MiB",
            processes=held((900, "256.00 MiB"), (901, "60.00 MiB")),
            own="23.30 GiB",
            allocated="22.80 GiB",
            unallocated="40.00 MiB",
        ),
    ),
    "buffers of libraries beside it": (
        "demand",
        newer("512.00 MiB", "79.15 GiB", "90.00 MiB", own="79.00 GiB", allocated="70.00 GiB", unallocated="1.10 GiB"),
    ),
    "enough in pieces": (
        "fragmented",
        newer("8.06 GiB", "23.65 GiB", "1.66 GiB", own="20.81 GiB", allocated="12.09 GiB", unallocated="8.65 GiB"),
    ),
    "enough in pieces, several times over": (
        "fragmented",
        newer("1.97 GiB", "79.10 GiB", "190.00 MiB", own="78.80 GiB", allocated="69.26 GiB", unallocated="7.07 GiB"),
    ),
    "just enough, in a device that is full": (
        "demand",
        newer("1.25 GiB", "95.09 GiB", "1.11 GiB", own="93.96 GiB", allocated="89.93 GiB", unallocated="3.53 GiB"),
    ),
    "little more in pieces than was wanted": (
        "demand",
        newer("1.12 GiB", "19.98 GiB", "32.00 MiB", own="19.90 GiB", allocated="18.09 GiB", unallocated="1.43 GiB"),
    ),
    "as much in pieces as was wanted": (
        "demand",
        "CUDA out of memory. Tried to allocate 2.81 GiB (GPU 0; 23.69 GiB total capacity; 16.12 GiB already allocated; "
        "374.94 MiB free; 19.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try "
        "setting max_split_size_mb to avoid fragmentation.",
    ),
    "a third more in pieces than was wanted": (
        "fragmented",
        newer("1.70 GiB", "6.00 GiB", "0 bytes", own="5.23 GiB", allocated="2.93 GiB", unallocated="2.30 GiB"),
    ),
    "remainders of segments on a small device": (
        "demand",
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 5.80 GiB total capacity; 4.36 GiB already allocated; "
        "6.69 MiB free; 4.63 GiB reserved in total by PyTorch)",
    ),
    "enough in pieces, older": (
        "fragmented",
        "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 8.00 GiB total capacity; 203.44 MiB already allocated; "
        "0 bytes free; 6.44 GiB reserved in total by PyTorch)",
    ),
    "somebody else": (
        "others",
        newer(
            "454.00 MiB",
            "7.66 GiB",
            "269.25 MiB",
            processes=held((2157851, "5.39 GiB")),
            own="1.13 GiB",
            allocated="955.86 MiB",
            unallocated="14.14 MiB",
        ),
    ),
    "somebody whom nobody names": (
        "others",
        "CUDA out of memory. Tried to allocate 984.00 MiB (GPU 0; 47.50 GiB total capacity; 22.15 GiB already "
        "allocated; 68.88 MiB free; 22.16 GiB reserved in total by PyTorch)",
    ),
    "somebody else, and less of it in pieces": (
        "others",
        newer(
            "1.00 GiB",
            "79.15 GiB",
            "90.00 MiB",
            processes=held((5, "40.00 GiB")),
            own="38.00 GiB",
            allocated="32.00 GiB",
            unallocated="5.00 GiB",
        ),
    ),
    "contexts of seven ranks": (
        "skew",
        newer(
            "1.00 GiB",
            "79.15 GiB",
            "90.00 MiB",
            processes=held(*((100 + rank, f"51{rank}.00 MiB") for rank in range(1, 8))),
            own="75.40 GiB",
            allocated="73.00 GiB",
            unallocated="300.00 MiB",
        ),
    ),
    "a share that was set": (
        "limit",
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which 244.64 GiB "
        "is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB "
        "allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.",
    ),
    "of the driver's own allocator": (
        "demand",
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 22.00 GiB\nRequested               : 2.00 GiB\nDevice limit            : 23.64 GiB\n"
        "Free (according to CUDA): 18.88 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB",
    ),
    "others, at the start of a server": (
        "others",
        "ValueError: Free memory on device cuda:0 (10.1/79.2 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.2 GiB).",
    ),
    "free, and refused": (
        "unknown",
        newer("2.00 GiB", "4.00 GiB", "2.80 GiB", allocated="0 bytes"),
    ),
    "cut short": ("unknown", "CUDA out of memory. Tried to allocate 2.00 GiB"),
}


@each_case("name", CAUSES)
def test_the_numbers_decide(name):
    cause, text = CAUSES[name]
    assert cause_of(parse_oom(text)) == cause


def test_ranks_are_known_by_their_ids():
    text = newer(
        "1.00 GiB", "79.15 GiB", "90.00 MiB", processes=held((5, "9.00 GiB")), own="69.00 GiB", allocated="67.00 GiB"
    )
    assert cause_of(parse_oom(text)) == "others"
    assert cause_of(parse_oom(text), peers={4, 5}) == "skew"
    assert cause_of(parse_oom(text), peers={4}) == "others"


@given(st.text(max_size=200), st.integers(0, len(SINCE_2_1)), st.sampled_from([CACHED, IN_TOTAL, SINCE_2_1]))
def test_any_text_can_be_read(junk, place, text):
    for said in (junk, text[:place] + junk + text[place:], text[:place], "CUDA out of memory" + junk):
        read = parse_oom(said)
        assert read is None or cause_of(read)
