"""CODE017: whether a collate function can leave out samples, and what that costs."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE017"))
TRAIN = """\
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate
from torch.nn.parallel import DistributedDataParallel as DDP

def collate(batch):
    return default_collate(list(filter(lambda x: x is not None, batch)))

dist.init_process_group("nccl")
model = DDP(net)
for batch in DataLoader(make(), batch_size=8, collate_fn=collate):
    model(batch).sum().backward()
"""
ROWS = """\
class Rows(Dataset):
    def __init__(self, table, remake=None):
        self.table = table
        self.remake = remake

    def __getitem__(self, at):
        row = self.table.loc[at, :]
        if self.remake is not None:
            row = call(self.remake, row)
        if row is None:
            return None
        return {"row": row}
"""
READ = ROWS.replace("self.table.loc[at, :]", "self.read(at)")
GATHERS = "import torch.distributed as dist\n\ndef mean(x):\n    dist.all_gather_object(parts, x)\n"


@pytest.mark.parametrize(
    ("files", "severities"),
    [
        ({"rows.py": ROWS}, []),
        ({"rows.py": ROWS, "make.py": "rows = Rows(table, remake=clean)\n"}, ["info"]),
        ({"rows.py": ROWS, "conf/rows.yaml": "_target_: rows.Rows\nremake: clean\n"}, ["info"]),
        ({"rows.py": ROWS.replace("remake=None", "remake=clean")}, ["info"]),
        ({"rows.py": READ}, ["info"]),
        ({"rows.py": READ, "metrics.py": GATHERS}, ["warning"]),
        ({"rows.py": ROWS.replace("        return {", "        return None if at > 9 else {")}, ["info"]),
        ({"more.py": "import torch\n"}, ["info"]),
    ],
)
def test_a_filter_of_samples(tmp_path, files, severities):
    (tmp_path / ".git").mkdir()
    found = severities_in(tmp_path, {"train.py": TRAIN, "run.sh": "torchrun train.py\n", **files}, BOOK)
    assert [severity for _, severity in found] == severities
