"""Outdated calls of Lightning in code that a project does not reach, or that is for an older release."""

from __future__ import annotations

import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE022", "CODE009", "CODE041")))
HEAD = "import lightning.pytorch as pl\n\n"
NET = f"{HEAD}class Net(pl.LightningModule):\n    def validation_epoch_end(self, outputs):\n        pass\n"
TESTED = NET.replace("validation_epoch_end", "test_epoch_end")
FITS = f"{HEAD}from net import Net\n\npl.Trainer(devices=2).fit(Net())\n"
RESTORES = "from net import Net\n\nnet = Net.load_from_checkpoint('last.ckpt').eval()\n"
COPY = "from lightning.pytorch.plugins import DDPPlugin\n\nclass Own:\n    plugin = DDPPlugin\n"
FINDS = f"{HEAD}from importlib import import_module\n\nmodule, name = config[\"target\"].rsplit('.', 1)\n" + (
    "found = getattr(import_module(module), name)\n"
)
OLD = NET.replace("    def", "    # removed in 2.0\n    def")


def found(folder, files, given=(("lightning", "2.6.6"),)):
    for name, text in files.items():
        (folder / name).write_text(text)
    asked = LintRequest(BOOK, Settings(), {one.id: one.family for one in BOOK.rules}, Releases(dict(given)))
    report = build_report(lint_paths([folder], asked), asked, started=time.time())
    assert not [result for result in report.results if result.crash]
    return [(result.id, one.severity.value) for result in report.results for one in result.findings]


REACHED = {
    "a module that a Trainer gets": {"net.py": NET, "train.py": FITS},
    "a module that another one derives from": {
        "net.py": NET,
        "wide.py": "from net import Net\n\nclass Wide(Net):\n    pass\n",
    },
    "a module that the Trainer of another module of the project gets": {
        "net.py": NET,
        "tools.py": f"{HEAD}def fit(net):\n    pl.Trainer(devices=2).fit(net)\n",
        "train.py": "from net import Net\nfrom tools import fit\n\nif __name__ == '__main__':\n    fit(Net())\n",
    },
    "a hook of tests, and a test": {"net.py": TESTED, "train.py": FITS.replace("fit(", "test(")},
    "a copy that is imported": {"own.py": COPY, "train.py": "from own import Own\n\nOwn()\n"},
    "a file alone": {"net.py": NET},
    "a copy that a literal names": {
        "own.py": COPY,
        "train.py": "import importlib\n\nimportlib.import_module('own').Own()\n",
    },
    "a copy whose name a literal begins": {
        "own.py": COPY,
        "train.py": "import importlib\n\nimportlib.import_module('o' + sys.argv[1]).Own()\n",
    },
    "what is found by its name": {
        "net.py": NET,
        "train.py": "import importlib\n\nNet = getattr(importlib.import_module(name), kind)\n",
    },
    "what a configuration may name in another way": {
        "net.py": NET,
        "train.py": f"{FINDS}Plugin = import_module(sys.argv[1])\n".replace('"target"', "0"),
        "net.yaml": "target: data.Set\n",
        "data.py": "class Set:\n    pass\n",
    },
    "what a configuration names": {
        "net.py": NET,
        "train.py": f"{FINDS}pl.Trainer().fit(found)\n",
        "net.yaml": "model:\n  target: net.Net\n",
    },
    "what a page shows": {"net.py": NET, "train.py": "print()\n", "README.md": "Give `net.Net` to a Trainer.\n"},
}
OF_HYDRA = (
    f"import hydra\n{HEAD}@hydra.main(config_path='.', config_name='train.yaml')\ndef main(cfg):\n"
    "    pl.Trainer(devices=2, weights_summary=None)\n\nif __name__ == '__main__':\n    main()\n"
)
REACHED |= {
    "a program whose configuration is there": {"own.py": OF_HYDRA, "train.yaml": "a: 1\n", "use.py": "print()\n"},
    "a program without the folder of its configurations": {"own.py": OF_HYDRA, "use.py": "print()\n"},
    "a program whose configuration a command selects": {
        "own.py": OF_HYDRA,
        "other.yaml": "a: 1\n",
        "run.sh": "python own.py --config-name other\n",
    },
    "a program whose configuration is in a store": {
        "own.py": OF_HYDRA,
        "other.yaml": "a: 1\n",
        "use.py": "ConfigStore.instance().store(name='train', node=node)\n",
    },
}
NOT_REACHED = {
    "a program whose configuration is not there": {"own.py": OF_HYDRA, "other.yaml": "a: 1\n", "use.py": "print()\n"},
    "a copy that nothing imports and that says what it is": {
        "own.py": f'{COPY}\nif __name__ == "__main__":\n    print("plugins")\n',
        "train.py": "print()\n",
        "requirements.txt": "lightning\n",
    },
    "a module in a project without a Trainer": {
        "net.py": NET,
        "use.py": "from net import Net\n\nif __name__ == '__main__':\n    print(Net())\n",
    },
    "a module in a project with a Trainer of another library": {
        "net.py": NET,
        "trainer.py": "class Trainer:\n    pass\n",
        "use.py": "from net import Net\nfrom trainer import Trainer\n\nif __name__ == '__main__':\n    Trainer(Net)\n",
    },
    "a module that is only restored": {"net.py": NET, "use.py": RESTORES},
    "one that is restored, beside what is found by its name": {
        "net.py": NET,
        "use.py": f"import importlib\n{RESTORES}importlib.import_module(kind)\n",
    },
    "a module that nothing names": {"net.py": NET, "use.py": "print()\n"},
    "a hook of tests, and no test": {"net.py": TESTED, "train.py": FITS},
    "a copy that nothing imports": {"own.py": COPY, "train.py": "print()\n", "requirements.txt": "lightning\n"},
    "a function that nothing calls, beside arguments that are read by name": {
        "train.py": f"{HEAD}def others(opt):\n    parser = pl.Trainer.add_argparse_args(parser)\n"
        "    return [one for one in vars(args) if getattr(opt, one)]\n\n"
        "if __name__ == '__main__':\n    # others(opt)\n    pl.Trainer(**vars(trainer_opt))\n",
        "data.py": "",
    },
    "a copy that no configuration names, where others are found by theirs": {
        "own.py": COPY,
        "train.py": f"{FINDS}pl.Trainer().fit(found)\n",
        "net.yaml": "model:\n  target: data.Set\n",
        "requirements.txt": "lightning\n",
        "data.py": "class Set:\n    pass\n",
    },
    "a class from which only one derives that nothing makes, beside classes of configurations": {
        "net.py": f"{NET}\nclass Wide(Net):\n    pass\n",
        "use.py": "from net import Wide\n\nif isinstance(net, Wide):\n    print(net)\n",
        "train.py": f"{FINDS}pl.Trainer().fit(found)\n\nif __name__ == '__main__':\n    run()\n",
        "net.yaml": "model:\n  target: data.Set\n",
        "data.py": "class Set:\n    pass\n",
    },
    "a copy, where only attributes are found by name": {
        "own.py": COPY,
        "train.py": "import data\n\nfound = getattr(models, kind)\n",
        "requirements.txt": "lightning\n",
        "data.py": "",
    },
    "a copy, where another distribution is imported by name": {
        "own.py": COPY,
        "train.py": "import importlib\n\nfound = importlib.import_module('torch.optim').Adam\n",
        "requirements.txt": "lightning\n",
        "data.py": "",
    },
    "a copy, where a literal names another module": {
        "own.py": COPY,
        "train.py": "import importlib\n\nfound = importlib.import_module('data').Set\nrunpy.run_module('data')\n",
        "requirements.txt": "lightning\n",
        "data.py": "",
    },
    "a copy that sets up its libraries": {
        "own.py": f"{COPY}\nOmegaConf.register_new_resolver('id', print)\nsns.set()\n",
        "train.py": "print()\n",
        "requirements.txt": "lightning\n",
    },
    "a hook that is known to be gone": {"net.py": OLD, "train.py": FITS},
}


@pytest.mark.parametrize("name", REACHED)
def test_what_is_reached_is_an_error(tmp_path, name):
    assert found(tmp_path, REACHED[name]) == [("CODE022", "error")]


@pytest.mark.parametrize("name", NOT_REACHED)
def test_what_is_not_reached_is_left_out(tmp_path, name):
    assert found(tmp_path, NOT_REACHED[name]) == []


OLDER = (
    "# pip install pytorch-lightning==1.9.5\n",
    '"""For PyTorch Lightning version < 2.0.0."""\n',
    "# tested with pytorch-lightning 1.6\n",
)
OTHERS = (
    "# pip install lightning>=2.1\n",
    "# changed for lightning 1.9\n",
    "# lightning 1.0 times faster\n",
)


@pytest.mark.parametrize("comment", OLDER)
def test_a_file_may_say_that_it_is_for_an_older_release(tmp_path, comment):
    assert found(tmp_path, {"net.py": comment + NET, "train.py": FITS}) == []


@pytest.mark.parametrize("comment", OTHERS)
def test_other_sentences_pin_nothing(tmp_path, comment):
    assert found(tmp_path, {"net.py": comment + NET, "train.py": FITS}) == [("CODE022", "error")]


def test_a_notebook_may_install_an_older_release(tmp_path):
    cell = '{{"cell_type": "code", "source": ["!pip install lightning=={}\\n", "{}"]}}'
    code = NET.replace("\n", "\\n")
    pages = {
        one: f'{{"cells": [{cell.format(one, code)}], "metadata": {{}}, "nbformat": 4}}' for one in ("1.9.5", "2.1")
    }
    (tmp_path / "old").mkdir()
    assert found(tmp_path / "old", {"a.ipynb": pages["1.9.5"]}) == []
    (tmp_path / "new").mkdir()
    assert found(tmp_path / "new", {"a.ipynb": pages["2.1"]}) == [("CODE022", "error")]


@pytest.mark.parametrize(
    ("requirements", "newest"),
    [
        ("  - pytorch==1.9.1=py3.9_cuda11.1_cudnn8.0.5_0\n  - python=3.9.7\n", "1.8"),
        ("  - python=3.7\n  - pytorch\n", "1.9"),
        ("  - pytorch=1.12\n  - python=3.10\n", "2.1"),
        ("  - pytorch::pytorch=1.10.2\n  - lightning<1.7\n", "1.6"),
    ],
)
def test_the_torch_and_the_python_of_a_project_limit_its_lightning(tmp_path, requirements, newest):
    (tmp_path / "environment.yml").write_text(f"dependencies:\n{requirements}")
    assert Releases({}).of_project(tmp_path / "train.py", tmp_path)["lightning"] == newest


def test_commands_of_a_page_do_not_limit_it(tmp_path):
    (tmp_path / "INSTALL.md").write_text("```\nconda install -c pytorch pytorch=1.8.0\n```\n")
    assert Releases({}).of_project(tmp_path / "train.py", tmp_path)["lightning"] == Releases({})["lightning"]


def test_a_torch_that_fits_leaves_the_installed_lightning(tmp_path):
    (tmp_path / "environment.yml").write_text("dependencies:\n  - pytorch=2.4\n  - python=3.11\n")
    assert Releases({}).of_project(tmp_path / "train.py", tmp_path)["lightning"] == Releases({})["lightning"]


WRAPS = """\
import torch

class Run:
    def __init__(self, net, parallel=False):
        self.net = net
        if parallel and torch.cuda.device_count() > 1:
            self.net = torch.nn.DataParallel(net)

    def step(self, x):
        self.net(x).sum().backward()
"""


def test_threads_under_an_option_that_nothing_enables(tmp_path):
    assert found(tmp_path, {"run.py": WRAPS, "main.py": "from run import Run\n\nRun(net)\n"}) == []
    assert found(tmp_path, {"main.py": "from run import Run\n\nRun(net, parallel=True)\n"}) == [("CODE009", "warning")]


TRACKS = """\
import mlflow
import torch.distributed as dist

dist.init_process_group("nccl")
mlflow.start_run()
model = torch.nn.parallel.DistributedDataParallel(net)
"""


def test_processes_of_a_job_of_azure_share_a_run(tmp_path):
    assert found(tmp_path, {"train.py": TRACKS, "other.py": "print()\n"}) == [("CODE041", "warning")]
    assert found(tmp_path, {"submit.py": "from azure.ai.ml import command\n"}) == []


PARALLEL = """\
import os
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--gpus", default="2")
args = parser.parse_args()
SETS
model = torch.nn.DataParallel(net)
model(x).sum().backward()
"""
SETS = 'os.environ["CUDA_VISIBLE_DEVICES"] = '


@pytest.mark.parametrize(
    ("sets", "others", "expected"),
    [
        (f"{SETS}'0'", {}, []),
        (f"{SETS}'0,1'", {}, [("CODE009", "warning")]),
        (f"{SETS}args.gpus", {}, []),
        (f"{SETS}args.gpus", {"run.sh": "#!/bin/bash\npython main.py --gpus 0,1\n"}, [("CODE009", "warning")]),
        (f"import settings\n{SETS}settings.device", {"settings.py": "device = '0'\n"}, []),
        (f"import settings\n{SETS}settings.device", {"settings.py": "device = '0,1'\n"}, [("CODE009", "warning")]),
        ("", {"run.sh": "#!/bin/bash\nCUDA_VISIBLE_DEVICES=1 python main.py\n"}, []),
        ("", {"run.sh": "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=1\npython main.py\n"}, []),
        ("", {"run.sh": "#!/bin/bash\nCUDA_VISIBLE_DEVICES=1,2 python main.py\n"}, [("CODE009", "warning")]),
        ("", {"README.md": "CUDA_VISIBLE_DEVICES=0 python main.py\npython main.py\n"}, [("CODE009", "warning")]),
    ],
)
def test_threads_where_one_gpu_is_visible(tmp_path, sets, others, expected):
    assert found(tmp_path, {"main.py": PARALLEL.replace("SETS", sets), "net.py": "import torch\n"} | others) == expected


@pytest.mark.parametrize(
    ("name", "text", "release"),
    [
        ("poetry.lock", '[[package]]\nname = "torch"\nversion = "1.13.1"\n', "1.13.1"),
        ("uv.lock", '[[package]]\nname = "torch"\nversion = "2.1.0+cu118"\n', "2.1.0"),
        (
            "Pipfile.lock",
            '{\n    "torch": {\n        "hashes": ["sha256:1"],\n        "version": "==1.9.0"\n    }\n}',
            "1.9.0",
        ),
        ("Dockerfile", "FROM pytorch/pytorch:1.12.1-cuda11.3-cudnn8-runtime\n", "1.12.1"),
        ("Dockerfile", "FROM host.com:5000/pytorch-training:1.13.1-gpu-py39\n", "1.13.1"),
        ("Dockerfile", "FROM mine/unicore:0.0.1-pytorch1.12.1-cuda11.6-rdma\n", "1.12.1"),
        ("README.md", "    conda install pytorch torchvision cudatoolkit=11.3 -c pytorch\n", "1.12"),
        ("environment.yml", "channels:\n  - pytorch\ndependencies:\n  - pytorch\n  - cudatoolkit=11.1\n", "1.10"),
        ("environment.yml", "channels:\n  - pytorch\ndependencies:\n  - pytorch\n  - pytorch-cuda=11.6\n", "1.13"),
        ("setup_env.sh", "CUDA=11.7\nconda install pytorch pytorch-cuda=${CUDA} -c pytorch\n", "2.0"),
        ("README.md", "    conda install pytorch pytorch-cuda=12.1 -c pytorch -c nvidia\n", "2.5"),
    ],
)
def test_releases_of_locks_images_and_cudatoolkit(tmp_path, name, text, release):
    (tmp_path / name).write_text(text)
    (tmp_path / "requirements.txt").write_text("numpy\n")
    assert Releases({}).of_project(tmp_path / "train.py", tmp_path)["torch"] == release


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "    conda install cudatoolkit=11.3\n    pip install torch\n"),
        ("README.md", "    conda install pytorch-cuda=11.7 -c nvidia\n    pip install torch\n"),
        ("setup_env.sh", "conda install pytorch pytorch-cuda=${CUDA} -c pytorch\n"),
        ("environment.yml", "channels:\n  - pytorch\ndependencies:\n  - cudatoolkit=11.3\n  - pip:\n    - torch\n"),
        ("Dockerfile", "FROM mine/pytorch:1.12.1\n"),
    ],
)
def test_a_cudatoolkit_beside_wheels_limits_nothing(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert Releases({}).of_project(tmp_path / "train.py", tmp_path)["torch"] == Releases({})["torch"]
