"""Conditions that compare a rank with itself modulo the number of ranks (CODE005)."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE005"))
BASE = """\
import os

class Engine:
    def __init__(self):
        self._local_rank = int(os.environ["LOCAL_RANK"])
        parts = self.parts()
        self.part = self._local_rank % parts

    def parts(self):
        raise NotImplementedError
"""
OWN = """\
import torch.distributed as dist
from base import Engine
from helpers import get_local_world_size

class Sharded(Engine):
    def parts(self):
        return get_local_world_size()

    def save(self, state):
        if self._local_rank != self.part:
            return
        dist.broadcast_object_list([state], src=0)

dist.init_process_group("nccl")
Sharded().save({})
"""
FILES = {"base.py": BASE, "own.py": OWN}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, None),
        ({"own.py": OWN.replace("return get_local_world_size()", "return 1")}, "info"),
        ({"own.py": OWN.replace("return get_local", "return 2 or get_local")}, "info"),
        ({"base.py": BASE.replace("rank % parts", "rank // parts")}, "info"),
        ({"other.py": "def change(engine):\n    engine.part = 3\n"}, "info"),
        (
            {"other.py": "from own import Sharded\n\nclass One(Sharded):\n    def parts(self):\n        return 1\n"},
            "info",
        ),
        ({"own.py": OWN.replace("!= self.part", "!= 0")}, "error"),
    ],
)
def test_local_rank_modulo_the_ranks_of_its_host(tmp_path, changes, severity):
    found = severities_in(tmp_path, {**FILES, **changes}, BOOK, preview=True)
    assert found == ([("CODE005", severity)] if severity else [])
