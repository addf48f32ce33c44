"""CODE044: a command ends before the lines that were meant to continue it."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE044"))
CUT = "torchrun --nproc-per-node 4 train.py \\{}\n    --lr 0.1\n"


@pytest.mark.parametrize(
    ("text", "severities"),
    [
        (CUT.format(" "), ["error"]),
        (CUT.format("\t "), ["error"]),
        (CUT.format("  # the rate"), ["error"]),
        (CUT.format(""), []),
        (CUT.format(" ").replace("    --lr 0.1", "+lr=0.1"), ["error"]),
        (CUT.format(" ").replace("    --lr 0.1", "    2>&1 | tee log"), ["warning"]),
        (CUT.format(" ").replace("    --lr 0.1", "echo done"), ["warning"]),
        (CUT.format(" ").replace("    --lr 0.1", ""), ["warning"]),
        (CUT.format(" ").replace("torchrun --nproc-per-node 4", "python"), []),
        (CUT.format(" ").replace("train.py", "$ARGS"), ["error"]),
        ("torchrun --nproc-per-node 4 \\ \n\ntrain.py\n", ["error"]),
        ("torchrun --nproc-per-node 4 $ARGS \\ \n", ["warning"]),
        ("accelerate launch --main_process_port 8888\\ \n    train.py\n", ["error"]),
        (CUT.format("\n    # --seed 1"), ["error"]),
        (CUT.format("\n    # --seed 1 \\\n    # --resume \\"), ["error"]),
        (CUT.format("\n# the rate is as in the paper\n#").replace("    --lr", "--lr"), ["error"]),
        ("torchrun --nproc-per-node 4 train.py \\\n    --lr 0.1 \\\n    # --seed 1\necho done\n", []),
        ("torchrun --nproc-per-node 4 \\\n# the script\ntrain.py\n", ["error"]),
        ("# torchrun train.py \\\n#    --seed 1\n    --lr 0.1\n", []),
        ("PYTHONPATH=. \\\n# as in the paper\n  torchrun train.py\n", []),
        (CUT.replace("\\{}", ""), ["error"]),
        (CUT.replace("\\{}", "| tee log"), ["error"]),
        (CUT.replace("\\{}", "\n# the rate"), ["error"]),
        (f"case $1 in\n  -t|--train)\n    {CUT.replace('{}', '')}    ;;\n  --help)\n    usage ;;\nesac\n", []),
        ("case $1 in\n  t)\n    torchrun train.py ;;\n  --lr|--rate) usage ;;\nesac\n", []),
        (CUT.format("").replace("train.py", "train.py --data <PATH>"), []),
        ("echo 'torchrun train.py \\ '\necho \\ \n    --lr\n", []),
    ],
)
def test_what_ends_a_command(tmp_path, text, severities):
    found = severities_in(tmp_path, {"job.sh": f"#!/bin/bash\n{text}"}, BOOK)
    assert [severity for _, severity in found] == severities
