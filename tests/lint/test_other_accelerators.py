"""Nothing reads the variables of NCCL in programs for accelerators that use another library."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("NCCL001", "NCCL004", "NCCL011")))
PROGRAM = """\
import os
import torch
{imports}
os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "0"
os.environ["NCCL_SOKET_IFNAME"] = "eth0"
"""
GUARDED = "try:\n    from optimum.habana import GaudiTrainer\nexcept ImportError:\n    GaudiTrainer = None"
GAUDI = """\
```bash
PT_HPU_LAZY_MODE=0 python train.py --use_habana
python ../gaudi_spawn.py --world_size 8 train.py --use_habana
```
"""
ALL = {"NCCL001", "NCCL004", "NCCL011"}


@pytest.mark.parametrize(
    ("imports", "page", "expected"),
    [
        ("import torch_npu", "", set()),
        (GUARDED, GAUDI, set()),
        (GUARDED, f"{GAUDI}\n```bash\ntorchrun --nproc_per_node 8 train.py\n```\n", ALL),
        (GUARDED, "", ALL),
        ("", "```bash\ntorchrun --nproc_per_node 8 train.py\n```\n", ALL),
    ],
)
def test_variables_of_nccl(tmp_path, imports, page, expected):
    files = {"train.py": PROGRAM.format(imports=imports), "other.py": "import torch\n", "README.md": f"# A\n{page}"}
    assert {rule for rule, _ in findings_in(tmp_path, files, BOOK, preview=True)} == expected


JOINS = "import torch\nimport torch.distributed as dist\n\ndist.init_process_group({given})\n"
SETS = "export TORCH_NCCL_BLOCKING_WAIT=1 NCCL_ASYNC_ERROR_HANDLING=1\n"
BY_PYTHON = f"{SETS}python train.py --lr 1\n"


@pytest.mark.parametrize(
    ("given", "script", "other", "expected"),
    [
        ('"nccl"', BY_PYTHON, "", set()),
        ('backend="nccl", init_method="env://", timeout=timedelta(minutes=9)', BY_PYTHON, "", set()),
        ('"nccl", rank=args.rank, world_size=args.size', BY_PYTHON, "", {"NCCL004", "NCCL011"}),
        ('"nccl"', f"{SETS}export RANK=$1 WORLD_SIZE=2\npython train.py\n", "", {"NCCL004", "NCCL011"}),
        ('"nccl"', f"{SETS}torchrun --nproc_per_node 2 train.py\n", "", {"NCCL004", "NCCL011"}),
        ('"nccl"', f"{SETS}python another.py\n", "", {"NCCL004", "NCCL011"}),
        ('"nccl"', BY_PYTHON, "torchrun --no-python --nproc_per_node 2 run.sh\n", {"NCCL004", "NCCL011"}),
        ('"nccl")\ntorch.multiprocessing.spawn(main', BY_PYTHON, "", {"NCCL004", "NCCL011"}),
    ],
)
def test_variables_of_a_program_that_joins_no_group(tmp_path, given, script, other, expected):
    files = {"train.py": JOINS.format(given=given), "model.py": "import torch\n", "run.sh": script}
    files |= {"job.sh": other} if other else {}
    assert {rule for rule, _ in findings_in(tmp_path, files, BOOK, preview=True)} == expected


TYPO = "export NCCL_SOKET_IFNAME=eth0\n"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{TYPO}torchrun --nproc_per_node 2 train.py\n", {"NCCL001"}),
        (f"{TYPO}torchrun --nproc_per_node 1 train.py\n", set()),
        (f"{TYPO}python train.py\n", set()),
        (f"{TYPO}python count.py\n", set()),
        (f"{TYPO}python halves.py\n", {"NCCL001"}),
        (f"{SETS}python count.py\n", set()),
        (f"{SETS}python count.py\ntorchrun --nproc_per_node 2 train.py\n", {"NCCL004", "NCCL011"}),
    ],
)
def test_variables_of_what_has_no_ranks(tmp_path, script, expected):
    files = {"train.py": JOINS.format(given='"nccl"'), "count.py": "print(len(open('words.txt').read()))\n"}
    files |= {"halves.py": "import torch\n\nmodel = torch.nn.DataParallel(net)\n", "run.sh": script}
    assert {rule for rule, _ in findings_in(tmp_path, files, BOOK)} == expected
