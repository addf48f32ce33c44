"""Memory snapshots of torch's allocator are read without torch, down to the user's line that holds most."""

import io
import pickle
import re

import pytest

from doctor.core.errors import UnusableError
from doctor.core.files.safe_pickle import load_plain
from doctor.postmortem.memory_snapshot import snapshot_parser
from doctor.postmortem.memory_snapshot.snapshot_parser import (
    load_snapshot,
    looks_like_snapshot,
    parse_snapshot,
    read_snapshot,
)
from tests.postmortem.allocating import ALLOCATOR, ENGINE, MIB, TORCH, Allocator, line, training


def written(snapshot, tmp_path, name="dump_snapshot.pickle", protocol=4):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return path


@pytest.fixture(scope="module")
def after_training():
    return training().snapshot()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_snapshot_is_known_by_its_content(after_training, protocol):
    whole, segments = (pickle.dumps(one, protocol) for one in (after_training, after_training["segments"]))
    assert looks_like_snapshot(whole[: 1 << 16])
    assert looks_like_snapshot(segments[: 1 << 16])
    assert not looks_like_snapshot(pickle.dumps({"entries": [], "version": "2.10"}, protocol))
    assert not looks_like_snapshot(b"segments total_size segment_type allocated_size")
    assert not looks_like_snapshot(b"")


def test_torch_itself_reads_the_samples_and_finds_the_same_sums(after_training):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    facts = parse_snapshot(after_training)
    told = viz.segsum(after_training)
    assert f"total_reserved: {viz.Bytes(facts.reserved)}\n" in told
    assert f"total_allocated: {viz.Bytes(facts.allocated)}\n" in told
    # Its free memory counts what rounding wasted, of which the samples have none.
    assert re.search(f"total_free: {viz.Bytes(facts.reserved - facts.allocated)}", told)
    assert viz.trace(after_training).count(" = ") == sum(
        entry["action"] in ("alloc", "segment_alloc") for entry in after_training["device_traces"][0]
    )


def test_the_users_lines_that_hold_most(after_training, tmp_path):
    facts = read_snapshot(written(after_training, tmp_path))
    held = [(one.frame.file, one.frame.line, one.size // MIB, one.blocks, one.part) for one in facts.holders]
    assert held == [
        ("/home/me/train.py", 61, 400, 8, "optimizer"),
        ("/home/me/model.py", 12, 200, 4, "forward"),
        ("/home/me/train.py", 55, 20, 20, None),
    ]
    assert all(one.frame.user for one in facts.holders)
    assert dict(facts.parts) == {"optimizer": 400 * MIB, "forward": 200 * MIB}
    assert facts.path == "dump_snapshot.pickle"


def test_what_grows_is_told_from_what_came_at_once(after_training):
    by_line = {one.frame.line: one.spread for one in parse_snapshot(after_training).growth}
    assert by_line[55] >= 0.9
    assert by_line[61] <= 0.2
    assert by_line[12] <= 0.2


def test_a_run_that_leaks_nothing_has_no_growth_that_is_steady():
    grown = parse_snapshot(training(leak=0).snapshot()).growth
    assert [one for one in grown if one.spread > 0.2] == []


def test_an_allocation_that_failed():
    facts = parse_snapshot(training(total=700 * MIB, leak=0).snapshot())
    refused = facts.refused[0]
    assert refused.size == 50 * MIB
    assert refused.device_free < 50 * MIB
    assert (refused.frame.file, refused.frame.line) == ("/home/me/train.py", 61)
    assert refused.at == pytest.approx(1_790_000_000, rel=1e-3)
    assert facts.seconds > 0


def test_memory_in_pieces():
    """Every second block is free: nothing can be given back, and nothing large fits."""
    allocator = Allocator()
    addresses = [allocator.alloc(10 * MIB, ALLOCATOR, line("/home/me/a.py", 3, "f")) for _ in range(20)]
    for address in addresses[::2]:
        allocator.free(address)
    (device,) = parse_snapshot(allocator.snapshot()).devices
    assert (device.reserved, device.allocated) == (200 * MIB, 100 * MIB)
    assert (device.unallocated, device.split) == (100 * MIB, 100 * MIB)


def test_a_cache_that_can_be_given_back_is_not_split():
    allocator = Allocator()
    for address in [allocator.alloc(20 * MIB, ALLOCATOR) for _ in range(5)]:
        allocator.free(address)
    (device,) = parse_snapshot(allocator.snapshot()).devices
    assert (device.unallocated, device.split) == (100 * MIB, 0)


def test_two_devices_of_one_process():
    own, first = training(device=1).snapshot(), Allocator()
    first.alloc(2 * MIB, ALLOCATOR, line("/home/me/load.py", 7, "restore"))
    own["segments"] = own["segments"] + first.snapshot()["segments"]
    facts = parse_snapshot(own)
    assert [device.index for device in facts.devices] == [0, 1]
    assert facts.devices[0].allocated == 2 * MIB


def test_memory_for_graphs_is_told_apart():
    allocator = Allocator()
    allocator.alloc(20 * MIB, ALLOCATOR, pool=(0, 1))
    allocator.alloc(20 * MIB, ALLOCATOR)
    (device,) = parse_snapshot(allocator.snapshot()).devices
    assert device.reserved == 40 * MIB


def test_stacks_without_the_user_are_counted():
    """Gradients are allocated by a thread of C++; cells of a notebook are the user's, what torch compiled is not."""
    allocator = Allocator()
    allocator.alloc(1 * MIB, ALLOCATOR, ENGINE)
    allocator.alloc(2 * MIB)
    allocator.alloc(4 * MIB, line("/tmp/torchinductor_me/ab/cabc.py", 9, "call"), line(f"{TORCH}/x.py", 1, "f"))
    allocator.alloc(8 * MIB, line("<eval_with_key>.3", 9, "forward"), line("<ipython-input-4-0a>", 2, "<module>"))
    facts = parse_snapshot(allocator.snapshot())
    assert [(one.frame.file, one.size) for one in facts.holders] == [("<ipython-input-4-0a>", 8 * MIB)]
    assert dict(facts.parts)["backward"] == MIB


def test_older_forms():
    """A bare list before torch 2.0; blocks with a history, newest first."""
    block = {"size": 3 * MIB, "state": "active_allocated"}
    frames = [line("/home/me/old.py", 5, "f")]
    history = {**block, "history": [{"addr": 1, "real_size": 2 * MIB, "frames": frames}]}
    segment = {"device": 0, "address": 1, "total_size": 8 * MIB, "stream": 0, "segment_type": "large"}
    free = {"size": 2 * MIB, "state": "inactive"}
    facts = parse_snapshot([{**segment, "allocated_size": 6 * MIB, "blocks": [block, history, free]}])
    assert facts.holders[0].frame.file == "/home/me/old.py"
    assert facts.devices[0].split == 2 * MIB


def test_settings(after_training):
    facts = parse_snapshot(training(steps=1).snapshot("max_split_size_mb:64"))
    assert facts.settings == "max_split_size_mb:64"


class Hostile:
    def __reduce__(self):
        return (print, ("it ran",))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_snapshot_is_named_and_nothing_runs(tmp_path, capsys, protocol):
    path = written({"segments": [Hostile()]}, tmp_path, protocol=protocol)
    with pytest.raises(UnusableError, match=r"wants to import (builtins|__builtin__)\.print; nothing was run"):
        read_snapshot(path)
    assert capsys.readouterr().out == ""


def test_a_snapshot_that_is_cut_short(after_training, tmp_path):
    path = written(after_training, tmp_path)
    whole = path.read_bytes()
    for end in (0, 1, 2, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(UnusableError, match="cut short or garbled"):
            load_snapshot(path)


def test_what_is_no_snapshot(tmp_path):
    for other in ({"entries": []}, {"segments": 3}, 7, "text", None, (1, 2)):
        with pytest.raises(UnusableError, match="no memory snapshot"):
            load_snapshot(written(other, tmp_path))
    with pytest.raises(UnusableError, match="can't be read"):
        read_snapshot(tmp_path / "nothing")


def nested(depth):
    """A pickle of few bytes: pairs of pairs, which hold one another twice, as the key of a dictionary."""
    return b"\x80\x04}" + b")" + b"2\x86" * depth + b"N" + b"s."


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x02}X\x08\x00\x00\x00segments]r\xff\xff\xff\x7f.", "more memory than there is"),
        (nested(60), "within 1 seconds"),
        (
            b"\x80\x04}" + b")" + b"\x85" * 2_000_000 + b"Ns.",
            "ended with|garbled|no memory snapshot|no segments",
        ),
    ],
    ids=["memory", "time", "depth"],
)
def test_a_few_bytes_that_ask_for_everything(tmp_path, monkeypatch, data, why):
    if why.startswith("within"):
        monkeypatch.setattr(snapshot_parser, "PATIENCE", 1.0)
    path = tmp_path / "dump_snapshot.pickle"
    path.write_bytes(data)
    with pytest.raises(UnusableError, match=why):
        read_snapshot(path)


def test_a_pickle_that_is_too_large():
    data = pickle.dumps(list(range(1000)))
    assert load_plain(data, limit=len(data)) == load_plain(io.BytesIO(data), limit=len(data)) == list(range(1000))
    for source in (data, io.BytesIO(data)):
        with pytest.raises(UnusableError, match="more than"):
            load_plain(source, limit=len(data) - 1)
