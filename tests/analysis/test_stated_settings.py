"""Settings in effect, with the ranks that have them."""

from __future__ import annotations

from doctor.analysis.effective_settings import effective_settings, group_by_value, only_nccl, only_torch
from doctor.core.facts import EnvironmentFacts, NcclFacts, Setting, SoftwareFacts
from doctor.testing.cases import healthy

FILE = Setting("NCCL_DEBUG", "INFO", "system file", "/etc/nccl.conf", 4)


def test_environment_and_files_together() -> None:
    job = healthy(2, 2).environ(ranks=(1, 2), NCCL_ALGO="Ring").alter(NcclFacts, ranks=(3,), settings=(FILE,)).job()
    found = {stated.setting.name: stated for stated in effective_settings(job)}
    assert found["NCCL_ALGO"].ranks == (1, 2)
    assert found["NCCL_ALGO"].origin == "environment"
    assert found["NCCL_DEBUG"].ranks == (3,)
    assert found["NCCL_DEBUG"].origin == "/etc/nccl.conf:4"
    assert found["OMP_NUM_THREADS"].ranks == (0, 1, 2, 3)
    assert effective_settings(job) is effective_settings(job)


def test_group_alike_orders_by_lowest_rank() -> None:
    job = healthy(2, 2).environ(ranks=(0, 3), CUDA_LAUNCH_BLOCKING="1").job()
    groups = group_by_value(job, EnvironmentFacts, lambda environment, _: environment.get("CUDA_LAUNCH_BLOCKING"))
    assert [(group.value, group.ranks) for group in groups] == [("1", (0, 3)), (None, (1, 2))]


def test_one_release_or_none() -> None:
    sketch = healthy(1, 2)
    assert (only_nccl(sketch.job()), only_torch(sketch.job())) == ("2.27.3", "2.8.0")
    mixed = sketch.alter(SoftwareFacts, ranks=(1,), nccl_libraries=(), torch=None).job()
    assert (only_nccl(mixed), only_torch(mixed)) == (None, None)
