"""CODE044: a backslash with a blank behind it ends a command."""

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
        ("echo 'torchrun train.py \\ '\necho \\ \n    --lr\n", []),
    ],
)
def test_a_blank_behind_a_backslash_ends_a_command(tmp_path, text, severities):
    found = severities_in(tmp_path, {"job.sh": f"#!/bin/bash\n{text}"}, BOOK)
    assert [severity for _, severity in found] == severities
