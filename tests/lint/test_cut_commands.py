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


GPUS = "CUDA_VISIBLE_DEVICES=4,5,6,7"
START = "torchrun --nproc-per-node 4 train.py\n"


@pytest.mark.parametrize(
    ("files", "severities"),
    [
        ({"job.sh": f"{GPUS}\n{START}"}, ["warning"]),
        ({"job.sh": f"{GPUS.replace('4,5,6,7', '0,1,2,3')}\n{START}"}, ["info"]),
        ({"job.sh": f"TORCH_DISTRIBUTED_DEBUG=DETAIL\n{START}"}, ["info"]),
        ({"job.sh": f"NCCL_SOCKET_IFNAME=ib0\n{START}"}, ["warning"]),
        ({"job.sh": f"set {GPUS}\n{START}"}, ["warning"]),
        ({"job.sh": f"export NCCL_DEBUG=WARN\nset {GPUS}\n"}, ["warning"]),
        ({"job.sh": f"set OMP_NUM_THREADS=8\n{START}"}, ["info"]),
        ({"job.sh": f"set -e {GPUS}\n{START}"}, []),
        ({"job.sh": f"cat > run.bat <<EOF\nset {GPUS}\nEOF\n{START}"}, []),
        ({"job.sh": f"{GPUS} {START}"}, []),
        ({"job.sh": f"export {GPUS}\n{START}"}, []),
        ({"job.sh": f"{GPUS}\n{START}export CUDA_VISIBLE_DEVICES\n"}, []),
        ({"job.sh": f"set -a\n{GPUS}\n{START}"}, []),
        ({"job.sh": f"source env.sh\n{GPUS}\n{START}"}, []),
        ({"job.sh": f"source venv/bin/activate\n{GPUS}\n{START}"}, ["warning"]),
        ({"job.sh": f"{START}{GPUS}\n"}, []),
        ({"job.sh": f"module load cuda\n{GPUS}\n{START}"}, []),
        ({"job.sh": f"#SBATCH --gpus=8\n{GPUS}\n{START}"}, []),
        ({"job.sh": f"{GPUS}\n{START}", "all.sh": "export CUDA_VISIBLE_DEVICES=0\nbash job.sh\n"}, []),
        ({"job.sh": f"{GPUS}\n{START}", "all.sh": "bash job.sh\n"}, ["warning"]),
        ({"job.sh": f"{GPUS}\n{START}", "all.sh": "export RATE=1\nsource job.sh\n"}, []),
    ],
)
def test_a_variable_that_no_program_gets(tmp_path, files, severities):
    texts = {name: f"#!/bin/bash\n{text}" for name, text in files.items()}
    texts["train.py"] = "import torch\n"
    found = severities_in(tmp_path, texts, BOOK)
    assert [severity for _, severity in found] == severities
