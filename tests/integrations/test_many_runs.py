"""Many runs in one process leave no objects of ours, no descriptors and no threads behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doctor import watch

WARM, MORE = 4, 6


def _of_the_doctor() -> Counter[str]:
    gc.collect()
    names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    return Counter(name for name in names if name.startswith("doctor"))


def _left_by(run: Callable[[], None]) -> tuple[dict[str, int], int, int]:
    """What each of :data:`MORE` runs adds once :data:`WARM` have filled the caches: kinds of objects, descriptors and
    threads. What fewer than one a run are left of is held by chance: by a thread of another test that is about to end.
    """
    for _ in range(WARM):
        run()
    objects, descriptors, threads = _of_the_doctor(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(MORE):
        run()
    left = {name: count // MORE for name, count in (_of_the_doctor() - objects).items() if count >= MORE}
    descriptors = len(os.listdir("/proc/self/fd")) - descriptors
    return left, max(0, descriptors) // MORE, max(0, threading.active_count() - threads) // MORE


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_plain_loops(tmp_path: Path) -> None:
    def run() -> None:
        with watch(dirpath=tmp_path, every_n_steps=1) as w:
            for _ in w.loader([1.0, 2.0, 3.0]):
                w.step(loss=1.0)

    assert _left_by(run) == ({}, 0, 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_fits(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from doctor import DoctorCallback

    def run() -> None:
        trainer = lightning.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            callbacks=DoctorCallback(),
            max_steps=2,
            limit_val_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(BoringModel())

    assert _left_by(run) == ({}, 0, 0)
