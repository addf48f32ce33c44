"""Places that depend on entries of yacs, by the defaults, configurations and commands of the project."""

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
