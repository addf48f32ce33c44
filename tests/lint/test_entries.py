"""Places that depend on entries of configurations and on switches, by what the project gives them."""

from __future__ import annotations

import pytest

from tests.lint.test_one_process import HANG, HEAD, JOINS, found, indented

DEFAULTS = (
    "from yacs.config import CfgNode as CN\n\n_C = CN()\n_C.MODEL = CN()\n_C.MODEL.EMA = 0.0\n_C.MODEL.WEIGHTS = ''\n"
    "_C.OTHER = CN()\n_C.OTHER.EMA = 0.5\n"
)
EMA = HEAD + JOINS + "from config import cfg\n\nif cfg.MODEL.EMA > 0:\n" + indented(HANG)
KEPT = (
    f"{HEAD}{JOINS}from config import cfg\n\nif cfg.MODEL.EMA > 0:\n    ema = copy(net)\nelse:\n    ema = None\n"
    "if ema is not None:\n" + indented(HANG)
)
START = "torchrun --nproc_per_node=8 train.py --config configs/a.yaml\n"
OFF = {
    "run.sh": START,
    "config.py": DEFAULTS,
    "configs/a.yaml": "MODEL:\n  NAME: x\nOTHER:\n  EMA: 0.9\n",
    "train.py": EMA,
}


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, "info"),
        ({"train.py": KEPT}, "info"),
        ({"train.py": KEPT.replace("ema = None", "ema = net")}, "error"),
        ({"train.py": KEPT.replace("> 0", "== 0")}, "error"),
        ({"configs/b.yaml": "MODEL:\n  NAME: x\n  EMA: 0.9\n"}, "error"),
        ({"run.sh": "torchrun --nproc_per_node=8 train.py MODEL.EMA 0.9\n"}, "error"),
        ({"README.md": "torchrun --nproc_per_node=8 train.py MODEL.EMA 0.9\n"}, "error"),
        ({"tool.py": "cfg.MODEL.EMA = args.ema\n"}, "error"),
        ({"config.py": DEFAULTS.replace("yacs", "own")}, "error"),
        ({"config.py": DEFAULTS.replace("yacs.config", "fvcore.common.config")}, "info"),
        ({one: OFF[one].replace("EMA", "DISTILL") for one in OFF}, "info"),
        ({one: OFF[one].replace("EMA", "DIST") for one in OFF}, "error"),
        ({"other/configs/b.yaml": "MODEL:\n  EMA: 0.9\n"}, "error"),
        (
            {
                "other/configs/b.yaml": "MODEL:\n  EMA: 0.9\n",
                "other/run.py": "p = argparse.ArgumentParser()\nif __name__ == '__main__':\n    print()\n",
            },
            "info",
        ),
    ],
)
def test_a_branch_of_an_entry(tmp_path, files, severity):
    hits = found(tmp_path, {**OFF, **files})
    assert [one for one in hits if one[0] == "CODE005"] == [("CODE005", severity)]


LOADS = (
    f"{HEAD}{JOINS}from config import cfg\n\nnet = build().cuda()\nif os.path.isfile(cfg.MODEL.WEIGHTS):\n"
    "    net.load_state_dict(torch.load(cfg.MODEL.WEIGHTS))\n"
)


@pytest.mark.parametrize(
    ("files", "severity"),
    [({}, "info"), ({"configs/a.yaml": "MODEL:\n  WEIGHTS: last.pth\n"}, "warning")],
)
def test_weights_that_no_configuration_gives(tmp_path, files, severity):
    hits = found(tmp_path, {**OFF, "train.py": LOADS, **files})
    assert [one for one in hits if one[0] == "CODE001"] == [("CODE001", severity)]


CHOOSES = (
    f"{HEAD}import json\n\n{JOINS}config = json.load(open(args.config))\n"
    "if args.data is not None:\n    config['data'] = args.data\nif config['data'] == 'faces':\n" + indented(HANG)
)
CHOSEN = {"train.py": CHOOSES, "configs/a.json": '{\n  "data": "cats"\n}\n', "run.sh": START}


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, "info"),
        ({"configs/b.json": '{\n  "data": "faces"\n}\n'}, "error"),
        ({"run.sh": START.replace("\n", " --data faces\n")}, "error"),
        ({"README.md": "torchrun --nproc_per_node=8 train.py --data faces\n"}, "error"),
        ({"tool.py": "config['data'] = 'faces'\n"}, "error"),
        ({"tool.py": "p.add_argument('--data', default='faces')\n"}, "error"),
        ({"configs/a.json": "{}\n"}, "error"),
        ({"train.py": CHOOSES.replace("== 'faces'", "== 'cats'")}, "error"),
        ({"train.py": CHOOSES.replace("== 'faces'", "!= 'faces'")}, "error"),
    ],
)
def test_a_branch_of_a_choice(tmp_path, files, severity):
    hits = found(tmp_path, {**CHOSEN, **files})
    assert [one for one in hits if one[0] == "CODE005"] == [("CODE005", severity)]


SAMPLES = f"""\
import argparse
{HEAD}from data import data, own

parser = argparse.ArgumentParser()
parser.add_argument('--repeated-aug', action='store_true')
parser.add_argument('--no-repeated-aug', action='store_false', dest='repeated_aug')
parser.set_defaults(repeated_aug=True)
parser.add_argument('--dist-eval', action='store_true', default=False)
args = parser.parse_args()
{JOINS}if BRANCH:
    sampler = own(data)
else:
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=7, rank=dist.get_rank())
"""


@pytest.mark.parametrize(
    ("branch", "start", "severity"),
    [
        ("args.repeated_aug", START, "info"),
        ("args.repeated_aug", START.replace("\n", " --no-repeated-aug\n"), "error"),
        ("not args.dist_eval", START, "error"),
        ("data", START, "error"),
    ],
)
def test_a_sampler_in_the_branch_of_a_switch(tmp_path, branch, start, severity):
    files = {"train.py": SAMPLES.replace("BRANCH", branch), "run.sh": start, "tool.py": ""}
    hits = found(tmp_path, files)
    assert [one for one in hits if one[0] == "CODE012"] == [("CODE012", severity)]


def test_a_sampler_for_an_option_that_is_off(tmp_path):
    text = SAMPLES.replace("if BRANCH:\n    sampler = own(data)\nelse:", "if args.dist_eval:")
    files = {"train.py": text, "run.sh": START, "tool.py": ""}
    assert [one for one in found(tmp_path, files) if one[0] == "CODE012"] == [("CODE012", "info")]
    files["run.sh"] = START.replace("\n", " --dist-eval\n")
    assert [one for one in found(tmp_path, files) if one[0] == "CODE012"] == [("CODE012", "error")]
