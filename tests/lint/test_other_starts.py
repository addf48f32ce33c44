"""Findings about several ranks are infos where a project shows starts of other programs only."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in, severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE011"))
PROGRAM = """\
import argparse

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from data import Images
from net import Net


def main(args):
    dist.init_process_group("nccl")
    sampler = DistributedSampler(Images(args.folder))
    loader = DataLoader(Images(args.folder), sampler=sampler)
    model = DistributedDataParallel(Net().cuda())
    for epoch in range(args.epochs):
        for batch in loader:
            model(batch).mean().backward()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--epochs", type=int, default=100)
    main(parser.parse_args())
"""
PARTS = {"data.py": "class Images:\n    pass\n", "net.py": "class Net:\n    pass\n"}
OTHER = {"train.py": "from net import Net\n\nprint(Net())\n"}
LAUNCH = "torchrun --nproc_per_node=8 train.py"
PROJECT = {**PARTS, **OTHER, "retrieve.py": PROGRAM}


WITH_TRAINER = PROGRAM.replace("def main", "class Trainer(Base):\n    pass\n\n\ndef main").replace(
    "    for epoch", "    Trainer(model)\n    for epoch"
)
OWN_BASE = f"from base import Base\n{WITH_TRAINER}"


def page(*lines):
    return {"README.md": "\n".join(("# Nets", *lines, ""))}


SHOWN_ELSEWHERE = {
    "a page starts another one on several ranks": page("```bash", LAUNCH, "```"),
    "a script does": {"run.sh": f"#!/bin/bash\n{LAUNCH}\n"},
    "a page in another folder does": {"notes/training/first.md": f"    {LAUNCH}\n"},
    "a page starts it as one process as well": page("```", LAUNCH, "python retrieve.py --folder images", "```"),
    "a page only mentions it": page("```", LAUNCH, "```", "Then evaluate with `retrieve.py`."),
    "no page speaks of several ranks": page("    python train.py"),
    "a variable has the name of the other one": {
        "run.sh": "task=train\nname=${task}_$1\ntorchrun --nproc_per_node=8 src/${task}.py --name $name\n"
    },
    "it has a Trainer of its own": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": OWN_BASE,
        "base.py": "class Base(object):\n    pass\n",
    },
    "the other one imports it and uses nothing of it": {
        **page(f"`{LAUNCH}`"),
        "train.py": "import retrieve\nfrom net import Net\n\nprint(Net(), 'retrieve')\n",
    },
    "its comment starts the other one, of which it is a copy": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": f"# {LAUNCH}\n{PROGRAM}",
    },
    "a file of its name is started": {
        **page(f"`{LAUNCH}`"),
        "second/run.sh": "torchrun --nproc_per_node=8 tools/retrieve.py\n",
        "second/tools/retrieve.py": "print()\n",
    },
}
MAY_BE_SEVERAL = {
    "no start": {},
    "no start of a program of the project": page("    pip install nets", "    python setup.py install"),
    "its own launcher": page("```", LAUNCH, "torchrun --nproc_per_node=8 retrieve.py", "```"),
    "its launcher on the line before": page("```", "torchrun --nproc_per_node=8", "retrieve.py", "```", f"`{LAUNCH}`"),
    "its own module": page("```", LAUNCH, "torchrun --nproc_per_node=8 -m retrieve", "```"),
    "a launch file": {**page(f"`{LAUNCH}`"), "run.sh": "SCRIPT=retrieve.py\nsrun python $SCRIPT\n"},
    "a job file": {**page(f"`{LAUNCH}`"), "run.sh": "#!/bin/bash\n#SBATCH --ntasks=4\nsrun python -u retrieve.py\n"},
    "a launcher of any program": {**page(f"`{LAUNCH}`"), "run.sh": 'torchrun --nproc_per_node=8 "$@"\n'},
    "a sentence on all programs": page(f"`{LAUNCH}`", "Use `torchrun` instead of `python` for several GPUs."),
    "a placeholder": page(f"`{LAUNCH}`", "    torchrun --nproc_per_node=8 your_script.py"),
    "a name for programs like it": page(f"`{LAUNCH}`", "    torchrun --nproc_per_node=8 retrieve_xx.py"),
    "a program that starts it": {
        **page(f"`{LAUNCH}`"),
        "start.py": 'import os\n\nos.system("accelerate launch "\n          "retrieve.py")\n',
    },
    "a program that starts any": {
        **page(f"`{LAUNCH}`"),
        "start.py": 'import subprocess, sys\n\nsubprocess.run(["torchrun", "--nproc_per_node=8", sys.argv[1]])\n',
    },
    "a sentence on it": page(f"`{LAUNCH}`", "`retrieve.py` runs on multiple GPUs."),
    "its own comment": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": f"# torchrun --nproc_per_node=8 retrieve.py\n{PROGRAM}",
    },
    "a comment with a name that it may have had": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": f"# {LAUNCH.replace('train', 'find')}\n{PROGRAM}",
    },
    "a text with a command": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": f"USAGE = '{LAUNCH}'\n{PROGRAM}",
    },
    "processes of its own": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": PROGRAM.replace(
            "    main(parser", "    torch.multiprocessing.spawn(main, nprocs=8)\n    main(parser"
        ),
    },
    "a variable with its name": {
        **page(f"`{LAUNCH}`"),
        "run.sh": "task=retrieve  # or train\ntorchrun --nproc_per_node=8 ${task}.py\n",
    },
    "a variable that is given": {
        **page(f"`{LAUNCH}`"),
        "run.sh": "task=${1:-train}\ntorchrun --nproc_per_node=8 ${task}.py\n",
    },
    "a variable of a loop": {
        **page(f"`{LAUNCH}`"),
        "run.sh": "for task in train $ALL; do\n  torchrun --nproc_per_node=8 ${task}.py\ndone\n",
    },
    "an argument": {**page(f"`{LAUNCH}`"), "run.sh": "torchrun --nproc_per_node=8 $1.py\n"},
    "a Trainer of a library": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": OWN_BASE,
        "base.py": "import lightning as L\n\n\nclass Base(L.Trainer):\n    pass\n",
    },
    "a Trainer whose base is no part of the project": {**page(f"`{LAUNCH}`"), "retrieve.py": OWN_BASE},
    "a Trainer that starts ranks": {
        **page(f"`{LAUNCH}`"),
        "retrieve.py": OWN_BASE,
        "base.py": "import subprocess\n\n\nclass Base:\n    def fit(self):\n        subprocess.Popen(['x'])\n",
    },
    "a program that imports it and uses it": {
        **page(f"`{LAUNCH}`"),
        "train.py": "import sys\n\nimport retrieve\n\nretrieve.main(sys)\n",
    },
    "a program that may use it by name": {
        **page(f"`{LAUNCH}`"),
        "train.py": "import sys\n\nimport retrieve\n\nglobals()[sys.argv[1]].main(sys)\n",
    },
    "several ranks in words alone": page("Training is distributed over several GPUs.", "    python train.py"),
    "an installed package": {
        **page(f"`{LAUNCH}`"),
        "setup.py": "from setuptools import find_packages, setup\n\nsetup(name='nets', packages=find_packages())\n",
        "retrieve.py": "print()\n",
        "nets/__init__.py": "",
        "nets/retrieve.py": PROGRAM,
    },
}


@pytest.mark.parametrize("name", SHOWN_ELSEWHERE)
def test_starts_of_other_programs_only(tmp_path, name):
    files = {**PROJECT, **SHOWN_ELSEWHERE[name]}
    assert severities_in(tmp_path, files, BOOK) == []
    [(rule, found)] = findings_in(tmp_path, files, BOOK, preview=True)
    assert (rule, found.severity.value) == ("CODE011", "info")


@pytest.mark.parametrize("name", MAY_BE_SEVERAL)
def test_what_may_start_a_program(tmp_path, name):
    assert severities_in(tmp_path, {**PROJECT, **MAY_BE_SEVERAL[name]}, BOOK) == [("CODE011", "warning")]


@pytest.mark.parametrize(
    ("start", "found"), [("", []), (f"{LAUNCH.replace('train', 'begin')}\n", [("CODE011", "warning")])]
)
def test_a_module_of_a_program(tmp_path, start, found):
    files = {
        **PARTS,
        **OTHER,
        **page("```", LAUNCH, f"{start}```"),
        "learn.py": PROGRAM.split("\n\nif __name__")[0],
        "begin.py": "import sys\nfrom learn import main\n\nmain(sys)\n",
    }
    assert severities_in(tmp_path, files, BOOK) == found
