"""NCCL001: variables that nothing reads, as one that is meant to be the timeout, and the name that is meant."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in, severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "NCCL001"))
JOB = "#!/bin/bash\nexport NCCL_TIMEOUT=3600\ntorchrun --nproc-per-node 8 train.py\n"
TRAIN = "import torch.distributed as dist\n\ndist.init_process_group('nccl')\n"
FILES = {"job.sh": JOB, "train.py": TRAIN, "model.py": "import torch\n"}


def test_no_program_reads_it(tmp_path):
    [(_, finding)] = findings_in(tmp_path, FILES, BOOK)
    assert (finding.severity.value, finding.source.line) == ("info", 2)
    assert finding.summary == "Unknown variable NCCL_TIMEOUT: neither NCCL, PyTorch nor a known plugin reads it"
    assert "`timeout` to `init_process_group`" in finding.fix
    assert "10 minutes" in finding.effect


def test_a_program_sets_it(tmp_path):
    files = {"train.py": f"import os\n\nos.environ['NCCL_TIMEOUT'] = '0'\n{TRAIN}", "model.py": ""}
    assert severities_in(tmp_path, files, BOOK) == [("NCCL001", "info")]


READS = {
    "getenv": "seconds = int(os.getenv('NCCL_TIMEOUT', '600'))\n",
    "get": 'seconds = int(os.environ.get("NCCL_TIMEOUT", 600))\n',
    "an item": "seconds = int(os.environ['NCCL_TIMEOUT'])\n",
    "a test": "seconds = 600 if 'NCCL_TIMEOUT' in os.environ else 60\n",
    "a function of the project": "seconds = number_of('NCCL_TIMEOUT')\n",
}


@pytest.mark.parametrize("name", READS)
def test_a_program_reads_it(tmp_path, name):
    text = f"import os\nfrom datetime import timedelta\n{READS[name]}{TRAIN}".replace("'nccl')", "'nccl', timeout=t)")
    assert severities_in(tmp_path, FILES | {"train.py": text}, BOOK) == []


QUIET = {
    "the script passes it on": {"job.sh": JOB.replace("train.py", "train.py --timeout $NCCL_TIMEOUT")},
    "a configuration reads it": {"conf.yaml": "defaults: [a]\ntimeout: ${oc.env:NCCL_TIMEOUT}\nnproc_per_node: 8\n"},
    "it is known": {"job.sh": JOB.replace("NCCL_TIMEOUT=3600", "NCCL_IB_TIMEOUT=22")},
    "of another library": {"job.sh": JOB.replace("NCCL_TIMEOUT", "MYLIB_TIMEOUT")},
}


@pytest.mark.parametrize("name", QUIET)
def test_what_may_be_read(tmp_path, name):
    assert severities_in(tmp_path, FILES | QUIET[name], BOOK) == []


def test_a_file_that_is_linted_alone(tmp_path):
    assert severities_in(tmp_path, {"job.sh": JOB}, BOOK) == []


@pytest.mark.parametrize(("release", "name"), [("2.1.2", ""), ("2.5.1", "TORCH_")])
def test_the_torch_of_the_project_reads_the_name_that_is_meant(tmp_path, release, name):
    files = FILES | {
        "job.sh": JOB.replace("NCCL_TIMEOUT=3600", "NCLL_BLOCKING_WAIT=1"),
        "environment.yml": f"name: a\ndependencies:\n  - pytorch={release}\n",
    }
    [(_, finding)] = findings_in(tmp_path, files, BOOK)
    assert finding.summary == f"Unknown variable NCLL_BLOCKING_WAIT. Did you mean {name}NCCL_BLOCKING_WAIT?"
