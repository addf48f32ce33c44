"""The same steps by our recorder, by torch's MemTracker and FSDPMemTracker, and on real tensors.

A script, run by ``test_trace.py`` in a process of its own; it prints each pair and how far apart it may be.
"""

import importlib
import json
import sys
import weakref
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = ("layers", "tokens", "shared", "frozen")
ROUNDING = 0.01
"""MemTracker counts what is on a CPU by the byte, we count blocks of 512."""


def loss(model, batch):
    from torch.nn import functional

    if isinstance(batch, tuple):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return model(batch).sum()


def by_tracker(make):
    """MemTracker's peak, on fake tensors of the CPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, batch = make()
        without_dropout(model)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], foreach=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *(batch if isinstance(batch, tuple) else (batch,)))
        with tracker:
            for _ in range(2):
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def by_sharded_tracker(make, ranks):
    """FSDPMemTracker's, at a world size without a world. Of plain SGD: it counts an optimizer's temporaries whole."""
    import torch
    from torch import distributed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    with FakeTensorMode():
        model, batch = make()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            for _ in range(2):
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    distributed.destroy_process_group()
    return peak


def on_real_tensors(make):
    """The most bytes of storages that lived at once, counted in blocks of 512."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        now = most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else (out,):
                self.add(each)
            return out

        def add(self, tensor):
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage()._cdata in known:
                return
            storage = tensor.untyped_storage()
            name, size = storage._cdata, -(-storage.nbytes() // 512) * 512
            known[name] = weakref.ref(storage, lambda _: self.gone(name, size))
            self.now += size
            self.most = max(self.most, self.now)

        def gone(self, name, size):
            self.now -= size
            known.pop(name)

    known = {}
    model, batch = make()
    without_dropout(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], foreach=True)
    count = Count()
    for tensor in (*model.parameters(), *(batch if isinstance(batch, tuple) else (batch,))):
        count.add(tensor)
    with count:
        for _ in range(2):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return count.most


def without_dropout(model):
    """A CPU keeps another mask than a GPU."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def refuse(device):
    raise RuntimeError("PyTorch is not linked with support for it")


def main():
    factories = importlib.import_module("tests.estimate.test_trace")
    found = {}
    for name in CASES:
        make = getattr(factories, name)
        if name != "frozen":  # MemTracker asks every parameter for its gradient
            found[f"{name}, MemTracker"] = [name, by_tracker(make), ROUNDING]
        found[f"{name}, real tensors"] = [name, on_real_tensors(make), ROUNDING]
    found["layers, FSDPMemTracker"] = ["fsdp2", by_sharded_tracker(factories.layers, 8), ROUNDING]

    from doctor.estimate.data_model import TrainingPlan
    from doctor.estimate.tracing import fake_mode
    from doctor.estimate.tracing.factory import find_factory
    from doctor.estimate.tracing.step_tracer import StepTracer

    def tracer_of(factory):
        return StepTracer(factory, lambda: find_factory(factory, ROOT))

    ours = {}
    for name in CASES:
        bench = tracer_of(f"tests.estimate.test_trace:{name}")
        without_dropout(bench._made.module)
        ours[name] = bench.run(TrainingPlan(outputs="released"), 0).parts.total
        if name == "layers":
            ours["fsdp2"] = bench.run(
                TrainingPlan(strategy="fsdp2", devices=8, optimizer="sgd", outputs="released"), 0
            ).parts.total
    fake_mode._try_out = refuse
    ours["on a CPU"] = (
        tracer_of("tests.estimate.test_trace:layers").run(TrainingPlan(outputs="released"), 0).parts.total
    )
    found["layers, without fake GPUs"] = ["on a CPU", *found["layers, MemTracker"][1:]]
    sys.stdout.write(json.dumps({name: [ours[case], *rest] for name, (case, *rest) in found.items()}) + "\n")


if __name__ == "__main__":
    main()
