"""The device worker asks for its context by the UUID of torch; a fake of torch.cuda, because no GPU is here."""

from types import SimpleNamespace

import pytest
import torch

from doctor.probes.devices import device_worker


@pytest.mark.parametrize(
    ("properties", "cuda", "expected"),
    [
        (SimpleNamespace(uuid="1b2c"), "12.8", ("GPU-1b2c", 1 << 21)),
        (SimpleNamespace(uuid="GPU-1b2c"), "12.8", ("GPU-1b2c", 1 << 21)),
        (SimpleNamespace(), "12.8", None),
        (SimpleNamespace(uuid="1b2c"), None, None),
    ],
    ids=["uuid", "uuid of NVML", "old torch", "ROCm"],
)
def test_the_worker_asks_for_its_own_gpu(monkeypatch, properties, cuda, expected):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 21)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(device_worker, "context_bytes", lambda *asked: asked)
    assert device_worker._context(torch.device("cuda", 1)) == expected
