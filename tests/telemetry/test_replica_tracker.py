"""Replicas: real ones over Gloo that are equal and then differ by one bit, and what the looks leave untouched."""

import gc
import math
import os
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from doctor.collectors.base import NotPresent
from doctor.core.facts import Checksum, ModelFacts, NonFinite, ReplicaFacts, Variable
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.telemetry.replica import checksum as checksum_module
from doctor.monitor.telemetry.replica.checksum import ParameterChunks, bit_sum, byte_sum, digest
from doctor.monitor.telemetry.replica.loss_tracker import TOGETHER, LossTracker
from doctor.monitor.telemetry.replica.readback import SLOTS, WIDTH, Readback
from doctor.monitor.telemetry.replica.replica_tracker import ReplicaTracker
from doctor.monitor.telemetry.replica.sample_history import KEPT, LEVELS, SampleHistory
from doctor.monitor.telemetry.replica.step_settings import REDUCTIONS
from tests.lab.speed import patience

torch = pytest.importorskip("torch")
nn = torch.nn
descend = pytest.importorskip("tests.telemetry.replica_ranks").descend

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("replica_ranks.py")


# Two real ranks.


class Seen(msgspec.Struct):
    """What a rank of the program wrote."""

    model: ModelFacts
    replica: ReplicaFacts
    means: list[float]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What ranks 0 and 1 saw: of a healthy run, of one in which they come apart, of models in pieces."""
    folder = tmp_path_factory.mktemp("ranks")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, PROGRAM, folder], cwd=ROOT, env=environ, timeout=patience(100), check=True)
    ranks = [msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=list[Seen]) for rank in (0, 1)]
    return list(zip(*ranks, strict=True))


def test_real_replicas_are_equal(runs):
    one, two = runs[0]
    assert one.means != two.means, "healthy ranks differ in what batch normalisation counts for itself"
    assert one.model == two.model
    assert one.model.initial
    assert one.replica == two.replica
    assert [checksum.step for checksum in one.replica.checksums] == [5, 10, 15, 20, 25, 30]
    assert len({checksum.value for checksum in one.replica.checksums} | {one.model.initial}) == 7
    assert (one.replica.losses, one.replica.non_finite) == (30, ())


def test_one_bit_that_differs_on_a_real_replica_is_seen_from_then_on(runs):
    one, two = runs[1]
    pairs = zip(one.replica.checksums, two.replica.checksums, strict=True)
    assert one.model == two.model
    assert [first == second for first, second in pairs] == [True, True, False, False, False, False]


def test_real_pieces_of_a_model_are_not_compared(runs):
    for one, two in runs[2:]:
        for seen in (one, two):
            assert seen.model.replicated is False
            assert (seen.model.initial, seen.replica.checksums) == (None, ())
        assert one.model.digest == two.model.digest, "though ranks may hold pieces of different shapes"
    assert any(one.model.tensors != two.model.tensors for one, two in runs[2:])


# What a look leaves as it was.


def _net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))


def _train(net, replica, batches=20):
    for batch in range(1, batches + 1):
        loss = net(torch.randn(4, 8)).square().mean()
        loss.backward()
        descend(net)
        if replica is not None:
            replica.loss(batch, loss)
            replica.batch_end(batch)
    return torch.get_rng_state(), [one.clone() for one in net.state_dict().values()]


def test_a_run_is_the_same_bit_by_bit_with_and_without():
    replica = ReplicaTracker(1)
    bare, watched = _net(), _net()
    replica.attach(watched, replicated=True, broadcast=None)
    torch.manual_seed(5)
    random_bare, values_bare = _train(bare, None)
    torch.manual_seed(5)
    random_watched, values_watched = _train(watched, replica)
    assert torch.equal(random_bare, random_watched)
    assert all(torch.equal(one, two) for one, two in zip(values_bare, values_watched, strict=True))
    assert len(replica.facts().checksums) == KEPT


def test_a_look_changes_no_tensor():
    net = _net()
    net[0].weight.requires_grad_(False)
    net(torch.randn(4, 8)).sum().backward()

    def state():
        return [
            (one._version, one.requires_grad, one.grad_fn, one.data_ptr(), one.grad is None, one.is_leaf)
            for one in net.parameters()
        ]

    before = state()
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=None, broadcast=None)
    replica.loss(1, torch.tensor(math.nan))
    replica.batch_end(1)
    assert state() == before
    assert replica.facts().checksums


def test_the_model_is_not_kept_alive():
    net = _net()
    alive = weakref.ref(net)
    weight = weakref.ref(net[0].weight)
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=True, broadcast=True)
    replica.batch_end(1)
    del net
    gc.collect()
    assert (alive(), weight()) == (None, None)
    replica.batch_end(2)
    assert len(replica.facts().checksums) == 1


# Checksums.

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def _byte_sum(values):
    return byte_sum(values, 0, len(values) if values.dim() else 1)


def _bit_sum(values):
    return bit_sum(values).item()


SUMS = [_byte_sum, _bit_sum]


@pytest.mark.parametrize("sum_of", SUMS)
@pytest.mark.parametrize("kind", [*KINDS, torch.complex128, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 7), (2, 3, 5, 4)])
def test_a_sum_depends_on_the_values_and_not_on_where_they_lie(kind, shape, sum_of):
    torch.manual_seed(1)
    values = (torch.rand(shape, dtype=torch.float64) * 100).to(kind)
    want = sum_of(values.reshape(shape or 1))
    spread = torch.zeros((values.numel() + 1) * 2, dtype=kind)
    spread[1:-1:2] = values.reshape(-1)
    shifted = torch.zeros(values.numel() + 1, dtype=kind)
    shifted[1:] = values.reshape(-1)
    assert sum_of(spread[1:-1:2].view(shape or 1)) == want
    assert sum_of(shifted[1:].view(shape or 1)) == want
    if len(shape) == 4:
        assert sum_of(values.to(memory_format=torch.channels_last)) == want


@pytest.mark.parametrize("sum_of", SUMS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.complex64])
def test_every_bit_counts(kind, sum_of):
    torch.manual_seed(2)
    values = torch.randint(0, 256, (24,), dtype=torch.uint8)
    want = sum_of(values.view(kind))
    for bit in range(24 * 8):
        flipped = values.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        assert sum_of(flipped.view(kind)) != want


@pytest.mark.parametrize("sum_of", SUMS)
def test_nan_is_compared_by_its_bits(sum_of):
    assert sum_of(torch.tensor([math.nan, 1.0])) == sum_of(torch.tensor([math.nan, 1.0]))
    assert sum_of(torch.tensor([0.0, 1.0])) != sum_of(torch.tensor([-0.0, 1.0]))


def test_memory_that_was_taken_away_is_not_read():
    net = nn.Linear(64, 64)
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=True, broadcast=True)
    size = net.weight.untyped_storage().nbytes()
    net.weight.untyped_storage().resize_(0)
    replica.batch_end(1)
    net.weight.untyped_storage().resize_(size)
    replica.batch_end(2)
    assert len({checksum.value for checksum in replica.facts().checksums}) == 2


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setitem(checksum_module.MOST_BYTES, "cpu", 64)


def test_a_large_model_is_looked_at_by_turns_and_no_element_is_left_out(small_parts):
    net = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3, bias=False), nn.LayerNorm(3))
    parts = ParameterChunks(net)
    count = len(parts.all)
    assert count > 10
    before = [digest(int(one) for one in parts.sums(look)[1]) for look in range(count)]
    assert [parts.sums(look)[0] for look in range(count)] == [part.label for part in parts.all]
    for parameter in net.parameters():
        flat = parameter.detach().view(-1)
        for element in range(flat.numel()):
            kept = flat[element].clone()
            flat[element] += 1
            changed = [digest(int(one) for one in parts.sums(look)[1]) != before[look] for look in range(count)]
            assert changed.count(True) == 1
            flat[element] = kept


def test_a_look_is_bounded_in_bytes_and_sums(small_parts):
    net = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(200)] + [nn.Parameter(torch.zeros(9, 100))])
    parts = ParameterChunks(net)
    for part in parts.all:
        assert len(part.pieces) <= checksum_module.MOST_PIECES
        sizes = [(piece.end - piece.first) * 4 * math.prod(piece.shape[1:]) for piece in part.pieces]
        assert sum(sizes) <= 64 or len(sizes) == 1, "a single row is not cut"


def test_parts_are_named_the_same_on_all_ranks(small_parts):
    one, two = ParameterChunks(_net()), ParameterChunks(_net())
    assert [part.label for part in one.all] == [part.label for part in two.all]
    assert one.all[0].label.endswith(f"(1 of {len(one.all)})")
    assert [part.label for part in ParameterChunks(nn.Linear(2, 2)).all] == ["all"]


def test_parameters_that_were_replaced_are_followed():
    net = _net()
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=True, broadcast=True)
    replica.batch_end(1)
    net[0] = nn.Linear(8, 16)
    gc.collect()
    replica.batch_end(2)
    net[3].weight = nn.Parameter(torch.zeros(5, 16))
    replica.batch_end(3)
    replica.batch_end(4)
    values = [checksum.value for checksum in replica.facts().checksums]
    assert len(values) == 4
    assert len(set(values)) == 3


def test_what_distributed_data_parallel_ignores_is_not_compared():
    net = _net()
    net._ddp_params_and_buffers_to_ignore = {"0.weight"}
    names = [piece.name for part in ParameterChunks(net).all for piece in part.pieces]
    assert names == ["0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("replicated", [True, None])
def test_pieces_of_parameters_are_not_compared(replicated):
    net = _net()
    net[0].weight.ds_id = 0  # as DeepSpeed ZeRO-3 marks what it parted
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=replicated, broadcast=None)
    replica.batch_end(1)
    assert replica.model().replicated is False
    assert replica.model().initial is None
    assert replica.facts().checksums == ()


def test_lazy_and_meta_parameters_are_left_out_until_they_are_real():
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2, device="meta"), nn.Linear(4, 2))
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=True, broadcast=None)
    assert [shape.type for shape in replica.model().tensors[:2]] == ["uninitialized", "uninitialized"]
    assert replica.model().parameters == 20
    assert {piece.name for part in ParameterChunks(net).all for piece in part.pieces} == {"2.weight", "2.bias"}
    nn.Sequential(net[0])(torch.zeros(1, 3))
    assert {piece.name for part in ParameterChunks(net).all for piece in part.pieces} >= {"0.weight", "0.bias"}


def test_a_model_without_parameters():
    replica = ReplicaTracker(1)
    replica.attach(nn.Identity(), replicated=True, broadcast=True)
    replica.batch_end(1)
    assert replica.facts() == ReplicaFacts()
    assert replica.model().count == 0


def test_checksums_are_labelled_by_steps_and_by_batches():
    net = _net()
    replica = ReplicaTracker(10)
    replica.attach(net, replicated=True, broadcast=True)
    for step in range(1, 41):
        replica.optimizer_step(step)
        replica.batch_end(3 * step - 2, step - 1)
        replica.batch_end(3 * step - 1, step - 1)
        replica.batch_end(3 * step, step)
    labels = [(one.counted, one.step) for one in replica.facts().checksums]
    assert labels == [
        *(("step", step) for step in (10, 20, 30, 40)),
        *(("batch", batch) for batch in range(10, 121, 10)),
    ]
    assert not any(one.moved for one in replica.facts().checksums)


@pytest.mark.parametrize(("replicated", "recorded"), [(False, {"21"}), (True, set()), (None, set())])
def test_batches_up_to_a_step_of_a_sharded_model(replicated, recorded):
    replica = ReplicaTracker(10)
    replica.attach(_net(), replicated=replicated, broadcast=replicated)
    replica.optimizer_step(20, 21)
    values = {
        one.value for sample in replica.facts().settings for one in sample.values if one.name == "batches trained"
    }
    assert values == recorded


@pytest.mark.parametrize(("every", "labels"), [(50, [10, 50]), (10, [10, 20, 30, 40, 50]), (20, [10, 20, 40])])
def test_a_first_sample_after_the_tenth_step_and_batch(every, labels):
    net = _net()
    telemetry = RankTelemetry(every_n_steps=every)
    telemetry.progress.has_peers = True
    telemetry.replica.attach(net, replicated=True, broadcast=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    telemetry.replica.settings.use_optimizers([optimizer])
    for _ in range(50):
        telemetry.optimizer_step()
        telemetry.train_batch_end(None, "data")
    facts = telemetry.replica.facts()
    assert [one.step for one in facts.settings] == labels
    assert [one.step for one in facts.checksums if one.counted == "step"] == labels
    assert [one.step for one in facts.checksums if one.counted == "batch"] == labels
    assert Variable("optimizer class", "SGD") in facts.settings[0].values


@pytest.mark.parametrize(("seconds", "labels"), [(1 / 256, [10, 140]), (1 / 32, [10, 30, 50, 70, 90, 110, 130])])
def test_a_rank_without_peers_takes_no_sample_within_half_a_second(seconds, labels, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("doctor.monitor.telemetry.replica.replica_tracker.monotonic", lambda: now[0])
    telemetry, net = RankTelemetry(every_n_steps=10), _net()
    telemetry.replica.attach(net, replicated=None, broadcast=None)
    for _ in range(140):
        now[0] += seconds
        telemetry.optimizer_step()
        telemetry.train_batch_end(None, "data")
    facts = telemetry.replica.facts()
    assert [one.step for one in facts.settings] == labels
    for counted in ("step", "batch"):
        assert [one.step for one in facts.checksums if one.counted == counted] == labels


class _Wrapper:
    """As DistributedDataParallel: whether the last forward pass prepared the reduction of gradients."""

    require_forward_param_sync = True


@pytest.mark.parametrize(("forgets", "counted"), [(False, "1"), (True, "3")])
def test_reductions_for_each_optimizer_step(forgets, counted):
    net, wrapper = _net(), _Wrapper()
    replica = ReplicaTracker(20)
    replica.attach(net, replicated=True, broadcast=True, wrapper=wrapper)
    for step in range(1, 21):
        for batch in range(3):
            wrapper.require_forward_param_sync = forgets or batch == 2
            replica.backward_begins()
        replica.optimizer_step(step)
    values = [one.value for sample in replica.facts().settings for one in sample.values if one.name == REDUCTIONS]
    assert values == [counted, counted]


def test_no_reductions_of_another_wrapper():
    replica = ReplicaTracker(10)
    replica.attach(_net(), replicated=True, broadcast=True, wrapper=nn.Identity())
    replica.backward_begins()
    replica.optimizer_step(10)
    assert not any(one.name == REDUCTIONS for sample in replica.facts().settings for one in sample.values)


def test_one_look_serves_a_step_and_its_batch(monkeypatch):
    net = _net()
    replica = ReplicaTracker(10)
    replica.attach(net, replicated=True, broadcast=True)
    looks = []
    sums = ParameterChunks.sums
    monkeypatch.setattr(ParameterChunks, "sums", lambda parts, look: looks.append(look) or sums(parts, look))
    for step in range(1, 41):
        descend_by_hand(net)
        replica.optimizer_step(step)
        replica.batch_end(step, step)
    checksums = replica.facts().checksums
    assert looks == [1, 2, 3, 4]
    assert [one.value for one in checksums[:4]] == [one.value for one in checksums[4:]]
    assert all(one.moved for one in checksums)


def descend_by_hand(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.01


def test_checksums_are_labelled_by_batches_for_an_optimizer_may_not_count():
    net = _net()
    replica = ReplicaTracker(10)
    replica.attach(net, replicated=True, broadcast=True)
    for batch in range(1, 41):
        replica.batch_end(batch)
    assert [checksum.step for checksum in replica.facts().checksums] == [10, 20, 30, 40]


def by_step(checksum):
    return checksum.step


def test_ranks_that_are_asked_at_different_times_have_checksums_in_common():
    early, late = SampleHistory[Checksum](), SampleHistory[Checksum]()
    for look in range(1, 20_001):
        late.add(look, Checksum(look * 50, "1"))
        if look <= 15_000:
            early.add(look, Checksum(look * 50, "1"))
    assert len(late.kept(by_step)) <= KEPT * LEVELS
    assert [one.step for one in late.kept(by_step)] == sorted(one.step for one in late.kept(by_step))
    assert late.kept(by_step)[-1].step == 1_000_000
    assert set(early.kept(by_step)) & set(late.kept(by_step))


# What a model is made of.


def test_a_model_is_described():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, dtype=torch.float64))
    net.tied = net[0].weight
    net[0].bias.requires_grad_(False)
    replica = ReplicaTracker(1)
    with pytest.raises(NotPresent):
        replica.model()
    replica.attach(net, replicated=True, broadcast=False)
    model = replica.model()
    assert (model.name, model.count, model.parameters, model.trainable) == ("Sequential", 4, 36, 32)
    assert (model.replicated, model.broadcast) == (True, False)
    assert {shape.name: (shape.shape, shape.type) for shape in model.tensors} == {
        "tied": ((4, 3), "float32"),
        "0.bias": ((4,), "float32"),
        "1.weight": ((4, 4), "float64"),
        "1.bias": ((4,), "float64"),
    }
    assert [shape.name for shape in model.tensors if shape.frozen] == ["0.bias"]


def _digest(*layers):
    replica = ReplicaTracker(1)
    replica.attach(nn.Sequential(*layers), replicated=False, broadcast=None)
    return replica.model().digest


def test_a_digest_knows_order_shape_type_and_what_is_frozen():
    digests = [
        _digest(nn.Linear(4, 4), nn.LayerNorm(4)),
        _digest(nn.LayerNorm(4), nn.Linear(4, 4)),
        _digest(nn.Linear(4, 5), nn.LayerNorm(4)),
        _digest(nn.Linear(4, 4).half(), nn.LayerNorm(4)),
        _digest(nn.Linear(4, 4)),
        _digest(nn.Linear(4, 4).requires_grad_(False)),
    ]
    assert len(set(digests)) == len(digests)
    assert _digest(nn.Linear(4, 4), nn.LayerNorm(4)) == digests[0]


# Losses and gradients.


@pytest.mark.parametrize(
    ("loss", "value"),
    [(math.nan, "nan"), (math.inf, "inf"), (torch.tensor(-math.inf), "-inf"), (torch.tensor([[math.nan]]), "nan")],
)
def test_the_first_loss_that_is_not_finite(loss, value):
    replica = ReplicaTracker(1000)
    for batch, one in enumerate([1.0, torch.tensor(2.0), 3, loss, math.nan, 1.0], 1):
        replica.loss(batch, one)
        replica.batch_end(batch)
    replica.finish()
    assert replica.facts() == ReplicaFacts(non_finite=(NonFinite(4, "loss", value=value),), losses=6)


def test_losses_that_stay_not_finite_are_counted_from_the_newest():
    replica = ReplicaTracker(1000)
    for batch, (loss, count) in enumerate([(math.nan, 1), (1.0, 0), (math.inf, 1), (math.nan, 2)], 1):
        replica.loss(batch, loss)
        assert replica.facts().non_finite_losses == count


def test_losses_that_hold_on_to_nothing_are_looked_at_together():
    replica = ReplicaTracker(1000)
    for batch in range(1, TOGETHER + 1):
        assert replica.facts().losses == 0
        if replica.loss(batch, torch.tensor(math.nan if batch == 3 else 1.0)):
            replica.batch_end(batch)
    assert replica.facts() == ReplicaFacts(non_finite=(NonFinite(3, "loss", value="nan"),), losses=TOGETHER)


@pytest.mark.parametrize("of", [lambda whole: whole[3], lambda whole: whole.requires_grad_().sum()])
def test_a_loss_that_holds_on_to_more_is_looked_at_at_once(of):
    replica, whole = ReplicaTracker(1000), torch.ones(1 << 20)
    alive = weakref.ref(whole)
    loss = of(whole)
    replica.loss(1, loss)
    del loss, whole
    assert alive() is None
    assert replica.facts().losses == 1


def test_what_is_no_single_number_is_not_looked_at():
    replica = ReplicaTracker(1)
    for batch, one in enumerate([None, torch.ones(3), "nan", {"loss": 1.0}, torch.zeros((), device="meta")], 1):
        replica.loss(batch, one)
    assert replica.facts() == ReplicaFacts()


def test_the_first_parameter_with_a_non_finite_gradient_is_named_once():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    replica = ReplicaTracker(1)
    replica.attach(net, replicated=False, broadcast=None)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    net[1].bias.grad[2] = math.inf
    net[2].weight.grad[0] = math.nan
    replica.loss(1, 1.0)
    replica.batch_end(1)
    assert replica.facts().non_finite == (), "a GradScaler may be at work: nothing is said before a loss is spoilt"
    for batch in (2, 3):
        replica.loss(batch, torch.tensor(math.nan, requires_grad=True))
        replica.batch_end(batch)
    assert replica.facts().non_finite == (
        NonFinite(2, "loss", value="nan"),
        NonFinite(2, "gradient", "1.bias", "inf"),
    )


def test_a_non_finite_loss_without_gradients_is_reported_alone():
    replica = ReplicaTracker(1)
    replica.attach(_net(), replicated=False, broadcast=None)
    replica.loss(1, math.inf)
    replica.batch_end(1)
    assert replica.facts().non_finite == (NonFinite(1, "loss", value="inf"),)


# What is left on a device and read later, on a stand-in whose work is done when the test says so.


class Events:
    """Events that are passed when ``done``; asking while a graph is captured would end the capture."""

    def __init__(self):
        self.done, self.captures, self.asked = False, False, Counter()

    def make(self):
        return self

    def record(self, event):
        assert not self.captures

    def capturing(self):
        return self.captures

    def query(self):
        assert not self.captures
        self.asked["query"] += 1
        return self.done


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda, is_cpu = True, False


@pytest.fixture
def losses():
    losses = LossTracker()
    losses.readback = Readback(Events(), pinned=False)
    return losses


def _see(losses, values, first=1):
    for batch, value in enumerate(values, first):
        one = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        losses.record(batch, one.as_subclass(OnDevice))
        losses.fetch()
        losses.readback.collect()


def test_losses_of_a_device_are_read_when_they_have_arrived(losses):
    values = [1.0, 2.0, math.inf, *[1.0] * (TOGETHER - 3)]
    _see(losses, values)
    assert losses.seen == 0
    losses.readback._events.done = True
    losses.readback.collect()
    assert losses.seen == TOGETHER
    assert losses.first == NonFinite(3, "loss", value="inf")


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ([1.5e308] * TOGETHER, None),
        ([math.inf, -math.inf, *[1.0] * (TOGETHER - 2)], NonFinite(1, "loss", value="inf")),
        ([*[1.0] * (TOGETHER - 1), math.nan], NonFinite(TOGETHER, "loss", value="nan")),
    ],
)
def test_losses_on_the_cpu_are_judged_together_as_one_by_one(values, first):
    losses = LossTracker()
    for batch, value in enumerate(values, 1):
        losses.record(batch, torch.tensor(value, dtype=torch.float64))
    losses.fetch()
    assert (losses.seen, losses.first) == (TOGETHER, first)
    assert losses.in_a_row == math.isnan(values[-1])


class Passing(Events):
    """Those of a device that is done when it was asked often enough, or breaks."""

    def __init__(self, questions, error=None):
        super().__init__()
        self.questions, self.error = questions, error

    def query(self):
        self.questions -= 1
        if self.questions < 0 and self.error is not None:
            raise self.error
        return self.questions < 0


@pytest.mark.parametrize(
    ("events", "seen", "first"),
    [
        (Passing(0), 3, NonFinite(3, "loss", value="nan")),
        (Passing(5), 3, NonFinite(3, "loss", value="nan")),
        (Passing(10**9), 0, None),
        (Passing(0, RuntimeError("CUDA error: an illegal memory access was encountered")), 0, None),
    ],
)
def test_the_last_losses_of_a_run_are_taken_as_far_as_they_come(events, seen, first):
    """The device is done, is soon, stands still, or has failed."""
    losses = LossTracker()
    losses.readback = Readback(events, pinned=False)
    _see(losses, [1.0, 2.0, math.nan])
    assert losses.seen == 0, "too few to be fetched while the run goes on"
    losses.finish(0.3)
    losses.finish(0.0)
    assert (losses.seen, losses.first) == (seen, first)


def test_the_last_losses_come_after_those_that_are_under_way(losses):
    _see(losses, [1.0] * (SLOTS * TOGETHER + 5))
    losses.readback._events.done = True
    losses.finish()
    assert losses.seen == SLOTS * TOGETHER + 5


def test_a_graph_that_an_exception_left_half_captured_is_let_be(losses):
    _see(losses, [1.0])
    losses.readback._events.captures = True
    losses.finish(0.05)
    assert losses.seen == 0


def test_losses_of_any_type_are_read_together(losses):
    losses.readback._events.done = True
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    _see(losses, [torch.ones((1,) * (number % 3), dtype=kinds[number % 4]) for number in range(TOGETHER - 1)])
    _see(losses, [torch.tensor(1e300, dtype=torch.float64)], first=TOGETHER)
    assert (losses.seen, losses.first) == (TOGETHER, None), "1e300 is finite"


def test_a_device_that_is_far_behind_costs_losses_and_no_memory(losses):
    _see(losses, [1.0] * (SLOTS * TOGETHER + 500))
    assert len(losses._kept) < WIDTH
    losses.readback._events.done = True
    losses.readback.collect()
    assert losses.seen == SLOTS * TOGETHER
    _see(losses, [math.nan], first=9000)
    assert losses.first == NonFinite(9000, "loss", value="nan")


def test_a_captured_graph_writes_each_loss_to_the_same_place(losses):
    place = torch.tensor(0.0)
    for batch in range(1, TOGETHER + 1):
        place.fill_(math.nan if batch == 5 else 1.0)
        losses.record(batch, place.as_subclass(OnDevice))
    losses.fetch()
    losses.readback._events.done = True
    losses.readback.collect()
    assert losses.first == NonFinite(5, "loss", value="nan")


def test_a_loss_that_is_a_view_keeps_no_large_tensor_alive(losses):
    large = torch.ones(100_000)
    losses.record(1, large[7].as_subclass(OnDevice))
    assert losses._kept[0][1].untyped_storage().nbytes() < 100


def test_nothing_is_sent_or_asked_while_a_graph_is_captured(losses):
    losses.readback._events.captures = True
    _see(losses, [1.0] * TOGETHER)
    assert len(losses._kept) == TOGETHER
    losses.readback._events.captures = False
    losses.readback._events.done = True
    _see(losses, [1.0], first=TOGETHER + 1)
    assert losses.seen == TOGETHER + 1


def test_checksums_of_a_device_are_read_later_and_are_the_same():
    net = _net()
    here, there = ReplicaTracker(1), ReplicaTracker(1)
    for replica in (here, there):
        replica.attach(net, replicated=True, broadcast=True)
    events = Events()
    there._readback = Readback(events, pinned=False)
    for step in range(1, SLOTS + 3):
        for replica in (here, there):
            replica.batch_end(step)
        with torch.no_grad():
            net[0].weight += 1
    assert there.facts().checksums == ()
    events.done = True
    there.batch_end(100)
    assert there.facts().checksums[:SLOTS] == here.facts().checksums[:SLOTS]
