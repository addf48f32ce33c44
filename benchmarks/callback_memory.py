"""What is left of many fits in one process: resident memory, threads, descriptors and objects, with and without the
callback.

``python benchmarks/callback_memory.py [--fits 200] [--types]``; each series runs in a process of its own. A trend is
the slope of the second half of a series by least squares; ``--types`` prints which types of objects have grown in it.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

EVERY = 10
FIGURES = ("rss_kib", "threads", "descriptors", "objects")


def series(fits: int, watched: bool) -> list[dict[str, Any]]:
    """The figures after every :data:`EVERY` fits of this process."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import lightning.pytorch as lightning
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, fits + 1):
            callbacks = [_callback(folder)] if watched else []
            trainer = lightning.Trainer(
                default_root_dir=folder,
                accelerator="cpu",
                max_steps=2,
                limit_val_batches=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=callbacks,
            )
            trainer.fit(BoringModel())
            del trainer, callbacks
            if number % EVERY == 0:
                rows.append({"fits": number, **figures()})
    return rows


def _callback(folder: str) -> Any:
    from doctor import DoctorCallback

    return DoctorCallback(Path(folder, "doctor"))


def figures() -> dict[str, Any]:
    """Of this process now."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    objects = gc.get_objects()
    return {
        "rss_kib": int(status.partition("VmRSS:")[2].split()[0]),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "objects": len(objects),
        "types": collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects),
    }


def slope(rows: list[dict[str, Any]], figure: str) -> float:
    """What is added by a fit in the second half of a series."""
    half = rows[len(rows) // 2 :]
    xs, ys = [row["fits"] for row in half], [row[figure] for row in half]
    middle = sum(xs) / len(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def grown(rows: list[dict[str, Any]], most: int = 12) -> list[tuple[str, int]]:
    """Types that have more objects at the end of a series than in its middle."""
    middle, last = rows[len(rows) // 2]["types"], rows[-1]["types"]
    more = {name: count - middle.get(name, 0) for name, count in last.items()}
    return sorted(((name, count) for name, count in more.items() if count > 0), key=lambda pair: -pair[1])[:most]


def main() -> int:
    """Run both series and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--types", action="store_true", help="print the types of objects that have grown")
    parser.add_argument("--series", choices=("with", "without"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.series:
        print(json.dumps(series(options.fits, options.series == "with")))
        return 0
    print("| callback | fits | RSS MiB first, middle, last | threads | descriptors | objects | added by a fit |")
    print("| --- | ---: | --- | --- | --- | --- | --- |")
    for way in ("without", "with"):
        command = [sys.executable, __file__, "--series", way, "--fits", str(options.fits)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = json.loads(done.stdout.splitlines()[-1])
        picked = (rows[0], rows[len(rows) // 2], rows[-1])
        memory = ", ".join(f"{row['rss_kib'] / 1024:.0f}" for row in picked)
        counts = [", ".join(str(row[name]) for row in picked) for name in FIGURES[1:]]
        added = ", ".join(f"{slope(rows, name):+.2f} {name}" for name in FIGURES)
        print(f"| {way} | {options.fits} | {memory} | {' | '.join(counts)} | {added} |", flush=True)
        if options.types:
            print(f"\ngrown {way}: {grown(rows)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
