"""Optimizer steps past a DeepSpeed engine that takes one micro-batch in a step (CODE038)."""

from __future__ import annotations

import json

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE038"))
TRAIN = """\
import deepspeed

def main(args, model, data):
    engine, optimizer, loader, _ = deepspeed.initialize(args=args, model=model, training_data=data)
    for batch in loader:
        engine.backward(engine(batch).mean())
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("own", "other", "severity"),
    [
        (1, None, "info"),
        (4, None, "warning"),
        ("auto", None, "warning"),
        (None, None, "warning"),
        (None, 1, "info"),
        (None, 2, "warning"),
        (1, 4, "info"),
    ],
)
def test_step_of_the_optimizer_itself(tmp_path, own, other, severity):
    files = {"train.py": TRAIN}
    if own is not None:
        files["train.py"] += f"\nCONFIG = {{'gradient_accumulation_steps': {own!r}}}\n"
    if other is not None:
        files["ds_config.json"] = json.dumps({"gradient_accumulation_steps": other, "train_batch_size": 8})
        files["run.sh"] = "deepspeed train.py --deepspeed_config ds_config.json\n"
    assert severities_in(tmp_path, files, BOOK) == [("CODE038", severity)]
