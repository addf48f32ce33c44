"""CUDA in the workers of data loaders whose number callers decide (CODE023)."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE023"))
DATA = """\
import torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __getitem__(self, index):
        return read(index).to("cuda")

def make_loader(workers=0):
    return DataLoader(Images(), batch_size=1, num_workers=workers)
"""
CALL = "for batch in make_loader():\n    print(batch)\n"


@pytest.mark.parametrize(
    ("files", "is_found"),
    [
        ({"images.py": DATA + CALL}, False),
        ({"images.py": DATA.replace("=0", "=4") + CALL}, True),
        ({"images.py": DATA + CALL.replace("()", "(workers=2)")}, True),
        ({"images.py": DATA + CALL, "other.py": "from images import make_loader\nmake_loader(8)\n"}, True),
        ({"images.py": DATA + CALL, "other.py": "import images\nrun(images.make_loader)\n"}, True),
    ],
)
def test_workers_that_all_calls_leave_at_zero(tmp_path, files, is_found):
    assert severities_in(tmp_path, files, BOOK) == ([("CODE023", "error")] if is_found else [])
