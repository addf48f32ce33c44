"""Branches on the release of torch that no run takes, by the requirements of the project."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("NCCL011", "CODE005")))
HEAD = "import os\nimport torch\nimport torch.distributed as dist\nfrom packaging.version import Version\n\n"
SETS = 'if {}:\n    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"\n'
HANGS = "dist.init_process_group('nccl')\nif {}:\n    if dist.get_rank() == 0:\n        dist.barrier()\n"
NEW, OLD = "torch>=2.10\n", "torch==1.13.1\n"


@pytest.mark.parametrize("body", [SETS, HANGS], ids=["variable", "collective"])
@pytest.mark.parametrize(
    ("test", "required", "is_taken"),
    [
        ("torch.__version__ < (2, 2)", NEW, False),
        ("torch.__version__ < '2.2'", NEW, False),
        ("Version(torch.__version__) < Version('2.2.0')", NEW, False),
        ("torch.__version__ <= '2.9'", NEW, False),
        ("not torch.__version__ >= '2.2'", NEW, False),
        ("torch.__version__ >= '2.2'", OLD, False),
        ("torch.__version__ >= (2, 2)", NEW, True),
        ("torch.__version__ < (2, 12)", NEW, True),
        ("torch.__version__ <= '2.10'", NEW, True),
        ("torch.__version__ < (2, 2)", OLD, True),
        ("torch.__version__ < (2, 2)", "torch\n", True),
        ("torchvision.__version__ < '0.9'", NEW, True),
    ],
)
def test_a_branch_for_another_release(tmp_path, body, test, required, is_taken):
    files = {"train.py": HEAD + body.format(test), "requirements.txt": required, "run.sh": "torchrun train.py\n"}
    assert bool(severities_in(tmp_path, files, BOOK)) is is_taken


ERRORS = 'import os\n\nos.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"\n'
GRAPHS = "import torch\n\ng = torch.cuda.CUDAGraph()\n"


@pytest.mark.parametrize(
    ("files", "severities"),
    [
        ({"requirements.txt": NEW}, ["info"]),
        ({"requirements.txt": OLD}, ["warning"]),
        ({"requirements.txt": "torch>=2.2,<3\n"}, ["warning"]),
        ({"requirements.txt": NEW, "graphs.py": GRAPHS}, []),
    ],
)
def test_what_ends_a_job_without_error_handling(tmp_path, files, severities):
    files = {"train.py": f"{ERRORS}import torch\ntorch.distributed.init_process_group('nccl')\n", **files}
    assert [severity for _, severity in severities_in(tmp_path, files, BOOK)] == severities


CONVERTS = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = DDP(net)
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""


@pytest.mark.parametrize(
    ("required", "is_shown"), [(NEW, False), (OLD, False), ("torch\n", False), ("torch==1.8\n", True)]
)
def test_layers_that_ddp_has_not_seen(tmp_path, required, is_shown):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE040"))
    files = {"train.py": CONVERTS, "net.py": "", "requirements.txt": required}
    assert severities_in(tmp_path, files, book, preview=True) == [("CODE040", "info")]
    assert bool(severities_in(tmp_path, files, book)) is is_shown
