"""Fixtures of the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.nvml import FakeNvml, build_library, compiler


@pytest.fixture
def fake_nvml(tmp_path: Path) -> FakeNvml:
    """The fake NVML; see tests/lab/nvml.py."""
    if compiler() is None:
        pytest.skip("no C compiler for the fake NVML")
    return FakeNvml(build_library(), tmp_path)
